package pgstore

import (
	"context"
	"errors"
	"hash/fnv"
	"log/slog"
	"math/rand/v2"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/aisandbox-go/aisandbox/internal/storesql"
)

// tries of a transaction that failed for a reason that passes. With the pauses
// between them they span a restart of a connection pool, not a failover: who
// needs more waits and asks again.
const tries = 5

func ms(d time.Duration) string { return strconv.FormatInt(d.Milliseconds(), 10) }

// engine is a pool of connections.
type engine struct {
	pool    *pgxpool.Pool
	timeout time.Duration
	log     *slog.Logger
	core    *storesql.Core
	closed  atomic.Bool

	appendText, insertText string
}

var _ storesql.Engine = (*engine)(nil)

// eventRows are the columns of a batch as arrays, from $n on.
func eventRows(n int) string {
	p := func(i int) string { return "$" + strconv.Itoa(n+i) }
	return "unnest(" + p(0) + "::text[]," + p(1) + "::bigint[]," + p(2) + "::integer[]," + p(3) + "::bytea[]) WITH ORDINALITY AS c(chunk,src_off,src_idx,fp,ord)"
}

func (e *engine) prepare(c *storesql.Core) {
	e.core = c
	e.appendText = c.SQL(`WITH owned AS (` + c.AppendSQL() + ` RETURNING part, next_seq-CAST($4 AS bigint) AS first, {now} AS at),
 ins AS (INSERT INTO run_events(part, run_id, seq, epoch, origin, src_off, src_idx, fp, at, chunk)
 SELECT o.part, $1, o.first+c.ord-1, $2, CASE WHEN c.src_off IS NULL THEN 1 ELSE 0 END, c.src_off, c.src_idx, c.fp, o.at, c.chunk FROM owned o, ` + eventRows(9) + `)
 SELECT first FROM owned`)
	e.insertText = c.SQL(`INSERT INTO run_events(part, run_id, seq, epoch, origin, src_off, src_idx, fp, at, chunk)
 SELECT r.part, r.run_id, $2+c.ord-1, $3, CASE WHEN c.src_off IS NULL THEN 1 ELSE 0 END, c.src_off, c.src_idx, c.fp, n.at, c.chunk FROM runs r, (SELECT {now} AS at) n, ` + eventRows(4) + ` WHERE r.run_id=$1`)
}

func arrays(rows []storesql.EventRow) []any {
	chunk, off, idx, fp := make([]string, len(rows)), make([]*int64, len(rows)), make([]*int32, len(rows)), make([][]byte, len(rows))
	for i, r := range rows {
		chunk[i] = r.Chunk
		if len(r.Print) > 0 {
			fp[i] = r.Print
		}
		if r.Pos != nil {
			n := int32(r.Pos.Idx)
			off[i], idx[i] = &r.Pos.Off, &n
		}
	}
	return []any{chunk, off, idx, fp}
}

// Append is one statement, so one round trip and the shortest lock. It is
// repeated whatever became of it: the batch number makes that harmless.
func (e *engine) Append(ctx context.Context, a storesql.Appending, done func(first int64)) (int64, error) {
	args := append(a.Args(), arrays(a.Rows)...)
	first := int64(0)
	err := e.repeat(ctx, true, func(ctx context.Context) (bool, error) {
		err := e.pool.QueryRow(ctx, e.appendText, args...).Scan(&first)
		if errors.Is(err, pgx.ErrNoRows) {
			first, err = 0, nil
		}
		return true, err
	})
	if err != nil {
		return 0, err
	}
	if first > 0 {
		done(first)
	}
	return first, nil
}

func (e *engine) Insert(ctx context.Context, tx storesql.Tx, runID string, epoch, first int64, rows []storesql.EventRow) error {
	_, err := tx.Exec(ctx, e.insertText, append([]any{runID, first, epoch}, arrays(rows)...)...)
	return err
}

// Lock takes an advisory lock of the transaction. Two names may share one, which
// costs time alone.
func (e *engine) Lock(ctx context.Context, tx storesql.Tx, name string) error {
	h := fnv.New64a()
	_, _ = h.Write([]byte(name))
	_, err := tx.Exec(ctx, "SELECT pg_advisory_xact_lock($1)", int64(h.Sum64()))
	return err
}

func (e *engine) Write(ctx context.Context, again bool, f func(ctx context.Context, tx storesql.Tx) error, done func()) error {
	err := e.repeat(ctx, again, func(ctx context.Context) (unclear bool, err error) {
		tx, err := e.pool.Begin(ctx)
		if err != nil {
			return false, err
		}
		if err := f(ctx, statements{tx}); err != nil {
			// Not with ctx, which may be done: the connection goes back to the pool.
			rctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), e.timeout)
			defer cancel()
			_ = tx.Rollback(rctx)
			return false, err
		}
		return true, tx.Commit(ctx)
	})
	if err == nil {
		done()
	}
	return err
}

func (e *engine) Read(ctx context.Context, f func(ctx context.Context, tx storesql.Tx) error) error {
	return e.repeat(ctx, true, func(ctx context.Context) (bool, error) { return false, f(ctx, statements{e.pool}) })
}

// repeat tries f until it succeeds or fails for good. F says whether it may have
// been committed although it failed; then it is repeated with again alone.
func (e *engine) repeat(ctx context.Context, again bool, f func(ctx context.Context) (unclear bool, err error)) error {
	for try := 1; ; try++ {
		if e.closed.Load() {
			return errClosed()
		}
		tctx, cancel := context.WithTimeout(ctx, e.timeout)
		unclear, err := f(tctx)
		cancel()
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if e.closed.Load() {
			return errClosed()
		}
		kind := judge(err)
		switch {
		case kind == refused, kind == lasting, try == tries:
			return mapError(err)
		case kind == lost && unclear && !again:
			return mapError(err)
		case kind == noPart:
			if err := e.makeParts(ctx); err != nil {
				return mapError(err)
			}
		}
		pause := time.Duration(1<<try)*5*time.Millisecond + rand.N(10*time.Millisecond)
		t := time.NewTimer(pause)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return context.Cause(ctx)
		}
	}
}

// querier is a pool or a transaction.
type querier interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

type statements struct{ q querier }

func (s statements) Exec(ctx context.Context, text string, args ...any) (int64, error) {
	tag, err := s.q.Exec(ctx, text, args...)
	return tag.RowsAffected(), err
}

func (s statements) Query(ctx context.Context, text string, args ...any) (storesql.Rows, error) {
	r, err := s.q.Query(ctx, text, args...)
	return rows{r}, err
}

type rows struct{ pgx.Rows }

// Close tells also what ended the rows early.
func (r rows) Close() error {
	r.Rows.Close()
	return r.Err()
}
