package claudecode_test

import (
	"encoding/json"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/harness"
	"github.com/aisandbox-go/aisandbox/harness/claudecode"
	"github.com/aisandbox-go/aisandbox/harness/harnesstest"
	"github.com/aisandbox-go/aisandbox/provider"
)

// read returns a recorded transcript.
func read(t testing.TB, file string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(transcripts, file))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// decode runs a transcript with options changed by f.
func decode(t *testing.T, file string, f func(*claudecode.DecoderOptions)) []event.Event {
	t.Helper()
	return decodeBytes(t, file, read(t, file), suite().Ends[file], f)
}

func decodeBytes(t *testing.T, file string, raw []byte, end harness.End, f func(*claudecode.DecoderOptions)) []event.Event {
	t.Helper()
	o := options(file, event.NewIDs(harnesstest.RunID))
	if f != nil {
		f(&o)
	}
	events, err := harnesstest.Decode(claudecode.NewDecoder(o), raw, 0, end)
	if err != nil {
		t.Fatal(err)
	}
	if err := harnesstest.CheckRun(events); err != nil {
		t.Fatal(err)
	}
	return events
}

// said is the assistant's texts, one string a message.
func said(events []event.Event) []string {
	var out []string
	at := map[string]int{}
	for _, ev := range events {
		switch e := ev.(type) {
		case event.TextMessageStart:
			at[e.MessageID] = len(out)
			out = append(out, "")
		case event.TextMessageContent:
			out[at[e.MessageID]] += e.Delta
		}
	}
	return out
}

func thought(events []event.Event) string {
	var b strings.Builder
	for _, ev := range events {
		if e, ok := ev.(event.ReasoningMessageContent); ok {
			b.WriteString(e.Delta)
		}
	}
	return b.String()
}

// results is call id and content of each tool result, in order.
func results(events []event.Event) [][2]string {
	var out [][2]string
	for _, ev := range events {
		if e, ok := ev.(event.ToolCallResult); ok {
			out = append(out, [2]string{e.ToolCallID, e.Content})
		}
	}
	return out
}

// terminal is the last event in short: "stop", "length" or the error's code.
func terminal(events []event.Event) string {
	last := events[len(events)-1]
	if e, ok := last.(event.RunError); ok {
		return "error " + e.Code
	}
	return event.TanStackOf(last).FinishReason
}

func customs(events []event.Event, name string) (out []event.Custom) {
	for _, ev := range events {
		if c, ok := ev.(event.Custom); ok && c.Name == name {
			out = append(out, c)
		}
	}
	return out
}

// TestScriptedTexts compares what comes out with what the model was scripted to
// say (index.json).
func TestScriptedTexts(t *testing.T) {
	b, err := os.ReadFile(filepath.Join(transcripts, "index.json"))
	if err != nil {
		t.Fatal(err)
	}
	var index []struct {
		File  string
		Turns json.RawMessage
	}
	if err := json.Unmarshal(b, &index); err != nil {
		t.Fatal(err)
	}
	compared := 0
	for _, tr := range index {
		var turns []struct {
			Blocks []struct {
				Type   string
				Deltas []string
				ID     string
				Name   string
				Input  json.RawMessage
			}
			Cut *int
		}
		if json.Unmarshal(tr.Turns, &turns) != nil {
			continue // the server chose by the request
		}
		var text, thoughts string
		var calls []string
		for _, turn := range turns {
			if turn.Cut != nil {
				text = "\x00"
				break
			}
			for _, bl := range turn.Blocks {
				switch bl.Type {
				case "text":
					text += strings.Join(bl.Deltas, "")
				case "thinking":
					thoughts += strings.Join(bl.Deltas, "")
				case "tool_use":
					calls = append(calls, bl.ID)
				}
			}
		}
		switch tr.File[:2] {
		case "14", "35", "39":
			continue // no request reached the model
		case "15":
			text = "Working." // the limit of turns came first
		case "22":
			text = "smile 😀 end" // encoding/json can't read the halves
		case "24", "25":
			continue // the calls are hidden
		}
		if text == "\x00" {
			continue
		}
		events := decode(t, tr.File, nil)
		if got := strings.Join(said(events), ""); got != text {
			t.Errorf("%s says %q, want %q", tr.File, got, text)
		}
		if got := thought(events); got != thoughts {
			t.Errorf("%s thinks %q, want %q", tr.File, got, thoughts)
		}
		var got []string
		for _, ev := range events {
			if e, ok := ev.(event.ToolCallStart); ok {
				got = append(got, e.ToolCallID)
			}
		}
		if d := cmp.Diff(calls, got); d != "" {
			t.Errorf("%s calls tools (-want +got):\n%s", tr.File, d)
		}
		compared++
	}
	if compared < 25 {
		t.Errorf("only %d transcripts were compared", compared)
	}
}

// TestToolInputs holds the arguments against the deltas and the whole input.
func TestToolInputs(t *testing.T) {
	for _, whole := range []bool{false, true} {
		for _, file := range []string{"03-bash.ndjson", "04-write-edit.ndjson", "05-parallel-tools.ndjson", "21-unicode.ndjson", "29-no-partials.ndjson"} {
			args := map[string]string{}
			pieces := 0
			for _, ev := range decode(t, file, func(o *claudecode.DecoderOptions) { o.WholeToolArgs = whole }) {
				switch e := ev.(type) {
				case event.ToolCallArgs:
					args[e.ToolCallID] += e.Delta
					pieces++
				case event.ToolCallEnd:
					var a, b map[string]any
					if err := json.Unmarshal([]byte(args[e.ToolCallID]), &a); err != nil {
						t.Fatalf("%s: arguments of %s: %v", file, e.ToolCallID, err)
					}
					if err := json.Unmarshal(event.TanStackOf(e).Input, &b); err != nil {
						t.Fatalf("%s: input of %s: %v", file, e.ToolCallID, err)
					}
					maps.DeleteFunc(b, func(k string, _ any) bool { _, ok := a[k]; return !ok }) // the program adds defaults
					if d := cmp.Diff(b, a); d != "" {
						t.Errorf("%s: the pieces are not the input: %s", file, d)
					}
				}
			}
			if streamed := pieces > len(args); streamed == (whole || file[:2] == "29") {
				t.Errorf("%s, whole %v: %d pieces for %d calls", file, whole, pieces, len(args))
			}
		}
	}
}

func TestTerminals(t *testing.T) {
	for file, want := range map[string]string{
		"01-text.ndjson": "stop", "14-resume-not-found.ndjson": "error error_during_execution",
		"15-max-turns.ndjson": "length", "16-api-401.ndjson": "error api_error_401", "17-api-500.ndjson": "error api_error_500",
		"18-api-429-recovered.ndjson": "stop", "19-midstream-disconnect.ndjson": "stop",
		"25-structured-output-invalid.ndjson": "error error_max_structured_output_retries",
		"27-background-task.ndjson":           "stop", "31-killed.ndjson": "error no_result", "31b-sigterm.ndjson": "stop",
		"32-sigint.ndjson": "error aborted", "34-refusal.ndjson": "error invalid_request", "35-slash-command.ndjson": "stop",
		"39-not-logged-in.ndjson": "error authentication_failed",
	} {
		events := decode(t, file, nil)
		got := terminal(events)
		if got != want {
			t.Errorf("%s ends with %s, want %s", file, got, want)
		}
	}
}

// TestExitStatus covers what the recordings do not: the same output with other
// exits (spec 02 §6.1).
func TestExitStatus(t *testing.T) {
	exit := func(code, sig int) harness.End {
		return harness.End{Exit: provider.Exit{Code: code, Signal: sig}, StderrTail: "went wrong\n"}
	}
	text := string(read(t, "01-text.ndjson"))
	noResult := text[:strings.LastIndex(strings.TrimSpace(text), "\n")+1]
	for _, c := range []struct {
		name, raw string
		end       harness.End
		want, msg string
	}{
		{"fine, exit 0", text, exit(0, 0), "stop", ""},
		{"fine, exit 1", text, exit(1, 0), "error process_exit", "went wrong"},
		{"fine, exit 143", text, exit(143, 0), "stop", ""},
		{"fine, signal", text, exit(137, 9), "stop", ""},
		{"fine, aborted", text, harness.End{Aborted: true}, "error aborted", "Request aborted"},
		{"error result, exit 0", string(read(t, "32-sigint.ndjson")), exit(0, 0), "error error_during_execution", ""},
		{"max turns, exit 0", string(read(t, "15-max-turns.ndjson")), exit(0, 0), "length", ""},
		{"no result, exit 0", noResult, exit(0, 0), "error no_result", "without a result"},
		{"no result, exit 1", noResult, exit(1, 0), "error no_result", "went wrong"},
		{"no result, words on stdout", noResult + "Oh no\n", harness.End{Exit: provider.Exit{Code: 1}}, "error no_result", "Oh no"},
		{"nothing at all", "", exit(1, 0), "error no_result", "went wrong"},
		{"synthetic error without a result", string(read(t, "16-api-401.ndjson"))[:strings.LastIndex(strings.TrimSpace(string(read(t, "16-api-401.ndjson"))), "\n")+1], exit(1, 0), "error authentication_failed", "Invalid API key"},
	} {
		events := decodeBytes(t, "01-text.ndjson", []byte(c.raw), c.end, nil)
		if got := terminal(events); got != c.want {
			t.Errorf("%s: ends with %s, want %s", c.name, got, c.want)
		}
		if e, ok := events[len(events)-1].(event.RunError); ok && !strings.Contains(e.Message, c.msg) {
			t.Errorf("%s: message %q, want it to have %q", c.name, e.Message, c.msg)
		}
	}
}

func TestParallelResultsOutOfOrder(t *testing.T) {
	want := [][2]string{{"toolu_c", "File does not exist. Note: your current working directory is /workspace."}, {"toolu_b", "B"}, {"toolu_a", "A"}}
	if d := cmp.Diff(want, results(decode(t, "05-parallel-tools.ndjson", nil))); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

func TestErrorsOfAPI(t *testing.T) {
	for _, file := range []string{"16-api-401.ndjson", "17-api-500.ndjson", "34-refusal.ndjson", "39-not-logged-in.ndjson"} {
		events := decode(t, file, nil)
		e, ok := events[len(events)-1].(event.RunError)
		if !ok || e.Message == "" {
			t.Fatalf("%s ends with %v", file, events[len(events)-1])
		}
		for _, s := range said(events) {
			if strings.Contains(e.Message, s) && s != "" {
				t.Errorf("%s: %q is said as well as reported", file, s)
			}
		}
	}
	if got := said(decode(t, "35-slash-command.ndjson", nil)); !cmp.Equal(got, []string{"Unknown command: /unknowncmd"}) {
		t.Errorf("35 says %q", got)
	}
}

func TestBackgroundTask(t *testing.T) {
	events := decode(t, "27-background-task.ndjson", nil)
	if n := len(customs(events, "claude-code.session-id")); n != 1 {
		t.Errorf("%d session events, want 1", n)
	}
	end := events[len(events)-1].(event.RunFinished)
	want := []event.Usage{{Model: "sonnet", InputTokens: 30, OutputTokens: 21, TotalTokens: 51}}
	if d := cmp.Diff(want, end.Usage); d != "" {
		t.Errorf("usage is not the sum (-want +got):\n%s", d)
	}
	if u := string(event.TanStackOf(end).Usage); !strings.Contains(u, `"totalCostUsd":0.000405`) || !strings.Contains(u, `"claude-sonnet-5":{"inputTokens":30`) {
		t.Errorf("cost and models are not the last line's: %s", u)
	}
}

func TestSessions(t *testing.T) {
	id := func(file string) string {
		c := customs(decode(t, file, nil), event.SessionIDName("claude-code"))
		if len(c) != 1 {
			t.Fatalf("%s: %d session events", file, len(c))
		}
		s, ok := event.CustomOf[event.SessionID](c[0], "claude-code.session-id")
		if !ok || s.Model != "claude-sonnet-5" || len(s.Tools) == 0 {
			t.Fatalf("%s: %+v", file, s)
		}
		return s.SessionID
	}
	a, b, c := id("13a-session-first.ndjson"), id("13b-session-resume.ndjson"), id("13c-session-fork.ndjson")
	if a != b || a == c {
		t.Errorf("sessions %s, resumed %s, forked %s", a, b, c)
	}
	// Hooks print before init: the start of the run still comes first.
	ev := decode(t, "28-hooks-before-init.ndjson", nil)
	if ev[0].Type() != event.TypeRunStarted || ev[1].Type() != event.TypeCustom {
		t.Errorf("28 begins with %s, %s", ev[0].Type(), ev[1].Type())
	}
}

func TestDisconnect(t *testing.T) {
	if d := cmp.Diff([]string{"Partial ", "ok"}, said(decode(t, "19-midstream-disconnect.ndjson", nil))); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

func TestSurrogates(t *testing.T) {
	events := decode(t, "22-lone-surrogates.ndjson", nil)
	if d := cmp.Diff([]string{"smile 😀 end"}, said(events)); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	// A half whose other half never comes is one replacement character.
	half := strings.Replace(string(read(t, "22-lone-surrogates.ndjson")), `"text":"\ude00"`, `"text":"x"`, 1)
	if got := said(decodeBytes(t, "22", []byte(half), harness.End{}, nil)); !cmp.Equal(got, []string{"smile \ufffdx end"}) {
		t.Errorf("a lone half gives %q", got)
	}
	last := strings.Replace(string(read(t, "22-lone-surrogates.ndjson")), `"text":" end"`, `"text":" end\ud83d"`, 1)
	if got := said(decodeBytes(t, "22", []byte(last), harness.End{}, nil)); !cmp.Equal(got, []string{"smile 😀 end\ufffd"}) {
		t.Errorf("a half at the end gives %q", got)
	}
}

func TestSubagents(t *testing.T) {
	hidden := decode(t, "23-subagent.ndjson", nil)
	if got := results(hidden); len(got) != 1 || got[0][0] != "toolu_t" {
		t.Errorf("results %v", got)
	}
	if n := len(customs(hidden, "claude-code.subagent")); n != 0 {
		t.Errorf("%d events of sub-agents without the option", n)
	}
	shown := customs(decode(t, "23-subagent.ndjson", func(o *claudecode.DecoderOptions) { o.Subagents = true }), "claude-code.subagent")
	var kinds []string
	for _, c := range shown {
		var v struct{ Kind, ParentToolUseID, SubagentType, TaskDescription, ToolCallID string }
		if err := json.Unmarshal(c.Value, &v); err != nil {
			t.Fatal(err)
		}
		if v.ParentToolUseID != "toolu_t" || v.SubagentType != "general-purpose" || v.TaskDescription != "Count files" {
			t.Errorf("%s", c.Value)
		}
		kinds = append(kinds, v.Kind+" "+v.ToolCallID)
	}
	if d := cmp.Diff([]string{"text ", "tool_use toolu_s1", "tool_result toolu_s1"}, kinds); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

func TestStructured(t *testing.T) {
	for file, want := range map[string]string{
		"24-structured-output.ndjson":           `{"summary":"one file","files":["a.txt"]}`,
		"25-structured-output-invalid.ndjson":   ``,
		"26-structured-output-text-only.ndjson": `{"summary":"y","files":[]}`,
	} {
		events := decode(t, file, nil)
		c := customs(events, event.NameStructuredComplete)
		got := ""
		if len(c) > 0 {
			v, _ := event.CustomOf[event.StructuredComplete](c[0], event.NameStructuredComplete)
			got = v.Raw
			if string(v.Object) != v.Raw {
				t.Errorf("%s: object %s, raw %s", file, v.Object, v.Raw)
			}
		}
		if got != want || len(c) > 1 || len(customs(events, event.NameStructuredStart)) != len(c) {
			t.Errorf("%s: structured answer %q (%d events), want %q", file, got, len(c), want)
		}
		for _, ev := range events {
			if e, ok := ev.(event.ToolCallStart); ok && e.ToolCallName == "StructuredOutput" {
				t.Errorf("%s shows the tool call", file)
			}
		}
	}
	// Without a schema the tool is one like any other.
	plain := decode(t, "24-structured-output.ndjson", func(o *claudecode.DecoderOptions) { o.Structured = false })
	if got := results(plain); len(got) != 2 || len(customs(plain, event.NameStructuredComplete)) != 0 {
		t.Errorf("without a schema: results %v", got)
	}
}

// TestStructuredSources takes away the better sources one by one.
func TestStructuredSources(t *testing.T) {
	whole := string(read(t, "24-structured-output.ndjson"))
	answer := `{"summary":"one file","files":["a.txt"]}`
	noField := strings.Replace(whole, `"structured_output":`+answer, `"structured_output":null`, 1)
	if noField == whole {
		t.Fatal("the recording has no structured_output")
	}
	noLine := dropLine(noField, `"name":"StructuredOutput","input":{"summary"`)
	rejected := strings.Replace(noField, `"content":"Structured output provided successfully"`, `"content":"no","is_error":true`, 1)
	noText := strings.Replace(rejected, `"result":"{`, `"result":"nothing {`, 1)
	noText = strings.ReplaceAll(noText, `\"summary\":\"one file\"`, `\"summary\"`)
	for _, c := range []struct{ name, raw, want string }{
		{"the call's input", noField, answer},
		{"its deltas", noLine, answer},
		{"prose only, no object", noText, ""},
	} {
		events := decodeBytes(t, "24", []byte(c.raw), harness.End{}, nil)
		got := ""
		for _, cu := range customs(events, event.NameStructuredComplete) {
			v, _ := event.CustomOf[event.StructuredComplete](cu, cu.Name)
			got += v.Raw
		}
		if got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

func dropLine(s, with string) string {
	var out strings.Builder
	for l := range strings.Lines(s) {
		if !strings.Contains(l, with) {
			out.WriteString(l)
		}
	}
	return out.String()
}

func TestToolResults(t *testing.T) {
	if got := results(decode(t, "30-image-result.ndjson", nil)); got[0][1] != "[image image/png, 70 bytes]" {
		t.Errorf("an image is %q", got[0][1])
	}
	if got := results(decode(t, "37-multi-block-mcp.ndjson", nil)); got[0][1] != "part one\npart two\n[image image/png, 70 bytes]" {
		t.Errorf("blocks are %q", got[0][1])
	}
	var names []string
	for _, ev := range decode(t, "07-mcp-tanstack.ndjson", nil) {
		if e, ok := ev.(event.ToolCallStart); ok {
			names = append(names, e.ToolCallName)
		}
	}
	if d := cmp.Diff([]string{"lookup_ticket", "lookup_ticket"}, names); d != "" {
		t.Errorf("bridged tools (-want +got):\n%s", d)
	}
	if got := results(decode(t, "36-mcp-big-result.ndjson", nil)); !strings.Contains(got[0][1], "<persisted-output>") {
		t.Errorf("a big result is %.80q", got[0][1])
	}
	if got := results(decode(t, "31-killed.ndjson", nil)); got[0][1] != event.Interrupted {
		t.Errorf("an unanswered call gets %q", got[0][1])
	}
}

func TestFailedBridge(t *testing.T) {
	raw := strings.Replace(string(read(t, "07-mcp-tanstack.ndjson")), `"status":"connected"`, `"status":"failed"`, 1)
	c := customs(decodeBytes(t, "07", []byte(raw), harness.End{}, nil), "claude-code.mcp-failed")
	if len(c) != 1 || string(c[0].Value) != `{"server":"tanstack","status":"failed"}` {
		t.Errorf("a failed bridge gives %v", c)
	}
}

func TestPermissionDenials(t *testing.T) {
	c := customs(decode(t, "08-disallowed-tools.ndjson", nil), "claude-code.permission-denials")
	var v struct {
		Denials []struct{ Tool_Use_ID string }
	}
	if len(c) != 1 || json.Unmarshal(c[0].Value, &v) != nil || len(v.Denials) != 2 {
		t.Errorf("denials: %v", c)
	}
}

func TestSameIDsWithAndWithoutPartials(t *testing.T) {
	// The whole lines alone, as the program prints them without partial messages.
	raw := dropLine(string(read(t, "37-multi-block-mcp.ndjson")), `"type":"stream_event"`)
	ids := func(events []event.Event) (out []string) {
		for _, ev := range events {
			if e, ok := ev.(event.TextMessageStart); ok {
				out = append(out, e.MessageID)
			}
		}
		return out
	}
	a, b := decode(t, "37-multi-block-mcp.ndjson", nil), decodeBytes(t, "37", []byte(raw), harness.End{}, nil)
	if d := cmp.Diff(ids(a), ids(b)); d != "" {
		t.Errorf("ids (-streamed +whole):\n%s", d)
	}
	if d := cmp.Diff(said(a), said(b)); d != "" {
		t.Errorf("texts (-streamed +whole):\n%s", d)
	}
}

func TestHarnessPrefix(t *testing.T) {
	events := decode(t, "01-text.ndjson", func(o *claudecode.DecoderOptions) { o.Harness = "scripted" })
	if len(customs(events, "scripted.session-id")) != 1 {
		t.Error("the session event has another name")
	}
}

func TestHugeLines(t *testing.T) {
	big := strings.Repeat("x", 5<<20)
	raw := strings.Replace(string(read(t, "03-bash.ndjson")), `"content":"a.txt"`, `"content":"`+big+`"`, 1)
	if got := results(decodeBytes(t, "03", []byte(raw), harness.End{}, nil)); got[0][1] != big {
		t.Errorf("a result of 5 MB comes out with %d bytes", len(got[0][1]))
	}
	d := claudecode.NewDecoder(claudecode.DecoderOptions{})
	_, err := d.Line(make([]byte, harness.MaxLine+1))
	var le *harness.LineError
	if !errors.As(err, &le) {
		t.Errorf("a line over the limit: %v", err)
	}
}

func TestFinished(t *testing.T) {
	d := claudecode.NewDecoder(claudecode.DecoderOptions{})
	f := d.(harness.Finisher)
	var states []bool
	for line := range strings.Lines(string(read(t, "27-background-task.ndjson"))) {
		before := f.Finished()
		if _, err := d.Line([]byte(strings.TrimSpace(line))); err != nil {
			t.Fatal(err)
		}
		if f.Finished() != before {
			states = append(states, f.Finished())
		}
	}
	if d := cmp.Diff([]bool{true, false, true}, states); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}
