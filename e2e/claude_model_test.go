package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/aisandbox-go/aisandbox/internal/testenv"
	"github.com/aisandbox-go/aisandbox/modeltest"
)

// claude is the real Claude Code CLI with a home and a working directory of its
// own, talking to a mock model.
type claude struct {
	t         *testing.T
	bin       string
	home, dir string
	model     *modeltest.TestServer
}

func newClaude(t *testing.T, s modeltest.Script) *claude {
	t.Helper()
	c := &claude{t: t, bin: testenv.Claude(t), home: t.TempDir(), dir: t.TempDir()}
	c.serve(s)
	return c
}

// serve lets the CLI talk to another model from now on.
func (c *claude) serve(s modeltest.Script) { c.model = modeltest.NewServer(c.t, s) }

// run is what one process of the CLI printed.
type run struct {
	lines  []line
	exit   int
	stderr string
}

// line is one line of stream-json, as far as the tests look at it.
type line struct {
	Type         string `json:"type"`
	Subtype      string `json:"subtype"`
	SessionID    string `json:"session_id"`
	IsError      bool   `json:"is_error"`
	APIStatus    *int   `json:"api_error_status"`
	Result       string `json:"result"`
	NumTurns     int    `json:"num_turns"`
	ErrorStatus  *int   `json:"error_status"` // api_retry
	APIKeySource string `json:"apiKeySource"`
	Event        struct {
		Type  string
		Delta struct {
			Type, Text, Thinking string
			PartialJSON          string `json:"partial_json"`
		}
	} `json:"event"`
	Message struct {
		ID, Model string
		Content   json.RawMessage
	} `json:"message"`
	Usage struct {
		Input      int `json:"input_tokens"`
		Output     int `json:"output_tokens"`
		CacheRead  int `json:"cache_read_input_tokens"`
		CacheWrite int `json:"cache_creation_input_tokens"`
	} `json:"usage"`
}

// block is one content block of an assistant or user line.
type block struct {
	Type, Text, Thinking string
	ID, Name             string
	Input                json.RawMessage
	ToolUseID            string `json:"tool_use_id"`
	Content              json.RawMessage
	IsError              bool `json:"is_error"`
}

// run gives the prompt to a new process and waits for its end.
func (c *claude) run(prompt string, args ...string) run {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, c.bin, append([]string{
		"--setting-sources", "user", "-p", "--output-format", "stream-json", "--verbose", "--model", "sonnet",
		"--include-partial-messages", "--permission-mode", "bypassPermissions"}, args...)...)
	cmd.Dir = c.dir
	// Nothing is inherited but PATH: a key or a proxy of the developer must not
	// lead the CLI to the real service.
	cmd.Env = []string{
		"PATH=" + os.Getenv("PATH"), "HOME=" + c.home, "LANG=C.UTF-8", "TMPDIR=" + c.t.TempDir(),
		"IS_SANDBOX=1", "CLAUDE_CODE_SANDBOXED=1", // root may bypass permissions in a sandbox only
		"ANTHROPIC_BASE_URL=" + c.model.URL, "ANTHROPIC_API_KEY=sk-fake",
		"DISABLE_TELEMETRY=1", "DISABLE_AUTOUPDATER=1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1",
		"CLAUDE_CODE_MAX_RETRIES=2",
	}
	cmd.Stdin = strings.NewReader(prompt)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 5 * time.Second
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) || ctx.Err() != nil {
		c.t.Fatalf("run %s: %v\nstdout %s\nstderr %s", c.bin, err, &stdout, &stderr)
	}
	r := run{exit: cmd.ProcessState.ExitCode(), stderr: stderr.String()}
	sc := bufio.NewScanner(&stdout)
	sc.Buffer(nil, 64<<20)
	for sc.Scan() {
		var l line
		if err := json.Unmarshal(sc.Bytes(), &l); err != nil {
			c.t.Fatalf("not a JSON line: %v: %s", err, sc.Text())
		}
		r.lines = append(r.lines, l)
	}
	if err := sc.Err(); err != nil {
		c.t.Fatal(err)
	}
	if c.t.Failed() || testing.Verbose() {
		c.t.Logf("exit %d, stderr %q, lines:\n%s", r.exit, r.stderr, summary(r))
	}
	return r
}

func summary(r run) string {
	var b strings.Builder
	for _, l := range r.lines {
		b.WriteString("  " + strings.TrimSpace(strings.Join([]string{l.Type, l.Subtype, l.Event.Type, l.Event.Delta.Type, l.Result}, " ")) + "\n")
	}
	return b.String()
}

// of returns the lines of one type, and subtype if it is not empty.
func (r run) of(typ, subtype string) []line {
	var out []line
	for _, l := range r.lines {
		if l.Type == typ && (subtype == "" || l.Subtype == subtype) {
			out = append(out, l)
		}
	}
	return out
}

// deltas joins what the stream events of the run carried.
func (r run) deltas() (text, thinking, input string) {
	for _, l := range r.of("stream_event", "") {
		text += l.Event.Delta.Text
		thinking += l.Event.Delta.Thinking
		input += l.Event.Delta.PartialJSON
	}
	return text, thinking, input
}

func (l line) blocks(t *testing.T) []block {
	t.Helper()
	if len(l.Message.Content) > 0 && l.Message.Content[0] == '"' {
		return nil
	}
	var out []block
	if err := json.Unmarshal(l.Message.Content, &out); err != nil {
		t.Errorf("content %s: %v", l.Message.Content, err)
	}
	return out
}

// result returns the last line, which must be the only result.
func (r run) result(t *testing.T) line {
	t.Helper()
	if results := r.of("result", ""); len(results) != 1 || r.lines[len(r.lines)-1].Type != "result" {
		t.Fatalf("want one result, at the end:\n%s", summary(r))
	}
	return r.lines[len(r.lines)-1]
}

func (r run) ok(t *testing.T, want string) line {
	t.Helper()
	res := r.result(t)
	if r.exit != 0 || res.IsError || res.Subtype != "success" || res.Result != want || r.stderr != "" {
		t.Errorf("exit %d, result %+v, stderr %q; want %q", r.exit, res, r.stderr, want)
	}
	return res
}

func (r run) failed(t *testing.T, status int, text string) {
	t.Helper()
	res := r.result(t)
	if r.exit != 1 || !res.IsError || res.APIStatus == nil || *res.APIStatus != status || !strings.Contains(res.Result, text) {
		t.Errorf("exit %d, result %+v; want status %d and %q", r.exit, res, status, text)
	}
}

// messages returns the requests for a message that the model got.
func (c *claude) messages() []modeltest.Request {
	var out []modeltest.Request
	for _, q := range c.model.Requests() {
		if q.Messages != nil {
			out = append(out, q)
		}
	}
	return out
}

func parse(t *testing.T, name, yaml string) modeltest.Script {
	t.Helper()
	s, err := modeltest.ParseScript(name, []byte(yaml))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestClaudeText(t *testing.T) {
	c := newClaude(t, parse(t, "text.yaml", `
turns:
- ping: true
  usage: {in: 11, cr: 22, cw: 33, out: 44}
  blocks: [{type: text, deltas: [Hel, "lo, ", wor, ld.]}]
`))
	r := c.run("Say hello.")
	res := r.ok(t, "Hello, world.")
	if text, _, _ := r.deltas(); text != "Hello, world." {
		t.Errorf("streamed %q", text)
	}
	if u := res.Usage; u.Input != 11 || u.CacheRead != 22 || u.CacheWrite != 33 || u.Output != 44 {
		t.Errorf("usage %+v", u)
	}
	if init := r.of("system", "init"); len(init) != 1 || init[0].SessionID == "" || init[0].APIKeySource != "ANTHROPIC_API_KEY" {
		t.Errorf("init %+v", init)
	}
	q := c.messages()
	if len(q) != 1 {
		t.Fatalf("%d requests", len(q))
	}
	if q[0].URL != "/v1/messages?beta=true" || !q[0].Messages.Stream || q[0].Messages.LastUser() != "Say hello." ||
		q[0].Header.Get("X-Api-Key") != "sk-fake" || q[0].Header.Get("X-Claude-Code-Session-Id") != res.SessionID {
		t.Errorf("request %s %q %v", q[0].URL, q[0].Messages.LastUser(), q[0].Header)
	}
}

func TestClaudeThinking(t *testing.T) {
	c := newClaude(t, parse(t, "thinking.yaml", `
turns:
- blocks:
  - {type: thinking, deltas: ["Let me ", "think."]}
  - {type: text, deltas: ["It is ", "4."]}
`))
	r := c.run("What is 2+2?")
	r.ok(t, "It is 4.")
	text, thinking, _ := r.deltas()
	if text != "It is 4." || thinking != "Let me think." {
		t.Errorf("streamed %q, thought %q", text, thinking)
	}
}

func TestClaudeToolCall(t *testing.T) {
	c := newClaude(t, parse(t, "bash.yaml", `
turns:
- blocks:
  - {type: text, text: I count.}
  - {type: tool_use, id: toolu_1, name: Bash, input: {command: 'echo é > a.txt; wc -c < a.txt', description: Count}, pieces: 4}
- blocks: [{type: text, text: 'The tool said {{request.last_tool_result}}.'}]
`))
	r := c.run("Count.")
	r.ok(t, "The tool said 3.")
	if _, _, input := r.deltas(); input != `{"command":"echo é > a.txt; wc -c < a.txt","description":"Count"}` {
		t.Errorf("streamed input %s", input)
	}
	var got []string
	for _, l := range r.lines {
		if l.Type == "assistant" || l.Type == "user" {
			for _, b := range l.blocks(t) {
				got = append(got, l.Type+" "+b.Type+" "+b.ID+b.ToolUseID+string(b.Content))
			}
		}
	}
	want := []string{"assistant text ", "assistant tool_use toolu_1", `user tool_result toolu_1"3"`, "assistant text "}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if b, err := os.ReadFile(filepath.Join(c.dir, "a.txt")); string(b) != "é\n" {
		t.Errorf("file %q, %v", b, err)
	}
}

func TestClaudeFixesBug(t *testing.T) {
	example, err := os.ReadFile(filepath.Join(testenv.Root(t), "modeltest", "testdata", "fix-bug.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	c := newClaude(t, parse(t, "fix-bug.yaml", string(example)))
	for name, text := range map[string]string{"sum.sh": "echo $(($1 - $2))\n", "test.sh": "test \"$(sh sum.sh 2 3)\" = 5\n"} {
		if err := os.WriteFile(filepath.Join(c.dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	r := c.run("Make test.sh pass.")
	r.ok(t, "Fixed. The test says: pass")
	if b, err := os.ReadFile(filepath.Join(c.dir, "sum.sh")); string(b) != "echo $(($1 + $2))\n" {
		t.Errorf("file %q, %v", b, err)
	}
	var results []string
	for _, c := range c.messages()[4].Messages.ToolResults() {
		results = append(results, c.Text)
	}
	if len(results) != 4 || results[0] != "FAIL" || results[3] != "pass" {
		t.Errorf("tool results %q", results)
	}
}

func TestClaudeUnauthorized(t *testing.T) {
	for _, tt := range []struct{ message, want string }{
		{"no such key", "Failed to authenticate. API Error: 401 no such key"},
		// The CLI has its own sentence for what the real service says.
		{"invalid x-api-key", "Invalid API key"},
	} {
		c := newClaude(t, modeltest.Script{Turns: []modeltest.Turn{modeltest.Fail(401, tt.message)}, After: modeltest.AfterRepeatLast})
		c.run("hi").failed(t, 401, tt.want)
		if n := len(c.messages()); n != 3 {
			t.Errorf("%s: %d requests", tt.message, n)
		}
	}
}

func TestClaudeServerError(t *testing.T) {
	c := newClaude(t, modeltest.Script{Turns: []modeltest.Turn{modeltest.Fail(500, "it broke")}, After: modeltest.AfterRepeatLast})
	r := c.run("hi")
	r.failed(t, 500, "API Error: 500")
	if n := len(c.messages()); n != 3 {
		t.Errorf("%d requests", n)
	}
	if retries := r.of("system", "api_retry"); len(retries) != 2 || retries[0].ErrorStatus == nil || *retries[0].ErrorStatus != 500 {
		t.Errorf("retries %+v", retries)
	}
}

func TestClaudeRateLimitRecovers(t *testing.T) {
	c := newClaude(t, parse(t, "429.yaml", `
turns:
- {status: 429, headers: {retry-after: 1}, error: {message: slow down}}
- blocks: [{type: text, text: ok now}]
`))
	r := c.run("hi")
	r.ok(t, "ok now")
	if retries := r.of("system", "api_retry"); len(retries) != 1 || retries[0].ErrorStatus == nil || *retries[0].ErrorStatus != 429 {
		t.Errorf("retries %+v", retries)
	}
}

// TestClaudeBrokenStream shows the fallback: after a stream that breaks in any
// of three ways the CLI asks again without streaming, and the answer to that is
// a message with another id.
func TestClaudeBrokenStream(t *testing.T) {
	for _, fault := range []string{"cut: 2", "malformed: 2", "error: {after: 2, type: overloaded_error, message: Overloaded}"} {
		t.Run(strings.Split(fault, ":")[0], func(t *testing.T) {
			c := newClaude(t, parse(t, "broken.yaml", `
turns: [{blocks: [{type: text, deltas: [Part, "ial ", answer]}], delay: 100ms, `+fault+`}]
queues: {whole: {turns: [{blocks: [{type: text, text: whole answer}]}]}}
routes: [{when: {stream: false}, use: whole}]
`))
			r := c.run("hi")
			if res := r.result(t); r.exit != 0 || res.IsError || res.Result != "whole answer" {
				t.Errorf("exit %d, result %+v", r.exit, res)
			}
			if text, _, _ := r.deltas(); text != "Partial " {
				t.Errorf("streamed %q", text)
			}
			a := r.of("assistant", "")
			if len(a) != 1 || len(a[0].blocks(t)) != 1 || a[0].blocks(t)[0].Text != "whole answer" {
				t.Errorf("assistant lines %+v", a)
			}
			q := c.messages()
			if len(q) != 2 || !q[0].Messages.Stream || q[1].Messages.Stream || q[1].Queue != "whole" {
				t.Errorf("%d requests", len(q))
			}
		})
	}
}

// TestClaudeResume shows that a resumed session sends its first turn to a model
// that has never seen it.
func TestClaudeResume(t *testing.T) {
	c := newClaude(t, modeltest.Script{Turns: []modeltest.Turn{modeltest.Say("Noted.")}})
	first := c.run("Remember the number 4711.").ok(t, "Noted.")

	c.serve(parse(t, "resume.yaml", `
capture: {number: {from: first_user, regexp: 'number (\d+)'}}
turns: [{blocks: [{type: text, text: 'You said {{request.capture.number}}, then asked: {{request.last_user}}'}]}]
`))
	second := c.run("What number did I say?", "--resume", first.SessionID).ok(t, "You said 4711, then asked: What number did I say?")
	if second.SessionID != first.SessionID {
		t.Errorf("session %s became %s", first.SessionID, second.SessionID)
	}
	// Without the session the model cannot know.
	c.serve(modeltest.Script{Turns: []modeltest.Turn{modeltest.Say("{{request.first_user}}")}})
	c.run("What number did I say?").ok(t, "What number did I say?")
}

// TestClaudeScriptEnds shows that a script which is too short fails the run at
// once and says why.
func TestClaudeScriptEnds(t *testing.T) {
	c := newClaude(t, modeltest.Script{Name: "short.yaml", Turns: []modeltest.Turn{modeltest.Call("Bash", map[string]any{"command": "true"})}})
	r := c.run("hi")
	r.failed(t, 400, `script "short.yaml": queue "default" has no turn left`)
	if n := len(c.messages()); n != 2 {
		t.Errorf("%d requests", n)
	}
}
