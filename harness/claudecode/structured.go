package claudecode

import (
	"bytes"

	"github.com/aisandbox-go/aisandbox/internal/rawjson"
)

// structured collects what may be the structured answer (spec 02 §8): the input
// of a StructuredOutput call, else JSON in what the agent wrote.
type structured struct {
	input []byte // compact
	call  string // whose input it is

	streamed []byte // input of the call that streams
	text     []byte // the end of what the agent wrote
	cutOff   int64  // bytes of text that were left behind
}

const (
	maxStreamed = 8 << 20
	maxText     = 1 << 20
)

func (s *structured) pos() int64 { return s.cutOff + int64(len(s.text)) }

// add appends to the text, of which only the end is kept.
func (s *structured) add(wanted bool, b []byte) {
	if !wanted {
		return
	}
	s.text = append(s.text, b...)
	if n := len(s.text) - maxText; n > maxText {
		s.text = append(s.text[:0], s.text[n:]...)
		s.cutOff += int64(n)
	}
}

// cut forgets the text from a position on.
func (s *structured) cut(pos int64) {
	if n := pos - s.cutOff; n < int64(len(s.text)) {
		s.text = s.text[:max(n, 0)]
	}
}

func (s *structured) stream(b []byte) {
	if len(s.streamed)+len(b) <= maxStreamed {
		s.streamed = append(s.streamed, b...)
	}
}

// offer takes the input of a call; the last useful one counts.
func (s *structured) offer(call string, input []byte) {
	if u := useful(input); u != nil {
		s.input, s.call = u, call
	}
}

// reject forgets the input of a call that the program refused.
func (s *structured) reject(call string) {
	if s.call == call {
		s.input, s.call = nil, ""
	}
}

// best returns the answer, compact, or nil. out is the result line's own,
// resultText its text.
func (s *structured) best(out []byte, resultText string) []byte {
	if u := useful(out); u != nil {
		return u
	}
	if s.input != nil {
		return s.input
	}
	if len(bytes.TrimSpace(s.text)) > 0 {
		return fromText(s.text)
	}
	return fromText([]byte(resultText))
}

// useful returns b compact if it is an object with at least one member.
func useful(b []byte) []byte {
	n := 0
	if rawjson.Object(b, func(_, _ []byte) bool { n++; return false }) != nil || n == 0 {
		return nil
	}
	return bytes.TrimSpace(rawjson.AppendCompact(nil, b))
}

// fromText finds an object in prose: all of it, perhaps in a fence, the last
// fence, or the last object.
func fromText(b []byte) []byte {
	b = bytes.TrimSpace(b)
	fence := []byte("```")
	if u := useful(b); u != nil {
		return u
	}
	if end := bytes.LastIndex(b, fence); end > 0 {
		if start := bytes.LastIndex(b[:end], fence); start >= 0 {
			in := b[start+len(fence) : end]
			if nl := bytes.IndexByte(in, '\n'); nl >= 0 && !bytes.ContainsAny(in[:nl], "{[") {
				in = in[nl:] // the language
			}
			if u := useful(in); u != nil {
				return u
			}
		}
	}
	// An unclosed object is read to the end of the text again and again: what may
	// be read in all is bounded.
	var last []byte
	for i, budget := 0, 32*maxText; i < len(b) && budget > 0; {
		n := bytes.IndexByte(b[i:], '{')
		if n < 0 {
			break
		}
		i += n
		end, err := rawjson.Prefix(b[i:])
		budget -= end + 1
		if err == nil && useful(b[i:i+end]) != nil {
			last = b[i : i+end]
			i += end
			continue
		}
		i++
	}
	return useful(last)
}
