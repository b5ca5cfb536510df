package guest

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/aisandbox-go/aisandbox/internal/proc"
	"github.com/aisandbox-go/aisandbox/internal/wire"
	"github.com/aisandbox-go/aisandbox/provider"
)

func TestMain(m *testing.M) {
	Hook()
	goleak.VerifyTestMain(m)
}

// raw is the least a backend can be: a directory of this machine.
type raw struct {
	root   string
	socket string // of a guest that runs as a daemon; empty: none

	mu     sync.Mutex
	starts []*proc.Process
}

func (h *raw) Ref() provider.Ref { return provider.Ref{Provider: "raw", ID: h.root} }
func (h *raw) Root() string      { return h.root }
func (h *raw) Close() error      { return nil }

func (h *raw) Traits() provider.Traits {
	return provider.Traits{Isolation: provider.IsolationNone, LiveStdin: true, SharedKernel: true, Outlives: true}
}

func (h *raw) Start(ctx context.Context, cmd provider.Cmd) (provider.Process, error) {
	dir := cmd.Dir
	if dir == "" {
		dir = h.root
	}
	p, err := proc.Start(ctx, proc.Spec{
		Argv: cmd.Argv, Dir: dir, Env: append(os.Environ(), cmd.Env...), Stdin: cmd.Stdin, Stdout: cmd.Stdout, Stderr: cmd.Stderr, Terminal: cmd.Terminal,
	})
	if err != nil {
		return nil, err
	}
	h.mu.Lock()
	h.starts = append(h.starts, p)
	h.mu.Unlock()
	return p, nil
}

// withInit is a raw that offers its guest's socket.
type withInit struct{ *raw }

func (h withInit) DialInit(ctx context.Context) (io.ReadWriteCloser, error) {
	var d net.Dialer
	return d.DialContext(ctx, "unix", h.socket)
}

func shortDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "g")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

func options(t testing.TB) Options {
	state := shortDir(t)
	return Options{Logger: slog.New(slog.NewTextHandler(os.Stderr, nil)), Private: filepath.Join(state, "private"), JournalDir: filepath.Join(state, "runs")}
}

// serving attaches to a guest on a pipe.
func serving(t testing.TB) (*Handle, *raw) {
	t.Helper()
	r := &raw{root: shortDir(t)}
	g, err := Attach(t.Context(), r, options(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = g.Close() })
	return g, r
}

// daemon starts a guest that stays, and returns how to attach to it.
func daemon(t testing.TB) (attach func() *Handle, guest *proc.Process, h withInit) {
	t.Helper()
	h = withInit{&raw{root: shortDir(t)}}
	o := options(t)
	o.Root = h.root
	init := NewInit(o)
	prog, err := init.Program("linux/" + goarch())
	if err != nil {
		t.Fatal(err)
	}
	h.socket = filepath.Join(shortDir(t), "s")
	ready, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer ready.Close()
	p, err := proc.Start(context.WithoutCancel(t.Context()), proc.Spec{
		Argv: append(append([]string{prog.Path}, init.Args...), "--socket", h.socket, "--ready-fd", "3"),
		Env:  os.Environ(), Stderr: os.Stderr, ExtraFiles: []*os.File{w},
	})
	w.Close()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = p.Signal(syscall.SIGTERM)
		_ = p.KillTree()
		_, _ = p.Wait()
	})
	if _, err := io.ReadAll(ready); err != nil {
		t.Fatal(err)
	}
	return func() *Handle {
		t.Helper()
		g, err := Attach(t.Context(), h, o)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = g.Close() })
		return g
	}, p, h
}

func goarch() string {
	p, err := os.ReadFile("/proc/sys/kernel/arch")
	if err == nil && strings.TrimSpace(string(p)) == "aarch64" {
		return "arm64"
	}
	return "amd64"
}

// both runs a test over a pipe and over a socket.
func both(t *testing.T, f func(t *testing.T, g *Handle)) {
	t.Run("serve", func(t *testing.T) { g, _ := serving(t); f(t, g) })
	t.Run("init", func(t *testing.T) { attach, _, _ := daemon(t); f(t, attach()) })
}

func start(t testing.TB, g *Handle, cmd provider.Cmd) provider.Process {
	t.Helper()
	p, err := g.Start(t.Context(), cmd)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func shell(script string) []string { return provider.Shell(script) }

func stdoutOf(t testing.TB, g *Handle, argv ...string) string {
	t.Helper()
	var out, errOut bytes.Buffer
	exit, err := start(t, g, provider.Cmd{Argv: argv, Stdout: &out, Stderr: &errOut}).Wait()
	if err != nil || exit.Code != 0 {
		t.Fatalf("%q: %v, %v, %s", argv, exit, err, errOut.String())
	}
	return out.String()
}

// until polls a condition; what it waits for has no event of its own.
func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("not reached: %s", what)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// alive reports whether a process runs; a zombie doesn't.
func alive(pid int) bool {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return false
	}
	f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	return f[0] != "Z" && f[0] != "X"
}

func readPid(t testing.TB, file string) int {
	t.Helper()
	var pid int
	until(t, "the process has written "+file, func() bool {
		b, _ := os.ReadFile(file)
		pid, _ = strconv.Atoi(strings.TrimSpace(string(b)))
		return pid != 0
	})
	return pid
}

func TestGuestDies(t *testing.T) {
	both(t, func(t *testing.T, g *Handle) {
		c, err := g.conn(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		out := filepath.Join(t.TempDir(), "pid")
		p := start(t, g, provider.Cmd{Argv: shell(`echo $$ >"$OUT"; exec sleep 1000`), Env: []string{"OUT=" + out}})
		pid := readPid(t, out)
		defer syscall.Kill(pid, syscall.SIGKILL)
		if err := syscall.Kill(c.facts.Pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		if exit, err := p.Wait(); !errors.Is(err, provider.ErrUnavailable) || exit.Code != -1 {
			t.Errorf("Wait = %v, %v", exit, err)
		}
		if err := p.Signal(os.Kill); err != nil && !errors.Is(err, provider.ErrUnavailable) {
			t.Errorf("Signal: %v", err)
		}
	})
}

func TestReconnect(t *testing.T) {
	t.Run("serve starts another guest", func(t *testing.T) {
		g, _ := serving(t)
		c, _ := g.conn(t.Context())
		_ = syscall.Kill(c.facts.Pid, syscall.SIGKILL)
		until(t, "the loss is seen", c.dead)
		if got := stdoutOf(t, g, "echo", "again"); got != "again\n" {
			t.Errorf("%q", got)
		}
	})
	t.Run("init is joined again", func(t *testing.T) {
		attach, _, _ := daemon(t)
		g := attach()
		c, _ := g.conn(t.Context())
		out := filepath.Join(t.TempDir(), "pid")
		p := start(t, g, provider.Cmd{Argv: shell(`echo $$ >"$OUT"; exec sleep 1000`), Env: []string{"OUT=" + out}})
		pid := readPid(t, out)
		c.mux.Close() // as a broken wire would
		if _, err := p.Wait(); !errors.Is(err, provider.ErrUnavailable) {
			t.Errorf("Wait: %v", err)
		}
		if got := stdoutOf(t, g, "echo", "again"); got != "again\n" {
			t.Errorf("%q", got)
		}
		c2, _ := g.conn(t.Context())
		if c2.facts.Instance != c.facts.Instance {
			t.Error("another guest answered")
		}
		until(t, "the abandoned process is gone", func() bool { return !alive(pid) })
	})
	t.Run("closed is closed", func(t *testing.T) {
		g, _ := serving(t)
		if err := g.Close(); err != nil {
			t.Fatal(err)
		}
		if err := g.Close(); err != nil {
			t.Fatal(err)
		}
		if _, err := g.Lstat(t.Context(), "."); !errors.Is(err, provider.ErrUnavailable) {
			t.Errorf("Lstat: %v", err)
		}
	})
}

func TestServeEndsWithItsHost(t *testing.T) {
	g, h := serving(t)
	out := filepath.Join(t.TempDir(), "pid")
	p := start(t, g, provider.Cmd{Argv: shell(`setsid sh -c 'echo $$ >"$OUT"; exec sleep 1000' & wait`), Env: []string{"OUT=" + out}})
	pid := readPid(t, out)
	if err := g.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Wait(); !errors.Is(err, provider.ErrUnavailable) {
		t.Errorf("Wait: %v", err)
	}
	if alive(pid) {
		t.Error("the process survived its host")
	}
	for _, p := range h.starts {
		if _, err := p.Wait(); err != nil {
			t.Error(err)
		}
	}
}

func TestInitEndsWithEverything(t *testing.T) {
	attach, guest, _ := daemon(t)
	g := attach()
	out := filepath.Join(t.TempDir(), "pid")
	start(t, g, provider.Cmd{Argv: shell(`setsid sh -c 'echo $$ >"$OUT"; exec sleep 1000' & wait`), Env: []string{"OUT=" + out}})
	pid := readPid(t, out)
	if err := guest.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if exit, err := guest.Wait(); exit.Code != 0 || err != nil {
		t.Errorf("the guest ended with %v, %v", exit, err)
	}
	if alive(pid) {
		t.Error("a process survived")
	}
}

// fixed is a handle whose guest says something else.
type fixed struct {
	*raw
	say func(net.Conn)
}

func (f fixed) DialInit(context.Context) (io.ReadWriteCloser, error) {
	a, b := net.Pipe()
	go func() {
		defer b.Close()
		f.say(b)
	}()
	return a, nil
}

func TestOtherVersion(t *testing.T) {
	h := fixed{&raw{root: "/"}, func(c net.Conn) {
		go func() { _, _ = io.Copy(io.Discard, c) }()
		_, _ = c.Write([]byte("\x00aisbx-hello\x00\x00\x63\x00\x00\x00\x02{}"))
	}}
	_, err := Attach(t.Context(), h, Options{})
	var pe *ProtocolError
	if !errors.As(err, &pe) || pe.Guest != 99 || pe.Host != wire.Version {
		t.Errorf("Attach: %v", err)
	}
}

func TestNoGreeting(t *testing.T) {
	h := fixed{&raw{root: "/"}, func(c net.Conn) {
		go func() { _, _ = io.Copy(io.Discard, c) }()
		_, _ = c.Write([]byte("OCI runtime exec failed: no such file"))
	}}
	if _, err := Attach(t.Context(), h, Options{}); err == nil || !strings.Contains(err.Error(), "OCI runtime exec failed") {
		t.Errorf("Attach: %v", err)
	}
}

// broken is a backend whose programs don't run.
type broken struct {
	*raw
	argv []string
}

func (b broken) Traits() provider.Traits {
	return provider.Traits{Isolation: provider.IsolationContainer, LiveStdin: true}
}

func (b broken) Start(ctx context.Context, cmd provider.Cmd) (provider.Process, error) {
	cmd.Argv = append(append([]string(nil), b.argv...), cmd.Argv...)
	return b.raw.Start(ctx, cmd)
}

func TestFallback(t *testing.T) {
	for name, h := range map[string]provider.Handle{
		"nothing runs":   broken{&raw{root: "/"}, []string{"false"}},
		"missing":        broken{&raw{root: "/"}, []string{"/no/such"}},
		"other platform": broken{&raw{root: "/"}, []string{"sh", "-c", `echo Plan9 vax`}},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := Attach(t.Context(), h, Options{}); !errors.Is(err, errors.ErrUnsupported) {
				t.Errorf("Attach: %v", err)
			}
		})
	}
}

// container is a backend that needs the program uploaded.
type container struct{ *raw }

func (container) Traits() provider.Traits {
	return provider.Traits{Isolation: provider.IsolationContainer, LiveStdin: true}
}

func TestUpload(t *testing.T) {
	for i := range 2 { // the second finds it there
		g, err := Attach(t.Context(), container{&raw{root: shortDir(t)}}, options(t))
		if err != nil {
			t.Fatal(err)
		}
		if got := stdoutOf(t, g, "echo", "up"); got != "up\n" {
			t.Errorf("%q", got)
		}
		argv, err := g.Command(t.Context(), "version")
		if err != nil {
			t.Fatal(err)
		}
		if got := stdoutOf(t, g, argv...); !strings.Contains(got, `"protocol":1`) {
			t.Errorf("%q: %q", argv, got)
		}
		if i == 1 {
			removeProgram(g)
		}
		if err := g.Close(); err != nil {
			t.Error(err)
		}
	}
}

// removeProgram takes an uploaded program away: this test's is a big one.
func removeProgram(g *Handle) {
	if c, err := g.current(); c != nil && err == nil {
		_ = os.Remove(c.facts.Exe)
	}
}

func TestUsage(t *testing.T) {
	g, _ := serving(t)
	p := start(t, g, provider.Cmd{Argv: []string{"sleep", "1000"}})
	until(t, "the process is counted", func() bool {
		u, err := g.Usage(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return u.Processes == 1 && u.MemoryBytes > 0 && u.GuestMemory > 0
	})
	if err := p.Signal(os.Kill); err != nil {
		t.Error(err)
	}
}

func TestPorts(t *testing.T) {
	both(t, func(t *testing.T, g *Handle) {
		l, url, err := g.ListenInside(t.Context(), 0)
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go func() {
					b, _ := io.ReadAll(c)
					_, _ = c.Write(bytes.ToUpper(b))
					_ = c.Close()
				}()
			}
		}()
		port, err := strconv.Atoi(url[strings.LastIndexByte(url, ':')+1:])
		if err != nil {
			t.Fatal(err)
		}
		big := strings.Repeat("abc", 1<<20)
		for _, msg := range []string{"hello", big} {
			c, err := g.Dial(t.Context(), port) // in at one port, out at the other
			if err != nil {
				t.Fatal(err)
			}
			go func() {
				_, _ = io.WriteString(c, msg)
				_ = c.(interface{ CloseWrite() error }).CloseWrite()
			}()
			b, err := io.ReadAll(c)
			if err != nil || string(b) != strings.ToUpper(msg) {
				t.Errorf("%d bytes of %d, %v", len(b), len(msg), err)
			}
			c.Close()
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
			t.Errorf("Accept: %v", err)
		}
		until(t, "the port is closed", func() bool {
			c, err := g.Dial(t.Context(), port)
			if err == nil {
				c.Close()
			}
			return err != nil
		})
		if _, err := g.Dial(t.Context(), 70000); !errors.Is(err, provider.ErrInvalid) {
			t.Errorf("Dial: %v", err)
		}
	})
}
