package sandbox

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/aisandbox-go/aisandbox/workspace"
)

// Limits of a copied directory. They are far beyond a repository, and keep a
// mistyped path from filling a disk.
const (
	maxCopyFiles = 2_000_000
	maxCopyBytes = 64 << 30
)

// copier carries host files into the sandbox, as a tar stream or one by one. It
// reads beneath its roots only: a link is copied as a link, never followed.
type copier struct {
	put      func(name string, fi fs.FileInfo, link string, r io.Reader) error
	warn     func(string)
	files    int
	bytes    int64
	skipped  int
	maxBytes int64
}

// copyIn copies what c names to the root of the sandbox.
func (e *ensurer) copyIn(ctx context.Context, c localCopy) error {
	cp := &copier{maxBytes: maxCopyBytes, warn: func(s string) { e.warn(PhaseSource, s) }}
	if _, ok := e.box.archiver(); !ok {
		cp.put = func(name string, fi fs.FileInfo, link string, r io.Reader) error {
			switch {
			case link != "":
				return e.box.Symlink(ctx, link, name)
			case fi.IsDir():
				return e.box.Mkdir(ctx, name)
			}
			return e.box.Put(ctx, name, r, fi.Mode().Perm())
		}
		return cp.all(ctx, c)
	}
	pr, pw := io.Pipe()
	done := make(chan error, 1)
	go func() {
		tw := tar.NewWriter(pw)
		cp.put = func(name string, fi fs.FileInfo, link string, r io.Reader) error {
			return tarEntry(tw, name, fi, link, r)
		}
		err := cp.all(ctx, c)
		if err == nil {
			err = tw.Close()
		}
		_ = pw.CloseWithError(err) // nil is EOF
		done <- err
	}()
	err := e.box.TarIn(ctx, "", pr)
	_ = pr.CloseWithError(errStopped) // the other side may have stopped reading
	if werr := <-done; werr != nil && !errors.Is(werr, errStopped) {
		return werr // the reason; what TarIn says follows from it
	}
	return err
}

var errStopped = errors.New("the copy was stopped")

func tarEntry(tw *tar.Writer, name string, fi fs.FileInfo, link string, r io.Reader) error {
	h := &tar.Header{Name: name, Mode: int64(fi.Mode().Perm()), ModTime: fi.ModTime(), Format: tar.FormatPAX}
	switch {
	case link != "":
		h.Typeflag, h.Linkname = tar.TypeSymlink, link
	case fi.IsDir():
		h.Typeflag, h.Name = tar.TypeDir, name+"/"
	default:
		h.Typeflag, h.Size = tar.TypeReg, fi.Size()
	}
	if err := tw.WriteHeader(h); err != nil {
		return err
	}
	if r == nil {
		return nil
	}
	// The file may change while it is copied; the header has its word.
	n, err := io.Copy(tw, io.LimitReader(r, fi.Size()))
	if err == nil && n < fi.Size() {
		_, err = io.CopyN(tw, zeros{}, fi.Size()-n)
	}
	return err
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

func (c *copier) all(ctx context.Context, l localCopy) error {
	if err := c.tree(ctx, l); err != nil {
		return err
	}
	if l.git != "" {
		if err := c.root(ctx, l.git, ".git", nil); err != nil {
			return err
		}
	}
	if c.skipped > 0 {
		c.warn(fmt.Sprintf("%d entries of the source were left out: submodules, devices, sockets, pipes or unreadable files", c.skipped))
	}
	return nil
}

func (c *copier) tree(ctx context.Context, l localCopy) error {
	return c.root(ctx, l.base, "", l.files)
}

// root copies files, or everything when that is nil, from below dir to below prefix.
func (c *copier) root(ctx context.Context, dir, prefix string, files []string) error {
	r, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer r.Close()
	if files == nil {
		return fs.WalkDir(r.FS(), ".", func(name string, d fs.DirEntry, err error) error {
			if err != nil {
				if name == "." {
					return err
				}
				c.skipped++
				if d != nil && d.IsDir() {
					return fs.SkipDir
				}
				return nil
			}
			if name == "." && prefix == "" {
				return ctx.Err()
			}
			return c.one(ctx, r, name, path.Join(prefix, name))
		})
	}
	dirs := map[string]bool{} // what is true was a directory and is made
	slices.Sort(files)
next:
	for _, f := range files {
		if !filepath.IsLocal(f) {
			c.skipped++
			continue
		}
		// Directories come with their files, so that those of ignored files stay out.
		// A directory that has become a link is copied as such, without what git
		// still believes to lie in it.
		for i := range len(f) {
			if f[i] != '/' {
				continue
			}
			dir := f[:i]
			isDir, seen := dirs[dir]
			if !seen {
				fi, err := r.Lstat(dir)
				isDir = err == nil && fi.IsDir()
				dirs[dir] = isDir
				if isDir {
					if err := c.one(ctx, r, dir, path.Join(prefix, dir)); err != nil {
						return err
					}
				}
			}
			if !isDir {
				continue next
			}
		}
		fi, err := r.Lstat(f)
		if errors.Is(err, fs.ErrNotExist) {
			continue // deleted in the work tree
		}
		if err == nil && fi.IsDir() {
			c.skipped++ // a submodule, or a repository inside
			continue
		}
		if err := c.one(ctx, r, f, path.Join(prefix, f)); err != nil {
			return err
		}
	}
	return nil
}

func (c *copier) one(ctx context.Context, r *os.Root, name, to string) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	fi, err := r.Lstat(name)
	if err != nil {
		c.skipped++
		return nil
	}
	if c.files++; c.files > maxCopyFiles {
		return fmt.Errorf("sandbox: the source has more than %d files: name a smaller directory", maxCopyFiles)
	}
	switch {
	case fi.Mode()&fs.ModeSymlink != 0:
		link, err := r.Readlink(name)
		if err != nil {
			c.skipped++
			return nil
		}
		return c.put(to, fi, link, nil)
	case fi.IsDir():
		return c.put(to, fi, "", nil)
	case !fi.Mode().IsRegular():
		c.skipped++
		return nil
	}
	f, err := openRegular(r, name)
	if err != nil {
		c.skipped++
		return nil
	}
	defer f.Close()
	if fi, err = f.Stat(); err != nil || !fi.Mode().IsRegular() {
		c.skipped++
		return nil
	}
	if c.bytes += fi.Size(); c.bytes > c.maxBytes {
		return fmt.Errorf("sandbox: the source is larger than %d bytes: name a smaller directory", c.maxBytes)
	}
	return c.put(to, fi, "", f)
}

// source puts the workspace's source in place (spec 01 §9, step 2).
func (e *ensurer) source(ctx context.Context) error {
	var prepare func(context.Context, string) (localCopy, error)
	var detail string
	switch src := e.def.d.Workspace.Source.(type) {
	case workspace.Git:
		detail = src.URL
		if _, host := src.HostPath(); host {
			prepare = func(ctx context.Context, tmp string) (localCopy, error) { return e.prepareClone(ctx, src, tmp) }
			break
		}
		// What is there already was put there by the image or a snapshot.
		if ok, err := e.box.Exists(ctx, ".git"); err != nil || ok {
			return err
		}
		end := e.phase(PhaseSource, detail)
		err := e.box.Git("").Clone(ctx, src)
		end(err)
		return err
	case workspace.Local:
		detail = src.Path
		prepare = func(ctx context.Context, tmp string) (localCopy, error) { return e.prepareLocal(ctx, src, tmp) }
	default:
		return nil
	}
	end := e.phase(PhaseSource, detail)
	err := e.copyLocal(ctx, prepare)
	end(err)
	return err
}

func (e *ensurer) copyLocal(ctx context.Context, prepare func(context.Context, string) (localCopy, error)) (err error) {
	tmp, err := os.MkdirTemp("", "aisandbox-source-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()
	c, err := prepare(ctx, tmp)
	if err != nil {
		return err
	}
	if err := e.box.Mkdir(ctx, ""); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	if err := e.copyIn(ctx, c); err != nil {
		return fmt.Errorf("sandbox: copy %s: %w", strings.TrimSuffix(c.base, "/"), err)
	}
	return nil
}
