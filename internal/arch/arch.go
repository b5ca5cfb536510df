// Package arch holds the import rules of the module, as data, and checks them.
// Dependencies point inward: contracts import the standard library and each other
// downward only, no package imports a backend, and the guest program stays small.
package arch

import (
	"fmt"
	"slices"
	"strings"
)

// Package is the part of go list's answer that the rules look at. Test files are
// free to import what they test with.
type Package struct {
	ImportPath string
	Imports    []string
	Standard   bool
}

const module = "github.com/aisandbox-go/aisandbox"

// rule says what one package may import directly, beside the standard library and
// internal/.
type rule struct {
	imports []string // packages of this module; "x/…" stands for all below x too
	third   []string // module or package path prefixes; nil means any
}

// none is a package that may import nothing of a kind.
var none = []string{}

// contracts are what everything else is written against.
var contracts = []string{"event", "secret", "policy", "workspace", "provider", "store"}

// engine is what the sandbox package composes.
var engine = append([]string{"guest", "egress", "journal", "journal/frame", "checkpoint", "watch", "chat"}, contracts...)

// table is the package tree. The first entry whose name fits decides; a name that
// ends in "/…" fits everything below it.
var table = []struct {
	name string
	rule
}{
	{"event", rule{none, none}},
	{"secret", rule{none, none}},
	{"policy", rule{none, []string{"mvdan.cc/sh/"}}},
	{"workspace", rule{[]string{"secret"}, none}},

	{"provider", rule{none, none}},
	{"provider/providertest", rule{[]string{"provider"}, []string{"github.com/google/go-cmp"}}},
	{"provider/…", rule{[]string{"provider"}, nil}},

	{"guest", rule{[]string{"provider", "guest/inside", "journal/frame"}, guestThird}},
	{"guest/inside", rule{[]string{"provider", "journal/frame"}, guestThird}},

	{"egress", rule{[]string{"policy", "secret", "event"}, nil}},

	{"store", rule{[]string{"event"}, none}},
	{"store/…", rule{[]string{"store", "event"}, nil}},

	{"journal", rule{[]string{"provider", "event", "store", "journal/frame"}, none}},
	{"journal/frame", rule{none, none}},
	{"journal/journaltest", rule{[]string{"journal", "journal/frame", "provider"}, none}},

	{"checkpoint", rule{[]string{"provider", "store", "secret"}, []string{"github.com/restic/chunker", "github.com/klauspost/compress/zstd"}}},
	{"watch", rule{[]string{"provider", "event"}, none}},
	{"chat", rule{[]string{"event", "store", "store/memstore"}, []string{"github.com/google/jsonschema-go"}}},
	{"bridge", rule{[]string{"chat", "event", "policy", "secret"}, []string{"github.com/modelcontextprotocol/go-sdk", "github.com/google/jsonschema-go"}}},

	{"sandbox", rule{engine, nil}},

	{"harness", rule{append([]string{"sandbox", "bridge"}, engine...), nil}},
	{"harness/harnesstest", rule{[]string{"harness", "chat", "event", "provider", "provider/local"}, nil}},
	{"harness/scripted/player", rule{none, none}},
	// The scripted agent speaks Claude Code's stream, so it shares its decoder.
	{"harness/scripted", rule{[]string{"harness", "chat", "event", "provider", "harness/claudecode", "harness/scripted/player"}, nil}},
	// An agent turns the policy of its plan into rules of its own.
	{"harness/…", rule{[]string{"harness", "chat", "event", "provider", "policy", "secret"}, nil}},

	{"reaper", rule{[]string{"chat", "sandbox", "store", "journal", "provider", "event"}, none}},
	{"server", rule{append([]string{"sandbox", "chat"}, contracts...), nil}},
	{"modeltest", rule{none, nil}},
	{"config", rule{append([]string{"sandbox", "chat"}, contracts...), []string{"github.com/goccy/go-yaml", "github.com/google/jsonschema-go"}}},
	{"cli", rule{append([]string{"sandbox", "bridge", "harness", "server", "reaper", "modeltest", "config"}, engine...), nil}},

	{"cmd/aisandbox-guest", rule{[]string{"guest/inside", "harness/scripted/player"}, none}},
	{"cmd/aisandbox", rule{[]string{"…"}, nil}},
	{"examples/…", rule{[]string{"…"}, nil}},
	{"attack", rule{[]string{"…"}, nil}},
	{"attack/…", rule{[]string{"…"}, nil}},
	{"e2e", rule{[]string{"…"}, nil}},
	{"e2e/…", rule{[]string{"…"}, nil}},
	{"internal/…", rule{[]string{"…"}, nil}},
}

var guestThird = []string{"golang.org/x/sys/"}

// guestMain is what goes into every sandbox; what it must not link costs megabytes
// there, or would make it embed itself.
const guestMain = "cmd/aisandbox-guest"

var guestForbidden = []string{"net/http", "github.com/goccy/go-yaml", module + "/guest"}

// Check returns what breaks a rule, one line each, in a stable order.
func Check(pkgs []Package) []string {
	byPath := map[string]Package{}
	for _, p := range pkgs {
		byPath[p.ImportPath] = p
	}
	var bad []string
	for _, p := range pkgs {
		name, ours := strings.CutPrefix(p.ImportPath, module+"/")
		if p.Standard || !ours {
			if p.ImportPath == module {
				bad = append(bad, "the module's root holds no code")
			}
			continue
		}
		r, ok := find(name)
		if !ok {
			bad = append(bad, fmt.Sprintf("%s is not in the table of internal/arch/arch.go: add what it may import", name))
			continue
		}
		for _, imp := range p.Imports {
			if why := r.refuse(name, imp, byPath); why != "" {
				bad = append(bad, fmt.Sprintf("%s imports %s: %s", name, imp, why))
			}
		}
	}
	deps := closure(module+"/"+guestMain, byPath)
	for _, f := range guestForbidden {
		if via, ok := deps[f]; ok {
			bad = append(bad, fmt.Sprintf("%s links %s, through %s", guestMain, f, via))
		}
	}
	slices.Sort(bad)
	return bad
}

func find(name string) (rule, bool) {
	for _, t := range table {
		if fits(t.name, name) {
			return t.rule, true
		}
	}
	return rule{}, false
}

func fits(pattern, name string) bool {
	below, ok := strings.CutSuffix(pattern, "…")
	if ok {
		return strings.HasPrefix(name, below)
	}
	return pattern == name
}

// refuse returns why a package may not import imp; empty means that it may.
func (r rule) refuse(name, imp string, byPath map[string]Package) string {
	if p, ok := byPath[imp]; (ok && p.Standard) || imp == "C" {
		return ""
	}
	target, ours := strings.CutPrefix(imp, module+"/")
	if !ours {
		if r.third == nil || slices.ContainsFunc(r.third, func(p string) bool { return strings.HasPrefix(imp+"/", strings.TrimSuffix(p, "/")+"/") }) {
			return ""
		}
		return "that module is not among those this package may use"
	}
	if strings.HasPrefix(target, "internal/") {
		if strings.HasPrefix(name, "examples/") {
			return "examples show what others can write, so they use public packages only"
		}
		return ""
	}
	if slices.ContainsFunc(r.imports, func(p string) bool { return fits(p, target) }) {
		return ""
	}
	return "the table allows " + list(r.imports)
}

func list(names []string) string {
	if len(names) == 0 {
		return "no package of the module"
	}
	return strings.Join(names, ", ")
}

// closure maps each package that root links to the one that imports it.
func closure(root string, byPath map[string]Package) map[string]string {
	seen := map[string]string{}
	todo := []string{root}
	for len(todo) > 0 {
		p := todo[0]
		todo = todo[1:]
		for _, imp := range byPath[p].Imports {
			if _, ok := seen[imp]; !ok {
				seen[imp] = p
				todo = append(todo, imp)
			}
		}
	}
	return seen
}
