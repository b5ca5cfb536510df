// Package failpoint names places between two durable steps, so that tests can
// stop or pause a host exactly there (spec 04 §24.2). The program that ships is
// the one that is tested: a place costs one atomic load while nothing is armed.
//
// It is the one package with global state; only tests arm anything.
package failpoint

import (
	"sync"
	"sync/atomic"
)

// The places, in the order in which a durable run passes them. The letters are
// rows of the crash matrix, spec 04 §23.
const (
	RunCreated      = "run.created"      // H2: the record is there, nobody claimed it
	RunClaimed      = "run.claimed"      // claimed, the log is empty
	RunAccepted     = "run.accepted"     // H2: the log is open, nothing is set up
	SandboxBound    = "sandbox.bound"    // the sandbox is ready and the run knows it
	LaunchRecorded  = "launch.recorded"  // H5: launching is committed, the spawn not sent
	LaunchSent      = "launch.sent"      // H6: the agent runs, launched is not committed
	LaunchConfirmed = "launch.confirmed" // launched is committed, nothing was read
	RecordRead      = "record.read"      // H7: a record was read, nothing of it appended
	BeforeAppend    = "append.before"    // H8
	AfterAppend     = "append.after"     // H9: committed, nobody knows
	ExitRead        = "exit.read"        // H10: the exit is verified, the run not finished
	BeforeFinish    = "finish.before"    // H11
	AfterFinish     = "finish.after"     // H12, H13: finished, nothing is cleaned up

	ReapTaken       = "reap.taken"        // H17: the run was given out, nothing was done
	ReapClaimed     = "reap.claimed"      // H17: a run that ends without a driver is claimed
	RetireRecorded  = "janitor.retired"   // H17: the sandbox is to be destroyed, the provider not asked
	DestroyAnswered = "janitor.destroyed" // H17: it is gone, its record doesn't say so

	Renew = "claim.renew" // a renewal is about to be sent: so that a test can keep a whole host asleep
)

// Points are the places that a run passes.
var Points = []string{
	RunCreated, RunClaimed, RunAccepted, SandboxBound, LaunchRecorded, LaunchSent, LaunchConfirmed,
	RecordRead, BeforeAppend, AfterAppend, ExitRead, BeforeFinish, AfterFinish,
}

var (
	armed atomic.Pointer[func(point, host string)]
	arm   sync.Mutex
)

// Hit says that a host is at a place. While a test has armed the place Hit
// returns when the test lets it.
func Hit(point, host string) {
	if f := armed.Load(); f != nil {
		(*f)(point, host)
	}
}

// Arm calls f at every place until disarm is called. One test at a time: a second
// Arm waits. f must be safe for concurrent use.
func Arm(f func(point, host string)) (disarm func()) {
	arm.Lock()
	armed.Store(&f)
	return sync.OnceFunc(func() {
		armed.Store(nil)
		arm.Unlock()
	})
}
