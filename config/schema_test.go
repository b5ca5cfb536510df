package config

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/jsonschema-go/jsonschema"

	"github.com/aisandbox-go/aisandbox/internal/yamltree"
)

// generated is the schema that the Go types have.
func generated(t *testing.T) []byte {
	t.Helper()
	text := func(pattern string) *jsonschema.Schema {
		return &jsonschema.Schema{Type: "string", Pattern: pattern}
	}
	types := map[reflect.Type]*jsonschema.Schema{
		reflect.TypeFor[Duration](): text(`^[0-9]`),
		reflect.TypeFor[Age]():      text(`^([0-9].*|never)$`),
		reflect.TypeFor[Size](): {AnyOf: []*jsonschema.Schema{
			{Type: "integer", Minimum: jsonschema.Ptr(1.0)}, text(`^[1-9][0-9]*(KiB|MiB|GiB)$`),
		}},
		reflect.TypeFor[Scalar](): {Types: []string{"string", "number", "boolean"}},
		reflect.TypeFor[Choice](): {AnyOf: []*jsonschema.Schema{
			{Type: "string", MinLength: jsonschema.Ptr(1)},
			{
				Type: "object", MinProperties: jsonschema.Ptr(1), MaxProperties: jsonschema.Ptr(1),
				AdditionalProperties: &jsonschema.Schema{Type: "object"},
			},
		}},
	}
	for typ, names := range enums {
		s := &jsonschema.Schema{Type: "string"}
		for _, n := range names {
			s.Enum = append(s.Enum, n)
		}
		types[typ] = s
	}
	group, err := jsonschema.For[Step](&jsonschema.ForOptions{TypeSchemas: types})
	if err != nil {
		t.Fatal(err)
	}
	group.MinProperties, group.MaxProperties = jsonschema.Ptr(1), jsonschema.Ptr(1)
	types[reflect.TypeFor[Step]()] = &jsonschema.Schema{AnyOf: []*jsonschema.Schema{{Type: "string"}, group}}
	s, err := jsonschema.For[File](&jsonschema.ForOptions{TypeSchemas: types})
	if err != nil {
		t.Fatal(err)
	}
	tighten(s)
	s.Schema = "https://json-schema.org/draft/2020-12/schema"
	s.Title = "aisandbox.yaml"
	b, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := json.Indent(&out, b, "", "  "); err != nil {
		t.Fatal(err)
	}
	return append(out.Bytes(), '\n')
}

// tighten takes away what Go values have and the file hasn't: null and numbers
// below 1.
func tighten(s *jsonschema.Schema) {
	if i := slices.Index(s.Types, "null"); i >= 0 {
		s.Type, s.Types = s.Types[1-i], nil
	}
	if s.Type == "integer" && s.Minimum == nil {
		s.Minimum = jsonschema.Ptr(1.0)
	}
	for _, p := range s.Properties {
		tighten(p)
	}
	for _, p := range s.AnyOf {
		tighten(p)
	}
	for _, p := range []*jsonschema.Schema{s.Items, s.AdditionalProperties} {
		if p != nil {
			tighten(p)
		}
	}
}

func TestSchema(t *testing.T) {
	want := generated(t)
	if os.Getenv("UPDATE_GOLDEN") == "1" {
		if err := os.WriteFile("schema.json", want, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if d := cmp.Diff(string(want), string(Schema())); d != "" {
		t.Error("schema.json isn't that of the Go types (UPDATE_GOLDEN=1 writes it):\n" + d)
	}
}

// fits says what the schema has against a file.
func fits(t *testing.T, data []byte) error {
	t.Helper()
	var s jsonschema.Schema
	if err := json.Unmarshal(Schema(), &s); err != nil {
		t.Fatal(err)
	}
	r, err := s.Resolve(nil)
	if err != nil {
		t.Fatal(err)
	}
	n, err := yamltree.Parse(data, MaxFile)
	if err != nil {
		t.Fatal(err)
	}
	var v any
	if err := json.Unmarshal(n.AppendJSON(nil), &v); err != nil {
		t.Fatal(err)
	}
	return r.Validate(v)
}

// examples are the files that people are shown.
func examples(t *testing.T) map[string][]byte {
	t.Helper()
	out := map[string][]byte{}
	names, err := filepath.Glob("testdata/*.yaml")
	if err != nil || len(names) == 0 {
		t.Fatal("no examples", err)
	}
	for _, n := range names {
		b, err := os.ReadFile(n)
		if err != nil {
			t.Fatal(err)
		}
		out[n] = b
	}
	doc, err := os.ReadFile("../docs/configuration.md")
	if err != nil {
		t.Fatal(err)
	}
	found := false
	for i, block := range strings.Split(string(doc), "```") {
		if body, ok := strings.CutPrefix(block, "yaml\n"); ok && i%2 == 1 {
			found = true
			out["docs/configuration.md:"+string(rune('0'+i/2))] = []byte(body)
		}
	}
	if !found {
		t.Fatal("docs/configuration.md has no example")
	}
	return out
}

func TestExamples(t *testing.T) {
	for name, data := range examples(t) {
		t.Run(name, func(t *testing.T) {
			if _, err := Parse(name, data); err != nil {
				t.Error(err)
			}
			if err := fits(t, data); err != nil {
				t.Error("the schema refuses it:", err)
			}
		})
	}
}

// What the schema refuses Parse must refuse too, and the other way around where a
// schema can tell.
func TestSchemaRefuses(t *testing.T) {
	const ok = "sandboxes: {a: {harness: x}}\n"
	for _, in := range []string{
		"addr: x:1\n",
		"sandboxes: {a: {}}\n",
		ok + "more: 1\n",
		"sandboxes: {a: {harness: {x: {}, y: {}}}}\n",
		"sandboxes: {a: {harness: x, busy: never}}\n",
		"sandboxes: {a: {harness: x, setup: [{serial: [a], parallel: [b]}]}}\n",
		"sandboxes: {a: {harness: x, timeout: 5}}\n",
		"sandboxes: {a: {harness: x, env: {A: [b]}}}\n",
		"sandboxes: {a: {harness: x, policy: {default: maybe}}}\n",
		ok + "limits: {body: 1KB}\n",
		ok + "limits: {runs: 0}\n",
		"sandboxes: {a: {harness: x, secrets: ~}}\n",
		ok + "retention: {events: forever}\n",
		ok + "store: {sqlite: {}}\n",
		ok + "auth: {keys: [{token: abc}]}\n",
	} {
		if err := fits(t, []byte(in)); err == nil {
			t.Errorf("the schema takes %q", in)
		}
		if _, err := Parse("f", []byte(in)); err == nil {
			t.Errorf("Parse takes %q", in)
		}
	}
}
