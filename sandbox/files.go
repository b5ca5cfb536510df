package sandbox

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"net"

	"github.com/aisandbox-go/aisandbox/provider"
)

// MaxRead is the largest file that [Sandbox.ReadFile] takes into memory.
const MaxRead = 64 << 20

// TooLargeError is a file that is larger than the limit of a call.
type TooLargeError struct {
	Path  string
	Limit int64
}

func (e *TooLargeError) Error() string {
	return fmt.Sprintf("sandbox: %s is larger than %d bytes: use Open", e.Path, e.Limit)
}

// onPath maps name and redacts the error of what is done with it.
func (s *Sandbox) onPath(name string, do func(real string) error) error {
	real, err := s.Real(name)
	if err != nil {
		return err
	}
	return s.red.Error(do(real))
}

// changing is onPath for what changes files.
func (s *Sandbox) changing(ctx context.Context, name string, do func(real string) error) error {
	if err := s.settled(ctx); err != nil {
		return err
	}
	return s.onPath(name, do)
}

// ReadFile reads a whole file of at most [MaxRead] bytes; a larger one is a
// [*TooLargeError].
func (s *Sandbox) ReadFile(ctx context.Context, name string) ([]byte, error) {
	r, err := s.Open(ctx, name)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	b, err := io.ReadAll(io.LimitReader(r, MaxRead+1))
	if err != nil {
		return nil, s.red.Error(err)
	}
	if len(b) > MaxRead {
		return nil, &TooLargeError{name, MaxRead}
	}
	return b, nil
}

// Open opens a file for reading. The caller closes it.
func (s *Sandbox) Open(ctx context.Context, name string) (r io.ReadCloser, err error) {
	err = s.onPath(name, func(real string) error {
		r, err = s.fs.Open(ctx, real)
		return err
	})
	return r, err
}

// WriteFile writes a file atomically, creating parents; see [provider.FS.Put].
func (s *Sandbox) WriteFile(ctx context.Context, name string, data []byte, mode fs.FileMode) error {
	return s.Put(ctx, name, bytes.NewReader(data), mode)
}

// Put writes a stream to a file; see [provider.FS.Put].
func (s *Sandbox) Put(ctx context.Context, name string, r io.Reader, mode fs.FileMode) error {
	return s.changing(ctx, name, func(real string) error { return s.fs.Put(ctx, real, r, mode) })
}

// Lstat never follows links. A missing file is fs.ErrNotExist, said only when
// that is certain.
func (s *Sandbox) Lstat(ctx context.Context, name string) (fi fs.FileInfo, err error) {
	err = s.onPath(name, func(real string) error {
		fi, err = s.fs.Lstat(ctx, real)
		return err
	})
	return fi, err
}

// Exists says whether name is there, links not followed.
func (s *Sandbox) Exists(ctx context.Context, name string) (bool, error) {
	switch _, err := s.Lstat(ctx, name); {
	case err == nil:
		return true, nil
	case errors.Is(err, fs.ErrNotExist):
		return false, nil
	default:
		return false, err
	}
}

// ReadDir yields the entries of a directory in name order.
func (s *Sandbox) ReadDir(ctx context.Context, name string) iter.Seq2[fs.DirEntry, error] {
	return func(yield func(fs.DirEntry, error) bool) {
		real, err := s.Real(name)
		if err != nil {
			yield(nil, err)
			return
		}
		for e, err := range s.fs.ReadDir(ctx, real) {
			if !yield(e, s.red.Error(err)) {
				return
			}
		}
	}
}

// Mkdir makes a directory with its parents. An existing one is success.
func (s *Sandbox) Mkdir(ctx context.Context, name string) error {
	return s.changing(ctx, name, func(real string) error { return s.fs.Mkdir(ctx, real) })
}

// Remove removes the whole tree. A missing one is success; the root itself is refused.
func (s *Sandbox) Remove(ctx context.Context, name string) error {
	return s.changing(ctx, name, func(real string) error {
		if real == s.real || real == s.base {
			return &PathError{name, "is the workspace itself"}
		}
		return s.fs.Remove(ctx, real)
	})
}

// Rename renames a file or directory.
func (s *Sandbox) Rename(ctx context.Context, from, to string) error {
	return s.changing(ctx, from, func(f string) error {
		return s.onPath(to, func(t string) error { return s.fs.Rename(ctx, f, t) })
	})
}

// need finds a capability of the handle, or the error that it is missing.
func need[T any](s *Sandbox, capability string) (T, error) {
	t, ok := provider.As[T](s.h)
	if !ok {
		return t, s.unsupported(capability, "")
	}
	return t, nil
}

// Symlink makes a symbolic link. The target is stored as given.
func (s *Sandbox) Symlink(ctx context.Context, target, name string) error {
	l, ok := s.fs.(provider.Linker)
	if !ok {
		return s.unsupported("symlink", "")
	}
	return s.changing(ctx, name, func(real string) error { return l.Symlink(ctx, target, real) })
}

// TarIn unpacks a tar stream below dir; see [provider.Archiver].
func (s *Sandbox) TarIn(ctx context.Context, dir string, r io.Reader) error {
	a, ok := s.archiver()
	if !ok {
		return s.unsupported("archive", "")
	}
	return s.changing(ctx, dir, func(real string) error { return a.TarIn(ctx, real, r) })
}

// TarOut packs what is below dir; see [provider.Archiver].
func (s *Sandbox) TarOut(ctx context.Context, dir string, w io.Writer, opts provider.TarOptions) error {
	a, ok := s.archiver()
	if !ok {
		return s.unsupported("archive", "")
	}
	return s.onPath(dir, func(real string) error { return a.TarOut(ctx, real, w, opts) })
}

func (s *Sandbox) archiver() (provider.Archiver, bool) {
	if a, ok := provider.As[provider.Archiver](s.h); ok {
		return a, true
	}
	a, ok := s.fs.(provider.Archiver)
	return a, ok
}

// Snapshot saves the sandbox's files; see [provider.Snapshotter].
func (s *Sandbox) Snapshot(ctx context.Context, label string) (string, error) {
	c, err := need[provider.Snapshotter](s, "snapshots")
	if err != nil {
		return "", err
	}
	id, err := c.Snapshot(ctx, label)
	return id, s.red.Error(err)
}

// Fork makes an independent copy with the same environment.
func (s *Sandbox) Fork(ctx context.Context, spec provider.Spec) (*Sandbox, error) {
	c, err := need[provider.Forker](s, "fork")
	if err != nil {
		return nil, err
	}
	h, err := c.Fork(ctx, spec)
	if err != nil {
		return nil, s.red.Error(err)
	}
	f := New(s.p, h, Options{Root: s.root, Logger: s.log})
	f.red = s.red
	f.addEnv(s.environ())
	return f, nil
}

// Dial connects to a TCP port on the sandbox's loopback.
func (s *Sandbox) Dial(ctx context.Context, port int) (net.Conn, error) {
	c, err := need[provider.Dialer](s, "dial")
	if err != nil {
		return nil, err
	}
	conn, err := c.Dial(ctx, port)
	return conn, s.red.Error(err)
}

// Expose returns a URL that reaches a port of the sandbox from outside.
func (s *Sandbox) Expose(ctx context.Context, port int) (provider.Exposed, error) {
	c, err := need[provider.Exposer](s, "ports")
	if err != nil {
		return provider.Exposed{}, err
	}
	e, err := c.Expose(ctx, port)
	return e, s.red.Error(err)
}

// ListenInside opens a loopback port inside; see [provider.HostReacher].
func (s *Sandbox) ListenInside(ctx context.Context, port int) (net.Listener, string, error) {
	c, err := need[provider.HostReacher](s, "hostReach")
	if err != nil {
		return nil, "", err
	}
	l, url, err := c.ListenInside(ctx, port)
	return l, url, s.red.Error(err)
}

// Reattacher returns what runs processes that outlive this host.
func (s *Sandbox) Reattacher() (provider.Reattacher, error) {
	return need[provider.Reattacher](s, "reattach")
}

// Pause freezes all processes of the sandbox.
func (s *Sandbox) Pause(ctx context.Context) error {
	c, err := need[provider.Pauser](s, "pause")
	if err != nil {
		return err
	}
	return s.red.Error(c.Pause(ctx))
}

// Unpause thaws what Pause froze.
func (s *Sandbox) Unpause(ctx context.Context) error {
	c, err := need[provider.Pauser](s, "pause")
	if err != nil {
		return err
	}
	return s.red.Error(c.Unpause(ctx))
}

// Usage tells what the sandbox uses now.
func (s *Sandbox) Usage(ctx context.Context) (provider.Usage, error) {
	c, err := need[provider.Meter](s, "usage")
	if err != nil {
		return provider.Usage{}, err
	}
	u, err := c.Usage(ctx)
	return u, s.red.Error(err)
}

// Capabilities is what a sandbox can do, as one table. The names are those of
// spec 01 §2.1, and what goes beyond it.
type Capabilities struct {
	Isolation provider.Isolation `json:"isolation"`

	FS                bool `json:"fs"`
	Exec              bool `json:"exec"`
	Env               bool `json:"env"`
	BackgroundProcess bool `json:"backgroundProcesses"`
	WritableStdin     bool `json:"writableStdin"`
	Killable          bool `json:"killableProcesses"`
	NetworkPolicy     bool `json:"networkPolicy"`
	DurableFilesystem bool `json:"durableFilesystem"`
	Outlives          bool `json:"outlives"`

	Ports     bool `json:"ports"`
	Dial      bool `json:"dial"`
	HostReach bool `json:"hostReach"`
	Snapshots bool `json:"snapshots"`
	Fork      bool `json:"fork"`
	Pause     bool `json:"pause"`
	Watch     bool `json:"watch"`
	Archive   bool `json:"archive"`
	Reattach  bool `json:"reattach"`
	Usage     bool `json:"usage"`
}

func has[T any](v any) bool {
	_, ok := provider.As[T](v)
	return ok
}

// Capabilities computes the table from the sandbox's traits and methods.
func (s *Sandbox) Capabilities() Capabilities {
	t := s.Traits()
	_, archive := s.archiver()
	return Capabilities{
		Isolation: t.Isolation,
		FS:        true, Exec: true, Env: true, BackgroundProcess: true,
		WritableStdin: t.LiveStdin, Killable: t.Kill, DurableFilesystem: t.DurableFS, Outlives: t.Outlives,
		NetworkPolicy: len(t.Networks) > 1,
		Ports:         has[provider.Exposer](s.h),
		Dial:          has[provider.Dialer](s.h),
		HostReach:     has[provider.HostReacher](s.h),
		Snapshots:     has[provider.Snapshotter](s.h) && has[provider.Restorer](s.p),
		Fork:          has[provider.Forker](s.h),
		Pause:         has[provider.Pauser](s.h),
		Watch:         has[provider.Watcher](s.h),
		Archive:       archive,
		Reattach:      has[provider.Reattacher](s.h),
		Usage:         has[provider.Meter](s.h),
	}
}

// FSAt returns file access beneath another directory of the sandbox, a real
// absolute path, for what must not lie in the workspace. It works through
// commands, so it is slow where those are.
func (s *Sandbox) FSAt(root string) provider.FS { return provider.ExecFSAt(s.h, root) }
