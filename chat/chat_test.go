package chat_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/aisandbox-go/aisandbox/chat"
	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/store"
	"github.com/aisandbox-go/aisandbox/store/memstore"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fake is an adapter whose stream is a function.
type fake struct {
	needs  []chat.AnyToken
	stream func(ctx context.Context, r *chat.Run, yield func(chat.Item, error) bool)
}

func (fake) Name() string             { return "fake" }
func (f fake) Needs() []chat.AnyToken { return f.needs }
func (f fake) Stream(ctx context.Context, r *chat.Run) iter.Seq2[chat.Item, error] {
	return func(yield func(chat.Item, error) bool) { f.stream(ctx, r, yield) }
}

// says is an adapter that yields events, live ones.
func says(evs ...event.Event) fake {
	return fake{stream: func(_ context.Context, _ *chat.Run, yield func(chat.Item, error) bool) {
		for _, ev := range evs {
			if !yield(chat.Item{Event: ev}, nil) {
				return
			}
		}
	}}
}

// hangs is an adapter that yields events and then waits for its end.
func hangs(evs ...event.Event) fake {
	return fake{stream: func(ctx context.Context, r *chat.Run, yield func(chat.Item, error) bool) {
		says(evs...).stream(ctx, r, yield)
		<-ctx.Done()
	}}
}

func text(id, s string) []event.Event {
	return []event.Event{
		event.TextMessageStart{MessageID: id, Role: "assistant"},
		event.TextMessageContent{MessageID: id, Delta: s},
		event.TextMessageEnd{MessageID: id},
	}
}

func custom(name string) event.Event { return event.Custom{Name: name, Value: []byte("{}")} }

var finished = event.RunFinished{}

// show is an event in a few words.
func show(ev event.Event) string {
	switch e := ev.(type) {
	case event.Custom:
		return e.Name
	case event.TextMessageContent:
		return "text:" + e.Delta
	case event.RunError:
		return "RUN_ERROR " + e.Code
	case event.RunFinished:
		if e.Outcome != nil && e.Outcome.Type == "interrupt" {
			return "INTERRUPT"
		}
	}
	return string(ev.Type())
}

// collect reads a run to its end, checks that the stream is legal and shows it
// without what opens every run.
func collect(t *testing.T, r *chat.Run) []string {
	t.Helper()
	var evs []event.Event
	for ev, err := range r.Events(t.Context()) {
		if err != nil {
			t.Fatalf("events: %v", err)
		}
		evs = append(evs, ev)
	}
	return shown(t, evs)
}

func shown(t *testing.T, evs []event.Event) []string {
	t.Helper()
	if err := event.Validate(evs); err != nil {
		t.Errorf("stream: %v", err)
	}
	var out []string
	for _, ev := range evs {
		out = append(out, show(ev))
	}
	if len(out) < 3 || out[0] != "RUN_STARTED" || out[1] != "run.accepted" {
		t.Fatalf("the run begins with %v", out[:min(len(out), 2)])
	}
	return out[2:]
}

func start(t *testing.T, req chat.Request) *chat.Run {
	t.Helper()
	r, err := chat.Start(t.Context(), req)
	if err != nil {
		t.Fatalf("start: %v", err)
	}
	return r
}

func outcome(t *testing.T, r *chat.Run) chat.Outcome {
	t.Helper()
	o, err := r.Wait(t.Context())
	if err != nil {
		t.Fatalf("wait: %v", err)
	}
	return o
}

func equal(t *testing.T, got, want any) {
	t.Helper()
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("-want +got:\n%s", d)
	}
}

// trace collects what happened, in order.
type trace struct {
	sync.Mutex
	lines []string
}

func (p *trace) add(format string, args ...any) {
	p.Lock()
	defer p.Unlock()
	p.lines = append(p.lines, fmt.Sprintf(format, args...))
}

func (p *trace) get() []string {
	p.Lock()
	defer p.Unlock()
	return append([]string(nil), p.lines...)
}

// probe is a middleware that notes its calls.
func (p *trace) probe(name string) chat.Middleware {
	return chat.Middleware{
		Name: name,
		Setup: func(context.Context, *chat.Run) error {
			p.add("setup %s", name)
			return nil
		},
		Event: func(_ context.Context, _ *chat.Run, ev event.Event) ([]event.Event, error) {
			p.add("event %s %s", name, show(ev))
			return []event.Event{ev}, nil
		},
		Done: func(_ context.Context, _ *chat.Run, o chat.Outcome) error {
			p.add("done %s %s", name, o.Kind)
			return nil
		},
	}
}

var box = chat.NewToken[string]("sandbox", "add sandbox.With to Request.Use")
var other = chat.NewToken[string]("other", "")

func TestMissingCapability(t *testing.T) {
	var p trace
	_, err := chat.Start(t.Context(), chat.Request{
		Adapter: fake{needs: []chat.AnyToken{box}},
		Use:     []chat.Middleware{{Name: "x", Provides: []chat.AnyToken{other}}, p.probe("a")},
	})
	var m *chat.MissingError
	if !errors.As(err, &m) {
		t.Fatalf("got %v", err)
	}
	equal(t, *m, chat.MissingError{Adapter: "fake", Token: "sandbox", Provided: []string{"other"}, Cure: "add sandbox.With to Request.Use"})
	for _, want := range []string{`"fake"`, `"sandbox"`, "other", "sandbox.With"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q lacks %s", err, want)
		}
	}
	if got := p.get(); len(got) > 0 {
		t.Errorf("something ran: %v", got)
	}
}

func TestOrderIsChecked(t *testing.T) {
	user := chat.Middleware{Name: "user", After: []chat.AnyToken{box}}
	giver := chat.Middleware{Name: "giver", Provides: []chat.AnyToken{box}, Setup: func(_ context.Context, r *chat.Run) error {
		box.Provide(r, "b")
		return nil
	}}
	_, err := chat.Start(t.Context(), chat.Request{Adapter: says(finished), Use: []chat.Middleware{user, giver}})
	var o *chat.OrderError
	if !errors.As(err, &o) {
		t.Fatalf("got %v", err)
	}
	equal(t, *o, chat.OrderError{Middleware: "user", Token: "sandbox", Provider: "giver"})
	start(t, chat.Request{Adapter: says(finished), Use: []chat.Middleware{giver, user}})
	start(t, chat.Request{Adapter: says(finished), Use: []chat.Middleware{user}}) // nobody provides it: nothing to order
}

func TestBadRequests(t *testing.T) {
	s := memstore.New(memstore.Options{})
	d := chat.Durable(chat.Durability{Runs: s.Runs, Log: s.Log})
	for _, tt := range []struct {
		name string
		req  chat.Request
		want string
	}{
		{"no adapter", chat.Request{}, "invalid_request"},
		{"run id of two lines", chat.Request{Adapter: says(), RunID: "a\nb"}, "invalid_request"},
		{"tool twice", chat.Request{Adapter: says(), Tools: []chat.Tool{{Name: "x"}, {Name: "x"}}}, "invalid_request"},
		{"durable twice", chat.Request{Adapter: says(), RunID: "r", Use: []chat.Middleware{d, d}}, "invalid_request"},
		{"half durable", chat.Request{Adapter: says(), RunID: "r", Use: []chat.Middleware{chat.Durable(chat.Durability{Runs: s.Runs})}}, "invalid_request"},
		{"durable without a run id", chat.Request{Adapter: says(), Use: []chat.Middleware{d}}, "durable_run_id_required"},
		{"negative timeout", chat.Request{Adapter: says(), Timeout: -1}, "invalid_request"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := chat.Start(t.Context(), tt.req)
			if err == nil || store.Code(err, "") != tt.want {
				t.Fatalf("got %v", err)
			}
		})
	}
}

func TestDeclaredButNotProvided(t *testing.T) {
	var p trace
	liar := p.probe("liar")
	liar.Provides = []chat.AnyToken{box}
	r := start(t, chat.Request{Adapter: says(finished), Use: []chat.Middleware{p.probe("a"), liar, p.probe("never")}})
	equal(t, collect(t, r), []string{"RUN_ERROR capability_missing"})
	// Those that were set up are torn down, the one that lied among them.
	equal(t, p.get(), []string{"setup a", "setup liar", "done liar failed", "done a failed"})
	var m *chat.MissingError
	if o := outcome(t, r); o.Kind != chat.Failed || !errors.As(o.Err, &m) || m.Middleware != "liar" {
		t.Errorf("outcome %+v", o)
	}
}

func TestHookOrder(t *testing.T) {
	var p trace
	giver := p.probe("sandbox")
	giver.Provides = []chat.AnyToken{box}
	giver.Setup = func(_ context.Context, r *chat.Run) error {
		p.add("setup sandbox")
		box.Provide(r, "the box")
		return nil
	}
	last := p.probe("b")
	last.Setup = func(_ context.Context, r *chat.Run) error {
		v, ok := box.Get(r)
		p.add("setup b sees %s %v", v, ok)
		return nil
	}
	ad := says(append(text("m", "hi"), finished)...)
	ad.needs = []chat.AnyToken{box}
	r := start(t, chat.Request{Adapter: ad, Use: []chat.Middleware{p.probe("a"), giver, last}})
	if got := p.get(); len(got) > 0 {
		t.Errorf("ran before anybody read: %v", got)
	}
	equal(t, collect(t, r), []string{"TEXT_MESSAGE_START", "text:hi", "TEXT_MESSAGE_END", "RUN_FINISHED"})
	want := []string{"setup a", "setup sandbox", "setup b sees the box true"}
	for _, ev := range []string{"TEXT_MESSAGE_START", "text:hi", "TEXT_MESSAGE_END", "RUN_FINISHED"} {
		for _, m := range []string{"a", "sandbox", "b"} {
			want = append(want, "event "+m+" "+ev)
		}
	}
	want = append(want, "done b finished", "done sandbox finished", "done a finished")
	equal(t, p.get(), want)
}

func TestEventHooksCompose(t *testing.T) {
	hook := func(f func(ev event.Event) []event.Event) chat.Middleware {
		return chat.Middleware{Event: func(_ context.Context, _ *chat.Run, ev event.Event) ([]event.Event, error) { return f(ev), nil }}
	}
	expand := hook(func(ev event.Event) []event.Event {
		if show(ev) == "one" {
			return []event.Event{custom("two"), custom("three")}
		}
		return []event.Event{ev}
	})
	replace := hook(func(ev event.Event) []event.Event {
		if show(ev) == "two" {
			return []event.Event{custom("zwei")}
		}
		return []event.Event{ev}
	})
	drop := hook(func(ev event.Event) []event.Event {
		if show(ev) == "three" || ev.Type() == event.TypeRunFinished {
			return nil
		}
		return []event.Event{ev}
	})
	t.Run("in order", func(t *testing.T) {
		r := start(t, chat.Request{Adapter: says(custom("one"), custom("x"), finished), Use: []chat.Middleware{expand, replace}})
		equal(t, collect(t, r), []string{"zwei", "three", "x", "RUN_FINISHED"})
	})
	t.Run("the terminal can't be dropped", func(t *testing.T) {
		r := start(t, chat.Request{Adapter: says(custom("one"), finished), Use: []chat.Middleware{expand, replace, drop}})
		equal(t, collect(t, r), []string{"zwei", "RUN_FINISHED"})
		if o := outcome(t, r); o.Kind != chat.Finished {
			t.Errorf("outcome %+v", o)
		}
	})
	t.Run("an error ends the run", func(t *testing.T) {
		bad := chat.Middleware{Name: "bad", Event: func(_ context.Context, _ *chat.Run, ev event.Event) ([]event.Event, error) {
			return nil, errors.New("no")
		}}
		ad := hangs(custom("one"))
		r := start(t, chat.Request{Adapter: ad, Use: []chat.Middleware{bad}})
		equal(t, collect(t, r), []string{"RUN_ERROR internal"})
	})
}

func TestTerminalIsLast(t *testing.T) {
	t.Run("finished, then file.changed", func(t *testing.T) {
		r := start(t, chat.Request{Adapter: says(finished, custom("file.changed"))})
		equal(t, collect(t, r), []string{"file.changed", "RUN_FINISHED"})
	})
	t.Run("nothing is read after RUN_ERROR", func(t *testing.T) {
		r := start(t, chat.Request{Adapter: says(event.RunError{Message: "m", Code: "c"}, custom("late"))})
		equal(t, collect(t, r), []string{"RUN_ERROR c"})
		o := outcome(t, r)
		if o.Kind != chat.Failed || o.Err.Error() != "m" || store.Code(o.Err, "") != "c" {
			t.Errorf("outcome %+v", o)
		}
	})
	t.Run("its own RUN_STARTED is swallowed", func(t *testing.T) {
		r := start(t, chat.Request{Adapter: says(event.RunStarted{RunID: "other", ThreadID: "t"}, custom("x"), finished)})
		equal(t, collect(t, r), []string{"x", "RUN_FINISHED"})
	})
	t.Run("no terminal at all", func(t *testing.T) {
		r := start(t, chat.Request{Adapter: says(custom("x"))})
		equal(t, collect(t, r), []string{"x", "RUN_ERROR no_result"})
	})
	t.Run("an error of the stream", func(t *testing.T) {
		r := start(t, chat.Request{Adapter: fake{stream: func(_ context.Context, _ *chat.Run, yield func(chat.Item, error) bool) {
			yield(chat.Item{}, &store.FencedError{})
		}}})
		equal(t, collect(t, r), []string{"RUN_ERROR claim_lost"})
	})
	t.Run("a panic", func(t *testing.T) {
		r := start(t, chat.Request{Adapter: fake{stream: func(_ context.Context, _ *chat.Run, yield func(chat.Item, error) bool) {
			panic("boom")
		}}})
		equal(t, collect(t, r), []string{"RUN_ERROR internal"})
		var pe *chat.PanicError
		if o := outcome(t, r); !errors.As(o.Err, &pe) || pe.Value != "boom" {
			t.Errorf("outcome %+v", o)
		}
	})
	t.Run("what is open is closed", func(t *testing.T) {
		r := start(t, chat.Request{Adapter: says(
			event.ToolCallStart{ToolCallID: "c", ToolCallName: "Bash"}, event.RunError{Message: "m"})})
		equal(t, collect(t, r), []string{"TOOL_CALL_START", "TOOL_CALL_END", "TOOL_CALL_RESULT", "RUN_ERROR "})
	})
	t.Run("a failure before a cancel stays a failure", func(t *testing.T) {
		r := start(t, chat.Request{Adapter: fake{stream: func(_ context.Context, r *chat.Run, yield func(chat.Item, error) bool) {
			yield(chat.Item{Event: event.RunError{Message: "m", Code: "first"}}, nil)
			_ = r.Cancel("too late")
		}}})
		equal(t, collect(t, r), []string{"RUN_ERROR first"})
	})
	t.Run("what was used is told, however it ends", func(t *testing.T) {
		used := []event.Usage{{Model: "m", InputTokens: 3, TotalTokens: 3}}
		for name, ad := range map[string]fake{
			"cancelled": {stream: func(_ context.Context, r *chat.Run, yield func(chat.Item, error) bool) {
				_ = r.Cancel("")
				yield(chat.Item{Event: event.RunError{Message: "killed", Usage: used}}, nil)
			}},
			"an error after the result": {stream: func(_ context.Context, _ *chat.Run, yield func(chat.Item, error) bool) {
				_ = yield(chat.Item{Event: event.RunFinished{Usage: used}}, nil) && yield(chat.Item{}, errors.New("diff"))
			}},
		} {
			o := outcome(t, start(t, chat.Request{Adapter: ad}))
			if e, ok := o.Terminal.(event.RunError); !ok {
				t.Errorf("%s: %+v", name, o)
			} else {
				equal(t, e.Usage, used)
			}
		}
	})
	t.Run("a hook's RUN_ERROR stops the adapter", func(t *testing.T) {
		m := chat.Middleware{Event: func(_ context.Context, _ *chat.Run, ev event.Event) ([]event.Event, error) {
			return []event.Event{ev, event.RunError{Message: "policy", Code: "denied"}}, nil
		}}
		r := start(t, chat.Request{Adapter: hangs(custom("x")), Use: []chat.Middleware{m}})
		equal(t, collect(t, r), []string{"x", "RUN_ERROR denied"})
		if o := outcome(t, r); o.Kind != chat.Failed || store.Code(o.Err, "") != "denied" {
			t.Errorf("outcome %+v", o)
		}
	})
	t.Run("an interrupt", func(t *testing.T) {
		var p trace
		r := start(t, chat.Request{Adapter: says(event.RunFinished{Outcome: &event.Outcome{Type: "interrupt",
			Interrupts: []json.RawMessage{[]byte(`{"id":"i1","reason":"ask"}`)}}}), Use: []chat.Middleware{p.probe("a")}})
		equal(t, collect(t, r), []string{"INTERRUPT"})
		equal(t, p.get(), []string{"setup a", "event a INTERRUPT", "done a interrupted"})
	})
}

func TestDoneFailure(t *testing.T) {
	var p trace
	bad := p.probe("bad")
	bad.Done = func(context.Context, *chat.Run, chat.Outcome) error { return errors.New("the disk is full") }
	t.Run("turns success into an error", func(t *testing.T) {
		s := memstore.New(memstore.Options{})
		r := start(t, chat.Request{RunID: "r", Adapter: says(finished),
			Use: []chat.Middleware{chat.Durable(chat.Durability{Runs: s.Runs, Log: s.Log}), p.probe("a"), bad}})
		equal(t, collect(t, r), []string{"RUN_ERROR internal"})
		rec, err := s.Runs.Get(t.Context(), "r")
		if err != nil || rec.Status != store.Failed || !strings.Contains(rec.Error.Message, "the disk is full") {
			t.Errorf("record %+v %v", rec, err)
		}
		equal(t, p.get()[len(p.get())-1], "done a finished") // the others get their turn
		if o := outcome(t, r); o.Kind != chat.Failed {
			t.Errorf("outcome %+v", o)
		}
	})
	t.Run("is only logged after a failure", func(t *testing.T) {
		r := start(t, chat.Request{Adapter: says(event.RunError{Message: "m", Code: "first"}), Use: []chat.Middleware{bad}})
		equal(t, collect(t, r), []string{"RUN_ERROR first"})
	})
	t.Run("a panic is a failure", func(t *testing.T) {
		r := start(t, chat.Request{Adapter: says(finished), Use: []chat.Middleware{{Done: func(context.Context, *chat.Run, chat.Outcome) error { panic("x") }}}})
		equal(t, collect(t, r), []string{"RUN_ERROR internal"})
	})
}

func TestSetupFailureUnwinds(t *testing.T) {
	var p trace
	bad := p.probe("bad")
	bad.Setup = func(context.Context, *chat.Run) error { return errors.New("no docker") }
	r := start(t, chat.Request{Adapter: fake{}, Use: []chat.Middleware{p.probe("a"), p.probe("b"), bad, p.probe("c")}})
	equal(t, collect(t, r), []string{"RUN_ERROR internal"})
	equal(t, p.get(), []string{"setup a", "setup b", "done b failed", "done a failed"})
	o := outcome(t, r)
	if e, ok := o.Terminal.(event.RunError); !ok || e.Message != `middleware "bad": no docker` {
		t.Errorf("terminal %+v", o.Terminal)
	}
}
