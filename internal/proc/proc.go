//go:build linux

// Package proc starts a process in a group of its own, carries its streams, and
// ends it together with everything that it started.
//
// It exists because os/exec can't: a grandchild that holds a pipe keeps
// exec.Cmd.Wait from returning, a group signal misses what called setsid, and
// a process that reaps orphans would steal exec.Cmd's exits. All providers that
// start processes on a Linux kernel share it, and so does the guest.
package proc

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/aisandbox-go/aisandbox/provider"
)

// MarkName is the environment variable that carries a spawn's mark. Every
// process of the tree inherits it, so that a kill finds what changed its session
// and its parent (spec 05 §3.8 d).
const MarkName = "AISBX_PROC"

// stuckWriter is how long Wait goes on waiting for the caller's own writers
// after the context ended and the tree is dead.
const stuckWriter = 2 * time.Second

// Spec says what to start.
type Spec struct {
	// Argv is the program and its arguments. A program without a slash is looked
	// up in the PATH of Env, never in ours.
	Argv []string

	// Dir is the working directory; empty is ours.
	Dir string

	// Env is the complete environment; of two entries with one name the later wins.
	Env []string

	// Stdin nil is /dev/null. A read from Stdin never holds Wait back: when the
	// process ends first, the goroutine that reads goes on until that read returns.
	Stdin io.Reader

	// Stdout and Stderr nil discard. Each is written by one goroutine; if both are
	// the same value they share one pipe, so the order of writes is kept. A writer
	// that is slow holds the process back. A writer's error closes the pipe, and
	// Wait returns it.
	Stdout, Stderr io.Writer

	// Terminal, when set, is a pseudo terminal for the three streams; all output
	// arrives on Stdout.
	Terminal *provider.Terminal

	// Credential is the user to run as; nil is ours.
	Credential *syscall.Credential

	// Mark is the value of [MarkName]; empty mints one.
	Mark string

	// KillStrays ends what is left of the tree after the process itself has ended,
	// before Wait returns. Without it background children live on.
	KillStrays bool

	// Linger goes on reading the output of background children for at most this
	// long after the process itself has ended.
	Linger time.Duration

	// Reaps says that the process adopts the orphans of its descendants itself, so
	// that an orphan that comes to us is never one of its tree.
	Reaps bool

	// Session makes the process lead a session of its own in any case. It does so
	// with a terminal too, and where this process is no session's leader that has
	// called [BecomeReaper]; otherwise it leads a group in our session.
	Session bool

	// ExtraFiles are descriptors 3 and up in the child. They stay the caller's.
	ExtraFiles []*os.File
}

// Process is a started process. Its methods may be called concurrently.
type Process struct {
	pid    int
	mark   string
	badge  uint64 // see [reaper]; 0: it has none
	uid    int    // for reading the environment of its tree
	gid    int
	start  int64 // clock ticks since boot, not later than the true start
	strays atomic.Bool
	reaps  bool
	linger time.Duration

	ended chan struct{} // the main process was reaped
	done  chan struct{} // Wait may return

	mu     sync.Mutex
	reaped bool
	status syscall.WaitStatus
	cause  error // the context ended first

	kill   sync.Mutex // one KillTree at a time
	killed sync.WaitGroup

	streams
	exit provider.Exit
	err  error
}

var _ provider.Process = (*Process)(nil)

// Start starts a process. When ctx ends the whole tree is killed and Wait
// returns the cause; a ctx that has ended already starts nothing.
//
// A program that is missing is an error wrapping fs.ErrNotExist, one that can't
// be executed wraps fs.ErrPermission, and a bad Dir or an argument with a NUL
// wraps provider.ErrInvalid.
func Start(ctx context.Context, s Spec) (*Process, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if len(s.Argv) == 0 || s.Argv[0] == "" {
		return nil, fmt.Errorf("proc: argv is empty: %w", provider.ErrInvalid)
	}
	for _, a := range s.Argv {
		if strings.IndexByte(a, 0) >= 0 {
			return nil, fmt.Errorf("proc: argv has a NUL byte: %w", provider.ErrInvalid)
		}
	}
	p := &Process{
		mark:   s.Mark,
		reaps:  s.Reaps,
		linger: s.Linger,
		ended:  make(chan struct{}),
		done:   make(chan struct{}),
		uid:    -1,
	}
	p.strays.Store(s.KillStrays)
	if p.mark == "" {
		p.mark = rand.Text()
	}
	if c := s.Credential; c != nil {
		p.uid, p.gid = int(c.Uid), int(c.Gid)
	}
	env, err := cleanEnv(s.Env, p.mark)
	if err != nil {
		return nil, err
	}
	path, err := LookPath(s.Argv[0], s.Dir, env)
	if err != nil {
		if derr := checkDir(s.Dir); derr != nil {
			return nil, derr
		}
		return nil, err
	}
	files, err := p.open(s)
	if err != nil {
		return nil, fmt.Errorf("proc: open streams: %w", err)
	}
	attr := &syscall.ProcAttr{
		Dir:   s.Dir,
		Env:   env,
		Files: files,
		Sys:   &syscall.SysProcAttr{Credential: s.Credential},
	}
	switch r := theReaper.Load(); {
	case s.Terminal != nil:
		attr.Sys.Setsid, attr.Sys.Setctty = true, true
	case r == nil || !r.leads || s.Session:
		attr.Sys.Setsid = true
	default:
		// Our session has no terminal either, and a group is enough to be signalled
		// by. A session would cost a scheduling group of the kernel's (autogroup), a
		// quarter of what starting a small program takes.
		attr.Sys.Setpgid = true
	}
	p.start = bootTicks()
	err = p.fork(path, s.Argv, attr)
	runtime.KeepAlive(s.ExtraFiles)
	p.closeChildEnds()
	if err != nil {
		p.closeAll()
		return nil, startError(err, s, path)
	}
	p.startPumps(s)
	stop := context.AfterFunc(ctx, func() { p.cancel(context.Cause(ctx)) })
	go p.finish(stop)
	return p, nil
}

// fork starts the process and sees to it that somebody waits for it.
func (p *Process) fork(path string, argv []string, attr *syscall.ProcAttr) error {
	if r := theReaper.Load(); r != nil {
		return r.fork(p, path, argv, attr)
	}
	for try := 0; ; try++ {
		pid, err := syscall.ForkExec(path, argv, attr)
		if again(err, try) {
			continue
		}
		if err != nil {
			return err
		}
		p.pid = pid
		go p.waitAlone()
		return nil
	}
}

// again says whether a failed fork is worth another try: after a signal, and when
// the program file is one that another thread's fork still holds open for writing.
func again(err error, try int) bool {
	switch {
	case err == syscall.EINTR:
		return true
	case err == syscall.ETXTBSY && try < 10:
		time.Sleep(time.Duration(try+1) * time.Millisecond)
		return true
	}
	return false
}

// waitAlone waits for this process only, for when nobody reaps centrally.
func (p *Process) waitAlone() {
	for {
		pid, err := peek(unix.P_PID, p.pid, 0)
		if err == unix.EINTR || err == nil && pid == 0 {
			continue
		}
		p.reap() // also on ECHILD: somebody else took the status
		return
	}
}

// reap takes the exit status. The lock keeps Signal from hitting a process that
// was given the number right after.
func (p *Process) reap() {
	var ws syscall.WaitStatus
	p.mu.Lock()
	for {
		_, err := syscall.Wait4(p.pid, &ws, 0, nil)
		if err == syscall.EINTR {
			continue
		}
		if err == nil {
			p.status = ws
		}
		break
	}
	p.reaped = true
	p.mu.Unlock()
	close(p.ended)
}

// finish runs from the end of the main process to the release of Wait.
func (p *Process) finish(stop func() bool) {
	<-p.ended
	stop()
	p.mu.Lock()
	p.exit = exitOf(p.status)
	cause := p.cause
	p.mu.Unlock()
	p.killed.Wait()
	var kerr error
	if p.strays.Load() || cause != nil {
		kerr = p.KillTree()
	}
	p.closeStdin()
	if p.linger > 0 && cause == nil {
		p.waitOutput(p.linger)
	}
	p.drain()
	if cause != nil {
		p.waitPumps(stuckWriter)
	} else {
		p.waitPumps(0)
	}
	switch {
	case cause != nil:
		p.err = cause
	case kerr != nil:
		p.err = kerr
	default:
		p.err = p.streamError()
	}
	close(p.done)
}

func (p *Process) cancel(cause error) {
	p.mu.Lock()
	if p.reaped {
		p.mu.Unlock()
		return
	}
	p.cause = cause
	p.killed.Add(1)
	p.mu.Unlock()
	defer p.killed.Done()
	_ = p.KillTree() // finish calls it once more and keeps the error
}

// Pid returns the process number, which is the number of its group too.
func (p *Process) Pid() int { return p.pid }

// Mark returns the value of [MarkName] in the process's environment.
func (p *Process) Mark() string { return p.mark }

// Wait returns when the process has ended and what it had written until then has
// been delivered. It doesn't wait for strangers that hold the pipe. Any number of
// callers get the same answer.
func (p *Process) Wait() (provider.Exit, error) {
	<-p.done
	return p.exit, p.err
}

// Done is closed when Wait would return at once.
func (p *Process) Done() <-chan struct{} { return p.done }

// Sweep implements [provider.Sweeper]: it is KillStrays from now on.
func (p *Process) Sweep() error {
	p.strays.Store(true)
	return nil
}

// Signal sends to the process group; os.Kill is [Process.KillTree]. After the
// process has ended it does nothing.
func (p *Process) Signal(sig os.Signal) error {
	n, ok := sig.(syscall.Signal)
	if !ok {
		return fmt.Errorf("proc: signal %v: %w", sig, errors.ErrUnsupported)
	}
	p.mu.Lock()
	if p.reaped {
		p.mu.Unlock()
		return nil
	}
	if n == syscall.SIGKILL {
		p.mu.Unlock()
		return p.KillTree()
	}
	defer p.mu.Unlock()
	err := syscall.Kill(-p.pid, n)
	if err == syscall.ESRCH || err == syscall.EPERM {
		err = syscall.Kill(p.pid, n)
	}
	if err != nil && err != syscall.ESRCH {
		return fmt.Errorf("proc: signal %d to process %d: %w", n, p.pid, err)
	}
	return nil
}

func (p *Process) signalGroup(sig syscall.Signal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.reaped {
		_ = syscall.Kill(-p.pid, sig)
	}
}

// Resize sets the size of the terminal.
func (p *Process) Resize(t provider.Terminal) error {
	if p.pty == nil {
		return fmt.Errorf("proc: resize: the process has no terminal: %w", provider.ErrInvalid)
	}
	select {
	case <-p.ended:
		return nil
	default:
	}
	return setSize(p.pty, t)
}

func exitOf(ws syscall.WaitStatus) provider.Exit {
	if ws.Signaled() {
		return provider.Exit{Code: 128 + int(ws.Signal()), Signal: int(ws.Signal())}
	}
	return provider.Exit{Code: ws.ExitStatus()}
}

// cleanEnv drops overridden entries, for a libc returns the first it finds, and
// adds the mark.
func cleanEnv(env []string, mark string) ([]string, error) {
	out := make([]string, 0, len(env)+1)
	out = append(out, MarkName+"="+mark)
	seen := make(map[string]bool, len(env)+1)
	seen[MarkName] = true
	for _, kv := range slices.Backward(env) {
		if strings.IndexByte(kv, 0) >= 0 {
			return nil, fmt.Errorf("proc: an environment entry has a NUL byte: %w", provider.ErrInvalid)
		}
		name, _, ok := strings.Cut(kv, "=")
		if !ok || name == "" || seen[name] {
			continue
		}
		seen[name] = true
		out = append(out, kv)
	}
	slices.Reverse(out)
	return out, nil
}

// LookPath finds an executable in the PATH of env, as execvp would with the
// working directory dir. The error wraps fs.ErrNotExist or fs.ErrPermission.
func LookPath(file, dir string, env []string) (string, error) {
	if strings.Contains(file, "/") {
		return file, nil // the kernel says what is wrong with it
	}
	var denied bool
	list := "/usr/local/bin:/usr/bin:/bin"
	for _, kv := range slices.Backward(env) {
		if v, ok := strings.CutPrefix(kv, "PATH="); ok {
			list = v
			break
		}
	}
	for d := range strings.SplitSeq(list, ":") {
		path := d + "/" + file
		stat := path
		if !strings.HasPrefix(d, "/") {
			path = "./" + filepath.Join(d, file)
			stat = filepath.Join(dir, path)
		}
		var st syscall.Stat_t
		err := syscall.Stat(stat, &st)
		switch {
		case err == syscall.EACCES:
			denied = true
		case err != nil || st.Mode&syscall.S_IFMT == syscall.S_IFDIR:
		case st.Mode&0o111 == 0:
			denied = true
		default:
			return path, nil
		}
	}
	if denied {
		return "", &fs.PathError{Op: "exec", Path: file, Err: syscall.EACCES}
	}
	return "", &fs.PathError{Op: "exec", Path: file, Err: fmt.Errorf("not found in PATH: %w", fs.ErrNotExist)}
}

func checkDir(dir string) error {
	if dir == "" {
		return nil
	}
	var st syscall.Stat_t
	err := syscall.Stat(dir, &st)
	if err == nil && st.Mode&syscall.S_IFMT != syscall.S_IFDIR {
		err = syscall.ENOTDIR
	}
	if err != nil {
		return fmt.Errorf("proc: working directory %q: %w: %w", dir, err, provider.ErrInvalid)
	}
	return nil
}

// startError finds out which of directory and program the kernel meant.
func startError(err error, s Spec, path string) error {
	if derr := checkDir(s.Dir); derr != nil {
		return derr
	}
	if errors.Is(err, syscall.E2BIG) {
		return fmt.Errorf("proc: arguments and environment are too long: %w: %w", err, provider.ErrInvalid)
	}
	if err == syscall.ENOENT {
		abs := path
		if !filepath.IsAbs(abs) {
			abs = filepath.Join(s.Dir, path)
		}
		if _, serr := os.Stat(abs); serr == nil {
			err = fmt.Errorf("its interpreter: %w", err)
		}
	}
	return &fs.PathError{Op: "exec", Path: s.Argv[0], Err: err}
}

func bootTicks() int64 {
	var ts unix.Timespec
	if unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts) != nil {
		return 0
	}
	return ts.Nano() / (int64(time.Second) / clockTicks)
}
