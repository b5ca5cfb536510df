package chat

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/internal/failpoint"
	"github.com/aisandbox-go/aisandbox/store"
	"github.com/aisandbox-go/aisandbox/store/memstore"
)

// queueLen bounds what waits for the driver.
const queueLen = 256

// Start checks a request and, for a durable run, records it, claims it, logs
// RUN_STARTED and run.accepted and starts the driver; it returns when these two
// events are stored. With Request.Attach it claims a run that exists and goes on
// with it instead. The driver then lives until the run has ended, whatever
// becomes of ctx. A run id that exists already starts nothing: the Run returned
// reads the one that exists (see [Run.Joined]); one of another thread is a
// [*store.RunConflictError].
//
// A run that is not durable does nothing before its first reader (see
// [Run.Events]), and it ends when ctx is done.
//
// Errors: [*RequestError], [*MissingError], [*OrderError], [*AttachError],
// ErrDurableRunIDRequired, ErrDurableThreadIDRequired, and those of the store,
// such as a [*store.ClaimError] where somebody else drives the run that shall be
// taken over. Nothing has been started then.
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
	r.runs, r.events, r.keeper = durable.Runs, durable.Log, durable.Keeper
	if r.keeper == nil {
		r.keeper = NewKeeper(durable.Runs, KeeperOptions{Lease: durable.Lease, Logger: r.log})
	}
	r.ctx, r.cancel = context.WithCancelCause(context.WithoutCancel(ctx))
	if err := r.open(ctx); err != nil {
		r.cancel(err)
		return nil, err
	}
	return r, nil
}

// open records a durable run and starts its driver, or joins the one that exists.
func (r *Run) open(ctx context.Context) error {
	if r.req.Attach {
		return r.attach(ctx)
	}
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
	failpoint.Hit(failpoint.RunCreated, r.durable.Owner)
	if err := r.take(ctx, false); err != nil {
		return err
	}
	failpoint.Hit(failpoint.RunClaimed, r.durable.Owner)
	w := newWriter(r)
	if err := r.accept(ctx, w); err != nil {
		// Nothing has been started, and nobody was told of the run. What is recorded
		// is left to the reaper.
		return err
	}
	failpoint.Hit(failpoint.RunAccepted, r.durable.Owner)
	r.begun = true
	go r.drive(w)
	return nil
}

// attach claims a run that exists and starts a driver that goes on with it.
func (r *Run) attach(ctx context.Context) error {
	name := r.req.Adapter.Name()
	if !r.journaled() {
		return &AttachError{name, "the adapter has no journal"}
	}
	rec, err := r.runs.Get(ctx, r.req.RunID)
	switch {
	case err != nil:
		return fmt.Errorf("chat: %w", err)
	case rec.Thread != r.Thread():
		return &store.RunConflictError{RunID: r.req.RunID}
	case !rec.Status.Valid():
		return &AttachError{name, fmt.Sprintf("its status %q is unknown", rec.Status)}
	case rec.Adapter != name:
		return &RequestError{"Adapter", fmt.Sprintf("is %q, and the run was started with %q: build the same request again", name, rec.Adapter)}
	case rec.Kind != store.KindSandbox:
		return &AttachError{name, "the run has no journal"}
	}
	if err := r.take(ctx, r.req.Reaper); err != nil {
		return err
	}
	// How long the run lasts already, by the store's clock alone.
	if now, err := r.runs.Get(ctx, r.req.RunID); err == nil && !now.LeaseUntil.IsZero() {
		if !now.CancelAt.IsZero() {
			r.doomed = &CanceledError{Reason: now.CancelReason}
		}
		r.spent = max(now.LeaseUntil.Sub(now.StartedAt)-cmp.Or(r.durable.Lease, store.DefaultLease), 0)
	}
	w := newWriter(r)
	stored, err := r.events.Snapshot(ctx, r.req.RunID)
	if err != nil {
		return r.release(ctx, fmt.Errorf("chat: read the log of run %q: %w", r.req.RunID, err))
	}
	if len(stored) == 0 { // it was claimed, and nothing more
		if err := r.accept(ctx, w); err != nil {
			return err
		}
	} else {
		w.replay = newReplay(stored)
		r.replaying.Store(true)
		w.catchUp()
	}
	r.begun = true
	r.ready = make(chan struct{})
	go r.drive(w)
	return nil
}

// launch starts the driver of a run in memory, whose store can't fail.
func (r *Run) launch() {
	ctx := context.WithoutCancel(r.ctx)
	_, err := r.create(ctx)
	if err == nil {
		err = r.take(ctx, false)
	}
	if err == nil {
		w := newWriter(r)
		if err = r.accept(ctx, w); err == nil {
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
		Input: r.req.Input, Exclusive: r.req.Exclusive, Queue: r.req.Queue,
	})
	if err != nil {
		return false, fmt.Errorf("chat: record run %q: %w", r.req.RunID, err)
	}
	if !created && rec.Thread != r.Thread() {
		return false, &store.RunConflictError{RunID: r.req.RunID}
	}
	return created, nil
}

// take claims the run.
func (r *Run) take(ctx context.Context, reaper bool) (err error) {
	o := store.ClaimOptions{Owner: "chat-" + rand.Text(), Reaper: reaper}
	if r.durable != nil {
		o.Owner, o.TTL = cmp.Or(r.durable.Owner, o.Owner), r.durable.Lease
	}
	r.claimed = time.Now()
	if r.claim, err = r.runs.Claim(ctx, r.req.RunID, o); err != nil {
		return fmt.Errorf("chat: %w", err)
	}
	return nil
}

// release gives a claim back with which nothing was done.
func (r *Run) release(ctx context.Context, err error) error {
	ctx, stop := context.WithTimeout(context.WithoutCancel(ctx), opTimeout)
	defer stop()
	return errors.Join(err, r.runs.Release(ctx, r.claim))
}

// accept logs the two events that open a run.
func (r *Run) accept(ctx context.Context, w *writer) error {
	started := event.RunStarted{RunID: r.req.RunID, ThreadID: r.req.ThreadID, ParentRunID: r.req.ParentRunID}
	if m, ok := r.req.Adapter.(Modeler); ok && m.Model() != "" {
		started.Metadata = event.TanStack{Model: m.Model()}.Metadata()
	}
	w.push(started, 0)
	accepted, err := event.NewCustom(event.NameRunAccepted, nil)
	if err != nil {
		return err
	}
	w.push(accepted, 0)
	if err := w.append(ctx); err != nil {
		return r.release(ctx, fmt.Errorf("chat: open the log of run %q: %w", r.req.RunID, err))
	}
	return nil
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
	switch {
	case req.Attach && durable == nil:
		return nil, &RequestError{"Attach", "needs a durable run: add chat.Durable, or set Runs and Log of the sandbox"}
	case req.Attach && req.ThreadID == "":
		return nil, ErrDurableThreadIDRequired
	case req.Reaper && !req.Attach:
		return nil, &RequestError{"Reaper", "goes with Attach only"}
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
