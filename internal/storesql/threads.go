package storesql

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/store"
)

type messages struct{ *Core }

var _ store.Messages = messages{}

func (c messages) Load(ctx context.Context, t store.Thread) ([]event.Message, error) {
	var text string
	err := c.read(ctx, func(ctx context.Context, tx Tx) error {
		_, err := c.one(ctx, tx, `SELECT messages FROM messages WHERE tenant=$1 AND thread_id=$2`, []any{t.Tenant, t.ID}, &text)
		return err
	})
	if errors.Is(err, errText) {
		return nil, nil
	}
	if err != nil || text == "" {
		return nil, err
	}
	var out []event.Message
	if err := json.Unmarshal([]byte(text), &out); err != nil {
		return nil, fmt.Errorf("store: messages of thread %q: %w", t.ID, err)
	}
	return out, nil
}

func (c messages) Save(ctx context.Context, t store.Thread, msgs []event.Message) error {
	if err := done(ctx); err != nil {
		return err
	}
	if t.ID == "" {
		return &store.InvalidError{Field: "Thread.ID", Reason: "is empty"}
	}
	return c.write(ctx, func(ctx context.Context, tx Tx) error { return c.saveThread(ctx, tx, t, msgs) }, nil)
}

func (c *Core) saveThread(ctx context.Context, tx Tx, t store.Thread, msgs []event.Message) error {
	if msgs == nil {
		msgs = []event.Message{}
	}
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(msgs); err != nil {
		return &store.InvalidError{Field: "Messages", Reason: err.Error()}
	}
	_, err := c.exec(ctx, tx, `INSERT INTO messages(tenant, thread_id, messages, n, updated_at) VALUES ($1,$2,$3,$4,{now})
 ON CONFLICT(tenant, thread_id) DO UPDATE SET messages=excluded.messages, n=excluded.n, updated_at=excluded.updated_at`,
		t.Tenant, t.ID, prose(strings.TrimRight(b.String(), "\n")), int64(len(msgs)))
	return err
}

func (c messages) Threads(ctx context.Context, q store.ThreadQuery) ([]store.ThreadInfo, string, error) {
	var w where
	if !q.AllTenants {
		w.add("tenant=?", q.Tenant)
	}
	if q.After != "" {
		id, tenant, ok := strings.Cut(q.After, "\x00")
		if !ok {
			return nil, "", badCursor("ThreadQuery")
		}
		w.add("(thread_id, tenant) > (CAST(? AS text), CAST(? AS text))", id, tenant)
	}
	limit := store.PageLimit(q.Limit)
	var out []store.ThreadInfo
	err := c.read(ctx, func(ctx context.Context, tx Tx) error {
		out = nil
		return c.all(ctx, tx, `SELECT thread_id, tenant, n, updated_at FROM messages`+w.String()+` ORDER BY thread_id, tenant LIMIT `+strconv.Itoa(limit+1), w.args,
			func(r Rows) error {
				var i store.ThreadInfo
				var n, at int64
				err := r.Scan(&i.Thread.ID, &i.Thread.Tenant, &n, &at)
				i.Messages, i.UpdatedAt = int(n), instant(&at)
				out = append(out, i)
				return err
			})
	})
	if errors.Is(err, errText) {
		return nil, "", nil
	}
	if err != nil {
		return nil, "", err
	}
	if len(out) <= limit {
		return out, "", nil
	}
	last := out[limit-1].Thread
	return out[:limit], last.ID + "\x00" + last.Tenant, nil
}

type interrupts struct{ *Core }

var _ store.Interrupts = interrupts{}

func (c interrupts) Pending(ctx context.Context, t store.Thread) ([]store.Interrupt, error) {
	var out []store.Interrupt
	err := c.read(ctx, func(ctx context.Context, tx Tx) error {
		out = nil
		return c.all(ctx, tx, `SELECT id, run_id, thread_id, tenant, payload, created_at FROM interrupts
 WHERE tenant=$1 AND thread_id=$2 AND status='pending' ORDER BY ord`, []any{t.Tenant, t.ID}, func(r Rows) error {
			i := store.Interrupt{Status: store.InterruptPending}
			var payload []byte
			var at int64
			err := r.Scan(&i.ID, &i.RunID, &i.Thread.ID, &i.Thread.Tenant, &payload, &at)
			if len(payload) > 0 {
				i.Payload = bytes.Clone(payload)
			}
			i.CreatedAt = instant(&at)
			out = append(out, i)
			return err
		})
	})
	if errors.Is(err, errText) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return out, nil
}

func (c interrupts) Put(ctx context.Context, is []store.Interrupt) error {
	return c.write(ctx, func(ctx context.Context, tx Tx) error { return c.putInterrupts(ctx, tx, is) }, nil)
}

func (c *Core) putInterrupts(ctx context.Context, tx Tx, is []store.Interrupt) error {
	for _, i := range is {
		if i.ID == "" || i.RunID == "" || i.Thread.ID == "" {
			return &store.InvalidError{Field: "Interrupt", Reason: "needs ID, RunID and Thread"}
		}
	}
	for _, i := range is {
		if _, err := c.exec(ctx, tx, `INSERT INTO interrupts(run_id, id, thread_id, tenant, payload, status, created_at) VALUES ($1,$2,$3,$4,$5,'pending',{now})
 ON CONFLICT(run_id, id) DO NOTHING`, i.RunID, i.ID, i.Thread.ID, i.Thread.Tenant, blob(i.Payload)); err != nil {
			return err
		}
	}
	return nil
}

func (c interrupts) Resolve(ctx context.Context, t store.Thread, rs []store.Resolution) error {
	return c.once(ctx, func(ctx context.Context, tx Tx) error { return c.resolve(ctx, tx, t, rs) })
}

// resolve answers one after the other; the transaction makes it all or nothing.
func (c *Core) resolve(ctx context.Context, tx Tx, t store.Thread, rs []store.Resolution) error {
	for _, r := range rs {
		if r.Status != store.InterruptResolved && r.Status != store.InterruptCancelled {
			return &store.InvalidError{Field: "Resolution.Status", Reason: strconv.Quote(string(r.Status)) + ": use resolved or cancelled"}
		}
		n, err := c.exec(ctx, tx, `UPDATE interrupts SET status=$5, answer=$6, resolved_at={now} WHERE run_id=$1 AND id=$2 AND thread_id=$3 AND tenant=$4 AND status='pending'`,
			r.RunID, r.ID, t.ID, t.Tenant, string(r.Status), blob(r.Answer))
		if err != nil {
			return missing(err, "interrupt", r.ID)
		}
		if n == 1 {
			continue
		}
		var status string
		found, err := c.one(ctx, tx, `SELECT status FROM interrupts WHERE run_id=$1 AND id=$2 AND thread_id=$3 AND tenant=$4`, []any{r.RunID, r.ID, t.ID, t.Tenant}, &status)
		if err != nil {
			return err
		}
		if !found {
			return notFound("interrupt", r.ID)
		}
		return &store.InterruptError{ID: r.ID, Status: cmp.Or(store.InterruptStatus(status), store.InterruptPending)}
	}
	return nil
}
