package event

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var meta = json.RawMessage(`{"tanstack":{"model":"sonnet"}}`)

// examples is one event of each type with its line, as spec 07 §5.2 has it.
func examples() []struct {
	ev   Event
	line string
} {
	at := func(ms int64) Common { return Common{Timestamp: ms} }
	return []struct {
		ev   Event
		line string
	}{
		{RunStarted{ThreadID: "thread-1", RunID: "run-1", Common: Common{Timestamp: 1764460800000, Metadata: meta}},
			`{"type":"RUN_STARTED","timestamp":1764460800000,"threadId":"thread-1","runId":"run-1","metadata":{"tanstack":{"model":"sonnet"}}}`},
		{RunStarted{ThreadID: "t", RunID: "r", ParentRunID: "p", ProtocolVersion: "1.0", Input: json.RawMessage(`{"state":{}}`)},
			`{"type":"RUN_STARTED","threadId":"t","runId":"r","parentRunId":"p","protocolVersion":"1.0","input":{"state":{}}}`},
		{Custom{Name: "claude-code.session-id", Value: json.RawMessage(`{"sessionId":"sess-1","model":"claude-sonnet","tools":["Bash"]}`), Common: Common{Timestamp: 1764460800010, Metadata: meta}},
			`{"type":"CUSTOM","timestamp":1764460800010,"name":"claude-code.session-id","value":{"sessionId":"sess-1","model":"claude-sonnet","tools":["Bash"]},"metadata":{"tanstack":{"model":"sonnet"}}}`},
		{ReasoningStart{MessageID: "r1", Common: at(1)}, `{"type":"REASONING_START","timestamp":1,"messageId":"r1"}`},
		{ReasoningMessageStart{MessageID: "r1", Role: "reasoning", Common: at(1)}, `{"type":"REASONING_MESSAGE_START","timestamp":1,"messageId":"r1","role":"reasoning"}`},
		{ReasoningMessageContent{MessageID: "r1", Delta: "I should look.", Common: at(1)}, `{"type":"REASONING_MESSAGE_CONTENT","timestamp":1,"messageId":"r1","delta":"I should look."}`},
		{ReasoningMessageEnd{MessageID: "r1", Common: at(1)}, `{"type":"REASONING_MESSAGE_END","timestamp":1,"messageId":"r1"}`},
		{ReasoningEnd{MessageID: "r1", Common: at(1)}, `{"type":"REASONING_END","timestamp":1,"messageId":"r1"}`},
		{ReasoningEncryptedValue{Subtype: "message", EntityID: "r1", EncryptedValue: "b64…", Common: at(1)},
			`{"type":"REASONING_ENCRYPTED_VALUE","timestamp":1,"subtype":"message","entityId":"r1","encryptedValue":"b64…"}`},
		{TextMessageStart{MessageID: "m1", Role: "assistant", Common: Common{Timestamp: 1, Metadata: meta}},
			`{"type":"TEXT_MESSAGE_START","timestamp":1,"messageId":"m1","role":"assistant","metadata":{"tanstack":{"model":"sonnet"}}}`},
		{TextMessageContent{MessageID: "m1", Delta: "a<b>&\"\\\n\u2028\x00é", Common: at(1)},
			`{"type":"TEXT_MESSAGE_CONTENT","timestamp":1,"messageId":"m1","delta":"a<b>&\"\\\n\u2028\u0000é"}`},
		{TextMessageEnd{MessageID: "m1", Common: at(1)}, `{"type":"TEXT_MESSAGE_END","timestamp":1,"messageId":"m1"}`},
		{ToolCallStart{ToolCallID: "tc1", ToolCallName: "Bash", ParentMessageID: "m1", Common: Common{Timestamp: 1, Metadata: meta}},
			`{"type":"TOOL_CALL_START","timestamp":1,"toolCallId":"tc1","toolCallName":"Bash","parentMessageId":"m1","metadata":{"tanstack":{"model":"sonnet"}}}`},
		{ToolCallArgs{ToolCallID: "tc1", Delta: `{"command":"ls"}`, Common: at(1)},
			`{"type":"TOOL_CALL_ARGS","timestamp":1,"toolCallId":"tc1","delta":"{\"command\":\"ls\"}"}`},
		{ToolCallEnd{ToolCallID: "tc1", Common: Common{Timestamp: 1, Metadata: TanStack{Input: json.RawMessage(`{"command": "ls"}`)}.Metadata()}},
			`{"type":"TOOL_CALL_END","timestamp":1,"toolCallId":"tc1","metadata":{"tanstack":{"input":{"command":"ls"}}}}`},
		{ToolCallResult{MessageID: "tr2", ToolCallID: "tc2", Content: "exit 1", Role: "tool", Common: Common{Timestamp: 1, Metadata: TanStack{State: "output-error"}.Metadata()}},
			`{"type":"TOOL_CALL_RESULT","timestamp":1,"messageId":"tr2","toolCallId":"tc2","content":"exit 1","role":"tool","metadata":{"tanstack":{"state":"output-error"}}}`},
		{StepStarted{StepName: "s"}, `{"type":"STEP_STARTED","stepName":"s"}`},
		{StepFinished{StepName: "s"}, `{"type":"STEP_FINISHED","stepName":"s"}`},
		{StateSnapshot{Snapshot: json.RawMessage(`null`)}, `{"type":"STATE_SNAPSHOT","snapshot":null}`},
		{StateDelta{Delta: json.RawMessage(`[{"op":"remove","path":"/a"}]`)}, `{"type":"STATE_DELTA","delta":[{"op":"remove","path":"/a"}]}`},
		{MessagesSnapshot{Messages: []Message{
			{ID: "u1", Role: "user", Content: Text("hi")},
			{ID: "m1", Role: "assistant", Content: Text("…"), ToolCalls: []ToolCall{{ID: "tc1", Type: "function", Function: ToolFunction{Name: "Bash", Arguments: "{}"}}}},
			{ID: "tool-tc1", Role: "tool", ToolCallID: "tc1", Content: Text("ok")},
		}, Common: at(1)},
			`{"type":"MESSAGES_SNAPSHOT","timestamp":1,"messages":[{"id":"u1","role":"user","content":"hi"},{"id":"m1","role":"assistant","content":"…","toolCalls":[{"id":"tc1","type":"function","function":{"name":"Bash","arguments":"{}"}}]},{"id":"tool-tc1","role":"tool","content":"ok","toolCallId":"tc1"}]}`},
		{RunFinished{ThreadID: "thread-1", RunID: "run-1", Outcome: &Outcome{Type: "success"},
			Usage:  []Usage{{Model: "sonnet", InputTokens: 12, OutputTokens: 34, TotalTokens: 46, CachedInputTokens: 5}},
			Common: Common{Timestamp: 1, Metadata: TanStack{Model: "sonnet", FinishReason: "stop", Usage: json.RawMessage(`{"providerUsageDetails":{"totalCostUsd":0.01}}`)}.Metadata()}},
			`{"type":"RUN_FINISHED","timestamp":1,"threadId":"thread-1","runId":"run-1","outcome":{"type":"success"},"usage":[{"model":"sonnet","inputTokens":12,"outputTokens":34,"totalTokens":46,"cachedInputTokens":5}],"metadata":{"tanstack":{"model":"sonnet","finishReason":"stop","usage":{"providerUsageDetails":{"totalCostUsd":0.01}}}}}`},
		{RunFinished{ThreadID: "t", RunID: "r", Outcome: &Outcome{Type: "interrupt", Interrupts: []json.RawMessage{json.RawMessage(`{"id":"i","reason":"ask"}`)}}},
			`{"type":"RUN_FINISHED","threadId":"t","runId":"r","outcome":{"type":"interrupt","interrupts":[{"id":"i","reason":"ask"}]}}`},
		{RunError{Message: "Claude Code run failed: error_during_execution", Code: "error_during_execution",
			Common: Common{Timestamp: 1, RawEvent: json.RawMessage(`{"x":1}`), Metadata: TanStack{Model: "sonnet", ThreadID: "thread-1", RunID: "run-1"}.Metadata()}},
			`{"type":"RUN_ERROR","timestamp":1,"message":"Claude Code run failed: error_during_execution","code":"error_during_execution","rawEvent":{"x":1},"metadata":{"tanstack":{"model":"sonnet","threadId":"thread-1","runId":"run-1"}}}`},
		{Raw{Name: "FUTURE", JSON: json.RawMessage(`{"x": [1 ,2], "type":"FUTURE"}`)}, `{"x": [1 ,2], "type":"FUTURE"}`},
	}
}

func TestCodec(t *testing.T) {
	seen := map[Type]bool{}
	for _, c := range examples() {
		seen[c.ev.Type()] = true
		got, err := Encode(c.ev)
		if err != nil || string(got) != c.line {
			t.Errorf("Encode(%T) = %s, %v\nwant %s", c.ev, got, err, c.line)
		}
		back, err := Decode([]byte("  " + c.line + "\n"))
		if err != nil {
			t.Errorf("Decode(%s): %v", c.line, err)
			continue
		}
		if d := cmp.Diff(c.ev, back); d != "" {
			t.Errorf("Decode(%s) (-want +got):\n%s", c.line, d)
		}
	}
	for typ := range readers {
		if !seen[typ] {
			t.Errorf("no example of %s", typ)
		}
	}
}

func TestEncodeIsOneLine(t *testing.T) {
	nl := json.RawMessage("{\n\t\"a\": \"b\\n\"\n}")
	for _, ev := range []Event{
		Custom{Name: "x", Value: nl, Common: Common{Metadata: nl, RawEvent: nl}},
		StateSnapshot{Snapshot: nl},
		RunFinished{ThreadID: "t", RunID: "r", Result: nl, Outcome: &Outcome{Type: "interrupt", Interrupts: []json.RawMessage{nl}}},
		MessagesSnapshot{Messages: []Message{{ID: "a", Role: "user", Content: Content{Parts: []Part{{Type: "image", Raw: nl}}}}}},
		Raw{Name: "F", JSON: json.RawMessage("{\"type\":\n\"F\"}")},
	} {
		b, err := Encode(ev)
		if err != nil || bytes.ContainsAny(b, "\r\n") || !json.Valid(b) {
			t.Errorf("Encode(%T) = %q, %v: want one line of JSON", ev, b, err)
		}
	}
}

func TestEncodeRefuses(t *testing.T) {
	bad := json.RawMessage(`{`)
	for _, c := range []struct {
		ev    Event
		field string
	}{
		{StateSnapshot{}, "snapshot"},
		{StateDelta{Delta: json.RawMessage(`{}`)}, "delta"},
		{Custom{Name: "x", Value: bad}, "value"},
		{TextMessageEnd{Common: Common{Metadata: json.RawMessage(`[]`)}}, "metadata"},
		{TextMessageEnd{Common: Common{Metadata: bad}}, "metadata"},
		{TextMessageEnd{Common: Common{Timestamp: -1}}, "timestamp"},
		{RunError{Message: "m", Usage: []Usage{{InputTokens: -1}}}, "usage"},
		{Raw{Name: "X", JSON: json.RawMessage(`{"type":"Y"}`)}, "type"},
		{nil, ""},
	} {
		b, err := Append([]byte("before"), c.ev)
		var fe *FieldError
		if !errors.As(err, &fe) || fe.Field != c.field || string(b) != "before" {
			t.Errorf("Append(%T) = %q, %v, want an error of field %q and what was there", c.ev, b, err, c.field)
		}
	}
}

func TestDecodeRefuses(t *testing.T) {
	for _, c := range []struct{ in, field string }{
		{`{"type":"RUN_ERROR","message":"m","code":500}`, "code"},
		{`{"type":"RUN_ERROR","code":"x"}`, "message"},
		{`{"type":"RUN_ERROR","message":null}`, "message"},
		{`{"type":"RUN_FINISHED","threadId":"t","runId":"r","usage":{"inputTokens":1}}`, "usage"},
		{`{"type":"RUN_FINISHED","threadId":"t","runId":"r","usage":[{"inputTokens":"1"}]}`, "usage.inputTokens"},
		{`{"type":"TEXT_MESSAGE_CONTENT","messageId":"m"}`, "delta"},
		{`{"type":"TEXT_MESSAGE_CONTENT","MessageID":"m","delta":"d"}`, "messageId"},
		{`{"type":"TOOL_CALL_RESULT","messageId":"m","toolCallId":"t","content":[]}`, "content"},
		{`{"type":"TEXT_MESSAGE_END","messageId":"m","timestamp":1.5}`, "timestamp"},
		{`{"type":"TEXT_MESSAGE_END","messageId":"m","metadata":[]}`, "metadata"},
		{`{"type":"CUSTOM","name":"x"}`, "value"},
		{`{"type":"STATE_DELTA","delta":{}}`, "delta"},
		{`{"type":7}`, "type"},
		{`{"x":1}`, "type"},
		{`{"type":"CUSTOM","name":"x","value":{}}x`, ""},
		{`{"type":"CUSTOM","name":"x","value":}`, ""},
		{"{\"type\":\"CUSTOM\",\"name\":\"\xff\",\"value\":1}", ""},
		{``, ""},
		{`[]`, ""},
	} {
		_, err := Decode([]byte(c.in))
		var fe *FieldError
		if !errors.As(err, &fe) || fe.Field != c.field {
			t.Errorf("Decode(%s) error = %v, want one of field %q", c.in, err, c.field)
		}
	}
}

func TestDecodeTolerates(t *testing.T) {
	for _, c := range []struct {
		in   string
		want Event
	}{
		{`{"type":"TOOL_CALL_START","toolCallId":"t","toolCallName":"n","parentMessageId":null,"metadata":null,"rawEvent":null,"toolName":"n"}`, ToolCallStart{ToolCallID: "t", ToolCallName: "n"}},
		{`{"typ\u0065":"TEXT_MESSAGE_END","messageId":"a","messageId":"b"}`, TextMessageEnd{MessageID: "b"}},
	} {
		got, err := Decode([]byte(c.in))
		if err != nil || !cmp.Equal(got, c.want) {
			t.Errorf("Decode(%s) = %v, %v, want %v", c.in, got, err, c.want)
		}
	}
}

// TestUnified reads the sequence that all clients accepted.
func TestUnified(t *testing.T) {
	b, err := os.ReadFile("testdata/unified-events.ndjson")
	if err != nil {
		t.Fatal(err)
	}
	var events []Event
	for line := range strings.Lines(string(b)) {
		ev, err := Decode([]byte(line))
		if err != nil {
			t.Fatal(err)
		}
		events = append(events, ev)
		out, err := Encode(ev)
		if err != nil {
			t.Fatal(err)
		}
		if got, want := canonicalObject(nil, out, false), canonicalObject(nil, []byte(line), false); !bytes.Equal(got, want) {
			t.Errorf("reads back as %s\nwant %s", got, want)
		}
	}
	if len(events) != 23 {
		t.Errorf("%d events, want 23", len(events))
	}
	if err := Validate(events); err != nil {
		t.Error(err)
	}
}

func FuzzDecode(f *testing.F) {
	for _, c := range examples() {
		f.Add([]byte(c.line))
	}
	f.Add([]byte(`{"type":"CUSTOM","name":"\ud83d","value":[1e400,{"a":"\u2028"}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		ev, err := Decode(b)
		if err != nil {
			return
		}
		one, err := Encode(ev)
		if err != nil {
			t.Fatalf("Encode(Decode(%q)): %v", b, err)
		}
		if bytes.ContainsAny(one, "\r\n") {
			t.Fatalf("Encode(Decode(%q)) = %q has line ends", b, one)
		}
		again, err := Decode(one)
		if err != nil {
			t.Fatalf("Decode(%q): %v", one, err)
		}
		two, err := Encode(again)
		if err != nil || !bytes.Equal(one, two) {
			t.Fatalf("%q reads back as %q, %v", one, two, err)
		}
		if Fingerprint(ev) != Fingerprint(again) || Fingerprint(ev) == [32]byte{} {
			t.Fatalf("the fingerprint of %q changes on the way", one)
		}
	})
}

func BenchmarkEncodeDelta(b *testing.B) {
	ev := TextMessageContent{MessageID: "msg_0123456789", Delta: "a few words of an answer ", Common: Common{Timestamp: 1764460800000}}
	buf := make([]byte, 0, 1024)
	b.ReportAllocs()
	for b.Loop() {
		buf, _ = Append(buf[:0], ev)
	}
}
