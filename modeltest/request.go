package modeltest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"
)

// Request is one recorded request.
type Request struct {
	// Number counts all requests of the model from 1, recorded or dropped.
	Number int
	Method string
	// URL is the request target as sent, path and query.
	URL string
	// Header holds credentials as the client sent them; see Redacted.
	Header http.Header
	Body   []byte
	// Messages is the parsed body of a request for a message, nil otherwise.
	Messages *Messages
	// Queue and Turn say what was served: the index of a turn in the queue.
	// Turn is -1 if none was.
	Queue string
	Turn  int
}

// Redacted returns r with the values of its credential headers replaced, for
// logs and golden files. The body is shared with r and left as it is.
func (r Request) Redacted() Request {
	r.Header = r.Header.Clone()
	for _, name := range []string{"Authorization", "Proxy-Authorization", "X-Api-Key", "Cookie"} {
		if r.Header.Values(name) != nil {
			r.Header.Set(name, "[redacted]")
		}
	}
	return r
}

// Messages is a request to the Messages API as far as tests look at it.
//
// What "the user said" excludes what clients add in the user's name: a text
// block that starts with <system-reminder> is not counted. The blocks that
// remain of one message are joined by newlines.
type Messages struct {
	Model     string
	Stream    bool // false if absent
	MaxTokens int
	// System is the text of the system prompt followed by that of messages of
	// role system, joined by newlines.
	System string
	// Tools are the names of the offered tools in their order.
	Tools    []string
	Messages []Message
}

// Message is one message of a request.
type Message struct {
	Role    string
	Content []Content
}

// Content is one block of a message; which fields are set depends on Type.
type Content struct {
	Type string
	// Text is that of a text or thinking block, or all text of a tool_result.
	Text string
	// ID is the id of a tool_use, or the one a tool_result answers.
	ID      string
	Name    string          // tool_use
	Input   json.RawMessage // tool_use
	IsError bool            // tool_result
}

// FirstUser returns the first text the user said, or "".
func (m *Messages) FirstUser() string {
	for _, msg := range m.Messages {
		if text, ok := msg.userText(); ok {
			return text
		}
	}
	return ""
}

// LastUser returns the last text the user said, or "". Tool results that
// follow it do not hide it.
func (m *Messages) LastUser() string {
	for i := len(m.Messages) - 1; i >= 0; i-- {
		if text, ok := m.Messages[i].userText(); ok {
			return text
		}
	}
	return ""
}

// ToolResults returns all tool results in order.
func (m *Messages) ToolResults() []Content {
	var out []Content
	for _, msg := range m.Messages {
		for _, c := range msg.Content {
			if c.Type == "tool_result" {
				out = append(out, c)
			}
		}
	}
	return out
}

func (m Message) userText() (string, bool) {
	if m.Role != "user" {
		return "", false
	}
	var parts []string
	for _, c := range m.Content {
		if c.Type == Text && !strings.HasPrefix(strings.TrimSpace(c.Text), "<system-reminder>") {
			parts = append(parts, c.Text)
		}
	}
	return strings.Join(parts, "\n"), len(parts) > 0
}

// parseMessages reads the body of a request for a message. It is lenient about
// what it does not know.
func parseMessages(body []byte) (*Messages, error) {
	var wire struct {
		Model     string          `json:"model"`
		Stream    bool            `json:"stream"`
		MaxTokens int             `json:"max_tokens"`
		System    json.RawMessage `json:"system"`
		Tools     []struct {
			Name string `json:"name"`
		} `json:"tools"`
		Messages []struct {
			Role    string          `json:"role"`
			Content json.RawMessage `json:"content"`
		} `json:"messages"`
	}
	if err := json.Unmarshal(body, &wire); err != nil {
		return nil, err
	}
	m := &Messages{Model: wire.Model, Stream: wire.Stream, MaxTokens: wire.MaxTokens}
	var system []string
	content, err := parseContent(wire.System)
	if err != nil {
		return nil, fmt.Errorf("system: %w", err)
	}
	for _, c := range content {
		system = append(system, c.Text)
	}
	for _, t := range wire.Tools {
		m.Tools = append(m.Tools, t.Name)
	}
	for i, w := range wire.Messages {
		content, err := parseContent(w.Content)
		if err != nil {
			return nil, fmt.Errorf("messages[%d].content: %w", i, err)
		}
		if w.Role == "system" {
			for _, c := range content {
				system = append(system, c.Text)
			}
		}
		m.Messages = append(m.Messages, Message{Role: w.Role, Content: content})
	}
	m.System = strings.Join(system, "\n")
	return m, nil
}

// parseContent reads a string or a list of blocks.
func parseContent(raw json.RawMessage) ([]Content, error) {
	raw = bytes.TrimSpace(raw)
	if len(raw) == 0 || string(raw) == "null" {
		return nil, nil
	}
	if raw[0] == '"' {
		var text string
		err := json.Unmarshal(raw, &text)
		return []Content{{Type: Text, Text: text}}, err
	}
	var blocks []struct {
		Type      string          `json:"type"`
		Text      string          `json:"text"`
		Thinking  string          `json:"thinking"`
		ID        string          `json:"id"`
		Name      string          `json:"name"`
		Input     json.RawMessage `json:"input"`
		ToolUseID string          `json:"tool_use_id"`
		Content   json.RawMessage `json:"content"`
		IsError   bool            `json:"is_error"`
	}
	if err := json.Unmarshal(raw, &blocks); err != nil {
		return nil, err
	}
	out := make([]Content, len(blocks))
	for i, b := range blocks {
		c := Content{Type: b.Type, Text: b.Text + b.Thinking, ID: b.ID, Name: b.Name, Input: b.Input, IsError: b.IsError}
		if b.Type == "tool_result" {
			c.ID = b.ToolUseID
			text, err := resultText(b.Content)
			if err != nil {
				return nil, err
			}
			c.Text = text
		}
		out[i] = c
	}
	return out, nil
}

// resultText joins the text blocks of a tool result. It does not look into
// tool results within tool results, so that nesting costs no recursion.
func resultText(raw json.RawMessage) (string, error) {
	raw = bytes.TrimSpace(raw)
	if len(raw) == 0 || string(raw) == "null" {
		return "", nil
	}
	if raw[0] == '"' {
		var text string
		err := json.Unmarshal(raw, &text)
		return text, err
	}
	var blocks []struct {
		Text string `json:"text"`
	}
	if err := json.Unmarshal(raw, &blocks); err != nil {
		return "", err
	}
	var parts []string
	for _, b := range blocks {
		if b.Text != "" {
			parts = append(parts, b.Text)
		}
	}
	return strings.Join(parts, "\n"), nil
}

// record keeps the newest requests within a bound of number and size.
type record struct {
	mu       sync.Mutex
	requests []Request
	bytes    int
	maxCount int
	maxBytes int
}

func (r *record) add(q Request) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.requests = append(r.requests, q)
	r.bytes += len(q.Body)
	drop := 0
	for len(r.requests)-drop > 1 && (len(r.requests)-drop > r.maxCount || r.bytes > r.maxBytes) {
		r.bytes -= len(r.requests[drop].Body)
		r.requests[drop] = Request{} // free its body although the array lives on
		drop++
	}
	r.requests = r.requests[drop:]
}

func (r *record) all() []Request {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]Request(nil), r.requests...)
}
