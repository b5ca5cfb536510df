package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/aisandbox-go/aisandbox/chat"
	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/guest"
	"github.com/aisandbox-go/aisandbox/harness/claudecode"
	"github.com/aisandbox-go/aisandbox/internal/testenv"
	"github.com/aisandbox-go/aisandbox/modeltest"
	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/provider/bwrap"
	"github.com/aisandbox-go/aisandbox/provider/docker"
	"github.com/aisandbox-go/aisandbox/sandbox"
	"github.com/aisandbox-go/aisandbox/store/memstore"
	"github.com/aisandbox-go/aisandbox/workspace"
)

// place is a kind of sandbox that the real CLI works in. It has no network: the
// model on the host's loopback is reached through the guest.
type place struct {
	name    string
	require func(testing.TB)
	uid     string // whom the agent runs as

	// open returns the backend, and the path in the sandbox of the host's program exe.
	open func(t *testing.T, exe string) (p provider.Provider, inside string)
}

var places = []place{
	{
		name: "bwrap", require: testenv.Bwrap, uid: "1000",
		open: func(t *testing.T, exe string) (provider.Provider, string) {
			return bwrap.New(bwrap.Options{BaseDir: shortDir(t), ReadOnly: []string{filepath.Dir(exe)}}), exe
		},
	},
	{
		name: "docker", require: testenv.Docker, uid: "1234",
		open: func(t *testing.T, exe string) (provider.Provider, string) {
			const inside = "/opt/claude/claude"
			p := docker.New(docker.Options{
				Image: testenv.Image, PullPolicy: docker.PullNever, User: "1234:1234",
				Volumes: []docker.Volume{{Source: exe, Target: inside, ReadOnly: true}},
			})
			t.Cleanup(func() { _ = p.Close() })
			return p, inside
		},
	},
}

// shortDir is a directory whose path is short enough for a socket in it.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "e2e-")
	if err == nil {
		err = os.Chmod(dir, 0o755) // sandboxes have a user of their own
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// rig is a thread whose agent is the real CLI in a sandbox of its own.
type rig struct {
	t      *testing.T
	place  place
	exe    string
	repo   string
	model  *modeltest.TestServer
	def    *sandbox.Def
	deps   sandbox.Deps
	key    sandbox.Key
	extra  map[string]string // environment of the CLI
	budget int               // retries of the CLI
}

// newRig defines the sandbox over a copy of the demo's repository. Nothing is
// made before the first run.
func newRig(t *testing.T, pl place, s modeltest.Script) *rig {
	t.Helper()
	pl.require(t)
	exe, err := filepath.EvalSymlinks(testenv.Claude(t))
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t, place: pl, repo: demoRepo(t), budget: 2}
	p, inside := pl.open(t, exe)
	r.exe = inside
	r.def, err = sandbox.Define(sandbox.Definition{
		ID: "e2e", Provider: p, Network: provider.NetworkNone,
		Workspace: workspace.Workspace{Source: workspace.Local{Path: r.repo}},
		Lifecycle: sandbox.Lifecycle{Snapshot: sandbox.NoSnapshot},
	})
	if err != nil {
		t.Fatal(err)
	}
	r.key = sandbox.Key{ThreadID: "thread-" + t.Name()}
	r.deps = sandbox.Deps{
		Instances: memstore.New(memstore.Options{}).Instances,
		Guest:     guest.Options{Program: testenv.Guest(t)},
	}
	t.Cleanup(func() {
		if err := sandbox.DestroyInstance(context.Background(), r.deps, r.def, r.key); err != nil {
			t.Error(err)
		}
	})
	r.serve(s)
	return r
}

// serve lets later runs talk to another model.
func (r *rig) serve(s modeltest.Script) { r.model = modeltest.NewServer(r.t, s) }

// start begins a turn. Options are those of the call, a JSON object or empty.
func (r *rig) start(prompt, options string) *chat.Run {
	r.t.Helper()
	run, err := chat.Start(r.t.Context(), chat.Request{
		ThreadID: r.key.ThreadID,
		Messages: []event.Message{{ID: "user-1", Role: "user", Content: event.Text(prompt)}},
		Options:  json.RawMessage(options),
		Timeout:  90 * time.Second,
		Adapter: claudecode.Text("sonnet", claudecode.Options{
			Executable: []string{r.exe}, BaseURL: r.model.URL, Keys: apiKey("sk-fake-key-of-a-test"),
			Env: r.extra, MaxRetries: r.budget,
		}),
		Use: []chat.Middleware{sandbox.With(r.def, sandbox.WithOptions{Deps: r.deps})},
	})
	if err != nil {
		r.t.Fatal(err)
	}
	return run
}

// run does a whole turn.
func (r *rig) run(prompt, options string) trace {
	r.t.Helper()
	return follow(r.t, r.start(prompt, options), nil)
}

// box attaches to the sandbox that the runs left.
func (r *rig) box() *sandbox.Sandbox {
	r.t.Helper()
	sb, err := sandbox.EnsureExisting(r.t.Context(), r.deps, r.def, r.key)
	if err != nil || sb == nil {
		r.t.Fatalf("the sandbox of the runs: %v, %v", sb, err)
	}
	r.t.Cleanup(func() { _ = sb.Close() })
	return sb
}

func shell(t *testing.T, sb *sandbox.Sandbox, script string) string {
	t.Helper()
	res, err := sb.Shell(t.Context(), script)
	if err != nil {
		t.Fatalf("%s: %v", script, err)
	}
	if res.Exit.Code != 0 {
		t.Fatalf("%s: %v: %s%s", script, res.Exit, res.Stdout, res.Stderr)
	}
	return strings.TrimSpace(string(res.Stdout))
}

// trace is the stream of one run.
type trace []event.Event

// follow reads a run to its end, tells look of each event, and checks what holds
// for every stream.
func follow(t *testing.T, run *chat.Run, look func(event.Event)) trace {
	t.Helper()
	var tr trace
	for ev, err := range run.Events(t.Context()) {
		if err != nil {
			t.Fatalf("read the run: %v", err)
		}
		tr = append(tr, ev)
		if look != nil {
			look(ev)
		}
	}
	tr.check(t)
	return tr
}

// check is for every stream: legal, opened as the protocol wants it, with one end.
func (tr trace) check(t *testing.T) {
	t.Helper()
	if err := event.Validate(tr); err != nil {
		t.Errorf("not a legal stream: %v\n%s", err, tr.summary())
	}
	opened := len(tr) >= 2 && tr[0].Type() == event.TypeRunStarted
	if opened {
		_, opened = event.CustomOf[struct{}](tr[1], event.NameRunAccepted)
	}
	if !opened {
		t.Errorf("the stream does not begin with RUN_STARTED and run.accepted:\n%s", tr.summary())
	}
	ends := 0
	for _, ev := range tr {
		switch ev.(type) {
		case event.RunFinished, event.RunError:
			ends++
		}
	}
	if ends != 1 {
		t.Errorf("%d terminal events:\n%s", ends, tr.summary())
	}
}

func (tr trace) summary() string {
	var b strings.Builder
	for _, ev := range tr {
		j, err := event.Encode(ev)
		if err != nil {
			j = []byte(err.Error())
		}
		b.Write(j[:min(len(j), 300)])
		b.WriteByte('\n')
	}
	return b.String()
}

// text joins the assistant's text and its reasoning.
func (tr trace) text() (text, thinking string) {
	for _, ev := range tr {
		switch e := ev.(type) {
		case event.TextMessageContent:
			text += e.Delta
		case event.ReasoningMessageContent:
			thinking += e.Delta
		}
	}
	return text, thinking
}

// toolCall is a tool call with its answer.
type toolCall struct{ Name, Args, Result string }

func (tr trace) calls() []toolCall {
	var ids []string
	byID := map[string]*toolCall{}
	for _, ev := range tr {
		switch e := ev.(type) {
		case event.ToolCallStart:
			ids = append(ids, e.ToolCallID)
			byID[e.ToolCallID] = &toolCall{Name: e.ToolCallName}
		case event.ToolCallArgs:
			byID[e.ToolCallID].Args += e.Delta
		case event.ToolCallResult:
			byID[e.ToolCallID].Result = e.Content
		}
	}
	var out []toolCall
	for _, id := range ids {
		out = append(out, *byID[id])
	}
	return out
}

// custom returns the payload of the last CUSTOM event with a name.
func custom[T any](tr trace, name string) (v T, ok bool) {
	for _, ev := range tr {
		if c, is := event.CustomOf[T](ev, name); is {
			v, ok = c, true
		}
	}
	return v, ok
}

func (tr trace) finished(t *testing.T) event.RunFinished {
	t.Helper()
	for _, ev := range tr {
		if e, ok := ev.(event.RunFinished); ok {
			return e
		}
	}
	t.Fatalf("the run did not finish:\n%s", tr.summary())
	return event.RunFinished{}
}

func (tr trace) failed(t *testing.T) event.RunError {
	t.Helper()
	for _, ev := range tr {
		if e, ok := ev.(event.RunError); ok {
			return e
		}
	}
	t.Fatalf("the run did not fail:\n%s", tr.summary())
	return event.RunError{}
}

// demoRepo is a git repository with the files of the demo.
func demoRepo(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	from := filepath.Join(testenv.Root(t), "cli", "demo", "repo")
	err := filepath.WalkDir(from, func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		rel, err := filepath.Rel(from, name)
		if err != nil {
			return err
		}
		b, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		to := filepath.Join(dir, rel)
		return errors.Join(os.MkdirAll(filepath.Dir(to), 0o755), os.WriteFile(to, b, 0o644))
	})
	if err != nil {
		t.Fatal(err)
	}
	git(t, dir, "init", "-q", "-b", "main")
	git(t, dir, "add", "-A")
	git(t, dir, "commit", "-q", "-m", "files")
	return dir
}

func git(t *testing.T, dir string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "git", append([]string{"-C", dir,
		"-c", "user.name=t", "-c", "user.email=t@t.invalid", "-c", "commit.gpgsign=false"}, args...)...)
	cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_SYSTEM=/dev/null")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("git %v: %v: %s", args, err, out)
	}
	return strings.TrimSpace(string(out))
}

// demoModel is the script of the demo's mock model.
func demoModel(t *testing.T) modeltest.Script {
	t.Helper()
	name := filepath.Join(testenv.Root(t), "cli", "demo", "model.yaml")
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return parse(t, name, string(b))
}
