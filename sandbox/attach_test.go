package sandbox

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/aisandbox-go/aisandbox/chat"
	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/store"
)

// A run that is taken over gets its own sandbox or none: nothing is made in its
// place, and only what is gone for sure is called gone.
func TestEnsureBound(t *testing.T) {
	other := errors.New("who knows")
	for name, tt := range map[string]struct {
		gen    int64
		resume func(context.Context) error
		state  store.InstanceState
		lost   bool
		err    error
	}{
		"there":              {1, nil, store.InstanceReady, false, nil},
		"another generation": {2, nil, store.InstanceReady, true, chat.ErrLost},
		"gone":               {1, notFound, store.InstanceLost, true, provider.ErrNotFound},
		"unreachable":        {1, func(context.Context) error { return other }, store.InstanceReady, false, other},
	} {
		t.Run(name, func(t *testing.T) {
			x := newFixture(t, nil)
			x.must(k1, Created, "1/0/0/0")
			x.f.resume = tt.resume
			box, err := EnsureBound(t.Context(), x.deps, x.def, k1, tt.gen)
			if box != nil {
				defer box.Close()
			}
			if !errors.Is(err, tt.err) || (box == nil) != (tt.err != nil) || errors.Is(err, chat.ErrLost) != tt.lost {
				t.Errorf("box %v, error %v", box, err)
			}
			if rec, ok := x.record(); !ok || rec.State != tt.state || !strings.HasPrefix(x.f.count(), "1/") || x.f.living() != 1 {
				t.Errorf("record %+v, calls %s", rec, x.f.count())
			}
		})
	}
	x := newFixture(t, nil)
	if _, err := EnsureBound(t.Context(), x.deps, x.def, k1, 1); !errors.Is(err, chat.ErrLost) || x.f.count() != "0/0/0/0" {
		t.Errorf("without a record: %v", err)
	}
}

func TestDurableRunNeedsInstances(t *testing.T) {
	x := newFixture(t, nil)
	run, err := chat.Start(t.Context(), chat.Request{
		RunID: "r", ThreadID: "t", Messages: []event.Message{{ID: "m", Role: "user", Content: event.Text("hi")}},
		Adapter: agent{shell(":")}, Use: []chat.Middleware{With(x.def, WithOptions{Deps: Deps{NoGuest: true}, Runs: x.store.Runs, Log: x.store.Log})},
	})
	if err != nil {
		t.Fatal(err)
	}
	if o, err := run.Wait(t.Context()); err != nil || o.Kind != chat.Failed || !strings.Contains(o.Err.Error(), "WithOptions.Instances") {
		t.Errorf("%+v, %v", o, err)
	}
}

// What becomes of the sandbox is stored with the end of the run, and done when
// that is stored.
func TestDispositionOfADurableRun(t *testing.T) {
	for name, tt := range map[string]struct {
		life    Lifecycle
		condemn bool
		fail    bool
		living  int
	}{
		"kept":                {Lifecycle{}, false, false, 1},
		"of one run":          {Lifecycle{Reuse: PerRun}, false, false, 0},
		"destroyed":           {Lifecycle{OnComplete: Destroy}, false, false, 0},
		"failed":              {Lifecycle{}, false, true, 1},
		"failed, condemned":   {Lifecycle{}, true, true, 0},
		"finished, condemned": {Lifecycle{}, true, false, 1}, // the agent has ended well
	} {
		t.Run(name, func(t *testing.T) {
			x := newFixture(t, func(d *Definition) { d.Lifecycle = tt.life })
			living := -1
			o := WithOptions{Deps: x.deps, Runs: x.store.Runs, Log: x.store.Log}
			o.Leases = x.store.Leases
			run, err := chat.Start(t.Context(), chat.Request{
				RunID: "r", ThreadID: k1.ThreadID, Messages: []event.Message{{ID: "m", Role: "user", Content: event.Text("hi")}},
				Adapter: agent{func(_ context.Context, box *Sandbox) error {
					if tt.condemn {
						box.Condemn("a reason")
					}
					if tt.fail {
						return errors.New("failed")
					}
					return nil
				}},
				Use: []chat.Middleware{
					{Setup: func(_ context.Context, r *chat.Run) error {
						r.OnFinish(func(*store.Final) { living = x.f.living() })
						return nil
					}},
					With(x.def, o),
				},
			})
			if err != nil {
				t.Fatal(err)
			}
			out, err := run.Wait(t.Context())
			if err != nil || (out.Kind == chat.Failed) != tt.fail {
				t.Fatalf("%+v, %v", out, err)
			}
			if living != 1 || x.f.living() != tt.living {
				t.Errorf("%d sandboxes at the end and %d after it, want 1 and %d", living, x.f.living(), tt.living)
			}
			rec, err := x.store.Runs.Get(t.Context(), "r")
			if err != nil || rec.SandboxKey == "" || rec.SandboxGen != 1 {
				t.Errorf("record %+v, %v", rec, err)
			}
		})
	}
}

// readyThenAsleep is a store after whose "ready" the host sleeps until its lease
// is gone.
type readyThenAsleep struct{ store.Instances }

func (s readyThenAsleep) Put(ctx context.Context, i store.Instance) (store.Instance, error) {
	got, err := s.Instances.Put(ctx, i)
	if err == nil && i.State == store.InstanceReady {
		<-ctx.Done()
	}
	return got, err
}

// Once it is recorded as ready another host may work in it.
func TestSleeperLeavesAReadySandbox(t *testing.T) {
	x := newFixture(t, nil)
	x.deps.Instances = readyThenAsleep{x.store.Instances}
	x.deps.Leases, x.deps.Lease = &lossy{x.store.Leases}, 30*time.Millisecond
	if _, _, err := x.ensure(k1); !errors.Is(err, store.ErrFenced) {
		t.Errorf("error %v", err)
	}
	if rec, ok := x.record(); !ok || !rec.Usable() || x.f.living() != 1 {
		t.Errorf("record %+v, %d live", rec, x.f.living())
	}
}
