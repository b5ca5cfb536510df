// Package testenv tells tests what this machine offers: the real Claude Code
// CLI, the npm packages pinned in e2e/, an engine, a tool on PATH.
//
// It owns one rule for the whole module: a test that needs something the
// machine lacks skips with a reason on a developer's machine, and fails when
// CI=true, so that a green CI run means everything really ran. Only tests
// import this package, since it links the testing package.
package testenv

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"
)

// CI reports whether the tests run in CI (environment variable CI is "true"),
// where a missing requirement is a failure and not a reason to skip.
func CI() bool { return os.Getenv("CI") == "true" }

// Require returns when ok is true. Otherwise it ends the test: with a skip,
// or with a failure when [CI]. what names the missing thing and cure says how
// to get it; both are printed.
func Require(t testing.TB, ok bool, what, cure string) {
	t.Helper()
	if ok {
		return
	}
	if CI() {
		t.Fatalf("missing requirement: %s (%s); CI=true, so this is a failure", what, cure)
	}
	t.Skipf("missing requirement: %s (%s)", what, cure)
}

// LookPath returns the absolute path of the program name found in PATH, and
// otherwise ends the test as [Require] does.
func LookPath(t testing.TB, name, cure string) string {
	t.Helper()
	p, err := exec.LookPath(name)
	if err == nil {
		p, err = filepath.Abs(p)
	}
	Require(t, err == nil, "program "+name+" in PATH", cure)
	return p
}

// Root returns the directory of this module: the nearest parent of the test's
// working directory that holds a go.mod.
func Root(t testing.TB) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatalf("testenv: working directory: %v", err)
	}
	root, err := findRoot(dir)
	if err != nil {
		t.Fatalf("testenv: %v", err)
	}
	return root
}

func findRoot(dir string) (string, error) {
	for d := dir; ; {
		if _, err := os.Stat(filepath.Join(d, "go.mod")); err == nil {
			return d, nil
		}
		up := filepath.Dir(d)
		if up == d {
			return "", fmt.Errorf("no go.mod in %s or above", dir)
		}
		d = up
	}
}

const npmCure = "run `npm ci` in e2e/"

// NPM returns the absolute path of e2e/node_modules, where the npm packages
// pinned by e2e/package-lock.json are installed. It ends the test as
// [Require] does when they are not installed.
func NPM(t testing.TB) string {
	t.Helper()
	dir := filepath.Join(Root(t), "e2e", "node_modules")
	fi, err := os.Stat(dir)
	Require(t, err == nil && fi.IsDir(), "npm packages of e2e/", npmCure)
	return dir
}

// Claude returns the absolute path of the Claude Code executable: the one
// named by CLAUDE_CODE_BIN, else the pinned one in e2e/node_modules. It ends
// the test as [Require] does when the pinned one is not installed; a
// CLAUDE_CODE_BIN that is not an executable file always fails the test, since
// somebody asked for it.
func Claude(t testing.TB) string {
	t.Helper()
	if p := os.Getenv("CLAUDE_CODE_BIN"); p != "" {
		abs, err := filepath.Abs(p)
		if err == nil {
			err = checkExecutable(abs)
		}
		if err != nil {
			t.Fatalf("CLAUDE_CODE_BIN: %v", err)
		}
		return abs
	}
	p, err := claudeIn(filepath.Join(Root(t), "e2e"), runtime.GOOS, runtime.GOARCH)
	Require(t, err == nil, fmt.Sprintf("Claude Code CLI: %v", err), npmCure+", or set CLAUDE_CODE_BIN")
	return p
}
