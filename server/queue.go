package server

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/aisandbox-go/aisandbox/chat"
	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/store"
)

// The order of a thread's runs is the order of their records (store.NewRun.Queue),
// so that all hosts agree on it and a host's death loses no place. A run waits in
// its first Setup: it is recorded, has its log and can be cancelled like any other,
// and nothing of it has been prepared yet.

// pollTurn is how often a waiting run looks for itself; the end of a run of this
// host wakes it at once.
const pollTurn = time.Second

// waiter is what the waiting runs of a thread on this host share. Guarded by
// Server.mu.
type waiter struct {
	waiting int
	wake    chan struct{} // closed when a run of the thread has ended
}

// turn is the middleware that waits. With supersede it first cancels whoever is
// ahead.
func (s *Server) turn(b Busy, in RunInput) chat.Middleware {
	return chat.Middleware{
		Name:  "turn",
		Setup: func(ctx context.Context, r *chat.Run) error { return s.awaitTurn(ctx, r, b, in) },
	}
}

func (s *Server) awaitTurn(ctx context.Context, r *chat.Run, b Busy, in RunInput) error {
	var (
		shown    int
		wake     <-chan struct{}
		canceled = map[string]bool{}
	)
	defer func() {
		if wake != nil {
			s.leaveLine(r.Thread())
		}
	}()
	for {
		if wake != nil {
			wake = s.wakeOf(r.Thread()) // before looking, so that nothing is missed
		}
		ahead, err := s.ahead(ctx, r)
		if err != nil {
			return err
		}
		if len(ahead) == 0 {
			if shown == 0 {
				return nil
			}
			return s.afterWaiting(ctx, r, in)
		}
		if wake == nil {
			wake = s.joinLine(r.Thread())
			continue // once more, now that a change wakes us
		}
		if b == BusySupersede {
			for _, id := range ahead {
				if !canceled[id] {
					canceled[id] = true
					if err := s.cancelRun(ctx, id, "superseded"); err != nil {
						return err
					}
				}
			}
		}
		if len(ahead) != shown {
			shown = len(ahead)
			ev, err := event.NewCustom(event.NameRunQueued, event.RunQueued{Position: shown})
			if err == nil {
				err = r.Emit(ctx, ev)
			}
			if err != nil {
				return err
			}
		}
		t := time.NewTimer(pollTurn)
		select {
		case <-wake:
			t.Stop()
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return context.Cause(ctx)
		}
	}
}

// ahead are the running runs of the thread that were recorded before r.
func (s *Server) ahead(ctx context.Context, r *chat.Run) ([]string, error) {
	for wait := 50 * time.Millisecond; ; wait = min(2*wait, 2*time.Second) {
		var ids []string
		q := store.Query{Tenant: r.Thread().Tenant, ThreadID: r.ThreadID(), Status: []store.Status{store.Running}, Limit: 1000}
		runs, _, err := s.store.Runs.List(ctx, q)
		if err == nil {
			for _, o := range runs {
				if o.ID == r.ID() {
					break
				}
				ids = append(ids, o.ID)
			}
			return ids, nil
		}
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if answer(err).status != 503 {
			return nil, fmt.Errorf("server: whose turn is it on thread %q: %w", r.ThreadID(), err)
		}
		t := time.NewTimer(wait) // a store that is away must not cost a run its place
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return nil, context.Cause(ctx)
		}
	}
}

// afterWaiting brings a run up to date with what happened meanwhile: its client
// couldn't know how the runs before it ended.
func (s *Server) afterWaiting(ctx context.Context, r *chat.Run, in RunInput) error {
	if s.store.Interrupts != nil {
		pending, err := s.store.Interrupts.Pending(ctx, r.Thread())
		if err != nil {
			return err
		}
		if errs := checkResume(in, pending); len(errs) > 0 {
			return &resumeError{code: errs[0].Code, text: errs[0].Message}
		}
	}
	if s.store.Messages == nil || len(r.Request().Messages) == 0 {
		return nil
	}
	stored, err := s.store.Messages.Load(ctx, r.Thread())
	if err != nil {
		return err
	}
	if len(stored) > 0 {
		r.Configure(func(q *chat.Request) { q.Messages = follow(stored, q.Messages) })
	}
	return nil
}

// follow returns the stored conversation followed by what the client said that is
// not in it. What the client has of the agent's part is a copy, maybe a torn one.
func follow(stored, said []event.Message) []event.Message {
	known := map[string]bool{}
	for _, m := range stored {
		known[m.ID] = true
	}
	out := slices.Clone(stored)
	for _, m := range said {
		if !known[m.ID] && (m.Role == "user" || m.Role == "system" || m.Role == "developer") {
			out = append(out, m)
		}
	}
	return out
}

func (s *Server) joinLine(t store.Thread) <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := s.lines[t]
	if w == nil {
		w = &waiter{wake: make(chan struct{})}
		s.lines[t] = w
	}
	w.waiting++
	s.metrics.queued.Inc()
	return w.wake
}

func (s *Server) wakeOf(t store.Thread) <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lines[t].wake
}

func (s *Server) leaveLine(t store.Thread) {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := s.lines[t]
	if w.waiting--; w.waiting == 0 {
		delete(s.lines, t)
	}
	s.metrics.queued.Dec()
}

// wakeLine tells who waits on a thread that one of its runs has ended.
func (s *Server) wakeLine(t store.Thread) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if w := s.lines[t]; w != nil {
		close(w.wake)
		w.wake = make(chan struct{})
	}
}
