//go:build linux

package proc

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// theReaper is state of the operating-system process, as the subreaper bit is.
var theReaper atomic.Pointer[reaper]

// reaper waits for all children: those of Start, and orphans.
type reaper struct {
	leads bool // this process leads its session

	forks sync.Mutex // held from before a fork to its registration
	badge uint64     // of the last child
	hard  uint64     // the limit that badges are below; 0: children get none

	mu    sync.Mutex
	procs map[int]*Process

	forked chan struct{}  // holds one token: there is a child again
	ended  chan os.Signal // SIGCHLD, while the reaper is idle
}

// A badge is a resource limit that Linux does not enforce, the resident set's. A
// child of the reaper gets it at birth and its whole tree inherits it, whatever
// becomes of session, parent and environment; anybody may read it. It is a hint
// and no fetter: a process can change it, and is found by other means then.
//
//	0 1 | 30 random bits of this reaper | 32 bits that count the children
const badgeKind = uint64(1) << 62

// isBadge says whether a limit is a badge of any reaper.
func isBadge(limit uint64) bool { return limit>>62 == 1 }

// newBadges prepares badges, where the limits that this process was given allow it.
func (r *reaper) newBadges() {
	var lim unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_RSS, &lim) != nil || lim.Max < 2*badgeKind {
		return
	}
	var b [4]byte
	_, _ = rand.Read(b[:]) // it never fails
	r.hard, r.badge = lim.Max, badgeKind|uint64(binary.BigEndian.Uint32(b[:])>>2)<<32
}

// pin gives this process the next badge, for the child that it is about to fork.
func (r *reaper) pin() uint64 {
	if r.hard == 0 {
		return 0
	}
	// A wrapped counter stays within its bits.
	r.badge = r.badge&^(1<<32-1) | uint64(uint32(r.badge)+1)
	if unix.Setrlimit(unix.RLIMIT_RSS, &unix.Rlimit{Cur: r.badge, Max: r.hard}) != nil {
		return 0
	}
	return r.badge
}

// badgeOf reads a process's badge; 0 is none.
func badgeOf(pid int) uint64 {
	var buf [2048]byte
	n, err := readSmall("/proc/"+strconv.Itoa(pid)+"/limits", buf[:])
	if err != nil {
		return 0
	}
	_, rest, ok := bytes.Cut(buf[:n], []byte("Max resident set"))
	if f := bytes.Fields(rest[:min(len(rest), 64)]); ok && len(f) > 0 {
		if v, err := strconv.ParseUint(string(f[0]), 10, 64); err == nil && isBadge(v) {
			return v
		}
	}
	return 0
}

// BecomeReaper makes this process the parent of its descendants' orphans and
// starts to wait for every child, as the first process of a system does. From
// then on processes may be started with [Start] only: the exits of others, of
// os/exec for one, would be taken away. It can't be undone. Idempotent.
func BecomeReaper() error {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("proc: become child subreaper: %w", err)
	}
	r := &reaper{procs: map[int]*Process{}, forked: make(chan struct{}, 1), ended: make(chan os.Signal, 1)}
	if sid, err := unix.Getsid(0); err == nil {
		r.leads = sid == os.Getpid()
	}
	r.newBadges()
	if !theReaper.CompareAndSwap(nil, r) {
		return nil
	}
	go r.run()
	return nil
}

func (r *reaper) fork(p *Process, path string, argv []string, attr *syscall.ProcAttr) error {
	for try := 0; ; try++ {
		err := r.forkOnce(p, path, argv, attr)
		if !again(err, try) {
			return err
		}
	}
}

func (r *reaper) forkOnce(p *Process, path string, argv []string, attr *syscall.ProcAttr) error {
	// Forks of one process wait for each other in any case.
	r.forks.Lock()
	defer r.forks.Unlock()
	p.badge = r.pin()
	pid, err := syscall.ForkExec(path, argv, attr)
	if err != nil {
		return err
	}
	p.pid = pid
	r.mu.Lock()
	r.procs[pid] = p
	r.mu.Unlock()
	select {
	case r.forked <- struct{}{}:
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
			r.idle()
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

// idleAfter is how long there has to be no child until signals are asked for. Each
// of them wakes a thread, which between short commands is not worth it.
const idleAfter = time.Second

// idle waits until there may be a child again. That needs no fork of ours: a
// process that entered our pid namespace from outside may leave us its orphans.
func (r *reaper) idle() {
	t := time.NewTimer(idleAfter)
	defer t.Stop()
	select {
	case <-r.forked:
		return
	case <-t.C:
	}
	signal.Notify(r.ended, syscall.SIGCHLD)
	defer signal.Stop(r.ended)
	if _, err := peek(unix.P_ALL, 0, unix.WNOHANG); err != unix.ECHILD {
		return // it came before the signal was asked for
	}
	select {
	case <-r.forked:
	case <-r.ended:
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
