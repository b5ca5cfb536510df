//go:build linux

package inside

import (
	"context"
	"errors"
	"io"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/aisandbox-go/aisandbox/internal/proc"
	"github.com/aisandbox-go/aisandbox/internal/wire"
	"github.com/aisandbox-go/aisandbox/provider"
)

// execution is a process that a host waits for. Its frames are handled by the
// goroutine of its link, its end by another.
type execution struct {
	l     *wire.Link
	p     *proc.Process
	stdin *wire.Queue

	kills sync.WaitGroup
	over  atomic.Bool
}

// startedAfter is how long the host may wait for the word that a process runs which
// says nothing and takes no input.
const startedAfter = 2 * time.Millisecond

// exec runs a process; the host's hanging up kills it.
func (s *session) exec(l *wire.Link, req *wire.Request) error {
	spec, err := s.spec(req)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(s.ctx)
	defer cancel(nil)
	x := &execution{l: l}
	if req.Has(wire.WantStdin) {
		x.stdin = wire.NewQueue(l, wire.FData)
		spec.Stdin = x.stdin
	}
	if req.Has(wire.WantStdout) {
		spec.Stdout = l.Writer(wire.FData)
	}
	switch {
	case req.Has(wire.OneOutput):
		spec.Stderr = spec.Stdout
	case req.Has(wire.WantStderr):
		spec.Stderr = l.Writer(wire.FStderr)
	}
	if x.p, err = proc.Start(ctx, spec); err != nil {
		return err
	}
	started := func() { _ = l.Send(wire.FStarted, nil) } // if it fails, so does Recv
	if x.stdin != nil || spec.Terminal != nil {
		started()
	} else {
		// Output and exit say the same; for a short command that spares the host from
		// waking up just while the command starts.
		t := time.AfterFunc(startedAfter, started)
		defer t.Stop()
	}
	waited := make(chan struct{})
	go func() {
		defer close(waited)
		x.wait()
	}()
	for {
		t, b, err := l.RecvOwing()
		if err != nil {
			break
		}
		x.frame(t, b)
	}
	if !x.over.Load() {
		cancel(errHostGone)
	}
	if x.stdin != nil {
		x.stdin.End(io.ErrUnexpectedEOF)
	}
	<-waited
	return nil
}

// spec is what exec and launch share.
func (s *server) spec(req *wire.Request) (proc.Spec, error) {
	a, err := s.who(req.User)
	if err != nil {
		return proc.Spec{}, err
	}
	cred, err := a.credential()
	if err != nil {
		return proc.Spec{}, err
	}
	spec := proc.Spec{
		Argv: req.Argv, Dir: s.workdir(req.Dir), Env: s.environ(a, req.Env),
		Credential: cred, Mark: req.Mark, KillStrays: req.Has(wire.KillStrays),
	}
	if req.Has(wire.HasTerminal) {
		spec.Terminal = &provider.Terminal{Rows: req.Rows, Cols: req.Cols}
	}
	return spec, nil
}

func (x *execution) wait() {
	exit, err := x.p.Wait()
	// The answer says that the process is gone: it must not overtake a kill that is
	// still at work on the rest of the tree.
	x.kills.Wait()
	x.over.Store(true)
	var e wire.Enc
	e.Int(int64(exit.Code))
	e.Int(int64(exit.Signal))
	// That an output could not be written is the host's own doing.
	if err != nil && !errors.Is(err, wire.ErrClosed) {
		e.B = append(e.B, wire.EncodeError(err)...)
	}
	_ = x.l.Send(wire.FReply, e.B)
}

// frame takes what the host sends to a running process.
func (x *execution) frame(t wire.FrameType, b []byte) {
	switch t {
	case wire.FData:
		if x.stdin != nil {
			x.stdin.Put(b)
		}
	case wire.FEnd:
		if x.stdin != nil {
			x.stdin.End(nil)
		}
	case wire.FSignal:
		if len(b) == 1 {
			x.signal(syscall.Signal(b[0]))
		}
	case wire.FResize:
		if len(b) == 4 {
			_ = x.p.Resize(provider.Terminal{Rows: uint16(b[0])<<8 | uint16(b[1]), Cols: uint16(b[2])<<8 | uint16(b[3])})
		}
	}
}

func (x *execution) signal(sig syscall.Signal) {
	if sig == 0 {
		_ = x.p.Sweep()
		return
	}
	if sig != syscall.SIGKILL {
		_ = x.p.Signal(sig)
		return
	}
	x.kills.Go(func() {
		// Answered by itself: the exit may have to wait for a host that doesn't read.
		var answer []byte
		if err := x.p.KillTree(); err != nil {
			answer = wire.EncodeError(err)
		}
		_ = x.l.Send(wire.FKilled, answer)
	})
}
