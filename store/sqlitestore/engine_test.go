package sqlitestore

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/internal/storesql"
	"github.com/aisandbox-go/aisandbox/store"
)

func custom(names ...string) []store.Event {
	var evs []store.Event
	for _, n := range names {
		evs = append(evs, store.Event{Event: event.Custom{Name: n, Value: []byte(`{}`)}})
	}
	return evs
}

// begin makes a run and claims it.
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

// occupy holds the committer until the returned function is called.
func occupy(t testing.TB, s *Store) (release func()) {
	t.Helper()
	entered, leave := make(chan struct{}), make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		_ = s.engine.Write(context.Background(), true, func(context.Context, storesql.Tx) error {
			close(entered)
			<-leave
			return nil
		}, func() {})
	})
	<-entered
	return func() {
		close(leave)
		wg.Wait()
	}
}

func length(t testing.TB, s *Store, id string) int {
	t.Helper()
	log, err := s.Log.Snapshot(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	return len(log)
}

// waitFor polls until a condition holds.
func waitFor(t testing.TB, what string, ok func() bool) {
	t.Helper()
	tick, limit := time.NewTicker(time.Millisecond), time.After(20*time.Second)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-limit:
			t.Fatalf("%s: not within 20 s", what)
		}
	}
}

func TestGroupCommit(t *testing.T) {
	s := open(t, temp(t), Options{})
	const n = 40
	var claims []store.Claim
	for i := range n {
		claims = append(claims, begin(t, s, fmt.Sprint("r", i)))
	}
	release := occupy(t, s)
	var wg sync.WaitGroup
	errs := make([]error, n)
	for i, c := range claims {
		wg.Go(func() {
			no := uint64(1)
			if i%4 == 3 {
				no = 2 // refused, beside all those that are not
			}
			_, errs[i] = s.Log.Append(t.Context(), c, store.Batch{No: no, Events: custom("x")})
		})
	}
	waitFor(t, "the queue", func() bool { return len(s.engine.queue) == n })
	before := s.engine.commits
	release()
	wg.Wait()
	for i, err := range errs {
		if i%4 == 3 {
			if store.Code(err, "") != "batch_out_of_order" || length(t, s, fmt.Sprint("r", i)) != 0 {
				t.Errorf("run %d: %v", i, err)
			}
		} else if err != nil || length(t, s, fmt.Sprint("r", i)) != 1 {
			t.Errorf("run %d: %v", i, err)
		}
	}
	if got := s.engine.commits - before; got != 2 {
		t.Errorf("%d appends at once took %d commits", n, got-1)
	}
}

func TestGoneWhileQueued(t *testing.T) {
	s := open(t, temp(t), Options{})
	c := begin(t, s, "r")
	release := occupy(t, s)
	why := errors.New("the caller went away")
	ctx, cancel := context.WithCancelCause(t.Context())
	errs := make(chan error)
	go func() {
		_, err := s.Log.Append(ctx, c, store.Batch{No: 1, Events: custom("x")})
		errs <- err
	}()
	waitFor(t, "the queue", func() bool { return len(s.engine.queue) == 1 })
	cancel(why)
	if err := <-errs; !errors.Is(err, why) {
		t.Errorf("append: %v", err)
	}
	release()
	if n := length(t, s, "r"); n != 0 {
		t.Errorf("%d events were written for nobody", n)
	}
	if _, err := s.Log.Append(t.Context(), c, store.Batch{No: 1, Events: custom("x")}); err != nil {
		t.Errorf("again: %v", err)
	}
}

// A commit whose caller didn't wait for it is seen by readers all the same, and
// repeated without harm.
func TestGoneWhileCommitting(t *testing.T) {
	s := open(t, temp(t), Options{})
	c := begin(t, s, "r")
	seen := make(chan string, 10)
	rctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		for e, err := range s.Log.Read(rctx, "r", "") {
			if err != nil {
				return
			}
			seen <- e.Event.(event.Custom).Name
		}
	})
	if _, err := s.Log.Append(t.Context(), c, store.Batch{No: 1, Events: custom("first")}); err != nil {
		t.Fatal(err)
	}
	<-seen
	ctx, cancel := context.WithCancel(t.Context())
	entered, leave := make(chan struct{}), make(chan struct{})
	errs := make(chan error)
	go func() {
		// Like an append, but it stops in the middle of its transaction.
		errs <- s.engine.Write(ctx, true, func(ctx context.Context, tx storesql.Tx) error {
			close(entered)
			<-leave
			return nil
		}, func() {})
	}()
	<-entered
	actx, acancel := context.WithCancel(t.Context())
	go func() {
		_, err := s.Log.Append(actx, c, store.Batch{No: 2, Events: custom("second")})
		errs <- err
	}()
	waitFor(t, "the queue", func() bool { return len(s.engine.queue) == 1 })
	close(leave)
	<-seen // the second one was committed; whether its caller heard of it is open
	acancel()
	cancel()
	<-errs
	<-errs
	if _, err := s.Log.Append(t.Context(), c, store.Batch{No: 2, Events: custom("second")}); err != nil {
		t.Errorf("again: %v", err)
	}
	if n := length(t, s, "r"); n != 2 {
		t.Errorf("%d events", n)
	}
	stop()
	wg.Wait()
}

func TestDiskFull(t *testing.T) {
	s := open(t, temp(t), Options{})
	c := begin(t, s, "r")
	pages := func(text string) {
		t.Helper()
		err := s.engine.Write(t.Context(), true, func(ctx context.Context, tx storesql.Tx) error {
			rows, err := tx.Query(ctx, text)
			if err != nil {
				return err
			}
			for rows.Next() {
			}
			return rows.Close()
		}, func() {})
		if err != nil {
			t.Fatal(err)
		}
	}
	pages("PRAGMA max_page_count=60")
	big := strings.Repeat("x", 20000)
	no := uint64(1)
	var err error
	for ; no < 100; no++ {
		if _, err = s.Log.Append(t.Context(), c, store.Batch{No: no, Events: custom("e", big)}); err != nil {
			break
		}
	}
	var u *store.UnavailableError
	if !errors.Is(err, store.ErrUnavailable) || !errors.As(err, &u) || u.Cure == "" || store.Code(err, "") != "store_unavailable" {
		t.Fatalf("append to a full disk: %v", err)
	}
	have := length(t, s, "r")
	if have != int(no-1)*2 {
		t.Errorf("%d events after %d batches", have, no-1)
	}
	// Others are told the same, and nothing is torn.
	if _, _, err := s.Runs.Create(t.Context(), store.NewRun{ID: "q", Thread: store.Thread{ID: "t"}, Input: []byte(big + big)}); !errors.Is(err, store.ErrUnavailable) {
		t.Errorf("create: %v", err)
	}
	pages("PRAGMA max_page_count=1000000")
	if _, err := s.Log.Append(t.Context(), c, store.Batch{No: no, Events: custom("e", big)}); err != nil {
		t.Errorf("after making room: %v", err)
	}
	if got := length(t, s, "r"); got != have+2 {
		t.Errorf("%d events, want %d", got, have+2)
	}
}

func TestHeldByAnother(t *testing.T) {
	path := temp(t)
	s := open(t, path, Options{Busy: 50 * time.Millisecond})
	c := begin(t, s, "r")
	tx, err := raw(t, path).Begin() // immediate
	if err != nil {
		t.Fatal(err)
	}
	_, err = s.Log.Append(t.Context(), c, store.Batch{No: 1, Events: custom("x")})
	if !errors.Is(err, store.ErrUnavailable) {
		t.Errorf("append: %v", err)
	}
	if n := length(t, s, "r"); n != 0 { // reads go on
		t.Errorf("%d events", n)
	}
	if err := tx.Rollback(); err != nil {
		t.Fatal(err)
	}
	if _, err = s.Log.Append(t.Context(), c, store.Batch{No: 1, Events: custom("x")}); err != nil {
		t.Errorf("append: %v", err)
	}
}

func TestOpenRefuses(t *testing.T) {
	dir := t.TempDir()
	bad := filepath.Join(dir, "bad.db")
	if err := os.WriteFile(bad, []byte(strings.Repeat("this is no database ", 500)), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := Open(t.Context(), bad, Options{})
	if store.Code(err, "") != "store_corrupt" || errors.Is(err, store.ErrUnavailable) {
		t.Errorf("no database: %v", err)
	}
	_, err = Open(t.Context(), filepath.Join(bad, "x.db"), Options{})
	if !errors.Is(err, store.ErrUnavailable) {
		t.Errorf("below a file: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err = Open(ctx, filepath.Join(dir, "ctx.db"), Options{}); err == nil {
		t.Error("it opened with a context that is done")
	}
}

func TestOpenAtOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a b?c#d%41.db") // a name that is no URL
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			s, err := Open(t.Context(), path, Options{})
			if err != nil {
				t.Errorf("open: %v", err)
				return
			}
			_, _, err = s.Runs.Create(t.Context(), store.NewRun{ID: fmt.Sprint(i), Thread: store.Thread{ID: "t"}})
			if err := errors.Join(err, s.Close()); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	s, err := Open(t.Context(), path, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	rs, _, err := s.Runs.List(t.Context(), store.Query{})
	if err != nil || len(rs) != 8 {
		t.Errorf("%d runs, %v", len(rs), err)
	}
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("the file: %v, %v", fi, err)
	}
}

func TestClose(t *testing.T) {
	path := temp(t)
	s := open(t, path, Options{})
	c := begin(t, s, "r")
	release := occupy(t, s)
	var wg sync.WaitGroup
	wg.Go(func() {
		if _, err := s.Log.Append(t.Context(), c, store.Batch{No: 1, Events: custom("x")}); err != nil {
			t.Errorf("what was accepted before: %v", err)
		}
	})
	waitFor(t, "the queue", func() bool { return len(s.engine.queue) == 1 })
	for _, id := range []string{"r", "r"} {
		wg.Go(func() {
			for _, err := range s.Log.Read(t.Context(), id, event.OnlyNew) {
				if err != nil && !errors.Is(err, store.ErrUnavailable) {
					t.Errorf("read: %v", err)
				}
			}
		})
		wg.Go(func() {
			if _, err := s.Runs.WaitCancel(t.Context(), id); !errors.Is(err, store.ErrUnavailable) {
				t.Errorf("wait: %v", err)
			}
		})
	}
	waitFor(t, "the readers", func() bool { return s.core.Hub.Active() })
	closed := make(chan error)
	go func() { closed <- s.Close() }()
	waitFor(t, "the end of reads", func() bool { return !s.core.Hub.Active() })
	release()
	if err := <-closed; err != nil {
		t.Error(err)
	}
	wg.Wait()
	_, err := s.Log.Append(t.Context(), c, store.Batch{No: 2, Events: custom("x")})
	if !errors.Is(err, store.ErrUnavailable) {
		t.Errorf("append: %v", err)
	}
	for _, err := range s.Log.Read(t.Context(), "r", "") {
		if !errors.Is(err, store.ErrUnavailable) {
			t.Errorf("read: %v", err)
		}
	}
	if _, err := s.Runs.Get(t.Context(), "r"); !errors.Is(err, store.ErrUnavailable) {
		t.Errorf("get: %v", err)
	}
	if n := length(t, open(t, path, Options{}), "r"); n != 1 {
		t.Errorf("%d events", n)
	}
}
