package sqlitestore

import (
	"context"
	"database/sql"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/aisandbox-go/aisandbox/store"
	"github.com/aisandbox-go/aisandbox/store/storetest"
)

// mutant names the check that the store under test goes without.
const mutant = "SQLITESTORE_MUTANT"

func TestMain(m *testing.M) {
	backend.Child()
	goleak.VerifyTestMain(m)
}

func open(t testing.TB, path string, o Options) *Store {
	t.Helper()
	o.mutant = os.Getenv(mutant)
	s, err := Open(t.Context(), path, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
		check(t, path)
	})
	return s
}

func temp(t testing.TB) string { return filepath.Join(t.TempDir(), "data", "store.db") }

// raw is the file without the store.
func raw(t testing.TB, path string) *sql.DB {
	t.Helper()
	db, err := sql.Open("sqlite", "file:"+path+"?_pragma=busy_timeout(5000)&_txlock=immediate")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	return db
}

// check looks for rows that break an invariant.
func check(t testing.TB, path string) {
	t.Helper()
	if os.Getenv(mutant) != "" {
		return
	}
	db := raw(t, path)
	for name, text := range storetest.Invariants {
		var id string
		if err := db.QueryRow(text).Scan(&id); err == nil {
			t.Errorf("%s: %q", name, id)
		} else if err != sql.ErrNoRows {
			t.Errorf("%s: %v", name, err)
		}
	}
	var state string
	if err := db.QueryRow("PRAGMA integrity_check").Scan(&state); err != nil || state != "ok" {
		t.Errorf("integrity: %s, %v", state, err)
	}
	_ = db.Close()
}

var backend = storetest.Backend{
	Place: func(t *testing.T) string { return temp(t) },
	Open: func(ctx context.Context, place string) (store.Set, func() error, error) {
		s, err := Open(ctx, place, Options{})
		if err != nil {
			return store.Set{}, nil, err
		}
		return s.Set, s.Close, nil
	},
	Check: func(t *testing.T, place string) { check(t, place) },
}

// stores finds the store of a set.
var stores sync.Map // of Runs

var options = storetest.Options{
	New: func(t *testing.T) store.Set {
		path := temp(t)
		s := open(t, path, Options{})
		stores.Store(s.Runs, made{s, path})
		return s.Set
	},
	Retainer: func(s store.Set) (store.Retainer, bool) {
		m, ok := stores.Load(s.Runs)
		return m.(made).Store, ok
	},
}

type made struct {
	*Store
	path string
}

func TestRuns(t *testing.T)      { storetest.RunRuns(t, options) }
func TestLog(t *testing.T)       { storetest.RunLog(t, options) }
func TestTail(t *testing.T)      { storetest.RunTail(t, options) }
func TestInstances(t *testing.T) { storetest.RunInstances(t, options) }
func TestLeaser(t *testing.T)    { storetest.RunLeaser(t, options) }
func TestMessages(t *testing.T)  { storetest.RunMessages(t, options) }
func TestProcesses(t *testing.T) { storetest.RunProcesses(t, backend) }

func TestRetention(t *testing.T) {
	storetest.RunRetention(t, options, func(t *testing.T, s store.Set, runID string, by time.Duration) {
		m, _ := stores.Load(s.Runs)
		if _, err := raw(t, m.(made).path).Exec("UPDATE runs SET closed_at=closed_at-? WHERE run_id=?", by.Milliseconds(), runID); err != nil {
			t.Fatal(err)
		}
	})
}

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
			cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+strings.ReplaceAll(tt.run, "/", "$/^")+"$", "-test.timeout=60s", "-rapid.nofailfile", "-rapid.shrinktime=1s")
			cmd.Env = append(os.Environ(), mutant+"="+tt.mutant)
			out, err := cmd.CombinedOutput()
			if _, failed := err.(*exec.ExitError); !failed || !strings.Contains(string(out), "--- FAIL: "+tt.run) {
				t.Errorf("the suite passes a store without its %s check: %v\n%s", tt.mutant, err, out)
			}
		})
	}
}
