package modeltest

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
)

// anthropic is the Messages API.
type anthropic struct{}

func (anthropic) parse(q *Request) (*view, error) {
	m, err := parseMessages(q.Body)
	if err != nil {
		return nil, err
	}
	q.Messages = m
	v := &view{
		model: m.Model, stream: m.Stream, system: m.System,
		firstUser: m.FirstUser(), lastUser: m.LastUser(), messages: len(m.Messages),
		toolResults: map[string]string{}, tools: map[string]bool{},
	}
	for _, r := range m.ToolResults() {
		v.lastToolResult = r.Text
		v.toolResults[r.ID] = r.Text
	}
	for _, t := range m.Tools {
		v.tools[t] = true
	}
	return v, nil
}

func (d anthropic) stream(s *stream, a *answer) {
	s.malformed = `{"type":"content_block_delta","index":0,"delta":{"type":"text_del`
	s.failure = func(f *Failure) {
		typ := f.Type
		if typ == "" {
			typ = d.errorType(http.StatusInternalServerError)
		}
		s.send("error", d.failure(typ, f.message(), a.requestID))
	}
	s.send("message_start", `{"type":"message_start","message":`+d.message(a, "[]", "null", 1)+`}`)
	if a.turn.Ping {
		s.send("ping", `{"type":"ping"}`)
	}
	for i, b := range a.blocks {
		s.send("content_block_start", fmt.Sprintf(`{"type":"content_block_start","index":%d,"content_block":%s}`, i, d.block(b, "", "{}", "")))
		kind, field := "text_delta", "text"
		switch b.typ {
		case Thinking:
			kind, field = "thinking_delta", "thinking"
		case ToolUse:
			kind, field = "input_json_delta", "partial_json"
		}
		delta := func(kind, field, value string) {
			s.delta("content_block_delta", fmt.Sprintf(`{"type":"content_block_delta","index":%d,"delta":{"type":%q,%q:"%s"}}`, i, kind, field, value))
		}
		for _, text := range b.deltas {
			delta(kind, field, text)
		}
		if b.typ == Thinking {
			delta("signature_delta", "signature", inside(b.signature))
		}
		if i == len(a.blocks)-1 {
			s.end()
		}
		s.send("content_block_stop", fmt.Sprintf(`{"type":"content_block_stop","index":%d}`, i))
	}
	if len(a.blocks) == 0 {
		s.end()
	}
	s.send("message_delta", fmt.Sprintf(`{"type":"message_delta","delta":{"stop_reason":%q,"stop_sequence":null},"usage":{"output_tokens":%d}}`, a.stop, a.usage.Out))
	s.send("message_stop", `{"type":"message_stop"}`)
}

func (d anthropic) whole(a *answer) string {
	blocks := make([]string, len(a.blocks))
	for i, b := range a.blocks {
		text := strings.Join(b.deltas, "")
		input := "{}"
		if b.typ == ToolUse {
			input = wholeInput(text)
		}
		blocks[i] = d.block(b, text, input, inside(b.signature))
	}
	return d.message(a, "["+strings.Join(blocks, ",")+"]", fmt.Sprintf("%q", a.stop), a.usage.Out)
}

// wholeInput turns the inside of a JSON string that holds JSON text into that
// text. What is not JSON becomes a string, since an answer is always JSON.
func wholeInput(in string) string {
	var text string
	if err := json.Unmarshal([]byte(`"`+in+`"`), &text); err != nil || !validJSON(text) {
		return `"` + in + `"`
	}
	return text
}

func (anthropic) message(a *answer, content, stop string, out int) string {
	return fmt.Sprintf(`{"id":%s,"type":"message","role":"assistant","model":%s,"content":%s,"stop_reason":%s,"stop_sequence":null,`+
		`"usage":{"input_tokens":%d,"cache_creation_input_tokens":%d,"cache_read_input_tokens":%d,"output_tokens":%d}}`,
		quote(a.messageID), quote(a.view.model), content, stop, a.usage.In, a.usage.CacheWrite, a.usage.CacheRead, out)
}

// block returns a content block; text and signature are insides of strings.
func (anthropic) block(b answerBlock, text, input, signature string) string {
	switch b.typ {
	case Thinking:
		return fmt.Sprintf(`{"type":"thinking","thinking":"%s","signature":"%s"}`, text, signature)
	case ToolUse:
		return fmt.Sprintf(`{"type":"tool_use","id":%s,"name":%s,"input":%s}`, quote(b.id), quote(b.name), input)
	}
	return fmt.Sprintf(`{"type":"text","text":"%s"}`, text)
}

func (anthropic) failure(typ, message, requestID string) string {
	return fmt.Sprintf(`{"type":"error","error":{"type":%s,"message":%s},"request_id":%s}`, quote(typ), quote(message), quote(requestID))
}

var errorTypes = []struct {
	status int
	typ    string
}{
	{400, "invalid_request_error"}, {401, "authentication_error"}, {403, "permission_error"}, {404, "not_found_error"},
	{413, "request_too_large"}, {429, "rate_limit_error"}, {500, "api_error"}, {504, "timeout_error"}, {529, "overloaded_error"},
}

func (anthropic) errorType(status int) string {
	for _, e := range errorTypes {
		if e.status == status {
			return e.typ
		}
	}
	if status >= 500 {
		return "api_error"
	}
	return "invalid_request_error"
}

func (anthropic) errorStatus(typ string) int {
	for _, e := range errorTypes {
		if e.typ == typ {
			return e.status
		}
	}
	return http.StatusInternalServerError
}
