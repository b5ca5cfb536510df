package cli

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/aisandbox-go/aisandbox/modeltest"
)

func (a *app) mockModelCommand() *cobra.Command {
	var script, addr string
	c := &cobra.Command{
		Use:   "mock-model --script FILE",
		Short: "Serve a scripted model API, so that a real agent can be tried without an account",
		Long: `mock-model serves a model API on a loopback address whose answers come from a
script, and prints its URL. Point an agent at it:

  ANTHROPIC_BASE_URL=URL ANTHROPIC_API_KEY=any aisandbox run --harness claude-code …`,
		Args: exactArgs(0, "no arguments"),
		RunE: func(c *cobra.Command, _ []string) error {
			if script == "" {
				return &exitError{exitUsage, errors.New("mock-model needs --script FILE")}
			}
			return a.mockModel(c.Context(), script, addr)
		},
	}
	c.Flags().StringVar(&script, "script", "", "the script, YAML (see docs/mock-model.md)")
	c.Flags().StringVar(&addr, "addr", "127.0.0.1:0", "loopback address to listen on; port 0 picks one")
	return c
}

func (a *app) mockModel(ctx context.Context, file, addr string) error {
	src, err := readFile("--script", file, modeltest.MaxScriptBytes)
	if err != nil {
		return err
	}
	s, err := modeltest.ParseScript(file, src)
	if err != nil {
		return &exitError{exitUsage, err}
	}
	m, err := modeltest.New(s, modeltest.Options{})
	if err != nil {
		return &exitError{exitUsage, err}
	}
	srv, err := modeltest.Start(ctx, addr, m)
	if err != nil {
		return &exitError{exitUsage, err}
	}
	fmt.Fprintln(a.out, srv.URL)
	<-ctx.Done()
	return srv.Close()
}
