package chat

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/internal/failpoint"
	"github.com/aisandbox-go/aisandbox/store"
)

const (
	maxBatch  = 128                   // events in one append
	maxHold   = 25 * time.Millisecond // that an event waits for others to be appended with it
	maxNested = 1024                  // events that the hooks may emit for one event
	maxOutage = 10 * time.Minute      // that the driver waits for a store that can't be reached
)

// msg is what the queue holds: an event, or a word from the engine.
type msg struct {
	ev   event.Event
	off  int64 // of an item
	item bool  // from the adapter: counts as its terminal

	ready int // with set: how many middlewares see events from now on
	set   bool

	settle bool // the stream has ended, and a replay with it

	reply chan held // not nil: log everything before, then answer
}

// held is what the writer knows when the stream has ended.
type held struct {
	terminal event.Event // of the adapter, as the hooks left it
	off      int64
	err      error // of a hook or of the store
	short    error // the replay ended before it was through
}

// writer is the one that writes a run's log. It belongs to one goroutine at a
// time: that of Start, then its own (serve), then the engine's (finish).
type writer struct {
	r       *Run
	guard   *event.Guard
	texts   pieces
	ready   int // the first so many middlewares see events
	pending []store.Event
	since   time.Time // when pending got its first event
	batchNo uint64
	mark    store.Pos // the last position given out
	held    held
	dead    bool // nothing can be written any more

	replay  *replay // of a run that was taken over
	repeats bool    // what is put now came from an item that the log may have
	own     bool    // what is put now is a live event of the adapter itself

	// stop ends the adapter's stream.
	stop context.CancelCauseFunc
}

func newWriter(r *Run) *writer {
	w := &writer{r: r, texts: pieces{run: r}, mark: store.NoPos, stop: func(error) {}}
	w.guard = w.newGuard()
	return w
}

func (w *writer) newGuard() *event.Guard {
	return event.NewGuard(event.GuardOptions{
		RunID: w.r.req.RunID, ThreadID: w.r.req.ThreadID,
		Dropped: func(ev event.Event, why string) {
			w.r.log.Debug("event dropped", keyType, string(ev.Type()), keyWhy, why)
		},
	})
}

// serve writes what comes through the queue until it is closed. Events that wait already are
// appended together; nothing waits for more to come.
func (w *writer) serve() {
	for m := range w.r.queue {
		w.take(m)
		for more := true; more && len(w.pending) > 0 && len(w.pending) < maxBatch && time.Since(w.since) < maxHold; {
			select {
			case m, ok := <-w.r.queue:
				if more = ok; ok {
					w.take(m)
				}
			default:
				more = false
			}
		}
		w.flush()
	}
}

func (w *writer) take(m msg) {
	switch {
	case m.set:
		w.ready = m.ready
	case m.ev != nil:
		w.event(m)
		w.catchUp()
	case m.settle:
		w.held.short = w.settle()
	}
	if m.reply != nil {
		w.flush()
		m.reply <- w.held
	}
}

// event takes one event through the hooks to the guard.
func (w *writer) event(m msg) {
	if m.item && w.held.err != nil {
		return // the stream is being stopped
	}
	if w.replay != nil {
		w.catchUp()
		if !m.item && !w.replay.done() {
			w.replay.wait(m)
			return
		}
		// What the hooks emit for an item that the log has is in the log, too.
		w.repeats = m.item && m.off > 0 && !w.replay.done()
		w.own = m.item && m.off == 0
		defer func() { w.repeats, w.own = false, false }()
	}
	if m.off > 0 && m.off < w.mark.Off {
		w.fail(fmt.Errorf("chat: adapter %q: an event at %d follows one at %d: offsets must not go back", w.r.req.Adapter.Name(), m.off, w.mark.Off))
		return
	}
	evs, nested, err := w.hooks(m.ev, 0)
	if err != nil {
		w.fail(err)
		if m.item {
			return
		}
		evs = []event.Event{m.ev} // what was accepted is logged all the same
	}
	if m.item && isTerminal(m.ev) && !slices.ContainsFunc(evs, isTerminal) {
		evs = append(evs, m.ev) // a hook can replace how a run ends, but not that it does
	}
	for _, ev := range evs {
		w.pass(ev, m.off)
	}
	if w.repeats {
		nested = nil
	}
	for i := 0; i < len(nested); i++ {
		if i == maxNested {
			w.fail(fmt.Errorf("chat: the Event hooks emitted more than %d events for one", maxNested))
			return
		}
		evs, more, err := w.hooks(nested[i].ev, nested[i].from)
		nested = append(nested, more...)
		if err != nil {
			w.fail(err)
			return
		}
		for _, ev := range evs {
			w.pass(ev, 0)
		}
	}
}

func isTerminal(ev event.Event) bool {
	switch ev.(type) {
	case event.RunFinished, event.RunError:
		return true
	}
	return false
}

// hooks runs ev through the Event hooks from the given one on. Nested are the
// events that hooks emitted.
func (w *writer) hooks(ev event.Event, from int) (evs []event.Event, nested []emitted, err error) {
	evs = []event.Event{ev}
	if w.held.err != nil {
		return evs, nil, nil
	}
	for i := from; i < w.ready; i++ {
		m := w.r.req.Use[i]
		if m.Event == nil {
			continue
		}
		var out []event.Event
		f := &frame{run: w.r, from: i + 1, open: true}
		ctx := context.WithValue(w.r.ctx, frameKey{}, f)
		for _, ev := range evs {
			err := safely("Event of middleware "+name(m, i), func() error {
				got, err := m.Event(ctx, w.r, ev)
				out = append(out, got...)
				return err
			})
			if err != nil {
				f.close()
				return nil, nil, fmt.Errorf("middleware %q: %w", name(m, i), err)
			}
		}
		nested = append(nested, f.close()...)
		evs = out
	}
	return evs, nested, nil
}

// pass gives an event to the guard, or holds it if it ends the run.
func (w *writer) pass(ev event.Event, off int64) {
	switch ev.(type) {
	case nil:
	case event.RunStarted: // the driver's own is out already
	case event.RunFinished:
		if _, failed := w.held.terminal.(event.RunError); !failed {
			w.held.terminal, w.held.off = ev, off
		}
	case event.RunError:
		if _, failed := w.held.terminal.(event.RunError); !failed {
			w.held.terminal, w.held.off = ev, off
			w.stop(errEnough)
		}
	default:
		w.push(ev, off)
	}
}

// push puts an event into the batch, as the guard, the redactors and the clock
// make it.
func (w *writer) push(ev event.Event, off int64) {
	for _, ev := range w.guard.Push(ev) {
		for _, ev := range w.texts.pass(ev) {
			w.put(ev, off)
		}
	}
}

func (w *writer) put(ev event.Event, off int64) {
	c := ev.Base()
	if c.Timestamp == 0 {
		c.Timestamp = time.Now().UnixMilli()
		ev = ev.With(c)
	}
	if ev = w.r.redact(ev); ev == nil {
		return
	}
	e := store.Event{Event: ev}
	if off > 0 {
		if w.mark.Off < off {
			w.mark = store.Pos{Off: off, Idx: -1}
		}
		w.mark.Idx++
		pos, print := w.mark, event.Fingerprint(ev)
		if w.replay != nil && (w.diverged() || w.meet(ev, pos, print[:])) {
			return
		}
		e.Pos, e.Print = &pos, print[:]
	} else if w.own && w.replay.known(ev) {
		return
	}
	if len(w.pending) == 0 {
		w.since = time.Now()
	}
	w.pending = append(w.pending, e)
}

// fail remembers the first error and stops the adapter.
func (w *writer) fail(err error) {
	if w.held.err == nil {
		w.held.err = err
		w.stop(errEnough)
	}
}

// flush appends the batch. A store that can't be reached is waited for: the
// queue is full then, so that the adapter waits too.
func (w *writer) flush() {
	if len(w.pending) == 0 {
		return
	}
	if !w.dead {
		err := w.patient(func(ctx context.Context) error { return w.append(ctx) })
		if err != nil {
			w.die(err)
		}
	}
	w.pending = nil
}

// append writes the batch once.
func (w *writer) append(ctx context.Context) error {
	failpoint.Hit(failpoint.BeforeAppend, w.r.claim.Owner())
	if _, err := w.r.events.Append(ctx, w.r.claim, store.Batch{No: w.batchNo + 1, Events: w.pending}); err != nil {
		return err
	}
	failpoint.Hit(failpoint.AfterAppend, w.r.claim.Owner())
	w.batchNo++
	w.tell()
	w.pending = nil
	return nil
}

// tell adds what was logged to the transcript.
func (w *writer) tell() {
	w.r.mu.Lock()
	defer w.r.mu.Unlock()
	for _, e := range w.pending {
		w.r.story.add(e.Event)
	}
}

// die stops writing for good. A store that stays away has another host, or the
// reaper, look after the run later: the agent is left alone.
func (w *writer) die(err error) {
	w.dead = true
	switch {
	case errors.Is(err, store.ErrFenced):
		w.r.cancel(err)
	case w.r.durable != nil && unreachable(err):
		w.r.cancel(fmt.Errorf("%w: %w", ErrDetached, err))
	}
	w.fail(err)
}

func unreachable(err error) bool {
	return errors.Is(err, store.ErrUnavailable) || errors.Is(err, context.DeadlineExceeded)
}

// finish ends the log with a terminal event and returns what that became. Off is
// not 0 for a terminal of the adapter's journal.
func (w *writer) finish(terminal event.Event, off int64, f store.Final) (event.Event, error) {
	if w.dead {
		return nil, w.held.err
	}
	if off > 0 {
		off = max(off, w.mark.Off)
	}
	w.push(terminal, off)
	last := w.pending[len(w.pending)-1].Event
	f.Batch = store.Batch{No: w.batchNo + 1, Events: w.pending}
	if e, ok := last.(event.RunError); ok {
		if f.Status != store.Aborted {
			f.Status = store.Failed
		}
		f.Error = &store.RunError{Message: e.Message, Code: cmp.Or(e.Code, "error")}
		f.Usage = e.Usage
	} else if e, ok := last.(event.RunFinished); ok {
		f.Usage = e.Usage
	}
	w.tell()
	w.r.mu.Lock()
	finals := w.r.finals
	w.r.mu.Unlock()
	for _, add := range finals {
		if err := safely("OnFinish", func() error { add(&f); return nil }); err != nil {
			w.r.log.Error("finish", keyError, w.r.clean(err))
		}
	}
	failpoint.Hit(failpoint.BeforeFinish, w.r.claim.Owner())
	err := w.patient(func(ctx context.Context) error {
		_, err := w.r.events.Finish(ctx, w.r.claim, f)
		return err
	})
	if err != nil {
		w.die(err)
		return nil, err
	}
	failpoint.Hit(failpoint.AfterFinish, w.r.claim.Owner())
	return last, nil
}

// patient repeats a write until it is decided. The batch number makes repeating
// safe, also after an answer that never came.
func (w *writer) patient(write func(context.Context) error) error {
	giveUp := time.Now().Add(maxOutage)
	for wait := 50 * time.Millisecond; ; wait = min(2*wait, 2*time.Second) {
		ctx, stop := context.WithTimeout(context.WithoutCancel(w.r.ctx), opTimeout)
		err := write(ctx)
		stop()
		if err == nil || !unreachable(err) {
			return err
		}
		if time.Now().After(giveUp) || errors.Is(context.Cause(w.r.ctx), store.ErrFenced) {
			return err
		}
		w.r.log.Warn("the store can't be reached; trying again", keyError, err)
		time.Sleep(wait)
	}
}

// errEnough stops an adapter's stream that has nothing to add: the agent is to be
// ended, as with any cancel.
var errEnough = &CanceledError{Reason: "the run is ending"}

// frameKey finds the frame of the Event hook that a context was given to.
type frameKey struct{}

// frame collects what an Event hook emits, since the hook runs in the goroutine
// that empties the queue and must not wait for it.
type frame struct {
	run  *Run
	from int // the first hook that sees what is emitted

	mu   sync.Mutex
	open bool
	evs  []emitted
}

type emitted struct {
	ev   event.Event
	from int
}

// emit returns false when the hook has returned: its context is like any other
// then.
func (f *frame) emit(ev event.Event) (bool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.open {
		return false, nil
	}
	if len(f.evs) == maxNested {
		return true, fmt.Errorf("chat: emit: more than %d events in one Event hook", maxNested)
	}
	f.evs = append(f.evs, emitted{ev, f.from})
	return true, nil
}

func (f *frame) close() []emitted {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.open = false
	return f.evs
}
