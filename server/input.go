package server

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/aisandbox-go/aisandbox/event"
)

// RunInput is what a client asks for (spec 07 §11.1), checked, with the caller.
type RunInput struct {
	Definition     string
	Tenant, UserID string

	ThreadID    string
	RunID       string
	ParentRunID string

	// Messages is the conversation, the newest last. Empty means: go on with what
	// is stored. Messages of role "activity" are left out.
	Messages []event.Message

	Tools   []ClientTool // what the client could run itself; an agent in a sandbox can't ask it to
	Context []ContextItem
	State   json.RawMessage // nil: absent

	// ForwardedProps is what the application adds: an object, never nil.
	ForwardedProps json.RawMessage

	// Resume answers what an interrupted run waits for: all of it, or it is empty.
	Resume []ResumeEntry
}

// ClientTool is a tool that the client offers.
type ClientTool struct {
	Name        string          `json:"name"`
	Description string          `json:"description"`
	Parameters  json.RawMessage `json:"parameters"`
}

// ContextItem is a piece of context that the client adds.
type ContextItem struct {
	Description string `json:"description"`
	Value       string `json:"value"`
}

// ResumeEntry is an answer to an interrupt.
type ResumeEntry struct {
	InterruptID string          `json:"interruptId"`
	Status      string          `json:"status"` // "resolved" or "cancelled"
	Payload     json.RawMessage `json:"payload,omitempty"`
	Metadata    json.RawMessage `json:"metadata,omitempty"`
}

// maxID bounds the ids that clients choose.
const maxID = 256

func validID(s string) bool {
	return s != "" && len(s) <= maxID && !strings.ContainsFunc(s, func(c rune) bool { return c < ' ' || c == 0x7f || c == '\uFFFD' })
}

// readBody reads a bounded body within a bounded time.
func (s *Server) readBody(w http.ResponseWriter, c *call) ([]byte, error) {
	rc := http.NewResponseController(w)
	if rc.SetReadDeadline(time.Now().Add(s.cfg.Limits.BodyTime)) == nil {
		defer func() { _ = rc.SetReadDeadline(time.Time{}) }()
	}
	b, err := io.ReadAll(http.MaxBytesReader(w, c.Body, s.cfg.Limits.Body))
	if err != nil {
		var large *http.MaxBytesError
		if errors.As(err, &large) {
			return nil, err
		}
		return nil, fmt.Errorf("%w (read: %w)", errBody, err)
	}
	return b, nil
}

// parseInput checks a RunAgentInput. What is wrong with it is in the error, for
// the log; the client gets a fixed text.
func parseInput(body []byte) (in RunInput, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("%w (%w)", errBody, err)
		}
	}()
	o, err := object(body)
	if err != nil {
		return in, err
	}
	in = RunInput{ForwardedProps: json.RawMessage("{}")}
	for _, f := range []struct {
		key      string
		dst      *string
		required bool
	}{{"threadId", &in.ThreadID, true}, {"runId", &in.RunID, true}, {"parentRunId", &in.ParentRunID, false}} {
		if err := str(o, f.key, f.dst, f.required); err != nil {
			return in, err
		}
		if (f.required || *f.dst != "") && !validID(*f.dst) {
			return in, fmt.Errorf("%s: want 1 to %d bytes on one line", f.key, maxID)
		}
	}
	list, err := objects(o, "messages", true)
	if err != nil {
		return in, err
	}
	for i, raw := range list {
		m, keep, err := parseMessage(raw)
		if err != nil {
			return in, fmt.Errorf("messages[%d]: %w", i, err)
		}
		if keep {
			in.Messages = append(in.Messages, m)
		}
	}
	if list, err = objects(o, "tools", false); err != nil {
		return in, err
	}
	for i, t := range list {
		var ct ClientTool
		if err := errors.Join(str(t, "name", &ct.Name, true), str(t, "description", &ct.Description, false)); err != nil {
			return in, fmt.Errorf("tools[%d]: %w", i, err)
		}
		ct.Parameters = t["parameters"]
		in.Tools = append(in.Tools, ct)
	}
	if list, err = objects(o, "context", false); err != nil {
		return in, err
	}
	for i, c := range list {
		var ci ContextItem
		if err := errors.Join(str(c, "description", &ci.Description, true), str(c, "value", &ci.Value, true)); err != nil {
			return in, fmt.Errorf("context[%d]: %w", i, err)
		}
		in.Context = append(in.Context, ci)
	}
	if list, err = objects(o, "resume", false); err != nil {
		return in, err
	}
	for i, e := range list {
		var re ResumeEntry
		if err := errors.Join(str(e, "interruptId", &re.InterruptID, true), str(e, "status", &re.Status, true)); err != nil {
			return in, fmt.Errorf("resume[%d]: %w", i, err)
		}
		if re.Status != "resolved" && re.Status != "cancelled" {
			return in, fmt.Errorf("resume[%d]: status: want resolved or cancelled", i)
		}
		re.Payload, re.Metadata = e["payload"], e["metadata"]
		in.Resume = append(in.Resume, re)
	}
	if p := o["forwardedProps"]; present(p) {
		if _, err := object(p); err != nil {
			return in, fmt.Errorf("forwardedProps: %w", err)
		}
		in.ForwardedProps = p
	}
	if st := o["state"]; present(st) {
		in.State = st
	}
	return in, nil
}

var roles = []string{"developer", "system", "assistant", "user", "tool", "activity", "reasoning"}

func parseMessage(o fields) (m event.Message, keep bool, err error) {
	if err := errors.Join(str(o, "id", &m.ID, true), str(o, "role", &m.Role, true)); err != nil {
		return m, false, err
	}
	if !slices.Contains(roles, m.Role) {
		return m, false, errors.New("role: unknown")
	}
	if md := o["metadata"]; present(md) {
		if _, err := object(md); err != nil {
			return m, false, fmt.Errorf("metadata: %w", err)
		}
		m.Metadata = md
	}
	content := o["content"]
	switch m.Role {
	case "user":
		if !present(content) {
			return m, false, errors.New("content: missing")
		}
		if content[0] != '"' {
			parts, err := objects(o, "content", true)
			if err != nil {
				return m, false, err
			}
			for i, p := range parts {
				var kind string
				if err := str(p, "type", &kind, true); err != nil {
					return m, false, fmt.Errorf("content[%d]: %w", i, err)
				}
			}
		}
		if err := json.Unmarshal(content, &m.Content); err != nil {
			return m, false, fmt.Errorf("content: %w", err)
		}
		return m, true, nil
	case "activity":
		var kind string
		if err := str(o, "activityType", &kind, true); err != nil {
			return m, false, err
		}
		_, err := object(content)
		return m, false, err
	case "assistant":
		if m.ToolCalls, err = parseCalls(o); err != nil {
			return m, false, err
		}
		err = str(o, "content", &m.Content.Text, false)
		return m, true, err
	case "tool":
		err = errors.Join(str(o, "toolCallId", &m.ToolCallID, true), str(o, "error", &m.Error, false))
	}
	return m, true, errors.Join(err, str(o, "content", &m.Content.Text, true))
}

func parseCalls(o fields) ([]event.ToolCall, error) {
	list, err := objects(o, "toolCalls", false)
	if err != nil {
		return nil, err
	}
	var calls []event.ToolCall
	for i, c := range list {
		var tc event.ToolCall
		if err := errors.Join(str(c, "id", &tc.ID, true), str(c, "type", &tc.Type, true)); err != nil {
			return nil, fmt.Errorf("toolCalls[%d]: %w", i, err)
		}
		f, err := object(c["function"])
		if err == nil {
			err = errors.Join(str(f, "name", &tc.Function.Name, true), str(f, "arguments", &tc.Function.Arguments, true))
		}
		if err == nil && tc.Type != "function" {
			err = errors.New("type: want function")
		}
		if err != nil {
			return nil, fmt.Errorf("toolCalls[%d]: %w", i, err)
		}
		if md := c["metadata"]; present(md) {
			tc.Metadata = md
		}
		calls = append(calls, tc)
	}
	return calls, nil
}

// fields are those of a JSON object, by their exact names, which a struct's
// would not be.
type fields map[string]json.RawMessage

func present(v json.RawMessage) bool { return len(v) > 0 && !bytes.Equal(v, []byte("null")) }

func object(b []byte) (fields, error) {
	var o fields
	if err := json.Unmarshal(b, &o); err != nil || o == nil {
		return nil, errors.New("not an object")
	}
	return o, nil
}

func objects(o fields, key string, required bool) ([]fields, error) {
	raw := o[key]
	if !present(raw) {
		if required {
			return nil, fmt.Errorf("%s: missing", key)
		}
		return nil, nil
	}
	var list []fields
	if json.Unmarshal(raw, &list) != nil || list == nil || slices.ContainsFunc(list, func(f fields) bool { return f == nil }) {
		return nil, fmt.Errorf("%s: not an array of objects", key)
	}
	return list, nil
}

func str(o fields, key string, dst *string, required bool) error {
	raw := o[key]
	if !present(raw) {
		if required {
			return fmt.Errorf("%s: missing", key)
		}
		return nil
	}
	if json.Unmarshal(raw, dst) != nil {
		return fmt.Errorf("%s: not a string", key)
	}
	return nil
}
