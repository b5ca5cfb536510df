package scripted_test

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/harness"
	"github.com/aisandbox-go/aisandbox/harness/scripted"
	"github.com/aisandbox-go/aisandbox/harness/scripted/player"
	"github.com/aisandbox-go/aisandbox/policy"
	"github.com/aisandbox-go/aisandbox/provider"
)

// TestMain lets the test binary be the guest program, as far as it plays.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "play" {
		os.Exit(player.Main(context.Background(), os.Args[2:], os.Stdin, os.Stdout, os.Stderr))
	}
	os.Exit(m.Run())
}

func plan() harness.Plan {
	return harness.Plan{
		RunID: "run-1", ThreadID: "thread-1", Root: "/w", Private: "/p", Guest: []string{"/guest"},
		Messages: []event.Message{
			{Role: "user", Content: event.Text("first")}, {Role: "assistant", Content: event.Text("yes")},
			{Role: "user", Content: event.Content{Parts: []event.Part{{Type: "text", Text: "-x "}, {Type: "image"}, {Type: "text", Text: "$(y)"}}}},
		},
		Warn: func(string) {},
	}
}

func TestCommand(t *testing.T) {
	const fresh = "1a0d5b8a-42bd-4a22-8888-000000000000" // stands for the id made of the run's
	for _, tc := range []struct {
		name    string
		o       scripted.Options
		options string
		want    []string
	}{
		{"plain", scripted.Options{}, "",
			[]string{"/guest", "play", "/p/script.json", "--model", "scripted", "--include-partial-messages", "--session-id", fresh}},
		{"resume", scripted.Options{Guest: []string{"/other"}, Model: "m", WholeMessages: true}, `{"sessionId":"--odd"}`,
			[]string{"/other", "play", "/p/script.json", "--model", "m", "--resume=--odd"}},
		{"fork", scripted.Options{MaxTurns: 3, PermissionMode: "default"}, `{"sessionId":"s","forkSession":true}`,
			[]string{"/guest", "play", "/p/script.json", "--model", "scripted", "--include-partial-messages", "--resume=s", "--fork-session",
				"--session-id", fresh, "--permission-mode", "default", "--max-turns", "3"}},
		{"tools", scripted.Options{MCPConfig: json.RawMessage(`{"mcpServers":{}}`), PermissionPromptTool: "mcp__a__b"}, "",
			[]string{"/guest", "play", "/p/script.json", "--model", "scripted", "--include-partial-messages", "--session-id", fresh,
				"--mcp-config", "/p/mcp.json", "--permission-prompt-tool", "mcp__a__b"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := plan()
			p.Options = json.RawMessage(tc.options)
			c := scripted.CLI(tc.o)
			cmd, err := c.Command(harness.Turn{Plan: p})
			if err != nil {
				t.Fatal(err)
			}
			got := append([]string{}, cmd.Argv...)
			for i := range got {
				if i > 0 && got[i-1] == "--session-id" && len(got[i]) == len(fresh) && got[i][14] == '4' {
					got[i] = fresh
				}
			}
			if d := cmp.Diff(tc.want, got); d != "" {
				t.Errorf("-want +got\n%s", d)
			}
			stdin, err := io.ReadAll(cmd.Stdin)
			if err != nil || string(stdin) != "-x $(y)" || cmd.Dir != "/w" {
				t.Errorf("prompt %q (%v), dir %q", stdin, err, cmd.Dir)
			}
			again, err := c.Command(harness.Turn{Plan: p})
			if err != nil || !cmp.Equal(again.Argv, cmd.Argv) {
				t.Errorf("a second call gives %q (%v)", again.Argv, err)
			}
			p.RunID = "run-2"
			other, err := c.Command(harness.Turn{Plan: p})
			if starts := slices.Contains(cmd.Argv, "--session-id"); err != nil || cmp.Equal(other.Argv, cmd.Argv) == starts {
				t.Errorf("another run gives %q (%v)", other.Argv, err)
			}
		})
	}
}

func TestFiles(t *testing.T) {
	p := plan()
	p.System, p.Schema, p.Policy = []string{"be kind"}, json.RawMessage(`{}`), &policy.Policy{}
	conf := json.RawMessage(`{"mcpServers":{}}`)
	files, warnings, err := scripted.CLI(scripted.Options{
		Script: scripted.Script{Steps: []player.Step{{Say: "<a>"}}}, MCPConfig: conf,
	}).Files(p)
	if err != nil {
		t.Fatal(err)
	}
	want := []harness.File{{Name: "script.json", Content: []byte(`{"steps":[{"say":"<a>"}]}` + "\n")}, {Name: "mcp.json", Content: conf}}
	if d := cmp.Diff(want, files); d != "" {
		t.Errorf("-want +got\n%s", d)
	}
	if len(warnings) != 3 {
		t.Errorf("warnings %q", warnings)
	}
}

func TestRefused(t *testing.T) {
	for _, tc := range []struct {
		name   string
		o      scripted.Options
		change func(*harness.Plan)
		want   string
	}{
		{"no guest", scripted.Options{}, func(p *harness.Plan) { p.Guest = nil }, "set Options.Guest"},
		{"no messages", scripted.Options{}, func(p *harness.Plan) { p.Messages = nil }, "the last message must be the user's"},
		{"not the user's", scripted.Options{}, func(p *harness.Plan) { p.Messages = p.Messages[:2] }, "the last message must be the user's"},
		{"blank", scripted.Options{}, func(p *harness.Plan) { p.Messages[2].Content = event.Text(" \n") }, "have text"},
		{"unknown option", scripted.Options{}, func(p *harness.Plan) { p.Options = json.RawMessage(`{"sesionId":"x"}`) }, `"sesionId"`},
		{"fork of nothing", scripted.Options{}, func(p *harness.Plan) { p.Options = json.RawMessage(`{"forkSession":true}`) }, "needs a sessionId"},
		{"prompt tool", scripted.Options{PermissionPromptTool: "mcp__a__b"}, func(*harness.Plan) {}, "needs an MCPConfig"},
		{"turns", scripted.Options{MaxTurns: -1}, func(*harness.Plan) {}, "MaxTurns -1"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := plan()
			tc.change(&p)
			c := scripted.CLI(tc.o)
			_, _, err := c.Files(p)
			_, cerr := c.Command(harness.Turn{Plan: p})
			for _, err := range []error{err, cerr} {
				if err == nil || !strings.HasPrefix(err.Error(), "scripted: ") || !strings.Contains(err.Error(), tc.want) {
					t.Errorf("error %v lacks %q", err, tc.want)
				}
			}
		})
	}
}

// run plays a turn as the engine does, without a sandbox.
func run(t *testing.T, o scripted.Options, dir, home, options string) []event.Event {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p := plan()
	p.Guest, p.Root, p.Private, p.Options = []string{self}, dir, t.TempDir(), json.RawMessage(options)
	p.RunID = "run-" + filepath.Base(filepath.Dir(p.Private)) + filepath.Base(p.Private)
	c := scripted.CLI(o)
	files, _, err := c.Files(p)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if err := os.WriteFile(filepath.Join(p.Private, f.Name), f.Content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	turn := harness.Turn{Plan: p, NewID: event.NewIDs(p.RunID)}
	spec, err := c.Command(turn)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), spec.Argv[0], spec.Argv[1:]...)
	cmd.Dir, cmd.Stdin = spec.Dir, spec.Stdin
	cmd.Env = append(os.Environ(), "HOME="+home, "GORACE=atexit_sleep_ms=0")
	var out, errw bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errw
	if err := cmd.Run(); cmd.ProcessState == nil {
		t.Fatal(err)
	}
	d := c.Decoder(turn)
	var events []event.Event
	for line := range bytes.Lines(out.Bytes()) {
		evs, err := d.Line(bytes.TrimSpace(line))
		if err != nil {
			t.Fatal(err)
		}
		events = append(events, evs...)
	}
	evs, err := d.Close(harness.End{Exit: provider.Exit{Code: cmd.ProcessState.ExitCode()}, StderrTail: errw.String()})
	if err != nil {
		t.Fatal(err)
	}
	return append(events, evs...)
}

// text is what the run said.
func text(events []event.Event) string {
	var b strings.Builder
	for _, e := range events {
		if c, ok := e.(event.TextMessageContent); ok {
			b.WriteString(c.Delta)
		}
	}
	return b.String()
}

// session is the id that the run told.
func session(t *testing.T, events []event.Event) string {
	t.Helper()
	for _, e := range events {
		if c, ok := e.(event.Custom); ok && c.Name == "scripted.session-id" {
			var v struct{ SessionID string }
			if err := json.Unmarshal(c.Value, &v); err != nil {
				t.Fatal(err)
			}
			return v.SessionID
		}
	}
	t.Fatal("no event scripted.session-id")
	return ""
}

// The events of a run are those of its script, and a session remembers.
func TestRun(t *testing.T) {
	s, err := scripted.Parse("s", []byte("steps:\n- say: 'One. '\n- run: echo x; exit 2\n- flood: {lines: 2, bytes: 8}\n- say: 'Two: {{first_prompt}}'\n"))
	if err != nil {
		t.Fatal(err)
	}
	home, dir := t.TempDir(), t.TempDir()
	events := run(t, scripted.Options{Script: s}, dir, home, "")
	if got, want := text(events), "One. 0123456\n0123456\nTwo: -x $(y)"; got != want {
		t.Errorf("text %q, want %q", got, want)
	}
	last, ok := events[len(events)-1].(event.RunFinished)
	if !ok || len(last.Usage) != 1 {
		t.Errorf("the last event is %#v", events[len(events)-1])
	}
	for _, e := range events {
		if r, ok := e.(event.ToolCallResult); ok && r.Content != "Exit code 2\nx" {
			t.Errorf("result %q", r.Content)
		}
	}
	id := session(t, events)
	again := run(t, scripted.Options{Script: s}, dir, home, `{"sessionId":"`+id+`"}`)
	if session(t, again) != id {
		t.Errorf("session %s, want %s", session(t, again), id)
	}
	fork := run(t, scripted.Options{Script: s}, dir, home, `{"sessionId":"`+id+`","forkSession":true}`)
	if session(t, fork) == id {
		t.Error("the fork has the session of its origin")
	}

	// Without deltas the text is the same.
	if whole := run(t, scripted.Options{Script: s, WholeMessages: true}, dir, home, ""); text(whole) != text(events) {
		t.Errorf("text %q without deltas", text(whole))
	}
	crash := run(t, scripted.Options{Script: scripted.Script{Steps: []player.Step{{Say: "a"}, {Crash: &player.Crash{Code: 7}}}}}, dir, home, "")
	if _, ok := crash[len(crash)-1].(event.RunError); !ok {
		t.Errorf("a crash ends in %#v", crash[len(crash)-1])
	}
}

// The demo's script mends the demo's bug, for real.
func TestDemo(t *testing.T) {
	demo := filepath.Join("..", "..", "cli", "demo")
	src, err := os.ReadFile(filepath.Join(demo, "script.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	s, err := scripted.Parse("script.yaml", src)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS(filepath.Join(demo, "repo"))); err != nil {
		t.Fatal(err)
	}
	test := func() error {
		cmd := exec.CommandContext(t.Context(), "sh", "test.sh")
		cmd.Dir = dir
		return cmd.Run()
	}
	if test() == nil {
		t.Fatal("the demo's test passes before anything was mended")
	}
	events := run(t, scripted.Options{Script: s}, dir, t.TempDir(), "")
	if err := test(); err != nil {
		t.Errorf("the demo's test fails after the run: %v", err)
	}
	if got := text(events); !strings.Contains(got, "Fixed.") || !strings.HasSuffix(got, "all passed") {
		t.Errorf("text %q", got)
	}
	if _, ok := events[len(events)-1].(event.RunFinished); !ok {
		t.Errorf("the last event is %#v", events[len(events)-1])
	}
}
