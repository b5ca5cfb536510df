package storetest

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/store"
)

// Backend is a store that several processes can open.
type Backend struct {
	// Place makes an empty database and returns how [Backend.Open] finds it.
	Place func(t *testing.T) string
	Open  func(ctx context.Context, place string) (set store.Set, close func() error, err error)
	// Check looks at the database with [Invariants] afterwards.
	Check func(t *testing.T, place string)
}

// The child's part is told by its environment: role, then place.
const childEnv = "STORETEST_CHILD"

// Child plays a child's part if this process is one, and then doesn't return. A
// backend's TestMain calls it first.
func (b Backend) Child() {
	role, place, ok := strings.Cut(os.Getenv(childEnv), "\n")
	if !ok {
		return
	}
	ctx := context.Background()
	s, done, err := b.Open(ctx, place)
	if err == nil {
		err = map[string]func(context.Context, store.Set) error{"append": childAppends, "fight": childFights, "tell": childTells}[role](ctx, s)
		err = errors.Join(err, done())
	}
	if err != nil {
		fmt.Println("error", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// child is a running child and the lines that it prints.
type child struct {
	cmd   *exec.Cmd
	lines *bufio.Scanner
	in    io.WriteCloser
}

func (b Backend) spawn(t *testing.T, role, place string) *child {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^$")
	cmd.Env = append(os.Environ(), childEnv+"="+role+"\n"+place)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	ok(t, "pipe", err)
	out, err := cmd.StdoutPipe()
	ok(t, "pipe", err)
	ok(t, "start", cmd.Start())
	return &child{cmd, bufio.NewScanner(out), in}
}

// said keeps lines of several goroutines apart.
var said sync.Mutex

func tell(args ...any) {
	said.Lock()
	defer said.Unlock()
	fmt.Println(args...)
}

// RunProcesses lets processes share a database, and kills some of them.
func RunProcesses(t *testing.T, b Backend) {
	t.Run("kill", func(t *testing.T) { b.kill(t) })
	t.Run("fight", func(t *testing.T) { b.fight(t) })
	t.Run("tell", func(t *testing.T) { b.tell(t) })
}

const childRuns = 6

func childRun(i int) string { return fmt.Sprint("killed", i) }

// childAppends writes several runs at once, going on where the one before was
// killed, and says what was acknowledged. It never ends by itself.
func childAppends(ctx context.Context, s store.Set) error {
	errs := make(chan error)
	for i := range childRuns {
		go func() {
			errs <- func() error {
				id := childRun(i)
				if _, _, err := s.Runs.Create(ctx, store.NewRun{ID: id, Thread: store.Thread{ID: id}}); err != nil {
					return err
				}
				c, err := s.Runs.Claim(ctx, id, store.ClaimOptions{Owner: "child", Force: true})
				if err != nil {
					return err
				}
				off := c.Pos().Off
				for no := uint64(1); ; no++ {
					var b store.Batch
					b.No = no
					for range 1 + rand.IntN(3) {
						off++
						b.Events = append(b.Events, from(off, fmt.Sprintf("%d.%d", c.Epoch(), off))...)
					}
					offs, err := s.Log.Append(ctx, c, b)
					if err != nil {
						return err
					}
					for n, e := range b.Events {
						tell("ack", i, nameOf(e.Event), offs[n])
					}
				}
			}()
		}()
	}
	return <-errs
}

// kill kills a child in the middle of its writing, again and again. What was
// acknowledged must be there; what wasn't must be whole or absent.
func (b Backend) kill(t *testing.T) {
	place := b.Place(t)
	s, done, err := b.Open(t.Context(), place)
	ok(t, "open", err)
	defer done()
	acked := make([]map[string]event.Offset, childRuns)
	for i := range acked {
		acked[i] = map[string]event.Offset{}
	}
	for range 6 {
		c := b.spawn(t, "append", place)
		stop := 20 + rand.IntN(200)
		for n := 0; c.lines.Scan(); n++ {
			f := strings.Fields(c.lines.Text())
			if len(f) != 4 || f[0] != "ack" {
				t.Fatalf("the child says %q", c.lines.Text())
			}
			i, _ := strconv.Atoi(f[1])
			acked[i][f[2]] = event.Offset(f[3])
			if n == stop {
				_ = c.cmd.Process.Kill() // and what it said until then is read
			}
		}
		_ = c.cmd.Wait()
	}
	for i, want := range acked {
		id := childRun(i)
		log, err := s.Log.Snapshot(t.Context(), id)
		ok(t, "snapshot", err)
		for n, e := range log {
			if e.Seq != int64(n+1) || e.Pos.Off != int64(n+1) {
				t.Fatalf("run %d: event %d has number %d and position %v", i, n, e.Seq, *e.Pos)
			}
			if off, told := want[nameOf(e.Event)]; told && off != e.Offset {
				t.Errorf("run %d: %s was told at %s and is at %s", i, nameOf(e.Event), off, e.Offset)
			}
			delete(want, nameOf(e.Event))
		}
		if len(want) > 0 {
			t.Errorf("run %d: %d acknowledged events are gone: %v", i, len(want), want)
		}
		rec := get(t, s, id)
		if rec.LastSeq != int64(len(log)) || rec.Pos.Off != int64(len(log)) {
			t.Errorf("run %d: the record says %d events up to %v, the log has %d", i, rec.LastSeq, rec.Pos, len(log))
		}
	}
	b.Check(t, place)
}

const fought = "fought"

// childFights claims, writes and is deposed by others, then tries again with what
// it held. It says what was accepted.
func childFights(ctx context.Context, s store.Set) error {
	var old []store.Claim
	for round := range 25 {
		c, err := s.Runs.Claim(ctx, fought, store.ClaimOptions{Owner: "shared", Force: true})
		if err != nil {
			return err
		}
		for no := uint64(1); no <= 4; no++ {
			name := fmt.Sprintf("p%d-r%d-n%d", os.Getpid(), round, no)
			_, err := s.Log.Append(ctx, c, store.Batch{No: no, Events: live(name)})
			if errors.Is(err, store.ErrFenced) {
				break
			}
			if err != nil {
				return err
			}
			tell("ack", name, c.Epoch())
		}
		for _, z := range old {
			for no := uint64(1); no < 6; no++ {
				if _, err := s.Log.Append(ctx, z, store.Batch{No: no, Events: live("zombie")}); !errors.Is(err, store.ErrFenced) {
					return fmt.Errorf("a zombie's append: %w", errors.Join(err, errors.New("not fenced")))
				}
			}
			if _, err := s.Log.Finish(ctx, z, store.Final{Status: store.Aborted}); !errors.Is(err, store.ErrFenced) {
				return fmt.Errorf("a zombie's finish: %w", errors.Join(err, errors.New("not fenced")))
			}
			lost, _, err := s.Runs.Renew(ctx, []store.ClaimRef{z.Ref()}, time.Minute)
			if err != nil || len(lost) != 1 {
				return fmt.Errorf("a zombie's renewal: lost %v, %w", lost, err)
			}
		}
		old = []store.Claim{c} // the next round claims after it
	}
	return nil
}

// fight lets two processes fight for one run while a third one watches.
func (b Backend) fight(t *testing.T) {
	place := b.Place(t)
	s, done, err := b.Open(t.Context(), place)
	ok(t, "open", err)
	defer done()
	_, _, err = s.Runs.Create(t.Context(), store.NewRun{ID: fought, Thread: store.Thread{ID: "t"}})
	ok(t, "create", err)
	var view []string
	var watch, wg sync.WaitGroup
	watch.Go(func() {
		names, _, err := read(t.Context(), s, fought, "")
		if err != nil {
			t.Errorf("read: %v", err)
		}
		view = names
	})
	defer watch.Wait()
	var mu sync.Mutex
	accepted := map[string]uint64{}
	for range 2 {
		c := b.spawn(t, "fight", place)
		wg.Go(func() {
			for c.lines.Scan() {
				f := strings.Fields(c.lines.Text())
				if len(f) != 3 || f[0] != "ack" {
					t.Errorf("the child says %q", c.lines.Text())
					continue
				}
				e, _ := strconv.ParseUint(f[2], 10, 64)
				mu.Lock()
				accepted[f[1]] = e
				mu.Unlock()
			}
			if err := c.cmd.Wait(); err != nil {
				t.Errorf("child: %v", err)
			}
		})
	}
	wg.Wait()
	last := claim(t, s, fought, "shared", store.ClaimOptions{Force: true})
	_, err = s.Log.Finish(t.Context(), last, store.Final{Status: store.Completed})
	ok(t, "finish", err)
	watch.Wait()
	log, err := s.Log.Snapshot(t.Context(), fought)
	ok(t, "snapshot", err)
	var names []string
	epoch := uint64(0)
	for _, e := range log {
		n := nameOf(e.Event)
		names = append(names, n)
		if want, known := accepted[n]; !known || want != e.Epoch || e.Epoch < epoch {
			t.Errorf("%q of epoch %d after epoch %d; accepted for %d, %v", n, e.Epoch, epoch, want, known)
		}
		epoch = e.Epoch
		delete(accepted, n)
	}
	if len(accepted) > 0 {
		t.Errorf("accepted and not there: %v", accepted)
	}
	if !slices.Equal(view, names) {
		t.Errorf("the reader saw %d events, the log has %d, or in another order", len(view), len(names))
	}
	b.Check(t, place)
}

// childTells appends the time, over and over, then asks for the end of another run
// and ends this one.
func childTells(ctx context.Context, s store.Set) error {
	c, err := s.Runs.Claim(ctx, "told", store.ClaimOptions{Owner: "child"})
	if err != nil {
		return err
	}
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for no := uint64(1); no <= 40; no++ {
		<-tick.C
		now, _ := json.Marshal(time.Now().UnixNano())
		if _, err := s.Log.Append(ctx, c, store.Batch{No: no, Events: []store.Event{{Event: event.Custom{Name: "now", Value: now}}}}); err != nil {
			return err
		}
	}
	tell("asking", time.Now().UnixNano())
	if err := s.Runs.RequestCancel(ctx, "asked", "by another process"); err != nil {
		return err
	}
	_, err = s.Log.Finish(ctx, c, store.Final{Status: store.Completed})
	return err
}

// tell measures how late a process hears what another one does. The bounds are
// wide, since machines are busy: what they exclude is hearing by accident, such as
// at the next append of one's own.
func (b Backend) tell(t *testing.T) {
	const typical, most = time.Second, 10 * time.Second
	place := b.Place(t)
	s, done, err := b.Open(t.Context(), place)
	ok(t, "open", err)
	defer done()
	for _, id := range []string{"told", "asked"} {
		_, _, err = s.Runs.Create(t.Context(), store.NewRun{ID: id, Thread: store.Thread{ID: id}})
		ok(t, "create", err)
	}
	var wg sync.WaitGroup
	var asked time.Time
	wg.Go(func() {
		why, err := s.Runs.WaitCancel(t.Context(), "asked")
		if asked = time.Now(); err != nil || why != "by another process" {
			t.Errorf("wait: %q, %v", why, err)
		}
	})
	c := b.spawn(t, "tell", place)
	var asking int64
	wg.Go(func() {
		for c.lines.Scan() {
			if _, err := fmt.Sscan(c.lines.Text(), new(string), &asking); err != nil {
				t.Errorf("the child says %q", c.lines.Text())
			}
		}
		if err := c.cmd.Wait(); err != nil {
			t.Errorf("child: %v", err)
		}
	})
	var lags []time.Duration
	for e, err := range s.Log.Read(t.Context(), "told", "") {
		if err != nil {
			t.Fatalf("read: %v", err)
		}
		var at int64
		_ = json.Unmarshal(e.Event.(event.Custom).Value, &at)
		lags = append(lags, time.Since(time.Unix(0, at)))
	}
	wg.Wait()
	slices.Sort(lags)
	if len(lags) != 40 {
		t.Fatalf("%d events", len(lags))
	}
	lags = append(lags, asked.Sub(time.Unix(0, asking)))
	t.Logf("lag: median %v, most %v; cancel %v", lags[20], lags[39], lags[40])
	if lags[20] > typical || lags[39] > most || lags[40] > most {
		t.Errorf("lag: median %v, most %v; cancel %v", lags[20], lags[39], lags[40])
	}
}
