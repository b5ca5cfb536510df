package wire

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/aisandbox-go/aisandbox/provider"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestHello(t *testing.T) {
	for _, tt := range []struct {
		name        string
		host, guest int
	}{{"same", 7, 7}, {"older guest", 7, 6}, {"newer guest", 7, 300}} {
		t.Run(tt.name, func(t *testing.T) {
			a, b := net.Pipe()
			defer a.Close()
			defer b.Close()
			type answer struct {
				f   Facts
				err error
			}
			c := make(chan answer)
			go func() {
				f, err := hello(b, false, Facts{Pid: 42}, tt.guest)
				if err != nil {
					_ = b.Close()
				}
				c <- answer{f, err}
			}()
			f, err := hello(a, true, Facts{}, tt.host)
			guest := <-c
			if tt.host == tt.guest {
				if err != nil || guest.err != nil || f.Pid != 42 {
					t.Errorf("host %+v, %v; guest %v", f, err, guest.err)
				}
				return
			}
			for side, err := range map[string]error{"host": err, "guest": guest.err} {
				var pe *ProtocolError
				if !errors.As(err, &pe) || *pe != (ProtocolError{Host: tt.host, Guest: tt.guest}) {
					t.Errorf("%s: %v", side, err)
				}
			}
		})
	}
}

var full = Request{
	Op: OpLaunch, Flags: WantStdin | Follow, Argv: []string{"a", "", "\xff"}, Env: []string{"K=v"}, Dir: "/d", User: "u", Mark: "m",
	Rows: 1, Cols: 65535, Path: "p", Target: "t", Mode: 0o755, Names: []string{".git"}, Port: -1, Token: "tok", RunID: "run",
	Nonce: []byte{0, 1}, Signal: 9, Offset: 1 << 40,
}

func TestRequest(t *testing.T) {
	got, err := DecodeRequest(full.Encode(nil))
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(&full, got); d != "" {
		t.Error(d)
	}
	b := full.Encode(nil)
	for i := range b {
		if _, err := DecodeRequest(b[:i]); err == nil {
			t.Errorf("cut at %d it decodes", i)
		}
	}
	if _, err := DecodeRequest(append(b, 0)); err == nil {
		t.Error("with a byte more it decodes")
	}
}

func FuzzRequest(f *testing.F) {
	f.Add(full.Encode(nil))
	f.Add((&Request{Op: OpLstat}).Encode(nil))
	f.Add([]byte{1, 0, 255, 255, 255, 255, 15})
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := DecodeRequest(b)
		if err != nil {
			return
		}
		again, err := DecodeRequest(r.Encode(nil))
		if err != nil || !cmp.Equal(r, again) {
			t.Errorf("%+v became %+v, %v", r, again, err)
		}
	})
}

func TestErrors(t *testing.T) {
	for _, err := range []error{
		&fs.PathError{Op: "open", Path: "x\xff", Err: syscall.ENOENT},
		&fs.PathError{Op: "open", Path: "x", Err: fmt.Errorf("outside: %w", fs.ErrPermission)},
		fmt.Errorf("launch: %w", provider.ErrAlreadyLaunched),
		fmt.Errorf("a: %w: %w", provider.ErrInvalid, errors.ErrUnsupported),
		&fs.PathError{Op: "write", Path: "x", Err: syscall.ENOSPC},
		errors.New(strings.Repeat("long", 10000)),
	} {
		got := DecodeError(EncodeError(err))
		if len(err.Error()) < 1000 && got.Error() != err.Error() {
			t.Errorf("%q became %q", err, got)
		}
		for _, k := range append(kinds[1:], syscall.ENOENT, syscall.ENOSPC) {
			if errors.Is(err, k) && !errors.Is(got, k) {
				t.Errorf("%v is no longer %v", err, k)
			}
		}
		var a, b *fs.PathError
		if errors.As(err, &a) != errors.As(got, &b) || a != nil && (a.Op != b.Op || a.Path != b.Path) {
			t.Errorf("path error %v became %v", a, b)
		}
	}
	if !errors.Is(DecodeError(EncodeError(syscall.ENOSPC)), provider.ErrNoSpace) {
		t.Error("a full disk is not ErrNoSpace")
	}
	if errors.Is(DecodeError(EncodeError(io.EOF)), fs.ErrNotExist) {
		t.Error("an error became another")
	}
}

func FuzzError(f *testing.F) {
	f.Add(EncodeError(&fs.PathError{Op: "open", Path: "x", Err: syscall.ENOENT}))
	f.Add([]byte{255})
	f.Fuzz(func(t *testing.T, b []byte) {
		if err := DecodeError(b); err == nil || err.Error() == "" && len(b) == 0 {
			t.Errorf("%x is no error", b)
		}
	})
}

// pair returns both ends of a connection, the guest's answering with f.
func pair(t *testing.T, f func(*Link)) *Mux {
	t.Helper()
	a, b := net.Pipe()
	host := NewMux(a, true, func(l *Link) { l.Abort() })
	guest := NewMux(b, false, func(l *Link) {
		defer l.Abort()
		if _, _, err := l.Recv(); err == nil {
			f(l)
		}
	})
	t.Cleanup(func() {
		host.Close()
		guest.Close()
	})
	return host
}

func open(t *testing.T, m *Mux) *Link {
	t.Helper()
	l, err := m.Open()
	if err != nil {
		t.Fatal(err)
	}
	if err := l.SendRequest(&Request{Op: OpLstat}); err != nil {
		t.Fatal(err)
	}
	return l
}

func TestMuxEcho(t *testing.T) {
	m := pair(t, func(l *Link) {
		for {
			typ, b, err := l.Recv()
			if err != nil {
				return
			}
			if typ == FEnd {
				_ = l.Send(FReply, []byte("bye"))
				return
			}
			if l.Send(typ, b) != nil {
				return
			}
		}
	})
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			l := open(t, m)
			want := bytes.Repeat([]byte{byte(i)}, 1<<20)
			go func() {
				_ = l.Send(FData, want)
				_ = l.Send(FEnd, nil)
			}()
			var got []byte
			for {
				typ, b, err := l.Recv()
				if err != nil {
					t.Error(err)
					return
				}
				if typ == FReply {
					if string(b) != "bye" {
						t.Errorf("reply %q", b)
					}
					break
				}
				got = append(got, b...)
			}
			if !bytes.Equal(got, want) {
				t.Errorf("link %d: %d bytes of %d", i, len(got), len(want))
			}
			if _, _, err := l.Recv(); err != io.EOF {
				t.Errorf("after the last frame: %v", err)
			}
		})
	}
	wg.Wait()
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.links) != 0 {
		t.Errorf("%d links are left", len(m.links))
	}
}

// TestCredit: a link that nobody reads holds up neither others nor its own other
// channel, and holds no more than its window.
func TestCredit(t *testing.T) {
	sent := make(chan FrameType, 10)
	m := pair(t, func(l *Link) {
		var wg sync.WaitGroup
		for _, typ := range []FrameType{FData, FStderr} {
			wg.Go(func() {
				if l.Send(typ, make([]byte, 4*Window)) == nil {
					sent <- typ
				}
			})
		}
		wg.Wait()
		_ = l.Send(FReply, nil)
	})
	stuck := open(t, m) // its frames are never read
	l := open(t, m)
	data := 0
	for data < 4*Window {
		typ, b, err := l.RecvOwing()
		if err != nil {
			t.Fatal(err)
		}
		if typ == FData { // stderr is never consumed
			data += len(b)
			l.Consumed(FData, len(b))
		}
	}
	if typ := <-sent; typ != FData {
		t.Errorf("%d was sent whole", typ)
	}
	held := func() (n int) {
		stuck.mu.Lock()
		defer stuck.mu.Unlock()
		for _, f := range stuck.inbox {
			n += len(f.b)
		}
		return n
	}
	for deadline := time.Now().Add(5 * time.Second); held() < 2*Window; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d bytes arrived", held())
		}
	}
	if n := held(); n != 2*Window {
		t.Errorf("%d bytes are held", n)
	}
	l.Abort()
	stuck.Abort()
}

func TestAbortReachesTheOtherSide(t *testing.T) {
	ended := make(chan error, 1)
	m := pair(t, func(l *Link) { ended <- l.Send(FData, make([]byte, 4*Window)) })
	l := open(t, m)
	if _, _, err := l.Recv(); err != nil {
		t.Fatal(err)
	}
	l.Abort()
	if err := <-ended; !errors.Is(err, ErrClosed) {
		t.Errorf("Send: %v", err)
	}
	if _, _, err := l.Recv(); err != io.EOF {
		t.Errorf("Recv after Abort: %v", err)
	}
}

func TestConnectionEnds(t *testing.T) {
	a, b := net.Pipe()
	m := NewMux(a, true, func(l *Link) { l.Abort() })
	other := NewMux(b, false, func(l *Link) { _, _, _ = l.Recv(); _, _, _ = l.Recv() })
	l := open(t, m)
	got := make(chan error)
	go func() {
		_, _, err := l.Recv()
		got <- err
	}()
	other.Close()
	if err := <-got; !errors.Is(err, errBroken) {
		t.Errorf("Recv: %v", err)
	}
	<-m.Done()
	if _, err := m.Open(); !errors.Is(err, errBroken) || m.Err() == nil {
		t.Errorf("Open: %v", err)
	}
	m.Close()
	m.Close()
}

func TestRubbishEndsTheConnection(t *testing.T) {
	for name, b := range map[string][]byte{
		"type 0":        {0, 0, 0, 2, 0, 0, 0, 0},
		"unknown type":  {0, 0, 0, 2, 200, 0, 0, 0},
		"long":          {0, 0, 0, 2, byte(FData), 0xff, 0xff, 0xff},
		"bad credit":    {0, 0, 0, 3, byte(FCredit), 0, 0, 1, 9},
		"beyond credit": bytes.Repeat(append([]byte{0, 0, 0, 3, byte(FData), 0, 0x80, 0}, make([]byte, 0x8000)...), Window/0x8000+1),
	} {
		t.Run(name, func(t *testing.T) {
			a, c := net.Pipe()
			defer c.Close()
			m := NewMux(a, true, func(l *Link) { l.Abort() })
			defer m.Close()
			l, err := m.Open() // number 3
			if err != nil {
				t.Fatal(err)
			}
			_, _ = c.Write(b)
			if _, _, err := l.RecvOwing(); name != "beyond credit" && !errors.Is(err, errBroken) {
				t.Errorf("Recv: %v", err)
			}
			<-m.Done()
		})
	}
}

func FuzzMux(f *testing.F) {
	f.Add([]byte{0, 0, 0, 3, byte(FData), 0, 0, 1, 'x'})
	f.Add([]byte{0, 0, 0, 3, byte(FReply), 0, 0, 0, 0, 0, 0, 3, byte(FData), 0, 0, 0})
	f.Add([]byte{0, 0, 0, 4, byte(FRequest), 0, 0, 2, 1, 1, 0, 0, 0, 1, byte(FSignal), 0, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		c := &feed{r: bytes.NewReader(b)}
		m := NewMux(c, true, func(l *Link) { _, _, _ = l.Recv(); l.Abort() })
		if l, err := m.Open(); err == nil {
			for err == nil {
				_, _, err = l.Recv()
			}
		}
		m.Close()
	})
}

// feed is a connection that says something and ends.
type feed struct{ r io.Reader }

func (f *feed) Read(b []byte) (int, error)  { return f.r.Read(b) }
func (f *feed) Write(b []byte) (int, error) { return len(b), nil }
func (f *feed) Close() error                { return nil }

func TestConn(t *testing.T) {
	m := pair(t, func(l *Link) {
		c := NewConn(l)
		defer c.Close()
		b, err := io.ReadAll(c)
		if err != nil {
			return
		}
		_, _ = c.Write(bytes.ToUpper(b))
	})
	c := NewConn(open(t, m))
	if _, err := io.WriteString(c, "hello"); err != nil {
		t.Fatal(err)
	}
	_ = c.SetReadDeadline(time.Now().Add(10 * time.Millisecond))
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("Read past its deadline: %v", err)
	}
	_ = c.SetReadDeadline(time.Time{})
	if err := c.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(c); string(b) != "HELLO" || err != nil {
		t.Errorf("%q, %v", b, err)
	}
	if _, err := c.Write([]byte("x")); !errors.Is(err, net.ErrClosed) {
		t.Errorf("Write after CloseWrite: %v", err)
	}
	c.Close()

	broken := NewConn(open(t, m))
	ctx, cancel := context.WithCancel(t.Context())
	stop := context.AfterFunc(ctx, func() { broken.Close() })
	cancel()
	if _, err := broken.Read(make([]byte, 1)); err == nil {
		t.Error("Read went on after Close")
	}
	stop()
}
