package modeltest

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/textproto"
	"regexp"
	"slices"
	"strings"
	"time"
)

// Bounds of values in a script.
const (
	maxTimes = 1_000_000
	maxDelay = 10 * time.Minute
	// defaultQueue names Script.Turns in messages and in Route.Use.
	defaultQueue = "default"
)

var (
	nameRE   = regexp.MustCompile(`^[A-Za-z0-9_-]{1,100}$`)
	headerRE = regexp.MustCompile("^[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}$")
	stops    = []string{"end_turn", "tool_use", "max_tokens", "stop_sequence", "pause_turn", "refusal", "model_context_window_exceeded"}
	sources  = []string{"model", "system", "first_user", "last_user", "last_tool_result", "body"}
)

// Validate returns nil if s can be served, else a [*ScriptError].
func (s Script) Validate() error {
	c := checker{script: s, ids: map[string]string{}}
	c.check()
	if c.err == nil {
		return nil
	}
	return c.err
}

// checker keeps the first mistake it meets.
type checker struct {
	script Script
	ids    map[string]string // tool call id → field that took it
	err    *ScriptError
}

func (c *checker) bad(field, problem, cure string) {
	if c.err == nil {
		c.err = &ScriptError{Script: c.script.Name, Field: field, Problem: problem, Cure: cure}
	}
}

func (c *checker) badf(field, cure, problem string, args ...any) {
	c.bad(field, fmt.Sprintf(problem, args...), cure)
}

func (c *checker) check() {
	s := c.script
	if len(s.Turns) == 0 && len(s.Queues) == 0 {
		c.bad("turns", "no turns", "write at least one")
	}
	if s.SessionHeader != "" && !headerRE.MatchString(s.SessionHeader) {
		c.bad("session_header", "not a header name", "write one such as x-claude-code-session-id")
	}
	for _, name := range slices.Sorted(maps.Keys(s.Capture)) {
		f, v := "capture."+name, s.Capture[name]
		if !nameRE.MatchString(name) {
			c.badf(f, "use letters, digits, - and _", "bad name %q", name)
		}
		if !known(v.From, sources...) {
			c.badf(f+".from", "write one of "+strings.Join(sources, ", "), "%q is no part of a request", v.From)
		}
		if v.Regexp == "" {
			c.bad(f+".regexp", "missing", "write the pattern whose first group is captured")
		}
		c.regexp(f+".regexp", v.Regexp)
	}
	c.queue("", s.Turns, s.After)
	used := map[string]bool{}
	for i, r := range s.Routes {
		c.route(fmt.Sprintf("routes[%d]", i), r)
		used[r.Use] = true
	}
	for _, name := range slices.Sorted(maps.Keys(s.Queues)) {
		f := "queues." + name
		if !nameRE.MatchString(name) || name == defaultQueue {
			c.badf(f, "use letters, digits, - and _, and not "+defaultQueue, "bad name %q", name)
		}
		if !used[name] {
			c.bad(f, "no route uses it", "add a route with use: "+name)
		}
		q := s.Queues[name]
		if len(q.Turns) == 0 {
			c.bad(f+".turns", "no turns", "write at least one")
		}
		c.queue(f+".", q.Turns, q.After)
	}
}

func (c *checker) queue(prefix string, turns []Turn, after After) {
	if !known(string(after), "", string(AfterError), string(AfterRepeatLast)) {
		c.badf(prefix+"after", "write error or repeat-last", "unknown value %q", after)
	}
	if after == AfterRepeatLast && len(turns) == 0 {
		c.bad(prefix+"after", "there is no turn to repeat", "write turns")
	}
	for i, t := range turns {
		c.turn(fmt.Sprintf("%sturns[%d]", prefix, i), t)
	}
}

func (c *checker) regexp(field, expr string) {
	if _, err := regexp.Compile(expr); err != nil {
		c.bad(field, err.Error(), "see https://pkg.go.dev/regexp/syntax")
	}
}

func (c *checker) pattern(field string, p Pattern) {
	if p.Contains != "" && p.Regexp != "" {
		c.bad(field, "both contains and regexp", "keep one")
	}
	c.regexp(field+".regexp", p.Regexp)
}

func (c *checker) route(f string, r Route) {
	w := r.When
	if w.Model.IsZero() && w.System.IsZero() && w.FirstUser.IsZero() && w.LastUser.IsZero() && w.LastToolResult.IsZero() &&
		w.Body.IsZero() && w.Stream == nil && w.Tool == "" && len(w.Header) == 0 {
		c.bad(f+".when", "no condition", "add one; turns for every other request belong in the top level turns")
	}
	c.pattern(f+".when.model", w.Model)
	c.pattern(f+".when.system", w.System)
	c.pattern(f+".when.first_user", w.FirstUser)
	c.pattern(f+".when.last_user", w.LastUser)
	c.pattern(f+".when.last_tool_result", w.LastToolResult)
	c.pattern(f+".when.body", w.Body)
	for _, name := range slices.Sorted(maps.Keys(w.Header)) {
		hf := f + ".when.header." + name
		if !headerRE.MatchString(name) {
			c.badf(hf, "use letters, digits and -", "not a header name: %q", name)
		}
		if w.Header[name].IsZero() {
			c.bad(hf, "no condition", "write text it contains, or regexp:")
		}
		c.pattern(hf, w.Header[name])
	}
	if _, ok := c.script.Queues[r.Use]; !ok && (r.Use != defaultQueue || len(c.script.Turns) == 0) {
		c.badf(f+".use", "name one of queues:", "there is no queue %q", r.Use)
	}
}

func (c *checker) turn(f string, t Turn) {
	c.kind(f, t)
	if t.Times < 0 || t.Times > maxTimes {
		c.badf(f+".times", fmt.Sprintf("write 1 to %d", maxTimes), "%d is out of range", t.Times)
	}
	for _, d := range []struct {
		name string
		d    time.Duration
	}{{"wait", t.Wait}, {"delay", t.Delay}} {
		if d.d < 0 || d.d > maxDelay {
			c.badf(f+"."+d.name, "write 0s to "+maxDelay.String(), "%s is out of range", d.d)
		}
	}
	if t.Stop != "" && !known(t.Stop, stops...) {
		c.badf(f+".stop", "write one of "+strings.Join(stops, ", "), "unknown stop reason %q", t.Stop)
	}
	if u := t.Usage; u != nil && (u.In < 0 || u.CacheRead < 0 || u.CacheWrite < 0 || u.Out < 0) {
		c.bad(f+".usage", "negative count", "write 0 or more")
	}
	for _, name := range slices.Sorted(maps.Keys(t.Headers)) {
		hf := f + ".headers." + name
		if !headerRE.MatchString(name) || strings.ContainsFunc(t.Headers[name], isControl) {
			c.bad(hf, "not a header", "use a plain name and a value of one line")
		}
		switch textproto.CanonicalMIMEHeaderKey(name) {
		case "Content-Length", "Content-Type", "Content-Encoding", "Transfer-Encoding", "Connection":
			c.bad(hf, "is set by the server", "remove it")
		}
	}
	deltas := 0
	for i, b := range t.Blocks {
		deltas += c.block(fmt.Sprintf("%s.blocks[%d]", f, i), b)
	}
	c.faults(f, t, deltas)
}

// kind checks that the turn is exactly one of message, HTTP error and silence.
func (c *checker) kind(f string, t Turn) {
	message := t.Blocks != nil || t.Stop != "" || t.Usage != nil || t.Ping || t.Delay != 0 || t.Cut != nil || t.Malformed != nil || t.Hang != nil
	switch {
	case t.NoAnswer:
		if message || t.Status != 0 || t.Body != nil || t.Headers != nil || t.Error != nil || t.Wait != 0 {
			c.bad(f+".no_answer", "combined with an answer", "remove one")
		}
	case t.Status != 0:
		if t.Status < 400 || t.Status > 599 {
			c.badf(f+".status", "write 400 to 599; a good answer needs no status", "%d is not an HTTP error", t.Status)
		}
		if message {
			c.bad(f+".status", "combined with a message", "keep status, headers, body, error and wait only")
		}
		if t.Body != nil {
			if t.Error != nil {
				c.bad(f+".body", "both body and error", "keep one")
			}
			if _, err := marshal(t.Body); err != nil {
				c.badf(f+".body", "use values that JSON has", "not JSON: %v", err)
			}
		}
	case t.Blocks == nil:
		c.bad(f, "neither blocks nor status nor no_answer", "say what to answer; blocks: [] is a message without content")
	case t.Body != nil:
		c.bad(f+".body", "without a status", "add status: 400 to 599")
	}
}

func (c *checker) faults(f string, t Turn, deltas int) {
	n := 0
	at := func(name string, after int) {
		n++
		if after < 0 || after > deltas {
			c.badf(f+"."+name, fmt.Sprintf("write 0 to %d", deltas), "the message has no delta %d", after)
		}
	}
	if t.Cut != nil {
		at("cut", *t.Cut)
	}
	if t.Malformed != nil {
		at("malformed", *t.Malformed)
	}
	if t.Hang != nil {
		at("hang", *t.Hang)
	}
	if t.Error != nil {
		if t.Status != 0 && t.Error.After != 0 {
			c.bad(f+".error.after", "together with a status", "remove it")
		}
		at("error.after", t.Error.After)
	}
	if n > 1 {
		c.bad(f, "more than one of cut, malformed, hang and error", "keep one per turn")
	}
}

// block returns the number of deltas that b is sent in at most.
func (c *checker) block(f string, b Block) int {
	if b.Pieces < 0 {
		c.bad(f+".pieces", "negative", "write 1 or more")
	}
	if b.Pieces > 0 && b.Deltas != nil {
		c.bad(f+".pieces", "together with deltas", "keep one")
	}
	deltas := max(1, b.Pieces)
	if b.Deltas != nil {
		deltas = len(b.Deltas)
	}
	for i, d := range b.Deltas {
		df := fmt.Sprintf("%s.deltas[%d]", f, i)
		if d.Text != "" && d.Raw != "" {
			c.bad(df, "both text and raw", "keep one")
		}
		if !validJSON(`"` + d.Raw + `"`) {
			c.bad(df+".raw", "not the inside of a JSON string", `escape quotes, backslashes and control characters, as in \ud83d`)
		}
		c.template(df, d.Text)
	}
	switch b.Type {
	case Text, Thinking:
		if b.ID != "" || b.Name != "" || b.Input != nil {
			c.bad(f, "id, name or input in a "+b.Type+" block", "they belong in a tool_use block")
		}
		if b.Text != "" && b.Deltas != nil {
			c.bad(f+".deltas", "both text and deltas", "keep one")
		}
		c.template(f+".text", b.Text)
	case ToolUse:
		c.toolUse(f, b)
	case "":
		c.bad(f+".type", "missing", "write text, thinking or tool_use")
	default:
		c.badf(f+".type", "write text, thinking or tool_use", "unknown type %q", b.Type)
	}
	if b.Type == Thinking {
		return deltas + 1
	}
	if b.Signature != "" {
		c.bad(f+".signature", "in a "+b.Type+" block", "it belongs in a thinking block")
	}
	return deltas
}

func (c *checker) toolUse(f string, b Block) {
	if b.Name == "" {
		c.bad(f+".name", "missing", "name the tool to call")
	}
	if b.Text != "" {
		c.bad(f+".text", "in a tool_use block", "write input")
	}
	if b.ID != "" {
		if other, taken := c.ids[b.ID]; taken {
			c.badf(f+".id", "give each tool call its own id, or none", "%s has the id %q already", other, b.ID)
		}
		c.ids[b.ID] = f
	}
	if b.Input == nil {
		return
	}
	if b.Deltas != nil {
		c.bad(f+".input", "both input and deltas", "keep one")
	}
	text, err := b.inputJSON()
	if err != nil {
		c.badf(f+".input", "use values that JSON has", "not JSON: %v", err)
		return
	}
	var object map[string]json.RawMessage
	if err := json.Unmarshal([]byte(text), &object); err != nil || object == nil {
		c.bad(f+".input", "not an object", "write the arguments as key: value")
	}
	c.template(f+".input", text)
}

func (c *checker) template(f, text string) {
	if err := checkTemplate(text, c.script.Capture); err != nil {
		c.bad(f, err.Error(), "known: "+strings.Join(templateNames, ", "))
	}
}

func isControl(r rune) bool { return r < ' ' || r == 0x7f }
