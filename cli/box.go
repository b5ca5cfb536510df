package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/aisandbox-go/aisandbox/config"
	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/sandbox"
	"github.com/aisandbox-go/aisandbox/secret"
	"github.com/aisandbox-go/aisandbox/workspace"
)

// boxFlags are the flags that describe a sandbox, the same for every command.
type boxFlags struct {
	provider string
	image    string
	user     string
	network  string
	repo     string
	ref      string
	depth    string
	setup    []string
	secrets  []string
	env      []string
	timeout  time.Duration
}

func (b *boxFlags) register(f *pflag.FlagSet, repo string) {
	f.StringVar(&b.provider, "provider", "auto", "where: auto, or one that `aisandbox doctor` lists")
	f.StringVar(&b.image, "image", "", "image, for providers that take one")
	f.StringVar(&b.user, "user", "", "user that commands run as, for providers that take one: a name of the image, or UID[:GID]")
	f.StringVar(&b.network, "network", "", "what the sandbox reaches: none, host, or empty for the provider's default")
	f.StringVar(&b.repo, "repo", repo, "repository: a directory of this host, of which the sandbox gets a copy, or a URL or OWNER/NAME")
	f.StringVar(&b.ref, "ref", "", "branch, tag or commit")
	f.StringVar(&b.depth, "depth", "", "commits to clone from a URL: a number from 1, or full (default 1)")
	f.StringArrayVar(&b.setup, "setup", nil, "command to run in the sandbox before anything else; repeatable")
	f.StringArrayVar(&b.secrets, "secret", nil, "name of an environment variable whose value the sandbox's commands get and nobody is shown; repeatable")
	f.StringArrayVar(&b.env, "env", nil, "NAME=VALUE for the sandbox's commands; repeatable")
	f.DurationVar(&b.timeout, "timeout", 0, "end after this time with exit code 124 (0: never)")
}

// withTimeout bounds ctx by --timeout.
func (b *boxFlags) withTimeout(ctx context.Context) (context.Context, context.CancelFunc, error) {
	if b.timeout < 0 {
		return nil, nil, &usageError{"--timeout", b.timeout.String(), "must not be negative; 0 is never"}
	}
	if b.timeout == 0 {
		return ctx, func() {}, nil
	}
	ctx, cancel := context.WithTimeoutCause(ctx, b.timeout, errTimeout)
	return ctx, cancel, nil
}

// box is what the flags came to.
type box struct {
	def     *sandbox.Def
	prov    provider.Provider
	name    string
	offer   config.Provider
	env     map[string]string
	secrets *secret.Set
	warning string // for a person; may be empty
}

// define makes the definition that the flags describe. mounts are host paths to
// show inside where the backend is on the host's files.
func (a *app) define(ctx context.Context, id string, b boxFlags, mounts []string, log *slog.Logger) (*box, error) {
	env, err := parseEnv(b.env)
	if err != nil {
		return nil, err
	}
	vals := map[string]string{}
	for _, n := range b.secrets {
		if name, _, ok := strings.Cut(n, "="); ok { // whose value must not be shown once more
			return nil, &usageError{"--secret", name + "=…", "give the name alone: the value comes from the environment variable of that name"}
		}
		v := a.getenv(n)
		if v == "" {
			return nil, &usageError{"--secret", n, "is not set in the environment, or empty: export it first"}
		}
		vals[n] = v
	}
	set, err := secret.NewSet(vals)
	if err != nil {
		return nil, &exitError{exitUsage, err}
	}
	src, err := source(b)
	if err != nil {
		return nil, err
	}
	bx := &box{env: env, secrets: set}
	if err := a.pick(ctx, bx, b, mounts, log); err != nil {
		return nil, err
	}
	d := sandbox.Definition{
		ID:       id,
		Provider: bx.prov,
		Network:  provider.Network(b.network),
		Workspace: workspace.Workspace{
			Source:  src,
			Setup:   steps(b.setup),
			Secrets: set,
			Env:     env,
		},
		Lifecycle: sandbox.Lifecycle{Reuse: sandbox.PerRun, Snapshot: sandbox.NoSnapshot},
	}
	if bx.def, err = sandbox.Define(d); err != nil {
		return nil, &exitError{exitUsage, err}
	}
	return bx, nil
}

// pick chooses and makes the provider.
func (a *app) pick(ctx context.Context, bx *box, b boxFlags, mounts []string, log *slog.Logger) error {
	make1 := func(name string) error {
		o, ok := a.reg.Providers[name]
		if !ok {
			names := slices.Sorted(maps.Keys(a.reg.Providers))
			return &usageError{"--provider", name, "use auto, " + strings.Join(names, ", ")}
		}
		section := map[string]any{}
		if b.image != "" {
			if o.Image == "" {
				return &usageError{"--image", b.image, fmt.Sprintf("provider %s has no images; use --provider docker", name)}
			}
			section[o.Image] = b.image
		}
		if b.user != "" {
			if o.User == "" {
				return &usageError{"--user", b.user, fmt.Sprintf("provider %s has one user only; use --provider docker", name)}
			}
			section[o.User] = b.user
		}
		if o.ReadOnly != "" && len(mounts) > 0 {
			section[o.ReadOnly] = mounts
		}
		raw, err := json.Marshal(section)
		if err != nil {
			return err
		}
		p, err := o.New(raw, log)
		if err != nil {
			return &exitError{exitUsage, err}
		}
		bx.prov, bx.name, bx.offer = p, name, o
		return nil
	}
	if b.provider != "auto" {
		return make1(b.provider)
	}
	var errs []error
	for _, name := range a.reg.Auto {
		if o := a.reg.Providers[name]; b.image != "" && o.Image == "" || b.user != "" && o.User == "" {
			continue // it can't be what was asked for
		}
		if err := make1(name); err != nil {
			errs = append(errs, err)
			continue
		}
		if p, ok := provider.As[provider.Pinger](bx.prov); ok {
			if err := p.Ping(ctx); err != nil {
				errs = append(errs, err)
				continue
			}
		}
		if bx.prov.Traits().Isolation == provider.IsolationNone {
			bx.warning = "no isolation: the agent works on this host with your rights; `aisandbox doctor` says how to get a sandbox"
		}
		return nil
	}
	return &exitError{exitUnavailable, fmt.Errorf("no provider can be used: %w", errors.Join(errs...))}
}

// source is the workspace's source that --repo, --ref and --depth describe.
func source(b boxFlags) (workspace.Source, error) {
	if b.repo == "" {
		if b.ref != "" {
			return nil, &usageError{"--ref", b.ref, "needs --repo"}
		}
		return workspace.None{}, nil
	}
	depth, err := parseDepth(b.depth)
	if err != nil {
		return nil, err
	}
	st, err := os.Stat(b.repo)
	switch {
	case err == nil && st.IsDir():
		if b.depth != "" {
			return nil, &usageError{"--depth", b.depth, "is for a URL; a directory is copied with its history"}
		}
		return workspace.Local{Path: b.repo, Ref: b.ref}, nil
	case err == nil:
		return nil, &usageError{"--repo", b.repo, "is a file; name a directory, a URL or OWNER/NAME"}
	case !errors.Is(err, fs.ErrNotExist):
		return nil, &usageError{"--repo", b.repo, err.Error()}
	}
	looksLocal := strings.HasPrefix(b.repo, ".") || strings.HasPrefix(b.repo, "/") || !strings.ContainsAny(b.repo, ":/")
	if looksLocal {
		return nil, &usageError{"--repo", b.repo, "there is no such directory"}
	}
	return workspace.Git{URL: workspace.ExpandRepo(b.repo), Ref: b.ref, Depth: depth}, nil
}

func steps(cmds []string) workspace.Plan {
	if len(cmds) == 0 {
		return nil
	}
	return workspace.Steps(workspace.Serial(cmds...))
}

func parseDepth(s string) (workspace.Depth, error) {
	switch s {
	case "":
		return "", nil
	case "full":
		return workspace.Full, nil
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 1 {
		return "", &usageError{"--depth", s, "use a number from 1, or full"}
	}
	return workspace.Commits(n), nil
}

func parseEnv(kvs []string) (map[string]string, error) {
	m := map[string]string{}
	for _, kv := range kvs {
		k, v, ok := strings.Cut(kv, "=")
		if !ok {
			return nil, &usageError{"--env", k, "use NAME=VALUE"}
		}
		m[k] = v
	}
	return m, nil
}
