//go:build linux

package inside

import (
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"sync"
	"time"

	"github.com/aisandbox-go/aisandbox/internal/wire"
	"github.com/aisandbox-go/aisandbox/provider"
)

// maxConns bounds the open connections of all ports together.
const maxConns = 1024

// dial connects the stream to a port of the sandbox's loopback.
func (s *session) dial(l *wire.Link, req *wire.Request) error {
	if req.Port < 1 || req.Port > 65535 {
		return fmt.Errorf("dial port %d: %w", req.Port, provider.ErrInvalid)
	}
	d := net.Dialer{Timeout: 10 * time.Second}
	port := strconv.Itoa(req.Port)
	c, err := d.DialContext(s.ctx, "tcp", "127.0.0.1:"+port)
	if err != nil {
		var err6 error
		if c, err6 = d.DialContext(s.ctx, "tcp", "[::1]:"+port); err6 != nil {
			return fmt.Errorf("dial port %d: %w", req.Port, err)
		}
	}
	if err := l.Send(wire.FStarted, nil); err != nil {
		_ = c.Close()
		return errors.Join(errLink, err)
	}
	join(wire.NewConn(l), c)
	return nil
}

// listen opens a loopback port; each connection becomes a stream to the host.
func (s *session) listen(l *wire.Link, req *wire.Request) error {
	if req.Port < 0 || req.Port > 65535 {
		return fmt.Errorf("listen on port %d: %w", req.Port, provider.ErrInvalid)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:"+strconv.Itoa(req.Port))
	if err != nil {
		return fmt.Errorf("listen inside: %w", err)
	}
	var e wire.Enc
	e.Uint(uint64(ln.Addr().(*net.TCPAddr).Port))
	if err := l.Send(wire.FStarted, e.B); err != nil {
		_ = ln.Close()
		return errors.Join(errLink, err)
	}
	s.work.Go(func() {
		for {
			c, err := ln.Accept()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil { // out of descriptors, or a connection that was reset at once
				time.Sleep(10 * time.Millisecond)
				continue
			}
			if s.listens.Add(1) > maxConns {
				s.listens.Add(-1)
				_ = c.Close()
				continue
			}
			s.work.Go(func() {
				defer s.listens.Add(-1)
				s.forward(c, req.Token)
			})
		}
	})
	defer ln.Close()
	for {
		if _, _, err := l.Recv(); err != nil {
			return nil
		}
	}
}

func (s *session) forward(c net.Conn, token string) {
	l, err := s.mux.Open()
	if err != nil {
		_ = c.Close()
		return
	}
	if err := l.SendRequest(&wire.Request{Op: wire.OpListen, Token: token}); err != nil {
		_ = c.Close()
		l.Abort()
		return
	}
	join(wire.NewConn(l), c)
}

// join copies both ways. The end of one direction is passed on and the other goes
// on; a break ends both.
func join(up *wire.Conn, c net.Conn) {
	var wg sync.WaitGroup
	wg.Go(func() {
		if _, err := io.Copy(onlyWriter{c}, onlyReader{up}); err != nil {
			_ = c.Close()
			_ = up.Close()
			return
		}
		if t, ok := c.(*net.TCPConn); ok {
			_ = t.CloseWrite()
		}
	})
	if _, err := io.Copy(onlyWriter{up}, onlyReader{c}); err != nil {
		_ = c.Close()
		_ = up.Close()
	} else {
		_ = up.CloseWrite()
	}
	wg.Wait()
	_ = c.Close()
	_ = up.Close()
}
