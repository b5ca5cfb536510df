package journal_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/aisandbox-go/aisandbox/journal"
	"github.com/aisandbox-go/aisandbox/journal/frame"
	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/store"
	"github.com/aisandbox-go/aisandbox/store/memstore"
)

// fake is a journal whose bytes a test decides. Each Tail gives the bytes up to
// the next of its cuts; in between the process runs.
type fake struct {
	provider.Reattacher
	content []byte
	cuts    []int // how many bytes there are at each Tail; the last one stays
	silent  bool  // Tail never gives a byte and never ends
	states  []provider.ProbeState
	errs    []error // of each Tail, before anything else
	tails   int
	probes  int
	perr    error
}

func (f *fake) size() int {
	if len(f.cuts) == 0 {
		return len(f.content)
	}
	return f.cuts[min(max(f.tails-1, 0), len(f.cuts)-1)]
}

func (f *fake) Tail(ctx context.Context, _ string, from int64, _ bool) (io.ReadCloser, error) {
	if f.tails++; f.tails <= len(f.errs) && f.errs[f.tails-1] != nil {
		return nil, f.errs[f.tails-1]
	}
	if f.silent {
		return io.NopCloser(hanging{ctx}), nil
	}
	return io.NopCloser(bytes.NewReader(f.content[min(int(from), f.size()):f.size()])), nil
}

type hanging struct{ ctx context.Context }

func (h hanging) Read([]byte) (int, error) {
	<-h.ctx.Done()
	return 0, io.ErrClosedPipe
}

func (f *fake) Probe(context.Context, string) (provider.Probe, error) {
	f.probes++
	if f.perr != nil {
		return provider.Probe{}, f.perr
	}
	p := provider.Probe{State: provider.ProbeRunning, Size: int64(f.size())}
	if len(f.cuts) == 0 || f.tails >= len(f.cuts) {
		p.State = provider.ProbeDead
	}
	if len(f.states) > 0 {
		p.State = f.states[min(f.probes, len(f.states))-1]
	}
	return p, nil
}

const run = "run"

var nonce = []byte("a secret of 32 bytes or so")

// framed is a journal as a supervisor writes it.
func framed(exit bool, lines ...string) []byte {
	b := frame.Append(nil, frame.TypeHeader, []byte(`{"version":1,"runId":"run","level":2}`))
	var tally frame.Tally
	add := func(t frame.Type, p string) {
		b = frame.Append(b, t, []byte(p))
		tally.Add(frame.Frame{Type: t, Payload: []byte(p)})
	}
	for i, l := range lines {
		half := len(l) / 2
		if i%2 == 1 {
			add(frame.TypePartial, l[:half])
			l = l[half:]
		}
		add(frame.TypeLine, l)
		b = frame.Append(b, frame.TypeHeartbeat, frame.Heartbeat(int64(i)))
		b = frame.Append(b, frame.TypeStderr, []byte("err"))
	}
	add(frame.TypePartial, "open")
	if exit {
		b = frame.Append(b, frame.TypeExit, tally.Sign(frame.Exit{}, nonce, run).Encode())
	}
	return b
}

func all(t *testing.T, re provider.Reattacher, o journal.Options) (lines []string, exit bool, err error) {
	t.Helper()
	o.RunID, o.Nonce = run, nonce
	for rec, rerr := range journal.NewReader(re, "token", o).Records(t.Context()) {
		if rerr != nil {
			return lines, exit, rerr
		}
		switch rec.Kind {
		case journal.KindLine, journal.KindPartial:
			lines = append(lines, fmt.Sprintf("%d %s", rec.Off, rec.Data))
		case journal.KindExit:
			exit = true
		}
	}
	return lines, exit, nil
}

// Wherever a read ends, the lines and their places are the same (T3).
func TestEverySplit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		content := framed(true, "ä", "zwei", "", "drei€")
		want, exit, err := all(t, &fake{content: content}, journal.Options{})
		if err != nil || !exit || len(want) != 5 {
			t.Fatalf("%q, %v, %v", want, exit, err)
		}
		for _, poll := range []bool{false, true} {
			for a := range content {
				f := &fake{content: content, cuts: []int{a, min(a+7, len(content)), len(content)}}
				got, exit, err := all(t, f, journal.Options{Poll: poll})
				if d := cmp.Diff(want, got); d != "" || !exit || err != nil {
					t.Fatalf("cut at %d: exit %v, %v\n%s", a, exit, err, d)
				}
			}
		}
	})
}

func TestEverySplitOfTheShellForm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		// The exit's word is found by what a launch would have sent.
		word := launchWord(t)
		content := []byte("{\"__start\":1}\nä\n\nzwei\n{\"__exit\":0}\nopen\n{\"__exit\":3,\"__nonce\":\"" + word + "\",\"__stderr\":\"\"}\n")
		want, exit, err := all(t, &fake{content: content}, journal.Options{})
		if err != nil || !exit || len(want) != 5 {
			t.Fatalf("%q, %v, %v", want, exit, err)
		}
		for a := range content {
			f := &fake{content: content, cuts: []int{a, min(a+3, len(content)), len(content)}}
			got, exit, err := all(t, f, journal.Options{})
			if d := cmp.Diff(want, got); d != "" || !exit || err != nil {
				t.Fatalf("cut at %d: exit %v, %v\n%s", a, exit, err, d)
			}
		}
		for name, line := range map[string]string{ // T2
			"no integer": `{"__exit":"0","__nonce":"` + word + `"}`,
			"a fraction": `{"__exit":1.5,"__nonce":"` + word + `"}`,
			"wrong word": `{"__exit":0,"__nonce":"` + word[1:] + `0"}`,
			"no word":    `{"__exit":0,"x":"` + word + `"}`,
			"nested":     `{"a":{"__exit":0,"__nonce":"` + word + `"}}`,
			"glued":      `x{"__exit":0,"__nonce":"` + word + `"}`,
			"two":        `{"__exit":0,"__nonce":"` + word + `"}{}`,
		} {
			if _, exit, err := all(t, &fake{content: []byte("{\"__start\":1}\n" + line + "\n")}, journal.Options{}); exit || !errors.Is(err, journal.ErrEndedWithoutExit) {
				t.Errorf("%s: exit %v, %v", name, exit, err)
			}
		}
	})
}

// launchWord is the word that a shell is given, seen by a sandbox that starts
// nothing.
func launchWord(t *testing.T) string {
	t.Helper()
	h := &noting{}
	err := journal.Shell(h).Launch(t.Context(), "token", provider.Cmd{Argv: []string{"x"}}, provider.LaunchOptions{RunID: run, Nonce: nonce})
	if err == nil || bytes.Contains(h.stdin, nonce) {
		t.Fatalf("%v; the shell gets %q", err, h.stdin)
	}
	if strings.Contains(fmt.Sprint(h.argv), string(nonce)) {
		t.Fatal("the nonce is in the arguments")
	}
	word, _, _ := strings.Cut(string(h.stdin), " ")
	if strings.Contains(fmt.Sprint(h.argv), word) {
		t.Fatal("the word is in the arguments")
	}
	return word
}

type noting struct {
	provider.Handle
	argv  []string
	stdin []byte
}

func (n *noting) Start(_ context.Context, cmd provider.Cmd) (provider.Process, error) {
	n.argv = cmd.Argv
	n.stdin, _ = io.ReadAll(cmd.Stdin)
	return nil, errors.New("nothing starts here")
}

func TestBadJournals(t *testing.T) {
	good := framed(true, "one", "two")
	flip := func(at int) []byte {
		b := bytes.Clone(good)
		b[at] ^= 1
		return b
	}
	exit := len(good) - 9 - 56
	other := framed(false, "one", "TWO")
	forged := append(bytes.Clone(other), good[exit:]...)
	dropped := append(bytes.Clone(framed(false, "one")), good[exit:]...)
	for name, tt := range map[string]struct {
		content []byte
		want    error
	}{
		"no exit":           {framed(false, "one", "two"), journal.ErrEndedWithoutExit},
		"torn tail":         {good[:len(good)-1], journal.ErrEndedWithoutExit},
		"damage inside":     {flip(60), journal.ErrTornFrame},
		"another line":      {forged, journal.ErrTampered},
		"a line less":       {dropped, journal.ErrTampered},
		"another run":       {append(frame.Append(nil, frame.TypeHeader, []byte(`{"runId":"x"}`)), good...), journal.ErrTampered},
		"a bad exit":        {frame.Append(framed(false, "one"), frame.TypeExit, []byte("short")), journal.ErrTampered},
		"an unsigned exit":  {frame.Append(framed(false, "one"), frame.TypeExit, frame.Exit{}.Encode()), journal.ErrTampered},
		"neither of either": {[]byte("hello\n"), journal.ErrEndedWithoutExit},
		"empty":             {nil, journal.ErrEndedWithoutExit},
	} {
		synctest.Test(t, func(t *testing.T) {
			_, ok, err := all(t, &fake{content: tt.content}, journal.Options{})
			if ok || !errors.Is(err, tt.want) {
				t.Errorf("%s: exit %v, error %v, want %v", name, ok, err, tt.want)
			}
			var c interface{ Code() string }
			if !errors.As(err, &c) || c.Code() == "" {
				t.Errorf("%s: no code", name)
			}
		})
	}
	synctest.Test(t, func(t *testing.T) { // it shrinks between two reads
		f := &fake{content: framed(false, "one", "two"), cuts: []int{150, 40, 40, 40}, states: []provider.ProbeState{provider.ProbeRunning}}
		if _, _, err := all(t, f, journal.Options{}); !errors.Is(err, journal.ErrTampered) {
			t.Errorf("shrunk: %v", err)
		}
	})
}

func TestOutages(t *testing.T) {
	down := fmt.Errorf("connect: %w", provider.ErrUnavailable)
	content := framed(true, "one")
	t.Run("for a while", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			f := &fake{content: content, errs: []error{down, errors.New("who knows"), down}}
			if _, exit, err := all(t, f, journal.Options{}); !exit || err != nil {
				t.Errorf("%v %v", exit, err)
			}
		})
	})
	t.Run("for good", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			f := &fake{errs: make([]error, 10000)}
			for i := range f.errs {
				f.errs[i] = down
			}
			began := time.Now()
			_, _, err := all(t, f, journal.Options{})
			if !errors.Is(err, provider.ErrUnavailable) || journal.Definite(err) || time.Since(began) < 10*time.Minute || time.Since(began) > 11*time.Minute {
				t.Errorf("%v after %v", err, time.Since(began))
			}
		})
	})
	t.Run("the sandbox is gone", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			f := &fake{errs: []error{fmt.Errorf("x: %w", provider.ErrNotFound)}}
			if _, _, err := all(t, f, journal.Options{}); !errors.Is(err, provider.ErrNotFound) || !journal.Definite(err) {
				t.Error(err)
			}
		})
	})
	t.Run("it appears late", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			f := &fake{content: content, errs: []error{fs.ErrNotExist, fs.ErrNotExist}, states: []provider.ProbeState{provider.ProbeStarting}}
			if _, exit, err := all(t, f, journal.Options{}); !exit || err != nil {
				t.Errorf("%v %v", exit, err)
			}
		})
	})
}

// Only the first byte is waited for with a bound (T5).
func TestStalled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		_, _, err := all(t, &fake{silent: true}, journal.Options{})
		var a *journal.AttachError
		if !errors.As(err, &a) || a.Reason != journal.AttachStalled || time.Since(began) != journal.AttachWait {
			t.Errorf("%v after %v", err, time.Since(began))
		}
	})
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithTimeoutCause(t.Context(), time.Second, errors.New("enough"))
		defer stop()
		for _, err := range journal.NewReader(&fake{silent: true}, "token", journal.Options{RunID: run}).Records(ctx) {
			if err == nil || err.Error() != "enough" {
				t.Errorf("%v", err)
			}
		}
	})
}

func TestPreflight(t *testing.T) {
	fresh := func(t *testing.T) store.Set { t.Helper(); return memstore.New(memstore.Options{}) }
	with := func(t *testing.T, end bool) store.Runs {
		t.Helper()
		s := fresh(t)
		if _, _, err := s.Runs.Create(t.Context(), store.NewRun{ID: run, Thread: store.Thread{ID: "t"}}); err != nil {
			t.Fatal(err)
		}
		if end {
			c, err := s.Runs.Claim(t.Context(), run, store.ClaimOptions{Owner: "o"})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := s.Log.Finish(t.Context(), c, store.Final{Status: store.Aborted}); err != nil {
				t.Fatal(err)
			}
		}
		return s.Runs
	}
	for name, tt := range map[string]struct {
		runs   func(t *testing.T) store.Runs
		states []provider.ProbeState
		perr   error
		want   journal.AttachReason
		probes int
		took   time.Duration
	}{
		"there":            {nil, []provider.ProbeState{provider.ProbeRunning}, nil, "", 1, 0},
		"unknown":          {func(t *testing.T) store.Runs { return fresh(t).Runs }, []provider.ProbeState{provider.ProbeAbsent}, nil, journal.AttachUnknown, 1, 0},
		"terminal":         {func(t *testing.T) store.Runs { return with(t, true) }, []provider.ProbeState{provider.ProbeAbsent}, nil, journal.AttachTerminal, 1, 0},
		"running, comes":   {func(t *testing.T) store.Runs { return with(t, false) }, []provider.ProbeState{provider.ProbeAbsent, provider.ProbeAbsent, provider.ProbeExited}, nil, "", 3, 200 * time.Millisecond},
		"running, never":   {func(t *testing.T) store.Runs { return with(t, false) }, []provider.ProbeState{provider.ProbeAbsent}, nil, journal.AttachTimeout, 101, 10 * time.Second},
		"unusable, no run": {func(t *testing.T) store.Runs { return fresh(t).Runs }, nil, errors.New("x"), journal.AttachUnknown, 1, 0},
		"unusable":         {nil, nil, errors.New("x"), journal.AttachTimeout, 101, 10 * time.Second},
	} {
		synctest.Test(t, func(t *testing.T) {
			f := &fake{states: tt.states, perr: tt.perr}
			var runs store.Runs
			if tt.runs != nil {
				runs = tt.runs(t)
			}
			began := time.Now()
			_, err := journal.Preflight(t.Context(), f, "token", run, runs, 0)
			var a *journal.AttachError
			errors.As(err, &a)
			if tt.want == "" && err != nil || tt.want != "" && (a == nil || a.Reason != tt.want) {
				t.Errorf("%s: %v", name, err)
			}
			if f.probes != tt.probes || time.Since(began) != tt.took {
				t.Errorf("%s: %d probes in %v", name, f.probes, time.Since(began))
			}
		})
	}
}

func FuzzReader(f *testing.F) {
	f.Add(framed(true, "one", "two"))
	f.Add(framed(false, "x"))
	f.Add([]byte("{\"__start\":1}\nx\n{\"__exit\":0,\"__nonce\":\"\"}\n"))
	f.Fuzz(func(t *testing.T, content []byte) {
		synctest.Test(t, func(t *testing.T) {
			_, exit, err := all(t, &fake{content: content}, journal.Options{MaxLine: 1 << 16})
			if exit == (err != nil) {
				t.Errorf("exit %v and error %v", exit, err)
			}
		})
	})
}
