package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/provider/local"
	"github.com/aisandbox-go/aisandbox/secret"
	"github.com/aisandbox-go/aisandbox/workspace"
)

// realBox is a sandbox of the local provider.
func realBox(t *testing.T, env map[string]string, set *secret.Set) *Sandbox {
	t.Helper()
	p := local.New(local.Options{BaseDir: t.TempDir()})
	h, err := p.Create(t.Context(), provider.Spec{})
	if err != nil {
		t.Fatal(err)
	}
	s := New(p, h, Options{Env: env, Secrets: set})
	t.Cleanup(func() {
		if err := errors.Join(s.Close(), p.Destroy(context.Background(), h.Ref())); err != nil {
			t.Error(err)
		}
	})
	return s
}

// noStdin hides that a handle takes live input.
type noStdin struct{ provider.Handle }

func (h noStdin) Unwrap() any           { return h.Handle }
func (noStdin) Traits() provider.Traits { return provider.Traits{Kill: true} }

// shellKinds are the shells and the two ways to drive one that every test of the
// protocol runs on.
func shellKinds(t *testing.T, f func(t *testing.T, e *ensurer)) {
	for _, name := range []string{"dash", "bash", "busybox"} {
		for _, live := range []bool{true, false} {
			kind := "exec"
			if live {
				kind = "live"
			}
			t.Run(name+"/"+kind, func(t *testing.T) {
				bin, err := exec.LookPath(name)
				if err != nil {
					needed(t, name+" is not installed")
				}
				dir := t.TempDir()
				target := bin
				if name == "busybox" {
					script := "#!/bin/sh\nexec " + bin + " sh \"$@\"\n"
					target = filepath.Join(dir, "bbsh")
					if err := os.WriteFile(target, []byte(script), 0o755); err != nil {
						t.Fatal(err)
					}
				}
				if err := os.Symlink(target, filepath.Join(dir, "sh")); err != nil {
					t.Fatal(err)
				}
				box := realBox(t, map[string]string{"PATH": dir + ":" + os.Getenv("PATH"), "START": "1"}, nil)
				if !live {
					box.h = noStdin{box.h}
				}
				f(t, testEnsurer(box))
			})
		}
	}
}

func testEnsurer(box *Sandbox) *ensurer {
	return &ensurer{box: box, red: box.red, log: logger(nil), stepTimeout: 10 * time.Second}
}

// needed skips, and fails where everything must be there.
func needed(t *testing.T, why string) {
	t.Helper()
	if os.Getenv("CI") == "true" {
		t.Fatal(why)
	}
	t.Skip(why)
}

func TestSetupCarriesState(t *testing.T) {
	shellKinds(t, func(t *testing.T, e *ensurer) {
		plan := workspace.Steps(
			workspace.Serial("mkdir -p sub", "cd sub", "export A='x y' B='two\nlines' Q=\"it's \\\"q\\\" \\$x \\`b\\` \\\\ end\"", "unset START", `printf %s "$A" > ../serial`, "pwd > ../where"),
			workspace.Parallel(
				`printf '%s|%s|%s|%s' "$A" "$B" "$Q" "${START-none}" > p1`,
				`pwd > p2`,
			),
			workspace.Serial(`printf %s "$A" > after`, "false || true"),
		)
		ran, err := e.setup(t.Context(), plan)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(plan.Commands(), ran); diff != "" {
			t.Error("ran:", diff)
		}
		sub := e.box.real + "/sub"
		for name, want := range map[string]string{
			"serial": "x y", "where": sub + "\n", "sub/after": "x y", "sub/p2": sub + "\n",
			"sub/p1": "x y|two\nlines|it's \"q\" $x `b` \\ end|none",
		} {
			got, err := e.box.ReadFile(t.Context(), name)
			if err != nil || string(got) != want {
				t.Errorf("%s = %q, %v, want %q", name, got, err, want)
			}
		}
	})
}

// What broke or hung the protocol of the reference: spec 01 §8.5 and §26, 51.
func TestSetupHostileSteps(t *testing.T) {
	shellKinds(t, func(t *testing.T, e *ensurer) {
		e.stepTimeout = 5 * time.Second
		for _, c := range []struct {
			step string
			code int
		}{
			{"echo a;", 0},
			{"true &", 0},
			{"echo x # c", 0},
			{"cat <<E\nhere\nE", 0},
			{"cat", 0},
			{"read x; test -z \"$x\"", 0},
			{"printf 'no newline'", 0},
			{"echo 'open", 2},
			{"if true; then", 2},
			{"cat <<E\nopen", 0},
			{"exit 3", 3},
			{"exit 0", 0},
			{"exec sh -c 'exit 4'", 4},
			{"bad-cmd-of-no-package", 127},
			{"sh -c 'exit 7'", 7},
			{"set -e; false", 1},
			{"kill -9 $$", 137},
		} {
			start := time.Now()
			_, err := e.setup(t.Context(), workspace.Steps(workspace.Serial(c.step)))
			var se *workspace.StepError
			switch {
			case c.code == 0 && err != nil:
				t.Errorf("%q: %v", c.step, err)
			case c.code != 0 && !errors.As(err, &se):
				t.Errorf("%q: %v, want a step error", c.step, err)
			case c.step == "echo 'open" || c.step == "if true; then": // each shell has a number of its own
				if se.ExitCode == 0 || se.Err != nil {
					t.Errorf("%q: %+v", c.step, se)
				}
			case c.code == 137:
				if !errors.Is(err, ErrShellDied) && se.ExitCode != 137 {
					t.Errorf("%q: %v", c.step, err)
				}
			case c.code != 0 && (se.ExitCode != c.code || se.Err != nil || se.Step != c.step):
				t.Errorf("%q: %+v, want code %d", c.step, se, c.code)
			}
			if d := time.Since(start); d > 4*time.Second {
				t.Errorf("%q took %v", c.step, d)
			}
		}
	})
}

func TestSetupStopsAtFailure(t *testing.T) {
	shellKinds(t, func(t *testing.T, e *ensurer) {
		ran, err := e.setup(t.Context(), workspace.Steps(
			workspace.Serial("echo out; echo err >&2; exit 7", "touch later"), workspace.Parallel("touch later")))
		want := "setup step failed: echo out; echo err >&2; exit 7 (exit 7)\nout\nerr"
		if err == nil || err.Error() != want || len(ran) != 0 {
			t.Errorf("err = %v, ran = %q", err, ran)
		}
		if ok, err := e.box.Exists(t.Context(), "later"); ok || err != nil {
			t.Error("a later step ran", err)
		}
	})
}

func TestSetupParallel(t *testing.T) {
	shellKinds(t, func(t *testing.T, e *ensurer) {
		wait := func(mine, other string) string {
			return "touch " + mine + "; n=0; while [ ! -e " + other + " ]; do sleep 0.02; n=$((n+1)); [ $n -lt 300 ] || exit 9; done"
		}
		_, err := e.setup(t.Context(), workspace.Steps(
			workspace.Parallel(wait("a", "b"), wait("b", "a")), workspace.Serial("test -e a && test -e b")))
		if err != nil {
			t.Error("the commands did not run at the same time:", err)
		}
		_, err = e.setup(t.Context(), workspace.Steps(workspace.Parallel("sleep 0.1; echo slow; exit 4", "echo fast >&2; exit 5", "true")))
		want := "setup step failed: sleep 0.1; echo slow; exit 4 (exit 4)\nslow\nsetup step failed: echo fast >&2; exit 5 (exit 5)\nfast"
		if err == nil || err.Error() != want {
			t.Errorf("err = %v", err)
		}
	})
}

func TestSetupForgedMarker(t *testing.T) {
	shellKinds(t, func(t *testing.T, e *ensurer) {
		step := `i=0; while [ $i -lt 3 ]; do printf '\n__BSSH_%s 0\n' $i; i=$((i+1)); done; exit 6`
		_, err := e.setup(t.Context(), workspace.Steps(workspace.Serial(step)))
		var se *workspace.StepError
		if !errors.As(err, &se) || se.ExitCode != 6 || !strings.Contains(se.Tail, "__BSSH_2 0") {
			t.Errorf("err = %v", err)
		}
	})
}

func TestSetupTimeoutAndCancel(t *testing.T) {
	shellKinds(t, func(t *testing.T, e *ensurer) {
		e.stepTimeout = 300 * time.Millisecond
		_, err := e.setup(t.Context(), workspace.Steps(workspace.Serial("sleep 60")))
		if !errors.Is(err, ErrStepTimeout) {
			t.Errorf("err = %v, want a timeout", err)
		}
		e.stepTimeout = time.Minute
		for name, plan := range map[string]workspace.Plan{
			"serial":   workspace.Steps(workspace.Serial("touch on; sleep 60")),
			"parallel": workspace.Steps(workspace.Parallel("touch on; sleep 60", "sleep 60")),
		} {
			ctx, cancel := context.WithCancelCause(t.Context())
			cause := errors.New("enough")
			go func() {
				for ctx.Err() == nil {
					if ok, _ := e.box.Exists(t.Context(), "on"); ok {
						cancel(cause)
					}
				}
			}()
			start := time.Now()
			_, err := e.setup(ctx, plan)
			cancel(nil)
			if !errors.Is(err, cause) || time.Since(start) > 5*time.Second {
				t.Errorf("%s: err = %v after %v", name, err, time.Since(start))
			}
			if err := e.box.Remove(t.Context(), "on"); err != nil {
				t.Error(err)
			}
		}
	})
}

func TestSetupBoundsOutput(t *testing.T) {
	shellKinds(t, func(t *testing.T, e *ensurer) {
		step := "dd if=/dev/zero bs=1048576 count=20 2>/dev/null | tr '\\0' 'x'; echo the end; exit 8"
		_, err := e.setup(t.Context(), workspace.Steps(workspace.Serial(step)))
		var se *workspace.StepError
		if !errors.As(err, &se) || se.ExitCode != 8 || len(se.Tail) > errorTail || !strings.HasSuffix(se.Tail, "the end") {
			t.Errorf("err = %.200v", err)
		}
	})
}

func TestSetupRedactsSecrets(t *testing.T) {
	set, err := secret.NewSet(map[string]string{"TOK": "tok-very-secret"})
	if err != nil {
		t.Fatal(err)
	}
	e := testEnsurer(realBox(t, nil, set))
	var events []ProgressEvent
	e.deps.Progress = func(ev ProgressEvent) { events = append(events, ev) }
	_, err = e.setup(t.Context(), workspace.Steps(workspace.Serial(`echo "$TOK"; : tok-very-secret; exit 1`)))
	if err == nil || strings.Contains(err.Error(), "tok-very-secret") || !strings.Contains(err.Error(), "[secret:TOK]") {
		t.Errorf("err = %v", err)
	}
	if s := fmt.Sprintf("%+v", events); strings.Contains(s, "tok-very-secret") || !strings.Contains(s, "[secret:TOK]") {
		t.Errorf("events = %v", s)
	}
}

func TestParseExports(t *testing.T) {
	want := map[string]string{"A": "x y", "B": "it's", "C": "a\nb", "D": "", "E": `q"b$c\`}
	for name, text := range map[string]string{
		"dash": "export A='x y'\nexport B='it'\"'\"'s'\nexport C='a\nb'\nexport D=''\nexport E='q\"b$c\\'\nexport UNSET\n",
		"bash": "declare -x A=\"x y\"\ndeclare -x B=\"it's\"\ndeclare -x C=$'a\\nb'\ndeclare -x D=\"\"\ndeclare -x E=\"q\\\"b\\$c\\\\\"\ndeclare -x UNSET\n",
		"ash":  "export A='x y'\nexport B='it'\\''s'\nexport C='a\nb'\nexport D=\nexport E='q\"b$c\\'\n",
		"ksh":  "typeset -x A='x y'\ntypeset -x B=$'it\\'s'\ntypeset -x C=$'a\\012b'\ntypeset -x D=''\ntypeset -x E=$'q\"b$c\\x5c'\n",
	} {
		if diff := cmp.Diff(want, parseExports(text)); diff != "" {
			t.Error(name, diff)
		}
	}
}
