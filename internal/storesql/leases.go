package storesql

import (
	"cmp"
	"context"
	"errors"
	"time"

	"github.com/aisandbox-go/aisandbox/store"
)

type leases struct{ *Core }

var _ store.Leaser = leases{}

func (c leases) Acquire(ctx context.Context, key, owner string, ttl time.Duration) (store.Lease, error) {
	if err := done(ctx); err != nil {
		return store.Lease{}, err
	}
	if key == "" || owner == "" {
		return store.Lease{}, &store.InvalidError{Field: "Lease", Reason: "needs a key and an owner"}
	}
	var out store.Lease
	err := c.once(ctx, func(ctx context.Context, tx Tx) error {
		if err := c.e.Lock(ctx, tx, "lease\x00"+key); err != nil {
			return err
		}
		var who string
		held, err := c.one(ctx, tx, `SELECT owner FROM leases WHERE key=$1 AND expires>={now}`, []any{key}, &who)
		if err != nil {
			return err
		}
		if held {
			return &store.HeldError{Key: key, Owner: who}
		}
		// The epoch is drawn while the key is locked, so that it grows with each grant.
		var epoch, expires int64
		if _, err := c.one(ctx, tx, c.d.Epoch, nil, &epoch); err != nil {
			return err
		}
		_, err = c.one(ctx, tx, `INSERT INTO leases(key, owner, epoch, expires) VALUES ($1,$2,$3,{now}+CAST($4 AS bigint))
 ON CONFLICT(key) DO UPDATE SET owner=excluded.owner, epoch=excluded.epoch, expires=excluded.expires RETURNING expires`,
			[]any{key, owner, epoch, millis(cmp.Or(ttl, store.DefaultLease))}, &expires)
		out = store.Lease{Key: key, Owner: owner, Epoch: uint64(epoch), Expires: instant(&expires)}
		return err
	})
	if err != nil {
		return store.Lease{}, err
	}
	return out, nil
}

func (c leases) Renew(ctx context.Context, l store.Lease, ttl time.Duration) (store.Lease, error) {
	text := `UPDATE leases SET expires={now}+CAST($3 AS bigint) WHERE key=$1 AND epoch=$2 RETURNING owner, epoch, expires`
	if c.m.NoEpoch {
		text = `UPDATE leases SET expires={now}+CAST($3 AS bigint) WHERE key=$1 AND $2>0 RETURNING owner, epoch, expires`
	}
	var out store.Lease
	err := c.write(ctx, func(ctx context.Context, tx Tx) error {
		x := store.Lease{Key: l.Key}
		var epoch, expires int64
		found, err := c.one(ctx, tx, text, []any{l.Key, int64(l.Epoch), millis(cmp.Or(ttl, store.DefaultLease))}, &x.Owner, &epoch, &expires)
		if err == nil && !found {
			err = &store.LeaseLostError{Key: l.Key, Held: l.Epoch}
		}
		x.Epoch, x.Expires = uint64(epoch), instant(&expires)
		out = x
		return err
	}, nil)
	if err != nil {
		return store.Lease{}, err
	}
	return out, nil
}

func (c leases) Release(ctx context.Context, l store.Lease) error {
	err := c.write(ctx, func(ctx context.Context, tx Tx) error {
		_, err := c.exec(ctx, tx, `DELETE FROM leases WHERE key=$1 AND epoch=$2`, l.Key, int64(l.Epoch))
		return err
	}, nil)
	if errors.Is(err, errText) {
		return nil
	}
	return err
}
