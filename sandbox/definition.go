// Package sandbox makes sandboxes out of definitions and drives them.
//
// [Define] checks and freezes a [Definition]; it touches no provider. [Ensure]
// finds, restores or makes the sandbox that belongs to a key. The [*Sandbox] it
// returns is the portable type that everything above works with: backends differ
// in what they can do, and it says so with [*provider.UnsupportedError].
package sandbox

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/aisandbox-go/aisandbox/policy"
	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/workspace"
)

// Definition describes a kind of sandbox. It is a plain value for [Define].
type Definition struct {
	// ID names the definition; it is part of the instance key. Required.
	ID string

	// Provider makes the sandboxes. Required.
	Provider provider.Provider

	Workspace workspace.Workspace
	Lifecycle Lifecycle
	Hooks     Hooks

	// Policy is what the agent may do; nil is a policy without rules. It does not
	// judge the set-up steps: those are the author's (spec 01 §9).
	Policy *policy.Policy

	// Network is what the sandbox can reach. Empty is the provider's default.
	Network provider.Network

	// FileEvents says what is reported while an agent works.
	FileEvents FileEvents
}

// Lifecycle says how long a sandbox lives. The zero value keeps one sandbox per
// thread.
type Lifecycle struct {
	Reuse      Reuse
	Snapshot   Snapshots
	OnComplete OnComplete

	// SnapshotMaxAge is the age from which a sandbox and its snapshot are made
	// anew instead of resumed, counted from when the sandbox was set up. 0 is never.
	SnapshotMaxAge time.Duration
}

// Reuse says which runs share a sandbox.
type Reuse string

// The ways to share. Empty is PerThread.
const (
	PerThread Reuse = "thread"
	PerRun    Reuse = "run"
)

// Snapshots says when the provider's snapshot is taken.
type Snapshots string

// The times. Empty is AfterSetup where the provider has snapshots, else NoSnapshot.
const (
	AfterSetup Snapshots = "after-setup"
	NoSnapshot Snapshots = "none"
)

// OnComplete says what becomes of the sandbox at the end of a run.
type OnComplete string

// The ends. Empty is Keep for [PerThread] and Destroy for [PerRun].
const (
	Keep    OnComplete = "keep"
	Destroy OnComplete = "destroy"
)

// FileEvents says what is reported of the files that an agent changes.
type FileEvents string

// The modes. Empty is FileEventsOn.
const (
	FileEventsOn   FileEvents = "on"
	FileEventsDiff FileEvents = "diff" // and a diff of each
	FileEventsOff  FileEvents = "off"  // no watcher
)

// Def is a checked definition. It is immutable and may be used concurrently.
type Def struct {
	d     Definition
	hash  string // of the workspace
	print string // the provider's fingerprint
	locks *keyedMutex
	users users
}

// DefinitionError says which field of a definition can't be used, and what to do.
type DefinitionError struct {
	Field string
	Value string
	Cure  string
}

func (e *DefinitionError) Error() string {
	return fmt.Sprintf("sandbox: definition: %s = %q: %s", e.Field, e.Value, e.Cure)
}

// ErrDefinition is what every [DefinitionError] is.
var ErrDefinition = errors.New("sandbox: invalid definition")

// Is makes the error [ErrDefinition].
func (e *DefinitionError) Is(target error) bool { return target == ErrDefinition }

// Define checks d and freezes it. It returns every fault, joined: each a
// [*DefinitionError] or a [*workspace.FieldError]. It makes paths of the host
// absolute, and touches no provider.
func Define(d Definition) (*Def, error) {
	var errs []error
	fail := func(field, value, cure string) {
		errs = append(errs, &DefinitionError{field, value, cure})
	}
	if d.ID == "" || strings.ContainsAny(d.ID, "\x00\n\r") {
		fail("id", d.ID, "name the definition, in one line")
	}
	if d.Provider == nil {
		fail("provider", "", "set a provider, such as bwrap.New(bwrap.Options{})")
	} else if n := d.Provider.Traits().Networks; d.Network != "" && !slices.Contains(n, d.Network) {
		fail("network", string(d.Network), fmt.Sprintf("provider %q enforces %q only; use one of these, or another provider", d.Provider.Name(), n))
	}
	switch d.Lifecycle.Reuse {
	case "", PerThread, PerRun:
	default:
		fail("lifecycle.reuse", string(d.Lifecycle.Reuse), `use "thread" or "run"`)
	}
	switch d.Lifecycle.Snapshot {
	case "", AfterSetup, NoSnapshot:
	default:
		fail("lifecycle.snapshot", string(d.Lifecycle.Snapshot), `use "after-setup" or "none"`)
	}
	switch d.Lifecycle.OnComplete {
	case "", Keep, Destroy:
	default:
		fail("lifecycle.onComplete", string(d.Lifecycle.OnComplete), `use "keep" or "destroy"`)
	}
	if a := d.Lifecycle.SnapshotMaxAge; a < 0 {
		fail("lifecycle.snapshotMaxAge", a.String(), "must not be negative; 0 is never")
	}
	switch d.FileEvents {
	case "", FileEventsOn, FileEventsDiff, FileEventsOff:
	default:
		fail("fileEvents", string(d.FileEvents), `use "on", "diff" or "off"`)
	}
	if d.Policy != nil {
		if err := d.Policy.Validate(); err != nil {
			errs = append(errs, err)
		}
		p := *d.Policy
		d.Policy = &p
	}
	if err := d.Workspace.Validate(); err != nil {
		errs = append(errs, err)
	} else if w, err := absolute(d.Workspace); err != nil {
		errs = append(errs, err)
	} else {
		d.Workspace = w
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	d.Lifecycle.Reuse = cmp.Or(d.Lifecycle.Reuse, PerThread)
	d.FileEvents = cmp.Or(d.FileEvents, FileEventsOn)
	if d.Lifecycle.OnComplete == "" {
		d.Lifecycle.OnComplete = Keep
		if d.Lifecycle.Reuse == PerRun {
			d.Lifecycle.OnComplete = Destroy // else each run leaves one behind
		}
	}
	def := &Def{d: d, hash: d.Workspace.Hash(), locks: newKeyedMutex()}
	if f, ok := provider.As[provider.Fingerprinter](d.Provider); ok {
		def.print = f.Fingerprint()
	}
	return def, nil
}

// absolute makes the host paths of a workspace independent of the working
// directory, since they are part of the key.
func absolute(w workspace.Workspace) (workspace.Workspace, error) {
	abs := func(p string) (string, error) {
		a, err := filepath.Abs(p)
		if err != nil {
			return "", &workspace.FieldError{Field: "source.path", Value: p, Cure: "use an absolute path: " + err.Error()}
		}
		return a, nil
	}
	var err error
	switch s := w.Source.(type) {
	case workspace.Local:
		s.Path, err = abs(s.Path)
		w.Source = s
	case workspace.Git:
		if p, ok := s.HostPath(); ok {
			s.URL, err = abs(p)
			w.Source = s
		}
	}
	return w, err
}

// ID returns the definition's name.
func (d *Def) ID() string { return d.d.ID }

// Definition returns a copy of what was defined, with defaults applied.
func (d *Def) Definition() Definition { return d.d }

// Provider returns the definition's provider.
func (d *Def) Provider() provider.Provider { return d.d.Provider }

// Root returns the virtual root of its sandboxes.
func (d *Def) Root() string { return d.d.Workspace.RootOrDefault() }

// Key names the sandbox that is wanted. Tenants, and users of a tenant, never
// share one.
type Key struct {
	ThreadID string
	RunID    string // part of the key for [PerRun] only
	Tenant   string
	UserID   string
}

// keyVersion is part of every key. It changes with the encoding below.
const keyVersion = "aisandbox-key-1"

// InstanceKey returns the key of the sandbox for k: 36 characters [0-9a-f] of a
// SHA-256 over the thread, the definition, the provider with its options, the
// network, the workspace and the tenant (spec 01 §10). It is pure.
func (d *Def) InstanceKey(k Key) string {
	h := sha256.New()
	field := func(s string) {
		var n [8]byte
		binary.BigEndian.PutUint64(n[:], uint64(len(s)))
		h.Write(n[:])
		h.Write([]byte(s))
	}
	run := ""
	if d.d.Lifecycle.Reuse == PerRun {
		run = "run:" + k.RunID
	}
	for _, s := range []string{
		keyVersion, k.ThreadID, run, d.d.ID, d.d.Provider.Name(), d.print,
		string(d.d.Network), d.hash, k.Tenant, k.UserID,
	} {
		field(s)
	}
	return hex.EncodeToString(h.Sum(nil)[:18])
}

// ParseAge reads a duration as Go writes it, or a whole number of days ("7d") or
// weeks ("2w"). Anything else, and what is negative, is a [*DefinitionError].
func ParseAge(s string) (time.Duration, error) {
	bad := &DefinitionError{"lifecycle.snapshotMaxAge", s, "use a duration such as 90s, 45m, 12h, 7d or 2w"}
	for unit, d := range map[string]time.Duration{"d": 24 * time.Hour, "w": 7 * 24 * time.Hour} {
		if n, ok := strings.CutSuffix(s, unit); ok {
			v, err := strconv.ParseUint(n, 10, 16)
			if err != nil || n[0] == '+' {
				return 0, bad
			}
			return time.Duration(v) * d, nil
		}
	}
	v, err := time.ParseDuration(s)
	if err != nil || v < 0 {
		return 0, bad
	}
	return v, nil
}
