package providertest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/aisandbox-go/aisandbox/provider"
)

// outside is a directory beyond the root that file access must not reach. The
// user of the commands can, so that only containment keeps it as it is.
type outside struct {
	b   *box
	dir string
}

func (b *box) outside() *outside {
	b.t.Helper()
	if b.h.Root() == "/" {
		b.skip("the root is /: nothing is outside")
	}
	o := &outside{b, strings.TrimSuffix(b.must("mktemp -d"), "\n")}
	if strings.HasPrefix(o.dir, b.h.Root()+"/") {
		b.t.Fatalf("mktemp answers with %s, inside the root", o.dir)
	}
	b.must(`cd "$1" && printf untouched >file && mkdir dir && : >dir/deep`, o.dir)
	b.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(b.ctx), 10*time.Second)
		defer cancel()
		if p, err := b.h.Start(ctx, provider.Cmd{Argv: shell(`rm -rf "$1"`, o.dir)}); err == nil {
			p.Wait()
		}
	})
	return o
}

// untouched compares the directory with what it was.
func (o *outside) untouched(after string) {
	o.b.t.Helper()
	got := o.b.must(`cd "$1" && cat file && for f in * .[!.]* */*; do [ -e "$f" ] && echo "$f"; done; [ "$(ls -ld file | cut -c1-10)" = -rw-r--r-- ] || echo mode`, o.dir)
	want := []string{"untoucheddir", "dir/deep", "file"}
	if f := strings.Fields(got); !slices.Equal(slices.Sorted(slices.Values(f)), slices.Sorted(slices.Values(want))) {
		o.b.t.Errorf("%s: outside of the root there is now %q", after, f)
	}
}

func linksOut(t *testing.T, b *box) {
	out, l := b.outside(), b.linker()
	up := strings.Repeat("../", strings.Count(b.dir(), "/"))
	for n, target := range map[string]string{
		"abs": out.dir, "rel": up + out.dir[1:], "fabs": out.dir + "/file", "frel": up + out.dir[1:] + "/file", "top": "/", "hop": "abs",
	} {
		if err := l.Symlink(b.ctx, target, b.path(n)); err != nil {
			t.Fatal(err)
		}
	}
	b.put(b.path("mine"), "mine")
	refused := func(what string, err error) {
		t.Helper()
		if err == nil || errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %v", what, err)
		}
		out.untouched(what)
	}
	for _, d := range []string{"abs", "rel", "hop", "top" + out.dir} {
		p := b.path(d)
		open := func(n string) error {
			r, err := b.fs.Open(b.ctx, n)
			if err == nil {
				r.Close()
			}
			return err
		}
		dir := func(n string) error {
			for _, err := range b.fs.ReadDir(b.ctx, n) {
				return err
			}
			return nil
		}
		put := func(n string) error { return b.fs.Put(b.ctx, n, strings.NewReader("mine"), 0o600) }
		_, err := b.fs.Lstat(b.ctx, p+"/file")
		refused("lstat "+d, err)
		refused("open "+d, open(p+"/file"))
		refused("readdir "+d, dir(p))
		refused("readdir below "+d, dir(p+"/dir"))
		refused("put "+d, put(p+"/new"))
		refused("put over "+d, put(p+"/file"))
		refused("put deep "+d, put(p+"/a/b/c"))
		refused("mkdir "+d, b.fs.Mkdir(b.ctx, p+"/new"))
		refused("remove "+d, b.fs.Remove(b.ctx, p+"/file"))
		refused("rename from "+d, b.fs.Rename(b.ctx, p+"/file", b.path("stolen")))
		refused("rename to "+d, b.fs.Rename(b.ctx, b.path("mine"), p+"/new"))
		refused("symlink "+d, l.Symlink(b.ctx, "x", p+"/new"))
		_, err = l.Readlink(b.ctx, p+"/file")
		refused("readlink "+d, err)
		if a, ok := provider.As[provider.Archiver](b.h); ok {
			refused("tar in "+d, a.TarIn(b.ctx, p, pack(t, "new", "x")))
			refused("tar out "+d, a.TarOut(b.ctx, p, io.Discard, provider.TarOptions{}))
		}
		if w, ok := provider.As[provider.Watcher](b.h); ok {
			watch, err := w.Watch(b.ctx, p, provider.WatchOptions{})
			if err == nil {
				watch.Stop(b.ctx)
			}
			refused("watch "+d, err)
		}
	}
	for _, n := range []string{"fabs", "frel"} {
		r, err := b.fs.Open(b.ctx, b.path(n))
		if err == nil {
			r.Close()
		}
		refused("open "+n, err)
		// The link itself is inside: replacing, moving and removing it is no escape.
		_ = b.fs.Put(b.ctx, b.path(n), strings.NewReader("mine"), 0o600)
		out.untouched("put onto " + n)
	}
	if err := b.fs.Rename(b.ctx, b.path("rel"), b.path("moved")); err != nil {
		t.Error(err)
	}
	for _, n := range []string{"moved", "abs", "top"} {
		if err := b.fs.Remove(b.ctx, b.path(n)); err != nil {
			t.Error(err)
		}
		out.untouched("remove " + n)
	}
}

// swapRace changes a directory for a link and back while files are written
// below it. Only native file access can win that; ExecFS says that it can't.
func swapRace(t *testing.T, b *box) {
	f, ok := provider.As[provider.FS](b.h)
	if !ok {
		b.lacks("file access of its own, and ExecFS does not promise this")
	}
	out := b.outside()
	b.must(`mkdir "$1/real"`, b.dir())
	ctx, cancel := context.WithCancel(b.ctx)
	defer cancel()
	ready := &firstWrite{c: make(chan struct{})}
	p := b.start(ctx, provider.Cmd{
		Argv: shell(`cd "$1"; echo go; while :; do mv real at; mv at real; ln -s "$2" at; rm at; done 2>/dev/null`, b.dir(), out.dir), Stdout: ready,
	})
	b.wait(ready.c, "output")
	end := time.Now().Add(time.Second)
	for i := 0; time.Now().Before(end); i++ {
		at := b.path("at")
		_ = f.Put(b.ctx, at+"/new", strings.NewReader("x"), 0o600)
		_ = f.Mkdir(b.ctx, at+"/newdir")
		_ = f.Remove(b.ctx, at+"/file")
		if r, err := f.Open(b.ctx, at+"/file"); err == nil {
			t.Error("a file outside was opened")
			r.Close()
		}
	}
	cancel()
	p.Wait()
	out.untouched("the race")
}

// oracle does the same to two trees, with the handle's own FS and with ExecFS, and
// compares each answer, and what each sees of the other's tree.
func oracle(t *testing.T, b *box) {
	native, ok := provider.As[provider.FS](b.h)
	if !ok {
		b.lacks("file access of its own")
	}
	reference := provider.ExecFS(b.h)
	nl, rl := b.linker(), reference.(provider.Linker)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	names := []string{"a", "b", "d", "d/x", "d/y", "d/e", "d/e/z", "link", "link/x", "odd\nname"}
	name := func() string { return names[rnd.IntN(len(names))] }
	for _, d := range []string{"n", "r"} {
		if err := b.fs.Mkdir(b.ctx, b.path(d)); err != nil {
			t.Fatal(err)
		}
	}
	n, r := b.path("n")+"/", b.path("r")+"/"
	for step := range 120 {
		x, y := name(), name()
		// Names that go through a link are read and removed only: what making
		// something there does depends on what the link leads to.
		if rnd.IntN(4) > 0 {
			for strings.HasPrefix(x, "link") {
				x = name()
			}
		}
		var what string
		var e1, e2 error
		op := rnd.IntN(8)
		if strings.HasPrefix(x, "link") && op < 6 && op != 3 {
			op = 7
		}
		switch op {
		case 0, 1:
			content := strings.Repeat(fmt.Sprint(step), rnd.IntN(50))
			mode := fs.FileMode(0o600 | rnd.IntN(0o100))
			what = fmt.Sprintf("put %q", x)
			e1 = native.Put(b.ctx, n+x, strings.NewReader(content), mode)
			e2 = reference.Put(b.ctx, r+x, strings.NewReader(content), mode)
		case 2:
			what = fmt.Sprintf("mkdir %q", x)
			e1, e2 = native.Mkdir(b.ctx, n+x), reference.Mkdir(b.ctx, r+x)
		case 3:
			what = fmt.Sprintf("remove %q", x)
			e1, e2 = native.Remove(b.ctx, n+x), reference.Remove(b.ctx, r+x)
		case 4, 5:
			if strings.HasPrefix(y+"/", x+"/") || strings.HasPrefix(x+"/", y+"/") || strings.HasPrefix(y, "link") {
				continue
			}
			what = fmt.Sprintf("rename %q to %q", x, y)
			e1, e2 = native.Rename(b.ctx, n+x, n+y), reference.Rename(b.ctx, r+x, r+y)
		case 6:
			what = "symlink"
			target := []string{"d", "a", "nowhere", "d/e"}[rnd.IntN(4)]
			e1, e2 = nl.Symlink(b.ctx, target, n+"link"), rl.Symlink(b.ctx, target, r+"link")
		case 7:
			what = fmt.Sprintf("open %q", x)
			var c1, c2 string
			c1, e1 = tryRead(b, native, n+x)
			c2, e2 = tryRead(b, reference, r+x)
			if c1 != c2 {
				t.Errorf("step %d, %s: %.40q and %.40q", step, what, c1, c2)
			}
		}
		if errors.Is(e1, syscall.ELOOP) && strings.HasPrefix(what, "remove") {
			continue // what is below a circle of links is missing, or can't be known
		}
		if !agree(e1, e2) {
			t.Fatalf("step %d, %s: %v, but ExecFS: %v", step, what, e1, e2)
		}
		if step%10 != 9 {
			continue
		}
		if d := cmp.Diff(tree(b, native, n), tree(b, reference, r)); d != "" {
			t.Fatalf("step %d: own tree, ExecFS's tree:\n%s", step, d)
		}
		if d := cmp.Diff(tree(b, native, r), tree(b, reference, n)); d != "" {
			t.Fatalf("step %d: each other's tree:\n%s", step, d)
		}
	}
}

// agree compares what callers branch on: success, and whether something is
// missing. What lies below a file or a circle of links may be told either way.
func agree(x, y error) bool {
	if x == nil || y == nil {
		return x == nil && y == nil
	}
	missing := func(err error) bool { return errors.Is(err, fs.ErrNotExist) }
	vague := func(err error) bool { return errors.Is(err, syscall.ENOTDIR) || errors.Is(err, syscall.ELOOP) }
	return missing(x) == missing(y) || vague(x) || vague(y)
}

func tryRead(b *box, f provider.FS, name string) (string, error) {
	r, err := f.Open(b.ctx, name)
	if err != nil {
		return "", err
	}
	content, err := io.ReadAll(r)
	return string(content), errors.Join(err, r.Close())
}

// tree describes everything below dir, by its path.
func tree(b *box, f provider.FS, dir string) map[string]string {
	out := map[string]string{}
	var walk func(rel string)
	walk = func(rel string) {
		for e, err := range f.ReadDir(b.ctx, strings.TrimSuffix(dir+rel, "/")) {
			if err != nil {
				b.t.Fatalf("list: %v", err)
			}
			name := rel + e.Name()
			fi, err := f.Lstat(b.ctx, dir+name)
			if err != nil {
				b.t.Fatalf("lstat: %v", err)
			}
			switch {
			case fi.IsDir():
				out[name] = "dir"
				walk(name + "/")
			case fi.Mode().IsRegular():
				content, err := tryRead(b, f, dir+name)
				out[name] = fmt.Sprintf("%v %d %s %v", fi.Mode(), fi.Size(), content, err)
			default:
				out[name] = fi.Mode().Type().String()
			}
		}
	}
	walk("")
	return out
}
