package attack

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/http/cgi"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
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

// hunt looks for secrets. Each finding says what kind of place it was in.
type hunt struct {
	t       *testing.T
	needles []needle

	seen map[string]bool // command lines; of the one who watches

	mu    sync.Mutex
	found map[string]bool
}

// needle is a secret in one of the forms in which it may show up.
type needle struct {
	secret, form string
	text         []byte
}

// newHunt makes the forms of each secret, by name.
func newHunt(t *testing.T, secrets map[string]string) *hunt {
	h := &hunt{t: t, seen: map[string]bool{}, found: map[string]bool{}}
	for name, v := range secrets {
		add := func(form, text string) {
			h.needles = append(h.needles, needle{name, form, []byte(text)})
		}
		add("plain", v)
		add("hex", hex.EncodeToString([]byte(v)))
		add("HEX", strings.ToUpper(hex.EncodeToString([]byte(v))))
		add("query escaped", url.QueryEscape(v))
		add("path escaped", url.PathEscape(v))
		add("quoted", gnuQuoted(t, v))
		var percent strings.Builder
		for _, c := range []byte(v) {
			fmt.Fprintf(&percent, "%%%02x", c)
		}
		add("percent", percent.String())
		for _, html := range []bool{true, false} {
			var b bytes.Buffer
			e := json.NewEncoder(&b)
			e.SetEscapeHTML(html)
			if err := e.Encode(v); err != nil {
				t.Fatal(err)
			}
			add("JSON", strings.Trim(strings.TrimSpace(b.String()), `"`))
		}
		// Base64 of the secret with something before and after it: of the first and
		// the last group only a part is known.
		for _, enc := range []*base64.Encoding{base64.RawStdEncoding, base64.RawURLEncoding} {
			for before := range 3 {
				s := enc.EncodeToString(append(make([]byte, before), v...))
				add(fmt.Sprintf("base64+%d", before), s[(before*8+5)/6:len(s)-1])
			}
		}
	}
	return h
}

// gnuQuoted is s as the tools of the C locale quote a file's name in an error.
func gnuQuoted(t *testing.T, s string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "cat", "/no/"+s)
	cmd.Env = []string{"LC_ALL=C", "PATH=" + os.Getenv("PATH")}
	out, err := cmd.CombinedOutput()
	q, _, ok := strings.Cut(strings.TrimPrefix(string(out), "cat: "), ": No such file")
	if err == nil || !ok {
		t.Fatalf("cat says %q", out)
	}
	return strings.TrimPrefix(strings.Trim(q, "'"), "/no/")
}

// look searches one place.
func (h *hunt) look(kind string, text []byte) {
	for _, n := range h.needles {
		if bytes.Contains(text, n.text) {
			h.mu.Lock()
			h.found[fmt.Sprintf("%s: %s, %s", kind, n.secret, n.form)] = true
			h.mu.Unlock()
		}
	}
}

// report fails the test for all that was found.
func (h *hunt) report() {
	h.t.Helper()
	h.mu.Lock()
	defer h.mu.Unlock()
	for f := range h.found {
		h.t.Errorf("a secret shows up in %s", f)
	}
}

// processes searches the new command lines of this machine, where those of all
// sandboxes are to be seen. Environments are not searched: what a process gets
// it can read, and so can root.
func (h *hunt) processes() {
	names, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, n := range names {
		b, _ := os.ReadFile(n)
		if h.seen[string(b)] {
			continue
		}
		h.seen[string(b)] = true
		h.look("the command line of "+string(b[:max(0, bytes.IndexByte(b, 0))]), bytes.ReplaceAll(b, []byte{0}, []byte{' '}))
	}
}

// watch searches command lines until stop is called.
func (h *hunt) watch() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		for {
			h.processes()
			select {
			case <-tick.C:
			case <-ctx.Done():
				return
			}
		}
	})
	return func() {
		cancel()
		wg.Wait()
	}
}

// stream searches events, each by itself and the texts that they make together.
func (h *hunt) stream(evs []event.Event) {
	joined := map[string]*strings.Builder{}
	add := func(id, delta string) {
		if joined[id] == nil {
			joined[id] = &strings.Builder{}
		}
		joined[id].WriteString(delta)
	}
	for _, ev := range evs {
		b, err := event.Encode(ev)
		if err != nil {
			h.t.Error(err)
		}
		h.look("an event "+string(ev.Type()), b)
		switch e := ev.(type) {
		case event.TextMessageContent:
			add("text "+e.MessageID, e.Delta)
		case event.ReasoningMessageContent:
			add("reasoning "+e.MessageID, e.Delta)
		case event.ToolCallArgs:
			add("arguments "+e.ToolCallID, e.Delta)
		case event.ToolCallResult:
			h.look("a result", []byte(e.Content))
		case event.RunError:
			h.look("RUN_ERROR", []byte(e.Message))
		case event.Custom:
			var v any
			_ = json.Unmarshal(e.Value, &v)
			h.look("the value of "+e.Name, fmt.Append(nil, v))
		}
	}
	for id, b := range joined {
		kind, _, _ := strings.Cut(id, " ")
		h.look("deltas of "+kind, []byte(b.String()))
	}
}

// tree searches files below dir. What skip names is the agent's own.
func (h *hunt) tree(kind, dir string, skip ...string) {
	err := filepath.WalkDir(dir, func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(dir, name)
		if err != nil {
			return err
		}
		for _, s := range skip {
			if ok, _ := filepath.Match(s, rel); ok {
				if d.IsDir() {
					return fs.SkipDir
				}
				return nil
			}
		}
		h.look("a name in "+kind, []byte(rel))
		if !d.Type().IsRegular() {
			return nil
		}
		b, err := os.ReadFile(name)
		h.look(kind+" ("+filepath.Base(name)+")", b)
		return err
	})
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		h.t.Error(err)
	}
}

// image searches the layers and the configuration of a Docker image.
func (h *hunt) image(name string) {
	h.look("docker inspect of the image", run(h.t, "docker", "image", "inspect", name))
	h.look("docker history", run(h.t, "docker", "history", "--no-trunc", name))
	cmd := exec.CommandContext(h.t.Context(), "docker", "save", name)
	out, err := cmd.StdoutPipe()
	if err != nil {
		h.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		h.t.Fatal(err)
	}
	// The layers are stored uncompressed, a tar in a tar.
	layers, err := h.archive(out, 0)
	if err == nil && layers == 0 {
		err = errors.New("no layer was searched")
	}
	if err := errors.Join(err, cmd.Wait()); err != nil {
		h.t.Errorf("docker save: %v", err)
	}
}

func (h *hunt) archive(r io.Reader, depth int) (layers int, err error) {
	tr := tar.NewReader(r)
	for {
		hd, err := tr.Next()
		if err == io.EOF {
			_, err = io.Copy(io.Discard, r)
			return layers, err
		}
		if err != nil {
			return layers, err
		}
		h.look("a name in a layer", []byte(hd.Name))
		switch {
		case depth == 0 && hd.Size > 100<<20: // the image of all tests, older than any secret
		case depth == 0 && strings.HasSuffix(hd.Name, ".tar"):
			if _, err := h.archive(tr, 1); err != nil {
				return layers, fmt.Errorf("%s: %w", hd.Name, err)
			}
			layers++
		case hd.Size < 8<<20 || depth == 0:
			b, err := io.ReadAll(tr)
			if err != nil {
				return layers, err
			}
			h.look("an image layer", b)
		}
	}
}

// TestHuntFinds plants the secret in a place of each kind.
func TestHuntFinds(t *testing.T) {
	value := newSecret()
	b64 := base64.StdEncoding.EncodeToString([]byte("x" + value + "y"))
	plant := func(what string, do func(t *testing.T, h *hunt)) {
		t.Run(what, func(t *testing.T) {
			h := newHunt(t, map[string]string{"S": value})
			do(t, h)
			h.mu.Lock()
			defer h.mu.Unlock()
			if len(h.found) == 0 {
				t.Error("not found")
			}
		})
	}
	plant("command line", func(t *testing.T, h *hunt) {
		cmd := exec.CommandContext(t.Context(), "sh", "-c", "sleep 60; true", "sh", value)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		stop := h.watch()
		testenv.Eventually(t, 5*time.Second, "the process shows", func() bool {
			h.mu.Lock()
			defer h.mu.Unlock()
			return len(h.found) > 0
		})
		stop()
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	plant("log", func(t *testing.T, h *hunt) {
		var b bytes.Buffer
		slog.New(slog.NewJSONHandler(&b, nil)).Info("m", "k", value)
		h.look("log", b.Bytes())
	})
	plant("event", func(t *testing.T, h *hunt) {
		h.stream([]event.Event{event.RunError{Message: "failed with " + value}})
	})
	plant("base64 in an event", func(t *testing.T, h *hunt) {
		h.stream([]event.Event{event.ToolCallResult{MessageID: "m", ToolCallID: "c", Content: b64}})
	})
	plant("two deltas", func(t *testing.T, h *hunt) {
		h.stream([]event.Event{
			event.TextMessageContent{MessageID: "m", Delta: "x" + value[:9]}, event.TextMessageContent{MessageID: "m", Delta: value[9:] + "y"},
		})
	})
	plant("file", func(t *testing.T, h *hunt) {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "state.json"), []byte(hex.EncodeToString([]byte(value))), 0o600); err != nil {
			t.Fatal(err)
		}
		h.tree("files", dir)
	})
	plant("docker inspect", func(t *testing.T, h *hunt) {
		testenv.Docker(t)
		id := strings.TrimSpace(string(run(t, "docker", "create", "--env", "S="+value, testenv.Image, "true")))
		t.Cleanup(func() { _ = exec.Command("docker", "rm", "-f", id).Run() })
		h.look("inspect", run(t, "docker", "inspect", id))
	})
	plant("image layer", func(t *testing.T, h *hunt) {
		testenv.Docker(t)
		id := strings.TrimSpace(string(run(t, "docker", "create", testenv.Image, "true")))
		t.Cleanup(func() { _ = exec.Command("docker", "rm", "-f", id).Run() })
		name := filepath.Join(t.TempDir(), "planted")
		if err := os.WriteFile(name, []byte(b64), 0o644); err != nil {
			t.Fatal(err)
		}
		run(t, "docker", "cp", name, id+":/planted")
		image := strings.TrimSpace(string(run(t, "docker", "commit", id)))
		t.Cleanup(func() { _ = exec.Command("docker", "rmi", "-f", image).Run() })
		h.image(image)
	})
}

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
	return claudecode.Text("sonnet", claudecode.Options{Executable: []string{s.exe}, BaseURL: m.URL, APIKey: s.key})
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
				s.look("docker logs", run(t, "docker", "logs", sb.Ref().ID))
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
				s.look("docker logs", run(t, "docker", "logs", id))
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

// gitServer serves a repository to whoever has the token, at an address that the
// sandbox reaches, and returns its URL.
func gitServer(t *testing.T, container bool, token string) string {
	t.Helper()
	dir := t.TempDir()
	repo := filepath.Join(dir, "repo.git")
	work := filepath.Join(dir, "work")
	for _, args := range [][]string{
		{"init", "-q", "-b", "main", work},
		{"-C", work, "-c", "user.name=t", "-c", "user.email=t@t.invalid", "commit", "-q", "--allow-empty", "-m", "one"},
		{"-C", work, "-c", "user.name=t", "-c", "user.email=t@t.invalid", "commit", "-q", "--allow-empty", "-m", "two"},
	} {
		run(t, "git", args...)
	}
	if err := os.WriteFile(filepath.Join(work, "README.md"), []byte("hello\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	run(t, "git", "-C", work, "add", "-A")
	run(t, "git", "-C", work, "-c", "user.name=t", "-c", "user.email=t@t.invalid", "commit", "-q", "-m", "three")
	run(t, "git", "clone", "-q", "--bare", work, repo)
	backend := filepath.Join(strings.TrimSpace(string(run(t, "git", "--exec-path"))), "git-http-backend")
	h := &cgi.Handler{Path: backend, Env: []string{"GIT_PROJECT_ROOT=" + dir, "GIT_HTTP_EXPORT_ALL=1"}, InheritEnv: []string{"PATH"}}
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, pass, _ := r.BasicAuth(); pass != token {
			w.Header().Set("WWW-Authenticate", "Basic")
			http.Error(w, "who are you?", http.StatusUnauthorized)
			return
		}
		h.ServeHTTP(w, r)
	}))
	host := "127.0.0.1"
	if container {
		host = dockerBridge(t)
	}
	l, err := net.Listen("tcp", host+":0")
	if err != nil {
		t.Fatal(err)
	}
	_ = srv.Listener.Close()
	srv.Listener = l
	srv.Start()
	t.Cleanup(srv.Close)
	return srv.URL + "/repo.git"
}

// dockerBridge is the address of this host on the network of containers.
func dockerBridge(t *testing.T) string {
	t.Helper()
	ifc, err := net.InterfaceByName("docker0")
	if err != nil {
		t.Fatalf("the bridge of Docker's network: %v", err)
	}
	addrs, err := ifc.Addrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addrs {
		if n, ok := a.(*net.IPNet); ok && n.IP.To4() != nil {
			return n.IP.String()
		}
	}
	t.Fatalf("the bridge of Docker's network has the addresses %v", addrs)
	return ""
}
