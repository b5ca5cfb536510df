package sandbox

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/aisandbox-go/aisandbox/secret"
	"github.com/aisandbox-go/aisandbox/workspace"
)

// hostGit runs git on the host for a local source. It takes none of the user's
// configuration and runs no hook, filter or helper of the repository: what is
// copied may come from a stranger.
type hostGit struct {
	config string // a configuration file of ours, in place of the user's
	red    *secret.Redactor
}

// hostConfig lets git work on repositories of other users; nothing that it is
// asked for here runs a program that those name. The last line is for the
// programs that git starts for itself, which get no -c options.
const hostConfig = `[safe]
	directory = *
[core]
	fsmonitor = false
	hooksPath = /dev/null
[protocol]
	allow = never
[protocol "file"]
	allow = always
`

func (g hostGit) run(ctx context.Context, dir string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "git", append([]string{
		"-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "core.untrackedCache=false",
	}, args...)...)
	cmd.Dir = dir
	cmd.Env = []string{
		"PATH=" + os.Getenv("PATH"), "HOME=" + filepath.Dir(g.config), "LC_ALL=C",
		"GIT_CONFIG_GLOBAL=" + g.config, "GIT_CONFIG_SYSTEM=/dev/null", "GIT_CONFIG_NOSYSTEM=1",
		"GIT_TERMINAL_PROMPT=0", "GIT_OPTIONAL_LOCKS=0", "GIT_NO_LAZY_FETCH=1", "GIT_ATTR_NOSYSTEM=1",
	}
	var out, errb bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errb
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			return "", context.Cause(ctx)
		}
		if errors.Is(err, exec.ErrNotFound) {
			return "", errors.New("sandbox: a local git source needs git on this host: install it")
		}
		return out.String(), fmt.Errorf("sandbox: git %s on the host: %w: %s", verb(args), err, g.red.Tail(strings.TrimSpace(errb.String()), 4<<10))
	}
	return out.String(), nil
}

// localCopy is what of a host directory goes into the sandbox.
type localCopy struct {
	base  string   // the directory that files are relative to
	files []string // nil: everything below base
	git   string   // a .git directory of ours to go with it; empty: none
}

// prepareLocal reads a local source. What it makes lies below tmp.
func (e *ensurer) prepareLocal(ctx context.Context, src workspace.Local, tmp string) (localCopy, error) {
	fi, err := os.Stat(src.Path)
	if err != nil {
		return localCopy{}, &workspace.FieldError{Field: "source.path", Value: src.Path, Cure: "can't be read: name an existing directory of this host: " + errors.Unwrap(err).Error()}
	}
	if !fi.IsDir() {
		return localCopy{}, &workspace.FieldError{Field: "source.path", Value: src.Path, Cure: "is not a directory: name one"}
	}
	g, err := e.hostGit(tmp)
	if err != nil {
		return localCopy{}, err
	}
	top, err := g.run(ctx, src.Path, "rev-parse", "--show-toplevel")
	if err != nil {
		if ctx.Err() != nil {
			return localCopy{}, err
		}
		if src.Ref != "" {
			return localCopy{}, &workspace.FieldError{Field: "source.ref", Value: src.Ref, Cure: src.Path + " is not a git work tree: leave ref out"}
		}
		return localCopy{base: src.Path}, nil
	}
	top = strings.TrimSuffix(top, "\n")
	clone := filepath.Join(tmp, "clone")
	if src.Ref != "" {
		return e.cloneHost(ctx, g, top, clone, src.Ref, "full")
	}
	if err := e.cloneBare(ctx, g, top, clone, "full", ""); err != nil {
		return localCopy{}, err
	}
	// An index without the files' times: the agent's git fills them in.
	if _, err := g.run(ctx, clone, "rev-parse", "--verify", "--quiet", "HEAD"); err == nil {
		if _, err := g.run(ctx, clone, "read-tree", "HEAD"); err != nil {
			return localCopy{}, err
		}
	}
	list, err := g.run(ctx, top, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate")
	if err != nil {
		return localCopy{}, err
	}
	c := localCopy{base: top, git: filepath.Join(clone, ".git"), files: []string{}}
	for f := range strings.SplitSeq(list, "\x00") {
		if f != "" {
			c.files = append(c.files, f)
		}
	}
	return c, nil
}

// prepareClone reads a git source whose repository is on the host.
func (e *ensurer) prepareClone(ctx context.Context, src workspace.Git, tmp string) (localCopy, error) {
	p, _ := src.HostPath()
	if _, err := os.Stat(p); err != nil {
		return localCopy{}, &workspace.FieldError{Field: "source.url", Value: src.URL, Cure: "can't be read: name an existing repository: " + errors.Unwrap(err).Error()}
	}
	g, err := e.hostGit(tmp)
	if err != nil {
		return localCopy{}, err
	}
	return e.cloneHost(ctx, g, p, filepath.Join(tmp, "clone"), src.Ref, src.Depth)
}

func (e *ensurer) hostGit(tmp string) (hostGit, error) {
	g := hostGit{config: filepath.Join(tmp, "gitconfig"), red: e.red}
	return g, os.WriteFile(g.config, []byte(hostConfig), 0o600)
}

// cloneHost makes a clone with its files.
func (e *ensurer) cloneHost(ctx context.Context, g hostGit, from, to, ref string, depth workspace.Depth) (localCopy, error) {
	if err := e.cloneBare(ctx, g, from, to, depth, ref); err != nil {
		return localCopy{}, err
	}
	if _, err := g.run(ctx, to, "rev-parse", "--verify", "--quiet", "HEAD"); err == nil {
		if _, err := g.run(ctx, to, "reset", "--quiet", "--hard"); err != nil {
			return localCopy{}, err
		}
	}
	return localCopy{base: to}, nil
}

// cloneBare clones without checking out. The objects travel as between two
// hosts, so that only what a branch or tag reaches is taken along, nothing that a
// person threw away, and linked work trees and shallow repositories are as good
// as others.
func (e *ensurer) cloneBare(ctx context.Context, g hostGit, from, to string, depth workspace.Depth, ref string) error {
	n, err := depth.Commits()
	if err != nil {
		return err
	}
	args := []string{"clone", "--quiet", "--no-checkout", "--no-local", "--template="}
	if n > 0 {
		args = append(args, "--depth", strconv.Itoa(n), "--single-branch")
	}
	branch := ref != "" && !fullSHA.MatchString(ref)
	if branch {
		args = append(args, "--branch", ref)
	}
	if _, err := g.run(ctx, "/", append(args, "--", from, to)...); err != nil {
		if branch && strings.Contains(err.Error(), "Remote branch") {
			return &workspace.FieldError{Field: "source.ref", Value: ref, Cure: "there is no such branch or tag; use one, or a whole commit id"}
		}
		return err
	}
	if ref != "" && !branch {
		fetch := []string{"fetch", "--quiet"}
		if n > 0 {
			fetch = append(fetch, "--depth", strconv.Itoa(n))
		}
		if _, err := g.run(ctx, to, append(fetch, "origin", ref)...); err != nil {
			return &workspace.FieldError{Field: "source.ref", Value: ref, Cure: "there is no such commit in " + from + ": " + err.Error()}
		}
		if _, err := g.run(ctx, to, "update-ref", "--no-deref", "HEAD", ref); err != nil {
			return err
		}
	}
	// The agent's origin is that of the source, without a log-in.
	origin, err := g.run(ctx, from, "config", "--get", "remote.origin.url")
	if origin = cleanURL(strings.TrimSpace(origin)); err == nil && origin != "" && workspace.ArgFault(origin) == "" {
		_, err = g.run(ctx, to, "remote", "set-url", "origin", origin)
	} else {
		_, err = g.run(ctx, to, "config", "--unset", "remote.origin.url")
	}
	// The logs name the host's directory and user.
	return errors.Join(err, os.RemoveAll(filepath.Join(to, ".git", "logs")), os.RemoveAll(filepath.Join(to, ".git", "FETCH_HEAD")))
}

// cleanURL removes the user and password of a URL.
func cleanURL(raw string) string {
	u, err := url.Parse(raw)
	if err != nil || u.User == nil || u.Scheme == "ssh" && !hasPassword(u) {
		return raw
	}
	u.User = nil
	return u.String()
}

func hasPassword(u *url.URL) bool {
	_, ok := u.User.Password()
	return ok
}
