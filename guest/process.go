package guest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"sync"
	"syscall"
	"time"

	"github.com/aisandbox-go/aisandbox/internal/wire"
	"github.com/aisandbox-go/aisandbox/provider"
)

// Times after which Wait stops waiting for something that its context's end
// should have ended.
const (
	killLimit   = 15 * time.Second // the guest's own limit is 10 s
	stuckWriter = 2 * time.Second
)

// process is a process in the sandbox, as seen from the host.
type process struct {
	l *wire.Link

	out, err *output

	mu    sync.Mutex
	over  bool // the exit is known
	cause error
	kills []chan error // for the answers to kills, in order

	done   chan struct{}
	exit   provider.Exit
	result error
	inErr  error
}

// Start starts a process in the sandbox. The tree is killed, whatever it did to
// hide, when ctx ends or the connection does.
func (g *Handle) Start(ctx context.Context, cmd provider.Cmd) (provider.Process, error) {
	return g.exec(ctx, cmd, 0)
}

// StartClean is Start for a command that must leave nothing behind: when it ends,
// what is left of its tree is killed before Wait returns.
func (g *Handle) StartClean(ctx context.Context, cmd provider.Cmd) (provider.Process, error) {
	return g.exec(ctx, cmd, wire.KillStrays)
}

func (g *Handle) exec(ctx context.Context, cmd provider.Cmd, flags uint32) (provider.Process, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if len(cmd.Argv) == 0 {
		return nil, fmt.Errorf("guest: argv is empty: %w", provider.ErrInvalid)
	}
	req := &wire.Request{Op: wire.OpExec, Flags: flags, Argv: cmd.Argv, Env: cmd.Env, Dir: cmd.Dir, User: cmd.User}
	p := &process{done: make(chan struct{})}
	if cmd.Stdin != nil {
		req.Flags |= wire.WantStdin
	}
	if cmd.Stdout != nil {
		req.Flags |= wire.WantStdout
		p.out = newOutput(p, wire.FData, cmd.Stdout)
	}
	switch {
	case cmd.Terminal != nil:
		req.Flags |= wire.HasTerminal
		req.Rows, req.Cols = cmd.Terminal.Rows, cmd.Terminal.Cols
	case cmd.Stderr != nil && cmd.Stdout != nil && same(cmd.Stdout, cmd.Stderr):
		req.Flags |= wire.OneOutput
	case cmd.Stderr != nil:
		req.Flags |= wire.WantStderr
		p.err = newOutput(p, wire.FStderr, cmd.Stderr)
	}
	// Not begin's: this context's end kills the process, it doesn't cut the stream.
	x, err := g.begin(context.WithoutCancel(ctx), req)
	if err != nil {
		return nil, err
	}
	p.l = x.l
	for _, o := range []*output{p.out, p.err} {
		if o != nil {
			o.q = wire.NewQueue(x.l, o.t)
		}
	}
	stop := context.AfterFunc(ctx, func() { p.cancel(context.Cause(ctx)) })
	t, b, err := x.l.RecvOwing()
	if err == nil && t == wire.FError { // anything else is FStarted, or output that overtook it
		err = fmt.Errorf("guest: start: %w", wire.DecodeError(b))
	} else if err != nil {
		err = lost(err)
	}
	if err != nil {
		p.finish()
		stop()
		x.end()
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		return nil, err
	}
	if cmd.Stdin != nil {
		go p.pumpIn(cmd.Stdin)
	}
	go p.run(stop, t, b)
	return p, nil
}

func same(a, b io.Writer) bool {
	return reflect.TypeOf(a).Comparable() && reflect.TypeOf(b).Comparable() && a == b
}

// finish forbids further signals.
func (p *process) finish() {
	p.mu.Lock()
	p.over = true
	p.mu.Unlock()
}

// run reads what the guest sends until the process has ended.
func (p *process) run(stop func() bool, t wire.FrameType, b []byte) {
	var err error
	for ; ; t, b, err = p.l.RecvOwing() {
		if err == nil {
			err = p.frame(t, b)
		}
		if err == errEnded {
			break
		}
		if err != nil {
			p.exit, p.result = provider.Exit{Code: -1}, lost(err)
			break
		}
	}
	p.finish()
	stop()
	p.l.Abort()
	p.deliver()
	p.mu.Lock()
	switch {
	case p.cause != nil:
		p.result = p.cause
	case p.result == nil:
		p.result = p.inErr
	}
	p.mu.Unlock()
	close(p.done)
}

var errEnded = errors.New("the process has ended")

func (p *process) frame(t wire.FrameType, b []byte) error {
	switch t {
	case wire.FStarted:
	case wire.FData:
		if p.out == nil {
			return errors.New("guest protocol: output that was not asked for")
		}
		p.out.put(b)
	case wire.FStderr:
		if p.err == nil {
			return errors.New("guest protocol: output that was not asked for")
		}
		p.err.put(b)
	case wire.FKilled:
		var err error
		if len(b) > 0 {
			err = wire.DecodeError(b)
		}
		p.mu.Lock()
		if len(p.kills) > 0 {
			p.kills[0] <- err
			p.kills = p.kills[1:]
		}
		p.mu.Unlock()
	case wire.FReply:
		d := wire.Dec{B: b}
		p.exit = provider.Exit{Code: int(d.Int()), Signal: int(d.Int())}
		if d.Failed {
			return fmt.Errorf("guest protocol: malformed exit")
		}
		if len(d.B) > 0 {
			p.result = fmt.Errorf("guest: wait: %w", wire.DecodeError(d.B))
		}
		return errEnded
	case wire.FError:
		p.exit, p.result = provider.Exit{Code: -1}, wire.DecodeError(b)
		return errEnded
	default:
		return unexpected(t)
	}
	return nil
}

// deliver waits until the outputs have been written.
func (p *process) deliver() {
	p.mu.Lock()
	cancelled := p.cause != nil
	p.mu.Unlock()
	var limit <-chan time.Time
	if cancelled {
		t := time.NewTimer(stuckWriter)
		defer t.Stop()
		limit = t.C
	}
	for _, o := range []*output{p.out, p.err} {
		if o == nil {
			continue
		}
		o.end()
		select {
		case <-o.done:
			if o.werr != nil && p.result == nil {
				p.result = fmt.Errorf("guest: write output: %w", o.werr)
			}
		case <-limit:
			return
		}
	}
}

// kill asks for the end of the tree; the answer comes on the channel, or not at
// all if the process ends first.
func (p *process) kill() (<-chan error, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.over {
		return nil, wire.ErrClosed
	}
	c := make(chan error, 1)
	p.kills = append(p.kills, c)
	return c, p.l.Send(wire.FSignal, []byte{byte(syscall.SIGKILL)})
}

// cancel is the end of Start's context.
func (p *process) cancel(cause error) {
	p.mu.Lock()
	if p.over {
		p.mu.Unlock()
		return
	}
	p.cause = cause
	p.mu.Unlock()
	answer, err := p.kill()
	if err != nil {
		if !errors.Is(err, wire.ErrClosed) {
			p.l.Abort()
		}
		return
	}
	t := time.NewTimer(killLimit)
	defer t.Stop()
	select {
	case <-p.done:
		return
	case err = <-answer:
	case <-t.C:
	}
	if err == nil { // all dead; the exit follows unless a writer of ours is stuck
		t.Reset(stuckWriter)
		select {
		case <-p.done:
			return
		case <-t.C:
		}
	}
	p.l.Abort()
}

// Wait implements provider.Process. The exit is -1 when the connection broke: how
// the process ended is not known then.
func (p *process) Wait() (provider.Exit, error) {
	<-p.done
	return p.exit, p.result
}

// Sweep implements provider.Sweeper.
func (p *process) Sweep() error {
	if err := p.l.Send(wire.FSignal, []byte{0}); err != nil && !errors.Is(err, wire.ErrClosed) {
		return lost(err)
	}
	return nil
}

// Signal implements provider.Process.
func (p *process) Signal(sig os.Signal) error {
	n, ok := sig.(syscall.Signal)
	if !ok || n < 1 || n > 64 {
		return fmt.Errorf("guest: signal %v: %w", sig, errors.ErrUnsupported)
	}
	if n != syscall.SIGKILL {
		if err := p.l.Send(wire.FSignal, []byte{byte(n)}); err != nil && !errors.Is(err, wire.ErrClosed) {
			return lost(err)
		}
		return nil
	}
	answer, err := p.kill()
	if errors.Is(err, wire.ErrClosed) {
		return nil
	}
	if err != nil {
		return lost(err)
	}
	select {
	case err = <-answer:
		if err != nil {
			return fmt.Errorf("guest: %w", err)
		}
		return nil
	case <-p.done:
		return nil
	}
}

// Resize implements provider.Resizer.
func (p *process) Resize(t provider.Terminal) error {
	err := p.l.Send(wire.FResize, []byte{byte(t.Rows >> 8), byte(t.Rows), byte(t.Cols >> 8), byte(t.Cols)})
	if err != nil && !errors.Is(err, wire.ErrClosed) {
		return lost(err)
	}
	return nil
}

func (p *process) pumpIn(r io.Reader) {
	buf := make([]byte, wire.Chunk)
	for {
		n, err := r.Read(buf)
		if n > 0 && p.l.Send(wire.FData, buf[:n]) != nil {
			return
		}
		if err != nil {
			if err != io.EOF {
				p.mu.Lock()
				p.inErr = fmt.Errorf("guest: read stdin: %w", err)
				p.mu.Unlock()
			}
			_ = p.l.Send(wire.FEnd, nil)
			return
		}
	}
}

// output brings one stream of the process to its writer, which may be slow: the
// goroutine that reads frames must never wait for it.
type output struct {
	p    *process
	t    wire.FrameType
	w    io.Writer
	q    *wire.Queue
	once sync.Once
	done chan struct{}
	werr error
}

func newOutput(p *process, t wire.FrameType, w io.Writer) *output {
	return &output{p: p, t: t, w: w, done: make(chan struct{})}
}

func (o *output) put(b []byte) {
	o.once.Do(func() { go o.run() })
	o.q.Put(b)
}

// end lets run return once all was written.
func (o *output) end() {
	o.once.Do(func() { close(o.done) })
	o.q.End(nil)
}

func (o *output) run() {
	defer close(o.done)
	for {
		b, err := o.q.Next()
		if err != nil {
			return
		}
		if o.werr != nil {
			continue // what was under way when we said stop
		}
		n, err := o.w.Write(b)
		if err == nil && n < len(b) {
			err = io.ErrShortWrite
		}
		if err != nil {
			o.werr = err
			_ = o.p.l.Send(wire.FStop, []byte{byte(o.t)})
		}
	}
}
