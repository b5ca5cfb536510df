package chat

import (
	"context"

	"github.com/aisandbox-go/aisandbox/event"
)

// FileEvent is a change in the workspace. Before, After and Diff cost nothing
// until they are called, and may be nil. They answer for the moment of the call.
type FileEvent struct {
	event.File

	Before func(ctx context.Context) (string, error) // empty: new, or no baseline
	After  func(ctx context.Context) (string, error) // empty: deleted
	Diff   func(ctx context.Context) (string, error) // unified, against the baseline
}

// FileHooks are called for each changed file, OnFile before the one for the kind
// of change. One after the other, in the goroutine of [Run.EmitFile]; a panic is
// logged and changes nothing.
type FileHooks struct {
	OnFile       func(ctx context.Context, r *Run, f FileEvent)
	OnFileCreate func(ctx context.Context, r *Run, f FileEvent)
	OnFileChange func(ctx context.Context, r *Run, f FileEvent)
	OnFileDelete func(ctx context.Context, r *Run, f FileEvent)
}

func (h FileHooks) of(change string) func(context.Context, *Run, FileEvent) {
	switch change {
	case "create":
		return h.OnFileCreate
	case "change":
		return h.OnFileChange
	case "delete":
		return h.OnFileDelete
	}
	return nil
}

// EmitFile emits CUSTOM sandbox.file for a change and then calls the file hooks
// of all middlewares, in their order. The error is that of Emit; hooks are
// called in any case.
func (r *Run) EmitFile(ctx context.Context, f FileEvent) error {
	ev, err := event.NewCustom(event.NameFile, f.File)
	if err == nil {
		err = r.Emit(ctx, ev)
	}
	for i, m := range r.req.Use {
		for _, hook := range []func(context.Context, *Run, FileEvent){m.Sandbox.OnFile, m.Sandbox.of(f.Type)} {
			if hook == nil {
				continue
			}
			if err := safely("file hook of "+name(m, i), func() error { hook(ctx, r, f); return nil }); err != nil {
				r.log.Error("file hook", keyMiddleware, name(m, i), keyPath, f.Path, keyError, r.clean(err))
			}
		}
	}
	return err
}
