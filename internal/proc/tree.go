//go:build linux

package proc

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// clockTicks is the unit of /proc/PID/stat's times, a constant of the Linux ABI.
const clockTicks = 100

// killCap is when KillTree gives up on what doesn't die.
const killCap = 10 * time.Second

// entry is what a kill needs to know of a process.
type entry struct {
	pid, ppid, pgrp, sid int
	state                byte
	threads              int64
	start                int64
}

// dead is false for a process whose first thread has ended while others run on.
func (e entry) dead() bool    { return (e.state == 'Z' || e.state == 'X') && e.threads <= 1 }
func (e entry) stopped() bool { return e.state == 'T' || e.state == 't' || e.dead() }

// KillTree ends the process and everything it started, whatever it did to hide:
// its group and session, all descendants, everything that carries its mark in
// the environment or, where this process is the reaper, its badge, and orphans
// that only this tree can have left. It returns when none of them is left; zombies count as
// dead. What refuses to die is named in the error, after at most 10 s.
func (p *Process) KillTree() error {
	p.kill.Lock()
	defer p.kill.Unlock()
	return killAll(&selector{main: p})
}

// KillEnv ends every process that carries the entry NAME=VALUE in its
// environment, and its descendants, under the same rules as KillTree.
func KillEnv(entry string) error {
	return killAll(&selector{env: entry})
}

// KillDescendants ends every descendant of this process, under the same rules.
func KillDescendants() error {
	return killAll(&selector{all: true})
}

// selector decides who is part of a tree.
type selector struct {
	main *Process // nil: by env alone
	env  string
	all  bool // every descendant of ours

	known map[int]int64 // members of earlier rounds, by start time
}

// killAll stops, then kills, until nothing is left.
func killAll(s *selector) error {
	s.known = map[int]int64{}
	if s.main != nil {
		s.env = MarkName + "=" + s.main.mark
	}
	begin := time.Now()
	pause := 200 * time.Microsecond
	for {
		left, denied, err := s.freeze()
		if err != nil {
			return err
		}
		if len(left) == 0 {
			return nil
		}
		if s.main != nil {
			s.main.signalGroup(syscall.SIGKILL)
		}
		for _, e := range left {
			_ = syscall.Kill(e.pid, syscall.SIGKILL)
		}
		age := time.Since(begin)
		if age > killCap || denied == len(left) && age > time.Second {
			return survivors(left)
		}
		time.Sleep(pause)
		pause = min(pause*2, 50*time.Millisecond)
	}
}

func survivors(left []entry) error {
	var b bytes.Buffer
	for i, e := range left {
		if i == 8 {
			fmt.Fprintf(&b, " and %d more", len(left)-i)
			break
		}
		comm, _ := os.ReadFile("/proc/" + strconv.Itoa(e.pid) + "/comm")
		fmt.Fprintf(&b, " %d(%s)", e.pid, bytes.TrimSpace(comm))
	}
	return fmt.Errorf("proc: kill: still alive:%s", b.String())
}

// freeze stops the whole tree, so that it can't fork while it is being killed,
// and returns its living members.
func (s *selector) freeze() (left []entry, denied int, err error) {
	for range 50 {
		all, err := snapshot()
		if err != nil {
			return nil, 0, err
		}
		left = s.members(all)
		settled := true
		denied = 0
		for _, e := range left {
			if _, old := s.known[e.pid]; !old {
				settled = false
				s.known[e.pid] = e.start
			} else if !e.stopped() && e.state != 'D' {
				settled = false
			}
			if !e.stopped() {
				if syscall.Kill(e.pid, syscall.SIGSTOP) == syscall.EPERM {
					denied++
				}
			}
		}
		if settled || denied > 0 && denied == len(left) {
			break
		}
	}
	return left, denied, nil
}

// members returns the living processes of the tree, never this process itself.
func (s *selector) members(all []entry) []entry {
	self := os.Getpid()
	in := map[int]bool{}
	byPid := make(map[int]int, len(all))
	for i, e := range all {
		byPid[e.pid] = i
	}
	var floor int64
	uid, gid := -1, -1
	badge := uint64(0)
	if p := s.main; p != nil && p.pid > 1 {
		floor, uid, gid, badge = p.start, p.uid, p.gid, p.badge
		p.mu.Lock()
		reaped := p.reaped
		p.mu.Unlock()
		i, exists := byPid[p.pid]
		// Once reaped, the number may belong to a stranger, and so would a group and
		// a session of that number.
		stranger := reaped && exists
		if exists && !reaped {
			floor = min(floor, all[i].start)
			in[p.pid] = true
		}
		for _, e := range all {
			// The session is one that the process or a child of it made: where it leads
			// only a group, its session is ours and has another number.
			if stranger || e.pgrp != p.pid && e.sid != p.pid || e.start < floor {
				continue
			}
			if reaped && badge != 0 {
				if b := badgeOf(e.pid); b != 0 && b != badge {
					continue // of a stranger that had the number and has ended, too
				}
			}
			in[e.pid] = true
		}
	}
	for _, e := range all {
		if start, ok := s.known[e.pid]; ok && start == e.start {
			in[e.pid] = true
		}
	}
	delete(in, self)
	if s.all {
		for _, e := range all {
			in[e.pid] = in[e.pid] || e.ppid == self
		}
	}
	closure(all, in, self)
	var orphans []entry
	for _, e := range all {
		if in[e.pid] || e.pid == self || e.dead() || e.start < floor {
			continue
		}
		if s.env == "" {
			continue
		}
		other := false
		if badge != 0 {
			switch badgeOf(e.pid) {
			case badge:
				in[e.pid] = true
				continue
			case 0:
			default:
				other = true
			}
		}
		found, marked := hasEnv(e.pid, s.env, uid, gid)
		switch {
		case found:
			in[e.pid] = true
		case s.main != nil && e.ppid == self && !other && !marked:
			orphans = append(orphans, e)
		}
	}
	for _, e := range orphans {
		if s.soleOwner(e) {
			in[e.pid] = true
		}
	}
	closure(all, in, self)
	var out []entry
	for _, e := range all {
		if in[e.pid] && !e.dead() && e.pid != self {
			out = append(out, e)
		}
	}
	return out
}

// closure adds the children of members.
func closure(all []entry, in map[int]bool, self int) {
	for grown := true; grown; {
		grown = false
		for _, e := range all {
			if !in[e.pid] && in[e.ppid] && e.pid != self {
				in[e.pid] = true
				grown = true
			}
		}
	}
}

// soleOwner decides about an orphan that was re-parented to this process and
// shows neither badge nor mark, for it changed its limits, or there are no badges,
// and it cleared its environment. It belongs to the tree when no
// other running process that we started can have left it, each of them being
// younger than the orphan. In doubt it lives: it may be a service that another
// command started.
func (s *selector) soleOwner(e entry) bool {
	r := theReaper.Load()
	if r == nil {
		return false
	}
	// Without badges a child that is being forked shows nothing but our environment,
	// which has no mark, and it is not yet known: wait until it is.
	r.forks.Lock()
	running := r.running()
	r.forks.Unlock()
	for _, q := range running {
		if q.pid == e.pid {
			return false // no orphan but a child of ours
		}
		if q != s.main && !q.reaps && q.start <= e.start {
			return false
		}
	}
	return true
}

// snapshot reads the process table.
func snapshot() ([]entry, error) {
	d, err := os.Open("/proc")
	if err != nil {
		return nil, fmt.Errorf("proc: kill: %w", err)
	}
	defer d.Close()
	names, err := d.Readdirnames(-1)
	if err != nil {
		return nil, fmt.Errorf("proc: kill: read /proc: %w", err)
	}
	out := make([]entry, 0, len(names))
	buf := make([]byte, 1024)
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		n, err := readSmall("/proc/"+name+"/stat", buf)
		if err != nil {
			continue // ended meanwhile
		}
		if e, ok := parseStat(pid, buf[:n]); ok {
			out = append(out, e)
		}
	}
	slices.SortFunc(out, func(a, b entry) int { return a.pid - b.pid })
	return out, nil
}

// readSmall reads a file of /proc without the poller's overhead.
func readSmall(path string, buf []byte) (int, error) {
	fd, err := ignoringEINTR(func() (int, error) { return unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0) })
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	return ignoringEINTR(func() (int, error) { return unix.Read(fd, buf) })
}

// parseStat reads /proc/PID/stat. The name in it is in parentheses and may hold
// any byte, further parentheses too.
func parseStat(pid int, b []byte) (entry, bool) {
	i := bytes.LastIndexByte(b, ')')
	if i < 0 {
		return entry{}, false
	}
	f := bytes.Fields(b[i+1:])
	if len(f) < 20 || len(f[0]) != 1 {
		return entry{}, false
	}
	num := func(i int) int64 {
		n, _ := strconv.ParseInt(string(f[i]), 10, 64)
		return n
	}
	return entry{
		pid: pid, state: f[0][0],
		ppid: int(num(1)), pgrp: int(num(2)), sid: int(num(3)), threads: num(17), start: num(19),
	}, true
}

// hasEnv reports whether a process started with the entry in its environment,
// and otherwise whether it carries the mark of another process that we started.
func hasEnv(pid int, want string, uid, gid int) (found, other bool) {
	env, err := readEnviron(pid)
	if errors.Is(err, unix.EACCES) && uid > 0 {
		env, err = readEnvironAs(pid, uid, gid)
	}
	if err != nil {
		return false, false
	}
	for kv := range bytes.SplitSeq(env, []byte{0}) {
		if string(kv) == want {
			return true, false
		}
		if mark, ok := bytes.CutPrefix(kv, []byte(MarkName+"=")); ok && ours(string(mark)) {
			other = true
		}
	}
	return false, other
}

func ours(mark string) bool {
	r := theReaper.Load()
	if r == nil {
		return false
	}
	return slices.ContainsFunc(r.running(), func(p *Process) bool { return p.mark == mark })
}

// environCap is more than the kernel lets a default stack hold.
const environCap = 4 << 20

func readEnviron(pid int) ([]byte, error) {
	fd, err := ignoringEINTR(func() (int, error) {
		return unix.Open("/proc/"+strconv.Itoa(pid)+"/environ", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	})
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	var out []byte
	buf := make([]byte, 16<<10)
	for len(out) < environCap {
		n, err := ignoringEINTR(func() (int, error) { return unix.Read(fd, buf) })
		if err != nil {
			return nil, err
		}
		if n == 0 {
			break
		}
		out = append(out, buf[:n]...)
	}
	return out, nil
}

// readEnvironAs reads with another user's file-system identity, which is what
// the kernel compares: root without CAP_SYS_PTRACE, as in a container, may not
// read another user's environment, and that user itself may.
func readEnvironAs(pid, uid, gid int) ([]byte, error) {
	type result struct {
		env []byte
		err error
	}
	c := make(chan result)
	go func() {
		runtime.LockOSThread() // for good: the thread ends with the goroutine
		_ = unix.Setfsgid(gid)
		_ = unix.Setfsuid(uid)
		env, err := readEnviron(pid)
		c <- result{env, err}
	}()
	r := <-c
	return r.env, r.err
}
