// Package storesql is what the SQL stores share: every contract of package store
// over statements that SQLite and PostgreSQL both understand, and the hub that
// wakes readers. A backend brings the transactions, and the few words in which
// the two differ.
//
// Times are milliseconds of the database's clock, as integers in both databases,
// so that one comparison means the same in each.
package storesql

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/aisandbox-go/aisandbox/store"
)

// Tx runs statements: those of one transaction, or each for itself where it comes
// from [Engine.Read]. A failed statement ends the transaction.
type Tx interface {
	Exec(ctx context.Context, query string, args ...any) (affected int64, err error)
	Query(ctx context.Context, query string, args ...any) (Rows, error)
}

// Rows is a result. It must be closed; Close returns what went wrong on the way.
type Rows interface {
	Next() bool
	Scan(dest ...any) error
	Close() error
}

// Engine is a database.
type Engine interface {
	// Write runs f in a transaction and returns when it is durable. Where f fails
	// nothing of it stays, and its error is returned as it is. It may run f again
	// where the transaction failed for certain, and with again also where nobody
	// knows whether it was committed. After a commit it calls done, also where the
	// caller has gone away; a caller that got an error may not look at what f set.
	Write(ctx context.Context, again bool, f func(ctx context.Context, tx Tx) error, done func()) error

	// Read runs f with statements that see what is committed, each for itself. It
	// may run f again, so f begins by forgetting what it has.
	Read(ctx context.Context, f func(ctx context.Context, tx Tx) error) error

	// Append is a conditional append in one transaction, by [AppendSQL] or a
	// statement of the same meaning: the first number, or 0 where it was refused.
	Append(ctx context.Context, a Appending, done func(first int64)) (first int64, err error)

	// Insert adds events to a log inside a transaction that owns the run.
	Insert(ctx context.Context, tx Tx, runID string, epoch, first int64, rows []EventRow) error

	// Lock holds a name until the transaction ends.
	Lock(ctx context.Context, tx Tx, name string) error
}

// Dialect is what differs in the text of statements.
type Dialect struct {
	Scheme string // of offsets: "sqlite:v1:"
	Now    string // milliseconds of the clock
	Lock   string // appended to a SELECT: lock its rows
	Skip   string // lock its rows, leaving out those that are locked
	IDs    string // SELECT … of the texts of the JSON array $1
	Pairs  string // a table expression (id, e) over the JSON array $1 of [text, integer]
	Part   string // condition on run_events beside run_id=$1
	Epoch  string // statement that returns the next epoch of leases
}

// Mutations take a predicate away, to see that the suites notice.
type Mutations struct{ NoEpoch, NoBatch, NoWatermark bool }

// Mutant names what a test wants to be without: epoch, batch or watermark.
func Mutant(name string) Mutations {
	return Mutations{name == "epoch", name == "batch", name == "watermark"}
}

// Core is the contracts over one engine.
type Core struct {
	e      Engine
	d      Dialect
	m      Mutations
	Hub    *Hub
	words  *strings.Replacer
	texts  sync.Map // statement as written here → of this dialect
	notify func(runID string, control bool)
}

// New returns the contracts over e. Notify, which may be nil, hears of each run
// that changed here, so that other hosts can be told: control says that it was
// cancelled or has ended.
func New(e Engine, d Dialect, m Mutations, notify func(runID string, control bool)) *Core {
	if notify == nil {
		notify = func(string, bool) {}
	}
	return &Core{e: e, d: d, m: m, Hub: newHub(), notify: notify, words: strings.NewReplacer(
		"{now}", d.Now, "{lock}", d.Lock, "{skip}", d.Skip, "{ids}", d.IDs, "{pairs}", d.Pairs, "{part}", d.Part,
		"{run}", runColumns, "{instance}", instanceColumns)}
}

// Set is the contracts.
func (c *Core) Set() store.Set {
	return store.Set{Runs: runs{c}, Log: eventLog{c}, Instances: instances{c}, Messages: messages{c}, Interrupts: interrupts{c}, Leases: leases{c}}
}

// SQL is a statement in the words of the dialect.
func (c *Core) SQL(text string) string {
	if s, ok := c.texts.Load(text); ok {
		return s.(string)
	}
	s := c.words.Replace(c.words.Replace(text)) // columns have words in them too
	c.texts.Store(text, s)
	return s
}

// errText is a text that no database takes: nothing is stored under it, and
// nothing can be.
var errText = &store.InvalidError{Field: "text", Reason: "has a NUL byte or is not UTF-8"}

func check(args []any) error {
	for _, a := range args {
		if s, ok := a.(string); ok && !plain(s) {
			return errText
		}
	}
	return nil
}

func plain(s string) bool { return utf8.ValidString(s) && strings.IndexByte(s, 0) < 0 }

// prose makes a text that people read storable, whatever an agent put into it.
func prose(s string) string {
	if plain(s) {
		return s
	}
	return strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\x00", "\uFFFD")
}

func (c *Core) exec(ctx context.Context, tx Tx, text string, args ...any) (int64, error) {
	if err := check(args); err != nil {
		return 0, err
	}
	return tx.Exec(ctx, c.SQL(text), args...)
}

// all calls scan for each row.
func (c *Core) all(ctx context.Context, tx Tx, text string, args []any, scan func(Rows) error) error {
	if err := check(args); err != nil {
		return err
	}
	rows, err := tx.Query(ctx, c.SQL(text), args...)
	if err != nil {
		return err
	}
	for rows.Next() {
		if err := scan(rows); err != nil {
			_ = rows.Close()
			if errors.Is(err, errEnough) {
				return nil
			}
			return err
		}
	}
	return rows.Close()
}

// errEnough ends a result early.
var errEnough = errors.New("enough")

// one scans the first row and says whether there was one.
func (c *Core) one(ctx context.Context, tx Tx, text string, args []any, dest ...any) (found bool, err error) {
	err = c.all(ctx, tx, text, args, func(r Rows) error {
		if found {
			return nil
		}
		found = true
		return r.Scan(dest...)
	})
	return found, err
}

// done is the check that every method begins with.
func done(ctx context.Context) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return nil
}

// write runs what gives the same answer when it runs twice.
func (c *Core) write(ctx context.Context, f func(ctx context.Context, tx Tx) error, after func()) error {
	if err := done(ctx); err != nil {
		return err
	}
	if after == nil {
		after = func() {}
	}
	return c.e.Write(ctx, true, f, after)
}

// once runs what doesn't: an unclear end is told to the caller.
func (c *Core) once(ctx context.Context, f func(ctx context.Context, tx Tx) error) error {
	if err := done(ctx); err != nil {
		return err
	}
	return c.e.Write(ctx, false, f, func() {})
}

func (c *Core) read(ctx context.Context, f func(ctx context.Context, tx Tx) error) error {
	if err := done(ctx); err != nil {
		return err
	}
	return c.e.Read(ctx, f)
}

// missing turns "cannot be stored" into "is not there" for what is looked up.
func missing(err error, what, id string) error {
	if errors.Is(err, errText) {
		return &store.NotFoundError{What: what, ID: id}
	}
	return err
}

// where collects conditions, each with one ? for its argument.
type where struct {
	text []string
	args []any
}

func (w *where) add(cond string, args ...any) {
	for _, a := range args {
		w.args = append(w.args, a)
		cond = strings.Replace(cond, "?", "$"+strconv.Itoa(len(w.args)), 1)
	}
	w.text = append(w.text, cond)
}

// in adds that a column is one of some values.
func in[T ~string](w *where, column string, values []T) {
	if len(values) == 0 {
		return
	}
	args := make([]any, len(values))
	for i, v := range values {
		args[i] = string(v)
	}
	w.add(column+" IN (?"+strings.Repeat(",?", len(args)-1)+")", args...)
}

func (w *where) String() string {
	if len(w.text) == 0 {
		return ""
	}
	return " WHERE " + strings.Join(w.text, " AND ")
}

func millis(d time.Duration) int64 { return d.Milliseconds() }

func instant(ms *int64) time.Time {
	if ms == nil {
		return time.Time{}
	}
	return time.UnixMilli(*ms)
}

func maybe(t time.Time) any {
	if t.IsZero() {
		return nil
	}
	return t.UnixMilli()
}

// blob is nil for nothing.
func blob(b []byte) any {
	if len(b) == 0 {
		return nil
	}
	return b
}

func flag(b bool) int64 {
	if b {
		return 1
	}
	return 0
}

// errRaced says that what refused a statement was gone when it was looked for.
var errRaced = errors.New("raced")

// settle repeats f while it raced. Each round means that somebody else got on.
func settle(f func() error) error {
	for range 16 {
		if err := f(); !errors.Is(err, errRaced) {
			return err
		}
	}
	return &store.UnavailableError{What: "too many changes at once"}
}

func badCursor(what string) error {
	return &store.InvalidError{Field: what + ".After", Reason: "is not a cursor that this list gave"}
}

func notFound(what, id string) error { return &store.NotFoundError{What: what, ID: id} }

func generation(key string, gen int64) string { return fmt.Sprintf("%s generation %d", key, gen) }
