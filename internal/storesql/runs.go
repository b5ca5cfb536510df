package storesql

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/aisandbox-go/aisandbox/store"
)

type runs struct{ *Core }

var _ store.Runs = runs{}

// backoff is how far a try pushes work into the future: 5 s, doubled each time,
// up to a minute.
func backoff(attempts string) string {
	return "CASE WHEN " + attempts + ">=4 THEN 60000 ELSE 5000*(1<<" + attempts + ") END"
}

func (c runs) Create(ctx context.Context, n store.NewRun) (store.Run, bool, error) {
	if err := done(ctx); err != nil {
		return store.Run{}, false, err
	}
	if err := n.Validate(); err != nil {
		return store.Run{}, false, err
	}
	nonce := make([]byte, 32)
	_, _ = rand.Read(nonce) // it never fails
	var out struct {
		runRow
		created bool
	}
	err := settle(func() error {
		return c.write(ctx, func(ctx context.Context, tx Tx) error {
			out.created = false
			after := int64(0) // the run's start comes after this
			if n.Exclusive {
				if err := c.e.Lock(ctx, tx, "thread\x00"+n.Thread.Tenant+"\x00"+n.Thread.ID); err != nil {
					return err
				}
				var found bool
				var err error
				if out.runRow, found, err = c.run(ctx, tx, n.ID, ``); err != nil || found {
					return cmp.Or(err, c.mine(ctx, tx, n.ID, nonce, &out.created))
				}
				var count int64
				var last *int64
				var first string
				_, err = c.one(ctx, tx, `SELECT count(*), max(started_at), coalesce((SELECT run_id FROM runs WHERE tenant=$1 AND thread_id=$2 AND status='running' ORDER BY started_at, run_id LIMIT 1), '')
 FROM runs WHERE tenant=$1 AND thread_id=$2 AND status='running'`, []any{n.Thread.Tenant, n.Thread.ID}, &count, &last, &first)
				if err != nil {
					return err
				}
				if count > int64(max(n.Queue, 0)) {
					return &store.BusyError{Thread: n.Thread, RunID: first}
				}
				if last != nil {
					after = *last + 1 // clocks are coarse
				}
			}
			made, err := c.exec(ctx, tx, `INSERT INTO runs(run_id, thread_id, tenant, parent_run_id, definition, adapter, kind, input, status, started_at, last_viewed_at, next_reap_at)
 SELECT $1,$2,$3,$4,$5,$6,$7,$8,'running', CASE WHEN n.t<CAST($9 AS bigint) THEN CAST($9 AS bigint) ELSE n.t END, n.t, n.t+CAST($10 AS bigint)
 FROM (SELECT {now} AS t) n WHERE true ON CONFLICT(run_id) DO NOTHING`,
				n.ID, n.Thread.ID, n.Thread.Tenant, n.ParentRunID, n.Definition, n.Adapter, string(cmp.Or(n.Kind, store.KindChat)), blob(n.Input),
				after, millis(store.DefaultLease)) // whoever created it is about to claim it
			if err != nil {
				return err
			}
			if made > 0 {
				out.created = true
				if _, err := c.exec(ctx, tx, `INSERT INTO run_secrets(run_id, nonce) VALUES ($1,$2)`, n.ID, nonce); err != nil {
					return err
				}
			}
			var found bool
			if out.runRow, found, err = c.run(ctx, tx, n.ID, ``); err == nil && !found {
				return errRaced
			}
			if err == nil && made == 0 {
				err = c.mine(ctx, tx, n.ID, nonce, &out.created)
			}
			return err
		}, nil)
	})
	if err != nil {
		return store.Run{}, false, err
	}
	return out.Run, out.created, nil
}

// mine recognizes a run that this very call created, by a commit whose answer was
// lost.
func (c *Core) mine(ctx context.Context, tx Tx, runID string, nonce []byte, created *bool) error {
	var have []byte
	_, err := c.one(ctx, tx, `SELECT nonce FROM run_secrets WHERE run_id=$1`, []any{runID}, &have)
	*created = bytes.Equal(have, nonce)
	return err
}

func (c runs) Claim(ctx context.Context, runID string, o store.ClaimOptions) (store.Claim, error) {
	if err := done(ctx); err != nil {
		return store.Claim{}, err
	}
	if o.Owner == "" {
		return store.Claim{}, &store.InvalidError{Field: "ClaimOptions.Owner", Reason: "is empty: name the host"}
	}
	if !plain(o.Owner) {
		return store.Claim{}, errText
	}
	refuse := func(why store.ClaimReason, owner string) error {
		return &store.ClaimError{RunID: runID, Reason: why, Owner: owner}
	}
	if !plain(runID) {
		return store.Claim{}, refuse(store.ClaimUnknown, "")
	}
	var out store.ClaimData
	err := settle(func() error {
		return c.once(ctx, func(ctx context.Context, tx Tx) error {
			d := store.ClaimData{RunID: runID, Owner: o.Owner}
			var epoch, next, idx int64
			var launch string
			found, err := c.one(ctx, tx, `UPDATE runs SET epoch=epoch+1, owner=$2, lease_until={now}+CAST($3 AS bigint), batch_no=0
 WHERE run_id=$1 AND status='running' AND (lease_until IS NULL OR lease_until<{now} OR ($4=1 AND owner=$2)) AND (cancel_at IS NULL OR $5=1)
 RETURNING epoch, next_seq, pos_off, pos_idx, launch, sandbox_key, sandbox_gen, (SELECT nonce FROM run_secrets s WHERE s.run_id=runs.run_id)`,
				[]any{runID, o.Owner, millis(cmp.Or(o.TTL, store.DefaultLease)), flag(o.Force), flag(o.Reaper)},
				&epoch, &next, &d.Pos.Off, &idx, &launch, &d.SandboxKey, &d.SandboxGen, &d.Nonce)
			if err != nil {
				return err
			}
			if found {
				d.Epoch, d.LastSeq, d.Pos.Idx, d.Launch = uint64(epoch), next-1, int(idx), store.Launch(launch)
				out = d
				return nil
			}
			r, found, err := c.run(ctx, tx, runID, ``)
			switch {
			case err != nil:
				return err
			case !found:
				return refuse(store.ClaimUnknown, "")
			case !r.Active():
				return refuse(store.ClaimTerminal, "")
			}
			var held bool
			var owner string
			_, err = c.one(ctx, tx, `SELECT lease_until IS NOT NULL AND lease_until>={now}, owner FROM runs WHERE run_id=$1`, []any{runID}, &held, &owner)
			switch {
			case err != nil:
				return err
			case held && (!o.Force || owner != o.Owner):
				return refuse(store.ClaimHeld, owner)
			case !r.CancelAt.IsZero() && !o.Reaper:
				return refuse(store.ClaimCanceled, "")
			}
			return errRaced // it was free in between
		})
	})
	if err != nil {
		return store.Claim{}, err
	}
	return store.NewClaim(out), nil
}

func (c runs) Renew(ctx context.Context, refs []store.ClaimRef, ttl time.Duration) (lost, canceled []string, err error) {
	if err := done(ctx); err != nil {
		return nil, nil, err
	}
	if len(refs) == 0 {
		return nil, nil, nil
	}
	pairs := [][2]any{}
	for _, r := range refs {
		if plain(r.RunID) {
			pairs = append(pairs, [2]any{r.RunID, r.Epoch})
		}
	}
	type answer struct {
		epoch    uint64
		canceled bool
	}
	var out map[string]answer
	err = c.write(ctx, func(ctx context.Context, tx Tx) error {
		got := map[string]answer{}
		err := c.all(ctx, tx, `WITH mine AS (SELECT r.run_id FROM runs r JOIN {pairs} x ON r.run_id=x.id AND r.epoch=x.e WHERE r.status='running' ORDER BY r.run_id{lock})
 UPDATE runs SET lease_until={now}+CAST($2 AS bigint) WHERE run_id IN (SELECT run_id FROM mine) RETURNING run_id, epoch, cancel_at IS NOT NULL`,
			[]any{jsonText(pairs), millis(cmp.Or(ttl, store.DefaultLease))}, func(r Rows) error {
				var id string
				var a answer
				var epoch int64
				if err := r.Scan(&id, &epoch, &a.canceled); err != nil {
					return err
				}
				a.epoch = uint64(epoch)
				got[id] = a
				return nil
			})
		if err == nil {
			out = got
		}
		return err
	}, nil)
	if err != nil {
		return nil, nil, err
	}
	for _, r := range refs {
		switch a, ok := out[r.RunID]; {
		case !ok || a.epoch != r.Epoch:
			lost = append(lost, r.RunID)
		case a.canceled:
			canceled = append(canceled, r.RunID)
		}
	}
	return lost, canceled, nil
}

func (c runs) Release(ctx context.Context, cl store.Claim) error {
	return c.write(ctx, func(ctx context.Context, tx Tx) error {
		_, err := c.exec(ctx, tx, `UPDATE runs SET owner='', lease_until=NULL, next_reap_at={now} WHERE run_id=$1 AND epoch=$2 AND status='running'`,
			cl.RunID(), int64(cl.Epoch()))
		return err
	}, func() { c.notify(cl.RunID(), false) })
}

func (c runs) RequestCancel(ctx context.Context, runID, reason string) error {
	err := c.write(ctx, func(ctx context.Context, tx Tx) error {
		_, err := c.exec(ctx, tx, `UPDATE runs SET cancel_reason=CASE WHEN cancel_at IS NULL THEN $2 ELSE cancel_reason END,
 cancel_at=coalesce(cancel_at, {now}), next_reap_at={now} WHERE run_id=$1 AND status='running'`, runID, prose(reason))
		return err
	}, func() {
		c.Hub.Poke(runID, true)
		c.notify(runID, true)
	})
	if errors.Is(err, errText) {
		return nil // nobody has such an id
	}
	return err
}

func (c runs) WaitCancel(ctx context.Context, runID string) (string, error) {
	if err := done(ctx); err != nil {
		return "", err
	}
	t, err := c.Hub.join(runID)
	if err != nil {
		return "", err
	}
	defer c.Hub.leave(t)
	for {
		t.mu.Lock()
		control := t.control
		t.mu.Unlock()
		s, err := c.state(ctx, runID)
		switch {
		case err != nil:
			return "", err
		case s.closed:
			return "", &store.SealedError{RunID: runID, Status: s.status}
		case s.canceled:
			return s.reason, nil
		}
		select {
		case <-control:
		case <-ctx.Done():
			return "", context.Cause(ctx)
		case <-c.Hub.end:
			return "", errClosed()
		}
	}
}

// state reads what readers need of a row; no such run is an error.
func (c *Core) state(ctx context.Context, runID string) (state, error) {
	var s state
	err := c.read(ctx, func(ctx context.Context, tx Tx) error {
		var status string
		found, err := c.one(ctx, tx, `SELECT next_seq, closed_at IS NOT NULL, events_expired<>0, cancel_at IS NOT NULL, cancel_reason, status FROM runs WHERE run_id=$1`,
			[]any{runID}, &s.next, &s.closed, &s.expired, &s.canceled, &s.reason, &status)
		if s.status = store.Status(status); err == nil && !found {
			err = notFound("run", runID)
		}
		return err
	})
	return s, missing(err, "run", runID)
}

func (c runs) Touch(ctx context.Context, runIDs []string) error {
	if err := done(ctx); err != nil {
		return err
	}
	ids := []string{}
	for _, id := range runIDs {
		if plain(id) {
			ids = append(ids, id)
		}
	}
	if len(ids) == 0 {
		return nil
	}
	return c.write(ctx, func(ctx context.Context, tx Tx) error {
		_, err := c.exec(ctx, tx, `WITH seen AS (SELECT run_id FROM runs WHERE run_id IN ({ids}) ORDER BY run_id{lock})
 UPDATE runs SET last_viewed_at={now} WHERE run_id IN (SELECT run_id FROM seen)`, jsonText(ids))
		return err
	}, nil)
}

func (c runs) Due(ctx context.Context, _ string, limit int) ([]store.Work, error) {
	var out []store.Work
	err := c.once(ctx, func(ctx context.Context, tx Tx) error {
		var work []store.Work
		ids := []string{}
		err := c.all(ctx, tx, `SELECT {run} FROM runs WHERE status='running' AND next_reap_at<={now} AND (lease_until IS NULL OR lease_until<{now})
 ORDER BY (cancel_at IS NULL), next_reap_at, started_at, run_id LIMIT $1{skip}`, []any{int64(store.PageLimit(limit))}, func(rows Rows) error {
			r, err := scanRun(rows)
			work, ids = append(work, store.Work{Run: r.Run, Attempts: r.attempts + 1}), append(ids, r.ID)
			return err
		})
		if err == nil && len(ids) > 0 {
			_, err = c.exec(ctx, tx, `UPDATE runs SET next_reap_at={now}+`+backoff("reap_attempts")+`, reap_attempts=reap_attempts+1 WHERE run_id IN ({ids})`, jsonText(ids))
		}
		if err == nil {
			out = work
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return out, nil
}

func (c runs) Get(ctx context.Context, runID string) (store.Run, error) {
	var out runRow
	err := c.read(ctx, func(ctx context.Context, tx Tx) error {
		r, found, err := c.run(ctx, tx, runID, ``)
		if err == nil && !found {
			err = notFound("run", runID)
		}
		out = r
		return err
	})
	if err != nil {
		return store.Run{}, missing(err, "run", runID)
	}
	return out.Run, nil
}

func (c runs) FindActive(ctx context.Context, t store.Thread) (store.Run, error) {
	var out []store.Run
	err := c.read(ctx, func(ctx context.Context, tx Tx) error {
		out = nil
		return c.all(ctx, tx, `SELECT {run} FROM runs WHERE tenant=$1 AND thread_id=$2 AND status='running' ORDER BY started_at DESC, run_id DESC LIMIT 1`,
			[]any{t.Tenant, t.ID}, func(rows Rows) error {
				r, err := scanRun(rows)
				out = append(out, r.Run)
				return err
			})
	})
	if err == nil && len(out) == 0 {
		err = notFound("running run of thread", t.ID)
	}
	if err != nil {
		return store.Run{}, missing(err, "running run of thread", t.ID)
	}
	return out[0], nil
}

func (c runs) List(ctx context.Context, q store.Query) ([]store.Run, string, error) {
	var w where
	if !q.AllTenants {
		w.add("tenant=?", q.Tenant)
	}
	if q.ThreadID != "" {
		w.add("thread_id=?", q.ThreadID)
	}
	in(&w, "status", q.Status)
	if q.After != "" {
		at, id, ok := strings.Cut(q.After, "/")
		ms, err := strconv.ParseInt(at, 10, 64)
		if !ok || err != nil {
			return nil, "", badCursor("Query")
		}
		w.add("(started_at, run_id) > (CAST(? AS bigint), CAST(? AS text))", ms, id)
	}
	limit := store.PageLimit(q.Limit)
	var out []store.Run
	err := c.read(ctx, func(ctx context.Context, tx Tx) error {
		out = nil
		return c.all(ctx, tx, `SELECT {run} FROM runs`+w.String()+` ORDER BY started_at, run_id LIMIT `+strconv.Itoa(limit+1), w.args, func(rows Rows) error {
			r, err := scanRun(rows)
			out = append(out, r.Run)
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
	return out[:limit], fmt.Sprintf("%d/%s", last.StartedAt.UnixMilli(), last.ID), nil
}

func (c runs) Update(ctx context.Context, cl store.Claim, p store.RunPatch) error {
	return c.write(ctx, func(ctx context.Context, tx Tx) error {
		r, err := c.owned(ctx, tx, cl)
		if err != nil {
			return err
		}
		key, gen, launch, hold := r.SandboxKey, r.SandboxGen, r.Launch, r.JournalHold
		if p.SandboxKey != nil {
			key = *p.SandboxKey
		}
		if p.SandboxGen != nil {
			gen = *p.SandboxGen
		}
		if p.Launch != nil {
			launch = *p.Launch
		}
		if p.JournalHold != nil {
			hold = *p.JournalHold
		}
		if key != r.SandboxKey || gen != r.SandboxGen {
			i, found, err := c.instance(ctx, tx, key, gen)
			if err != nil {
				return err
			}
			if found && i.Desired == store.DesiredDestroyed {
				return &store.InstanceError{Key: key, Gen: gen, Reason: "is to be destroyed: use the next generation"}
			}
		}
		_, err = c.exec(ctx, tx, `UPDATE runs SET sandbox_key=$2, sandbox_gen=$3, launch=$4, journal_hold=$5 WHERE run_id=$1`,
			cl.RunID(), key, gen, string(launch), flag(hold))
		return err
	}, nil)
}
