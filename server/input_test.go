package server_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/server"
)

const badBody = "Invalid AG-UI request body. See docs/migration/ag-ui-compliance.md."

// edit sets fields of a valid body; nil removes one.
func edit(t *testing.T, changes map[string]any) string {
	t.Helper()
	var o map[string]any
	if err := json.Unmarshal([]byte(body("t", "r", "hi")), &o); err != nil {
		t.Fatal(err)
	}
	for k, v := range changes {
		if o[k] = v; v == nil {
			delete(o, k)
		}
	}
	b, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestBodyTable(t *testing.T) {
	type m = map[string]any
	msg := func(v m) m { return m{"messages": []any{v}} }
	for _, tt := range []struct {
		name string
		edit m
		ok   bool
	}{
		{"as it is", m{}, true},
		{"tools, context, state and forwardedProps absent", m{"tools": nil, "context": nil, "state": nil, "forwardedProps": nil}, true},
		{"unknown fields", m{"data": m{"x": 1}, "protocolVersion": "1.0", "cursor": 7}, true},
		{"no messages", m{"messages": []any{}}, true},

		{"threadId missing", m{"threadId": nil}, false},
		{"threadId empty", m{"threadId": ""}, false},
		{"threadId a number", m{"threadId": 1}, false},
		{"threadId in other case", m{"threadId": nil, "threadID": "t"}, false},
		{"threadId of two lines", m{"threadId": "a\nb"}, false},
		{"threadId too long", m{"threadId": strings.Repeat("x", 257)}, false},
		{"runId missing", m{"runId": nil}, false},
		{"runId with CR", m{"runId": "a\rb"}, false},
		{"runId with NUL", m{"runId": "a\x00b"}, false},
		{"parentRunId a number", m{"parentRunId": 5}, false},
		{"parentRunId", m{"parentRunId": "p"}, true},
		{"messages missing", m{"messages": nil}, false},
		{"messages an object", m{"messages": m{}}, false},
		{"a message that is null", m{"messages": []any{nil}}, false},

		{"message without id", msg(m{"role": "user", "content": "x"}), false},
		{"message with numeric id", msg(m{"id": 1, "role": "user", "content": "x"}), false},
		{"message without role", msg(m{"id": "a", "content": "x"}), false},
		{"unknown role", msg(m{"id": "a", "role": "bot", "content": "x"}), false},
		{"user without content", msg(m{"id": "a", "role": "user"}), false},
		{"user with number", msg(m{"id": "a", "role": "user", "content": 1}), false},
		{"user with parts", msg(m{"id": "a", "role": "user", "content": []any{m{"type": "text", "text": "x"}, m{"type": "image", "url": "u"}}}), true},
		{"user with a part without type", msg(m{"id": "a", "role": "user", "content": []any{m{"text": "x"}}}), false},
		{"user with string parts", msg(m{"id": "a", "role": "user", "content": []any{"x"}}), false},
		{"assistant with nothing", msg(m{"id": "a", "role": "assistant"}), true},
		{"assistant with content null", msg(m{"id": "a", "role": "assistant", "content": nil}), true},
		{"assistant with parts", msg(m{"id": "a", "role": "assistant", "content": []any{}}), false},
		{"tool call", msg(m{"id": "a", "role": "assistant", "toolCalls": []any{
			m{"id": "c", "type": "function", "function": m{"name": "f", "arguments": "{}"}}}}), true},
		{"tool call of another type", msg(m{"id": "a", "role": "assistant", "toolCalls": []any{
			m{"id": "c", "type": "x", "function": m{"name": "f", "arguments": "{}"}}}}), false},
		{"tool call with object arguments", msg(m{"id": "a", "role": "assistant", "toolCalls": []any{
			m{"id": "c", "type": "function", "function": m{"name": "f", "arguments": m{}}}}}), false},
		{"tool call without function", msg(m{"id": "a", "role": "assistant", "toolCalls": []any{m{"id": "c", "type": "function"}}}), false},
		{"tool", msg(m{"id": "a", "role": "tool", "toolCallId": "c", "content": ""}), true},
		{"tool without call", msg(m{"id": "a", "role": "tool", "content": "x"}), false},
		{"tool without content", msg(m{"id": "a", "role": "tool", "toolCallId": "c"}), false},
		{"tool with numeric error", msg(m{"id": "a", "role": "tool", "toolCallId": "c", "content": "x", "error": 1}), false},
		{"activity", msg(m{"id": "a", "role": "activity", "activityType": "x", "content": m{}}), true},
		{"activity without type", msg(m{"id": "a", "role": "activity", "content": m{}}), false},
		{"activity with text", msg(m{"id": "a", "role": "activity", "activityType": "x", "content": "y"}), false},
		{"system", msg(m{"id": "a", "role": "system", "content": "x"}), true},
		{"developer without content", msg(m{"id": "a", "role": "developer"}), false},
		{"reasoning with number", msg(m{"id": "a", "role": "reasoning", "content": 1}), false},
		{"metadata a string", msg(m{"id": "a", "role": "user", "content": "x", "metadata": "y"}), false},
		{"parts are dropped", msg(m{"id": "a", "role": "user", "content": "x", "parts": "whatever"}), true},

		{"tools a string", m{"tools": "x"}, false},
		{"tool without name", m{"tools": []any{m{"description": "d", "parameters": m{}}}}, false},
		{"a client tool", m{"tools": []any{m{"name": "n", "description": "d", "parameters": m{}}}}, true},
		{"context without value", m{"context": []any{m{"description": "d"}}}, false},
		{"context", m{"context": []any{m{"description": "d", "value": "v"}}}, true},
		{"state of any kind", m{"state": 7}, true},
		{"forwardedProps an array", m{"forwardedProps": []any{}}, false},
		{"resume without status", m{"resume": []any{m{"interruptId": "i"}}}, false},
		{"resume with other status", m{"resume": []any{m{"interruptId": "i", "status": "done"}}}, false},
		{"resume an object", m{"resume": m{}}, false},
		{"resume empty", m{"resume": []any{}}, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a := says(finished)
			h := newHouse(t, a, nil)
			w := h.post(t, edit(t, tt.edit))
			order, _ := a.started()
			if tt.ok {
				if w.Code != 200 || len(order) != 1 {
					t.Errorf("got %d %s, agents %v", w.Code, w.Body, order)
				}
				return
			}
			if w.Code != 400 || w.Body.String() != badBody || !strings.HasPrefix(w.Header().Get("Content-Type"), "text/plain") || len(order) != 0 {
				t.Errorf("got %d %q %v, agents %v", w.Code, w.Body, w.Header(), order)
			}
		})
	}
	for _, raw := range []string{"", "null", "[]", "{", `"x"`, "{}x", "\xff", `{"threadId":"t","runId":"r","messages":[]`} {
		h := newHouse(t, says(finished), nil)
		if w := h.post(t, raw); w.Code != 400 || w.Body.String() != badBody {
			t.Errorf("%q: %d %s", raw, w.Code, w.Body)
		}
	}
}

func TestInputReachesTheDefinition(t *testing.T) {
	a := says(finished)
	h := newHouse(t, a, func(c *server.Config) {
		c.Keys = []server.Key{{Token: "0123456789abcdef", Tenant: "acme", UserID: "ann"}}
	})
	in := edit(t, map[string]any{
		"parentRunId": "p", "state": map[string]any{"a": 1}, "forwardedProps": map[string]any{"model": "opus"},
		"context":  []any{map[string]any{"description": "d", "value": "v"}},
		"tools":    []any{map[string]any{"name": "n", "description": "d", "parameters": map[string]any{"type": "object"}}},
		"messages": []any{map[string]any{"id": "a", "role": "activity", "activityType": "x", "content": map[string]any{}}, map[string]any{"id": "u", "role": "user", "content": "<hi> & bye"}},
	})
	if w := h.post(t, in, header("Authorization", "Bearer 0123456789abcdef")); w.Code != 200 {
		t.Fatalf("%d %s", w.Code, w.Body)
	}
	want := server.RunInput{
		Definition: "demo", Tenant: "acme", UserID: "ann", ThreadID: "t", RunID: "r", ParentRunID: "p",
		Messages: []event.Message{{ID: "u", Role: "user", Content: event.Text("<hi> & bye")}},
		Tools:    []server.ClientTool{{Name: "n", Description: "d", Parameters: json.RawMessage(`{"type":"object"}`)}},
		Context:  []server.ContextItem{{Description: "d", Value: "v"}},
		State:    json.RawMessage(`{"a":1}`), ForwardedProps: json.RawMessage(`{"model":"opus"}`),
	}
	if diff := cmp.Diff([]server.RunInput{want}, a.inputs); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
	rec := h.record(t, "r")
	if string(rec.Input) != `{"user":"ann","body":`+in+`}` || rec.Definition != "demo" || rec.Adapter != "scripted" || rec.Thread.Tenant != "acme" {
		t.Errorf("record %+v", rec)
	}
	// Another host can build the run again from its record.
	req, err := h.Rebuild(t.Context(), rec)
	if diff := cmp.Diff([]server.RunInput{want, want}, a.inputs); diff != "" {
		t.Errorf("rebuilt (-want +got)\n%s", diff)
	}
	// The user, too: its sandboxes are another's.
	if err != nil || req.RunID != "r" || req.ThreadID != "t" || req.Tenant != "acme" || req.UserID != "ann" || req.Adapter == nil || !req.Exclusive || len(req.Use) < 3 {
		t.Errorf("rebuilt %+v: %v", req, err)
	}
}

func TestBodyLimit(t *testing.T) {
	h := newHouse(t, says(finished), func(c *server.Config) { c.Limits.Body = 4096 })
	small := body("t", "r1", strings.Repeat("x", 3000))
	if w := h.post(t, small); w.Code != 200 {
		t.Errorf("%d bytes: %d", len(small), w.Code)
	}
	wantStatus(t, h.post(t, body("t", "r2", strings.Repeat("x", 5000))), 413, "body_too_large")
	wantStatus(t, h.do(t, "POST", chatPath+"/cancel", fmt.Sprintf(`{"runId":%q}`, strings.Repeat("x", 5000))), 413, "body_too_large")
}

func FuzzBody(f *testing.F) {
	f.Add(body("t", "r", "hi"))
	f.Add(`{"threadId":"t","runId":"r","messages":[{"id":"a","role":"assistant","toolCalls":[{"id":"c","type":"function","function":{"name":"f","arguments":"{"}}]}]}`)
	f.Add(`{"threadId":"t","runId":"r","messages":[{"id":"a","role":"user","content":[{"type":"text","text":"x"}]}],"resume":[{"interruptId":"i","status":"cancelled"}]}`)
	f.Fuzz(func(t *testing.T, in string) {
		a := says(finished)
		h := newHouse(t, a, nil)
		w := h.post(t, in)
		order, _ := a.started()
		switch w.Code {
		case 200:
			fs := frames(t, w.Body)
			legal(t, fs)
			if len(order) != 1 && !strings.Contains(in, "resume") {
				t.Errorf("agents %v", order)
			}
			if w := h.do(t, "GET", "/v1/chat/demo?offset=-1&runId="+queryEscape(a.inputs[0].RunID), ""); w.Code != 200 {
				t.Errorf("join: %d %s", w.Code, w.Body)
			}
		case 400:
			if len(order) != 0 {
				t.Errorf("agents %v", order)
			}
		default:
			t.Errorf("%d %s", w.Code, w.Body)
		}
	})
}
