package storesql

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/aisandbox-go/aisandbox/store"
)

type instances struct{ *Core }

var _ store.Instances = instances{}

// instanceColumns are read by scanInstance.
const instanceColumns = `key, gen, provider, ref, state, desired, tenant, thread_id, latest_run_id, snapshot_id,
 created_at, last_used_at, snapshot_at, keep_until, last_error, attempts`

func scanInstance(rows Rows) (store.Instance, error) {
	var i store.Instance
	var ref []byte
	var state, desired string
	var created, used, attempts int64
	var snapshot, keep *int64
	err := rows.Scan(&i.Key, &i.Gen, &i.Provider, &ref, &state, &desired, &i.Tenant, &i.ThreadID, &i.LatestRunID, &i.SnapshotID,
		&created, &used, &snapshot, &keep, &i.LastError, &attempts)
	i.State, i.Desired, i.Attempts = store.InstanceState(state), store.Desired(desired), int(attempts)
	i.CreatedAt, i.LastUsedAt, i.SnapshotAt, i.KeepUntil = instant(&created), instant(&used), instant(snapshot), instant(keep)
	if len(ref) > 0 {
		i.Ref = bytes.Clone(ref)
	}
	return i, err
}

// instanceBy reads at most one instance.
func (c *Core) instanceBy(ctx context.Context, tx Tx, text string, args ...any) (i store.Instance, found bool, err error) {
	err = c.all(ctx, tx, `SELECT {instance} FROM sandbox_instances `+text, args, func(rows Rows) error {
		found = true
		i, err = scanInstance(rows)
		return err
	})
	return i, found, err
}

// instance reads and locks a generation.
func (c *Core) instance(ctx context.Context, tx Tx, key string, gen int64) (store.Instance, bool, error) {
	return c.instanceBy(ctx, tx, `WHERE key=$1 AND gen=$2{lock}`, key, gen)
}

func (c instances) Get(ctx context.Context, key string) (store.Instance, error) {
	var out store.Instance
	err := c.read(ctx, func(ctx context.Context, tx Tx) error {
		i, found, err := c.instanceBy(ctx, tx, `WHERE key=$1 ORDER BY gen DESC LIMIT 1`, key)
		if err == nil && !found {
			err = notFound("instance", key)
		}
		out = i
		return err
	})
	if err != nil {
		return store.Instance{}, missing(err, "instance", key)
	}
	return out, nil
}

func (c instances) Put(ctx context.Context, i store.Instance) (store.Instance, error) {
	if err := done(ctx); err != nil {
		return store.Instance{}, err
	}
	if i.Desired == "" {
		i.Desired = store.DesiredReady
	}
	if err := i.Validate(); err != nil {
		return store.Instance{}, err
	}
	i.LastError = prose(i.LastError)
	var out store.Instance
	put := func(ctx context.Context, tx Tx) error {
		i := i
		if i.Gen == 0 {
			if err := c.next(ctx, tx, &i); err != nil {
				return err
			}
		} else {
			row, found, err := c.instance(ctx, tx, i.Key, i.Gen)
			switch {
			case err != nil:
				return err
			case !found:
				return notFound("instance", generation(i.Key, i.Gen))
			case row.Desired == store.DesiredDestroyed && i.Desired != store.DesiredDestroyed:
				return &store.InstanceError{Key: i.Key, Gen: i.Gen, Reason: "is to be destroyed: use the next generation"}
			}
			_, err = c.exec(ctx, tx, `UPDATE sandbox_instances SET provider=$3, ref=$4, state=$5, desired=$6, tenant=$7, thread_id=$8, latest_run_id=$9,
 snapshot_at=CASE WHEN CAST($10 AS text)='' THEN NULL WHEN CAST($10 AS text)<>snapshot_id THEN {now} ELSE snapshot_at END,
 snapshot_id=CAST($10 AS text), keep_until=CAST($11 AS bigint), last_error=$12, last_used_at={now} WHERE key=$1 AND gen=$2`,
				i.Key, i.Gen, i.Provider, blob(i.Ref), string(i.State), string(i.Desired), i.Tenant, i.ThreadID, i.LatestRunID, i.SnapshotID, maybe(i.KeepUntil), i.LastError)
			if err != nil {
				return err
			}
		}
		var err error
		out, _, err = c.instanceBy(ctx, tx, `WHERE key=$1 AND gen=$2`, i.Key, i.Gen)
		return err
	}
	var err error
	if i.Gen == 0 {
		err = c.once(ctx, put)
	} else {
		err = c.write(ctx, put, nil)
	}
	if err != nil {
		return store.Instance{}, err
	}
	return out, nil
}

// next inserts a key's next generation.
func (c *Core) next(ctx context.Context, tx Tx, i *store.Instance) error {
	if err := c.e.Lock(ctx, tx, "instance\x00"+i.Key); err != nil {
		return err
	}
	last, found, err := c.instanceBy(ctx, tx, `WHERE key=$1 ORDER BY gen DESC LIMIT 1`, i.Key)
	if err != nil {
		return err
	}
	if found && !last.State.Gone() && last.Desired != store.DesiredDestroyed {
		return &store.InstanceError{Key: i.Key, Gen: last.Gen, Reason: "is " + string(last.State) + ": there can be no next generation yet"}
	}
	i.Gen = last.Gen + 1
	_, err = c.exec(ctx, tx, `INSERT INTO sandbox_instances(key, gen, provider, ref, state, desired, tenant, thread_id, latest_run_id, snapshot_id,
 created_at, last_used_at, snapshot_at, keep_until, last_error)
 SELECT $1,$2,$3,$4,$5,$6,$7,$8,$9,CAST($10 AS text), n.t, n.t, CASE WHEN CAST($10 AS text)='' THEN NULL ELSE n.t END, CAST($11 AS bigint), $12 FROM (SELECT {now} AS t) n`,
		i.Key, i.Gen, i.Provider, blob(i.Ref), string(i.State), string(i.Desired), i.Tenant, i.ThreadID, i.LatestRunID, i.SnapshotID, maybe(i.KeepUntil), i.LastError)
	return err
}

func (c instances) Retire(ctx context.Context, key string, gen int64) error {
	err := c.write(ctx, func(ctx context.Context, tx Tx) error {
		// The row is locked first: who binds a run locks it too.
		_, found, err := c.instance(ctx, tx, key, gen)
		if err != nil {
			return err
		}
		if !found {
			return notFound("instance", generation(key, gen))
		}
		run, err := c.bound(ctx, tx, key, gen, "")
		if err != nil {
			return err
		}
		if run != "" {
			return &store.InstanceError{Key: key, Gen: gen, Reason: fmt.Sprintf("run %q works in it: cancel it first", run)}
		}
		return c.destroy(ctx, tx, key, gen)
	}, nil)
	return missing(err, "instance", generation(key, gen))
}

func (c *Core) destroy(ctx context.Context, tx Tx, key string, gen int64) error {
	_, err := c.exec(ctx, tx, `UPDATE sandbox_instances SET desired='destroyed' WHERE key=$1 AND gen=$2`, key, gen)
	return err
}

// bound is a running run, other than one, that works in the instance and isn't
// to be ended.
func (c *Core) bound(ctx context.Context, tx Tx, key string, gen int64, except string) (string, error) {
	var id string
	_, err := c.one(ctx, tx, `SELECT run_id FROM runs WHERE sandbox_key=$1 AND sandbox_gen=$2 AND status='running' AND cancel_at IS NULL AND run_id<>$3 LIMIT 1`,
		[]any{key, gen, except}, &id)
	return id, err
}

// dispose is what a run's end does to its sandbox.
func (c *Core) dispose(ctx context.Context, tx Tx, runID string, p store.Disposition) error {
	i, found, err := c.instance(ctx, tx, p.Key, p.Gen)
	if err != nil || !found || i.Desired == store.DesiredDestroyed {
		return err
	}
	if p.Destroy {
		other, err := c.bound(ctx, tx, p.Key, p.Gen, runID)
		if err != nil {
			return err
		}
		if other == "" {
			return c.destroy(ctx, tx, p.Key, p.Gen)
		}
	}
	if p.KeepFor <= 0 {
		return nil
	}
	_, err = c.exec(ctx, tx, `UPDATE sandbox_instances SET keep_until={now}+CAST($3 AS bigint) WHERE key=$1 AND gen=$2`, p.Key, p.Gen, millis(p.KeepFor))
	return err
}

func (c instances) Delete(ctx context.Context, key string, gen int64) error {
	err := c.write(ctx, func(ctx context.Context, tx Tx) error {
		_, err := c.exec(ctx, tx, `DELETE FROM sandbox_instances WHERE key=$1 AND gen=$2`, key, gen)
		return err
	}, nil)
	if errors.Is(err, errText) {
		return nil
	}
	return err
}

func (c instances) List(ctx context.Context, q store.InstanceQuery) ([]store.Instance, string, error) {
	var w where
	if !q.AllTenants {
		w.add("tenant=?", q.Tenant)
	}
	if q.Provider != "" {
		w.add("provider=?", q.Provider)
	}
	if q.ThreadID != "" {
		w.add("thread_id=?", q.ThreadID)
	}
	in(&w, "state", q.State)
	if q.After != "" {
		key, num, ok := strings.Cut(q.After, "\x00") // no key has one
		gen, err := strconv.ParseInt(num, 10, 64)
		if !ok || err != nil {
			return nil, "", badCursor("InstanceQuery")
		}
		w.add("(key, gen) > (CAST(? AS text), CAST(? AS bigint))", key, gen)
	}
	limit := store.PageLimit(q.Limit)
	var out []store.Instance
	err := c.read(ctx, func(ctx context.Context, tx Tx) error {
		out = nil
		return c.all(ctx, tx, `SELECT {instance} FROM sandbox_instances`+w.String()+` ORDER BY key, gen LIMIT `+strconv.Itoa(limit+1), w.args, func(rows Rows) error {
			i, err := scanInstance(rows)
			out = append(out, i)
			return err
		})
	})
	if errors.Is(err, errText) {
		return nil, "", nil
	}
	if err != nil {
		return nil, "", err
	}
	if len(out) <= limit {
		return out, "", nil
	}
	last := out[limit-1]
	return out[:limit], fmt.Sprintf("%s\x00%020d", last.Key, last.Gen), nil
}

func (c instances) Due(ctx context.Context, limit int) ([]store.Instance, error) {
	var out []store.Instance
	err := c.once(ctx, func(ctx context.Context, tx Tx) error {
		var is []store.Instance
		err := c.all(ctx, tx, `SELECT {instance} FROM sandbox_instances WHERE state NOT IN ('destroyed','lost') AND (desired='destroyed' OR keep_until<={now})
 AND next_try_at<={now} ORDER BY next_try_at, key, gen LIMIT $1{skip}`, []any{int64(store.PageLimit(limit))}, func(rows Rows) error {
			i, err := scanInstance(rows)
			i.Attempts++
			is = append(is, i)
			return err
		})
		if err != nil || len(is) == 0 {
			return err
		}
		pairs := make([][2]any, len(is))
		for n, i := range is {
			pairs[n] = [2]any{i.Key, i.Gen}
		}
		_, err = c.exec(ctx, tx, `UPDATE sandbox_instances SET next_try_at={now}+`+backoff("attempts")+`, attempts=attempts+1
 WHERE (key, gen) IN (SELECT x.id, x.e FROM {pairs} x)`, jsonText(pairs))
		out = is
		return err
	})
	if err != nil {
		return nil, err
	}
	return out, nil
}
