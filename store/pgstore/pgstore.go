// Package pgstore keeps everything of package store in PostgreSQL (14 or newer). It is for
// servers of several processes, and answers as sqlitestore does.
//
// What another process appends reaches a reader here by LISTEN and NOTIFY, within
// some 10 ms; where a notification is lost, or the connection that listens, within
// 2 s. Notifications never travel in the transaction of an append, which would
// make all appends wait for each other.
//
// A transaction whose answer was lost is repeated where that is safe: appends and
// ends of runs above all, by their batch number. A claim isn't: ErrUnavailable then
// means that the lease may be the caller's, which claims again with Force.
//
// The URL must lead to the primary, and the listening connection past a pooler of
// transactions. With asynchronous replication a failover may lose what was
// acknowledged: use a synchronous standby, or know that a client can hold an
// offset that the log lost (it is told so: "log_rewound").
package pgstore

import (
	"context"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/aisandbox-go/aisandbox/internal/storesql"
	"github.com/aisandbox-go/aisandbox/store"
)

// Options of a store.
type Options struct {
	Conns   int           // connections of the pool; 0: 16. One more listens
	Timeout time.Duration // of one try of one transaction; 0: 5 s
	Logger  *slog.Logger  // hears of lost connections; nil: nobody does

	// ListenURL is for the connection that listens, where URL leads to a pooler of
	// transactions. Empty: the same.
	ListenURL string

	mutant string // tests: the check that it goes without
}

// Store is a connected store. It offers every contract, in one transaction domain.
type Store struct {
	store.Set
	core   *storesql.Core
	engine *engine
	close  func() error
}

var _ store.Retainer = (*Store)(nil)

// Open connects, and brings the tables up to date; processes that start at once
// wait for each other. Ctx bounds the opening alone. Whoever opens it closes it.
func Open(ctx context.Context, url string, o Options) (*Store, error) {
	if o.Conns <= 0 {
		o.Conns = 16
	}
	if o.Timeout <= 0 {
		o.Timeout = 5 * time.Second
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, &store.InvalidError{Field: "database", Reason: "is no PostgreSQL URL: " + err.Error()}
	}
	cfg.MaxConns = int32(min(o.Conns, 1000))
	cfg.ConnConfig.ConnectTimeout = o.Timeout
	cfg.ConnConfig.DialFunc = dial(cfg.ConnConfig.DialFunc, o.Timeout)
	params := cfg.ConnConfig.RuntimeParams
	params["application_name"] = "aisandbox"
	params["statement_timeout"] = ms(o.Timeout)
	params["idle_in_transaction_session_timeout"] = ms(o.Timeout)
	params["TimeZone"] = "UTC"
	listen := cfg.ConnConfig.Copy()
	if o.ListenURL != "" {
		l, err := pgxpool.ParseConfig(o.ListenURL)
		if err != nil {
			return nil, &store.InvalidError{Field: "Options.ListenURL", Reason: "is no PostgreSQL URL: " + err.Error()}
		}
		listen = l.ConnConfig
		listen.ConnectTimeout = o.Timeout
	}
	if err := migrate(ctx, cfg.ConnConfig); err != nil {
		return nil, mapError(err)
	}
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return nil, mapError(err)
	}
	e := &engine{pool: pool, timeout: o.Timeout, log: o.Logger}
	h := newHerald(e, listen)
	c := storesql.New(e, dialect, storesql.Mutant(o.mutant), h.changed)
	e.prepare(c)
	if err := e.makeParts(ctx); err != nil {
		pool.Close()
		return nil, mapError(err)
	}
	h.start(c)
	s := &Store{Set: c.Set(), core: c, engine: e}
	s.close = sync.OnceValue(func() error {
		c.Hub.Close()
		h.stop()
		e.closed.Store(true) // before the pool says so in its own words
		pool.Close()
		return nil
	})
	return s, nil
}

// Close ends reads and waits with ErrUnavailable, waits for the transactions that
// run, and disconnects. A second call does nothing.
func (s *Store) Close() error { return s.close() }

// Retain forgets what is old (see [store.Retainer]). A log that is too old can't
// be read from then on; its events are deleted with the partition of the month in which
// their run began, once no log in it can be read any more.
func (s *Store) Retain(ctx context.Context, r store.Retention) (store.Retained, error) {
	out, err := s.core.Retain(ctx, r, s.engine.dropParts)
	return out, mapError(err)
}

// dial makes connections that don't wait for a silent server longer than a try
// may last. Without it a connection that was given up would keep its place in the pool
// for a quarter of a minute, to say goodbye.
func dial(inner pgconn.DialFunc, limit time.Duration) pgconn.DialFunc {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := inner(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return impatient{c, limit}, nil
	}
}

type impatient struct {
	net.Conn
	limit time.Duration
}

func (c impatient) SetDeadline(t time.Time) error {
	if latest := time.Now().Add(c.limit); t.After(latest) {
		t = latest
	}
	return c.Conn.SetDeadline(t)
}

var dialect = storesql.Dialect{
	Scheme: "pg:v1:",
	Now:    "floor(extract(epoch from clock_timestamp())*1000)::bigint",
	Lock:   " FOR NO KEY UPDATE",
	Skip:   " FOR NO KEY UPDATE SKIP LOCKED",
	IDs:    "SELECT value FROM json_array_elements_text(CAST($1 AS json)) AS value",
	Pairs:  "(SELECT value->>0 AS id, (value->>1)::bigint AS e FROM json_array_elements(CAST($1 AS json)) AS value)",
	Part:   "part=(SELECT p.part FROM runs p WHERE p.run_id=$1)",
	Epoch:  "SELECT nextval('lease_epoch')",
}

// errClosed is what calls get after Close.
func errClosed() error { return &store.UnavailableError{What: "the store is closed"} }
