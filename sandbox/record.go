package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/store"
)

// What follows is for who looks after sandboxes and does not work in them. It goes
// by records, takes no lease and changes no record.

// OpenRecord resumes the sandbox that a record names, to look into it. A
// [*LostError] says that it is gone for good; any other error says nothing about
// it. The caller closes the Sandbox.
func OpenRecord(ctx context.Context, deps Deps, def *Def, rec store.Instance) (*Sandbox, error) {
	e := newEnsurer(deps, def, Key{})
	e.key = rec.Key
	ref, err := RecordRef(rec)
	if err != nil {
		return nil, err
	}
	h, err := def.d.Provider.Resume(ctx, ref)
	if err == nil {
		var box *Sandbox
		if box, err = e.attach(ctx, h); err == nil {
			return box, nil
		}
	}
	if errors.Is(err, provider.ErrNotFound) && ctx.Err() == nil {
		return nil, e.red.Error(&LostError{Key: rec.Key, Gen: rec.Gen, Err: err})
	}
	return nil, e.red.Error(fmt.Errorf("sandbox: resume %s: %w", ref, err))
}

// DestroyRecord destroys the sandbox that a record names, and its snapshot: by its
// reference, or, where the record was left before it had one, by its labels. It
// has a minute, whatever became of ctx. What is gone already is no error.
func DestroyRecord(ctx context.Context, deps Deps, def *Def, rec store.Instance) error {
	e := newEnsurer(deps, def, Key{})
	e.key = rec.Key
	err := e.destroyRef(ctx, rec)
	if err == nil && rec.SnapshotID != "" {
		err = e.deleteSnapshot(ctx, rec.SnapshotID)
	}
	return e.red.Error(err)
}

// RecordRef is the provider's name of the sandbox that a record is of. It is an
// error where the record was left before there was one.
func RecordRef(rec store.Instance) (ref provider.Ref, err error) {
	if len(rec.Ref) == 0 {
		return ref, fmt.Errorf("sandbox: the record of %s generation %d has no reference yet", rec.Key, rec.Gen)
	}
	if err := json.Unmarshal(rec.Ref, &ref); err != nil {
		return ref, fmt.Errorf("sandbox: the record of %s has no reference: %w", rec.Key, err)
	}
	return ref, nil
}
