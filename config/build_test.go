package config

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/aisandbox-go/aisandbox/chat"
	"github.com/aisandbox-go/aisandbox/harness/scripted"
	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/provider/local"
	"github.com/aisandbox-go/aisandbox/workspace"
)

// desk is a registry of parts that say what they were made with.
type desk struct {
	providers, harnesses []string // sections
	pings                []string
}

// boxOptions are those of the provider "box".
type boxOptions struct {
	Image       string
	ReadOnly    []string
	StopTimeout time.Duration
	UID, CPUs   int
	Volumes     []struct{ Source, Target string }
	Labels      map[string]string
	Privileged  bool
	Logger      *slog.Logger
}

// pinged is a provider that is asked whether it works.
type pinged struct {
	provider.Provider
	name string
	d    *desk
	err  error
}

func (p pinged) Unwrap() any { return p.Provider }

func (p pinged) Ping(context.Context) error {
	p.d.pings = append(p.d.pings, p.name)
	return p.err
}

func (d *desk) registry() Registry {
	made := func(name string, err error) Provider {
		return Provider{ReadOnly: "ReadOnly", New: func(section json.RawMessage, log *slog.Logger) (provider.Provider, error) {
			d.providers = append(d.providers, string(section))
			o := boxOptions{Logger: log}
			if err := Decode("provider "+name, section, &o); err != nil {
				return nil, err
			}
			return pinged{local.New(local.Options{}), name, d, err}, nil
		}}
	}
	return Registry{
		Providers: map[string]Provider{"box": made("box", nil), "broken": made("broken", errors.New("engine is down"))},
		Auto:      []string{"broken", "box"},
		Harnesses: map[string]Harness{
			"agent": {
				Executable: "executable",
				Find: func(context.Context) (Program, error) {
					return Program{Path: "/opt/agent/bin", Mounts: []string{"/opt/agent"}}, nil
				},
				New: func(section json.RawMessage) (chat.Adapter, error) {
					d.harnesses = append(d.harnesses, string(section))
					var s struct{ Model, Executable string }
					err := Decode("harness agent", section, &s)
					return scripted.Text(scripted.Options{}), err
				},
			},
			"scripted": {Script: "script", New: func(section json.RawMessage) (chat.Adapter, error) {
				d.harnesses = append(d.harnesses, string(section))
				var s struct{ Script, ScriptName string }
				if err := Decode("harness scripted", section, &s); err != nil {
					return nil, err
				}
				sc, err := scripted.Parse(s.ScriptName, []byte(s.Script))
				return scripted.Text(scripted.Options{Script: sc}), err
			}},
		},
		Stores: map[string]OpenStore{"sqlite": nil, "postgres": nil},
	}
}

func build(t *testing.T, d *desk, dir, in string, o BuildOptions) (Built, error) {
	t.Helper()
	f, err := Parse(filepath.Join(dir, "f.yaml"), []byte(in))
	if err != nil {
		t.Fatal(err)
	}
	return f.Build(t.Context(), d.registry(), o)
}

func TestBuild(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "key"), []byte("file-key-0123456789\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "s.yaml"), []byte("steps:\n- say: hello\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	env := map[string]string{"TOKEN": "token-value", "KEY": "env-key-0123456789", "DB": "postgres://u:p@h/d"}
	d := &desk{}
	b, err := build(t, d, dir, `
store: {postgres: {env: DB}}
auth: {keys: [{env: KEY, tenant: a}, {file: key, user: u}]}
retention: {events: never}
sandboxes:
  one:
    harness: agent
    source: {git: ./upstream, depth: full, token: TOKEN}
    setup: [a, {parallel: [b, c]}]
    secrets: [TOKEN]
    env: {N: 1}
    files: {b.md: B, a.md: A}
    queueDepth: 2
    timeout: 1m
  two:
    provider: {box: {image: x, readOnly: [/opt/tools], stopTimeout: 2s, labels: {env: prod}, volumes: [{source: v, target: /v}]}}
    harness: {scripted: {scriptFile: s.yaml}}
    source: {local: repo}
    keepFor: 1h
    busy: supersede
`, BuildOptions{Env: func(n string) string { return env[n] }})
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]AuthKey{{"env-key-0123456789", "a", ""}, {"file-key-0123456789", "", "u"}}, b.Keys); d != "" {
		t.Error(d)
	}
	if d := cmp.Diff(Location{"postgres", "postgres://u:p@h/d"}, b.Store); d != "" {
		t.Error(d)
	}
	if b.Retention.Events >= 0 || b.Retention.Runs != 0 {
		t.Errorf("retention %v", b.Retention)
	}
	// The first provider of Auto doesn't work; the one that does is shown the agent's
	// program, without losing what the file says.
	if d := cmp.Diff([]string{"broken", "box"}, d.pings); d != "" {
		t.Error(d)
	}
	wantProviders := []string{
		`{"ReadOnly":["/opt/agent"]}`, `{"ReadOnly":["/opt/agent"]}`,
		`{"image":"x","readOnly":["/opt/tools"],"stopTimeout":"2s","labels":{"env":"prod"},"volumes":[{"source":"v","target":"/v"}]}`,
	}
	if d := cmp.Diff(wantProviders, d.providers); d != "" {
		t.Error(d)
	}
	if d := cmp.Diff([]string{`{"executable":"/opt/agent/bin"}`, `{"script":"steps:\n- say: hello\n","scriptName":"s.yaml"}`}, d.harnesses); d != "" {
		t.Error(d)
	}
	one, two := b.Definitions["one"], b.Definitions["two"]
	if one.Provider != "box" || one.QueueDepth != 2 || one.Timeout != time.Minute || one.KeepFor != 7*24*time.Hour || two.KeepFor != time.Hour || two.Busy != BusySupersede {
		t.Errorf("one %+v, two %+v", one, two)
	}
	w := one.Def.Definition().Workspace
	if g, ok := w.Source.(workspace.Git); !ok || g.URL != filepath.Join(dir, "upstream") || g.Depth != workspace.Full || g.Auth.Token == nil {
		t.Errorf("source %#v", w.Source)
	}
	if d := cmp.Diff(workspace.Plan{{Commands: []string{"a"}}, {Commands: []string{"b", "c"}, Parallel: true}}, w.Setup); d != "" {
		t.Error(d)
	}
	if d := cmp.Diff([]workspace.File{{Path: "a.md", Content: "A"}, {Path: "b.md", Content: "B"}}, w.Files()); d != "" {
		t.Error(d)
	}
	if w.Env["N"] != "1" {
		t.Errorf("env %v", w.Env)
	}
	if l, ok := two.Def.Definition().Workspace.Source.(workspace.Local); !ok || l.Path != filepath.Join(dir, "repo") {
		t.Errorf("source %#v", two.Def.Definition().Workspace.Source)
	}
	if a, err := two.Adapter(); err != nil || a.Name() == "" {
		t.Errorf("adapter %v, %v", a, err)
	}
	if len(b.Warnings) != 2 || !strings.Contains(b.Warnings[0], "no isolation") {
		t.Errorf("warnings %q", b.Warnings)
	}
}

func TestBuildErrors(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{"empty": "\n", "short": "short\n", "long": strings.Repeat("x", maxValue+1)} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	const ok = "sandboxes:\n  a: {harness: agent}\n"
	const head = "sandboxes:\n  a:\n    harness: agent\n"
	for _, tc := range []struct{ name, in, want string }{
		{"harness", "sandboxes:\n  a: {harness: nobody}\n", `2:7: sandboxes.a.harness: "nobody" is no agent that is known here: use agent or scripted`},
		{"provider", head + "    provider: nowhere\n", `4:5: sandboxes.a.provider: "nowhere" is no provider that is known here: use auto, box or broken`},
		{"auto with options", head + "    provider: {auto: {image: x}}\n", "4:5: sandboxes.a.provider: auto takes no options"},
		{"option", head + "    provider:\n      box: {imag: x}\n", "5:13: sandboxes.a.provider.box.imag: is no key that is known here; use cpus, image, labels, privileged, readOnly, stopTimeout, uid or volumes"},
		{"option that only a program has", head + "    provider: {box: {logger: {}}}\n", "4:22: sandboxes.a.provider.box.logger: is no key"},
		{"option twice", head + "    provider: {box: {image: x, Image: y}}\n", "4:22: sandboxes.a.provider.box.image: is the same as Image"},
		{"kind of an option", head + "    provider: {box: {image: 1}}\n", "4:22: sandboxes.a.provider.box.image: is a number; write text"},
		{"range of an option", head + "    provider: {box: {uid: 1.5}}\n", "4:22: sandboxes.a.provider.box.uid: number 1.5 can't be a int"},
		{"time of an option", head + "    provider: {box: {stopTimeout: 5}}\n", "4:22: sandboxes.a.provider.box.stopTimeout: is a number; write a time"},
		{"item of an option", head + "    provider:\n      box:\n        volumes:\n        - {source: a}\n        - {sorce: b}\n", "8:12: sandboxes.a.provider.box.volumes[1].sorce: is no key"},
		{"read-only paths", head + "    provider: {box: {readOnly: x}}\n", "4:22: sandboxes.a.provider.box.readOnly: is text; write a list"},
		{"agent's option", "sandboxes:\n  a:\n    harness: {agent: {modle: x}}\n", "3:23: sandboxes.a.harness.agent.modle: is no key that is known here; use executable or model"},
		{"no script", "sandboxes:\n  a: {harness: scripted}\n", "2:7: sandboxes.a.harness: needs script, or scriptFile"},
		{"script file", "sandboxes:\n  a:\n    harness: {scripted: {scriptFile: none.yaml}}\n", "3:26: sandboxes.a.harness.scripted.scriptFile: open "},
		{"two scripts", "sandboxes:\n  a:\n    harness: {scripted: {script: x, scriptFile: y}}\n", "3:37: sandboxes.a.harness.scripted.scriptFile: is given beside script"},
		{"script", "sandboxes:\n  a:\n    harness: {scripted: {script: 'steps: [{dance: now}]'}}\n", "3:15: sandboxes.a.harness.scripted: "},
		{"secret", head + "    secrets:\n    - NOT_SET\n", "5:7: sandboxes.a.secrets[0]: environment variable NOT_SET is not set, or empty: export it first"},
		{"url", head + "    source: {git: 'https://u:p@h/r'}\n", "4:14: sandboxes.a.source.git: "},
		{"ref", head + "    source: {git: a/b, ref: 'x y'}\n", `4:24: sandboxes.a.source.ref: "x y" can't be used: use the name of a branch`},
		{"depth", head + "    source: {git: a/b, depth: 0}\n", `4:24: sandboxes.a.source.depth: "0" can't be used: use a number of commits`},
		{"step", head + "    setup:\n    - ok\n    - '  '\n", `6:7: sandboxes.a.setup[1].serial[0]: "  " can't be used: is empty`},
		{"step in a group", head + "    setup:\n    - parallel:\n      - ok\n      - ' '\n", `7:9: sandboxes.a.setup[0].parallel[1]: " " can't be used: is empty`},
		{"file", head + "    files:\n      a.md: x\n      ../b.md: y\n", `6:7: sandboxes.a.files.../b.md: "../b.md" can't be used`},
		{"env and secret", head + "    env: {SET: x}\n    secrets: [SET]\n", `4:11: sandboxes.a.env.SET: can't be used: is a secret, too`},
		{"key", ok + "auth: {keys: [{env: NOT_SET}]}\n", "3:16: auth.keys[0].env: environment variable NOT_SET is not set"},
		{"key file", ok + "auth: {keys: [{file: none}]}\n", "3:16: auth.keys[0].file: open "},
		{"empty key file", ok + "auth: {keys: [{file: empty}]}\n", "3:16: auth.keys[0].file: the file is empty"},
		{"long key file", ok + "auth: {keys: [{file: long}]}\n", "3:16: auth.keys[0].file: "},
		{"short key", ok + "auth: {keys: [{file: short}]}\n", "3:16: auth.keys[0]: the key can't be used: make one of at least 16"},
		{"same key", ok + "auth: {keys: [{env: SET}, {env: SET}]}\n", "3:28: auth.keys[1]: is the same key as auth.keys[0]"},
		{"host path", head + "    source: {local: \"a\\nb\"}\n", "4:14: sandboxes.a.source.local: "},
		{"database", ok + "store: {postgres: {env: NOT_SET}}\n", "3:20: store.postgres.env: environment variable NOT_SET is not set"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := build(t, &desk{}, dir, tc.in, BuildOptions{Env: func(n string) string {
				return map[string]string{"SET": "a-long-enough-secret"}[n]
			}})
			var fe *FileError
			if !errors.As(err, &fe) {
				t.Fatalf("got %v", err)
			}
			got := strings.TrimPrefix(err.Error(), filepath.Join(dir, "f.yaml")+":")
			if !strings.HasPrefix(got, tc.want) {
				t.Errorf("got  %s\nwant %s", got, tc.want)
			}
			if strings.Contains(got, "a-long-enough") {
				t.Error("the error shows a secret")
			}
		})
	}
}

func TestBuildNothingWorks(t *testing.T) {
	d := &desk{}
	reg := d.registry()
	reg.Auto = []string{"broken"}
	f, err := Parse("f", []byte("sandboxes: {a: {harness: agent}}"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Build(t.Context(), reg, BuildOptions{}); err == nil || !strings.Contains(err.Error(), "sandboxes.a: no provider") && !strings.Contains(err.Error(), "engine is down") {
		t.Error(err)
	}
}

// A dry build needs nothing of this host, and still finds what is wrong in the file.
func TestBuildDry(t *testing.T) {
	d := &desk{}
	in := "auth: {keys: [{env: A}, {file: b}]}\nstore: {postgres: {env: C}}\nsandboxes: {a: {harness: agent, secrets: [S]}}\n"
	if _, err := build(t, d, t.TempDir(), in, BuildOptions{Dry: true}); err != nil {
		t.Error(err)
	}
	if len(d.pings) > 0 || d.harnesses[0] != "{}" {
		t.Errorf("pings %q, harnesses %q", d.pings, d.harnesses)
	}
	_, err := build(t, d, t.TempDir(), "sandboxes: {a: {harness: agent, provider: {box: {imag: x}}}}", BuildOptions{Dry: true})
	if err == nil {
		t.Error("a wrong option was not found")
	}
	_, err = build(t, d, t.TempDir(), "sandboxes: {a: {harness: {scripted: {scriptFile: none}}}}", BuildOptions{Dry: true})
	if !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("got %v", err)
	}
}
