package memstore

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/aisandbox-go/aisandbox/store"
)

type runs struct{ *db }

var _ store.Runs = runs{}

func (d runs) Create(ctx context.Context, n store.NewRun) (store.Run, bool, error) {
	if err := done(ctx); err != nil {
		return store.Run{}, false, err
	}
	if err := n.Validate(); err != nil {
		return store.Run{}, false, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.forget()
	if r := d.runs[n.ID]; r != nil {
		return r.row(), false, nil
	}
	now := time.Now()
	if n.Exclusive {
		first, last, count := d.running(n.Thread)
		if count > max(n.Queue, 0) {
			return store.Run{}, false, &store.BusyError{Thread: n.Thread, RunID: first.ID}
		}
		if last != nil && !now.After(last.StartedAt) {
			now = last.StartedAt.Add(1) // clocks are coarse
		}
	}
	r := &run{
		Run: store.Run{
			ID: n.ID, Thread: n.Thread, ParentRunID: n.ParentRunID,
			Definition: n.Definition, Adapter: n.Adapter, Kind: cmp.Or(n.Kind, store.KindChat), Input: slices.Clone(n.Input),
			Status: store.Running, StartedAt: now, LastViewedAt: now,
			Pos: store.NoPos, Launch: store.LaunchNone,
		},
		nonce: newNonce(),
		// Whoever created it is about to claim it.
		nextReap: now.Add(store.DefaultLease),
		wake:     make(chan struct{}),
	}
	d.runs[n.ID] = r
	return r.row(), true, nil
}

// active is the thread's running run that started last.
func (d *db) active(t store.Thread) *run {
	_, last, _ := d.running(t)
	return last
}

// running are the oldest and the newest of the thread's running runs, and how
// many there are.
func (d *db) running(t store.Thread) (first, last *run, count int) {
	for _, r := range d.runs {
		if r.Thread != t || !r.Active() {
			continue
		}
		if count++; first == nil || compareRuns(r, first) < 0 {
			first = r
		}
		if last == nil || compareRuns(last, r) < 0 {
			last = r
		}
	}
	return first, last, count
}

func compareRuns(a, b *run) int {
	return cmp.Or(a.StartedAt.Compare(b.StartedAt), strings.Compare(a.ID, b.ID))
}

func (d runs) Claim(ctx context.Context, runID string, o store.ClaimOptions) (store.Claim, error) {
	if err := done(ctx); err != nil {
		return store.Claim{}, err
	}
	if o.Owner == "" {
		return store.Claim{}, &store.InvalidError{Field: "ClaimOptions.Owner", Reason: "is empty: name the host"}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	r := d.runs[runID]
	now := time.Now()
	refuse := func(why store.ClaimReason, owner string) (store.Claim, error) {
		return store.Claim{}, &store.ClaimError{RunID: runID, Reason: why, Owner: owner}
	}
	switch {
	case r == nil:
		return refuse(store.ClaimUnknown, "")
	case !r.Active():
		return refuse(store.ClaimTerminal, "")
	case !r.LeaseUntil.IsZero() && !r.LeaseUntil.Before(now) && (!o.Force || r.Owner != o.Owner):
		return refuse(store.ClaimHeld, r.Owner)
	case !r.CancelAt.IsZero() && !o.Reaper:
		return refuse(store.ClaimCanceled, "")
	}
	r.Epoch++
	r.Owner, r.LeaseUntil, r.BatchNo = o.Owner, now.Add(cmp.Or(o.TTL, store.DefaultLease)), 0
	return store.NewClaim(store.ClaimData{
		RunID: r.ID, Epoch: r.Epoch, Owner: r.Owner,
		Pos: r.Pos, LastSeq: int64(len(r.events)),
		Launch: r.Launch, SandboxKey: r.SandboxKey, SandboxGen: r.SandboxGen,
		Nonce: slices.Clone(r.nonce),
	}), nil
}

func (d runs) Renew(ctx context.Context, refs []store.ClaimRef, ttl time.Duration) (lost, canceled []string, err error) {
	if err := done(ctx); err != nil {
		return nil, nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, ref := range refs {
		r := d.runs[ref.RunID]
		if r == nil || r.Epoch != ref.Epoch || !r.Active() {
			lost = append(lost, ref.RunID)
			continue
		}
		r.LeaseUntil = time.Now().Add(cmp.Or(ttl, store.DefaultLease))
		if !r.CancelAt.IsZero() {
			canceled = append(canceled, ref.RunID)
		}
	}
	return lost, canceled, nil
}

func (d runs) Release(ctx context.Context, c store.Claim) error {
	if err := done(ctx); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if r := d.runs[c.RunID()]; r != nil && r.Epoch == c.Epoch() && r.Active() {
		r.Owner, r.LeaseUntil = "", time.Time{}
		r.nextReap = time.Now()
		r.changed()
	}
	return nil
}

func (d runs) RequestCancel(ctx context.Context, runID, reason string) error {
	if err := done(ctx); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	r := d.runs[runID]
	if r == nil || !r.Active() {
		return nil
	}
	if r.CancelAt.IsZero() {
		r.CancelAt, r.CancelReason = time.Now(), reason
	}
	r.nextReap = time.Now()
	r.changed()
	return nil
}

func (d runs) WaitCancel(ctx context.Context, runID string) (string, error) {
	for {
		if err := done(ctx); err != nil {
			return "", err
		}
		d.mu.Lock()
		r := d.runs[runID]
		if r == nil {
			d.mu.Unlock()
			return "", &store.NotFoundError{What: "run", ID: runID}
		}
		reason, requested, status, wake := r.CancelReason, !r.CancelAt.IsZero(), r.Status, r.wake
		d.mu.Unlock()
		switch {
		case status != store.Running:
			return "", &store.SealedError{RunID: runID, Status: status}
		case requested:
			return reason, nil
		}
		select {
		case <-wake:
		case <-ctx.Done():
		}
	}
}

func (d runs) Touch(ctx context.Context, runIDs []string) error {
	if err := done(ctx); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, id := range runIDs {
		if r := d.runs[id]; r != nil {
			r.LastViewedAt = time.Now()
		}
	}
	return nil
}

func (d runs) Due(ctx context.Context, _ string, limit int) ([]store.Work, error) {
	if err := done(ctx); err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	now := time.Now()
	var due []*run
	for _, r := range d.runs {
		if r.Active() && !r.nextReap.After(now) && (r.LeaseUntil.IsZero() || r.LeaseUntil.Before(now)) {
			due = append(due, r)
		}
	}
	slices.SortFunc(due, func(a, b *run) int {
		if c := !a.CancelAt.IsZero(); c != !b.CancelAt.IsZero() {
			if c {
				return -1
			}
			return 1
		}
		return cmp.Or(a.nextReap.Compare(b.nextReap), compareRuns(a, b))
	})
	var work []store.Work
	for _, r := range due[:min(len(due), store.PageLimit(limit))] {
		r.nextReap = now.Add(backoff(r.attempts))
		r.attempts++
		work = append(work, store.Work{Run: r.row(), Attempts: r.attempts})
	}
	return work, nil
}

// backoff is how far the n-th try pushes work into the future.
func backoff(n int) time.Duration { return min(5*time.Second<<min(n, 10), time.Minute) }

func (d runs) Get(ctx context.Context, runID string) (store.Run, error) {
	if err := done(ctx); err != nil {
		return store.Run{}, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	r := d.runs[runID]
	if r == nil {
		return store.Run{}, &store.NotFoundError{What: "run", ID: runID}
	}
	return r.row(), nil
}

func (d runs) FindActive(ctx context.Context, t store.Thread) (store.Run, error) {
	if err := done(ctx); err != nil {
		return store.Run{}, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	r := d.active(t)
	if r == nil {
		return store.Run{}, &store.NotFoundError{What: "running run of thread", ID: t.ID}
	}
	return r.row(), nil
}

func (d runs) List(ctx context.Context, q store.Query) ([]store.Run, string, error) {
	if err := done(ctx); err != nil {
		return nil, "", err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	var rs []*run
	for _, r := range d.runs {
		if (q.AllTenants || r.Thread.Tenant == q.Tenant) && (q.ThreadID == "" || r.Thread.ID == q.ThreadID) &&
			(len(q.Status) == 0 || slices.Contains(q.Status, r.Status)) {
			rs = append(rs, r)
		}
	}
	slices.SortFunc(rs, compareRuns)
	rs, next := page(rs, func(r *run) string { return fmt.Sprintf("%020d/%s", r.StartedAt.UnixNano(), r.ID) }, q.After, q.Limit)
	var out []store.Run
	for _, r := range rs {
		out = append(out, r.row())
	}
	return out, next, nil
}

func (d runs) Update(ctx context.Context, c store.Claim, p store.RunPatch) error {
	if err := done(ctx); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	r, err := d.owned(c)
	if err != nil {
		return err
	}
	key, gen := r.SandboxKey, r.SandboxGen
	if p.SandboxKey != nil {
		key = *p.SandboxKey
	}
	if p.SandboxGen != nil {
		gen = *p.SandboxGen
	}
	if i := d.instance(key, gen); i != nil && (key != r.SandboxKey || gen != r.SandboxGen) && i.Desired == store.DesiredDestroyed {
		return &store.InstanceError{Key: key, Gen: gen, Reason: "is to be destroyed: use the next generation"}
	}
	r.SandboxKey, r.SandboxGen = key, gen
	if p.Launch != nil {
		r.Launch = *p.Launch
	}
	if p.JournalHold != nil {
		r.JournalHold = *p.JournalHold
	}
	return nil
}

// owned is the row that a claim may write, or why it may not. The order of the
// reasons is part of the contract.
func (d *db) owned(c store.Claim) (*run, error) {
	r := d.runs[c.RunID()]
	switch {
	case r == nil:
		return nil, &store.NotFoundError{What: "run", ID: c.RunID()}
	case r.Epoch != c.Epoch() && !d.noEpochCheck:
		return nil, &store.FencedError{RunID: r.ID, Held: c.Epoch(), Observed: r.Epoch}
	case !r.Active():
		return r, &store.SealedError{RunID: r.ID, Status: r.Status}
	}
	return r, nil
}
