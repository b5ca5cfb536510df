package modeltest

import (
	"fmt"
	"unicode/utf8"
)

// answer is a message with its templates replaced, ready for any dialect. Its
// deltas are insides of JSON strings.
type answer struct {
	turn      *Turn
	view      *view
	messageID string
	requestID string
	stop      string
	usage     Usage
	blocks    []answerBlock
}

type answerBlock struct {
	typ       string
	id, name  string // tool_use
	deltas    []string
	signature string // thinking
}

// render builds the answer of a turn that is served for the round-th time,
// counted from 1. newID makes ids with the given prefix.
func render(t *Turn, round int, v *view, captures map[string]capture, newID func(string) string) (*answer, error) {
	e := expander{view: v, captures: captures}
	a := &answer{turn: t, view: v, stop: t.stop(), usage: Usage{In: 10, Out: 20}}
	if t.Usage != nil {
		a.usage = *t.Usage
	}
	for _, b := range t.Blocks {
		ab := answerBlock{typ: b.Type}
		switch {
		case b.Type == ToolUse:
			ab.name, ab.id = b.Name, b.ID
			if ab.id == "" {
				ab.id = newID("toolu_")
			} else if round > 1 {
				ab.id = fmt.Sprintf("%s_r%d", ab.id, round)
			}
			if b.Deltas != nil {
				// Inserted into JSON text, so escaped for it.
				ab.deltas = e.deltas(b.Deltas, inside)
				break
			}
			text, err := b.inputJSON()
			if err != nil {
				return nil, err
			}
			ab.deltas = pieces(e.expand(text, inside), b.Pieces)
		case b.Deltas != nil:
			ab.deltas = e.deltas(b.Deltas, nil)
		default:
			ab.deltas = pieces(e.expand(b.Text, nil), b.Pieces)
		}
		if b.Type == Thinking {
			if ab.signature = b.Signature; ab.signature == "" {
				ab.signature = "bW9jaw==" // base64, as real ones are
			}
		}
		a.blocks = append(a.blocks, ab)
	}
	return a, e.err
}

func (e *expander) deltas(deltas []Delta, encode func(string) string) []string {
	out := make([]string, len(deltas))
	for i, d := range deltas {
		if d.Raw != "" {
			out[i] = d.Raw
		} else {
			out[i] = inside(e.expand(d.Text, encode))
		}
	}
	return out
}

// pieces cuts text between characters into n parts that differ by at most one
// character, or into fewer if it has fewer characters.
func pieces(text string, n int) []string {
	n = max(1, min(n, utf8.RuneCountInString(text)))
	left := utf8.RuneCountInString(text)
	out := make([]string, 0, n)
	for ; n > 0; n-- {
		take := left / n
		end := 0
		for range take {
			_, size := utf8.DecodeRuneInString(text[end:])
			end += size
		}
		out = append(out, inside(text[:end]))
		text, left = text[end:], left-take
	}
	return out
}
