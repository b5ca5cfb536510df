package server_test

import (
	"bytes"
	"context"
	"encoding/json"
	"mime"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
	"github.com/google/go-cmp/cmp"
	"github.com/google/jsonschema-go/jsonschema"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/server"
	"github.com/aisandbox-go/aisandbox/store"
)

// apiDoc is the description, as plain values.
type apiDoc struct {
	t    *testing.T
	root map[string]any
}

func readAPI(t *testing.T) *apiDoc {
	t.Helper()
	b, err := yaml.YAMLToJSON(server.OpenAPI())
	if err != nil {
		t.Fatal(err)
	}
	d := &apiDoc{t: t}
	if err := json.Unmarshal(b, &d.root); err != nil {
		t.Fatal(err)
	}
	return d
}

func (d *apiDoc) at(path ...string) any {
	d.t.Helper()
	var v any = d.root
	for _, p := range path {
		m, ok := v.(map[string]any)
		if !ok || m[p] == nil {
			d.t.Fatalf("openapi.yaml has no %s", strings.Join(path, " → "))
		}
		v = m[p]
	}
	return d.follow(v)
}

func (d *apiDoc) follow(v any) any {
	if m, ok := v.(map[string]any); ok {
		if ref, ok := m["$ref"].(string); ok {
			return d.at(strings.Split(strings.TrimPrefix(ref, "#/"), "/")...)
		}
	}
	return v
}

// check holds a JSON value against a schema of the description.
func (d *apiDoc) check(schema any, value []byte) error {
	doc := map[string]any{"$defs": d.at("components", "schemas"), "allOf": []any{schema}}
	b, err := json.Marshal(doc)
	if err != nil {
		return err
	}
	b = bytes.ReplaceAll(b, []byte("#/components/schemas/"), []byte("#/$defs/"))
	var s jsonschema.Schema
	if err := json.Unmarshal(b, &s); err != nil {
		return err
	}
	r, err := s.Resolve(nil)
	if err != nil {
		return err
	}
	var v any
	if err := json.Unmarshal(value, &v); err != nil {
		return err
	}
	return r.Validate(v)
}

func TestDescriptionHasTheRoutes(t *testing.T) {
	d := readAPI(t)
	if v := d.root["openapi"]; v != "3.1.0" {
		t.Errorf("openapi %v", v)
	}
	var described []string
	for path, item := range d.at("paths").(map[string]any) {
		for method := range item.(map[string]any) {
			if method != "parameters" {
				described = append(described, strings.ToUpper(method)+" "+path)
			}
		}
	}
	routes := server.Routes()
	slices.Sort(described)
	slices.Sort(routes)
	if diff := cmp.Diff(routes, described); diff != "" {
		t.Errorf("(-handler +openapi.yaml)\n%s", diff)
	}
}

func TestResponsesAreAsDescribed(t *testing.T) {
	d := readAPI(t)
	usage := event.RunFinished{Usage: []event.Usage{{Model: "m", InputTokens: 1, OutputTokens: 2, TotalTokens: 3}}}
	a := says(append(text("m", "x"), usage)...)
	h := newHouse(t, a, nil)
	if w := h.post(t, body("t", "r", "hi")); w.Code != 200 {
		t.Fatal(w.Code)
	}
	a.play = says(event.RunError{Message: "broke", Code: "broke"}).play
	h.post(t, body("t", "r2", "hi"))
	a.play = says(asking("r3", "i1")).play
	h.post(t, body("t3", "r3", "hi"))
	if _, err := h.store.Instances.Put(t.Context(), store.Instance{
		Key: "k", Provider: "docker", Ref: json.RawMessage(`{"secret":"42"}`), State: store.InstanceReady, ThreadID: "t", LastError: "x", SnapshotID: "s",
	}); err != nil {
		t.Fatal(err)
	}
	gate := make(chan struct{})
	defer close(gate)
	a.play = gated(gate).play
	base := h.listen(t)
	open(t, "POST", base+chatPath, body("t4", "r4", "hi")).until("TEXT_MESSAGE_END")
	eventually(t, "at work", func() bool { _, most := a.started(); return most == 1 })
	a.play = says(finished).play
	id := frames(t, h.do(t, "GET", chatPath+"?offset=-1&runId=r", "").Body)[0].id

	covered := map[string]bool{}
	for _, tt := range []struct{ route, method, target, body, status string }{
		{"/v1/chat/{sandbox}", "POST", chatPath, body("t9", "r9"), "200"},
		{"/v1/chat/{sandbox}", "POST", chatPath, "{}", "400"},
		{"/v1/chat/{sandbox}", "POST", chatPath + "?runId=x", body("t", "r"), "400"},
		{"/v1/chat/{sandbox}", "POST", chatPath, body("other", "r"), "409"},
		{"/v1/chat/{sandbox}", "POST", "/v1/chat/nope", body("t", "r"), "404"},
		{"/v1/chat/{sandbox}", "GET", chatPath + "?threadId=t", "", "200"},
		{"/v1/chat/{sandbox}", "GET", chatPath + "?threadId=t3", "", "200"},
		{"/v1/chat/{sandbox}", "GET", chatPath + "?threadId=t4", "", "200"},
		{"/v1/chat/{sandbox}", "GET", chatPath + "?offset=-1&runId=r", "", "200"},
		{"/v1/chat/{sandbox}", "GET", chatPath, "", "400"},
		{"/v1/chat/{sandbox}", "GET", chatPath + "?offset=-1&runId=zzz", "", "404"},
		{"/v1/chat/{sandbox}", "GET", chatPath + "?runId=r&offset=memory:v1:r:99", "", "410"},
		{"/v1/chat/{sandbox}/cancel", "POST", chatPath + "/cancel", `{"runId":"r"}`, "204"},
		{"/v1/chat/{sandbox}/cancel", "POST", chatPath + "/cancel", `{}`, "400"},
		{"/v1/runs", "GET", "/v1/runs", "", "200"},
		{"/v1/runs", "GET", "/v1/runs?limit=1", "", "200"},
		{"/v1/runs", "GET", "/v1/runs?status=nope", "", "400"},
		{"/v1/runs", "GET", "/v1/runs?limit=0", "", "400"},
		{"/v1/runs/{id}", "GET", "/v1/runs/r", "", "200"},
		{"/v1/runs/{id}", "GET", "/v1/runs/r2", "", "200"},
		{"/v1/runs/{id}", "GET", "/v1/runs/r4", "", "200"},
		{"/v1/runs/{id}", "GET", "/v1/runs/nope", "", "404"},
		{"/v1/runs/{id}/events", "GET", "/v1/runs/r/events", "", "200"},
		{"/v1/runs/{id}/events", "GET", "/v1/runs/r4/events?offset=-1", "", "200"},
		{"/v1/runs/{id}/events", "GET", "/v1/runs/r/events?limit=x", "", "400"},
		{"/v1/runs/{id}/events", "GET", "/v1/runs/r2/events?offset=" + queryEscape(id), "", "400"},
		{"/v1/runs/{id}/events", "GET", "/v1/runs/nope/events", "", "404"},
		{"/v1/threads", "GET", "/v1/threads", "", "200"},
		{"/v1/threads", "GET", "/v1/threads?limit=1", "", "200"},
		{"/v1/threads/{id}", "GET", "/v1/threads/t", "", "200"},
		{"/v1/threads/{id}", "GET", "/v1/threads/t4", "", "200"},
		{"/v1/threads/{id}", "GET", "/v1/threads/nope", "", "404"},
		{"/v1/instances", "GET", "/v1/instances", "", "200"},
		{"/v1/instances", "GET", "/v1/instances?limit=2000", "", "400"},
		{"/healthz", "GET", "/healthz", "", "200"},
		{"/readyz", "GET", "/readyz", "", "200"},
		{"/metrics", "GET", "/metrics", "", "200"},
	} {
		name := tt.method + " " + tt.target
		covered[tt.method+" "+tt.route] = true
		w := h.do(t, tt.method, tt.target, tt.body)
		if strconv.Itoa(w.Code) != tt.status {
			t.Errorf("%s: %d %s, want %s", name, w.Code, w.Body, tt.status)
			continue
		}
		if strings.Contains(w.Body.String(), "secret") {
			t.Errorf("%s tells a secret: %s", name, w.Body)
		}
		resp := d.at("paths", tt.route, strings.ToLower(tt.method), "responses", tt.status).(map[string]any)
		content, _ := resp["content"].(map[string]any)
		if content == nil {
			if w.Body.Len() > 0 {
				t.Errorf("%s: a body %s that isn't described", name, w.Body)
			}
			continue
		}
		kind, _, err := mime.ParseMediaType(w.Header().Get("Content-Type"))
		if err != nil || content[kind] == nil {
			t.Errorf("%s: content type %q isn't described: %v", name, w.Header().Get("Content-Type"), err)
			continue
		}
		schema := content[kind].(map[string]any)["schema"]
		bodies := [][]byte{w.Body.Bytes()}
		switch kind {
		case "application/x-ndjson":
			bodies = bytes.Split(bytes.TrimSpace(w.Body.Bytes()), []byte("\n"))
		case "application/json":
		default:
			continue
		}
		for _, b := range bodies {
			if err := d.check(schema, b); err != nil {
				t.Errorf("%s: %s: %v", name, b, err)
			}
		}
	}
	for _, r := range server.Routes() {
		if !covered[r] {
			t.Errorf("%s isn't tried here", r)
		}
	}
	// The check itself can fail.
	if err := d.check(map[string]any{"$ref": "#/components/schemas/Run"}, []byte(`{"runId":"r","extra":1}`)); err == nil {
		t.Error("anything is a Run")
	}
}

func TestEventLog(t *testing.T) {
	gate := make(chan struct{})
	a := gated(gate)
	h := newHouse(t, a, nil)
	base := h.listen(t)
	s := open(t, "POST", base+chatPath, body("t", "r", "hi"))
	s.until("TEXT_MESSAGE_END")
	lines := func(query string) []string {
		w := h.do(t, "GET", "/v1/runs/r/events"+query, "")
		if w.Code != http.StatusOK {
			t.Fatalf("%s: %d %s", query, w.Code, w.Body)
		}
		var ids []string
		for line := range bytes.Lines(w.Body.Bytes()) {
			var l struct{ ID string }
			if err := json.Unmarshal(line, &l); err != nil {
				t.Fatal(err)
			}
			ids = append(ids, l.ID)
		}
		return ids
	}
	for _, state := range []string{"running", "ended"} {
		all := lines("")
		if state == "ended" {
			close(gate)
			s.rest()
			all = lines("")
		}
		want := 5
		if state == "ended" {
			want = 6
		}
		if len(all) != want {
			t.Fatalf("%s: %v", state, all)
		}
		if diff := cmp.Diff(all[:2], lines("?limit=2")); diff != "" {
			t.Errorf("%s: limit\n%s", state, diff)
		}
		for i := range all {
			got := lines("?offset=" + queryEscape(all[i]))
			if !slices.Equal(got, all[i+1:]) {
				t.Errorf("%s: after %d: %v", state, i, got)
			}
		}
		if got := lines("?limit=1&offset=" + queryEscape(all[1])); !slices.Equal(got, all[2:3]) {
			t.Errorf("%s: %v", state, got)
		}
		if got := lines("?offset=now"); len(got) != 0 {
			t.Errorf("%s: now: %v", state, got)
		}
		wantStatus(t, h.do(t, "GET", "/v1/runs/r/events?offset=memory:v1:other:1", ""), 400, "offset_"+map[string]string{"running": "invalid", "ended": "run_mismatch"}[state])
	}
}

func TestListsArePaged(t *testing.T) {
	h := newHouse(t, says(finished), nil)
	for _, id := range []string{"a", "b", "c", "d", "e"} {
		h.post(t, body("t-"+id, "r-"+id, "hi"))
	}
	for path, field := range map[string]string{"/v1/runs": "runId", "/v1/threads": "threadId"} {
		var got []string
		next := ""
		for range 5 {
			w := h.do(t, "GET", path+"?limit=2&after="+queryEscape(next), "")
			var page struct {
				Runs, Threads []map[string]any
				Next          string
			}
			if err := json.Unmarshal(w.Body.Bytes(), &page); err != nil {
				t.Fatal(err)
			}
			for _, x := range slices.Concat(page.Runs, page.Threads) {
				got = append(got, x[field].(string)[2:])
			}
			if next = page.Next; next == "" {
				break
			}
		}
		if strings.Join(got, "") != "abcde" {
			t.Errorf("%s: %v", path, got)
		}
	}
}

func TestMetrics(t *testing.T) {
	gate := make(chan struct{})
	h := newHouse(t, gated(gate), nil)
	base := h.listen(t)
	s := open(t, "POST", base+chatPath, body("t", "r0", "hi"))
	s.until("TEXT_MESSAGE_END")
	open(t, "POST", base+chatPath, body("t", "r1", "hi")).until("queued 1")
	read := func() string { return h.do(t, "GET", "/metrics", "").Body.String() }
	for _, want := range []string{"aisbx_runs_driven 2", "aisbx_runs_queued 1", "aisbx_readers 2", "aisbx_append_seconds_count", "aisbx_tail_lag_seconds_count"} {
		if out := read(); !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	close(gate)
	s.rest()
	eventually(t, "both counted", func() bool {
		out := read()
		return strings.Contains(out, `aisbx_runs_ended_total{outcome="finished"} 2`) && strings.Contains(out, "aisbx_runs_queued 0")
	})
	if out := read(); !strings.Contains(out, `aisbx_http_requests_total{route="/metrics",status="200"}`) {
		t.Errorf("no requests in\n%s", out)
	}
}

func TestExpiredLog(t *testing.T) {
	h := newHouse(t, says(finished), func(c *server.Config) { c.Store.Runs = expired{c.Store.Runs} })
	h.post(t, body("a thread", "r", "hi"))
	for _, path := range []string{chatPath + "?offset=-1&runId=r", "/v1/runs/r/events", chatPath} {
		method, in := "GET", ""
		if path == chatPath {
			method, in = "POST", body("a thread", "r", "hi")
		}
		w := h.do(t, method, path, in)
		wantStatus(t, w, 410, "log_expired")
		var b struct{ Transcript string }
		if err := json.Unmarshal(w.Body.Bytes(), &b); err != nil || b.Transcript != "/v1/chat/demo?threadId=a+thread" {
			t.Errorf("%s: %v", w.Body, err)
		}
		if got := h.do(t, "GET", b.Transcript, ""); got.Code != 200 || !strings.Contains(got.Body.String(), `"hi"`) {
			t.Errorf("transcript: %d %s", got.Code, got.Body)
		}
	}
}

type expired struct{ store.Runs }

func (e expired) Get(ctx context.Context, id string) (store.Run, error) {
	r, err := e.Runs.Get(ctx, id)
	r.EventsExpired = true
	return r, err
}
