//go:build linux

// Package local runs sandboxes as plain processes in a directory of the host.
// It isolates nothing: an agent can read and change whatever the user can. It is
// for tests, and for machines that are a sandbox already.
package local

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/aisandbox-go/aisandbox/internal/proc"
	"github.com/aisandbox-go/aisandbox/internal/statedir"
	"github.com/aisandbox-go/aisandbox/provider"
)

const (
	name       = "local"
	refVersion = 1
	workDir    = "work"

	// sandboxEnv marks every process of a sandbox, so that Destroy finds those
	// which another host process started.
	sandboxEnv = "AISBX_SANDBOX"
)

// InheritEnv says how much of this process's environment commands see.
type InheritEnv string

// The choices of [Options.InheritEnv].
const (
	InheritAll     InheritEnv = "all"     // the default
	InheritMinimal InheritEnv = "minimal" // what programs need to run: PATH, HOME, user, locale, time zone, TMPDIR, TERM
	InheritNone    InheritEnv = "none"    // nothing but a default PATH
)

// Options configure the backend; the zero value works.
type Options struct {
	// Dir is a fixed workspace. There is one sandbox then, and Destroy never
	// removes the directory. Empty: each sandbox gets a directory in BaseDir.
	Dir string

	// BaseDir holds generated workspaces and the records of all sandboxes.
	// Default: aisandbox/local below XDG_STATE_HOME, for root below /var/lib.
	BaseDir string

	// KeepOnDestroy leaves generated workspaces behind.
	KeepOnDestroy bool

	// ScrubEnv are names taken out of the inherited environment, so that a CLI
	// falls back to its own login. A command's own Env may set them again.
	ScrubEnv []string

	// InheritEnv is [InheritAll] when empty.
	InheritEnv InheritEnv

	Logger *slog.Logger // nil discards
}

// New returns the backend. Mistakes in o are reported by Create and Resume.
func New(o Options) provider.Provider {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return &local{o: o}
}

type local struct{ o Options }

var (
	_ provider.Lister        = (*local)(nil)
	_ provider.Pinger        = (*local)(nil)
	_ provider.Fingerprinter = (*local)(nil)
)

// record is the state file, and in part Ref.State.
type record struct {
	Version int               `json:"version"`
	Key     string            `json:"key"`
	Path    string            `json:"path"`
	Owned   bool              `json:"owned"` // we made the directory
	Mark    string            `json:"mark"`  // value of sandboxEnv
	Labels  map[string]string `json:"labels,omitempty"`
	Created time.Time         `json:"created"`
}

// refState lets a Resume that looks in the wrong place say so, instead of
// declaring the sandbox gone.
type refState struct {
	Base string `json:"base"`
}

func (*local) Name() string { return name }

// Traits: Kill is not claimed, since a process that leaves its session, its
// parent and its environment at once can't be told from any other of the user's.
// All less determined ones are killed; with a guest Kill holds.
func (*local) Traits() provider.Traits {
	return provider.Traits{
		Isolation:    provider.IsolationNone,
		DurableFS:    true,
		LiveStdin:    true,
		Outlives:     true,
		SharedKernel: true,
		Networks:     []provider.Network{provider.NetworkHost},
	}
}

// Fingerprint tells fixed workspaces apart.
func (l *local) Fingerprint() string {
	if l.o.Dir == "" {
		return ""
	}
	return "dir=" + filepath.Clean(l.o.Dir)
}

// Ping makes sure that records can be kept.
func (l *local) Ping(context.Context) error {
	_, err := l.open()
	return err
}

func (l *local) open() (*statedir.Dir, error) {
	switch l.o.InheritEnv {
	case "", InheritAll, InheritMinimal, InheritNone:
	default:
		return nil, &provider.OptionError{Provider: name, Option: "InheritEnv", Value: string(l.o.InheritEnv), Cure: "use all, minimal or none"}
	}
	base := l.o.BaseDir
	if base == "" {
		var err error
		if base, err = statedir.Default(name); err != nil {
			return nil, fmt.Errorf("local: %w", err)
		}
	}
	d, err := statedir.Open(base, 0o700)
	if err != nil {
		return nil, fmt.Errorf("local: open base directory: %w", err)
	}
	return d, nil
}

// dirKey is the record's key of a workspace that we did not make.
func dirKey(path string) string {
	h := sha256.Sum256([]byte(path))
	return "d" + hex.EncodeToString(h[:16])
}

func (l *local) Create(ctx context.Context, spec provider.Spec) (provider.Handle, error) {
	if spec.Network != provider.NetworkDefault && spec.Network != provider.NetworkHost {
		return nil, &provider.UnsupportedError{Provider: name, Capability: "network " + string(spec.Network), Hint: "use bwrap or docker"}
	}
	if spec.Key != "" && !statedir.ValidKey(spec.Key) {
		return nil, fmt.Errorf("local: create: key %q: want [a-z0-9]{1,40}: %w", spec.Key, provider.ErrInvalid)
	}
	d, err := l.open()
	if err != nil {
		return nil, err
	}
	r := record{Version: refVersion, Key: spec.Key, Owned: true, Mark: rand.Text(), Labels: spec.Labels, Created: time.Now().UTC()}
	if l.o.Dir != "" {
		if r.Path, err = filepath.Abs(l.o.Dir); err != nil {
			return nil, fmt.Errorf("local: create: %w", err)
		}
		if fi, err := os.Stat(r.Path); err != nil || !fi.IsDir() {
			return nil, &provider.OptionError{Provider: name, Option: "Dir", Value: l.o.Dir, Cure: "name a directory that exists"}
		}
		r.Key, r.Owned = dirKey(r.Path), false
	} else {
		if r.Key == "" {
			r.Key = strings.ToLower(rand.Text())
		}
		r.Path = filepath.Join(d.Of(r.Key), workDir)
	}
	unlock, err := d.Lock(ctx, r.Key)
	if err != nil {
		return nil, fmt.Errorf("local: create: %w", err)
	}
	defer unlock()

	var old record
	switch err := d.Load(r.Key, &old); {
	case err == nil && old.Path == r.Path:
		r = old // the sandbox of this key
	case err == nil:
		return nil, fmt.Errorf("local: create: %s names %s: %w", d.Of(r.Key), old.Path, provider.ErrConflict)
	case !errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("local: create: %w", err)
	default:
		if err := d.Claim(r.Key, 0o700); err != nil {
			return nil, fmt.Errorf("local: create: %w", err)
		}
		if err := d.Save(r.Key, r); err != nil {
			_ = os.RemoveAll(d.Of(r.Key))
			return nil, fmt.Errorf("local: create: %w", err)
		}
	}
	if r.Owned {
		if err := os.MkdirAll(r.Path, 0o755); err != nil {
			_ = os.RemoveAll(d.Of(r.Key))
			return nil, fmt.Errorf("local: create: %w", err)
		}
	}
	return l.attach(d, r)
}

// find returns the record of a sandbox by its id, which is its path.
func (l *local) find(ref provider.Ref) (*statedir.Dir, record, error) {
	var r record
	if ref.Provider != "" && ref.Provider != name {
		return nil, r, fmt.Errorf("local: %v is another provider's: %w", ref, provider.ErrInvalid)
	}
	d, err := l.open()
	if err != nil {
		return nil, r, fmt.Errorf("%w: %w", err, provider.ErrUnavailable)
	}
	path := filepath.Clean(ref.ID)
	key := dirKey(path)
	if filepath.Base(path) == workDir && filepath.Dir(filepath.Dir(path)) == d.Path() {
		key = filepath.Base(filepath.Dir(path))
	}
	if !statedir.ValidKey(key) {
		return d, r, provider.ErrNotFound
	}
	err = d.Load(key, &r)
	switch {
	case errors.Is(err, fs.ErrNotExist) || err == nil && (r.Path != path || r.Key != key):
		var st refState
		if json.Unmarshal(ref.State, &st) == nil && st.Base != "" && st.Base != d.Path() {
			return nil, r, &provider.OptionError{Provider: name, Option: "BaseDir", Value: d.Path(), Cure: "the sandbox was made with " + st.Base}
		}
		return d, record{Key: key}, provider.ErrNotFound
	case err != nil:
		return nil, r, fmt.Errorf("local: %w: %w", err, provider.ErrUnavailable)
	case r.Version > refVersion:
		return nil, r, fmt.Errorf("local: %v has a record of version %d, this program knows %d: %w", ref, r.Version, refVersion, provider.ErrUnavailable)
	}
	return d, r, nil
}

func (l *local) Resume(ctx context.Context, ref provider.Ref) (provider.Handle, error) {
	d, r, err := l.find(ref)
	if err != nil {
		return nil, fmt.Errorf("local: resume %s: %w", ref.ID, err)
	}
	fi, err := os.Stat(r.Path)
	switch {
	case errors.Is(err, fs.ErrNotExist) || err == nil && !fi.IsDir():
		return nil, fmt.Errorf("local: resume %s: the directory is gone: %w", ref.ID, provider.ErrNotFound)
	case err != nil:
		return nil, fmt.Errorf("local: resume %s: %w: %w", ref.ID, err, provider.ErrUnavailable)
	}
	return l.attach(d, r)
}

// Destroy kills every process of the sandbox, whoever started it, and removes the
// directory if we made it. A path without a record of ours is left alone.
func (l *local) Destroy(ctx context.Context, ref provider.Ref) error {
	d, r, err := l.find(ref)
	if errors.Is(err, provider.ErrNotFound) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("local: destroy %s: %w", ref.ID, err)
	}
	unlock, err := d.Lock(ctx, r.Key)
	if err != nil {
		return fmt.Errorf("local: destroy %s: %w", ref.ID, err)
	}
	defer unlock()
	if err := proc.KillEnv(sandboxEnv + "=" + r.Mark); err != nil {
		l.o.Logger.WarnContext(ctx, "processes survive their sandbox", "sandbox", ref, "err", err)
	}
	if r.Owned && l.o.KeepOnDestroy {
		if err := d.Forget(r.Key); err != nil {
			return fmt.Errorf("local: destroy %s: %w", ref.ID, err)
		}
		return nil
	}
	// The record goes last, so that a Destroy that fails can be repeated.
	if r.Owned {
		if err := statedir.Remove(ctx, r.Path); err != nil {
			return fmt.Errorf("local: destroy %s: %w", ref.ID, err)
		}
	}
	if err := statedir.Remove(ctx, d.Of(r.Key)); err != nil {
		return fmt.Errorf("local: destroy %s: %w", ref.ID, err)
	}
	return nil
}

func (l *local) List(ctx context.Context, labels map[string]string) ([]provider.Listed, error) {
	d, err := l.open()
	if err != nil {
		return nil, err
	}
	keys, err := d.Keys()
	if err != nil {
		return nil, fmt.Errorf("local: list: %w", err)
	}
	var out []provider.Listed
	for _, key := range keys {
		var r record
		if err := d.Load(key, &r); err != nil {
			if !errors.Is(err, fs.ErrNotExist) {
				l.o.Logger.WarnContext(ctx, "unreadable sandbox record", "key", key, "err", err)
			}
			continue
		}
		if statedir.Matches(r.Labels, labels) {
			out = append(out, provider.Listed{Ref: makeRef(d, r), Labels: r.Labels, Created: r.Created, Running: true})
		}
	}
	return out, nil
}

func makeRef(d *statedir.Dir, r record) provider.Ref {
	st, _ := json.Marshal(refState{Base: d.Path()}) // a string always marshals
	return provider.Ref{Provider: name, ID: r.Path, Version: refVersion, State: st}
}
