package modeltest

import "time"

// Script says how the mock model answers. It is plain data: build it as a Go
// literal, or load a file with [ParseScript]. The zero value of every field
// means "not used". A script is checked by [Script.Validate], which
// [ParseScript] and [New] call; it is not changed by the package, so one value
// may serve several models.
//
// Every request for a message takes one turn from one queue: the queue of the
// first route whose conditions all hold, else the default queue, Turns.
type Script struct {
	// Name appears in error answers and in [ScriptError]. ParseScript sets it.
	Name string
	// SessionHeader, if set, names a request header whose value has its own
	// position in every queue, so that one server can serve many runs. Claude
	// Code sends X-Claude-Code-Session-Id. Empty: one position for all.
	SessionHeader string
	// Turns is the default queue, and After says what follows its last turn.
	Turns []Turn
	After After
	// Queues are further queues, by a name of letters, digits, "-" and "_".
	Queues map[string]Queue
	// Routes choose a queue by the content of the request, first match first.
	Routes []Route
	// Capture names parts of the request that turns may quote as
	// {{request.capture.NAME}}.
	Capture map[string]Capture
}

// Queue is an ordered list of turns.
type Queue struct {
	Turns []Turn
	After After
}

// After says what a queue does when its turns have run out.
type After string

const (
	// AfterError answers with status 400 and a message that names the script
	// and the queue. It is the default: a client that asks more often than the
	// script expects is a finding, and 400 is not retried by clients.
	AfterError After = "error"
	// AfterRepeatLast serves the last turn again.
	AfterRepeatLast After = "repeat-last"
)

// Route sends the requests that match When to the queue Use.
type Route struct {
	When When
	Use  string
}

// When is a set of conditions on one request; those that are set must all
// hold. At least one must be set.
type When struct {
	// Model is the requested model.
	Model Pattern
	// System is the system text of the request, messages of role system
	// included.
	System Pattern
	// FirstUser and LastUser are the first and the last text that the user
	// said; see [Messages] for what counts as such.
	FirstUser, LastUser Pattern
	// LastToolResult is the text of the last tool result in the request.
	LastToolResult Pattern
	// Body is the whole request body, byte for byte.
	Body Pattern
	// Stream, if not nil, is whether a streaming answer was asked for. A
	// request that does not say counts as false.
	Stream *bool
	// Tool is the name of a tool that the request offers to the model.
	Tool string
	// Header holds patterns for the values of request headers. A header that
	// is absent matches nothing.
	Header map[string]Pattern
}

// Pattern matches text that contains Contains, or in which Regexp (RE2 syntax)
// finds a match. At most one is set; the zero Pattern is no condition.
type Pattern struct {
	Contains string
	Regexp   string
}

// IsZero reports whether p is no condition.
func (p Pattern) IsZero() bool { return p == Pattern{} }

// Capture takes a piece out of the request: the first group of Regexp, or its
// whole match if it has no group.
type Capture struct {
	// From is model, system, first_user, last_user, last_tool_result or body.
	From   string
	Regexp string
}

// Turn is one answer. It is a message (Blocks), an HTTP error (Status), or
// silence (NoAnswer); a message can go wrong on its way by one of Cut,
// Malformed, Hang and Error, each of which counts the deltas sent before it:
// every content_block_delta record of the message, signatures included.
type Turn struct {
	// Blocks is the content of the message.
	Blocks []Block
	// Stop is the stop reason. Default: tool_use if a block is one, else
	// end_turn.
	Stop string
	// Usage is what the message reports. Nil reports 10 tokens in, 20 out.
	Usage *Usage
	// Ping sends a ping record after the first record of the stream.
	Ping bool

	// Times serves this turn that many times; 0 means once.
	Times int
	// Wait passes before the answer starts, Delay before each further record
	// of a stream and before a Cut: some clients, Claude Code among them, drop
	// what they have received but not yet read when a connection breaks.
	Wait, Delay time.Duration

	// Status answers with an HTTP error from 400 to 599. Its body is Body:
	// text is sent as it is, anything else as JSON. Without a Body the usual
	// error object of the API is sent, with the type and message of Error.
	Status int
	Body   any
	// Headers are added to the answer, also to a good one.
	Headers map[string]string

	// NoAnswer keeps the request unanswered, without even a status, until the
	// client goes away.
	NoAnswer bool
	// Cut closes the connection after that many deltas.
	Cut *int
	// Malformed sends a record whose data is not JSON after that many deltas
	// and then goes on.
	Malformed *int
	// Hang sends nothing more after that many deltas, until the client goes
	// away.
	Hang *int
	// Error without a Status sends an error record in the stream and ends it.
	Error *Failure
}

// Failure is an error of the API.
type Failure struct {
	// After is the number of deltas sent before the error record. It has no
	// meaning together with a Status.
	After int
	// Type defaults to the API's type for the Status, or api_error.
	Type string
	// Message defaults to a sentence that says the error was scripted.
	Message string
}

// Usage is the token counts of one message.
type Usage struct {
	In         int // input tokens
	CacheRead  int
	CacheWrite int
	Out        int // output tokens
}

// Types of a [Block].
const (
	Text     = "text"
	Thinking = "thinking"
	ToolUse  = "tool_use"
)

// Block is one content block of a message.
type Block struct {
	// Type is Text, Thinking or ToolUse.
	Type string
	// Text is the content of a text or thinking block, cut into Pieces deltas.
	Text string
	// Deltas is the content piece by piece, instead of Text or Input. For a
	// tool_use block the pieces are the JSON text of the input, which need not
	// be valid.
	Deltas []Delta
	// Signature is that of a thinking block; empty sends a made-up one.
	Signature string
	// ID and Name are those of a tool call. An empty ID is generated. When a
	// turn is served again, its IDs get a suffix, so that they stay unique.
	ID, Name string
	// Input is the tool input: json.RawMessage is sent compacted with its key
	// order kept, any other value is encoded as JSON. Nil is an empty object.
	Input any
	// Pieces is the number of deltas that Text or Input is cut into, between
	// characters; 0 means 1.
	Pieces int
}

// Delta is one piece of a block's content. Text is escaped as JSON demands,
// and its {{request.…}} are replaced. Raw instead is the inside of a JSON
// string and goes on the wire verbatim: it alone can carry half a surrogate
// pair ("\ud83d"). One of both is set, or none for an empty piece.
type Delta struct {
	Text string
	Raw  string
}

// Deltas returns one Delta per text.
func Deltas(texts ...string) []Delta {
	d := make([]Delta, len(texts))
	for i, t := range texts {
		d[i].Text = t
	}
	return d
}

// Say returns a turn with one text block, sent as one delta per text.
func Say(texts ...string) Turn {
	return Turn{Blocks: []Block{{Type: Text, Deltas: Deltas(texts...)}}}
}

// Call returns a turn with one tool_use block. Input is as in [Block].
func Call(name string, input any) Turn {
	return Turn{Blocks: []Block{{Type: ToolUse, Name: name, Input: input}}}
}

// Fail returns a turn that is an HTTP error with the API's error object.
func Fail(status int, message string) Turn {
	return Turn{Status: status, Error: &Failure{Message: message}}
}

// AfterDeltas returns a pointer to n, for the fields of [Turn] that count deltas.
func AfterDeltas(n int) *int { return &n }

// inputJSON returns the input of a tool_use block as compact JSON.
func (b Block) inputJSON() (string, error) {
	if b.Input == nil {
		return "{}", nil
	}
	return compactJSON(b.Input)
}

func compactJSON(v any) (string, error) {
	out, err := marshal(v)
	if err != nil {
		return "", err
	}
	return string(out), nil
}

// stop returns the stop reason of the turn.
func (t Turn) stop() string {
	if t.Stop != "" {
		return t.Stop
	}
	for _, b := range t.Blocks {
		if b.Type == ToolUse {
			return "tool_use"
		}
	}
	return "end_turn"
}
