package server_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/aisandbox-go/aisandbox/chat"
	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/store"
)

// asking ends a run with questions; bound ones can be answered.
func asking(run string, ids ...string) event.Event {
	ev := event.RunFinished{Outcome: &event.Outcome{Type: "interrupt"}}
	for i, id := range ids {
		ev.Outcome.Interrupts = append(ev.Outcome.Interrupts, json.RawMessage(fmt.Sprintf(
			`{"id":%q,"reason":"sandbox_policy_ask","metadata":{"tanstack:interruptBinding":{"v":1,"kind":"generic","interruptId":%[1]q,"interruptedRunId":%[2]q,"generation":%[3]d}}}`,
			id, run, i)))
	}
	return ev
}

func TestRejectedResume(t *testing.T) {
	type e = map[string]any
	entry := func(id string) e { return e{"interruptId": id, "status": "resolved", "payload": true} }
	for _, tt := range []struct {
		name  string
		edit  map[string]any
		codes []string
		scope string
		ids   any
	}{
		{"none", e{}, []string{"unknown-interrupt"}, "batch", []any{"i1", "i2"}},
		{"one of two", e{"resume": []any{entry("i1")}}, []string{"incomplete-batch"}, "item", "i2"},
		{"an unknown one", e{"resume": []any{entry("i1"), entry("i2"), entry("x")}}, []string{"unknown-interrupt"}, "item", "x"},
		{"one twice", e{"resume": []any{entry("i1"), entry("i1"), entry("i2")}}, []string{"conflict"}, "item", "i1"},
		{"of another run", e{"resume": []any{entry("i1"), entry("i2")}, "parentRunId": "zzz"}, []string{"stale"}, "batch", []any{"i1", "i2"}},
		{"two wrong ones", e{"resume": []any{entry("x"), entry("i1")}}, []string{"unknown-interrupt", "incomplete-batch"}, "item", "x"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a := says(asking("r", "i1", "i2"))
			h := newHouse(t, a, nil)
			if got := shown(frames(t, h.post(t, body("t", "r", "hi")).Body)); got[len(got)-1] != "RUN_FINISHED" {
				t.Fatalf("got %v", got)
			}
			tt.edit["runId"] = "r2"
			w := h.post(t, edit(t, tt.edit))
			fs := frames(t, w.Body)
			legal(t, fs)
			if w.Code != 200 || len(fs) != 3 || show(fs[2].ev) != "RUN_ERROR "+tt.codes[0] {
				t.Fatalf("%d %v", w.Code, shown(fs))
			}
			var md struct {
				Tanstack struct {
					ThreadID, RunID string
					InterruptErrors []map[string]any
				}
			}
			if err := json.Unmarshal(fs[2].ev.Base().Metadata, &md); err != nil {
				t.Fatal(err)
			}
			errs := md.Tanstack.InterruptErrors
			var codes []string
			for _, e := range errs {
				codes = append(codes, e["code"].(string))
				for _, k := range []string{"scope", "threadId", "interruptedRunId", "generation", "message", "source", "retryable"} {
					if _, ok := e[k]; !ok {
						t.Errorf("%s is missing: %v", k, e)
					}
				}
			}
			if diff := cmp.Diff(tt.codes, codes); diff != "" || md.Tanstack.ThreadID != "t" || md.Tanstack.RunID != "r2" {
				t.Fatalf("%s%s", fs[2].raw, diff)
			}
			got := errs[0]["interruptId"]
			if tt.scope == "batch" {
				got = errs[0]["interruptIds"]
			}
			if diff := cmp.Diff(tt.ids, got); diff != "" || errs[0]["scope"] != tt.scope || errs[0]["interruptedRunId"] != "r" && tt.scope == "batch" {
				t.Errorf("%s%s", fs[2].raw, diff)
			}
			if order, _ := a.started(); len(order) != 1 {
				t.Errorf("agents %v", order)
			}
			// They stay pending, so that the next try can be right.
			pending, err := h.store.Interrupts.Pending(t.Context(), store.Thread{ID: "t"})
			if err != nil || len(pending) != 2 {
				t.Errorf("%d pending: %v", len(pending), err)
			}
		})
	}
}

func TestAcceptedResume(t *testing.T) {
	a := says(asking("r", "i1"))
	h := newHouse(t, a, nil)
	h.post(t, body("t", "r", "hi"))
	w := h.do(t, "GET", chatPath+"?threadId=t", "")
	want := `"activeRun":null,"interrupts":{"runId":"r","pending":[{"id":"i1",`
	if got := w.Body.String(); !json.Valid([]byte(got)) || !strings.Contains(got, want) {
		t.Errorf("hydrate %s", got)
	}
	a.play = says(event.RunError{Message: "broke", Code: "broke"}).play
	answer := map[string]any{"runId": "r2", "parentRunId": "r", "resume": []any{map[string]any{"interruptId": "i1", "status": "resolved", "payload": true}}}
	if got := shown(frames(t, h.post(t, edit(t, answer)).Body)); got[len(got)-1] != "RUN_ERROR broke" {
		t.Fatalf("got %v", got)
	}
	pending := func() int {
		p, err := h.store.Interrupts.Pending(t.Context(), store.Thread{ID: "t"})
		if err != nil {
			t.Fatal(err)
		}
		return len(p)
	}
	if pending() != 1 {
		t.Error("a run that failed used the answer up")
	}
	a.play = says(finished).play
	answer["runId"] = "r3"
	if got := shown(frames(t, h.post(t, edit(t, answer)).Body)); got[len(got)-1] != "RUN_FINISHED" {
		t.Fatalf("got %v", got)
	}
	if pending() != 0 {
		t.Error("the answer wasn't committed")
	}
	if in := a.inputs[len(a.inputs)-1]; len(in.Resume) != 1 || string(in.Resume[0].Payload) != "true" || in.ParentRunID != "r" {
		t.Errorf("the definition saw %+v", in)
	}
	// Nothing is pending now: a stale answer is refused, new input is not.
	answer["runId"] = "r4"
	if got := shown(frames(t, h.post(t, edit(t, answer)).Body)); got[len(got)-1] != "RUN_ERROR unknown-interrupt" {
		t.Errorf("got %v", got)
	}
	if got := shown(frames(t, h.post(t, body("t", "r5", "hi")).Body)); got[len(got)-1] != "RUN_FINISHED" {
		t.Errorf("got %v", got)
	}
}

// What this server's clients can't answer is nobody's gate.
func TestForeignInterruptIsNoGate(t *testing.T) {
	ev := event.RunFinished{Outcome: &event.Outcome{Type: "interrupt", Interrupts: []json.RawMessage{json.RawMessage(`{"id":"i1","reason":"tool_call"}`)}}}
	a := says(ev)
	h := newHouse(t, a, nil)
	h.post(t, body("t", "r", "hi"))
	a.play = says(finished).play
	if got := shown(frames(t, h.post(t, body("t", "r2", "hi")).Body)); got[len(got)-1] != "RUN_FINISHED" {
		t.Errorf("got %v", got)
	}
}

// A run that waited meets the question that the one before it ended with.
func TestQueuedBehindAQuestion(t *testing.T) {
	for name, last := range map[string]event.Event{
		"unknown-interrupt": asking("r0", "i1"),
		"":                  event.RunFinished{Outcome: &event.Outcome{Type: "interrupt", Interrupts: []json.RawMessage{json.RawMessage(`{"id":"i1","reason":"tool_call"}`)}}},
	} {
		t.Run(name, func(t *testing.T) {
			gate := make(chan struct{})
			a := &agent{}
			a.play = func(_ context.Context, r *chat.Run, say func(...event.Event)) {
				if r.ID() != "r0" {
					say(finished)
					return
				}
				<-gate
				say(last)
			}
			h := newHouse(t, a, nil)
			base := h.listen(t)
			open(t, "POST", base+chatPath, body("t", "r0", "hi")).until("run.accepted")
			s := open(t, "POST", base+chatPath, body("t", "r1", "hi"))
			s.until("queued 1")
			close(gate)
			want := "RUN_FINISHED"
			if name != "" {
				want = "RUN_ERROR " + name
			}
			if got := s.rest(); got[len(got)-1] != want {
				t.Errorf("got %v", got)
			}
		})
	}
}
