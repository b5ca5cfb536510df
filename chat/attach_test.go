package chat_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/aisandbox-go/aisandbox/chat"
	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/store"
	"github.com/aisandbox-go/aisandbox/store/memstore"
)

// journalOf is an adapter that says the items of a journal, from the first one.
// After so many of them, if not negative, it waits for its end.
func journalOf(stop int, items ...chat.Item) journaled {
	return journaled{fake{stream: func(ctx context.Context, r *chat.Run, yield func(chat.Item, error) bool) {
		for i, it := range items {
			if i == stop {
				<-ctx.Done()
				return
			}
			if _, ok := it.Event.(event.RunFinished); ok {
				r.Exited(store.Exit{Off: it.Off, Verified: true, OK: true})
			}
			if !yield(it, nil) {
				return
			}
		}
	}}}
}

// story is a turn with everything that a transcript keeps.
func story() (items []chat.Item) {
	add := func(off int64, evs ...event.Event) {
		for _, ev := range evs {
			items = append(items, chat.Item{Event: ev, Off: off})
		}
	}
	add(10, text("m1", "I look")...)
	add(20, event.ToolCallStart{ToolCallID: "c", ToolCallName: "Bash"}, event.ToolCallArgs{ToolCallID: "c", Delta: `{"command":"ls"}`}, event.ToolCallEnd{ToolCallID: "c"})
	add(30, event.ToolCallResult{MessageID: "res", ToolCallID: "c", Content: "a.go"})
	add(40, event.ReasoningMessageStart{MessageID: "r", Role: "reasoning"})
	add(50, event.ReasoningMessageContent{MessageID: "r", Delta: "hm"})
	add(60, event.ReasoningMessageEnd{MessageID: "r"})
	add(70, event.TextMessageStart{MessageID: "m2", Role: "assistant"}, event.TextMessageContent{MessageID: "m2", Delta: "It is "})
	add(80, event.TextMessageContent{MessageID: "m2", Delta: "there"}, event.TextMessageEnd{MessageID: "m2"})
	items = append(items, chat.Item{Event: custom("diff")})
	add(90, finished)
	return items
}

// noisy is a middleware that adds live events to some of the agent's.
func noisy(seen *[]string) chat.Middleware {
	return chat.Middleware{Name: "noisy", Event: func(ctx context.Context, r *chat.Run, ev event.Event) ([]event.Event, error) {
		*seen = append(*seen, fmt.Sprintf("%s %v", show(ev), r.Replaying()))
		if _, ok := ev.(event.TextMessageContent); ok {
			return []event.Event{ev}, r.Emit(ctx, custom("seen"))
		}
		return []event.Event{ev}, nil
	}}
}

func logged(log []store.Stored) (out []string) {
	for _, e := range log {
		pos := "live"
		if e.Pos != nil {
			pos = fmt.Sprintf("%d:%d", e.Pos.Off, e.Pos.Idx)
		}
		out = append(out, pos+" "+show(e.Event))
	}
	return out
}

func attachRequest(s store.Set, ad chat.Adapter, use ...chat.Middleware) chat.Request {
	return chat.Request{
		RunID: "r", ThreadID: "t", Adapter: ad, Messages: []event.Message{{ID: "u", Role: "user", Content: event.Text("fix it")}},
		Use: append([]chat.Middleware{durable(s), chat.Persist(s.Messages, s.Interrupts)}, use...),
	}
}

// detachAfter drives a run up to an item and then leaves it.
func detachAfter(t *testing.T, s store.Set, stop int, items []chat.Item, use ...chat.Middleware) {
	t.Helper()
	r := start(t, attachRequest(s, journalOf(stop, items...), use...))
	synctest.Wait()
	r.Detach(chat.ErrShutdown)
	if o := outcome(t, r); o.Kind != chat.Detached {
		t.Fatalf("outcome %+v", o)
	}
}

func attach(t *testing.T, req chat.Request) *chat.Run {
	t.Helper()
	req.Attach = true
	return start(t, req)
}

// Wherever a driver stops, the next one goes on: the log and the conversation are
// those of a run that nobody disturbed (T9, T10).
func TestTakeoverAnywhere(t *testing.T) {
	items := story()
	var want []string
	var thread []event.Message
	synctest.Test(t, func(t *testing.T) {
		s := memstore.New(memstore.Options{})
		r := start(t, attachRequest(s, journalOf(-1, items...), noisy(new([]string))))
		if o := outcome(t, r); o.Kind != chat.Finished {
			t.Fatalf("golden: %+v", o)
		}
		log, _ := s.Log.Snapshot(t.Context(), "r")
		want = logged(log)
		thread, _ = s.Messages.Load(t.Context(), store.Thread{ID: "t"})
	})
	if len(thread) != 5 {
		t.Fatalf("thread %+v", thread)
	}
	for stop := range items {
		for again := range 2 {
			synctest.Test(t, func(t *testing.T) {
				s := memstore.New(memstore.Options{})
				detachAfter(t, s, stop, items, noisy(new([]string)))
				if again > 0 { // the second driver stops, too
					r := attach(t, attachRequest(s, journalOf(min(stop+2, len(items)-1), items...), noisy(new([]string))))
					synctest.Wait()
					r.Detach(chat.ErrShutdown)
					outcome(t, r)
				}
				var seen []string
				r := attach(t, attachRequest(s, journalOf(-1, items...), noisy(&seen)))
				if !r.Attached() || r.Joined() {
					t.Error("not attached")
				}
				if o := outcome(t, r); o.Kind != chat.Finished {
					t.Fatalf("stop at %d: %+v", stop, o)
				}
				log, _ := s.Log.Snapshot(t.Context(), "r")
				if d := cmp.Diff(want, logged(log)); d != "" {
					t.Errorf("stop at %d (-want +got):\n%s", stop, d)
				}
				got, _ := s.Messages.Load(t.Context(), store.Thread{ID: "t"})
				if d := cmp.Diff(thread, got); d != "" {
					t.Errorf("stop at %d: thread\n%s", stop, d)
				}
				// The hooks see everything once more, and are told so.
				replayed := 0
				for _, x := range seen {
					if strings.HasSuffix(x, "true") {
						replayed++
					}
				}
				n := stop
				if again > 0 {
					n = min(stop+2, len(items)-1)
				}
				if len(items) > n && items[n].Off == 0 { // the live one is in the log, too
					n--
				}
				if stop > 0 && replayed < n-2 || replayed > n+1 {
					t.Errorf("stop at %d: %d events were told to be replayed: %q", stop, replayed, seen)
				}
				all := make([]event.Event, len(log))
				for i, e := range log {
					all[i] = e.Event
				}
				if err := event.Validate(all); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

// A replay that says something else ends the run, and nothing is written in
// between.
func TestDivergence(t *testing.T) {
	items := story()
	change := func(f func(items []chat.Item) []chat.Item) []chat.Item { return f(slices.Clone(items)) }
	for name, replay := range map[string][]chat.Item{
		"at the start": change(func(i []chat.Item) []chat.Item {
			i[0].Event = event.TextMessageStart{MessageID: "x", Role: "assistant"}
			return i
		}),
		"in the middle": change(func(i []chat.Item) []chat.Item {
			i[4].Event = event.ToolCallArgs{ToolCallID: "c", Delta: `{"command":"rm"}`}
			return i
		}),
		"in the last one":     change(func(i []chat.Item) []chat.Item { i[9].Event = event.ReasoningMessageEnd{MessageID: "x"}; return i }),
		"at another place":    change(func(i []chat.Item) []chat.Item { i[1].Off = 11; i[2].Off = 11; return i }),
		"one less":            change(func(i []chat.Item) []chat.Item { return slices.Delete(i, 6, 7) }),
		"one more":            change(func(i []chat.Item) []chat.Item { return slices.Insert(i, 3, chat.Item{Event: custom("x"), Off: 15}) }),
		"short":               append(slices.Clone(items[:3]), items[len(items)-1]),
		"nothing but the end": {items[len(items)-1]},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := memstore.New(memstore.Options{})
				detachAfter(t, s, 10, items)
				before, _ := s.Log.Snapshot(t.Context(), "r")
				r := attach(t, attachRequest(s, journalOf(-1, replay...)))
				o := outcome(t, r)
				var d *chat.DivergedError
				if o.Kind != chat.Failed || !errors.As(o.Err, &d) || d.RunID != "r" {
					t.Fatalf("outcome %+v", o)
				}
				log, _ := s.Log.Snapshot(t.Context(), "r")
				if d := cmp.Diff(logged(before), logged(log[:len(before)])); d != "" {
					t.Errorf("what was stored changed:\n%s", d)
				}
				// What ends the log are ends of what was open, and the error.
				for _, e := range log[len(before):] {
					switch ev := e.Event.(type) {
					case event.TextMessageEnd, event.ReasoningMessageEnd, event.ToolCallEnd, event.ToolCallResult:
					case event.RunError:
						if ev.Code != "replay_diverged" {
							t.Errorf("code %q", ev.Code)
						}
					default:
						t.Errorf("%s was written", show(ev))
					}
				}
				var all []event.Event
				for _, e := range log {
					all = append(all, e.Event)
				}
				if err := event.Validate(all); err != nil {
					t.Error(err)
				}
				if rec := record(t, s, "r"); rec.Status != store.Failed || !rec.JournalHold || rec.Error.Code != "replay_diverged" {
					t.Errorf("record %+v", rec)
				}
			})
		})
	}
}

// Live events anywhere, and as many as there are, don't disturb the alignment.
func TestTakeoverOfManyLiveEvents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memstore.New(memstore.Options{})
		flood := chat.Middleware{Event: func(ctx context.Context, r *chat.Run, ev event.Event) ([]event.Event, error) {
			for i := range 1000 {
				if err := r.Emit(ctx, custom(fmt.Sprint("live", i))); err != nil {
					return nil, err
				}
			}
			return []event.Event{ev}, nil
		}}
		items := story()
		detachAfter(t, s, 3, items, flood)
		before, _ := s.Log.Snapshot(t.Context(), "r")
		if len(before) != 2+3+3000 {
			t.Fatalf("%d events", len(before))
		}
		// What comes while it replays waits, and is not lost.
		var run *chat.Run
		early := chat.Middleware{Setup: func(ctx context.Context, r *chat.Run) error { return r.Emit(ctx, custom("resumed")) }}
		run = attach(t, attachRequest(s, journalOf(-1, items...), flood, early))
		if o := outcome(t, run); o.Kind != chat.Finished {
			t.Fatalf("%+v", o)
		}
		log, _ := s.Log.Snapshot(t.Context(), "r")
		rest := logged(log[len(before):])
		if rest[0] != "live resumed" || !slices.Contains(rest, "20:0 TOOL_CALL_START") || slices.Contains(rest, "10:0 TEXT_MESSAGE_START") {
			t.Errorf("after the prefix: %q", rest[:3])
		}
	})
}

func TestAttachIsRefused(t *testing.T) {
	s := memstore.New(memstore.Options{})
	items := story()
	req := attachRequest(s, journalOf(-1, items...))
	req.Attach = true
	_, err := chat.Start(t.Context(), req)
	if !errors.Is(err, store.ErrNotFound) {
		t.Errorf("unknown run: %v", err)
	}
	req.Attach = false
	req.Adapter = journalOf(0, items...)
	r := start(t, req)
	req.Attach = true
	var held *store.ClaimError
	if _, err := chat.Start(t.Context(), req); !errors.As(err, &held) || held.Reason != store.ClaimHeld {
		t.Errorf("driven by another: %v", err)
	}
	other := req
	other.ThreadID = "other"
	var conflict *store.RunConflictError
	if _, err := chat.Start(t.Context(), other); !errors.As(err, &conflict) {
		t.Errorf("another thread: %v", err)
	}
	other.ThreadID = ""
	if _, err := chat.Start(t.Context(), other); !errors.Is(err, chat.ErrDurableThreadIDRequired) {
		t.Errorf("no thread: %v", err)
	}
	var unsupported *chat.AttachError
	other = req
	other.Adapter = says(finished)
	if _, err := chat.Start(t.Context(), other); !errors.As(err, &unsupported) || store.Code(err, "") != "durable_attach_not_supported" {
		t.Errorf("no journal: %v", err)
	}
	var bad *chat.RequestError
	other = req
	other.Use = nil
	if _, err := chat.Start(t.Context(), other); !errors.As(err, &bad) || bad.Field != "Attach" {
		t.Errorf("not durable: %v", err)
	}
	_ = r.Cancel("")
	outcome(t, r)
	if _, err := chat.Start(t.Context(), req); !errors.As(err, &held) || held.Reason != store.ClaimTerminal {
		t.Errorf("ended: %v", err)
	}
}

// A cancel reaches the agent of a run that was taken over only when the agent can
// be reached: not while the Setups still look for it.
func TestCancelOfATakenOverRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memstore.New(memstore.Options{})
		items := story()
		detachAfter(t, s, 3, items)
		if err := s.Runs.RequestCancel(t.Context(), "r", "stop button"); err != nil {
			t.Fatal(err)
		}
		req := attachRequest(s, journalOf(5, items...))
		req.Attach = true
		var held *store.ClaimError
		if _, err := chat.Start(t.Context(), req); !errors.As(err, &held) || held.Reason != store.ClaimCanceled {
			t.Fatalf("a viewer revives it: %v", err)
		}
		var setup error
		asked := false
		slow := chat.Middleware{Setup: func(ctx context.Context, r *chat.Run) error {
			time.Sleep(time.Minute)
			setup = context.Cause(ctx)
			return nil
		}}
		ad := journaled{fake{stream: func(ctx context.Context, r *chat.Run, yield func(chat.Item, error) bool) {
			asked = true
			<-ctx.Done()
			for _, it := range items[:2] {
				yield(it, nil)
			}
		}}}
		req = attachRequest(s, ad, slow)
		req.Attach, req.Reaper = true, true
		r := start(t, req)
		if o := outcome(t, r); o.Kind != chat.Canceled || !strings.Contains(o.Err.Error(), "stop button") {
			t.Fatalf("%+v", o)
		}
		if setup != nil || !asked {
			t.Errorf("the Setup was ended by %v; the adapter was asked: %v", setup, asked)
		}
		if rec := record(t, s, "r"); rec.Status != store.Aborted {
			t.Errorf("record %+v", rec)
		}
	})
}

// The time that a run may take is the run's, not a driver's.
func TestTimeoutOfATakenOverRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memstore.New(memstore.Options{})
		items := story()
		req := attachRequest(s, journalOf(4, items...))
		req.Timeout = time.Minute
		began := time.Now()
		r := start(t, req)
		for range 3 {
			time.Sleep(15 * time.Second)
			r.Detach(chat.ErrShutdown)
			outcome(t, r)
			r = attach(t, req)
		}
		if o := outcome(t, r); !errors.Is(o.Err, chat.ErrBudget) || time.Since(began) > 61*time.Second || time.Since(began) < 59*time.Second {
			t.Errorf("%+v after %v", o, time.Since(began))
		}
	})
}

// An agent that can't be reached may be at work: the run stays open, unless its
// sandbox is gone for good.
func TestUnreachableAgent(t *testing.T) {
	for _, tt := range []struct {
		name   string
		err    error
		cancel bool
		want   chat.OutcomeKind
		status store.Status
	}{
		{"who knows", errors.New("engine is down"), false, chat.Detached, store.Running},
		{"who knows, cancelled", errors.New("engine is down"), true, chat.Detached, store.Running},
		{"gone", fmt.Errorf("x: %w", chat.ErrLost), false, chat.Failed, store.Failed},
		{"gone, cancelled", fmt.Errorf("x: %w", chat.ErrLost), true, chat.Canceled, store.Aborted},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := memstore.New(memstore.Options{})
				items := story()
				detachAfter(t, s, 4, items)
				if tt.cancel {
					if err := s.Runs.RequestCancel(t.Context(), "r", "stop"); err != nil {
						t.Fatal(err)
					}
				}
				ended := chat.OutcomeKind("")
				req := attachRequest(s, journalOf(-1, items...), chat.Middleware{Setup: func(_ context.Context, r *chat.Run) error {
					r.AfterEnd(func(_ context.Context, o chat.Outcome) { ended = o.Kind })
					return tt.err
				}})
				req.Attach, req.Reaper = true, tt.cancel
				o := outcome(t, start(t, req))
				rec := record(t, s, "r")
				if o.Kind != tt.want || ended != tt.want || rec.Status != tt.status {
					t.Errorf("outcome %+v, record %s", o, rec.Status)
				}
				if rec.Status == store.Running && rec.Owner != "" {
					t.Error("the claim was not given back")
				}
				if tt.want == chat.Failed && rec.Error.Code != "sandbox_lost" {
					t.Errorf("code %q", rec.Error.Code)
				}
				log, _ := s.Log.Snapshot(t.Context(), "r")
				var all []event.Event
				for _, e := range log {
					all = append(all, e.Event)
				}
				if rec.Status != store.Running {
					if err := event.Validate(all); err != nil {
						t.Error(err)
					}
				}
			})
		})
	}
}

// Its driver gone without a word, a run goes on elsewhere one lease later; after
// a graceful end at once.
func TestTakeoverLatency(t *testing.T) {
	for _, graceful := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			s := memstore.New(memstore.Options{})
			items := story()
			c := &counting{Runs: s.Runs}
			d := chat.Durable(chat.Durability{Runs: c, Log: s.Log, Owner: "a"})
			req := chat.Request{RunID: "r", ThreadID: "t", Adapter: journalOf(4, items...), Use: []chat.Middleware{d}}
			a := start(t, req)
			time.Sleep(7 * time.Second)
			died := time.Now()
			if graceful {
				a.Detach(chat.ErrShutdown)
			} else {
				c.away(true) // nothing of it reaches the store any more
			}
			req.Adapter, req.Attach = journalOf(-1, items...), true
			req.Use = []chat.Middleware{chat.Durable(chat.Durability{Runs: s.Runs, Log: s.Log, Owner: "b"})}
			var b *chat.Run
			for {
				var err error
				if b, err = chat.Start(t.Context(), req); err == nil {
					break
				}
				time.Sleep(50 * time.Millisecond)
			}
			if o := outcome(t, b); o.Kind != chat.Finished {
				t.Fatalf("%+v", o)
			}
			most := store.DefaultLease + time.Second
			if graceful {
				most = time.Second
			}
			if took := time.Since(died); took > most {
				t.Errorf("graceful %v: it took %v", graceful, took)
			}
			c.away(false)
			outcome(t, a)
		})
	}
}

func TestAbandon(t *testing.T) {
	for _, tt := range []struct {
		e    chat.Ending
		last string
	}{
		{chat.Ending{Status: store.Aborted}, "RUN_ERROR aborted"},
		{chat.Ending{Status: store.Failed}, "RUN_ERROR abandoned"},
		{chat.Ending{Status: store.Failed, Code: "never_launched", Message: "gone"}, "RUN_ERROR never_launched"},
	} {
		synctest.Test(t, func(t *testing.T) {
			s := memstore.New(memstore.Options{})
			detachAfter(t, s, 11, story()) // in the middle of a text
			if err := s.Runs.RequestCancel(t.Context(), "r", "x"); err != nil {
				t.Fatal(err)
			}
			d := chat.Durability{Runs: s.Runs, Log: s.Log}
			rec, err := chat.Abandon(t.Context(), d, "r", tt.e)
			if err != nil || rec.Status != tt.e.Status || rec.Error.Code == "" {
				t.Fatalf("%+v, %v", rec, err)
			}
			log, _ := s.Log.Snapshot(t.Context(), "r")
			var all []event.Event
			for _, e := range log {
				all = append(all, e.Event)
			}
			if err := event.Validate(all); err != nil {
				t.Error(err)
			}
			if got := show(all[len(all)-1]); got != tt.last {
				t.Errorf("last: %s", got)
			}
			var refused *store.ClaimError
			if _, err := chat.Abandon(t.Context(), d, "r", tt.e); !errors.As(err, &refused) {
				t.Errorf("twice: %v", err)
			}
		})
	}
	s := memstore.New(memstore.Options{})
	if _, err := chat.Abandon(t.Context(), chat.Durability{Runs: s.Runs, Log: s.Log}, "r", chat.Ending{Status: store.Completed}); err == nil {
		t.Error("abandoned as completed")
	}
}
