package providertest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/aisandbox-go/aisandbox/provider"
)

// fileCases run on the handle's own FS, or on ExecFS. What a handle has of its own
// is compared with ExecFS by F22.
var fileCases = []testCase{
	{"F1", "round trip", func(t *testing.T, b *box) {
		all := make([]byte, 256)
		for i := range all {
			all[i] = byte(i)
		}
		for i, content := range []string{"text\n", "", string(all), "no newline", "\n\n", "\r\n\x00"} {
			n := b.path(fmt.Sprint(i))
			b.put(n, content)
			if got := b.read(n); got != content {
				t.Errorf("%q comes back as %q", content, got)
			}
			if s := b.size(n); s != int64(len(content)) {
				t.Errorf("size of %q is %d", content, s)
			}
			if got := b.must(`cat "$1"`, n); got != content {
				t.Errorf("a command reads %q as %q", content, got)
			}
		}
	}},
	{"F4", "sizes at the edges of buffers", func(t *testing.T, b *box) {
		for _, size := range []int{4095, 4096, 32767, 32768, 32769, 65536, 131073, 1 << 20, 5 << 20} {
			var want sum
			content := bytes.Repeat([]byte(period), size/len(period)+1)[:size]
			want.Write(content)
			var r io.Reader = bytes.NewReader(content)
			if size%2 == 1 {
				r = iotest.HalfReader(r) // its length is unknown
			}
			n := b.path(fmt.Sprint(size))
			if err := b.fs.Put(b.ctx, n, r, 0o644); err != nil {
				t.Fatal(err)
			}
			var got sum
			f, err := b.fs.Open(b.ctx, n)
			if err != nil {
				t.Fatal(err)
			}
			_, err = io.Copy(&got, f)
			if err = errors.Join(err, f.Close()); err != nil || !got.equal(&want) {
				t.Errorf("%d bytes come back as %d: %v", size, got.n, err)
			}
		}
	}},
	{"F5", "parents are made", func(t *testing.T, b *box) {
		b.put(b.path("a/b/c/file"), "x")
		if fi, err := b.fs.Lstat(b.ctx, b.path("a/b")); err != nil || !fi.IsDir() || fi.Mode().Perm()&0o700 != 0o700 {
			t.Errorf("%v, %v", fi, err)
		}
	}},
	{"F6", "overwriting", func(t *testing.T, b *box) {
		n := b.path("f")
		b.put(n, "a long first content")
		b.put(n, "short")
		if got := b.read(n); got != "short" {
			t.Errorf("%q", got)
		}
		for _, mode := range []fs.FileMode{0o600, 0o755, 0o444, 0o640} {
			if err := b.fs.Put(b.ctx, n, strings.NewReader("x"), mode); err != nil {
				t.Fatal(err)
			}
			if fi, err := b.fs.Lstat(b.ctx, n); err != nil || fi.Mode() != mode {
				t.Errorf("mode %v became %v, %v", mode, fi, err)
			}
		}
		if names := b.list(b.dir()); !slices.Equal(names, []string{"f"}) {
			t.Errorf("temporary names are left: %q", names)
		}
	}},
	{"F7", "listing", func(t *testing.T, b *box) {
		b.put(b.path("file"), "123")
		b.put(b.path(".hidden"), "")
		b.must(`cd "$1" && mkdir dir && ln -s nowhere link && mkfifo pipe`, b.dir())
		type entry struct {
			Name string
			Type fs.FileMode
			Info fs.FileMode
		}
		got := []entry{}
		for e, err := range b.fs.ReadDir(b.ctx, b.dir()) {
			if err != nil {
				t.Fatal(err)
			}
			fi, err := e.Info()
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, entry{e.Name(), e.Type(), fi.Mode().Type()})
		}
		want := []entry{
			{".hidden", 0, 0}, {"dir", fs.ModeDir, fs.ModeDir}, {"file", 0, 0},
			{"link", fs.ModeSymlink, fs.ModeSymlink}, {"pipe", fs.ModeNamedPipe, fs.ModeNamedPipe},
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Error(d)
		}
		for _, err := range b.fs.ReadDir(b.ctx, b.path("file")) {
			if err == nil || errors.Is(err, fs.ErrNotExist) {
				t.Errorf("listing a file: %v", err)
			}
		}
		for range b.fs.ReadDir(b.ctx, b.dir()) {
			break // leaving the loop early is allowed
		}
	}},
	{"F8", "names", func(t *testing.T, b *box) {
		want := []string{
			" ", " lead", "trail ", "it's", `"q"`, "a\nb", "\n", "a\tb", "-rf", "--", "*", "?", "[x]", "~", "$HOME", `\`,
			"😀", "ü", "\xff\xfe", "...", strings.Repeat("n", 255),
		}
		for _, n := range want {
			b.put(b.path("d/"+n), n)
			if got := b.read(b.path("d/" + n)); got != n {
				t.Errorf("%q holds %q", n, got)
			}
		}
		slices.Sort(want)
		if d := cmp.Diff(want, b.list(b.path("d"))); d != "" {
			t.Error(d)
		}
		for _, n := range want {
			if err := b.fs.Rename(b.ctx, b.path("d/"+n), b.path("d/moved")); err != nil {
				t.Errorf("%q: %v", n, err)
			}
			if err := b.fs.Remove(b.ctx, b.path("d/moved")); err != nil {
				t.Errorf("%q: %v", n, err)
			}
		}
		if got := b.list(b.path("d")); len(got) != 0 {
			t.Errorf("left: %q", got)
		}
	}},
	{"F9", "what is missing", func(t *testing.T, b *box) {
		b.put(b.path("file"), "x")
		b.must(`ln -s nowhere "$1"`, b.path("dangling"))
		for _, n := range []string{"none", "none/deeper", "file/below", "-delete"} {
			_, err := b.fs.Lstat(b.ctx, b.path(n))
			b.isMissing("lstat "+n, err)
			_, err = b.fs.Open(b.ctx, b.path(n))
			b.isMissing("open "+n, err)
			listed := false
			for _, err := range b.fs.ReadDir(b.ctx, b.path(n)) {
				if listed = err == nil; !listed && n != "file/below" {
					b.isMissing("readdir "+n, err)
				}
			}
			err = b.fs.Rename(b.ctx, b.path(n), b.path("to"))
			if n != "file/below" {
				b.isMissing("rename "+n, err)
			}
			if listed || err == nil {
				t.Errorf("%s was listed or renamed", n)
			}
		}
		_, err := b.fs.Open(b.ctx, b.path("dangling"))
		b.isMissing("open dangling", err)
		if fi, err := b.fs.Lstat(b.ctx, b.path("dangling")); err != nil || fi.Mode().Type() != fs.ModeSymlink {
			t.Errorf("lstat of a dangling link: %v, %v", fi, err)
		}
		if fi, err := b.fs.Lstat(b.ctx, b.h.Root()); err != nil || !fi.IsDir() {
			t.Errorf("the root: %v, %v", fi, err)
		}
	}},
	{"F10", "remove", func(t *testing.T, b *box) {
		b.put(b.path("tree/a/b"), "x")
		b.must(`cd "$1" && ln -s ../keep tree/link && mkdir keep && : >keep/file`, b.dir())
		for range 2 {
			if err := b.fs.Remove(b.ctx, b.path("tree")); err != nil {
				t.Error(err)
			}
		}
		if got := b.list(b.dir()); !slices.Equal(got, []string{"keep"}) {
			t.Errorf("left: %q", got)
		}
		if b.size(b.path("keep/file")) < 0 {
			t.Error("a link was followed")
		}
		if err := b.fs.Remove(b.ctx, b.h.Root()); err == nil {
			t.Error("the root was removed")
		}
	}},
	{"F11", "rename", func(t *testing.T, b *box) {
		b.put(b.path("a"), "a")
		b.put(b.path("b"), "b")
		b.put(b.path("d/x"), "x")
		for _, c := range []struct {
			from, to string
			ok       bool
		}{{"a", "b", true}, {"d", "e", true}, {"none", "n", false}, {"b", "none/b", false}, {"b", "e", false}} {
			if err := b.fs.Rename(b.ctx, b.path(c.from), b.path(c.to)); err == nil != c.ok {
				t.Errorf("%s to %s: %v", c.from, c.to, err)
			}
		}
		if got := b.read(b.path("b")) + b.read(b.path("e/x")); got != "ax" {
			t.Errorf("%q", got)
		}
	}},
	{"F13", "lstat", func(t *testing.T, b *box) {
		b.must(`cd "$1" && printf abc >file && chmod 644 file && mkdir -m 750 dir && ln -s file link && mkfifo -m 600 pipe &&
printf '#!/bin/sh\n' >run && chmod 755 run`, b.dir())
		for n, want := range map[string]fs.FileMode{
			"file": 0o644, "dir": fs.ModeDir | 0o750, "link": fs.ModeSymlink | 0o777, "pipe": fs.ModeNamedPipe | 0o600, "run": 0o755,
		} {
			fi, err := b.fs.Lstat(b.ctx, b.path(n))
			if err != nil || fi.Mode() != want || fi.Name() != n {
				t.Errorf("%s: %v, %v; want %v", n, fi, err, want)
			}
		}
		if fi, err := b.fs.Lstat(b.ctx, b.path("file")); err == nil && (fi.Size() != 3 || time.Since(fi.ModTime()).Abs() > time.Hour) {
			t.Errorf("size %d, time %v", fi.Size(), fi.ModTime())
		}
		if b.must("id -u") == "0\n" {
			return // nothing is unreadable
		}
		// File access may have another user, who may look; what nobody may say is that
		// the file is missing.
		b.must(`mkdir "$1" && touch "$1/x" && chmod 0 "$1"`, b.path("locked"))
		if _, err := b.fs.Lstat(b.ctx, b.path("locked/x")); err != nil && !errors.Is(err, fs.ErrPermission) {
			t.Errorf("below a directory that can't be entered: %v", err)
		}
		b.must(`chmod 700 "$1"`, b.path("locked"))
	}},
	{"F14", "names that leave the root by text", func(t *testing.T, b *box) {
		root := b.h.Root()
		if root == "/" {
			b.skip("the root is /")
		}
		for _, n := range []string{root + "/../x", root + "/a/../../x", "../x", "/", "/etc/passwd", root + "x", "", "a\x00b", root + "/\x00"} {
			if _, err := b.fs.Lstat(b.ctx, n); err == nil || n != "" && errors.Is(err, fs.ErrNotExist) {
				t.Errorf("lstat %q: %v", n, err)
			}
			if err := b.fs.Put(b.ctx, n, strings.NewReader("x"), 0o644); err == nil {
				t.Errorf("put %q succeeded", n)
			}
		}
		b.put(b.path("up"), "x")
		if got := b.read(root + "/./case-F14/z/../up"); got != "x" {
			t.Errorf("a name that stays inside reads %q", got)
		}
		if got := b.read("case-F14/up"); got != "x" {
			t.Errorf("a relative name reads %q", got)
		}
	}},
	{"F15", "links that leave the root", linksOut},
	{"F18", "links swapped while in use", swapRace},
	{"F23", "failing and slow readers", func(t *testing.T, b *box) {
		n := b.path("f")
		b.put(n, "old")
		boom := errors.New("boom")
		for _, size := range []int{0, 100, 3 << 20} {
			r := io.MultiReader(bytes.NewReader(make([]byte, size)), iotest.ErrReader(boom))
			if err := b.fs.Put(b.ctx, n, r, 0o644); !errors.Is(err, boom) {
				t.Errorf("after %d bytes: %v", size, err)
			}
		}
		if got := b.read(n); got != "old" {
			t.Errorf("half a content was put in place: %.20q", got)
		}
		b.eventually(5*time.Second, "no temporary file is left", func() bool { return slices.Equal(b.list(b.dir()), []string{"f"}) })
		ctx, cancel := context.WithCancel(b.ctx)
		cancel()
		if err := b.fs.Put(ctx, n, strings.NewReader("x"), 0o644); err == nil {
			t.Error("put with an ended context")
		}
		if _, err := b.fs.Lstat(ctx, n); !errors.Is(err, context.Canceled) {
			t.Errorf("lstat with an ended context: %v", err)
		}
		b.put(b.path("big"), strings.Repeat("x", 4<<20))
		r, err := b.fs.Open(b.ctx, b.path("big"))
		if err != nil {
			t.Fatal(err)
		}
		io.ReadFull(r, make([]byte, 5))
		r.Close() // half read
	}},
	{"F24", "symbolic links", func(t *testing.T, b *box) {
		l := b.linker()
		for i, target := range []string{"x", "../../outside", "/etc/passwd", "-n", "a\nb", "ü ", "\xff", "x/"} {
			n := b.path(fmt.Sprint(i))
			if err := l.Symlink(b.ctx, target, n); err != nil {
				t.Fatal(err)
			}
			if got, err := l.Readlink(b.ctx, n); got != target || err != nil {
				t.Errorf("%q reads %q, %v", target, got, err)
			}
		}
		if err := l.Symlink(b.ctx, "x", b.path("0")); !errors.Is(err, fs.ErrExist) {
			t.Errorf("over an existing name: %v", err)
		}
		if _, err := l.Readlink(b.ctx, b.path("none")); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("missing: %v", err)
		}
		b.put(b.path("target"), "through")
		b.put(b.path("dir/f"), "dir")
		for target, n := range map[string]string{"target": "in", "dir": "indir", "../case-F24/target": "round"} {
			if err := l.Symlink(b.ctx, target, b.path(n)); err != nil {
				t.Fatal(err)
			}
		}
		if got := b.read(b.path("in")) + b.read(b.path("indir/f")); got != "throughdir" {
			t.Errorf("links that stay inside read %q", got)
		}
	}},
	{"F22", "own file access against ExecFS", oracle},
}

func (b *box) put(name, content string) {
	b.t.Helper()
	if err := b.fs.Put(b.ctx, name, strings.NewReader(content), 0o644); err != nil {
		b.t.Fatalf("put: %v", err)
	}
}

func (b *box) read(name string) string { b.t.Helper(); return readAll(b, b.fs, name) }

func readAll(b *box, f provider.FS, name string) string {
	b.t.Helper()
	r, err := f.Open(b.ctx, name)
	if err != nil {
		b.t.Errorf("open: %v", err)
		return ""
	}
	content, err := io.ReadAll(r)
	if err = errors.Join(err, r.Close()); err != nil {
		b.t.Errorf("read %s: %v", name, err)
	}
	return string(content)
}

func (b *box) list(dir string) []string {
	b.t.Helper()
	names := []string{}
	for e, err := range b.fs.ReadDir(b.ctx, dir) {
		if err != nil {
			b.t.Fatalf("list: %v", err)
		}
		names = append(names, e.Name())
	}
	return names
}

func (b *box) linker() provider.Linker {
	b.t.Helper()
	if l, ok := provider.As[provider.Linker](b.h); ok {
		return l
	}
	return provider.ExecFS(b.h).(provider.Linker)
}

// isMissing wants a PathError that is fs.ErrNotExist.
func (b *box) isMissing(what string, err error) {
	b.t.Helper()
	if pe := (*fs.PathError)(nil); !errors.Is(err, fs.ErrNotExist) || !errors.As(err, &pe) {
		b.t.Errorf("%s: %v (%T), want a PathError with fs.ErrNotExist", what, err, err)
	}
}
