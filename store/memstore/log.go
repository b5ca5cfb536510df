package memstore

import (
	"context"
	"iter"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/store"
)

type eventLog struct{ *db }

var _ store.Log = eventLog{}

func (d eventLog) Append(ctx context.Context, c store.Claim, b store.Batch) ([]event.Offset, error) {
	if err := done(ctx); err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	r, err := d.owned(c)
	if err != nil {
		return nil, err
	}
	if d.repeated(r, b) {
		return offsets(r, len(r.events)-len(b.Events), len(b.Events)), nil
	}
	if err := d.accepts(r, b); err != nil {
		return nil, err
	}
	first := len(r.events)
	d.add(r, b, c.Epoch())
	r.changed()
	return offsets(r, first, len(b.Events)), nil
}

// repeated says that b is the batch that was committed last, sent again because
// its outcome was unclear.
func (d *db) repeated(r *run, b store.Batch) bool {
	return !d.noBatchCheck && b.No != 0 && b.No == r.BatchNo && len(b.Events) <= len(r.events)
}

// accepts says why b can't be added to a run that the writer owns.
func (d *db) accepts(r *run, b store.Batch) error {
	if b.No != r.BatchNo+1 && !d.noBatchCheck {
		return &store.BatchError{RunID: r.ID, Last: r.BatchNo, No: b.No}
	}
	mark := r.Pos
	for _, e := range b.Events {
		switch {
		case e.Event == nil:
			return &store.InvalidError{Field: "Batch.Events", Reason: "an event is nil"}
		case e.Pos == nil:
		case !mark.Less(*e.Pos) && !d.noWatermark:
			return &store.WatermarkError{RunID: r.ID, Mark: mark, Got: *e.Pos}
		default:
			mark = *e.Pos
		}
	}
	return nil
}

func (d *db) add(r *run, b store.Batch, epoch uint64) {
	now := time.Now().UnixNano()
	for _, e := range b.Events {
		x := entry{event: e.Event, print: slices.Clone(e.Print), epoch: epoch, at: now}
		if e.Pos != nil {
			p := *e.Pos
			x.pos, r.Pos = &p, p
		}
		r.events = append(r.events, x)
	}
	r.BatchNo = b.No
	r.attempts = 0
}

func (d eventLog) Finish(ctx context.Context, c store.Claim, f store.Final) (store.Run, error) {
	if err := done(ctx); err != nil {
		return store.Run{}, err
	}
	if err := f.Validate(); err != nil {
		return store.Run{}, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	r, err := d.owned(c)
	if err != nil {
		if r != nil && r.Epoch == c.Epoch() {
			return r.row(), nil // this claim ended it: an answer was lost
		}
		return store.Run{}, err
	}
	fresh := f.Batch.No != 0 && !d.repeated(r, f.Batch)
	pos := r.Pos
	if fresh {
		if err := d.accepts(r, f.Batch); err != nil {
			return store.Run{}, err
		}
		for _, e := range f.Batch.Events {
			if e.Pos != nil {
				pos = *e.Pos
			}
		}
	}
	if f.Pos != nil && pos.Less(*f.Pos) {
		pos = *f.Pos
	}
	if f.Status == store.Completed && r.Kind == store.KindSandbox &&
		(f.Exit == nil || !f.Exit.Verified || !f.Exit.OK || pos.Off < f.Exit.Off) {
		return store.Run{}, &store.InvalidError{Field: "Final.Status",
			Reason: "completed needs a verified exit that was read up to: a sandbox run without one has failed"}
	}
	if err := d.checkResolutions(r.Thread, f.Resolved); err != nil {
		return store.Run{}, err
	}
	if err := validInterrupts(f.Interrupts); err != nil {
		return store.Run{}, err
	}

	// Nothing below can fail: the transaction commits.
	if fresh {
		d.add(r, f.Batch, c.Epoch())
	}
	now := time.Now()
	r.Pos = pos
	r.Status, r.ClosedAt, r.CloseReason = f.Status, now, f.CloseReason
	if f.Status.Terminal() {
		r.FinishedAt = now
	}
	if f.Error != nil {
		e := *f.Error
		r.Error = &e
	}
	r.Usage = slices.Clone(f.Usage)
	if f.Exit != nil {
		e := *f.Exit
		r.Exit = &e
	}
	r.JournalHold = r.JournalHold || f.JournalHold
	r.Owner, r.LeaseUntil = "", time.Time{}
	if f.Messages != nil {
		d.saveThread(r.Thread, f.Messages)
	}
	d.resolve(f.Resolved)
	d.putInterrupts(f.Interrupts)
	if f.Instance != nil {
		d.dispose(r, *f.Instance)
	}
	d.ended = append(d.ended, r)
	r.changed()
	row := r.row()
	d.forget()
	return row, nil
}

func (d eventLog) Read(ctx context.Context, runID string, after event.Offset) iter.Seq2[event.Entry, error] {
	return func(yield func(event.Entry, error) bool) {
		if err := done(ctx); err != nil {
			yield(event.Entry{}, err)
			return
		}
		// The row is looked up once: a run that is forgotten while it is read is
		// read to its end.
		d.mu.Lock()
		r := d.runs[runID]
		n := 0
		if r != nil {
			n = len(r.events)
		}
		d.mu.Unlock()
		if r == nil {
			yield(event.Entry{}, &store.NotFoundError{What: "run", ID: runID})
			return
		}
		cursor, err := position(runID, after, n)
		if err != nil {
			yield(event.Entry{}, err)
			return
		}
		name := namer(runID)
		for {
			d.mu.Lock()
			events, closed, wake := r.events[cursor:len(r.events):len(r.events)], !r.Active(), r.wake
			d.mu.Unlock()
			for i, e := range events {
				if err := done(ctx); err != nil {
					yield(event.Entry{}, err)
					return
				}
				if !yield(event.Entry{Offset: name(cursor + i), Event: e.event}, nil) {
					return
				}
			}
			cursor += len(events)
			if closed {
				return
			}
			select {
			case <-wake:
			case <-ctx.Done():
				yield(event.Entry{}, context.Cause(ctx))
				return
			}
		}
	}
}

func (d eventLog) Snapshot(ctx context.Context, runID string) ([]store.Stored, error) {
	if err := done(ctx); err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	r := d.runs[runID]
	if r == nil {
		return nil, nil
	}
	name := namer(runID)
	var out []store.Stored
	for i, e := range r.events {
		x := store.Stored{
			Seq: int64(i + 1), Offset: name(i), Epoch: e.epoch, Print: slices.Clone(e.print), At: time.Unix(0, e.at), Event: e.event,
		}
		if e.pos != nil {
			p := *e.pos
			x.Pos = &p
		}
		out = append(out, x)
	}
	return out, nil
}

const scheme = "memory:v1:"

// namer names a run's events by their place: memory:v1:RUN:SEQ, the id escaped.
func namer(runID string) func(i int) event.Offset {
	prefix := scheme + url.QueryEscape(runID) + ":"
	return func(i int) event.Offset { return event.Offset(prefix + strconv.Itoa(i+1)) }
}

func offsets(r *run, first, n int) []event.Offset {
	name := namer(r.ID)
	var out []event.Offset
	for i := range n {
		out = append(out, name(first+i))
	}
	return out
}

// position is the number of events at or before an offset.
func position(runID string, after event.Offset, n int) (int, error) {
	switch after {
	case event.FromStart, "-1":
		return 0, nil
	case event.OnlyNew:
		return n, nil
	}
	fail := func(why store.OffsetReason) (int, error) {
		return 0, &store.OffsetError{RunID: runID, Offset: after, Reason: why}
	}
	rest, ok := strings.CutPrefix(string(after), scheme)
	id, num, ok2 := strings.Cut(rest, ":")
	seq, err := strconv.Atoi(num)
	if !ok || !ok2 || err != nil || seq < 1 || num != strconv.Itoa(seq) {
		return fail(store.OffsetInvalid)
	}
	if id != url.QueryEscape(runID) {
		return fail(store.OffsetRunMismatch)
	}
	if seq > n {
		return fail(store.OffsetRewound)
	}
	return seq, nil
}
