//go:build linux

package inside

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/aisandbox-go/aisandbox/internal/proc"
	"github.com/aisandbox-go/aisandbox/internal/wire"
	"github.com/aisandbox-go/aisandbox/journal/frame"
	"github.com/aisandbox-go/aisandbox/provider"
)

// The files of a detached process in the journal directory.
const (
	lockSuffix    = ".lock"    // made once; locked as long as the supervisor lives
	journalSuffix = ".journal" // the frames
	reserveSuffix = ".reserve" // gives its space to the exit frame on a full disk
	socketSuffix  = ".s"       // takes signals; its name is a hash, for its path must be short
	goneSuffix    = ".gone"    // empty: the token was forgotten and launches nothing any more
)

// journals answers for the detached processes of a sandbox, whoever launched
// them. All state is in files: another guest process finds the same.
type journals struct {
	server *server
	dir    string

	mu    sync.Mutex
	scans map[string]*scan
}

// scan is how far a journal has been read for probes.
type scan struct {
	ino    uint64
	offset int64
	lines  int64
	open   bool
	header *frame.Header
	exit   *frame.Exit
	beat   int64
}

const maxScans = 256

// markOf is the mark of a detached process: a kill finds what is left of its
// tree by it even when the supervisor is gone. The directory is in it, for two
// sandboxes of one kernel may have a token in common.
func markOf(dir, token string) string {
	sum := sha256.Sum256([]byte(dir))
	return "run-" + hex.EncodeToString(sum[:6]) + "-" + token
}

func checkToken(token string) error {
	if !frame.ValidToken(token) {
		return fmt.Errorf("run token %.40q: %w", token, provider.ErrInvalid)
	}
	return nil
}

// ensure makes the directory, which only the guest's user may enter.
func (j *journals) ensure() error {
	if j.server.sealed {
		return nil
	}
	if err := makePrivate(j.dir, nil); err != nil {
		return fmt.Errorf("journal directory: %w", err)
	}
	return nil
}

func (j *journals) path(token, suffix string) string {
	if suffix == socketSuffix {
		sum := sha256.Sum256([]byte(token))
		token = hex.EncodeToString(sum[:8])
	}
	return filepath.Join(j.dir, token+suffix)
}

// socketAddr returns an address short enough for a socket, whatever the
// directory's path is. The function releases it.
func socketAddr(path string) (*net.UnixAddr, func(), error) {
	dir, err := unix.Open(filepath.Dir(path), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, nil, &fs.PathError{Op: "open", Path: filepath.Dir(path), Err: err}
	}
	name := "/proc/self/fd/" + strconv.Itoa(dir) + "/" + filepath.Base(path)
	return &net.UnixAddr{Net: "unix", Name: name}, func() { _ = unix.Close(dir) }, nil
}

// held reports whether a supervisor lives. The error is fs.ErrNotExist when
// nothing was ever launched.
func (j *journals) held(token string) (bool, error) {
	f, err := os.Open(j.path(token, lockSuffix))
	if err != nil {
		return false, err
	}
	defer f.Close()
	c, err := f.SyscallConn()
	if err != nil {
		return false, err
	}
	var lerr error
	if err := c.Control(func(fd uintptr) { lerr = unix.Flock(int(fd), unix.LOCK_SH|unix.LOCK_NB) }); err != nil {
		return false, err
	}
	if errors.Is(lerr, unix.EWOULDBLOCK) {
		return true, nil
	}
	return false, lerr
}

func (j *journals) probe(token string) ([]byte, error) {
	if err := checkToken(token); err != nil {
		return nil, err
	}
	// The lock first: who let go of it after this has written the exit before.
	held, err := j.held(token)
	p := provider.Probe{State: provider.ProbeAbsent}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return json.Marshal(p)
	case err != nil:
		return nil, fmt.Errorf("probe: %w", err)
	}
	sc, size, mtime, err := j.scan(token)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("probe: %w", err)
	}
	p.Size = size
	if sc.header != nil {
		p.Level = sc.header.Level
	}
	p.Lines = sc.lines
	if beat := max(sc.beat, mtime); beat > 0 {
		p.LastBeat = time.UnixMilli(beat).UTC()
	}
	switch {
	case sc.exit != nil:
		p.State = provider.ProbeExited
		p.Exit = &provider.Exit{Code: int(sc.exit.Code), Signal: int(sc.exit.Signal)}
		p.MAC = sc.exit.MAC[:]
	case !held:
		p.State = provider.ProbeDead
	case sc.header == nil:
		p.State = provider.ProbeStarting
	default:
		p.State = provider.ProbeRunning
	}
	return json.Marshal(p)
}

// scan reads what was added to a journal since the last probe.
func (j *journals) scan(token string) (scan, int64, int64, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	f, err := os.Open(j.path(token, journalSuffix))
	if err != nil {
		return scan{}, 0, 0, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return scan{}, 0, 0, err
	}
	ino := st.Sys().(*syscall.Stat_t).Ino
	sc := j.scans[token]
	if sc == nil || sc.ino != ino || sc.offset > st.Size() {
		if j.scans == nil || len(j.scans) >= maxScans {
			j.scans = map[string]*scan{}
		}
		sc = &scan{ino: ino}
		j.scans[token] = sc
	}
	if sc.offset < st.Size() {
		r := frame.NewReader(io.NewSectionReader(f, sc.offset, st.Size()-sc.offset), sc.offset)
		for {
			fr, err := r.Next()
			if err != nil {
				break // a torn tail; damage is for the reader of the journal to report
			}
			sc.add(fr)
		}
		sc.offset = r.Offset()
	}
	return *sc, st.Size(), st.ModTime().UnixMilli(), nil
}

func (sc *scan) add(f frame.Frame) {
	switch f.Type {
	case frame.TypeHeader:
		var h frame.Header
		if json.Unmarshal(f.Payload, &h) == nil {
			sc.header = &h
		}
	case frame.TypeLine, frame.TypePartial:
		if !sc.open {
			sc.lines++
		}
		sc.open = f.Type == frame.TypePartial
	case frame.TypeHeartbeat:
		if ms, err := frame.ParseHeartbeat(f.Payload); err == nil {
			sc.beat = ms
		}
	case frame.TypeExit:
		if e, err := frame.ParseExit(f.Payload); err == nil {
			sc.exit = &e
		}
	}
}

// kill asks the supervisor. When it is gone, 9 still ends what carries the mark.
func (j *journals) kill(ctx context.Context, token string, sig int) error {
	if err := checkToken(token); err != nil {
		return err
	}
	if sig < 1 || sig > 64 {
		return fmt.Errorf("signal %d: %w", sig, provider.ErrInvalid)
	}
	held, err := j.held(token)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("kill: %w", err)
	}
	if held {
		err := j.ask(ctx, token, sig)
		if err == nil || !errors.Is(err, errNoSupervisor) {
			return err
		}
	}
	if sig != int(syscall.SIGKILL) {
		return nil
	}
	return proc.KillEnv(proc.MarkName + "=" + markOf(j.dir, token))
}

var errNoSupervisor = errors.New("the supervisor does not answer")

func (j *journals) ask(ctx context.Context, token string, sig int) error {
	addr, release, err := socketAddr(j.path(token, socketSuffix))
	if err != nil {
		return err
	}
	defer release()
	var d net.Dialer
	c, err := d.DialContext(ctx, addr.Net, addr.Name)
	if err != nil {
		return errors.Join(errNoSupervisor, err)
	}
	defer c.Close()
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	_ = c.SetDeadline(time.Now().Add(15 * time.Second)) // a kill itself takes 10 at most
	if _, err := c.Write([]byte{byte(sig)}); err != nil {
		return errors.Join(errNoSupervisor, err)
	}
	b, err := io.ReadAll(io.LimitReader(c, 4<<10))
	switch {
	case err != nil:
		return errors.Join(errNoSupervisor, err)
	case len(b) == 0: // it ended before it could answer
		return errNoSupervisor
	case b[0] == '+':
		return nil
	}
	return fmt.Errorf("kill: %s", b[1:])
}

func (j *journals) forget(token string) error {
	if err := checkToken(token); err != nil {
		return err
	}
	if err := j.ensure(); err != nil {
		return err
	}
	// A host that slept may still want to launch it: from here on it can't, also
	// where nothing was launched yet. Before the lock is looked at: who takes it
	// later looks for this.
	gone := j.path(token, goneSuffix)
	f, err := os.OpenFile(gone, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	fresh := err == nil
	switch {
	case fresh:
		_ = f.Close()
	case !errors.Is(err, fs.ErrExist):
		return fmt.Errorf("forget: %w", err)
	}
	held, err := j.held(token)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil && held {
		err = fmt.Errorf("the process still runs; kill it first: %w", provider.ErrInvalid)
	}
	if err != nil {
		if fresh {
			_ = os.Remove(gone)
		}
		return fmt.Errorf("forget: %w", err)
	}
	// The lock last: until everything is gone nothing may be launched again.
	for _, suffix := range []string{socketSuffix, reserveSuffix, journalSuffix, lockSuffix} {
		if err := os.Remove(j.path(token, suffix)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("forget: %w", err)
		}
	}
	j.mu.Lock()
	delete(j.scans, token)
	j.mu.Unlock()
	return nil
}

// list tells which journals there are: of each token whatever was written last.
func (j *journals) list() ([]byte, error) {
	entries, err := os.ReadDir(j.dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("journals: %w", err)
	}
	now := time.Now()
	ages := map[string]time.Duration{}
	for _, e := range entries {
		token, ok := strings.CutSuffix(e.Name(), journalSuffix)
		if !ok {
			if token, ok = strings.CutSuffix(e.Name(), lockSuffix); !ok {
				continue
			}
		}
		age := time.Duration(-1)
		if info, err := e.Info(); err == nil {
			age = max(now.Sub(info.ModTime()), 0)
		}
		if old, ok := ages[token]; !ok || age < old {
			ages[token] = age
		}
	}
	out := []provider.JournalInfo{}
	for _, token := range slices.Sorted(maps.Keys(ages)) {
		out = append(out, provider.JournalInfo{Token: token, Age: ages[token]})
	}
	return json.Marshal(out)
}

// tail sends a journal's bytes from an offset on.
func (s *session) tail(l *wire.Link, req *wire.Request) error {
	if err := checkToken(req.Token); err != nil {
		return err
	}
	if req.Offset < 0 {
		return fmt.Errorf("tail from %d: %w", req.Offset, provider.ErrInvalid)
	}
	f, err := os.Open(s.journals.path(req.Token, journalSuffix))
	if err != nil {
		return fmt.Errorf("tail: %w", err)
	}
	defer f.Close()
	if _, err := f.Seek(req.Offset, io.SeekStart); err != nil {
		return fmt.Errorf("tail: %w", err)
	}
	if err := l.Send(wire.FStarted, nil); err != nil {
		return errors.Join(errLink, err)
	}
	gone := make(chan struct{})
	go func() { // the stream carries nothing more from the host, so this sees its end only
		defer close(gone)
		for {
			if _, _, err := l.Recv(); err != nil {
				return
			}
		}
	}()
	growth := newGrowth(s.journals.path(req.Token, journalSuffix))
	defer growth.close()
	buf := make([]byte, wire.Chunk)
	ended := !req.Has(wire.Follow)
	for {
		n, err := f.Read(buf)
		if n > 0 {
			if err := l.Send(wire.FData, buf[:n]); err != nil {
				return errors.Join(errLink, err)
			}
			continue
		}
		if err != nil && err != io.EOF {
			return fmt.Errorf("tail: %w", err)
		}
		if ended {
			break
		}
		if held, err := s.journals.held(req.Token); err == nil && held {
			if !growth.wait(gone) {
				return nil
			}
			continue
		}
		ended = true // once more to the end: it wrote before it let go
	}
	if err := l.Send(wire.FReply, nil); err != nil {
		return errors.Join(errLink, err)
	}
	return nil
}

// growth waits until a file was written to, or looks at it again after a while.
type growth struct {
	f *os.File
}

func newGrowth(path string) *growth {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return &growth{}
	}
	if _, err := unix.InotifyAddWatch(fd, path, unix.IN_MODIFY|unix.IN_CLOSE_WRITE); err != nil {
		_ = unix.Close(fd)
		return &growth{}
	}
	return &growth{f: os.NewFile(uintptr(fd), "inotify")}
}

func (g *growth) close() {
	if g.f != nil {
		_ = g.f.Close()
	}
}

// wait returns false when gone was closed.
func (g *growth) wait(gone <-chan struct{}) bool {
	if g.f == nil {
		select {
		case <-gone:
			return false
		case <-time.After(50 * time.Millisecond):
			return true
		}
	}
	var buf [4096]byte
	_ = g.f.SetReadDeadline(time.Now().Add(500 * time.Millisecond))
	_, _ = g.f.Read(buf[:])
	select {
	case <-gone:
		return false
	default:
		return true
	}
}
