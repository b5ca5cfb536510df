package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/aisandbox-go/aisandbox/event"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// answers is a server that gives one answer for each connection, the last one
// forever, and notes where each read on from.
type answers struct {
	mu    sync.Mutex
	acts  []func(w http.ResponseWriter, r *http.Request)
	froms []string
	ended bool // what the record says
}

func (s *answers) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if strings.HasPrefix(r.URL.Path, "/v1/runs/") {
		rec := record{RunID: "r", Sandbox: "box", StartedAt: 1}
		if s.ended {
			rec.FinishedAt = 2
		}
		_ = json.NewEncoder(w).Encode(rec)
		return
	}
	s.mu.Lock()
	s.froms = append(s.froms, r.Header.Get("Last-Event-Id"))
	act := s.acts[0]
	if len(s.acts) > 1 {
		s.acts = s.acts[1:]
	}
	s.mu.Unlock()
	act(w, r)
}

// says sends events from a to b, the third being the terminal one.
func says(w http.ResponseWriter, a, b int) {
	w.Header().Set("Content-Type", "text/event-stream")
	for i := a; i <= b; i++ {
		ev := `{"type":"CUSTOM","name":"n","value":1}`
		if i == 3 {
			ev = `{"type":"RUN_FINISHED","threadId":"t","runId":"r"}`
		}
		_, _ = fmt.Fprintf(w, "id: o%d\ndata: %s\n\n", i, ev)
	}
	_ = http.NewResponseController(w).Flush()
}

func say(a, b int) func(http.ResponseWriter, *http.Request) {
	return func(w http.ResponseWriter, _ *http.Request) { says(w, a, b) }
}

func cut(a, b int) func(http.ResponseWriter, *http.Request) {
	return func(w http.ResponseWriter, _ *http.Request) { says(w, a, b); panic(http.ErrAbortHandler) }
}

func hang(a, b int) func(http.ResponseWriter, *http.Request) {
	return func(w http.ResponseWriter, r *http.Request) { says(w, a, b); <-r.Context().Done() }
}

func status(code int, name string) func(http.ResponseWriter, *http.Request) {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(code)
		_, _ = fmt.Fprintf(w, `{"error":{"code":%q,"message":"no"}}`, name)
	}
}

func clientOf(t *testing.T, h http.Handler) *client {
	t.Helper()
	srv := httptest.NewServer(h)
	t.Cleanup(srv.Close)
	a := &app{err: io.Discard, getenv: func(string) string { return "" }}
	c, err := a.client(srv.URL)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.http.CloseIdleConnections)
	c.idle, c.first, c.most, c.patience = 300*time.Millisecond, time.Millisecond, 5*time.Millisecond, 2*time.Second
	return c
}

func TestEvents(t *testing.T) {
	all := []string{"o1", "o2", "o3"}
	for _, tc := range []struct {
		name  string
		acts  []func(http.ResponseWriter, *http.Request)
		ended bool
		from  string
		want  []string
		froms []string
		code  string // of the error
	}{
		{name: "whole", acts: []func(http.ResponseWriter, *http.Request){say(1, 3)}, want: all, froms: []string{"-1"}},
		{name: "cut", acts: []func(http.ResponseWriter, *http.Request){cut(1, 1), cut(2, 1), cut(2, 2), say(3, 3)}, want: all, froms: []string{"-1", "o1", "o1", "o2"}},
		{name: "an end without a terminal event", acts: []func(http.ResponseWriter, *http.Request){say(1, 2), say(3, 3)}, want: all, froms: []string{"-1", "o2"}},
		{name: "cut behind the terminal event", acts: []func(http.ResponseWriter, *http.Request){cut(1, 3), say(4, 4)}, want: append(slices.Clone(all), "o4"), froms: []string{"-1", "o3"}},
		{name: "silence", acts: []func(http.ResponseWriter, *http.Request){hang(1, 2), say(3, 3)}, want: all, froms: []string{"-1", "o2"}},
		{name: "restart", acts: []func(http.ResponseWriter, *http.Request){cut(1, 1), status(503, "shutdown"), status(500, "internal"), say(2, 3)}, want: all, froms: []string{"-1", "o1", "o1", "o1"}},
		{name: "behind the end", acts: []func(http.ResponseWriter, *http.Request){say(1, 0)}, ended: true, from: "o3", froms: []string{"o3"}},
		{name: "aged out", acts: []func(http.ResponseWriter, *http.Request){cut(1, 1), status(410, "offset_expired")}, want: all[:1], froms: []string{"-1", "o1"}, code: "offset_expired"},
		{name: "no event", acts: []func(http.ResponseWriter, *http.Request){func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "data: {\n\n") }}, froms: []string{"-1"}, code: "can't be read"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := &answers{acts: tc.acts, ended: tc.ended}
			c := clientOf(t, s)
			if tc.from == "" {
				tc.from = "-1"
			}
			var got []string
			var failed error
			for e, err := range c.events(t.Context(), record{RunID: "r", Sandbox: "box"}, tc.from) {
				if err != nil {
					failed = err
					break
				}
				got = append(got, e.id)
			}
			if d := cmp.Diff(tc.want, got); d != "" {
				t.Error(d)
			}
			if d := cmp.Diff(tc.froms, s.froms); d != "" {
				t.Error(d)
			}
			if tc.code == "" && failed != nil || tc.code != "" && (failed == nil || !strings.Contains(failed.Error(), tc.code)) {
				t.Errorf("error %v, want %q", failed, tc.code)
			}
		})
	}
}

func TestEventsGivesUp(t *testing.T) {
	s := &answers{acts: []func(http.ResponseWriter, *http.Request){status(503, "shutdown")}}
	c := clientOf(t, s)
	c.patience = 50 * time.Millisecond
	told := 0
	c.retrying = func(error) { told++ }
	for _, err := range c.events(t.Context(), record{RunID: "r", Sandbox: "box"}, "-1") {
		if codeOf(err) != exitUnavailable {
			t.Errorf("got %v", err)
		}
	}
	if told == 0 || told != len(s.froms)-1 {
		t.Errorf("told %d times, %d connections", told, len(s.froms))
	}
}

func TestEventsInterrupted(t *testing.T) {
	c := clientOf(t, &answers{acts: []func(http.ResponseWriter, *http.Request){hang(1, 1)}})
	c.idle = time.Minute
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	var last error
	for e, err := range c.events(ctx, record{RunID: "r", Sandbox: "box"}, "-1") {
		if err == nil && e.id == "o1" {
			cancel(errInterrupted)
		}
		last = err
	}
	if !errors.Is(last, errInterrupted) {
		t.Errorf("got %v", last)
	}
}

// A key never leaves for another host, whatever a server answers.
func TestNoRedirect(t *testing.T) {
	other := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		t.Errorf("was asked, with key %q", r.Header.Get("Authorization"))
	}))
	defer other.Close()
	c := clientOf(t, http.RedirectHandler(other.URL, http.StatusTemporaryRedirect))
	c.key = "secret-key-secret-key"
	if err := c.get(t.Context(), "/v1/runs", url.Values{}, new(any)); codeOf(err) != exitUsage {
		t.Errorf("got %v", err)
	}
}

// What serve shows a newcomer must be a request once a shell has filled it in.
func TestTryBody(t *testing.T) {
	body := tryBody()
	if strings.Count(body, "'") != 4 {
		t.Fatalf("quotes in %s", body)
	}
	filled := strings.ReplaceAll(body, "'$(date +%s)'", "1")
	var in struct {
		ThreadID, RunID string
		Messages        []event.Message
	}
	if err := json.Unmarshal([]byte(filled), &in); err != nil || in.ThreadID != "thread-1" || in.RunID != "run-1" || len(in.Messages) != 1 {
		t.Errorf("%v: %s", err, filled)
	}
}
