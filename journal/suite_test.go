package journal_test

import (
	"context"
	"os/exec"
	"path/filepath"
	"testing"

	"go.uber.org/goleak"

	"github.com/aisandbox-go/aisandbox/guest"
	"github.com/aisandbox-go/aisandbox/internal/testenv"
	"github.com/aisandbox-go/aisandbox/journal"
	"github.com/aisandbox-go/aisandbox/journal/journaltest"
	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/provider/local"
)

func TestMain(m *testing.M) {
	guest.Hook() // this binary is the guest of the sandboxes below
	goleak.VerifyTestMain(m)
}

func sandbox(t *testing.T) provider.Handle {
	t.Helper()
	h, err := local.New(local.Options{BaseDir: t.TempDir()}).Create(t.Context(), provider.Spec{Key: "k"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = h.Close() })
	return h
}

func TestGuest(t *testing.T) {
	journaltest.Run(t, journaltest.Options{
		Open: func(t *testing.T) (provider.Reattacher, func(string) string) {
			h := sandbox(t)
			dir := filepath.Join(t.TempDir(), "j")
			g, err := guest.Attach(t.Context(), h, guest.Options{JournalDir: dir, Traits: local.New(local.Options{}).Traits()})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = g.Close() })
			return g, func(token string) string { return filepath.Join(dir, token+".journal") }
		},
	})
}

func shellSuite(t *testing.T, wrap func(provider.Handle) provider.Handle) {
	journaltest.Run(t, journaltest.Options{
		Open: func(t *testing.T) (provider.Reattacher, func(string) string) {
			return journal.Shell(wrap(sandbox(t))), func(token string) string { return journal.Dir + "/" + token + ".ndjson" }
		},
	})
}

func TestShell(t *testing.T) {
	shellSuite(t, func(h provider.Handle) provider.Handle { return h })
}

// onlyBusyBox is a sandbox that has no other programs than BusyBox's.
type onlyBusyBox struct {
	provider.Handle
	dir string
}

func (b onlyBusyBox) Start(ctx context.Context, cmd provider.Cmd) (provider.Process, error) {
	cmd.Argv = append([]string{b.dir + "/" + cmd.Argv[0]}, cmd.Argv[1:]...)
	cmd.Env = append(cmd.Env, "PATH="+b.dir)
	return b.Handle.Start(ctx, cmd)
}

func TestShellBusyBox(t *testing.T) {
	box, err := exec.LookPath("busybox")
	testenv.Require(t, err == nil, "busybox", "install busybox-static")
	dir := t.TempDir()
	if out, err := exec.CommandContext(t.Context(), box, "--install", "-s", dir).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	shellSuite(t, func(h provider.Handle) provider.Handle { return onlyBusyBox{h, dir} })
}
