package reaper_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/aisandbox-go/aisandbox/reaper"
	"github.com/aisandbox-go/aisandbox/store/memstore"
)

// docs/durability.md names the tests that show what it promises: they must exist.
func TestPromisesHaveTests(t *testing.T) {
	doc, err := os.ReadFile("../docs/durability.md")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, m := range regexp.MustCompile("`([a-z/]+)`: (Test\\w+(?:, Test\\w+)*)").FindAllStringSubmatch(string(doc), -1) {
		files, err := filepath.Glob(filepath.Join("..", m[1], "*_test.go"))
		if err != nil {
			t.Fatal(err)
		}
		var src strings.Builder
		for _, f := range files {
			b, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			src.Write(b)
		}
		for _, name := range strings.Split(m[2], ", ") {
			n++
			if !strings.Contains(src.String(), "func "+name+"(t *testing.T)") {
				t.Errorf("%s has no %s", m[1], name)
			}
		}
	}
	if n < 30 {
		t.Errorf("%d tests are named", n)
	}
}

// A store has one name, and no other store has it.
func TestDeployment(t *testing.T) {
	a, b := memstore.New(memstore.Options{}), memstore.New(memstore.Options{})
	first, err := reaper.Deployment(t.Context(), a.Leases)
	if err != nil || first == "" {
		t.Fatal(first, err)
	}
	if again, err := reaper.Deployment(t.Context(), a.Leases); err != nil || again != first {
		t.Errorf("%q, then %q: %v", first, again, err)
	}
	if other, err := reaper.Deployment(t.Context(), b.Leases); err != nil || other == first {
		t.Errorf("two stores are %q: %v", other, err)
	}
}
