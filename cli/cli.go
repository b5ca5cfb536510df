// Package cli is the aisandbox command. [Main] is all it exports: a program that
// adds a provider or a harness of its own is a main function with another
// registry.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/aisandbox-go/aisandbox/config"
	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/store"
)

// Main runs the command line of this process and returns its exit code.
func Main(reg config.Registry) int {
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	sigs := make(chan os.Signal, 2)
	signal.Notify(sigs, os.Interrupt, syscall.SIGTERM)
	defer signal.Stop(sigs)
	go func() {
		<-sigs
		cancel(errInterrupted)
		<-sigs // a second one doesn't wait for the clean-up
		os.Exit(exitInterrupted)
	}()
	a := &app{reg: reg, in: os.Stdin, out: os.Stdout, err: os.Stderr, getenv: os.Getenv}
	return a.run(ctx, os.Args[1:])
}

// app is one invocation.
type app struct {
	reg     config.Registry
	in      io.Reader
	out     io.Writer
	err     io.Writer
	getenv  func(string) string
	verbose bool
	printed bool // an event was printed
}

func (a *app) run(ctx context.Context, args []string) int {
	root := &cobra.Command{
		Use:   "aisandbox",
		Short: "Put a coding agent to work in a sandbox",
		Long: `aisandbox puts a coding agent to work on a git repository inside of a sandbox,
streams what it does and ends with the diff.

Exit codes: 0 done; 1 the run failed; 2 a value that can't be used; 3 the sandbox
could not be made or set up, or no server answers; 124 timeout; 130 interrupted. exec passes the
command's own code through and uses 125, 126 and 127 as container tools do.`,
		SilenceErrors:     true,
		SilenceUsage:      true,
		Version:           version(),
		CompletionOptions: cobra.CompletionOptions{HiddenDefaultCmd: true},
	}
	root.SetArgs(args)
	root.SetIn(a.in)
	root.SetOut(a.out)
	root.SetErr(a.err)
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		return &exitError{exitUsage, fmt.Errorf("%w; see %s --help", err, c.CommandPath())}
	})
	root.PersistentFlags().BoolVarP(&a.verbose, "verbose", "v", false, "log what happens to stderr")
	root.AddCommand(a.runCommand(), a.execCommand(), a.demoCommand(), a.replayCommand(), a.doctorCommand(), a.mockModelCommand(),
		a.serveCommand(), a.attachCommand(), a.cancelCommand(), a.runsCommand(), a.sandboxesCommand(), a.reapCommand(), a.configCommand())
	c, err := root.ExecuteContextC(ctx)
	if err == nil {
		return exitOK
	}
	a.failure(c, err)
	var ex *exitError
	if !errors.As(err, &ex) || ex.Err != nil {
		fmt.Fprintln(a.err, "aisandbox: "+printable(err.Error()))
	}
	if !errors.As(err, &ex) && isUnknownCommand(root, args) {
		return exitUsage
	}
	return codeOf(err)
}

// eventStream annotates the commands that print a run's events.
const eventStream = "events"

// failure puts what kept a run from starting where its events would have been, so
// that a program which reads them learns of it as of any other failure.
func (a *app) failure(c *cobra.Command, err error) {
	asJSON := c.Flags().Lookup("json")
	if a.printed || c.Annotations[eventStream] == "" || asJSON == nil || asJSON.Value.String() != "true" {
		return
	}
	code := "internal"
	if codeOf(err) == exitUsage {
		code = "invalid_input"
	}
	// It fails where nobody reads on, and then stderr has the error all the same.
	_ = a.printEvent(event.RunError{Message: err.Error(), Code: store.Code(err, code)})
}

// printEvent prints an event as a line of JSON.
func (a *app) printEvent(ev event.Event) error {
	b, err := event.Encode(ev)
	if err != nil {
		return err
	}
	a.printed = true
	_, err = a.out.Write(append(b, '\n'))
	return err
}

// isUnknownCommand tells cobra's complaint about the command line, which has no
// type of its own, from the error of a command.
func isUnknownCommand(root *cobra.Command, args []string) bool {
	_, _, err := root.Find(args)
	return err != nil
}

// noArgs and the like are cobra's argument checks with our exit code.
func exactArgs(n int, what string) cobra.PositionalArgs {
	return func(c *cobra.Command, args []string) error {
		if len(args) == n {
			return nil
		}
		return &exitError{exitUsage, fmt.Errorf("%s takes %s, got %d; see %s --help", c.CommandPath(), what, len(args), c.CommandPath())}
	}
}

// logger logs to stderr where --verbose was given.
func (a *app) logger() *slog.Logger {
	if !a.verbose {
		return slog.New(slog.DiscardHandler)
	}
	return slog.New(slog.NewTextHandler(a.err, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// version is what the build says of itself.
func version() string {
	bi, ok := debug.ReadBuildInfo()
	if !ok || bi.Main.Version == "" {
		return "devel"
	}
	return bi.Main.Version
}

// readFile reads a bounded file that a flag names.
func readFile(flag, name string, most int64) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, &exitError{exitUsage, fmt.Errorf("%s: %w", flag, err)}
	}
	defer func() { _ = f.Close() }()
	b, err := io.ReadAll(io.LimitReader(f, most+1))
	if err != nil {
		return nil, &exitError{exitUsage, fmt.Errorf("%s: %w", flag, err)}
	}
	if int64(len(b)) > most {
		return nil, &usageError{flag, name, fmt.Sprintf("is longer than %d bytes", most)}
	}
	return b, nil
}
