package scripted

import (
	"bytes"
	"encoding/json"
	"strconv"

	"github.com/goccy/go-yaml/ast"
)

// json writes a YAML value as JSON, the keys in the order in which they stand.
func (p *parsing) json(b *bytes.Buffer, n ast.Node, field string) error {
	if list, ok := pairs(n); ok {
		b.WriteByte('{')
		seen := make(map[string]bool, len(list))
		for i, kv := range list {
			key, ok := kv.Key.(*ast.StringNode)
			if !ok {
				return p.errorf(first(kv.Key), field, "a key must be a text, not %s", what(kv.Key))
			}
			if seen[key.Value] {
				return p.errorf(first(key), join(field, key.Value), "is given twice")
			}
			seen[key.Value] = true
			if i > 0 {
				b.WriteByte(',')
			}
			if err := p.jsonText(b, key, field); err != nil {
				return err
			}
			b.WriteByte(':')
			if err := p.json(b, kv.Value, join(field, key.Value)); err != nil {
				return err
			}
		}
		b.WriteByte('}')
		return nil
	}
	switch n := n.(type) {
	case *ast.SequenceNode:
		b.WriteByte('[')
		for i, v := range n.Values {
			if i > 0 {
				b.WriteByte(',')
			}
			if err := p.json(b, v, field+"["+strconv.Itoa(i)+"]"); err != nil {
				return err
			}
		}
		b.WriteByte(']')
		return nil
	case *ast.StringNode, *ast.LiteralNode:
		return p.jsonText(b, n, field)
	case nil, *ast.NullNode:
		b.WriteString("null")
		return nil
	case *ast.BoolNode:
		b.WriteString(strconv.FormatBool(n.Value))
		return nil
	case *ast.IntegerNode:
		return p.jsonNumber(b, n, n.Value, field)
	case *ast.FloatNode:
		return p.jsonNumber(b, n, n.Value, field)
	}
	return p.errorf(first(n), field, "must be a value that JSON has, not %s", what(n))
}

func (p *parsing) jsonText(b *bytes.Buffer, n ast.Node, field string) error {
	s, err := p.text(n, field, true)
	if err != nil {
		return err
	}
	enc := json.NewEncoder(b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(s); err != nil {
		return p.errorf(first(n), field, "%v", err)
	}
	b.Truncate(b.Len() - 1) // the encoder's newline
	return nil
}

func (p *parsing) jsonNumber(b *bytes.Buffer, n ast.Node, v any, field string) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return p.errorf(first(n), field, "is no number that JSON has")
	}
	b.Write(raw)
	return nil
}
