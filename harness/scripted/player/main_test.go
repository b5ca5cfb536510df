package player_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/aisandbox-go/aisandbox/harness/scripted/player"
)

// TestMain lets the test binary be the player: the tests run it as a process.
func TestMain(m *testing.M) {
	if os.Getenv("PLAYER_TEST_MAIN") == "1" {
		code := player.Main(context.Background(), os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
		if file := os.Getenv("PLAYER_TEST_STATUS"); file != "" {
			if b, err := os.ReadFile("/proc/self/status"); err == nil {
				os.WriteFile(file, b, 0o600)
			}
		}
		os.Exit(code)
	}
	goleak.VerifyTestMain(m)
}

// stage is where a player process runs.
type stage struct {
	t         *testing.T
	dir, home string
	prompt    string
}

func newStage(t *testing.T) *stage {
	dir := t.TempDir()
	// The player prints real paths.
	dir, err := filepath.EvalSymlinks(dir)
	if err != nil {
		t.Fatal(err)
	}
	return &stage{t: t, dir: dir, home: t.TempDir(), prompt: "Do it."}
}

// command is the player for a script, with its partial messages on.
func (s *stage) command(steps []player.Step, flags ...string) *exec.Cmd {
	s.t.Helper()
	raw, err := json.Marshal(player.Script{Steps: steps})
	if err != nil {
		s.t.Fatal(err)
	}
	return s.raw(raw, append([]string{"--include-partial-messages"}, flags...)...)
}

func (s *stage) raw(script []byte, flags ...string) *exec.Cmd {
	s.t.Helper()
	file := filepath.Join(s.t.TempDir(), "script.json")
	if err := os.WriteFile(file, script, 0o600); err != nil {
		s.t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		s.t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	s.t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, self, append([]string{file}, flags...)...)
	cmd.Dir = s.dir
	cmd.Env = []string{"PLAYER_TEST_MAIN=1", "PATH=" + os.Getenv("PATH"), "HOME=" + s.home, "GOCOVERDIR=" + s.t.TempDir(),
		"GORACE=atexit_sleep_ms=0"}
	cmd.Stdin = strings.NewReader(s.prompt)
	return cmd
}

// played is what a finished player left.
type played struct {
	t      *testing.T
	code   int
	stdout []byte
	stderr string
	lines  []map[string]any
}

func (s *stage) play(steps []player.Step, flags ...string) *played {
	s.t.Helper()
	return finish(s.t, s.command(steps, flags...))
}

func finish(t *testing.T, cmd *exec.Cmd) *played {
	t.Helper()
	var out, errw bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errw
	err := cmd.Run()
	return ended(t, cmd, err, out.Bytes(), errw.String())
}

func ended(t *testing.T, cmd *exec.Cmd, err error, stdout []byte, stderr string) *played {
	t.Helper()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	p := &played{t: t, stdout: stdout, stderr: stderr, code: cmd.ProcessState.ExitCode()}
	if ws, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		p.code = 128 + int(ws.Signal())
	}
	dec := json.NewDecoder(bytes.NewReader(stdout))
	for {
		var l map[string]any
		if err := dec.Decode(&l); err == io.EOF {
			break
		} else if err != nil {
			t.Fatalf("line %d is no JSON: %v", len(p.lines)+1, err)
		}
		p.lines = append(p.lines, l)
	}
	if n := bytes.Count(stdout, []byte("\n")); n != len(p.lines) {
		t.Errorf("%d values in %d lines", len(p.lines), n)
	}
	return p
}

// get walks into a line: strings are keys, numbers are indexes.
func get(v any, path ...any) any {
	for _, k := range path {
		switch k := k.(type) {
		case string:
			m, _ := v.(map[string]any)
			v = m[k]
		case int:
			l, _ := v.([]any)
			if k >= len(l) {
				return nil
			}
			v = l[k]
		}
	}
	return v
}

// of returns the lines of a type.
func (p *played) of(kind string) (list []map[string]any) {
	for _, l := range p.lines {
		if l["type"] == kind {
			list = append(list, l)
		}
	}
	return list
}

// result is the one result line, which is the last one.
func (p *played) result() map[string]any {
	p.t.Helper()
	rs := p.of("result")
	if len(rs) != 1 || p.lines[len(p.lines)-1]["type"] != "result" {
		p.t.Fatalf("%d result lines, the last line is %v (stderr %q)", len(rs), p.lines[len(p.lines)-1], p.stderr)
	}
	return rs[0]
}

// text is the streamed text of the run.
func (p *played) text() string {
	var b strings.Builder
	for _, l := range p.of("stream_event") {
		if s, ok := get(l, "event", "delta", "text").(string); ok {
			b.WriteString(s)
		}
	}
	return b.String()
}

// calls are the tool calls with their results: name, input, content, is_error.
type call struct {
	Name    string
	Input   string // JSON
	Content string // a string as it is, else JSON
	Error   bool
}

func (p *played) calls() []call {
	p.t.Helper()
	var list []call
	at := map[any]int{}
	for _, l := range p.lines {
		block := get(l, "message", "content", 0)
		switch get(block, "type") {
		case "tool_use":
			in, _ := json.Marshal(get(block, "input"))
			at[get(block, "id")] = len(list)
			list = append(list, call{Name: get(block, "name").(string), Input: string(in)})
		case "tool_result":
			i, ok := at[get(block, "tool_use_id")]
			if !ok {
				p.t.Errorf("a result without a call: %v", l)
				continue
			}
			list[i].Error = get(block, "is_error") == true
			if s, ok := get(block, "content").(string); ok {
				list[i].Content = s
			} else {
				raw, _ := json.Marshal(get(block, "content"))
				list[i].Content = string(raw)
			}
		}
	}
	return list
}

// file reads a file of the working directory.
func (s *stage) file(name string) string {
	s.t.Helper()
	b, err := os.ReadFile(filepath.Join(s.dir, name))
	if err != nil {
		s.t.Fatal(err)
	}
	return string(b)
}

// until polls a condition; the processes looked at have no way to tell.
func until(t *testing.T, what string, cond func() bool) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !cond() {
		if time.Now().After(deadline) {
			t.Fatalf("waited too long for %s", what)
		}
		<-tick.C
	}
}
