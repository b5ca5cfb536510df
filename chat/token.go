package chat

import (
	"fmt"
	"maps"
	"slices"
)

// AnyToken is a [Token] of whatever type.
type AnyToken interface {
	// Name is for errors and logs; identity is the token itself.
	Name() string
	cure() string
}

// Token is the key of a value of type T in a run: what one middleware provides
// for others and for the adapter. Its identity is its address. Make it a package
// variable.
type Token[T any] struct{ name, hint string }

// NewToken returns a new token. Cure tells the user of a run that lacks it what
// to do: "add sandbox.With(definition) to Request.Use".
func NewToken[T any](name, cure string) *Token[T] { return &Token[T]{name, cure} }

// Name returns the name given to NewToken.
func (t *Token[T]) Name() string { return t.name }

func (t *Token[T]) cure() string { return t.hint }

// Provide sets the run's value. Providing twice is logged; the last value wins.
func (t *Token[T]) Provide(r *Run, v T) {
	r.values.Lock()
	_, twice := r.values.m[t]
	if r.values.m == nil {
		r.values.m = map[AnyToken]any{}
	}
	r.values.m[t] = v
	r.values.Unlock()
	if twice {
		r.log.Warn("a token was provided twice; the last value is used", keyToken, t.name)
	}
}

// Get returns the run's value and whether there is one.
func (t *Token[T]) Get(r *Run) (T, bool) {
	r.values.Lock()
	defer r.values.Unlock()
	v, ok := r.values.m[t].(T)
	return v, ok
}

// Need returns the run's value, or an error that says how to get one.
func (t *Token[T]) Need(r *Run) (T, error) {
	v, ok := t.Get(r)
	if !ok {
		return v, &MissingError{Adapter: r.req.Adapter.Name(), Token: t.name, Provided: r.provided(), Cure: t.hint}
	}
	return v, nil
}

// provided returns the names of what is provided, sorted.
func (r *Run) provided() []string {
	r.values.Lock()
	defer r.values.Unlock()
	var names []string
	for t := range maps.Keys(r.values.m) {
		names = append(names, t.Name())
	}
	slices.Sort(names)
	return names
}

func (r *Run) hasToken(t AnyToken) bool {
	r.values.Lock()
	defer r.values.Unlock()
	_, ok := r.values.m[t]
	return ok
}

// check tells, before anything boots, of what the run lacks.
func check(req Request) error {
	provider := map[AnyToken]int{}
	var names []string
	for i, m := range req.Use {
		for _, t := range m.Provides {
			if _, ok := provider[t]; !ok {
				provider[t] = i
				names = append(names, t.Name())
			}
		}
	}
	for _, t := range req.Adapter.Needs() {
		if _, ok := provider[t]; !ok {
			return &MissingError{Adapter: req.Adapter.Name(), Token: t.Name(), Provided: names, Cure: t.cure()}
		}
	}
	for i, m := range req.Use {
		for _, t := range m.After {
			if p, ok := provider[t]; ok && p >= i && !slices.Contains(m.Provides, t) {
				return &OrderError{Middleware: name(m, i), Token: t.Name(), Provider: name(req.Use[p], p)}
			}
		}
	}
	return nil
}

// name is a middleware's name in errors and logs.
func name(m Middleware, i int) string {
	if m.Name != "" {
		return m.Name
	}
	return fmt.Sprintf("unnamed #%d", i+1)
}
