package reaper_test

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/reaper"
	"github.com/aisandbox-go/aisandbox/sandbox"
	"github.com/aisandbox-go/aisandbox/store"
)

func (w *world) retire(key string, gen int64) {
	w.t.Helper()
	if err := w.store.Instances.Retire(w.t.Context(), key, gen); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) put(i store.Instance) store.Instance {
	w.t.Helper()
	got, err := w.store.Instances.Put(w.t.Context(), i)
	if err != nil {
		w.t.Fatal(err)
	}
	return got
}

// S13: a destroy that fails is repeated, less and less often, until it works; the
// record stays, and after five times somebody is told.
func TestDestroyIsRepeated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.box("t", "")
		w.retire("k-t", 1)
		w.b.set(func(b *backend) { b.stuck = true })
		defer w.run(w.reaper(nil))()
		time.Sleep(50 * time.Second) // tries after 0, 5, 15, 35 seconds
		if i := w.instance("k-t"); i.State != store.InstanceDestroying || i.LastError == "" || i.Attempts > 4 || i.Attempts < 3 {
			t.Errorf("%+v", i)
		}
		if n := w.m.alarm("reclaim-failed"); n != 0 {
			t.Errorf("%d alarms already", n)
		}
		time.Sleep(3 * time.Minute)
		if w.m.alarm("reclaim-failed") == 0 || w.m.of(reaper.ReclaimFailed) == 0 {
			t.Error("nobody was told")
		}
		w.b.set(func(b *backend) { b.stuck = false })
		time.Sleep(70 * time.Second)
		if i := w.instance("k-t"); i.State != store.InstanceDestroyed || i.LastError != "" || w.b.alive() != "[]" {
			t.Errorf("%+v, alive %s", i, w.b.alive())
		}
		synctest.Wait()
		n := len(w.b.destroyed)
		time.Sleep(time.Hour)
		synctest.Wait()
		if len(w.b.destroyed) != n {
			t.Error("it is destroyed again and again")
		}
	})
}

// A sandbox that is kept for a while goes when that is over, unless a run works in
// it (I20).
func TestKeptSandboxes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.seed(seed{id: "r", launch: store.Launched, agent: provider.ProbeRunning})
		i := w.instance("k-t-r")
		i.KeepUntil = time.Now().Add(10 * time.Minute)
		w.put(i)
		w.box("other", "")
		o := w.instance("k-other")
		o.KeepUntil = i.KeepUntil
		w.put(o)
		r := w.reaper(func(c *reaper.Config) { c.Adopt = reaper.AdoptLazy })
		defer w.run(r)()
		time.Sleep(9 * time.Minute)
		if w.b.alive() != "[k-other.1 k-t-r.1]" {
			t.Errorf("alive %s", w.b.alive())
		}
		time.Sleep(2 * time.Minute)
		if w.b.alive() != "[k-t-r.1]" || w.instance("k-other").State != store.InstanceDestroyed {
			t.Errorf("alive %s", w.b.alive())
		}
		if i := w.instance("k-t-r"); i.Desired == store.DesiredDestroyed || i.State != store.InstanceReady {
			t.Errorf("%+v", i)
		}
	})
}

// T12: what belongs to another provider is not touched, whatever its record says.
func TestProviderMismatchTouchesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		other := newBackend("other")
		w.seed(seed{id: "r", launch: store.Launched, agent: provider.ProbeRunning})
		w.box("t", "r")
		w.retire("k-t", 1)
		// The definition has moved to another provider.
		r := w.reaper(func(c *reaper.Config) {
			c.Definitions = map[string]*sandbox.Def{"demo": w.define("demo", other, sandbox.Lifecycle{})}
			c.Adopt = reaper.AdoptLazy
		})
		for range 5 {
			res := w.once(r)
			if res.Outcomes[reaper.Unknown] != 1 || res.Sandboxes.Foreign == 0 || res.Sandboxes.Lost+res.Sandboxes.Destroyed+res.Sandboxes.Orphaned != 0 {
				t.Fatalf("%+v", res)
			}
			time.Sleep(2 * time.Minute)
		}
		if w.b.resumed+other.resumed != 0 || len(w.b.destroyed)+len(other.destroyed) != 0 {
			t.Errorf("resumed %d and %d, destroyed %v and %v", w.b.resumed, other.resumed, w.b.destroyed, other.destroyed)
		}
		if i := w.instance("k-t"); i.State != store.InstanceReady {
			t.Errorf("%+v", i)
		}
		if rec := w.get("r"); rec.Status != store.Running || rec.Epoch != 1 {
			t.Errorf("%+v", rec)
		}
	})
}

// T12, D-20: the end of a run destroys no sandbox in which another one works,
// although this one's agent can't be ended otherwise.
func TestNewerRunKeepsItsSandbox(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.seed(seed{id: "old", thread: "t", launch: store.Launched, agent: provider.ProbeRunning, cancel: "stop"})
		w.seed(seed{id: "new", thread: "t", launch: store.Launched, agent: provider.ProbeRunning, driven: true})
		w.b.set(func(b *backend) { b.away = true })
		r := w.reaper(nil)
		for range 4 {
			w.once(r)
			time.Sleep(3 * time.Second)
			if _, _, err := w.store.Runs.Renew(t.Context(), []store.ClaimRef{{RunID: "new", Epoch: 1}}, time.Hour); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Minute)
		}
		w.b.set(func(b *backend) { b.away = false })
		w.once(r)
		if w.get("old").Status != store.Aborted || w.get("new").Status != store.Running {
			t.Errorf("old %s, new %s", w.get("old").Status, w.get("new").Status)
		}
		if i := w.instance("k-t"); i.Desired == store.DesiredDestroyed || w.b.alive() != "[k-t.1]" {
			t.Errorf("%+v, alive %s", i, w.b.alive())
		}
		// A record that says so all the same is not obeyed while the run is there.
		i := w.instance("k-t")
		i.State, i.Desired = store.InstanceDestroying, store.DesiredDestroyed
		w.put(i)
		for range 3 {
			time.Sleep(time.Minute)
			if res := w.once(r); res.Sandboxes.InUse != 1 && res.Sandboxes.InUse != 2 {
				t.Errorf("%+v", res.Sandboxes)
			}
		}
		if w.b.alive() != "[k-t.1]" {
			t.Errorf("alive %s", w.b.alive())
		}
	})
}

// H13: the host that ended the run died before it could destroy the sandbox.
func TestDispositionIsCarriedOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.def = w.define("demo", w.b, sandbox.Lifecycle{OnComplete: sandbox.Destroy})
		w.seed(seed{id: "r", cancel: "stop"})
		res := w.once(w.reaper(nil))
		if res.Outcomes[reaper.Cancelled] != 1 || res.Sandboxes.Destroyed != 1 || w.b.alive() != "[]" {
			t.Errorf("%+v, alive %s", res, w.b.alive())
		}
	})
}

// D-21: what the provider has and nobody remembers is destroyed, and what is
// remembered and isn't there is lost.
func TestReconcile(t *testing.T) {
	label := func(key, gen, deployment string) map[string]string {
		return map[string]string{sandbox.LabelKey: key, sandbox.LabelGen: gen, sandbox.LabelDeployment: deployment}
	}
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		make := func(id string, labels map[string]string) {
			if _, err := w.b.Create(t.Context(), provider.Spec{Key: id, Labels: labels}); err != nil {
				t.Fatal(err)
			}
		}
		w.box("kept", "")
		make("forgotten", label("k-forgotten", "1", "here"))
		make("foreign", label("k-foreign", "1", "elsewhere"))
		make("stranger", nil)
		w.box("dead", "")
		gone := w.instance("k-dead")
		gone.State = store.InstanceDestroyed
		w.put(gone) // and it comes back: the provider had it, after all
		make("older", label("k-kept", "0", "here"))
		w.box("vanished", "")
		w.b.set(func(b *backend) { delete(b.boxes, "k-vanished.1") })
		defer w.run(w.reaper(nil))()
		time.Sleep(9 * time.Minute)
		if w.b.alive() != "[foreign forgotten k-dead.1 k-kept.1 older stranger]" {
			t.Errorf("alive %s", w.b.alive())
		}
		if i := w.instance("k-vanished"); i.State != store.InstanceLost {
			t.Errorf("%+v", i)
		}
		make("young", label("k-young", "1", "here"))
		time.Sleep(8 * time.Minute)
		if w.b.alive() != "[foreign k-kept.1 stranger young]" {
			t.Errorf("alive %s", w.b.alive())
		}
		if i := w.instance("k-kept"); i.State != store.InstanceReady {
			t.Errorf("%+v", i)
		}
		synctest.Wait()
		if n := w.m.states; n[store.InstanceReady] != 1 || n[store.InstanceLost] != 1 {
			t.Errorf("states %v", n)
		}
	})

	// A list that can't be had says nothing.
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.box("t", "")
		w.b.set(func(b *backend) { b.away = true })
		for range 3 {
			if res := w.once(w.reaper(nil)); res.Sandboxes != (reaper.Sandboxes{}) {
				t.Errorf("%+v", res.Sandboxes)
			}
			time.Sleep(20 * time.Minute)
		}
		if i := w.instance("k-t"); i.State != store.InstanceReady {
			t.Errorf("%+v", i)
		}
	})

	// What is made while the provider answers is neither lost nor an orphan.
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		n := 0
		w.b.listing = func() { n++; w.box(fmt.Sprint(n), ""); time.Sleep(time.Second) }
		for range 3 {
			if res := w.once(w.reaper(func(c *reaper.Config) { c.Orphan = time.Nanosecond })); res.Sandboxes != (reaper.Sandboxes{}) {
				t.Errorf("%+v", res.Sandboxes)
			}
			time.Sleep(time.Minute)
		}
	})

	// Without the deployment's name nothing is looked for.
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		if _, err := w.b.Create(t.Context(), provider.Spec{Key: "x", Labels: label("k", "1", "")}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Hour)
		if res := w.once(w.reaper(func(c *reaper.Config) { c.Deployment = "" })); res.Sandboxes.Orphaned != 0 || w.b.alive() != "[x]" {
			t.Errorf("%+v", res.Sandboxes)
		}
	})
}

// H3, H4: a sandbox whose maker died is destroyed, by its labels where the record
// has no name for it; one that somebody is still making is left alone.
func TestUnfinished(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		creating := func(thread, run string, ref bool) store.Instance {
			i := w.put(store.Instance{Key: "k-" + thread, Provider: "mem", State: store.InstanceCreating, ThreadID: thread, LatestRunID: run})
			id := boxID(i.Key, i.Gen)
			if _, err := w.b.Create(t.Context(), provider.Spec{Key: id, Labels: map[string]string{
				sandbox.LabelKey: i.Key, sandbox.LabelGen: "1", sandbox.LabelDeployment: "here"}}); err != nil {
				t.Fatal(err)
			}
			if ref {
				i.Ref, _ = json.Marshal(provider.Ref{Provider: "mem", ID: id})
				i = w.put(i)
			}
			return i
		}
		creating("unnamed", "", false)
		creating("named", "", true)
		creating("locked", "", true)
		w.seed(seed{id: "r", boxless: true, driven: true})
		creating("busy", "r", true)
		_, release, err := store.Hold(t.Context(), w.store.Leases, "sandbox:k-locked", "maker", 0)
		if err != nil {
			t.Fatal(err)
		}
		renew := func(d time.Duration) {
			for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(5 * time.Second) {
				if _, _, err := w.store.Runs.Renew(t.Context(), []store.ClaimRef{{RunID: "r", Epoch: 1}}, 0); err != nil {
					t.Fatal(err)
				}
				if err := w.store.Runs.Touch(t.Context(), []string{"r"}); err != nil {
					t.Fatal(err)
				}
			}
		}
		defer w.run(w.reaper(nil))()
		renew(9 * time.Minute)
		if w.b.alive() != "[k-busy.1 k-locked.1 k-named.1 k-unnamed.1]" {
			t.Errorf("alive %s", w.b.alive())
		}
		renew(8 * time.Minute)
		if w.b.alive() != "[k-busy.1 k-locked.1]" {
			t.Errorf("alive %s", w.b.alive())
		}
		if err := release(); err != nil {
			t.Fatal(err)
		}
		renew(8 * time.Minute)
		if w.b.alive() != "[k-busy.1]" || w.instance("k-named").State != store.InstanceDestroyed {
			t.Errorf("alive %s", w.b.alive())
		}
	})
}

// keeper counts what it is asked to forget.
type keeper struct {
	mu    sync.Mutex
	asked []store.Retention
}

func (k *keeper) Retain(_ context.Context, r store.Retention) (store.Retained, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.asked = append(k.asked, r)
	return store.Retained{Logs: 2, Runs: 1}, nil
}

// Once a day, whatever the number of hosts; and records of sandboxes go when they
// are gone for long and no run is bound to them.
func TestRetention(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.seed(seed{id: "r", launch: store.Launched, agent: provider.ProbeRunning})
		for _, thread := range []string{"t-r", "gone", "live"} {
			if thread != "t-r" {
				w.box(thread, "")
			}
			if thread != "live" {
				i := w.instance("k-" + thread)
				i.State = store.InstanceLost
				w.put(i)
			}
		}
		want := store.Retention{Events: 10 * 24 * time.Hour}
		var k keeper
		for range 3 {
			// The run is out of reach for this one, and doesn't end.
			defer w.run(w.reaper(func(c *reaper.Config) {
				c.Retainer, c.Retention, c.TTL, c.Definitions, c.Reconcile = &k, want, -1, nil, -1
				c.Look, c.Tick = time.Hour, time.Hour
			}))()
		}
		time.Sleep(9 * 24 * time.Hour)
		k.mu.Lock()
		defer k.mu.Unlock()
		if n := len(k.asked); n < 7 || n > 13 {
			t.Errorf("asked %d times in nine days", n)
		}
		k.mu.Unlock()
		w.instance("k-gone")
		time.Sleep(3 * 24 * time.Hour)
		k.mu.Lock()
		if k.asked[0] != want {
			t.Errorf("asked for %+v", k.asked[0])
		}
		if _, err := w.store.Instances.Get(t.Context(), "k-gone"); err == nil {
			t.Error("the record of what is gone is still there")
		}
		w.instance("k-live")
		w.instance("k-t-r")
	})
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		if res := w.once(w.reaper(func(c *reaper.Config) { c.Retainer = &keeper{} })); res.Retained != (reaper.Retained{Logs: 2, Runs: 1}) {
			t.Errorf("%+v", res.Retained)
		}
	})
}

// H12: the host died between the end of a run and the removal of its journal.
func TestOldJournals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.seed(seed{id: "r", thread: "t", launch: store.Launched, agent: provider.ProbeExited})
		w.seed(seed{id: "s", thread: "t2", launch: store.Launched, agent: provider.ProbeExited})
		w.seed(seed{id: "busy", launch: store.Launched, agent: provider.ProbeRunning})
		r := w.reaper(nil)
		if res := w.once(r); res.Outcomes[reaper.Finalized] != 2 || res.Sandboxes.Journals != 0 {
			t.Errorf("%+v", res)
		}
		w.seed(seed{id: "r2", thread: "t", launch: store.Launched, agent: provider.ProbeRunning})
		time.Sleep(3 * time.Minute)
		res := w.once(r)
		if res.Sandboxes.Journals != 2 || w.agentOf("r").state != "forgotten" || w.agentOf("r2").state != provider.ProbeRunning || w.agentOf("busy").state != provider.ProbeRunning {
			t.Errorf("%+v, %+v, %+v", res.Sandboxes, w.agentOf("r"), w.agentOf("r2"))
		}
		time.Sleep(10 * time.Minute)
		if res := w.once(r); res.Sandboxes.Journals != 0 {
			t.Errorf("%+v", res.Sandboxes)
		}
	})
}
