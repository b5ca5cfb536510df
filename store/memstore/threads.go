package memstore

import (
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/store"
)

type thread struct {
	messages []event.Message
	updated  time.Time
}

type messages struct{ *db }

var _ store.Messages = messages{}

func (d messages) Load(ctx context.Context, t store.Thread) ([]event.Message, error) {
	if err := done(ctx); err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if th := d.threads[t]; th != nil {
		return slices.Clone(th.messages), nil
	}
	return nil, nil
}

func (d messages) Save(ctx context.Context, t store.Thread, msgs []event.Message) error {
	if err := done(ctx); err != nil {
		return err
	}
	if t.ID == "" {
		return &store.InvalidError{Field: "Thread.ID", Reason: "is empty"}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.saveThread(t, msgs)
	return nil
}

func (d *db) saveThread(t store.Thread, msgs []event.Message) {
	d.threads[t] = &thread{slices.Clone(msgs), time.Now()}
}

func (d messages) Threads(ctx context.Context, q store.ThreadQuery) ([]store.ThreadInfo, string, error) {
	if err := done(ctx); err != nil {
		return nil, "", err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	key := func(i store.ThreadInfo) string { return i.Thread.ID + "\x00" + i.Thread.Tenant }
	var ts []store.ThreadInfo
	for t := range maps.Keys(d.threads) {
		if q.AllTenants || t.Tenant == q.Tenant {
			ts = append(ts, store.ThreadInfo{Thread: t, Messages: len(d.threads[t].messages), UpdatedAt: d.threads[t].updated})
		}
	}
	slices.SortFunc(ts, func(a, b store.ThreadInfo) int { return strings.Compare(key(a), key(b)) })
	ts, next := page(ts, key, q.After, q.Limit)
	return ts, next, nil
}

type interrupts struct{ *db }

var _ store.Interrupts = interrupts{}

func (d interrupts) Pending(ctx context.Context, t store.Thread) ([]store.Interrupt, error) {
	if err := done(ctx); err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	var out []store.Interrupt
	for _, i := range d.interrupts {
		if i.Thread == t && i.Status == store.InterruptPending {
			c := *i
			c.Payload = slices.Clone(c.Payload)
			out = append(out, c)
		}
	}
	return out, nil
}

func (d interrupts) Put(ctx context.Context, is []store.Interrupt) error {
	if err := done(ctx); err != nil {
		return err
	}
	if err := validInterrupts(is); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.putInterrupts(is)
	return nil
}

func validInterrupts(is []store.Interrupt) error {
	for _, i := range is {
		if i.ID == "" || i.RunID == "" || i.Thread.ID == "" {
			return &store.InvalidError{Field: "Interrupt", Reason: "needs ID, RunID and Thread"}
		}
	}
	return nil
}

func (d *db) putInterrupts(is []store.Interrupt) {
	for _, i := range is {
		if d.interrupt(i.RunID, i.ID) != nil {
			continue
		}
		i.Payload, i.Answer = slices.Clone(i.Payload), nil
		i.Status, i.CreatedAt, i.ResolvedAt = store.InterruptPending, time.Now(), time.Time{}
		d.interrupts = append(d.interrupts, &i)
	}
}

func (d *db) interrupt(runID, id string) *store.Interrupt {
	for _, i := range d.interrupts {
		if i.RunID == runID && i.ID == id {
			return i
		}
	}
	return nil
}

func (d interrupts) Resolve(ctx context.Context, t store.Thread, rs []store.Resolution) error {
	if err := done(ctx); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.checkResolutions(t, rs); err != nil {
		return err
	}
	d.resolve(rs)
	return nil
}

func (d *db) checkResolutions(t store.Thread, rs []store.Resolution) error {
	seen := map[[2]string]bool{}
	for _, r := range rs {
		i := d.interrupt(r.RunID, r.ID)
		k := [2]string{r.RunID, r.ID}
		switch {
		case r.Status != store.InterruptResolved && r.Status != store.InterruptCancelled:
			return &store.InvalidError{Field: "Resolution.Status", Reason: "is \"" + string(r.Status) + "\": use resolved or cancelled"}
		case i == nil || i.Thread != t:
			return &store.NotFoundError{What: "interrupt", ID: r.ID}
		case i.Status != store.InterruptPending || seen[k]:
			return &store.InterruptError{ID: r.ID, Status: i.Status}
		}
		seen[k] = true
	}
	return nil
}

// resolve commits what checkResolutions let pass.
func (d *db) resolve(rs []store.Resolution) {
	for _, r := range rs {
		i := d.interrupt(r.RunID, r.ID)
		i.Status, i.Answer, i.ResolvedAt = r.Status, slices.Clone(r.Answer), time.Now()
	}
}
