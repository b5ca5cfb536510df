package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/harness"
	"github.com/aisandbox-go/aisandbox/harness/claudecode"
	"github.com/aisandbox-go/aisandbox/harness/harnesstest"
	"github.com/aisandbox-go/aisandbox/internal/testenv"
	"github.com/aisandbox-go/aisandbox/modeltest"
	"github.com/aisandbox-go/aisandbox/policy"
	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/secret"
)

// agent is the claude-code harness with the real CLI, without a sandbox around
// it: what the harness says is written and started as it is.
type agent struct {
	t         *testing.T
	bin       string
	home, dir string
	model     *modeltest.TestServer
}

func newAgent(t *testing.T, s modeltest.Script) *agent {
	t.Helper()
	return &agent{t: t, bin: testenv.Claude(t), home: t.TempDir(), dir: t.TempDir(), model: modeltest.NewServer(t, s)}
}

// turn runs one turn and returns its events; p's paths are filled in.
func (a *agent) turn(o claudecode.Options, p harness.Plan) []event.Event {
	a.t.Helper()
	o.Executable = []string{a.bin}
	o.BaseURL = a.model.URL
	if o.AuthMode == "" {
		o.Keys = apiKey("sk-fake")
	}
	p.RunID, p.ThreadID = harnesstest.RunID, "thread-1"
	p.Root, p.Private = a.dir, a.t.TempDir()
	p.Traits = provider.Traits{Isolation: provider.IsolationContainer}
	p.Warn = func(msg string) { a.t.Log("warning: " + msg) }
	cli := claudecode.CLI("sonnet", o)
	t := harness.Turn{Plan: p, NewID: event.NewIDs(p.RunID)}
	events, end := a.once(cli, t)
	if next, why, ok := cli.(harness.Fallback).Fallback(t, events, end); ok {
		a.t.Log(why)
		events, _ = a.once(cli, next)
	}
	if err := harnesstest.CheckRun(events); err != nil {
		a.t.Error(err)
	}
	if a.t.Failed() || testing.Verbose() {
		b, _ := harnesstest.Encode(events)
		a.t.Logf("events:\n%s", b)
	}
	return events
}

func (a *agent) once(cli harness.CLI, t harness.Turn) ([]event.Event, harness.End) {
	a.t.Helper()
	files, _, err := cli.Files(t.Plan)
	if err != nil {
		a.t.Fatal(err)
	}
	for _, f := range files {
		if err := os.WriteFile(filepath.Join(t.Private, f.Name), f.Content, f.Mode); err != nil {
			a.t.Fatal(err)
		}
	}
	c, err := cli.Command(t)
	if err != nil {
		a.t.Fatal(err)
	}
	cmd := exec.CommandContext(a.t.Context(), c.Argv[0], c.Argv[1:]...)
	cmd.Dir, cmd.Stdin = c.Dir, c.Stdin
	// A key that is inherited must not matter in host mode.
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "HOME=" + a.home, "LANG=C.UTF-8", "TMPDIR=" + a.t.TempDir(), "ANTHROPIC_API_KEY=sk-inherited"}, c.Env...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 5 * time.Second
	timer := time.AfterFunc(2*time.Minute, func() { _ = cmd.Cancel() })
	defer timer.Stop()
	var exit *exec.ExitError
	if err := cmd.Run(); err != nil && !errors.As(err, &exit) {
		a.t.Fatal(err)
	}
	end := harness.End{Exit: provider.Exit{Code: cmd.ProcessState.ExitCode()}, StderrTail: stderr.String()}
	if ws, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		end.Exit = provider.Exit{Code: 128 + int(ws.Signal()), Signal: int(ws.Signal())}
	}
	events, err := harnesstest.Decode(cli.Decoder(t), stdout.Bytes(), 0, end)
	if err != nil {
		a.t.Fatal(err)
	}
	if stderr.Len() > 0 {
		a.t.Logf("stderr: %s", &stderr)
	}
	return events, end
}

// asked returns the requests for a message.
func (a *agent) asked() []*modeltest.Messages {
	var out []*modeltest.Messages
	for _, r := range a.model.Requests() {
		if r.Messages != nil {
			out = append(out, r.Messages)
		}
	}
	return out
}

func ask(s string) harness.Plan {
	return harness.Plan{Messages: []event.Message{{ID: "u", Role: "user", Content: event.Text(s)}}}
}

func spoken(events []event.Event) string {
	var b strings.Builder
	for _, ev := range events {
		if e, ok := ev.(event.TextMessageContent); ok {
			b.WriteString(e.Delta)
		}
	}
	return b.String()
}

func ending(events []event.Event) string {
	switch e := events[len(events)-1].(type) {
	case event.RunError:
		return e.Code
	default:
		return event.TanStackOf(e).FinishReason
	}
}

func sessionOf(t *testing.T, events []event.Event) string {
	t.Helper()
	for _, ev := range events {
		if s, ok := event.CustomOf[event.SessionID](ev, event.SessionIDName("claude-code")); ok {
			return s.SessionID
		}
	}
	t.Fatal("no session event")
	return ""
}

// TestClaudeHarnessFlags gives the CLI every flag that the harness knows.
func TestClaudeHarnessFlags(t *testing.T) {
	a := newAgent(t, modeltest.Script{Turns: []modeltest.Turn{
		modeltest.Call("Bash", map[string]any{"command": "echo hi"}), modeltest.Say("It says hi."),
	}})
	p := ask("/say hi")
	p.System, p.Instructions = []string{"SYSTEM-ONE", "SYSTEM-TWO"}, "AGENTS-TEXT"
	p.Policy = &policy.Policy{Default: policy.Allow, Commands: policy.Commands{Deny: []string{"curl *, (x)"}, Ask: []string{"git push*"}, Allow: []string{"echo *"}}}
	events := a.turn(claudecode.Options{
		AllowedTools: []string{"Read"}, DisallowedTools: []string{"WebFetch"}, AddDirs: []string{a.home}, MaxTurns: 5, PermissionMode: "default",
	}, p)
	if got := spoken(events); got != "It says hi." || ending(events) != "stop" {
		t.Errorf("says %q and ends with %q", got, ending(events))
	}
	req := a.asked()
	if len(req) != 2 {
		t.Fatalf("%d requests, want 2", len(req))
	}
	for _, s := range []string{"SYSTEM-ONE\n\nSYSTEM-TWO\n\nAGENTS-TEXT", "Claude Code"} {
		if !strings.Contains(req[0].System, s) {
			t.Errorf("the system prompt lacks %q", s)
		}
	}
	if got := req[0].FirstUser(); !strings.Contains(got, "/say hi") {
		t.Errorf("the model was asked %q", got)
	}
	for _, tool := range []string{"WebFetch", "ScheduleWakeup", "CronCreate"} {
		if slices.Contains(req[0].Tools, tool) {
			t.Errorf("%s is offered", tool)
		}
	}
	if got := req[1].ToolResults(); len(got) != 1 || got[0].Text != "hi" {
		t.Errorf("the tool said %+v", got)
	}
}

func TestClaudeHarnessReplacesSystemPrompt(t *testing.T) {
	a := newAgent(t, modeltest.Script{Turns: []modeltest.Turn{modeltest.Say("ok")}})
	p := ask("hi")
	p.System = []string{"ONLY-THIS"}
	a.turn(claudecode.Options{ReplaceSystemPrompt: true}, p)
	if req := a.asked(); len(req) != 1 || !strings.Contains(req[0].System, "ONLY-THIS") || strings.Contains(req[0].System, "interactive agent") {
		t.Errorf("system prompt: %.300q", req[0].System)
	}
}

// TestClaudeHarnessPolicy shows that rules hold where the mode asks for nothing.
func TestClaudeHarnessPolicy(t *testing.T) {
	a := newAgent(t, modeltest.Script{Turns: []modeltest.Turn{
		modeltest.Call("Bash", map[string]any{"command": "echo a && curl -s http://127.0.0.1:1/"}),
		modeltest.Call("Write", map[string]any{"file_path": "x.txt", "content": "x"}),
		modeltest.Call("Bash", map[string]any{"command": "echo b > b.txt && git push origin"}),
		modeltest.Call("Bash", map[string]any{"command": "echo fine"}),
		modeltest.Say("done"),
	}})
	p := ask("go")
	p.Policy = &policy.Policy{Default: policy.Allow, Commands: policy.Commands{Deny: []string{"curl *"}, Ask: []string{"git push*"}}, Capabilities: policy.Capabilities{FileWrite: policy.Deny}}
	events := a.turn(claudecode.Options{}, p)
	var failed []bool
	for _, ev := range events {
		if e, ok := ev.(event.ToolCallResult); ok {
			failed = append(failed, event.TanStackOf(e).State == "output-error")
		}
	}
	if d := cmp.Diff([]bool{true, true, true, false}, failed); d != "" {
		t.Errorf("refused calls (-want +got):\n%s", d)
	}
	if left, err := os.ReadDir(a.dir); err != nil || len(left) > 0 {
		t.Errorf("refused calls have made %v, %v", left, err)
	}
}

func TestClaudeHarnessImage(t *testing.T) {
	const png = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
	a := newAgent(t, modeltest.Script{Turns: []modeltest.Turn{modeltest.Say("a pixel")}})
	p := ask("")
	image := json.RawMessage(`{"type":"image","source":{"type":"data","mimeType":"image/png","value":"` + png + `"}}`)
	p.Messages[0].Content = event.Content{Parts: []event.Part{{Type: "text", Text: "/what is it"}, {Type: "image", Raw: image}}}
	events := a.turn(claudecode.Options{}, p)
	if spoken(events) != "a pixel" {
		t.Errorf("says %q", spoken(events))
	}
	seen := false
	for _, r := range a.model.Requests() {
		seen = seen || bytes.Contains(r.Body, []byte(png))
	}
	if !seen || !strings.Contains(a.asked()[0].FirstUser(), "/what is it") {
		t.Errorf("the model saw the image: %v, text %q", seen, a.asked()[0].FirstUser())
	}
}

func TestClaudeHarnessSession(t *testing.T) {
	a := newAgent(t, modeltest.Script{Turns: []modeltest.Turn{modeltest.Say("one"), modeltest.Say("two"), modeltest.Say("three"), modeltest.Say("four")}})
	first := a.turn(claudecode.Options{}, ask("My name is Ada."))
	id := sessionOf(t, first)
	resume := ask("What is my name?")
	resume.Options = json.RawMessage(`{"sessionId":"` + id + `"}`)
	if got := sessionOf(t, a.turn(claudecode.Options{}, resume)); got != id {
		t.Errorf("resumed as %s, want %s", got, id)
	}
	if r := a.asked()[1]; !strings.Contains(r.FirstUser(), "Ada") || !strings.Contains(r.LastUser(), "What is my name?") {
		t.Errorf("the model was asked %q … %q", r.FirstUser(), r.LastUser())
	}
	resume.Options = json.RawMessage(`{"sessionId":"` + id + `","forkSession":true}`)
	if got := sessionOf(t, a.turn(claudecode.Options{}, resume)); got == id {
		t.Error("a fork has the session of its origin")
	}
	// A session that is gone: the conversation goes on as text.
	for _, gone := range []string{"00000000-0000-4000-8000-000000000000", "no uuid"} {
		a = newAgent(t, modeltest.Script{Turns: []modeltest.Turn{modeltest.Say("Ada")}})
		lost := ask("What is my name?")
		lost.Messages = append([]event.Message{{Role: "user", Content: event.Text("My name is Ada.")}, {Role: "assistant", Content: event.Text("Hello Ada.")}}, lost.Messages...)
		lost.Options = json.RawMessage(`{"sessionId":"` + gone + `"}`)
		if events := a.turn(claudecode.Options{}, lost); spoken(events) != "Ada" {
			t.Errorf("without %q it says %q and ends with %q", gone, spoken(events), ending(events))
			continue
		}
		if got := a.asked()[0].FirstUser(); !strings.Contains(got, "User: My name is Ada.\nAssistant: Hello Ada.\n\nWhat is my name?") {
			t.Errorf("the new session was asked %q", got)
		}
	}
}

func TestClaudeHarnessStructured(t *testing.T) {
	a := newAgent(t, modeltest.Script{Turns: []modeltest.Turn{
		modeltest.Say("Let me see."), modeltest.Call("StructuredOutput", json.RawMessage(`{"name":"Ada","n":1}`)),
	}})
	// The first turn ends without the answer, so that the CLI asks for it.
	p := ask("Who?")
	p.Schema = json.RawMessage(`{"type":"object","properties":{"name":{"type":"string"},"n":{"type":"integer"}},"required":["name"]}`)
	events := a.turn(claudecode.Options{}, p)
	var got string
	for _, ev := range events {
		if v, ok := event.CustomOf[event.StructuredComplete](ev, event.NameStructuredComplete); ok {
			got = v.Raw
		}
		if e, ok := ev.(event.ToolCallStart); ok {
			t.Errorf("a call of %s shows", e.ToolCallName)
		}
	}
	if got != `{"name":"Ada","n":1}` || spoken(events) != "Let me see." {
		t.Errorf("answer %s, text %q", got, spoken(events))
	}
}

func TestClaudeHarnessErrors(t *testing.T) {
	for name, c := range map[string]struct {
		s    modeltest.Script
		o    claudecode.Options
		want string
	}{
		"401":           {modeltest.Script{Turns: []modeltest.Turn{{Status: 401, Times: 3}}}, claudecode.Options{MaxRetries: 1}, "api_error_401"},
		"not logged in": {modeltest.Script{Turns: []modeltest.Turn{modeltest.Say("no")}}, claudecode.Options{AuthMode: claudecode.AuthHost}, "authentication_failed"},
		"max turns":     {modeltest.Script{Turns: []modeltest.Turn{modeltest.Call("Bash", map[string]any{"command": "echo a"}), modeltest.Say("no")}}, claudecode.Options{MaxTurns: 1}, "length"},
		"program":       {modeltest.Script{Turns: []modeltest.Turn{modeltest.Say("no")}}, claudecode.Options{Env: map[string]string{"IS_SANDBOX": "0"}}, "no_result"},
	} {
		t.Run(name, func(t *testing.T) {
			if name == "program" && os.Getuid() != 0 {
				t.Skip("only root is refused")
			}
			if got := ending(newAgent(t, c.s).turn(c.o, ask("hi"))); got != c.want {
				t.Errorf("ends with %q, want %q", got, c.want)
			}
		})
	}
}

// apiKey is a set that holds one API key.
func apiKey(v string) *secret.Set {
	s, err := secret.NewSet(map[string]string{"ANTHROPIC_API_KEY": v})
	if err != nil {
		panic(err)
	}
	return s
}
