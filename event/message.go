package event

import (
	"bytes"
	"encoding/json"
	"strings"
)

// Message is one message of a conversation in AG-UI's shape (spec 07 §11.1).
type Message struct {
	ID         string          `json:"id"`
	Role       string          `json:"role"` // user, assistant, tool, system, developer, reasoning, activity
	Content    Content         `json:"content,omitzero"`
	ToolCalls  []ToolCall      `json:"toolCalls,omitempty"`
	ToolCallID string          `json:"toolCallId,omitempty"`
	Error      string          `json:"error,omitempty"`
	Metadata   json.RawMessage `json:"metadata,omitempty"`
}

// ToolCall is a call that an assistant message made.
type ToolCall struct {
	ID       string          `json:"id"`
	Type     string          `json:"type"` // "function"
	Function ToolFunction    `json:"function"`
	Metadata json.RawMessage `json:"metadata,omitempty"`
}

// ToolFunction names the tool; Arguments is JSON text.
type ToolFunction struct {
	Name      string `json:"name"`
	Arguments string `json:"arguments"`
}

// Content is a message's content: a text, or a list of parts. On the wire it is
// a string or an array; the zero value is absent.
type Content struct {
	Text  string
	Parts []Part // not nil: Text is not used
}

// Part is one part of a user's content. Raw is the whole object, so that parts
// of kinds that this package does not know survive.
type Part struct {
	Type string
	Text string // of type "text"
	Raw  json.RawMessage
}

// Text is a content that is plain text.
func Text(s string) Content { return Content{Text: s} }

// String is the text of the content: that of its text parts, joined without a
// separator, where it has parts.
func (c Content) String() string {
	if c.Parts == nil {
		return c.Text
	}
	var b strings.Builder
	for _, p := range c.Parts {
		if p.Type == "text" {
			b.WriteString(p.Text)
		}
	}
	return b.String()
}

// IsZero says that there is no content.
func (c Content) IsZero() bool { return c.Text == "" && c.Parts == nil }

// MarshalJSON writes a string or an array.
func (c Content) MarshalJSON() ([]byte, error) {
	if c.Parts == nil {
		return marshal(c.Text)
	}
	raws := make([]json.RawMessage, len(c.Parts))
	for i, p := range c.Parts {
		raws[i] = p.Raw
		if p.Raw == nil {
			b, err := marshal(struct {
				Type string `json:"type"`
				Text string `json:"text"`
			}{p.Type, p.Text})
			if err != nil {
				return nil, err
			}
			raws[i] = b
		}
	}
	return marshal(raws)
}

// UnmarshalJSON reads a string, an array of parts, or null.
func (c *Content) UnmarshalJSON(b []byte) error {
	*c = Content{}
	b = bytes.TrimSpace(b)
	if bytes.Equal(b, []byte("null")) {
		return nil
	}
	if len(b) > 0 && b[0] == '"' {
		return json.Unmarshal(b, &c.Text)
	}
	var raws []json.RawMessage
	if err := json.Unmarshal(b, &raws); err != nil {
		return err
	}
	c.Parts = make([]Part, len(raws))
	for i, r := range raws {
		var p struct{ Type, Text string }
		if err := json.Unmarshal(r, &p); err != nil {
			return err
		}
		c.Parts[i] = Part{Type: p.Type, Text: p.Text, Raw: r}
	}
	return nil
}
