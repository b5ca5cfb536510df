package reaper

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/aisandbox-go/aisandbox/internal/failpoint"
	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/sandbox"
	"github.com/aisandbox-go/aisandbox/store"
)

// expire asks for the end of runs that nobody watches and that some host drives.
// Those without a driver are given out by the store.
func (r *Reaper) expire(ctx context.Context, c *collector) error {
	if r.cfg.TTL < 0 {
		return nil
	}
	now, err := r.clock.now(ctx)
	if err != nil {
		return err
	}
	return r.running(ctx, func(rec store.Run) {
		if rec.Owner == "" || !rec.CancelAt.IsZero() || !r.unwatched(rec, now, 1) {
			return
		}
		k := &look{Reaper: r, c: c, rec: rec, want: Expired}
		e, ok := k.expired(ctx)
		if ok {
			e.Outcome = k.want
		}
		e.RunID = rec.ID
		c.run(e)
		r.report(e)
	})
}

// running calls f for each running run.
func (r *Reaper) running(ctx context.Context, f func(store.Run)) error {
	q := store.Query{AllTenants: true, Status: []store.Status{store.Running}, Limit: 200}
	for {
		octx, stop := context.WithTimeout(ctx, opTime)
		recs, next, err := r.cfg.Store.Runs.List(octx, q)
		stop()
		if err != nil {
			return fmt.Errorf("reaper: running runs: %w", err)
		}
		for _, rec := range recs {
			f(rec)
		}
		if q.After = next; next == "" {
			return nil
		}
	}
}

// janitor destroys what is to be destroyed, until the provider confirms it.
func (r *Reaper) janitor(ctx context.Context, c *collector) error {
	for n := 0; n < maxSweep && ctx.Err() == nil; {
		octx, stop := context.WithTimeout(ctx, opTime)
		due, err := r.cfg.Store.Instances.Due(octx, r.cfg.Workers)
		stop()
		if err != nil {
			return fmt.Errorf("reaper: sandboxes that are due: %w", err)
		}
		var jobs sync.WaitGroup
		for _, inst := range due {
			jobs.Go(func() { r.dispose(ctx, c, inst) })
		}
		jobs.Wait()
		if n += len(due); len(due) < r.cfg.Workers {
			return nil
		}
	}
	return nil
}

// dispose destroys one sandbox. That no run works in it is checked in the
// transaction that says that it shall be destroyed; after that no run can be bound
// to it (spec 04 §21.11).
func (r *Reaper) dispose(ctx context.Context, c *collector, inst store.Instance) {
	log := r.log.With("sandbox", inst.Key, "generation", inst.Gen)
	defs := r.owners(ctx, inst)
	if len(defs) == 0 {
		c.count(func(res *Result) { res.Sandboxes.Foreign++ })
		log.Debug("a sandbox waits for a host that has its provider", "provider", inst.Provider)
		return
	}
	octx, stop := context.WithTimeout(ctx, opTime)
	defer stop()
	err := r.cfg.Store.Instances.Retire(octx, inst.Key, inst.Gen)
	var taken *store.InstanceError
	switch {
	case errors.As(err, &taken):
		c.count(func(res *Result) { res.Sandboxes.InUse++ })
		return
	case errors.Is(err, store.ErrNotFound):
		return // somebody else was faster
	case err != nil:
		r.complain(ctx, "retire a sandbox", err)
		return
	}
	failpoint.Hit(failpoint.RetireRecorded, r.cfg.Owner)
	inst.Desired = store.DesiredDestroyed
	for _, def := range defs {
		if err = sandbox.DestroyRecord(ctx, r.cfg.Sandbox, def, inst); err != nil {
			break
		}
	}
	if ctx.Err() != nil && err != nil {
		return
	}
	if err != nil {
		c.count(func(res *Result) { res.Sandboxes.Failed++ })
		log.Warn("a sandbox could not be destroyed; it will be tried again", "attempts", inst.Attempts, "error", err)
		if inst.Attempts >= alarmAt {
			r.cfg.Metrics.Reaped(ReclaimFailed)
			r.cfg.Metrics.Alarm(string(ReclaimFailed))
			c.count(func(res *Result) { res.Outcomes[ReclaimFailed]++ })
			log.Error("a sandbox can't be destroyed", "attempts", inst.Attempts, "error", err)
		}
		inst.State, inst.LastError = store.InstanceDestroying, err.Error()
		r.put(ctx, inst)
		return
	}
	failpoint.Hit(failpoint.DestroyAnswered, r.cfg.Owner)
	c.count(func(res *Result) { res.Sandboxes.Destroyed++ })
	inst.State, inst.LastError, inst.SnapshotID = store.InstanceDestroyed, "", ""
	r.put(ctx, inst)
	log.Info("a sandbox was destroyed")
}

// put writes a record. Where that fails the record is given out again, and what is
// done about it is done again.
func (r *Reaper) put(ctx context.Context, inst store.Instance) bool {
	octx, stop := context.WithTimeout(context.WithoutCancel(ctx), opTime)
	defer stop()
	_, err := r.cfg.Store.Instances.Put(octx, inst)
	if err != nil && !errors.Is(err, store.ErrNotFound) {
		r.log.Warn("the record of a sandbox could not be written", "sandbox", inst.Key, "generation", inst.Gen, "error", err)
	}
	return err == nil
}

// owners are the definitions whose provider may have the sandbox: the one of the
// run that used it last, or else all with the provider's name. None means that
// nothing may be touched.
func (r *Reaper) owners(ctx context.Context, inst store.Instance) []*sandbox.Def {
	if inst.LatestRunID != "" {
		octx, stop := context.WithTimeout(ctx, opTime)
		rec, err := r.cfg.Store.Runs.Get(octx, inst.LatestRunID)
		stop()
		if err == nil {
			if def := r.cfg.Definitions[rec.Definition]; def != nil && def.Provider().Name() == inst.Provider {
				return []*sandbox.Def{def}
			}
		}
	}
	var defs []*sandbox.Def
	for _, name := range slices.Sorted(maps.Keys(r.cfg.Definitions)) {
		if def := r.cfg.Definitions[name]; def != nil && def.Provider().Name() == inst.Provider {
			defs = append(defs, def)
		}
	}
	return defs
}

func (r *Reaper) reconcileTurn(ctx context.Context) {
	if r.turn(ctx, "reconcile", r.cfg.Reconcile*3/4) {
		r.complain(ctx, "compare records and providers", r.reconcile(ctx, newCollector(r.cfg.Metrics)))
	}
}

// place is a sandbox's name in the records.
type place struct {
	key string
	gen int64
}

// records reads all sandboxes that are recorded.
func (r *Reaper) records(ctx context.Context) (map[place]store.Instance, error) {
	out := map[place]store.Instance{}
	q := store.InstanceQuery{AllTenants: true, Limit: 1000}
	for {
		octx, stop := context.WithTimeout(ctx, opTime)
		is, next, err := r.cfg.Store.Instances.List(octx, q)
		stop()
		if err != nil {
			return nil, fmt.Errorf("reaper: records of sandboxes: %w", err)
		}
		for _, i := range is {
			out[place{i.Key, i.Gen}] = i
		}
		if q.After = next; next == "" {
			return out, nil
		}
	}
}

// listed is what a definition's provider said that it has.
type listed struct {
	def *sandbox.Def
	all []provider.Listed
}

// reconcile compares what is recorded with what providers have.
//
// The order of reading matters. A record is written before its sandbox is made, so
// that a sandbox which is listed first and has no record afterwards is nobody's;
// and a record that was there before the list, and still is after it, names what
// must be on the list.
func (r *Reaper) reconcile(ctx context.Context, c *collector) error {
	before, err := r.records(ctx)
	if err != nil {
		return err
	}
	var lists []listed
	silent := map[string]bool{} // providers of which not all is known
	for _, name := range slices.Sorted(maps.Keys(r.cfg.Definitions)) {
		def := r.cfg.Definitions[name]
		if def == nil {
			continue
		}
		l, ok := provider.As[provider.Lister](def.Provider())
		if !ok {
			silent[def.Provider().Name()] = true
			continue
		}
		lctx, stop := context.WithTimeout(ctx, probeTime)
		all, err := l.List(lctx, nil)
		stop()
		if err != nil {
			silent[def.Provider().Name()] = true
			r.complain(ctx, "list sandboxes", err)
			continue
		}
		lists = append(lists, listed{def, all})
	}
	after, err := r.records(ctx)
	if err != nil {
		return err
	}
	r.gauge(after)
	r.orphans(ctx, c, lists, after)
	r.lost(ctx, c, lists, silent, before, after)
	return errors.Join(r.unfinished(ctx, c, after), r.prune(ctx, c, lists, after))
}

func (r *Reaper) gauge(rows map[place]store.Instance) {
	n := map[store.InstanceState]int{}
	for _, i := range rows {
		n[i.State]++
	}
	r.cfg.Metrics.Instances(n)
}

// orphans destroys sandboxes of this deployment that no record names, or whose
// record says that they are gone.
func (r *Reaper) orphans(ctx context.Context, c *collector, lists []listed, rows map[place]store.Instance) {
	if r.cfg.Deployment == "" {
		return
	}
	done := map[string]bool{}
	seen := map[string]time.Time{}
	for _, l := range lists {
		for _, s := range l.all {
			if s.Labels[sandbox.LabelDeployment] != r.cfg.Deployment || done[s.Ref.String()] {
				continue
			}
			done[s.Ref.String()] = true
			at := place{key: s.Labels[sandbox.LabelKey]}
			at.gen, _ = strconv.ParseInt(s.Labels[sandbox.LabelGen], 10, 64)
			if row, ok := rows[at]; ok && isOf(row, s.Ref) || !r.aged(s, seen) {
				continue
			}
			// No run may work in it. Where the record names another sandbox its runs do
			// so there.
			if row, ok := rows[at]; !ok || row.State.Gone() {
				if bound, err := r.bound(ctx); err != nil || bound[at] {
					continue
				}
			}
			err := sandbox.DestroyRef(ctx, r.cfg.Sandbox, l.def, s.Ref)
			if err != nil {
				c.count(func(res *Result) { res.Sandboxes.Failed++ })
				r.log.Warn("a sandbox without a record could not be destroyed", "ref", s.Ref, "error", err)
				continue
			}
			c.count(func(res *Result) { res.Sandboxes.Orphaned++ })
			r.log.Warn("a sandbox without a record was destroyed", "ref", s.Ref)
		}
	}
	r.mu.Lock()
	r.seen = seen
	r.mu.Unlock()
}

// isOf says that a record is that of a sandbox, or may become it. Its labels are not
// enough: a key that lost all its records counts its generations anew.
func isOf(row store.Instance, ref provider.Ref) bool {
	if row.State.Gone() {
		return false
	}
	named, err := sandbox.RecordRef(row)
	return err != nil || named.Provider == ref.Provider && named.ID == ref.ID
}

// aged says that a sandbox is old enough to be nobody's. Its age is the
// provider's word, both of whose times are of one clock only where it is on this
// host; so it is an extra caution and nothing more. One without a time of birth is
// as old as its first sight.
func (r *Reaper) aged(s provider.Listed, seen map[string]time.Time) bool {
	if !s.Created.IsZero() {
		return time.Since(s.Created) >= r.cfg.Orphan
	}
	r.mu.Lock()
	first, ok := r.seen[s.Ref.String()]
	r.mu.Unlock()
	if !ok {
		first = time.Now()
	}
	seen[s.Ref.String()] = first
	return time.Since(first) >= r.cfg.Orphan
}

// bound are the sandboxes in which running runs work.
func (r *Reaper) bound(ctx context.Context) (map[place]bool, error) {
	out := map[place]bool{}
	err := r.running(ctx, func(rec store.Run) { out[place{rec.SandboxKey, rec.SandboxGen}] = true })
	return out, err
}

// lost marks records of sandboxes that their providers no longer know.
func (r *Reaper) lost(ctx context.Context, c *collector, lists []listed, silent map[string]bool, before, after map[place]store.Instance) {
	known := map[string]bool{}
	for _, l := range lists {
		for _, s := range l.all {
			known[s.Ref.Provider+":"+s.Ref.ID] = true
		}
	}
	for at, row := range before {
		now, ok := after[at]
		ref, err := sandbox.RecordRef(row)
		if !ok || err != nil || !row.Usable() || !now.Usable() || string(now.Ref) != string(row.Ref) ||
			silent[row.Provider] || known[ref.Provider+":"+ref.ID] {
			continue
		}
		defs := r.owners(ctx, row)
		if len(defs) == 0 || !r.absent(ctx, defs, ref) {
			continue
		}
		now.State, now.LastError = store.InstanceLost, "the provider no longer knows it"
		if r.put(ctx, now) {
			c.count(func(res *Result) { res.Sandboxes.Lost++ })
			r.log.Warn("a sandbox is gone", "sandbox", row.Key, "generation", row.Gen)
		}
	}
}

// absent asks for one sandbox by name: a list may leave out what was made without
// labels.
func (r *Reaper) absent(ctx context.Context, defs []*sandbox.Def, ref provider.Ref) bool {
	for _, def := range defs {
		rctx, stop := context.WithTimeout(ctx, probeTime)
		h, err := def.Provider().Resume(rctx, ref)
		stop()
		if err == nil {
			_ = h.Close()
			return false
		}
		if !errors.Is(err, provider.ErrNotFound) {
			return false
		}
	}
	return true
}

// unfinished gives up sandboxes whose maker has gone. They are never used.
func (r *Reaper) unfinished(ctx context.Context, c *collector, rows map[place]store.Instance) error {
	now, err := r.clock.now(ctx)
	if err != nil {
		return err
	}
	for _, row := range rows {
		if row.State != store.InstanceCreating || row.Desired == store.DesiredDestroyed || now.Sub(row.LastUsedAt) < r.cfg.Creating {
			continue
		}
		octx, stop := context.WithTimeout(ctx, opTime)
		if r.abandoned(octx, row) {
			err := r.cfg.Store.Instances.Retire(octx, row.Key, row.Gen)
			var taken *store.InstanceError
			switch {
			case err == nil:
				c.count(func(res *Result) { res.Sandboxes.Unfinished++ })
				r.log.Warn("a sandbox was never finished", "sandbox", row.Key, "generation", row.Gen)
			case !errors.As(err, &taken) && !errors.Is(err, store.ErrNotFound):
				r.complain(ctx, "give up a sandbox", err)
			}
		}
		stop()
	}
	return nil
}

// abandoned says that nobody is at work on a sandbox: neither is its key held, nor
// is the run driven for which it was to be.
func (r *Reaper) abandoned(ctx context.Context, row store.Instance) bool {
	l, err := r.cfg.Store.Leases.Acquire(ctx, "sandbox:"+row.Key, r.cfg.Owner, opTime)
	if err != nil {
		return false
	}
	defer func() { _ = r.cfg.Store.Leases.Release(context.WithoutCancel(ctx), l) }()
	if row.LatestRunID == "" {
		return true
	}
	rec, err := r.cfg.Store.Runs.Get(ctx, row.LatestRunID)
	if errors.Is(err, store.ErrNotFound) {
		return true
	}
	return err == nil && (!rec.Active() || rec.Owner == "")
}
