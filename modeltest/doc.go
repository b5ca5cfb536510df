// Package modeltest is a scripted model API over HTTP: a stand-in for the
// service behind a coding agent, so that the real command line of the agent can
// be tested without an account, offline, and with answers and failures that are
// chosen in advance.
//
// In a Go test:
//
//	model := modeltest.NewServer(t, modeltest.Script{Turns: []modeltest.Turn{
//		modeltest.Call("Bash", map[string]any{"command": "go test ./..."}),
//		modeltest.Say("The tests say: ", "{{request.last_tool_result}}"),
//	}})
//	// run the agent with ANTHROPIC_BASE_URL=model.URL, then look at model.Requests()
//
// The same scripts can be files, for [ParseScript] and for the mock-model
// command. A file is YAML or JSON; a key that is not listed here is an error.
//
//	session_header: NAME     # each value of this header starts at the first turn
//	turns: [TURN, …]         # the default queue
//	after: error             # when turns have run out: error (status 400) or repeat-last
//	queues:
//	  NAME: {turns: [TURN, …], after: error}
//	routes:                  # the first whose conditions all hold chooses the queue
//	- {use: NAME, when: {model: P, system: P, first_user: P, last_user: P, last_tool_result: P,
//	                     body: P, stream: BOOL, tool: NAME, header: {NAME: P}}}
//	                         # P is text to contain, or {regexp: RE2}
//	capture:
//	  NAME: {from: system, regexp: RE2}    # from: model, system, first_user, last_user,
//	                                       # last_tool_result or body
//
// A TURN is one answer, one of these three:
//
//	blocks: [BLOCK, …]       # a message; it may have the next five keys
//	stop: end_turn           # default: tool_use if there is such a block, else end_turn
//	usage: {in: 10, cr: 0, cw: 0, out: 20}   # tokens: input, cache read, cache write, output
//	ping: true               # a ping record after the first record
//	delay: 25ms              # before each further record, and before a cut
//	cut: N                   # or malformed: N, hang: N, error: {after: N, type: T, message: M}:
//	                         # goes wrong after N deltas; see [Turn]
//
//	status: 429              # an HTTP error
//	error: {type: T, message: M}   # or body: TEXT or any value, sent as JSON
//
//	no_answer: true          # silence until the client goes away
//
// All but the last may have headers: {NAME: VALUE} and wait: 2s, which passes
// before the answer starts. Every turn may have times: N, to be served N times.
//
// A BLOCK is one of
//
//	{type: text, text: TEXT, pieces: N}                          # or deltas: [DELTA, …]
//	{type: thinking, text: TEXT, pieces: N, signature: BASE64}   # or deltas
//	{type: tool_use, id: ID, name: TOOL, input: {…}, pieces: N}  # or deltas: pieces of JSON text
//
// and a DELTA is text, or {raw: '\ud83d'}: the inside of a JSON string, sent
// verbatim, which is how half a surrogate pair is written.
//
// Text, deltas that are not raw, and input may quote the request:
// {{request.model}}, system, first_user, last_user, last_tool_result, messages
// (their number), number (of the request), tool_result.ID, header.NAME and
// capture.NAME. Other braces stay as they are. A template without a value is
// answered with status 400.
//
// A request without "stream": true gets the whole message as one JSON object;
// what would go wrong in the stream then goes wrong with that: cut closes the
// connection, malformed sends half an object, error is an HTTP error.
//
// The package speaks the Anthropic Messages API. It never compresses an answer,
// and it listens on loopback addresses only.
package modeltest
