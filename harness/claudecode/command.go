package claudecode

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/aisandbox-go/aisandbox/harness"
	"github.com/aisandbox-go/aisandbox/internal/rawjson"
	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/secret"
)

// Names of files in the run's private directory.
const (
	systemFile   = "system-prompt.md"
	settingsFile = "settings.json"
)

// Limits of the command line. Linux takes no word of 128 KiB or more, whatever
// the whole may have.
const (
	maxArg    = 128<<10 - 1
	maxSchema = 100 << 10
)

// ArgError is a value that can't be an argument of the program.
type ArgError struct {
	Flag string
	Why  string
}

func (e *ArgError) Error() string { return fmt.Sprintf("claude-code: %s: %s", e.Flag, e.Why) }

// KeyError says that the program would have no key.
type KeyError struct{ Variables []string }

func (e *KeyError) Error() string {
	return "claude-code: no key for the model: set " + strings.Join(e.Variables, " or ") +
		" on the host or as a secret of the sandbox, or use authMode host with a stored login"
}

// Code is "no_key".
func (e *KeyError) Code() string { return "no_key" }

// Code is "invalid_input".
func (e *ArgError) Code() string { return "invalid_input" }

// keys are the variables with which the program can log in.
var keys = []string{"ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "CLAUDE_CODE_OAUTH_TOKEN"}

// Files implements harness.CLI.
func (c *cli) Files(p harness.Plan) ([]harness.File, []string, error) {
	o, err := c.merged(p.Options)
	if err != nil {
		return nil, nil, err
	}
	if _, err := checkSchema(p.Schema); err != nil {
		return nil, nil, err
	}
	if err := c.checkKey(p, o); err != nil {
		return nil, nil, err
	}
	_, warnings, err := c.prompt(p, o)
	if err != nil {
		return nil, nil, err
	}
	var files []harness.File
	if s := systemPrompt(p); s != "" {
		files = append(files, harness.File{Name: systemFile, Content: []byte(s), Mode: 0o600})
	}
	r := permissions(p.Policy, o)
	if b := r.settings(); b != nil {
		files = append(files, harness.File{Name: settingsFile, Content: b, Mode: 0o600})
	}
	return files, append(warnings, r.warnings...), nil
}

// Command implements harness.CLI.
func (c *cli) Command(t harness.Turn) (provider.Cmd, error) {
	o, err := c.merged(t.Options)
	if err != nil {
		return provider.Cmd{}, err
	}
	schema, err := checkSchema(t.Schema)
	if err != nil {
		return provider.Cmd{}, err
	}
	if err := c.checkKey(t.Plan, o); err != nil {
		return provider.Cmd{}, err
	}
	in, _, err := c.prompt(t.Plan, o)
	if err != nil {
		return provider.Cmd{}, err
	}
	argv, err := c.argv(t.Plan, o, schema, in.lines)
	if err != nil {
		return provider.Cmd{}, err
	}
	return provider.Cmd{
		Argv:  argv,
		Dir:   inside(t.Root, o.Cwd),
		Env:   c.env(t, o),
		Stdin: bytes.NewReader(in.stdin),
	}, nil
}

// argv is the command line (spec 02 §2). --setting-sources comes before -p, which
// can swallow the next word. The prompt is never part of it.
func (c *cli) argv(p harness.Plan, o callOptions, schema []byte, lines bool) ([]string, error) {
	argv := slices.Clone(c.o.Executable)
	if len(argv) == 0 {
		argv = []string{"claude"}
	}
	sources := "user"
	if c.o.ProjectSettings {
		sources = "user,project"
	}
	argv = append(argv, "--setting-sources", sources, "-p", "--output-format", "stream-json", "--verbose")
	add := func(flag string, value ...string) { argv = append(append(argv, flag), value...) }
	if lines {
		add("--input-format", "stream-json")
	}
	if c.model != "" {
		add("--model", c.model)
	}
	if !c.o.NoPartials {
		add("--include-partial-messages")
	}
	if o.SessionID != "" {
		add("--resume", o.SessionID)
		if o.ForkSession {
			add("--fork-session")
		}
	}
	r := permissions(p.Policy, o)
	add("--permission-mode", r.mode)
	if o.MaxTurns > 0 {
		add("--max-turns", strconv.Itoa(o.MaxTurns))
	}
	for _, d := range c.o.AddDirs {
		add("--add-dir", inside(p.Root, d))
	}
	if len(r.allowed) > 0 {
		add("--allowedTools", strings.Join(r.allowed, ","))
	}
	if len(r.disallowed) > 0 {
		add("--disallowedTools", strings.Join(r.disallowed, ","))
	}
	if systemPrompt(p) != "" {
		flag := "--append-system-prompt-file"
		if c.o.ReplaceSystemPrompt && hasText(p.System) {
			flag = "--system-prompt-file"
		}
		add(flag, path.Join(p.Private, systemFile))
	}
	if r.settings() != nil {
		add("--settings", path.Join(p.Private, settingsFile))
	}
	if c.o.StrictMCP || isolated(p.Traits) {
		add("--strict-mcp-config")
	}
	if schema != nil {
		add("--json-schema", string(schema))
	}
	return argv, checkArgs(argv)
}

func checkArgs(argv []string) error {
	flag, total := "command", 0
	for _, a := range argv {
		if strings.HasPrefix(a, "--") {
			flag = a
		}
		total += len(a) + 1
		switch {
		case len(a) > maxArg:
			return &ArgError{flag, fmt.Sprintf("its value has %d bytes, and Linux takes %d for one argument", len(a), maxArg)}
		case strings.IndexByte(a, 0) >= 0:
			return &ArgError{flag, "its value has a NUL byte"}
		case total > 1<<20:
			return &ArgError{flag, "the arguments have more than 1 MiB together"}
		}
	}
	return nil
}

// checkSchema returns the schema of the structured answer, compact; nil for none.
func checkSchema(schema json.RawMessage) ([]byte, error) {
	if rawjson.IsNull(schema) {
		return nil, nil
	}
	root := ""
	if err := rawjson.Object(schema, func(k, v []byte) bool {
		if string(k) == "type" {
			root = text(v)
		}
		return true
	}); err != nil {
		return nil, &OptionError{"schema", "must be a JSON Schema: " + err.Error()}
	}
	if root != "object" {
		return nil, &OptionError{"schema", `its root must have "type": "object": the agent can only answer with an object`}
	}
	b := rawjson.AppendCompact(nil, schema)
	if len(b) > maxSchema {
		return nil, &OptionError{"schema", fmt.Sprintf("has %d bytes, and the program takes it on its command line: at most %d", len(b), maxSchema)}
	}
	return b, nil
}

func hasText(all []string) bool {
	return slices.ContainsFunc(all, func(s string) bool { return strings.TrimSpace(s) != "" })
}

// systemPrompt is the workspace's instructions and the system prompts as one text.
func systemPrompt(p harness.Plan) string {
	var parts []string
	for _, s := range p.System {
		if strings.TrimSpace(s) != "" {
			parts = append(parts, s)
		}
	}
	if s := strings.TrimSpace(p.Instructions); s != "" {
		parts = append(parts, p.Instructions)
	}
	return strings.Join(parts, "\n\n")
}

func isolated(t provider.Traits) bool {
	return t.Isolation != "" && t.Isolation != provider.IsolationNone
}

// baseURL is the model API as the caller knows it; empty: the sandbox's or the
// program's own. The host's goes along with the host's keys only.
func (c *cli) baseURL(p harness.Plan, o callOptions) string {
	if u, ok := c.o.Env["ANTHROPIC_BASE_URL"]; ok {
		return u
	}
	if c.o.BaseURL != "" || c.o.HostEnv == nil || c.hasKeys() || o.AuthMode == AuthHost || p.Env["ANTHROPIC_BASE_URL"] {
		return c.o.BaseURL
	}
	return c.o.HostEnv("ANTHROPIC_BASE_URL")
}

func (c *cli) checkKey(p harness.Plan, o callOptions) error {
	if o.AuthMode == AuthHost || c.hasKeys() {
		return nil
	}
	for i, k := range keys {
		if p.Env[k] || c.o.Env[k] != "" || (i < 2 && c.o.HostEnv != nil && c.o.HostEnv(k) != "") {
			return nil
		}
	}
	return &KeyError{keys}
}

// ownKeys are the keys that the options bring along; the sandbox's own come first.
func (c *cli) ownKeys(p harness.Plan, o callOptions) map[string]string {
	own := map[string]string{}
	switch {
	case o.AuthMode == AuthHost:
	case c.hasKeys():
		for _, kv := range c.o.Keys.Env() {
			k, v, _ := strings.Cut(kv, "=")
			own[k] = v
		}
	case c.o.HostEnv != nil:
		for _, k := range keys[:2] {
			if v := c.o.HostEnv(k); v != "" && !p.Env[k] {
				own[k] = v
			}
		}
	}
	return own
}

// Secrets implements harness.Secrets: the keys, also those given as plain
// variables.
func (c *cli) Secrets(p harness.Plan) (*secret.Set, error) {
	o, err := c.merged(p.Options)
	if err != nil {
		return nil, err
	}
	s := c.ownKeys(p, o)
	for _, k := range keys {
		if v := c.o.Env[k]; v != "" {
			s[k] = v
		}
	}
	return secret.NewSet(s)
}

// hasKeys says whether the options bring keys along themselves.
func (c *cli) hasKeys() bool {
	return len(c.o.Keys.Env()) > 0
}

// env is what the program's environment has besides the sandbox's (spec 02 §4);
// later entries win.
func (c *cli) env(t harness.Turn, o callOptions) []string {
	env := []string{"DISABLE_AUTOUPDATER=1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1"}
	if isolated(t.Traits) {
		// Never on the host: as root the program would take it for leave to skip
		// permissions.
		env = append(env, "IS_SANDBOX=1", "CLAUDE_CODE_SANDBOXED=1")
	}
	switch {
	case c.o.MaxRetries == 0:
		env = append(env, "CLAUDE_CODE_MAX_RETRIES=3")
	case c.o.MaxRetries > 0:
		env = append(env, "CLAUDE_CODE_MAX_RETRIES="+strconv.Itoa(c.o.MaxRetries))
	}
	if o.AuthMode == AuthHost {
		for _, k := range keys[:2] {
			env = append(env, k+"=") // the program takes an empty one for none
		}
	}
	own := c.ownKeys(t.Plan, o)
	for _, k := range slices.Sorted(maps.Keys(own)) {
		env = append(env, k+"="+own[k])
	}
	url := c.baseURL(t.Plan, o)
	if in, ok := t.Inside[url]; ok {
		url = in
	}
	for _, k := range slices.Sorted(maps.Keys(c.o.Env)) {
		if k != "ANTHROPIC_BASE_URL" {
			env = append(env, k+"="+c.o.Env[k])
		}
	}
	if url != "" {
		env = append(env, "ANTHROPIC_BASE_URL="+url)
	}
	return env
}

var errNoPrompt = errors.New("claude-code: the last message must be the user's and have text")
