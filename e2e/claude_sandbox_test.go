package e2e

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/internal/testenv"
	"github.com/aisandbox-go/aisandbox/modeltest"
)

// files are the paths of a run's file events.
func files(tr trace) (paths []string) {
	for _, ev := range tr {
		if f, ok := event.CustomOf[event.File](ev, event.NameFile); ok {
			paths = append(paths, f.Path)
		}
	}
	return paths
}

// inEach runs a test in each place.
func inEach(t *testing.T, test func(t *testing.T, pl place)) {
	for _, pl := range places {
		t.Run(pl.name, func(t *testing.T) { test(t, pl) })
	}
}

// TestSandboxedClaudeFixesBug is the main job: the real CLI, in a sandbox without
// a network, finds and mends the bug of the demo.
func TestSandboxedClaudeFixesBug(t *testing.T) {
	inEach(t, func(t *testing.T, pl place) {
		r := newRig(t, pl, demoModel(t))
		tr := r.run("The test in this repository fails. Fix it.", "")
		end := tr.finished(t)

		text, thinking := tr.text()
		for _, want := range []string{"I'll look around and run the test first.", "Only `median` is wrong. ", "all passed"} {
			if !strings.Contains(text, want) {
				t.Errorf("the text lacks %q: %s", want, text)
			}
		}
		if !strings.Contains(thinking, "I don't know this repository.") || !strings.Contains(thinking, "the middle one is the (n+1)/2-th") {
			t.Errorf("thought %q", thinking)
		}
		var names []string
		calls := tr.calls()
		for _, c := range calls {
			names = append(names, c.Name)
			if !json.Valid([]byte(c.Args)) || c.Result == "" {
				t.Errorf("tool call %+v", c)
			}
		}
		if d := cmp.Diff([]string{"Bash", "Bash", "Read", "Edit", "Bash"}, names); d != "" {
			t.Fatalf("tools (-want +got):\n%s\n%s", d, tr.summary())
		}
		if !strings.Contains(calls[1].Result, "FAIL") || !strings.Contains(calls[4].Result, "all passed") {
			t.Errorf("the test said %q, then %q", calls[1].Result, calls[4].Result)
		}
		diff, _ := custom[event.FileChanged](tr, event.NameFileChanged)
		if !strings.Contains(diff.Diff, "\n-\tmiddle=$((n / 2))\n") || !strings.Contains(diff.Diff, "\n+\tmiddle=$(((n + 1) / 2))\n") || diff.Path != "." {
			t.Errorf("diff %+v", diff)
		}
		if !slices.Contains(files(tr), "/workspace/src/stats.sh") {
			t.Errorf("file events of %q", files(tr))
		}
		if len(end.Usage) != 1 || end.Usage[0].OutputTokens != 60+30+45+140+30+70 {
			t.Errorf("usage %+v", end.Usage)
		}
		if s, _ := custom[event.SessionID](tr, event.SessionIDName("claude-code")); s.SessionID == "" || !strings.Contains(strings.Join(s.Tools, " "), "Bash") {
			t.Errorf("session %+v", s)
		}
		for _, q := range r.model.Requests() {
			if q.Messages != nil && q.Header.Get("X-Api-Key") != "sk-fake-key-of-a-test" {
				t.Errorf("the model got the key %q", q.Header.Get("X-Api-Key"))
			}
		}

		// The copy is mended, and the repository of the host untouched.
		sb := r.box()
		if out := shell(t, sb, "sh test.sh | tail -n 1; id -u"); out != "all passed\n"+pl.uid {
			t.Errorf("in the sandbox: %s", out)
		}
		if s := git(t, r.repo, "status", "--porcelain"); s != "" {
			t.Errorf("the host's repository has changed: %s", s)
		}
	})
}

// TestSandboxedClaudeUser shows whose process the agent is, and that a network is
// missing, from the agent's own commands.
func TestSandboxedClaudeUser(t *testing.T) {
	inEach(t, func(t *testing.T, pl place) {
		r := newRig(t, pl, modeltest.Script{Turns: []modeltest.Turn{
			modeltest.Call("Bash", map[string]any{"command": `id -u; tail -n +3 /proc/net/dev | cut -d: -f1; pwd; touch "$HOME/mine" && echo home`}),
			modeltest.Say("{{request.last_tool_result}}"),
		}})
		tr := r.run("Who are you?", "")
		tr.finished(t)
		text, _ := tr.text()
		got := strings.Fields(text)
		if len(got) != 4 || got[0] != pl.uid || got[1] != "lo" || got[3] != "home" {
			t.Errorf("the agent sees %q; want uid %s, the loopback device, the workspace and a home", text, pl.uid)
		}
	})
}

// TestSandboxedClaudeResume: the second run of a thread works in the same sandbox,
// and the session's memory is the CLI's own, kept in its home there.
func TestSandboxedClaudeResume(t *testing.T) {
	inEach(t, func(t *testing.T, pl place) {
		r := newRig(t, pl, modeltest.Script{Turns: []modeltest.Turn{modeltest.Say("Noted.")}})
		first := r.run("Remember the number 4711.", "")
		first.finished(t)
		session, ok := custom[event.SessionID](first, event.SessionIDName("claude-code"))
		created, made := custom[event.SandboxReady](first, event.NameSandboxCreated)
		if !ok || !made {
			t.Fatalf("no session or no sandbox:\n%s", first.summary())
		}

		r.serve(parse(t, "resume.yaml", `
capture: {number: {from: first_user, regexp: 'number (\d+)'}}
turns: [{blocks: [{type: text, text: 'You said {{request.capture.number}}, then: {{request.last_user}}'}]}]
`))
		second := r.run("What number did I say?", fmt.Sprintf(`{"sessionId":%q}`, session.SessionID))
		second.finished(t)
		if text, _ := second.text(); text != "You said 4711, then: What number did I say?" {
			t.Errorf("the resumed session answered %q", text)
		}
		resumed, ok := custom[event.SandboxReady](second, event.NameSandboxResumed)
		if _, again := custom[event.SandboxReady](second, event.NameSandboxCreated); again || !ok || resumed != created {
			t.Errorf("the sandbox %+v became %+v", created, resumed)
		}
		if s, _ := custom[event.SessionID](second, event.SessionIDName("claude-code")); s.SessionID != session.SessionID {
			t.Errorf("session %s became %s", session.SessionID, s.SessionID)
		}

		// Without the session nobody knows the number.
		r.serve(modeltest.Script{Turns: []modeltest.Turn{modeltest.Say("{{request.first_user}}")}})
		third := r.run("What number did I say?", "")
		third.finished(t)
		if text, _ := third.text(); text != "What number did I say?" {
			t.Errorf("a new session answered %q", text)
		}
	})
}

// TestSandboxedClaudeAPIErrors: what the model's API does wrong ends a run once,
// with a code that callers can branch on.
func TestSandboxedClaudeAPIErrors(t *testing.T) {
	const whole = `
queues: {whole: {turns: [{blocks: [{type: text, text: whole answer}]}]}}
routes: [{when: {stream: false}, use: whole}]
`
	cases := []struct {
		name, script string
		code         string // of the RUN_ERROR; empty: the run finishes
		says         string // part of its message, or the end of the text
	}{
		{"401", `
turns: [{status: 401, error: {message: no such key}}]
after: repeat-last
`, "api_error_401", "no such key"},
		{"429 recovered", `
turns:
- {status: 429, headers: {retry-after: 1}, error: {message: slow down}}
- blocks: [{type: text, text: ok now}]
`, "", "ok now"},
		{"500", `
turns: [{status: 500, error: {message: it broke}}]
after: repeat-last
`, "api_error_500", "500"},
		{"cut stream recovered", `
turns: [{blocks: [{type: text, deltas: [Part, "ial ", answer]}], delay: 100ms, cut: 2}]
` + whole, "", "whole answer"},
		{"cut for good", `
turns: [{blocks: [{type: text, deltas: [Part, "ial ", answer]}], delay: 50ms, cut: 1}]
after: repeat-last
`, "server_error", "Unable to connect to API"},
	}
	inEach(t, func(t *testing.T, pl place) {
		r := newRig(t, pl, modeltest.Script{Turns: []modeltest.Turn{modeltest.Say("unused")}})
		r.budget = 1
		for _, c := range cases {
			t.Run(c.name, func(t *testing.T) {
				r.serve(parse(t, c.name, c.script))
				run := r.start("hi", "")
				tr := follow(t, run, nil)
				if c.code == "" {
					tr.finished(t)
					if text, _ := tr.text(); !strings.HasSuffix(text, c.says) {
						t.Errorf("text %q", text)
					}
					return
				}
				e := tr.failed(t)
				if e.Code != c.code || !strings.Contains(e.Message, c.says) {
					t.Errorf("code %q, message %q; want %q and %q", e.Code, e.Message, c.code, c.says)
				}
			})
		}
	})
}

// TestSandboxedClaudeAbort: a cancelled run ends the CLI, the command of its tool,
// and what that left in sessions of their own, and leaves the sandbox usable.
func TestSandboxedClaudeAbort(t *testing.T) {
	inEach(t, func(t *testing.T, pl place) {
		mark := uniqueSeconds()
		command := fmt.Sprintf("(setsid setsid sleep %[1]s &) ; nohup sleep %[1]s >/dev/null 2>&1 & sleep %[1]s", mark)
		r := newRig(t, pl, modeltest.Script{Turns: []modeltest.Turn{
			{Blocks: []modeltest.Block{
				{Type: modeltest.Text, Text: "I wait."},
				{Type: modeltest.ToolUse, Name: "Bash", Input: map[string]any{"command": command, "timeout": 600000}},
			}},
		}})
		r.extra = map[string]string{"E2E_MARK": "mark" + mark}
		run := r.start("Wait.", "")
		started := make(chan struct{})
		aborted := make(chan time.Time, 1)
		go func() {
			select {
			case <-started:
			case <-t.Context().Done():
				return
			}
			// Three sleeps; their shells have the mark in the command line, too.
			for len(sleeps(mark)) < 3 && t.Context().Err() == nil {
				<-time.After(20 * time.Millisecond)
			}
			aborted <- time.Now()
			if err := run.Cancel("by the test"); err != nil {
				t.Error(err)
			}
		}()
		tr := follow(t, run, func(ev event.Event) {
			if ev.Type() == event.TypeToolCallEnd {
				close(started)
			}
		})
		select {
		case at := <-aborted:
			if took := time.Since(at); took > 8*time.Second {
				t.Errorf("the run ended after %v", took)
			}
		default:
			t.Fatalf("the run ended before it was cancelled:\n%s", tr.summary())
		}
		if e := tr.failed(t); e.Code != "aborted" {
			t.Errorf("terminal %+v", e)
		}
		if left := testenv.Processes(mark); len(left) > 0 {
			t.Errorf("%d processes are left: %s", len(left), strings.Join(left, "\n"))
		}
		if calls := tr.calls(); len(calls) != 1 || calls[0].Result == "" {
			t.Errorf("calls %+v", calls)
		}
		r.serve(modeltest.Script{Turns: []modeltest.Turn{modeltest.Say("still here")}})
		again := r.run("And now?", "")
		again.finished(t)
		if _, ok := custom[event.SandboxReady](again, event.NameSandboxResumed); !ok {
			t.Errorf("the sandbox was not resumed:\n%s", again.summary())
		}
	})
}

// uniqueSeconds is a duration for sleep that nobody else on this machine uses, so
// that it names the processes.
func uniqueSeconds() string { return fmt.Sprintf("60%09d", rand.IntN(1e9)) }

// sleeps are the processes that sleep for mark; the shells around them are not.
func sleeps(mark string) []string {
	var out []string
	for _, p := range testenv.Processes(mark) {
		if strings.Contains(p, fmt.Sprintf(`: "sleep %s `, mark)) {
			out = append(out, p)
		}
	}
	return out
}
