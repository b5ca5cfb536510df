package guest

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/aisandbox-go/aisandbox/provider"
)

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
