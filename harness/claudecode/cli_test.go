package claudecode_test

import (
	"encoding/json"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/harness"
	"github.com/aisandbox-go/aisandbox/harness/claudecode"
	"github.com/aisandbox-go/aisandbox/policy"
	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/secret"
)

// plan is a turn of one question in a container.
func plan(f func(*harness.Plan)) harness.Plan {
	p := harness.Plan{
		RunID: "run-1", ThreadID: "thread-1",
		Messages: []event.Message{{ID: "u", Role: "user", Content: event.Text("fix it")}},
		Root:     "/srv/box/work", Private: "/tmp/aisandbox-x",
		Traits: provider.Traits{Isolation: provider.IsolationContainer},
		Env:    map[string]bool{}, Warn: func(string) {},
	}
	if f != nil {
		f(&p)
	}
	return p
}

// apiKey is a set that holds one API key.
func apiKey(v string) *secret.Set {
	s, err := secret.NewSet(map[string]string{"ANTHROPIC_API_KEY": v})
	if err != nil {
		panic(err)
	}
	return s
}

func withKey(o claudecode.Options) claudecode.Options { o.Keys = apiKey("sk-secret"); return o }

func command(t *testing.T, o claudecode.Options, p harness.Plan) (provider.Cmd, string) {
	t.Helper()
	cmd, err := claudecode.CLI("sonnet", o).Command(harness.Turn{Plan: p, NewID: event.NewIDs("run-1")})
	if err != nil {
		t.Fatal(err)
	}
	in, err := io.ReadAll(cmd.Stdin)
	if err != nil {
		t.Fatal(err)
	}
	return cmd, string(in)
}

const quiet = "ScheduleWakeup,CronCreate,CronDelete,CronList"

func TestArgv(t *testing.T) {
	base := "claude|--setting-sources|user|-p|--output-format|stream-json|--verbose|--model|sonnet"
	end := "|--disallowedTools|" + quiet + "|--strict-mcp-config"
	for _, c := range []struct {
		name string
		o    claudecode.Options
		p    func(*harness.Plan)
		want string
	}{
		{"none", claudecode.Options{}, nil, base + "|--include-partial-messages|--permission-mode|bypassPermissions" + end},
		{"executable", claudecode.Options{Executable: []string{"node", "my fake.mjs"}, NoPartials: true}, nil,
			"node|my fake.mjs" + strings.TrimPrefix(base, "claude") + "|--permission-mode|bypassPermissions" + end},
		{"session", claudecode.Options{}, func(p *harness.Plan) { p.Options = json.RawMessage(`{"sessionId":"s-1"}`) },
			base + "|--include-partial-messages|--resume|s-1|--permission-mode|bypassPermissions" + end},
		{"fork", claudecode.Options{}, func(p *harness.Plan) { p.Options = json.RawMessage(`{"sessionId":"s-1","forkSession":true}`) },
			base + "|--include-partial-messages|--resume|s-1|--fork-session|--permission-mode|bypassPermissions" + end},
		{"fork without a session", claudecode.Options{}, func(p *harness.Plan) { p.Options = json.RawMessage(`{"forkSession":true}`) },
			base + "|--include-partial-messages|--permission-mode|bypassPermissions" + end},
		{"on the host", claudecode.Options{}, func(p *harness.Plan) { p.Traits.Isolation = provider.IsolationNone },
			base + "|--include-partial-messages|--permission-mode|bypassPermissions|--disallowedTools|" + quiet},
		{"project settings", claudecode.Options{ProjectSettings: true}, nil,
			strings.Replace(base, "|user|", "|user,project|", 1) + "|--include-partial-messages|--permission-mode|bypassPermissions" + end},
		{"all of the constructor", claudecode.Options{
			PermissionMode: "plan", MaxTurns: 5, AddDirs: []string{"/workspace/sub", "/opt/x", "rel"},
			AllowedTools: []string{"Bash(git *)", "Read", "Read"}, DisallowedTools: []string{"WebFetch"},
		}, nil, base + "|--include-partial-messages|--permission-mode|plan|--max-turns|5|--add-dir|/srv/box/work/sub|--add-dir|/opt/x|--add-dir|/srv/box/work/rel" +
			"|--allowedTools|Bash(git *),Read|--disallowedTools|WebFetch," + quiet + "|--strict-mcp-config"},
		{"the call beats it", claudecode.Options{PermissionMode: "plan", MaxTurns: 5, AllowedTools: []string{"Read"}, DisallowedTools: []string{"WebFetch"}},
			func(p *harness.Plan) {
				p.Options = json.RawMessage(`{"permissionMode":"dontAsk","maxTurns":2,"allowedTools":["Edit"],"disallowedTools":[]}`)
				p.Policy = &policy.Policy{Default: policy.Allow}
			},
			base + "|--include-partial-messages|--permission-mode|dontAsk|--max-turns|2|--allowedTools|Edit" + end},
		{"system prompts", claudecode.Options{}, func(p *harness.Plan) { p.System = []string{"a", " ", "b"}; p.Instructions = "c" },
			base + "|--include-partial-messages|--permission-mode|bypassPermissions|--disallowedTools|" + quiet + "|--append-system-prompt-file|/tmp/aisandbox-x/system-prompt.md|--strict-mcp-config"},
		{"replaced", claudecode.Options{ReplaceSystemPrompt: true}, func(p *harness.Plan) { p.System = []string{"a"} },
			base + "|--include-partial-messages|--permission-mode|bypassPermissions|--disallowedTools|" + quiet + "|--system-prompt-file|/tmp/aisandbox-x/system-prompt.md|--strict-mcp-config"},
		{"nothing to replace with", claudecode.Options{ReplaceSystemPrompt: true}, func(p *harness.Plan) { p.Instructions = "c" },
			base + "|--include-partial-messages|--permission-mode|bypassPermissions|--disallowedTools|" + quiet + "|--append-system-prompt-file|/tmp/aisandbox-x/system-prompt.md|--strict-mcp-config"},
		{"schema", claudecode.Options{}, func(p *harness.Plan) {
			p.Schema = json.RawMessage("{ \"type\": \"object\",\n \"properties\": {\"it's\": {}} }")
		},
			base + "|--include-partial-messages|--permission-mode|bypassPermissions" + end + `|--json-schema|{"type":"object","properties":{"it's":{}}}`},
	} {
		cmd, in := command(t, withKey(c.o), plan(c.p))
		if d := cmp.Diff(c.want, strings.Join(cmd.Argv, "|")); d != "" {
			t.Errorf("%s (-want +got):\n%s", c.name, d)
		}
		if slices.Contains(cmd.Argv, "fix it") || !strings.HasPrefix(in, "fix it") {
			t.Errorf("%s: the prompt belongs on stdin", c.name)
		}
		if strings.Contains(strings.Join(cmd.Argv, " "), "sk-secret") {
			t.Errorf("%s: the key is in argv", c.name)
		}
	}
}

func TestPolicy(t *testing.T) {
	for _, c := range []struct {
		name                                string
		p                                   policy.Policy
		mode, allowed, disallowed, settings string
		warnings                            int
	}{
		{"empty asks", policy.Policy{}, "default", "", "", "", 1},
		{"allow", policy.Policy{Default: policy.Allow}, "bypassPermissions", "", "", "", 0},
		{"ask", policy.Policy{Default: policy.Ask}, "default", "", "", "", 1},
		{"deny", policy.Policy{Default: policy.Deny}, "dontAsk", "", "", "", 0},
		{"deny that asks", policy.Policy{Default: policy.Deny, Commands: policy.Commands{Ask: []string{"git push*"}}}, "default", "", "", `{"permissions":{"ask":["Bash(git push*)"]}}`, 1},
		{"deny that asks for writes", policy.Policy{Default: policy.Deny, Capabilities: policy.Capabilities{FileWrite: policy.Ask}}, "default", "", "", `{"permissions":{"ask":["Write","Edit","NotebookEdit"]}}`, 1},
		{"rules", policy.Policy{Default: policy.Ask, Commands: policy.Commands{Allow: []string{"go test *", "Read"}, Deny: []string{"curl *", "f(a, b)", "Bash", "Task"}}},
			"default", "Bash(go test *),Read", "Bash(curl *),Bash(f(a, b)),Bash,Agent,Task,", "", 1},
		{"capabilities", policy.Policy{Default: policy.Deny, Capabilities: policy.Capabilities{FileWrite: policy.Allow, Network: policy.Deny}},
			"dontAsk", "Write,Edit,NotebookEdit", "WebFetch,WebSearch,", "", 0},
		{"allow needs no rule under allow", policy.Policy{Default: policy.Allow, Capabilities: policy.Capabilities{FileWrite: policy.Deny, Network: policy.Allow}},
			"bypassPermissions", "", "Write,Edit,NotebookEdit,", "", 0},
		{"no form", policy.Policy{Default: policy.Allow, Commands: policy.Commands{Deny: []string{"a\nb", "f(", ")(", "ok"}}}, "bypassPermissions", "", "Bash(ok),", "", 3},
	} {
		t.Run(c.name, func(t *testing.T) {
			pl := plan(func(p *harness.Plan) { p.Policy = &c.p })
			files, warnings, err := claudecode.CLI("sonnet", withKey(claudecode.Options{})).Files(pl)
			if err != nil {
				t.Fatal(err)
			}
			cmd, _ := command(t, withKey(claudecode.Options{}), pl)
			value := func(flag string) string {
				if i := slices.Index(cmd.Argv, flag); i >= 0 {
					return cmd.Argv[i+1]
				}
				return ""
			}
			settings := ""
			for _, f := range files {
				settings = string(f.Content)
				if value("--settings") != "/tmp/aisandbox-x/"+f.Name || f.Mode.Perm() != 0o600 {
					t.Errorf("file %s, flag %s", f.Name, value("--settings"))
				}
			}
			got := []string{value("--permission-mode"), value("--allowedTools"), strings.TrimSuffix(value("--disallowedTools"), quiet), settings}
			if d := cmp.Diff([]string{c.mode, c.allowed, c.disallowed, c.settings}, got); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
			if len(warnings) != c.warnings {
				t.Errorf("warnings %q, want %d", warnings, c.warnings)
			}
		})
	}
}

func TestPrompt(t *testing.T) {
	user := func(s string) event.Message { return event.Message{Role: "user", Content: event.Text(s)} }
	bot := func(s string) event.Message { return event.Message{Role: "assistant", Content: event.Text(s)} }
	part := func(js string) event.Part {
		var p struct{ Type, Text string }
		if err := json.Unmarshal([]byte(js), &p); err != nil {
			t.Fatal(err)
		}
		return event.Part{Type: p.Type, Text: p.Text, Raw: json.RawMessage(js)}
	}
	parts := func(js ...string) event.Message {
		m := event.Message{Role: "user"}
		for _, j := range js {
			m.Content.Parts = append(m.Content.Parts, part(j))
		}
		return m
	}
	for _, c := range []struct {
		name     string
		msgs     []event.Message
		f        func(*harness.Plan)
		o        claudecode.Options
		want     string
		warnings int
	}{
		{name: "plain", msgs: []event.Message{user("hi\n")}, want: "hi\n"},
		{name: "a dash is no flag", msgs: []event.Message{user("--help")}, want: "--help"},
		{name: "slash", msgs: []event.Message{user("/init now")}, want: " /init now"},
		{name: "slash wanted", msgs: []event.Message{user("/init now")}, o: claudecode.Options{SlashCommands: true}, want: "/init now"},
		{name: "history", msgs: []event.Message{user("a"), bot("b"), {Role: "assistant", ToolCalls: []event.ToolCall{{ID: "c"}}}, {Role: "tool", Content: event.Text("x")}, bot("  "), user("c")},
			want: "Previous conversation:\nUser: a\nAssistant: b\n\nc"},
		{name: "history with a slash", msgs: []event.Message{user("a"), user("/c")}, want: "Previous conversation:\nUser: a\n\n/c"},
		{name: "resumed", msgs: []event.Message{user("a"), bot("b"), user("  /c ")}, f: func(p *harness.Plan) { p.Options = json.RawMessage(`{"sessionId":"s"}`) }, want: " /c"},
		{name: "parts", msgs: []event.Message{parts(`{"type":"text","text":"a"}`, `{"type":"text","text":"b"}`)}, want: "ab"},
		{name: "image", msgs: []event.Message{parts(`{"type":"text","text":"what \"is\" it"}`, `{"type":"image","source":{"type":"data","value":"aGk=","mimeType":"image/png"}}`)},
			want: `{"type":"user","message":{"role":"user","content":[{"type":"text","text":"what \"is\" it"},{"type":"image","source":{"type":"base64","media_type":"image/png","data":"aGk="}}]}}` + "\n"},
		{name: "image alone, other shapes", msgs: []event.Message{parts(`{"type":"binary","mimeType":"image/jpeg","data":"aGk="}`, `{"type":"image","source":{"type":"url","value":"https://x/y.png"}}`)},
			want: `{"type":"user","message":{"role":"user","content":[{"type":"image","source":{"type":"base64","media_type":"image/jpeg","data":"aGk="}},{"type":"image","source":{"type":"url","url":"https://x/y.png"}}]}}` + "\n"},
		{name: "something else", msgs: []event.Message{parts(`{"type":"text","text":"a"}`, `{"type":"binary","mimeType":"application/pdf","data":"aGk="}`)}, want: "a", warnings: 1},
		{name: "an earlier image", msgs: []event.Message{parts(`{"type":"text","text":"a"}`, `{"type":"binary","mimeType":"image/png","data":"aGk="}`), user("b")},
			want: "Previous conversation:\nUser: a\n\nb", warnings: 1},
		{name: "schema", msgs: []event.Message{user("a")}, f: func(p *harness.Plan) { p.Schema = json.RawMessage(`{ "type": "object" }`) },
			want: "a\n\nGive your final answer as one JSON object that matches this JSON Schema, without markdown unless the schema needs it:\n\n{\"type\":\"object\"}"},
	} {
		p := plan(func(p *harness.Plan) {
			p.Messages = c.msgs
			if c.f != nil {
				c.f(p)
			}
		})
		cmd, in := command(t, withKey(c.o), p)
		if d := cmp.Diff(c.want, in); d != "" {
			t.Errorf("%s (-want +got):\n%s", c.name, d)
		}
		if lines := slices.Contains(cmd.Argv, "--input-format"); lines != strings.HasPrefix(c.want, "{") {
			t.Errorf("%s: argv %q", c.name, cmd.Argv)
		}
		_, warnings, err := claudecode.CLI("sonnet", withKey(c.o)).Files(p)
		if err != nil || len(warnings) != c.warnings {
			t.Errorf("%s: warnings %q, %v", c.name, warnings, err)
		}
	}
}

func TestEnvironment(t *testing.T) {
	always := []string{"DISABLE_AUTOUPDATER=1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1"}
	marks := []string{"IS_SANDBOX=1", "CLAUDE_CODE_SANDBOXED=1"}
	retries := []string{"CLAUDE_CODE_MAX_RETRIES=3"}
	host := func(kv ...string) func(string) string {
		return func(k string) string {
			for _, e := range kv {
				if v, ok := strings.CutPrefix(e, k+"="); ok {
					return v
				}
			}
			return ""
		}
	}
	for _, c := range []struct {
		name string
		o    claudecode.Options
		f    func(*harness.Plan)
		want []string
	}{
		{"a key", claudecode.Options{Keys: apiKey("k")}, nil, slices.Concat(always, marks, retries, []string{"ANTHROPIC_API_KEY=k"})},
		{"on the host", claudecode.Options{Keys: apiKey("k")}, func(p *harness.Plan) { p.Traits = provider.Traits{} }, slices.Concat(always, retries, []string{"ANTHROPIC_API_KEY=k"})},
		{"the host's", claudecode.Options{HostEnv: host("ANTHROPIC_API_KEY=h", "ANTHROPIC_AUTH_TOKEN=a", "ANTHROPIC_BASE_URL=https://gw", "OTHER=x")}, nil,
			slices.Concat(always, marks, retries, []string{"ANTHROPIC_API_KEY=h", "ANTHROPIC_AUTH_TOKEN=a", "ANTHROPIC_BASE_URL=https://gw"})},
		{"the sandbox's beats the host's", claudecode.Options{HostEnv: host("ANTHROPIC_API_KEY=h")}, func(p *harness.Plan) { p.Env["ANTHROPIC_API_KEY"] = true },
			slices.Concat(always, marks, retries)},
		{"host mode", claudecode.Options{AuthMode: claudecode.AuthHost, HostEnv: host("ANTHROPIC_API_KEY=h", "ANTHROPIC_BASE_URL=https://gw")}, nil,
			slices.Concat(always, marks, retries, []string{"ANTHROPIC_API_KEY=", "ANTHROPIC_AUTH_TOKEN="})},
		{"host mode of the call", claudecode.Options{Keys: apiKey("k")}, func(p *harness.Plan) { p.Options = json.RawMessage(`{"authMode":"host"}`) },
			slices.Concat(always, marks, retries, []string{"ANTHROPIC_API_KEY=", "ANTHROPIC_AUTH_TOKEN="})},
		{"a token in Env", claudecode.Options{Env: map[string]string{"CLAUDE_CODE_OAUTH_TOKEN": "o", "IS_SANDBOX": "0"}, MaxRetries: -1}, nil,
			slices.Concat(always, marks, []string{"CLAUDE_CODE_OAUTH_TOKEN=o", "IS_SANDBOX=0"})},
		{"base URL", claudecode.Options{Keys: apiKey("k"), BaseURL: "http://127.0.0.1:9", MaxRetries: 7}, nil,
			slices.Concat(always, marks, []string{"CLAUDE_CODE_MAX_RETRIES=7", "ANTHROPIC_API_KEY=k", "ANTHROPIC_BASE_URL=http://127.0.0.1:4711"})},
		{"base URL in Env", claudecode.Options{Keys: apiKey("k"), BaseURL: "https://x", Env: map[string]string{"ANTHROPIC_BASE_URL": "http://127.0.0.1:9"}}, nil,
			slices.Concat(always, marks, retries, []string{"ANTHROPIC_API_KEY=k", "ANTHROPIC_BASE_URL=http://127.0.0.1:4711"})},
	} {
		p := plan(c.f)
		cmd, err := claudecode.CLI("sonnet", c.o).Command(harness.Turn{Plan: p, Inside: map[string]string{"http://127.0.0.1:9": "http://127.0.0.1:4711"}})
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		if d := cmp.Diff(c.want, cmd.Env); d != "" {
			t.Errorf("%s (-want +got):\n%s", c.name, d)
		}
	}
	if got := claudecode.CLI("", claudecode.Options{BaseURL: "http://127.0.0.1:9"}).(harness.HostURLs).HostURLs(plan(nil)); !cmp.Equal(got, []string{"http://127.0.0.1:9"}) {
		t.Errorf("HostURLs = %q", got)
	}
}

func TestRefusals(t *testing.T) {
	opts := func(s string) func(*harness.Plan) { return func(p *harness.Plan) { p.Options = json.RawMessage(s) } }
	msgs := func(m ...event.Message) func(*harness.Plan) { return func(p *harness.Plan) { p.Messages = m } }
	for _, c := range []struct {
		name, model string
		o           claudecode.Options
		f           func(*harness.Plan)
		want        string
	}{
		{name: "unknown option", f: opts(`{"sesionId":"x"}`), want: "option sesionId: there is no such option"},
		{name: "not an object", f: opts(`[]`), want: "modelOptions"},
		{name: "wrong type", f: opts(`{"maxTurns":"2"}`), want: "maxTurns"},
		{name: "negative turns", f: opts(`{"maxTurns":-1}`), want: "maxTurns"},
		{name: "mode", f: opts(`{"permissionMode":"yolo"}`), want: "permissionMode"},
		{name: "auth mode", f: opts(`{"authMode":"magic"}`), want: "authMode"},
		{name: "session is a flag", f: opts(`{"sessionId":"--help"}`), want: "sessionId"},
		{name: "session has a line break", f: opts(`{"sessionId":"a\nb"}`), want: "sessionId"},
		{name: "mode of the constructor", o: claudecode.Options{PermissionMode: "yolo"}, want: "Options.permissionMode"},
		{name: "model is a flag", model: "--dangerously-skip-permissions", want: "model"},
		{name: "no messages", f: msgs(), want: "last message"},
		{name: "the last is not the user's", f: msgs(event.Message{Role: "assistant", Content: event.Text("x")}), want: "last message"},
		{name: "blank", f: msgs(event.Message{Role: "user", Content: event.Text(" \n")}), want: "last message"},
		{name: "image type", f: msgs(event.Message{Role: "user", Content: event.Content{Parts: []event.Part{{Type: "image", Raw: json.RawMessage(`{"type":"image","source":{"type":"data","value":"x","mimeType":"image/bmp"}}`)}}}}), want: "image/bmp"},
		{name: "schema is no object", f: func(p *harness.Plan) { p.Schema = json.RawMessage(`{"type":"array"}`) }, want: "schema"},
		{name: "schema is no JSON", f: func(p *harness.Plan) { p.Schema = json.RawMessage(`{`) }, want: "schema"},
		{name: "schema is huge", f: func(p *harness.Plan) {
			p.Schema = json.RawMessage(`{"type":"object","title":"` + strings.Repeat("x", 101<<10) + `"}`)
		}, want: "at most"},
	} {
		model := c.model
		if model == "" {
			model = "sonnet"
		}
		cli := claudecode.CLI(model, withKey(c.o))
		p := plan(c.f)
		_, _, ferr := cli.Files(p)
		_, cerr := cli.Command(harness.Turn{Plan: p})
		for _, err := range []error{ferr, cerr} {
			if err == nil || !strings.Contains(err.Error(), c.want) || !strings.HasPrefix(err.Error(), "claude-code: ") {
				t.Errorf("%s: error %v, want one that names %q", c.name, err, c.want)
			}
		}
	}

	_, _, err := claudecode.CLI("sonnet", claudecode.Options{}).Files(plan(nil))
	var ke *claudecode.KeyError
	if !errors.As(err, &ke) || !strings.Contains(err.Error(), "ANTHROPIC_API_KEY") {
		t.Errorf("without a key: %v", err)
	}
	for name, o := range map[string]claudecode.Options{
		"long":  {AllowedTools: []string{"Bash(" + strings.Repeat("x", 128<<10) + ")"}},
		"NUL":   {AddDirs: []string{"a\x00b"}},
		"whole": {AddDirs: slices.Repeat([]string{strings.Repeat("x", 100<<10)}, 12)},
	} {
		_, err := claudecode.CLI("sonnet", withKey(o)).Command(harness.Turn{Plan: plan(nil)})
		var ae *claudecode.ArgError
		if !errors.As(err, &ae) {
			t.Errorf("%s argument: %v", name, err)
		}
	}
}

// TestBigTexts shows that neither a long prompt nor a long system prompt reaches
// the command line.
func TestBigTexts(t *testing.T) {
	big := strings.Repeat("word ", 400<<10)
	p := plan(func(p *harness.Plan) { p.Messages[0].Content = event.Text(big); p.System = []string{big} })
	cmd, in := command(t, withKey(claudecode.Options{}), p)
	if in != big || len(strings.Join(cmd.Argv, " ")) > 4<<10 {
		t.Errorf("stdin has %d bytes, argv %d", len(in), len(strings.Join(cmd.Argv, " ")))
	}
	files, _, err := claudecode.CLI("sonnet", withKey(claudecode.Options{})).Files(p)
	if err != nil || len(files) != 1 || string(files[0].Content) != big {
		t.Errorf("files %d, %v", len(files), err)
	}
}

func TestDir(t *testing.T) {
	for in, want := range map[string]string{"": "/srv/box/work", "/workspace": "/srv/box/work", "/workspace/a/b": "/srv/box/work/a/b", "a": "/srv/box/work/a", "/workspaces": "/workspaces", "/opt/../etc": "/etc"} {
		cmd, _ := command(t, withKey(claudecode.Options{Dir: in}), plan(nil))
		if cmd.Dir != want {
			t.Errorf("Dir %q is %q, want %q", in, cmd.Dir, want)
		}
	}
	cmd, _ := command(t, withKey(claudecode.Options{Dir: "/opt"}), plan(func(p *harness.Plan) { p.Options = json.RawMessage(`{"cwd":"/workspace/x"}`) }))
	if cmd.Dir != "/srv/box/work/x" {
		t.Errorf("cwd of the call is %q", cmd.Dir)
	}
}

func TestAbortLadder(t *testing.T) {
	want := []harness.AbortStep{{Signal: 2, Wait: 5 * time.Second}, {Signal: 15, Wait: 2 * time.Second}}
	if d := cmp.Diff(want, claudecode.CLI("", claudecode.Options{}).(harness.AbortLadder).AbortLadder()); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

func TestFallback(t *testing.T) {
	cli := claudecode.CLI("sonnet", withKey(claudecode.Options{}))
	turn := harness.Turn{NewID: event.NewIDs("run-1"), Plan: plan(func(p *harness.Plan) {
		p.Options = json.RawMessage(`{"sessionId":"00000000-0000-4000-8000-000000000000","forkSession":true,"maxTurns":3}`)
		p.Messages = append([]event.Message{{Role: "user", Content: event.Text("first")}}, p.Messages...)
	})}
	end := suite().Ends["14-resume-not-found.ndjson"]
	d := cli.Decoder(turn)
	early, err := d.Line(read(t, "14-resume-not-found.ndjson"))
	if err != nil || len(early) != 0 {
		t.Fatalf("the lone result gives %d events (%v): the engine can't take them back", len(early), err)
	}
	events, err := d.Close(end)
	if err != nil {
		t.Fatal(err)
	}
	fb := cli.(harness.Fallback)
	next, why, ok := fb.Fallback(turn, events, end)
	if !ok || why == "" || string(next.Options) != `{"maxTurns":3}` {
		t.Fatalf("Fallback = %s, %q, %v", next.Options, why, ok)
	}
	cmd, err := cli.Command(next)
	if err != nil {
		t.Fatal(err)
	}
	in, _ := io.ReadAll(cmd.Stdin)
	if slices.Contains(cmd.Argv, "--resume") || string(in) != "Previous conversation:\nUser: first\n\nfix it" {
		t.Errorf("the second try runs %q with %q", cmd.Argv, in)
	}
	if _, _, ok := fb.Fallback(next, events, end); ok {
		t.Error("it falls back again")
	}
	aborted := end
	aborted.Aborted = true
	if _, _, ok := fb.Fallback(turn, events, aborted); ok {
		t.Error("it falls back from an abort")
	}
	if _, _, ok := fb.Fallback(turn, decode(t, "16-api-401.ndjson", nil), end); ok {
		t.Error("it falls back from another error")
	}
}
