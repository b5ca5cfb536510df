package harness

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"sync"

	"github.com/aisandbox-go/aisandbox/provider"
)

// maxTunnelConns bounds the connections of one tunnel at a time; more wait.
const maxTunnelConns = 128

// openTunnels opens a way from inside of the sandbox to each loopback URL of the
// host that the CLI must reach, and returns what to call it there. Where the
// sandbox is the host there is nothing to open.
func (t *turn) openTunnels(ctx context.Context, p Plan) (map[string]string, error) {
	inside := map[string]string{}
	hu, ok := t.a.cli.(HostURLs)
	if !ok {
		return inside, nil
	}
	for _, raw := range hu.HostURLs(p) {
		u, err := url.Parse(raw)
		if err != nil {
			return nil, fmt.Errorf("address %q: %w", raw, err)
		}
		if !loopback(u.Hostname()) || p.Traits.Isolation == provider.IsolationNone {
			inside[raw] = raw
			continue
		}
		if u.Scheme != "http" {
			// Over a tunnel the certificate would be for another name.
			return nil, fmt.Errorf("address %q: a loopback address must be http to be reached from a sandbox", raw)
		}
		hr, ok := provider.As[provider.HostReacher](t.sb.Handle())
		if !ok {
			return nil, &provider.UnsupportedError{Provider: t.sb.Provider().Name(), Capability: "hostReach",
				Hint: fmt.Sprintf("%s is on the host's loopback and can't be reached from this sandbox without a guest", raw)}
		}
		l, in, err := hr.ListenInside(ctx, 0)
		if err != nil {
			return nil, fmt.Errorf("open a way to %s: %w", raw, err)
		}
		port := u.Port()
		if port == "" {
			port = "80"
		}
		t.tunnels = append(t.tunnels, newTunnel(l, net.JoinHostPort(u.Hostname(), port)))
		iu, err := url.Parse(in)
		if err != nil {
			return nil, fmt.Errorf("address inside %q: %w", in, err)
		}
		v := *u
		v.Host = iu.Host
		inside[raw] = v.String()
	}
	return inside, nil
}

func loopback(host string) bool {
	if host == "localhost" {
		return true
	}
	ip := net.ParseIP(host)
	return ip != nil && ip.IsLoopback()
}

// tunnel carries connections from a listener to an address.
type tunnel struct {
	l      net.Listener
	addr   string
	cancel context.CancelFunc
	wg     sync.WaitGroup
}

func newTunnel(l net.Listener, addr string) *tunnel {
	ctx, cancel := context.WithCancel(context.Background())
	t := &tunnel{l: l, addr: addr, cancel: cancel}
	t.wg.Go(func() { t.serve(ctx) })
	return t
}

func (t *tunnel) serve(ctx context.Context) {
	slots := make(chan struct{}, maxTunnelConns)
	for {
		c, err := t.l.Accept()
		if err != nil {
			return
		}
		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
			_ = c.Close()
			return
		}
		t.wg.Go(func() {
			defer func() { <-slots }()
			t.carry(ctx, c)
		})
	}
}

func (t *tunnel) carry(ctx context.Context, in net.Conn) {
	defer func() { _ = in.Close() }()
	var d net.Dialer
	out, err := d.DialContext(ctx, "tcp", t.addr)
	if err != nil {
		return // the caller inside sees a closed connection, as without a tunnel
	}
	defer func() { _ = out.Close() }()
	stop := context.AfterFunc(ctx, func() {
		_ = in.Close()
		_ = out.Close()
	})
	defer stop()
	var wg sync.WaitGroup
	wg.Go(func() { pass(out, in) })
	wg.Go(func() { pass(in, out) })
	wg.Wait()
}

// pass copies until src ends and tells dst so; the other direction goes on.
func pass(dst, src net.Conn) {
	_, err := io.Copy(dst, src)
	if cw, ok := dst.(interface{ CloseWrite() error }); ok && err == nil {
		_ = cw.CloseWrite()
		return
	}
	_ = dst.Close()
}

// Close ends the tunnel and its connections.
func (t *tunnel) Close() error {
	t.cancel()
	err := t.l.Close()
	t.wg.Wait()
	if errors.Is(err, net.ErrClosed) {
		err = nil
	}
	return err
}
