package chat

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/store"
)

// Run is one turn. Its methods may be called concurrently, by viewers as well as
// by middleware and the adapter.
type Run struct {
	req Request // ids are set; Messages, System and Options change by Configure, under mu
	log *slog.Logger

	runs    store.Runs
	events  store.Log
	durable *Durability   // nil: the log is in memory
	joined  bool          // somebody else started it: this Run only reads
	claim   store.Claim   // set before the driver starts
	claimed time.Time     // when it was asked for
	keeper  *Keeper       // of a durable run
	spent   time.Duration // by the drivers before, of one that was taken over
	doomed  error         // its cancel was requested before it was taken over

	replaying atomic.Bool
	ready     chan struct{} // closed after the Setups of a run that was taken over

	values struct {
		sync.Mutex
		m map[AnyToken]any
	}

	ctx    context.Context // the run's; the one context that is kept (architecture §7)
	cancel context.CancelCauseFunc

	queue chan msg
	gate  sync.RWMutex // held for reading while sending to queue
	ended bool         // under gate: nothing more is accepted

	mu        sync.Mutex
	begun     bool
	redactors []func(event.Event) event.Event
	filters   []func(io.Writer) io.WriteCloser
	finals    []func(*store.Final)
	after     []func(context.Context, Outcome)
	exit      *store.Exit
	story     transcript

	done    chan struct{} // closed when the driver is through
	outcome Outcome       // valid after done
}

// ID is the run's id.
func (r *Run) ID() string { return r.req.RunID }

// ThreadID is the conversation's id.
func (r *Run) ThreadID() string { return r.req.ThreadID }

// Thread names the conversation in stores.
func (r *Run) Thread() store.Thread {
	return store.Thread{Tenant: r.req.Tenant, ID: r.req.ThreadID}
}

// Durable says that the run is recorded outside of this process's memory, so
// that it goes on when its readers leave.
func (r *Run) Durable() bool { return r.durable != nil }

// Durability returns where the run is recorded; ok is false where it isn't.
func (r *Run) Durability() (d Durability, ok bool) {
	if r.durable == nil {
		return Durability{}, false
	}
	return *r.durable, true
}

// Claim is the driver's right to write; ok is false where this Run only reads.
func (r *Run) Claim() (c store.Claim, ok bool) { return r.claim, r.claim.RunID() != "" }

// Joined says that the run existed already when Start was called, so that this
// Run only reads it. Its middleware and adapter are not used.
func (r *Run) Joined() bool { return r.joined }

// Request returns the request, with its ids and with what Configure changed.
// What it refers to must not be changed.
func (r *Run) Request() Request {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.req
}

// Configure changes what the adapter will see: Messages, System, Options, Schema and Tools.
// Other fields stay as they are. For Setup; later changes have no effect on what
// was read.
func (r *Run) Configure(change func(*Request)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	c := r.req
	change(&c)
	r.req.Messages, r.req.System, r.req.Options, r.req.Schema, r.req.Tools = c.Messages, c.System, c.Options, c.Schema, c.Tools
}

// Logger is the run's logger, never nil.
func (r *Run) Logger() *slog.Logger { return r.log }

// Redact adds a function that every event passes before it is logged, after all
// hooks and after the guard: what it hides is in no log and before no viewer. It
// must be a function of its input, keep the type of the event, and be safe for
// concurrent use. Where it panics the event's content is lost rather than shown.
func (r *Run) Redact(f func(event.Event) event.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.redactors = append(slices.Clip(r.redactors), f)
}

// OnFinish adds a function that sees, and may add to, what ends the run: the
// transcript, what becomes of the sandbox. Called by the driver once, after all
// Dones, with the batch and the status set; not called for a run that is
// detached or fenced. For Setup and Done.
func (r *Run) OnFinish(f func(*store.Final)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.finals = append(r.finals, f)
}

// AfterEnd adds a function that the driver calls, in reverse order, when the run's
// end is stored, or when it is sure that this host will not end it: with what has
// become of it. What only the run's record keeps from being lost, a journal or a
// sandbox, is removed here and not before. ctx is a clean-up context. The log is
// closed by then.
func (r *Run) AfterEnd(f func(ctx context.Context, o Outcome)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.after = append(r.after, f)
}

// Exited tells the driver how the agent's process ended, as verified in the
// journal. For adapters whose runs are journaled; the last call counts.
func (r *Run) Exited(e store.Exit) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.exit = &e
}

// Transcript returns what this run has added to the conversation so far:
// assistant messages, tool calls and their results, as logged.
func (r *Run) Transcript() []event.Message {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.story.messages()
}

// Events reads the run from its start until it has ended. Each call is a read of
// its own. A non-nil error is the last pair.
//
// The first loop of a run that is not durable starts it, and leaving that loop
// cancels it; the loop returns when everything is torn down. A durable run goes
// on without readers.
func (r *Run) Events(ctx context.Context) iter.Seq2[event.Event, error] {
	return func(yield func(event.Event, error) bool) {
		for e, err := range r.Entries(ctx, event.FromStart) {
			if !yield(e.Event, err) {
				return
			}
		}
	}
}

// Entries is Events with offsets, after one of them. It makes a Run an
// [event.Source].
func (r *Run) Entries(ctx context.Context, after event.Offset) iter.Seq2[event.Entry, error] {
	return func(yield func(event.Entry, error) bool) {
		if r.begin() {
			defer r.leave(ctx)
		}
		if r.durable != nil && r.durable.Presence != nil {
			defer r.durable.Presence.Enter(r.req.RunID)()
		}
		for e, err := range r.events.Read(ctx, r.req.RunID, after) {
			if !yield(e, err) || err != nil {
				return
			}
		}
	}
}

var _ event.Source = (*Run)(nil)

// Wait returns how the run ended. It counts as a reader: where nobody has read
// the run yet it starts it, and cancels it when ctx is done.
func (r *Run) Wait(ctx context.Context) (Outcome, error) {
	if r.joined {
		return r.watch(ctx)
	}
	if r.begin() {
		defer r.leave(ctx)
	}
	select {
	case <-r.done:
		return r.outcome, nil
	case <-ctx.Done():
		return Outcome{}, context.Cause(ctx)
	}
}

// Cancel asks for the end of the run, on whatever host it is driven. It doesn't
// wait for it. A run that has ended is no error.
func (r *Run) Cancel(reason string) error {
	// A run that was taken over hears of it by way of the store, when it can reach
	// its agent.
	if !r.joined && !r.Attached() {
		r.cancel(&CanceledError{Reason: reason})
	}
	if r.durable == nil {
		return nil
	}
	ctx, stop := context.WithTimeout(context.WithoutCancel(r.ctx), opTimeout)
	defer stop()
	if err := r.runs.RequestCancel(ctx, r.req.RunID, reason); err != nil {
		return fmt.Errorf("chat: cancel run %q: %w", r.req.RunID, err)
	}
	return nil
}

// Detach stops driving a durable run and leaves the agent alone: its log stays
// open and its claim is released, so that another host can take it over. Cause
// is ErrDetached or ErrShutdown. A run that is not durable is cancelled. It
// doesn't wait; see Wait.
func (r *Run) Detach(cause error) {
	switch {
	case r.joined:
	case r.durable == nil:
		r.cancel(&CanceledError{Reason: cause.Error()})
	default:
		r.cancel(cause)
	}
}

// Emit adds a live event to the run, in order with everything else. It returns
// when the event is accepted, before it is logged; while the driver is behind it
// waits. Inside of an Event hook it must get the hook's context, and the event then passes only
// the hooks after that one. A terminal event is refused; so is every event once the run is about
// to end, with ErrEnded.
func (r *Run) Emit(ctx context.Context, ev event.Event) error {
	switch ev.(type) {
	case nil:
		return errors.New("chat: emit: no event")
	case event.RunFinished, event.RunError, event.RunStarted:
		return fmt.Errorf("chat: emit: %s is the driver's own", ev.Type())
	}
	if r.joined {
		return ErrEnded
	}
	if f, ok := ctx.Value(frameKey{}).(*frame); ok && f.run == r {
		if done, err := f.emit(ev); done {
			return err
		}
	}
	return r.send(ctx, msg{ev: ev})
}

// send puts m into the queue. The gate makes sure that what was accepted is
// ahead of the message that ends the run.
func (r *Run) send(ctx context.Context, m msg) error {
	r.gate.RLock()
	defer r.gate.RUnlock()
	if r.ended {
		return ErrEnded
	}
	select {
	case r.queue <- m: // also for a caller whose context is done: it is tearing down
		return nil
	default:
	}
	select {
	case r.queue <- m:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// begin starts the driver of a run that is not durable, once. True makes the
// caller the reader whose leaving ends the run.
func (r *Run) begin() bool {
	if r.durable != nil {
		return false
	}
	r.mu.Lock()
	first := !r.begun
	r.begun = true
	r.mu.Unlock()
	if first {
		r.launch()
	}
	return first
}

// leave ends the run whose first reader is gone and waits until that is done.
func (r *Run) leave(ctx context.Context) {
	reason := "the reader left"
	if err := context.Cause(ctx); err != nil {
		reason += ": " + err.Error()
	}
	r.cancel(&CanceledError{Reason: reason})
	<-r.done
}

// watch waits for a run that somebody else drives.
func (r *Run) watch(ctx context.Context) (Outcome, error) {
	var last event.Event
	for e, err := range r.events.Read(ctx, r.req.RunID, event.FromStart) {
		if err != nil {
			return Outcome{}, err
		}
		last = e.Event
	}
	rec, err := r.runs.Get(ctx, r.req.RunID)
	if err != nil {
		return Outcome{}, err
	}
	o := Outcome{Terminal: last, Duration: rec.ClosedAt.Sub(rec.StartedAt)}
	switch rec.Status {
	case store.Completed:
		o.Kind = Finished
	case store.Interrupted:
		o.Kind = Interrupted
	case store.Aborted:
		o.Kind, o.Err = Canceled, &CanceledError{Reason: rec.CancelReason}
	default:
		o.Kind = Failed
		if rec.Error != nil {
			o.Err = &AgentError{Message: rec.Error.Message, ErrCode: rec.Error.Code}
		}
	}
	return o, nil
}

// clean is an error's text as it may leave the process.
func (r *Run) clean(err error) string {
	if e, ok := r.redact(event.RunError{Message: err.Error()}).(event.RunError); ok {
		return e.Message
	}
	return "redacted"
}

// hide returns an error whose text may leave the process and that is still what
// it was for errors.Is and errors.As.
func (r *Run) hide(err error) error {
	if err == nil {
		return nil
	}
	if text := r.clean(err); text != err.Error() {
		return &hiddenError{text, err}
	}
	return err
}

// hiddenError has no Unwrap: it would show the text.
type hiddenError struct {
	text string
	err  error
}

func (e *hiddenError) Error() string        { return e.text }
func (e *hiddenError) Is(target error) bool { return errors.Is(e.err, target) }
func (e *hiddenError) As(target any) bool   { return errors.As(e.err, target) }

func (r *Run) redact(ev event.Event) event.Event {
	r.mu.Lock()
	fs := r.redactors
	r.mu.Unlock()
	for _, f := range fs {
		var out event.Event
		err := safely("redaction", func() error { out = f(ev); return nil })
		if err == nil && out != nil && out.Type() == ev.Type() {
			ev = out
			continue
		}
		r.log.Error("redaction failed; the event is withheld", keyType, string(ev.Type()))
		switch e := ev.(type) {
		case event.RunError:
			return event.RunError{Message: "withheld", Code: "redaction_failed"}
		case event.RunFinished:
			return event.RunFinished{RunID: e.RunID, ThreadID: e.ThreadID}
		}
		return nil
	}
	return ev
}

// safely turns a panic into an error.
func safely(where string, f func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = &PanicError{Where: where, Value: v, Stack: debug.Stack()}
		}
	}()
	return f()
}

const (
	opTimeout      = 10 * time.Second // of one call to a store
	defaultCleanup = 60 * time.Second
)
