package store

import (
	"errors"
	"fmt"

	"github.com/aisandbox-go/aisandbox/event"
)

// The states that callers branch on. The types below add fields and match one of
// these with errors.Is. Every one has a Code that is stable and goes to clients.
var (
	// ErrNotFound: no such run, instance, thread or interrupt.
	ErrNotFound error = &sentinel{"not_found", "not found"}

	// ErrConflict: the state that the call supposes isn't there. Nothing was written.
	ErrConflict error = &sentinel{"conflict", "conflict"}

	// ErrFenced: a newer claim or lease exists. Stop, and touch nothing.
	ErrFenced error = &sentinel{"claim_lost", "a newer claim exists"}

	// ErrSealed: the run has ended, so that nothing can be written.
	ErrSealed error = &sentinel{"log_closed", "the run has ended"}

	// ErrUnavailable: the store can't be reached now. Trying again is right; for
	// Append and Finish with the same batch number.
	ErrUnavailable error = &sentinel{"store_unavailable", "the store can't be reached"}
)

type sentinel struct{ code, text string }

func (s *sentinel) Error() string { return "store: " + s.text }

// Code is the stable code.
func (s *sentinel) Code() string { return s.code }

// Code returns the stable code of the first error in err's chain that has one,
// and otherwise fallback.
func Code(err error, fallback string) string {
	var c interface{ Code() string }
	if errors.As(err, &c) {
		return c.Code()
	}
	return fallback
}

// InvalidError is an argument that no store accepts.
type InvalidError struct {
	Field  string
	Reason string // what is wrong and what to do about it
}

func (e *InvalidError) Error() string { return "store: " + e.Field + ": " + e.Reason }

// Code is "invalid".
func (e *InvalidError) Code() string { return "invalid" }

// NotFoundError names what isn't there.
type NotFoundError struct{ What, ID string }

func (e *NotFoundError) Error() string { return fmt.Sprintf("store: %s %q: not found", e.What, e.ID) }

// Is matches ErrNotFound.
func (e *NotFoundError) Is(target error) bool { return target == ErrNotFound }

// Code is "not_found".
func (e *NotFoundError) Code() string { return "not_found" }

// BusyError: the thread has a running run, and its queue is full.
type BusyError struct {
	Thread Thread
	RunID  string // the oldest running one
}

func (e *BusyError) Error() string {
	return fmt.Sprintf("store: thread %q is busy with run %q", e.Thread.ID, e.RunID)
}

// Is matches ErrConflict.
func (e *BusyError) Is(target error) bool { return target == ErrConflict }

// Code is "thread_busy".
func (e *BusyError) Code() string { return "thread_busy" }

// RunConflictError: the run id belongs to another thread or tenant.
type RunConflictError struct{ RunID string }

func (e *RunConflictError) Error() string {
	return fmt.Sprintf("store: run %q belongs to another thread", e.RunID)
}

// Is matches ErrConflict.
func (e *RunConflictError) Is(target error) bool { return target == ErrConflict }

// Code is "run_conflict".
func (e *RunConflictError) Code() string { return "run_conflict" }

// ClaimReason is why a claim was refused.
type ClaimReason string

// The reasons, in the order in which they are found.
const (
	ClaimUnknown  ClaimReason = "unknown"   // no such run; also ErrNotFound
	ClaimTerminal ClaimReason = "terminal"  // the run has ended; also ErrSealed
	ClaimHeld     ClaimReason = "held"      // another lease lives
	ClaimCanceled ClaimReason = "cancelled" // its cancel is requested: only a reaper claims it
)

// ClaimError: the run can't be claimed now.
type ClaimError struct {
	RunID  string
	Reason ClaimReason
	Owner  string // of the lease, for ClaimHeld
}

func (e *ClaimError) Error() string {
	s := fmt.Sprintf("store: claim run %q: %s", e.RunID, e.Reason)
	if e.Owner != "" {
		s += fmt.Sprintf(" by %q", e.Owner)
	}
	return s
}

// Is matches ErrConflict, and what the reason stands for.
func (e *ClaimError) Is(target error) bool {
	return target == ErrConflict ||
		target == ErrNotFound && e.Reason == ClaimUnknown ||
		target == ErrSealed && e.Reason == ClaimTerminal
}

// Code is "claim_not_acquired".
func (e *ClaimError) Code() string { return "claim_not_acquired" }

// FencedError: somebody claimed after the claim at hand.
type FencedError struct {
	RunID          string
	Held, Observed uint64 // epochs
}

func (e *FencedError) Error() string {
	return fmt.Sprintf("store: run %q: claim of epoch %d lost to epoch %d", e.RunID, e.Held, e.Observed)
}

// Is matches ErrFenced.
func (e *FencedError) Is(target error) bool { return target == ErrFenced }

// Code is "claim_lost".
func (e *FencedError) Code() string { return "claim_lost" }

// SealedError: the run has ended with Status.
type SealedError struct {
	RunID  string
	Status Status
}

func (e *SealedError) Error() string {
	return fmt.Sprintf("store: run %q has ended: %s", e.RunID, e.Status)
}

// Is matches ErrSealed.
func (e *SealedError) Is(target error) bool { return target == ErrSealed }

// Code is "log_closed".
func (e *SealedError) Code() string { return "log_closed" }

// BatchError: the batch number isn't the next one, nor the last.
type BatchError struct {
	RunID    string
	Last, No uint64
}

func (e *BatchError) Error() string {
	return fmt.Sprintf("store: run %q: batch %d after batch %d", e.RunID, e.No, e.Last)
}

// Is matches ErrConflict.
func (e *BatchError) Is(target error) bool { return target == ErrConflict }

// Code is "batch_out_of_order".
func (e *BatchError) Code() string { return "batch_out_of_order" }

// WatermarkError: a position isn't after the one stored last.
type WatermarkError struct {
	RunID     string
	Mark, Got Pos
}

func (e *WatermarkError) Error() string {
	return fmt.Sprintf("store: run %q: position %d:%d is not after %d:%d, which is stored already",
		e.RunID, e.Got.Off, e.Got.Idx, e.Mark.Off, e.Mark.Idx)
}

// Is matches ErrConflict.
func (e *WatermarkError) Is(target error) bool { return target == ErrConflict }

// Code is "replay_diverged".
func (e *WatermarkError) Code() string { return "replay_diverged" }

// OffsetReason is what is wrong with an offset. It is the error's code.
type OffsetReason string

// The reasons.
const (
	OffsetInvalid     OffsetReason = "offset_invalid"      // not an offset of this store
	OffsetRunMismatch OffsetReason = "offset_run_mismatch" // of another run
	OffsetRewound     OffsetReason = "log_rewound"         // beyond what is stored: the log lost its end
	OffsetExpired     OffsetReason = "log_expired"         // the log aged out
)

// OffsetError: a read can't start there.
type OffsetError struct {
	RunID  string
	Offset event.Offset
	Reason OffsetReason
}

func (e *OffsetError) Error() string {
	return fmt.Sprintf("store: read run %q after %q: %s", e.RunID, e.Offset, e.Reason)
}

// Code is the reason.
func (e *OffsetError) Code() string { return string(e.Reason) }

// InstanceError: the instance's state doesn't allow the call.
type InstanceError struct {
	Key    string
	Gen    int64
	Reason string
}

func (e *InstanceError) Error() string {
	return fmt.Sprintf("store: instance %q generation %d: %s", e.Key, e.Gen, e.Reason)
}

// Is matches ErrConflict.
func (e *InstanceError) Is(target error) bool { return target == ErrConflict }

// Code is "instance_conflict".
func (e *InstanceError) Code() string { return "instance_conflict" }

// HeldError: the lease is somebody's.
type HeldError struct{ Key, Owner string }

func (e *HeldError) Error() string {
	return fmt.Sprintf("store: lease %q is held by %q", e.Key, e.Owner)
}

// Is matches ErrConflict.
func (e *HeldError) Is(target error) bool { return target == ErrConflict }

// Code is "lease_held".
func (e *HeldError) Code() string { return "lease_held" }

// LeaseLostError: the lease was taken by somebody else, or given back.
type LeaseLostError struct {
	Key  string
	Held uint64 // epoch
}

func (e *LeaseLostError) Error() string {
	return fmt.Sprintf("store: lease %q of epoch %d is lost", e.Key, e.Held)
}

// Is matches ErrFenced.
func (e *LeaseLostError) Is(target error) bool { return target == ErrFenced }

// Code is "claim_lost".
func (e *LeaseLostError) Code() string { return "claim_lost" }

// InterruptError: the interrupt was answered already, or twice in one call.
type InterruptError struct {
	ID     string
	Status InterruptStatus
}

func (e *InterruptError) Error() string {
	return fmt.Sprintf("store: interrupt %q is %s, or answered twice", e.ID, e.Status)
}

// Is matches ErrConflict.
func (e *InterruptError) Is(target error) bool { return target == ErrConflict }

// Code is "conflict".
func (e *InterruptError) Code() string { return "conflict" }

// UnavailableError: the store can't do its work now, and why. Nothing is known of
// the call's outcome unless its contract says so.
type UnavailableError struct {
	What string // what is wrong, in a few words
	Cure string // what helps; empty: trying again
	Err  error
}

func (e *UnavailableError) Error() string {
	s := "store: " + e.What
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	if e.Cure != "" {
		s += ": " + e.Cure
	}
	return s
}

// Is matches ErrUnavailable.
func (e *UnavailableError) Is(target error) bool { return target == ErrUnavailable }

// Unwrap is the error of the database.
func (e *UnavailableError) Unwrap() error { return e.Err }

// Code is "store_unavailable".
func (e *UnavailableError) Code() string { return "store_unavailable" }
