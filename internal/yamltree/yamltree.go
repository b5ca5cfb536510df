// Package yamltree reads one YAML document into a plain tree with positions, for
// readers that are strict: what makes a value differ from what is written
// (anchors, aliases, merge keys, tags) and what is said twice are errors.
package yamltree

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/lexer"
	"github.com/goccy/go-yaml/parser"
	"github.com/goccy/go-yaml/token"
)

// MaxDepth is how deep a document may nest. It is checked before parsing, since
// the time that the parser takes grows with its square.
const MaxDepth = 64

// Kind is what a node is.
type Kind int

// The kinds.
const (
	Null Kind = iota
	Bool
	Number
	Text
	List
	Map
)

func (k Kind) String() string {
	return [...]string{"empty", "true or false", "a number", "text", "a list", "a mapping"}[k]
}

// Node is a value.
type Node struct {
	Kind   Kind
	Text   string // of a scalar: a number or boolean as it is spelled
	Items  []*Node
	Fields []Field
	Pos
}

// Field is a pair of a mapping.
type Field struct {
	Key   string
	Value *Node
	Pos   // of the key
}

// Pos is where something begins, counted from 1.
type Pos struct{ Line, Column int }

// Error is why a document can't be read.
type Error struct {
	Pos
	Msg, Cure string
}

func (e *Error) Error() string {
	return fmt.Sprintf("%d:%d: %s: %s", e.Line, e.Column, e.Msg, e.Cure)
}

// Parse reads a document of at most limit bytes. A document without content is a
// Null. Every error is an [*Error].
func Parse(data []byte, limit int) (*Node, error) {
	start := Pos{1, 1}
	switch {
	case len(data) > limit:
		return nil, &Error{start, fmt.Sprintf("is larger than %d bytes", limit), "make it smaller"}
	case !utf8.Valid(data):
		return nil, &Error{start, "is not valid UTF-8", "save it as UTF-8"}
	}
	if err := checkTokens(lexer.Tokenize(string(data))); err != nil {
		return nil, err
	}
	f, err := parser.ParseBytes(data, 0)
	if err != nil {
		return nil, syntax(err)
	}
	if len(f.Docs) > 1 {
		return nil, &Error{posOf(f.Docs[1].Start, start), "is a second document", "keep one document in a file"}
	}
	if len(f.Docs) == 0 || f.Docs[0].Body == nil {
		return &Node{Pos: start}, nil
	}
	return build(f.Docs[0].Body, start)
}

func posOf(tk *token.Token, otherwise Pos) Pos {
	if tk == nil || tk.Position == nil || tk.Position.Line == 0 {
		return otherwise
	}
	return Pos{tk.Position.Line, tk.Position.Column}
}

func syntax(err error) error {
	e := &Error{Pos{1, 1}, err.Error(), "mend the YAML"}
	var se yaml.Error
	if errors.As(err, &se) {
		e.Msg = firstLine(se.GetMessage())
		e.Pos = posOf(se.GetToken(), e.Pos)
	}
	return e
}

func firstLine(s string) string {
	s, _, _ = strings.Cut(s, "\n")
	return s
}

// checkTokens refuses nesting that would keep the parser busy for minutes. Nesting
// by indentation needs no check here: its size grows with its square.
func checkTokens(tokens token.Tokens) error {
	flow, line, entries := 0, 0, 0
	for _, tk := range tokens {
		switch tk.Type {
		case token.MappingStartType, token.SequenceStartType:
			flow++
		case token.MappingEndType, token.SequenceEndType:
			flow--
		case token.SequenceEntryType, token.MappingKeyType:
			if tk.Position.Line != line {
				line, entries = tk.Position.Line, 0
			}
			entries++
		}
		if flow > MaxDepth || entries > MaxDepth {
			return tooDeep(posOf(tk, Pos{1, 1}))
		}
	}
	return nil
}

func tooDeep(p Pos) error {
	return &Error{p, fmt.Sprintf("is nested deeper than %d", MaxDepth), "flatten it"}
}

func build(n ast.Node, near Pos) (*Node, error) { return (&builder{}).node(n, near) }

type builder struct{ depth int }

func (b *builder) node(n ast.Node, near Pos) (*Node, error) {
	if n == nil {
		return &Node{Pos: near}, nil
	}
	if b.depth++; b.depth > MaxDepth {
		return nil, tooDeep(near)
	}
	defer func() { b.depth-- }()
	out := &Node{Pos: posOf(n.GetToken(), near)}
	if err := plain(n, out.Pos); err != nil {
		return nil, err
	}
	switch v := n.(type) {
	case *ast.NullNode:
		return out, nil
	case *ast.BoolNode:
		out.Kind, out.Text = Bool, fmt.Sprint(v.Value)
	case *ast.IntegerNode, *ast.FloatNode:
		out.Kind, out.Text = Number, n.GetToken().Value
		if !isNumber(out.Text) {
			return nil, &Error{out.Pos, fmt.Sprintf("%q is not a plain number", out.Text), "write it in decimal, or quote it if it is text"}
		}
	case *ast.InfinityNode, *ast.NanNode:
		return nil, &Error{out.Pos, "is no number that can be used", "write a finite one, or quote it if it is text"}
	case *ast.StringNode:
		out.Kind, out.Text = Text, v.Value
		if n.GetToken().Type == token.StringType && isNumber(v.Value) {
			out.Kind = Number // too large for the parser's number types
		}
	case *ast.LiteralNode:
		out.Kind, out.Text = Text, v.Value.Value
	case *ast.SequenceNode:
		out.Kind = List
		for _, e := range v.Values {
			item, err := b.node(e, out.Pos)
			if err != nil {
				return nil, err
			}
			out.Items = append(out.Items, item)
		}
	case ast.MapNode:
		return b.mapping(v, out)
	default:
		return nil, &Error{out.Pos, "is nothing that can be used here", "write text, a number, a list or a mapping"}
	}
	return out, nil
}

func (b *builder) mapping(m ast.MapNode, out *Node) (*Node, error) {
	out.Kind = Map
	seen := map[string]bool{}
	for it := m.MapRange(); it.Next(); {
		key := it.Key()
		pos := posOf(key.GetToken(), out.Pos)
		if key.IsMergeKey() {
			return nil, &Error{pos, "merge keys are not supported", "write the keys out"}
		}
		if _, ok := key.(ast.ScalarNode); !ok {
			return nil, &Error{pos, "a key must be plain text", "write key: value"}
		}
		if err := plain(key, pos); err != nil {
			return nil, err
		}
		k := key.GetToken().Value
		if seen[k] { // the parser refuses most of these itself
			return nil, &Error{pos, fmt.Sprintf("key %q is there twice", k), "remove one"}
		}
		seen[k] = true
		if len(out.Fields) == 0 {
			out.Pos = pos // the parser's own is that of the colon
		}
		v, err := b.node(it.Value(), pos)
		if err != nil {
			return nil, err
		}
		out.Fields = append(out.Fields, Field{k, v, pos})
	}
	return out, nil
}

// plain refuses what would make the value differ from what is written.
func plain(n ast.Node, pos Pos) error {
	switch n.Type() {
	case ast.AnchorType, ast.AliasType:
		return &Error{pos, "anchors and aliases are not supported", "write the value out"}
	case ast.TagType:
		return &Error{pos, "tags are not supported", "remove the tag"}
	}
	return nil
}

func isNumber(s string) bool {
	return s != "" && (s[0] == '-' || s[0] >= '0' && s[0] <= '9') && json.Valid([]byte(s))
}

// Get returns the value of a key of a mapping, nil where there is none.
func (n *Node) Get(key string) *Node {
	for _, f := range n.Fields {
		if f.Key == key {
			return f.Value
		}
	}
	return nil
}

// AppendJSON appends the value as JSON, with the keys in their order and numbers
// as they are spelled.
func (n *Node) AppendJSON(b []byte) []byte {
	switch n.Kind {
	case Bool, Number:
		return append(b, n.Text...)
	case Text:
		return append(b, quote(n.Text)...)
	case List:
		b = append(b, '[')
		for i, e := range n.Items {
			if i > 0 {
				b = append(b, ',')
			}
			b = e.AppendJSON(b)
		}
		return append(b, ']')
	case Map:
		b = append(b, '{')
		for i, f := range n.Fields {
			if i > 0 {
				b = append(b, ',')
			}
			b = append(append(b, quote(f.Key)...), ':')
			b = f.Value.AppendJSON(b)
		}
		return append(b, '}')
	}
	return append(b, "null"...)
}

func quote(s string) []byte {
	b, err := json.Marshal(s)
	if err != nil { // a string always encodes
		return []byte(`""`)
	}
	return b
}
