// Package store holds the contracts of everything that outlives a process: runs
// and their event logs, sandboxes, conversations, interrupts and leases.
//
// Two ideas carry it (spec 04 §21.1). The log is the fence: whoever writes a
// run's log holds a [Claim], and a write counts only while that claim is the
// newest one, which the store checks in the transaction that writes. And one
// transaction ends a run: last events, status, transcript and what becomes of
// the sandbox are one [Log.Finish].
//
// Rules for every implementation, checked by package storetest:
//   - All methods may be called concurrently.
//   - A context that is done is honoured at once: its cause is returned, and an
//     answer that says "failed" although the write happened is allowed only where
//     repeating the call is safe.
//   - Time is the store's own (of the database). Times in records are told by the
//     store and never compared with a host's clock.
//   - What was returned belongs to the caller; what was passed is not kept beyond
//     the call unless it is immutable by contract, as events and JSON are.
//   - Not being found is [ErrNotFound] for one thing asked by name and an empty
//     result for a list.
package store

import (
	"context"
	"iter"
	"time"

	"github.com/aisandbox-go/aisandbox/event"
)

// Set is what a backend offers, one field for each contract; a nil field is not
// offered. It is a struct because the contracts share method names.
//
// Runs and Log of one Set are one transaction domain. Where Instances, Messages
// and Interrupts come from the same Set they belong to it too.
type Set struct {
	Runs       Runs
	Log        Log
	Instances  Instances
	Messages   Messages
	Interrupts Interrupts
	Leases     Leaser
}

// DefaultLease is how long a claim lasts without being renewed (spec 04 §21.7).
// Renew after a third of it.
const DefaultLease = 15 * time.Second

// Runs are the run records.
type Runs interface {
	// Create inserts a record if the run id is new. An existing record is returned
	// unchanged with created false, whatever else the input says; callers compare
	// thread and tenant. With NewRun.Exclusive a new run of a thread that has a
	// running one (or more of them than NewRun.Queue) is refused with a
	// [*BusyError], decided in the transaction that inserts.
	Create(ctx context.Context, n NewRun) (r Run, created bool, err error)

	// Claim makes the caller the run's only writer: epoch+1, batch numbers start
	// again at 1. Refused with a [*ClaimError].
	Claim(ctx context.Context, runID string, o ClaimOptions) (Claim, error)

	// Renew prolongs the leases of claims; a lease that expired but that nobody
	// else took revives. It returns the ids of runs that are no longer this
	// claim's (lost: stop at once) and of those for which a cancel is requested.
	Renew(ctx context.Context, refs []ClaimRef, ttl time.Duration) (lost, canceled []string, err error)

	// Release ends the lease so that another host can claim at once. Releasing a
	// claim that was lost, or whose run has ended, does nothing. The epoch stays:
	// until somebody else claims, the claim can still write.
	Release(ctx context.Context, c Claim) error

	// RequestCancel records that somebody wants the run ended. It writes no
	// status: the driver, or the reaper, ends the run. The first reason stays. An
	// unknown run, or one that has ended, is no error.
	RequestCancel(ctx context.Context, runID, reason string) error

	// WaitCancel blocks until a cancel is requested and returns its reason, or
	// until the run has ended, which is ErrSealed. It is how a driver hears of a
	// cancel in milliseconds; Renew is how it hears at the latest.
	WaitCancel(ctx context.Context, runID string) (reason string, err error)

	// Touch says that somebody watches these runs now. Unknown ids are ignored.
	Touch(ctx context.Context, runIDs []string) error

	// Due takes up to limit running runs that nobody drives and whose time has
	// come, cancelled ones first. Taking pushes a run into the future, so that
	// hosts never collide and none starves (spec 04 §21.10). Host is for the
	// record only.
	Due(ctx context.Context, host string, limit int) ([]Work, error)

	// Get returns the record.
	Get(ctx context.Context, runID string) (Run, error)

	// FindActive returns the running run of a thread that started last.
	FindActive(ctx context.Context, t Thread) (Run, error)

	// List returns a page of runs, oldest first. Next is the Query.After of the
	// next page, empty at the end.
	List(ctx context.Context, q Query) (runs []Run, next string, err error)

	// Update changes what a driver learns on the way. Refused like an append.
	// Binding a run to an instance that is to be destroyed is ErrConflict.
	Update(ctx context.Context, c Claim, p RunPatch) error
}

// Log is the event log of each run.
type Log interface {
	// Append adds a batch and returns one offset for each event. The batch is
	// durable when Append returns.
	//
	// Numbers of batches start at 1 after each claim and have no gap. Repeating the last
	// number is how an unclear outcome is resolved: what was committed already is
	// not written again, and its offsets are returned. Refused, in this order,
	// with ErrNotFound (no such run), a [*FencedError] (a newer claim exists),
	// a [*SealedError] (the run has ended), a [*BatchError] (number out of order),
	// a [*WatermarkError] (a source position at or before one that is stored).
	Append(ctx context.Context, c Claim, b Batch) ([]event.Offset, error)

	// Finish ends the run: the last batch, the status and everything else in f in
	// one transaction, or nothing. Refused like Append. Repeated with the claim
	// that ended the run it returns the record again.
	Finish(ctx context.Context, c Claim, f Final) (Run, error)

	// Read yields what is stored after an offset and then what comes, until the
	// run has ended and everything was yielded. A terminal event doesn't end it:
	// only Finish does. [event.FromStart] (also as "-1") starts at the beginning and
	// [event.OnlyNew] at the end. Errors: ErrNotFound, an [*OffsetError], the
	// cause of a done context, ErrUnavailable. Each call is a read of its own and
	// a slow reader slows nobody.
	Read(ctx context.Context, runID string, after event.Offset) iter.Seq2[event.Entry, error]

	// Snapshot returns what is stored now, in order. It never waits, and an
	// unknown run has nothing.
	Snapshot(ctx context.Context, runID string) ([]Stored, error)
}

// Instances are the sandboxes that exist, or once existed (spec 04 §21.11). A key
// has generations: a sandbox that is gone, or to be destroyed, is never revived
// but followed by a new generation.
type Instances interface {
	// Get returns the newest generation of a key, whatever its state.
	Get(ctx context.Context, key string) (Instance, error)

	// Put with Gen 0 inserts the key's next generation; where the newest one is
	// neither destroyed, lost, nor to be destroyed this is a [*InstanceError]. With another Gen it replaces
	// the whole row: an empty field clears. It never turns Desired back from
	// destroyed (a [*InstanceError]). The row is returned as stored.
	//
	// The store sets CreatedAt at the insert, LastUsedAt at each Put and
	// SnapshotAt when SnapshotID changes.
	Put(ctx context.Context, i Instance) (Instance, error)

	// Retire asks for the sandbox to be destroyed: Desired becomes destroyed, in
	// one transaction with the check that no running run is bound to it, except
	// those whose cancel is requested. Otherwise it is a [*InstanceError]. The
	// janitor takes it from there. A missing row is ErrNotFound.
	Retire(ctx context.Context, key string, gen int64) error

	// Delete forgets a row. A missing one is no error.
	Delete(ctx context.Context, key string, gen int64) error

	// List returns a page of instances in the order of key and generation.
	List(ctx context.Context, q InstanceQuery) (is []Instance, next string, err error)

	// Due takes up to limit instances that wait for the janitor: to be destroyed
	// and not yet so, or kept until a time that has passed. Taking pushes the next
	// try into the future: 5 s, doubled each time, up to a minute.
	Due(ctx context.Context, limit int) ([]Instance, error)
}

// Messages are conversations, saved whole.
type Messages interface {
	// Load returns the thread's messages; a thread that nobody saved has none.
	Load(ctx context.Context, t Thread) ([]event.Message, error)

	// Save replaces the thread's messages.
	Save(ctx context.Context, t Thread, msgs []event.Message) error

	// Threads returns a page of threads in the order of their ids.
	Threads(ctx context.Context, q ThreadQuery) (ts []ThreadInfo, next string, err error)
}

// Interrupts are the questions that a run ended with (spec 07 §9.3).
type Interrupts interface {
	// Pending returns what a thread waits for, oldest first.
	Pending(ctx context.Context, t Thread) ([]Interrupt, error)

	// Put adds interrupts. An existing one of the same run and id stays as it is.
	Put(ctx context.Context, is []Interrupt) error

	// Resolve answers interrupts, all of them or none: each one must be pending,
	// otherwise it is ErrNotFound or ErrConflict.
	Resolve(ctx context.Context, t Thread, rs []Resolution) error
}

// Leaser grants exclusive leases on names. A lease has an epoch that grows with
// every grant, so that what it protects can refuse a deposed holder.
type Leaser interface {
	// Acquire grants a free or expired key; one that is held, by whomever, is a
	// [*HeldError] at once. To wait for it use [Hold].
	Acquire(ctx context.Context, key, owner string, ttl time.Duration) (Lease, error)

	// Renew prolongs a lease. One that expired but that nobody took revives; one
	// that was taken or released is ErrFenced.
	Renew(ctx context.Context, l Lease, ttl time.Duration) (Lease, error)

	// Release frees the key. Releasing what is no longer held does nothing.
	Release(ctx context.Context, l Lease) error
}

// Lease is a granted lease. Epoch is the fencing token.
type Lease struct {
	Key, Owner string
	Epoch      uint64
	Expires    time.Time // the store's clock
}
