package providertest

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/aisandbox-go/aisandbox/provider"
)

// lifeCases make their own sandboxes.
var lifeCases = []testCase{
	{"L1", "one key, created twice", func(t *testing.T, b *box) {
		spec := b.s.spec(t)
		spec.Key = token()
		first := b.s.create(t, spec)
		again, err := b.s.p.Create(b.ctx, spec)
		b.sameOrConflict(first.Ref(), again, err)
	}},
	{"L16", "one key, created at once", func(t *testing.T, b *box) {
		spec := b.s.spec(t)
		spec.Key = token()
		type answer struct {
			h   provider.Handle
			err error
		}
		answers := make([]answer, 4)
		var wg sync.WaitGroup
		for i := range answers {
			wg.Go(func() { answers[i].h, answers[i].err = b.s.p.Create(b.ctx, spec) })
		}
		wg.Wait()
		var won provider.Handle
		for _, a := range answers {
			if a.h != nil && won == nil {
				won = a.h
				b.s.destroyLater(t, a.h.Ref())
			}
		}
		if won == nil {
			t.Fatalf("nobody got the sandbox: %v", answers[0].err)
		}
		for _, a := range answers {
			b.sameOrConflict(won.Ref(), a.h, a.err)
		}
		b.attach(b.s.resume(t, won.Ref()))
		b.must("true")
	}},
	{"L2", "close and resume", func(t *testing.T, b *box) {
		b.own()
		b.put(b.path("kept"), "content")
		file := b.path("kept")
		for range 2 {
			if err := b.h.Close(); err != nil {
				t.Errorf("close: %v", err)
			}
		}
		b.attach(b.s.resume(t, b.storedRef()))
		if got := b.read(file); got != "content" {
			t.Errorf("the file holds %q", got)
		}
		if got := b.must("echo usable"); got != "usable\n" {
			t.Errorf("%q", got)
		}
	}},
	{"L12", "two handles at once", func(t *testing.T, b *box) {
		b.own()
		first, file := b.h, b.path("f")
		b.put(file, "shared")
		second := b.s.resume(t, b.storedRef())
		if second.Ref().ID != first.Ref().ID || second.Root() != first.Root() {
			t.Errorf("%v at %s, then %v at %s", first.Ref(), first.Root(), second.Ref(), second.Root())
		}
		b.attach(second)
		if got := b.read(file); got != "shared" {
			t.Errorf("%q", got)
		}
		second.Close()
		b.attach(first)
		b.must("true")
	}},
	{"L3", "resume of what is gone", func(t *testing.T, b *box) {
		b.own()
		ref := b.storedRef()
		b.h.Close()
		if err := b.s.p.Destroy(b.ctx, ref); err != nil {
			t.Fatal(err)
		}
		if _, err := b.s.p.Resume(b.ctx, ref); !errors.Is(err, provider.ErrNotFound) || errors.Is(err, provider.ErrUnavailable) {
			t.Errorf("after destroy: %v", err)
		}
		other := ref
		other.ID = flip(ref.ID)
		if _, err := b.s.p.Resume(b.ctx, other); !errors.Is(err, provider.ErrNotFound) {
			t.Errorf("an id that never was: %v", err)
		}
		if err := b.s.p.Destroy(b.ctx, other); err != nil {
			t.Errorf("destroy of what never was: %v", err)
		}
	}},
	{"L4", "destroy", func(t *testing.T, b *box) {
		b.own()
		tok := token()
		ps := []provider.Process{
			b.start(b.ctx, provider.Cmd{Argv: shell("trap '' TERM INT HUP; while :; do sleep 100; done", tok)}),
			b.start(b.ctx, provider.Cmd{Argv: shell(`setsid sh -c 'sleep 1000; :' "$1" & sleep 1000`, tok)}),
		}
		seen := poll(b.ctx, b.within(5*time.Second), func() bool { return len(hostProcesses(tok)) > 0 })
		begin := time.Now()
		if err := b.s.p.Destroy(b.ctx, b.h.Ref()); err != nil {
			t.Fatal(err)
		}
		if d := time.Since(begin); d > b.within(3*time.Second) {
			t.Errorf("took %v", d)
		}
		for _, p := range ps {
			ended := make(chan struct{})
			go func() {
				p.Wait()
				close(ended)
			}()
			b.wait(ended, "end of a process in a destroyed sandbox")
		}
		if seen {
			b.eventually(time.Second, "no process is left", func() bool { return len(hostProcesses(tok)) == 0 })
		}
		for range 2 {
			if err := b.s.p.Destroy(b.ctx, b.h.Ref()); err != nil {
				t.Errorf("again: %v", err)
			}
		}
		r, err := b.exec(provider.Cmd{Argv: []string{"true"}})
		if err == nil && r.exit.Code == 0 {
			t.Error("a command runs in a destroyed sandbox")
		}
		b.h.Close()
	}},
	{"L17", "destroy is of what we made only", func(t *testing.T, b *box) {
		b.own()
		victim := t.TempDir()
		if err := os.WriteFile(filepath.Join(victim, "file"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		for _, id := range []string{victim, "", "/", ".", "..", "../" + filepath.Base(victim), b.h.Ref().ID + "/.."} {
			ref := b.storedRef()
			ref.ID = id
			_ = b.s.p.Destroy(b.ctx, ref) // an error is fine
		}
		if _, err := os.Stat(filepath.Join(victim, "file")); err != nil {
			t.Errorf("a path of the host was removed: %v", err)
		}
		b.must("true")
	}},
	{"L5", "create that fails leaves nothing", func(t *testing.T, b *box) {
		l, ok := provider.As[provider.Lister](b.s.p)
		if !ok {
			b.lacks("listing")
		}
		spec := b.s.spec(t)
		spec.Labels = map[string]string{"case": token()}
		ctx, cancel := context.WithCancel(b.ctx)
		cancel()
		if h, err := b.s.p.Create(ctx, spec); err == nil {
			b.s.destroyLater(t, h.Ref())
			t.Error("created with an ended context")
		}
		if left, err := l.List(b.ctx, spec.Labels); err != nil || len(left) != 0 {
			t.Errorf("%v, %v", left, err)
		}
	}},
	{"L6", "list by labels", func(t *testing.T, b *box) {
		l, ok := provider.As[provider.Lister](b.s.p)
		if !ok {
			b.lacks("listing")
		}
		spec, mine := b.s.spec(t), token()
		spec.Labels = map[string]string{"case": mine, "n": "1"}
		one := b.s.create(t, spec)
		spec.Labels = map[string]string{"case": mine, "n": "2"}
		two := b.s.create(t, spec)
		ids := func(labels map[string]string) map[string]bool {
			list, err := l.List(b.ctx, labels)
			if err != nil {
				t.Fatal(err)
			}
			m := map[string]bool{}
			for _, e := range list {
				m[e.Ref.ID] = true
				if e.Labels["case"] != mine || time.Since(e.Created).Abs() > time.Hour || !e.Running {
					t.Errorf("%+v", e)
				}
			}
			return m
		}
		if m := ids(map[string]string{"case": mine}); len(m) != 2 || !m[one.Ref().ID] || !m[two.Ref().ID] {
			t.Errorf("both: %v", m)
		}
		if m := ids(map[string]string{"case": mine, "n": "2"}); len(m) != 1 || !m[two.Ref().ID] {
			t.Errorf("one: %v", m)
		}
		if m := ids(map[string]string{"case": mine, "other": ""}); len(m) != 0 {
			t.Errorf("none: %v", m)
		}
		two.Close()
		if err := b.s.p.Destroy(b.ctx, two.Ref()); err != nil {
			t.Fatal(err)
		}
		if m := ids(map[string]string{"case": mine}); len(m) != 1 {
			t.Errorf("after destroy: %v", m)
		}
	}},
	{"L7", "snapshot and restore", func(t *testing.T, b *box) {
		b.own()
		snap, ok := provider.As[provider.Snapshotter](b.h)
		rest, ok2 := provider.As[provider.Restorer](b.s.p)
		if !ok || !ok2 {
			b.lacks("snapshots")
		}
		a, later := b.path("a"), b.path("later")
		b.put(a, "A")
		id, err := snap.Snapshot(b.ctx, "weird label!/ü") // L8
		if err != nil {
			t.Fatal(err)
		}
		b.put(later, "B")
		raw, err := rest.Restore(b.ctx, id, b.s.spec(t))
		if err != nil {
			t.Fatal(err)
		}
		b.s.destroyLater(t, raw.Ref())
		b.attach(b.s.wrap(t, raw))
		if got := b.read(a); got != "A" || b.size(later) >= 0 {
			t.Errorf("restored: a %q, later %d", got, b.size(later))
		}
		for range 2 {
			if err := rest.DeleteSnapshot(b.ctx, id); err != nil {
				t.Error(err)
			}
		}
		if h, err := rest.Restore(b.ctx, id, b.s.spec(t)); err == nil {
			b.s.destroyLater(t, h.Ref())
			t.Error("a deleted snapshot was restored")
		}
	}},
	{"L9", "fork", func(t *testing.T, b *box) {
		b.own()
		f, ok := provider.As[provider.Forker](b.h)
		if !ok {
			b.lacks("forks")
		}
		parent, file := b.h, b.path("f")
		b.put(file, "both")
		raw, err := f.Fork(b.ctx, b.s.spec(t))
		if err != nil {
			t.Fatal(err)
		}
		b.s.destroyLater(t, raw.Ref())
		b.attach(b.s.wrap(t, raw))
		if got := b.read(file); got != "both" {
			t.Errorf("%q", got)
		}
		b.put(file, "child")
		b.attach(parent)
		if got := b.read(file); got != "both" {
			t.Errorf("the parent's file became %q", got)
		}
	}},
	{"L15", "pause", func(t *testing.T, b *box) {
		b.own()
		p, ok := provider.As[provider.Pauser](b.h)
		if !ok {
			b.lacks("pausing")
		}
		f := b.path("beats")
		proc := b.start(b.ctx, provider.Cmd{Argv: shell(beat, f)})
		b.beats(f)
		if err := p.Pause(b.ctx); err != nil {
			t.Fatal(err)
		}
		// The first handle stays open: a guest ends what was started over one that closes.
		b.attach(b.s.resume(t, b.storedRef())) // which thaws it
		was := b.size(f)
		b.eventually(10*time.Second, "beats after the pause", func() bool { return b.size(f) > was })
		_ = proc.Signal(os.Kill)
	}},
	{"M1", "usage", func(t *testing.T, b *box) {
		b.own()
		m, ok := provider.As[provider.Meter](b.h)
		if !ok {
			b.lacks("usage")
		}
		p := b.start(b.ctx, provider.Cmd{Argv: []string{"sleep", "1000"}})
		if u, err := m.Usage(b.ctx); err != nil || u.Processes < 1 && u.MemoryBytes <= 0 {
			t.Errorf("%+v, %v", u, err)
		}
		_ = p.Signal(os.Kill)
		_, _ = p.Wait()
	}},
}

// sameOrConflict judges a second Create with a key that is taken.
func (b *box) sameOrConflict(want provider.Ref, h provider.Handle, err error) {
	b.t.Helper()
	switch {
	case err != nil && !errors.Is(err, provider.ErrConflict):
		b.t.Errorf("neither the same sandbox nor ErrConflict: %v", err)
	case err == nil && h.Ref().ID != want.ID:
		b.s.destroyLater(b.t, h.Ref())
		b.t.Errorf("one key, two sandboxes: %v and %v", want, h.Ref())
	}
	if err == nil {
		h.Close()
	}
}

// storedRef is the reference as an instance store would give it back.
func (b *box) storedRef() provider.Ref {
	b.t.Helper()
	text, err := json.Marshal(b.h.Ref())
	if err != nil {
		b.t.Fatal(err)
	}
	var ref provider.Ref
	if err := json.Unmarshal(text, &ref); err != nil {
		b.t.Fatal(err)
	}
	return ref
}

// token is a text that is nowhere else, and a valid key.
func token() string {
	var raw [10]byte
	for i := range raw {
		raw[i] = byte(rand.Uint32())
	}
	return "t" + hex.EncodeToString(raw[:])
}

// flip changes the last letter or digit of an id, which keeps its shape.
func flip(id string) string {
	c := []byte(id)
	for i := len(c) - 1; i >= 0; i-- {
		switch {
		case c[i] == '0':
			c[i] = '1'
		case c[i] >= '1' && c[i] <= '9':
			c[i] = '0'
		case c[i] == 'a':
			c[i] = 'b'
		case c[i] >= 'b' && c[i] <= 'z':
			c[i] = 'a'
		default:
			continue
		}
		break
	}
	return string(c)
}

// hostProcesses are the living processes with text in their arguments that this
// host can see.
func hostProcesses(text string) []int {
	var pids []int
	es, _ := os.ReadDir("/proc")
	for _, e := range es {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if line, err := os.ReadFile("/proc/" + e.Name() + "/cmdline"); err == nil && bytes.Contains(line, []byte(text)) {
			pids = append(pids, pid)
		}
	}
	return pids
}
