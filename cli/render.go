package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/aisandbox-go/aisandbox/event"
)

// renderer shows a run to a person: phases with their durations, text as it
// comes, tool calls with the head of their results, the diff and a summary. It
// writes plain text, and colours where it was told so. Not for concurrent use.
type renderer struct {
	w      io.Writer
	colour bool

	midLine  bool                // the cursor is not at the start of a line
	thinking bool                // the text that comes now is reasoning
	tools    map[string]*callBuf // open calls
	started  time.Time
	ended    time.Time // of a run that is over; zero: now
	calls    int
	errored  bool
}

// callBuf is a tool call whose arguments still come.
type callBuf struct {
	name string
	args strings.Builder
}

// maxShownArgs bounds what is kept of a call's arguments: enough for a line.
const maxShownArgs = 4 << 10

func newRenderer(w io.Writer, colour bool, started time.Time) *renderer {
	return &renderer{w: w, colour: colour, tools: map[string]*callBuf{}, started: started}
}

// The styles, as ANSI SGR parameters.
const (
	styleDim   = "2"
	styleBold  = "1"
	styleRed   = "31"
	styleGreen = "32"
	styleCyan  = "36"
)

func (r *renderer) style(sgr, s string) string {
	if !r.colour || s == "" {
		return s
	}
	return "\x1b[" + sgr + "m" + s + "\x1b[0m"
}

func (r *renderer) line(s string) {
	if r.midLine {
		fmt.Fprintln(r.w)
		r.midLine = false
	}
	fmt.Fprintln(r.w, s)
}

func (r *renderer) text(s string) {
	if s == "" {
		return
	}
	s = printable(s)
	if r.thinking {
		s = r.style(styleDim, s)
	}
	fmt.Fprint(r.w, s)
	r.midLine = !strings.HasSuffix(s, "\n")
}

// phase shows a finished step of the sandbox's making.
func (r *renderer) phase(name, detail string, d time.Duration) {
	s := fmt.Sprintf("%s %s %s", r.style(styleGreen, "✓"), printable(name), r.style(styleDim, fmtDuration(d)))
	if detail != "" {
		s += " " + r.style(styleDim, clip(printable(detail), 100))
	}
	r.line(s)
}

// event shows one event.
func (r *renderer) event(ev event.Event) {
	switch ev := ev.(type) {
	case event.TextMessageStart:
		r.thinking = false
	case event.TextMessageContent:
		r.text(ev.Delta)
	case event.TextMessageEnd, event.ReasoningMessageEnd:
		if r.midLine {
			r.line("")
		}
		r.thinking = false
	case event.ReasoningMessageStart:
		r.thinking = true
	case event.ReasoningMessageContent:
		r.text(ev.Delta)
	case event.ToolCallStart:
		r.tools[ev.ToolCallID] = &callBuf{name: ev.ToolCallName}
		r.calls++
	case event.ToolCallArgs:
		if c := r.tools[ev.ToolCallID]; c != nil && c.args.Len() < maxShownArgs {
			c.args.WriteString(ev.Delta)
		}
	case event.ToolCallEnd:
		if c := r.tools[ev.ToolCallID]; c != nil {
			r.line(r.style(styleCyan, "● "+printable(c.name)) + " " + clip(printable(argLine(c.args.String())), 160))
		}
	case event.ToolCallResult:
		delete(r.tools, ev.ToolCallID)
		failed := event.TanStackOf(ev).State == "output-error"
		r.result(ev.Content, failed)
	case event.RunError:
		r.errored = true
	}
}

// result shows the head of what a tool answered.
func (r *renderer) result(content string, failed bool) {
	const most = 6
	lines := strings.Split(strings.TrimRight(content, "\n"), "\n")
	style := styleDim
	if failed {
		style = styleRed
	}
	for i, l := range lines {
		if i == most {
			r.line(r.style(styleDim, fmt.Sprintf("  │ … %d more lines", len(lines)-most)))
			break
		}
		r.line(r.style(style, "  │ "+clip(printable(l), 160)))
	}
}

// diff shows a unified diff.
func (r *renderer) diff(d string) {
	r.line("")
	for _, l := range strings.Split(strings.TrimRight(d, "\n"), "\n") {
		l = printable(l)
		switch {
		case strings.HasPrefix(l, "+++"), strings.HasPrefix(l, "---"), strings.HasPrefix(l, "diff "), strings.HasPrefix(l, "index "):
			l = r.style(styleBold, l)
		case strings.HasPrefix(l, "+"):
			l = r.style(styleGreen, l)
		case strings.HasPrefix(l, "-"):
			l = r.style(styleRed, l)
		case strings.HasPrefix(l, "@@"):
			l = r.style(styleCyan, l)
		}
		r.line(l)
	}
}

// summary closes the show.
func (r *renderer) summary(fin event.RunFinished) {
	ended := r.ended
	if ended.IsZero() {
		ended = time.Now()
	}
	parts := []string{fmt.Sprintf("done in %s", fmtDuration(ended.Sub(r.started))), plural(r.calls, "tool call")}
	var in, out int64
	for _, u := range fin.Usage {
		in, out = in+u.InputTokens, out+u.OutputTokens
	}
	if in+out > 0 {
		parts = append(parts, fmt.Sprintf("%d tokens in, %d out", in, out))
	}
	if c := cost(fin); c > 0 {
		parts = append(parts, fmt.Sprintf("$%.4f", c))
	}
	ts := event.TanStackOf(fin)
	if ts.FinishReason == "length" {
		parts = append(parts, "stopped at the turn limit")
	}
	r.line("")
	r.line(r.style(styleGreen, "✓") + " " + strings.Join(parts, " · "))
}

// failure closes the show of a run that failed.
func (r *renderer) failure(e event.RunError) {
	s := printable(e.Message)
	if e.Code != "" {
		s += " (" + printable(e.Code) + ")"
	}
	r.line("")
	r.line(r.style(styleRed, "✗ "+s))
}

// cost is the agent's own account of what the run cost, in US dollars.
func cost(fin event.RunFinished) float64 {
	var u struct {
		Details struct {
			Cost float64 `json:"totalCostUsd"`
		} `json:"providerUsageDetails"`
	}
	if err := json.Unmarshal(event.TanStackOf(fin).Usage, &u); err != nil {
		return 0
	}
	return u.Details.Cost
}

// argLine is the one argument that tells a person what a call does.
func argLine(args string) string {
	var m map[string]any
	if err := json.Unmarshal([]byte(args), &m); err != nil {
		return firstLine(args)
	}
	for _, k := range []string{"command", "file_path", "path", "url", "pattern", "query", "description"} {
		if s, ok := m[k].(string); ok {
			return firstLine(s)
		}
	}
	return firstLine(args)
}

func firstLine(s string) string {
	head, rest, more := strings.Cut(s, "\n")
	if more && strings.TrimSpace(rest) != "" {
		head += " …"
	}
	return head
}

// printable replaces control characters other than newline and tab: what an
// agent prints must not drive the terminal of whoever watches it.
func printable(s string) string {
	return strings.Map(func(c rune) rune {
		switch {
		case c == '\n' || c == '\t':
			return c
		case c < 0x20 || c == 0x7f || (c >= 0x80 && c < 0xa0) || c == utf8.RuneError:
			return '\uFFFD'
		}
		return c
	}, s)
}

func clip(s string, most int) string {
	n := 0
	for i := range s {
		if n == most {
			return s[:i] + "…"
		}
		n++
	}
	return s
}

func plural(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

func fmtDuration(d time.Duration) string {
	switch {
	case d < time.Second:
		return fmt.Sprintf("%dms", d.Milliseconds())
	case d < time.Minute:
		return fmt.Sprintf("%.1fs", d.Seconds())
	default:
		return d.Round(time.Second).String()
	}
}
