//go:build linux

package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/aisandbox-go/aisandbox/chat"
	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/harness/claudecode"
	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/sandbox"
)

// peers returns the folder with the installed npm packages; it installs what its
// lockfile pins when they are not there.
func (e *env) peers(ctx context.Context) (string, error) {
	dir := filepath.Join(e.root, "internal", "bench", "peers")
	if _, err := os.Stat(filepath.Join(dir, "node_modules", ".package-lock.json")); err == nil {
		return dir, nil
	}
	cmd := exec.CommandContext(ctx, "npm", "ci", "--no-audit", "--no-fund")
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("npm ci in %s: %w: %s", dir, err, bytes.TrimSpace(out))
	}
	return dir, nil
}

// startChild starts a program that must not outlive this one. stop ends it.
func startChild(cmd *exec.Cmd) (stop func(), err error) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	return func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}, nil
}

// agentServer is a running server of @sandbox-agent/cli.
type agentServer struct {
	url  string
	pid  int
	http http.Client
	stop func()
}

// startAgentServer starts the server on loopback. It is the native program, not
// the npm package's launcher, whose start of Node.js would count against it.
func startAgentServer(peers string) (*agentServer, error) {
	exe := filepath.Join(peers, "node_modules", "@sandbox-agent", "cli-linux-x64", "bin", "sandbox-agent")
	if err := os.Chmod(exe, 0o755); err != nil { // what the package's install script does
		return nil, fmt.Errorf("no program of @sandbox-agent/cli for this machine: %w", err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	addr := l.Addr().(*net.TCPAddr)
	_ = l.Close()
	cmd := exec.Command(exe, "server", "--no-token", "--no-telemetry", "--host", "127.0.0.1", "--port", strconv.Itoa(addr.Port))
	stop, err := startChild(cmd)
	if err != nil {
		return nil, err
	}
	return &agentServer{url: "http://" + addr.String(), pid: cmd.Process.Pid, stop: stop}, nil
}

// exec runs true through the server.
func (s *agentServer) exec(ctx context.Context) error {
	body := fmt.Sprintf(`{"command":%q,"args":[]}`, nothing)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.url+"/v1/processes/run", strings.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	res, err := s.http.Do(req)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	var got struct {
		ExitCode *int `json:"exitCode"`
	}
	if err := json.NewDecoder(res.Body).Decode(&got); err != nil {
		return fmt.Errorf("sandbox-agent: %s: %w", res.Status, err)
	}
	_, _ = io.Copy(io.Discard, res.Body) // so that the connection is used again
	if got.ExitCode == nil || *got.ExitCode != 0 {
		return fmt.Errorf("sandbox-agent: %s: no exit code 0", res.Status)
	}
	return nil
}

// ready waits for the first answered exec: a refused connection is tried again.
func (s *agentServer) ready(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	for {
		err := s.exec(ctx)
		if !errors.Is(err, syscall.ECONNREFUSED) {
			return err
		}
		time.Sleep(200 * time.Microsecond)
	}
}

func (s *agentServer) close() {
	s.http.CloseIdleConnections()
	s.stop()
}

func peerSandboxAgent(ctx context.Context, e *env) ([]Row, error) {
	peers, err := e.peers(ctx)
	if err != nil {
		return nil, err
	}
	p, err := e.provider("local")
	if err != nil {
		return nil, err
	}
	const peer = "@sandbox-agent/cli 0.4.2"
	start, err := interleave(ctx, e.rounds(20), side{do: ready(p)}, side{do: timed(func(ctx context.Context) error {
		s, err := startAgentServer(peers)
		if err != nil {
			return err
		}
		defer s.close()
		return s.ready(ctx)
	})})
	if err != nil {
		return nil, err
	}
	b, err := e.box(ctx, "local")
	if err != nil {
		return nil, err
	}
	defer b.destroy()
	s, err := startAgentServer(peers)
	if err != nil {
		return nil, err
	}
	defer s.close()
	if err := s.ready(ctx); err != nil {
		return nil, err
	}
	execs, err := interleave(ctx, memoryExecs/5, side{guestExec(b.Handle), 5}, side{timed(s.exec), 5})
	if err != nil {
		return nil, err
	}
	m, ok := provider.As[provider.Meter](b.Handle)
	if !ok {
		return nil, errors.New("the sandbox has no meter: no guest runs in it")
	}
	u, err := m.Usage(ctx)
	if err != nil {
		return nil, err
	}
	ours := float64(u.GuestMemory) / 1e6
	theirs, err := memoryOf(strconv.Itoa(s.pid), "VmRSS")
	if err != nil {
		return nil, err
	}
	return []Row{
		{Metric: "start to first exec answered, local", Unit: "ms", Ours: millis(start[0]), Baseline: peer, Base: millis(start[1]),
			Note: "The peer's server is started without its launcher, and is waited for by asking it every 0.2 ms; its end counts, too, which takes less than a millisecond."},
		{Metric: "exec of true, local", Unit: "ms", Ours: millis(execs[0]), Baseline: peer, Base: millis(execs[1])},
		{Metric: fmt.Sprintf("memory after %d execs, local", memoryExecs), Unit: "MB", Ours: single(ours), Baseline: peer, Base: single(theirs)},
	}, nil
}

// tanStack is a running turn.mjs.
type tanStack struct {
	in   io.Writer
	out  *bufio.Reader
	err  bytes.Buffer
	stop func()
}

// peerTurn is what turn.mjs tells of a turn.
type peerTurn struct {
	First float64 `json:"first"` // ms
	decoded
}

// startTanStack starts turn.mjs in the work tree dir. script is shell text that
// does what claude would.
func startTanStack(peers, dir, script string) (*tanStack, error) {
	t := &tanStack{}
	cmd := exec.Command("node", "turn.mjs", dir, script)
	cmd.Dir, cmd.Stderr = peers, &t.err
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	t.in, t.out = in, bufio.NewReader(out)
	t.stop, err = startChild(cmd)
	return t, err
}

func (t *tanStack) turn() (peerTurn, error) {
	var got peerTurn
	if _, err := io.WriteString(t.in, "\n"); err != nil {
		return got, err
	}
	line, err := t.out.ReadBytes('\n')
	if err != nil {
		t.stop()
		return got, fmt.Errorf("turn.mjs: %w: %s", err, bytes.TrimSpace(t.err.Bytes()))
	}
	return got, json.Unmarshal(line, &got)
}

const tanStackName = "@tanstack/ai 0.42.0, ai-claude-code 0.2.3"

func peerTanStackStart(ctx context.Context, e *env) ([]Row, error) {
	peers, err := e.peers(ctx)
	if err != nil {
		return nil, err
	}
	repo, err := e.sampleRepo()
	if err != nil {
		return nil, err
	}
	exe, err := guestProgram()
	if err != nil {
		return nil, err
	}
	script, err := e.scriptFile()
	if err != nil {
		return nil, err
	}
	p, err := e.provider("local")
	if err != nil {
		return nil, err
	}
	kept, err := newThread(p, repo, "bench-peer")
	if err != nil {
		return nil, err
	}
	defer kept.destroy()
	if _, err := kept.turn(ctx); err != nil { // makes the sandbox
		return nil, err
	}
	// Both start the same agent with the same script, in a sandbox that exists.
	ts, err := startTanStack(peers, repo, "exec "+exe+" play "+script+" --include-partial-messages")
	if err != nil {
		return nil, err
	}
	defer ts.stop()
	theirs := func(context.Context) (time.Duration, error) {
		got, err := ts.turn()
		return time.Duration(got.First * float64(time.Millisecond)), err
	}
	// Node.js needs more than the one round to warm up.
	for range 10 {
		if _, err := theirs(ctx); err != nil {
			return nil, err
		}
	}
	t, err := interleave(ctx, e.rounds(30), side{do: kept.turn}, side{do: theirs})
	if err != nil {
		return nil, err
	}
	return []Row{{Metric: "first agent event, kept sandbox, local", Unit: "ms", Ours: millis(t[0]), Baseline: tanStackName, Base: millis(t[1]),
		Note: "Ours has taken the state of the work tree by then, so that its diff shows what the agent changed and nothing else; the peer's is a plain git diff."}}, nil
}

func peerTanStackDecode(ctx context.Context, e *env) ([]Row, error) {
	peers, err := e.peers(ctx)
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	rec := filepath.Join(e.root, recording)
	const turns = 20_000
	var ours, theirs decodings
	_, err = interleave(ctx, e.rounds(3),
		side{do: e.decoder(&ours, lines, self, decodeCommand, rec, strconv.Itoa(turns), "events")},
		side{do: e.decoder(&theirs, lines, "node", filepath.Join(peers, "decode.mjs"), rec, strconv.Itoa(turns))})
	if err != nil {
		return nil, err
	}
	rows := []Row{
		{Metric: "decode, 20,000 tool turns, in lines", Unit: "lines/s", HigherIsBetter: true, Ours: stat(ours.rate), Baseline: "translateSdkStream of " + tanStackName, Base: stat(theirs.rate),
			Note: "The translation alone, fed with the same lines. Lines, because the two do not make the same number of events of them."},
		{Metric: "peak memory of that", Unit: "MB", Ours: stat(ours.rss), Baseline: "the same, with Node.js", Base: stat(theirs.rss)},
	}
	whole, err := wholeRuns(ctx, e, peers, rec)
	return append(rows, whole...), err
}

// wholeRuns sends transcripts through everything: a program that prints them, the
// sandbox, the decoder, the engine, to a reader.
func wholeRuns(ctx context.Context, e *env, peers, rec string) ([]Row, error) {
	t, err := loadTranscript(rec)
	if err != nil {
		return nil, err
	}
	repo, err := e.sampleRepo()
	if err != nil {
		return nil, err
	}
	var rows []Row
	for _, turns := range []int{2_000, 20_000} {
		file := filepath.Join(e.tmp, "transcript.ndjson")
		if err := writeTranscript(file, t, turns); err != nil {
			return rows, err
		}
		script := "cat >/dev/null; exec cat " + file
		var ours, theirs decodings
		_, err := interleave(ctx, e.rounds(2),
			side{do: func(ctx context.Context) (time.Duration, error) { return e.wholeRun(ctx, &ours, repo, script) }},
			side{do: func(context.Context) (time.Duration, error) {
				ts, err := startTanStack(peers, repo, "{ "+script+"; }")
				if err != nil {
					return 0, err
				}
				defer ts.stop()
				got, err := ts.turn()
				if err == nil {
					theirs.rate = append(theirs.rate, float64(got.Events)/got.Seconds)
					theirs.rss = append(theirs.rss, got.MaxRSS)
				}
				return 0, err
			}})
		if err != nil {
			return rows, err
		}
		rows = append(rows, Row{Metric: fmt.Sprintf("whole run of %s tool turns, local", number(float64(turns))), Unit: "events/s", HigherIsBetter: true,
			Ours: stat(ours.rate), Baseline: tanStackName, Base: stat(theirs.rate),
			Note: fmt.Sprintf("From the program that prints the transcript to the reader of the events. The peer's process had %s MB at its largest.", number(stat(theirs.rss).P50))})
	}
	return rows, nil
}

func writeTranscript(name string, t transcript, turns int) error {
	f, err := os.Create(name)
	if err != nil {
		return err
	}
	w := bufio.NewWriterSize(f, 1<<20)
	err = t.play(turns, func(b []byte) error { _, err := w.Write(b); return err })
	return errors.Join(err, w.Flush(), f.Close())
}

func (e *env) wholeRun(ctx context.Context, ds *decodings, repo, script string) (time.Duration, error) {
	p, err := e.provider("local")
	if err != nil {
		return 0, err
	}
	t, err := newThread(p, repo, "bench-whole")
	if err != nil {
		return 0, err
	}
	defer t.destroy()
	start := time.Now()
	run, err := chat.Start(ctx, chat.Request{
		ThreadID: t.id,
		Messages: []event.Message{{ID: "user-1", Role: "user", Content: event.Text(prompt)}},
		Adapter: claudecode.Text("sonnet", claudecode.Options{
			Executable: []string{"sh", "-c", script, "claude"},
			HostEnv: func(name string) string {
				if name == "ANTHROPIC_API_KEY" { // asked for, though nobody uses it
					return "none"
				}
				return ""
			},
		}),
		Use: []chat.Middleware{sandbox.With(t.def, sandbox.WithOptions{Deps: t.deps})},
	})
	if err != nil {
		return 0, err
	}
	n := 0
	for ev, err := range run.Events(ctx) {
		if err != nil {
			return 0, err
		}
		if bad, ok := ev.(event.RunError); ok {
			return 0, fmt.Errorf("the run failed: %s", bad.Message)
		}
		n++
	}
	took := time.Since(start)
	ds.rate = append(ds.rate, float64(n)/took.Seconds())
	return took, nil
}
