package wire

import (
	"io"
	"sync"
)

// Queue holds data of a link until a goroutine of its own has dealt with it, so
// that who reads the link's frames never waits. The link's credit bounds it. Put
// and End are for one goroutine, Next and Read for another.
type Queue struct {
	l *Link
	t FrameType

	mu   sync.Mutex
	cond sync.Cond
	bufs [][]byte
	eof  error

	cur  []byte
	took int
}

// NewQueue returns an empty queue for one type of a link's data.
func NewQueue(l *Link, t FrameType) *Queue {
	q := &Queue{l: l, t: t}
	q.cond.L = &q.mu
	return q
}

// Put takes what [Link.RecvOwing] returned.
func (q *Queue) Put(b []byte) {
	q.mu.Lock()
	q.bufs = append(q.bufs, b)
	q.mu.Unlock()
	q.cond.Signal()
}

// End makes Next return err once all was taken; nil stands for io.EOF. The first
// call counts.
func (q *Queue) End(err error) {
	if err == nil {
		err = io.EOF
	}
	q.mu.Lock()
	if q.eof == nil {
		q.eof = err
	}
	q.mu.Unlock()
	q.cond.Broadcast()
}

// Next returns the next data and gives credit for what it returned before.
func (q *Queue) Next() ([]byte, error) {
	if q.took > 0 {
		q.l.Consumed(q.t, q.took)
		q.took = 0
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(q.bufs) == 0 && q.eof == nil {
		q.cond.Wait()
	}
	if len(q.bufs) == 0 {
		return nil, q.eof
	}
	b := q.bufs[0]
	q.bufs[0] = nil
	q.bufs = q.bufs[1:]
	q.took = len(b)
	return b, nil
}

func (q *Queue) Read(b []byte) (int, error) {
	if len(q.cur) == 0 {
		var err error
		if q.cur, err = q.Next(); err != nil {
			return 0, err
		}
	}
	n := copy(b, q.cur)
	q.cur = q.cur[n:]
	return n, nil
}
