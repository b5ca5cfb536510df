package config

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/aisandbox-go/aisandbox/chat"
	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/sandbox"
	"github.com/aisandbox-go/aisandbox/secret"
	"github.com/aisandbox-go/aisandbox/store"
	"github.com/aisandbox-go/aisandbox/workspace"
)

// BuildOptions belong to [File.Build].
type BuildOptions struct {
	// Env is the environment: secrets, keys and URLs come from it. Nil: nothing is set.
	Env func(name string) string

	// Dry looks at nothing but the file and those that belong to it: no value is
	// taken from the environment or a key file, no provider is asked whether it
	// works and no agent looked for. What results can't be run.
	Dry bool

	Logger *slog.Logger // given to the providers; nil discards
}

// Built is a configuration that can be served.
type Built struct {
	Addr        string // empty: the default
	Definitions map[string]Definition
	Store       Location // Kind empty: the default
	Keys        []AuthKey
	Hosts       []string
	Origins     []string
	Limits      Limits
	Retention   store.Retention
	Warnings    []string // for a person
}

// Definition is a sandbox and the agent in it. It may be used concurrently.
type Definition struct {
	Def        *sandbox.Def
	Adapter    func() (chat.Adapter, error) // a new one
	Provider   string                       // what "auto" came to
	Harness    string
	Busy       Busy // empty: BusyQueue
	QueueDepth int  // 0: the server's default
	KeepFor    time.Duration
	Timeout    time.Duration // 0: none
}

// Location is where a store is, for [Registry.Stores].
type Location struct{ Kind, Location string }

// AuthKey is a bearer key. It must not be logged.
type AuthKey struct{ Token, Tenant, User string }

// pingTime bounds the question to one provider whether it works.
const pingTime = 15 * time.Second

// Build makes definitions of the file with what the registry offers. Ctx bounds
// the search for programs and providers. Faults are reported as by [Parse].
func (f File) Build(ctx context.Context, reg Registry, o BuildOptions) (Built, error) {
	if o.Env == nil {
		o.Env = func(string) string { return "" }
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	s := &source{name: "config"}
	if f.src != nil {
		s = &source{name: f.src.name, pos: f.src.pos}
	}
	b := &builder{reg: reg, o: o, src: s, dir: filepath.Dir(s.name)}
	out := Built{
		Addr: f.Addr, Hosts: f.Hosts, Origins: f.Origins, Limits: f.Limits,
		Definitions: map[string]Definition{},
		Retention:   store.Retention{Events: time.Duration(f.Retention.Events), Runs: time.Duration(f.Retention.Runs)},
	}
	for _, name := range slices.Sorted(maps.Keys(f.Sandboxes)) {
		if d, ok := b.definition(ctx, name, f.Sandboxes[name]); ok {
			out.Definitions[name] = d
		}
	}
	for i, k := range f.Auth.Keys {
		p := fmt.Sprintf("auth.keys[%d]", i)
		token, ok := b.value(p, k.Env, k.File)
		if !ok || o.Dry {
			continue
		}
		if j := slices.IndexFunc(out.Keys, func(o AuthKey) bool { return o.Token == token }); j >= 0 {
			s.fail(p, fmt.Sprintf("is the same key as auth.keys[%d]", j), "give each caller a key of its own")
		}
		if len(token) < 16 || strings.ContainsFunc(token, func(c rune) bool { return c <= ' ' || c > '~' }) {
			s.fail(p, "the key can't be used", "make one of at least 16 printable ASCII characters, such as with: openssl rand -hex 32")
		}
		out.Keys = append(out.Keys, AuthKey{token, k.Tenant, k.User})
	}
	switch {
	case f.Store.SQLite != nil:
		out.Store = Location{"sqlite", b.path(f.Store.SQLite.Path)}
	case f.Store.Postgres != nil:
		out.Store.Kind = "postgres"
		out.Store.Location, _ = b.value("store.postgres", f.Store.Postgres.Env, f.Store.Postgres.File)
	}
	if k := out.Store.Kind; k != "" {
		if _, ok := reg.Stores[k]; !ok {
			s.fail("store."+k, "is no store that is known here", "use "+orList(slices.Sorted(maps.Keys(reg.Stores))))
		}
	}
	out.Warnings = b.warnings
	if err := s.err(); err != nil {
		return Built{}, err
	}
	return out, nil
}

// builder is one Build.
type builder struct {
	reg      Registry
	o        BuildOptions
	src      *source
	dir      string
	warnings []string
}

// path is a path of the file, which is relative to it.
func (b *builder) path(p string) string {
	if filepath.IsAbs(p) {
		return p
	}
	return filepath.Join(b.dir, p)
}

// maxValue bounds a file that holds one value.
const maxValue = 64 << 10

// value reads what isn't written in the configuration itself.
func (b *builder) value(path, env, file string) (string, bool) {
	if b.o.Dry {
		return "", true
	}
	if env != "" {
		v := b.o.Env(env)
		if v == "" {
			b.src.fail(join(path, "env"), fmt.Sprintf("environment variable %s is not set, or empty", env), "export it first")
		}
		return v, v != ""
	}
	v, err := readFile(b.path(file), maxValue)
	if err != nil {
		b.src.fail(join(path, "file"), err.Error(), "").Err = err
		return "", false
	}
	v = strings.TrimRight(v, "\r\n")
	if v == "" {
		b.src.fail(join(path, "file"), "the file is empty", "put the value in it, on one line")
	}
	return v, v != ""
}

func readFile(name string, most int64) (string, error) {
	f, err := os.Open(name)
	if err != nil {
		return "", err
	}
	defer func() { _ = f.Close() }()
	v, err := io.ReadAll(io.LimitReader(f, most+1))
	if err != nil {
		return "", err
	}
	if int64(len(v)) > most {
		return "", fmt.Errorf("%s is longer than %d bytes", name, most)
	}
	return string(v), nil
}

func (b *builder) definition(ctx context.Context, name string, sb Sandbox) (Definition, bool) {
	p := join("sandboxes", name)
	before := len(b.src.errs)
	h, ok := b.reg.Harnesses[sb.Harness.Name]
	if !ok {
		b.src.fail(join(p, "harness"), fmt.Sprintf("%q is no agent that is known here", clip(sb.Harness.Name)), "use "+orList(slices.Sorted(maps.Keys(b.reg.Harnesses))))
	}
	set := b.secrets(p, sb.Secrets)
	var prog Program
	if h.Find != nil && !b.o.Dry {
		// One that isn't here may be in the sandbox.
		if found, err := h.Find(ctx); err == nil {
			prog = found
		}
	}
	prov, provName := b.provider(ctx, p, sb.Provider, prog.Mounts)
	var adapter func() (chat.Adapter, error)
	if ok {
		adapter = b.adapter(p, sb.Harness, h, prog, prov)
	}
	if len(b.src.errs) > before {
		return Definition{}, false
	}
	def, err := sandbox.Define(b.define(name, sb, prov, set))
	if err != nil {
		b.definitionFaults(p, sb, err)
	}
	if len(b.src.errs) > before {
		return Definition{}, false
	}
	if prov.Traits().Isolation == provider.IsolationNone {
		b.warnings = append(b.warnings, fmt.Sprintf("sandbox %s has no isolation (provider %s): its agents work on this host with the server's rights", name, provName))
	}
	keep := time.Duration(cmp.Or(sb.KeepFor, DefaultKeepFor))
	return Definition{
		Def: def, Adapter: adapter, Provider: provName, Harness: sb.Harness.Name,
		Busy: sb.Busy, QueueDepth: sb.QueueDepth, KeepFor: keep, Timeout: time.Duration(sb.Timeout),
	}, true
}

func (b *builder) secrets(p string, names []string) *secret.Set {
	vals := map[string]string{}
	for i, n := range names {
		v := b.o.Env(n)
		if b.o.Dry {
			v = "not taken from the environment"
		}
		if v == "" {
			b.src.fail(fmt.Sprintf("%s.secrets[%d]", p, i), fmt.Sprintf("environment variable %s is not set, or empty", n), "export it first, or remove it")
			continue
		}
		vals[n] = v
	}
	set, err := secret.NewSet(vals)
	if err != nil {
		at := join(p, "secrets")
		var ne *secret.NameError
		if errors.As(err, &ne) {
			at = fmt.Sprintf("%s[%d]", at, slices.Index(names, ne.Name))
		}
		b.src.fail(at, err.Error(), "").Err = err
	}
	return set
}

// provider makes the provider of a sandbox. Mounts are host paths to show inside
// where the backend is on the host's files.
func (b *builder) provider(ctx context.Context, p string, c Choice, mounts []string) (provider.Provider, string) {
	at := join(p, "provider")
	if c.Name != "" && c.Name != "auto" {
		o, ok := b.reg.Providers[c.Name]
		if !ok {
			b.src.fail(at, fmt.Sprintf("%q is no provider that is known here", clip(c.Name)), "use auto, "+orList(slices.Sorted(maps.Keys(b.reg.Providers))))
			return nil, ""
		}
		pr, err := o.make(c.Section, mounts, b.o.Logger)
		if err != nil {
			b.sectionFault(join(at, c.Name), err)
		}
		return pr, c.Name
	}
	if c.Section != nil {
		b.src.fail(at, "auto takes no options", "name the provider that they are for")
		return nil, ""
	}
	var errs []error
	for _, name := range b.reg.Auto {
		pr, err := b.reg.Providers[name].make(nil, mounts, b.o.Logger)
		if err == nil && !b.o.Dry {
			if pg, ok := provider.As[provider.Pinger](pr); ok {
				pctx, stop := context.WithTimeout(ctx, pingTime)
				err = pg.Ping(pctx)
				stop()
			}
		}
		if err == nil {
			return pr, name
		}
		errs = append(errs, err)
	}
	err := errors.Join(errs...)
	b.src.fail(at, fmt.Sprintf("no provider works here: %v", err), "").Err = err
	return nil, ""
}

// make makes the backend from its section, with host paths that it must show.
func (o Provider) make(section json.RawMessage, mounts []string, log *slog.Logger) (provider.Provider, error) {
	if o.ReadOnly != "" && len(mounts) > 0 {
		m, err := object(section)
		if err != nil {
			return nil, err
		}
		key := keyOf(m, o.ReadOnly)
		var paths []string
		if raw, ok := m[key]; ok {
			if err := json.Unmarshal(raw, &paths); err != nil {
				return o.New(section, log) // which says what is wrong with it
			}
		}
		if m[key], err = json.Marshal(append(paths, mounts...)); err != nil {
			return nil, err
		}
		if section, err = json.Marshal(m); err != nil {
			return nil, err
		}
	}
	return o.New(section, log)
}

func object(section json.RawMessage) (map[string]json.RawMessage, error) {
	m := map[string]json.RawMessage{}
	if len(section) == 0 {
		return m, nil
	}
	return m, json.Unmarshal(section, &m)
}

// keyOf is how a section spells a key; the key itself where it has none.
func keyOf(m map[string]json.RawMessage, key string) string {
	for k := range m {
		if strings.EqualFold(k, key) {
			return k
		}
	}
	return key
}

// adapter makes the factory of a sandbox's agent and tries it.
func (b *builder) adapter(p string, c Choice, h Harness, prog Program, prov provider.Provider) func() (chat.Adapter, error) {
	at := join(p, "harness")
	if len(c.Section) > 0 {
		at = join(at, c.Name)
	}
	section, err := b.harnessSection(at, c, h, prog, prov)
	if err == nil {
		_, err = h.New(section)
	}
	if err != nil {
		b.sectionFault(at, err)
	}
	return func() (chat.Adapter, error) { return h.New(section) }
}

// harnessSection is the section of an agent with what only this host knows: the
// text of its script, and where its program is.
func (b *builder) harnessSection(at string, c Choice, h Harness, prog Program, prov provider.Provider) (json.RawMessage, error) {
	m, err := object(c.Section)
	if err != nil {
		return nil, err
	}
	set := func(key, v string) {
		m[keyOf(m, key)], err = json.Marshal(v)
	}
	if h.Script != "" {
		file := keyOf(m, h.Script+"File")
		_, inline := m[keyOf(m, h.Script)]
		raw, named := m[file]
		switch {
		case named && inline:
			return nil, &SectionError{"harness " + c.Name, file, fmt.Errorf("is given beside %s; remove one", h.Script)}
		case !named && !inline:
			return nil, &SectionError{"harness " + c.Name, "", fmt.Errorf("needs %s, or %sFile with the name of a file", h.Script, h.Script)}
		case named:
			var name string
			if err := json.Unmarshal(raw, &name); err != nil {
				return nil, &SectionError{"harness " + c.Name, file, errors.New("is no text; write the name of a file")}
			}
			text, err := readFile(b.path(name), MaxFile)
			if err != nil {
				return nil, &SectionError{"harness " + c.Name, file, err}
			}
			delete(m, file)
			set(h.Script, text)
			set(h.Script+"Name", name)
		}
	}
	if h.Executable != "" && prog.Path != "" && prov != nil && prov.Traits().SharedKernel {
		if _, ok := m[keyOf(m, h.Executable)]; !ok {
			set(h.Executable, prog.Path) // the sandbox sees the host's file
		}
	}
	if err != nil {
		return nil, err
	}
	return json.Marshal(m)
}

// sectionFault reports what a factory says of its section.
func (b *builder) sectionFault(at string, err error) {
	var se *SectionError
	if !errors.As(err, &se) {
		b.src.fail(at, err.Error(), "").Err = err
		return
	}
	if se.Field != "" {
		at = join(at, se.Field)
		if _, ok := b.src.pos[at]; !ok {
			for p := range b.src.pos {
				if strings.EqualFold(p, at) {
					at = p // as the file spells it
				}
			}
		}
	}
	b.src.fail(at, se.Err.Error(), "").Err = err
}

func (b *builder) define(name string, sb Sandbox, prov provider.Provider, set *secret.Set) sandbox.Definition {
	w := workspace.Workspace{
		Scripts: sb.Scripts, Instructions: sb.Instructions, Secrets: set,
		Env: map[string]string{},
	}
	for k, v := range sb.Env {
		w.Env[k] = string(v)
	}
	for _, st := range sb.Setup {
		w.Setup = append(w.Setup, workspace.Group{Commands: append(slices.Clone(st.Serial), st.Parallel...), Parallel: len(st.Parallel) > 0})
	}
	for _, path := range slices.Sorted(maps.Keys(sb.Files)) {
		w.Skills = append(w.Skills, workspace.FileSkill(path, sb.Files[path]))
	}
	switch src := sb.Source; {
	case src.Local != "":
		w.Source = workspace.Local{Path: b.path(src.Local), Ref: src.Ref}
	case src.Git != "":
		g := workspace.Git{URL: workspace.ExpandRepo(src.Git), Ref: src.Ref, Depth: workspace.Depth(src.Depth)}
		if strings.HasPrefix(src.Git, ".") {
			g.URL = b.path(src.Git)
		}
		g.Auth.Username = src.Username
		if src.Token != "" {
			g.Auth.Token = set.Ref(src.Token)
		}
		w.Source = g
	}
	return sandbox.Definition{
		ID: name, Provider: prov, Workspace: w, Policy: sb.Policy, Network: sb.Network, FileEvents: sb.FileEvents,
		Lifecycle: sandbox.Lifecycle{Reuse: sb.Reuse, Snapshot: sb.Snapshot, OnComplete: sb.OnComplete, SnapshotMaxAge: time.Duration(sb.SnapshotMaxAge)},
	}
}

// definitionFaults reports what Define says, at the place in the file.
func (b *builder) definitionFaults(p string, sb Sandbox, err error) {
	if errs, ok := err.(interface{ Unwrap() []error }); ok {
		for _, e := range errs.Unwrap() {
			b.definitionFaults(p, sb, e)
		}
		return
	}
	field, value, cure := "", "", err.Error()
	var de *sandbox.DefinitionError
	var we *workspace.FieldError
	switch {
	case errors.As(err, &de):
		field, value, cure = strings.TrimPrefix(de.Field, "lifecycle."), de.Value, de.Cure
	case errors.As(err, &we):
		field, value, cure = workspaceField(sb, we.Field), we.Value, we.Cure
	}
	msg := "can't be used"
	if value != "" {
		msg = fmt.Sprintf("%q can't be used", clip(value))
	}
	b.src.fail(join(p, field), msg, cure).Err = err
}

var (
	setupField = regexp.MustCompile(`^setup\[(\d+)\]\[(\d+)\]$`)
	skillField = regexp.MustCompile(`^skills\[(\d+)\]`)
)

// workspaceField is the name that a field of a workspace has in the file.
func workspaceField(sb Sandbox, field string) string {
	renamed := map[string]string{
		"source.url": "source.git", "source.path": "source.local",
		"source.auth.token": "source.token", "source.auth.username": "source.username",
	}
	if n, ok := renamed[field]; ok {
		return n
	}
	if m := setupField.FindStringSubmatch(field); m != nil {
		if i, err := strconv.Atoi(m[1]); err == nil && i < len(sb.Setup) {
			kind := "serial"
			if len(sb.Setup[i].Parallel) > 0 {
				kind = "parallel"
			}
			return fmt.Sprintf("setup[%d].%s[%s]", i, kind, m[2]) // a plain text is found as setup[i]
		}
	}
	if m := skillField.FindStringSubmatch(field); m != nil {
		files := slices.Sorted(maps.Keys(sb.Files))
		if i, err := strconv.Atoi(m[1]); err == nil && i < len(files) {
			return "files." + files[i]
		}
	}
	return field
}
