// Package harness turns an agent's command-line program into a chat adapter.
//
// What an agent program needs from us is a [CLI]: four methods, all of them
// functions of their input. The one engine behind [Text] does what they share:
// it writes the files, starts the program in the sandbox, splits its output into
// lines, feeds the [Decoder], takes the diff and ends the program when the run
// is cancelled.
//
// The program of a durable run is detached from this host and writes to a journal
// in the sandbox (package journal), which is read instead of a pipe. It is started
// once, whatever hosts come and go: one that takes the run over reads the journal
// from its start, and the decoder, being deterministic, says the same again.
package harness

import (
	"encoding/json"
	"io/fs"
	"time"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/policy"
	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/secret"
)

// CLI is the whole of what one agent program needs from us. Its methods are
// pure: no clock, no randomness, no input or output.
type CLI interface {
	// Name is the adapter's name: "claude-code".
	Name() string

	// Files are what the program reads besides its command line. Warnings say
	// what of the plan this program has no concept for. An error means that the
	// plan can't be run; nothing has been started.
	Files(p Plan) (files []File, warnings []string, err error)

	// Command is the process to start, its prompt on Stdin. Secrets go into Env
	// or Files, never into Argv.
	Command(t Turn) (provider.Cmd, error)

	// Decoder is fresh and deterministic: the same bytes give the same events
	// with the same ids.
	Decoder(t Turn) Decoder
}

// Decoder translates one process's output into events. Not for concurrent use.
type Decoder interface {
	// Line takes one line without its line end. The slice is the caller's after
	// the call. What isn't understood is no error; an error ends the run.
	Line(line []byte) ([]event.Event, error)

	// Close takes how the process ended and returns what is left to say, the
	// terminal event last. Called exactly once, last.
	Close(end End) ([]event.Event, error)
}

// End tells a Decoder how the process ended.
type End struct {
	Exit       provider.Exit
	Aborted    bool   // we ended it: the run was cancelled
	StderrTail string // redacted, at most 4 KiB
}

// Plan is what is known of a turn before anything was written.
type Plan struct {
	RunID, ThreadID, ParentRunID string

	Messages []event.Message // the last one is the user's
	System   []string        // system prompts
	Options  json.RawMessage // options of this call; each harness documents its keys
	Schema   json.RawMessage // JSON Schema of a structured answer; nil: none

	// Instructions is the workspace's text for agents, for programs that don't
	// read the workspace's AGENTS.md.
	Instructions string
	Policy       *policy.Policy

	Root    string // real path of the workspace in the sandbox
	Private string // real path of a 0700 directory of this run, outside of the workspace
	Traits  provider.Traits

	// Guest is the argv that runs the guest program in the sandbox, a subcommand
	// of it to follow; empty where none runs.
	Guest []string

	// Env are names of variables that the sandbox sets for every command, secrets
	// included: what a program needs may already be there.
	Env map[string]bool

	// Warn tells a person of something that was left out. Never nil.
	Warn func(msg string)
}

// Turn is a plan whose files are written.
type Turn struct {
	Plan

	// Inside maps a loopback URL of the host (see [HostURLs]) to the one that
	// reaches it from inside of the sandbox.
	Inside map[string]string

	// NewID returns the run's next id, RUNID-0, RUNID-1, …
	NewID func() string
}

// File is a file that a program reads.
type File struct {
	Name    string // relative to Plan.Private, or an absolute path in the sandbox
	Content []byte
	Mode    fs.FileMode // 0 means 0600
}

// HostURLs is offered by a CLI that must reach services on the host's loopback,
// such as a model API: the engine opens a way for each URL whose host is a
// loopback address, and tells it in Turn.Inside.
type HostURLs interface {
	HostURLs(p Plan) []string
}

// Secrets is offered by a CLI that hands its program secrets which are not the
// workspace's, such as an API key of this host. They are hidden from everything
// that the run says, as the workspace's are.
type Secrets interface {
	Secrets(p Plan) (*secret.Set, error)
}

// AbortLadder is offered by a CLI that wants other signals on a cancel than
// SIGTERM. The tree is killed after the last step in any case.
type AbortLadder interface {
	AbortLadder() []AbortStep
}

// AbortStep is one signal and how long to wait for the end after it.
type AbortStep struct {
	Signal int
	Wait   time.Duration
}

// Fallback is offered by a CLI that knows another way when a program ended
// before it did anything, such as a new session where the one to resume is gone.
// The engine asks once, at the end of the process, and only where the decoder's
// Line has returned no event at all: events are those of Decoder.Close, none of
// them emitted yet. With true the engine drops them and runs the returned turn,
// whose files it writes anew, instead; why is for the log.
type Fallback interface {
	Fallback(t Turn, events []event.Event, end End) (next Turn, why string, ok bool)
}

// Lingerer is offered by a CLI whose program may stay after it has finished, for
// tasks in the background. The engine ends it when it has stayed longer than
// MaxLinger; its Decoder then is a [Finisher].
type Lingerer interface {
	MaxLinger() time.Duration
}

// Finisher is offered by a [Decoder] that can tell, after each Line, whether the
// agent has given a result and has not begun anything since.
type Finisher interface {
	Finished() bool
}
