//go:build linux

package proc

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/aisandbox-go/aisandbox/provider"
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
	{"empty environment, job control", `sh -mc 'env -i O="$OUT" /bin/sh -c "echo \$\$ >\"\$O\"; exec sleep 1000" & exit 0' ; sleep 1000`, false},
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

// While trees of all kinds are killed, whoever does not belong to them lives.
func TestKillSparesStrangers(t *testing.T) {
	const killers, workers = 3, 6
	env := []string{"PATH=" + os.Getenv("PATH")}
	done := make(chan struct{})
	var kills, work sync.WaitGroup
	for i := range killers {
		kills.Go(func() {
			for n := range 12 {
				tree := escapes[(i+n*killers)%len(escapes)]
				if tree.reaperOnly && !badges() {
					continue // with so many others at work nobody can tell whose it is
				}
				out := filepath.Join(t.TempDir(), "pid")
				p, err := Start(t.Context(), Spec{Argv: sh(tree.script), Env: append(env, "OUT="+out)})
				if err != nil {
					t.Error(err)
					return
				}
				if n%2 == 0 { // else it is killed while it comes up
					until(t, "the tree is up", func() bool { st, err := os.Stat(out); return err == nil && st.Size() > 0 })
				}
				if err := p.KillTree(); err != nil {
					t.Error(err)
				}
				if exit, err := p.Wait(); err != nil || exit.Signal != 9 {
					t.Errorf("%s: Wait = %v, %v", tree.name, exit, err)
				}
			}
		})
	}
	var ran atomic.Int64
	for i := range workers {
		work.Go(func() {
			argv, want := []string{"/bin/true"}, 0
			if i%2 == 1 {
				argv, want = sh("setsid true; (exit 3) & wait $!"), 3
			}
			for {
				select {
				case <-done:
					return
				default:
				}
				p, err := Start(t.Context(), Spec{Argv: argv, Env: env})
				if err != nil {
					t.Error(err)
					return
				}
				if exit, err := p.Wait(); err != nil || exit != (provider.Exit{Code: want}) {
					t.Errorf("a stranger: Wait = %v, %v", exit, err)
					return
				}
				ran.Add(1)
			}
		})
	}
	kills.Wait()
	close(done)
	work.Wait()
	if ran.Load() < workers {
		t.Errorf("only %d strangers ran", ran.Load())
	}
	noZombies(t)
}

// A service that a command left behind is not taken for another's, even if nothing
// ties it to its own but what it inherited.
func TestKillSparesServices(t *testing.T) {
	if !badges() {
		t.Skip("without badges nobody can tell whose such an orphan is")
	}
	older := start(t, Spec{Argv: []string{"sleep", "1000"}})
	until(t, "the clock ticks", func() bool { return bootTicks() > older.start })
	out := filepath.Join(t.TempDir(), "pid")
	left := start(t, Spec{Env: []string{"PATH=" + os.Getenv("PATH"), "OUT=" + out},
		Argv: sh(`setsid env -i O="$OUT" /bin/sh -c 'echo $$ >"$O.new"; mv "$O.new" "$O"; exec sleep 1000' & while [ ! -e "$OUT" ]; do sleep 0.01; done`)})
	if _, err := left.Wait(); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	service, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		t.Fatal(err)
	}
	if err := older.KillTree(); err != nil {
		t.Error(err)
	}
	if !alive(service) {
		t.Error("the service died with a command that did not start it")
	}
	if err := left.KillTree(); err != nil {
		t.Error(err)
	}
	if alive(service) {
		t.Error("the service survived the kill of its own tree")
	}
}

func TestSession(t *testing.T) {
	led := func(s Spec) bool {
		s.Argv = []string{"sleep", "1000"}
		p := start(t, s)
		sid, err := unix.Getsid(p.Pid())
		if err != nil {
			t.Fatal(err)
		}
		group, err := unix.Getpgid(p.Pid())
		if err != nil || group != p.Pid() {
			t.Errorf("group %d of process %d, %v", group, p.Pid(), err)
		}
		return sid == p.Pid()
	}
	if got, want := led(Spec{}), !reaping() || !theReaper.Load().leads; got != want {
		t.Errorf("it leads a session: %v, want %v", got, want)
	}
	if !led(Spec{Session: true}) {
		t.Error("no session, though it was asked for")
	}
	if !led(Spec{Terminal: &provider.Terminal{}}) {
		t.Error("no session with a terminal")
	}
}
