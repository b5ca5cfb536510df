package sqlitestore

import (
	"os"
	"path/filepath"
	"testing"

	"go.uber.org/goleak"

	"github.com/aisandbox-go/aisandbox/store"
	"github.com/aisandbox-go/aisandbox/store/storetest"
)

// mutant names the check that the store under test goes without.
const mutant = "SQLITESTORE_MUTANT"

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

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
	})
	return s
}

func temp(t testing.TB) string { return filepath.Join(t.TempDir(), "data", "store.db") }

var options = storetest.Options{
	New: func(t *testing.T) store.Set { return open(t, temp(t), Options{}).Set },
}

func TestRuns(t *testing.T)      { storetest.RunRuns(t, options) }
func TestLog(t *testing.T)       { storetest.RunLog(t, options) }
func TestInstances(t *testing.T) { storetest.RunInstances(t, options) }
func TestLeaser(t *testing.T)    { storetest.RunLeaser(t, options) }
func TestMessages(t *testing.T)  { storetest.RunMessages(t, options) }
