package guest

import (
	"context"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"path"
	"time"

	"github.com/aisandbox-go/aisandbox/internal/wire"
)

// Names given to the file operations are absolute, or relative to Root. They reach
// what is below Root and [Handle.Private]; anything else, a link that leads out
// included, is an error that is fs.ErrPermission.

// info is what the guest tells of a file.
type info struct {
	name  string
	mode  fs.FileMode
	size  int64
	mtime time.Time
}

func (i *info) Name() string       { return i.name }
func (i *info) Size() int64        { return i.size }
func (i *info) Mode() fs.FileMode  { return i.mode }
func (i *info) ModTime() time.Time { return i.mtime }
func (i *info) IsDir() bool        { return i.mode.IsDir() }
func (i *info) Sys() any           { return nil }

func decodeInfo(d *wire.Dec) *info {
	i := &info{name: d.Str(), mode: fs.FileMode(d.Uint()), size: d.Int()}
	i.mtime = time.Unix(0, d.Int())
	return i
}

// Open implements provider.FS. Only regular files can be read.
func (g *Handle) Open(ctx context.Context, name string) (io.ReadCloser, error) {
	x, err := g.begin(ctx, &wire.Request{Op: wire.OpOpen, Path: g.abs(name)})
	if err != nil {
		return nil, err
	}
	d := &download{x: x}
	if err := d.fill(); err != nil && err != io.EOF {
		return nil, err
	}
	return d, nil
}

// download reads FData frames up to FReply.
type download struct {
	x    *exchange
	rest []byte
	err  error
}

func (d *download) fill() error {
	for len(d.rest) == 0 && d.err == nil {
		t, b, err := d.x.recv()
		switch {
		case err != nil:
			d.err = err
		case t == wire.FData:
			d.rest = b
		case t == wire.FReply:
			d.err = io.EOF
		default:
			d.err = unexpected(t)
		}
		if d.err != nil {
			d.x.end()
		}
	}
	if len(d.rest) > 0 {
		return nil
	}
	return d.err
}

func (d *download) Read(b []byte) (int, error) {
	if len(b) == 0 {
		return 0, nil
	}
	if err := d.fill(); err != nil {
		return 0, err
	}
	n := copy(b, d.rest)
	d.rest = d.rest[n:]
	return n, nil
}

// WriteTo saves a copy.
func (d *download) WriteTo(w io.Writer) (int64, error) {
	var total int64
	for {
		err := d.fill()
		if err == io.EOF {
			return total, nil
		}
		if err != nil {
			return total, err
		}
		n, err := w.Write(d.rest)
		total += int64(n)
		d.rest = d.rest[n:]
		if err != nil {
			return total, err
		}
	}
}

func (d *download) Close() error {
	d.x.end()
	d.err = fs.ErrClosed
	d.rest = nil
	return nil
}

// Put implements provider.FS.
func (g *Handle) Put(ctx context.Context, name string, r io.Reader, mode fs.FileMode) error {
	x, err := g.begin(ctx, &wire.Request{Op: wire.OpPut, Path: g.abs(name), Mode: uint32(mode)})
	if err != nil {
		return err
	}
	_, err = x.upload(r)
	return err
}

// Lstat implements provider.FS.
func (g *Handle) Lstat(ctx context.Context, name string) (fs.FileInfo, error) {
	b, err := g.call(ctx, &wire.Request{Op: wire.OpLstat, Path: g.abs(name)})
	if err != nil {
		return nil, err
	}
	d := &wire.Dec{B: b}
	i := decodeInfo(d)
	if d.Failed {
		return nil, fmt.Errorf("guest protocol: malformed file info")
	}
	i.name = path.Base(path.Clean(g.abs(name)))
	return i, nil
}

// ReadDir implements provider.FS. Breaking out of the loop is fine.
func (g *Handle) ReadDir(ctx context.Context, name string) iter.Seq2[fs.DirEntry, error] {
	return func(yield func(fs.DirEntry, error) bool) {
		x, err := g.begin(ctx, &wire.Request{Op: wire.OpReadDir, Path: g.abs(name)})
		if err != nil {
			yield(nil, err)
			return
		}
		defer x.end()
		for {
			t, b, err := x.recv()
			if err != nil {
				yield(nil, err)
				return
			}
			if t == wire.FReply {
				return
			}
			d := &wire.Dec{B: b}
			for len(d.B) > 0 {
				i := decodeInfo(d)
				if d.Failed {
					yield(nil, fmt.Errorf("guest protocol: malformed directory"))
					return
				}
				if !yield(fs.FileInfoToDirEntry(i), nil) {
					return
				}
			}
		}
	}
}

// Mkdir implements provider.FS.
func (g *Handle) Mkdir(ctx context.Context, name string) error {
	_, err := g.call(ctx, &wire.Request{Op: wire.OpMkdir, Path: g.abs(name)})
	return err
}

// Remove implements provider.FS. The roots themselves can't be removed.
func (g *Handle) Remove(ctx context.Context, name string) error {
	_, err := g.call(ctx, &wire.Request{Op: wire.OpRemove, Path: g.abs(name)})
	return err
}

// Rename implements provider.FS.
func (g *Handle) Rename(ctx context.Context, from, to string) error {
	_, err := g.call(ctx, &wire.Request{Op: wire.OpRename, Path: g.abs(from), Target: g.abs(to)})
	return err
}

// Symlink implements provider.Linker.
func (g *Handle) Symlink(ctx context.Context, target, name string) error {
	_, err := g.call(ctx, &wire.Request{Op: wire.OpSymlink, Path: g.abs(name), Target: target})
	return err
}

// Readlink implements provider.Linker.
func (g *Handle) Readlink(ctx context.Context, name string) (string, error) {
	b, err := g.call(ctx, &wire.Request{Op: wire.OpReadlink, Path: g.abs(name)})
	return string(b), err
}
