package storesql

import (
	"context"

	"github.com/aisandbox-go/aisandbox/store"
)

// How much one step of retention takes, so that writers get in between.
const (
	stepRuns   = 200
	stepEvents = 5000
)

// Retain deletes by age, in steps of one transaction each. A log is marked before
// its first event goes (events_expired=1), so that nobody takes a part of it for
// the whole, and again when the last one has gone (2).
//
// Sweep deletes the events of runs that are marked; nil does it with
// [Core.SweepEvents].
func (c *Core) Retain(ctx context.Context, r store.Retention, sweep func(context.Context) error) (store.Retained, error) {
	if sweep == nil {
		sweep = func(ctx context.Context) error { return c.SweepEvents(ctx, "true") }
	}
	r = r.Defaults()
	var out store.Retained
	events := r.Events
	if r.Runs >= 0 && (events < 0 || r.Runs < events) {
		events = r.Runs // a record takes its log with it
	}
	if events >= 0 {
		n, err := c.steps(ctx, func(ctx context.Context, tx Tx) (int64, error) {
			return c.exec(ctx, tx, `UPDATE runs SET events_expired=1 WHERE run_id IN
 (SELECT run_id FROM runs WHERE events_expired=0 AND closed_at<={now}-CAST($1 AS bigint) ORDER BY closed_at LIMIT CAST($2 AS bigint){skip})`, millis(events), int64(stepRuns))
		})
		if out.Logs = n; err != nil {
			return out, err
		}
		if err := sweep(ctx); err != nil {
			return out, err
		}
	}
	if r.Runs >= 0 {
		n, err := c.steps(ctx, func(ctx context.Context, tx Tx) (int64, error) {
			return c.exec(ctx, tx, `DELETE FROM runs WHERE run_id IN (SELECT r.run_id FROM runs r WHERE r.status IN ('completed','failed','aborted') AND r.events_expired=2
 AND r.closed_at<={now}-CAST($1 AS bigint) AND NOT EXISTS
 (SELECT 1 FROM sandbox_instances s WHERE s.key=r.sandbox_key AND s.gen=r.sandbox_gen AND s.state NOT IN ('destroyed','lost')) LIMIT CAST($2 AS bigint){skip})`,
				millis(r.Runs), int64(stepRuns))
		})
		if out.Runs = n; err != nil {
			return out, err
		}
	}
	return out, c.write(ctx, func(ctx context.Context, tx Tx) error {
		const day = 24 * 60 * 60 * 1000
		_, err := c.exec(ctx, tx, `DELETE FROM leases WHERE expires<{now}-CAST($1 AS bigint)`, int64(day))
		return err
	}, nil)
}

// steps repeats a step until it finds nothing, and adds up.
func (c *Core) steps(ctx context.Context, step func(ctx context.Context, tx Tx) (int64, error)) (int64, error) {
	var sum int64
	for {
		var n int64
		err := c.write(ctx, func(ctx context.Context, tx Tx) (err error) {
			n, err = step(ctx, tx)
			return err
		}, nil)
		if err != nil {
			return sum, err
		}
		if n == 0 {
			return sum, nil
		}
		sum += n
	}
}

// SweepEvents deletes the events of marked runs that meet a condition.
func (c *Core) SweepEvents(ctx context.Context, condition string) error {
	_, err := c.steps(ctx, func(ctx context.Context, tx Tx) (int64, error) {
		var id string
		found, err := c.one(ctx, tx, `SELECT run_id FROM runs WHERE events_expired=1 AND `+condition+` ORDER BY closed_at LIMIT 1{skip}`, nil, &id)
		if err != nil || !found {
			return 0, err
		}
		n, err := c.exec(ctx, tx, `DELETE FROM run_events WHERE run_id=$1 AND {part} AND seq<=coalesce((SELECT min(seq) FROM run_events WHERE run_id=$1 AND {part}),0)+CAST($2 AS bigint)`,
			id, int64(stepEvents-1))
		if err == nil && n < stepEvents {
			_, err = c.exec(ctx, tx, `UPDATE runs SET events_expired=2 WHERE run_id=$1`, id)
		}
		return 1, err
	})
	return err
}
