package event

import (
	"context"
	"iter"
	"strings"
)

// Offset is a position in a run's log: opaque text that a client hands back to
// read on from there. Empty is the start.
type Offset string

// Offsets with a meaning of their own (spec 07 §10.4).
const (
	FromStart Offset = ""    // on the wire "-1"
	OnlyNew   Offset = "now" // what is appended from now on
)

// Valid says whether o may stand in an id line: not empty, no NUL, CR or LF, no
// space around it (spec 07 §6.3).
func (o Offset) Valid() bool {
	s := string(o)
	return s != "" && !strings.ContainsAny(s, "\x00\r\n") && strings.TrimSpace(s) == s
}

// Entry is an event with its position. An empty Offset marks an event that is
// not part of the log.
type Entry struct {
	Offset Offset
	Event  Event
}

// Source is what can be streamed to a client: a run, or the log of one.
type Source interface {
	// Entries yields what comes strictly after an offset, then what is appended,
	// until the log is closed; a terminal event does not end it. A non-nil error
	// is the last pair. Breaking off the loop ends only this read.
	Entries(ctx context.Context, after Offset) iter.Seq2[Entry, error]
}
