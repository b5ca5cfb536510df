// Package claudecode drives the Claude Code program (spec 02): its command line,
// its files and environment, and what its stream-json lines mean as events.
//
// Everything here is a function of its input. The engine of package harness does
// what touches a sandbox.
package claudecode

import (
	"encoding/json"
	"path"
	"strings"
	"syscall"
	"time"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/harness"
	"github.com/aisandbox-go/aisandbox/secret"
)

const name = "claude-code"

// AuthMode says where the program finds its login.
type AuthMode string

// The ways to log in. None is inferred from the provider.
const (
	// AuthAPIKey hands the keys of Options over; without any the run fails before
	// anything is started.
	AuthAPIKey AuthMode = "api-key"

	// AuthHost relies on a login that is stored where the program runs, and hides
	// keys, which the program would prefer.
	AuthHost AuthMode = "host"
)

// Options configure the program. The zero value runs "claude" with the host's
// keys left out; give HostEnv or Keys, or put a key into the sandbox.
//
// What the program's own tools start inherits its environment, the key included.
// Only a proxy (BaseURL) keeps a key away from the agent.
type Options struct {
	// Executable is the program and arguments that come before all others; empty:
	// "claude".
	Executable []string

	// Dir is the working directory, inside the virtual /workspace; empty: that.
	Dir string

	// PermissionMode beats the one that follows from the policy: default,
	// acceptEdits, bypassPermissions, plan, dontAsk or auto.
	PermissionMode string

	AllowedTools, DisallowedTools []string // the program's own rules, such as Bash(git *)

	AddDirs  []string // more directories that the agent may use
	MaxTurns int      // 0: no limit

	// ReplaceSystemPrompt puts the run's system prompts in place of the program's
	// own instead of after it.
	ReplaceSystemPrompt bool

	// NoPartials asks for whole messages only.
	NoPartials bool

	// WholeToolArgs withholds a tool call until its arguments are complete.
	WholeToolArgs bool

	// Subagents shows what sub-agents do, as CUSTOM events.
	Subagents bool

	// Env is added to the program's environment and wins over everything else.
	Env map[string]string

	AuthMode AuthMode // empty: AuthAPIKey

	// Keys are handed to the program in its environment, never in argv, and hidden
	// from everything that it says: ANTHROPIC_API_KEY or ANTHROPIC_AUTH_TOKEN.
	Keys *secret.Set

	// HostEnv looks a variable up where the caller wants keys to come from,
	// os.Getenv as a rule: ANTHROPIC_API_KEY, ANTHROPIC_AUTH_TOKEN and, so that a
	// key never goes to another server than its own, ANTHROPIC_BASE_URL. Nil: none.
	HostEnv func(string) string

	// BaseURL is the model API. A loopback address is reached on the host.
	BaseURL string

	// MaxRetries bounds how often a failed request to the model is sent again: 0
	// means 3, a negative number leaves the program its default, which keeps a run
	// with a wrong key silent for minutes.
	MaxRetries int

	// ProjectSettings lets the repository's own settings, hooks and MCP servers
	// take effect. Only for repositories that are trusted.
	ProjectSettings bool

	// SlashCommands lets a prompt that begins with "/" be a command of the program.
	SlashCommands bool

	// StrictMCP keeps the user's own MCP servers out also where nothing isolates;
	// in an isolated sandbox they always are.
	StrictMCP bool

	// MaxLinger is how long the program may stay, for background tasks, after it
	// has given its result; 0 means 10 minutes.
	MaxLinger time.Duration
}

// Models are names for completion. Any other is accepted.
func Models() []string {
	return []string{
		"opus", "sonnet", "haiku", "fable",
		"claude-opus-4-8", "claude-opus-4-7", "claude-opus-4-6", "claude-sonnet-5", "claude-sonnet-4-6", "claude-haiku-4-5",
	}
}

// CLI returns the program as a harness. Model is a name or alias; empty leaves
// the choice to the program. The result may be used by many runs at once. It
// also is a harness.HostURLs, AbortLadder, Fallback and Lingerer.
//
// Options of a call (Plan.Options) are a JSON object with sessionId, forkSession,
// permissionMode, maxTurns, allowedTools, disallowedTools, cwd and authMode; each
// beats its counterpart here.
func CLI(model string, o Options) harness.CLI { return &cli{model: model, o: o} }

type cli struct {
	model string
	o     Options
}

var (
	_ harness.CLI         = (*cli)(nil)
	_ harness.HostURLs    = (*cli)(nil)
	_ harness.AbortLadder = (*cli)(nil)
	_ harness.Fallback    = (*cli)(nil)
	_ harness.Lingerer    = (*cli)(nil)
	_ harness.Secrets     = (*cli)(nil)
	_ harness.Finisher    = (*decoder)(nil)
)

func (c *cli) Name() string { return name }

// Model is the model as the caller named it.
func (c *cli) Model() string { return c.model }

// HostURLs is the model API.
func (c *cli) HostURLs(p harness.Plan) []string {
	call, err := c.merged(p.Options)
	if err != nil {
		return nil // Files has told
	}
	if u := c.baseURL(p, call); u != "" {
		return []string{u}
	}
	return nil
}

// AbortLadder interrupts first: the program then ends its tools and says so.
// Killed, it would leave the child of its Bash tool, which runs in a session of
// its own (spec 02 §11).
func (c *cli) AbortLadder() []harness.AbortStep {
	return []harness.AbortStep{
		{Signal: int(syscall.SIGINT), Wait: 5 * time.Second},
		{Signal: int(syscall.SIGTERM), Wait: 2 * time.Second},
	}
}

// MaxLinger implements harness.Lingerer.
func (c *cli) MaxLinger() time.Duration {
	if c.o.MaxLinger <= 0 {
		return 10 * time.Minute
	}
	return c.o.MaxLinger
}

func (c *cli) Decoder(t harness.Turn) harness.Decoder {
	return NewDecoder(DecoderOptions{
		Model: c.model, RunID: t.RunID, ThreadID: t.ThreadID, ParentRunID: t.ParentRunID,
		NewID: t.NewID, Structured: len(t.Schema) > 0, WholeToolArgs: c.o.WholeToolArgs, Subagents: c.o.Subagents,
	})
}

// Fallback begins a new session with the whole conversation where the one to
// resume is gone, as it is after a sandbox was made anew (spec 02 §5).
func (c *cli) Fallback(t harness.Turn, events []event.Event, end harness.End) (harness.Turn, string, bool) {
	call, err := parseCall(t.Options)
	if err != nil || call.SessionID == "" || end.Aborted {
		return t, "", false
	}
	gone := false
	for _, ev := range events {
		switch e := ev.(type) {
		case event.RunStarted:
		case event.RunError:
			gone = strings.Contains(e.Message, "No conversation found") || strings.Contains(e.Message, "session title")
		default:
			return t, "", false
		}
	}
	if !gone {
		return t, "", false
	}
	was := call.SessionID
	call.SessionID, call.ForkSession = "", false
	b, err := json.Marshal(call)
	if err != nil {
		return t, "", false
	}
	t.Options = b
	return t, "the session " + was + " is gone: the conversation is sent as text to a new one", true
}

// inside maps a path of the virtual workspace to the real one.
func inside(root, p string) string {
	switch rest, ok := strings.CutPrefix(p, "/workspace"); {
	case p == "":
		return root
	case ok && (rest == "" || rest[0] == '/'):
		return path.Join(root, rest)
	case path.IsAbs(p):
		return path.Clean(p)
	}
	return path.Join(root, p)
}
