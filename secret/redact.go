package secret

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"strings"
)

// minRedact is the shortest value that is looked for: shorter ones stand in
// ordinary text too often.
const minRedact = 6

// Redactor replaces the values of secrets in text by [secret:NAME]. It looks for
// each value of at least 6 bytes as it is, and base64, percent, hex, JSON and
// shell encoded (spec 01 §6). It is immutable; a nil Redactor changes nothing.
type Redactor struct {
	auto   automaton
	labels []string
	short  []string
}

// NewRedactor makes a Redactor for every value of the sets, of which any may be nil.
func NewRedactor(sets ...*Set) *Redactor {
	r := &Redactor{}
	for _, s := range sets {
		v := s.vault()
		if v == nil {
			continue
		}
		for _, n := range v.names {
			val := v.reveal(n)
			if len(val) < minRedact {
				if val != "" {
					r.short = append(r.short, n)
				}
				continue
			}
			for _, f := range forms(val) {
				r.auto.add(f, int32(len(r.labels)))
			}
			r.labels = append(r.labels, label(n))
		}
	}
	r.auto.build()
	return r
}

// Short returns the names of secrets that are too short to be looked for.
func (r *Redactor) Short() []string {
	if r == nil {
		return nil
	}
	return append([]string(nil), r.short...)
}

// Idle says that there is nothing to hide.
func (r *Redactor) Idle() bool { return r == nil || len(r.labels) == 0 }

// Bytes returns b redacted; b itself where there is nothing to hide.
func (r *Redactor) Bytes(b []byte) []byte {
	if r.Idle() || !r.hit(b) {
		return b
	}
	m := masker{r: r}
	return m.finish(m.feed(make([]byte, 0, len(b)), b))
}

// String returns s redacted.
func (r *Redactor) String(s string) string {
	if r.Idle() || s == "" {
		return s
	}
	b := []byte(s)
	if !r.hit(b) {
		return s
	}
	return string(r.Bytes(b))
}

func (r *Redactor) hit(b []byte) bool {
	n := int32(0)
	for _, c := range b {
		n = r.auto.step(n, c)
		if r.auto.nodes[n].match > 0 {
			return true
		}
	}
	return false
}

// JSON returns a JSON text whose strings are redacted one by one, so that the
// result is JSON whatever the secret is made of, and escapes hide nothing. Text
// that is not JSON is treated as by [Redactor.Bytes].
func (r *Redactor) JSON(b []byte) []byte {
	if r.Idle() || !r.hit(b) && !bytes.Contains(b, []byte(`\u`)) {
		return b
	}
	if !json.Valid(b) {
		return r.Bytes(b)
	}
	out := make([]byte, 0, len(b))
	for len(b) > 0 {
		i := bytes.IndexByte(b, '"')
		if i < 0 {
			return append(out, r.Bytes(b)...) // a number may be a secret, too
		}
		out = append(out, r.Bytes(b[:i])...)
		end := i + 1
		for b[end] != '"' {
			if b[end] == '\\' {
				end++
			}
			end++
		}
		lit := b[i : end+1]
		b = b[end+1:]
		var s string
		if json.Unmarshal(lit, &s) == nil {
			if red := r.String(s); red != s {
				lit = encode(red)
			}
		}
		out = append(out, lit...)
	}
	return out
}

func encode(s string) []byte {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	_ = e.Encode(s) // a string always encodes, and a Buffer takes everything
	return bytes.TrimSuffix(b.Bytes(), []byte("\n"))
}

// Error returns an error with err's text redacted and its identity kept:
// [errors.Is] and [errors.As] see what they saw before. err itself where there
// is nothing to hide; nil stays nil.
func (r *Redactor) Error(err error) error {
	if err == nil || r.Idle() {
		return err
	}
	text := err.Error()
	red := r.String(text)
	if red == text {
		return err
	}
	return &redactedError{red, err}
}

// redactedError keeps the original out of every printer: it has no Unwrap, since
// who unwraps prints what it finds. Is and As reach through it.
type redactedError struct {
	text string
	err  error
}

func (e *redactedError) Error() string        { return e.text }
func (e *redactedError) GoString() string     { return e.text }
func (e *redactedError) Is(target error) bool { return errors.Is(e.err, target) }
func (e *redactedError) As(target any) bool   { return errors.As(e.err, target) }

// Writer is a stream that is redacted on its way to another writer. A secret
// that is split over writes does not come through. Not for concurrent use.
type Writer struct {
	w   io.Writer
	m   masker
	buf []byte
	err error
}

// Writer returns a Writer in front of w. What may be the beginning of a secret is
// held back until more comes, at most the length of the longest form of a
// secret; Close lets it out.
func (r *Redactor) Writer(w io.Writer) *Writer {
	return &Writer{w: w, m: masker{r: r}}
}

// Write takes all of p, or returns the error of the writer behind.
func (w *Writer) Write(p []byte) (int, error) {
	if w.err != nil {
		return 0, w.err
	}
	if w.m.r.Idle() {
		n, err := w.w.Write(p)
		w.err = err
		return n, err
	}
	w.buf = w.m.feed(w.buf[:0], p)
	if err := w.flush(); err != nil {
		return 0, err
	}
	return len(p), nil
}

func (w *Writer) flush() error {
	if len(w.buf) == 0 {
		return nil
	}
	_, w.err = w.w.Write(w.buf)
	return w.err
}

// Close writes what was held back. It does not close the writer behind. After
// Close a new stream may begin.
func (w *Writer) Close() error {
	if w.err != nil || w.m.r.Idle() {
		return w.err
	}
	w.buf = w.m.finish(w.buf[:0])
	return w.flush()
}

// Reader returns a reader of src, redacted. Not for concurrent use.
func (r *Redactor) Reader(src io.Reader) io.Reader {
	if r.Idle() {
		return src
	}
	return &reader{src: src, m: masker{r: r}, in: make([]byte, 16<<10)}
}

type reader struct {
	src          io.Reader
	m            masker
	in, buf, out []byte // out is the unread rest of buf
	err          error
}

func (r *reader) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	for len(r.out) == 0 {
		if r.err != nil {
			return 0, r.err
		}
		var n int
		n, r.err = r.src.Read(r.in)
		r.buf = r.m.feed(r.buf[:0], r.in[:n])
		if r.err != nil {
			r.buf = r.m.finish(r.buf)
		}
		r.out = r.buf
	}
	n := copy(p, r.out)
	r.out = r.out[n:]
	return n, nil
}

// Tail returns the last max bytes of s, redacted before it is cut so that no
// part of a secret is left, and cut at the start of a character.
func (r *Redactor) Tail(s string, max int) string {
	s = strings.ToValidUTF8(r.String(s), "�")
	if len(s) <= max {
		return s
	}
	s = s[len(s)-max:]
	for len(s) > 0 && s[0]&0xC0 == 0x80 {
		s = s[1:]
	}
	return s
}
