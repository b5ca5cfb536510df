//go:build linux

package inside

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strings"
	"sync"
	"syscall"
)

// errOutside is what a name beyond the roots gets.
var errOutside = fmt.Errorf("outside the sandbox root: %w", fs.ErrPermission)

// root is a directory that file operations may reach, and nothing beyond it.
type root struct {
	path    string
	private bool // made on first use, for the agent alone

	mu  sync.Mutex
	dir *os.Root
}

// roots are all of them, the workspace first.
type roots struct {
	list  []*root
	owner *account // who owns what is made; nil leaves it to the kernel
}

func newRoots(owner *account, workspace string, private ...string) *roots {
	r := &roots{owner: owner, list: []*root{{path: path.Clean(workspace)}}}
	for _, p := range private {
		if p != "" {
			r.list = append(r.list, &root{path: path.Clean(p), private: true})
		}
	}
	return r
}

// find returns the directory and the name in it for a name as the host gives it.
func (r *roots) find(op, name string) (*os.Root, string, error) {
	fail := func(err error) (*os.Root, string, error) {
		return nil, "", &fs.PathError{Op: op, Path: name, Err: err}
	}
	if name == "" {
		return fail(syscall.ENOENT)
	}
	if strings.IndexByte(name, 0) >= 0 {
		return fail(syscall.EINVAL)
	}
	full := name
	if !path.IsAbs(full) {
		full = r.list[0].path + "/" + full
	}
	full = path.Clean(full)
	var best *root
	for _, c := range r.list {
		if (full == c.path || c.path == "/" || strings.HasPrefix(full, c.path+"/")) && (best == nil || len(c.path) > len(best.path)) {
			best = c
		}
	}
	if best == nil {
		return fail(errOutside)
	}
	dir, err := best.open(r.owner)
	if err != nil {
		return fail(err)
	}
	rel := strings.TrimPrefix(strings.TrimPrefix(full, best.path), "/")
	if rel == "" {
		rel = "."
	}
	return dir, rel, nil
}

// open returns the directory, again if it was removed and made anew.
func (r *root) open(owner *account) (*os.Root, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.dir != nil {
		st, err := r.dir.Stat(".")
		if err == nil && st.Sys().(*syscall.Stat_t).Nlink > 0 {
			return r.dir, nil
		}
		// Not closed: an operation may be using it. The finalizer does.
		r.dir = nil
	}
	if r.private {
		if err := makePrivate(r.path, owner); err != nil {
			return nil, err
		}
	}
	d, err := os.OpenRoot(r.path)
	if err != nil {
		var pe *fs.PathError
		if errors.As(err, &pe) {
			return nil, pe.Err
		}
		return nil, err
	}
	r.dir = d
	return d, nil
}

// makePrivate makes a directory that only its owner may enter. One that exists
// must be such a directory already: others may write to the one above it.
func makePrivate(dir string, owner *account) error {
	uid := os.Getuid()
	if owner != nil {
		uid = owner.uid
	}
	if err := os.MkdirAll(path.Dir(dir), 0o755); err != nil {
		return err
	}
	err := os.Mkdir(dir, 0o700)
	if err == nil {
		if owner != nil {
			return os.Lchown(dir, owner.uid, owner.gid)
		}
		return nil
	}
	if !errors.Is(err, fs.ErrExist) {
		return err
	}
	st, err := os.Lstat(dir)
	if err != nil {
		return err
	}
	sys := st.Sys().(*syscall.Stat_t)
	if !st.IsDir() || int(sys.Uid) != uid && sys.Uid != 0 || st.Mode().Perm()&0o022 != 0 {
		return fmt.Errorf("%s exists and is not a directory of user %d alone: %w", dir, uid, fs.ErrPermission)
	}
	return nil
}

// own gives a file to the agent's user, where the guest is another one.
func (r *roots) own(dir *os.Root, name string) error {
	if r.owner == nil {
		return nil
	}
	return dir.Lchown(name, r.owner.uid, r.owner.gid)
}

// mkdirAll makes a directory and its parents, each owned by the agent's user.
func (r *roots) mkdirAll(dir *os.Root, name string) error {
	if name == "." {
		return nil
	}
	err := dir.Mkdir(name, 0o755)
	if errors.Is(err, fs.ErrNotExist) {
		if err := r.mkdirAll(dir, path.Dir(name)); err != nil {
			return err
		}
		err = dir.Mkdir(name, 0o755)
	}
	switch {
	case err == nil:
		return r.own(dir, name)
	case errors.Is(err, fs.ErrExist):
		st, serr := dir.Stat(name)
		if serr != nil {
			return serr
		}
		if !st.IsDir() {
			return &fs.PathError{Op: "mkdir", Path: name, Err: syscall.ENOTDIR}
		}
		return nil
	}
	return err
}

// named puts the host's name and operation into an error of os.Root, which knows
// relative ones only, and says in our words that a link leads out.
func named(op, name string, err error) error {
	if err == nil {
		return nil
	}
	reason := err
	var pe *fs.PathError
	var le *os.LinkError
	switch {
	case errors.As(err, &pe):
		reason = pe.Err
	case errors.As(err, &le):
		reason = le.Err
	}
	// The os package doesn't export this error.
	if reason.Error() == "path escapes from parent" {
		reason = errOutside
	}
	// What lies below a file can't exist (spec 05 §12, F13).
	if reason == syscall.ENOTDIR && (op == "lstat" || op == "open" || op == "readlink") {
		reason = errBelowFile
	}
	return &fs.PathError{Op: op, Path: name, Err: reason}
}

// errBelowFile is fs.ErrNotExist and says why.
var errBelowFile = fmt.Errorf("%w: a parent is no directory (%w)", fs.ErrNotExist, syscall.ENOTDIR)
