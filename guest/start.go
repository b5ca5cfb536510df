package guest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/aisandbox-go/aisandbox/internal/sh"
	"github.com/aisandbox-go/aisandbox/internal/wire"
	"github.com/aisandbox-go/aisandbox/provider"
)

// placeScript finds a directory that the guest program can be run from. It says
// "have PATH" or "need PATH". The directory must be ours: in a world-writable
// place somebody else could have made it, with a program of their own in it.
const placeScript = `umask 022
for d in /tmp /var/tmp "$HOME/.cache" /dev/shm; do
	[ -d "$d" ] && [ -w "$d" ] || continue
	g="$d/.aisandbox-guest-$(id -u)"
	mkdir "$g" 2>/dev/null
	[ -d "$g" ] && [ ! -L "$g" ] && [ -O "$g" ] && chmod 755 "$g" || continue
	printf '#!/bin/sh\nexit 0\n' >"$g/probe.$$" && chmod 755 "$g/probe.$$" && "$g/probe.$$" 2>/dev/null
	ok=$?
	rm -f "$g/probe.$$"
	[ $ok = 0 ] || continue
	f="$g/$1"
	if [ -x "$f" ] && { echo "$2  $f" | sha256sum -c >/dev/null 2>&1; }; then echo "have $f"; else echo "need $f"; fi
	exit 0
done
echo none
exit 0`

// start brings the program into the sandbox and runs it on a pipe.
func (g *Handle) start(ctx context.Context) (*client, error) {
	if t := g.opts.Traits; t.Isolation != "" && !t.LiveStdin {
		return nil, unsupported("the backend can't write to a running process", nil)
	}
	argv, err := g.place(ctx)
	if err != nil {
		return nil, err
	}
	o := g.opts
	o.Root = g.inner.Root()
	argv = append(argv, wire.Marker, "serve")
	argv = append(argv, o.args()...)
	inR, inW := io.Pipe()
	outR, outW := io.Pipe()
	stderr := &tailBuffer{}
	run, cancel := context.WithCancel(context.WithoutCancel(ctx))
	p, err := g.inner.Start(run, provider.Cmd{Argv: argv, Stdin: inR, Stdout: outW, Stderr: stderr})
	if err != nil {
		cancel()
		return nil, startFailed(ctx, fmt.Errorf("start: %w", err))
	}
	ended := make(chan struct{})
	var exit provider.Exit
	go func() {
		defer close(ended)
		exit, _ = p.Wait()
		_ = outW.Close()
		_ = inR.Close()
	}()
	after := func() {
		_ = inW.Close() // a guest whose input ends, ends
		t := time.NewTimer(5 * time.Second)
		defer t.Stop()
		select {
		case <-ended:
		case <-t.C:
		}
		cancel()
		<-ended
	}
	c, err := newClient(ctx, &pipes{outR, inW}, after)
	if err == nil {
		c.why = func() string {
			t := time.NewTimer(time.Second)
			defer t.Stop()
			select {
			case <-ended:
				return strings.TrimSpace(fmt.Sprintf("the guest ended: %v %s", exit, stderr))
			case <-t.C:
				return "the guest still runs"
			}
		}
		return c, nil
	}
	var pe *ProtocolError
	if errors.As(err, &pe) || ctx.Err() != nil || errors.Is(err, provider.ErrUnavailable) {
		return nil, err
	}
	return nil, startFailed(ctx, fmt.Errorf("%w (%v) %s", err, exit, strings.TrimSpace(stderr.String())))
}

// startFailed makes what keeps a guest from running ErrUnsupported, so that the
// caller goes on without one.
func startFailed(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if errors.Is(err, provider.ErrUnavailable) || errors.Is(err, provider.ErrNotFound) {
		return fmt.Errorf("guest: %w", err)
	}
	return unsupported("the program does not run there", err)
}

func unsupported(why string, err error) error {
	if err == nil {
		return fmt.Errorf("guest: %s: %w", why, errors.ErrUnsupported)
	}
	return fmt.Errorf("guest: %s: %w: %w", why, err, errors.ErrUnsupported)
}

// place returns the program's path inside, uploaded where it is missing.
func (g *Handle) place(ctx context.Context) ([]string, error) {
	platform, err := g.platform(ctx)
	if err != nil {
		return nil, err
	}
	prog, err := g.opts.program(platform)
	if err != nil {
		return nil, unsupported("no program", err)
	}
	if t := g.opts.Traits; t.SharedKernel && t.Isolation == provider.IsolationNone {
		return []string{prog.Path}, nil
	}
	name := "guest-" + prog.Digest[:min(32, len(prog.Digest))]
	out, err := g.run(ctx, []string{"sh", "-c", placeScript, "sh", name, prog.Digest}, nil)
	if err != nil {
		return nil, startFailed(ctx, err)
	}
	verb, file, _ := strings.Cut(strings.TrimSpace(out), " ")
	switch verb {
	case "have":
		return []string{file}, nil
	case "need":
	default:
		return nil, unsupported("no writable directory allows programs", nil)
	}
	f, err := os.Open(prog.Path)
	if err != nil {
		return nil, fmt.Errorf("guest: program: %w", err)
	}
	defer f.Close()
	q := sh.Quote(file)
	script := "umask 022; t=" + q + ".$$ && cat >\"$t\" && chmod 755 \"$t\" && mv -f \"$t\" " + q
	if _, err := g.run(ctx, provider.Shell(script), f); err != nil {
		return nil, startFailed(ctx, fmt.Errorf("upload: %w", err))
	}
	return []string{file}, nil
}

func (g *Handle) platform(ctx context.Context) (string, error) {
	if g.opts.Traits.SharedKernel {
		return runtime.GOOS + "/" + runtime.GOARCH, nil
	}
	out, err := g.run(ctx, []string{"uname", "-sm"}, nil)
	if err != nil {
		return "", startFailed(ctx, err)
	}
	system, machine, _ := strings.Cut(strings.TrimSpace(out), " ")
	switch machine {
	case "x86_64", "amd64":
		machine = "amd64"
	case "aarch64", "arm64":
		machine = "arm64"
	}
	return strings.ToLower(system) + "/" + machine, nil
}

// run is a command of the backend's own, for the time before there is a guest.
func (g *Handle) run(ctx context.Context, argv []string, stdin io.Reader) (string, error) {
	var stdout bytes.Buffer
	stderr := &tailBuffer{}
	p, err := g.inner.Start(ctx, provider.Cmd{Argv: argv, Stdin: stdin, Stdout: &stdout, Stderr: stderr})
	if err != nil {
		return "", err
	}
	exit, err := p.Wait()
	if err != nil {
		return "", err
	}
	if exit.Code != 0 {
		return "", &provider.ExitError{Argv: argv[:1], Exit: exit, StderrTail: stderr.String()}
	}
	return stdout.String(), nil
}

// pipes is the connection over a process's streams.
type pipes struct {
	r *io.PipeReader
	w *io.PipeWriter
}

func (p *pipes) Read(b []byte) (int, error)  { return p.r.Read(b) }
func (p *pipes) Write(b []byte) (int, error) { return p.w.Write(b) }

func (p *pipes) Close() error {
	_ = p.w.Close()
	return p.r.Close()
}

// tailBuffer keeps the last 4 KiB.
type tailBuffer struct {
	mu sync.Mutex
	b  []byte
}

func (t *tailBuffer) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.b = append(t.b, b...)
	if len(t.b) > 4<<10 {
		t.b = append(t.b[:0], t.b[len(t.b)-4<<10:]...)
	}
	return len(b), nil
}

func (t *tailBuffer) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.b)
}
