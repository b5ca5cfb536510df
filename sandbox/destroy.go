package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/store"
)

// destroyNow destroys a sandbox. It has a minute, whatever became of ctx, and
// does not wait longer even for a provider that takes no notice.
func (e *ensurer) destroyNow(ctx context.Context, ref provider.Ref) error {
	end := e.phase(PhaseDestroy, ref.String())
	ctx, stop := cleanup(ctx)
	defer stop()
	done := make(chan error, 1)
	go func() { done <- e.def.d.Provider.Destroy(ctx, ref) }()
	var err error
	select {
	case err = <-done:
	case <-ctx.Done():
		select {
		case err = <-done:
		case <-after(destroyGrace):
			err = fmt.Errorf("%w: %w", context.DeadlineExceeded, context.Cause(ctx))
		}
	}
	end(err)
	if err != nil {
		return fmt.Errorf("sandbox: destroy %s: %w", ref, err)
	}
	return nil
}

// destroyGrace is how long a provider has to notice that its time is up.
const destroyGrace = 2 * time.Second

func after(d time.Duration) <-chan time.Time { return time.NewTimer(d).C }

// destroyRef destroys what a record names: by its reference, or, where the record
// was left before it had one, by its labels.
func (e *ensurer) destroyRef(ctx context.Context, rec store.Instance) error {
	if len(rec.Ref) > 0 {
		var ref provider.Ref
		if err := json.Unmarshal(rec.Ref, &ref); err != nil {
			return fmt.Errorf("sandbox: the record of %s has no reference: %w", e.key, err)
		}
		return e.destroyNow(ctx, ref)
	}
	err := e.destroyLabelled(ctx, map[string]string{LabelKey: e.key, LabelGen: fmt.Sprint(rec.Gen)})
	if errors.Is(err, errors.ErrUnsupported) {
		return nil // there is no way to find out
	}
	return err
}

// destroyLabelled destroys every sandbox that carries the labels.
func (e *ensurer) destroyLabelled(ctx context.Context, labels map[string]string) error {
	l, ok := provider.As[provider.Lister](e.def.d.Provider)
	if !ok {
		return &provider.UnsupportedError{Provider: e.def.d.Provider.Name(), Capability: "list", Hint: "destroy the sandbox by its reference, with DestroyRef"}
	}
	found, err := l.List(ctx, labels)
	if err != nil {
		return fmt.Errorf("sandbox: look for leftovers: %w", err)
	}
	for _, f := range found {
		err = errors.Join(err, e.destroyNow(ctx, f.Ref))
	}
	return err
}

// retire destroys the sandbox and the snapshot of a record, and then forgets the
// record. When that fails the record stays, marked to be destroyed, so that
// somebody tries again.
func (e *ensurer) retire(ctx context.Context, rec store.Instance) error {
	err := e.destroyRef(ctx, rec)
	if err == nil && rec.SnapshotID != "" {
		err = e.deleteSnapshot(ctx, rec.SnapshotID)
	}
	if err != nil {
		return errors.Join(err, e.mark(ctx, rec, err))
	}
	return e.forget(ctx, rec)
}

func (e *ensurer) deleteSnapshot(ctx context.Context, id string) error {
	r, ok := provider.As[provider.Restorer](e.def.d.Provider)
	if !ok {
		return nil
	}
	ctx, stop := cleanup(ctx)
	defer stop()
	if err := r.DeleteSnapshot(ctx, id); err != nil {
		return fmt.Errorf("sandbox: delete snapshot %s: %w", id, err)
	}
	return nil
}

// fenced says that somebody else works on the key now: the record is theirs.
func fenced(ctx context.Context) bool { return errors.Is(context.Cause(ctx), store.ErrFenced) }

// forget removes a record. The sandbox that it named is gone.
func (e *ensurer) forget(ctx context.Context, rec store.Instance) error {
	if e.deps.Instances == nil || rec.Gen == 0 || fenced(ctx) {
		return nil
	}
	ctx, stop := cleanup(ctx)
	defer stop()
	if err := e.deps.Instances.Delete(ctx, rec.Key, rec.Gen); err != nil {
		return fmt.Errorf("sandbox: delete the record: %w", err)
	}
	return nil
}

// mark records that a sandbox must still be destroyed.
func (e *ensurer) mark(ctx context.Context, rec store.Instance, cause error) error {
	if e.deps.Instances == nil || rec.Gen == 0 || fenced(ctx) {
		return nil
	}
	ctx, stop := cleanup(ctx)
	defer stop()
	rec.State, rec.Desired, rec.LastError = store.InstanceDestroying, store.DesiredDestroyed, e.red.String(cause.Error())
	_, err := e.put(ctx, rec)
	return err
}

// abandon undoes a creation that failed.
func (e *ensurer) abandon(ctx context.Context, rec store.Instance, ref provider.Ref) error {
	if err := e.destroyNow(ctx, ref); err != nil {
		return errors.Join(err, e.mark(ctx, rec, err))
	}
	return e.forget(ctx, rec)
}

// undo gives back a sandbox whose key was lost after it was made. The record may
// be somebody else's by now; where it names this very sandbox somebody may work in
// it, and it is not forgotten either.
func (e *ensurer) undo(box *Sandbox, out Outcome) {
	ref := box.Ref()
	_ = box.Close() // destroyed, or left to its record
	if out.How == Resumed {
		return
	}
	if e.deps.Instances != nil {
		ctx, stop := cleanup(context.Background())
		defer stop()
		rec, err := e.deps.Instances.Get(ctx, e.key)
		if err == nil && names(rec, ref) || err != nil && !errors.Is(err, store.ErrNotFound) {
			return
		}
	}
	if err := e.destroyNow(context.Background(), ref); err != nil {
		e.log.Warn("a sandbox was left behind", "ref", ref, "error", e.red.Error(err))
	}
}

// DestroyRef destroys a sandbox of def's provider that no record names. It has a
// minute, whatever became of ctx.
func DestroyRef(ctx context.Context, deps Deps, def *Def, ref provider.Ref) error {
	e := newEnsurer(deps, def, Key{})
	return e.red.Error(e.destroyNow(ctx, ref))
}
