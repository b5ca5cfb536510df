package reaper

import (
	"context"
	"errors"
	"time"

	"github.com/aisandbox-go/aisandbox/journal"
	"github.com/aisandbox-go/aisandbox/sandbox"
	"github.com/aisandbox-go/aisandbox/store"
)

const (
	// pruneAfter is what a driver has to remove its journal by itself.
	pruneAfter = 2 * time.Minute

	// pruneWithin is how long after the end of a run its sandbox is looked into. A
	// journal that is missed goes with the sandbox.
	pruneWithin = time.Hour

	maxPrune = 64 // sandboxes in one round
)

// prune removes journals that nobody needs any more, of which a crash has kept the
// driver (H12): in sandboxes that are awake, and whose last run ended lately.
func (r *Reaper) prune(ctx context.Context, c *collector, lists []listed, rows map[place]store.Instance) error {
	now, err := r.clock.now(ctx)
	if err != nil {
		return err
	}
	awake := map[string]bool{}
	for _, l := range lists {
		for _, s := range l.all {
			if s.Running {
				awake[s.Ref.Provider+":"+s.Ref.ID] = true
			}
		}
	}
	n := 0
	for _, row := range rows {
		ref, err := sandbox.RecordRef(row)
		if err != nil || !row.Usable() || row.LatestRunID == "" || !awake[ref.Provider+":"+ref.ID] {
			continue
		}
		octx, stop := context.WithTimeout(ctx, opTime)
		rec, err := r.cfg.Store.Runs.Get(octx, row.LatestRunID)
		stop()
		def := r.cfg.Definitions[rec.Definition]
		if err != nil || !rec.Status.Terminal() || rec.Kind != store.KindSandbox || def == nil || def.Provider().Name() != row.Provider {
			continue
		}
		if age := now.Sub(rec.ClosedAt); age < pruneAfter || age > pruneWithin {
			continue
		}
		if n++; n > maxPrune || ctx.Err() != nil {
			return nil
		}
		r.pruneOne(ctx, c, def, row)
	}
	return nil
}

func (r *Reaper) pruneOne(ctx context.Context, c *collector, def *sandbox.Def, row store.Instance) {
	ctx, stop := context.WithTimeoutCause(ctx, probeTime, errors.New("the sandbox does not answer"))
	defer stop()
	box, err := sandbox.OpenRecord(ctx, r.cfg.Sandbox, def, row)
	if err != nil {
		r.log.Debug("look for old journals", "sandbox", row.Key, "error", err)
		return
	}
	defer func() { _ = box.Close() }()
	got, err := journal.Prune(ctx, journal.Of(box.Handle()), r.cfg.Store.Runs, journal.PruneOptions{})
	c.count(func(res *Result) { res.Sandboxes.Journals += len(got.Deleted) })
	if err != nil && !errors.Is(err, errors.ErrUnsupported) {
		r.log.Debug("look for old journals", "sandbox", row.Key, "error", err)
	}
}
