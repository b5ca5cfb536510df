package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"net/url"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
)

// pageSize is how many records are asked for at once.
const pageSize = "500"

func (a *app) runsCommand() *cobra.Command {
	var server, thread string
	var status []string
	var limit int
	var asJSON bool
	c := &cobra.Command{
		Use:   "runs [flags]",
		Short: "List the runs of a server, the newest last",
		Args:  exactArgs(0, "no arguments"),
		RunE: func(c *cobra.Command, _ []string) error {
			if limit < 0 {
				return &usageError{"--limit", fmt.Sprint(limit), "use a number from 1, or 0 for all"}
			}
			q := url.Values{"limit": {pageSize}}
			for _, s := range status {
				q.Add("status", s)
			}
			if thread != "" {
				q.Set("threadId", thread)
			}
			return a.list(c.Context(), server, "/v1/runs", "runs", q, limit, asJSON, printRuns)
		},
	}
	serverFlag(c.Flags(), &server)
	c.Flags().StringVar(&thread, "thread", "", "those of one thread")
	c.Flags().StringSliceVar(&status, "status", nil, "those of a status: running, completed, failed, aborted or interrupted; repeatable")
	c.Flags().IntVar(&limit, "limit", 50, "the newest so many; 0 is all")
	c.Flags().BoolVar(&asJSON, "json", false, "print one JSON object per line")
	return c
}

// maxListed bounds what is kept of a list.
const maxListed = 100_000

// list prints the last records of a list that the server gives in pages.
func (a *app) list(ctx context.Context, server, path, field string, q url.Values, limit int, asJSON bool, print func(*tabwriter.Writer, []json.RawMessage) error) error {
	c, err := a.client(server)
	if err != nil {
		return err
	}
	if limit == 0 || limit > maxListed {
		limit = maxListed
	}
	var last []json.RawMessage
	older := 0
	for {
		var page map[string]json.RawMessage
		if err := c.get(ctx, path, q, &page); err != nil {
			return err
		}
		var items []json.RawMessage
		var next string
		if err := json.Unmarshal(page[field], &items); err != nil {
			return &exitError{exitUnavailable, fmt.Errorf("the answer is not that of an aisandbox server: %s: %w", field, err)}
		}
		if raw, ok := page["next"]; ok {
			if err := json.Unmarshal(raw, &next); err != nil {
				return &exitError{exitUnavailable, fmt.Errorf("the answer is not that of an aisandbox server: next: %w", err)}
			}
		}
		last = append(last, items...)
		if over := len(last) - limit; over > 0 {
			older += over
			last = append([]json.RawMessage(nil), last[over:]...)
		}
		if next == "" || next == q.Get("after") {
			break
		}
		q.Set("after", next)
	}
	if asJSON {
		for _, raw := range last {
			if _, err := fmt.Fprintf(a.out, "%s\n", raw); err != nil {
				return err
			}
		}
		return nil
	}
	w := tabwriter.NewWriter(a.out, 0, 0, 2, ' ', 0)
	if err := print(w, last); err != nil {
		return err
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if older > 0 {
		fmt.Fprintf(a.err, "aisandbox: %d older ones are not shown; see --limit\n", older)
	}
	return nil
}

func printRuns(w *tabwriter.Writer, items []json.RawMessage) error {
	fmt.Fprintln(w, "RUN\tTHREAD\tSANDBOX\tSTATUS\tSTARTED\tTOOK\tEVENTS")
	for _, raw := range items {
		var r record
		if err := json.Unmarshal(raw, &r); err != nil {
			return err
		}
		end := time.Now()
		if r.FinishedAt > 0 {
			end = time.UnixMilli(r.FinishedAt)
		}
		status := r.Status
		if r.CancelRequested && r.FinishedAt == 0 {
			status += ", to be ended"
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%d\n", printable(r.RunID), printable(r.ThreadID), printable(r.Sandbox), printable(status),
			stamp(r.StartedAt), fmtDuration(max(0, end.Sub(time.UnixMilli(r.StartedAt)))), r.Events)
	}
	return nil
}

func stamp(millis int64) string {
	if millis == 0 {
		return "-"
	}
	return time.UnixMilli(millis).Format(time.DateTime)
}
