package server

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"

	"github.com/aisandbox-go/aisandbox/chat"
	"github.com/aisandbox-go/aisandbox/store"
)

// InputError is a request that the definition can't run. Its text goes to the
// client.
type InputError struct {
	Field  string // of the body, "forwardedProps.model"
	Reason string // what is wrong and what to do about it
}

func (e *InputError) Error() string { return e.Field + ": " + e.Reason }

// Code is "invalid_input".
func (e *InputError) Code() string { return "invalid_input" }

// problem is an error that is an answer: a status, a code and a text for the
// client. Where plain is set the text is the whole body, as the wire fixes it.
type problem struct {
	status     int
	code, text string
	plain      bool
}

func (p *problem) Error() string { return "server: " + p.text }

// Code is stable.
func (p *problem) Code() string { return p.code }

// What the server itself refuses.
var (
	errInternal     = &problem{500, "internal", "internal error", false}
	errUnauthorized = &problem{401, "unauthorized", "a valid bearer key is required", false}
	errNoKeys       = &problem{403, "loopback_only", "this server has no keys configured, so it serves loopback connections only", false}
	errForbidden    = &problem{403, "forbidden", "Forbidden", false}
	errThread       = &problem{403, "thread_mismatch", "the run belongs to another thread", false}
	errHost         = &problem{403, "host_not_allowed", "the Host header names neither loopback, nor an address, nor a configured host", false}
	errOrigin       = &problem{403, "origin_not_allowed", "pages of this origin may not call the server", false}
	errHeaders      = &problem{431, "headers_too_large", "the request's headers are too large", false}
	errMedia        = &problem{415, "unsupported_media_type", "send Content-Type: application/json", false}
	errTooLarge     = &problem{413, "body_too_large", "the request body is too large", false}
	errRoute        = &problem{404, "not_found", "no such route", false}
	errNoDefinition = &problem{404, "unknown_sandbox", "no sandbox of this name is defined", false}
	errUnknownRun   = &problem{404, "unknown_run", "no such run", false}
	errUnknown      = &problem{404, "not_found", "not found", false}
	errMethod       = &problem{405, "method_not_allowed", "the route doesn't know this method", false}
	errRunMismatch  = &problem{400, "run_id_mismatch", "X-Run-Id, ?runId and the body's runId name different runs", false}
	errNoRunID      = &problem{400, "run_id_required", "name the run: X-Run-Id header or ?runId", false}
	errOffset       = &problem{400, "offset_invalid", "the offset is not one of this run's", false}
	errQuery        = &problem{400, "invalid_query", "a query parameter has no valid value", false}
	errCancel       = &problem{400, "invalid_input", "the body must name a threadId or a runId, as a string", false}
	errShutdown     = &problem{503, "shutdown", "this host is shutting down", false}
	errRuns         = &problem{503, "overloaded", "this host drives as many runs as it may", false}
	errReaders      = &problem{503, "overloaded", "this host serves as many streams as it may", false}
	errNoInstances  = &problem{501, "not_configured", "this server keeps no list of sandboxes", false}

	errBody = &problem{400, "invalid_body",
		"Invalid AG-UI request body. See docs/migration/ag-ui-compliance.md.", true}
	errNoOffset = &problem{400, "offset_required",
		"No resume offset provided (expected a Last-Event-ID header or an ?offset query parameter).", true}
)

// answer maps an error to what the client gets: the HTTP status, the stable code,
// which is the AG-UI code too, and a text that gives nothing away. It is the only
// place that does (spec 04 §19).
func answer(err error) *problem {
	var (
		p     *problem
		in    *InputError
		busy  *store.BusyError
		off   *store.OffsetError
		large *http.MaxBytesError
	)
	code := store.Code(err, "internal")
	switch {
	case errors.As(err, &p):
		return p
	case errors.As(err, &in):
		return &problem{400, code, in.Error(), false}
	case errors.As(err, &large):
		return errTooLarge
	case errors.As(err, &busy):
		return &problem{409, code, "the thread is busy", false}
	case errors.As(err, &off):
		switch off.Reason {
		case store.OffsetExpired:
			return &problem{410, code, "the events of this run have aged out; read the thread instead", false}
		case store.OffsetRewound:
			return &problem{410, code, "the log ends before this offset; read the thread instead", false}
		}
		return &problem{400, code, errOffset.text, false}
	case errors.Is(err, store.ErrNotFound):
		return &problem{404, code, "not found", false}
	case errors.Is(err, store.ErrFenced), errors.Is(err, store.ErrSealed), errors.Is(err, store.ErrConflict):
		return &problem{409, code, "the state doesn't allow it", false}
	case errors.Is(err, store.ErrUnavailable), errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return &problem{503, store.Code(err, "store_unavailable"), "the store can't be reached now", false}
	case errors.Is(err, chat.ErrDurableRunIDRequired), errors.Is(err, chat.ErrDurableThreadIDRequired):
		return &problem{400, code, "runId and threadId are required", false}
	}
	// What a definition got wrong is for the log; its code may be of help.
	return &problem{500, code, errInternal.text, false}
}

// fail answers a request with an error, and logs what the client isn't told.
func (s *Server) fail(w http.ResponseWriter, r *http.Request, log *slog.Logger, err error) {
	p := answer(err)
	level := slog.LevelInfo
	if p.status >= 500 {
		level = slog.LevelError
	}
	log.Log(r.Context(), level, "refused", "status", p.status, "code", p.code, "error", err)
	h := w.Header()
	h.Set("Cache-Control", "no-store")
	switch p.status {
	case http.StatusUnauthorized:
		h.Set("WWW-Authenticate", `Bearer realm="aisandbox"`)
	case http.StatusServiceUnavailable:
		h.Set("Retry-After", "1")
	}
	if p.plain {
		h.Set("Content-Type", "text/plain;charset=UTF-8")
		w.WriteHeader(p.status)
		_, _ = w.Write([]byte(p.text))
		return
	}
	body := errorBody{Error: errorInfo{Code: p.code, Message: p.text}}
	var busy *store.BusyError
	if errors.As(err, &busy) {
		body.Error.RunID = busy.RunID
	}
	var off *expiredError
	if errors.As(err, &off) {
		body.Transcript = off.transcript
	}
	writeJSON(w, p.status, body)
}

type errorBody struct {
	Error      errorInfo `json:"error"`
	Transcript string    `json:"transcript,omitempty"` // where to read the thread of a run whose log is gone
}

type errorInfo struct {
	Code    string `json:"code"`
	Message string `json:"message"`
	RunID   string `json:"runId,omitempty"` // the run that keeps the thread busy
}

// expiredError is an offset that can't be served any more, with what can.
type expiredError struct {
	error
	transcript string
}

func (e *expiredError) Unwrap() error { return e.error }

func writeJSON(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	if w.Header().Get("Cache-Control") == "" {
		w.Header().Set("Cache-Control", "no-store")
	}
	w.WriteHeader(status)
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	_ = enc.Encode(v) // the reader left, and there is nobody to tell
}
