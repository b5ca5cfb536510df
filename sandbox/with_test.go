package sandbox

import (
	"context"
	"errors"
	"iter"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/aisandbox-go/aisandbox/chat"
	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/secret"
	"github.com/aisandbox-go/aisandbox/store"
	"github.com/aisandbox-go/aisandbox/workspace"
)

// agent is an adapter that does something in the sandbox and finishes.
type agent struct {
	do func(ctx context.Context, box *Sandbox) error
}

func (agent) Name() string           { return "agent" }
func (agent) Needs() []chat.AnyToken { return []chat.AnyToken{Token} }

func (a agent) Stream(ctx context.Context, r *chat.Run) iter.Seq2[chat.Item, error] {
	return func(yield func(chat.Item, error) bool) {
		box, err := Token.Need(r)
		if err == nil {
			err = a.do(ctx, box)
		}
		if err != nil {
			yield(chat.Item{}, err)
			return
		}
		yield(chat.Item{Event: event.RunFinished{ThreadID: r.ThreadID(), RunID: r.ID()}}, nil)
	}
}

// turn runs an agent in x's sandbox and returns the events.
func (x *fixture) turn(ctx context.Context, runID string, o WithOptions, do func(context.Context, *Sandbox) error) ([]event.Event, error) {
	x.t.Helper()
	run, err := chat.Start(ctx, chat.Request{
		RunID: runID, ThreadID: k1.ThreadID, Messages: []event.Message{{ID: "m", Role: "user", Content: event.Text("hi")}},
		Adapter: agent{do}, Use: []chat.Middleware{With(x.def, o)},
	})
	if err != nil {
		x.t.Fatal(err)
	}
	var evs []event.Event
	for ev, err := range run.Events(ctx) {
		if err != nil {
			return evs, err
		}
		evs = append(evs, ev)
	}
	return evs, nil
}

func shell(script string) func(context.Context, *Sandbox) error {
	return func(ctx context.Context, box *Sandbox) error {
		_, err := box.Output(ctx, provider.Cmd{Argv: provider.Shell(script)})
		return err
	}
}

// said lists events in short: type, name, and for files the change.
func said(evs []event.Event) []string {
	var out []string
	for _, ev := range evs {
		s := string(ev.Type())
		if f, ok := event.CustomOf[event.File](ev, event.NameFile); ok {
			s = f.Type + " " + f.Path
		} else if d, ok := event.CustomOf[event.FileDiff](ev, event.NameFileDiff); ok {
			s = "diff " + d.Path
		} else if c, ok := ev.(event.Custom); ok {
			if c.Name == event.NameWorkspaceSetup || c.Name == event.NameRunAccepted {
				continue
			}
			s = c.Name
		}
		out = append(out, s)
	}
	return out
}

func TestWithFileEvents(t *testing.T) {
	for _, guest := range []bool{false, true} {
		for mode, want := range map[FileEvents][]string{
			FileEventsOn:   {"RUN_STARTED", "sandbox.created", "change /workspace/a.txt", "create /workspace/new", "RUN_FINISHED"},
			FileEventsDiff: {"RUN_STARTED", "sandbox.created", "change /workspace/a.txt", "diff /workspace/a.txt", "create /workspace/new", "diff /workspace/new", "RUN_FINISHED"},
			FileEventsOff:  {"RUN_STARTED", "sandbox.created", "RUN_FINISHED"},
		} {
			var hooked []string
			var diff string
			x := newFixture(t, func(d *Definition) {
				d.FileEvents = mode
				d.Workspace.Source = workspace.Local{Path: repo(t)}
				note := func(kind string) func(context.Context, FileEvent) {
					return func(_ context.Context, f FileEvent) { hooked = append(hooked, kind+" "+f.Path) }
				}
				d.Hooks = Hooks{OnFile: note("any"), OnFileCreate: note("create"), OnFileDelete: note("delete"), OnFileChange: func(ctx context.Context, f FileEvent) {
					before, err1 := f.Before(ctx)
					after, err2 := f.After(ctx)
					df, err3 := f.Diff(ctx)
					if f.Path == "/workspace/a.txt" { // the last word counts: a shell empties a file first
						diff = before + after + df[strings.Index(df, "@@"):]
					}
					if err := errors.Join(err1, err2, err3); err != nil {
						t.Error(err)
					}
					panic("a hook that fails breaks nothing")
				}}
			})
			evs, err := x.turn(t.Context(), "run-1", WithOptions{Deps: Deps{Instances: x.store.Instances, NoGuest: !guest}}, shell("echo four > a.txt; echo n > new"))
			if err != nil {
				t.Fatal(err)
			}
			if mode == FileEventsOff {
				if len(hooked) != 0 {
					t.Error("hooks were called:", hooked)
				}
			} else {
				if diff != "three\nfour\n@@ -1 +1 @@\n-three\n+four\n" {
					t.Errorf("diff %q", diff)
				}
				hooked := slices.Compact(hooked)
				if guest {
					hooked = first(hooked)
				}
				if diff := cmp.Diff([]string{"any /workspace/a.txt", "any /workspace/new", "create /workspace/new"}, hooked); diff != "" {
					t.Error(diff)
				}
			}
			got := said(evs)
			if guest {
				got = first(got)
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%s, guest %v: %s", mode, guest, diff)
			}
			if x.f.count() != "1/0/0/0" || x.f.living() != 1 {
				t.Errorf("calls %s", x.f.count())
			}
		}
	}
}

// first leaves of what was said of each path only the first: where every write is
// seen a file may change again at once.
func first(said []string) []string {
	seen := map[string]bool{}
	return slices.DeleteFunc(slices.Clone(said), func(s string) bool {
		_, path, ok := strings.Cut(s, " ")
		kind := strings.HasPrefix(s, "diff ")
		if strings.HasPrefix(s, "any ") {
			path = "any " + path
		}
		if kind {
			path = "diff " + path
		}
		again := ok && seen[path]
		seen[path] = true
		return again
	})
}

// What becomes of the sandbox at the end (spec 01 §15.4, 15.5).
func TestWithEnds(t *testing.T) {
	boom := errors.New("the agent broke")
	finish := func(context.Context, *Sandbox) error { return nil }
	fail := func(context.Context, *Sandbox) error { return boom }
	noKill := provider.Traits{LiveStdin: true, DurableFS: true}
	kill := provider.Traits{LiveStdin: true, DurableFS: true, Kill: true}
	for name, c := range map[string]struct {
		life    Lifecycle
		do      func(context.Context, *Sandbox) error
		cancel  bool
		traits  *provider.Traits
		destroy bool
		onError bool
	}{
		"finish":          {do: finish},
		"finish, destroy": {life: Lifecycle{OnComplete: Destroy}, do: finish, destroy: true},
		"finish, per run": {life: Lifecycle{Reuse: PerRun}, do: finish, destroy: true},
		"per run, keep":   {life: Lifecycle{Reuse: PerRun, OnComplete: Keep}, do: finish},
		"fail":            {do: fail, onError: true},
		"fail, destroy":   {life: Lifecycle{OnComplete: Destroy}, do: fail, destroy: true, onError: true},
		"cancel":          {cancel: true, traits: &kill},
		"cancel, destroy": {life: Lifecycle{OnComplete: Destroy}, cancel: true, destroy: true},
		"cancel, no kill": {cancel: true, traits: &noKill, destroy: true},
	} {
		for _, remembered := range []bool{true, false} {
			t.Run(name, func(t *testing.T) {
				var calls []string
				x := newFixture(t, func(d *Definition) {
					d.Lifecycle = c.life
					d.Hooks = Hooks{
						OnReady:   func(context.Context, *Sandbox) error { calls = append(calls, "ready"); return nil },
						OnError:   func(context.Context, error) { calls = append(calls, "error"); panic("ignored") },
						OnDestroy: func(context.Context) { calls = append(calls, "destroy") },
					}
				})
				x.f.traits = c.traits
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				do := c.do
				if c.cancel {
					do = func(ctx context.Context, _ *Sandbox) error { cancel(); <-ctx.Done(); return context.Cause(ctx) }
				}
				deps := Deps{NoGuest: true}
				if remembered {
					deps.Instances = x.store.Instances
				}
				_, _ = x.turn(ctx, "run-1", WithOptions{Deps: deps}, do)
				want := []string{"ready"}
				if c.onError {
					want = append(want, "error")
				}
				if c.destroy {
					want = append(want, "destroy")
				}
				if diff := cmp.Diff(want, calls); diff != "" {
					t.Error(diff)
				}
				if (x.f.living() == 0) != c.destroy {
					t.Errorf("%d live", x.f.living())
				}
				if _, ok := x.record(); c.life.Reuse != PerRun && ok == (c.destroy || !remembered) {
					t.Errorf("record: %v", ok)
				}
			})
		}
	}
}

func TestWithOnReadyError(t *testing.T) {
	bad := errors.New("not ready")
	var fail bool
	x := newFixture(t, func(d *Definition) {
		d.Hooks.OnReady = func(context.Context, *Sandbox) error {
			if fail {
				return bad
			}
			return nil
		}
	})
	o := WithOptions{Deps: x.deps}
	nothing := func(context.Context, *Sandbox) error { return nil }
	fail = true
	evs, _ := x.turn(t.Context(), "run-1", o, nothing)
	if e, ok := evs[len(evs)-1].(event.RunError); !ok || !strings.Contains(e.Message, "not ready") || x.f.living() != 0 {
		t.Errorf("%v, %d live: what the run created must go", evs[len(evs)-1], x.f.living())
	}
	fail = false
	if _, err := x.turn(t.Context(), "run-2", o, nothing); err != nil {
		t.Fatal(err)
	}
	fail = true
	if _, err := x.turn(t.Context(), "run-3", o, nothing); err != nil {
		t.Fatal(err)
	}
	if x.f.living() != 1 {
		t.Error("a resumed sandbox was destroyed")
	}
}

func TestWithRedactsEvents(t *testing.T) {
	set, err := secret.NewSet(map[string]string{"TOK": "tok-very-secret"})
	if err != nil {
		t.Fatal(err)
	}
	x := newFixture(t, func(d *Definition) {
		d.FileEvents = FileEventsDiff
		d.Workspace.Secrets = set
		d.Workspace.Setup = workspace.Steps(workspace.Serial("echo tok-very-secret > there", ": tok-very-secret"))
	})
	evs, err := x.turn(t.Context(), "run-1", WithOptions{Deps: x.deps}, func(ctx context.Context, box *Sandbox) error {
		if err := shell(`echo "$TOK" > leaked`)(ctx, box); err != nil {
			return err
		}
		return errors.New("failed with tok-very-secret")
	})
	if err != nil {
		t.Fatal(err)
	}
	labels := 0
	for _, ev := range evs {
		b, err := event.Encode(ev)
		if err != nil || strings.Contains(string(b), "tok-very-secret") {
			t.Errorf("%s, %v", b, err)
		}
		labels += strings.Count(string(b), "[secret:TOK]")
	}
	if labels < 6 { // two steps twice, the diff, the error
		t.Errorf("%d labels in %q", labels, said(evs))
	}
}

func TestWithMissing(t *testing.T) {
	_, err := chat.Start(t.Context(), chat.Request{Adapter: agent{}, Messages: []event.Message{{ID: "m", Role: "user"}}})
	var m *chat.MissingError
	if !errors.As(err, &m) || m.Adapter != "agent" || m.Token != "sandbox" || !strings.Contains(err.Error(), "sandbox.With") {
		t.Error(err)
	}
}

// What the options don't name comes from the run.
func TestWithTakesDependenciesFromTheRun(t *testing.T) {
	x := newFixture(t, nil)
	counted := &counting{Leaser: x.store.Leases}
	give := chat.Middleware{Name: "give", Provides: []chat.AnyToken{InstancesToken}, Setup: func(_ context.Context, r *chat.Run) error {
		InstancesToken.Provide(r, x.store.Instances)
		return nil
	}}
	run, err := chat.Start(t.Context(), chat.Request{
		ThreadID: k1.ThreadID, Messages: []event.Message{{ID: "m", Role: "user"}}, Adapter: agent{shell(":")},
		Use: []chat.Middleware{chat.Locks(counted), give, With(x.def, WithOptions{Deps: Deps{NoGuest: true}})},
	})
	if err != nil {
		t.Fatal(err)
	}
	if o, err := run.Wait(t.Context()); err != nil || o.Kind != chat.Finished {
		t.Fatal(o, err)
	}
	if _, ok := x.record(); !ok || counted.n == 0 {
		t.Errorf("record %v, leases %d", ok, counted.n)
	}
}

type counting struct {
	store.Leaser
	n int
}

func (c *counting) Acquire(ctx context.Context, key, owner string, ttl time.Duration) (store.Lease, error) {
	c.n++
	return c.Leaser.Acquire(ctx, key, owner, ttl)
}

// Two runs on one thread share a sandbox; ending one leaves the other's at work.
func TestWithSharedSandbox(t *testing.T) {
	x := newFixture(t, nil)
	o := WithOptions{Deps: x.deps}
	inside, leave := make(chan struct{}), make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		evs, err := x.turn(t.Context(), "run-1", o, func(ctx context.Context, box *Sandbox) error {
			close(inside)
			<-leave
			return shell("echo still here > late")(ctx, box)
		})
		if err != nil || !slices.Contains(said(evs), "RUN_FINISHED") {
			t.Errorf("%v %v", said(evs), err)
		}
	})
	<-inside
	ctx, cancel := context.WithCancel(t.Context())
	_, _ = x.turn(ctx, "run-2", o, func(ctx context.Context, _ *Sandbox) error { cancel(); <-ctx.Done(); return context.Cause(ctx) })
	close(leave)
	wg.Wait()
	if x.f.living() != 1 || x.f.count() != "1/1/0/0" {
		t.Errorf("%d live, calls %s", x.f.living(), x.f.count())
	}
}

// The whole of it, through the guest.
func TestEnsureWithGuest(t *testing.T) {
	x := newFixture(t, func(d *Definition) {
		d.Workspace.Source = workspace.Local{Path: repo(t)}
		d.Workspace.Instructions = "Be brief."
		d.Workspace.Setup = workspace.Steps(workspace.Serial("export A=1", "cd d"), workspace.Parallel("echo $A > p", "pwd > q"), workspace.Serial("cat p q"))
	})
	x.deps.NoGuest = false
	for i, how := range []How{Created, Resumed} {
		box, out, err := Ensure(t.Context(), x.deps, x.def, k1)
		if err != nil {
			t.Fatal(err)
		}
		if out.How != how || !box.Capabilities().Watch || !box.Capabilities().Killable {
			t.Errorf("%+v %+v", out, box.Capabilities())
		}
		if got := sh1(t, box, "cat d/p CLAUDE.md; git status --porcelain --untracked-files=no; git log -1 --format=%s"); got != "1\nBe brief.third" {
			t.Errorf("turn %d: %q", i, got)
		}
		if err := box.Close(); err != nil {
			t.Error(err)
		}
	}
}
