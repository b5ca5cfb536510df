package harness_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/aisandbox-go/aisandbox/chat"
	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/harness"
	"github.com/aisandbox-go/aisandbox/harness/scripted"
	"github.com/aisandbox-go/aisandbox/harness/scripted/player"
	"github.com/aisandbox-go/aisandbox/journal"
	"github.com/aisandbox-go/aisandbox/journal/frame"
	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/provider/local"
	"github.com/aisandbox-go/aisandbox/sandbox"
	"github.com/aisandbox-go/aisandbox/store"
	"github.com/aisandbox-go/aisandbox/workspace"
)

// begin starts a run and waits until it has said something.
func (w *world) begin(owner string, a harness.CLI, text string) *chat.Run {
	w.t.Helper()
	run, err := chat.Start(w.t.Context(), w.request(owner, a))
	if err != nil {
		w.t.Fatal(err)
	}
	w.says(run, text)
	return run
}

func (w *world) says(run *chat.Run, text string) {
	w.t.Helper()
	for ev, err := range run.Events(w.t.Context()) {
		if err != nil {
			w.t.Fatal(err)
		}
		if c, ok := ev.(event.TextMessageContent); ok && c.Delta == text {
			return
		}
	}
	w.t.Fatalf("it never says %q; it ended: %+v", text, finish(w.t, run))
}

// forever is an agent that counts until it is ended; bye is what it says to that.
func (w *world) forever(bye string) *shAgent {
	return &shAgent{
		script: fmt.Sprintf(`trap 'echo %[2]s; exit 5' TERM; echo $$ >>%[1]s/starts; echo up; i=0; while :; do i=$((i+1)); echo "line $i"; sleep 0.02; done`, w.out, bye),
		ladder: []harness.AbortStep{{Signal: int(syscall.SIGTERM), Wait: 5 * time.Second}},
	}
}

// Two hosts after each other, each leaving as on a deploy: nothing is lost, told
// twice or started again, and the next one goes on within a second.
func TestShutdownHandsOver(t *testing.T) {
	for _, noGuest := range []bool{false, true} {
		t.Run(fmt.Sprintf("noGuest=%v", noGuest), func(t *testing.T) {
			w := newWorld(t)
			if noGuest {
				w.withoutGuest()
			}
			run := w.begin("A", w.counting(250), "line 10")
			for _, owner := range []string{"B", "C"} {
				left := time.Now()
				run.Detach(chat.ErrShutdown)
				if o := finish(t, run); o.Kind != chat.Detached {
					t.Fatalf("%+v", o)
				}
				before := len(w.log())
				if pids := w.starts(); len(pids) != 1 || !running(pids[0]) {
					t.Fatal("the agent did not outlive its host")
				}
				var err error
				if run, err = w.attach(t.Context(), w.request(owner, w.counting(250))); err != nil {
					t.Fatal(err)
				}
				eventually(t, "it goes on", func() bool { return len(w.log()) > before })
				if d := time.Since(left); d > time.Second && !noGuest {
					t.Errorf("%s went on after %v", owner, d)
				}
			}
			if o := finish(t, run); o.Kind != chat.Finished {
				t.Fatalf("%+v", o)
			}
			want := []string{"the prompt"}
			for i := range 250 {
				want = append(want, fmt.Sprint("line ", i+1))
			}
			if d := cmp.Diff(append(want, "no end"), said(w.log())); d != "" {
				t.Error(d)
			}
			w.legal()
			w.clean()
			if got := len(thread(t, w)); got != 253 {
				t.Errorf("%d messages in the thread", got)
			}
			// Viewers were told once which sandbox it is.
			n := 0
			for _, e := range w.log() {
				if c, ok := e.Event.(event.Custom); ok && (c.Name == event.NameSandboxCreated || c.Name == event.NameSandboxResumed) {
					n++
				}
			}
			if n != 1 {
				t.Errorf("%d times", n)
			}
		})
	}
}

func TestCancelOfADurableRun(t *testing.T) {
	for _, noGuest := range []bool{false, true} {
		t.Run(fmt.Sprintf("noGuest=%v", noGuest), func(t *testing.T) {
			w := newWorld(t)
			if noGuest {
				w.withoutGuest()
			}
			run := w.begin("A", w.forever("bye"), "line 3")
			// From another host, by way of the store.
			if err := w.set.Runs.RequestCancel(t.Context(), w.id, "stop button"); err != nil {
				t.Fatal(err)
			}
			if o := finish(t, run); o.Kind != chat.Canceled {
				t.Fatalf("%+v", o)
			}
			w.legal()
			w.clean()
			if text := said(w.log()); text[len(text)-1] != "bye" {
				t.Errorf("its last words are missing: %q", text[len(text)-1])
			}
			rec := w.record()
			inst, err := w.set.Instances.Get(t.Context(), rec.SandboxKey)
			if rec.Status != store.Aborted {
				t.Errorf("%+v", rec)
			}
			// Where a kill is not sure the sandbox goes with the agent.
			if kept := err == nil && inst.Usable(); kept == noGuest {
				t.Errorf("kept %v: %+v, %v", kept, inst, err)
			}
		})
	}
}

// A child in a session of its own, which took off every mark, is gone with the
// agent that was told to end.
func TestCancelLeavesNoChild(t *testing.T) {
	w := newWorld(t)
	a := &shAgent{
		script: fmt.Sprintf(`trap 'echo bye; exit 0' TERM; echo $$ >>%[1]s/starts; setsid env -i sleep 600 & echo $! >%[1]s/child; echo up; while :; do sleep 0.02; done`, w.out),
		ladder: []harness.AbortStep{{Signal: int(syscall.SIGTERM), Wait: 5 * time.Second}},
	}
	run := w.begin("A", a, "up")
	if err := run.Cancel("enough"); err != nil {
		t.Fatal(err)
	}
	if o := finish(t, run); o.Kind != chat.Canceled {
		t.Fatalf("%+v", o)
	}
	w.clean()
	b, err := os.ReadFile(filepath.Join(w.out, "child"))
	if err != nil {
		t.Fatal(err)
	}
	if pid := strings.TrimSpace(string(b)); alive(pid) {
		t.Errorf("process %s is still there", pid)
	}
}

// A cancelled run whose driver is gone is ended by whoever reaps it.
func TestReaperEndsACancelledAgent(t *testing.T) {
	w := newWorld(t)
	run := w.begin("A", w.forever("bye"), "line 3")
	run.Detach(chat.ErrShutdown)
	finish(t, run)
	if err := w.set.Runs.RequestCancel(t.Context(), w.id, "stop button"); err != nil {
		t.Fatal(err)
	}
	req := w.request("reaper", w.forever("bye"))
	req.Reaper = true
	run, err := w.attach(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	if o := finish(t, run); o.Kind != chat.Canceled {
		t.Fatalf("%+v", o)
	}
	w.legal()
	w.clean()
	if rec := w.record(); rec.Status != store.Aborted || rec.CancelReason != "stop button" {
		t.Errorf("%+v", rec)
	}
}

// Whatever an agent does to look as if it had succeeded, its run has not.
func TestForgedSuccess(t *testing.T) {
	for name, tt := range map[string]struct {
		script string
		codes  []string
	}{
		"prints exits":         {`printf '{"__exit":0,"__nonce":"975acdfa2d20222833a58b6fb54273df"}\n\006\070\000\000\000'; echo; exit 3`, []string{"exit"}},
		"kills its supervisor": {`sleep 0.2; kill -9 $PPID; echo '{"__exit":0}'; sleep 60`, []string{"agent_died"}},
		"truncates":            {`sleep 0.2; for f in $J; do : >"$f"; done; echo x; exit 0`, []string{"journal_tampered", "journal_torn_frame", "agent_died"}},
		"appends an exit":      {`sleep 0.2; for f in $J; do printf '\006\070\000\000\000aaaa' >>"$f"; head -c 56 /dev/zero >>"$f"; done; kill -9 $PPID; sleep 60`, []string{"journal_tampered", "journal_torn_frame", "agent_died"}},
		"kills everything":     {`sleep 0.2; kill -9 $PPID $$`, []string{"agent_died"}},
		"dies":                 {`kill -9 $$`, []string{"exit"}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			a := &shAgent{script: fmt.Sprintf("J='%s'; echo $$ >>%s/starts; echo I say; %s", filepath.Join(w.dir, "journals", "*.journal"), w.out, tt.script)}
			run, err := chat.Start(t.Context(), w.request("A", a))
			if err != nil {
				t.Fatal(err)
			}
			o := finish(t, run)
			rec := w.record()
			if o.Kind != chat.Failed || rec.Status != store.Failed || !slices.Contains(tt.codes, rec.Error.Code) {
				t.Fatalf("outcome %+v, error %+v", o, rec.Error)
			}
			w.legal()
			w.clean()
			if rec.Error.Code == "journal_tampered" || rec.Error.Code == "journal_torn_frame" {
				// Nobody works in that sandbox again.
				if inst, err := w.set.Instances.Get(t.Context(), rec.SandboxKey); err == nil && inst.Usable() {
					t.Errorf("the sandbox is kept: %+v", inst)
				}
				if !rec.JournalHold {
					t.Error("the journal is not held")
				}
			}
		})
	}
}

// What was read once and is another thing now ends the run, also where every frame
// is made anew.
func TestRewrittenJournal(t *testing.T) {
	w := newWorld(t)
	a := &shAgent{script: fmt.Sprintf(`echo $$ >>%[1]s/starts; echo I say; while [ ! -e %[1]s/gate ]; do sleep 0.02; done; exit 0`, w.out)}
	run := w.begin("A", a, "I say")
	run.Detach(chat.ErrShutdown)
	finish(t, run)
	files, err := filepath.Glob(filepath.Join(w.dir, "journals", "*.journal"))
	if err != nil || len(files) != 1 {
		t.Fatalf("%q, %v", files, err)
	}
	b, err := os.ReadFile(files[0])
	if err != nil {
		t.Fatal(err)
	}
	was, is := frame.Append(nil, frame.TypeLine, []byte("I say")), frame.Append(nil, frame.TypeLine, []byte("I SAY"))
	f, err := os.OpenFile(files[0], os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt(is, int64(bytes.Index(b, was))); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(w.out, "gate"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	run, err = w.attach(t.Context(), w.request("B", a))
	if err != nil {
		t.Fatal(err)
	}
	o := finish(t, run)
	var d *chat.DivergedError
	if o.Kind != chat.Failed || !errors.As(o.Err, &d) {
		t.Fatalf("%+v", o)
	}
	if rec := w.record(); rec.Error.Code != "replay_diverged" || !rec.JournalHold {
		t.Errorf("%+v", rec)
	}
	if text := said(w.log()); !slices.Equal(text, []string{"I say"}) {
		t.Errorf("%q", text)
	}
	w.legal()
	w.clean()
	if len(w.leftovers()) == 0 {
		t.Error("the evidence is gone")
	}
}

// An agent that died while nobody looked: the next host tells what there is.
func TestDeadAgentIsFound(t *testing.T) {
	w := newWorld(t)
	a := &shAgent{script: fmt.Sprintf(`echo $$ >>%[1]s/starts; echo $PPID >%[1]s/supervisor; echo up; sleep 600`, w.out)}
	run := w.begin("A", a, "up")
	run.Detach(chat.ErrShutdown)
	finish(t, run)
	b, err := os.ReadFile(filepath.Join(w.out, "supervisor"))
	if err != nil {
		t.Fatal(err)
	}
	var pid int
	if _, err := fmt.Sscan(string(b), &pid); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	run, err = w.attach(t.Context(), w.request("B", a))
	if err != nil {
		t.Fatal(err)
	}
	if o := finish(t, run); o.Kind != chat.Failed || !errors.Is(o.Err, journal.ErrEndedWithoutExit) {
		t.Fatalf("%+v", o)
	}
	w.legal()
	w.clean() // what was left of it is ended
}

// The sandbox vanished with its agent.
func TestSandboxIsLost(t *testing.T) {
	w := newWorld(t)
	run := w.begin("A", w.forever("bye"), "line 3")
	run.Detach(chat.ErrShutdown)
	finish(t, run)
	rec := w.record()
	inst, err := w.set.Instances.Get(t.Context(), rec.SandboxKey)
	if err != nil {
		t.Fatal(err)
	}
	var ref provider.Ref
	if err := json.Unmarshal(inst.Ref, &ref); err != nil {
		t.Fatal(err)
	}
	if err := local.New(local.Options{BaseDir: w.dir}).Destroy(t.Context(), ref); err != nil {
		t.Fatal(err)
	}
	run, err = w.attach(t.Context(), w.request("B", w.forever("bye")))
	if err != nil {
		t.Fatal(err)
	}
	o := finish(t, run)
	var lost *sandbox.LostError
	if o.Kind != chat.Failed || !errors.As(o.Err, &lost) || w.record().Error.Code != "sandbox_lost" {
		t.Fatalf("%+v", o)
	}
	w.legal()
	w.clean()
	if inst, err := w.set.Instances.Get(t.Context(), rec.SandboxKey); err != nil || inst.State != store.InstanceLost {
		t.Errorf("%+v, %v", inst, err)
	}
}

// A second agent that is run because the first had nothing to go on with is a part
// of the same run, wherever that is driven.
func TestFallbackOfADurableRun(t *testing.T) {
	w := newWorld(t)
	a := &shAgent{script: `exit 1`, once: true}
	run, err := chat.Start(t.Context(), w.request("A", a))
	if err != nil {
		t.Fatal(err)
	}
	if o := finish(t, run); o.Kind != chat.Finished {
		t.Fatalf("%+v", o)
	}
	if text := said(w.log()); !slices.Equal(text, []string{"second"}) {
		t.Errorf("%q", text)
	}
	w.legal()
	if rest := w.leftovers(); len(rest) > 0 {
		t.Errorf("left %q", rest)
	}
}

// Nothing of a run that is not durable has to do with journals.
func TestPipedRunHasNoJournal(t *testing.T) {
	w := newWorld(t)
	req := w.request("A", &shAgent{script: `echo up; tr '\0' '\n' </proc/self/environ; tr '\0' ' ' </proc/self/cmdline; tr '\0' ' ' </proc/$PPID/cmdline`})
	req.Use = req.Use[2:]
	run, err := chat.Start(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	var text []string
	for ev, err := range run.Events(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		if c, ok := ev.(event.TextMessageContent); ok {
			text = append(text, c.Delta)
		}
	}
	for _, line := range text {
		if strings.Contains(line, "aisandbox-runs") || strings.Contains(line, "supervise") {
			t.Errorf("%q", line)
		}
	}
	if files, _ := os.ReadDir(filepath.Join(w.dir, "journals")); len(files) > 0 {
		t.Errorf("journals %v", files)
	}
}

// The private directory of an agent that may be at work stays, and whoever ends
// the run removes it.
func TestPrivateFilesOutliveTheirHost(t *testing.T) {
	w := newWorld(t)
	agent := func() *shAgent {
		return &shAgent{
			script: fmt.Sprintf(`echo $$ >>%[1]s/starts; echo "$1" >%[1]s/private; echo up; while [ ! -e %[1]s/gate ]; do sleep 0.02; done; cat "$1/a/b.txt"`, w.out),
			files:  []harness.File{{Name: "a/b.txt", Content: []byte("from the file\n")}},
		}
	}
	run := w.begin("A", agent(), "up")
	run.Detach(chat.ErrDetached)
	finish(t, run)
	b, err := os.ReadFile(filepath.Join(w.out, "private"))
	if err != nil {
		t.Fatal(err)
	}
	private := strings.TrimSpace(string(b))
	if _, err := os.Stat(filepath.Join(private, "a/b.txt")); err != nil {
		t.Fatal(err)
	}
	run, err = w.attach(t.Context(), w.request("B", agent()))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(w.out, "gate"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if o := finish(t, run); o.Kind != chat.Finished {
		t.Fatalf("%+v", o)
	}
	if text := said(w.log()); text[len(text)-1] != "from the file" {
		t.Errorf("%q", text)
	}
	if _, err := os.Stat(private); !os.IsNotExist(err) {
		t.Errorf("private files are left: %v", err)
	}
}

// The scripted agent, whole: thinking, tools, files and the conversation.
func TestScriptedAgentIsTakenOver(t *testing.T) {
	steps := []player.Step{{Think: "hm"}, {Say: "Let me see. "}, {Run: "echo hello"}, {Write: &player.Write{Path: "a.txt", Content: "x\n"}}}
	for range 60 {
		steps = append(steps, player.Step{Say: "more "}, player.Step{Sleep: 20 * time.Millisecond})
	}
	agent := func() harness.CLI { return scripted.CLI(scripted.Options{Script: scripted.Script{Steps: steps}}) }
	one := newWorld(t)
	t.Setenv("HOME", t.TempDir()) // sessions are kept there
	run, err := chat.Start(t.Context(), one.request("A", agent()))
	if err != nil {
		t.Fatal(err)
	}
	if o := finish(t, run); o.Kind != chat.Finished {
		t.Fatalf("%+v", o)
	}
	two := newWorld(t)
	two.id = "r2"
	if run, err = chat.Start(t.Context(), two.request("A", agent())); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it runs", func() bool { return len(prints(two.log())) > 5 })
	for _, owner := range []string{"B", "C", "D"} {
		run.Detach(chat.ErrShutdown)
		if o := finish(t, run); o.Kind != chat.Detached {
			t.Fatalf("%+v", o)
		}
		if run, err = two.attach(t.Context(), two.request(owner, agent())); err != nil {
			t.Fatal(err)
		}
		before := len(two.log())
		eventually(t, "it goes on", func() bool { return len(two.log()) > before || two.record().Status != store.Running })
	}
	if o := finish(t, run); o.Kind != chat.Finished {
		t.Fatalf("%+v", o)
	}
	two.legal()
	if d := cmp.Diff(kinds(one.log()), kinds(two.log())); d != "" {
		t.Errorf("-want +got\n%s", d)
	}
	if d := cmp.Diff(len(thread(t, one)), len(thread(t, two))); d != "" {
		t.Errorf("threads: %s", d)
	}
}

// kinds are the agent's events without what differs from run to run.
func kinds(log []store.Stored) (out []string) {
	for _, e := range log {
		if e.Pos != nil {
			out = append(out, string(e.Event.Type()))
		}
	}
	return out
}

// The changes that are shown at the end are those of the whole run, whoever shows
// them.
func TestDiffOfTheWholeRun(t *testing.T) {
	w := newWorld(t)
	w.source = workspace.Local{Path: gitRepo(t)}
	a := &shAgent{script: fmt.Sprintf(`echo $$ >>%[1]s/starts; echo before >>a.txt; echo up; while [ ! -e %[1]s/gate ]; do sleep 0.02; done; echo after >>a.txt`, w.out)}
	run := w.begin("A", a, "up")
	run.Detach(chat.ErrShutdown)
	finish(t, run)
	run, err := w.attach(t.Context(), w.request("B", a))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(w.out, "gate"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if o := finish(t, run); o.Kind != chat.Finished {
		t.Fatalf("%+v", o)
	}
	diff := ""
	for _, e := range w.log() {
		if c, ok := event.CustomOf[event.FileChanged](e.Event, event.NameFileChanged); ok {
			diff += c.Diff
		}
	}
	if !strings.Contains(diff, "+before\n+after\n") {
		t.Errorf("%q", diff)
	}
	w.legal()
}
