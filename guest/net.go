package guest

import (
	"context"
	"crypto/rand"
	"net"
	"strconv"
	"sync"

	"github.com/aisandbox-go/aisandbox/internal/wire"
)

// Dial implements provider.Dialer. ctx bounds the connecting only.
func (g *Handle) Dial(ctx context.Context, port int) (net.Conn, error) {
	x, err := g.begin(ctx, &wire.Request{Op: wire.OpDial, Port: port})
	if err != nil {
		return nil, err
	}
	if _, err := x.started(); err != nil {
		return nil, err
	}
	if !x.stop() {
		return nil, context.Cause(ctx)
	}
	return wire.NewConn(x.l), nil
}

// backlog is how many connections wait for an Accept.
const backlog = 128

// listener is a port inside whose connections arrive here.
type listener struct {
	c     *client
	x     *exchange
	token string
	port  int

	conns chan net.Conn
	once  sync.Once
	ended chan struct{}
	err   error
}

// ListenInside implements provider.HostReacher. ctx bounds the opening only. When
// the connection to the guest breaks the port is closed, and Accept returns an
// error that is provider.ErrUnavailable.
func (g *Handle) ListenInside(ctx context.Context, port int) (net.Listener, string, error) {
	l := &listener{token: rand.Text(), conns: make(chan net.Conn, backlog), ended: make(chan struct{})}
	x, err := g.begin(ctx, &wire.Request{Op: wire.OpListen, Port: port, Token: l.token})
	if err != nil {
		return nil, "", err
	}
	l.c, l.x = x.c, x
	x.c.mu.Lock()
	x.c.listeners[l.token] = l
	x.c.mu.Unlock()
	b, err := x.started()
	if err == nil {
		d := wire.Dec{B: b}
		l.port = int(d.Uint())
		if !x.stop() {
			err = context.Cause(ctx)
		}
	}
	if err != nil {
		l.end(net.ErrClosed)
		l.forget()
		x.end()
		return nil, "", err
	}
	return l, "http://127.0.0.1:" + strconv.Itoa(l.port), nil
}

// deliver hands over a connection; false when there is no room.
func (l *listener) deliver(c net.Conn) bool {
	select {
	case <-l.ended:
		return false
	default:
	}
	select {
	case l.conns <- c:
		return true
	default:
		return false
	}
}

func (l *listener) Accept() (net.Conn, error) {
	select {
	case <-l.ended:
		return nil, l.err
	default:
	}
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.ended:
		return nil, l.err
	}
}

func (l *listener) end(err error) {
	l.once.Do(func() {
		l.err = err
		close(l.ended)
	})
}

func (l *listener) forget() {
	l.c.mu.Lock()
	delete(l.c.listeners, l.token)
	l.c.mu.Unlock()
	for {
		select {
		case c := <-l.conns:
			_ = c.Close()
		default:
			return
		}
	}
}

// Close closes the port. Connections that were accepted live on.
func (l *listener) Close() error {
	l.end(net.ErrClosed)
	l.forget()
	l.x.end()
	return nil
}

// Addr is the port inside.
func (l *listener) Addr() net.Addr {
	return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: l.port}
}
