package pgstore

import (
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/aisandbox-go/aisandbox/internal/testenv"
	"github.com/aisandbox-go/aisandbox/store"
	"github.com/aisandbox-go/aisandbox/store/storetest"
)

// mutant names the check that the store under test goes without.
const mutant = "PGSTORE_MUTANT"

func TestMain(m *testing.M) {
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

var options = storetest.Options{
	New: func(t *testing.T) store.Set { return open(t, testenv.Postgres(t), Options{}).Set },
}

func TestRuns(t *testing.T)      { storetest.RunRuns(t, options) }
func TestLog(t *testing.T)       { storetest.RunLog(t, options) }
func TestInstances(t *testing.T) { storetest.RunInstances(t, options) }
func TestLeaser(t *testing.T)    { storetest.RunLeaser(t, options) }
func TestMessages(t *testing.T)  { storetest.RunMessages(t, options) }
