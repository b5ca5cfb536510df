package claudecode

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/harness"
	"github.com/aisandbox-go/aisandbox/internal/rawjson"
)

type rawMsg = json.RawMessage

// resultLine is the fields of a result line; raw JSON, nil when absent.
type resultLine struct {
	isError, text, errors, status, object, usage, cost, models, denials []byte
}

func (r *resultLine) set(k, v []byte) {
	switch string(k) {
	case "is_error":
		r.isError = v
	case "result":
		r.text = v
	case "errors":
		r.errors = v
	case "api_error_status":
		r.status = v
	case "structured_output":
		r.object = v
	case "usage":
		r.usage = v
	case "total_cost_usd":
		r.cost = v
	case "modelUsage":
		r.models = v
	case "permission_denials":
		r.denials = v
	}
}

// result is what is kept of the last result line.
type result struct {
	subtype string
	bad     bool
	text    string
	errors  string // joined
	status  string // of the model API
	code    string // of the last synthetic line
	object  []byte // the structured answer, as the program says
}

// usage adds up over result lines; cost and models are cumulative in the lines
// themselves.
type usage struct {
	seen                                 bool
	input, output, cacheWrite, cacheRead int64
	cost, models                         rawMsg
}

func (d *decoder) result(l *line) {
	d.closeBlock(true)
	r := &result{
		subtype: text(l.subtype),
		bad:     string(l.result.isError) == "true",
		text:    text(l.result.text),
		code:    d.syntheticCode,
	}
	if v := l.result.status; len(v) > 0 && v[0] >= '0' && v[0] <= '9' {
		r.status = string(v)
	}
	if v := l.result.errors; len(v) > 0 && v[0] == '[' {
		var all []string
		_ = rawjson.Array(v, func(v []byte) bool {
			if s := text(v); s != "" {
				all = append(all, s)
			}
			return len(all) < 100
		})
		r.errors = strings.Join(all, "; ")
	}
	if d.o.Structured {
		r.object = bytes.Clone(l.result.object)
	}
	d.end = r
	d.count(&l.result)
	if v := l.result.denials; len(v) > 0 && v[0] == '[' {
		_ = rawjson.Array(v, func(v []byte) bool {
			for _, old := range d.denials {
				if bytes.Equal(old, v) {
					return true
				}
			}
			d.denials = append(d.denials, bytes.Clone(v))
			return len(d.denials) < maxDenials
		})
	}
	// What the program itself said is an answer if all went well, such as "Unknown
	// command"; else it is the error's message.
	if !r.bad {
		for _, s := range d.synthetic {
			if s.id == "" {
				s.id = d.o.NewID()
			}
			d.say(s.id, s.text)
		}
	}
	d.synthetic, d.syntheticCode = nil, ""
}

func (d *decoder) count(l *resultLine) {
	if !rawjson.IsNull(l.cost) && l.cost[0] != '"' && l.cost[0] != '{' && l.cost[0] != '[' {
		d.usage.cost = bytes.Clone(l.cost)
	}
	if rawjson.IsObject(l.models) && string(l.models) != "{}" {
		d.usage.models = rawjson.AppendCompact(nil, l.models)
	}
	if !rawjson.IsObject(l.usage) {
		return
	}
	d.usage.seen = true
	_ = rawjson.Members(l.usage, func(k, v []byte) bool {
		n, err := strconv.ParseInt(string(v), 10, 64)
		if err != nil || n < 0 || n > 1<<50 {
			return true
		}
		switch string(k) {
		case "input_tokens":
			d.usage.input += n
		case "output_tokens":
			d.usage.output += n
		case "cache_creation_input_tokens":
			d.usage.cacheWrite += n
		case "cache_read_input_tokens":
			d.usage.cacheRead += n
		}
		return true
	})
}

// wire is the usage in the wire's shape, and what has no place there for
// metadata.tanstack.usage (spec 07 §5.4).
func (d *decoder) wire() ([]event.Usage, rawMsg) {
	u := d.usage
	if !u.seen {
		return nil, nil
	}
	type details struct {
		CacheWriteTokens int64 `json:"cacheWriteTokens,omitempty"`
	}
	type provider struct {
		TotalCostUSD rawMsg `json:"totalCostUsd,omitempty"`
		ModelUsage   rawMsg `json:"modelUsage,omitempty"`
	}
	var rest struct {
		Provider *provider `json:"providerUsageDetails,omitempty"`
		Details  *details  `json:"promptTokensDetails,omitempty"`
	}
	if u.cost != nil || u.models != nil {
		rest.Provider = &provider{u.cost, u.models}
	}
	if u.cacheWrite > 0 {
		rest.Details = &details{u.cacheWrite}
	}
	var meta rawMsg
	if rest.Provider != nil || rest.Details != nil {
		if b, err := json.Marshal(rest); err == nil {
			meta = b
		}
	}
	return []event.Usage{{Model: d.o.Model, InputTokens: u.input, OutputTokens: u.output,
		TotalTokens: u.input + u.output, CachedInputTokens: u.cacheRead}}, meta
}

// Close ends the run: open items are closed, calls without a result get one, and
// one terminal event comes last.
func (d *decoder) Close(end harness.End) ([]event.Event, error) {
	d.out = d.out[:0]
	d.closeBlock(true)
	d.endAbandoned()
	for _, c := range d.inOrder() {
		if c.begun {
			d.answer(c.id, event.Interrupted, false)
		}
	}
	clear(d.calls)
	if len(d.denials) > 0 {
		d.custom("permission-denials", struct {
			Denials []rawMsg `json:"denials"`
		}{d.denials})
	}
	if reason, failure := d.outcome(end); failure != nil {
		d.emit(d.runError(failure))
	} else {
		d.answerStructured()
		d.emit(d.runFinished(reason))
	}
	return d.take(), nil
}

// failure is why a run ended badly.
type failure struct{ message, code string }

// outcome decides how the run ended (spec 02 §6.1). The exit status and is_error
// are independent of each other.
func (d *decoder) outcome(end harness.End) (finishReason string, bad *failure) {
	r, exit := d.end, end.Exit
	switch {
	case end.Aborted:
		return "", &failure{"Request aborted", "aborted"}
	case r == nil && len(d.synthetic) > 0:
		return "", &failure{d.synthetic[len(d.synthetic)-1].text, or(d.syntheticCode, "no_result")}
	case r == nil && exit.Code == 0 && exit.Signal == 0:
		return "", &failure{"the agent ended without a result", "no_result"}
	case r == nil:
		return "", &failure{d.exited(end), "no_result"}
	case r.subtype == "error_max_turns":
		return "length", nil
	case r.bad || r.subtype != "success":
		msg := or(r.errors, or(r.text, d.words()+" run failed: "+r.subtype))
		code := or(r.code, r.subtype)
		if r.status != "" {
			code = "api_error_" + r.status
		}
		return "", &failure{msg, code}
	case exit.Signal != 0 || exit.Code > 128:
		return "stop", nil // a signal after the work was done; the program exits with 128+n itself
	case exit.Code != 0:
		return "", &failure{d.exited(end), "process_exit"}
	}
	return "stop", nil
}

// words is the harness as a person reads it.
func (d *decoder) words() string {
	if d.o.Harness == name {
		return "Claude Code"
	}
	return d.o.Harness
}

func (d *decoder) exited(end harness.End) string {
	s := fmt.Sprintf("the agent process ended without a result (%v)", end.Exit)
	if d.end != nil {
		s = fmt.Sprintf("the agent process failed (%v)", end.Exit)
	}
	if t := or(strings.TrimSpace(end.StderrTail), d.noise); t != "" {
		s += ": " + tail(t, 1000)
	}
	return s
}

func (d *decoder) runError(f *failure) event.RunError {
	e := event.RunError{Message: clip(or(f.message, "Unknown error occurred"), maxMessage), Code: f.code}
	t := event.TanStack{Model: d.o.Model, ThreadID: d.o.ThreadID, RunID: d.o.RunID}
	if u := d.usage; u.input+u.output+u.cacheRead+u.cacheWrite > 0 {
		e.Usage, t.Usage = d.wire()
	}
	e.Metadata = t.Metadata()
	return e
}

func (d *decoder) runFinished(reason string) event.RunFinished {
	e := event.RunFinished{ThreadID: d.o.ThreadID, RunID: d.o.RunID, Outcome: &event.Outcome{Type: "success"}}
	t := event.TanStack{Model: d.o.Model, FinishReason: reason}
	e.Usage, t.Usage = d.wire()
	e.Metadata = t.Metadata()
	return e
}

// answerStructured says the structured answer, if one was asked for and found.
func (d *decoder) answerStructured() {
	if !d.o.Structured || d.end == nil {
		return
	}
	obj := d.structured.best(d.end.object, d.end.text)
	if obj == nil {
		return
	}
	id := d.o.NewID()
	for _, p := range []struct {
		name string
		v    any
	}{
		{event.NameStructuredStart, event.StructuredStart{MessageID: id}},
		{event.NameStructuredComplete, event.StructuredComplete{Object: obj, Raw: string(obj), MessageID: id}},
	} {
		c, err := event.NewCustom(p.name, p.v)
		if err != nil {
			return // obj is checked JSON
		}
		c.Metadata = d.meta
		d.emit(c)
	}
}

func or(s, otherwise string) string {
	if s != "" {
		return s
	}
	return otherwise
}

// clip cuts s to at most n bytes without breaking a character.
func clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}

// tail is the end of s, at most n bytes.
func tail(s string, n int) string {
	if len(s) <= n {
		return s
	}
	i := len(s) - n
	for i < len(s) && !utf8.RuneStart(s[i]) {
		i++
	}
	return s[i:]
}
