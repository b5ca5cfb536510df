package harness

import (
	"strings"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/secret"
)

// scrubber hides secrets that a program prints in pieces. The run hides them in
// each event by itself; what is split over the deltas of one message can only be
// seen here, where the deltas are in order. It holds back what may be the
// beginning of a secret until the next delta, or the end, tells. Not for
// concurrent use.
type scrubber struct {
	red  *secret.Redactor
	open map[string]*scrubbed
}

// scrubbed is one open message or call.
type scrubbed struct {
	w   *secret.Writer
	out strings.Builder
}

func newScrubber(red *secret.Redactor) *scrubber {
	return &scrubber{red: red, open: map[string]*scrubbed{}}
}

// scrub returns what to emit for ev.
func (s *scrubber) scrub(ev event.Event) []event.Event {
	if s.red.Idle() {
		return []event.Event{ev}
	}
	switch e := ev.(type) {
	case event.TextMessageContent:
		e.Delta = s.delta("t"+e.MessageID, e.Delta)
		return unlessEmpty(e, e.Delta)
	case event.ReasoningMessageContent:
		e.Delta = s.delta("r"+e.MessageID, e.Delta)
		return unlessEmpty(e, e.Delta)
	case event.ToolCallArgs:
		e.Delta = s.delta("c"+e.ToolCallID, e.Delta)
		return unlessEmpty(e, e.Delta)
	case event.TextMessageEnd:
		rest := s.end("t" + e.MessageID)
		return append(unlessEmpty(event.TextMessageContent{MessageID: e.MessageID, Delta: rest}, rest), ev)
	case event.ReasoningMessageEnd:
		rest := s.end("r" + e.MessageID)
		return append(unlessEmpty(event.ReasoningMessageContent{MessageID: e.MessageID, Delta: rest}, rest), ev)
	case event.ToolCallEnd:
		rest := s.end("c" + e.ToolCallID)
		return append(unlessEmpty(event.ToolCallArgs{ToolCallID: e.ToolCallID, Delta: rest}, rest), ev)
	}
	return []event.Event{ev}
}

func unlessEmpty(ev event.Event, delta string) []event.Event {
	if delta == "" {
		return nil
	}
	return []event.Event{ev}
}

func (s *scrubber) delta(key, delta string) string {
	o := s.open[key]
	if o == nil {
		o = &scrubbed{}
		o.w = s.red.Writer(&o.out)
		s.open[key] = o
	}
	_, _ = o.w.Write([]byte(delta)) // a Builder never fails
	return o.take()
}

func (s *scrubber) end(key string) string {
	o := s.open[key]
	if o == nil {
		return ""
	}
	delete(s.open, key)
	_ = o.w.Close()
	return o.take()
}

func (o *scrubbed) take() string {
	out := o.out.String()
	o.out.Reset()
	return out
}
