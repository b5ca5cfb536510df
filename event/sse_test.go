package event

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// source is a run's log with a few entries.
type source func(ctx context.Context, after Offset, yield func(Entry, error) bool)

func (s source) Entries(ctx context.Context, after Offset) iter.Seq2[Entry, error] {
	return func(yield func(Entry, error) bool) { s(ctx, after, yield) }
}

func few(_ context.Context, after Offset, yield func(Entry, error) bool) {
	for i, ev := range []Event{
		RunStarted{ThreadID: "t", RunID: "r"},
		TextMessageContent{MessageID: "m", Delta: "two\nlines"},
		RunFinished{ThreadID: "t", RunID: "r"},
	} {
		o := Offset(fmt.Sprintf("o:%d", i+1))
		if i == 1 {
			o = "" // not in the log
		}
		if after >= o && after != "" && o != "" {
			continue
		}
		if !yield(Entry{o, ev}, nil) {
			return
		}
	}
}

func TestServeSSE(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Cache-Control", "mine")
		if err := ServeSSE(w, r, source(few)); err != nil && r.Header.Get("Last-Event-ID") != " x" {
			t.Error(err)
		}
	}))
	defer srv.Close()
	get := func(id, query string) (*http.Response, string) {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, srv.URL+query, nil)
		if err != nil {
			t.Fatal(err)
		}
		if id != "" {
			req.Header.Set("Last-Event-ID", id)
		}
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		b, err := io.ReadAll(res.Body)
		if err != nil {
			t.Fatal(err)
		}
		return res, string(b)
	}
	const all = ": ping\n\n" +
		"id: o:1\ndata: {\"type\":\"RUN_STARTED\",\"threadId\":\"t\",\"runId\":\"r\"}\n\n" +
		"data: {\"type\":\"TEXT_MESSAGE_CONTENT\",\"messageId\":\"m\",\"delta\":\"two\\nlines\"}\n\n" +
		"id: o:3\ndata: {\"type\":\"RUN_FINISHED\",\"threadId\":\"t\",\"runId\":\"r\"}\n\n"
	res, body := get("", "")
	if d := cmp.Diff(all, body); d != "" {
		t.Errorf("body (-want +got):\n%s", d)
	}
	for k, want := range map[string]string{"Content-Type": "text/event-stream", "Cache-Control": "mine", "X-Accel-Buffering": "no"} {
		if got := res.Header.Get(k); got != want {
			t.Errorf("header %s is %q, want %q", k, got, want)
		}
	}
	if _, body := get("", "?offset=-1"); body != all {
		t.Errorf("offset -1 gives %q", body)
	}
	// The header of a reconnect beats the query of the first request.
	if _, body := get("o:1", "?offset=-1"); body != strings.Replace(all, "id: o:1\ndata: {\"type\":\"RUN_STARTED\",\"threadId\":\"t\",\"runId\":\"r\"}\n\n", "", 1) {
		t.Errorf("after o:1: %q", body)
	}
	for _, q := range []string{"?offset=", "?offset=%0a", "?offset=+x"} {
		if res, body := func() (*http.Response, string) {
			req := httptest.NewRequest(http.MethodGet, "/"+q, nil)
			w := httptest.NewRecorder()
			if err := ServeSSE(w, req, source(few)); err == nil {
				t.Errorf("%s is no error", q)
			}
			return w.Result(), w.Body.String()
		}(); res.StatusCode != http.StatusBadRequest {
			t.Errorf("%s is answered with %d %q", q, res.StatusCode, body)
		}
	}
}

func TestServeNDJSON(t *testing.T) {
	w := httptest.NewRecorder()
	if err := ServeNDJSON(w, httptest.NewRequest(http.MethodGet, "/", nil), source(few)); err != nil {
		t.Fatal(err)
	}
	const want = "\n" +
		"{\"id\":\"o:1\",\"chunk\":{\"type\":\"RUN_STARTED\",\"threadId\":\"t\",\"runId\":\"r\"}}\n" +
		"{\"type\":\"TEXT_MESSAGE_CONTENT\",\"messageId\":\"m\",\"delta\":\"two\\nlines\"}\n" +
		"{\"id\":\"o:3\",\"chunk\":{\"type\":\"RUN_FINISHED\",\"threadId\":\"t\",\"runId\":\"r\"}}\n"
	if d := cmp.Diff(want, w.Body.String()); d != "" {
		t.Errorf("body (-want +got):\n%s", d)
	}
	if got := w.Header().Get("Content-Type"); got != "application/x-ndjson" {
		t.Errorf("content type %q", got)
	}
}

func TestServeFailingSource(t *testing.T) {
	secret := errors.New("store: password hunter2")
	for name, src := range map[string]source{
		"source": func(_ context.Context, _ Offset, yield func(Entry, error) bool) { yield(Entry{}, secret) },
		"event": func(_ context.Context, _ Offset, yield func(Entry, error) bool) {
			yield(Entry{Event: StateSnapshot{}}, nil)
		},
		"offset": func(_ context.Context, _ Offset, yield func(Entry, error) bool) {
			yield(Entry{Offset: "a\nb", Event: StepStarted{StepName: "s"}}, nil)
		},
	} {
		w := httptest.NewRecorder()
		err := ServeSSE(w, httptest.NewRequest(http.MethodGet, "/", nil), src)
		if err == nil || (name == "source" && !errors.Is(err, secret)) {
			t.Errorf("%s: error = %v", name, err)
		}
		const want = ": ping\n\ndata: {\"type\":\"RUN_ERROR\",\"message\":\"reading the events of the run failed\",\"code\":\"stream_failed\"}\n\n"
		if got := w.Body.String(); got != want {
			t.Errorf("%s: the client gets %q", name, got)
		}
	}
}

// TestHeartbeat watches a stream that has nothing to say for a minute.
func TestHeartbeat(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := httptest.NewRecorder()
		slow := source(func(_ context.Context, _ Offset, yield func(Entry, error) bool) {
			time.Sleep(20 * time.Second)
			if yield(Entry{Event: StepStarted{StepName: "s"}}, nil) {
				time.Sleep(40 * time.Second)
			}
		})
		if err := ServeSSE(w, httptest.NewRequest(http.MethodGet, "/", nil), slow); err != nil {
			t.Fatal(err)
		}
		// At 0 s, at 15 s, the event at 20 s, at 35 s and at 50 s.
		const want = ": ping\n\n: ping\n\ndata: {\"type\":\"STEP_STARTED\",\"stepName\":\"s\"}\n\n: ping\n\n: ping\n\n"
		if got := w.Body.String(); got != want {
			t.Errorf("got %q", got)
		}
		if !w.Flushed {
			t.Error("nothing was flushed")
		}
	})
}

// deadlines records the write deadlines that are asked for.
type deadlines struct {
	*httptest.ResponseRecorder
	in []time.Duration
}

func (d *deadlines) SetWriteDeadline(at time.Time) error {
	d.in = append(d.in, time.Until(at))
	return nil
}

func TestWriteDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &deadlines{ResponseRecorder: httptest.NewRecorder()}
		slow := source(func(_ context.Context, _ Offset, yield func(Entry, error) bool) {
			time.Sleep(20 * time.Second)
			yield(Entry{Event: StepStarted{StepName: "s"}}, nil)
		})
		if err := ServeSSE(w, httptest.NewRequest(http.MethodGet, "/", nil), slow); err != nil {
			t.Fatal(err)
		}
		// For the first comment, the one at 15 s, and the event.
		if d := cmp.Diff([]time.Duration{time.Minute, time.Minute, time.Minute}, w.in); d != "" {
			t.Errorf("(-want +got):\n%s", d)
		}
	})
}

// gone is a client that reads nothing after a while.
type gone struct {
	*httptest.ResponseRecorder
	left int
}

func (g *gone) Write(b []byte) (int, error) {
	if g.left--; g.left < 0 {
		return 0, errors.New("broken pipe")
	}
	return g.ResponseRecorder.Write(b)
}

func TestReaderLeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		asked := 0
		src := source(func(ctx context.Context, _ Offset, yield func(Entry, error) bool) {
			for yield(Entry{Event: StepStarted{StepName: "s"}}, nil) {
				asked++
			}
		})
		if err := ServeSSE(&gone{httptest.NewRecorder(), 3}, httptest.NewRequest(http.MethodGet, "/", nil), src); err != nil {
			t.Errorf("a reader that leaves is no error: %v", err)
		}
		if asked != 2 {
			t.Errorf("the source was asked on %d times, want 2", asked)
		}
		// One that leaves while nothing happens is noticed by the heartbeat.
		waiting := source(func(ctx context.Context, _ Offset, yield func(Entry, error) bool) {
			<-ctx.Done()
			yield(Entry{}, ctx.Err())
		})
		start := time.Now()
		if err := ServeSSE(&gone{httptest.NewRecorder(), 1}, httptest.NewRequest(http.MethodGet, "/", nil), waiting); err != nil {
			t.Errorf("a reader that leaves is no error: %v", err)
		}
		if d := time.Since(start); d != Heartbeat {
			t.Errorf("noticed after %v", d)
		}
	})
}

func TestReadSSE(t *testing.T) {
	for _, c := range []struct {
		name, in string
		want     []Frame
	}{
		{"empty", "", nil},
		{"comment", ": hi\n\n:\n\n", nil},
		{"plain", "data: a\n\ndata:b\n\n", []Frame{{Data: []byte("a")}, {Data: []byte("b")}}},
		{"many lines", "data: a\ndata\ndata:  b\n\n", []Frame{{Data: []byte("a\n\n b")}}},
		{"line ends", "\ufeffid: 1\r\ndata: a\r\n\r\nid:2\rdata:b\r\r", []Frame{{ID: "1", Data: []byte("a")}, {ID: "2", Data: []byte("b")}}},
		{"id stays", "id: 1\n\ndata: a\n\nid: \x00\ndata: b\n\nid\ndata: c\n\n", []Frame{{ID: "1", Data: []byte("a")}, {ID: "1", Data: []byte("b")}, {Data: []byte("c")}}},
		{"event", "event: x\ndata: a\n\ndata: b\n\n", []Frame{{Event: "x", Data: []byte("a")}, {Data: []byte("b")}}},
		{"unknown fields", "retry: 5\nfoo: bar\ndata: a\n\n", []Frame{{Data: []byte("a")}}},
		{"cut off", "data: a\n\ndata: b\n", []Frame{{Data: []byte("a")}}},
	} {
		for how, r := range map[string]io.Reader{"whole": strings.NewReader(c.in), "bytewise": iotest.OneByteReader(strings.NewReader(c.in))} {
			var got []Frame
			for f, err := range ReadSSE(r) {
				if err != nil {
					t.Fatalf("%s: %v", c.name, err)
				}
				got = append(got, f)
			}
			if d := cmp.Diff(c.want, got); d != "" {
				t.Errorf("%s, %s (-want +got):\n%s", c.name, how, d)
			}
		}
	}
}

func TestReadSSEBounds(t *testing.T) {
	for name, in := range map[string]string{
		"line":  "data: " + strings.Repeat("x", 100),
		"frame": strings.Repeat("data: xxxxxxxxxxxxxxxx\n", 10),
	} {
		var last error
		for _, err := range readSSE(strings.NewReader(in), 64) {
			last = err
		}
		if !errors.Is(last, ErrFrameTooLong) {
			t.Errorf("a long %s: %v", name, last)
		}
	}
	broken := errors.New("reset")
	var last error
	for _, err := range ReadSSE(io.MultiReader(strings.NewReader("data: a\n\n"), iotest.ErrReader(broken))) {
		last = err
	}
	if last != broken {
		t.Errorf("the reader's error comes out as %v", last)
	}
	for range ReadSSE(strings.NewReader("data: a\n\ndata: b\n\n")) {
		break // must not panic
	}
}

// FuzzReadSSE checks that the way the bytes arrive does not matter, and that what
// we write is read as it was.
func FuzzReadSSE(f *testing.F) {
	f.Add([]byte("id: 1\r\ndata: a\rdata: b\n\n: c\n\nevent: x\ndata\n\n"), "offset", "text\nmore")
	f.Fuzz(func(t *testing.T, b []byte, id, text string) {
		read := func(r io.Reader) (all []Frame) {
			for f, err := range ReadSSE(r) {
				if err != nil {
					t.Fatal(err)
				}
				all = append(all, f)
			}
			return all
		}
		if d := cmp.Diff(read(bytes.NewReader(b)), read(iotest.OneByteReader(bytes.NewReader(b)))); d != "" {
			t.Fatal(d)
		}
		e := Entry{Offset(id), TextMessageContent{MessageID: "m", Delta: text}}
		out, err := appendSSE(nil, e)
		if err != nil {
			if e.Offset.Valid() {
				t.Fatal(err)
			}
			return
		}
		fs := read(bytes.NewReader(out))
		if len(fs) != 1 || !json.Valid(fs[0].Data) || (id != "" && fs[0].ID != id) {
			t.Fatalf("%q reads back as %+v", out, fs)
		}
	})
}
