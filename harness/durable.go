package harness

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"sync"
	"syscall"
	"time"

	"github.com/aisandbox-go/aisandbox/chat"
	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/internal/failpoint"
	"github.com/aisandbox-go/aisandbox/journal"
	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/store"
)

const (
	// launchTime bounds the start of a detached agent, which no cancel interrupts
	// half way (spec 04 §3.5).
	launchTime = 2 * time.Minute

	// settleTime is how long an agent that was killed has to show in its journal
	// that it has ended.
	settleTime = 15 * time.Second
)

// Journaled implements chat.Journaler: what the agent of a durable run prints
// goes to a journal in its sandbox.
func (a *adapter) Journaled() bool { return true }

// detached is the way of a durable run: the agent outlives this host, and what it
// says is read from its journal.
type detached struct {
	*turn
	re    provider.Reattacher
	claim store.Claim
	runs  store.Runs

	// fresh says that no host can have started the agent before this one.
	fresh bool
	// base is added to positions: a second agent's journal comes after the first
	// one's.
	base int64

	tokens [2]string // of the agent, and of the one that is run instead (see [Fallback])
	second bool
}

// privateDir is the private directory of a durable run. Every host that may drive
// the run finds it, and nobody inside can tell its name beforehand.
func privateDir(c store.Claim) string {
	m := hmac.New(sha256.New, c.Nonce())
	m.Write([]byte("private/v1"))
	m.Write([]byte(c.RunID()))
	return "/tmp/aisandbox-" + hex.EncodeToString(m.Sum(nil))[:26]
}

// streamDetached is stream for a durable run.
func (t *turn) streamDetached(ctx context.Context) error {
	claim, ok := t.run.Claim()
	d, durable := t.run.Durability()
	if !ok || !durable {
		return errors.New("a durable run without a claim")
	}
	dt := &detached{turn: t, claim: claim, runs: d.Runs, re: journal.Of(t.sb.Handle())}
	rctx, stop := context.WithTimeout(alone(ctx), cleanupTime)
	defer stop()
	rec, err := d.Runs.Get(rctx, claim.RunID())
	if err != nil {
		return err
	}
	for n := range dt.tokens {
		if dt.tokens[n], err = journal.Token(rec, n); err != nil {
			return err
		}
	}
	t.run.AfterEnd(dt.clean)
	return dt.stream(ctx)
}

func (d *detached) stream(ctx context.Context) error {
	next, err := d.begin(ctx)
	if err != nil {
		if d.claim.Launch() == store.LaunchNone {
			return err
		}
		// An agent may be at work.
		if err = d.unknown(err); journal.Definite(err) {
			d.finishOff(ctx, d.tokens[0])
		} else if cause := context.Cause(ctx); cause != nil && endsAgent(cause) {
			d.sb.Condemn("the agent can't be reached: " + err.Error())
		}
		return err
	}
	again, err := d.process(ctx, &next, d.tokens[0], true)
	if err != nil || !again {
		return err
	}
	// The first one did nothing, so that this one is the run's only agent.
	d.second = true
	p, err := d.probe(ctx, d.tokens[1])
	if err != nil {
		return d.unknown(err)
	}
	if d.fresh = p.State == provider.ProbeAbsent; d.fresh {
		if err := d.prepare(ctx, next.Plan, false); err != nil {
			return err
		}
	}
	_, err = d.process(ctx, &next, d.tokens[1], false)
	return err
}

// begin finds out where the agent is and makes everything ready to start it, or
// to go on with it. A cancel of the run does not end it: the agent must be reached
// first.
func (d *detached) begin(ctx context.Context) (next Turn, err error) {
	actx, stop := context.WithTimeout(alone(ctx), cleanupTime)
	defer stop()
	plan, err := d.plan(actx)
	if err != nil {
		return next, err
	}
	if err := d.hide(plan); err != nil {
		return next, err
	}
	state, err := d.where(ctx, d.tokens[0])
	if err != nil {
		return next, err
	}
	d.fresh = state == provider.ProbeAbsent
	inside, err := d.ways(ctx, plan, !d.fresh)
	if err != nil {
		return next, err
	}
	next = Turn{Plan: plan, Inside: inside, NewID: event.NewIDs(plan.RunID)}
	if d.fresh {
		err = d.prepare(ctx, next.Plan, true)
	}
	return next, err
}

// where finds out what became of the agent. Absent means that it is to be
// started, which happens at most once whatever other hosts do.
func (d *detached) where(ctx context.Context, token string) (provider.ProbeState, error) {
	switch d.claim.Launch() {
	case store.Launched:
		// It ran: a journal that is not there is not a reason to start it again.
		p, err := journal.Preflight(alone(ctx), d.re, token, d.claim.RunID(), d.runs, 0)
		return p.State, err
	case store.Launching:
		p, err := d.probe(ctx, token)
		return p.State, err
	default:
		return provider.ProbeAbsent, nil
	}
}

func (d *detached) probe(ctx context.Context, token string) (provider.Probe, error) {
	pctx, stop := context.WithTimeout(alone(ctx), cleanupTime)
	defer stop()
	return d.re.Probe(pctx, token)
}

// alone is a context that a cancel of the run does not end: a cancel must reach
// the agent first.
func alone(ctx context.Context) context.Context { return context.WithoutCancel(ctx) }

// unknown is what an error means that says nothing about the agent: the run stays
// open, for a host that can reach the sandbox.
func (d *detached) unknown(err error) error {
	switch {
	case errors.Is(err, provider.ErrNotFound):
		return &lostError{err}
	case journal.Definite(err), errors.Is(err, store.ErrFenced):
		return err
	}
	d.run.Detach(fmt.Errorf("%w: the sandbox does not answer: %w", chat.ErrDetached, err))
	return err
}

// lostError is a sandbox that is gone under its agent.
type lostError struct{ err error }

func (e *lostError) Error() string        { return "the sandbox is gone: " + e.err.Error() }
func (e *lostError) Unwrap() error        { return e.err }
func (e *lostError) Is(target error) bool { return target == chat.ErrLost }

// Code is that of chat.ErrLost.
func (e *lostError) Code() string { return store.Code(chat.ErrLost, "") }

// prepare writes the files of an agent that is about to be started.
func (d *detached) prepare(ctx context.Context, plan Plan, warn bool) error {
	files, warnings, err := d.a.cli.Files(plan)
	if err != nil {
		return err
	}
	if warn {
		for _, w := range warnings {
			plan.Warn(w)
		}
	}
	return d.write(ctx, files)
}

// launch starts the agent of a turn. Launching is committed before the start is
// asked for, launched after it was confirmed, so that whoever comes next knows
// where to look before it starts anything.
func (d *detached) launch(ctx context.Context, t Turn, token string) error {
	cmd, err := d.a.cli.Command(t)
	if err != nil {
		return err
	}
	if cmd, err = d.sb.Prepare(cmd); err != nil {
		return err
	}
	cmd.Stdout, cmd.Stderr = nil, nil
	if err := d.stage(ctx, store.Launching); err != nil {
		return err
	}
	failpoint.Hit(failpoint.LaunchRecorded, d.claim.Owner())
	if err := context.Cause(ctx); err != nil {
		return err
	}
	if err := d.run.Confirm(ctx); err != nil {
		return err
	}
	lctx, stop := context.WithTimeout(alone(ctx), launchTime)
	defer stop()
	err = d.re.Launch(lctx, token, cmd, provider.LaunchOptions{RunID: d.claim.RunID(), Nonce: d.claim.Nonce()})
	switch {
	case errors.Is(err, provider.ErrAlreadyLaunched): // by another host: read what it says
	case errors.Is(err, provider.ErrUnavailable), errors.Is(err, context.DeadlineExceeded):
		return d.unknown(err) // it may run
	case err != nil:
		return startError(cmd.Argv, err)
	}
	failpoint.Hit(failpoint.LaunchSent, d.claim.Owner())
	if err := d.stage(alone(ctx), store.Launched); err != nil {
		return err
	}
	failpoint.Hit(failpoint.LaunchConfirmed, d.claim.Owner())
	return nil
}

// stage records how far the launch is. A store that can't be reached is waited
// for as long as the run lives.
func (d *detached) stage(ctx context.Context, s store.Launch) error {
	for wait := 50 * time.Millisecond; ; wait = min(2*wait, 2*time.Second) {
		uctx, stop := context.WithTimeout(ctx, cleanupTime)
		err := d.runs.Update(uctx, d.claim, store.RunPatch{Launch: &s})
		stop()
		if err == nil || !errors.Is(err, store.ErrUnavailable) || d.run.Confirm(ctx) != nil {
			return err
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return context.Cause(ctx)
		}
	}
}

// process runs, or goes on with, one agent to its end. again is true when a
// fallback is to be run instead: t holds it.
func (d *detached) process(ctx context.Context, t *Turn, token string, mayFall bool) (again bool, err error) {
	if d.fresh {
		if err := d.launch(ctx, *t, token); err != nil {
			return false, err
		}
	}
	rd := &reading{detached: d, turn: *t, token: token, dec: d.a.cli.Decoder(*t), tail: &tail{most: stderrTail}}
	rd.exited = make(chan struct{})
	rctx, stop := context.WithCancelCause(alone(ctx))
	defer stop(nil)
	// What ends the run decides: a cancel ends the agent and reads what it has to
	// say to that; anything else ends the reading and leaves the agent alone.
	laddered := make(chan struct{})
	unwatch := context.AfterFunc(ctx, func() {
		defer close(laddered)
		if cause := context.Cause(ctx); !endsAgent(cause) {
			stop(cause)
			return
		}
		rd.abort(alone(ctx))
		timer := time.NewTimer(settleTime)
		defer timer.Stop()
		select {
		case <-rd.exited:
		case <-timer.C:
			stop(&journal.EndedError{RunID: d.claim.RunID(), Why: "it was killed and shows no end"})
		}
	})
	err = rd.read(rctx)
	rd.over()
	if !unwatch() {
		<-laddered
	}
	if err != nil {
		return false, rd.failed(ctx, err)
	}
	return rd.close(ctx, t, mayFall)
}

// endsAgent says whether the end of a run's context ends the agent, too.
func endsAgent(cause error) bool {
	return !errors.Is(cause, store.ErrFenced) && !errors.Is(cause, chat.ErrDetached) && !errors.Is(cause, chat.ErrShutdown)
}

// reading is the reading of one agent's journal.
type reading struct {
	*detached
	turn  Turn
	token string
	dec   Decoder
	tail  *tail

	exit    provider.Exit
	exitOff int64
	emitted bool

	once   sync.Once
	exited chan struct{} // closed when nothing more is read
}

func (r *reading) over() { r.once.Do(func() { close(r.exited) }) }

func (r *reading) read(ctx context.Context) error {
	linger := r.lingering(r.dec, r.endAgent, r.exited)
	defer linger.stop()
	jr := journal.NewReader(r.re, r.token, journal.Options{
		RunID: r.claim.RunID(), Nonce: r.claim.Nonce(), Poll: !r.sb.Traits().Kill, MaxLine: MaxLine,
	})
	for rec, err := range jr.Records(ctx) {
		if err != nil {
			return err
		}
		switch rec.Kind {
		case journal.KindLine, journal.KindPartial:
			line := bytes.TrimSpace(rec.Data)
			if len(line) == 0 {
				continue
			}
			failpoint.Hit(failpoint.RecordRead, r.claim.Owner())
			evs, err := r.dec.Line(line)
			for _, ev := range evs {
				r.emitted = true
				if !r.emit(chat.Item{Event: ev, Off: r.base + rec.Off}) {
					return errStop
				}
			}
			if err != nil {
				return &decodeError{err}
			}
			linger.look()
		case journal.KindStderr:
			_, _ = r.tail.Write(rec.Data)
		case journal.KindExit:
			r.exit, r.exitOff = rec.Exit, r.base+rec.Off
			r.run.Logger().Debug("the agent has ended", "exit", rec.Exit.String(), "strength", jr.Level())
		}
	}
	return nil
}

// decodeError is output that the decoder can't take.
type decodeError struct{ err error }

func (e *decodeError) Error() string { return e.err.Error() }
func (e *decodeError) Unwrap() error { return e.err }

// failed is what becomes of a run whose journal could not be read to its end.
func (r *reading) failed(ctx context.Context, err error) error {
	cause := context.Cause(ctx)
	if cause != nil && !endsAgent(cause) {
		return cause // the agent is left alone
	}
	var dec *decodeError
	switch {
	case errors.Is(err, errStop), errors.As(err, &dec):
	case errors.Is(err, provider.ErrNotFound):
		return &lostError{err}
	case errors.Is(err, journal.ErrTampered), errors.Is(err, journal.ErrTornFrame):
		r.hold()
		r.sb.Condemn(err.Error())
	case !journal.Definite(err):
		if cause != nil {
			r.sb.Condemn("the agent can't be reached: " + err.Error())
		}
		return r.unknown(err)
	}
	// The run ends here, so that the agent, or what is left of it, must.
	r.finishOff(ctx, r.token)
	if cause != nil && (errors.Is(err, journal.ErrEndedWithoutExit) || errors.Is(err, errStop)) {
		return cause
	}
	return err
}

// finishOff ends what there is of an agent, or has the sandbox destroyed.
func (d *detached) finishOff(ctx context.Context, token string) {
	kctx, stop := context.WithTimeout(alone(ctx), settleTime)
	defer stop()
	if err := d.re.Kill(kctx, token, int(syscall.SIGKILL)); err != nil && !errors.Is(err, provider.ErrNotFound) {
		d.sb.Condemn("the agent can't be ended: " + err.Error())
	}
}

// hold keeps the journal, as evidence.
func (r *reading) hold() {
	r.run.OnFinish(func(f *store.Final) { f.JournalHold = true })
}

// close takes the decoder's last words after a verified exit.
func (r *reading) close(ctx context.Context, t *Turn, mayFall bool) (again bool, err error) {
	cause := context.Cause(ctx)
	if cause != nil && !endsAgent(cause) && !errors.Is(cause, chat.ErrShutdown) && !errors.Is(cause, chat.ErrDetached) {
		return false, cause
	}
	aborted := cause != nil && endsAgent(cause)
	if aborted {
		// The program may have left a child that ended with none of the signals.
		r.finishOff(ctx, r.token)
	}
	last := End{Exit: r.exit, Aborted: aborted, StderrTail: r.sb.Redactor().Tail(r.own.String(r.tail.String()), stderrTail)}
	evs, err := r.dec.Close(last)
	if err != nil {
		return false, err
	}
	if fb, ok := r.a.cli.(Fallback); ok && mayFall && !r.emitted && !aborted {
		if next, why, ok := fb.Fallback(*t, evs, last); ok {
			next.Warn(why)
			*t = next
			r.base = r.exitOff
			return true, nil
		}
	}
	ok := false
	for _, ev := range evs {
		if _, fin := ev.(event.RunFinished); fin {
			ok = true
		}
	}
	r.run.Exited(store.Exit{Code: r.exit.Code, Off: r.exitOff, Verified: true, OK: ok})
	failpoint.Hit(failpoint.ExitRead, r.claim.Owner())
	return false, r.finish(ctx, evs, r.exitOff)
}

// endAgent is what ends a program that stays after its result.
func (r *reading) endAgent() { r.abort(context.Background()) }

// abort ends the agent in steps; at the end its whole tree is gone, or the
// sandbox will be.
func (r *reading) abort(ctx context.Context) {
	steps := []AbortStep{{Signal: int(syscall.SIGTERM), Wait: killTime}}
	if l, ok := r.a.cli.(AbortLadder); ok {
		steps = l.AbortLadder()
	}
	for _, s := range steps {
		kctx, stop := context.WithTimeout(ctx, cleanupTime)
		err := r.re.Kill(kctx, r.token, s.Signal)
		stop()
		if err != nil {
			break
		}
		timer := time.NewTimer(s.Wait)
		select {
		case <-r.exited:
			timer.Stop()
			return
		case <-timer.C:
		}
	}
	r.finishOff(ctx, r.token)
}

// clean removes what the run left in the sandbox, when its end is stored. What
// is left after a crash goes with the sandbox, or with [journal.Prune].
func (d *detached) clean(ctx context.Context, o chat.Outcome) {
	if err := d.closeTunnels(); err != nil {
		d.run.Logger().Debug("close the ways to this host", "error", err)
	}
	if o.Kind == chat.Detached || o.Kind == chat.Fenced {
		return // the agent goes on and needs its files, or they are another host's
	}
	d.removePrivate(ctx)
	if errors.Is(o.Err, journal.ErrTampered) || errors.Is(o.Err, journal.ErrTornFrame) {
		return
	}
	var diverged *chat.DivergedError
	if errors.As(o.Err, &diverged) {
		return // it is evidence
	}
	for n, token := range d.tokens {
		if n > 0 && !d.second {
			break
		}
		if err := d.forget(ctx, token); err != nil {
			d.run.Logger().Debug("the journal is left in the sandbox", "error", err)
		}
	}
}

// forget removes a journal whose supervisor may still be about to go.
func (d *detached) forget(ctx context.Context, token string) error {
	ctx, stop := context.WithTimeout(ctx, cleanupTime)
	defer stop()
	for {
		err := d.re.Forget(ctx, token)
		if err == nil || !errors.Is(err, provider.ErrInvalid) {
			return err
		}
		timer := time.NewTimer(20 * time.Millisecond)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return err
		}
	}
}
