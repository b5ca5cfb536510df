package claudecode

import (
	"fmt"
	"slices"
	"strings"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/internal/rawjson"
)

// syntheticModel marks what the program says by itself: errors, "Not logged in",
// "Unknown command", refusals.
const syntheticModel = "<synthetic>"

// contentBlock is a block of a whole message; raw JSON, nil when absent.
type contentBlock struct {
	typ, text, thinking, id, name, input, toolUseID, content, isError []byte
}

func (b *contentBlock) set(k, v []byte) bool {
	switch string(k) {
	case "type":
		b.typ = v
	case "text":
		b.text = v
	case "thinking":
		b.thinking = v
	case "id":
		b.id = v
	case "name":
		b.name = v
	case "input":
		b.input = v
	case "tool_use_id":
		b.toolUseID = v
	case "content":
		b.content = v
	case "is_error":
		b.isError = v
	}
	return true
}

// blocks calls f with each block of a message's content, which may be a string.
func blocks(content []byte, f func(*contentBlock)) {
	switch {
	case rawjson.IsString(content):
		f(&contentBlock{typ: []byte(`"text"`), text: content})
	case len(content) > 0 && content[0] == '[':
		_ = rawjson.Array(content, func(v []byte) bool {
			var b contentBlock
			if rawjson.Members(v, b.set) == nil {
				f(&b)
			}
			return true
		})
	}
}

// assistant handles a whole message line: one block, as a rule, of a message that
// may have been streamed.
func (d *decoder) assistant(l *line) {
	var id, model, content []byte
	_ = rawjson.Members(l.message, func(k, v []byte) bool {
		switch string(k) {
		case "id":
			id = v
		case "model":
			model = v
		case "content":
			content = v
		}
		return true
	})
	if eq(model, syntheticModel) {
		d.syntheticCode = text(l.err)
		blocks(content, func(b *contentBlock) {
			if s := text(b.text); s != "" && len(d.synthetic) < maxSynthetic {
				d.synthetic = append(d.synthetic, synthetic{text(id), clip(s, maxMessage)})
			}
		})
		return
	}
	m, known := d.message(text(id))
	if !known {
		// Another message while a block streams: the stream broke and the program
		// asked again without streaming (spec 02 §6.2).
		d.closeBlock(true)
		d.endAbandoned()
	}
	blocks(content, func(b *contentBlock) {
		index := int64(m.blocks)
		m.blocks++
		switch {
		case eq(b.typ, "text"):
			m.wholeText++
			if m.wholeText > m.streamedText {
				d.wholeText(m, index, b.text)
			}
		case eq(b.typ, "thinking"):
			m.wholeThought++
			if m.wholeThought > m.streamedThought {
				d.wholeThought(text(b.thinking))
			}
		case eq(b.typ, "tool_use"):
			d.wholeCall(m, b)
		}
	})
}

func (d *decoder) wholeText(m *message, index int64, v []byte) {
	s := text(v)
	if s == "" {
		return
	}
	d.structured.add(d.o.Structured, []byte(s))
	d.say(m.textID(index), s)
}

// say is a text message at once.
func (d *decoder) say(id, s string) {
	d.emit(event.TextMessageStart{MessageID: id, Role: "assistant", Common: d.common()})
	d.emit(event.TextMessageContent{MessageID: id, Delta: s})
	d.emit(event.TextMessageEnd{MessageID: id, Common: d.common()})
}

func (d *decoder) wholeThought(s string) {
	if s == "" {
		return
	}
	id := d.o.NewID()
	d.emit(event.ReasoningStart{MessageID: id, Common: d.common()})
	d.emit(event.ReasoningMessageStart{MessageID: id, Role: "reasoning", Common: d.common()})
	d.emit(event.ReasoningMessageContent{MessageID: id, Delta: s, Common: d.common()})
	d.emit(event.ReasoningMessageEnd{MessageID: id, Common: d.common()})
	d.emit(event.ReasoningEnd{MessageID: id, Common: d.common()})
}

// wholeCall completes a streamed call, or tells of one that was not streamed.
func (d *decoder) wholeCall(m *message, b *contentBlock) {
	id, tool := text(b.id), text(b.name)
	if id == "" {
		return
	}
	c := d.calls[id]
	switch {
	case c != nil && c.ended:
		return // said already
	case c == nil && slices.Contains(m.tools, id):
		return // its result came before this line
	case c == nil:
		c = d.newCall(id, tool)
	}
	input := []byte("{}")
	if !rawjson.IsNull(b.input) {
		input = rawjson.AppendCompact(make([]byte, 0, len(b.input)), b.input)
	}
	if c.hidden {
		c.ended = true
		d.structured.offer(id, input)
		return
	}
	if !c.begun {
		d.startCall(c)
	}
	if d.block.call == c && d.block.high != 0 {
		d.block.high = 0
		d.add([]byte("\ufffd"))
	}
	d.endCall(c, input)
}

// user handles the results of tools; its other texts are the program's own.
func (d *decoder) user(msg []byte) {
	var content []byte
	_ = rawjson.Members(msg, func(k, v []byte) bool {
		if string(k) == "content" {
			content = v
		}
		return true
	})
	if rawjson.IsString(content) {
		return
	}
	blocks(content, func(b *contentBlock) {
		if !eq(b.typ, "tool_result") {
			return
		}
		id := text(b.toolUseID)
		c := d.calls[id]
		if c == nil {
			return // nobody asked for it, or it was answered
		}
		delete(d.calls, id)
		bad := string(b.isError) == "true"
		if c.hidden {
			if bad {
				d.structured.reject(id)
			}
			return
		}
		if !c.begun {
			d.startCall(c)
		}
		if !c.ended {
			d.endCall(c, nil)
		}
		d.answer(id, resultText(b.content), bad)
	})
}

func (d *decoder) answer(call, content string, bad bool) {
	e := event.ToolCallResult{MessageID: d.o.NewID(), ToolCallID: call, Content: content, Role: "tool", Common: d.common()}
	if bad {
		e.Metadata = event.TanStack{Model: d.o.Model, State: "output-error"}.Metadata()
	}
	d.emit(e)
}

// resultText is a tool result as one string: its texts joined by line feeds, with
// a note in place of what is no text.
func resultText(content []byte) string {
	if rawjson.IsString(content) {
		return text(content)
	}
	if len(content) == 0 || content[0] != '[' {
		return ""
	}
	var parts []string
	_ = rawjson.Array(content, func(v []byte) bool {
		var typ, txt, source []byte
		_ = rawjson.Members(v, func(k, v []byte) bool {
			switch string(k) {
			case "type":
				typ = v
			case "text":
				txt = v
			case "source":
				source = v
			}
			return true
		})
		switch {
		case eq(typ, "text"):
			parts = append(parts, text(txt))
		case source != nil:
			parts = append(parts, mediaNote(text(typ), source))
		case typ != nil:
			parts = append(parts, "["+text(typ)+"]")
		}
		return true
	})
	return strings.Join(parts, "\n")
}

func mediaNote(kind string, source []byte) string {
	var media string
	size := 0
	_ = rawjson.Members(source, func(k, v []byte) bool {
		switch string(k) {
		case "media_type":
			media = text(v)
		case "data":
			s := strings.TrimRight(text(v), "=")
			size = len(s) * 3 / 4 // of base64
		}
		return true
	})
	return strings.TrimSpace(fmt.Sprintf("[%s %s", kind, media)) + fmt.Sprintf(", %d bytes]", size)
}

// subagentEvent is the payload of NAME.subagent.
type subagentEvent struct {
	ParentToolUseID string `json:"parentToolUseId"`
	SubagentType    string `json:"subagentType,omitempty"`
	TaskDescription string `json:"taskDescription,omitempty"`
	Kind            string `json:"kind"` // text, tool_use, tool_result
	Text            string `json:"text,omitempty"`
	ToolCallID      string `json:"toolCallId,omitempty"`
	ToolName        string `json:"toolName,omitempty"`
	Input           rawMsg `json:"input,omitempty"`
	IsError         bool   `json:"isError,omitempty"`
}

// subagent tells of a line that a sub-agent's work made.
func (d *decoder) subagent(l *line) {
	if !eq(l.typ, "assistant") && !eq(l.typ, "user") {
		return
	}
	var content []byte
	_ = rawjson.Members(l.message, func(k, v []byte) bool {
		if string(k) == "content" {
			content = v
		}
		return true
	})
	blocks(content, func(b *contentBlock) {
		e := subagentEvent{ParentToolUseID: text(l.parent), SubagentType: text(l.agentType), TaskDescription: text(l.task), Kind: text(b.typ)}
		switch e.Kind {
		case "text":
			e.Text = text(b.text)
		case "tool_use":
			e.ToolCallID, e.ToolName, e.Input = text(b.id), text(b.name), rawMsg(b.input)
		case "tool_result":
			e.ToolCallID, e.Text, e.IsError = text(b.toolUseID), resultText(b.content), string(b.isError) == "true"
		default:
			return
		}
		d.custom("subagent", e)
	})
}
