// Package scripted is an agent that needs no account, no network and no model: it
// does what a script says. The guest program carries it and runs it inside of the
// sandbox, where it really runs commands and writes files, and it speaks Claude
// Code's stream-json, so that everything behind it is the same as for a real
// agent. It serves demos, and tests of what stands around an agent.
//
// # The script
//
// A script is YAML with one key, steps: a list of entries with one key each.
//
//	steps:
//	  - think: I should look at the files first.
//	  - say: "Let me see. "
//	  - run: ls -l                       # sh -c; a failure does not end the script
//	  - write: {path: a/b.txt, content: "hello\n"}
//	  - edit: {path: a/b.txt, old: hello, new: goodbye}   # old must occur once
//	  - call: {tool: lookup, args: {id: 7}}               # a tool of an MCP server
//	  - ask: {tool: Bash, input: {command: rm a/b.txt}}   # a tool that needs a permission
//	  - sleep: 25ms
//	  - repeat: {times: 3, steps: [{say: "again "}]}
//	  - flood: {lines: 1000, bytes: 100} # text as fast as it is taken
//	  - crash: 3                         # or {signal: KILL}: ends without a result
//
// The whole text of a run is the concatenation of its say steps. Steps of kind say
// and think that follow each other belong to one message; a tool ends it. See
// [player] for the placeholders such as {{prompt}} and for what each step does.
//
// Unknown keys, anchors, tags and values of the wrong type are errors, a
// *[ScriptError] with line and column.
package scripted

import (
	"bytes"
	"encoding/json"
	"fmt"

	"github.com/aisandbox-go/aisandbox/harness/scripted/player"
)

// The bounds of a script.
const (
	MaxFile     = 8 << 20    // bytes of YAML
	MaxText     = 1 << 20    // bytes of one text
	MaxSteps    = 10_000     // steps written down, nested ones included
	MaxExpanded = 10_000_000 // steps done, repetitions included
	MaxTimes    = 1_000_000  // of one repeat
	MaxNesting  = 8          // repeat within repeat
	MaxFlood    = 1 << 30    // bytes of all floods together, repetitions included
)

// Script is what the agent does. It may be written in Go as well as parsed.
type Script player.Script

// JSON is the form that the guest program reads. The error is for a Script made
// in Go: of [Parse] comes none that can't be encoded.
func (s Script) JSON() ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(player.Script(s)); err != nil {
		return nil, fmt.Errorf("scripted: encode the script: %w", err)
	}
	return b.Bytes(), nil
}

// ScriptError says what is wrong with a script, and where.
type ScriptError struct {
	File         string
	Line, Column int    // from 1, columns in characters
	Field        string // such as steps[2].write.path; empty for the whole file
	Msg          string // what is wrong and what would be right
}

func (e *ScriptError) Error() string {
	where := fmt.Sprintf("scripted: %s:%d:%d: ", e.File, e.Line, e.Column)
	if e.Field != "" {
		where += e.Field + ": "
	}
	return where + e.Msg
}
