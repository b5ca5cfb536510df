package server_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/aisandbox-go/aisandbox/chat"
	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/server"
	"github.com/aisandbox-go/aisandbox/store"
	"github.com/aisandbox-go/aisandbox/store/memstore"
	"github.com/aisandbox-go/aisandbox/store/sqlitestore"
)

func busy(b server.Busy, depth int) func(*server.Config) {
	return func(c *server.Config) {
		d := c.Definitions["demo"]
		d.Busy, d.QueueDepth = b, depth
		c.Definitions["demo"] = d
	}
}

// One runs, eight wait in order, the rest are refused, and no log has anything of
// another run.
func TestFiftyOnOneThread(t *testing.T) {
	for name, in := range stores {
		t.Run(name, func(t *testing.T) { fiftyOnOneThread(t, in(t)) })
	}
}

// stores are what a server may be built on.
var stores = map[string]func(t *testing.T) store.Set{
	"memory": func(*testing.T) store.Set { return memstore.New(memstore.Options{}) },
	"SQLite": func(t *testing.T) store.Set {
		s, err := sqlitestore.Open(t.Context(), filepath.Join(t.TempDir(), "runs.db"), sqlitestore.Options{})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := s.Close(); err != nil {
				t.Error(err)
			}
		})
		return s.Set
	},
}

func fiftyOnOneThread(t *testing.T, set store.Set) {
	gate := make(chan struct{})
	a := gated(gate)
	h := newHouse(t, a, func(c *server.Config) { c.Store = set })
	base := h.listen(t)
	type answer struct {
		id     string
		s      *stream
		status int
		code   string
		of     string
	}
	answers := make(chan answer, 50)
	var wg sync.WaitGroup
	for i := range 50 {
		wg.Go(func() {
			id := fmt.Sprintf("r%02d", i)
			s := open(t, "POST", base+chatPath, body("t", id, "hi"))
			x := answer{id: id, s: s, status: s.resp.StatusCode}
			if x.status != 200 {
				var e struct {
					Error struct{ Code, RunID string }
				}
				b, _ := io.ReadAll(s.resp.Body)
				if err := json.Unmarshal(b, &e); err != nil {
					t.Errorf("%s: %v", b, err)
				}
				x.code, x.of = e.Error.Code, e.Error.RunID
			}
			answers <- x
		})
	}
	wg.Wait()
	close(answers)
	streams := map[string]*stream{}
	refused := 0
	runs, _, err := h.store.Runs.List(t.Context(), store.Query{ThreadID: "t"})
	if err != nil || len(runs) != 9 {
		t.Fatalf("%d runs: %v", len(runs), err)
	}
	for x := range answers {
		if x.status == 200 {
			streams[x.id] = x.s
			continue
		}
		if refused++; x.status != 409 || x.code != "thread_busy" || x.of != runs[0].ID {
			t.Errorf("%+v", x)
		}
	}
	if len(streams) != 9 || refused != 41 {
		t.Fatalf("%d streams, %d refused", len(streams), refused)
	}
	// Each waiting run says at once that it is there, and where in the line.
	for i, r := range runs {
		want := []string{"RUN_STARTED", "run.accepted"}
		until := "run.accepted"
		if i > 0 {
			until = fmt.Sprint("queued ", i)
			want = append(want, until)
		}
		if diff := cmp.Diff(want, streams[r.ID].until(until)); diff != "" {
			t.Errorf("run %d\n%s", i, diff)
		}
	}
	for range runs {
		gate <- struct{}{}
	}
	for i, r := range runs {
		var want []string
		for p := i - 1; p > 0; p-- {
			want = append(want, fmt.Sprint("queued ", p))
		}
		want = append(want, "TEXT_MESSAGE_START", "text:hello from "+r.ID, "TEXT_MESSAGE_END", "RUN_FINISHED")
		got := streams[r.ID].rest()
		// A position may be skipped when two runs end at almost the same time.
		got = slices.DeleteFunc(got, func(s string) bool { return strings.HasPrefix(s, "queued") && !slices.Contains(want, s) })
		plain := func(in []string) []string {
			return slices.DeleteFunc(slices.Clone(in), func(s string) bool { return strings.HasPrefix(s, "queued") })
		}
		if diff := cmp.Diff(plain(want), plain(got)); diff != "" {
			t.Errorf("run %d\n%s", i, diff)
		}
		if n := slices.Index(got, "TEXT_MESSAGE_START"); !slices.IsSortedFunc(got[:n], func(a, b string) int { return strings.Compare(b, a) }) {
			t.Errorf("positions %v", got[:n])
		}
	}
	var order []string
	for _, r := range runs {
		order = append(order, r.ID)
	}
	got, most := a.started()
	if diff := cmp.Diff(order, got); diff != "" || most != 1 {
		t.Errorf("at most %d at work; order (-line +started)\n%s", most, diff)
	}
}

func TestQueuePositionsCountDown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gate := make(chan struct{})
		a := gated(gate)
		h := newHouse(t, a, busy(server.BusyQueue, 3))
		var wg sync.WaitGroup
		got := make([][]string, 4)
		for i := range got {
			wg.Go(func() {
				fs := frames(t, h.post(t, body("t", fmt.Sprint("r", i), "hi")).Body)
				legal(t, fs)
				got[i] = shown(fs)[2:]
			})
			synctest.Wait()
		}
		wantStatus(t, h.post(t, body("t", "r9", "hi")), 409, "thread_busy")
		began := time.Now()
		for range got {
			gate <- struct{}{}
			synctest.Wait()
		}
		wg.Wait()
		if d := time.Since(began); d != 0 {
			t.Errorf("a turn is noticed after %v", d) // on this host: at once
		}
		for i := range got {
			var want []string
			for p := i; p > 0; p-- {
				want = append(want, fmt.Sprint("queued ", p))
			}
			want = append(want, "TEXT_MESSAGE_START", fmt.Sprint("text:hello from r", i), "TEXT_MESSAGE_END", "RUN_FINISHED")
			if diff := cmp.Diff(want, got[i]); diff != "" {
				t.Errorf("run %d\n%s", i, diff)
			}
		}
		// The one that waited goes on from how the others ended, not from what its
		// client knew when it asked.
		var last []string
		for _, m := range a.prompts["r3"] {
			last = append(last, m.ID)
		}
		if diff := cmp.Diff([]string{"r0-u0", "r0-m", "r1-u0", "r1-m", "r2-u0", "r2-m", "r3-u0"}, last); diff != "" {
			t.Errorf("the last run saw (-want +got)\n%s", diff)
		}
		msgs, err := h.store.Messages.Load(t.Context(), store.Thread{ID: "t"})
		if err != nil || len(msgs) != 8 {
			t.Errorf("%d messages: %v", len(msgs), err)
		}
	})
}

// A waiting run outlives its reader, and can be cancelled like any other.
func TestWaitingRunWithoutReader(t *testing.T) {
	gate := make(chan struct{})
	a := gated(gate)
	h := newHouse(t, a, nil)
	base := h.listen(t)
	open(t, "POST", base+chatPath, body("t", "r0", "hi")).until("TEXT_MESSAGE_END")
	for _, id := range []string{"r1", "r2", "r3"} {
		s := open(t, "POST", base+chatPath, body("t", id, "hi"))
		s.until(fmt.Sprint("queued ", id[1:]))
		s.stop()
	}
	third := open(t, "GET", base+chatPath+"?offset=-1&runId=r3", "")
	third.until("queued 3")
	if w := h.do(t, "POST", chatPath+"/cancel", `{"runId":"r1"}`); w.Code != 204 {
		t.Fatal(w.Code)
	}
	third.until("queued 2")
	if got := shown(frames(t, h.do(t, "GET", chatPath+"?offset=-1&runId=r1", "").Body)); got[len(got)-1] != "RUN_ERROR aborted" {
		t.Errorf("the cancelled one: %v", got)
	}
	for range 3 {
		gate <- struct{}{}
	}
	third.until("RUN_FINISHED")
	order, most := a.started()
	if diff := cmp.Diff([]string{"r0", "r2", "r3"}, order); diff != "" || most != 1 {
		t.Errorf("at most %d\n%s", most, diff)
	}
	if h.status(t, "r1") != store.Aborted || h.status(t, "r2") != store.Completed {
		t.Errorf("r1 %s, r2 %s", h.status(t, "r1"), h.status(t, "r2"))
	}
}

// Cancelling a thread ends all of it, and nothing gets its turn on the way.
func TestCancelThreadWithQueue(t *testing.T) {
	a := hangs()
	h := newHouse(t, a, nil)
	base := h.listen(t)
	var ss []*stream
	for i := range 3 {
		s := open(t, "POST", base+chatPath, body("t", fmt.Sprint("r", i), "hi"))
		s.until([]string{"run.accepted", "queued 1", "queued 2"}[i])
		ss = append(ss, s)
	}
	eventually(t, "the first is at work", func() bool { order, _ := a.started(); return len(order) == 1 })
	if w := h.do(t, "POST", chatPath+"/cancel", `{"threadId":"t"}`); w.Code != 204 {
		t.Fatal(w.Code)
	}
	for i, s := range ss {
		if got := s.rest(); len(got) == 0 || got[len(got)-1] != "RUN_ERROR aborted" {
			t.Errorf("run %d: %v", i, got)
		}
	}
	if order, _ := a.started(); len(order) != 1 {
		t.Errorf("agents %v", order)
	}
}

func TestBusyReject(t *testing.T) {
	gate := make(chan struct{})
	h := newHouse(t, gated(gate), busy(server.BusyReject, 0))
	base := h.listen(t)
	s := open(t, "POST", base+chatPath, body("t", "r0", "hi"))
	s.until("TEXT_MESSAGE_END")
	wantStatus(t, h.post(t, body("t", "r1", "hi")), 409, "thread_busy")
	close(gate)
	s.until("RUN_FINISHED")
	if w := h.post(t, body("t", "r1", "hi")); w.Code != 200 {
		t.Errorf("afterwards: %d %s", w.Code, w.Body)
	}
}

func TestBusySupersede(t *testing.T) {
	a := &agent{}
	dying := make(chan struct{})
	a.play = func(ctx context.Context, r *chat.Run, say func(...event.Event)) {
		say(text(r.ID()+"-m", "hello")...)
		if r.ID() != "r0" {
			say(finished)
			return
		}
		<-ctx.Done()
		<-dying // it takes its time
	}
	h := newHouse(t, a, busy(server.BusySupersede, 0))
	base := h.listen(t)
	first := open(t, "POST", base+chatPath, body("t", "r0", "hi"))
	first.until("TEXT_MESSAGE_END")
	second := open(t, "POST", base+chatPath, body("t", "r1", "hi"))
	second.until("queued 1")
	third := open(t, "POST", base+chatPath, body("t", "r2", "hi"))
	third.until("RUN_STARTED")
	if diff := cmp.Diff([]string{"RUN_ERROR aborted"}, second.rest()); diff != "" {
		t.Errorf("the second\n%s", diff)
	}
	if order, _ := a.started(); len(order) != 1 {
		t.Errorf("it didn't wait for the first one's end: %v", order)
	}
	close(dying)
	if diff := cmp.Diff([]string{"RUN_ERROR aborted"}, first.rest()); diff != "" {
		t.Errorf("the first\n%s", diff)
	}
	third.until("RUN_FINISHED")
	order, most := a.started()
	if diff := cmp.Diff([]string{"r0", "r2"}, order); diff != "" || most != 1 {
		t.Errorf("at most %d\n%s", most, diff)
	}
	if rec := h.record(t, "r0"); rec.Status != store.Aborted || rec.CancelReason != "superseded" {
		t.Errorf("record %+v", rec)
	}
}

// Two hosts have one line.
func TestQueueAcrossHosts(t *testing.T) {
	for name, in := range stores {
		t.Run(name, func(t *testing.T) { queueAcrossHosts(t, in(t)) })
	}
}

func queueAcrossHosts(t *testing.T, set store.Set) {
	gate := make(chan struct{})
	a := gated(gate)
	one := newHouse(t, a, func(c *server.Config) { c.Store = set })
	two := newHouse(t, a, func(c *server.Config) { c.Store, c.Owner = one.store, "two" })
	urls := []string{one.listen(t), two.listen(t)}
	var ss []*stream
	for i := range 4 {
		s := open(t, "POST", urls[i%2]+chatPath, body("t", fmt.Sprint("r", i), "hi"))
		s.until([]string{"run.accepted", "queued 1", "queued 2", "queued 3"}[i])
		ss = append(ss, s)
	}
	for i, s := range ss {
		gate <- struct{}{}
		if got := s.until("RUN_FINISHED"); !slices.Contains(got, fmt.Sprint("text:hello from r", i)) {
			t.Errorf("run %d: %v", i, got)
		}
	}
	order, most := a.started()
	if diff := cmp.Diff([]string{"r0", "r1", "r2", "r3"}, order); diff != "" || most != 1 {
		t.Errorf("at most %d\n%s", most, diff)
	}
}

// A waiting run is handed over at a shutdown: nothing of it was started.
func TestShutdownWhileWaiting(t *testing.T) {
	a := hangs()
	h := newHouse(t, a, nil)
	base := h.listen(t)
	open(t, "POST", base+chatPath, body("t", "r0", "hi")).until("run.accepted")
	open(t, "POST", base+chatPath, body("t", "r1", "hi")).until("queued 1")
	if err := h.Shutdown(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, id := range []string{"r0", "r1"} {
		if rec := h.record(t, id); rec.Status != store.Running || rec.Owner != "" {
			t.Errorf("%+v", rec)
		}
	}
	if order, _ := a.started(); slices.Contains(order, "r1") {
		t.Errorf("agents %v", order)
	}
}

// Runs of different threads don't wait for each other.
func TestThreadsAreIndependent(t *testing.T) {
	gate := make(chan struct{})
	a := gated(gate)
	h := newHouse(t, a, nil)
	base := h.listen(t)
	for i := range 5 {
		s := open(t, "POST", base+chatPath, body(fmt.Sprint("t", i), fmt.Sprint("r", i), "hi"))
		s.until("TEXT_MESSAGE_END")
	}
	if _, most := a.started(); most != 5 {
		t.Errorf("%d at work", most)
	}
	close(gate)
}

// The store going away for a while costs a waiting run nothing.
func TestWaitingSurvivesAnOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gate := make(chan struct{})
		out := &outage{}
		a := gated(gate)
		h := newHouse(t, a, func(c *server.Config) { out.Runs, c.Store.Runs = c.Store.Runs, out })
		done := make(chan []string)
		go h.post(t, body("t", "r0", "hi"))
		synctest.Wait()
		go func() { done <- shown(frames(t, h.post(t, body("t", "r1", "hi")).Body)) }()
		synctest.Wait()
		out.away(true)
		time.Sleep(10 * time.Second)
		if w := h.do(t, "GET", "/readyz", ""); w.Code != http.StatusServiceUnavailable {
			t.Errorf("readyz %d", w.Code)
		}
		out.away(false)
		close(gate)
		got := <-done
		if got[len(got)-1] != "RUN_FINISHED" {
			t.Errorf("got %v", got)
		}
	})
}

type outage struct {
	store.Runs
	mu  sync.Mutex
	out bool
}

func (o *outage) away(v bool) { o.mu.Lock(); o.out = v; o.mu.Unlock() }

func (o *outage) List(ctx context.Context, q store.Query) ([]store.Run, string, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.out {
		return nil, "", store.ErrUnavailable
	}
	return o.Runs.List(ctx, q)
}
