package reaper_test

import (
	"context"
	"fmt"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/aisandbox-go/aisandbox/internal/failpoint"
	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/provider/local"
	"github.com/aisandbox-go/aisandbox/reaper"
	"github.com/aisandbox-go/aisandbox/sandbox"
	"github.com/aisandbox-go/aisandbox/store"
	"github.com/aisandbox-go/aisandbox/store/memstore"
)

// Reapers over one store share the work: every run is driven by one of them, ends
// once and has one agent.
func TestReapersShare(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		var want []reaper.Outcome
		for i := range 40 {
			s := seed{id: fmt.Sprintf("r%d", i)}
			switch i % 4 {
			case 0:
				s.launch, s.agent = store.Launched, provider.ProbeExited
				want = append(want, reaper.Finalized)
			case 1:
				s.launch, s.agent, s.cancel = store.Launched, provider.ProbeRunning, "stop"
				want = append(want, reaper.Cancelled)
			case 2:
				s.boxless = true
				want = append(want, reaper.Relaunched)
			case 3:
				s.launch, s.agent = store.Launched, provider.ProbeRunning
				want = append(want, reaper.Adopted)
			}
			w.seed(s)
		}
		for i := range 4 {
			defer w.run(w.reaper(func(c *reaper.Config) { c.Owner = fmt.Sprintf("host-%d", i) }))()
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		n := map[reaper.Outcome]int{}
		for _, o := range want {
			n[o]++
		}
		for o, n := range n {
			if got := w.m.of(o); got != n {
				t.Errorf("%s %d times, want %d", o, got, n)
			}
		}
		for i := range 40 {
			id := fmt.Sprintf("r%d", i)
			rec := w.get(id)
			// One claim of its first host and one of who took it over.
			if w.launches[id] > 1 || rec.Epoch != 2 || (i%4 < 2) == rec.Active() {
				t.Errorf("%s: %d agents, epoch %d, %s", id, w.launches[id], rec.Epoch, rec.Status)
			}
		}
	})
}

// The same for Once, with two that start at the same moment, and with real time.
func TestOnceTwiceAtOnce(t *testing.T) {
	w := newWorld(t)
	for i := range 20 {
		w.seed(seed{id: fmt.Sprintf("r%d", i), launch: store.Launched, agent: provider.ProbeExited})
		w.box(fmt.Sprint(i), "")
		w.retire(fmt.Sprintf("k-%d", i), 1)
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	finalized, destroyed := 0, 0
	for range 3 {
		r := w.reaper(nil)
		wg.Go(func() {
			res, err := r.Once(t.Context())
			if err != nil {
				t.Error(err)
			}
			mu.Lock()
			defer mu.Unlock()
			finalized += res.Outcomes[reaper.Finalized]
			destroyed += res.Sandboxes.Destroyed
		})
	}
	wg.Wait()
	if finalized != 20 || destroyed != 20 || len(w.b.destroyed) != 20 {
		t.Errorf("%d finalized, %d destroyed, %d asked for", finalized, destroyed, len(w.b.destroyed))
	}
}

// H17: a host that dies while it reaps or destroys leaves everything to the next
// one, wherever it was.
func TestDiesWhileReaping(t *testing.T) {
	for _, point := range []string{
		failpoint.ReapTaken, failpoint.ReapClaimed, failpoint.RetireRecorded, failpoint.DestroyAnswered,
	} {
		t.Run(point, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				w.seed(seed{id: "direct", cancel: "stop"})
				w.seed(seed{id: "driven", launch: store.Launched, agent: provider.ProbeExited})
				w.box("t", "")
				w.retire("k-t", 1)
				died := 0
				var mu sync.Mutex
				disarm := failpoint.Arm(func(p, host string) {
					// Of a host that dies nothing goes on: every goroutine that comes
					// here ends.
					if p == point && host == "dying" {
						mu.Lock()
						died++
						mu.Unlock()
						runtime.Goexit()
					}
				})
				defer disarm()
				if _, err := w.reaper(func(c *reaper.Config) { c.Owner = "dying" }).Once(t.Context()); err != nil {
					t.Fatal(err)
				}
				disarm()
				if died == 0 {
					t.Fatal("nobody died")
				}
				time.Sleep(2 * time.Minute) // leases end, what was taken is given out again
				w.once(w.reaper(nil))
				if a, b := w.get("direct").Status, w.get("driven").Status; a != store.Aborted || b != store.Completed {
					t.Errorf("%s, %s", a, b)
				}
				if i := w.instance("k-t"); i.State != store.InstanceDestroyed || strings.Contains(w.b.alive(), "k-t.1") {
					t.Errorf("%+v, alive %s", i, w.b.alive())
				}
				if w.last("direct") != "RUN_ERROR aborted" || w.last("driven") != "RUN_FINISHED" {
					t.Errorf("%s, %s", w.last("direct"), w.last("driven"))
				}
			})
		})
	}
}

// C9, C10: a cancel that races with whatever the reaper does ends the run once, and
// the record and the log agree.
func TestCancelRaces(t *testing.T) {
	for i := range 60 {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t)
			w.seed(seed{id: "r", launch: store.Launched, agent: provider.ProbeRunning})
			defer w.run(w.reaper(nil))()
			defer w.run(w.reaper(nil))()
			time.Sleep(time.Duration(i) * 17 * time.Millisecond)
			var wg sync.WaitGroup
			wg.Go(func() {
				if err := w.store.Runs.RequestCancel(t.Context(), "r", "stop"); err != nil {
					t.Error(err)
				}
			})
			wg.Go(func() { w.finishAgent("r") })
			wg.Wait()
			time.Sleep(30 * time.Second)
			synctest.Wait()
			rec, last := w.get("r"), w.last("r")
			switch {
			case rec.Status == store.Aborted && last == "RUN_ERROR aborted":
			case rec.Status == store.Completed && last == "RUN_FINISHED":
			default:
				t.Errorf("%s, and the log ends with %s", rec.Status, last)
			}
		})
	}
}

// Nothing that is labelled as ours outlives its record, whatever happened to the
// hosts that made it. The sandboxes are real directories of this host.
func TestNothingOutlivesItsRecord(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		ctx := t.Context()
		p := local.New(local.Options{BaseDir: filepath.Join(t.TempDir(), "s")})
		lister, _ := provider.As[provider.Lister](p)
		def, err := sandbox.Define(sandbox.Definition{ID: "demo", Provider: p})
		if err != nil {
			rt.Fatal(err)
		}
		s := memstore.New(memstore.Options{KeepFor: -1})
		deps := sandbox.Deps{Instances: s.Instances, Leases: s.Leases, NoGuest: true, Deployment: "here"}
		stranger, err := p.Create(ctx, provider.Spec{Key: "stranger", Labels: map[string]string{sandbox.LabelDeployment: "elsewhere"}})
		if err != nil {
			rt.Fatal(err)
		}
		_ = stranger.Close()
		r, err := reaper.New(reaper.Config{
			Store: s, Definitions: map[string]*sandbox.Def{"demo": def}, Sandbox: sandbox.Deps{NoGuest: true}, Deployment: "here",
			Orphan: time.Nanosecond, Creating: time.Nanosecond,
		})
		if err != nil {
			rt.Fatal(err)
		}
		key := func() sandbox.Key {
			return sandbox.Key{ThreadID: fmt.Sprintf("t%d", rapid.IntRange(0, 2).Draw(rt, "thread"))}
		}
		get := func(k sandbox.Key) (store.Instance, bool) {
			i, err := s.Instances.Get(ctx, def.InstanceKey(k))
			return i, err == nil
		}
		rt.Repeat(map[string]func(*rapid.T){
			"use": func(rt *rapid.T) {
				box, _, err := sandbox.Ensure(ctx, deps, def, key())
				if err != nil {
					rt.Fatal(err)
				}
				_ = box.Close()
			},
			"destroy": func(rt *rapid.T) {
				if err := sandbox.DestroyInstance(ctx, deps, def, key()); err != nil {
					rt.Fatal(err)
				}
			},
			"retire": func(rt *rapid.T) {
				if i, ok := get(key()); ok {
					_ = s.Instances.Retire(ctx, i.Key, i.Gen)
				}
			},
			"lose the record": func(rt *rapid.T) {
				if i, ok := get(key()); ok {
					_ = s.Instances.Delete(ctx, i.Key, i.Gen)
				}
			},
			"lose the sandbox": func(rt *rapid.T) {
				if i, ok := get(key()); ok && i.Usable() {
					ref, err := sandbox.RecordRef(i)
					if err != nil {
						rt.Fatal(err)
					}
					if err := p.Destroy(ctx, ref); err != nil {
						rt.Fatal(err)
					}
				}
			},
			"die while making": func(rt *rapid.T) {
				of := key()
				k := def.InstanceKey(of)
				i, err := s.Instances.Put(ctx, store.Instance{Key: k, Provider: "local", State: store.InstanceCreating, ThreadID: of.ThreadID})
				if err != nil {
					return // there is one
				}
				if rapid.Bool().Draw(rt, "made") {
					h, err := p.Create(ctx, provider.Spec{Key: fmt.Sprintf("%sx%d", k[:20], i.Gen), Labels: map[string]string{
						sandbox.LabelKey: k, sandbox.LabelGen: fmt.Sprint(i.Gen), sandbox.LabelDeployment: "here"}})
					if err != nil {
						rt.Fatal(err)
					}
					_ = h.Close()
				}
			},
			"reap": func(rt *rapid.T) { sweep(ctx, rt, r) },
		})
		for range 2 {
			sweep(ctx, rt, r)
		}
		found, err := lister.List(ctx, nil)
		if err != nil {
			rt.Fatal(err)
		}
		named := map[string]bool{}
		is, _, err := s.Instances.List(ctx, store.InstanceQuery{AllTenants: true, Limit: 1000})
		if err != nil {
			rt.Fatal(err)
		}
		for _, i := range is {
			if ref, err := sandbox.RecordRef(i); err == nil && !i.State.Gone() {
				named[ref.ID] = true
				if i.Desired == store.DesiredDestroyed {
					rt.Errorf("still there: %+v", i)
				}
			}
		}
		strangers := 0
		for _, f := range found {
			if f.Labels[sandbox.LabelDeployment] != "here" {
				strangers++
			} else if !named[f.Ref.ID] {
				rt.Errorf("nobody remembers %v", f.Labels)
			}
			delete(named, f.Ref.ID)
		}
		if strangers != 1 || len(named) > 0 {
			rt.Errorf("%d strangers, recorded and not there: %v", strangers, named)
		}
	})
}

func sweep(ctx context.Context, rt *rapid.T, r *reaper.Reaper) {
	if _, err := r.Once(ctx); err != nil {
		rt.Fatal(err)
	}
}
