package server_test

import (
	"bytes"
	"context"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/aisandbox-go/aisandbox/chat"
	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/server"
)

// unified are the events of the golden run, without the two that the driver makes.
func unified(t *testing.T, thread, run string) []event.Event {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join("..", "event", "testdata", "unified-events.ndjson"))
	if err != nil {
		t.Fatal(err)
	}
	raw = bytes.ReplaceAll(bytes.ReplaceAll(raw, []byte("thread-1"), []byte(thread)), []byte("run-client-1"), []byte(run))
	var evs []event.Event
	for line := range bytes.Lines(raw) {
		ev, err := event.Decode(bytes.TrimSpace(line))
		if err != nil {
			t.Fatal(err)
		}
		evs = append(evs, ev)
	}
	return evs[2:]
}

var (
	comments = regexp.MustCompile(`(?m)^: .*\n\n`)
	ids      = regexp.MustCompile(`(?m)^id: .*:(\d+)$`)
)

// expected is a recorded response as this server sends it: offsets of the store,
// the driver's clock on the events that it makes, pings of its own.
func expected(recorded, run string) string {
	s := comments.ReplaceAllString(recorded, "")
	s = ids.ReplaceAllString(s, "id: memory:v1:"+run+":$1")
	// The bubble's clock stands at the start of 2000.
	for _, ev := range []string{`"RUN_STARTED"`, `"CUSTOM"`, `"MESSAGES_SNAPSHOT"`} {
		s = strings.ReplaceAll(s, `"type":`+ev+`,"timestamp":1764460800000,`, `"type":`+ev+`,"timestamp":946684800000,`)
	}
	// The guard names the message that a call belongs to (spec 07 §6.3).
	s = strings.ReplaceAll(s, `"toolCallName":"Bash","metadata":{"tanstack":{"model":"sonnet"}}}`,
		`"toolCallName":"Bash","parentMessageId":"m1","metadata":{"tanstack":{"model":"sonnet"}}}`)
	return strings.TrimRight(s, "\n") + "\n\n"
}

func TestUnifiedStreamByteByByte(t *testing.T) {
	for _, file := range []string{"unified-01-post.txt", "agui100-02-unified.txt"} {
		t.Run(file, func(t *testing.T) {
			x := exchanges(t, file)[0]
			run := "run-client-1"
			if x.headers.Get("X-Run-Id") == "" {
				run = "run-unified"
			}
			synctest.Test(t, func(t *testing.T) {
				h := newHouse(t, says(unified(t, "thread-1", run)...), nil)
				w := h.post(t, x.body, func(r *http.Request) { r.Header = x.headers.Clone() })
				if diff := cmp.Diff(": ping\n\n"+expected(x.respBody, run), w.Body.String()); diff != "" {
					t.Errorf("(-want +got)\n%s", diff)
				}
				got := http.Header{}
				for _, k := range []string{"Content-Type", "Cache-Control", "X-Accel-Buffering", "X-Run-Id", "X-Run-Resumed", "Connection"} {
					got[k] = w.Header()[k]
				}
				if diff := cmp.Diff(http.Header{
					"Content-Type": {"text/event-stream"}, "Cache-Control": {"no-cache, no-transform"}, "X-Accel-Buffering": {"no"},
					"Connection": {"keep-alive"}, "X-Run-Id": {run}, "X-Run-Resumed": nil,
				}, got); diff != "" || w.Code != 200 {
					t.Errorf("status %d\n%s", w.Code, diff)
				}
			})
		})
	}
}

// The three requests of a reload: a POST that is broken off, the thread, a join.
func TestUnifiedReloadByteByByte(t *testing.T) {
	evs := unified(t, "tu-1", "run-client-1")
	xs := exchanges(t, "unified-02-reload-hydrate-join.txt")
	synctest.Test(t, func(t *testing.T) {
		gate := make(chan struct{})
		a := &agent{play: func(_ context.Context, _ *chat.Run, say func(...event.Event)) {
			say(evs[:8]...)
			<-gate
			say(evs[8:]...)
		}}
		h := newHouse(t, a, nil)
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			synctest.Wait()
			cancel() // the tab is closed
		}()
		body := strings.ReplaceAll(xs[0].body, "msg-client-1", "u1") // the recorded server had its own ids
		w := h.post(t, body, func(r *http.Request) { r.Header = xs[0].headers.Clone(); *r = *r.WithContext(ctx) })
		want := expected(xs[0].respBody, "run-client-1")
		if got := strings.TrimPrefix(w.Body.String(), ": ping\n\n"); got != want {
			t.Errorf("POST\n%s", cmp.Diff(want, got))
		}

		w = h.do(t, "GET", "/v1/chat/demo?threadId=tu-1", "")
		if diff := cmp.Diff(xs[1].respBody+"\n", w.Body.String()); diff != "" {
			t.Errorf("hydrate (-want +got)\n%s", diff)
		}
		if w.Header().Get("Cache-Control") != "no-store" || w.Header().Get("Content-Type") != "application/json" {
			t.Errorf("hydrate: headers %v", w.Header())
		}

		go func() {
			synctest.Wait()
			close(gate)
		}()
		w = h.do(t, "GET", "/v1/chat/demo?offset=-1&runId=run-client-1", "")
		want = expected(xs[2].respBody, "run-client-1")
		// The user's message comes back as the client sent it.
		want = strings.Replace(want, `{"id":"u1","role":"user","content":"hi"}`,
			`{"id":"u1","role":"user","content":"hi","metadata":{"tanstack":{"createdAt":"2026-01-01T00:00:00.000Z"}}}`, 1)
		if diff := cmp.Diff(": ping\n\n"+want, w.Body.String()); diff != "" {
			t.Errorf("join (-want +got)\n%s", diff)
		}
		if order, _ := a.started(); len(order) != 1 {
			t.Errorf("agents: %v", order)
		}
	})
}

func TestNDJSONHasTheSameEvents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHouse(t, says(unified(t, "t", "r")...), nil)
		sse := h.post(t, body("t", "r", "hi"))
		w := h.post(t, body("t", "r", "hi"), header("Accept", "application/x-ndjson"))
		var want strings.Builder
		want.WriteString("\n") // the heartbeat
		for _, f := range frames(t, sse.Body) {
			want.WriteString(`{"id":"` + f.id + `","chunk":` + f.raw + "}\n")
		}
		if diff := cmp.Diff(want.String(), w.Body.String()); diff != "" {
			t.Errorf("(-want +got)\n%s", diff)
		}
		if ct := w.Header().Get("Content-Type"); ct != "application/x-ndjson" {
			t.Errorf("content type %q", ct)
		}
	})
}

func TestSilentRunIsKeptAlive(t *testing.T) {
	for _, every := range []time.Duration{0, time.Minute} {
		synctest.Test(t, func(t *testing.T) {
			a := &agent{play: func(_ context.Context, _ *chat.Run, say func(...event.Event)) {
				time.Sleep(3*time.Minute + time.Second)
				say(finished)
			}}
			h := newHouse(t, a, func(c *server.Config) { c.Heartbeat = every })
			w := h.post(t, body("t", "r", "hi"))
			want := 1 + 12
			if every > 0 {
				want = 1 + 3
			}
			if n := strings.Count(w.Body.String(), ": ping\n\n"); n != want {
				t.Errorf("%d pings in 3 minutes, want %d", n, want)
			}
			legal(t, frames(t, w.Body))
		})
	}
}

// Each POST that a real client was seen to send is taken.
func TestRecordedRequests(t *testing.T) {
	files, err := filepath.Glob(filepath.Join("testdata", "wire", "*.txt"))
	if err != nil || len(files) < 20 {
		t.Fatalf("%d files: %v", len(files), err)
	}
	for _, f := range files {
		name := filepath.Base(f)
		t.Run(name, func(t *testing.T) {
			for _, x := range exchanges(t, name) {
				if x.method != "POST" || x.headers.Get("Last-Event-ID") != "" {
					continue
				}
				a := says(finished)
				h := newHouse(t, a, nil)
				w := h.post(t, x.body, func(r *http.Request) { r.Header = x.headers.Clone() })
				if w.Code != 200 || w.Header().Get("X-Run-Id") == "" {
					t.Errorf("%s: %d %s", x.body, w.Code, w.Body)
					continue
				}
				// A resume of what isn't pending is refused on the stream.
				if order, _ := a.started(); len(order) != 1 && !strings.Contains(x.body, `"resume"`) {
					t.Errorf("%s: agents %v", x.body, order)
				}
				legal(t, frames(t, w.Body))
			}
		})
	}
}
