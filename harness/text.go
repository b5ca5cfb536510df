package harness

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"path"
	"strings"
	"syscall"
	"time"

	"github.com/aisandbox-go/aisandbox/chat"
	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/guest"
	"github.com/aisandbox-go/aisandbox/internal/sh"
	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/sandbox"
	"github.com/aisandbox-go/aisandbox/secret"
)

// Options belong to [Text].
type Options struct {
	// NoDiff leaves out the file.changed event at the end of a run.
	NoDiff bool

	// MaxDiff bounds that event's diff, in bytes; a longer one is cut and says so.
	// 0 means 1 MiB.
	MaxDiff int
}

const (
	defaultMaxDiff = 1 << 20
	stderrTail     = 4 << 10
	cleanupTime    = 10 * time.Second
	killTime       = 5 * time.Second
)

// Text turns a CLI into a chat adapter. The adapter needs [sandbox.Token]. It may
// be used by many runs at once if the CLI may.
func Text(cli CLI, o Options) chat.Adapter {
	if o.MaxDiff <= 0 {
		o.MaxDiff = defaultMaxDiff
	}
	return &adapter{cli: cli, o: o}
}

// Replayer is offered by the adapters of this package: it translates a recorded
// output of the agent's program, without a sandbox. end says how the recorded
// process ended. The sequence is single use.
type Replayer interface {
	Replay(t Turn, r io.Reader, end End) iter.Seq2[event.Event, error]
}

type adapter struct {
	cli CLI
	o   Options
}

var (
	_ chat.Adapter   = (*adapter)(nil)
	_ chat.Journaler = (*adapter)(nil)
	_ Replayer       = (*adapter)(nil)
)

func (a *adapter) Name() string { return a.cli.Name() }

func (a *adapter) Needs() []chat.AnyToken { return []chat.AnyToken{sandbox.Token} }

// Model implements chat.Modeler where the CLI knows its model.
func (a *adapter) Model() string {
	if m, ok := a.cli.(chat.Modeler); ok {
		return m.Model()
	}
	return ""
}

// Replay implements [Replayer].
func (a *adapter) Replay(t Turn, r io.Reader, end End) iter.Seq2[event.Event, error] {
	return func(yield func(event.Event, error) bool) {
		dec := a.cli.Decoder(t)
		more := true
		lines := NewLines(0, func(line []byte) error {
			evs, err := dec.Line(line)
			for _, ev := range evs {
				if more = more && yield(ev, nil); !more {
					return errStop
				}
			}
			return err
		})
		_, err := io.Copy(lines, r)
		if err == nil {
			err = lines.Close()
		}
		if !more {
			return
		}
		if err != nil {
			yield(nil, err)
			return
		}
		evs, err := dec.Close(end)
		for _, ev := range evs {
			if !yield(ev, nil) {
				return
			}
		}
		if err != nil {
			yield(nil, err)
		}
	}
}

// errStop ends a loop whose consumer is gone.
var errStop = errors.New("stopped")

// Stream implements chat.Adapter.
func (a *adapter) Stream(ctx context.Context, r *chat.Run) iter.Seq2[chat.Item, error] {
	return func(yield func(chat.Item, error) bool) {
		sb, ok := sandbox.Token.Get(r)
		if !ok {
			yield(chat.Item{}, fmt.Errorf("%s: no sandbox: put sandbox.With(…) into Request.Use", a.Name()))
			return
		}
		t := &turn{a: a, run: r, sb: sb, yield: func(it chat.Item) bool { return yield(it, nil) }}
		var err error
		if r.Durable() {
			err = t.streamDetached(ctx)
		} else {
			err = t.stream(ctx)
			if cerr := t.close(ctx); err == nil {
				err = cerr
			}
		}
		if err != nil && !errors.Is(err, errStop) {
			yield(chat.Item{}, fmt.Errorf("%s: %w", a.Name(), err))
		}
	}
}

// turn is one run of one CLI.
type turn struct {
	a     *adapter
	run   *chat.Run
	sb    *sandbox.Sandbox
	yield func(chat.Item) bool

	own     *secret.Redactor // of the CLI's secrets
	private string
	tunnels []*tunnel
	gone    bool // the consumer stopped
}

func (t *turn) stream(ctx context.Context) error {
	plan, err := t.plan(ctx)
	if err != nil {
		return err
	}
	files, warnings, err := t.a.cli.Files(plan)
	if err != nil {
		return err
	}
	for _, w := range warnings {
		plan.Warn(w)
	}
	inside, err := t.openTunnels(ctx, plan, nil)
	if err != nil {
		return err
	}
	if err := t.hide(plan); err != nil {
		return err
	}
	ids := event.NewIDs(plan.RunID)
	next := Turn{Plan: plan, Inside: inside, NewID: ids}
	if err := t.write(ctx, files); err != nil {
		return err
	}
	for tries := 0; ; tries++ {
		again, err := t.once(ctx, &next, tries == 0)
		if err != nil || !again {
			return err
		}
		if files, _, err = t.a.cli.Files(next.Plan); err != nil {
			return err
		}
		if err := t.write(ctx, files); err != nil {
			return err
		}
	}
}

func (t *turn) plan(ctx context.Context) (Plan, error) {
	req := t.run.Request()
	p := Plan{
		RunID: req.RunID, ThreadID: req.ThreadID, ParentRunID: req.ParentRunID,
		Messages: req.Messages, System: req.System, Options: req.Options, Schema: req.Schema,
		Root:   t.sb.RealRoot(),
		Traits: t.sb.Traits(),
		Env:    map[string]bool{},
		Warn: func(msg string) {
			t.run.Logger().Warn(t.sb.Redactor().String(msg), "harness", t.a.Name())
		},
	}
	if def, ok := sandbox.DefToken.Get(t.run); ok {
		d := def.Definition()
		p.Instructions, p.Policy = d.Workspace.AgentsText(), d.Policy
	}
	for _, n := range t.sb.EnvNames() {
		p.Env[n] = true
	}
	// Outside of the workspace, so that no diff, watcher or checkpoint sees it; a
	// fresh name, so that nothing planted there can be in the way.
	p.Private = "/tmp/aisandbox-" + strings.ToLower(rand.Text())
	if c, ok := t.run.Claim(); ok && t.run.Durable() {
		p.Private = privateDir(c)
	}
	t.private = p.Private
	if g, ok := provider.As[*guest.Handle](t.sb.Handle()); ok {
		argv, err := g.Command(ctx)
		if err != nil {
			return p, err
		}
		p.Guest = argv
	}
	return p, nil
}

// hide makes the run redact the secrets that the CLI brings along.
func (t *turn) hide(p Plan) error {
	s, ok := t.a.cli.(Secrets)
	if !ok {
		return nil
	}
	set, err := s.Secrets(p)
	if err != nil {
		return err
	}
	t.own = secret.NewRedactor(set)
	if t.own.Idle() {
		return nil
	}
	t.run.Redact(func(ev event.Event) event.Event { return sandbox.RedactEvent(t.own, ev) })
	t.run.RedactText(func(w io.Writer) io.WriteCloser { return t.own.Writer(w) })
	return nil
}

// write puts files where the program reads them. It goes by commands of the
// agent's own user, so that the files are the agent's, on every backend.
func (t *turn) write(ctx context.Context, files []File) error {
	for _, f := range files {
		mode := f.Mode.Perm()
		if mode == 0 {
			mode = 0o600
		}
		name, wctx := f.Name, ctx
		if !path.IsAbs(name) {
			// Beside the workspace, so it needn't wait for what the diff starts from.
			wctx = sandbox.Early(ctx)
			name = path.Join(t.private, name)
			if !strings.HasPrefix(name, t.private+"/") {
				return fmt.Errorf("file %q leaves the run's private directory", f.Name)
			}
		}
		script := fmt.Sprintf("umask 077 && mkdir -p %s && cat > %s", sh.Quote(path.Dir(name)), sh.Quote(name))
		if mode != 0o600 {
			script += fmt.Sprintf(" && chmod %o %s", mode, sh.Quote(name))
		} else if path.IsAbs(f.Name) {
			script += " && chmod 600 " + sh.Quote(name) // it may have been there
		}
		_, err := t.sb.Output(wctx, provider.Cmd{
			Argv: provider.Shell(script), Dir: "/", Stdin: bytes.NewReader(f.Content),
		})
		if err != nil {
			return fmt.Errorf("write %s: %w", path.Base(name), err)
		}
	}
	return nil
}

// once runs one process to its end. again is true when a fallback is to be run
// instead: nt holds it.
func (t *turn) once(ctx context.Context, nt *Turn, mayFall bool) (again bool, err error) {
	cmd, err := t.a.cli.Command(*nt)
	if err != nil {
		return false, err
	}
	dec := t.a.cli.Decoder(*nt)
	pr, pw := io.Pipe()
	errTail := &tail{most: stderrTail}
	cmd.Stdout, cmd.Stderr = pw, errTail

	// The process has a life of its own: how it ends on a cancel is the ladder's.
	pctx, kill := context.WithCancel(context.WithoutCancel(ctx))
	defer kill()
	if err := context.Cause(ctx); err != nil {
		return false, err
	}
	proc, err := t.sb.Start(pctx, cmd)
	if err != nil {
		return false, startError(cmd.Argv, err)
	}
	type ending struct {
		exit provider.Exit
		err  error
	}
	ended := make(chan ending, 1)
	dead := make(chan struct{})
	go func() {
		exit, err := proc.Wait()
		ended <- ending{exit, err}
		close(dead)
		_ = pw.Close()
	}()
	laddered := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(laddered)
		t.abort(proc, dead)
	})

	emitted := false
	linger := t.lingering(dec, func() { t.abort(proc, dead) }, dead)
	defer linger.stop()
	lines := NewLines(0, func(line []byte) error {
		evs, err := dec.Line(line)
		for _, ev := range evs {
			emitted = true
			if !t.emit(chat.Item{Event: ev}) {
				return errStop
			}
		}
		linger.look()
		return err
	})
	_, readErr := io.Copy(lines, pr)
	if readErr == nil {
		readErr = lines.Close()
	}
	if readErr != nil {
		// Nobody reads on: end the tree, or Wait would wait for a blocked writer.
		_ = pr.CloseWithError(readErr)
		_ = proc.Signal(os.Kill)
	}
	end := <-ended
	if !stop() {
		<-laddered
	}
	switch {
	case readErr != nil:
		return false, readErr
	case end.err != nil && ctx.Err() == nil:
		return false, end.err
	}
	last := End{Exit: end.exit, Aborted: ctx.Err() != nil, StderrTail: t.sb.Redactor().Tail(t.own.String(errTail.String()), stderrTail)}
	evs, err := dec.Close(last)
	if err != nil {
		return false, err
	}
	if fb, ok := t.a.cli.(Fallback); ok && mayFall && !emitted && !last.Aborted {
		if next, why, ok := fb.Fallback(*nt, evs, last); ok {
			nt.Warn(why)
			*nt = next
			return true, nil
		}
	}
	return false, t.finish(ctx, evs, 0)
}

// finish emits what the decoder had left to say, with the diff before the
// terminal event. off is the end of the exit's record in the journal, or 0.
func (t *turn) finish(ctx context.Context, evs []event.Event, off int64) error {
	for _, ev := range evs {
		switch ev.(type) {
		case event.RunFinished, event.RunError:
			if d, ok := t.diff(ctx); ok && !t.emit(chat.Item{Event: d}) {
				return errStop
			}
		}
		if !t.emit(chat.Item{Event: ev, Off: off}) {
			return errStop
		}
	}
	return nil
}

func (t *turn) emit(it chat.Item) bool {
	if !t.gone && !t.yield(it) {
		t.gone = true
	}
	return !t.gone
}

// diff is the file.changed event; ok is false when nothing changed or there is
// no repository. A failure to find out is a warning: the run's result stands.
func (t *turn) diff(ctx context.Context) (event.Event, bool) {
	if t.a.o.NoDiff {
		return nil, false
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTime)
	defer cancel()
	differ, ok := sandbox.DifferToken.Get(t.run)
	if !ok {
		return nil, false
	}
	d, truncated, err := differ.Tree(ctx, int64(t.a.o.MaxDiff))
	if err != nil {
		t.run.Logger().Warn("no diff", "error", err)
		return nil, false
	}
	if strings.TrimSpace(d) == "" {
		return nil, false
	}
	ev, err := event.NewCustom(event.NameFileChanged, event.FileChanged{Path: ".", Diff: d, Truncated: truncated})
	if err != nil {
		t.run.Logger().Warn("no diff", "error", err)
		return nil, false
	}
	return ev, true
}

// abort ends the program in steps, so that it can end its own children and say
// what it had to say; whatever is left is killed.
func (t *turn) abort(p provider.Process, dead <-chan struct{}) {
	if s, ok := provider.As[provider.Sweeper](p); ok {
		// The program may end at the first step and leave a child in a session of its
		// own. If this fails so does the signal.
		_ = s.Sweep()
	}
	steps := []AbortStep{{Signal: int(syscall.SIGTERM), Wait: killTime}}
	if l, ok := t.a.cli.(AbortLadder); ok {
		steps = l.AbortLadder()
	}
	for _, s := range steps {
		if err := p.Signal(syscall.Signal(s.Signal)); err != nil {
			break
		}
		timer := time.NewTimer(s.Wait)
		select {
		case <-dead:
			timer.Stop()
			return
		case <-timer.C:
		}
	}
	_ = p.Signal(os.Kill)
}

// lingerer ends a program that has stayed too long after its last result.
type lingerer struct {
	dec   Finisher
	most  time.Duration
	timer *time.Timer
}

func (t *turn) lingering(dec Decoder, end func(), dead <-chan struct{}) *lingerer {
	l, ok := t.a.cli.(Lingerer)
	f, can := dec.(Finisher)
	if !ok || !can || l.MaxLinger() <= 0 {
		return &lingerer{}
	}
	timer := time.AfterFunc(l.MaxLinger(), func() {
		select {
		case <-dead:
			return
		default:
		}
		t.run.Logger().Warn("the agent's program has stayed after its result and is ended", "harness", t.a.Name())
		end()
	})
	timer.Stop()
	return &lingerer{dec: f, most: l.MaxLinger(), timer: timer}
}

// look is called after each line.
func (l *lingerer) look() {
	switch {
	case l.timer == nil:
	case l.dec.Finished():
		l.timer.Reset(l.most)
	default:
		l.timer.Stop()
	}
}

func (l *lingerer) stop() {
	if l.timer != nil {
		l.timer.Stop()
	}
}

// close removes what the run left in the sandbox.
func (t *turn) close(ctx context.Context) error {
	err := t.closeTunnels()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTime)
	defer cancel()
	t.removePrivate(ctx)
	return err
}

func (t *turn) closeTunnels() error {
	var errs []error
	for _, tn := range t.tunnels {
		errs = append(errs, tn.Close())
	}
	t.tunnels = nil
	return errors.Join(errs...)
}

func (t *turn) removePrivate(ctx context.Context) {
	if t.private == "" {
		return
	}
	_, err := t.sb.Output(ctx, provider.Cmd{Argv: []string{"rm", "-rf", "--", t.private}, Dir: "/"})
	if err != nil && !errors.Is(err, provider.ErrNotFound) {
		t.run.Logger().Warn("private files are left in the sandbox", "error", err)
	}
}

// startError names the cure where the agent's program is missing.
func startError(argv []string, err error) error {
	if errors.Is(err, os.ErrNotExist) && len(argv) > 0 {
		return &MissingProgramError{Program: argv[0], Err: err}
	}
	return err
}

// MissingProgramError says that the agent's program is not in the sandbox.
type MissingProgramError struct {
	Program string
	Err     error
}

func (e *MissingProgramError) Error() string {
	return fmt.Sprintf("program %q is not in the sandbox: install it in the image or in a setup step, or name its path: %v", e.Program, e.Err)
}

// Unwrap returns the cause.
func (e *MissingProgramError) Unwrap() error { return e.Err }

// Code is stable.
func (e *MissingProgramError) Code() string { return "agent_not_found" }

// tail keeps the end of a stream, somewhat more than asked for. It has one writer,
// and is read after that ended.
type tail struct {
	most int
	buf  []byte
	cut  bool
}

func (t *tail) Write(p []byte) (int, error) {
	t.buf = append(t.buf, p...)
	if len(t.buf) > 2*t.most {
		t.buf = append(t.buf[:0], t.buf[len(t.buf)-t.most:]...)
		t.cut = true
	}
	return len(p), nil
}

// String is what was kept. Where something was cut off it begins with a whole
// line: half a secret could not be recognised.
func (t *tail) String() string {
	if t.cut {
		_, rest, _ := bytes.Cut(t.buf, []byte("\n"))
		return string(rest)
	}
	return string(t.buf)
}
