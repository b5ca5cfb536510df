package modeltest

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"time"
)

// Server is an HTTP server on a loopback address.
type Server struct {
	// URL is http://HOST:PORT, without a slash at its end.
	URL string

	http   *http.Server
	cancel context.CancelFunc
	loops  sync.WaitGroup
	once   sync.Once
	err    error

	mu       sync.Mutex
	closed   bool
	handlers sync.WaitGroup // under mu, and never added to once closed
}

// Start serves h on addr, HOST:PORT with an IP address of the loopback network
// or "localhost"; port 0 chooses a free one. Any other host is an [*AddrError]:
// a mock model asks nobody for a key. The server ends with ctx or by Close.
func Start(ctx context.Context, addr string, h http.Handler) (*Server, error) {
	if err := checkAddr(addr); err != nil {
		return nil, err
	}
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("modeltest: listen on %q: %w", addr, err)
	}
	if a, ok := l.Addr().(*net.TCPAddr); !ok || !a.IP.IsLoopback() {
		// localhost is what the resolver says it is.
		_ = l.Close()
		return nil, notLoopback(addr)
	}
	ctx, cancel := context.WithCancel(ctx)
	s := &Server{URL: "http://" + l.Addr().String(), cancel: cancel}
	s.http = &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if !s.enter() {
				return
			}
			defer s.handlers.Done()
			h.ServeHTTP(w, r)
		}),
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       2 * time.Minute,
		ErrorLog:          slog.NewLogLogger(slog.DiscardHandler, slog.LevelError), // broken connections are the point
		BaseContext:       func(net.Listener) context.Context { return ctx },
	}
	s.loops.Go(func() { _ = s.http.Serve(l) }) // ends by Close only
	s.loops.Go(func() {
		<-ctx.Done()
		s.err = s.http.Close()
	})
	return s, nil
}

// Close ends the server and all its connections at once, also those that a
// script lets hang, and returns when all handlers have. It may be called more
// than once and from several goroutines.
func (s *Server) Close() error {
	s.once.Do(func() {
		s.cancel()
		s.loops.Wait()
		s.mu.Lock()
		s.closed = true
		s.mu.Unlock()
		s.handlers.Wait()
	})
	return s.err
}

func (s *Server) enter() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.handlers.Add(1)
	}
	return !s.closed
}

func checkAddr(addr string) error {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return &AddrError{Addr: addr, Problem: "not HOST:PORT", Cure: "write 127.0.0.1:0"}
	}
	if host == "localhost" {
		return nil
	}
	if ip, err := netip.ParseAddr(host); err != nil || !ip.IsLoopback() {
		return notLoopback(addr)
	}
	return nil
}

func notLoopback(addr string) error {
	return &AddrError{Addr: addr, Problem: "not a loopback address", Cure: "write 127.0.0.1:0"}
}

// TB is what NewServer needs of a *testing.T; the testing package itself is not
// linked into programs that serve a mock model.
type TB interface {
	Helper()
	Cleanup(func())
	Fatalf(format string, args ...any)
}

// TestServer is a model with a server of its own.
type TestServer struct {
	*Model
	// URL is the base URL to give to a client.
	URL string
}

// NewServer serves s on a free loopback port until the test ends.
func NewServer(t TB, s Script) *TestServer {
	t.Helper()
	m, err := New(s, Options{})
	if err != nil {
		t.Fatalf("%v", err)
	}
	srv, err := Start(context.Background(), "127.0.0.1:0", m)
	if err != nil {
		t.Fatalf("%v", err)
	}
	t.Cleanup(func() { _ = srv.Close() })
	return &TestServer{Model: m, URL: srv.URL}
}
