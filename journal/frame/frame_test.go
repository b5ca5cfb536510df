package frame

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

func TestToken(t *testing.T) {
	for _, tt := range []struct{ id, want string }{
		{"run-2a7f", "run-2a7f"},
		{"a_b", "a_5fb"},
		{"@", "_40"},
		{"_40", "_5f40"},
		{"a/b", "a_2fb"},
		{"é", "_c3_a9"},
		{"con", "_63_6f_6e"},
		{"CON.x", "CON.x"},
		{"lpt9", "_6c_70_74_39"},
		{"lpt0", "lpt0"},
		{"..", ".."},
		{"a b;$(touch x)", "a_20b_3b_24_28touch_20x_29"},
		{strings.Repeat("x", 200), strings.Repeat("x", 200)},
		{strings.Repeat("x", 201), strings.Repeat("x", 183) + "-84a0678c90937f5d"},
	} {
		got, err := Token(tt.id)
		if got != tt.want || err != nil {
			t.Errorf("Token(%q) = %q, %v; want %q", tt.id, got, err, tt.want)
		}
		back, err := RunID(got)
		switch {
		case len(tt.id) > 200:
			if err != ErrTokenTruncated {
				t.Errorf("RunID(%q): %v", got, err)
			}
		case back != tt.id || err != nil:
			t.Errorf("RunID(%q) = %q, %v", got, back, err)
		}
	}
	if _, err := Token(""); err != ErrEmptyRun {
		t.Errorf("Token(\"\"): %v", err)
	}
}

func TestRunIDRefusesDoubt(t *testing.T) {
	for _, tt := range []struct {
		token string
		want  error
	}{
		{"", ErrTokenMalformed},
		{"a_", ErrTokenMalformed},
		{"a_4", ErrTokenMalformed},
		{"a_zz", ErrTokenMalformed},
		{"a/b", ErrTokenMalformed},
		{"_ff", ErrTokenMalformed}, // no UTF-8
		{strings.Repeat("x", 201), ErrTokenTruncated},
		{strings.Repeat("x", 183) + "-0123456789abcdef", ErrTokenTruncated},
	} {
		if _, err := RunID(tt.token); err != tt.want {
			t.Errorf("RunID(%q): %v, want %v", tt.token, err, tt.want)
		}
	}
	if id, err := RunID("_C3_A9"); id != "é" || err != nil {
		t.Errorf("upper-case digits: %q, %v", id, err)
	}
	for _, bad := range []string{"", "a/b", "a\x00", strings.Repeat("x", 201)} {
		if ValidToken(bad) {
			t.Errorf("ValidToken(%q)", bad)
		}
	}
}

func TestTokenIsInjective(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, b := rapid.String().Draw(t, "a"), rapid.String().Draw(t, "b")
		if a == "" || b == "" {
			return
		}
		ta, _ := Token(a)
		tb, _ := Token(b)
		if (a == b) != (ta == tb) {
			t.Fatalf("Token(%q) = %q, Token(%q) = %q", a, ta, b, tb)
		}
		if !ValidToken(ta) {
			t.Fatalf("Token(%q) = %q is not valid", a, ta)
		}
		if id, err := RunID(ta); err != ErrTokenTruncated && (id != a || err != nil) {
			t.Fatalf("RunID(%q) = %q, %v", ta, id, err)
		}
	})
}

type flat struct {
	Type    Type
	Payload string
}

func readAll(r *Reader) ([]flat, error) {
	var out []flat
	for {
		f, err := r.Next()
		if err == io.EOF {
			return out, nil
		}
		if err != nil {
			return out, err
		}
		out = append(out, flat{f.Type, string(f.Payload)})
	}
}

var sample = []flat{
	{TypeHeader, `{"version":1}`}, {TypeLine, "one"}, {TypeLine, ""}, {TypeStderr, "oops\n"},
	{TypePartial, "half"}, {TypeLine, " and half"}, {TypeHeartbeat, "\x01\x02\x03\x04\x05\x06\x07\x08"}, {TypePartial, "tail"},
}

func encode(frames []flat) []byte {
	var b []byte
	for _, f := range frames {
		b = Append(b, f.Type, []byte(f.Payload))
	}
	return b
}

func TestReader(t *testing.T) {
	b := encode(sample)
	for name, r := range map[string]io.Reader{
		"whole": bytes.NewReader(b), "bytewise": iotest.OneByteReader(bytes.NewReader(b)), "with error": iotest.DataErrReader(bytes.NewReader(b)),
	} {
		rd := NewReader(r, 100)
		got, err := readAll(rd)
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if d := cmp.Diff(sample, got); d != "" {
			t.Errorf("%s: %s", name, d)
		}
		if want := int64(100 + len(b)); rd.Offset() != want {
			t.Errorf("%s: offset %d, want %d", name, rd.Offset(), want)
		}
	}
}

func TestTornTailIsIgnored(t *testing.T) {
	b := encode(sample)
	whole := len(encode(sample[:len(sample)-1]))
	for cut := whole; cut < len(b); cut++ {
		rd := NewReader(bytes.NewReader(b[:cut]), 0)
		got, err := readAll(rd)
		if err != nil || len(got) != len(sample)-1 || rd.Offset() != int64(whole) {
			t.Fatalf("cut at %d: %d frames, offset %d, %v", cut, len(got), rd.Offset(), err)
		}
	}
}

func TestDamageInsideIsFound(t *testing.T) {
	b := encode(sample)
	last := len(encode(sample[:len(sample)-1]))
	for i := range b {
		bad := bytes.Clone(b)
		bad[i] ^= 0x40
		_, err := readAll(NewReader(bytes.NewReader(bad), 0))
		if i < last && !errors.Is(err, ErrTorn) {
			t.Fatalf("byte %d of %d was changed: %v", i, len(b), err)
		}
		if i >= last && err != nil {
			t.Fatalf("byte %d of the tail was changed: %v", i, err)
		}
	}
}

func TestReaderError(t *testing.T) {
	want := errors.New("wire")
	rd := NewReader(io.MultiReader(bytes.NewReader(encode(sample)), iotest.ErrReader(want)), 0)
	if got, err := readAll(rd); err != want || len(got) != len(sample) {
		t.Errorf("%d frames, %v", len(got), err)
	}
}

func tally(frames []flat) *Tally {
	var t Tally
	for _, f := range frames {
		t.Add(Frame{f.Type, []byte(f.Payload)})
	}
	return &t
}

func TestExit(t *testing.T) {
	nonce := []byte("0123456789abcdef0123456789abcdef")
	e := tally(sample).Sign(Exit{Code: 137, Signal: 9}, nonce, "run")
	if e.Lines != 4 || e.Bytes != int64(len("one\n\nhalf and half\ntail")) {
		t.Errorf("lines %d, bytes %d", e.Lines, e.Bytes)
	}
	got, err := ParseExit(e.Encode())
	if err != nil || got != e {
		t.Fatalf("ParseExit: %+v, %v", got, err)
	}
	if !tally(sample).Verify(got, nonce, "run") {
		t.Error("the true exit does not verify")
	}
	forged := func(name string, e Exit, frames []flat, nonce []byte, run string) {
		if tally(frames).Verify(e, nonce, run) {
			t.Errorf("%s verifies", name)
		}
	}
	other := got
	other.Code = 0
	forged("another code", other, sample, nonce, "run")
	other = got
	other.Signal = 0
	forged("another signal", other, sample, nonce, "run")
	forged("a removed line", got, sample[2:], nonce, "run")
	forged("another nonce", got, sample, []byte("guess"), "run")
	forged("another run", got, sample, nonce, "runx")
	changed := append([]flat(nil), sample...)
	changed[1].Payload = "two"
	forged("a changed line", got, changed, nonce, "run")
	moved := append([]flat(nil), sample...)
	moved[4].Payload, moved[5].Payload = "half ", "and half"
	forged("a moved frame border", got, moved, nonce, "run")
}

func FuzzReader(f *testing.F) {
	f.Add(encode(sample))
	f.Add(encode(sample)[:20])
	f.Add([]byte{1, 0, 0, 0, 0, 0, 0, 0, 0})
	f.Add([]byte{2, 255, 255, 255, 255, 1, 2, 3, 4, 5})
	f.Fuzz(func(t *testing.T, b []byte) {
		rd := NewReader(bytes.NewReader(b), 0)
		frames, _ := readAll(rd)
		again := encode(frames)
		if !bytes.HasPrefix(b, again) || rd.Offset() != int64(len(again)) {
			t.Errorf("frames %v do not encode to what was read", frames)
		}
		for _, f := range frames {
			if f.Type == TypeExit {
				if e, err := ParseExit([]byte(f.Payload)); err == nil && string(e.Encode()) != f.Payload {
					t.Errorf("exit %x does not encode to itself", f.Payload)
				}
			}
		}
	})
}
