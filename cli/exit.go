package cli

import (
	"context"
	"errors"
	"fmt"
)

// The exit codes of the command. exec passes the command's own code through, and
// uses the codes from 124 on for itself, as container tools do.
const (
	exitOK          = 0
	exitFailed      = 1   // the run ended with RUN_ERROR
	exitUsage       = 2   // a flag, an argument or a file that can't be used
	exitUnavailable = 3   // the sandbox could not be made or set up, or no server answers
	exitTimeout     = 124 // --timeout
	exitExec        = 125 // exec: the sandbox, not the command
	exitCannotRun   = 126 // exec: the command can't be executed
	exitNotFound    = 127 // exec: no such command
	exitInterrupted = 130 // Ctrl-C
)

// exitError carries an exit code. A nil Err prints nothing.
type exitError struct {
	Code int
	Err  error
}

func (e *exitError) Error() string {
	if e.Err == nil {
		return fmt.Sprintf("exit %d", e.Code)
	}
	return e.Err.Error()
}

func (e *exitError) Unwrap() error { return e.Err }

// usageError is a value that a person gave and that can't be used; Cure says
// what to give instead.
type usageError struct {
	Field string
	Value string
	Cure  string
}

// Code is the code of a RUN_ERROR.
func (e *usageError) Code() string { return "invalid_input" }

func (e *usageError) Error() string { return fmt.Sprintf("%s %q: %s", e.Field, e.Value, e.Cure) }

// codeOf is the exit code for an error that a command returned.
func codeOf(err error) int {
	var ex *exitError
	var us *usageError
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &ex):
		return ex.Code
	case errors.As(err, &us):
		return exitUsage
	case errors.Is(err, errTimeout), errors.Is(err, context.DeadlineExceeded):
		return exitTimeout
	case errors.Is(err, errInterrupted):
		return exitInterrupted
	default:
		return exitFailed
	}
}

// Causes of a context that the command ends by itself.
var (
	errTimeout     = errors.New("timeout")
	errInterrupted = errors.New("interrupted")
)
