package providertest

import (
	"bufio"
	"context"
	"errors"
	"io"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/aisandbox-go/aisandbox/provider"
)

var spawnCases = []testCase{
	{"S1", "output comes while the process runs", func(t *testing.T, b *box) {
		gate := b.path("gate")
		pr, pw := io.Pipe()
		p := b.start(b.ctx, provider.Cmd{
			Argv: shell(`echo one; while [ ! -e "$1" ]; do sleep 0.1 || sleep 1; done; echo two`, gate), Stdout: pw,
		})
		r := bufio.NewReader(pr)
		one, _ := r.ReadString('\n')
		b.must(`: >"$1"`, gate) // only now can the second line be written
		two, _ := r.ReadString('\n')
		if e, err := p.Wait(); one != "one\n" || two != "two\n" || err != nil || e.Code != 0 {
			t.Errorf("%q, %q, %v, %v", one, two, e, err)
		}
	}},
	{"S2", "waiting again", func(t *testing.T, b *box) {
		p := b.start(b.ctx, provider.Cmd{Argv: shell("exit 6")})
		type answer struct {
			e   provider.Exit
			err error
		}
		c := make(chan answer, 8)
		for range cap(c) {
			go func() {
				e, err := p.Wait()
				c <- answer{e, err}
			}()
		}
		for range cap(c) {
			if a := <-c; a.e.Code != 6 || a.err != nil {
				t.Errorf("%v, %v", a.e, a.err)
			}
		}
		if e, err := p.Wait(); e.Code != 6 || err != nil {
			t.Errorf("after the end: %v, %v", e, err)
		}
	}},
	{"S3", "live stdin", liveStdin},
	{"S5", "kill: background child", killCase(false, `(`+beat+`) & wait`)},
	{"S6", "kill: child in its own session", killCase(true, `setsid sh -c "$2" sh "$1" & wait`)},
	{"S15", "kill: double fork, setsid, nohup", killCase(true,
		`(setsid nohup sh -c "$2" sh "$1" </dev/null >/dev/null 2>&1 &); sleep 1000`)},
	{"S16", "kill: double fork that holds the pipe", killCase(true,
		`(setsid nohup sh -c "$2" sh "$1" &); sleep 1000`)},
	{"S17", "kill: double fork with an empty environment", killCase(true,
		`(env -i "PATH=$PATH" setsid nohup sh -c "$2" sh "$1" </dev/null >/dev/null 2>&1 &); sleep 1000`)},
	{"S18", "kill: parent gone first", killCase(true,
		`(env -i "PATH=$PATH" setsid sh -c 'setsid sh -c "$2" sh "$1" & exit' sh "$1" "$2" &); sleep 1000`)},
	{"S9", "kill: ignores every other signal", killCase(false, `trap "" TERM HUP INT QUIT; `+beat)},
	{"S7", "signal after the end", func(t *testing.T, b *box) {
		p := b.start(b.ctx, provider.Cmd{Argv: []string{"true"}})
		if _, err := p.Wait(); err != nil {
			t.Fatal(err)
		}
		begin := time.Now()
		for _, sig := range []os.Signal{os.Kill, syscall.SIGTERM, os.Interrupt, os.Kill} {
			if err := p.Signal(sig); err != nil {
				t.Errorf("%v: %v", sig, err)
			}
		}
		if d := time.Since(begin); d > b.within(time.Second) {
			t.Errorf("took %v", d)
		}
	}},
	{"S8", "kill before the first statement", func(t *testing.T, b *box) {
		f := b.path("beats")
		for range 5 {
			p := b.start(b.ctx, provider.Cmd{Argv: shell(beat, f)})
			if err := p.Signal(os.Kill); err != nil {
				t.Error(err)
			}
			if _, err := p.Wait(); err != nil {
				t.Error(err)
			}
		}
		b.still(f)
	}},
	{"S10", "cancel ends the tree", func(t *testing.T, b *box) {
		f := b.path("beats")
		cause := errors.New("changed my mind")
		ctx, cancel := context.WithCancelCause(b.ctx)
		p := b.start(ctx, provider.Cmd{Argv: shell(`(`+beat+`) & (`+beat+`) & wait`, f)})
		b.beats(f)
		cancel(cause)
		if _, err := p.Wait(); !errors.Is(err, cause) {
			t.Errorf("wait: %v", err)
		}
		b.still(f)
	}},
	{"S19", "signals reach the process", func(t *testing.T, b *box) {
		for _, c := range []struct {
			sig  os.Signal
			name string
		}{{syscall.SIGTERM, "TERM"}, {os.Interrupt, "INT"}, {syscall.SIGHUP, "HUP"}, {syscall.SIGUSR1, "USR1"}} {
			ready := &firstWrite{c: make(chan struct{})}
			p := b.start(b.ctx, provider.Cmd{
				Argv:   shell(`trap 'exit 40' ` + c.name + `; echo ready; while :; do sleep 0.1 || sleep 1; done`),
				Stdout: ready,
			})
			b.wait(ready.c, "output")
			if err := p.Signal(c.sig); err != nil {
				t.Errorf("%v: %v", c.sig, err)
			}
			if e, err := p.Wait(); err != nil || e.Code != 40 {
				t.Errorf("%v: %v, %v", c.sig, e, err)
			}
		}
	}},
	{"S20", "signals reach the group", func(t *testing.T, b *box) {
		f := b.path("beats")
		p := b.start(b.ctx, provider.Cmd{Argv: shell(`(trap - TERM; `+beat+`) & wait; wait`, f)})
		b.beats(f)
		if err := p.Signal(syscall.SIGTERM); err != nil {
			t.Error(err)
		}
		if e, err := p.Wait(); err != nil || e.Code != 143 {
			t.Errorf("%v, %v", e, err)
		}
		b.still(f)
	}},
	{"S13", "two streams, one read late", func(t *testing.T, b *box) {
		var out, errs pattern
		gate := make(chan struct{})
		slow := writerFunc(func(p []byte) (int, error) {
			b.wait(gate, "gate")
			return errs.Write(p)
		})
		fast := writerFunc(func(p []byte) (int, error) {
			n, err := out.Write(p)
			if out.n == 10<<20 {
				close(gate) // stderr moves only now; stdout must not have waited for it
			}
			return n, err
		})
		r, err := b.exec(provider.Cmd{
			Argv:   shell(`(`+patternScript+`) >&2 & `+patternScript+`; wait`, "10485760"),
			Stdout: fast, Stderr: slow,
		})
		if err != nil || r.exit.Code != 0 || out.n != 10<<20 || errs.n != 10<<20 || out.bad >= 0 || errs.bad >= 0 {
			t.Errorf("%v, %v, stdout %d, stderr %d bytes", r.exit, err, out.n, errs.n)
		}
	}},
	{"S11", "nothing is left behind in the file system", func(t *testing.T, b *box) {
		// Files that the cases running beside this one make are theirs; only names
		// that this backend or its guest would choose count.
		before := b.must(leftovers)
		for range 5 {
			p := b.start(b.ctx, provider.Cmd{Argv: shell("sleep 0.01 || :")})
			p.Signal(os.Kill)
			p.Wait()
		}
		if after := b.must(leftovers); strings.Count(after, "\n") > strings.Count(before, "\n") {
			t.Errorf("before:\n%s\nafter:\n%s", before, after)
		}
	}},
}

const leftovers = `ls -a /tmp 2>/dev/null | grep -E 'pid$|^\.?(tanstack|aisbx-(exec|spawn))' || :`

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// beat appends to the file $1 as long as it lives.
const beat = `while :; do printf . >>"$1"; sleep 0.1 2>/dev/null || sleep 1; done`

// beats waits until the process behind a file shows that it runs.
func (b *box) beats(f string) {
	b.t.Helper()
	if !poll(b.ctx, b.within(20*time.Second), func() bool { return b.size(f) >= 2 }) {
		b.t.Fatal("the process does not run")
	}
}

// still makes sure that nobody writes to the file any more: a second and a half
// is more than one beat even where sleep knows whole seconds only.
func (b *box) still(f string) {
	b.t.Helper()
	was := b.size(f)
	if poll(b.ctx, 1500*time.Millisecond, func() bool { return b.size(f) != was }) {
		b.t.Errorf("a process survived: %d, then %d beats", was, b.size(f))
	}
}

// killCase kills a tree and looks for survivors. hard trees hide from a kill of
// the process group, so they count only where the trait is claimed.
func killCase(hard bool, script string) func(*testing.T, *box) {
	return func(t *testing.T, b *box) {
		if hard && !b.tr.Kill {
			b.lacks("a kill of the whole tree (Traits.Kill)")
		}
		if strings.Contains(script, "setsid") && !b.has("setsid") {
			b.skip("the sandbox has no setsid")
		}
		f := b.path("beats")
		p := b.start(b.ctx, provider.Cmd{Argv: shell(script, f, beat), Stdout: io.Discard, Stderr: io.Discard})
		b.beats(f)
		begin := time.Now()
		if err := p.Signal(os.Kill); err != nil {
			t.Errorf("kill: %v", err)
		}
		e, err := p.Wait()
		if err != nil || e.Code != 137 {
			t.Errorf("wait: %v, %v", e, err)
		}
		if d := time.Since(begin); d > b.within(2*time.Second) {
			t.Errorf("kill took %v", d)
		}
		b.still(f)
	}
}

func liveStdin(t *testing.T, b *box) {
	if !b.tr.LiveStdin {
		b.lacks("live stdin (Traits.LiveStdin)")
	}
	in, inw := io.Pipe()
	outr, out := io.Pipe()
	p := b.start(b.ctx, provider.Cmd{Argv: []string{"cat"}, Stdin: in, Stdout: out})
	r := bufio.NewReader(outr)
	for _, line := range []string{"first\n", "second\n", "\x00\xff\n"} {
		if _, err := io.WriteString(inw, line); err != nil {
			t.Fatal(err)
		}
		if got, err := r.ReadString('\n'); got != line {
			t.Fatalf("wrote %q, read %q, %v", line, got, err)
		}
	}
	inw.Close()
	if e, err := p.Wait(); err != nil || e.Code != 0 {
		t.Errorf("after the end of input: %v, %v", e, err)
	}
}

var terminalCases = []testCase{
	{"Y1", "terminal", func(t *testing.T, b *box) {
		r := b.terminal(provider.Cmd{Argv: shell(`test -t 0 && test -t 1 && test -t 2 && echo tty; stty size; echo e >&2; exit 3`)})
		if r.out != "tty\r\n33 99\r\ne\r\n" || r.err != "" || r.exit.Code != 3 {
			t.Errorf("%+v", r)
		}
		if r := b.sh("test -t 0 || test -t 1 || test -t 2 || echo none"); r.out != "none\n" {
			t.Errorf("without asking: %q", r.out)
		}
	}},
	{"Y2", "terminal input and resize", func(t *testing.T, b *box) {
		b.terminal(provider.Cmd{Argv: []string{"true"}})
		if !b.tr.LiveStdin {
			b.lacks("live stdin (Traits.LiveStdin)")
		}
		in, inw := io.Pipe()
		outr, out := io.Pipe()
		p := b.start(b.ctx, provider.Cmd{
			Argv:  shell(`stty -echo; echo ready; read l; stty size; echo "got $l"; exec sleep 1000`),
			Stdin: in, Stdout: out, Terminal: &provider.Terminal{Rows: 24, Cols: 80},
		})
		lines := bufio.NewReader(outr)
		expect := func(want string) {
			t.Helper()
			if got, err := lines.ReadString('\n'); strings.TrimRight(got, "\r\n") != want {
				t.Fatalf("read %q, %v; want %q", got, err, want)
			}
		}
		expect("ready")
		size := "24 80"
		if rs, ok := provider.As[provider.Resizer](p); ok {
			if err := rs.Resize(provider.Terminal{Rows: 50, Cols: 132}); err != nil {
				t.Error(err)
			}
			size = "50 132"
		}
		io.WriteString(inw, "some text\n")
		expect(size)
		expect("got some text")
		io.WriteString(inw, "\x03") // the terminal turns it into SIGINT
		e, err := p.Wait()
		if err != nil || e.Code != 130 {
			t.Errorf("after ^C: %v, %v", e, err)
		}
		inw.Close()
	}},
}

// terminal runs a command with a terminal, or skips.
func (b *box) terminal(cmd provider.Cmd) result {
	b.t.Helper()
	cmd.Terminal = &provider.Terminal{Rows: 33, Cols: 99}
	r, err := b.exec(cmd)
	if errors.Is(err, errors.ErrUnsupported) {
		b.lacks("a terminal: " + err.Error())
	}
	if err != nil {
		b.t.Fatal(err)
	}
	return r
}
