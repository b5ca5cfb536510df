package providertest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/aisandbox-go/aisandbox/provider"
)

var execCases = []testCase{
	{"E1", "echo", func(t *testing.T, b *box) {
		if r := b.sh("echo hi"); r.out != "hi\n" || r.err != "" || r.exit != (provider.Exit{}) {
			t.Errorf("got %+v", r)
		}
	}},
	{"E2", "exit code", func(t *testing.T, b *box) {
		for _, code := range []int{7, 1, 126, 255} {
			if r := b.sh(fmt.Sprintf("exit %d", code)); r.exit != (provider.Exit{Code: code}) {
				t.Errorf("exit %d is reported as %+v", code, r.exit)
			}
		}
	}},
	{"E3", "stdout and stderr apart", func(t *testing.T, b *box) {
		if r := b.sh("printf a; printf b >&2"); r.out != "a" || r.err != "b" {
			t.Errorf("stdout %q, stderr %q", r.out, r.err)
		}
	}},
	{"E4", "no stdin is an empty one", func(t *testing.T, b *box) {
		if r := b.sh("cat; echo done"); r.out != "done\n" || r.took > b.within(5*time.Second) {
			t.Errorf("%q after %v", r.out, r.took)
		}
	}},
	{"E5", "1 MiB of output", func(t *testing.T, b *box) {
		w := pattern{}
		if r, err := b.exec(provider.Cmd{Argv: shell(patternScript, "1048576"), Stdout: &w}); err != nil || r.exit.Code != 0 {
			t.Errorf("%v, %v", r.exit, err)
		}
		if w.n != 1<<20 || w.bad >= 0 {
			t.Errorf("%d bytes, first wrong one at %d", w.n, w.bad)
		}
	}},
	{"E6", "working directory", func(t *testing.T, b *box) {
		d := b.path("sub dir")
		b.must(`mkdir "$1"`, d)
		for _, dir := range []string{"", d} {
			want := dir
			if want == "" {
				want = b.h.Root()
			}
			r, err := b.exec(provider.Cmd{Argv: []string{"pwd"}, Dir: dir})
			if err != nil || r.out != want+"\n" {
				t.Errorf("in %q: %q, %v; want %q", dir, r.out, err, want)
			}
		}
	}},
	{"E7", "missing working directory", func(t *testing.T, b *box) {
		startFails(t, b, provider.Cmd{Argv: []string{"true"}, Dir: b.path("none")})
	}},
	{"E8", "environment", func(t *testing.T, b *box) {
		val := "a'b\"c$d\\n\n\tü "
		r, err := b.exec(provider.Cmd{
			Argv: shell(`printf %s "$K|$L|${PATH:+path}|$EMPTY"`),
			Env:  []string{"K=overridden", "K=" + val, "L=with=equals", "EMPTY="},
		})
		if want := val + "|with=equals|path|"; err != nil || r.out != want {
			t.Errorf("%q, %v; want %q", r.out, err, want)
		}
	}},
	{"E9", "context that has ended", func(t *testing.T, b *box) {
		f := b.path("made")
		cause := errors.New("no more")
		ctx, cancel := context.WithCancelCause(b.ctx)
		cancel(cause)
		if p, err := b.h.Start(ctx, provider.Cmd{Argv: shell(`: >"$1"`, f)}); err == nil {
			_, err = p.Wait()
			t.Errorf("started; wait: %v", err)
		} else if !errors.Is(err, cause) && !errors.Is(err, context.Canceled) {
			t.Errorf("error is %v", err)
		}
		if b.size(f) >= 0 {
			t.Error("the command ran")
		}
	}},
	{"E10", "cancel while running", func(t *testing.T, b *box) {
		cause := errors.New("told to stop")
		ctx, cancel := context.WithCancelCause(b.ctx)
		ready := &firstWrite{c: make(chan struct{})}
		p := b.start(ctx, provider.Cmd{Argv: shell("echo ready; exec sleep 100"), Stdout: ready})
		b.wait(ready.c, "output")
		begin := time.Now()
		cancel(cause)
		_, err := p.Wait()
		if d := time.Since(begin); !errors.Is(err, cause) || d > b.within(5*time.Second) {
			t.Errorf("%v after %v", err, d)
		}
		if _, again := p.Wait(); again != err {
			t.Errorf("second Wait: %v, first: %v", again, err)
		}
	}},
	{"E11", "ended by a signal", func(t *testing.T, b *box) {
		if r := b.sh("kill -9 $$"); r.exit.Code != 137 || r.exit.Signal != 9 && r.exit.Signal != 0 {
			t.Errorf("got %+v", r.exit)
		}
		if r := b.sh("kill -TERM $$"); r.exit.Code != 143 || r.exit.Signal != 15 && r.exit.Signal != 0 {
			t.Errorf("got %+v", r.exit)
		}
	}},
	{"E12", "unknown command", func(t *testing.T, b *box) {
		if r := b.sh("no-such-program-here"); r.exit.Code != 127 {
			t.Errorf("in a shell: %v", r.exit)
		}
		f := b.path("plain")
		b.must(`echo text >"$1"`, f)
		for _, argv := range [][]string{{"no-such-program-here"}, {"/no/such/program"}, {f}, {b.dir()}, {}, {""}} {
			startFails(t, b, provider.Cmd{Argv: argv})
		}
		if r := b.sh("echo still here"); r.out != "still here\n" {
			t.Errorf("afterwards: %+v", r)
		}
	}},
	{"E13", "characters cut anywhere", func(t *testing.T, b *box) {
		r := b.sh(`p() { printf "$1"; sleep 0.02 2>/dev/null || :; }
p '\342'; p '\202'; p '\254'; p '\360\237'; p '\230\200'; p '\303'; printf '\274' >&2`)
		if r.out != "€😀\xc3" || r.err != "\xbc" {
			t.Errorf("stdout %q, stderr %q", r.out, r.err)
		}
	}},
	{"E14", "bytes that are no text", func(t *testing.T, b *box) {
		in := make([]byte, 256<<10)
		for i := range in {
			in[i] = byte(rand.Uint32())
		}
		copy(in, "\x00\xff\xfe\x80\r\n\r\n\x04\x1a\x1b\x11\x13")
		r, err := b.exec(provider.Cmd{Argv: []string{"cat"}, Stdin: bytes.NewReader(in)})
		if err != nil || r.out != string(in) {
			t.Errorf("%d bytes came back as %d: %v", len(in), len(r.out), err)
		}
	}},
	{"E15", "long command", func(t *testing.T, b *box) {
		long := strings.Repeat("x", 200<<10)
		r, err := b.exec(provider.Cmd{Argv: shell(`printf %s "$1"`, long)})
		if err == nil && r.exit.Code == 0 && r.out != long {
			t.Errorf("the argument was changed: %d bytes", len(r.out))
		}
		r, err = b.exec(provider.Cmd{Argv: []string{"sh"}, Stdin: strings.NewReader("v='" + long + "'; echo ${#v}")})
		if want := fmt.Sprintf("%d\n", len(long)); err != nil || r.out != want {
			t.Errorf("as a script on stdin: %q, %v", r.out, err)
		}
	}},
	{"E17", "arguments are bytes", func(t *testing.T, b *box) {
		args := []string{"", " ", "a b", "'", `"`, `\`, "$HOME", "`id`", "*", "-n", "a\nb", "\n", "\t", "ü", "😀"}
		r, err := b.exec(provider.Cmd{Argv: shell(`for a do printf '%s|' "$a"; done`, args...)})
		if want := strings.Join(args, "|") + "|"; err != nil || r.out != want {
			t.Errorf("%q, %v; want %q", r.out, err, want)
		}
		if _, err := b.exec(provider.Cmd{Argv: []string{"echo", "a\x00b"}}); err == nil {
			t.Error("a NUL in an argument went through")
		}
	}},
	{"E18", "large stdin, both ways at once", func(t *testing.T, b *box) {
		in := bytes.Repeat([]byte("0123456789abcdef"), 10<<20/16)
		var out sum
		r, err := b.exec(provider.Cmd{Argv: []string{"cat"}, Stdin: io.MultiReader(bytes.NewReader(in)), Stdout: &out})
		var want sum
		want.Write(in)
		if err != nil || r.exit.Code != 0 || !out.equal(&want) {
			t.Errorf("%d of %d bytes: %v, %v", out.n, want.n, r.exit, err)
		}
	}},
	{"E19", "stdin that nobody reads", func(t *testing.T, b *box) {
		r, err := b.exec(provider.Cmd{Argv: shell("exit 3"), Stdin: bytes.NewReader(make([]byte, 4<<20))})
		if err != nil || r.exit.Code != 3 {
			t.Errorf("%v, %v", r.exit, err)
		}
		pr, pw := io.Pipe()
		defer pw.Close()
		r, err = b.exec(provider.Cmd{Argv: shell("echo out; exit 4"), Stdin: pr})
		if err != nil || r.exit.Code != 4 || r.out != "out\n" {
			t.Errorf("with a reader that blocks: %+v, %v", r, err)
		}
	}},
	{"E20", "a stranger holds the pipe", func(t *testing.T, b *box) {
		// head writes more than a pipe holds, so the end must be drained, not cut.
		w := pattern{}
		r, err := b.exec(provider.Cmd{Argv: shell(`sleep 30 & `+patternScript, "200000"), Stdout: &w})
		if err != nil || r.exit.Code != 0 || w.n != 200000 || w.bad >= 0 {
			t.Errorf("%v, %v, %d bytes, wrong at %d", r.exit, err, w.n, w.bad)
		}
		if r.took > b.within(5*time.Second) {
			t.Errorf("took %v", r.took)
		}
	}},
	{"E21", "slow reader holds the process back", func(t *testing.T, b *box) {
		done := b.path("done")
		pr, pw := io.Pipe()
		p := b.start(b.ctx, provider.Cmd{Argv: shell(patternScript+`; : >"$2"`, "33554432", done), Stdout: pw})
		got := make(chan pattern)
		go func() {
			var w pattern
			io.CopyN(&w, pr, 1)
			if poll(b.ctx, 300*time.Millisecond, func() bool { return b.size(done) >= 0 }) {
				t.Error("32 MiB went somewhere while one byte was read")
			}
			io.Copy(&w, pr)
			got <- w
		}()
		e, err := p.Wait()
		pw.Close()
		if w := <-got; err != nil || e.Code != 0 || w.n != 32<<20 || w.bad >= 0 {
			t.Errorf("%v, %v, %d bytes, wrong at %d", e, err, w.n, w.bad)
		}
	}},
	{"E22", "discarded output", func(t *testing.T, b *box) {
		p := b.start(b.ctx, provider.Cmd{Argv: shell("echo out; echo err >&2; " + patternScript + "; exit 5")})
		if e, err := p.Wait(); err != nil || e.Code != 5 {
			t.Errorf("%v, %v", e, err)
		}
	}},
	{"V1", "later environment wins", func(t *testing.T, b *box) {
		r, err := b.exec(provider.Cmd{Argv: shell(`printf %s "$HOME"`), Env: []string{"HOME=/elsewhere"}})
		if err != nil || r.out != "/elsewhere" {
			t.Errorf("%q, %v", r.out, err)
		}
		if r := b.sh(`printf %s "$HOME"`); r.out == "/elsewhere" {
			t.Error("the environment of one command stays for the next")
		}
	}},
	{"V4", "a secret stays in the environment", secretStays},
}

// startFails runs what can't run: an error of Start, or exit 126 or 127.
func startFails(t *testing.T, b *box, cmd provider.Cmd) {
	t.Helper()
	r, err := b.exec(cmd)
	if err == nil && r.exit.Code != 126 && r.exit.Code != 127 {
		t.Errorf("%q in %q ended with %v", cmd.Argv, cmd.Dir, r.exit)
	}
	if err != nil && b.ctx.Err() != nil {
		t.Errorf("%q in %q hangs: %v", cmd.Argv, cmd.Dir, err)
	}
}

// patternScript prints the first $1 bytes of an endless pattern.
const patternScript = `yes 0123456789abcdef | head -c "${1:-100000}"`

// pattern checks what patternScript prints, at the price of a comparison.
type pattern struct {
	n   int64
	bad int64 // offset of the first wrong byte; -1 while all is right

	seen  bool
	check func()
}

const period = "0123456789abcdef\n"

var patternText = []byte(strings.Repeat(period, 8<<10))

func (w *pattern) Write(p []byte) (int, error) {
	if !w.seen {
		w.seen, w.bad = true, -1
	}
	if w.check != nil {
		w.check()
	}
	total := len(p)
	for len(p) > 0 {
		off := int(w.n % int64(len(period)))
		want := patternText[off:]
		n := min(len(p), len(want))
		if w.bad < 0 && !bytes.Equal(p[:n], want[:n]) {
			w.bad = w.n
		}
		w.n += int64(n)
		p = p[n:]
	}
	return total, nil
}

// firstWrite closes a channel at the first write.
type firstWrite struct {
	once sync.Once
	c    chan struct{}
}

func (w *firstWrite) Write(p []byte) (int, error) {
	w.once.Do(func() { close(w.c) })
	return len(p), nil
}

// wait waits for a channel, no longer than the case may take.
func (b *box) wait(c <-chan struct{}, what string) {
	b.t.Helper()
	select {
	case <-c:
	case <-b.ctx.Done():
		b.t.Fatalf("no %s: %v", what, context.Cause(b.ctx))
	}
}
