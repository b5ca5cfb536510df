package scripted

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/lexer"
	"github.com/goccy/go-yaml/parser"
	"github.com/goccy/go-yaml/token"

	"github.com/aisandbox-go/aisandbox/harness/scripted/player"
)

// maxFlow bounds how deep brackets and dashes nest: the YAML parser recurses.
const maxFlow = 64

// Parse reads a script. The name is that of the file, for errors. Every error is a
// *[ScriptError].
func Parse(name string, src []byte) (Script, error) {
	if name == "" {
		name = "script"
	}
	p := &parsing{file: name}
	body, err := p.document(src)
	if err != nil {
		return Script{}, err
	}
	top, err := p.mapping(body, "", "steps")
	if err != nil {
		return Script{}, err
	}
	steps, err := p.steps(top["steps"], "steps", bounds{times: 1})
	if err != nil {
		return Script{}, err
	}
	return Script{Steps: steps}, nil
}

type parsing struct {
	file     string
	written  int   // steps
	expanded int64 // steps, repetitions included
	flood    int64 // bytes, repetitions included
}

// bounds is where a list of steps stands.
type bounds struct {
	times int64 // how often the list is done
	depth int
}

func (p *parsing) errorf(at *token.Token, field, format string, args ...any) error {
	e := &ScriptError{File: p.file, Line: 1, Column: 1, Field: field, Msg: fmt.Sprintf(format, args...)}
	if at != nil && at.Position != nil {
		e.Line, e.Column = max(at.Position.Line, 1), max(at.Position.Column, 1)
	}
	return e
}

// document parses YAML and returns its one document.
func (p *parsing) document(src []byte) (body ast.Node, err error) {
	if len(src) > MaxFile {
		return nil, p.errorf(nil, "", "longer than %d bytes", MaxFile)
	}
	if at := invalid(src); at >= 0 {
		line := bytes.Count(src[:at], []byte("\n"))
		column := utf8.RuneCount(src[bytes.LastIndexByte(src[:at], '\n')+1 : at])
		return nil, &ScriptError{File: p.file, Line: line + 1, Column: column + 1, Msg: "this byte is no UTF-8"}
	}
	// The parser is not ours: what it can't stand is an error of the script.
	defer func() {
		if r := recover(); r != nil {
			body, err = nil, p.errorf(nil, "", "no YAML that can be read: %v", r)
		}
	}()
	tokens := lexer.Tokenize(string(src))
	if deep := tooDeep(tokens); deep != nil {
		return nil, p.errorf(deep, "", "nests deeper than %d", maxFlow)
	}
	f, err := parser.Parse(tokens, 0)
	if err != nil {
		var y yaml.Error
		if errors.As(err, &y) {
			return nil, p.errorf(y.GetToken(), "", "%s", y.GetMessage())
		}
		return nil, p.errorf(nil, "", "%v", err)
	}
	var docs []*ast.DocumentNode
	for _, d := range f.Docs {
		if d.Body != nil {
			docs = append(docs, d)
		}
	}
	if len(docs) == 0 {
		return nil, p.errorf(nil, "steps", "is missing: the file is empty")
	}
	if len(docs) > 1 {
		return nil, p.errorf(first(docs[1].Body), "", "a second document: a script is one")
	}
	return docs[0].Body, nil
}

// invalid is the offset of the first byte that is no UTF-8, or -1.
func invalid(src []byte) int {
	for i := 0; i < len(src); {
		r, n := utf8.DecodeRune(src[i:])
		if r == utf8.RuneError && n == 1 {
			return i
		}
		i += n
	}
	return -1
}

// tooDeep returns the first token that nests too deep, by brackets or by dashes
// of one line.
func tooDeep(tokens token.Tokens) *token.Token {
	flow, dashes, line := 0, 0, 0
	for _, t := range tokens {
		if t.Position != nil && t.Position.Line != line {
			line, dashes = t.Position.Line, 0
		}
		switch t.Type {
		case token.SequenceStartType, token.MappingStartType:
			flow++
		case token.SequenceEndType, token.MappingEndType:
			flow--
		case token.SequenceEntryType, token.MappingKeyType, token.TagType, token.AnchorType:
			dashes++
		}
		if flow > maxFlow || dashes > maxFlow {
			return t
		}
	}
	return nil
}

// first is the first token of a node: a block mapping's own token is that of its
// first colon.
func first(n ast.Node) *token.Token {
	switch n := n.(type) {
	case *ast.MappingNode:
		if !n.IsFlowStyle && len(n.Values) > 0 {
			return first(n.Values[0].Key)
		}
	case *ast.MappingValueNode:
		return first(n.Key)
	case nil:
		return nil
	}
	return n.GetToken()
}

// pairs are the entries of a mapping; ok is false where the node is none.
func pairs(n ast.Node) (list []*ast.MappingValueNode, ok bool) {
	switch n := n.(type) {
	case *ast.MappingNode:
		return n.Values, true
	case *ast.MappingValueNode:
		return []*ast.MappingValueNode{n}, true
	}
	return nil, false
}

// what names the kind of a node as a person would.
func what(n ast.Node) string {
	switch n.(type) {
	case nil, *ast.NullNode:
		return "nothing"
	case *ast.StringNode, *ast.LiteralNode:
		return "a text"
	case *ast.IntegerNode, *ast.FloatNode, *ast.InfinityNode, *ast.NanNode:
		return "a number"
	case *ast.BoolNode:
		return "true or false"
	case *ast.SequenceNode:
		return "a list"
	case *ast.MappingNode, *ast.MappingValueNode:
		return "a mapping"
	case *ast.AnchorNode, *ast.AliasNode, *ast.MergeKeyNode:
		return "an anchor or alias, which a script can't have"
	case *ast.TagNode:
		return "a tag, which a script can't have"
	}
	return "something else"
}

func join(field, key string) string {
	if field == "" {
		return key
	}
	return field + "." + key
}

// mapping reads a mapping that has just these keys, all of them.
func (p *parsing) mapping(n ast.Node, field string, keys ...string) (map[string]ast.Node, error) {
	values, at, err := p.entries(n, field, keys)
	if err != nil {
		return nil, err
	}
	for _, k := range keys {
		if _, ok := values[k]; !ok {
			return nil, p.errorf(at, join(field, k), "is missing")
		}
	}
	return values, nil
}

// entries reads a mapping that has only keys of this list.
func (p *parsing) entries(n ast.Node, field string, keys []string) (map[string]ast.Node, *token.Token, error) {
	list, ok := pairs(n)
	if !ok {
		return nil, nil, p.errorf(first(n), field, "must be a mapping of %s, not %s", strings.Join(keys, ", "), what(n))
	}
	values := make(map[string]ast.Node, len(list))
	for _, kv := range list {
		key, ok := kv.Key.(*ast.StringNode)
		if !ok {
			return nil, nil, p.errorf(first(kv.Key), field, "a key must be a text, not %s", what(kv.Key))
		}
		if !slices.Contains(keys, key.Value) {
			return nil, nil, p.errorf(key.GetToken(), join(field, key.Value), "unknown key; there are %s", strings.Join(keys, ", "))
		}
		if _, ok := values[key.Value]; ok {
			return nil, nil, p.errorf(key.GetToken(), join(field, key.Value), "is given twice")
		}
		values[key.Value] = kv.Value
	}
	return values, first(n), nil
}

// text reads a text: a string that is not empty unless empty says that it may be.
func (p *parsing) text(n ast.Node, field string, empty bool) (string, error) {
	s, ok := scalar(n)
	switch {
	case !ok && (what(n) == "a number" || what(n) == "true or false"):
		return "", p.errorf(first(n), field, "must be a text, not %s: put it in quotes", what(n))
	case !ok:
		return "", p.errorf(first(n), field, "must be a text, not %s", what(n))
	case s == "" && !empty:
		return "", p.errorf(first(n), field, "must not be empty")
	case len(s) > MaxText:
		return "", p.errorf(first(n), field, "is longer than %d bytes", MaxText)
	case !utf8.ValidString(s):
		return "", p.errorf(first(n), field, "holds an escape that is no character")
	}
	return s, nil
}

func scalar(n ast.Node) (string, bool) {
	switch n := n.(type) {
	case *ast.StringNode:
		return n.Value, true
	case *ast.LiteralNode:
		return n.Value.Value, true
	}
	return "", false
}

// word reads a text that the operating system takes: it can't hold a NUL.
func (p *parsing) word(n ast.Node, field string) (string, error) {
	s, err := p.text(n, field, false)
	if err == nil && strings.ContainsRune(s, 0) {
		err = p.errorf(first(n), field, "must not hold a NUL character")
	}
	return s, err
}

// number reads a whole number from low to high.
func (p *parsing) number(n ast.Node, field string, low, high int64) (int64, error) {
	i, ok := n.(*ast.IntegerNode)
	if !ok {
		return 0, p.errorf(first(n), field, "must be a whole number, not %s", what(n))
	}
	v := int64(-1)
	switch x := i.Value.(type) {
	case int64:
		v = x
	case uint64:
		if x <= 1<<62 {
			v = int64(x)
		}
	}
	if v < low || v > high {
		return 0, p.errorf(first(n), field, "must be from %d to %d", low, high)
	}
	return v, nil
}

// kinds are the keys of a step, in the order in which errors list them.
var kinds = []string{"say", "think", "run", "write", "edit", "call", "ask", "sleep", "crash", "flood", "repeat"}

func (p *parsing) steps(n ast.Node, field string, b bounds) ([]player.Step, error) {
	list, ok := n.(*ast.SequenceNode)
	if !ok {
		return nil, p.errorf(first(n), field, "must be a list of steps, not %s", what(n))
	}
	steps := make([]player.Step, 0, len(list.Values))
	for i, v := range list.Values {
		s, err := p.step(v, fmt.Sprintf("%s[%d]", field, i), b)
		if err != nil {
			return nil, err
		}
		steps = append(steps, s)
	}
	return steps, nil
}

func (p *parsing) step(n ast.Node, field string, b bounds) (s player.Step, err error) {
	values, at, err := p.entries(n, field, kinds)
	if err != nil {
		return s, err
	}
	if len(values) != 1 {
		return s, p.errorf(at, field, "has %d keys: a step has just one", len(values))
	}
	if p.written++; p.written > MaxSteps {
		return s, p.errorf(at, field, "more than %d steps", MaxSteps)
	}
	if p.expanded += b.times; p.expanded > MaxExpanded {
		return s, p.errorf(at, field, "more than %d steps, counted as often as they are repeated", MaxExpanded)
	}
	for kind, v := range values { // just one
		field = join(field, kind)
		switch kind {
		case "say":
			s.Say, err = p.text(v, field, false)
		case "think":
			s.Think, err = p.text(v, field, false)
		case "run":
			s.Run, err = p.word(v, field)
		case "write":
			s.Write, err = p.write(v, field)
		case "edit":
			s.Edit, err = p.edit(v, field)
		case "call":
			s.Call = new(player.Call)
			s.Call.Tool, s.Call.Args, err = p.use(v, field, "args")
		case "ask":
			s.Ask = new(player.Ask)
			s.Ask.Tool, s.Ask.Input, err = p.use(v, field, "input")
		case "sleep":
			s.Sleep, err = p.pause(v, field)
		case "crash":
			s.Crash, err = p.crash(v, field)
		case "flood":
			s.Flood, err = p.floods(v, field, b)
		case "repeat":
			s.Repeat, err = p.repeat(v, field, b)
		}
	}
	return s, err
}

func (p *parsing) write(n ast.Node, field string) (*player.Write, error) {
	v, err := p.mapping(n, field, "path", "content")
	if err != nil {
		return nil, err
	}
	w := new(player.Write)
	if w.Path, err = p.word(v["path"], join(field, "path")); err != nil {
		return nil, err
	}
	w.Content, err = p.text(v["content"], join(field, "content"), true)
	return w, err
}

func (p *parsing) edit(n ast.Node, field string) (*player.Edit, error) {
	v, err := p.mapping(n, field, "path", "old", "new")
	if err != nil {
		return nil, err
	}
	e := new(player.Edit)
	if e.Path, err = p.word(v["path"], join(field, "path")); err != nil {
		return nil, err
	}
	if e.Old, err = p.text(v["old"], join(field, "old"), false); err != nil {
		return nil, err
	}
	if e.New, err = p.text(v["new"], join(field, "new"), true); err != nil {
		return nil, err
	}
	if e.Old == e.New {
		return nil, p.errorf(first(v["new"]), join(field, "new"), "is the same as old")
	}
	return e, nil
}

// use reads a tool and its input, which may be absent.
func (p *parsing) use(n ast.Node, field, input string) (string, json.RawMessage, error) {
	v, at, err := p.entries(n, field, []string{"tool", input})
	if err != nil {
		return "", nil, err
	}
	if _, ok := v["tool"]; !ok {
		return "", nil, p.errorf(at, join(field, "tool"), "is missing")
	}
	tool, err := p.word(v["tool"], join(field, "tool"))
	if err != nil {
		return "", nil, err
	}
	in, ok := v[input]
	if !ok {
		return tool, nil, nil
	}
	if _, ok := pairs(in); !ok {
		return "", nil, p.errorf(first(in), join(field, input), "must be a mapping, not %s", what(in))
	}
	var b bytes.Buffer
	if err := p.json(&b, in, join(field, input)); err != nil {
		return "", nil, err
	}
	if b.Len() > MaxText {
		return "", nil, p.errorf(first(in), join(field, input), "is longer than %d bytes as JSON", MaxText)
	}
	return tool, b.Bytes(), nil
}

func (p *parsing) pause(n ast.Node, field string) (time.Duration, error) {
	s, ok := scalar(n)
	if !ok {
		return 0, p.errorf(first(n), field, "must be a duration such as 25ms, not %s", what(n))
	}
	d, err := time.ParseDuration(s)
	switch {
	case err != nil:
		return 0, p.errorf(first(n), field, "%q is no duration such as 25ms", s)
	case d <= 0 || d > time.Hour:
		return 0, p.errorf(first(n), field, "must be above 0 and at most 1h")
	}
	return d, nil
}

func (p *parsing) crash(n ast.Node, field string) (*player.Crash, error) {
	if _, ok := pairs(n); !ok {
		code, err := p.number(n, field, 0, 255)
		return &player.Crash{Code: int(code)}, err
	}
	v, err := p.mapping(n, field, "signal")
	if err != nil {
		return nil, err
	}
	s, err := p.text(v["signal"], join(field, "signal"), false)
	if err == nil && s != "KILL" {
		err = p.errorf(first(v["signal"]), join(field, "signal"), "must be KILL")
	}
	return &player.Crash{Signal: s}, err
}

func (p *parsing) floods(n ast.Node, field string, b bounds) (*player.Flood, error) {
	v, err := p.mapping(n, field, "lines", "bytes")
	if err != nil {
		return nil, err
	}
	lines, err := p.number(v["lines"], join(field, "lines"), 1, MaxFlood)
	if err != nil {
		return nil, err
	}
	size, err := p.number(v["bytes"], join(field, "bytes"), 1, MaxFlood)
	if err != nil {
		return nil, err
	}
	// Each factor is at most 2^30, so the comparison can't overflow.
	left := (MaxFlood - p.flood) / b.times
	if lines > left || size > left/lines {
		return nil, p.errorf(first(n), field, "all floods together are more than %d bytes", MaxFlood)
	}
	p.flood += lines * size * b.times
	return &player.Flood{Lines: int(lines), Bytes: int(size)}, nil
}

func (p *parsing) repeat(n ast.Node, field string, b bounds) (*player.Repeat, error) {
	v, err := p.mapping(n, field, "times", "steps")
	if err != nil {
		return nil, err
	}
	if b.depth++; b.depth > MaxNesting {
		return nil, p.errorf(first(n), field, "nests deeper than %d", MaxNesting)
	}
	times, err := p.number(v["times"], join(field, "times"), 1, MaxTimes)
	if err != nil {
		return nil, err
	}
	// An empty list that is repeated turns a wheel without end or use.
	if list, ok := v["steps"].(*ast.SequenceNode); ok && len(list.Values) == 0 {
		return nil, p.errorf(first(list), join(field, "steps"), "must not be empty")
	}
	if b.times *= times; b.times > MaxExpanded {
		return nil, p.errorf(first(v["times"]), join(field, "times"), "more than %d steps, counted as often as they are repeated", MaxExpanded)
	}
	steps, err := p.steps(v["steps"], join(field, "steps"), b)
	return &player.Repeat{Times: int(times), Steps: steps}, err
}
