package event

import (
	"encoding/json"
	"fmt"

	"github.com/aisandbox-go/aisandbox/internal/rawjson"
)

// Names of our own CUSTOM events (spec 07 §5.3). Their payloads are the structs
// below; make one with [NewCustom] and read one with [CustomOf].
const (
	NameRunAccepted        = "run.accepted"               // value {}
	NameRunQueued          = "run.queued"                 // [RunQueued]
	NameSandboxCreated     = "sandbox.created"            // [SandboxReady]
	NameSandboxResumed     = "sandbox.resumed"            // [SandboxReady]
	NameWorkspaceSetup     = "workspace.setup"            // [SetupPhase]
	NameFile               = "sandbox.file"               // [File]
	NameFileDiff           = "sandbox.file.diff"          // [FileDiff]
	NameFileChanged        = "file.changed"               // [FileChanged]
	NameStructuredStart    = "structured-output.start"    // [StructuredStart]
	NameStructuredComplete = "structured-output.complete" // [StructuredComplete]
	NameApprovalRequested  = "approval-requested"         // [ApprovalRequested]
	NameApprovalResolved   = "approval.resolved"          // [ApprovalResolved]
)

// SessionIDName is the name of the event that carries a harness's own session id.
func SessionIDName(harness string) string { return harness + ".session-id" }

type (
	// RunQueued tells how many runs of the thread come first; 1 is the next one.
	RunQueued struct {
		Position int `json:"position"`
	}
	// SandboxReady names the sandbox that a run works in.
	SandboxReady struct {
		SandboxID string `json:"sandboxId"`
		Provider  string `json:"provider"`
	}
	// SetupPhase tells how far the preparation of a workspace is.
	SetupPhase struct {
		Phase      string      `json:"phase"` // "create", "clone", "setup", …
		Name       string      `json:"name"`  // what a person reads, such as the command
		Status     SetupStatus `json:"status"`
		DurationMs int64       `json:"durationMs,omitempty"` // of a phase that ended
	}
	// File is a change that the watcher saw.
	File struct {
		Type      string `json:"type"` // "create", "change", "delete"
		Path      string `json:"path"`
		Timestamp int64  `json:"timestamp"` // epoch milliseconds
	}
	// FileDiff is the unified diff of one file, right after its [File].
	FileDiff struct {
		Path string `json:"path"`
		Diff string `json:"diff"`
	}
	// FileChanged is the diff of the whole tree after a run; Path is ".".
	FileChanged struct {
		Path      string `json:"path"`
		Diff      string `json:"diff"`
		Truncated bool   `json:"truncated,omitempty"`
	}
	// SessionID is an agent's own session, to be resumed in the next run.
	SessionID struct {
		SessionID string   `json:"sessionId"`
		Model     string   `json:"model,omitempty"`
		Tools     []string `json:"tools,omitempty"`
	}
	// StructuredStart announces a structured answer.
	StructuredStart struct {
		MessageID string `json:"messageId"`
	}
	// StructuredComplete is a structured answer; Raw is Object's JSON text.
	StructuredComplete struct {
		Object    json.RawMessage `json:"object"`
		Raw       string          `json:"raw"`
		MessageID string          `json:"messageId,omitempty"`
	}
	// ApprovalRequested asks a person for a decision (spec 07 §9.2).
	ApprovalRequested struct {
		ApprovalID string          `json:"approvalId"`
		Title      string          `json:"title"`
		Provider   string          `json:"provider"`
		ToolName   string          `json:"toolName"`
		ToolCallID string          `json:"toolCallId,omitempty"`
		Input      json.RawMessage `json:"input,omitempty"`
		Approval   Approval        `json:"approval"`
	}
	// Approval is what existing approval dialogs look for.
	Approval struct {
		ID            string `json:"id"`
		NeedsApproval bool   `json:"needsApproval"`
	}
	// ApprovalResolved tells how an approval ended.
	ApprovalResolved struct {
		ApprovalID string `json:"approvalId"`
		Granted    bool   `json:"granted"`
	}
)

// SetupStatus is where a [SetupPhase] stands.
type SetupStatus string

// The states of a phase.
const (
	SetupStarted SetupStatus = "started"
	SetupDone    SetupStatus = "done"
	SetupFailed  SetupStatus = "failed"
)

// NewCustom makes a CUSTOM event. A nil v is {}.
func NewCustom(name string, v any) (Custom, error) {
	if v == nil {
		return Custom{Name: name, Value: json.RawMessage("{}")}, nil
	}
	b, err := marshal(v)
	if err != nil {
		return Custom{}, fmt.Errorf("event: value of %s: %w", name, err)
	}
	return Custom{Name: name, Value: rawjson.AppendCompact(nil, b)}, nil
}

// CustomOf reads the payload of a CUSTOM event with that name. It returns false
// for any other event and for a payload that is not a T.
func CustomOf[T any](ev Event, name string) (T, bool) {
	var v T
	c, ok := ev.(Custom)
	if !ok || c.Name != name || json.Unmarshal(c.Value, &v) != nil {
		var zero T
		return zero, false
	}
	return v, true
}

// Metadata is t as the metadata of an event, {"tanstack":{…}}; nil when t is empty.
func (t TanStack) Metadata() json.RawMessage {
	b, err := marshal(struct {
		T TanStack `json:"tanstack"`
	}{t})
	if err != nil || string(b) == `{"tanstack":{}}` {
		return nil // an error: Input or Usage was no JSON
	}
	return rawjson.AppendCompact(nil, b)
}

// TanStackOf reads what is under an event's metadata.tanstack. Names that
// [TanStack] lacks are left out; so is all of it where it has another shape.
func TanStackOf(ev Event) TanStack {
	m := ev.Base().Metadata
	if len(m) == 0 {
		return TanStack{}
	}
	var v struct {
		T TanStack `json:"tanstack"`
	}
	if json.Unmarshal(m, &v) != nil {
		return TanStack{}
	}
	return v.T
}
