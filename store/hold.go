package store

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// Hold waits for a lease and keeps it: it returns a context that ends with
// ErrFenced as its cause when the lease is lost, and a function that gives the lease back. The
// function must be called; it may be called twice, waits until nothing runs in
// the background any more, and returns the lease's error if it was lost.
//
// While somebody else holds the key Hold asks again, after 5 ms at first and
// 250 ms at most, until ctx is done. A ttl of 0 is DefaultLease.
func Hold(ctx context.Context, l Leaser, key, owner string, ttl time.Duration) (held context.Context, release func() error, err error) {
	if ttl <= 0 {
		ttl = DefaultLease
	}
	lease, err := acquire(ctx, l, key, owner, ttl)
	if err != nil {
		return nil, nil, err
	}
	held, cancel := context.WithCancelCause(ctx)
	k := keeper{leases: l, lease: lease, ttl: ttl, stop: make(chan struct{}), done: make(chan struct{})}
	go k.run(held, cancel)
	return held, sync.OnceValue(func() error {
		close(k.stop)
		<-k.done
		cancel(context.Canceled)
		// The caller's context may be done; the lease must be free all the same.
		rctx, stop := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer stop()
		if err := l.Release(rctx, k.lease); err != nil && k.err == nil {
			return fmt.Errorf("store: release lease %q: %w", key, err)
		}
		return k.err
	}), nil
}

func acquire(ctx context.Context, l Leaser, key, owner string, ttl time.Duration) (Lease, error) {
	for wait := 5 * time.Millisecond; ; wait = min(2*wait, 250*time.Millisecond) {
		lease, err := l.Acquire(ctx, key, owner, ttl)
		var h *HeldError
		if !errors.As(err, &h) {
			return lease, err
		}
		t := time.NewTimer(wait)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return Lease{}, fmt.Errorf("%w: %w", context.Cause(ctx), h)
		}
	}
}

// keeper renews one lease until it is told to stop. lease and err belong to its
// goroutine until done is closed.
type keeper struct {
	leases     Leaser
	lease      Lease
	ttl        time.Duration
	err        error
	stop, done chan struct{}
}

func (k *keeper) run(ctx context.Context, cancel context.CancelCauseFunc) {
	defer close(k.done)
	t := time.NewTicker(k.ttl / 3)
	defer t.Stop()
	good := time.Now() // sent at, of the last renewal that succeeded
	for {
		select {
		case <-k.stop:
			return
		case <-ctx.Done():
			// The holder may still be cleaning up under another context: keep the
			// lease until it gives it back.
			ctx = context.WithoutCancel(ctx)
		case <-t.C:
			sent := time.Now()
			rctx, stop := context.WithTimeout(ctx, k.ttl/3)
			lease, err := k.leases.Renew(rctx, k.lease, k.ttl)
			stop()
			switch {
			case err == nil:
				k.lease, good = lease, sent
			case errors.Is(err, ErrFenced), time.Since(good) >= k.ttl:
				// Unreachable for a whole ttl is as good as lost: the lease expired, and
				// somebody else may hold it.
				k.err = err
				if !errors.Is(err, ErrFenced) {
					k.err = fmt.Errorf("%w: lease %q: %w", ErrFenced, k.lease.Key, err)
				}
				cancel(k.err)
				return
			}
		}
	}
}
