package pgstore

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/internal/testenv"
	"github.com/aisandbox-go/aisandbox/store"
)

func custom(names ...string) []store.Event {
	var evs []store.Event
	for _, n := range names {
		evs = append(evs, store.Event{Event: event.Custom{Name: n, Value: []byte(`{}`)}})
	}
	return evs
}

func begin(t testing.TB, s *Store, id string) store.Claim {
	t.Helper()
	if _, _, err := s.Runs.Create(t.Context(), store.NewRun{ID: id, Thread: store.Thread{ID: "t"}}); err != nil {
		t.Fatal(err)
	}
	c, err := s.Runs.Claim(t.Context(), id, store.ClaimOptions{Owner: "o", TTL: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func names(t testing.TB, s *Store, id string) []string {
	t.Helper()
	log, err := s.Log.Snapshot(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, e := range log {
		out = append(out, e.Event.(event.Custom).Name)
	}
	return out
}

// Every way of losing a connection around an append or an end, and each is there
// exactly once, without the caller noticing.
func TestExactlyOnce(t *testing.T) {
	url := testenv.Postgres(t)
	proxy := testenv.ProxyPostgres(t, url)
	s := open(t, proxy.URL, Options{Timeout: time.Second})
	watcher := open(t, url, Options{}) // another host
	for _, f := range []struct {
		name  string
		fault testenv.Fault
	}{
		{"cut before", testenv.CutBefore}, {"cut halfway", testenv.CutHalfway}, {"cut after", testenv.CutAfter},
		{"half-close", testenv.HalfClose}, {"stall", testenv.Stall},
	} {
		t.Run(f.name, func(t *testing.T) {
			id := "run " + f.name
			c := begin(t, s, id)
			var seen []string
			var wg sync.WaitGroup
			wg.Go(func() {
				for e, err := range watcher.Log.Read(t.Context(), id, "") {
					if err != nil {
						t.Errorf("read: %v", err)
						return
					}
					seen = append(seen, e.Event.(event.Custom).Name)
				}
			})
			if _, err := s.Log.Append(t.Context(), c, store.Batch{No: 1, Events: custom("a")}); err != nil {
				t.Fatal(err)
			}
			hit := proxy.ArmOnce(f.fault, testenv.IsExecute)
			offs, err := s.Log.Append(t.Context(), c, store.Batch{No: 2, Events: custom("b", "c")})
			if err != nil || len(offs) != 2 {
				t.Errorf("append: %q, %v", offs, err)
			}
			<-hit
			hit = proxy.ArmOnce(f.fault, testenv.IsCommit)
			r, err := s.Log.Finish(t.Context(), c, store.Final{Batch: store.Batch{No: 3, Events: custom("end")}, Status: store.Completed,
				Messages: []event.Message{{ID: f.name, Role: "user"}}})
			if err != nil || r.Status != store.Completed || r.LastSeq != 4 {
				t.Errorf("finish: %+v, %v", r, err)
			}
			<-hit
			wg.Wait()
			want := []string{"a", "b", "c", "end"}
			if d := cmp.Diff(want, names(t, watcher, id)); d != "" {
				t.Errorf("log: %s", d)
			}
			if d := cmp.Diff(want, seen); d != "" {
				t.Errorf("seen: %s", d)
			}
			if len(offs) == 2 {
				for e, err := range watcher.Log.Read(t.Context(), id, offs[1]) {
					if err != nil || e.Event.(event.Custom).Name != "end" {
						t.Errorf("after the offset: %v, %v", e, err)
					}
				}
			}
		})
	}
	t.Run("create", func(t *testing.T) {
		hit := proxy.ArmOnce(testenv.CutAfter, testenv.IsCommit)
		r, created, err := s.Runs.Create(t.Context(), store.NewRun{ID: "new", Thread: store.Thread{ID: "new"}, Exclusive: true})
		if err != nil || !created || r.ID != "new" {
			t.Errorf("create: %+v %v %v", r, created, err)
		}
		<-hit
		if _, created, err = s.Runs.Create(t.Context(), store.NewRun{ID: "new", Thread: store.Thread{ID: "new"}}); err != nil || created {
			t.Errorf("create again: %v %v", created, err)
		}
	})
	t.Run("claim", func(t *testing.T) {
		// It can't be known who holds it: nobody is told a claim twice.
		hit := proxy.ArmOnce(testenv.CutAfter, testenv.IsCommit)
		_, err := s.Runs.Claim(t.Context(), "new", store.ClaimOptions{Owner: "o"})
		if !errors.Is(err, store.ErrUnavailable) {
			t.Errorf("claim: %v", err)
		}
		<-hit
		c, err := s.Runs.Claim(t.Context(), "new", store.ClaimOptions{Owner: "o", Force: true})
		if err != nil || c.Epoch() != 2 {
			t.Errorf("claim again: %v, %v", c, err)
		}
	})
	proxy.Arm(nil)
	check(t, url)
}

// Connections are cut at random messages while writers go on; each repeats what
// failed with the same number.
func TestRandomCuts(t *testing.T) {
	url := testenv.Postgres(t)
	proxy := testenv.ProxyPostgres(t, url)
	s := open(t, proxy.URL, Options{Timeout: time.Second, Conns: 8})
	const runs, batches = 8, 60
	var claims []store.Claim
	for i := range runs {
		claims = append(claims, begin(t, s, fmt.Sprint("run", i)))
	}
	var mu sync.Mutex
	cuts := 0
	proxy.Arm(func(byte, []byte) testenv.Fault {
		mu.Lock()
		defer mu.Unlock()
		if rand.IntN(40) > 0 {
			return testenv.Pass
		}
		cuts++
		return []testenv.Fault{testenv.CutBefore, testenv.CutAfter, testenv.CutHalfway}[rand.IntN(3)]
	})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	insist := func(f func() error) {
		for {
			err := f()
			if err == nil {
				return
			}
			if !errors.Is(err, store.ErrUnavailable) || ctx.Err() != nil {
				t.Error(err)
				return
			}
		}
	}
	var wg sync.WaitGroup
	want := make([][]string, runs)
	for i, c := range claims {
		wg.Go(func() {
			for no := uint64(1); no <= batches; no++ {
				n := []string{fmt.Sprint(no, "a"), fmt.Sprint(no, "b")}
				want[i] = append(want[i], n...)
				insist(func() error {
					_, err := s.Log.Append(ctx, c, store.Batch{No: no, Events: custom(n...)})
					return err
				})
			}
			want[i] = append(want[i], "end")
			insist(func() error {
				_, err := s.Log.Finish(ctx, c, store.Final{Batch: store.Batch{No: batches + 1, Events: custom("end")}, Status: store.Completed})
				return err
			})
		})
	}
	// Readers through the same cuts come back by offset.
	seen := make([][]string, runs)
	for i := range runs {
		wg.Go(func() {
			var at event.Offset
			for {
				var last error
				for e, err := range s.Log.Read(ctx, fmt.Sprint("run", i), at) {
					if last = err; err == nil {
						seen[i] = append(seen[i], e.Event.(event.Custom).Name)
						at = e.Offset
					}
				}
				if last == nil {
					return
				}
				if !errors.Is(last, store.ErrUnavailable) || ctx.Err() != nil {
					t.Errorf("read: %v", last)
					return
				}
			}
		})
	}
	wg.Wait()
	proxy.Arm(nil)
	mu.Lock()
	defer mu.Unlock()
	if cuts < 10 {
		t.Errorf("%d cuts", cuts)
	}
	for i := range runs {
		if d := cmp.Diff(want[i], names(t, s, fmt.Sprint("run", i))); d != "" {
			t.Errorf("run %d: %s", i, d)
		}
		if d := cmp.Diff(want[i], seen[i]); d != "" {
			t.Errorf("reader %d: %s", i, d)
		}
	}
	check(t, url)
}

// Without the connection that listens, what others append comes later, and comes.
func TestDeafHost(t *testing.T) {
	url := testenv.Postgres(t)
	writer := open(t, url, Options{})
	proxy := testenv.ProxyPostgres(t, url)
	proxy.Arm(func(kind byte, body []byte) testenv.Fault {
		if kind == 'Q' || kind == 'P' { // LISTEN never arrives
			if string(body[:6]) == "LISTEN" || len(body) > 7 && string(body[1:7]) == "LISTEN" {
				return testenv.CutBefore
			}
		}
		return testenv.Pass
	})
	reader := open(t, url, Options{ListenURL: proxy.URL})
	c := begin(t, writer, "r")
	got := make(chan time.Time, 100)
	go func() {
		defer close(got)
		for _, err := range reader.Log.Read(t.Context(), "r", "") {
			if err != nil {
				t.Errorf("read: %v", err)
			}
			got <- time.Now()
		}
	}()
	for no := uint64(1); no <= 3; no++ {
		at := time.Now()
		if _, err := writer.Log.Append(t.Context(), c, store.Batch{No: no, Events: custom("x")}); err != nil {
			t.Fatal(err)
		}
		if lag := (<-got).Sub(at); lag > 10*time.Second {
			t.Errorf("event %d came after %v", no, lag)
		}
	}
	if _, err := writer.Log.Finish(t.Context(), c, store.Final{Status: store.Completed}); err != nil {
		t.Fatal(err)
	}
	<-got
}

// A server that can't be reached is told as such, in bounded time.
func TestUnreachable(t *testing.T) {
	url := testenv.Postgres(t)
	proxy := testenv.ProxyPostgres(t, url)
	s := open(t, proxy.URL, Options{Timeout: 200 * time.Millisecond})
	c := begin(t, s, "r")
	for name, fault := range map[string]testenv.Fault{"cut": testenv.CutBefore, "stall": testenv.Stall} {
		proxy.Arm(func(byte, []byte) testenv.Fault { return fault })
		began := time.Now()
		_, err := s.Log.Append(t.Context(), c, store.Batch{No: 1, Events: custom("x")})
		if !errors.Is(err, store.ErrUnavailable) || time.Since(began) > 10*time.Second {
			t.Errorf("%s: append after %v: %v", name, time.Since(began), err)
		}
		why := errors.New("the caller went away")
		ctx, cancel := context.WithCancelCause(t.Context())
		errs := make(chan error)
		go func() { _, err := s.Runs.Get(ctx, "r"); errs <- err }()
		cancel(why)
		if err := <-errs; !errors.Is(err, why) {
			t.Errorf("%s: get: %v", name, err)
		}
	}
	proxy.Arm(nil)
	if _, err := s.Log.Append(t.Context(), c, store.Batch{No: 1, Events: custom("x")}); err != nil {
		t.Errorf("afterwards: %v", err)
	}
	if _, err := Open(t.Context(), "postgres://127.0.0.1:1/x?sslmode=disable", Options{}); !errors.Is(err, store.ErrUnavailable) {
		t.Errorf("open of nothing: %v", err)
	}
	if _, err := Open(t.Context(), "nonsense://", Options{}); store.Code(err, "") != "invalid" {
		t.Errorf("open of nonsense: %v", err)
	}
	if _, err := Open(t.Context(), url+"&dbname=absent", Options{}); err == nil {
		t.Error("open of an absent database")
	}
}

func TestPartitions(t *testing.T) {
	url := testenv.Postgres(t)
	s := open(t, url, Options{})
	ended := func(id string) {
		t.Helper()
		c := begin(t, s, id)
		if _, err := s.Log.Finish(t.Context(), c, store.Final{Batch: store.Batch{No: 1, Events: custom("x")}, Status: store.Completed}); err != nil {
			t.Fatal(err)
		}
	}
	ended("young")
	for i, id := range []string{"old 1", "old 2", "kept"} {
		ended(id)
		// It began in a month of long ago.
		part := []int{202001, 202001, 202002}[i]
		raw(t, url, fmt.Sprintf("CREATE TABLE IF NOT EXISTS run_events_%d PARTITION OF run_events FOR VALUES IN (%d)", part, part))
		raw(t, url, "UPDATE runs SET part=$1 WHERE run_id=$2", part, id)
		raw(t, url, "UPDATE run_events SET part=$1 WHERE run_id=$2", part, id)
		days := []int64{40, 190, 40}[i]
		raw(t, url, "UPDATE runs SET closed_at=closed_at-$1 WHERE run_id=$2", days*24*3600*1000, id)
	}
	c := begin(t, s, "runs on")
	raw(t, url, "UPDATE runs SET part=202002 WHERE run_id='runs on'")
	if _, err := s.Log.Append(t.Context(), c, store.Batch{No: 1, Events: custom("y")}); err != nil {
		t.Fatal(err)
	}
	got, err := s.Retain(t.Context(), store.Retention{})
	if err != nil || got != (store.Retained{Logs: 3, Runs: 1}) {
		t.Fatalf("retain: %+v, %v", got, err)
	}
	if raw(t, url, "SELECT to_regclass('run_events_202001')::text") != "" {
		t.Error("the partition of logs that are too old is still there")
	}
	if raw(t, url, "SELECT to_regclass('run_events_202002')::text") == "" {
		t.Error("the partition of a run that goes on was dropped")
	}
	if n := raw(t, url, "SELECT count(*)::text FROM run_events WHERE part=202002"); n != "1" {
		t.Errorf("%s events beside those of the run that goes on", n)
	}
	for id, n := range map[string]int{"young": 1, "runs on": 1, "old 1": 0, "kept": 0} {
		if got := len(names(t, s, id)); got != n {
			t.Errorf("%s: %d events", id, got)
		}
	}
	// A partition that is missing is made when it's needed.
	raw(t, url, "DELETE FROM run_events WHERE run_id='young'")
	raw(t, url, "UPDATE runs SET events_expired=2 WHERE run_id='young'")
	raw(t, url, "DROP TABLE run_events_"+raw(t, url, "SELECT part::text FROM runs WHERE run_id='young'"))
	ended("next")
	check(t, url)
}

func TestClose(t *testing.T) {
	s := open(t, testenv.Postgres(t), Options{})
	c := begin(t, s, "r")
	var wg sync.WaitGroup
	wg.Go(func() {
		for _, err := range s.Log.Read(t.Context(), "r", "") {
			if !errors.Is(err, store.ErrUnavailable) {
				t.Errorf("read: %v", err)
			}
		}
	})
	wg.Go(func() {
		if _, err := s.Runs.WaitCancel(t.Context(), "r"); !errors.Is(err, store.ErrUnavailable) {
			t.Errorf("wait: %v", err)
		}
	})
	for range 8 { // in the middle of work
		wg.Go(func() {
			for {
				if _, err := s.Runs.Get(t.Context(), "r"); err != nil {
					if !errors.Is(err, store.ErrUnavailable) {
						t.Errorf("get: %v", err)
					}
					return
				}
			}
		})
	}
	for !s.core.Hub.Active() {
		if _, err := s.Runs.Get(t.Context(), "r"); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	wg.Wait()
	if _, err := s.Log.Append(t.Context(), c, store.Batch{No: 1, Events: custom("x")}); !errors.Is(err, store.ErrUnavailable) {
		t.Errorf("append: %v", err)
	}
}
