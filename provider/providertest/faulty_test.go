//go:build linux

package providertest_test

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"strings"
	"testing"

	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/provider/local"
	"github.com/aisandbox-go/aisandbox/provider/providertest"
)

func TestFaulty(t *testing.T) {
	ctx := t.Context()
	inner := local.New(local.Options{BaseDir: t.TempDir()})
	p := providertest.Faulty(inner, providertest.Fault{Op: providertest.OpCreate, Nth: 1})
	if _, err := p.Create(ctx, provider.Spec{}); !errors.Is(err, providertest.ErrInjected) {
		t.Errorf("first create: %v", err)
	}
	h, err := p.Create(ctx, provider.Spec{})
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	if _, ok := provider.As[provider.Lister](p); !ok {
		t.Error("the provider beneath is not found")
	}
	if _, ok := provider.As[provider.HostReacher](h); !ok {
		t.Error("the handle beneath is not found")
	}
	boom := errors.New("boom")
	p.Arm(providertest.Fault{Op: providertest.OpResume}, providertest.Fault{Op: providertest.OpDestroy, Nth: 1, Err: boom})
	if _, err := p.Resume(ctx, h.Ref()); !errors.Is(err, providertest.ErrInjected) {
		t.Errorf("resume: %v", err)
	}
	if err := p.Destroy(ctx, h.Ref()); err != boom {
		t.Errorf("destroy: %v", err)
	}

	run := func(in string, faults ...providertest.Fault) (string, error) {
		p.Arm(faults...)
		var out bytes.Buffer
		pr, err := h.Start(ctx, provider.Cmd{Argv: []string{"cat"}, Stdin: strings.NewReader(in), Stdout: &out})
		if err != nil {
			return "", err
		}
		_, err = pr.Wait()
		return out.String(), err
	}
	for name, c := range map[string]struct {
		fault providertest.Fault
		out   string
	}{
		"start":         {providertest.Fault{Op: providertest.OpStart}, ""},
		"wait":          {providertest.Fault{Op: providertest.OpWait}, "0123456789"},
		"stdin":         {providertest.Fault{Op: providertest.OpStdin, After: 3}, "012"},
		"stdout":        {providertest.Fault{Op: providertest.OpStdout, After: 4}, "0123"},
		"stdout at all": {providertest.Fault{Op: providertest.OpStdout}, ""},
	} {
		if out, err := run("0123456789", c.fault); out != c.out || !errors.Is(err, providertest.ErrInjected) {
			t.Errorf("%s: %q, %v", name, out, err)
		}
	}
	if out, err := run("fine", providertest.Fault{Op: providertest.OpStart, Nth: 2}); out != "fine" || err != nil {
		t.Errorf("before the second: %q, %v", out, err)
	}

	p.Arm()
	f, ok := provider.As[provider.FS](h)
	if !ok {
		t.Fatal("no FS")
	}
	if err := f.Put(ctx, "a", strings.NewReader("0123456789"), 0o600); err != nil {
		t.Fatal(err)
	}
	for op, call := range map[providertest.Op]func() error{
		providertest.OpOpen:    func() error { _, err := f.Open(ctx, "a"); return err },
		providertest.OpPut:     func() error { return f.Put(ctx, "b", nil, 0o600) },
		providertest.OpLstat:   func() error { _, err := f.Lstat(ctx, "a"); return err },
		providertest.OpMkdir:   func() error { return f.Mkdir(ctx, "d") },
		providertest.OpRemove:  func() error { return f.Remove(ctx, "a") },
		providertest.OpRename:  func() error { return f.Rename(ctx, "a", "b") },
		providertest.OpReadDir: func() error { return first(f, t) },
	} {
		p.Arm(providertest.Fault{Op: op})
		err := call()
		if pe := (*fs.PathError)(nil); !errors.Is(err, providertest.ErrInjected) || !errors.As(err, &pe) {
			t.Errorf("%s: %v", op, err)
		}
	}
	p.Arm(providertest.Fault{Op: providertest.OpRead, After: 5})
	r, err := f.Open(ctx, "a")
	if err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(r)
	r.Close()
	if string(got) != "01234" || !errors.Is(err, providertest.ErrInjected) {
		t.Errorf("read: %q, %v", got, err)
	}
	p.Arm()
	if err := p.Destroy(ctx, h.Ref()); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(h.Root()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("destroy did not reach the provider beneath: %v", err)
	}
}

func first(f provider.FS, t *testing.T) error {
	for _, err := range f.ReadDir(t.Context(), ".") {
		return err
	}
	return nil
}
