package chat

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"strings"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/store"
	"github.com/aisandbox-go/aisandbox/store/memstore"
)

// queueLen bounds what waits for the driver.
const queueLen = 256

// Start checks a request and, for a durable run, records it, claims it, logs
// RUN_STARTED and run.accepted and starts the driver; it returns when these two
// events are stored. The driver then lives until the run has ended, whatever
// becomes of ctx. A run id that exists already starts nothing: the Run returned
// reads the one that exists (see [Run.Joined]); one of another thread is a
// [*store.RunConflictError].
//
// A run that is not durable does nothing before its first reader (see
// [Run.Events]), and it ends when ctx is done.
//
// Errors: [*RequestError], [*MissingError], [*OrderError],
// ErrDurableRunIDRequired, and those of the store. Nothing has been started then.
func Start(ctx context.Context, req Request) (*Run, error) {
	durable, err := validate(&req)
	if err != nil {
		return nil, err
	}
	log := req.Logger
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	r := &Run{
		req: req, durable: durable,
		log:   log.With(keyRun, req.RunID, keyThread, req.ThreadID),
		queue: make(chan msg, queueLen),
		done:  make(chan struct{}),
	}
	if durable == nil {
		mem := memstore.New(memstore.Options{})
		r.runs, r.events = mem.Runs, mem.Log
		r.ctx, r.cancel = context.WithCancelCause(ctx)
		return r, nil
	}
	r.runs, r.events = durable.Runs, durable.Log
	r.ctx, r.cancel = context.WithCancelCause(context.WithoutCancel(ctx))
	if err := r.open(ctx); err != nil {
		r.cancel(err)
		return nil, err
	}
	return r, nil
}

// open records a durable run and starts its driver, or joins the one that exists.
func (r *Run) open(ctx context.Context) error {
	created, err := r.create(ctx)
	if err != nil {
		return err
	}
	if !created {
		r.joined = true
		close(r.done)
		r.cancel(ErrDetached)
		return nil
	}
	w, err := r.accept(ctx)
	if err != nil {
		// Nothing has been started, and nobody was told of the run. What is recorded
		// is left to the reaper.
		return err
	}
	r.begun = true
	go r.drive(w)
	return nil
}

// launch starts the driver of a run in memory, whose store can't fail.
func (r *Run) launch() {
	ctx := context.WithoutCancel(r.ctx)
	_, err := r.create(ctx)
	if err == nil {
		var w *writer
		if w, err = r.accept(ctx); err == nil {
			go r.drive(w)
			return
		}
	}
	r.log.Error("start", keyError, err)
	r.outcome = Outcome{Kind: Failed, Err: err}
	close(r.done)
}

func (r *Run) create(ctx context.Context) (created bool, err error) {
	kind := store.KindChat
	if r.journaled() {
		kind = store.KindSandbox
	}
	rec, created, err := r.runs.Create(ctx, store.NewRun{
		ID: r.req.RunID, Thread: r.Thread(), ParentRunID: r.req.ParentRunID,
		Definition: r.req.Definition, Adapter: r.req.Adapter.Name(), Kind: kind,
		Input: r.req.Input, Exclusive: r.req.Exclusive,
	})
	if err != nil {
		return false, fmt.Errorf("chat: record run %q: %w", r.req.RunID, err)
	}
	if !created && rec.Thread != r.Thread() {
		return false, &store.RunConflictError{RunID: r.req.RunID}
	}
	return created, nil
}

// accept claims the run and logs the two events that open it.
func (r *Run) accept(ctx context.Context) (*writer, error) {
	o := store.ClaimOptions{Owner: "chat-" + rand.Text()}
	if r.durable != nil {
		o.Owner, o.TTL = cmp.Or(r.durable.Owner, o.Owner), r.durable.Lease
	}
	var err error
	if r.claim, err = r.runs.Claim(ctx, r.req.RunID, o); err != nil {
		return nil, fmt.Errorf("chat: %w", err)
	}
	w := newWriter(r)
	started := event.RunStarted{RunID: r.req.RunID, ThreadID: r.req.ThreadID, ParentRunID: r.req.ParentRunID}
	if m, ok := r.req.Adapter.(Modeler); ok && m.Model() != "" {
		started.Metadata = event.TanStack{Model: m.Model()}.Metadata()
	}
	w.push(started, 0)
	accepted, err := event.NewCustom(event.NameRunAccepted, nil)
	if err != nil {
		return nil, err
	}
	w.push(accepted, 0)
	if err := w.append(ctx); err != nil {
		rctx, stop := context.WithTimeout(context.WithoutCancel(ctx), opTimeout)
		defer stop()
		return nil, fmt.Errorf("chat: open the log of run %q: %w", r.req.RunID, errors.Join(err, r.runs.Release(rctx, r.claim)))
	}
	return w, nil
}

// validate checks a request and fills in its ids. It has no effect beyond req.
func validate(req *Request) (*Durability, error) {
	if req.Adapter == nil {
		return nil, &RequestError{"Adapter", "is missing: say which agent shall run"}
	}
	var durable *Durability
	for i, m := range req.Use {
		if m.Durable == nil {
			continue
		}
		if durable != nil {
			return nil, &RequestError{"Use", fmt.Sprintf("middleware %q makes the run durable a second time: keep one", name(m, i))}
		}
		if m.Durable.Runs == nil || m.Durable.Log == nil {
			return nil, &RequestError{"Use", fmt.Sprintf("middleware %q sets only one of Durable.Runs and Durable.Log: set both, of one store", name(m, i))}
		}
		durable = m.Durable
	}
	// Before any id is made up: an id that nobody can repeat makes no run durable.
	if durable != nil && req.RunID == "" {
		return nil, ErrDurableRunIDRequired
	}
	for _, f := range []struct{ name, id string }{{"RunID", req.RunID}, {"ThreadID", req.ThreadID}, {"ParentRunID", req.ParentRunID}} {
		if strings.ContainsAny(f.id, "\r\n\x00") {
			return nil, &RequestError{f.name, "has a line break or a NUL byte: use an id of one line"}
		}
	}
	tools := map[string]bool{}
	for _, t := range req.Tools {
		if t.Name == "" || tools[t.Name] {
			return nil, &RequestError{"Tools", fmt.Sprintf("the name %q is empty or used twice: give each tool its own", t.Name)}
		}
		tools[t.Name] = true
	}
	if req.Timeout < 0 || req.Cleanup < 0 {
		return nil, &RequestError{"Timeout", "is negative: use 0 for no limit"}
	}
	if req.Cleanup == 0 {
		req.Cleanup = defaultCleanup
	}
	if err := check(*req); err != nil {
		return nil, err
	}
	if req.ThreadID == "" {
		req.ThreadID = "thread-" + rand.Text()
	}
	if req.RunID == "" {
		req.RunID = "run-" + rand.Text()
	}
	return durable, nil
}
