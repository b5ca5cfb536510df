//go:build linux

// Command bench measures what users of aisandbox pay for it, each time next to
// what they would have without it, in the same run on the same machine. It prints
// a table and writes bench.json. docs/benchmarks.md explains the rows.
//
//	go run ./internal/bench [-only REGEXP] [-peers] [-rounds FACTOR] [-json FILE]
//
// The environment variables BENCH_ONLY and PEERS=1 do the same as the first two
// flags. The exit code says whether everything could be measured, not whether
// every goal was met: a noisy machine is no broken build.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"syscall"

	"github.com/aisandbox-go/aisandbox/guest"
)

// benchmark makes one or more rows. An error means that it could not measure.
type benchmark struct {
	name string
	peer bool // only with -peers
	run  func(ctx context.Context, e *env) ([]Row, error)
}

var benchmarks = []benchmark{
	{name: "exec-local", run: func(ctx context.Context, e *env) ([]Row, error) { return execOnHost(ctx, e, "local") }},
	{name: "exec-bwrap", run: func(ctx context.Context, e *env) ([]Row, error) { return execOnHost(ctx, e, "bwrap") }},
	{name: "exec-docker", run: execDocker},
	{name: "ready-local", run: readyLocal},
	{name: "ready-bwrap", run: readyBwrap},
	{name: "ready-docker", run: readyDocker},
	{name: "memory-local", run: func(ctx context.Context, e *env) ([]Row, error) { return guestMemory(ctx, e, "local") }},
	{name: "memory-bwrap", run: func(ctx context.Context, e *env) ([]Row, error) { return guestMemory(ctx, e, "bwrap") }},
	{name: "memory-docker", run: func(ctx context.Context, e *env) ([]Row, error) { return guestMemory(ctx, e, "docker") }},
	{name: "first-event-local", run: func(ctx context.Context, e *env) ([]Row, error) { return firstEvent(ctx, e, "local") }},
	{name: "first-event-bwrap", run: func(ctx context.Context, e *env) ([]Row, error) { return firstEvent(ctx, e, "bwrap") }},
	{name: "files-docker", run: filesDocker},
	{name: "decode", run: decode},
	{name: "guest-size", run: guestSize},

	{name: "peer-sandbox-agent", peer: true, run: peerSandboxAgent},
	{name: "peer-tanstack-start", peer: true, run: peerTanStackStart},
	{name: "peer-tanstack-decode", peer: true, run: peerTanStackDecode},
}

func main() {
	guest.Hook()
	if len(os.Args) > 1 && os.Args[1] == decodeCommand {
		os.Exit(decodeMain(os.Args[2:]))
	}
	only := flag.String("only", os.Getenv("BENCH_ONLY"), "run the benchmarks whose names match this regular expression")
	peers := flag.Bool("peers", os.Getenv("PEERS") != "" && os.Getenv("PEERS") != "0", "measure what others offer too (needs node, and npm once)")
	rounds := flag.Float64("rounds", 1, "do so many times as much of everything")
	out := flag.String("json", "bench.json", "file for the results")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	code, err := runAll(ctx, *only, *peers, *rounds, *out)
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
	}
	stop()
	os.Exit(code)
}

// runAll returns the exit code: 1 when something could not be measured.
func runAll(ctx context.Context, only string, peers bool, rounds float64, out string) (code int, err error) {
	want, err := regexp.Compile(only)
	if err != nil {
		return 2, fmt.Errorf("-only: %w", err)
	}
	e, err := newEnv(rounds)
	if err != nil {
		return 1, err
	}
	defer func() { err = errors.Join(err, e.close()) }()

	var rows []Row
	for _, b := range benchmarks {
		if !want.MatchString(b.name) || b.peer && !peers {
			continue
		}
		fmt.Fprintln(os.Stderr, "bench:", b.name, "…")
		got, err := b.run(ctx, e)
		if ctx.Err() != nil {
			return 1, context.Cause(ctx)
		}
		if err != nil {
			got = append(got, Row{Metric: b.name, Missing: err.Error()})
			if !b.peer {
				code = 1
			}
		}
		for i := range got {
			got[i].Name = b.name
		}
		rows = append(rows, got...)
	}
	if len(rows) == 0 {
		return 2, fmt.Errorf("-only: %q matches no benchmark", only)
	}
	m := machine(ctx, e)
	fmt.Println(m.String() + "\n")
	if err := writeTable(os.Stdout, rows); err != nil {
		return 1, err
	}
	return code, writeJSON(out, m, rows)
}

func writeJSON(name string, m Machine, rows []Row) error {
	type row struct {
		Row
		Ratio float64 `json:"ratio,omitempty"`
	}
	doc := struct {
		Machine Machine `json:"machine"`
		Rows    []row   `json:"rows"`
	}{Machine: m}
	for _, r := range rows {
		doc.Rows = append(doc.Rows, row{r, r.Ratio()})
	}
	b, err := json.MarshalIndent(doc, "", "  ")
	if err != nil {
		return err
	}
	if !filepath.IsAbs(name) {
		root, err := moduleRoot()
		if err != nil {
			return err
		}
		name = filepath.Join(root, name)
	}
	return os.WriteFile(name, append(b, '\n'), 0o644)
}
