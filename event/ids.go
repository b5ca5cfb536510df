package event

import "strconv"

// NewIDs returns the generator of a run's ids: runID-0, runID-1, … Neither a
// clock nor chance enters, so that decoding the same bytes again mints the same
// ids (spec 02 §6). Not for concurrent use.
func NewIDs(runID string) func() string {
	n := 0
	prefix := runID + "-"
	return func() string {
		id := prefix + strconv.Itoa(n)
		n++
		return id
	}
}
