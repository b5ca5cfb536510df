// Package secret keeps credentials from being seen.
//
// A [Set] holds the values. What travels through a program is a [Ref], which
// knows only a name: printing, logging or encoding it, in whatever form, yields
// [secret:NAME]. A value comes out in two places only, [Set.Env] and
// [Set.Resolve]. For text that may hold a value nonetheless, such as the output
// of a command, there is the [Redactor].
//
// Everything here may be used concurrently.
package secret

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
)

// MaxValue is the largest value that a Set takes, in bytes. One environment
// string is limited by the kernel to 128 KiB.
const MaxValue = 32 << 10

// Errors of this package. None of them holds a value.
var (
	ErrUnknown = errors.New("secret: unknown name")
	ErrForeign = errors.New("secret: reference belongs to another set")
	ErrDecode  = errors.New("secret: a reference can't be decoded, only made by Set.Ref")
)

// NameError says that a Set can't be made, because of one entry. It never holds
// the value.
type NameError struct {
	Name string
	Cure string
}

func (e *NameError) Error() string { return fmt.Sprintf("secret: name %q: %s", e.Name, e.Cure) }

// vault hides the values behind a function, so that no printer that walks
// memory by reflection comes to them.
type vault struct {
	get   func(name string) (string, bool)
	names []string // sorted
}

// Set is an immutable set of named secrets. The zero value, and nil, are empty.
type Set struct{ v *vault }

// NewSet makes a Set. A name must match [A-Za-z_][A-Za-z0-9_]*, as it becomes an
// environment variable; a value must be at most [MaxValue] bytes and hold no NUL.
// An empty value is kept, but not injected (see [Set.Env]).
func NewSet(values map[string]string) (*Set, error) {
	names := slices.Sorted(maps.Keys(values))
	for _, n := range names {
		if !validName(n) {
			return nil, &NameError{n, "use letters, digits and _ only, not starting with a digit"}
		}
		if strings.IndexByte(values[n], 0) >= 0 {
			return nil, &NameError{n, "the value holds a NUL byte; remove it"}
		}
		if len(values[n]) > MaxValue {
			return nil, &NameError{n, fmt.Sprintf("the value is longer than %d bytes; pass it as a file", MaxValue)}
		}
	}
	vals := maps.Clone(values)
	return &Set{&vault{
		get:   func(n string) (string, bool) { v, ok := vals[n]; return v, ok },
		names: names,
	}}, nil
}

func validName(n string) bool {
	for i := 0; i < len(n); i++ {
		c := n[i]
		if c != '_' && (c < 'A' || c > 'Z') && (c < 'a' || c > 'z') && (i == 0 || c < '0' || c > '9') {
			return false
		}
	}
	return n != ""
}

func (s *Set) vault() *vault {
	if s == nil {
		return nil
	}
	return s.v
}

// Names returns the names, sorted.
func (s *Set) Names() []string {
	if v := s.vault(); v != nil {
		return slices.Clone(v.names)
	}
	return nil
}

// Has says whether the set holds name.
func (s *Set) Has(name string) bool {
	v := s.vault()
	return v != nil && slices.Contains(v.names, name)
}

// Ref returns a reference to name. It never fails: that the set does not hold
// name is said by [Set.Check] and [Set.Resolve].
func (s *Set) Ref(name string) Ref { return Ref{name: name, v: s.vault()} }

// Check says whether [Set.Resolve] would succeed: [ErrUnknown], [ErrForeign] or
// nil. A nil Value is fine.
func (s *Set) Check(val Value) error {
	var r Ref
	switch x := val.(type) {
	case nil, Plain:
		return nil
	case Ref:
		r = x
	case BearerRef:
		r = x.ref
	default:
		return fmt.Errorf("secret: unknown kind of value %T", val)
	}
	if !s.Has(r.name) {
		return fmt.Errorf("%w %q", ErrUnknown, r.name)
	}
	if r.v != s.vault() {
		return fmt.Errorf("%w: %q", ErrForeign, r.name)
	}
	return nil
}

// Resolve returns the text that val stands for; the text of nil is empty. A
// reference made by another set is [ErrForeign], even where the names agree.
func (s *Set) Resolve(val Value) (string, error) {
	if err := s.Check(val); err != nil {
		return "", err
	}
	switch x := val.(type) {
	case Plain:
		return string(x), nil
	case Ref:
		return x.v.reveal(x.name), nil
	case BearerRef:
		return "Bearer " + x.ref.v.reveal(x.ref.name), nil
	}
	return "", nil
}

// Env returns the secrets as NAME=value, sorted by name. Empty values are left
// out: an empty variable can override a login that works (spec 01 §6). Their
// names are told by [Set.Empty].
func (s *Set) Env() []string {
	v := s.vault()
	if v == nil {
		return nil
	}
	var env []string
	for _, n := range v.names {
		if val := v.reveal(n); val != "" {
			env = append(env, n+"="+val)
		}
	}
	return env
}

// Empty returns the names whose value is empty.
func (s *Set) Empty() []string {
	v := s.vault()
	if v == nil {
		return nil
	}
	var names []string
	for _, n := range v.names {
		if v.reveal(n) == "" {
			names = append(names, n)
		}
	}
	return names
}

// reveal is the one way to a value. Who calls it: Set.Resolve, Set.Env and
// Set.Empty, and NewRedactor, which keeps the values to hide them.
func (v *vault) reveal(name string) string {
	val, _ := v.get(name)
	return val
}

// Value is a text that may be secret: a [Ref], a [Bearer] or a [Plain] text. A
// nil Value stands for none.
type Value interface {
	fmt.Stringer
	sealed()
}

// Plain is a Value that is no secret and prints as it is.
type Plain string

// String returns the text.
func (p Plain) String() string { return string(p) }

func (Plain) sealed() {}

// Ref names a secret of one Set. The zero value resolves nowhere. Refs are
// comparable.
type Ref struct {
	name string
	v    *vault
}

// Name returns the secret's name.
func (r Ref) Name() string { return r.name }

func (Ref) sealed() {}

// BearerRef is a Value that resolves to "Bearer " and the secret.
type BearerRef struct{ ref Ref }

// Bearer returns the value of an Authorization header that carries r.
func Bearer(r Ref) BearerRef { return BearerRef{r} }

// Ref returns what b was made of.
func (b BearerRef) Ref() Ref { return b.ref }

func (BearerRef) sealed() {}

// label is what is shown in place of the secret name. A Ref may have been made
// with any text; only a name that a Set accepts is shown, so that a label never
// needs escaping.
func label(name string) string {
	if !validName(name) {
		name = "?"
	}
	return "[secret:" + name + "]"
}

// What follows keeps Ref, BearerRef and Set dark in every encoding of the
// standard library. Decoding always fails, so that no input can forge one.

func (r Ref) String() string               { return label(r.name) }
func (r Ref) GoString() string             { return label(r.name) }
func (r Ref) Format(f fmt.State, _ rune)   { _, _ = f.Write([]byte(label(r.name))) }
func (r Ref) LogValue() slog.Value         { return slog.StringValue(label(r.name)) }
func (r Ref) MarshalText() ([]byte, error) { return []byte(label(r.name)), nil }
func (r Ref) MarshalJSON() ([]byte, error) { return []byte(`"` + label(r.name) + `"`), nil }
func (r Ref) GobEncode() ([]byte, error)   { return []byte(label(r.name)), nil }
func (r *Ref) UnmarshalText([]byte) error  { return ErrDecode }
func (r *Ref) UnmarshalJSON([]byte) error  { return ErrDecode }
func (r *Ref) GobDecode([]byte) error      { return ErrDecode }

func (b BearerRef) text() string                 { return "Bearer " + label(b.ref.name) }
func (b BearerRef) String() string               { return b.text() }
func (b BearerRef) GoString() string             { return b.text() }
func (b BearerRef) Format(f fmt.State, _ rune)   { _, _ = f.Write([]byte(b.text())) }
func (b BearerRef) LogValue() slog.Value         { return slog.StringValue(b.text()) }
func (b BearerRef) MarshalText() ([]byte, error) { return []byte(b.text()), nil }
func (b BearerRef) MarshalJSON() ([]byte, error) { return []byte(`"` + b.text() + `"`), nil }
func (b BearerRef) GobEncode() ([]byte, error)   { return []byte(b.text()), nil }
func (b *BearerRef) UnmarshalText([]byte) error  { return ErrDecode }
func (b *BearerRef) UnmarshalJSON([]byte) error  { return ErrDecode }
func (b *BearerRef) GobDecode([]byte) error      { return ErrDecode }

func (s Set) text() string                 { return "[secrets:" + strings.Join(s.Names(), ",") + "]" }
func (s Set) String() string               { return s.text() }
func (s Set) GoString() string             { return s.text() }
func (s Set) Format(f fmt.State, _ rune)   { _, _ = f.Write([]byte(s.text())) }
func (s Set) LogValue() slog.Value         { return slog.StringValue(s.text()) }
func (s Set) MarshalText() ([]byte, error) { return []byte(s.text()), nil }
func (s Set) MarshalJSON() ([]byte, error) { return []byte(`"` + s.text() + `"`), nil }
func (s Set) GobEncode() ([]byte, error)   { return []byte(s.text()), nil }
func (s *Set) UnmarshalText([]byte) error  { return ErrDecode }
func (s *Set) UnmarshalJSON([]byte) error  { return ErrDecode }
func (s *Set) GobDecode([]byte) error      { return ErrDecode }
