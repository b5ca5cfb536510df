package cli

import (
	"encoding/json"
	"fmt"
	"net/url"
	"text/tabwriter"

	"github.com/spf13/cobra"
)

func (a *app) sandboxesCommand() *cobra.Command {
	var server, thread string
	var asJSON bool
	c := &cobra.Command{
		Use:   "sandboxes [flags]",
		Short: "List the sandboxes of a server, and what is to become of them",
		Args:  exactArgs(0, "no arguments"),
		RunE: func(c *cobra.Command, _ []string) error {
			q := url.Values{"limit": {pageSize}}
			if thread != "" {
				q.Set("threadId", thread)
			}
			return a.list(c.Context(), server, "/v1/instances", "instances", q, 0, asJSON, printSandboxes)
		},
	}
	serverFlag(c.Flags(), &server)
	c.Flags().StringVar(&thread, "thread", "", "those of one thread")
	c.Flags().BoolVar(&asJSON, "json", false, "print one JSON object per line")
	return c
}

func printSandboxes(w *tabwriter.Writer, items []json.RawMessage) error {
	fmt.Fprintln(w, "SANDBOX\tGEN\tPROVIDER\tSTATE\tTHREAD\tLATEST RUN\tLAST USED\tKEPT UNTIL\tNOTE")
	for _, raw := range items {
		var s struct {
			Key, Provider, State, Desired, ThreadID, LatestRunID, LastError string
			Gen, LastUsedAt, KeepUntil                                      int64
		}
		if err := json.Unmarshal(raw, &s); err != nil {
			return err
		}
		state := s.State
		if s.Desired == "destroyed" && s.State != "destroyed" {
			state += ", to be destroyed"
		}
		fmt.Fprintf(w, "%s\t%d\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", printable(s.Key), s.Gen, printable(s.Provider), printable(state),
			printable(s.ThreadID), printable(s.LatestRunID), stamp(s.LastUsedAt), stamp(s.KeepUntil), clip(printable(firstLine(s.LastError)), 100))
	}
	return nil
}
