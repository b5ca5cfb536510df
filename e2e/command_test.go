package e2e

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/internal/testenv"
)

// command is the built command with a home, a state directory and a TMPDIR of its
// own, so that everything it leaves behind can be told from what others do.
type command struct {
	t    *testing.T
	bin  string
	dir  string // in the environment of whatever inherits from the command
	env  []string
	tags []string // of Docker images that only this command uses
}

func newCommand(t *testing.T) *command {
	t.Helper()
	c := &command{t: t, bin: testenv.Command(t), dir: shortDir(t)}
	for _, d := range []string{"home", "tmp", "cache", "files"} {
		if err := os.Mkdir(filepath.Join(c.dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	c.env = []string{
		"PATH=" + os.Getenv("PATH"), "LANG=C.UTF-8", "HOME=" + c.dir + "/home", "TMPDIR=" + c.dir + "/tmp",
		"XDG_STATE_HOME=" + c.dir + "/state", "XDG_CACHE_HOME=" + c.dir + "/cache",
		"GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_SYSTEM=/dev/null",
	}
	if h := os.Getenv("DOCKER_HOST"); h != "" {
		c.env = append(c.env, "DOCKER_HOST="+h)
	}
	return c
}

// in returns the flags for a provider, after making sure that it can be used.
func (c *command) in(name string) []string {
	c.t.Helper()
	flags := []string{"--provider", name}
	switch name {
	case "bwrap":
		testenv.Bwrap(c.t)
	case "docker":
		testenv.Docker(c.t)
		// The containers of others have another image name.
		tag := "aisandbox-e2e:" + strings.ToLower(rand.Text())
		c.docker("tag", testenv.Image, tag)
		c.t.Cleanup(func() { _ = exec.Command("docker", "rmi", tag).Run() })
		c.tags = append(c.tags, tag)
		flags = append(flags, "--image", tag)
	}
	return flags
}

func (c *command) docker(args ...string) string {
	c.t.Helper()
	out, err := exec.CommandContext(c.t.Context(), "docker", args...).CombinedOutput()
	if err != nil {
		c.t.Fatalf("docker %v: %v: %s", args, err, out)
	}
	return string(out)
}

// output is what an invocation left.
type output struct {
	out, err string
	code     int
	rss      int64 // bytes, at most
}

// cmd is an invocation that is not started yet.
func (c *command) cmd(args ...string) *exec.Cmd {
	cmd := exec.CommandContext(c.t.Context(), c.bin, args...)
	cmd.Env, cmd.Dir = c.env, c.dir+"/home"
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 10 * time.Second
	return cmd
}

// run runs the command to its end. It must take less than a minute.
func (c *command) run(stdin io.Reader, args ...string) output {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, c.bin, args...)
	cmd.Env, cmd.Dir, cmd.Stdin = c.env, c.dir+"/home", stdin
	cmd.WaitDelay = 5 * time.Second
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	err := cmd.Run()
	var exit *exec.ExitError
	if ctx.Err() != nil || err != nil && !errors.As(err, &exit) {
		c.t.Fatalf("aisandbox %q: %v\nstdout: %.2000s\nstderr: %.2000s", args, err, out.String(), errOut.String())
	}
	o := output{out: out.String(), err: errOut.String(), code: cmd.ProcessState.ExitCode()}
	if u, ok := cmd.ProcessState.SysUsage().(*syscall.Rusage); ok {
		o.rss = u.Maxrss << 10
	}
	return o
}

// ok is run for what must succeed.
func (c *command) ok(args ...string) string {
	c.t.Helper()
	o := c.run(nil, args...)
	if o.code != 0 {
		c.t.Fatalf("aisandbox %q: exit %d\nstdout: %s\nstderr: %s", args, o.code, o.out, o.err)
	}
	return o.out
}

// left is what there still is of the command's doings: processes, containers,
// sandboxes, temporary files.
func (c *command) left() []string {
	c.t.Helper()
	found := testenv.Processes(c.dir)
	for _, sub := range []string{"state", "tmp"} {
		err := filepath.WalkDir(filepath.Join(c.dir, sub), func(name string, d fs.DirEntry, err error) error {
			switch {
			case errors.Is(err, fs.ErrNotExist):
				return nil
			case err != nil:
				return err
			}
			rel, err := filepath.Rel(c.dir, name)
			// The directories of the backends stay, with their locks and their copies of
			// the guest program.
			if d.Name() == ".bin" {
				return fs.SkipDir
			}
			if err == nil && strings.Count(rel, "/") > map[string]int{"state": 2, "tmp": 0}[sub] && !strings.HasPrefix(d.Name(), ".lock") {
				found = append(found, rel)
				if d.IsDir() {
					return fs.SkipDir
				}
			}
			return err
		})
		if err != nil {
			c.t.Error(err)
		}
	}
	return append(found, c.containers()...)
}

// containers are those of the command's images.
func (c *command) containers() []string {
	c.t.Helper()
	if len(c.tags) == 0 {
		return nil
	}
	var found []string
	for line := range strings.Lines(c.docker("ps", "-a", "--no-trunc", "--format", "{{.ID}} {{.Image}}")) {
		id, image, _ := strings.Cut(strings.TrimSpace(line), " ")
		for _, tag := range c.tags {
			if image == tag {
				found = append(found, id)
			}
		}
	}
	return found
}

// clean fails the test when something is left.
func (c *command) clean() {
	c.t.Helper()
	if left := c.left(); len(left) > 0 {
		c.t.Errorf("left behind:\n%s", strings.Join(left, "\n"))
	}
}

// events decodes the output of --json and checks it as every stream is.
func events(t *testing.T, out string) trace {
	t.Helper()
	var tr trace
	for line := range strings.Lines(out) {
		ev, err := event.Decode([]byte(line))
		if err != nil {
			t.Fatalf("not an event: %v: %.300s", err, line)
		}
		tr = append(tr, ev)
	}
	tr.check(t)
	return tr
}

// file writes a file that belongs to the test and returns its path.
func (c *command) file(name, content string) string {
	c.t.Helper()
	// Where the user of a sandbox may look; a test's own directory is private.
	dir, err := os.MkdirTemp(filepath.Join(c.dir, "files"), "")
	if err == nil {
		err = os.Chmod(dir, 0o755)
	}
	if err != nil {
		c.t.Fatal(err)
	}
	name = filepath.Join(dir, name)
	if err := os.WriteFile(name, []byte(content), 0o755); err != nil {
		c.t.Fatal(err)
	}
	return name
}

const fixedLine = "+\tmiddle=$(((n + 1) / 2))"

func TestDemo(t *testing.T) {
	for _, prov := range []string{"auto", "local", "bwrap", "docker"} {
		t.Run(prov, func(t *testing.T) {
			c := newCommand(t)
			flags := c.in(prov)
			out := c.ok(append([]string{"demo"}, flags...)...)
			for _, want := range []string{"sandbox (", "all passed", fixedLine, "done in"} {
				if !strings.Contains(out, want) {
					t.Errorf("the demo does not show %q:\n%s", want, out)
				}
			}
			if strings.Contains(out, "\x1b[") {
				t.Error("colours, though this is no terminal")
			}
			tr := events(t, c.ok(append([]string{"demo", "--json"}, flags...)...))
			tr.finished(t)
			if d, ok := custom[event.FileChanged](tr, event.NameFileChanged); !ok || !strings.Contains(d.Diff, fixedLine) {
				t.Errorf("diff %+v", d)
			}
			c.clean()
		})
	}
}

// TestDemoClaude: two processes of the command, the mock model and the demo with
// the real CLI.
func TestDemoClaude(t *testing.T) {
	testenv.Bwrap(t)
	c := newCommand(t)
	c.env = append(c.env, "CLAUDE_CODE_BIN="+testenv.Claude(t), "ANTHROPIC_API_KEY=sk-fake-key-of-a-test",
		"ANTHROPIC_BASE_URL="+c.mockModel(filepath.Join(testenv.Root(t), "cli", "demo", "model.yaml")))
	o := c.run(nil, "demo", "--harness", "claude-code", "--provider", "bwrap", "--json")
	tr := events(t, o.out)
	if o.code != 0 {
		t.Fatalf("exit %d: %s\n%s", o.code, o.err, tr.summary())
	}
	tr.finished(t)
	if text, _ := tr.text(); !strings.Contains(text, "all passed") {
		t.Errorf("text %q", text)
	}
	if d, ok := custom[event.FileChanged](tr, event.NameFileChanged); !ok || !strings.Contains(d.Diff, fixedLine) {
		t.Errorf("diff %+v", d)
	}
	c.clean()
}

// mockModel starts the mock model as a process and returns its URL. It is no
// part of what the command must not leave behind.
func (c *command) mockModel(script string) string {
	c.t.Helper()
	cmd := exec.CommandContext(c.t.Context(), c.bin, "mock-model", "--script", script)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH")}
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 5 * time.Second
	out, err := cmd.StdoutPipe()
	if err != nil {
		c.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() {
		if err := cmd.Wait(); err != nil && cmd.ProcessState.ExitCode() != 0 {
			c.t.Errorf("mock-model: %v", err)
		}
	})
	url := make([]byte, 100)
	n, err := out.Read(url)
	if err != nil {
		c.t.Fatalf("mock-model: %v", err)
	}
	return strings.TrimSpace(string(url[:n]))
}

// TestRunInterrupted: Ctrl-C ends the run with a terminal event, and nothing of
// it stays, whatever the agent's command did to hide.
func TestRunInterrupted(t *testing.T) {
	for _, prov := range []string{"local", "bwrap", "docker"} {
		t.Run(prov, func(t *testing.T) {
			c := newCommand(t)
			flags := c.in(prov)
			mark, script := c.sleeper()
			cmd := c.cmd(append([]string{"run", "--json", "--repo", "", "--script", script}, append(flags, "wait")...)...)
			var out, errOut bytes.Buffer
			cmd.Stdout, cmd.Stderr = &out, &errOut
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			testenv.Eventually(t, 30*time.Second, "the agent's commands run", func() bool { return len(sleeps(mark)) == 2 })
			if err := cmd.Process.Signal(os.Interrupt); err != nil {
				t.Fatal(err)
			}
			begin := time.Now()
			_ = cmd.Wait()
			if code := cmd.ProcessState.ExitCode(); code != 130 {
				t.Errorf("exit code %d: %s", code, errOut.String())
			}
			if took := time.Since(begin); took > 10*time.Second {
				t.Errorf("the end took %v", took)
			}
			if e := events(t, out.String()).failed(t); e.Code != "aborted" {
				t.Errorf("terminal %+v", e)
			}
			if left := testenv.Processes(mark); len(left) > 0 {
				t.Errorf("processes of the agent: %s", strings.Join(left, "\n"))
			}
			c.clean()
		})
	}
}

// sleeper is a script whose agent runs two commands that would last for minutes,
// one in a session of its own. mark names their processes.
func (c *command) sleeper() (mark, script string) {
	mark = uniqueSeconds()
	return mark, c.file("sleep.yaml", fmt.Sprintf("steps:\n- run: (setsid sleep %[1]s &) ; sleep %[1]s\n", mark))
}
