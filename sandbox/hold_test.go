package sandbox

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/provider/local"
	"github.com/aisandbox-go/aisandbox/workspace"
)

// What can change files waits until the state before is known; what reads, and
// what says that it is early, does not.
func TestHold(t *testing.T) {
	p := local.New(local.Options{BaseDir: t.TempDir()})
	h, err := p.Create(t.Context(), provider.Spec{})
	if err != nil {
		t.Fatal(err)
	}
	s := New(p, h, Options{})
	t.Cleanup(func() {
		_ = s.Close()
		if err := p.Destroy(context.Background(), h.Ref()); err != nil {
			t.Error(err)
		}
	})
	if err := os.WriteFile(filepath.Join(h.Root(), "a"), []byte("a"), 0o644); err != nil {
		t.Fatal(err)
	}
	early := errors.New("too early")
	s.hold = func(context.Context) error { return early }
	var tarball bytes.Buffer
	if err := s.TarOut(t.Context(), "/workspace", &tarball, provider.TarOptions{}); err != nil {
		t.Fatal(err)
	}
	ctx := t.Context()
	start := func(ctx context.Context) error {
		_, err := s.Output(ctx, provider.Cmd{Argv: []string{"true"}})
		return err
	}
	for name, do := range map[string]func(context.Context) error{
		"Start":     start,
		"Prepare":   func(context.Context) error { _, err := s.Prepare(provider.Cmd{}); return err },
		"WriteFile": func(ctx context.Context) error { return s.WriteFile(ctx, "b", nil, 0o644) },
		"Mkdir":     func(ctx context.Context) error { return s.Mkdir(ctx, "d") },
		"Remove":    func(ctx context.Context) error { return s.Remove(ctx, "d") },
		"Rename":    func(ctx context.Context) error { return s.Rename(ctx, "a", "c") },
		"Symlink":   func(ctx context.Context) error { return s.Symlink(ctx, "a", "l") },
		"TarIn":     func(ctx context.Context) error { return s.TarIn(ctx, "/workspace", bytes.NewReader(tarball.Bytes())) },
	} {
		if err := do(ctx); !errors.Is(err, early) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if b, err := s.ReadFile(ctx, "a"); err != nil || string(b) != "a" {
		t.Errorf("%q, %v", b, err)
	}
	if err := start(Early(ctx)); err != nil {
		t.Error(err)
	}
}

// An agent that changes a file at once changes it after the state that its changes
// are told from, however long that takes.
func TestWithWaitsForTheState(t *testing.T) {
	x := newFixture(t, func(d *Definition) {
		d.FileEvents = FileEventsDiff
		d.Workspace.Source = workspace.Local{Path: repo(t)}
	})
	o := WithOptions{Deps: Deps{Instances: x.store.Instances, NoGuest: true}}
	// git reads files in the order of their names, and the first takes its time.
	slow := `git config filter.slow.clean 'sleep 0.3; cat'; mkdir -p .git/info; echo '.gitignore filter=slow' >.git/info/attributes; echo x >>.gitignore; echo user >a.txt`
	if _, err := x.turn(t.Context(), "run-1", o, shell(slow)); err != nil {
		t.Fatal(err)
	}
	evs, err := x.turn(t.Context(), "run-2", o, shell("echo agent >a.txt"))
	if err != nil {
		t.Fatal(err)
	}
	for _, ev := range evs {
		if d, ok := event.CustomOf[event.FileDiff](ev, event.NameFileDiff); ok && strings.HasSuffix(d.Diff, "-user\n+agent\n") {
			return
		}
	}
	t.Errorf("no diff of what the agent did in %v", said(evs))
}
