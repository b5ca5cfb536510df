package store

import (
	"fmt"
	"time"
)

// ClaimOptions say who claims and how.
type ClaimOptions struct {
	Owner string        // the host; required
	TTL   time.Duration // 0: DefaultLease

	// Force takes a lease away from the same owner: a host that starts again
	// under its name need not wait for what it held before.
	Force bool

	// Reaper claims a run although its cancel is requested, in order to end it.
	Reaper bool
}

// Claim is the right to write one run, and the only way to do so. It is opaque
// and stays in the process: what it prints and marshals as never shows its
// nonce. Claims are made by [Runs.Claim].
type Claim struct{ d *ClaimData }

// ClaimData is what a claim consists of.
type ClaimData struct {
	RunID      string
	Epoch      uint64
	Owner      string
	Pos        Pos   // the watermark at the time of the claim
	LastSeq    int64 // number of events at the time of the claim
	Launch     Launch
	SandboxKey string
	SandboxGen int64
	Nonce      []byte // 32 random bytes of the run, made by Create
}

// NewClaim is for implementations of [Runs] alone.
func NewClaim(d ClaimData) Claim { return Claim{d: &d} }

func (c Claim) data() ClaimData {
	if c.d == nil {
		return ClaimData{Pos: NoPos}
	}
	return *c.d
}

// RunID is the run's id, empty for the zero Claim, which no store accepts.
func (c Claim) RunID() string { return c.data().RunID }

// Epoch is the fencing token.
func (c Claim) Epoch() uint64 { return c.data().Epoch }

// Owner is the host that claimed.
func (c Claim) Owner() string { return c.data().Owner }

// Pos is the watermark at the time of the claim: a replay of the journal stores
// nothing at or before it.
func (c Claim) Pos() Pos { return c.data().Pos }

// LastSeq is the number of events stored at the time of the claim.
func (c Claim) LastSeq() int64 { return c.data().LastSeq }

// Launch is how far the agent's start had come.
func (c Claim) Launch() Launch { return c.data().Launch }

// Sandbox is the instance that the run was bound to.
func (c Claim) Sandbox() (key string, gen int64) { return c.data().SandboxKey, c.data().SandboxGen }

// Nonce is the run's secret, a copy. It goes to the program that signs the exit
// and nowhere else (spec 04 §21.8).
func (c Claim) Nonce() []byte { return append([]byte(nil), c.data().Nonce...) }

// Ref is the claim's name, for Renew.
func (c Claim) Ref() ClaimRef { return ClaimRef{RunID: c.RunID(), Epoch: c.Epoch()} }

// Format prints the claim's name, whatever the verb.
func (c Claim) Format(f fmt.State, _ rune) {
	fmt.Fprintf(f, "claim %q epoch %d", c.RunID(), c.Epoch())
}

// MarshalText writes what Format does, so that a claim inside of something that
// is marshalled gives nothing away.
func (c Claim) MarshalText() ([]byte, error) { return fmt.Appendf(nil, "%v", c), nil }

// ClaimRef names a claim without giving the right to write.
type ClaimRef struct {
	RunID string
	Epoch uint64
}
