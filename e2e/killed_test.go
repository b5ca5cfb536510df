package e2e

import (
	"context"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/aisandbox-go/aisandbox/internal/testenv"
	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/provider/bwrap"
	"github.com/aisandbox-go/aisandbox/provider/docker"
	"github.com/aisandbox-go/aisandbox/provider/local"
)

// TestRunKilled writes down what kill -9 of `aisandbox run` leaves: the agent ends,
// since nobody listens to it, and the sandbox stays, since it outlives its host by
// design. The backend finds it, and destroying it removes all of it.
func TestRunKilled(t *testing.T) {
	for _, prov := range []string{"local", "bwrap", "docker"} {
		t.Run(prov, func(t *testing.T) {
			c := newCommand(t)
			mark, script := c.sleeper()
			cmd := c.cmd(append([]string{"run", "--repo", "", "--script", script}, append(c.in(prov), "wait")...)...)
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			testenv.Eventually(t, 30*time.Second, "the agent's commands run", func() bool { return len(sleeps(mark)) == 2 })
			if err := cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			_ = cmd.Wait()
			testenv.Eventually(t, 10*time.Second, "the agent ends", func() bool { return len(testenv.Processes(mark)) == 0 })

			p := c.backend(prov)
			var ours []provider.Listed
			for _, l := range listed(t, p) {
				if prov != "docker" || slices.Contains(c.containers(), l.Ref.ID) {
					ours = append(ours, l)
				}
			}
			if len(ours) != 1 || len(ours[0].Labels) == 0 {
				t.Fatalf("the backend lists %+v; left is %q", ours, c.left())
			}
			if prov != "local" && !ours[0].Running {
				t.Errorf("the sandbox ended with the command: %+v", ours[0])
			}
			if err := p.Destroy(context.WithoutCancel(t.Context()), ours[0].Ref); err != nil {
				t.Error(err)
			}
			// What a killed process had in TMPDIR nobody can remove for it.
			left := slices.DeleteFunc(c.left(), func(l string) bool { return strings.HasPrefix(l, "tmp/") })
			if len(left) > 0 {
				t.Errorf("left after the sandbox was destroyed:\n%s", strings.Join(left, "\n"))
			}
		})
	}
}

// backend is the provider that the command used, in this process.
func (c *command) backend(name string) provider.Provider {
	base := filepath.Join(c.dir, "state", "aisandbox", name)
	switch name {
	case "local":
		return local.New(local.Options{BaseDir: base})
	case "bwrap":
		return bwrap.New(bwrap.Options{BaseDir: base})
	}
	p := docker.New(docker.Options{Image: testenv.Image})
	c.t.Cleanup(func() { _ = p.Close() })
	return p
}

func listed(t *testing.T, p provider.Provider) []provider.Listed {
	t.Helper()
	l, ok := provider.As[provider.Lister](p)
	if !ok {
		t.Fatalf("%s can't list its sandboxes", p.Name())
	}
	all, err := l.List(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	return all
}
