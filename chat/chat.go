// Package chat runs an agent's turn: it sets up middleware, streams an adapter,
// and writes what happens into a log, which is the only thing that viewers read.
//
// One goroutine, the driver, writes the log of a run. Everything that has
// something to say goes through it: the adapter's events, and what middleware
// emits. So every viewer sees the same order, whenever it joins and however
// slowly it reads, and nobody but the driver touches the agent.
//
// A durable run outlives its driver. Another host takes it over with
// Request.Attach: it claims the run, from which moment the log refuses the driver
// before, and starts the adapter over from the beginning of the agent's journal.
// Everything flows through the middleware again; what the log has already is
// compared with it, event by event, and not written a second time (spec 04 §21.9).
//
// A run that is not durable takes the same way; its log is in memory and is gone
// with the last reference to the [Run]. The log holds the whole run, so that a
// late viewer sees it from the start: a run of a million events needs the memory
// of a million events.
package chat

import (
	"context"
	"encoding/json"
	"iter"
	"log/slog"
	"time"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/store"
)

// Request is one turn. Adapter is required, and for a durable run RunID.
type Request struct {
	RunID       string // unique per run; empty: made up, refused for a durable run
	ThreadID    string // the conversation; empty: made up
	ParentRunID string // the run that this one continues after an interrupt
	Tenant      string // whose run it is
	UserID      string // who asked, for middleware

	Messages []event.Message // the conversation; the last one is the user's
	System   []string        // system prompts
	Adapter  Adapter
	Use      []Middleware
	Options  json.RawMessage // options of the adapter for this call
	Schema   json.RawMessage // JSON Schema of a structured answer; nil: none
	Tools    []Tool          // host tools; names are unique

	// Definition and Input let another host build this request again; they are
	// kept in the run's record.
	Definition string
	Input      json.RawMessage

	// Exclusive refuses a durable run while its thread has more running ones than
	// Queue. Who allows any must make them wait, in a Setup.
	Exclusive bool
	Queue     int

	// Attach takes over a durable run that exists and that nobody drives: Start
	// claims it, the adapter starts over from the beginning of the agent's journal
	// and starts no second agent, and what the log has already is not written
	// again. Everything else must be as in the Request that started the run; RunID
	// and ThreadID are required.
	Attach bool

	// Reaper, with Attach, also takes over a run whose cancel is requested, in order
	// to end its agent.
	Reaper bool

	// Timeout ends the run with ErrBudget. 0: none.
	Timeout time.Duration

	// Cleanup bounds each middleware's Done. 0: 60 s.
	Cleanup time.Duration

	Logger *slog.Logger // nil discards
}

// Adapter is an agent, or a model.
type Adapter interface {
	// Name is the adapter's name, "claude-code".
	Name() string

	// Needs are tokens that some middleware must provide. Checked before anything
	// boots.
	Needs() []AnyToken

	// Stream runs the turn and yields its events, the terminal one among them:
	// RUN_FINISHED, after which other events may follow, or RUN_ERROR, after which
	// nothing is read. An error ends the run as RUN_ERROR. Called once for a run,
	// after all Setups, from one goroutine.
	//
	// ctx ends when the run shall end; context.Cause says why. With ErrCanceled
	// and ErrBudget the agent is to be ended before Stream returns; with
	// ErrDetached, ErrShutdown and store.ErrFenced it is to be left alone. Stream
	// must return soon after; nobody can take the run away from it.
	Stream(ctx context.Context, r *Run) iter.Seq2[Item, error]
}

// Modeler is offered by an Adapter that knows its model; RUN_STARTED names it.
type Modeler interface {
	Model() string
}

// Journaler is offered by an Adapter whose runs have a journal in the sandbox,
// so that a completed run needs a verified exit (see [Run.Exited]).
type Journaler interface {
	Journaled() bool
}

// Item is an event of an adapter. Off is the end of the journal record that it
// came from, 0 for a live one. It never goes back.
type Item struct {
	Event event.Event
	Off   int64
}

// Middleware takes part in a run. It is a literal; a nil field is not
// interested. One value may serve many runs at once: what belongs to a run is
// kept under a [Token].
type Middleware struct {
	Name string // for errors and logs

	// Provides are tokens that Setup provides; one that it doesn't is an error.
	// After are tokens that, if anybody in the run provides them, must be provided
	// by an earlier middleware.
	Provides, After []AnyToken

	// Durable makes the run durable. At most one middleware sets it; it is read
	// before any Setup.
	Durable *Durability

	// Setup prepares the run, in the order of Request.Use. An error ends the run.
	Setup func(ctx context.Context, r *Run) error

	// Event sees every event before it is logged, in the order of Request.Use:
	// what it returns is passed on instead, one event, several or none. It runs in
	// the driver, so it must not block, and it must be a function of its input.
	// What is not goes out by Run.Emit, with the context given to Event. An error
	// ends the run.
	//
	// It doesn't see the RUN_STARTED and run.accepted that open every run. The
	// terminal event can be replaced but not removed.
	Event func(ctx context.Context, r *Run, ev event.Event) ([]event.Event, error)

	// Done undoes Setup, in reverse order, exactly once for each Setup that
	// succeeded (or is nil). The agent has ended, or will be left alone; the
	// terminal event is held until the last Done returned. An error turns success
	// into failure; otherwise it is logged. ctx is a clean-up context: it isn't
	// cancelled when the run is, and ends after Request.Cleanup.
	Done func(ctx context.Context, r *Run, o Outcome) error

	// Sandbox are hooks for changed files (see [Run.EmitFile]).
	Sandbox FileHooks
}

// Durability says where a durable run is recorded.
type Durability struct {
	Runs store.Runs
	Log  store.Log

	// Messages and Interrupts are set where they share Log's database. A Persist
	// with the same values then commits with the run's end, in one transaction.
	Messages   store.Messages
	Interrupts store.Interrupts

	Owner string        // this host's name; empty: made up for each run
	Lease time.Duration // 0: store.DefaultLease

	// Keeper renews the claims of all of a host's runs together; nil: each run
	// renews its own.
	Keeper *Keeper

	// Presence is told of the readers of this host's Runs; nil: nobody is.
	Presence *Presence
}

// Durable is a middleware that does nothing but make runs durable.
func Durable(d Durability) Middleware {
	return Middleware{Name: "durable", Durable: &d}
}

// OutcomeKind is how a run ended.
type OutcomeKind string

// How a run ends.
const (
	Finished    OutcomeKind = "finished"    // the agent did its turn
	Failed      OutcomeKind = "failed"      // it didn't, or something around it failed
	Interrupted OutcomeKind = "interrupted" // it waits for a person
	Canceled    OutcomeKind = "canceled"    // somebody wanted it ended, or the only reader left
	Detached    OutcomeKind = "detached"    // it goes on without this host
	Fenced      OutcomeKind = "fenced"      // another host has it
)

// Outcome is how a run ended on this host.
type Outcome struct {
	Kind OutcomeKind

	// Err is why it failed, was cancelled, detached or fenced; nil otherwise. Its
	// text is redacted.
	Err error

	// Terminal is the event that will end the log; nil for Detached and Fenced.
	// In a Done it has passed neither the guard nor the redaction yet.
	Terminal event.Event

	// Duration is the time since the driver started.
	Duration time.Duration
}
