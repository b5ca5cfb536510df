//go:build linux

package bwrap

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/aisandbox-go/aisandbox/internal/statedir"
	"github.com/aisandbox-go/aisandbox/provider"
)

const (
	binDir     = ".bin" // programs by digest, shared by all sandboxes
	socketFile = "guest"
	logFile    = "guest.log"
	startWait  = 10 * time.Second
	killWait   = 5 * time.Second
)

// first is a first process: the launcher and PID 1 of the namespace, each with
// the time it started, so that a number that was given away again is not taken
// for it.
type first struct {
	Launcher      int   `json:"launcher"`
	LauncherStart int64 `json:"launcherStart"`
	Pid           int   `json:"pid"`
	Start         int64 `json:"start"`
}

// install copies the program to where sandboxes can see it, by its content. A
// restart must not depend on a cache that somebody cleans.
func (b *bwrap) install(d *statedir.Dir, in *provider.Init) (*initRecord, error) {
	if in.Program == nil {
		return nil, fmt.Errorf("init: no program: %w", provider.ErrInvalid)
	}
	p, err := in.Program(runtime.GOOS + "/" + runtime.GOARCH)
	if err != nil {
		return nil, fmt.Errorf("init: %w", err)
	}
	if raw, err := hex.DecodeString(p.Digest); err != nil || len(raw) != sha256.Size {
		return nil, fmt.Errorf("init: digest %q: want a SHA-256 in hex: %w", p.Digest, provider.ErrInvalid)
	}
	rec := &initRecord{Digest: p.Digest, Args: in.Args}
	dir := filepath.Join(d.Path(), binDir)
	dest := filepath.Join(dir, p.Digest)
	if _, err := os.Stat(dest); err == nil {
		return rec, nil
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	src, err := os.Open(p.Path)
	if err != nil {
		return nil, fmt.Errorf("init: %w", err)
	}
	defer src.Close()
	tmp, err := os.CreateTemp(dir, ".new-")
	if err != nil {
		return nil, err
	}
	defer os.Remove(tmp.Name())
	sum := sha256.New()
	_, err = io.Copy(io.MultiWriter(tmp, sum), src)
	if err = errors.Join(err, tmp.Chmod(0o555), tmp.Close()); err != nil {
		return nil, fmt.Errorf("init: copy the program: %w", err)
	}
	if got := hex.EncodeToString(sum.Sum(nil)); got != p.Digest {
		return nil, fmt.Errorf("init: %s has digest %s, not %s: %w", p.Path, got, p.Digest, provider.ErrInvalid)
	}
	return rec, os.Rename(tmp.Name(), dest)
}

func (h *handle) program() string { return filepath.Join(h.d.Path(), binDir, h.r.Init.Digest) }

// ensureFirst starts the first process unless it lives. The key is locked.
func (h *handle) ensureFirst(ctx context.Context) error {
	if err := h.d.Load(h.r.Key, &h.r); err != nil {
		if errors.Is(err, os.ErrNotExist) {
			err = provider.ErrNotFound
		}
		return err
	}
	if h.r.First != nil {
		if h.r.First.alive() {
			return nil
		}
		if err := h.r.First.kill(ctx); err != nil { // what is left of the launcher
			return err
		}
	}
	f, err := h.startFirst(ctx)
	if err != nil {
		return fmt.Errorf("start the first process: %w", err)
	}
	h.r.First = f
	if err := h.d.Save(h.r.Key, h.r); err != nil {
		return errors.Join(err, f.kill(context.WithoutCancel(ctx)))
	}
	return nil
}

// startFirst starts the launcher in a session of its own, so that neither the end
// of this process nor a signal from its terminal reaches it. The listening socket
// and the journals' directory are inherited: inside neither has a name.
func (h *handle) startFirst(ctx context.Context) (_ *first, err error) {
	t, err := h.b.tool()
	if err != nil {
		return nil, err
	}
	listener, err := h.listen()
	if err != nil {
		return nil, err
	}
	defer listener.Close()
	runs, err := os.Open(filepath.Join(h.dir, runsDir))
	if err != nil {
		return nil, err
	}
	defer runs.Close()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer null.Close()
	log, err := os.OpenFile(filepath.Join(h.dir, logFile), os.O_CREATE|os.O_TRUNC|os.O_RDWR|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	info, infow, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer info.Close()
	defer infow.Close()

	argv := append([]string{t.path}, h.view(t)...)
	argv = append(argv, "--chdir", rootInside, "--new-session", "--as-pid-1", "--info-fd", "5", "--", guestInside)
	argv = append(argv, h.r.Init.Args...)
	argv = append(argv, "--root", rootInside, "--listen-fd", "3", "--journal-fd", "4")
	begin := time.Now()
	launcher, err := syscall.ForkExec(t.path, argv, &syscall.ProcAttr{
		Dir: "/", Env: h.env(),
		Files: []uintptr{null.Fd(), log.Fd(), log.Fd(), listener.Fd(), runs.Fd(), infow.Fd()},
		Sys:   &syscall.SysProcAttr{Setsid: true, Credential: h.b.credential()},
	})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", t.path, err)
	}
	infow.Close()
	f := &first{Launcher: launcher, LauncherStart: startTime(launcher)}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.kill(context.WithoutCancel(ctx)))
		}
	}()
	_ = info.SetReadDeadline(begin.Add(startWait))
	var m struct {
		Child int `json:"child-pid"`
	}
	if err := json.NewDecoder(info).Decode(&m); err != nil || m.Child <= 1 {
		return nil, h.setupError(f)
	}
	f.Pid, f.Start = m.Child, startTime(m.Child)
	// The namespace is set up once its first process has become the guest.
	want := filepath.Base(guestInside) + "\n"
	for {
		if comm, err := os.ReadFile("/proc/" + strconv.Itoa(f.Pid) + "/comm"); err == nil && string(comm) == want {
			return f, nil
		}
		if !f.alive() || time.Since(begin) > startWait {
			return nil, h.setupError(f)
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-time.After(500 * time.Microsecond):
		}
	}
}

// setupError says why the first process did not start, in the launcher's words.
func (h *handle) setupError(f *first) error {
	_ = f.kill(context.Background()) // so that its last words are written
	text := []byte("no message")
	if b, err := os.ReadFile(filepath.Join(h.dir, logFile)); err == nil && len(b) > 0 {
		text = b[max(0, len(b)-1024):]
	}
	return fmt.Errorf("%s%s: %w", bytes.TrimSpace(text), usernsHint(), provider.ErrUnavailable)
}

// sockAddr is the socket's address by a descriptor of its directory: a path in a
// deep directory would not fit. release closes the descriptor.
func (h *handle) sockAddr() (addr *net.UnixAddr, release func(), err error) {
	fd, err := unix.Open(filepath.Join(h.dir, ctlDir), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, nil, &os.PathError{Op: "open", Path: filepath.Join(h.dir, ctlDir), Err: err}
	}
	return &net.UnixAddr{Net: "unix", Name: "/proc/self/fd/" + strconv.Itoa(fd) + "/" + socketFile}, func() { unix.Close(fd) }, nil
}

func (h *handle) listen() (*os.File, error) {
	_ = os.Remove(filepath.Join(h.dir, ctlDir, socketFile)) // of a first process that died
	addr, release, err := h.sockAddr()
	if err != nil {
		return nil, err
	}
	defer release()
	l, err := net.ListenUnix("unix", addr)
	if err != nil {
		return nil, err
	}
	l.SetUnlinkOnClose(false)
	defer l.Close()
	return l.File()
}

// initConn is of handles whose sandbox has a first process.
type initConn struct{ h *handle }

var _ provider.InitConn = initConn{}

// DialInit connects to the first process, which is started again if it died.
func (c initConn) DialInit(ctx context.Context) (io.ReadWriteCloser, error) {
	conn, err := c.h.dialInit(ctx)
	if err != nil {
		return nil, fmt.Errorf("bwrap: connect to the first process: %w", err)
	}
	return conn, nil
}

func (h *handle) dialInit(ctx context.Context) (net.Conn, error) {
	if h.closed.Load() {
		return nil, os.ErrClosed
	}
	conn, err := h.dialSocket(ctx)
	if !errors.Is(err, syscall.ECONNREFUSED) && !errors.Is(err, os.ErrNotExist) {
		return conn, err
	}
	unlock, err := h.d.Lock(ctx, h.r.Key)
	if err != nil {
		return nil, err
	}
	defer unlock()
	// Another handle, because h's record is read without the lock.
	again := &handle{b: h.b, d: h.d, dir: h.dir, r: h.r}
	if err := again.ensureFirst(ctx); err != nil {
		return nil, err
	}
	return h.dialSocket(ctx)
}

func (h *handle) dialSocket(ctx context.Context) (net.Conn, error) {
	addr, release, err := h.sockAddr()
	if err != nil {
		return nil, err
	}
	defer release()
	var d net.Dialer
	return d.DialContext(ctx, "unix", addr.Name)
}

// alive reports whether PID 1 of the namespace lives.
func (f *first) alive() bool { return lives(f.Pid, f.Start) }

// kill ends the namespace, and collects the launcher where it is our child.
func (f *first) kill(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, killWait)
	defer cancel()
	for {
		pid1, launcher := f.alive(), lives(f.Launcher, f.LauncherStart)
		if pid1 {
			_ = syscall.Kill(f.Pid, syscall.SIGKILL)
		}
		if launcher && !pid1 {
			_ = syscall.Kill(f.Launcher, syscall.SIGKILL)
		}
		f.reap()
		if !pid1 && !launcher {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("processes %d and %d do not end", f.Pid, f.Launcher)
		case <-time.After(time.Millisecond):
		}
	}
}

func (f *first) reap() {
	if f.Launcher > 1 && startTime(f.Launcher) == f.LauncherStart {
		_, _ = syscall.Wait4(f.Launcher, nil, syscall.WNOHANG, nil) // ECHILD: another process's
	}
}

// lives reports whether pid is the process that started then, and no zombie.
func lives(pid int, start int64) bool {
	if pid <= 1 {
		return false
	}
	state, t := stat(pid)
	return t == start && t != 0 && state != 'Z' && state != 'X'
}

func startTime(pid int) int64 {
	_, t := stat(pid)
	return t
}

// stat returns the state of a process and when it started, in ticks since boot;
// 0 if there is none.
func stat(pid int) (state byte, start int64) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, 0
	}
	f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	if len(f) < 20 {
		return 0, 0
	}
	start, _ = strconv.ParseInt(f[19], 10, 64)
	return f[0][0], start
}
