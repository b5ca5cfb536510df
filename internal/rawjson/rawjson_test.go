package rawjson

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
)

func TestObject(t *testing.T) {
	type pair struct{ Name, Value string }
	for _, c := range []struct {
		in   string
		want []pair
		bad  bool
	}{
		{in: `{}`},
		{in: " {\t} \r\n"},
		{in: `{"a":1}`, want: []pair{{"a", "1"}}},
		{in: `{"a" : "x\"y" , "b":{"c":[1,2,{}]},"a":null}`, want: []pair{{"a", `"x\"y"`}, {"b", `{"c":[1,2,{}]}`}, {"a", "null"}}},
		{in: ``, bad: true},
		{in: `[]`, bad: true},
		{in: `{`, bad: true},
		{in: `{"a"}`, bad: true},
		{in: `{"a":1,}`, bad: true},
		{in: `{"a":1}x`, bad: true},
		{in: `{"a":01}`, bad: true},
		{in: `{"a":"` + "\n" + `"}`, bad: true},
		{in: `{"a":"\x"}`, bad: true},
		{in: `{"a":"\u12g4"}`, bad: true},
		{in: `{"a":tru}`, bad: true},
		{in: `{"a":` + strings.Repeat("[", 20000) + strings.Repeat("]", 20000) + `}`, bad: true},
	} {
		var got []pair
		err := Object([]byte(c.in), func(n, v []byte) bool { got = append(got, pair{string(n), string(v)}); return true })
		if (err != nil) != c.bad {
			t.Errorf("Object(%.40q) error = %v, want an error: %v", c.in, err, c.bad)
		}
		if !c.bad && !cmp.Equal(got, c.want) {
			t.Errorf("Object(%q): %s", c.in, cmp.Diff(c.want, got))
		}
	}
}

func TestAppendTextAcrossStrings(t *testing.T) {
	for _, c := range []struct {
		in   []string
		want string
		hi   rune
	}{
		{in: []string{`"plain"`}, want: "plain"},
		{in: []string{`"\ud83d"`, `"\ude00"`}, want: "😀"},
		{in: []string{`"a\ud83d"`, `""`, `"\ude00b"`}, want: "a😀b"},
		{in: []string{`"\ud83d"`, `"x"`}, want: "\ufffdx"},
		{in: []string{`"\ud83d"`, `"\n"`}, want: "\ufffd\n"},
		{in: []string{`"\ude00"`}, want: "\ufffd"},
		{in: []string{`"\ud83d\ud83d\ude00"`}, want: "\ufffd😀"},
		{in: []string{`"x\ud83d"`}, want: "x", hi: 0xd83d},
		{in: []string{`"\/\b\f\n\r\t\"\\\u00e9"`}, want: "/\b\f\n\r\t\"\\é"},
	} {
		var got []byte
		var hi rune
		for _, s := range c.in {
			got, hi = AppendText(got, []byte(s), hi)
		}
		if string(got) != c.want || hi != c.hi {
			t.Errorf("AppendText(%q) = %q, %x, want %q, %x", c.in, got, hi, c.want, c.hi)
		}
	}
}

// FuzzAgainstStdlib holds the reader against encoding/json.
func FuzzAgainstStdlib(f *testing.F) {
	for _, s := range []string{`{"a":[1,2.5e-3,true,null,"x\ud83d\ude00"]}`, `{"a":"\ud83d"}`, `[{}]`, `-0`, `"\u2028 é"`, `{"a":1}}`, "{\"a\":\"\xff\"}"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		err := Check(b)
		if ok := json.Valid(b); ok != (err == nil) {
			t.Fatalf("Check(%q) = %v, json.Valid %v", b, err, ok)
		}
		if err != nil {
			return
		}
		var want bytes.Buffer
		if err := json.Compact(&want, b); err != nil {
			t.Fatal(err)
		}
		if got := AppendCompact(nil, b); !bytes.Equal(got, want.Bytes()) {
			t.Fatalf("AppendCompact(%q) = %q, want %q", b, got, want.Bytes())
		}
		v := bytes.TrimSpace(b)
		if !IsString(v) || !utf8.Valid(v) {
			return
		}
		var ref string
		if err := json.Unmarshal(v, &ref); err != nil {
			t.Fatal(err)
		}
		got, ok := String(v)
		if !ok || got != ref {
			t.Fatalf("String(%q) = %q, want %q", v, got, ref)
		}
		var again string
		if err := json.Unmarshal(AppendQuoted(nil, got), &again); err != nil || again != ref {
			t.Fatalf("AppendQuoted(%q) reads back as %q, %v", got, again, err)
		}
	})
}
