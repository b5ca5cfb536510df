package sqlitestore

import (
	"context"
	"database/sql"
	"errors"
	"sync"
	"time"

	"github.com/aisandbox-go/aisandbox/internal/storesql"
	"github.com/aisandbox-go/aisandbox/store"
)

const (
	readConns   = 4
	groupCount  = 256     // requests in one commit
	groupBytes  = 1 << 20 // bytes in one commit, about
	queueLength = 1024
	pollEvery   = 50 * time.Millisecond
)

// engine is one connection that writes, which belongs to the committer, and a
// few that read.
type engine struct {
	w      *sql.Conn
	stmts  map[string]*sql.Stmt // of w
	pool   *sql.DB
	core   *storesql.Core
	append string

	mu    sync.Mutex
	reads map[string]*sql.Stmt // of pool

	queue chan *request
	quit  chan struct{} // closed: take nothing more
	dead  chan struct{} // closed: nothing is answered any more
	wg    sync.WaitGroup

	commits int // of the committer, for tests
}

var _ storesql.Engine = (*engine)(nil)

func newEngine(w *sql.Conn, pool *sql.DB) *engine {
	return &engine{w: w, pool: pool, stmts: map[string]*sql.Stmt{}, reads: map[string]*sql.Stmt{},
		queue: make(chan *request, queueLength), quit: make(chan struct{}), dead: make(chan struct{})}
}

func (e *engine) start(c *storesql.Core) {
	e.core, e.append = c, c.AppendSQL()
	e.wg.Go(e.commit)
	e.wg.Go(e.watch)
}

// stop waits until everything that was accepted is committed.
func (e *engine) stop() {
	close(e.quit)
	e.wg.Wait()
	for _, s := range e.stmts {
		_ = s.Close()
	}
	for _, s := range e.reads {
		_ = s.Close()
	}
}

// request is a transaction that waits for its commit.
type request struct {
	ctx    context.Context
	f      func(ctx context.Context, tx storesql.Tx) error
	done   func()
	size   int
	err    error
	answer chan error // room for one
}

func errClosed() error { return &store.UnavailableError{What: "the store is closed"} }

func (e *engine) Write(ctx context.Context, _ bool, f func(ctx context.Context, tx storesql.Tx) error, done func()) error {
	return e.submit(&request{ctx: ctx, f: f, done: done, size: 512, answer: make(chan error, 1)})
}

func (e *engine) Append(ctx context.Context, a storesql.Appending, done func(first int64)) (int64, error) {
	first := new(int64)
	err := e.submit(&request{ctx: ctx, size: a.Size + 256, answer: make(chan error, 1),
		f: func(ctx context.Context, tx storesql.Tx) error {
			*first = 0
			rows, err := tx.Query(ctx, e.core.SQL(e.append+` RETURNING next_seq-CAST($4 AS bigint)`), a.Args()...)
			if err != nil {
				return err
			}
			for rows.Next() {
				if err := rows.Scan(first); err != nil {
					_ = rows.Close()
					return err
				}
			}
			if err := rows.Close(); err != nil || *first == 0 {
				return err
			}
			return e.Insert(ctx, tx, a.RunID, a.Epoch, *first, a.Rows)
		},
		done: func() {
			if *first > 0 {
				done(*first)
			}
		}})
	if err != nil {
		return 0, err
	}
	return *first, nil
}

func (e *engine) Insert(ctx context.Context, tx storesql.Tx, runID string, epoch, first int64, rows []storesql.EventRow) error {
	text := e.core.SQL(`INSERT INTO run_events(run_id, seq, epoch, origin, src_off, src_idx, fp, at, chunk) VALUES ($1,$2,$3,$4,$5,$6,$7,{now},$8)`)
	for i, r := range rows {
		args := []any{runID, first + int64(i), epoch, int64(1), nil, nil, nil, r.Chunk}
		if r.Pos != nil {
			args[3], args[4], args[5] = int64(0), r.Pos.Off, int64(r.Pos.Idx)
		}
		if len(r.Print) > 0 {
			args[6] = r.Print
		}
		if _, err := tx.Exec(ctx, text, args...); err != nil {
			return err
		}
	}
	return nil
}

// Lock does nothing: who writes is alone.
func (e *engine) Lock(context.Context, storesql.Tx, string) error { return nil }

func (e *engine) submit(r *request) error {
	select {
	case <-e.quit:
		return errClosed()
	default:
	}
	select {
	case e.queue <- r:
	case <-r.ctx.Done():
		return context.Cause(r.ctx)
	case <-e.quit:
		return errClosed()
	}
	select {
	case err := <-r.answer:
		return err
	case <-r.ctx.Done():
		return context.Cause(r.ctx)
	case <-e.dead:
		select {
		case err := <-r.answer:
			return err
		default:
			return errClosed() // it came too late
		}
	}
}

// commit is the committer: it takes what waits, and commits it at once.
func (e *engine) commit() {
	defer close(e.dead)
	for {
		select {
		case r := <-e.queue:
			e.group(e.gather(r))
		case <-e.quit:
			for {
				select {
				case r := <-e.queue:
					e.group(e.gather(r))
				default:
					return
				}
			}
		}
	}
}

func (e *engine) gather(r *request) []*request {
	group, size := []*request{r}, r.size
	for len(group) < groupCount && size < groupBytes {
		select {
		case r := <-e.queue:
			group, size = append(group, r), size+r.size
		default:
			return group
		}
	}
	return group
}

// group runs requests in one transaction, each in a savepoint of its own so that
// one that is refused takes nothing with it.
func (e *engine) group(all []*request) {
	var group []*request
	for _, r := range all {
		if r.ctx.Err() != nil {
			r.answer <- context.Cause(r.ctx)
			continue
		}
		group = append(group, r)
	}
	if len(group) == 0 {
		return
	}
	// The statements run without the callers' contexts: to interrupt one would roll
	// back all. Each is short, and busy_timeout bounds the waiting.
	ctx := context.Background()
	tx := writer{e}
	if err := e.together(ctx, tx, group); err != nil {
		err = mapError(err)
		_, _ = tx.Exec(ctx, "ROLLBACK")
		for _, r := range group {
			r.answer <- err
		}
		return
	}
	for _, r := range group {
		if r.err == nil {
			r.done()
		}
		r.answer <- r.err
	}
}

func (e *engine) together(ctx context.Context, tx writer, group []*request) error {
	if _, err := tx.Exec(ctx, "BEGIN IMMEDIATE"); err != nil {
		return err
	}
	for _, r := range group {
		if _, err := tx.Exec(ctx, "SAVEPOINT one"); err != nil {
			return err
		}
		if r.err = r.f(ctx, tx); r.err != nil {
			if broken(r.err) {
				return r.err
			}
			if _, err := tx.Exec(ctx, "ROLLBACK TO one"); err != nil {
				return err
			}
		}
		if _, err := tx.Exec(ctx, "RELEASE one"); err != nil {
			return err
		}
	}
	_, err := tx.Exec(ctx, "COMMIT")
	e.commits++
	return err
}

func (e *engine) Read(ctx context.Context, f func(ctx context.Context, tx storesql.Tx) error) error {
	err := f(ctx, reader{e})
	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	select {
	case <-e.quit:
		if err != nil {
			return errClosed()
		}
	default:
	}
	return mapError(err)
}

// watch looks for commits, also of other processes, while somebody reads.
func (e *engine) watch() {
	// The connection is its own: the version that it sees changes with every
	// commit of another one.
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var conn *sql.Conn
	defer func() {
		if conn != nil {
			_ = conn.Close()
		}
	}()
	tick := time.NewTicker(time.Hour)
	defer tick.Stop()
	idle := true
	last := int64(-1)
	for {
		select {
		case <-e.quit:
			return
		case <-e.core.Hub.Started:
			if idle {
				tick.Reset(pollEvery)
			}
			idle = false
		case <-tick.C:
			if !e.core.Hub.Active() {
				tick.Reset(time.Hour)
				idle = true
				continue
			}
			if idle {
				continue
			}
			if conn == nil {
				var err error
				if conn, err = e.pool.Conn(ctx); err != nil {
					conn = nil
					continue
				}
			}
			var version int64
			if err := conn.QueryRowContext(ctx, "PRAGMA data_version").Scan(&version); err != nil {
				_ = conn.Close()
				conn = nil
				continue
			}
			if version != last && e.core.Sweep(ctx) == nil {
				last = version
			}
		}
	}
}

// writer is the committer's connection.
type writer struct{ e *engine }

func (w writer) prepare(ctx context.Context, text string) (*sql.Stmt, error) {
	if s := w.e.stmts[text]; s != nil {
		return s, nil
	}
	s, err := w.e.w.PrepareContext(ctx, text)
	if err == nil {
		w.e.stmts[text] = s
	}
	return s, err
}

func (w writer) Exec(ctx context.Context, text string, args ...any) (int64, error) {
	s, err := w.prepare(ctx, text)
	if err != nil {
		return 0, err
	}
	r, err := s.ExecContext(ctx, args...)
	if err != nil {
		return 0, err
	}
	return r.RowsAffected()
}

func (w writer) Query(ctx context.Context, text string, args ...any) (storesql.Rows, error) {
	s, err := w.prepare(ctx, text)
	if err != nil {
		return nil, err
	}
	r, err := s.QueryContext(ctx, args...)
	return rows{r}, err
}

// reader is the pool. Lists have many forms, so not every statement is kept.
type reader struct{ e *engine }

const keptReads = 64

func (r reader) Exec(context.Context, string, ...any) (int64, error) {
	return 0, errors.New("sqlitestore: a read that writes")
}

func (r reader) Query(ctx context.Context, text string, args ...any) (storesql.Rows, error) {
	e := r.e
	e.mu.Lock()
	s, full := e.reads[text], len(e.reads) >= keptReads
	e.mu.Unlock()
	if s == nil && full {
		q, err := e.pool.QueryContext(ctx, text, args...)
		return rows{q}, err
	}
	if s == nil {
		var err error
		if s, err = e.pool.PrepareContext(ctx, text); err != nil {
			return nil, err
		}
		e.mu.Lock()
		if have := e.reads[text]; have != nil {
			_ = s.Close()
			s = have
		}
		e.reads[text] = s
		e.mu.Unlock()
	}
	q, err := s.QueryContext(ctx, args...)
	return rows{q}, err
}

type rows struct{ *sql.Rows }

// Close tells also what ended the rows early.
func (r rows) Close() error {
	err := r.Err()
	if e := r.Rows.Close(); err == nil {
		err = e
	}
	return err
}
