// Package config says what a program can be assembled from. Nothing registers
// itself: a main function puts the providers and harnesses it wants into a
// [Registry] value, so two programs can differ and tests can run side by side.
package config

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"

	"github.com/aisandbox-go/aisandbox/chat"
	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/store"
)

// Registry is what the command and the server offer, by name. A factory must not
// touch its backend: construction is free.
type Registry struct {
	Providers map[string]Provider
	Harnesses map[string]Harness

	// Auto is the order in which "auto" tries providers. The first whose Ping
	// succeeds is taken.
	Auto []string

	// Stores open what a server keeps its runs in, by kind: "sqlite", whose
	// location is a path, and "postgres", whose location is a URL.
	Stores map[string]OpenStore
}

// OpenStore opens a store. The closer, which whoever opened it calls once at the
// end, is a [store.Retainer] too where the store has to be told to forget. The
// logger hears of what goes wrong in the background and may be nil.
type OpenStore func(ctx context.Context, location string, logger *slog.Logger) (store.Set, io.Closer, error)

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
