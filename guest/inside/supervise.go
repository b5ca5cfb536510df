//go:build linux

package inside

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/aisandbox-go/aisandbox/internal/proc"
	"github.com/aisandbox-go/aisandbox/internal/wire"
	"github.com/aisandbox-go/aisandbox/journal/frame"
	"github.com/aisandbox-go/aisandbox/provider"
)

// Times of spec 04 §21.8.
const (
	beatEvery   = 5 * time.Second
	lingerAfter = time.Second
	launchLimit = 60 * time.Second
)

const maxLaunch = 8 << 20

// launch starts a supervisor of its own for a detached process and waits until
// the process runs.
func (s *session) launch(l *wire.Link, req *wire.Request) error {
	in := newUpload(l)
	if err := checkToken(req.Token); err != nil {
		return err
	}
	if _, err := s.spec(req); err != nil {
		return err
	}
	if err := s.journals.ensure(); err != nil {
		return err
	}
	// Cheap, and it spares the process; the supervisor decides.
	for _, suffix := range []string{lockSuffix, goneSuffix} {
		if _, err := os.Lstat(s.journals.path(req.Token, suffix)); err == nil {
			return fmt.Errorf("launch %q: %w", req.Token, provider.ErrAlreadyLaunched)
		}
	}
	req.Mark = markOf(s.journals.dir, req.Token)
	body := req.Encode(nil)
	head := binary.BigEndian.AppendUint32(nil, uint32(len(body)))
	ack := &ackWriter{c: make(chan struct{})}
	spec := proc.Spec{
		Argv:  []string{"/proc/self/exe", wire.Marker, "supervise", "--root", s.root, "--home", s.home, "--user", s.user},
		Dir:   "/",
		Env:   os.Environ(),
		Stdin: io.MultiReader(bytes.NewReader(head), bytes.NewReader(body), &chunker{r: in}), Stdout: ack, Reaps: true,
		Session: true, // as the guest does, for its agent joins it
	}
	dir := s.journals.dir
	if s.sealed {
		d, err := os.Open(dir)
		if err != nil {
			return fmt.Errorf("launch: journal directory: %w", err)
		}
		defer d.Close()
		spec.ExtraFiles = []*os.File{d}
		spec.Argv = append(spec.Argv, "--journal-fd", "3")
	} else {
		spec.Argv = append(spec.Argv, "--journal-dir", dir)
	}
	p, err := proc.Start(context.WithoutCancel(s.ctx), spec)
	if err != nil {
		return fmt.Errorf("launch: supervisor: %w", err)
	}
	t := time.NewTimer(launchLimit)
	defer t.Stop()
	select {
	case <-ack.c:
	case <-p.Done():
	case <-s.ctx.Done():
		return fmt.Errorf("launch: %w", errHostGone) // what was delivered whole, starts
	case <-t.C:
		_ = p.KillTree()
		return fmt.Errorf("launch: the supervisor did not start within %v", launchLimit)
	}
	answer := ack.bytes()
	switch {
	case len(answer) > 0 && answer[0] == '+':
		return nil
	case len(answer) > 0:
		_, _ = p.Wait()
		return wire.DecodeError(ack.bytes()[1:])
	}
	exit, _ := p.Wait()
	return fmt.Errorf("launch: the supervisor ended (%v) before the process ran", exit)
}

// chunker delimits the agent's input on the supervisor's stdin, so that an input
// that was cut off is never taken for a whole one.
type chunker struct {
	r    io.Reader
	rest []byte
	err  error
}

func (c *chunker) Read(b []byte) (int, error) {
	if len(c.rest) == 0 {
		if c.err != nil {
			return 0, c.err
		}
		buf := make([]byte, 4+wire.Chunk)
		n, err := c.r.Read(buf[4:])
		switch {
		case n > 0:
		case err == io.EOF:
			c.err = io.EOF
		case err != nil:
			return 0, err
		}
		binary.BigEndian.PutUint32(buf, uint32(n))
		if n == 0 && err == nil {
			return 0, nil
		}
		c.rest = buf[:4+n]
	}
	n := copy(b, c.rest)
	c.rest = c.rest[n:]
	return n, nil
}

// dechunker is the inverse of chunker.
type dechunker struct {
	r    io.Reader
	left uint32
	done bool
}

func (d *dechunker) Read(b []byte) (int, error) {
	if d.done {
		return 0, io.EOF
	}
	if d.left == 0 {
		var head [4]byte
		if _, err := io.ReadFull(d.r, head[:]); err != nil {
			return 0, io.ErrUnexpectedEOF
		}
		if d.left = binary.BigEndian.Uint32(head[:]); d.left == 0 {
			d.done = true
			return 0, io.EOF
		}
	}
	n, err := d.r.Read(b[:min(len(b), int(d.left))])
	d.left -= uint32(n)
	if n > 0 {
		return n, nil
	}
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return 0, err
}

// ackWriter takes the supervisor's answer.
type ackWriter struct {
	c chan struct{}

	mu   sync.Mutex
	b    []byte
	once sync.Once
}

func (a *ackWriter) Write(b []byte) (int, error) {
	a.mu.Lock()
	if len(a.b) < 64<<10 {
		a.b = append(a.b, b...)
	}
	a.mu.Unlock()
	a.once.Do(func() { close(a.c) })
	return len(b), nil
}

func (a *ackWriter) bytes() []byte {
	a.mu.Lock()
	defer a.mu.Unlock()
	return bytes.Clone(a.b)
}

// supervise is the supervisor's main function: it runs one agent to its end,
// whatever happens to host and guest. The request with its nonce comes on stdin,
// never in arguments, environment or files.
func supervise(s *server, stdin io.Reader, stdout io.WriteCloser) int {
	fail := func(err error) int {
		_, _ = stdout.Write(append([]byte{'-'}, wire.EncodeError(err)...))
		_ = stdout.Close()
		return 1
	}
	if err := proc.BecomeReaper(); err != nil {
		return fail(err)
	}
	req, err := readLaunch(stdin)
	if err != nil {
		return fail(err)
	}
	v := &supervisor{server: s, req: req}
	if err := v.lock(); err != nil {
		return fail(err)
	}
	if err := v.begin(stdin); err != nil {
		v.undo()
		return fail(err)
	}
	_, _ = stdout.Write([]byte{'+'})
	_ = stdout.Close()
	v.finish()
	return 0
}

func readLaunch(r io.Reader) (*wire.Request, error) {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, fmt.Errorf("supervise: %w", err)
	}
	n := binary.BigEndian.Uint32(head[:])
	if n > maxLaunch {
		return nil, fmt.Errorf("supervise: request of %d bytes", n)
	}
	b := make([]byte, n)
	if _, err := io.ReadFull(r, b); err != nil {
		return nil, fmt.Errorf("supervise: %w", err)
	}
	req, err := wire.DecodeRequest(b)
	if err != nil {
		return nil, err
	}
	return req, checkToken(req.Token)
}

type supervisor struct {
	*server
	req     *wire.Request
	lockFd  *os.File
	journal *journalWriter
	control *net.UnixListener
	p       *proc.Process
}

// lock takes the once-only lock: a file that is locked before it gets its name,
// so nobody ever sees it unlocked while we live.
func (v *supervisor) lock() error {
	name := v.journals.path(v.req.Token, lockSuffix)
	tmp := name + "." + strconv.Itoa(os.Getpid())
	f, err := os.OpenFile(tmp, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("launch: %w", err)
	}
	defer os.Remove(tmp)
	c, err := f.SyscallConn()
	if err == nil {
		var lerr error
		err = c.Control(func(fd uintptr) { lerr = unix.Flock(int(fd), unix.LOCK_EX|unix.LOCK_NB) })
		err = errors.Join(err, lerr)
	}
	if err == nil {
		err = os.Link(tmp, name)
	}
	if err != nil {
		_ = f.Close()
		if errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("launch %q: %w", v.req.Token, provider.ErrAlreadyLaunched)
		}
		return fmt.Errorf("launch: lock: %w", err)
	}
	if _, err := os.Lstat(v.journals.path(v.req.Token, goneSuffix)); err == nil {
		_ = os.Remove(name)
		_ = f.Close()
		return fmt.Errorf("launch %q: it was forgotten: %w", v.req.Token, provider.ErrAlreadyLaunched)
	}
	v.lockFd = f
	return nil
}

// undo is for when nothing ran: the token may be used again.
func (v *supervisor) undo() {
	if v.control != nil {
		_ = v.control.Close()
	}
	for _, suffix := range []string{socketSuffix, reserveSuffix, journalSuffix, lockSuffix} {
		_ = os.Remove(v.journals.path(v.req.Token, suffix))
	}
	_ = v.lockFd.Close()
}

func (v *supervisor) begin(stdin io.Reader) error {
	spec, err := v.spec(v.req)
	if err != nil {
		return err
	}
	level := 1
	if spec.Credential != nil && spec.Credential.Uid != 0 || v.sealed {
		level = 2
	}
	header, err := json.Marshal(frame.Header{
		Version: frame.HeaderVersion, RunID: v.req.RunID, StartedMs: time.Now().UnixMilli(), Level: level,
	})
	if err != nil {
		return err
	}
	token := v.req.Token
	v.journal, err = newJournalWriter(v.journals.path(token, journalSuffix), v.journals.path(token, reserveSuffix), header)
	if err != nil {
		return fmt.Errorf("launch: journal: %w", err)
	}
	input, err := spool(v.journals.dir, &dechunker{r: stdin})
	if err != nil {
		return fmt.Errorf("launch: stdin: %w", err)
	}
	addr, release, err := socketAddr(v.journals.path(token, socketSuffix))
	if err != nil {
		return fmt.Errorf("launch: %w", err)
	}
	defer release()
	if v.control, err = net.ListenUnix("unix", addr); err != nil {
		return fmt.Errorf("launch: control socket: %w", err)
	}
	v.control.SetUnlinkOnClose(false)
	if input != nil {
		spec.Stdin = input
	}
	spec.Stdout = (*lineWriter)(v.journal)
	spec.Stderr = (*errWriter)(v.journal)
	spec.Linger = lingerAfter
	spec.KillStrays = false
	if v.p, err = proc.Start(context.Background(), spec); err != nil {
		return fmt.Errorf("launch: %w", err)
	}
	v.journal.mu.Lock()
	v.journal.full = func() { _ = v.p.KillTree() }
	v.journal.mu.Unlock()
	return nil
}

// spool keeps the whole input in a file without a name: the host may be gone
// before the agent reads it.
func spool(dir string, r io.Reader) (*os.File, error) {
	f, err := os.CreateTemp(dir, ".stdin-")
	if err != nil {
		return nil, err
	}
	_ = os.Remove(f.Name())
	n, err := io.CopyBuffer(onlyWriter{f}, onlyReader{r}, make([]byte, wire.Chunk))
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	if n == 0 {
		return nil, f.Close()
	}
	_, err = f.Seek(0, io.SeekStart)
	return f, err
}

// finish runs until the agent has ended and signs that.
func (v *supervisor) finish() {
	go v.listen()
	beats := time.NewTicker(beatEvery)
	for ended := false; !ended; {
		select {
		case <-v.p.Done():
			ended = true
		case <-beats.C:
			v.journal.heartbeat()
		}
	}
	beats.Stop()
	exit, _ := v.p.Wait()
	v.journal.end(exit, v.req.Nonce, v.req.RunID)
	_ = v.control.Close()
	_ = os.Remove(v.journals.path(v.req.Token, socketSuffix))
	_ = v.lockFd.Close()
}

// listen takes signals from the guest; the directory keeps others out.
func (v *supervisor) listen() {
	for {
		c, err := v.control.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			time.Sleep(10 * time.Millisecond)
			continue
		}
		go func() {
			defer c.Close()
			_ = c.SetReadDeadline(time.Now().Add(5 * time.Second))
			var b [1]byte
			if _, err := io.ReadFull(c, b[:]); err != nil {
				return
			}
			switch syscall.Signal(b[0]) {
			case syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM:
				// Who asks the agent to end wants its children gone as well, when it is.
				_ = v.p.Sweep()
			}
			if err := v.p.Signal(syscall.Signal(b[0])); err != nil {
				_, _ = c.Write([]byte("-" + err.Error()))
				return
			}
			_, _ = c.Write([]byte{'+'})
		}()
	}
}

// journalWriter appends frames.
type journalWriter struct {
	f       *os.File
	reserve string

	mu    sync.Mutex
	full  func() // ends the agent when the disk stays full
	size  int64
	line  []byte // of an unfinished line
	buf   []byte
	tally frame.Tally
	last  time.Time
	lost  bool
	limit time.Duration // how long a full disk holds the agent back before it is ended
}

func newJournalWriter(name, reserve string, header []byte) (*journalWriter, error) {
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	j := &journalWriter{f: f, reserve: reserve, limit: fullLimit}
	if err := os.WriteFile(reserve, make([]byte, 4<<10), 0o600); err != nil {
		return nil, err
	}
	if err := j.append(frame.Append(nil, frame.TypeHeader, header)); err != nil {
		return nil, err
	}
	return j, nil
}

// append writes whole frames or nothing.
func (j *journalWriter) append(b []byte) error {
	n, err := j.f.Write(b)
	if err != nil {
		if n > 0 {
			_ = j.f.Truncate(j.size)
		}
		return err
	}
	j.size += int64(n)
	j.last = time.Now()
	return nil
}

const fullLimit = 30 * time.Second

// put appends frames of output, waiting for space where there is none. Called
// with the lock held.
func (j *journalWriter) put(b []byte, types ...frame.Frame) error {
	begin := time.Now()
	for {
		if j.lost {
			return errors.New("journal: no space left")
		}
		err := j.append(b)
		if err == nil {
			for _, f := range types {
				j.tally.Add(f)
			}
			return nil
		}
		if !errors.Is(err, syscall.ENOSPC) && !errors.Is(err, syscall.EDQUOT) || time.Since(begin) > j.limit {
			j.lost = true
			if j.full != nil {
				go j.full()
			}
			return err
		}
		j.mu.Unlock()
		time.Sleep(100 * time.Millisecond)
		j.mu.Lock()
	}
}

// lineWriter makes a frame of each line of stdout.
type lineWriter journalWriter

func (w *lineWriter) Write(b []byte) (int, error) {
	j := (*journalWriter)(w)
	j.mu.Lock()
	defer j.mu.Unlock()
	total := len(b)
	j.buf = j.buf[:0]
	var frames []frame.Frame
	add := func(t frame.Type, p []byte) {
		j.buf = frame.Append(j.buf, t, p)
		frames = append(frames, frame.Frame{Type: t, Payload: p})
	}
	for {
		i := bytes.IndexByte(b, '\n')
		if i < 0 {
			break
		}
		line := b[:i]
		if len(j.line) > 0 {
			line = append(j.line, line...)
			j.line = nil
		}
		for len(line) > frame.MaxPayload {
			add(frame.TypePartial, line[:frame.MaxPayload])
			line = line[frame.MaxPayload:]
		}
		add(frame.TypeLine, line)
		b = b[i+1:]
	}
	j.line = append(j.line, b...)
	if len(j.line) >= frame.MaxPayload {
		line := j.line
		j.line = nil
		for len(line) >= frame.MaxPayload {
			add(frame.TypePartial, line[:frame.MaxPayload])
			line = line[frame.MaxPayload:]
		}
		j.line = append(j.line, line...)
	}
	if len(j.buf) == 0 {
		return total, nil
	}
	if err := j.put(j.buf, frames...); err != nil {
		return 0, err
	}
	return total, nil
}

// errWriter makes frames of stderr.
type errWriter journalWriter

func (w *errWriter) Write(b []byte) (int, error) {
	j := (*journalWriter)(w)
	j.mu.Lock()
	defer j.mu.Unlock()
	if err := j.put(frame.Append(nil, frame.TypeStderr, b)); err != nil {
		return 0, err
	}
	return len(b), nil
}

func (j *journalWriter) heartbeat() {
	j.mu.Lock()
	defer j.mu.Unlock()
	if now := time.Now(); now.Sub(j.last) >= beatEvery-beatEvery/10 {
		_ = j.append(frame.Append(nil, frame.TypeHeartbeat, frame.Heartbeat(now.UnixMilli())))
	}
}

// end writes the unfinished line and the signed exit. A full disk gets the
// reserve's space.
func (j *journalWriter) end(exit provider.Exit, nonce []byte, runID string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if len(j.line) > 0 {
		f := frame.Frame{Type: frame.TypePartial, Payload: j.line}
		if j.append(frame.Append(nil, f.Type, f.Payload)) == nil {
			j.tally.Add(f)
		}
	}
	e := j.tally.Sign(frame.Exit{Code: int32(exit.Code), Signal: int32(exit.Signal)}, nonce, runID)
	b := frame.Append(nil, frame.TypeExit, e.Encode())
	if j.append(b) != nil {
		_ = os.Remove(j.reserve)
		_ = j.append(b)
	}
	_ = os.Remove(j.reserve)
	_ = j.f.Sync()
	_ = j.f.Close()
}

// cleanDir is for flags: an empty directory stays empty.
func cleanDir(d string) string {
	if d == "" {
		return ""
	}
	return filepath.Clean(d)
}
