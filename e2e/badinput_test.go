package e2e

import (
	"bytes"
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/internal/testenv"
	"github.com/aisandbox-go/aisandbox/modeltest"
)

const sayHello = "steps:\n- say: hello\n"

// bad is what an invocation that must fail has to show.
type bad struct {
	name string
	args []string // after "run --json"
	env  []string
	code int      // of the process
	err  string   // RUN_ERROR's code
	says []string // parts of its message; the field and the cure
}

// check runs a bad invocation: one terminal RUN_ERROR, the same message for a
// person, the exit code, and nothing left.
func (c *command) check(b bad) {
	c.t.Helper()
	was := c.env
	c.env = append(c.env[:len(c.env):len(c.env)], b.env...)
	defer func() { c.env = was }()
	o := c.run(nil, append([]string{"run", "--json"}, b.args...)...)
	if o.code != b.code {
		c.t.Errorf("exit code %d, want %d: %s", o.code, b.code, o.err)
	}
	tr := errorStream(c.t, o)
	if len(tr) == 0 {
		return
	}
	e := tr.failed(c.t)
	if e.Code != b.err {
		c.t.Errorf("code %q, want %q", e.Code, b.err)
	}
	for _, want := range b.says {
		if !strings.Contains(e.Message, want) {
			c.t.Errorf("RUN_ERROR %q does not say %q", e.Message, want)
		}
		if flat := strings.ReplaceAll(want, "\n", " "); !strings.Contains(strings.ReplaceAll(o.err, "\n", " "), flat) {
			c.t.Errorf("stderr %q does not say %q", o.err, want)
		}
	}
	c.clean()
}

// errorStream decodes a stream that may consist of nothing but its RUN_ERROR.
func errorStream(t *testing.T, o output) trace {
	t.Helper()
	if strings.Count(o.out, "\n") != 1 {
		return events(t, o.out)
	}
	ev, err := event.Decode([]byte(o.out))
	if _, ok := ev.(event.RunError); err != nil || !ok {
		t.Errorf("stdout %q; stderr %s", o.out, o.err)
		return nil
	}
	return trace{ev}
}

// TestBadFlags: what can be told before anything is made.
func TestBadFlags(t *testing.T) {
	c := newCommand(t)
	script := c.file("s.yaml", sayHello)
	broken := c.file("broken.yaml", "steps:\n- dance: now\n")
	with := func(args ...string) []string {
		return append([]string{"--provider", "local", "--script", script}, args...)
	}
	for _, b := range []bad{
		{name: "missing repository", args: with("--repo", "./nowhere", "x"), says: []string{"--repo", "./nowhere", "no such directory"}},
		{name: "repository is a file", args: with("--repo", script, "x"), says: []string{"--repo", "is a file"}},
		{name: "depth 0", args: with("--repo", "o/n", "--depth", "0", "x"), says: []string{"--depth", "0", "a number from 1"}},
		{name: "depth -1", args: with("--repo", "o/n", "--depth=-1", "x"), says: []string{"--depth", "a number from 1"}},
		{name: "ref without repository", args: with("--repo", "", "--ref", "main", "x"), says: []string{"--ref", "--repo"}},
		{name: "unknown provider", args: []string{"--provider", "nowhere", "--script", script, "x"}, says: []string{"--provider", "nowhere", "bwrap"}},
		{name: "unknown harness", args: []string{"--provider", "local", "--harness", "nobody", "x"}, says: []string{"--harness", "nobody", "scripted"}},
		{name: "unknown flag", args: []string{"--nonsense", "x"}, says: []string{"--nonsense"}},
		{name: "bad duration", args: with("--timeout", "soon", "x"), says: []string{"timeout", "soon"}},
		{name: "negative timeout", args: with("--repo", "", "--timeout", "-1s", "x"), says: []string{"--timeout", "negative"}},
		{name: "unknown network", args: with("--repo", "", "--network", "mars", "x"), says: []string{"network", "mars", "host"}},
		{name: "network that can't be enforced", args: with("--repo", "", "--network", "none", "x"), says: []string{"network", "none", "another provider"}},
		{name: "variable without value", args: with("--repo", "", "--env", "X", "x"), says: []string{"--env", "NAME=VALUE"}},
		{name: "variable without name", args: with("--repo", "", "--env", "=1", "x"), says: []string{"env", "name"}},
		{name: "secret that isn't set", args: with("--repo", "", "--secret", "E2E_NOT_SET", "x"), says: []string{"--secret", "E2E_NOT_SET", "export"}},
		{name: "script with a mistake", args: []string{"--provider", "local", "--repo", "", "--script", broken, "x"}, says: []string{"broken.yaml:2:3", "dance"}},
		{name: "script that isn't there", args: []string{"--provider", "local", "--script", "none.yaml", "x"}, says: []string{"--script", "none.yaml"}},
		{name: "empty prompt", args: with("--repo", "", " "), says: []string{"PROMPT"}},
		{name: "no prompt", args: with("--repo", ""), says: []string{"PROMPT"}},
		{name: "image for a backend without", args: with("--repo", "", "--image", "x", "x"), says: []string{"--image", "docker"}},
	} {
		t.Run(b.name, func(t *testing.T) {
			c.t = t
			b.code, b.err = 2, "invalid_input"
			c.check(b)
		})
	}
}

// TestBadWorkspace: what shows when the sandbox is made.
func TestBadWorkspace(t *testing.T) {
	repo := demoRepo(t)
	for _, prov := range []string{"local", "bwrap", "docker"} {
		t.Run(prov, func(t *testing.T) {
			c := newCommand(t)
			script := c.file("s.yaml", sayHello)
			flags := append(c.in(prov), "--script", script)
			for _, b := range []bad{
				{name: "ref of a directory", args: []string{"--repo", repo, "--ref", "no-such-branch", "x"}, says: []string{"no-such-branch"}},
				{name: "ref of a URL", args: []string{"--repo", "file://" + repo, "--ref", "no-such-branch", "x"}, says: []string{"no-such-branch"}},
				{name: "repository that isn't there", args: []string{"--repo", "file:///no/such/repo", "x"}, says: []string{"/no/such/repo"}},
				{name: "failing setup step", args: []string{"--repo", "", "--setup", "true", "--setup", "echo broken; exit 4", "x"}, err: "setup_failed", says: []string{"echo broken; exit 4", "exit 4", "broken"}},
			} {
				t.Run(b.name, func(t *testing.T) {
					c.t = t
					b.args, b.code, b.err = append(flags[:len(flags):len(flags)], b.args...), 3, cmp.Or(b.err, "invalid_input")
					c.check(b)
				})
			}
		})
	}
}

// TestBadEngine: no engine, and no image.
func TestBadEngine(t *testing.T) {
	c := newCommand(t)
	script := c.file("s.yaml", sayHello)
	flags := []string{"--provider", "docker", "--repo", "", "--script", script}
	t.Run("no engine", func(t *testing.T) {
		c.t = t
		c.check(bad{
			args: append(flags[:len(flags):len(flags)], "--image", testenv.Image, "x"), env: []string{"DOCKER_HOST=tcp://127.0.0.1:1"},
			code: 3, err: "backend_unavailable", says: []string{"127.0.0.1:1", "docker"},
		})
	})
	t.Run("no image", func(t *testing.T) {
		c.t = t
		testenv.Docker(t)
		c.check(bad{
			args: append(flags[:len(flags):len(flags)], "--image", "localhost:1/aisandbox/no-such-image:1", "x"),
			code: 3, err: "image_not_found", says: []string{"no-such-image", "build it"},
		})
	})
}

// TestNoSpace fills the state directory's file system.
func TestNoSpace(t *testing.T) {
	testenv.Require(t, os.Geteuid() == 0, "root, to mount a small file system", "run as root")
	repo := demoRepo(t)
	big := bytes.Repeat([]byte("no two lines of this file are the same but for these words\n"), 1<<16)
	if err := os.WriteFile(filepath.Join(repo, "big"), big, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, prov := range []string{"local", "bwrap"} {
		t.Run(prov, func(t *testing.T) {
			c := newCommand(t)
			state := filepath.Join(c.dir, "state")
			if err := os.Mkdir(state, 0o755); err != nil {
				t.Fatal(err)
			}
			if err := syscall.Mount("aisandbox-e2e", state, "tmpfs", 0, "size=1m,mode=755"); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := syscall.Unmount(state, syscall.MNT_DETACH); err != nil {
					t.Error(err)
				}
			})
			c.check(bad{
				args: append(c.in(prov), "--repo", repo, "--script", c.file("s.yaml", sayHello), "x"),
				code: 3, err: "no_space", says: []string{"no space left", "make room"},
			})
		})
	}
}

// fakeCLI is a program in place of Claude Code.
const fakeCLI = `#!/bin/sh
case $1 in --version) echo '9.9.9 (fake)'; exit;; esac
cat >/dev/null
`

// TestBadCLI: an agent's program that doesn't keep to its protocol.
func TestBadCLI(t *testing.T) {
	const initLine = `{"type":"system","subtype":"init","session_id":"s-1","tools":[],"model":"m"}`
	for _, b := range []struct {
		name, script, code string
		says               string
	}{
		{"rubbish", "echo hello; echo '<html>'; echo '{\"type\":'; echo '[1,2]'", "no_result", "without a result"},
		{"exit without a result", "echo '" + initLine + "'", "no_result", "without a result"},
		{"failure", "echo 'boom: cannot' >&2; exit 3", "no_result", "boom: cannot"},
		{"killed", "echo '" + initLine + "'; kill -9 $$", "no_result", "signal 9"},
		{"endless line", "head -c 104857600 /dev/zero | tr '\\0' y; echo", "line_too_long", "line"},
		{"silence", "exit 0", "no_result", "without a result"},
	} {
		t.Run(b.name, func(t *testing.T) {
			testenv.Bwrap(t)
			c := newCommand(t)
			exe := c.file("claude", fakeCLI+b.script+"\n")
			env := []string{"CLAUDE_CODE_BIN=" + exe, "ANTHROPIC_API_KEY=sk-fake-key-of-a-test"}
			c.env = append(c.env, env...)
			o := c.run(nil, "run", "--json", "--provider", "bwrap", "--repo", "", "--harness", "claude-code", "hi")
			if o.code != 1 {
				t.Errorf("exit code %d: %s", o.code, o.err)
			}
			e := events(t, o.out).failed(t)
			if e.Code != b.code || !strings.Contains(e.Message, b.says) {
				t.Errorf("terminal %q: %q; want %q: %q", e.Code, e.Message, b.code, b.says)
			}
			if o.rss > 300<<20 {
				t.Errorf("the command took %d MiB", o.rss>>20)
			}
			c.clean()
		})
	}
	t.Run("invalid UTF-8", func(t *testing.T) {
		testenv.Bwrap(t)
		c := newCommand(t)
		exe := c.file("claude", fakeCLI+`echo '`+initLine+`'
printf '{"type":"assistant","message":{"id":"m","role":"assistant","content":[{"type":"text","text":"a\377\376b"}]},"session_id":"s-1"}\n'
printf '\377\377\n'
echo '{"type":"result","subtype":"success","is_error":false,"result":"ab","session_id":"s-1","num_turns":1}'
`)
		c.env = append(c.env, "CLAUDE_CODE_BIN="+exe, "ANTHROPIC_API_KEY=sk-fake-key-of-a-test")
		o := c.run(nil, "run", "--json", "--provider", "bwrap", "--repo", "", "--harness", "claude-code", "hi")
		tr := events(t, o.out)
		tr.finished(t)
		if text, _ := tr.text(); strings.ReplaceAll(text, "\uFFFD", "") != "ab" || text == "ab" || o.code != 0 {
			t.Errorf("text %q, exit %d", text, o.code)
		}
		c.clean()
	})
	t.Run("absent", func(t *testing.T) {
		for _, prov := range []string{"bwrap", "docker"} {
			c := newCommand(t)
			c.env = append(c.env, "CLAUDE_CODE_BIN=/no/such/claude")
			c.check(bad{
				args: append(c.in(prov), "--repo", "", "--harness", "claude-code", "x"), env: []string{"ANTHROPIC_API_KEY=sk-fake-key-of-a-test"},
				code: 1, err: "agent_not_found", says: []string{"claude", "install"},
			})
		}
	})
	t.Run("no key", func(t *testing.T) {
		testenv.Bwrap(t)
		c := newCommand(t)
		exe := c.file("claude", fakeCLI)
		c.check(bad{
			args: []string{"--provider", "bwrap", "--repo", "", "--harness", "claude-code", "x"}, env: []string{"CLAUDE_CODE_BIN=" + exe},
			code: 1, err: "no_key", says: []string{"ANTHROPIC_API_KEY"},
		})
	})
}

// TestPrompts: a prompt is text, whatever it looks like.
func TestPrompts(t *testing.T) {
	const answer = "{{request.last_user}}"
	prompts := []string{"-p --help", "--version", "/help", "/init now", "!ls", "#remember", "@/etc/passwd", "-", "a\nb", "\u00e9 \U0001F600 \\ ' \""}
	t.Run("claude", func(t *testing.T) {
		r := newRig(t, places[0], modeltest.Script{Turns: []modeltest.Turn{modeltest.Say(answer)}, After: modeltest.AfterRepeatLast})
		for _, p := range prompts {
			tr := r.run(p, "")
			tr.finished(t)
			if text, _ := tr.text(); !strings.Contains(text, strings.TrimSpace(p)) {
				t.Errorf("the model got %q for %q", text, p)
			}
		}
	})
	t.Run("command", func(t *testing.T) {
		c := newCommand(t)
		script := c.file("s.yaml", "steps:\n- say: 'got {{prompt}}'\n")
		for _, p := range prompts {
			tr := events(t, c.ok("run", "--json", "--provider", "local", "--repo", "", "--script", script, "--", p))
			if text, _ := tr.text(); text != "got "+p {
				t.Errorf("the agent got %q for %q", text, p)
			}
		}
		c.clean()
	})
}

// TestNewlines: names with line breaks, quotes and bytes that are no text, in a
// repository that an agent changes.
func TestNewlines(t *testing.T) {
	repo := demoRepo(t)
	names := []string{"a\nb.txt", "d\n1/x\ty", "-rf", "q\"'\\", "e\u0301 \u00fc"}
	for _, n := range names {
		full := filepath.Join(repo, n)
		if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(full, []byte("before\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	git(t, repo, "add", "-A")
	git(t, repo, "commit", "-q", "-m", "names")
	var script strings.Builder
	script.WriteString("steps:\n")
	for _, n := range append(names, "new\nfile") {
		fmt.Fprintf(&script, "- write: {path: %q, content: \"after\\n\"}\n", n)
	}
	for _, prov := range []string{"local", "bwrap", "docker"} {
		t.Run(prov, func(t *testing.T) {
			c := newCommand(t)
			patch := filepath.Join(t.TempDir(), "out.patch")
			tr := events(t, c.ok(append([]string{"run", "--json", "--repo", repo, "--patch", patch, "--script", c.file("s.yaml", script.String())},
				append(c.in(prov), "change them")...)...))
			tr.finished(t)
			seen := map[string]string{}
			for _, ev := range tr {
				f, ok := event.CustomOf[event.File](ev, event.NameFile)
				switch {
				case ok && f.Type == "delete" && seen[f.Path] == "create":
					delete(seen, f.Path) // the agent writes by way of other names
				case ok:
					seen[f.Path] = f.Type
				}
			}
			for _, n := range names {
				if seen["/workspace/"+n] != "change" {
					t.Errorf("no change of %q among %q", n, seen)
				}
			}
			if seen["/workspace/new\nfile"] != "create" || len(seen) != len(names)+1 {
				t.Errorf("changes %q", seen)
			}
			// The diff is right when it does to another clone what the agent did.
			clone := t.TempDir()
			git(t, clone, "clone", "-q", repo, ".")
			git(t, clone, "apply", patch)
			for _, n := range append(names, "new\nfile") {
				if b, err := os.ReadFile(filepath.Join(clone, n)); err != nil || string(b) != "after\n" {
					t.Errorf("%q is %q, %v", n, b, err)
				}
			}
			c.clean()
		})
	}
}

// TestTimeout is a run that takes too long.
func TestTimeout(t *testing.T) {
	for _, prov := range []string{"local", "bwrap", "docker"} {
		t.Run(prov, func(t *testing.T) {
			c := newCommand(t)
			mark, script := c.sleeper()
			begin := time.Now()
			c.check(bad{
				args: append(c.in(prov), "--repo", "", "--timeout", "4s", "--script", script, "x"),
				code: 124, err: "budget_exceeded", says: []string{"too long"},
			})
			if left := testenv.Processes(mark); len(left) > 0 || time.Since(begin) > 20*time.Second {
				t.Errorf("after %v: %q", time.Since(begin), left)
			}
		})
	}
}
