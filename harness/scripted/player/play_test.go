package player_test

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/aisandbox-go/aisandbox/harness/scripted/player"
)

func TestText(t *testing.T) {
	s := newStage(t)
	p := s.play([]player.Step{{Think: "Hm, " + strings.Repeat("ä", 40)}, {Say: "One. "}, {Say: "Two ☃ and " + strings.Repeat("é😀", 9000) + "\n"}, {Say: "<three> & more"}})
	if p.code != 0 || p.stderr != "" {
		t.Fatalf("exit %d, stderr %q", p.code, p.stderr)
	}
	want := "One. Two ☃ and " + strings.Repeat("é😀", 9000) + "\n<three> & more"
	if p.text() != want {
		t.Errorf("text of %d bytes, want %d", len(p.text()), len(want))
	}
	r := p.result()
	if r["subtype"] != "success" || r["is_error"] != false || r["result"] != "<three> & more" || r["num_turns"] != 1.0 || r["total_cost_usd"] != 0.0 {
		t.Errorf("result %v", r)
	}
	if !strings.Contains(string(p.stdout), "<three> & more") {
		t.Error("HTML escapes in the output")
	}

	// Everything is one message: its blocks in order, each with its whole line
	// before its stop.
	var order []string
	ids := map[any]bool{}
	for _, l := range p.lines {
		switch l["type"] {
		case "stream_event":
			kind := get(l, "event", "type").(string)
			if kind != "content_block_delta" {
				order = append(order, kind)
			}
			if id := get(l, "event", "message", "id"); id != nil {
				ids[id] = true
			}
		case "assistant":
			order = append(order, "assistant "+get(l, "message", "content", 0, "type").(string))
			ids[get(l, "message", "id")] = true
		default:
			order = append(order, l["type"].(string))
		}
	}
	block := func(kind string) []string {
		return []string{"content_block_start", "assistant " + kind, "content_block_stop"}
	}
	wantOrder := []string{"system", "system", "message_start"}
	for _, k := range []string{"thinking", "text", "text", "text"} {
		wantOrder = append(wantOrder, block(k)...)
	}
	wantOrder = append(wantOrder, "message_delta", "message_stop", "result")
	if d := cmp.Diff(wantOrder, order); d != "" {
		t.Errorf("-want +got\n%s", d)
	}
	if len(ids) != 1 {
		t.Errorf("message ids %v", ids)
	}
}

func TestNoPartials(t *testing.T) {
	s := newStage(t)
	raw, err := json.Marshal(player.Script{Steps: []player.Step{{Say: "Hi."}, {Run: "echo z"}, {Say: "ok"}, {Flood: &player.Flood{Lines: 2, Bytes: 100}}}})
	if err != nil {
		t.Fatal(err)
	}
	p := finish(t, s.raw(raw))
	if len(p.of("stream_event")) != 0 {
		t.Error("stream events without the flag")
	}
	var texts []string
	for _, l := range p.of("assistant") {
		if s, ok := get(l, "message", "content", 0, "text").(string); ok {
			texts = append(texts, fmt.Sprintf("%d %s", len(s), s[:2]))
		}
	}
	if d := cmp.Diff([]string{"3 Hi", "2 ok", "100 01", "100 01"}, texts); d != "" {
		t.Errorf("-want +got\n%s", d)
	}
	if p.result()["subtype"] != "success" {
		t.Error(p.result())
	}
}

func TestTools(t *testing.T) {
	s := newStage(t)
	if err := os.WriteFile(filepath.Join(s.dir, "run.sh"), []byte("#!/bin/sh\necho old\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("run.sh", filepath.Join(s.dir, "link.sh")); err != nil {
		t.Fatal(err)
	}
	p := s.play([]player.Step{
		{Run: "echo out; echo err >&2; pwd"},
		{Run: "echo out; exit 3"},
		{Run: "kill -9 $$"},
		{Run: "true"},
		{Run: "cat; echo eof"},
		{Run: "no-such-command-at-all"},
		{Write: &player.Write{Path: "a/b/c.txt", Content: "hello hello\n"}},
		{Edit: &player.Edit{Path: "a/b/c.txt", Old: "hello", New: "bye"}},
		{Edit: &player.Edit{Path: "a/b/c.txt", Old: "nothing", New: "bye"}},
		{Edit: &player.Edit{Path: "a/b/c.txt", Old: "hello\n", New: "you\n"}},
		{Edit: &player.Edit{Path: "absent", Old: "x", New: "y"}},
		{Edit: &player.Edit{Path: "link.sh", Old: "old", New: "new"}},
		{Write: &player.Write{Path: "a", Content: "a directory"}},
		{Write: &player.Write{Path: s.dir + "/../" + filepath.Base(s.dir) + "/abs.txt", Content: ""}},
		{Call: &player.Call{Tool: "lookup", Args: json.RawMessage(`{"id":7}`)}},
		{Ask: &player.Ask{Tool: "Bash", Input: json.RawMessage(`{"command":"echo asked"}`)}},
		{Ask: &player.Ask{Tool: "Bash"}},
		{Ask: &player.Ask{Tool: "Write", Input: json.RawMessage(`{"file_path":"asked.txt","content":"c"}`)}},
		{Ask: &player.Ask{Tool: "Edit", Input: json.RawMessage(`{"file_path":"asked.txt","old_string":"c","new_string":"d"}`)}},
		{Ask: &player.Ask{Tool: "Fly"}},
		{Say: "done"},
	})
	if p.code != 0 {
		t.Fatalf("exit %d, stderr %q", p.code, p.stderr)
	}
	j := func(v any) string {
		b, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	bash := func(cmd string) string { return j(map[string]string{"command": cmd}) }
	edit := func(path, old, new string) string {
		return j(map[string]any{"file_path": path, "old_string": old, "new_string": new, "replace_all": false})
	}
	write := func(path, content string) string { return j(map[string]string{"file_path": path, "content": content}) }
	c, d := filepath.Join(s.dir, "a/b/c.txt"), s.dir
	want := []call{
		{"Bash", bash("echo out; echo err >&2; pwd"), "out\nerr\n" + d, false},
		{"Bash", bash("echo out; exit 3"), "Exit code 3\nout", true},
		{"Bash", bash("kill -9 $$"), "Exit code 137", true},
		{"Bash", bash("true"), "(Bash completed with no output)", false},
		{"Bash", bash("cat; echo eof"), "eof", false},
		{"Bash", bash("no-such-command-at-all"), "Exit code 127", true},
		{"Write", write(c, "hello hello\n"), c + ": wrote 12 bytes", false},
		{"Edit", edit(c, "hello", "bye"), c + ": the text to replace occurs 2 times, not once", true},
		{"Edit", edit(c, "nothing", "bye"), c + ": the text to replace does not occur", true},
		{"Edit", edit(c, "hello\n", "you\n"), c + ": edited", false},
		{"Edit", edit(d+"/absent", "x", "y"), "open " + d + "/absent: no such file or directory", true},
		{"Edit", edit(d+"/link.sh", "old", "new"), d + "/link.sh: edited", false},
		{"Write", write(d+"/a", "a directory"), "write " + d + "/a: not a regular file", true},
		{"Write", write(d+"/abs.txt", ""), d + "/abs.txt: wrote 0 bytes", false},
		{"lookup", `{"id":7}`, "no such tool: lookup", true},
		{"Bash", bash("echo asked"), "asked", false},
		{"Bash", "{}", "the input has no command", true},
		{"Write", write("asked.txt", "c"), d + "/asked.txt: wrote 1 bytes", false},
		{"Edit", j(map[string]string{"file_path": "asked.txt", "old_string": "c", "new_string": "d"}), d + "/asked.txt: edited", false},
		{"Fly", "{}", "no such tool: Fly", true},
	}
	got := p.calls()
	if len(got) > 5 {
		// What a shell says of a missing command is its own affair.
		got[5].Content, _, _ = strings.Cut(got[5].Content, "\n")
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("-want +got\n%s", d)
	}
	if got := s.file("a/b/c.txt"); got != "hello you\n" {
		t.Errorf("c.txt holds %q", got)
	}
	if got := s.file("asked.txt"); got != "d" {
		t.Errorf("asked.txt holds %q", got)
	}
	info, err := os.Lstat(filepath.Join(s.dir, "link.sh"))
	if err != nil || info.Mode()&os.ModeSymlink == 0 {
		t.Errorf("the link is gone: %v, %v", info, err)
	}
	info, err = os.Stat(filepath.Join(s.dir, "run.sh"))
	if err != nil || info.Mode().Perm() != 0o755 || s.file("run.sh") != "#!/bin/sh\necho new\n" {
		t.Errorf("run.sh: %v, %v, %q", info, err, s.file("run.sh"))
	}
	if left, _ := filepath.Glob(filepath.Join(s.dir, "*", ".tmp-*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	if n := p.result()["num_turns"]; n != float64(len(want)+1) {
		t.Errorf("num_turns %v", n)
	}

	// Ids are unique, and a tool's message says why it stopped.
	seen := map[any]bool{}
	stops := map[any]int{}
	for _, l := range p.lines {
		if seen[l["uuid"]] {
			t.Errorf("uuid %v twice", l["uuid"])
		}
		seen[l["uuid"]] = true
		if r := get(l, "event", "delta", "stop_reason"); r != nil {
			stops[r]++
		}
	}
	if d := cmp.Diff(map[any]int{"tool_use": len(want), "end_turn": 1}, stops); d != "" {
		t.Errorf("-want +got\n%s", d)
	}
}

func TestOutputIsBounded(t *testing.T) {
	s := newStage(t)
	p := s.play([]player.Step{
		{Run: "head -c 5000000 /dev/zero | tr '\\0' x"},
		{Run: "head -c 29999 /dev/zero | tr '\\0' x; printf 'é and more'"},
		{Run: "printf 'a\\377b'"},
	})
	calls := p.calls()
	for i, want := range []string{
		strings.Repeat("x", 30000) + "\n[4970000 more bytes were cut off]",
		strings.Repeat("x", 29999) + "\n[11 more bytes were cut off]",
		"a\uFFFDb",
	} {
		if calls[i].Content != want {
			t.Errorf("call %d: %d bytes that end in %q", i, len(calls[i].Content), calls[i].Content[max(0, len(calls[i].Content)-60):])
		}
	}
}

// A command is over when its shell is, though a child of it holds the pipe, and
// nothing that was written until then is lost.
func TestRunDoesNotWaitForBackground(t *testing.T) {
	s := newStage(t)
	begin := time.Now()
	p := s.play([]player.Step{
		{Run: "sleep 300 & echo $! > pid; head -c 20000 /dev/zero | tr '\\0' y"},
		{Run: "kill -0 $(cat pid) && echo alive"},
		{Run: "kill $(cat pid)"},
	})
	if took := time.Since(begin); took > 30*time.Second {
		t.Errorf("took %v", took)
	}
	calls := p.calls()
	if calls[0].Content != strings.Repeat("y", 20000) || calls[1].Content != "alive" || calls[2].Error {
		t.Errorf("%d bytes; then %q, %v", len(calls[0].Content), calls[1].Content, calls[2])
	}
}

// What a command printed just before its end is never lost.
func TestRunLosesNothing(t *testing.T) {
	s := newStage(t)
	p := s.play([]player.Step{{Repeat: &player.Repeat{Times: 300, Steps: []player.Step{{Run: "sleep 0.2 & printf abc"}}}}})
	for i, c := range p.calls() {
		if c.Content != "abc" {
			t.Fatalf("call %d: %q", i, c.Content)
		}
	}
}

func TestPlaceholders(t *testing.T) {
	s := newStage(t)
	s.prompt = "it's $HOME; \"x\"\n"
	p := s.play([]player.Step{
		{Say: "[{{last_result}}]"},
		{Think: "{{prompt}}"},
		{Run: "printf '%s|%s' {{prompt}} {{first_prompt}}; echo ' {{other}}'"},
		{Say: "{{last_result}} {{ prompt }}"},
		{Write: &player.Write{Path: "p.txt", Content: "{{prompt}}\n"}},
	})
	prompt := `it's $HOME; "x"`
	if want := "[]" + prompt + "|" + prompt + " {{other}} {{ prompt }}"; p.text() != want {
		t.Errorf("text %q, want %q", p.text(), want)
	}
	if s.file("p.txt") != prompt+"\n" {
		t.Errorf("p.txt holds %q", s.file("p.txt"))
	}
}

func TestRepeatAndSleep(t *testing.T) {
	s := newStage(t)
	begin := time.Now()
	p := s.play([]player.Step{{Repeat: &player.Repeat{Times: 3, Steps: []player.Step{
		{Say: "a"}, {Repeat: &player.Repeat{Times: 2, Steps: []player.Step{{Run: "echo x >> log"}, {Sleep: 20 * time.Millisecond}}}},
	}}}})
	if s.file("log") != strings.Repeat("x\n", 6) || p.text() != "aaa" {
		t.Errorf("log %q, text %q", s.file("log"), p.text())
	}
	if took := time.Since(begin); took < 120*time.Millisecond {
		t.Errorf("six pauses of 20 ms took %v", took)
	}
}

func TestCrash(t *testing.T) {
	for _, tc := range []struct {
		crash player.Crash
		code  int
	}{{player.Crash{Code: 0}, 0}, {player.Crash{Code: 42}, 42}, {player.Crash{Signal: "KILL"}, 137}} {
		t.Run(fmt.Sprint(tc.crash), func(t *testing.T) {
			s := newStage(t)
			p := s.play([]player.Step{{Say: "before"}, {Crash: &tc.crash}, {Say: "after"}})
			if p.code != tc.code || p.text() != "before" || len(p.of("result")) != 0 {
				t.Errorf("exit %d, text %q, results %v", p.code, p.text(), p.of("result"))
			}
		})
	}
}

func TestMaxTurns(t *testing.T) {
	s := newStage(t)
	steps := []player.Step{{Run: "echo 1 >> log"}, {Run: "echo 2 >> log"}, {Say: "done"}}
	p := s.play(steps, "--max-turns", "2")
	r := p.result()
	if p.code != 1 || r["subtype"] != "error_max_turns" || r["is_error"] != true || r["terminal_reason"] != "max_turns" || s.file("log") != "1\n2\n" {
		t.Errorf("exit %d, %v, log %q", p.code, r, s.file("log"))
	}
	if p = s.play(steps, "--max-turns", "3"); p.code != 0 || p.result()["subtype"] != "success" {
		t.Errorf("exit %d, %v", p.code, p.result())
	}
}

// Two runs print the same bytes.
func TestDeterminism(t *testing.T) {
	steps := []player.Step{{Think: "hm"}, {Say: "Hello {{prompt}}"}, {Run: "echo a; exit 1"}, {Write: &player.Write{Path: "f", Content: "x"}},
		{Edit: &player.Edit{Path: "f", Old: "x", New: "y"}}, {Flood: &player.Flood{Lines: 3, Bytes: 70}}, {Say: "{{last_result}}"}}
	s := newStage(t)
	var first []byte
	for i := range 2 {
		s.home = t.TempDir()
		os.Remove(filepath.Join(s.dir, "f"))
		p := s.play(steps)
		if i == 0 {
			first = p.stdout
		} else if d := cmp.Diff(string(first), string(p.stdout)); d != "" {
			t.Errorf("-first +second\n%s", d)
		}
	}
	s.prompt, s.home = "Other.", t.TempDir()
	if p := s.play(steps); p.lines[0]["session_id"] == nil || strings.Contains(string(first), p.lines[0]["session_id"].(string)) {
		t.Errorf("another prompt has the session id of the first: %v", p.lines[0]["session_id"])
	}
}

func TestSession(t *testing.T) {
	const id = "5e551011-0000-4000-8000-000000000001"
	s := newStage(t)
	steps := []player.Step{{Say: "You said {{first_prompt}}, then {{prompt}}. [{{last_result}}]"}}
	s.prompt = "one"
	p1 := s.play(steps, "--session-id", id)
	if p1.text() != "You said one, then one. []" || p1.lines[0]["session_id"] != id {
		t.Fatalf("text %q, session %v", p1.text(), p1.lines[0]["session_id"])
	}
	s.prompt = "two"
	p2 := s.play(steps, "--resume", id)
	if p2.text() != "You said one, then two. [You said one, then one. []]" || p2.lines[0]["session_id"] != id {
		t.Errorf("text %q, session %v", p2.text(), p2.lines[0]["session_id"])
	}
	s.prompt = "three"
	p3 := s.play(steps, "--resume", id, "--fork-session")
	if !strings.HasPrefix(p3.text(), "You said one, then three.") || p3.lines[0]["session_id"] == id {
		t.Errorf("text %q, session %v", p3.text(), p3.lines[0]["session_id"])
	}
	// The fork did not change the first session.
	s.prompt = "four"
	p4 := s.play(steps, "--resume", id)
	if !strings.Contains(p4.text(), "then two") || strings.Contains(p4.text(), "three") {
		t.Errorf("text %q", p4.text())
	}
	seen := map[any]bool{}
	for _, p := range []*played{p1, p2, p3, p4} {
		m := get(p.of("assistant")[0], "message", "id")
		if seen[m] {
			t.Errorf("message id %v in two turns", m)
		}
		seen[m] = true
	}

	taken := s.play(steps, "--session-id", id)
	if taken.code != 1 || len(taken.stdout) != 0 || !strings.Contains(taken.stderr, "already in use") {
		t.Errorf("exit %d, stdout %q, stderr %q", taken.code, taken.stdout, taken.stderr)
	}
	for _, bad := range []string{"00000000-0000-4000-8000-000000000000", "../../etc/passwd"} {
		gone := s.play(steps, "--resume", bad)
		r := gone.result()
		if gone.code != 1 || len(gone.lines) != 1 || r["subtype"] != "error_during_execution" ||
			get(r, "errors", 0) != "No conversation found with session ID: "+bad || r["session_id"] != bad {
			t.Errorf("exit %d, %v", gone.code, gone.lines)
		}
	}
	info, err := os.Stat(filepath.Join(s.home, ".aisandbox-scripted", id+".json"))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}

	// Without a home there is no memory, and a run all the same.
	cmd := s.command(steps)
	cmd.Env = append(cmd.Env, "HOME=")
	if p := finish(t, cmd); p.code != 0 || !strings.Contains(p.stderr, "will not be remembered") {
		t.Errorf("exit %d, stderr %q", p.code, p.stderr)
	}
}

func TestSessionsArePruned(t *testing.T) {
	s := newStage(t)
	dir := filepath.Join(s.home, ".aisandbox-scripted")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	for i := range 300 {
		name := filepath.Join(dir, fmt.Sprintf("old-%03d.json", i))
		if err := os.WriteFile(name, []byte("{}"), 0o600); err != nil {
			t.Fatal(err)
		}
		at := time.Unix(int64(1000+i), 0)
		if err := os.Chtimes(name, at, at); err != nil {
			t.Fatal(err)
		}
	}
	s.play([]player.Step{{Say: "a"}}, "--session-id", "new")
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 256 {
		t.Errorf("%d sessions left (%v)", len(left), err)
	}
	for _, name := range []string{"new.json", "old-299.json"} {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			t.Error(err)
		}
	}
}

func TestBadStart(t *testing.T) {
	good := `{"steps":[{"say":"a"}]}`
	for _, tc := range []struct {
		name, script, prompt string
		flags                []string
		stderr               string
	}{
		{"rubbish", "steps", "p", nil, "invalid character"},
		{"unknown step", `{"steps":[{"shout":"a"}]}`, "p", nil, `unknown field "shout"`},
		{"two actions", `{"steps":[{"say":"a","run":"b"}]}`, "p", nil, "step 1 has 2 actions"},
		{"no action", `{"steps":[{"sleep":-1}]}`, "p", nil, "step 1 has 0 actions"},
		{"trailing", good + "{}", "p", nil, "more than one JSON value"},
		{"bad flood", `{"steps":[{"flood":{"lines":1,"bytes":0}}]}`, "p", nil, "above zero"},
		{"bad signal", `{"steps":[{"crash":{"signal":"X"}}]}`, "p", nil, "not KILL"},
		{"empty prompt", good, " \n", nil, "the prompt is empty"},
		{"unknown flag", good, "p", []string{"--fly"}, "unknown flag --fly"},
		{"no value", good, "p", []string{"--resume"}, "flag --resume needs a value"},
		{"two scripts", good, "p", []string{"b.json"}, `unexpected argument "b.json"`},
		{"bad turns", good, "p", []string{"--max-turns=0"}, "no number above zero"},
		{"bad id", good, "p", []string{"--session-id", "a/b"}, "letters, digits"},
		{"fork of nothing", good, "p", []string{"--fork-session"}, "needs --resume"},
		{"no config", good, "p", []string{"--mcp-config", "/no/such/file"}, "no such file"},
		{"prompt tool alone", good, "p", []string{"--permission-prompt-tool", "mcp__a__b"}, "needs --mcp-config"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := newStage(t)
			s.prompt = tc.prompt
			p := finish(t, s.raw([]byte(tc.script), tc.flags...))
			if p.code != 1 || len(p.stdout) != 0 || !strings.HasPrefix(p.stderr, "play: ") || !strings.Contains(p.stderr, tc.stderr) {
				t.Errorf("exit %d, stdout %q, stderr %q", p.code, p.stdout, p.stderr)
			}
		})
	}
}

// The guest program must stay small, whatever a change to this package pulls in.
func TestImports(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", ".").CombinedOutput()
	if err != nil {
		t.Fatalf("go list: %v: %s", err, out)
	}
	for pkg := range strings.FieldsSeq(string(out)) {
		if strings.Contains(pkg, ".") && pkg != "github.com/aisandbox-go/aisandbox/harness/scripted/player" && !strings.HasPrefix(pkg, "vendor/") {
			t.Errorf("imports %s", pkg)
		}
		for _, bad := range []string{"net/http", "net/url", "crypto/tls", "text/template", "html/template", "regexp", "flag", "testing"} {
			if pkg == bad {
				t.Errorf("imports %s", pkg)
			}
		}
	}
}
