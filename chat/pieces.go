package chat

import (
	"bytes"
	"io"

	"github.com/aisandbox-go/aisandbox/event"
)

// RedactText adds a filter for text that comes in pieces: a message's text and
// reasoning, and the arguments of a tool call. Whole it might show a secret that no
// single piece shows. Open is called for each of these texts; what it is
// given in pieces it writes to w, later if it must, and the rest when it is
// closed. It must be a function of its input. [Run.Redact] sees the pieces after it.
func (r *Run) RedactText(open func(w io.Writer) io.WriteCloser) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.filters = append(r.filters[:len(r.filters):len(r.filters)], open)
}

// pieces filters the texts that are open in a run.
type pieces struct {
	run  *Run
	open map[pieceKey]*piece
}

type pieceKey struct {
	kind event.Type // of its pieces
	id   string
}

// piece is one text: what is written to the chain comes out in out.
type piece struct {
	out   bytes.Buffer
	chain []io.WriteCloser // the first one is written to
}

// pass returns what becomes of an event: the event, with another piece of text or
// after the rest of one, or nothing while its text is held back.
func (p *pieces) pass(ev event.Event) []event.Event {
	switch e := ev.(type) {
	case event.TextMessageContent:
		e.Delta = p.write(pieceKey{e.Type(), e.MessageID}, e.Delta)
		return keep(e, e.Delta)
	case event.ReasoningMessageContent:
		e.Delta = p.write(pieceKey{e.Type(), e.MessageID}, e.Delta)
		return keep(e, e.Delta)
	case event.ToolCallArgs:
		e.Delta = p.write(pieceKey{e.Type(), e.ToolCallID}, e.Delta)
		return keep(e, e.Delta)
	case event.TextMessageEnd:
		rest := p.close(pieceKey{event.TypeTextMessageContent, e.MessageID})
		return append(keep(event.TextMessageContent{MessageID: e.MessageID, Delta: rest}, rest), ev)
	case event.ReasoningMessageEnd:
		rest := p.close(pieceKey{event.TypeReasoningContent, e.MessageID})
		return append(keep(event.ReasoningMessageContent{MessageID: e.MessageID, Delta: rest}, rest), ev)
	case event.ToolCallEnd:
		rest := p.close(pieceKey{event.TypeToolCallArgs, e.ToolCallID})
		return append(keep(event.ToolCallArgs{ToolCallID: e.ToolCallID, Delta: rest}, rest), ev)
	}
	return []event.Event{ev}
}

// keep is the event unless it has no text.
func keep(ev event.Event, text string) []event.Event {
	if text == "" {
		return nil
	}
	return []event.Event{ev}
}

func (p *pieces) write(k pieceKey, delta string) string {
	t := p.open[k]
	if t == nil {
		p.run.mu.Lock()
		filters := p.run.filters
		p.run.mu.Unlock()
		if len(filters) == 0 {
			return delta
		}
		t = &piece{}
		var next io.Writer = &t.out
		for i := len(filters) - 1; i >= 0; i-- {
			f := filters[i](next)
			t.chain = append([]io.WriteCloser{f}, t.chain...)
			next = f
		}
		if p.open == nil {
			p.open = map[pieceKey]*piece{}
		}
		p.open[k] = t
	}
	return p.run.drain(t, func() error { _, err := io.WriteString(t.chain[0], delta); return err })
}

func (p *pieces) close(k pieceKey) string {
	t := p.open[k]
	if t == nil {
		return ""
	}
	delete(p.open, k)
	return p.run.drain(t, func() error {
		for _, c := range t.chain {
			if err := c.Close(); err != nil {
				return err
			}
		}
		return nil
	})
}

// drain returns what a call lets out; nothing where the filter fails.
func (r *Run) drain(t *piece, call func() error) string {
	err := safely("redaction", call)
	s := t.out.String()
	t.out.Reset()
	if err != nil {
		r.log.Error("redaction failed; a piece of text is withheld")
		return ""
	}
	return s
}
