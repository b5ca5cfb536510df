//go:build linux

package proc

import (
	"fmt"
	"os"
	"os/signal"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// theReaper is state of the operating-system process, as the subreaper bit is.
var theReaper atomic.Pointer[reaper]

// reaper waits for all children: those of Start, and orphans.
type reaper struct {
	forks sync.RWMutex // held for reading from fork to registration
	mu    sync.Mutex
	procs map[int]*Process
	kick  chan os.Signal
}

// BecomeReaper makes this process the parent of its descendants' orphans and
// starts to wait for every child, as the first process of a system does. From
// then on processes may be started with [Start] only: the exits of others, of
// os/exec for one, would be taken away. It can't be undone. Idempotent.
func BecomeReaper() error {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("proc: become child subreaper: %w", err)
	}
	r := &reaper{procs: map[int]*Process{}, kick: make(chan os.Signal, 1)}
	if !theReaper.CompareAndSwap(nil, r) {
		return nil
	}
	// SIGCHLD matters only while there is no child at all: a process that entered
	// our pid namespace from outside may leave us its orphans.
	signal.Notify(r.kick, syscall.SIGCHLD)
	go r.run()
	return nil
}

func (r *reaper) fork(p *Process, path string, argv []string, attr *syscall.ProcAttr) error {
	r.forks.RLock()
	defer r.forks.RUnlock()
	pid, err := forkExec(path, argv, attr)
	if err != nil {
		return err
	}
	p.pid = pid
	r.mu.Lock()
	r.procs[pid] = p
	r.mu.Unlock()
	select {
	case r.kick <- syscall.SIGCHLD:
	default:
	}
	return nil
}

func (r *reaper) lookup(pid int) *Process {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.procs[pid]
}

func (r *reaper) run() {
	for {
		// Peeked, not taken: as long as the zombie is there its number can't be
		// given to another process, so nobody signals a stranger.
		pid, err := peek(unix.P_ALL, 0, 0)
		switch {
		case err == unix.ECHILD:
			<-r.kick
			continue
		case err != nil || pid == 0:
			continue
		}
		p := r.lookup(pid)
		if p == nil {
			// An orphan, or a process that ended before its fork returned to us.
			r.forks.Lock()
			p = r.lookup(pid)
			r.forks.Unlock()
		}
		if p == nil {
			var ws syscall.WaitStatus
			_, _ = syscall.Wait4(pid, &ws, syscall.WNOHANG, nil)
			continue
		}
		p.reap()
		r.mu.Lock()
		delete(r.procs, pid)
		r.mu.Unlock()
	}
}

// running returns the processes that have not been reaped.
func (r *reaper) running() []*Process {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := make([]*Process, 0, len(r.procs))
	for _, p := range r.procs {
		out = append(out, p)
	}
	return out
}

// siginfo is the kernel's siginfo_t for a child, on 64-bit systems.
type siginfo struct {
	signo, errno, code, _ int32
	pid                   int32
	uid                   uint32
	status                int32
	_                     [100]byte
}

// peek waits for a child to end and leaves it a zombie. 0 says that none has
// ended (with WNOHANG).
func peek(kind, id, flags int) (int, error) {
	var si siginfo
	_, _, errno := unix.Syscall6(unix.SYS_WAITID, uintptr(kind), uintptr(id),
		uintptr(unsafe.Pointer(&si)), uintptr(unix.WEXITED|unix.WNOWAIT|flags), 0, 0)
	if errno != 0 {
		return 0, errno
	}
	return int(si.pid), nil
}
