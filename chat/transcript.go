package chat

import (
	"encoding/json"
	"slices"
	"strings"

	"github.com/aisandbox-go/aisandbox/event"
)

// transcript assembles what a run adds to its conversation: assistant texts,
// tool calls, results (spec 01 §17, spec 07 §13). Reasoning and CUSTOM events are
// not part of a conversation. Each event costs amortised constant time.
type transcript struct {
	items []*item
	texts map[string]*item // by message id
	calls map[string]*item // by tool call id
	seen  map[string]bool  // tool call ids that have a result
}

// item is a message in the making.
type item struct {
	msg  event.Message
	text strings.Builder // of the text, or of the arguments
	call bool
	done bool // a call whose arguments are complete
}

func (t *transcript) add(ev event.Event) {
	switch e := ev.(type) {
	case event.TextMessageStart:
		t.textItem(e.MessageID)
	case event.TextMessageContent:
		t.textItem(e.MessageID).text.WriteString(e.Delta)
	case event.ToolCallStart:
		if e.ToolCallName == "" || t.calls[e.ToolCallID] != nil {
			return
		}
		it := &item{call: true, msg: event.Message{
			ID: e.ToolCallID, Role: "assistant",
			ToolCalls: []event.ToolCall{{ID: e.ToolCallID, Type: "function",
				Function: event.ToolFunction{Name: e.ToolCallName}, Metadata: observed}},
		}}
		if t.calls == nil {
			t.calls, t.seen = map[string]*item{}, map[string]bool{}
		}
		t.calls[e.ToolCallID] = it
		t.items = append(t.items, it)
	case event.ToolCallArgs:
		if it := t.calls[e.ToolCallID]; it != nil && !it.done {
			it.text.WriteString(e.Delta)
		}
	case event.ToolCallEnd:
		if it := t.calls[e.ToolCallID]; it != nil {
			it.done = true
		}
	case event.ToolCallResult:
		if t.seen[e.ToolCallID] {
			return
		}
		if t.seen == nil {
			t.calls, t.seen = map[string]*item{}, map[string]bool{}
		}
		t.seen[e.ToolCallID] = true
		it := &item{msg: event.Message{ID: e.MessageID, Role: "tool", ToolCallID: e.ToolCallID}}
		it.text.WriteString(e.Content)
		t.items = append(t.items, it)
	}
}

func (t *transcript) textItem(id string) *item {
	if it := t.texts[id]; it != nil {
		return it
	}
	it := &item{msg: event.Message{ID: id, Role: "assistant"}}
	if t.texts == nil {
		t.texts = map[string]*item{}
	}
	t.texts[id] = it
	t.items = append(t.items, it)
	return it
}

// messages returns what there is so far. A call appears when its arguments are complete, a text
// from its first word on.
func (t *transcript) messages() []event.Message {
	var out []event.Message
	for _, it := range t.items {
		m := it.msg
		switch {
		case it.call && !it.done, !it.call && m.Role == "assistant" && it.text.Len() == 0:
			continue
		case it.call:
			m.ToolCalls = slices.Clone(m.ToolCalls)
			m.ToolCalls[0].Function.Arguments = it.text.String()
		default:
			m.Content = event.Text(it.text.String())
		}
		out = append(out, m)
	}
	return out
}

// observed marks a call that the agent made by itself in its sandbox. The key is
// in stored data: it is never renamed.
var observed = json.RawMessage(`{"sandboxObserved":true}`)

// IsObserved says that the call was made by an agent in its sandbox, so that the
// host neither runs it nor shows it to a model again.
func IsObserved(c event.ToolCall) bool {
	var m struct {
		Observed any `json:"sandboxObserved"`
	}
	return json.Unmarshal(c.Metadata, &m) == nil && m.Observed == true
}

// WithoutObserved returns the conversation as an agent is to see it: an assistant
// message whose calls are all observed loses them, with their results, and is
// left out where it says nothing else. A message that has other calls too stays
// whole, with its results. Msgs isn't changed.
func WithoutObserved(msgs []event.Message) []event.Message {
	gone := map[string]bool{}
	out := make([]event.Message, 0, len(msgs))
	for _, m := range msgs {
		switch {
		case m.Role == "assistant" && len(m.ToolCalls) > 0 &&
			!slices.ContainsFunc(m.ToolCalls, func(c event.ToolCall) bool { return !IsObserved(c) }):
			for _, c := range m.ToolCalls {
				gone[c.ID] = true
			}
			if m.ToolCalls = nil; m.Content.String() == "" {
				continue
			}
		case m.Role == "tool" && gone[m.ToolCallID]:
			continue
		}
		out = append(out, m)
	}
	return out
}
