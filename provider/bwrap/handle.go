//go:build linux

package bwrap

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/aisandbox-go/aisandbox/internal/proc"
	"github.com/aisandbox-go/aisandbox/internal/statedir"
	"github.com/aisandbox-go/aisandbox/provider"
)

// handle is an attached sandbox. Each command that is started here gets
// namespaces of its own on the sandbox's files, so commands don't see each
// other's processes; with a guest as first process they share one.
type handle struct {
	b      *bwrap
	d      *statedir.Dir
	dir    string
	r      record // but for First, which ensureFirst reads anew
	closed atomic.Bool
}

var _ provider.Handle = (*handle)(nil)

func (h *handle) Ref() provider.Ref { return makeRef(h.d, h.r) }
func (h *handle) Root() string      { return rootInside }

func (h *handle) Close() error {
	h.closed.Store(true)
	return nil
}

func (h *handle) Start(ctx context.Context, cmd provider.Cmd) (provider.Process, error) {
	if h.closed.Load() {
		return nil, fmt.Errorf("bwrap: start: handle is closed: %w", os.ErrClosed)
	}
	if len(cmd.Argv) == 0 || cmd.Argv[0] == "" {
		return nil, fmt.Errorf("bwrap: start: argv is empty: %w", provider.ErrInvalid)
	}
	if cmd.User != "" && cmd.User != "agent" {
		return nil, &provider.UnsupportedError{Provider: name, Capability: "user", Hint: "commands run as agent"}
	}
	t, err := h.b.tool()
	if err != nil {
		return nil, err
	}
	if _, err := os.Stat(h.dir); err != nil {
		return nil, fmt.Errorf("bwrap: start: the sandbox is gone: %w: %w", err, provider.ErrNotFound)
	}
	dir := cmd.Dir
	switch {
	case dir == "":
		dir = rootInside
	case !strings.HasPrefix(dir, "/"):
		dir = rootInside + "/" + dir
	}
	status, statusw, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("bwrap: start: %w", err)
	}
	defer statusw.Close()
	// The environment goes by inheritance, never by --setenv: arguments are seen by
	// everybody on the host.
	argv := append([]string{t.path}, h.view(t)...)
	argv = append(argv, "--chdir", dir, "--json-status-fd", "3")
	if cmd.Terminal == nil {
		argv = append(argv, "--new-session")
	}
	argv = append(append(argv, "--"), cmd.Argv...)
	p := &process{known: make(chan struct{}), read: make(chan struct{}), terminal: cmd.Terminal != nil}
	p.stderr.w = cmd.Stderr
	var stderr io.Writer = &p.stderr
	if p.terminal {
		stderr = nil
	} else if sameWriter(cmd.Stdout, cmd.Stderr) {
		cmd.Stdout = &p.stderr // one pipe, so that the order of writes is kept
	}
	p.Process, err = proc.Start(ctx, proc.Spec{
		Argv: argv, Dir: "/", Env: append(h.env(), cmd.Env...),
		Stdin: cmd.Stdin, Stdout: cmd.Stdout, Stderr: stderr, Terminal: cmd.Terminal,
		Credential: h.b.credential(), ExtraFiles: []*os.File{statusw},
	})
	if err != nil {
		status.Close()
		return nil, fmt.Errorf("bwrap: start: %w", err)
	}
	go p.follow(status)
	return p, nil
}

func sameWriter(a, b io.Writer) (same bool) {
	defer func() { _ = recover() }() // writers that can't be compared are not the same
	return a != nil && a == b
}

// process is a launcher and the namespaces that it made.
type process struct {
	*proc.Process
	terminal bool
	stderr   headWriter

	known chan struct{} // closed when pid is set, or never will be
	pid   int           // of the namespace's first process, as the host counts
	read  chan struct{} // closed when the launcher has said all it will
	code  int
	ran   bool // the command itself was executed, and ended with code
}

// follow reads what the launcher reports. The launcher keeps the descriptor to
// itself, so the end comes with its own.
func (p *process) follow(status *os.File) {
	defer close(p.read)
	defer status.Close()
	r := bufio.NewReader(io.LimitReader(status, 64<<10))
	known := false
	defer func() {
		if !known {
			close(p.known)
		}
	}()
	for {
		line, err := r.ReadBytes('\n')
		var m struct {
			Child *int `json:"child-pid"`
			Exit  *int `json:"exit-code"`
		}
		if json.Unmarshal(line, &m) == nil {
			if m.Child != nil && !known {
				known, p.pid = true, *m.Child
				close(p.known)
			}
			if m.Exit != nil {
				p.code, p.ran = *m.Exit, true
			}
		}
		if err != nil {
			return
		}
	}
}

// Wait waits for the launcher. That the command could not be executed is told by
// its message alone.
func (p *process) Wait() (provider.Exit, error) {
	e, err := p.Process.Wait()
	<-p.read
	if err != nil || p.ran || e.Code != 1 {
		return e, err
	}
	text := p.stderr.String()
	switch {
	case p.terminal, strings.Contains(text, "bwrap: execvp") && strings.Contains(text, ": No such file or directory"):
		return provider.Exit{Code: 127}, nil
	case strings.Contains(text, "bwrap: execvp"), strings.Contains(text, "bwrap: Can't chdir"):
		return provider.Exit{Code: 126}, nil
	}
	return e, fmt.Errorf("bwrap: the sandbox could not be set up: %s: %w", strings.TrimSpace(text), provider.ErrUnavailable)
}

// Signal reaches the command's group; the launcher is spared, since it has to
// tell how the command ended.
func (p *process) Signal(sig os.Signal) error {
	n, ok := sig.(syscall.Signal)
	if !ok || n == syscall.SIGKILL {
		return p.Process.Signal(sig)
	}
	select {
	case <-p.known:
	case <-p.Process.Done():
		return nil
	}
	if p.pid == 0 {
		return nil
	}
	select {
	case <-p.read:
		return nil
	default:
	}
	var err error
	if p.terminal {
		err = signalOthers(p.Pid(), n)
	} else {
		// The namespace's first process leads the session; signals that it does not
		// handle can't end it.
		err = syscall.Kill(-p.pid, n)
	}
	if err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("bwrap: signal %v: %w", n, err)
	}
	return nil
}

// signalOthers signals the members of a process group but its leader.
func signalOthers(leader int, sig syscall.Signal) error {
	d, err := os.ReadDir("/proc")
	if err != nil {
		return err
	}
	for _, e := range d {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == leader {
			continue
		}
		if g, err := syscall.Getpgid(pid); err == nil && g == leader {
			_ = syscall.Kill(pid, sig)
		}
	}
	return nil
}

// headWriter passes on and remembers how the output begins.
type headWriter struct {
	mu sync.Mutex
	b  bytes.Buffer
	w  io.Writer
}

const headSize = 4 << 10

func (h *headWriter) Write(b []byte) (int, error) {
	h.mu.Lock()
	if room := headSize - h.b.Len(); room > 0 {
		h.b.Write(b[:min(room, len(b))])
	}
	h.mu.Unlock()
	if h.w == nil {
		return len(b), nil
	}
	return h.w.Write(b)
}

func (h *headWriter) String() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.b.String()
}

// hostNetwork is for sandboxes that share the host's network: its loopback is
// theirs.
type hostNetwork struct{}

var (
	_ provider.Dialer      = hostNetwork{}
	_ provider.HostReacher = hostNetwork{}
	_ provider.Exposer     = hostNetwork{}
)

func (hostNetwork) Dial(ctx context.Context, port int) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
}

func (hostNetwork) ListenInside(ctx context.Context, port int) (net.Listener, string, error) {
	var c net.ListenConfig
	l, err := c.Listen(ctx, "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil {
		return nil, "", fmt.Errorf("bwrap: %w", err)
	}
	return l, "http://" + l.Addr().String(), nil
}

func (hostNetwork) Expose(_ context.Context, port int) (provider.Exposed, error) {
	if port < 1 || port > 65535 {
		return provider.Exposed{}, fmt.Errorf("bwrap: port %d: %w", port, provider.ErrInvalid)
	}
	return provider.Exposed{URL: "http://127.0.0.1:" + strconv.Itoa(port)}, nil
}
