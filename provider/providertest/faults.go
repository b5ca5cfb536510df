package providertest

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/aisandbox-go/aisandbox/provider"
)

// faultCases cut the connection to the sandbox in the middle of a call, and look
// at what ExecFS makes of it: an error, never a wrong answer or half a file.
var faultCases = []testCase{
	{"X1", "connection lost while writing", func(t *testing.T, b *box) {
		i, f := b.faulty()
		n := b.path("f")
		b.put(n, "old")
		content := strings.Repeat("x", 1000)
		for _, after := range []int64{0, 1, 999, 1000} {
			i.Arm(Fault{Op: OpStdin, Nth: 1, After: after})
			if err := f.Put(b.ctx, n, strings.NewReader(content), 0o644); !errors.Is(err, ErrInjected) {
				t.Errorf("after %d bytes: %v", after, err)
			}
			i.Arm()
			if got := b.read(n); got != "old" && (after < 1000 || got != content) {
				t.Errorf("after %d bytes: the file holds %d bytes", after, len(got))
			}
			b.put(n, "old")
		}
		// Of unknown length, and more than fits a buffer.
		i.Arm(Fault{Op: OpStdin, Nth: 1, After: 2 << 20})
		if err := f.Put(b.ctx, n, io.MultiReader(bytes.NewReader(make([]byte, 3<<20))), 0o644); !errors.Is(err, ErrInjected) {
			t.Errorf("large: %v", err)
		}
		i.Arm()
		if got := b.read(n); got != "old" {
			t.Errorf("large: the file holds %d bytes", len(got))
		}
		b.eventually(5*time.Second, "no temporary file is left", func() bool { return slices.Equal(b.list(b.dir()), []string{"f"}) })
	}},
	{"X2", "connection lost while reading", func(t *testing.T, b *box) {
		i, f := b.faulty()
		n := b.path("f")
		b.put(n, strings.Repeat("0123456789", 100))
		for _, after := range []int64{0, 10, 100, 500} {
			i.Arm(Fault{Op: OpStdout, After: after})
			r, err := f.Open(b.ctx, n)
			if err == nil {
				_, err = io.ReadAll(r)
				r.Close()
			}
			if !errors.Is(err, ErrInjected) {
				t.Errorf("after %d bytes: %v", after, err)
			}
		}
	}},
	{"X3", "connection lost while asking", func(t *testing.T, b *box) {
		i, f := b.faulty()
		for _, n := range []string{"a", "b", "c"} {
			b.put(b.path(n), "x")
		}
		for _, fault := range []Fault{
			{Op: OpStart}, {Op: OpWait}, {Op: OpStdout, After: 0}, {Op: OpStdout, After: 3}, {Op: OpStderr, After: 0}, {Op: OpStart, Err: provider.ErrUnavailable},
		} {
			i.Arm(fault)
			want := fault.Err
			if want == nil {
				want = ErrInjected
			}
			answers := map[string]error{}
			// What is missing makes the script speak on stderr, what exists on stdout.
			name := b.path("a")
			if fault.Op == OpStderr {
				name = b.path("missing")
			}
			_, answers["lstat"] = f.Lstat(b.ctx, name)
			for _, err := range f.ReadDir(b.ctx, map[bool]string{true: name, false: b.dir()}[fault.Op == OpStderr]) {
				if err != nil {
					answers["readdir"] = err
				}
			}
			if fault.Op == OpStart || fault.Op == OpWait {
				answers["mkdir"] = f.Mkdir(b.ctx, b.path("d"))
				answers["remove"] = f.Remove(b.ctx, b.path("missing"))
				answers["rename"] = f.Rename(b.ctx, b.path("b"), b.path("b2"))
			}
			for op, err := range answers {
				if !errors.Is(err, want) || errors.Is(err, fs.ErrNotExist) {
					t.Errorf("%s with %v: %v", op, fault, err)
				}
			}
			if len(answers) < 2 {
				t.Errorf("%v: readdir ended without an error", fault)
			}
			i.Arm()
			_ = f.Rename(b.ctx, b.path("b2"), b.path("b"))
		}
	}},
	{"X4", "connection lost while unpacking", func(t *testing.T, b *box) {
		b.archiver()
		i, f := b.faulty()
		all, err := io.ReadAll(pack(t, "one", strings.Repeat("1", 3000), "two", strings.Repeat("2", 3000)))
		if err != nil {
			t.Fatal(err)
		}
		for _, after := range []int64{0, 512, 1024, 4096, 5000} {
			i.Arm(Fault{Op: OpStdin, Nth: 1, After: after})
			if err := f.(provider.Archiver).TarIn(b.ctx, b.dir(), bytes.NewReader(all)); !errors.Is(err, ErrInjected) {
				t.Errorf("after %d bytes: %v", after, err)
			}
		}
		i.Arm()
		b.eventually(5*time.Second, "nothing was unpacked, and no staging directory is left", func() bool { return len(b.list(b.dir())) == 0 })
	}},
	{"X5", "context that ends in the middle", func(t *testing.T, b *box) {
		f := provider.ExecFS(b.h)
		pr, pw := io.Pipe()
		defer pw.Close()
		ctx, cancel := context.WithCancel(b.ctx)
		go func() {
			pw.Write(make([]byte, 2<<20))
			cancel()
		}()
		done := make(chan error, 1)
		go func() { done <- f.Put(ctx, b.path("f"), pr, 0o644) }()
		select {
		case err := <-done:
			if !errors.Is(err, context.Canceled) {
				t.Errorf("put: %v", err)
			}
		case <-time.After(b.within(20 * time.Second)):
			t.Error("put hangs in a reader that blocks")
		}
		b.eventually(5*time.Second, "no temporary file is left", func() bool { return len(b.list(b.dir())) == 0 })
	}},
}

func (b *box) faulty() (*Injector, provider.FS) {
	i := Faulty(b.s.p)
	return i, provider.ExecFS(i.Handle(b.h))
}
