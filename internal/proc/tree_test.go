//go:build linux

package proc

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// escapes are trees that hide. Each writes the number of what hides to $OUT.
var escapes = []struct {
	name, script string
	reaperOnly   bool // no trace is left but that the orphan was adopted
}{
	{"child", `sh -c 'echo $$ >"$OUT"; exec sleep 1000'`, false},
	{"background", `sh -c 'echo $$ >"$OUT"; exec sleep 1000' & wait`, false},
	{"setsid", `setsid sh -c 'echo $$ >"$OUT"; exec sleep 1000' & sleep 1000`, false},
	{"double fork", `(setsid sh -c 'sh -c "echo \$\$ >\"$OUT\"; exec sleep 1000" & exit 0' &) ; sleep 1000`, false},
	{"nohup", `nohup setsid sh -c 'trap "" TERM HUP INT; echo $$ >"$OUT"; while :; do sleep 1; done' >/dev/null 2>&1 & sleep 1000`, false},
	{"empty environment", `setsid env -i O="$OUT" /bin/sh -c 'echo $$ >"$O"; exec sleep 1000' & sleep 1000`, false},
	{"empty environment, double fork", `(setsid env -i O="$OUT" /bin/sh -c '/bin/sh -c "echo \$\$ >\"\$O\"; exec sleep 1000" & exit 0' &) ; sleep 1000`, true},
	{"fork storm", `f() { sh -c 'echo $$ >"$OUT"; sleep 0.02' & }; while :; do f; done`, false},
}

func TestKillTree(t *testing.T) {
	for _, tt := range escapes {
		t.Run(tt.name, func(t *testing.T) {
			if tt.reaperOnly && !reaping() {
				t.Skip("without a reaper nothing ties this orphan to its tree")
			}
			out := filepath.Join(t.TempDir(), "pid")
			p := start(t, Spec{Argv: sh(tt.script), Env: []string{"PATH=" + os.Getenv("PATH"), "OUT=" + out}})
			var hidden int
			until(t, "the tree is up", func() bool {
				b, _ := os.ReadFile(out)
				hidden, _ = strconv.Atoi(strings.TrimSpace(string(b)))
				return hidden != 0
			})
			begin := time.Now()
			if err := p.Signal(os.Kill); err != nil {
				t.Fatal(err)
			}
			if d := time.Since(begin); d > 2*time.Second {
				t.Errorf("the kill took %v", d)
			}
			if alive(hidden) || alive(p.Pid()) {
				t.Error("a process survived the kill")
			}
			if exit, err := p.Wait(); err != nil || exit.Signal != 9 {
				t.Errorf("Wait = %v, %v", exit, err)
			}
			all, err := snapshot()
			if err != nil {
				t.Fatal(err)
			}
			for _, e := range all {
				if env, err := readEnviron(e.pid); err == nil && bytes.Contains(env, []byte(MarkName+"="+p.Mark()+"\x00")) && !e.dead() {
					t.Errorf("process %d still carries the mark", e.pid)
				}
			}
		})
	}
}

func TestKillLeavesOthersAlone(t *testing.T) {
	var a, b *Process
	if a = start(t, Spec{Argv: []string{"sleep", "1000"}}); a == nil {
		return
	}
	b = start(t, Spec{Argv: sh("setsid sleep 1000 & wait")})
	if err := b.KillTree(); err != nil {
		t.Fatal(err)
	}
	if !alive(a.Pid()) {
		t.Error("the kill hit another process")
	}
	var ws bool
	if st, err := os.ReadFile("/proc/" + strconv.Itoa(a.Pid()) + "/stat"); err == nil {
		e, _ := parseStat(a.Pid(), st)
		ws = e.stopped()
	}
	if ws {
		t.Error("the other process was left stopped")
	}
}

func TestKillStrays(t *testing.T) {
	var out bytes.Buffer
	p := start(t, Spec{Argv: sh("setsid sleep 1000 & echo $!; exit 5"), Stdout: &out, KillStrays: true})
	exit, err := p.Wait()
	if exit.Code != 5 || err != nil {
		t.Fatalf("Wait = %v, %v", exit, err)
	}
	child, err := strconv.Atoi(strings.TrimSpace(out.String()))
	if err != nil {
		t.Fatal(err)
	}
	if alive(child) {
		t.Error("the stray survived")
	}
}

func TestKillEnv(t *testing.T) {
	entry := fmt.Sprintf("PROC_TEST_BOX=%d-%s", os.Getpid(), t.Name())
	p := start(t, Spec{Argv: sh("setsid sleep 1000 & exec sleep 1000"), Env: []string{"PATH=" + os.Getenv("PATH"), entry}})
	if err := KillEnv(entry); err != nil {
		t.Fatal(err)
	}
	if exit, err := p.Wait(); exit.Signal != 9 || err != nil {
		t.Errorf("Wait = %v, %v", exit, err)
	}
}
