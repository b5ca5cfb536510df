package reaper

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/aisandbox-go/aisandbox/chat"
	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/internal/failpoint"
	"github.com/aisandbox-go/aisandbox/sandbox"
	"github.com/aisandbox-go/aisandbox/store"
)

// errGone: the run's request can't be made again, now or later, on this host.
var errGone = errors.New("the request can't be made again on this host")

// cancelTime is added to the budget of a run that is being ended: for the steps by
// which an agent is, and for its sandbox.
const cancelTime = 2 * time.Minute

// rebuild makes the run's request again, to go on with it.
func (k *look) rebuild(ctx context.Context) (chat.Request, error) {
	if k.cfg.Rebuild == nil {
		return chat.Request{}, fmt.Errorf("reaper: run %q: %w: there is no Config.Rebuild", k.rec.ID, errGone)
	}
	ctx, stop := context.WithTimeout(ctx, opTime)
	defer stop()
	req, err := k.cfg.Rebuild(ctx, k.rec)
	switch {
	case err == nil:
	case ctx.Err() != nil, errors.Is(err, store.ErrUnavailable):
		return chat.Request{}, fmt.Errorf("reaper: run %q: %w", k.rec.ID, err)
	default:
		return chat.Request{}, fmt.Errorf("reaper: run %q: %w: %w", k.rec.ID, errGone, err)
	}
	req.RunID, req.ThreadID, req.Tenant = k.rec.ID, k.rec.Thread.ID, k.rec.Thread.Tenant
	// A cancel that comes in between must not keep the driver out that obeys it.
	req.Attach, req.Reaper = true, true
	return req, nil
}

// start takes the run over. The drive is known, and Run waits for it, until stopped
// is called.
func (k *look) start(ctx context.Context, req chat.Request) (run *chat.Run, stopped func(), err error) {
	k.live.Add(1)
	run, err = k.cfg.Start(ctx, req)
	if err != nil {
		k.live.Done()
		return nil, nil, err
	}
	k.mu.Lock()
	k.drives[run.ID()] = run
	closed := k.closed
	k.mu.Unlock()
	if closed {
		run.Detach(chat.ErrShutdown)
	}
	return run, func() {
		k.mu.Lock()
		delete(k.drives, run.ID())
		k.mu.Unlock()
		k.live.Done()
	}, nil
}

// refused is what it means that a run could not be taken over.
func refused(err error) Entry {
	var claim *store.ClaimError
	var changed changedError
	if errors.As(err, &claim) || errors.As(err, &changed) || errors.Is(err, store.ErrFenced) {
		return Entry{Outcome: NotClaimed, Error: err.Error()}
	}
	if errors.Is(err, store.ErrUnavailable) {
		return unknown(err)
	}
	switch store.Code(err, "") {
	case "overloaded", "shutdown": // this host has no room
		return Entry{Outcome: NotClaimed, Error: err.Error()}
	}
	return Entry{Outcome: Errored, Error: err.Error()}
}

func (k *look) adopt(ctx context.Context, o, full Outcome) Entry {
	req, err := k.rebuild(ctx)
	if err != nil {
		return Entry{Outcome: full, Error: err.Error()}
	}
	return k.adoptWith(ctx, req, o, full)
}

// adoptWith drives a run for as long as its agent works, while there is room; where
// there is none the outcome is full.
func (k *look) adoptWith(ctx context.Context, req chat.Request, o, full Outcome) Entry {
	select {
	case k.slots <- struct{}{}:
	default:
		return Entry{Outcome: full}
	}
	run, stopped, err := k.start(ctx, req)
	if err != nil {
		<-k.slots
		return refused(err)
	}
	k.live.Go(func() {
		defer func() { stopped(); <-k.slots }()
		got, err := run.Wait(context.Background())
		if err == nil {
			k.alarm(got.Err)
		}
	})
	return Entry{Outcome: o}
}

// drive drives a run that has come to its end, or shall, and waits for it.
func (k *look) drive(ctx context.Context, req chat.Request, o Outcome) Entry {
	run, stopped, err := k.start(ctx, req)
	if err != nil {
		return refused(err)
	}
	defer stopped()
	budget := k.cfg.Budget
	if o == Cancelled || o == Expired {
		budget += cancelTime
	}
	got, exceeded := k.await(ctx, run, budget)
	e := Entry{Outcome: o}
	if got.Err != nil {
		e.Error = got.Err.Error()
	}
	switch got.Kind {
	case chat.Fenced:
		e.Outcome = NotClaimed
		return e
	case chat.Detached:
		if e.Outcome = Unknown; exceeded {
			e.Outcome = Exceeded
		}
		return e
	}
	k.alarm(got.Err)
	switch got.Kind {
	case chat.Finished:
		e.Status = store.Completed
	case chat.Interrupted:
		e.Status = store.Interrupted
	case chat.Canceled:
		e.Status = store.Aborted
	default:
		e.Status = store.Failed
	}
	return e
}

// await waits for a driver. One that makes no progress within the budget leaves
// the run, and so does every one when ctx is done.
func (k *look) await(ctx context.Context, run *chat.Run, budget time.Duration) (o chat.Outcome, exceeded bool) {
	rctx, stop := context.WithCancel(context.WithoutCancel(ctx))
	var aside sync.WaitGroup
	defer aside.Wait()
	defer stop()
	progress := make(chan struct{}, 1)
	aside.Go(func() {
		// Not by the Run itself, which would count as somebody who watches.
		for _, err := range k.cfg.Store.Log.Read(rctx, run.ID(), event.OnlyNew) {
			if err != nil {
				return
			}
			select {
			case progress <- struct{}{}:
			default:
			}
		}
	})
	ended := make(chan chat.Outcome, 1)
	aside.Go(func() {
		o, _ := run.Wait(rctx)
		ended <- o
	})
	t := time.NewTimer(budget)
	defer t.Stop()
	done := ctx.Done()
	for {
		select {
		case o := <-ended:
			return o, exceeded
		case <-progress:
			t.Reset(budget)
		case <-t.C:
			exceeded = true
			run.Detach(fmt.Errorf("%w: no progress for %v", chat.ErrDetached, budget))
		case <-done:
			done = nil
			run.Detach(chat.ErrShutdown)
		}
	}
}

// alarm tells of an end that a person should look at.
func (k *look) alarm(err error) {
	if err == nil {
		return
	}
	switch code := store.Code(err, ""); code {
	case "journal_tampered", "journal_torn_frame", "replay_diverged":
		k.cfg.Metrics.Alarm(code)
		k.log.Error("a run's journal can't be believed", "run", k.rec.ID, "code", code)
	}
}

// ending is how a run ends without a driver.
type ending struct {
	outcome    Outcome
	status     store.Status
	code, text string
	reason     string
	destroy    bool         // the sandbox, unless another run works in it
	launch     store.Launch // it must not have come further meanwhile; empty: however far
}

// end ends a run under a claim of its own, with one transaction.
func (k *look) end(ctx context.Context, e ending) Entry {
	ctx, stop := context.WithTimeout(ctx, 2*opTime)
	defer stop()
	end := chat.Ending{
		Status: e.status, Code: e.code, Message: e.text, CloseReason: e.reason,
		Check: func(rec store.Run) error { return k.still(rec, e) },
	}
	if key := k.rec.SandboxKey; key != "" {
		end.Instance = &store.Disposition{Key: key, Gen: k.rec.SandboxGen, Destroy: e.destroy || k.single(), KeepFor: k.cfg.KeepFor}
	}
	d := chat.Durability{Runs: k.cfg.Store.Runs, Log: k.cfg.Store.Log, Owner: k.cfg.Owner, Lease: k.cfg.Lease}
	if _, err := chat.Abandon(ctx, d, k.rec.ID, end); err != nil {
		return refused(err)
	}
	return Entry{Outcome: e.outcome, Status: e.status}
}

// still says why the run isn't any more what was decided about. Nobody else can
// change it now, but for its cancel and its viewers.
func (k *look) still(rec store.Run, e ending) error {
	failpoint.Hit(failpoint.ReapClaimed, k.cfg.Owner)
	switch {
	case rec.Epoch != k.rec.Epoch+1:
		return changedError("somebody else has had it")
	case e.launch != "" && rec.Launch != e.launch:
		return changedError("its agent was started")
	case e.status == store.Failed && !rec.CancelAt.IsZero():
		return changedError("its cancel is requested")
	}
	return nil
}

// changedError is a run that has changed since it was looked at.
type changedError string

func (e changedError) Error() string { return string(e) }

// single says that the run's sandbox is for this run alone, or to go with it.
func (k *look) single() bool {
	def := k.cfg.Definitions[k.rec.Definition]
	return def != nil && def.Definition().Lifecycle.OnComplete == sandbox.Destroy
}
