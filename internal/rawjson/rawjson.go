// Package rawjson reads JSON text without building values: it checks a text once
// and hands out pieces of it. Agents print lines of many megabytes of which a
// few fields matter, and encoding/json would copy all of it; it would also turn
// each half of a surrogate pair that an agent split over two lines into U+FFFD.
//
// Functions never keep what they are given, and what they hand out is a slice of
// it. Where a name appears twice the caller sees both.
package rawjson

import (
	"bytes"
	"fmt"
	"unicode/utf16"
	"unicode/utf8"
)

// maxDepth bounds recursion, as in encoding/json.
const maxDepth = 10000

// SyntaxError tells where a text stops being JSON.
type SyntaxError struct {
	Offset int
	Want   string
}

func (e *SyntaxError) Error() string {
	return fmt.Sprintf("json: byte %d: want %s", e.Offset, e.Want)
}

// Object checks that b is one JSON object and calls f with each member: the name
// without its quotes, still escaped, and the value. f returns false to stop
// being called; the rest is still checked.
func Object(b []byte, f func(name, value []byte) bool) error {
	return object(b, f, true)
}

// Members is [Object] for a value that an earlier call has checked and handed
// out: it stops as soon as f returns false.
func Members(b []byte, f func(name, value []byte) bool) error {
	return object(b, f, false)
}

func object(b []byte, f func(name, value []byte) bool, rest bool) error {
	i := space(b, 0)
	if i >= len(b) || b[i] != '{' {
		return &SyntaxError{i, "an object"}
	}
	call := true
	i = space(b, i+1)
	if i < len(b) && b[i] == '}' {
		return end(b, i+1)
	}
	for {
		if i >= len(b) || b[i] != '"' {
			return &SyntaxError{i, "a name"}
		}
		j, err := str(b, i)
		if err != nil {
			return err
		}
		name := b[i+1 : j-1]
		i = space(b, j)
		if i >= len(b) || b[i] != ':' {
			return &SyntaxError{i, "a colon"}
		}
		i = space(b, i+1)
		j, err = value(b, i, 1)
		if err != nil {
			return err
		}
		if call {
			call = f(name, b[i:j])
			if !call && !rest {
				return nil
			}
		}
		i = space(b, j)
		if i < len(b) && b[i] == ',' {
			i = space(b, i+1)
			continue
		}
		if i < len(b) && b[i] == '}' {
			return end(b, i+1)
		}
		return &SyntaxError{i, "a comma or the end of the object"}
	}
}

// Array checks that b is one JSON array and calls f with each element until it
// returns false.
func Array(b []byte, f func(value []byte) bool) error {
	i := space(b, 0)
	if i >= len(b) || b[i] != '[' {
		return &SyntaxError{i, "an array"}
	}
	i = space(b, i+1)
	if i < len(b) && b[i] == ']' {
		return end(b, i+1)
	}
	for {
		j, err := value(b, i, 1)
		if err != nil {
			return err
		}
		if !f(b[i:j]) {
			return nil
		}
		i = space(b, j)
		if i < len(b) && b[i] == ',' {
			i = space(b, i+1)
			continue
		}
		if i < len(b) && b[i] == ']' {
			return end(b, i+1)
		}
		return &SyntaxError{i, "a comma or the end of the array"}
	}
}

// Check says whether b is one JSON value.
func Check(b []byte) error {
	j, err := value(b, space(b, 0), 0)
	if err != nil {
		return err
	}
	return end(b, j)
}

// Prefix returns the end of the JSON value that b begins with.
func Prefix(b []byte) (int, error) { return value(b, 0, 0) }

func end(b []byte, i int) error {
	if i = space(b, i); i < len(b) {
		return &SyntaxError{i, "nothing more"}
	}
	return nil
}

func space(b []byte, i int) int {
	for i < len(b) && (b[i] == ' ' || b[i] == '\n' || b[i] == '\t' || b[i] == '\r') {
		i++
	}
	return i
}

// value returns the end of the value that starts at i.
func value(b []byte, i, depth int) (int, error) {
	if i >= len(b) {
		return i, &SyntaxError{i, "a value"}
	}
	if depth > maxDepth {
		return i, &SyntaxError{i, "less nesting"}
	}
	switch c := b[i]; {
	case c == '"':
		return str(b, i)
	case c == '{', c == '[':
		closing := c + 2 // the ASCII distance of both pairs
		i = space(b, i+1)
		if i < len(b) && b[i] == closing {
			return i + 1, nil
		}
		for {
			var err error
			if c == '{' {
				if i >= len(b) || b[i] != '"' {
					return i, &SyntaxError{i, "a name"}
				}
				if i, err = str(b, i); err != nil {
					return i, err
				}
				i = space(b, i)
				if i >= len(b) || b[i] != ':' {
					return i, &SyntaxError{i, "a colon"}
				}
				i = space(b, i+1)
			}
			if i, err = value(b, i, depth+1); err != nil {
				return i, err
			}
			i = space(b, i)
			if i < len(b) && b[i] == ',' {
				i = space(b, i+1)
				continue
			}
			if i < len(b) && b[i] == closing {
				return i + 1, nil
			}
			return i, &SyntaxError{i, "a comma or the end"}
		}
	case c == '-', '0' <= c && c <= '9':
		return number(b, i)
	case c == 't':
		return word(b, i, "true")
	case c == 'f':
		return word(b, i, "false")
	case c == 'n':
		return word(b, i, "null")
	}
	return i, &SyntaxError{i, "a value"}
}

func word(b []byte, i int, w string) (int, error) {
	if len(b)-i < len(w) || string(b[i:i+len(w)]) != w {
		return i, &SyntaxError{i, w}
	}
	return i + len(w), nil
}

func number(b []byte, i int) (int, error) {
	if b[i] == '-' {
		i++
	}
	start := i
	i = digits(b, i)
	if i == start || (b[start] == '0' && i > start+1) {
		return i, &SyntaxError{start, "a number"}
	}
	if i < len(b) && b[i] == '.' {
		start = i + 1
		if i = digits(b, start); i == start {
			return i, &SyntaxError{i, "a digit"}
		}
	}
	if i < len(b) && (b[i] == 'e' || b[i] == 'E') {
		i++
		if i < len(b) && (b[i] == '+' || b[i] == '-') {
			i++
		}
		start = i
		if i = digits(b, start); i == start {
			return i, &SyntaxError{i, "a digit"}
		}
	}
	return i, nil
}

func digits(b []byte, i int) int {
	for i < len(b) && '0' <= b[i] && b[i] <= '9' {
		i++
	}
	return i
}

// str returns the end of the string whose opening quote is at i.
func str(b []byte, i int) (int, error) {
	i++
	for i < len(b) {
		switch c := b[i]; {
		case c == '"':
			return i + 1, nil
		case c == '\\':
			i++
			if i >= len(b) {
				return i, &SyntaxError{i, "an escape"}
			}
			switch b[i] {
			case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
				i++
			case 'u':
				if hex4(b, i+1) < 0 {
					return i, &SyntaxError{i + 1, "four hex digits"}
				}
				i += 5
			default:
				return i, &SyntaxError{i, "an escape"}
			}
		case c < 0x20:
			return i, &SyntaxError{i, "an escaped control character"}
		default:
			i++
		}
	}
	return i, &SyntaxError{i, "a closing quote"}
}

func hex4(b []byte, i int) rune {
	if len(b)-i < 4 {
		return -1
	}
	var r rune
	for _, c := range b[i : i+4] {
		switch {
		case '0' <= c && c <= '9':
			c -= '0'
		case 'a' <= c && c <= 'f':
			c -= 'a' - 10
		case 'A' <= c && c <= 'F':
			c -= 'A' - 10
		default:
			return -1
		}
		r = r<<4 | rune(c)
	}
	return r
}

// IsString, IsObject and IsNull tell a checked value by its first byte.
func IsString(v []byte) bool { return len(v) > 0 && v[0] == '"' }

// IsObject says that a checked value is an object.
func IsObject(v []byte) bool { return len(v) > 0 && v[0] == '{' }

// IsNull says that a checked value is null or that there is none.
func IsNull(v []byte) bool { return len(v) == 0 || v[0] == 'n' }

// String is the text of a checked string value, and false for any other value.
// Half a surrogate pair becomes U+FFFD.
func String(v []byte) (string, bool) {
	if !IsString(v) || len(v) < 2 {
		return "", false
	}
	in := v[1 : len(v)-1]
	if bytes.IndexByte(in, '\\') < 0 {
		return string(in), true
	}
	b, hi := AppendText(make([]byte, 0, len(in)), v, 0)
	if hi != 0 {
		b = utf8.AppendRune(b, utf8.RuneError)
	}
	return string(b), true
}

// AppendText appends the text of the checked string v. A stream of strings may
// split a surrogate pair: hi is the high half that the string before ended with,
// 0 for none, and the high half that v ends with is returned instead of being
// appended.
func AppendText(dst, v []byte, hi rune) ([]byte, rune) {
	if len(v) < 2 {
		return dst, hi
	}
	in := v[1 : len(v)-1]
	for len(in) > 0 {
		n := bytes.IndexByte(in, '\\')
		if n != 0 {
			if hi != 0 {
				dst, hi = utf8.AppendRune(dst, utf8.RuneError), 0
			}
			if n < 0 {
				return append(dst, in...), 0
			}
			dst = append(dst, in[:n]...)
			in = in[n:]
		}
		if len(in) < 2 {
			return dst, hi // not reached by a checked value
		}
		var r rune
		switch c := in[1]; c {
		case 'u':
			r = hex4(in, 2)
			if r < 0 {
				return dst, hi
			}
			in = in[6:]
		default:
			r = unescape(c)
			in = in[2:]
		}
		if hi != 0 {
			if p := utf16.DecodeRune(hi, r); p != utf8.RuneError {
				dst, hi = utf8.AppendRune(dst, p), 0
				continue
			}
			dst, hi = utf8.AppendRune(dst, utf8.RuneError), 0
		}
		if 0xd800 <= r && r < 0xdc00 {
			hi = r
			continue
		}
		dst = utf8.AppendRune(dst, r) // a lone low half becomes U+FFFD
	}
	return dst, hi
}

func unescape(c byte) rune {
	switch c {
	case 'b':
		return '\b'
	case 'f':
		return '\f'
	case 'n':
		return '\n'
	case 'r':
		return '\r'
	case 't':
		return '\t'
	}
	return rune(c)
}

// AppendCompact appends the checked value v without the space between tokens.
// Everything else, also the order of names and the digits of numbers, stays.
func AppendCompact(dst, v []byte) []byte {
	for i := 0; i < len(v); {
		switch c := v[i]; {
		case c == '"':
			j, err := str(v, i)
			if err != nil {
				j = len(v)
			}
			dst = append(dst, v[i:j]...)
			i = j
		case c == ' ', c == '\n', c == '\t', c == '\r':
			i++
		default:
			dst = append(dst, c)
			i++
		}
	}
	return dst
}

// AppendQuoted appends s as a JSON string. Only what must be escaped is, and the
// two line separators that some readers of lines take for line ends.
func AppendQuoted[S ~string | ~[]byte](dst []byte, s S) []byte { return quote(dst, s, true) }

// AppendCanonical appends s as a JSON string in the form of RFC 8785.
func AppendCanonical(dst []byte, s string) []byte { return quote(dst, s, false) }

func quote[S ~string | ~[]byte](dst []byte, s S, separators bool) []byte {
	const hex = "0123456789abcdef"
	dst = append(dst, '"')
	from := 0
	for i := 0; i < len(s); {
		c := s[i]
		if c < utf8.RuneSelf {
			if c >= 0x20 && c != '"' && c != '\\' {
				i++
				continue
			}
			dst = append(dst, s[from:i]...)
			switch c {
			case '"', '\\':
				dst = append(dst, '\\', c)
			case '\n':
				dst = append(dst, '\\', 'n')
			case '\r':
				dst = append(dst, '\\', 'r')
			case '\t':
				dst = append(dst, '\\', 't')
			case '\b':
				dst = append(dst, '\\', 'b')
			case '\f':
				dst = append(dst, '\\', 'f')
			default:
				dst = append(dst, '\\', 'u', '0', '0', hex[c>>4], hex[c&15])
			}
			i++
			from = i
			continue
		}
		r, n := utf8.DecodeRuneInString(string(s[i:min(i+utf8.UTFMax, len(s))]))
		switch {
		case r == utf8.RuneError && n == 1:
			dst = append(append(dst, s[from:i]...), "\ufffd"...)
			from = i + 1
		case separators && (r == '\u2028' || r == '\u2029'):
			dst = append(append(dst, s[from:i]...), '\\', 'u', '2', '0', '2', hex[r&15])
			from = i + n
		}
		i += n
	}
	dst = append(dst, s[from:]...)
	return append(dst, '"')
}
