package cli

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/aisandbox-go/aisandbox/chat"
	"github.com/aisandbox-go/aisandbox/config"
	"github.com/aisandbox-go/aisandbox/internal/statedir"
	"github.com/aisandbox-go/aisandbox/reaper"
	"github.com/aisandbox-go/aisandbox/sandbox"
	"github.com/aisandbox-go/aisandbox/server"
	"github.com/aisandbox-go/aisandbox/store"
)

// hostFlags say what can be run and where runs are kept. They are those of every
// command that drives runs of a server.
type hostFlags struct {
	config   string
	data     string
	database string
	script   string
}

func (h *hostFlags) register(f *pflag.FlagSet) {
	f.StringVar(&h.config, "config", "", "configuration (default: one sandbox, demo)")
	f.StringVar(&h.data, "data", "", "directory to keep runs in (default: aisandbox/serve below XDG_STATE_HOME, for root below /var/lib)")
	f.StringVar(&h.database, "database", "", "PostgreSQL URL to keep runs in, for several servers; better in the configuration, which takes it from the environment")
	f.StringVar(&h.script, "script", "", "script of the demo's agent, YAML")
}

// storeFile is the SQLite file in the data directory.
const storeFile = "runs.db"

// host is what a server of this host consists of. Whoever made it closes it.
type host struct {
	built    config.Built
	store    store.Set
	opened   io.Closer
	location config.Location
	server   *server.Server
	keeper   *chat.Keeper
	presence *chat.Presence
	owner    string // in claims
	// deployment names the store; every sandbox that is recorded in it carries the name.
	deployment string
	log        *slog.Logger
}

// close closes the store. The server must have been shut down.
func (h *host) close() error { return h.opened.Close() }

// host assembles what the flags describe. Nothing listens yet, and no run is driven.
func (a *app) host(ctx context.Context, f hostFlags, log *slog.Logger) (*host, error) {
	built, err := a.configuration(ctx, f, log)
	if err != nil {
		return nil, err
	}
	loc, err := location(f, built.Store)
	if err != nil {
		return nil, err
	}
	open := a.reg.Stores[loc.Kind]
	if open == nil {
		return nil, &exitError{exitUsage, fmt.Errorf("this program has no store %q: use --database or --data of a kind that it has", loc.Kind)}
	}
	set, opened, err := open(ctx, loc.Location, log)
	if err != nil {
		return nil, &exitError{exitUnavailable, err}
	}
	name, err := os.Hostname()
	if err != nil {
		name = "host"
	}
	h := &host{
		built: built, store: set, opened: opened, location: loc, log: log,
		owner: fmt.Sprintf("%s-%d-%s", name, os.Getpid(), rand.Text()),
	}
	h.keeper = chat.NewKeeper(set.Runs, chat.KeeperOptions{Logger: log})
	h.presence = chat.NewPresence(set.Runs, log)
	if h.deployment, err = reaper.Deployment(ctx, set.Leases); err != nil {
		return nil, errors.Join(&exitError{exitUnavailable, err}, opened.Close())
	}
	if h.server, err = server.New(h.config()); err != nil {
		return nil, errors.Join(&exitError{exitUsage, err}, opened.Close())
	}
	return h, nil
}

func (h *host) config() server.Config {
	l := h.built.Limits
	c := server.Config{
		Definitions: map[string]server.Definition{},
		Store:       h.store,
		Hosts:       h.built.Hosts,
		Origins:     h.built.Origins,
		Limits: server.Limits{
			Body: int64(l.Body), Header: int(l.Header), Runs: l.Runs, Readers: l.Readers,
			BodyTime: time.Duration(l.BodyTime), WriteTime: time.Duration(l.WriteTime),
		},
		Owner: h.owner, Logger: h.log, Keeper: h.keeper, Presence: h.presence,
	}
	for _, k := range h.built.Keys {
		c.Keys = append(c.Keys, server.Key{Token: k.Token, Tenant: k.Tenant, UserID: k.User})
	}
	for name, d := range h.built.Definitions {
		c.Definitions[name] = server.Definition{Busy: server.Busy(d.Busy), QueueDepth: d.QueueDepth, Request: h.request(d)}
	}
	return c
}

// request makes runs of a definition.
func (h *host) request(d config.Definition) func(context.Context, server.RunInput) (chat.Request, error) {
	with := sandbox.With(d.Def, sandbox.WithOptions{Deps: sandbox.Deps{Owner: h.owner, Deployment: h.deployment}, KeepFor: d.KeepFor})
	return func(context.Context, server.RunInput) (chat.Request, error) {
		ad, err := d.Adapter()
		if err != nil {
			return chat.Request{}, err
		}
		return chat.Request{Adapter: ad, Use: []chat.Middleware{with}, Timeout: d.Timeout}, nil
	}
}

// configuration is what the flags say is to be served.
func (a *app) configuration(ctx context.Context, f hostFlags, log *slog.Logger) (config.Built, error) {
	file, err := config.File{}, error(nil)
	switch {
	case f.config != "" && f.script != "":
		return config.Built{}, &usageError{"--script", f.script, "is for the demo; put the script into the configuration, or leave --config out"}
	case f.config != "":
		var src []byte
		if src, err = readFile("--config", f.config, config.MaxFile); err == nil {
			file, err = config.Parse(f.config, src)
		}
	default:
		file, err = a.demoConfig(ctx, f)
	}
	if err != nil {
		return config.Built{}, usage(err)
	}
	built, err := file.Build(ctx, a.reg, config.BuildOptions{Env: a.getenv, Logger: log})
	if err != nil {
		return config.Built{}, usage(err)
	}
	return built, nil
}

// usage gives an error the exit code of something that can't be used, unless it
// has a code of its own.
func usage(err error) error {
	if codeOf(err) != exitFailed {
		return err
	}
	return &exitError{exitUsage, err}
}

// demoName is the definition that is served without a configuration.
const demoName = "demo"

// demoConfig is the configuration of the demo: the scripted agent on the embedded
// repository.
func (a *app) demoConfig(ctx context.Context, f hostFlags) (config.File, error) {
	dir, err := stateDir(f.data)
	if err != nil {
		return config.File{}, err
	}
	repo, err := keepDemoRepo(ctx, dir)
	if err != nil {
		return config.File{}, fmt.Errorf("demo repository: %w", err)
	}
	const harness = "scripted"
	h, err := a.harness(harness)
	if err != nil {
		return config.File{}, err
	}
	name, script := "demo/script.yaml", []byte(nil)
	if f.script == "" {
		script, err = demoFiles.ReadFile(name)
	} else {
		name = f.script
		script, err = readFile("--script", f.script, maxScript)
	}
	if err != nil {
		return config.File{}, err
	}
	section, err := json.Marshal(map[string]string{h.Script: string(script), h.Script + "Name": name})
	if err != nil {
		return config.File{}, err
	}
	return config.File{Sandboxes: map[string]config.Sandbox{demoName: {
		Harness: config.Choice{Name: harness, Section: section},
		Source:  config.Source{Local: repo},
	}}}, nil
}

// stateDir is where a server of this host keeps what it needs. The directory above
// the default one is shared with providers, whose sandboxes have users of their
// own, so it is made here, where it isn't there, in a way that lets them pass.
func stateDir(data string) (string, error) {
	if data != "" {
		return filepath.Abs(data)
	}
	dir, err := statedir.Default("serve")
	if err != nil {
		return "", err
	}
	return dir, os.MkdirAll(filepath.Dir(dir), 0o755)
}

// keepDemoRepo makes the demo's repository where a restarted server finds it again:
// its path is part of what a sandbox is.
func keepDemoRepo(ctx context.Context, dir string) (string, error) {
	sum := sha256.New()
	err := fs.WalkDir(demoFiles, "demo/repo", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := demoFiles.ReadFile(name)
		fmt.Fprintf(sum, "%s\x00%d\x00%s", name, len(b), b)
		return err
	})
	if err != nil {
		return "", err
	}
	repo := filepath.Join(dir, "demo-"+hex.EncodeToString(sum.Sum(nil)[:6]))
	if _, err := os.Stat(repo); err == nil {
		return repo, nil
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", err
	}
	tmp, err := os.MkdirTemp(dir, ".demo-")
	if err != nil {
		return "", err
	}
	err = demoRepo(ctx, tmp)
	if err == nil {
		err = os.Rename(tmp, repo)
		if _, there := os.Stat(repo); there == nil {
			err = nil // a server that started at the same time was faster
		}
	}
	return repo, errors.Join(err, os.RemoveAll(tmp))
}

// location is the store that the flags, else the configuration, else the default
// name.
func location(f hostFlags, configured config.Location) (config.Location, error) {
	switch {
	case f.data != "" && f.database != "":
		return config.Location{}, &exitError{exitUsage, errors.New("--data and --database name two stores: give one")}
	case f.database != "":
		scheme, _, ok := strings.Cut(f.database, "://")
		if !ok || scheme != "postgres" && scheme != "postgresql" {
			// What was given isn't shown: it may hold a password.
			return config.Location{}, &exitError{exitUsage, errors.New("--database is no PostgreSQL URL: write postgres://USER@HOST/NAME, or use --data DIR for a file")}
		}
		return config.Location{Kind: "postgres", Location: f.database}, nil
	case f.data == "" && configured.Kind != "":
		return configured, nil
	}
	dir, err := stateDir(f.data)
	return config.Location{Kind: "sqlite", Location: filepath.Join(dir, storeFile)}, err
}

// storeName is the store for a person, without what a URL holds beside the host.
func (h *host) storeName() string {
	if h.location.Kind == "sqlite" {
		return h.location.Location
	}
	return h.location.Kind
}
