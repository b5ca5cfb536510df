package guest

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/aisandbox-go/aisandbox/journal/frame"
	"github.com/aisandbox-go/aisandbox/provider"
)

var testNonce = []byte("0123456789abcdef0123456789abcdef")

func launch(t *testing.T, g *Handle, token string, cmd provider.Cmd) {
	t.Helper()
	t.Cleanup(func() { _ = g.Kill(t.Context(), token, 9) })
	if err := g.Launch(t.Context(), token, cmd, provider.LaunchOptions{RunID: "run " + token, Nonce: testNonce}); err != nil {
		t.Fatal(err)
	}
}

// journal reads a whole journal, to its process's end.
type journal struct {
	stdout, stderr string
	header         bool
	exit           *frame.Exit
	verified       bool
	lines          int64
}

func readJournal(t *testing.T, g *Handle, token string) journal {
	t.Helper()
	r, err := g.Tail(t.Context(), token, 0, true)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	var j journal
	var tally frame.Tally
	fr := frame.NewReader(r, 0)
	for {
		f, err := fr.Next()
		if err == io.EOF {
			return j
		}
		if err != nil {
			t.Fatal(err)
		}
		tally.Add(f)
		j.lines = tally.Lines
		switch f.Type {
		case frame.TypeHeader:
			j.header = true
		case frame.TypeLine:
			j.stdout += string(f.Payload) + "\n"
		case frame.TypePartial:
			j.stdout += string(f.Payload)
		case frame.TypeStderr:
			j.stderr += string(f.Payload)
		case frame.TypeExit:
			e, err := frame.ParseExit(f.Payload)
			if err != nil {
				t.Fatal(err)
			}
			j.exit = &e
			j.verified = tally.Verify(e, testNonce, "run "+token)
		}
	}
}

func TestLaunch(t *testing.T) {
	both(t, func(t *testing.T, g *Handle) {
		ctx := t.Context()
		if p, err := g.Probe(ctx, "r1"); err != nil || p.State != provider.ProbeAbsent {
			t.Errorf("Probe before: %+v, %v", p, err)
		}
		launch(t, g, "r1", provider.Cmd{
			Argv: shell("cat; echo err >&2; pwd; printf '%s' \"$K\"; exit 7"), Stdin: strings.NewReader("one\ntwo\n"), Env: []string{"K=unfinished"},
		})
		j := readJournal(t, g, "r1")
		if want := "one\ntwo\n" + g.Root() + "\nunfinished"; j.stdout != want || j.stderr != "err\n" || !j.header {
			t.Errorf("stdout %q, want %q; stderr %q; header %v", j.stdout, want, j.stderr, j.header)
		}
		if j.exit == nil || j.exit.Code != 7 || !j.verified {
			t.Errorf("exit %+v, verified %v", j.exit, j.verified)
		}
		p, err := g.Probe(ctx, "r1")
		if err != nil || p.State != provider.ProbeExited || p.Exit == nil || p.Exit.Code != 7 || p.Lines != 4 || !bytes.Equal(p.MAC, j.exit.MAC[:]) || p.Level == 0 || p.LastBeat.IsZero() {
			t.Errorf("Probe after: %+v, %v", p, err)
		}
		// Any offset, without following.
		r, err := g.Tail(ctx, "r1", p.Size-1, false)
		if err != nil {
			t.Fatal(err)
		}
		if b, err := io.ReadAll(r); len(b) != 1 || err != nil {
			t.Errorf("the last byte: %d bytes, %v", len(b), err)
		}
		r.Close()
		if err := g.Launch(ctx, "r1", provider.Cmd{Argv: []string{"true"}}, provider.LaunchOptions{}); !errors.Is(err, provider.ErrAlreadyLaunched) {
			t.Errorf("second launch: %v", err)
		}
		if err := g.Kill(ctx, "r1", 9); err != nil {
			t.Errorf("kill after the end: %v", err)
		}
		for range 2 {
			if err := g.Forget(ctx, "r1"); err != nil {
				t.Errorf("Forget: %v", err)
			}
		}
		if p, err := g.Probe(ctx, "r1"); err != nil || p.State != provider.ProbeAbsent {
			t.Errorf("Probe after Forget: %+v, %v", p, err)
		}
		if _, err := g.Tail(ctx, "r1", 0, true); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("Tail after Forget: %v", err)
		}
	})
}

func TestLaunchOnce(t *testing.T) {
	g, _ := serving(t)
	out := filepath.Join(t.TempDir(), "n")
	var wg sync.WaitGroup
	var mu sync.Mutex
	started, refused := 0, 0
	for range 10 {
		wg.Go(func() {
			err := g.Launch(t.Context(), "same", provider.Cmd{Argv: shell(`echo x >>"$OUT"`), Env: []string{"OUT=" + out}}, provider.LaunchOptions{RunID: "same"})
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err == nil:
				started++
			case errors.Is(err, provider.ErrAlreadyLaunched):
				refused++
			default:
				t.Error(err)
			}
		})
	}
	wg.Wait()
	_ = readJournal(t, g, "same")
	if b, _ := os.ReadFile(out); started != 1 || refused != 9 || string(b) != "x\n" {
		t.Errorf("%d started, %d refused, it ran %d times", started, refused, len(b)/2)
	}
}

func TestLaunchErrors(t *testing.T) {
	g, _ := serving(t)
	broken := errors.New("reader broke")
	for name, tt := range map[string]struct {
		token string
		cmd   provider.Cmd
		want  error
	}{
		"missing":      {"e1", provider.Cmd{Argv: []string{"no-such-program"}}, fs.ErrNotExist},
		"bad dir":      {"e2", provider.Cmd{Argv: []string{"true"}, Dir: "/no/such"}, provider.ErrInvalid},
		"bad token":    {"../e3", provider.Cmd{Argv: []string{"true"}}, provider.ErrInvalid},
		"output":       {"e4", provider.Cmd{Argv: []string{"true"}, Stdout: io.Discard}, provider.ErrInvalid},
		"broken stdin": {"e5", provider.Cmd{Argv: []string{"cat"}, Stdin: io.MultiReader(strings.NewReader("half"), readerFunc(func([]byte) (int, error) { return 0, broken }))}, broken},
	} {
		t.Run(name, func(t *testing.T) {
			if err := g.Launch(t.Context(), tt.token, tt.cmd, provider.LaunchOptions{RunID: "x"}); !errors.Is(err, tt.want) {
				t.Fatalf("Launch: %v, want %v", err, tt.want)
			}
			if tt.token == "../e3" {
				return
			}
			// Nothing ran, so the token is free.
			until(t, "the token is free", func() bool {
				p, err := g.Probe(t.Context(), tt.token)
				return err == nil && p.State == provider.ProbeAbsent
			})
		})
	}
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(b []byte) (int, error) { return f(b) }

func TestDetachedOutlivesItsHost(t *testing.T) {
	r := &raw{root: shortDir(t)}
	o := options(t)
	g, err := Attach(t.Context(), r, o)
	if err != nil {
		t.Fatal(err)
	}
	gate := filepath.Join(t.TempDir(), "gate")
	launch(t, g, "long", provider.Cmd{Argv: shell(`echo first; while [ ! -e "$GATE" ]; do sleep 0.02; done; echo second`), Env: []string{"GATE=" + gate}})
	if p, err := g.Probe(t.Context(), "long"); err != nil || p.State != provider.ProbeRunning {
		t.Errorf("Probe: %+v, %v", p, err)
	}
	c, _ := g.conn(t.Context())
	first := c.facts.Pid
	if err := g.Close(); err != nil { // and the guest ends with it
		t.Fatal(err)
	}
	until(t, "the guest is gone", func() bool { return !alive(first) })
	g2, err := Attach(t.Context(), r, o)
	if err != nil {
		t.Fatal(err)
	}
	defer g2.Close()
	until(t, "another host sees it run", func() bool {
		p, err := g2.Probe(t.Context(), "long")
		return err == nil && p.State == provider.ProbeRunning && p.Lines == 1
	})
	if err := g2.Forget(t.Context(), "long"); !errors.Is(err, provider.ErrInvalid) {
		t.Errorf("Forget of what runs: %v", err)
	}
	if err := os.WriteFile(gate, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if j := readJournal(t, g2, "long"); j.stdout != "first\nsecond\n" || !j.verified || j.exit.Code != 0 {
		t.Errorf("journal %+v", j)
	}
}

func TestDetachedKill(t *testing.T) {
	both(t, func(t *testing.T, g *Handle) {
		for name, script := range escapes {
			t.Run(name, func(t *testing.T) {
				token := "k-" + strconv.Itoa(len(name))
				out := filepath.Join(t.TempDir(), "pid")
				launch(t, g, token, provider.Cmd{Argv: shell(script), Env: []string{"OUT=" + out}})
				hidden := readPid(t, out)
				if err := g.Kill(t.Context(), token, 9); err != nil {
					t.Fatal(err)
				}
				if alive(hidden) {
					t.Error("a process survived")
				}
				j := readJournal(t, g, token)
				if j.exit == nil || j.exit.Signal != 9 || !j.verified {
					t.Errorf("exit %+v, verified %v", j.exit, j.verified)
				}
				if err := g.Forget(t.Context(), token); err != nil {
					t.Error(err)
				}
			})
		}
		out := filepath.Join(t.TempDir(), "pid")
		launch(t, g, "term", provider.Cmd{Argv: shell(`trap 'echo bye; exit 3' TERM; echo $$ >"$OUT"; while :; do sleep 0.02; done`), Env: []string{"OUT=" + out}})
		readPid(t, out)
		if err := g.Kill(t.Context(), "term", 15); err != nil {
			t.Fatal(err)
		}
		if j := readJournal(t, g, "term"); j.stdout != "bye\n" || j.exit.Code != 3 {
			t.Errorf("journal %+v", j)
		}
		if err := g.Kill(t.Context(), "never", 9); err != nil {
			t.Errorf("kill of nothing: %v", err)
		}
	})
}

func TestForgedExit(t *testing.T) {
	g, _ := serving(t)
	// The agent prints what could look like an exit, and exits otherwise.
	fake := frame.Append(nil, frame.TypeExit, frame.Exit{}.Encode())
	launch(t, g, "forge", provider.Cmd{Argv: shell("cat; exit 9"), Stdin: bytes.NewReader(append([]byte(`{"__exit":0,"__nonce":"guess"}`+"\n"), fake...))})
	j := readJournal(t, g, "forge")
	if j.exit == nil || j.exit.Code != 9 || !j.verified {
		t.Errorf("exit %+v, verified %v", j.exit, j.verified)
	}
	if !strings.Contains(j.stdout, string(fake)) {
		t.Error("the fake is not in the output")
	}
	// An agent of the same user that appends to the journal can't sign.
	dir := g.opts.JournalDir
	f, err := os.OpenFile(filepath.Join(dir, "forge.journal"), os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Write(fake); err != nil {
		t.Fatal(err)
	}
	f.Close()
	if j := readJournal(t, g, "forge"); j.verified {
		t.Error("a forged exit verifies")
	}
}

func TestSupervisorDies(t *testing.T) {
	g, _ := serving(t)
	out := filepath.Join(t.TempDir(), "pid")
	launch(t, g, "dies", provider.Cmd{Argv: shell(`echo $PPID >"$OUT.p"; echo $$ >"$OUT"; exec sleep 1000`), Env: []string{"OUT=" + out}})
	pid := readPid(t, out)
	supervisor := readPid(t, out+".p")
	if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", supervisor)); err == nil && bytes.Contains(b, testNonce) {
		t.Error("the nonce is in the supervisor's environment")
	}
	if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", supervisor)); err != nil || bytes.Contains(b, testNonce) {
		t.Errorf("the nonce is in the supervisor's arguments, or %v", err)
	}
	_ = syscall.Kill(supervisor, syscall.SIGTERM) // ignored
	_ = syscall.Kill(supervisor, syscall.SIGKILL)
	until(t, "it is dead", func() bool {
		p, err := g.Probe(t.Context(), "dies")
		return err == nil && p.State == provider.ProbeDead
	})
	if err := g.Kill(t.Context(), "dies", 9); err != nil {
		t.Fatal(err)
	}
	if alive(pid) {
		t.Error("the agent survived the kill, its supervisor being gone")
	}
	if j := readJournal(t, g, "dies"); j.exit != nil {
		t.Errorf("an exit from nobody: %+v", j.exit)
	}
}

func TestLateOutput(t *testing.T) {
	g, _ := serving(t)
	launch(t, g, "late", provider.Cmd{Argv: shell("(sleep 0.1; echo late) & echo early")})
	if j := readJournal(t, g, "late"); j.stdout != "early\nlate\n" || !j.verified {
		t.Errorf("journal %+v", j)
	}
}

func TestLongLine(t *testing.T) {
	g, _ := serving(t)
	launch(t, g, "line", provider.Cmd{Argv: shell("head -c 3000000 /dev/zero | tr '\\0' x; echo; echo end")})
	j := readJournal(t, g, "line")
	if len(j.stdout) != 3000000+5 || j.lines != 2 || !j.verified {
		t.Errorf("%d bytes, %d lines, verified %v", len(j.stdout), j.lines, j.verified)
	}
	if p, err := g.Probe(t.Context(), "line"); err != nil || p.Lines != 2 {
		t.Errorf("Probe: %+v, %v", p, err)
	}
}

func TestJournalDirIsOurs(t *testing.T) {
	r := &raw{root: shortDir(t)}
	o := options(t)
	if err := os.Mkdir(o.JournalDir, 0o777); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(o.JournalDir, 0o777); err != nil {
		t.Fatal(err)
	}
	g, err := Attach(t.Context(), r, o)
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	if err := g.Launch(t.Context(), "x", provider.Cmd{Argv: []string{"true"}}, provider.LaunchOptions{}); !errors.Is(err, fs.ErrPermission) {
		t.Errorf("Launch into a directory that everybody can write to: %v", err)
	}
}
