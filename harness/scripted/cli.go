package scripted

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/aisandbox-go/aisandbox/harness"
	"github.com/aisandbox-go/aisandbox/harness/claudecode"
	"github.com/aisandbox-go/aisandbox/provider"
)

const name = "scripted"

// The files of a run in Plan.Private.
const (
	scriptFile = "script.json"
	mcpFile    = "mcp.json"
)

// Options describe a scripted agent. The zero value is one that does nothing and
// succeeds.
type Options struct {
	Script Script

	// Guest is the argv that runs the guest program inside of the sandbox; empty
	// means Plan.Guest.
	Guest []string

	// Model is the name that the agent gives to its model; empty: "scripted".
	Model string

	// MCPConfig names the MCP servers that call and ask steps reach, as
	// {"mcpServers":{NAME:{"type":"http","url":URL,"headers":{…}}}}. The URLs are
	// those that reach the servers from inside of the sandbox.
	MCPConfig json.RawMessage

	// PermissionPromptTool is the full name, mcp__SERVER__TOOL, of the tool that
	// decides on ask steps. It needs an MCPConfig.
	PermissionPromptTool string

	// PermissionMode is what counts for ask steps where there is no prompt tool:
	// they run in "bypassPermissions", the default, and are refused in any other.
	PermissionMode string

	// MaxTurns ends the run after so many messages; 0: no limit.
	MaxTurns int

	// WholeMessages leaves out the deltas: each text arrives in one piece.
	WholeMessages bool
}

// CLI returns the agent for [harness.Text]. The keys of Plan.Options are
// sessionId, an earlier run's session to go on with, and forkSession, which goes
// on with a copy of it.
//
// The agent needs the guest program in the sandbox. It has no use for system
// prompts, instructions, a policy or a schema: its script says what it does.
func CLI(o Options) harness.CLI { return cli{o} }

type cli struct{ o Options }

var _ interface {
	harness.CLI
	harness.AbortLadder
} = cli{}

func (c cli) Name() string { return name }

// callOptions are the keys of Plan.Options.
type callOptions struct {
	SessionID   string `json:"sessionId"`
	ForkSession bool   `json:"forkSession"`
}

func (c cli) callOptions(p harness.Plan) (callOptions, error) {
	var o callOptions
	if len(bytes.TrimSpace(p.Options)) == 0 {
		return o, nil
	}
	dec := json.NewDecoder(bytes.NewReader(p.Options))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&o); err != nil {
		return o, fmt.Errorf("scripted: options of the call: %w; there are sessionId and forkSession", err)
	}
	if o.ForkSession && o.SessionID == "" {
		return o, errors.New("scripted: option forkSession needs a sessionId to fork")
	}
	return o, nil
}

// check refuses what can't be run, before anything is started.
func (c cli) check(p harness.Plan) error {
	if len(c.guest(p)) == 0 {
		return errors.New("scripted: no guest program in this sandbox: the scripted agent is a part of it; use a provider that can run it, or set Options.Guest")
	}
	if c.o.PermissionPromptTool != "" && len(c.o.MCPConfig) == 0 {
		return errors.New("scripted: PermissionPromptTool needs an MCPConfig that has its server")
	}
	if c.o.MaxTurns < 0 {
		return fmt.Errorf("scripted: MaxTurns %d is below zero", c.o.MaxTurns)
	}
	if _, err := prompt(p); err != nil {
		return err
	}
	_, err := c.callOptions(p)
	return err
}

func (c cli) guest(p harness.Plan) []string {
	if len(c.o.Guest) > 0 {
		return c.o.Guest
	}
	return p.Guest
}

// prompt is the text of the last message, which must be the user's.
func prompt(p harness.Plan) (string, error) {
	if n := len(p.Messages); n > 0 && p.Messages[n-1].Role == "user" {
		if text := p.Messages[n-1].Content.String(); strings.TrimSpace(text) != "" {
			return text, nil
		}
	}
	return "", errors.New("scripted: the last message must be the user's and have text")
}

func (c cli) Files(p harness.Plan) (files []harness.File, warnings []string, err error) {
	if err := c.check(p); err != nil {
		return nil, nil, err
	}
	script, err := c.o.Script.JSON()
	if err != nil {
		return nil, nil, err
	}
	files = append(files, harness.File{Name: scriptFile, Content: script})
	if len(c.o.MCPConfig) > 0 {
		files = append(files, harness.File{Name: mcpFile, Content: c.o.MCPConfig})
	}
	for _, w := range []struct {
		given bool
		what  string
	}{
		{len(p.System) > 0, "system prompts"},
		{len(p.Schema) > 0, "the schema of a structured answer"},
		{p.Policy != nil, "the policy"},
	} {
		if w.given {
			warnings = append(warnings, "the scripted agent ignores "+w.what)
		}
	}
	return files, warnings, nil
}

func (c cli) Command(t harness.Turn) (provider.Cmd, error) {
	if err := c.check(t.Plan); err != nil {
		return provider.Cmd{}, err
	}
	text, err := prompt(t.Plan)
	if err != nil {
		return provider.Cmd{}, err
	}
	o, err := c.callOptions(t.Plan)
	if err != nil {
		return provider.Cmd{}, err
	}
	argv := append(slices.Clone(c.guest(t.Plan)), "play", path.Join(t.Private, scriptFile), "--model", c.model())
	if !c.o.WholeMessages {
		argv = append(argv, "--include-partial-messages")
	}
	if o.SessionID != "" {
		argv = append(argv, "--resume="+o.SessionID)
	}
	if o.ForkSession {
		argv = append(argv, "--fork-session")
	}
	if o.SessionID == "" || o.ForkSession {
		argv = append(argv, "--session-id", sessionID(t.RunID))
	}
	if c.o.PermissionMode != "" {
		argv = append(argv, "--permission-mode", c.o.PermissionMode)
	}
	if c.o.MaxTurns > 0 {
		argv = append(argv, "--max-turns", strconv.Itoa(c.o.MaxTurns))
	}
	if len(c.o.MCPConfig) > 0 {
		argv = append(argv, "--mcp-config", path.Join(t.Private, mcpFile))
	}
	if c.o.PermissionPromptTool != "" {
		argv = append(argv, "--permission-prompt-tool", c.o.PermissionPromptTool)
	}
	return provider.Cmd{Argv: argv, Dir: t.Root, Stdin: io.Reader(strings.NewReader(text))}, nil
}

func (c cli) model() string {
	if c.o.Model != "" {
		return c.o.Model
	}
	return name
}

// sessionID is the session of a run that starts one: known before the first byte.
func sessionID(runID string) string {
	h := sha256.Sum256([]byte(runID))
	h[6], h[8] = h[6]&0x0f|0x40, h[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", h[:4], h[4:6], h[6:8], h[8:10], h[10:16])
}

func (c cli) Decoder(t harness.Turn) harness.Decoder {
	return claudecode.NewDecoder(claudecode.DecoderOptions{
		Harness: name, Model: c.model(), RunID: t.RunID, ThreadID: t.ThreadID, ParentRunID: t.ParentRunID, NewID: t.NewID,
	})
}

// AbortLadder lets the agent say that it was interrupted, as Claude Code does.
func (c cli) AbortLadder() []harness.AbortStep {
	return []harness.AbortStep{
		{Signal: int(syscall.SIGINT), Wait: 5 * time.Second},
		{Signal: int(syscall.SIGTERM), Wait: 2 * time.Second},
	}
}
