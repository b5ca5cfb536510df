package provider

import (
	"bytes"
	"context"
	"fmt"
)

// outputLimit bounds what [Output] keeps.
const outputLimit = 16 << 20

// TooLargeError says that more arrived than the receiver keeps.
type TooLargeError struct {
	What  string
	Limit int64 // bytes
}

func (e *TooLargeError) Error() string {
	return fmt.Sprintf("%s is over %d bytes", e.What, e.Limit)
}

// Output runs cmd to its end and returns its standard output. cmd.Stdout must be
// nil. A command that prints more than 16 MiB is killed, and the error is a
// [*TooLargeError]. A command that does not exit with code 0 is an [*ExitError]
// beside its output; the error's StderrTail, kept only when cmd.Stderr is nil, is
// not redacted yet: that is the caller's, who knows the secrets.
func Output(ctx context.Context, h Handle, cmd Cmd) ([]byte, error) {
	if cmd.Stdout != nil {
		return nil, fmt.Errorf("provider: output: stdout is set: %w", ErrInvalid)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	out := limitBuffer{max: outputLimit, full: func(err error) { cancel(err) }}
	tail := tailBuffer{max: 4 << 10}
	cmd.Stdout = &out
	if cmd.Stderr == nil {
		cmd.Stderr = &tail
	}
	p, err := h.Start(ctx, cmd)
	if err != nil {
		return nil, err
	}
	e, err := p.Wait()
	switch {
	case out.err != nil:
		return out.b.Bytes(), out.err
	case err != nil:
		return out.b.Bytes(), err
	case e.Code != 0:
		return out.b.Bytes(), &ExitError{Argv: cmd.Argv, Exit: e, StderrTail: tail.String()}
	}
	return out.b.Bytes(), nil
}

// limitBuffer keeps what fits and reports once what does not. Only one goroutine
// writes, and its fields are read after Process.Wait.
type limitBuffer struct {
	max  int
	b    bytes.Buffer
	err  error
	full func(error)
}

func (l *limitBuffer) Write(p []byte) (int, error) {
	if l.err != nil {
		return 0, l.err
	}
	if l.b.Len()+len(p) > l.max {
		l.err = &TooLargeError{What: "output", Limit: int64(l.max)}
		l.full(l.err)
		return 0, l.err
	}
	return l.b.Write(p)
}
