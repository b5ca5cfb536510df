//go:build linux

package proc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/aisandbox-go/aisandbox/internal/testenv"
	"github.com/aisandbox-go/aisandbox/provider"
)

// TestMain runs the whole suite three times: in this process, where every Start
// waits for its own child, and in children that reap centrally: one that leads its
// session as the guest does, and one that may not give badges.
func TestMain(m *testing.M) {
	if mode := os.Getenv("PROC_TEST_REAPER"); mode != "" {
		if err := BecomeReaper(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		r := theReaper.Load()
		if guest := mode == "guest"; r.leads != guest || badges() != guest {
			fmt.Fprintf(os.Stderr, "as %s: leads its session %v, has badges %v\n", mode, r.leads, badges())
			os.Exit(1)
		}
		goleak.VerifyTestMain(m, goleak.IgnoreCurrent())
		return
	}
	goleak.VerifyTestMain(m)
}

func reaping() bool { return theReaper.Load() != nil }

func badges() bool { return reaping() && theReaper.Load().hard != 0 }

func TestAsReaper(t *testing.T) {
	if reaping() {
		t.Skip("this is the child already")
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for mode, argv := range map[string][]string{
		"guest": {exe},
		"plain": {"sh", "-c", `ulimit -m 1000000000 && exec "$0" "$@"`, exe},
	} {
		t.Run(mode, func(t *testing.T) {
			argv = append(argv, "-test.count=1", "-test.timeout=120s", "-test.parallel=1")
			if testing.Verbose() {
				argv = append(argv, "-test.v")
			}
			cmd := exec.Command(argv[0], argv[1:]...)
			cmd.Env = append(os.Environ(), "PROC_TEST_REAPER="+mode)
			cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: mode == "guest"}
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
		})
	}
}

func sh(script string) []string { return provider.Shell(script) }

func start(t *testing.T, s Spec) *Process {
	t.Helper()
	if s.Env == nil {
		s.Env = []string{"PATH=" + os.Getenv("PATH")}
	}
	p, err := Start(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.KillTree(); _, _ = p.Wait() })
	return p
}

// until polls a condition; what it waits for has no event of its own.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("not reached: %s", what)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

func alive(pid int) bool {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return false
	}
	e, ok := parseStat(pid, b)
	return ok && !e.dead()
}

func TestExits(t *testing.T) {
	for _, tt := range []struct {
		script string
		want   provider.Exit
	}{
		{"exit 0", provider.Exit{}},
		{"exit 7", provider.Exit{Code: 7}},
		{"exit 255", provider.Exit{Code: 255}},
		{"kill -9 $$", provider.Exit{Code: 137, Signal: 9}},
		{"kill -TERM $$", provider.Exit{Code: 143, Signal: 15}},
		{"no-such-command-at-all", provider.Exit{Code: 127}},
	} {
		t.Run(tt.script, func(t *testing.T) {
			p := start(t, Spec{Argv: sh(tt.script)})
			for range 2 {
				got, err := p.Wait()
				if got != tt.want || err != nil {
					t.Errorf("Wait = %+v, %v; want %+v", got, err, tt.want)
				}
			}
			if err := p.Signal(os.Kill); err != nil {
				t.Errorf("Signal after the end: %v", err)
			}
		})
	}
}

func TestStreams(t *testing.T) {
	var out, errOut bytes.Buffer
	p := start(t, Spec{Argv: sh("cat; printf b >&2; printf '%s' \"$K\""), Env: []string{"PATH=" + os.Getenv("PATH"), "K=lost", "K=a'b\"c$d\n"},
		Stdin: strings.NewReader("in\x00put€"), Stdout: &out, Stderr: &errOut})
	if exit, err := p.Wait(); exit.Code != 0 || err != nil {
		t.Fatalf("Wait = %v, %v", exit, err)
	}
	if got, want := out.String(), "in\x00put€a'b\"c$d\n"; got != want {
		t.Errorf("stdout %q, want %q", got, want)
	}
	if errOut.String() != "b" {
		t.Errorf("stderr %q", errOut.String())
	}
}

func TestStderrAlone(t *testing.T) {
	var errOut bytes.Buffer
	p := start(t, Spec{Argv: sh("echo a; echo b >&2"), Stderr: &errOut})
	if _, err := p.Wait(); err != nil || errOut.String() != "b\n" {
		t.Errorf("%q, %v", errOut.String(), err)
	}
}

func TestOneWriterKeepsTheOrder(t *testing.T) {
	var out bytes.Buffer
	p := start(t, Spec{Argv: sh("for i in 1 2 3; do echo o$i; echo e$i >&2; done"), Stdout: &out, Stderr: &out})
	if _, err := p.Wait(); err != nil {
		t.Fatal(err)
	}
	if got, want := out.String(), "o1\ne1\no2\ne2\no3\ne3\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestNoStdinIsEOF(t *testing.T) {
	if exit, err := start(t, Spec{Argv: []string{"cat"}}).Wait(); exit.Code != 0 || err != nil {
		t.Errorf("Wait = %v, %v", exit, err)
	}
}

func TestStdinThatIsNotRead(t *testing.T) {
	r, w := io.Pipe()
	defer w.Close()
	p := start(t, Spec{Argv: sh("exit 3"), Stdin: r})
	if exit, err := p.Wait(); exit.Code != 3 || err != nil {
		t.Errorf("Wait = %v, %v", exit, err)
	}
}

func TestStartErrors(t *testing.T) {
	dir := t.TempDir()
	plain := filepath.Join(dir, "plain")
	if err := os.WriteFile(plain, []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	path := []string{"PATH=/nowhere:" + dir}
	for _, tt := range []struct {
		name string
		spec Spec
		want error
	}{
		{"empty", Spec{}, provider.ErrInvalid},
		{"missing", Spec{Argv: []string{"/no/such"}}, fs.ErrNotExist},
		{"not in PATH", Spec{Argv: []string{"true"}, Env: path}, fs.ErrNotExist},
		{"not executable", Spec{Argv: []string{plain}}, fs.ErrPermission},
		{"not executable in PATH", Spec{Argv: []string{"plain"}, Env: path}, fs.ErrPermission},
		{"bad dir", Spec{Argv: []string{"/bin/true"}, Dir: "/no/such"}, provider.ErrInvalid},
		{"dir is a file", Spec{Argv: []string{"/bin/true"}, Dir: plain}, provider.ErrInvalid},
		{"NUL", Spec{Argv: []string{"/bin/echo", "a\x00b"}}, provider.ErrInvalid},
		{"NUL in environment", Spec{Argv: []string{"/bin/echo"}, Env: []string{"A=\x00"}}, provider.ErrInvalid},
		{"too long", Spec{Argv: []string{"/bin/echo", strings.Repeat("x", 200<<10)}}, provider.ErrInvalid},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := Start(t.Context(), tt.spec)
			if !errors.Is(err, tt.want) {
				t.Errorf("Start: %v, want %v", err, tt.want)
			}
		})
	}
}

func TestDescriptorsDoNotLeak(t *testing.T) {
	count := func() int {
		ents, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(ents)
	}
	run := func() {
		_, _ = Start(t.Context(), Spec{Argv: []string{"/no/such"}, Stdin: strings.NewReader(""), Stdout: io.Discard})
		p := start(t, Spec{Argv: sh("cat"), Stdin: strings.NewReader("x"), Stdout: io.Discard, Stderr: io.Discard})
		_, _ = p.Wait()
		<-p.inDone
		p = start(t, Spec{Argv: sh("cat"), Terminal: &provider.Terminal{Rows: 2, Cols: 2}})
		_, _ = p.Wait()
	}
	run()
	before := count()
	for range 10 {
		run()
	}
	until(t, "no more descriptors than before", func() bool { return count() <= before })
}

func TestCancelledBeforeStart(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	cause := errors.New("because")
	cancel(cause)
	if _, err := Start(ctx, Spec{Argv: []string{"true"}}); err != cause {
		t.Errorf("Start: %v", err)
	}
}

func TestCancelKillsTheTree(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	cause := errors.New("because")
	r, w := io.Pipe()
	p, err := Start(ctx, Spec{Argv: sh("sleep 1000 & echo $!; wait"), Env: []string{"PATH=" + os.Getenv("PATH")}, Stdout: w})
	if err != nil {
		t.Fatal(err)
	}
	var child int
	if _, err := fmt.Fscan(r, &child); err != nil {
		t.Fatal(err)
	}
	cancel(cause)
	exit, err := p.Wait()
	if err != cause || exit.Code != 137 {
		t.Errorf("Wait = %v, %v", exit, err)
	}
	if alive(child) || alive(p.Pid()) {
		t.Error("a process survived")
	}
}

func TestStrangerHoldsThePipe(t *testing.T) {
	for _, quiet := range []bool{true, false} {
		t.Run(fmt.Sprintf("quiet=%v", quiet), func(t *testing.T) {
			script := "sleep 1000 & echo $!; printf tail"
			if !quiet {
				script = "sh -c 'while :; do echo noise; done' & echo $!; printf tail"
			}
			var out bytes.Buffer
			begin := time.Now()
			p := start(t, Spec{Argv: sh(script), Stdout: &out})
			exit, err := p.Wait()
			if exit.Code != 0 || err != nil {
				t.Fatalf("Wait = %v, %v", exit, err)
			}
			if d := time.Since(begin); d > 2*time.Second {
				t.Errorf("Wait took %v", d)
			}
			text := out.String()
			for strings.HasPrefix(text, "noise\n") { // it may have been faster
				text = text[len("noise\n"):]
			}
			first, _, _ := strings.Cut(text, "\n")
			child, err := strconv.Atoi(first)
			if err != nil {
				t.Fatalf("output %.100q", out.String())
			}
			if !strings.Contains(out.String(), "tail") {
				t.Errorf("what the process wrote last is missing: %.100q", out.String())
			}
			if quiet && !alive(child) {
				t.Error("the background child was killed, without being asked for")
			}
			if err := p.KillTree(); err != nil {
				t.Error(err)
			}
			if alive(child) {
				t.Error("KillTree left the background child")
			}
		})
	}
}

func TestLinger(t *testing.T) {
	var out bytes.Buffer
	p := start(t, Spec{Argv: sh("(sleep 0.1; echo late) & echo early"), Stdout: &out, Linger: 5 * time.Second})
	if _, err := p.Wait(); err != nil || out.String() != "early\nlate\n" {
		t.Errorf("%q, %v", out.String(), err)
	}
}

func TestManyAtOnce(t *testing.T) {
	var wg sync.WaitGroup
	for i := range 200 {
		wg.Go(func() {
			var out bytes.Buffer
			p, err := Start(t.Context(), Spec{Argv: sh(fmt.Sprintf("echo %d; exit %d", i, i)), Env: []string{"PATH=/usr/bin:/bin"}, Stdout: &out})
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
	noZombies(t)
}

func noZombies(t *testing.T) {
	t.Helper()
	until(t, "no zombie", func() bool {
		all, err := snapshot()
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range all {
			if e.ppid == os.Getpid() && e.dead() {
				return false
			}
		}
		return true
	})
}

func TestOrphansAreReaped(t *testing.T) {
	if !reaping() {
		t.Skip("needs the reaper")
	}
	p := start(t, Spec{Argv: sh("for i in 1 2 3 4 5; do (setsid sleep 0.05 &); done")})
	if _, err := p.Wait(); err != nil {
		t.Fatal(err)
	}
	until(t, "no child is left", func() bool {
		_, err := peek(0, 0, syscall.WNOHANG)
		return err == syscall.ECHILD
	})
}

// slow takes its time, which must hold the process back.
type slow struct {
	gate chan struct{}
	n    int
}

func (s *slow) Write(b []byte) (int, error) {
	<-s.gate
	s.n += len(b)
	return len(b), nil
}

func TestSlowWriterHoldsTheProcessBack(t *testing.T) {
	w := &slow{gate: make(chan struct{})}
	p := start(t, Spec{Argv: sh("head -c 1000000 /dev/zero"), Stdout: w})
	select {
	case <-p.ended:
		t.Error("the process ended though nobody took its output")
	case <-time.After(100 * time.Millisecond):
	}
	close(w.gate)
	if exit, err := p.Wait(); exit.Code != 0 || err != nil || w.n != 1000000 {
		t.Errorf("Wait = %v, %v after %d bytes", exit, err, w.n)
	}
}

type failing struct{}

var errFull = errors.New("full")

func (failing) Write([]byte) (int, error) { return 0, errFull }

func TestWriterErrorEndsTheProcess(t *testing.T) {
	p := start(t, Spec{Argv: []string{"yes"}, Stdout: failing{}})
	if exit, err := p.Wait(); !errors.Is(err, errFull) || exit.Signal != int(syscall.SIGPIPE) {
		t.Errorf("Wait = %v, %v", exit, err)
	}
}

func TestTerminal(t *testing.T) {
	var out bytes.Buffer
	p := start(t, Spec{Argv: sh("stty size; tty >/dev/null && echo tty; read x; echo got $x; cat; echo end"),
		Terminal: &provider.Terminal{Rows: 31, Cols: 97}, Stdin: strings.NewReader("hello\n"), Stdout: &out})
	if exit, err := p.Wait(); exit.Code != 0 || err != nil {
		t.Fatalf("Wait = %v, %v\n%s", exit, err, out.String())
	}
	for _, want := range []string{"31 97\r\n", "tty\r\n", "got hello\r\n", "end\r\n"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in %q", want, out.String())
		}
	}
}

func TestTerminalResizeAndStranger(t *testing.T) {
	r, w := io.Pipe()
	out := make(chan string, 1)
	ready := make(chan struct{})
	go func() {
		var b strings.Builder
		buf := make([]byte, 100)
		for {
			n, err := r.Read(buf)
			b.Write(buf[:n])
			if ready != nil && strings.Contains(b.String(), "ready") {
				close(ready)
				ready = nil
			}
			if err != nil {
				out <- b.String()
				return
			}
		}
	}()
	in, inw := io.Pipe()
	wait := ready
	p := start(t, Spec{Argv: sh("trap '' HUP; sleep 1000 & trap 'stty size; exit' WINCH; echo ready; while :; do sleep 0.05; done"),
		Terminal: &provider.Terminal{Rows: 5, Cols: 5}, Stdin: in, Stdout: w})
	<-wait
	if err := p.Resize(provider.Terminal{Rows: 40, Cols: 132}); err != nil {
		t.Fatal(err)
	}
	if exit, err := p.Wait(); exit.Code != 0 || err != nil {
		t.Fatalf("Wait = %v, %v", exit, err)
	}
	w.Close()
	inw.Close()
	if got := <-out; !strings.Contains(got, "40 132") {
		t.Errorf("output %q", got)
	}
	if err := p.KillTree(); err != nil {
		t.Error(err)
	}
}

func TestExtraFiles(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	p := start(t, Spec{Argv: sh("echo three >&3"), ExtraFiles: []*os.File{w}})
	w.Close()
	if _, err := p.Wait(); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(r); string(b) != "three\n" || err != nil {
		t.Errorf("read %q, %v", b, err)
	}
}

func TestCredential(t *testing.T) {
	testenv.Require(t, os.Getuid() == 0, "root, to become another user", "run the tests as root")
	var out bytes.Buffer
	p := start(t, Spec{Argv: sh("id -u; setsid sleep 1000 & wait"), Dir: "/", Credential: &syscall.Credential{Uid: 4242, Gid: 4243}, Stdout: &out})
	until(t, "it says who it is", func() bool {
		all, _ := snapshot()
		for _, e := range all {
			if found, _ := hasEnv(e.pid, MarkName+"="+p.Mark(), -1, -1); found && e.sid == e.pid && e.pid != p.Pid() {
				if _, err := readEnvironAs(e.pid, 4242, 4243); err != nil {
					t.Errorf("its own user may not read its environment: %v", err)
				}
				if _, err := readEnvironAs(e.pid, 4244, 4244); err == nil {
					t.Error("another user may read its environment: the identity was not changed")
				}
				return true
			}
		}
		return false
	})
	if err := p.KillTree(); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Wait(); err != nil || out.String() != "4242\n" {
		t.Errorf("output %q, %v", out.String(), err)
	}
}

func TestParseStat(t *testing.T) {
	e, ok := parseStat(7, []byte("7 (a) b) (c\n) R 1 2 3 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 4 0 12345 1 1"))
	want := entry{pid: 7, state: 'R', ppid: 1, pgrp: 2, sid: 3, threads: 4, start: 12345}
	if !ok || e != want {
		t.Errorf("got %+v, %v", e, ok)
	}
	if _, ok := parseStat(7, []byte("7 (x) R 1")); ok {
		t.Error("a short line was taken")
	}
}

func BenchmarkStartWait(b *testing.B) {
	env := []string{"PATH=/usr/bin:/bin"}
	for b.Loop() {
		var out bytes.Buffer
		p, err := Start(b.Context(), Spec{Argv: []string{"/bin/true"}, Env: env, Stdout: &out, Stderr: io.Discard})
		if err != nil {
			b.Fatal(err)
		}
		if _, err := p.Wait(); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkOSExec(b *testing.B) {
	for b.Loop() {
		cmd := exec.CommandContext(b.Context(), "/bin/true")
		var out bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, io.Discard
		cmd.Stderr = &bytes.Buffer{}
		cmd.Env = []string{"PATH=/usr/bin:/bin"}
		if err := cmd.Run(); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkKill(b *testing.B) {
	for b.Loop() {
		p, err := Start(b.Context(), Spec{Argv: []string{"sleep", "100"}, Env: []string{"PATH=/usr/bin:/bin"}})
		if err != nil {
			b.Fatal(err)
		}
		if err := p.KillTree(); err != nil {
			b.Fatal(err)
		}
		_, _ = p.Wait()
	}
}
