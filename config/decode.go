package config

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/aisandbox-go/aisandbox/internal/yamltree"
	"github.com/aisandbox-go/aisandbox/policy"
	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/sandbox"
)

// FileError says what in a configuration can't be used, where it is, and what to
// do.
type FileError struct {
	File         string
	Line, Column int    // counted from 1
	Field        string // "sandboxes.demo.provider"; empty: the whole file
	Msg          string
	Cure         string
	Err          error // the cause; may be nil
}

func (e *FileError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s:%d:%d: ", e.File, e.Line, e.Column)
	if e.Field != "" {
		b.WriteString(e.Field + ": ")
	}
	b.WriteString(e.Msg)
	if e.Cure != "" {
		b.WriteString(": " + e.Cure)
	}
	return b.String()
}

// Unwrap returns the cause.
func (e *FileError) Unwrap() error { return e.Err }

// Code is "invalid_input".
func (e *FileError) Code() string { return "invalid_input" }

// maxErrors bounds what is reported of one file.
const maxErrors = 20

// source remembers where each field of a file is.
type source struct {
	name string
	pos  map[string]yamltree.Pos
	errs []*FileError
}

// fail reports a field, at its own place or that of the nearest one around it.
func (s *source) fail(path, msg, cure string) *FileError {
	e := &FileError{File: s.name, Field: path, Msg: msg, Cure: cure}
	at := s.at(path)
	e.Line, e.Column = at.Line, at.Column
	s.errs = append(s.errs, e)
	return e
}

func (s *source) at(path string) yamltree.Pos {
	for p := path; ; {
		if at, ok := s.pos[p]; ok {
			return at
		}
		i := strings.LastIndexAny(p, ".[")
		if i < 0 {
			return yamltree.Pos{Line: 1, Column: 1}
		}
		p = p[:i]
	}
}

// err joins what was reported, in the order of the file.
func (s *source) err() error {
	if len(s.errs) == 0 {
		return nil
	}
	errs := slices.Clone(s.errs)
	slices.SortStableFunc(errs, func(a, b *FileError) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
	})
	var all []error
	for _, e := range errs[:min(len(errs), maxErrors)] {
		all = append(all, e)
	}
	return errors.Join(all...)
}

// fromNode is a type of the file that isn't read by its Go kind.
type fromNode interface {
	fromNode(s *source, n *yamltree.Node, path string)
}

// enums are the texts that a type takes.
var enums = map[reflect.Type][]string{
	reflect.TypeFor[sandbox.Reuse]():      {string(sandbox.PerThread), string(sandbox.PerRun)},
	reflect.TypeFor[sandbox.Snapshots]():  {string(sandbox.AfterSetup), string(sandbox.NoSnapshot)},
	reflect.TypeFor[sandbox.OnComplete](): {string(sandbox.Keep), string(sandbox.Destroy)},
	reflect.TypeFor[sandbox.FileEvents](): {string(sandbox.FileEventsOn), string(sandbox.FileEventsDiff), string(sandbox.FileEventsOff)},
	reflect.TypeFor[provider.Network]():   {string(provider.NetworkNone), string(provider.NetworkHost)},
	reflect.TypeFor[policy.Decision]():    {string(policy.Allow), string(policy.Ask), string(policy.Deny)},
	reflect.TypeFor[Busy]():               {string(BusyQueue), string(BusyReject), string(BusySupersede)},
}

// decode reads a node into v, which is settable. What is wrong is reported and
// left out.
func (s *source) decode(n *yamltree.Node, v reflect.Value, path string) {
	if n.Kind == yamltree.Null {
		s.fail(path, "has no value", "write one, or remove the key")
		return
	}
	if f, ok := v.Addr().Interface().(fromNode); ok {
		f.fromNode(s, n, path)
		return
	}
	t := v.Type()
	switch v.Kind() {
	case reflect.Pointer:
		p := reflect.New(t.Elem())
		s.decode(n, p.Elem(), path)
		v.Set(p)
	case reflect.Struct:
		s.object(n, v, path)
	case reflect.Map:
		if !s.want(n, yamltree.Map, path) {
			return
		}
		m := reflect.MakeMap(t)
		for _, f := range n.Fields {
			p := join(path, f.Key)
			s.pos[p] = f.Pos
			e := reflect.New(t.Elem()).Elem()
			s.decode(f.Value, e, p)
			m.SetMapIndex(reflect.ValueOf(f.Key), e)
		}
		v.Set(m)
	case reflect.Slice:
		if !s.want(n, yamltree.List, path) {
			return
		}
		l := reflect.MakeSlice(t, len(n.Items), len(n.Items))
		for i, item := range n.Items {
			p := fmt.Sprintf("%s[%d]", path, i)
			s.pos[p] = item.Pos
			s.decode(item, l.Index(i), p)
		}
		v.Set(l)
	case reflect.String:
		if !s.want(n, yamltree.Text, path) {
			return
		}
		if known := enums[t]; known != nil && !slices.Contains(known, n.Text) {
			s.fail(path, fmt.Sprintf("is %q", clip(n.Text)), "use "+orList(known))
			return
		}
		v.SetString(n.Text)
	case reflect.Int:
		if !s.want(n, yamltree.Number, path) {
			return
		}
		i, err := strconv.Atoi(n.Text)
		if err != nil || i < 1 {
			s.fail(path, fmt.Sprintf("is %s", clip(n.Text)), "write a whole number from 1")
			return
		}
		v.SetInt(int64(i))
	case reflect.Bool:
		if s.want(n, yamltree.Bool, path) {
			v.SetBool(n.Text == "true")
		}
	default:
		panic("config: no way to read a " + t.String())
	}
}

func (s *source) want(n *yamltree.Node, k yamltree.Kind, path string) bool {
	if n.Kind == k {
		return true
	}
	cure := "write " + k.String()
	if k == yamltree.Text && n.Kind != yamltree.List && n.Kind != yamltree.Map {
		cure = "quote it"
	}
	s.fail(path, "is "+n.Kind.String(), cure)
	return false
}

func (s *source) object(n *yamltree.Node, v reflect.Value, path string) {
	if !s.want(n, yamltree.Map, path) {
		return
	}
	known := map[string]int{}
	var names []string
	for i := range v.NumField() {
		f := v.Type().Field(i)
		if name, _, _ := strings.Cut(f.Tag.Get("json"), ","); f.IsExported() {
			known[name] = i
			names = append(names, name)
		}
	}
	for _, f := range n.Fields {
		p := join(path, f.Key)
		s.pos[p] = f.Pos
		i, ok := known[f.Key]
		if !ok {
			s.fail(p, "is no key that is known here", "use "+orList(slices.Sorted(slices.Values(names))))
			continue
		}
		s.decode(f.Value, v.Field(i), p)
	}
	for i := range v.NumField() {
		name, opts, _ := strings.Cut(v.Type().Field(i).Tag.Get("json"), ",")
		if v.Type().Field(i).IsExported() && opts == "" && n.Get(name) == nil {
			s.fail(path, name+" is missing", "add it")
		}
	}
}

func (d *Duration) fromNode(s *source, n *yamltree.Node, path string) {
	if v, ok := s.age(n, path, ""); ok {
		*d = Duration(v)
	}
}

func (a *Age) fromNode(s *source, n *yamltree.Node, path string) {
	if n.Kind == yamltree.Text && n.Text == "never" {
		*a = -1
		return
	}
	if v, ok := s.age(n, path, ", or never"); ok {
		*a = Age(v)
	}
}

func (s *source) age(n *yamltree.Node, path, more string) (time.Duration, bool) {
	const units = "write a number with its unit: 90s, 45m, 12h, 7d or 2w"
	if n.Kind != yamltree.Text {
		s.fail(path, "is "+n.Kind.String(), units+more)
		return 0, false
	}
	v, err := sandbox.ParseAge(n.Text)
	if err != nil || v <= 0 {
		s.fail(path, fmt.Sprintf("%q is no time above zero", clip(n.Text)), units+more)
		return 0, false
	}
	return v, true
}

const maxSize = 64 << 30

func (z *Size) fromNode(s *source, n *yamltree.Node, path string) {
	num, unit := n.Text, int64(1)
	for suffix, u := range map[string]int64{"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30} {
		if head, ok := strings.CutSuffix(n.Text, suffix); ok && n.Kind == yamltree.Text {
			num, unit = head, u
		}
	}
	v, err := strconv.ParseInt(num, 10, 64)
	if err != nil || v < 1 || v > maxSize/unit || n.Kind != yamltree.Number && unit == 1 {
		s.fail(path, "is no number of bytes from 1 to 64GiB", "write it such as 8MiB or 65536")
		return
	}
	*z = Size(v * unit)
}

func (c *Scalar) fromNode(s *source, n *yamltree.Node, path string) {
	switch n.Kind {
	case yamltree.Text, yamltree.Number, yamltree.Bool:
		*c = Scalar(n.Text)
	default:
		s.fail(path, "is "+n.Kind.String(), "write text")
	}
}

func (c *Choice) fromNode(s *source, n *yamltree.Node, path string) {
	const form = "write NAME, or NAME: {option: value}"
	switch {
	case n.Kind == yamltree.Text && n.Text != "":
		c.Name = n.Text
	case n.Kind == yamltree.Map && len(n.Fields) == 1:
		f := n.Fields[0]
		p := join(path, f.Key)
		s.pos[p] = f.Pos
		if f.Value.Kind != yamltree.Map {
			s.fail(p, "is "+f.Value.Kind.String(), "write a mapping of its options, or "+f.Key+" alone, without the colon")
			return
		}
		c.Name, c.Section = f.Key, json.RawMessage(f.Value.AppendJSON(nil))
		s.remember(f.Value, p)
	case n.Kind == yamltree.Map:
		s.fail(path, fmt.Sprintf("names %d things", len(n.Fields)), form)
	default:
		s.fail(path, "is "+n.Kind.String(), form)
	}
}

// remember keeps the places of what is decoded later.
func (s *source) remember(n *yamltree.Node, path string) {
	for _, f := range n.Fields {
		p := join(path, f.Key)
		s.pos[p] = f.Pos
		s.remember(f.Value, p)
	}
	for i, e := range n.Items {
		p := fmt.Sprintf("%s[%d]", path, i)
		s.pos[p] = e.Pos
		s.remember(e, p)
	}
}

func (st *Step) fromNode(s *source, n *yamltree.Node, path string) {
	if n.Kind == yamltree.Text {
		st.Serial = []string{n.Text}
		return
	}
	if n.Kind != yamltree.Map {
		s.fail(path, "is "+n.Kind.String(), "write a command, or serial: [...] or parallel: [...]")
		return
	}
	type plain Step // without this method
	s.decode(n, reflect.ValueOf((*plain)(st)).Elem(), path)
	if len(n.Fields) != 1 {
		s.fail(path, "is no group", "write serial: [...] or parallel: [...], and the next group as the next item")
	}
}

func join(path, k string) string {
	if path == "" {
		return k
	}
	return path + "." + k
}

// orList is "a, b or c".
func orList(names []string) string {
	if len(names) < 2 {
		return strings.Join(names, "")
	}
	return strings.Join(names[:len(names)-1], ", ") + " or " + names[len(names)-1]
}

// clip bounds what is shown of a value.
func clip(v string) string {
	if r := []rune(v); len(r) > 80 {
		return string(r[:80]) + "…"
	}
	return v
}
