//go:build unix

// Package statedir keeps the records of sandboxes that live as directories on
// this host. Each sandbox has a directory named by its key with a state file in
// it; what the agent may write lies beside that file, never around it. A record
// is the proof that a backend made a sandbox, so nothing without one is removed.
package statedir

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"syscall"
	"time"

	"github.com/aisandbox-go/aisandbox/provider"
)

const (
	stateFile = "state.json"
	stateMax  = 1 << 20
	stripes   = 64
)

// Dir is the directory of one backend's sandboxes. Its methods may be called
// concurrently, by several processes too.
type Dir struct{ path string }

// Default returns where a backend keeps its sandboxes when no option says so:
// below XDG_STATE_HOME where that is set, else below ~/.local/state, for root
// below /var/lib.
func Default(backend string) (string, error) {
	base := os.Getenv("XDG_STATE_HOME")
	switch {
	case filepath.IsAbs(base):
	case os.Geteuid() == 0:
		base = "/var/lib"
	default:
		home, err := os.UserHomeDir()
		if err != nil {
			return "", fmt.Errorf("no place for state: set HOME, XDG_STATE_HOME or the option BaseDir: %w", err)
		}
		base = filepath.Join(home, ".local", "state")
	}
	return filepath.Join(base, "aisandbox", backend), nil
}

// Open makes the directory where it is missing, with mode perm, and refuses one
// that somebody else could have filled with records.
func Open(path string, perm fs.FileMode) (*Dir, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}
	if err := os.Mkdir(path, perm); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	fi, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	st, _ := fi.Sys().(*syscall.Stat_t)
	switch {
	case !fi.IsDir():
		return nil, fmt.Errorf("%s is not a directory: %w", path, provider.ErrInvalid)
	case st != nil && int(st.Uid) != os.Geteuid():
		return nil, fmt.Errorf("%s belongs to uid %d; choose a directory of your own: %w", path, st.Uid, provider.ErrInvalid)
	case fi.Mode()&0o022 != 0 && fi.Mode()&fs.ModeSticky == 0:
		if err := os.Chmod(path, fi.Mode().Perm()&^0o022); err != nil {
			return nil, err
		}
	}
	return &Dir{path}, nil
}

// Path is the directory's absolute path.
func (d *Dir) Path() string { return d.path }

// Of is the path of a sandbox's directory.
func (d *Dir) Of(key string) string { return filepath.Join(d.path, key) }

var keyRE = regexp.MustCompile(`^[a-z0-9]{1,40}$`)

// ValidKey reports whether key can name a sandbox.
func ValidKey(key string) bool { return keyRE.MatchString(key) }

// Lock takes the lock of a key, against other goroutines and other processes.
func (d *Dir) Lock(ctx context.Context, key string) (unlock func(), err error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	h := fnv.New32a()
	h.Write([]byte(key))
	// The files are never removed: a lock on a removed file excludes nobody.
	name := filepath.Join(d.path, ".lock"+strconv.Itoa(int(h.Sum32()%stripes)))
	f, err := os.OpenFile(name, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	for pause := time.Millisecond; ; pause = min(2*pause, 20*time.Millisecond) {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return func() { f.Close() }, nil
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) && !errors.Is(err, syscall.EINTR) {
			f.Close()
			return nil, fmt.Errorf("lock %s: %w", name, err)
		}
		select {
		case <-ctx.Done():
			f.Close()
			return nil, context.Cause(ctx)
		case <-time.After(pause):
		}
	}
}

// Claim makes the directory of a new sandbox. One that exists with no record in
// it and is not empty is somebody else's: [provider.ErrConflict].
func (d *Dir) Claim(key string, perm fs.FileMode) error {
	p := d.Of(key)
	err := os.Mkdir(p, perm)
	if errors.Is(err, fs.ErrExist) && os.Remove(p) == nil {
		err = os.Mkdir(p, perm)
	}
	if errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("%s: %w", p, provider.ErrConflict)
	}
	return err
}

// Save writes the record of a sandbox whose directory exists, atomically.
func (d *Dir) Save(key string, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(d.Of(key), ".state-*")
	if err != nil {
		return err
	}
	_, err = f.Write(append(b, '\n'))
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), filepath.Join(d.Of(key), stateFile))
	}
	if err != nil {
		os.Remove(f.Name())
	}
	return err
}

// Load reads a record. Without one the error is fs.ErrNotExist.
func (d *Dir) Load(key string, v any) error {
	name := filepath.Join(d.Of(key), stateFile)
	fi, err := os.Lstat(name)
	if err != nil {
		return err
	}
	if !fi.Mode().IsRegular() || fi.Size() > stateMax {
		return fmt.Errorf("%s is no state file: %w", name, provider.ErrInvalid)
	}
	b, err := os.ReadFile(name)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(b, v); err != nil {
		return fmt.Errorf("%s: %w: %w", name, err, provider.ErrInvalid)
	}
	return nil
}

// Keys returns the keys that have a directory; not all need have a record.
func (d *Dir) Keys() ([]string, error) {
	es, err := os.ReadDir(d.path)
	if err != nil {
		return nil, err
	}
	var keys []string
	for _, e := range es {
		if e.IsDir() && ValidKey(e.Name()) {
			keys = append(keys, e.Name())
		}
	}
	return keys, nil
}

// Forget removes the record alone. Missing is success.
func (d *Dir) Forget(key string) error {
	err := os.Remove(filepath.Join(d.Of(key), stateFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// Matches reports whether have holds every wanted label.
func Matches(have, want map[string]string) bool {
	for k, v := range want {
		if got, ok := have[k]; !ok || got != v {
			return false
		}
	}
	return true
}

// removeAttempts and removePause are of spec 05 §5.2.
const (
	removeAttempts = 10
	removePause    = 50 * time.Millisecond
)

// Remove removes a tree, again for a while when something is still busy in it.
// Directories that the agent made unwritable are opened first. Missing is success.
func Remove(ctx context.Context, path string) error {
	for try := 1; ; try++ {
		err := os.RemoveAll(path)
		if err == nil {
			return nil
		}
		busy := errors.Is(err, syscall.EBUSY) || errors.Is(err, syscall.ENOTEMPTY)
		denied := errors.Is(err, fs.ErrPermission)
		if try == removeAttempts || !busy && !denied {
			return fmt.Errorf("remove %s: %w", path, err)
		}
		if denied {
			unlockTree(path)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("remove %s: %w", path, context.Cause(ctx))
		case <-time.After(time.Duration(try) * removePause):
		}
	}
}

func unlockTree(path string) {
	root, err := os.OpenRoot(path)
	if err != nil {
		_ = os.Chmod(path, 0o700)
		if root, err = os.OpenRoot(path); err != nil {
			return
		}
	}
	defer root.Close()
	var walk func(dir string)
	walk = func(dir string) {
		_ = root.Chmod(dir, 0o700)
		f, err := root.Open(dir)
		if err != nil {
			return
		}
		es, _ := f.ReadDir(-1)
		f.Close()
		for _, e := range es {
			if e.IsDir() {
				walk(filepath.Join(dir, e.Name()))
			}
		}
	}
	walk(".")
}
