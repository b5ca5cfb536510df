package chat

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/aisandbox-go/aisandbox/internal/failpoint"
	"github.com/aisandbox-go/aisandbox/store"
)

// fresh is how old the last renewal may be where something is about to happen
// that the log's fence does not guard (spec 04 §21.7).
const fresh = 5 * time.Second

// KeeperOptions of a [Keeper]. The zero value works.
type KeeperOptions struct {
	Lease  time.Duration // 0: store.DefaultLease; renewed after a third of it
	Logger *slog.Logger  // nil discards
}

// Keeper renews the claims of many runs in one round trip. It needs no closing:
// it works while there are claims. Its methods may be called concurrently.
type Keeper struct {
	runs store.Runs
	ttl  time.Duration
	log  *slog.Logger

	mu   sync.Mutex
	kept map[string]*kept
	work *worker // while there are claims
}

// worker is a goroutine that is started when there is something to do.
type worker struct {
	stop context.CancelFunc
	wake chan struct{}
	done chan struct{}
}

func startWorker(f func(ctx context.Context, wake <-chan struct{})) *worker {
	ctx, stop := context.WithCancel(context.Background())
	w := &worker{stop: stop, wake: make(chan struct{}, 1), done: make(chan struct{})}
	go func() {
		defer close(w.done)
		f(ctx, w.wake)
	}()
	return w
}

// kept is a claim that is renewed.
type kept struct {
	ref   store.ClaimRef
	owner string
	good  time.Time // sent at, of the last renewal that succeeded

	mu       sync.Mutex // held while a function is called
	released bool
	lost     func()
	canceled func()
}

// tell calls f unless the claim was released.
func (e *kept) tell(f func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.released {
		f()
	}
}

// NewKeeper returns a keeper of claims of one store.
func NewKeeper(runs store.Runs, o KeeperOptions) *Keeper {
	k := &Keeper{runs: runs, ttl: cmp.Or(o.Lease, store.DefaultLease), log: o.Logger, kept: map[string]*kept{}}
	if k.log == nil {
		k.log = slog.New(slog.DiscardHandler)
	}
	return k
}

// keep renews a claim, which was asked for at a time, until release is called.
// lost and canceled are called from the keeper's goroutine or that of a Confirm,
// canceled at every renewal, and not after release. They must not block.
func (k *Keeper) keep(c store.Claim, asked time.Time, lost, canceled func()) (release func()) {
	e := &kept{ref: c.Ref(), owner: c.Owner(), good: asked, lost: lost, canceled: canceled}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.kept[e.ref.RunID] = e
	if k.work == nil {
		k.work = startWorker(k.renewAll)
	}
	return sync.OnceFunc(func() {
		e.mu.Lock()
		e.released = true
		e.mu.Unlock()
		k.mu.Lock()
		if k.kept[e.ref.RunID] == e {
			delete(k.kept, e.ref.RunID)
		}
		var last *worker
		if len(k.kept) == 0 && k.work != nil {
			last, k.work = k.work, nil
			last.stop()
		}
		k.mu.Unlock()
		if last != nil {
			<-last.done
		}
	})
}

func (k *Keeper) renewAll(ctx context.Context, _ <-chan struct{}) {
	t := time.NewTicker(k.ttl / 3)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		k.mu.Lock()
		var es []*kept
		for _, e := range k.kept {
			es = append(es, e)
		}
		k.mu.Unlock()
		// The log is the fence: a claim that really is lost shows at the next append,
		// so that a store that can't be reached ends nothing here.
		if err := k.renew(ctx, es); err != nil && ctx.Err() == nil {
			k.log.Warn("renew the claims", "claims", len(es), keyError, err)
		}
	}
}

// renew sends one renewal and tells what it brought.
func (k *Keeper) renew(ctx context.Context, es []*kept) error {
	if len(es) == 0 {
		return nil
	}
	failpoint.Hit(failpoint.Renew, es[0].owner)
	refs := make([]store.ClaimRef, len(es))
	byID := map[string]*kept{}
	for i, e := range es {
		refs[i], byID[e.ref.RunID] = e.ref, e
	}
	ctx, stop := context.WithTimeout(ctx, k.ttl/3)
	defer stop()
	sent := time.Now()
	lost, canceled, err := k.runs.Renew(ctx, refs, k.ttl)
	if err != nil {
		return err
	}
	gone := map[string]bool{}
	for _, id := range lost {
		if e := byID[id]; e != nil {
			gone[id] = true
			e.tell(e.lost)
		}
	}
	k.mu.Lock()
	for _, e := range es {
		if !gone[e.ref.RunID] {
			e.good = sent
		}
	}
	k.mu.Unlock()
	for _, id := range canceled {
		if e := byID[id]; e != nil && !gone[id] {
			e.tell(e.canceled)
		}
	}
	return nil
}

// confirm returns nil if the claim was renewed within the last seconds, or now.
func (k *Keeper) confirm(ctx context.Context, runID string) error {
	k.mu.Lock()
	e := k.kept[runID]
	if e != nil && age(e.good) < min(fresh, k.ttl/3) {
		k.mu.Unlock()
		return nil
	}
	k.mu.Unlock()
	if e == nil {
		return fmt.Errorf("chat: run %q: the claim is not kept any more: %w", runID, store.ErrFenced)
	}
	// The keeper itself may be asleep; this goroutine is not.
	if err := k.renew(ctx, []*kept{e}); err != nil {
		return fmt.Errorf("chat: run %q: the claim can't be confirmed: %w", runID, err)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if age(e.good) >= k.margin() {
		return fmt.Errorf("chat: run %q: %w", runID, store.ErrFenced)
	}
	return nil
}

// margin is the age from which a claim may be somebody else's.
func (k *Keeper) margin() time.Duration { return k.ttl - min(2*time.Second, k.ttl/5) }

// age is the time since t by whichever clock says more: the monotonic one stands
// still while a machine sleeps, and the wall clock may be set. Too much only costs
// a renewal.
func age(t time.Time) time.Duration {
	now := time.Now()
	return max(now.Sub(t), now.Round(0).Sub(t.Round(0)))
}

// Confirm makes sure that this driver still has the run, before something that
// the log can't refuse: starting an agent, destroying a sandbox, calling a tool
// of the host. An error means: don't. It narrows the window in which two hosts
// act, and can't close it (spec 04 §21.7). A run in memory is always its own.
func (r *Run) Confirm(ctx context.Context) error {
	switch {
	case r.durable == nil:
		return nil
	case r.joined:
		return fmt.Errorf("chat: run %q is driven by another host: %w", r.req.RunID, store.ErrFenced)
	}
	if err := context.Cause(r.ctx); errors.Is(err, store.ErrFenced) {
		return err
	}
	return r.keeper.confirm(ctx, r.req.RunID)
}
