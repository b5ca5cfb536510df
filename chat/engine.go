package chat

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/store"
)

// maxMessage bounds the text of an error that becomes an event.
const maxMessage = 4096

// drive takes a run from its first Setup to its end. What it starts has ended
// when it closes done.
func (r *Run) drive(w *writer) {
	defer close(r.done)
	began := time.Now()

	// What shall end the agent of a run that was taken over waits until the agent
	// can be reached.
	armed := func() {}
	if r.req.Timeout > 0 {
		var t *time.Timer
		armed = func() { t = time.AfterFunc(max(r.req.Timeout-r.spent, 0), func() { r.cancel(ErrBudget) }) }
		defer func() {
			if t != nil {
				t.Stop()
			}
		}()
	}
	if r.durable != nil {
		defer r.watchClaim()()
	}
	if r.ready == nil {
		armed()
	}
	stream, stop := context.WithCancelCause(r.ctx)
	defer stop(errEnough)
	w.stop = stop

	var writing sync.WaitGroup
	writing.Go(w.serve)

	ready, err := r.setup()
	failed := false
	if err != nil && r.ready != nil && r.ctx.Err() == nil {
		err = r.unreached(err)
	}
	if err == nil {
		if r.ready != nil {
			close(r.ready)
			armed()
			if r.doomed != nil {
				r.cancel(r.doomed) // before the adapter can say that all is well (I18)
			}
		}
		failed, err = r.stream(stream)
	}
	h := r.sync(msg{settle: true})
	o, off := r.decide(h, failed, err)
	o.Duration, o.Err = time.Since(began), r.hide(o.Err)
	if err := r.teardown(ready, o); err != nil {
		if o.Kind == Finished || o.Kind == Interrupted {
			o.Kind, o.Err = Failed, r.hide(err)
			o.Terminal, off = r.terminal(err, o.Terminal), 0
		} else {
			r.log.Error("tear-down", keyError, r.clean(err))
		}
	}

	// From here on nothing is accepted, and what was is written.
	r.gate.Lock()
	r.ended = true
	r.gate.Unlock()
	close(r.queue)
	writing.Wait()

	r.outcome = r.finish(w, o, off)
	r.outcome.Duration = time.Since(began)
	r.afterEnd()
	if r.outcome.Err != nil {
		r.log.Info("run ended", keyOutcome, string(r.outcome.Kind), keyError, r.outcome.Err)
	} else {
		r.log.Info("run ended", keyOutcome, string(r.outcome.Kind))
	}
	r.cancel(ErrEnded) // for what still hangs on the run's context
}

// setup runs the Setups and returns how many middlewares are to be torn down.
func (r *Run) setup() (ready int, err error) {
	for i, m := range r.req.Use {
		if r.ctx.Err() != nil {
			return i, context.Cause(r.ctx)
		}
		if m.Setup != nil {
			if err := safely("Setup of middleware "+name(m, i), func() error { return m.Setup(r.ctx, r) }); err != nil {
				return i, fmt.Errorf("middleware %q: %w", name(m, i), err)
			}
		}
		r.must(msg{set: true, ready: i + 1})
		for _, t := range m.Provides {
			if !r.hasToken(t) {
				return i + 1, &MissingError{Adapter: r.req.Adapter.Name(), Middleware: name(m, i), Token: t.Name(), Provided: r.provided()}
			}
		}
	}
	return len(r.req.Use), nil
}

// stream runs the adapter. Failed says that the adapter reported a RUN_ERROR
// before anybody wanted it to stop.
func (r *Run) stream(ctx context.Context) (failed bool, err error) {
	err = safely("adapter "+r.req.Adapter.Name(), func() error {
		for it, err := range r.req.Adapter.Stream(ctx, r) {
			if err != nil {
				return err
			}
			if it.Event == nil {
				continue
			}
			r.must(msg{ev: it.Event, off: it.Off, item: true})
			if _, ok := it.Event.(event.RunError); ok {
				failed = r.ctx.Err() == nil
				return nil
			}
		}
		return nil
	})
	return failed, err
}

// decide says how the run ends. Off belongs to a terminal of the adapter.
func (r *Run) decide(h held, failed bool, err error) (o Outcome, off int64) {
	if _, ok := h.terminal.(event.RunFinished); h.short != nil && h.err == nil && err == nil && (ok || r.ctx.Err() == nil) {
		h.err = h.short
	}
	if h.err != nil {
		// It stopped the adapter, so whatever that said of it is no news.
		err, failed, h.terminal = h.err, false, nil
	}
	cause := context.Cause(r.ctx)
	finished, ok := h.terminal.(event.RunFinished)
	if ok && err == nil && (errors.Is(cause, ErrDetached) || errors.Is(cause, ErrShutdown)) {
		cause = nil // there is nothing left to hand over
	}
	rerr, isErr := h.terminal.(event.RunError)
	switch {
	case errors.Is(cause, store.ErrFenced):
		return Outcome{Kind: Fenced, Err: cause}, 0
	case failed && isErr:
		return Outcome{Kind: Failed, Err: &AgentError{Message: rerr.Message, ErrCode: rerr.Code}, Terminal: rerr}, h.off
	case errors.Is(cause, ErrDetached), errors.Is(cause, ErrShutdown):
		return Outcome{Kind: Detached, Err: cause}, 0
	case cause == nil && errors.Is(err, ErrDetached):
		return Outcome{Kind: Detached, Err: err}, 0
	case errors.Is(cause, ErrBudget):
		return Outcome{Kind: Failed, Err: cause, Terminal: r.terminal(cause, h.terminal)}, 0
	case cause != nil:
		if !errors.Is(cause, ErrCanceled) {
			cause = fmt.Errorf("%w: %w", ErrCanceled, cause)
		}
		e := event.RunError{Message: "Request aborted", Code: "aborted", Usage: usage(h.terminal)}
		e.Metadata = r.ids()
		return Outcome{Kind: Canceled, Err: cause, Terminal: e}, 0
	case isErr: // a hook made it; an error that follows is only the stream's end
		return Outcome{Kind: Failed, Err: &AgentError{Message: rerr.Message, ErrCode: rerr.Code}, Terminal: rerr}, h.off
	case err != nil:
		return Outcome{Kind: Failed, Err: err, Terminal: r.terminal(err, h.terminal)}, 0
	case !ok:
		err = &AgentError{Message: fmt.Sprintf("adapter %q: %s", r.req.Adapter.Name(), errNoTerminal), ErrCode: "no_result"}
		return Outcome{Kind: Failed, Err: err, Terminal: r.terminal(err, h.terminal)}, 0
	case finished.Outcome != nil && finished.Outcome.Type == "interrupt":
		return Outcome{Kind: Interrupted, Terminal: finished}, h.off
	}
	if err := r.checkExit(); err != nil {
		return Outcome{Kind: Failed, Err: err, Terminal: r.terminal(err, h.terminal)}, 0
	}
	return Outcome{Kind: Finished, Terminal: finished}, h.off
}

// checkExit refuses a success that nobody vouches for: that a journaled agent
// says so is not enough (spec 04 §22, CompletedTruthful).
func (r *Run) checkExit() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.journaled() && (r.exit == nil || !r.exit.Verified || !r.exit.OK) {
		return &AgentError{Message: fmt.Sprintf("adapter %q: the agent's journal has no verified exit", r.req.Adapter.Name()), ErrCode: "exit_unverified"}
	}
	return nil
}

func (r *Run) journaled() bool {
	j, ok := r.req.Adapter.(Journaler)
	return ok && j.Journaled() && r.durable != nil
}

// usage is what a terminal event says was used: it is paid for, however the run
// ends.
func usage(terminal event.Event) []event.Usage {
	switch e := terminal.(type) {
	case event.RunFinished:
		return e.Usage
	case event.RunError:
		return e.Usage
	}
	return nil
}

// terminal is the RUN_ERROR that tells of an error, in place of another terminal
// event, which may be nil.
func (r *Run) terminal(err error, instead event.Event) event.Event {
	text := strings.ToValidUTF8(err.Error(), "\uFFFD")
	if len(text) > maxMessage {
		cut := maxMessage
		for !utf8.RuneStart(text[cut]) {
			cut--
		}
		text = text[:cut] + "…"
	}
	e := event.RunError{Message: text, Code: store.Code(err, "internal"), Usage: usage(instead)}
	e.Metadata = r.ids()
	return e
}

func (r *Run) ids() []byte {
	return event.TanStack{ThreadID: r.req.ThreadID, RunID: r.req.RunID}.Metadata()
}

// teardown runs the Dones in reverse; each gets its turn.
func (r *Run) teardown(ready int, o Outcome) error {
	var errs []error
	for i := ready - 1; i >= 0; i-- {
		m := r.req.Use[i]
		// After this no event reaches the middleware's hook any more.
		r.sync(msg{set: true, ready: i})
		if m.Done == nil {
			continue
		}
		ctx, stop := context.WithTimeoutCause(context.WithoutCancel(r.ctx), r.req.Cleanup,
			fmt.Errorf("chat: the clean-up of middleware %q took longer than %v", name(m, i), r.req.Cleanup))
		err := safely("Done of middleware "+name(m, i), func() error { return m.Done(ctx, r, o) })
		stop()
		if err != nil {
			errs = append(errs, fmt.Errorf("middleware %q: %w", name(m, i), err))
		}
	}
	return errors.Join(errs...)
}

// finish ends the log, or leaves it to another host.
func (r *Run) finish(w *writer, o Outcome, off int64) Outcome {
	r.mu.Lock()
	exit := r.exit
	r.mu.Unlock()
	f := store.Final{Exit: exit}
	var diverged *DivergedError
	f.JournalHold = errors.As(o.Err, &diverged)
	if exit != nil && exit.Verified {
		f.Pos = &store.Pos{Off: exit.Off}
	}
	switch o.Kind {
	case Fenced:
		return o
	case Detached:
		ctx, stop := context.WithTimeout(context.WithoutCancel(r.ctx), opTimeout)
		defer stop()
		if err := r.runs.Release(ctx, r.claim); err != nil {
			r.log.Error("release the claim", keyError, err)
		}
		return o
	case Finished:
		f.Status = store.Completed
	case Interrupted:
		f.Status = store.Interrupted
	case Canceled:
		f.Status, f.CloseReason = store.Aborted, "cancelled"
	default:
		f.Status = store.Failed
	}
	f.CloseReason = cmp.Or(f.CloseReason, string(f.Status))
	last, err := w.finish(o.Terminal, off, f)
	switch {
	case errors.Is(err, store.ErrFenced):
		return Outcome{Kind: Fenced, Err: err}
	case err != nil:
		err = fmt.Errorf("chat: end the log of run %q: %w", r.req.RunID, err)
		o.Kind, o.Err, o.Terminal = Failed, errors.Join(o.Err, err), nil
		if r.durable != nil && unreachable(err) {
			o.Kind = Detached // somebody else will end it
		}
		return o
	}
	o.Terminal = last
	if e, ok := last.(event.RunError); ok && o.Err == nil { // the guard turned success into an error
		o.Kind, o.Err = Failed, &AgentError{Message: e.Message, ErrCode: e.Code}
	}
	return o
}

// must sends to the writer, which lives as long as the engine does.
func (r *Run) must(m msg) { r.queue <- m }

// sync waits until everything before it is logged.
func (r *Run) sync(m msg) held {
	m.reply = make(chan held, 1)
	r.must(m)
	return <-m.reply
}

// afterEnd calls what waits for the run's end.
func (r *Run) afterEnd() {
	r.mu.Lock()
	after := r.after
	r.mu.Unlock()
	for _, f := range slices.Backward(after) {
		ctx, stop := context.WithTimeout(context.WithoutCancel(r.ctx), r.req.Cleanup)
		if err := safely("AfterEnd", func() error { f(ctx, r.outcome); return nil }); err != nil {
			r.log.Error("after the end", keyError, r.clean(err))
		}
		stop()
	}
}

// unreached is what an error of a Setup means for a run that was taken over: its
// agent may be at work, so that only a sandbox that is gone ends the run.
func (r *Run) unreached(err error) error {
	if !errors.Is(err, ErrLost) {
		if errors.Is(err, ErrDetached) {
			return err
		}
		return fmt.Errorf("%w: %w", ErrDetached, err)
	}
	ctx, stop := context.WithTimeout(context.WithoutCancel(r.ctx), opTimeout)
	defer stop()
	if rec, gerr := r.runs.Get(ctx, r.req.RunID); gerr == nil && !rec.CancelAt.IsZero() {
		r.cancel(&CanceledError{Reason: rec.CancelReason}) // what was to be ended is gone
	}
	return err
}

// watchClaim renews the claim and listens for a cancel, until release is called.
func (r *Run) watchClaim() (release func()) {
	ctx, stop := context.WithCancel(context.WithoutCancel(r.ctx))
	var aside sync.WaitGroup
	aside.Go(func() { r.listen(ctx) })
	kept := r.keeper.keep(r.claim, r.claimed,
		func() { aside.Go(func() { r.lost(ctx) }) },
		func() {
			if r.reached() && r.ctx.Err() == nil {
				aside.Go(func() { r.requested(ctx) })
			}
		})
	return func() { kept(); stop(); aside.Wait() }
}

// requested cancels the run with the reason that the store has.
func (r *Run) requested(ctx context.Context) {
	reason := "requested"
	if rec, err := r.runs.Get(ctx, r.req.RunID); err == nil && rec.CancelReason != "" {
		reason = rec.CancelReason
	}
	r.cancel(&CanceledError{Reason: reason})
}

// reached says that a cancel can end the agent: it is this host's, or its sandbox
// was resumed.
func (r *Run) reached() bool {
	if r.ready == nil {
		return true
	}
	select {
	case <-r.ready:
		return true
	default:
		return false
	}
}

// lost tells a claim that somebody else has from a run that this driver just
// ended.
func (r *Run) lost(ctx context.Context) {
	rec, err := r.runs.Get(ctx, r.req.RunID)
	if err == nil && rec.Epoch == r.claim.Epoch() {
		return
	}
	r.cancel(&store.FencedError{RunID: r.req.RunID, Held: r.claim.Epoch(), Observed: rec.Epoch})
}

// listen waits for a cancel that comes by way of the store.
func (r *Run) listen(ctx context.Context) {
	for wait := 100 * time.Millisecond; ; wait = min(2*wait, 5*time.Second) {
		reason, err := r.runs.WaitCancel(ctx, r.req.RunID)
		switch {
		case err == nil:
			if r.ready != nil {
				select {
				case <-r.ready:
				case <-ctx.Done():
					return
				}
			}
			r.cancel(&CanceledError{Reason: reason})
			return
		case ctx.Err() != nil, errors.Is(err, store.ErrSealed), errors.Is(err, store.ErrNotFound):
			return
		}
		t := time.NewTimer(wait)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return
		}
	}
}
