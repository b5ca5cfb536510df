package sqlitestore

import (
	"errors"

	"modernc.org/sqlite"

	"github.com/aisandbox-go/aisandbox/store"
)

// The primary result codes that are looked at (sqlite.org/rescode.html).
const (
	codeBusy       = 5
	codeLocked     = 6
	codeNoMem      = 7
	codeReadOnly   = 8
	codeInterrupt  = 9
	codeIOErr      = 10
	codeCorrupt    = 11
	codeFull       = 13
	codeCantOpen   = 14
	codeConstraint = 19
	codeNotADB     = 26
)

// mapError turns what the database says into what callers branch on. Refusals
// pass as they are.
func mapError(err error) error {
	var e *sqlite.Error
	if !errors.As(err, &e) {
		return err
	}
	switch e.Code() & 0xff {
	case codeFull:
		return &store.UnavailableError{What: "the disk is full", Err: err, Cure: "free space on the disk of the database file; nothing that was acknowledged is lost"}
	case codeBusy, codeLocked:
		return &store.UnavailableError{What: "another process holds the database", Err: err}
	case codeReadOnly:
		return &store.UnavailableError{What: "the database can't be written to", Err: err, Cure: "make the file and its directory writable"}
	case codeCantOpen:
		return &store.UnavailableError{What: "the database can't be opened", Err: err, Cure: "check the path, its permissions and the limit of open files"}
	case codeIOErr, codeNoMem, codeInterrupt:
		return &store.UnavailableError{What: "the database can't be read or written", Err: err}
	case codeCorrupt, codeNotADB:
		return &CorruptError{Err: err}
	}
	return err
}

// broken says that an error is the database's, so that the whole transaction is
// in doubt. A violated constraint is one statement's.
func broken(err error) bool {
	var e *sqlite.Error
	return errors.As(err, &e) && e.Code()&0xff != codeConstraint && e.Code()&0xff != 1
}

// CorruptError: the file isn't an intact database. Trying again doesn't help.
type CorruptError struct{ Err error }

func (e *CorruptError) Error() string {
	return "sqlitestore: the database file is damaged: " + e.Err.Error() + ": restore it from a backup, or recover what is left with sqlite3 .recover"
}

// Unwrap is the database's error.
func (e *CorruptError) Unwrap() error { return e.Err }

// Code is "store_corrupt".
func (e *CorruptError) Code() string { return "store_corrupt" }
