package workspace

import (
	"errors"
	"fmt"
	"net/url"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/aisandbox-go/aisandbox/secret"
)

// MaxFile is the largest content of a file skill, and of the instructions.
const MaxFile = 4 << 20

// Validate returns every fault of w, joined; each is a [*FieldError].
func (w Workspace) Validate() error {
	v := &validator{}
	v.source(w)
	v.root(w.Root)
	v.plan(w.Setup)
	v.scripts(w.Scripts)
	v.env(w)
	v.skills(w)
	switch w.PackageManager {
	case "", Auto, NPM, PNPM, Yarn, Bun:
	default:
		v.fail("packageManager", string(w.PackageManager), "use auto, npm, pnpm, yarn or bun")
	}
	return errors.Join(v.errs...)
}

// schemes are what git clones from without running a program named by the URL.
var schemes = []string{"https", "http", "ssh", "git+ssh", "git", "file"}

type validator struct{ errs []error }

func (v *validator) fail(field, value, cure string) {
	if len(value) > 200 {
		value = value[:200] + "…"
	}
	v.errs = append(v.errs, &FieldError{field, value, cure})
}

// arg checks a value that becomes an argument of git.
func (v *validator) arg(field, value string) bool {
	if cure := ArgFault(value); cure != "" {
		v.fail(field, value, cure)
		return false
	}
	return true
}

// ArgFault says why value can't be a positional argument of a command, and the
// cure; empty when it can. What begins with - would be read as an option.
func ArgFault(value string) string {
	switch {
	case strings.HasPrefix(value, "-"):
		return "must not begin with -; it would be read as an option"
	case strings.ContainsAny(value, "\x00\n\r"):
		return "must not hold a line break or NUL"
	}
	return ""
}

func (v *validator) source(w Workspace) {
	switch s := w.Source.(type) {
	case nil, None:
	case Git:
		v.git(s, w.Secrets)
	case Local:
		switch {
		case s.Path == "":
			v.fail("source.path", "", "name a directory of this host")
		case strings.ContainsAny(s.Path, "\x00\n"):
			v.fail("source.path", s.Path, "must not hold a line break or NUL")
		}
		v.ref(s.Ref)
	default:
		v.fail("source", fmt.Sprintf("%T", s), "use Git, Local or None, as values")
	}
}

func (v *validator) ref(ref string) {
	if ref == "" {
		return
	}
	if v.arg("source.ref", ref) && (strings.ContainsAny(ref, " ~^:?*[\\\x7f") || strings.Contains(ref, "..") || strings.HasSuffix(ref, ".lock") || strings.HasSuffix(ref, "/")) {
		v.fail("source.ref", ref, "use the name of a branch or tag, or a commit")
	}
}

func (v *validator) git(g Git, secrets *secret.Set) {
	shown := g.URL
	if u, err := url.Parse(g.URL); err == nil && hasScheme(g.URL) {
		if _, pw := u.User.Password(); pw || u.User.Username() != "" && strings.HasPrefix(u.Scheme, "http") {
			u.User = url.User("...")
			v.fail("source.url", u.String(), "must not hold credentials; put them in auth, as a secret")
			shown = ""
		}
	}
	switch _, host := g.HostPath(); {
	case g.URL == "":
		v.fail("source.url", "", "name a repository: a URL, user@host:path, or a path")
	case shown == "":
	case !v.arg("source.url", g.URL):
	case !host && !hasScheme(g.URL) && !scpLike(g.URL):
		v.fail("source.url", g.URL, "is neither a URL nor a path; for owner/name on GitHub use GitHub(\"owner/name\"), for a directory begin with ./ or /")
	case hasScheme(g.URL) && !slices.Contains(schemes, strings.ToLower(g.URL[:strings.Index(g.URL, "://")])):
		v.fail("source.url", g.URL, "unknown kind of URL; use https, http, ssh, git or file")
	}
	v.ref(g.Ref)
	if _, err := g.Depth.Commits(); err != nil {
		v.errs = append(v.errs, err)
	}
	if strings.ContainsAny(g.Auth.Username, "\x00\n\r") {
		v.fail("source.auth.username", g.Auth.Username, "must not hold a line break or NUL")
	}
	switch t := g.Auth.Token.(type) {
	case nil:
	case secret.Ref:
		v.secretRef("source.auth.token", t, secrets)
	default:
		v.fail("source.auth.token", "", "put the token in a secret.Set and use its Ref")
	}
}

func (v *validator) secretRef(field string, val secret.Value, secrets *secret.Set) {
	err := secrets.Check(val)
	switch {
	case errors.Is(err, secret.ErrUnknown):
		v.fail(field, val.String(), "the workspace's Secrets hold no such name; add it")
	case err != nil:
		v.fail(field, val.String(), "the reference was made by another secret.Set than the workspace's Secrets")
	}
}

// Commits returns the number of commits; 0 means all. The error is a [*FieldError].
func (d Depth) Commits() (int, error) {
	switch d {
	case "":
		return 1, nil
	case Full:
		return 0, nil
	}
	n, err := strconv.Atoi(string(d))
	if err != nil || n < 1 || n > 1<<31-2 || strconv.Itoa(n) != string(d) {
		return 0, &FieldError{"source.depth", string(d), `use a number of commits, at least 1, or "full"`}
	}
	return n, nil
}

func (v *validator) root(root string) {
	switch {
	case root == "":
	case !path.IsAbs(root) || strings.ContainsAny(root, "\x00\n"):
		v.fail("root", root, "use an absolute path such as "+DefaultRoot)
	case path.Clean(root) == "/":
		v.fail("root", root, "the file system's root can't be the workspace; use a directory such as "+DefaultRoot)
	case slices.Contains(strings.Split(root, "/"), ".."):
		v.fail("root", root, "must not hold ..")
	}
}

func (v *validator) plan(p Plan) {
	for i, g := range p {
		for j, c := range g.Commands {
			field := fmt.Sprintf("setup[%d][%d]", i, j)
			switch {
			case strings.TrimSpace(c) == "":
				v.fail(field, c, "is empty; write a command or remove it")
			case strings.IndexByte(c, 0) >= 0:
				v.fail(field, c, "must not hold NUL")
			case len(c) > 100<<10:
				v.fail(field, c, "is longer than 100 KiB; put it in a script file")
			}
		}
	}
}

func (v *validator) scripts(scripts map[string]string) {
	for name, cmd := range scripts {
		if name == "" || strings.ContainsAny(name, "\x00\n\r") {
			v.fail("scripts", name, "a script's name must be one line of text")
		}
		if strings.TrimSpace(cmd) == "" || strings.ContainsAny(cmd, "\x00\n\r") {
			v.fail("scripts."+name, cmd, "a script must be a command on one line")
		}
	}
}

func (v *validator) env(w Workspace) {
	for name, val := range w.Env {
		if name == "" || strings.ContainsAny(name, "=\x00\n\r") {
			v.fail("env", name, "a variable's name must not be empty or hold = or a line break")
		}
		if strings.IndexByte(val, 0) >= 0 {
			v.fail("env."+name, "", "the value holds NUL; remove it")
		}
		if w.Secrets.Has(name) {
			v.fail("env."+name, "", "is a secret, too; set it in one place")
		}
	}
}

func (v *validator) skills(w Workspace) {
	if len(w.Instructions) > MaxFile {
		v.fail("instructions", w.Instructions, "are longer than 4 MiB")
	}
	agents := w.Instructions != "" || len(w.Scripts) > 0
	for _, s := range w.Skills {
		if f, ok := s.(File); ok && f.Path == AgentsFile {
			agents = true
		}
	}
	seen := map[string]int{}
	for i, s := range w.Skills {
		field := fmt.Sprintf("skills[%d]", i)
		f, ok := s.(File)
		if !ok {
			v.fail(field, fmt.Sprintf("%T", s), "unknown kind of skill; use FileSkill")
			continue
		}
		field += ".path"
		if cure := fileFault(f.Path); cure != "" {
			v.fail(field, f.Path, cure)
			continue
		}
		if len(f.Content) > MaxFile {
			v.fail(fmt.Sprintf("skills[%d].content", i), "", "is longer than 4 MiB")
		}
		clean := path.Clean(f.Path)
		if j, dup := seen[clean]; dup {
			v.fail(field, f.Path, fmt.Sprintf("is the same file as skills[%d]; keep one", j))
		}
		seen[clean] = i
		// A write through the link would change AGENTS.md (spec 01 §25, 3).
		if agents && slices.Contains(linkFiles, clean) {
			v.fail(field, f.Path, "is a link to AGENTS.md where there are instructions or scripts; put the text there, or leave those out")
		}
		// A file can't be a directory of another at the same time.
		for other, j := range seen {
			if strings.HasPrefix(clean, other+"/") || strings.HasPrefix(other, clean+"/") {
				v.fail(field, f.Path, fmt.Sprintf("can't be both a file and a directory (skills[%d])", j))
			}
		}
	}
}

// fileFault says why p can't be a file of the workspace; empty when it can.
func fileFault(p string) string {
	clean := path.Clean(p)
	segs := strings.Split(p, "/")
	switch {
	case p == "":
		return "name a file, relative to the workspace"
	case path.IsAbs(p):
		return "must be relative to the workspace"
	case strings.ContainsAny(p, "\x00\n\r"):
		return "must not hold a line break or NUL"
	case slices.Contains(segs, ".."):
		return "must not hold .."
	case strings.HasSuffix(p, "/") || clean == ".":
		return "names a directory; name a file"
	case strings.EqualFold(segs[0], ".git") || strings.HasPrefix(strings.ToLower(clean), ".git/"):
		return "must not be inside of .git"
	}
	return ""
}
