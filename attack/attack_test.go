// Package attack tries what an agent, or somebody who reads over its shoulder,
// must not succeed in. Each attack has a positive control: the same probe where
// it is known to work, so that a probe that can't find anything is noticed.
package attack

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/aisandbox-go/aisandbox/guest"
	"github.com/aisandbox-go/aisandbox/internal/testenv"
	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/provider/bwrap"
	"github.com/aisandbox-go/aisandbox/provider/docker"
	"github.com/aisandbox-go/aisandbox/provider/local"
	"github.com/aisandbox-go/aisandbox/sandbox"
	"github.com/aisandbox-go/aisandbox/store/memstore"
	"github.com/aisandbox-go/aisandbox/workspace"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// place is a kind of sandbox under attack.
type place struct {
	name     string
	isolates bool // false: the positive control
	require  func(testing.TB)
	open     func(t *testing.T, o options) provider.Provider
}

// options are what a test wants of a place, where it can have that.
type options struct {
	log  *slog.Logger
	base string // state directory
	exe  string // a program of the host to show inside, at insideExe
}

// insideExe is where options.exe is in a container; elsewhere it has its own path.
const insideExe = "/opt/agent/agent"

var places = []place{
	{"local", false, func(testing.TB) {}, func(t *testing.T, o options) provider.Provider {
		return local.New(local.Options{BaseDir: o.base, Logger: o.log})
	}},
	{"bwrap", true, testenv.Bwrap, func(t *testing.T, o options) provider.Provider {
		b := bwrap.Options{BaseDir: o.base, Logger: o.log}
		if o.exe != "" {
			b.ReadOnly = []string{filepath.Dir(o.exe)}
		}
		return bwrap.New(b)
	}},
	{"docker", true, testenv.Docker, func(t *testing.T, o options) provider.Provider {
		return dockerAs(t, o, "1234:1234")
	}},
	{"docker as root", true, testenv.Docker, func(t *testing.T, o options) provider.Provider {
		return dockerAs(t, o, "")
	}},
}

func dockerAs(t *testing.T, o options, user string) provider.Provider {
	d := docker.Options{Image: testenv.Image, PullPolicy: docker.PullNever, User: user, Logger: o.log}
	if o.exe != "" {
		d.Volumes = []docker.Volume{{Source: o.exe, Target: insideExe, ReadOnly: true}}
	}
	p := docker.New(d)
	t.Cleanup(func() { _ = p.Close() })
	return p
}

// shortDir is a directory whose path is short enough for a socket in it.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "attack-")
	if err == nil {
		err = os.Chmod(dir, 0o755) // sandboxes have a user of their own
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// box makes a sandbox with the given workspace and network.
func box(t *testing.T, p provider.Provider, n provider.Network, w workspace.Workspace) *sandbox.Sandbox {
	t.Helper()
	def, err := sandbox.Define(sandbox.Definition{
		ID: "attack", Provider: p, Network: n, Workspace: w,
		Lifecycle: sandbox.Lifecycle{Snapshot: sandbox.NoSnapshot},
	})
	if err != nil {
		t.Fatal(err)
	}
	deps := sandbox.Deps{
		Instances: memstore.New(memstore.Options{}).Instances,
		Guest:     guest.Options{Program: testenv.Guest(t)},
	}
	key := sandbox.Key{ThreadID: t.Name()}
	sb, _, err := sandbox.Ensure(t.Context(), deps, def, key)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = sb.Close()
		if err := sandbox.DestroyInstance(context.Background(), deps, def, key); err != nil {
			t.Error(err)
		}
	})
	return sb
}

// sh runs a script as the agent would and returns what it printed, whatever
// became of it.
func sh(t *testing.T, sb *sandbox.Sandbox, script string) string {
	t.Helper()
	res, err := sb.Shell(t.Context(), script)
	if err != nil {
		t.Fatalf("%s: %v", script, err)
	}
	return strings.TrimSpace(string(res.Stdout) + string(res.Stderr))
}

// buffer is a writer that may be written to and read from at any time.
type buffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *buffer) Bytes() []byte {
	b.mu.Lock()
	defer b.mu.Unlock()
	return bytes.Clone(b.buf.Bytes())
}

func run(t *testing.T, name string, args ...string) []byte {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), name, args...).Output()
	if err != nil {
		t.Fatalf("%s %q: %v", name, args, err)
	}
	return out
}
