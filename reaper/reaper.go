// Package reaper looks after what nobody looks after: runs whose host has gone,
// runs that nobody watches any more, sandboxes that have had their time, and
// records that are old (spec 04 §21.10-§21.12).
//
// A [Reaper] is safe with any number of others over the same store. What they
// share is taken from the store, which gives each thing to one of them and gives
// it out again when that one dies; what they do is done under a claim, or is
// harmless to do twice.
//
// Nothing here compares a host's clock with a time from the store.
package reaper

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	mrand "math/rand/v2"
	"sync"
	"time"

	"github.com/aisandbox-go/aisandbox/chat"
	"github.com/aisandbox-go/aisandbox/sandbox"
	"github.com/aisandbox-go/aisandbox/store"
)

// Adopt says what becomes of a run whose agent is at work and whose driver has
// gone.
type Adopt string

// The choices. Empty is AdoptEager.
const (
	AdoptEager Adopt = "eager" // it is driven on, so that its viewers notice nothing
	AdoptLazy  Adopt = "lazy"  // it is left alone until its agent has ended, or a viewer comes
)

// Config is what a Reaper needs. Store is required; everything else has a default.
type Config struct {
	// Store needs Runs, Log and Leases. Without Instances there are no sandboxes to
	// look after.
	Store store.Set

	// Rebuild makes the request of a recorded run again, on this host, as it was
	// made when the run was started; the reaper sets Attach. An error that wraps
	// store.ErrUnavailable or a done context is for now, any other for good. Nil:
	// no run is driven here, and those that would have to be wait for another host,
	// or for their end.
	Rebuild func(ctx context.Context, rec store.Run) (chat.Request, error)

	// Start starts a rebuilt request; nil is chat.Start. A server that keeps a list
	// of its runs puts them on it here, and refuses with the code "overloaded" or
	// "shutdown" what it has no room for.
	Start func(ctx context.Context, req chat.Request) (*chat.Run, error)

	// Definitions are the kinds of sandbox, by the name that store.Run.Definition
	// holds. Sandboxes of a provider that none of them has are left alone.
	Definitions map[string]*sandbox.Def

	// Sandbox is how sandboxes are attached to: as in the runs' own sandbox.With. Its
	// Instances, Leases, Owner and Logger are set by New.
	Sandbox sandbox.Deps

	// Deployment names this Store; see sandbox.Deps. Empty: sandboxes without a
	// record are not looked for.
	Deployment string

	Owner string        // this host's name; empty: made up
	Lease time.Duration // of claims; 0: store.DefaultLease

	// Look is how often Run asks for runs that wait; each time is up to a fifth more
	// or less. It bounds how long after the end of a lease, a release or a cancel
	// somebody takes the run. 0: 500 ms.
	Look time.Duration

	// Tick is the same for sandboxes, and how often unwatched runs are looked for
	// at most. 0: 5 s.
	Tick time.Duration

	// TTL ends runs that nobody has watched for so long. Every host that reads runs
	// must tell who does (see chat.Presence), or they look unwatched. 0: 30 min;
	// negative: without end.
	TTL time.Duration

	// KeepFor is for how long a sandbox stays after a run that was ended here
	// without a driver, where it is kept; 0 leaves it as it is.
	KeepFor time.Duration

	// Creating is the age from which a sandbox that is still being made, by nobody
	// who is there, is given up. 0: 10 min.
	Creating time.Duration

	// Orphan is the same for a sandbox at a provider that no record names. 0: 10 min.
	Orphan time.Duration

	// Reconcile is how often records and providers are compared, by whichever host
	// comes first. 0: 5 min; negative: never by Run.
	Reconcile time.Duration

	Adopt      Adopt
	NoRelaunch bool // a run whose agent was never started fails, instead of being started

	// MaxDrives is how many runs are driven here at once for their agents to go on;
	// 0: 64. Workers is how many are looked into, or driven to an end that they
	// have come to, at once; 0: 16.
	MaxDrives, Workers int

	// Budget is how long a run whose agent has ended may take without any progress
	// until it is left to the next attempt. 0: 30 s.
	Budget time.Duration

	// Retention says what is forgotten; Retainer is who does it, once a day for all
	// hosts together. Nil: nobody.
	Retention store.Retention
	Retainer  store.Retainer

	Metrics Metrics      // nil: nobody counts
	Logger  *slog.Logger // nil discards
}

// Reaper does what the package says. Its methods may be called concurrently.
type Reaper struct {
	cfg   Config
	log   *slog.Logger
	clock clock
	wake  chan struct{}

	slots   chan struct{} // of drives whose agents go on
	workers chan struct{}

	mu     sync.Mutex
	closed bool
	busy   map[string]bool      // runs that are being looked into
	drives map[string]*chat.Run // runs that are driven here
	seen   map[string]time.Time // sandboxes without a record and without an age

	live sync.WaitGroup // of what Run has begun
}

const (
	opTime    = 10 * time.Second // of one call to the store
	probeTime = 15 * time.Second // to find out what became of an agent
	page      = 64               // runs that are taken at once
	maxSweep  = 4096             // runs, or sandboxes, that one sweep takes
	patience  = 3                // attempts before something that may come back is given up
	alarmAt   = 5                // attempts to destroy a sandbox before somebody is told
)

// New checks cfg and returns a Reaper, which does nothing before Run or Once.
func New(cfg Config) (*Reaper, error) {
	if cfg.Store.Runs == nil || cfg.Store.Log == nil || cfg.Store.Leases == nil {
		return nil, errors.New("reaper: Config.Store: Runs, Log or Leases is missing: set all three, of one store")
	}
	switch cfg.Adopt {
	case "":
		cfg.Adopt = AdoptEager
	case AdoptEager, AdoptLazy:
	default:
		return nil, fmt.Errorf("reaper: Config.Adopt is %q: use %q or %q", cfg.Adopt, AdoptEager, AdoptLazy)
	}
	for name, d := range map[string]time.Duration{
		"Lease": cfg.Lease, "Look": cfg.Look, "Tick": cfg.Tick, "KeepFor": cfg.KeepFor, "Creating": cfg.Creating, "Orphan": cfg.Orphan, "Budget": cfg.Budget,
	} {
		if d < 0 {
			return nil, fmt.Errorf("reaper: Config.%s is negative: use 0 for the default", name)
		}
	}
	if cfg.MaxDrives < 0 || cfg.Workers < 0 {
		return nil, errors.New("reaper: Config.MaxDrives or Workers is negative: use 0 for the default")
	}
	cfg.Owner = cmp.Or(cfg.Owner, "reaper-"+rand.Text())
	cfg.Lease = cmp.Or(cfg.Lease, store.DefaultLease)
	cfg.Look = cmp.Or(cfg.Look, 500*time.Millisecond)
	cfg.Tick = cmp.Or(cfg.Tick, 5*time.Second)
	cfg.TTL = cmp.Or(cfg.TTL, 30*time.Minute)
	cfg.Creating = cmp.Or(cfg.Creating, 10*time.Minute)
	cfg.Orphan = cmp.Or(cfg.Orphan, 10*time.Minute)
	cfg.Reconcile = cmp.Or(cfg.Reconcile, 5*time.Minute)
	cfg.MaxDrives = cmp.Or(cfg.MaxDrives, 64)
	cfg.Workers = cmp.Or(cfg.Workers, 16)
	cfg.Budget = cmp.Or(cfg.Budget, 30*time.Second)
	if cfg.Start == nil {
		cfg.Start = chat.Start
	}
	if cfg.Metrics == nil {
		cfg.Metrics = noMetrics{}
	}
	r := &Reaper{
		cfg: cfg, log: cfg.Logger,
		wake:  make(chan struct{}, 1),
		slots: make(chan struct{}, cfg.MaxDrives), workers: make(chan struct{}, cfg.Workers),
		busy: map[string]bool{}, drives: map[string]*chat.Run{}, seen: map[string]time.Time{},
	}
	if r.log == nil {
		r.log = slog.New(slog.DiscardHandler)
	}
	r.clock = clock{leases: cfg.Store.Leases, key: "reaper/clock/" + rand.Text(), owner: cfg.Owner}
	r.cfg.Sandbox.Instances, r.cfg.Sandbox.Leases = cfg.Store.Instances, cfg.Store.Leases
	r.cfg.Sandbox.Owner, r.cfg.Sandbox.Logger = cfg.Owner, r.log
	return r, nil
}

// Wake makes Run look for runs at once: because one was cancelled, or released, by
// this process. It doesn't block.
func (r *Reaper) Wake() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// Run works until ctx is done, and returns its cause. The runs that it drives are
// then left to other hosts; it returns when they are. It is called once.
func (r *Reaper) Run(ctx context.Context) error {
	var loops sync.WaitGroup
	loops.Go(func() { r.every(ctx, r.cfg.Look, r.wake, r.look) })
	loops.Go(func() { r.every(ctx, r.cfg.Tick, nil, r.expireTurn) })
	if r.cfg.Store.Instances != nil {
		loops.Go(func() { r.every(ctx, r.cfg.Tick, nil, r.clean) })
		if r.cfg.Reconcile > 0 {
			loops.Go(func() { r.every(ctx, r.cfg.Reconcile, nil, r.reconcileTurn) })
		}
	}
	loops.Go(func() { r.every(ctx, retainEvery, nil, r.retainTurn) })
	loops.Wait()
	r.leave()
	return context.Cause(ctx)
}

// leave hands what is driven here to other hosts.
func (r *Reaper) leave() {
	r.mu.Lock()
	r.closed = true
	for _, d := range r.drives {
		d.Detach(chat.ErrShutdown)
	}
	r.mu.Unlock()
	r.live.Wait()
}

// every calls f at once and then again and again, a fifth sooner or later, so that
// hosts which started together drift apart.
func (r *Reaper) every(ctx context.Context, d time.Duration, wake <-chan struct{}, f func(context.Context)) {
	for ctx.Err() == nil {
		f(ctx)
		t := time.NewTimer(d - d/5 + mrand.N(2*d/5+1))
		select {
		case <-t.C:
		case <-wake:
		case <-ctx.Done():
		}
		t.Stop()
	}
}

func (r *Reaper) look(ctx context.Context) {
	c := newCollector(r.cfg.Metrics) // what it gathers is for the metrics alone
	if err := r.sweep(ctx, c, true); err != nil {
		r.complain(ctx, "look for runs that wait", err)
	}
}

// complain logs what kept a loop from doing its work; the next round tries again.
func (r *Reaper) complain(ctx context.Context, what string, err error) {
	if err != nil && ctx.Err() == nil {
		r.log.Warn(what, "error", err)
	}
}

func (r *Reaper) clean(ctx context.Context) {
	r.complain(ctx, "look for sandboxes to destroy", r.janitor(ctx, newCollector(r.cfg.Metrics)))
}

// expireTurn is for one host at a time, which is enough to find unwatched runs.
func (r *Reaper) expireTurn(ctx context.Context) {
	if r.cfg.TTL > 0 && r.turn(ctx, "expire", max(min(r.cfg.TTL/60, 30*time.Second), r.cfg.Tick/2)) {
		r.complain(ctx, "look for runs that nobody watches", r.expire(ctx, newCollector(r.cfg.Metrics)))
	}
}

// turn says whether this host may do what one host at a time does, once in an
// interval. The lease isn't given back: that is what makes it an interval, by the
// store's clock.
func (r *Reaper) turn(ctx context.Context, what string, interval time.Duration) bool {
	ctx, stop := context.WithTimeout(ctx, opTime)
	defer stop()
	_, err := r.cfg.Store.Leases.Acquire(ctx, "reaper/turn/"+what, r.cfg.Owner, interval)
	if err != nil && !errors.Is(err, store.ErrConflict) && ctx.Err() == nil {
		r.log.Warn("whose turn it is", "what", what, "error", err)
	}
	return err == nil
}

// Once does everything once and returns when it is done: for a timer of the
// system instead of Run. Agents at work are left alone. What goes wrong with one
// run or sandbox is in the result; an error says that the store could not be
// asked, or that ctx is done.
func (r *Reaper) Once(ctx context.Context) (Result, error) {
	c := newCollector(r.cfg.Metrics)
	err := r.sweep(ctx, c, false)
	err = errors.Join(err, r.expire(ctx, c))
	if r.cfg.Store.Instances != nil {
		err = errors.Join(err, r.janitor(ctx, c), r.reconcile(ctx, c), r.janitor(ctx, c))
	}
	err = errors.Join(err, r.retain(ctx, c))
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return c.result(), err
}

// clock tells the store's time: a lease says when it ends, and how long it is.
// Between two readings the monotonic clock of this host counts.
type clock struct {
	leases     store.Leaser
	key, owner string

	mu   sync.Mutex
	base time.Time // of the store
	at   time.Time // of this host, when base was asked for
}

const (
	clockLease = time.Minute
	clockStale = 30 * time.Second
)

func (c *clock) now(ctx context.Context) (time.Time, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if since := time.Since(c.at); !c.base.IsZero() && since < clockStale {
		return c.base.Add(since), nil
	}
	ctx, stop := context.WithTimeout(ctx, opTime)
	defer stop()
	asked := time.Now()
	l, err := c.leases.Acquire(ctx, c.key, c.owner, clockLease)
	if err != nil {
		return time.Time{}, fmt.Errorf("reaper: the store's clock: %w", err)
	}
	c.base, c.at = l.Expires.Add(-clockLease), asked
	if err := c.leases.Release(ctx, l); err != nil {
		return time.Time{}, fmt.Errorf("reaper: the store's clock: %w", err)
	}
	return c.base, nil
}
