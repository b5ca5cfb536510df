package guest

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/iotest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/aisandbox-go/aisandbox/provider"
)

func put(t testing.TB, g *Handle, name, content string) {
	t.Helper()
	if err := g.Put(t.Context(), name, strings.NewReader(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

func get(t testing.TB, g *Handle, name string) string {
	t.Helper()
	r, err := g.Open(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	b, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestPutAndOpen(t *testing.T) {
	both(t, func(t *testing.T, g *Handle) {
		all := make([]byte, 256)
		for i := range all {
			all[i] = byte(i)
		}
		for _, size := range []int{0, 1, 256, 32767, 32768, 32769, 131073, 5 << 20} {
			content := strings.Repeat(string(all), size/256+1)[:size]
			name := fmt.Sprintf("a/b/%d", size)
			put(t, g, name, content)
			if got := get(t, g, name); got != content {
				t.Errorf("%d bytes came back as %d", size, len(got))
			}
			put(t, g, name, "short")
			if got := get(t, g, g.Root()+"/"+name); got != "short" {
				t.Errorf("after an overwrite: %.20q", got)
			}
		}
		for _, mode := range []fs.FileMode{0o600, 0o755, 0o444, 0o777} {
			if err := g.Put(t.Context(), "mode", strings.NewReader("x"), mode); err != nil {
				t.Fatal(err)
			}
			if st, err := g.Lstat(t.Context(), "mode"); err != nil || st.Mode() != mode || st.Size() != 1 || st.Name() != "mode" {
				t.Errorf("Lstat = %v, %v; want mode %v", st, err, mode)
			}
		}
		put(t, g, g.Private()+"/secret", "s")
		st, err := os.Stat(g.Private())
		if err != nil || st.Mode().Perm() != 0o700 {
			t.Errorf("private directory: %v, %v", st.Mode(), err)
		}
	})
}

func TestPutIsAtomic(t *testing.T) {
	g, h := serving(t)
	put(t, g, "f", "old")
	failure := errors.New("reader broke")
	r := io.MultiReader(strings.NewReader("new"), iotest.ErrReader(failure))
	if err := g.Put(t.Context(), "f", r, 0o644); !errors.Is(err, failure) {
		t.Errorf("Put: %v", err)
	}
	if got := get(t, g, "f"); got != "old" {
		t.Errorf("content %q", got)
	}
	if ents, err := os.ReadDir(h.root); err != nil || len(ents) != 1 {
		t.Errorf("left behind: %v, %v", ents, err)
	}
}

func TestNames(t *testing.T) {
	g, _ := serving(t)
	names := []string{" ", " lead", "quote'", "new\nline", "tab\t", "-rf", "*", "🙂", strings.Repeat("n", 255), "\xff\xfe", ".hidden", `back\slash`}
	for _, n := range names {
		put(t, g, "d/"+n, n)
	}
	if err := g.Mkdir(t.Context(), "d/dir/deep"); err != nil {
		t.Fatal(err)
	}
	want := append(slices.Clone(names), "dir")
	slices.Sort(want)
	var got []string
	for ent, err := range g.ReadDir(t.Context(), "d") {
		if err != nil {
			t.Fatal(err)
		}
		if ent.IsDir() != (ent.Name() == "dir") {
			t.Errorf("%q is a directory: %v", ent.Name(), ent.IsDir())
		}
		got = append(got, ent.Name())
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	for range g.ReadDir(t.Context(), "d") {
		break
	}
	for _, n := range names {
		if c := get(t, g, "d/"+n); c != n {
			t.Errorf("%q holds %q", n, c)
		}
	}
}

func TestMissing(t *testing.T) {
	g, _ := serving(t)
	put(t, g, "file", "x")
	ctx := t.Context()
	_, openErr := g.Open(ctx, "no")
	_, statErr := g.Lstat(ctx, "no/no")
	_, linkErr := g.Readlink(ctx, "no")
	var dirErr error
	for _, err := range g.ReadDir(ctx, "no") {
		dirErr = err
	}
	for name, err := range map[string]error{"open": openErr, "lstat": statErr, "readlink": linkErr, "readdir": dirErr, "rename": g.Rename(ctx, "no", "x")} {
		var pe *fs.PathError
		if !errors.Is(err, fs.ErrNotExist) || !errors.As(err, &pe) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, name := range []string{"no", "no/no", "file/below"} {
		if err := g.Remove(ctx, name); err != nil {
			t.Errorf("remove %q: %v", name, err)
		}
	}
	if _, err := g.Open(ctx, "."); err == nil {
		t.Error("a directory can be opened")
	}
	if err := g.Put(ctx, "file/below", strings.NewReader(""), 0o644); err == nil {
		t.Error("put below a file")
	}
	if _, err := g.Lstat(ctx, "a\x00b"); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("NUL: %v", err)
	}
}

func TestTreeOperations(t *testing.T) {
	g, _ := serving(t)
	ctx := t.Context()
	put(t, g, "d/e/f", "1")
	if err := g.Rename(ctx, "d", "moved"); err != nil {
		t.Fatal(err)
	}
	if err := g.Symlink(ctx, "e/f", "moved/link"); err != nil {
		t.Fatal(err)
	}
	if err := g.Symlink(ctx, "nowhere", "moved/dangling"); err != nil {
		t.Fatal(err)
	}
	if got := get(t, g, "moved/link"); got != "1" {
		t.Errorf("through a link inside: %q", got)
	}
	if target, err := g.Readlink(ctx, "moved/dangling"); target != "nowhere" || err != nil {
		t.Errorf("Readlink = %q, %v", target, err)
	}
	st, err := g.Lstat(ctx, "moved/dangling")
	if err != nil || st.Mode().Type() != fs.ModeSymlink {
		t.Errorf("Lstat of a link: %v, %v", st, err)
	}
	if err := g.Mkdir(ctx, "moved/e"); err != nil {
		t.Errorf("Mkdir of an existing directory: %v", err)
	}
	if err := g.Remove(ctx, "moved"); err != nil {
		t.Fatal(err)
	}
	if _, err := g.Lstat(ctx, "moved"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("after Remove: %v", err)
	}
	if err := g.Remove(ctx, "."); err == nil {
		t.Error("the root was removed")
	}
}

func TestNothingLeavesTheRoot(t *testing.T) {
	g, h := serving(t)
	ctx := t.Context()
	outside := shortDir(t)
	secret := filepath.Join(outside, "secret")
	if err := os.WriteFile(secret, []byte("secret"), 0o644); err != nil {
		t.Fatal(err)
	}
	for link, target := range map[string]string{"abs": outside, "rel": "../" + filepath.Base(outside), "file": secret, "up": ".."} {
		if err := os.Symlink(target, filepath.Join(h.root, link)); err != nil {
			t.Fatal(err)
		}
	}
	names := []string{"abs/secret", "rel/secret", "../" + filepath.Base(outside) + "/secret", secret, "x/../../" + filepath.Base(outside) + "/secret", "up/" + filepath.Base(outside) + "/secret"}
	for _, n := range names {
		refused := func(op string, err error) {
			t.Helper()
			if !errors.Is(err, fs.ErrPermission) {
				t.Errorf("%s %q: %v", op, n, err)
			}
		}
		_, err := g.Open(ctx, n)
		refused("open", err)
		refused("put", g.Put(ctx, n, strings.NewReader("x"), 0o644))
		_, err = g.Lstat(ctx, n)
		refused("lstat", err)
		refused("mkdir", g.Mkdir(ctx, n+"2/d"))
		refused("remove", g.Remove(ctx, n))
		put(t, g, "own", "x")
		refused("rename to", g.Rename(ctx, "own", n))
		refused("rename from", g.Rename(ctx, n, "own2"))
		refused("symlink", g.Symlink(ctx, "x", n+"3"))
		_, err = g.Readlink(ctx, n)
		refused("readlink", err)
		dir := filepath.Dir(n)
		for _, err := range g.ReadDir(ctx, dir) {
			refused("readdir", err)
			break
		}
		refused("tar out", g.TarOut(ctx, dir, io.Discard, provider.TarOptions{}))
		refused("tar in", g.TarIn(ctx, dir, bytes.NewReader(archive(t, tar.Header{Name: "x", Typeflag: tar.TypeReg}))))
		_, err = g.Watch(ctx, dir, provider.WatchOptions{})
		refused("watch", err)
	}
	if _, err := g.Open(ctx, "file"); !errors.Is(err, fs.ErrPermission) {
		t.Errorf("open through a link: %v", err)
	}
	// A link that leads out is itself a file of the sandbox.
	if err := g.Put(ctx, "file", strings.NewReader("mine"), 0o644); err != nil {
		t.Errorf("replace a link: %v", err)
	}
	if err := g.Remove(ctx, "abs"); err != nil {
		t.Errorf("remove a link: %v", err)
	}
	if b, err := os.ReadFile(secret); string(b) != "secret" || err != nil {
		t.Errorf("outside was changed: %q, %v", b, err)
	}
	if ents, _ := os.ReadDir(outside); len(ents) != 1 {
		t.Errorf("outside: %v", ents)
	}
}

func TestNamedPipeDoesNotHang(t *testing.T) {
	g, h := serving(t)
	if err := syscall.Mkfifo(filepath.Join(h.root, "pipe"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := g.Open(t.Context(), "pipe"); !errors.Is(err, fs.ErrInvalid) && !errors.Is(err, syscall.EINVAL) {
		t.Errorf("Open: %v", err)
	}
	if err := g.TarOut(t.Context(), ".", io.Discard, provider.TarOptions{}); err != nil {
		t.Errorf("TarOut: %v", err)
	}
}

// archive makes a tar of headers; a regular file's content is its Linkname.
func archive(t testing.TB, headers ...tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range headers {
		content := ""
		if h.Typeflag == tar.TypeReg {
			content, h.Linkname = h.Linkname, ""
			h.Size = int64(len(content))
		}
		if h.Mode == 0 {
			h.Mode = 0o644
		}
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, content); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestTarRoundTrip(t *testing.T) {
	both(t, func(t *testing.T, g *Handle) {
		ctx := t.Context()
		when := time.Date(2001, 2, 3, 4, 5, 6, 789, time.UTC)
		long := strings.Repeat("long/", 60) + "name"
		in := archive(t,
			tar.Header{Name: "dir/", Typeflag: tar.TypeDir, Mode: 0o750, ModTime: when, Format: tar.FormatPAX},
			tar.Header{Name: "dir/exec", Typeflag: tar.TypeReg, Mode: 0o755, Linkname: "#!/bin/sh\n", ModTime: when, Format: tar.FormatPAX},
			tar.Header{Name: "dir/new\nline €", Typeflag: tar.TypeReg, Linkname: "n", Format: tar.FormatPAX},
			tar.Header{Name: long, Typeflag: tar.TypeReg, Linkname: strings.Repeat("big", 1<<20), Format: tar.FormatPAX},
			tar.Header{Name: "dir/abs", Typeflag: tar.TypeSymlink, Linkname: "/usr/bin/python3"},
			tar.Header{Name: "dir/rel", Typeflag: tar.TypeSymlink, Linkname: "exec"},
			tar.Header{Name: "hard", Typeflag: tar.TypeLink, Linkname: "dir/exec"},
			tar.Header{Name: "dir/.git/config", Typeflag: tar.TypeReg, Linkname: "x"},
		)
		if err := g.TarIn(ctx, "in", bytes.NewReader(in)); err != nil {
			t.Fatal(err)
		}
		var out bytes.Buffer
		if err := g.TarOut(ctx, "in", &out, provider.TarOptions{Exclude: []string{".git"}}); err != nil {
			t.Fatal(err)
		}
		got := map[string]string{}
		r := tar.NewReader(&out)
		for {
			h, err := r.Next()
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			b, err := io.ReadAll(r)
			if err != nil {
				t.Fatal(err)
			}
			got[h.Name] = fmt.Sprintf("%c %o %s %d", h.Typeflag, h.Mode, h.Linkname, len(b))
			if h.Name == "dir/" || h.Name == "dir/exec" {
				if !h.ModTime.Equal(when) {
					t.Errorf("%s: time %v", h.Name, h.ModTime)
				}
			}
		}
		for name := range got {
			if strings.HasPrefix(name, "long/") && name != long {
				delete(got, name)
			}
		}
		want := map[string]string{
			"dir/": "5 750  0", "dir/exec": "0 755  10", "dir/new\nline €": "0 644  1", long: "0 644  3145728",
			"dir/abs": "2 777 /usr/bin/python3 0", "dir/rel": "2 777 exec 0", "hard": "1 755 dir/exec 0",
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Error(d)
		}
	})
}

func TestTarInStaysInside(t *testing.T) {
	g, h := serving(t)
	outside := shortDir(t)
	victim := filepath.Join(outside, "victim")
	if err := os.WriteFile(victim, []byte("v"), 0o644); err != nil {
		t.Fatal(err)
	}
	file := func(name string) tar.Header { return tar.Header{Name: name, Typeflag: tar.TypeReg, Linkname: "evil"} }
	link := func(name, target string) tar.Header {
		return tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: target}
	}
	for name, headers := range map[string][]tar.Header{
		"up":               {file("../evil")},
		"up inside":        {file("a/../../evil")},
		"absolute":         {file(outside + "/evil")},
		"through a link":   {link("l", outside), file("l/evil")},
		"through two":      {link("a", ".."), link("l", "a/"+filepath.Base(outside)), file("l/evil")},
		"hard link":        {{Name: "h", Typeflag: tar.TypeLink, Linkname: victim}},
		"hard link up":     {{Name: "h", Typeflag: tar.TypeLink, Linkname: "../../" + filepath.Base(outside) + "/victim"}},
		"hard via link":    {link("l", outside), {Name: "h", Typeflag: tar.TypeLink, Linkname: "l/victim"}},
		"directory":        {link("l", outside), {Name: "l/d/", Typeflag: tar.TypeDir, Mode: 0o755}},
		"device":           {{Name: "null", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 3}},
		"to sibling below": {link("l", "../sibling"), file("l/evil")},
	} {
		t.Run(name, func(t *testing.T) {
			if err := os.MkdirAll(filepath.Join(h.root, "sibling"), 0o755); err != nil {
				t.Fatal(err)
			}
			headers = append(headers, file("after"))
			err := g.TarIn(t.Context(), "in", bytes.NewReader(archive(t, headers...)))
			if err == nil {
				t.Error("it was unpacked")
			}
			if name != "device" && !errors.Is(err, fs.ErrPermission) {
				t.Errorf("TarIn: %v", err)
			}
			if _, err := os.Lstat(filepath.Join(h.root, "in/after")); err == nil {
				t.Error("what followed was unpacked")
			}
			if b, _ := os.ReadFile(victim); string(b) != "v" {
				t.Errorf("the victim holds %q", b)
			}
			for _, dir := range []string{outside, filepath.Join(h.root, "sibling")} {
				if ents, _ := os.ReadDir(dir); len(ents) > 1 || len(ents) == 1 && ents[0].Name() != "victim" {
					t.Errorf("%s: %v", dir, ents)
				}
			}
			if err := g.Remove(t.Context(), "in"); err != nil {
				t.Fatal(err)
			}
		})
	}
}

func TestTarInReplacesLinks(t *testing.T) {
	g, h := serving(t)
	outside := filepath.Join(shortDir(t), "victim")
	if err := os.WriteFile(outside, []byte("v"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(outside, filepath.Join(h.root, "f")); err != nil {
		t.Fatal(err)
	}
	if err := g.TarIn(t.Context(), ".", bytes.NewReader(archive(t, tar.Header{Name: "f", Typeflag: tar.TypeReg, Linkname: "mine"}))); err != nil {
		t.Fatal(err)
	}
	if b, _ := os.ReadFile(outside); string(b) != "v" {
		t.Errorf("written through a link: %q", b)
	}
	if got := get(t, g, "f"); got != "mine" {
		t.Errorf("content %q", got)
	}
}

func TestTarBroken(t *testing.T) {
	g, _ := serving(t)
	whole := archive(t, tar.Header{Name: "f", Typeflag: tar.TypeReg, Linkname: strings.Repeat("x", 5000)})
	if err := g.TarIn(t.Context(), ".", bytes.NewReader(whole[:2000])); err == nil {
		t.Error("a cut archive was taken")
	}
	if err := g.TarIn(t.Context(), ".", strings.NewReader(strings.Repeat("rubbish", 1<<20))); err == nil {
		t.Error("rubbish was taken")
	}
	if got := stdoutOf(t, g, "echo", "ok"); got != "ok\n" {
		t.Errorf("afterwards: %q", got)
	}
}

func TestManySmallFiles(t *testing.T) {
	g, _ := serving(t)
	const n = 10_000
	var in bytes.Buffer
	w := tar.NewWriter(&in)
	for i := range n {
		content := fmt.Sprintf("file %d", i)
		if err := w.WriteHeader(&tar.Header{Name: fmt.Sprintf("d%d/f%d", i/100, i), Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(content))}); err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(w, content)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	if err := g.TarIn(t.Context(), ".", &in); err != nil {
		t.Fatal(err)
	}
	middle := time.Now()
	var out bytes.Buffer
	if err := g.TarOut(t.Context(), ".", &out, provider.TarOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Logf("%d files: in %v, out %v", n, middle.Sub(begin), time.Since(middle))
	files := 0
	for r := tar.NewReader(&out); ; {
		h, err := r.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if h.Typeflag == tar.TypeReg {
			files++
		}
	}
	if files != n {
		t.Errorf("%d files came back", files)
	}
}
