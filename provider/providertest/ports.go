package providertest

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/aisandbox-go/aisandbox/provider"
)

// portCases need no server in the sandbox where the backend can open a port
// there that leads to this host.
var portCases = []testCase{
	{"P4", "a port inside that leads to the host", func(t *testing.T, b *box) {
		l, u := b.listenInside()
		echo(l)
		port := portOf(t, u)
		if _, ok := provider.As[provider.Dialer](b.h); !ok {
			b.insideConnects(port, true)
			return
		}
		var wg sync.WaitGroup
		for i := range 20 {
			wg.Go(func() {
				c := b.dial(port)
				if c == nil {
					return
				}
				defer c.Close()
				msg := bytes.Repeat([]byte(fmt.Sprintf("message %d\x00\xff", i)), 20000)
				go func() {
					c.Write(msg)
					if h, ok := c.(interface{ CloseWrite() error }); ok {
						h.CloseWrite()
					}
				}()
				got := make([]byte, len(msg))
				if _, err := io.ReadFull(c, got); err != nil || !bytes.Equal(got, msg) {
					t.Errorf("connection %d: %v", i, err)
				}
			})
		}
		wg.Wait()
		if b.has("bash") {
			b.insideConnects(port, true)
		}
		l.Close()
		b.eventually(5*time.Second, "the port is closed with its listener", func() bool {
			c, err := dialer(b).Dial(b.ctx, port)
			if err != nil {
				return true
			}
			defer c.Close()
			// Some transports accept before they know; then the connection ends at once.
			c.SetReadDeadline(time.Now().Add(5 * time.Second))
			_, err = c.Read(make([]byte, 1))
			var ne net.Error
			return err != nil && !(errors.As(err, &ne) && ne.Timeout())
		})
	}},
	{"P5", "a port where nobody listens", func(t *testing.T, b *box) {
		if _, ok := provider.As[provider.Dialer](b.h); !ok {
			b.lacks("dialling")
		}
		c, err := dialer(b).Dial(b.ctx, 1)
		if err == nil {
			defer c.Close()
			if _, err = c.Read(make([]byte, 1)); err == nil {
				t.Error("a connection to nobody")
			}
		}
		for _, port := range []int{0, -1, 65536} {
			if c, err := dialer(b).Dial(b.ctx, port); err == nil {
				c.Close()
				t.Errorf("port %d was dialled", port)
			}
		}
	}},
	{"P6", "a port that was asked for", func(t *testing.T, b *box) {
		l, u := b.listenInside()
		l.Close()
		port := portOf(t, u)
		r, _ := provider.As[provider.HostReacher](b.h)
		var again net.Listener
		var u2 string
		b.eventually(5*time.Second, "the port is free again", func() bool {
			var err error
			again, u2, err = r.ListenInside(b.ctx, port)
			return err == nil
		})
		if again == nil {
			return
		}
		defer again.Close()
		if u2 != u {
			t.Errorf("asked for %s, got %s", u, u2)
		}
		if l, _, err := r.ListenInside(b.ctx, port); err == nil {
			l.Close()
			t.Error("one port was opened twice")
		}
		accepted := make(chan error, 1)
		go func() {
			_, err := again.Accept()
			accepted <- err
		}()
		again.Close()
		if err := <-accepted; err == nil {
			t.Error("Accept goes on after Close")
		}
	}},
	{"P1", "exposed port", func(t *testing.T, b *box) {
		e, ok := provider.As[provider.Exposer](b.h)
		if !ok {
			b.lacks("exposing ports")
		}
		l, u := b.listenInside()
		defer l.Close()
		srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "hello "+r.URL.Path) })}
		go srv.Serve(l)
		defer srv.Close()
		exp, err := e.Expose(b.ctx, portOf(t, u))
		if errors.Is(err, errors.ErrUnsupported) || errors.Is(err, provider.ErrInvalid) {
			b.skip("the port is not published: %v", err) // P2: a typed error is the answer
		}
		if err != nil {
			t.Fatal(err)
		}
		req, err := http.NewRequestWithContext(b.ctx, http.MethodGet, exp.URL+"/path", nil)
		if err != nil {
			t.Fatal(err)
		}
		for k, v := range exp.Headers {
			req.Header.Set(k, v)
		}
		tr := &http.Transport{DisableKeepAlives: true}
		resp, err := tr.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if string(body) != "hello /path" {
			t.Errorf("%q, %v", body, err)
		}
	}},
}

func dialer(b *box) provider.Dialer {
	d, _ := provider.As[provider.Dialer](b.h)
	return d
}

func (b *box) dial(port int) net.Conn {
	c, err := dialer(b).Dial(b.ctx, port)
	if err != nil {
		b.t.Errorf("dial: %v", err)
		return nil
	}
	return c
}

func (b *box) listenInside() (net.Listener, string) {
	b.t.Helper()
	r, ok := provider.As[provider.HostReacher](b.h)
	if !ok {
		b.lacks("ports inside that lead to the host")
	}
	l, u, err := r.ListenInside(b.ctx, 0)
	if err != nil {
		b.t.Fatalf("listen inside: %v", err)
	}
	b.t.Cleanup(func() { l.Close() })
	return l, u
}

func portOf(t *testing.T, raw string) int {
	t.Helper()
	u, err := url.Parse(raw)
	if err != nil || u.Scheme != "http" || u.Hostname() != "127.0.0.1" {
		t.Fatalf("url %q: %v", raw, err)
	}
	port, err := strconv.Atoi(u.Port())
	if err != nil || port < 1 {
		t.Fatalf("url %q: %v", raw, err)
	}
	return port
}

// echo answers each connection with what it sends.
func echo(l net.Listener) {
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				io.Copy(c, c)
			}()
		}
	}()
}

// insideConnects lets a process inside speak with an echo behind a port.
func (b *box) insideConnects(port int, want bool) {
	b.t.Helper()
	if !b.has("bash") {
		b.skip("the sandbox has no bash to connect with")
	}
	r, err := b.exec(provider.Cmd{Argv: []string{"bash", "-c", `exec 3<>"/dev/tcp/127.0.0.1/$0" && echo "from inside" >&3 && head -n1 <&3`, strconv.Itoa(port)}})
	if err != nil || (r.out == "from inside\n") != want {
		b.t.Errorf("from inside: %+v, %v", r, err)
	}
}
