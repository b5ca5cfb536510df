package storetest_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/aisandbox-go/aisandbox/internal/testenv"
	"github.com/aisandbox-go/aisandbox/store"
	"github.com/aisandbox-go/aisandbox/store/memstore"
	"github.com/aisandbox-go/aisandbox/store/pgstore"
	"github.com/aisandbox-go/aisandbox/store/sqlitestore"
	"github.com/aisandbox-go/aisandbox/store/storetest"
)

func TestMain(m *testing.M) {
	code := m.Run()
	testenv.StopPostgres()
	os.Exit(code)
}

// All stores answer the same questions alike.
func TestAlike(t *testing.T) {
	backends := map[string]func(t *testing.T) store.Set{
		"sqlite": func(t *testing.T) store.Set {
			s, err := sqlitestore.Open(t.Context(), filepath.Join(t.TempDir(), "store.db"), sqlitestore.Options{Normal: true})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = s.Close() })
			return s.Set
		},
		"postgres": func(t *testing.T) store.Set {
			s, err := pgstore.Open(t.Context(), testenv.Postgres(t), pgstore.Options{})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = s.Close() })
			return s.Set
		},
	}
	for seed := range uint64(3) {
		want := storetest.Answers(t, memstore.New(memstore.Options{}), seed)
		for name, open := range backends {
			t.Run(name, func(t *testing.T) {
				got := storetest.Answers(t, open(t), seed)
				if d := cmp.Diff(want, got); d != "" {
					t.Errorf("seed %d: %s answers otherwise (-memory +%s):\n%s", seed, name, name, d)
				}
			})
		}
	}
}
