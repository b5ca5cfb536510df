//go:build linux

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/aisandbox-go/aisandbox/chat"
	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/harness/scripted"
	"github.com/aisandbox-go/aisandbox/harness/scripted/player"
	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/sandbox"
	"github.com/aisandbox-go/aisandbox/store/memstore"
	"github.com/aisandbox-go/aisandbox/workspace"
)

// The scripted agent says one word: what is measured is the way to it.
var (
	oneWord = scripted.Script{Steps: []player.Step{{Say: "hello"}}}
	prompt  = "say hello"
)

// sampleRepo makes a git repository such as an agent works on, small.
func (e *env) sampleRepo() (string, error) {
	dir := filepath.Join(e.tmp, "repo")
	if _, err := os.Stat(filepath.Join(dir, ".git")); err == nil {
		return dir, nil
	}
	for i := range 50 {
		name := filepath.Join(dir, fmt.Sprintf("pkg%d", i%5), fmt.Sprintf("file%d.txt", i))
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			return "", err
		}
		if err := os.WriteFile(name, []byte(strings.Repeat(name+"\n", 20)), 0o644); err != nil {
			return "", err
		}
	}
	for _, args := range [][]string{{"init", "-q"}, {"add", "."}, {"-c", "user.name=bench", "-c", "user.email=bench@localhost", "commit", "-q", "-m", "files"}} {
		cmd := exec.Command("git", args...)
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err != nil {
			return "", fmt.Errorf("git %s: %w: %s", args[0], err, out)
		}
	}
	return dir, nil
}

// thread is a conversation in a sandbox that is kept from turn to turn.
type thread struct {
	def  *sandbox.Def
	deps sandbox.Deps
	id   string
	// phases are the times, from the start of a turn, at which the run told of
	// something on its way to the first word.
	phases map[string][]time.Duration
}

func newThread(p provider.Provider, repo, id string) (*thread, error) {
	def, err := sandbox.Define(sandbox.Definition{
		ID: "bench", Provider: p,
		Workspace: workspace.Workspace{Source: workspace.Local{Path: repo}},
		Lifecycle: sandbox.Lifecycle{Snapshot: sandbox.NoSnapshot},
	})
	if err != nil {
		return nil, err
	}
	mem := memstore.New(memstore.Options{})
	return &thread{def: def, deps: sandbox.Deps{Instances: mem.Instances}, id: id, phases: map[string][]time.Duration{}}, nil
}

// turn runs one turn to its end and says when the agent's first word arrived.
func (t *thread) turn(ctx context.Context) (first time.Duration, err error) {
	start := time.Now()
	run, err := chat.Start(ctx, chat.Request{
		ThreadID: t.id,
		Messages: []event.Message{{ID: "user-1", Role: "user", Content: event.Text(prompt)}},
		Adapter:  scripted.Text(scripted.Options{Script: oneWord}),
		Use:      []chat.Middleware{sandbox.With(t.def, sandbox.WithOptions{Deps: t.deps})},
	})
	if err != nil {
		return 0, err
	}
	for ev, err := range run.Events(ctx) {
		if err != nil {
			return 0, err
		}
		switch ev := ev.(type) {
		case event.Custom:
			if first == 0 {
				t.phases[ev.Name] = append(t.phases[ev.Name], time.Since(start))
			}
		case event.TextMessageContent:
			if first == 0 {
				first = time.Since(start)
			}
		case event.RunError:
			return 0, fmt.Errorf("the run failed: %s", ev.Message)
		}
	}
	if first == 0 {
		return 0, errors.New("the run said nothing")
	}
	return first, nil
}

func (t *thread) destroy() {
	ctx, cancel := context.WithTimeout(context.Background(), cleanupTime)
	defer cancel()
	if err := sandbox.DestroyInstance(ctx, t.deps, t.def, sandbox.Key{ThreadID: t.id}); err != nil {
		fmt.Fprintln(os.Stderr, "bench: a sandbox may be left behind:", err)
	}
}

// barePlayer starts the same agent with the same script on this host and waits for
// its first line, then for its end.
func (e *env) barePlayer() (op, error) {
	exe, err := guestProgram()
	if err != nil {
		return nil, err
	}
	script, err := e.scriptFile()
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context) (time.Duration, error) {
		cmd := exec.CommandContext(ctx, exe, "play", script, "--include-partial-messages")
		cmd.Dir, cmd.Stdin, cmd.Stderr = e.tmp, strings.NewReader(prompt), os.Stderr
		out, err := cmd.StdoutPipe()
		if err != nil {
			return 0, err
		}
		start := time.Now()
		if err := cmd.Start(); err != nil {
			return 0, err
		}
		r := bufio.NewReader(out)
		_, err = r.ReadString('\n')
		first := time.Since(start)
		if err == nil {
			_, err = io.Copy(io.Discard, r)
		}
		return first, errors.Join(err, cmd.Wait())
	}, nil
}

// scriptFile is the script in the form that the agent reads.
func (e *env) scriptFile() (string, error) {
	b, err := oneWord.JSON()
	if err != nil {
		return "", err
	}
	name := filepath.Join(e.tmp, "script.json")
	return name, os.WriteFile(name, b, 0o600)
}

func firstEvent(ctx context.Context, e *env, name string) ([]Row, error) {
	p, err := e.provider(name)
	if err != nil {
		return nil, err
	}
	repo, err := e.sampleRepo()
	if err != nil {
		return nil, err
	}
	bare, err := e.barePlayer()
	if err != nil {
		return nil, err
	}
	kept, err := newThread(p, repo, "bench-kept")
	if err != nil {
		return nil, err
	}
	defer kept.destroy()
	if _, err := kept.turn(ctx); err != nil { // makes the sandbox
		return nil, err
	}
	kept.phases = map[string][]time.Duration{}
	warm, err := interleave(ctx, e.rounds(30), side{do: kept.turn}, side{do: bare})
	if err != nil {
		return nil, err
	}
	n := 0
	cold, err := interleave(ctx, e.rounds(10), side{do: func(ctx context.Context) (time.Duration, error) {
		n++
		fresh, err := newThread(p, repo, fmt.Sprintf("bench-cold-%d", n))
		if err != nil {
			return 0, err
		}
		defer fresh.destroy()
		return fresh.turn(ctx)
	}}, side{do: bare})
	if err != nil {
		return nil, err
	}
	w := Row{Metric: "first agent event, kept sandbox, " + name, Unit: "ms", Ours: millis(warm[0]), Baseline: "bare agent, first line", Base: millis(warm[1])}
	added := w.Ours.P50 - w.Base.P50
	w.goal("≤ 10 ms added", added <= 10)
	w.Note = fmt.Sprintf("%s ms are added.", number(added))
	if at := kept.phases[event.NameSandboxResumed]; len(at) > 0 {
		w.Note += fmt.Sprintf(" The sandbox is resumed after %s ms; the rest is the state of the work tree for the diff, the watch, the script and the agent's own start.", number(millis(at).P50))
	}
	c := Row{Metric: "first agent event, new sandbox, " + name, Unit: "ms", Ours: millis(cold[0]), Baseline: "bare agent, first line", Base: millis(cold[1])}
	return []Row{w, c}, nil
}
