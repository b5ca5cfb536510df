//go:build linux

package local

import (
	"context"
	"crypto/rand"
	"errors"
	"io"
	"io/fs"
	"iter"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"

	"github.com/aisandbox-go/aisandbox/provider"
)

// rootFS is the host's file system beneath an os.Root: the kernel resolves each
// name from a directory descriptor, so no link an agent plants is followed out,
// however fast it is swapped.
type rootFS struct {
	root *os.Root
	path string
}

// rel is a name relative to the root, checked by its text.
func (f *rootFS) rel(op, name string) (string, error) {
	fail := func(err error) (string, error) { return "", &fs.PathError{Op: op, Path: name, Err: err} }
	if name == "" || strings.IndexByte(name, 0) >= 0 {
		return fail(fs.ErrInvalid)
	}
	rel := path.Clean(name)
	if path.IsAbs(rel) {
		switch {
		case rel == f.path:
			return ".", nil
		case strings.HasPrefix(rel, f.path+"/"):
			return rel[len(f.path)+1:], nil
		}
		return fail(provider.ErrOutsideRoot)
	}
	if rel == ".." || strings.HasPrefix(rel, "../") {
		return fail(provider.ErrOutsideRoot)
	}
	return rel, nil
}

// notDirError: what lies below a file can't exist.
type notDirError struct{}

func (notDirError) Error() string        { return syscall.ENOTDIR.Error() }
func (notDirError) Is(target error) bool { return target == fs.ErrNotExist }
func (notDirError) Unwrap() error        { return syscall.ENOTDIR }

// wrap gives an error the shape and the name that the contract promises.
func wrap(op, name string, err error, below bool) error {
	if err == nil {
		return nil
	}
	reason := err
	if pe := (*fs.PathError)(nil); errors.As(err, &pe) {
		reason = pe.Err
	} else if le := (*os.LinkError)(nil); errors.As(err, &le) {
		reason = le.Err
	}
	var errno syscall.Errno
	switch {
	case below && reason == syscall.ENOTDIR:
		reason = notDirError{}
	case reason == syscall.ENOSPC || reason == syscall.EDQUOT:
		reason = provider.ErrNoSpace
	case !errors.As(reason, &errno) && reason.Error() == "path escapes from parent": // os exports no value for it
		reason = provider.ErrOutsideRoot
	}
	return &fs.PathError{Op: op, Path: name, Err: reason}
}

// check is what every operation begins with.
func (f *rootFS) check(ctx context.Context, op, name string) (string, error) {
	if ctx.Err() != nil {
		return "", &fs.PathError{Op: op, Path: name, Err: context.Cause(ctx)}
	}
	return f.rel(op, name)
}

func (f *rootFS) Open(ctx context.Context, name string) (io.ReadCloser, error) {
	rel, err := f.check(ctx, "open", name)
	if err != nil {
		return nil, err
	}
	// Nonblocking: a pipe with no writer would hold the host.
	file, err := f.root.OpenFile(rel, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, wrap("open", name, err, true)
	}
	fi, err := file.Stat()
	switch {
	case err != nil:
	case fi.IsDir():
		err = syscall.EISDIR
	case !fi.Mode().IsRegular():
		err = fs.ErrInvalid
	default:
		return file, nil
	}
	file.Close()
	return nil, wrap("open", name, err, false)
}

func (f *rootFS) Put(ctx context.Context, name string, r io.Reader, mode fs.FileMode) error {
	rel, err := f.check(ctx, "put", name)
	if err != nil {
		return err
	}
	if rel == "." {
		return wrap("put", name, fs.ErrInvalid, false)
	}
	dir := path.Dir(rel)
	if err := f.root.MkdirAll(dir, 0o755); err != nil {
		return wrap("put", name, err, false)
	}
	tmp := path.Join(dir, ".aisbx-"+rand.Text())
	file, err := f.root.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return wrap("put", name, err, false)
	}
	if r != nil {
		_, err = io.Copy(file, ctxReader{ctx, r})
	}
	if err == nil {
		err = file.Chmod(mode.Perm())
	}
	if cerr := file.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = f.root.Rename(tmp, rel)
	}
	if err != nil {
		_ = f.root.Remove(tmp)
	}
	return wrap("put", name, err, false)
}

type ctxReader struct {
	ctx context.Context
	r   io.Reader
}

func (c ctxReader) Read(b []byte) (int, error) {
	if c.ctx.Err() != nil {
		return 0, context.Cause(c.ctx)
	}
	return c.r.Read(b)
}

func (f *rootFS) Lstat(ctx context.Context, name string) (fs.FileInfo, error) {
	rel, err := f.check(ctx, "lstat", name)
	if err != nil {
		return nil, err
	}
	fi, err := f.root.Lstat(rel)
	if err != nil {
		return nil, wrap("lstat", name, err, true)
	}
	return fi, nil
}

func (f *rootFS) ReadDir(ctx context.Context, name string) iter.Seq2[fs.DirEntry, error] {
	return func(yield func(fs.DirEntry, error) bool) {
		es, err := f.readDir(ctx, name)
		if err != nil {
			yield(nil, err)
			return
		}
		for _, e := range es {
			if !yield(e, nil) {
				return
			}
		}
	}
}

func (f *rootFS) readDir(ctx context.Context, name string) ([]fs.DirEntry, error) {
	rel, err := f.check(ctx, "readdir", name)
	if err != nil {
		return nil, err
	}
	d, err := f.root.OpenFile(rel, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, wrap("readdir", name, err, true)
	}
	defer d.Close()
	if fi, err := d.Stat(); err == nil && !fi.IsDir() {
		return nil, wrap("readdir", name, syscall.ENOTDIR, false)
	}
	es, err := d.ReadDir(-1)
	if err != nil {
		return nil, wrap("readdir", name, err, false)
	}
	slices.SortFunc(es, func(a, b fs.DirEntry) int { return strings.Compare(a.Name(), b.Name()) })
	for i, e := range es {
		es[i] = dirEntry{e, f.root, rel}
	}
	return es, nil
}

// dirEntry asks the root for its Info: the directory it was read from is closed,
// and its path must not be resolved outside the root.
type dirEntry struct {
	fs.DirEntry
	root *os.Root
	dir  string
}

func (e dirEntry) Info() (fs.FileInfo, error) { return e.root.Lstat(path.Join(e.dir, e.Name())) }

func (f *rootFS) Mkdir(ctx context.Context, name string) error {
	rel, err := f.check(ctx, "mkdir", name)
	if err != nil {
		return err
	}
	return wrap("mkdir", name, f.root.MkdirAll(rel, 0o755), false)
}

func (f *rootFS) Remove(ctx context.Context, name string) error {
	rel, err := f.check(ctx, "remove", name)
	if err != nil {
		return err
	}
	if rel == "." {
		return wrap("remove", name, fs.ErrInvalid, false)
	}
	err = wrap("remove", name, f.root.RemoveAll(rel), true)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

func (f *rootFS) Rename(ctx context.Context, from, to string) error {
	a, err := f.check(ctx, "rename", from)
	if err != nil {
		return err
	}
	b, err := f.check(ctx, "rename", to)
	if err != nil {
		return err
	}
	if a == "." || b == "." {
		return wrap("rename", from, fs.ErrInvalid, false)
	}
	if _, err := f.root.Lstat(a); err != nil {
		return wrap("rename", from, err, true)
	}
	return wrap("rename", from, f.root.Rename(a, b), false)
}

func (f *rootFS) Symlink(ctx context.Context, target, name string) error {
	rel, err := f.check(ctx, "symlink", name)
	if err != nil {
		return err
	}
	return wrap("symlink", name, f.root.Symlink(target, rel), false)
}

func (f *rootFS) Readlink(ctx context.Context, name string) (string, error) {
	rel, err := f.check(ctx, "readlink", name)
	if err != nil {
		return "", err
	}
	target, err := f.root.Readlink(rel)
	return target, wrap("readlink", name, err, true)
}
