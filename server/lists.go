package server

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/store"
)

// The shapes below are those of openapi.yaml. Times are epoch milliseconds.

type runBody struct {
	RunID           string          `json:"runId"`
	ThreadID        string          `json:"threadId"`
	ParentRunID     string          `json:"parentRunId,omitempty"`
	Sandbox         string          `json:"sandbox"` // the definition
	Adapter         string          `json:"adapter"`
	Status          store.Status    `json:"status"`
	StartedAt       int64           `json:"startedAt"`
	FinishedAt      int64           `json:"finishedAt,omitempty"`
	ClosedAt        int64           `json:"closedAt,omitempty"`
	DetachedSince   int64           `json:"detachedSince,omitempty"`
	CancelRequested bool            `json:"cancelRequested,omitempty"`
	CancelReason    string          `json:"cancelReason,omitempty"`
	CloseReason     string          `json:"closeReason,omitempty"`
	Error           *store.RunError `json:"error,omitempty"`
	Usage           []event.Usage   `json:"usage,omitempty"`
	Exit            *exitBody       `json:"exit,omitempty"`
	Events          int64           `json:"events"`
	EventsExpired   bool            `json:"eventsExpired,omitempty"`
	Driver          string          `json:"driver,omitempty"` // the host that holds the lease
	DriverEpoch     uint64          `json:"driverEpoch"`
	SandboxKey      string          `json:"sandboxKey,omitempty"`
	SandboxGen      int64           `json:"sandboxGen,omitempty"`
}

type exitBody struct {
	Code     int  `json:"code"`
	Verified bool `json:"verified"`
}

// detachedAfter is how long nobody must have watched a run for it to count as
// detached: readers are told to the store every 15 s (spec 04 §21.7).
const detachedAfter = 30 * time.Second

func millis(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMilli()
}

func bodyOf(r store.Run) runBody {
	b := runBody{
		RunID: r.ID, ThreadID: r.Thread.ID, ParentRunID: r.ParentRunID, Sandbox: r.Definition, Adapter: r.Adapter,
		Status: r.Status, StartedAt: millis(r.StartedAt), FinishedAt: millis(r.FinishedAt), ClosedAt: millis(r.ClosedAt),
		CancelRequested: !r.CancelAt.IsZero(), CancelReason: r.CancelReason, CloseReason: r.CloseReason,
		Error: r.Error, Usage: r.Usage, Events: r.LastSeq, EventsExpired: r.EventsExpired,
		Driver: r.Owner, DriverEpoch: r.Epoch, SandboxKey: r.SandboxKey, SandboxGen: r.SandboxGen,
	}
	if r.Exit != nil {
		b.Exit = &exitBody{r.Exit.Code, r.Exit.Verified}
	}
	if r.Active() && !r.LastViewedAt.IsZero() && time.Since(r.LastViewedAt) > detachedAfter {
		b.DetachedSince = millis(r.LastViewedAt)
	}
	return b
}

// page reads the query of a list.
func page(c *call) (after string, limit int, err error) {
	q := c.URL.Query()
	if v := q.Get("limit"); v != "" {
		if limit, err = strconv.Atoi(v); err != nil || limit < 1 || limit > 1000 {
			return "", 0, fmt.Errorf("%w (limit)", errQuery)
		}
	}
	return q.Get("after"), limit, nil
}

func (s *Server) listRuns(w http.ResponseWriter, c *call) error {
	after, limit, err := page(c)
	if err != nil {
		return err
	}
	q := store.Query{Tenant: c.who.Tenant, ThreadID: c.URL.Query().Get("threadId"), After: after, Limit: limit}
	for _, v := range c.URL.Query()["status"] {
		st := store.Status(v)
		if !st.Valid() {
			return fmt.Errorf("%w (status)", errQuery)
		}
		q.Status = append(q.Status, st)
	}
	runs, next, err := s.store.Runs.List(c.Context(), q)
	if err != nil {
		return err
	}
	out := struct {
		Runs []runBody `json:"runs"`
		Next string    `json:"next,omitempty"`
	}{[]runBody{}, next}
	for _, r := range runs {
		if s.allowed(c, r.Thread) {
			out.Runs = append(out.Runs, bodyOf(r))
		}
	}
	writeJSON(w, http.StatusOK, out)
	return nil
}

func (s *Server) getRun(w http.ResponseWriter, c *call) error {
	rec, err := s.visible(c)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, bodyOf(rec))
	return nil
}

// visible is the run of the path, if the caller may see it.
func (s *Server) visible(c *call) (store.Run, error) {
	rec, err := s.run(c, c.PathValue("id"))
	if err == nil && !s.allowed(c, rec.Thread) {
		err = errForbidden
	}
	return rec, err
}

const (
	eventsPage    = 1000
	maxEventsPage = 10000
)

// getEvents is a piece of a log, as it is now: it waits for nothing. What follows
// is read from the id of the last line on.
func (s *Server) getEvents(w http.ResponseWriter, c *call) error {
	limit := eventsPage
	if v := c.URL.Query().Get("limit"); v != "" {
		var err error
		if limit, err = strconv.Atoi(v); err != nil || limit < 1 || limit > maxEventsPage {
			return fmt.Errorf("%w (limit)", errQuery)
		}
	}
	after, _, err := event.RequestOffset(c.Request)
	if err != nil {
		return fmt.Errorf("%w (%w)", errOffset, err)
	}
	rec, err := s.visible(c)
	if err != nil {
		return err
	}
	if rec.EventsExpired {
		return s.expired(rec, &store.OffsetError{RunID: rec.ID, Offset: after, Reason: store.OffsetExpired})
	}
	var buf []byte
	begin := func() {
		w.Header().Set("Content-Type", "application/x-ndjson")
		w.Header().Set("Cache-Control", "no-store")
	}
	// A log that may grow has no end to read to. Offsets are opaque, so the one
	// that was given is looked for, up to what was stored when the request came.
	from, skip, left := after, false, rec.LastSeq
	if after == event.OnlyNew {
		begin()
		w.WriteHeader(http.StatusOK)
		return nil
	}
	if rec.Active() && after != event.FromStart {
		from, skip = event.FromStart, true
	}
	sent := 0
	if left > 0 || !rec.Active() {
		for e, err := range s.store.Log.Read(c.Context(), rec.ID, from) {
			if err != nil {
				if sent == 0 {
					return err
				}
				return errors.Join(http.ErrAbortHandler, err)
			}
			left--
			switch {
			case skip:
				skip = e.Offset != after
			default:
				if sent == 0 {
					begin()
				}
				if buf, err = event.AppendNDJSON(buf[:0], e); err != nil {
					return errors.Join(http.ErrAbortHandler, err)
				}
				_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(s.cfg.Limits.WriteTime))
				if _, err := w.Write(buf); err != nil {
					return nil // the reader left
				}
				sent++
			}
			if sent == limit || rec.Active() && left <= 0 {
				break
			}
		}
	}
	if skip {
		return &store.OffsetError{RunID: rec.ID, Offset: after, Reason: store.OffsetInvalid}
	}
	if sent == 0 {
		begin()
		w.WriteHeader(http.StatusOK)
	}
	return nil
}

type threadBody struct {
	ThreadID  string `json:"threadId"`
	Messages  int    `json:"messages"`
	UpdatedAt int64  `json:"updatedAt"`
}

func (s *Server) listThreads(w http.ResponseWriter, c *call) error {
	after, limit, err := page(c)
	if err != nil {
		return err
	}
	out := struct {
		Threads []threadBody `json:"threads"`
		Next    string       `json:"next,omitempty"`
	}{Threads: []threadBody{}}
	if s.store.Messages != nil {
		ts, next, err := s.store.Messages.Threads(c.Context(), store.ThreadQuery{Tenant: c.who.Tenant, After: after, Limit: limit})
		if err != nil {
			return err
		}
		out.Next = next
		for _, t := range ts {
			if s.allowed(c, t.Thread) {
				out.Threads = append(out.Threads, threadBody{t.Thread.ID, t.Messages, millis(t.UpdatedAt)})
			}
		}
	}
	writeJSON(w, http.StatusOK, out)
	return nil
}

func (s *Server) getThread(w http.ResponseWriter, c *call) error {
	t := store.Thread{Tenant: c.who.Tenant, ID: c.PathValue("id")}
	if !s.allowed(c, t) {
		return errForbidden
	}
	h, err := s.hydration(c.Context(), t, "")
	if err != nil {
		return err
	}
	if len(h.Messages) == 0 && h.ActiveRun == nil {
		runs, _, err := s.store.Runs.List(c.Context(), store.Query{Tenant: t.Tenant, ThreadID: t.ID, Limit: 1})
		if err != nil {
			return err
		}
		if len(runs) == 0 {
			return errUnknown
		}
	}
	writeJSON(w, http.StatusOK, struct {
		ThreadID string `json:"threadId"`
		hydrated
	}{t.ID, h})
	return nil
}

type instanceBody struct {
	Key         string              `json:"key"`
	Gen         int64               `json:"gen"`
	Provider    string              `json:"provider"`
	State       store.InstanceState `json:"state"`
	Desired     store.Desired       `json:"desired"`
	ThreadID    string              `json:"threadId,omitempty"`
	LatestRunID string              `json:"latestRunId,omitempty"`
	SnapshotID  string              `json:"snapshotId,omitempty"`
	CreatedAt   int64               `json:"createdAt"`
	LastUsedAt  int64               `json:"lastUsedAt"`
	KeepUntil   int64               `json:"keepUntil,omitempty"`
	Attempts    int                 `json:"attempts,omitempty"`
	LastError   string              `json:"lastError,omitempty"`
}

func (s *Server) listInstances(w http.ResponseWriter, c *call) error {
	if s.store.Instances == nil {
		return errNoInstances
	}
	after, limit, err := page(c)
	if err != nil {
		return err
	}
	q := store.InstanceQuery{Tenant: c.who.Tenant, ThreadID: c.URL.Query().Get("threadId"), After: after, Limit: limit}
	is, next, err := s.store.Instances.List(c.Context(), q)
	if err != nil {
		return err
	}
	out := struct {
		Instances []instanceBody `json:"instances"`
		Next      string         `json:"next,omitempty"`
	}{[]instanceBody{}, next}
	for _, i := range is { // never Ref: how to reach a sandbox is the provider's secret
		if i.ThreadID != "" && !s.allowed(c, store.Thread{Tenant: i.Tenant, ID: i.ThreadID}) {
			continue
		}
		desired := i.Desired
		if desired == "" {
			desired = store.DesiredReady
		}
		out.Instances = append(out.Instances, instanceBody{
			Key: i.Key, Gen: i.Gen, Provider: i.Provider, State: i.State, Desired: desired, ThreadID: i.ThreadID,
			LatestRunID: i.LatestRunID, SnapshotID: i.SnapshotID, CreatedAt: millis(i.CreatedAt), LastUsedAt: millis(i.LastUsedAt),
			KeepUntil: millis(i.KeepUntil), Attempts: i.Attempts, LastError: i.LastError,
		})
	}
	writeJSON(w, http.StatusOK, out)
	return nil
}

func (s *Server) getMetrics(w http.ResponseWriter, c *call) error {
	s.metrics.handler.ServeHTTP(w, c.Request)
	return nil
}

// healthz says that the process answers. It asks nobody, so that an outage of the
// store doesn't get every host restarted.
func (s *Server) healthz(w http.ResponseWriter, _ *call) error {
	writeJSON(w, http.StatusOK, map[string]string{"status": "ok"})
	return nil
}

// readyz says whether new runs are welcome here.
func (s *Server) readyz(w http.ResponseWriter, c *call) error {
	s.mu.Lock()
	down := s.down
	s.mu.Unlock()
	if down {
		return errShutdown
	}
	ctx, stop := context.WithTimeout(c.Context(), 2*time.Second)
	defer stop()
	if _, _, err := s.store.Runs.List(ctx, store.Query{Limit: 1}); err != nil {
		return fmt.Errorf("%w: %w", &problem{503, "store_unavailable", "the store can't be reached now", false}, err)
	}
	return s.healthz(w, c)
}
