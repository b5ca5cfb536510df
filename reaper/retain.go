package reaper

import (
	"context"
	"fmt"
	"time"
)

// retainEvery is how often what is old is forgotten.
const retainEvery = 24 * time.Hour

func (r *Reaper) retainTurn(ctx context.Context) {
	if r.turn(ctx, "retain", retainEvery*3/4) {
		r.complain(ctx, "forget what is old", r.retain(ctx, newCollector(r.cfg.Metrics)))
	}
}

// retain forgets logs and records of runs that ended long ago, and then records of
// sandboxes that are gone for as long (spec 04 §21.12).
func (r *Reaper) retain(ctx context.Context, c *collector) error {
	if r.cfg.Retainer != nil {
		got, err := r.cfg.Retainer.Retain(ctx, r.cfg.Retention)
		c.count(func(res *Result) { res.Retained.Logs += got.Logs; res.Retained.Runs += got.Runs })
		if err != nil {
			return fmt.Errorf("reaper: forget old runs: %w", err)
		}
	}
	keep := r.cfg.Retention.Defaults().Events
	if r.cfg.Store.Instances == nil || keep < 0 {
		return nil
	}
	now, err := r.clock.now(ctx)
	if err != nil {
		return err
	}
	rows, err := r.records(ctx)
	if err != nil {
		return err
	}
	bound, err := r.bound(ctx)
	if err != nil {
		return err
	}
	for at, row := range rows {
		if !row.State.Gone() || now.Sub(row.LastUsedAt) < keep || bound[at] {
			continue
		}
		octx, stop := context.WithTimeout(ctx, opTime)
		err := r.cfg.Store.Instances.Delete(octx, row.Key, row.Gen)
		stop()
		if err != nil {
			return fmt.Errorf("reaper: forget a sandbox: %w", err)
		}
		c.count(func(res *Result) { res.Sandboxes.Forgotten++ })
	}
	return nil
}
