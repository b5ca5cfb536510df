package store

import (
	"context"
	"time"
)

// Retention says for how long what has ended is kept, counted from its end by the
// store's clock (spec 04 §21.12). Conversations are never deleted.
type Retention struct {
	Events time.Duration // event logs; 0: 30 days; negative: without end
	Runs   time.Duration // run records whose sandbox is gone; 0: 180 days; negative: without end
}

// Defaults returns r with its zero values replaced.
func (r Retention) Defaults() Retention {
	const day = 24 * time.Hour
	if r.Events == 0 {
		r.Events = 30 * day
	}
	if r.Runs == 0 {
		r.Runs = 180 * day
	}
	return r
}

// Retained counts what a pass deleted.
type Retained struct {
	Logs int64 // runs whose events are gone
	Runs int64 // run records
}

// Retainer is a backend that has to be told to forget. A pass works in small
// steps, gives way to writers, and may run in several processes at once or be
// broken off: the next one goes on. A run that is active, or whose sandbox isn't
// known to be gone, keeps its record.
type Retainer interface {
	Retain(ctx context.Context, r Retention) (Retained, error)
}
