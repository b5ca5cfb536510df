package attack

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/sandbox"
	"github.com/aisandbox-go/aisandbox/workspace"
)

// TestFilesStayInside: no file operation of the portable sandbox leaves the
// workspace, by whatever name or link. The agent plants the links; whoever works
// on its files from the host must not be led anywhere by them. This is no matter of
// isolation, so local has to pass as the others do; the control is the shell.
func TestFilesStayInside(t *testing.T) {
	for _, pl := range places {
		t.Run(pl.name, func(t *testing.T) {
			pl.require(t)
			sb := box(t, pl.open(t, options{base: shortDir(t)}), "", workspace.Workspace{})
			outside := sh(t, sb, `
d=$(mktemp -d) && mkdir $d/sub && echo precious > $d/file && echo precious > $d/sub/file
ln -s $d out && ln -s $d/file outfile && ln -s $d/none dangling && ln -s .. up && ln -s / root && ln -s $d/. a-dir-link
mkdir real && ln -s $d real/out && echo inside > real/file && ln -s loop loop
echo $d`)
			if !strings.HasPrefix(outside, "/") {
				t.Fatal(outside)
			}
			t.Cleanup(func() { _, _ = sb.Shell(context.Background(), "rm -rf "+outside) })
			if got := sh(t, sb, "cat outfile out/file out/sub/file"); got != "precious\nprecious\nprecious" {
				t.Fatalf("the positive control reads %q", got)
			}
			before := sh(t, sb, "find "+outside+" -ls; cat "+outside+"/file")
			for _, op := range fileOps {
				for _, name := range append([]string{
					"out/file", "out/sub/file", "out/new", "out/sub", "real/out/file", "a-dir-link/file", "root/etc/passwd", "root/tmp/new",
					"up/x", "../x", "../../etc/passwd", "real/../../x", "/workspace/../etc/passwd", "/workspace/out/file", outside + "/file", outside + "/new",
					"/etc/passwd", "real\x00/file",
				}, op.more...) {
					if err := op.do(t.Context(), sb, name); err == nil {
						t.Errorf("%s(%q) succeeded", op.name, name)
					}
				}
			}
			if after := sh(t, sb, "find "+outside+" -ls; cat "+outside+"/file"); after != before {
				t.Errorf("outside there was\n%s\nand is\n%s", before, after)
			}
			// A name that is a link is the link, never what it leads to.
			if err := sb.Remove(t.Context(), "outfile"); err != nil {
				t.Error(err)
			}
			if err := sb.Remove(t.Context(), "out"); err != nil {
				t.Error(err)
			}
			if got := sh(t, sb, "ls out outfile 2>/dev/null; cat "+outside+"/file"); got != "precious" {
				t.Errorf("removing links left %q", got)
			}
			if b, err := sb.ReadFile(t.Context(), "real/file"); err != nil || string(b) != "inside\n" {
				t.Errorf("the file inside is %q, %v", b, err)
			}
		})
	}
}

// fileOp is one way to use a name. more are names that lead out for it alone.
type fileOp struct {
	name string
	more []string
	do   func(ctx context.Context, sb *sandbox.Sandbox, name string) error
}

// Reading and listing follow a last component that is a link, or refuse; both are
// right as long as they don't follow it out.
var last = []string{"outfile", "dangling", "loop"}

var fileOps = []fileOp{
	{"ReadFile", last, func(ctx context.Context, sb *sandbox.Sandbox, name string) error {
		_, err := sb.ReadFile(ctx, name)
		return err
	}},
	{"Open", last, func(ctx context.Context, sb *sandbox.Sandbox, name string) error {
		r, err := sb.Open(ctx, name)
		if err != nil {
			return err
		}
		_, err = io.Copy(io.Discard, r)
		return errors.Join(err, r.Close())
	}},
	{"WriteFile", nil, func(ctx context.Context, sb *sandbox.Sandbox, name string) error {
		return sb.WriteFile(ctx, name, []byte("changed"), 0o644)
	}},
	{"Put", nil, func(ctx context.Context, sb *sandbox.Sandbox, name string) error {
		return sb.Put(ctx, name, strings.NewReader("changed"), 0o600)
	}},
	{"Lstat", nil, func(ctx context.Context, sb *sandbox.Sandbox, name string) error {
		_, err := sb.Lstat(ctx, name)
		return err
	}},
	{"Exists", nil, func(ctx context.Context, sb *sandbox.Sandbox, name string) error {
		ok, err := sb.Exists(ctx, name)
		if err == nil && !ok {
			return errors.New("no such file") // nothing was learned
		}
		return err
	}},
	{"ReadDir", []string{"out", "root", "up", "real/out", "a-dir-link", "..", "/", "/workspace/.."}, func(ctx context.Context, sb *sandbox.Sandbox, name string) error {
		for _, err := range sb.ReadDir(ctx, name) {
			return err
		}
		return errors.New("nothing there")
	}},
	{"Mkdir", nil, func(ctx context.Context, sb *sandbox.Sandbox, name string) error { return sb.Mkdir(ctx, name+"/made") }},
	{"Remove", []string{"..", "/", "/workspace/.."}, func(ctx context.Context, sb *sandbox.Sandbox, name string) error {
		err := sb.Remove(ctx, name)
		if ok, _ := sb.Exists(ctx, "real/file"); !ok {
			return nil // it removed too much
		}
		if err == nil {
			// A missing file is success, and behind a link all files are missing.
			res, rerr := sb.Run(ctx, provider.Cmd{Argv: []string{"test", "-e", name}})
			if rerr == nil && res.Exit.Code != 0 {
				return errors.New("nothing to remove")
			}
		}
		return err
	}},
	{"Rename from", nil, func(ctx context.Context, sb *sandbox.Sandbox, name string) error {
		return sb.Rename(ctx, name, "renamed")
	}},
	{"Rename to", nil, func(ctx context.Context, sb *sandbox.Sandbox, name string) error {
		if err := sb.WriteFile(ctx, "victim", []byte("changed"), 0o644); err != nil {
			return nil
		}
		return sb.Rename(ctx, "victim", name)
	}},
	{"Symlink", nil, func(ctx context.Context, sb *sandbox.Sandbox, name string) error { return sb.Symlink(ctx, "x", name) }},
	{"TarOut", []string{"out", "root", "up", "real/out", "a-dir-link", "..", "/"}, func(ctx context.Context, sb *sandbox.Sandbox, name string) error {
		return sb.TarOut(ctx, name, io.Discard, provider.TarOptions{})
	}},
	{"TarIn to", []string{"out", "root", "up", "real/out", "..", "/"}, func(ctx context.Context, sb *sandbox.Sandbox, name string) error {
		return sb.TarIn(ctx, name, archive(&tar.Header{Name: "new", Typeflag: tar.TypeReg, Mode: 0o644}, "changed"))
	}},
	{"TarIn of", []string{"outfile/x", "dangling/x"}, func(ctx context.Context, sb *sandbox.Sandbox, name string) error {
		return sb.TarIn(ctx, "", archive(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644}, "changed"))
	}},
}

// archive is a tar stream of one file.
func archive(h *tar.Header, content string) io.Reader {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	h.Size = int64(len(content))
	if strings.Contains(h.Name, "\x00") {
		h.Name = "../nul"
	}
	_ = w.WriteHeader(h)
	_, _ = io.WriteString(w, content)
	_ = w.Close()
	return &b
}

// TestTarLinks: an archive that brings its own way out.
func TestTarLinks(t *testing.T) {
	for _, pl := range places {
		t.Run(pl.name, func(t *testing.T) {
			pl.require(t)
			sb := box(t, pl.open(t, options{base: shortDir(t)}), "", workspace.Workspace{})
			outside := sh(t, sb, "d=$(mktemp -d) && echo precious > $d/file && echo $d")
			t.Cleanup(func() { _, _ = sb.Shell(context.Background(), "rm -rf "+outside) })
			for _, tt := range []struct {
				name  string
				links []tar.Header
			}{
				{"link, then through it", []tar.Header{
					{Name: "l1", Typeflag: tar.TypeSymlink, Linkname: outside},
					{Name: "l1/file", Typeflag: tar.TypeReg, Mode: 0o644, Size: 7},
				}},
				{"hard link out", []tar.Header{
					{Name: "l2", Typeflag: tar.TypeLink, Linkname: outside + "/file"},
					{Name: "l2", Typeflag: tar.TypeReg, Mode: 0o644, Size: 7},
				}},
				{"hard link to a link out", []tar.Header{
					{Name: "l3", Typeflag: tar.TypeSymlink, Linkname: outside},
					{Name: "l4", Typeflag: tar.TypeLink, Linkname: "l3/file"},
				}},
				{"directory in place of a link", []tar.Header{
					{Name: "l5", Typeflag: tar.TypeSymlink, Linkname: outside},
					{Name: "l5", Typeflag: tar.TypeDir, Mode: 0o777},
					{Name: "l5/file", Typeflag: tar.TypeReg, Mode: 0o644, Size: 7},
				}},
				{"absolute name", []tar.Header{{Name: outside + "/abs", Typeflag: tar.TypeReg, Mode: 0o644, Size: 7}}},
				{"dot-dot", []tar.Header{{Name: "x/../../dotdot", Typeflag: tar.TypeReg, Mode: 0o644, Size: 7}}},
			} {
				var b bytes.Buffer
				w := tar.NewWriter(&b)
				for _, h := range tt.links {
					if err := w.WriteHeader(&h); err != nil {
						t.Fatal(err)
					}
					if h.Size > 0 {
						_, _ = io.WriteString(w, "changed")
					}
				}
				if err := w.Close(); err != nil {
					t.Fatal(err)
				}
				// Unpacking a part is as good as refusing all of it; leaving is not.
				err := sb.TarIn(t.Context(), "", &b)
				if got := sh(t, sb, "cd "+outside+" && ls -A && cat file; ls -d /workspace/../dotdot "+sb.RealRoot()+"/../dotdot 2>/dev/null"); got != "file\nprecious" {
					t.Errorf("%s: outside there is %q (%v)", tt.name, got, err)
				}
			}
		})
	}
}
