package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"syscall"
	"time"

	"github.com/aisandbox-go/aisandbox/guest"
	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/secret"
	"github.com/aisandbox-go/aisandbox/store"
	"github.com/aisandbox-go/aisandbox/workspace"
)

// Deps are what [Ensure] works with. The zero value works: nothing is remembered,
// so that each call makes a sandbox.
type Deps struct {
	// Instances remembers sandboxes; nil: nothing is remembered.
	Instances store.Instances

	// Leases makes one caller at a time work on a key, whatever host it is on; nil:
	// only the callers of one [Def] wait for each other.
	Leases store.Leaser

	// Owner is this host's name in leases; empty: made up.
	Owner string

	Lease time.Duration // 0: store.DefaultLease

	// Deployment names what shares one Instances: every sandbox made for it carries
	// the name, so that the reaper can tell one that lost its record from somebody
	// else's (spec 04 §21.11). Empty: nobody looks for such. Not used without Instances.
	Deployment string

	// Progress is told what happens, phase by phase; nil: nobody. It is called from
	// the goroutines of Ensure, set-up steps of a parallel group at the same time.
	Progress func(ProgressEvent)

	Guest   guest.Options
	NoGuest bool // work through commands alone

	Logger *slog.Logger // nil discards
}

// How says where a sandbox came from.
type How string

// The ways, in the order in which they are tried.
const (
	Resumed  How = "resumed"
	Restored How = "restored" // from the provider's snapshot
	Created  How = "created"
)

// Outcome is what Ensure did.
type Outcome struct {
	How How
	Key string // the instance's key
	Gen int64  // and generation; 0 without Deps.Instances

	// After a creation: what the project uses, and the set-up commands that ran.
	PackageManager workspace.PackageManager
	Setup          []string
}

// MismatchError says that the record of a key belongs to somebody else. Nothing
// was touched.
type MismatchError struct {
	Key   string
	Field string
}

func (e *MismatchError) Error() string {
	return fmt.Sprintf("sandbox: the record of instance %s has another %s: delete the record after checking whose it is", e.Key, e.Field)
}

// Ensure returns the sandbox for k: the one that is remembered, resumed; else one
// restored from its snapshot; else a new one with the workspace in place. One
// caller works on a key at a time. Whatever fails, and whenever ctx ends, what
// this call made is destroyed. The caller closes the Sandbox.
func Ensure(ctx context.Context, deps Deps, def *Def, k Key) (*Sandbox, Outcome, error) {
	var out Outcome
	var box *Sandbox
	err := locked(ctx, deps, def, k, func(ctx context.Context, e *ensurer) (err error) {
		box, out, err = e.ensure(ctx)
		return err
	}, func(e *ensurer) {
		if box != nil {
			e.undo(box, out)
			box = nil
		}
	})
	if err != nil {
		return nil, Outcome{}, err
	}
	return box, out, nil
}

// Ensure calls the function of that name.
func (d *Def) Ensure(ctx context.Context, deps Deps, k Key) (*Sandbox, Outcome, error) {
	return Ensure(ctx, deps, d, k)
}

// EnsureExisting resumes the sandbox for k. It never creates or restores, and
// returns nil when there is none that can be resumed.
func EnsureExisting(ctx context.Context, deps Deps, def *Def, k Key) (*Sandbox, error) {
	var box *Sandbox
	err := locked(ctx, deps, def, k, func(ctx context.Context, e *ensurer) error {
		rec, err := e.load(ctx)
		if err != nil || rec == nil || !rec.Usable() || e.tooOld(*rec) {
			return err
		}
		box, err = e.resume(ctx, rec)
		if errors.Is(err, errGone) {
			return nil
		}
		return err
	}, func(*ensurer) {
		if box != nil {
			_ = box.Close() // what was resumed is not ours to destroy
			box = nil
		}
	})
	return box, err
}

// DestroyInstance destroys the sandbox for k and forgets it. Where there is no
// record nothing happens; without Deps.Instances the provider is asked for what
// carries the key's label. The provider gets a context of its own with a minute's
// time, whatever became of ctx; ctx only bounds the wait for the key. On an error
// the record stays, marked to be destroyed.
func DestroyInstance(ctx context.Context, deps Deps, def *Def, k Key) error {
	_, err := destroyInstance(ctx, deps, def, k, nil)
	return err
}

// destroyInstance destroys the sandbox for k. With only, which a run that leaves
// it gives, one that took its place meanwhile is spared, and so is one that
// another run has come to use, in which case done is false.
func destroyInstance(ctx context.Context, deps Deps, def *Def, k Key, only *provider.Ref) (done bool, err error) {
	// A caller whose run was cancelled still wants the sandbox gone.
	ctx, stop := cleanup(ctx)
	defer stop()
	done = true
	err = locked(ctx, deps, def, k, func(ctx context.Context, e *ensurer) error {
		// Who uses the sandbox has said so before it waited for the key.
		if only != nil && deps.Instances != nil && def.users.any(e.key) {
			done = false
			return nil
		}
		if deps.Instances == nil && only == nil {
			return e.destroyLabelled(ctx, map[string]string{LabelKey: e.key})
		}
		rec, err := e.load(ctx)
		if err != nil {
			return err
		}
		if only != nil && (rec == nil || !names(*rec, *only)) {
			return e.destroyNow(ctx, *only)
		}
		if rec == nil {
			return nil
		}
		return e.retire(ctx, *rec)
	}, func(*ensurer) {})
	return done, err
}

// names says whether rec is the record of ref.
func names(rec store.Instance, ref provider.Ref) bool {
	var r provider.Ref
	return json.Unmarshal(rec.Ref, &r) == nil && r.Provider == ref.Provider && r.ID == ref.ID
}

// locked runs do while it holds the key. lost is called when do succeeded but
// the lease had been lost by then.
func locked(ctx context.Context, deps Deps, def *Def, k Key, do func(context.Context, *ensurer) error, lost func(*ensurer)) error {
	e := newEnsurer(deps, def, k)
	unlock, err := def.locks.lock(ctx, e.key)
	if err != nil {
		return fmt.Errorf("sandbox: wait for %s: %w", e.key, err)
	}
	defer unlock()
	release := func() error { return nil }
	if deps.Leases != nil {
		owner := deps.Owner
		if owner == "" {
			owner = "sandbox-" + e.key[:8]
		}
		ctx, release, err = store.Hold(ctx, deps.Leases, "sandbox:"+e.key, owner, deps.Lease)
		if err != nil {
			return fmt.Errorf("sandbox: lease of %s: %w", e.key, err)
		}
	}
	err = do(ctx, e)
	gone := ctx.Err() != nil
	if rerr := release(); err == nil && rerr != nil {
		if errors.Is(rerr, store.ErrFenced) {
			gone = true
		} else {
			e.log.Warn("the lease could not be given back; it expires", "error", rerr)
		}
	}
	if err == nil && gone {
		lost(e)
		err = context.Cause(ctx)
		if !errors.Is(err, store.ErrFenced) && ctx.Err() == nil {
			err = store.ErrFenced
		}
		err = fmt.Errorf("sandbox: ensure %s: %w", e.key, err)
	}
	full := errors.Is(err, provider.ErrNoSpace) || errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
	if full && store.Code(err, "") != "no_space" {
		err = &NoSpaceError{err}
	}
	return e.red.Error(err)
}

// NoSpaceError says that the file system is full on which a backend keeps its
// sandboxes. It is provider.ErrNoSpace.
type NoSpaceError struct{ Err error }

func (e *NoSpaceError) Error() string {
	return e.Err.Error() + ": make room where the provider keeps its sandboxes, or let it keep them elsewhere"
}

// Unwrap returns the cause.
func (e *NoSpaceError) Unwrap() error { return e.Err }

// Is makes the error provider.ErrNoSpace.
func (e *NoSpaceError) Is(target error) bool { return target == provider.ErrNoSpace }

// Code is "no_space".
func (e *NoSpaceError) Code() string { return "no_space" }

func newEnsurer(deps Deps, def *Def, k Key) *ensurer {
	key := def.InstanceKey(k)
	return &ensurer{
		deps: deps, def: def, k: k, key: key, stepTimeout: stepTimeout,
		red: secret.NewRedactor(def.d.Workspace.Secrets),
		log: logger(deps.Logger).With("sandbox", def.d.ID, "key", key),
	}
}

// ensurer works on one key while that is locked.
type ensurer struct {
	deps Deps
	def  *Def
	k    Key
	key  string
	red  *secret.Redactor
	log  *slog.Logger
	box  *Sandbox // the one that is being made

	stepTimeout time.Duration
}

// errGone says that the sandbox of a record can't be used any more.
var errGone = errors.New("the sandbox is gone")

// load returns the newest record of the key; nil when there is none, or when it
// says that nothing is left. A record that isn't ours is a [*MismatchError].
func (e *ensurer) load(ctx context.Context) (*store.Instance, error) {
	if e.deps.Instances == nil {
		return nil, nil
	}
	rec, err := e.deps.Instances.Get(ctx, e.key)
	switch {
	case errors.Is(err, store.ErrNotFound):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("sandbox: read the record: %w", err)
	case rec.State.Gone():
		return nil, nil
	case rec.Provider != e.def.d.Provider.Name():
		return nil, &MismatchError{e.key, "provider"}
	case rec.ThreadID != e.k.ThreadID:
		return nil, &MismatchError{e.key, "thread"}
	case rec.Tenant != e.k.Tenant:
		return nil, &MismatchError{e.key, "tenant"}
	}
	return &rec, nil
}

// tooOld compares with when the sandbox was set up, not when it was used last.
func (e *ensurer) tooOld(rec store.Instance) bool {
	born := rec.CreatedAt
	if !rec.SnapshotAt.IsZero() {
		born = rec.SnapshotAt
	}
	age := e.def.d.Lifecycle.SnapshotMaxAge
	return age > 0 && time.Since(born) > age
}

// ensure is the order of spec 01 §12.2.
func (e *ensurer) ensure(ctx context.Context) (*Sandbox, Outcome, error) {
	rec, err := e.load(ctx)
	if err != nil {
		return nil, Outcome{}, err
	}
	if rec != nil && rec.Usable() && !e.tooOld(*rec) {
		box, err := e.resume(ctx, rec)
		if err == nil {
			return box, Outcome{How: Resumed, Key: e.key, Gen: rec.Gen}, nil
		}
		if !errors.Is(err, errGone) {
			return nil, Outcome{}, err
		}
	}
	snapshot := ""
	if rec != nil && rec.Desired != store.DesiredDestroyed && !e.tooOld(*rec) {
		snapshot = rec.SnapshotID
	}
	if r, ok := provider.As[provider.Restorer](e.def.d.Provider); ok && snapshot != "" {
		box, err := e.restore(ctx, r, rec)
		if err == nil {
			return box, Outcome{How: Restored, Key: e.key, Gen: rec.Gen}, nil
		}
		if ctx.Err() != nil {
			return nil, Outcome{}, err
		}
		e.warn(PhaseRestore, "the snapshot can't be restored; a new sandbox is made: "+err.Error())
	}
	if rec != nil {
		// What the record names may still be alive: too old, half made, or about to be
		// destroyed. A failure leaves the record to whoever sweeps.
		if err := e.retire(ctx, *rec); err != nil {
			if ctx.Err() != nil {
				return nil, Outcome{}, err
			}
			e.warn(PhaseDestroy, "the old sandbox can't be destroyed now: "+err.Error())
		}
	}
	return e.create(ctx)
}

// put writes the record; without a store it does nothing.
func (e *ensurer) put(ctx context.Context, rec store.Instance) (store.Instance, error) {
	if e.deps.Instances == nil {
		return rec, nil
	}
	got, err := e.deps.Instances.Put(ctx, rec)
	if err != nil {
		return rec, fmt.Errorf("sandbox: write the record: %w", err)
	}
	return got, nil
}

// resumeRetry is the pause before a resume is tried a second time.
const resumeRetry = 300 * time.Millisecond

// healthTimeout bounds the command that shows that a sandbox works.
const healthTimeout = 15 * time.Second

// resume attaches to the recorded sandbox. errGone says that there is none: the
// provider knows it no longer, or it runs no command. Any other error says
// nothing about the sandbox, so nothing may be made in its place.
func (e *ensurer) resume(ctx context.Context, rec *store.Instance) (_ *Sandbox, err error) {
	end := e.phase(PhaseResume, "")
	defer func() { end(err) }()
	var ref provider.Ref
	if err := json.Unmarshal(rec.Ref, &ref); err != nil {
		return nil, fmt.Errorf("sandbox: the record of %s has no reference: %w", e.key, err)
	}
	h, err := e.def.d.Provider.Resume(ctx, ref)
	if err != nil && !errors.Is(err, provider.ErrNotFound) {
		if err := pause(ctx, resumeRetry); err != nil {
			return nil, err
		}
		h, err = e.def.d.Provider.Resume(ctx, ref)
	}
	if errors.Is(err, provider.ErrNotFound) {
		return nil, errGone
	}
	if err != nil {
		return nil, fmt.Errorf("sandbox: resume %s: %w", ref, err)
	}
	box, err := e.attach(ctx, h)
	if err == nil {
		err = e.healthy(ctx, box)
	}
	if err != nil {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		e.warn(PhaseResume, "the sandbox does not answer and is given up: "+err.Error())
		return nil, errGone
	}
	rec.LatestRunID = e.k.RunID
	got, err := e.put(ctx, *rec)
	if err != nil {
		_ = box.Close() // the sandbox stays; it isn't this call's
		return nil, err
	}
	*rec = got
	return box, nil
}

// healthy runs a command that does nothing, twice if need be.
func (e *ensurer) healthy(ctx context.Context, box *Sandbox) (err error) {
	for range 2 {
		hctx, stop := context.WithTimeoutCause(ctx, healthTimeout, errors.New("no answer to a command"))
		_, err = box.Output(hctx, provider.Cmd{Argv: provider.Shell(":"), Dir: "/"})
		stop()
		if err == nil || ctx.Err() != nil {
			return err
		}
	}
	_ = box.Close() // it is of no use
	return err
}

func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// attach puts the guest into the sandbox, where that works, and makes the
// portable type. On an error the handle is closed.
func (e *ensurer) attach(ctx context.Context, h provider.Handle) (_ *Sandbox, err error) {
	if !e.deps.NoGuest {
		end := e.phase(PhaseGuest, "")
		o := e.deps.Guest
		o.Traits = provider.TraitsOf(e.def.d.Provider, h)
		if o.Logger == nil {
			o.Logger = e.log
		}
		g, err := guest.Attach(ctx, h, o)
		switch {
		case err == nil:
			end(nil)
			h = g
		case errors.Is(err, errors.ErrUnsupported) && ctx.Err() == nil:
			end(nil)
			e.warn(PhaseGuest, "the guest can't run here; commands do its work: "+err.Error())
		default:
			end(err)
			return nil, errors.Join(fmt.Errorf("sandbox: attach the guest: %w", err), h.Close())
		}
	}
	w := e.def.d.Workspace
	return New(e.def.d.Provider, h, Options{Root: w.Root, Env: w.Env, Secrets: w.Secrets, Logger: e.log}), nil
}

// spec returns what to create for a generation.
func (e *ensurer) spec(gen int64) provider.Spec {
	s := provider.Spec{
		Key: e.key,
		Labels: map[string]string{
			LabelKey: e.key, LabelGen: strconv.FormatInt(gen, 10), LabelDefinition: e.def.d.ID,
		},
		Network: e.def.d.Network,
	}
	if e.deps.Deployment != "" && e.deps.Instances != nil {
		s.Labels[LabelDeployment] = e.deps.Deployment
	}
	if gen > 1 {
		// The one before may still hold the name.
		s.Key += "g" + strconv.FormatInt(gen%(36*36*36), 36)
	}
	if !e.deps.NoGuest {
		s.Init = guest.NewInit(e.deps.Guest)
	}
	return s
}

// The labels of a sandbox: whatever a backend makes for one carries them.
const (
	LabelKey        = "aisbx.key"
	LabelGen        = "aisbx.gen"
	LabelDefinition = "aisbx.definition"
	LabelDeployment = "aisbx.deployment"
)

// restore makes the sandbox from the record's snapshot, in the same generation:
// the age of a snapshot goes on. There is no bootstrap.
func (e *ensurer) restore(ctx context.Context, r provider.Restorer, rec *store.Instance) (_ *Sandbox, err error) {
	end := e.phase(PhaseRestore, rec.SnapshotID)
	defer func() { end(err) }()
	// A sandbox that did not answer, or was half made, must not live on beside it.
	if err := e.destroyRef(ctx, *rec); err != nil {
		return nil, err
	}
	rec.State, rec.Ref, rec.LatestRunID = store.InstanceCreating, nil, e.k.RunID
	if *rec, err = e.put(ctx, *rec); err != nil {
		return nil, err
	}
	h, err := r.Restore(ctx, rec.SnapshotID, e.spec(rec.Gen))
	if err != nil {
		return nil, fmt.Errorf("sandbox: restore: %w", err)
	}
	ref := h.Ref()
	defer func() {
		if err != nil {
			err = errors.Join(err, e.destroyNow(ctx, ref))
		}
	}()
	box, err := e.attach(ctx, h)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, box.Close())
		}
	}()
	if err := e.ready(ctx, rec, ref); err != nil {
		return nil, err
	}
	return box, nil
}

// ready records a sandbox as usable.
func (e *ensurer) ready(ctx context.Context, rec *store.Instance, ref provider.Ref) (err error) {
	rec.State = store.InstanceReady
	if rec.Ref, err = json.Marshal(ref); err != nil {
		return err
	}
	*rec, err = e.put(ctx, *rec)
	return err
}

// create makes a new sandbox and fills it. The record says "creating" before the
// provider is asked, and names the sandbox as soon as there is one, so that a
// crash leaves a trace.
func (e *ensurer) create(ctx context.Context) (_ *Sandbox, out Outcome, err error) {
	rec, err := e.put(ctx, store.Instance{
		Key: e.key, Provider: e.def.d.Provider.Name(), State: store.InstanceCreating,
		Tenant: e.k.Tenant, ThreadID: e.k.ThreadID, LatestRunID: e.k.RunID,
	})
	if err != nil {
		return nil, out, err
	}
	out = Outcome{How: Created, Key: e.key, Gen: rec.Gen}
	end := e.phase(PhaseCreate, e.def.d.Provider.Name())
	h, err := e.def.d.Provider.Create(ctx, e.spec(rec.Gen))
	end(err)
	if err != nil {
		err = fmt.Errorf("sandbox: create: %w", err)
		return nil, out, errors.Join(err, e.forget(ctx, rec))
	}
	ref := h.Ref()
	defer func() {
		if err != nil {
			if e.box != nil {
				_ = e.box.Close() // it is destroyed next
			}
			err = errors.Join(err, e.abandon(ctx, rec, ref))
		}
	}()
	if rec.Ref, err = json.Marshal(ref); err != nil {
		return nil, out, errors.Join(err, h.Close())
	}
	if rec, err = e.put(ctx, rec); err != nil {
		return nil, out, errors.Join(err, h.Close())
	}
	if e.box, err = e.attach(ctx, h); err != nil {
		return nil, out, err
	}
	if err = e.bootstrap(ctx, &out); err != nil {
		return nil, out, err
	}
	if rec.SnapshotID, err = e.snapshot(ctx); err != nil {
		return nil, out, err
	}
	if err = e.ready(ctx, &rec, ref); err != nil {
		if rec.SnapshotID != "" {
			err = errors.Join(err, e.deleteSnapshot(ctx, rec.SnapshotID))
		}
		return nil, out, err
	}
	return e.box, out, nil
}

// snapshot takes the snapshot after set-up. That it fails is no reason to throw
// the sandbox away; only the end of ctx is an error.
func (e *ensurer) snapshot(ctx context.Context) (string, error) {
	if e.def.d.Lifecycle.Snapshot == NoSnapshot || e.deps.Instances == nil {
		return "", ctxErr(ctx)
	}
	if !e.box.Capabilities().Snapshots {
		return "", ctxErr(ctx)
	}
	end := e.phase(PhaseSnapshot, string(AfterSetup))
	id, err := e.box.Snapshot(ctx, string(AfterSetup))
	end(err)
	if err != nil && ctx.Err() == nil {
		e.warn(PhaseSnapshot, "no snapshot was taken: "+err.Error())
		return "", nil
	}
	return id, ctxErr(ctx)
}

func ctxErr(ctx context.Context) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return nil
}
