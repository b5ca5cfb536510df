//go:build linux

package inside

import (
	"sync"

	"github.com/aisandbox-go/aisandbox/internal/wire"
	"github.com/aisandbox-go/aisandbox/provider"
)

// maxPending bounds the changes that the host has not taken yet. Beyond it the
// watcher waits, and the kernel's own queue overflows into a rescan.
const maxPending = 1 << 17

// changeCodes are the bytes of the change types on the wire.
var changeCodes = map[provider.ChangeType]byte{
	provider.ChangeCreate: 'c', provider.ChangeModify: 'm', provider.ChangeDelete: 'd',
}

// changeQueue holds changes until the host takes them; several changes of a path
// become one.
type changeQueue struct {
	mu      sync.Mutex
	cond    sync.Cond
	order   []string
	pending map[string]provider.ChangeType
	ended   bool
	dropped bool
}

func newChangeQueue() *changeQueue {
	q := &changeQueue{pending: map[string]provider.ChangeType{}}
	q.cond.L = &q.mu
	return q
}

func (q *changeQueue) add(t provider.ChangeType, path string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(q.order) >= maxPending && !q.dropped {
		q.cond.Wait()
	}
	if q.dropped {
		return
	}
	before, ok := q.pending[path]
	switch {
	case !ok:
		q.order = append(q.order, path)
	case before == provider.ChangeCreate && t == provider.ChangeDelete:
		delete(q.pending, path) // nobody has heard of it; send skips it in the order
		return
	case before == provider.ChangeCreate:
		t = provider.ChangeCreate
	case before == provider.ChangeDelete && t == provider.ChangeCreate:
		t = provider.ChangeModify
	}
	q.pending[path] = t
	q.cond.Broadcast()
}

// end lets send return once all was sent.
func (q *changeQueue) end() {
	q.mu.Lock()
	q.ended = true
	q.mu.Unlock()
	q.cond.Broadcast()
}

// drop throws everything away: the host is gone.
func (q *changeQueue) drop() {
	q.mu.Lock()
	q.dropped = true
	q.mu.Unlock()
	q.cond.Broadcast()
}

func (q *changeQueue) send(l *wire.Link) error {
	for {
		q.mu.Lock()
		for len(q.order) == 0 && !q.ended && !q.dropped {
			q.cond.Wait()
		}
		if q.dropped || len(q.order) == 0 {
			q.mu.Unlock()
			return nil
		}
		path := q.order[0]
		q.order = q.order[1:]
		t, ok := q.pending[path]
		delete(q.pending, path)
		q.mu.Unlock()
		q.cond.Broadcast()
		if !ok {
			continue
		}
		if err := l.Send(wire.FData, append([]byte{changeCodes[t]}, path...)); err != nil {
			q.drop()
			return err
		}
	}
}
