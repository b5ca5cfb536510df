package provider_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/aisandbox-go/aisandbox/internal/proc"
	"github.com/aisandbox-go/aisandbox/provider"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// bare is the smallest backend: a directory and a process.
type bare struct {
	root string
	sh   []string // instead of "sh"
	path string
	cred *syscall.Credential
}

func (b *bare) Ref() provider.Ref { return provider.Ref{Provider: "bare", ID: b.root} }
func (b *bare) Root() string      { return b.root }
func (b *bare) Close() error      { return nil }

func (b *bare) Start(ctx context.Context, c provider.Cmd) (provider.Process, error) {
	argv := c.Argv
	if argv[0] == "sh" {
		argv = append(slices.Clone(b.sh), argv[1:]...)
	}
	if c.Dir == "" {
		c.Dir = b.root
	}
	return proc.Start(ctx, proc.Spec{
		Argv: argv, Dir: c.Dir, Env: append([]string{"PATH=" + b.path}, c.Env...),
		Stdin: c.Stdin, Stdout: c.Stdout, Stderr: c.Stderr, Credential: b.cred,
	})
}

// need skips where a tool is missing, except in CI, where it must be there.
func need(t *testing.T, tool string) string {
	t.Helper()
	p, err := exec.LookPath(tool)
	if err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatalf("%s is needed in CI: %v", tool, err)
		}
		t.Skipf("no %s here", tool)
	}
	return p
}

// shells runs f with each shell; busybox brings its own tools.
func shells(t *testing.T, f func(t *testing.T, h *bare, ffs provider.FS)) {
	for _, name := range []string{"dash", "bash", "busybox"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := &bare{root: filepath.Join(t.TempDir(), "root"), path: os.Getenv("PATH")}
			if err := os.Mkdir(h.root, 0o755); err != nil {
				t.Fatal(err)
			}
			bin := need(t, name)
			switch name {
			case "dash":
				h.sh = []string{bin}
			case "bash":
				h.sh = []string{bin, "--posix"}
			case "busybox":
				h.sh = []string{bin, "sh"}
				h.path = t.TempDir()
				out, err := exec.Command(bin, "--list").Output()
				if err != nil {
					t.Fatal(err)
				}
				for _, applet := range strings.Fields(string(out)) {
					if err := os.Symlink(bin, filepath.Join(h.path, applet)); err != nil {
						t.Fatal(err)
					}
				}
			}
			f(t, h, provider.ExecFS(h))
		})
	}
}

func read(t *testing.T, f provider.FS, name string) []byte {
	t.Helper()
	r, err := f.Open(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	b, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func list(t *testing.T, f provider.FS, dir string) []string {
	t.Helper()
	names := []string{}
	for e, err := range f.ReadDir(t.Context(), dir) {
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, e.Type().String()[:1]+e.Name())
	}
	return names
}

func TestExecFSContent(t *testing.T) {
	shells(t, func(t *testing.T, h *bare, f provider.FS) {
		all := make([]byte, 256)
		for i := range all {
			all[i] = byte(i)
		}
		big := bytes.Repeat(all, 20<<10) // 5 MiB: more than the buffer
		for name, r := range map[string]io.Reader{
			"empty": strings.NewReader(""), "all": bytes.NewReader(all), "nil": nil,
			"big": bytes.NewReader(big), "stream": io.MultiReader(bytes.NewReader(big)),
			"smallstream": iotest.OneByteReader(bytes.NewReader(all)),
		} {
			if err := f.Put(t.Context(), "deep/er/"+name, r, 0o640); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
		}
		for name, want := range map[string][]byte{"empty": {}, "nil": {}, "all": all, "big": big, "stream": big, "smallstream": all} {
			if got := read(t, f, h.root+"/deep/er/"+name); !bytes.Equal(got, want) {
				t.Errorf("%s: %d bytes came back, want %d", name, len(got), len(want))
			}
			fi, err := f.Lstat(t.Context(), "deep/er/"+name)
			if err != nil || fi.Mode() != 0o640 || fi.Size() != int64(len(want)) || fi.ModTime().IsZero() {
				t.Errorf("%s: %v, %v", name, fi, err)
			}
		}
		if got := list(t, f, "deep/er"); len(got) != 6 {
			t.Errorf("temporary files are left: %q", got)
		}
	})
}

func TestExecFSNames(t *testing.T) {
	names := []string{
		" ", " a", "a'b\"c", "a\nb", "a\n", "a\tb", "-rf", "--", "*", "?", "[a]", "~", "$HOME", "`id`", "\\", "\\n",
		"😀", "\xff\xfe", "\xff\n", ".hidden", "..x", "...", strings.Repeat("n", 255), "rx", "bx",
	}
	shells(t, func(t *testing.T, h *bare, f provider.FS) {
		want := []string{}
		for i, n := range names {
			if err := f.Put(t.Context(), "d/"+n, strings.NewReader(n), 0o600); err != nil {
				t.Fatalf("%q: %v", n, err)
			}
			if got := read(t, f, "d/"+n); string(got) != n {
				t.Errorf("%q holds %q", n, got)
			}
			if _, err := f.Lstat(t.Context(), "d/"+n); err != nil {
				t.Error(err)
			}
			if _, err := f.Lstat(t.Context(), "d/"+n+"x"[:min(1, 255-len(n))]); len(n) < 255 && !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("%q: %v", n+"x", err)
			}
			want = append(want, "-"+n)
			l := f.(provider.Linker)
			if err := l.Symlink(t.Context(), n, fmt.Sprintf("l/%d", i)); err == nil {
				t.Error("symlink made a directory")
			}
			if err := f.Mkdir(t.Context(), "l"+n[:min(len(n), 250)]+"/sub"); err != nil {
				t.Error(err)
			}
			if err := l.Symlink(t.Context(), n, fmt.Sprintf("l%s/l", n[:min(len(n), 250)])); err != nil {
				t.Error(err)
			}
			if got, err := l.Readlink(t.Context(), fmt.Sprintf("l%s/l", n[:min(len(n), 250)])); got != n || err != nil {
				t.Errorf("link to %q reads %q, %v", n, got, err)
			}
			if err := f.Rename(t.Context(), "d/"+n, "d/tmp"); err != nil {
				t.Error(err)
			}
			if err := f.Rename(t.Context(), "d/tmp", "d/"+n); err != nil {
				t.Error(err)
			}
		}
		slices.Sort(want)
		if d := cmp.Diff(want, list(t, f, "d")); d != "" {
			t.Error(d)
		}
		for _, n := range names {
			if err := f.Remove(t.Context(), "d/"+n); err != nil {
				t.Error(err)
			}
		}
		if got := list(t, f, "d"); len(got) != 0 {
			t.Errorf("left: %q", got)
		}
	})
}

func TestExecFSErrors(t *testing.T) {
	shells(t, func(t *testing.T, h *bare, f provider.FS) {
		ctx := t.Context()
		must := func(err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}
		must(f.Put(ctx, "file", strings.NewReader("x"), 0o644))
		must(f.Mkdir(ctx, "dir/sub"))
		must(f.Mkdir(ctx, "dir"))
		l := f.(provider.Linker)
		must(l.Symlink(ctx, "nowhere", "dangling"))
		must(l.Symlink(ctx, "loop", "loop"))
		must(l.Symlink(ctx, "dir/../file", "inside"))
		must(syscall.Mkfifo(h.root+"/fifo", 0o600))
		open := func(n string) error {
			r, err := f.Open(ctx, n)
			if err == nil {
				r.Close()
			}
			return err
		}
		dir := func(n string) error {
			for _, err := range f.ReadDir(ctx, n) {
				return err
			}
			return nil
		}
		lstat := func(n string) error { _, err := f.Lstat(ctx, n); return err }
		readlink := func(n string) error { _, err := l.Readlink(ctx, n); return err }
		put := func(n string) error { return f.Put(ctx, n, strings.NewReader("y"), 0o644) }
		for name, c := range map[string]struct {
			err  error
			want error
		}{
			"open missing":             {open("none"), fs.ErrNotExist},
			"open in missing":          {open("none/x"), fs.ErrNotExist},
			"open below file":          {open("file/x"), fs.ErrNotExist},
			"open dangling":            {open("dangling"), fs.ErrNotExist},
			"open loop":                {open("loop"), syscall.ELOOP},
			"open dir":                 {open("dir"), syscall.EISDIR},
			"open fifo":                {open("fifo"), fs.ErrInvalid},
			"open link":                {open("inside"), nil},
			"lstat missing":            {lstat("none"), fs.ErrNotExist},
			"lstat below file":         {lstat("file/x"), fs.ErrNotExist},
			"lstat dangling":           {lstat("dangling"), nil},
			"lstat root":               {lstat("."), nil},
			"lstat flag":               {lstat("-delete"), fs.ErrNotExist},
			"lstat long":               {lstat(strings.Repeat("x", 256)), syscall.ENAMETOOLONG},
			"lstat empty":              {lstat(""), fs.ErrInvalid},
			"lstat nul":                {lstat("a\x00b"), fs.ErrInvalid},
			"readdir missing":          {dir("none"), fs.ErrNotExist},
			"readdir file":             {dir("file"), syscall.ENOTDIR},
			"readlink file":            {readlink("file"), syscall.EINVAL},
			"readlink missing":         {readlink("none"), fs.ErrNotExist},
			"mkdir over file":          {f.Mkdir(ctx, "file"), syscall.ENOTDIR},
			"mkdir below file":         {f.Mkdir(ctx, "file/x"), syscall.ENOTDIR},
			"put over dir":             {put("dir"), syscall.EISDIR},
			"put below file":           {put("file/x"), syscall.ENOTDIR},
			"symlink over file":        {l.Symlink(ctx, "t", "file"), fs.ErrExist},
			"symlink over dir":         {l.Symlink(ctx, "t", "dir"), fs.ErrExist},
			"remove missing":           {f.Remove(ctx, "none/x"), nil},
			"remove below file":        {f.Remove(ctx, "file/x"), nil},
			"remove root":              {f.Remove(ctx, "."), fs.ErrInvalid},
			"rename missing":           {f.Rename(ctx, "none", "x"), fs.ErrNotExist},
			"rename to itself":         {f.Rename(ctx, "file", "./file"), nil},
			"rename file over dir":     {f.Rename(ctx, "file", "dir"), fs.ErrExist},
			"rename into missing":      {f.Rename(ctx, "file", "none/x"), fs.ErrNotExist},
			"rename over nonempty dir": {f.Rename(ctx, "dir/sub", "dir"), fs.ErrExist},
			"dotdot":                   {lstat("../x"), provider.ErrOutsideRoot},
			"dotdot absolute":          {lstat(h.root + "/../x"), provider.ErrOutsideRoot},
			"absolute":                 {open("/etc/passwd"), provider.ErrOutsideRoot},
			"prefix":                   {lstat(h.root + "x"), provider.ErrOutsideRoot},
		} {
			pe := (*fs.PathError)(nil)
			if c.want == nil && c.err != nil || !errors.Is(c.err, c.want) {
				t.Errorf("%s: got %v, want %v", name, c.err, c.want)
			} else if c.want != nil && !errors.As(c.err, &pe) {
				t.Errorf("%s: %T is no PathError", name, c.err)
			}
		}
		if errors.Is(dir("file"), fs.ErrNotExist) || errors.Is(put("file/x"), fs.ErrNotExist) {
			t.Error("something that exists was called missing")
		}
	})
}

// outside makes links that leave the root, and reports whether what they lead to
// was touched.
func outside(t *testing.T, h *bare) (untouched func() error) {
	out := filepath.Join(filepath.Dir(h.root), "out")
	for _, err := range []error{
		os.MkdirAll(out+"/dir", 0o755),
		os.WriteFile(out+"/file", []byte("secret"), 0o644),
		os.Symlink(out, h.root+"/abs"),
		os.Symlink("../out", h.root+"/rel"),
		os.Symlink(out+"/file", h.root+"/fabs"),
		os.Symlink("../out/file", h.root+"/frel"),
		os.Symlink("..", h.root+"/up"),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	return func() error {
		var names []string
		err := filepath.WalkDir(out, func(p string, _ fs.DirEntry, err error) error {
			names = append(names, p[len(out):])
			return err
		})
		b, rerr := os.ReadFile(out + "/file")
		if string(b) != "secret" || !slices.Equal(names, []string{"", "/dir", "/file"}) {
			return fmt.Errorf("outside holds %q, file %q", names, b)
		}
		return errors.Join(err, rerr)
	}
}

func TestExecFSOutside(t *testing.T) {
	shells(t, func(t *testing.T, h *bare, f provider.FS) {
		ctx := t.Context()
		untouched := outside(t, h)
		if err := f.Put(ctx, "mine", strings.NewReader("m"), 0o644); err != nil {
			t.Fatal(err)
		}
		l, a := f.(provider.Linker), f.(provider.Archiver)
		refuse := func(what string, err error) {
			t.Helper()
			if !errors.Is(err, provider.ErrOutsideRoot) {
				t.Errorf("%s: %v", what, err)
			}
		}
		for _, d := range []string{"abs", "rel", "up/out"} {
			_, err := f.Open(ctx, d+"/file")
			refuse("open", err)
			_, err = f.Lstat(ctx, d+"/file")
			refuse("lstat", err)
			for _, err := range f.ReadDir(ctx, d) {
				refuse("readdir", err)
			}
			for _, err := range f.ReadDir(ctx, d+"/dir") {
				refuse("readdir below", err)
			}
			refuse("put", f.Put(ctx, d+"/new", strings.NewReader("x"), 0o644))
			refuse("put deep", f.Put(ctx, d+"/a/b/new", strings.NewReader("x"), 0o644))
			refuse("mkdir", f.Mkdir(ctx, d+"/new"))
			refuse("remove", f.Remove(ctx, d+"/file"))
			refuse("rename from", f.Rename(ctx, d+"/file", "stolen"))
			refuse("rename to", f.Rename(ctx, "mine", d+"/new"))
			refuse("symlink", l.Symlink(ctx, "x", d+"/new"))
			_, err = l.Readlink(ctx, d+"/file")
			refuse("readlink", err)
			refuse("tar out", a.TarOut(ctx, d, io.Discard, provider.TarOptions{}))
			refuse("tar in", a.TarIn(ctx, d, archive(t, "new", "x")))
		}
		for _, n := range []string{"fabs", "frel"} {
			_, err := f.Open(ctx, n)
			refuse("open link", err)
			if err := f.Put(ctx, n, strings.NewReader("y"), 0o644); err != nil {
				t.Error(err) // the link is replaced, not followed
			}
		}
		if err := f.Remove(ctx, "abs"); err != nil {
			t.Error(err)
		}
		if err := f.Put(ctx, "rel", strings.NewReader("y"), 0o644); err != nil {
			t.Error(err)
		}
		if err := untouched(); err != nil {
			t.Error(err)
		}
	})
}

func TestExecFSBrokenReader(t *testing.T) {
	shells(t, func(t *testing.T, h *bare, f provider.FS) {
		boom := errors.New("boom")
		if err := f.Put(t.Context(), "f", strings.NewReader("old"), 0o644); err != nil {
			t.Fatal(err)
		}
		for name, n := range map[string]int{"small": 100, "big": 3 << 20} {
			r := io.MultiReader(bytes.NewReader(make([]byte, n)), iotest.ErrReader(boom))
			if err := f.Put(t.Context(), "f", r, 0o644); !errors.Is(err, boom) {
				t.Errorf("%s: %v", name, err)
			}
			if err := f.(provider.Archiver).TarIn(t.Context(), ".", r); err == nil {
				t.Errorf("%s: tar in succeeded", name)
			}
		}
		if got := read(t, f, "f"); string(got) != "old" {
			t.Errorf("a cut write was put in place: %q", got)
		}
		if got := list(t, f, "."); len(got) != 1 {
			t.Errorf("left: %q", got)
		}
	})
}

func TestExecFSUnreadable(t *testing.T) {
	shells(t, func(t *testing.T, h *bare, f provider.FS) {
		if os.Getuid() == 0 { // permissions don't stop root
			h.cred = &syscall.Credential{Uid: 65534, Gid: 65534}
			if err := os.Chmod(filepath.Dir(filepath.Dir(h.root)), 0o711); err != nil {
				t.Fatal(err)
			}
		}
		for _, d := range []string{"", "/locked", "/hidden", "/readonly"} {
			if err := os.MkdirAll(h.root+d, 0o777); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(h.root+d+"/there", nil, 0); err != nil {
				t.Fatal(err)
			}
		}
		for d, mode := range map[string]fs.FileMode{"/locked": 0, "/hidden": 0o111, "/readonly": 0o555} {
			if err := os.Chmod(h.root+d, mode); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { os.Chmod(h.root+d, 0o755) })
		}
		ctx := t.Context()
		lstat := func(n string) error { _, err := f.Lstat(ctx, n); return err }
		open := func(n string) error { _, err := f.Open(ctx, n); return err }
		dir := func(n string) error {
			for _, err := range f.ReadDir(ctx, n) {
				return err
			}
			return nil
		}
		for name, c := range map[string]struct{ err, want error }{
			"lstat, no way in":      {lstat("locked/there"), fs.ErrPermission},
			"lstat, is it missing?": {lstat("locked/none"), fs.ErrPermission},
			"lstat, no listing":     {lstat("hidden/there"), nil},
			"lstat, missing":        {lstat("hidden/none"), fs.ErrNotExist},
			"open":                  {open("readonly/there"), fs.ErrPermission},
			"readdir":               {dir("hidden"), fs.ErrPermission},
			"put":                   {f.Put(ctx, "readonly/new", strings.NewReader(""), 0o644), fs.ErrPermission},
			"remove":                {f.Remove(ctx, "readonly/there"), fs.ErrPermission},
			"remove, is it missing": {f.Remove(ctx, "locked/none"), fs.ErrPermission},
		} {
			if c.want == nil && c.err != nil || !errors.Is(c.err, c.want) {
				t.Errorf("%s: got %v, want %v", name, c.err, c.want)
			}
		}
	})
}

func TestExecFSOpenEarlyClose(t *testing.T) {
	shells(t, func(t *testing.T, h *bare, f provider.FS) {
		if err := f.Put(t.Context(), "f", bytes.NewReader(make([]byte, 4<<20)), 0o644); err != nil {
			t.Fatal(err)
		}
		r, err := f.Open(t.Context(), "f")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(r, make([]byte, 10)); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(r.Close(), r.Close()); err != nil {
			t.Error(err)
		}
	})
}

func TestOutput(t *testing.T) {
	shells(t, func(t *testing.T, h *bare, _ provider.FS) {
		out, err := provider.Output(t.Context(), h, provider.Cmd{Argv: provider.Shell("echo out; echo why >&2; exit 3")})
		ee := (*provider.ExitError)(nil)
		if string(out) != "out\n" || !errors.As(err, &ee) || ee.Exit.Code != 3 || ee.StderrTail != "why\n" {
			t.Errorf("%q, %v", out, err)
		}
		_, err = provider.Output(t.Context(), h, provider.Cmd{Argv: provider.Shell("while :; do echo 0123456789012345678901234567890123456789; done")})
		if tl := (*provider.TooLargeError)(nil); !errors.As(err, &tl) {
			t.Errorf("endless output: %v", err)
		}
	})
}
