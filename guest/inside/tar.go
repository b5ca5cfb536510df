//go:build linux

package inside

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"sort"
	"strings"
	"syscall"
	"time"

	"github.com/aisandbox-go/aisandbox/internal/wire"
	"github.com/aisandbox-go/aisandbox/provider"
)

// tarIn unpacks an upload below a directory. Everything goes through an os.Root
// of that directory, so neither a name nor a link can leave it.
func (s *session) tarIn(l *wire.Link, req *wire.Request) error {
	in := newUpload(l)
	dir, name, err := s.roots.find("untar", req.Path)
	if err != nil {
		return err
	}
	if err := s.roots.mkdirAll(dir, name); err != nil {
		return named("untar", req.Path, err)
	}
	top, err := dir.OpenRoot(name)
	if err != nil {
		return named("untar", req.Path, err)
	}
	u := &untar{s: s, top: top}
	defer u.close()
	if err := u.run(tar.NewReader(in)); err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, in) // the padding after the archive's end
	return err
}

type untar struct {
	s   *session
	top *os.Root

	last string   // the directory of the file before
	sub  *os.Root // its handle: an archive lists files of one directory in a row
	dirs []tar.Header
	buf  []byte
}

func (u *untar) close() {
	if u.sub != nil {
		_ = u.sub.Close()
	}
	_ = u.top.Close()
}

func (u *untar) run(tr *tar.Reader) error {
	u.buf = make([]byte, wire.Chunk)
	for {
		h, err := tr.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return fmt.Errorf("untar: %w: %w", err, provider.ErrInvalid)
		}
		if err := u.entry(tr, h); err != nil {
			return named("untar", h.Name, err)
		}
	}
	// Directories last and innermost first: files made in them change their times,
	// and a mode may forbid to enter them.
	for _, h := range slices.Backward(u.dirs) {
		if err := u.top.Chmod(h.Name, h.FileInfo().Mode().Perm()); err != nil {
			return named("untar", h.Name, err)
		}
		_ = u.top.Chtimes(h.Name, time.Now(), h.ModTime)
	}
	return nil
}

// local returns the cleaned relative name of an entry.
func local(name string) (string, error) {
	if strings.IndexByte(name, 0) >= 0 {
		return "", syscall.EINVAL
	}
	if path.IsAbs(name) {
		return "", errOutside
	}
	c := path.Clean(name)
	if c == ".." || strings.HasPrefix(c, "../") {
		return "", errOutside
	}
	return c, nil
}

func (u *untar) entry(tr *tar.Reader, h *tar.Header) error {
	name, err := local(h.Name)
	if err != nil {
		return err
	}
	switch h.Typeflag {
	case tar.TypeXGlobalHeader:
		return nil
	case tar.TypeDir:
		if name == "." {
			return nil
		}
		return u.directory(name, h)
	case tar.TypeReg, tar.TypeSymlink, tar.TypeLink:
	default:
		return fmt.Errorf("entry type %q: %w", h.Typeflag, provider.ErrInvalid)
	}
	if name == "." {
		return syscall.EISDIR
	}
	dir, err := u.parent(path.Dir(name))
	if err != nil {
		return err
	}
	base := path.Base(name)
	var create func() error
	switch h.Typeflag {
	case tar.TypeReg:
		create = func() error { return u.file(dir, base, tr, h) }
	case tar.TypeSymlink:
		create = func() error {
			if err := dir.Symlink(h.Linkname, base); err != nil {
				return err
			}
			return u.s.roots.own(dir, base)
		}
	case tar.TypeLink:
		old, err := local(h.Linkname)
		if err != nil {
			return fmt.Errorf("hard link to %q: %w", h.Linkname, err)
		}
		create = func() error { return u.top.Link(old, name) }
	}
	err = create()
	if errors.Is(err, fs.ErrExist) {
		// Removed rather than overwritten: what is there may be a link, or have
		// other names.
		if err := u.clear(dir, base); err != nil {
			return err
		}
		err = create()
	}
	return err
}

func (u *untar) clear(dir *os.Root, base string) error {
	st, err := dir.Lstat(base)
	if err != nil {
		return err
	}
	if st.IsDir() {
		return syscall.EISDIR
	}
	return dir.Remove(base)
}

func (u *untar) directory(name string, h *tar.Header) error {
	st, err := u.top.Lstat(name)
	if err == nil && !st.IsDir() {
		if err := u.top.Remove(name); err != nil {
			return err
		}
	}
	if err := u.s.roots.mkdirAll(u.top, name); err != nil {
		return err
	}
	if u.last == name || strings.HasPrefix(u.last, name+"/") {
		u.last = ""
	}
	u.dirs = append(u.dirs, tar.Header{Name: name, Mode: h.Mode, ModTime: h.ModTime, Typeflag: tar.TypeDir})
	return nil
}

func (u *untar) parent(dir string) (*os.Root, error) {
	if dir == "." {
		return u.top, nil
	}
	if dir == u.last && u.sub != nil {
		return u.sub, nil
	}
	if err := u.s.roots.mkdirAll(u.top, dir); err != nil {
		return nil, err
	}
	sub, err := u.top.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	if u.sub != nil {
		_ = u.sub.Close()
	}
	u.sub, u.last = sub, dir
	return sub, nil
}

func (u *untar) file(dir *os.Root, base string, tr *tar.Reader, h *tar.Header) error {
	f, err := u.s.create(dir, base, h.FileInfo().Mode())
	if err != nil {
		return err
	}
	defer f.Close()
	n, err := io.CopyBuffer(onlyWriter{f}, onlyReader{tr}, u.buf)
	if err != nil {
		return err
	}
	if n != h.Size {
		return io.ErrUnexpectedEOF
	}
	if err := u.s.finishFile(f, h.FileInfo().Mode()); err != nil {
		return err
	}
	c, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var terr error
	if err := c.Control(func(fd uintptr) { terr = setTimes(int(fd), h.ModTime) }); err != nil {
		return err
	}
	return terr
}

// onlyReader hides WriteTo, so that our buffer is used.
type onlyReader struct{ io.Reader }

// tarOut packs what is below a directory.
func (s *session) tarOut(l *wire.Link, req *wire.Request) error {
	dir, name, err := s.roots.find("tar", req.Path)
	if err != nil {
		return err
	}
	top, err := dir.OpenRoot(name)
	if err != nil {
		return named("tar", req.Path, err)
	}
	defer top.Close()
	out := &download{l: l}
	t := &tarring{w: tar.NewWriter(out), skip: map[string]bool{}, links: map[[2]uint64]string{}, buf: make([]byte, smallFile)}
	for _, n := range req.Names {
		t.skip[n] = true
	}
	if err := t.dir(top, ""); err != nil {
		return named("tar", req.Path, err)
	}
	if err := t.w.Close(); err != nil {
		return named("tar", req.Path, err)
	}
	if err := out.flush(); err != nil {
		return err
	}
	return l.Send(wire.FReply, nil)
}

// download gathers small writes into FData frames.
type download struct {
	l   *wire.Link
	buf []byte
}

func (d *download) Write(b []byte) (int, error) {
	total := len(b)
	for len(b) > 0 {
		n := min(len(b), wire.Chunk-len(d.buf))
		d.buf = append(d.buf, b[:n]...)
		b = b[n:]
		if len(d.buf) == wire.Chunk {
			if err := d.flush(); err != nil {
				return 0, err
			}
		}
	}
	return total, nil
}

func (d *download) flush() error {
	if len(d.buf) == 0 {
		return nil
	}
	err := d.l.Send(wire.FData, d.buf)
	d.buf = d.buf[:0]
	if err != nil {
		return errors.Join(errLink, err)
	}
	return nil
}

// smallFile is read whole before its header is written, so that a file that
// changes meanwhile can't break the archive.
const smallFile = 256 << 10

type tarring struct {
	w     *tar.Writer
	skip  map[string]bool
	links map[[2]uint64]string // device and inode → first name
	buf   []byte
}

// dir packs the entries of a directory; prefix is its name with a slash.
func (t *tarring) dir(r *os.Root, prefix string) error {
	d, err := r.Open(".")
	if err != nil {
		return err
	}
	ents, err := d.ReadDir(-1)
	_ = d.Close()
	if err != nil {
		return err
	}
	sort.Slice(ents, func(i, j int) bool { return ents[i].Name() < ents[j].Name() })
	for _, ent := range ents {
		if t.skip[ent.Name()] {
			continue
		}
		err := t.entry(r, ent.Name(), prefix)
		if errors.Is(err, fs.ErrNotExist) {
			continue // removed meanwhile
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (t *tarring) entry(r *os.Root, name, prefix string) error {
	st, err := r.Lstat(name)
	if err != nil {
		return err
	}
	h := &tar.Header{
		Name: prefix + name, Mode: int64(st.Mode().Perm()), ModTime: st.ModTime(), Format: tar.FormatPAX,
	}
	if st.Mode()&fs.ModeSetuid != 0 {
		h.Mode |= 0o4000
	}
	if st.Mode()&fs.ModeSetgid != 0 {
		h.Mode |= 0o2000
	}
	if st.Mode()&fs.ModeSticky != 0 {
		h.Mode |= 0o1000
	}
	switch {
	case st.IsDir():
		h.Typeflag, h.Name = tar.TypeDir, h.Name+"/"
		if err := t.w.WriteHeader(h); err != nil {
			return err
		}
		sub, err := r.OpenRoot(name)
		if err != nil {
			return err
		}
		defer sub.Close()
		return t.dir(sub, prefix+name+"/")
	case st.Mode()&fs.ModeSymlink != 0:
		h.Typeflag = tar.TypeSymlink
		if h.Linkname, err = r.Readlink(name); err != nil {
			return err
		}
		return t.w.WriteHeader(h)
	case st.Mode().IsRegular():
		return t.file(r, name, st, h)
	}
	return nil // sockets, pipes and devices mean nothing elsewhere
}

func (t *tarring) file(r *os.Root, name string, st fs.FileInfo, h *tar.Header) error {
	h.Typeflag = tar.TypeReg
	if sys, ok := st.Sys().(*syscall.Stat_t); ok && sys.Nlink > 1 {
		key := [2]uint64{uint64(sys.Dev), sys.Ino}
		if first, ok := t.links[key]; ok {
			h.Typeflag, h.Linkname = tar.TypeLink, first
			return t.w.WriteHeader(h)
		}
		t.links[key] = h.Name
	}
	f, err := r.OpenFile(name, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if errors.Is(err, syscall.ELOOP) {
		return fs.ErrNotExist // became a link meanwhile
	}
	if err != nil {
		return err
	}
	defer f.Close()
	if now, err := f.Stat(); err != nil || !now.Mode().IsRegular() {
		return fs.ErrNotExist
	}
	n, err := io.ReadFull(f, t.buf)
	if err == io.EOF || err == io.ErrUnexpectedEOF {
		h.Size = int64(n)
		if err := t.w.WriteHeader(h); err != nil {
			return err
		}
		_, err = t.w.Write(t.buf[:n])
		return err
	}
	if err != nil {
		return err
	}
	h.Size = max(st.Size(), int64(n))
	if err := t.w.WriteHeader(h); err != nil {
		return err
	}
	body := io.MultiReader(bytes.NewReader(t.buf[:n]), f)
	done, err := io.CopyBuffer(onlyWriter{t.w}, onlyReader{io.LimitReader(body, h.Size)}, make([]byte, wire.Chunk))
	if err != nil {
		return err
	}
	// A file that shrank while it was read is filled up, as tar does.
	_, err = io.CopyN(onlyWriter{t.w}, zeros{}, h.Size-done)
	return err
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) {
	clear(b)
	return len(b), nil
}
