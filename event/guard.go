package event

import (
	"cmp"
	"encoding/json"
	"maps"
	"slices"

	"github.com/aisandbox-go/aisandbox/internal/rawjson"
)

// Interrupted is the content of the result that a tool call gets when its run
// ended before it answered.
const Interrupted = `{"status":"interrupted"}`

// GuardOptions say whose events a [Guard] sees.
type GuardOptions struct {
	RunID, ThreadID string // of RUN_STARTED and RUN_FINISHED; empty: as the first RUN_STARTED says

	// NewID makes the message ids that the guard itself needs; nil derives them
	// from the tool call's id. It must be deterministic where replays are compared.
	NewID func() string

	// KeepParents leaves ToolCallStart.ParentMessageID as it came. Otherwise an
	// empty one becomes the last text message of the run (spec 07 §6.3).
	KeepParents bool

	// Dropped is told of each event that was swallowed, and why. May be nil.
	Dropped func(ev Event, why string)
}

// Guard makes any sequence of one run's events legal for the clients (spec 07
// §6, §6.1) by repairing it: what it returns for all events together passes
// [Validate] once a terminal event went through. It is a pure function of what it
// was given. Not for concurrent use.
type Guard struct {
	opts     GuardOptions
	started  bool
	done     bool
	lastText string

	// Open things and calls without a result, by the order in which they began.
	open    map[openKey]uint64
	pending map[string]uint64
	next    uint64
}

type openKind int

const (
	openText openKind = iota
	openCall
	openSpan
	openReasoning
	openStep
)

type openKey struct {
	kind openKind
	id   string
}

// NewGuard returns a guard for one run.
func NewGuard(opts GuardOptions) *Guard {
	return &Guard{opts: opts, open: map[openKey]uint64{}, pending: map[string]uint64{}}
}

// Done says whether the terminal event went through.
func (g *Guard) Done() bool { return g.done }

// Close ends the run with e unless it has ended; then it returns nothing.
func (g *Guard) Close(e RunError) []Event {
	if g.done {
		return nil
	}
	return g.Push(e)
}

// Push returns what to emit for ev: ev itself, perhaps repaired, with what must
// come before it; or nothing.
func (g *Guard) Push(ev Event) []Event {
	if ev == nil {
		return nil
	}
	if g.done {
		return g.drop(ev, "the run has ended")
	}
	ev = clean(ev)
	var out []Event
	if e, ok := ev.(RunStarted); ok {
		switch {
		case g.started && e.RunID == g.opts.RunID:
			return nil // an adapter says it as well as the engine
		case g.started:
			return g.drop(ev, "another run has started")
		}
		g.started = true
		if g.opts.RunID == "" {
			g.opts.RunID = e.RunID
		}
		if g.opts.ThreadID == "" {
			g.opts.ThreadID = e.ThreadID
		}
		e.RunID, e.ThreadID = g.opts.RunID, g.opts.ThreadID
		if !valid(e.Input) {
			e.Input = nil
		}
		return []Event{e}
	}
	rest := g.step(ev)
	if len(rest) > 0 && !g.started {
		g.started = true
		out = append(out, RunStarted{RunID: g.opts.RunID, ThreadID: g.opts.ThreadID})
	}
	if out == nil {
		return rest
	}
	return append(out, rest...)
}

func (g *Guard) drop(ev Event, why string) []Event {
	if g.opts.Dropped != nil {
		g.opts.Dropped(ev, why)
	}
	return nil
}

// isOpen, begin and end keep track of one open thing.
func (g *Guard) isOpen(k openKind, id string) bool { _, ok := g.open[openKey{k, id}]; return ok }

func (g *Guard) begin(k openKind, id string) {
	g.open[openKey{k, id}] = g.next
	g.next++
}

func (g *Guard) end(k openKind, id string) { delete(g.open, openKey{k, id}) }

// start is an event that opens something.
func (g *Guard) start(ev Event, k openKind, id string) []Event {
	switch {
	case id == "":
		return g.drop(ev, "it has no id")
	case g.isOpen(k, id):
		return g.drop(ev, "it is open already")
	}
	g.begin(k, id)
	return []Event{ev}
}

// finish is an event that closes something.
func (g *Guard) finish(ev Event, k openKind, id string) []Event {
	if !g.isOpen(k, id) {
		return g.drop(ev, "it is not open")
	}
	g.end(k, id)
	return []Event{ev}
}

// step handles what stands between RUN_STARTED and the end.
func (g *Guard) step(ev Event) []Event {
	switch e := ev.(type) {
	case TextMessageContent:
		switch {
		case e.Delta == "":
			return nil
		case e.MessageID == "":
			return g.drop(ev, "it has no id")
		case !g.isOpen(openText, e.MessageID):
			g.begin(openText, e.MessageID)
			g.lastText = e.MessageID
			return []Event{TextMessageStart{MessageID: e.MessageID, Role: "assistant"}, e}
		}
		return []Event{ev}
	case TextMessageStart:
		if !textRole(e.Role) {
			e.Role = "assistant"
		}
		out := g.start(e, openText, e.MessageID)
		if len(out) > 0 {
			g.lastText = e.MessageID
		}
		return out
	case TextMessageEnd:
		return g.finish(e, openText, e.MessageID)
	case ReasoningStart:
		return g.start(e, openSpan, e.MessageID)
	case ReasoningMessageStart:
		e.Role = "reasoning"
		return g.start(e, openReasoning, e.MessageID)
	case ReasoningMessageContent:
		switch {
		case e.Delta == "":
			return nil
		case e.MessageID == "":
			return g.drop(ev, "it has no id")
		case !g.isOpen(openReasoning, e.MessageID):
			g.begin(openReasoning, e.MessageID)
			return []Event{ReasoningMessageStart{MessageID: e.MessageID, Role: "reasoning"}, e}
		}
		return []Event{ev}
	case ReasoningMessageEnd:
		return g.finish(e, openReasoning, e.MessageID)
	case ReasoningEnd:
		var out []Event
		if g.isOpen(openSpan, e.MessageID) && g.isOpen(openReasoning, e.MessageID) {
			g.end(openReasoning, e.MessageID)
			out = []Event{ReasoningMessageEnd{MessageID: e.MessageID}}
		}
		return append(out, g.finish(e, openSpan, e.MessageID)...)
	case ReasoningEncryptedValue:
		if e.EntityID == "" || (e.Subtype != "message" && e.Subtype != "tool-call") {
			return g.drop(ev, "it belongs to nothing")
		}
	case ToolCallStart:
		if e.ToolCallName == "" {
			return g.drop(ev, "it has no name")
		}
		if e.ParentMessageID == "" && !g.opts.KeepParents {
			e.ParentMessageID = g.lastText
		}
		out := g.start(e, openCall, e.ToolCallID)
		if len(out) > 0 {
			g.pending[e.ToolCallID] = g.next
		}
		return out
	case ToolCallArgs:
		if e.Delta == "" {
			return nil
		}
		if !g.isOpen(openCall, e.ToolCallID) {
			return g.drop(ev, "it is not open")
		}
	case ToolCallEnd:
		return g.finish(e, openCall, e.ToolCallID)
	case ToolCallResult:
		if e.ToolCallID == "" {
			return g.drop(ev, "it has no id")
		}
		if e.MessageID == "" || e.MessageID == g.lastText {
			e.MessageID = g.resultID(e.ToolCallID)
		}
		e.Role = "tool"
		delete(g.pending, e.ToolCallID)
		return []Event{e}
	case StepStarted:
		return g.start(e, openStep, e.StepName)
	case StepFinished:
		return g.finish(e, openStep, e.StepName)
	case StateSnapshot:
		if len(e.Snapshot) == 0 || !valid(e.Snapshot) {
			return g.drop(ev, "the snapshot is no JSON")
		}
	case StateDelta:
		if !valid(e.Delta) || len(e.Delta) == 0 || e.Delta[0] != '[' {
			return g.drop(ev, "the delta is no list")
		}
	case MessagesSnapshot:
	case Custom:
		if e.Name == "" {
			return g.drop(ev, "it has no name")
		}
		if !valid(e.Value) {
			return g.drop(ev, "the value is no JSON")
		}
		if len(e.Value) == 0 {
			e.Value = json.RawMessage("{}")
		}
		return []Event{e}
	case RunFinished:
		return g.finished(e)
	case RunError:
		return g.failed(e)
	default:
		return g.drop(ev, "clients do not know its type")
	}
	return []Event{ev}
}

func (g *Guard) finished(e RunFinished) []Event {
	e.RunID, e.ThreadID = g.opts.RunID, g.opts.ThreadID
	if !valid(e.Result) {
		e.Result = nil
	}
	e.Usage = cleanUsage(e.Usage)
	if e.Outcome != nil {
		switch e.Outcome.Type {
		case "success":
			if len(e.Outcome.Interrupts) > 0 {
				e.Outcome = &Outcome{Type: "success"}
			}
		case "interrupt":
			o := Outcome{Type: "interrupt"}
			for _, i := range e.Outcome.Interrupts {
				if validInterrupt(i) {
					o.Interrupts = append(o.Interrupts, i)
				}
			}
			if len(o.Interrupts) == 0 {
				return g.failed(RunError{Message: "the run stopped for an interrupt that names nothing", Code: "invalid_interrupt", Usage: e.Usage, Common: e.Common})
			}
			e.Outcome = &o
		default: // "cancelled" is fatal for some clients: a cancelled run is an error
			return g.failed(RunError{Message: "Request aborted", Code: "aborted", Usage: e.Usage, Common: e.Common})
		}
	}
	out := append(g.closeAll(), e)
	g.done = true
	return out
}

func (g *Guard) failed(e RunError) []Event {
	if e.Message == "" {
		e.Message = "Unknown error occurred"
	}
	e.Usage = cleanUsage(e.Usage)
	out := append(g.closeAll(), e)
	g.done = true
	return out
}

// rank orders what closeAll closes: spans after the messages in them, even one
// that began before its span; steps last.
func (k openKind) rank() int {
	switch k {
	case openSpan:
		return 1
	case openStep:
		return 2
	}
	return 0
}

// closeAll closes what is open, the latest first, and answers the calls that got
// no result: a client would try to run them.
func (g *Guard) closeAll() []Event {
	var out []Event
	keys := slices.SortedFunc(maps.Keys(g.open), func(a, b openKey) int {
		return cmp.Or(cmp.Compare(a.kind.rank(), b.kind.rank()), cmp.Compare(g.open[b], g.open[a]))
	})
	for _, k := range keys {
		switch k.kind {
		case openText:
			out = append(out, TextMessageEnd{MessageID: k.id})
		case openCall:
			out = append(out, ToolCallEnd{ToolCallID: k.id})
		case openSpan:
			out = append(out, ReasoningEnd{MessageID: k.id})
		case openReasoning:
			out = append(out, ReasoningMessageEnd{MessageID: k.id})
		case openStep:
			out = append(out, StepFinished{StepName: k.id})
		}
	}
	calls := slices.SortedFunc(maps.Keys(g.pending), func(a, b string) int { return cmp.Compare(g.pending[a], g.pending[b]) })
	for _, id := range calls {
		out = append(out, ToolCallResult{MessageID: g.resultID(id), ToolCallID: id, Content: Interrupted, Role: "tool"})
	}
	clear(g.open)
	clear(g.pending)
	return out
}

func (g *Guard) resultID(call string) string {
	if g.opts.NewID != nil {
		if id := g.opts.NewID(); id != "" && id != g.lastText {
			return id
		}
	}
	return "result-" + call
}

// clean takes out of the common fields what clients fail on.
func clean(ev Event) Event {
	c := ev.Base()
	bad := false
	if c.Timestamp < 0 || c.Timestamp > maxTimestamp {
		c.Timestamp, bad = 0, true
	}
	if len(c.RawEvent) > 0 && (string(c.RawEvent) == "null" || !valid(c.RawEvent)) {
		c.RawEvent, bad = nil, true
	}
	if len(c.Metadata) > 0 && (c.Metadata[0] != '{' || !valid(c.Metadata)) {
		c.Metadata, bad = nil, true
	}
	if bad {
		return ev.With(c)
	}
	return ev
}

func valid(v json.RawMessage) bool { return len(v) == 0 || rawjson.Check(v) == nil }

func textRole(r string) bool {
	return r == "assistant" || r == "user" || r == "system" || r == "developer"
}

// validInterrupt says whether clients accept a descriptor: an id and a reason.
func validInterrupt(v json.RawMessage) bool {
	var d struct{ ID, Reason string }
	return json.Unmarshal(v, &d) == nil && d.ID != "" && d.Reason != ""
}

func cleanUsage(us []Usage) []Usage {
	for i, u := range us {
		if u.InputTokens < 0 || u.OutputTokens < 0 || u.TotalTokens < 0 || u.CachedInputTokens < 0 || u.ReasoningTokens < 0 {
			us = slices.Clone(us)
			us[i] = Usage{Provider: u.Provider, Model: u.Model,
				InputTokens: max(0, u.InputTokens), OutputTokens: max(0, u.OutputTokens), TotalTokens: max(0, u.TotalTokens),
				CachedInputTokens: max(0, u.CachedInputTokens), ReasoningTokens: max(0, u.ReasoningTokens)}
		}
	}
	return us
}
