package workspace

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/aisandbox-go/aisandbox/secret"
)

func set(t *testing.T, vals map[string]string) *secret.Set {
	t.Helper()
	s, err := secret.NewSet(vals)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestExpandRepo(t *testing.T) {
	for in, want := range map[string]string{
		"owner/app":         "https://github.com/owner/app.git",
		"owner/app.git":     "https://github.com/owner/app.git",
		"httpie/cli":        "https://github.com/httpie/cli.git",
		"http-party/x":      "https://github.com/http-party/x.git",
		"https://h/o/r":     "https://h/o/r",
		"git@h:o/r.git":     "git@h:o/r.git",
		"ssh://git@h/o/r":   "ssh://git@h/o/r",
		"file:///srv/r.git": "file:///srv/r.git",
		"./dir":             "./dir",
		"/abs/dir":          "/abs/dir",
		"a/b/c":             "a/b/c",
		"justname":          "justname",
		"-x/y":              "https://github.com/-x/y.git",
	} {
		if got := ExpandRepo(in); got != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
}

func TestHostPath(t *testing.T) {
	for in, want := range map[string]string{"file:///a/b": "/a/b", "file://localhost/a": "/a", "/a": "/a", "./a": "./a", "../a": "../a", ".": "."} {
		if got, ok := (Git{URL: in}).HostPath(); !ok || got != want {
			t.Errorf("%q: %q, %v", in, got, ok)
		}
	}
	for _, in := range []string{"https://h/r", "git@h:r", "a/b", "ssh://h/r"} {
		if _, ok := (Git{URL: in}).HostPath(); ok {
			t.Errorf("%q is a path of the host", in)
		}
	}
}

func TestValidate(t *testing.T) {
	secrets := set(t, map[string]string{"TOK": "tok-very-secret"})
	foreign := set(t, map[string]string{"TOK": "tok-very-secret"})
	git := func(g Git) Workspace { return Workspace{Source: g, Secrets: secrets} }
	files := func(fs ...Skill) Workspace { return Workspace{Skills: fs} }
	const url = "https://example.com/o/r.git"
	for name, c := range map[string]struct {
		w     Workspace
		field string // empty: valid
	}{
		"zero":            {Workspace{}, ""},
		"git":             {git(Git{URL: url, Ref: "feature/x", Depth: Full, Auth: Auth{"me", secrets.Ref("TOK")}}), ""},
		"ssh":             {git(Git{URL: "git@example.com:o/r.git"}), ""},
		"ssh user":        {git(Git{URL: "ssh://git@example.com/o/r.git"}), ""},
		"path":            {git(Git{URL: "./r"}), ""},
		"no url":          {git(Git{}), "source.url"},
		"option url":      {git(Git{URL: "--upload-pack=x"}), "source.url"},
		"short url":       {git(Git{URL: "owner/app"}), "source.url"},
		"helper url":      {git(Git{URL: "ext::sh -c evil"}), "source.url"},
		"odd scheme":      {git(Git{URL: "evil://x/y"}), "source.url"},
		"line break":      {git(Git{URL: "https://example.com/a\nb"}), "source.url"},
		"password":        {git(Git{URL: "https://u:tok-very-secret@example.com/r"}), "source.url"},
		"user token":      {git(Git{URL: "https://tok-very-secret@example.com/r"}), "source.url"},
		"option ref":      {git(Git{URL: url, Ref: "--output=x"}), "source.ref"},
		"ref range":       {git(Git{URL: url, Ref: "a..b"}), "source.ref"},
		"depth 0":         {git(Git{URL: url, Depth: Commits(0)}), "source.depth"},
		"depth -1":        {git(Git{URL: url, Depth: Commits(-1)}), "source.depth"},
		"depth 1.5":       {git(Git{URL: url, Depth: "1.5"}), "source.depth"},
		"depth word":      {git(Git{URL: url, Depth: "all"}), "source.depth"},
		"plain token":     {git(Git{URL: url, Auth: Auth{Token: secret.Plain("tok-very-secret")}}), "source.auth.token"},
		"unknown token":   {git(Git{URL: url, Auth: Auth{Token: secrets.Ref("NONE")}}), "source.auth.token"},
		"foreign token":   {git(Git{URL: url, Auth: Auth{Token: foreign.Ref("TOK")}}), "source.auth.token"},
		"no secrets":      {Workspace{Source: Git{URL: url, Auth: Auth{Token: secrets.Ref("TOK")}}}, "source.auth.token"},
		"local":           {Workspace{Source: Local{Path: "."}}, ""},
		"local empty":     {Workspace{Source: Local{}}, "source.path"},
		"local ref":       {Workspace{Source: Local{Path: ".", Ref: "-x"}}, "source.ref"},
		"pointer":         {Workspace{Source: &Local{Path: "."}}, "source"},
		"root":            {Workspace{Root: "/repo"}, ""},
		"root relative":   {Workspace{Root: "repo"}, "root"},
		"root slash":      {Workspace{Root: "//"}, "root"},
		"root dots":       {Workspace{Root: "/workspace/../etc"}, "root"},
		"step empty":      {Workspace{Setup: Steps(Serial("a", " "))}, "setup[0][1]"},
		"step NUL":        {Workspace{Setup: Steps(Serial("a"), Parallel("b\x00"))}, "setup[1][0]"},
		"script":          {Workspace{Scripts: map[string]string{"a\nb": "x"}}, "scripts"},
		"script command":  {Workspace{Scripts: map[string]string{"a": "x\ny"}}, "scripts.a"},
		"env":             {Workspace{Env: map[string]string{"A=B": "x"}}, "env"},
		"env and secret":  {Workspace{Env: map[string]string{"TOK": "x"}, Secrets: secrets}, "env.TOK"},
		"manager":         {Workspace{PackageManager: "cargo"}, "packageManager"},
		"file":            {files(FileSkill("a/b c.md", "x"), FileSkill(".github/x", "y")), ""},
		"file up":         {files(FileSkill("../x", "")), "skills[0].path"},
		"file inside up":  {files(FileSkill("a/../../x", "")), "skills[0].path"},
		"file abs":        {files(FileSkill("/etc/passwd", "")), "skills[0].path"},
		"file dir":        {files(FileSkill("a/", "")), "skills[0].path"},
		"file git":        {files(FileSkill(".git/hooks/x", "")), "skills[0].path"},
		"file Git":        {files(FileSkill("./.GIT/config", "")), "skills[0].path"},
		"file twice":      {files(FileSkill("a", ""), FileSkill("./a", "")), "skills[1].path"},
		"file in file":    {files(FileSkill("a", ""), FileSkill("a/b", "")), "skills[1].path"},
		"file line break": {files(FileSkill("a\nb", "")), "skills[0].path"},
		"nil skill":       {files(nil), "skills[0]"},
		"agents":          {files(FileSkill("AGENTS.md", "x")), ""},
		"claude alone":    {files(FileSkill("CLAUDE.md", "x")), ""},
		"claude and text": {Workspace{Instructions: "x", Skills: []Skill{FileSkill("CLAUDE.md", "x")}}, "skills[0].path"},
		"claude, agents":  {files(FileSkill("CLAUDE.md", "x"), FileSkill("AGENTS.md", "x")), "skills[0].path"},
		"gemini, scripts": {Workspace{Scripts: map[string]string{"a": "b"}, Skills: []Skill{FileSkill("GEMINI.md", "x")}}, "skills[0].path"},
	} {
		err := c.w.Validate()
		var fe *FieldError
		switch {
		case c.field == "" && err != nil:
			t.Errorf("%s: %v", name, err)
		case c.field != "" && (!errors.As(err, &fe) || fe.Field != c.field || fe.Cure == "" || !errors.Is(err, ErrInvalid)):
			t.Errorf("%s: %v, want a fault of %s", name, err, c.field)
		}
		if err != nil && strings.Contains(err.Error(), "tok-very-secret") {
			t.Errorf("%s shows a secret: %v", name, err)
		}
	}
	err := Workspace{Root: "x", PackageManager: "y"}.Validate()
	if n := strings.Count(err.Error(), "workspace: "); n != 2 {
		t.Errorf("%d faults in %v", n, err)
	}
}

func TestHash(t *testing.T) {
	a := set(t, map[string]string{"TOK": "one"})
	b := set(t, map[string]string{"TOK": "two", "MORE": "x"})
	base := func() Workspace {
		return Workspace{
			Source: Git{URL: "https://github.com/o/r.git", Ref: "main", Auth: Auth{Token: a.Ref("TOK")}},
			Setup:  Steps(Serial("a", "b"), Parallel("c", "d")), Scripts: map[string]string{"t": "pnpm test"}, Secrets: a,
			Skills: []Skill{FileSkill("x", "y")}, Instructions: "i", Env: map[string]string{"K": "V"},
		}
	}
	want := base().Hash()
	for name, change := range map[string]func(*Workspace){
		"secret": func(w *Workspace) { w.Secrets = b },
		"token": func(w *Workspace) {
			w.Source = Git{URL: "https://github.com/o/r.git", Ref: "main", Auth: Auth{Token: b.Ref("TOK")}}
		},
		"GitHub":         func(w *Workspace) { g := GitHub("o/r"); g.Ref = "main"; w.Source = g },
		"depth spelled":  func(w *Workspace) { g := GitHub("o/r"); g.Ref, g.Depth = "main", Commits(1); w.Source = g },
		"list of groups": func(w *Workspace) { w.Setup = Steps(Serial("a"), Serial("b"), Serial(), Parallel("c", "d")) },
		"root spelled":   func(w *Workspace) { w.Root = "/workspace/" },
		"auto":           func(w *Workspace) { w.PackageManager = Auto },
	} {
		w := base()
		if change(&w); w.Hash() != want {
			t.Errorf("%s changes the hash", name)
		}
	}
	seen := map[string]string{want: "base"}
	for name, change := range map[string]func(*Workspace){
		"ref":      func(w *Workspace) { g := GitHub("o/r"); g.Ref = "dev"; w.Source = g },
		"depth":    func(w *Workspace) { g := GitHub("o/r"); g.Ref, g.Depth = "main", Full; w.Source = g },
		"local":    func(w *Workspace) { w.Source = Local{Path: "/x"} },
		"none":     func(w *Workspace) { w.Source = None{} },
		"step":     func(w *Workspace) { w.Setup = Steps(Serial("a", "x"), Parallel("c", "d")) },
		"parallel": func(w *Workspace) { w.Setup = Steps(Serial("a", "b"), Serial("c", "d")) },
		"split":    func(w *Workspace) { w.Setup = Steps(Serial("a", "b"), Parallel("c"), Parallel("d")) },
		"joined":   func(w *Workspace) { w.Setup = Steps(Serial("a\nb"), Parallel("c", "d")) },
		"scripts":  func(w *Workspace) { w.Scripts = map[string]string{"t": "npm test"} },
		"moved": func(w *Workspace) {
			w.Scripts, w.Env = map[string]string{"K": "V"}, map[string]string{"t": "pnpm test"}
		},
		"skill":   func(w *Workspace) { w.Skills = []Skill{FileSkill("xy", "")} },
		"text":    func(w *Workspace) { w.Instructions = "I" },
		"root":    func(w *Workspace) { w.Root = "/repo" },
		"manager": func(w *Workspace) { w.PackageManager = NPM },
	} {
		w := base()
		change(&w)
		h := w.Hash()
		if other, ok := seen[h]; ok {
			t.Errorf("%s and %s have the same hash", name, other)
		}
		seen[h] = name
	}
	if (Workspace{}).Hash() != (Workspace{Source: None{}, Setup: Plan{}, Scripts: map[string]string{}}).Hash() {
		t.Error("absent and empty differ")
	}
	// The encoding is written down: a change of it makes every sandbox anew, and must
	// come with another version.
	if got := base().Hash(); got != "a758167cb0cb516a6ef1573791a5b0315a53174ab21906930b6218bbf4dcf4c2" {
		t.Error("the encoding changed:", got)
	}
}

func TestAgentsText(t *testing.T) {
	scripts := map[string]string{"test": "pnpm test", "build": "pnpm build"}
	section := "## Workspace scripts\n\n- build → pnpm build\n- test → pnpm test"
	agents := []Skill{FileSkill("x", "y"), FileSkill("AGENTS.md", "from file")}
	for name, c := range map[string]struct {
		w    Workspace
		want string
	}{
		"nothing": {Workspace{Skills: agents[:1]}, ""},
		"text":    {Workspace{Instructions: "A\n"}, "A\n"},
		"file":    {Workspace{Skills: agents}, "from file"},
		"both":    {Workspace{Instructions: "A", Skills: agents}, "A"},
		"scripts": {Workspace{Scripts: scripts}, section},
		"merged":  {Workspace{Instructions: "A \n\n", Scripts: scripts}, "A\n\n" + section},
	} {
		if diff := cmp.Diff(c.want, c.w.AgentsText()); diff != "" {
			t.Error(name, diff)
		}
		for _, f := range c.w.Files() {
			if f.Path == AgentsFile {
				t.Errorf("%s: AGENTS.md would be written twice", name)
			}
		}
	}
}

func TestDetectPackageManager(t *testing.T) {
	for _, c := range []struct {
		w     Workspace
		files string
		want  PackageManager
	}{
		{Workspace{}, "pnpm-lock.yaml yarn.lock bun.lockb package-lock.json", PNPM},
		{Workspace{PackageManager: Auto}, "yarn.lock bun.lockb package-lock.json", Yarn},
		{Workspace{}, "bun.lockb package-lock.json", Bun},
		{Workspace{}, "bun.lock package-lock.json", Bun},
		{Workspace{}, "package-lock.json", NPM},
		{Workspace{}, "npm-shrinkwrap.json", NPM},
		{Workspace{}, "go.mod", ""},
		{Workspace{PackageManager: NPM}, "pnpm-lock.yaml", NPM},
	} {
		got, err := c.w.DetectPackageManager(func(name string) (bool, error) {
			for f := range strings.FieldsSeq(c.files) {
				if f == name {
					return true, nil
				}
			}
			return false, nil
		})
		if got != c.want || err != nil {
			t.Errorf("%s: %q, %v, want %q", c.files, got, err, c.want)
		}
	}
	fail := errors.New("no answer")
	if _, err := (Workspace{}).DetectPackageManager(func(string) (bool, error) { return false, fail }); !errors.Is(err, fail) {
		t.Error(err)
	}
}

func TestStepError(t *testing.T) {
	cause := errors.New("timed out")
	for want, e := range map[string]*StepError{
		"setup step failed: bad-cmd (exit 7)":          {Step: "bad-cmd", ExitCode: 7},
		"setup step failed: bad-cmd (exit 7)\nwhy":     {Step: "bad-cmd", ExitCode: 7, Tail: "why\n"},
		"setup step failed: bad-cmd: timed out\nwhere": {Step: "bad-cmd", Tail: "where", Err: cause},
	} {
		if e.Error() != want {
			t.Errorf("%q, want %q", e.Error(), want)
		}
	}
}
