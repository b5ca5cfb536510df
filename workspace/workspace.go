// Package workspace describes what an agent sees when it starts: the source it
// works on, how that is set up, and what it is told.
//
// A [Workspace] is a plain value. Nothing happens until a sandbox is made of it.
package workspace

import (
	"errors"
	"fmt"
	"path"
	"strings"

	"github.com/aisandbox-go/aisandbox/secret"
)

// DefaultRoot is the directory that an agent works in, as every API names it.
const DefaultRoot = "/workspace"

// AgentsFile is the file that the instructions are written to.
const AgentsFile = "AGENTS.md"

// LinkFiles are the other names of [AgentsFile], for the agents that read those.
var linkFiles = []string{"CLAUDE.md", "GEMINI.md"}

// LinkFiles returns the names that are linked to [AgentsFile], in order.
func LinkFiles() []string { return append([]string(nil), linkFiles...) }

// Workspace is the portable description. Its zero value is an empty directory.
// It must not be changed after it was given away.
type Workspace struct {
	// Source is what the directory holds at first; nil means nothing.
	Source Source

	// Setup is run once, after the source and the files are there.
	Setup Plan

	// Scripts are commands by name. They are listed in AGENTS.md, and a policy may
	// name them.
	Scripts map[string]string

	Skills []Skill

	// Instructions is the text of AGENTS.md.
	Instructions string

	// Env is set for every command. For what is secret use Secrets.
	Env map[string]string

	// Secrets are set for every command, under their names. Their values are no
	// part of the workspace's hash, so that a rotated one reaches the same sandbox.
	Secrets *secret.Set

	// Root is the virtual path of the directory; empty means [DefaultRoot]. A path
	// beneath DefaultRoot is that subdirectory; any other is a second name of it.
	Root string

	// PackageManager says what the project uses, where detection by lock file (see
	// [DetectPackageManager]) is not wanted.
	PackageManager PackageManager
}

// RootOrDefault is Root with its default.
func (w Workspace) RootOrDefault() string {
	if w.Root == "" {
		return DefaultRoot
	}
	return path.Clean(w.Root)
}

// Source is where the files come from: [Git], [Local] or [None].
type Source interface{ source() }

// None is the empty source.
type None struct{}

// Git is a repository that is cloned, unless the directory already holds one.
type Git struct {
	// URL is anything git clones from: https, ssh, or user@host:path. A path or
	// file URL names a repository of the host, and is treated as [Local].
	URL string

	// Ref is a branch, a tag or a commit; empty means the remote's HEAD.
	Ref string

	// Depth is how much history is fetched.
	Depth Depth

	Auth Auth
}

// Auth is how to log in to the remote. It reaches git through the environment
// only: it is never in an argument, in the URL or in .git/config.
type Auth struct {
	Username string       // empty means x-access-token
	Token    secret.Value // nil: none; a plain text is refused
}

// Local is a directory of the host. Its files are copied into the sandbox; it is
// never changed. Of a git work tree the agent gets a clone with the state of the
// work tree: changed and new files, but none that git ignores, and neither
// configuration nor hooks.
type Local struct {
	Path string

	// Ref, for a git work tree, is what to check out instead of the state of the
	// work tree.
	Ref string
}

func (None) source()  {}
func (Git) source()   {}
func (Local) source() {}

// GitHub returns the source for owner/name on github.com. A repo that has a
// scheme, or is user@host:path, is taken as it is.
func GitHub(repo string) Git { return Git{URL: ExpandRepo(repo)} }

// ExpandRepo returns the clone URL for owner/name on github.com, and repo itself
// where it is a URL or user@host:path already.
func ExpandRepo(repo string) string {
	if hasScheme(repo) || scpLike(repo) {
		return repo
	}
	owner, name, ok := strings.Cut(repo, "/")
	if !ok || owner == "" || name == "" || strings.Contains(name, "/") || strings.HasPrefix(owner, ".") {
		return repo // not the short form; Validate has the word
	}
	return "https://github.com/" + owner + "/" + strings.TrimSuffix(name, ".git") + ".git"
}

func hasScheme(s string) bool {
	i := strings.Index(s, "://")
	if i <= 0 {
		return false
	}
	for _, c := range s[:i] {
		if (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '+' && c != '-' && c != '.' {
			return false
		}
	}
	return true
}

// scpLike says whether s is user@host:path, as ssh writes it.
func scpLike(s string) bool {
	host, rest, ok := strings.Cut(s, ":")
	return ok && rest != "" && strings.Contains(host, "@") && !strings.ContainsAny(host, "/\\ ")
}

// HostPath says whether URL names a repository in the host's file system, and
// where: a path, or a file URL.
func (g Git) HostPath() (string, bool) {
	if p, ok := strings.CutPrefix(g.URL, "file://"); ok {
		return strings.TrimPrefix(p, "localhost"), true
	}
	if hasScheme(g.URL) || scpLike(g.URL) {
		return "", false
	}
	return g.URL, strings.HasPrefix(g.URL, "/") || g.URL == "." || g.URL == ".." || strings.HasPrefix(g.URL, "./") || strings.HasPrefix(g.URL, "../")
}

// Depth is how many commits of history a clone has: empty means 1, "full" all,
// else a positive number.
type Depth string

// Full is the whole history, of all branches.
const Full Depth = "full"

// Commits is a depth of n commits; n must be positive.
func Commits(n int) Depth { return Depth(fmt.Sprint(n)) }

// PackageManager is a tool that installs a project's dependencies.
type PackageManager string

// The package managers that are detected.
const (
	Auto PackageManager = "auto" // by lock file; the same as empty
	NPM  PackageManager = "npm"
	PNPM PackageManager = "pnpm"
	Yarn PackageManager = "yarn"
	Bun  PackageManager = "bun"
)

// lockFiles are looked for in this order (spec 01 §4).
var lockFiles = []struct {
	name string
	pm   PackageManager
}{
	{"pnpm-lock.yaml", PNPM},
	{"yarn.lock", Yarn},
	{"bun.lockb", Bun},
	{"bun.lock", Bun},
	{"package-lock.json", NPM},
	{"npm-shrinkwrap.json", NPM},
}

// DetectPackageManager returns the explicit manager, else the one whose lock file
// exists; empty when there is none. An error of exists ends the search.
func (w Workspace) DetectPackageManager(exists func(name string) (bool, error)) (PackageManager, error) {
	if w.PackageManager != "" && w.PackageManager != Auto {
		return w.PackageManager, nil
	}
	for _, l := range lockFiles {
		ok, err := exists(l.name)
		if err != nil {
			return "", err
		}
		if ok {
			return l.pm, nil
		}
	}
	return "", nil
}

// Plan is a set-up plan: groups that run one after the other. Being a value, it
// can be compared, printed and hashed.
type Plan []Group

// Group is a list of commands, POSIX shell text each.
type Group struct {
	// Commands of a serial group run in one persistent shell, in which directory
	// and environment carry over from one command, and one group, to the next.
	// Those of a parallel group start together, each in a shell of its own that has
	// the persistent one's directory and environment; nothing flows back.
	Commands []string
	Parallel bool
}

// Steps makes a plan.
func Steps(groups ...Group) Plan { return groups }

// Serial is a group of commands that run one after the other.
func Serial(commands ...string) Group { return Group{Commands: commands} }

// Parallel is a group of commands that run at the same time.
func Parallel(commands ...string) Group { return Group{Commands: commands, Parallel: true} }

// Skill is something that the agent is given. The set is closed: further kinds
// come with this package.
type Skill interface{ skill() }

// File is a skill that is one file in the workspace.
type File struct {
	Path    string // relative to the root
	Content string
}

func (File) skill() {}

// FileSkill returns the skill that writes a file. The path AGENTS.md is special:
// its content takes the place of empty Instructions.
func FileSkill(path, content string) Skill { return File{Path: path, Content: content} }

// StepError is a set-up step that failed.
type StepError struct {
	Step     string // the command, redacted
	ExitCode int    // 0 when the step did not end by itself; see Err
	Tail     string // the end of its output, at most 1500 bytes, redacted
	Err      error  // why it did not end by itself; may be nil
}

func (e *StepError) Error() string {
	s := "setup step failed: " + e.Step
	if e.Err != nil {
		s += ": " + e.Err.Error()
	} else {
		s += fmt.Sprintf(" (exit %d)", e.ExitCode)
	}
	if t := strings.TrimSpace(e.Tail); t != "" {
		s += "\n" + t
	}
	return s
}

// Unwrap returns Err.
func (e *StepError) Unwrap() error { return e.Err }

// Code is "setup_failed".
func (e *StepError) Code() string { return "setup_failed" }

// FieldError says which field of a workspace can't be used, and what to do.
type FieldError struct {
	Field string // such as "source.url"
	Value string // may be empty where the value must not be shown
	Cure  string
}

func (e *FieldError) Error() string {
	return fmt.Sprintf("workspace: %s = %q: %s", e.Field, e.Value, e.Cure)
}

// Code is "invalid_input".
func (e *FieldError) Code() string { return "invalid_input" }

// ErrInvalid is what every [FieldError] is.
var ErrInvalid = errors.New("workspace: invalid")

// Is makes the error [ErrInvalid].
func (e *FieldError) Is(target error) bool { return target == ErrInvalid }
