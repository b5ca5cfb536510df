package store

import (
	"encoding/json"
	"time"
)

// InstanceState is what is known of a sandbox.
type InstanceState string

// The states. Creating is written before the provider is called, so that a crash
// in between leaves a trace; an instance found so is never resumed. Lost means
// that the provider no longer knows it.
const (
	InstanceCreating   InstanceState = "creating"
	InstanceReady      InstanceState = "ready"
	InstanceDestroying InstanceState = "destroying"
	InstanceDestroyed  InstanceState = "destroyed"
	InstanceLost       InstanceState = "lost"
)

// Gone says that there is nothing left to destroy.
func (s InstanceState) Gone() bool { return s == InstanceDestroyed || s == InstanceLost }

// Desired is what shall become of a sandbox.
type Desired string

// The desired states; the empty one is DesiredReady.
const (
	DesiredReady     Desired = "ready"
	DesiredDestroyed Desired = "destroyed"
)

// Instance is a sandbox of one key and generation.
type Instance struct {
	Key      string
	Gen      int64 // from 1; 0 in a Put asks for the next one
	Provider string
	Ref      json.RawMessage // the provider's Ref, opaque to the store
	State    InstanceState
	Desired  Desired
	Tenant   string
	ThreadID string

	LatestRunID string
	SnapshotID  string

	CreatedAt  time.Time // set by the store
	LastUsedAt time.Time // set by the store
	SnapshotAt time.Time // set by the store
	KeepUntil  time.Time // zero: no end; reckon it from a time that the store told
	LastError  string    // of the last try to destroy it
	Attempts   int       // set by Due
}

// Usable says that the instance may be resumed.
func (i Instance) Usable() bool { return i.State == InstanceReady && i.Desired != DesiredDestroyed }

// InstanceQuery selects instances.
type InstanceQuery struct {
	Tenant     string
	AllTenants bool // for the system only: Tenant is not looked at
	Provider   string
	ThreadID   string
	State      []InstanceState
	After      string
	Limit      int // 0: 100; at most 1000
}

// ThreadQuery selects threads.
type ThreadQuery struct {
	Tenant     string
	AllTenants bool
	After      string
	Limit      int // 0: 100; at most 1000
}

// ThreadInfo is a thread in a list.
type ThreadInfo struct {
	Thread    Thread
	Messages  int
	UpdatedAt time.Time
}

// InterruptStatus is what became of an interrupt.
type InterruptStatus string

// The statuses of an interrupt. The wire writes "cancelled" with two l.
const (
	InterruptPending   InterruptStatus = "pending"
	InterruptResolved  InterruptStatus = "resolved"
	InterruptCancelled InterruptStatus = "cancelled"
)

// Interrupt is a question that a run ended with. Payload is its descriptor as
// it is on the wire.
type Interrupt struct {
	ID         string
	RunID      string
	Thread     Thread
	Payload    json.RawMessage
	Status     InterruptStatus // empty in a Put: pending
	Answer     json.RawMessage
	CreatedAt  time.Time // set by the store
	ResolvedAt time.Time // set by the store
}

// Resolution answers an interrupt.
type Resolution struct {
	RunID  string
	ID     string
	Status InterruptStatus // InterruptResolved or InterruptCancelled
	Answer json.RawMessage
}

// PageLimit is the number of items on a page that was asked for with limit.
// For implementations.
func PageLimit(limit int) int {
	switch {
	case limit <= 0:
		return 100
	case limit > 1000:
		return 1000
	}
	return limit
}
