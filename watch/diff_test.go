package watch

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/aisandbox-go/aisandbox/provider"
)

func discard() *slog.Logger { return slog.New(slog.DiscardHandler) }

func git(t *testing.T, dir string, args ...string) string {
	t.Helper()
	cmd := exec.Command("git", append([]string{"-c", "user.name=a", "-c", "user.email=a@example.com"}, args...)...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_NOSYSTEM=1")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("git %v: %v\n%s", args, err, out)
	}
	return strings.TrimSpace(string(out))
}

func differ(t *testing.T, h provider.Handle, o DiffOptions) *Differ {
	t.Helper()
	d, err := NewDiffer(t.Context(), h, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return d
}

func TestDiffer(t *testing.T) {
	h := newHandle(t)
	root := h.Root()
	git(t, root, "init", "-q", "-b", "main")
	put(t, root, map[string]string{
		"a": "one\n", "same": "s\n", "dirty": "committed\n", "gone": "g\n", ".gitignore": "ignored\n", "bin": "\x00\x01", "evil": "e\n", ".env": "K=1\n",
	})
	git(t, root, "add", "-Af")
	git(t, root, "commit", "-qm", "first")
	put(t, root, map[string]string{"dirty": "of the user\n", "untracked": "of the user\n", "ignored": "old\n", "staged": "of the user\n"})
	git(t, root, "add", "staged")
	index, _ := os.ReadFile(root + "/.git/index")
	status := git(t, root, "status", "--porcelain", "--untracked-files=all")
	objects := git(t, root, "count-objects")
	git(t, root, "config", "diff.evil.command", "touch "+root+"/pwned")
	git(t, root, "config", "diff.evil.textconv", "touch "+root+"/pwned")
	git(t, root, "config", "core.fsmonitor", "touch "+root+"/pwned")
	put(t, root, map[string]string{".git/info/attributes": "evil diff=evil\n"})

	d := differ(t, h, DiffOptions{Redact: func(s string) string { return strings.ReplaceAll(s, "hunter2", "[secret]") }})
	if now, _ := os.ReadFile(root + "/.git/index"); string(now) != string(index) {
		t.Error("the repository's index changed")
	}
	if now := git(t, root, "-c", "core.fsmonitor=false", "count-objects"); now != objects {
		t.Errorf("objects %s, were %s", now, objects)
	}
	if now := git(t, root, "-c", "core.fsmonitor=false", "status", "--porcelain", "--untracked-files=all"); now != status {
		t.Errorf("status %s, was %s", now, status)
	}
	if d.Head() != git(t, root, "rev-parse", "HEAD") {
		t.Error("head", d.Head())
	}
	if err := os.Remove(root + "/pwned"); err == nil {
		t.Log("the tests' own git ran the monitor")
	}

	put(t, root, map[string]string{
		"a": "two\n", "dirty": "of the user\nand the agent\n", "untracked": "of the agent\n", "new file": "n\nhunter2", "empty": "", "ignored": "new\n",
		"bin": "\x00\x02", "newbin": "\x00", "evil": "f\n", ".env": "K=2\n", "sub/.env.local": "K=2\n", ":(top)x": "magic\n", "big": strings.Repeat("x\n", 1<<20),
	})
	if err := os.Remove(root + "/gone"); err != nil {
		t.Fatal(err)
	}
	type texts struct{ before, after, diff string }
	for name, want := range map[string]texts{
		"a":              {"one\n", "two\n", "@@ -1 +1 @@\n-one\n+two\n"},
		"same":           {"s\n", "s\n", ""},
		"dirty":          {"of the user\n", "of the user\nand the agent\n", "@@ -1 +1,2 @@\n of the user\n+and the agent\n"},
		"untracked":      {"of the user\n", "of the agent\n", "@@ -1 +1 @@\n-of the user\n+of the agent\n"},
		"staged":         {"of the user\n", "of the user\n", ""},
		"gone":           {"g\n", "", "@@ -1 +0,0 @@\n-g\n"},
		"new file":       {"", "n\n[secret]", "--- /dev/null\n+++ b/new file\n@@ -0,0 +1,2 @@\n+n\n+[secret]\n\\ No newline at end of file\n"},
		"empty":          {"", "", "diff --git a/empty b/empty\nnew file mode 100644\n"},
		"ignored":        {"", "new\n", ""},
		"bin":            {"", "", "Binary files a/bin and b/bin differ\n"},
		"newbin":         {"", "", "Binary files /dev/null and b/newbin differ\n"},
		"evil":           {"e\n", "f\n", "@@ -1 +1 @@\n-e\n+f\n"},
		".env":           {"", "", ""},
		"sub/.env.local": {"", "", ""},
		":(top)x":        {"", "magic\n", "@@ -0,0 +1,1 @@\n+magic\n"},
		"big":            {"", "", "File of more than 1048576 bytes left out\n"},
		"missing":        {"", "", ""},
	} {
		before, err1 := d.Before(t.Context(), root+"/"+name)
		after, err2 := d.After(t.Context(), name)
		diff, err3 := d.Diff(t.Context(), name)
		if err := errors.Join(err1, err2, err3); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if before != want.before || after != want.after || !strings.HasSuffix(diff, want.diff) || want.diff == "" && diff != "" {
			t.Errorf("%s: before %q, after %q, diff:\n%s\nwant %q", name, before, after, diff, want)
		}
	}
	if _, err := d.Diff(t.Context(), "../x"); !errors.Is(err, provider.ErrInvalid) {
		t.Error(err)
	}

	if err := os.Remove(root + "/big"); err != nil {
		t.Fatal(err)
	}
	diff, cut, err := d.Tree(t.Context(), 0)
	if err != nil || cut {
		t.Fatal(err, cut)
	}
	for _, want := range []string{"+two\n", "+and the agent\n", "+of the agent\n", "b/new file", "+[secret]", "-g\n"} {
		if !strings.Contains(diff, want) {
			t.Errorf("%q is missing in\n%s", want, diff)
		}
	}
	for _, bad := range []string{"+of the user", "K=", "hunter2", ".env", "ignored"} {
		if strings.Contains(diff, bad) {
			t.Errorf("%q is in\n%s", bad, diff)
		}
	}
	if short, cut, err := d.Tree(t.Context(), 200); err != nil || !cut || len(short) > 200 || !strings.HasSuffix(short, "\n") {
		t.Errorf("%q %v %v", short, cut, err)
	}
	if _, err := os.Stat(root + "/pwned"); err == nil {
		t.Error("a program that the repository names was run")
	}
	if err := d.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(d.tmp); err == nil {
		t.Error("files are left behind")
	}
}

// The repository has many forms; git has to be asked about the rare ones.
func TestDifferForms(t *testing.T) {
	for name, shape := range map[string]func(t *testing.T, root, side string){
		"plain":    func(t *testing.T, root, side string) { git(t, root, "init", "-q", "-b", "main") },
		"detached": func(t *testing.T, root, side string) { git(t, root, "init", "-q", "-b", "main") },
		"packed":   func(t *testing.T, root, side string) { git(t, root, "init", "-q", "-b", "main") },
		"worktree": func(t *testing.T, root, side string) {
			git(t, side, "init", "-q", "-b", "main")
			git(t, side, "commit", "-q", "--allow-empty", "-m", "base")
			git(t, side, "worktree", "add", "-q", "--force", "-b", "other", root)
		},
		"alternates": func(t *testing.T, root, side string) {
			git(t, side, "init", "-q", "-b", "main")
			git(t, side, "commit", "-q", "--allow-empty", "-m", "base")
			git(t, root, "clone", "-q", "-s", side, ".")
		},
		"odd name": func(t *testing.T, root, side string) { git(t, root, "init", "-q", "-b", "a/b'c") },
		"elsewhere": func(t *testing.T, root, side string) {
			git(t, root, "init", "-q", "-b", "main")
			git(t, root, "config", "core.worktree", side)
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHandle(t)
			root := h.Root()
			shape(t, root, t.TempDir())
			work := "--work-tree=" + root
			put(t, root, map[string]string{"a": "one\n", "sub/0:b": "one\n"})
			git(t, root, work, "add", "-A")
			git(t, root, work, "commit", "-qm", "first")
			switch name {
			case "detached":
				git(t, root, "checkout", "-q", "--detach")
			case "packed":
				git(t, root, "pack-refs", "--all")
			}
			put(t, root, map[string]string{"a": "of the user\n"})
			d := differ(t, h, DiffOptions{})
			if want := git(t, root, "rev-parse", "HEAD"); d.Head() != want {
				t.Errorf("head %q, want %q", d.Head(), want)
			}
			put(t, root, map[string]string{"a": "of the agent\n", "sub/0:b": "two\n"})
			for file, want := range map[string]string{"a": "-of the user\n+of the agent\n", "sub/0:b": "-one\n+two\n"} {
				if diff, err := d.Diff(t.Context(), file); err != nil || !strings.HasSuffix(diff, want) {
					t.Errorf("%s: %q, %v", file, diff, err)
				}
			}
			if before, err := d.Before(t.Context(), "sub/0:b"); err != nil || before != "one\n" {
				t.Errorf("before: %q, %v", before, err)
			}
			for range 2 {
				diff, _, err := d.Tree(t.Context(), 0)
				if err != nil || !strings.Contains(diff, "-of the user\n+of the agent\n") || !strings.Contains(diff, "-one\n+two\n") {
					t.Errorf("%q, %v", diff, err)
				}
			}
		})
	}
}

// The root may lie below the top of the work tree.
func TestDifferBelowTheTop(t *testing.T) {
	h := newHandle(t)
	top := h.Root()
	git(t, top, "init", "-q", "-b", "main")
	put(t, top, map[string]string{"a": "top\n", "sub/a": "one\n"})
	git(t, top, "add", "-A")
	git(t, top, "commit", "-qm", "first")
	d := differ(t, h, DiffOptions{Root: top + "/sub"})
	put(t, top, map[string]string{"sub/a": "two\n"})
	before, err := d.Before(t.Context(), "a")
	if err != nil || before != "one\n" {
		t.Errorf("before %q, %v", before, err)
	}
	diff, err := d.Diff(t.Context(), "a")
	if err != nil || !strings.HasSuffix(diff, "-one\n+two\n") {
		t.Errorf("diff %q, %v", diff, err)
	}
}

// A baseline that is given up leaves nothing behind.
func TestDifferCancelled(t *testing.T) {
	h := newHandle(t)
	root := h.Root()
	git(t, root, "init", "-q")
	git(t, root, "config", "filter.slow.clean", "sleep 1000")
	put(t, root, map[string]string{".gitattributes": "a filter=slow\n", "a": "1\n"})
	cause := errors.New("because")
	ctx, cancel := context.WithCancelCause(t.Context())
	d := StartDiffer(ctx, h, DiffOptions{})
	dir := filepath.Join(os.TempDir(), "aisandbox-diff-"+d.name)
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		if _, err := os.Stat(dir + "/index.lock"); err == nil {
			break
		}
		if time.Now().After(end) {
			t.Fatal("it is not at work")
		}
	}
	impatient, stop := context.WithCancel(t.Context())
	stop()
	if err := d.Ready(impatient); err != context.Canceled {
		t.Errorf("Ready: %v", err)
	}
	cancel(cause)
	if err := d.Ready(t.Context()); err != cause {
		t.Errorf("Ready: %v", err)
	}
	if _, err := d.Diff(t.Context(), "a"); err != cause {
		t.Errorf("Diff: %v", err)
	}
	if err := d.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(dir); err == nil {
		t.Error("files are left behind")
	}
	if d, err := NewDiffer(ctx, h, DiffOptions{}); err != cause || d != nil {
		t.Errorf("NewDiffer: %v", err)
	}
}

func TestDifferNoCommit(t *testing.T) {
	h := newHandle(t)
	git(t, h.Root(), "init", "-q")
	put(t, h.Root(), map[string]string{"old": "1\n"})
	d := differ(t, h, DiffOptions{})
	put(t, h.Root(), map[string]string{"new": "2\n"})
	diff, _, err := d.Tree(t.Context(), 0)
	if err != nil || !strings.Contains(diff, "+2") || strings.Contains(diff, "+1\n") || d.Head() != "" {
		t.Errorf("%q, %v", diff, err)
	}
}

func TestDifferWithoutGit(t *testing.T) {
	h := newHandle(t)
	put(t, h.Root(), map[string]string{"x": "1\n", ".env": "K=1"})
	d := differ(t, h, DiffOptions{})
	for name, want := range map[string]string{
		"x": "diff --git a/x b/x\nnew file mode 100644\n--- /dev/null\n+++ b/x\n@@ -0,0 +1,1 @@\n+1\n", "gone": "", ".env": "",
	} {
		got, err := d.Diff(t.Context(), filepath.Join(h.Root(), name))
		if got != want || err != nil {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
	if diff, _, err := d.Tree(t.Context(), 0); diff != "" || err != nil {
		t.Error(diff, err)
	}
}

// A baseline with a name is that of who made it first.
func TestNamedBaseline(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	h := newHandle(t)
	root := h.Root()
	git(t, root, "init", "-q", "-b", "main")
	put(t, root, map[string]string{"a": "one\n"})
	git(t, root, "add", "-A")
	git(t, root, "commit", "-qm", "first")
	first, err := NewDiffer(t.Context(), h, DiffOptions{Name: "x1"})
	if err != nil {
		t.Fatal(err)
	}
	put(t, root, map[string]string{"a": "two\n"})
	second, err := NewDiffer(t.Context(), h, DiffOptions{Name: "x1"})
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range []*Differ{first, second} {
		if tree, _, err := d.Tree(t.Context(), 0); err != nil || !strings.Contains(tree, "-one\n+two") {
			t.Errorf("%q, %v", tree, err)
		}
	}
	if err := second.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	third := differ(t, h, DiffOptions{Name: "x1"})
	if tree, _, err := third.Tree(t.Context(), 0); err != nil || tree != "" {
		t.Errorf("after it was closed: %q, %v", tree, err)
	}
	if d := differ(t, h, DiffOptions{Name: "../x"}); d.git {
		t.Error("a name leads elsewhere")
	}
}
