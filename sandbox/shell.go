package sandbox

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/aisandbox-go/aisandbox/internal/sh"
	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/workspace"
)

// How a set-up step may fail besides its exit code.
var (
	// ErrShellDied: the shell that runs the steps ended before the step did.
	ErrShellDied = errors.New("the shell ended before the step did")

	// ErrStepTimeout: the step took longer than it may.
	ErrStepTimeout = errors.New("the step timed out")
)

// stepTimeout is the limit of one set-up step.
const stepTimeout = 30 * time.Minute

// disposeTimeout bounds the wait for a killed shell: a background child that
// nobody can kill may hold its output open.
const disposeTimeout = 5 * time.Second

// stepShell runs the serial steps of a plan. Not for concurrent use.
type stepShell interface {
	// run runs one command. The error is a [*workspace.StepError], or the cause of ctx.
	run(ctx context.Context, command string) error

	// state returns what a parallel step starts with.
	state(ctx context.Context) (forkState, error)

	close()
}

// forkState is the directory and the changes to the environment that serial steps made.
type forkState struct {
	dir   string // real path
	set   []string
	unset []string
}

// newMarker returns a line that the output of no step can hold by chance or by intent.
func newMarker() string { return "__BSSH_" + rand.Text() + "_" }

// stepScript is the protocol of spec 01 §8.5. command keeps a syntax error from
// ending the shell; eval of a quoted word takes comments, here documents and
// trailing operators; the empty input makes what reads it end at once.
func stepScript(command, marker string) string {
	return "command eval " + sh.Quote(command) + " </dev/null 2>&1; printf '\\n" + marker + " %s\\n' \"$?\""
}

// newStepShell returns a shell in dir: a process where the sandbox takes live
// input, else one command per step.
func (e *ensurer) newStepShell(ctx context.Context, dir string) (stepShell, error) {
	x := &execShell{e: e, dir: dir, marker: newMarker()}
	if !e.box.Traits().LiveStdin {
		return x, nil
	}
	s := &liveShell{e: e, root: dir}
	if err := s.start(ctx); err != nil {
		return nil, err
	}
	return s, nil
}

// liveShell is one sh process that reads steps from its standard input.
type liveShell struct {
	e    *ensurer
	root string

	marker string
	n      int
	out    *splitter
	stdin  *io.PipeWriter
	proc   provider.Process
	died   chan struct{} // closed when the process has ended
	exit   provider.Exit
	err    error
	first  map[string]string // the environment at the start
}

func (s *liveShell) start(ctx context.Context) error {
	r, w := io.Pipe()
	s.marker, s.n, s.out, s.stdin = newMarker(), 0, &splitter{}, w
	p, err := s.e.box.Start(ctx, provider.Cmd{Argv: []string{"sh"}, Dir: s.root, Stdin: r, Stdout: s.out})
	if err != nil {
		return fmt.Errorf("sandbox: start the set-up shell: %w", err)
	}
	s.proc, s.died = p, make(chan struct{})
	died := s.died
	go func() {
		s.exit, s.err = p.Wait()
		_ = r.CloseWithError(io.ErrClosedPipe) // who still writes must not wait
		close(died)
	}()
	out, _, err := s.call(ctx, dumpState, 1<<20)
	if err == nil {
		_, s.first, _ = parseState(out)
	}
	return err
}

// call runs one command and returns its output and exit code. The error is
// ErrShellDied, ErrStepTimeout or the cause of ctx; after one the shell is of no use.
func (s *liveShell) call(ctx context.Context, command string, keep int) (string, int, error) {
	marker := fmt.Sprintf("%s%d", s.marker, s.n)
	s.n++
	out, ended := s.out.begin(marker, keep)
	written := make(chan struct{})
	go func() {
		defer close(written)
		_, _ = io.WriteString(s.stdin, stepScript(command, marker)+"\n") // a dead shell shows as died
	}()
	t := time.NewTimer(s.e.stepTimeout)
	defer t.Stop()
	var err error
	select {
	case <-ended:
		<-written
		return strings.TrimSuffix(out.String(), "\n"), s.out.code, nil
	case <-s.died:
		s.out.flush()
		select {
		case <-ended: // both at once: the step did end
			<-written
			return strings.TrimSuffix(out.String(), "\n"), s.out.code, nil
		default:
		}
		err = ErrShellDied
		if s.err != nil {
			err = fmt.Errorf("%w: %w", ErrShellDied, s.err)
		}
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
	case <-t.C:
		err = fmt.Errorf("%w after %v", ErrStepTimeout, s.e.stepTimeout)
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	s.kill()
	<-written
	return out.String(), s.exitCode(), err
}

func (s *liveShell) exitCode() int {
	select {
	case <-s.died:
		return s.exit.Code
	default:
		return -1
	}
}

func (s *liveShell) run(ctx context.Context, command string) error {
	select {
	case <-s.died:
		// A step before ended the shell with exit 0: what it left is gone.
		s.e.warn(PhaseSetup, "a set-up step ended the shell with exit 0: directory and variables start anew")
		if err := s.start(ctx); err != nil {
			return err
		}
	default:
	}
	out, code, err := s.call(ctx, command, stepTail)
	if errors.Is(err, ErrShellDied) && s.err == nil && s.exit.Signal == 0 {
		// The step said exit.
		err, code = nil, s.exit.Code
	}
	return s.e.stepResult(ctx, command, out, code, err)
}

// stepResult makes the error of a step.
func (e *ensurer) stepResult(ctx context.Context, command, out string, code int, err error) error {
	switch {
	case err == nil && code == 0:
		return nil
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case err != nil:
		code = 0
	}
	return &workspace.StepError{Step: e.red.String(command), ExitCode: code, Tail: e.tailOf(out), Err: e.red.Error(err)}
}

func (s *liveShell) state(ctx context.Context) (forkState, error) {
	select {
	case <-s.died: // see run
		return forkState{dir: s.root}, nil
	default:
	}
	out, _, err := s.call(ctx, dumpState, 1<<20)
	if err != nil {
		return forkState{}, fmt.Errorf("sandbox: read the state of the set-up shell: %w", err)
	}
	dir, env, ok := parseState(out)
	if !ok {
		return forkState{}, errors.New("sandbox: read the state of the set-up shell: unexpected output")
	}
	set, unset := envDiff(s.first, env)
	return forkState{dir, set, unset}, nil
}

// kill ends the shell and everything it started.
func (s *liveShell) kill() {
	_ = s.stdin.Close()
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.proc.Signal(os.Kill) // it may be gone already
		<-s.died
	}()
	t := time.NewTimer(disposeTimeout)
	defer t.Stop()
	select {
	case <-done:
	case <-t.C:
		s.e.warn(PhaseSetup, "the set-up shell can't be ended")
	}
}

func (s *liveShell) close() { s.kill() }

// execShell runs each step as a command of its own and carries directory and
// exported variables along, for sandboxes that take no live input.
type execShell struct {
	e      *ensurer
	marker string
	n      int
	dir    string
	first  map[string]string
	now    map[string]string
}

func (x *execShell) run(ctx context.Context, command string) error {
	if x.first == nil {
		if _, _, err := x.call(ctx, ":"); err != nil {
			return x.e.stepResult(ctx, command, "", 0, err)
		}
		x.first = x.now
	}
	out, code, err := x.call(ctx, command)
	return x.e.stepResult(ctx, command, out, code, err)
}

// call runs one command, then takes over the state that it left, whether or not
// it succeeded. What ends the script early leaves the state as it was.
func (x *execShell) call(ctx context.Context, command string) (string, int, error) {
	marker := fmt.Sprintf("%s%d", x.marker, x.n)
	x.n++
	split := &splitter{after: &ring{max: 2 << 20}}
	out, ended := split.begin(marker, stepTail)
	set, unset := envDiff(x.first, x.now)
	script := unsetScript(unset) + stepScript(command, marker) + "; " + dumpState
	exit, err := x.e.runStep(ctx, provider.Cmd{Argv: provider.Shell(script), Dir: x.dir, Env: set, Stdout: split})
	if err != nil {
		return out.String(), 0, err
	}
	select {
	case <-ended:
	default:
		split.flush()
		return out.String(), exit.Code, nil
	}
	if dir, env, ok := parseState(split.after.String()); ok {
		x.dir, x.now = dir, env
	}
	return strings.TrimSuffix(out.String(), "\n"), split.code, nil
}

func (x *execShell) state(context.Context) (forkState, error) {
	set, unset := envDiff(x.first, x.now)
	return forkState{x.dir, set, unset}, nil
}

func (x *execShell) close() {}

func unsetScript(names []string) string {
	var b strings.Builder
	for _, n := range names {
		// A name that is no identifier came from the outside and is none of a script's.
		if strings.Trim(n, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_") == "" {
			b.WriteString("unset " + n + "\n")
		}
	}
	return b.String()
}

// runStep runs a command with the time limit of a step.
func (e *ensurer) runStep(ctx context.Context, cmd provider.Cmd) (provider.Exit, error) {
	tctx, stop := context.WithTimeoutCause(ctx, e.stepTimeout, fmt.Errorf("%w after %v", ErrStepTimeout, e.stepTimeout))
	defer stop()
	res, err := e.box.Run(tctx, cmd)
	if err == nil && tctx.Err() != nil && res.Exit.Signal != 0 {
		err = context.Cause(tctx)
	}
	return res.Exit, err
}

// setup runs the plan (spec 01 §8) and returns the commands that succeeded.
func (e *ensurer) setup(ctx context.Context, plan workspace.Plan) (ran []string, err error) {
	if len(plan.Commands()) == 0 {
		return nil, nil
	}
	shell, err := e.newStepShell(ctx, e.box.real)
	if err != nil {
		return nil, err
	}
	defer shell.close()
	for _, g := range plan {
		if g.Parallel {
			if err := e.parallel(ctx, shell, g.Commands); err != nil {
				return ran, err
			}
			ran = append(ran, g.Commands...)
			continue
		}
		for _, c := range g.Commands {
			end := e.phase(PhaseSetup, c)
			err := shell.run(ctx, c)
			end(err)
			if err != nil {
				return ran, err
			}
			ran = append(ran, c)
		}
	}
	return ran, nil
}

// parallel runs commands at the same time, waits for all of them, and reports
// every one that failed, in order of declaration.
func (e *ensurer) parallel(ctx context.Context, shell stepShell, commands []string) error {
	if len(commands) == 0 {
		return nil
	}
	st, err := shell.state(ctx)
	if err != nil {
		return err
	}
	errs := make([]error, len(commands))
	var wg sync.WaitGroup
	for i, c := range commands {
		wg.Go(func() {
			end := e.phase(PhaseSetup, c)
			out := &ring{max: stepTail}
			exit, err := e.runStep(ctx, provider.Cmd{
				Argv: provider.Shell(unsetScript(st.unset) + c), Dir: st.dir,
				Env: slices.Clone(st.set), Stdout: out, Stderr: out,
			})
			errs[i] = e.stepResult(ctx, c, out.String(), exit.Code, err)
			end(errs[i])
		})
	}
	wg.Wait()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return errors.Join(errs...)
}
