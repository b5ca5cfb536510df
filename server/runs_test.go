package server_test

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/aisandbox-go/aisandbox/chat"
	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/server"
	"github.com/aisandbox-go/aisandbox/store"
)

func queryEscape(s string) string { return url.QueryEscape(s) }

func TestReaderLeavesRunGoesOn(t *testing.T) {
	gate := make(chan struct{})
	a := gated(gate)
	h := newHouse(t, a, nil)
	base := h.listen(t)
	s := open(t, "POST", base+chatPath, body("t", "r", "hi"))
	s.until("text:hello from r")
	last := s.id
	s.stop()
	if st := h.status(t, "r"); st != store.Running {
		t.Fatalf("the run is %s", st)
	}
	// The identical POST with the last id: what follows, and no second agent.
	back := open(t, "POST", base+chatPath, body("t", "r", "hi"), header("X-Run-Id", "r", "Last-Event-ID", last))
	close(gate)
	if diff := cmp.Diff([]string{"TEXT_MESSAGE_END", "RUN_FINISHED"}, back.rest()); diff != "" {
		t.Errorf("the rest (-want +got)\n%s", diff)
	}
	if back.resp.Header.Get("X-Run-Id") != "r" {
		t.Errorf("headers %v", back.resp.Header)
	}
	// Everybody who comes later gets everything, with the same ids, and an end.
	full := frames(t, h.post(t, body("t", "r", "hi")).Body)
	legal(t, full)
	joined := frames(t, h.do(t, "GET", chatPath+"?offset=-1&runId=r", "").Body)
	joined = slices.DeleteFunc(joined, func(f frame) bool { return f.ev.Type() == event.TypeMessagesSnapshot })
	for i := range full {
		if full[i].id != joined[i].id || full[i].raw != joined[i].raw {
			t.Errorf("event %d: %+v and %+v", i, full[i], joined[i])
		}
	}
	if order, _ := a.started(); len(order) != 1 || h.status(t, "r") != store.Completed {
		t.Errorf("agents %v, run %s", order, h.status(t, "r"))
	}
}

// Every place to cut: what a client has and what it then gets is the whole.
func TestResumeAfterEachEvent(t *testing.T) {
	h := newHouse(t, says(append(text("m", "héllo"), finished)...), nil)
	full := frames(t, h.post(t, body("t", "r", "hi")).Body)
	for i := range full {
		for _, how := range []string{"POST", "GET"} {
			path, b := chatPath+"?offset=-1&runId=r", "" // the header wins
			if how == "POST" {
				path, b = chatPath, body("t", "r", "hi")
			}
			got := frames(t, h.do(t, how, path, b, header("Last-Event-ID", full[i].id)).Body)
			if !slices.EqualFunc(full[i+1:], got, func(a, b frame) bool { return a.raw == b.raw && a.id == b.id }) {
				t.Errorf("%s after %d: %v", how, i, shown(got))
			}
		}
		if got := frames(t, h.do(t, "GET", chatPath+"?runId=r&offset="+queryEscape(full[i].id), "").Body); len(got) != len(full)-i-1 {
			t.Errorf("?offset after %d: %v", i, shown(got))
		}
	}
}

func TestStartedAtOnceThenSetUp(t *testing.T) {
	ready := make(chan struct{})
	a := says(finished)
	h := newHouse(t, a, func(c *server.Config) {
		c.Definitions["demo"] = server.Definition{Request: func(ctx context.Context, in server.RunInput) (chat.Request, error) {
			req, err := a.request(ctx, in)
			req.Use = []chat.Middleware{{Name: "boot", Setup: func(context.Context, *chat.Run) error { <-ready; return nil }}}
			return req, err
		}}
	})
	base := h.listen(t)
	s := open(t, "POST", base+chatPath, body("t", "r", "hi"))
	if diff := cmp.Diff([]string{"RUN_STARTED", "run.accepted"}, s.until("run.accepted")); diff != "" {
		t.Error(diff)
	}
	// A joiner has its first event too, while the sandbox boots.
	j := open(t, "GET", base+chatPath+"?offset=-1&runId=r", "")
	j.until("run.accepted")
	close(ready)
	s.until("RUN_FINISHED")
	j.until("RUN_FINISHED")
}

func TestSetupFailureIsOnTheStream(t *testing.T) {
	h := newHouse(t, says(finished), func(c *server.Config) {
		c.Definitions["demo"] = server.Definition{Request: func(context.Context, server.RunInput) (chat.Request, error) {
			return chat.Request{Adapter: says(finished), Use: []chat.Middleware{{Name: "boot", Setup: func(context.Context, *chat.Run) error {
				return errors.New("no room")
			}}}}, nil
		}}
	})
	got := shown(frames(t, h.post(t, body("t", "r", "hi")).Body))
	if diff := cmp.Diff([]string{"RUN_STARTED", "run.accepted", "RUN_ERROR internal"}, got); diff != "" {
		t.Error(diff)
	}
	if rec := h.record(t, "r"); rec.Status != store.Failed {
		t.Errorf("record %+v", rec)
	}
}

var needed = chat.NewToken[int]("sandbox", "add one")

type needy struct{ *agent }

func (needy) Needs() []chat.AnyToken { return []chat.AnyToken{needed} }

// What is wrong before anything runs is a status, and no record is left.
func TestRefusedBeforeTheStream(t *testing.T) {
	for _, tt := range []struct {
		name   string
		f      func(context.Context, server.RunInput) (chat.Request, error)
		status int
		code   string
	}{
		{"a capability is missing", func(context.Context, server.RunInput) (chat.Request, error) {
			return chat.Request{Adapter: needy{says()}}, nil
		}, 500, "capability_missing"},
		{"the client's fault", func(context.Context, server.RunInput) (chat.Request, error) {
			return chat.Request{}, &server.InputError{Field: "forwardedProps.model", Reason: "is unknown"}
		}, 400, "invalid_input"},
		{"anything else", func(context.Context, server.RunInput) (chat.Request, error) {
			return chat.Request{}, errors.New("the secret is 42")
		}, 500, "internal"},
		{"no adapter", func(context.Context, server.RunInput) (chat.Request, error) { return chat.Request{}, nil }, 500, "invalid_request"},
		{"a panic", func(context.Context, server.RunInput) (chat.Request, error) { panic("the secret is 42") }, 500, "internal"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			h := newHouse(t, says(), func(c *server.Config) { c.Definitions["demo"] = server.Definition{Request: tt.f} })
			w := h.post(t, body("t", "r", "hi"))
			wantStatus(t, w, tt.status, tt.code)
			if strings.Contains(w.Body.String(), "42") || strings.Contains(w.Body.String(), "goroutine") {
				t.Errorf("it tells %s", w.Body)
			}
			if _, err := h.store.Runs.Get(t.Context(), "r"); !errors.Is(err, store.ErrNotFound) {
				t.Errorf("a record is left: %v", err)
			}
		})
	}
}

func TestWhichRun(t *testing.T) {
	h := newHouse(t, says(append(text("m", "x"), finished)...), func(c *server.Config) {
		c.Keys = []server.Key{{Token: "key-of-tenant-aaa", Tenant: "a"}, {Token: "key-of-tenant-bbb", Tenant: "b"}}
		c.Definitions["other"] = server.Definition{Request: says(finished).request}
	})
	as := func(who string) reqOption {
		return header("Authorization", "Bearer key-of-tenant-"+strings.Repeat(who, 3))
	}
	full := frames(t, h.post(t, body("t", "r", "hi"), as("a")).Body)
	another := frames(t, h.post(t, body("t2", "r2", "hi"), as("a")).Body)
	id, foreign := full[1].id, another[1].id

	for _, tt := range []struct {
		name, method, path, body string
		opts                     []reqOption
		status                   int
		code                     string // empty: a plain text body or a stream
	}{
		{"by header alone", "GET", chatPath + "?offset=-1", "", []reqOption{as("a"), header("X-Run-Id", "r")}, 200, ""},
		{"the same thrice", "POST", chatPath + "?runId=r", body("t", "r"), []reqOption{as("a"), header("X-Run-Id", "r")}, 200, ""},
		{"header against body", "POST", chatPath, body("t", "r"), []reqOption{as("a"), header("X-Run-Id", "x")}, 400, "run_id_mismatch"},
		{"query against body", "POST", chatPath + "?runId=x", body("t", "r"), []reqOption{as("a")}, 400, "run_id_mismatch"},
		{"header against query", "GET", chatPath + "?offset=-1&runId=x", "", []reqOption{as("a"), header("X-Run-Id", "r")}, 400, "run_id_mismatch"},
		{"no run", "GET", chatPath + "?offset=-1", "", []reqOption{as("a")}, 400, "run_id_required"},
		{"no offset", "GET", chatPath + "?runId=r", "", []reqOption{as("a")}, 400, ""},
		{"unknown run", "GET", chatPath + "?offset=-1&runId=nope", "", []reqOption{as("a")}, 404, "unknown_run"},
		{"unknown run, resumed", "POST", chatPath, body("t", "nope"), []reqOption{as("a"), header("Last-Event-ID", id)}, 404, "unknown_run"},
		{"another tenant's run", "GET", chatPath + "?offset=-1&runId=r", "", []reqOption{as("b")}, 404, "unknown_run"},
		{"another tenant's run, resumed", "POST", chatPath, body("t", "r"), []reqOption{as("b"), header("Last-Event-ID", id)}, 404, "unknown_run"},
		{"another tenant's run, started", "POST", chatPath, body("t", "r"), []reqOption{as("b")}, 409, "run_conflict"},
		{"another thread's run, resumed", "POST", chatPath, body("t2", "r"), []reqOption{as("a"), header("Last-Event-ID", id)}, 403, "thread_mismatch"},
		{"another thread's run, started", "POST", chatPath, body("t2", "r"), []reqOption{as("a")}, 409, "run_conflict"},
		{"another sandbox's run", "GET", "/v1/chat/other?offset=-1&runId=r", "", []reqOption{as("a")}, 404, "unknown_run"},
		{"unknown sandbox", "GET", "/v1/chat/nope?offset=-1&runId=r", "", []reqOption{as("a")}, 404, "unknown_sandbox"},
		{"unknown sandbox, started", "POST", "/v1/chat/nope", body("t", "r9"), []reqOption{as("a")}, 404, "unknown_sandbox"},
		{"malformed offset", "GET", chatPath + "?offset=xyz&runId=r", "", []reqOption{as("a")}, 400, "offset_invalid"},
		{"malformed header", "POST", chatPath, body("t", "r"), []reqOption{as("a"), header("Last-Event-ID", " ")}, 400, "offset_invalid"},
		{"offset of another run", "POST", chatPath, body("t", "r"), []reqOption{as("a"), header("Last-Event-ID", foreign)}, 400, "offset_run_mismatch"},
		{"offset beyond the end", "GET", chatPath + "?runId=r&offset=memory:v1:r:99", "", []reqOption{as("a")}, 410, "log_rewound"},
		{"run id of two lines", "GET", chatPath + "?offset=-1&runId=a%0Ab", "", []reqOption{as("a")}, 400, "invalid_query"},
		{"record of another tenant", "GET", "/v1/runs/r", "", []reqOption{as("b")}, 404, "unknown_run"},
		{"events of another tenant", "GET", "/v1/runs/r/events", "", []reqOption{as("b")}, 404, "unknown_run"},
		{"thread of another tenant", "GET", "/v1/threads/t", "", []reqOption{as("b")}, 404, "not_found"},
		{"cancel of another tenant", "POST", chatPath + "/cancel", `{"runId":"r"}`, []reqOption{as("b")}, 204, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := h.do(t, tt.method, tt.path, tt.body, tt.opts...)
			wantStatus(t, w, tt.status, tt.code)
			if tt.name == "no offset" && w.Body.String() != "No resume offset provided (expected a Last-Event-ID header or an ?offset query parameter)." {
				t.Errorf("body %q", w.Body)
			}
		})
	}
	// Two tenants' threads of one name don't meet.
	var mine, theirs struct{ Messages []any }
	for who, dst := range map[string]any{"a": &mine, "b": &theirs} {
		w := h.do(t, "GET", chatPath+"?threadId=t", "", as(who))
		if err := json.Unmarshal(w.Body.Bytes(), dst); err != nil || w.Code != 200 {
			t.Errorf("%d %s: %v", w.Code, w.Body, err)
		}
	}
	if len(mine.Messages) == 0 || len(theirs.Messages) != 0 {
		t.Errorf("%v, %v", mine, theirs)
	}
}

func TestFiftyWithOneRunID(t *testing.T) {
	for name, in := range stores {
		t.Run(name, func(t *testing.T) { fiftyWithOneRunID(t, in(t)) })
	}
}

func fiftyWithOneRunID(t *testing.T, set store.Set) {
	gate := make(chan struct{})
	a := gated(gate)
	h := newHouse(t, a, func(c *server.Config) { c.Store = set })
	base := h.listen(t)
	streams := make([]*stream, 50)
	var wg sync.WaitGroup
	for i := range streams {
		wg.Go(func() { streams[i] = open(t, "POST", base+chatPath, body("t", "r", "hi")) })
	}
	wg.Wait()
	close(gate)
	fresh := 0
	for _, s := range streams {
		if s.resp.StatusCode != 200 {
			t.Fatalf("status %d", s.resp.StatusCode)
		}
		if s.resp.Header.Get("X-Run-Resumed") == "" {
			fresh++
		}
		got := s.rest()
		want := []string{"RUN_STARTED", "run.accepted", "TEXT_MESSAGE_START", "text:hello from r", "TEXT_MESSAGE_END", "RUN_FINISHED"}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Fatal(diff)
		}
	}
	if order, _ := a.started(); len(order) != 1 || fresh != 1 {
		t.Errorf("agents %v, %d fresh", order, fresh)
	}
}

func TestCancel(t *testing.T) {
	for _, by := range []string{`{"threadId":"t"}`, `{"runId":"r"}`, `{"threadId":"t","runId":"r"}`} {
		a := hangs(text("m", "x")...)
		h := newHouse(t, a, nil)
		base := h.listen(t)
		s := open(t, "POST", base+chatPath, body("t", "r", "hi"))
		s.until("TEXT_MESSAGE_END")
		if w := h.do(t, "POST", chatPath+"/cancel", by); w.Code != 204 || w.Body.Len() != 0 {
			t.Errorf("%s: %d %s", by, w.Code, w.Body)
		}
		if diff := cmp.Diff([]string{"RUN_ERROR aborted"}, s.rest()); diff != "" {
			t.Errorf("%s: viewers see\n%s", by, diff)
		}
		eventually(t, "aborted", func() bool { return h.status(t, "r") == store.Aborted })
		if w := h.do(t, "POST", chatPath+"/cancel", by); w.Code != 204 {
			t.Errorf("%s again: %d", by, w.Code)
		}
	}
	h := newHouse(t, says(finished), nil)
	for _, bad := range []string{"", "{}", "[]", `{"threadId":1}`, `{"threadId":null}`, `{"threadId":""}`, `{"runId":{}}`, "x"} {
		wantStatus(t, h.do(t, "POST", chatPath+"/cancel", bad), 400, "invalid_input")
	}
	for _, none := range []string{`{"threadId":"nobody"}`, `{"runId":"nope"}`} {
		if w := h.do(t, "POST", chatPath+"/cancel", none); w.Code != 204 {
			t.Errorf("%s: %d", none, w.Code)
		}
	}
	wantStatus(t, h.do(t, "POST", "/v1/chat/nope/cancel", `{"threadId":"t"}`), 404, "unknown_sandbox")
}

// A run that another host drives is cancelled by way of the store.
func TestCancelOnAnotherHost(t *testing.T) {
	a := hangs(text("m", "x")...)
	one := newHouse(t, a, nil)
	two := newHouse(t, a, func(c *server.Config) { c.Store, c.Owner = one.store, "two" })
	base := one.listen(t)
	s := open(t, "POST", base+chatPath, body("t", "r", "hi"))
	s.until("TEXT_MESSAGE_END")
	if w := two.do(t, "POST", chatPath+"/cancel", `{"threadId":"t"}`); w.Code != 204 {
		t.Errorf("%d %s", w.Code, w.Body)
	}
	if diff := cmp.Diff([]string{"RUN_ERROR aborted"}, s.rest()); diff != "" {
		t.Error(diff)
	}
}

// A dead reader and a slow one hold up neither the driver nor anybody else.
func TestDeadReaderSlowsNobody(t *testing.T) {
	big := strings.Repeat("x", 64<<10)
	const many = 400 // 25 MiB: more than any socket holds
	a := &agent{play: func(_ context.Context, _ *chat.Run, say func(...event.Event)) {
		say(event.TextMessageStart{MessageID: "m", Role: "assistant"})
		for range many {
			say(event.TextMessageContent{MessageID: "m", Delta: big})
		}
		say(event.TextMessageEnd{MessageID: "m"}, finished)
	}}
	h := newHouse(t, a, func(c *server.Config) { c.Limits.WriteTime = 500 * time.Millisecond })
	base := h.listen(t)
	for range 4 {
		open(t, "POST", base+chatPath, body("t", "r", "hi")).until("RUN_STARTED") // and reads no more
	}
	live := open(t, "GET", base+chatPath+"?offset=-1&runId=r", "")
	n := 0
	for _, e := range live.rest() {
		if strings.HasPrefix(e, "text:") {
			n++
		}
	}
	if n != many || h.status(t, "r") != store.Completed {
		t.Errorf("%d of %d pieces; the run is %s", n, many, h.status(t, "r"))
	}
	// The dead ones are given up in bounded time.
	eventually(t, "no readers are left", func() bool {
		return strings.Contains(h.do(t, "GET", "/metrics", "").Body.String(), "aisbx_readers 0\n")
	})
}

func TestShutdownHandsOver(t *testing.T) {
	a := hangs(text("m", "x")...)
	h := newHouse(t, a, nil)
	base := h.listen(t)
	s := open(t, "POST", base+chatPath, body("t", "r", "hi"))
	s.until("TEXT_MESSAGE_END")
	if err := h.Shutdown(t.Context()); err != nil {
		t.Fatal(err)
	}
	// The stream breaks: a clean end would be taken for the run's.
	if _, err, ok := s.next(); !ok || err == nil {
		t.Errorf("the stream ended cleanly: %v %v", ok, err)
	}
	rec := h.record(t, "r")
	if rec.Status != store.Running || rec.Owner != "" {
		t.Errorf("record %+v", rec)
	}
	if _, err := h.store.Runs.Claim(t.Context(), "r", store.ClaimOptions{Owner: "another"}); err != nil {
		t.Errorf("another host can't have it: %v", err)
	}
	wantStatus(t, h.post(t, body("t", "r2", "hi")), 503, "shutdown")
	wantStatus(t, h.do(t, "GET", "/readyz", ""), 503, "shutdown")
	wantStatus(t, h.do(t, "GET", chatPath+"?offset=-1&runId=r", ""), 503, "shutdown")
	if w := h.do(t, "GET", "/healthz", ""); w.Code != 200 {
		t.Errorf("healthz %d", w.Code)
	}
}

func TestLimits(t *testing.T) {
	gate := make(chan struct{})
	h := newHouse(t, gated(gate), func(c *server.Config) { c.Limits.Runs, c.Limits.Readers = 1, 2 })
	base := h.listen(t)
	one := open(t, "POST", base+chatPath, body("t1", "r1", "hi"))
	one.until("TEXT_MESSAGE_END")
	w := h.post(t, body("t2", "r2", "hi"))
	wantStatus(t, w, 503, "overloaded")
	if w.Header().Get("Retry-After") == "" {
		t.Error("no Retry-After")
	}
	open(t, "GET", base+chatPath+"?offset=-1&runId=r1", "").until("RUN_STARTED")
	wantStatus(t, h.do(t, "GET", chatPath+"?offset=-1&runId=r1", ""), 503, "overloaded")
	close(gate)
	one.rest()
	eventually(t, "room again", func() bool { return h.post(t, body("t2", "r3", "hi")).Code == 200 })
}

// The run ends between the two reads of a hydration, whichever comes first: never
// may both the run and its transcript be missing.
func TestHydrateReadsTheActiveRunFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gate := make(chan struct{})
		end := &endsAfter{end: func() { close(gate); synctest.Wait() }}
		h := newHouse(t, gated(gate), func(c *server.Config) {
			end.Runs, end.Messages = c.Store.Runs, c.Store.Messages
			c.Store.Runs, c.Store.Messages = endsAfterFind{end}, endsAfterLoad{end}
		})
		go h.post(t, body("t", "r", "hi"))
		synctest.Wait()
		end.armed = true
		var got struct {
			Messages  []struct{ ID string }
			ActiveRun *struct{ RunID string }
		}
		w := h.do(t, "GET", chatPath+"?threadId=t", "")
		if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil {
			t.Fatal(err)
		}
		if got.ActiveRun == nil && len(got.Messages) != 2 {
			t.Errorf("neither the run nor its transcript: %s", w.Body)
		}
	})
}

type endsAfter struct {
	store.Runs
	store.Messages
	armed bool
	end   func()
}

func (e *endsAfter) now() {
	if e.armed {
		e.armed = false
		e.end()
	}
}

type endsAfterFind struct{ *endsAfter }

func (e endsAfterFind) FindActive(ctx context.Context, t store.Thread) (store.Run, error) {
	r, err := e.Runs.FindActive(ctx, t)
	e.now()
	return r, err
}

type endsAfterLoad struct{ *endsAfter }

func (e endsAfterLoad) Load(ctx context.Context, t store.Thread) ([]event.Message, error) {
	m, err := e.Messages.Load(ctx, t)
	e.now()
	return m, err
}

func TestHydrate(t *testing.T) {
	call := []event.Event{
		event.ToolCallStart{ToolCallID: "c1", ToolCallName: "Bash"},
		event.ToolCallArgs{ToolCallID: "c1", Delta: `{"command":"ls"}`}, event.ToolCallEnd{ToolCallID: "c1"},
		event.ToolCallResult{MessageID: "tr", ToolCallID: "c1", Content: "README.md", Role: "tool"},
	}
	h := newHouse(t, says(slices.Concat(text("m1", "Let me look."), call, text("m2", "Done."), []event.Event{finished})...), nil)
	in := edit(t, map[string]any{"messages": []any{
		map[string]any{"id": "u0", "role": "user", "content": []any{map[string]any{"type": "text", "text": "see"}, map[string]any{"type": "image", "url": "u"}}},
		map[string]any{"id": "x-reasoning", "role": "reasoning", "content": "hm"},
		map[string]any{"id": "x", "role": "assistant", "content": "ok", "toolCalls": []any{
			map[string]any{"id": "c0", "type": "function", "function": map[string]any{"name": "f", "arguments": "{"}}}},
		map[string]any{"id": "tool-c0", "role": "tool", "toolCallId": "c0", "content": `{"a":1}`, "error": "bad"},
		map[string]any{"id": "u1", "role": "user", "content": "go on"},
	}})
	if w := h.post(t, in); w.Code != 200 {
		t.Fatalf("%d %s", w.Code, w.Body)
	}
	w := h.do(t, "GET", chatPath+"?threadId=t&limit=50", "")
	want := `{"messages":[` +
		`{"id":"u0","role":"user","parts":[{"type":"text","content":"see"},{"type":"image","url":"u"}]},` +
		`{"id":"x","role":"assistant","parts":[{"type":"thinking","content":"hm"},{"type":"text","content":"ok"},` +
		`{"type":"tool-call","id":"c0","name":"f","arguments":"{","state":"complete","output":{"a":1}},` +
		`{"type":"tool-result","toolCallId":"c0","content":"{\"a\":1}","state":"error","error":"bad"}]},` +
		`{"id":"u1","role":"user","parts":[{"type":"text","content":"go on"}]},` +
		`{"id":"m1","role":"assistant","parts":[{"type":"text","content":"Let me look."},` +
		`{"type":"tool-call","id":"c1","name":"Bash","arguments":"{\"command\":\"ls\"}","input":{"command":"ls"},"state":"complete","output":"README.md"},` +
		`{"type":"tool-result","toolCallId":"c1","content":"README.md","state":"complete"}]},` +
		`{"id":"m2","role":"assistant","parts":[{"type":"text","content":"Done."}]}` +
		`],"activeRun":null,"interrupts":null}` + "\n"
	if diff := cmp.Diff(want, w.Body.String()); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
	// A join of the ended run shows the turn that started it, not what followed.
	join := frames(t, h.do(t, "GET", chatPath+"?offset=-1&runId=r", "").Body)
	snap, ok := join[1].ev.(event.MessagesSnapshot)
	if !ok || join[1].id != "" || len(snap.Messages) != 5 || snap.Messages[4].ID != "u1" {
		t.Errorf("preamble %+v", join[1])
	}
	for _, f := range join[2:] {
		if f.ev.Type() == event.TypeMessagesSnapshot {
			t.Error("a second preamble")
		}
	}
	if w := h.do(t, "GET", chatPath+"?threadId=nobody", ""); w.Code != 200 || w.Body.String() != `{"messages":[],"activeRun":null,"interrupts":null}`+"\n" {
		t.Errorf("unknown thread: %d %s", w.Code, w.Body)
	}
	// A request without messages goes on with what is stored.
	if w := h.post(t, body("t", "r2")); w.Code != 200 {
		t.Fatal(w.Code)
	}
	if msgs, _ := h.store.Messages.Load(t.Context(), store.Thread{ID: "t"}); len(msgs) < 9 {
		t.Errorf("%d messages", len(msgs))
	}
	h2 := newHouse(t, says(finished), func(c *server.Config) {
		c.Authorize = func(_ context.Context, _ server.Principal, t store.Thread) bool { return t.ID == "mine" }
	})
	if w := h2.do(t, "GET", chatPath+"?threadId=theirs", ""); w.Code != http.StatusForbidden || w.Body.String() != `{"error":"Forbidden"}`+"\n" {
		t.Errorf("%d %s", w.Code, w.Body)
	}
	wantStatus(t, h2.post(t, body("theirs", "r", "hi")), 403, "forbidden")
	wantStatus(t, h2.do(t, "POST", chatPath+"/cancel", `{"threadId":"theirs"}`), 403, "forbidden")
	if w := h2.post(t, body("mine", "r", "hi")); w.Code != 200 {
		t.Errorf("%d %s", w.Code, w.Body)
	}
}
