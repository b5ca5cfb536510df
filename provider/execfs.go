package provider

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
	"unicode/utf8"
)

// ErrOutsideRoot says that a name, or a symbolic link on the way to it, leaves
// the root that an [FS] was made for.
var ErrOutsideRoot = errors.New("path leaves the sandbox root")

const (
	nameMax      = 255      // of one path element, on every file system in use
	listingLimit = 64 << 20 // bytes of one directory listing
	putBuffer    = 1 << 20  // content up to here needs one command, more needs two
	cleanupTime  = 10 * time.Second
)

// ExecFS returns file access beneath h.Root made from h.Start alone, for
// backends that have no [FS] of their own. It is also a [Linker] and an
// [Archiver] (an [*UnsupportedError] where the sandbox has no tar).
//
// It needs a POSIX sh and ls, cat, rm, mv, mkdir, chmod, wc, ln, readlink; stat
// where present (without it modification times are unknown). Content travels
// over standard input and output, names as arguments, so both may be any bytes.
//
// Names beneath the root are resolved element by element inside the sandbox, and
// a symbolic link that leads out is refused with [ErrOutsideRoot]. A process in
// the sandbox that swaps a directory for a link between that check and the use
// can still win: a shell has no openat. It gains nothing there, since the
// commands have no more rights than itself unless the backend runs them as
// another user; a guest closes the gap.
//
// Lstat says "missing" only when the sandbox's own tools reported ENOENT.
func ExecFS(h Handle) FS { return ExecFSAt(h, h.Root()) }

// ExecFSAt is [ExecFS] for another root, an absolute path inside the sandbox.
// Relative names are relative to that root.
func ExecFSAt(h Handle, root string) FS {
	return &execFS{h: h, root: path.Clean(root)}
}

type execFS struct {
	h    Handle
	root string
}

var (
	_ Linker   = (*execFS)(nil)
	_ Archiver = (*execFS)(nil)
)

// place is a name beneath the root: the elements of its directory, and the last.
type place struct {
	op, name string
	dir      []string
	base     string // "." for the root itself
}

func (p place) fail(err error) error {
	return &fs.PathError{Op: p.op, Path: p.name, Err: err}
}

// elements are the whole name's.
func (p place) elements() []string {
	if p.base == "." {
		return nil
	}
	return append(slices.Clone(p.dir), p.base)
}

func (p place) isRoot() bool { return p.base == "." }

// locate checks a name by its text: links are the script's business.
func (f *execFS) locate(op, name string) (place, error) {
	p := place{op: op, name: name, base: "."}
	if name == "" || strings.IndexByte(name, 0) >= 0 {
		return p, p.fail(fs.ErrInvalid)
	}
	rel := path.Clean(name)
	if path.IsAbs(rel) {
		switch {
		case rel == f.root:
			rel = "."
		case f.root == "/":
			rel = rel[1:]
		case strings.HasPrefix(rel, f.root+"/"):
			rel = rel[len(f.root)+1:]
		default:
			return p, p.fail(ErrOutsideRoot)
		}
	}
	if rel == ".." || strings.HasPrefix(rel, "../") {
		return p, p.fail(ErrOutsideRoot)
	}
	if rel == "." {
		return p, nil
	}
	p.dir = strings.Split(rel, "/")
	for _, e := range p.dir {
		if len(e) > nameMax {
			return p, p.fail(syscall.ENAMETOOLONG)
		}
	}
	p.base = p.dir[len(p.dir)-1]
	p.dir = p.dir[:len(p.dir)-1]
	return p, nil
}

// execArg encodes a name for a script. Not every transport carries bytes that
// are no UTF-8 in an argument, so those travel as escapes.
func execArg(s string) string {
	if utf8.ValidString(s) {
		return "r" + s
	}
	var b strings.Builder
	b.WriteByte('b')
	for i := range len(s) {
		fmt.Fprintf(&b, `\0%03o`, s[i])
	}
	return b.String()
}

func execArgs(elems []string) []string {
	out := make([]string, len(elems))
	for i, e := range elems {
		out[i] = execArg(e)
	}
	return out
}

// call is one run of a script.
type call struct {
	f        *execFS
	sentinel string
	stderr   tailBuffer
}

func (f *execFS) newCall() *call {
	return &call{f: f, sentinel: rand.Text(), stderr: tailBuffer{max: 8 << 10}}
}

func (c *call) cmd(script string, args []string, stdin io.Reader, stdout io.Writer) Cmd {
	argv := append(Shell(execPrelude+script), "sh", c.sentinel, execArg(c.f.root))
	return Cmd{
		Argv:  append(argv, args...),
		Dir:   "/",
		Env:   []string{"LC_ALL=C"},
		Stdin: stdin, Stdout: stdout, Stderr: &c.stderr,
	}
}

// run runs a script to its end and returns at most max bytes of its output.
func (c *call) run(ctx context.Context, script string, args []string, stdin io.Reader, max int) ([]byte, error) {
	out := limitBuffer{max: max}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	out.full = func(err error) { cancel(err) }
	p, err := c.f.h.Start(ctx, c.cmd(script, args, stdin, &out))
	if err != nil {
		return nil, err
	}
	e, err := p.Wait()
	if out.err != nil {
		return nil, out.err
	}
	if err != nil {
		return nil, err
	}
	return out.b.Bytes(), c.verdict(e)
}

// missingError is a name whose parent is no directory: neither can it exist.
type missingError struct{ errno syscall.Errno }

func (e missingError) Error() string        { return e.errno.Error() }
func (e missingError) Is(target error) bool { return target == fs.ErrNotExist }
func (e missingError) Unwrap() error        { return e.errno }

// verdict turns the end of a script into the reason of a PathError.
func (c *call) verdict(e Exit) error {
	if e.Code == 0 {
		return nil
	}
	text := strings.TrimRight(c.stderr.String(), "\n")
	last := text[strings.LastIndexByte(text, '\n')+1:]
	if why, ok := strings.CutPrefix(last, c.sentinel+" "); ok {
		switch why {
		case "noent":
			return fs.ErrNotExist
		case "parent":
			return missingError{syscall.ENOTDIR}
		case "notdir":
			return syscall.ENOTDIR
		case "outside":
			return ErrOutsideRoot
		case "exist":
			return fs.ErrExist
		case "isdir":
			return syscall.EISDIR
		case "perm":
			return fs.ErrPermission
		case "loop":
			return syscall.ELOOP
		case "notlink":
			return syscall.EINVAL
		case "irregular":
			return fmt.Errorf("not a regular file: %w", fs.ErrInvalid)
		case "short":
			return fmt.Errorf("content arrived incomplete: %w", io.ErrUnexpectedEOF)
		case "root":
			return errors.New("the sandbox root can't be entered")
		case "notar":
			return &UnsupportedError{Provider: c.f.h.Ref().Provider, Capability: "archive", Hint: "install tar in the sandbox"}
		}
	}
	for suffix, err := range execErrors {
		if strings.HasSuffix(last, suffix) {
			return err
		}
	}
	return &ExitError{Argv: []string{"sh"}, Exit: e, StderrTail: last}
}

// execErrors are what C libraries say, in the C locale, at the end of the line.
var execErrors = map[string]error{
	": Permission denied":         fs.ErrPermission,
	": Operation not permitted":   fs.ErrPermission,
	": Read-only file system":     syscall.EROFS,
	": No space left on device":   ErrNoSpace,
	": Disk quota exceeded":       ErrNoSpace,
	": File exists":               fs.ErrExist,
	": Directory not empty":       syscall.ENOTEMPTY,
	": Is a directory":            syscall.EISDIR,
	": File name too long":        syscall.ENAMETOOLONG,
	": Device or resource busy":   syscall.EBUSY,
	": Text file busy":            syscall.ETXTBSY,
	": Too many links":            syscall.EMLINK,
	": Operation not supported":   errors.ErrUnsupported,
	": Invalid cross-device link": syscall.EXDEV,
}

func (f *execFS) Lstat(ctx context.Context, name string) (fs.FileInfo, error) {
	p, err := f.locate("lstat", name)
	if err != nil {
		return nil, err
	}
	c := f.newCall()
	out, err := c.run(ctx, execLstat, execArgs(append([]string{p.base}, p.dir...)), nil, 64<<10)
	if err != nil {
		return nil, p.fail(err)
	}
	base := p.base
	if p.isRoot() {
		base = path.Base(f.root)
	}
	fi, ok := parseLstat(base, string(out), c.sentinel)
	if !ok {
		return nil, p.fail(fmt.Errorf("unreadable answer %.60q", out))
	}
	return fi, nil
}

func (f *execFS) ReadDir(ctx context.Context, name string) iter.Seq2[fs.DirEntry, error] {
	return func(yield func(fs.DirEntry, error) bool) {
		list, err := f.readDir(ctx, name)
		if err != nil {
			yield(nil, err)
			return
		}
		for _, e := range list {
			if !yield(e, nil) {
				return
			}
		}
	}
}

func (f *execFS) readDir(ctx context.Context, name string) ([]fs.DirEntry, error) {
	p, err := f.locate("readdir", name)
	if err != nil {
		return nil, err
	}
	c := f.newCall()
	out, err := c.run(ctx, execReadDir, execArgs(append([]string{p.base}, p.dir...)), nil, listingLimit)
	if err != nil {
		return nil, p.fail(err)
	}
	body, ok := bytes.CutSuffix(out, []byte(c.sentinel+"\x00"))
	if !ok {
		return nil, p.fail(io.ErrUnexpectedEOF)
	}
	var list []fs.DirEntry
	for rec := range bytes.SplitSeq(body, []byte{0}) {
		if len(rec) < 2 {
			continue
		}
		list = append(list, &execEntry{ctx: ctx, f: f, dir: name, name: string(rec[1:]), typ: letterType(rec[0])})
	}
	slices.SortFunc(list, func(a, b fs.DirEntry) int { return strings.Compare(a.Name(), b.Name()) })
	return list, nil
}

func (f *execFS) Mkdir(ctx context.Context, name string) error {
	return f.simple(ctx, "mkdir", name, execMkdir, true)
}

func (f *execFS) Remove(ctx context.Context, name string) error {
	err := f.simple(ctx, "remove", name, execRemove, false)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

func (f *execFS) simple(ctx context.Context, op, name, script string, root bool) error {
	p, err := f.locate(op, name)
	if err != nil {
		return err
	}
	if p.isRoot() && !root {
		return p.fail(fs.ErrInvalid)
	}
	if _, err := f.newCall().run(ctx, script, execArgs(append([]string{p.base}, p.dir...)), nil, 4096); err != nil {
		return p.fail(asENOTDIR(op, err))
	}
	return nil
}

// asENOTDIR takes "it can't exist" back where something was to be made.
func asENOTDIR(op string, err error) error {
	if m, ok := err.(missingError); ok && op != "remove" {
		return m.errno
	}
	return err
}

func (f *execFS) Rename(ctx context.Context, from, to string) error {
	a, err := f.locate("rename", from)
	if err != nil {
		return err
	}
	b, err := f.locate("rename", to)
	if err != nil {
		return err
	}
	if a.isRoot() || b.isRoot() {
		return a.fail(fs.ErrInvalid)
	}
	if slices.Equal(a.elements(), b.elements()) {
		_, err := f.Lstat(ctx, from)
		return err
	}
	args := execArgs(append([]string{a.base, b.base}, a.dir...))
	args = append(append(args, "-"), execArgs(b.dir)...)
	if _, err := f.newCall().run(ctx, execRename, args, nil, 4096); err != nil {
		return a.fail(err)
	}
	return nil
}

func (f *execFS) Symlink(ctx context.Context, target, name string) error {
	p, err := f.locate("symlink", name)
	if err != nil {
		return err
	}
	if target == "" || strings.IndexByte(target, 0) >= 0 {
		return p.fail(fs.ErrInvalid)
	}
	args := execArgs(append([]string{target, p.base}, p.dir...))
	if _, err := f.newCall().run(ctx, execSymlink, args, nil, 4096); err != nil {
		return p.fail(asENOTDIR("symlink", err))
	}
	return nil
}

func (f *execFS) Readlink(ctx context.Context, name string) (string, error) {
	p, err := f.locate("readlink", name)
	if err != nil {
		return "", err
	}
	out, err := f.newCall().run(ctx, execReadlink, execArgs(append([]string{p.base}, p.dir...)), nil, 64<<10)
	if err != nil {
		return "", p.fail(err)
	}
	target, ok := strings.CutSuffix(string(out), "\n")
	if !ok {
		return "", p.fail(io.ErrUnexpectedEOF)
	}
	return target, nil
}

// execEntry is a directory entry whose Info asks the sandbox.
type execEntry struct {
	ctx  context.Context // of the ReadDir it came from; fs.DirEntry has no place for another
	f    *execFS
	dir  string
	name string
	typ  fs.FileMode
}

func (e *execEntry) Name() string      { return e.name }
func (e *execEntry) IsDir() bool       { return e.typ.IsDir() }
func (e *execEntry) Type() fs.FileMode { return e.typ }

func (e *execEntry) Info() (fs.FileInfo, error) {
	return e.f.Lstat(e.ctx, strings.TrimSuffix(e.dir, "/")+"/"+e.name)
}

func (e *execEntry) String() string { return fs.FormatDirEntry(e) }

func letterType(c byte) fs.FileMode {
	switch c {
	case 'd':
		return fs.ModeDir
	case 'l':
		return fs.ModeSymlink
	case 'p':
		return fs.ModeNamedPipe
	case 's':
		return fs.ModeSocket
	case 'b':
		return fs.ModeDevice
	case 'c':
		return fs.ModeDevice | fs.ModeCharDevice
	case 'f', '-':
		return 0
	}
	return fs.ModeIrregular
}

type execInfo struct {
	name string
	size int64
	mode fs.FileMode
	mod  time.Time
}

func (i *execInfo) Name() string       { return i.name }
func (i *execInfo) Size() int64        { return i.size }
func (i *execInfo) Mode() fs.FileMode  { return i.mode }
func (i *execInfo) ModTime() time.Time { return i.mod }
func (i *execInfo) IsDir() bool        { return i.mode.IsDir() }
func (i *execInfo) Sys() any           { return nil }
func (i *execInfo) String() string     { return fs.FormatFileInfo(i) }

// parseLstat reads "SENTINEL s HEXMODE SIZE SECONDS", or "SENTINEL l " and a line
// of ls -ldn, of which only what comes before the name is looked at.
func parseLstat(name, out, sentinel string) (*execInfo, bool) {
	rest, ok := strings.CutPrefix(out, sentinel+" ")
	if !ok || len(rest) < 2 {
		return nil, false
	}
	f := strings.Fields(rest[2:])
	i := &execInfo{name: name}
	switch rest[0] {
	case 's':
		if len(f) != 3 {
			return nil, false
		}
		mode, err1 := strconv.ParseUint(f[0], 16, 32)
		size, err2 := strconv.ParseInt(f[1], 10, 64)
		sec, err3 := strconv.ParseInt(f[2], 10, 64)
		if err1 != nil || err2 != nil || err3 != nil || size < 0 {
			return nil, false
		}
		i.mode, ok = posixMode(uint32(mode))
		i.size, i.mod = size, time.Unix(sec, 0)
	case 'l':
		if len(f) < 5 {
			return nil, false
		}
		i.mode, ok = lsMode(f[0])
		if i.mode.Type()&fs.ModeDevice == 0 {
			size, err := strconv.ParseInt(f[4], 10, 64)
			if err != nil || size < 0 {
				return nil, false
			}
			i.size = size
		}
	default:
		return nil, false
	}
	if i.mode.IsDir() {
		i.size = 0 // a directory's size is the file system's business
	}
	return i, ok
}

func posixMode(m uint32) (fs.FileMode, bool) {
	mode := fs.FileMode(m & 0o777)
	switch m & 0xf000 {
	case 0x8000:
	case 0x4000:
		mode |= fs.ModeDir
	case 0xa000:
		mode |= fs.ModeSymlink
	case 0x1000:
		mode |= fs.ModeNamedPipe
	case 0xc000:
		mode |= fs.ModeSocket
	case 0x6000:
		mode |= fs.ModeDevice
	case 0x2000:
		mode |= fs.ModeDevice | fs.ModeCharDevice
	default:
		return 0, false
	}
	if m&0o4000 != 0 {
		mode |= fs.ModeSetuid
	}
	if m&0o2000 != 0 {
		mode |= fs.ModeSetgid
	}
	if m&0o1000 != 0 {
		mode |= fs.ModeSticky
	}
	return mode, true
}

func lsMode(s string) (fs.FileMode, bool) {
	if len(s) < 10 {
		return 0, false
	}
	mode := letterType(s[0])
	if mode == fs.ModeIrregular {
		return 0, false
	}
	special := []fs.FileMode{fs.ModeSetuid, fs.ModeSetgid, fs.ModeSticky}
	for i := range 9 {
		c := s[i+1]
		switch c {
		case '-':
			continue
		case 's', 't':
			mode |= special[i/3]
		case 'S', 'T':
			mode |= special[i/3]
			continue
		}
		mode |= 1 << (8 - i)
	}
	return mode, true
}

// tailBuffer keeps the last max bytes.
type tailBuffer struct {
	mu  sync.Mutex
	max int
	b   []byte
}

func (t *tailBuffer) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := len(p)
	if len(p) > t.max {
		p = p[len(p)-t.max:]
	}
	if over := len(t.b) + len(p) - t.max; over > 0 {
		t.b = append(t.b[:0], t.b[over:]...)
	}
	t.b = append(t.b, p...)
	return n, nil
}

func (t *tailBuffer) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.b)
}
