package event

import (
	"errors"
	"fmt"
)

// OrderError says which event of a sequence breaks a rule of spec 07 §6.
type OrderError struct {
	Index int // of the event; the length of the sequence when its end is wrong
	Type  Type
	Rule  int // as numbered in spec 07 §6; 0: the event itself is malformed
	Why   string
}

func (e *OrderError) Error() string {
	return fmt.Sprintf("event: %d (%s): rule %d: %s", e.Index, e.Type, e.Rule, e.Why)
}

// Validate checks a whole stream against spec 07 §6 as its strictest client does,
// and against what this project adds: the stream ends with a terminal event, and
// by then each tool call has its result. It repairs nothing; [Guard] does.
func Validate(events []Event) error {
	v := validator{open: map[openKey]bool{}, pending: map[string]bool{}}
	for i, ev := range events {
		if ev == nil {
			return &OrderError{i, "", 0, "there is no event"}
		}
		if _, err := Encode(ev); err != nil {
			return &OrderError{i, ev.Type(), 0, err.Error()}
		}
		if rule, why := v.check(ev); why != "" {
			return &OrderError{i, ev.Type(), rule, why}
		}
	}
	if v.running || len(events) == 0 {
		return &OrderError{len(events), "", 10, "the stream ends without a terminal event"}
	}
	return nil
}

type validator struct {
	running  bool // between RUN_STARTED and a terminal
	last     Type // the terminal before, if not running
	run      RunStarted
	open     map[openKey]bool
	pending  map[string]bool
	lastText string // the last text message's id
}

func (v *validator) check(ev Event) (rule int, why string) {
	switch e := ev.(type) {
	case RunStarted:
		switch {
		case v.running:
			return 2, "a run is open"
		case e.RunID == "" || e.ThreadID == "":
			return 7, "an id is empty"
		}
		*v = validator{running: true, run: e, open: map[openKey]bool{}, pending: map[string]bool{}}
		return 0, ""
	case RunError:
		switch {
		case !v.running && v.last == TypeRunError:
			return 3, "a RUN_ERROR came before"
		case e.Message == "":
			return 7, "the message is empty"
		}
		v.running, v.last = false, TypeRunError
		return v.unanswered()
	}
	if !v.running {
		if v.last == "" {
			return 1, "the first event must be RUN_STARTED"
		}
		return 3, "the run has ended"
	}
	switch e := ev.(type) {
	case RunFinished:
		if len(v.open) > 0 {
			return 7, fmt.Sprintf("%d things are open", len(v.open))
		}
		if e.RunID != v.run.RunID || e.ThreadID != v.run.ThreadID {
			return 7, "the ids are not those of RUN_STARTED"
		}
		if err := checkOutcome(e.Outcome); err != nil {
			return 9, err.Error()
		}
		v.running, v.last = false, TypeRunFinished
		return v.unanswered()
	case TextMessageStart:
		if !textRole(e.Role) {
			return 9, fmt.Sprintf("role %q", e.Role)
		}
		v.lastText = e.MessageID
		return v.begin(4, openText, e.MessageID)
	case TextMessageContent:
		return v.within(4, openText, e.MessageID)
	case TextMessageEnd:
		return v.end(4, openText, e.MessageID)
	case ToolCallStart:
		if e.ToolCallName == "" {
			return 7, "the name is empty"
		}
		v.pending[e.ToolCallID] = true
		return v.begin(5, openCall, e.ToolCallID)
	case ToolCallArgs:
		return v.within(5, openCall, e.ToolCallID)
	case ToolCallEnd:
		return v.end(5, openCall, e.ToolCallID)
	case ToolCallResult:
		if e.MessageID == "" || e.ToolCallID == "" || e.MessageID == v.lastText {
			return 5, "a result needs a message id of its own"
		}
		delete(v.pending, e.ToolCallID)
	case ReasoningStart:
		return v.begin(6, openSpan, e.MessageID)
	case ReasoningMessageStart:
		if e.Role != "reasoning" {
			return 9, fmt.Sprintf("role %q", e.Role)
		}
		return v.begin(6, openReasoning, e.MessageID)
	case ReasoningMessageContent:
		return v.within(6, openReasoning, e.MessageID)
	case ReasoningMessageEnd:
		return v.end(6, openReasoning, e.MessageID)
	case ReasoningEnd:
		return v.end(6, openSpan, e.MessageID)
	case StepStarted:
		return v.begin(7, openStep, e.StepName)
	case StepFinished:
		return v.end(7, openStep, e.StepName)
	case Custom:
		if e.Name == "" {
			return 9, "the name is empty"
		}
	case Raw:
		return 9, "clients fail on a type that they do not know"
	}
	return 0, ""
}

func (v *validator) begin(rule int, k openKind, id string) (int, string) {
	if id == "" {
		return 7, "the id is empty"
	}
	if v.open[openKey{k, id}] {
		return rule, fmt.Sprintf("%q is open already", id)
	}
	v.open[openKey{k, id}] = true
	return 0, ""
}

func (v *validator) within(rule int, k openKind, id string) (int, string) {
	if !v.open[openKey{k, id}] {
		return rule, fmt.Sprintf("%q is not open", id)
	}
	return 0, ""
}

func (v *validator) end(rule int, k openKind, id string) (int, string) {
	if !v.open[openKey{k, id}] {
		return rule, fmt.Sprintf("%q is not open", id)
	}
	delete(v.open, openKey{k, id})
	return 0, ""
}

func (v *validator) unanswered() (int, string) {
	for id := range v.pending {
		return 7, fmt.Sprintf("tool call %q has no result", id)
	}
	return 0, ""
}

func checkOutcome(o *Outcome) error {
	switch {
	case o == nil || o.Type == "success":
		return nil
	case o.Type != "interrupt":
		return fmt.Errorf("outcome %q", o.Type)
	case len(o.Interrupts) == 0:
		return errors.New("no interrupt is named")
	}
	for _, i := range o.Interrupts {
		if !validInterrupt(i) {
			return errors.New("an interrupt lacks its id or reason")
		}
	}
	return nil
}
