package secret

import (
	"bytes"
	"context"
	"encoding/gob"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const value = "tok-very-secret"

func mustSet(t testing.TB, vals map[string]string) *Set {
	t.Helper()
	s, err := NewSet(vals)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestResolve(t *testing.T) {
	s := mustSet(t, map[string]string{"GH": value})
	other := mustSet(t, map[string]string{"GH": "stranger-value"})
	for _, c := range []struct {
		val  Value
		want string
		err  error
	}{
		{s.Ref("GH"), value, nil},
		{Bearer(s.Ref("GH")), "Bearer " + value, nil},
		{Plain("v1"), "v1", nil},
		{nil, "", nil},
		{s.Ref("UNKNOWN"), "", ErrUnknown},
		{other.Ref("GH"), "", ErrForeign},
		{Bearer(other.Ref("GH")), "", ErrForeign},
		{Ref{}, "", ErrUnknown},
		{(*Set)(nil).Ref("GH"), "", ErrForeign},
	} {
		got, err := s.Resolve(c.val)
		if got != c.want || !errors.Is(err, c.err) {
			t.Errorf("Resolve(%v) = %q, %v", c.val, got, err)
		}
		if err != nil && (strings.Contains(err.Error(), value) || strings.Contains(err.Error(), "stranger")) {
			t.Errorf("the error shows a value: %v", err)
		}
	}
	if _, err := s.Resolve(s.Ref("UNKNOWN")); !strings.Contains(err.Error(), "UNKNOWN") {
		t.Error(err)
	}
	if _, err := (&Set{}).Resolve(s.Ref("GH")); !errors.Is(err, ErrUnknown) {
		t.Error(err)
	}
}

func TestNewSetRefuses(t *testing.T) {
	for name, val := range map[string]string{"A-B": "x", "": "x", "1A": "x", "A B": "x", "Ä": "x", "A\n": "x", "NUL": "a\x00b", "LONG": strings.Repeat("x", MaxValue+1)} {
		_, err := NewSet(map[string]string{name: val})
		var ne *NameError
		if !errors.As(err, &ne) || ne.Name != name || len(err.Error()) > 200 {
			t.Errorf("%q: %.100v", name, err)
		}
	}
}

func TestEnv(t *testing.T) {
	s := mustSet(t, map[string]string{"B": "2", "A": "x y\nz", "EMPTY": ""})
	if diff := cmp.Diff([]string{"A=x y\nz", "B=2"}, s.Env()); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]string{"EMPTY"}, s.Empty()); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]string{"A", "B", "EMPTY"}, s.Names()); diff != "" {
		t.Error(diff)
	}
	var zero *Set
	if zero.Env() != nil || zero.Names() != nil || zero.Empty() != nil || zero.Has("A") {
		t.Error("a nil set is not empty")
	}
}

// holder has secrets where printers reach them only by reflection.
type holder struct {
	Ref    Ref
	Bearer BearerRef
	Set    *Set
	Val    Value
	hidden Ref
	set    *Set
	copied Set
	bearer BearerRef
	Map    map[string]Ref
	List   []Value
}

func TestNothingPrints(t *testing.T) {
	s := mustSet(t, map[string]string{"GH": value})
	r, b := s.Ref("GH"), Bearer(s.Ref("GH"))
	h := holder{r, b, s, r, r, s, *s, b, map[string]Ref{"k": r}, []Value{r, b}}
	check := func(how, out string, named bool) {
		t.Helper()
		for _, form := range append(forms(value), value) {
			if strings.Contains(out, form) {
				t.Errorf("%s shows the value: %s", how, out)
			}
		}
		if named && !strings.Contains(out, "GH") {
			t.Errorf("%s does not show the name: %s", how, out)
		}
	}
	for _, verb := range strings.Split("v +v #v s q x X d b o c U e f g t T p 10s -20q # x +d", " ") {
		for _, v := range []any{r, &r, b, &b, s, *s, h, &h, []any{r, b, s}, map[string]any{"k": r}, r.v, struct{ v any }{r}} {
			named := verb != "T" && verb != "p" && verb != "t"
			switch v.(type) {
			case Ref, BearerRef:
			default:
				named = false
			}
			check(fmt.Sprintf("%%%s of %T", verb, v), fmt.Sprintf("%"+verb, v), named)
		}
	}
	for _, v := range []any{r, &r, b, s, *s, h, &h, map[Ref]string{r: "x"}} {
		out, err := json.Marshal(v)
		if err != nil {
			t.Errorf("json of %T: %v", v, err)
		}
		check(fmt.Sprintf("json of %T", v), string(out), true)
		var buf bytes.Buffer
		if err := gob.NewEncoder(&buf).Encode(v); err == nil {
			check(fmt.Sprintf("gob of %T", v), buf.String(), false)
		}
		if out, err := xml.Marshal(v); err == nil {
			check(fmt.Sprintf("xml of %T", v), string(out), false)
		}
		for _, h := range []func(*bytes.Buffer) slog.Handler{
			func(w *bytes.Buffer) slog.Handler { return slog.NewTextHandler(w, nil) },
			func(w *bytes.Buffer) slog.Handler { return slog.NewJSONHandler(w, nil) },
		} {
			var buf bytes.Buffer
			slog.New(h(&buf)).Info("m", "k", v, slog.Group("g", "k", v))
			check(fmt.Sprintf("slog of %T", v), buf.String(), false)
		}
	}
	if out, _ := json.Marshal(s.Ref(`x"y`)); string(out) != `"[secret:?]"` {
		t.Errorf("a name that is none: %s", out)
	}
}

func TestNothingDecodes(t *testing.T) {
	for _, text := range []string{`"GH"`, `"[secret:GH]"`, `{"name":"GH"}`, `{"__secretName":"GH"}`, `[]`, `1`} {
		for _, v := range []any{new(Ref), new(BearerRef), new(Set)} {
			if err := json.Unmarshal([]byte(text), v); err == nil {
				t.Errorf("%s became a %T", text, v)
			}
		}
		var h struct{ Val Value }
		if err := json.Unmarshal([]byte(`{"Val":`+text+`}`), &h); err == nil {
			t.Errorf("%s became a value", text)
		}
	}
	s := mustSet(t, map[string]string{"GH": value})
	var buf bytes.Buffer
	if err := gob.NewEncoder(&buf).Encode(s.Ref("GH")); err != nil {
		t.Fatal(err)
	}
	if err := gob.NewDecoder(&buf).Decode(new(Ref)); !errors.Is(err, ErrDecode) {
		t.Error(err)
	}
}

func TestLogHandler(t *testing.T) {
	r := NewRedactor(mustSet(t, map[string]string{"GH": value}))
	var buf bytes.Buffer
	l := slog.New(r.Handler(slog.NewJSONHandler(&buf, nil))).With("with", value).WithGroup("g")
	l.InfoContext(context.Background(), "m "+value, "s", value, "e", errors.New("e "+value), "n", 1,
		slog.Group("in", "x", value), "st", struct{ A string }{value}, "lv", mustSet(t, map[string]string{"GH": value}).Ref("GH"))
	out := buf.String()
	if strings.Contains(out, value) || strings.Count(out, "[secret:GH]") != 7 || !strings.Contains(out, `"n":1`) {
		t.Error(out)
	}
}
