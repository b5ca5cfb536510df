package harness_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/aisandbox-go/aisandbox/chat"
	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/harness"
	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/provider/local"
	"github.com/aisandbox-go/aisandbox/sandbox"
	"github.com/aisandbox-go/aisandbox/workspace"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// shAgent is an agent whose program is a shell script that prints texts, one a
// line. "!" at the start of a line makes the decoder fail.
type shAgent struct {
	script string
	argv   []string // instead of the script
	files  []harness.File
	ladder []harness.AbortStep
	once   bool // offers a fallback for a first turn without output
}

func (a *shAgent) Name() string { return "sh" }
func (a *shAgent) Files(harness.Plan) ([]harness.File, []string, error) {
	return a.files, nil, nil
}
func (a *shAgent) Command(t harness.Turn) (provider.Cmd, error) {
	argv := a.argv
	if argv == nil {
		argv = append(provider.Shell(a.script), "sh", t.Private)
	}
	if string(t.Options) == `"again"` {
		argv = provider.Shell("echo second")
	}
	return provider.Cmd{Argv: argv, Stdin: strings.NewReader(t.Messages[len(t.Messages)-1].Content.String())}, nil
}
func (a *shAgent) Decoder(t harness.Turn) harness.Decoder { return &shDecoder{t: t} }
func (a *shAgent) AbortLadder() []harness.AbortStep       { return a.ladder }
func (a *shAgent) Fallback(t harness.Turn, _ []event.Event, _ harness.End) (harness.Turn, string, bool) {
	t.Options = json.RawMessage(`"again"`)
	return t, "the first way is gone", a.once
}

type shDecoder struct{ t harness.Turn }

func (d *shDecoder) Line(line []byte) ([]event.Event, error) {
	if line[0] == '!' {
		return nil, errors.New("rubbish")
	}
	id := d.t.NewID()
	return []event.Event{
		event.TextMessageStart{MessageID: id, Role: "assistant"},
		event.TextMessageContent{MessageID: id, Delta: string(line)},
		event.TextMessageEnd{MessageID: id},
	}, nil
}

func (d *shDecoder) Close(end harness.End) ([]event.Event, error) {
	if end.Exit.Code != 0 {
		return []event.Event{event.RunError{Message: fmt.Sprintf("%v: %s", end.Exit, end.StderrTail), Code: "exit"}}, nil
	}
	return []event.Event{event.RunFinished{RunID: d.t.RunID, ThreadID: d.t.ThreadID}}, nil
}

func gitRepo(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "a.txt"), []byte("one\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"init", "-q"}, {"add", "."}, {"-c", "user.name=t", "-c", "user.email=t@t.invalid", "commit", "-qm", "c"}} {
		if out, err := exec.CommandContext(t.Context(), "git", append([]string{"-C", dir}, args...)...).CombinedOutput(); err != nil {
			t.Fatalf("git %v: %v: %s", args, err, out)
		}
	}
	return dir
}

func start(t *testing.T, a *shAgent, src workspace.Source) *chat.Run {
	t.Helper()
	def, err := sandbox.Define(sandbox.Definition{
		ID:        "test",
		Provider:  local.New(local.Options{BaseDir: t.TempDir()}),
		Workspace: workspace.Workspace{Source: src},
		Lifecycle: sandbox.Lifecycle{Reuse: sandbox.PerRun},
	})
	if err != nil {
		t.Fatal(err)
	}
	run, err := chat.Start(t.Context(), chat.Request{
		RunID: "r1", ThreadID: "t1",
		Messages: []event.Message{{ID: "u1", Role: "user", Content: event.Text("the prompt")}},
		Adapter:  harness.Text(a, harness.Options{}),
		Use:      []chat.Middleware{sandbox.With(def, sandbox.WithOptions{Deps: sandbox.Deps{NoGuest: true}})},
	})
	if err != nil {
		t.Fatal(err)
	}
	return run
}

// drain reads a run to its end; what it said, and its events.
func drain(t *testing.T, run *chat.Run) (text []string, all []event.Event) {
	t.Helper()
	for ev, err := range run.Events(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, ev)
		if c, ok := ev.(event.TextMessageContent); ok {
			text = append(text, c.Delta)
		}
	}
	if err := event.Validate(all); err != nil {
		t.Errorf("the stream is not legal: %v", err)
	}
	return text, all
}

func TestRunEndsWithDiffBeforeTerminal(t *testing.T) {
	run := start(t, &shAgent{script: `cat; echo; echo two >> a.txt; echo new > b.txt`}, workspace.Local{Path: gitRepo(t)})
	text, all := drain(t, run)
	if len(text) != 1 || text[0] != "the prompt" {
		t.Errorf("text = %q, want the prompt that was given on stdin", text)
	}
	n := len(all)
	if _, ok := all[n-1].(event.RunFinished); !ok {
		t.Fatalf("last event is %s", all[n-1].Type())
	}
	var diff event.FileChanged
	for i, ev := range all {
		if d, ok := event.CustomOf[event.FileChanged](ev, event.NameFileChanged); ok {
			diff = d
			if i > n-2 {
				t.Errorf("file.changed is event %d of %d", i, n)
			}
		}
	}
	for _, want := range []string{"+two", "b/b.txt", "+new"} {
		if !strings.Contains(diff.Diff, want) {
			t.Errorf("diff lacks %q:\n%s", want, diff.Diff)
		}
	}
}

func TestFilesArePrivateAndGoAway(t *testing.T) {
	a := &shAgent{
		files:  []harness.File{{Name: "conf/x.json", Content: []byte("{\x00}")}, {Name: "y", Content: nil, Mode: 0o700}},
		script: `echo "$1"; stat -c '%a %s' "$1" "$1/conf/x.json" "$1/y"`,
	}
	text, _ := drain(t, start(t, a, nil))
	if len(text) != 4 {
		t.Fatalf("text = %q", text)
	}
	if !strings.HasPrefix(text[1], "700 ") || text[2] != "600 3" || text[3] != "700 0" {
		t.Errorf("modes and sizes = %q", text[1:])
	}
	if _, err := os.Lstat(text[0]); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the private directory is still there: %v", err)
	}
}

func TestFileOutsideOfPrivateIsRefused(t *testing.T) {
	_, all := drain(t, start(t, &shAgent{files: []harness.File{{Name: "../x"}}, script: "echo no"}, nil))
	if e, ok := all[len(all)-1].(event.RunError); !ok || !strings.Contains(e.Message, "private directory") {
		t.Errorf("last event = %#v", all[len(all)-1])
	}
}

func TestBadPrograms(t *testing.T) {
	for name, tc := range map[string]struct {
		agent *shAgent
		want  string
	}{
		"absent":      {&shAgent{argv: []string{"no-such-agent"}}, "not in the sandbox"},
		"exit code":   {&shAgent{script: "echo hello; echo why >&2; exit 3"}, "exit 3: why"},
		"killed":      {&shAgent{script: "kill -9 $$"}, "signal 9"},
		"rubbish":     {&shAgent{script: "echo '!'; sleep 60"}, "rubbish"},
		"endless":     {&shAgent{script: "head -c 100000000 /dev/zero | tr '\\0' x"}, "67108864 bytes"},
		"blank lines": {&shAgent{script: "echo; echo '  '; exit 1"}, "exit 1"},
	} {
		t.Run(name, func(t *testing.T) {
			_, all := drain(t, start(t, tc.agent, nil))
			e, ok := all[len(all)-1].(event.RunError)
			if !ok || !strings.Contains(e.Message, tc.want) {
				t.Errorf("last event = %#v, want a RUN_ERROR with %q", all[len(all)-1], tc.want)
			}
		})
	}
}

// alive is false for a zombie, too: it has no command line any more.
func alive(pid string) bool {
	b, _ := os.ReadFile("/proc/" + pid + "/cmdline")
	return len(b) > 0
}

func TestCancelGoesDownTheLadder(t *testing.T) {
	a := &shAgent{
		// The program says what it was told; a child of its in a session of its own
		// would outlive it.
		script: `trap 'echo interrupted' INT; trap 'echo terminated; exit 0' TERM; setsid sleep 600 & echo "$!"; echo ready; while :; do sleep 0.02; done`,
		ladder: []harness.AbortStep{{Signal: int(syscall.SIGINT), Wait: 300 * time.Millisecond}, {Signal: int(syscall.SIGTERM), Wait: 5 * time.Second}},
	}
	run := start(t, a, nil)
	var text []string
	var last event.Event
	for ev, err := range run.Events(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		last = ev
		if c, ok := ev.(event.TextMessageContent); ok {
			text = append(text, c.Delta)
			if c.Delta == "ready" {
				if err := run.Cancel("enough"); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	if e, ok := last.(event.RunError); !ok || e.Code != "aborted" {
		t.Errorf("last event = %#v", last)
	}
	if len(text) == 0 {
		t.Fatal("the program said nothing")
	}
	if alive(text[0]) {
		t.Errorf("process %s in a session of its own is still there", text[0])
	}
	o, err := run.Wait(context.Background())
	if err != nil || o.Kind != chat.Canceled {
		t.Errorf("outcome = %v, %v", o, err)
	}
}

func TestConsumerLeaves(t *testing.T) {
	run := start(t, &shAgent{script: `echo $$; while :; do echo more; done`}, nil)
	pid := ""
	for ev, err := range run.Events(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		if c, ok := ev.(event.TextMessageContent); ok {
			pid = c.Delta
			break
		}
	}
	if alive(pid) {
		t.Errorf("process %s is still there after its only reader left", pid)
	}
}

func TestFallbackRunsOnceAndHidesTheFirstEnd(t *testing.T) {
	text, all := drain(t, start(t, &shAgent{script: "exit 1", once: true}, nil))
	if len(text) != 1 || text[0] != "second" {
		t.Errorf("text = %q", text)
	}
	if _, ok := all[len(all)-1].(event.RunFinished); !ok {
		t.Errorf("last event is %s", all[len(all)-1].Type())
	}
	// A program that said something is not run again.
	text, all = drain(t, start(t, &shAgent{script: "echo first; exit 1", once: true}, nil))
	if _, ok := all[len(all)-1].(event.RunError); !ok || len(text) != 1 || text[0] != "first" {
		t.Errorf("text = %q, last event is %s", text, all[len(all)-1].Type())
	}
}
