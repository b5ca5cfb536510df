package cli

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/aisandbox-go/aisandbox/config"
)

func (a *app) configCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "config",
		Short: "Check a configuration of serve, or print its JSON Schema",
		Args:  exactArgs(0, "a command"),
		RunE:  func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(&cobra.Command{
		Use:   "check FILE",
		Short: "Say what in a configuration can't be used, by line and column",
		Long: `check reads a configuration as serve does, but takes no value from the
environment and asks no provider whether it works, so that it says the same on
every machine.`,
		Args: exactArgs(1, "one FILE"),
		RunE: func(c *cobra.Command, args []string) error { return a.checkConfig(c.Context(), args[0]) },
	}, &cobra.Command{
		Use:   "schema",
		Short: "Print the JSON Schema of the configuration, for editors",
		Args:  exactArgs(0, "no arguments"),
		RunE: func(*cobra.Command, []string) error {
			_, err := a.out.Write(config.Schema())
			return err
		},
	})
	return c
}

func (a *app) checkConfig(ctx context.Context, name string) error {
	src, err := readFile("FILE", name, config.MaxFile)
	if err != nil {
		return err
	}
	f, err := config.Parse(name, src)
	if err != nil {
		return usage(err)
	}
	if _, err := f.Build(ctx, a.reg, config.BuildOptions{Dry: true}); err != nil {
		return usage(err)
	}
	fmt.Fprintf(a.out, "%s: %s: %s\n", name, plural(len(f.Sandboxes), "sandbox definition"), strings.Join(slices.Sorted(maps.Keys(f.Sandboxes)), ", "))
	return nil
}
