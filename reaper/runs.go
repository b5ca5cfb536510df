package reaper

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/aisandbox-go/aisandbox/chat"
	"github.com/aisandbox-go/aisandbox/internal/failpoint"
	"github.com/aisandbox-go/aisandbox/journal"
	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/sandbox"
	"github.com/aisandbox-go/aisandbox/store"
)

// ReasonExpired is the reason for the cancel of a run that nobody watched.
const ReasonExpired = "expired"

// sweep takes what is due until nothing is left: however many agents are at work,
// what has to be ended is reached in the same sweep (D-17). With daemon it returns
// when everything has been begun, else when it is done.
func (r *Reaper) sweep(ctx context.Context, c *collector, daemon bool) error {
	var own sync.WaitGroup
	defer own.Wait()
	group := &own
	if daemon {
		group = &r.live
	}
	met := map[string]bool{}
	for len(met) < maxSweep && ctx.Err() == nil {
		dctx, stop := context.WithTimeout(ctx, opTime)
		work, err := r.cfg.Store.Runs.Due(dctx, r.cfg.Owner, page)
		stop()
		if err != nil {
			return fmt.Errorf("reaper: runs that are due: %w", err)
		}
		if len(work) == 0 {
			return nil
		}
		now, err := r.clock.now(ctx)
		if err != nil {
			return err
		}
		r.order(work, now)
		fresh := false
		for _, w := range work {
			if met[w.Run.ID] || !r.enter(w.Run.ID) {
				continue
			}
			met[w.Run.ID], fresh = true, true
			select {
			case r.workers <- struct{}{}:
			case <-ctx.Done():
				r.exit(w.Run.ID)
				return nil
			}
			group.Go(func() {
				defer func() { <-r.workers; r.exit(w.Run.ID) }()
				failpoint.Hit(failpoint.ReapTaken, r.cfg.Owner)
				c.count(func(res *Result) { res.Considered++ })
				r.cfg.Metrics.Orphaned(orphaned(w.Run, now))
				e := r.handle(ctx, c, w, daemon)
				e.RunID = w.Run.ID
				c.run(e)
				r.report(e)
			})
		}
		if !fresh || len(work) < page {
			return nil
		}
	}
	return nil
}

// order puts first what a person waits for, then what has had its time.
func (r *Reaper) order(work []store.Work, now time.Time) {
	rank := func(w store.Work) int {
		switch {
		case !w.Run.CancelAt.IsZero():
			return 0
		case r.unwatched(w.Run, now, 1):
			return 1
		}
		return 2
	}
	slices.SortStableFunc(work, func(a, b store.Work) int { return rank(a) - rank(b) })
}

// orphaned is since when a run has had no driver.
func orphaned(rec store.Run, now time.Time) time.Duration {
	since := rec.LeaseUntil
	if since.IsZero() {
		since = rec.StartedAt // never claimed, or released
	}
	return max(now.Sub(since), 0)
}

// unwatched says whether nobody has watched the run for n times the TTL.
func (r *Reaper) unwatched(rec store.Run, now time.Time, n int) bool {
	return r.cfg.TTL > 0 && now.Sub(rec.LastViewedAt) >= time.Duration(n)*r.cfg.TTL
}

// enter keeps a run from being handled here twice at a time, when the first time
// takes longer than the store's push-back.
func (r *Reaper) enter(id string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed || r.busy[id] || r.drives[id] != nil {
		return false
	}
	r.busy[id] = true
	return true
}

func (r *Reaper) exit(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.busy, id)
}

// report logs what was done with a run, where anything was.
func (r *Reaper) report(e Entry) {
	switch e.Outcome {
	case Producing, NotClaimed:
		r.log.Debug("run", "run", e.RunID, "outcome", string(e.Outcome))
	case Unknown, Exceeded, Errored:
		r.log.Warn("run", "run", e.RunID, "outcome", string(e.Outcome), "error", e.Error)
	default:
		r.log.Info("run", "run", e.RunID, "outcome", string(e.Outcome), "status", string(e.Status))
	}
}

func unknown(err error) Entry { return Entry{Outcome: Unknown, Error: err.Error()} }

// handle decides what becomes of a run: the first rule that fits (spec 04 §21.10).
func (r *Reaper) handle(ctx context.Context, c *collector, w store.Work, daemon bool) Entry {
	rec := w.Run
	if !rec.Status.Valid() || !rec.Active() {
		return unknown(fmt.Errorf("its status is %q", rec.Status))
	}
	now, err := r.clock.now(ctx)
	if err != nil {
		return unknown(err)
	}
	k := &look{Reaper: r, c: c, rec: rec, attempts: w.Attempts, daemon: daemon, want: Cancelled}
	if rec.CancelReason == ReasonExpired {
		k.want = Expired
	}
	switch {
	case rec.Kind != store.KindSandbox && rec.CancelAt.IsZero():
		// Its agent lived in the host that has gone.
		return k.end(ctx, ending{outcome: Died, status: store.Failed, code: store.Code(journal.ErrEndedWithoutExit, "agent_died"),
			text: "the host in which the run worked is gone"})
	case !rec.CancelAt.IsZero():
		return k.cancel(ctx)
	case r.unwatched(rec, now, 1):
		return k.expire(ctx, now)
	case rec.Launch == store.LaunchNone:
		return k.relaunch(ctx)
	}
	return k.goOn(ctx, k.probe(ctx))
}

// look is one look at one run.
type look struct {
	*Reaper
	c        *collector
	rec      store.Run
	attempts int  // how often it was given out without any progress
	daemon   bool // somebody will be there while an agent works
	want     Outcome
}

// goOn is for a run that shall go on.
func (k *look) goOn(ctx context.Context, s sight) Entry {
	switch {
	case s.err != nil:
		return unknown(s.err)
	case s.lost:
		return k.over(ctx, Died, store.Code(chat.ErrLost, "sandbox_lost"), "the sandbox in which the run worked is gone")
	case s.state == provider.ProbeExited:
		return k.over(ctx, Finalized, "", "")
	case s.state == provider.ProbeDead:
		return k.over(ctx, Died, store.Code(journal.ErrEndedWithoutExit, "agent_died"), "the agent is gone and has not said how it ended")
	case s.state == provider.ProbeAbsent && k.rec.Launch == store.Launching:
		return k.relaunch(ctx)
	case s.state == provider.ProbeAbsent:
		// It was launched, so that it has a journal somewhere, or nothing has.
		return k.over(ctx, Died, "", "")
	case !k.daemon || k.cfg.Adopt == AdoptLazy:
		return Entry{Outcome: Producing}
	}
	return k.adopt(ctx, Adopted, Producing)
}

// over drives a run whose agent has ended to its end. Where that can't be done here
// a run of which it is known how it ended is ended without what its agent had said
// last; code is empty where it is not.
func (k *look) over(ctx context.Context, o Outcome, code, text string) Entry {
	req, err := k.rebuild(ctx)
	if err == nil {
		return k.drive(ctx, req, o)
	}
	if !errors.Is(err, errGone) || code == "" || k.attempts < patience {
		return unknown(err)
	}
	return k.end(ctx, ending{outcome: o, status: store.Failed, code: code, text: text})
}

// relaunch is for a run for which no agent was started.
func (k *look) relaunch(ctx context.Context) Entry {
	req, err := k.rebuild(ctx)
	switch {
	case err == nil && k.daemon && !k.cfg.NoRelaunch:
		e := k.adoptWith(ctx, req, Relaunched, NotClaimed)
		return e
	case err == nil && !k.daemon && !k.cfg.NoRelaunch:
		err = errors.New("its agent was never started, and only a server starts one")
	case err == nil:
		return k.never(ctx)
	}
	gone := errors.Is(err, errGone) || !k.daemon
	if !gone || k.attempts < patience {
		return unknown(err)
	}
	return k.never(ctx)
}

// never ends a run that has no agent and will not get one.
func (k *look) never(ctx context.Context) Entry {
	e := ending{outcome: NeverLaunched, status: store.Failed, code: "never_launched",
		text: "the host that had the run went away before it had started the agent", launch: k.rec.Launch}
	if k.rec.Launch != store.LaunchNone {
		// Whoever was about to start it must not do so any more.
		if err := k.kill(ctx); err != nil {
			return unknown(err)
		}
	}
	return k.end(ctx, e)
}

// expire is for a run that nobody has watched for too long.
func (k *look) expire(ctx context.Context, now time.Time) Entry {
	var s sight
	if k.rec.Launch != store.LaunchNone {
		s = k.probe(ctx)
	}
	switch {
	case s.err != nil && !k.unwatched(k.rec, now, 2):
		// That the provider does not answer says nothing about the agent, which may
		// have finished. It gets once more the time that it had.
		return unknown(s.err)
	case k.attempts > 2*patience: // what it has come to can't be told
	case s.lost, s.state == provider.ProbeExited, s.state == provider.ProbeDead:
		return k.goOn(ctx, s) // it has ended by itself
	}
	k.want = Expired
	if e, ok := k.expired(ctx); !ok {
		return e
	}
	return k.stop(ctx, s)
}

// expired records that the run shall end because nobody watches it. False means
// that this isn't so any more; nothing was touched.
func (k *look) expired(ctx context.Context) (Entry, bool) {
	octx, stop := context.WithTimeout(ctx, opTime)
	defer stop()
	rec, err := k.cfg.Store.Runs.Get(octx, k.rec.ID)
	if err != nil {
		return unknown(err), false
	}
	now, err := k.clock.now(octx)
	switch {
	case err != nil:
		return unknown(err), false
	case !rec.Active() || rec.Epoch != k.rec.Epoch:
		return Entry{Outcome: NotClaimed}, false
	case !rec.CancelAt.IsZero():
		k.want = Cancelled
	case !k.unwatched(rec, now, 1):
		return Entry{Outcome: NotClaimed, Error: "somebody watches it again"}, false
	default:
		if err := k.cfg.Store.Runs.RequestCancel(octx, rec.ID, ReasonExpired); err != nil {
			return unknown(err), false
		}
	}
	return Entry{}, true
}

// cancel is for a run whose end is wanted.
func (k *look) cancel(ctx context.Context) Entry {
	if k.rec.Launch == store.LaunchNone || k.rec.Kind != store.KindSandbox {
		return k.stop(ctx, sight{})
	}
	return k.stop(ctx, k.probe(ctx))
}

// stop ends a run, its agent first.
func (k *look) stop(ctx context.Context, s sight) Entry {
	e := ending{outcome: k.want, status: store.Aborted, code: "aborted", text: "Request aborted", reason: "cancelled"}
	if k.want == Expired {
		e.code, e.text, e.reason = "expired", fmt.Sprintf("nobody watched the run for %v", k.cfg.TTL), ReasonExpired
	}
	switch {
	case k.rec.Kind != store.KindSandbox, s.lost:
		return k.end(ctx, e) // there is nothing to end
	case k.rec.Launch == store.LaunchNone:
		e.launch = store.LaunchNone
		return k.end(ctx, e)
	case s.err != nil && k.attempts < patience:
		return unknown(s.err)
	case s.err != nil:
		e.destroy = true // what can't be reached can't be ended otherwise
		return k.end(ctx, e)
	}
	if k.attempts <= 2*patience {
		req, err := k.rebuild(ctx)
		if err == nil {
			return k.drive(ctx, req, k.want)
		}
		if !errors.Is(err, errGone) && k.attempts < patience {
			return unknown(err)
		}
	}
	if err := k.kill(ctx); err != nil {
		k.log.Warn("the agent's death can't be confirmed; its sandbox is destroyed", "run", k.rec.ID, "error", err)
		e.destroy = true
	}
	return k.end(ctx, e)
}

// sight is what is known of an agent. Without an error and without being lost it
// has a state.
type sight struct {
	state provider.ProbeState
	lost  bool
	err   error
}

// probe finds out what became of the run's agent, without any claim and without
// any effect.
func (k *look) probe(ctx context.Context) sight {
	k.c.count(func(res *Result) { res.Probed++ })
	if k.rec.SandboxKey == "" {
		return sight{state: provider.ProbeRunning} // its driver knows where to look
	}
	ctx, stop := context.WithTimeoutCause(ctx, probeTime, errors.New("the sandbox does not answer"))
	defer stop()
	box, err := k.open(ctx)
	if err != nil {
		if errors.Is(err, chat.ErrLost) {
			return sight{lost: true}
		}
		return sight{err: err}
	}
	p, err := journal.State(ctx, journal.Of(box.Handle()), k.rec)
	err = errors.Join(err, ctx.Err())
	if cerr := box.Close(); cerr != nil {
		k.log.Debug("close a sandbox", "error", cerr)
	}
	switch {
	case errors.Is(err, provider.ErrNotFound):
		return sight{lost: true}
	case err != nil:
		return sight{err: err}
	}
	return sight{state: p.State}
}

// open resumes the sandbox that the run is bound to.
func (k *look) open(ctx context.Context) (*sandbox.Sandbox, error) {
	def := k.cfg.Definitions[k.rec.Definition]
	if def == nil || k.cfg.Store.Instances == nil {
		return nil, fmt.Errorf("reaper: run %q: definition %q is not known on this host", k.rec.ID, k.rec.Definition)
	}
	lost := &sandbox.LostError{Key: k.rec.SandboxKey, Gen: k.rec.SandboxGen}
	inst, err := k.cfg.Store.Instances.Get(ctx, k.rec.SandboxKey)
	switch {
	case errors.Is(err, store.ErrNotFound):
		return nil, lost
	case err != nil:
		return nil, err
	case inst.Gen != k.rec.SandboxGen, inst.State.Gone(), len(inst.Ref) == 0:
		return nil, lost
	case inst.Provider != def.Provider().Name():
		return nil, fmt.Errorf("reaper: run %q: its sandbox is of provider %q, and definition %q has %q", k.rec.ID, inst.Provider, k.rec.Definition, def.Provider().Name())
	}
	return sandbox.OpenRecord(ctx, k.cfg.Sandbox, def, inst)
}

// kill ends the run's agent without a driver, and sees to it that none is started
// any more. Nil means that its death is confirmed.
func (k *look) kill(ctx context.Context) error {
	ctx, stop := context.WithTimeoutCause(ctx, 2*probeTime, errors.New("the sandbox does not answer"))
	defer stop()
	box, err := k.open(ctx)
	if errors.Is(err, chat.ErrLost) {
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { _ = box.Close() }()
	if !box.Traits().Kill {
		return fmt.Errorf("reaper: provider %q can't end all of an agent's processes", box.Ref().Provider)
	}
	re := journal.Of(box.Handle())
	for n := range 2 {
		token, err := journal.Token(k.rec, n)
		if err != nil {
			return err
		}
		p, err := re.Probe(ctx, token)
		if err != nil {
			return err
		}
		switch p.State {
		case provider.ProbeAbsent:
			err = re.Forget(ctx, token)
		case provider.ProbeStarting, provider.ProbeRunning:
			if err = re.Kill(ctx, token, 9); err == nil {
				p, err = re.Probe(ctx, token)
			}
			if err == nil && p.State != provider.ProbeExited && p.State != provider.ProbeDead {
				err = fmt.Errorf("reaper: run %q: its agent was killed and is %s", k.rec.ID, p.State)
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}
