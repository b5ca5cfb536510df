package harness

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"strconv"
	"sync"
	"time"

	"github.com/aisandbox-go/aisandbox/provider"
)

// maxTunnelConns bounds the connections of one tunnel at a time; more wait.
const maxTunnelConns = 128

// openTunnels opens a way from inside of the sandbox to each loopback URL of the
// host that the CLI must reach, and returns what to call it there. Where the
// sandbox is the host there is nothing to open. before is what an agent that runs
// already calls them: the same ports are opened again.
func (t *turn) openTunnels(ctx context.Context, p Plan, before map[string]string) (map[string]string, error) {
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
		l, in, err := listenInside(ctx, hr, before[raw])
		if err != nil && before[raw] != "" {
			// The host before may still hold the port. The agent's calls fail, and it
			// can be read all the same.
			p.Warn(fmt.Sprintf("the way to %s can't be opened again: %v", raw, err))
			inside[raw] = before[raw]
			continue
		}
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

// reopenTries and reopenWait are for a port that the guest of a host that just
// went away still holds.
const (
	reopenTries = 5
	reopenWait  = 300 * time.Millisecond
)

// listenInside opens a port inside: that of a URL, or any.
func listenInside(ctx context.Context, hr provider.HostReacher, before string) (net.Listener, string, error) {
	if before == "" {
		return hr.ListenInside(ctx, 0)
	}
	u, err := url.Parse(before)
	if err != nil {
		return nil, "", err
	}
	port, err := strconv.Atoi(u.Port())
	if err != nil {
		return nil, "", fmt.Errorf("port of %q: %w", before, err)
	}
	for try := 1; ; try++ {
		l, in, err := hr.ListenInside(ctx, port)
		if err == nil || try == reopenTries || ctx.Err() != nil {
			return l, in, err
		}
		timer := time.NewTimer(reopenWait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
		}
	}
}

// waysFile says in the private directory of a durable run what the agent calls
// the host's services.
const waysFile = "ways.json"

// ways opens the tunnels of a durable run; running says that the agent knows its
// names for them already. They end with this host, and the next one opens the
// same ports: until then the agent's calls fail.
func (d *detached) ways(ctx context.Context, p Plan, running bool) (map[string]string, error) {
	hu, ok := d.a.cli.(HostURLs)
	if !ok || len(hu.HostURLs(p)) == 0 {
		return map[string]string{}, nil
	}
	if !running {
		inside, err := d.openTunnels(ctx, p, nil)
		if err != nil {
			return nil, err
		}
		b, err := json.Marshal(inside)
		if err != nil {
			return nil, err
		}
		return inside, d.write(ctx, []File{{Name: waysFile, Content: b}})
	}
	before := map[string]string{}
	rctx, stop := context.WithTimeout(alone(ctx), cleanupTime)
	defer stop()
	b, err := d.sb.Output(rctx, provider.Cmd{Argv: []string{"cat", d.private + "/" + waysFile}, Dir: "/"})
	if err == nil {
		err = json.Unmarshal(b, &before)
	}
	if err != nil {
		p.Warn("the agent's ways to this host are not known any more: " + err.Error())
		return before, nil
	}
	return d.openTunnels(rctx, p, before)
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
