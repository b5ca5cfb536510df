package player_test

import (
	"encoding/json"
	"maps"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/aisandbox-go/aisandbox/harness/scripted/player"
)

// TestShapes compares each line that the player prints with what lines of its kind
// have in recordings of the real program: testdata/shapes.json lists per kind the
// keys that are always there and those that are sometimes there, in CLI 2.1.197.
func TestShapes(t *testing.T) {
	raw, err := os.ReadFile("testdata/shapes.json")
	if err != nil {
		t.Fatal(err)
	}
	var shapes map[string]struct{ Always, Sometimes []string }
	if err := json.Unmarshal(raw, &shapes); err != nil {
		t.Fatal(err)
	}
	m := &mcpServer{t: t, style: "json", tools: map[string]func(json.RawMessage) (string, bool){
		"t": func(json.RawMessage) (string, bool) { return "x", false },
	}}
	s := newStage(t)
	all := s.play([]player.Step{{Think: "a"}, {Say: "b"}, {Run: "echo c"}, {Run: "false"}, {Write: &player.Write{Path: "d", Content: "e"}},
		{Edit: &player.Edit{Path: "d", Old: "e", New: "f"}}, {Call: &player.Call{Tool: "t"}},
		{Ask: &player.Ask{Tool: "Bash", Input: json.RawMessage(`{"command":"x"}`)}}, {Say: "g"}},
		"--mcp-config", m.config(""), "--permission-mode", "default")
	lines := all.lines
	lines = append(lines, s.play([]player.Step{{Run: "true"}, {Say: "a"}}, "--max-turns", "1").lines...)
	lines = append(lines, s.play([]player.Step{{Say: "a"}}, "--resume", "none").lines...)
	lines = append(lines, s.signaled(busy, syscall.SIGINT, func() bool { return s.pid("shell") != 0 }).lines...)

	seen := map[string]bool{}
	for _, l := range lines {
		k := lineKind(l)
		shape, ok := shapes[k]
		if !ok {
			t.Errorf("the real program has no line of kind %s", k)
			continue
		}
		seen[k] = true
		got := map[string]bool{}
		keyPaths(l, "", got)
		for _, key := range shape.Always {
			if !got[key] && !(k == "result/error_during_execution" && strings.HasPrefix(key, "modelUsage.")) {
				t.Errorf("%s lacks %s", k, key)
			}
		}
		for key := range got {
			if !slices.Contains(shape.Always, key) && !slices.Contains(shape.Sometimes, key) {
				t.Errorf("%s has %s, which the real program has not", k, key)
			}
		}
	}
	want := []string{"assistant/text", "assistant/thinking", "assistant/tool_use", "assistant/tool_use/mcp", "result/error_during_execution",
		"result/error_max_turns", "result/success", "stream_event/content_block_delta/input_json_delta",
		"stream_event/content_block_delta/signature_delta", "stream_event/content_block_delta/text_delta",
		"stream_event/content_block_delta/thinking_delta", "stream_event/content_block_start/text",
		"stream_event/content_block_start/thinking", "stream_event/content_block_start/tool_use", "stream_event/content_block_stop",
		"stream_event/message_delta", "stream_event/message_start", "stream_event/message_stop", "system/init", "system/status",
		"user/text", "user/tool_result/error", "user/tool_result/ok/Bash", "user/tool_result/ok/Edit", "user/tool_result/ok/Write",
		"user/tool_result/ok/mcp"}
	if got := slices.Sorted(maps.Keys(seen)); !slices.Equal(got, want) {
		t.Errorf("kinds %q, want %q", got, want)
	}
}

// lineKind names what a line is, as testdata/shapes.json does.
func lineKind(l map[string]any) string {
	k := l["type"].(string)
	add := func(v any) {
		if s, ok := v.(string); ok {
			k += "/" + s
		}
	}
	switch k {
	case "stream_event":
		add(get(l, "event", "type"))
		add(get(l, "event", "delta", "type"))
		add(get(l, "event", "content_block", "type"))
	case "system", "result":
		add(l["subtype"])
	case "assistant", "user":
		block := get(l, "message", "content", 0)
		add(get(block, "type"))
		if name, ok := get(block, "name").(string); ok && strings.HasPrefix(name, "mcp__") {
			add("mcp")
		}
		if get(block, "type") == "tool_result" {
			if get(block, "is_error") == true {
				add("error")
			} else {
				add("ok")
			}
		}
		switch r := l["tool_use_result"].(type) {
		case []any:
			add("mcp")
		case map[string]any:
			switch {
			case r["stdout"] != nil:
				add("Bash")
			case r["oldString"] != nil:
				add("Edit")
			default:
				add("Write")
			}
		}
	}
	return k
}

// keyPaths collects the keys of a value; what a tool takes in is its own affair.
func keyPaths(v any, prefix string, into map[string]bool) {
	switch v := v.(type) {
	case map[string]any:
		for k, x := range v {
			p := strings.TrimPrefix(prefix+"."+k, ".")
			into[p] = true
			switch k {
			case "input", "tool_input", "memory_paths", "structuredPatch":
			case "modelUsage":
				for _, y := range x.(map[string]any) {
					keyPaths(y, p+".*", into)
				}
			default:
				keyPaths(x, p, into)
			}
		}
	case []any:
		for _, x := range v {
			keyPaths(x, prefix+"[]", into)
		}
	}
}
