package claudecode_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/harness"
	"github.com/aisandbox-go/aisandbox/harness/claudecode"
	"github.com/aisandbox-go/aisandbox/harness/harnesstest"
)

// The lines of a stream, in short.

func stream(ev string, args ...any) string {
	return fmt.Sprintf(`{"type":"stream_event","event":`+ev+`,"parent_tool_use_id":null}`, args...)
}

func message(id string) string {
	return stream(`{"type":"message_start","message":{"id":%q}}`, id)
}

func start(index int, block string) string {
	return stream(`{"type":"content_block_start","index":%d,"content_block":%s}`, index, block)
}

func delta(index int, d string) string {
	return stream(`{"type":"content_block_delta","index":%d,"delta":%s}`, index, d)
}

func stop(index int) string { return stream(`{"type":"content_block_stop","index":%d}`, index) }

func whole(id, block string) string {
	return fmt.Sprintf(`{"type":"assistant","message":{"id":%q,"content":[%s]},"parent_tool_use_id":null}`, id, block)
}

func answered(call, content string) string {
	return fmt.Sprintf(`{"type":"user","message":{"content":[{"type":"tool_result","tool_use_id":%q,"content":%s}]}}`, call, content)
}

const (
	textBlock  = `{"type":"text","text":""}`
	thinkBlock = `{"type":"thinking","thinking":""}`
	callBlock  = `{"type":"tool_use","id":"c","name":"Bash","input":{}}`
	wholeCall  = `{"type":"tool_use","id":"c","name":"Bash","input":{"a": 1}}`
	fine       = `{"type":"result","subtype":"success","is_error":false,"result":"done"}`
)

func say(s string) string   { return fmt.Sprintf(`{"type":"text_delta","text":%q}`, s) }
func think(s string) string { return fmt.Sprintf(`{"type":"thinking_delta","thinking":%q}`, s) }
func arg(s string) string   { return fmt.Sprintf(`{"type":"input_json_delta","partial_json":%q}`, s) }

// short writes events one a word.
func short(events []event.Event) string {
	var out []string
	for _, ev := range events {
		s := ""
		switch e := ev.(type) {
		case event.RunStarted, event.RunFinished:
			continue
		case event.RunError:
			s = "error:" + e.Code
		case event.TextMessageStart:
			s = "+" + e.MessageID
		case event.TextMessageContent:
			s = e.Delta
		case event.TextMessageEnd:
			s = "-" + e.MessageID
		case event.ReasoningMessageStart:
			s = "+think"
		case event.ReasoningMessageContent:
			s = e.Delta
		case event.ReasoningMessageEnd:
			s = "-think"
		case event.ReasoningStart, event.ReasoningEnd:
			continue
		case event.ToolCallStart:
			s = "+call:" + e.ToolCallID
		case event.ToolCallArgs:
			s = e.Delta
		case event.ToolCallEnd:
			s = "-call:" + string(event.TanStackOf(e).Input)
		case event.ToolCallResult:
			s = "result:" + e.Content
		case event.Custom:
			s = e.Name
			if v, ok := event.CustomOf[event.StructuredComplete](e, event.NameStructuredComplete); ok {
				s = v.Raw
			}
		}
		out = append(out, s)
	}
	return strings.Join(out, " ")
}

// TestRepairs is what a broken or unusual stream comes out as (spec 02 §6.2).
func TestRepairs(t *testing.T) {
	for _, c := range []struct {
		name       string
		structured bool
		in         []string
		want       string
	}{
		{"text, then another message", false,
			[]string{message("a"), start(0, textBlock), delta(0, say("x")), message("b"), start(0, textBlock), delta(0, say("y")), whole("b", `{"type":"text","text":"y"}`), stop(0), fine},
			"+a x -a +b y -b"},
		{"text, then another message that is whole", false,
			[]string{message("a"), start(0, textBlock), delta(0, say("x")), message("b"), whole("b", `{"type":"text","text":"y"}`), fine},
			"+a x -a +b y -b"},
		{"text, then another block", false,
			[]string{message("a"), start(0, textBlock), delta(0, say("x")), start(1, thinkBlock), delta(1, think("t")), stop(1), fine},
			"+a x -a +think t -think"},
		{"thinking, then a whole line of another message", false,
			[]string{message("a"), start(0, thinkBlock), delta(0, think("t")), whole("b", `{"type":"text","text":"y"}`), fine},
			"+think t -think +b y -b"},
		{"a call, then another message", false,
			[]string{message("a"), start(0, callBlock), delta(0, arg(`{"a`)), message("b"), start(0, textBlock), delta(0, say("y")), stop(0), fine},
			`+call:c {"a -call: +b y -b result:` + event.Interrupted},
		{"a call, then a whole line of another message", false,
			[]string{message("a"), start(0, callBlock), whole("b", `{"type":"text","text":"y"}`), fine},
			`+call:c {} -call: +b y -b result:` + event.Interrupted},
		{"a call said twice", false,
			[]string{message("a"), start(0, callBlock), delta(0, arg(`{"a":1}`)), whole("a", wholeCall), whole("a", wholeCall), stop(0), answered("c", `"r"`), whole("a", wholeCall), answered("c", `"again"`), fine},
			`+call:c {"a":1} -call:{"a":1} result:r`},
		{"a result before the whole line", false,
			[]string{message("a"), start(0, callBlock), delta(0, arg(`{"a":1}`)), answered("c", `"r"`), whole("a", wholeCall), stop(0), fine},
			`+call:c {"a":1} -call: result:r`},
		{"a result for nobody", false, []string{answered("x", `"r"`), fine}, ""},
		{"an id with an escape", false,
			[]string{message("a"), start(0, `{"type":"tool_use","id":"\u0063","name":"Bash"}`), whole("a", wholeCall), answered("c", `[{"type":"text","text":"1"},{"type":"text","text":"2"}]`), fine},
			`+call:c {"a":1} -call:{"a":1} result:1` + "\n2"},
		{"arguments split within a character", false,
			[]string{message("a"), start(0, callBlock), delta(0, `{"type":"input_json_delta","partial_json":"{\"a\":\"\ud83d"}`), delta(0, `{"type":"input_json_delta","partial_json":"\ude00\"}"}`), whole("a", `{"type":"tool_use","id":"c","name":"Bash","input":{"a":"😀"}}`), stop(0), answered("c", `""`), fine},
			`+call:c {"a":" 😀"} -call:{"a":"😀"} result:`},
		{"deltas of a block that is not open", false,
			[]string{message("a"), delta(0, say("x")), start(0, textBlock), delta(1, say("y")), delta(0, think("z")), delta(0, say("w")), stop(1), delta(0, say("v")), stop(0), delta(0, say("u")), fine},
			"+a w v -a"},
		{"a lost message_start", false, []string{start(0, textBlock), delta(0, say("x")), stop(0), fine}, "+run-1-0 x -run-1-0"},
		{"blocks that say nothing to a reader", false,
			[]string{message("a"), start(0, `{"type":"redacted_thinking","data":"zz"}`), delta(0, say("no")), stop(0), whole("a", `{"type":"redacted_thinking","data":"zz"}`), whole("a", `{"type":"text","text":""}`), start(1, textBlock), delta(1, say("x")), stop(1), fine},
			"+a x -a"},
		{"content that is a string", false, []string{`{"type":"assistant","message":{"id":"a","content":"x"}}`, `{"type":"user","message":{"content":"y"}}`, fine}, "+a x -a"},
		{"an error and then a good end", false,
			[]string{`{"type":"result","subtype":"error_during_execution","is_error":true,"errors":["x","y"]}`, message("a"), start(0, textBlock), delta(0, say("x")), stop(0), fine},
			"+a x -a"},
		{"a good end and then an error", false,
			[]string{fine, `{"type":"result","subtype":"error_during_execution","is_error":true,"errors":["x","y"]}`}, "error:error_during_execution"},
		{"structured, abandoned text", true,
			[]string{message("a"), start(0, textBlock), delta(0, say(`{"old":1}`)), message("b"), start(0, textBlock), delta(0, say(`So: {"new":2`)), delta(0, say(`} or so.`)), stop(0), message("c"), start(0, textBlock), delta(0, say(`{"cut":3}`)), fine},
			`+a {"old":1} -a +b So: {"new":2 } or so. -b +c {"cut":3} -c structured-output.start {"new":2}`},
		{"structured, the last useful input", true,
			[]string{whole("a", `{"type":"tool_use","id":"c","name":"StructuredOutput","input":{"n":1}}`), answered("c", `"ok"`),
				whole("b", `{"type":"tool_use","id":"d","name":"StructuredOutput","input":{}}`), answered("d", `"ok"`), fine},
			`structured-output.start {"n":1}`},
		{"structured, a rejected input", true,
			[]string{whole("a", `{"type":"tool_use","id":"c","name":"StructuredOutput","input":{"n":1}}`),
				`{"type":"user","message":{"content":[{"type":"tool_result","tool_use_id":"c","content":"no","is_error":true}]}}`, fine},
			``},
		{"structured, a fence", true, []string{whole("a", `{"type":"text","text":"Here:\n`+"```json\\n{\\\"a\\\": [1]}\\n```"+`\nand {\"b\":1}"}`), fine},
			"+a Here:\n```json\n{\"a\": [1]}\n```\nand {\"b\":1} -a structured-output.start {\"a\":[1]}"},
		{"structured, an array", true, []string{whole("a", `{"type":"text","text":"[1,2]"}`), fine}, `+a [1,2] -a`},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := claudecode.NewDecoder(claudecode.DecoderOptions{RunID: harnesstest.RunID, ThreadID: "thread-1", Structured: c.structured})
			events, err := harnesstest.Decode(d, []byte(strings.Join(c.in, "\n")), 0, harness.End{})
			if err != nil {
				t.Fatal(err)
			}
			if err := harnesstest.CheckRun(events); err != nil {
				t.Error(err)
			}
			if d := cmp.Diff(c.want, short(events)); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
		})
	}
}
