package sandbox

import (
	"context"
	"sync"
)

// keyedMutex is one first-come-first-served lock per key. A key that nobody holds
// or waits for costs nothing.
type keyedMutex struct {
	mu   sync.Mutex
	keys map[string][]chan struct{} // present: held; the channels are those who wait
}

func newKeyedMutex() *keyedMutex {
	return &keyedMutex{keys: map[string][]chan struct{}{}}
}

// lock waits for key and returns what unlocks it. An error is the cause of ctx.
func (m *keyedMutex) lock(ctx context.Context, key string) (unlock func(), err error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	m.mu.Lock()
	waiting, held := m.keys[key]
	if !held {
		m.keys[key] = nil
		m.mu.Unlock()
		return func() { m.unlock(key) }, nil
	}
	turn := make(chan struct{})
	m.keys[key] = append(waiting, turn)
	m.mu.Unlock()
	select {
	case <-turn:
		return func() { m.unlock(key) }, nil
	case <-ctx.Done():
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for i, c := range m.keys[key] {
		if c == turn {
			m.keys[key] = append(m.keys[key][:i:i], m.keys[key][i+1:]...)
			return nil, context.Cause(ctx)
		}
	}
	// It became ours while ctx ended: hand it on.
	m.next(key)
	return nil, context.Cause(ctx)
}

func (m *keyedMutex) unlock(key string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.next(key)
}

// next gives key to the one who waits longest. m.mu is held.
func (m *keyedMutex) next(key string) {
	waiting := m.keys[key]
	if len(waiting) == 0 {
		delete(m.keys, key)
		return
	}
	m.keys[key] = waiting[1:]
	close(waiting[0])
}

// users counts who works with the sandbox of a key in this process.
type users struct {
	mu sync.Mutex
	n  map[string]int
}

func (u *users) enter(key string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.n == nil {
		u.n = map[string]int{}
	}
	u.n[key]++
}

// leave says whether nobody is left.
func (u *users) leave(key string) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.n[key]--
	if u.n[key] > 0 {
		return false
	}
	delete(u.n, key)
	return true
}

// any says whether somebody is there.
func (u *users) any(key string) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.n[key] > 0
}
