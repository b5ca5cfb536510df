// Package config says what a program can be assembled from. Nothing registers
// itself: a main function puts the providers and harnesses it wants into a
// [Registry] value, so two programs can differ and tests can run side by side.
package config

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"

	"github.com/aisandbox-go/aisandbox/chat"
	"github.com/aisandbox-go/aisandbox/provider"
)

// Registry is what the command and the server offer, by name. A factory must not
// touch its backend: construction is free.
type Registry struct {
	Providers map[string]Provider
	Harnesses map[string]Harness

	// Auto is the order in which "auto" tries providers. The first whose Ping
	// succeeds is taken.
	Auto []string
}

// Provider is a backend on offer.
type Provider struct {
	// New makes the backend from its section: JSON whose keys are the fields of
	// the backend's Options. Unknown keys are a [*SectionError].
	New func(section json.RawMessage, logger *slog.Logger) (provider.Provider, error)

	// ReadOnly names the section's key that takes host paths to show read-only
	// inside, for backends on the host's files. Empty: there is none.
	ReadOnly string

	// Image and User name the section's keys for an image and for the user that
	// commands run as. Empty: there is none.
	Image, User string
}

// Harness is an agent on offer.
type Harness struct {
	// New makes the adapter from its section, as [Provider].New does.
	New func(section json.RawMessage) (chat.Adapter, error)

	// Find looks for the agent's program on this host. Nil: it needs none.
	Find func(ctx context.Context) (Program, error)

	// Model, Executable and Script name the section's keys for a model, for the
	// path of the program inside of the sandbox, and for the text of a script.
	// Empty: there is none.
	Model, Executable, Script string

	// About is a line for a person.
	About string
}

// Program is an agent's program on this host.
type Program struct {
	Path    string   // the executable, links resolved
	Version string   // as it reports itself; may be empty
	Mounts  []string // host paths that must be visible for Path to run
}

// SectionError says what is wrong in a section.
type SectionError struct {
	Section string // "provider docker"
	Err     error
}

func (e *SectionError) Error() string { return fmt.Sprintf("config: %s: %v", e.Section, e.Err) }

// Unwrap returns the cause.
func (e *SectionError) Unwrap() error { return e.Err }

// Decode decodes a section strictly into a struct. An empty section leaves the
// struct as it is.
func Decode(name string, section json.RawMessage, into any) error {
	if len(bytes.TrimSpace(section)) == 0 {
		return nil
	}
	dec := json.NewDecoder(bytes.NewReader(section))
	dec.DisallowUnknownFields()
	if err := dec.Decode(into); err != nil {
		return &SectionError{Section: name, Err: err}
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return &SectionError{Section: name, Err: errors.New("text after the object")}
	}
	return nil
}
