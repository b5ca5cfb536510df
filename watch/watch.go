// Package watch reports what changes in the files of a sandbox, and how.
//
// [Start] watches a directory: natively where the handle can, else by polling.
// [NewDiffer] remembers the state of a directory, so that later changes can be
// shown as diffs.
package watch

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/aisandbox-go/aisandbox/provider"
)

// Event is a settled change of one file or symbolic link.
type Event struct {
	Type provider.ChangeType
	Path string // absolute, inside the sandbox
	Time time.Time
}

// Options of a watch. The zero value works.
type Options struct {
	// Root is the directory, a real path inside the sandbox; empty is Handle.Root.
	Root string

	// Ignore are path segments left out at every depth. Nil is .git and node_modules.
	Ignore []string

	// Interval is the shortest time between two polls; 0 is 700 ms. While nothing
	// changes it grows to 5 s.
	Interval time.Duration

	// Poll polls even where the handle can watch.
	Poll bool

	// OnEvent is called for each event, one after the other. While it is busy, what
	// happens to a path becomes one event. Nil: nobody is told.
	OnEvent func(Event)

	Logger *slog.Logger // nil discards
}

// DefaultIgnore is what Options.Ignore is when it is nil.
func DefaultIgnore() []string { return []string{".git", "node_modules"} }

// Watch is a running watch.
type Watch struct {
	src  source
	done chan struct{} // closed when all events were delivered
	once sync.Once
	err  error
}

// source yields raw changes until it was stopped.
type source interface {
	// run sends changes until the end. It is called once.
	run(send func(provider.Change)) error

	// stop lets run do a last sweep and end. It does not wait for it.
	stop(ctx context.Context) error
}

// Start begins to watch. What changes after it returned is reported. The watch
// ends with Stop, or with ctx, and then without a last sweep.
func Start(ctx context.Context, h provider.Handle, o Options) (*Watch, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if o.Root == "" {
		o.Root = h.Root()
	}
	o.Root = path.Clean(o.Root)
	if o.Ignore == nil {
		o.Ignore = DefaultIgnore()
	}
	for _, seg := range o.Ignore {
		if seg == "" || strings.ContainsAny(seg, "/\x00") {
			return nil, fmt.Errorf("watch: ignore %q: use one segment of a path: %w", seg, provider.ErrInvalid)
		}
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.OnEvent == nil {
		o.OnEvent = func(Event) {}
	}
	src, err := newSource(ctx, h, o)
	if err != nil {
		return nil, err
	}
	w := &Watch{src: src, done: make(chan struct{})}
	raw := make(chan provider.Change, 256)
	out := newQueue()
	go func() {
		defer close(raw)
		if err := src.run(func(c provider.Change) { raw <- c }); err != nil && ctx.Err() == nil {
			o.Logger.Warn("the file watch ended early", "error", err)
		}
	}()
	go func() {
		settle(raw, out)
		out.close()
	}()
	go func() {
		defer close(w.done)
		for {
			ev, ok := out.next()
			if !ok {
				return
			}
			o.OnEvent(ev)
		}
	}()
	return w, nil
}

func newSource(ctx context.Context, h provider.Handle, o Options) (source, error) {
	if nw, ok := provider.As[provider.Watcher](h); ok && !o.Poll {
		w, err := nw.Watch(ctx, o.Root, provider.WatchOptions{Ignore: o.Ignore})
		if err == nil {
			return &native{w, o}, nil
		}
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		o.Logger.Warn("files can't be watched natively; polling", "error", err)
	}
	return newPoller(ctx, h, o), nil
}

// Stop sweeps once more, and returns when OnEvent has returned for everything
// that was found, or when ctx ends. Idempotent.
func (w *Watch) Stop(ctx context.Context) error {
	w.once.Do(func() { w.err = w.src.stop(ctx) })
	select {
	case <-w.done:
		return w.err
	case <-ctx.Done():
		return errors.Join(w.err, context.Cause(ctx))
	}
}

// native is the watch of a handle.
type native struct {
	w provider.Watch
	o Options
}

func (n *native) run(send func(provider.Change)) error {
	for c, err := range n.w.Changes() {
		if err != nil {
			return err
		}
		if !ignored(n.o, c.Path) {
			send(c)
		}
	}
	return nil
}

func (n *native) stop(ctx context.Context) error { return n.w.Stop(ctx) }

// ignored says whether a segment of name below the root is on the list.
func ignored(o Options, name string) bool {
	rest, _ := strings.CutPrefix(name, strings.TrimSuffix(o.Root, "/")+"/")
	for seg := range strings.SplitSeq(rest, "/") {
		if slices.Contains(o.Ignore, seg) {
			return true
		}
	}
	return false
}

// queue holds events until they are delivered, one per path. It is bounded by the
// number of files.
type queue struct {
	mu     sync.Mutex
	cond   *sync.Cond
	order  []string
	events map[string]Event
	closed bool
}

func newQueue() *queue {
	q := &queue{events: map[string]Event{}}
	q.cond = sync.NewCond(&q.mu)
	return q
}

func (q *queue) push(ev Event) {
	q.mu.Lock()
	defer q.mu.Unlock()
	old, waiting := q.events[ev.Path]
	switch {
	case !waiting:
		q.order = append(q.order, ev.Path)
	case old.Type == provider.ChangeCreate && ev.Type == provider.ChangeModify:
		ev.Type = provider.ChangeCreate
	case old.Type == provider.ChangeDelete && ev.Type == provider.ChangeCreate:
		ev.Type = provider.ChangeModify
	case old.Type == provider.ChangeCreate && ev.Type == provider.ChangeDelete:
		delete(q.events, ev.Path) // nobody has heard of it
		q.order = slices.DeleteFunc(q.order, func(p string) bool { return p == ev.Path })
		return
	}
	q.events[ev.Path] = ev
	q.cond.Signal()
}

func (q *queue) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	q.cond.Signal()
}

// next waits for an event; ok is false after the last one.
func (q *queue) next() (ev Event, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(q.order) == 0 {
		if q.closed {
			return Event{}, false
		}
		q.cond.Wait()
	}
	ev = q.events[q.order[0]]
	delete(q.events, ev.Path)
	q.order = q.order[1:]
	return ev, true
}
