package modeltest

import (
	"errors"
	"fmt"
	"slices"
	"sort"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/lexer"
	"github.com/goccy/go-yaml/parser"
	"github.com/goccy/go-yaml/token"
)

// Bounds of a script file. The depth is checked before parsing, since the time
// the parser takes grows with its square.
const (
	MaxScriptBytes = 4 << 20
	maxDepth       = 64
)

// ParseScript reads a script in YAML or JSON; name is used in messages only.
// It is strict: an unknown or repeated key, a value of the wrong type, a second
// document, an alias and a tag are errors. All errors are [*ScriptError] with a
// position. The result has passed [Script.Validate].
func ParseScript(name string, data []byte) (Script, error) {
	d := &decoder{name: name, pos: map[string]*token.Position{}}
	s, err := d.script(data)
	if err != nil {
		return Script{}, err
	}
	s.Name = name
	if err := s.Validate(); err != nil {
		var se *ScriptError
		if errors.As(err, &se) {
			d.locate(se)
		}
		return Script{}, err
	}
	return s, nil
}

// decoder turns the syntax tree into a Script. It does not use the YAML
// library's struct decoding, which truncates 3.5 to an int and re-spells 1.50
// as text without a complaint; here each scalar is taken from its source.
type decoder struct {
	name string
	// pos is where each field path was found, for the checks that follow.
	pos map[string]*token.Position
}

func (d *decoder) fail(n ast.Node, path, problem, cure string) error {
	e := &ScriptError{Script: d.name, Field: path, Problem: problem, Cure: cure}
	if n != nil {
		e.at(n.GetToken())
	}
	if e.Line == 0 {
		d.locate(e)
	}
	return e
}

func (e *ScriptError) at(tk *token.Token) {
	if tk != nil && tk.Position != nil {
		e.Line, e.Column = tk.Position.Line, tk.Position.Column
	}
}

// locate gives e the position of its field, or of the nearest one around it.
func (d *decoder) locate(e *ScriptError) {
	e.Script = d.name
	for p := e.Field; ; {
		if pos := d.pos[p]; pos != nil {
			e.Line, e.Column = pos.Line, pos.Column
			return
		}
		i := strings.LastIndexAny(p, ".[")
		if i < 0 {
			e.Line, e.Column = 1, 1
			return
		}
		p = p[:i]
	}
}

func (d *decoder) script(data []byte) (Script, error) {
	var s Script
	switch {
	case len(data) > MaxScriptBytes:
		return s, d.fail(nil, "", fmt.Sprintf("larger than %d bytes", MaxScriptBytes), "split it into several scripts")
	case !utf8.Valid(data):
		return s, d.fail(nil, "", "not valid UTF-8", "save it as UTF-8; use raw: for anything else")
	}
	if err := d.checkTokens(lexer.Tokenize(string(data))); err != nil {
		return s, err
	}
	f, err := parser.ParseBytes(data, 0)
	if err != nil {
		return s, d.syntax(err)
	}
	if len(f.Docs) > 1 {
		e := &ScriptError{Script: d.name, Problem: "more than one document", Cure: "keep one script per file", Line: 1, Column: 1}
		e.at(f.Docs[1].Start)
		return s, e
	}
	if len(f.Docs) == 0 || f.Docs[0].Body == nil {
		return s, d.fail(nil, "", "empty", "write at least turns:")
	}
	err = d.object(f.Docs[0].Body, "", fields{
		"session_header": d.text(&s.SessionHeader),
		"turns":          list(d, &s.Turns, d.turn),
		"after":          d.after(&s.After),
		"queues":         dict(d, &s.Queues, d.queue),
		"routes":         list(d, &s.Routes, d.route),
		"capture":        dict(d, &s.Capture, d.capture),
	})
	return s, err
}

func (d *decoder) syntax(err error) error {
	e := &ScriptError{Script: d.name, Problem: err.Error(), Cure: "fix the YAML syntax"}
	var se yaml.Error
	if errors.As(err, &se) {
		e.Problem = se.GetMessage()
		e.at(se.GetToken())
	}
	if e.Line == 0 {
		e.Line, e.Column = 1, 1
	}
	return e
}

// checkTokens refuses nesting that would keep the parser busy for minutes.
// Nesting by indentation needs no check: its size grows with its square.
func (d *decoder) checkTokens(tokens token.Tokens) error {
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
		if flow > maxDepth || entries > maxDepth {
			e := &ScriptError{Script: d.name, Problem: fmt.Sprintf("nested deeper than %d", maxDepth), Cure: "flatten it"}
			e.at(tk)
			return e
		}
	}
	return nil
}

// set stores one value found at path.
type set func(n ast.Node, path string) error

type fields map[string]set

func (d *decoder) object(n ast.Node, path string, known fields) error {
	return d.each(n, path, func(k string, kn, v ast.Node) error {
		p := join(path, k)
		f := known[k]
		if f == nil {
			names := make([]string, 0, len(known))
			for name := range known {
				names = append(names, name)
			}
			sort.Strings(names)
			return d.fail(kn, p, "unknown key", "known here: "+strings.Join(names, ", "))
		}
		return f(v, p)
	})
}

// each calls f for the pairs of the mapping n. The parser refuses repeated keys.
func (d *decoder) each(n ast.Node, path string, f func(k string, kn, v ast.Node) error) error {
	if err := d.plain(n, path); err != nil {
		return err
	}
	m, ok := n.(ast.MapNode)
	if !ok {
		return d.wrong(n, path, "a mapping")
	}
	for it := m.MapRange(); it.Next(); {
		key := it.Key()
		if key.IsMergeKey() {
			return d.fail(key, path, "merge keys are not supported", "write the keys out")
		}
		if _, ok := key.(ast.ScalarNode); !ok {
			return d.fail(key, path, "a key must be plain text", "write key: value")
		}
		if err := d.plain(key, path); err != nil {
			return err
		}
		k := key.GetToken().Value
		if tk := key.GetToken(); tk.Position != nil {
			d.pos[join(path, k)] = tk.Position
		}
		if err := f(k, key, it.Value()); err != nil {
			return err
		}
	}
	return nil
}

// plain refuses what would make the value differ from what is written.
func (d *decoder) plain(n ast.Node, path string) error {
	if n == nil {
		return d.fail(nil, path, "no value", "write one or remove the key")
	}
	if d.pos[path] == nil {
		if tk := n.GetToken(); tk != nil {
			d.pos[path] = tk.Position
		}
	}
	switch n.Type() {
	case ast.AnchorType, ast.AliasType, ast.MergeKeyType:
		return d.fail(n, path, "anchors and aliases are not supported", "write the value out")
	case ast.TagType:
		return d.fail(n, path, "tags are not supported", "remove the tag")
	case ast.NullType:
		return d.fail(n, path, "no value", "write one or remove the key")
	}
	return nil
}

func (d *decoder) wrong(n ast.Node, path, want string) error {
	got := "something else"
	switch n.(type) {
	case ast.MapNode:
		got = "a mapping"
	case *ast.SequenceNode:
		got = "a list"
	case *ast.StringNode, *ast.LiteralNode:
		got = "text"
	case *ast.IntegerNode, *ast.FloatNode, *ast.InfinityNode, *ast.NanNode:
		got = "a number"
	case *ast.BoolNode:
		got = "true or false"
	}
	return d.fail(n, path, "is "+got, "write "+want)
}

// scalar returns the text of a scalar: numbers and booleans as they are spelled.
func (d *decoder) scalar(n ast.Node, path string) (string, error) {
	if err := d.plain(n, path); err != nil {
		return "", err
	}
	switch v := n.(type) {
	case *ast.StringNode:
		return v.Value, nil
	case *ast.LiteralNode:
		return v.Value.Value, nil
	case *ast.IntegerNode, *ast.FloatNode, *ast.BoolNode:
		return n.GetToken().Value, nil
	}
	return "", d.wrong(n, path, "text")
}

func (d *decoder) text(to *string) set {
	return func(n ast.Node, path string) (err error) {
		*to, err = d.scalar(n, path)
		return err
	}
}

func (d *decoder) boolean(to *bool) set {
	return func(n ast.Node, path string) error {
		b, ok := n.(*ast.BoolNode)
		if !ok {
			return d.wrong(n, path, "true or false")
		}
		*to = b.Value
		return nil
	}
}

func (d *decoder) integer(to *int) set {
	return func(n ast.Node, path string) error {
		if _, ok := n.(*ast.IntegerNode); !ok {
			return d.wrong(n, path, "a whole number")
		}
		v, err := strconv.Atoi(n.GetToken().Value)
		if err != nil {
			return d.fail(n, path, "is not a plain decimal number", "write it as 0, 1, 2, …")
		}
		*to = v
		return nil
	}
}

func (d *decoder) duration(to *time.Duration) set {
	return func(n ast.Node, path string) error {
		s, err := d.scalar(n, path)
		if err != nil {
			return err
		}
		v, err := time.ParseDuration(s)
		if err != nil {
			return d.fail(n, path, fmt.Sprintf("%q is not a duration", s), "write it as 25ms or 2s")
		}
		*to = v
		return nil
	}
}

func (d *decoder) after(to *After) set {
	return func(n ast.Node, path string) error {
		s, err := d.scalar(n, path)
		*to = After(s)
		return err
	}
}

// pointer allocates the target, for fields where absent differs from zero.
func pointer[T any](to **T, f func(*T) set) set {
	return func(n ast.Node, path string) error {
		v := new(T)
		if err := f(v)(n, path); err != nil {
			return err
		}
		*to = v
		return nil
	}
}

func list[T any](d *decoder, to *[]T, f func(*T) set) set {
	return func(n ast.Node, path string) error {
		if err := d.plain(n, path); err != nil {
			return err
		}
		seq, ok := n.(*ast.SequenceNode)
		if !ok {
			return d.wrong(n, path, "a list")
		}
		out := make([]T, len(seq.Values))
		for i, v := range seq.Values {
			p := fmt.Sprintf("%s[%d]", path, i)
			if err := d.plain(v, p); err != nil {
				return err
			}
			if err := f(&out[i])(v, p); err != nil {
				return err
			}
		}
		*to = out
		return nil
	}
}

func dict[T any](d *decoder, to *map[string]T, f func(*T) set) set {
	return func(n ast.Node, path string) error {
		out := map[string]T{}
		err := d.each(n, path, func(k string, _, v ast.Node) error {
			var x T
			if err := f(&x)(v, join(path, k)); err != nil {
				return err
			}
			out[k] = x
			return nil
		})
		*to = out
		return err
	}
}

func join(path, k string) string {
	if path == "" {
		return k
	}
	return path + "." + k
}

func (d *decoder) queue(q *Queue) set {
	return func(n ast.Node, path string) error {
		return d.object(n, path, fields{"turns": list(d, &q.Turns, d.turn), "after": d.after(&q.After)})
	}
}

func (d *decoder) capture(c *Capture) set {
	return func(n ast.Node, path string) error {
		return d.object(n, path, fields{"from": d.text(&c.From), "regexp": d.text(&c.Regexp)})
	}
}

func (d *decoder) route(r *Route) set {
	return func(n ast.Node, path string) error {
		return d.object(n, path, fields{"when": d.when(&r.When), "use": d.text(&r.Use)})
	}
}

func (d *decoder) when(w *When) set {
	return func(n ast.Node, path string) error {
		return d.object(n, path, fields{
			"model":            d.pattern(&w.Model),
			"system":           d.pattern(&w.System),
			"first_user":       d.pattern(&w.FirstUser),
			"last_user":        d.pattern(&w.LastUser),
			"last_tool_result": d.pattern(&w.LastToolResult),
			"body":             d.pattern(&w.Body),
			"stream":           pointer(&w.Stream, d.boolean),
			"tool":             d.text(&w.Tool),
			"header":           dict(d, &w.Header, d.pattern),
		})
	}
}

func (d *decoder) pattern(p *Pattern) set {
	return func(n ast.Node, path string) error {
		if _, ok := n.(ast.MapNode); ok {
			return d.object(n, path, fields{"contains": d.text(&p.Contains), "regexp": d.text(&p.Regexp)})
		}
		return d.text(&p.Contains)(n, path)
	}
}

func (d *decoder) turn(t *Turn) set {
	return func(n ast.Node, path string) error {
		return d.object(n, path, fields{
			"blocks":    list(d, &t.Blocks, d.block),
			"stop":      d.text(&t.Stop),
			"usage":     pointer(&t.Usage, d.usage),
			"ping":      d.boolean(&t.Ping),
			"times":     d.integer(&t.Times),
			"wait":      d.duration(&t.Wait),
			"delay":     d.duration(&t.Delay),
			"status":    d.integer(&t.Status),
			"body":      d.any(&t.Body),
			"headers":   dict(d, &t.Headers, d.text),
			"no_answer": d.boolean(&t.NoAnswer),
			"cut":       pointer(&t.Cut, d.integer),
			"malformed": pointer(&t.Malformed, d.integer),
			"hang":      pointer(&t.Hang, d.integer),
			"error":     pointer(&t.Error, d.failure),
		})
	}
}

func (d *decoder) failure(f *Failure) set {
	return func(n ast.Node, path string) error {
		return d.object(n, path, fields{"after": d.integer(&f.After), "type": d.text(&f.Type), "message": d.text(&f.Message)})
	}
}

func (d *decoder) usage(u *Usage) set {
	return func(n ast.Node, path string) error {
		return d.object(n, path, fields{
			"in": d.integer(&u.In), "cr": d.integer(&u.CacheRead), "cw": d.integer(&u.CacheWrite), "out": d.integer(&u.Out),
		})
	}
}

func (d *decoder) block(b *Block) set {
	return func(n ast.Node, path string) error {
		return d.object(n, path, fields{
			"type":      d.text(&b.Type),
			"text":      d.text(&b.Text),
			"deltas":    list(d, &b.Deltas, d.delta),
			"signature": d.text(&b.Signature),
			"id":        d.text(&b.ID),
			"name":      d.text(&b.Name),
			"input":     d.any(&b.Input),
			"pieces":    d.integer(&b.Pieces),
		})
	}
}

func (d *decoder) delta(x *Delta) set {
	return func(n ast.Node, path string) error {
		if _, ok := n.(ast.MapNode); ok {
			return d.object(n, path, fields{"text": d.text(&x.Text), "raw": d.text(&x.Raw)})
		}
		return d.text(&x.Text)(n, path)
	}
}

// any stores text as string and everything else as JSON with the key order and
// the number spelling of the file.
func (d *decoder) any(to *any) set {
	return func(n ast.Node, path string) error {
		switch n.(type) {
		case *ast.StringNode, *ast.LiteralNode: // text
			s, err := d.scalar(n, path)
			*to = s
			return err
		}
		b, err := d.json(nil, n, path)
		*to = rawJSON(b)
		return err
	}
}

func (d *decoder) json(b []byte, n ast.Node, path string) ([]byte, error) {
	if n != nil && n.Type() == ast.NullType {
		return append(b, "null"...), nil
	}
	if err := d.plain(n, path); err != nil {
		return nil, err
	}
	switch v := n.(type) {
	case *ast.StringNode, *ast.LiteralNode:
		s, err := d.scalar(n, path)
		if n.GetToken().Type == token.StringType && isNumber(s) {
			// Unquoted, but too large for the parser's number types.
			return append(b, s...), err
		}
		return append(b, quote(s)...), err
	case *ast.BoolNode:
		return strconv.AppendBool(b, v.Value), nil
	case *ast.IntegerNode, *ast.FloatNode:
		s := n.GetToken().Value
		if !isNumber(s) {
			return nil, d.fail(n, path, fmt.Sprintf("%q is not a JSON number", s), "write it in decimal")
		}
		return append(b, s...), nil
	case *ast.SequenceNode:
		b = append(b, '[')
		for i, e := range v.Values {
			if i > 0 {
				b = append(b, ',')
			}
			var err error
			if b, err = d.json(b, e, fmt.Sprintf("%s[%d]", path, i)); err != nil {
				return nil, err
			}
		}
		return append(b, ']'), nil
	case ast.MapNode:
		b = append(b, '{')
		first := true
		err := d.each(n, path, func(k string, _, e ast.Node) (err error) {
			if !first {
				b = append(b, ',')
			}
			first = false
			b = append(append(b, quote(k)...), ':')
			b, err = d.json(b, e, join(path, k))
			return err
		})
		return append(b, '}'), err
	}
	return nil, d.wrong(n, path, "a value that JSON has")
}

// known reports whether s is one of names, for the checks of Validate.
func known(s string, names ...string) bool { return slices.Contains(names, s) }
