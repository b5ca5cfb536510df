package wire

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"syscall"

	"github.com/aisandbox-go/aisandbox/provider"
)

// kinds are the errors that callers branch on. Their order is the protocol.
var kinds = []error{
	1:  fs.ErrNotExist,
	2:  fs.ErrExist,
	3:  fs.ErrPermission,
	4:  fs.ErrInvalid,
	5:  provider.ErrInvalid,
	6:  provider.ErrNoSpace,
	7:  provider.ErrAlreadyLaunched,
	8:  provider.ErrNotFound,
	9:  provider.ErrUnavailable,
	10: errors.ErrUnsupported,
	11: context.Canceled,
}

// EncodeError makes an error travel: its text, what errors.Is says of it, and
// the path of an fs.PathError.
func EncodeError(err error) []byte {
	var e Enc
	var mask uint64
	for i, k := range kinds {
		if k != nil && errors.Is(err, k) {
			mask |= 1 << i
		}
	}
	var errno syscall.Errno
	if errors.As(err, &errno) && errno == syscall.ENOSPC {
		mask |= 1 << 6
	}
	e.Uint(mask)
	e.Uint(uint64(errno))
	var pe *fs.PathError
	if errors.As(err, &pe) {
		e.Byte(1)
		e.Str(pe.Op)
		e.Str(pe.Path)
		e.Str(text(pe.Err))
	} else {
		e.Byte(0)
		e.Str(text(err))
	}
	return e.B
}

func text(err error) string {
	s := err.Error()
	if len(s) > 4<<10 {
		s = s[:4<<10] + "…"
	}
	return s
}

// DecodeError returns an error that errors.Is and errors.As treat as the one that
// was encoded.
func DecodeError(b []byte) error {
	d := Dec{B: b}
	r := &remoteError{mask: d.Uint()}
	r.errno = syscall.Errno(d.Uint())
	isPath := d.Byte() == 1
	var op, path string
	if isPath {
		op, path = d.Str(), d.Str()
	}
	r.text = d.Str()
	if d.Failed {
		return fmt.Errorf("guest protocol: malformed error")
	}
	if isPath {
		return &fs.PathError{Op: op, Path: path, Err: r}
	}
	return r
}

// remoteError is an error of the guest.
type remoteError struct {
	mask  uint64
	errno syscall.Errno
	text  string
}

func (e *remoteError) Error() string { return e.text }

func (e *remoteError) Is(target error) bool {
	for i, k := range kinds {
		if k == target && e.mask&(1<<i) != 0 {
			return true
		}
	}
	return e.errno != 0 && target == e.errno
}

func (e *remoteError) As(target any) bool {
	p, ok := target.(*syscall.Errno)
	if ok && e.errno != 0 {
		*p = e.errno
		return true
	}
	return false
}
