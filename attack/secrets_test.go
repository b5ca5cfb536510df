package attack

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
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
	"github.com/aisandbox-go/aisandbox/harness/scripted"
	"github.com/aisandbox-go/aisandbox/internal/testenv"
	"github.com/aisandbox-go/aisandbox/modeltest"
	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/sandbox"
	"github.com/aisandbox-go/aisandbox/secret"
	"github.com/aisandbox-go/aisandbox/store"
	"github.com/aisandbox-go/aisandbox/store/memstore"
	"github.com/aisandbox-go/aisandbox/workspace"
)

// newSecret is a value that every encoding changes.
func newSecret() string { return `S3+c'r&t="` + rand.Text() + `%é<` }

// scene is a sandbox whose workspace comes from a git server that wants a token,
// and an agent in it.
type scene struct {
	*hunt
	place place
	dir   string // state of the backend
	token string // secret of the workspace
	git   string // token of the git server
	key   string // of the model's API
	set   *secret.Set
	log   buffer
	def   *sandbox.Def
	deps  sandbox.Deps
	thing sandbox.Key
	exe   string
	argv  bool // secrets are in command lines, and may be
	inst  store.Instances
	url   string
}

func newScene(t *testing.T, pl place, setup ...string) *scene {
	t.Helper()
	pl.require(t)
	s := &scene{place: pl, dir: shortDir(t), token: newSecret(), git: "ghp_" + rand.Text(), key: "sk-" + rand.Text()}
	s.hunt = newHunt(t, map[string]string{"token": s.token, "git token": s.git, "API key": s.key})
	var err error
	if s.set, err = secret.NewSet(map[string]string{"TOKEN": s.token, "GIT_TOKEN": s.git}); err != nil {
		t.Fatal(err)
	}
	if s.exe, err = filepath.EvalSymlinks(testenv.Claude(t)); err != nil {
		t.Fatal(err)
	}
	logger := slog.New(slog.NewJSONHandler(&s.log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	p := pl.open(t, options{log: logger, base: s.dir, exe: s.exe})
	if p.Name() == "docker" {
		s.exe = insideExe
	}
	s.url = gitServer(t, p.Name() == "docker", s.git)
	s.def, err = sandbox.Define(sandbox.Definition{
		ID: "hunt", Provider: p, FileEvents: sandbox.FileEventsDiff,
		Workspace: workspace.Workspace{
			Source:  workspace.Git{URL: s.url, Auth: workspace.Auth{Token: s.set.Ref("GIT_TOKEN")}},
			Secrets: s.set, Setup: workspace.Steps(workspace.Serial(setup...)),
		},
		Lifecycle: sandbox.Lifecycle{Snapshot: sandbox.NoSnapshot},
	})
	if err != nil {
		t.Fatal(err)
	}
	s.inst = memstore.New(memstore.Options{}).Instances
	s.deps = sandbox.Deps{Instances: s.inst, Guest: guest.Options{Program: testenv.Guest(t), Logger: logger}, Logger: logger}
	s.thing = sandbox.Key{ThreadID: t.Name()}
	t.Cleanup(func() {
		if err := sandbox.DestroyInstance(context.Background(), s.deps, s.def, s.thing); err != nil {
			t.Error(err)
		}
	})
	return s
}

// turn lets an agent do one turn while the command lines are watched, and
// searches all that it says.
func (s *scene) turn(a chat.Adapter) []event.Event {
	s.t.Helper()
	if !s.argv {
		stop := s.watch()
		defer stop()
	}
	r, err := chat.Start(s.t.Context(), chat.Request{
		ThreadID: s.thing.ThreadID, Adapter: a, Logger: s.deps.Logger, Timeout: time.Minute,
		Messages: []event.Message{{ID: "u", Role: "user", Content: event.Text("go")}},
		Use:      []chat.Middleware{sandbox.With(s.def, sandbox.WithOptions{Deps: s.deps})},
	})
	if err != nil {
		s.t.Fatal(err)
	}
	var evs []event.Event
	for ev, err := range r.Events(s.t.Context()) {
		if err != nil {
			s.t.Fatal(err)
		}
		evs = append(evs, ev)
	}
	if err := event.Validate(evs); err != nil {
		s.t.Errorf("not a legal stream: %v", err)
	}
	s.stream(evs)
	o, err := r.Wait(s.t.Context())
	s.look("the outcome", fmt.Appendf(nil, "%v %v %+v", err, o.Err, o))
	b, err := json.Marshal(r.Transcript())
	if err != nil {
		s.t.Error(err)
	}
	s.look("the transcript", b)
	return evs
}

// said is a stream as its viewers see it.
func said(evs []event.Event) string {
	var b strings.Builder
	for _, ev := range evs {
		j, err := event.Encode(ev)
		if err != nil {
			j = []byte(err.Error())
		}
		b.Write(append(j, '\n'))
	}
	return b.String()
}

// outside searches everything outside of the agent's own files. skip are files
// below the state directory that are the agent's own.
func (s *scene) outside(skip ...string) {
	s.t.Helper()
	s.look("the log", s.log.Bytes())
	s.tree("the state directory", s.dir, skip...)
	list, _, err := s.inst.List(s.t.Context(), store.InstanceQuery{AllTenants: true})
	if err != nil {
		s.t.Fatal(err)
	}
	for _, rec := range list {
		b, err := json.Marshal(rec)
		if err != nil {
			s.t.Fatal(err)
		}
		s.look("the instance's record", b)
		s.look("the instance's reference", rec.Ref)
	}
	s.look("the definition", fmt.Appendf(nil, "%v %+v %#v %s", s.def, s.def.Definition(), s.def.Definition(), s.def.InstanceKey(s.thing)))
}

// model is a mock of the model's API.
func (s *scene) model(turns ...modeltest.Turn) chat.Adapter {
	m := modeltest.NewServer(s.t, modeltest.Script{Turns: turns})
	return claudecode.Text("sonnet", claudecode.Options{Executable: []string{s.exe}, BaseURL: m.URL, Keys: apiKey(s.key)})
}

// box attaches to the scene's sandbox.
func (s *scene) box() *sandbox.Sandbox {
	s.t.Helper()
	sb, err := sandbox.EnsureExisting(s.t.Context(), s.deps, s.def, s.thing)
	if err != nil || sb == nil {
		s.t.Fatalf("no sandbox: %v", err)
	}
	s.t.Cleanup(func() { _ = sb.Close() })
	return sb
}

func script(t *testing.T, yaml string) chat.Adapter {
	t.Helper()
	sc, err := scripted.Parse("attack.yaml", []byte(yaml))
	if err != nil {
		t.Fatal(err)
	}
	return scripted.Text(scripted.Options{Script: sc})
}

// isolated are the places where a secret is worth hiding, one of each backend.
func isolated() (out []place) {
	for _, pl := range places {
		if pl.isolates && pl.name != "docker as root" {
			out = append(out, pl)
		}
	}
	return out
}

// engineLog is what the engine keeps of a container's output: nothing where its
// first process is the guest.
func engineLog(t *testing.T, id string) []byte {
	t.Helper()
	if strings.TrimSpace(string(run(t, "docker", "inspect", "--format", "{{.HostConfig.LogConfig.Type}}", id))) == "none" {
		return nil
	}
	return run(t, "docker", "logs", id)
}

// TestSecretsOfHonestAgent: two turns that have no use for the secrets leave them
// nowhere at all, neither outside nor in the sandbox's own files and snapshot.
func TestSecretsOfHonestAgent(t *testing.T) {
	for _, pl := range isolated() {
		t.Run(pl.name, func(t *testing.T) {
			s := newScene(t, pl, "test -n \"$TOKEN\"", "true")
			s.turn(script(t, "steps:\n- run: test ${#TOKEN} -gt 20 && cat README.md\n- write: {path: new.txt, content: x}\n- say: done\n"))
			evs := s.turn(s.model(
				modeltest.Call("Bash", map[string]any{"command": "git log --oneline; git remote -v; git config --list"}), modeltest.Say("done")))
			if _, ok := evs[len(evs)-1].(event.RunFinished); !ok {
				t.Errorf("the run ended with %+v", evs[len(evs)-1])
			}
			sb := s.box()
			if got := sh(t, sb, "git rev-parse --is-shallow-repository; printenv TOKEN"); got != "true\n"+s.token {
				t.Fatalf("the sandbox has %q", got) // or nothing would have been hidden
			}
			s.look("the sandbox's files", []byte(sh(t, sb, `find / -xdev -type f -size -8M -not -path '/usr/*' -not -path '/proc/*' -exec cat {} + 2>/dev/null`)))
			s.look("the workspace's .git", []byte(sh(t, sb, `find .git -type f -exec cat {} +`)))
			s.outside()
			if sb.Provider().Name() == "docker" {
				s.look("docker inspect", run(t, "docker", "inspect", sb.Ref().ID))
				s.look("docker logs", engineLog(t, sb.Ref().ID))
				id, err := sb.Snapshot(t.Context(), "hunt")
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() {
					r, ok := provider.As[provider.Restorer](sb.Provider())
					if !ok {
						t.Fatal("no Restorer")
					}
					if err := r.DeleteSnapshot(context.Background(), id); err != nil {
						t.Error(err)
					}
				})
				s.image(id)
			}
			s.report()
		})
	}
}

// leak are commands of an agent that wants to get a variable out. ${NAME} and the
// like are the shell's.
var leak = []string{
	`echo "$TOKEN"`,
	`printf %s "$TOKEN" | base64 -w0`,
	`printf 'xx%s' "$TOKEN" | base64 -w0 | tr '+/' '-_'`,
	`printf %s "$TOKEN" | od -An -v -tx1 | tr -d ' \n'`,
	`printf %s "$TOKEN" | od -An -v -tx1 | tr -d '\n' | tr ' ' '%'`,
	`printf %s "$TOKEN" | od -An -v -tx1 | tr -d ' \n' | tr a-f A-F`,
	`echo "token: $TOKEN" >&2; exit 3`,
	`echo "$TOKEN" > leak.txt; git add leak.txt; git diff --cached`,
	`printf '%s' "$TOKEN" | base64 > leak.b64`,
	`env; printf '{"t":"%s"}' "$(printf %s "$TOKEN" | sed 's/"/\\"/g')"`,
	`set -x; true "$TOKEN"`,
}

// ownFiles are where a leaking agent leaves the secret in its own sandbox.
var ownFiles = []string{"*/work", "*/home", "*/tmp", "*/runs"}

// TestSecretsOfLeakingAgent: an agent that tries hard gets the secrets into its own
// files, and no further.
func TestSecretsOfLeakingAgent(t *testing.T) {
	for _, pl := range isolated() {
		t.Run(pl.name, func(t *testing.T) {
			t.Run("scripted", func(t *testing.T) {
				s := newScene(t, pl)
				yaml := "steps:\n"
				for _, c := range leak {
					yaml += fmt.Sprintf("- run: %q\n", c)
				}
				// As a model would that was told the secret: in two deltas, in the
				// arguments of a tool, in what it thinks.
				for _, v := range []string{s.token, s.git} {
					for _, cut := range []int{1, 9, len(v) - 1} {
						yaml += fmt.Sprintf("- say: %q\n- say: %q\n- think: %q\n- think: %q\n", "x "+v[:cut], v[cut:]+" y", "x "+v[:cut], v[cut:]+" y")
					}
					yaml += fmt.Sprintf("- say: %q\n- run: %q\n- write: {path: made.txt, content: %q}\n", v, "true "+shQuote(v), v)
				}
				evs := s.turn(script(t, yaml))
				if !strings.Contains(said(evs), "[secret:TOKEN]") {
					t.Errorf("nothing was hidden, so nothing was tried:\n%s", said(evs))
				}
				s.outside(ownFiles...)
				s.report()
			})
			t.Run("a file's name", func(t *testing.T) {
				s := newScene(t, pl)
				s.argv = true // of a git in the sandbox that is asked about that file
				evs := s.turn(script(t, "steps:\n- run: ': > \"$TOKEN\"; mkdir \"d$TOKEN\"; : > \"d$TOKEN/x\"; git add -A; git status; ls'\n- run: 'mv \"$TOKEN\" \"$(printf %s \"$TOKEN\" | od -An -v -tx1 | tr -d \" \\n\")\"'\n"))
				if !strings.Contains(said(evs), "/workspace/[secret:TOKEN]") {
					t.Errorf("no event of the file:\n%s", said(evs))
				}
				s.outside(ownFiles...)
				s.report()
			})
			t.Run("claude", func(t *testing.T) {
				s := newScene(t, pl)
				var turns []modeltest.Turn
				for _, c := range append(leak, `echo "$ANTHROPIC_API_KEY" | tee key.txt; printf %s "$ANTHROPIC_API_KEY" | base64 -w0`) {
					turns = append(turns, modeltest.Call("Bash", map[string]any{"command": c}))
				}
				quarter := len(s.token) / 4
				turns = append(turns, modeltest.Turn{Blocks: []modeltest.Block{
					{Type: modeltest.Thinking, Deltas: modeltest.Deltas("x ", s.token[:quarter], s.token[quarter:], " y")},
					{Type: modeltest.Text, Deltas: modeltest.Deltas("x ", s.token[:3*quarter], s.token[3*quarter:], " y")},
					{Type: modeltest.ToolUse, Name: "Write", Input: map[string]any{"file_path": "/workspace/w.txt", "content": s.token + s.git + s.key}, Pieces: 17},
				}}, modeltest.Say("It is ", s.key[:7], s.key[7:]))
				evs := s.turn(s.model(turns...))
				if !strings.Contains(said(evs), "[secret:TOKEN]") {
					t.Errorf("nothing was hidden, so nothing was tried:\n%s", said(evs))
				}
				s.outside(ownFiles...)
				s.report()
			})
		})
	}
}

// TestSecretsWithoutGuest: where commands do the guest's work, secrets are in no
// command line, and in nothing that an engine keeps of a command.
func TestSecretsWithoutGuest(t *testing.T) {
	for _, pl := range isolated() {
		t.Run(pl.name, func(t *testing.T) {
			s := newScene(t, pl, `test "${#TOKEN}" -gt 20`, `printf %s "$TOKEN" | wc -c`)
			s.deps.NoGuest = true
			container := s.def.Provider().Name() == "docker"
			since := time.Now().Add(-time.Second)
			stop := s.watch()
			sb, _, err := sandbox.Ensure(t.Context(), s.deps, s.def, s.thing)
			if err != nil {
				stop()
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = sb.Close() })
			if got := sh(t, sb, "printenv TOKEN; git log --format=%s"); got != s.token+"\nthree" {
				t.Errorf("the sandbox has %q", got)
			}
			if err := sb.WriteFile(t.Context(), "f", []byte("x"), 0o600); err != nil {
				t.Error(err)
			}
			stop()
			if container {
				id := sb.Ref().ID
				s.look("docker inspect", run(t, "docker", "inspect", id))
				s.look("docker logs", engineLog(t, id))
				until := fmt.Sprint(time.Now().Add(time.Second).Unix())
				events := run(t, "docker", "events", "--since", fmt.Sprint(since.Unix()), "--until", until, "--filter", "container="+id, "--format", "{{json .}}")
				if !bytes.Contains(events, []byte("exec_create")) {
					t.Errorf("docker events: %s", events)
				}
				s.look("docker events", events)
			}
			s.outside()
			s.report()
		})
	}
}

// TestSecretsOfCommand: what the built command prints, at its most talkative.
func TestSecretsOfCommand(t *testing.T) {
	bin := testenv.Command(t)
	for _, pl := range []string{"local", "bwrap", "docker"} {
		t.Run(pl, func(t *testing.T) {
			flags := []string{"--provider", pl}
			switch pl {
			case "bwrap":
				testenv.Bwrap(t)
			case "docker":
				testenv.Docker(t)
				flags = append(flags, "--image", testenv.Image)
			}
			token, key, dir := newSecret(), "sk-"+rand.Text(), shortDir(t)
			h := newHunt(t, map[string]string{"token": token, "API key": key})
			yaml := filepath.Join(dir, "s.yaml")
			text := "steps:\n- run: 'echo \"$TOKEN\"; printf %s \"$TOKEN\" | base64 -w0; echo \"$TOKEN\" > leak.txt'\n- crash: 3\n"
			if err := os.WriteFile(yaml, []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
			do := func(code int, args ...string) {
				t.Helper()
				cmd := exec.CommandContext(t.Context(), bin, args...)
				cmd.Dir = dir
				cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + dir, "XDG_STATE_HOME=" + dir + "/state", "XDG_CACHE_HOME=" + dir + "/cache",
					"DOCKER_HOST=" + os.Getenv("DOCKER_HOST"), "TOKEN=" + token, "ANTHROPIC_API_KEY=" + key}
				out, err := cmd.CombinedOutput()
				if cmd.ProcessState == nil || cmd.ProcessState.ExitCode() != code {
					t.Errorf("%q: %v: %s", args, err, out)
				}
				h.look("what "+args[0]+" prints", out)
			}
			stop := h.watch()
			secret := append([]string{"--secret", "TOKEN", "--repo", ""}, flags...)
			for _, format := range []string{"--json", "--json=false"} {
				do(1, append([]string{"run", "-v", format, "--script", yaml}, append(secret, "go")...)...)
				do(3, append([]string{"run", "-v", format, "--script", yaml, "--setup", `echo "$TOKEN"; printf %s "$TOKEN" | base64 -w0; exit 7`}, append(secret, "go")...)...)
			}
			do(127, append([]string{"exec", "-v"}, append(secret, "--", "no-such-program")...)...)
			do(0, "doctor", "-v")
			do(0, "doctor", "--json")
			stop()
			// A value in the wrong place is in the command line, and in nothing else.
			do(2, append([]string{"run", "-v", "--repo", "", "--secret", "TOKEN=" + token}, append(flags, "go")...)...)
			h.tree("files that are left", dir)
			h.report()
		})
	}
}

// TestSecretsInErrors: what fails with a secret in its hands does not show it.
func TestSecretsInErrors(t *testing.T) {
	for _, pl := range isolated() {
		t.Run(pl.name, func(t *testing.T) {
			for name, step := range map[string]string{
				"stdout": `echo "it is $TOKEN"; exit 7`,
				"stderr": `echo "it is $TOKEN" >&2; printf %s "$TOKEN" | base64 -w0 >&2; false`,
				"trace":  `set -x; cat "/no/$TOKEN"`,
			} {
				t.Run(name, func(t *testing.T) {
					s := newScene(t, pl, step)
					evs := s.turn(script(t, "steps:\n- say: never\n"))
					if e, ok := evs[len(evs)-1].(event.RunError); !ok || e.Code != "setup_failed" {
						t.Errorf("the run ended with %+v", evs[len(evs)-1])
					}
					s.outside()
					s.report()
				})
			}
			t.Run("step with the value in it", func(t *testing.T) {
				s := newScene(t, pl)
				d := s.def.Definition()
				d.Workspace.Setup = workspace.Steps(workspace.Serial("grep "+shQuote(s.token)+" /no/such/file"), workspace.Parallel("false "+shQuote(s.git)))
				var err error
				if s.def, err = sandbox.Define(d); err != nil {
					t.Fatal(err)
				}
				s.argv = true // grep has it there, as the author of the step wanted
				s.turn(script(t, "steps:\n- say: never\n"))
				s.look("the log", s.log.Bytes())
				s.report()
			})
			t.Run("operations", func(t *testing.T) {
				s := newScene(t, pl)
				s.turn(script(t, "steps:\n- say: hi\n"))
				sb := s.box()
				for _, v := range []string{s.token, s.git} {
					_, err := sb.Output(t.Context(), provider.Cmd{Argv: []string{"cat", "/no/" + v}})
					s.fails("Output", err)
					_, err = sb.Start(t.Context(), provider.Cmd{Argv: []string{"/no/" + v}})
					if err != nil { // a backend may say so by the exit code
						s.fails("Start", err)
					}
					_, err = sb.ReadFile(t.Context(), v)
					s.fails("ReadFile", err)
					s.fails("Rename", sb.Rename(t.Context(), v, v+"2"))
					s.fails("Put", sb.Put(t.Context(), "../"+v, strings.NewReader(v), 0o600))
					s.fails("Clone", func() error {
						_, err := sb.Shell(t.Context(), "git clone "+shQuote("http://x:"+v+"@127.0.0.1:1/r.git"))
						if err != nil {
							return err
						}
						return errors.New("expected")
					}())
				}
				s.look("the sandbox", fmt.Appendf(nil, "%v %+v %#v", sb, sb, sb))
				s.report()
			})
			t.Run("wrong git token", func(t *testing.T) {
				s := newScene(t, pl)
				wrong, err := secret.NewSet(map[string]string{"TOKEN": s.token, "GIT_TOKEN": s.git + "x"})
				if err != nil {
					t.Fatal(err)
				}
				d := s.def.Definition()
				d.Workspace.Secrets = wrong
				d.Workspace.Source = workspace.Git{URL: s.url, Auth: workspace.Auth{Token: wrong.Ref("GIT_TOKEN")}}
				if s.def, err = sandbox.Define(d); err != nil {
					t.Fatal(err)
				}
				evs := s.turn(script(t, "steps:\n- say: never\n"))
				if e, ok := evs[len(evs)-1].(event.RunError); !ok {
					t.Errorf("the run ended with %+v", e)
				}
				s.outside()
				s.report()
			})
		})
	}
}

func (s *scene) fails(what string, err error) {
	s.t.Helper()
	if err == nil {
		s.t.Errorf("%s succeeded", what)
		return
	}
	s.look("the error of "+what, fmt.Appendf(nil, "%v %+v %#v", err, err, err))
}

func shQuote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

// apiKey is a set that holds one API key.
func apiKey(v string) *secret.Set {
	s, err := secret.NewSet(map[string]string{"ANTHROPIC_API_KEY": v})
	if err != nil {
		panic(err)
	}
	return s
}
