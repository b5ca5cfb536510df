//go:build linux

package local_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/provider/local"
)

func create(t *testing.T, o local.Options, key string) (provider.Provider, provider.Handle) {
	t.Helper()
	p := local.New(o)
	h, err := p.Create(t.Context(), provider.Spec{Key: key})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { h.Close() })
	return p, h
}

func env(t *testing.T, h provider.Handle, extra ...string) string {
	t.Helper()
	out, err := provider.Output(t.Context(), h, provider.Cmd{Argv: provider.Shell(`echo "${PT_SECRET-unset} ${PT_OTHER-unset} ${HOME:+home} ${PATH:+path}"`), Env: extra})
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(out))
}

func TestEnvironment(t *testing.T) {
	t.Setenv("PT_SECRET", "s")
	t.Setenv("PT_OTHER", "o")
	for _, c := range []struct {
		o     local.Options
		extra string
		want  string
	}{
		{local.Options{}, "", "s o home path"},
		{local.Options{InheritEnv: local.InheritAll, ScrubEnv: []string{"PT_SECRET"}}, "", "unset o home path"},
		{local.Options{ScrubEnv: []string{"PT_SECRET"}}, "PT_SECRET=given", "given o home path"},
		{local.Options{InheritEnv: local.InheritMinimal}, "", "unset unset home path"},
		{local.Options{InheritEnv: local.InheritNone}, "", "unset unset  path"},
	} {
		c.o.BaseDir = t.TempDir()
		_, h := create(t, c.o, "")
		var extra []string
		if c.extra != "" {
			extra = []string{c.extra}
		}
		if got := env(t, h, extra...); got != c.want {
			t.Errorf("%+v: %q, want %q", c.o, got, c.want)
		}
	}
	_, err := local.New(local.Options{BaseDir: t.TempDir(), InheritEnv: "some"}).Create(t.Context(), provider.Spec{})
	if oe := (*provider.OptionError)(nil); !errors.As(err, &oe) || oe.Option != "InheritEnv" {
		t.Errorf("unknown choice: %v", err)
	}
}

func TestFixedDirectoryStays(t *testing.T) {
	dir, base := t.TempDir(), t.TempDir()
	if err := os.WriteFile(dir+"/mine", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	p, h := create(t, local.Options{Dir: dir, BaseDir: base}, "key")
	if h.Root() != dir || h.Ref().ID != dir {
		t.Errorf("%v at %s", h.Ref(), h.Root())
	}
	if err := p.Destroy(t.Context(), h.Ref()); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(dir + "/mine"); err != nil {
		t.Error(err)
	}
	if _, err := p.Resume(t.Context(), h.Ref()); !errors.Is(err, provider.ErrNotFound) {
		t.Errorf("resume after destroy: %v", err)
	}
	if es, _ := filepath.Glob(base + "/[a-z0-9]*"); len(es) != 0 {
		t.Errorf("records left: %q", es)
	}
	_, err := local.New(local.Options{Dir: dir + "/none", BaseDir: base}).Create(t.Context(), provider.Spec{})
	if oe := (*provider.OptionError)(nil); !errors.As(err, &oe) || oe.Option != "Dir" {
		t.Errorf("missing directory: %v", err)
	}
}

func TestKeepOnDestroy(t *testing.T) {
	p, h := create(t, local.Options{BaseDir: t.TempDir(), KeepOnDestroy: true}, "kept")
	if err := os.WriteFile(h.Root()+"/result", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := p.Destroy(t.Context(), h.Ref()); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(h.Root() + "/result"); err != nil {
		t.Error(err)
	}
	if _, err := p.Resume(t.Context(), h.Ref()); !errors.Is(err, provider.ErrNotFound) {
		t.Errorf("resume: %v", err)
	}
	if _, err := p.Create(t.Context(), provider.Spec{Key: "kept"}); !errors.Is(err, provider.ErrConflict) {
		t.Errorf("the key again, over kept files: %v", err)
	}
}

func TestOtherBaseDirectory(t *testing.T) {
	_, h := create(t, local.Options{BaseDir: t.TempDir()}, "")
	_, err := local.New(local.Options{BaseDir: t.TempDir()}).Resume(t.Context(), h.Ref())
	if oe := (*provider.OptionError)(nil); !errors.As(err, &oe) || errors.Is(err, provider.ErrNotFound) {
		t.Errorf("resume: %v", err)
	}
}

// TestHiddenTrees kills what leaves its group, session and parent. Only a tree
// that clears its environment too can hide, so the trait is not claimed.
func TestHiddenTrees(t *testing.T) {
	_, h := create(t, local.Options{BaseDir: t.TempDir()}, "")
	const beat = `while :; do printf . >>"$1"; sleep 0.05; done`
	for what, script := range map[string]string{
		"setsid":      `setsid sh -c "$2" sh "$1" & wait`,
		"double fork": `(setsid nohup sh -c "$2" sh "$1" </dev/null >/dev/null 2>&1 &); sleep 1000`,
		"holds pipe":  `(setsid nohup sh -c "$2" sh "$1" &); sleep 1000`,
	} {
		file := filepath.Join(h.Root(), strings.ReplaceAll(what, " ", ""))
		pr, err := h.Start(t.Context(), provider.Cmd{Argv: append(provider.Shell(script), "sh", file, beat)})
		if err != nil {
			t.Fatal(err)
		}
		beats(t, file, 0)
		begin := time.Now()
		if err := pr.Signal(os.Kill); err != nil {
			t.Error(err)
		}
		if d := time.Since(begin); d > 2*time.Second {
			t.Errorf("%s: kill took %v", what, d)
		}
		_, _ = pr.Wait()
		silent(t, what, file)
	}
	// And what another process started: only the mark is known then.
	file := filepath.Join(h.Root(), "..", "beats")
	if _, err := h.Start(t.Context(), provider.Cmd{Argv: append(provider.Shell(`(setsid nohup sh -c "$2" sh "$1" >/dev/null 2>&1 &)`), "sh", file, strings.Replace(beat, "sleep 0.05", "[ -e \"$1\" ] && sleep 0.05 || exit", 1))}); err != nil {
		t.Fatal(err)
	}
	beats(t, file, 0)
	if err := local.New(local.Options{BaseDir: filepath.Dir(filepath.Dir(h.Root()))}).Destroy(t.Context(), h.Ref()); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(h.Root()); !os.IsNotExist(err) {
		t.Errorf("the directory is there: %v", err)
	}
}

func size(file string) int64 {
	fi, err := os.Stat(file)
	if err != nil {
		return -1
	}
	return fi.Size()
}

func beats(t *testing.T, file string, over int64) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); size(file) <= over+1; <-time.After(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s does not grow", file)
		}
	}
}

func silent(t *testing.T, what, file string) {
	t.Helper()
	was := size(file)
	for end := time.Now().Add(300 * time.Millisecond); time.Now().Before(end); <-time.After(10 * time.Millisecond) {
		if size(file) != was {
			t.Errorf("%s: a process survived", what)
			return
		}
	}
}
