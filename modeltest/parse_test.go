package modeltest_test

import (
	"encoding/json"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/aisandbox-go/aisandbox/modeltest"
)

func TestParseEveryKey(t *testing.T) {
	got := parse(t, `
session_header: x-s
after: repeat-last
turns:
- blocks:
  - {type: thinking, text: hm, pieces: 2, signature: c2ln}
  - type: text
    deltas:
    - a
    - {text: b}
    - {raw: '\ud83d'}
    - 1.50
    - true
    - ""
    - |-
      line one
      line two
  - {type: tool_use, id: t1, name: Bash, input: {z: 1, a: [x, null, 1.0, {q: 123456789012345678901234567890, r: 1e400, s: "12"}]}, pieces: 3}
  stop: tool_use
  usage: {in: 1, cr: 2, cw: 3, out: 4}
  ping: true
  times: 2
  wait: 1s
  delay: 2ms
  headers: {x-a: 1}
  cut: 0
- {blocks: [], malformed: 0}
- {blocks: [], hang: 0}
- {blocks: [], error: {after: 0, type: t, message: m}}
- {no_answer: true}
- {status: 500, body: {b: 1, a: 2}}
- {status: 500, body: text}
queues:
  q: {turns: [{blocks: []}], after: error}
routes:
- use: q
  when: {model: m, system: s, first_user: f, last_user: {contains: l}, last_tool_result: {regexp: r}, body: b, stream: false, tool: T, header: {x-b: v}}
capture:
  c: {from: body, regexp: x}
`[1:])
	zero, no := modeltest.AfterDeltas(0), false
	want := modeltest.Script{
		Name: "test.yaml", SessionHeader: "x-s", After: modeltest.AfterRepeatLast,
		Turns: []modeltest.Turn{
			{
				Blocks: []modeltest.Block{
					{Type: "thinking", Text: "hm", Pieces: 2, Signature: "c2ln"},
					{Type: "text", Deltas: []modeltest.Delta{{Text: "a"}, {Text: "b"}, {Raw: `\ud83d`}, {Text: "1.50"}, {Text: "true"}, {}, {Text: "line one\nline two"}}},
					{Type: "tool_use", ID: "t1", Name: "Bash", Input: json.RawMessage(`{"z":1,"a":["x",null,1.0,{"q":123456789012345678901234567890,"r":1e400,"s":"12"}]}`), Pieces: 3},
				},
				Stop: "tool_use", Usage: &modeltest.Usage{In: 1, CacheRead: 2, CacheWrite: 3, Out: 4}, Ping: true, Times: 2,
				Wait: time.Second, Delay: 2 * time.Millisecond, Headers: map[string]string{"x-a": "1"}, Cut: zero,
			},
			{Blocks: []modeltest.Block{}, Malformed: zero},
			{Blocks: []modeltest.Block{}, Hang: zero},
			{Blocks: []modeltest.Block{}, Error: &modeltest.Failure{Type: "t", Message: "m"}},
			{NoAnswer: true},
			{Status: 500, Body: json.RawMessage(`{"b":1,"a":2}`)},
			{Status: 500, Body: "text"},
		},
		Queues: map[string]modeltest.Queue{"q": {Turns: []modeltest.Turn{{Blocks: []modeltest.Block{}}}, After: modeltest.AfterError}},
		Routes: []modeltest.Route{{Use: "q", When: modeltest.When{
			Model: modeltest.Pattern{Contains: "m"}, System: modeltest.Pattern{Contains: "s"}, FirstUser: modeltest.Pattern{Contains: "f"},
			LastUser: modeltest.Pattern{Contains: "l"}, LastToolResult: modeltest.Pattern{Regexp: "r"}, Body: modeltest.Pattern{Contains: "b"},
			Stream: &no, Tool: "T", Header: map[string]modeltest.Pattern{"x-b": {Contains: "v"}},
		}}},
		Capture: map[string]modeltest.Capture{"c": {From: "body", Regexp: "x"}},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestParseJSON(t *testing.T) {
	got := parse(t, `{"turns": [{"blocks": [{"type": "text", "deltas": ["\ud83d\ude00 \"q\"\n", {"raw": "\\ud83d"}]}], "cut": 1}]}`)
	want := modeltest.Script{Name: "test.yaml", Turns: []modeltest.Turn{{
		Blocks: []modeltest.Block{{Type: "text", Deltas: []modeltest.Delta{{Text: "😀 \"q\"\n"}, {Raw: `\ud83d`}}}},
		Cut:    modeltest.AfterDeltas(1),
	}}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestParseErrors(t *testing.T) {
	turn := func(s string) string { return "turns:\n- {blocks: [{type: text, text: a}], " + s + "}\n" }
	block := func(s string) string { return "turns:\n- blocks:\n  - {" + s + "}\n" }
	for _, tt := range []struct{ script, want string }{
		// The document.
		{"", "s:1:1: empty (write at least turns:)"},
		{"# only a comment\n", "s:1:1: empty (write at least turns:)"},
		{"- a", "s:1:1: is a list (write a mapping)"},
		{"text", "s:1:1: is text (write a mapping)"},
		{"{}", "s:1:1: turns: no turns (write at least one)"},
		{"turns: []", "s:1:1: turns: no turns (write at least one)"},
		{"turns: [{blocks: []}]\n---\nturns: []", "s:2:1: more than one document (keep one script per file)"},
		{"turns: [", "s:1:8: sequence end token ']' not found (fix the YAML syntax)"},
		{"turns: \xff", "s:1:1: not valid UTF-8 (save it as UTF-8; use raw: for anything else)"},
		{strings.Repeat("#", modeltest.MaxScriptBytes+1), "s:1:1: larger than 4194304 bytes (split it into several scripts)"},
		{"x: " + strings.Repeat("[", 100000), "s:1:68: nested deeper than 64 (flatten it)"},
		{strings.Repeat("- ", 100000), "s:1:129: nested deeper than 64 (flatten it)"},
		{"turns: {\"\\ud83d\": 1}", "s:1:10: not enough length for escaped UTF-16 surrogate pair (fix the YAML syntax)"},
		// Keys.
		{"turn: []", "s:1:1: turn: unknown key (known here: after, capture, queues, routes, session_header, turns)"},
		{"turns: []\nturns: []", "s:2:1: mapping key \"turns\" already defined at [1:1] (fix the YAML syntax)"},
		{turn("statsu: 500"), "s:2:37: turns[0].statsu: unknown key (known here: blocks, body, cut, delay, error, hang, headers, malformed, no_answer, ping, status, stop, times, usage, wait)"},
		{block("typ: text"), "s:3:6: turns[0].blocks[0].typ: unknown key (known here: deltas, id, input, name, pieces, signature, text, type)"},
		{block("type: text, deltas: [{rw: x}]"), "s:3:28: turns[0].blocks[0].deltas[0].rw: unknown key (known here: raw, text)"},
		{turn("usage: {input: 3}"), "s:2:45: turns[0].usage.input: unknown key (known here: cr, cw, in, out)"},
		{turn("error: {code: 3}"), "s:2:45: turns[0].error.code: unknown key (known here: after, message, type)"},
		{"queues: {q: {turn: []}}", "s:1:14: queues.q.turn: unknown key (known here: after, turns)"},
		{"routes: [{if: x}]", "s:1:11: routes[0].if: unknown key (known here: use, when)"},
		{"routes: [{when: {user: x}}]", "s:1:18: routes[0].when.user: unknown key (known here: body, first_user, header, last_tool_result, last_user, model, stream, system, tool)"},
		{"routes: [{when: {body: {re: x}}}]", "s:1:25: routes[0].when.body.re: unknown key (known here: contains, regexp)"},
		{"capture: {a: {of: x}}", "s:1:15: capture.a.of: unknown key (known here: from, regexp)"},
		{"? [a]\n: b", "s:2:1: found an invalid key for this map (fix the YAML syntax)"},
		// Types.
		{"turns: x", "s:1:8: turns: is text (write a list)"},
		{"turns: {a: b}", "s:1:8: turns: is a mapping (write a list)"},
		{"turns: 7", "s:1:8: turns: is a number (write a list)"},
		{"turns: true", "s:1:8: turns: is true or false (write a list)"},
		{"turns: [7]", "s:1:9: turns[0]: is a number (write a mapping)"},
		{"turns: [~]", "s:1:9: turns[0]: no value (write one or remove the key)"},
		{"turns:", "s:1:8: turns: no value (write one or remove the key)"},
		{turn("times: 3.5"), "s:2:44: turns[0].times: is a number (write a whole number)"},
		{turn("times: 0x10"), "s:2:44: turns[0].times: is not a plain decimal number (write it as 0, 1, 2, …)"},
		{turn("times: 99999999999999999999"), "s:2:44: turns[0].times: is text (write a whole number)"},
		{turn("times: two"), "s:2:44: turns[0].times: is text (write a whole number)"},
		{turn("ping: yes"), "s:2:43: turns[0].ping: is text (write true or false)"},
		{turn("wait: 25"), "s:2:43: turns[0].wait: \"25\" is not a duration (write it as 25ms or 2s)"},
		{turn("stop: [a]"), "s:2:43: turns[0].stop: is a list (write text)"},
		{block("type: text, text: {a: b}"), "s:3:24: turns[0].blocks[0].text: is a mapping (write text)"},
		{block("type: tool_use, name: B, input: {a: .inf}"), "s:3:42: turns[0].blocks[0].input.a: is a number (write a value that JSON has)"},
		{block("type: tool_use, name: B, input: {a: 0x1f}"), "s:3:42: turns[0].blocks[0].input.a: \"0x1f\" is not a JSON number (write it in decimal)"},
		{block("type: !!str text"), "s:3:12: turns[0].blocks[0].type: tags are not supported (remove the tag)"},
		{"turns: &a [{blocks: []}]", "s:1:8: turns: anchors and aliases are not supported (write the value out)"},
		{"after: &a error\nturns: [{blocks: []}]", "s:1:8: after: anchors and aliases are not supported (write the value out)"},
		{"<<: {a: b}", "s:1:1: merge keys are not supported (write the keys out)"},
		// Meaning.
		{turn("times: -1"), "s:2:37: turns[0].times: -1 is out of range (write 1 to 1000000)"},
		{turn("delay: 1h"), "s:2:37: turns[0].delay: 1h0m0s is out of range (write 0s to 10m0s)"},
		{turn("stop: end"), "s:2:37: turns[0].stop: unknown stop reason \"end\" (write one of end_turn, tool_use, max_tokens, stop_sequence, pause_turn, refusal, model_context_window_exceeded)"},
		{turn("usage: {in: -1}"), "s:2:37: turns[0].usage: negative count (write 0 or more)"},
		{turn("cut: 2"), "s:2:37: turns[0].cut: the message has no delta 2 (write 0 to 1)"},
		{turn("hang: -1"), "s:2:37: turns[0].hang: the message has no delta -1 (write 0 to 1)"},
		{turn("error: {after: 2}"), "s:2:45: turns[0].error.after: the message has no delta 2 (write 0 to 1)"},
		{turn("cut: 0, hang: 0"), "s:2:3: turns[0]: more than one of cut, malformed, hang and error (keep one per turn)"},
		{turn("status: 500"), "s:2:37: turns[0].status: combined with a message (keep status, headers, body, error and wait only)"},
		{turn("body: x"), "s:2:37: turns[0].body: without a status (add status: 400 to 599)"},
		{turn("no_answer: true"), "s:2:37: turns[0].no_answer: combined with an answer (remove one)"},
		{turn("headers: {a b: x}"), "s:2:47: turns[0].headers.a b: not a header (use a plain name and a value of one line)"},
		{turn("headers: {a: \"x\\ny\"}"), "s:2:47: turns[0].headers.a: not a header (use a plain name and a value of one line)"},
		{turn("headers: {content-ENCODING: gzip}"), "s:2:47: turns[0].headers.content-ENCODING: is set by the server (remove it)"},
		{"turns: [{}]", "s:1:9: turns[0]: neither blocks nor status nor no_answer (say what to answer; blocks: [] is a message without content)"},
		{"turns: [{status: 200}]", "s:1:10: turns[0].status: 200 is not an HTTP error (write 400 to 599; a good answer needs no status)"},
		{"turns: [{status: 500, body: x, error: {}}]", "s:1:23: turns[0].body: both body and error (keep one)"},
		{"turns: [{status: 500, error: {after: 1}}]", "s:1:31: turns[0].error.after: together with a status (remove it)"},
		{block("text: a"), "s:3:5: turns[0].blocks[0].type: missing (write text, thinking or tool_use)"},
		{block("type: image"), "s:3:6: turns[0].blocks[0].type: unknown type \"image\" (write text, thinking or tool_use)"},
		{block("type: text, name: a"), "s:3:5: turns[0].blocks[0]: id, name or input in a text block (they belong in a tool_use block)"},
		{block("type: text, text: a, deltas: [b]"), "s:3:27: turns[0].blocks[0].deltas: both text and deltas (keep one)"},
		{block("type: text, signature: a"), "s:3:18: turns[0].blocks[0].signature: in a text block (it belongs in a thinking block)"},
		{block("type: text, pieces: -1"), "s:3:18: turns[0].blocks[0].pieces: negative (write 1 or more)"},
		{block("type: text, deltas: [a], pieces: 2"), "s:3:31: turns[0].blocks[0].pieces: together with deltas (keep one)"},
		{block("type: text, deltas: [{text: a, raw: b}]"), "s:3:27: turns[0].blocks[0].deltas[0]: both text and raw (keep one)"},
		{block("type: text, deltas: [{raw: 'a\"b'}]"), "s:3:28: turns[0].blocks[0].deltas[0].raw: not the inside of a JSON string (escape quotes, backslashes and control characters, as in \\ud83d)"},
		{block("type: text, text: '{{request.nope}}'"), "s:3:18: turns[0].blocks[0].text: {{request.nope}} is no part of a request (known: model, system, first_user, last_user, last_tool_result, messages, number, tool_result.ID, header.NAME, capture.NAME)"},
		{block("type: text, text: '{{request.model.x}}'"), "s:3:18: turns[0].blocks[0].text: {{request.model.x}} is no part of a request (known: model, system, first_user, last_user, last_tool_result, messages, number, tool_result.ID, header.NAME, capture.NAME)"},
		{block("type: text, text: '{{request.last user}}'"), "s:3:18: turns[0].blocks[0].text: {{request. without a name and }} (known: model, system, first_user, last_user, last_tool_result, messages, number, tool_result.ID, header.NAME, capture.NAME)"},
		{block("type: tool_use, name: B, input: {a: '{{request.capture.c}}'}"), "s:3:31: turns[0].blocks[0].input: {{request.capture.c}} names no entry of capture (known: model, system, first_user, last_user, last_tool_result, messages, number, tool_result.ID, header.NAME, capture.NAME)"},
		{block("type: tool_use"), "s:3:5: turns[0].blocks[0].name: missing (name the tool to call)"},
		{block("type: tool_use, name: B, text: x"), "s:3:31: turns[0].blocks[0].text: in a tool_use block (write input)"},
		{block("type: tool_use, name: B, input: x"), "s:3:31: turns[0].blocks[0].input: not an object (write the arguments as key: value)"},
		{block("type: tool_use, name: B, input: null"), "s:3:31: turns[0].blocks[0].input: not an object (write the arguments as key: value)"},
		{block("type: tool_use, name: B, input: {}, deltas: [a]"), "s:3:31: turns[0].blocks[0].input: both input and deltas (keep one)"},
		{block("type: tool_use, name: B, id: x}\n  - {type: tool_use, name: B, id: x"), "s:4:31: turns[0].blocks[1].id: turns[0].blocks[0] has the id \"x\" already (give each tool call its own id, or none)"},
		{"turns: [{blocks: []}]\nafter: repeat", "s:2:1: after: unknown value \"repeat\" (write error or repeat-last)"},
		{"session_header: a b\nturns: [{blocks: []}]", "s:1:1: session_header: not a header name (write one such as x-claude-code-session-id)"},
		{"queues: {q: {turns: [{blocks: []}]}}", "s:1:10: queues.q: no route uses it (add a route with use: q)"},
		{"queues: {q: {}}\nroutes: [{when: {body: x}, use: q}]", "s:1:10: queues.q.turns: no turns (write at least one)"},
		{"queues: {q: {turns: [{blocks: []}, {status: 1}]}}\nroutes: [{when: {body: x}, use: q}]", "s:1:37: queues.q.turns[1].status: 1 is not an HTTP error (write 400 to 599; a good answer needs no status)"},
		{"queues: {default: {turns: [{blocks: []}]}}\nroutes: [{when: {body: x}, use: default}]", "s:1:10: queues.default: bad name \"default\" (use letters, digits, - and _, and not default)"},
		{"turns: [{blocks: []}]\nroutes: [{when: {body: x}, use: q}]", "s:2:28: routes[0].use: there is no queue \"q\" (name one of queues:)"},
		{"turns: [{blocks: []}]\nroutes: [{when: {}, use: default}]", "s:2:11: routes[0].when: no condition (add one; turns for every other request belong in the top level turns)"},
		{"turns: [{blocks: []}]\nroutes: [{when: {body: {regexp: '('}}, use: default}]", "s:2:25: routes[0].when.body.regexp: error parsing regexp: missing closing ): `(` (see https://pkg.go.dev/regexp/syntax)"},
		{"turns: [{blocks: []}]\nroutes: [{when: {body: {regexp: a, contains: b}}, use: default}]", "s:2:18: routes[0].when.body: both contains and regexp (keep one)"},
		{"turns: [{blocks: []}]\nroutes: [{when: {header: {x: {}}}, use: default}]", "s:2:27: routes[0].when.header.x: no condition (write text it contains, or regexp:)"},
		{"turns: [{blocks: []}]\ncapture: {a: {from: user, regexp: x}}", "s:2:15: capture.a.from: \"user\" is no part of a request (write one of model, system, first_user, last_user, last_tool_result, body)"},
		{"turns: [{blocks: []}]\ncapture: {a: {from: body}}", "s:2:11: capture.a.regexp: missing (write the pattern whose first group is captured)"},
		{"turns: [{blocks: []}]\ncapture: {'a.b': {from: body, regexp: x}}", "s:2:11: capture.a.b: bad name \"a.b\" (use letters, digits, - and _)"},
	} {
		_, err := modeltest.ParseScript("s", []byte(tt.script))
		var se *modeltest.ScriptError
		if !errors.As(err, &se) {
			t.Errorf("%.60q: error %v is no ScriptError", tt.script, err)
			continue
		}
		if got := strings.TrimPrefix(err.Error(), "modeltest: "); got != tt.want {
			t.Errorf("%.60q:\n got %s\nwant %s", tt.script, got, tt.want)
		}
		if se.Problem == "" || se.Cure == "" {
			t.Errorf("%.60q: problem %q, cure %q", tt.script, se.Problem, se.Cure)
		}
	}
}

// TestScriptsInGo checks what only a Go literal can get wrong.
func TestScriptsInGo(t *testing.T) {
	for _, tt := range []struct {
		turn modeltest.Turn
		want string
	}{
		{modeltest.Call("Bash", func() {}), "modeltest: script: turns[0].blocks[0].input: not JSON: json: unsupported type: func() (use values that JSON has)"},
		{modeltest.Call("Bash", json.RawMessage("{")), "modeltest: script: turns[0].blocks[0].input: not JSON: json: error calling MarshalJSON for type json.RawMessage: unexpected end of JSON input (use values that JSON has)"},
		{modeltest.Turn{Status: 500, Body: func() {}}, "modeltest: script: turns[0].body: not JSON: json: unsupported type: func() (use values that JSON has)"},
		{modeltest.Call("Bash", map[string]any{"command": "ls"}), ""},
		{modeltest.Call("Bash", struct{ Command string }{"ls"}), ""},
		{modeltest.Call("Bash", nil), ""},
		{modeltest.Fail(401, "no"), ""},
	} {
		_, err := modeltest.New(modeltest.Script{Turns: []modeltest.Turn{tt.turn}}, modeltest.Options{})
		if got := errorText(err); got != tt.want {
			t.Errorf("got %s\nwant %s", got, tt.want)
		}
	}
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

func FuzzParseScript(f *testing.F) {
	example, err := os.ReadFile("testdata/fix-bug.yaml")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(example)
	for _, s := range []string{
		"turns: [{blocks: [{type: text, deltas: [a, {raw: '\\ud83d'}]}], cut: 1}]",
		`{"turns":[{"status":429,"headers":{"retry-after":"1"},"body":{"a":[1,null]}}]}`,
		"queues: {q: {turns: [{no_answer: true}]}}\nroutes: [{when: {stream: false}, use: q}]",
		"a: &a [*a]", "? x\n: y", "a: |\n  b\n", "a: >-\n", "--- !!map {}", "{{{", "a: 'x", "\t", "%YAML 1.2\n---\n", "<<: x", "a: b: c",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		s, err := modeltest.ParseScript("f", data)
		if err != nil {
			var se *modeltest.ScriptError
			if !errors.As(err, &se) || se.Line < 1 || se.Column < 0 || se.Problem == "" || se.Cure == "" {
				t.Fatalf("bad error %#v", err)
			}
			return
		}
		if _, err := modeltest.New(s, modeltest.Options{}); err != nil {
			t.Fatalf("parsed but refused: %v", err)
		}
	})
}
