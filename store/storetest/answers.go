package storetest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/store"
)

// Answers asks a store a long table of questions, right and wrong ones, and
// returns what it answered, one line each: the kind of error, its code and what
// can be compared of the value. Two stores are alike if these are equal. The store
// must be empty; seed chooses the random part.
func Answers(t *testing.T, s store.Set, seed uint64) []string {
	t.Helper()
	a := &answers{ctx: t.Context(), s: s, rnd: rand.New(rand.NewPCG(seed, 1))}
	a.table()
	a.random(400)
	return a.lines
}

type answers struct {
	ctx   context.Context
	s     store.Set
	rnd   *rand.Rand
	lines []string
}

// class is what of an error is a contract.
func class(err error) string {
	if err == nil {
		return "ok"
	}
	var is []string
	for name, target := range map[string]error{"fenced": store.ErrFenced, "sealed": store.ErrSealed, "not found": store.ErrNotFound, "conflict": store.ErrConflict, "unavailable": store.ErrUnavailable} {
		if errors.Is(err, target) {
			is = append(is, name)
		}
	}
	if len(is) > 1 {
		is = []string{fmt.Sprint(len(is), " kinds")}
	}
	typ := err
	for u := errors.Unwrap(typ); u != nil; u = errors.Unwrap(typ) {
		typ = u
	}
	out := fmt.Sprintf("%s %s %v", reflect.TypeOf(typ), store.Code(err, "none"), is)
	var c *store.ClaimError
	if errors.As(err, &c) {
		out += " " + string(c.Reason) + " " + c.Owner
	}
	var b *store.BatchError
	if errors.As(err, &b) {
		out += fmt.Sprintf(" %d after %d", b.No, b.Last)
	}
	var w *store.WatermarkError
	if errors.As(err, &w) {
		out += fmt.Sprint(" ", w.Got, w.Mark)
	}
	var f *store.FencedError
	if errors.As(err, &f) {
		out += fmt.Sprintf(" %d by %d", f.Held, f.Observed)
	}
	return out
}

func (a *answers) note(what string, err error, values ...any) {
	line := what + ": " + class(err)
	if err == nil {
		for _, v := range values {
			line += fmt.Sprintf(" %v", v)
		}
	}
	a.lines = append(a.lines, line)
}

// row is a record without its times.
func row(r store.Run) string {
	j, _ := json.Marshal(r.Usage)
	return fmt.Sprintf("{%s %v %s %s %s %s %s %s fin=%t closed=%t %q %v %s %v e%d %q lease=%t b%d s%d %v %s %s/%d cancel=%t %q exp=%t hold=%t}",
		r.ID, r.Thread, r.ParentRunID, r.Definition, r.Adapter, r.Kind, r.Input, r.Status, !r.FinishedAt.IsZero(), !r.ClosedAt.IsZero(), r.CloseReason,
		r.Error, j, r.Exit, r.Epoch, r.Owner, !r.LeaseUntil.IsZero(), r.BatchNo, r.LastSeq, r.Pos, r.Launch, r.SandboxKey, r.SandboxGen,
		!r.CancelAt.IsZero(), r.CancelReason, r.EventsExpired, r.JournalHold)
}

func inst(i store.Instance) string {
	return fmt.Sprintf("{%s/%d %s %s %s %s %q %q %q %q snap=%t keep=%t %q %d usable=%t}", i.Key, i.Gen, i.Provider, i.Ref, i.State, i.Desired, i.Tenant, i.ThreadID,
		i.LatestRunID, i.SnapshotID, !i.SnapshotAt.IsZero(), !i.KeepUntil.IsZero(), i.LastError, i.Attempts, i.Usable())
}

// plainOffset is an offset without its store's name.
func plainOffset(o event.Offset) string {
	_, rest, _ := strings.Cut(string(o), ":")
	return rest
}

func (a *answers) log(id string) string {
	var b strings.Builder
	log, err := a.s.Log.Snapshot(a.ctx, id)
	if err != nil {
		return class(err)
	}
	for _, e := range log {
		fmt.Fprintf(&b, "[%d %s e%d %v %x %s]", e.Seq, plainOffset(e.Offset), e.Epoch, e.Pos, e.Print, nameOf(e.Event))
	}
	return b.String()
}

func (a *answers) table() {
	s, ctx := a.s, a.ctx
	create := func(what string, n store.NewRun) {
		r, created, err := s.Runs.Create(ctx, n)
		a.note("create "+what, err, created, row(r))
	}
	th := store.Thread{Tenant: "t", ID: "thread"}
	create("full", store.NewRun{ID: "r1", Thread: th, ParentRunID: "p", Definition: "d", Adapter: "a", Kind: store.KindSandbox, Input: json.RawMessage(`{"x":[1,2]}`)})
	create("again", store.NewRun{ID: "r1", Thread: store.Thread{ID: "x"}, Exclusive: true})
	create("busy", store.NewRun{ID: "r2", Thread: th, Exclusive: true})
	create("queued", store.NewRun{ID: "r2", Thread: th, Exclusive: true, Queue: 1})
	create("full queue", store.NewRun{ID: "r3", Thread: th, Exclusive: true, Queue: 1})
	create("negative queue", store.NewRun{ID: "r3", Thread: th, Exclusive: true, Queue: -1})
	create("odd id", store.NewRun{ID: "é/ :%\t'\";--", Thread: store.Thread{ID: "t'"}})
	create("empty", store.NewRun{})
	for _, id := range []string{"r1", "nobody", "", "a\x00", "\xff", "é/ :%\t'\";--"} {
		r, err := s.Runs.Get(ctx, id)
		a.note(fmt.Sprintf("get %q", id), err, row(r))
		_, err = s.Runs.FindActive(ctx, store.Thread{ID: id})
		a.note(fmt.Sprintf("active %q", id), err)
		for _, off := range []event.Offset{"x", "memory:v1:r1:1", "sqlite:v1:r1:1", "pg:v1:r1:1", "-2", "now ", "0"} {
			if !strings.Contains(string(off), ":v1:") {
				_, _, err = read(ctx, s, id, off)
				a.note(fmt.Sprintf("read %q after %q", id, off), err)
			}
		}
	}
	var claims []store.Claim
	claim := func(id string, o store.ClaimOptions) store.Claim {
		c, err := s.Runs.Claim(ctx, id, o)
		k, g := c.Sandbox()
		a.note(fmt.Sprintf("claim %q %+v", id, o), err, c.Epoch(), c.Owner(), c.LastSeq(), c.Pos(), c.Launch(), k, g, len(c.Nonce()))
		if err == nil {
			claims = append(claims, c)
		}
		return c
	}
	claim("nobody", store.ClaimOptions{Owner: "h"})
	claim("r1", store.ClaimOptions{})
	one := claim("r1", store.ClaimOptions{Owner: "h", TTL: time.Hour})
	claim("r1", store.ClaimOptions{Owner: "h"})
	claim("r1", store.ClaimOptions{Owner: "i", Force: true, Reaper: true})
	two := claim("r1", store.ClaimOptions{Owner: "h", Force: true, TTL: time.Hour})
	app := func(what string, c store.Claim, b store.Batch) {
		offs, err := s.Log.Append(ctx, c, b)
		var names []string
		for _, o := range offs {
			names = append(names, plainOffset(o))
		}
		a.note("append "+what, err, names)
	}
	app("zero claim", store.Claim{}, store.Batch{No: 1})
	app("deposed", one, store.Batch{No: 1, Events: live("x")})
	app("number 0", two, store.Batch{Events: live("x")})
	app("first", two, store.Batch{No: 1, Events: append(live("a"), from(5, "b", "c")...)})
	app("again", two, store.Batch{No: 1, Events: append(live("a"), from(5, "b", "c")...)})
	app("again, another", two, store.Batch{No: 1, Events: live("z")})
	app("again, longer than the log", two, store.Batch{No: 1, Events: live("1", "2", "3", "4", "5")})
	app("gap", two, store.Batch{No: 3, Events: live("x")})
	app("huge number", two, store.Batch{No: 1<<64 - 1, Events: live("x")})
	app("stale", two, store.Batch{No: 2, Events: from(5, "x")})
	app("stale inside", two, store.Batch{No: 2, Events: append(from(9, "x"), from(9, "y")...)})
	app("nil after stale", two, store.Batch{No: 2, Events: append(from(5, "x"), store.Event{})})
	app("stale after nil", two, store.Batch{No: 2, Events: append([]store.Event{{}}, from(5, "x")...)})
	app("negative position", two, store.Batch{No: 2, Events: []store.Event{{Event: say("x"), Pos: &store.Pos{Off: -1}}}})
	app("nothing", two, store.Batch{No: 2})
	app("nothing again", two, store.Batch{No: 2})
	app("deposed, nil", one, store.Batch{No: 3, Events: []store.Event{{}}})
	app("raw", two, store.Batch{No: 3, Events: []store.Event{{Event: event.Raw{Name: "ODD", JSON: json.RawMessage(`{"type":"ODD", "b":1.50, "a":{"z":1,"a":"\u0000"}}`)}}}})
	a.note("log", nil, a.log("r1"))
	for _, p := range []store.RunPatch{{}, {SandboxKey: new("k"), SandboxGen: new(int64(2))}, {Launch: new(store.Launching), JournalHold: new(true)}, {SandboxKey: new("")}} {
		a.note("update", s.Runs.Update(ctx, two, p))
		a.note("update by a deposed one", s.Runs.Update(ctx, one, p))
		r, err := s.Runs.Get(ctx, "r1")
		a.note("get", err, row(r))
	}
	a.note("cancel", s.Runs.RequestCancel(ctx, "r1", "because"))
	why, err := s.Runs.WaitCancel(ctx, "r1")
	a.note("wait", err, why)
	lost, canceled, err := s.Runs.Renew(ctx, []store.ClaimRef{one.Ref(), two.Ref(), {RunID: "nobody", Epoch: 7}}, time.Hour)
	a.note("renew", err, lost, canceled)
	lost, canceled, err = s.Runs.Renew(ctx, nil, time.Hour)
	a.note("renew nothing", err, lost, canceled)
	a.note("release", s.Runs.Release(ctx, two))
	r, err := s.Runs.Get(ctx, "r1")
	a.note("released", err, row(r))
	claim("r1", store.ClaimOptions{Owner: "i"})
	three := claim("r1", store.ClaimOptions{Owner: "i", Reaper: true})
	fin := func(what string, c store.Claim, f store.Final) {
		r, err := s.Log.Finish(ctx, c, f)
		a.note("finish "+what, err, row(r))
	}
	fin("nothing", three, store.Final{})
	fin("completed without an exit", three, store.Final{Status: store.Completed})
	fin("deposed", two, store.Final{Status: store.Aborted})
	fin("failed without a code", three, store.Final{Status: store.Failed, Error: &store.RunError{Message: "m"}})
	fin("an unknown answer", three, store.Final{Status: store.Aborted, Resolved: []store.Resolution{{RunID: "x", ID: "y", Status: store.InterruptResolved}}})
	fin("an odd answer", three, store.Final{Status: store.Aborted, Resolved: []store.Resolution{{RunID: "x", ID: "y", Status: "odd"}}})
	fin("an odd question", three, store.Final{Status: store.Aborted, Interrupts: []store.Interrupt{{ID: "q"}}})
	end := store.Final{Status: store.Completed, CloseReason: "done", Batch: store.Batch{No: 1, Events: live("end")}, Pos: &store.Pos{Off: 20},
		Exit: &store.Exit{Code: 1, Off: 20, Verified: true, OK: true}, Usage: []event.Usage{{Model: "m", InputTokens: 3, TotalTokens: 3}}, JournalHold: true,
		Interrupts: []store.Interrupt{{ID: "q", RunID: "r1", Thread: th, Payload: json.RawMessage(`{"a":1}`)}},
		Messages:   []event.Message{{ID: "m1", Role: "user", Content: event.Text("<hi> & \u2028")}}, Instance: &store.Disposition{Key: "absent", Gen: 1, Destroy: true}}
	fin("", three, end)
	fin("again", three, end)
	fin("again, otherwise", three, store.Final{Status: store.Aborted})
	fin("deposed after the end", two, end)
	app("after the end", three, store.Batch{No: 2, Events: live("x")})
	app("the last again after the end", three, end.Batch)
	claim("r1", store.ClaimOptions{Owner: "h", Reaper: true})
	_, err = s.Runs.WaitCancel(ctx, "r1")
	a.note("wait for what ended", err)
	a.note("cancel what ended", s.Runs.RequestCancel(ctx, "r1", "late"))
	names, offs, err := read(ctx, s, "r1", "")
	a.note("read", err, names)
	for i, o := range offs {
		names, _, err := read(ctx, s, "r1", o)
		a.note(fmt.Sprint("read after ", i+1), err, names)
		_, _, err = read(ctx, s, "r2", o)
		a.note("read another's", err)
		_, _, err = read(ctx, s, "r1", o+"0")
		a.note("read beyond", err)
		_, _, err = read(ctx, s, "r1", "x"+o)
		a.note("read nonsense", err)
	}
	a.note("log", nil, a.log("r1"))
	msgs, err := s.Messages.Load(ctx, th)
	a.note("load", err, fmt.Sprintf("%q", fmt.Sprint(msgs)))
	pending, err := s.Interrupts.Pending(ctx, th)
	for i := range pending {
		pending[i].CreatedAt = time.Time{}
	}
	a.note("pending", err, fmt.Sprintf("%+v", pending))
	for _, st := range []store.InterruptStatus{"", store.InterruptPending, store.InterruptResolved, store.InterruptCancelled} {
		a.note("resolve "+string(st), s.Interrupts.Resolve(ctx, th, []store.Resolution{{RunID: "r1", ID: "q", Status: st}}))
	}
	a.note("resolve \\0", s.Interrupts.Resolve(ctx, th, []store.Resolution{{RunID: "r1", ID: "q\x00", Status: store.InterruptResolved}}))
	a.note("save nothing", s.Messages.Save(ctx, store.Thread{ID: "e"}, nil))
	a.note("save nowhere", s.Messages.Save(ctx, store.Thread{}, nil))
	ts, next, err := s.Messages.Threads(ctx, store.ThreadQuery{AllTenants: true, Limit: 1})
	for _, x := range ts {
		a.note("threads", err, x.Thread, x.Messages, next != "")
	}
	a.instances()
	a.leases()
}

func (a *answers) instances() {
	s, ctx := a.s, a.ctx
	put := func(what string, i store.Instance) {
		got, err := s.Instances.Put(ctx, i)
		a.note("put "+what, err, inst(got))
	}
	base := store.Instance{Key: "k", Provider: "p", State: store.InstanceReady, Tenant: "t", ThreadID: "th", Ref: json.RawMessage(`{"id":1}`), SnapshotID: "s", KeepUntil: time.Now().Add(time.Hour)}
	with := func(f func(i *store.Instance)) store.Instance {
		i := base
		f(&i)
		return i
	}
	put("first", base)
	put("second", base)
	put("generation 7", with(func(i *store.Instance) { i.Gen = 7 }))
	put("cleared", store.Instance{Key: "k", Gen: 1, Provider: "q", State: store.InstanceCreating})
	put("same snapshot", with(func(i *store.Instance) { i.Gen = 1 }))
	put("no provider", with(func(i *store.Instance) { i.Provider = "" }))
	put("NUL in the key", with(func(i *store.Instance) { i.Key = "a\x00" }))
	put("odd state", with(func(i *store.Instance) { i.State = "odd" }))
	a.note("retire nobody", s.Instances.Retire(ctx, "nobody", 1))
	a.note("retire", s.Instances.Retire(ctx, "k", 1))
	put("back", with(func(i *store.Instance) { i.Gen = 1 }))
	put("next", base)
	put("destroyed at once", with(func(i *store.Instance) { i.Key, i.Desired = "k2", store.DesiredDestroyed }))
	is, next, err := s.Instances.List(ctx, store.InstanceQuery{Tenant: "t", Limit: 2})
	for _, i := range is {
		a.note("list", err, inst(i), next != "")
	}
	is, err = s.Instances.Due(ctx, 10)
	a.note("due", err, len(is))
	for _, key := range []string{"k", "nobody", "", "a\x00", "\xff"} {
		i, err := s.Instances.Get(ctx, key)
		a.note(fmt.Sprintf("get %q", key), err, inst(i))
		a.note(fmt.Sprintf("delete %q", key), s.Instances.Delete(ctx, key, 1))
	}
}

func (a *answers) leases() {
	s, ctx := a.s, a.ctx
	l, err := s.Leases.Acquire(ctx, "lease", "o", time.Hour)
	a.note("acquire", err, l.Key, l.Owner)
	_, err = s.Leases.Acquire(ctx, "lease", "o", time.Hour)
	a.note("acquire again", err)
	_, err = s.Leases.Acquire(ctx, "", "o", 0)
	a.note("acquire nothing", err)
	_, err = s.Leases.Renew(ctx, store.Lease{Key: "lease", Epoch: l.Epoch + 1}, 0)
	a.note("renew another's", err)
	r, err := s.Leases.Renew(ctx, l, 0)
	a.note("renew", err, r.Key, r.Owner, r.Epoch == l.Epoch)
	a.note("release another's", s.Leases.Release(ctx, store.Lease{Key: "lease", Epoch: l.Epoch + 1}))
	a.note("release", s.Leases.Release(ctx, l))
	a.note("release again", s.Leases.Release(ctx, l))
	_, err = s.Leases.Renew(ctx, l, 0)
	a.note("renew what was released", err)
}

// random plays hosts that do the right thing most of the time.
func (a *answers) random(steps int) {
	s, ctx, rnd := a.s, a.ctx, a.rnd
	type host struct {
		c  store.Claim
		no uint64
	}
	var hosts []host
	ids := []string{"x1", "x2", "x3"}
	for _, id := range ids {
		_, _, err := s.Runs.Create(ctx, store.NewRun{ID: id, Thread: store.Thread{ID: id}})
		a.note("create", err)
	}
	for i := range steps {
		id := ids[rnd.IntN(len(ids))]
		switch n := rnd.IntN(12); {
		case n == 0 || len(hosts) == 0:
			o := store.ClaimOptions{Owner: []string{"a", "b"}[rnd.IntN(2)], Force: rnd.IntN(2) == 0, Reaper: rnd.IntN(2) == 0, TTL: time.Hour}
			c, err := s.Runs.Claim(ctx, id, o)
			a.note(fmt.Sprint(i, " claim"), err, c.Epoch(), c.LastSeq(), c.Pos())
			if err == nil {
				hosts = append(hosts, host{c: c})
			}
		case n == 1:
			a.note(fmt.Sprint(i, " release"), s.Runs.Release(ctx, hosts[rnd.IntN(len(hosts))].c))
		case n == 2:
			lost, canceled, err := s.Runs.Renew(ctx, []store.ClaimRef{hosts[rnd.IntN(len(hosts))].c.Ref()}, time.Hour)
			a.note(fmt.Sprint(i, " renew"), err, lost, canceled)
		case n == 3 && rnd.IntN(8) == 0:
			a.note(fmt.Sprint(i, " cancel"), s.Runs.RequestCancel(ctx, id, fmt.Sprint(i)))
		case n == 4 && rnd.IntN(8) == 0:
			h := &hosts[rnd.IntN(len(hosts))]
			r, err := s.Log.Finish(ctx, h.c, store.Final{Status: store.Completed, Batch: store.Batch{No: h.no + uint64(rnd.IntN(2)), Events: live(fmt.Sprint("end", i))}})
			a.note(fmt.Sprint(i, " finish"), err, row(r))
		default:
			h := &hosts[max(0, len(hosts)-1-rnd.IntN(4))]
			b := store.Batch{No: h.no + 1}
			if rnd.IntN(6) == 0 {
				b.No = h.no + uint64(rnd.IntN(3))
			}
			for j := range rnd.IntN(3) {
				e := store.Event{Event: say(fmt.Sprint(i, "-", j))}
				if rnd.IntN(2) == 0 {
					e.Pos = &store.Pos{Off: int64(i + rnd.IntN(4) - 1), Idx: j}
					e.Print = []byte{byte(i), byte(j)}
				}
				b.Events = append(b.Events, e)
			}
			offs, err := s.Log.Append(ctx, h.c, b)
			a.note(fmt.Sprint(i, " append"), err, len(offs))
			if err == nil {
				h.no = b.No
			}
		}
	}
	for _, id := range ids {
		r, err := s.Runs.Get(ctx, id)
		a.note("get", err, row(r))
		a.note("log", nil, a.log(id))
	}
}
