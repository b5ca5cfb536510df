package player

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"unicode/utf8"
)

// maxOutput bounds what the result of a command holds.
const maxOutput = 30_000

// procs are the process groups that this agent started and that may still have a
// member.
type procs struct {
	mu      sync.Mutex
	groups  map[int]struct{}
	stopped bool
}

// stop kills every group and lets none start any more.
func (ps *procs) stop() {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	ps.stopped = true
	for g := range ps.groups {
		syscall.Kill(-g, syscall.SIGKILL)
	}
}

// start starts cmd as the leader of a session and remembers its group, both or
// neither as far as stop can see.
func (ps *procs) start(cmd *exec.Cmd) error {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	if ps.stopped {
		return errors.New("the agent was told to stop")
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return err
	}
	if ps.groups == nil {
		ps.groups = make(map[int]struct{})
	}
	ps.groups[cmd.Process.Pid] = struct{}{}
	return nil
}

// reaped forgets a group whose leader has ended, unless a member is left: the
// number of an empty group may become a stranger's.
func (ps *procs) reaped(group int) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	if syscall.Kill(-group, 0) == syscall.ESRCH {
		delete(ps.groups, group)
	}
}

// kill kills one group.
func (ps *procs) kill(group int) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	if _, ok := ps.groups[group]; ok {
		syscall.Kill(-group, syscall.SIGKILL)
	}
}

// bash runs a command and returns once the shell has ended, whoever still holds
// its output: what it left in the background goes on, and what that prints is
// thrown away.
func (p *player) bash(ctx context.Context, command string) toolResult {
	r, w, err := os.Pipe()
	if err != nil {
		return failed(err.Error())
	}
	cmd := exec.Command("sh", "-c", command)
	cmd.Dir = p.cwd
	cmd.Stdout, cmd.Stderr = w, w
	err = p.procs.start(cmd)
	w.Close()
	if err != nil {
		r.Close()
		return failed(err.Error())
	}
	out := &output{r: r}
	go out.copy()
	group := cmd.Process.Pid
	release := context.AfterFunc(ctx, func() { p.procs.kill(group) })
	err = cmd.Wait()
	release()
	p.procs.reaped(group)
	out.drain()
	if ctx.Err() != nil {
		return toolResult{aborted: true}
	}

	text := out.text()
	code := 0
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		code = exit.ExitCode()
		if ws, ok := exit.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
			code = 128 + int(ws.Signal())
		}
	case err != nil:
		return failed(err.Error())
	}
	if code != 0 {
		s := fmt.Sprintf("Exit code %d", code)
		if text != "" {
			s += "\n" + text
		}
		return failed(s)
	}
	res := toolResult{content: text, isError: new(bool), structured: bashDone{Stdout: text}}
	if text == "" {
		res.content = "(Bash completed with no output)"
	}
	return res
}

// output collects the start of what comes out of a pipe.
type output struct {
	r *os.File

	mu    sync.Mutex
	buf   []byte
	more  int64 // bytes that came after the bound
	final bool
}

// copy reads until nobody holds the other end. It reads under the lock, so that
// drain finds either a byte in the pipe or its trace in buf.
func (o *output) copy() {
	defer o.r.Close()
	conn, err := o.r.SyscallConn()
	if err != nil {
		return
	}
	chunk := make([]byte, 32<<10)
	for eof := false; !eof; {
		err := conn.Read(func(fd uintptr) (done bool) {
			o.mu.Lock()
			defer o.mu.Unlock()
			n, err := o.read(fd, chunk)
			eof = n == 0 && err == nil
			if err != nil && err != syscall.EAGAIN && err != syscall.EINTR {
				eof = true
			}
			return err != syscall.EAGAIN
		})
		if err != nil {
			return
		}
	}
}

// read takes what one system call gives.
func (o *output) read(fd uintptr, chunk []byte) (int, error) {
	n, err := syscall.Read(int(fd), chunk)
	if n <= 0 || o.final {
		return max(n, 0), err
	}
	keep := min(n, maxOutput-len(o.buf))
	o.buf = append(o.buf, chunk[:keep]...)
	o.more += int64(n - keep)
	return n, err
}

// drain takes what is in the pipe now and nothing that comes later. A stranger
// that writes without end is cut off at what a pipe can hold.
func (o *output) drain() {
	o.mu.Lock()
	defer o.mu.Unlock()
	defer func() { o.final = true }()
	conn, err := o.r.SyscallConn()
	if err != nil {
		return
	}
	chunk := make([]byte, 32<<10)
	for left := 1 << 20; left > 0; {
		var n int
		// Control fails once copy has closed the pipe: then all has been read.
		cerr := conn.Control(func(fd uintptr) {
			for {
				n, err = o.read(fd, chunk)
				if err != syscall.EINTR {
					return
				}
			}
		})
		if cerr != nil || err != nil || n == 0 {
			return
		}
		left -= n
	}
}

// text is the output as a result shows it. It may only be called after drain.
func (o *output) text() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	buf := o.buf
	if o.more > 0 {
		// A character that the bound cut in two isn't shown.
		for i := 1; i < utf8.UTFMax && i <= len(buf); i++ {
			if tail := buf[len(buf)-i:]; utf8.RuneStart(tail[0]) {
				if !utf8.FullRune(tail) {
					buf = buf[:len(buf)-i]
				}
				break
			}
		}
		lost := o.more + int64(len(o.buf)-len(buf))
		return strings.ToValidUTF8(string(buf), "\uFFFD") + fmt.Sprintf("\n[%d more bytes were cut off]", lost)
	}
	return strings.TrimRight(strings.ToValidUTF8(string(buf), "\uFFFD"), "\n")
}
