package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"

	"github.com/spf13/cobra"
)

func (a *app) cancelCommand() *cobra.Command {
	var server string
	c := &cobra.Command{
		Use:   "cancel [flags] RUN",
		Short: "End a run of a server",
		Long: `cancel asks for a run to be ended and returns when that is recorded. Whoever
drives the run ends its agent, on whichever host; attach shows when it has.
A run that has ended already stays as it is.`,
		Args: exactArgs(1, "one RUN"),
		RunE: func(c *cobra.Command, args []string) error { return a.cancel(c.Context(), server, args[0]) },
	}
	serverFlag(c.Flags(), &server)
	return c
}

func (a *app) cancel(ctx context.Context, server, id string) error {
	c, err := a.client(server)
	if err != nil {
		return err
	}
	r, err := c.run(ctx, id)
	if err != nil {
		return err
	}
	if r.FinishedAt > 0 {
		fmt.Fprintf(a.out, "%s has ended already: %s\n", printable(id), printable(r.Status))
		return nil
	}
	body, err := json.Marshal(map[string]string{"runId": id})
	if err != nil {
		return err
	}
	ctx, stop := context.WithTimeoutCause(ctx, answerTime, errTimeout)
	defer stop()
	resp, err := c.do(ctx, http.MethodPost, "/v1/chat/"+url.PathEscape(r.Sandbox)+"/cancel", nil, string(body), nil)
	if err != nil {
		return err
	}
	fmt.Fprintf(a.out, "%s is to be ended\n", printable(id))
	return resp.Body.Close()
}
