package testenv

import (
	"bytes"
	"encoding/binary"
	"io"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// Fault is what a [PostgresProxy] does to a message of a client.
type Fault int

// The faults. All but Stall end the connection.
const (
	Pass       Fault = iota
	CutBefore        // the server never gets it
	CutAfter         // the server carries it out, and the answer is lost
	HalfClose        // the server gets it and then the end of input; the client never hears again
	Stall            // nothing goes either way any more, without an end
	CutHalfway       // the server gets half of it
)

// PostgresProxy stands between clients and a PostgreSQL server, speaks TCP, and
// breaks connections where a test asks for it: at a message, such as a COMMIT,
// not at a time.
type PostgresProxy struct {
	URL string // of the same database, through the proxy

	l      net.Listener
	socket string

	mu    sync.Mutex
	fault func(kind byte, body []byte) Fault
	conns map[*proxied]bool
	done  bool
	wg    sync.WaitGroup
}

// ProxyPostgres starts a proxy before a database of [Postgres]. It ends with the
// test.
func ProxyPostgres(t testing.TB, dsn string) *PostgresProxy {
	t.Helper()
	u, err := url.Parse(dsn)
	if err != nil {
		t.Fatal(err)
	}
	q := u.Query()
	socket := filepath.Join(q.Get("host"), ".s.PGSQL.5432")
	if _, err := os.Stat(socket); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	q.Del("host")
	u.Host, u.RawQuery = l.Addr().String(), q.Encode()
	p := &PostgresProxy{URL: u.String(), l: l, socket: socket, conns: map[*proxied]bool{}}
	p.wg.Go(p.serve)
	t.Cleanup(func() {
		p.mu.Lock()
		p.done = true
		p.mu.Unlock()
		_ = l.Close()
		p.CutAll()
		p.wg.Wait()
	})
	return p
}

// Arm asks f about every message from now on: its type (of the frontend protocol: 'Q' a query, 'P' parse,
// 'B' bind, 'E' execute) and its body. Nil lets all pass. F may be called from
// several connections at once.
func (p *PostgresProxy) Arm(f func(kind byte, body []byte) Fault) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.fault = f
}

// ArmOnce does one fault at the first message that matches, and tells by the
// channel that it was done.
func (p *PostgresProxy) ArmOnce(fault Fault, match func(kind byte, body []byte) bool) <-chan struct{} {
	hit := make(chan struct{})
	var once sync.Once
	p.Arm(func(kind byte, body []byte) Fault {
		f := Pass
		if match(kind, body) {
			once.Do(func() {
				f = fault
				close(hit)
			})
		}
		return f
	})
	return hit
}

// IsCommit matches the end of a transaction.
func IsCommit(kind byte, body []byte) bool {
	return kind == 'Q' && strings.EqualFold(string(bytes.TrimRight(body, "\x00")), "commit")
}

// IsExecute matches a prepared statement's execution.
func IsExecute(kind byte, _ []byte) bool { return kind == 'E' }

// CutAll ends every connection.
func (p *PostgresProxy) CutAll() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		c.close()
	}
}

func (p *PostgresProxy) serve() {
	for {
		client, err := p.l.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial("unix", p.socket)
		if err != nil {
			_ = client.Close()
			continue
		}
		c := &proxied{client: client, server: server}
		p.mu.Lock()
		p.conns[c] = true
		if p.done {
			c.close()
		}
		p.mu.Unlock()
		p.wg.Go(func() {
			var wg sync.WaitGroup
			wg.Go(c.back)
			p.forth(c)
			wg.Wait()
			c.close()
			p.mu.Lock()
			delete(p.conns, c)
			p.mu.Unlock()
		})
	}
}

type proxied struct {
	client, server net.Conn
	mu             sync.Mutex
	swallow        bool // answers go nowhere; the end of one ends the connection
	silent         bool // answers go nowhere, for good
}

func (c *proxied) close() {
	_ = c.client.Close()
	_ = c.server.Close()
}

// forth carries messages to the server.
func (p *PostgresProxy) forth(c *proxied) {
	var head [5]byte
	// The first message has no type.
	if _, err := io.ReadFull(c.client, head[:4]); err != nil {
		c.close()
		return
	}
	n := binary.BigEndian.Uint32(head[:4])
	if n < 4 || n > 1<<16 {
		c.close()
		return
	}
	first := make([]byte, n)
	copy(first, head[:4])
	if _, err := io.ReadFull(c.client, first[4:]); err != nil {
		c.close()
		return
	}
	if _, err := c.server.Write(first); err != nil {
		c.close()
		return
	}
	for {
		if _, err := io.ReadFull(c.client, head[:]); err != nil {
			c.close()
			return
		}
		n := binary.BigEndian.Uint32(head[1:])
		if n < 4 || n > 1<<28 {
			c.close()
			return
		}
		msg := make([]byte, 1+n)
		copy(msg, head[:])
		if _, err := io.ReadFull(c.client, msg[5:]); err != nil {
			c.close()
			return
		}
		p.mu.Lock()
		fault := p.fault
		p.mu.Unlock()
		what := Pass
		if fault != nil {
			what = fault(msg[0], msg[5:])
		}
		switch what {
		case CutBefore:
			c.close()
			return
		case CutHalfway:
			_, _ = c.server.Write(msg[:len(msg)/2])
			c.close()
			return
		case CutAfter:
			c.set(true, false)
		case HalfClose:
			c.set(false, true)
			_, _ = c.server.Write(msg)
			if u, ok := c.server.(*net.UnixConn); ok {
				_ = u.CloseWrite()
			}
			_, _ = io.Copy(io.Discard, c.client) // until the client gives up
			c.close()
			return
		case Stall:
			c.set(false, true)
			_, _ = io.Copy(io.Discard, c.client)
			c.close()
			return
		}
		if _, err := c.server.Write(msg); err != nil {
			c.close()
			return
		}
	}
}

func (c *proxied) set(swallow, silent bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.swallow, c.silent = swallow, silent
}

// back carries answers to the client.
func (c *proxied) back() {
	defer func() {
		c.mu.Lock()
		silent := c.silent
		c.mu.Unlock()
		if silent { // the client hears no end either
			_ = c.server.Close()
			return
		}
		c.close()
	}()
	var head [5]byte
	for {
		if _, err := io.ReadFull(c.server, head[:]); err != nil {
			return
		}
		n := binary.BigEndian.Uint32(head[1:])
		msg := make([]byte, 1+n)
		copy(msg, head[:])
		if _, err := io.ReadFull(c.server, msg[5:]); err != nil {
			return
		}
		c.mu.Lock()
		swallow, silent := c.swallow, c.silent
		c.mu.Unlock()
		if swallow && msg[0] == 'Z' { // ready for the next: this one is done
			return
		}
		if swallow || silent {
			continue
		}
		if _, err := c.client.Write(msg); err != nil {
			return
		}
	}
}
