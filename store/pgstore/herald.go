package pgstore

import (
	"context"
	"crypto/rand"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/aisandbox-go/aisandbox/internal/storesql"
)

const (
	channel    = "aisandbox"
	gather     = 10 * time.Millisecond // how long changes wait for others to tell together
	sweepEvery = 2 * time.Second       // what a lost notification costs
	partsEvery = time.Hour
	maxWords   = 1000 // runs told of at once; more are told as "look at yours"
	maxWord    = 7000 // bytes; the server takes 8000
)

// herald tells other processes what changed here, and hears what changed there.
type herald struct {
	e    *engine
	cfg  *pgx.ConnConfig
	core *storesql.Core
	self string // so that a process doesn't hear itself

	mu    sync.Mutex
	words map[string]bool // run → also cancelled or ended
	all   bool            // too many to name
	some  chan struct{}   // room for one: there are words

	stop func()
}

func newHerald(e *engine, cfg *pgx.ConnConfig) *herald {
	return &herald{e: e, cfg: cfg, self: rand.Text()[:10], words: map[string]bool{}, some: make(chan struct{}, 1)}
}

func (h *herald) start(c *storesql.Core) {
	h.core = c
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { h.tell(ctx) })
	wg.Go(func() { h.listen(ctx) })
	wg.Go(func() { h.look(ctx) })
	h.stop = func() {
		cancel()
		wg.Wait()
	}
}

// changed notes that a run changed here. It never waits.
func (h *herald) changed(runID string, control bool) {
	h.mu.Lock()
	if len(h.words) >= maxWords || len(runID) > maxWord {
		h.all = true
	} else {
		h.words[runID] = h.words[runID] || control
	}
	h.mu.Unlock()
	select {
	case h.some <- struct{}{}:
	default:
	}
}

// tell sends what was noted, in a transaction of its own.
func (h *herald) tell(ctx context.Context) {
	for {
		select {
		case <-h.some:
		case <-ctx.Done():
			return
		}
		t := time.NewTimer(gather)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return
		}
		h.mu.Lock()
		words, all := h.words, h.all
		h.words, h.all = map[string]bool{}, false
		h.mu.Unlock()
		var out []string
		for id, control := range words {
			mark := "e"
			if control {
				mark = "c"
			}
			out = append(out, h.self+mark+id)
		}
		if all {
			out = append(out, h.self+"*")
		}
		tctx, cancel := context.WithTimeout(ctx, h.e.timeout)
		_, err := h.e.pool.Exec(tctx, "SELECT pg_notify('"+channel+"', x) FROM unnest($1::text[]) x", out)
		cancel()
		if err != nil && ctx.Err() == nil {
			h.e.log.Debug("store: changes were not announced; others notice them later", "err", err)
		}
	}
}

// listen hears of changes elsewhere, on a connection of its own.
func (h *herald) listen(ctx context.Context) {
	for wait := 100 * time.Millisecond; ; wait = min(2*wait, 5*time.Second) {
		began := time.Now()
		err := h.hear(ctx)
		if ctx.Err() != nil {
			return
		}
		if time.Since(began) > time.Minute {
			wait = 100 * time.Millisecond
		}
		h.e.log.Warn("store: the connection that hears of changes was lost", "err", err, "again_in", wait)
		t := time.NewTimer(wait)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return
		}
	}
}

func (h *herald) hear(ctx context.Context) error {
	cfg := h.cfg.Copy()
	cfg.RuntimeParams["statement_timeout"] = "0"
	delete(cfg.RuntimeParams, "idle_in_transaction_session_timeout")
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		return err
	}
	defer func() {
		cctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = conn.Close(cctx)
	}()
	if _, err := conn.Exec(ctx, "LISTEN "+channel); err != nil {
		return err
	}
	// What happened before is not announced again.
	if err := h.core.Sweep(ctx); err != nil {
		return err
	}
	for {
		// A connection that died in silence is found by asking.
		wctx, cancel := context.WithTimeout(ctx, 30*time.Second)
		n, err := conn.WaitForNotification(wctx)
		quiet := wctx.Err() != nil && ctx.Err() == nil
		cancel()
		switch {
		case err == nil:
			h.heard(ctx, n.Payload)
		case quiet && !conn.IsClosed():
			pctx, cancel := context.WithTimeout(ctx, h.e.timeout)
			err := conn.Ping(pctx)
			cancel()
			if err != nil {
				return err
			}
		default:
			return err
		}
	}
}

func (h *herald) heard(ctx context.Context, payload string) {
	if len(payload) <= len(h.self) || strings.HasPrefix(payload, h.self) {
		return
	}
	word := payload[len(h.self):]
	switch word[0] {
	case 'e', 'c':
		h.core.Hub.Poke(word[1:], word[0] == 'c')
	default:
		_ = h.core.Sweep(ctx) // the next one makes up for it
	}
}

// look makes up for what was not heard, and keeps partitions ahead of time.
func (h *herald) look(ctx context.Context) {
	sweep, parts := time.NewTicker(sweepEvery), time.NewTicker(partsEvery)
	defer sweep.Stop()
	defer parts.Stop()
	for {
		select {
		case <-sweep.C:
			if !h.core.Hub.Active() {
				continue
			}
			if err := h.core.Sweep(ctx); err != nil && ctx.Err() == nil {
				h.e.log.Debug("store: sweep", "err", err)
			}
		case <-parts.C:
			pctx, cancel := context.WithTimeout(ctx, h.e.timeout)
			err := h.e.makeParts(pctx)
			cancel()
			if err != nil && ctx.Err() == nil {
				h.e.log.Warn("store: partitions of the next months were not made", "err", err)
			}
		case <-ctx.Done():
			return
		}
	}
}
