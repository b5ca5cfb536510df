package providertest

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/aisandbox-go/aisandbox/provider"
)

var watchCases = []testCase{
	{"W1", "changes arrive while they happen", func(t *testing.T, b *box) {
		b.put(b.path("old"), "x")
		b.put(b.path("gone"), "x")
		w := b.watch(b.dir(), provider.WatchOptions{})
		for _, step := range []struct {
			script string
			typ    provider.ChangeType
			name   string
		}{
			{`echo 1 >"$1/new"`, provider.ChangeCreate, "new"},
			{`echo 22 >>"$1/old"`, provider.ChangeModify, "old"},
			{`rm "$1/gone"`, provider.ChangeDelete, "gone"},
			{`mkdir "$1/d"; echo 1 >"$1/d/deep"`, provider.ChangeCreate, "d/deep"},
			{`echo 2 >>"$1/d/deep"`, provider.ChangeModify, "d/deep"},
			{`ln -s nowhere "$1/link"`, provider.ChangeCreate, "link"},
			{"echo 1 >\"$1/a\nb\"", provider.ChangeCreate, "a\nb"},
			{`rm -r "$1/d"`, provider.ChangeDelete, "d/deep"},
		} {
			b.must(step.script, b.dir())
			b.eventually(10*time.Second, fmt.Sprintf("%s %q; have %v", step.typ, step.name, w.all()), func() bool {
				return w.has(step.typ, b.path(step.name))
			})
		}
		w.stop()
		for _, c := range w.all() {
			if c.Path == b.dir() || c.Path == b.path("d") || !strings.HasPrefix(c.Path, b.dir()+"/") {
				t.Errorf("reported: %v", c)
			}
		}
	}},
	{"W2", "rename is a delete and a create", func(t *testing.T, b *box) {
		b.put(b.path("a"), "x")
		b.put(b.path("d/x"), "x")
		b.put(b.path("over"), "x")
		w := b.watch(b.dir(), provider.WatchOptions{})
		b.must(`cd "$1" && mv a b && mv d e && echo new >tmp && mv tmp over`, b.dir())
		w.stop()
		for _, want := range []provider.Change{
			{Type: provider.ChangeDelete, Path: b.path("a")}, {Type: provider.ChangeCreate, Path: b.path("b")},
			{Type: provider.ChangeDelete, Path: b.path("d/x")}, {Type: provider.ChangeCreate, Path: b.path("e/x")},
		} {
			if !w.has(want.Type, want.Path) {
				t.Errorf("missing %v in %v", want, w.all())
			}
		}
		if !w.has(provider.ChangeModify, b.path("over")) && !w.has(provider.ChangeCreate, b.path("over")) {
			t.Errorf("a file that was replaced is missing in %v", w.all())
		}
	}},
	{"W3", "files in directories that have just been made", func(t *testing.T, b *box) {
		w := b.watch(b.dir(), provider.WatchOptions{})
		b.must(`cd "$1" && i=0; while [ $i -lt 100 ]; do mkdir -p d$i/e/f && : >d$i/e/f/x; i=$((i+1)); done`, b.dir())
		b.eventually(10*time.Second, "all 100 files", func() bool { return len(w.all()) >= 100 })
		w.stop()
		for i := range 100 {
			if n := b.path(fmt.Sprintf("d%d/e/f/x", i)); !w.has(provider.ChangeCreate, n) {
				t.Errorf("%s was missed", n)
			}
		}
	}},
	{"W4", "the last change before the end", func(t *testing.T, b *box) {
		for i := range 5 {
			w := b.watch(b.dir(), provider.WatchOptions{})
			n := b.path(fmt.Sprintf("last%d", i))
			b.put(n, "x")
			w.stop()
			if got := w.count(n); got != 1 || !w.has(provider.ChangeCreate, n) {
				t.Errorf("%d events of %s: %v", got, n, w.all())
			}
		}
	}},
	{"W5", "ignored names", func(t *testing.T, b *box) {
		b.put(b.path("node_modules/old"), "x")
		w := b.watch(b.dir(), provider.WatchOptions{Ignore: []string{".git", "node_modules"}})
		b.must(`cd "$1" && mkdir .git a a/.git && : >.git/x && : >a/.git/x && : >node_modules/x && echo >>node_modules/old && : >.gitx && : >a/seen`, b.dir())
		w.stop()
		got := []string{}
		for _, c := range w.all() {
			got = append(got, strings.TrimPrefix(c.Path, b.dir()+"/"))
		}
		slices.Sort(got)
		if !slices.Equal(slices.Compact(got), []string{".gitx", "a/seen"}) {
			t.Errorf("reported: %q", got)
		}
	}},
	{"W6", "what was before is not reported", func(t *testing.T, b *box) {
		for i := range 20 {
			b.put(b.path(fmt.Sprintf("d%d/f", i)), "x")
		}
		w := b.watch(b.dir(), provider.WatchOptions{})
		w.stop()
		w.stop()
		if got := w.all(); len(got) != 0 {
			t.Errorf("reported: %v", got)
		}
	}},
	{"W7", "watching what is missing", func(t *testing.T, b *box) {
		w, ok := provider.As[provider.Watcher](b.h)
		if !ok {
			b.lacks("watching")
		}
		watch, err := w.Watch(b.ctx, b.path("none"), provider.WatchOptions{})
		if err == nil {
			for _, e := range watch.Changes() {
				err = e
			}
		}
		b.isMissing("watch", err)
	}},
}

// watching collects the changes of a watch.
type watching struct {
	b    *box
	w    provider.Watch
	done chan struct{}

	mu  sync.Mutex
	got []provider.Change
}

func (b *box) watch(dir string, opts provider.WatchOptions) *watching {
	b.t.Helper()
	wr, ok := provider.As[provider.Watcher](b.h)
	if !ok {
		b.lacks("watching")
	}
	w, err := wr.Watch(b.ctx, dir, opts)
	if err != nil {
		b.t.Fatalf("watch: %v", err)
	}
	g := &watching{b: b, w: w, done: make(chan struct{})}
	go func() {
		defer close(g.done)
		for c, err := range w.Changes() {
			if err != nil {
				b.t.Errorf("changes: %v", err)
				return
			}
			g.mu.Lock()
			g.got = append(g.got, c)
			g.mu.Unlock()
		}
	}()
	return g
}

// stop returns when everything has arrived.
func (g *watching) stop() {
	g.b.t.Helper()
	if err := g.w.Stop(g.b.ctx); err != nil {
		g.b.t.Errorf("stop: %v", err)
	}
	g.b.wait(g.done, "end of the changes")
}

func (g *watching) all() []provider.Change {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Clone(g.got)
}

func (g *watching) has(typ provider.ChangeType, path string) bool {
	return slices.Contains(g.all(), provider.Change{Type: typ, Path: path})
}

func (g *watching) count(path string) (n int) {
	for _, c := range g.all() {
		if c.Path == path {
			n++
		}
	}
	return n
}
