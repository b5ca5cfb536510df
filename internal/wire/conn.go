package wire

import (
	"io"
	"net"
	"sync"
	"time"
)

// Conn is a network connection carried by a link: FData frames, and FEnd for the
// end of one direction.
type Conn struct {
	l *Link

	rmu  sync.Mutex
	rest []byte
	eof  error

	wmu   sync.Mutex
	ended bool
}

var _ net.Conn = (*Conn)(nil)

// NewConn returns the connection that a link carries from now on.
func NewConn(l *Link) *Conn { return &Conn{l: l} }

func (c *Conn) Read(b []byte) (int, error) {
	c.rmu.Lock()
	defer c.rmu.Unlock()
	if len(b) == 0 {
		return 0, nil
	}
	for len(c.rest) == 0 {
		if c.eof != nil {
			return 0, c.eof
		}
		t, p, err := c.l.Recv()
		switch {
		case isTimeout(err):
			return 0, err // a deadline, which may be lifted
		case err == io.EOF:
			c.eof = io.ErrUnexpectedEOF // without FEnd the other side broke off
		case err != nil:
			c.eof = err
		case t == FData:
			c.rest = p
		case t == FEnd:
			c.eof = io.EOF
		}
	}
	n := copy(b, c.rest)
	c.rest = c.rest[n:]
	return n, nil
}

func isTimeout(err error) bool {
	t, ok := err.(interface{ Timeout() bool })
	return ok && t.Timeout()
}

func (c *Conn) Write(b []byte) (int, error) {
	c.wmu.Lock()
	defer c.wmu.Unlock()
	if c.ended {
		return 0, net.ErrClosed
	}
	if err := c.l.Send(FData, b); err != nil {
		return 0, err
	}
	return len(b), nil
}

// CloseWrite ends the direction to the other side.
func (c *Conn) CloseWrite() error {
	c.wmu.Lock()
	defer c.wmu.Unlock()
	if c.ended {
		return nil
	}
	c.ended = true
	return c.l.Send(FEnd, nil)
}

// Close ends both directions; calls that block return. The other side sees the
// end of what was written.
func (c *Conn) Close() error {
	if c.wmu.TryLock() { // else a Write is blocked, and what it writes is cut off
		if !c.ended {
			c.ended = true
			_ = c.l.Send(FEnd, nil)
		}
		c.wmu.Unlock()
	}
	c.l.Abort()
	return nil
}

// SetDeadline implements net.Conn.
func (c *Conn) SetDeadline(t time.Time) error {
	_ = c.SetReadDeadline(t)
	return c.SetWriteDeadline(t)
}

// SetReadDeadline implements net.Conn.
func (c *Conn) SetReadDeadline(t time.Time) error {
	c.l.setDeadline(&c.l.readBy, &c.l.recv, t)
	return nil
}

// SetWriteDeadline implements net.Conn.
func (c *Conn) SetWriteDeadline(t time.Time) error {
	c.l.setDeadline(&c.l.writeBy, &c.l.send, t)
	return nil
}

// LocalAddr implements net.Conn.
func (c *Conn) LocalAddr() net.Addr { return addr{} }

// RemoteAddr implements net.Conn.
func (c *Conn) RemoteAddr() net.Addr { return addr{} }

// addr is the address of what has none.
type addr struct{}

func (addr) Network() string { return "guest" }
func (addr) String() string  { return "guest" }
