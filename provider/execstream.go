package provider

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
)

func (f *execFS) Open(ctx context.Context, name string) (io.ReadCloser, error) {
	p, err := f.locate("open", name)
	if err != nil {
		return nil, err
	}
	c := f.newCall()
	s, err := c.stream(ctx, execOpen, execArgs(append([]string{p.base}, p.dir...)))
	if err != nil {
		return nil, p.fail(err)
	}
	s.place = p
	// The sentinel line comes once the file is open.
	head := make([]byte, len(c.sentinel)+1)
	if _, err := io.ReadFull(s, head); err != nil {
		s.Close()
		if err == io.EOF {
			err = p.fail(io.ErrUnexpectedEOF)
		}
		return nil, err
	}
	if string(head) != c.sentinel+"\n" {
		s.Close()
		return nil, p.fail(fmt.Errorf("unreadable answer %.60q", head))
	}
	return s, nil
}

// execStream is the output of a running script. Reading ends with io.EOF only if
// the script succeeded, so a cut connection never looks like the end of a file.
type execStream struct {
	*io.PipeReader
	place  place
	cancel context.CancelCauseFunc
	done   chan struct{}
	once   sync.Once
}

func (c *call) stream(ctx context.Context, script string, args []string) (*execStream, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	pr, pw := io.Pipe()
	s := &execStream{PipeReader: pr, cancel: cancel, done: make(chan struct{})}
	p, err := c.f.h.Start(ctx, c.cmd(script, args, nil, pw))
	if err != nil {
		cancel(nil)
		return nil, err
	}
	// A reader that went away must not hold the process's output back.
	stop := context.AfterFunc(ctx, func() { pw.CloseWithError(context.Cause(ctx)) })
	go func() {
		defer close(s.done)
		defer stop()
		e, err := p.Wait()
		if err == nil {
			err = c.verdict(e)
		}
		pw.CloseWithError(err)
		cancel(nil)
	}()
	return s, nil
}

func (s *execStream) Read(b []byte) (int, error) {
	n, err := s.PipeReader.Read(b)
	if err != nil && err != io.EOF {
		err = s.place.fail(err)
	}
	return n, err
}

// Close ends the command if it still runs. Idempotent.
func (s *execStream) Close() error {
	s.once.Do(func() {
		s.PipeReader.CloseWithError(fs.ErrClosed)
		s.cancel(fs.ErrClosed)
		<-s.done
	})
	return nil
}

// source counts what was read and keeps the reader's own failure apart from
// the end of the input, which look alike to the process.
type source struct {
	mu  sync.Mutex
	r   io.Reader
	n   int64
	err error
}

func (s *source) Read(b []byte) (int, error) {
	n, err := s.r.Read(b)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.n += int64(n)
	if err != nil {
		s.err = err
	}
	return n, err
}

// result returns how much was sent, or why not all of it.
func (s *source) result() (int64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.err == nil:
		return s.n, io.ErrUnexpectedEOF // the process stopped reading
	case s.err != io.EOF:
		return s.n, s.err
	}
	return s.n, nil
}

func (f *execFS) Put(ctx context.Context, name string, r io.Reader, mode fs.FileMode) error {
	p, err := f.locate("put", name)
	if err != nil {
		return err
	}
	if p.isRoot() {
		return p.fail(fs.ErrInvalid)
	}
	size, r, err := sizeOf(r)
	if err != nil {
		return p.fail(err)
	}
	tmp := ".aisbx-" + rand.Text()
	args := func(size string) []string {
		return append([]string{tmp, fmt.Sprintf("%04o", mode.Perm()), size, execArg(p.base)}, execArgs(p.dir)...)
	}
	src := &source{r: r}
	want := "-"
	if size >= 0 {
		want = strconv.FormatInt(size, 10)
	}
	_, err = f.newCall().run(ctx, execPut, args(want), src, 4096)
	sent, serr := src.result()
	switch {
	case err == nil && size < 0 && serr == nil:
		_, err = f.newCall().run(ctx, execCommit, args(strconv.FormatInt(sent, 10)), nil, 4096)
	case err == nil && size < 0:
		err = serr
	case errors.Is(err, io.ErrUnexpectedEOF) && serr != nil:
		err = serr
	}
	if err != nil {
		f.discard(ctx, tmp, p.dir)
		return p.fail(asENOTDIR("put", err))
	}
	return nil
}

// sizeOf finds out how much r holds if that is cheap, else returns -1. The
// script checks the size, so that content cut short is never put in place.
func sizeOf(r io.Reader) (int64, io.Reader, error) {
	if r == nil {
		return 0, bytes.NewReader(nil), nil
	}
	if l, ok := r.(interface{ Len() int }); ok {
		return int64(l.Len()), r, nil
	}
	head, err := io.ReadAll(io.LimitReader(r, putBuffer))
	if err != nil {
		return 0, nil, err
	}
	if len(head) < putBuffer {
		return int64(len(head)), bytes.NewReader(head), nil
	}
	return -1, io.MultiReader(bytes.NewReader(head), r), nil
}

// discard removes what a failed call may have left. Best effort: the sandbox
// may be the reason of the failure.
func (f *execFS) discard(ctx context.Context, tmp string, dir []string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTime)
	defer cancel()
	_, _ = f.newCall().run(ctx, execDiscard, append([]string{tmp}, execArgs(dir)...), nil, 4096)
}

func (f *execFS) TarIn(ctx context.Context, dir string, r io.Reader) error {
	p, err := f.locate("tarin", dir)
	if err != nil {
		return err
	}
	stage := ".aisbx-" + rand.Text()
	args := append([]string{stage}, execArgs(p.elements())...)
	pr, pw := io.Pipe()
	filtered := make(chan error, 1)
	go func() {
		err := filterTarIn(pw, r)
		filtered <- err // before tar can see the end of its input
		pw.CloseWithError(err)
	}()
	_, err = f.newCall().run(ctx, execUntar, args, pr, 4096)
	pr.CloseWithError(io.ErrClosedPipe) // the filter may still be writing
	if err == nil {
		err = <-filtered
	} else {
		select {
		case ferr := <-filtered:
			if ferr != nil && !errors.Is(ferr, io.ErrClosedPipe) {
				err = ferr // a refusal is why tar failed
			}
		default: // the filter may be blocked in the caller's reader
		}
	}
	if err == nil {
		_, err = f.newCall().run(ctx, execMerge, args, nil, 4096)
	}
	if err != nil {
		f.discard(ctx, stage, p.elements())
		return p.fail(asENOTDIR("tarin", err))
	}
	return nil
}

// filterTarIn copies an archive and ends with an error at the first entry that
// must not be unpacked. The result is in GNU's format, which busybox understands
// too: it skips pax headers and would cut long names.
func filterTarIn(w io.Writer, r io.Reader) error {
	tr, tw := tar.NewReader(r), tar.NewWriter(w)
	links := map[string]bool{}
	for {
		h, err := tr.Next()
		if err == io.EOF {
			return tw.Close()
		}
		if err != nil {
			return fmt.Errorf("read archive: %w", err)
		}
		if h.Typeflag == tar.TypeXGlobalHeader {
			continue
		}
		name, err := archiveName(h.Name, links)
		if err != nil {
			return err
		}
		if name == "." {
			continue
		}
		out := &tar.Header{
			Typeflag: h.Typeflag, Name: name, Linkname: h.Linkname, Size: h.Size,
			Mode: h.Mode & 0o777, ModTime: h.ModTime, Format: tar.FormatGNU,
		}
		switch h.Typeflag {
		case tar.TypeReg, tar.TypeGNUSparse:
			out.Typeflag = tar.TypeReg
		case tar.TypeDir:
			out.Name += "/"
		case tar.TypeSymlink:
			links[name] = true
		case tar.TypeLink:
			if out.Linkname, err = archiveName(h.Linkname, links); err != nil {
				return err
			}
		default:
			return fmt.Errorf("archive entry %q has type %q, which is not unpacked: %w", h.Name, h.Typeflag, ErrInvalid)
		}
		if err := tw.WriteHeader(out); err != nil {
			return err
		}
		if _, err := io.Copy(tw, tr); err != nil {
			return err
		}
	}
}

// archiveName cleans a name of an archive and refuses one that leaves the
// directory, or that goes through a link of the same archive.
func archiveName(name string, links map[string]bool) (string, error) {
	clean := path.Clean(name)
	if name == "" || path.IsAbs(name) || clean == ".." || strings.HasPrefix(clean, "../") ||
		slices.Contains(strings.Split(name, "/"), "..") {
		return "", fmt.Errorf("archive entry %q: %w", name, ErrOutsideRoot)
	}
	for i := range len(clean) {
		if clean[i] == '/' && links[clean[:i]] {
			return "", fmt.Errorf("archive entry %q goes through a link: %w", name, ErrOutsideRoot)
		}
	}
	if links[clean] {
		return "", fmt.Errorf("archive entry %q replaces or links to a symbolic link: %w", name, ErrOutsideRoot)
	}
	return clean, nil
}

// plainSegment is a name that is no pattern to any tar.
var plainSegment = regexp.MustCompile(`^[A-Za-z0-9._-]+$`)

func (f *execFS) TarOut(ctx context.Context, dir string, w io.Writer, opts TarOptions) error {
	p, err := f.locate("tarout", dir)
	if err != nil {
		return err
	}
	// tar leaves out what it can by itself; the filter below is what is relied on.
	var args []string
	for _, e := range opts.Exclude {
		if plainSegment.MatchString(e) {
			args = append(args, e)
		}
	}
	args = append([]string{strconv.Itoa(len(args))}, args...)
	args = append(append(args, execArg(p.base)), execArgs(p.dir)...)
	s, err := f.newCall().stream(ctx, execTar, args)
	if err != nil {
		return p.fail(err)
	}
	defer s.Close()
	s.place = p
	err = filterTarOut(w, s.tarBody(), opts.Exclude)
	if pe := (*fs.PathError)(nil); errors.As(err, &pe) || err == nil {
		return err
	}
	return p.fail(err)
}

// tarBody reads on when tar complains with exit code 1 that a file changed
// while it was packed: agents write all the time, and the entry is whole.
func (s *execStream) tarBody() io.Reader { return tarBody{s} }

type tarBody struct{ s *execStream }

func (t tarBody) Read(b []byte) (int, error) {
	n, err := t.s.Read(b)
	if e := (*ExitError)(nil); errors.As(err, &e) && e.Exit.Code == 1 && changedMeanwhile(e.StderrTail) {
		err = io.EOF
	}
	return n, err
}

func changedMeanwhile(line string) bool {
	return strings.HasSuffix(line, ": file changed as we read it") ||
		strings.HasSuffix(line, ": File removed before we read it")
}

func filterTarOut(w io.Writer, r io.Reader, exclude []string) error {
	tr, tw := tar.NewReader(r), tar.NewWriter(w)
	for {
		h, err := tr.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
		name := path.Clean(h.Name)
		if name == "." || slices.ContainsFunc(strings.Split(name, "/"), func(e string) bool { return slices.Contains(exclude, e) }) {
			continue
		}
		out := &tar.Header{
			Typeflag: h.Typeflag, Name: name, Linkname: h.Linkname, Size: h.Size,
			Mode: h.Mode & 0o7777, ModTime: h.ModTime, Format: tar.FormatPAX,
		}
		switch h.Typeflag {
		case tar.TypeReg, tar.TypeSymlink:
		case tar.TypeGNUSparse:
			out.Typeflag = tar.TypeReg
		case tar.TypeDir:
			out.Name += "/"
		case tar.TypeLink:
			out.Linkname = path.Clean(h.Linkname)
		default:
			continue // devices, pipes and sockets are not files of a workspace
		}
		if err := tw.WriteHeader(out); err != nil {
			return err
		}
		if _, err := io.Copy(tw, tr); err != nil {
			return err
		}
	}
	// The verdict on tar comes after the last block.
	if _, err := io.Copy(io.Discard, r); err != nil {
		return err
	}
	return tw.Close()
}
