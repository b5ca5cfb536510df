package chat_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/aisandbox-go/aisandbox/chat"
	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/store"
	"github.com/aisandbox-go/aisandbox/store/memstore"
)

func durable(s store.Set) chat.Middleware {
	return chat.Durable(chat.Durability{Runs: s.Runs, Log: s.Log, Messages: s.Messages, Interrupts: s.Interrupts})
}

func record(t *testing.T, s store.Set, id string) store.Run {
	t.Helper()
	r, err := s.Runs.Get(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// next reads a run until it shows an event.
func next(t *testing.T, r *chat.Run, want string) {
	t.Helper()
	for ev, err := range r.Events(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		if show(ev) == want {
			return
		}
	}
	t.Fatalf("%s never came", want)
}

func TestDurableRunOutlivesItsReaders(t *testing.T) {
	s := memstore.New(memstore.Options{})
	goOn := make(chan struct{})
	ad := fake{stream: func(ctx context.Context, _ *chat.Run, yield func(chat.Item, error) bool) {
		yield(chat.Item{Event: custom("x")}, nil)
		select {
		case <-goOn:
			yield(chat.Item{Event: finished}, nil)
		case <-ctx.Done():
		}
	}}
	ctx, cancel := context.WithCancel(t.Context())
	r, err := chat.Start(ctx, chat.Request{RunID: "r", ThreadID: "t", Adapter: ad, Use: []chat.Middleware{durable(s)}})
	if err != nil {
		t.Fatal(err)
	}
	// What opens the run is stored when Start returns, before anything is set up.
	if got, err := s.Log.Snapshot(t.Context(), "r"); err != nil || len(got) < 2 || show(got[0].Event) != "RUN_STARTED" || show(got[1].Event) != "run.accepted" {
		t.Errorf("log %v %v", got, err)
	}
	next(t, r, "x") // leaves the loop
	cancel()        // and the request is over
	if rec := record(t, s, "r"); rec.Status != store.Running {
		t.Errorf("record %+v", rec)
	}
	close(goOn)
	equal(t, collect(t, r), []string{"x", "RUN_FINISHED"})
	if rec := record(t, s, "r"); rec.Status != store.Completed || rec.Owner != "" {
		t.Errorf("record %+v", rec)
	}
	if o := outcome(t, r); o.Kind != chat.Finished {
		t.Errorf("outcome %+v", o)
	}
}

func TestKnownRunIDStartsNoSecondAgent(t *testing.T) {
	s := memstore.New(memstore.Options{})
	var p trace
	req := chat.Request{RunID: "r", ThreadID: "t", Adapter: hangs(custom("x")), Use: []chat.Middleware{durable(s), p.probe("a")}}
	runs := make([]*chat.Run, 50)
	var wg sync.WaitGroup
	for i := range runs {
		wg.Go(func() {
			var err error
			if runs[i], err = chat.Start(t.Context(), req); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	joined := 0
	var joiner *chat.Run
	for _, r := range runs {
		next(t, r, "x")
		if r.Joined() {
			joined++
			joiner = r
			if err := r.Emit(t.Context(), custom("y")); !errors.Is(err, chat.ErrEnded) {
				t.Errorf("a reader emits: %v", err)
			}
		}
	}
	if joined != len(runs)-1 {
		t.Errorf("%d joined", joined)
	}
	// A reader's cancel goes by way of the store.
	if err := joiner.Cancel("enough"); err != nil {
		t.Fatal(err)
	}
	for _, r := range runs {
		if o := outcome(t, r); o.Kind != chat.Canceled || !strings.Contains(o.Err.Error(), "enough") {
			t.Errorf("outcome %+v", o)
		}
	}
	equal(t, collect(t, joiner), []string{"x", "RUN_ERROR aborted"})
	equal(t, p.get(), []string{"setup a", "event a x", "done a canceled"})
	rec := record(t, s, "r")
	if rec.Status != store.Aborted || rec.CloseReason != "cancelled" || rec.CancelReason != "enough" {
		t.Errorf("record %+v", rec)
	}

	req.ThreadID = "another"
	_, err := chat.Start(t.Context(), req)
	var c *store.RunConflictError
	if !errors.As(err, &c) {
		t.Errorf("another thread: %v", err)
	}
	req.ThreadID, req.Tenant = "t", "another"
	if _, err := chat.Start(t.Context(), req); !errors.As(err, &c) {
		t.Errorf("another tenant: %v", err)
	}
}

func TestExclusiveThread(t *testing.T) {
	s := memstore.New(memstore.Options{})
	req := chat.Request{RunID: "r1", ThreadID: "t", Adapter: hangs(), Use: []chat.Middleware{durable(s)}, Exclusive: true}
	r := start(t, req)
	req.RunID = "r2"
	_, err := chat.Start(t.Context(), req)
	var b *store.BusyError
	if !errors.As(err, &b) || b.RunID != "r1" {
		t.Errorf("got %v", err)
	}
	_ = r.Cancel("")
	outcome(t, r)
	r = start(t, req)
	_ = r.Cancel("")
	outcome(t, r)
}

func TestFenced(t *testing.T) {
	s := memstore.New(memstore.Options{})
	var p trace
	causes := make(chan error, 1)
	goOn := make(chan struct{})
	ad := fake{stream: func(ctx context.Context, _ *chat.Run, yield func(chat.Item, error) bool) {
		yield(chat.Item{Event: custom("x")}, nil)
		<-goOn
		for i := 0; ctx.Err() == nil; i++ {
			yield(chat.Item{Event: custom(fmt.Sprint("zombie", i))}, nil)
		}
		causes <- context.Cause(ctx)
		yield(chat.Item{Event: finished}, nil)
	}}
	d := chat.Durable(chat.Durability{Runs: s.Runs, Log: s.Log, Owner: "a"})
	r := start(t, chat.Request{RunID: "r", Adapter: ad, Use: []chat.Middleware{d, p.probe("m")}})
	next(t, r, "x")
	c, err := s.Runs.Claim(t.Context(), "r", store.ClaimOptions{Owner: "a", Force: true})
	if err != nil {
		t.Fatal(err)
	}
	close(goOn)
	if o := outcome(t, r); o.Kind != chat.Fenced || !errors.Is(o.Err, store.ErrFenced) || o.Terminal != nil {
		t.Errorf("outcome %+v", o)
	}
	if err := <-causes; !errors.Is(err, store.ErrFenced) {
		t.Errorf("cause %v", err)
	}
	if got := p.get(); got[len(got)-1] != "done m fenced" {
		t.Errorf("calls %v", got)
	}
	// It wrote nothing any more, and the successor can.
	log, _ := s.Log.Snapshot(t.Context(), "r")
	if len(log) != 3 {
		t.Errorf("%d events in the log", len(log))
	}
	if _, err := s.Log.Append(t.Context(), c, store.Batch{No: 1, Events: []store.Event{{Event: custom("mine")}}}); err != nil {
		t.Error(err)
	}
}

func TestLostLeaseIsNoticedWithoutWriting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memstore.New(memstore.Options{})
		d := chat.Durable(chat.Durability{Runs: s.Runs, Log: s.Log, Owner: "a"})
		r := start(t, chat.Request{RunID: "r", Adapter: hangs(), Use: []chat.Middleware{d}})
		time.Sleep(time.Hour) // renewed all along
		if _, err := s.Runs.Claim(t.Context(), "r", store.ClaimOptions{Owner: "b"}); !errors.Is(err, store.ErrConflict) {
			t.Fatalf("the lease was not kept: %v", err)
		}
		if _, err := s.Runs.Claim(t.Context(), "r", store.ClaimOptions{Owner: "a", Force: true}); err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		if o := outcome(t, r); o.Kind != chat.Fenced || time.Since(began) > 5*time.Second {
			t.Errorf("outcome %+v after %v", o, time.Since(began))
		}
	})
}

func TestDetach(t *testing.T) {
	for _, cause := range []error{chat.ErrDetached, chat.ErrShutdown} {
		s := memstore.New(memstore.Options{})
		var p trace
		r := start(t, chat.Request{RunID: "r", Adapter: hangs(custom("x")), Use: []chat.Middleware{durable(s), p.probe("m")}})
		next(t, r, "x")
		r.Detach(cause)
		if o := outcome(t, r); o.Kind != chat.Detached || !errors.Is(o.Err, cause) || o.Terminal != nil {
			t.Errorf("outcome %+v", o)
		}
		equal(t, p.get()[len(p.get())-1], "done m detached")
		// The run is open, and another host can have it at once.
		if rec := record(t, s, "r"); rec.Status != store.Running || rec.LastSeq != 3 {
			t.Errorf("record %+v", rec)
		}
		if _, err := s.Runs.Claim(t.Context(), "r", store.ClaimOptions{Owner: "b"}); err != nil {
			t.Error(err)
		}
	}
	t.Run("after the agent's end there is nothing to hand over", func(t *testing.T) {
		s := memstore.New(memstore.Options{})
		ad := fake{stream: func(ctx context.Context, r *chat.Run, yield func(chat.Item, error) bool) {
			yield(chat.Item{Event: finished}, nil)
			r.Detach(chat.ErrShutdown)
			<-ctx.Done()
		}}
		r := start(t, chat.Request{RunID: "r", Adapter: ad, Use: []chat.Middleware{durable(s)}})
		equal(t, collect(t, r), []string{"RUN_FINISHED"})
	})
	t.Run("a run in memory is cancelled", func(t *testing.T) {
		r := start(t, chat.Request{Adapter: hangs()})
		r.Detach(chat.ErrShutdown)
		if o := outcome(t, r); o.Kind != chat.Canceled {
			t.Errorf("outcome %+v", o)
		}
	})
}

// Coordinates are given to what comes out of the hooks, per journal record;
// what is emitted has none.
func TestCoordinates(t *testing.T) {
	s := memstore.New(memstore.Options{})
	hook := chat.Middleware{Event: func(ctx context.Context, r *chat.Run, ev event.Event) ([]event.Event, error) {
		switch show(ev) {
		case "double":
			return []event.Event{custom("d1"), custom("d2")}, nil
		case "drop":
			return nil, nil
		case "live":
			return []event.Event{ev}, r.Emit(ctx, custom("emitted"))
		}
		return []event.Event{ev}, nil
	}}
	ad := fake{stream: func(ctx context.Context, r *chat.Run, yield func(chat.Item, error) bool) {
		for _, it := range []chat.Item{
			{Event: event.RunStarted{}, Off: 10},
			{Event: custom("a"), Off: 10},
			{Event: custom("double"), Off: 20},
			{Event: custom("b"), Off: 20},
			{Event: custom("drop"), Off: 30},
			{Event: custom("diff")},
			{Event: custom("live"), Off: 40},
			{Event: event.TextMessageStart{MessageID: "m", Role: "assistant"}, Off: 41},
			{Event: finished, Off: 50},
			{Event: custom("file.changed")},
		} {
			yield(it, nil)
		}
	}}
	r := start(t, chat.Request{RunID: "r", Adapter: ad, Use: []chat.Middleware{durable(s), hook}})
	outcome(t, r)
	log, err := s.Log.Snapshot(t.Context(), "r")
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range log {
		pos := "-"
		if e.Pos != nil {
			pos = fmt.Sprintf("%d:%d", e.Pos.Off, e.Pos.Idx)
			if want := event.Fingerprint(e.Event); string(e.Print) != string(want[:]) {
				t.Errorf("%s has another fingerprint", show(e.Event))
			}
		}
		got = append(got, pos+" "+show(e.Event))
	}
	equal(t, got, []string{"- RUN_STARTED", "- run.accepted", "10:0 a", "20:0 d1", "20:1 d2", "20:2 b", "- diff",
		"40:0 live", "- emitted", "41:0 TEXT_MESSAGE_START", "- file.changed", "50:0 TEXT_MESSAGE_END", "50:1 RUN_FINISHED"})

	t.Run("they never go back", func(t *testing.T) {
		r := start(t, chat.Request{Adapter: fake{stream: func(_ context.Context, _ *chat.Run, yield func(chat.Item, error) bool) {
			_ = yield(chat.Item{Event: custom("a"), Off: 2}, nil) && yield(chat.Item{Event: custom("b"), Off: 1}, nil)
		}}})
		equal(t, collect(t, r), []string{"a", "RUN_ERROR internal"})
	})
}

func TestSandboxRunNeedsItsExit(t *testing.T) {
	for _, tt := range []struct {
		name string
		exit *store.Exit
		want store.Status
	}{
		{"verified", &store.Exit{Code: 0, Off: 9, Verified: true, OK: true}, store.Completed},
		{"none", nil, store.Running},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := memstore.New(memstore.Options{})
			ad := journaled{fake{stream: func(_ context.Context, r *chat.Run, yield func(chat.Item, error) bool) {
				if tt.exit != nil {
					r.Exited(*tt.exit)
				}
				yield(chat.Item{Event: finished}, nil)
			}}}
			r := start(t, chat.Request{RunID: "r", Adapter: ad, Use: []chat.Middleware{durable(s)}})
			o := outcome(t, r)
			rec := record(t, s, "r")
			if tt.exit == nil {
				// Nothing may call it completed: it has failed, and says so.
				if o.Kind != chat.Failed || rec.Status != store.Failed {
					t.Errorf("outcome %+v, record %+v", o, rec)
				}
				return
			}
			if o.Kind != chat.Finished || rec.Status != tt.want || rec.Pos.Off != 9 || rec.Exit == nil {
				t.Errorf("outcome %+v, record %+v", o, rec)
			}
		})
	}
}

type journaled struct{ fake }

func (journaled) Journaled() bool { return true }

// flaky is a log that can't be reached now and then; what was written may have
// been written although the answer was lost.
type flaky struct {
	store.Log
	mu   sync.Mutex
	n    int
	down bool
}

func (f *flaky) trouble() (before, after bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.n++
	return f.down || f.n%3 == 1, f.n%3 == 2
}

func (f *flaky) Append(ctx context.Context, c store.Claim, b store.Batch) ([]event.Offset, error) {
	if b.No == 1 { // Start doesn't wait
		return f.Log.Append(ctx, c, b)
	}
	before, after := f.trouble()
	if before {
		return nil, fmt.Errorf("connect: %w", store.ErrUnavailable)
	}
	o, err := f.Log.Append(ctx, c, b)
	if after {
		return nil, fmt.Errorf("answer lost: %w", store.ErrUnavailable)
	}
	return o, err
}

func (f *flaky) Finish(ctx context.Context, c store.Claim, fin store.Final) (store.Run, error) {
	before, after := f.trouble()
	if before {
		return store.Run{}, store.ErrUnavailable
	}
	r, err := f.Log.Finish(ctx, c, fin)
	if after {
		return store.Run{}, store.ErrUnavailable
	}
	return r, err
}

func TestUnreachableStoreLosesAndDoublesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memstore.New(memstore.Options{})
		f := &flaky{Log: s.Log}
		var want []string
		ad := fake{stream: func(_ context.Context, _ *chat.Run, yield func(chat.Item, error) bool) {
			for i := range 1000 {
				yield(chat.Item{Event: custom(fmt.Sprint(i)), Off: int64(i + 1)}, nil)
			}
			yield(chat.Item{Event: finished, Off: 1001}, nil)
		}}
		for i := range 1000 {
			want = append(want, fmt.Sprint(i))
		}
		r := start(t, chat.Request{RunID: "r", Adapter: ad, Use: []chat.Middleware{chat.Durable(chat.Durability{Runs: s.Runs, Log: f})}})
		equal(t, collect(t, r), append(want, "RUN_FINISHED"))
		outcome(t, r)
	})
}

func TestStoreThatStaysAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memstore.New(memstore.Options{})
		f := &flaky{Log: s.Log, down: true}
		r := start(t, chat.Request{RunID: "r", Adapter: hangs(custom("x")), Use: []chat.Middleware{chat.Durable(chat.Durability{Runs: s.Runs, Log: f})}})
		began := time.Now()
		o := outcome(t, r)
		if o.Kind != chat.Detached || !errors.Is(o.Err, store.ErrUnavailable) || time.Since(began) > 11*time.Minute {
			t.Errorf("outcome %+v after %v", o, time.Since(began))
		}
		if rec := record(t, s, "r"); rec.Status != store.Running {
			t.Errorf("record %+v", rec)
		}
	})
}

func TestPersist(t *testing.T) {
	user := event.Message{ID: "u", Role: "user", Content: event.Text("fix it")}
	turn := []event.Event{
		event.ReasoningMessageStart{MessageID: "r", Role: "reasoning"}, event.ReasoningMessageEnd{MessageID: "r"},
		event.TextMessageStart{MessageID: "m", Role: "assistant"}, event.TextMessageContent{MessageID: "m", Delta: "I "},
		event.TextMessageContent{MessageID: "m", Delta: "look"}, event.TextMessageEnd{MessageID: "m"},
		event.ToolCallStart{ToolCallID: "c", ToolCallName: "Bash"}, event.ToolCallArgs{ToolCallID: "c", Delta: `{"command":`},
		event.ToolCallArgs{ToolCallID: "c", Delta: `"ls"}`}, event.ToolCallEnd{ToolCallID: "c"},
		event.ToolCallResult{MessageID: "res", ToolCallID: "c", Content: "a.go"}, custom("noise"),
	}
	want := []event.Message{
		user,
		{ID: "m", Role: "assistant", Content: event.Text("I look")},
		{ID: "c", Role: "assistant", ToolCalls: []event.ToolCall{{ID: "c", Type: "function",
			Function: event.ToolFunction{Name: "Bash", Arguments: `{"command":"ls"}`}, Metadata: json.RawMessage(`{"sandboxObserved":true}`)}}},
		{ID: "res", Role: "tool", ToolCallID: "c", Content: event.Text("a.go")},
	}
	elsewhere := memstore.New(memstore.Options{})
	for _, same := range []bool{true, false} {
		t.Run(fmt.Sprintf("same database %v", same), func(t *testing.T) {
			s := memstore.New(memstore.Options{})
			keep := elsewhere
			if same {
				keep = s
			}
			thread := store.Thread{ID: fmt.Sprint("t", same)}
			saved := func() []event.Message {
				m, err := keep.Messages.Load(t.Context(), thread)
				if err != nil {
					t.Fatal(err)
				}
				return m
			}
			run := func(id string, msgs []event.Message, ad chat.Adapter, more ...chat.Middleware) *chat.Run {
				return start(t, chat.Request{RunID: id, ThreadID: thread.ID, Messages: msgs, Adapter: ad,
					Use: append([]chat.Middleware{durable(s), chat.Persist(keep.Messages, keep.Interrupts)}, more...)})
			}
			// The user's turn is there while the agent works; a failed run leaves it so.
			r := run("r1", []event.Message{user}, hangs(append(text("x", "lost"), custom("sync"))...))
			next(t, r, "sync")
			equal(t, saved(), []event.Message{user})
			_ = r.Cancel("")
			outcome(t, r)
			equal(t, saved(), []event.Message{user})

			outcome(t, run("r2", []event.Message{user}, says(append(turn, finished)...)))
			equal(t, saved(), want)

			// No messages: the stored thread goes on.
			ask := event.RunFinished{Outcome: &event.Outcome{Type: "interrupt", Interrupts: []json.RawMessage{[]byte(`{"id":"i1","reason":"ask"}`)}}}
			var got []event.Message
			peek := chat.Middleware{Setup: func(_ context.Context, r *chat.Run) error { got = r.Request().Messages; return nil }}
			outcome(t, run("r3", nil, says(append(text("m3", "may I?"), ask)...), peek))
			equal(t, got, want)
			equal(t, saved(), append(want, event.Message{ID: "m3", Role: "assistant", Content: event.Text("may I?")}))
			is, err := keep.Interrupts.Pending(t.Context(), thread)
			if err != nil || len(is) != 1 || is[0].ID != "i1" || is[0].RunID != "r3" {
				t.Errorf("pending %+v %v", is, err)
			}
			if rec := record(t, s, "r3"); rec.Status != store.Interrupted {
				t.Errorf("record %+v", rec)
			}
		})
	}
	t.Run("in one transaction, a run that fails at its end stores nothing", func(t *testing.T) {
		s := memstore.New(memstore.Options{})
		bad := chat.Middleware{Name: "bad", Done: func(context.Context, *chat.Run, chat.Outcome) error { return errors.New("no") }}
		outcome(t, start(t, chat.Request{RunID: "r", ThreadID: "t", Messages: []event.Message{user}, Adapter: says(append(turn, finished)...),
			Use: []chat.Middleware{bad, durable(s), chat.Persist(s.Messages, s.Interrupts)}}))
		m, _ := s.Messages.Load(t.Context(), store.Thread{ID: "t"})
		equal(t, m, []event.Message{user})
	})
}

func TestTranscript(t *testing.T) {
	var during []event.Message
	ad := fake{stream: func(ctx context.Context, run *chat.Run, yield func(chat.Item, error) bool) {
		for _, ev := range []event.Event{
			event.TextMessageStart{MessageID: "empty", Role: "assistant"}, event.TextMessageEnd{MessageID: "empty"},
			event.TextMessageStart{MessageID: "m", Role: "assistant"}, event.TextMessageContent{MessageID: "m", Delta: "a"}, event.TextMessageEnd{MessageID: "m"},
			event.ToolCallStart{ToolCallID: "c", ToolCallName: "Bash"}, event.ToolCallArgs{ToolCallID: "c", Delta: "{"},
		} {
			yield(chat.Item{Event: ev}, nil)
		}
		next(t, run, "TOOL_CALL_ARGS")
		during = run.Transcript()
		for _, ev := range []event.Event{
			event.ToolCallArgs{ToolCallID: "c", Delta: "}"}, event.ToolCallEnd{ToolCallID: "c"},
			event.ToolCallResult{MessageID: "r1", ToolCallID: "c", Content: "one"},
			event.ToolCallResult{MessageID: "r2", ToolCallID: "c", Content: "again"},
			event.ToolCallStart{ToolCallID: "c", ToolCallName: "Bash"}, event.ToolCallArgs{ToolCallID: "c", Delta: "[]"}, event.ToolCallEnd{ToolCallID: "c"},
			event.TextMessageStart{MessageID: "m", Role: "assistant"}, event.TextMessageContent{MessageID: "m", Delta: "b"}, event.TextMessageEnd{MessageID: "m"},
			event.ToolCallStart{ToolCallID: "open", ToolCallName: "Bash"},
			finished,
		} {
			yield(chat.Item{Event: ev}, nil)
		}
	}}
	s := memstore.New(memstore.Options{})
	r := start(t, chat.Request{RunID: "r", Adapter: ad, Use: []chat.Middleware{durable(s)}})
	outcome(t, r)
	say := func(ms []event.Message) (out []string) {
		for _, m := range ms {
			args := ""
			for _, c := range m.ToolCalls {
				args += c.Function.Arguments
			}
			out = append(out, m.ID+" "+m.Content.String()+args)
		}
		return out
	}
	// A call shows when its arguments are complete.
	equal(t, say(during), []string{"m a"})
	// A call or a result that is told twice is there once; a message that goes on is one.
	equal(t, say(r.Transcript()), []string{"m ab", "c {}", "r1 one", "open ", "result-open " + event.Interrupted})
}

func TestObservedCalls(t *testing.T) {
	mine := event.ToolCall{ID: "h", Function: event.ToolFunction{Name: "host"}}
	theirs := event.ToolCall{ID: "s", Metadata: json.RawMessage(`{"sandboxObserved":true}`)}
	for _, tt := range []struct {
		meta string
		want bool
	}{{`{"sandboxObserved":true}`, true}, {`{"sandboxObserved":"true"}`, false}, {`{"sandboxObserved":1}`, false}, {`null`, false}, {``, false}, {`[]`, false}} {
		if got := chat.IsObserved(event.ToolCall{Metadata: json.RawMessage(tt.meta)}); got != tt.want {
			t.Errorf("%s: %v", tt.meta, got)
		}
	}
	msgs := []event.Message{
		{ID: "1", Role: "user"},
		{ID: "2", Role: "assistant", ToolCalls: []event.ToolCall{theirs}},
		{ID: "3", Role: "tool", ToolCallID: "s"},
		{ID: "4", Role: "assistant", ToolCalls: []event.ToolCall{mine, theirs}},
		{ID: "5", Role: "tool", ToolCallID: "h"},
		{ID: "6", Role: "assistant", Content: event.Text("done"), ToolCalls: []event.ToolCall{{ID: "u", Metadata: theirs.Metadata}}},
		{ID: "7", Role: "tool", ToolCallID: "u"},
	}
	var ids []string
	for _, m := range chat.WithoutObserved(msgs) {
		ids = append(ids, fmt.Sprint(m.ID, " ", len(m.ToolCalls)))
	}
	if len(msgs[6-1].ToolCalls) != 1 {
		t.Error("the caller's messages were changed")
	}
	if d := cmp.Diff([]string{"1 0", "4 2", "5 0", "6 0"}, ids); d != "" {
		t.Error(d)
	}
}
