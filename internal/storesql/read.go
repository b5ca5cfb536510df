package storesql

import (
	"context"
	"fmt"
	"iter"
	"slices"
	"time"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/store"
)

// A page of events: what one query gives a reader at most.
const (
	pageEvents = 512
	pageBytes  = 4 << 20
)

func (c eventLog) Read(ctx context.Context, runID string, after event.Offset) iter.Seq2[event.Entry, error] {
	return func(yield func(event.Entry, error) bool) {
		if err := c.tail(ctx, runID, after, func(e event.Entry) bool { return yield(e, nil) }); err != nil {
			yield(event.Entry{}, err)
		}
	}
}

func (c *Core) tail(ctx context.Context, runID string, after event.Offset, yield func(event.Entry) bool) error {
	if err := done(ctx); err != nil {
		return err
	}
	t, err := c.Hub.join(runID)
	if err != nil {
		return err
	}
	defer c.Hub.leave(t)
	s, err := c.state(ctx, runID)
	if err != nil {
		return err
	}
	have, err := c.position(runID, after, s)
	if err != nil {
		return err
	}
	for {
		es, what, wake := t.step(have)
		switch what {
		case finished:
			return nil
		case fetch:
			if err := c.fetch(ctx, t); err != nil {
				return err
			}
		case wait:
			select {
			case <-wake:
			case <-ctx.Done():
				return context.Cause(ctx)
			case <-c.Hub.end:
				return errClosed()
			}
		case catchUp:
			if es, err = c.page(ctx, runID, have); err != nil {
				return err
			}
		}
		for _, e := range es {
			if err := done(ctx); err != nil {
				return err
			}
			if !yield(e.Entry) {
				return nil
			}
		}
		have += int64(len(es))
	}
}

// fetch brings a topic up to date.
func (c *Core) fetch(ctx context.Context, t *topic) error {
	from, known := t.from()
	// The row before the events, so that an end in between hides none of them.
	s, err := c.state(ctx, t.run)
	var es []entry
	if s.from = from; err == nil && known && s.next > from {
		es, err = c.page(ctx, t.run, from-1)
	}
	t.fetched(s, es, err)
	return err
}

// page reads what comes after a number. It never leaves a gap: where events that
// should be there aren't, the log aged out under the reader.
func (c *Core) page(ctx context.Context, runID string, have int64) ([]entry, error) {
	var es []entry
	err := c.read(ctx, func(ctx context.Context, tx Tx) error {
		es = nil
		size, name := 0, c.namer(runID)
		return c.all(ctx, tx, `SELECT seq, chunk FROM run_events WHERE run_id=$1 AND {part} AND seq>$2 ORDER BY seq LIMIT `+fmt.Sprint(pageEvents),
			[]any{runID, have}, func(r Rows) error {
				var seq int64
				var chunk string
				if err := r.Scan(&seq, &chunk); err != nil {
					return err
				}
				if seq != have+int64(len(es))+1 {
					return &store.OffsetError{RunID: runID, Offset: name(max(have, 1)), Reason: store.OffsetExpired}
				}
				ev, err := event.Decode([]byte(chunk))
				if err != nil {
					return fmt.Errorf("store: run %q: event %d: %w", runID, seq, err)
				}
				es = append(es, entry{event.Entry{Offset: name(seq), Event: ev}, len(chunk) + 128})
				if size += len(chunk); size >= pageBytes {
					return errEnough
				}
				return nil
			})
	})
	if err == nil && len(es) == 0 {
		return nil, &store.OffsetError{RunID: runID, Offset: c.namer(runID)(max(have, 1)), Reason: store.OffsetExpired}
	}
	return es, err
}

func (c eventLog) Snapshot(ctx context.Context, runID string) ([]store.Stored, error) {
	if err := done(ctx); err != nil {
		return nil, err
	}
	if !plain(runID) {
		return nil, nil
	}
	var out []store.Stored
	name := c.namer(runID)
	err := c.read(ctx, func(ctx context.Context, tx Tx) error {
		out = nil
		return c.all(ctx, tx, `SELECT seq, epoch, src_off, src_idx, fp, at, chunk FROM run_events WHERE run_id=$1 AND {part}
 AND NOT EXISTS (SELECT 1 FROM runs r WHERE r.run_id=$1 AND r.events_expired<>0) ORDER BY seq`, []any{runID},
			func(r Rows) error {
				var x store.Stored
				var epoch, at int64
				var off, idx *int64
				var print []byte
				var chunk string
				if err := r.Scan(&x.Seq, &epoch, &off, &idx, &print, &at, &chunk); err != nil {
					return err
				}
				ev, err := event.Decode([]byte(chunk))
				if err != nil {
					return fmt.Errorf("store: run %q: event %d: %w", runID, x.Seq, err)
				}
				x.Offset, x.Epoch, x.At, x.Event = name(x.Seq), uint64(epoch), time.UnixMilli(at), ev
				if off != nil && idx != nil {
					x.Pos = &store.Pos{Off: *off, Idx: int(*idx)}
				}
				if len(print) > 0 {
					x.Print = slices.Clone(print)
				}
				out = append(out, x)
				return nil
			})
	})
	if err != nil {
		return nil, err
	}
	return out, nil
}
