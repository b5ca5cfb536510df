package provider

import (
	"errors"
	"fmt"
	"strings"
)

// States of a backend that callers branch on. Backends wrap them.
var (
	ErrNotFound            error = &state{"sandbox_not_found", "sandbox not found"}     // gone for good
	ErrUnavailable         error = &state{"backend_unavailable", "backend unavailable"} // can't be asked now; says nothing about the sandbox
	ErrConflict            error = &state{"sandbox_conflict", "sandbox name is taken"}  // by something that is not ours
	ErrInvalid             error = &state{"invalid_input", "invalid argument"}
	ErrNoSpace             error = &state{"no_space", "no space left"}
	ErrImageNotFound       error = &state{"image_not_found", "image not found"}
	ErrAlreadyLaunched     error = &state{"already_launched", "already launched"}
	ErrUnsupportedPlatform       = fmt.Errorf("platform: %w", errors.ErrUnsupported)
)

type state struct{ code, text string }

func (s *state) Error() string { return s.text }

// Code is stable; it is the code of a RUN_ERROR.
func (s *state) Code() string { return s.code }

// UnsupportedError says that a backend lacks an optional capability. It is
// errors.ErrUnsupported.
type UnsupportedError struct {
	Provider   string
	Capability string
	Hint       string // the cure; may be empty
}

func (e *UnsupportedError) Error() string {
	s := fmt.Sprintf("sandbox provider %q does not support the %q capability", e.Provider, e.Capability)
	if e.Hint != "" {
		s += ": " + e.Hint
	}
	return s
}

// Code is "unsupported".
func (e *UnsupportedError) Code() string { return "unsupported" }

// Is makes the error errors.ErrUnsupported.
func (e *UnsupportedError) Is(target error) bool { return target == errors.ErrUnsupported }

// OptionError says that an option of a backend can't be used, and what to do.
type OptionError struct {
	Provider string
	Option   string
	Value    string
	Cure     string
}

func (e *OptionError) Error() string {
	return fmt.Sprintf("%s: option %s = %q: %s", e.Provider, e.Option, e.Value, e.Cure)
}

// Code is "invalid_input".
func (e *OptionError) Code() string { return "invalid_input" }

// Is makes the error [ErrInvalid].
func (e *OptionError) Is(target error) bool { return target == ErrInvalid }

// ExitError is a command that ended badly where success was needed.
type ExitError struct {
	Argv       []string
	Exit       Exit
	StderrTail string // already redacted, at most 4 KiB
}

func (e *ExitError) Error() string {
	name := "command"
	if len(e.Argv) > 0 {
		name = e.Argv[0]
	}
	s := fmt.Sprintf("%s: %v", name, e.Exit)
	if t := strings.TrimSpace(e.StderrTail); t != "" {
		s += ": " + t
	}
	return s
}
