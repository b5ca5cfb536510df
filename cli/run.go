package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/aisandbox-go/aisandbox/chat"
	"github.com/aisandbox-go/aisandbox/config"
	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/sandbox"
)

// maxScript bounds a script file.
const maxScript = 8 << 20

// runFlags are the flags of run.
type runFlags struct {
	box     boxFlags
	harness string
	model   string
	script  string
	patch   string
	json    bool
}

func (a *app) runCommand() *cobra.Command {
	var f runFlags
	c := &cobra.Command{
		Annotations: map[string]string{eventStream: "json"},

		Use:   "run [flags] PROMPT",
		Short: "Let an agent do one task on a repository, and show the diff",
		Long: `run makes a sandbox with a copy of a repository, lets an agent work in it on the
prompt, shows what it does and ends with the diff. The directory given with
--repo is never changed; --patch saves the diff for git apply. The sandbox is
removed at the end.

A PROMPT that begins with a dash goes behind "--"; "-" alone reads it from stdin.`,
		Args: exactArgs(1, "one PROMPT"),
		RunE: func(c *cobra.Command, args []string) error {
			prompt := args[0]
			if prompt == "-" && c.ArgsLenAtDash() < 0 {
				b, err := io.ReadAll(io.LimitReader(a.in, maxScript))
				if err != nil {
					return &exitError{exitUsage, fmt.Errorf("prompt from stdin: %w", err)}
				}
				prompt = string(b)
			}
			return a.runAgent(c.Context(), f, prompt)
		},
	}
	f.box.register(c.Flags(), ".")
	c.Flags().StringVar(&f.harness, "harness", "", "the agent (default claude-code, or scripted with --script)")
	c.Flags().StringVar(&f.model, "model", "", "the agent's model (default: the agent's own)")
	c.Flags().StringVar(&f.script, "script", "", "script of the scripted agent, YAML")
	c.Flags().StringVar(&f.patch, "patch", "", "save the diff in this file")
	c.Flags().BoolVar(&f.json, "json", false, "print one AG-UI event per line, and nothing else on stdout")
	return c
}

func (a *app) runAgent(ctx context.Context, f runFlags, prompt string) error {
	if strings.TrimSpace(prompt) == "" {
		return &usageError{"PROMPT", prompt, "say what the agent is to do"}
	}
	if f.harness == "" {
		f.harness = "claude-code"
		if f.script != "" {
			f.harness = "scripted"
		}
	}
	var script []byte
	if f.script != "" {
		var err error
		if script, err = readFile("--script", f.script, maxScript); err != nil {
			return err
		}
	}
	log := a.logger()
	h, err := a.harness(f.harness)
	if err != nil {
		return err
	}
	prog := findProgram(ctx, h)
	bx, err := a.define(ctx, "run", f.box, prog.Mounts, log)
	if err != nil {
		return err
	}
	adapter, err := a.adapter(f, h, bx, prog, string(script))
	if err != nil {
		return err
	}
	if f.box.timeout < 0 {
		return &usageError{"--timeout", f.box.timeout.String(), "must not be negative; 0 is never"}
	}
	if bx.warning != "" {
		fmt.Fprintln(a.err, "aisandbox: warning: "+bx.warning)
	}
	run, err := chat.Start(ctx, chat.Request{
		Messages: []event.Message{{ID: "user-1", Role: "user", Content: event.Text(prompt)}},
		Adapter:  adapter,
		Use:      []chat.Middleware{sandbox.With(bx.def, sandbox.WithOptions{})},
		Timeout:  f.box.timeout,
		Logger:   log,
	})
	if err != nil {
		return err
	}
	return a.follow(ctx, run, f)
}

func (a *app) harness(name string) (config.Harness, error) {
	h, ok := a.reg.Harnesses[name]
	if !ok {
		return h, &usageError{"--harness", name, "use " + strings.Join(slices.Sorted(maps.Keys(a.reg.Harnesses)), ", ")}
	}
	return h, nil
}

// findProgram looks for the agent's program; one that isn't found is reported
// when it can't be started, since the sandbox may have its own.
func findProgram(ctx context.Context, h config.Harness) config.Program {
	if h.Find == nil {
		return config.Program{}
	}
	p, err := h.Find(ctx)
	if err != nil {
		return config.Program{}
	}
	return p
}

// adapter makes the agent's adapter from the flags.
func (a *app) adapter(f runFlags, h config.Harness, bx *box, prog config.Program, script string) (chat.Adapter, error) {
	section := map[string]string{}
	if f.model != "" {
		if h.Model == "" {
			return nil, &usageError{"--model", f.model, "the agent " + f.harness + " has no models"}
		}
		section[h.Model] = f.model
	}
	switch {
	case h.Script != "" && script == "":
		return nil, &usageError{"--script", f.script, "the agent " + f.harness + " needs a script"}
	case h.Script == "" && script != "":
		return nil, &usageError{"--script", f.script, "the agent " + f.harness + " takes no script"}
	case script != "":
		section[h.Script] = script
		section[h.Script+"Name"] = f.script
	}
	if h.Executable != "" && prog.Path != "" && bx.prov.Traits().SharedKernel {
		section[h.Executable] = prog.Path // the sandbox sees the host's file
	}
	raw, err := json.Marshal(section)
	if err != nil {
		return nil, err
	}
	ad, err := h.New(raw)
	if err != nil {
		return nil, &exitError{exitUsage, err}
	}
	return ad, nil
}

// follow shows a run until it has ended and returns what the exit code is to be.
func (a *app) follow(ctx context.Context, run *chat.Run, f runFlags) error {
	// A Ctrl-C cancels the run; its end is still read, so that the stream has its
	// terminal event and nothing is left behind.
	stop := context.AfterFunc(ctx, func() { _ = run.Cancel(context.Cause(ctx).Error()) })
	defer stop()
	show := newRenderer(a.out, isTerminal(a.out) && a.getenv("NO_COLOR") == "", time.Now())
	var terminal event.Event
	var changed *event.FileChanged
	var printErr error
	for ev, err := range run.Events(context.WithoutCancel(ctx)) {
		if err != nil {
			return err
		}
		if d, ok := event.CustomOf[event.FileChanged](ev, event.NameFileChanged); ok {
			changed = &d
		}
		switch ev.(type) {
		case event.RunFinished, event.RunError:
			terminal = ev
		}
		if printErr == nil {
			printErr = a.show(show, ev, f.json)
			if printErr != nil { // nobody reads on
				_ = run.Cancel("output: " + printErr.Error())
			}
		}
	}
	if changed != nil && f.patch != "" {
		if err := os.WriteFile(f.patch, []byte(changed.Diff), 0o644); err != nil {
			return &exitError{exitFailed, fmt.Errorf("--patch: %w", err)}
		}
		if changed.Truncated {
			fmt.Fprintln(a.err, "aisandbox: warning: the diff was too long and is cut: "+f.patch+" will not apply")
		}
	}
	if printErr != nil {
		return &exitError{exitFailed, fmt.Errorf("output: %w", printErr)}
	}
	if !f.json {
		a.close(show, changed, terminal)
	}
	return a.verdict(ctx, run, terminal)
}

func (a *app) show(r *renderer, ev event.Event, asJSON bool) error {
	if asJSON {
		return a.printEvent(ev)
	}
	if ph, ok := event.CustomOf[event.SetupPhase](ev, event.NameWorkspaceSetup); ok {
		if ph.Status == event.SetupDone {
			r.phase(ph.Phase, ph.Name, time.Duration(ph.DurationMs)*time.Millisecond)
		}
		return nil
	}
	r.event(ev)
	return nil
}

func (a *app) close(r *renderer, changed *event.FileChanged, terminal event.Event) {
	if changed != nil {
		r.diff(changed.Diff)
		if changed.Truncated {
			r.line("… the diff is longer than is shown")
		}
	}
	switch t := terminal.(type) {
	case event.RunFinished:
		r.summary(t)
	case event.RunError:
		r.failure(t)
	}
}

// verdict turns the end of a run into an exit code. What there is to say was
// said, except where the output was JSON for a program.
func (a *app) verdict(ctx context.Context, run *chat.Run, terminal event.Event) error {
	e, failed := terminal.(event.RunError)
	if !failed {
		return nil
	}
	o, err := run.Wait(context.WithoutCancel(ctx))
	if err != nil {
		return err
	}
	code := exitFailed
	switch {
	case errors.Is(o.Err, chat.ErrBudget):
		code = exitTimeout
	case ctx.Err() != nil:
		code = exitInterrupted
	default:
		if _, ok := sandbox.Token.Get(run); !ok {
			code = exitUnavailable
		}
	}
	return &exitError{code, errors.New(e.Message)}
}

// isTerminal says whether w is a terminal.
func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}
