package storesql

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"

	"github.com/aisandbox-go/aisandbox/store"
)

// runColumns are read by scanRun. An expired lease is nobody's.
const runColumns = `run_id, thread_id, tenant, parent_run_id, definition, adapter, kind, input, status, started_at, finished_at, closed_at,
 close_reason, error, usage, epoch, CASE WHEN lease_until<{now} THEN '' ELSE owner END, lease_until, batch_no, next_seq, pos_off, pos_idx,
 exit_code, exit_off, sentinel_ok, exit_ok, launch, sandbox_key, sandbox_gen, last_viewed_at, cancel_at, cancel_reason,
 events_expired, journal_hold, reap_attempts`

type runRow struct {
	store.Run
	attempts int
}

func scanRun(rows Rows) (runRow, error) {
	var r runRow
	var kind, status, launch string
	var input []byte
	var started, viewed, epoch, batch, next, idx, expired, hold, attempts int64
	var finished, closed, lease, exitCode, exitOff, cancel *int64
	var fail, usage *string
	var verified, exitOK int64
	err := rows.Scan(&r.ID, &r.Thread.ID, &r.Thread.Tenant, &r.ParentRunID, &r.Definition, &r.Adapter, &kind, &input, &status, &started, &finished, &closed,
		&r.CloseReason, &fail, &usage, &epoch, &r.Owner, &lease, &batch, &next, &r.Pos.Off, &idx,
		&exitCode, &exitOff, &verified, &exitOK, &launch, &r.SandboxKey, &r.SandboxGen, &viewed, &cancel, &r.CancelReason,
		&expired, &hold, &attempts)
	if err != nil {
		return r, err
	}
	r.Kind, r.Status, r.Launch = store.Kind(kind), store.Status(status), store.Launch(launch)
	if len(input) > 0 {
		r.Input = bytes.Clone(input)
	}
	r.StartedAt, r.LastViewedAt = instant(&started), instant(&viewed)
	r.FinishedAt, r.ClosedAt, r.LeaseUntil, r.CancelAt = instant(finished), instant(closed), instant(lease), instant(cancel)
	r.Epoch, r.BatchNo, r.LastSeq, r.Pos.Idx = uint64(epoch), uint64(batch), next-1, int(idx)
	r.EventsExpired, r.JournalHold, r.attempts = expired != 0, hold != 0, int(attempts)
	if exitCode != nil && exitOff != nil {
		r.Exit = &store.Exit{Code: int(*exitCode), Off: *exitOff, Verified: verified != 0, OK: exitOK != 0}
	}
	if fail != nil {
		if err := json.Unmarshal([]byte(*fail), &r.Error); err != nil {
			return r, fmt.Errorf("store: run %q: error: %w", r.ID, err)
		}
	}
	if usage != nil {
		if err := json.Unmarshal([]byte(*usage), &r.Usage); err != nil {
			return r, fmt.Errorf("store: run %q: usage: %w", r.ID, err)
		}
	}
	return r, nil
}

// run reads a row; more is what follows the condition, such as {lock}.
func (c *Core) run(ctx context.Context, tx Tx, runID, more string) (r runRow, found bool, err error) {
	err = c.all(ctx, tx, `SELECT {run} FROM runs WHERE run_id=$1`+more, []any{runID}, func(rows Rows) error {
		found = true
		r, err = scanRun(rows)
		return err
	})
	return r, found, err
}

// owned is the row that a claim may write, locked, or why it may not. The order
// of the reasons is part of the contract. A row comes also with a sealed error.
func (c *Core) owned(ctx context.Context, tx Tx, cl store.Claim) (runRow, error) {
	r, found, err := c.run(ctx, tx, cl.RunID(), `{lock}`)
	switch {
	case err != nil:
		return r, err
	case !found:
		return r, notFound("run", cl.RunID())
	case r.Epoch != cl.Epoch() && !c.m.NoEpoch:
		return r, &store.FencedError{RunID: r.ID, Held: cl.Epoch(), Observed: r.Epoch}
	case !r.Active():
		return r, &store.SealedError{RunID: r.ID, Status: r.Status}
	}
	return r, nil
}

// jsonText marshals what can't fail.
func jsonText(v any) string {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	_ = e.Encode(v)
	return string(bytes.TrimRight(b.Bytes(), "\n"))
}
