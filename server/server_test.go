package server_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"iter"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/aisandbox-go/aisandbox/chat"
	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/server"
	"github.com/aisandbox-go/aisandbox/store"
	"github.com/aisandbox-go/aisandbox/store/memstore"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// agent is a scripted adapter that counts what is started of it.
type agent struct {
	// play is the turn of a run. It ends when it returns, or ctx is done.
	play func(ctx context.Context, r *chat.Run, say func(...event.Event))

	mu      sync.Mutex
	starts  map[string]int // by run id
	order   []string
	now     int // at work
	most    int
	inputs  []server.RunInput
	prompts map[string][]event.Message
}

func (a *agent) request(_ context.Context, in server.RunInput) (chat.Request, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.inputs = append(a.inputs, in)
	return chat.Request{Adapter: a}, nil
}

func (*agent) Name() string           { return "scripted" }
func (*agent) Needs() []chat.AnyToken { return nil }
func (*agent) Model() string          { return "sonnet" }

func (a *agent) Stream(ctx context.Context, r *chat.Run) iter.Seq2[chat.Item, error] {
	return func(yield func(chat.Item, error) bool) {
		a.mu.Lock()
		if a.starts == nil {
			a.starts, a.prompts = map[string]int{}, map[string][]event.Message{}
		}
		a.starts[r.ID()]++
		a.order = append(a.order, r.ID())
		a.prompts[r.ID()] = r.Request().Messages
		a.now++
		a.most = max(a.most, a.now)
		a.mu.Unlock()
		defer func() { a.mu.Lock(); a.now--; a.mu.Unlock() }()
		a.play(ctx, r, func(evs ...event.Event) {
			for _, ev := range evs {
				yield(chat.Item{Event: ev}, nil)
			}
		})
	}
}

func (a *agent) started() (order []string, most int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return append([]string(nil), a.order...), a.most
}

func text(id, s string) []event.Event {
	return []event.Event{
		event.TextMessageStart{MessageID: id, Role: "assistant"},
		event.TextMessageContent{MessageID: id, Delta: s},
		event.TextMessageEnd{MessageID: id},
	}
}

var finished = func() event.Event {
	ev := event.RunFinished{Outcome: &event.Outcome{Type: "success"}}
	ev.Metadata = event.TanStack{FinishReason: "stop"}.Metadata()
	return ev
}()

// says ends at once; hangs waits for the end of its context first.
func says(evs ...event.Event) *agent {
	return &agent{play: func(_ context.Context, _ *chat.Run, say func(...event.Event)) { say(evs...) }}
}

func hangs(evs ...event.Event) *agent {
	return &agent{play: func(ctx context.Context, _ *chat.Run, say func(...event.Event)) {
		say(evs...)
		<-ctx.Done()
	}}
}

// gated says evs, waits for a token or its end, and finishes.
func gated(gate <-chan struct{}, evs ...event.Event) *agent {
	return &agent{play: func(ctx context.Context, r *chat.Run, say func(...event.Event)) {
		say(text(r.ID()+"-m", "hello from "+r.ID())...)
		say(evs...)
		select {
		case <-gate:
			say(finished)
		case <-ctx.Done():
		}
	}}
}

// house is a server under test.
type house struct {
	*server.Server
	store store.Set
}

func newHouse(t *testing.T, a *agent, change func(*server.Config)) *house {
	t.Helper()
	cfg := server.Config{
		Definitions: map[string]server.Definition{"demo": {Request: a.request}},
		Store:       memstore.New(memstore.Options{}),
		Owner:       "host",
	}
	if change != nil {
		change(&cfg)
	}
	s, err := server.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, stop := context.WithTimeout(context.Background(), 10*time.Second)
		defer stop()
		if err := s.Shutdown(ctx); err != nil {
			t.Errorf("shutdown: %v", err)
		}
	})
	return &house{s, cfg.Store}
}

// listen serves the house on a real port.
func (h *house) listen(t *testing.T) string {
	t.Helper()
	srv := httptest.NewServer(h)
	t.Cleanup(func() {
		ctx, stop := context.WithTimeout(context.Background(), 10*time.Second)
		defer stop()
		if err := h.Shutdown(ctx); err != nil {
			t.Errorf("shutdown: %v", err)
		}
		srv.CloseClientConnections()
		srv.Close()
		http.DefaultClient.CloseIdleConnections()
	})
	return srv.URL
}

const chatPath = "/v1/chat/demo"

func body(thread, run string, prompts ...string) string {
	in := map[string]any{"threadId": thread, "runId": run, "state": map[string]any{}, "tools": []any{}, "context": []any{}, "forwardedProps": map[string]any{}}
	msgs := []any{}
	for i, p := range prompts {
		msgs = append(msgs, map[string]any{"id": fmt.Sprintf("%s-u%d", run, i), "role": "user", "content": p})
	}
	in["messages"] = msgs
	b, err := json.Marshal(in)
	if err != nil {
		panic(err)
	}
	return string(b)
}

type reqOption func(*http.Request)

func header(kv ...string) reqOption {
	return func(r *http.Request) {
		for i := 0; i < len(kv); i += 2 {
			if kv[i] == "Host" {
				r.Host = kv[i+1]
				continue
			}
			r.Header.Set(kv[i], kv[i+1])
		}
	}
}

// do answers a request in memory; it returns when the response is complete.
func (h *house) do(t *testing.T, method, path, body string, opts ...reqOption) *httptest.ResponseRecorder {
	t.Helper()
	r := httptest.NewRequest(method, path, strings.NewReader(body))
	r = r.WithContext(t.Context())
	r.Host = "localhost:8080"
	if method == http.MethodPost {
		r.Header.Set("Content-Type", "application/json")
	}
	for _, o := range opts {
		o(r)
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

func (h *house) post(t *testing.T, body string, opts ...reqOption) *httptest.ResponseRecorder {
	t.Helper()
	return h.do(t, http.MethodPost, chatPath, body, opts...)
}

func wantStatus(t *testing.T, w *httptest.ResponseRecorder, status int, code string) {
	t.Helper()
	var b struct {
		Error struct{ Code, Message string }
	}
	if code != "" {
		if err := json.Unmarshal(w.Body.Bytes(), &b); err != nil {
			t.Errorf("body %q: %v", w.Body, err)
		}
	}
	if w.Code != status || b.Error.Code != code || code != "" && b.Error.Message == "" {
		t.Errorf("got %d %s, want %d %q", w.Code, w.Body, status, code)
	}
}

// frame is an event as it came.
type frame struct {
	id  string
	ev  event.Event
	raw string
}

func frames(t *testing.T, r io.Reader) []frame {
	t.Helper()
	var out []frame
	id := ""
	for f, err := range event.ReadSSE(r) {
		if err != nil {
			t.Fatal(err)
		}
		ev, err := event.Decode(f.Data)
		if err != nil {
			t.Fatalf("%s: %v", f.Data, err)
		}
		x := frame{ev: ev, raw: string(f.Data)}
		if f.ID != id { // an id line of its own
			x.id, id = f.ID, f.ID
		}
		out = append(out, x)
	}
	return out
}

func show(ev event.Event) string {
	switch e := ev.(type) {
	case event.Custom:
		if q, ok := event.CustomOf[event.RunQueued](ev, event.NameRunQueued); ok {
			return fmt.Sprint("queued ", q.Position)
		}
		return e.Name
	case event.TextMessageContent:
		return "text:" + e.Delta
	case event.RunError:
		return "RUN_ERROR " + e.Code
	}
	return string(ev.Type())
}

func shown(fs []frame) []string {
	var out []string
	for _, f := range fs {
		out = append(out, show(f.ev))
	}
	return out
}

// legal checks a whole stream as the strictest client would.
func legal(t *testing.T, fs []frame) {
	t.Helper()
	var evs []event.Event
	for _, f := range fs {
		evs = append(evs, f.ev)
	}
	if err := event.Validate(evs); err != nil {
		t.Errorf("stream: %v", err)
	}
	if len(fs) < 2 || show(fs[0].ev) != "RUN_STARTED" || show(fs[1].ev) != "run.accepted" {
		t.Errorf("it begins with %v", shown(fs[:min(2, len(fs))]))
	}
}

// stream is an open response.
type stream struct {
	t    *testing.T
	resp *http.Response
	next func() (event.Frame, error, bool)
	stop func()
	id   string // the last one
}

func open(t *testing.T, method, url, body string, opts ...reqOption) *stream {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	req, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if method == http.MethodPost {
		req.Header.Set("Content-Type", "application/json")
	}
	for _, o := range opts {
		o(req)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		cancel()
		t.Fatal(err)
	}
	s := &stream{t: t, resp: resp}
	next, stop := iter.Pull2(event.ReadSSE(resp.Body))
	s.next, s.stop = next, func() { cancel(); stop(); _ = resp.Body.Close() }
	t.Cleanup(s.stop)
	return s
}

// until reads to an event and returns what came.
func (s *stream) until(want string) []string {
	s.t.Helper()
	var got []string
	for {
		f, err, ok := s.next()
		if !ok || err != nil {
			s.t.Fatalf("%q never came, but %v: %v", want, got, err)
		}
		s.id = f.ID
		ev, err := event.Decode(f.Data)
		if err != nil {
			s.t.Fatal(err)
		}
		got = append(got, show(ev))
		if show(ev) == want {
			return got
		}
	}
}

// rest reads to the end.
func (s *stream) rest() []string {
	s.t.Helper()
	var got []string
	for {
		f, err, ok := s.next()
		if !ok || err != nil {
			return got
		}
		s.id = f.ID
		ev, err := event.Decode(f.Data)
		if err != nil {
			s.t.Fatal(err)
		}
		got = append(got, show(ev))
	}
}

// eventually waits for a condition that nothing announces.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	late := time.After(10 * time.Second)
	for !ok() {
		select {
		case <-tick.C:
		case <-late:
			t.Fatalf("timeout: %s", what)
		}
	}
}

func (h *house) record(t *testing.T, id string) store.Run {
	t.Helper()
	r, err := h.store.Runs.Get(context.WithoutCancel(t.Context()), id)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func (h *house) status(t *testing.T, id string) store.Status {
	t.Helper()
	r, err := h.store.Runs.Get(t.Context(), id)
	if err != nil {
		return ""
	}
	return r.Status
}

// exchange is one of a recorded file.
type exchange struct {
	method, target string
	headers        http.Header
	body           string
	respBody       string
}

func exchanges(t *testing.T, file string) []exchange {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join("testdata", "wire", file))
	if err != nil {
		t.Fatal(err)
	}
	var out []exchange
	for part := range bytes.SplitSeq(raw, []byte("\n========================================\n")) {
		req, resp, _ := strings.Cut(string(part), "\n--- RESPONSE ---\n")
		head, body, _ := strings.Cut(req, "\n\n")
		lines := strings.Split(head, "\n")
		f := strings.Fields(lines[0])
		if len(f) != 3 {
			continue // a response alone
		}
		x := exchange{method: f[0], target: f[1], headers: http.Header{}, body: strings.TrimSpace(body)}
		for _, l := range lines[1:] {
			k, v, _ := strings.Cut(l, ": ")
			x.headers.Add(k, v)
		}
		if _, b, ok := strings.Cut(resp, "\n\n"); ok {
			b, _, _ = strings.Cut(b, "\n--- ")
			x.respBody = b
		}
		out = append(out, x)
	}
	return out
}
