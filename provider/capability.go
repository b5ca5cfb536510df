package provider

import (
	"context"
	"io"
	"io/fs"
	"iter"
	"net"
	"time"
)

// What follows is optional on a Handle. Find it with [As]; a caller of the
// portable sandbox never asserts, it gets an [*UnsupportedError].
//
// Names given to these methods are real paths inside the sandbox: absolute, or
// relative to Handle.Root. The file operations of a guest or of [ExecFS] stay
// beneath the root they were made for and never follow a link out of it.

// FS is file access. Every error is, or wraps, a *fs.PathError where the reason
// is one of io/fs: a missing file is fs.ErrNotExist.
type FS interface {
	Open(ctx context.Context, name string) (io.ReadCloser, error)

	// Put writes r to name atomically (a temporary name, then a rename), creating
	// parents. mode's permission bits are set exactly.
	Put(ctx context.Context, name string, r io.Reader, mode fs.FileMode) error

	// Lstat never follows links. "Missing" is said only when confirmed.
	Lstat(ctx context.Context, name string) (fs.FileInfo, error)

	// ReadDir yields the entries of a directory in name order.
	ReadDir(ctx context.Context, name string) iter.Seq2[fs.DirEntry, error]

	Mkdir(ctx context.Context, name string) error  // with parents; an existing directory is success
	Remove(ctx context.Context, name string) error // the whole tree; missing is success
	Rename(ctx context.Context, from, to string) error
}

// Linker is offered by an FS that can make and read symbolic links. The target
// is stored as given.
type Linker interface {
	Symlink(ctx context.Context, target, name string) error
	Readlink(ctx context.Context, name string) (string, error)
}

// Archiver moves trees as tar streams (POSIX pax).
type Archiver interface {
	// TarIn unpacks r below dir. An entry that would leave dir, directly or
	// through a link, is refused, and nothing after it is unpacked.
	TarIn(ctx context.Context, dir string, r io.Reader) error

	// TarOut packs what is below dir; names are relative to dir.
	TarOut(ctx context.Context, dir string, w io.Writer, opts TarOptions) error
}

// TarOptions narrow a TarOut.
type TarOptions struct {
	Exclude []string // path segments left out at every depth, such as ".git"
}

// Watcher reports file changes below a directory.
type Watcher interface {
	Watch(ctx context.Context, dir string, opts WatchOptions) (Watch, error)
}

// WatchOptions narrow a Watch.
type WatchOptions struct {
	Ignore []string // path segments left out at every depth, such as "node_modules"
}

// Watch is a running watch. Stop and the loop over Changes may be in different
// goroutines.
type Watch interface {
	// Changes yields what changed after Watch returned, in order. It ends after
	// Stop, or with an error. Single use.
	Changes() iter.Seq2[Change, error]

	// Stop does one last scan, whose findings Changes still yields, and then ends
	// Changes. Idempotent.
	Stop(ctx context.Context) error
}

// ChangeType says what happened to a path.
type ChangeType string

// The kinds of change. A rename is a delete and a create.
const (
	ChangeCreate ChangeType = "create"
	ChangeModify ChangeType = "change"
	ChangeDelete ChangeType = "delete"
)

// Change is one change of a file or symbolic link; directories are not reported.
type Change struct {
	Type ChangeType `json:"type"`
	Path string     `json:"path"` // absolute, inside the sandbox
}

// Reattacher runs processes that outlive this host, under a token. Launch, Probe,
// Tail, Kill and Forget may be called from any host that resumed the sandbox.
type Reattacher interface {
	// Launch starts cmd at most once per token: a second call is
	// [ErrAlreadyLaunched]. Stdin is delivered whole before Launch returns; the
	// command's output goes to the journal, so Stdout and Stderr must be nil.
	Launch(ctx context.Context, token string, cmd Cmd, opts LaunchOptions) error

	Probe(ctx context.Context, token string) (Probe, error)

	// Tail returns the journal's bytes from an offset on. With follow it stays
	// open until the process has ended and all was read. The end of ctx ends the
	// reading, too.
	Tail(ctx context.Context, token string, from int64, follow bool) (io.ReadCloser, error)

	// Kill signals the process group of token; sig 9 ends the whole tree and
	// returns when none of it is left. After a signal that asks for the end (HUP,
	// INT, QUIT, TERM) what is left of the tree when the process has ended may be
	// killed, too.
	Kill(ctx context.Context, token string, sig int) error

	// Forget removes the journal of a process that has ended; missing is success. The
	// token launches nothing any more, also where it never did: Launch is
	// [ErrAlreadyLaunched] from then on.
	Forget(ctx context.Context, token string) error
}

// JournalLister is offered by a [Reattacher] that can tell which journals there
// are, so that forgotten ones can be found.
type JournalLister interface {
	Journals(ctx context.Context) ([]JournalInfo, error)
}

// JournalInfo is a journal in a list. Age is the time since it was last written,
// by the sandbox's own clock; negative where that can't be told.
type JournalInfo struct {
	Token string        `json:"token"`
	Age   time.Duration `json:"age"`
}

// LaunchOptions belong to a detached process.
type LaunchOptions struct {
	RunID string
	Nonce []byte // signs the exit frame; never in argv, environment or files that the agent can read
}

// ProbeState is what is known of a detached process.
type ProbeState string

// The states of spec 04 §21.8.
const (
	ProbeAbsent   ProbeState = "absent"
	ProbeStarting ProbeState = "starting"
	ProbeRunning  ProbeState = "running"
	ProbeExited   ProbeState = "exited"
	ProbeDead     ProbeState = "dead" // supervisor gone, no exit frame
)

// Probe is the answer of Reattacher.Probe.
type Probe struct {
	State    ProbeState `json:"state"`
	Size     int64      `json:"size"` // journal bytes
	Lines    int64      `json:"lines"`
	Exit     *Exit      `json:"exit,omitempty"`
	MAC      []byte     `json:"mac,omitempty"`
	LastBeat time.Time  `json:"lastBeat,omitzero"`
	Level    int        `json:"level"` // strength of spec 04 §21.8: 2 other uid, 1 same uid
}

// Dialer connects to a TCP port on the sandbox's loopback.
type Dialer interface {
	Dial(ctx context.Context, port int) (net.Conn, error)
}

// HostReacher opens a loopback port inside the sandbox; connections made to it
// arrive at the returned listener on the host. port 0 picks one. url is what a
// process inside dials, http://127.0.0.1:PORT. Closing the listener closes the port.
type HostReacher interface {
	ListenInside(ctx context.Context, port int) (l net.Listener, url string, err error)
}

// Exposer returns a URL that reaches a port of the sandbox from outside.
type Exposer interface {
	Expose(ctx context.Context, port int) (Exposed, error)
}

// Exposed is how to reach a port; Headers are to be sent verbatim.
type Exposed struct {
	URL     string
	Headers map[string]string
}

// Snapshotter saves the sandbox's files under an id that a [Restorer] takes.
// label is for people; any text is accepted.
type Snapshotter interface {
	Snapshot(ctx context.Context, label string) (id string, err error)
}

// Forker makes an independent copy.
type Forker interface {
	Fork(ctx context.Context, spec Spec) (Handle, error)
}

// Pauser freezes and thaws all processes.
type Pauser interface {
	Pause(ctx context.Context) error
	Unpause(ctx context.Context) error
}

// Meter tells what the sandbox uses now.
type Meter interface {
	Usage(ctx context.Context) (Usage, error)
}

// Usage is a reading of a [Meter]. Zero fields are unknown.
type Usage struct {
	Processes   int           `json:"processes"`
	MemoryBytes int64         `json:"memoryBytes"`
	CPU         time.Duration `json:"cpu"`
	GuestMemory int64         `json:"guestMemoryBytes"` // resident set of the guest itself
}

// TraitsTeller is offered by a Handle whose facts differ from its Provider's,
// such as one with a guest.
type TraitsTeller interface {
	Traits() Traits
}

// Unwrapper is implemented by wrappers of a Handle or Provider.
type Unwrapper interface {
	Unwrap() any
}

// As returns the first value in v's chain of wrappers that is a T.
func As[T any](v any) (T, bool) {
	for v != nil {
		if t, ok := v.(T); ok {
			return t, true
		}
		u, ok := v.(Unwrapper)
		if !ok {
			break
		}
		v = u.Unwrap()
	}
	var zero T
	return zero, false
}

// TraitsOf returns the facts that hold for h: its own where it tells them, else p's.
func TraitsOf(p Provider, h Handle) Traits {
	if t, ok := As[TraitsTeller](h); ok {
		return t.Traits()
	}
	return p.Traits()
}
