package storesql

import (
	"context"
	"slices"
	"sync"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/store"
)

// What a topic keeps in memory for the readers that are up to date.
const (
	ringEvents = 512
	ringBytes  = 1 << 20
)

// Hub wakes the readers of this process (spec 04 §21.5). A run that is read here
// has a topic: the end of its log, shared by all its readers, so that many of
// them cost one query. What is appended here goes into it directly; what other
// processes append makes it stale, and one reader fetches for all.
//
// It has no goroutine.
type Hub struct {
	mu     sync.Mutex
	topics map[string]*topic
	closed bool
	end    chan struct{}

	// Started gets a value when the first topic appears; a backend that has to
	// look for changes begins then.
	Started chan struct{}
}

func newHub() *Hub {
	return &Hub{topics: map[string]*topic{}, end: make(chan struct{}), Started: make(chan struct{}, 1)}
}

// entry is an event of a log and what it weighs.
type entry struct {
	event.Entry
	size int
}

type topic struct {
	run  string
	refs int // guarded by Hub.mu

	mu       sync.Mutex
	known    bool  // first means something
	first    int64 // number of entries[0]
	entries  []entry
	bytes    int
	closed   bool // the log ends with entries
	stale    bool // there may be more in the database
	fetching bool
	canceled bool // a sweep saw it
	wake     chan struct{}
	control  chan struct{}
}

func (t *topic) next() int64 { return t.first + int64(len(t.entries)) }

func (t *topic) wakeUp() {
	close(t.wake)
	t.wake = make(chan struct{})
}

func (t *topic) wakeControl() {
	close(t.control)
	t.control = make(chan struct{})
}

func errClosed() error { return &store.UnavailableError{What: "the store is closed"} }

// join returns the run's topic; leave must follow.
func (h *Hub) join(runID string) (*topic, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return nil, errClosed()
	}
	t := h.topics[runID]
	if t == nil {
		t = &topic{run: runID, wake: make(chan struct{}), control: make(chan struct{})}
		h.topics[runID] = t
		if len(h.topics) == 1 {
			select {
			case h.Started <- struct{}{}:
			default:
			}
		}
	}
	t.refs++
	return t, nil
}

func (h *Hub) leave(t *topic) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if t.refs--; t.refs == 0 {
		delete(h.topics, t.run)
	}
}

func (h *Hub) topic(runID string) *topic {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.topics[runID]
}

// Active says that somebody reads or waits here.
func (h *Hub) Active() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.topics) > 0
}

// Close ends every read and wait.
func (h *Hub) Close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.closed {
		h.closed = true
		close(h.end)
	}
}

// appended takes what was committed here. End says that the log ended with it.
func (h *Hub) appended(runID string, first int64, es []entry, end bool) {
	t := h.topic(runID)
	if t == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	switch next := t.next(); {
	case !t.known || first > next:
		t.stale = true
	default:
		last := first + int64(len(es))
		if last > next {
			t.push(es[next-first:])
		}
		if end && last == t.next() {
			t.closed = true
		} else if end {
			t.stale = true
		}
	}
	t.wakeUp()
	if end {
		t.wakeControl()
	}
}

// push adds to the end. Readers hold parts of the old slice, so it only grows or
// is replaced.
func (t *topic) push(es []entry) {
	for _, e := range es {
		t.bytes += e.size
	}
	t.entries = append(t.entries, es...)
	if len(t.entries) <= 2*ringEvents && t.bytes <= 2*ringBytes {
		return
	}
	drop, bytes := 0, t.bytes
	for drop < len(t.entries) && (len(t.entries)-drop > ringEvents || bytes > ringBytes) {
		bytes -= t.entries[drop].size
		drop++
	}
	t.entries, t.first, t.bytes = slices.Clone(t.entries[drop:]), t.first+int64(drop), bytes
}

// Poke says that a run may have changed elsewhere.
func (h *Hub) Poke(runID string, control bool) {
	if t := h.topic(runID); t != nil {
		t.poke(control)
	}
}

func (t *topic) poke(control bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.stale = true
	t.wakeUp()
	if control {
		t.wakeControl()
	}
}

// step is what a reader does next.
type step int

const (
	deliver step = iota // what next returned
	catchUp             // read a page: it is too far behind for memory
	fetch               // for all readers of the run; fetched must follow
	wait
	finished
)

// step tells a reader that has everything up to a number what to do.
func (t *topic) step(have int64) ([]entry, step, <-chan struct{}) {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.known && have+1 < t.first:
		return nil, catchUp, nil
	case t.known && have+1 < t.next():
		n := len(t.entries)
		return t.entries[have+1-t.first : n : n], deliver, nil
	case !t.known || t.stale:
		if t.fetching {
			return nil, wait, t.wake
		}
		t.fetching, t.stale = true, false
		return nil, fetch, nil
	case t.closed:
		return nil, finished, nil
	}
	return nil, wait, t.wake
}

// fetched is what a reader that was told to fetch found: the row, read before the
// events, or why it couldn't.
func (t *topic) fetched(s state, es []entry, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.fetching = false
	if err != nil {
		t.stale = true // the next one tries
		t.wakeUp()
		return
	}
	if !t.known {
		t.known, t.first = true, s.next
	} else if n := len(es); n > 0 {
		first := s.from
		if skip := t.next() - first; skip < int64(n) && skip >= 0 {
			t.push(es[skip:])
		}
	}
	switch {
	case t.next() < s.next:
		t.stale = true // more than one page
	case s.closed && t.next() == s.next:
		t.closed = true
	}
	t.wakeUp()
}

// from is where a fetch begins; unknown: only the row is wanted.
func (t *topic) from() (from int64, known bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.next(), t.known
}

// state is what a reader needs to know of a row.
type state struct {
	next     int64 // number of the next event
	closed   bool
	expired  bool
	canceled bool
	reason   string
	status   store.Status
	from     int64 // number of the first event that was fetched
}

// Sweep compares every run that is read here with its row, in one query for each
// thousand. It makes up for everything that a notification should have told.
func (c *Core) Sweep(ctx context.Context) error {
	c.Hub.mu.Lock()
	topics := make(map[string]*topic, len(c.Hub.topics))
	var ids []string
	for id, t := range c.Hub.topics {
		topics[id] = t
		if plain(id) {
			ids = append(ids, id)
		}
	}
	c.Hub.mu.Unlock()
	for part := range slices.Chunk(ids, 1000) {
		err := c.read(ctx, func(ctx context.Context, tx Tx) error {
			return c.all(ctx, tx, `SELECT run_id, next_seq, closed_at IS NOT NULL, cancel_at IS NOT NULL FROM runs WHERE run_id IN ({ids})`, []any{jsonText(part)},
				func(r Rows) error {
					var id string
					var s state
					if err := r.Scan(&id, &s.next, &s.closed, &s.canceled); err != nil {
						return err
					}
					topics[id].compare(s)
					return nil
				})
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func (t *topic) compare(s state) {
	t.mu.Lock()
	defer t.mu.Unlock()
	changed := t.known && (t.next() < s.next || s.closed && !t.closed)
	if changed {
		t.stale = true
		t.wakeUp()
	}
	if s.canceled && !t.canceled || s.closed && !t.closed {
		t.canceled = s.canceled
		t.wakeControl()
	}
}
