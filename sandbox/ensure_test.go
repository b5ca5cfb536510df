package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/aisandbox-go/aisandbox/guest"
	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/store"
	"github.com/aisandbox-go/aisandbox/store/memstore"
	"github.com/aisandbox-go/aisandbox/workspace"
)

func TestMain(m *testing.M) {
	guest.Hook() // this binary is the guest of the sandboxes below
	goleak.VerifyTestMain(m)
}

// fixture is a definition over a fake provider, with stores.
type fixture struct {
	t     *testing.T
	f     *fake
	def   *Def
	deps  Deps
	store store.Set
}

func newFixture(t *testing.T, change func(*Definition)) *fixture {
	t.Helper()
	f := newFake(t)
	d := Definition{ID: "repo", Provider: f}
	if change != nil {
		change(&d)
	}
	def, err := Define(d)
	if err != nil {
		t.Fatal(err)
	}
	st := memstore.New(memstore.Options{})
	x := &fixture{t: t, f: f, def: def, store: st, deps: Deps{Instances: st.Instances, NoGuest: true}}
	t.Cleanup(func() { f.destroy = nil; x.destroyAll() })
	return x
}

func (x *fixture) destroyAll() {
	x.f.mu.Lock()
	ids := x.f.alive
	x.f.mu.Unlock()
	for id := range ids {
		_ = x.f.Provider.Destroy(context.Background(), provider.Ref{Provider: "local", ID: id, Version: 1})
	}
}

var k1 = Key{ThreadID: "thread-1", RunID: "run-1"}

// ensure runs Ensure and closes the sandbox.
func (x *fixture) ensure(k Key) (provider.Ref, Outcome, error) {
	x.t.Helper()
	box, out, err := Ensure(x.t.Context(), x.deps, x.def, k)
	if err != nil {
		return provider.Ref{}, out, err
	}
	defer box.Close()
	return box.Ref(), out, nil
}

func (x *fixture) must(k Key, how How, counts string) (provider.Ref, Outcome) {
	x.t.Helper()
	ref, out, err := x.ensure(k)
	if err != nil {
		x.t.Fatal(err)
	}
	if out.How != how || x.f.count() != counts {
		x.t.Errorf("how %s, calls %s, want %s, %s", out.How, x.f.count(), how, counts)
	}
	return ref, out
}

func (x *fixture) record() (store.Instance, bool) {
	x.t.Helper()
	rec, err := x.store.Instances.Get(x.t.Context(), x.def.InstanceKey(k1))
	if errors.Is(err, store.ErrNotFound) {
		return rec, false
	}
	if err != nil {
		x.t.Fatal(err)
	}
	return rec, true
}

func TestEnsureCreatesThenResumes(t *testing.T) {
	x := newFixture(t, nil)
	ref, out := x.must(k1, Created, "1/0/0/0")
	if s := x.f.specs[0]; s.Key != x.def.InstanceKey(k1) || s.Labels[LabelKey] != out.Key || s.Labels[LabelGen] != "1" {
		t.Errorf("spec = %+v", s)
	}
	k2 := k1
	k2.RunID = "run-2"
	again, _ := x.must(k2, Resumed, "1/1/0/0")
	rec, _ := x.record()
	if again.ID != ref.ID || rec.LatestRunID != "run-2" || rec.ThreadID != "thread-1" || rec.State != store.InstanceReady {
		t.Errorf("ref %v then %v, record %+v", ref, again, rec)
	}
	if !x.f.did("snapshot after-setup") || rec.SnapshotID == "" {
		t.Error("no snapshot was recorded")
	}
}

func TestEnsureSnapshotNone(t *testing.T) {
	x := newFixture(t, func(d *Definition) { d.Lifecycle.Snapshot = NoSnapshot })
	x.must(k1, Created, "1/0/0/0")
	if rec, _ := x.record(); rec.SnapshotID != "" || x.f.did("snapshot") {
		t.Error("a snapshot was taken")
	}
}

func notFound(context.Context) error { return provider.ErrNotFound }

func TestEnsureRestores(t *testing.T) {
	x := newFixture(t, nil)
	x.must(k1, Created, "1/0/0/0")
	before, _ := x.record()
	x.f.resume = notFound
	x.must(k1, Restored, "1/1/1/1") // the one that is gone is destroyed, to be sure
	rec, _ := x.record()
	if rec.Gen != before.Gen || rec.SnapshotID != before.SnapshotID || !rec.SnapshotAt.Equal(before.SnapshotAt) || string(rec.Ref) == string(before.Ref) {
		t.Errorf("record %+v, before %+v", rec, before)
	}
	x.f.resume = nil
	x.must(k1, Resumed, "1/2/1/1")
}

func TestEnsureResumeNoneWithoutSnapshot(t *testing.T) {
	x := newFixture(t, nil)
	x.f.noSnaps = true
	x.must(k1, Created, "1/0/0/0")
	x.f.resume = notFound
	_, out := x.must(k1, Created, "2/1/0/1")
	if x.f.living() != 1 {
		t.Errorf("%d sandboxes live", x.f.living())
	}
	if rec, _ := x.record(); rec.Gen != out.Gen {
		t.Errorf("record %+v", rec)
	}
}

func TestEnsurePerRun(t *testing.T) {
	x := newFixture(t, func(d *Definition) { d.Lifecycle.Reuse = PerRun })
	x.must(k1, Created, "1/0/0/0")
	x.must(Key{ThreadID: "thread-1", RunID: "run-2"}, Created, "2/0/0/0")
	if x.def.Definition().Lifecycle.OnComplete != Destroy {
		t.Error("a sandbox per run is kept")
	}
}

func TestEnsureConcurrent(t *testing.T) {
	for name, leases := range map[string]bool{"one definition": false, "leases": true} {
		t.Run(name, func(t *testing.T) {
			x := newFixture(t, nil)
			if leases {
				x.deps.Leases = x.store.Leases
			}
			n := 50
			if leases {
				n = 8 // a lease is asked for again and again
			}
			ids := make([]string, n)
			var wg sync.WaitGroup
			for i := range n {
				wg.Go(func() {
					def := x.def
					if leases { // as different hosts, or requests, make them
						var err error
						if def, err = Define(x.def.Definition()); err != nil {
							t.Error(err)
						}
					}
					box, _, err := Ensure(t.Context(), x.deps, def, k1)
					if err != nil {
						t.Error(err)
						return
					}
					ids[i] = box.Ref().ID
					_ = box.Close()
				})
			}
			wg.Wait()
			if got, want := x.f.count(), fmt.Sprintf("1/%d/0/0", n-1); got != want {
				t.Errorf("calls %s, want %s", got, want)
			}
			for _, id := range ids {
				if id != ids[0] {
					t.Errorf("ids %v", ids)
				}
			}
		})
	}
}

// aged tells of records as if they had been made some time ago.
type aged struct {
	store.Instances
	by time.Duration
}

func (a *aged) Get(ctx context.Context, key string) (store.Instance, error) {
	i, err := a.Instances.Get(ctx, key)
	i.CreatedAt = i.CreatedAt.Add(-a.by)
	if !i.SnapshotAt.IsZero() {
		i.SnapshotAt = i.SnapshotAt.Add(-a.by)
	}
	return i, err
}

func TestEnsureMaxAge(t *testing.T) {
	x := newFixture(t, func(d *Definition) { d.Lifecycle.SnapshotMaxAge = time.Hour })
	age := &aged{Instances: x.store.Instances}
	x.deps.Instances = age
	x.must(k1, Created, "1/0/0/0")
	age.by = 59 * time.Minute
	x.must(k1, Resumed, "1/1/0/0") // use does not make it younger
	age.by = 2 * time.Hour
	if box, err := EnsureExisting(t.Context(), x.deps, x.def, k1); box != nil || err != nil {
		t.Errorf("EnsureExisting = %v, %v", box, err)
	}
	x.must(k1, Created, "2/1/0/1")
	if x.f.living() != 1 || !x.f.did("deleteSnapshot") {
		t.Errorf("%d live, calls %v", x.f.living(), x.f.calls)
	}
}

func TestEnsureWrongOwner(t *testing.T) {
	for field, change := range map[string]func(*store.Instance){
		"thread":   func(i *store.Instance) { i.ThreadID = "thread-2" },
		"tenant":   func(i *store.Instance) { i.Tenant = "other" },
		"provider": func(i *store.Instance) { i.Provider = "docker" },
	} {
		x := newFixture(t, nil)
		x.must(k1, Created, "1/0/0/0")
		rec, _ := x.record()
		change(&rec)
		if err := x.store.Instances.Delete(t.Context(), rec.Key, rec.Gen); err != nil {
			t.Fatal(err)
		}
		rec.Gen = 0
		if _, err := x.store.Instances.Put(t.Context(), rec); err != nil {
			t.Fatal(err)
		}
		_, _, err := x.ensure(k1)
		var m *MismatchError
		if !errors.As(err, &m) || m.Field != field || x.f.count() != "1/0/0/0" {
			t.Errorf("%s: %v, calls %s", field, err, x.f.count())
		}
	}
}

// broken makes calls of a store fail.
type broken struct {
	store.Instances
	put func(store.Instance) error
}

func (b *broken) Put(ctx context.Context, i store.Instance) (store.Instance, error) {
	if err := b.put(i); err != nil {
		return i, err
	}
	return b.Instances.Put(ctx, i)
}

// What fails leaves neither sandbox nor record (spec 01 §12.2).
func TestEnsureFailuresLeaveNothing(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*Definition)
		fake   func(*fixture)
		want   error
		text   string
	}{
		"create":       {fake: func(x *fixture) { x.f.create = fails }, want: errFake},
		"set-up":       {change: func(d *Definition) { d.Workspace.Setup = workspace.Steps(workspace.Serial("exit 3")) }, text: "setup step failed: exit 3 (exit 3)"},
		"source":       {change: func(d *Definition) { d.Workspace.Source = workspace.Local{Path: "/does/not/exist"} }, want: workspace.ErrInvalid},
		"record":       {fake: func(x *fixture) { x.failPut(func(i store.Instance) bool { return true }) }, want: errFake},
		"record of id": {fake: func(x *fixture) { x.failPut(func(i store.Instance) bool { return i.Ref != nil }) }, want: errFake},
		"record ready": {fake: func(x *fixture) { x.failPut(func(i store.Instance) bool { return i.State == store.InstanceReady }) }, want: errFake},
	} {
		t.Run(name, func(t *testing.T) {
			x := newFixture(t, c.change)
			if c.fake != nil {
				c.fake(x)
			}
			_, _, err := x.ensure(k1)
			if err == nil || c.want != nil && !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.text) {
				t.Errorf("err = %v", err)
			}
			if rec, ok := x.record(); ok || x.f.living() != 0 {
				t.Errorf("%d sandboxes live, record %+v", x.f.living(), rec)
			}
		})
	}
}

func (x *fixture) failPut(when func(store.Instance) bool) {
	x.deps.Instances = &broken{x.store.Instances, func(i store.Instance) error {
		if when(i) {
			return errFake
		}
		return nil
	}}
}

func TestEnsureSetupErrorSurvivesDestroyError(t *testing.T) {
	x := newFixture(t, func(d *Definition) { d.Workspace.Setup = workspace.Steps(workspace.Serial("exit 3")) })
	x.f.destroy = fails
	_, _, err := x.ensure(k1)
	var se *workspace.StepError
	if !errors.As(err, &se) || !errors.Is(err, errFake) {
		t.Errorf("err = %v", err)
	}
	rec, ok := x.record()
	if !ok || rec.Desired != store.DesiredDestroyed || rec.LastError == "" || len(rec.Ref) == 0 {
		t.Errorf("the trail is lost: %+v", rec)
	}
	// The next one cleans up and has another name, should that fail again.
	x.f.destroy = nil
	x.def, _ = Define(Definition{ID: "repo", Provider: x.f, Workspace: x.def.Definition().Workspace})
	if _, _, err := x.ensure(k1); err == nil || x.f.living() != 0 {
		t.Errorf("%d live, err %v", x.f.living(), err)
	}
}

func TestEnsureSnapshotErrorKeepsSandbox(t *testing.T) {
	x := newFixture(t, nil)
	x.f.snapshot = fails
	var warned bool
	x.deps.Progress = func(ev ProgressEvent) { warned = warned || ev.State == ProgressWarning }
	x.must(k1, Created, "1/0/0/0")
	if rec, _ := x.record(); rec.State != store.InstanceReady || rec.SnapshotID != "" || !warned {
		t.Errorf("record %+v, warned %v", rec, warned)
	}
}

func TestEnsureRestoreErrorFallsBack(t *testing.T) {
	x := newFixture(t, nil)
	x.must(k1, Created, "1/0/0/0")
	x.f.resume, x.f.restore = notFound, fails
	x.must(k1, Created, "2/1/1/1")
	if x.f.living() != 1 || !x.f.did("deleteSnapshot") {
		t.Errorf("%d live", x.f.living())
	}
}

func TestEnsureResumeErrors(t *testing.T) {
	x := newFixture(t, nil)
	x.must(k1, Created, "1/0/0/0")
	tries := 0
	x.f.resume = func(context.Context) error {
		if tries++; tries == 1 {
			return provider.ErrUnavailable
		}
		return nil
	}
	x.must(k1, Resumed, "1/2/0/0")
	before, _ := x.record()
	x.f.resume = func(context.Context) error { return provider.ErrUnavailable }
	_, _, err := x.ensure(k1)
	if after, _ := x.record(); !errors.Is(err, provider.ErrUnavailable) || x.f.count() != "1/4/0/0" || string(after.Ref) != string(before.Ref) || after.State != store.InstanceReady {
		t.Errorf("err = %v, calls %s, record %+v", err, x.f.count(), after)
	}
}

func TestEnsureUnhealthySandboxIsGone(t *testing.T) {
	x := newFixture(t, nil)
	x.f.noSnaps = true
	x.must(k1, Created, "1/0/0/0")
	n := 0
	x.f.start = func(provider.Cmd) error {
		if n++; n <= 2 {
			return errFake
		}
		return nil
	}
	x.must(k1, Created, "2/1/0/1")
	if x.f.living() != 1 {
		t.Errorf("%d live", x.f.living())
	}
}

func TestEnsureLeftoverIsDestroyed(t *testing.T) {
	x := newFixture(t, nil)
	h, err := x.f.Create(t.Context(), provider.Spec{Key: "leftover"})
	if err != nil {
		t.Fatal(err)
	}
	ref, _ := json.Marshal(h.Ref())
	_, err = x.store.Instances.Put(t.Context(), store.Instance{Key: x.def.InstanceKey(k1), Provider: "fake", Ref: ref, State: store.InstanceCreating, ThreadID: "thread-1"})
	if err != nil {
		t.Fatal(err)
	}
	x.must(k1, Created, "2/0/0/1")
	if x.f.living() != 1 {
		t.Errorf("%d live", x.f.living())
	}
	_ = h.Close()
}

func TestEnsureCancelDuringSetup(t *testing.T) {
	for _, step := range []workspace.Group{workspace.Serial("touch started; sleep 60"), workspace.Parallel("touch started; sleep 60", "sleep 60")} {
		x := newFixture(t, func(d *Definition) { d.Workspace.Setup = workspace.Steps(step) })
		ctx, cancel := context.WithCancelCause(t.Context())
		enough := errors.New("enough")
		x.deps.Progress = func(ev ProgressEvent) {
			if ev.Phase == PhaseSetup && ev.State == ProgressStarted {
				cancel(enough)
			}
		}
		start := time.Now()
		_, _, err := Ensure(ctx, x.deps, x.def, k1)
		if !errors.Is(err, enough) || time.Since(start) > 3*time.Second {
			t.Errorf("err = %v after %v", err, time.Since(start))
		}
		if _, ok := x.record(); ok || x.f.living() != 0 {
			t.Errorf("record %v, %d live", ok, x.f.living())
		}
	}
}

// lossy loses its lease when it is renewed.
type lossy struct{ store.Leaser }

func (*lossy) Renew(context.Context, store.Lease, time.Duration) (store.Lease, error) {
	return store.Lease{}, store.ErrFenced
}

func TestEnsureLeaseLost(t *testing.T) {
	x := newFixture(t, nil)
	x.deps.Leases, x.deps.Lease = &lossy{x.store.Leases}, 30*time.Millisecond
	x.f.create = func(ctx context.Context) error {
		<-ctx.Done()
		return nil // and makes one all the same
	}
	_, _, err := x.ensure(k1)
	if !errors.Is(err, store.ErrFenced) || x.f.living() != 0 {
		t.Errorf("err = %v, %d live", err, x.f.living())
	}
}

func TestEnsureWaitHonoursContext(t *testing.T) {
	x := newFixture(t, nil)
	entered, free := make(chan struct{}), make(chan struct{})
	x.f.create = func(context.Context) error { close(entered); <-free; return nil }
	var wg sync.WaitGroup
	wg.Go(func() { _, _, _ = x.ensure(k1) })
	<-entered
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
	defer cancel()
	if _, _, err := Ensure(ctx, x.deps, x.def, k1); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("err = %v", err)
	}
	close(free)
	wg.Wait()
	if len(x.def.locks.keys) != 0 {
		t.Error("an idle key is kept")
	}
}

func TestEnsureExisting(t *testing.T) {
	x := newFixture(t, nil)
	none := func(counts string) {
		t.Helper()
		box, err := EnsureExisting(t.Context(), x.deps, x.def, k1)
		if box != nil || err != nil || x.f.count() != counts {
			t.Errorf("box %v, err %v, calls %s", box, err, x.f.count())
		}
	}
	none("0/0/0/0")
	x.must(k1, Created, "1/0/0/0")
	box, err := EnsureExisting(t.Context(), x.deps, x.def, k1)
	if err != nil || box == nil {
		t.Fatal(box, err)
	}
	_ = box.Close()
	x.f.resume = notFound
	none("1/2/0/0")
}

func TestDestroyInstance(t *testing.T) {
	x := newFixture(t, nil)
	if err := DestroyInstance(t.Context(), x.deps, x.def, k1); err != nil || x.f.count() != "0/0/0/0" {
		t.Errorf("nothing to destroy: %v, %s", err, x.f.count())
	}
	x.must(k1, Created, "1/0/0/0")
	dead, cancel := context.WithCancel(t.Context())
	cancel()
	x.f.destroy = fails
	if err := DestroyInstance(dead, x.deps, x.def, k1); !errors.Is(err, errFake) {
		t.Errorf("err = %v", err)
	}
	if rec, ok := x.record(); !ok || rec.Desired != store.DesiredDestroyed {
		t.Errorf("the record is lost: %+v", rec)
	}
	x.f.destroy = func(ctx context.Context) error {
		d, ok := ctx.Deadline()
		if !ok || time.Until(d) > cleanupTimeout || ctx.Err() != nil {
			return fmt.Errorf("deadline %v, %v, err %v", d, ok, ctx.Err())
		}
		return nil
	}
	if err := DestroyInstance(dead, x.deps, x.def, k1); err != nil {
		t.Errorf("err = %v", err)
	}
	if _, ok := x.record(); ok || x.f.living() != 0 {
		t.Errorf("record %v, %d live", ok, x.f.living())
	}
}

// Whatever the order of ensure and destroy, a record that is ready names a
// sandbox that lives.
func TestDestroyRacesEnsure(t *testing.T) {
	rounds := 60
	if testing.Short() {
		rounds = 10
	}
	x := newFixture(t, nil)
	x.f.noSnaps = true
	for range rounds {
		var wg sync.WaitGroup
		wg.Go(func() {
			if _, _, err := x.ensure(k1); err != nil {
				t.Error(err)
			}
		})
		wg.Go(func() {
			if err := DestroyInstance(t.Context(), x.deps, x.def, k1); err != nil {
				t.Error(err)
			}
		})
		wg.Wait()
		rec, ok := x.record()
		if !ok {
			if x.f.living() != 0 {
				t.Fatal("a sandbox lives without a record")
			}
			continue
		}
		var ref provider.Ref
		if err := json.Unmarshal(rec.Ref, &ref); err != nil || !x.f.alive[ref.ID] {
			t.Fatalf("the record names %v, which is gone", ref)
		}
	}
}
