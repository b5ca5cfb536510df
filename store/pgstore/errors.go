package pgstore

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/aisandbox-go/aisandbox/store"
)

// kind is what an error means for the next try.
type kind int

const (
	refused kind = iota // an answer, or somebody's mistake
	passing             // rolled back, and may succeed next time
	lost                // the connection; nobody knows what became of it
	noPart              // rolled back: a partition is missing
	lasting             // the server can't, and won't in a moment
)

func judge(err error) kind {
	var p *pgconn.PgError
	if errors.As(err, &p) {
		switch {
		case p.Code == "40001", p.Code == "40P01": // serialization failure, deadlock
			return passing
		case p.Code == "23514" && strings.Contains(p.Message, "no partition"):
			return noPart
		case p.Code == "57P01", p.Code == "57P02", p.Code == "57P03", p.Code == "57P05", p.Code[:2] == "08", p.Code == "25P03":
			return lost // the server goes down or comes up
		case unavailable(p.Code):
			return lasting
		}
		return refused
	}
	if broken(err) {
		return lost
	}
	return refused
}

// unavailable says that the class of a code is the server's trouble: resources,
// timeouts, a standby, a disk.
func unavailable(code string) bool {
	switch code[:2] {
	case "53", "57", "58", "08", "XX":
		return true
	}
	return code == "25006" || code == "55P03" || code == "25P03" || code == "25P02"
}

// broken says that an error is the connection's.
func broken(err error) bool {
	var c *pgconn.ConnectError
	var n net.Error
	return errors.As(err, &c) || errors.As(err, &n) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, net.ErrClosed) ||
		errors.Is(err, context.DeadlineExceeded) || pgconn.SafeToRetry(err) || strings.Contains(err.Error(), "conn closed")
}

// mapError turns what the database says into what callers branch on. Refusals
// pass as they are.
func mapError(err error) error {
	if err == nil || errors.Is(err, store.ErrUnavailable) {
		return err
	}
	var p *pgconn.PgError
	if errors.As(err, &p) {
		u := &store.UnavailableError{What: "the database", Err: err}
		switch {
		case p.Code == "22021", p.Code == "22P05":
			return &store.InvalidError{Field: "text", Reason: "has a NUL byte or is not UTF-8"}
		case p.Code == "53100":
			u.What, u.Cure = "the database's disk is full", "free space on the database server; nothing that was acknowledged is lost"
		case p.Code == "53300":
			u.What, u.Cure = "the database has no connection left", "raise max_connections, or lower the number of connections of each server"
		case p.Code == "25006":
			u.What, u.Cure = "the database is a standby", "let the URL lead to the primary (target_session_attrs=read-write)"
		case p.Code == "57014":
			u.What = "the database did not answer in time"
		case p.Code == "28P01", p.Code == "28000":
			u.What, u.Cure = "the database refuses the login", "check user and password in the URL"
		case p.Code == "3D000":
			u.What, u.Cure = "there is no such database", "create it, or correct the URL"
		case unavailable(p.Code), p.Code == "40001", p.Code == "40P01":
		default:
			return err
		}
		return u
	}
	if broken(err) {
		return &store.UnavailableError{What: "the database can't be reached", Err: err}
	}
	return err
}
