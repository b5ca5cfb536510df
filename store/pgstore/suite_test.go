package pgstore

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"go.uber.org/goleak"

	"github.com/aisandbox-go/aisandbox/internal/testenv"
	"github.com/aisandbox-go/aisandbox/store"
	"github.com/aisandbox-go/aisandbox/store/storetest"
)

// mutant names the check that the store under test goes without.
const mutant = "PGSTORE_MUTANT"

func TestMain(m *testing.M) {
	backend.Child()
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		testenv.StopPostgres()
		os.Exit(code)
	}))
}

func open(t testing.TB, url string, o Options) *Store {
	t.Helper()
	o.mutant = os.Getenv(mutant)
	s, err := Open(t.Context(), url, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return s
}

// raw runs a statement and returns the first column of the first row, as text.
func raw(t testing.TB, url, text string, args ...any) string {
	t.Helper()
	ctx := context.Background() // also after the test
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(ctx)
	var out *string
	err = conn.QueryRow(ctx, text, args...).Scan(&out)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		t.Fatalf("%s: %v", text, err)
	}
	if out == nil {
		return ""
	}
	return *out
}

// check looks for rows that break an invariant.
func check(t testing.TB, url string) {
	t.Helper()
	if os.Getenv(mutant) != "" {
		return
	}
	for name, text := range storetest.Invariants {
		if id := raw(t, url, text); id != "" {
			t.Errorf("%s: %q", name, id)
		}
	}
}

var backend = storetest.Backend{
	Place: func(t *testing.T) string { return testenv.Postgres(t) },
	Open: func(ctx context.Context, place string) (store.Set, func() error, error) {
		s, err := Open(ctx, place, Options{})
		if err != nil {
			return store.Set{}, nil, err
		}
		return s.Set, s.Close, nil
	},
	Check: func(t *testing.T, place string) { check(t, place) },
}

type made struct {
	*Store
	url string
}

var stores sync.Map // of Runs

var options = storetest.Options{
	New: func(t *testing.T) store.Set {
		url := testenv.Postgres(t)
		s := open(t, url, Options{})
		t.Cleanup(func() { check(t, url) })
		stores.Store(s.Runs, made{s, url})
		return s.Set
	},
	Retainer: func(s store.Set) (store.Retainer, bool) {
		m, ok := stores.Load(s.Runs)
		return m.(made).Store, ok
	},
}

func TestRuns(t *testing.T)      { storetest.RunRuns(t, options) }
func TestLog(t *testing.T)       { storetest.RunLog(t, options) }
func TestTail(t *testing.T)      { storetest.RunTail(t, options) }
func TestInstances(t *testing.T) { storetest.RunInstances(t, options) }
func TestLeaser(t *testing.T)    { storetest.RunLeaser(t, options) }
func TestMessages(t *testing.T)  { storetest.RunMessages(t, options) }
func TestProcesses(t *testing.T) { storetest.RunProcesses(t, backend) }

func age(t *testing.T, s store.Set, runID string, by time.Duration) {
	t.Helper()
	m, _ := stores.Load(s.Runs)
	raw(t, m.(made).url, "UPDATE runs SET closed_at=closed_at-$1 WHERE run_id=$2", by.Milliseconds(), runID)
}

func TestRetention(t *testing.T) { storetest.RunRetention(t, options, age) }

// A store without one of its checks must fail the suite.
func TestSuiteNoticesMutants(t *testing.T) {
	if os.Getenv(mutant) != "" {
		t.Skip("this is a mutant")
	}
	for _, tt := range []struct{ mutant, run string }{
		{"epoch", "TestLog/zombies"}, {"batch", "TestLog/append_repeated"}, {"watermark", "TestLog/append_refuses"},
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
