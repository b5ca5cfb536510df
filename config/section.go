package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"
)

// SectionError says what is wrong in a section.
type SectionError struct {
	Section string // "provider docker"
	Field   string // the key, "volumes[0].source"; empty: the whole section
	Err     error
}

func (e *SectionError) Error() string {
	if e.Field == "" {
		return fmt.Sprintf("config: %s: %v", e.Section, e.Err)
	}
	return fmt.Sprintf("config: %s: %s: %v", e.Section, e.Field, e.Err)
}

// Unwrap returns the cause.
func (e *SectionError) Unwrap() error { return e.Err }

// Decode decodes a section strictly into a struct. A key is the name of a field,
// in any case; a [time.Duration] is text such as "90s". Fields that no text can
// hold, such as a logger, are no keys. An empty section leaves the struct as it
// is. Every error is a [*SectionError].
func Decode(name string, section json.RawMessage, into any) error {
	if len(bytes.TrimSpace(section)) == 0 {
		return nil
	}
	fail := func(field string, err error) error { return &SectionError{name, field, err} }
	dec := json.NewDecoder(bytes.NewReader(section))
	dec.UseNumber()
	var tree any
	if err := dec.Decode(&tree); err != nil {
		return fail("", err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return fail("", errors.New("text after the object"))
	}
	tree, field, err := fit(tree, reflect.TypeOf(into).Elem(), "")
	if err != nil {
		return fail(field, err)
	}
	b, err := json.Marshal(tree)
	if err != nil {
		return fail("", err)
	}
	if err := json.Unmarshal(b, into); err != nil {
		var te *json.UnmarshalTypeError
		if errors.As(err, &te) {
			return fail(te.Field, fmt.Errorf("%s can't be a %s", te.Value, te.Type))
		}
		return fail("", err)
	}
	return nil
}

// holds says whether text can hold a value of t.
func holds(t reflect.Type) bool {
	switch t.Kind() {
	case reflect.Func, reflect.Chan, reflect.Interface, reflect.UnsafePointer, reflect.Pointer:
		return false
	}
	return true
}

// fit checks a JSON value against a type and turns durations into numbers. Field
// is where it is wrong.
func fit(v any, t reflect.Type, path string) (out any, field string, err error) {
	wrong := func(want string) (any, string, error) {
		return nil, path, fmt.Errorf("is %s; write %s", kindOf(v), want)
	}
	if t == reflect.TypeFor[time.Duration]() {
		s, ok := v.(string)
		if !ok {
			return wrong(`a time such as "90s"`)
		}
		d, err := time.ParseDuration(s)
		if err != nil {
			return nil, path, fmt.Errorf(`%q is no time; write it such as "90s"`, clip(s))
		}
		return int64(d), "", nil
	}
	switch t.Kind() {
	case reflect.Struct:
		m, ok := v.(map[string]any)
		if !ok {
			return wrong("a mapping")
		}
		var known []reflect.StructField
		for f := range t.Fields() {
			if f.IsExported() && holds(f.Type) {
				known = append(known, f)
			}
		}
		seen := map[string]string{}
		for _, k := range slices.Sorted(maps.Keys(m)) {
			p := join(path, k)
			i := slices.IndexFunc(known, func(f reflect.StructField) bool { return strings.EqualFold(f.Name, k) })
			if i < 0 {
				return nil, p, fmt.Errorf("is no key that is known here; use %s", orList(keys(known)))
			}
			f := known[i]
			if o, ok := seen[f.Name]; ok {
				return nil, p, fmt.Errorf("is the same as %s; remove one", o)
			}
			seen[f.Name] = k
			if m[k], field, err = fit(m[k], f.Type, p); err != nil {
				return nil, field, err
			}
		}
		return m, "", nil
	case reflect.Slice, reflect.Array:
		l, ok := v.([]any)
		if !ok {
			return wrong("a list")
		}
		for i := range l {
			if l[i], field, err = fit(l[i], t.Elem(), fmt.Sprintf("%s[%d]", path, i)); err != nil {
				return nil, field, err
			}
		}
		return l, "", nil
	case reflect.Map:
		m, ok := v.(map[string]any)
		if !ok {
			return wrong("a mapping")
		}
		for _, k := range slices.Sorted(maps.Keys(m)) {
			if m[k], field, err = fit(m[k], t.Elem(), join(path, k)); err != nil {
				return nil, field, err
			}
		}
		return m, "", nil
	case reflect.String:
		if _, ok := v.(string); !ok {
			return wrong("text (quote it)")
		}
	case reflect.Bool:
		if _, ok := v.(bool); !ok {
			return wrong("true or false")
		}
	default:
		if _, ok := v.(json.Number); !ok {
			return wrong("a number")
		}
	}
	return v, "", nil
}

// keys are the names of fields as a file has them.
func keys(fields []reflect.StructField) []string {
	var out []string
	for _, f := range fields {
		// ReadOnly is readOnly, UID is uid, CPUs is cpus.
		n, up := f.Name, 0
		for up < len(n) && n[up] >= 'A' && n[up] <= 'Z' {
			up++
		}
		if up > 1 && up < len(n) && n[up:] != "s" {
			up--
		}
		out = append(out, strings.ToLower(n[:up])+n[up:])
	}
	slices.Sort(out)
	return out
}

func kindOf(v any) string {
	switch v.(type) {
	case nil:
		return "empty"
	case bool:
		return "true or false"
	case json.Number:
		return "a number"
	case string:
		return "text"
	case []any:
		return "a list"
	}
	return "a mapping"
}
