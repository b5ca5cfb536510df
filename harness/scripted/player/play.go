package player

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"
)

// maxDenials bounds the list of refused tools in the result line.
const maxDenials = 1000

// How a script can end before its last step.
var (
	errStopped  = errors.New("interrupted")
	errMaxTurns = errors.New("too many turns")
)

// crashError ends the agent with an exit code.
type crashError struct{ code int }

func (e *crashError) Error() string { return fmt.Sprintf("crashed with code %d", e.code) }

// player is one run of a script.
type player struct {
	opts    options
	script  Script
	prompt  string
	cwd     string
	servers []*server
	out     *stream
	errw    io.Writer
	procs   procs

	session *session
	last    string // for {{last_result}}
	answer  string // the last text said
	inTool  bool   // interrupted while a tool ran
	denied  []denial
}

// toolResult is what a tool came back with.
type toolResult struct {
	content    any // a string, or the raw content list of an MCP tool
	isError    *bool
	structured any
	aborted    bool // the agent was told to stop meanwhile
}

// failed is the result of a tool that failed.
func failed(text string) toolResult {
	isError := true
	return toolResult{content: text, isError: &isError, structured: "Error: " + text}
}

// play runs the script and returns the exit code.
func (p *player) play(ctx context.Context) int {
	s, warning, err := openSession(p.opts, p.script, p.prompt)
	if err != nil {
		return p.refused(err)
	}
	if warning != nil {
		fmt.Fprintf(p.errw, "play: the session will not be remembered: %v\n", warning)
	}
	p.session, p.last = s, s.LastResult
	p.out.begin(s.ID, s.Turns, p.opts, p.prompt)
	for _, srv := range p.servers {
		srv.connect(ctx)
	}
	p.init()
	if name := p.opts.promptTool; name != "" && p.find(name) == nil {
		fmt.Fprintf(p.errw, "play: the permission prompt tool %s was not found\n", name)
		return 1
	}

	err = p.steps(ctx, p.script.Steps)
	var crash *crashError
	if errors.As(err, &crash) {
		p.out.flush()
		return crash.code
	}
	if errors.Is(err, errStopped) {
		p.procs.stop()
		if p.inTool {
			p.out.userText("[Request interrupted by user for tool use]")
		} else {
			p.out.userText("[Request interrupted by user]")
		}
	} else {
		p.out.end("end_turn")
	}
	s.LastResult = cut(p.answer, maxRemembered)
	if err := s.save(); err != nil {
		fmt.Fprintf(p.errw, "play: the session will not be remembered: %v\n", err)
	}
	code := p.result(err)
	if p.out.err != nil {
		p.procs.stop()
		fmt.Fprintf(p.errw, "play: output: %v\n", p.out.err)
		return 1
	}
	return code
}

// refused says that the run could not start, as the real program does: a session
// that isn't there gives a lone result line, one that is taken none.
func (p *player) refused(err error) int {
	if !errors.Is(err, errNoSession) {
		if errors.Is(err, errInUse) {
			err = fmt.Errorf("session ID %s is already in use", p.opts.sessionID)
		}
		fmt.Fprintf(p.errw, "play: %v\n", err)
		return 1
	}
	text := "No conversation found with session ID: " + p.opts.resume
	p.out.begin(p.opts.resume, 0, p.opts, "")
	l := errorLine{Type: "result", Subtype: "error_during_execution", IsError: true, totals: p.totals(),
		UUID: p.out.uuid(), Errors: []string{text}}
	p.out.line(l)
	fmt.Fprintln(p.errw, text)
	return 1
}

func (p *player) init() {
	l := initLine{Type: "system", Subtype: "init", Cwd: p.cwd, SessionID: p.session.ID, Tools: slices.Clone(builtin),
		MCPServers: []serverStatus{}, Model: p.opts.model, PermissionMode: p.opts.permissionMode, SlashCommands: []string{},
		APIKeySource: "none", Version: version, OutputStyle: "default", Agents: []string{}, Skills: []string{},
		Plugins: []string{}, AnalyticsDisabled: true, FeedbackDisabled: true, UUID: p.out.uuid(), FastModeState: "off"}
	for _, s := range p.servers {
		status := "connected"
		if s.err != nil {
			status = "failed"
		}
		l.MCPServers = append(l.MCPServers, serverStatus{s.name, status})
		for _, t := range s.tools {
			// The tool that asks for permissions is not the model's to call.
			if name := toolName(s.name, t); name != p.opts.promptTool {
				l.Tools = append(l.Tools, name)
			}
		}
	}
	p.out.line(l)
}

// result prints the last line and returns the exit code.
func (p *player) result(err error) int {
	reason := "end_turn"
	if err == nil {
		p.out.line(okLine{Type: "result", Subtype: "success", NumTurns: p.out.msgs, Result: p.answer, StopReason: &reason,
			totals: p.totals(), TerminalReason: "completed", FastModeState: "off", UUID: p.out.uuid()})
		return 0
	}
	l := errorLine{Type: "result", IsError: true, NumTurns: p.out.msgs + 1, totals: p.totals(), FastModeState: "off", UUID: p.out.uuid()}
	code := 0
	if p.inTool {
		reason = "tool_use"
		l.StopReason = &reason
	}
	if errors.Is(err, errMaxTurns) {
		l.Subtype, l.TerminalReason, code = "error_max_turns", "max_turns", 1
		l.Errors = []string{fmt.Sprintf("Reached maximum number of turns (%d)", p.opts.maxTurns)}
	} else {
		l.Subtype, l.TerminalReason = "error_during_execution", "aborted_tools"
		l.Errors = []string{err.Error()}
	}
	p.out.line(l)
	return code
}

func (p *player) totals() totals {
	t := totals{SessionID: p.out.sid, ModelUsage: map[string]modelUsage{}, PermissionDenials: p.denied}
	if t.PermissionDenials == nil {
		t.PermissionDenials = []denial{}
	}
	t.Usage.Input, t.Usage.Output = p.out.input*p.out.msgs, p.out.all
	t.Usage.ServiceTier, t.Usage.Iterations, t.Usage.Speed = "standard", []struct{}{}, "standard"
	if p.out.msgs > 0 {
		t.ModelUsage[p.opts.model] = modelUsage{Input: t.Usage.Input, Output: t.Usage.Output, ContextWindow: 200000, MaxOutput: 64000}
	}
	return t
}

func (p *player) steps(ctx context.Context, steps []Step) error {
	for _, s := range steps {
		if ctx.Err() != nil {
			return errStopped
		}
		if p.out.err != nil {
			return p.out.err
		}
		if err := p.step(ctx, s); err != nil {
			return err
		}
	}
	return nil
}

func (p *player) step(ctx context.Context, s Step) error {
	switch {
	case s.Repeat != nil:
		for range s.Repeat.Times {
			if err := p.steps(ctx, s.Repeat.Steps); err != nil {
				return err
			}
		}
		return nil
	case s.Sleep > 0:
		timer := time.NewTimer(s.Sleep)
		defer timer.Stop()
		select {
		case <-timer.C:
			return nil
		case <-ctx.Done():
			return errStopped
		}
	case s.Crash != nil:
		if s.Crash.Signal != "" {
			p.out.flush()
			syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {} // the signal is on its way
		}
		return &crashError{s.Crash.Code}
	}

	// What is left needs a message.
	if p.opts.maxTurns > 0 && !p.out.open && p.out.msgs >= p.opts.maxTurns {
		p.inTool = true
		return errMaxTurns
	}
	switch {
	case s.Say != "":
		// A placeholder may have nothing to say, and a block is never empty.
		if text := p.expand(s.Say, false); text != "" {
			p.out.text(text)
			p.answer = text
		}
	case s.Think != "":
		if text := p.expand(s.Think, false); text != "" {
			p.out.thinking(text)
		}
	case s.Flood != nil:
		p.out.flood(*s.Flood, func() bool { return ctx.Err() != nil })
	case s.Run != "":
		return p.use(ctx, "Bash", bashInput{p.expand(s.Run, true)}, nil)
	case s.Write != nil:
		return p.use(ctx, "Write", writeInput{p.abs(s.Write.Path), p.expand(s.Write.Content, false)}, nil)
	case s.Edit != nil:
		return p.use(ctx, "Edit", editInput{FilePath: p.abs(s.Edit.Path), OldString: s.Edit.Old, NewString: s.Edit.New}, nil)
	case s.Call != nil:
		return p.use(ctx, p.qualify(s.Call.Tool), object(s.Call.Args), nil)
	case s.Ask != nil:
		return p.use(ctx, p.qualify(s.Ask.Tool), object(s.Ask.Input), p.permit)
	}
	return nil
}

// object is a tool's input that is never absent.
func object(raw json.RawMessage) json.RawMessage {
	if len(bytes.TrimSpace(raw)) == 0 {
		return json.RawMessage("{}")
	}
	return raw
}

// permit decides on one use of a tool: it returns the input to use, or the result
// of the refused call.
func (p *player) permit(ctx context.Context, id, name string, input json.RawMessage) (json.RawMessage, *toolResult) {
	prompt := p.find(p.opts.promptTool)
	if prompt == nil {
		if p.opts.permissionMode == "bypassPermissions" {
			return input, nil
		}
		p.deny(id, name, input)
		r := failed("the mode " + p.opts.permissionMode + " does not allow " + name + ", and there is nobody to ask")
		return nil, &r
	}
	_, tool, _ := splitTool(p.opts.promptTool)
	args, err := marshal(struct {
		ToolName  string          `json:"tool_name"`
		Input     json.RawMessage `json:"input"`
		ToolUseID string          `json:"tool_use_id"`
	}{name, input, id})
	if err != nil {
		r := failed(err.Error())
		return nil, &r
	}
	answer := prompt.call(ctx, tool, args, id)
	if answer.aborted || answer.isError != nil && *answer.isError {
		return nil, &answer
	}
	var a struct {
		Behavior     string          `json:"behavior"`
		UpdatedInput json.RawMessage `json:"updatedInput"`
		Message      string          `json:"message"`
	}
	err = json.Unmarshal([]byte(answer.text()), &a)
	switch {
	case err == nil && a.Behavior == "allow" && len(a.UpdatedInput) > 0 && a.UpdatedInput[0] == '{':
		return a.UpdatedInput, nil
	case err == nil && a.Behavior == "deny" && a.Message != "":
		p.deny(id, name, input)
		r := failed(a.Message)
		return nil, &r
	}
	r := failed("the permission prompt tool answered neither allow with updatedInput nor deny with a message: " + cut(answer.text(), 1000))
	return nil, &r
}

func (p *player) deny(id, name string, input json.RawMessage) {
	if len(p.denied) < maxDenials {
		p.denied = append(p.denied, denial{name, id, input})
	}
}

// use prints a tool call, makes it, and prints its result.
func (p *player) use(ctx context.Context, name string, input any,
	permit func(ctx context.Context, id, name string, input json.RawMessage) (json.RawMessage, *toolResult)) error {
	raw, err := marshal(input)
	if err != nil {
		return err
	}
	id := p.out.tool(name, raw)
	var r toolResult
	var refused *toolResult
	if permit != nil {
		raw, refused = permit(ctx, id, name, raw)
	}
	if refused != nil {
		r = *refused
	} else {
		r = p.do(ctx, name, raw)
	}
	if r.aborted {
		p.inTool = true
		r = failed("the tool was stopped: the user interrupted the run")
		p.out.result(id, r)
		return errStopped
	}
	p.out.result(id, r)
	p.last = cut(r.text(), maxRemembered)
	return nil
}

// do makes a tool call.
func (p *player) do(ctx context.Context, name string, input json.RawMessage) toolResult {
	switch name {
	case "Bash":
		var in bashInput
		if err := json.Unmarshal(input, &in); err != nil || in.Command == "" {
			return failed("the input has no command")
		}
		return p.bash(ctx, in.Command)
	case "Write":
		var in writeInput
		if err := json.Unmarshal(input, &in); err != nil {
			return failed(err.Error())
		}
		return p.writeFile(in)
	case "Edit":
		var in editInput
		if err := json.Unmarshal(input, &in); err != nil {
			return failed(err.Error())
		}
		return p.editFile(in)
	}
	if s := p.find(name); s != nil {
		_, tool, _ := splitTool(name)
		return s.call(ctx, tool, input, "")
	}
	return failed("no such tool: " + name)
}

// text is a result as one text.
func (r toolResult) text() string {
	switch c := r.content.(type) {
	case string:
		return c
	case json.RawMessage:
		return contentText(c)
	}
	return ""
}

// expand replaces the placeholders; in a shell command as quoted words.
func (p *player) expand(text string, quoted bool) string {
	if !strings.Contains(text, "{{") {
		return text
	}
	values := []string{"{{prompt}}", p.prompt, "{{first_prompt}}", p.session.FirstPrompt, "{{last_result}}", p.last}
	if quoted {
		for i := 1; i < len(values); i += 2 {
			values[i] = "'" + strings.ReplaceAll(strings.ReplaceAll(values[i], "\x00", ""), "'", `'\''`) + "'"
		}
	}
	return strings.NewReplacer(values...).Replace(text)
}

// splitTool takes mcp__SERVER__TOOL apart.
func splitTool(name string) (server, tool string, ok bool) {
	rest, ok := strings.CutPrefix(name, "mcp__")
	if !ok {
		return "", "", false
	}
	server, tool, ok = strings.Cut(rest, "__")
	return server, tool, ok && server != "" && tool != ""
}

func toolName(server, tool string) string { return "mcp__" + server + "__" + tool }

// find returns the server that has a tool of this full name, or nil. A server
// that could not be reached is asked all the same, so that the call says why.
func (p *player) find(name string) *server {
	server, tool, ok := splitTool(name)
	if !ok {
		return nil
	}
	for _, s := range p.servers {
		if s.name == server && (s.err != nil && name != p.opts.promptTool || slices.Contains(s.tools, tool)) {
			return s
		}
	}
	return nil
}

// builtin are the tools of this agent itself.
var builtin = []string{"Bash", "Edit", "Write"}

// qualify is a tool's full name: a tool of ours as it is, else that of the first server, by name, that lists it.
func (p *player) qualify(tool string) string {
	if slices.Contains(builtin, tool) {
		return tool
	}
	for _, s := range p.servers {
		if slices.Contains(s.tools, tool) {
			return toolName(s.name, tool)
		}
	}
	return tool
}
