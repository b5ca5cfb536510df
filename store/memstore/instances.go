package memstore

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/aisandbox-go/aisandbox/store"
)

type instances struct{ *db }

var _ store.Instances = instances{}

type instance struct {
	store.Instance
	nextTry time.Time
}

func (i *instance) row() store.Instance {
	c := i.Instance
	c.Ref = slices.Clone(c.Ref)
	return c
}

func (d *db) instance(key string, gen int64) *instance {
	for _, i := range d.instances[key] {
		if i.Gen == gen {
			return i
		}
	}
	return nil
}

func (d instances) Get(ctx context.Context, key string) (store.Instance, error) {
	if err := done(ctx); err != nil {
		return store.Instance{}, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	gens := d.instances[key]
	if len(gens) == 0 {
		return store.Instance{}, &store.NotFoundError{What: "instance", ID: key}
	}
	return gens[len(gens)-1].row(), nil
}

func (d instances) Put(ctx context.Context, i store.Instance) (store.Instance, error) {
	if err := done(ctx); err != nil {
		return store.Instance{}, err
	}
	if i.Desired == "" {
		i.Desired = store.DesiredReady
	}
	if err := i.Validate(); err != nil {
		return store.Instance{}, err
	}
	i.Ref = slices.Clone(i.Ref)
	d.mu.Lock()
	defer d.mu.Unlock()
	now := time.Now()
	var row *instance
	if i.Gen == 0 {
		gens := d.instances[i.Key]
		i.Gen = 1
		if len(gens) > 0 {
			last := gens[len(gens)-1]
			if !last.State.Gone() && last.Desired != store.DesiredDestroyed {
				return store.Instance{}, &store.InstanceError{Key: i.Key, Gen: last.Gen,
					Reason: "is " + string(last.State) + ": there can be no next generation yet"}
			}
			i.Gen = last.Gen + 1
		}
		row = &instance{Instance: store.Instance{CreatedAt: now}}
		d.instances[i.Key] = append(gens, row)
	} else {
		row = d.instance(i.Key, i.Gen)
		switch {
		case row == nil:
			return store.Instance{}, &store.NotFoundError{What: "instance", ID: fmt.Sprintf("%s generation %d", i.Key, i.Gen)}
		case row.Desired == store.DesiredDestroyed && i.Desired != store.DesiredDestroyed:
			return store.Instance{}, &store.InstanceError{Key: i.Key, Gen: i.Gen, Reason: "is to be destroyed: use the next generation"}
		}
	}
	i.CreatedAt, i.LastUsedAt, i.Attempts = row.CreatedAt, now, row.Attempts
	switch {
	case i.SnapshotID == "":
		i.SnapshotAt = time.Time{}
	case i.SnapshotID != row.SnapshotID:
		i.SnapshotAt = now
	default:
		i.SnapshotAt = row.SnapshotAt
	}
	row.Instance = i
	return row.row(), nil
}

func (d instances) Retire(ctx context.Context, key string, gen int64) error {
	if err := done(ctx); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	i := d.instance(key, gen)
	if i == nil {
		return &store.NotFoundError{What: "instance", ID: fmt.Sprintf("%s generation %d", key, gen)}
	}
	if r := d.bound(key, gen, nil); r != nil {
		return &store.InstanceError{Key: key, Gen: gen, Reason: fmt.Sprintf("run %q works in it: cancel it first", r.ID)}
	}
	i.Desired = store.DesiredDestroyed
	return nil
}

// bound is a running run, other than one, that works in the instance and isn't
// to be ended.
func (d *db) bound(key string, gen int64, except *run) *run {
	for _, r := range d.runs {
		if r != except && r.Active() && r.CancelAt.IsZero() && r.SandboxKey == key && r.SandboxGen == gen {
			return r
		}
	}
	return nil
}

// dispose is what a run's end does to its sandbox.
func (d *db) dispose(r *run, p store.Disposition) {
	i := d.instance(p.Key, p.Gen)
	if i == nil || i.Desired == store.DesiredDestroyed {
		return
	}
	switch {
	case p.Destroy && d.bound(p.Key, p.Gen, r) == nil:
		i.Desired = store.DesiredDestroyed
	case p.KeepFor > 0:
		i.KeepUntil = time.Now().Add(p.KeepFor)
	}
}

func (d instances) Delete(ctx context.Context, key string, gen int64) error {
	if err := done(ctx); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	gens := slices.DeleteFunc(d.instances[key], func(i *instance) bool { return i.Gen == gen })
	if d.instances[key] = gens; len(gens) == 0 {
		delete(d.instances, key)
	}
	return nil
}

func (d instances) List(ctx context.Context, q store.InstanceQuery) ([]store.Instance, string, error) {
	if err := done(ctx); err != nil {
		return nil, "", err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	var is []store.Instance
	for _, key := range slices.Sorted(maps.Keys(d.instances)) {
		for _, i := range d.instances[key] {
			if (q.AllTenants || i.Tenant == q.Tenant) && (q.Provider == "" || i.Provider == q.Provider) &&
				(q.ThreadID == "" || i.ThreadID == q.ThreadID) && (len(q.State) == 0 || slices.Contains(q.State, i.State)) {
				is = append(is, i.row())
			}
		}
	}
	// A NUL sorts before whatever may follow in a longer key.
	is, next := page(is, func(i store.Instance) string { return fmt.Sprintf("%s\x00%020d", i.Key, i.Gen) }, q.After, q.Limit)
	return is, next, nil
}

func (d instances) Due(ctx context.Context, limit int) ([]store.Instance, error) {
	if err := done(ctx); err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	now := time.Now()
	var due []*instance
	for _, gens := range d.instances {
		for _, i := range gens {
			kept := !i.KeepUntil.IsZero() && !i.KeepUntil.After(now)
			if !i.State.Gone() && (i.Desired == store.DesiredDestroyed || kept) && !i.nextTry.After(now) {
				due = append(due, i)
			}
		}
	}
	slices.SortFunc(due, func(a, b *instance) int { return a.nextTry.Compare(b.nextTry) })
	var out []store.Instance
	for _, i := range due[:min(len(due), store.PageLimit(limit))] {
		i.nextTry = now.Add(backoff(i.Attempts))
		i.Attempts++
		out = append(out, i.row())
	}
	return out, nil
}
