package server

import (
	"context"
	"encoding/json"
	"fmt"
	"iter"
	"time"

	"github.com/aisandbox-go/aisandbox/chat"
	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/store"
)

// resumeError is why a run was refused that should have answered, or answered
// wrongly, what its thread waits for.
type resumeError struct{ code, text string }

func (e *resumeError) Error() string { return e.text }

// Code is one of spec 07 §9.4.
func (e *resumeError) Code() string { return e.code }

// interruptError is the error object of spec 07 §9.4.
type interruptError struct {
	Scope            string   `json:"scope"` // "item" or "batch"
	ThreadID         string   `json:"threadId"`
	InterruptedRunID string   `json:"interruptedRunId"`
	Generation       int      `json:"generation"`
	Code             string   `json:"code"`
	Message          string   `json:"message"`
	Source           string   `json:"source"`
	Retryable        bool     `json:"retryable"`
	InterruptID      string   `json:"interruptId,omitempty"`
	InterruptIDs     []string `json:"interruptIds,omitempty"`
}

// asked is a pending interrupt. Bound says that it carries a binding that clients
// of this server can answer; the others are nobody's business here.
type asked struct {
	store.Interrupt
	bound      bool
	generation int
	expires    time.Time
}

func readInterrupt(i store.Interrupt) asked {
	a := asked{Interrupt: i}
	var d struct {
		ExpiresAt time.Time `json:"expiresAt"`
		Metadata  struct {
			Binding struct {
				V           int    `json:"v"`
				InterruptID string `json:"interruptId"`
				Generation  int    `json:"generation"`
			} `json:"tanstack:interruptBinding"`
		} `json:"metadata"`
	}
	if json.Unmarshal(i.Payload, &d) == nil {
		b := d.Metadata.Binding
		a.bound, a.generation, a.expires = b.V == 1 && b.InterruptID == i.ID, b.Generation, d.ExpiresAt
	}
	return a
}

// resumption holds a request against what its thread waits for (spec 07 §9.3).
// Refused is an adapter that says what is wrong; answers commits the answers when
// the run has come to a good end, so that one that fails can be answered again.
func (s *Server) resumption(ctx context.Context, in RunInput) (answers *chat.Middleware, refused chat.Adapter, err error) {
	if s.store.Interrupts == nil {
		if len(in.Resume) == 0 {
			return nil, nil, nil
		}
		return nil, &refusal{in, checkResume(in, nil)}, nil
	}
	pending, err := s.store.Interrupts.Pending(ctx, store.Thread{Tenant: in.Tenant, ID: in.ThreadID})
	if err != nil {
		return nil, nil, fmt.Errorf("server: pending interrupts: %w", err)
	}
	if errs := checkResume(in, pending); len(errs) > 0 {
		return nil, &refusal{in, errs}, nil
	}
	if len(in.Resume) == 0 {
		return nil, nil, nil
	}
	runs := map[string]string{}
	for _, p := range pending {
		runs[p.ID] = p.RunID
	}
	var rs []store.Resolution
	for _, e := range in.Resume {
		rs = append(rs, store.Resolution{RunID: runs[e.InterruptID], ID: e.InterruptID, Status: store.InterruptStatus(e.Status), Answer: e.Payload})
	}
	return &chat.Middleware{
		Name: "resume",
		Setup: func(_ context.Context, r *chat.Run) error {
			r.OnFinish(func(f *store.Final) {
				if f.Status == store.Completed || f.Status == store.Interrupted {
					f.Resolved = append(f.Resolved, rs...)
				}
			})
			return nil
		},
	}, nil, nil
}

func checkResume(in RunInput, pending []store.Interrupt) []interruptError {
	var (
		errs  []interruptError
		byID  = map[string]asked{}
		gate  []string
		owner string
	)
	fail := func(code, text string, retry bool, ids ...string) {
		e := interruptError{
			Scope: "batch", ThreadID: in.ThreadID, InterruptedRunID: owner,
			Code: code, Message: text, Source: "server", Retryable: retry, InterruptIDs: ids,
		}
		if len(ids) == 1 && len(in.Resume) > 0 {
			e.Scope, e.InterruptID, e.InterruptIDs = "item", ids[0], nil
			if a, ok := byID[ids[0]]; ok {
				e.InterruptedRunID, e.Generation = a.RunID, a.generation
			}
		}
		errs = append(errs, e)
	}
	several := false
	for _, p := range pending {
		a := readInterrupt(p)
		byID[p.ID] = a
		if !a.bound {
			continue
		}
		gate = append(gate, p.ID)
		if owner != "" && owner != p.RunID {
			several = true
		}
		owner = p.RunID
	}
	switch {
	case len(in.Resume) == 0 && len(gate) == 0:
		return nil
	case len(in.Resume) == 0:
		fail("unknown-interrupt", "resume is required before accepting new input", true, gate...)
		return errs
	case several:
		fail("stale", "interrupts of more than one run are pending", false, gate...)
		return errs
	case in.ParentRunID != "" && owner != "" && in.ParentRunID != owner:
		fail("stale", "parentRunId isn't the interrupted run", false, gate...)
		return errs
	}
	answered := map[string]bool{}
	for _, e := range in.Resume {
		a, known := byID[e.InterruptID]
		switch {
		case answered[e.InterruptID]:
			fail("conflict", "the interrupt is answered twice", false, e.InterruptID)
		case !known:
			fail("unknown-interrupt", "no such interrupt is pending on this thread", false, e.InterruptID)
		case e.Status == "resolved" && !a.expires.IsZero() && time.Now().After(a.expires):
			fail("expired", "the interrupt has expired: cancel it", true, e.InterruptID)
		}
		answered[e.InterruptID] = true
	}
	for _, id := range gate {
		if !answered[id] {
			fail("incomplete-batch", "the interrupt isn't answered: answer all pending ones together", true, id)
		}
	}
	return errs
}

// refusal is an adapter that does nothing but say why.
type refusal struct {
	in   RunInput
	errs []interruptError
}

func (*refusal) Name() string           { return "refusal" }
func (*refusal) Needs() []chat.AnyToken { return nil }

func (f *refusal) Stream(context.Context, *chat.Run) iter.Seq2[chat.Item, error] {
	return func(yield func(chat.Item, error) bool) {
		md, err := json.Marshal(map[string]any{"tanstack": map[string]any{
			"threadId": f.in.ThreadID, "runId": f.in.RunID, "interruptErrors": f.errs,
		}})
		if err != nil {
			yield(chat.Item{}, err)
			return
		}
		ev := event.RunError{Message: f.errs[0].Message, Code: f.errs[0].Code}
		ev.Metadata = md
		yield(chat.Item{Event: ev}, nil)
	}
}
