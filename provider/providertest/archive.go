package providertest

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/aisandbox-go/aisandbox/provider"
)

var archiveCases = []testCase{
	{"F17", "1,000 files in and out", func(t *testing.T, b *box) {
		a := b.archiver()
		want := map[string]string{}
		var in []string
		for i := range 1000 {
			n := fmt.Sprintf("d%d/e%d/file %d", i%10, i%7, i)
			want[n] = fmt.Sprintf("content %d\x00\n", i)
			in = append(in, n, want[n])
		}
		odd := strings.Repeat("deep/", 30) + "a\nb-" + strings.Repeat("ü", 100)
		want[odd] = ""
		in = append(in, odd, "", "link->", "d0/nowhere", "empty/", "")
		if err := a.TarIn(b.ctx, b.dir(), pack(t, in...)); err != nil {
			t.Fatal(err)
		}
		for _, n := range []string{"d1/e1/file 1", odd} {
			if got := b.read(b.path(n)); got != want[n] {
				t.Errorf("%.40q holds %q", n, got)
			}
		}
		if fi, err := b.fs.Lstat(b.ctx, b.path("d1/e1/file 1")); err != nil || fi.Mode() != 0o640 {
			t.Errorf("mode: %v, %v", fi, err)
		}
		var out bytes.Buffer
		if err := a.TarOut(b.ctx, b.dir(), &out, provider.TarOptions{}); err != nil {
			t.Fatal(err)
		}
		got, links := unpack(t, &out)
		for n, c := range want {
			if g, ok := got[n]; !ok || g != c {
				t.Errorf("%.40q comes back as %q, %v", n, g, ok)
			}
		}
		if len(got) != len(want) || links["link"] != "d0/nowhere" {
			t.Errorf("%d files, want %d; links %v", len(got), len(want), links)
		}
		out.Reset()
		if err := a.TarOut(b.ctx, b.dir(), &out, provider.TarOptions{Exclude: []string{"deep", "e1", "link", "d2"}}); err != nil {
			t.Fatal(err)
		}
		got, links = unpack(t, &out)
		excluded := func(n string) bool {
			return strings.HasPrefix(n, "deep/") || strings.Contains(n, "/e1/") || strings.HasPrefix(n, "d2/")
		}
		for n := range want {
			if _, ok := got[n]; ok == excluded(n) {
				t.Errorf("%.40q: excluded is %v, present is %v", n, excluded(n), ok)
			}
		}
		if len(links) != 0 {
			t.Errorf("links %v were not excluded", links)
		}
	}},
	{"F19", "archive over existing files", func(t *testing.T, b *box) {
		a := b.archiver()
		b.put(b.path("d/keep"), "kept")
		b.put(b.path("d/change"), "old, longer")
		if err := a.TarIn(b.ctx, b.dir(), pack(t, "d/change", "new", "d/more/x", "x")); err != nil {
			t.Fatal(err)
		}
		for n, want := range map[string]string{"d/keep": "kept", "d/change": "new", "d/more/x": "x"} {
			if got := b.read(b.path(n)); got != want {
				t.Errorf("%s holds %q", n, got)
			}
		}
	}},
	{"F20", "archive that tries to leave", func(t *testing.T, b *box) {
		a := b.archiver()
		out := b.outside()
		link := b.linker()
		for name, in := range map[string][]string{
			"by name":                  {"before", "1", "../../../../../../../.." + out.dir + "/new", "x", "after", "2"},
			"by name, hidden":          {"a/../../new", "x", "after", "2"},
			"by an absolute name":      {out.dir + "/new", "x", "after", "2"},
			"through its own link":     {"l->", out.dir, "l/new", "x", "after", "2"},
			"by a hard link":           {"h=>", "../../../../../../../.." + out.dir + "/file", "after", "2"},
			"by a hard link, absolute": {"h=>", out.dir + "/file", "after", "2"},
			"through a planted link":   {"planted/new", "x", "after", "2"},
		} {
			dir := b.path(strings.ReplaceAll(name, " ", "-"))
			if err := b.fs.Mkdir(b.ctx, dir); err != nil {
				t.Fatal(err)
			}
			if err := link.Symlink(b.ctx, out.dir, dir+"/planted"); err != nil {
				t.Fatal(err)
			}
			if err := a.TarIn(b.ctx, dir, pack(t, in...)); err == nil {
				t.Errorf("%s: accepted", name)
			} else if errors.Is(err, errors.ErrUnsupported) {
				t.Errorf("%s: %v", name, err)
			}
			if b.size(dir+"/after") >= 0 {
				t.Errorf("%s: what came after was unpacked", name)
			}
			out.untouched(name)
		}
		// Links in the way may be refused or replaced, but never followed.
		for name, in := range map[string][]string{
			"onto a planted link":          {"planted-file", "x"},
			"a directory onto a link":      {"planted/", "", "planted/new", "x"},
			"onto its own link":            {"l->", out.dir + "/file", "l", "x"},
			"by a hard link to a link":     {"l->", out.dir + "/file", "h=>", "l", "h", "x"},
			"a directory onto its own":     {"l->", out.dir, "l/", "", "l/new", "x"},
			"hard link to a planted link":  {"h=>", "planted-file", "h", "x"},
			"hard link through a planted":  {"h=>", "planted/file", "h", "x"},
			"a link through a planted one": {"planted/l->", "x"},
		} {
			dir := b.path("r-" + strings.ReplaceAll(name, " ", "-"))
			if err := b.fs.Mkdir(b.ctx, dir); err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(link.Symlink(b.ctx, out.dir, dir+"/planted"), link.Symlink(b.ctx, out.dir+"/file", dir+"/planted-file")); err != nil {
				t.Fatal(err)
			}
			_ = a.TarIn(b.ctx, dir, pack(t, in...))
			out.untouched(name)
		}
	}},
	{"F21", "archive that ends early", func(t *testing.T, b *box) {
		a := b.archiver()
		full, _ := io.ReadAll(pack(t, "a", strings.Repeat("a", 5000), "b", strings.Repeat("b", 5000)))
		for _, n := range []int{100, 600, 3000, 7000} {
			if err := a.TarIn(b.ctx, b.path("x"), bytes.NewReader(full[:n])); err == nil {
				t.Errorf("%d bytes of an archive were accepted", n)
			}
		}
		if err := a.TarIn(b.ctx, b.path("x"), strings.NewReader(strings.Repeat("no archive ", 100))); err == nil {
			t.Error("text was accepted")
		}
	}},
}

// archiver is the handle's own, or the one made from Start alone.
func (b *box) archiver() provider.Archiver {
	b.t.Helper()
	if a, ok := provider.As[provider.Archiver](b.h); ok {
		return a
	}
	if !b.has("tar") {
		b.lacks("archives, and the sandbox has no tar")
	}
	return provider.ExecFS(b.h).(provider.Archiver)
}

// pack makes an archive of name, content pairs. A name that ends in -> is a
// symbolic link to the content, one in => a hard link, one in / a directory.
func pack(t *testing.T, pairs ...string) io.Reader {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for i := 0; i < len(pairs); i += 2 {
		name, body := pairs[i], pairs[i+1]
		h := &tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o640, Format: tar.FormatPAX}
		switch {
		case strings.HasSuffix(name, "->"):
			h.Typeflag, h.Name, h.Linkname, body = tar.TypeSymlink, name[:len(name)-2], body, ""
		case strings.HasSuffix(name, "=>"):
			h.Typeflag, h.Name, h.Linkname, body = tar.TypeLink, name[:len(name)-2], body, ""
		case strings.HasSuffix(name, "/"):
			h.Typeflag, h.Mode = tar.TypeDir, 0o755
		}
		h.Size = int64(len(body))
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
	return &buf
}

func unpack(t *testing.T, r io.Reader) (files, links map[string]string) {
	t.Helper()
	files, links = map[string]string{}, map[string]string{}
	tr := tar.NewReader(r)
	for {
		h, err := tr.Next()
		if err == io.EOF {
			return files, links
		}
		if err != nil {
			t.Fatal(err)
		}
		switch h.Typeflag {
		case tar.TypeSymlink:
			links[h.Name] = h.Linkname
		case tar.TypeReg:
			body, err := io.ReadAll(tr)
			if err != nil {
				t.Fatal(err)
			}
			files[h.Name] = string(body)
		}
	}
}
