package providertest

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/aisandbox-go/aisandbox/provider"
)

// detachCases are about processes that outlive the host. What a journal's bytes
// mean is the journal's own suite's business.
var detachCases = []testCase{
	{"D1", "launch, end, tail, forget", func(t *testing.T, b *box) {
		r, tok := b.reattacher(), token()
		if p, err := r.Probe(b.ctx, tok); err != nil || p.State != provider.ProbeAbsent {
			t.Errorf("before: %+v, %v", p, err)
		}
		b.launch(r, tok, provider.Cmd{Argv: shell(`cat; echo "$K"; echo err >&2; pwd; exit 7`), Env: []string{"K=value"}, Dir: b.dir(), Stdin: strings.NewReader("from stdin\n")})
		p := b.ends(r, tok)
		if p.Exit == nil || p.Exit.Code != 7 || p.Size == 0 {
			t.Fatalf("%+v", p)
		}
		all := b.tail(r, tok, 0, false)
		if int64(len(all)) != p.Size || !bytes.Contains(all, []byte("value")) {
			t.Errorf("journal of %d bytes, probe says %d: %.200q", len(all), p.Size, all)
		}
		if followed := b.tail(r, tok, 0, true); !bytes.Equal(followed, all) {
			t.Errorf("following an ended journal: %d bytes, want %d", len(followed), len(all))
		}
		for _, from := range []int64{1, p.Size / 2, p.Size} {
			if rest := b.tail(r, tok, from, false); !bytes.Equal(rest, all[from:]) {
				t.Errorf("from %d: %d bytes, want %d", from, len(rest), len(all)-int(from))
			}
		}
		for range 2 {
			if err := r.Forget(b.ctx, tok); err != nil {
				t.Error(err)
			}
		}
		if p, err := r.Probe(b.ctx, tok); err != nil || p.State != provider.ProbeAbsent {
			t.Errorf("after forget: %+v, %v", p, err)
		}
	}},
	{"D2", "once per token", func(t *testing.T, b *box) {
		r, tok, f := b.reattacher(), token(), b.path("ran")
		cmd := provider.Cmd{Argv: shell(`echo ran >>"$1"`, f)}
		results := make(chan error, 8)
		for range cap(results) {
			go func() { results <- r.Launch(b.ctx, tok, cmd, provider.LaunchOptions{RunID: "run"}) }()
		}
		won := 0
		for range cap(results) {
			switch err := <-results; {
			case err == nil:
				won++
			case !errors.Is(err, provider.ErrAlreadyLaunched):
				t.Errorf("launch: %v", err)
			}
		}
		b.ends(r, tok)
		if err := r.Launch(b.ctx, tok, cmd, provider.LaunchOptions{RunID: "run"}); !errors.Is(err, provider.ErrAlreadyLaunched) {
			t.Errorf("after its end: %v", err)
		}
		if got := b.read(f); won != 1 || got != "ran\n" {
			t.Errorf("%d launches succeeded, the command left %q", won, got)
		}
	}},
	{"D3", "follow, and kill of a tree", func(t *testing.T, b *box) {
		r, tok, f := b.reattacher(), token(), b.path("beats")
		b.launch(r, tok, provider.Cmd{Argv: shell(`echo started; (env -i "PATH=$PATH" sh -c "$2" sh "$1" &) ; `+beat, f, beat)})
		b.beats(f)
		if p, err := r.Probe(b.ctx, tok); err != nil || p.State != provider.ProbeRunning || p.Exit != nil {
			t.Errorf("%+v, %v", p, err)
		}
		tail := make(chan []byte, 1)
		go func() { tail <- b.tail(r, tok, 0, true) }()
		begin := time.Now()
		if err := r.Kill(b.ctx, tok, 9); err != nil {
			t.Errorf("kill: %v", err)
		}
		if d := time.Since(begin); d > b.within(3*time.Second) {
			t.Errorf("kill took %v", d)
		}
		b.still(f)
		p := b.ends(r, tok)
		if p.Exit != nil && p.Exit.Code != 137 {
			t.Errorf("%+v", p)
		}
		select {
		case got := <-tail:
			if len(got) == 0 {
				t.Error("nothing was followed")
			}
		case <-b.ctx.Done():
			t.Error("follow does not end")
		}
		if err := r.Kill(b.ctx, tok, 9); err != nil {
			t.Errorf("kill after the end: %v", err)
		}
	}},
	{"D4", "signal", func(t *testing.T, b *box) {
		r, tok, f := b.reattacher(), token(), b.path("ready")
		b.launch(r, tok, provider.Cmd{Argv: shell(`trap 'exit 44' TERM; echo xx >"$1"; while :; do sleep 0.1 || sleep 1; done`, f)})
		b.beats(f)
		if err := r.Kill(b.ctx, tok, 15); err != nil {
			t.Error(err)
		}
		if p := b.ends(r, tok); p.Exit == nil || p.Exit.Code != 44 {
			t.Errorf("%+v", p)
		}
	}},
	{"D5", "the host goes away", func(t *testing.T, b *box) {
		b.reattacher()
		if b.tr.DurableFS {
			b.own()
		} else {
			b.lacks("resuming (Traits.DurableFS)")
		}
		tok, f := token(), b.path("beats")
		b.inSecond("launch", tok+" "+f)
		r := b.reattacher()
		was := b.size(f)
		b.eventually(10*time.Second, "the process goes on", func() bool { return b.size(f) > was })
		if p, err := r.Probe(b.ctx, tok); err != nil || p.State != provider.ProbeRunning {
			t.Errorf("%+v, %v", p, err)
		}
		if err := r.Kill(b.ctx, tok, 9); err != nil {
			t.Error(err)
		}
		b.still(f)
		b.ends(r, tok)
		if all := b.tail(r, tok, 0, true); !bytes.Contains(all, []byte("from the journal")) {
			t.Errorf("journal: %.200q", all)
		}
	}},
	{"D6", "commands that can't run", func(t *testing.T, b *box) {
		r, tok := b.reattacher(), token()
		err := r.Launch(b.ctx, tok, provider.Cmd{Argv: []string{"no-such-program"}}, provider.LaunchOptions{RunID: "run"})
		if err != nil {
			return
		}
		if p := b.ends(r, tok); p.Exit != nil && p.Exit.Code != 127 && p.Exit.Code != 126 {
			t.Errorf("%+v", p)
		}
	}},
}

func (b *box) reattacher() provider.Reattacher {
	b.t.Helper()
	r, ok := provider.As[provider.Reattacher](b.h)
	if !ok {
		b.lacks("detached processes")
	}
	return r
}

func (b *box) launch(r provider.Reattacher, tok string, cmd provider.Cmd) {
	b.t.Helper()
	if err := r.Launch(b.ctx, tok, cmd, provider.LaunchOptions{RunID: "run", Nonce: []byte("nonce")}); err != nil {
		b.t.Fatalf("launch: %v", err)
	}
}

// ends waits until a detached process has ended.
func (b *box) ends(r provider.Reattacher, tok string) provider.Probe {
	b.t.Helper()
	var p provider.Probe
	b.eventually(20*time.Second, "the process ends", func() bool {
		var err error
		if p, err = r.Probe(b.ctx, tok); err != nil {
			b.t.Errorf("probe: %v", err)
			return true
		}
		return p.State == provider.ProbeExited || p.State == provider.ProbeDead
	})
	return p
}

func (b *box) tail(r provider.Reattacher, tok string, from int64, follow bool) []byte {
	b.t.Helper()
	rc, err := r.Tail(b.ctx, tok, from, follow)
	if err != nil {
		b.t.Errorf("tail: %v", err)
		return nil
	}
	all, err := io.ReadAll(rc)
	if err = errors.Join(err, rc.Close()); err != nil {
		b.t.Errorf("tail: %v", err)
	}
	return all
}
