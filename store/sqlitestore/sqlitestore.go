// Package sqlitestore keeps everything of package store in one SQLite file. It is
// the default of a server that is one process, and needs nothing installed.
//
// What was acknowledged survives a crash of the process and, with the default
// synchronous FULL, of the machine. Many writers share one commit: the sync to
// disk that is under way is the window in which the next commit gathers.
//
// Several processes of one machine may open the file, such as a server and
// "aisandbox reap". What another process appends reaches a reader here within
// 100 ms: while somebody reads, the file's version is looked at every 50 ms. The
// file must be on a local disk, since WAL needs shared memory.
package sqlitestore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/aisandbox-go/aisandbox/internal/storesql"
	"github.com/aisandbox-go/aisandbox/store"
)

// Options of a store.
type Options struct {
	// Normal syncs only at checkpoints. It is faster, and a power cut may lose the
	// last commits, which clients have perhaps seen. A crash of the process loses
	// nothing either way.
	Normal bool

	// Busy is how long a write waits for another process that writes. 0: 5 s.
	Busy time.Duration

	mutant string // tests: the check that it goes without
}

// Store is an open file. It offers every contract, in one transaction domain.
type Store struct {
	store.Set
	core   *storesql.Core
	engine *engine
	close  func() error
}

var _ store.Retainer = (*Store)(nil)

// Open opens the file, makes it where it doesn't exist (its directory too), and
// brings its tables up to date. Ctx bounds the opening alone. Whoever opens it
// closes it.
func Open(ctx context.Context, path string, o Options) (*Store, error) {
	if o.Busy <= 0 {
		o.Busy = 5 * time.Second
	}
	abs, err := filepath.Abs(path)
	if err == nil {
		// What is in it are other people's conversations.
		err = os.MkdirAll(filepath.Dir(abs), 0o700)
	}
	if err == nil {
		var f *os.File
		if f, err = os.OpenFile(abs, os.O_RDWR|os.O_CREATE, 0o600); err == nil {
			err = f.Close()
		}
	}
	if err != nil {
		return nil, &store.UnavailableError{What: "open " + path, Err: err, Cure: "choose a directory that can be written to"}
	}
	level := "FULL"
	if o.Normal {
		level = "NORMAL"
	}
	dsn := func(more ...string) string {
		q := url.Values{"_txlock": {"immediate"}, "_pragma": append([]string{
			fmt.Sprintf("busy_timeout(%d)", o.Busy.Milliseconds()), "journal_mode(WAL)", "synchronous(" + level + ")", "foreign_keys(1)",
			"journal_size_limit(67108864)", "temp_store(MEMORY)",
		}, more...)}
		return (&url.URL{Scheme: "file", OmitHost: true, Path: filepath.ToSlash(abs), RawQuery: q.Encode()}).String()
	}
	writers, err := sql.Open("sqlite", dsn())
	if err != nil {
		return nil, mapError(err)
	}
	writers.SetMaxOpenConns(1)
	if err := migrate(ctx, writers); err != nil {
		return nil, errors.Join(mapError(err), writers.Close())
	}
	readers, err := sql.Open("sqlite", dsn("query_only(1)"))
	if err != nil {
		return nil, errors.Join(mapError(err), writers.Close())
	}
	readers.SetMaxOpenConns(readConns + 1) // and one that watches
	readers.SetMaxIdleConns(readConns + 1)
	w, err := writers.Conn(ctx)
	if err != nil {
		return nil, errors.Join(mapError(err), readers.Close(), writers.Close())
	}
	e := newEngine(w, readers)
	c := storesql.New(e, dialect, storesql.Mutant(o.mutant), nil)
	e.start(c)
	s := &Store{Set: c.Set(), core: c, engine: e}
	s.close = sync.OnceValue(func() error {
		c.Hub.Close()
		e.stop()
		return errors.Join(w.Close(), readers.Close(), writers.Close())
	})
	return s, nil
}

// Close ends reads and waits with ErrUnavailable, lets what was accepted commit,
// and closes the file. A second call does nothing and returns the same.
func (s *Store) Close() error { return s.close() }

// Retain forgets what is old (see [store.Retainer]).
func (s *Store) Retain(ctx context.Context, r store.Retention) (store.Retained, error) {
	return s.core.Retain(ctx, r, nil)
}

var dialect = storesql.Dialect{
	Scheme: "sqlite:v1:",
	Now:    "CAST(unixepoch('now','subsec')*1000 AS INTEGER)",
	IDs:    "SELECT value FROM json_each($1)",
	Pairs:  "(SELECT json_extract(value,'$[0]') AS id, json_extract(value,'$[1]') AS e FROM json_each($1))",
	Part:   "true",
	Epoch:  "UPDATE lease_epoch SET n=n+1 RETURNING n",
}
