package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/provider/local"
)

// fake is a provider whose calls are counted and can be made to fail. Its
// sandboxes are directories of this host, with real commands.
type fake struct {
	provider.Provider
	mu      sync.Mutex
	calls   []string
	specs   []provider.Spec
	alive   map[string]bool
	n       atomic.Int64
	noSnaps bool
	traits  *provider.Traits

	create, resume, restore, destroy, snapshot func(ctx context.Context) error
	start                                      func(cmd provider.Cmd) error
}

func newFake(t *testing.T) *fake {
	return &fake{Provider: local.New(local.Options{BaseDir: t.TempDir()}), alive: map[string]bool{}}
}

func (f *fake) call(name string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls = append(f.calls, name)
}

// count returns how often create, resume, restore and destroy were called.
func (f *fake) count() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := map[string]int{}
	for _, c := range f.calls {
		n[c]++
	}
	return fmt.Sprintf("%d/%d/%d/%d", n["create"], n["resume"], n["restore"], n["destroy"])
}

func (f *fake) living() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.alive)
}

func try(ctx context.Context, f func(context.Context) error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if f == nil {
		return nil
	}
	return f(ctx)
}

func (f *fake) Name() string { return "fake" }

func (f *fake) Traits() provider.Traits {
	if f.traits != nil {
		return *f.traits
	}
	return f.Provider.Traits()
}

func (f *fake) made(h provider.Handle) provider.Handle {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.alive[h.Ref().ID] = true
	fh := &fakeHandle{Handle: h, f: f}
	if f.noSnaps {
		return fh
	}
	return snapHandle{fh}
}

func (f *fake) Create(ctx context.Context, spec provider.Spec) (provider.Handle, error) {
	f.call("create")
	if err := try(ctx, f.create); err != nil {
		return nil, err
	}
	f.mu.Lock()
	f.specs = append(f.specs, spec)
	f.mu.Unlock()
	h, err := f.Provider.Create(ctx, provider.Spec{Key: spec.Key, Labels: spec.Labels})
	if err != nil {
		return nil, err
	}
	return f.made(h), nil
}

func (f *fake) Resume(ctx context.Context, ref provider.Ref) (provider.Handle, error) {
	f.call("resume")
	if err := try(ctx, f.resume); err != nil {
		return nil, err
	}
	ref.Provider = "local"
	h, err := f.Provider.Resume(ctx, ref)
	if err != nil {
		return nil, err
	}
	return f.made(h), nil
}

func (f *fake) Destroy(ctx context.Context, ref provider.Ref) error {
	f.call("destroy")
	if err := try(ctx, f.destroy); err != nil {
		return err
	}
	f.mu.Lock()
	delete(f.alive, ref.ID)
	f.mu.Unlock()
	ref.Provider = "local"
	return f.Provider.Destroy(ctx, ref)
}

func (f *fake) Restore(ctx context.Context, snapshot string, spec provider.Spec) (provider.Handle, error) {
	f.call("restore")
	if err := try(ctx, f.restore); err != nil {
		return nil, err
	}
	h, err := f.Provider.Create(ctx, provider.Spec{Key: fmt.Sprintf("%sr%d", spec.Key[:30], f.n.Add(1))})
	if err != nil {
		return nil, err
	}
	return f.made(h), os.WriteFile(h.Root()+"/restored", []byte(snapshot), 0o644)
}

func (f *fake) DeleteSnapshot(context.Context, string) error {
	f.call("deleteSnapshot")
	return nil
}

type fakeHandle struct {
	provider.Handle
	f *fake
}

func (h *fakeHandle) Unwrap() any { return h.Handle }

func (h *fakeHandle) Ref() provider.Ref {
	r := h.Handle.Ref()
	r.Provider = "fake"
	return r
}

func (h *fakeHandle) Start(ctx context.Context, cmd provider.Cmd) (provider.Process, error) {
	if h.f.start != nil {
		if err := h.f.start(cmd); err != nil {
			return nil, err
		}
	}
	return h.Handle.Start(ctx, cmd)
}

type snapHandle struct{ *fakeHandle }

func (h snapHandle) Snapshot(ctx context.Context, label string) (string, error) {
	h.f.call("snapshot " + label)
	return fmt.Sprintf("snap-%d", h.f.n.Add(1)), try(ctx, h.f.snapshot)
}

var errFake = errors.New("made to fail")

func fails(context.Context) error { return errFake }

func (f *fake) did(name string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, c := range f.calls {
		if strings.HasPrefix(c, name) {
			return true
		}
	}
	return false
}
