// Package server is the HTTP face of durable runs: one [http.Handler] that starts
// runs, lets clients come back to them, cancels and lists them (spec 07 §10-§12,
// spec 04 §18). openapi.yaml describes its routes.
//
// A response is only ever a reader of a run's log. Closing it ends the read and
// nothing else: the agent goes on, and whoever comes back with the id of the last
// event gets what follows. What ends a run early is its cancel route.
//
// The package knows neither agents nor backends. A [Definition] turns a request
// into a [chat.Request].
package server

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/aisandbox-go/aisandbox/chat"
	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/store"
)

// Busy says what becomes of a new run whose thread has a running one.
type Busy string

// What becomes of it; the empty one is BusyQueue.
const (
	BusyQueue     Busy = "queue"     // it waits for its turn, in order
	BusyReject    Busy = "reject"    // it is refused: 409 thread_busy
	BusySupersede Busy = "supersede" // it cancels the ones before it and then starts
)

// DefaultQueueDepth is how many runs of a thread may wait.
const DefaultQueueDepth = 8

// Definition is one chat endpoint, /v1/chat/{name}.
type Definition struct {
	// Request builds a run: the adapter, its middleware and options. Ids, tenant,
	// user, definition and input are set by the server afterwards, and Messages
	// where it left them nil. In front of what Use has, the server puts the
	// durability of Config.Store, the wait for the thread's turn, and, each unless
	// Use provides it already, chat.Locks, sandbox.InstancesToken and chat.Persist.
	//
	// It must have no effect of its own: it is also called for a run that turns out
	// to exist, and on another host that takes the run over. An [*InputError] is
	// the client's fault (400); any other error is the server's (500).
	Request func(ctx context.Context, in RunInput) (chat.Request, error)

	Busy       Busy
	QueueDepth int // of BusyQueue; 0: DefaultQueueDepth
}

// Config is what a server needs. Definitions and Store are required.
type Config struct {
	Definitions map[string]Definition

	// Store needs Runs and Log. Without Messages nothing is remembered of a thread
	// but its runs; without Instances there is no list of sandboxes.
	Store store.Set

	// Keys are the callers. Without any, and without Authenticate, everybody is the
	// empty tenant, and only connections to a loopback address are served.
	Keys []Key

	// Authenticate takes the place of Keys. An error is 401; its text goes to the
	// log alone.
	Authenticate func(r *http.Request) (Principal, error)

	// Authorize, where it is set, says whether a caller may see a thread of its
	// tenant and start runs on it. No is 403.
	Authorize func(ctx context.Context, p Principal, t store.Thread) bool

	// Hosts are the names by which the server is reached, without a port. Loopback
	// names and IP addresses always are; a request for any other name is refused,
	// so that no foreign page can point its own name here.
	Hosts []string

	// Origins are the web origins ("https://app.example.com") whose pages may call
	// the server. Its own always may.
	Origins []string

	Limits    Limits
	Heartbeat time.Duration // of streams with nothing to say; 0: event.Heartbeat
	Owner     string        // this host's name in claims; empty: made up
	Lease     time.Duration // of claims; 0: store.DefaultLease
	Logger    *slog.Logger  // nil discards

	// Keeper and Presence are those of the program around the server, if it drives
	// or reads runs of Store too; nil: the server's own.
	Keeper   *chat.Keeper
	Presence *chat.Presence
}

// Limits bound what callers can make the server hold. A zero field has its default.
type Limits struct {
	Body      int64         // bytes of a request body; 8 MiB
	Header    int           // bytes of a request's headers; 32 KiB
	Runs      int           // runs that this host drives at once, waiting ones included; 1024
	Readers   int           // streams at once; 16384
	BodyTime  time.Duration // for a client to send its body; 30 s
	WriteTime time.Duration // for a client to accept a frame; 1 min
}

func (l Limits) withDefaults() Limits {
	return Limits{
		Body: cmp.Or(l.Body, 8<<20), Header: cmp.Or(l.Header, 32<<10),
		Runs: cmp.Or(l.Runs, 1024), Readers: cmp.Or(l.Readers, 16384),
		BodyTime: cmp.Or(l.BodyTime, 30*time.Second), WriteTime: cmp.Or(l.WriteTime, time.Minute),
	}
}

// Server is the handler. Shutdown must be called, also where nothing was served.
type Server struct {
	cfg     Config
	log     *slog.Logger
	store   store.Set
	keys    []hashedKey
	handler http.Handler
	stream  event.ServeOptions
	metrics *metrics

	// stop ends the readers and the background; closing refuses new runs first.
	stopped context.Context
	stop    context.CancelFunc
	closing chan struct{}
	aside   sync.WaitGroup

	mu      sync.Mutex
	down    bool
	starts  int                      // being started now
	live    map[string]*chat.Run     // driven here
	reading int                      // streams
	lines   map[store.Thread]*waiter // threads with runs that wait here
}

var _ http.Handler = (*Server)(nil)

// New checks cfg and returns a server, which works at once.
func New(cfg Config) (*Server, error) {
	if cfg.Store.Runs == nil || cfg.Store.Log == nil {
		return nil, errors.New("server: Config.Store: Runs or Log is missing: a server's runs are durable, so set both, of one store")
	}
	if len(cfg.Definitions) == 0 {
		return nil, errors.New("server: Config.Definitions: is empty: define what a request shall run")
	}
	for name, d := range cfg.Definitions {
		switch {
		case !validName(name):
			return nil, fmt.Errorf("server: Config.Definitions: %q: use letters, digits, '.', '_' and '-', and begin with a letter or digit", name)
		case d.Request == nil:
			return nil, fmt.Errorf("server: definition %q: Request is missing", name)
		case d.QueueDepth < 0:
			return nil, fmt.Errorf("server: definition %q: QueueDepth is negative: use busy %q to let nothing wait", name, BusyReject)
		case !slices.Contains([]Busy{"", BusyQueue, BusyReject, BusySupersede}, d.Busy):
			return nil, fmt.Errorf("server: definition %q: Busy is %q: use %s, %s or %s", name, d.Busy, BusyQueue, BusyReject, BusySupersede)
		}
	}
	keys, err := hashKeys(cfg.Keys)
	if err != nil {
		return nil, err
	}
	if err := checkOrigins(cfg.Origins); err != nil {
		return nil, err
	}
	l := cfg.Limits
	if l.Body < 0 || l.Header < 0 || l.Runs < 0 || l.Readers < 0 || l.BodyTime < 0 || l.WriteTime < 0 || cfg.Heartbeat < 0 || cfg.Lease < 0 {
		return nil, errors.New("server: Config: a limit is negative: use 0 for its default")
	}
	cfg.Limits = l.withDefaults()
	cfg.Owner = cmp.Or(cfg.Owner, "server-"+rand.Text())
	if cfg.Keeper == nil {
		cfg.Keeper = chat.NewKeeper(cfg.Store.Runs, chat.KeeperOptions{Lease: cfg.Lease, Logger: cfg.Logger})
	}
	if cfg.Presence == nil {
		cfg.Presence = chat.NewPresence(cfg.Store.Runs, cfg.Logger)
	}
	s := &Server{
		cfg: cfg, log: cfg.Logger, keys: keys, closing: make(chan struct{}),
		stream: event.ServeOptions{Heartbeat: cfg.Heartbeat, WriteTime: cfg.Limits.WriteTime},
		live:   map[string]*chat.Run{},
		lines:  map[store.Thread]*waiter{},
	}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	s.metrics = newMetrics(s)
	s.store = cfg.Store
	s.store.Log = &timedLog{cfg.Store.Log, s.metrics}
	s.stopped, s.stop = context.WithCancel(context.Background())
	s.handler = s.routes()
	return s, nil
}

func validName(s string) bool {
	for i, c := range s {
		word := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
		if !word && (i == 0 || !strings.ContainsRune("._-", c)) {
			return false
		}
	}
	return s != "" && len(s) <= 64
}

// ServeHTTP serves the routes of openapi.yaml.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) { s.handler.ServeHTTP(w, r) }

// HTTPServer returns a server for the handler whose time limits fit its streams:
// requests are bounded, responses are not.
func (s *Server) HTTPServer() *http.Server {
	return &http.Server{
		Handler:           s,
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    s.cfg.Limits.Header,
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}
}

// Shutdown stops the server for good: new runs are refused with 503, those that
// this host drives are left to others (their agents go on), and then the streams
// are cut, so that their clients come back elsewhere. It returns when everything
// has ended, or ctx's cause. It may be called again. An http.Server that serves
// the handler is to be shut down afterwards.
func (s *Server) Shutdown(ctx context.Context) error {
	s.mu.Lock()
	if !s.down {
		s.down = true
		close(s.closing)
	}
	s.mu.Unlock()
	defer s.stop()

	// A request that is just being started ends up among the live ones.
	for {
		s.mu.Lock()
		starts, runs := s.starts, make([]*chat.Run, 0, len(s.live))
		for _, r := range s.live {
			runs = append(runs, r)
		}
		s.mu.Unlock()
		for _, r := range runs {
			r.Detach(chat.ErrShutdown)
		}
		for _, r := range runs {
			if _, err := r.Wait(ctx); err != nil {
				return fmt.Errorf("server: shutdown: run %q is still being driven: %w", r.ID(), err)
			}
		}
		if len(runs) == 0 && starts == 0 {
			break
		}
		t := time.NewTimer(5 * time.Millisecond)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return fmt.Errorf("server: shutdown: %w", context.Cause(ctx))
		}
	}
	s.stop()
	gone := make(chan struct{})
	go func() { s.aside.Wait(); close(gone) }()
	select {
	case <-gone:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("server: shutdown: %w", context.Cause(ctx))
	}
}

// opTime bounds one call to a store that no request waits for.
const opTime = 10 * time.Second
