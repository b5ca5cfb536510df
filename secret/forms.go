package secret

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"net/url"
	"strings"
)

// minLine is the shortest line of a value of several lines that is looked for
// by itself, as it stands in a diff or an indented listing.
const minLine = 12

// forms returns the texts under which value may show up in output: as it is, and
// as the usual encodings leave it.
func forms(value string) []string {
	seen := map[string]bool{}
	var out []string
	add := func(f string) {
		if len(f) >= minRedact && !seen[f] {
			seen[f] = true
			out = append(out, f)
		}
	}
	text := func(s string) {
		add(s)
		// Once for a JSON text, twice for JSON inside of JSON, as tool arguments are.
		for _, j := range jsonForms(s) {
			add(j)
			for _, jj := range jsonForms(j) {
				add(jj)
			}
		}
	}
	text(value)
	if strings.Contains(value, "\n") {
		text(strings.ReplaceAll(value, "\n", "\r\n"))
		for line := range strings.SplitSeq(value, "\n") {
			if line = strings.TrimSpace(line); len(line) >= minLine {
				text(line)
			}
		}
	}
	if t := strings.TrimSpace(value); t != value {
		text(t)
	}
	if strings.Contains(value, "'") { // as a POSIX shell and `set -x` quote it
		add(strings.ReplaceAll(value, "'", `'\''`))
		add(strings.ReplaceAll(value, "'", `'"'"'`))
	}
	for _, f := range []string{octal(value, ``, ``), octal(strings.ReplaceAll(value, "'", `'\''`), `'$'`, `''`), cQuoted(value)} {
		add(f)
	}
	for _, f := range []string{url.QueryEscape(value), url.PathEscape(value), percent(value, false), percent(value, true)} {
		add(f)
		add(lowerPercent(f))
	}
	add(hex.EncodeToString([]byte(value)))
	add(strings.ToUpper(hex.EncodeToString([]byte(value))))
	for _, enc := range []*base64.Encoding{base64.StdEncoding, base64.URLEncoding} {
		add(enc.EncodeToString([]byte(value)))
		for shift := range 3 {
			add(aligned(enc, value, shift))
		}
	}
	return out
}

// aligned returns the characters of a base64 text that value alone decides, when
// shift bytes (modulo 3) stand before it.
func aligned(enc *base64.Encoding, value string, shift int) string {
	s := enc.WithPadding(base64.NoPadding).EncodeToString(append(make([]byte, shift), value...))
	first := (shift*8 + 5) / 6
	last := (shift + len(value)) * 8 / 6
	return s[first:last]
}

func jsonForms(s string) []string {
	var out []string
	for _, html := range []bool{true, false} {
		var b bytes.Buffer
		e := json.NewEncoder(&b)
		e.SetEscapeHTML(html)
		if e.Encode(s) != nil {
			continue
		}
		j := strings.TrimSuffix(b.String(), "\n")
		j = j[1 : len(j)-1]
		out = append(out, j, strings.ReplaceAll(j, "/", `\/`))
	}
	return out
}

// cQuoted is s as git quotes the names of files.
func cQuoted(s string) string {
	return octal(strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(s), ``, ``)
}

// octal writes the bytes that are no printable ASCII as \303, as C and the GNU
// tools do in a locale that does not have them; each run of them stands between
// open and end.
func octal(s, open, end string) string {
	var b strings.Builder
	in := false
	for i := range len(s) {
		c := s[i]
		plain := c >= ' ' && c < 0x7f
		switch {
		case !plain && !in:
			b.WriteString(open)
		case plain && in:
			b.WriteString(end)
		}
		if in = !plain; plain {
			b.WriteByte(c)
			continue
		}
		b.WriteByte('\\')
		b.WriteByte('0' + c>>6)
		b.WriteByte('0' + c>>3&7)
		b.WriteByte('0' + c&7)
	}
	if in {
		b.WriteString(end)
	}
	return b.String()
}

// percent escapes every byte, or, as the strictest encoders do, every byte but
// letters and digits.
func percent(s string, all bool) string {
	const digits = "0123456789ABCDEF"
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		c := s[i]
		if !all && (c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9') {
			b.WriteByte(c)
			continue
		}
		b.WriteByte('%')
		b.WriteByte(digits[c>>4])
		b.WriteByte(digits[c&15])
	}
	return b.String()
}

// lowerPercent writes the digits of percent escapes in lower case.
func lowerPercent(s string) string {
	b := []byte(s)
	for i := 0; i+2 < len(b); i++ {
		if b[i] == '%' {
			copy(b[i+1:i+3], bytes.ToLower(b[i+1:i+3]))
		}
	}
	return string(b)
}
