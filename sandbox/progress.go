package sandbox

import "time"

// Phase is a part of making a sandbox ready.
type Phase string

// The phases, in the order in which they come.
const (
	PhaseResume   Phase = "resume"
	PhaseRestore  Phase = "restore"
	PhaseCreate   Phase = "create"
	PhaseGuest    Phase = "guest"
	PhaseSource   Phase = "source" // clone, or copy of a local directory
	PhaseFiles    Phase = "files"  // AGENTS.md and file skills
	PhaseSetup    Phase = "setup"  // once per command
	PhaseSnapshot Phase = "snapshot"
	PhaseDestroy  Phase = "destroy"
)

// ProgressState says whether a phase begins or has ended.
type ProgressState string

// The states.
const (
	ProgressStarted ProgressState = "started"
	ProgressDone    ProgressState = "done"
	ProgressFailed  ProgressState = "failed"
	ProgressWarning ProgressState = "warning" // Detail is for a person to read
)

// ProgressEvent tells how far a sandbox is. Its texts are redacted.
type ProgressEvent struct {
	Phase    Phase         `json:"phase"`
	State    ProgressState `json:"state"`
	Detail   string        `json:"detail,omitempty"` // a command, a URL, a warning
	Duration time.Duration `json:"durationNs,omitempty"`
	Error    string        `json:"error,omitempty"`
}

// phase tells that a phase begins, and returns what tells of its end.
func (e *ensurer) phase(p Phase, detail string) func(error) {
	detail = e.red.String(detail)
	start := time.Now()
	e.tell(ProgressEvent{Phase: p, State: ProgressStarted, Detail: detail})
	return func(err error) {
		ev := ProgressEvent{Phase: p, State: ProgressDone, Detail: detail, Duration: time.Since(start)}
		if err != nil {
			ev.State, ev.Error = ProgressFailed, e.red.Error(err).Error()
		}
		e.log.Debug("sandbox "+string(p), "state", string(ev.State), "detail", detail, "duration", ev.Duration, "error", ev.Error)
		e.tell(ev)
	}
}

func (e *ensurer) tell(ev ProgressEvent) {
	if e.deps.Progress != nil {
		e.deps.Progress(ev)
	}
}

// warn tells a person of something that is not as it should be, but works.
func (e *ensurer) warn(p Phase, text string) {
	text = e.red.String(text)
	e.log.Warn(text, "phase", string(p))
	e.tell(ProgressEvent{Phase: p, State: ProgressWarning, Detail: text})
}
