//go:build linux

package inside

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/aisandbox-go/aisandbox/internal/proc"
	"github.com/aisandbox-go/aisandbox/internal/wire"
)

// Command is a further subcommand of the program, such as the scripted agent,
// which this package may not import.
type Command struct {
	Name string
	Run  func(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int
}

// Exit codes of the program.
const (
	exitOK    = 0
	exitFail  = 1
	exitUsage = 2
	exitProto = 3 // host and guest are of different versions
)

// Main is the guest program. args are the words after the program's name; a
// first word "aisandbox-guest" is skipped. hooked says that the program is
// another one, which became the guest by that word. The subcommands:
//
//	serve    speaks on stdin and stdout and ends, with what it started, when stdin does
//	init     the first process of a sandbox, or a daemon: listens on a socket until it is
//	         killed; with --stdio it takes a first connection on stdin and stdout
//	connect  copies stdin and stdout to that socket
//	version  prints the protocol version and the program's digest as JSON
//
// Main takes over the process: descriptors, signals, children.
func Main(args []string, hooked bool, commands ...Command) int {
	if len(args) > 0 && args[0] == wire.Marker {
		args = args[1:]
	}
	if len(args) == 0 {
		fmt.Fprintln(os.Stderr, "usage: aisandbox-guest serve|init|connect|version")
		return exitUsage
	}
	name, args := args[0], args[1:]
	for _, c := range commands {
		if c.Name == name {
			return c.Run(context.Background(), args, os.Stdin, os.Stdout, os.Stderr)
		}
	}
	var err error
	switch name {
	case "serve":
		err = mainServe(args, hooked)
	case "init":
		err = mainInit(args, hooked)
	case "supervise":
		return mainSupervise(args, hooked)
	case "connect":
		err = mainConnect(args)
	case "version":
		err = mainVersion(os.Stdout)
	default:
		fmt.Fprintf(os.Stderr, "aisandbox-guest: unknown command %q\n", name)
		return exitUsage
	}
	var pe *wire.ProtocolError
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &pe):
		fmt.Fprintf(os.Stderr, "aisandbox-guest: %v\n", err)
		return exitProto
	case errors.Is(err, flag.ErrHelp):
		return exitUsage
	}
	fmt.Fprintf(os.Stderr, "aisandbox-guest: %v\n", err)
	return exitFail
}

// flags are what serve, init and supervise share.
func flags(name string, c *config) (*flag.FlagSet, *int) {
	f := flag.NewFlagSet("aisandbox-guest "+name, flag.ContinueOnError)
	f.StringVar(&c.root, "root", "", "directory of the workspace; default: the working directory")
	f.StringVar(&c.private, "private", "", "second directory that files may be put into, made on first use; default: one in /tmp")
	f.StringVar(&c.home, "home", "", "HOME of what is started")
	f.StringVar(&c.user, "user", "", "UID:GID or name of who runs what is started; default: the guest's user")
	f.StringVar(&c.journal, "journal-dir", "", "directory of detached processes' journals")
	fd := f.Int("journal-fd", -1, "descriptor of that directory, instead of its name")
	return f, fd
}

func (c *config) settle(journalFd int) error {
	if c.root == "" {
		wd, err := os.Getwd()
		if err != nil {
			return err
		}
		c.root = wd
	}
	if !filepath.IsAbs(c.root) {
		return fmt.Errorf("--root %q is not absolute", c.root)
	}
	c.root = cleanDir(c.root)
	c.private = cleanDir(c.private)
	if journalFd >= 0 {
		unix.CloseOnExec(journalFd)
		c.journal, c.sealed = "/proc/self/fd/"+strconv.Itoa(journalFd), true
	}
	// Two sandboxes of one kernel may share /tmp.
	sum := sha256.Sum256([]byte(c.root))
	own := strconv.Itoa(os.Getuid()) + "-" + hex.EncodeToString(sum[:6])
	if c.journal == "" {
		c.journal = "/tmp/aisandbox-runs-" + own
	}
	if c.private == "" {
		c.private = "/tmp/aisandbox-private-" + own
	}
	return nil
}

// tune keeps the program small and out of the agent's reach.
func tune() {
	debug.SetGCPercent(100)
	// No other process of this user may read its memory, or attach to it.
	_ = unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0)
}

func mainServe(args []string, hooked bool) error {
	c := config{hooked: hooked}
	f, fd := flags("serve", &c)
	if err := f.Parse(args); err != nil {
		return err
	}
	if err := c.settle(*fd); err != nil {
		return err
	}
	conn, err := takeStdio()
	if err != nil {
		return err
	}
	tune()
	if err := proc.BecomeReaper(); err != nil {
		return err
	}
	s, err := newServer(c)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	defer stop()
	return s.serve(ctx, conn)
}

// stdio is the connection of serve and connect.
type stdio struct {
	r, w *os.File
	once sync.Once
}

func (s *stdio) Read(b []byte) (int, error)  { return s.r.Read(b) }
func (s *stdio) Write(b []byte) (int, error) { return s.w.Write(b) }

func (s *stdio) Close() error {
	s.once.Do(func() {
		_ = s.w.Close()
		_ = s.r.Close()
	})
	return nil
}

// takeStdio moves stdin and stdout to descriptors of our own. A write error on
// descriptor 1 would end the program before it has cleaned up, and nothing we
// start may ever write into the connection.
func takeStdio() (*stdio, error) {
	var fds [2]int
	for i := range fds {
		fd, err := unix.FcntlInt(uintptr(i), unix.F_DUPFD_CLOEXEC, 3)
		if err != nil {
			return nil, os.NewSyscallError("fcntl", err)
		}
		var st unix.Stat_t
		if unix.Fstat(fd, &st) == nil && (st.Mode&unix.S_IFMT == unix.S_IFIFO || st.Mode&unix.S_IFMT == unix.S_IFSOCK) {
			_ = unix.SetNonblock(fd, true) // so that Close ends a blocked read
		}
		fds[i] = fd
	}
	null, err := unix.Open(os.DevNull, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: os.DevNull, Err: err}
	}
	defer unix.Close(null)
	for i := range fds {
		if err := unix.Dup3(null, i, 0); err != nil {
			return nil, os.NewSyscallError("dup3", err)
		}
	}
	return &stdio{r: os.NewFile(uintptr(fds[0]), "stdin"), w: os.NewFile(uintptr(fds[1]), "stdout")}, nil
}

func mainInit(args []string, hooked bool) error {
	c := config{hooked: hooked, init: true}
	f, fd := flags("init", &c)
	socket := f.String("socket", "", "unix socket to listen on")
	listenFd := f.Int("listen-fd", -1, "descriptor of a listening unix socket, instead")
	readyFd := f.Int("ready-fd", -1, "descriptor that is closed once connections are taken")
	onStdio := f.Bool("stdio", false, "take a first connection on stdin and stdout; its end ends nothing else")
	if err := f.Parse(args); err != nil {
		return err
	}
	if (*socket == "") == (*listenFd < 0) {
		return errors.New("init needs --socket or --listen-fd, one of them")
	}
	if err := c.settle(*fd); err != nil {
		return err
	}
	tune()
	if err := proc.BecomeReaper(); err != nil {
		return err
	}
	s, err := newServer(c)
	if err != nil {
		return err
	}
	var ln net.Listener
	if *listenFd >= 0 {
		unix.CloseOnExec(*listenFd)
		lf := os.NewFile(uintptr(*listenFd), "listener")
		ln, err = net.FileListener(lf)
		_ = lf.Close()
	} else {
		ln, err = listenSocket(*socket)
	}
	if err != nil {
		return fmt.Errorf("init: %w", err)
	}
	if *readyFd >= 0 {
		_ = unix.Close(*readyFd)
	}
	if *onStdio {
		conn, err := takeStdio()
		if err != nil {
			return fmt.Errorf("init: %w", err)
		}
		// Without a limit: after a restart nobody may ever come this way.
		go func() { _ = s.serveWithin(context.Background(), conn, 0) }()
	}
	// An engine ends a sandbox with SIGTERM. Everything else comes from inside, and
	// so may SIGTERM where the socket is inherited: there whoever made the sandbox
	// ends it for good.
	sigs := make(chan os.Signal, 8)
	signal.Notify(sigs, outer()...)
	go func() {
		for sig := range sigs {
			if sig == syscall.SIGTERM && *socket != "" {
				endAll()
				os.Exit(exitOK)
			}
		}
	}()
	for {
		conn, err := ln.Accept()
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil {
			time.Sleep(10 * time.Millisecond)
			continue
		}
		go func() { _ = s.serve(context.Background(), conn) }() // a bad greeting concerns its sender only
	}
}

// outer are the signals that others send. Those that a process gets by itself would
// wake this one for each child that ends, and each time the scheduler interrupts.
func outer() []os.Signal {
	var list []os.Signal
	for sig := syscall.Signal(1); sig <= 64; sig++ {
		switch sig {
		case syscall.SIGKILL, syscall.SIGSTOP, syscall.SIGCHLD, syscall.SIGURG:
		default:
			list = append(list, sig)
		}
	}
	return list
}

// listenSocket makes a socket that only our user may connect to.
func listenSocket(name string) (net.Listener, error) {
	if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
		return nil, err
	}
	if st, err := os.Lstat(name); err == nil && st.Mode()&os.ModeSocket != 0 {
		_ = os.Remove(name) // of a first process before a restart
	}
	addr, release, err := socketAddr(name)
	if err != nil {
		return nil, err
	}
	defer release()
	old := syscall.Umask(0o177)
	defer syscall.Umask(old)
	ln, err := net.ListenUnix("unix", addr)
	if err != nil {
		return nil, err
	}
	ln.SetUnlinkOnClose(false) // the name in addr is gone by then
	return ln, nil
}

// endAll ends what runs in the sandbox, politely first.
func endAll() {
	if os.Getpid() == 1 {
		_ = syscall.Kill(-1, syscall.SIGTERM)
		for range 30 {
			if syscall.Kill(-1, 0) == syscall.ESRCH {
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
		_ = syscall.Kill(-1, syscall.SIGKILL)
		return
	}
	_ = proc.KillDescendants()
}

func mainSupervise(args []string, hooked bool) int {
	c := config{hooked: hooked}
	f, fd := flags("supervise", &c)
	if f.Parse(args) != nil {
		return exitUsage
	}
	err := c.settle(*fd)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return exitFail
	}
	conn, err := takeStdio()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return exitFail
	}
	tune()
	// An agent that signals everybody must not end its own witness.
	sigs := make(chan os.Signal, 8)
	signal.Notify(sigs, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGPIPE)
	s, err := newServer(c)
	if err != nil {
		return supervise(nil, failing{err}, conn.w)
	}
	return supervise(s, conn.r, conn.w)
}

// failing reports an error where the request should come from.
type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

func mainConnect(args []string) error {
	if len(args) != 1 {
		return errors.New("connect needs the path of a socket")
	}
	c, err := dialInit(args[0])
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	conn, err := takeStdio()
	if err != nil {
		return err
	}
	go func() {
		_, _ = io.Copy(onlyWriter{c}, onlyReader{conn.r})
		_ = c.CloseWrite()
	}()
	_, err = io.Copy(onlyWriter{conn.w}, onlyReader{c})
	if errors.Is(err, syscall.EPIPE) {
		err = nil // the host hung up
	}
	return err
}

// initStart is how long the first process of a sandbox may take until it listens:
// an engine says that it was started before it has done anything.
const initStart = 10 * time.Second

// dialInit connects to the first process, which may be about to listen.
func dialInit(socket string) (*net.UnixConn, error) {
	for begin := time.Now(); ; time.Sleep(2 * time.Millisecond) {
		addr, release, err := socketAddr(socket)
		if err == nil {
			var c *net.UnixConn
			c, err = net.DialUnix("unix", nil, addr)
			release()
			if err == nil {
				return c, nil
			}
		}
		starting := errors.Is(err, syscall.ENOENT) || errors.Is(err, syscall.ECONNREFUSED)
		if !starting || time.Since(begin) > initStart {
			return nil, err
		}
	}
}

func mainVersion(w io.Writer) error {
	f, err := os.Open("/proc/self/exe")
	if err != nil {
		return err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return err
	}
	return json.NewEncoder(w).Encode(map[string]any{
		"protocol": wire.Version,
		"digest":   hex.EncodeToString(h.Sum(nil)),
		"platform": runtime.GOOS + "/" + runtime.GOARCH,
	})
}
