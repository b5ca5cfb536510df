package journal_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/aisandbox-go/aisandbox/guest"
	"github.com/aisandbox-go/aisandbox/internal/testenv"
	"github.com/aisandbox-go/aisandbox/journal"
	"github.com/aisandbox-go/aisandbox/journal/frame"
	"github.com/aisandbox-go/aisandbox/journal/journaltest"
	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/provider/local"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		// What was forgotten leaves a mark, on this machine for good.
		marks, _ := filepath.Glob(filepath.Join(journal.Dir, "*_20"+strings.Repeat("[A-Z2-7]", 26)+"*.gone"))
		for _, f := range marks {
			_ = os.Remove(f)
		}
		os.Exit(code)
	}))
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
	program := testenv.Guest(t)
	journaltest.Run(t, journaltest.Options{
		Open: func(t *testing.T) (provider.Reattacher, func(string) string) {
			h := sandbox(t)
			dir := filepath.Join(t.TempDir(), "j")
			g, err := guest.Attach(t.Context(), h, guest.Options{Program: program, JournalDir: dir, Traits: local.New(local.Options{}).Traits()})
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

// The word of the exit, and the nonce that it is made of, are nowhere an agent of
// the same user can read them without tracing its supervisor (T17).
func TestShellSecretIsNowhere(t *testing.T) {
	word := []byte(launchWord(t))
	re := journal.Shell(sandbox(t))
	token, err := frame.Token("secret " + rand.Text())
	if err != nil {
		t.Fatal(err)
	}
	out := filepath.Join(t.TempDir(), "up")
	err = re.Launch(t.Context(), token, provider.Cmd{
		Argv: []string{"sh", "-c", `set >"$1.tmp"; ls -l /proc/$$/fd >>"$1.tmp"; mv "$1.tmp" "$1"; sleep 600`, "sh", out},
	}, provider.LaunchOptions{RunID: run, Nonce: nonce})
	if err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if _, err := os.Stat(out); err == nil {
			break
		}
	}
	places := []string{out}
	for _, pattern := range []string{"/proc/[0-9]*/cmdline", "/proc/[0-9]*/environ", journal.Dir + "/" + token + "*", journal.Dir + "/" + token + "*/*"} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		places = append(places, files...)
	}
	for _, place := range places {
		b, err := os.ReadFile(place)
		if err != nil {
			continue // a process that is gone, a directory
		}
		if bytes.Contains(b, word) || bytes.Contains(b, nonce) {
			t.Errorf("the secret is in %s", place)
		}
	}
	if err := re.Kill(t.Context(), token, 9); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(20 * time.Second); re.Forget(t.Context(), token) != nil && time.Now().Before(end); {
		time.Sleep(20 * time.Millisecond)
	}
}
