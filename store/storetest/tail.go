package storetest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/store"
)

// RunTail checks readers that are many, late or slow, and texts that a database
// doesn't take.
func RunTail(t *testing.T, o Options) {
	t.Run("readers of all kinds", func(t *testing.T) {
		s := o.New(t)
		const total, batch = 6000, 40
		r := create(t, s, store.Thread{ID: fresh("t")})
		c := claim(t, s, r.ID, "a", store.ClaimOptions{TTL: time.Hour})
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		defer wg.Wait()
		defer cancel()
		gates := make([]chan struct{}, 12)
		for i := range gates {
			gates[i] = make(chan struct{})
			wg.Go(func() {
				// The even ones stand still after some events until everything is written,
				// far beyond what is kept in memory for them.
				n := 0
				for e, err := range s.Log.Read(ctx, r.ID, event.FromStart) {
					if err != nil {
						if ctx.Err() == nil {
							t.Errorf("reader %d: %v", i, err)
						}
						return
					}
					if want := fmt.Sprint("e", n); nameOf(e.Event) != want {
						t.Errorf("reader %d: got %s, want %s", i, nameOf(e.Event), want)
						return
					}
					if n++; i%2 == 0 && n == 1+i*100 {
						select {
						case <-gates[i]:
						case <-ctx.Done():
						}
					}
				}
				if n != total {
					t.Errorf("reader %d: %d events", i, n)
				}
			})
		}
		for n, no := 0, uint64(1); n < total; no++ {
			var names []string
			for range batch {
				names = append(names, fmt.Sprint("e", n))
				n++
			}
			_, err := s.Log.Append(t.Context(), c, store.Batch{No: no, Events: live(names...)})
			ok(t, "append", err)
		}
		for _, g := range gates {
			close(g)
		}
		_, err := s.Log.Finish(t.Context(), c, store.Final{Status: store.Completed})
		ok(t, "finish", err)
		wg.Wait()
	})

	o.run(t, "a reader that leaves while it fetches for others", func(t *testing.T, s store.Set) {
		r := create(t, s, store.Thread{ID: fresh("t")})
		c := claim(t, s, r.ID, "a", store.ClaimOptions{TTL: time.Hour})
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				names, _, err := read(t.Context(), s, r.ID, "")
				if err != nil || len(names) != 101 {
					t.Errorf("%d events, %v", len(names), err)
				}
			})
			wg.Go(func() { // these come and go
				for i := range 20 {
					ctx, cancel := context.WithCancel(t.Context())
					if i%2 == 0 {
						cancel()
					}
					for _, err := range s.Log.Read(ctx, r.ID, event.OnlyNew) {
						if err != nil && !errors.Is(err, context.Canceled) {
							t.Errorf("read: %v", err)
						}
						break
					}
					cancel()
				}
			})
		}
		done := make(chan struct{})
		go func() {
			wg.Wait()
			close(done)
		}()
		for no := uint64(1); ; no++ {
			var evs []store.Event
			if no <= 100 {
				evs = live(fmt.Sprint(no))
			}
			_, err := s.Log.Append(t.Context(), c, store.Batch{No: no, Events: evs})
			ok(t, "append", err)
			if no == 100 {
				break
			}
		}
		_, err := s.Log.Finish(t.Context(), c, store.Final{Batch: store.Batch{No: 101, Events: live("end")}, Status: store.Completed})
		ok(t, "finish", err)
		<-done
	})

	o.run(t, "texts that can't be stored", func(t *testing.T, s store.Set) {
		for _, id := range []string{"a\x00b", "\xff\xfe", ""} {
			_, err := s.Runs.Get(t.Context(), id)
			is(t, fmt.Sprintf("get %q", id), err, store.ErrNotFound, "not_found")
			_, _, err = read(t.Context(), s, id, "")
			is(t, fmt.Sprintf("read %q", id), err, store.ErrNotFound, "not_found")
			log, err := s.Log.Snapshot(t.Context(), id)
			ok(t, "snapshot", err)
			equal(t, "snapshot", log, nil)
			_, err = s.Runs.Claim(t.Context(), id, store.ClaimOptions{Owner: "a"})
			is(t, fmt.Sprintf("claim %q", id), err, store.ErrNotFound, "claim_not_acquired")
			_, err = s.Runs.WaitCancel(t.Context(), id)
			is(t, fmt.Sprintf("wait %q", id), err, store.ErrNotFound, "not_found")
			ok(t, "cancel", s.Runs.RequestCancel(t.Context(), id, "x"))
			ok(t, "touch", s.Runs.Touch(t.Context(), []string{id}))
			_, err = s.Runs.FindActive(t.Context(), store.Thread{ID: id})
			is(t, fmt.Sprintf("active %q", id), err, store.ErrNotFound, "not_found")
			lost, _, err := s.Runs.Renew(t.Context(), []store.ClaimRef{{RunID: id, Epoch: 1}}, 0)
			ok(t, "renew", err)
			equal(t, "lost", lost, []string{id})
		}
		// What an agent wrote must not keep a run from ending.
		r := create(t, s, store.Thread{ID: fresh("t")})
		ok(t, "cancel", s.Runs.RequestCancel(t.Context(), r.ID, "why\x00\xff"))
		c := claim(t, s, r.ID, "a", store.ClaimOptions{Reaper: true})
		_, err := s.Log.Finish(t.Context(), c, store.Final{Status: store.Failed, CloseReason: "\xff\x00", Error: &store.RunError{Code: "x", Message: "it said \x00\xff"},
			Batch: store.Batch{No: 1, Events: []store.Event{{Event: event.TextMessageContent{MessageID: "m", Delta: "\x00 é \U0001F600"}}}}})
		ok(t, "finish", err)
		log, err := s.Log.Snapshot(t.Context(), r.ID)
		ok(t, "snapshot", err)
		if len(log) != 1 {
			t.Fatalf("%d events", len(log))
		}
		equal(t, "event", log[0].Event, event.Event(event.TextMessageContent{MessageID: "m", Delta: "\x00 é \U0001F600"}))
	})
}

// RunRetention checks store.Retainer. Age makes a run's end that much older.
func RunRetention(t *testing.T, o Options, age func(t *testing.T, s store.Set, runID string, by time.Duration)) {
	const day = 24 * time.Hour
	o.run(t, "retention", func(t *testing.T, s store.Set) {
		keeper, offers := o.Retainer(s)
		if !offers {
			t.Fatal("the store offers no retention")
		}
		th := store.Thread{ID: fresh("t")}
		ended := func(old time.Duration) store.Run {
			t.Helper()
			r := create(t, s, th)
			c := claim(t, s, r.ID, "a", store.ClaimOptions{})
			for no := uint64(1); no <= 3; no++ {
				_, err := s.Log.Append(t.Context(), c, store.Batch{No: no, Events: live("a", "b", "c")})
				ok(t, "append", err)
			}
			_, err := s.Log.Finish(t.Context(), c, store.Final{Status: store.Completed, Messages: []event.Message{{ID: "m", Role: "user", Content: event.Text("hi")}}})
			ok(t, "finish", err)
			age(t, s, r.ID, old)
			return r
		}
		young, old, ancient, bound := ended(29*day), ended(31*day), ended(181*day), create(t, s, th)
		i, err := s.Instances.Put(t.Context(), store.Instance{Key: fresh("k"), Provider: "p", State: store.InstanceReady})
		ok(t, "put", err)
		bc := claim(t, s, bound.ID, "a", store.ClaimOptions{})
		ok(t, "bind", s.Runs.Update(t.Context(), bc, store.RunPatch{SandboxKey: &i.Key, SandboxGen: &i.Gen}))
		_, err = s.Log.Finish(t.Context(), bc, store.Final{Status: store.Aborted})
		ok(t, "finish", err)
		age(t, s, bound.ID, 181*day)
		running := create(t, s, th)
		c := claim(t, s, running.ID, "a", store.ClaimOptions{})
		_, err = s.Log.Append(t.Context(), c, store.Batch{No: 1, Events: live("x")})
		ok(t, "append", err)
		_, offs, err := read(t.Context(), s, old.ID, "")
		ok(t, "read", err)

		got, err := keeper.Retain(t.Context(), store.Retention{Events: -1, Runs: -1})
		ok(t, "retain", err)
		equal(t, "nothing is forgotten", got, store.Retained{})
		got, err = keeper.Retain(t.Context(), store.Retention{Runs: -1})
		ok(t, "retain", err)
		equal(t, "logs", got, store.Retained{Logs: 3})

		for _, r := range []store.Run{old, ancient} {
			rec := get(t, s, r.ID)
			if !rec.EventsExpired || rec.LastSeq != 9 {
				t.Errorf("record %+v", rec)
			}
			_, _, err = read(t.Context(), s, r.ID, "")
			is(t, "read from the start", err, errAny, "log_expired")
			log, err := s.Log.Snapshot(t.Context(), r.ID)
			ok(t, "snapshot", err)
			equal(t, "snapshot", log, nil)
		}
		_, _, err = read(t.Context(), s, old.ID, offs[3])
		is(t, "read on", err, errAny, "log_expired")
		names, _, err := read(t.Context(), s, old.ID, offs[8])
		ok(t, "read after the end", err)
		equal(t, "read after the end", names, nil)
		for id, n := range map[string]int{young.ID: 9, running.ID: 1} {
			equal(t, "log of "+id, len(logged(t, s, id)), n)
		}
		msgs, err := s.Messages.Load(t.Context(), th)
		ok(t, "load", err)
		equal(t, "messages", len(msgs), 1)
		_, err = s.Log.Append(t.Context(), c, store.Batch{No: 2, Events: live("y")})
		ok(t, "append", err)
		got, err = keeper.Retain(t.Context(), store.Retention{})
		ok(t, "retain", err)
		equal(t, "again", got.Logs, int64(0))
		// A record goes when its events are gone, which may be later. One whose
		// sandbox may live stays.
		if _, err = s.Runs.Get(t.Context(), ancient.ID); err != nil || got.Runs != 0 {
			is(t, "an ancient run", err, store.ErrNotFound, "")
			equal(t, "runs", got.Runs, int64(1))
		}
		get(t, s, bound.ID)
		get(t, s, old.ID)
	})
}
