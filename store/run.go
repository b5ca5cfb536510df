package store

import (
	"encoding/json"
	"time"

	"github.com/aisandbox-go/aisandbox/event"
)

// Status is a run's status. Only a running run has a log that grows.
type Status string

// The statuses (spec 04 §4.2). An interrupted run waits for a person: its log is
// closed, and what follows is a run of its own.
const (
	Running     Status = "running"
	Interrupted Status = "interrupted"
	Completed   Status = "completed"
	Failed      Status = "failed"
	Aborted     Status = "aborted"
)

// Valid says that s is a status that this package knows. One read from a store
// that isn't means: serve the log, but neither drive nor delete.
func (s Status) Valid() bool {
	switch s {
	case Running, Interrupted, Completed, Failed, Aborted:
		return true
	}
	return false
}

// Terminal says that a run with this status is over for good.
func (s Status) Terminal() bool { return s == Completed || s == Failed || s == Aborted }

// Kind says whether a run has a journal in its sandbox.
type Kind string

// The kinds of run. A completed run of kind Sandbox has a verified exit.
const (
	KindSandbox Kind = "sandbox"
	KindChat    Kind = "chat"
)

// Launch says how far the agent's start has come.
type Launch string

// The stages of a launch. Launching is written before the start is asked for, so
// that a successor looks before it starts a second agent.
const (
	LaunchNone Launch = "none"
	Launching  Launch = "launching"
	Launched   Launch = "launched"
)

// Thread names a conversation. Ids are chosen by clients, so a tenant is part of
// the name: two tenants' threads never meet.
type Thread struct {
	Tenant, ID string
}

// NewRun is what a run starts with.
type NewRun struct {
	ID          string // not empty, no CR, LF or NUL
	Thread      Thread
	ParentRunID string
	Definition  string          // the sandbox definition, so that another host can build the request again
	Adapter     string          // the adapter's name, for the same reason
	Kind        Kind            // empty: KindChat
	Input       json.RawMessage // the request, for the same reason
	Exclusive   bool            // refuse while the thread has a running run; see Queue

	// Queue is for an exclusive run how many runs of the thread may be recorded as
	// running behind the one that works: refused is what finds more than Queue
	// running ones. StartedAt of an exclusive run is after that of every running
	// run of its thread, so that the order of the queue is the order of List.
	Queue int
}

// Run is a run record.
type Run struct {
	ID          string
	Thread      Thread
	ParentRunID string
	Definition  string
	Adapter     string
	Kind        Kind
	Input       json.RawMessage

	Status      Status
	StartedAt   time.Time
	FinishedAt  time.Time // zero while running, and when interrupted
	ClosedAt    time.Time // zero exactly while running
	CloseReason string
	Error       *RunError
	Usage       []event.Usage
	Exit        *Exit

	Epoch      uint64 // of the newest claim; 0: never claimed
	Owner      string // of the lease; empty: nobody
	LeaseUntil time.Time
	BatchNo    uint64 // last batch of this epoch
	LastSeq    int64  // number of stored events
	Pos        Pos    // the watermark; NoPos at the start

	Launch     Launch
	SandboxKey string
	SandboxGen int64

	LastViewedAt time.Time
	CancelAt     time.Time // zero: no cancel was requested
	CancelReason string

	EventsExpired bool // the log aged out; the messages tell the story
	JournalHold   bool // the journal is evidence: don't prune it
}

// Active says that the run may still grow.
func (r Run) Active() bool { return r.Status == Running }

// RunError is why a run failed. Code is stable, Message is prose.
type RunError struct {
	Message string `json:"message"`
	Code    string `json:"code,omitempty"`
}

// Exit is how the agent's process ended, as read from the journal.
type Exit struct {
	Code     int
	Off      int64 // end of the exit record in the journal
	Verified bool  // its signature held
	OK       bool  // the decoder accepts it as a success
}

// RunPatch changes a record; nil fields stay as they are, and a pointer to the
// zero value clears.
type RunPatch struct {
	Launch      *Launch
	SandboxKey  *string
	SandboxGen  *int64
	JournalHold *bool
}

// Query selects runs.
type Query struct {
	Tenant     string // exactly this one
	AllTenants bool   // for the system only: Tenant is not looked at
	ThreadID   string // empty: all
	Status     []Status
	After      string // next of the page before
	Limit      int    // 0: 100; at most 1000
}

// Work is a run that [Runs.Due] gave out, and how often it did so without any
// progress in between.
type Work struct {
	Run      Run
	Attempts int
}

// Pos is the place in an agent's output that an event came from: the end of the
// record in the journal, and the number of the event among those that this
// record gave (spec 04 §21.9).
type Pos struct {
	Off int64
	Idx int
}

// NoPos is the watermark of a run that stored nothing from a journal.
var NoPos = Pos{Off: 0, Idx: -1}

// Less says that p comes before q.
func (p Pos) Less(q Pos) bool { return p.Off < q.Off || p.Off == q.Off && p.Idx < q.Idx }

// Event is an event on its way into a log.
type Event struct {
	Event event.Event
	Pos   *Pos   // nil: a live event, which no replay yields again
	Print []byte // fingerprint (event.Fingerprint); of events with a Pos
}

// Batch is what one Append writes.
type Batch struct {
	No     uint64
	Events []Event // positions grow strictly
}

// Stored is an event as the log has it.
type Stored struct {
	Seq    int64 // from 1, without gaps
	Offset event.Offset
	Epoch  uint64
	Pos    *Pos
	Print  []byte
	At     time.Time
	Event  event.Event
}

// Final is everything that ends a run.
type Final struct {
	Batch       Batch // the last events, the terminal one last; No 0: none
	Pos         *Pos  // how far the journal was read, if further than the batch's last position
	Status      Status
	CloseReason string
	Error       *RunError // required for Failed
	Usage       []event.Usage
	Exit        *Exit
	JournalHold bool

	Messages   []event.Message // the whole thread; nil: leave what is stored
	Interrupts []Interrupt     // to add
	Resolved   []Resolution    // to answer, all or none
	Instance   *Disposition    // what becomes of the sandbox; nil: leave it
}

// Disposition is what becomes of a sandbox when its run ends.
type Disposition struct {
	Key string
	Gen int64

	// Destroy asks for its end, unless another running run is bound to it. Else
	// it is kept for KeepFor from now; 0 doesn't change until when.
	Destroy bool
	KeepFor time.Duration
}
