//go:build linux

package local

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/aisandbox-go/aisandbox/internal/proc"
	"github.com/aisandbox-go/aisandbox/internal/statedir"
	"github.com/aisandbox-go/aisandbox/provider"
)

// handle is an attached sandbox. Its FS is the host's, beneath an os.Root.
type handle struct {
	*rootFS
	provider.Archiver
	ref    provider.Ref
	path   string
	mark   string
	o      Options
	closed atomic.Bool
}

var (
	_ provider.Handle      = (*handle)(nil)
	_ provider.FS          = (*handle)(nil)
	_ provider.Linker      = (*handle)(nil)
	_ provider.Dialer      = (*handle)(nil)
	_ provider.HostReacher = (*handle)(nil)
	_ provider.Exposer     = (*handle)(nil)
)

func (l *local) attach(d *statedir.Dir, r record) (provider.Handle, error) {
	root, err := os.OpenRoot(r.Path)
	if err != nil {
		return nil, fmt.Errorf("local: open %s: %w", r.Path, err)
	}
	h := &handle{rootFS: &rootFS{root: root, path: r.Path}, ref: makeRef(d, r), path: r.Path, mark: r.Mark, o: l.o}
	h.Archiver = provider.ExecFS(h).(provider.Archiver)
	return h, nil
}

func (h *handle) Ref() provider.Ref { return h.ref }
func (h *handle) Root() string      { return h.path }

func (h *handle) Close() error {
	if h.closed.Swap(true) {
		return nil
	}
	return h.root.Close()
}

func (h *handle) Start(ctx context.Context, cmd provider.Cmd) (provider.Process, error) {
	if h.closed.Load() {
		return nil, fmt.Errorf("local: start: handle is closed: %w", os.ErrClosed)
	}
	if cmd.User != "" {
		return nil, &provider.UnsupportedError{Provider: name, Capability: "user", Hint: "commands run as the host's user"}
	}
	dir := cmd.Dir
	switch {
	case dir == "":
		dir = h.path
	case !strings.HasPrefix(dir, "/"):
		dir = h.path + "/" + dir
	}
	p, err := proc.Start(ctx, proc.Spec{
		Argv: cmd.Argv, Dir: dir, Env: append(h.env(), cmd.Env...),
		Stdin: cmd.Stdin, Stdout: cmd.Stdout, Stderr: cmd.Stderr, Terminal: cmd.Terminal,
	})
	if err != nil {
		return nil, fmt.Errorf("local: start: %w", err)
	}
	return p, nil
}

// minimalEnv is what [InheritMinimal] lets through, besides LC_*.
var minimalEnv = []string{"PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TZ", "TMPDIR", "TERM"}

func (h *handle) env() []string {
	env := []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	if h.o.InheritEnv != InheritNone {
		for _, kv := range os.Environ() {
			k, _, _ := strings.Cut(kv, "=")
			switch {
			case k == "PWD" || k == "OLDPWD" || k == proc.MarkName || k == sandboxEnv: // ours, not the command's
			case slices.Contains(h.o.ScrubEnv, k):
			case h.o.InheritEnv == InheritMinimal && !slices.Contains(minimalEnv, k) && !strings.HasPrefix(k, "LC_"):
			default:
				env = append(env, kv)
			}
		}
	}
	return append(env, sandboxEnv+"="+h.mark)
}

func (h *handle) Dial(ctx context.Context, port int) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
}

func (h *handle) ListenInside(ctx context.Context, port int) (net.Listener, string, error) {
	var c net.ListenConfig
	l, err := c.Listen(ctx, "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil {
		return nil, "", fmt.Errorf("local: %w", err)
	}
	return l, "http://" + l.Addr().String(), nil
}

func (h *handle) Expose(_ context.Context, port int) (provider.Exposed, error) {
	if port < 1 || port > 65535 {
		return provider.Exposed{}, errors.Join(fmt.Errorf("local: port %d", port), provider.ErrInvalid)
	}
	return provider.Exposed{URL: "http://127.0.0.1:" + strconv.Itoa(port)}, nil
}
