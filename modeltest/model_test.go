package modeltest_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/aisandbox-go/aisandbox/modeltest"
)

func validJSON(s string) bool { return json.Valid([]byte(s)) }

func TestTurnsRunOut(t *testing.T) {
	_, url := serve(t, modeltest.Script{Name: "short.yaml", Turns: []modeltest.Turn{modeltest.Say("one")}})
	if r := post(t, url, streaming); text(t, r) != "one" {
		t.Errorf("%s", r.Body)
	}
	r := post(t, url, streaming)
	if r.Status != 400 || errorType(t, r) != "invalid_request_error" {
		t.Errorf("%d %s", r.Status, r.Body)
	}
	if want := `mock model: script \"short.yaml\": queue \"default\" has no turn left after 1 requests; add turns or write after: repeat-last`; !strings.Contains(r.Body, want) {
		t.Errorf("%s does not say %s", r.Body, want)
	}
}

func TestRepeatLastKeepsToolIDsUnique(t *testing.T) {
	m, url := serve(t, parse(t, `
turns:
- {blocks: [{type: text, text: one}]}
- {blocks: [{type: tool_use, id: toolu_a, name: Bash}, {type: tool_use, name: Bash}]}
after: repeat-last
`))
	seen := map[string]int{}
	for range 4 {
		r := post(t, url, plain)
		var msg struct {
			ID      string
			Content []struct{ ID, Type string }
		}
		if err := json.Unmarshal([]byte(r.Body), &msg); err != nil {
			t.Fatal(err)
		}
		seen[msg.ID]++
		for _, c := range msg.Content {
			if c.Type == "tool_use" {
				seen[c.ID]++
			}
		}
	}
	for id, n := range seen {
		if n != 1 {
			t.Errorf("id %q used %d times", id, n)
		}
	}
	if len(seen) != 4+6 || seen["toolu_a"] != 1 || seen["toolu_a_r2"] != 1 {
		t.Errorf("ids %v", seen)
	}
	var turns []int
	for _, q := range m.Requests() {
		turns = append(turns, q.Turn)
	}
	if diff := cmp.Diff([]int{0, 1, 1, 1}, turns); diff != "" {
		t.Error(diff)
	}
}

func TestIDsDifferBetweenModels(t *testing.T) {
	ids := map[string]bool{}
	for range 2 {
		s := modeltest.NewServer(t, modeltest.Script{Turns: []modeltest.Turn{modeltest.Say("x")}})
		var msg struct{ ID string }
		if err := json.Unmarshal([]byte(post(t, s.URL, plain).Body), &msg); err != nil {
			t.Fatal(err)
		}
		ids[msg.ID] = true
	}
	if len(ids) != 2 {
		t.Errorf("ids %v", ids)
	}
}

func TestRoutes(t *testing.T) {
	_, url := serve(t, parse(t, `
turns: [{blocks: [{type: text, text: default}]}]
after: repeat-last
queues:
  sub: {turns: [{blocks: [{type: text, text: sub}]}], after: repeat-last}
  compact: {turns: [{blocks: [{type: text, text: compact}]}], after: repeat-last}
  fallback: {turns: [{blocks: [{type: text, text: fallback}]}], after: repeat-last}
  tool: {turns: [{blocks: [{type: text, text: tool}]}], after: repeat-last}
  beta: {turns: [{blocks: [{type: text, text: beta}]}], after: repeat-last}
  result: {turns: [{blocks: [{type: text, text: result}]}], after: repeat-last}
  haiku: {turns: [{blocks: [{type: text, text: haiku}]}], after: repeat-last}
  first: {turns: [{blocks: [{type: text, text: first}]}], after: repeat-last}
  odd: {turns: [{blocks: [{type: text, text: odd}]}], after: repeat-last}
routes:
- {when: {model: {regexp: '^haiku'}}, use: haiku}
- {when: {last_user: {regexp: '(?i)sub-?agent'}, stream: true}, use: sub}
- {when: {system: "CRITICAL: Respond with TEXT ONLY"}, use: compact}
- {when: {tool: StructuredOutput}, use: tool}
- {when: {header: {anthropic-beta: {regexp: '\boauth-'}}}, use: beta}
- {when: {last_tool_result: exit code 3}, use: result}
- {when: {first_user: remember}, use: first}
- {when: {body: '"odd":7'}, use: odd}
- {when: {stream: false}, use: fallback}
`))
	user := func(text string) string {
		return `{"model":"m1","stream":true,"messages":[{"role":"user","content":` + quoted(text) + `}]}`
	}
	for _, tt := range []struct {
		body   string
		header []string
		want   string
	}{
		{streaming, nil, "default"},
		{plain, nil, "fallback"},
		{user("You are a SubAgent."), nil, "sub"},
		{user("remember the subagent"), nil, "sub"}, // two routes match: the first wins
		{strings.Replace(user("You are a SubAgent."), `"stream":true`, `"stream":false`, 1), nil, "fallback"},
		{`{"model":"haiku-4","stream":true,"messages":[]}`, nil, "haiku"},
		{`{"stream":true,"system":"CRITICAL: Respond with TEXT ONLY.","messages":[]}`, nil, "compact"},
		{`{"stream":true,"system":[{"type":"text","text":"a"},{"type":"text","text":"CRITICAL: Respond with TEXT ONLY."}],"messages":[]}`, nil, "compact"},
		{`{"stream":true,"messages":[{"role":"system","content":"CRITICAL: Respond with TEXT ONLY"}]}`, nil, "compact"},
		{`{"stream":true,"tools":[{"name":"Bash"},{"name":"StructuredOutput"}],"messages":[]}`, nil, "tool"},
		{streaming, []string{"Anthropic-Beta", "x,oauth-2025"}, "beta"},
		{streaming, []string{"Anthropic-Beta", "oauthx"}, "default"},
		{`{"stream":true,"messages":[{"role":"user","content":[{"type":"tool_result","tool_use_id":"t","content":[{"type":"text","text":"exit code 3"}]}]}]}`, nil, "result"},
		{`{"stream":true,"messages":[{"role":"user","content":"remember 42"},{"role":"assistant","content":"ok"},{"role":"user","content":"what?"}]}`, nil, "first"},
		{`{"stream":true,"odd":7,"messages":[]}`, nil, "odd"},
		// What the client adds in the user's name is not what the user said.
		{`{"stream":true,"messages":[{"role":"user","content":[{"type":"text","text":"<system-reminder>\nsubagent</system-reminder>"},{"type":"text","text":"hi"}]}]}`, nil, "default"},
		// A tool result does not hide the last text.
		{`{"stream":true,"messages":[{"role":"user","content":"subagent"},{"role":"user","content":[{"type":"tool_result","tool_use_id":"t","content":"x"}]}]}`, nil, "sub"},
	} {
		r := post(t, url, tt.body, tt.header...)
		if !strings.Contains(r.Body, `"text":"`+tt.want+`"`) {
			t.Errorf("%s %v: not from %s: %s", tt.body, tt.header, tt.want, r.Body)
		}
	}
}

func quoted(s string) string {
	b, err := json.Marshal(s)
	if err != nil {
		panic(err)
	}
	return string(b)
}

func TestNoRouteMatches(t *testing.T) {
	_, url := serve(t, parse(t, `
queues: {a: {turns: [{blocks: []}]}}
routes: [{when: {last_user: never}, use: a}]
`))
	if r := post(t, url, streaming); r.Status != 400 || !strings.Contains(r.Body, "no route matches") {
		t.Errorf("%d %s", r.Status, r.Body)
	}
}

func TestSessionsHaveTheirOwnPosition(t *testing.T) {
	_, url := serve(t, parse(t, `
session_header: x-session
turns: [{blocks: [{type: text, text: one}]}, {blocks: [{type: text, text: two}]}]
`))
	for _, tt := range []struct{ session, want string }{{"a", "one"}, {"b", "one"}, {"a", "two"}, {"", "one"}, {"b", "two"}} {
		if r := post(t, url, streaming, "X-Session", tt.session); text(t, r) != tt.want {
			t.Errorf("session %q: %s, want %s", tt.session, text(t, r), tt.want)
		}
	}
}

func TestTemplates(t *testing.T) {
	_, url := serve(t, parse(t, `
capture:
  cwd: {from: system, regexp: 'directory: (\S+)'}
  word: {from: first_user, regexp: '[0-9]+'}
turns:
- blocks:
  - {type: text, deltas: ["{{request.first_user}}|{{request.last_user}}|", "{{request.last_tool_result}}|{{request.tool_result.t1}}|"]}
  - {type: text, text: "{{request.capture.cwd}} {{request.capture.word}} {{request.model}} {{request.messages}} {{request.number}} {{request.header.x-a}} {{other}} {{"}
  - {type: tool_use, name: Write, input: {path: "{{request.capture.cwd}}/f", content: "{{request.last_tool_result}}"}, pieces: 3}
  - {type: tool_use, name: Write, deltas: ['{"c":"{{request.last_tool_result}}', '"}']}
  - {type: text, deltas: [{raw: '{{request.model}}'}]}
`))
	r := post(t, url, `{"model":"m1","system":"x\nWorking directory: /w\n","messages":[
		{"role":"user","content":"keep 42"},
		{"role":"assistant","content":[{"type":"tool_use","id":"t1","name":"Bash","input":{}},{"type":"tool_use","id":"t2","name":"Bash","input":{}}]},
		{"role":"user","content":[{"type":"tool_result","tool_use_id":"t1","content":"one"},{"type":"tool_result","tool_use_id":"t2","content":[{"type":"text","text":"a \"quoted\"\nline <é>"}]}]},
		{"role":"user","content":[{"type":"text","text":"go on"}]}]}`, "X-A", "hv")
	var msg struct {
		Content []struct {
			Text  string
			Input map[string]string
		}
	}
	if err := json.Unmarshal([]byte(r.Body), &msg); err != nil {
		t.Fatalf("%v: %s", err, r.Body)
	}
	const result = "a \"quoted\"\nline <é>"
	var got []string
	for _, c := range msg.Content {
		got = append(got, c.Text+c.Input["path"]+c.Input["content"]+c.Input["c"])
	}
	want := []string{"keep 42|go on|" + result + "|one|", "/w 42 m1 4 1 hv {{other}} {{", "/w/f" + result, result, "{{request.model}}"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestTemplateFailures(t *testing.T) {
	for _, tt := range []struct{ text, want string }{
		{"{{request.tool_result.nope}}", `has no result for the tool call \"nope\"`},
		{"{{request.capture.c}}", `zz+ matches nothing in the last_user of the request`},
		{strings.Repeat("{{request.last_user}}", 40), "grows beyond"},
	} {
		_, url := serve(t, modeltest.Script{
			Capture: map[string]modeltest.Capture{"c": {From: "last_user", Regexp: "zz+"}},
			Turns:   []modeltest.Turn{modeltest.Say(tt.text)},
		})
		r := post(t, url, `{"stream":true,"messages":[{"role":"user","content":"`+strings.Repeat("y", 1<<20)+`"}]}`)
		if r.Status != 400 || !strings.Contains(r.Body, tt.want) || !strings.Contains(r.Body, `script \"test\": queue \"default\": turn 0`) {
			t.Errorf("%d %.300s", r.Status, r.Body)
		}
	}
}

func TestRecordedRequests(t *testing.T) {
	m, url := serve(t, modeltest.Script{Turns: []modeltest.Turn{modeltest.Say("x")}})
	body := `{"model":"m","stream":true,"max_tokens":5,"system":"S","tools":[{"name":"A"},{"name":"B"}],"messages":[
		{"role":"user","content":"q"},
		{"role":"assistant","content":[{"type":"thinking","thinking":"t"},{"type":"tool_use","id":"1","name":"A","input":{"k": 1}}]},
		{"role":"user","content":[{"type":"tool_result","tool_use_id":"1","is_error":true,"content":"no"},{"type":"image","source":{}}]}]}`
	post(t, url, body, "X-Api-Key", "sk-1", "Authorization", "Bearer b", "X-Other", "o")
	want := []modeltest.Request{{
		Number: 1, Method: "POST", URL: "/v1/messages?beta=true", Body: []byte(body), Queue: "default", Turn: 0,
		Messages: &modeltest.Messages{
			Model: "m", Stream: true, MaxTokens: 5, System: "S", Tools: []string{"A", "B"},
			Messages: []modeltest.Message{
				{Role: "user", Content: []modeltest.Content{{Type: "text", Text: "q"}}},
				{Role: "assistant", Content: []modeltest.Content{{Type: "thinking", Text: "t"}, {Type: "tool_use", ID: "1", Name: "A", Input: json.RawMessage(`{"k": 1}`)}}},
				{Role: "user", Content: []modeltest.Content{{Type: "tool_result", ID: "1", Text: "no", IsError: true}, {Type: "image"}}},
			},
		},
	}}
	got := m.Requests()
	header, redacted := got[0].Header, got[0].Redacted().Header
	got[0].Header = nil
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	for name, values := range map[string][2]string{"X-Api-Key": {"sk-1", "[redacted]"}, "Authorization": {"Bearer b", "[redacted]"}, "X-Other": {"o", "o"}, "Cookie": {"", ""}} {
		if header.Get(name) != values[0] || redacted.Get(name) != values[1] {
			t.Errorf("%s: %q, redacted %q", name, header.Get(name), redacted.Get(name))
		}
	}
}

func TestRecordIsBounded(t *testing.T) {
	for _, opts := range []modeltest.Options{{MaxRequests: 3}, {MaxRecordBytes: 3 * len(plain)}} {
		m, err := modeltest.New(modeltest.Script{Turns: []modeltest.Turn{modeltest.Say("x")}, After: modeltest.AfterRepeatLast}, opts)
		if err != nil {
			t.Fatal(err)
		}
		srv, err := modeltest.Start(t.Context(), "localhost:0", m)
		if err != nil {
			t.Fatal(err)
		}
		for range 5 {
			post(t, srv.URL, plain)
		}
		if err := srv.Close(); err != nil {
			t.Error(err)
		}
		var numbers []int
		for _, q := range m.Requests() {
			numbers = append(numbers, q.Number)
		}
		if diff := cmp.Diff([]int{3, 4, 5}, numbers); diff != "" {
			t.Errorf("%+v: %s", opts, diff)
		}
	}
}

func TestConcurrentRequestsTakeEachTurnOnce(t *testing.T) {
	const n = 50
	var s modeltest.Script
	for i := range n {
		s.Turns = append(s.Turns, modeltest.Say(fmt.Sprintf("turn %d", i)))
	}
	_, url := serve(t, s)
	var mu sync.Mutex
	seen := map[string]bool{}
	c := client(t)
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() {
			r, err := postContext(t.Context(), c, url, streaming)
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			seen[text(t, r)] = true
		})
	}
	wg.Wait()
	if len(seen) != n {
		t.Errorf("%d different turns", len(seen))
	}
}

func TestTooManyAtATime(t *testing.T) {
	m, err := modeltest.New(parse(t, "turns: [{status: 500, times: 3}, {no_answer: true}]"), modeltest.Options{MaxConcurrent: 1})
	if err != nil {
		t.Fatal(err)
	}
	srv, err := modeltest.Start(t.Context(), "127.0.0.1:0", m)
	if err != nil {
		t.Fatal(err)
	}
	for range 3 { // one after the other is no problem
		if r := post(t, srv.URL, streaming); r.Status != 500 {
			t.Errorf("%d %s", r.Status, r.Body)
		}
	}
	c := client(t)
	done := make(chan error, 1)
	go func() {
		_, err := postContext(t.Context(), c, srv.URL, streaming)
		done <- err
	}()
	for len(m.Requests()) < 4 && !t.Failed() { // until the first one holds the slot
		runtime.Gosched()
	}
	if r := post(t, srv.URL, streaming); r.Status != 529 || errorType(t, r) != "overloaded_error" {
		t.Errorf("%d %s", r.Status, r.Body)
	}
	if err := srv.Close(); err != nil {
		t.Error(err)
	}
	if err := <-done; err == nil {
		t.Error("the unanswered request was answered")
	}
}

var _ http.Handler = (*modeltest.Model)(nil)
