package providertest

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"iter"
	"os"
	"sync"

	"github.com/aisandbox-go/aisandbox/provider"
)

// ErrInjected is the error of a [Fault] that names none.
var ErrInjected = errors.New("injected fault")

// Op is an operation that can be made to fail.
type Op string

// The operations. Those of a stream let [Fault.After] bytes pass and then cut the
// connection: the command sees the end of its input, or its output goes nowhere,
// and Wait reports the error. The last ones exist where the handle has an FS of
// its own.
const (
	OpCreate  Op = "create"
	OpResume  Op = "resume"
	OpDestroy Op = "destroy"
	OpStart   Op = "start"
	OpWait    Op = "wait"
	OpSignal  Op = "signal"
	OpStdin   Op = "stdin"
	OpStdout  Op = "stdout"
	OpStderr  Op = "stderr"
	OpOpen    Op = "open"
	OpRead    Op = "read"
	OpPut     Op = "put"
	OpLstat   Op = "lstat"
	OpReadDir Op = "readdir"
	OpMkdir   Op = "mkdir"
	OpRemove  Op = "remove"
	OpRename  Op = "rename"
)

// Fault is one failure.
type Fault struct {
	Op    Op
	Nth   int   // the call that fails, from 1; 0 is every call
	After int64 // bytes that a stream lets pass
	Err   error // nil is ErrInjected
}

// Injector is a Provider that fails on purpose. Its handles fail too; capabilities
// other than FS are those of the handle beneath, found with provider.As. Safe for
// concurrent use.
type Injector struct {
	p provider.Provider

	mu     sync.Mutex
	faults []Fault
	calls  map[Op]int
}

var (
	_ provider.Provider  = (*Injector)(nil)
	_ provider.Unwrapper = (*Injector)(nil)
)

// Faulty wraps p.
func Faulty(p provider.Provider, faults ...Fault) *Injector {
	i := &Injector{p: p}
	i.Arm(faults...)
	return i
}

// Arm replaces the faults and begins to count anew.
func (i *Injector) Arm(faults ...Fault) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.faults, i.calls = faults, map[Op]int{}
}

// hit counts a call and returns the fault that it runs into.
func (i *Injector) hit(op Op) (Fault, bool) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.calls[op]++
	for _, f := range i.faults {
		if f.Op == op && (f.Nth == 0 || f.Nth == i.calls[op]) {
			if f.Err == nil {
				f.Err = ErrInjected
			}
			return f, true
		}
	}
	return Fault{}, false
}

func (i *Injector) fail(op Op) error {
	if f, ok := i.hit(op); ok {
		return f.Err
	}
	return nil
}

// Unwrap returns the provider beneath.
func (i *Injector) Unwrap() any { return i.p }

// Name is that of the provider beneath.
func (i *Injector) Name() string { return i.p.Name() }

// Traits are those of the provider beneath.
func (i *Injector) Traits() provider.Traits { return i.p.Traits() }

// Create fails, or creates.
func (i *Injector) Create(ctx context.Context, spec provider.Spec) (provider.Handle, error) {
	if err := i.fail(OpCreate); err != nil {
		return nil, err
	}
	h, err := i.p.Create(ctx, spec)
	if err != nil {
		return nil, err
	}
	return i.Handle(h), nil
}

// Resume fails, or resumes.
func (i *Injector) Resume(ctx context.Context, ref provider.Ref) (provider.Handle, error) {
	if err := i.fail(OpResume); err != nil {
		return nil, err
	}
	h, err := i.p.Resume(ctx, ref)
	if err != nil {
		return nil, err
	}
	return i.Handle(h), nil
}

// Destroy fails, or destroys.
func (i *Injector) Destroy(ctx context.Context, ref provider.Ref) error {
	if err := i.fail(OpDestroy); err != nil {
		return err
	}
	return i.p.Destroy(ctx, ref)
}

// Handle wraps a handle.
func (i *Injector) Handle(h provider.Handle) provider.Handle {
	fh := &faultyHandle{Handle: h, i: i}
	if f, ok := provider.As[provider.FS](h); ok {
		return &faultyFS{fh, f}
	}
	return fh
}

type faultyHandle struct {
	provider.Handle
	i *Injector
}

func (h *faultyHandle) Unwrap() any { return h.Handle }

func (h *faultyHandle) Start(ctx context.Context, cmd provider.Cmd) (provider.Process, error) {
	if err := h.i.fail(OpStart); err != nil {
		return nil, err
	}
	p := &faultyProcess{i: h.i}
	if f, ok := h.i.hit(OpStdin); ok && cmd.Stdin != nil {
		cmd.Stdin = &cutReader{p: p, f: f, r: io.LimitReader(cmd.Stdin, f.After)}
	}
	if f, ok := h.i.hit(OpStdout); ok && cmd.Stdout != nil {
		cmd.Stdout = &cutWriter{p: p, f: f, w: cmd.Stdout}
	}
	if f, ok := h.i.hit(OpStderr); ok && cmd.Stderr != nil {
		cmd.Stderr = &cutWriter{p: p, f: f, w: cmd.Stderr}
	}
	inner, err := h.Handle.Start(ctx, cmd)
	if err != nil {
		return nil, err
	}
	p.Process = inner
	return p, nil
}

type faultyProcess struct {
	provider.Process
	i *Injector

	mu  sync.Mutex
	cut error
}

func (p *faultyProcess) Unwrap() any { return p.Process }

func (p *faultyProcess) drop(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cut == nil {
		p.cut = err
	}
}

func (p *faultyProcess) Wait() (provider.Exit, error) {
	if err := p.i.fail(OpWait); err != nil {
		p.drop(err)
	}
	e, err := p.Process.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cut != nil {
		return provider.Exit{}, p.cut
	}
	return e, err
}

func (p *faultyProcess) Signal(sig os.Signal) error {
	if err := p.i.fail(OpSignal); err != nil {
		return err
	}
	return p.Process.Signal(sig)
}

type cutReader struct {
	p *faultyProcess
	f Fault
	r io.Reader
}

func (c *cutReader) Read(b []byte) (int, error) {
	n, err := c.r.Read(b)
	if err == io.EOF {
		c.p.drop(c.f.Err)
	}
	return n, err
}

type cutWriter struct {
	p *faultyProcess
	f Fault
	n int64
	w io.Writer
}

func (c *cutWriter) Write(b []byte) (int, error) {
	total := len(b)
	if over := c.n + int64(len(b)) - c.f.After; over > 0 {
		c.p.drop(c.f.Err)
		b = b[:max(0, len(b)-int(over))]
	}
	c.n += int64(total)
	if len(b) > 0 {
		if _, err := c.w.Write(b); err != nil {
			return 0, err
		}
	}
	return total, nil
}

type faultyFS struct {
	*faultyHandle
	fs provider.FS
}

func (f *faultyFS) Open(ctx context.Context, name string) (io.ReadCloser, error) {
	if err := f.pathFail(OpOpen, name); err != nil {
		return nil, err
	}
	r, err := f.fs.Open(ctx, name)
	if err != nil {
		return nil, err
	}
	if fault, ok := f.i.hit(OpRead); ok {
		return &cutFile{ReadCloser: r, left: fault.After, err: &fs.PathError{Op: "read", Path: name, Err: fault.Err}}, nil
	}
	return r, nil
}

type cutFile struct {
	io.ReadCloser
	left int64
	err  error
}

func (c *cutFile) Read(b []byte) (int, error) {
	if c.left <= 0 {
		return 0, c.err
	}
	n, err := c.ReadCloser.Read(b[:min(int64(len(b)), c.left)])
	c.left -= int64(n)
	return n, err
}

func (f *faultyFS) pathFail(op Op, name string) error {
	if err := f.i.fail(op); err != nil {
		return &fs.PathError{Op: string(op), Path: name, Err: err}
	}
	return nil
}

func (f *faultyFS) Put(ctx context.Context, name string, r io.Reader, mode fs.FileMode) error {
	if err := f.pathFail(OpPut, name); err != nil {
		return err
	}
	return f.fs.Put(ctx, name, r, mode)
}

func (f *faultyFS) Lstat(ctx context.Context, name string) (fs.FileInfo, error) {
	if err := f.pathFail(OpLstat, name); err != nil {
		return nil, err
	}
	return f.fs.Lstat(ctx, name)
}

func (f *faultyFS) ReadDir(ctx context.Context, name string) iter.Seq2[fs.DirEntry, error] {
	if err := f.pathFail(OpReadDir, name); err != nil {
		return func(yield func(fs.DirEntry, error) bool) { yield(nil, err) }
	}
	return f.fs.ReadDir(ctx, name)
}

func (f *faultyFS) Mkdir(ctx context.Context, name string) error {
	if err := f.pathFail(OpMkdir, name); err != nil {
		return err
	}
	return f.fs.Mkdir(ctx, name)
}

func (f *faultyFS) Remove(ctx context.Context, name string) error {
	if err := f.pathFail(OpRemove, name); err != nil {
		return err
	}
	return f.fs.Remove(ctx, name)
}

func (f *faultyFS) Rename(ctx context.Context, from, to string) error {
	if err := f.pathFail(OpRename, from); err != nil {
		return err
	}
	return f.fs.Rename(ctx, from, to)
}
