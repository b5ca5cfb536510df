package storesql

import (
	"context"
	"net/url"
	"strconv"
	"strings"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/store"
)

type eventLog struct{ *Core }

var _ store.Log = eventLog{}

// EventRow is an event as it is stored. Pos nil: live.
type EventRow struct {
	Pos   *store.Pos
	Print []byte
	Chunk string
}

// Appending is a batch on its way into a log.
type Appending struct {
	RunID       string
	Epoch       int64
	No          int64
	Rows        []EventRow
	First, Last *store.Pos // of the rows that have one
	Size        int        // bytes, about
}

// AppendSQL is the fence: it gives out numbers only to the newest claim's next
// batch behind the watermark. Arguments: run, epoch, batch number, number of
// events, last position (2), first position (2).
func (c *Core) AppendSQL() string {
	s := `UPDATE runs SET next_seq=next_seq+CAST($4 AS bigint), batch_no=CAST($3 AS bigint), reap_attempts=0,
 pos_off=coalesce(CAST($5 AS bigint),pos_off), pos_idx=coalesce(CAST($6 AS bigint),pos_idx)
 WHERE run_id=$1 AND status='running' AND closed_at IS NULL`
	if !c.m.NoEpoch {
		s += ` AND epoch=$2`
	} else {
		s += ` AND $2>=0`
	}
	if !c.m.NoBatch {
		s += ` AND batch_no=CAST($3 AS bigint)-1`
	}
	if !c.m.NoWatermark {
		return s + ` AND (CAST($7 AS bigint) IS NULL OR (pos_off,pos_idx) < (CAST($7 AS bigint),CAST($8 AS bigint)))`
	}
	return s + ` AND CAST($7 AS bigint) IS NOT DISTINCT FROM CAST($7 AS bigint) AND CAST($8 AS bigint) IS NOT DISTINCT FROM CAST($8 AS bigint)`
}

// Args are the arguments of AppendSQL.
func (a Appending) Args() []any {
	args := []any{a.RunID, a.Epoch, a.No, int64(len(a.Rows)), nil, nil, nil, nil}
	if a.First != nil {
		copy(args[4:], []any{a.Last.Off, int64(a.Last.Idx), a.First.Off, int64(a.First.Idx)})
	}
	return args
}

// prepare encodes a batch. Bad says that it can't be stored whatever the row is;
// [Core.accepts] tells why, after what comes first.
func (c *Core) prepare(cl store.Claim, b store.Batch) (a Appending, bad bool) {
	a = Appending{RunID: cl.RunID(), Epoch: int64(cl.Epoch()), No: int64(b.No), Rows: make([]EventRow, len(b.Events))}
	for i, e := range b.Events {
		if e.Event == nil {
			return a, true
		}
		chunk, err := event.Encode(e.Event)
		if err != nil || !plain(string(chunk)) {
			return a, true
		}
		a.Rows[i] = EventRow{Pos: e.Pos, Print: e.Print, Chunk: string(chunk)}
		a.Size += len(chunk) + len(e.Print) + 64
		if e.Pos == nil {
			continue
		}
		if a.First == nil {
			a.First = e.Pos
		} else if !a.Last.Less(*e.Pos) && !c.m.NoWatermark {
			return a, true
		}
		a.Last = e.Pos
	}
	return a, a.No < 0
}

// repeated says that b is the batch that was committed last, sent again because
// its outcome was unclear.
func (c *Core) repeated(r runRow, b store.Batch) bool {
	return !c.m.NoBatch && b.No != 0 && b.No == r.BatchNo && int64(len(b.Events)) <= r.LastSeq
}

// accepts says why b can't be added to a run that the writer owns.
func (c *Core) accepts(r runRow, b store.Batch) error {
	if b.No != r.BatchNo+1 && !c.m.NoBatch {
		return &store.BatchError{RunID: r.ID, Last: r.BatchNo, No: b.No}
	}
	mark := r.Pos
	for _, e := range b.Events {
		if e.Event == nil {
			return &store.InvalidError{Field: "Batch.Events", Reason: "an event is nil"}
		}
		chunk, err := event.Encode(e.Event)
		if err != nil {
			return &store.InvalidError{Field: "Batch.Events", Reason: err.Error()}
		}
		if !plain(string(chunk)) {
			return &store.InvalidError{Field: "Batch.Events", Reason: "an event is not UTF-8"}
		}
		switch {
		case e.Pos == nil:
		case !mark.Less(*e.Pos) && !c.m.NoWatermark:
			return &store.WatermarkError{RunID: r.ID, Mark: mark, Got: *e.Pos}
		default:
			mark = *e.Pos
		}
	}
	return nil
}

func (c eventLog) Append(ctx context.Context, cl store.Claim, b store.Batch) ([]event.Offset, error) {
	if err := done(ctx); err != nil {
		return nil, err
	}
	if cl.RunID() == "" {
		return nil, notFound("run", "")
	}
	a, bad := c.prepare(cl, b)
	var first int64
	err := settle(func() error {
		if !bad {
			n, err := c.e.Append(ctx, a, func(first int64) {
				c.Hub.appended(a.RunID, first, c.entries(a, b, first), false)
				c.notify(a.RunID, false)
			})
			if first = n; err != nil || n > 0 {
				return err
			}
		}
		// It was refused, which never is a matter of luck: the row says why.
		return c.read(ctx, func(ctx context.Context, tx Tx) error {
			r, err := c.look(ctx, tx, cl)
			if err != nil {
				return err
			}
			if c.repeated(r, b) {
				first = r.LastSeq + 1 - int64(len(b.Events))
				return nil
			}
			if err := c.accepts(r, b); err != nil {
				return err
			}
			return errRaced
		})
	})
	if err != nil {
		return nil, err
	}
	name := c.namer(a.RunID)
	var offs []event.Offset
	for i := range b.Events {
		offs = append(offs, name(first+int64(i)))
	}
	return offs, nil
}

// look is owned without a lock.
func (c *Core) look(ctx context.Context, tx Tx, cl store.Claim) (runRow, error) {
	r, found, err := c.run(ctx, tx, cl.RunID(), ``)
	switch {
	case err != nil:
		return r, err
	case !found:
		return r, notFound("run", cl.RunID())
	case r.Epoch != cl.Epoch() && !c.m.NoEpoch:
		return r, &store.FencedError{RunID: r.ID, Held: cl.Epoch(), Observed: r.Epoch}
	case !r.Active():
		return r, &store.SealedError{RunID: r.ID, Status: r.Status}
	}
	return r, nil
}

// entries are what readers get of a batch.
func (c *Core) entries(a Appending, b store.Batch, first int64) []entry {
	if c.Hub.topic(a.RunID) == nil {
		return make([]entry, 0)
	}
	name := c.namer(a.RunID)
	es := make([]entry, len(b.Events))
	for i, e := range b.Events {
		es[i] = entry{event.Entry{Offset: name(first + int64(i)), Event: e.Event}, len(a.Rows[i].Chunk) + 128}
	}
	return es
}

func (c eventLog) Finish(ctx context.Context, cl store.Claim, f store.Final) (store.Run, error) {
	if err := done(ctx); err != nil {
		return store.Run{}, err
	}
	if err := f.Validate(); err != nil {
		return store.Run{}, err
	}
	if cl.RunID() == "" {
		return store.Run{}, notFound("run", "")
	}
	a, _ := c.prepare(cl, f.Batch)
	var out runRow
	err := c.write(ctx, func(ctx context.Context, tx Tx) error {
		r, err := c.owned(ctx, tx, cl)
		if err != nil {
			if !r.Active() && r.ID != "" && r.Epoch == cl.Epoch() {
				out = r // this claim ended it: an answer was lost
				return nil
			}
			return err
		}
		if err := c.finish(ctx, tx, r, a, f); err != nil {
			return err
		}
		r, _, err = c.run(ctx, tx, r.ID, ``)
		out = r
		return err
	}, func() {
		c.Hub.finished(cl.RunID())
		c.notify(cl.RunID(), true)
	})
	if err != nil {
		return store.Run{}, err
	}
	return out.Run, nil
}

// finish is everything that ends a run, on a row that is locked.
func (c *Core) finish(ctx context.Context, tx Tx, r runRow, a Appending, f store.Final) error {
	fresh := f.Batch.No != 0 && !c.repeated(r, f.Batch)
	pos, next, no := r.Pos, r.LastSeq+1, r.BatchNo
	if fresh {
		if err := c.accepts(r, f.Batch); err != nil {
			return err
		}
		if a.Last != nil {
			pos = *a.Last
		}
		next, no = next+int64(len(a.Rows)), f.Batch.No
	}
	if f.Pos != nil && pos.Less(*f.Pos) {
		pos = *f.Pos
	}
	if f.Status == store.Completed && r.Kind == store.KindSandbox &&
		(f.Exit == nil || !f.Exit.Verified || !f.Exit.OK || pos.Off < f.Exit.Off) {
		return &store.InvalidError{Field: "Final.Status",
			Reason: "completed needs a verified exit that was read up to: a sandbox run without one has failed"}
	}
	if err := c.resolve(ctx, tx, r.Thread, f.Resolved); err != nil {
		return err
	}
	if err := c.putInterrupts(ctx, tx, f.Interrupts); err != nil {
		return err
	}
	if fresh && len(a.Rows) > 0 {
		if err := c.e.Insert(ctx, tx, r.ID, int64(r.Epoch), r.LastSeq+1, a.Rows); err != nil {
			return err
		}
	}
	var fail, usage, exitCode, exitOff any
	var exit store.Exit
	if f.Error != nil {
		fail = jsonText(f.Error)
	}
	if f.Usage != nil {
		usage = jsonText(f.Usage)
	}
	if f.Exit != nil {
		exit = *f.Exit
		exitCode, exitOff = int64(exit.Code), exit.Off
	}
	n, err := c.exec(ctx, tx, `UPDATE runs SET status=CAST($3 AS text), closed_at=n.t, finished_at=CASE WHEN CAST($3 AS text)='interrupted' THEN NULL ELSE n.t END,
 close_reason=$4, error=$5, usage=$6, exit_code=CAST($7 AS bigint), exit_off=CAST($8 AS bigint), sentinel_ok=$9, exit_ok=$10, journal_hold=CASE WHEN $11=1 THEN 1 ELSE journal_hold END,
 next_seq=$12, batch_no=$13, pos_off=$14, pos_idx=$15, owner='', lease_until=NULL, reap_attempts=0
 FROM (SELECT {now} AS t) n WHERE run_id=$1 AND epoch=$2 AND status='running'`,
		r.ID, int64(r.Epoch), string(f.Status), prose(f.CloseReason), fail, usage, exitCode, exitOff, flag(exit.Verified), flag(exit.OK), flag(f.JournalHold),
		next, int64(no), pos.Off, int64(pos.Idx))
	if err != nil {
		return err
	}
	if n != 1 {
		return errRaced // the row is locked, so this can't be
	}
	if f.Messages != nil {
		if err := c.saveThread(ctx, tx, r.Thread, f.Messages); err != nil {
			return err
		}
	}
	if f.Instance != nil {
		return c.dispose(ctx, tx, r.ID, *f.Instance)
	}
	return nil
}

// finished says that a run ended here.
func (h *Hub) finished(runID string) { h.Poke(runID, true) }

// namer names a run's events by their number: SCHEME RUN:SEQ, the id escaped.
func (c *Core) namer(runID string) func(seq int64) event.Offset {
	prefix := c.d.Scheme + url.QueryEscape(runID) + ":"
	return func(seq int64) event.Offset { return event.Offset(prefix + strconv.FormatInt(seq, 10)) }
}

// position is the number of events at or before an offset.
func (c *Core) position(runID string, after event.Offset, s state) (int64, error) {
	fail := func(why store.OffsetReason) (int64, error) {
		return 0, &store.OffsetError{RunID: runID, Offset: after, Reason: why}
	}
	var seq int64
	switch after {
	case event.OnlyNew:
		return s.next - 1, nil
	case event.FromStart, "-1":
	default:
		rest, ok := strings.CutPrefix(string(after), c.d.Scheme)
		id, num, ok2 := strings.Cut(rest, ":")
		n, err := strconv.ParseInt(num, 10, 64)
		if !ok || !ok2 || err != nil || n < 1 || num != strconv.FormatInt(n, 10) {
			return fail(store.OffsetInvalid)
		}
		if id != url.QueryEscape(runID) {
			return fail(store.OffsetRunMismatch)
		}
		if n >= s.next {
			return fail(store.OffsetRewound)
		}
		seq = n
	}
	if s.expired && seq < s.next-1 {
		return fail(store.OffsetExpired)
	}
	return seq, nil
}
