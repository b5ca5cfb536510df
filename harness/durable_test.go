package harness_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/aisandbox-go/aisandbox/chat"
	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/guest"
	"github.com/aisandbox-go/aisandbox/harness"
	"github.com/aisandbox-go/aisandbox/internal/failpoint"
	"github.com/aisandbox-go/aisandbox/internal/testenv"
	"github.com/aisandbox-go/aisandbox/journal"
	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/provider/local"
	"github.com/aisandbox-go/aisandbox/sandbox"
	"github.com/aisandbox-go/aisandbox/store"
	"github.com/aisandbox-go/aisandbox/store/memstore"
	"github.com/aisandbox-go/aisandbox/store/sqlitestore"
	"github.com/aisandbox-go/aisandbox/workspace"
)

// Leases are short, so that a host that sleeps is soon replaced, and as long as it
// takes for a busy disk to answer.
const (
	lease       = 600 * time.Millisecond
	leaseOnDisk = 3 * time.Second
)

func (w *world) lease() time.Duration {
	if w.path != "" {
		return leaseOnDisk
	}
	return lease
}

// world is what the hosts of a test share: a store, and a machine with sandboxes.
type world struct {
	t       *testing.T
	set     store.Set
	dir     string // of the backend
	out     string // where agents leave their traces
	noGuest bool
	life    sandbox.Lifecycle
	source  workspace.Source
	id      string // of the run
	path    string // of the database; empty: in memory
	mu      sync.Mutex
	sets    map[string]store.Set // of each host

	backend func() provider.Provider // nil: local
}

func newWorld(t *testing.T) *world {
	t.Helper()
	return &world{t: t, set: memstore.New(memstore.Options{}), dir: t.TempDir(), out: t.TempDir(), id: "r1"}
}

// onDisk moves a world's store into a file that every host opens for itself.
func (w *world) onDisk() *world {
	w.t.Helper()
	w.path, w.sets = filepath.Join(w.t.TempDir(), "db"), map[string]store.Set{}
	w.set = w.store("test")
	return w
}

// store is the store as a host sees it.
func (w *world) store(owner string) store.Set {
	w.t.Helper()
	if w.path == "" {
		return w.set
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if s, ok := w.sets[owner]; ok {
		return s
	}
	s, err := sqlitestore.Open(w.t.Context(), w.path, sqlitestore.Options{})
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = s.Close() })
	w.sets[owner] = s.Set
	return s.Set
}

// request is the turn as a host builds it, each with objects of its own.
func (w *world) request(owner string, a harness.CLI, more ...chat.Middleware) chat.Request {
	w.t.Helper()
	backend, journals := w.backend, ""
	if backend == nil {
		backend = func() provider.Provider { return local.New(local.Options{BaseDir: w.dir}) }
		journals = filepath.Join(w.dir, "journals")
	}
	def, err := sandbox.Define(sandbox.Definition{
		ID:        "test",
		Provider:  backend(),
		Workspace: workspace.Workspace{Source: w.source},
		Lifecycle: w.life,
	})
	if err != nil {
		w.t.Fatal(err)
	}
	set := w.store(owner)
	return chat.Request{
		RunID: w.id, ThreadID: "t1",
		Messages: []event.Message{{ID: "u1", Role: "user", Content: event.Text("the prompt")}},
		Adapter:  harness.Text(a, harness.Options{}),
		Use: append([]chat.Middleware{
			chat.Durable(chat.Durability{Runs: set.Runs, Log: set.Log, Messages: set.Messages, Owner: owner, Lease: w.lease()}),
			chat.Persist(set.Messages, nil),
			sandbox.With(def, sandbox.WithOptions{Deps: sandbox.Deps{
				Instances: set.Instances, Leases: set.Leases, Owner: owner, Lease: w.lease(), NoGuest: w.noGuest, Guest: guest.Options{Program: testenv.Guest(w.t), JournalDir: journals},
			}}),
		}, more...),
	}
}

// attach takes the run over as soon as it can be had.
func (w *world) attach(ctx context.Context, req chat.Request) (*chat.Run, error) {
	req.Attach = true
	for {
		run, err := chat.Start(ctx, req)
		var refused *store.ClaimError
		if !errors.As(err, &refused) || refused.Reason != store.ClaimHeld {
			return run, err
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

func (w *world) record() store.Run {
	w.t.Helper()
	rec, err := w.set.Runs.Get(w.t.Context(), w.id)
	if err != nil {
		w.t.Fatal(err)
	}
	return rec
}

func (w *world) log() []store.Stored {
	w.t.Helper()
	log, err := w.set.Log.Snapshot(w.t.Context(), w.id)
	if err != nil {
		w.t.Fatal(err)
	}
	return log
}

// prints are the fingerprints of what came from the agent.
func prints(log []store.Stored) (out []string) {
	for _, e := range log {
		if e.Pos != nil {
			out = append(out, fmt.Sprintf("%s %x", e.Event.Type(), e.Print[:8]))
		}
	}
	return out
}

// said is the text in a log.
func said(log []store.Stored) (out []string) {
	for _, e := range log {
		if c, ok := e.Event.(event.TextMessageContent); ok {
			out = append(out, c.Delta)
		}
	}
	return out
}

// legal checks what must hold of every log (spec 04 §22: I3, I4, I6, I7).
func (w *world) legal() {
	w.t.Helper()
	log := w.log()
	var all []event.Event
	epoch, mark := uint64(0), store.NoPos
	for i, e := range log {
		if e.Seq != int64(i+1) || e.Epoch < epoch {
			w.t.Errorf("event %d has number %d, epoch %d after %d", i, e.Seq, e.Epoch, epoch)
		}
		epoch = e.Epoch
		if e.Pos != nil {
			if !mark.Less(*e.Pos) {
				w.t.Errorf("event %d is from %v after %v", i, *e.Pos, mark)
			}
			mark = *e.Pos
		}
		all = append(all, e.Event)
	}
	if err := event.Validate(all); err != nil {
		w.t.Errorf("the log is not legal: %v", err)
	}
}

// starts are the process ids of the agents that were ever started.
func (w *world) starts() (pids []int) {
	w.t.Helper()
	b, err := os.ReadFile(filepath.Join(w.out, "starts"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		w.t.Fatal(err)
	}
	for _, f := range strings.Fields(string(b)) {
		pid, err := strconv.Atoi(f)
		if err != nil {
			w.t.Fatal(err)
		}
		pids = append(pids, pid)
	}
	return pids
}

// clean checks that one agent ran, that it is gone, and that its files are.
func (w *world) clean() {
	w.t.Helper()
	pids := w.starts()
	if len(pids) != 1 {
		w.t.Errorf("%d agents were started, want one", len(pids))
	}
	for _, pid := range pids {
		eventually(w.t, "the agent is gone", func() bool { return !running(pid) })
	}
}

func running(pid int) bool {
	if syscall.Kill(pid, 0) != nil {
		return false
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !strings.Contains(string(b), ") Z ")
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// counting is an agent that says what it reads and then counts.
func (w *world) counting(n int) *shAgent {
	return &shAgent{script: fmt.Sprintf(`echo $$ >>%[1]s/starts; cat; echo; i=0; while [ $i -lt %[2]d ]; do i=$((i+1)); echo "line $i"; sleep 0.01; done; printf 'no end'`, w.out, n)}
}

func finish(t *testing.T, run *chat.Run) chat.Outcome {
	t.Helper()
	o, err := run.Wait(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return o
}

func TestDurableRun(t *testing.T) {
	for _, noGuest := range []bool{false, true} {
		t.Run(fmt.Sprintf("noGuest=%v", noGuest), func(t *testing.T) {
			w := newWorld(t)
			if noGuest {
				w.withoutGuest()
			}
			run, err := chat.Start(t.Context(), w.request("A", w.counting(5)))
			if err != nil {
				t.Fatal(err)
			}
			if o := finish(t, run); o.Kind != chat.Finished {
				t.Fatalf("outcome %+v", o)
			}
			w.legal()
			w.clean()
			if d := cmp.Diff([]string{"the prompt", "line 1", "line 2", "line 3", "line 4", "line 5", "no end"}, said(w.log())); d != "" {
				t.Error(d)
			}
			rec := w.record()
			if rec.Status != store.Completed || rec.Exit == nil || !rec.Exit.Verified || !rec.Exit.OK || rec.Pos.Off < rec.Exit.Off || rec.Launch != store.Launched {
				t.Errorf("record %+v", rec)
			}
			inst, err := w.set.Instances.Get(t.Context(), rec.SandboxKey)
			if err != nil || inst.Gen != rec.SandboxGen || !inst.Usable() {
				t.Errorf("instance %+v, %v", inst, err)
			}
			msgs, err := w.set.Messages.Load(t.Context(), store.Thread{ID: "t1"})
			if err != nil || len(msgs) != 8 {
				t.Errorf("%d messages, %v", len(msgs), err)
			}
			if rest := w.leftovers(); len(rest) > 0 {
				t.Errorf("left in the sandbox: %q", rest)
			}
		})
	}
}

// sleeper puts a host to sleep at a place, as a paused machine is: nothing of it
// goes on, until it is woken.
type sleeper struct {
	host, point string
	nth         int

	mu     sync.Mutex
	hits   int
	asleep chan struct{}
	wake   chan struct{}
}

func (s *sleeper) hit(point, host string) {
	if host != s.host {
		return
	}
	s.mu.Lock()
	if point == s.point {
		if s.hits++; s.hits == s.nth {
			close(s.asleep)
		}
	}
	sleeping := s.hits >= s.nth
	s.mu.Unlock()
	if sleeping {
		<-s.wake
	}
}

// nth is when to sleep at a place that a run passes often.
var nth = map[string]int{failpoint.RecordRead: 4, failpoint.BeforeAppend: 5, failpoint.AfterAppend: 5}

// At every place between two durable steps a host may die, or sleep and wake up
// when another one has taken over: the log is the one of a run that nothing
// happened to, one agent ran, and the sleeper changes nothing.
func TestCrashMatrix(t *testing.T) {
	golden := newWorld(t)
	run, err := chat.Start(t.Context(), golden.request("A", golden.counting(30)))
	if err != nil {
		t.Fatal(err)
	}
	if o := finish(t, run); o.Kind != chat.Finished {
		t.Fatalf("golden: %+v", o)
	}
	want, wantThread := prints(golden.log()), thread(t, golden)

	for _, point := range failpoint.Points {
		for _, kind := range []string{"late", "early", "early on disk"} {
			t.Run(point+"/"+kind, func(t *testing.T) {
				w, early := newWorld(t), kind != "late"
				if kind == "early on disk" {
					w.onDisk()
				}
				s := &sleeper{host: "A", point: point, nth: max(nth[point], 1), asleep: make(chan struct{}), wake: make(chan struct{})}
				defer failpoint.Arm(s.hit)()
				wakeUp := sync.OnceFunc(func() { close(s.wake) })
				defer wakeUp()

				type result struct {
					o   chat.Outcome
					err error
				}
				done := make(chan result, 1)
				go func() {
					run, err := chat.Start(context.WithoutCancel(t.Context()), w.request("A", w.counting(30)))
					if err != nil {
						done <- result{err: err}
						return
					}
					o, err := run.Wait(context.WithoutCancel(t.Context()))
					done <- result{o, err}
				}()
				select {
				case <-s.asleep:
				case r := <-done:
					t.Fatalf("A never got there: %+v", r)
				}

				b, err := w.attach(t.Context(), w.request("B", w.counting(30)))
				if early {
					wakeUp()
				}
				if point == failpoint.AfterFinish {
					if !errors.Is(err, store.ErrSealed) {
						t.Errorf("B takes over a run that has ended: %v", err)
					}
				} else if err != nil {
					t.Fatal(err)
				} else if o := finish(t, b); o.Kind != chat.Finished {
					t.Fatalf("B: %+v", o)
				}
				rec, log := w.record(), w.log()
				wakeUp()
				r := <-done
				switch {
				case point == failpoint.AfterFinish && r.o.Kind == chat.Finished:
				case r.err != nil && (errors.Is(r.err, store.ErrConflict) || errors.Is(r.err, store.ErrFenced) || errors.Is(r.err, store.ErrSealed)):
				case r.o.Kind == chat.Fenced, r.o.Kind == chat.Failed && errors.Is(r.o.Err, store.ErrSealed):
				default:
					t.Errorf("A, when it woke up: %+v", r)
				}
				if d := cmp.Diff(rec, w.record()); d != "" {
					t.Errorf("A changed the record:\n%s", d)
				}
				if len(log) != len(w.log()) {
					t.Errorf("A wrote %d events", len(w.log())-len(log))
				}
				if rec.Status != store.Completed {
					t.Errorf("record %+v", rec)
				}
				w.legal()
				w.clean()
				if d := cmp.Diff(want, prints(log)); d != "" {
					t.Errorf("the log is another one (-want +got):\n%s", d)
				}
				if d := cmp.Diff(wantThread, thread(t, w)); d != "" {
					t.Errorf("the transcript is another one:\n%s", d)
				}
				if rest := w.leftovers(); len(rest) > 0 {
					t.Errorf("left in the sandbox: %q", rest)
				}
			})
		}
	}
}

func thread(t *testing.T, w *world) []event.Message {
	t.Helper()
	msgs, err := w.set.Messages.Load(t.Context(), store.Thread{ID: "t1"})
	if err != nil {
		t.Fatal(err)
	}
	return msgs
}

// withoutGuest makes the hosts of a world work by commands alone. Where the journals
// are is the machine's then, so that the run gets a name of its own.
func (w *world) withoutGuest() {
	w.noGuest, w.id = true, "test-"+strings.ToLower(rand.Text())
	w.t.Cleanup(func() {
		files, _ := filepath.Glob(filepath.Join(journal.Dir, w.id+"*"))
		for _, f := range files {
			_ = os.RemoveAll(f)
		}
	})
}

// leftovers are the journals that are still there.
func (w *world) leftovers() (out []string) {
	dir := filepath.Join(w.dir, "journals")
	if w.noGuest {
		dir = journal.Dir
	}
	files, _ := filepath.Glob(filepath.Join(dir, w.id+"*"))
	for _, f := range files {
		if !strings.HasSuffix(f, ".gone") {
			out = append(out, f)
		}
	}
	return out
}

// The same by commands alone: the places where a second agent could start or an
// end be lost.
func TestCrashMatrixWithoutGuest(t *testing.T) {
	for _, point := range []string{failpoint.LaunchRecorded, failpoint.LaunchSent, failpoint.AfterAppend, failpoint.ExitRead} {
		t.Run(point, func(t *testing.T) {
			w := newWorld(t)
			w.withoutGuest()
			s := &sleeper{host: "A", point: point, nth: max(nth[point], 1), asleep: make(chan struct{}), wake: make(chan struct{})}
			defer failpoint.Arm(s.hit)()
			wakeUp := sync.OnceFunc(func() { close(s.wake) })
			defer wakeUp()
			a, err := chat.Start(t.Context(), w.request("A", w.counting(10)))
			if err != nil {
				t.Fatal(err)
			}
			<-s.asleep
			b, err := w.attach(t.Context(), w.request("B", w.counting(10)))
			if err != nil {
				t.Fatal(err)
			}
			if o := finish(t, b); o.Kind != chat.Finished {
				t.Fatalf("B: %+v", o)
			}
			rec, log := w.record(), w.log()
			wakeUp()
			if o := finish(t, a); o.Kind != chat.Fenced && !errors.Is(o.Err, store.ErrSealed) {
				t.Errorf("A: %+v", o)
			}
			if d := cmp.Diff(rec, w.record()); d != "" || len(log) != len(w.log()) {
				t.Errorf("A changed the run:\n%s", d)
			}
			w.legal()
			w.clean()
			if text := said(log); len(text) != 12 || text[11] != "no end" {
				t.Errorf("%q", text)
			}
		})
	}
}
