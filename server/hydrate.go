package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/store"
)

// hydrated is a thread as a client shows it (spec 07 §11.3).
type hydrated struct {
	Messages   []uiMessage      `json:"messages"`
	ActiveRun  *activeRun       `json:"activeRun"`
	Interrupts *pendingRequests `json:"interrupts"`
}

type activeRun struct {
	RunID string `json:"runId"`
}

type pendingRequests struct {
	RunID   string            `json:"runId"`
	Pending []json.RawMessage `json:"pending"`
}

type uiMessage struct {
	ID    string `json:"id"`
	Role  string `json:"role"`
	Parts []any  `json:"parts"` // the types below, or a part as its client sent it
}

type uiText struct {
	Type    string `json:"type"` // "text" or "thinking"
	Content string `json:"content"`
}

type uiCall struct {
	Type      string          `json:"type"`
	ID        string          `json:"id"`
	Name      string          `json:"name"`
	Arguments string          `json:"arguments"`
	Input     json.RawMessage `json:"input,omitempty"`
	State     string          `json:"state"`
	Output    any             `json:"output,omitempty"`
}

type uiResult struct {
	Type       string `json:"type"`
	ToolCallID string `json:"toolCallId"`
	Content    string `json:"content"`
	State      string `json:"state"`
	Error      string `json:"error,omitempty"`
}

func (s *Server) hydrate(w http.ResponseWriter, c *call, id string) error {
	if !validID(id) {
		return fmt.Errorf("%w (threadId)", errQuery)
	}
	t := store.Thread{Tenant: c.who.Tenant, ID: id}
	if !s.allowed(c, t) {
		writeJSON(w, http.StatusForbidden, map[string]string{"error": "Forbidden"}) // the client's shape
		return nil
	}
	h, err := s.hydration(c.Context(), t, c.PathValue("sandbox"))
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, h)
	return nil
}

// hydration reads a thread. The active run comes first: a run's transcript is
// stored no later than its end, so that, where none was found, the transcript
// read next is whole. Definition is empty for runs of any.
func (s *Server) hydration(ctx context.Context, t store.Thread, definition string) (hydrated, error) {
	h := hydrated{Messages: []uiMessage{}}
	rec, err := s.store.Runs.FindActive(ctx, t)
	switch {
	case err == nil && (definition == "" || rec.Definition == definition):
		h.ActiveRun = &activeRun{rec.ID}
	case err != nil && !errors.Is(err, store.ErrNotFound):
		return h, fmt.Errorf("server: active run of thread %q: %w", t.ID, err)
	}
	if s.store.Messages != nil {
		msgs, err := s.store.Messages.Load(ctx, t)
		if err != nil {
			return h, fmt.Errorf("server: load thread %q: %w", t.ID, err)
		}
		h.Messages = uiMessages(msgs)
	}
	if s.store.Interrupts != nil {
		pending, err := s.store.Interrupts.Pending(ctx, t)
		if err != nil {
			return h, fmt.Errorf("server: pending interrupts of thread %q: %w", t.ID, err)
		}
		for _, p := range pending {
			if h.Interrupts == nil {
				h.Interrupts = &pendingRequests{RunID: p.RunID}
			}
			if h.Interrupts.RunID == p.RunID {
				h.Interrupts.Pending = append(h.Interrupts.Pending, p.Payload)
			}
		}
	}
	return h, nil
}

// uiMessages turns a conversation into what clients show: calls, their results and
// the thoughts before them are parts of the agent's messages.
func uiMessages(msgs []event.Message) []uiMessage {
	out := []uiMessage{}
	var (
		thoughts  []any
		thoughtID string
		calls     = map[string]*uiCall{}
		home      = map[string]int{} // the message that shows a call
	)
	flush := func() {
		if len(thoughts) > 0 { // nothing followed them
			out = append(out, uiMessage{ID: thoughtID, Role: "assistant", Parts: thoughts})
			thoughts = nil
		}
	}
	for _, m := range msgs {
		switch m.Role {
		case "reasoning":
			thoughts, thoughtID = append(thoughts, uiText{"thinking", m.Content.String()}), m.ID
		case "assistant":
			parts := thoughts
			thoughts = nil
			if text := m.Content.String(); text != "" {
				parts = append(parts, uiText{"text", text})
			}
			at := len(out)
			bare := len(parts) == 0 && len(m.ToolCalls) == 1 && m.ToolCalls[0].ID == m.ID
			if bare && at > 0 && out[at-1].Role == "assistant" {
				at-- // a call without a message of its own belongs to the one before
			} else {
				out = append(out, uiMessage{ID: m.ID, Role: "assistant", Parts: []any{}})
			}
			for _, c := range m.ToolCalls {
				p := &uiCall{Type: "tool-call", ID: c.ID, Name: c.Function.Name, Arguments: c.Function.Arguments, State: "input-complete"}
				if json.Valid([]byte(p.Arguments)) {
					p.Input = json.RawMessage(p.Arguments)
				}
				parts = append(parts, p)
				calls[c.ID], home[c.ID] = p, at
			}
			out[at].Parts = append(out[at].Parts, parts...)
		case "tool":
			p := calls[m.ToolCallID]
			if p == nil || p.State == "complete" {
				continue // of no call, or told twice
			}
			text := m.Content.String()
			p.State, p.Output = "complete", output(text)
			r := uiResult{Type: "tool-result", ToolCallID: m.ToolCallID, Content: text, State: "complete"}
			if m.Error != "" {
				r.State, r.Error = "error", m.Error
			}
			at := &out[home[m.ToolCallID]]
			at.Parts = slices.Insert(at.Parts, slices.Index(at.Parts, any(p))+1, any(r))
		default: // user, system, developer
			flush()
			role := m.Role
			if role == "developer" {
				role = "system"
			}
			out = append(out, uiMessage{ID: m.ID, Role: role, Parts: contentParts(m.Content)})
		}
	}
	flush()
	return out
}

// output is a result as the live stream would have left it: the JSON value that it
// is, or a text.
func output(text string) any {
	if json.Valid([]byte(text)) {
		return json.RawMessage(text)
	}
	return text
}

func contentParts(c event.Content) []any {
	if c.Parts == nil {
		return []any{uiText{"text", c.Text}}
	}
	out := []any{}
	for _, p := range c.Parts {
		if p.Type == "text" {
			out = append(out, uiText{"text", p.Text})
		} else if p.Raw != nil {
			out = append(out, p.Raw)
		}
	}
	return out
}
