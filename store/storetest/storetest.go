// Package storetest checks that a store answers as package store promises. Each
// Run function is one contract's suite; a backend calls those of the contracts
// that it offers.
//
// A suite first walks through tables, then compares the store with a model in
// random sequences of calls, then lets many writers and readers fight.
package storetest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/store"
)

// Options say what is tested.
type Options struct {
	// New returns a store that is empty, or at least has nothing of the suite's.
	// It may be called for each test, and cleans up by t.Cleanup.
	New func(t *testing.T) store.Set

	// Bubble runs a test body whose waiting shall cost no time, such as
	// synctest.Test. Nil: it waits, and tests that wait use short times.
	Bubble func(t *testing.T, f func(t *testing.T))

	// Retainer returns what forgets for a store that New made. Nil: nothing does.
	Retainer func(s store.Set) (store.Retainer, bool)

	// Writers is how many writers fight for one run. 0: 8.
	Writers int
}

func (o Options) run(t *testing.T, name string, f func(t *testing.T, s store.Set)) {
	t.Run(name, func(t *testing.T) {
		body := func(t *testing.T) { f(t, o.New(t)) }
		if o.Bubble == nil {
			body(t)
			return
		}
		o.Bubble(t, body)
	})
}

// ttl is a lease that tests let expire.
const ttl = 200 * time.Millisecond

// expire lets everything that was granted for ttl run out.
func expire() { time.Sleep(ttl + ttl/2) }

var serial atomic.Int64

// fresh makes a name that no other test uses.
func fresh(prefix string) string { return fmt.Sprintf("%s-%d", prefix, serial.Add(1)) }

// is reports whether err is what was expected: nil, or a sentinel with the code
// of one of its types.
func is(t *testing.T, what string, err, want error, code string) {
	t.Helper()
	switch {
	case want == nil && err != nil:
		t.Errorf("%s: %v", what, err)
	case want == errAny && err == nil, want != nil && want != errAny && !errors.Is(err, want):
		t.Errorf("%s: got %v, want %v", what, err, want)
	case want != nil && code != "" && store.Code(err, "") != code:
		t.Errorf("%s: %v has code %q, want %q", what, err, store.Code(err, ""), code)
	}
}

func ok(t *testing.T, what string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

func equal[T any](t *testing.T, what string, got, want T) {
	t.Helper()
	if d := cmp.Diff(want, got, cmpopts.EquateEmpty()); d != "" {
		t.Errorf("%s: -want +got:\n%s", what, d)
	}
}

// say is an event that tells itself from all others.
func say(s string) event.Event { return event.Custom{Name: s, Value: []byte(`{}`)} }

func live(names ...string) []store.Event {
	var evs []store.Event
	for _, n := range names {
		evs = append(evs, store.Event{Event: say(n)})
	}
	return evs
}

// from are events of a journal record that ends at off.
func from(off int64, names ...string) []store.Event {
	evs := live(names...)
	for i := range evs {
		print := event.Fingerprint(evs[i].Event)
		evs[i].Pos, evs[i].Print = &store.Pos{Off: off, Idx: i}, print[:]
	}
	return evs
}

func nameOf(ev event.Event) string {
	if c, ok := ev.(event.Custom); ok {
		return c.Name
	}
	return string(ev.Type())
}

// logged is what a run's log holds, by Snapshot.
func logged(t *testing.T, s store.Set, runID string) []string {
	t.Helper()
	evs, err := s.Log.Snapshot(t.Context(), runID)
	ok(t, "snapshot", err)
	var out []string
	for i, e := range evs {
		if e.Seq != int64(i+1) || !e.Offset.Valid() {
			t.Errorf("event %d has number %d and offset %q", i, e.Seq, e.Offset)
		}
		out = append(out, nameOf(e.Event))
	}
	return out
}

// read collects a read until it ends.
func read(ctx context.Context, s store.Set, runID string, after event.Offset) (names []string, offs []event.Offset, err error) {
	for e, err := range s.Log.Read(ctx, runID, after) {
		if err != nil {
			return names, offs, err
		}
		names, offs = append(names, nameOf(e.Event)), append(offs, e.Offset)
	}
	return names, offs, nil
}

// create makes a run with a name of its own.
func create(t *testing.T, s store.Set, th store.Thread) store.Run {
	t.Helper()
	r, created, err := s.Runs.Create(t.Context(), store.NewRun{ID: fresh("run"), Thread: th})
	ok(t, "create", err)
	if !created {
		t.Fatal("create: the run exists already")
	}
	return r
}

func claim(t *testing.T, s store.Set, runID, owner string, o store.ClaimOptions) store.Claim {
	t.Helper()
	o.Owner = owner
	c, err := s.Runs.Claim(t.Context(), runID, o)
	ok(t, "claim", err)
	return c
}

func get(t *testing.T, s store.Set, runID string) store.Run {
	t.Helper()
	r, err := s.Runs.Get(t.Context(), runID)
	ok(t, "get", err)
	return r
}

// around checks a time that the store told against the test's clock, loosely:
// clocks differ.
func around(t *testing.T, what string, got time.Time) {
	t.Helper()
	if d := time.Since(got); d > time.Minute || d < -time.Minute {
		t.Errorf("%s: %v is %v away", what, got, d)
	}
}

// cancelled checks that every call honours a context that is done.
func cancelled(t *testing.T, calls map[string]func(ctx context.Context) error) {
	t.Helper()
	why := errors.New("the caller went away")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(why)
	for name, call := range calls {
		if err := call(ctx); !errors.Is(err, why) && !errors.Is(err, context.Canceled) {
			t.Errorf("%s with a done context: %v", name, err)
		}
	}
}

func ids(rs []store.Run) []string {
	var out []string
	for _, r := range rs {
		out = append(out, r.ID)
	}
	return out
}

// works are the runs that Due gives out, of those that the test made.
func works(t *testing.T, s store.Set, mine ...string) []string {
	t.Helper()
	ws, err := s.Runs.Due(t.Context(), "host", 1000)
	ok(t, "due", err)
	var out []string
	for _, w := range ws {
		if slices.Contains(mine, w.Run.ID) {
			out = append(out, w.Run.ID)
		}
	}
	return out
}
