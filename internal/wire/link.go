package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"
)

// FrameType is the kind of a frame on a link.
type FrameType uint8

// The frames. FRequest is a link's first, FReply or FError its last; after that
// both sides forget the link. FStarted may be left out when another frame follows
// soon.
const (
	FRequest FrameType = 1 + iota
	FStarted
	FData   // stdin, stdout, file content, whatever the operation carries
	FStderr // bytes of stderr
	FEnd    // no more FData in this direction
	FCredit // type u8, bytes u32: the receiver has room for so much more
	FSignal // number u8; 0 makes the end of the process that of its tree
	FResize // rows u16, columns u16
	FStop   // type u8: the host takes no more of this output
	FKilled // the answer to FSignal 9: empty, or the error
	FReply
	FError
	FClose // the sender gave the link up
	frameEnd
)

const (
	// MaxFrame bounds a payload.
	MaxFrame = 1 << 20

	// Chunk is how much data a sender puts into one frame.
	Chunk = 32 << 10

	// Window is what a sender may have under way of one type of data.
	Window = 256 << 10
)

// Link is one request and what belongs to it. Send may be called concurrently,
// Recv by one goroutine at a time.
type Link struct {
	m  *Mux
	id uint32

	mu      sync.Mutex
	recv    sync.Cond
	send    sync.Cond
	inbox   []frame
	control int // frames in the inbox that have no credit
	err     error
	stopped [2]bool // the other side takes no more of it
	credit  [2]int  // what this side may send
	room    [2]int  // what the other side may send
	debt    [2]int  // consumed and not granted again
	owed    FrameType
	owedN   int

	readBy  deadline
	writeBy deadline
}

type frame struct {
	t FrameType
	b []byte
}

// deadline wakes the waiters of a link when it has passed.
type deadline struct {
	passed bool
	timer  *time.Timer
}

func newLink(m *Mux, id uint32) *Link {
	l := &Link{m: m, id: id, credit: [2]int{Window, Window}, room: [2]int{Window, Window}}
	l.recv.L, l.send.L = &l.mu, &l.mu
	return l
}

// channel is the index of a type of data; -1 for what has no credit.
func channel(t FrameType) int {
	switch t {
	case FData:
		return 0
	case FStderr:
		return 1
	}
	return -1
}

// take is the reader's: it queues a frame. The error ends the connection.
func (l *Link) take(t FrameType, b []byte) error {
	last := false
	l.mu.Lock()
	defer l.mu.Unlock()
	switch t {
	case FCredit:
		ct, n, ok := parseCredit(b)
		if !ok {
			return errFrame
		}
		c := channel(ct)
		l.credit[c] = min(l.credit[c]+n, Window)
		l.send.Broadcast()
		return nil
	case FClose:
		l.endLocked(io.EOF)
		l.m.forget(l)
		return nil
	case FStop:
		if len(b) == 1 && channel(FrameType(b[0])) >= 0 {
			l.stopped[channel(FrameType(b[0]))] = true
			l.send.Broadcast()
		}
		return nil
	case FReply, FError:
		last = true
	}
	if c := channel(t); c >= 0 {
		if l.room[c] -= len(b); l.room[c] < 0 {
			return errors.New("guest protocol: a sender exceeded its credit")
		}
	} else if l.control++; l.control > maxInbox {
		return errors.New("guest protocol: too many frames")
	}
	l.inbox = append(l.inbox, frame{t, b})
	l.recv.Signal()
	if last {
		l.m.forget(l)
		if l.err == nil {
			l.err = io.EOF
		}
		l.send.Broadcast()
	}
	return nil
}

// end makes everything return err; what was received can still be read.
func (l *Link) end(err error) {
	l.mu.Lock()
	l.endLocked(err)
	l.mu.Unlock()
}

func (l *Link) endLocked(err error) {
	if l.err == nil {
		l.err = err
	}
	l.recv.Broadcast()
	l.send.Broadcast()
}

// Recv returns the next frame; the payload is the caller's. io.EOF is the end of
// the link. Calling it says that the data of the frame before was dealt with,
// which gives the sender credit again.
func (l *Link) Recv() (FrameType, []byte, error) {
	t, b, err := l.RecvOwing()
	if err == nil && channel(t) >= 0 {
		l.mu.Lock()
		l.owed, l.owedN = t, len(b)
		l.mu.Unlock()
	}
	return t, b, err
}

// RecvOwing is Recv for who calls Consumed by themselves.
func (l *Link) RecvOwing() (FrameType, []byte, error) {
	l.mu.Lock()
	owed, n := l.owed, l.owedN
	l.owedN = 0
	l.mu.Unlock()
	if n > 0 {
		l.Consumed(owed, n)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for len(l.inbox) == 0 {
		if l.readBy.passed {
			return 0, nil, os.ErrDeadlineExceeded
		}
		if l.err != nil {
			return 0, nil, l.err
		}
		l.recv.Wait()
	}
	f := l.inbox[0]
	l.inbox[0] = frame{}
	l.inbox = l.inbox[1:]
	if len(l.inbox) == 0 {
		l.inbox = nil
	}
	if channel(f.t) < 0 {
		l.control--
	}
	return f.t, f.b, nil
}

// Consumed gives the sender credit for n bytes that were dealt with.
func (l *Link) Consumed(t FrameType, n int) {
	c := channel(t)
	l.mu.Lock()
	l.debt[c] += n
	give := 0
	// Not for every few bytes: a command with little output costs no frame.
	if l.debt[c] >= Window/4 && l.err == nil {
		give, l.debt[c] = l.debt[c], 0
		l.room[c] += give
	}
	l.mu.Unlock()
	if give > 0 {
		_ = l.m.write(l.id, FCredit, creditFrame(t, give))
	}
}

// ErrClosed says that the other side takes no more data.
var ErrClosed = errors.New("guest protocol: channel is closed")

// Send writes a frame; FData and FStderr wait for credit and may be longer than
// a frame.
func (l *Link) Send(t FrameType, payload []byte) error {
	if c := channel(t); c >= 0 {
		return l.sendData(t, c, payload)
	}
	if len(payload) > MaxFrame {
		return fmt.Errorf("guest protocol: frame of %d bytes", len(payload))
	}
	l.mu.Lock()
	err := l.err
	l.mu.Unlock()
	if err != nil {
		return closedErr(err)
	}
	if t == FReply || t == FError {
		l.m.forget(l)
		l.end(io.EOF)
	}
	return l.m.write(l.id, t, payload)
}

func closedErr(err error) error {
	if err == io.EOF {
		return ErrClosed
	}
	return err
}

func (l *Link) sendData(t FrameType, c int, b []byte) error {
	for len(b) > 0 {
		l.mu.Lock()
		for l.credit[c] == 0 && l.err == nil && !l.stopped[c] && !l.writeBy.passed {
			l.send.Wait()
		}
		switch {
		case l.err != nil:
			err := l.err
			l.mu.Unlock()
			return closedErr(err)
		case l.stopped[c]:
			l.mu.Unlock()
			return ErrClosed
		case l.writeBy.passed:
			l.mu.Unlock()
			return os.ErrDeadlineExceeded
		}
		n := min(len(b), l.credit[c], Chunk)
		l.credit[c] -= n
		l.mu.Unlock()
		if err := l.m.write(l.id, t, b[:n]); err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

// SendRequest writes a request.
func (l *Link) SendRequest(r *Request) error {
	return l.Send(FRequest, r.Encode(make([]byte, 0, 256)))
}

// Writer returns a writer of one type of data.
func (l *Link) Writer(t FrameType) io.Writer { return linkWriter{l, t} }

type linkWriter struct {
	l *Link
	t FrameType
}

func (w linkWriter) Write(b []byte) (int, error) {
	if err := w.l.Send(w.t, b); err != nil {
		return 0, err
	}
	return len(b), nil
}

// Stop makes senders of one type of data return [ErrClosed].
func (l *Link) Stop(t FrameType) {
	l.mu.Lock()
	l.stopped[channel(t)] = true
	l.mu.Unlock()
	l.send.Broadcast()
}

// Abort gives the link up: blocked calls return, what comes is dropped, and the
// other side learns of it. After the last frame it does nothing. Idempotent.
func (l *Link) Abort() {
	l.mu.Lock()
	l.inbox = nil
	l.endLocked(io.EOF)
	l.mu.Unlock()
	if l.m.forget(l) {
		_ = l.m.write(l.id, FClose, nil)
	}
}

// setDeadline makes calls that wait return os.ErrDeadlineExceeded after t.
func (l *Link) setDeadline(d *deadline, c *sync.Cond, t time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if d.timer != nil {
		d.timer.Stop()
		d.timer = nil
	}
	d.passed = false
	if t.IsZero() {
		return
	}
	left := time.Until(t)
	if left <= 0 {
		d.passed = true
		c.Broadcast()
		return
	}
	var timer *time.Timer
	timer = time.AfterFunc(left, func() {
		l.mu.Lock()
		if d.timer == timer {
			d.passed = true
			c.Broadcast()
		}
		l.mu.Unlock()
	})
	d.timer = timer
}

func creditFrame(t FrameType, n int) []byte {
	return binary.BigEndian.AppendUint32([]byte{byte(t)}, uint32(n))
}

func parseCredit(b []byte) (t FrameType, n int, ok bool) {
	if len(b) != 5 || channel(FrameType(b[0])) < 0 {
		return 0, 0, false
	}
	v := binary.BigEndian.Uint32(b[1:])
	return FrameType(b[0]), int(v), v <= Window
}
