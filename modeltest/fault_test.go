package modeltest_test

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/aisandbox-go/aisandbox/modeltest"
)

func TestStreamFaults(t *testing.T) {
	const start = "message_start content_block_start"
	const delta = " content_block_delta"
	const end = " content_block_stop message_delta message_stop"
	for _, tt := range []struct {
		name, fault string
		events      string
		broken      bool // the body ends without its last chunk
		last        string
	}{
		{"none", "ping: false", start + delta + delta + delta + end, false, `{"type":"message_stop"}`},
		{"cut", "cut: 2", start + delta + delta, true, ""},
		{"cut before the first", "cut: 0", start, true, ""},
		{"cut after the last", "cut: 3", start + delta + delta + delta, true, ""},
		{"malformed", "malformed: 1", start + delta + delta + delta + delta + end, false, ""},
		{"error", "error: {after: 1, type: overloaded_error, message: Overloaded}", start + delta + " error", false,
			`{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"},"request_id":"req_x_1"}`},
		{"error with defaults", "error: {}", start + " error", false,
			`{"type":"error","error":{"type":"api_error","message":"an error that the script asked for"},"request_id":"req_x_1"}`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, url := serve(t, parse(t, "turns: [{blocks: [{type: text, deltas: [a, b, c]}], "+tt.fault+"}]"))
			r := post(t, url, streaming)
			if got := names(r.Events); got != tt.events {
				t.Errorf("events %s\nwant   %s", got, tt.events)
			}
			if broken := errors.Is(r.Err, io.ErrUnexpectedEOF); broken != tt.broken {
				t.Errorf("read error %v", r.Err)
			}
			if tt.last != "" && r.Events[len(r.Events)-1].Data != tt.last {
				t.Errorf("last record %s", r.Events[len(r.Events)-1].Data)
			}
			bad := 0
			for _, e := range r.Events {
				if !validJSON(e.Data) {
					bad++
				}
			}
			if want := strings.Count(tt.name, "malformed"); bad != want {
				t.Errorf("%d malformed records, want %d", bad, want)
			}
		})
	}
}

func TestCutWithoutDeltas(t *testing.T) {
	_, url := serve(t, parse(t, "turns: [{blocks: [], cut: 0}, {blocks: []}]"))
	if r := post(t, url, streaming); names(r.Events) != "message_start" || r.Err == nil {
		t.Errorf("%s, %v", names(r.Events), r.Err)
	}
	if r := post(t, url, streaming); names(r.Events) != "message_start message_delta message_stop" || r.Err != nil {
		t.Errorf("%s, %v", names(r.Events), r.Err)
	}
}

func TestWholeMessageFaults(t *testing.T) {
	m, url := serve(t, parse(t, `
turns:
- {blocks: [{type: text, text: a}], error: {type: overloaded_error}}
- {blocks: [{type: text, text: a}], error: {}}
- {blocks: [{type: text, text: a}], malformed: 0}
- {blocks: [{type: text, text: a}], cut: 0}
`))
	if r := post(t, url, plain); r.Status != 529 || errorType(t, r) != "overloaded_error" {
		t.Errorf("%d %s", r.Status, r.Body)
	}
	if r := post(t, url, plain); r.Status != 500 || errorType(t, r) != "api_error" {
		t.Errorf("%d %s", r.Status, r.Body)
	}
	if r := post(t, url, plain); r.Status != 200 || validJSON(r.Body) {
		t.Errorf("%d %s", r.Status, r.Body)
	}
	if r, err := postContext(t.Context(), client(t), url, plain); err == nil {
		t.Errorf("got an answer: %d %s", r.Status, r.Body)
	}
	if n := len(m.Requests()); n != 4 {
		t.Errorf("%d requests", n)
	}
}

func TestHTTPErrorsAndRecovery(t *testing.T) {
	_, url := serve(t, parse(t, `
turns:
- {status: 429, headers: {retry-after: 1}, error: {message: slow down}}
- {status: 500, times: 2}
- {status: 401, error: {type: other_error}}
- {status: 503, body: {z: 1, a: "<b>"}}
- {status: 502, body: bad gateway}
- {blocks: [{type: text, text: ok now}]}
`))
	r := post(t, url, streaming)
	if r.Status != 429 || r.Header.Get("Retry-After") != "1" || errorType(t, r) != "rate_limit_error" || !strings.Contains(r.Body, `"slow down"`) {
		t.Errorf("%d %v %s", r.Status, r.Header, r.Body)
	}
	for range 2 {
		if r := post(t, url, streaming); r.Status != 500 || errorType(t, r) != "api_error" {
			t.Errorf("%d %s", r.Status, r.Body)
		}
	}
	if r := post(t, url, streaming); r.Status != 401 || errorType(t, r) != "other_error" {
		t.Errorf("%d %s", r.Status, r.Body)
	}
	if r := post(t, url, streaming); r.Status != 503 || r.Body != `{"z":1,"a":"<b>"}` {
		t.Errorf("%d %s", r.Status, r.Body)
	}
	if r := post(t, url, streaming); r.Status != 502 || r.Body != "bad gateway" {
		t.Errorf("%d %s", r.Status, r.Body)
	}
	if r := post(t, url, streaming); r.Status != 200 || text(t, r) != "ok now" {
		t.Errorf("%d %s", r.Status, r.Body)
	}
}

// TestHang shows that a hanging turn sends what comes before it, then nothing,
// and that its handler ends with the client.
func TestHang(t *testing.T) {
	for _, tt := range []struct {
		fault, body string
		deltas      int
	}{
		{"blocks: [{type: text, deltas: [a, b]}], hang: 1", streaming, 1},
		{"blocks: [{type: text, deltas: [a, b]}], hang: 0", plain, -1},
		{"no_answer: true", streaming, -1},
	} {
		m, url := serve(t, parse(t, "turns: [{"+tt.fault+"}, {blocks: [{type: text, text: next}]}]"))
		ctx, cancel := context.WithCancel(t.Context())
		req, err := http.NewRequestWithContext(ctx, "POST", url+"/v1/messages", strings.NewReader(tt.body))
		if err != nil {
			t.Fatal(err)
		}
		if tt.deltas < 0 {
			ctx, cancel2 := context.WithTimeout(ctx, 50*time.Millisecond)
			if _, err := client(t).Do(req.WithContext(ctx)); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%s: %v", tt.fault, err)
			}
			cancel2()
		} else {
			resp, err := client(t).Do(req)
			if err != nil {
				t.Fatal(err)
			}
			// The delta is here while the answer is unfinished: it was flushed.
			br := bufio.NewReader(resp.Body)
			for n := 0; n < tt.deltas; {
				line, err := br.ReadString('\n')
				if err != nil {
					t.Fatal(err)
				}
				n += strings.Count(line, "event: content_block_delta")
			}
			resp.Body.Close()
		}
		cancel()
		// The server is not stuck.
		if r := post(t, url, streaming); text(t, r) != "next" {
			t.Errorf("%s: %s", tt.fault, r.Body)
		}
		if n := len(m.Requests()); n != 2 {
			t.Errorf("%s: %d requests", tt.fault, n)
		}
	}
}

// recordTimes notes when each write happened.
type recordTimes struct {
	http.ResponseWriter
	header http.Header
	start  time.Time
	at     []time.Duration
}

func (r *recordTimes) Header() http.Header { return r.header }
func (r *recordTimes) WriteHeader(int)     {}
func (r *recordTimes) Flush()              {}
func (r *recordTimes) Write(b []byte) (int, error) {
	r.at = append(r.at, time.Since(r.start))
	return len(b), nil
}

func TestWaitAndDelay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, err := modeltest.New(parse(t, "turns: [{blocks: [{type: text, text: a}], wait: 3s, delay: 10ms}]"), modeltest.Options{})
		if err != nil {
			t.Fatal(err)
		}
		w := &recordTimes{header: http.Header{}, start: time.Now()}
		req, err := http.NewRequestWithContext(t.Context(), "POST", "/v1/messages", strings.NewReader(streaming))
		if err != nil {
			t.Fatal(err)
		}
		m.ServeHTTP(w, req)
		for i, at := range w.at {
			if want := 3*time.Second + time.Duration(i)*10*time.Millisecond; at != want {
				t.Errorf("record %d after %v, want %v", i, at, want)
			}
		}
		if len(w.at) != 6 {
			t.Errorf("%d records", len(w.at))
		}
	})
}

// TestDelayBeforeCut: a client gets the time to read what came before.
func TestDelayBeforeCut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, err := modeltest.New(parse(t, "turns: [{blocks: [{type: text, text: a}], cut: 1, delay: 1s}]"), modeltest.Options{})
		if err != nil {
			t.Fatal(err)
		}
		w := &recordTimes{header: http.Header{}, start: time.Now()}
		req, err := http.NewRequestWithContext(t.Context(), "POST", "/v1/messages", strings.NewReader(streaming))
		if err != nil {
			t.Fatal(err)
		}
		defer func() {
			if p := recover(); p != http.ErrAbortHandler {
				t.Errorf("recovered %v", p)
			}
			if last, cut := w.at[len(w.at)-1], time.Since(w.start); len(w.at) != 3 || cut-last != time.Second {
				t.Errorf("records at %v, cut after %v", w.at, cut)
			}
		}()
		m.ServeHTTP(w, req)
	})
}
