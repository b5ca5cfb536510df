package sandbox

import (
	"context"

	"github.com/aisandbox-go/aisandbox/chat"
	"github.com/aisandbox-go/aisandbox/provider"
)

// FileEvent is a change of a file in the workspace, with its content and diff on
// demand.
type FileEvent = chat.FileEvent

// Hooks are called by [With] in the course of a run; nil ones are skipped. The
// file hooks are called one after the other, in the order of the changes, and all
// of them before the run's terminal event; a panic in one is logged and changes
// nothing.
type Hooks struct {
	OnFile       func(ctx context.Context, f FileEvent) // every change, before the one for its kind
	OnFileCreate func(ctx context.Context, f FileEvent)
	OnFileChange func(ctx context.Context, f FileEvent)
	OnFileDelete func(ctx context.Context, f FileEvent)

	// OnReady is called once for a run, with its sandbox, before the agent starts. An
	// error fails the run; the sandbox is destroyed only if this run created it.
	OnReady func(ctx context.Context, s *Sandbox) error

	// OnError is called when a run failed, OnDestroy after a sandbox was destroyed
	// at the end of a run.
	OnError   func(ctx context.Context, err error)
	OnDestroy func(ctx context.Context)
}

func (h Hooks) of(change string) func(context.Context, FileEvent) {
	switch provider.ChangeType(change) {
	case provider.ChangeCreate:
		return h.OnFileCreate
	case provider.ChangeModify:
		return h.OnFileChange
	case provider.ChangeDelete:
		return h.OnFileDelete
	}
	return nil
}
