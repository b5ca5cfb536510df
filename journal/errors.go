package journal

import (
	"errors"
	"fmt"
)

// States that callers branch on; the types below match one each.
var (
	ErrAttachUnavailable error = &coded{"journal_attach_unavailable", "the journal can't be attached to"}
	ErrLineTooLong       error = &coded{"journal_line_too_long", "a line is too long"}
	ErrTornFrame         error = &coded{"journal_torn_frame", "the journal is damaged"}
	ErrTampered          error = &coded{"journal_tampered", "the journal was changed"}
	ErrEndedWithoutExit  error = &coded{"agent_died", "the journal ends without an exit"}
)

type coded struct{ code, text string }

func (e *coded) Error() string { return "journal: " + e.text }

// Code is stable.
func (e *coded) Code() string { return e.code }

// AttachReason says why there is nothing to attach to.
type AttachReason string

// The reasons of spec 04 §3.7.
const (
	AttachUnknown  AttachReason = "unknown-run"     // nobody knows the run
	AttachTerminal AttachReason = "terminal-run"    // it has ended; its log tells the story
	AttachTimeout  AttachReason = "journal-timeout" // the journal did not appear in time
	AttachStalled  AttachReason = "journal-stalled" // it is there, and not one byte came in time
)

// AttachError is a journal that can't be read from its start.
type AttachError struct {
	RunID  string
	Reason AttachReason
	Err    error // what the last look at it said; may be nil
}

func (e *AttachError) Error() string {
	s := fmt.Sprintf("journal: attach to run %q: %s", e.RunID, e.Reason)
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	return s
}

// Is matches ErrAttachUnavailable.
func (e *AttachError) Is(target error) bool { return target == ErrAttachUnavailable }

// Unwrap returns what the last look said.
func (e *AttachError) Unwrap() error { return e.Err }

// Code is that of ErrAttachUnavailable.
func (e *AttachError) Code() string { return code(ErrAttachUnavailable) }

// LineError is a line of more than Limit bytes. What follows it can't be
// understood without it.
type LineError struct {
	RunID string
	Limit int
}

func (e *LineError) Error() string {
	return fmt.Sprintf("journal: run %q: a line of more than %d bytes", e.RunID, e.Limit)
}

// Is matches ErrLineTooLong.
func (e *LineError) Is(target error) bool { return target == ErrLineTooLong }

// Code is that of ErrLineTooLong.
func (e *LineError) Code() string { return code(ErrLineTooLong) }

// TornError is a damaged frame with more behind it.
type TornError struct {
	RunID string
	Off   int64 // of the damage
}

func (e *TornError) Error() string {
	return fmt.Sprintf("journal: run %q: a damaged frame at %d has more behind it", e.RunID, e.Off)
}

// Is matches ErrTornFrame.
func (e *TornError) Is(target error) bool { return target == ErrTornFrame }

// Code is that of ErrTornFrame.
func (e *TornError) Code() string { return code(ErrTornFrame) }

// TamperedError is an exit whose proof does not hold for what was read, or a
// journal that shrank.
type TamperedError struct{ RunID, Why string }

func (e *TamperedError) Error() string {
	return fmt.Sprintf("journal: run %q: the journal was changed: %s", e.RunID, e.Why)
}

// Is matches ErrTampered.
func (e *TamperedError) Is(target error) bool { return target == ErrTampered }

// Code is that of ErrTampered.
func (e *TamperedError) Code() string { return code(ErrTampered) }

// EndedError is a journal that nobody will finish.
type EndedError struct{ RunID, Why string }

func (e *EndedError) Error() string {
	return fmt.Sprintf("journal: run %q ended without an exit: %s", e.RunID, e.Why)
}

// Is matches ErrEndedWithoutExit.
func (e *EndedError) Is(target error) bool { return target == ErrEndedWithoutExit }

// Code is "agent_died".
func (e *EndedError) Code() string { return code(ErrEndedWithoutExit) }

func code(err error) string {
	var c interface{ Code() string }
	if errors.As(err, &c) {
		return c.Code()
	}
	return ""
}
