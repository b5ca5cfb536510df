package guest

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/aisandbox-go/aisandbox/provider"
)

// seen collects the changes of a watch.
type seen struct {
	w    provider.Watch
	root string
	done chan struct{}

	mu  sync.Mutex
	all []string
	err error
}

func watching(t *testing.T, g *Handle, ignore ...string) *seen {
	t.Helper()
	w, err := g.Watch(t.Context(), ".", provider.WatchOptions{Ignore: ignore})
	if err != nil {
		t.Fatal(err)
	}
	s := &seen{w: w, root: g.Root(), done: make(chan struct{})}
	go func() {
		defer close(s.done)
		for c, err := range w.Changes() {
			s.mu.Lock()
			if err != nil {
				s.err = err
			} else {
				rel, _ := filepath.Rel(s.root, c.Path)
				s.all = append(s.all, string(c.Type)+" "+rel)
			}
			s.mu.Unlock()
		}
	}()
	t.Cleanup(func() { s.stop(t) })
	return s
}

func (s *seen) stop(t *testing.T) []string {
	t.Helper()
	if err := s.w.Stop(context.Background()); err != nil {
		t.Error(err)
	}
	<-s.done
	if s.err != nil {
		t.Error(s.err)
	}
	return s.all
}

func (s *seen) has(change string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.all {
		if c == change {
			return true
		}
	}
	return false
}

func (s *seen) wait(t *testing.T, changes ...string) {
	t.Helper()
	for _, c := range changes {
		until(t, c, func() bool { return s.has(c) })
	}
}

func write(t *testing.T, dir, name, content string) {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestWatch(t *testing.T) {
	g, h := serving(t)
	write(t, h.root, "old", "1")
	write(t, h.root, "dir/old", "1")
	s := watching(t, g, ".git", "node_modules")
	write(t, h.root, "new", "1")
	s.wait(t, "create new")
	write(t, h.root, "old", "22")
	s.wait(t, "change old")
	write(t, h.root, "dir/old", "22")
	s.wait(t, "change dir/old")
	write(t, h.root, "deep/er/est/file", "1")
	s.wait(t, "create deep/er/est/file")
	write(t, h.root, "deep/er/est/file", "22")
	s.wait(t, "change deep/er/est/file")
	write(t, h.root, "new\nline", "1")
	s.wait(t, "create new\nline")
	write(t, h.root, ".git/index", "1")
	write(t, h.root, "dir/node_modules/x/y", "1")
	if err := os.Symlink("/etc", filepath.Join(h.root, "link")); err != nil {
		t.Fatal(err)
	}
	s.wait(t, "create link")
	if err := os.Rename(filepath.Join(h.root, "new"), filepath.Join(h.root, "newer")); err != nil {
		t.Fatal(err)
	}
	s.wait(t, "delete new", "create newer")
	if err := os.Rename(filepath.Join(h.root, "deep"), filepath.Join(h.root, "moved")); err != nil {
		t.Fatal(err)
	}
	s.wait(t, "delete deep/er/est/file", "create moved/er/est/file")
	write(t, h.root, "moved/er/est/more", "1") // the watches moved along
	s.wait(t, "create moved/er/est/more")
	if err := os.RemoveAll(filepath.Join(h.root, "moved")); err != nil {
		t.Fatal(err)
	}
	s.wait(t, "delete moved/er/est/file", "delete moved/er/est/more")
	write(t, h.root, "last", "1") // right before the end
	all := s.stop(t)
	if !s.has("create last") {
		t.Error("what happened right before the end is missing")
	}
	for _, c := range all {
		for _, bad := range []string{".git", "node_modules", "link/"} {
			if strings.Contains(c, bad) {
				t.Errorf("reported: %q", c)
			}
		}
	}
}

func TestWatchOnce(t *testing.T) {
	g, h := serving(t)
	write(t, h.root, "f", "1")
	s := watching(t, g)
	write(t, h.root, "f", "22")
	s.wait(t, "change f")
	if d := cmp.Diff([]string{"change f"}, dedup(s.stop(t))); d != "" {
		t.Error(d)
	}
}

func dedup(l []string) []string {
	var out []string
	for _, s := range l {
		if len(out) == 0 || out[len(out)-1] != s {
			out = append(out, s)
		}
	}
	return out
}

// TestWatchRaces makes trees as fast as it can and compares what the watch says
// in the end with what is there.
func TestWatchRaces(t *testing.T) {
	g, h := serving(t)
	s := watching(t, g)
	for i := range 30 {
		for j := range 4 {
			write(t, h.root, fmt.Sprintf("a%d/b%d/c/f%d", i%7, j, i), fmt.Sprint(i))
		}
		switch i % 5 {
		case 1:
			_ = os.Rename(filepath.Join(h.root, fmt.Sprintf("a%d", i%7)), filepath.Join(h.root, fmt.Sprintf("r%d", i)))
		case 2:
			_ = os.RemoveAll(filepath.Join(h.root, fmt.Sprintf("a%d/b1", i%7)))
		case 3:
			_ = os.Rename(filepath.Join(h.root, fmt.Sprintf("a%d/b2", i%7)), filepath.Join(h.root, "swap"))
			_ = os.MkdirAll(filepath.Join(h.root, fmt.Sprintf("a%d/b2", i%7)), 0o755)
			_ = os.RemoveAll(filepath.Join(h.root, "swap"))
		}
	}
	want := map[string]bool{}
	err := filepath.Walk(h.root, func(p string, st os.FileInfo, err error) error {
		if err == nil && st.Mode().IsRegular() {
			rel, _ := filepath.Rel(h.root, p)
			want[rel] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]bool{}
	for _, c := range s.stop(t) {
		typ, path, _ := strings.Cut(c, " ")
		switch typ {
		case "create":
			if got[path] {
				t.Errorf("created twice: %s", path)
			}
			got[path] = true
		case "delete":
			if !got[path] {
				t.Errorf("deleted but not there: %s", path)
			}
			delete(got, path)
		}
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

func TestWatchEndsWithItsContext(t *testing.T) {
	g, _ := serving(t)
	ctx, cancel := context.WithCancel(t.Context())
	w, err := g.Watch(ctx, ".", provider.WatchOptions{})
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	var got error
	for _, err := range w.Changes() {
		got = err
	}
	if got != context.Canceled {
		t.Errorf("Changes ended with %v", got)
	}
}
