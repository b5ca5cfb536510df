package chat

import (
	"errors"
	"fmt"
	"strings"

	"github.com/aisandbox-go/aisandbox/store"
)

// Causes of a run's context (architecture §7). store.ErrFenced is one too.
var (
	// ErrCanceled: somebody asked for the end, or the only reader of a run that is
	// not durable left. End the agent.
	ErrCanceled error = &coded{"aborted", "the run was cancelled"}

	// ErrBudget: the run took longer than Request.Timeout. End the agent.
	ErrBudget error = &coded{"budget_exceeded", "the run took too long"}

	// ErrDetached: this host stops driving. Leave the agent alone.
	ErrDetached error = &coded{"detached", "the run goes on without this host"}

	// ErrShutdown: this host stops. Leave the agent alone.
	ErrShutdown error = &coded{"shutdown", "this host is shutting down"}
)

// ErrLost: what the agent of a run that was taken over worked in is gone for good,
// and the agent with it. A Setup says so; any other error of a Setup leaves such a
// run open, since its agent may be well.
var ErrLost error = &coded{"sandbox_lost", "what the run worked in is gone"}

var (
	// ErrEnded: the run has ended, or is about to, so that nothing can be added.
	ErrEnded error = &coded{"run_ended", "the run has ended"}

	// ErrDurableRunIDRequired: a durable run needs a run id that its caller can
	// tell again.
	ErrDurableRunIDRequired error = &coded{"durable_run_id_required",
		"a durable run needs Request.RunID: an id that the caller chose and can repeat after a disconnect"}

	// ErrDurableThreadIDRequired: attaching to a durable run needs its thread id.
	ErrDurableThreadIDRequired error = &coded{"durable_thread_id_required",
		"attaching to a durable run needs Request.ThreadID, the one that the run was started with"}
)

// AttachError: the run can't be taken over, because nothing keeps what its agent
// says: starting over would run the agent a second time.
type AttachError struct {
	Adapter string
	Reason  string
}

func (e *AttachError) Error() string {
	return fmt.Sprintf("chat: a run of adapter %q can't be taken over: %s", e.Adapter, e.Reason)
}

// Code is "durable_attach_not_supported".
func (e *AttachError) Code() string { return "durable_attach_not_supported" }

type coded struct{ code, text string }

func (e *coded) Error() string { return "chat: " + e.text }

// Code is stable.
func (e *coded) Code() string { return e.code }

// CanceledError is ErrCanceled with the reason that was given.
type CanceledError struct{ Reason string }

func (e *CanceledError) Error() string {
	if e.Reason == "" {
		return ErrCanceled.Error()
	}
	return ErrCanceled.Error() + ": " + e.Reason
}

// Is matches ErrCanceled.
func (e *CanceledError) Is(target error) bool { return target == ErrCanceled }

// Code is "aborted".
func (e *CanceledError) Code() string { return "aborted" }

// RequestError is a Request that can't be run.
type RequestError struct {
	Field  string
	Reason string // what is wrong and what to do about it
}

func (e *RequestError) Error() string { return "chat: Request." + e.Field + ": " + e.Reason }

// Code is "invalid_request".
func (e *RequestError) Code() string { return "invalid_request" }

// MissingError: the adapter needs what no middleware provides, or a middleware
// didn't provide what it declares.
type MissingError struct {
	Adapter    string
	Middleware string // set if this one declared Token and didn't provide it
	Token      string
	Provided   []string // names of the tokens that are provided
	Cure       string
}

func (e *MissingError) Error() string {
	if e.Middleware != "" {
		return fmt.Sprintf("chat: middleware %q declares that it provides %q, but its Setup didn't", e.Middleware, e.Token)
	}
	provided := "none"
	if len(e.Provided) > 0 {
		provided = strings.Join(e.Provided, ", ")
	}
	s := fmt.Sprintf("chat: adapter %q needs %q; provided: %s", e.Adapter, e.Token, provided)
	if e.Cure != "" {
		s += "; " + e.Cure
	}
	return s
}

// Code is "capability_missing".
func (e *MissingError) Code() string { return "capability_missing" }

// OrderError: a middleware must come after the one that provides Token.
type OrderError struct {
	Middleware string
	Token      string
	Provider   string // the middleware that provides it, too late
}

func (e *OrderError) Error() string {
	return fmt.Sprintf("chat: middleware %q uses %q, which %q provides later: put %[3]q before %[1]q in Request.Use",
		e.Middleware, e.Token, e.Provider)
}

// Code is "middleware_order".
func (e *OrderError) Code() string { return "middleware_order" }

// DivergedError: a replay of the journal gave other events than the log has.
// Nothing is written after it.
type DivergedError struct {
	RunID     string
	Pos       store.Pos
	Index     int // of the event in the log
	Want, Got string
}

func (e *DivergedError) Error() string {
	return fmt.Sprintf("chat: run %q: the replay differs from the log at %d:%d (event %d): want %s, got %s",
		e.RunID, e.Pos.Off, e.Pos.Idx, e.Index, e.Want, e.Got)
}

// Code is "replay_diverged".
func (e *DivergedError) Code() string { return "replay_diverged" }

// PanicError is a panic of an adapter or a middleware, turned into an error.
type PanicError struct {
	Where string
	Value any
	Stack []byte // for logs, never for viewers
}

func (e *PanicError) Error() string { return fmt.Sprintf("chat: %s panicked: %v", e.Where, e.Value) }

// Code is "internal".
func (e *PanicError) Code() string { return "internal" }

// AgentError is a failure that the agent reported, or that is known from the log
// alone: the text and the code of the RUN_ERROR.
type AgentError struct {
	Message string
	ErrCode string
}

func (e *AgentError) Error() string { return e.Message }

// Code is the code of the RUN_ERROR.
func (e *AgentError) Code() string { return e.ErrCode }

// errNoTerminal: the adapter's stream ended, but it never said how.
var errNoTerminal = errors.New("the agent's stream ended without a result")
