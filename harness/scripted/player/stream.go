package player

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"sync/atomic"
	"time"
	"unicode/utf8"
)

const (
	version  = "scripted-1"                                                        // in init, where the real program names its release
	maxPiece = 8 << 10                                                             // bytes of one delta
	maxWhole = 1 << 20                                                             // bytes of text of one whole assistant line of a flood
	filler   = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .." // needs no escape in JSON
)

// stream prints lines. It holds what the ids are made of.
type stream struct {
	w    *bufio.Writer
	err  error       // the first write error; nothing is written after it
	halt atomic.Bool // the agent was ended by a signal: not a line more
	seed uint64
	n    uint64 // lines so far

	sid      string
	model    string
	partials bool

	open     bool // a message is open
	msgs     int
	index    int // of the next block of the open message
	tools    int
	input    int // tokens that each message takes in
	out, all int // tokens given out in the open message, and in all closed ones
}

func newStream(w io.Writer) *stream {
	return &stream{w: bufio.NewWriterSize(w, 64<<10)}
}

// begin sets what all lines carry.
func (s *stream) begin(sid string, turn int, o options, prompt string) {
	s.sid, s.model, s.partials = sid, o.model, o.partials
	s.seed = hash(sid, fmt.Sprint(turn))
	s.input = tokens(prompt)
}

// tokens is a rough count, the same for the same text.
func tokens(text string) int { return (len(text) + 3) / 4 }

func (s *stream) uuid() string {
	s.n++
	return uuid(s.seed, s.n)
}

// stamp is the time of a line by a clock that ticks once per line.
func (s *stream) stamp() string {
	return time.UnixMilli(int64(s.n)).UTC().Format("2006-01-02T15:04:05.000Z")
}

// id is unique in the session: the seed holds the turn.
func (s *stream) id(kind string, n int) string {
	return fmt.Sprintf("%s_%016x_%d", kind, s.seed, n)
}

// line prints one line and flushes it.
func (s *stream) line(v any) {
	b, err := marshal(v)
	if err != nil {
		s.fail(err)
		return
	}
	s.write(b)
	s.write([]byte{'\n'})
	s.flush()
}

func (s *stream) write(b []byte) {
	if s.err == nil && !s.halt.Load() {
		_, err := s.w.Write(b)
		s.fail(err)
	}
}

func (s *stream) flush() {
	if s.err == nil && !s.halt.Load() {
		s.fail(s.w.Flush())
	}
}

func (s *stream) fail(err error) {
	if s.err == nil {
		s.err = err
	}
}

// marshal is JSON as JavaScript writes it: without escapes for HTML.
func marshal(v any) ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	err := enc.Encode(v)
	return bytes.TrimRight(b.Bytes(), "\n"), err
}

func (s *stream) event(v any) {
	if s.partials {
		s.line(streamLine{Type: "stream_event", Event: v, SessionID: s.sid, UUID: s.uuid()})
	}
}

func (s *stream) message(content ...any) message {
	return message{ID: s.id("msg", s.msgs), Type: "message", Role: "assistant", Model: s.model, Content: content,
		Usage: usage{Input: s.input, Output: 1}}
}

// begun opens a message unless one is open.
func (s *stream) begun() {
	if s.open {
		return
	}
	s.open, s.index, s.out = true, 0, 0
	s.msgs++
	if s.partials {
		s.line(statusLine{Type: "system", Subtype: "status", Status: "requesting", UUID: s.uuid(), SessionID: s.sid})
		s.line(streamLine{Type: "stream_event", Event: messageStart{Type: "message_start", Message: s.message([]any{}...)},
			SessionID: s.sid, UUID: s.uuid(), TTFT: new(int)})
	}
}

// end closes the open message.
func (s *stream) end(reason string) {
	if !s.open {
		return
	}
	s.open = false
	s.all += s.out
	d := messageDelta{Type: "message_delta", Delta: stopDelta{StopReason: reason}}
	d.Usage.OutputTokens = s.out
	s.event(d)
	s.event(messageStop{Type: "message_stop"})
}

// block prints one block of the open message: its start, its deltas, the whole
// line, its stop. The real program prints the whole line before the stop.
func (s *stream) block(start any, deltas []any, whole any, meta []toolMeta) {
	s.begun()
	s.event(blockStart{Type: "content_block_start", Index: s.index, Block: start})
	for _, d := range deltas {
		s.event(blockDelta{Type: "content_block_delta", Index: s.index, Delta: d})
	}
	s.whole(whole, meta)
	s.event(blockStop{Type: "content_block_stop", Index: s.index})
	s.index++
}

func (s *stream) whole(block any, meta []toolMeta) {
	l := assistantLine{Type: "assistant", SessionID: s.sid, UUID: s.uuid(), RequestID: s.id("req", s.msgs), ToolUseMeta: meta}
	l.Message.message = s.message(block)
	s.line(l)
}

func (s *stream) text(text string) {
	var deltas []any
	for _, p := range pieces(text, 4) {
		deltas = append(deltas, textDelta{"text_delta", p})
	}
	s.begun()
	s.out += tokens(text)
	s.block(textBlock{Type: "text"}, deltas, textBlock{"text", text}, nil)
}

func (s *stream) thinking(text string) {
	signature := fmt.Sprintf("%016x", hash(text))
	var deltas []any
	for _, p := range pieces(text, 3) {
		deltas = append(deltas, thinkingDelta{"thinking_delta", p})
	}
	deltas = append(deltas, signatureDelta{"signature_delta", signature})
	s.begun()
	s.out += tokens(text)
	s.block(thinkingBlock{Type: "thinking"}, deltas, thinkingBlock{"thinking", text, signature}, nil)
}

// tool prints a tool call and ends its message. It returns the call's id.
func (s *stream) tool(name string, input json.RawMessage) string {
	s.tools++
	id := s.id("toolu", s.tools)
	var deltas []any
	for _, p := range pieces(string(input), 3) {
		deltas = append(deltas, inputDelta{"input_json_delta", p})
	}
	var meta []toolMeta
	if server, tool, ok := splitTool(name); ok {
		meta = []toolMeta{{id, displayName(tool), server}}
	}
	s.begun()
	s.out += tokens(string(input))
	s.block(toolBlock{"tool_use", id, name, json.RawMessage("{}")}, deltas, toolBlock{"tool_use", id, name, input}, meta)
	s.end("tool_use")
	return id
}

// result prints what a tool returned.
func (s *stream) result(id string, r toolResult) {
	l := userLine{Type: "user", SessionID: s.sid, UUID: s.uuid(), Timestamp: s.stamp(), ToolUseResult: r.structured}
	l.Message.Role = "user"
	l.Message.Content = []any{resultBlock{id, "tool_result", r.content, r.isError}}
	s.line(l)
}

// userText prints a text that the program itself puts into the conversation.
func (s *stream) userText(text string) {
	l := userLine{Type: "user", SessionID: s.sid, UUID: s.uuid(), Timestamp: s.stamp()}
	l.Message.Role = "user"
	l.Message.Content = []any{textBlock{"text", text}}
	s.line(l)
}

// flood prints text as fast as it is taken, in little memory however long the
// lines are. It stops when stop says so.
func (s *stream) flood(f Flood, stop func() bool) {
	s.begun()
	if !s.partials {
		for range f.Lines {
			if stop() || s.err != nil {
				return
			}
			l := assistantLine{Type: "assistant", SessionID: s.sid, UUID: s.uuid(), RequestID: s.id("req", s.msgs)}
			l.Message.message = s.message(textBlock{Type: "text"})
			s.long(l, f.Bytes, stop)
			s.index++
		}
		s.flush()
		return
	}
	s.event(blockStart{Type: "content_block_start", Index: s.index, Block: textBlock{Type: "text"}})
	done := 0
	for ; done < f.Lines && !stop() && s.err == nil; done++ {
		s.long(streamLine{Type: "stream_event", SessionID: s.sid, UUID: s.uuid(),
			Event: blockDelta{Type: "content_block_delta", Index: s.index, Delta: textDelta{Type: "text_delta"}}}, f.Bytes, stop)
	}
	s.out += done * (f.Bytes / 4)
	if f.Lines <= maxWhole/f.Bytes && done == f.Lines {
		s.whole(textBlock{"text", strings.Repeat(floodText(f.Bytes), f.Lines)}, nil)
	}
	s.event(blockStop{Type: "content_block_stop", Index: s.index})
	s.index++
}

// long prints v with a text of n bytes put in its one empty "text".
func (s *stream) long(v any, n int, stop func() bool) {
	b, err := marshal(v)
	const hole = `"text":"`
	before, after, ok := bytes.Cut(b, []byte(hole+`"`))
	if err != nil || !ok {
		s.fail(fmt.Errorf("no room for the text: %w", err))
		return
	}
	s.write(before)
	s.write([]byte(hole))
	for left := n - 1; left > 0 && s.err == nil; {
		// A stopped line is still closed: what was printed stays JSON.
		if left > 1<<20 && stop() {
			break
		}
		k := min(left, len(floodChunk))
		s.write(floodChunk[:k])
		left -= k
	}
	s.write([]byte(`\n"`))
	s.write(after)
	s.write([]byte{'\n'})
}

var floodChunk = bytes.Repeat([]byte(filler), 512)

// floodText is the text that long puts in.
func floodText(n int) string {
	return strings.Repeat(filler, n/len(filler)+1)[:n-1] + "\n"
}

// pieces cuts a text into about n parts at borders of characters, into more where
// they would be too long.
func pieces(text string, n int) []string {
	size := min(max((len(text)+n-1)/n, 4), maxPiece)
	var out []string
	for text != "" {
		k := min(size, len(text))
		for k < len(text) && !utf8.RuneStart(text[k]) {
			k++
		}
		out = append(out, text[:k])
		text = text[k:]
	}
	return out
}

// displayName is lookup_ticket as Lookup Ticket.
func displayName(tool string) string {
	words := strings.Split(tool, "_")
	for i, w := range words {
		if w != "" && w[0] >= 'a' && w[0] <= 'z' {
			words[i] = string(w[0]-'a'+'A') + w[1:]
		}
	}
	return strings.Join(words, " ")
}
