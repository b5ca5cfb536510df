package workspace

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"hash"
	"maps"
	"path"
	"slices"
	"strings"
)

// hashVersion is part of every hash. It changes with the encoding below.
const hashVersion = "aisandbox-workspace-1"

// Hash returns the SHA-256 of what w says about the content of a sandbox, as
// lower-case hex. Secrets and how to log in to the source are left out: a rotated
// token must not orphan a sandbox. Absent and default fields are the same (spec
// 01 §10).
//
// The encoding is a sequence of fields, each written as its length (8 bytes, big
// endian) and its bytes; a list begins with its number of items.
func (w Workspace) Hash() string {
	e := encoder{sha256.New()}
	e.str(hashVersion)
	switch s := w.Source.(type) {
	case Git:
		e.str("git", s.URL, s.Ref)
		n, _ := s.Depth.Commits() // Validate has the word on a bad one
		e.num(n)
	case Local:
		e.str("local", s.Path, s.Ref)
	default:
		e.str("none")
	}
	e.str(w.RootOrDefault())
	if w.PackageManager == Auto {
		e.str("")
	} else {
		e.str(string(w.PackageManager))
	}
	groups := w.Setup.normal()
	e.num(len(groups))
	for _, g := range groups {
		kind := "serial"
		if g.Parallel {
			kind = "parallel"
		}
		e.str(kind)
		e.num(len(g.Commands))
		e.str(g.Commands...)
	}
	e.dict(w.Scripts)
	e.dict(w.Env)
	e.str(w.Instructions)
	e.num(len(w.Skills))
	for _, s := range w.Skills {
		if f, ok := s.(File); ok {
			e.str("file", path.Clean(f.Path), f.Content)
		}
	}
	return hex.EncodeToString(e.h.Sum(nil))
}

// normal returns the plan with its serial commands one by one, so that a list and
// a group of the same commands are the same, and without empty groups.
func (p Plan) normal() Plan {
	var out Plan
	for _, g := range p {
		switch {
		case len(g.Commands) == 0:
		case g.Parallel:
			out = append(out, g)
		default:
			for _, c := range g.Commands {
				out = append(out, Serial(c))
			}
		}
	}
	return out
}

// Commands returns the commands of the plan in order of declaration.
func (p Plan) Commands() []string {
	var out []string
	for _, g := range p {
		out = append(out, g.Commands...)
	}
	return out
}

type encoder struct{ h hash.Hash }

func (e encoder) num(n int) {
	var b [8]byte
	binary.BigEndian.PutUint64(b[:], uint64(n))
	e.h.Write(b[:])
}

func (e encoder) str(ss ...string) {
	for _, s := range ss {
		e.num(len(s))
		e.h.Write([]byte(s))
	}
}

func (e encoder) dict(m map[string]string) {
	e.num(len(m))
	for _, k := range slices.Sorted(maps.Keys(m)) {
		e.str(k, m[k])
	}
}

// AgentsText returns the text of AGENTS.md, which is empty when there is nothing
// to write: the instructions, else the file skill of that name, and then the
// scripts (spec 01 §7.3).
func (w Workspace) AgentsText() string {
	base := w.Instructions
	if base == "" {
		for _, s := range w.Skills {
			if f, ok := s.(File); ok && f.Path == AgentsFile {
				base = f.Content
				break
			}
		}
	}
	if len(w.Scripts) == 0 {
		return base
	}
	var b strings.Builder
	if base = strings.TrimRight(base, " \t\r\n"); base != "" {
		b.WriteString(base + "\n\n")
	}
	b.WriteString("## Workspace scripts\n")
	for _, name := range slices.Sorted(maps.Keys(w.Scripts)) {
		b.WriteString("\n- " + name + " → " + w.Scripts[name])
	}
	return b.String()
}

// Files returns the file skills that are written as they are: all but AGENTS.md.
func (w Workspace) Files() []File {
	var out []File
	for _, s := range w.Skills {
		if f, ok := s.(File); ok && path.Clean(f.Path) != AgentsFile {
			out = append(out, f)
		}
	}
	return out
}
