//go:build linux

package inside

import (
	"encoding/binary"
	"errors"
	"io/fs"
	"os"
	"path"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/aisandbox-go/aisandbox/internal/wire"
	"github.com/aisandbox-go/aisandbox/provider"
)

const (
	pollEvery = 700 * time.Millisecond
	pollMax   = 5 * time.Second

	// A file that was looked at so soon after its change may change once more
	// without a new time stamp.
	racy = 20 * time.Millisecond

	watchMask = unix.IN_CREATE | unix.IN_MODIFY | unix.IN_CLOSE_WRITE | unix.IN_ATTRIB | unix.IN_MOVED_FROM | unix.IN_MOVED_TO |
		unix.IN_DELETE | unix.IN_DELETE_SELF | unix.IN_MOVE_SELF | unix.IN_ONLYDIR | unix.IN_EXCL_UNLINK
)

// node is a watched directory and what is known to be in it.
type node struct {
	parent *node
	name   string
	wd     int // -1 without a watch
	files  map[string]sig
	subs   map[string]*node
}

// sig changes when a file does.
type sig struct {
	mode         fs.FileMode
	size         int64
	mtime, ctime int64
	ino          uint64
	seen         int64 // when we looked; not compared
}

func sigOf(st fs.FileInfo) sig {
	s := sig{mode: st.Mode(), size: st.Size(), mtime: st.ModTime().UnixNano(), seen: time.Now().UnixNano()}
	if sys, ok := st.Sys().(*syscall.Stat_t); ok {
		s.ctime, s.ino = sys.Ctim.Nano(), sys.Ino
	}
	return s
}

func (s sig) same(o sig) bool { s.seen = o.seen; return s == o }

// watcher follows a tree. Every event only says where to look: what happened is
// decided by comparing with what was known, so that no order of events, however
// racy, can leave it wrong. One goroutine runs it.
type watcher struct {
	s      *session
	req    *wire.Request
	base   string // the watched directory, absolute
	ignore map[string]bool
	queue  *changeQueue

	top     *os.Root
	root    *node
	inotify *os.File
	wds     map[int]*node
	polling bool // watches ran out, or the directory itself went away
}

// watch runs a watch until the host sends FEnd or hangs up.
func (s *session) watch(l *wire.Link, req *wire.Request) error {
	w := &watcher{s: s, req: req, ignore: map[string]bool{}, wds: map[int]*node{}, queue: newChangeQueue()}
	w.base = path.Clean(s.workdir(req.Path))
	for _, n := range req.Names {
		w.ignore[n] = true
	}
	if err := w.start(); err != nil {
		return named("watch", req.Path, err)
	}
	if err := l.Send(wire.FStarted, nil); err != nil {
		w.close()
		return errors.Join(errLink, err)
	}
	stop := make(chan struct{})
	ran := make(chan struct{})
	go func() {
		defer close(ran)
		defer w.queue.end()
		defer w.close()
		w.run(stop)
	}()
	sent := make(chan error, 1)
	go func() { sent <- w.queue.send(l) }()
	for {
		t, _, err := l.Recv()
		if err != nil {
			w.queue.drop()
			close(stop)
			w.wake()
			<-ran
			<-sent
			return errors.Join(errLink, err)
		}
		if t == wire.FEnd {
			break
		}
	}
	close(stop)
	w.wake()
	<-ran
	if err := <-sent; err != nil {
		return errors.Join(errLink, err)
	}
	if err := l.Send(wire.FReply, nil); err != nil {
		return errors.Join(errLink, err)
	}
	return nil
}

// start takes stock; what is there is not reported.
func (w *watcher) start() error {
	if err := w.reopen(); err != nil {
		return err
	}
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	switch {
	case err != nil:
		w.polling = true
	case w.s.noInotify:
		_ = unix.Close(fd)
		w.polling = true
	default:
		w.inotify = os.NewFile(uintptr(fd), "inotify")
	}
	w.root = &node{wd: -1, files: map[string]sig{}, subs: map[string]*node{}}
	quiet := w.queue
	w.queue = nil
	w.scan(w.root)
	w.queue = quiet
	return nil
}

func (w *watcher) reopen() error {
	dir, name, err := w.s.roots.find("watch", w.base)
	if err != nil {
		return err
	}
	top, err := dir.OpenRoot(name)
	if err != nil {
		return err
	}
	if w.top != nil {
		_ = w.top.Close()
	}
	w.top = top
	return nil
}

func (w *watcher) close() {
	if w.inotify != nil {
		_ = w.inotify.Close()
	}
	_ = w.top.Close()
}

// wake makes a blocked run look at its stop channel.
func (w *watcher) wake() {
	if w.inotify != nil {
		_ = w.inotify.SetReadDeadline(time.Unix(1, 0))
	}
}

func (w *watcher) run(stop <-chan struct{}) {
	buf := make([]byte, 64<<10)
	interval := pollEvery
	next := time.Now().Add(interval)
	for {
		var n int
		var err error
		if w.inotify != nil {
			var deadline time.Time
			if w.polling {
				deadline = next
			}
			_ = w.inotify.SetReadDeadline(deadline)
			select {
			case <-stop: // before the deadline was set again
				w.rescan()
				return
			default:
			}
			n, err = w.inotify.Read(buf)
		} else {
			t := time.NewTimer(time.Until(next))
			select {
			case <-stop:
			case <-t.C:
			}
			t.Stop()
		}
		select {
		case <-stop:
			w.rescan() // what happened since the last event we read
			return
		default:
		}
		if n > 0 {
			w.events(buf[:n])
		} else if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			_ = w.inotify.Close()
			w.inotify, w.polling = nil, true
		}
		if w.polling && !time.Now().Before(next) {
			begin := time.Now()
			changed := w.rescan()
			// Quick while something happens, and never more than a twentieth of a core.
			if changed {
				interval = pollEvery
			} else {
				interval = min(interval*5/4, pollMax)
			}
			next = time.Now().Add(max(interval, 20*time.Since(begin)))
		}
	}
}

// place is where an event says to look.
type place struct {
	n    *node
	name string
}

func (w *watcher) events(b []byte) {
	masks := map[place]uint32{}
	var order []place
	full := false
	for len(b) >= unix.SizeofInotifyEvent {
		wd := int(int32(binary.NativeEndian.Uint32(b)))
		mask := binary.NativeEndian.Uint32(b[4:])
		size := int(binary.NativeEndian.Uint32(b[12:]))
		if len(b) < unix.SizeofInotifyEvent+size {
			break
		}
		name := b[unix.SizeofInotifyEvent : unix.SizeofInotifyEvent+size]
		b = b[unix.SizeofInotifyEvent+size:]
		for len(name) > 0 && name[len(name)-1] == 0 {
			name = name[:len(name)-1]
		}
		if mask&unix.IN_Q_OVERFLOW != 0 {
			full = true
			continue
		}
		n := w.wds[wd]
		if n == nil {
			continue
		}
		if mask&(unix.IN_DELETE_SELF|unix.IN_MOVE_SELF|unix.IN_IGNORED) != 0 {
			if mask&unix.IN_IGNORED != 0 {
				delete(w.wds, wd)
				n.wd = -1
			}
			if n == w.root {
				w.polling = true
				full = true
			}
			continue
		}
		if len(name) == 0 {
			continue
		}
		p := place{n, string(name)}
		if _, ok := masks[p]; !ok {
			order = append(order, p)
		}
		masks[p] |= mask
	}
	for _, p := range order {
		w.look(p.n, p.name, masks[p]&unix.IN_MODIFY != 0)
	}
	if full {
		w.rescan()
	}
}

// path of a node below the watched directory.
func (n *node) path() string {
	if n.parent == nil {
		return "."
	}
	return path.Join(n.parent.path(), n.name)
}

// gone reports whether a node was cut off while events for it were queued.
func (w *watcher) gone(n *node) bool {
	for ; n.parent != nil; n = n.parent {
		if n.parent.subs[n.name] != n {
			return true
		}
	}
	return n != w.root
}

// look compares one entry with what was known of it.
func (w *watcher) look(n *node, name string, written bool) bool {
	if w.ignore[name] || w.gone(n) {
		return false
	}
	st, err := w.top.Lstat(path.Join(n.path(), name))
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
			return w.vanished(n, name)
		}
		return false
	}
	return w.found(n, name, st, written)
}

func (w *watcher) vanished(n *node, name string) bool {
	changed := false
	if _, ok := n.files[name]; ok {
		delete(n.files, name)
		w.report(provider.ChangeDelete, n, name)
		changed = true
	}
	if sub := n.subs[name]; sub != nil {
		w.cut(sub)
		changed = true
	}
	return changed
}

// cut forgets a directory with all that was in it.
func (w *watcher) cut(n *node) {
	for name := range n.files {
		w.report(provider.ChangeDelete, n, name)
	}
	for _, sub := range n.subs {
		w.cut(sub)
	}
	if n.wd >= 0 && w.wds[n.wd] == n {
		// Its watch belongs to the directory itself, which may just have moved.
		delete(w.wds, n.wd)
		if w.inotify != nil {
			w.control(func(fd int) { _, _ = unix.InotifyRmWatch(fd, uint32(n.wd)) })
		}
	}
	if n.parent != nil && n.parent.subs[n.name] == n {
		delete(n.parent.subs, n.name)
	}
}

func (w *watcher) found(n *node, name string, st fs.FileInfo, written bool) bool {
	if st.IsDir() {
		changed := false
		if _, ok := n.files[name]; ok {
			changed = w.vanished(n, name)
		}
		sub := n.subs[name]
		if sub == nil {
			sub = &node{parent: n, name: name, wd: -1, files: map[string]sig{}, subs: map[string]*node{}}
			n.subs[name] = sub
		}
		return w.scan(sub) || changed
	}
	changed := false
	if n.subs[name] != nil {
		changed = w.vanished(n, name)
	}
	if !st.Mode().IsRegular() && st.Mode()&fs.ModeSymlink == 0 {
		return changed
	}
	now := sigOf(st)
	old, ok := n.files[name]
	n.files[name] = now
	switch {
	case !ok:
		w.report(provider.ChangeCreate, n, name)
	case !old.same(now), written && old.seen-old.mtime < int64(racy):
		w.report(provider.ChangeModify, n, name)
	default:
		return changed
	}
	return true
}

// scan watches a directory and compares everything in it. The watch comes first:
// what is made after it gives an event, what was made before it is read.
func (w *watcher) scan(n *node) bool {
	d, err := w.top.OpenFile(n.path(), os.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NONBLOCK, 0)
	if err != nil {
		if n.parent != nil && errors.Is(err, fs.ErrNotExist) {
			w.cut(n)
			return true
		}
		return false
	}
	defer d.Close()
	w.addWatch(n, d)
	ents, err := d.ReadDir(-1)
	if err != nil {
		return false // not known is not gone
	}
	changed := false
	there := make(map[string]bool, len(ents))
	for _, ent := range ents {
		name := ent.Name()
		if w.ignore[name] {
			continue
		}
		st, err := ent.Info()
		if err != nil {
			continue
		}
		there[name] = true
		changed = w.found(n, name, st, false) || changed
	}
	for name := range n.files {
		if !there[name] {
			changed = w.vanished(n, name) || changed
		}
	}
	for name := range n.subs {
		if !there[name] {
			changed = w.vanished(n, name) || changed
		}
	}
	return changed
}

func (w *watcher) addWatch(n *node, d *os.File) {
	if w.inotify == nil {
		return
	}
	wd, err := -1, error(nil)
	raw, cerr := d.SyscallConn()
	if cerr != nil {
		return
	}
	_ = raw.Control(func(dirFd uintptr) {
		w.control(func(fd int) {
			// Through the descriptor, so that the watched directory is the one that is read.
			wd, err = unix.InotifyAddWatch(fd, "/proc/self/fd/"+strconv.Itoa(int(dirFd)), watchMask)
		})
	})
	if err != nil || wd < 0 {
		w.polling = true // ENOSPC: the user's watches are used up
		return
	}
	if n.wd >= 0 && n.wd != wd && w.wds[n.wd] == n {
		delete(w.wds, n.wd)
	}
	old := w.wds[wd]
	n.wd = wd
	w.wds[wd] = n
	if old != nil && old != n && !w.gone(old) {
		// That directory moved here; something else may be where it was.
		old.wd = -1
		w.scan(old)
	}
}

func (w *watcher) control(f func(fd int)) {
	raw, err := w.inotify.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) { f(int(fd)) })
}

// rescan compares the whole tree.
func (w *watcher) rescan() bool {
	if err := w.reopen(); err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			return false
		}
		changed := len(w.root.files)+len(w.root.subs) > 0
		for name := range w.root.files {
			w.vanished(w.root, name)
		}
		for name := range w.root.subs {
			w.vanished(w.root, name)
		}
		return changed
	}
	return w.scan(w.root)
}

func (w *watcher) report(t provider.ChangeType, n *node, name string) {
	if w.queue != nil {
		w.queue.add(t, path.Join(w.base, n.path(), name))
	}
}
