//go:build linux

package proc

import (
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

var buffers = sync.Pool{New: func() any { b := make([]byte, 32<<10); return &b }}

// streams are the parent's side of a process's descriptors.
type streams struct {
	stdin *os.File   // write end; nil when the input is /dev/null
	outs  []*outPump // at most two
	pty   *os.File
	child []int // descriptors that only the child needs

	inDone chan struct{}
	inErr  error
}

// open makes the child's descriptors. On error everything is closed again.
func (st *streams) open(s Spec) (files []uintptr, err error) {
	defer func() {
		if err != nil {
			st.closeChildEnds()
			st.closeAll()
		}
	}()
	if s.Terminal != nil {
		master, slave, err := openPTY(*s.Terminal, s.Credential)
		if err != nil {
			return nil, err
		}
		st.pty = master
		st.child = append(st.child, slave)
		files = []uintptr{uintptr(slave), uintptr(slave), uintptr(slave)}
		out := s.Stdout
		if out == nil {
			out = io.Discard // a terminal that nobody reads would block its writer
		}
		st.outs = append(st.outs, newOutPump(master, out, true))
	} else {
		null := -1
		devNull := func() (int, error) {
			if null < 0 {
				fd, err := syscall.Open(os.DevNull, syscall.O_RDWR|syscall.O_CLOEXEC, 0)
				if err != nil {
					return 0, &os.PathError{Op: "open", Path: os.DevNull, Err: err}
				}
				null = fd
				st.child = append(st.child, fd)
			}
			return null, nil
		}
		in := -1
		if s.Stdin == nil {
			if in, err = devNull(); err != nil {
				return nil, err
			}
		} else {
			var w int
			if in, w, err = st.pipe(); err != nil {
				return nil, err
			}
			if st.stdin, err = nonblocking(w, "stdin"); err != nil {
				return nil, err
			}
		}
		files = append(files, uintptr(in))
		for i, w := range []io.Writer{s.Stdout, s.Stderr} {
			fd := -1
			switch {
			case w == nil:
				fd, err = devNull()
			case i == 1 && same(s.Stdout, w):
				fd = int(files[1])
			default:
				fd, err = st.output(w)
			}
			if err != nil {
				return nil, err
			}
			files = append(files, uintptr(fd))
		}
	}
	for _, f := range s.ExtraFiles {
		fd, err := rawFd(f)
		if err != nil {
			return nil, err
		}
		files = append(files, fd)
	}
	return files, nil
}

// pipe returns a read end and a write end, one of which becomes the parent's.
func (st *streams) pipe() (child, parent int, err error) {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		return 0, 0, os.NewSyscallError("pipe2", err)
	}
	st.child = append(st.child, p[0])
	return p[0], p[1], nil
}

func (st *streams) output(w io.Writer) (int, error) {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		return 0, os.NewSyscallError("pipe2", err)
	}
	st.child = append(st.child, p[1])
	r, err := nonblocking(p[0], "output")
	if err != nil {
		return 0, err
	}
	st.outs = append(st.outs, newOutPump(r, w, false))
	return p[1], nil
}

func nonblocking(fd int, name string) (*os.File, error) {
	if err := unix.SetNonblock(fd, true); err != nil {
		_ = unix.Close(fd)
		return nil, os.NewSyscallError("setnonblock", err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

// rawFd leaves the file in the mode it has; (*os.File).Fd would make it blocking.
func rawFd(f *os.File) (uintptr, error) {
	c, err := f.SyscallConn()
	if err != nil {
		return 0, err
	}
	var fd uintptr
	if err := c.Control(func(n uintptr) { fd = n }); err != nil {
		return 0, err
	}
	return fd, nil
}

// same reports whether two writers are one, without a panic on values that
// can't be compared.
func same(a, b io.Writer) bool {
	return a != nil && b != nil && reflect.TypeOf(a).Comparable() && reflect.TypeOf(b).Comparable() && a == b
}

func (st *streams) closeChildEnds() {
	for _, fd := range st.child {
		_ = unix.Close(fd)
	}
	st.child = nil
}

func (st *streams) closeAll() {
	if st.stdin != nil {
		_ = st.stdin.Close()
	}
	for _, o := range st.outs {
		_ = o.r.Close()
	}
	if st.pty != nil {
		_ = st.pty.Close()
	}
}

func (st *streams) startPumps(s Spec) {
	for _, o := range st.outs {
		go o.run()
	}
	switch {
	case st.pty != nil:
		st.inDone = make(chan struct{})
		go st.pumpTerminal(s.Stdin)
	case st.stdin != nil:
		st.inDone = make(chan struct{})
		go st.pumpStdin(s.Stdin)
	}
}

func (st *streams) pumpStdin(r io.Reader) {
	defer close(st.inDone)
	b := buffers.Get().(*[]byte)
	defer buffers.Put(b)
	for {
		n, rerr := r.Read(*b)
		if n > 0 {
			if _, err := st.stdin.Write((*b)[:n]); err != nil {
				break // the process doesn't want more, or has ended
			}
		}
		if rerr != nil {
			if rerr != io.EOF {
				st.inErr = fmt.Errorf("proc: read stdin: %w", rerr)
			}
			break
		}
	}
	_ = st.stdin.Close()
}

// pumpTerminal types the input. The end of the input is the end-of-file
// character, twice where it would only end a line.
func (st *streams) pumpTerminal(r io.Reader) {
	defer close(st.inDone)
	const eot = "\x04"
	last := byte('\n')
	if r != nil {
		b := buffers.Get().(*[]byte)
		defer buffers.Put(b)
		for {
			n, rerr := r.Read(*b)
			if n > 0 {
				if _, err := st.pty.Write((*b)[:n]); err != nil {
					return
				}
				last = (*b)[n-1]
			}
			if rerr != nil {
				if rerr != io.EOF {
					st.inErr = fmt.Errorf("proc: read stdin: %w", rerr)
				}
				break
			}
		}
	}
	end := eot
	if last != '\n' && last != '\x04' {
		end += eot
	}
	_, _ = st.pty.WriteString(end)
}

func (st *streams) closeStdin() {
	if st.stdin != nil {
		_ = st.stdin.Close()
	}
}

// drain tells the pumps that the process has ended.
func (st *streams) drain() {
	for _, o := range st.outs {
		select {
		case <-o.done:
		default:
			// Wakes a blocked read; the pump then takes what is in the pipe and stops.
			_ = o.r.SetReadDeadline(time.Unix(1, 0))
		}
	}
}

// waitOutput waits for the end of all output, for a while.
func (st *streams) waitOutput(limit time.Duration) {
	t := time.NewTimer(limit)
	defer t.Stop()
	for _, o := range st.outs {
		select {
		case <-o.done:
		case <-t.C:
			return
		}
	}
}

// waitPumps waits until the output is delivered; 0 waits for ever.
func (st *streams) waitPumps(limit time.Duration) {
	var timeout <-chan time.Time
	if limit > 0 {
		t := time.NewTimer(limit)
		defer t.Stop()
		timeout = t.C
	}
	for _, o := range st.outs {
		select {
		case <-o.done:
		case <-timeout:
			_ = o.r.Close()
			timeout = closedTime
		}
	}
}

var closedTime = func() <-chan time.Time {
	c := make(chan time.Time)
	close(c)
	return c
}()

// streamError is the first failure of a caller's reader or writer. Only for
// after the pumps have ended.
func (st *streams) streamError() error {
	for _, o := range st.outs {
		if o.err != nil {
			return fmt.Errorf("proc: write output: %w", o.err)
		}
	}
	if st.inDone != nil {
		select {
		case <-st.inDone:
			return st.inErr
		default:
		}
	}
	return nil
}

// outPump carries one output stream.
type outPump struct {
	r    *os.File
	w    io.Writer
	tty  bool
	done chan struct{}
	err  error
}

func newOutPump(r *os.File, w io.Writer, tty bool) *outPump {
	return &outPump{r: r, w: w, tty: tty, done: make(chan struct{})}
}

func (o *outPump) run() {
	defer close(o.done)
	defer o.r.Close()
	b := buffers.Get().(*[]byte)
	defer buffers.Put(b)
	for {
		n, err := o.r.Read(*b)
		if n > 0 && !o.write((*b)[:n]) {
			return
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			o.rest(*b)
			return
		}
		if err != nil { // EOF; EIO is a terminal's way to say it
			return
		}
	}
}

func (o *outPump) write(b []byte) bool {
	n, err := o.w.Write(b)
	if err == nil && n < len(b) {
		err = io.ErrShortWrite
	}
	o.err = err
	return err == nil
}

// rest delivers what was in the pipe when the process had ended, and not a byte
// more: a stranger that goes on writing must not keep us here.
func (o *outPump) rest(b []byte) {
	if o.r.SetReadDeadline(time.Time{}) != nil {
		return
	}
	c, err := o.r.SyscallConn()
	if err != nil {
		return
	}
	left, quiet := -1, 0
	if !o.tty {
		_ = c.Control(func(fd uintptr) { left, err = unix.IoctlGetInt(int(fd), unix.TIOCINQ) })
		if err != nil {
			return
		}
	}
	for limit := 1 << 20; left != 0 && limit > 0; {
		want := b
		if left > 0 && left < len(want) {
			want = want[:left]
		}
		var n int
		var rerr error
		if c.Read(func(fd uintptr) bool {
			n, rerr = ignoringEINTR(func() (int, error) { return unix.Read(int(fd), want) })
			return true
		}) != nil {
			return
		}
		if n > 0 {
			if !o.write(want[:n]) {
				return
			}
			limit -= n
			if left > 0 {
				left -= n
			}
			continue
		}
		// The kernel moves a terminal's output with a worker of its own: what was
		// written before the end may show up a moment after it.
		if o.tty && rerr == unix.EAGAIN && quiet < 5 {
			quiet++
			time.Sleep(2 * time.Millisecond)
			continue
		}
		return
	}
}

func ignoringEINTR(f func() (int, error)) (int, error) {
	for {
		n, err := f()
		if err != unix.EINTR {
			return n, err
		}
	}
}
