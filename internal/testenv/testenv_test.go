package testenv

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
)

// recorder stands in for a test: it notes how it ended and stops the goroutine
// as the real one does.
type recorder struct {
	testing.TB
	end string
}

func (r *recorder) Helper() {}
func (r *recorder) Skipf(f string, a ...any) {
	r.end = "skip: " + fmt.Sprintf(f, a...)
	runtime.Goexit()
}
func (r *recorder) Fatalf(f string, a ...any) {
	r.end = "fatal: " + fmt.Sprintf(f, a...)
	runtime.Goexit()
}

func outcome(t *testing.T, f func(testing.TB)) string {
	r := &recorder{TB: t, end: "ran"}
	done := make(chan struct{})
	go func() { defer close(done); f(r) }()
	<-done
	return r.end
}

func TestRequire(t *testing.T) {
	for _, tt := range []struct {
		ci   string
		ok   bool
		want string
	}{
		{"", true, "ran"},
		{"true", true, "ran"},
		{"", false, "skip: missing requirement: an engine (start one)"},
		{"1", false, "skip: missing requirement: an engine (start one)"},
		{"true", false, "fatal: missing requirement: an engine (start one); CI=true, so this is a failure"},
	} {
		t.Setenv("CI", tt.ci)
		got := outcome(t, func(tb testing.TB) { Require(tb, tt.ok, "an engine", "start one") })
		if got != tt.want {
			t.Errorf("CI=%q ok=%v: %q, want %q", tt.ci, tt.ok, got, tt.want)
		}
	}
}

func TestLookPath(t *testing.T) {
	t.Setenv("CI", "")
	dir := t.TempDir()
	t.Setenv("PATH", dir)
	if got := outcome(t, func(tb testing.TB) { LookPath(tb, "tool", "install it") }); !strings.HasPrefix(got, "skip:") {
		t.Errorf("absent tool: %q", got)
	}
	writeFile(t, filepath.Join(dir, "tool"), "#!/bin/sh\n", 0o755)
	if got := LookPath(t, "tool", ""); got != filepath.Join(dir, "tool") {
		t.Errorf("got %q", got)
	}
}

func TestRoot(t *testing.T) {
	if _, err := os.Stat(filepath.Join(Root(t), "internal", "testenv", "testenv.go")); err != nil {
		t.Error(err)
	}
	if d, err := findRoot(t.TempDir()); err == nil {
		t.Errorf("found a module in a bare directory: %s", d)
	}
}

func TestClaudeIn(t *testing.T) {
	const pins = `{"dependencies":{"@anthropic-ai/claude-code":"2.0.0"}}`
	tests := []struct {
		name, platform, version string
		mode                    os.FileMode
		goos, goarch            string
		err                     string
	}{
		{"linux", "linux-x64", "2.0.0", 0o755, "linux", "amd64", ""},
		{"musl", "linux-x64-musl", "2.0.0", 0o755, "linux", "amd64", ""},
		{"darwin", "darwin-arm64", "2.0.0", 0o755, "darwin", "arm64", ""},
		{"other platform", "darwin-arm64", "2.0.0", 0o755, "linux", "arm64", "no package @anthropic-ai/claude-code-linux-arm64"},
		{"stale", "linux-x64", "1.9.0", 0o755, "linux", "amd64", "version 1.9.0 is installed, 2.0.0 is pinned"},
		{"not executable", "linux-x64", "2.0.0", 0o644, "linux", "amd64", "not an executable file"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			e2e := t.TempDir()
			writeFile(t, filepath.Join(e2e, "package.json"), pins, 0o644)
			dir := filepath.Join(e2e, "node_modules", "@anthropic-ai", "claude-code-"+tt.platform)
			writeFile(t, filepath.Join(dir, "package.json"), `{"version":"`+tt.version+`"}`, 0o644)
			writeFile(t, filepath.Join(dir, "claude"), "", tt.mode)
			got, err := claudeIn(e2e, tt.goos, tt.goarch)
			if tt.err == "" {
				if err != nil || got != filepath.Join(dir, "claude") {
					t.Errorf("got %q, %v", got, err)
				}
			} else if err == nil || !strings.Contains(err.Error(), tt.err) {
				t.Errorf("error %v, want %q", err, tt.err)
			}
		})
	}
}

func TestClaudeBin(t *testing.T) {
	t.Setenv("CI", "")
	dir := t.TempDir()
	bin := filepath.Join(dir, "claude")
	t.Setenv("CLAUDE_CODE_BIN", bin)
	// Named but absent is a mistake of whoever named it: never a skip.
	if got := outcome(t, func(tb testing.TB) { Claude(tb) }); !strings.HasPrefix(got, "fatal: CLAUDE_CODE_BIN") {
		t.Errorf("absent: %q", got)
	}
	writeFile(t, bin, "", 0o755)
	if got := Claude(t); got != bin {
		t.Errorf("got %q", got)
	}
}

func writeFile(t *testing.T, name, content string, mode os.FileMode) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(content), mode); err != nil {
		t.Fatal(err)
	}
}
