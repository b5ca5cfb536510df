package chat

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/store"
)

// maxLater bounds the live events that wait for the end of a replay.
const maxLater = 4096

// replay is what a driver that took a run over knows of its log. The adapter
// starts over from the first byte of the journal, and everything flows through
// hooks, guard and redaction as it did before, so that their state and the
// transcript become what they were; at the log what is stored already is compared
// instead of written (spec 04 §21.9).
type replay struct {
	stored  []store.Stored
	next    int // the first stored event that was not met again
	later   []msg
	dropped int

	// live are the fingerprints of the stored events that have no coordinate: what
	// the adapter adds of its own, such as a diff, is not added twice.
	live map[[32]byte]int
}

func newReplay(stored []store.Stored) *replay {
	p := &replay{stored: stored, live: map[[32]byte]int{}}
	for _, e := range stored {
		if e.Pos == nil {
			p.live[event.Fingerprint(e.Event)]++
		}
	}
	return p
}

// done says that everything stored was met.
func (p *replay) done() bool { return p == nil || p.next == len(p.stored) }

// known takes one of the live events that are stored.
func (p *replay) known(ev event.Event) bool {
	if p == nil {
		return false
	}
	print := event.Fingerprint(ev)
	if p.live[print] == 0 {
		return false
	}
	p.live[print]--
	return true
}

// Replaying says that the run was taken over and that the adapter is still at
// what the log has already. Hooks that have an effect beyond the run leave it out
// then: it was had.
func (r *Run) Replaying() bool { return r.replaying.Load() }

// Attached says that this driver took the run over from another one.
func (r *Run) Attached() bool { return r.req.Attach && !r.joined }

// catchUp walks over the stored events that no replay yields: they take effect at
// their place. When nothing is left the live events that waited are let go.
func (w *writer) catchUp() {
	p := w.replay
	for !p.done() && p.stored[p.next].Pos == nil {
		w.again(p.stored[p.next].Event)
		p.next++
	}
	if !p.done() || !w.r.replaying.Load() {
		return
	}
	w.r.replaying.Store(false)
	later := p.later
	p.later = nil
	if p.dropped > 0 {
		w.r.log.Warn("too many live events during the replay; the first ones were dropped", "dropped", p.dropped)
	}
	for _, m := range later {
		w.event(m)
	}
}

// again lets a stored event take effect on what the writer knows of the run.
func (w *writer) again(ev event.Event) {
	w.guard.Push(ev)
	w.r.mu.Lock()
	w.r.story.add(ev)
	w.r.mu.Unlock()
}

// wait keeps a live event until the replay is over.
func (p *replay) wait(m msg) {
	if len(p.later) == maxLater {
		p.later = p.later[1:]
		p.dropped++
	}
	p.later = append(p.later, m)
}

// meet compares an event of the replay with the log. ok is false when the replay
// is past the log's end, so that the event is new.
func (w *writer) meet(ev event.Event, pos store.Pos, print []byte) (ok bool) {
	p := w.replay
	for !p.done() && p.stored[p.next].Pos == nil {
		w.again(p.stored[p.next].Event)
		p.next++
	}
	if p.done() {
		return false
	}
	s := p.stored[p.next]
	if *s.Pos != pos || !bytes.Equal(s.Print, print) {
		w.diverge(s, pos, string(ev.Type()))
		return true
	}
	p.next++
	w.r.mu.Lock()
	w.r.story.add(ev)
	w.r.mu.Unlock()
	return true
}

func (w *writer) diverge(s store.Stored, pos store.Pos, got string) {
	w.fail(&DivergedError{
		RunID: w.r.req.RunID, Pos: pos, Index: int(s.Seq) - 1,
		Want: fmt.Sprintf("%s at %d:%d", s.Event.Type(), s.Pos.Off, s.Pos.Idx), Got: got,
	})
}

// settle ends a replay that was not finished. short tells of an agent that ended
// before it said again what is stored: then the run can't be believed. The guard
// learns the whole log, so that what ends the run fits to it.
func (w *writer) settle() (short error) {
	p := w.replay
	if p == nil || p.done() && !w.diverged() {
		return nil
	}
	for _, s := range p.stored[p.next:] {
		if s.Pos != nil {
			short = &DivergedError{
				RunID: w.r.req.RunID, Pos: *s.Pos, Index: int(s.Seq) - 1,
				Want: fmt.Sprintf("%s at %d:%d", s.Event.Type(), s.Pos.Off, s.Pos.Idx), Got: "the end of the replay",
			}
			break
		}
	}
	p.next, p.later = len(p.stored), nil
	w.r.replaying.Store(false)
	w.guard = w.newGuard()
	w.texts = pieces{run: w.r}
	for _, s := range p.stored {
		w.guard.Push(s.Event)
	}
	return short
}

func (w *writer) diverged() bool {
	var d *DivergedError
	return errors.As(w.held.err, &d)
}
