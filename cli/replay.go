package cli

import (
	"context"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/aisandbox-go/aisandbox/config"
	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/harness"
	"github.com/aisandbox-go/aisandbox/provider"
)

func (a *app) replayCommand() *cobra.Command {
	var name, model string
	var code int
	c := &cobra.Command{
		Use:   "replay --harness H FILE",
		Short: "Print the AG-UI events of a recorded transcript",
		Long: `replay translates the recorded output of an agent's program and prints one AG-UI
event per line, as a run of it would have. "-" reads from stdin. The same
transcript always gives the same bytes; events have no timestamps.`,
		Args: exactArgs(1, "one FILE"),
		RunE: func(c *cobra.Command, args []string) error {
			return a.replay(c.Context(), name, model, args[0], code)
		},
	}
	c.Flags().StringVar(&name, "harness", "claude-code", "the agent that was recorded")
	c.Flags().StringVar(&model, "model", "", "the model that was asked for")
	c.Flags().IntVar(&code, "exit-code", 0, "how the recorded program exited; 128+n for signal n")
	return c
}

func (a *app) replay(ctx context.Context, name, model, file string, code int) error {
	h, err := a.harness(name)
	if err != nil {
		return err
	}
	if code < 0 || code > 255 {
		return &usageError{"--exit-code", fmt.Sprint(code), "use 0 to 255"}
	}
	ad, err := a.adapter(runFlags{harness: name, model: model}, withoutScript(h), nil, noProgram, "")
	if err != nil {
		return err
	}
	rp, ok := ad.(harness.Replayer)
	if !ok {
		return &usageError{"--harness", name, "its transcripts can't be replayed"}
	}
	in := a.in
	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return &exitError{exitUsage, err}
		}
		defer func() { _ = f.Close() }()
		in = f
	}
	exit := provider.Exit{Code: code}
	if code > 128 && code < 128+65 {
		exit.Signal = code - 128
	}
	const id = "replay"
	t := harness.Turn{
		Plan: harness.Plan{
			RunID: id, ThreadID: id, Root: "/workspace", Private: "/tmp/aisandbox-replay",
			Env: map[string]bool{}, Warn: func(string) {},
		},
		NewID: event.NewIDs(id),
	}
	guard := event.NewGuard(event.GuardOptions{RunID: id, ThreadID: id})
	print := func(evs []event.Event) error {
		for _, ev := range evs {
			b, err := event.Encode(ev)
			if err != nil {
				return err
			}
			if _, err := a.out.Write(append(b, '\n')); err != nil {
				return err
			}
		}
		return nil
	}
	for ev, err := range rp.Replay(t, ctxReader{ctx, in}, harness.End{Exit: exit}) {
		if err != nil {
			return err
		}
		if err := print(guard.Push(ev)); err != nil {
			return err
		}
	}
	return nil
}

// ctxReader ends with its context.
type ctxReader struct {
	ctx context.Context
	r   io.Reader
}

func (c ctxReader) Read(p []byte) (int, error) {
	if err := context.Cause(c.ctx); err != nil {
		return 0, err
	}
	return c.r.Read(p)
}

// noProgram stands for an agent's program that isn't needed.
var noProgram config.Program

// withoutScript is h for a use that runs nothing.
func withoutScript(h config.Harness) config.Harness {
	h.Script = ""
	return h
}
