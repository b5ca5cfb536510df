package chat

import (
	"context"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/store"
)

// PendingTurn stores the user's turn now, so that a reload during a slow Setup
// shows it. Best effort and idempotent. Provided by [Persist].
var PendingTurn = NewToken[func(ctx context.Context)]("pending-turn", "add chat.Persist to Request.Use")

// Leases is what [Locks] provides.
var Leases = NewToken[store.Leaser]("leases", "add chat.Locks to Request.Use")

// Locks provides a Leaser for middleware after it.
func Locks(l store.Leaser) Middleware {
	return Middleware{
		Name: "locks", Provides: []AnyToken{Leases},
		Setup: func(_ context.Context, r *Run) error { Leases.Provide(r, l); return nil },
	}
}

// Persist keeps conversations. A request without messages goes on with the
// stored thread; one with messages is the whole conversation and replaces it.
// The user's turn is stored before the agent starts, the agent's part when the
// run has finished or waits for a person: then also what it waits for goes to
// interrupts, which may be nil. A run that failed or was cancelled stores
// nothing of the agent.
//
// Where messages and interrupts are those of the run's Durability they are
// committed with the run's end; otherwise before it, so that a run is never seen
// as completed without its transcript.
func Persist(messages store.Messages, interrupts store.Interrupts) Middleware {
	return Middleware{
		Name: "persist", Provides: []AnyToken{PendingTurn},
		Setup: func(ctx context.Context, r *Run) error {
			save := func(ctx context.Context) {
				// A driver that slept while another one finished the thread must not put it back.
				if err := r.Confirm(ctx); err != nil {
					r.log.Warn("the user's turn is not stored", keyError, err)
					return
				}
				if err := messages.Save(ctx, r.Thread(), r.Request().Messages); err != nil {
					r.log.Warn("store the user's turn", keyError, err)
				}
			}
			if len(r.Request().Messages) == 0 {
				msgs, err := messages.Load(ctx, r.Thread())
				if err != nil {
					return fmt.Errorf("load thread %q: %w", r.ThreadID(), err)
				}
				r.Configure(func(q *Request) { q.Messages = msgs })
			} else if !r.Attached() || !stored(ctx, r, messages) {
				save(ctx)
			}
			PendingTurn.Provide(r, save)
			return nil
		},
		Done: func(ctx context.Context, r *Run, o Outcome) error {
			if o.Kind != Finished && o.Kind != Interrupted {
				return nil
			}
			asked, err := interruptsOf(r, o)
			if err != nil {
				return err
			}
			d, _ := r.Durability()
			thread := func() []event.Message { return slices.Concat(r.Request().Messages, r.Transcript()) }
			if same(d.Messages, messages) && (len(asked) == 0 || interrupts == nil || same(d.Interrupts, interrupts)) {
				r.OnFinish(func(f *store.Final) {
					if f.Status == store.Completed || f.Status == store.Interrupted {
						f.Messages = thread()
					}
					if f.Status == store.Interrupted && interrupts != nil {
						f.Interrupts = asked
					}
				})
				return nil
			}
			if err := r.Confirm(ctx); err != nil {
				return err
			}
			if len(asked) > 0 && interrupts != nil {
				if err := interrupts.Put(ctx, asked); err != nil {
					return fmt.Errorf("store interrupts: %w", err)
				}
			}
			if err := messages.Save(ctx, r.Thread(), thread()); err != nil {
				return fmt.Errorf("store thread %q: %w", r.ThreadID(), err)
			}
			return nil
		},
	}
}

// stored says that the thread has the turn of a run that was taken over: its first
// driver saved it, and somebody may have added to it since.
func stored(ctx context.Context, r *Run, messages store.Messages) bool {
	msgs, err := messages.Load(ctx, r.Thread())
	return err == nil && len(msgs) >= len(r.Request().Messages)
}

// interruptsOf reads what a run that was interrupted waits for.
func interruptsOf(r *Run, o Outcome) ([]store.Interrupt, error) {
	if o.Kind != Interrupted {
		return nil, nil
	}
	e, ok := r.redact(o.Terminal).(event.RunFinished)
	if !ok || e.Outcome == nil {
		return nil, nil
	}
	var is []store.Interrupt
	for _, raw := range e.Outcome.Interrupts {
		var d struct {
			ID string `json:"id"`
		}
		if err := json.Unmarshal(raw, &d); err != nil || d.ID == "" {
			return nil, fmt.Errorf("an interrupt has no id")
		}
		is = append(is, store.Interrupt{ID: d.ID, RunID: r.ID(), Thread: r.Thread(), Payload: raw})
	}
	return is, nil
}

// same compares two stores, whose types need not be comparable.
func same(a, b any) bool {
	return a != nil && b != nil && reflect.TypeOf(a).Comparable() && reflect.TypeOf(b).Comparable() && a == b
}
