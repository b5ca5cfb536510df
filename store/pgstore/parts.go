package pgstore

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// Partitions are made for this month, by the database's clock, and so many after.
const monthsAhead = 2

// makeParts makes the partitions that will be needed next. Processes that do it
// at once wait for each other.
func (e *engine) makeParts(ctx context.Context) error {
	var now time.Time
	if err := e.pool.QueryRow(ctx, "SELECT clock_timestamp()").Scan(&now); err != nil {
		return err
	}
	y, m, _ := now.UTC().Date()
	for i := range monthsAhead + 1 {
		at := time.Date(y, m+time.Month(i), 1, 0, 0, 0, 0, time.UTC)
		part := at.Year()*100 + int(at.Month())
		var there bool
		name := fmt.Sprintf("run_events_%d", part)
		if err := e.pool.QueryRow(ctx, "SELECT to_regclass($1) IS NOT NULL", name).Scan(&there); err != nil {
			return err
		}
		if there {
			continue
		}
		err := pgx.BeginFunc(ctx, e.pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, "SELECT pg_advisory_xact_lock(hashtext('aisandbox partitions'))"); err != nil {
				return err
			}
			_, err := tx.Exec(ctx, fmt.Sprintf("CREATE TABLE IF NOT EXISTS %s PARTITION OF run_events FOR VALUES IN (%d)", name, part))
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// dropParts drops the partitions of past months in which no log can be read any
// more. Where one log keeps a partition for long, the others' events are deleted.
func (e *engine) dropParts(ctx context.Context) error {
	var month int
	if err := e.pool.QueryRow(ctx, "SELECT to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYYMM')::integer").Scan(&month); err != nil {
		return err
	}
	rows, err := e.pool.Query(ctx, "SELECT substring(c.relname from '[0-9]+$')::integer FROM pg_inherits i JOIN pg_class c ON c.oid=i.inhrelid WHERE i.inhparent='run_events'::regclass ORDER BY 1")
	if err != nil {
		return err
	}
	parts, err := pgx.CollectRows(rows, pgx.RowTo[int])
	if err != nil {
		return err
	}
	for _, part := range parts {
		if part >= month { // runs may yet begin in it
			continue
		}
		if err := e.dropPart(ctx, part); err != nil {
			return err
		}
	}
	return e.core.SweepEvents(ctx, fmt.Sprintf("part<%d", before(month, 2)))
}

// before is the month n months earlier.
func before(month, n int) int {
	at := time.Date(month/100, time.Month(month%100-n), 1, 0, 0, 0, 0, time.UTC)
	return at.Year()*100 + int(at.Month())
}

func (e *engine) dropPart(ctx context.Context, part int) error {
	return pgx.BeginFunc(ctx, e.pool, func(tx pgx.Tx) error {
		var needed bool
		if err := tx.QueryRow(ctx, "SELECT EXISTS(SELECT 1 FROM runs WHERE part=$1 AND events_expired=0)", part).Scan(&needed); err != nil || needed {
			return err
		}
		// Who reads goes first: the next pass tries again.
		if _, err := tx.Exec(ctx, "SET LOCAL lock_timeout='2s'"); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, fmt.Sprintf("DROP TABLE IF EXISTS run_events_%d", part)); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, "UPDATE runs SET events_expired=2 WHERE part=$1 AND events_expired=1", part)
		return err
	})
}
