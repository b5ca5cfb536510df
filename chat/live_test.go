package chat_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/aisandbox-go/aisandbox/chat"
	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/store"
	"github.com/aisandbox-go/aisandbox/store/memstore"
)

func TestAbandonedReaderCancels(t *testing.T) {
	var p trace
	r := start(t, chat.Request{Adapter: hangs(custom("x")), Use: []chat.Middleware{p.probe("sandbox")}})
	for ev, err := range r.Events(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		if show(ev) == "x" {
			break
		}
	}
	// The loop returned, so everything is torn down.
	equal(t, p.get(), []string{"setup sandbox", "event sandbox x", "done sandbox canceled"})
	o := outcome(t, r)
	if o.Kind != chat.Canceled || !errors.Is(o.Err, chat.ErrCanceled) {
		t.Errorf("outcome %+v", o)
	}
	// A later reader sees how it ended.
	equal(t, collect(t, r), []string{"x", "RUN_ERROR aborted"})
}

func TestContextsCancel(t *testing.T) {
	why := errors.New("ctrl-c")
	t.Run("of the reader", func(t *testing.T) {
		ctx, cancel := context.WithCancelCause(t.Context())
		defer cancel(nil)
		r := start(t, chat.Request{Adapter: hangs(custom("x"))})
		var last error
		for ev, err := range r.Events(ctx) {
			if last = err; err == nil && show(ev) == "x" {
				cancel(why)
			}
		}
		if !errors.Is(last, why) {
			t.Errorf("last pair: %v", last)
		}
		if o := outcome(t, r); o.Kind != chat.Canceled || !strings.Contains(o.Err.Error(), "ctrl-c") {
			t.Errorf("outcome %+v", o)
		}
	})
	t.Run("of Start", func(t *testing.T) {
		ctx, cancel := context.WithCancelCause(t.Context())
		defer cancel(nil)
		r, err := chat.Start(ctx, chat.Request{Adapter: hangs(custom("x"))})
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for ev, err := range r.Events(t.Context()) {
			if err != nil {
				t.Fatal(err)
			}
			if got = append(got, show(ev)); show(ev) == "x" {
				cancel(why)
			}
		}
		equal(t, got[2:], []string{"x", "RUN_ERROR aborted"})
		if o := outcome(t, r); o.Kind != chat.Canceled || !errors.Is(o.Err, why) {
			t.Errorf("outcome %+v", o)
		}
	})
	t.Run("before anybody reads", func(t *testing.T) {
		var p trace
		r := start(t, chat.Request{Adapter: says(finished), Use: []chat.Middleware{p.probe("a")}})
		if err := r.Cancel("changed my mind"); err != nil {
			t.Fatal(err)
		}
		equal(t, collect(t, r), []string{"RUN_ERROR aborted"})
		equal(t, p.get(), []string(nil))
	})
}

func TestCancelReachesTheAdapterWithItsCause(t *testing.T) {
	causes := make(chan error, 1)
	ad := fake{stream: func(ctx context.Context, r *chat.Run, yield func(chat.Item, error) bool) {
		yield(chat.Item{Event: custom("x")}, nil)
		<-ctx.Done()
		causes <- context.Cause(ctx)
		// What an agent says when it is killed is not how the run ended.
		yield(chat.Item{Event: event.RunError{Message: "killed", Code: "sigint"}}, nil)
	}}
	r := start(t, chat.Request{Adapter: ad})
	for ev, err := range r.Events(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		if show(ev) == "x" {
			_ = r.Cancel("stop button")
		}
	}
	var c *chat.CanceledError
	if err := <-causes; !errors.As(err, &c) || c.Reason != "stop button" {
		t.Errorf("cause %v", err)
	}
	equal(t, collect(t, r), []string{"x", "RUN_ERROR aborted"})
	if e := outcome(t, r).Terminal.(event.RunError); e.Message != "Request aborted" {
		t.Errorf("terminal %+v", e)
	}
}

func TestTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, chat.Request{Adapter: hangs(), Timeout: time.Minute})
		began := time.Now()
		o := outcome(t, r)
		if o.Kind != chat.Failed || !errors.Is(o.Err, chat.ErrBudget) || o.Duration != time.Minute || time.Since(began) != time.Minute {
			t.Errorf("outcome %+v after %v", o, time.Since(began))
		}
		equal(t, collect(t, r), []string{"RUN_ERROR budget_exceeded"})
	})
}

func TestDoneHasItsOwnTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slow := chat.Middleware{Name: "slow", Done: func(ctx context.Context, _ *chat.Run, _ chat.Outcome) error {
			if ctx.Err() != nil {
				t.Error("the clean-up context is done before the clean-up")
			}
			<-ctx.Done()
			return context.Cause(ctx)
		}}
		r := start(t, chat.Request{Adapter: hangs(), Use: []chat.Middleware{slow, slow}})
		began := time.Now()
		go func() {
			time.Sleep(time.Second)
			_ = r.Cancel("")
		}()
		o := outcome(t, r)
		// Each had its 60 s, and the log ends as cancelled all the same.
		if o.Kind != chat.Canceled || time.Since(began) != 2*time.Minute+time.Second {
			t.Errorf("outcome %+v after %v", o, time.Since(began))
		}
	})
	synctest.Test(t, func(t *testing.T) {
		slow := chat.Middleware{Name: "slow", Done: func(ctx context.Context, _ *chat.Run, _ chat.Outcome) error {
			<-ctx.Done()
			return context.Cause(ctx)
		}}
		r := start(t, chat.Request{Adapter: says(finished), Use: []chat.Middleware{slow, slow}, Cleanup: time.Second})
		began := time.Now()
		o := outcome(t, r)
		if o.Kind != chat.Failed || time.Since(began) != 2*time.Second || !strings.Contains(o.Err.Error(), `clean-up of middleware "slow" took longer`) {
			t.Errorf("outcome %+v after %v", o, time.Since(began))
		}
	})
}

// A live event shows while the adapter is silent, and while Setup still works.
func TestEmitIsPrompt(t *testing.T) {
	seen := make(chan string, 10)
	wait := func(want string) {
		for s := range seen {
			if s == want {
				return
			}
		}
	}
	m := chat.Middleware{
		Name: "m",
		Setup: func(ctx context.Context, r *chat.Run) error {
			if err := r.Emit(ctx, custom("setup")); err != nil {
				return err
			}
			wait("setup")
			return nil
		},
		Done: func(ctx context.Context, r *chat.Run, _ chat.Outcome) error {
			err := r.Emit(ctx, custom("done"))
			wait("done")
			return err
		},
	}
	ad := fake{stream: func(ctx context.Context, r *chat.Run, yield func(chat.Item, error) bool) {
		_ = r.Emit(ctx, custom("silent"))
		wait("silent")
		_ = r.Emit(ctx, custom("before"))
		yield(chat.Item{Event: custom("after")}, nil)
		yield(chat.Item{Event: finished}, nil)
	}}
	r := start(t, chat.Request{Adapter: ad, Use: []chat.Middleware{m}})
	var got []string
	for ev, err := range r.Events(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, show(ev))
		seen <- show(ev)
	}
	equal(t, got, []string{"RUN_STARTED", "run.accepted", "setup", "silent", "before", "after", "done", "RUN_FINISHED"})
	if err := r.Emit(t.Context(), custom("late")); !errors.Is(err, chat.ErrEnded) {
		t.Errorf("emit after the end: %v", err)
	}
}

func TestEmitRefuses(t *testing.T) {
	r := start(t, chat.Request{Adapter: says(finished)})
	for _, ev := range []event.Event{nil, event.RunFinished{}, event.RunError{Message: "x"}, event.RunStarted{}} {
		if err := r.Emit(t.Context(), ev); err == nil {
			t.Errorf("%v was accepted", ev)
		}
	}
	// Nobody drives: the queue is bounded, and the context is honoured.
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var err error
	for n := 0; err == nil; n++ {
		if n == 256 {
			cancel()
		}
		if n > 256 {
			t.Fatal("the queue has no bound")
		}
		err = r.Emit(ctx, custom("x"))
	}
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	// While there is room a done context is no reason to lose an event: who tears
	// down has one.
	q := start(t, chat.Request{Adapter: says(finished)})
	for range 64 {
		if err := q.Emit(ctx, custom("x")); err != nil {
			t.Fatal(err)
		}
	}
	if got := collect(t, r); len(got) < 257 {
		t.Errorf("%d events", len(got))
	}
}

func TestEmitInsideOfAnEventHook(t *testing.T) {
	// Far more than the queue holds, from the goroutine that empties it.
	var p trace
	twin := chat.Middleware{Name: "twin", Event: func(ctx context.Context, r *chat.Run, ev event.Event) ([]event.Event, error) {
		if strings.HasPrefix(show(ev), "n") {
			for i := range 3 {
				if err := r.Emit(ctx, custom(fmt.Sprintf("echo %s %d", show(ev), i))); err != nil {
					return nil, err
				}
			}
		}
		return []event.Event{ev}, nil
	}}
	ad := fake{stream: func(_ context.Context, _ *chat.Run, yield func(chat.Item, error) bool) {
		for i := range 500 {
			yield(chat.Item{Event: custom(fmt.Sprint("n", i))}, nil)
		}
		yield(chat.Item{Event: finished}, nil)
	}}
	r := start(t, chat.Request{Adapter: ad, Use: []chat.Middleware{p.probe("first"), twin, p.probe("second")}})
	got := collect(t, r)
	if len(got) != 2001 {
		t.Fatalf("%d events", len(got))
	}
	equal(t, got[:5], []string{"n0", "echo n0 0", "echo n0 1", "echo n0 2", "n1"})
	// It passes the hooks that come after, and only those.
	for _, l := range p.get() {
		if strings.HasPrefix(l, "event first echo") {
			t.Fatal(l)
		}
	}
	if n := strings.Count(strings.Join(p.get(), "\n"), "event second echo"); n != 1500 {
		t.Errorf("the later hook saw %d", n)
	}
}

// An Event hook sees nothing before its Setup and nothing after its Done began.
func TestEventHooksRespectTheirLife(t *testing.T) {
	var p trace
	a := p.probe("a")
	a.Done = func(ctx context.Context, r *chat.Run, _ chat.Outcome) error {
		return r.Emit(ctx, custom("a's last"))
	}
	b := p.probe("b")
	b.Done = func(ctx context.Context, r *chat.Run, _ chat.Outcome) error {
		p.add("done b")
		return r.Emit(ctx, custom("b's last"))
	}
	b.Setup = func(ctx context.Context, r *chat.Run) error {
		return r.Emit(ctx, custom("b's first"))
	}
	r := start(t, chat.Request{Adapter: says(finished), Use: []chat.Middleware{a, b}})
	equal(t, collect(t, r), []string{"b's first", "b's last", "a's last", "RUN_FINISHED"})
	equal(t, p.get(), []string{"setup a", "event a b's first", "event a RUN_FINISHED", "event b RUN_FINISHED", "done b", "event a b's last"})
}

func TestFileHooks(t *testing.T) {
	var p trace
	hook := func(what string) func(context.Context, *chat.Run, chat.FileEvent) {
		return func(_ context.Context, _ *chat.Run, f chat.FileEvent) { p.add("%s %s", what, f.Path) }
	}
	m := chat.Middleware{Name: "m", Sandbox: chat.FileHooks{
		OnFile: hook("any"), OnFileCreate: hook("create"), OnFileChange: hook("change"), OnFileDelete: hook("delete")}}
	bad := chat.Middleware{Name: "bad", Sandbox: chat.FileHooks{OnFile: func(context.Context, *chat.Run, chat.FileEvent) { panic("hook") }}}
	send := chat.Middleware{
		Name: "watch",
		Setup: func(ctx context.Context, r *chat.Run) error {
			return r.EmitFile(ctx, chat.FileEvent{File: event.File{Type: "create", Path: "/workspace/a", Timestamp: 1}})
		},
		Done: func(ctx context.Context, r *chat.Run, _ chat.Outcome) error {
			return errors.Join(r.EmitFile(ctx, chat.FileEvent{File: event.File{Type: "change", Path: "/workspace/b"}}),
				r.EmitFile(ctx, chat.FileEvent{File: event.File{Type: "delete", Path: "/workspace/c"}}))
		},
	}
	r := start(t, chat.Request{Adapter: says(custom("x"), finished), Use: []chat.Middleware{bad, m, send}})
	equal(t, collect(t, r), []string{"sandbox.file", "x", "sandbox.file", "sandbox.file", "RUN_FINISHED"})
	equal(t, p.get(), []string{"any /workspace/a", "create /workspace/a", "any /workspace/b", "change /workspace/b", "any /workspace/c", "delete /workspace/c"})
}

func TestManyReadersSeeTheSame(t *testing.T) {
	const n = 100
	release := make(chan struct{})
	ad := fake{stream: func(_ context.Context, _ *chat.Run, yield func(chat.Item, error) bool) {
		for i := range 300 {
			if i == 100 {
				<-release
			}
			yield(chat.Item{Event: custom(fmt.Sprint(i))}, nil)
		}
		yield(chat.Item{Event: finished}, nil)
	}}
	r := start(t, chat.Request{Adapter: ad})
	all := make([]string, n)
	var wg, joined sync.WaitGroup
	joined.Add(n)
	first := make(chan struct{})
	for i := range n {
		wg.Go(func() {
			if i > 0 {
				<-first
			}
			var b strings.Builder
			for e, err := range r.Entries(t.Context(), event.FromStart) {
				if err != nil {
					t.Error(err)
					return
				}
				if b.Len() == 0 {
					if i == 0 {
						close(first)
					}
					joined.Done()
				}
				fmt.Fprintf(&b, "%s %s\n", e.Offset, show(e.Event))
			}
			all[i] = b.String()
		})
	}
	joined.Wait()
	close(release)
	wg.Wait()
	for i, s := range all {
		if s != all[0] {
			t.Fatalf("reader %d saw something else", i)
		}
	}
	if strings.Count(all[0], "\n") != 303 {
		t.Errorf("%d events", strings.Count(all[0], "\n"))
	}
	// And one may come in anywhere.
	lines := strings.SplitAfter(all[0], "\n")
	for _, at := range []int{0, 1, 150, 302} {
		var b strings.Builder
		after, _, _ := strings.Cut(lines[at], " ")
		for e, err := range r.Entries(t.Context(), event.Offset(after)) {
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(&b, "%s %s\n", e.Offset, show(e.Event))
		}
		equal(t, b.String(), strings.Join(lines[at+1:], ""))
	}
}

// A reader that stands still holds nobody up.
func TestSlowReader(t *testing.T) {
	s := memstore.New(memstore.Options{})
	evs := make([]event.Event, 5000)
	for i := range evs {
		evs[i] = custom(fmt.Sprint(i))
	}
	r := start(t, chat.Request{RunID: "r", Adapter: says(append(evs, finished)...),
		Use: []chat.Middleware{chat.Durable(chat.Durability{Runs: s.Runs, Log: s.Log})}})
	n := 0
	for _, err := range r.Events(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		if n++; n == 1 {
			if o := outcome(t, r); o.Kind != chat.Finished { // the run ends while this reader stands still
				t.Errorf("outcome %+v", o)
			}
		}
	}
	if n != 5003 {
		t.Errorf("%d events", n)
	}
}

type loginError struct{}

func (loginError) Error() string        { return "login with hunter2 failed" }
func (loginError) Is(target error) bool { return target == store.ErrNotFound }

func TestRedaction(t *testing.T) {
	hide := func(ev event.Event) event.Event {
		switch e := ev.(type) {
		case event.TextMessageContent:
			e.Delta = strings.ReplaceAll(e.Delta, "hunter2", "***")
			return e
		case event.RunError:
			e.Message = strings.ReplaceAll(e.Message, "hunter2", "***")
			return e
		case event.Custom:
			if e.Name == "bomb" {
				panic("hunter2")
			}
		}
		return ev
	}
	s := memstore.New(memstore.Options{})
	m := chat.Middleware{Name: "m", Setup: func(_ context.Context, r *chat.Run) error { r.Redact(hide); return nil }}
	r := start(t, chat.Request{RunID: "r", Adapter: fake{stream: func(_ context.Context, _ *chat.Run, yield func(chat.Item, error) bool) {
		for _, ev := range append(text("m", "the password is hunter2"), custom("bomb")) {
			yield(chat.Item{Event: ev}, nil)
		}
		yield(chat.Item{}, loginError{})
	}}, Use: []chat.Middleware{chat.Durable(chat.Durability{Runs: s.Runs, Log: s.Log}), m}})
	equal(t, collect(t, r), []string{"TEXT_MESSAGE_START", "text:the password is ***", "TEXT_MESSAGE_END", "RUN_ERROR internal"})
	rec, err := s.Runs.Get(t.Context(), "r")
	if err != nil || rec.Error.Message != "login with *** failed" {
		t.Errorf("record %+v %v", rec.Error, err)
	}
	if o := outcome(t, r); o.Err.Error() != "login with *** failed" || !errors.Is(o.Err, store.ErrNotFound) {
		t.Errorf("outcome %+v", o)
	}
	if s := r.Transcript()[0].Content.Text; s != "the password is ***" {
		t.Errorf("transcript %q", s)
	}
}

// star is a filter that replaces one word, wherever it was cut.
type star struct {
	w    io.Writer
	held string
}

const word = "hunter2"

func (s *star) Write(p []byte) (int, error) {
	s.held = strings.ReplaceAll(s.held+string(p), word, "***")
	n := len(s.held)
	for k := min(len(word)-1, n); k > 0; k-- {
		if strings.HasSuffix(s.held, word[:k]) {
			n -= k
			break
		}
	}
	_, err := io.WriteString(s.w, s.held[:n])
	s.held = s.held[n:]
	return len(p), err
}

func (s *star) Close() error { _, err := io.WriteString(s.w, s.held); return err }

// A secret that comes in pieces is in no log either.
func TestRedactionOfPieces(t *testing.T) {
	m := chat.Middleware{Name: "m", Setup: func(_ context.Context, r *chat.Run) error {
		r.RedactText(func(w io.Writer) io.WriteCloser { return &star{w: w} })
		return nil
	}}
	var evs []event.Event
	for _, id := range []string{"m1", "m2"} { // interleaved: each text has its own state
		evs = append(evs, event.TextMessageStart{MessageID: id, Role: "assistant"})
	}
	for _, c := range "it is hunter2, hunter1 or hunte" {
		evs = append(evs, event.TextMessageContent{MessageID: "m1", Delta: string(c)}, event.TextMessageContent{MessageID: "m2", Delta: string(c)})
	}
	evs = append(evs, event.TextMessageEnd{MessageID: "m1"},
		event.ReasoningMessageStart{MessageID: "r", Role: "reasoning"}, event.ReasoningMessageContent{MessageID: "r", Delta: "hunt"},
		event.ReasoningMessageContent{MessageID: "r", Delta: "er2"}, event.ReasoningMessageEnd{MessageID: "r"},
		event.ToolCallStart{ToolCallID: "c", ToolCallName: "Bash"}, event.ToolCallArgs{ToolCallID: "c", Delta: `{"p":"hun`},
		event.ToolCallArgs{ToolCallID: "c", Delta: `ter2"}`}, event.ToolCallEnd{ToolCallID: "c"},
		event.RunError{Message: "m2 is still open"})
	r := start(t, chat.Request{Adapter: says(evs...), Use: []chat.Middleware{m}})
	text := map[string]string{}
	var all []event.Event
	for ev, err := range r.Events(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		switch e := ev.(type) {
		case event.TextMessageContent:
			text[e.MessageID] += e.Delta
		case event.ReasoningMessageContent:
			text[e.MessageID] += e.Delta
		case event.ToolCallArgs:
			text[e.ToolCallID] += e.Delta
		}
		all = append(all, ev)
	}
	shown(t, all)
	said := "it is ***, hunter1 or hunte"
	equal(t, text, map[string]string{"m1": said, "m2": said, "r": "***", "c": `{"p":"***"}`})
	equal(t, r.Transcript()[0].Content.Text, said)
}

func TestTokens(t *testing.T) {
	twin := chat.NewToken[string]("sandbox", "")
	m := chat.Middleware{Name: "m", Setup: func(_ context.Context, r *chat.Run) error {
		if _, ok := box.Get(r); ok {
			t.Error("there before it was provided")
		}
		_, err := box.Need(r)
		var me *chat.MissingError
		if !errors.As(err, &me) || me.Cure == "" {
			t.Errorf("need: %v", err)
		}
		box.Provide(r, "1")
		box.Provide(r, "2")
		if v, _ := box.Get(r); v != "2" {
			t.Errorf("got %q", v)
		}
		if _, ok := twin.Get(r); ok {
			t.Error("identity is not the name")
		}
		return nil
	}}
	outcome(t, start(t, chat.Request{Adapter: says(finished), Use: []chat.Middleware{m}}))
}

func TestTimestampsAreTheDrivers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		given := event.Custom{Name: "given", Value: []byte("{}"), Common: event.Common{Timestamp: 42}}
		r := start(t, chat.Request{Adapter: says(custom("x"), given, finished)})
		for ev, err := range r.Events(t.Context()) {
			if err != nil {
				t.Fatal(err)
			}
			want := time.Now().UnixMilli()
			if show(ev) == "given" {
				want = 42
			}
			if ev.Base().Timestamp != want {
				t.Errorf("%s at %d, want %d", show(ev), ev.Base().Timestamp, want)
			}
		}
	})
}
