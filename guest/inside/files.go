//go:build linux

package inside

import (
	"crypto/rand"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"sort"
	"syscall"

	"github.com/aisandbox-go/aisandbox/internal/wire"
)

// appendInfo encodes what the host needs for an fs.FileInfo.
func appendInfo(e *wire.Enc, name string, st fs.FileInfo) {
	e.Str(name)
	e.Uint(uint64(st.Mode()))
	e.Int(st.Size())
	e.Int(st.ModTime().UnixNano())
}

func (s *session) open(l *wire.Link, req *wire.Request) error {
	dir, name, err := s.roots.find("open", req.Path)
	if err != nil {
		return err
	}
	// Non-blocking: the agent may have put a named pipe there.
	f, err := dir.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return named("open", req.Path, err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return named("open", req.Path, err)
	}
	if !st.Mode().IsRegular() {
		err := syscall.EINVAL
		if st.IsDir() {
			err = syscall.EISDIR
		}
		return &fs.PathError{Op: "open", Path: req.Path, Err: err}
	}
	buf := make([]byte, max(1, min(wire.Chunk, st.Size()+1)))
	for {
		n, err := f.Read(buf)
		if n > 0 {
			if err := l.Send(wire.FData, buf[:n]); err != nil {
				return err
			}
		}
		if err == io.EOF {
			return l.Send(wire.FReply, nil)
		}
		if err != nil {
			return named("read", req.Path, err)
		}
	}
}

func (s *session) put(l *wire.Link, req *wire.Request) error {
	in := newUpload(l)
	dir, name, err := s.roots.find("put", req.Path)
	if err != nil {
		return err
	}
	if name == "." {
		return &fs.PathError{Op: "put", Path: req.Path, Err: syscall.EISDIR}
	}
	if st, err := dir.Lstat(name); err == nil && st.IsDir() {
		return &fs.PathError{Op: "put", Path: req.Path, Err: syscall.EISDIR}
	}
	if err := s.roots.mkdirAll(dir, path.Dir(name)); err != nil {
		return named("put", req.Path, err)
	}
	tmp := path.Join(path.Dir(name), ".aisandbox-"+rand.Text())
	if err := s.write(dir, tmp, fs.FileMode(req.Mode), in); err != nil {
		_ = dir.Remove(tmp)
		return named("put", req.Path, err)
	}
	if err := dir.Rename(tmp, name); err != nil {
		_ = dir.Remove(tmp)
		return named("put", req.Path, err)
	}
	return nil
}

// write makes a new file with exactly this mode.
func (s *session) write(dir *os.Root, name string, mode fs.FileMode, r io.Reader) error {
	f, err := s.create(dir, name, mode)
	if err != nil {
		return err
	}
	defer f.Close()
	buf := make([]byte, wire.Chunk)
	if _, err := io.CopyBuffer(onlyWriter{f}, r, buf); err != nil {
		return err
	}
	return s.finishFile(f, mode)
}

// create makes a file that must not exist yet.
func (s *server) create(dir *os.Root, name string, mode fs.FileMode) (*os.File, error) {
	return dir.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL|syscall.O_NOFOLLOW, mode.Perm())
}

// finishFile sets the owner first, for that clears the setuid bits of the mode.
// The mode is set only where creating the file could not: for thousands of small
// files one change of an inode less is felt.
func (s *server) finishFile(f *os.File, mode fs.FileMode) error {
	if o := s.roots.owner; o != nil {
		if err := f.Chown(o.uid, o.gid); err != nil {
			return err
		}
	}
	mode &= fs.ModePerm | fs.ModeSetuid | fs.ModeSetgid | fs.ModeSticky
	if mode&s.umask == 0 && mode == mode.Perm() {
		return nil
	}
	return f.Chmod(mode)
}

// onlyWriter hides ReadFrom, which would read with a buffer of its own.
type onlyWriter struct{ io.Writer }

func (s *session) lstat(req *wire.Request) ([]byte, error) {
	dir, name, err := s.roots.find("lstat", req.Path)
	if err != nil {
		return nil, err
	}
	st, err := dir.Lstat(name)
	if err != nil {
		return nil, named("lstat", req.Path, err)
	}
	var e wire.Enc
	base := path.Base(path.Clean(req.Path))
	appendInfo(&e, base, st)
	return e.B, nil
}

func (s *session) readDir(l *wire.Link, req *wire.Request) error {
	dir, name, err := s.roots.find("readdir", req.Path)
	if err != nil {
		return err
	}
	d, err := dir.OpenFile(name, os.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return named("readdir", req.Path, err)
	}
	defer d.Close()
	ents, err := d.ReadDir(-1)
	if err != nil {
		return named("readdir", req.Path, err)
	}
	sort.Slice(ents, func(i, j int) bool { return ents[i].Name() < ents[j].Name() })
	var e wire.Enc
	for _, ent := range ents {
		st, err := ent.Info()
		if errors.Is(err, fs.ErrNotExist) {
			continue // removed meanwhile
		}
		if err != nil {
			return named("readdir", req.Path, err)
		}
		appendInfo(&e, ent.Name(), st)
		if len(e.B) > wire.Chunk {
			if err := l.Send(wire.FData, e.B); err != nil {
				return err
			}
			e.B = e.B[:0]
		}
	}
	if len(e.B) > 0 {
		if err := l.Send(wire.FData, e.B); err != nil {
			return err
		}
	}
	return l.Send(wire.FReply, nil)
}

func (s *session) mkdir(req *wire.Request) error {
	dir, name, err := s.roots.find("mkdir", req.Path)
	if err != nil {
		return err
	}
	return named("mkdir", req.Path, s.roots.mkdirAll(dir, name))
}

func (s *session) remove(req *wire.Request) error {
	dir, name, err := s.roots.find("remove", req.Path)
	if err != nil {
		return err
	}
	if name == "." {
		return &fs.PathError{Op: "remove", Path: req.Path, Err: syscall.EBUSY}
	}
	err = dir.RemoveAll(name)
	// A parent that is missing, or is a file, means that there is nothing.
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
		return nil
	}
	return named("remove", req.Path, err)
}

func (s *session) rename(req *wire.Request) error {
	dir, from, err := s.roots.find("rename", req.Path)
	if err != nil {
		return err
	}
	dir2, to, err := s.roots.find("rename", req.Target)
	if err != nil {
		return err
	}
	if dir != dir2 {
		return &fs.PathError{Op: "rename", Path: req.Path, Err: syscall.EXDEV}
	}
	if from == "." || to == "." {
		return &fs.PathError{Op: "rename", Path: req.Path, Err: syscall.EBUSY}
	}
	return named("rename", req.Path, dir.Rename(from, to))
}

func (s *session) symlink(req *wire.Request) error {
	dir, name, err := s.roots.find("symlink", req.Path)
	if err != nil {
		return err
	}
	if err := dir.Symlink(req.Target, name); err != nil {
		return named("symlink", req.Path, err)
	}
	return named("symlink", req.Path, s.roots.own(dir, name))
}

func (s *session) readlink(req *wire.Request) ([]byte, error) {
	dir, name, err := s.roots.find("readlink", req.Path)
	if err != nil {
		return nil, err
	}
	target, err := dir.Readlink(name)
	return []byte(target), named("readlink", req.Path, err)
}

// upload reads FData frames up to FEnd.
type upload struct {
	l    *wire.Link
	rest []byte
	done bool
	err  error
}

func newUpload(l *wire.Link) *upload { return &upload{l: l} }

func (u *upload) Read(b []byte) (int, error) {
	for len(u.rest) == 0 {
		if u.err != nil {
			return 0, u.err
		}
		if u.done {
			return 0, io.EOF
		}
		t, p, err := u.l.Recv()
		switch {
		case err != nil:
			u.err = errors.Join(errLink, err)
		case t == wire.FData:
			u.rest = p
		case t == wire.FEnd && len(p) == 0:
			u.done = true
		case t == wire.FEnd: // the host's reader failed; its words
			u.done = true
			u.err = errors.New(string(p))
		}
	}
	n := copy(b, u.rest)
	u.rest = u.rest[n:]
	return n, nil
}

// errLink marks errors of the link itself: no answer can be sent.
var errLink = errors.New("link is broken")
