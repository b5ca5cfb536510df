// Package guest is the host's side of the guest, the one small program inside
// every sandbox (architecture §3.5). [Attach] wraps any provider.Handle that can
// start a process with a live stdin; the returned handle has files, archives,
// watches, detached processes, ports in both directions and a true kill, whatever
// the backend has of its own. The program itself is package guest/inside.
package guest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"path"
	"sync"

	"github.com/aisandbox-go/aisandbox/internal/wire"
	"github.com/aisandbox-go/aisandbox/provider"
)

// Options say how to reach a sandbox's guest. The zero value works.
type Options struct {
	// Program returns the guest program for a platform; nil is [Program].
	Program func(platform string) (provider.Program, error)

	// Traits are the backend's facts, for a handle that doesn't tell them itself.
	Traits provider.Traits

	// Root is the workspace's path inside, for [NewInit]; backends that know it
	// better add it themselves. Attach takes it from the handle.
	Root string

	// Private is the path inside of a directory beside the workspace that files
	// may be put into. Empty: the guest makes one in /tmp, see [Handle.Private].
	Private string

	// User is who agents run as: a name, UID or UID:GID. Empty is the guest's own
	// user. A guest that runs as root and an agent that doesn't are the stronger
	// setup: the agent can reach neither the guest nor its journals.
	User string

	// Home is HOME for what is started. Empty: the environment's, else the user's.
	Home string

	// JournalDir is the path inside for journals of detached processes. Empty is
	// one in /tmp that only the guest's user may enter.
	JournalDir string

	// Logger gets connections that were lost; nil discards.
	Logger *slog.Logger
}

// ProtocolError says that host and guest come from different versions.
type ProtocolError = wire.ProtocolError

func (o Options) program(platform string) (provider.Program, error) {
	if o.Program != nil {
		return o.Program(platform)
	}
	return Program(platform)
}

// args are the flags that serve and init share.
func (o Options) args() []string {
	var a []string
	for _, f := range [][2]string{
		{"--root", o.Root}, {"--private", o.Private}, {"--user", o.User}, {"--home", o.Home}, {"--journal-dir", o.JournalDir},
	} {
		if f[1] != "" {
			a = append(a, f[0], f[1])
		}
	}
	return a
}

// NewInit returns the guest as the first process of a sandbox, for provider.Spec.
// The backend adds what it alone knows, where a later flag wins: --socket PATH or
// --listen-fd N, one of them, and as needed --stdio (a first connection on stdin
// and stdout, besides), --root DIR, --user UID:GID, --home
// DIR, --journal-fd N or --journal-dir DIR, --ready-fd N (closed once the guest
// takes connections).
func NewInit(o Options) *provider.Init {
	return &provider.Init{
		Program: o.program,
		Args:    append([]string{wire.Marker, "init"}, o.args()...),
	}
}

// Handle is a sandbox with a guest in it. Its methods may be called concurrently.
//
// When the connection to the guest breaks, what is under way fails with an error
// that wraps provider.ErrUnavailable, and the guest ends the processes that were
// started over it, detached ones excepted; the next call connects again.
type Handle struct {
	inner provider.Handle
	opts  Options
	log   *slog.Logger
	dial  func(ctx context.Context) (*client, error)

	connecting chan struct{} // holds one token: the right to dial
	mu         sync.Mutex
	cur        *client
	closed     bool
}

var (
	_ provider.Handle        = (*Handle)(nil)
	_ provider.FS            = (*Handle)(nil)
	_ provider.Linker        = (*Handle)(nil)
	_ provider.Archiver      = (*Handle)(nil)
	_ provider.Watcher       = (*Handle)(nil)
	_ provider.Reattacher    = (*Handle)(nil)
	_ provider.JournalLister = (*Handle)(nil)
	_ provider.Dialer        = (*Handle)(nil)
	_ provider.HostReacher   = (*Handle)(nil)
	_ provider.Meter         = (*Handle)(nil)
	_ provider.TraitsTeller  = (*Handle)(nil)
	_ provider.Unwrapper     = (*Handle)(nil)
	_ provider.Resizer       = (*process)(nil)
)

// Attach connects to the guest of a sandbox: the one that runs as its first
// process, else one that it puts there and starts. The handle takes over h, which
// its Close closes.
//
// The error is errors.ErrUnsupported when the sandbox can't run a guest (another
// platform, no place that allows programs, no live stdin): use h as it is then. It
// is a [*ProtocolError] when the guest that runs there is of another version. On
// an error h stays open.
func Attach(ctx context.Context, h provider.Handle, o Options) (*Handle, error) {
	if o.Root == "" {
		o.Root = h.Root()
	}
	g := &Handle{inner: h, opts: o, log: o.Logger, connecting: make(chan struct{}, 1)}
	if g.log == nil {
		g.log = slog.New(slog.DiscardHandler)
	}
	if t, ok := provider.As[provider.TraitsTeller](h); ok {
		g.opts.Traits = t.Traits()
	}
	if ic, ok := provider.As[provider.InitConn](h); ok {
		g.dial = func(ctx context.Context) (*client, error) {
			conn, err := ic.DialInit(ctx)
			if err != nil {
				return nil, fmt.Errorf("guest: connect: %w", err)
			}
			return newClient(ctx, conn, nil)
		}
	} else {
		g.dial = g.start
	}
	c, err := g.conn(ctx)
	if err != nil {
		return nil, err
	}
	if c.facts.Root != path.Clean(h.Root()) {
		c.close()
		return nil, fmt.Errorf("guest: it serves %s, but the sandbox's root is %s", c.facts.Root, h.Root())
	}
	return g, nil
}

// conn returns the live connection, or makes one.
func (g *Handle) conn(ctx context.Context) (*client, error) {
	if c, err := g.current(); c != nil || err != nil {
		return c, err
	}
	select {
	case g.connecting <- struct{}{}:
		defer func() { <-g.connecting }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	if c, err := g.current(); c != nil || err != nil {
		return c, err
	}
	c, err := g.dial(ctx)
	if err != nil {
		return nil, err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		c.close()
		return nil, errClosed
	}
	g.cur = c
	return c, nil
}

var errClosed = fmt.Errorf("guest: the handle is closed: %w", provider.ErrUnavailable)

func (g *Handle) current() (*client, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return nil, errClosed
	}
	if g.cur != nil && g.cur.dead() {
		old := g.cur
		g.cur = nil
		go func() {
			g.log.Warn("guest: connection lost", "sandbox", g.inner.Ref(), "reason", old.reason())
			old.close()
		}()
	}
	return g.cur, nil
}

// Ref is the sandbox's.
func (g *Handle) Ref() provider.Ref { return g.inner.Ref() }

// Root is the sandbox's.
func (g *Handle) Root() string { return g.inner.Root() }

// Unwrap returns the backend's handle.
func (g *Handle) Unwrap() any { return g.inner }

// Traits are the backend's, with what the guest adds. Outlives holds for detached
// processes ([Handle.Launch]) and for background children of what has ended.
func (g *Handle) Traits() provider.Traits {
	t := g.opts.Traits
	t.Kill = true
	t.LiveStdin = true
	return t
}

// Private is the path inside of a directory beside the workspace: only the
// agent's user may enter it, file operations reach it, and it is made on first
// use. Empty when the guest can't be asked.
func (g *Handle) Private() string {
	if c, err := g.current(); c != nil && err == nil {
		return c.facts.Private
	}
	return g.opts.Private
}

// Command returns the argv, inside, that runs a subcommand of the guest program,
// such as the scripted agent's "play".
func (g *Handle) Command(ctx context.Context, args ...string) ([]string, error) {
	c, err := g.conn(ctx)
	if err != nil {
		return nil, err
	}
	argv := []string{c.facts.Exe}
	if c.facts.Hooked {
		argv = append(argv, wire.Marker)
	}
	return append(argv, args...), nil
}

// Close ends the connection and closes the backend's handle. The sandbox lives
// on, and so does a guest that is its first process. Idempotent.
func (g *Handle) Close() error {
	g.mu.Lock()
	if g.closed {
		g.mu.Unlock()
		return nil
	}
	g.closed = true
	c := g.cur
	g.cur = nil
	g.mu.Unlock()
	if c != nil {
		c.close()
	}
	return g.inner.Close()
}

// abs makes a name absolute, for the guest and we may disagree on the root only
// by mistake.
func (g *Handle) abs(name string) string {
	if name == "" || path.IsAbs(name) {
		return name
	}
	// Not cleaned: "a/../.." is for the guest to refuse.
	return g.inner.Root() + "/" + name
}

var errLost = errors.New("the connection to the guest broke")

// lost is what an operation in flight gets when the connection breaks.
func lost(err error) error {
	if err == io.EOF || err == nil {
		return fmt.Errorf("guest: %w: %w", errLost, provider.ErrUnavailable)
	}
	return fmt.Errorf("guest: %w (%v): %w", errLost, err, provider.ErrUnavailable)
}

// ProtocolVersion is the version of the protocol between host and guest.
const ProtocolVersion = wire.Version
