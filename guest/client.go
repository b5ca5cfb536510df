package guest

import (
	"context"
	"fmt"
	"io"
	"sync"

	"github.com/aisandbox-go/aisandbox/internal/wire"
	"github.com/aisandbox-go/aisandbox/provider"
)

// client is one connection to a guest.
type client struct {
	mux   *wire.Mux
	facts wire.Facts
	after func()        // what ends with the connection; may be nil
	why   func() string // how the guest's process ended; may be nil

	mu        sync.Mutex
	listeners map[string]*listener
	closing   sync.Once
}

// newClient greets the guest. It owns conn, and after, from the call on.
func newClient(ctx context.Context, conn io.ReadWriteCloser, after func()) (*client, error) {
	fail := func(err error) (*client, error) {
		_ = conn.Close()
		if after != nil {
			after()
		}
		return nil, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, wire.HelloTimeout, fmt.Errorf("guest: no greeting within %v: %w", wire.HelloTimeout, provider.ErrUnavailable))
	defer cancel()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	facts, err := wire.Hello(conn, true, wire.Facts{})
	if !stop() {
		return fail(context.Cause(ctx))
	}
	if err != nil {
		return fail(fmt.Errorf("guest: %w", err))
	}
	c := &client{facts: facts, after: after, listeners: map[string]*listener{}}
	c.mux = wire.NewMux(conn, true, c.incoming)
	go func() {
		<-c.mux.Done()
		c.mu.Lock()
		defer c.mu.Unlock()
		for _, l := range c.listeners {
			l.end(lost(nil))
		}
	}()
	return c, nil
}

// reason says for a log why the connection ended.
func (c *client) reason() string {
	s := fmt.Sprint(c.mux.Err())
	if c.why != nil {
		s += "; " + c.why()
	}
	return s
}

func (c *client) dead() bool {
	select {
	case <-c.mux.Done():
		return true
	default:
		return false
	}
}

// close ends the connection and waits for what belongs to it.
func (c *client) close() {
	c.closing.Do(func() {
		c.mux.Close()
		if c.after != nil {
			c.after()
		}
	})
}

// incoming takes a connection that arrived at a port inside.
func (c *client) incoming(l *wire.Link) {
	_, b, err := l.Recv() // the multiplexer's promise: a request
	if err != nil {
		return
	}
	req, err := wire.DecodeRequest(b)
	if err != nil || req.Op != wire.OpListen {
		l.Abort()
		return
	}
	c.mu.Lock()
	ln := c.listeners[req.Token]
	c.mu.Unlock()
	if ln == nil || !ln.deliver(wire.NewConn(l)) {
		l.Abort()
	}
}

// exchange is a request under way.
type exchange struct {
	c    *client
	l    *wire.Link
	stop func() bool
	ctx  context.Context
}

// begin sends a request, on a new connection if the old one is found dead before
// anything of the request was said. ctx's end gives the request up.
func (g *Handle) begin(ctx context.Context, req *wire.Request) (*exchange, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	for try := 0; ; try++ {
		c, err := g.conn(ctx)
		if err != nil {
			return nil, err
		}
		l, err := c.mux.Open()
		if err == nil {
			if err = l.SendRequest(req); err == nil {
				x := &exchange{c: c, l: l, ctx: ctx}
				x.stop = context.AfterFunc(ctx, l.Abort)
				return x, nil
			}
			l.Abort()
		}
		if !c.dead() {
			return nil, fmt.Errorf("guest: %w", err)
		}
		if try == 1 {
			return nil, lost(err)
		}
	}
}

// recv reads a frame; FError is returned as the error it carries.
func (x *exchange) recv() (wire.FrameType, []byte, error) {
	t, b, err := x.l.Recv()
	if err != nil {
		return 0, nil, x.broken(err)
	}
	if t == wire.FError {
		return t, nil, wire.DecodeError(b)
	}
	return t, b, nil
}

// broken says why the link broke: we gave it up, or the connection is gone.
func (x *exchange) broken(err error) error {
	if x.ctx.Err() != nil {
		return context.Cause(x.ctx)
	}
	return lost(err)
}

// end gives up what is not answered yet.
func (x *exchange) end() {
	x.stop()
	x.l.Abort()
}

// reply waits for the one answer of a request and ends the exchange.
func (x *exchange) reply() ([]byte, error) {
	defer x.end()
	t, b, err := x.recv()
	if err == nil && t != wire.FReply {
		err = unexpected(t)
	}
	return b, err
}

// started waits for FStarted. After an error the exchange has ended.
func (x *exchange) started() ([]byte, error) {
	t, b, err := x.recv()
	if err == nil && t != wire.FStarted {
		err = unexpected(t)
	}
	if err != nil {
		x.end()
	}
	return b, err
}

func unexpected(t wire.FrameType) error {
	return fmt.Errorf("guest protocol: unexpected frame %d", t)
}

// call is a request with one answer.
func (g *Handle) call(ctx context.Context, req *wire.Request) ([]byte, error) {
	x, err := g.begin(ctx, req)
	if err != nil {
		return nil, err
	}
	return x.reply()
}

// upload sends what r has; its failure becomes the guest's and is returned.
func (x *exchange) upload(r io.Reader) ([]byte, error) {
	buf := make([]byte, wire.Chunk)
	for r != nil {
		n, err := r.Read(buf)
		if n > 0 && x.l.Send(wire.FData, buf[:n]) != nil {
			return x.reply() // the guest has answered already, or the link broke
		}
		if err == io.EOF {
			break
		}
		if err != nil {
			_ = x.l.Send(wire.FEnd, []byte("the host's reader failed: "+err.Error()))
			_, _ = x.reply()
			return nil, err
		}
	}
	_ = x.l.Send(wire.FEnd, nil) // if it fails, so does the reply
	return x.reply()
}
