package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/aisandbox-go/aisandbox/chat"
	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/store"
)

// LostError says that the sandbox that a run was bound to is gone for good, and
// its agent with it.
type LostError struct {
	Key string
	Gen int64
	Err error // what the provider says; may be nil
}

func (e *LostError) Error() string {
	s := fmt.Sprintf("sandbox: %s generation %d, in which the run worked, is gone", e.Key, e.Gen)
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	return s
}

// Is matches chat.ErrLost.
func (e *LostError) Is(target error) bool { return target == chat.ErrLost }

// Unwrap returns what the provider says.
func (e *LostError) Unwrap() error { return e.Err }

// Code is "sandbox_lost".
func (e *LostError) Code() string { return "sandbox_lost" }

// EnsureBound resumes one generation of the sandbox for k: the one in which a run
// that is taken over works. It makes nothing. A [*LostError] says that it is gone;
// any other error says nothing about it.
func EnsureBound(ctx context.Context, deps Deps, def *Def, k Key, gen int64) (*Sandbox, error) {
	var box *Sandbox
	err := locked(ctx, deps, def, k, func(ctx context.Context, e *ensurer) (err error) {
		box, err = e.bound(ctx, gen)
		return err
	}, func(*ensurer) {
		_ = box.Close() // what was resumed is not ours to destroy
		box = nil
	})
	return box, err
}

func (e *ensurer) bound(ctx context.Context, gen int64) (_ *Sandbox, err error) {
	end := e.phase(PhaseResume, "")
	defer func() { end(err) }()
	lost := &LostError{Key: e.key, Gen: gen}
	rec, err := e.load(ctx)
	if err != nil {
		return nil, err
	}
	if rec == nil || rec.Gen != gen || len(rec.Ref) == 0 {
		return nil, lost
	}
	var ref provider.Ref
	if err := json.Unmarshal(rec.Ref, &ref); err != nil {
		return nil, fmt.Errorf("sandbox: the record of %s has no reference: %w", e.key, err)
	}
	h, err := e.def.d.Provider.Resume(ctx, ref)
	if err == nil {
		var box *Sandbox
		if box, err = e.attach(ctx, h); err == nil {
			return box, nil
		}
	}
	if errors.Is(err, provider.ErrNotFound) && ctx.Err() == nil {
		lost.Err = err
		rec.State = store.InstanceLost
		if _, perr := e.put(ctx, *rec); perr != nil {
			e.log.Warn("a sandbox that is gone could not be marked so", "error", e.red.Error(perr))
		}
		return nil, lost
	}
	return nil, fmt.Errorf("sandbox: resume %s: %w", ref, err)
}

// Condemn makes a run that got the sandbox from [With] destroy it at its end,
// whatever the life cycle says: because the death of its agent can't be confirmed,
// or because the agent did what it must not do.
func (s *Sandbox) Condemn(why string) {
	if s.condemned.Swap(true) {
		return
	}
	s.log.Warn("the sandbox will be destroyed", "why", s.red.String(why))
}
