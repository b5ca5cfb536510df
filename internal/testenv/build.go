package testenv

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/aisandbox-go/aisandbox/provider"
)

// artifact is a program of this module, built once per test process.
type artifact struct {
	sync.Once
	path string
	err  error
}

var guestProgram, command artifact

// Guest returns the guest program, built from the source as it is now, in the form
// that guest.Options take it. Whatever the platform, it is this machine's.
func Guest(t testing.TB) func(platform string) (provider.Program, error) {
	t.Helper()
	root := Root(t)
	guestProgram.Do(func() { guestProgram.path, guestProgram.err = buildGuest(root) })
	if guestProgram.err != nil {
		t.Fatalf("testenv: %v", guestProgram.err)
	}
	return func(string) (provider.Program, error) {
		content, err := os.ReadFile(guestProgram.path)
		if err != nil {
			return provider.Program{}, err
		}
		sum := sha256.Sum256(content)
		return provider.Program{Digest: hex.EncodeToString(sum[:]), Path: guestProgram.path}, nil
	}
}

// Command returns the path of the aisandbox command, built from the source as it
// is now, with the guest program embedded. Nothing of the tree is touched: the
// guest gets in through an overlay, so that neither a stale one in guest/programs
// nor a missing one makes a difference.
func Command(t testing.TB) string {
	t.Helper()
	Guest(t)
	root := Root(t)
	command.Do(func() { command.path, command.err = buildCommand(root, guestProgram.path) })
	if command.err != nil {
		t.Fatalf("testenv: %v", command.err)
	}
	return command.path
}

// buildDir is where the package under test puts programs: one directory for each,
// since packages are tested at the same time.
func buildDir(root string) (string, error) {
	wd, err := os.Getwd()
	if err != nil {
		return "", err
	}
	dir := filepath.Join(root, "bin", "test", filepath.Base(wd))
	return dir, os.MkdirAll(dir, 0o755)
}

func buildGuest(root string) (string, error) {
	dir, err := buildDir(root)
	if err != nil {
		return "", err
	}
	out := filepath.Join(dir, "aisandbox-guest")
	return out, goBuild(root, out, "./cmd/aisandbox-guest", "-ldflags=-s -w")
}

func buildCommand(root, guest string) (string, error) {
	dir, err := buildDir(root)
	if err != nil {
		return "", err
	}
	embedded := filepath.Join(root, "guest", "programs", "linux-"+runtime.GOARCH)
	overlay, err := json.Marshal(map[string]map[string]string{"Replace": {embedded: guest}})
	if err != nil {
		return "", err
	}
	name := filepath.Join(dir, "overlay.json")
	if err := os.WriteFile(name, overlay, 0o644); err != nil {
		return "", err
	}
	out := filepath.Join(dir, "aisandbox")
	return out, goBuild(root, out, "./cmd/aisandbox", "-overlay="+name)
}

func goBuild(root, out, pkg string, flags ...string) error {
	args := append([]string{"build", "-trimpath", "-o", out}, flags...)
	cmd := exec.Command("go", append(args, pkg)...)
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if text, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build %s: %w: %s", pkg, err, strings.TrimSpace(string(text)))
	}
	return nil
}
