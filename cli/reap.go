package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/aisandbox-go/aisandbox/reaper"
)

func (a *app) reapCommand() *cobra.Command {
	var f hostFlags
	var asJSON bool
	c := &cobra.Command{
		Use:   "reap [flags]",
		Short: "End what nobody looks after, once: runs without a host, sandboxes whose time is over",
		Long: `reap does once what every server does all the time, for those who have a timer
instead of a server: runs whose agent has ended are completed, those that somebody
cancelled or nobody watches are ended, sandboxes that are to go are destroyed, and
what is old is forgotten. Agents at work are left alone.

Give it the flags of the servers: it must find their runs and know their
sandboxes. It may run beside them, and beside itself.

The exit code is 1 where something could not be done, and will be tried again.`,
		Args: exactArgs(0, "no arguments"),
		RunE: func(c *cobra.Command, _ []string) error { return a.reap(c.Context(), f, asJSON) },
	}
	f.register(c.Flags())
	c.Flags().BoolVar(&asJSON, "json", false, "print the result as one JSON object")
	return c
}

func (a *app) reap(ctx context.Context, f hostFlags, asJSON bool) (err error) {
	h, err := a.host(ctx, f, a.serverLogger())
	if err != nil {
		return err
	}
	defer func() {
		stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTime)
		defer cancel()
		err = errors.Join(err, h.server.Shutdown(stop), h.close())
	}()
	r, err := h.reaper(nil)
	if err != nil {
		return err
	}
	res, err := r.Once(ctx)
	if asJSON {
		b, jerr := json.Marshal(res)
		if jerr != nil {
			return jerr
		}
		if _, werr := a.out.Write(append(b, '\n')); werr != nil {
			return werr
		}
	} else {
		a.printReaped(res)
	}
	if err == nil && unfinished(res) {
		return &exitError{exitFailed, nil} // what it was is printed already
	}
	return err
}

// unfinished says that something should have been done and wasn't.
func unfinished(res reaper.Result) bool {
	for _, o := range []reaper.Outcome{reaper.Unknown, reaper.Exceeded, reaper.Errored, reaper.ReclaimFailed} {
		if res.Outcomes[o] > 0 {
			return true
		}
	}
	return res.Sandboxes.Failed > 0
}

func (a *app) printReaped(res reaper.Result) {
	for _, e := range res.Runs {
		line := fmt.Sprintf("run %s: %s", printable(e.RunID), e.Outcome)
		if e.Status != "" {
			line += ", " + string(e.Status)
		}
		if e.Error != "" {
			line += ": " + clip(printable(firstLine(e.Error)), 200)
		}
		fmt.Fprintln(a.out, line)
	}
	s := res.Sandboxes
	for _, x := range []struct {
		n    int
		what string
	}{
		{s.Destroyed + s.Orphaned, "destroyed"}, {s.Failed, "not destroyed, to be tried again"}, {s.InUse, "kept, since a run works in it"},
		{s.Lost, "gone"}, {s.Unfinished, "never finished"}, {s.Foreign, "of a provider that is not configured here"},
	} {
		if x.n > 0 {
			fmt.Fprintf(a.out, "sandboxes %s: %d\n", x.what, x.n)
		}
	}
	fmt.Fprintf(a.out, "%s looked into", plural(res.Considered, "run"))
	if n := res.Retained.Logs + res.Retained.Runs; n > 0 {
		fmt.Fprintf(a.out, ", %d logs and %d records forgotten", res.Retained.Logs, res.Retained.Runs)
	}
	fmt.Fprintln(a.out)
}
