package memstore

import (
	"os"
	"os/exec"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/store"
	"github.com/aisandbox-go/aisandbox/store/storetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// mutant names the check that the store under test goes without.
const mutant = "MEMSTORE_MUTANT"

var options = storetest.Options{
	New: func(*testing.T) store.Set {
		d := newDB(Options{Keep: 1 << 30, KeepFor: -1})
		switch os.Getenv(mutant) {
		case "epoch":
			d.noEpochCheck = true
		case "batch":
			d.noBatchCheck = true
		case "watermark":
			d.noWatermark = true
		}
		return d.set()
	},
	Bubble: synctest.Test,
}

func TestRuns(t *testing.T)      { storetest.RunRuns(t, options) }
func TestLog(t *testing.T)       { storetest.RunLog(t, options) }
func TestInstances(t *testing.T) { storetest.RunInstances(t, options) }
func TestLeaser(t *testing.T)    { storetest.RunLeaser(t, options) }
func TestMessages(t *testing.T)  { storetest.RunMessages(t, options) }

// A store without one of its checks must fail the suite, in each part that is
// there to find it.
func TestSuiteNoticesMutants(t *testing.T) {
	if os.Getenv(mutant) != "" {
		t.Skip("this is a mutant")
	}
	for _, tt := range []struct{ mutant, run string }{
		{"epoch", "TestLog/append_refuses"}, {"epoch", "TestLog/model"}, {"epoch", "TestLog/zombies"},
		{"epoch", "TestLog/finish_refuses"}, {"epoch", "TestRuns/update"}, {"epoch", "TestLeaser/life"},
		{"batch", "TestLog/append_repeated"}, {"batch", "TestLog/append_refuses"}, {"batch", "TestLog/model"}, {"batch", "TestLog/zombies"},
		{"watermark", "TestLog/append_refuses"}, {"watermark", "TestLog/finish_refuses"}, {"watermark", "TestLog/model"},
	} {
		t.Run(tt.mutant+" "+tt.run, func(t *testing.T) {
			cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+strings.ReplaceAll(tt.run, "/", "$/^")+"$", "-test.timeout=60s", "-rapid.nofailfile")
			cmd.Env = append(os.Environ(), mutant+"="+tt.mutant)
			out, err := cmd.CombinedOutput()
			if _, failed := err.(*exec.ExitError); !failed || !strings.Contains(string(out), "--- FAIL: "+tt.run) {
				t.Errorf("the suite passes a store without its %s check: %v\n%s", tt.mutant, err, out)
			}
		})
	}
}

func finish(t *testing.T, s store.Set, id string) {
	t.Helper()
	if _, _, err := s.Runs.Create(t.Context(), store.NewRun{ID: id, Thread: store.Thread{ID: "t"}}); err != nil {
		t.Fatal(err)
	}
	c, err := s.Runs.Claim(t.Context(), id, store.ClaimOptions{Owner: "o"})
	if err != nil {
		t.Fatal(err)
	}
	b := store.Batch{No: 1, Events: []store.Event{{Event: event.Custom{Name: "x"}}, {Event: event.Custom{Name: "y"}}}}
	if _, err := s.Log.Finish(t.Context(), c, store.Final{Batch: b, Status: store.Completed}); err != nil {
		t.Fatal(err)
	}
}

func TestRetention(t *testing.T) {
	known := func(t *testing.T, s store.Set) string {
		rs, _, err := s.Runs.List(t.Context(), store.Query{})
		if err != nil {
			t.Fatal(err)
		}
		var ids []string
		for _, r := range rs {
			ids = append(ids, r.ID)
		}
		return strings.Join(ids, " ")
	}
	t.Run("number", func(t *testing.T) {
		s := New(Options{Keep: 2})
		s.Runs.Create(t.Context(), store.NewRun{ID: "running", Thread: store.Thread{ID: "t"}})
		for _, id := range []string{"1", "2", "3", "4"} {
			finish(t, s, id)
		}
		if got := known(t, s); got != "running 3 4" {
			t.Errorf("known: %s", got)
		}
	})
	t.Run("age", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := New(Options{})
			finish(t, s, "old")
			// A read under way isn't cut off.
			n := 0
			for _, err := range s.Log.Read(t.Context(), "old", "") {
				if err != nil {
					t.Fatal(err)
				}
				if n++; n == 1 {
					time.Sleep(5 * time.Minute)
					finish(t, s, "new")
				}
			}
			if n != 2 {
				t.Errorf("%d events", n)
			}
			if got := known(t, s); got != "new" {
				t.Errorf("known: %s", got)
			}
			time.Sleep(5 * time.Minute)
			if _, created, err := s.Runs.Create(t.Context(), store.NewRun{ID: "new", Thread: store.Thread{ID: "t"}}); err != nil || !created {
				t.Errorf("a forgotten id: created %v, %v", created, err)
			}
			for _, err := range s.Log.Read(t.Context(), "old", "") {
				if store.Code(err, "") != "not_found" {
					t.Errorf("a forgotten run: %v", err)
				}
			}
		})
	})
}

func TestOffsetsAreSafe(t *testing.T) {
	s := New(Options{})
	finish(t, s, "a b:c/é%")
	for e, err := range s.Log.Read(t.Context(), "a b:c/é%", "") {
		if err != nil || !e.Offset.Valid() || strings.ContainsAny(string(e.Offset), " é/") {
			t.Errorf("offset %q, %v", e.Offset, err)
		}
	}
}

func TestTail(t *testing.T) { storetest.RunTail(t, options) }
