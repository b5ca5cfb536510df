package event

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// brief writes events as TYPE(id …) for tables.
func brief(events []Event) string {
	var b strings.Builder
	for i, ev := range events {
		if i > 0 {
			b.WriteString(" ")
		}
		switch e := ev.(type) {
		case RunStarted:
			fmt.Fprintf(&b, "run(%s)", e.RunID)
		case RunFinished:
			b.WriteString("ok")
			if e.Outcome != nil && e.Outcome.Type != "success" {
				fmt.Fprintf(&b, "(%s %d)", e.Outcome.Type, len(e.Outcome.Interrupts))
			}
		case RunError:
			fmt.Fprintf(&b, "err(%s)", e.Message)
		case TextMessageStart:
			fmt.Fprintf(&b, "text+(%s)", e.MessageID)
		case TextMessageContent:
			fmt.Fprintf(&b, "text(%s)", e.MessageID)
		case TextMessageEnd:
			fmt.Fprintf(&b, "text-(%s)", e.MessageID)
		case ToolCallStart:
			fmt.Fprintf(&b, "call+(%s in %q)", e.ToolCallID, e.ParentMessageID)
		case ToolCallArgs:
			fmt.Fprintf(&b, "args(%s)", e.ToolCallID)
		case ToolCallEnd:
			fmt.Fprintf(&b, "call-(%s)", e.ToolCallID)
		case ToolCallResult:
			fmt.Fprintf(&b, "result(%s %s)", e.ToolCallID, e.Content)
		case ReasoningStart:
			fmt.Fprintf(&b, "span+(%s)", e.MessageID)
		case ReasoningMessageStart:
			fmt.Fprintf(&b, "think+(%s %s)", e.MessageID, e.Role)
		case ReasoningMessageContent:
			fmt.Fprintf(&b, "think(%s)", e.MessageID)
		case ReasoningMessageEnd:
			fmt.Fprintf(&b, "think-(%s)", e.MessageID)
		case ReasoningEnd:
			fmt.Fprintf(&b, "span-(%s)", e.MessageID)
		case StepStarted:
			fmt.Fprintf(&b, "step+(%s)", e.StepName)
		case StepFinished:
			fmt.Fprintf(&b, "step-(%s)", e.StepName)
		case Custom:
			fmt.Fprintf(&b, "custom(%s %s)", e.Name, e.Value)
		default:
			b.WriteString(string(ev.Type()))
		}
	}
	return b.String()
}

var (
	run    = RunStarted{ThreadID: "t", RunID: "r"}
	ok     = RunFinished{ThreadID: "t", RunID: "r"}
	tStart = TextMessageStart{MessageID: "m", Role: "assistant"}
	tMore  = TextMessageContent{MessageID: "m", Delta: "x"}
	tEnd   = TextMessageEnd{MessageID: "m"}
	cStart = ToolCallStart{ToolCallID: "c", ToolCallName: "Bash"}
	cArgs  = ToolCallArgs{ToolCallID: "c", Delta: "{}"}
	cEnd   = ToolCallEnd{ToolCallID: "c"}
	result = ToolCallResult{MessageID: "tr", ToolCallID: "c", Content: "done", Role: "tool"}
)

func TestGuard(t *testing.T) {
	interrupts := func(js ...string) RunFinished {
		o := &Outcome{Type: "interrupt"}
		for _, j := range js {
			o.Interrupts = append(o.Interrupts, json.RawMessage(j))
		}
		return RunFinished{Outcome: o}
	}
	for _, c := range []struct {
		name    string
		in      []Event
		want    string
		dropped int
	}{
		{"legal", []Event{run, tStart, tMore, tEnd, cStart, cArgs, cEnd, result, ok},
			`run(r) text+(m) text(m) text-(m) call+(c in "m") args(c) call-(c) result(c done) ok`, 0},
		{"rule 1: no start", []Event{Custom{Name: "run.accepted"}, ok}, `run(r) custom(run.accepted {}) ok`, 0},
		{"rule 1: an error first", []Event{RunError{Message: "m"}}, `run(r) err(m)`, 0},
		{"rule 2: two starts", []Event{run, run, RunStarted{RunID: "other"}, ok}, `run(r) ok`, 1},
		{"rule 3: after the end", []Event{run, ok, Custom{Name: "x"}, RunError{Message: "m"}, run}, `run(r) ok`, 3},
		{"rule 4: text without a start", []Event{run, tMore, tMore, tEnd, ok}, `run(r) text+(m) text(m) text(m) text-(m) ok`, 0},
		{"rule 4: end without a start", []Event{run, tEnd, ok}, `run(r) ok`, 1},
		{"rule 4: start twice", []Event{run, tStart, tStart, tEnd, ok}, `run(r) text+(m) text-(m) ok`, 1},
		{"rule 4: again after its end", []Event{run, tStart, tEnd, tStart, tEnd, ok}, `run(r) text+(m) text-(m) text+(m) text-(m) ok`, 0},
		{"rule 5: arguments without a call", []Event{run, cArgs, cEnd, ok}, `run(r) ok`, 2},
		{"rule 5: ended twice", []Event{run, cStart, cEnd, cEnd, result, ok}, `run(r) call+(c in "") call-(c) result(c done) ok`, 1},
		{"rule 5: a result for nobody", []Event{run, result, ok}, `run(r) result(c done) ok`, 0},
		{"rule 5: a result before the end", []Event{run, cStart, result, cEnd, ok}, `run(r) call+(c in "") result(c done) call-(c) ok`, 0},
		{"rule 6: reasoning without a start", []Event{run, ReasoningMessageContent{MessageID: "x", Delta: "d"}, ReasoningMessageEnd{MessageID: "x"}, ReasoningEnd{MessageID: "x"}, ok},
			`run(r) think+(x reasoning) think(x) think-(x) ok`, 1},
		{"rule 6: a span ends before its message", []Event{run, ReasoningStart{MessageID: "x"}, ReasoningMessageStart{MessageID: "x"}, ReasoningEnd{MessageID: "x"}, ok},
			`run(r) span+(x) think+(x reasoning) think-(x) span-(x) ok`, 0},
		{"rule 7: all open at the end", []Event{run, StepStarted{StepName: "s"}, tStart, cStart, ToolCallStart{ToolCallID: "d", ToolCallName: "n"}, ToolCallEnd{ToolCallID: "d"}, ReasoningStart{MessageID: "x"}, ReasoningMessageStart{MessageID: "x"}, ok},
			`run(r) step+(s) text+(m) call+(c in "m") call+(d in "m") call-(d) span+(x) think+(x reasoning) think-(x) call-(c) text-(m) span-(x) step-(s) result(c {"status":"interrupted"}) result(d {"status":"interrupted"}) ok`, 0},
		{"rule 7: all open at an error", []Event{run, tStart, cStart, RunError{}},
			`run(r) text+(m) call+(c in "m") call-(c) text-(m) result(c {"status":"interrupted"}) err(Unknown error occurred)`, 0},
		{"rule 7: empty ids", []Event{run, TextMessageStart{}, TextMessageContent{Delta: "x"}, ToolCallStart{ToolCallName: "n"}, ToolCallStart{ToolCallID: "i"}, ToolCallResult{}, StepStarted{}, Custom{}, ok}, `run(r) ok`, 7},
		{"rule 7: steps", []Event{run, StepFinished{StepName: "s"}, StepStarted{StepName: "s"}, StepStarted{StepName: "s"}, ok}, `run(r) step+(s) step-(s) ok`, 2},
		{"rule 8: interleaved", []Event{run, tStart, cStart, tMore, cEnd, tEnd, result, ok}, `run(r) text+(m) call+(c in "m") text(m) call-(c) text-(m) result(c done) ok`, 0},
		{"rule 9: no interrupts", []Event{run, interrupts(`{"id":"x"}`, `5`)}, `run(r) err(the run stopped for an interrupt that names nothing)`, 0},
		{"rule 9: an interrupt", []Event{run, interrupts(`{"id":"x"}`, `{"id":"x","reason":"ask"}`)}, `run(r) ok(interrupt 1)`, 0},
		{"rule 9: cancelled", []Event{run, RunFinished{Outcome: &Outcome{Type: "cancelled"}}}, `run(r) err(Request aborted)`, 0},
		{"rule 9: unknown type", []Event{run, Raw{Name: "X", JSON: json.RawMessage(`{"type":"X"}`)}, ok}, `run(r) ok`, 1},
		{"broken JSON", []Event{run, Custom{Name: "x", Value: json.RawMessage(`{`)}, StateSnapshot{}, StateDelta{Delta: json.RawMessage(`{}`)}, ok}, `run(r) ok`, 3},
		{"empty deltas", []Event{run, tStart, TextMessageContent{MessageID: "m"}, tEnd, cStart, ToolCallArgs{ToolCallID: "c"}, cEnd, result, ok},
			`run(r) text+(m) text-(m) call+(c in "m") call-(c) result(c done) ok`, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			dropped := 0
			g := NewGuard(GuardOptions{RunID: "r", ThreadID: "t", Dropped: func(Event, string) { dropped++ }})
			var got []Event
			for _, ev := range c.in {
				got = append(got, g.Push(ev)...)
			}
			if d := cmp.Diff(c.want, brief(got)); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
			if dropped != c.dropped {
				t.Errorf("%d events dropped, want %d", dropped, c.dropped)
			}
			if err := Validate(got); err != nil {
				t.Error(err)
			}
			if g.Done() != true {
				t.Error("not done")
			}
		})
	}
}

func TestGuardRepairsFields(t *testing.T) {
	n := 0
	g := NewGuard(GuardOptions{RunID: "r", ThreadID: "t", NewID: func() string { n++; return fmt.Sprintf("id-%d", n) }})
	var got []Event
	for _, ev := range []Event{
		RunStarted{RunID: "x", ThreadID: "y", Input: json.RawMessage(`{`)},
		TextMessageStart{MessageID: "m", Role: "tool", Common: Common{Timestamp: -5, Metadata: json.RawMessage(`null`), RawEvent: json.RawMessage(`null`)}},
		ToolCallStart{ToolCallID: "c", ToolCallName: "n"},
		ToolCallResult{ToolCallID: "c", Content: "a", MessageID: "m"},
		ToolCallResult{ToolCallID: "c", Content: "b"},
		RunFinished{RunID: "x", ThreadID: "z", Usage: []Usage{{InputTokens: -3, OutputTokens: 2}}, Result: json.RawMessage(`nope`)},
	} {
		got = append(got, g.Push(ev)...)
	}
	want := []Event{
		RunStarted{RunID: "r", ThreadID: "t"},
		TextMessageStart{MessageID: "m", Role: "assistant"},
		ToolCallStart{ToolCallID: "c", ToolCallName: "n", ParentMessageID: "m"},
		ToolCallResult{ToolCallID: "c", Content: "a", MessageID: "id-1", Role: "tool"},
		ToolCallResult{ToolCallID: "c", Content: "b", MessageID: "id-2", Role: "tool"},
		ToolCallEnd{ToolCallID: "c"},
		TextMessageEnd{MessageID: "m"},
		RunFinished{RunID: "r", ThreadID: "t", Usage: []Usage{{OutputTokens: 2}}},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	if out := g.Close(RunError{Message: "late"}); out != nil {
		t.Errorf("Close after the end gives %s", brief(out))
	}
	open := NewGuard(GuardOptions{RunID: "r", ThreadID: "t"})
	if got, want := brief(open.Close(RunError{Message: "died"})), "run(r) err(died)"; got != want {
		t.Errorf("Close gives %s, want %s", got, want)
	}
}

func TestValidate(t *testing.T) {
	for _, c := range []struct {
		name string
		in   []Event
		rule int // -1: legal
		at   int
	}{
		{"legal", []Event{run, tStart, tMore, tEnd, cStart, result, cArgs, cEnd, ok}, -1, 0},
		{"two runs", []Event{run, ok, run, RunError{Message: "m"}, run, ok}, -1, 0},
		{"an error alone", []Event{RunError{Message: "m"}}, -1, 0},
		{"an error after the end", []Event{run, ok, RunError{Message: "m"}}, -1, 0},
		{"empty", nil, 10, 0},
		{"no end", []Event{run, tStart}, 10, 2},
		{"custom first", []Event{Custom{Name: "run.accepted"}, run, ok}, 1, 0},
		{"two starts", []Event{run, run}, 2, 1},
		{"custom after the end", []Event{run, ok, Custom{Name: "x"}}, 3, 2},
		{"two errors", []Event{run, RunError{Message: "m"}, RunError{Message: "m"}}, 3, 2},
		{"text not open", []Event{run, tMore}, 4, 1},
		{"text opened twice", []Event{run, tStart, tStart}, 4, 2},
		{"text ended twice", []Event{run, tStart, tEnd, tEnd}, 4, 3},
		{"args not open", []Event{run, cArgs}, 5, 1},
		{"call ended twice", []Event{run, cStart, cEnd, cEnd}, 5, 3},
		{"result as the text", []Event{run, tStart, ToolCallResult{MessageID: "m", ToolCallID: "c"}}, 5, 2},
		{"reasoning not open", []Event{run, ReasoningMessageContent{MessageID: "x"}}, 6, 1},
		{"span not open", []Event{run, ReasoningEnd{MessageID: "x"}}, 6, 1},
		{"open at the end", []Event{run, tStart, ok}, 7, 2},
		{"no result", []Event{run, cStart, cEnd, ok}, 7, 3},
		{"no result at an error", []Event{run, cStart, RunError{Message: "m"}}, 7, 2},
		{"another run id", []Event{run, RunFinished{RunID: "x", ThreadID: "t"}}, 7, 1},
		{"empty id", []Event{run, TextMessageStart{Role: "user"}}, 7, 1},
		{"empty message", []Event{run, RunError{}}, 7, 1},
		{"step twice", []Event{run, StepStarted{StepName: "s"}, StepStarted{StepName: "s"}}, 7, 2},
		{"role of reasoning", []Event{run, ReasoningMessageStart{MessageID: "x", Role: "assistant"}}, 9, 1},
		{"role tool", []Event{run, TextMessageStart{MessageID: "x", Role: "tool"}}, 9, 1},
		{"no interrupts", []Event{run, RunFinished{RunID: "r", ThreadID: "t", Outcome: &Outcome{Type: "interrupt"}}}, 9, 1},
		{"cancelled", []Event{run, RunFinished{RunID: "r", ThreadID: "t", Outcome: &Outcome{Type: "cancelled"}}}, 9, 1},
		{"raw", []Event{run, Raw{Name: "X", JSON: json.RawMessage(`{"type":"X"}`)}}, 9, 1},
		{"malformed", []Event{run, StateSnapshot{}}, 0, 1},
		{"nil", []Event{run, nil}, 0, 1},
	} {
		err := Validate(c.in)
		oe, is := err.(*OrderError)
		switch {
		case c.rule < 0 && err != nil:
			t.Errorf("%s: %v", c.name, err)
		case c.rule >= 0 && (!is || oe.Rule != c.rule || oe.Index != c.at):
			t.Errorf("%s: %v, want rule %d at %d", c.name, err, c.rule, c.at)
		}
	}
}

// genEvent draws an event with ids from a small set, so that they collide, and
// with fields that may be wrong.
func genEvent() *rapid.Generator[Event] {
	id := rapid.SampledFrom([]string{"", "a", "b", "c"})
	js := rapid.SampledFrom([]string{"", "null", "{}", `{"tanstack":{"model":"m"}}`, "[]", "[1]", "{", "5"})
	return rapid.Custom(func(t *rapid.T) Event {
		c := Common{
			Timestamp: rapid.SampledFrom([]int64{0, 1, -1, 1 << 60}).Draw(t, "ts"),
			Metadata:  json.RawMessage(js.Draw(t, "meta")),
			RawEvent:  json.RawMessage(js.Draw(t, "raw")),
		}
		s, v := id.Draw(t, "id"), json.RawMessage(js.Draw(t, "value"))
		role := rapid.SampledFrom([]string{"", "assistant", "tool", "user"}).Draw(t, "role")
		return rapid.SampledFrom([]Event{
			RunStarted{RunID: s, ThreadID: s, Input: v, Common: c},
			RunFinished{RunID: s, ThreadID: s, Result: v, Usage: []Usage{{InputTokens: c.Timestamp}}, Common: c},
			RunFinished{Outcome: &Outcome{Type: role, Interrupts: []json.RawMessage{v}}, Common: c},
			RunFinished{Outcome: &Outcome{Type: "interrupt", Interrupts: []json.RawMessage{v, json.RawMessage(`{"id":"i","reason":"r"}`)}}},
			RunError{Message: s, Code: s, Common: c},
			StepStarted{StepName: s, Common: c},
			StepFinished{StepName: s, Common: c},
			TextMessageStart{MessageID: s, Role: role, Common: c},
			TextMessageContent{MessageID: s, Delta: role, Common: c},
			TextMessageEnd{MessageID: s, Common: c},
			ReasoningStart{MessageID: s, Common: c},
			ReasoningMessageStart{MessageID: s, Role: role, Common: c},
			ReasoningMessageContent{MessageID: s, Delta: role, Common: c},
			ReasoningMessageEnd{MessageID: s, Common: c},
			ReasoningEnd{MessageID: s, Common: c},
			ReasoningEncryptedValue{Subtype: "message", EntityID: s, Common: c},
			ToolCallStart{ToolCallID: s, ToolCallName: role, ParentMessageID: s, Common: c},
			ToolCallArgs{ToolCallID: s, Delta: role, Common: c},
			ToolCallEnd{ToolCallID: s, Common: c},
			ToolCallResult{MessageID: rapid.SampledFrom([]string{"", "a", "x"}).Draw(t, "mid"), ToolCallID: s, Content: role, Role: role, Common: c},
			StateSnapshot{Snapshot: v, Common: c},
			StateDelta{Delta: v, Common: c},
			MessagesSnapshot{Common: c},
			Custom{Name: s, Value: v, Common: c},
			Raw{Name: Type(s), JSON: v},
			nil,
		}).Draw(t, "event")
	})
}

// TestGuardMakesAnythingLegal is the guard's whole promise.
func TestGuardMakesAnythingLegal(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		in := rapid.SliceOfN(genEvent(), 0, 60).Draw(t, "events")
		pass := func(in []Event) []Event {
			g := NewGuard(GuardOptions{RunID: "run-1", ThreadID: "thread-1"})
			var out []Event
			for _, ev := range in {
				out = append(out, g.Push(ev)...)
			}
			return append(out, g.Close(RunError{Message: "the stream ended"})...)
		}
		out := pass(in)
		if err := Validate(out); err != nil {
			t.Fatalf("%v\nin  %s\nout %s", err, brief(in), brief(out))
		}
		// What is legal goes through as it is.
		if d := cmp.Diff(out, pass(out)); d != "" {
			t.Fatalf("the guard changes what it made: %s", d)
		}
	})
}
