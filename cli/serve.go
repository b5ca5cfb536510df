package cli

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
)

// defaultAddr is where a server listens, and where its clients look for it.
const defaultAddr = "127.0.0.1:8080"

// shutdownTime bounds the end of a server: its runs are left to others, and its
// streams are cut.
const shutdownTime = 20 * time.Second

func (a *app) serveCommand() *cobra.Command {
	var f hostFlags
	var addr string
	c := &cobra.Command{
		Use:   "serve [flags]",
		Short: "Serve runs over HTTP: they outlive their clients, and this server",
		Long: `serve offers each sandbox of the configuration as an endpoint /v1/chat/NAME that
AG-UI clients speak with. Runs are durable: whoever comes back reads on where it
was, and what a server that ended was driving, the next one goes on with.

Without --config it serves the sandbox "demo", whose agent needs no account.

SIGTERM ends the server within seconds and leaves its agents at work; a second
one doesn't wait.`,
		Args: exactArgs(0, "no arguments"),
		RunE: func(c *cobra.Command, _ []string) error { return a.serve(c.Context(), f, addr) },
	}
	f.register(c.Flags())
	c.Flags().StringVar(&addr, "addr", "", "host:port to listen on (default "+defaultAddr+"); beyond loopback the configuration must have keys")
	return c
}

func (a *app) serve(ctx context.Context, f hostFlags, addr string) (err error) {
	log := a.serverLogger()
	h, err := a.host(ctx, f, log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, h.close()) }()
	for _, a := range []string{h.built.Addr, defaultAddr} {
		if addr == "" {
			addr = a
		}
	}
	ln, err := h.listen(ctx, addr)
	if err != nil {
		stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTime)
		defer cancel()
		return errors.Join(err, h.server.Shutdown(stop))
	}
	for _, w := range h.built.Warnings {
		fmt.Fprintln(a.err, "aisandbox: warning: "+w)
	}
	a.greet(h, "http://"+ln.Addr().String(), f.config == "")
	return h.run(ctx, ln)
}

// serverLogger logs what a person should know of, or everything with --verbose.
func (a *app) serverLogger() *slog.Logger {
	level := slog.LevelWarn
	if a.verbose {
		level = slog.LevelDebug
	}
	return slog.New(slog.NewTextHandler(a.err, &slog.HandlerOptions{Level: level}))
}

// listen listens, if the server may there.
func (h *host) listen(ctx context.Context, addr string) (net.Listener, error) {
	if _, _, err := net.SplitHostPort(addr); err != nil {
		return nil, &usageError{"--addr", addr, "write host:port, such as " + defaultAddr}
	}
	if err := h.server.RequireAuthFor(addr); err != nil {
		return nil, &usageError{"--addr", addr, "without keys a server listens on loopback only: add auth.keys to the configuration (docs/configuration.md), or use " + defaultAddr}
	}
	ln, err := (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, &exitError{exitUsage, fmt.Errorf("--addr: %w", err)}
	}
	return ln, nil
}

// run serves until ctx ends or a part fails, and then ends all of them: what works
// in the background, the runs with their readers, and then the listener.
func (h *host) run(ctx context.Context, ln net.Listener) error {
	background, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	hs := h.server.HTTPServer()
	var g errgroup.Group
	part := func(name string, f func() error) {
		g.Go(func() error {
			err := f()
			switch {
			case background.Err() != nil && (err == nil || errors.Is(err, context.Canceled) || errors.Is(err, context.Cause(background))):
				return nil // it was told to end
			case err == nil:
				err = errors.New("ended by itself")
			}
			err = fmt.Errorf("%s: %w", name, err)
			stop(err)
			return err
		})
	}
	for _, f := range services(h) {
		part("background", func() error { return f(background) })
	}
	part("listen on "+ln.Addr().String(), func() error {
		err := hs.Serve(ln)
		if errors.Is(err, http.ErrServerClosed) {
			err = nil
		}
		return err
	})
	g.Go(func() error {
		<-background.Done()
		sctx, cancel := context.WithTimeoutCause(context.WithoutCancel(ctx), shutdownTime, errTimeout)
		defer cancel()
		return errors.Join(h.server.Shutdown(sctx), hs.Shutdown(sctx))
	})
	return g.Wait()
}

// greet says where the server is, and how to try it.
func (a *app) greet(h *host, url string, demo bool) {
	fmt.Fprintf(a.out, "serving on %s, runs are kept in %s\n", url, h.storeName())
	for _, name := range slices.Sorted(maps.Keys(h.built.Definitions)) {
		d := h.built.Definitions[name]
		fmt.Fprintf(a.out, "  %s/v1/chat/%s  (%s in %s)\n", url, name, d.Harness, d.Provider)
	}
	if !demo {
		return
	}
	server := ""
	if url != "http://"+defaultAddr {
		server = " --server " + url
	}
	fmt.Fprintf(a.out, `
Start a run, and watch it:

  curl -N %s/v1/chat/%s -H 'Content-Type: application/json' -d '%s'

Break it off with Ctrl-C: the agent goes on. Read on, from the start or in the middle:

  aisandbox runs%s
  aisandbox attach%s RUN
`, url, demoName, tryBody(), server, server)
}

// tryBody is the body of a run, with ids that are new each time where a shell
// reads it between single quotes.
func tryBody() string {
	const id = `'$(date +%s)'`
	prompt := "Mend the failing test"
	if b, err := demoFiles.ReadFile("demo/prompt.txt"); err == nil {
		prompt = strings.TrimSpace(string(b))
	}
	return `{"threadId":"thread-` + id + `","runId":"run-` + id + `","messages":[{"id":"m1","role":"user","content":"` + prompt + `"}]}`
}
