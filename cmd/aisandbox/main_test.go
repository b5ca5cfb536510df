package main

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/aisandbox-go/aisandbox/config"
	"github.com/aisandbox-go/aisandbox/guest"
	"github.com/aisandbox-go/aisandbox/internal/testenv"
)

// The test binary is the command, and the guest program too.
func TestMain(m *testing.M) {
	guest.Hook(play)
	testscript.Main(tests{m}, map[string]func(){"aisandbox": main})
}

type tests struct{ m *testing.M }

func (t tests) Run() int {
	defer testenv.StopPostgres()
	return t.m.Run()
}

func TestScripts(t *testing.T) { scripts(t, "../../cli/testdata", nil) }

func TestPostgresScripts(t *testing.T) {
	scripts(t, "../../cli/testdata/postgres", map[string]string{"DATABASE_URL": testenv.Postgres(t)})
}

func scripts(t *testing.T, dir string, env map[string]string) {
	testscript.Run(t, testscript.Params{
		Dir: dir,
		Setup: func(e *testscript.Env) error {
			for n, v := range env {
				e.Setenv(n, v)
			}
			// A server leaves agents and sandboxes behind on purpose.
			e.Defer(func() { killAll(t, e.WorkDir) })
			e.Setenv("HOME", e.WorkDir)
			e.Setenv("XDG_STATE_HOME", e.WorkDir+"/state")
			e.Setenv("XDG_CACHE_HOME", e.WorkDir+"/cache")
			for _, n := range []string{"CI", "PATH"} {
				e.Setenv(n, os.Getenv(n))
			}
			return nil
		},
		Cmds: map[string]func(ts *testscript.TestScript, neg bool, args []string){
			"freeaddr": freeAddr, "ready": ready, "post": post, "terminate": terminate,
		},
	})
}

// killAll ends what has a mark in its command line or environment.
func killAll(t *testing.T, mark string) {
	testenv.Eventually(t, 20*time.Second, "processes with "+mark+" end", func() bool {
		found := testenv.Processes(mark)
		for _, p := range found {
			id, _, _ := strings.Cut(p, ":")
			if pid, err := strconv.Atoi(id); err == nil {
				_ = syscall.Kill(pid, syscall.SIGKILL)
			}
		}
		return len(found) == 0
	})
}

// freeAddr NAME sets a variable to a loopback address where nothing listens.
func freeAddr(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: freeaddr NAME")
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	ts.Check(err)
	ts.Setenv(args[0], l.Addr().String())
	ts.Check(l.Close())
}

// scriptTime bounds what a script waits for.
const scriptTime = 2 * time.Minute

// ready URL waits until a server takes runs.
func ready(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: ready URL")
	}
	ctx, stop := context.WithTimeout(context.Background(), scriptTime)
	defer stop()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		resp, err := request(ctx, http.MethodGet, args[0]+"/readyz", "")
		if err == nil {
			ts.Check(resp.Body.Close())
			if resp.StatusCode == http.StatusOK {
				return
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			ts.Fatalf("%s is not ready: %v", args[0], err)
		}
	}
}

func request(ctx context.Context, method, url, body string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	return http.DefaultClient.Do(req)
}

// terminate sends SIGTERM to all that runs in the background; kill knows other
// signals only.
func terminate(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 0 {
		ts.Fatalf("usage: terminate")
	}
	for _, c := range ts.BackgroundCmds() {
		ts.Check(c.Process.Signal(syscall.SIGTERM))
	}
}

// post URL BODY OUT [UNTIL] posts a file and saves the answer in another, up to the
// first line with UNTIL, at which it hangs up.
func post(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) < 3 {
		ts.Fatalf("usage: post URL BODY OUT [UNTIL]")
	}
	ctx, stop := context.WithTimeout(context.Background(), scriptTime)
	defer stop()
	resp, err := request(ctx, http.MethodPost, args[0], ts.ReadFile(args[1]))
	ts.Check(err)
	defer func() { _ = resp.Body.Close() }()
	if ok := resp.StatusCode/100 == 2; ok == neg {
		ts.Fatalf("%s", resp.Status)
	}
	out, err := os.Create(ts.MkAbs(args[2]))
	ts.Check(err)
	r := bufio.NewReader(resp.Body)
	for {
		line, err := r.ReadString('\n')
		_, werr := io.WriteString(out, line)
		ts.Check(werr)
		if err == io.EOF {
			if len(args) > 3 {
				ts.Fatalf("the answer ended without %q", args[3])
			}
			break
		}
		ts.Check(err)
		if len(args) > 3 && strings.Contains(line, args[3]) {
			break
		}
	}
	ts.Check(out.Close())
}

// What docs/configuration.md shows must be taken by the command, options of
// providers and agents included.
func TestConfigurationExample(t *testing.T) {
	doc, err := os.ReadFile("../../docs/configuration.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, ok := strings.Cut(string(doc), "```yaml\n")
	if !ok {
		t.Fatal("no example")
	}
	example, _, _ := strings.Cut(rest, "```")
	f, err := config.Parse("example", []byte(example))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Build(t.Context(), registry(), config.BuildOptions{Dry: true}); err != nil {
		t.Error(err)
	}
}
