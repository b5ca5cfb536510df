package watch

import (
	"container/heap"
	"time"

	"github.com/aisandbox-go/aisandbox/provider"
)

// The times of spec 05 §15.3.
const (
	renameWait = 30 * time.Millisecond  // a delete waits so long for the create of a rewrite
	quiet      = 100 * time.Millisecond // what follows within it is one trailing event
	maxDelay   = time.Second            // of a trailing event, while the path never rests
)

// settler turns raw changes into settled ones. The first change of a path that
// was quiet goes out at once; what follows it closely goes out as one. It is a
// function of its input and the times given to it.
type settler struct {
	paths map[string]*pathState
	due   timers
}

// pathState is a path that changed a moment ago.
type pathState struct {
	path  string
	told  bool // whether the listener believes that the file is there
	there bool
	dirty bool // something happened since it was told
	first time.Time
	at    time.Time // when the state is looked at again
	index int
}

func newSettler() *settler { return &settler{paths: map[string]*pathState{}} }

// add takes a raw change.
func (s *settler) add(c provider.Change, now time.Time, emit func(Event)) {
	p := s.paths[c.Path]
	there := c.Type != provider.ChangeDelete
	if p != nil {
		if !p.dirty {
			p.dirty, p.first = true, now
		}
		p.there = there
		p.at = now.Add(quiet)
		if limit := p.first.Add(maxDelay); limit.Before(p.at) {
			p.at = limit
		}
		heap.Fix(&s.due, p.index)
		return
	}
	p = &pathState{path: c.Path, told: c.Type != provider.ChangeCreate, there: there, first: now}
	if there {
		emit(Event{c.Type, c.Path, now})
		p.told, p.at = true, now.Add(quiet)
	} else {
		p.dirty, p.at = true, now.Add(renameWait)
	}
	s.paths[c.Path] = p
	heap.Push(&s.due, p)
}

// expire tells what is due.
func (s *settler) expire(now time.Time, emit func(Event)) {
	for len(s.due) > 0 && !s.due[0].at.After(now) {
		p := s.due[0]
		if !p.dirty {
			heap.Pop(&s.due)
			delete(s.paths, p.path)
			continue
		}
		p.tell(now, emit)
		p.at = now.Add(quiet)
		heap.Fix(&s.due, 0)
	}
}

// tell says what became of the path since the listener last heard of it.
func (p *pathState) tell(now time.Time, emit func(Event)) {
	switch {
	case p.told && p.there:
		emit(Event{provider.ChangeModify, p.path, now})
	case p.told:
		emit(Event{provider.ChangeDelete, p.path, now})
	case p.there:
		emit(Event{provider.ChangeCreate, p.path, now})
	}
	p.told, p.dirty = p.there, false
}

// flush tells everything that waits, in order of its time.
func (s *settler) flush(now time.Time, emit func(Event)) {
	for len(s.due) > 0 {
		p := heap.Pop(&s.due).(*pathState)
		if p.dirty {
			p.tell(now, emit)
		}
		delete(s.paths, p.path)
	}
}

// next returns how long to wait until expire; ok is false when nothing waits.
func (s *settler) next(now time.Time) (d time.Duration, ok bool) {
	if len(s.due) == 0 {
		return 0, false
	}
	return max(0, s.due[0].at.Sub(now)), true
}

// settle runs a settler over raw until that is closed.
func settle(raw <-chan provider.Change, out *queue) {
	s := newSettler()
	t := time.NewTimer(time.Hour)
	defer t.Stop()
	for {
		var fire <-chan time.Time
		if d, ok := s.next(time.Now()); ok {
			t.Reset(d)
			fire = t.C
		}
		select {
		case c, ok := <-raw:
			if !ok {
				s.flush(time.Now(), out.push)
				return
			}
			s.add(c, time.Now(), out.push)
		case now := <-fire:
			s.expire(now, out.push)
		}
	}
}

// timers is a heap of path states by their time.
type timers []*pathState

func (t timers) Len() int           { return len(t) }
func (t timers) Less(i, j int) bool { return t[i].at.Before(t[j].at) }
func (t timers) Swap(i, j int) {
	t[i], t[j] = t[j], t[i]
	t[i].index, t[j].index = i, j
}

func (t *timers) Push(x any) {
	p := x.(*pathState)
	p.index = len(*t)
	*t = append(*t, p)
}

func (t *timers) Pop() any {
	old := *t
	p := old[len(old)-1]
	*t = old[:len(old)-1]
	return p
}
