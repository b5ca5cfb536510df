package modeltest_test

import (
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/aisandbox-go/aisandbox/modeltest"
)

func TestStreamOnTheWire(t *testing.T) {
	_, url := serve(t, parse(t, `
turns:
- ping: true
  usage: {in: 1, cr: 2, cw: 3, out: 4}
  headers: {X-Extra: "yes"}
  blocks:
  - {type: thinking, deltas: [Let me, " see"], signature: c2ln}
  - {type: text, text: "aé😀d", pieces: 2}
  - {type: tool_use, id: toolu_1, name: Bash, input: {z: "<&>", a: 1.50}, pieces: 2}
`))
	r := post(t, url, streaming)
	want := []event{
		{"message_start", `{"type":"message_start","message":{"id":"msg_x_2","type":"message","role":"assistant","model":"m1","content":[],"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":1,"cache_creation_input_tokens":3,"cache_read_input_tokens":2,"output_tokens":1}}}`},
		{"ping", `{"type":"ping"}`},
		{"content_block_start", `{"type":"content_block_start","index":0,"content_block":{"type":"thinking","thinking":"","signature":""}}`},
		{"content_block_delta", `{"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":"Let me"}}`},
		{"content_block_delta", `{"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":" see"}}`},
		{"content_block_delta", `{"type":"content_block_delta","index":0,"delta":{"type":"signature_delta","signature":"c2ln"}}`},
		{"content_block_stop", `{"type":"content_block_stop","index":0}`},
		{"content_block_start", `{"type":"content_block_start","index":1,"content_block":{"type":"text","text":""}}`},
		{"content_block_delta", `{"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":"aé"}}`},
		{"content_block_delta", `{"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":"😀d"}}`},
		{"content_block_stop", `{"type":"content_block_stop","index":1}`},
		{"content_block_start", `{"type":"content_block_start","index":2,"content_block":{"type":"tool_use","id":"toolu_1","name":"Bash","input":{}}}`},
		{"content_block_delta", `{"type":"content_block_delta","index":2,"delta":{"type":"input_json_delta","partial_json":"{\"z\":\"<&>\""}}`},
		{"content_block_delta", `{"type":"content_block_delta","index":2,"delta":{"type":"input_json_delta","partial_json":",\"a\":1.50}"}}`},
		{"content_block_stop", `{"type":"content_block_stop","index":2}`},
		{"message_delta", `{"type":"message_delta","delta":{"stop_reason":"tool_use","stop_sequence":null},"usage":{"output_tokens":4}}`},
		{"message_stop", `{"type":"message_stop"}`},
	}
	if diff := cmp.Diff(want, r.Events); diff != "" {
		t.Error(diff)
	}
	if r.Err != nil || r.Status != 200 || !strings.HasPrefix(r.Header.Get("Content-Type"), "text/event-stream") ||
		r.Header.Get("Request-Id") != "req_x_1" || r.Header.Get("X-Extra") != "yes" || r.Header.Get("Content-Encoding") != "" {
		t.Errorf("status %d, header %v, error %v", r.Status, r.Header, r.Err)
	}
}

func TestWholeMessage(t *testing.T) {
	_, url := serve(t, parse(t, `
turns:
- blocks:
  - {type: thinking, deltas: [a, b], signature: c2ln}
  - {type: text, deltas: [c, {raw: '\ud83d'}, {raw: '\ude00'}]}
  - {type: tool_use, id: t1, name: Edit, input: {b: x, a: [1, null, true]}, pieces: 4}
  - {type: tool_use, id: t2, name: Edit, deltas: ['{"k":', '"v"}']}
  - {type: tool_use, id: t3, name: Edit, deltas: ['{"k":']}
`))
	// Some clients leave stream out, some send false.
	r := post(t, url, strings.Replace(plain, "{", `{"stream":false,`, 1))
	want := `{"id":"msg_x_2","type":"message","role":"assistant","model":"m1","content":[` +
		`{"type":"thinking","thinking":"ab","signature":"c2ln"},{"type":"text","text":"c\ud83d\ude00"},` +
		`{"type":"tool_use","id":"t1","name":"Edit","input":{"b":"x","a":[1,null,true]}},` +
		`{"type":"tool_use","id":"t2","name":"Edit","input":{"k":"v"}},` +
		`{"type":"tool_use","id":"t3","name":"Edit","input":"{\"k\":"}],"stop_reason":"tool_use","stop_sequence":null,` +
		`"usage":{"input_tokens":10,"cache_creation_input_tokens":0,"cache_read_input_tokens":0,"output_tokens":20}}`
	if diff := cmp.Diff(want, r.Body); diff != "" {
		t.Error(diff)
	}
	if ct := r.Header.Get("Content-Type"); ct != "application/json" {
		t.Errorf("content type %q", ct)
	}
}

func TestLoneSurrogatesStayVerbatim(t *testing.T) {
	_, url := serve(t, parse(t, `
turns:
- blocks:
  - {type: text, deltas: ["smile ", {raw: '\ud83d'}, {raw: '\ude00'}, " end"]}
  - {type: tool_use, name: Write, deltas: [{raw: '{\"x\":\"\ud83d'}, {raw: '\ude00\"}'}]}
`))
	r := post(t, url, streaming)
	for _, want := range []string{`"text":"\ud83d"}`, `"text":"\ude00"}`, `"partial_json":"{\"x\":\"\ud83d"}`, `"partial_json":"\ude00\"}"}`} {
		if !strings.Contains(r.Body, want) {
			t.Errorf("no %s in %s", want, r.Body)
		}
	}
}

func TestOtherEndpoints(t *testing.T) {
	m, url := serve(t, modeltest.Script{Turns: []modeltest.Turn{modeltest.Say("x")}})
	for _, tt := range []struct{ method, path, want string }{
		{"HEAD", "/", ""},
		{"GET", "/", "{}"},
		{"POST", "/v1/messages/count_tokens?beta=true", `{"input_tokens":10}`},
		{"POST", "/api/event_logging/batch", "{}"},
		{"GET", "/v1/messages", "{}"},
	} {
		req, err := http.NewRequestWithContext(t.Context(), tt.method, url+tt.path, strings.NewReader("{}"))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := client(t).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		var b strings.Builder
		if _, err := copyAll(&b, resp); err != nil {
			t.Fatal(err)
		}
		if resp.StatusCode != 200 || b.String() != tt.want {
			t.Errorf("%s %s: %d %q, want %q", tt.method, tt.path, resp.StatusCode, b.String(), tt.want)
		}
	}
	if n := len(m.Requests()); n != 5 {
		t.Errorf("%d requests recorded", n)
	}
	// None of them took the turn.
	if r := post(t, url, streaming); text(t, r) != "x" {
		t.Errorf("turn was taken: %s", r.Body)
	}
}

func TestBadRequests(t *testing.T) {
	m, url := serve(t, modeltest.Script{Turns: []modeltest.Turn{modeltest.Say("x")}})
	for _, tt := range []struct {
		name, body string
		header     []string
		status     int
		typ        string
	}{
		{"not JSON", `{"model":`, nil, 400, "invalid_request_error"},
		{"content", `{"messages":[{"role":"user","content":7}]}`, nil, 400, "invalid_request_error"},
		{"compressed", `xx`, []string{"Content-Encoding", "zstd"}, 415, "invalid_request_error"},
		{"too large", strings.Repeat(" ", modeltest.MaxRequestBytes+1), nil, 413, "request_too_large"},
	} {
		r := post(t, url, tt.body, tt.header...)
		if r.Status != tt.status || errorType(t, r) != tt.typ {
			t.Errorf("%s: %d %s", tt.name, r.Status, r.Body)
		}
	}
	for _, q := range m.Requests() {
		if q.Turn != -1 {
			t.Errorf("request %d took turn %d", q.Number, q.Turn)
		}
		if len(q.Body) > modeltest.MaxRequestBytes {
			t.Errorf("request %d: %d bytes kept", q.Number, len(q.Body))
		}
	}
}

func errorType(t *testing.T, r reply) string {
	t.Helper()
	var e struct {
		Type      string
		Error     struct{ Type, Message string }
		RequestID string `json:"request_id"`
	}
	if err := json.Unmarshal([]byte(r.Body), &e); err != nil || e.Type != "error" || e.RequestID == "" || e.Error.Message == "" {
		t.Errorf("not an API error: %v: %s", err, r.Body)
	}
	if id := r.Header.Get("Request-Id"); id != e.RequestID {
		t.Errorf("header says %q, body %q", id, e.RequestID)
	}
	return e.Error.Type
}

func copyAll(w io.Writer, resp *http.Response) (int64, error) {
	defer resp.Body.Close()
	return io.Copy(w, resp.Body)
}
