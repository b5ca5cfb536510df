package chat_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/aisandbox-go/aisandbox/chat"
	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/store"
	"github.com/aisandbox-go/aisandbox/store/memstore"
)

// anyEvent draws an event, most often one that makes no sense where it is.
func anyEvent(t *rapid.T) event.Event {
	id := rapid.SampledFrom([]string{"a", "b", ""}).Draw(t, "id")
	return rapid.SampledFrom([]event.Event{
		event.RunStarted{RunID: id, ThreadID: id},
		event.TextMessageStart{MessageID: id, Role: "assistant"},
		event.TextMessageStart{MessageID: id, Role: "tool"},
		event.TextMessageContent{MessageID: id, Delta: "x"},
		event.TextMessageEnd{MessageID: id},
		event.ReasoningStart{MessageID: id},
		event.ReasoningMessageStart{MessageID: id},
		event.ReasoningMessageContent{MessageID: id, Delta: "x"},
		event.ReasoningMessageEnd{MessageID: id},
		event.ReasoningEnd{MessageID: id},
		event.ToolCallStart{ToolCallID: id, ToolCallName: "Bash"},
		event.ToolCallArgs{ToolCallID: id, Delta: "{}"},
		event.ToolCallEnd{ToolCallID: id},
		event.ToolCallResult{MessageID: id, ToolCallID: id, Content: "x"},
		event.StepStarted{StepName: id},
		event.StepFinished{StepName: id},
		event.Custom{Name: "c"},
		event.Raw{Name: "NEW", JSON: []byte(`{"type":"NEW"}`)},
		event.RunFinished{RunID: id},
		event.RunFinished{Outcome: &event.Outcome{Type: "interrupt", Interrupts: []json.RawMessage{[]byte(`{"id":"i","reason":"r"}`)}}},
		event.RunFinished{Outcome: &event.Outcome{Type: "interrupt"}},
		event.RunFinished{Outcome: &event.Outcome{Type: "cancelled"}},
		event.RunError{Code: id},
		nil,
	}).Draw(t, "event")
}

// Whatever an adapter and the middlewares do, a run has one terminal event, the
// stream is legal, everybody is torn down once, and record and stream agree.
func TestAnythingEndsWell(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		type step struct {
			ev   event.Event
			kind int
		}
		var steps []step
		for range rapid.IntRange(0, 25).Draw(rt, "steps") {
			kind := rapid.IntRange(0, 40).Draw(rt, "kind")
			steps = append(steps, step{anyEvent(rt), kind})
		}
		ends := rapid.Bool().Draw(rt, "ends")
		isDurable := rapid.Bool().Draw(rt, "durable")
		leave := rapid.IntRange(0, 60).Draw(rt, "leave")
		fate := rapid.IntRange(0, 7).Draw(rt, "fate of Done and Setup")
		odd := rapid.IntRange(0, 12).Draw(rt, "hook")

		ad := fake{stream: func(ctx context.Context, r *chat.Run, yield func(chat.Item, error) bool) {
			for i, s := range steps {
				if ctx.Err() != nil && s.kind%2 == 0 {
					return
				}
				switch s.kind {
				case 0:
					panic("boom")
				case 1:
					yield(chat.Item{}, errors.New("no"))
					return
				case 2:
					_ = r.Cancel("stop")
				case 3:
					r.Detach(chat.ErrShutdown)
				case 4, 5, 6, 7, 8:
					_ = r.Emit(ctx, s.ev)
				default:
					if !yield(chat.Item{Event: s.ev, Off: int64(i+1) * int64(s.kind%2)}, nil) {
						return
					}
				}
			}
			if ends {
				yield(chat.Item{Event: finished}, nil)
			}
		}}
		setups, dones := make([]int, 3), make([]int, 3)
		var kinds []chat.OutcomeKind
		var use []chat.Middleware
		s := memstore.New(memstore.Options{})
		if isDurable {
			use = append(use, durable(s))
		}
		for i := range 3 {
			use = append(use, chat.Middleware{
				Setup: func(ctx context.Context, r *chat.Run) error {
					_ = r.Emit(ctx, custom("setup"))
					if fate == i {
						return errors.New("setup")
					}
					setups[i]++
					return nil
				},
				Event: func(ctx context.Context, r *chat.Run, ev event.Event) ([]event.Event, error) {
					if setups[i] == 0 || dones[i] > 0 {
						return nil, errors.New("an event outside of the middleware's life")
					}
					switch odd {
					case 3 * i:
						return nil, nil
					case 3*i + 1:
						return []event.Event{ev, event.RunError{Message: "hook"}, ev}, nil
					case 3*i + 2:
						return []event.Event{ev}, r.Emit(ctx, custom("hook"))
					}
					return []event.Event{ev}, nil
				},
				Done: func(ctx context.Context, r *chat.Run, o chat.Outcome) error {
					dones[i]++
					kinds = append(kinds, o.Kind)
					_ = r.Emit(ctx, custom("done"))
					if fate == 3+i {
						return errors.New("done")
					}
					return nil
				},
			})
		}
		r, err := chat.Start(t.Context(), chat.Request{RunID: "r", ThreadID: "t", Adapter: ad, Use: use})
		if err != nil {
			rt.Fatal(err)
		}
		n := 0
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		if isDurable {
			// A detached run's log stays open: its reader leaves with the driver.
			go func() {
				if _, err := r.Wait(ctx); err == nil {
					if rec, err := s.Runs.Get(ctx, "r"); err == nil && rec.Status == store.Running {
						cancel()
					}
				}
			}()
		}
		for _, err := range r.Events(ctx) {
			if err != nil || n == leave {
				break
			}
			n++
		}
		o, err := r.Wait(t.Context())
		if err != nil {
			rt.Fatal(err)
		}
		for i := range 3 {
			if dones[i] != setups[i] || dones[i] > 1 {
				rt.Errorf("middleware %d: set up %d times, torn down %d times", i, setups[i], dones[i])
			}
		}
		for _, k := range kinds {
			if k != kinds[0] {
				rt.Errorf("the Dones were told %v", kinds)
			}
		}
		if o.Kind == chat.Detached {
			if !isDurable || o.Terminal != nil {
				rt.Errorf("outcome %+v", o)
			}
			return
		}
		var evs []event.Event
		terminals := 0
		for ev, err := range r.Events(t.Context()) {
			if err != nil {
				rt.Fatal(err)
			}
			if evs = append(evs, ev); ev.Type() == event.TypeRunFinished || ev.Type() == event.TypeRunError {
				terminals++
			}
		}
		if err := event.Validate(evs); err != nil || terminals != 1 {
			rt.Errorf("%d terminals, %v", terminals, err)
		}
		last := evs[len(evs)-1]
		if (last.Type() == event.TypeRunError) != (o.Kind == chat.Failed || o.Kind == chat.Canceled) {
			rt.Errorf("outcome %s, but the stream ends with %s", o.Kind, show(last))
		}
		if isDurable {
			want := map[chat.OutcomeKind]store.Status{chat.Finished: store.Completed, chat.Failed: store.Failed,
				chat.Canceled: store.Aborted, chat.Interrupted: store.Interrupted}[o.Kind]
			rec, err := s.Runs.Get(t.Context(), "r")
			if err != nil || rec.Status != want {
				rt.Errorf("outcome %s, record %s, %v", o.Kind, rec.Status, err)
			}
		}
		if o.Err == nil && (o.Kind == chat.Failed || o.Kind == chat.Canceled) {
			rt.Error(fmt.Sprintf("outcome %+v has no error", o))
		}
	})
}
