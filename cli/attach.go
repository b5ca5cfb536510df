package cli

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/aisandbox-go/aisandbox/event"
)

func (a *app) attachCommand() *cobra.Command {
	var server, from string
	var asJSON bool
	c := &cobra.Command{
		Annotations: map[string]string{eventStream: "json"},

		Use:   "attach [flags] RUN",
		Short: "Follow a run of a server, from its start or from where you were",
		Long: `attach shows a run of a server as run shows one of its own, until it has ended.
Where the connection breaks, it is made again and nothing is shown twice. Ctrl-C
ends the watching; the run goes on (see aisandbox cancel).`,
		Args: exactArgs(1, "one RUN"),
		RunE: func(c *cobra.Command, args []string) error {
			return a.attach(c.Context(), server, args[0], from, asJSON)
		},
	}
	serverFlag(c.Flags(), &server)
	c.Flags().StringVar(&from, "from", string(fromStart), "offset to read on behind, as shown when you left; -1 is the start")
	c.Flags().BoolVar(&asJSON, "json", false, "print one AG-UI event per line, and nothing else on stdout")
	return c
}

// fromStart is the offset of a run's start, as it is written.
const fromStart event.Offset = "-1"

func (a *app) attach(ctx context.Context, server, id, from string, asJSON bool) error {
	c, err := a.client(server)
	if err != nil {
		return err
	}
	if from == "" {
		return &usageError{"--from", from, "use an offset, or -1 for the start"}
	}
	r, err := c.run(ctx, id)
	if err != nil {
		return err
	}
	lost := false
	c.retrying = func(err error) {
		if !lost {
			fmt.Fprintln(a.err, "aisandbox: the connection broke, making it again: "+printable(err.Error()))
		}
		lost = true
	}
	show := newRenderer(a.out, isTerminal(a.out) && a.getenv("NO_COLOR") == "", time.UnixMilli(r.StartedAt))
	var terminal event.Event
	var changed *event.FileChanged
	at := from
	for e, err := range c.events(ctx, r, from) {
		if err != nil {
			if errors.Is(err, errInterrupted) {
				fmt.Fprintf(a.err, "\naisandbox: the run goes on; read on with: aisandbox attach --from %s %s\n", at, id)
				return &exitError{exitInterrupted, nil}
			}
			return err
		}
		lost = false
		if e.id != "" {
			at = e.id
		}
		if d, ok := event.CustomOf[event.FileChanged](e.ev, event.NameFileChanged); ok {
			changed = &d
		}
		switch e.ev.(type) {
		case event.RunFinished, event.RunError:
			terminal = e.ev
			if ts := e.ev.Base().Timestamp; ts > 0 {
				show.ended = time.UnixMilli(ts)
			}
		}
		if err := a.show(show, e.ev, asJSON); err != nil {
			return &exitError{exitFailed, fmt.Errorf("output: %w", err)}
		}
	}
	if !asJSON {
		a.close(show, changed, terminal)
	}
	if terminal == nil { // it ended before what was asked for
		if r, err = c.run(ctx, id); err != nil {
			return err
		}
		fmt.Fprintf(a.err, "aisandbox: nothing came behind %s: the run had ended: %s\n", printable(from), printable(r.Status))
		if r.Status != "completed" && r.Status != "interrupted" {
			return &exitError{exitFailed, nil}
		}
		return nil
	}
	if e, failed := terminal.(event.RunError); failed {
		code := exitFailed
		if e.Code == "budget_exceeded" {
			code = exitTimeout
		}
		return &exitError{code, errors.New(e.Message)}
	}
	return nil
}
