package storetest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/store"
)

// model is what a run must be after a sequence of calls: the row and the log of
// spec 04 §21.3, as plain values.
type model struct {
	status  store.Status
	epoch   uint64
	owner   string
	until   time.Time // zero: no lease
	batchNo uint64
	lastLen int // events in the last batch of this epoch
	pos     store.Pos
	cancel  string // "": not requested
	events  []modelEvent
}

type modelEvent struct {
	name  string
	epoch uint64
	pos   *store.Pos
}

// held is a claim as a host believes it to be.
type held struct {
	claim store.Claim
	last  store.Batch
}

// appendCode says how an append must be answered: "" is success, "again" a repeated one.
func (m *model) appendCode(epoch uint64, b store.Batch) string {
	switch {
	case epoch != m.epoch:
		return "claim_lost"
	case m.status != store.Running:
		return "log_closed"
	case b.No != 0 && b.No == m.batchNo:
		return "again"
	case b.No != m.batchNo+1:
		return "batch_out_of_order"
	}
	mark := m.pos
	for _, e := range b.Events {
		if e.Pos == nil {
			continue
		}
		if !mark.Less(*e.Pos) {
			return "replay_diverged"
		}
		mark = *e.Pos
	}
	return ""
}

func (m *model) add(b store.Batch) {
	for _, e := range b.Events {
		m.events = append(m.events, modelEvent{nameOf(e.Event), m.epoch, e.Pos})
		if e.Pos != nil {
			m.pos = *e.Pos
		}
	}
	m.batchNo, m.lastLen = b.No, len(b.Events)
}

func (m *model) claimReason(owner string, force, reaper bool, now time.Time) store.ClaimReason {
	switch {
	case m.status != store.Running:
		return store.ClaimTerminal
	case !m.until.IsZero() && !m.until.Before(now) && (!force || m.owner != owner):
		return store.ClaimHeld
	case m.cancel != "" && !reaper:
		return store.ClaimCanceled
	}
	return ""
}

// machine drives a store and the model with the same calls.
type machine struct {
	s      store.Set
	ctx    context.Context
	id     string
	m      model
	claims []held
	n      int // events made
	clock  bool
}

func (x *machine) pick(t *rapid.T) *held {
	if len(x.claims) == 0 {
		t.Skip("nobody claims")
	}
	return &x.claims[rapid.IntRange(0, len(x.claims)-1).Draw(t, "claim")]
}

// batch draws what a host might send: most often the right thing.
func (x *machine) batch(t *rapid.T, h *held) store.Batch {
	switch rapid.IntRange(0, 9).Draw(t, "what") {
	case 0:
		if h.last.No > 0 {
			return h.last // its answer was lost
		}
	case 1:
		return store.Batch{No: h.last.No + 2, Events: live("gap")}
	case 2:
		return store.Batch{No: h.last.No, Events: h.last.Events}
	}
	b := store.Batch{No: h.last.No + 1}
	mark := x.m.pos
	for range rapid.IntRange(0, 3).Draw(t, "events") {
		x.n++
		e := store.Event{Event: say(fmt.Sprint("e", x.n))}
		switch rapid.IntRange(0, 5).Draw(t, "position") {
		case 0:
		case 1: // perhaps stale
			e.Pos = &store.Pos{Off: max(0, mark.Off+int64(rapid.IntRange(-2, 1).Draw(t, "off"))), Idx: rapid.IntRange(0, 2).Draw(t, "idx")}
		case 2:
			e.Pos = &store.Pos{Off: mark.Off, Idx: mark.Idx + 1}
		default:
			e.Pos = &store.Pos{Off: mark.Off + int64(rapid.IntRange(1, 3).Draw(t, "step"))}
		}
		if e.Pos != nil {
			mark = *e.Pos
			fp := event.Fingerprint(e.Event)
			e.Print = fp[:]
		}
		b.Events = append(b.Events, e)
	}
	return b
}

func (x *machine) Append(t *rapid.T) {
	h := x.pick(t)
	b := x.batch(t, h)
	want := x.m.appendCode(h.claim.Epoch(), b)
	offs, err := x.s.Log.Append(x.ctx, h.claim, b)
	switch want {
	case "", "again":
		if err != nil {
			t.Fatalf("append %d: %v", b.No, err)
		}
		if want == "" {
			x.m.add(b)
		}
		if len(offs) != len(b.Events) {
			t.Fatalf("append %d: %d offsets for %d events", b.No, len(offs), len(b.Events))
		}
		h.last = b
	default:
		if store.Code(err, "") != want {
			t.Fatalf("append %d with epoch %d: got %v, want %s", b.No, h.claim.Epoch(), err, want)
		}
	}
}

func (x *machine) Finish(t *rapid.T) {
	if rapid.IntRange(0, 3).Draw(t, "really") > 0 {
		t.Skip("not yet")
	}
	h := x.pick(t)
	f := store.Final{Status: rapid.SampledFrom([]store.Status{store.Completed, store.Aborted, store.Interrupted}).Draw(t, "status")}
	if rapid.Bool().Draw(t, "with a batch") {
		f.Batch = x.batch(t, h)
	}
	want := x.m.appendCode(h.claim.Epoch(), f.Batch)
	if f.Batch.No == 0 {
		f.Batch.Events = nil
		if want == "batch_out_of_order" || want == "replay_diverged" {
			want = ""
		}
	}
	r, err := x.s.Log.Finish(x.ctx, h.claim, f)
	switch want {
	case "", "again":
		if err != nil {
			t.Fatalf("finish: %v", err)
		}
		if want == "" && f.Batch.No != 0 {
			x.m.add(f.Batch)
		}
		x.m.status, x.m.owner, x.m.until = f.Status, "", time.Time{}
	case "log_closed": // by this very claim: told again
		if err != nil {
			t.Fatalf("finish again: %v", err)
		}
	default:
		if store.Code(err, "") != want {
			t.Fatalf("finish with epoch %d: got %v, want %s", h.claim.Epoch(), err, want)
		}
		return
	}
	if r.Status != x.m.status {
		t.Fatalf("finish: status %s, want %s", r.Status, x.m.status)
	}
}

func (x *machine) Claim(t *rapid.T) {
	o := store.ClaimOptions{Owner: rapid.SampledFrom([]string{"a", "b"}).Draw(t, "owner"), TTL: time.Minute,
		Force: rapid.Bool().Draw(t, "force"), Reaper: rapid.Bool().Draw(t, "reaper")}
	now := time.Now()
	want := x.m.claimReason(o.Owner, o.Force, o.Reaper, now)
	c, err := x.s.Runs.Claim(x.ctx, x.id, o)
	if want != "" {
		var ce *store.ClaimError
		if !errors.As(err, &ce) || ce.Reason != want {
			t.Fatalf("claim: got %v, want %s", err, want)
		}
		return
	}
	if err != nil {
		t.Fatalf("claim: %v", err)
	}
	x.m.epoch++
	x.m.owner, x.m.until, x.m.batchNo, x.m.lastLen = o.Owner, now.Add(o.TTL), 0, 0
	if c.Epoch() != x.m.epoch || c.LastSeq() != int64(len(x.m.events)) || c.Pos() != x.m.pos {
		t.Fatalf("claim: epoch %d at %d, %v; want %d at %d, %v", c.Epoch(), c.LastSeq(), c.Pos(), x.m.epoch, len(x.m.events), x.m.pos)
	}
	x.claims = append(x.claims, held{claim: c})
}

func (x *machine) Renew(t *rapid.T) {
	h := x.pick(t)
	lost, canceled, err := x.s.Runs.Renew(x.ctx, []store.ClaimRef{h.claim.Ref()}, time.Minute)
	if err != nil {
		t.Fatalf("renew: %v", err)
	}
	mine := h.claim.Epoch() == x.m.epoch && x.m.status == store.Running
	if mine {
		x.m.until = time.Now().Add(time.Minute)
		// A release gives the name back; a renewal afterwards revives the lease alone.
	}
	if (len(lost) == 0) != mine || (len(canceled) == 1) != (mine && x.m.cancel != "") {
		t.Fatalf("renew: lost %v, cancelled %v", lost, canceled)
	}
}

func (x *machine) Release(t *rapid.T) {
	h := x.pick(t)
	if err := x.s.Runs.Release(x.ctx, h.claim); err != nil {
		t.Fatalf("release: %v", err)
	}
	if h.claim.Epoch() == x.m.epoch && x.m.status == store.Running {
		x.m.owner, x.m.until = "", time.Time{}
	}
}

func (x *machine) Cancel(t *rapid.T) {
	if rapid.IntRange(0, 3).Draw(t, "really") > 0 {
		t.Skip("not yet")
	}
	reason := rapid.SampledFrom([]string{"x", "y"}).Draw(t, "reason")
	if err := x.s.Runs.RequestCancel(x.ctx, x.id, reason); err != nil {
		t.Fatalf("cancel: %v", err)
	}
	if x.m.status == store.Running && x.m.cancel == "" {
		x.m.cancel = reason
	}
}

func (x *machine) Wait(t *rapid.T) {
	if !x.clock {
		t.Skip("waiting would take time")
	}
	time.Sleep(time.Duration(rapid.IntRange(1, 40).Draw(t, "seconds")) * time.Second)
}

func (x *machine) Again(t *rapid.T) {
	r, created, err := x.s.Runs.Create(x.ctx, store.NewRun{ID: x.id, Thread: store.Thread{ID: "other"}})
	if err != nil || created || r.Status != x.m.status {
		t.Fatalf("create again: %v %v %s", created, err, r.Status)
	}
}

// Check compares everything that can be seen.
func (x *machine) Check(t *rapid.T) {
	r, err := x.s.Runs.Get(x.ctx, x.id)
	if err != nil {
		t.Fatalf("get: %v", err)
	}
	if r.Status != x.m.status || r.Epoch != x.m.epoch || r.BatchNo != x.m.batchNo || r.Pos != x.m.pos ||
		r.CancelReason != x.m.cancel || r.LastSeq != int64(len(x.m.events)) || r.ClosedAt.IsZero() != (x.m.status == store.Running) {
		t.Fatalf("record %+v, want %+v", r, x.m)
	}
	log, err := x.s.Log.Snapshot(x.ctx, x.id)
	if err != nil {
		t.Fatalf("snapshot: %v", err)
	}
	if len(log) != len(x.m.events) {
		t.Fatalf("%d events, want %d", len(log), len(x.m.events))
	}
	var names []string
	for i, e := range log {
		w := x.m.events[i]
		if nameOf(e.Event) != w.name || e.Epoch != w.epoch || e.Seq != int64(i+1) || (e.Pos == nil) != (w.pos == nil) || e.Pos != nil && *e.Pos != *w.pos {
			t.Fatalf("event %d is %+v, want %+v", i, e, w)
		}
		names = append(names, w.name)
	}
	// A reader that joins anywhere sees the rest.
	at := rapid.IntRange(0, len(log)).Draw(t, "join")
	var after event.Offset
	if at > 0 {
		after = log[at-1].Offset
	}
	var got []string
	if at < len(log) || x.m.status != store.Running {
		for e, err := range x.s.Log.Read(x.ctx, x.id, after) {
			if err != nil {
				t.Fatalf("read: %v", err)
			}
			if got = append(got, nameOf(e.Event)); at+len(got) == len(log) && x.m.status == store.Running {
				break
			}
		}
	}
	if !slices.Equal(got, names[at:]) {
		t.Fatalf("read after %d: %v, want %v", at, got, names[at:])
	}
}

// noDeadline hides a method that a bubble doesn't allow.
type noDeadline struct{ rapid.TB }

// runModel compares the store with the model in random sequences of calls.
func runModel(t *testing.T, o Options) {
	o.run(t, "model", func(t *testing.T, s store.Set) {
		rapid.Check(noDeadline{t}, func(rt *rapid.T) {
			x := &machine{s: s, ctx: t.Context(), id: fresh("model"), m: model{status: store.Running, pos: store.NoPos}, clock: o.Bubble != nil}
			if _, _, err := s.Runs.Create(x.ctx, store.NewRun{ID: x.id, Thread: store.Thread{ID: fresh("t")}}); err != nil {
				rt.Fatal(err)
			}
			x.Claim(rt)
			rt.Repeat(map[string]func(*rapid.T){
				"":        x.Check,
				"append":  x.Append,
				"append2": x.Append,
				"append3": x.Append,
				"finish":  x.Finish,
				"claim":   x.Claim,
				"renew":   x.Renew,
				"release": x.Release,
				"cancel":  x.Cancel,
				"wait":    x.Wait,
				"again":   x.Again,
			})
		})
	})
}
