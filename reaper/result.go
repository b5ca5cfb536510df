package reaper

import (
	"sync"
	"time"

	"github.com/aisandbox-go/aisandbox/store"
)

// Outcome is what a sweep did with a run (spec 04 §13).
type Outcome string

// The outcomes. Only Producing, Unknown and NotClaimed have touched nothing.
const (
	Finalized     Outcome = "finalized"       // its agent had ended; the log and the conversation are complete now
	Died          Outcome = "died"            // its agent, or its sandbox, was gone; what there was is in the log
	Expired       Outcome = "expired"         // nobody watched it for too long
	Cancelled     Outcome = "cancelled"       // somebody had wanted its end
	NeverLaunched Outcome = "never-launched"  // no agent was started for it, nor will be
	Relaunched    Outcome = "relaunched"      // no agent had been started; one is now
	Adopted       Outcome = "adopted"         // its agent is at work, and is driven on here
	Producing     Outcome = "producing"       // its agent is at work, without a driver
	Unknown       Outcome = "unknown"         // nobody can tell; Entry.Error says why
	NotClaimed    Outcome = "not-claimed"     // somebody else has it, or has to take it: there is no room here
	Exceeded      Outcome = "budget-exceeded" // it made no progress; the next attempt goes on
	ReclaimFailed Outcome = "reclaim-failed"  // a sandbox that can't be destroyed, again and again
	Errored       Outcome = "failed"          // something else went wrong
)

// Outcomes are all outcomes.
var Outcomes = []Outcome{
	Finalized, Died, Expired, Cancelled, NeverLaunched, Relaunched, Adopted, Producing, Unknown, NotClaimed, Exceeded, ReclaimFailed, Errored,
}

// Entry is one run of a [Result].
type Entry struct {
	RunID   string       `json:"runId"`
	Outcome Outcome      `json:"outcome"`
	Status  store.Status `json:"status,omitempty"` // as recorded afterwards, where it has ended
	Error   string       `json:"error,omitempty"`
}

// Result is what a sweep did.
type Result struct {
	Considered int             `json:"considered"` // runs
	Probed     int             `json:"probed"`
	Outcomes   map[Outcome]int `json:"outcomes"` // has every key
	Runs       []Entry         `json:"runs"`
	Sandboxes  Sandboxes       `json:"sandboxes"`
	Retained   Retained        `json:"retained"`
}

// Sandboxes is what a sweep did with sandboxes.
type Sandboxes struct {
	Destroyed  int `json:"destroyed"`  // confirmed by the provider
	Failed     int `json:"failed"`     // the provider could not destroy it now
	InUse      int `json:"inUse"`      // a run works in it
	Foreign    int `json:"foreign"`    // of a provider that this host doesn't have
	Lost       int `json:"lost"`       // recorded as ready, and the provider doesn't know it
	Orphaned   int `json:"orphaned"`   // destroyed; no record named it
	Unfinished int `json:"unfinished"` // given up while it was being made
	Journals   int `json:"journals"`   // of runs that have ended, removed
	Forgotten  int `json:"forgotten"`  // records of what has long gone
}

// Retained is what was forgotten.
type Retained struct {
	Logs int64 `json:"logs"`
	Runs int64 `json:"runs"`
}

// Metrics is told what happens. Its methods may be called concurrently and must
// not block. The names are those of spec 04 §21.10.
type Metrics interface {
	// Reaped counts a run: aisbx_reap_total{outcome}.
	Reaped(Outcome)

	// Orphaned is how long a run that was taken had been without a driver:
	// aisbx_orphan_age_seconds.
	Orphaned(age time.Duration)

	// Instances is how many sandboxes there are, by state: aisbx_instances{state}.
	// States that are missing have none.
	Instances(map[store.InstanceState]int)

	// Alarm counts what a person should look at: aisbx_alarms_total{kind}, where
	// kind is "reclaim-failed" or the code of a run's error.
	Alarm(kind string)
}

type noMetrics struct{}

func (noMetrics) Reaped(Outcome)                        {}
func (noMetrics) Orphaned(time.Duration)                {}
func (noMetrics) Instances(map[store.InstanceState]int) {}
func (noMetrics) Alarm(string)                          {}

// collector gathers a Result from several goroutines.
type collector struct {
	mu      sync.Mutex
	metrics Metrics
	res     Result
}

func newCollector(m Metrics) *collector {
	c := &collector{metrics: m, res: Result{Outcomes: map[Outcome]int{}, Runs: []Entry{}}}
	for _, o := range Outcomes {
		c.res.Outcomes[o] = 0
	}
	return c
}

// run counts a run. The collector of a loop may be given one when its round is
// long over.
func (c *collector) run(e Entry) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.res.Outcomes[e.Outcome]++
	c.res.Runs = append(c.res.Runs, e)
	c.metrics.Reaped(e.Outcome)
}

func (c *collector) count(f func(*Result)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f(&c.res)
}

func (c *collector) result() Result {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.res
}
