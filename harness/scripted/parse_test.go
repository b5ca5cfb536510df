package scripted

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/aisandbox-go/aisandbox/harness/scripted/player"
)

const everything = `# a comment
steps:
  - say: "Let me see. "
  - think: |
      Two lines
      of thought.
  - run: ls -l | wc -l
  - write: {path: a/b.txt, content: ""}
  - edit:
      path: a/b.txt
      old: "x"
      new: ''
  - call: {tool: lookup, args: {z: 1, a: [true, null, 1.5, -7, "<&>"], big: 18446744073709551615}}
  - call: {tool: bare}
  - ask: {tool: Bash, input: {command: rm x}}
  - sleep: 25ms
  - crash: 0
  - crash: {signal: KILL}
  - flood: {lines: 10, bytes: 100}
  - repeat:
      times: 3
      steps:
        - say: again
`

func TestParse(t *testing.T) {
	got, err := Parse("s.yaml", []byte(everything))
	if err != nil {
		t.Fatal(err)
	}
	want := Script{Steps: []player.Step{
		{Say: "Let me see. "},
		{Think: "Two lines\nof thought.\n"},
		{Run: "ls -l | wc -l"},
		{Write: &player.Write{Path: "a/b.txt"}},
		{Edit: &player.Edit{Path: "a/b.txt", Old: "x"}},
		{Call: &player.Call{Tool: "lookup", Args: json.RawMessage(`{"z":1,"a":[true,null,1.5,-7,"<&>"],"big":18446744073709551615}`)}},
		{Call: &player.Call{Tool: "bare"}},
		{Ask: &player.Ask{Tool: "Bash", Input: json.RawMessage(`{"command":"rm x"}`)}},
		{Sleep: 25 * time.Millisecond},
		{Crash: &player.Crash{}},
		{Crash: &player.Crash{Signal: "KILL"}},
		{Flood: &player.Flood{Lines: 10, Bytes: 100}},
		{Repeat: &player.Repeat{Times: 3, Steps: []player.Step{{Say: "again"}}}},
	}}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("-want +got\n%s", d)
	}

	// The form that travels is the same script.
	raw, err := got.JSON()
	if err != nil {
		t.Fatal(err)
	}
	var back Script
	if err := json.Unmarshal(raw, &back); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(want, back); d != "" {
		t.Errorf("after JSON: -want +got\n%s", d)
	}
	if !strings.Contains(string(raw), `"<&>"`) {
		t.Errorf("JSON has HTML escapes: %s", raw)
	}
}

func TestParseErrors(t *testing.T) {
	for _, tc := range []struct {
		name, src string
		line, col int
		field     string
		msg       string // a part of it
	}{
		{"empty", "", 1, 1, "steps", "is missing"},
		{"comment only", "# nothing\n", 1, 1, "steps", "is missing"},
		{"no mapping", "- say: a\n", 1, 1, "", "must be a mapping of steps, not a list"},
		{"unknown top key", "steps: []\nstep: 1\n", 2, 1, "step", "unknown key; there are steps"},
		{"steps is a text", "steps: go\n", 1, 8, "steps", "must be a list of steps, not a text"},
		{"steps is nothing", "steps:\n", 1, 8, "steps", "must be a list of steps, not nothing"},
		{"unknown step", "steps:\n  - say: a\n  - shout: b\n", 3, 5, "steps[1].shout", "unknown key; there are say, think"},
		{"two keys", "steps:\n  - say: a\n    run: b\n", 2, 5, "steps[0]", "has 2 keys"},
		{"no keys", "steps:\n  - {}\n", 2, 5, "steps[0]", "has 0 keys"},
		{"key twice", "steps:\n  - say: a\n    say: b\n", 3, 5, "", "already defined"},
		{"step is a text", "steps:\n  - say\n", 2, 5, "steps[0]", "must be a mapping of say, think"},
		{"say a number", "steps:\n  - say: 42\n", 2, 10, "steps[0].say", "put it in quotes"},
		{"say a bool", "steps:\n  - say: true\n", 2, 10, "steps[0].say", "put it in quotes"},
		{"say empty", "steps:\n  - say: ''\n", 2, 10, "steps[0].say", "must not be empty"},
		{"say nothing", "steps:\n  - say:\n", 2, 10, "steps[0].say", "must be a text, not nothing"},
		{"write without content", "steps:\n  - write: {path: a}\n", 2, 12, "steps[0].write.content", "is missing"},
		{"write unknown key", "steps:\n  - write:\n      path: a\n      content: b\n      mode: 7\n", 5, 7, "steps[0].write.mode", "unknown key; there are path, content"},
		{"NUL in a path", "steps:\n  - write: {path: \"a\\0b\", content: c}\n", 2, 19, "steps[0].write.path", "NUL"},
		{"NUL in a command", "steps:\n  - run: \"a\\0b\"\n", 2, 10, "steps[0].run", "NUL"},
		{"edit old empty", "steps:\n  - edit: {path: a, old: \"\", new: b}\n", 2, 26, "steps[0].edit.old", "must not be empty"},
		{"edit of nothing", "steps:\n  - edit: {path: a, old: b, new: b}\n", 2, 34, "steps[0].edit.new", "the same as old"},
		{"call without tool", "steps:\n  - call: {args: {a: 1}}\n", 2, 11, "steps[0].call.tool", "is missing"},
		{"call args a list", "steps:\n  - call: {tool: a, args: [1]}\n", 2, 27, "steps[0].call.args", "must be a mapping, not a list"},
		{"call args inf", "steps:\n  - call: {tool: a, args: {x: .inf}}\n", 2, 31, "steps[0].call.args.x", "JSON"},
		{"call args number key", "steps:\n  - call: {tool: a, args: {1: 2}}\n", 2, 28, "steps[0].call.args", "a key must be a text"},
		{"sleep a number", "steps:\n  - sleep: 25\n", 2, 12, "steps[0].sleep", "must be a duration"},
		{"sleep rubbish", "steps:\n  - sleep: soon\n", 2, 12, "steps[0].sleep", `"soon" is no duration`},
		{"sleep zero", "steps:\n  - sleep: 0s\n", 2, 12, "steps[0].sleep", "above 0 and at most 1h"},
		{"sleep long", "steps:\n  - sleep: 61m\n", 2, 12, "steps[0].sleep", "above 0 and at most 1h"},
		{"crash high", "steps:\n  - crash: 256\n", 2, 12, "steps[0].crash", "from 0 to 255"},
		{"crash huge", "steps:\n  - crash: 18446744073709551615\n", 2, 12, "steps[0].crash", "from 0 to 255"},
		{"crash signal", "steps:\n  - crash: {signal: TERM}\n", 2, 21, "steps[0].crash.signal", "must be KILL"},
		{"flood zero", "steps:\n  - flood: {lines: 0, bytes: 1}\n", 2, 20, "steps[0].flood.lines", "from 1"},
		{"flood huge", "steps:\n  - flood: {lines: 1073741824, bytes: 2}\n", 2, 12, "steps[0].flood", "more than 1073741824 bytes"},
		{"flood repeated", "steps:\n  - repeat: {times: 3, steps: [{flood: {lines: 1024, bytes: 524288}}]}\n", 2, 40, "steps[0].repeat.steps[0].flood", "more than 1073741824 bytes"},
		{"flood twice", "steps:\n  - flood: {lines: 1, bytes: 1073741824}\n  - flood: {lines: 1, bytes: 1}\n", 3, 12, "steps[1].flood", "all floods together"},
		{"repeat zero", "steps:\n  - repeat: {times: 0, steps: [{say: a}]}\n", 2, 21, "steps[0].repeat.times", "from 1 to 1000000"},
		{"repeat nothing", "steps:\n  - repeat: {times: 2, steps: []}\n", 2, 31, "steps[0].repeat.steps", "must not be empty"},
		{"repeat of repeat", "steps:\n  - repeat: {times: 10000, steps: [{repeat: {times: 10000, steps: [{say: a}]}}]}\n", 2, 53, "steps[0].repeat.steps[0].repeat.times", "more than 10000000 steps"},
		{"repeated steps", "steps:\n  - repeat: {times: 1000000, steps: [" + strings.Repeat("{say: a},", 11) + "]}\n", 2, 119, "steps[0].repeat.steps[9]", "more than 10000000 steps"},
		{"nesting", "steps:\n  - " + strings.Repeat("{repeat: {times: 1, steps: [", 9) + "{say: a}" + strings.Repeat("]}}", 9) + "\n", 2, 238, strings.TrimSuffix(strings.Repeat("steps[0].repeat.", 9), "."), "deeper than 8"},
		{"anchor", "steps: &a\n  - say: b\n", 1, 8, "steps", "anchor"},
		{"alias", "steps:\n  - say: *a\n", 2, 10, "steps[0].say", "anchor or alias"},
		{"tag", "steps:\n  - say: !!str b\n", 2, 10, "steps[0].say", "tag"},
		{"merge key", "steps:\n  - <<: {say: a}\n", 2, 5, "steps[0]", "a key must be a text"},
		{"second document", "steps: []\n---\nsteps: []\n", 3, 1, "", "a second document"},
		{"tab", "steps:\n\t- say: a\n", 2, 1, "", "cannot start any token"},
		{"open quote", "steps:\n  - say: \"abc\n", 2, 10, "", "end character"},
		{"no UTF-8", "steps:\n  - say: ä\xffb\n", 2, 11, "", "no UTF-8"},
		{"brackets", "steps: " + strings.Repeat("[", 100), 1, 72, "", "deeper than 64"},
		{"dashes", "steps:\n " + strings.Repeat("- ", 100), 2, 130, "", "deeper than 64"},
		{"long text", "steps:\n  - say: " + strings.Repeat("a", MaxText+1), 2, 10, "steps[0].say", "longer than 1048576"},
		{"long file", strings.Repeat("#", MaxFile+1), 1, 1, "", "longer than 8388608"},
		{"many steps", "steps:\n" + strings.Repeat("- say: a\n", MaxSteps+1), MaxSteps + 2, 3, "steps[10000]", "more than 10000 steps"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := Parse("s.yaml", []byte(tc.src))
			var se *ScriptError
			if !errors.As(err, &se) {
				t.Fatalf("error %v is no *ScriptError", err)
			}
			got := ScriptError{se.File, se.Line, se.Column, se.Field, ""}
			if d := cmp.Diff(ScriptError{"s.yaml", tc.line, tc.col, tc.field, ""}, got); d != "" {
				t.Errorf("-want +got\n%s(%v)", d, err)
			}
			if !strings.Contains(se.Msg, tc.msg) {
				t.Errorf("message %q lacks %q", se.Msg, tc.msg)
			}
		})
	}
}

func TestScriptErrorText(t *testing.T) {
	_, err := Parse("", []byte("steps:\n  - say: 1\n"))
	if got, want := err.Error(), "scripted: script:2:10: steps[0].say: must be a text, not a number: put it in quotes"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// FuzzParse: whatever the bytes, Parse returns, errors are ScriptErrors with a
// position, and what it accepts survives the way to the player.
func FuzzParse(f *testing.F) {
	f.Add([]byte(everything))
	for _, s := range []string{"", "steps:", "steps: [", "steps:\n- say: |\n", "a: &b\n- *b", "steps:\n- {crash: {signal: KILL}}",
		"? a\n: b", "steps:\n- sleep: !!float 1", "%YAML 1.2\n---\nsteps: []", "steps:\n- say: \"\\ud83d\""} {
		f.Add([]byte(s))
	}
	demo, err := os.ReadFile(filepath.Join("..", "..", "cli", "demo", "script.yaml"))
	if err == nil {
		f.Add(demo)
	}
	f.Fuzz(func(t *testing.T, src []byte) {
		s, err := Parse("f", src)
		if err != nil {
			var se *ScriptError
			if !errors.As(err, &se) || se.Line < 1 || se.Column < 1 || se.Msg == "" {
				t.Fatalf("error %#v", err)
			}
			return
		}
		raw, err := s.JSON()
		if err != nil {
			t.Fatal(err)
		}
		var back Script
		if err := json.Unmarshal(raw, &back); err != nil {
			t.Fatalf("%v: %s", err, raw)
		}
		again, err := back.JSON()
		if err != nil || string(again) != string(raw) {
			t.Fatalf("JSON changed: %s, then %s (%v)", raw, again, err)
		}
	})
}
