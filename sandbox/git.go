package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"path"
	"regexp"
	"strconv"
	"strings"

	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/workspace"
)

// Git is git inside the sandbox, in one directory. Every operation that ends
// badly is an error with the end of git's output, redacted.
type Git struct {
	s   *Sandbox
	dir string
}

// Git returns git for a directory; empty is the root.
func (s *Sandbox) Git(dir string) Git { return Git{s, dir} }

// ErrNoGit says that the sandbox has no git program.
var ErrNoGit = errors.New("sandbox: there is no git in the sandbox: install it in the image, or use a local source")

// git's own environment variables for the helper below.
const (
	envGitUser  = "GIT_ASKPASS_USER"
	envGitToken = "GIT_ASKPASS_TOKEN"
)

// credentialHelper answers git from the environment of that one command. It is
// the helper's own shell that expands the variables: the token is in no argument.
const credentialHelper = `!f() { test "$1" = get && printf 'username=%s\npassword=%s\n' "$` + envGitUser + `" "$` + envGitToken + `"; }; f`

// defaultGitUser is what token log-ins use as user name by convention.
const defaultGitUser = "x-access-token"

// auth returns the options and variables that log git in to remote, and to no
// other host that it may be sent on to.
func (s *Sandbox) auth(a workspace.Auth, remote string) (opts, env []string, err error) {
	env = []string{"GIT_TERMINAL_PROMPT=0"}
	if a.Token == nil {
		return nil, env, nil
	}
	token, err := s.set.Resolve(a.Token)
	if err != nil {
		return nil, nil, err
	}
	if strings.ContainsAny(token, "\r\n") {
		return nil, nil, &workspace.FieldError{Field: "source.auth.token", Value: a.Token.String(), Cure: "holds a line break; remove it"}
	}
	user := a.Username
	if user == "" {
		user = defaultGitUser
	}
	scope := "credential."
	if u, perr := url.Parse(remote); perr == nil && u.Host != "" {
		scope += u.Scheme + "://" + u.Host + "."
	}
	// The empty one drops helpers of the image that would come before.
	opts = []string{"-c", scope + "helper=", "-c", scope + "helper=" + credentialHelper}
	return opts, append(env, envGitUser+"="+user, envGitToken+"="+token), nil
}

var fullSHA = regexp.MustCompile(`^([0-9a-f]{40}|[0-9a-f]{64})$`)

// Clone clones into g's directory, which must be missing or empty. Source, target
// and depth are checked before anything runs. A Ref that is a whole commit id is
// fetched by itself. A failed clone leaves no .git behind.
func (g Git) Clone(ctx context.Context, src workspace.Git) (err error) {
	depth, err := src.Depth.Commits()
	if err != nil {
		return err
	}
	for field, v := range map[string]string{"source.url": src.URL, "source.ref": src.Ref} {
		if cure := workspace.ArgFault(v); cure != "" {
			return &workspace.FieldError{Field: field, Value: v, Cure: cure}
		}
	}
	dir, err := g.real()
	if err != nil {
		return err
	}
	auth, env, err := g.s.auth(src.Auth, src.URL)
	if err != nil {
		return err
	}
	// git makes the target, but not its parent.
	if parent := path.Dir(dir); dir != g.s.base && parent != g.s.base {
		if _, err := g.s.Output(ctx, provider.Cmd{Argv: []string{"mkdir", "-p", "--", parent}, Dir: "/"}); err != nil {
			return err
		}
	}
	run := func(args ...string) error {
		_, err := g.s.git(ctx, "/", append(auth[:len(auth):len(auth)], args...), env)
		return err
	}
	shallow := []string{}
	if depth > 0 {
		shallow = []string{"--depth", strconv.Itoa(depth)}
	}
	if !fullSHA.MatchString(src.Ref) {
		args := append([]string{"clone", "--quiet"}, shallow...)
		if depth > 0 {
			args = append(args, "--single-branch")
		}
		if src.Ref != "" {
			args = append(args, "--branch", src.Ref)
		}
		return run(append(args, "--", src.URL, dir)...)
	}
	defer func() {
		if err != nil {
			cctx, stop := cleanup(ctx)
			defer stop()
			err = errors.Join(err, g.s.Remove(cctx, path.Join(dir, ".git")))
		}
	}()
	in := func(args ...string) error { return run(append([]string{"-C", dir}, args...)...) }
	if err := run("init", "--quiet", "--", dir); err != nil {
		return err
	}
	if err := in("remote", "add", "origin", src.URL); err != nil {
		return err
	}
	fetch := append([]string{"fetch", "--quiet"}, shallow...)
	if err := in(append(fetch, "origin", src.Ref)...); err != nil {
		// Some servers hand out no single commits. Then the history must do.
		if ctx.Err() != nil {
			return err
		}
		if all := in("fetch", "--quiet", "--tags", "origin"); all != nil {
			return errors.Join(err, all)
		}
	}
	return in("checkout", "--quiet", "--detach", src.Ref)
}

// Status returns what git status --porcelain says.
func (g Git) Status(ctx context.Context) (string, error) {
	return g.out(ctx, "status", "--porcelain")
}

// Add stages paths, relative to the directory; a path that begins with - is refused.
func (g Git) Add(ctx context.Context, paths ...string) error {
	for _, p := range paths {
		if cure := workspace.ArgFault(p); cure != "" {
			return &workspace.FieldError{Field: "git.path", Value: p, Cure: cure}
		}
	}
	_, err := g.out(ctx, append([]string{"--literal-pathspecs", "add", "--"}, paths...)...)
	return err
}

// Commit commits what is staged.
func (g Git) Commit(ctx context.Context, message string) error {
	_, err := g.out(ctx, "commit", "--quiet", "-m", message)
	return err
}

// Push pushes the current branch to where it tracks.
func (g Git) Push(ctx context.Context, a workspace.Auth) error { return g.remote(ctx, a, "push") }

// Pull merges what the current branch tracks.
func (g Git) Pull(ctx context.Context, a workspace.Auth) error { return g.remote(ctx, a, "pull") }

func (g Git) remote(ctx context.Context, a workspace.Auth, verb string) error {
	remote := ""
	if a.Token != nil {
		out, err := g.out(ctx, "remote", "get-url", "origin")
		if err != nil {
			return err
		}
		remote = strings.TrimSpace(out)
	}
	opts, env, err := g.s.auth(a, remote)
	if err != nil {
		return err
	}
	_, err = g.s.git(ctx, g.dir, append(opts, verb, "--quiet"), env)
	return err
}

// Branch returns the current branch, HEAD when detached.
func (g Git) Branch(ctx context.Context) (string, error) {
	out, err := g.out(ctx, "rev-parse", "--abbrev-ref", "HEAD")
	return strings.TrimSpace(out), err
}

// Head returns the id of the current commit.
func (g Git) Head(ctx context.Context) (string, error) {
	out, err := g.out(ctx, "rev-parse", "HEAD")
	return strings.TrimSpace(out), err
}

// Diff returns the difference between base and the files as they are, without
// what is not tracked. It runs no program that the repository configures.
func (g Git) Diff(ctx context.Context, base string) (string, error) {
	if cure := workspace.ArgFault(base); cure != "" {
		return "", &workspace.FieldError{Field: "git.base", Value: base, Cure: cure}
	}
	return g.out(ctx, "diff", "--no-ext-diff", "--no-textconv", "--no-color", base, "--")
}

func (g Git) real() (string, error) {
	if cure := workspace.ArgFault(g.dir); cure != "" {
		return "", &workspace.FieldError{Field: "git.dir", Value: g.dir, Cure: cure}
	}
	return g.s.Real(g.dir)
}

func (g Git) out(ctx context.Context, args ...string) (string, error) {
	if cure := workspace.ArgFault(g.dir); cure != "" {
		return "", &workspace.FieldError{Field: "git.dir", Value: g.dir, Cure: cure}
	}
	out, err := g.s.git(ctx, g.dir, args, []string{"GIT_TERMINAL_PROMPT=0"})
	return string(out), err
}

// git runs git in dir. The repository was made by us or belongs to the agent's
// user; whose files it has is no reason to refuse.
func (s *Sandbox) git(ctx context.Context, dir string, args, env []string) ([]byte, error) {
	argv := append([]string{"git", "-c", "safe.directory=*", "-c", "core.quotepath=off"}, args...)
	out, err := s.Output(ctx, provider.Cmd{Argv: argv, Dir: dir, Env: env})
	var exit *provider.ExitError
	if errors.As(err, &exit) && exit.Exit.Code == 127 || errors.Is(err, fs.ErrNotExist) {
		// The program is missing, or the directory: backends tell them apart in ways of
		// their own.
		if res, perr := s.Run(ctx, provider.Cmd{Argv: provider.Shell("command -v git"), Dir: "/"}); perr == nil && res.Exit.Code != 0 {
			return nil, ErrNoGit
		}
	}
	if err != nil {
		return nil, fmt.Errorf("sandbox: git %s: %w", verb(args), err)
	}
	return out, nil
}

// verb is the git command in args, for an error's text.
func verb(args []string) string {
	for i := 0; i < len(args); i++ {
		switch {
		case args[i] == "-c" || args[i] == "-C":
			i++
		case !strings.HasPrefix(args[i], "-"):
			return args[i]
		}
	}
	return ""
}
