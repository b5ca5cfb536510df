// Package provider is the contract between the portable sandbox and the thing
// that isolates: a local process, bubblewrap, a container, a machine in a cloud.
//
// A backend owes two methods on its [Handle], Root and Start, and three on its
// [Provider]. Everything else is optional and found with [As], which looks
// through wrappers; what has no method is told by [Traits]. Files come from
// [ExecFS] where a backend has no [FS] of its own.
//
//	Create ──▶ running ──Close──▶ running (nobody attached) ──Resume──▶ running
//	                 └──Destroy──▶ gone (Resume: ErrNotFound)
//
// Nobody chooses by provider name: traits and capabilities decide.
package provider

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"time"
)

// Provider owns one isolation primitive. Its methods may be called concurrently.
type Provider interface {
	// Name is stable and part of the instance key: "local", "bwrap", "docker".
	Name() string

	// Traits are the facts known before any sandbox exists. Static per value.
	Traits() Traits

	// Create makes and starts a sandbox. On error nothing is left behind. Two
	// calls with one Spec.Key return the same sandbox or a clean error.
	Create(ctx context.Context, spec Spec) (Handle, error)

	// Resume attaches to a sandbox made earlier, perhaps by another process. It
	// starts a stopped one. [ErrNotFound] says that it is gone for good; a
	// backend that can't be asked is [ErrUnavailable], never ErrNotFound.
	Resume(ctx context.Context, ref Ref) (Handle, error)

	// Destroy ends every process in the sandbox and removes what Create made.
	// Idempotent: a missing sandbox is success.
	Destroy(ctx context.Context, ref Ref) error
}

// Handle is an attached sandbox. Its methods may be called concurrently.
type Handle interface {
	// Ref is the durable name of this sandbox.
	Ref() Ref

	// Root is the real path, inside the sandbox, behind the virtual /workspace.
	Root() string

	// Start starts one process; see [Cmd] for what the fields mean. When ctx ends
	// the process and, where Traits.Kill holds, its whole tree is killed, and
	// Wait returns the cause. An argv[0] that does not exist, or a bad Dir, is an
	// error of Start or an exit with code 127 or 126, never a hang.
	Start(ctx context.Context, cmd Cmd) (Process, error)

	// Close releases what this process holds (connections, pipes). The sandbox
	// lives on. Idempotent.
	io.Closer
}

// Ref is the durable name of a sandbox. State is opaque to all but its
// provider; Version is the version of State's shape.
type Ref struct {
	Provider string          `json:"provider"`
	ID       string          `json:"id"`
	Version  int             `json:"version"`
	State    json.RawMessage `json:"state,omitempty"`
}

// LogValue logs a Ref as its name alone.
func (r Ref) LogValue() slog.Value { return slog.StringValue(r.String()) }

// String is provider:id.
func (r Ref) String() string { return r.Provider + ":" + r.ID }

// Cmd describes a process. It is shaped like exec.Cmd: the caller's readers and
// writers carry the bytes, and a slow writer holds the process back.
type Cmd struct {
	// Argv is the program and its arguments, as bytes. It is never a shell
	// string; [Shell] wraps one.
	Argv []string

	// Dir is a real path inside the sandbox; empty means Handle.Root. The
	// virtual /workspace is mapped by the portable sandbox, not here.
	Dir string

	// Env is added to the sandbox's own environment, later entries winning.
	Env []string

	// User is "", the provider's default for agents, or a user the provider knows.
	User string

	// Stdin nil means an empty input: the process sees EOF at once.
	Stdin io.Reader

	// Stdout and Stderr nil discard. Each gets its bytes exactly, in order, from
	// one goroutine. With Terminal set everything arrives on Stdout.
	Stdout, Stderr io.Writer

	// Terminal asks for a pseudo terminal as the three standard streams.
	Terminal *Terminal
}

// Terminal is the size of a pseudo terminal, in characters.
type Terminal struct{ Rows, Cols uint16 }

// Shell returns the argv that runs a POSIX shell script.
func Shell(script string) []string { return []string{"sh", "-c", script} }

// Process is a started process.
type Process interface {
	// Wait returns once the process itself has ended and what it had written
	// until then has been delivered; it never waits for a stranger that still
	// holds the pipe. The error says that waiting failed, or is the cause of
	// Start's context; a non-zero exit is no error. May be called again, from
	// several goroutines; each call returns the same.
	Wait() (Exit, error)

	// Signal sends to the process group. os.Kill ends the whole tree where
	// Traits.Kill holds, and returns when no process of it is left. After the
	// process has ended Signal does nothing and returns nil.
	Signal(sig os.Signal) error
}

// Sweeper is offered by a [Process] that can take with it what it leaves.
type Sweeper interface {
	// Sweep makes the end of the process, whatever brings it about, the end of all
	// that it started, sessions of their own or not: Wait returns after that. For a
	// process that has ended it does nothing.
	Sweep() error
}

// Resizer is offered by a [Process] that has a terminal.
type Resizer interface {
	Resize(t Terminal) error
}

// Exit tells how a process ended.
type Exit struct {
	Code   int // as a shell reports it: 128+n when signal n ended it
	Signal int // 0 when it exited by itself
}

func (e Exit) String() string {
	if e.Signal != 0 {
		return fmt.Sprintf("signal %d", e.Signal)
	}
	return fmt.Sprintf("exit %d", e.Code)
}

// Isolation orders how far a sandbox is from the host.
type Isolation string

// The levels, weakest first.
const (
	IsolationNone       Isolation = "none"       // a process on the host
	IsolationNamespaces Isolation = "namespaces" // own namespaces, the host's kernel, no daemon
	IsolationContainer  Isolation = "container"  // a container engine's
	IsolationVM         Isolation = "vm"         // a kernel of its own
)

// Network is what a sandbox can reach.
type Network string

// The network modes. An empty Network is the provider's default.
const (
	NetworkDefault Network = ""
	NetworkNone    Network = "none" // loopback inside the sandbox only
	NetworkHost    Network = "host" // what the host reaches
)

// Traits are facts about a backend for which there is no method. A conformance
// suite measures them; none may be claimed unseen.
type Traits struct {
	Isolation Isolation

	DurableFS bool // files survive a stop, and the end of this host process
	LiveStdin bool // the host can write to a running process
	Kill      bool // os.Kill ends the whole tree, whatever it did to hide
	Outlives  bool // processes go on when this host process ends

	// SharedKernel says that the sandbox runs on this host's kernel and files, so
	// that a program of the host can be mounted rather than copied.
	SharedKernel bool

	// Networks are the modes that the backend enforces, its default first.
	Networks []Network
}

// Spec says what to create. It never holds a secret: secrets travel with each
// command, because create-time environments are stored and copied by engines.
type Spec struct {
	// Key is the deterministic instance key, [a-z0-9]{1,40}: a backend whose
	// sandboxes have names uses it as the name. Empty: the backend mints one.
	Key string

	// Labels are put on every object the backend makes, so that it can be found.
	Labels map[string]string

	// Network is the wanted mode. A mode that the backend can't enforce is an error.
	Network Network

	// Init, when not nil, is the guest program to run as the sandbox's first
	// process. Backends that can't, ignore it.
	Init *Init
}

// Init is a program to run as the first process of a sandbox.
type Init struct {
	// Program returns the executable for a platform such as "linux/amd64". The
	// error is [ErrUnsupportedPlatform] when there is none.
	Program func(platform string) (Program, error)

	// Args follow the program's path. They hold no secret.
	Args []string
}

// Program is an executable, by content.
type Program struct {
	Digest string // lower-case hex SHA-256 of the content
	Path   string // on the host; may be mounted read-only where SharedKernel holds
}

// InitConn is offered by a Handle whose sandbox runs [Spec.Init]: it connects to
// the control channel of that first process. Each call is a new connection.
type InitConn interface {
	DialInit(ctx context.Context) (io.ReadWriteCloser, error)
}

// Restorer is offered by a Provider that can create from a snapshot.
type Restorer interface {
	Restore(ctx context.Context, snapshot string, spec Spec) (Handle, error)
	DeleteSnapshot(ctx context.Context, snapshot string) error // missing is success
}

// Lister is offered by a Provider that can find its sandboxes by label.
type Lister interface {
	// List returns the sandboxes that carry every given label.
	List(ctx context.Context, labels map[string]string) ([]Listed, error)
}

// Listed is a sandbox found by a [Lister].
type Listed struct {
	Ref     Ref
	Labels  map[string]string
	Created time.Time
	Running bool
}

// Pinger is offered by a Provider with a backend that may be out of reach.
type Pinger interface {
	// Ping says whether sandboxes can be made now, and how to cure it if not.
	Ping(ctx context.Context) error
}

// Fingerprinter is offered by a Provider whose options change what a sandbox is
// (image, mounts, user): its result enters the instance key. Pure.
type Fingerprinter interface {
	Fingerprint() string
}
