// Package memstore keeps everything of package store in memory. It answers as a
// database would, with one exception: what it holds is gone with the process.
//
// It starts no goroutine. Reads wait on a channel, never on a clock.
package memstore

import (
	"context"
	"crypto/rand"
	"slices"
	"sync"
	"time"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/store"
)

// Options bound what the store remembers of runs that have ended. Running runs
// are never forgotten. Forgetting happens when a run is created or ends; a
// forgotten run is as if it had never been, also for its id. A read under way
// goes on to the end.
type Options struct {
	Keep    int           // ended runs; 0: 1024
	KeepFor time.Duration // after the end; 0: 5 min; negative: no limit of time
}

// New returns an empty store. All contracts are offered, and they are one
// transaction domain.
func New(o Options) store.Set {
	return newDB(o).set()
}

func newDB(o Options) *db {
	if o.Keep <= 0 {
		o.Keep = 1024
	}
	if o.KeepFor == 0 {
		o.KeepFor = 5 * time.Minute
	}
	return &db{
		opts:      o,
		runs:      map[string]*run{},
		instances: map[string][]*instance{},
		threads:   map[store.Thread]*thread{},
		leases:    map[string]store.Lease{},
	}
}

func (d *db) set() store.Set {
	return store.Set{
		Runs: runs{d}, Log: eventLog{d}, Instances: instances{d},
		Messages: messages{d}, Interrupts: interrupts{d}, Leases: leases{d},
	}
}

// db is all tables behind one lock: whoever holds it is a transaction.
type db struct {
	opts Options

	mu         sync.Mutex
	runs       map[string]*run
	ended      []*run                 // in the order in which they ended
	instances  map[string][]*instance // by key, generations in order
	threads    map[store.Thread]*thread
	interrupts []*store.Interrupt
	leases     map[string]store.Lease
	leaseEpoch uint64 // of the whole store, so that nothing need be remembered of a free key

	// What the tests take away, to see that the suites notice.
	noEpochCheck, noBatchCheck, noWatermark bool
}

// run is a row, its secret and its events.
type run struct {
	store.Run
	nonce    []byte
	nextReap time.Time
	attempts int

	// events only grows, and an element never changes: a slice of it may be read
	// without the lock.
	events []entry
	// wake is closed and replaced when the row or the events change.
	wake chan struct{}
}

// entry is an event of a log; its number is its place. A long run has millions,
// so what can be reckoned isn't kept.
type entry struct {
	event event.Event
	pos   *store.Pos
	print []byte
	epoch uint64
	at    int64 // unix nanoseconds
}

func (r *run) changed() {
	close(r.wake)
	r.wake = make(chan struct{})
}

// row is the record as a caller gets it.
func (r *run) row() store.Run {
	c := r.Run
	c.Usage = slices.Clone(c.Usage)
	c.LastSeq = int64(len(r.events))
	if c.Error != nil {
		e := *c.Error
		c.Error = &e
	}
	if c.Exit != nil {
		e := *c.Exit
		c.Exit = &e
	}
	if !c.LeaseUntil.IsZero() && c.LeaseUntil.Before(time.Now()) {
		c.Owner = "" // an expired lease is nobody's
	}
	return c
}

// done is the check that every method begins with.
func done(ctx context.Context) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return nil
}

// forget drops ended runs that are too many or too old.
func (d *db) forget() {
	now := time.Now()
	n := 0
	for n < len(d.ended) && (len(d.ended)-n > d.opts.Keep || d.opts.KeepFor > 0 && now.Sub(d.ended[n].ClosedAt) >= d.opts.KeepFor) {
		delete(d.runs, d.ended[n].ID)
		n++
	}
	d.ended = slices.Delete(d.ended, 0, n)
}

// newNonce makes a run's secret.
func newNonce() []byte {
	b := make([]byte, 32)
	_, _ = rand.Read(b) // it never fails
	return b
}

// page cuts the page after a key out of items, which are sorted by key.
func page[T any](items []T, key func(T) string, after string, limit int) (out []T, next string) {
	for _, it := range items {
		if after != "" && key(it) <= after {
			continue
		}
		if len(out) == store.PageLimit(limit) {
			return out, key(out[len(out)-1])
		}
		out = append(out, it)
	}
	return out, ""
}
