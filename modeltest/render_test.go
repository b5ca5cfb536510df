package modeltest

import (
	"encoding/json"
	"strings"
	"testing"
	"unicode/utf8"

	"pgregory.net/rapid"
)

func TestPieces(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		text, n := rapid.String().Draw(t, "text"), rapid.IntRange(0, 20).Draw(t, "n")
		out := pieces(text, n)
		runes := utf8.RuneCountInString(text)
		if want := max(1, min(n, runes)); len(out) != want {
			t.Fatalf("%d pieces, want %d", len(out), want)
		}
		var whole strings.Builder
		for _, p := range out {
			var s string
			if err := json.Unmarshal([]byte(`"`+p+`"`), &s); err != nil {
				t.Fatalf("%q: %v", p, err)
			}
			if size := utf8.RuneCountInString(s); size < runes/len(out) || size > runes/len(out)+1 {
				t.Fatalf("a piece of %d characters out of %d in %d", size, runes, len(out))
			}
			whole.WriteString(s)
		}
		if whole.String() != text {
			t.Fatalf("got %q, want %q", whole.String(), text)
		}
	})
}
