//go:build linux

// Package inside is the program that runs in the sandbox: it starts and ends
// processes, reaches files, watches them, opens ports and supervises agents that
// outlive the host, all on behalf of package guest, over one connection.
//
// It links into cmd/aisandbox-guest and must stay small: no net/http, no YAML,
// and never package guest, which embeds it.
package inside

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/aisandbox-go/aisandbox/internal/proc"
	"github.com/aisandbox-go/aisandbox/internal/wire"
	"github.com/aisandbox-go/aisandbox/provider"
)

// defaultPath is for a sandbox whose environment has no PATH.
const defaultPath = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// config is what the command line says.
type config struct {
	root    string
	private string
	home    string
	user    string // "" is the guest's own
	journal string // a directory; through /proc/self/fd when it came as a descriptor
	sealed  bool   // the journal's directory has no path that an agent could use
	init    bool
	hooked  bool
}

// server is the guest as a process; sessions come and go.
type server struct {
	config
	account  *account // whom agents run as; nil is the guest's own user
	roots    *roots
	env      []string
	journals *journals
	facts    wire.Facts
	umask    fs.FileMode
	listens  atomic.Int64

	noInotify bool // tests: as where watches have run out
}

func newServer(c config) (*server, error) {
	s := &server{config: c}
	if c.user != "" {
		a, err := lookupUser(c.user)
		if err != nil {
			return nil, err
		}
		if _, err := a.credential(); err != nil {
			return nil, err
		}
		s.account = a
	}
	owner := s.account
	if os.Getuid() != 0 || owner != nil && owner.uid == 0 {
		owner = nil
	}
	s.roots = newRoots(owner, c.root, c.private)
	s.env = baseEnv(os.Environ())
	umask := syscall.Umask(0) // there is no call that only reads it
	syscall.Umask(umask)
	s.umask = fs.FileMode(umask)
	s.journals = &journals{server: s, dir: c.journal}
	exe, _ := os.Readlink("/proc/self/exe")
	s.facts = wire.Facts{
		Platform: runtime.GOOS + "/" + runtime.GOARCH,
		Pid:      os.Getpid(),
		UID:      os.Getuid(),
		Init:     c.init,
		Root:     c.root,
		Private:  c.private,
		Instance: rand.Text(),
		Exe:      exe,
		Hooked:   c.hooked,
	}
	if b, err := os.ReadFile("/proc/sys/kernel/random/boot_id"); err == nil {
		s.facts.BootID = strings.TrimSpace(string(b))
	}
	return s, nil
}

// baseEnv is the sandbox's environment as processes see it: ours without what
// is about ourselves.
func baseEnv(env []string) []string {
	out := slices.DeleteFunc(slices.Clone(env), func(kv string) bool {
		return strings.HasPrefix(kv, proc.MarkName+"=")
	})
	if !slices.ContainsFunc(out, func(kv string) bool { return strings.HasPrefix(kv, "PATH=") }) {
		out = append(out, defaultPath)
	}
	return out
}

// environ returns the complete environment of a process of a.
func (s *server) environ(a *account, add []string) []string {
	env := slices.Clone(s.env)
	home := s.home
	if home == "" && a != nil {
		home = a.home
	}
	own := a == nil || a.uid == os.Getuid()
	has := func(name string) bool {
		return slices.ContainsFunc(env, func(kv string) bool { return strings.HasPrefix(kv, name+"=") })
	}
	switch {
	case s.home != "" || home != "" && (!own || !has("HOME")):
		env = append(env, "HOME="+home)
	case !has("HOME"):
		env = append(env, "HOME=/")
	}
	if a != nil && a.name != "" && !own {
		env = append(env, "USER="+a.name, "LOGNAME="+a.name)
	}
	return append(env, add...)
}

// who returns the account that a request asks for.
func (s *server) who(user string) (*account, error) {
	if user == "" {
		return s.account, nil
	}
	return lookupUser(user)
}

func (s *server) workdir(dir string) string {
	if dir == "" {
		return s.root
	}
	if !path.IsAbs(dir) {
		return path.Join(s.root, dir)
	}
	return dir
}

// session is one connection of a host.
type session struct {
	*server
	ctx  context.Context
	mux  *wire.Mux
	work sync.WaitGroup
}

var errHostGone = errors.New("the host's connection ended")

// serve speaks with a host until the connection ends or ctx does. Then it kills
// what it had started for that host, detached processes excepted.
func (s *server) serve(ctx context.Context, conn io.ReadWriteCloser) error {
	return s.serveWithin(ctx, conn, wire.HelloTimeout)
}

// serveWithin is serve with another limit for the greeting; 0 is none.
func (s *server) serveWithin(ctx context.Context, conn io.ReadWriteCloser, greeting time.Duration) error {
	late := func() bool { return false }
	if greeting > 0 {
		limit := time.AfterFunc(greeting, func() { _ = conn.Close() })
		late = func() bool { return !limit.Stop() }
	}
	_, err := wire.Hello(conn, false, s.facts)
	if late() || err != nil {
		_ = conn.Close()
		if err == nil {
			err = errors.New("guest protocol: the greeting took too long")
		}
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	ss := &session{server: s, ctx: ctx}
	started := make(chan struct{})
	ss.mux = wire.NewMux(conn, false, func(l *wire.Link) {
		<-started // ss.mux is set
		ss.link(l)
	})
	close(started)
	select {
	case <-ss.mux.Done():
	case <-ctx.Done():
	}
	cancel(errHostGone)
	ss.mux.Close()
	ss.work.Wait()
	return nil
}

// link answers one request.
func (s *session) link(l *wire.Link) {
	defer l.Abort()
	_, payload, err := l.Recv() // the multiplexer's promise: a request
	if err != nil {
		return
	}
	req, err := wire.DecodeRequest(payload)
	if err == nil {
		err = s.handle(l, req)
	}
	if err != nil && !errors.Is(err, errLink) {
		_ = l.Send(wire.FError, wire.EncodeError(err))
	}
}

func (s *session) handle(l *wire.Link, req *wire.Request) error {
	reply := func(b []byte, err error) error {
		if err != nil {
			return err
		}
		return l.Send(wire.FReply, b)
	}
	done := func(err error) error { return reply(nil, err) }
	switch req.Op {
	case wire.OpExec:
		return s.exec(l, req)
	case wire.OpOpen:
		return s.open(l, req)
	case wire.OpPut:
		return done(s.put(l, req))
	case wire.OpLstat:
		return reply(s.lstat(req))
	case wire.OpReadDir:
		return s.readDir(l, req)
	case wire.OpMkdir:
		return done(s.mkdir(req))
	case wire.OpRemove:
		return done(s.remove(req))
	case wire.OpRename:
		return done(s.rename(req))
	case wire.OpSymlink:
		return done(s.symlink(req))
	case wire.OpReadlink:
		return reply(s.readlink(req))
	case wire.OpTarIn:
		return done(s.tarIn(l, req))
	case wire.OpTarOut:
		return s.tarOut(l, req)
	case wire.OpWatch:
		return s.watch(l, req)
	case wire.OpDial:
		return s.dial(l, req)
	case wire.OpListen:
		return s.listen(l, req)
	case wire.OpUsage:
		return reply(s.usage())
	case wire.OpLaunch:
		return done(s.launch(l, req))
	case wire.OpProbe:
		return reply(s.journals.probe(req.Token))
	case wire.OpTail:
		return s.tail(l, req)
	case wire.OpKill:
		return done(s.journals.kill(s.ctx, req.Token, req.Signal))
	case wire.OpForget:
		return done(s.journals.forget(req.Token))
	case wire.OpJournals:
		return reply(s.journals.list())
	}
	return fmt.Errorf("guest: unknown operation %d: %w", req.Op, provider.ErrInvalid)
}
