package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/cgi"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/secret"
	"github.com/aisandbox-go/aisandbox/workspace"
)

// git runs git on the host, as a user would.
func git(t *testing.T, dir string, args ...string) string {
	t.Helper()
	cmd := exec.Command("git", args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_NOSYSTEM=1",
		"GIT_AUTHOR_NAME=A", "GIT_AUTHOR_EMAIL=a@example.com", "GIT_COMMITTER_NAME=A", "GIT_COMMITTER_EMAIL=a@example.com")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("git %v: %v\n%s", args, err, out)
	}
	return strings.TrimSpace(string(out))
}

func write(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	for name, text := range files {
		p := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// repo makes a repository with three commits on main, and a branch and a tag.
func repo(t *testing.T) string {
	dir := filepath.Join(t.TempDir(), "repo")
	git(t, "/", "init", "-q", "-b", "main", dir)
	write(t, dir, map[string]string{"a.txt": "one\n", "gone.txt": "bye\n", ".gitignore": ".env\nbuild/\n", "d/x": "x"})
	git(t, dir, "add", "-A")
	git(t, dir, "commit", "-qm", "first")
	git(t, dir, "tag", "v1")
	git(t, dir, "branch", "side")
	write(t, dir, map[string]string{"a.txt": "two\n"})
	git(t, dir, "commit", "-qam", "second")
	write(t, dir, map[string]string{"a.txt": "three\n"})
	git(t, dir, "commit", "-qam", "third")
	return dir
}

// boot ensures a sandbox for a workspace.
func boot(t *testing.T, w workspace.Workspace) (*Sandbox, error) {
	t.Helper()
	x := newFixture(t, func(d *Definition) { d.Workspace = w })
	box, _, err := Ensure(t.Context(), x.deps, x.def, k1)
	if err == nil {
		t.Cleanup(func() { _ = box.Close() })
	} else if x.f.living() != 0 {
		t.Errorf("%d sandboxes live after an error", x.f.living())
	}
	return box, err
}

func sh1(t *testing.T, box *Sandbox, script string) string {
	t.Helper()
	out, err := box.Output(t.Context(), provider.Cmd{Argv: provider.Shell(script)})
	if err != nil {
		t.Fatalf("%s: %v", script, err)
	}
	return strings.TrimSpace(string(out))
}

// tree lists names with their content or link target.
func tree(t *testing.T, dir string) map[string]string {
	t.Helper()
	got := map[string]string{}
	err := filepath.WalkDir(dir, func(p string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			if d != nil && d.Name() == ".git" {
				return filepath.SkipDir
			}
			return err
		}
		rel, _ := filepath.Rel(dir, p)
		if d.Type()&os.ModeSymlink != 0 {
			to, err := os.Readlink(p)
			got[rel] = "-> " + to
			return err
		}
		b, err := os.ReadFile(p)
		got[rel] = string(b)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return got
}

// The agent sees the state of the work tree, no ignored file, no configuration,
// no hook; the host's directory stays as it was.
func TestLocalWorkTree(t *testing.T) {
	dir := repo(t)
	git(t, dir, "remote", "add", "origin", "https://user:tok-very-secret@example.com/o/r.git")
	git(t, dir, "config", "user.name", "Host Person")
	git(t, dir, "config", "core.fsmonitor", "touch "+dir+"/pwned")
	git(t, dir, "config", "filter.evil.clean", "touch "+dir+"/pwned; cat")
	write(t, dir, map[string]string{
		".env": "SECRET=1", "build/out": "x", "a.txt": "mine\n", "new file\nname": "new", "d/staged": "s", ".git/hooks/post-checkout": "#!/bin/sh\ntouch " + dir + "/pwned\n",
		".gitattributes": "* filter=evil\n",
	})
	git(t, dir, "-c", "core.fsmonitor=false", "-c", "filter.evil.clean=cat", "add", "d/staged")
	for _, err := range []error{os.Remove(filepath.Join(dir, "gone.txt")), os.Symlink("/etc/passwd", filepath.Join(dir, "out")), os.Symlink("a.txt", filepath.Join(dir, "in"))} {
		if err != nil {
			t.Fatal(err)
		}
	}
	git(t, dir, "-c", "core.fsmonitor=false", "-c", "filter.evil.clean=cat", "stash", "list")
	_ = os.Remove(filepath.Join(dir, "pwned"))
	want := tree(t, dir)
	delete(want, ".env")
	delete(want, "build/out")
	index, _ := os.ReadFile(filepath.Join(dir, ".git/index"))

	box, err := boot(t, workspace.Workspace{Source: workspace.Local{Path: filepath.Join(dir, "d")}})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, tree(t, box.RealRoot())); diff != "" {
		t.Error("tree:", diff)
	}
	status := strings.Split(sh1(t, box, "git -c core.quotepath=on status --porcelain"), "\n")
	slices.Sort(status)
	if diff := cmp.Diff([]string{` D gone.txt`, "?? \"new file\\nname\"", "?? .gitattributes", "?? d/staged", "?? in", "?? out", "M a.txt"}, status); diff != "" {
		t.Error("status:", diff)
	}
	if b := sh1(t, box, "git rev-parse --abbrev-ref HEAD; git log --format=%s"); b != "main\nthird\nsecond\nfirst" {
		t.Error("history:", b)
	}
	if u := sh1(t, box, "git remote get-url origin"); u != "https://example.com/o/r.git" {
		t.Error("origin:", u)
	}
	all := sh1(t, box, "cat .git/config; ls .git/hooks .git/logs 2>/dev/null; find . -name '*' -type f | xargs grep -l 'tok-very-secret' || :")
	for _, bad := range []string{"Host Person", "fsmonitor", "evil", "tok-very", "post-checkout", dir} {
		if strings.Contains(all, bad) {
			t.Errorf("%q came along: %s", bad, all)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "pwned")); err == nil {
		t.Error("a program of the repository ran on the host")
	}
	if now, _ := os.ReadFile(filepath.Join(dir, ".git/index")); string(now) != string(index) {
		t.Error("the host's index changed")
	}
}

func TestLocalKinds(t *testing.T) {
	dir := repo(t)
	worktree := filepath.Join(t.TempDir(), "wt")
	git(t, dir, "worktree", "add", "-q", "-b", "wt", worktree, "v1")
	shallow := filepath.Join(t.TempDir(), "shallow")
	git(t, "/", "clone", "-q", "--depth", "1", "file://"+dir, shallow)
	detached := filepath.Join(t.TempDir(), "detached")
	git(t, "/", "clone", "-q", dir, detached)
	git(t, detached, "checkout", "-q", "--detach", "v1")
	bare := filepath.Join(t.TempDir(), "bare.git")
	git(t, "/", "clone", "-q", "--bare", dir, bare)
	empty := t.TempDir()
	git(t, empty, "init", "-q")
	write(t, empty, map[string]string{"f": "1"})
	plain := t.TempDir()
	write(t, plain, map[string]string{"x/.env": "kept", "y": "2"})
	if out, err := exec.Command("mkfifo", plain+"/pipe").CombinedOutput(); err != nil {
		t.Fatal(err, string(out))
	}
	write(t, dir, map[string]string{"a.txt": "dirty\n"})
	sha := git(t, dir, "rev-parse", "v1")
	for name, c := range map[string]struct {
		src   workspace.Source
		check string
		want  string
	}{
		"linked work tree": {workspace.Local{Path: worktree}, "git rev-parse --abbrev-ref HEAD; cat a.txt; test -d .git", "wt\none"},
		"shallow":          {workspace.Local{Path: shallow}, "git log --format=%s; cat a.txt", "third\nthree"},
		"detached":         {workspace.Local{Path: detached}, "git rev-parse HEAD; cat a.txt", sha + "\none"},
		"no commit":        {workspace.Local{Path: empty}, "cat f; git status --porcelain", "1?? f"},
		"plain":            {workspace.Local{Path: plain}, "cat x/.env y; test ! -e pipe", "kept2"},
		"branch":           {workspace.Local{Path: dir, Ref: "side"}, "git rev-parse --abbrev-ref HEAD; cat a.txt; git status --porcelain", "side\none"},
		"commit":           {workspace.Local{Path: dir, Ref: sha}, "git rev-parse HEAD; cat a.txt; git status --porcelain", sha + "\none"},
		"path as URL":      {workspace.Git{URL: dir}, "git log --format=%s; cat a.txt; git status --porcelain", "third\nthree"},
		"file URL, depth":  {workspace.Git{URL: "file://" + bare, Depth: workspace.Commits(2)}, "git log --format=%s; cat a.txt", "third\nsecond\nthree"},
		"path, tag":        {workspace.Git{URL: bare, Ref: "v1", Depth: workspace.Full}, "git log --format=%s; cat a.txt", "first\none"},
		"path, commit":     {workspace.Git{URL: bare, Ref: sha}, "git rev-parse HEAD; cat a.txt; git status --porcelain", sha + "\none"},
	} {
		t.Run(name, func(t *testing.T) {
			box, err := boot(t, workspace.Workspace{Source: c.src})
			if err != nil {
				t.Fatal(err)
			}
			if got := sh1(t, box, c.check); got != c.want {
				t.Errorf("%q, want %q", got, c.want)
			}
		})
	}
	for name, src := range map[string]workspace.Source{
		"source.ref":  workspace.Local{Path: dir, Ref: "nope"},
		"source.url":  workspace.Git{URL: "/does/not/exist"},
		"source.path": workspace.Local{Path: dir + "/a.txt"},
	} {
		_, err := boot(t, workspace.Workspace{Source: src})
		var fe *workspace.FieldError
		if !errors.As(err, &fe) || fe.Field != name {
			t.Errorf("%s: %v", name, err)
		}
	}
	if left, _ := filepath.Glob(os.TempDir() + "/aisandbox-source-*"); len(left) > 0 {
		t.Errorf("left behind: %q", left)
	}
}

// gitServer serves repositories below root over HTTP with basic authentication.
func gitServer(t *testing.T, root, user, token string) string {
	t.Helper()
	execPath := git(t, "/", "--exec-path")
	backend := filepath.Join(execPath, "git-http-backend")
	if _, err := os.Stat(backend); err != nil {
		needed(t, "git http-backend is not installed")
	}
	h := &cgi.Handler{Path: backend, Env: []string{"GIT_PROJECT_ROOT=" + root, "GIT_HTTP_EXPORT_ALL=1", "GIT_CONFIG_COUNT=2",
		"GIT_CONFIG_KEY_0=safe.directory", "GIT_CONFIG_VALUE_0=*", "GIT_CONFIG_KEY_1=http.receivepack", "GIT_CONFIG_VALUE_1=true"}, Stderr: io.Discard}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if u, p, _ := r.BasicAuth(); token != "" && (u != user || p != token) {
			w.Header().Set("WWW-Authenticate", `Basic realm="git"`)
			http.Error(w, "no", http.StatusUnauthorized)
			return
		}
		h.ServeHTTP(w, r)
	}))
	t.Cleanup(s.Close)
	return s.URL
}

func TestCloneWithToken(t *testing.T) {
	dir := repo(t)
	root := filepath.Dir(dir)
	sha := git(t, dir, "rev-parse", "v1")
	const token = "tok-very-secret/+="
	set, err := secret.NewSet(map[string]string{"GIT_TOKEN": token})
	if err != nil {
		t.Fatal(err)
	}
	auth := workspace.Auth{Token: set.Ref("GIT_TOKEN")}
	url := gitServer(t, root, "x-access-token", token) + "/repo/.git"
	for name, c := range map[string]struct {
		src  workspace.Git
		want string
	}{
		"default": {workspace.Git{URL: url, Auth: auth}, "three\nthird"},
		"depth":   {workspace.Git{URL: url, Auth: auth, Depth: workspace.Commits(2)}, "three\nthird\nsecond"},
		"full":    {workspace.Git{URL: url, Auth: auth, Depth: workspace.Full}, "three\nthird\nsecond\nfirst"},
		"tag":     {workspace.Git{URL: url, Auth: auth, Ref: "v1"}, "one\nfirst"},
		"commit":  {workspace.Git{URL: url, Auth: auth, Ref: sha}, "one\nfirst"},
	} {
		t.Run(name, func(t *testing.T) {
			var argv []string
			x := newFixture(t, func(d *Definition) { d.Workspace = workspace.Workspace{Source: c.src, Secrets: set} })
			x.f.start = func(cmd provider.Cmd) error { argv = append(argv, cmd.Argv...); return nil }
			box, _, err := Ensure(t.Context(), x.deps, x.def, k1)
			if err != nil {
				t.Fatal(err)
			}
			defer box.Close()
			if got := sh1(t, box, "cat a.txt; git log --format=%s"); got != c.want {
				t.Errorf("%q, want %q", got, c.want)
			}
			if s := strings.Join(argv, "\n"); strings.Contains(s, token) {
				t.Error("the token is in an argument")
			}
			if s := sh1(t, box, "cat .git/config; git remote -v; grep -rl tok-very . || :"); strings.Contains(s, "tok-very") || strings.Contains(s, "credential") {
				t.Error("the token stays:", s)
			}
			if c.want == "three\nthird" {
				sh1(t, box, "git config user.email a@b; git config user.name n; git checkout -qb work; echo more >> a.txt; git config push.autoSetupRemote true")
				g := box.Git("")
				for _, err := range []error{g.Add(t.Context(), "a.txt"), g.Commit(t.Context(), "it's done"), g.Push(t.Context(), auth)} {
					if err != nil {
						t.Fatal(err)
					}
				}
				if got := git(t, dir, "log", "-1", "--format=%s", "work"); got != "it's done" {
					t.Errorf("pushed %q", got)
				}
				if b, err := g.Branch(t.Context()); b != "work" || err != nil {
					t.Error(b, err)
				}
			}
		})
	}
	bad, _ := secret.NewSet(map[string]string{"GIT_TOKEN": "another-secret"})
	for name, c := range map[string]struct {
		src workspace.Git
		set *secret.Set
	}{
		"wrong token": {workspace.Git{URL: url, Auth: workspace.Auth{Token: bad.Ref("GIT_TOKEN")}}, bad},
		"no token":    {workspace.Git{URL: url}, nil},
		"no ref":      {workspace.Git{URL: url, Auth: auth, Ref: "nope"}, set},
		"no repo":     {workspace.Git{URL: strings.Replace(url, "/repo/", "/tok-very-secret/+=/", 1), Auth: auth}, set},
		"no commit":   {workspace.Git{URL: url, Auth: auth, Ref: strings.Repeat("1", 40)}, set},
	} {
		_, err := boot(t, workspace.Workspace{Source: c.src, Secrets: c.set, Setup: workspace.Steps(workspace.Serial("touch never"))})
		var ee *provider.ExitError
		if !errors.As(err, &ee) || ee.StderrTail == "" || strings.Contains(fmt.Sprintf("%v %+v %#v", err, err, ee), token) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestGitRefusesOptions(t *testing.T) {
	x := newFixture(t, nil)
	box, _, err := Ensure(t.Context(), x.deps, x.def, k1)
	if err != nil {
		t.Fatal(err)
	}
	defer box.Close()
	n := 0
	x.f.start = func(provider.Cmd) error { n++; return nil }
	for name, err := range map[string]error{
		"url":   box.Git("").Clone(t.Context(), workspace.Git{URL: "--upload-pack=x"}),
		"ref":   box.Git("").Clone(t.Context(), workspace.Git{URL: "https://x/y", Ref: "-b"}),
		"dir":   box.Git("-C/evil").Clone(t.Context(), workspace.Git{URL: "https://x/y"}),
		"path":  box.Git("").Add(t.Context(), "--output=/etc/x"),
		"depth": box.Git("").Clone(t.Context(), workspace.Git{URL: "https://x/y", Depth: workspace.Commits(0)}),
		"minus": box.Git("").Clone(t.Context(), workspace.Git{URL: "https://x/y", Depth: "-1"}),
	} {
		if !errors.Is(err, workspace.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if n != 0 {
		t.Errorf("%d commands ran", n)
	}
}

func TestCloneWithoutGit(t *testing.T) {
	x := newFixture(t, func(d *Definition) {
		d.Workspace.Source = workspace.Git{URL: "https://example.invalid/r.git"}
		d.Workspace.Env = map[string]string{"PATH": noGit(t)}
	})
	_, _, err := Ensure(t.Context(), x.deps, x.def, k1)
	if !errors.Is(err, ErrNoGit) || x.f.living() != 0 {
		t.Errorf("err = %v", err)
	}
	// A local source needs git on the host only.
	box, err := boot(t, workspace.Workspace{Source: workspace.Local{Path: repo(t)}, Env: map[string]string{"PATH": noGit(t)}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(box.RealRoot() + "/.git/HEAD"); err != nil {
		t.Error(err)
	}
}

// noGit is a PATH with everything that is needed but git.
func noGit(t *testing.T) string {
	dir := t.TempDir()
	for _, d := range filepath.SplitList(os.Getenv("PATH")) {
		es, _ := os.ReadDir(d)
		for _, e := range es {
			if !strings.HasPrefix(e.Name(), "git") {
				_ = os.Symlink(filepath.Join(d, e.Name()), filepath.Join(dir, e.Name()))
			}
		}
	}
	return dir
}

// What the repository brings stays; what we add is hidden from git.
func TestRepositoryFilesAreKept(t *testing.T) {
	for name, own := range map[string][]string{"none": nil, "claude": {"CLAUDE.md"}, "both": {"AGENTS.md", "CLAUDE.md"}} {
		t.Run(name, func(t *testing.T) {
			dir := repo(t)
			for _, f := range own {
				write(t, dir, map[string]string{f: "theirs " + f})
			}
			git(t, dir, "add", "-A")
			git(t, dir, "commit", "-qm", "own", "--allow-empty")
			x := newFixture(t, func(d *Definition) {
				d.Workspace = workspace.Workspace{
					Source: workspace.Local{Path: dir}, Instructions: "ours",
					Skills: []workspace.Skill{workspace.FileSkill("notes/[a] *.md", "n")},
				}
			})
			box, _, err := Ensure(t.Context(), x.deps, x.def, k1)
			if err != nil {
				t.Fatal(err)
			}
			defer box.Close()
			prompt, err := x.def.PromptInstructions(t.Context(), box)
			if want := (len(own) > 0); err != nil || (prompt == "ours") != want || (prompt == "") == want {
				t.Errorf("prompt %q, %v", prompt, err)
			}
			for _, f := range []string{"AGENTS.md", "CLAUDE.md"} {
				want := "ours"
				switch {
				case slices.Contains(own, f):
					want = "theirs " + f
				case slices.Contains(own, "AGENTS.md"):
					continue
				}
				if b, err := box.ReadFile(t.Context(), f); f == "AGENTS.md" && (err != nil || string(b) != want) {
					t.Errorf("%s = %q, %v", f, b, err)
				}
				if got := sh1(t, box, "cat "+f); got != want {
					t.Errorf("%s = %q, want %q", f, got, want)
				}
			}
			if s := sh1(t, box, "git status --porcelain"); s != "" {
				t.Errorf("status %q", s)
			}
		})
	}
}

func TestCustomRoot(t *testing.T) {
	for root, at := range map[string]string{"/repo": "", "/workspace/app": "app"} {
		box, err := boot(t, workspace.Workspace{Source: workspace.Local{Path: repo(t)}, Root: root, Setup: workspace.Steps(workspace.Serial("test -f a.txt"))})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(filepath.Join(box.Handle().Root(), at, "a.txt")); err != nil {
			t.Error(err)
		}
		if b, err := box.ReadFile(t.Context(), root+"/a.txt"); err != nil || string(b) != "three\n" {
			t.Errorf("%q %v", b, err)
		}
		if v := box.Virtual(box.RealRoot() + "/a.txt"); v != root+"/a.txt" {
			t.Errorf("virtual %q", v)
		}
	}
}

func TestPaths(t *testing.T) {
	box := realBox(t, nil, nil)
	base := box.RealRoot()
	for _, c := range []struct{ in, want string }{
		{"", base}, {"a/../b", base + "/b"}, {"/workspace", base}, {"/workspace/x//y/", base + "/x/y"}, {base + "/z", base + "/z"},
		{"..", ""}, {"a/../../b", ""}, {"/workspace/../x", ""}, {"/workspace/../etc/passwd", ""}, {"/etc/passwd", ""}, {"a\x00b", ""}, {"/workspacex", ""},
	} {
		got, err := box.Real(c.in)
		var pe *PathError
		if c.want == "" && !errors.As(err, &pe) || c.want != "" && (err != nil || got != c.want) {
			t.Errorf("Real(%q) = %q, %v, want %q", c.in, got, err, c.want)
		}
	}
	ctx := context.Background()
	if _, err := box.Run(ctx, provider.Cmd{Argv: []string{"true"}, Dir: "/workspace/../x"}); err == nil {
		t.Error("a directory outside was accepted")
	}
	if res, err := box.Run(ctx, provider.Cmd{Argv: []string{"pwd"}, Dir: "/"}); err != nil || string(res.Stdout) != "/\n" {
		t.Error(res, err)
	}
}
