// Package journaltest is the suite that every form of a journal passes: that of
// the guest's supervisor and that of the shell, on whatever backend.
package journaltest

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
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/aisandbox-go/aisandbox/journal"
	"github.com/aisandbox-go/aisandbox/journal/frame"
	"github.com/aisandbox-go/aisandbox/provider"
)

// Options say what is tested.
type Options struct {
	// Open returns the process keeper of a fresh sandbox, and a shell pattern, inside
	// of the sandbox, of the journal's file of a token, for agents that tamper with
	// it. The pattern is nil where the agent can't reach it; the cases about that are
	// left out then. Required.
	Open func(t *testing.T) (re provider.Reattacher, journal func(token string) string)
}

// Run runs the suite.
func Run(t *testing.T, o Options) {
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			e := &env{T: t, run: "run " + rand.Text(), nonce: []byte(rand.Text())}
			e.re, e.journal = o.Open(t)
			if c.tampers && e.journal == nil {
				t.Skip("the agent can't reach its journal here")
			}
			var err error
			if e.token, err = frame.Token(e.run); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(e.clean)
			c.f(e)
		})
	}
}

type env struct {
	*testing.T
	re      provider.Reattacher
	journal func(token string) string
	run     string
	token   string
	nonce   []byte
}

func (e *env) clean() {
	ctx, stop := context.WithTimeout(context.WithoutCancel(e.Context()), 20*time.Second)
	defer stop()
	if err := e.re.Kill(ctx, e.token, 9); err != nil {
		e.Errorf("kill: %v", err)
	}
	for {
		err := e.re.Forget(ctx, e.token)
		if err == nil || ctx.Err() != nil {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func (e *env) launch(script string, stdin io.Reader, args ...string) {
	e.Helper()
	cmd := provider.Cmd{Argv: append([]string{"sh", "-c", script, "sh"}, args...), Stdin: stdin}
	if err := e.re.Launch(e.Context(), e.token, cmd, provider.LaunchOptions{RunID: e.run, Nonce: e.nonce}); err != nil {
		e.Fatal(err)
	}
}

// story is what a journal says.
type story struct {
	lines  []string // of stdout, "~" before one without its newline
	offs   []int64
	stderr string
	exit   *provider.Exit
	err    error
	level  int
}

func (e *env) read(o journal.Options) (s story) {
	e.Helper()
	o.RunID = e.run
	if o.Nonce == nil {
		o.Nonce = e.nonce
	}
	ctx, stop := context.WithTimeout(e.Context(), 30*time.Second)
	defer stop()
	r := journal.NewReader(e.re, e.token, o)
	last := int64(0)
	for rec, err := range r.Records(ctx) {
		if err != nil {
			s.err = err
			break
		}
		if rec.Off < last {
			e.Errorf("a record at %d follows one at %d", rec.Off, last)
		}
		last = rec.Off
		line := string(rec.Data)
		switch rec.Kind {
		case journal.KindPartial:
			line = "~" + line
			fallthrough
		case journal.KindLine:
			// The shell form writes a blank line before its own, and has no other way to
			// tell that a line was not ended.
			if line = strings.TrimPrefix(line, "~"); line != "" {
				s.lines, s.offs = append(s.lines, line), append(s.offs, rec.Off)
			}
		case journal.KindStderr:
			s.stderr += line
		case journal.KindExit:
			x := rec.Exit
			s.exit = &x
		}
	}
	s.level = r.Level()
	return s
}

// ended expects a verified exit.
func (e *env) ended(code int, lines ...string) story {
	e.Helper()
	s := e.read(journal.Options{})
	if s.err != nil || s.exit == nil || s.exit.Code != code {
		e.Fatalf("exit %v, error %v, want code %d; lines %.300q", s.exit, s.err, code, s.lines)
	}
	if lines != nil && !slices.Equal(lines, s.lines) {
		e.Errorf("lines %.300q, want %.300q", s.lines, lines)
	}
	return s
}

// refused expects that nothing vouches for the end.
func (e *env) refused(target ...error) story {
	e.Helper()
	s := e.read(journal.Options{})
	if s.exit != nil {
		e.Fatalf("exit %v was believed; lines %.300q", *s.exit, s.lines)
	}
	if !slices.ContainsFunc(target, func(t error) bool { return errors.Is(s.err, t) }) {
		e.Errorf("error %v, want one of %v", s.err, target)
	}
	return s
}

var cases = []struct {
	name    string
	tampers bool
	f       func(e *env)
}{
	{"output and exit", false, func(e *env) {
		e.launch(`cat; echo out; echo err >&2; printf 'no end'; exit 7`, strings.NewReader("from stdin\nä\n"))
		s := e.ended(7, "from stdin", "ä", "out", "no end")
		if s.stderr != "err\n" || s.level < 1 {
			e.Errorf("stderr %q, level %d", s.stderr, s.level)
		}
		// Another reader, in another way, finds the same at the same places.
		p := e.read(journal.Options{Poll: true})
		if p.err != nil || !slices.Equal(p.lines, s.lines) || !slices.Equal(p.offs, s.offs) || p.exit == nil {
			e.Errorf("polling: %+v, following: %+v", p, s)
		}
	}},
	{"read while it runs", false, func(e *env) {
		script := `i=0; while [ $i -lt 40 ]; do i=$((i+1)); echo "line $i"; sleep 0.01 2>/dev/null; done`
		e.launch(script, nil)
		follow := e.read(journal.Options{})
		var want []string
		for i := range 40 {
			want = append(want, fmt.Sprintf("line %d", i+1))
		}
		if follow.err != nil || !slices.Equal(follow.lines, want) {
			e.Errorf("%+v", follow)
		}
	}},
	{"poll while it runs", false, func(e *env) {
		e.launch(`for i in 1 2 3; do printf "half"; sleep 0.3 2>/dev/null || sleep 1; echo " line $i"; done`, nil)
		s := e.read(journal.Options{Poll: true})
		if s.err != nil || !slices.Equal(s.lines, []string{"half line 1", "half line 2", "half line 3"}) {
			e.Errorf("%+v", s)
		}
	}},
	{"slow to speak", false, func(e *env) { // D-5
		e.launch(`sleep 1; echo late`, nil)
		s := e.read(journal.Options{AttachWait: 300 * time.Millisecond})
		if s.err != nil || !slices.Equal(s.lines, []string{"late"}) {
			e.Errorf("%+v", s)
		}
	}},
	{"big input", false, func(e *env) {
		e.launch(`wc -c; echo end`, bytes.NewReader(bytes.Repeat([]byte{0, 1, '\n', 0xff}, 1<<18)))
		if s := e.ended(0); len(s.lines) != 2 || strings.TrimSpace(s.lines[0]) != "1048576" {
			e.Errorf("%q", s.lines)
		}
	}},
	{"cut input", false, func(e *env) {
		broken := errors.New("broken")
		cmd := provider.Cmd{Argv: []string{"sh", "-c", "cat"}, Stdin: io.MultiReader(strings.NewReader("half"), failing{broken})}
		if err := e.re.Launch(e.Context(), e.token, cmd, provider.LaunchOptions{RunID: e.run, Nonce: e.nonce}); !errors.Is(err, broken) {
			e.Errorf("launch: %v", err)
		}
		e.eventually("nothing was started", func() bool {
			p, err := e.re.Probe(e.Context(), e.token)
			return err == nil && p.State == provider.ProbeAbsent
		})
	}},
	{"missing program", false, func(e *env) {
		err := e.re.Launch(e.Context(), e.token, provider.Cmd{Argv: []string{"no-such-program"}}, provider.LaunchOptions{RunID: e.run, Nonce: e.nonce})
		if !errors.Is(err, fs.ErrNotExist) {
			e.Errorf("launch: %v", err)
		}
	}},
	{"long lines", false, func(e *env) {
		e.launch(`head -c 3000000 /dev/zero | tr '\0' x; echo; echo end`, nil)
		s := e.ended(0)
		if len(s.lines) != 2 || len(s.lines[0]) != 3000000 || s.lines[1] != "end" {
			e.Errorf("%d lines", len(s.lines))
		}
		if s := e.read(journal.Options{MaxLine: 1 << 20}); !errors.Is(s.err, journal.ErrLineTooLong) || s.exit != nil {
			e.Errorf("with a limit: %v", s.err)
		}
	}},
	{"late children", false, func(e *env) { // S11
		e.launch(`(sleep 3; echo late) & echo early; exit 0`, nil)
		if s := e.ended(0); s.lines[0] != "early" {
			e.Errorf("%q", s.lines)
		}
	}},
	{"killed", false, func(e *env) {
		e.launch(`echo up; kill -9 $$`, nil)
		if s := e.ended(137, "up"); s.exit.Signal != 9 {
			e.Errorf("%+v", s.exit)
		}
	}},
	{"signal and kill", false, func(e *env) {
		e.launch(`trap 'echo told' TERM; echo up; while :; do sleep 0.05 2>/dev/null || sleep 1; done`, nil)
		var wg sync.WaitGroup
		wg.Go(func() {
			for range 100 {
				if p, err := e.re.Probe(e.Context(), e.token); err == nil && p.Lines > 0 {
					break
				}
				time.Sleep(20 * time.Millisecond)
			}
			time.Sleep(200 * time.Millisecond)
			if err := e.re.Kill(e.Context(), e.token, 15); err != nil {
				e.Error(err)
			}
			time.Sleep(1500 * time.Millisecond)
			if err := e.re.Kill(e.Context(), e.token, 9); err != nil {
				e.Error(err)
			}
		})
		e.ended(137, "up", "told")
		wg.Wait()
	}},
	{"hostile names", false, func(e *env) { // T18
		canary := filepath.Join(e.TempDir(), "canary")
		for _, id := range []string{"a/../b", "a b;touch " + canary, "$(touch " + canary + ")", "'\"`touch " + canary + "`", "-rf", "..", "ünï", "x\ty"} {
			run := id + " " + rand.Text()
			token, err := frame.Token(run)
			if err != nil {
				e.Fatal(err)
			}
			s := &env{T: e.T, re: e.re, run: run, token: token, nonce: e.nonce}
			s.launch(`echo "$1"`, nil, id)
			s.ended(0, id)
			s.clean()
		}
		if _, err := os.Lstat(canary); err == nil {
			e.Error("a name was run")
		}
	}},
	{"once, for ever", false, func(e *env) { // I25
		out := filepath.Join(e.TempDir(), "starts")
		cmd := provider.Cmd{Argv: []string{"sh", "-c", `echo x >>"$1"`, "sh", out}}
		o := provider.LaunchOptions{RunID: e.run, Nonce: e.nonce}
		errs := make(chan error)
		for range 8 {
			go func() { errs <- e.re.Launch(e.Context(), e.token, cmd, o) }()
		}
		won := 0
		for range 8 {
			if err := <-errs; err == nil {
				won++
			} else if !errors.Is(err, provider.ErrAlreadyLaunched) {
				e.Error(err)
			}
		}
		e.ended(0)
		e.forget()
		if p, err := e.re.Probe(e.Context(), e.token); err != nil || p.State != provider.ProbeAbsent {
			e.Errorf("after it was forgotten: %+v, %v", p, err)
		}
		if err := e.re.Launch(e.Context(), e.token, cmd, o); !errors.Is(err, provider.ErrAlreadyLaunched) {
			e.Errorf("launched after it was forgotten: %v", err)
		}
		b, err := os.ReadFile(out)
		if err != nil || string(b) != "x\n" || won != 1 {
			e.Errorf("%d launches, %q, %v", won, b, err)
		}
	}},
	{"forgotten before it was launched", false, func(e *env) {
		e.forget()
		err := e.re.Launch(e.Context(), e.token, provider.Cmd{Argv: []string{"true"}}, provider.LaunchOptions{RunID: e.run, Nonce: e.nonce})
		if !errors.Is(err, provider.ErrAlreadyLaunched) {
			e.Errorf("launch: %v", err)
		}
	}},
	{"listed", false, func(e *env) {
		l, ok := provider.As[provider.JournalLister](e.re)
		if !ok {
			e.Skip("journals can't be listed")
		}
		find := func() (age time.Duration, ok bool) {
			e.Helper()
			js, err := l.Journals(e.Context())
			if err != nil {
				e.Fatal(err)
			}
			for _, j := range js {
				if j.Token == e.token {
					return j.Age, true
				}
			}
			return 0, false
		}
		if _, ok := find(); ok {
			e.Error("listed before it is there")
		}
		e.launch(`echo x`, nil)
		e.ended(0)
		if age, ok := find(); !ok || age < 0 || age > time.Minute {
			e.Errorf("age %v, listed %v", age, ok)
		}
		e.forget()
		if _, ok := find(); ok {
			e.Error("listed although it was forgotten")
		}
	}},
	{"nothing there", false, func(e *env) {
		s := e.read(journal.Options{})
		var a *journal.AttachError
		if !errors.As(s.err, &a) || a.Reason != journal.AttachUnknown {
			e.Errorf("%v", s.err)
		}
	}},
	{"forged exits", false, func(e *env) { // S10
		fake := frame.Append(nil, frame.TypeExit, frame.Exit{}.Encode())
		input := slices.Concat(
			[]byte(`{"__exit":0}`+"\n"+`{"__exit":0,"__nonce":""}`+"\n"+`{"__exit":0,"__nonce":"guess","__stderr":""}`+"\n"+`{"__start":1}`+"\n"),
			fake, []byte("\n"), frame.Append(nil, frame.TypeHeader, []byte(`{"version":1}`)), []byte("\n"))
		e.launch(`cat; exit 9`, bytes.NewReader(input))
		if s := e.ended(9); len(s.lines) < 5 || s.lines[0] != `{"__exit":0}` || s.lines[3] != `{"__start":1}` {
			e.Errorf("lines %q", s.lines)
		}
	}},
	{"another secret", false, func(e *env) {
		e.launch(`echo x`, nil)
		e.ended(0, "x")
		s := e.read(journal.Options{Nonce: []byte("another")})
		if s.exit != nil || !errors.Is(s.err, journal.ErrTampered) && !errors.Is(s.err, journal.ErrEndedWithoutExit) {
			e.Errorf("exit %v, error %v", s.exit, s.err)
		}
	}},
	{"supervisor killed", false, func(e *env) { // S4
		e.launch(`echo before; sleep 0.3 2>/dev/null || sleep 1; kill -9 $PPID; sleep 0.2 2>/dev/null; echo '{"__exit":0}'; sleep 60`, nil)
		if s := e.refused(journal.ErrEndedWithoutExit); len(s.lines) == 0 || s.lines[0] != "before" {
			e.Errorf("lines %q", s.lines)
		}
	}},
	{"journal truncated", true, func(e *env) { // S9
		e.launch(`i=0; while [ $i -lt 2000 ]; do i=$((i+1)); echo "a line that will be missed $i"; done; sleep 1; for f in $1; do : >"$f"; done; echo x; exit 0`, nil, e.journal(e.token))
		e.refused(journal.ErrTampered, journal.ErrTornFrame, journal.ErrEndedWithoutExit)
	}},
	{"journal removed", true, func(e *env) {
		e.launch(`echo x; sleep 1; rm -f $1; exit 0`, nil, e.journal(e.token))
		// Who has the file open already may read it to its true end.
		s := e.read(journal.Options{})
		if s.exit != nil && !slices.Equal(s.lines, []string{"x"}) || s.exit == nil && !errors.Is(s.err, journal.ErrTampered) && !errors.Is(s.err, journal.ErrEndedWithoutExit) {
			e.Errorf("exit %v, error %v, lines %q", s.exit, s.err, s.lines)
		}
	}},
	{"exit appended", true, func(e *env) {
		fake := frame.Append(nil, frame.TypeExit, frame.Exit{Lines: 1, Bytes: 2}.Encode())
		e.launch(`echo x; sleep 0.5 2>/dev/null; for f in $1; do { cat; printf '\n{"__exit":0,"__nonce":"00000000000000000000000000000000","__stderr":""}\n'; } >>"$f"; done; kill -9 $PPID; sleep 60`,
			bytes.NewReader(fake), e.journal(e.token))
		e.refused(journal.ErrTampered, journal.ErrTornFrame, journal.ErrEndedWithoutExit)
	}},
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

func (e *env) forget() {
	e.Helper()
	e.eventually("it is forgotten", func() bool { return e.re.Forget(e.Context(), e.token) == nil })
}

func (e *env) eventually(what string, ok func() bool) {
	e.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); {
		if time.Now().After(end) {
			e.Fatalf("never: %s", what)
		}
		time.Sleep(20 * time.Millisecond)
	}
}
