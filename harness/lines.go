package harness

import (
	"bytes"
	"fmt"
)

// MaxLine is the longest line that a program may print, 64 MiB.
const MaxLine = 64 << 20

// LineError is a line longer than the limit. It ends the run: what follows can't
// be understood without it.
type LineError struct{ Limit int }

func (e *LineError) Error() string {
	return fmt.Sprintf("harness: the agent printed a line of more than %d bytes", e.Limit)
}

// Code is "line_too_long".
func (e *LineError) Code() string { return "line_too_long" }

// Lines splits a stream into lines and hands each to a function: without its line
// end (LF or CRLF) and the white space around it; blank lines are skipped. It is
// an io.Writer, so that it can be a process's standard output. The function's
// slice is valid during the call. Its first error, or a [*LineError], is returned
// by every later call. Not for concurrent use.
type Lines struct {
	limit int
	f     func(line []byte) error
	part  []byte // the beginning of a line whose end has not come
	err   error
}

// NewLines returns a splitter whose lines have at most limit bytes; 0 is [MaxLine].
func NewLines(limit int, f func(line []byte) error) *Lines {
	if limit <= 0 {
		limit = MaxLine
	}
	return &Lines{limit: limit, f: f}
}

// Write takes the next bytes of the stream.
func (l *Lines) Write(p []byte) (int, error) {
	n := 0
	for l.err == nil {
		i := bytes.IndexByte(p[n:], '\n')
		if i < 0 {
			if len(l.part)+len(p)-n > l.limit {
				l.err = &LineError{l.limit}
				break
			}
			l.part = append(l.part, p[n:]...)
			return len(p), nil
		}
		line := p[n : n+i]
		n += i + 1
		if len(l.part) > 0 {
			if len(l.part)+i > l.limit {
				l.err = &LineError{l.limit}
				break
			}
			l.part = append(l.part, line...)
			line = l.part
		}
		l.line(line)
		l.reset()
	}
	return n, l.err
}

// Close takes what came after the last line end as a line.
func (l *Lines) Close() error {
	if l.err == nil {
		l.line(l.part)
	}
	l.part = nil
	return l.err
}

func (l *Lines) line(b []byte) {
	if len(b) > l.limit {
		l.err = &LineError{l.limit}
		return
	}
	if b = bytes.TrimSpace(b); len(b) > 0 {
		l.err = l.f(b)
	}
}

func (l *Lines) reset() {
	l.part = l.part[:0]
	if cap(l.part) > 1<<20 {
		l.part = nil // one huge line must not stay for the life of the run
	}
}
