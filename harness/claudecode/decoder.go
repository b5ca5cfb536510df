package claudecode

import (
	"bytes"
	"cmp"
	"encoding/json"
	"maps"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/harness"
	"github.com/aisandbox-go/aisandbox/internal/rawjson"
)

// DecoderOptions say whose output a decoder reads. The zero value decodes, with
// ids that are empty.
type DecoderOptions struct {
	// Harness is the prefix of the names of CUSTOM events; empty: "claude-code".
	// Programs that speak the same lines pass their own.
	Harness string

	Model                        string // as the caller named it; in metadata.tanstack
	RunID, ThreadID, ParentRunID string

	// NewID returns the run's next id; nil: [event.NewIDs] of RunID. The order of
	// its calls is part of what a replay repeats.
	NewID func() string

	// BridgeNames are the MCP servers whose tools lose the prefix mcp__NAME__;
	// nil: "aisandbox", and "tanstack" as in older recordings.
	BridgeNames []string

	// Structured says that the run was asked for a structured answer (spec 02 §8).
	Structured bool

	// WholeToolArgs withholds a tool call until its arguments are complete.
	WholeToolArgs bool

	// Subagents shows what sub-agents do, as CUSTOM events NAME.subagent.
	Subagents bool
}

// NewDecoder returns a decoder for the stream-json lines of one process (spec 02
// §6, §8), in the wire shape of spec 07 §5 without timestamps. Its memory is
// bounded by the longest line and by what is open, not by the length of the run.
//
// The terminal event waits for Close: only the last result line together with the
// exit status decides (spec 02 §6.1).
func NewDecoder(o DecoderOptions) harness.Decoder {
	if o.Harness == "" {
		o.Harness = name
	}
	if o.NewID == nil {
		o.NewID = event.NewIDs(o.RunID)
	}
	if o.BridgeNames == nil {
		o.BridgeNames = []string{"aisandbox", "tanstack"}
	}
	d := &decoder{o: o, calls: map[string]*call{}, meta: event.TanStack{Model: o.Model}.Metadata()}
	for _, n := range o.BridgeNames {
		d.prefixes = append(d.prefixes, "mcp__"+n+"__")
	}
	return d
}

// structuredTool is the tool that the program offers the model for a structured
// answer.
const structuredTool = "StructuredOutput"

type decoder struct {
	o        DecoderOptions
	meta     json.RawMessage // metadata of most events
	prefixes []string

	out      []event.Event // of the call that is running
	text     []byte        // scratch
	started  bool
	finished bool   // the last line that tells of work was a result
	session  string // the last announced
	failed   map[string]bool

	recent [4]*message // the latest first; [0] is the one that streams
	block  block

	calls map[string]*call // begun, without a result
	began int

	synthetic     []synthetic // lines of the program itself, since the last result
	syntheticCode string

	end        *result // the last result line
	usage      usage
	denials    []json.RawMessage
	structured structured
	noise      string // the last line that was no JSON
}

// message is what was seen of one message of the model. Its blocks come twice:
// streamed, and whole in assistant lines, one block each, in the same order.
type message struct {
	id                            string
	streamedText, streamedThought int
	wholeText, wholeThought       int
	blocks                        int      // whole blocks of any kind
	texts                         int      // text messages that we made of it
	tools                         []string // calls that we began while it streamed
}

type blockKind int

const (
	noBlock blockKind = iota
	textBlock
	thoughtBlock
	toolBlock
	otherBlock
)

// block is the content block that streams now. A model sends one at a time.
type block struct {
	kind  blockKind
	index int64
	id    string
	high  rune // half of a surrogate pair whose other half comes next
	call  *call
	mark  int64 // position in structured.text
}

// call is a tool call without a result.
type call struct {
	id     string
	tool   string
	order  int
	hidden bool // the structured answer
	begun  bool // TOOL_CALL_START went out
	args   bool // some arguments went out
	ended  bool // TOOL_CALL_END went out
}

type synthetic struct{ id, text string }

// Bounds of what is kept besides open items.
const (
	maxSynthetic = 16
	maxDenials   = 1000
	maxMessage   = 16 << 10 // of an error message
)

// line is a line's fields that matter; raw JSON, nil when absent.
type line struct {
	typ, subtype, event, message, parent, err []byte
	sessionID, model, tools, servers          []byte
	agentType, task                           []byte
	result                                    resultLine
}

// Line translates one line. What is not JSON, or of a kind that says nothing to a
// reader, yields nothing.
func (d *decoder) Line(b []byte) ([]event.Event, error) {
	if len(b) > harness.MaxLine {
		return nil, &harness.LineError{Limit: harness.MaxLine}
	}
	if !utf8.Valid(b) {
		b = bytes.ToValidUTF8(b, []byte("\ufffd"))
	}
	var l line
	if err := rawjson.Object(b, l.set); err != nil {
		if b = bytes.TrimSpace(b); len(b) > 0 {
			d.noise = clip(string(b[:min(len(b), 1000)]), 1000)
		}
		return nil, nil
	}
	d.out = d.out[:0]
	if !eq(l.typ, "system") { // tasks in the background report as system lines
		d.finished = eq(l.typ, "result")
	}
	switch {
	case !rawjson.IsNull(l.parent):
		if d.o.Subagents {
			d.subagent(&l)
		}
	case eq(l.typ, "stream_event"):
		d.stream(l.event)
	case eq(l.typ, "assistant"):
		d.assistant(&l)
	case eq(l.typ, "user"):
		d.user(l.message)
	case eq(l.typ, "result"):
		d.result(&l)
	case eq(l.typ, "system") && eq(l.subtype, "init"):
		d.init(&l)
	}
	return d.take(), nil
}

func (l *line) set(k, v []byte) bool {
	switch string(k) {
	case "type":
		l.typ = v
	case "subtype":
		l.subtype = v
	case "event":
		l.event = v
	case "message":
		l.message = v
	case "parent_tool_use_id":
		l.parent = v
	case "error":
		l.err = v
	case "session_id":
		l.sessionID = v
	case "model":
		l.model = v
	case "tools":
		l.tools = v
	case "mcp_servers":
		l.servers = v
	case "subagent_type":
		l.agentType = v
	case "task_description":
		l.task = v
	default:
		l.result.set(k, v)
	}
	return true
}

// eq compares a raw JSON string with a name.
func eq(v []byte, s string) bool {
	return len(v) == len(s)+2 && v[0] == '"' && string(v[1:len(v)-1]) == s
}

func text(v []byte) string { s, _ := rawjson.String(v); return s }

// Finished implements harness.Finisher.
func (d *decoder) Finished() bool { return d.end != nil && d.finished }

// take hands out what the running call has collected.
func (d *decoder) take() []event.Event {
	if len(d.out) == 0 {
		return nil
	}
	out := slices.Clone(d.out)
	clear(d.out)
	return out
}

func (d *decoder) emit(ev event.Event) {
	if !d.started {
		d.started = true
		d.out = append(d.out, event.RunStarted{ThreadID: d.o.ThreadID, RunID: d.o.RunID, ParentRunID: d.o.ParentRunID, Common: d.common()})
	}
	d.out = append(d.out, ev)
}

func (d *decoder) common() event.Common { return event.Common{Metadata: d.meta} }

func (d *decoder) custom(suffix string, v any) {
	c, err := event.NewCustom(d.o.Harness+"."+suffix, v)
	if err != nil {
		return // only strings and checked JSON come here
	}
	c.Metadata = d.meta
	d.emit(c)
}

func (d *decoder) init(l *line) {
	var tools []string
	if l.tools != nil {
		_ = rawjson.Array(l.tools, func(v []byte) bool { tools = append(tools, text(v)); return true })
	}
	if id := text(l.sessionID); id != "" && id != d.session {
		d.session = id
		d.custom("session-id", event.SessionID{SessionID: id, Model: text(l.model), Tools: tools})
	}
	if l.servers == nil {
		return
	}
	_ = rawjson.Array(l.servers, func(v []byte) bool {
		var name, status string
		_ = rawjson.Members(v, func(k, v []byte) bool {
			switch string(k) {
			case "name":
				name = text(v)
			case "status":
				status = text(v)
			}
			return true
		})
		if status == "failed" && slices.Contains(d.o.BridgeNames, name) && !d.failed[name] {
			if d.failed == nil {
				d.failed = map[string]bool{}
			}
			d.failed[name] = true
			d.custom("mcp-failed", struct {
				Server string `json:"server"`
				Status string `json:"status"`
			}{name, status})
		}
		return true
	})
}

// message returns the record of a message, a new one if it is not a recent one.
func (d *decoder) message(id string) (m *message, known bool) {
	for _, m := range d.recent {
		if m != nil && m.id == id && id != "" {
			return m, true
		}
	}
	if id == "" {
		id = d.o.NewID()
	}
	return d.newMessage(id), false
}

func (d *decoder) newMessage(id string) *message {
	m := &message{id: id}
	copy(d.recent[1:], d.recent[:])
	d.recent[0] = m
	return m
}

// textID is the id of the next text of a message: its own, then one with the
// block's index, since two texts with one id would be one to a client.
func (m *message) textID(index int64) string {
	m.texts++
	if m.texts == 1 {
		return m.id
	}
	return m.id + ":" + strconv.FormatInt(index, 10)
}

// stream handles one event of the model's own stream.
func (d *decoder) stream(ev []byte) {
	var typ, msg, content, delta []byte
	index := int64(0)
	_ = rawjson.Members(ev, func(k, v []byte) bool {
		switch string(k) {
		case "type":
			typ = v
		case "index":
			index, _ = strconv.ParseInt(string(v), 10, 64)
		case "message":
			msg = v
		case "content_block":
			content = v
		case "delta":
			delta = v
		}
		return true
	})
	switch {
	case eq(typ, "content_block_delta"):
		if d.block.kind != noBlock && d.block.index == index {
			d.delta(delta)
		}
	case eq(typ, "content_block_start"):
		d.closeBlock(true)
		d.openBlock(index, content)
	case eq(typ, "content_block_stop"):
		if d.block.index == index {
			d.closeBlock(false)
		}
	case eq(typ, "message_start"):
		d.closeBlock(true)
		d.endAbandoned()
		id := ""
		_ = rawjson.Members(msg, func(k, v []byte) bool {
			if string(k) == "id" {
				id = text(v)
			}
			return id == ""
		})
		if id == "" {
			id = d.o.NewID()
		}
		d.newMessage(id)
	}
}

func (d *decoder) openBlock(index int64, content []byte) {
	var typ, id, name, first []byte
	_ = rawjson.Members(content, func(k, v []byte) bool {
		switch string(k) {
		case "type":
			typ = v
		case "id":
			id = v
		case "name":
			name = v
		case "text", "thinking":
			first = v
		}
		return true
	})
	m := d.recent[0]
	if m == nil {
		m = d.newMessage(d.o.NewID()) // its message_start was lost
	}
	d.block = block{kind: otherBlock, index: index, mark: d.structured.pos()}
	switch {
	case eq(typ, "text"):
		m.streamedText++
		d.block.kind, d.block.id = textBlock, m.textID(index)
		d.emit(event.TextMessageStart{MessageID: d.block.id, Role: "assistant", Common: d.common()})
		d.piece(first)
	case eq(typ, "thinking"):
		m.streamedThought++
		d.block.kind, d.block.id = thoughtBlock, d.o.NewID()
		d.emit(event.ReasoningStart{MessageID: d.block.id, Common: d.common()})
		d.emit(event.ReasoningMessageStart{MessageID: d.block.id, Role: "reasoning", Common: d.common()})
		d.piece(first)
	case eq(typ, "tool_use"):
		id := text(id)
		if id == "" || d.calls[id] != nil {
			return // its whole line tells
		}
		c := d.newCall(id, text(name))
		m.tools = append(m.tools, id)
		d.block.kind, d.block.id, d.block.call = toolBlock, id, c
		if c.hidden {
			d.structured.streamed = d.structured.streamed[:0]
		} else if !d.o.WholeToolArgs {
			d.startCall(c)
		}
	}
}

func (d *decoder) delta(delta []byte) {
	var typ, v []byte
	_ = rawjson.Members(delta, func(k, val []byte) bool {
		switch string(k) {
		case "type":
			typ = val
		case "text", "thinking", "partial_json":
			v = val
		}
		return true
	})
	if (d.block.kind == textBlock && eq(typ, "text_delta")) ||
		(d.block.kind == thoughtBlock && eq(typ, "thinking_delta")) ||
		(d.block.kind == toolBlock && eq(typ, "input_json_delta")) {
		d.piece(v)
	}
}

// piece adds a raw JSON string to the open block.
func (d *decoder) piece(v []byte) {
	if !rawjson.IsString(v) {
		return
	}
	d.text, d.block.high = rawjson.AppendText(d.text[:0], v, d.block.high)
	d.add(d.text)
	if cap(d.text) > 1<<20 {
		d.text = nil
	}
}

func (d *decoder) add(b []byte) {
	if len(b) == 0 {
		return
	}
	switch d.block.kind {
	case textBlock:
		d.structured.add(d.o.Structured, b)
		d.emit(event.TextMessageContent{MessageID: d.block.id, Delta: string(b)})
	case thoughtBlock:
		d.emit(event.ReasoningMessageContent{MessageID: d.block.id, Delta: string(b), Common: d.common()})
	case toolBlock:
		switch c := d.block.call; {
		case c.hidden:
			d.structured.stream(b)
		case c.begun && !c.ended:
			c.args = true
			d.emit(event.ToolCallArgs{ToolCallID: c.id, Delta: string(b)})
		}
	}
}

// closeBlock ends the open block. Abandoned says that the model will never finish
// it: another message or block began instead.
func (d *decoder) closeBlock(abandoned bool) {
	if d.block.kind == noBlock {
		return
	}
	if d.block.high != 0 {
		d.block.high = 0
		d.add([]byte("\ufffd"))
	}
	b := d.block
	d.block = block{}
	switch b.kind {
	case textBlock:
		if abandoned {
			d.structured.cut(b.mark)
		}
		d.emit(event.TextMessageEnd{MessageID: b.id, Common: d.common()})
	case thoughtBlock:
		d.emit(event.ReasoningMessageEnd{MessageID: b.id, Common: d.common()})
		d.emit(event.ReasoningEnd{MessageID: b.id, Common: d.common()})
	case toolBlock:
		if b.call.hidden && !b.call.ended && !abandoned {
			d.structured.offer(b.call.id, d.structured.streamed)
		}
	}
}

// endAbandoned closes the arguments of calls that a broken stream left open. The
// whole line of a call comes before its block ends, so none is still to come.
func (d *decoder) endAbandoned() {
	for _, c := range d.inOrder() {
		if c.begun && !c.ended {
			d.endCall(c, nil)
		}
	}
}

// inOrder is the calls without a result in the order in which they began.
func (d *decoder) inOrder() []*call {
	if len(d.calls) == 0 {
		return nil
	}
	return slices.SortedFunc(maps.Values(d.calls), func(a, b *call) int { return cmp.Compare(a.order, b.order) })
}

func (d *decoder) newCall(id, tool string) *call {
	c := &call{id: id, tool: tool, order: d.began, hidden: d.o.Structured && tool == structuredTool}
	d.began++
	d.calls[id] = c
	return c
}

func (d *decoder) startCall(c *call) {
	tool := c.tool
	for _, p := range d.prefixes {
		if rest, ok := strings.CutPrefix(tool, p); ok && rest != "" {
			tool = rest
			break
		}
	}
	if tool == "" {
		tool = "unknown"
	}
	c.begun = true
	d.emit(event.ToolCallStart{ToolCallID: c.id, ToolCallName: tool, Common: d.common()})
}

// endCall ends a call's arguments; input is the checked compact JSON of all of
// them, nil if it never came.
func (d *decoder) endCall(c *call, input []byte) {
	if !c.args {
		whole := "{}"
		if input != nil {
			whole = string(input)
		}
		c.args = true
		d.emit(event.ToolCallArgs{ToolCallID: c.id, Delta: whole})
	}
	c.ended = true
	e := event.ToolCallEnd{ToolCallID: c.id, Common: d.common()}
	if input != nil {
		// By hand: an input may be many megabytes, and is checked already.
		b := make([]byte, 0, len(d.meta)+len(input)+40)
		if n := len(d.meta); n > 2 {
			b = append(append(b, d.meta[:n-2]...), ',')
		} else {
			b = append(b, `{"tanstack":{`...)
		}
		b = append(append(append(b, `"input":`...), input...), "}}"...)
		e.Metadata = b
	}
	d.emit(e)
}
