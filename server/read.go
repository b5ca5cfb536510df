package server

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"mime"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/store"
)

// get is GET /v1/chat/{sandbox}: a thread as it is now, or a reader of a run.
func (s *Server) get(w http.ResponseWriter, c *call) error {
	if _, ok := s.cfg.Definitions[c.PathValue("sandbox")]; !ok {
		return errNoDefinition
	}
	q := c.URL.Query()
	if q.Has("threadId") {
		return s.hydrate(w, c, q.Get("threadId"))
	}
	after, ok, err := event.RequestOffset(c.Request)
	switch {
	case err != nil:
		return fmt.Errorf("%w (%w)", errOffset, err)
	case !ok:
		return errNoOffset
	}
	id, err := runID(c, "")
	switch {
	case err != nil:
		return err
	case id == "":
		return errNoRunID
	}
	c.log = c.log.With("run", id)
	rec, err := s.run(c, id)
	if err != nil {
		return err
	}
	if !s.allowed(c, rec.Thread) {
		return errForbidden
	}
	var preamble event.Event
	if after == event.FromStart {
		if preamble, err = s.preamble(c.Context(), rec); err != nil {
			return err
		}
	}
	return s.serveRun(w, c, rec, after, preamble)
}

func (s *Server) expired(rec store.Run, err error) error {
	if rec.Definition == "" {
		return err
	}
	return &expiredError{err, "/v1/chat/" + rec.Definition + "?threadId=" + url.QueryEscape(rec.Thread.ID)}
}

// preamble is the conversation that a run started from. A client that joins
// without knowing it would lose the first message of a run that begins with
// reasoning (spec 07 §11.4). Nil where nothing is known.
func (s *Server) preamble(ctx context.Context, rec store.Run) (event.Event, error) {
	var stored []event.Message
	if s.store.Messages != nil {
		var err error
		if stored, err = s.store.Messages.Load(ctx, rec.Thread); err != nil {
			return nil, fmt.Errorf("server: load thread %q: %w", rec.Thread.ID, err)
		}
	}
	in, err := parseInput(rec.Input)
	if err != nil {
		in = RunInput{} // not a run that was started here
	}
	msgs := untilTurn(stored, in.Messages)
	if len(msgs) == 0 {
		return nil, nil
	}
	ev := event.MessagesSnapshot{Messages: msgs}
	ev.Timestamp = rec.StartedAt.UnixMilli()
	return ev, nil
}

// untilTurn is the stored conversation up to the turn that the run was started
// with; the messages of the request where that isn't stored.
func untilTurn(stored, said []event.Message) []event.Message {
	turn := ""
	for _, m := range said {
		if m.Role == "user" {
			turn = m.ID
		}
	}
	last := -1
	for i, m := range stored {
		if m.ID == turn || turn == "" && m.Role == "user" {
			last = i
		}
	}
	switch {
	case last >= 0:
		return stored[:last+1]
	case len(stored) == 0:
		return said
	}
	return follow(stored, said) // it waits for its turn
}

// serveRun streams a run's log to one reader, after an offset. The reader pulls:
// it can hold up nobody but itself.
func (s *Server) serveRun(w http.ResponseWriter, c *call, rec store.Run, after event.Offset, preamble event.Event) error {
	if rec.EventsExpired {
		return s.expired(rec, &store.OffsetError{RunID: rec.ID, Offset: after, Reason: store.OffsetExpired})
	}
	leave, err := s.enter(rec.ID)
	if err != nil {
		return err
	}
	defer leave()
	ctx, stop := context.WithCancel(c.Context())
	defer stop()
	defer context.AfterFunc(s.stopped, stop)()
	src := &reading{log: s.store.Log, run: rec.ID, after: after, preamble: preamble, lag: s.metrics.lag, from: time.Now().UnixMilli()}
	if after != event.FromStart {
		// What can't be read is told by a status, so it must be known before the headers.
		defer src.close()
		if err := src.try(ctx); err != nil {
			var off *store.OffsetError
			if errors.As(err, &off) {
				return s.expired(rec, err)
			}
			return err
		}
	}
	w.Header().Set("X-Run-Id", rec.ID)
	w.Header().Add("Vary", "Accept")
	serve := s.stream.SSE
	if wantsNDJSON(c.Request) {
		serve = s.stream.NDJSON
	}
	if err := serve(w, c.Request.WithContext(ctx), src); err != nil {
		return err
	}
	if s.stopped.Err() != nil && c.Context().Err() == nil && !src.ended {
		// An end without a terminal event would be taken for the run's; a broken
		// connection makes the client come back.
		return http.ErrAbortHandler
	}
	return nil
}

func wantsNDJSON(r *http.Request) bool {
	for _, v := range r.Header.Values("Accept") {
		for part := range strings.SplitSeq(v, ",") {
			if m, _, err := mime.ParseMediaType(part); err == nil && m == "application/x-ndjson" {
				return true
			}
		}
	}
	return false
}

func (s *Server) enter(id string) (leave func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.stopped.Err() != nil:
		return nil, errShutdown
	case s.reading >= s.cfg.Limits.Readers:
		return nil, errReaders
	}
	s.reading++
	gone := s.cfg.Presence.Enter(id)
	return func() {
		gone()
		s.mu.Lock()
		s.reading--
		s.mu.Unlock()
	}, nil
}

// reading is one read of a log, as a source.
type reading struct {
	log      store.Log
	run      string
	after    event.Offset
	preamble event.Event // follows the first event, without an offset
	lag      interface{ Observe(float64) }
	from     int64 // when the read began: what is older is no measure of the lag

	ended bool // to the end of the log

	next   func() (event.Entry, error, bool)
	stop   func()
	cancel context.CancelFunc
	first  chan pulled // the answer of the first next, from try
	taken  bool
}

type pulled struct {
	e   event.Entry
	err error
	ok  bool
}

// tryFor is how long a read may take to say that it can't begin at an offset. One
// that is valid answers at once or waits for what isn't there yet.
const tryFor = 500 * time.Millisecond

// try begins the read; close must follow, after Entries.
func (rd *reading) try(ctx context.Context) error {
	ctx, rd.cancel = context.WithCancel(ctx)
	rd.next, rd.stop = iter.Pull2(rd.log.Read(ctx, rd.run, rd.after))
	rd.first = make(chan pulled, 1)
	go func() {
		e, err, ok := rd.next()
		rd.first <- pulled{e, err, ok}
	}()
	t := time.NewTimer(tryFor)
	defer t.Stop()
	select {
	case p := <-rd.first:
		rd.first <- p
		return p.err
	case <-t.C:
		return nil
	}
}

// close ends a read that try began, and waits for it.
func (rd *reading) close() {
	rd.cancel()
	if !rd.taken {
		<-rd.first
	}
	rd.stop()
}

// Entries reads from where the reading was made for; after is not looked at.
func (rd *reading) Entries(ctx context.Context, _ event.Offset) iter.Seq2[event.Entry, error] {
	src := rd.log.Read(ctx, rd.run, rd.after)
	if rd.first != nil {
		src = rd.pulled(ctx)
	}
	return func(yield func(event.Entry, error) bool) {
		begun := false
		for e, err := range src {
			if err == nil && e.Event != nil {
				if at := e.Event.Base().Timestamp; at > rd.from {
					rd.lag.Observe(time.Since(time.UnixMilli(at)).Seconds())
				}
			}
			if !yield(e, err) {
				return
			}
			if err != nil {
				return
			}
			if !begun && rd.preamble != nil && !yield(event.Entry{Event: rd.preamble}, nil) {
				return
			}
			begun = true
		}
		rd.ended = true
	}
}

func (rd *reading) pulled(ctx context.Context) iter.Seq2[event.Entry, error] {
	return func(yield func(event.Entry, error) bool) {
		defer context.AfterFunc(ctx, rd.cancel)()
		p := <-rd.first
		for rd.taken = true; p.ok; p.e, p.err, p.ok = rd.next() {
			if !yield(p.e, p.err) || p.err != nil {
				return
			}
		}
	}
}
