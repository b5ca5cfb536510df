package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"path"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/secret"
	"github.com/aisandbox-go/aisandbox/workspace"
)

// Sandbox is an attached sandbox, whatever made it. Its methods may be called
// concurrently. Every error text is redacted.
//
// File names are virtual: relative to the root, or beneath [Sandbox.Root], which
// is /workspace unless the workspace says otherwise; the real path is accepted,
// too. A name that leads elsewhere is refused.
type Sandbox struct {
	p     provider.Provider
	h     provider.Handle
	fs    provider.FS
	root  string // virtual
	alias string // a second virtual name of the same directory; may be empty
	real  string // what root stands for
	base  string // Handle.Root
	set   *secret.Set
	red   *secret.Redactor
	log   *slog.Logger
	mu    sync.Mutex
	env   func() []string // behind a function, so that no printer shows it

	condemned atomic.Bool

	// hold is what has to be over before anything is changed; nil: nothing. It is
	// set before anybody else has the Sandbox.
	hold func(context.Context) error
}

type earlyKey struct{}

// Early returns a context for what may happen before the state is known that a
// run's changes are told from, such as files put beside the workspace. In a run
// made with [With], everything else that can change files waits for that state.
func Early(ctx context.Context) context.Context { return context.WithValue(ctx, earlyKey{}, true) }

// settled waits until files may be changed.
func (s *Sandbox) settled(ctx context.Context) error {
	if s.hold == nil || ctx.Value(earlyKey{}) != nil {
		return nil
	}
	return s.hold(ctx)
}

// Options belong to [New].
type Options struct {
	// Root is the virtual root; empty means [workspace.DefaultRoot].
	Root string

	// Env and Secrets are set for every command.
	Env     map[string]string
	Secrets *secret.Set

	Logger *slog.Logger // nil discards
}

// New returns the portable sandbox over an attached handle. [Ensure] does that
// for its callers. Closing the Sandbox closes the handle.
func New(p provider.Provider, h provider.Handle, o Options) *Sandbox {
	s := &Sandbox{
		p: p, h: h, base: path.Clean(h.Root()),
		root: workspace.Workspace{Root: o.Root}.RootOrDefault(),
		set:  o.Secrets,
		red:  secret.NewRedactor(o.Secrets),
		log:  logger(o.Logger),
		env:  func() []string { return nil },
	}
	s.real = s.base
	if rest, ok := beneath(workspace.DefaultRoot, s.root); ok {
		s.real = path.Join(s.base, rest)
	} else {
		s.alias = workspace.DefaultRoot
	}
	if f, ok := provider.As[provider.FS](h); ok {
		s.fs = f
	} else {
		s.fs = provider.ExecFS(h)
	}
	s.SetEnv(o.Env)
	s.setSecrets()
	return s
}

func logger(l *slog.Logger) *slog.Logger {
	if l == nil {
		return slog.New(slog.DiscardHandler)
	}
	return l
}

// String names the sandbox. No print verb shows more: a Sandbox holds secrets.
func (s *Sandbox) String() string { return "sandbox " + s.h.Ref().String() }

// Format implements fmt.Formatter; see String.
func (s *Sandbox) Format(f fmt.State, _ rune) { _, _ = f.Write([]byte(s.String())) }

// LogValue implements slog.LogValuer.
func (s *Sandbox) LogValue() slog.Value { return slog.StringValue(s.h.Ref().String()) }

// Ref returns the durable name.
func (s *Sandbox) Ref() provider.Ref { return s.h.Ref() }

// Provider returns what made the sandbox.
func (s *Sandbox) Provider() provider.Provider { return s.p }

// Handle returns the driver below, for what the portable type has no method for;
// use it with [provider.As]. What is started through it has none of the
// sandbox's environment, and its errors are not redacted.
func (s *Sandbox) Handle() provider.Handle { return s.h }

// Traits returns the facts that hold for this sandbox.
func (s *Sandbox) Traits() provider.Traits { return provider.TraitsOf(s.p, s.h) }

// Redactor returns the redactor of the sandbox's secrets. Never nil.
func (s *Sandbox) Redactor() *secret.Redactor { return s.red }

// Close releases what this process holds. The sandbox lives on. Idempotent.
func (s *Sandbox) Close() error { return s.red.Error(s.h.Close()) }

// Root returns the virtual root.
func (s *Sandbox) Root() string { return s.root }

// RealRoot returns the real path, inside the sandbox, of the root: what a command
// sees, and what programs that take a directory must be given (spec 01 §19).
func (s *Sandbox) RealRoot() string { return s.real }

// PathError says that a name can't be used. It is fs.ErrInvalid.
type PathError struct {
	Path string
	Why  string
}

func (e *PathError) Error() string { return fmt.Sprintf("sandbox: path %q %s", e.Path, e.Why) }

// Is makes the error fs.ErrInvalid.
func (e *PathError) Is(target error) bool { return target == fs.ErrInvalid }

// beneath returns what is left of name below root; both are clean and absolute.
func beneath(root, name string) (string, bool) {
	if name == root {
		return "", true
	}
	if root == "/" {
		return name[1:], true
	}
	rest, ok := strings.CutPrefix(name, root+"/")
	return rest, ok
}

// Real maps a virtual name to the real path inside the sandbox. The name is
// cleaned first; one that leads out of the sandbox's directory, or holds NUL, is
// a [*PathError].
func (s *Sandbox) Real(name string) (string, error) {
	real, ok, err := s.resolve(name)
	if err == nil && !ok {
		err = s.pathError(name, "is outside of "+s.root)
	}
	return real, err
}

func (s *Sandbox) pathError(name, why string) error { return &PathError{s.red.String(name), why} }

// resolve maps name; ok is false for an absolute path that has nothing to do with
// the workspace.
func (s *Sandbox) resolve(name string) (real string, ok bool, err error) {
	if strings.IndexByte(name, 0) >= 0 {
		return "", false, s.pathError(name, "holds NUL")
	}
	if !path.IsAbs(name) {
		real = path.Join(s.real, name)
		if _, in := beneath(s.real, real); !in {
			return "", false, s.pathError(name, "is outside of "+s.root)
		}
		return real, true, nil
	}
	clean := path.Clean(name)
	for _, m := range s.mounts() {
		if rest, in := beneath(m.virtual, clean); in {
			return path.Join(m.real, rest), true, nil
		}
	}
	// What was written as a path of the workspace and leads out of it is a mistake
	// or an attack, never a path of its own (spec 01 §26, 106).
	for _, m := range s.mounts() {
		if strings.HasPrefix(name, m.virtual+"/") {
			return "", false, s.pathError(name, "leads out of "+m.virtual)
		}
	}
	return clean, false, nil
}

type mount struct{ virtual, real string }

// mounts are the names of the sandbox's directory, the most specific first.
func (s *Sandbox) mounts() []mount {
	m := []mount{{s.root, s.real}}
	if s.alias != "" {
		m = append(m, mount{s.alias, s.base})
	} else {
		m = append(m, mount{workspace.DefaultRoot, s.base})
	}
	return append(m, mount{s.base, s.base})
}

// Virtual maps a real path of the sandbox back to its virtual name. A path
// outside of the root is returned as it is.
func (s *Sandbox) Virtual(real string) string {
	real = path.Clean(real)
	if rest, ok := beneath(s.real, real); ok {
		return path.Join(s.root, rest)
	}
	if rest, ok := beneath(s.base, real); ok {
		return path.Join(workspace.DefaultRoot, rest)
	}
	return real
}

// SetEnv adds variables to those that every later command gets.
func (s *Sandbox) SetEnv(env map[string]string) {
	var add []string
	for _, k := range slices.Sorted(maps.Keys(env)) {
		add = append(add, k+"="+env[k])
	}
	s.addEnv(add)
}

// setSecrets sets the secrets once, as spec 01 §6 demands: all in one go, the
// empty ones left out.
func (s *Sandbox) setSecrets() {
	s.addEnv(s.set.Env())
	if e := s.set.Empty(); len(e) > 0 {
		s.log.Debug("empty secrets are not set", "names", e)
	}
	if short := s.red.Short(); len(short) > 0 {
		s.log.Warn("secrets of less than 6 bytes can't be redacted from output", "names", short)
	}
}

func (s *Sandbox) addEnv(add []string) {
	if len(add) == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	all := append(s.env(), add...)
	s.env = func() []string { return slices.Clone(all) }
}

// EnvNames returns the names of the variables that every command gets, sorted.
func (s *Sandbox) EnvNames() []string {
	seen := map[string]bool{}
	for _, kv := range s.environ() {
		k, _, _ := strings.Cut(kv, "=")
		seen[k] = true
	}
	return slices.Sorted(maps.Keys(seen))
}

func (s *Sandbox) environ() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.env()
}

// Start starts a process; see [provider.Cmd]. Dir is virtual: empty is the root,
// what is beneath it is mapped, and any other absolute path is taken as it is. The
// sandbox's variables come before those of cmd.
func (s *Sandbox) Start(ctx context.Context, cmd provider.Cmd) (provider.Process, error) {
	if err := s.settled(ctx); err != nil {
		return nil, err
	}
	cmd, err := s.prepare(cmd)
	if err != nil {
		return nil, err
	}
	p, err := s.h.Start(ctx, cmd)
	if err != nil {
		return nil, s.red.Error(err)
	}
	return p, nil
}

// Prepare returns a command as the handle takes it: with the real Dir and the
// sandbox's variables, secrets among them. For what is started through the handle,
// such as a provider.Reattacher.
func (s *Sandbox) Prepare(cmd provider.Cmd) (provider.Cmd, error) {
	if err := s.settled(context.Background()); err != nil {
		return provider.Cmd{}, err
	}
	return s.prepare(cmd)
}

func (s *Sandbox) prepare(cmd provider.Cmd) (provider.Cmd, error) {
	dir, _, err := s.resolve(cmd.Dir)
	if err != nil {
		return provider.Cmd{}, err
	}
	cmd.Dir = dir
	cmd.Env = append(s.environ(), cmd.Env...)
	return cmd, nil
}

// MaxCapture is how much of each output stream [Sandbox.Run] keeps.
const MaxCapture = 8 << 20

// Result is what a command left. Its bytes are not redacted.
type Result struct {
	Exit           provider.Exit
	Stdout, Stderr []byte

	// Truncated says that a stream was longer than [MaxCapture] and its rest was
	// thrown away.
	Truncated bool
}

// Run runs a command to its end. Output goes to cmd's writers, or into the Result
// where those are nil. A non-zero exit is no error; see [Sandbox.Output] for that.
func (s *Sandbox) Run(ctx context.Context, cmd provider.Cmd) (Result, error) {
	var out, errb capture
	if cmd.Stdout == nil {
		cmd.Stdout = &out
	}
	if cmd.Stderr == nil {
		cmd.Stderr = &errb
	}
	p, err := s.Start(ctx, cmd)
	if err != nil {
		return Result{}, err
	}
	exit, err := p.Wait()
	return Result{exit, out.buf, errb.buf, out.over || errb.over}, s.red.Error(err)
}

// Shell runs a POSIX shell script in the root; see [Sandbox.Run].
func (s *Sandbox) Shell(ctx context.Context, script string) (Result, error) {
	return s.Run(ctx, provider.Cmd{Argv: provider.Shell(script)})
}

// Output runs a command that must succeed and returns its standard output. A
// non-zero exit is a [*provider.ExitError].
func (s *Sandbox) Output(ctx context.Context, cmd provider.Cmd) ([]byte, error) {
	res, err := s.Run(ctx, cmd)
	if err != nil {
		return nil, err
	}
	if res.Exit != (provider.Exit{}) {
		return res.Stdout, s.exitError(cmd.Argv, res)
	}
	return res.Stdout, nil
}

func (s *Sandbox) exitError(argv []string, res Result) error {
	tail := res.Stderr
	if len(strings.TrimSpace(string(tail))) == 0 {
		tail = res.Stdout
	}
	shown := make([]string, len(argv))
	for i, a := range argv {
		shown[i] = s.red.String(a)
	}
	return &provider.ExitError{Argv: shown, Exit: res.Exit, StderrTail: s.red.Tail(string(tail), 4<<10)}
}

// capture keeps the first MaxCapture bytes. It has one writer, and is read after that ended.
type capture struct {
	buf  []byte
	over bool
}

func (c *capture) Write(p []byte) (int, error) {
	n := min(len(p), MaxCapture-len(c.buf))
	c.buf = append(c.buf, p[:n]...)
	c.over = c.over || n < len(p)
	return len(p), nil
}

// unsupported is the error for a missing capability.
func (s *Sandbox) unsupported(capability, hint string) error {
	return &provider.UnsupportedError{Provider: s.p.Name(), Capability: capability, Hint: hint}
}

// cleanupTimeout bounds what is done after a failure (spec 01 §12.4).
const cleanupTimeout = 60 * time.Second

// cleanup returns a context for cleaning up: it lives on when ctx is cancelled.
func cleanup(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(context.WithoutCancel(ctx), cleanupTimeout, errors.New("cleaning up took longer than a minute"))
}
