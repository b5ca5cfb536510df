package modeltest

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// MaxRequestBytes bounds the body of a request; a longer one gets status 413.
const MaxRequestBytes = 32 << 20

// maxSessions bounds the positions kept for Script.SessionHeader.
const maxSessions = 10_000

// Options adjust a [Model]. The zero value works.
type Options struct {
	// IDPrefix starts the unique part of generated message, request and tool
	// call ids. Empty chooses one at random, so that ids stay unique although
	// a conversation goes on with another model; set it for golden files.
	IDPrefix string
	// MaxRequests and MaxRecordBytes bound what Requests returns: the newest
	// requests are kept. 0 means 1000 requests and 256 MiB of bodies.
	MaxRequests    int
	MaxRecordBytes int
	// MaxConcurrent bounds the requests served at a time; more get status 529.
	// 0 means 256.
	MaxConcurrent int
	// Logger gets one line per request, without content and headers. Nil
	// discards.
	Logger *slog.Logger
}

// Model is an http.Handler that answers as a script says. It serves POST
// /v1/messages and /v1/messages/count_tokens, and answers everything else with
// 200 and {}, HEAD without a body. It is safe for concurrent use; turns are
// taken in the order in which requests have arrived completely.
type Model struct {
	name     string
	header   string
	queues   map[string]*queue
	routes   []route
	captures map[string]capture
	prefix   string
	log      *slog.Logger
	slots    chan struct{}
	record   record
	requests atomic.Int64
	ids      atomic.Int64

	mu       sync.Mutex
	sessions map[string]map[*queue]*cursor
}

type queue struct {
	name  string
	turns []Turn
	after After
}

type route struct {
	when matcher
	use  *queue
}

// cursor is the position of one session in one queue.
type cursor struct {
	turn   int         // index of the next turn
	served int         // how often that turn was served already
	total  int         // requests answered from the queue
	rounds map[int]int // how often each turn was served
}

// New returns a model that serves s. The error is the one of [Script.Validate].
// The script's slices and maps must not be changed afterwards.
func New(s Script, opts Options) (*Model, error) {
	if err := s.Validate(); err != nil {
		return nil, err
	}
	m := &Model{
		name:     s.Name,
		header:   s.SessionHeader,
		queues:   map[string]*queue{defaultQueue: {name: defaultQueue, turns: s.Turns, after: s.After}},
		captures: map[string]capture{},
		prefix:   opts.IDPrefix,
		log:      opts.Logger,
		slots:    make(chan struct{}, positive(opts.MaxConcurrent, 256)),
		record:   record{maxCount: positive(opts.MaxRequests, 1000), maxBytes: positive(opts.MaxRecordBytes, 256<<20)},
		sessions: map[string]map[*queue]*cursor{},
	}
	if m.name == "" {
		m.name = "unnamed"
	}
	if m.prefix == "" {
		var b [5]byte
		rand.Read(b[:]) // never fails
		m.prefix = hex.EncodeToString(b[:])
	}
	if m.log == nil {
		m.log = slog.New(slog.DiscardHandler)
	}
	for name, q := range s.Queues {
		m.queues[name] = &queue{name: name, turns: q.Turns, after: q.After}
	}
	for _, r := range s.Routes {
		m.routes = append(m.routes, route{when: compileWhen(r.When), use: m.queues[r.Use]})
	}
	for name, c := range s.Capture {
		m.captures[name] = compileCapture(c)
	}
	return m, nil
}

func positive(n, otherwise int) int {
	if n > 0 {
		return n
	}
	return otherwise
}

// Requests returns the recorded requests, oldest first. Their headers, bodies
// and messages are shared: read only.
func (m *Model) Requests() []Request { return m.record.all() }

// ServeHTTP implements http.Handler. To cut a connection it panics with
// http.ErrAbortHandler, as net/http wants it.
func (m *Model) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	select {
	case m.slots <- struct{}{}:
		defer func() { <-m.slots }()
	default:
		m.refuse(w, anthropic{}, 529, fmt.Sprintf("more than %d requests at a time", cap(m.slots)))
		return
	}
	q := Request{Number: int(m.requests.Add(1)), Method: r.Method, URL: r.RequestURI, Header: r.Header.Clone(), Turn: -1}
	rc := http.NewResponseController(w)
	_ = rc.SetReadDeadline(time.Now().Add(time.Minute)) // not every ResponseWriter can
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, MaxRequestBytes))
	_ = rc.SetReadDeadline(time.Time{})
	q.Body = body
	if err != nil {
		m.record.add(q)
		var tooLarge *http.MaxBytesError
		if errors.As(err, &tooLarge) {
			m.refuse(w, anthropic{}, http.StatusRequestEntityTooLarge, fmt.Sprintf("the request is larger than %d bytes", MaxRequestBytes))
			return
		}
		m.refuse(w, anthropic{}, http.StatusBadRequest, "the request body could not be read")
		return
	}
	path := strings.TrimRight(r.URL.Path, "/")
	switch {
	case r.Method == http.MethodPost && path == "/v1/messages":
		m.answer(w, r, anthropic{}, q)
		return
	case r.Method == http.MethodPost && path == "/v1/messages/count_tokens":
		m.record.add(q)
		writeJSON(w, http.StatusOK, `{"input_tokens":10}`)
	default:
		m.record.add(q)
		if r.Method != http.MethodHead {
			writeJSON(w, http.StatusOK, "{}")
		}
	}
	m.log.Debug("model request", "number", q.Number, "method", q.Method, "path", path)
}

// answer serves the next turn for a request that wants a message.
func (m *Model) answer(w http.ResponseWriter, r *http.Request, d dialect, q Request) {
	if e := r.Header.Get("Content-Encoding"); e != "" && e != "identity" {
		m.record.add(q)
		m.refuse(w, d, http.StatusUnsupportedMediaType, fmt.Sprintf("the mock model reads no %s bodies", e))
		return
	}
	v, err := d.parse(&q)
	if err != nil {
		m.record.add(q)
		m.refuse(w, d, http.StatusBadRequest, "the request is not valid: "+err.Error())
		return
	}
	v.number, v.header, v.body = q.Number, r.Header, string(q.Body)
	t, round, err := m.take(v, &q)
	m.record.add(q)
	if err != nil {
		m.refuse(w, d, http.StatusBadRequest, fmt.Sprintf("mock model: script %q: %v", m.name, err))
		return
	}
	m.log.Debug("model request", "number", q.Number, "queue", q.Queue, "turn", q.Turn, "stream", v.stream)
	ctx := r.Context()
	if t.NoAnswer {
		hang(ctx)
	}
	if !pause(ctx, t.Wait) {
		return
	}
	requestID := m.newID("req_")
	for name, value := range t.Headers {
		w.Header().Set(name, value)
	}
	w.Header().Set("Request-Id", requestID)
	if t.Status != 0 {
		m.fail(w, d, t, requestID)
		return
	}
	a, err := render(t, round, v, m.captures, m.newID)
	if err != nil {
		m.refuse(w, d, http.StatusBadRequest, fmt.Sprintf("mock model: script %q: queue %q: turn %d: %v", m.name, q.Queue, q.Turn, err))
		return
	}
	a.messageID, a.requestID = m.newID("msg_"), requestID
	if v.stream {
		s := newStream(ctx, w, t)
		d.stream(s, a)
		return
	}
	m.whole(ctx, w, d, a)
}

// whole answers without streaming. What would go wrong in the stream goes wrong
// with the one answer.
func (m *Model) whole(ctx context.Context, w http.ResponseWriter, d dialect, a *answer) {
	t := a.turn
	text := d.whole(a)
	switch {
	case t.Cut != nil:
		panic(http.ErrAbortHandler)
	case t.Hang != nil:
		hang(ctx)
	case t.Error != nil:
		typ := t.Error.Type
		if typ == "" {
			typ = d.errorType(http.StatusInternalServerError)
		}
		writeJSON(w, d.errorStatus(typ), d.failure(typ, t.Error.message(), a.requestID))
	case t.Malformed != nil:
		writeJSON(w, http.StatusOK, text[:len(text)/2])
	default:
		writeJSON(w, http.StatusOK, text)
	}
}

// fail answers with the HTTP error of t.
func (m *Model) fail(w http.ResponseWriter, d dialect, t *Turn, requestID string) {
	if text, ok := t.Body.(string); ok {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.WriteHeader(t.Status)
		_, _ = io.WriteString(w, text)
		return
	}
	if t.Body != nil {
		text, err := compactJSON(t.Body)
		if err != nil { // Validate has encoded it once
			m.refuse(w, d, http.StatusInternalServerError, err.Error())
			return
		}
		writeJSON(w, t.Status, text)
		return
	}
	f := Failure{}
	if t.Error != nil {
		f = *t.Error
	}
	if f.Type == "" {
		f.Type = d.errorType(t.Status)
	}
	writeJSON(w, t.Status, d.failure(f.Type, f.message(), requestID))
}

func (f Failure) message() string {
	if f.Message != "" {
		return f.Message
	}
	return "an error that the script asked for"
}

// refuse answers with an error that is not scripted.
func (m *Model) refuse(w http.ResponseWriter, d dialect, status int, message string) {
	m.log.Warn("model request refused", "status", status, "message", message)
	id := m.newID("req_")
	w.Header().Set("Request-Id", id)
	writeJSON(w, status, d.failure(d.errorType(status), message, id))
}

func writeJSON(w http.ResponseWriter, status int, text string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = io.WriteString(w, text) // the client may be gone
}

func (m *Model) newID(kind string) string {
	return fmt.Sprintf("%s%s_%d", kind, m.prefix, m.ids.Add(1))
}

// take chooses the queue and moves its cursor. round is how often the turn has
// been served with this one. It notes the choice in q.
func (m *Model) take(v *view, q *Request) (t *Turn, round int, err error) {
	use := m.queues[defaultQueue]
	for _, r := range m.routes {
		if r.when.match(v) {
			use = r.use
			break
		}
	}
	q.Queue = use.name
	if len(use.turns) == 0 {
		return nil, 0, errors.New("no route matches the request, and there are no turns for the rest")
	}
	session := ""
	if m.header != "" {
		session = v.header.Get(m.header)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	cursors := m.sessions[session]
	if cursors == nil {
		if len(m.sessions) >= maxSessions {
			return nil, 0, fmt.Errorf("more than %d values of the session header", maxSessions)
		}
		cursors = map[*queue]*cursor{}
		m.sessions[session] = cursors
	}
	c := cursors[use]
	if c == nil {
		c = &cursor{rounds: map[int]int{}}
		cursors[use] = c
	}
	if c.turn == len(use.turns) {
		if use.after != AfterRepeatLast {
			return nil, 0, fmt.Errorf("queue %q has no turn left after %d requests; add turns or write after: repeat-last", use.name, c.total)
		}
		c.turn--
	}
	i := c.turn
	t = &use.turns[i]
	c.total++
	c.rounds[i]++
	if c.served++; c.served >= max(1, t.Times) {
		c.turn, c.served = i+1, 0
	}
	q.Turn = i
	return t, c.rounds[i], nil
}

// hang waits until the client has gone or the server ends. A plain return would
// make net/http finish the answer in the latter case.
func hang(ctx context.Context) {
	<-ctx.Done()
	panic(http.ErrAbortHandler)
}

// pause waits for d; it reports false if ctx ended first.
func pause(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return ctx.Err() == nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
