package docker

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/aisandbox-go/aisandbox/provider"
)

// agents runs f for an agent that is root and for one that is not and has no entry
// in the image.
func agents(t *testing.T, f func(t *testing.T, h provider.Handle)) {
	for _, user := range []string{"", "1234:1234"} {
		t.Run("user "+user, func(t *testing.T) {
			f(t, create(t, newProvider(t, Options{User: user}), provider.Spec{}))
		})
	}
}

func TestExec(t *testing.T) {
	agents(t, func(t *testing.T, h provider.Handle) {
		big := bytes.Repeat([]byte("0123456789abcdef"), 64<<10)
		for _, tc := range []struct {
			name string
			cmd  provider.Cmd
			want result
		}{
			{"echo", provider.Cmd{Argv: []string{"echo", "hi"}}, result{out: "hi\n"}},
			{"exit code", provider.Cmd{Argv: provider.Shell("exit 7")}, result{exit: provider.Exit{Code: 7}}},
			{"apart", provider.Cmd{Argv: provider.Shell("printf a; printf b >&2")}, result{out: "a", err: "b"}},
			{"no stdin", provider.Cmd{Argv: []string{"cat"}}, result{}},
			{"stdin", provider.Cmd{Argv: []string{"cat"}, Stdin: bytes.NewReader(big)}, result{out: string(big)}},
			{"half close", provider.Cmd{Argv: provider.Shell("cat; echo after; echo err >&2; exit 3"), Stdin: strings.NewReader("in\n")},
				result{"in\nafter\n", "err\n", provider.Exit{Code: 3}}},
			{"unread stdin", provider.Cmd{Argv: []string{"true"}, Stdin: bytes.NewReader(big)}, result{}},
			{"killed", provider.Cmd{Argv: provider.Shell("kill -9 $$")}, result{exit: provider.Exit{Code: 137, Signal: 9}}},
			{"dir", provider.Cmd{Argv: []string{"pwd"}, Dir: "/usr/bin"}, result{out: "/usr/bin\n"}},
			{"workdir", provider.Cmd{Argv: provider.Shell("pwd; touch mine; rm mine")}, result{out: "/workspace\n"}},
			{"env", provider.Cmd{Argv: provider.Shell(`printf %s "$K"`), Env: []string{"K=x", "K=a'b\"c$d\n"}}, result{out: "a'b\"c$d\n"}},
			{"argv as bytes", provider.Cmd{Argv: []string{"printf", "%s|", "a\xff\n\n", "", "-n", "$(id)", "é"}}, result{out: "a\xff\n\n||-n|$(id)|é|"}},
			{"env as bytes", provider.Cmd{Argv: provider.Shell(`printf %s "$K"`), Env: []string{"K=\xfe\xff\n"}}, result{out: "\xfe\xff\n"}},
			{"invalid output", provider.Cmd{Argv: provider.Shell(`printf 'a\376\377b\376'`)}, result{out: "a\xfe\xffb\xfe"}},
			{"a builtin's name", provider.Cmd{Argv: []string{"exit", "3"}}, result{exit: provider.Exit{Code: 127}}},
			{"not executable", provider.Cmd{Argv: []string{"/etc/passwd"}}, result{exit: provider.Exit{Code: 126}}},
			{"another user", provider.Cmd{Argv: []string{"id", "-u"}, User: "65534"}, result{out: "65534\n"}},
			{"home", provider.Cmd{Argv: provider.Shell(`touch "$HOME/x" && rm "$HOME/x"`)}, result{}},
			{"home given", provider.Cmd{Argv: provider.Shell(`printf %s "$HOME"`), Env: []string{"HOME=/nowhere"}}, result{out: "/nowhere"}},
			{"non-blocking pipe left full", provider.Cmd{Argv: []string{"node", "-e", `
				process.stdout._handle.setBlocking(false); process.stderr._handle.setBlocking(false);
				process.stdout.write("x".repeat(300000))`}}, result{out: strings.Repeat("x", 300000)}},
			{"background", provider.Cmd{Argv: provider.Shell("sleep 300 & echo started")}, result{out: "started\n"}},
		} {
			t.Run(tc.name, func(t *testing.T) {
				start := time.Now()
				got := exec(t, h, tc.cmd)
				if tc.want.exit.Code == 126 || tc.want.exit.Code == 127 {
					got.err = "" // the shell's own words
				}
				if diff := cmp.Diff(tc.want, got, cmp.AllowUnexported(result{})); diff != "" {
					t.Error(diff)
				}
				if d := time.Since(start); d > 10*time.Second {
					t.Errorf("took %v", d)
				}
			})
		}
	})
}

func TestStartErrors(t *testing.T) {
	p := newProvider(t, Options{})
	h := create(t, p, provider.Spec{})
	for _, tc := range []struct {
		name string
		cmd  provider.Cmd
		want string
	}{
		{"no argv", provider.Cmd{}, "argv is empty"},
		{"no dir", provider.Cmd{Argv: []string{"true"}, Dir: "/no/such"}, `no directory "/no/such"`},
		{"dir is a file", provider.Cmd{Argv: []string{"true"}, Dir: "/etc/passwd"}, "no directory"},
		{"NUL", provider.Cmd{Argv: []string{"echo", "a\x00b"}}, "NUL"},
		{"long argument", provider.Cmd{Argv: provider.Shell("true # " + strings.Repeat("x", 200<<10))}, "pass it on stdin"},
		{"nameless variable", provider.Cmd{Argv: []string{"true"}, Env: []string{"=x"}}, "without a name"},
		{"unknown user", provider.Cmd{Argv: []string{"true"}, User: "nobody-knows"}, "nobody-knows"},
		{"terminal without size", provider.Cmd{Argv: []string{"true"}, Terminal: &provider.Terminal{}}, "terminal of 0 rows"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := h.Start(t.Context(), tc.cmd)
			if !errors.Is(err, provider.ErrInvalid) || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v", err)
			}
		})
	}
	t.Run("ended context", func(t *testing.T) {
		ctx, cancel := context.WithCancelCause(t.Context())
		cause := errors.New("not today")
		cancel(cause)
		if _, err := h.Start(ctx, provider.Cmd{Argv: []string{"touch", "/tmp/ran"}}); !errors.Is(err, cause) {
			t.Errorf("got %v", err)
		}
		if r := exec(t, h, provider.Cmd{Argv: []string{"test", "-e", "/tmp/ran"}}); r.exit.Code != 1 {
			t.Error("it ran")
		}
	})
}

// A marker of one command in the output of another, or in a listing of processes, is
// output like any other.
func TestListingHoldsNoMarker(t *testing.T) {
	h := create(t, newProvider(t, Options{}), provider.Spec{})
	got := exec(t, h, provider.Cmd{Argv: provider.Shell("ps axww -o args; cat /proc/*/cmdline; env; cat /proc/self/environ; echo end")})
	if !strings.HasSuffix(got.out, "end\n") || got.exit.Code != 0 {
		t.Errorf("%v\n%s", got.exit, got.out)
	}
}

func TestWaitIgnoresStrangers(t *testing.T) {
	h := create(t, newProvider(t, Options{}), provider.Spec{})
	start := time.Now()
	got := exec(t, h, provider.Cmd{Argv: provider.Shell("(setsid sleep 60; echo late) & printf '%0200000d' 0; exit 4")})
	if len(got.out) != 200000 || got.exit.Code != 4 || time.Since(start) > 10*time.Second {
		t.Errorf("%d bytes, %v, after %v", len(got.out), got.exit, time.Since(start))
	}
}

func TestBackpressure(t *testing.T) {
	h := create(t, newProvider(t, Options{}), provider.Spec{})
	r, w := io.Pipe()
	p, err := h.Start(t.Context(), provider.Cmd{Argv: provider.Shell("head -c 300000000 /dev/zero; echo done >/tmp/done"), Stdout: w})
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		_, _ = p.Wait()
		_ = w.Close()
	}()
	// Nothing is read yet: what fits into the buffers on the way is far less.
	if _, err := io.ReadFull(r, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	if got := sh(t, h, "test -e /tmp/done && echo finished || echo held"); got != "held" {
		t.Error(got)
	}
	n, err := io.Copy(io.Discard, r)
	if n != 300000000-1 || err != nil {
		t.Error(n, err)
	}
}

func TestLargeStreams(t *testing.T) {
	h := create(t, newProvider(t, Options{}), provider.Spec{})
	in := make([]byte, 10<<20)
	rand.Read(in)
	sum := sha256.New()
	got := exec(t, h, provider.Cmd{Argv: provider.Shell("tee /dev/stderr"), Stdin: bytes.NewReader(in), Stdout: sum})
	want := sha256.Sum256(in)
	if !bytes.Equal(sum.Sum(nil), want[:]) || sha256.Sum256([]byte(got.err)) != want {
		t.Error("the bytes differ")
	}
}

// treeScript leaves descendants in every hiding place there is without privileges.
const treeScript = `
sleep 600.1 &
setsid sleep 600.2 &
(setsid sh -c 'sleep 600.3 & sleep 600.4' >/dev/null 2>&1 </dev/null &)
env -i setsid nohup sleep 600.5 >/dev/null 2>&1 &
(trap "" TERM INT HUP; exec sleep 600.6) &
node -e 'process.title=") Z 0 0 ("; setInterval(()=>{}, 1000)' holder &
sh -c 'sleep 0.01; (sleep 600.7 &) ; exit' &
echo ready
wait`

const treeCount = `n=0; for f in /proc/[0-9]*/cmdline; do
case "$(head -c 9 <$f | tr '\0' ' ')" in "sleep 600" | ") Z 0 0 (") n=$((n+1)) ;; esac; done 2>/dev/null; echo $n`

func TestKillTree(t *testing.T) {
	for _, noMark := range []bool{false, true} {
		t.Run(fmt.Sprint("without the mark: ", noMark), func(t *testing.T) {
			agents(t, func(t *testing.T, h provider.Handle) {
				inner, _ := provider.As[*snapshotHandle](h)
				inner.noMark = noMark
				script := treeScript
				if noMark { // the environment is all there is to find it by
					script = strings.Replace(script, "env -i ", "", 1)
				}
				out := newSyncBuffer()
				p, err := h.Start(t.Context(), provider.Cmd{Argv: provider.Shell(script), Stdout: out})
				if err != nil {
					t.Fatal(err)
				}
				eventually(t, 10*time.Second, "ready", func() bool { return out.String() == "ready\n" })
				eventually(t, 10*time.Second, "the tree stands", func() bool { return sh(t, h, treeCount) == "8" })
				start := time.Now()
				var wg sync.WaitGroup
				for range 3 { // joined
					wg.Go(func() {
						if err := p.Signal(os.Kill); err != nil {
							t.Error(err)
						}
					})
				}
				wg.Wait()
				took := time.Since(start)
				if n := sh(t, h, treeCount); n != "0" {
					t.Errorf("%s processes survive", n)
				}
				exit, err := p.Wait()
				if exit != (provider.Exit{Code: 137, Signal: 9}) || err != nil {
					t.Error(exit, err)
				}
				if took > 4*time.Second {
					t.Errorf("took %v", took)
				}
				if err := p.Signal(os.Kill); err != nil {
					t.Errorf("after the end: %v", err)
				}
			})
		})
	}
}

func TestKillLeavesOthers(t *testing.T) {
	h := create(t, newProvider(t, Options{}), provider.Spec{})
	other, err := h.Start(t.Context(), provider.Cmd{Argv: []string{"cat"}, Stdin: blocked{t.Context()}})
	if err != nil {
		t.Fatal(err)
	}
	p, err := h.Start(t.Context(), provider.Cmd{Argv: []string{"sleep", "600"}})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Signal(os.Kill); err != nil {
		t.Fatal(err)
	}
	if got := sh(t, h, "pgrep -cx cat"); got != "1" {
		t.Errorf("%s others", got)
	}
	if err := other.Signal(os.Kill); err != nil {
		t.Error(err)
	}
}

// blocked is a stdin that never says anything.
type blocked struct{ ctx context.Context }

func (b blocked) Read([]byte) (int, error) {
	<-b.ctx.Done()
	return 0, io.EOF
}

func TestKillAtOnce(t *testing.T) {
	h := create(t, newProvider(t, Options{}), provider.Spec{})
	for range 5 {
		p, err := h.Start(t.Context(), provider.Cmd{Argv: []string{"sleep", "600.9"}})
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Signal(os.Kill); err != nil {
			t.Fatal(err)
		}
	}
	if r := exec(t, h, provider.Cmd{Argv: []string{"pgrep", "-fx", "sleep 600.9"}}); r.exit.Code != 1 {
		t.Errorf("survivors: %s", r.out)
	}
}

func TestKillBlockedWriter(t *testing.T) {
	h := create(t, newProvider(t, Options{}), provider.Spec{})
	r, w := io.Pipe()
	p, err := h.Start(t.Context(), provider.Cmd{Argv: []string{"yes"}, Stdout: w})
	if err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	if err := p.Signal(os.Kill); err != nil {
		t.Error(err)
	}
	if d := time.Since(start); d > 30*time.Second {
		t.Errorf("took %v", d)
	}
	if r := exec(t, h, provider.Cmd{Argv: []string{"pgrep", "-x", "yes"}}); r.exit.Code != 1 {
		t.Error("it survives")
	}
	_ = r.Close()
	if exit, _ := p.Wait(); exit.Signal != 9 {
		t.Error(exit)
	}
}

func TestContextKills(t *testing.T) {
	agents(t, func(t *testing.T, h provider.Handle) {
		ctx, cancel := context.WithCancelCause(t.Context())
		defer cancel(nil)
		p, err := h.Start(ctx, provider.Cmd{Argv: provider.Shell("setsid sleep 600.8 & sleep 600.8")})
		if err != nil {
			t.Fatal(err)
		}
		cause := errors.New("enough")
		cancel(cause)
		start := time.Now()
		if _, err := p.Wait(); !errors.Is(err, cause) {
			t.Errorf("got %v", err)
		}
		if d := time.Since(start); d > 5*time.Second {
			t.Errorf("took %v", d)
		}
		eventually(t, 2*time.Second, "no survivor", func() bool {
			return exec(t, h, provider.Cmd{Argv: []string{"pgrep", "-fx", "sleep 600.8"}}).exit.Code == 1
		})
	})
}

func TestSignal(t *testing.T) {
	agents(t, func(t *testing.T, h provider.Handle) {
		out := newSyncBuffer()
		p, err := h.Start(t.Context(), provider.Cmd{Argv: provider.Shell(`trap 'echo got; exit 5' TERM; echo up; while :; do sleep 0.05; done`), Stdout: out})
		if err != nil {
			t.Fatal(err)
		}
		eventually(t, 5*time.Second, "up", func() bool { return out.String() == "up\n" })
		if err := p.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		exit, err := p.Wait()
		if exit.Code != 5 || err != nil || out.String() != "up\ngot\n" {
			t.Error(exit, err, out)
		}
		p, err = h.Start(t.Context(), provider.Cmd{Argv: provider.Shell("sleep 600 | sleep 600")})
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Signal(os.Interrupt); err != nil {
			t.Fatal(err)
		}
		if exit, err := p.Wait(); exit != (provider.Exit{Code: 130, Signal: 2}) || err != nil {
			t.Error(exit, err)
		}
	})
}

func TestTerminal(t *testing.T) {
	agents(t, func(t *testing.T, h provider.Handle) {
		got := exec(t, h, provider.Cmd{Argv: provider.Shell("tty >/dev/null && stty size; echo err >&2; exit 2"), Terminal: &provider.Terminal{Rows: 33, Cols: 77}})
		want := result{out: "33 77\r\nerr\r\n", exit: provider.Exit{Code: 2}}
		if diff := cmp.Diff(want, got, cmp.AllowUnexported(result{})); diff != "" {
			t.Error(diff)
		}
		got = exec(t, h, provider.Cmd{Argv: []string{"cat"}, Terminal: &provider.Terminal{Rows: 24, Cols: 80}})
		if got.exit.Code != 0 {
			t.Error(got)
		}

		out := newSyncBuffer()
		in, typed := io.Pipe()
		defer typed.Close()
		p, err := h.Start(t.Context(), provider.Cmd{Argv: provider.Shell("echo up; read x; stty size; echo got $x; sleep 600"), Stdin: in, Stdout: out,
			Terminal: &provider.Terminal{Rows: 24, Cols: 80}})
		if err != nil {
			t.Fatal(err)
		}
		eventually(t, 5*time.Second, "up", func() bool { return strings.Contains(out.String(), "up\r\n") })
		if err := p.(provider.Resizer).Resize(provider.Terminal{Rows: 40, Cols: 100}); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(typed, "word\n"); err != nil {
			t.Fatal(err)
		}
		eventually(t, 5*time.Second, "the new size and the word", func() bool {
			return strings.Contains(out.String(), "40 100") && strings.Contains(out.String(), "got word")
		})
		if _, err := io.WriteString(typed, "\x03"); err != nil { // Ctrl-C
			t.Fatal(err)
		}
		if exit, err := p.Wait(); exit.Signal != 2 || err != nil {
			t.Error(exit, err)
		}
	})
}

func TestParallel(t *testing.T) {
	h := create(t, newProvider(t, Options{}), provider.Spec{})
	n := 60
	if testing.Short() {
		n = 10
	}
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			var out bytes.Buffer
			p, err := h.Start(t.Context(), provider.Cmd{Argv: provider.Shell(fmt.Sprintf("echo %d; exit %d", i, i%100)), Stdout: &out})
			if err != nil {
				t.Error(err)
				return
			}
			exit, err := p.Wait()
			if err != nil || exit.Code != i%100 || out.String() != fmt.Sprintln(i) {
				t.Error(i, exit, err, out.String())
			}
		})
	}
	wg.Wait()
	if got := sh(t, h, "cat /proc/[0-9]*/stat | grep -c ' Z ' || true"); got != "0" {
		t.Errorf("%s zombies", got)
	}
	if got := sh(t, h, "ls -A /tmp | wc -l"); got != "0" {
		t.Errorf("%s files left in /tmp", got)
	}
}

func TestSandboxEndsUnderCommand(t *testing.T) {
	p := newProvider(t, Options{})
	h := create(t, p, provider.Spec{})
	proc, err := h.Start(t.Context(), provider.Cmd{Argv: []string{"sleep", "600"}})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Destroy(t.Context(), h.Ref()); err != nil {
		t.Fatal(err)
	}
	if exit, err := proc.Wait(); exit.Signal != 9 || err != nil {
		t.Error(exit, err)
	}
	if err := proc.Signal(os.Kill); err != nil {
		t.Error(err)
	}
	if _, err := h.Start(t.Context(), provider.Cmd{Argv: []string{"true"}}); !errors.Is(err, provider.ErrNotFound) {
		t.Errorf("start in a sandbox that is gone: %v", err)
	}
}
