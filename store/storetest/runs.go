package storetest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/aisandbox-go/aisandbox/store"
)

// RunRuns checks store.Runs. It needs Log too.
func RunRuns(t *testing.T, o Options) {
	o.run(t, "create", func(t *testing.T, s store.Set) {
		n := store.NewRun{ID: fresh("run"), Thread: store.Thread{Tenant: "acme", ID: fresh("t")}, ParentRunID: "p",
			Definition: "def", Adapter: "ad", Kind: store.KindSandbox, Input: json.RawMessage(`{"a":1}`)}
		r, created, err := s.Runs.Create(t.Context(), n)
		ok(t, "create", err)
		if !created {
			t.Error("not created")
		}
		around(t, "started", r.StartedAt)
		want := store.Run{ID: n.ID, Thread: n.Thread, ParentRunID: "p", Definition: "def", Adapter: "ad", Kind: store.KindSandbox,
			Input: n.Input, Status: store.Running, Pos: store.NoPos, Launch: store.LaunchNone,
			StartedAt: r.StartedAt, LastViewedAt: r.LastViewedAt}
		equal(t, "record", r, want)
		equal(t, "get", get(t, s, n.ID), want)

		again, created, err := s.Runs.Create(t.Context(), store.NewRun{ID: n.ID, Thread: store.Thread{ID: "other"}, Adapter: "x", Exclusive: true})
		ok(t, "create again", err)
		if created {
			t.Error("created twice")
		}
		equal(t, "unchanged", again, want)

		_, err = s.Runs.Get(t.Context(), fresh("nobody"))
		is(t, "get of nobody", err, store.ErrNotFound, "not_found")
	})

	o.run(t, "create refuses", func(t *testing.T, s store.Set) {
		for _, n := range []store.NewRun{
			{Thread: store.Thread{ID: "t"}}, {ID: "r"}, {ID: "a\nb", Thread: store.Thread{ID: "t"}},
			{ID: "a\rb", Thread: store.Thread{ID: "t"}}, {ID: "r", Thread: store.Thread{ID: "t\n"}},
			{ID: "r", Thread: store.Thread{ID: "t"}, Kind: "odd"},
		} {
			if _, _, err := s.Runs.Create(t.Context(), n); store.Code(err, "") != "invalid" {
				t.Errorf("%+v: %v", n, err)
			}
		}
	})

	o.run(t, "exclusive", func(t *testing.T, s store.Set) {
		th := store.Thread{ID: fresh("t")}
		r := create(t, s, th)
		n := store.NewRun{ID: fresh("run"), Thread: th, Exclusive: true}
		_, _, err := s.Runs.Create(t.Context(), n)
		is(t, "second run", err, store.ErrConflict, "thread_busy")
		if b, k := err.(*store.BusyError); !k || b.RunID != r.ID {
			t.Errorf("it doesn't name the running run: %v", err)
		}
		_, err = s.Runs.Get(t.Context(), n.ID)
		is(t, "the refused one", err, store.ErrNotFound, "")
		// Another tenant's thread of that name is another thread.
		_, created, err := s.Runs.Create(t.Context(), store.NewRun{ID: fresh("run"), Thread: store.Thread{Tenant: "x", ID: th.ID}, Exclusive: true})
		if err != nil || !created {
			t.Errorf("another tenant: %v", err)
		}
		c := claim(t, s, r.ID, "h", store.ClaimOptions{})
		_, err = s.Log.Finish(t.Context(), c, store.Final{Status: store.Completed})
		ok(t, "finish", err)
		_, created, err = s.Runs.Create(t.Context(), n)
		if err != nil || !created {
			t.Errorf("after the end: %v", err)
		}
	})

	o.run(t, "queue", func(t *testing.T, s store.Set) {
		const limit, tries = 3, 24
		th := store.Thread{ID: fresh("t")}
		var wg sync.WaitGroup
		var mu sync.Mutex
		var in []string
		busy := map[string]int{}
		for range tries {
			wg.Go(func() {
				n := store.NewRun{ID: fresh("run"), Thread: th, Exclusive: true, Queue: limit}
				_, created, err := s.Runs.Create(t.Context(), n)
				mu.Lock()
				defer mu.Unlock()
				var b *store.BusyError
				switch {
				case err == nil && created:
					in = append(in, n.ID)
				case errors.As(err, &b):
					busy[b.RunID]++
				default:
					t.Errorf("create: %v %v", created, err)
				}
			})
		}
		wg.Wait()
		line, _, err := s.Runs.List(t.Context(), store.Query{ThreadID: th.ID, Status: []store.Status{store.Running}})
		ok(t, "list", err)
		if len(in) != limit+1 || len(line) != limit+1 {
			t.Fatalf("%d runs were let in, %d are listed", len(in), len(line))
		}
		if busy[line[0].ID] != tries-limit-1 || len(busy) != 1 {
			t.Errorf("refused: %v, the oldest is %q", busy, line[0].ID)
		}
		for i := range line[1:] {
			if !line[i].StartedAt.Before(line[i+1].StartedAt) {
				t.Errorf("started at %v, and the next one at %v", line[i].StartedAt, line[i+1].StartedAt)
			}
		}
		c := claim(t, s, line[0].ID, "h", store.ClaimOptions{})
		_, err = s.Log.Finish(t.Context(), c, store.Final{Status: store.Completed})
		ok(t, "finish", err)
		last := fresh("run")
		_, created, err := s.Runs.Create(t.Context(), store.NewRun{ID: last, Thread: th, Exclusive: true, Queue: limit})
		if err != nil || !created {
			t.Fatalf("after the end: %v", err)
		}
		line, _, err = s.Runs.List(t.Context(), store.Query{ThreadID: th.ID, Status: []store.Status{store.Running}})
		ok(t, "list", err)
		if len(line) != limit+1 || line[limit].ID != last {
			t.Errorf("the newest one is not the last: %v", line)
		}
	})

	o.run(t, "create at once", func(t *testing.T, s store.Set) {
		id, th := fresh("run"), store.Thread{ID: fresh("t")}
		var wg sync.WaitGroup
		won := make(chan bool, 32)
		for i := range 32 {
			wg.Go(func() {
				_, created, err := s.Runs.Create(t.Context(), store.NewRun{ID: id, Thread: th, Adapter: fmt.Sprint(i)})
				if err != nil {
					t.Error(err)
				}
				if created {
					won <- true
				}
			})
		}
		wg.Wait()
		if len(won) != 1 {
			t.Errorf("%d creations", len(won))
		}
	})

	o.run(t, "claim", func(t *testing.T, s store.Set) {
		_, err := s.Runs.Claim(t.Context(), fresh("nobody"), store.ClaimOptions{Owner: "a"})
		is(t, "unknown", err, store.ErrNotFound, "claim_not_acquired")
		is(t, "unknown", err, store.ErrConflict, "")
		r := create(t, s, store.Thread{ID: fresh("t")})
		_, err = s.Runs.Claim(t.Context(), r.ID, store.ClaimOptions{})
		if store.Code(err, "") != "invalid" {
			t.Errorf("no owner: %v", err)
		}
		a := claim(t, s, r.ID, "a", store.ClaimOptions{TTL: ttl})
		if a.Epoch() != 1 || a.RunID() != r.ID || a.Owner() != "a" || a.LastSeq() != 0 || a.Pos() != store.NoPos || a.Launch() != store.LaunchNone {
			t.Errorf("claim %v %q %d %v", a, a.Owner(), a.LastSeq(), a.Pos())
		}
		_, err = s.Runs.Claim(t.Context(), r.ID, store.ClaimOptions{Owner: "b", Force: true})
		is(t, "held", err, store.ErrConflict, "claim_not_acquired")
		if ce, k := err.(*store.ClaimError); !k || ce.Reason != store.ClaimHeld || ce.Owner != "a" {
			t.Errorf("held: %v", err)
		}
		_, err = s.Runs.Claim(t.Context(), r.ID, store.ClaimOptions{Owner: "a"})
		is(t, "held by itself", err, store.ErrConflict, "claim_not_acquired")
		a2 := claim(t, s, r.ID, "a", store.ClaimOptions{TTL: ttl, Force: true})
		if a2.Epoch() != 2 {
			t.Errorf("epoch %d", a2.Epoch())
		}
		if rec := get(t, s, r.ID); rec.Epoch != 2 || rec.Owner != "a" || !rec.LeaseUntil.After(rec.StartedAt) {
			t.Errorf("record %+v", rec)
		}
		expire()
		b := claim(t, s, r.ID, "b", store.ClaimOptions{})
		if b.Epoch() != 3 {
			t.Errorf("epoch %d", b.Epoch())
		}
		ok(t, "release", s.Runs.Release(t.Context(), b))
		ok(t, "release twice", s.Runs.Release(t.Context(), b))
		if rec := get(t, s, r.ID); rec.Owner != "" || rec.Epoch != 3 {
			t.Errorf("record %+v", rec)
		}
		c := claim(t, s, r.ID, "c", store.ClaimOptions{})
		ok(t, "release of a lost claim", s.Runs.Release(t.Context(), b))
		_, err = s.Runs.Claim(t.Context(), r.ID, store.ClaimOptions{Owner: "d"})
		is(t, "held after a zombie's release", err, store.ErrConflict, "")
		_, err = s.Log.Finish(t.Context(), c, store.Final{Status: store.Aborted})
		ok(t, "finish", err)
		_, err = s.Runs.Claim(t.Context(), r.ID, store.ClaimOptions{Owner: "d", Reaper: true})
		is(t, "terminal", err, store.ErrSealed, "claim_not_acquired")
	})

	o.run(t, "claims at once", func(t *testing.T, s store.Set) {
		r := create(t, s, store.Thread{ID: fresh("t")})
		var wg sync.WaitGroup
		var mu sync.Mutex
		seen := map[uint64]int{}
		for i := range 16 {
			wg.Go(func() {
				c, err := s.Runs.Claim(t.Context(), r.ID, store.ClaimOptions{Owner: fmt.Sprint("h", i)})
				if err == nil {
					mu.Lock()
					seen[c.Epoch()]++
					mu.Unlock()
				}
			})
		}
		wg.Wait()
		equal(t, "grants", seen, map[uint64]int{1: 1})
	})

	o.run(t, "nonce", func(t *testing.T, s store.Set) {
		r, q := create(t, s, store.Thread{ID: fresh("t")}), create(t, s, store.Thread{ID: fresh("t")})
		a := claim(t, s, r.ID, "a", store.ClaimOptions{})
		ok(t, "release", s.Runs.Release(t.Context(), a))
		b, c := claim(t, s, r.ID, "b", store.ClaimOptions{}), claim(t, s, q.ID, "b", store.ClaimOptions{})
		if len(a.Nonce()) != 32 || !bytes.Equal(a.Nonce(), b.Nonce()) || bytes.Equal(a.Nonce(), c.Nonce()) {
			t.Errorf("nonces %x %x %x", a.Nonce(), b.Nonce(), c.Nonce())
		}
		a.Nonce()[0] ^= 1
		if !bytes.Equal(a.Nonce(), b.Nonce()) {
			t.Error("a caller changed the nonce")
		}
		j, err := json.Marshal(map[string]any{"c": a, "p": &a})
		ok(t, "marshal", err)
		for _, s := range []string{fmt.Sprintf("%v %+v %#v %s %x", a, a, a, a, a), string(j)} {
			if strings.Contains(s, fmt.Sprintf("%x", a.Nonce())) || strings.Contains(s, string(a.Nonce())) || !strings.Contains(s, r.ID) {
				t.Errorf("a claim shows as %q", s)
			}
		}
	})

	o.run(t, "renew", func(t *testing.T, s store.Set) {
		th := store.Thread{ID: fresh("t")}
		live, taken, over, stop := create(t, s, th), create(t, s, th), create(t, s, th), create(t, s, th)
		cl := claim(t, s, live.ID, "a", store.ClaimOptions{TTL: ttl})
		ct := claim(t, s, taken.ID, "a", store.ClaimOptions{TTL: ttl})
		co := claim(t, s, over.ID, "a", store.ClaimOptions{TTL: ttl})
		cs := claim(t, s, stop.ID, "a", store.ClaimOptions{TTL: ttl})
		_, err := s.Log.Finish(t.Context(), co, store.Final{Status: store.Completed})
		ok(t, "finish", err)
		ok(t, "cancel", s.Runs.RequestCancel(t.Context(), stop.ID, "why"))
		expire()
		claim(t, s, taken.ID, "b", store.ClaimOptions{})
		lost, canceled, err := s.Runs.Renew(t.Context(), []store.ClaimRef{cl.Ref(), ct.Ref(), co.Ref(), cs.Ref(), {RunID: "nobody", Epoch: 1}}, time.Hour)
		ok(t, "renew", err)
		slices.Sort(lost)
		want := []string{taken.ID, over.ID, "nobody"}
		slices.Sort(want)
		equal(t, "lost", lost, want)
		equal(t, "cancelled", canceled, []string{stop.ID})
		// An expired lease that nobody took lives again.
		_, err = s.Runs.Claim(t.Context(), live.ID, store.ClaimOptions{Owner: "b"})
		is(t, "revived", err, store.ErrConflict, "claim_not_acquired")
	})

	o.run(t, "cancel", func(t *testing.T, s store.Set) {
		ok(t, "of nobody", s.Runs.RequestCancel(t.Context(), fresh("nobody"), ""))
		_, err := s.Runs.WaitCancel(t.Context(), fresh("nobody"))
		is(t, "wait for nobody", err, store.ErrNotFound, "")
		r := create(t, s, store.Thread{ID: fresh("t")})
		heard := make(chan string, 2)
		var wg sync.WaitGroup
		for range 2 {
			wg.Go(func() {
				why, err := s.Runs.WaitCancel(t.Context(), r.ID)
				if err != nil {
					t.Errorf("wait: %v", err)
				}
				heard <- why
			})
		}
		ok(t, "cancel", s.Runs.RequestCancel(t.Context(), r.ID, "first"))
		ok(t, "cancel again", s.Runs.RequestCancel(t.Context(), r.ID, "second"))
		wg.Wait()
		equal(t, "reason", []string{<-heard, <-heard}, []string{"first", "first"})
		rec := get(t, s, r.ID)
		around(t, "cancelled at", rec.CancelAt)
		if rec.Status != store.Running || rec.CancelReason != "first" {
			t.Errorf("record %+v", rec)
		}
		_, err = s.Runs.Claim(t.Context(), r.ID, store.ClaimOptions{Owner: "a"})
		is(t, "claim", err, store.ErrConflict, "claim_not_acquired")
		c := claim(t, s, r.ID, "a", store.ClaimOptions{Reaper: true})
		_, err = s.Log.Finish(t.Context(), c, store.Final{Status: store.Aborted, CloseReason: "cancelled"})
		ok(t, "finish", err)
		ok(t, "cancel of what has ended", s.Runs.RequestCancel(t.Context(), r.ID, "late"))
		_, err = s.Runs.WaitCancel(t.Context(), r.ID)
		is(t, "wait for what has ended", err, store.ErrSealed, "")
		if get(t, s, r.ID).CancelReason != "first" {
			t.Error("the reason changed")
		}
	})

	o.run(t, "wait ends with the run", func(t *testing.T, s store.Set) {
		r := create(t, s, store.Thread{ID: fresh("t")})
		c := claim(t, s, r.ID, "a", store.ClaimOptions{})
		errs := make(chan error, 1)
		go func() { _, err := s.Runs.WaitCancel(t.Context(), r.ID); errs <- err }()
		_, err := s.Log.Finish(t.Context(), c, store.Final{Status: store.Completed})
		ok(t, "finish", err)
		is(t, "wait", <-errs, store.ErrSealed, "")
		q := create(t, s, store.Thread{ID: fresh("t")})
		ctx, cancel := context.WithCancel(t.Context())
		go func() { _, err := s.Runs.WaitCancel(ctx, q.ID); errs <- err }()
		cancel()
		is(t, "wait with a context that ends", <-errs, context.Canceled, "")
	})

	o.run(t, "due", func(t *testing.T, s store.Set) {
		th := store.Thread{ID: fresh("t")}
		a, b, held := create(t, s, th).ID, create(t, s, th).ID, create(t, s, th).ID
		mine := []string{a, b, held}
		equal(t, "just created", works(t, s, mine...), nil)
		ca, cb := claim(t, s, a, "h", store.ClaimOptions{}), claim(t, s, b, "h", store.ClaimOptions{})
		claim(t, s, held, "h", store.ClaimOptions{})
		equal(t, "driven", works(t, s, mine...), nil)
		ok(t, "release", s.Runs.Release(t.Context(), ca))
		ok(t, "release", s.Runs.Release(t.Context(), cb))
		ok(t, "cancel", s.Runs.RequestCancel(t.Context(), b, ""))
		equal(t, "cancelled ones first", works(t, s, mine...), []string{b, a})
		equal(t, "taken", works(t, s, mine...), nil)
		if o.Bubble == nil {
			return
		}
		time.Sleep(5 * time.Second)
		equal(t, "pushed by 5 s", works(t, s, mine...), []string{b, a})
		time.Sleep(9 * time.Second)
		equal(t, "pushed by 10 s", works(t, s, mine...), nil)
		time.Sleep(time.Second + time.Millisecond) // the lease of the third has run out too
		got := works(t, s, mine...)
		equal(t, "how many", len(got), 3)
		equal(t, "cancelled ones first", got[0], b)
	})

	o.run(t, "due in turn", func(t *testing.T, s store.Set) {
		// One that is due for long comes before those that were just handed out.
		var mine []string
		for range 5 {
			r := create(t, s, store.Thread{ID: fresh("t")})
			ok(t, "release", s.Runs.Release(t.Context(), claim(t, s, r.ID, "h", store.ClaimOptions{})))
			mine = append(mine, r.ID)
		}
		var got []string
		for range 5 {
			ws, err := s.Runs.Due(t.Context(), "h", 1)
			ok(t, "due", err)
			for _, w := range ws {
				got = append(got, w.Run.ID)
				if w.Attempts != 1 {
					t.Errorf("%d attempts", w.Attempts)
				}
			}
		}
		slices.Sort(got)
		slices.Sort(mine)
		equal(t, "each once", got, mine)
	})

	o.run(t, "touch", func(t *testing.T, s store.Set) {
		r := create(t, s, store.Thread{ID: fresh("t")})
		time.Sleep(5 * time.Millisecond)
		ok(t, "touch", s.Runs.Touch(t.Context(), []string{r.ID, fresh("nobody")}))
		if got := get(t, s, r.ID); !got.LastViewedAt.After(r.LastViewedAt) {
			t.Errorf("viewed at %v, before %v", got.LastViewedAt, r.LastViewedAt)
		}
	})

	o.run(t, "lists", func(t *testing.T, s store.Set) {
		th, foreign := store.Thread{Tenant: fresh("x"), ID: fresh("t")}, store.Thread{Tenant: fresh("y"), ID: "t"}
		_, err := s.Runs.FindActive(t.Context(), th)
		is(t, "active of nobody", err, store.ErrNotFound, "")
		var all []string
		for range 5 {
			all = append(all, create(t, s, th).ID)
			time.Sleep(2 * time.Millisecond)
		}
		create(t, s, foreign)
		elsewhere := create(t, s, store.Thread{Tenant: th.Tenant, ID: fresh("t")}).ID
		act, err := s.Runs.FindActive(t.Context(), th)
		ok(t, "active", err)
		equal(t, "active", act.ID, all[4])
		for _, id := range all[3:] {
			_, err := s.Log.Finish(t.Context(), claim(t, s, id, "h", store.ClaimOptions{}), store.Final{Status: store.Completed})
			ok(t, "finish", err)
		}
		act, err = s.Runs.FindActive(t.Context(), th)
		ok(t, "active", err)
		equal(t, "active", act.ID, all[2])

		list := func(q store.Query) []string {
			t.Helper()
			var out []string
			for n := 0; ; n++ {
				rs, next, err := s.Runs.List(t.Context(), q)
				ok(t, "list", err)
				out = append(out, ids(rs)...)
				if q.After = next; next == "" || n > 20 {
					return out
				}
				if len(rs) != q.Limit {
					t.Errorf("a page of %d with a next one, limit %d", len(rs), q.Limit)
				}
			}
		}
		equal(t, "thread", list(store.Query{Tenant: th.Tenant, ThreadID: th.ID}), all)
		equal(t, "pages", list(store.Query{Tenant: th.Tenant, ThreadID: th.ID, Limit: 2}), all)
		equal(t, "tenant", list(store.Query{Tenant: th.Tenant}), append(slices.Clone(all), elsewhere))
		equal(t, "status", list(store.Query{Tenant: th.Tenant, Status: []store.Status{store.Completed, store.Failed}}), all[3:])
		equal(t, "another tenant's thread", list(store.Query{Tenant: foreign.Tenant, ThreadID: th.ID}), nil)
		for _, id := range append(slices.Clone(all), elsewhere) {
			if !slices.Contains(list(store.Query{AllTenants: true, Limit: 1000}), id) {
				t.Errorf("%s is not in the list of all", id)
			}
		}
	})

	o.run(t, "update", func(t *testing.T, s store.Set) {
		r := create(t, s, store.Thread{ID: fresh("t")})
		a := claim(t, s, r.ID, "a", store.ClaimOptions{})
		launched, key, gen := store.Launched, "k", int64(3)
		ok(t, "update", s.Runs.Update(t.Context(), a, store.RunPatch{Launch: &launched, SandboxKey: &key, SandboxGen: &gen}))
		ok(t, "nothing", s.Runs.Update(t.Context(), a, store.RunPatch{}))
		if rec := get(t, s, r.ID); rec.Launch != launched || rec.SandboxKey != key || rec.SandboxGen != gen {
			t.Errorf("record %+v", rec)
		}
		b := claim(t, s, r.ID, "a", store.ClaimOptions{Force: true})
		if k, g := b.Sandbox(); k != key || g != gen || b.Launch() != launched {
			t.Errorf("the next claim knows %q %d %q", k, g, b.Launch())
		}
		none := ""
		is(t, "by a deposed claim", s.Runs.Update(t.Context(), a, store.RunPatch{SandboxKey: &none}), store.ErrFenced, "claim_lost")
		ok(t, "clear", s.Runs.Update(t.Context(), b, store.RunPatch{SandboxKey: &none}))
		if rec := get(t, s, r.ID); rec.SandboxKey != "" || rec.SandboxGen != gen {
			t.Errorf("record %+v", rec)
		}
		_, err := s.Log.Finish(t.Context(), b, store.Final{Status: store.Completed})
		ok(t, "finish", err)
		is(t, "after the end", s.Runs.Update(t.Context(), b, store.RunPatch{Launch: &launched}), store.ErrSealed, "log_closed")
		is(t, "the zero claim", s.Runs.Update(t.Context(), store.Claim{}, store.RunPatch{}), store.ErrNotFound, "")
	})

	o.run(t, "done contexts", func(t *testing.T, s store.Set) {
		r := create(t, s, store.Thread{ID: fresh("t")})
		c := claim(t, s, r.ID, "a", store.ClaimOptions{})
		cancelled(t, map[string]func(context.Context) error{
			"Create": func(ctx context.Context) error {
				_, _, err := s.Runs.Create(ctx, store.NewRun{ID: "x", Thread: r.Thread})
				return err
			},
			"Claim": func(ctx context.Context) error {
				_, err := s.Runs.Claim(ctx, r.ID, store.ClaimOptions{Owner: "b"})
				return err
			},
			"Renew": func(ctx context.Context) error {
				_, _, err := s.Runs.Renew(ctx, []store.ClaimRef{c.Ref()}, 0)
				return err
			},
			"Release":       func(ctx context.Context) error { return s.Runs.Release(ctx, c) },
			"RequestCancel": func(ctx context.Context) error { return s.Runs.RequestCancel(ctx, r.ID, "") },
			"WaitCancel":    func(ctx context.Context) error { _, err := s.Runs.WaitCancel(ctx, r.ID); return err },
			"Touch":         func(ctx context.Context) error { return s.Runs.Touch(ctx, []string{r.ID}) },
			"Due":           func(ctx context.Context) error { _, err := s.Runs.Due(ctx, "h", 1); return err },
			"Get":           func(ctx context.Context) error { _, err := s.Runs.Get(ctx, r.ID); return err },
			"FindActive":    func(ctx context.Context) error { _, err := s.Runs.FindActive(ctx, r.Thread); return err },
			"List":          func(ctx context.Context) error { _, _, err := s.Runs.List(ctx, store.Query{}); return err },
			"Update":        func(ctx context.Context) error { return s.Runs.Update(ctx, c, store.RunPatch{}) },
		})
		equal(t, "untouched", get(t, s, r.ID).CancelAt.IsZero(), true)
	})
}
