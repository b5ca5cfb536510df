package config

import (
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/aisandbox-go/aisandbox/policy"
)

func TestParse(t *testing.T) {
	data, err := os.ReadFile("testdata/full.yaml")
	if err != nil {
		t.Fatal(err)
	}
	f, err := Parse("full.yaml", data)
	if err != nil {
		t.Fatal(err)
	}
	const day = 24 * time.Hour
	want := File{
		Addr: "0.0.0.0:8080", Hosts: []string{"agents.example.com"}, Origins: []string{"https://app.example.com", "http://localhost:3000"},
		Store:     Store{Postgres: &Postgres{Env: "DATABASE_URL"}},
		Auth:      Auth{Keys: []Key{{Tenant: "acme", User: "ci", Env: "ACME_KEY"}, {Tenant: "other", File: "keys/other"}}},
		Limits:    Limits{Body: 4 << 20, Header: 16384, Runs: 100, Readers: 1000, BodyTime: Duration(10 * time.Second), WriteTime: Duration(30 * time.Second)},
		Retention: Retention{Events: Age(14 * day), Runs: -1},
		Sandboxes: map[string]Sandbox{
			"fixer": {
				Provider:     Choice{"docker", []byte(`{"image":"node:22","memory":2147483648,"cpus":1.5,"stopTimeout":"5s"}`)},
				Harness:      Choice{"claude-code", []byte(`{"model":"sonnet"}`)},
				Source:       Source{Git: "owner/name", Ref: "main", Depth: "50", Token: "GH_TOKEN", Username: "bot"},
				Setup:        []Step{{Serial: []string{"corepack enable"}}, {Serial: []string{"pnpm install"}}, {Parallel: []string{"pnpm build", "pnpm typecheck"}}},
				Env:          map[string]Scalar{"CI": "true", "PORT": "8080", "RATE": "1.50", "NAME": "text"},
				Secrets:      []string{"GH_TOKEN"},
				Instructions: "Keep changes small.\n",
				Scripts:      map[string]string{"test": "pnpm test"},
				Files:        map[string]string{"notes/a.md": "hello\n"},
				Policy: &policy.Policy{
					Commands:     policy.Commands{Allow: []string{"git *"}, Ask: []string{"npm *"}, Deny: []string{"rm -rf *"}},
					Capabilities: policy.Capabilities{FileWrite: policy.Allow, Network: policy.Deny},
					Default:      policy.Ask,
				},
				Network: "host", Reuse: "thread", Snapshot: "after-setup", SnapshotMaxAge: Duration(7 * day), OnComplete: "keep",
				KeepFor: Duration(12 * time.Hour), FileEvents: "diff", Busy: BusyQueue, QueueDepth: 3, Timeout: Duration(45 * time.Minute),
			},
			"small": {Harness: Choice{Name: "claude-code"}, Source: Source{Local: "../repo", Ref: "main"}, Reuse: "run", Busy: BusyReject},
		},
	}
	if d := cmp.Diff(want, f, cmpopts.IgnoreUnexported(File{})); d != "" {
		t.Error(d)
	}
}

func TestParseErrors(t *testing.T) {
	const ok = "sandboxes:\n  a: {harness: x}\n"
	for _, tc := range []struct{ name, in, want string }{
		{"empty", "", "f:1:1: is empty: "},
		{"syntax", "sandboxes: [", "f:1:12: "},
		{"not a mapping", "- a\n", "f:1:1: is a list: write a mapping"},
		{"no sandboxes", "addr: 127.0.0.1:1\n", "f:1:1: sandboxes is missing: add it"},
		{"none", "sandboxes: {}\n", "f:1:1: sandboxes: is empty: "},
		{"unknown key", ok + "adr: x\n", "f:3:1: adr: is no key that is known here: use addr, auth, "},
		{"twice", ok + "addr: 127.0.0.1:1\naddr: 127.0.0.1:2\n", "f:4:1: "},
		{"no value", ok + "addr:\n", "f:3:1: addr: has no value: "},
		{"unknown key inside", "sandboxes:\n  a:\n    harness: x\n    provder: y\n", "f:4:5: sandboxes.a.provder: is no key"},
		{"no harness", "sandboxes:\n  a:\n    busy: queue\n", "f:2:3: sandboxes.a: harness is missing: add it"},
		{"name", "sandboxes:\n  a/b: {harness: x}\n", "f:2:3: sandboxes.a/b: is no name: use"},
		{"addr", ok + "addr: 8080\n", "f:3:1: addr: is a number: quote it"},
		{"addr port", ok + "addr: localhost\n", `f:3:1: addr: "localhost" is no address: write host:port`},
		{"enum", "sandboxes:\n  a:\n    harness: x\n    busy: wait\n", `f:4:5: sandboxes.a.busy: is "wait": use queue, reject or supersede`},
		{"network", "sandboxes:\n  a: {harness: x, network: mars}\n", `f:2:19: sandboxes.a.network: is "mars": use none or host`},
		{"policy", "sandboxes:\n  a:\n    harness: x\n    policy: {capabilities: {network: maybe}}\n", `f:4:29: sandboxes.a.policy.capabilities.network: is "maybe": use allow, ask or deny`},
		{"two providers", "sandboxes:\n  a:\n    harness: x\n    provider: {local: {}, bwrap: {}}\n", "f:4:5: sandboxes.a.provider: names 2 things: write NAME, or"},
		{"options", "sandboxes:\n  a:\n    harness: {x: 1}\n", "f:3:15: sandboxes.a.harness.x: is a number: write a mapping of its options"},
		{"duration", "sandboxes:\n  a: {harness: x, timeout: soon}\n", `f:2:19: sandboxes.a.timeout: "soon" is no time above zero: write`},
		{"duration without unit", "sandboxes:\n  a: {harness: x, timeout: 90}\n", "f:2:19: sandboxes.a.timeout: is a number: write"},
		{"duration zero", "sandboxes:\n  a: {harness: x, keepFor: 0s}\n", `f:2:19: sandboxes.a.keepFor: "0s" is no time above zero`},
		{"never", "sandboxes:\n  a: {harness: x, keepFor: never}\n", `f:2:19: sandboxes.a.keepFor: "never" is no`},
		{"age", ok + "retention:\n  events: forever\n", `f:4:3: retention.events: "forever" is no time above zero: write a number with its unit: 90s, 45m, 12h, 7d or 2w, or never`},
		{"size", ok + "limits: {body: 8MB}\n", "f:3:10: limits.body: is no number of bytes"},
		{"size zero", ok + "limits: {body: 0}\n", "f:3:10: limits.body: is no number of bytes"},
		{"size quoted", ok + "limits: {body: '5'}\n", "f:3:10: limits.body: is no number of bytes"},
		{"size huge", ok + "limits: {body: 65GiB}\n", "f:3:10: limits.body: is no number of bytes"},
		{"count", ok + "limits: {runs: -1}\n", "f:3:10: limits.runs: is -1: write a whole number from 1"},
		{"count fraction", ok + "limits: {runs: 1.5}\n", "f:3:10: limits.runs: is 1.5: write a whole number from 1"},
		{"two sources", "sandboxes:\n  a:\n    harness: x\n    source: {git: a/b, local: c}\n", "f:4:5: sandboxes.a.source: names two sources"},
		{"no source", "sandboxes:\n  a:\n    harness: x\n    source: {ref: main}\n", "f:4:5: sandboxes.a.source: names no source"},
		{"empty source", "sandboxes:\n  a:\n    harness: x\n    source: {}\n", "f:4:5: sandboxes.a.source: names no source"},
		{"depth of a directory", "sandboxes:\n  a:\n    harness: x\n    source: {local: c, depth: 3}\n", "f:4:24: sandboxes.a.source.depth: is for git"},
		{"token", "sandboxes:\n  a:\n    harness: x\n    source: {git: a/b, token: T}\n", "f:4:24: sandboxes.a.source.token: is not among secrets"},
		{"secret value", "sandboxes:\n  a:\n    harness: x\n    secrets:\n    - A=my-password\n", "f:5:7: sandboxes.a.secrets[0]: is no name of an environment variable: write the name, not the value"},
		{"secret twice", "sandboxes:\n  a: {harness: x, secrets: [A, A]}\n", `f:2:32: sandboxes.a.secrets[1]: "A" is there twice`},
		{"step", "sandboxes:\n  a:\n    harness: x\n    setup:\n    - 1\n", "f:5:7: sandboxes.a.setup[0]: is a number: write a command, or serial"},
		{"step with both", "sandboxes:\n  a:\n    harness: x\n    setup:\n    - {serial: [a], parallel: [b]}\n", "f:5:8: sandboxes.a.setup[0]: is no group: write serial"},
		{"step without commands", "sandboxes:\n  a:\n    harness: x\n    setup:\n    - ok\n    - serial: []\n", "f:6:7: sandboxes.a.setup[1]: has no commands"},
		{"reject with a queue", "sandboxes:\n  a:\n    harness: x\n    busy: reject\n    queueDepth: 3\n", "f:5:5: sandboxes.a.queueDepth: has no effect"},
		{"keep what is destroyed", "sandboxes:\n  a:\n    harness: x\n    onComplete: destroy\n    keepFor: 1h\n", "f:5:5: sandboxes.a.keepFor: has no effect"},
		{"inline key", ok + "auth:\n  keys:\n  - key: my-password\n    tenant: t\n", "f:5:5: auth.keys[0].key: is no key that is known here: use env, file, tenant or user"},
		{"key from nowhere", ok + "auth:\n  keys:\n  - tenant: t\n", "f:5:5: auth.keys[0]: needs either env or file: a key comes from"},
		{"key from both", ok + "auth: {keys: [{env: A, file: b}]}\n", "f:3:16: auth.keys[0]: needs either env or file"},
		{"key as its name", ok + "auth: {keys: [{env: my-password}]}\n", "f:3:16: auth.keys[0].env: is no name of an environment variable"},
		{"host", ok + "hosts:\n- a.example:80\n", `f:4:3: hosts[0]: "a.example:80" is no host name`},
		{"origin", ok + "origins: ['https://a.example/']\n", `f:3:11: origins[0]: "https://a.example/" is no origin`},
		{"two stores", ok + "store: {sqlite: {path: a}, postgres: {env: B}}\n", "f:3:1: store: names two stores"},
		{"inline URL", ok + "store: {postgres: {url: 'postgres://u:my-password@h/d'}}\n", "f:3:20: store.postgres.url: is no key"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := Parse("f", []byte(tc.in))
			var fe *FileError
			if !errors.As(err, &fe) {
				t.Fatalf("got %v", err)
			}
			if first, _, _ := strings.Cut(err.Error(), "\n"); !strings.HasPrefix(first, tc.want) {
				t.Errorf("got  %s\nwant %s", err, tc.want)
			}
			if strings.Contains(err.Error(), "my-password") {
				t.Errorf("the error shows a value that may be secret: %v", err)
			}
		})
	}
}

// All faults are told at once, in the order of the file.
func TestParseAllErrors(t *testing.T) {
	_, err := Parse("f", []byte("addr: x\nsandboxes:\n  a:\n    busy: wait\n    reuse: never\nmore: 1\n"))
	var got []string
	for _, l := range strings.Split(err.Error(), "\n") {
		got = append(got, strings.Join(strings.SplitN(l, ":", 5)[:4], ":"))
	}
	want := []string{"f:1:1: addr", "f:3:3: sandboxes.a", "f:4:5: sandboxes.a.busy", "f:5:5: sandboxes.a.reuse", "f:6:1: more"}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	many := "sandboxes: {a: {harness: x}}\n"
	for i := range 100 {
		many += "k" + strings.Repeat("x", i) + ": 1\n"
	}
	if _, err := Parse("f", []byte(many)); strings.Count(err.Error(), "\n") != maxErrors-1 {
		t.Errorf("%d lines", strings.Count(err.Error(), "\n")+1)
	}
}

func FuzzParse(f *testing.F) {
	full, err := os.ReadFile("testdata/full.yaml")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(full)
	for _, s := range []string{"sandboxes: {a: {harness: {x: {y: [1, {z: ~}]}}}}", "sandboxes: {a: {harness: x, setup: [a, {serial: [b]}]}}", "limits: {body: 9223372036854775807KiB}", "retention: {events: 65536w}"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		file, err := Parse("f", data)
		if err == nil {
			if _, err := file.Build(t.Context(), Registry{}, BuildOptions{Dry: true}); err == nil {
				t.Fatal("built of nothing")
			}
			return
		}
		var fe *FileError
		if !errors.As(err, &fe) || fe.Line < 1 {
			t.Fatal(err)
		}
	})
}
