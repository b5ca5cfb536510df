package watch

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/provider/local"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// handle is a sandbox of the local provider, with a PATH of its own choice.
type handle struct {
	provider.Handle
	path  string
	start func(provider.Cmd) error
}

func (h *handle) Start(ctx context.Context, cmd provider.Cmd) (provider.Process, error) {
	if h.start != nil {
		if err := h.start(cmd); err != nil {
			return nil, err
		}
	}
	if h.path != "" {
		cmd.Env = append([]string{"PATH=" + h.path}, cmd.Env...)
	}
	return h.Handle.Start(ctx, cmd)
}

func newHandle(t *testing.T) *handle {
	t.Helper()
	p := local.New(local.Options{BaseDir: t.TempDir()})
	h, err := p.Create(t.Context(), provider.Spec{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(h.Close(), p.Destroy(context.Background(), h.Ref())); err != nil {
			t.Error(err)
		}
	})
	return &handle{Handle: h}
}

// busyboxPath is a PATH whose every tool is busybox's.
func busyboxPath(t *testing.T) string {
	bin, err := exec.LookPath("busybox")
	if err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatal("busybox is not installed")
		}
		t.Skip("busybox is not installed")
	}
	dir := t.TempDir()
	if out, err := exec.Command(bin, "--install", "-s", dir).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return dir
}

// recorder collects events and waits for them.
type recorder struct {
	mu   sync.Mutex
	cond *sync.Cond
	evs  []Event
}

func newRecorder() *recorder {
	r := &recorder{}
	r.cond = sync.NewCond(&r.mu)
	return r
}

func (r *recorder) add(ev Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.evs = append(r.evs, ev)
	r.cond.Broadcast()
}

// wait waits until the event was seen.
func (r *recorder) wait(t *testing.T, typ provider.ChangeType, path string) {
	t.Helper()
	late := time.AfterFunc(10*time.Second, func() { r.mu.Lock(); defer r.mu.Unlock(); r.cond.Broadcast() })
	defer late.Stop()
	deadline := time.Now().Add(10 * time.Second)
	r.mu.Lock()
	defer r.mu.Unlock()
	for {
		for _, ev := range r.evs {
			if ev.Type == typ && ev.Path == path {
				return
			}
		}
		if time.Now().After(deadline) {
			t.Fatalf("no %s of %s in %v", typ, path, r.evs)
		}
		r.cond.Wait()
	}
}

func (r *recorder) list(root string) []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []string
	for _, ev := range r.evs {
		out = append(out, string(ev.Type)+" "+strings.TrimPrefix(ev.Path, root+"/"))
	}
	return out
}

func put(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	for name, text := range files {
		p := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// Both kinds of find see the same things, with any name, and nothing of what is ignored.
func TestPoll(t *testing.T) {
	for _, kind := range []string{"gnu", "busybox"} {
		t.Run(kind, func(t *testing.T) {
			h := newHandle(t)
			if kind == "busybox" {
				h.path = busyboxPath(t)
			}
			root := h.Root()
			put(t, root, map[string]string{"old": "1", "gone": "1", "node_modules/x": "1", "a/.git/x": "1"})
			rec := newRecorder()
			w, err := Start(t.Context(), h, Options{Poll: true, Interval: 20 * time.Millisecond, OnEvent: rec.add})
			if err != nil {
				t.Fatal(err)
			}
			put(t, root, map[string]string{"new": "1", "d/ sp\nline": "1", "*[x]?": "1", "-name": "1", "old": "22", "node_modules/y": "1", "a/.git/y": "1"})
			if err := errors.Join(os.Remove(root+"/gone"), os.Symlink("/nowhere", root+"/link"), os.Mkdir(root+"/empty", 0o755)); err != nil {
				t.Fatal(err)
			}
			for name, typ := range map[string]provider.ChangeType{
				"new": "create", "d/ sp\nline": "create", "*[x]?": "create", "-name": "create", "link": "create", "old": "change", "gone": "delete",
			} {
				rec.wait(t, typ, root+"/"+name)
			}
			put(t, root, map[string]string{"last": "x"}) // only the last sweep sees it in time
			if err := w.Stop(t.Context()); err != nil {
				t.Fatal(err)
			}
			got := map[string]int{}
			for _, e := range rec.list(root) {
				got[e]++
			}
			want := map[string]int{"create new": 1, "create d/ sp\nline": 1, "create *[x]?": 1, "create -name": 1, "create link": 1, "change old": 1, "delete gone": 1, "create last": 1}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Error(diff)
			}
			if err := w.Stop(t.Context()); err != nil {
				t.Error("second Stop:", err)
			}
		})
	}
}

// script is a handle whose listings are made up.
type script struct {
	provider.Handle
	mu    sync.Mutex
	outs  []listing
	calls int
	busy  bool
}

type listing struct {
	out  string
	code int
	err  error
}

type fakeProc struct {
	s *script
	l listing
}

func (p fakeProc) Wait() (provider.Exit, error) {
	p.s.mu.Lock()
	defer p.s.mu.Unlock()
	p.s.busy = false
	return provider.Exit{Code: p.l.code}, nil
}

func (fakeProc) Signal(os.Signal) error { return nil }

func (s *script) Root() string { return "/w" }

func (s *script) Start(_ context.Context, cmd provider.Cmd) (provider.Process, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.busy {
		panic("two polls at once")
	}
	l := s.outs[min(s.calls, len(s.outs)-1)]
	s.calls++
	if l.err != nil {
		return nil, l.err
	}
	s.busy = true
	_, _ = cmd.Stdout.Write([]byte(l.out))
	return fakeProc{s, l}, nil
}

func rec(files ...string) string {
	var b strings.Builder
	for _, f := range files {
		b.WriteString(f + "\x00")
	}
	return b.String()
}

func TestPollFailures(t *testing.T) {
	a, b, a2 := "1 ./a", "1 ./b", "2 ./a"
	broken := listing{err: errors.New("no answer")}
	for name, c := range map[string]struct {
		outs []listing
		want []string
	}{
		"plain":                   {[]listing{{out: rec(a)}, {out: rec(a, b)}, {out: rec(a2)}}, []string{"create /w/b", "change /w/a", "delete /w/b"}},
		"failure keeps state":     {[]listing{{out: rec(a)}, broken, {code: 1}, {out: rec(a)}}, nil},
		"failed first is silent":  {[]listing{broken, {out: rec(a)}, {out: rec(a, b)}}, []string{"create /w/b"}},
		"partial deletes nothing": {[]listing{{out: rec(a, b)}, {out: rec(a2), code: 1}, {out: rec(a2)}}, []string{"change /w/a", "delete /w/b"}},
		"partial first":           {[]listing{{out: rec(a), code: 1}, {out: rec(a, b)}, {out: rec(b)}}, []string{"delete /w/a"}},
		"empty tree":              {[]listing{{out: rec(a)}, {out: ""}}, []string{"delete /w/a"}},
		"cut record":              {[]listing{{out: rec(a)}, {out: rec(a) + "1 ./hal"}}, nil},
	} {
		s := &script{outs: c.outs}
		var got []string
		send := func(ch provider.Change) { got = append(got, string(ch.Type)+" "+ch.Path) }
		o := Options{Root: "/w", Ignore: DefaultIgnore(), Logger: nil}
		o.Logger = discard()
		p := newPoller(t.Context(), s, o)
		for s.calls < len(c.outs) {
			p.poll(t.Context(), send)
		}
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}

func TestSettle(t *testing.T) {
	type step struct {
		ms   int
		kind provider.ChangeType // empty: only time passes
	}
	for name, c := range map[string]struct {
		steps []step
		want  []string
	}{
		"one change":      {[]step{{0, "change"}}, []string{"0 change"}},
		"leading edge":    {[]step{{0, "create"}, {10, "change"}, {50, "change"}}, []string{"0 create", "150 change"}},
		"rewrite":         {[]step{{0, "delete"}, {10, "create"}}, []string{"110 change"}},
		"real delete":     {[]step{{0, "delete"}}, []string{"30 delete"}},
		"short life":      {[]step{{0, "create"}, {10, "delete"}}, []string{"0 create", "110 delete"}},
		"back again":      {[]step{{0, "delete"}, {60, "create"}}, []string{"30 delete", "160 create"}},
		"quiet again":     {[]step{{0, "change"}, {300, "change"}}, []string{"0 change", "300 change"}},
		"born and buried": {[]step{{0, "delete"}, {40, "create"}, {50, "delete"}}, []string{"30 delete"}},
	} {
		start := time.Unix(1000, 0)
		var got []string
		emit := func(ev Event) {
			got = append(got, fmt.Sprintf("%d %s", ev.Time.Sub(start).Milliseconds(), ev.Type))
		}
		s := newSettler()
		run := func(to time.Time) {
			for len(s.due) > 0 && !s.due[0].at.After(to) {
				s.expire(s.due[0].at, emit)
			}
		}
		for _, st := range c.steps {
			now := start.Add(time.Duration(st.ms) * time.Millisecond)
			run(now)
			s.add(provider.Change{Type: st.kind, Path: "/p"}, now, emit)
		}
		run(start.Add(time.Minute))
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
		if len(s.paths) != 0 {
			t.Errorf("%s: %d paths are kept", name, len(s.paths))
		}
	}
}

// A path that never rests is told of once a second.
func TestSettleBusyPath(t *testing.T) {
	s, start := newSettler(), time.Unix(0, 0)
	n := 0
	for ms := 0; ms < 5000; ms += 10 {
		now := start.Add(time.Duration(ms) * time.Millisecond)
		s.expire(now, func(Event) { n++ })
		s.add(provider.Change{Type: provider.ChangeModify, Path: "/p"}, now, func(Event) { n++ })
	}
	if n < 5 || n > 6 {
		t.Errorf("%d events in 5 s", n)
	}
}

func TestQueueMerges(t *testing.T) {
	for name, c := range map[string]struct {
		in   []provider.ChangeType
		want provider.ChangeType // empty: nothing
	}{
		"create, change": {[]provider.ChangeType{"create", "change"}, "create"},
		"create, delete": {[]provider.ChangeType{"create", "delete"}, ""},
		"change, delete": {[]provider.ChangeType{"change", "delete"}, "delete"},
		"delete, create": {[]provider.ChangeType{"delete", "create"}, "change"},
	} {
		q := newQueue()
		for _, k := range c.in {
			q.push(Event{Type: k, Path: "/p"})
		}
		q.close()
		ev, ok := q.next()
		if ok != (c.want != "") || ev.Type != c.want {
			t.Errorf("%s: %v, %v", name, ev, ok)
		}
	}
}

// nativeHandle watches by itself.
type nativeHandle struct {
	*handle
	w   *nativeWatch
	err error
}

func (h nativeHandle) Watch(context.Context, string, provider.WatchOptions) (provider.Watch, error) {
	return h.w, h.err
}

type nativeWatch struct{ ch chan provider.Change }

func (w *nativeWatch) Changes() iter.Seq2[provider.Change, error] {
	return func(yield func(provider.Change, error) bool) {
		for c := range w.ch {
			if !yield(c, nil) {
				return
			}
		}
	}
}

func (w *nativeWatch) Stop(context.Context) error {
	w.ch <- provider.Change{Type: provider.ChangeModify, Path: "/w/last"}
	close(w.ch)
	return nil
}

func TestNative(t *testing.T) {
	nw := &nativeWatch{make(chan provider.Change, 10)}
	r := newRecorder()
	w, err := Start(t.Context(), nativeHandle{handle: newHandle(t), w: nw}, Options{Root: "/w", OnEvent: r.add})
	if err != nil {
		t.Fatal(err)
	}
	nw.ch <- provider.Change{Type: provider.ChangeCreate, Path: "/w/a"}
	nw.ch <- provider.Change{Type: provider.ChangeCreate, Path: "/w/node_modules/a"}
	r.wait(t, provider.ChangeCreate, "/w/a")
	if err := w.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"create a", "change last"}, r.list("/w")); diff != "" {
		t.Error(diff)
	}
	// One that can't is no reason not to watch.
	h := newHandle(t)
	r = newRecorder()
	w, err = Start(t.Context(), nativeHandle{handle: h, err: errors.ErrUnsupported}, Options{Interval: 10 * time.Millisecond, OnEvent: r.add})
	if err != nil {
		t.Fatal(err)
	}
	put(t, h.Root(), map[string]string{"x": "1"})
	r.wait(t, provider.ChangeCreate, h.Root()+"/x")
	if err := w.Stop(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestStartRefuses(t *testing.T) {
	dead, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Start(dead, newHandle(t), Options{}); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if _, err := Start(t.Context(), newHandle(t), Options{Ignore: []string{"a/b"}}); !errors.Is(err, provider.ErrInvalid) {
		t.Error(err)
	}
}

func TestWithheld(t *testing.T) {
	want := map[string]bool{".env": true, "a/.env.local": true, "k.PEM": true, "id_rsa": true, ".npmrc": true, "x/.netrc": true, "env": false, "a/.envrc": true, "pem": false, "valid_id": false}
	got := map[string]bool{}
	for n := range maps.Keys(want) {
		got[n] = Withheld(n)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}
