package secret

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"strings"
	"testing"
	"testing/iotest"

	"pgregory.net/rapid"
)

func TestRedactorForms(t *testing.T) {
	for name, val := range map[string]string{
		"plain": value, "odd": `p@ss/w"o'r\d+<&>=?%`, "line": "line one here\nsecond line there", "unicode": "pässwörd-日本", "bytes": "\xff\xfe\x00ab"[:2] + "abcdef", "space": " padded-value ",
	} {
		t.Run(name, func(t *testing.T) {
			r := NewRedactor(mustSet(t, map[string]string{"X": val}))
			j, _ := json.Marshal(val)
			jj, _ := json.Marshal(string(j))
			texts := map[string]string{
				"raw": val, "json": string(j), "json in json": string(jj),
				"query": url.QueryEscape(val), "path": url.PathEscape(val), "lower": lowerPercent(url.QueryEscape(val)),
				"hex": hex.EncodeToString([]byte(val)), "HEX": strings.ToUpper(hex.EncodeToString([]byte(val))),
				"shell": strings.ReplaceAll(val, "'", `'\''`), "in": "a" + val + "b" + val,
				"crlf": strings.ReplaceAll(val, "\n", "\r\n"), "diff": "+" + strings.ReplaceAll(val, "\n", "\n+"),
			}
			for shift := range 3 {
				for tail := range 3 {
					in := strings.Repeat("p", shift) + val + strings.Repeat("q", tail)
					texts[fmt.Sprint("std", shift, tail)] = base64.StdEncoding.EncodeToString([]byte(in))
					texts[fmt.Sprint("url", shift, tail)] = base64.RawURLEncoding.EncodeToString([]byte(in))
				}
			}
			for how, text := range texts {
				got := r.String(text)
				if !strings.Contains(got, "[secret:X]") {
					t.Errorf("%s: %q is not redacted", how, text)
				}
				for _, f := range forms(val) {
					if strings.Contains(got, f) {
						t.Errorf("%s: %q still has %q", how, got, f)
					}
				}
			}
		})
	}
}

func TestRedactorBounds(t *testing.T) {
	r := NewRedactor(mustSet(t, map[string]string{"SHORT": "12345", "EMPTY": "", "SIX": "abcdef"}), nil)
	if got := r.String("12345 abcdef xabcdefx"); got != "12345 [secret:SIX] x[secret:SIX]x" {
		t.Error(got)
	}
	if s := r.Short(); len(s) != 1 || s[0] != "SHORT" {
		t.Error(s)
	}
	for _, idle := range []*Redactor{nil, NewRedactor(), NewRedactor(nil, &Set{})} {
		if got := idle.String("abcdef"); got != "abcdef" || !idle.Idle() {
			t.Error(got)
		}
		var b bytes.Buffer
		w := idle.Writer(&b)
		if _, err := io.WriteString(w, "abcdef"); err != nil || w.Close() != nil || b.String() != "abcdef" {
			t.Error(b.String(), err)
		}
	}
}

// Overlapping secrets are hidden whole, whichever begins first or is longer.
func TestRedactorOverlap(t *testing.T) {
	r := NewRedactor(mustSet(t, map[string]string{"A": "abcdefgh", "B": "efghijklmno", "C": "cdefgh", "D": "aaaaaa"}))
	for in, want := range map[string]string{
		"xabcdefghijklmnox":           "x[secret:B]x",
		"abcdefgh":                    "[secret:A]",
		"cdefghi":                     "[secret:C]i",
		"abcdefg":                     "abcdefg",
		"abcdefghabcdefgh":            "[secret:A][secret:A]",
		strings.Repeat("a", 1000):     "[secret:D]",
		"aaaaa b aaaaaab":             "aaaaa b [secret:D]b",
		"abcdabcdefgh":                "abcd[secret:A]",
		strings.Repeat("ab", 5) + "c": strings.Repeat("ab", 5) + "c",
	} {
		if got := r.String(in); got != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
}

// However a stream is cut, what comes out is the same, and what is held back is bounded.
func TestStreamsAnySplit(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		letters := rapid.StringOfN(rapid.SampledFrom([]rune("abA=\n\"é")), 6, 12, -1)
		vals := map[string]string{}
		for i, v := range rapid.SliceOfN(letters, 1, 4).Draw(t, "secrets") {
			vals[fmt.Sprintf("S%d", i)] = v
		}
		set, err := NewSet(vals)
		if err != nil {
			t.Fatal(err)
		}
		r := NewRedactor(set)
		var text strings.Builder
		for range rapid.IntRange(0, 8).Draw(t, "parts") {
			if rapid.Bool().Draw(t, "secret?") {
				v := vals[rapid.SampledFrom(set.Names()).Draw(t, "which")]
				text.WriteString(rapid.SampledFrom(forms(v)).Draw(t, "form"))
			} else {
				text.WriteString(rapid.StringOfN(rapid.SampledFrom([]rune("abA=\n\"é")), 0, 12, -1).Draw(t, "noise"))
			}
		}
		in := text.String()
		want := r.String(in)
		for _, v := range vals {
			for _, f := range forms(v) {
				if strings.Contains(want, f) && !strings.Contains("[secret:S0]", f) {
					t.Fatalf("%q shows %q", want, f)
				}
			}
		}
		var out bytes.Buffer
		w := r.Writer(&out)
		longest := 0
		for _, n := range r.auto.nodes {
			longest = max(longest, int(n.depth))
		}
		for rest := in; rest != ""; {
			n := rapid.IntRange(1, len(rest)).Draw(t, "write")
			if m, err := io.WriteString(w, rest[:n]); m != n || err != nil {
				t.Fatal(m, err)
			}
			rest = rest[n:]
			if len(w.m.held) > longest {
				t.Fatalf("%d bytes are held back, the longest form has %d", len(w.m.held), longest)
			}
		}
		if err := w.Close(); err != nil || out.String() != want {
			t.Fatalf("writer: %q, want %q (%v)", out.String(), want, err)
		}
		got, err := io.ReadAll(r.Reader(iotest.OneByteReader(strings.NewReader(in))))
		if err != nil || string(got) != want {
			t.Fatalf("reader: %q, want %q (%v)", got, want, err)
		}
		got, err = io.ReadAll(iotest.OneByteReader(r.Reader(iotest.DataErrReader(strings.NewReader(in)))))
		if err != nil || string(got) != want {
			t.Fatalf("reader: %q, want %q (%v)", got, want, err)
		}
	})
}

func TestRedactJSON(t *testing.T) {
	r := NewRedactor(mustSet(t, map[string]string{"N": "nsecret", "Q": `a"b\cd`, "NUM": "123456"}))
	for in, want := range map[string]string{
		`{"a":"x\nsecret"}`:           `{"a":"x\nsecret"}`, // a line break, then "secret"
		`{"a":"x nsecret"}`:           `{"a":"x [secret:N]"}`,
		`{"\u006esecret":1}`:          `{"[secret:N]":1}`,
		`{"a":"a\"b\\cd"}`:            `{"a":"[secret:Q]"}`,
		`{"a":["\\", "nsecret\\"]}`:   `{"a":["\\", "[secret:N]\\"]}`,
		`{"a":"{\"b\":\"nsecret\"}"}`: `{"a":"{\"b\":\"[secret:N]\"}"}`,
		`not json nsecret`:            `not json [secret:N]`,
	} {
		got := string(r.JSON([]byte(in)))
		if got != want {
			t.Errorf("%s: %s, want %s", in, got, want)
		}
		if json.Valid([]byte(in)) != json.Valid([]byte(got)) {
			t.Errorf("%s is no JSON any more: %s", in, got)
		}
	}
	if got := r.JSON([]byte(`{"a":123456}`)); !json.Valid(got) && !bytes.Contains(got, []byte("[secret:NUM]")) {
		t.Errorf("%s", got)
	}
}

type fieldError struct{ Name string }

func (e *fieldError) Error() string { return "field " + e.Name }

func TestRedactError(t *testing.T) {
	r := NewRedactor(mustSet(t, map[string]string{"GH": value}))
	err := r.Error(fmt.Errorf("at %s: %w: %w", value, fs.ErrNotExist, &fieldError{"f"}))
	var fe *fieldError
	if !errors.Is(err, fs.ErrNotExist) || !errors.As(err, &fe) || fe.Name != "f" {
		t.Errorf("the identity is lost: %v", err)
	}
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x"} {
		if out := fmt.Sprintf(verb, err); strings.Contains(out, value) || strings.Contains(out, hex.EncodeToString([]byte(value))) {
			t.Errorf("%s: %s", verb, out)
		}
	}
	plain := errors.New("plain")
	if r.Error(plain) != plain || r.Error(nil) != nil {
		t.Error("an error without a secret was changed")
	}
}

func TestTail(t *testing.T) {
	r := NewRedactor(mustSet(t, map[string]string{"GH": value}))
	if got := r.Tail("xx"+value, 8); got != "cret:GH]" { // cut out of the label, not of the value
		t.Error(got)
	}
	if got := r.Tail("日本語", 4); got != "語" {
		t.Errorf("%q", got)
	}
}

func TestWriterReportsErrors(t *testing.T) {
	r := NewRedactor(mustSet(t, map[string]string{"GH": value}))
	w := r.Writer(failing{})
	if _, err := io.WriteString(w, "text that is long"); !errors.Is(err, io.ErrShortWrite) {
		t.Error(err)
	}
	if err := w.Close(); !errors.Is(err, io.ErrShortWrite) {
		t.Error(err)
	}
}

type failing struct{}

func (failing) Write([]byte) (int, error) { return 0, io.ErrShortWrite }

func FuzzRedactor(f *testing.F) {
	f.Add("tok-very-secret", "xxtok-very-secretyy", 3)
	f.Add("aaaaaa", "aaaaaaaaaaab", 1)
	f.Add("abcabcab", "abcabcabcabc", 2)
	f.Fuzz(func(t *testing.T, val, text string, cut int) {
		set, err := NewSet(map[string]string{"S": val})
		if err != nil || len(val) < minRedact || strings.Contains("[secret:S]", val) {
			t.Skip()
		}
		r := NewRedactor(set)
		in := text + val + text
		want := r.String(in)
		var out bytes.Buffer
		w := r.Writer(&out)
		if cut = cut & 0xffff; cut > len(in) {
			cut = len(in)
		}
		_, _ = io.WriteString(w, in[:cut])
		_, _ = io.WriteString(w, in[cut:])
		_ = w.Close()
		if out.String() != want {
			t.Errorf("split at %d: %q, want %q", cut, out.String(), want)
		}
		if !strings.Contains(want, "[secret:S]") {
			t.Errorf("%q is not redacted", in)
		}
	})
}

func BenchmarkWriter(b *testing.B) {
	r := NewRedactor(mustSet(b, map[string]string{"A": "ghp_0123456789abcdefghij", "B": "sk-ant-0123456789abcdefghijklmnopqrstuvwxyz", "C": "xoxb-secret-value"}))
	text := bytes.Repeat([]byte("The quick brown fox jumps over the lazy dog, and says so. {\"k\": \"v\"}\n"), 1000)
	b.SetBytes(int64(len(text)))
	w := r.Writer(io.Discard)
	for b.Loop() {
		_, _ = w.Write(text)
	}
}
