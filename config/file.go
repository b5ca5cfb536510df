package config

import (
	"encoding/json"
	"time"

	"github.com/aisandbox-go/aisandbox/policy"
	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/sandbox"
)

// File is a configuration as it is written, checked by [Parse] for what can be
// known without a registry, an environment or a host. docs/configuration.md
// describes it for people and [Schema] for editors.
type File struct {
	Sandboxes map[string]Sandbox `json:"sandboxes" jsonschema:"What can be run, by name: each is an endpoint /v1/chat/NAME"`

	Addr      string    `json:"addr,omitempty" jsonschema:"host:port to listen on; default 127.0.0.1:8080. Beyond loopback it needs auth"`
	Store     Store     `json:"store,omitzero" jsonschema:"Where runs are kept; default an SQLite file below XDG_STATE_HOME"`
	Auth      Auth      `json:"auth,omitzero" jsonschema:"Who may call; default everybody, from loopback only"`
	Hosts     []string  `json:"hosts,omitempty" jsonschema:"Names by which the server is reached, without a port; loopback and addresses always are"`
	Origins   []string  `json:"origins,omitempty" jsonschema:"Web origins whose pages may call, such as https://app.example.com"`
	Limits    Limits    `json:"limits,omitzero" jsonschema:"What callers can make the server hold"`
	Retention Retention `json:"retention,omitzero" jsonschema:"How long what has ended is kept"`

	src *source
}

// Sandbox is one definition.
type Sandbox struct {
	Provider Choice `json:"provider,omitzero" jsonschema:"Where: the name of a provider or auto, or a mapping of the name to its options; default auto"`
	Harness  Choice `json:"harness" jsonschema:"The agent: its name, or a mapping of the name to its options"`

	Source       Source            `json:"source,omitzero" jsonschema:"What the workspace holds at first; default nothing"`
	Setup        []Step            `json:"setup,omitempty" jsonschema:"Commands that are run once, in order: text, or a group"`
	Env          map[string]Scalar `json:"env,omitempty" jsonschema:"Environment of every command"`
	Secrets      []string          `json:"secrets,omitempty" jsonschema:"Names of environment variables of the server whose values every command gets and nobody is shown"`
	Instructions string            `json:"instructions,omitempty" jsonschema:"Text of AGENTS.md"`
	Scripts      map[string]string `json:"scripts,omitempty" jsonschema:"Commands by name, listed in AGENTS.md"`
	Files        map[string]string `json:"files,omitempty" jsonschema:"Files to write into the workspace: text by relative path"`

	Policy  *policy.Policy   `json:"policy,omitempty" jsonschema:"What the agent may do"`
	Network provider.Network `json:"network,omitempty" jsonschema:"What the sandbox reaches; default the provider's"`

	Reuse          sandbox.Reuse      `json:"reuse,omitempty" jsonschema:"Which runs share a sandbox; default thread"`
	Snapshot       sandbox.Snapshots  `json:"snapshot,omitempty" jsonschema:"When the provider's snapshot is taken; default after-setup where there are snapshots"`
	SnapshotMaxAge Duration           `json:"snapshotMaxAge,omitzero" jsonschema:"Age from which a sandbox is made anew instead of resumed; default never"`
	OnComplete     sandbox.OnComplete `json:"onComplete,omitempty" jsonschema:"What becomes of the sandbox at the end of a run; default keep, with reuse run destroy"`
	KeepFor        Duration           `json:"keepFor,omitzero" jsonschema:"How long a kept sandbox stays after its last run; default 7d"`
	FileEvents     sandbox.FileEvents `json:"fileEvents,omitempty" jsonschema:"What is reported of changed files; default on"`

	Busy       Busy     `json:"busy,omitempty" jsonschema:"What becomes of a new run while its thread has a running one; default queue"`
	QueueDepth int      `json:"queueDepth,omitempty" jsonschema:"How many runs of a thread may wait; default 8"`
	Timeout    Duration `json:"timeout,omitzero" jsonschema:"Ends a run; default never"`
}

// DefaultKeepFor is how long a kept sandbox stays where the file doesn't say:
// sandboxes of threads that nobody comes back to must not pile up.
const DefaultKeepFor = Duration(7 * 24 * time.Hour)

// Busy says what becomes of a new run while its thread has a running one.
type Busy string

// What becomes of it; the empty one is BusyQueue.
const (
	BusyQueue     Busy = "queue"     // it waits
	BusyReject    Busy = "reject"    // it is refused
	BusySupersede Busy = "supersede" // it cancels the running one
)

// Choice is a provider or an agent, with its options.
type Choice struct {
	Name    string
	Section json.RawMessage // an object; nil: no options
}

// Source is where the files come from: Git or Local, or nothing.
type Source struct {
	Git      string `json:"git,omitempty" jsonschema:"What to clone: OWNER/NAME on GitHub, a URL, or user@host:path"`
	Local    string `json:"local,omitempty" jsonschema:"Directory of this host to copy, relative to this file"`
	Ref      string `json:"ref,omitempty" jsonschema:"Branch, tag or commit"`
	Depth    Scalar `json:"depth,omitempty" jsonschema:"Commits to clone: a number from 1, or full; default 1"`
	Token    string `json:"token,omitempty" jsonschema:"Which of secrets to log in with"`
	Username string `json:"username,omitempty" jsonschema:"User to log in as; default x-access-token"`
}

// Step is a group of set-up commands; exactly one field is set. A plain text in
// the file is a Serial of one command.
type Step struct {
	Serial   []string `json:"serial,omitempty" jsonschema:"Commands that run one after the other, in one shell"`
	Parallel []string `json:"parallel,omitempty" jsonschema:"Commands that run at the same time"`
}

// Store is where runs are kept; one field is set, or none.
type Store struct {
	SQLite   *SQLite   `json:"sqlite,omitempty" jsonschema:"A file of this host, for one server"`
	Postgres *Postgres `json:"postgres,omitempty" jsonschema:"A database, for any number of servers"`
}

// SQLite is an SQLite file.
type SQLite struct {
	Path string `json:"path" jsonschema:"The file, relative to this one; made where it doesn't exist"`
}

// Postgres is a PostgreSQL database. Its URL holds a password, so it isn't
// written here.
type Postgres struct {
	Env  string `json:"env,omitempty" jsonschema:"Environment variable with the URL, postgres://…"`
	File string `json:"file,omitempty" jsonschema:"File with the URL, relative to this one"`
}

// Auth is who may call.
type Auth struct {
	Keys []Key `json:"keys,omitempty" jsonschema:"Bearer keys"`
}

// Key is a bearer key. Its value is never written here.
type Key struct {
	Tenant string `json:"tenant,omitempty" jsonschema:"Whose key it is: tenants see nothing of each other"`
	User   string `json:"user,omitempty" jsonschema:"User of the tenant; users share no sandbox"`
	Env    string `json:"env,omitempty" jsonschema:"Environment variable with the key"`
	File   string `json:"file,omitempty" jsonschema:"File with the key, relative to this one"`
}

// Limits bound what callers can make the server hold. Zero is the default.
type Limits struct {
	Body      Size     `json:"body,omitzero" jsonschema:"Bytes of a request body; default 8MiB"`
	Header    Size     `json:"header,omitzero" jsonschema:"Bytes of a request's headers; default 32KiB"`
	Runs      int      `json:"runs,omitempty" jsonschema:"Runs that this host drives at once, waiting ones included; default 1024"`
	Readers   int      `json:"readers,omitempty" jsonschema:"Streams at once; default 16384"`
	BodyTime  Duration `json:"bodyTime,omitzero" jsonschema:"Time for a client to send its body; default 30s"`
	WriteTime Duration `json:"writeTime,omitzero" jsonschema:"Time for a client to accept a frame; default 1m"`
}

// Retention says how long what has ended is kept.
type Retention struct {
	Events Age `json:"events,omitzero" jsonschema:"Event logs; default 30d, or never to keep them"`
	Runs   Age `json:"runs,omitzero" jsonschema:"Run records; default 180d, or never to keep them"`
}

// Duration is a time as [sandbox.ParseAge] reads it: 90s, 45m, 12h, 7d, 2w.
type Duration time.Duration

// Age is a Duration, or "never", which is negative.
type Age time.Duration

// Size is a number of bytes: a whole number, also with KiB, MiB or GiB.
type Size int64

// Scalar is text, also where the file has a number, or true or false; it is then
// as it was spelled.
type Scalar string
