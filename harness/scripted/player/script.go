// Package player plays a script as if it were a coding agent: it speaks, runs
// commands, writes and edits files, calls tools, and prints what it does in the
// stream-json form of Claude Code, one JSON object per line.
//
// It is linked into the small guest program, so it imports nothing but the
// standard library, and of that neither net/http nor templates nor regular
// expressions.
//
// # Placeholders
//
// In the texts of say, think, run and write these are replaced:
//
//	{{prompt}}        the prompt of this turn, without its trailing newlines
//	{{first_prompt}}  the prompt of the session's first turn
//	{{last_result}}   what the last tool of this turn returned; before the first
//	                  one, the answer of the session's previous turn
//
// In the command of run a value is put in as one quoted shell word, so no quotes
// belong around it. Anything else between braces stays as it is.
//
// # Determinism
//
// Two runs of one script with the same flags, prompt, directory and session
// state print the same bytes, apart from what commands and tools print: ids come
// from a counter and the session id, times from a counter too.
package player

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"
)

// Script is what the agent does, in order. Its JSON form is what the host hands
// to the guest program.
type Script struct {
	Steps []Step `json:"steps"`
}

// Step is one thing to do: exactly one field is set.
type Step struct {
	// Say is one piece of the answer. The whole text of a run is the
	// concatenation of its say steps: nothing is put between them.
	Say string `json:"say,omitempty"`

	// Think is a piece of reasoning.
	Think string `json:"think,omitempty"`

	// Run is a command for sh -c. A failing command does not end the script.
	Run string `json:"run,omitempty"`

	Write *Write `json:"write,omitempty"`
	Edit  *Edit  `json:"edit,omitempty"`
	Call  *Call  `json:"call,omitempty"`
	Ask   *Ask   `json:"ask,omitempty"`

	// Sleep is a pause, in nanoseconds on the wire.
	Sleep time.Duration `json:"sleep,omitempty"`

	Crash  *Crash  `json:"crash,omitempty"`
	Flood  *Flood  `json:"flood,omitempty"`
	Repeat *Repeat `json:"repeat,omitempty"`
}

// Write writes a file, atomically and with its parent directories. Path is
// relative to the working directory, or absolute.
type Write struct {
	Path    string `json:"path"`
	Content string `json:"content"`
}

// Edit replaces the one occurrence of Old by New. It is an error of the tool when
// Old occurs never or more than once.
type Edit struct {
	Path string `json:"path"`
	Old  string `json:"old"`
	New  string `json:"new"`
}

// Call calls a tool of an MCP server. Tool is mcp__SERVER__TOOL, or the tool's
// own name where one of the servers lists it.
type Call struct {
	Tool string          `json:"tool"`
	Args json.RawMessage `json:"args,omitempty"` // an object; nil means {}
}

// Ask uses a tool that needs a permission: Bash, Write, Edit or an MCP tool, its
// input as the model would send it. With a prompt tool that one decides; without
// one the tool runs in the mode bypassPermissions and is refused in the others.
type Ask struct {
	Tool  string          `json:"tool"`
	Input json.RawMessage `json:"input,omitempty"` // an object; nil means {}
}

// Crash ends the agent at once, without a result line: with exit code Code, or by
// the signal named Signal, of which there is one: KILL.
type Crash struct {
	Code   int    `json:"code"`
	Signal string `json:"signal,omitempty"`
}

// Flood writes Lines pieces of text of Bytes bytes each, as fast as the reader
// takes them. They belong to the text of the run. The whole assistant line that
// follows a streamed text is left out when it would be longer than 1 MiB.
type Flood struct {
	Lines int `json:"lines"`
	Bytes int `json:"bytes"`
}

// Repeat does its steps Times times.
type Repeat struct {
	Times int    `json:"times"`
	Steps []Step `json:"steps"`
}

// maxScript bounds the JSON of a script.
const maxScript = 64 << 20

// maxDepth bounds how deep repeat steps nest.
const maxDepth = 8

// readScript decodes a script strictly.
func readScript(r io.Reader) (Script, error) {
	b, err := io.ReadAll(io.LimitReader(r, maxScript+1))
	if err != nil {
		return Script{}, err
	}
	if len(b) > maxScript {
		return Script{}, fmt.Errorf("longer than %d bytes", maxScript)
	}
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	var s Script
	if err := dec.Decode(&s); err != nil {
		return Script{}, err
	}
	if _, err := dec.Token(); err != io.EOF {
		return Script{}, errors.New("more than one JSON value")
	}
	return s, checkSteps(s.Steps, 0)
}

// checkSteps makes sure that the player can rely on the shape of a step. The
// bounds of a script are the host's business, which knows lines and columns.
func checkSteps(steps []Step, depth int) error {
	if depth > maxDepth {
		return fmt.Errorf("repeat nests deeper than %d", maxDepth)
	}
	for i, s := range steps {
		n := 0
		for _, set := range []bool{s.Say != "", s.Think != "", s.Run != "", s.Write != nil, s.Edit != nil, s.Call != nil,
			s.Ask != nil, s.Sleep > 0, s.Crash != nil, s.Flood != nil, s.Repeat != nil} {
			if set {
				n++
			}
		}
		if n != 1 {
			return fmt.Errorf("step %d has %d actions instead of one", i+1, n)
		}
		if s.Crash != nil && s.Crash.Signal != "" && s.Crash.Signal != "KILL" {
			return fmt.Errorf("step %d: signal %q is not KILL", i+1, s.Crash.Signal)
		}
		if s.Flood != nil && (s.Flood.Lines < 1 || s.Flood.Bytes < 1) {
			return fmt.Errorf("step %d: a flood needs lines and bytes above zero", i+1)
		}
		if s.Repeat != nil {
			if err := checkSteps(s.Repeat.Steps, depth+1); err != nil {
				return err
			}
		}
	}
	return nil
}
