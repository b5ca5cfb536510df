package sandbox

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/aisandbox-go/aisandbox/chat"
	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/internal/failpoint"
	"github.com/aisandbox-go/aisandbox/secret"
	"github.com/aisandbox-go/aisandbox/store"
	"github.com/aisandbox-go/aisandbox/watch"
)

// What a run gets from [With].
var (
	// Token carries the run's sandbox.
	Token = chat.NewToken[*Sandbox]("sandbox", "add sandbox.With(definition, sandbox.WithOptions{}) to Request.Use")

	// DefToken carries the definition, for adapters that need its policy or
	// instructions.
	DefToken = chat.NewToken[*Def]("sandbox-definition", "add sandbox.With(definition, sandbox.WithOptions{}) to Request.Use")

	// DifferToken carries what shows the changes of the run.
	DifferToken = chat.NewToken[*watch.Differ]("sandbox-differ", "add sandbox.With(definition, sandbox.WithOptions{}) to Request.Use")

	// InstancesToken carries the store of sandboxes, where WithOptions names none.
	InstancesToken = chat.NewToken[store.Instances]("sandbox-instances", "set WithOptions.Instances")

	// DeploymentToken carries Deps.Deployment, where WithOptions has none.
	DeploymentToken = chat.NewToken[string]("sandbox-deployment", "set WithOptions.Deployment")
)

// WithOptions belong to [With]. Of each dependency the field here comes first,
// then what the run provides under its token.
type WithOptions struct {
	Deps

	// Runs and Log, set together, make the run durable. Deps.Instances must be set
	// then, too: another host finds the sandbox by it. It is best of the same store.
	// Deps.Leases should be, so that two hosts don't make the sandbox at once. Owner
	// and Lease are those of the run's claim as well; who wants a chat.Keeper uses
	// chat.Durable instead.
	Runs store.Runs
	Log  store.Log

	// KeepFor is how long the sandbox of a durable run stays after it, where it is
	// kept; the janitor destroys it then. 0: no end.
	KeepFor time.Duration
}

// With gives a run a sandbox made of def, and reports what happens to its files.
// At the end the sandbox is kept or destroyed as the life cycle says. A cancelled
// run's sandbox whose provider can't kill is destroyed in any case: the agent may
// still be at work. Nothing is destroyed while another run of this process, made
// with the same Def, works in the same sandbox.
func With(def *Def, o WithOptions) chat.Middleware {
	m := chat.Middleware{
		Name:     "sandbox",
		Provides: []chat.AnyToken{Token, DefToken, DifferToken},
		After:    []chat.AnyToken{chat.Leases, InstancesToken, DeploymentToken},
		Setup:    func(ctx context.Context, r *chat.Run) error { return setUp(ctx, r, def, o) },
		Done:     tearDown,
	}
	if o.Runs != nil && o.Log != nil {
		m.Durable = &chat.Durability{Runs: o.Runs, Log: o.Log, Owner: o.Owner, Lease: o.Lease}
	}
	return m
}

// session is what With keeps of a run.
type session struct {
	def    *Def
	deps   Deps
	key    Key
	out    Outcome
	box    *Sandbox
	differ *watch.Differ
	watch  *watch.Watch
	keep   time.Duration

	destroy bool // what was decided of a durable run's sandbox
	leave   bool // another host goes on with what is in it
}

var sessionToken = chat.NewToken[*session]("sandbox-session", "")

func setUp(ctx context.Context, r *chat.Run, def *Def, o WithOptions) (err error) {
	req := r.Request()
	s := &session{def: def, deps: o.Deps, key: Key{r.ThreadID(), r.ID(), req.Tenant, req.UserID}, keep: o.KeepFor}
	if s.deps.Instances == nil {
		s.deps.Instances, _ = InstancesToken.Get(r)
	}
	if s.deps.Leases == nil {
		s.deps.Leases, _ = chat.Leases.Get(r)
	}
	if s.deps.Deployment == "" {
		s.deps.Deployment, _ = DeploymentToken.Get(r)
	}
	if s.deps.Logger == nil {
		s.deps.Logger = r.Logger()
	}
	if r.Durable() && s.deps.Instances == nil {
		return errors.New("sandbox: a durable run needs Instances, or no other host finds its sandbox: set WithOptions.Instances")
	}
	if r.Durable() && s.deps.Leases == nil {
		r.Logger().Warn("a durable run without WithOptions.Leases: two hosts may make its sandbox at the same time")
	}
	claim, _ := r.Claim()
	_, bound := claim.Sandbox()
	quiet := r.Attached() && bound > 0 // viewers were told when it was made
	told := s.deps.Progress
	s.deps.Progress = func(ev ProgressEvent) {
		if !quiet {
			emit(ctx, r, event.NameWorkspaceSetup, setupPhase(ev))
		}
		if told != nil {
			told(ev)
		}
	}
	def.users.enter(def.InstanceKey(s.key)) // before Ensure: who resumes it counts
	if quiet {
		s.box, err = EnsureBound(ctx, s.deps, def, s.key, bound)
		s.out = Outcome{How: Resumed, Key: def.InstanceKey(s.key), Gen: bound}
	} else {
		s.box, s.out, err = Ensure(ctx, s.deps, def, s.key)
	}
	if err != nil {
		def.users.leave(def.InstanceKey(s.key))
		return err
	}
	// From here on a failure must undo what was made; Done is not called for it.
	defer func() {
		if err != nil {
			// Who has the run now may have found the sandbox, and work in it.
			s.leave = quiet
			fenced := errors.Is(err, store.ErrFenced) || errors.Is(context.Cause(ctx), store.ErrFenced)
			err = errors.Join(err, s.end(ctx, s.out.How != Resumed && !fenced))
		}
	}()
	if d, ok := r.Durability(); ok && !quiet {
		err := d.Runs.Update(ctx, claim, store.RunPatch{SandboxKey: &s.out.Key, SandboxGen: &s.out.Gen})
		if err != nil {
			return fmt.Errorf("sandbox: bind the run: %w", err)
		}
		failpoint.Hit(failpoint.SandboxBound, claim.Owner())
	}
	if hide := s.box.Redactor(); !hide.Idle() {
		r.Redact(func(ev event.Event) event.Event { return RedactEvent(hide, ev) })
		r.RedactText(func(w io.Writer) io.WriteCloser { return hide.Writer(w) })
	}
	name := event.NameSandboxCreated
	if s.out.How == Resumed {
		name = event.NameSandboxResumed
	}
	if !quiet {
		emit(ctx, r, name, event.SandboxReady{SandboxID: s.box.Ref().ID, Provider: s.box.Ref().Provider})
	}
	s.differ = watch.StartDiffer(ctx, s.box.Handle(), watch.DiffOptions{
		Root: s.box.RealRoot(), Redact: s.box.Redactor().String, Logger: s.deps.Logger, Name: baseline(claim, r.Durable()),
	})
	s.box.hold = func(ctx context.Context) error {
		// A state that was given up, since the run has ended, holds nothing back.
		if err := s.differ.Ready(ctx); err != nil && ctx.Err() != nil {
			return err
		}
		return nil
	}
	if f := def.d.Hooks.OnReady; f != nil {
		if err := s.differ.Ready(ctx); err != nil { // it may go by the handle
			return err
		}
		if err := f(ctx, s.box); err != nil {
			return fmt.Errorf("sandbox: OnReady: %w", err)
		}
	}
	if def.d.FileEvents != FileEventsOff {
		// The watch outlives Setup and ends with Done.
		s.watch, err = watch.Start(context.WithoutCancel(ctx), s.box.Handle(), watch.Options{
			Root: s.box.RealRoot(), Logger: s.deps.Logger,
			OnEvent: func(ev watch.Event) { s.file(context.WithoutCancel(ctx), r, ev) },
		})
		if err != nil {
			return fmt.Errorf("sandbox: watch files: %w", err)
		}
	}
	Token.Provide(r, s.box)
	DefToken.Provide(r, def)
	DifferToken.Provide(r, s.differ)
	sessionToken.Provide(r, s)
	if r.Durable() {
		r.AfterEnd(s.afterEnd)
	}
	return nil
}

// baseline names what a durable run's changes are compared with, so that a host
// that takes it over compares with the same. The agent can't guess it.
func baseline(c store.Claim, durable bool) string {
	if !durable {
		return ""
	}
	m := hmac.New(sha256.New, c.Nonce())
	m.Write([]byte("diff/v1"))
	m.Write([]byte(c.RunID()))
	return hex.EncodeToString(m.Sum(nil))[:26]
}

// emit tells viewers something; a run that is about to end takes nothing more.
func emit(ctx context.Context, r *chat.Run, name string, v any) {
	ev, err := event.NewCustom(name, v)
	if err == nil {
		err = r.Emit(ctx, ev)
	}
	if err != nil {
		r.Logger().Debug("an event was left out", "name", name, "error", err)
	}
}

func setupPhase(ev ProgressEvent) event.SetupPhase {
	p := event.SetupPhase{Phase: string(ev.Phase), Name: ev.Detail, DurationMs: ev.Duration.Milliseconds()}
	switch ev.State {
	case ProgressStarted:
		p.Status = event.SetupStarted
	case ProgressFailed:
		p.Status = event.SetupFailed
	default:
		p.Status = event.SetupDone
	}
	return p
}

// RedactEvent hides secrets in what an event says. An event that can't be read
// again afterwards is a panic, upon which a run drops it rather than show it.
func RedactEvent(red *secret.Redactor, ev event.Event) event.Event {
	b, err := event.Encode(ev)
	if err != nil {
		return ev // it will not be logged either
	}
	hidden := red.JSON(b)
	if string(hidden) == string(b) {
		return ev
	}
	out, err := event.Decode(hidden)
	if err != nil || out.Type() != ev.Type() {
		panic("sandbox: an event can't be read after redaction") // the run drops its content
	}
	return out
}

// file reports one change: to the hooks of the definition, to the stream and the
// hooks of the run, and as a diff where that is wanted.
func (s *session) file(ctx context.Context, r *chat.Run, w watch.Event) {
	f := FileEvent{
		File:   event.File{Type: string(w.Type), Path: s.box.Virtual(w.Path), Timestamp: w.Time.UnixMilli()},
		Before: func(ctx context.Context) (string, error) { return s.differ.Before(ctx, w.Path) },
		After:  func(ctx context.Context) (string, error) { return s.differ.After(ctx, w.Path) },
		Diff:   func(ctx context.Context) (string, error) { return s.differ.Diff(ctx, w.Path) },
	}
	h := s.def.d.Hooks
	for _, hook := range []func(context.Context, FileEvent){h.OnFile, h.of(f.Type)} {
		if hook != nil {
			s.guard("file hook", f.Path, func() { hook(ctx, f) })
		}
	}
	if err := r.EmitFile(ctx, f); err != nil {
		return // the run takes nothing more
	}
	if s.def.d.FileEvents != FileEventsDiff {
		return
	}
	diff, err := f.Diff(ctx)
	if err != nil {
		s.deps.Logger.Warn("the diff of a file is missing", "path", s.box.red.String(f.Path), "error", s.box.red.Error(err))
	} else if diff != "" {
		emit(ctx, r, event.NameFileDiff, event.FileDiff{Path: f.Path, Diff: diff})
	}
}

// guard keeps a hook's panic from ending the program.
func (s *session) guard(what, detail string, f func()) {
	defer func() {
		if p := recover(); p != nil {
			s.deps.Logger.Error(what+" panicked", "detail", s.box.red.String(detail), "panic", s.box.red.String(fmt.Sprint(p)))
		}
	}()
	f()
}

func tearDown(ctx context.Context, r *chat.Run, o chat.Outcome) error {
	s, ok := sessionToken.Get(r)
	if !ok {
		return nil
	}
	s.deps.Progress = nil // the stream is about to end
	destroy := s.def.d.Lifecycle.OnComplete == Destroy
	switch o.Kind {
	case chat.Detached, chat.Fenced:
		destroy = false // the agent goes on, or is somebody else's
	case chat.Canceled:
		destroy = destroy || !s.box.Traits().Kill || s.box.condemned.Load()
	case chat.Failed:
		if f := s.def.d.Hooks.OnError; f != nil {
			s.guard("OnError", "", func() { f(ctx, o.Err) })
		}
		destroy = destroy || s.box.condemned.Load()
	}
	if !r.Durable() {
		return s.end(ctx, destroy)
	}
	s.stopWatch(ctx)
	r.OnFinish(func(f *store.Final) {
		f.Instance = &store.Disposition{Key: s.out.Key, Gen: s.out.Gen, Destroy: destroy, KeepFor: s.keep}
	})
	s.destroy = destroy
	return nil
}

// afterEnd does what was stored with the end of a durable run.
func (s *session) afterEnd(ctx context.Context, o chat.Outcome) {
	s.leave = o.Kind == chat.Detached || o.Kind == chat.Fenced
	destroy := s.destroy && !s.leave
	if destroy {
		// The store has said so, unless another run works there. Where instances are
		// kept in another database than runs it is said now.
		err := s.deps.Instances.Retire(ctx, s.out.Key, s.out.Gen)
		var taken *store.InstanceError
		if errors.As(err, &taken) || errors.Is(err, store.ErrNotFound) {
			destroy = false
		} else if err != nil {
			s.deps.Logger.Warn("the sandbox is left to the janitor", "error", s.box.red.Error(err))
			destroy = false
		}
	}
	if err := s.end(ctx, destroy); err != nil {
		s.deps.Logger.Warn("the sandbox is left to the janitor", "error", s.box.red.Error(err))
	}
}

// drainTime bounds the last sweep for changed files.
const drainTime = 20 * time.Second

// end stops watching, tells what changed until now, and closes or destroys the
// sandbox. Nothing that goes wrong on the way keeps it from being destroyed.
func (s *session) end(ctx context.Context, destroy bool) error {
	s.stopWatch(ctx)
	destroy = s.def.users.leave(s.def.InstanceKey(s.key)) && destroy
	if s.differ != nil && !s.leave { // also when the sandbox goes: where it is the host its files would stay
		if err := s.differ.Close(ctx); err != nil {
			s.deps.Logger.Debug("the differ left files behind", "error", s.box.red.Error(err))
		}
	}
	ref := s.box.Ref()
	err := s.box.Close()
	if !destroy {
		return err
	}
	done, derr := destroyInstance(ctx, s.deps, s.def, s.key, &ref)
	if f := s.def.d.Hooks.OnDestroy; f != nil && done {
		s.guard("OnDestroy", "", func() { f(ctx) })
	}
	return errors.Join(err, derr)
}

// stopWatch takes the last changes of files. Once.
func (s *session) stopWatch(ctx context.Context) {
	if s.watch == nil {
		return
	}
	ctx, stop := context.WithTimeout(ctx, drainTime)
	defer stop()
	if err := s.watch.Stop(ctx); err != nil {
		s.deps.Logger.Warn("the last changes of files may be missing", "error", s.box.red.Error(err))
	}
	s.watch = nil
}
