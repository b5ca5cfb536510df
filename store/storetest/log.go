package storetest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/store"
)

// RunLog checks store.Log together with Runs, in tables, against a model, and
// under contention.
func RunLog(t *testing.T, o Options) {
	runLogTables(t, o)
	runFinishTables(t, o)
	runModel(t, o)
	runContention(t, o)
}

func runLogTables(t *testing.T, o Options) {
	o.run(t, "append", func(t *testing.T, s store.Set) {
		r := create(t, s, store.Thread{ID: fresh("t")})
		c := claim(t, s, r.ID, "a", store.ClaimOptions{})
		offs, err := s.Log.Append(t.Context(), c, store.Batch{No: 1, Events: append(live("a"), from(10, "b", "c")...)})
		ok(t, "append", err)
		if len(offs) != 3 {
			t.Fatalf("offsets %q", offs)
		}
		none, err := s.Log.Append(t.Context(), c, store.Batch{No: 2})
		ok(t, "append nothing", err)
		equal(t, "offsets of nothing", none, nil)
		more, err := s.Log.Append(t.Context(), c, store.Batch{No: 3, Events: live("d")})
		ok(t, "append", err)
		offs = append(offs, more...)

		got, err := s.Log.Snapshot(t.Context(), r.ID)
		ok(t, "snapshot", err)
		if len(got) != 4 {
			t.Fatalf("%d events", len(got))
		}
		fp := event.Fingerprint(say("b"))
		want := store.Stored{Seq: 2, Offset: offs[1], Epoch: 1, Pos: &store.Pos{Off: 10}, Print: fp[:], Event: say("b"), At: got[1].At}
		equal(t, "stored", got[1], want)
		around(t, "stored at", got[1].At)
		if got[0].Pos != nil || got[3].Pos != nil {
			t.Error("a live event has a position")
		}
		seen := map[event.Offset]bool{}
		for i, off := range offs {
			if off != got[i].Offset || !off.Valid() || seen[off] {
				t.Errorf("offset %d: %q, stored %q", i, off, got[i].Offset)
			}
			seen[off] = true
		}
		rec := get(t, s, r.ID)
		if rec.LastSeq != 4 || rec.BatchNo != 3 || rec.Pos != (store.Pos{Off: 10, Idx: 1}) {
			t.Errorf("record %+v", rec)
		}
		empty, err := s.Log.Snapshot(t.Context(), fresh("nobody"))
		ok(t, "snapshot of nobody", err)
		equal(t, "snapshot of nobody", empty, nil)
	})

	o.run(t, "append refuses", func(t *testing.T, s store.Set) {
		r := create(t, s, store.Thread{ID: fresh("t")})
		a := claim(t, s, r.ID, "a", store.ClaimOptions{})
		app := func(c store.Claim, b store.Batch) error { _, err := s.Log.Append(t.Context(), c, b); return err }
		is(t, "the zero claim", app(store.Claim{}, store.Batch{No: 1}), store.ErrNotFound, "")
		is(t, "batch 2 first", app(a, store.Batch{No: 2, Events: live("x")}), store.ErrConflict, "batch_out_of_order")
		is(t, "batch 0", app(a, store.Batch{Events: live("x")}), store.ErrConflict, "batch_out_of_order")
		ok(t, "append", app(a, store.Batch{No: 1, Events: from(10, "a", "b")}))
		for _, stale := range [][]store.Event{from(9, "x"), from(10, "x"), append(live("y"), from(10, "x")...), append(from(20, "x"), from(15, "y")...), append(from(20, "x"), from(20, "y")...)} {
			is(t, "a stale position", app(a, store.Batch{No: 2, Events: stale}), store.ErrConflict, "replay_diverged")
		}
		if store.Code(app(a, store.Batch{No: 2, Events: []store.Event{{}}}), "") != "invalid" {
			t.Error("an event that is nil was accepted")
		}
		equal(t, "log", logged(t, s, r.ID), []string{"a", "b"})
		ok(t, "append", app(a, store.Batch{No: 2, Events: append(live("c"), from(11, "d")...)}))
		is(t, "an old batch", app(a, store.Batch{No: 1, Events: live("x")}), store.ErrConflict, "batch_out_of_order")

		b := claim(t, s, r.ID, "a", store.ClaimOptions{Force: true})
		if b.Pos() != (store.Pos{Off: 11}) || b.LastSeq() != 4 {
			t.Errorf("the claim starts at %v, %d", b.Pos(), b.LastSeq())
		}
		is(t, "a deposed claim", app(a, store.Batch{No: 3, Events: live("zombie")}), store.ErrFenced, "claim_lost")
		is(t, "a deposed claim, repeating", app(a, store.Batch{No: 2, Events: live("zombie")}), store.ErrFenced, "claim_lost")
		ok(t, "the new claim", app(b, store.Batch{No: 1, Events: live("e")}))
		is(t, "a deposed claim at the new number", app(a, store.Batch{No: 2, Events: live("zombie")}), store.ErrFenced, "claim_lost")
		is(t, "the watermark survives a claim", app(b, store.Batch{No: 2, Events: from(11, "x")}), store.ErrConflict, "replay_diverged")
		_, err := s.Log.Finish(t.Context(), b, store.Final{Batch: store.Batch{No: 2, Events: live("end")}, Status: store.Completed})
		ok(t, "finish", err)
		is(t, "after the end", app(b, store.Batch{No: 3, Events: live("late")}), store.ErrSealed, "log_closed")
		is(t, "a zombie after the end", app(a, store.Batch{No: 3, Events: live("late")}), store.ErrFenced, "claim_lost")
		equal(t, "log", logged(t, s, r.ID), []string{"a", "b", "c", "d", "e", "end"})
	})

	o.run(t, "append repeated", func(t *testing.T, s store.Set) {
		r := create(t, s, store.Thread{ID: fresh("t")})
		a := claim(t, s, r.ID, "a", store.ClaimOptions{})
		_, err := s.Log.Append(t.Context(), a, store.Batch{No: 1, Events: live("zero")})
		ok(t, "append", err)
		b := store.Batch{No: 2, Events: append(from(10, "a", "b"), live("c")...)}
		first, err := s.Log.Append(t.Context(), a, b)
		ok(t, "append", err)
		for range 2 {
			again, err := s.Log.Append(t.Context(), a, b)
			ok(t, "append again", err)
			equal(t, "the offsets", again, first)
		}
		equal(t, "log", logged(t, s, r.ID), []string{"zero", "a", "b", "c"})
		// A claim that expired but that nobody took can write.
		ok(t, "release", s.Runs.Release(t.Context(), a))
		_, err = s.Log.Append(t.Context(), a, store.Batch{No: 3, Events: live("d")})
		ok(t, "append after a release", err)
	})

	o.run(t, "read", func(t *testing.T, s store.Set) {
		_, _, err := read(t.Context(), s, fresh("nobody"), event.FromStart)
		is(t, "of nobody", err, store.ErrNotFound, "")
		r, q := create(t, s, store.Thread{ID: fresh("t")}), create(t, s, store.Thread{ID: fresh("t")})
		c, d := claim(t, s, r.ID, "a", store.ClaimOptions{}), claim(t, s, q.ID, "a", store.ClaimOptions{})
		offs, err := s.Log.Append(t.Context(), c, store.Batch{No: 1, Events: live("1", "2", "3")})
		ok(t, "append", err)
		foreign, err := s.Log.Append(t.Context(), d, store.Batch{No: 1, Events: live("x")})
		ok(t, "append", err)
		_, _, err = read(t.Context(), s, r.ID, foreign[0])
		is(t, "another run's offset", err, errAny, "offset_run_mismatch")
		for _, bad := range []event.Offset{"nonsense", "0", "-2", "1", " ", event.Offset(string(offs[0]) + "x")} {
			_, _, err = read(t.Context(), s, r.ID, bad)
			is(t, fmt.Sprintf("the offset %q", bad), err, errAny, "offset_invalid")
		}
		_, err = s.Log.Finish(t.Context(), c, store.Final{Batch: store.Batch{No: 2, Events: live("4")}, Status: store.Completed})
		ok(t, "finish", err)
		all := []string{"1", "2", "3", "4"}
		names, got, err := read(t.Context(), s, r.ID, "")
		ok(t, "read", err)
		equal(t, "all", names, all)
		equal(t, "offsets", got[:3], offs)
		names, _, err = read(t.Context(), s, r.ID, "-1")
		ok(t, "read", err)
		equal(t, "all", names, all)
		for i, off := range got {
			names, _, err := read(t.Context(), s, r.ID, off)
			ok(t, "read", err)
			equal(t, "after "+string(off), names, all[i+1:])
		}
		names, _, err = read(t.Context(), s, r.ID, event.OnlyNew)
		ok(t, "read", err)
		equal(t, "only what comes", names, nil)
		for range s.Log.Read(t.Context(), r.ID, "") { // leaving a read is no error
			break
		}
	})

	o.run(t, "read an offset that the log lost", func(t *testing.T, s store.Set) {
		// Two stores: in one the run got further, as before a failover.
		far := o.New(t)
		id, th := fresh("run"), store.Thread{ID: fresh("t")}
		var offs []event.Offset
		for i, x := range []store.Set{far, s} {
			_, _, err := x.Runs.Create(t.Context(), store.NewRun{ID: id, Thread: th})
			ok(t, "create", err)
			got, err := x.Log.Append(t.Context(), claim(t, x, id, "a", store.ClaimOptions{}), store.Batch{No: 1, Events: live("1", "2", "3")[:3-i]})
			ok(t, "append", err)
			offs = append(offs, got...)
		}
		_, _, err := read(t.Context(), s, id, offs[2])
		is(t, "read", err, errAny, "log_rewound")
	})

	o.run(t, "tail", func(t *testing.T, s store.Set) {
		r := create(t, s, store.Thread{ID: fresh("t")})
		c := claim(t, s, r.ID, "a", store.ClaimOptions{})
		got := make(chan string)
		go func() {
			defer close(got)
			for e, err := range s.Log.Read(t.Context(), r.ID, "") {
				if err != nil {
					t.Error(err)
					return
				}
				select {
				case got <- nameOf(e.Event):
				case <-t.Context().Done():
					return
				}
			}
		}()
		for i := range 20 {
			_, err := s.Log.Append(t.Context(), c, store.Batch{No: uint64(i + 1), Events: []store.Event{{Event: event.RunFinished{RunID: r.ID, ThreadID: "t"}}}})
			ok(t, "append", err)
			// A terminal event alone doesn't end the read.
			if name := <-got; name != "RUN_FINISHED" {
				t.Fatalf("got %q", name)
			}
		}
		_, err := s.Log.Finish(t.Context(), c, store.Final{Batch: store.Batch{No: 21, Events: live("end")}, Status: store.Completed})
		ok(t, "finish", err)
		if name := <-got; name != "end" {
			t.Errorf("got %q", name)
		}
		if name, more := <-got; more {
			t.Errorf("got %q after the end", name)
		}
	})

	o.run(t, "a reader that stands still", func(t *testing.T, s store.Set) {
		r := create(t, s, store.Thread{ID: fresh("t")})
		c := claim(t, s, r.ID, "a", store.ClaimOptions{})
		no := uint64(0)
		add := func(n int) {
			t.Helper()
			for range n {
				no++
				_, err := s.Log.Append(t.Context(), c, store.Batch{No: no, Events: live(fmt.Sprint(no))})
				ok(t, "append", err)
			}
		}
		add(1)
		n := 0
		for _, err := range s.Log.Read(t.Context(), r.ID, "") {
			ok(t, "read", err)
			if n++; n == 1 {
				add(600) // the writer doesn't wait for this loop
				_, err := s.Log.Finish(t.Context(), c, store.Final{Status: store.Completed})
				ok(t, "finish", err)
			}
		}
		if n != 601 {
			t.Errorf("%d events", n)
		}
	})

	o.run(t, "only what comes", func(t *testing.T, s store.Set) {
		r := create(t, s, store.Thread{ID: fresh("t")})
		c := claim(t, s, r.ID, "a", store.ClaimOptions{})
		_, err := s.Log.Append(t.Context(), c, store.Batch{No: 1, Events: live("old")})
		ok(t, "append", err)
		got := make(chan string, 100)
		go func() {
			defer close(got)
			for e, err := range s.Log.Read(t.Context(), r.ID, event.OnlyNew) {
				if err != nil {
					t.Error(err)
					return
				}
				got <- nameOf(e.Event)
			}
		}()
		// It isn't known when the reader has begun: go on until it saw something.
		var first string
		for no := uint64(2); first == ""; no++ {
			_, err := s.Log.Append(t.Context(), c, store.Batch{No: no, Events: live(fmt.Sprint("new", no))})
			ok(t, "append", err)
			select {
			case first = <-got:
			case <-time.After(time.Millisecond):
			}
		}
		if first == "old" {
			t.Error("it saw what was there before")
		}
		_, err = s.Log.Finish(t.Context(), c, store.Final{Status: store.Completed})
		ok(t, "finish", err)
		for range got {
		}
	})

	o.run(t, "a read's context", func(t *testing.T, s store.Set) {
		r := create(t, s, store.Thread{ID: fresh("t")})
		c := claim(t, s, r.ID, "a", store.ClaimOptions{})
		_, err := s.Log.Append(t.Context(), c, store.Batch{No: 1, Events: live("1", "2")})
		ok(t, "append", err)
		why := errors.New("the viewer left")
		ctx, cancel := context.WithCancelCause(t.Context())
		var names []string
		var last error
		for e, err := range s.Log.Read(ctx, r.ID, "") {
			if last = err; err != nil {
				break
			}
			if names = append(names, nameOf(e.Event)); len(names) == 2 {
				cancel(why)
			}
		}
		cancel(nil)
		is(t, "parked", last, why, "")
		cancelled(t, map[string]func(context.Context) error{
			"Append": func(ctx context.Context) error { _, err := s.Log.Append(ctx, c, store.Batch{No: 2}); return err },
			"Finish": func(ctx context.Context) error {
				_, err := s.Log.Finish(ctx, c, store.Final{Status: store.Completed})
				return err
			},
			"Snapshot": func(ctx context.Context) error { _, err := s.Log.Snapshot(ctx, r.ID); return err },
			"Read":     func(ctx context.Context) error { _, _, err := read(ctx, s, r.ID, ""); return err },
		})
		if rec := get(t, s, r.ID); rec.Status != store.Running || rec.BatchNo != 1 {
			t.Errorf("record %+v", rec)
		}
	})
}

// errAny matches every error, for those that have a code alone.
var errAny = errors.New("an error")

func runFinishTables(t *testing.T, o Options) {
	o.run(t, "finish", func(t *testing.T, s store.Set) {
		for _, f := range []store.Final{
			{Status: store.Completed, CloseReason: "done", Usage: []event.Usage{{Model: "m", InputTokens: 1, TotalTokens: 1}}},
			{Status: store.Failed, Error: &store.RunError{Message: "m", Code: "c"}, JournalHold: true},
			{Status: store.Aborted, CloseReason: "cancelled", Exit: &store.Exit{Code: 130, Off: 7}},
			{Status: store.Interrupted, CloseReason: "interrupt"},
		} {
			r := create(t, s, store.Thread{ID: fresh("t")})
			c := claim(t, s, r.ID, "a", store.ClaimOptions{})
			f.Batch = store.Batch{No: 1, Events: from(5, "last")}
			f.Pos = &store.Pos{Off: 9}
			got, err := s.Log.Finish(t.Context(), c, f)
			ok(t, string(f.Status), err)
			around(t, "closed at", got.ClosedAt)
			if got.FinishedAt.IsZero() != (f.Status == store.Interrupted) {
				t.Errorf("%s: finished at %v", f.Status, got.FinishedAt)
			}
			want := store.Run{ID: r.ID, Thread: r.Thread, Kind: store.KindChat, Status: f.Status, StartedAt: r.StartedAt, FinishedAt: got.FinishedAt,
				ClosedAt: got.ClosedAt, CloseReason: f.CloseReason, Error: f.Error, Usage: f.Usage, Exit: f.Exit, Epoch: 1, BatchNo: 1, LastSeq: 1,
				Pos: store.Pos{Off: 9}, Launch: store.LaunchNone, LastViewedAt: r.LastViewedAt, JournalHold: f.JournalHold}
			equal(t, string(f.Status), got, want)
			equal(t, "get", get(t, s, r.ID), want)
			again, err := s.Log.Finish(t.Context(), c, f)
			ok(t, "again", err)
			equal(t, "again", again, want)
			equal(t, "log", logged(t, s, r.ID), []string{"last"})
			names, _, err := read(t.Context(), s, r.ID, "")
			ok(t, "read", err)
			equal(t, "read", names, []string{"last"})
		}
	})

	o.run(t, "finish refuses", func(t *testing.T, s store.Set) {
		r := create(t, s, store.Thread{ID: fresh("t")})
		a := claim(t, s, r.ID, "a", store.ClaimOptions{})
		fin := func(c store.Claim, f store.Final) error { _, err := s.Log.Finish(t.Context(), c, f); return err }
		for _, f := range []store.Final{{}, {Status: store.Running}, {Status: "odd"}, {Status: store.Failed},
			{Status: store.Failed, Error: &store.RunError{Message: "no code"}}, {Status: store.Completed, Batch: store.Batch{Events: live("x")}}} {
			if store.Code(fin(a, f), "") != "invalid" {
				t.Errorf("%+v was accepted", f)
			}
		}
		is(t, "the zero claim", fin(store.Claim{}, store.Final{Status: store.Completed}), store.ErrNotFound, "")
		is(t, "a batch out of order", fin(a, store.Final{Status: store.Completed, Batch: store.Batch{No: 2, Events: live("x")}}), store.ErrConflict, "batch_out_of_order")
		_, err := s.Log.Append(t.Context(), a, store.Batch{No: 1, Events: from(5, "a")})
		ok(t, "append", err)
		is(t, "a stale position", fin(a, store.Final{Status: store.Completed, Batch: store.Batch{No: 2, Events: from(5, "x")}}), store.ErrConflict, "replay_diverged")
		if s.Interrupts != nil {
			is(t, "an answer to nothing", fin(a, store.Final{Status: store.Completed, Batch: store.Batch{No: 2, Events: live("x")},
				Messages: []event.Message{{ID: "m", Role: "user"}}, Resolved: []store.Resolution{{RunID: "x", ID: "y", Status: store.InterruptResolved}}}), store.ErrNotFound, "")
		}
		// All or nothing: none of that left a trace.
		equal(t, "log", logged(t, s, r.ID), []string{"a"})
		if rec := get(t, s, r.ID); rec.Status != store.Running || rec.BatchNo != 1 {
			t.Errorf("record %+v", rec)
		}
		if s.Messages != nil {
			msgs, err := s.Messages.Load(t.Context(), r.Thread)
			ok(t, "load", err)
			equal(t, "messages", msgs, nil)
		}
		b := claim(t, s, r.ID, "a", store.ClaimOptions{Force: true})
		is(t, "a deposed claim", fin(a, store.Final{Status: store.Failed, Error: &store.RunError{Code: "zombie"}}), store.ErrFenced, "claim_lost")
		ok(t, "the newest", fin(b, store.Final{Status: store.Completed}))
		is(t, "a deposed claim after the end", fin(a, store.Final{Status: store.Aborted}), store.ErrFenced, "claim_lost")
		if rec := get(t, s, r.ID); rec.Status != store.Completed || rec.Error != nil {
			t.Errorf("record %+v", rec)
		}
	})

	o.run(t, "the last batch again", func(t *testing.T, s store.Set) {
		// Appended, the answer lost, and sent again with the end.
		r := create(t, s, store.Thread{ID: fresh("t")})
		c := claim(t, s, r.ID, "a", store.ClaimOptions{})
		b := store.Batch{No: 1, Events: live("once")}
		_, err := s.Log.Append(t.Context(), c, b)
		ok(t, "append", err)
		_, err = s.Log.Finish(t.Context(), c, store.Final{Batch: b, Status: store.Completed})
		ok(t, "finish", err)
		equal(t, "log", logged(t, s, r.ID), []string{"once"})
	})

	o.run(t, "completed is truthful", func(t *testing.T, s store.Set) {
		good := store.Exit{Off: 10, Verified: true, OK: true}
		for _, tt := range []struct {
			name string
			exit *store.Exit
			pos  *store.Pos
			ok   bool
		}{
			{"no exit", nil, nil, false},
			{"not verified", &store.Exit{Off: 10, OK: true}, &store.Pos{Off: 10}, false},
			{"not accepted", &store.Exit{Off: 10, Verified: true}, &store.Pos{Off: 10}, false},
			{"not read up to", &good, &store.Pos{Off: 9}, false},
			{"all of it", &good, &store.Pos{Off: 10}, true},
		} {
			n := store.NewRun{ID: fresh("run"), Thread: store.Thread{ID: fresh("t")}, Kind: store.KindSandbox}
			_, _, err := s.Runs.Create(t.Context(), n)
			ok(t, "create", err)
			c := claim(t, s, n.ID, "a", store.ClaimOptions{})
			_, err = s.Log.Finish(t.Context(), c, store.Final{Status: store.Completed, Exit: tt.exit, Pos: tt.pos})
			if (err == nil) != tt.ok || err != nil && store.Code(err, "") != "invalid" {
				t.Errorf("%s: %v", tt.name, err)
			}
			if rec := get(t, s, n.ID); (rec.Status == store.Completed) != tt.ok {
				t.Errorf("%s: status %s", tt.name, rec.Status)
			}
		}
	})

	o.run(t, "one transaction", func(t *testing.T, s store.Set) {
		if s.Messages == nil || s.Interrupts == nil || s.Instances == nil {
			t.Skip("the store doesn't offer all of messages, interrupts and instances")
		}
		r := create(t, s, store.Thread{ID: fresh("t")})
		i, err := s.Instances.Put(t.Context(), store.Instance{Key: fresh("k"), Provider: "p", State: store.InstanceReady})
		ok(t, "put", err)
		old := store.Interrupt{ID: "old", RunID: fresh("run"), Thread: r.Thread, Payload: json.RawMessage(`{"id":"old"}`)}
		ok(t, "put", s.Interrupts.Put(t.Context(), []store.Interrupt{old}))
		c := claim(t, s, r.ID, "a", store.ClaimOptions{})
		ok(t, "bind", s.Runs.Update(t.Context(), c, store.RunPatch{SandboxKey: &i.Key, SandboxGen: &i.Gen}))
		msgs := []event.Message{{ID: "m", Role: "user", Content: event.Text("hi")}}
		_, err = s.Log.Finish(t.Context(), c, store.Final{
			Batch: store.Batch{No: 1, Events: live("end")}, Status: store.Interrupted, Messages: msgs,
			Interrupts: []store.Interrupt{{ID: "new", RunID: r.ID, Thread: r.Thread, Payload: json.RawMessage(`{"id":"new"}`)}},
			Resolved:   []store.Resolution{{RunID: old.RunID, ID: "old", Status: store.InterruptResolved, Answer: json.RawMessage(`true`)}},
			Instance:   &store.Disposition{Key: i.Key, Gen: i.Gen, Destroy: true},
		})
		ok(t, "finish", err)
		got, err := s.Messages.Load(t.Context(), r.Thread)
		ok(t, "load", err)
		equal(t, "messages", got, msgs)
		pending, err := s.Interrupts.Pending(t.Context(), r.Thread)
		ok(t, "pending", err)
		if len(pending) != 1 || pending[0].ID != "new" {
			t.Errorf("pending %+v", pending)
		}
		inst, err := s.Instances.Get(t.Context(), i.Key)
		ok(t, "get", err)
		if inst.Desired != store.DesiredDestroyed {
			t.Errorf("instance %+v", inst)
		}
	})

	o.run(t, "a sandbox that another run works in", func(t *testing.T, s store.Set) {
		if s.Instances == nil {
			t.Skip("the store doesn't offer instances")
		}
		i, err := s.Instances.Put(t.Context(), store.Instance{Key: fresh("k"), Provider: "p", State: store.InstanceReady})
		ok(t, "put", err)
		th := store.Thread{ID: fresh("t")}
		var cs []store.Claim
		for range 2 {
			c := claim(t, s, create(t, s, th).ID, "a", store.ClaimOptions{})
			ok(t, "bind", s.Runs.Update(t.Context(), c, store.RunPatch{SandboxKey: &i.Key, SandboxGen: &i.Gen}))
			cs = append(cs, c)
		}
		is(t, "retire", s.Instances.Retire(t.Context(), i.Key, i.Gen), store.ErrConflict, "instance_conflict")
		end := func(c store.Claim) store.Instance {
			t.Helper()
			_, err := s.Log.Finish(t.Context(), c, store.Final{Status: store.Completed, Instance: &store.Disposition{Key: i.Key, Gen: i.Gen, Destroy: true, KeepFor: time.Hour}})
			ok(t, "finish", err)
			inst, err := s.Instances.Get(t.Context(), i.Key)
			ok(t, "get", err)
			return inst
		}
		if inst := end(cs[0]); inst.Desired == store.DesiredDestroyed || inst.KeepUntil.IsZero() {
			t.Errorf("after the first run: %+v", inst)
		}
		if inst := end(cs[1]); inst.Desired != store.DesiredDestroyed {
			t.Errorf("after the last run: %+v", inst)
		}
		// And nobody works in it again.
		c := claim(t, s, create(t, s, th).ID, "a", store.ClaimOptions{})
		is(t, "bind", s.Runs.Update(t.Context(), c, store.RunPatch{SandboxKey: &i.Key, SandboxGen: &i.Gen}), store.ErrConflict, "instance_conflict")
	})
}
