package storetest

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/store"
)

// RunInstances checks store.Instances.
func RunInstances(t *testing.T, o Options) {
	o.run(t, "generations", func(t *testing.T, s store.Set) {
		key := fresh("k")
		_, err := s.Instances.Get(t.Context(), key)
		is(t, "get of nobody", err, store.ErrNotFound, "not_found")
		in := store.Instance{Key: key, Provider: "docker", Ref: json.RawMessage(`{"id":"c1"}`), State: store.InstanceCreating, Tenant: "acme",
			ThreadID: "t", LatestRunID: "r", SnapshotID: "s1", KeepUntil: time.Now().Add(time.Hour).Truncate(time.Millisecond), LastError: "e"}
		got, err := s.Instances.Put(t.Context(), in)
		ok(t, "put", err)
		around(t, "created at", got.CreatedAt)
		around(t, "used at", got.LastUsedAt)
		around(t, "snapshot at", got.SnapshotAt)
		want := in
		want.Gen, want.Desired, want.CreatedAt, want.LastUsedAt, want.SnapshotAt = 1, store.DesiredReady, got.CreatedAt, got.LastUsedAt, got.SnapshotAt
		equal(t, "put", got, want)
		if got.Usable() {
			t.Error("an instance in the making is usable")
		}
		read, err := s.Instances.Get(t.Context(), key)
		ok(t, "get", err)
		equal(t, "get", read, want)

		_, err = s.Instances.Put(t.Context(), in)
		is(t, "a second one beside it", err, store.ErrConflict, "instance_conflict")

		// A Put with a generation replaces everything: what is empty is cleared.
		time.Sleep(2 * time.Millisecond)
		next := store.Instance{Key: key, Gen: 1, Provider: "docker", State: store.InstanceReady}
		got, err = s.Instances.Put(t.Context(), next)
		ok(t, "replace", err)
		want = next
		want.Desired, want.CreatedAt, want.LastUsedAt = store.DesiredReady, read.CreatedAt, got.LastUsedAt
		equal(t, "replaced", got, want)
		if !got.LastUsedAt.After(read.LastUsedAt) || !got.Usable() {
			t.Errorf("replaced: %+v", got)
		}

		ok(t, "retire", s.Instances.Retire(t.Context(), key, 1))
		ok(t, "retire again", s.Instances.Retire(t.Context(), key, 1))
		_, err = s.Instances.Put(t.Context(), next)
		is(t, "back to life", err, store.ErrConflict, "instance_conflict")
		second, err := s.Instances.Put(t.Context(), in)
		ok(t, "the next generation", err)
		if second.Gen != 2 {
			t.Errorf("generation %d", second.Gen)
		}
		read, err = s.Instances.Get(t.Context(), key)
		ok(t, "get", err)
		equal(t, "the newest", read.Gen, int64(2))
		next.State, next.Desired, next.LastError = store.InstanceDestroying, store.DesiredDestroyed, "busy"
		got, err = s.Instances.Put(t.Context(), next)
		ok(t, "progress of the old one", err)
		equal(t, "progress", []any{got.Gen, got.State, got.LastError}, []any{int64(1), store.InstanceDestroying, "busy"})

		ok(t, "delete", s.Instances.Delete(t.Context(), key, 1))
		ok(t, "delete again", s.Instances.Delete(t.Context(), key, 1))
		read, err = s.Instances.Get(t.Context(), key)
		ok(t, "get", err)
		equal(t, "the other stays", read.Gen, int64(2))
		ok(t, "delete", s.Instances.Delete(t.Context(), key, 2))
		_, err = s.Instances.Get(t.Context(), key)
		is(t, "get of what is gone", err, store.ErrNotFound, "")
		_, err = s.Instances.Put(t.Context(), next)
		is(t, "replace what is gone", err, store.ErrNotFound, "")
		is(t, "retire what is gone", s.Instances.Retire(t.Context(), key, 1), store.ErrNotFound, "")
	})

	o.run(t, "gone ones have successors", func(t *testing.T, s store.Set) {
		for _, st := range []store.InstanceState{store.InstanceDestroyed, store.InstanceLost} {
			key := fresh("k")
			_, err := s.Instances.Put(t.Context(), store.Instance{Key: key, Provider: "p", State: st})
			ok(t, "put", err)
			i, err := s.Instances.Put(t.Context(), store.Instance{Key: key, Provider: "p", State: store.InstanceCreating})
			ok(t, "after "+string(st), err)
			equal(t, "generation", i.Gen, int64(2))
		}
	})

	o.run(t, "one creator", func(t *testing.T, s store.Set) {
		key := fresh("k")
		var wg sync.WaitGroup
		made := make(chan int64, 16)
		for range 16 {
			wg.Go(func() {
				i, err := s.Instances.Put(t.Context(), store.Instance{Key: key, Provider: "p", State: store.InstanceCreating})
				if err == nil {
					made <- i.Gen
				} else if store.Code(err, "") != "instance_conflict" {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if len(made) != 1 {
			t.Errorf("%d were created", len(made))
		}
	})

	o.run(t, "put refuses", func(t *testing.T, s store.Set) {
		for _, i := range []store.Instance{
			{Provider: "p", State: store.InstanceReady}, {Key: "k", State: store.InstanceReady}, {Key: "k", Provider: "p"},
			{Key: "k", Provider: "p", State: "odd"}, {Key: "k", Provider: "p", State: store.InstanceReady, Desired: "odd"},
			{Key: "k", Provider: "p", State: store.InstanceReady, Gen: -1},
		} {
			if _, err := s.Instances.Put(t.Context(), i); store.Code(err, "") != "invalid" {
				t.Errorf("%+v: %v", i, err)
			}
		}
	})

	o.run(t, "lists", func(t *testing.T, s store.Set) {
		tenant := fresh("x")
		var all []string
		put := func(i store.Instance) {
			t.Helper()
			i.Tenant = tenant
			got, err := s.Instances.Put(t.Context(), i)
			ok(t, "put", err)
			all = append(all, fmt.Sprint(got.Key, got.Gen))
		}
		base := fresh("k")
		put(store.Instance{Key: base + "a", Provider: "docker", ThreadID: "t1", State: store.InstanceDestroyed})
		put(store.Instance{Key: base + "a", Provider: "docker", ThreadID: "t1", State: store.InstanceReady})
		put(store.Instance{Key: base + "ab", Provider: "bwrap", ThreadID: "t1", State: store.InstanceReady})
		put(store.Instance{Key: base + "b", Provider: "bwrap", ThreadID: "t2", State: store.InstanceCreating})
		list := func(q store.InstanceQuery) []string {
			t.Helper()
			var out []string
			for range 20 {
				is, next, err := s.Instances.List(t.Context(), q)
				ok(t, "list", err)
				for _, i := range is {
					out = append(out, fmt.Sprint(i.Key, i.Gen))
				}
				if q.After = next; next == "" {
					return out
				}
			}
			t.Fatal("the pages never end")
			return nil
		}
		equal(t, "tenant", list(store.InstanceQuery{Tenant: tenant}), all)
		equal(t, "pages", list(store.InstanceQuery{Tenant: tenant, Limit: 1}), all)
		equal(t, "provider", list(store.InstanceQuery{Tenant: tenant, Provider: "bwrap"}), all[2:])
		equal(t, "thread", list(store.InstanceQuery{Tenant: tenant, ThreadID: "t1"}), all[:3])
		equal(t, "state", list(store.InstanceQuery{Tenant: tenant, State: []store.InstanceState{store.InstanceReady}}), all[1:3])
		equal(t, "another tenant", list(store.InstanceQuery{Tenant: fresh("y")}), nil)
		everyone := list(store.InstanceQuery{AllTenants: true, Limit: 1000})
		for _, k := range all {
			if !slices.Contains(everyone, k) {
				t.Errorf("%s is not in the list of all", k)
			}
		}
	})

	o.run(t, "due", func(t *testing.T, s store.Set) {
		put := func(i store.Instance) string {
			t.Helper()
			i.Key, i.Provider = fresh("k"), "p"
			_, err := s.Instances.Put(t.Context(), i)
			ok(t, "put", err)
			return i.Key
		}
		ready := put(store.Instance{State: store.InstanceReady})
		wanted := put(store.Instance{State: store.InstanceReady, Desired: store.DesiredDestroyed})
		gone := put(store.Instance{State: store.InstanceDestroyed, Desired: store.DesiredDestroyed})
		lost := put(store.Instance{State: store.InstanceLost, KeepUntil: time.Now().Add(-time.Hour)})
		over := put(store.Instance{State: store.InstanceReady, KeepUntil: time.Now().Add(-time.Hour)})
		kept := put(store.Instance{State: store.InstanceReady, KeepUntil: time.Now().Add(time.Hour)})
		mine := []string{ready, wanted, gone, lost, over, kept}
		due := func() []string {
			t.Helper()
			is, err := s.Instances.Due(t.Context(), 1000)
			ok(t, "due", err)
			var out []string
			for _, i := range is {
				if slices.Contains(mine, i.Key) {
					out = append(out, i.Key)
				}
			}
			slices.Sort(out)
			return out
		}
		want := []string{wanted, over}
		slices.Sort(want)
		equal(t, "due", due(), want)
		equal(t, "taken", due(), nil)
		if o.Bubble == nil {
			return
		}
		time.Sleep(5 * time.Second)
		equal(t, "after 5 s", due(), want)
		time.Sleep(9 * time.Second)
		equal(t, "9 s later", due(), nil)
		time.Sleep(time.Second)
		equal(t, "10 s later", due(), want)
		i, err := s.Instances.Get(t.Context(), wanted)
		ok(t, "get", err)
		equal(t, "attempts", i.Attempts, 3)
	})

	o.run(t, "done contexts", func(t *testing.T, s store.Set) {
		cancelled(t, map[string]func(context.Context) error{
			"Get": func(ctx context.Context) error { _, err := s.Instances.Get(ctx, "k"); return err },
			"Put": func(ctx context.Context) error {
				_, err := s.Instances.Put(ctx, store.Instance{Key: fresh("k"), Provider: "p", State: store.InstanceReady})
				return err
			},
			"Retire": func(ctx context.Context) error { return s.Instances.Retire(ctx, "k", 1) },
			"Delete": func(ctx context.Context) error { return s.Instances.Delete(ctx, "k", 1) },
			"List":   func(ctx context.Context) error { _, _, err := s.Instances.List(ctx, store.InstanceQuery{}); return err },
			"Due":    func(ctx context.Context) error { _, err := s.Instances.Due(ctx, 1); return err },
		})
	})
}

// RunLeaser checks store.Leaser.
func RunLeaser(t *testing.T, o Options) {
	o.run(t, "life", func(t *testing.T, s store.Set) {
		key := fresh("l")
		a, err := s.Leases.Acquire(t.Context(), key, "a", ttl)
		ok(t, "acquire", err)
		if a.Key != key || a.Owner != "a" || a.Epoch == 0 {
			t.Errorf("lease %+v", a)
		}
		for _, who := range []string{"b", "a"} {
			_, err = s.Leases.Acquire(t.Context(), key, who, ttl)
			is(t, "held, for "+who, err, store.ErrConflict, "lease_held")
		}
		if h, k := err.(*store.HeldError); !k || h.Owner != "a" {
			t.Errorf("held: %v", err)
		}
		other, err := s.Leases.Acquire(t.Context(), fresh("l"), "b", ttl)
		ok(t, "another key", err)
		time.Sleep(2 * time.Millisecond)
		a2, err := s.Leases.Renew(t.Context(), a, time.Hour)
		ok(t, "renew", err)
		if a2.Epoch != a.Epoch || !a2.Expires.After(a.Expires) {
			t.Errorf("renewed %+v from %+v", a2, a)
		}
		expire()
		_, err = s.Leases.Acquire(t.Context(), key, "b", ttl)
		is(t, "a renewed one", err, store.ErrConflict, "lease_held")
		other2, err := s.Leases.Renew(t.Context(), other, ttl)
		ok(t, "an expired one that nobody took", err)
		_, err = s.Leases.Acquire(t.Context(), other2.Key, "c", ttl)
		is(t, "revived", err, store.ErrConflict, "lease_held")
		ok(t, "release", s.Leases.Release(t.Context(), a2))
		ok(t, "release again", s.Leases.Release(t.Context(), a2))
		_, err = s.Leases.Renew(t.Context(), a2, ttl)
		is(t, "renew what was released", err, store.ErrFenced, "claim_lost")
		b, err := s.Leases.Acquire(t.Context(), key, "b", ttl)
		ok(t, "acquire after a release", err)
		if b.Epoch <= a.Epoch {
			t.Errorf("epoch %d after %d", b.Epoch, a.Epoch)
		}
		expire()
		c, err := s.Leases.Acquire(t.Context(), key, "c", time.Hour)
		ok(t, "acquire after the end", err)
		if c.Epoch <= b.Epoch {
			t.Errorf("epoch %d after %d", c.Epoch, b.Epoch)
		}
		_, err = s.Leases.Renew(t.Context(), b, ttl)
		is(t, "renew what was taken", err, store.ErrFenced, "claim_lost")
		ok(t, "release what was taken", s.Leases.Release(t.Context(), b))
		_, err = s.Leases.Acquire(t.Context(), key, "d", ttl)
		is(t, "still held", err, store.ErrConflict, "lease_held")
		for _, bad := range [][2]string{{"", "a"}, {"k", ""}} {
			if _, err := s.Leases.Acquire(t.Context(), bad[0], bad[1], ttl); store.Code(err, "") != "invalid" {
				t.Errorf("%q: %v", bad, err)
			}
		}
		cancelled(t, map[string]func(context.Context) error{
			"Acquire": func(ctx context.Context) error { _, err := s.Leases.Acquire(ctx, "x", "a", ttl); return err },
			"Renew":   func(ctx context.Context) error { _, err := s.Leases.Renew(ctx, c, ttl); return err },
			"Release": func(ctx context.Context) error { return s.Leases.Release(ctx, c) },
		})
	})

	t.Run("exclusion", func(t *testing.T) {
		s := o.New(t)
		key := fresh("l")
		inside, total := 0, 0 // guarded by the lease alone: the race detector is the judge
		var mu sync.Mutex
		last := uint64(0)
		var wg sync.WaitGroup
		for w := range 8 {
			wg.Go(func() {
				for range 20 {
					held, release, err := store.Hold(t.Context(), s.Leases, key, fmt.Sprint("w", w), time.Minute)
					if err != nil {
						t.Error(err)
						return
					}
					mu.Lock() // a store in another process makes no happens-before edge
					inside++
					total++
					if inside != 1 || held.Err() != nil {
						t.Errorf("%d inside, %v", inside, held.Err())
					}
					inside--
					mu.Unlock()
					if err := release(); err != nil {
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
		l, err := s.Leases.Acquire(t.Context(), key, "x", ttl)
		ok(t, "acquire", err)
		if total != 160 || l.Epoch <= last+160 {
			t.Errorf("%d times inside, epoch %d", total, l.Epoch)
		}
	})
}

// RunMessages checks store.Messages and store.Interrupts.
func RunMessages(t *testing.T, o Options) {
	o.run(t, "messages", func(t *testing.T, s store.Set) {
		th := store.Thread{Tenant: fresh("x"), ID: fresh("t")}
		got, err := s.Messages.Load(t.Context(), th)
		ok(t, "load of nobody", err)
		equal(t, "nobody", got, nil)
		one := []event.Message{
			{ID: "u", Role: "user", Content: event.Content{Parts: []event.Part{{Type: "text", Text: "hi", Raw: json.RawMessage(`{"type":"text","text":"hi"}`)}}}},
			{ID: "a", Role: "assistant", Content: event.Text("<b>&\u2028é"), ToolCalls: []event.ToolCall{{ID: "c", Type: "function",
				Function: event.ToolFunction{Name: "Bash", Arguments: `{"a":1}`}, Metadata: json.RawMessage(`{"sandboxObserved":true}`)}}},
			{ID: "r", Role: "tool", ToolCallID: "c", Content: event.Text("ok"), Error: "e"},
		}
		ok(t, "save", s.Messages.Save(t.Context(), th, one))
		got, err = s.Messages.Load(t.Context(), th)
		ok(t, "load", err)
		equal(t, "messages", got, one)
		got[0].ID = "changed"
		got, _ = s.Messages.Load(t.Context(), th)
		equal(t, "a caller's copy", got[0].ID, "u")
		got, err = s.Messages.Load(t.Context(), store.Thread{ID: th.ID})
		ok(t, "load", err)
		equal(t, "another tenant", got, nil)
		ok(t, "save", s.Messages.Save(t.Context(), th, one[:1]))
		got, _ = s.Messages.Load(t.Context(), th)
		equal(t, "replaced whole", got, one[:1])
		if err := s.Messages.Save(t.Context(), store.Thread{}, one); store.Code(err, "") != "invalid" {
			t.Errorf("no thread: %v", err)
		}

		var all []string
		for range 3 {
			id := store.Thread{Tenant: th.Tenant, ID: fresh("u")}
			ok(t, "save", s.Messages.Save(t.Context(), id, one))
			all = append(all, id.ID)
		}
		all = append(all, th.ID)
		slices.Sort(all)
		var listed []string
		q := store.ThreadQuery{Tenant: th.Tenant, Limit: 3}
		for range 5 {
			ts, next, err := s.Messages.Threads(t.Context(), q)
			ok(t, "threads", err)
			for _, x := range ts {
				listed = append(listed, x.Thread.ID)
				around(t, "updated", x.UpdatedAt)
				want := 3
				if x.Thread == th {
					want = 1
				}
				equal(t, "messages of "+x.Thread.ID, x.Messages, want)
			}
			if q.After = next; next == "" {
				break
			}
		}
		equal(t, "threads", listed, all)
		cancelled(t, map[string]func(context.Context) error{
			"Load":    func(ctx context.Context) error { _, err := s.Messages.Load(ctx, th); return err },
			"Save":    func(ctx context.Context) error { return s.Messages.Save(ctx, th, nil) },
			"Threads": func(ctx context.Context) error { _, _, err := s.Messages.Threads(ctx, q); return err },
		})
	})

	o.run(t, "interrupts", func(t *testing.T, s store.Set) {
		th := store.Thread{Tenant: "acme", ID: fresh("t")}
		run := fresh("run")
		put := func(ids ...string) {
			t.Helper()
			var in []store.Interrupt
			for _, id := range ids {
				in = append(in, store.Interrupt{ID: id, RunID: run, Thread: th, Payload: json.RawMessage(`{"id":"` + id + `"}`)})
			}
			ok(t, "put", s.Interrupts.Put(t.Context(), in))
		}
		pending := func(th store.Thread) []string {
			t.Helper()
			is, err := s.Interrupts.Pending(t.Context(), th)
			ok(t, "pending", err)
			var out []string
			for _, i := range is {
				out = append(out, i.ID)
				if i.Status != store.InterruptPending || string(i.Payload) != `{"id":"`+i.ID+`"}` || i.RunID != run || i.Thread != th {
					t.Errorf("interrupt %+v", i)
				}
				around(t, "created", i.CreatedAt)
			}
			return out
		}
		res := func(id string, st store.InterruptStatus) store.Resolution {
			return store.Resolution{RunID: run, ID: id, Status: st, Answer: json.RawMessage(`true`)}
		}
		equal(t, "nothing", pending(th), nil)
		put("b", "a")
		put("a", "c")
		equal(t, "oldest first", pending(th), []string{"b", "a", "c"})
		equal(t, "another tenant", pending(store.Thread{ID: th.ID}), nil)

		resolve := func(th store.Thread, rs ...store.Resolution) error { return s.Interrupts.Resolve(t.Context(), th, rs) }
		is(t, "unknown", resolve(th, res("a", store.InterruptResolved), res("x", store.InterruptResolved)), store.ErrNotFound, "")
		is(t, "twice", resolve(th, res("a", store.InterruptResolved), res("a", store.InterruptCancelled)), store.ErrConflict, "")
		is(t, "of another thread", resolve(store.Thread{ID: "t"}, res("a", store.InterruptResolved)), store.ErrNotFound, "")
		if err := resolve(th, res("a", "odd")); store.Code(err, "") != "invalid" {
			t.Errorf("an odd status: %v", err)
		}
		equal(t, "none of these did anything", pending(th), []string{"b", "a", "c"})
		ok(t, "resolve", resolve(th, res("a", store.InterruptResolved), res("b", store.InterruptCancelled)))
		equal(t, "what is left", pending(th), []string{"c"})
		is(t, "again", resolve(th, res("c", store.InterruptResolved), res("a", store.InterruptResolved)), store.ErrConflict, "")
		put("a")
		equal(t, "it stays answered", pending(th), []string{"c"})
		if err := s.Interrupts.Put(t.Context(), []store.Interrupt{{ID: "x"}}); store.Code(err, "") != "invalid" {
			t.Errorf("put: %v", err)
		}
		cancelled(t, map[string]func(context.Context) error{
			"Pending": func(ctx context.Context) error { _, err := s.Interrupts.Pending(ctx, th); return err },
			"Put":     func(ctx context.Context) error { return s.Interrupts.Put(ctx, nil) },
			"Resolve": func(ctx context.Context) error { return s.Interrupts.Resolve(ctx, th, nil) },
		})
	})
}
