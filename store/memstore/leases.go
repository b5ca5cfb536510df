package memstore

import (
	"cmp"
	"context"
	"time"

	"github.com/aisandbox-go/aisandbox/store"
)

type leases struct{ *db }

var _ store.Leaser = leases{}

func (d leases) Acquire(ctx context.Context, key, owner string, ttl time.Duration) (store.Lease, error) {
	if err := done(ctx); err != nil {
		return store.Lease{}, err
	}
	if key == "" || owner == "" {
		return store.Lease{}, &store.InvalidError{Field: "Lease", Reason: "needs a key and an owner"}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	now := time.Now()
	if l, ok := d.leases[key]; ok && !l.Expires.Before(now) {
		return store.Lease{}, &store.HeldError{Key: key, Owner: l.Owner}
	}
	d.leaseEpoch++
	l := store.Lease{Key: key, Owner: owner, Epoch: d.leaseEpoch, Expires: now.Add(cmp.Or(ttl, store.DefaultLease))}
	d.leases[key] = l
	return l, nil
}

func (d leases) Renew(ctx context.Context, l store.Lease, ttl time.Duration) (store.Lease, error) {
	if err := done(ctx); err != nil {
		return store.Lease{}, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	have, ok := d.leases[l.Key]
	if !ok || have.Epoch != l.Epoch && !d.noEpochCheck {
		return store.Lease{}, &store.LeaseLostError{Key: l.Key, Held: l.Epoch}
	}
	have.Expires = time.Now().Add(cmp.Or(ttl, store.DefaultLease))
	d.leases[l.Key] = have
	return have, nil
}

func (d leases) Release(ctx context.Context, l store.Lease) error {
	if err := done(ctx); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if have, ok := d.leases[l.Key]; ok && have.Epoch == l.Epoch {
		delete(d.leases, l.Key)
	}
	return nil
}
