package provider_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/aisandbox-go/aisandbox/provider"
)

// archive packs name, content pairs. A name that ends in "->" is a symbolic link
// to the content, one that ends in "=>" a hard link.
func archive(t *testing.T, pairs ...string) io.Reader {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for i := 0; i < len(pairs); i += 2 {
		h := &tar.Header{Typeflag: tar.TypeReg, Name: pairs[i], Mode: 0o640, Size: int64(len(pairs[i+1])), Format: tar.FormatPAX}
		body := pairs[i+1]
		if n, ok := strings.CutSuffix(h.Name, "->"); ok {
			h.Typeflag, h.Name, h.Linkname, h.Size, body = tar.TypeSymlink, n, body, 0, ""
		} else if n, ok := strings.CutSuffix(h.Name, "=>"); ok {
			h.Typeflag, h.Name, h.Linkname, h.Size, body = tar.TypeLink, n, body, 0, ""
		} else if strings.HasSuffix(h.Name, "/") {
			h.Typeflag, h.Mode = tar.TypeDir, 0o750
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, body); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return &b
}

func TestExecFSArchive(t *testing.T) {
	shells(t, func(t *testing.T, h *bare, f provider.FS) {
		ctx := t.Context()
		a := f.(provider.Archiver)
		long := strings.Repeat("long/", 40) + strings.Repeat("n", 200)
		in := []string{
			"./", "", "a", "1", "dir/", "", "dir/b", "22", "dir/new\nline", "3", "link->", "../elsewhere",
			"hard=>", "dir/b", long, "deep", ".git/x", "g", "dir/.git", "gg", "ü", "umlaut",
		}
		for _, e := range [][2]string{{"dst/dir/old", "old"}, {"dst/a", "older"}} {
			if err := f.Put(ctx, e[0], strings.NewReader(e[1]), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if err := a.TarIn(ctx, "dst", archive(t, in...)); err != nil {
			t.Fatal(err)
		}
		for n, want := range map[string]string{"a": "1", "dir/b": "22", "dir/old": "old", "hard": "22", long: "deep", "dir/new\nline": "3", "ü": "umlaut"} {
			if got := read(t, f, "dst/"+n); string(got) != want {
				t.Errorf("%.30q holds %q, want %q", n, got, want)
			}
		}
		if fi, err := f.Lstat(ctx, "dst/a"); err != nil || fi.Mode() != 0o640 {
			t.Errorf("mode of a: %v %v", fi, err)
		}
		var b bytes.Buffer
		if err := a.TarOut(ctx, "dst", &b, provider.TarOptions{Exclude: []string{".git", "long"}}); err != nil {
			t.Fatal(err)
		}
		var got []string
		tr := tar.NewReader(&b)
		for {
			e, err := tr.Next()
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, e.Name)
		}
		slices.Sort(got)
		if d := cmp.Diff([]string{"a", "dir/", "dir/b", "dir/new\nline", "dir/old", "hard", "link", "ü"}, got); d != "" {
			t.Error(d)
		}
		if names := list(t, f, "."); len(names) != 1 {
			t.Errorf("staging is left: %q", names)
		}
	})
}

func TestExecFSArchiveRefuses(t *testing.T) {
	shells(t, func(t *testing.T, h *bare, f provider.FS) {
		untouched := outside(t, h)
		for name, in := range map[string][]string{
			"dotdot":           {"ok", "1", "../out/new", "x", "after", "2"},
			"inner dotdot":     {"a/../../out/new", "x"},
			"absolute":         {h.root + "/../out/new", "x"},
			"own link":         {"l->", "../../out", "l/new", "x"},
			"own link, twice":  {"l->", "../../out/file", "l", "x"},
			"link to own link": {"l->", "../../out/file", "h=>", "l"},
			"hard link out":    {"h=>", "../out/file"},
			"hard link abs":    {"h=>", filepath.Dir(h.root) + "/out/file"},
			"planted":          {"abs/new", "x"},
			"planted, dir":     {"rel/", "", "rel/new", "x"},
			"planted, deep":    {"up/out/new", "x"},
		} {
			err := f.(provider.Archiver).TarIn(t.Context(), ".", archive(t, in...))
			if !errors.Is(err, provider.ErrOutsideRoot) {
				t.Errorf("%s: %v", name, err)
			}
			if _, err := os.Lstat(h.root + "/after"); err == nil {
				t.Errorf("%s: what comes after was unpacked", name)
			}
		}
		if err := f.(provider.Archiver).TarIn(t.Context(), ".", archive(t, "fabs", "mine")); err != nil {
			t.Error(err) // the link itself is replaced
		}
		if err := untouched(); err != nil {
			t.Error(err)
		}
	})
}
