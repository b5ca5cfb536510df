package modeltest

import (
	"fmt"
	"strings"
)

// ScriptError is a mistake in a script.
type ScriptError struct {
	// Script is the name of the script.
	Script string
	// Line and Column are 1-based; 0 when the script did not come from a file.
	Line, Column int
	// Field is the path of the wrong value, such as turns[0].status; empty for
	// the document as a whole.
	Field string
	// Problem says what is wrong, Cure what to write instead.
	Problem, Cure string
}

func (e *ScriptError) Error() string {
	var b strings.Builder
	b.WriteString("modeltest: ")
	if e.Script != "" {
		b.WriteString(e.Script)
	} else {
		b.WriteString("script")
	}
	if e.Line > 0 {
		fmt.Fprintf(&b, ":%d:%d", e.Line, e.Column)
	}
	if e.Field != "" {
		b.WriteString(": " + e.Field)
	}
	b.WriteString(": " + e.Problem)
	if e.Cure != "" {
		b.WriteString(" (" + e.Cure + ")")
	}
	return b.String()
}

// AddrError is the refusal to listen on an address.
type AddrError struct {
	Addr, Problem, Cure string
}

func (e *AddrError) Error() string {
	return fmt.Sprintf("modeltest: listen on %q: %s (%s)", e.Addr, e.Problem, e.Cure)
}
