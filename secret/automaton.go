package secret

// automaton finds many patterns in one pass (Aho and Corasick). It is immutable
// after build. Children are linked lists, since almost every node has one; only
// the root, where nearly all bytes of ordinary text are looked up, is a table.
type automaton struct {
	root  [256]int32
	nodes []node
}

type node struct {
	child, sibling int32 // 0: none; the root is nobody's child
	fail           int32
	depth          int32 // bytes of pattern that this node stands for
	match          int32 // length of the longest pattern that ends here
	label          int32
	b              byte
}

func (a *automaton) child(n int32, b byte) int32 {
	if n == 0 {
		return a.root[b]
	}
	for c := a.nodes[n].child; c != 0; c = a.nodes[c].sibling {
		if a.nodes[c].b == b {
			return c
		}
	}
	return 0
}

// add inserts a pattern. The first label of a pattern stays.
func (a *automaton) add(pattern string, label int32) {
	if len(a.nodes) == 0 {
		a.nodes = append(a.nodes, node{})
	}
	n := int32(0)
	for i := 0; i < len(pattern); i++ {
		c := a.child(n, pattern[i])
		if c == 0 {
			c = int32(len(a.nodes))
			a.nodes = append(a.nodes, node{b: pattern[i], depth: int32(i + 1), sibling: a.nodes[n].child})
			a.nodes[n].child = c
			if n == 0 {
				a.root[pattern[i]] = c
			}
		}
		n = c
	}
	if a.nodes[n].match == 0 {
		a.nodes[n].match, a.nodes[n].label = int32(len(pattern)), label
	}
}

// build computes the failure links, breadth first.
func (a *automaton) build() {
	if len(a.nodes) == 0 {
		return
	}
	var queue []int32
	for c := a.nodes[0].child; c != 0; c = a.nodes[c].sibling {
		queue = append(queue, c)
	}
	for len(queue) > 0 {
		n := queue[0]
		queue = queue[1:]
		for c := a.nodes[n].child; c != 0; c = a.nodes[c].sibling {
			f := a.step(a.nodes[n].fail, a.nodes[c].b)
			a.nodes[c].fail = f
			if a.nodes[c].match == 0 {
				a.nodes[c].match, a.nodes[c].label = a.nodes[f].match, a.nodes[f].label
			}
			queue = append(queue, c)
		}
	}
}

// step is the state after n and b.
func (a *automaton) step(n int32, b byte) int32 {
	for {
		if c := a.child(n, b); c != 0 || n == 0 {
			return c
		}
		n = a.nodes[n].fail
	}
}

// span is a stretch of input, counted from its start, that must not be seen.
type span struct {
	from, to int64
	longest  int64 // of the patterns merged into it; it gives the label
	label    int32
}

// masker runs an automaton over a stream. Bytes wait in it only as long as they
// may be the beginning of a pattern, so it never holds more than the longest one.
type masker struct {
	r     *Redactor
	state int32
	pos   int64  // bytes taken
	held  []byte // the bytes before pos that are not out yet
	spans []span // hidden stretches that are not out yet, in order, apart
}

// feed takes p and returns what is final, appended to dst.
func (m *masker) feed(dst, p []byte) []byte {
	a := &m.r.auto
	for i := 0; i < len(p); i++ {
		if m.state == 0 && len(m.spans) == 0 && len(m.held) == 0 {
			// Ordinary text: copy all that can't begin a pattern at once.
			j := i
			for j < len(p) && a.root[p[j]] == 0 {
				j++
			}
			dst = append(dst, p[i:j]...)
			m.pos += int64(j - i)
			if i = j; i == len(p) {
				break
			}
		}
		m.state = a.step(m.state, p[i])
		m.held = append(m.held, p[i])
		m.pos++
		n := a.nodes[m.state]
		if n.match > 0 {
			m.mark(span{m.pos - int64(n.match), m.pos, int64(n.match), n.label})
		}
		if int64(len(m.held)) > int64(n.depth) {
			dst = m.release(dst, m.pos-int64(n.depth))
		}
	}
	return dst
}

// mark adds a hidden stretch. Stretches that overlap become one: whatever secret
// a byte belongs to, it is not shown.
func (m *masker) mark(s span) {
	for len(m.spans) > 0 {
		last := m.spans[len(m.spans)-1]
		if last.to <= s.from {
			break
		}
		s.from, s.to = min(s.from, last.from), max(s.to, last.to)
		if last.longest > s.longest {
			s.longest, s.label = last.longest, last.label
		}
		m.spans = m.spans[:len(m.spans)-1]
	}
	m.spans = append(m.spans, s)
}

// release lets out everything before upTo: no pattern that is still to be found
// can begin there.
func (m *masker) release(dst []byte, upTo int64) []byte {
	start := m.pos - int64(len(m.held)) // position of held[0]
	for start < upTo {
		end := upTo
		if len(m.spans) > 0 {
			s := m.spans[0]
			if s.from <= start {
				if s.to <= upTo {
					dst = append(dst, m.r.labels[s.label]...)
					m.spans = m.spans[1:]
					end = s.to
				}
				// An unfinished stretch may grow; what of it lies before upTo is dropped.
				m.held = m.held[end-start:]
				start = end
				continue
			}
			end = min(end, s.from)
		}
		dst = append(dst, m.held[:end-start]...)
		m.held = m.held[end-start:]
		start = end
	}
	if len(m.held) == 0 {
		m.held = nil
	}
	if len(m.spans) == 0 {
		m.spans = nil
	}
	return dst
}

// finish returns what was still waiting.
func (m *masker) finish(dst []byte) []byte {
	m.state = 0
	return m.release(dst, m.pos)
}
