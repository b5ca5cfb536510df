package yamltree

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestParse(t *testing.T) {
	n, err := Parse([]byte("a: 1\nb:\n- x: yes\n  y: |\n    two\n    lines\n- [1.50, -2e3, \"3\", true, ~]\nc: {d: 12345678901234567890123}\n"), 1<<10)
	if err != nil {
		t.Fatal(err)
	}
	const want = `{"a":1,"b":[{"x":"yes","y":"two\nlines\n"},[1.50,-2e3,"3",true,null]],"c":{"d":12345678901234567890123}}`
	if got := string(n.AppendJSON(nil)); got != want {
		t.Error(cmp.Diff(want, got))
	}
	for _, tc := range []struct {
		node *Node
		want Pos
	}{
		{n, Pos{1, 1}},
		{n.Get("a"), Pos{1, 4}},
		{n.Get("b").Items[0], Pos{3, 3}},
		{n.Get("b").Items[0].Get("x"), Pos{3, 6}},
		{n.Get("b").Items[1].Items[0], Pos{7, 4}},
		{n.Get("c").Get("d"), Pos{8, 8}},
	} {
		if tc.node.Pos != tc.want {
			t.Errorf("%s is at %v, want %v", tc.node.AppendJSON(nil), tc.node.Pos, tc.want)
		}
	}
	if f := n.Get("b").Items[0].Fields[1]; f.Pos != (Pos{4, 3}) {
		t.Errorf("key y is at %v", f.Pos)
	}
	if n.Get("nothing") != nil {
		t.Error("a key that isn't there has a value")
	}
}

func TestParseErrors(t *testing.T) {
	for _, tc := range []struct{ name, in, want string }{
		{"syntax", "a: 1\nb: [1", "2:4: "},
		{"twice", "a: 1\nb: 2\na: 3\n", "3:1: "},
		{"twice inside", "a:\n  b: 2\n  b: 3\n", "3:3: "},
		{"anchor", "a: &x 1\n", "1:4: anchors"},
		{"alias", "a: 1\nb: *x\n", "2:"},
		{"merge", "a:\n  <<: {b: 1}\n", "2:3: merge"},
		{"tag", "a: !!str 1\n", "1:4: tags"},
		{"tagged key", "!!str a: 1\n", "1:"},
		{"second document", "a: 1\n---\nb: 2\n", "2:1: is a second"},
		{"octal", "a: 0o17\n", `1:4: "0o17" is not a plain number`},
		{"underscore", "a: 1_000\n", `1:4: "1_000" is not a plain number`},
		{"infinity", "a: .inf\n", "1:4: is no number"},
		{"UTF-8", "a: \xff\n", "1:1: is not valid UTF-8"},
		{"size", "a: " + strings.Repeat("x", 2000), "1:1: is larger"},
		{"complex key", "? [a]\n: 1\n", "2:1: "},
		{"twice, quoted", "\"a\": 1\na: 2\n", "2:1: "},
		{"twice in braces", "b: {a: 1, a: 2}\n", "1:11: "},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := Parse([]byte(tc.in), 1<<10)
			var e *Error
			if !errors.As(err, &e) || !strings.HasPrefix(err.Error(), tc.want) || e.Cure == "" {
				t.Errorf("got %v, want %s…", err, tc.want)
			}
		})
	}
}

func TestParseEmpty(t *testing.T) {
	for _, in := range []string{"", "# nothing\n", "---\n"} {
		if n, err := Parse([]byte(in), 1<<10); err != nil || n.Kind != Null {
			t.Errorf("%q: %v, %v", in, n, err)
		}
	}
}

// The parser's time must not run away with the depth.
func TestParseDeep(t *testing.T) {
	for name, in := range map[string]string{
		"flow lists":    strings.Repeat("[", 100_000),
		"flow mappings": strings.Repeat("{a: ", 30_000),
		"entries":       strings.Repeat("- ", 50_000),
		"keys":          strings.Repeat("? ", 50_000),
		"indented":      indented(300),
	} {
		t.Run(name, func(t *testing.T) {
			began := time.Now()
			_, err := Parse([]byte(in), 1<<20)
			if err == nil || !strings.Contains(err.Error(), "nested deeper") {
				t.Errorf("got %.100v", err)
			}
			if d := time.Since(began); d > 10*time.Second {
				t.Errorf("took %v", d)
			}
		})
	}
}

func indented(n int) string {
	var b strings.Builder
	for i := range n {
		b.WriteString(strings.Repeat(" ", i) + "a:\n")
	}
	return b.String()
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{"a: 1", "- [a, {b: c}]", "a: &x 1\nb: *x", "? a\n: b", "|\n x", "a: >-\n  b\n\n  c", "<<: 1", "a: !!int 1", "\t", "a:\r\n- b\r\n"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		n, err := Parse(data, 4<<10)
		if err != nil {
			var e *Error
			if !errors.As(err, &e) || e.Line < 1 || e.Column < 0 {
				t.Fatalf("%v", err)
			}
			return
		}
		if js := n.AppendJSON(nil); !json.Valid(js) {
			t.Fatalf("%q became %q", data, js)
		}
	})
}
