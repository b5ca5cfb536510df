package modeltest

import (
	"context"
	"io"
	"net/http"
	"time"
)

// dialect is one model API on the wire.
type dialect interface {
	// parse reads q.Body into a view and may keep a parsed form in q.
	parse(q *Request) (*view, error)
	// stream sends a as server-sent events until s is over.
	stream(s *stream, a *answer)
	// whole returns a as the one JSON object of a non-streaming answer.
	whole(a *answer) string
	// failure returns the error object of the API.
	failure(typ, message, requestID string) string
	// errorType and errorStatus translate between HTTP status and error type.
	errorType(status int) string
	errorStatus(typ string) int
}

// recordTimeout bounds the time for one record to leave, so that a client which
// stops reading does not hold a handler for ever.
const recordTimeout = time.Minute

// stream writes server-sent events with the delays and faults of a turn.
type stream struct {
	ctx    context.Context
	w      http.ResponseWriter
	rc     *http.ResponseController
	turn   *Turn
	begun  bool
	over   bool // nothing more may be sent
	deltas int
	done   bool // the fault of the turn has happened

	malformed string           // what Malformed sends
	failure   func(f *Failure) // sends the error record
}

func newStream(ctx context.Context, w http.ResponseWriter, t *Turn) *stream {
	return &stream{ctx: ctx, w: w, rc: http.NewResponseController(w), turn: t}
}

// send writes and flushes one record. After the stream is over it does nothing.
func (s *stream) send(event, data string) {
	if s.over {
		return
	}
	if !s.begun {
		s.begun = true
		h := s.w.Header()
		h.Set("Content-Type", "text/event-stream; charset=utf-8")
		h.Set("Cache-Control", "no-cache")
		s.w.WriteHeader(http.StatusOK)
	} else if !pause(s.ctx, s.turn.Delay) {
		s.over = true
		return
	}
	_ = s.rc.SetWriteDeadline(time.Now().Add(recordTimeout)) // not every ResponseWriter can
	if _, err := io.WriteString(s.w, "event: "+event+"\ndata: "+data+"\n\n"); err != nil {
		s.over = true
		return
	}
	if err := s.rc.Flush(); err != nil {
		s.over = true
	}
}

// delta sends a record that the faults of the turn count.
func (s *stream) delta(event, data string) {
	s.fault(false)
	s.send(event, data)
	s.deltas++
	s.fault(false)
}

// end is called after the last delta. A fault that has not happened yet happens
// now: templates can make a message shorter than the script's check knew.
func (s *stream) end() { s.fault(true) }

func (s *stream) fault(last bool) {
	if s.done || s.over {
		return
	}
	due := func(n int) bool { return last || s.deltas >= n }
	t := s.turn
	switch {
	case t.Cut != nil && due(*t.Cut):
		pause(s.ctx, t.Delay)
		panic(http.ErrAbortHandler)
	case t.Hang != nil && due(*t.Hang):
		hang(s.ctx)
	case t.Malformed != nil && due(*t.Malformed):
		s.done = true
		s.send("content_block_delta", s.malformed)
	case t.Error != nil && due(t.Error.After):
		s.done = true
		s.failure(t.Error)
		s.over = true
	}
}
