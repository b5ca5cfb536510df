package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"
)

// Mux carries many links over one connection. It is made for short requests: a
// frame is written by who sends it, in one write, and opening a link costs
// nothing, for the first frame does it. A ready-made multiplexer spends two
// goroutine switches on each frame and four frames on each link, a third of what
// starting a process costs.
//
//	link u32 | type u8 | length u24 | payload
//
// Data has credit, per link, type and direction, so the reader never has to wait
// for a slow consumer and memory is bounded.
type Mux struct {
	conn   io.ReadWriteCloser
	parity uint32 // of the links that this side opens
	opened func(*Link)

	wmu sync.Mutex
	out []byte

	mu    sync.Mutex
	links map[uint32]*Link
	next  uint32
	dead  error

	done  chan struct{} // closed with the connection
	ended chan struct{} // the reader has returned
	heard atomic.Bool
	tasks sync.WaitGroup
}

// The connection's time limits. A sandbox that is paused for a moment must not
// lose its connection, hence the long one.
const (
	pingEvery = 10 * time.Second
	deafLimit = 60 * time.Second
	maxInbox  = 4096 // frames without credit that a link holds
	muxHead   = 8
	maxLinks  = 8192
)

// errBroken is how every call ends after the connection has.
var errBroken = errors.New("guest protocol: the connection ended")

// NewMux starts a multiplexer on a connection that has been greeted. opened is
// called in a goroutine of its own for each link that the other side opens, with
// the request as the link's first frame.
func NewMux(conn io.ReadWriteCloser, host bool, opened func(*Link)) *Mux {
	m := &Mux{conn: conn, opened: opened, links: map[uint32]*Link{}, done: make(chan struct{}), ended: make(chan struct{})}
	if host {
		m.parity = 1
	}
	m.next = m.parity + 2
	go m.read()
	m.tasks.Go(m.ping)
	return m
}

// Done is closed when the connection has ended.
func (m *Mux) Done() <-chan struct{} { return m.done }

// Err says why the connection ended; nil while it hasn't.
func (m *Mux) Err() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.dead
}

// Close ends the connection and all links, and waits for the multiplexer's own
// goroutines. Idempotent.
func (m *Mux) Close() {
	m.fail(errBroken)
	<-m.ended
	m.tasks.Wait()
}

func (m *Mux) fail(err error) {
	if rest := m.bury(err); rest != nil {
		rest()
	}
}

// bury marks the connection as ended. What is left to do then is returned; nil
// when it was marked before.
func (m *Mux) bury(err error) (rest func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.dead != nil {
		return nil
	}
	m.dead = err
	links := m.links
	m.links = nil
	close(m.done)
	return func() {
		_ = m.conn.Close()
		for _, l := range links {
			l.end(err)
		}
	}
}

// Open returns a new link. Nothing is sent until its first frame.
func (m *Mux) Open() (*Link, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.dead != nil {
		return nil, m.dead
	}
	if len(m.links) >= maxLinks {
		return nil, fmt.Errorf("guest protocol: %d requests are under way", maxLinks)
	}
	for m.links[m.next] != nil {
		m.next += 2
	}
	l := newLink(m, m.next)
	m.links[l.id] = l
	m.next += 2
	if m.next < 2 {
		m.next = m.parity + 2 // wrapped around; link 0 and 1 are the connection's own
	}
	return l, nil
}

func (m *Mux) forget(l *Link) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.links[l.id] != l {
		return false
	}
	delete(m.links, l.id)
	return true
}

func (m *Mux) write(id uint32, t FrameType, payload []byte) error {
	m.wmu.Lock()
	defer m.wmu.Unlock()
	m.out = binary.BigEndian.AppendUint32(m.out[:0], id)
	m.out = binary.BigEndian.AppendUint32(m.out, uint32(t)<<24|uint32(len(payload)))
	m.out = append(m.out, payload...)
	_, err := m.conn.Write(m.out)
	if cap(m.out) > 2*Chunk {
		m.out = nil
	}
	if err != nil {
		// Whoever is told of the error finds the connection ended. The rest is not done
		// here: the holders of the links may wait for this lock.
		if rest := m.bury(fmt.Errorf("%w: %w", errBroken, err)); rest != nil {
			go rest()
		}
		return err
	}
	return nil
}

// read is the one reader. It never waits for anybody but the connection.
func (m *Mux) read() {
	defer close(m.ended)
	err := m.readAll()
	if err == nil || err == io.EOF {
		err = errBroken
	} else {
		err = fmt.Errorf("%w: %w", errBroken, err)
	}
	m.fail(err)
}

var errFrame = errors.New("guest protocol: malformed frame")

func (m *Mux) readAll() error {
	r := newFrameReader(m.conn)
	for {
		head, err := r.peek(muxHead)
		if err != nil {
			return err
		}
		id := binary.BigEndian.Uint32(head)
		word := binary.BigEndian.Uint32(head[4:])
		t, size := FrameType(word>>24), int(word&0xffffff)
		if t == 0 || t >= frameEnd || size > MaxFrame {
			return errFrame
		}
		r.skip(muxHead)
		payload := []byte(nil)
		if size > 0 {
			payload = make([]byte, size)
			if err := r.full(payload); err != nil {
				return err
			}
		}
		m.heard.Store(true)
		if err := m.dispatch(id, t, payload); err != nil {
			return err
		}
	}
}

func (m *Mux) dispatch(id uint32, t FrameType, payload []byte) error {
	if id < 2 {
		if t == FSignal { // a ping; the answer must not make the reader wait
			m.pong()
		}
		return nil
	}
	m.mu.Lock()
	l := m.links[id]
	fresh := false
	if l == nil && t == FRequest && id&1 != m.parity && m.links != nil {
		if len(m.links) >= maxLinks {
			m.mu.Unlock()
			return errors.New("guest protocol: too many requests")
		}
		l = newLink(m, id)
		m.links[id] = l
		fresh = true
	}
	m.mu.Unlock()
	if l == nil {
		return nil // of a link that this side gave up
	}
	if err := l.take(t, payload); err != nil {
		return err
	}
	if fresh {
		m.tasks.Go(func() { m.opened(l) })
	}
	return nil
}

// pong answers a ping from a goroutine of its own: the reader may not write.
func (m *Mux) pong() {
	go func() { _ = m.write(m.parity, FCredit, nil) }()
}

// ping asks from time to time whether the other side is there.
func (m *Mux) ping() {
	t := time.NewTicker(pingEvery)
	defer t.Stop()
	last := time.Now()
	for {
		select {
		case <-m.done:
			return
		case <-t.C:
		}
		if m.heard.Swap(false) {
			last = time.Now()
		}
		if time.Since(last) > deafLimit {
			m.fail(fmt.Errorf("%w: nothing was heard for %v", errBroken, deafLimit))
			return
		}
		go func() { _ = m.write(m.parity, FSignal, nil) }()
	}
}

// frameReader is a buffered reader whose large reads bypass the buffer.
type frameReader struct {
	r   io.Reader
	buf []byte
	pos int
	end int
}

func newFrameReader(r io.Reader) *frameReader {
	return &frameReader{r: r, buf: make([]byte, 4<<10)}
}

func (f *frameReader) peek(n int) ([]byte, error) {
	for f.end-f.pos < n {
		if f.pos > 0 {
			copy(f.buf, f.buf[f.pos:f.end])
			f.end -= f.pos
			f.pos = 0
		}
		k, err := f.r.Read(f.buf[f.end:])
		f.end += k
		if f.end-f.pos >= n {
			break
		}
		if err != nil {
			if err == io.EOF && f.end > f.pos {
				err = io.ErrUnexpectedEOF
			}
			return nil, err
		}
	}
	return f.buf[f.pos : f.pos+n], nil
}

func (f *frameReader) skip(n int) { f.pos += n }

func (f *frameReader) full(b []byte) error {
	n := copy(b, f.buf[f.pos:f.end])
	f.pos += n
	if n < len(b) {
		if _, err := io.ReadFull(f.r, b[n:]); err != nil {
			if err == io.EOF {
				err = io.ErrUnexpectedEOF
			}
			return err
		}
	}
	return nil
}
