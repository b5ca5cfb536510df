package reaper_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"maps"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/aisandbox-go/aisandbox/chat"
	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/journal"
	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/reaper"
	"github.com/aisandbox-go/aisandbox/sandbox"
	"github.com/aisandbox-go/aisandbox/store"
	"github.com/aisandbox-go/aisandbox/store/memstore"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// backend is a provider in memory, with agents.
type backend struct {
	name string

	mu        sync.Mutex
	boxes     map[string]*box
	away      bool // it can't be asked
	stuck     bool // it can't destroy
	destroyed []string
	resumed   int
	resuming  func() // called before it resumes
	listing   func() // called before it lists
}

type box struct {
	labels map[string]string
	born   time.Time
	agents map[string]*agent // by token
}

// agent is a detached process. gone is closed when it has ended.
type agent struct {
	state provider.ProbeState
	gone  chan struct{}
	kills int
}

func newBackend(name string) *backend { return &backend{name: name, boxes: map[string]*box{}} }

func (b *backend) Name() string { return b.name }
func (b *backend) Traits() provider.Traits {
	return provider.Traits{Kill: true, Outlives: true, DurableFS: true, Networks: []provider.Network{provider.NetworkNone}}
}

func (b *backend) Create(_ context.Context, spec provider.Spec) (provider.Handle, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.boxes[spec.Key] = &box{labels: spec.Labels, born: time.Now(), agents: map[string]*agent{}}
	return &handle{b, spec.Key}, nil
}

func (b *backend) Resume(_ context.Context, ref provider.Ref) (provider.Handle, error) {
	if b.resuming != nil {
		b.resuming()
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.resumed++
	switch {
	case b.away:
		return nil, provider.ErrUnavailable
	case b.boxes[ref.ID] == nil:
		return nil, provider.ErrNotFound
	}
	return &handle{b, ref.ID}, nil
}

func (b *backend) Destroy(_ context.Context, ref provider.Ref) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.away || b.stuck {
		return provider.ErrUnavailable
	}
	if x := b.boxes[ref.ID]; x != nil {
		for _, a := range x.agents {
			a.end(provider.ProbeDead)
		}
	}
	delete(b.boxes, ref.ID)
	b.destroyed = append(b.destroyed, ref.ID)
	return nil
}

func (b *backend) List(_ context.Context, labels map[string]string) ([]provider.Listed, error) {
	if b.listing != nil {
		b.listing()
	}
	b.mu.Lock()
	if b.away {
		b.mu.Unlock()
		return nil, provider.ErrUnavailable
	}
	var out []provider.Listed
	for _, id := range slices.Sorted(maps.Keys(b.boxes)) {
		x := b.boxes[id]
		fits := true
		for k, v := range labels {
			fits = fits && x.labels[k] == v
		}
		if fits {
			out = append(out, provider.Listed{Ref: provider.Ref{Provider: b.name, ID: id}, Labels: x.labels, Created: x.born, Running: true})
		}
	}
	b.mu.Unlock()
	return out, nil
}

func (b *backend) alive() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return fmt.Sprint(slices.Sorted(maps.Keys(b.boxes)))
}

func (b *backend) set(f func(*backend)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	f(b)
}

func (a *agent) end(s provider.ProbeState) {
	if a.state == provider.ProbeRunning {
		a.state = s
		close(a.gone)
	}
}

type handle struct {
	b  *backend
	id string
}

func (h *handle) Ref() provider.Ref { return provider.Ref{Provider: h.b.name, ID: h.id} }
func (h *handle) Root() string      { return "/w" }
func (h *handle) Close() error      { return nil }
func (h *handle) Start(context.Context, provider.Cmd) (provider.Process, error) {
	return nil, errors.New("nothing runs here")
}

func (h *handle) agent(token string, f func(*box, *agent)) error {
	h.b.mu.Lock()
	defer h.b.mu.Unlock()
	x := h.b.boxes[h.id]
	switch {
	case h.b.away:
		return provider.ErrUnavailable
	case x == nil:
		return provider.ErrNotFound
	}
	f(x, x.agents[token])
	return nil
}

func (h *handle) Launch(_ context.Context, token string, _ provider.Cmd, _ provider.LaunchOptions) (err error) {
	e := h.agent(token, func(x *box, a *agent) {
		if a != nil {
			err = provider.ErrAlreadyLaunched
			return
		}
		x.agents[token] = &agent{state: provider.ProbeRunning, gone: make(chan struct{})}
	})
	return errors.Join(err, e)
}

func (h *handle) Probe(_ context.Context, token string) (p provider.Probe, err error) {
	err = h.agent(token, func(_ *box, a *agent) {
		if p.State = provider.ProbeAbsent; a != nil && a.state != "forgotten" {
			p.State = a.state
		}
	})
	return p, err
}

func (h *handle) Tail(context.Context, string, int64, bool) (io.ReadCloser, error) {
	return nil, errors.New("has no journal")
}

func (h *handle) Kill(_ context.Context, token string, _ int) error {
	return h.agent(token, func(_ *box, a *agent) {
		if a != nil && a.state == provider.ProbeRunning {
			a.kills++
			a.end(provider.ProbeDead)
		}
	})
}

func (h *handle) Forget(_ context.Context, token string) error {
	return h.agent(token, func(x *box, _ *agent) { x.agents[token] = &agent{state: "forgotten"} })
}

// Journals implements provider.JournalLister.
func (h *handle) Journals(context.Context) (out []provider.JournalInfo, err error) {
	err = h.agent("", func(x *box, _ *agent) {
		for token, a := range x.agents {
			if a.state != "forgotten" {
				out = append(out, provider.JournalInfo{Token: token, Age: time.Minute})
			}
		}
	})
	return out, err
}

// counts are the metrics that a test looks at.
type counts struct {
	mu     sync.Mutex
	reaped map[reaper.Outcome]int
	alarms map[string]int
	states map[store.InstanceState]int
	ages   []time.Duration
}

func (c *counts) Reaped(o reaper.Outcome) { c.add(func() { c.reaped[o]++ }) }
func (c *counts) Alarm(kind string)       { c.add(func() { c.alarms[kind]++ }) }
func (c *counts) Instances(n map[store.InstanceState]int) {
	c.add(func() { c.states = n })
}
func (c *counts) Orphaned(d time.Duration) { c.add(func() { c.ages = append(c.ages, d) }) }
func (c *counts) add(f func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.reaped == nil {
		c.reaped, c.alarms = map[reaper.Outcome]int{}, map[string]int{}
	}
	f()
}

func (c *counts) of(o reaper.Outcome) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.reaped[o]
}

func (c *counts) alarm(kind string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.alarms[kind]
}

// world is a store, a provider and what runs there.
type world struct {
	t     *testing.T
	store store.Set
	b     *backend
	def   *sandbox.Def
	m     *counts

	mu       sync.Mutex
	launches map[string]int // agents started, by run
	failing  error          // of the drives' Setup
	slow     time.Duration  // of the adapter, between two lines
	gone     error          // of Rebuild
}

func newWorld(t *testing.T) *world {
	w := &world{t: t, store: memstore.New(memstore.Options{KeepFor: -1}), b: newBackend("mem"), m: &counts{}, launches: map[string]int{}}
	w.def = w.define("demo", w.b, sandbox.Lifecycle{})
	return w
}

func (w *world) define(id string, p provider.Provider, l sandbox.Lifecycle) *sandbox.Def {
	w.t.Helper()
	def, err := sandbox.Define(sandbox.Definition{ID: id, Provider: p, Lifecycle: l})
	if err != nil {
		w.t.Fatal(err)
	}
	return def
}

func (w *world) config() reaper.Config {
	return reaper.Config{
		Store: w.store, Rebuild: w.rebuild, Definitions: map[string]*sandbox.Def{"demo": w.def},
		Sandbox: sandbox.Deps{NoGuest: true}, Metrics: w.m, Deployment: "here",
	}
}

func (w *world) reaper(change func(*reaper.Config)) *reaper.Reaper {
	w.t.Helper()
	c := w.config()
	if change != nil {
		change(&c)
	}
	r, err := reaper.New(c)
	if err != nil {
		w.t.Fatal(err)
	}
	return r
}

// run runs a reaper until the returned function is called.
func (w *world) run(r *reaper.Reaper) (stop func()) {
	ctx, cancel := context.WithCancel(w.t.Context())
	done := make(chan struct{})
	go func() { defer close(done); _ = r.Run(ctx) }()
	return sync.OnceFunc(func() { cancel(); <-done })
}

func (w *world) once(r *reaper.Reaper) reaper.Result {
	w.t.Helper()
	res, err := r.Once(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	return res
}

func (w *world) rebuild(_ context.Context, rec store.Run) (chat.Request, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.gone != nil {
		return chat.Request{}, w.gone
	}
	return chat.Request{
		Adapter: &robot{w}, Definition: rec.Definition,
		Use: []chat.Middleware{
			chat.Durable(chat.Durability{Runs: w.store.Runs, Log: w.store.Log, Messages: w.store.Messages, Owner: "driver"}),
			chat.Persist(w.store.Messages, nil),
			{Name: "box", Setup: w.setUp},
		},
	}, nil
}

var boxToken = chat.NewToken[*handle]("box", "")

// setUp does what sandbox.With does for a run: it resumes what the run is bound to,
// or makes it and binds it.
func (w *world) setUp(ctx context.Context, r *chat.Run) error {
	w.mu.Lock()
	err := w.failing
	w.mu.Unlock()
	if err != nil {
		return err
	}
	claim, _ := r.Claim()
	key, gen := claim.Sandbox()
	if gen == 0 {
		key, gen = "k-"+r.ThreadID(), w.box(r.ThreadID(), r.ID())
		if err := w.store.Runs.Update(ctx, claim, store.RunPatch{SandboxKey: &key, SandboxGen: &gen}); err != nil {
			return err
		}
	}
	h, err := w.b.Resume(ctx, provider.Ref{ID: boxID(key, gen)})
	if errors.Is(err, provider.ErrNotFound) {
		return &sandbox.LostError{Key: key, Gen: gen, Err: err}
	}
	if err != nil {
		return err
	}
	boxToken.Provide(r, h.(*handle))
	r.OnFinish(func(f *store.Final) {
		f.Instance = &store.Disposition{Key: key, Gen: gen, KeepFor: time.Hour}
	})
	return nil
}

func boxID(key string, gen int64) string { return fmt.Sprintf("%s.%d", key, gen) }

// box makes a sandbox with its record.
func (w *world) box(thread, run string) (gen int64) {
	key := "k-" + thread
	ctx := context.WithoutCancel(w.t.Context())
	rec, err := w.store.Instances.Put(ctx, store.Instance{Key: key, Provider: w.b.name, State: store.InstanceCreating, ThreadID: thread, LatestRunID: run})
	if err != nil {
		w.t.Error(err)
		return 0
	}
	id := boxID(key, rec.Gen)
	_, _ = w.b.Create(ctx, provider.Spec{Key: id, Labels: map[string]string{
		sandbox.LabelKey: key, sandbox.LabelGen: strconv.FormatInt(rec.Gen, 10), sandbox.LabelDeployment: "here"}})
	rec.State = store.InstanceReady
	rec.Ref, _ = json.Marshal(provider.Ref{Provider: w.b.name, ID: id})
	if _, err := w.store.Instances.Put(ctx, rec); err != nil {
		w.t.Error(err)
	}
	return rec.Gen
}

// robot is the adapter of the runs. Its agents say one line each.
type robot struct{ w *world }

func (*robot) Name() string           { return "robot" }
func (*robot) Needs() []chat.AnyToken { return nil }
func (*robot) Journaled() bool        { return true }

func (a *robot) Stream(ctx context.Context, r *chat.Run) iter.Seq2[chat.Item, error] {
	return func(yield func(chat.Item, error) bool) {
		if err := a.stream(ctx, r, yield); err != nil {
			yield(chat.Item{}, err)
		}
	}
}

func (a *robot) stream(ctx context.Context, r *chat.Run, yield func(chat.Item, error) bool) error {
	h, err := boxToken.Need(r)
	if err != nil {
		return err
	}
	rec, err := a.w.store.Runs.Get(context.WithoutCancel(ctx), r.ID())
	if err != nil {
		return err
	}
	token, err := journal.Token(rec, 0)
	if err != nil {
		return err
	}
	claim, _ := r.Claim()
	p, err := h.Probe(ctx, token)
	if err != nil {
		return err
	}
	if p.State == provider.ProbeAbsent && rec.Launch != store.Launched {
		for _, l := range []store.Launch{store.Launching, store.Launched} {
			if err := a.w.store.Runs.Update(ctx, claim, store.RunPatch{Launch: &l}); err != nil {
				return err
			}
			if l == store.Launching {
				if err := h.Launch(ctx, token, provider.Cmd{}, provider.LaunchOptions{}); err != nil {
					return err
				}
				a.w.mu.Lock()
				a.w.launches[r.ID()]++
				a.w.mu.Unlock()
			}
		}
	}
	for i, ev := range []event.Event{
		event.TextMessageStart{MessageID: "m", Role: "assistant"}, event.TextMessageContent{MessageID: "m", Delta: "hello"}, event.TextMessageEnd{MessageID: "m"},
	} {
		time.Sleep(a.w.slow)
		if !yield(chat.Item{Event: ev, Off: int64(10 * (i + 1))}, nil) {
			return nil
		}
	}
	var gone chan struct{}
	if err := h.agent(token, func(_ *box, ag *agent) {
		if ag != nil {
			gone = ag.gone
		}
	}); err != nil {
		return err
	}
	if gone != nil {
		select {
		case <-gone:
		case <-ctx.Done():
		}
		if ctx.Err() != nil {
			cause := context.Cause(ctx)
			if !errors.Is(cause, chat.ErrDetached) && !errors.Is(cause, chat.ErrShutdown) && !errors.Is(cause, store.ErrFenced) {
				return h.Kill(context.WithoutCancel(ctx), token, 9)
			}
			return cause
		}
	}
	if p, err = h.Probe(ctx, token); err != nil {
		return err
	}
	if p.State != provider.ProbeExited {
		return &journal.EndedError{RunID: r.ID(), Why: "its supervisor is gone"}
	}
	r.Exited(store.Exit{Off: 40, Verified: true, OK: true})
	yield(chat.Item{Event: event.RunFinished{}, Off: 40}, nil)
	return nil
}

// seed is a run as a host left it.
type seed struct {
	id, thread string
	kind       store.Kind
	unopened   bool // not even its first events are there
	launch     store.Launch
	agent      provider.ProbeState // empty: none
	boxless    bool                // bound to nothing
	cancel     string
	driven     bool // its host lives
}

// seed records a run whose host has gone: its claim is released.
func (w *world) seed(s seed) store.Run {
	w.t.Helper()
	ctx := w.t.Context()
	check := func(err error) {
		w.t.Helper()
		if err != nil {
			w.t.Fatal(err)
		}
	}
	if s.thread == "" {
		s.thread = "t-" + s.id
	}
	if s.kind == "" {
		s.kind = store.KindSandbox
	}
	rec, _, err := w.store.Runs.Create(ctx, store.NewRun{ID: s.id, Thread: store.Thread{ID: s.thread}, Definition: "demo", Adapter: "robot", Kind: s.kind})
	check(err)
	claim, err := w.store.Runs.Claim(ctx, s.id, store.ClaimOptions{Owner: "host-" + s.id})
	check(err)
	if !s.unopened {
		accepted, err := event.NewCustom(event.NameRunAccepted, nil)
		check(err)
		_, err = w.store.Log.Append(ctx, claim, store.Batch{No: 1, Events: []store.Event{
			{Event: event.RunStarted{RunID: s.id, ThreadID: s.thread}}, {Event: accepted}}})
		check(err)
	}
	if !s.boxless {
		key, gen := "k-"+s.thread, int64(0)
		if i, err := w.store.Instances.Get(ctx, key); err == nil && i.Usable() {
			gen = i.Gen
		} else {
			gen = w.box(s.thread, s.id)
		}
		check(w.store.Runs.Update(ctx, claim, store.RunPatch{SandboxKey: &key, SandboxGen: &gen}))
		if s.agent != "" {
			w.launches[s.id]++
			token, err := journal.Token(rec, 0)
			check(err)
			h := &handle{w.b, boxID(key, gen)}
			check(h.Launch(ctx, token, provider.Cmd{}, provider.LaunchOptions{}))
			check(h.agent(token, func(_ *box, a *agent) {
				if s.agent != provider.ProbeRunning {
					a.end(s.agent)
				}
			}))
		}
	}
	if s.launch != "" {
		check(w.store.Runs.Update(ctx, claim, store.RunPatch{Launch: &s.launch}))
	}
	if s.cancel != "" {
		check(w.store.Runs.RequestCancel(ctx, s.id, s.cancel))
	}
	if !s.driven {
		check(w.store.Runs.Release(ctx, claim))
	}
	return w.get(s.id)
}

func (w *world) get(id string) store.Run {
	w.t.Helper()
	rec, err := w.store.Runs.Get(context.WithoutCancel(w.t.Context()), id)
	if err != nil {
		w.t.Fatal(err)
	}
	return rec
}

// agentOf is the agent of a run; nil where there is none.
func (w *world) agentOf(id string) (a *agent) {
	rec := w.get(id)
	token, err := journal.Token(rec, 0)
	if err != nil {
		w.t.Fatal(err)
	}
	_ = (&handle{w.b, boxID(rec.SandboxKey, rec.SandboxGen)}).agent(token, func(_ *box, x *agent) { a = x })
	return a
}

func (w *world) finishAgent(id string) {
	a := w.agentOf(id)
	w.b.set(func(*backend) { a.end(provider.ProbeExited) })
}

func (w *world) instance(key string) store.Instance {
	w.t.Helper()
	i, err := w.store.Instances.Get(context.WithoutCancel(w.t.Context()), key)
	if err != nil {
		w.t.Fatal(err)
	}
	return i
}

// log checks that the run's log is whole, and returns its last event in a word.
func (w *world) last(id string) string {
	w.t.Helper()
	stored, err := w.store.Log.Snapshot(context.WithoutCancel(w.t.Context()), id)
	if err != nil || len(stored) == 0 {
		w.t.Fatalf("log of %s: %d events, %v", id, len(stored), err)
	}
	var evs []event.Event
	for _, s := range stored {
		evs = append(evs, s.Event)
	}
	if !w.get(id).Active() {
		if err := event.Validate(evs); err != nil {
			w.t.Errorf("log of %s: %v", id, err)
		}
	}
	switch e := evs[len(evs)-1].(type) {
	case event.RunError:
		return "RUN_ERROR " + e.Code
	default:
		return string(e.Type())
	}
}
