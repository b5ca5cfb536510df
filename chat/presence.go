package chat

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/aisandbox-go/aisandbox/store"
)

// touchEvery is how often a host says which runs it has readers of.
const touchEvery = 15 * time.Second

// Presence tells the store which runs somebody watches on this host, so that
// nobody expires them (spec 04 §21.7). It needs no closing: it works while there
// are readers. Its methods may be called concurrently.
type Presence struct {
	runs store.Runs
	log  *slog.Logger

	mu   sync.Mutex
	n    map[string]int
	work *worker // while there are readers
}

// NewPresence returns a Presence for the runs of one store. A nil logger discards.
func NewPresence(runs store.Runs, log *slog.Logger) *Presence {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &Presence{runs: runs, log: log, n: map[string]int{}}
}

// Enter counts one reader more of a run, until leave is called. It doesn't wait
// for the store.
func (p *Presence) Enter(runID string) (leave func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.n[runID]++
	switch {
	case p.work == nil:
		p.work = startWorker(p.touchAll)
	case p.n[runID] == 1:
		select {
		case p.work.wake <- struct{}{}:
		default:
		}
	}
	return sync.OnceFunc(func() {
		p.mu.Lock()
		if p.n[runID]--; p.n[runID] == 0 {
			delete(p.n, runID)
		}
		var last *worker
		if len(p.n) == 0 {
			last, p.work = p.work, nil
			last.stop()
		}
		p.mu.Unlock()
		if last != nil {
			<-last.done
		}
	})
}

func (p *Presence) touchAll(ctx context.Context, wake <-chan struct{}) {
	t := time.NewTicker(touchEvery)
	defer t.Stop()
	for {
		p.mu.Lock()
		ids := slices.Sorted(maps.Keys(p.n))
		p.mu.Unlock()
		p.touch(ctx, ids)
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		case <-wake:
		}
	}
}

func (p *Presence) touch(ctx context.Context, ids []string) {
	if len(ids) == 0 {
		return
	}
	tctx, stop := context.WithTimeout(ctx, opTimeout)
	defer stop()
	if err := p.runs.Touch(tctx, ids); err != nil && ctx.Err() == nil {
		p.log.Warn("tell who is watched", keyError, err)
	}
}
