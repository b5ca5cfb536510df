package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"

	"github.com/aisandbox-go/aisandbox/chat"
	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/sandbox"
	"github.com/aisandbox-go/aisandbox/store"
)

// post is POST /v1/chat/{sandbox}: a new run, or, with an offset, a reader of one
// that exists.
func (s *Server) post(w http.ResponseWriter, c *call) error {
	def, ok := s.cfg.Definitions[c.PathValue("sandbox")]
	if !ok {
		return errNoDefinition
	}
	after, resume, err := event.RequestOffset(c.Request)
	if err != nil {
		return fmt.Errorf("%w (%w)", errOffset, err)
	}
	body, err := s.readBody(w, c)
	if err != nil {
		return err
	}
	in, err := parseInput(body)
	if err != nil {
		return err
	}
	if _, err := runID(c, in.RunID); err != nil {
		return err
	}
	in.Definition, in.Tenant, in.UserID = c.PathValue("sandbox"), c.who.Tenant, c.who.UserID
	c.log = c.log.With("run", in.RunID, "thread", in.ThreadID)
	thread := store.Thread{Tenant: in.Tenant, ID: in.ThreadID}
	if !s.allowed(c, thread) {
		return errForbidden
	}
	if resume {
		// The identical POST again, after a drop: nothing but a read.
		rec, err := s.run(c, in.RunID)
		switch {
		case err != nil:
			return err
		case rec.Thread != thread:
			return errThread
		}
		return s.serveRun(w, c, rec, after, nil)
	}
	run, err := s.start(c, def, in, body)
	if err != nil {
		return err
	}
	rec := store.Run{ID: run.ID(), Thread: thread, Definition: in.Definition}
	if run.Joined() {
		if rec, err = s.run(c, run.ID()); err != nil {
			return err
		}
		w.Header().Set("X-Run-Resumed", "1")
	}
	return s.serveRun(w, c, rec, event.FromStart, nil)
}

// runID is the run that a request names: by header, query and body, which must
// not differ. Empty where it names none.
func runID(c *call, body string) (string, error) {
	id := body
	for _, v := range []string{c.Header.Get("X-Run-Id"), c.URL.Query().Get("runId")} {
		switch {
		case v == "" || v == id:
		case id == "":
			id = v
		default:
			return "", errRunMismatch
		}
	}
	if id != "" && !validID(id) {
		return "", errQuery
	}
	return id, nil
}

func (s *Server) allowed(c *call, t store.Thread) bool {
	return s.cfg.Authorize == nil || s.cfg.Authorize(c.Context(), c.who, t)
}

// run returns a record that the caller may see; others are as if they weren't.
func (s *Server) run(c *call, id string) (store.Run, error) {
	rec, err := s.store.Runs.Get(c.Context(), id)
	if err == nil && (rec.Thread.Tenant != c.who.Tenant ||
		c.PathValue("sandbox") != "" && rec.Definition != c.PathValue("sandbox")) {
		err = &store.NotFoundError{What: "run", ID: id}
	}
	if errors.Is(err, store.ErrNotFound) {
		return store.Run{}, errUnknownRun
	}
	return rec, err
}

// start starts a run, or joins the one that has its id.
func (s *Server) start(c *call, def Definition, in RunInput, body []byte) (*chat.Run, error) {
	// The run is its own: neither its start nor its life depends on who asked.
	ctx, stop := aside(c.Request)
	defer stop()
	if err := s.admit(); err != nil {
		return nil, err
	}
	defer s.admitted()
	req, err := s.request(ctx, def, in, body)
	if err != nil {
		return nil, err
	}
	r, err := chat.Start(ctx, req)
	if err != nil {
		return nil, err
	}
	if !r.Joined() {
		s.drive(r)
	}
	return r, nil
}

// admit lets a start through while there is room, and not once shut down.
func (s *Server) admit() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.down:
		return errShutdown
	case len(s.live)+s.starts >= s.cfg.Limits.Runs:
		return errRuns
	}
	s.starts++
	return nil
}

func (s *Server) admitted() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.starts--
}

// drive keeps a run among the live ones until its driver is through.
func (s *Server) drive(r *chat.Run) {
	s.mu.Lock()
	s.live[r.ID()] = r
	s.mu.Unlock()
	s.aside.Go(func() {
		o, err := r.Wait(context.Background())
		s.mu.Lock()
		delete(s.live, r.ID())
		s.mu.Unlock()
		s.wakeLine(r.Thread())
		if err == nil {
			s.metrics.ended.WithLabelValues(string(o.Kind)).Inc()
		}
	})
}

// Rebuild makes the request of a recorded run again, as the server made it, so
// that another host can go on with it. The run's Input must be that of a request
// to this server.
func (s *Server) Rebuild(ctx context.Context, rec store.Run) (chat.Request, error) {
	def, ok := s.cfg.Definitions[rec.Definition]
	if !ok {
		return chat.Request{}, fmt.Errorf("server: run %q: definition %q: %w", rec.ID, rec.Definition, errNoDefinition)
	}
	var kept recorded
	err := json.Unmarshal(rec.Input, &kept)
	var in RunInput
	if err == nil {
		in, err = parseInput(kept.Body)
	}
	if err != nil {
		return chat.Request{}, fmt.Errorf("server: run %q: %w", rec.ID, err)
	}
	in.Definition, in.Tenant, in.UserID = rec.Definition, rec.Thread.Tenant, kept.User
	return s.request(ctx, def, in, kept.Body)
}

// recorded is what a run's record keeps of its request. The user is part of it,
// since users share no sandbox.
type recorded struct {
	User string          `json:"user"`
	Body json.RawMessage `json:"body"` // as the client sent it
}

func record(user string, body []byte) json.RawMessage {
	u, _ := json.Marshal(user) // a string always marshals
	return slices.Concat([]byte(`{"user":`), u, []byte(`,"body":`), body, []byte("}"))
}

// request is the run that a definition makes of an input.
func (s *Server) request(ctx context.Context, def Definition, in RunInput, body []byte) (chat.Request, error) {
	req, err := def.Request(ctx, in)
	if err != nil {
		return chat.Request{}, err
	}
	req.RunID, req.ThreadID, req.ParentRunID = in.RunID, in.ThreadID, in.ParentRunID
	req.Tenant, req.UserID, req.Definition = in.Tenant, in.UserID, in.Definition
	req.Input = record(in.UserID, body)
	if req.Messages == nil {
		req.Messages = in.Messages
	}
	if req.Logger == nil {
		req.Logger = s.log
	}
	req.Exclusive, req.Queue = true, def.QueueDepth
	if def.Busy == BusyReject {
		req.Queue = 0
	} else if req.Queue == 0 {
		req.Queue = DefaultQueueDepth
	}
	durable := chat.Durable(chat.Durability{
		Runs: s.store.Runs, Log: s.store.Log, Messages: s.store.Messages, Interrupts: s.store.Interrupts,
		Owner: s.cfg.Owner, Lease: s.cfg.Lease, Keeper: s.cfg.Keeper, Presence: s.cfg.Presence,
	})
	answers, refused, err := s.resumption(ctx, in)
	if err != nil {
		return chat.Request{}, err
	}
	if refused != nil {
		// A run that only says why it isn't one (spec 07 §9.4).
		req.Adapter, req.Use, req.Tools = refused, []chat.Middleware{durable}, nil
		return req, nil
	}
	use := []chat.Middleware{durable, s.turn(def.Busy, in)}
	if answers != nil {
		use = append(use, *answers)
	}
	if s.store.Leases != nil && !provides(req.Use, chat.Leases) {
		use = append(use, chat.Locks(s.store.Leases))
	}
	if s.store.Instances != nil && !provides(req.Use, sandbox.InstancesToken) {
		use = append(use, chat.Middleware{
			Name: "instances", Provides: []chat.AnyToken{sandbox.InstancesToken},
			Setup: func(_ context.Context, r *chat.Run) error {
				sandbox.InstancesToken.Provide(r, s.store.Instances)
				return nil
			},
		})
	}
	if s.store.Messages != nil && !provides(req.Use, chat.PendingTurn) {
		use = append(use, chat.Persist(s.store.Messages, s.store.Interrupts))
	}
	req.Use = append(use, req.Use...)
	return req, nil
}

func provides(use []chat.Middleware, t chat.AnyToken) bool {
	return slices.ContainsFunc(use, func(m chat.Middleware) bool { return slices.Contains(m.Provides, t) })
}

// cancel is POST /v1/chat/{sandbox}/cancel. It answers when the wish is recorded;
// the driver ends the run once its agent is dead.
func (s *Server) cancel(w http.ResponseWriter, c *call) error {
	if _, ok := s.cfg.Definitions[c.PathValue("sandbox")]; !ok {
		return errNoDefinition
	}
	body, err := s.readBody(w, c)
	if err != nil {
		return err
	}
	o, err := object(body)
	if err != nil {
		return errCancel
	}
	var threadID, id string
	if str(o, "threadId", &threadID, false) != nil || str(o, "runId", &id, false) != nil || threadID == "" && id == "" {
		return errCancel
	}
	ctx, stop := aside(c.Request)
	defer stop()
	var ids []string
	if id != "" {
		rec, err := s.run(c, id)
		switch {
		case err == errUnknownRun:
		case err != nil:
			return err
		case threadID != "" && rec.Thread.ID != threadID:
		case !s.allowed(c, rec.Thread):
			return errForbidden
		case rec.Active():
			ids = append(ids, id)
		}
	} else {
		t := store.Thread{Tenant: c.who.Tenant, ID: threadID}
		if !s.allowed(c, t) {
			return errForbidden
		}
		runs, _, err := s.store.Runs.List(ctx, store.Query{
			Tenant: t.Tenant, ThreadID: t.ID, Status: []store.Status{store.Running}, Limit: 1000,
		})
		if err != nil {
			return err
		}
		// The newest first, so that none gets its turn on the way.
		for _, rec := range slices.Backward(runs) {
			if rec.Definition == c.PathValue("sandbox") {
				ids = append(ids, rec.ID)
			}
		}
	}
	for _, id := range ids {
		c.log.Info("cancel", "run", id)
		if err := s.cancelRun(ctx, id, "requested by the client"); err != nil {
			return err
		}
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// cancelRun reaches the driver of this process at once and any other by the store.
func (s *Server) cancelRun(ctx context.Context, id, reason string) error {
	if err := s.store.Runs.RequestCancel(ctx, id, reason); err != nil {
		return fmt.Errorf("server: cancel run %q: %w", id, err)
	}
	s.mu.Lock()
	r := s.live[id]
	s.mu.Unlock()
	if r != nil {
		return r.Cancel(reason)
	}
	return nil
}
