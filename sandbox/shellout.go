package sandbox

import (
	"bytes"
	"strconv"
	"strings"
	"sync"
)

// stepTail is how much output of a set-up step is kept (spec 01 §8.5), and
// errorTail how much of that an error shows.
const (
	stepTail  = 64 << 10
	errorTail = 1500
)

// ring keeps the last bytes written to it. It may be written concurrently.
type ring struct {
	mu  sync.Mutex
	max int
	buf []byte
}

func (r *ring) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := len(p)
	if len(p) >= r.max {
		r.buf = append(r.buf[:0], p[len(p)-r.max:]...)
		return n, nil
	}
	// Twice the size before it is cut, so that a byte is moved once on average.
	if len(r.buf)+len(p) > 2*r.max {
		r.buf = append(r.buf[:0], r.buf[len(r.buf)-r.max+len(p):]...)
	}
	r.buf = append(r.buf, p...)
	return n, nil
}

func (r *ring) String() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return string(r.buf[max(0, len(r.buf)-r.max):])
}

// splitter reads the output of a shell and looks for the line that ends a step:
// the marker, a space and a number. It is written by one goroutine; what it found
// is read after ended was closed, or after the process has ended.
type splitter struct {
	mu     sync.Mutex
	marker string
	out    *ring
	code   int
	ended  chan struct{} // closed at the marker
	line   []byte        // the beginning of the current line, while it may be the marker
	plain  bool          // the current line is none
	after  *ring         // what follows the marker; nil discards it
}

// begin sets the splitter up for the step with this marker.
func (s *splitter) begin(marker string, keep int) (out *ring, ended <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.marker, s.out, s.code, s.ended = marker, &ring{max: keep}, 0, make(chan struct{})
	s.line, s.plain = nil, false
	return s.out, s.ended
}

func (s *splitter) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := len(p)
	for len(p) > 0 {
		if s.marker == "" { // between steps, or after the end
			if s.after != nil {
				_, _ = s.after.Write(p)
			}
			return n, nil
		}
		i := bytes.IndexByte(p, '\n')
		part := p
		if i >= 0 {
			part = p[:i+1]
		}
		p = p[len(part):]
		if s.plain {
			_, _ = s.out.Write(part)
		} else {
			s.line = append(s.line, part...)
			s.judge(i >= 0)
		}
		if i >= 0 {
			s.plain, s.line = false, nil
		}
	}
	return n, nil
}

// judge decides on the line so far.
func (s *splitter) judge(whole bool) {
	want := s.marker + " "
	got := string(s.line[:min(len(s.line), len(want))])
	if whole && got == want {
		if code, err := strconv.Atoi(strings.TrimSpace(string(s.line[len(want):]))); err == nil {
			s.code, s.marker = code, ""
			close(s.ended)
			return
		}
	}
	if !whole && strings.HasPrefix(want, got) && len(s.line) < len(want)+16 {
		return // it may become the marker
	}
	_, _ = s.out.Write(s.line)
	s.plain = !whole
	s.line = nil
}

// flush moves an unfinished line to the output: the shell is gone.
func (s *splitter) flush() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.out != nil {
		_, _ = s.out.Write(s.line)
	}
	s.line = nil
}

// tailOf is the end of a step's output as an error shows it: redacted before it
// is cut, at most 1500 bytes.
func (e *ensurer) tailOf(out string) string {
	return strings.TrimSpace(e.red.Tail(strings.TrimSpace(out), errorTail))
}

// skipEnv are variables that a shell keeps for itself.
var skipEnv = map[string]bool{"PWD": true, "OLDPWD": true, "_": true, "SHLVL": true}

// dumpState is a script that writes the current directory, NUL, and the exported
// variables: "0" and NUL-separated pairs, or "x" and what export -p prints where
// env knows no -0.
const dumpState = `pwd; printf '\0'; if env -0 >/dev/null 2>&1; then printf 0; env -0; else printf x; export -p; fi`

// parseState reads the output of dumpState.
func parseState(out string) (dir string, env map[string]string, ok bool) {
	dir, rest, ok := strings.Cut(out, "\n\x00")
	if !ok || rest == "" {
		return "", nil, false
	}
	if rest[0] == '0' {
		env = map[string]string{}
		for kv := range strings.SplitSeq(rest[1:], "\x00") {
			if k, v, ok := strings.Cut(kv, "="); ok {
				env[k] = v
			}
		}
	} else {
		env = parseExports(rest[1:])
	}
	for k := range skipEnv {
		delete(env, k)
	}
	return dir, env, true
}

// envDiff returns what now adds to or changes of start, and what it lacks.
func envDiff(start, now map[string]string) (set []string, unset []string) {
	for k, v := range now {
		if old, ok := start[k]; !ok || old != v {
			set = append(set, k+"="+v)
		}
	}
	for k := range start {
		if _, ok := now[k]; !ok {
			unset = append(unset, k)
		}
	}
	return set, unset
}

// parseExports reads what export -p prints in dash, bash, busybox ash, ksh and
// zsh: export K='v', declare -x K="v", typeset -x K=v, and $'…' values.
func parseExports(out string) map[string]string {
	env := map[string]string{}
	p := exports{out}
	for p.s != "" {
		word := p.word()
		switch {
		case word == "export" || word == "declare" || word == "typeset" || strings.HasPrefix(word, "-"):
		default:
			if k, v, ok := strings.Cut(word, "="); ok {
				env[k] = v
			}
		}
		p.s = strings.TrimLeft(p.s, " \n")
	}
	return env
}

type exports struct{ s string }

// word takes the next shell word, with its quotes undone.
func (p *exports) word() string {
	var b strings.Builder
	for p.s != "" {
		c := p.s[0]
		switch {
		case c == ' ' || c == '\n':
			return b.String()
		case c == '\'':
			text, rest, _ := strings.Cut(p.s[1:], "'")
			b.WriteString(text)
			p.s = rest
		case c == '"':
			p.s = p.s[1:]
			for p.s != "" && p.s[0] != '"' {
				if p.s[0] == '\\' && len(p.s) > 1 && strings.IndexByte("\\\"$`\n", p.s[1]) >= 0 {
					p.s = p.s[1:]
				}
				b.WriteByte(p.s[0])
				p.s = p.s[1:]
			}
			p.s = strings.TrimPrefix(p.s, `"`)
		case strings.HasPrefix(p.s, "$'"):
			p.s = p.s[2:]
			p.ansi(&b)
		case c == '\\' && len(p.s) > 1:
			b.WriteByte(p.s[1])
			p.s = p.s[2:]
		default:
			b.WriteByte(c)
			p.s = p.s[1:]
		}
	}
	return b.String()
}

// ansi takes the rest of a $'…' string.
func (p *exports) ansi(b *strings.Builder) {
	simple := map[byte]byte{'n': '\n', 't': '\t', 'r': '\r', 'a': '\a', 'b': '\b', 'f': '\f', 'v': '\v', 'e': 27, 'E': 27}
	for p.s != "" {
		c := p.s[0]
		p.s = p.s[1:]
		if c == '\'' {
			return
		}
		if c != '\\' || p.s == "" {
			b.WriteByte(c)
			continue
		}
		c = p.s[0]
		switch {
		case simple[c] != 0:
			b.WriteByte(simple[c])
			p.s = p.s[1:]
		case c >= '0' && c <= '7':
			b.WriteByte(p.digits(0, 3, 8))
		case c == 'x':
			b.WriteByte(p.digits(1, 2, 16))
		default:
			b.WriteByte(c)
			p.s = p.s[1:]
		}
	}
}

// digits takes up to n digits after skipping some bytes.
func (p *exports) digits(skip, n, base int) byte {
	p.s = p.s[skip:]
	v, i := 0, 0
	for i < n && i < len(p.s) {
		d, err := strconv.ParseUint(p.s[i:i+1], base, 8)
		if err != nil {
			break
		}
		v = v*base + int(d)
		i++
	}
	p.s = p.s[i:]
	return byte(v)
}
