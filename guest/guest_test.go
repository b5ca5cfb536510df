package guest

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
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

func TestExec(t *testing.T) {
	both(t, func(t *testing.T, g *Handle) {
		for _, tt := range []struct {
			name           string
			cmd            provider.Cmd
			stdout, stderr string
			exit           provider.Exit
		}{
			{"echo", provider.Cmd{Argv: []string{"echo", "hi"}}, "hi\n", "", provider.Exit{}},
			{"exit", provider.Cmd{Argv: shell("exit 7")}, "", "", provider.Exit{Code: 7}},
			{"apart", provider.Cmd{Argv: shell("printf a; printf b >&2")}, "a", "b", provider.Exit{}},
			{"no stdin", provider.Cmd{Argv: []string{"cat"}}, "", "", provider.Exit{}},
			{"stdin", provider.Cmd{Argv: []string{"cat"}, Stdin: strings.NewReader("a\x00b€")}, "a\x00b€", "", provider.Exit{}},
			{"unread stdin", provider.Cmd{Argv: shell("exit 3"), Stdin: strings.NewReader(strings.Repeat("x", 5<<20))}, "", "", provider.Exit{Code: 3}},
			{"env", provider.Cmd{Argv: shell(`printf %s "$K"`), Env: []string{"K=no", "K=a'b\"c$d\n\xff"}}, "a'b\"c$d\n\xff", "", provider.Exit{}},
			{"argv is bytes", provider.Cmd{Argv: []string{"printf", "%s", "\xff\xfe"}}, "\xff\xfe", "", provider.Exit{}},
			{"kill -9", provider.Cmd{Argv: shell("kill -9 $$")}, "", "", provider.Exit{Code: 137, Signal: 9}},
			{"unknown", provider.Cmd{Argv: shell("no-such-command 2>/dev/null")}, "", "", provider.Exit{Code: 127}},
			{"no mark of the guest's own", provider.Cmd{Argv: shell(`env | grep -c ^AISBX_PROC=`)}, "1\n", "", provider.Exit{}},
		} {
			t.Run(tt.name, func(t *testing.T) {
				var out, errOut bytes.Buffer
				tt.cmd.Stdout, tt.cmd.Stderr = &out, &errOut
				p := start(t, g, tt.cmd)
				for range 2 {
					if exit, err := p.Wait(); exit != tt.exit || err != nil {
						t.Errorf("Wait = %+v, %v; want %+v", exit, err, tt.exit)
					}
				}
				if out.String() != tt.stdout || errOut.String() != tt.stderr {
					t.Errorf("stdout %q, stderr %q; want %q, %q", out.String(), errOut.String(), tt.stdout, tt.stderr)
				}
				if err := p.Signal(os.Kill); err != nil {
					t.Errorf("kill after the end: %v", err)
				}
			})
		}
	})
}

func TestExecDir(t *testing.T) {
	g, h := serving(t)
	if err := os.Mkdir(h.root+"/sub", 0o755); err != nil {
		t.Fatal(err)
	}
	for dir, want := range map[string]string{"": h.root, "sub": h.root + "/sub", h.root + "/sub": h.root + "/sub"} {
		var out bytes.Buffer
		if _, err := start(t, g, provider.Cmd{Argv: []string{"pwd"}, Dir: dir, Stdout: &out}).Wait(); err != nil || strings.TrimSpace(out.String()) != want {
			t.Errorf("pwd in %q: %q, %v", dir, out.String(), err)
		}
	}
}

func TestStartErrors(t *testing.T) {
	g, _ := serving(t)
	cause := errors.New("because")
	cancelled, cancel := context.WithCancelCause(t.Context())
	cancel(cause)
	for _, tt := range []struct {
		name string
		ctx  context.Context
		cmd  provider.Cmd
		want error
	}{
		{"empty", t.Context(), provider.Cmd{}, provider.ErrInvalid},
		{"missing", t.Context(), provider.Cmd{Argv: []string{"no-such-program"}}, fs.ErrNotExist},
		{"bad dir", t.Context(), provider.Cmd{Argv: []string{"true"}, Dir: "/no/such"}, provider.ErrInvalid},
		{"too long", t.Context(), provider.Cmd{Argv: []string{"echo", strings.Repeat("x", 200<<10)}}, provider.ErrInvalid},
		{"unknown user", t.Context(), provider.Cmd{Argv: []string{"true"}, User: "nobody-at-all"}, provider.ErrInvalid},
		{"cancelled", cancelled, provider.Cmd{Argv: []string{"true"}}, cause},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if _, err := g.Start(tt.ctx, tt.cmd); !errors.Is(err, tt.want) {
				t.Errorf("Start: %v, want %v", err, tt.want)
			}
		})
	}
	if got := stdoutOf(t, g, "echo", "still here"); got != "still here\n" {
		t.Errorf("after the errors: %q", got)
	}
}

func TestParallelExecs(t *testing.T) {
	both(t, func(t *testing.T, g *Handle) {
		var wg sync.WaitGroup
		for i := range 200 {
			wg.Go(func() {
				var out bytes.Buffer
				p, err := g.Start(t.Context(), provider.Cmd{Argv: shell(fmt.Sprintf("echo %d; exit %d", i, i)), Stdout: &out})
				if err != nil {
					t.Error(err)
					return
				}
				exit, err := p.Wait()
				if exit.Code != i || err != nil || strings.TrimSpace(out.String()) != strconv.Itoa(i) {
					t.Errorf("%d: %v, %v, %q", i, exit, err, out.String())
				}
			})
		}
		wg.Wait()
		c, err := g.conn(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		until(t, "no zombie", func() bool {
			b, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", c.facts.Pid, c.facts.Pid))
			if err != nil {
				return true
			}
			return strings.TrimSpace(string(b)) == ""
		})
	})
}

// escapes are trees that hide; each writes the number of what hides to $OUT.
var escapes = map[string]string{
	"double fork and setsid":          `(setsid sh -c 'sh -c "echo \$\$ >\"$OUT\"; exec sleep 1000" & exit 0' &) ; sleep 1000`,
	"nohup":                           `nohup setsid sh -c 'trap "" TERM HUP INT; echo $$ >"$OUT"; while :; do sleep 1; done' >/dev/null 2>&1 & sleep 1000`,
	"holds the pipe":                  `setsid sh -c 'echo $$ >"$OUT"; while :; do echo x; sleep 0.01; done' & sleep 1000`,
	"empty environment, double fork":  `(setsid env -i O="$OUT" /bin/sh -c '/bin/sh -c "echo \$\$ >\"\$O\"; exec sleep 1000" & exit 0' &) ; sleep 1000`,
	"ignores TERM":                    `trap "" TERM; echo $$ >"$OUT"; while :; do sleep 1; done`,
	"stopped":                         `echo $$ >"$OUT"; kill -STOP $$`,
	"forks all the time, new session": `f() { setsid sh -c 'echo $$ >"$OUT"; sleep 0.02' & }; while :; do f; sleep 0.005; done`,
}

func TestKill(t *testing.T) {
	both(t, func(t *testing.T, g *Handle) {
		for name, script := range escapes {
			t.Run(name, func(t *testing.T) {
				out := filepath.Join(t.TempDir(), "pid")
				p := start(t, g, provider.Cmd{Argv: shell(script), Env: []string{"OUT=" + out}, Stdout: io.Discard})
				hidden := readPid(t, out)
				begin := time.Now()
				if err := p.Signal(os.Kill); err != nil {
					t.Fatal(err)
				}
				if alive(hidden) {
					t.Error("a process survived")
				}
				exit, err := p.Wait()
				if d := time.Since(begin); d > 2*time.Second {
					t.Errorf("it took %v", d)
				}
				if err != nil || exit.Signal != 9 {
					t.Errorf("Wait = %v, %v", exit, err)
				}
			})
		}
	})
}

func TestKillThoughNobodyReads(t *testing.T) {
	g, _ := serving(t)
	stuck := make(chan struct{})
	p := start(t, g, provider.Cmd{Argv: []string{"yes"}, Stdout: writerFunc(func(b []byte) (int, error) { <-stuck; return len(b), nil })})
	if err := p.Signal(os.Kill); err != nil {
		t.Fatal(err)
	}
	close(stuck)
	if exit, err := p.Wait(); exit.Signal != 9 || err != nil {
		t.Errorf("Wait = %v, %v", exit, err)
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }

func TestCancelKillsTheTree(t *testing.T) {
	both(t, func(t *testing.T, g *Handle) {
		ctx, cancel := context.WithCancelCause(t.Context())
		cause := errors.New("because")
		out := filepath.Join(t.TempDir(), "pid")
		p, err := g.Start(ctx, provider.Cmd{Argv: shell(`setsid sh -c 'echo $$ >"$OUT"; exec sleep 1000' & wait`), Env: []string{"OUT=" + out}})
		if err != nil {
			t.Fatal(err)
		}
		hidden := readPid(t, out)
		cancel(cause)
		if _, err := p.Wait(); err != cause {
			t.Errorf("Wait: %v", err)
		}
		if alive(hidden) {
			t.Error("a process survived")
		}
	})
}

func TestStrangerHoldsThePipe(t *testing.T) {
	g, _ := serving(t)
	var out bytes.Buffer
	begin := time.Now()
	exit, err := start(t, g, provider.Cmd{Argv: shell("sleep 1000 & echo $!; echo tail; exit 4"), Stdout: &out}).Wait()
	if exit.Code != 4 || err != nil || time.Since(begin) > 2*time.Second {
		t.Fatalf("Wait = %v, %v after %v", exit, err, time.Since(begin))
	}
	first, rest, _ := strings.Cut(out.String(), "\n")
	pid, _ := strconv.Atoi(first)
	if rest != "tail\n" || !alive(pid) {
		t.Errorf("output %q, the background child lives: %v", out.String(), alive(pid))
	}
	_ = syscall.Kill(pid, syscall.SIGKILL)

	out.Reset()
	p, err := g.StartClean(t.Context(), provider.Cmd{Argv: shell("setsid sleep 1000 & echo $!; exit 4"), Stdout: &out})
	if err != nil {
		t.Fatal(err)
	}
	if exit, err := p.Wait(); exit.Code != 4 || err != nil {
		t.Fatalf("Wait = %v, %v", exit, err)
	}
	if pid, _ := strconv.Atoi(strings.TrimSpace(out.String())); pid == 0 || alive(pid) {
		t.Errorf("StartClean left process %d", pid)
	}
}

func TestBigInput(t *testing.T) {
	both(t, func(t *testing.T, g *Handle) {
		in := make([]byte, 10<<20)
		_, _ = rand.Read(in)
		var out bytes.Buffer
		exit, err := start(t, g, provider.Cmd{Argv: []string{"cat"}, Stdin: bytes.NewReader(in), Stdout: &out}).Wait()
		if exit.Code != 0 || err != nil || !bytes.Equal(in, out.Bytes()) {
			t.Errorf("Wait = %v, %v; %d of %d bytes", exit, err, out.Len(), len(in))
		}
	})
}

func TestOutputOfOneStreamOnly(t *testing.T) {
	g, _ := serving(t)
	release := make(chan struct{})
	var out bytes.Buffer
	full := make(chan struct{})
	p := start(t, g, provider.Cmd{
		Argv: shell("head -c 10485760 /dev/zero >&2 & head -c 10485760 /dev/zero; echo; wait"),
		Stdout: writerFunc(func(b []byte) (int, error) {
			out.Write(b)
			if out.Len() == 10<<20+1 {
				close(full)
			}
			return len(b), nil
		}),
		Stderr: writerFunc(func(b []byte) (int, error) { <-release; return len(b), nil }),
	})
	select {
	case <-full: // though nobody takes stderr
	case <-time.After(20 * time.Second):
		t.Error("stdout waits for stderr")
	}
	close(release)
	if exit, err := p.Wait(); exit.Code != 0 || err != nil {
		t.Errorf("Wait = %v, %v", exit, err)
	}
}

func TestWriterError(t *testing.T) {
	g, _ := serving(t)
	full := errors.New("full")
	p := start(t, g, provider.Cmd{Argv: []string{"yes"}, Stdout: writerFunc(func([]byte) (int, error) { return 0, full })})
	if exit, err := p.Wait(); !errors.Is(err, full) || exit.Signal != int(syscall.SIGPIPE) {
		t.Errorf("Wait = %v, %v", exit, err)
	}
	if got := stdoutOf(t, g, "echo", "ok"); got != "ok\n" {
		t.Errorf("afterwards: %q", got)
	}
}

func TestTerminal(t *testing.T) {
	g, _ := serving(t)
	var mu sync.Mutex
	var out bytes.Buffer
	ready := make(chan struct{})
	var once sync.Once
	in, inw := io.Pipe()
	p := start(t, g, provider.Cmd{
		Argv:     shell("stty size; trap 'stty size; exit' WINCH; echo ready; while :; do sleep 0.02; done"),
		Terminal: &provider.Terminal{Rows: 31, Cols: 97}, Stdin: in,
		Stdout: writerFunc(func(b []byte) (int, error) {
			mu.Lock()
			defer mu.Unlock()
			out.Write(b)
			if strings.Contains(out.String(), "ready") {
				once.Do(func() { close(ready) })
			}
			return len(b), nil
		}),
	})
	<-ready
	if err := p.(provider.Resizer).Resize(provider.Terminal{Rows: 40, Cols: 132}); err != nil {
		t.Fatal(err)
	}
	if exit, err := p.Wait(); exit.Code != 0 || err != nil {
		t.Fatalf("Wait = %v, %v", exit, err)
	}
	inw.Close()
	if s := out.String(); !strings.Contains(s, "31 97") || !strings.Contains(s, "40 132") {
		t.Errorf("output %q", s)
	}
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
		go func() { _, _ = c.Write([]byte("\x00aisbx-hello\x00\x00\x63\x00\x00\x00\x02{}")) }()
		_, _ = io.ReadAll(io.LimitReader(c, 20))
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
	for range 2 { // the second finds it there
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
		if err := g.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestUsage(t *testing.T) {
	g, _ := serving(t)
	p := start(t, g, provider.Cmd{Argv: []string{"sleep", "1000"}})
	u, err := g.Usage(t.Context())
	if err != nil || u.Processes < 1 || u.MemoryBytes <= 0 || u.GuestMemory <= 0 {
		t.Errorf("Usage = %+v, %v", u, err)
	}
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
