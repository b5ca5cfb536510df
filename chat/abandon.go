package chat

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"time"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/store"
)

// Ending says how [Abandon] ends a run.
type Ending struct {
	Status  store.Status // Failed or Aborted
	Code    string       // of the RUN_ERROR; empty: "aborted" for Aborted, else "abandoned"
	Message string       // its text, already redacted; empty: a text for the code

	// Instance is what becomes of the run's sandbox; nil leaves it. An aborted run
	// whose agent may be alive must have it destroyed (spec 04 §22, I13).
	Instance    *store.Disposition
	JournalHold bool

	CloseReason string // empty: "cancelled" for Aborted, else the status

	// Check looks at the record once nobody else can change it; an error leaves the
	// run as it was. May be nil.
	Check func(rec store.Run) error
}

// Abandon ends a durable run that no adapter can end: one without a journal whose
// driver is gone, one that was never launched, one whose sandbox stays out of
// reach. It claims the run, also one whose cancel is requested, ends its log and
// stores no transcript. What the agent still wrote to a journal is not told; for
// a run that can be driven use Request.Attach. A run that somebody drives, or
// that has ended, is a [*store.ClaimError].
func Abandon(ctx context.Context, d Durability, runID string, e Ending) (store.Run, error) {
	fail := func(err error) (store.Run, error) {
		return store.Run{}, fmt.Errorf("chat: abandon run %q: %w", runID, err)
	}
	if e.Status != store.Failed && e.Status != store.Aborted {
		return fail(fmt.Errorf("status %q: use %q or %q", e.Status, store.Failed, store.Aborted))
	}
	c, err := d.Runs.Claim(ctx, runID, store.ClaimOptions{Owner: cmp.Or(d.Owner, "chat-"+rand.Text()), TTL: d.Lease, Reaper: true})
	if err != nil {
		return fail(err)
	}
	rec, err := abandon(ctx, d, c, e)
	if err != nil {
		rctx, stop := context.WithTimeout(context.WithoutCancel(ctx), opTimeout)
		defer stop()
		return fail(errors.Join(err, d.Runs.Release(rctx, c)))
	}
	return rec, nil
}

func abandon(ctx context.Context, d Durability, c store.Claim, e Ending) (store.Run, error) {
	rec, err := d.Runs.Get(ctx, c.RunID())
	if err != nil {
		return store.Run{}, err
	}
	if e.Check != nil {
		if err := e.Check(rec); err != nil {
			return store.Run{}, err
		}
	}
	stored, err := d.Log.Snapshot(ctx, c.RunID())
	if err != nil {
		return store.Run{}, err
	}
	g := event.NewGuard(event.GuardOptions{RunID: rec.ID, ThreadID: rec.Thread.ID})
	for _, s := range stored {
		g.Push(s.Event)
	}
	last := event.RunError{Code: e.Code, Message: e.Message}
	if last.Code == "" {
		last.Code = "abandoned"
		if e.Status == store.Aborted {
			last.Code = "aborted"
		}
	}
	if last.Message == "" {
		last.Message = "The run was given up"
		if e.Status == store.Aborted {
			last.Message = "Request aborted"
		}
	}
	last.Metadata = event.TanStack{ThreadID: rec.Thread.ID, RunID: rec.ID}.Metadata()
	f := store.Final{
		Status: e.Status, Instance: e.Instance, JournalHold: e.JournalHold,
		Error:       &store.RunError{Code: last.Code, Message: last.Message},
		CloseReason: e.CloseReason,
		Batch:       store.Batch{No: 1},
	}
	if f.CloseReason == "" {
		f.CloseReason = string(e.Status)
		if e.Status == store.Aborted {
			f.CloseReason = "cancelled"
		}
	}
	now := time.Now().UnixMilli()
	for _, ev := range g.Push(last) {
		b := ev.Base()
		b.Timestamp = now
		f.Batch.Events = append(f.Batch.Events, store.Event{Event: ev.With(b)})
	}
	return d.Log.Finish(ctx, c, f)
}
