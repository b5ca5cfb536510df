package docker

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math/big"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
	"unicode/utf8"

	"github.com/containerd/errdefs"
	"github.com/moby/moby/client"

	"github.com/aisandbox-go/aisandbox/provider"
)

// wrapScript is the parent of every command on the exec-only path. Its arguments
// are two halves of a nonce, the mark, the directory, the home for a user who has
// none, the rows and columns of a terminal (or empty ones), and the command.
//
//   - It marks its tree with a limit on the resident set, which no kernel since 2.6
//     enforces, which children inherit whatever they do, and which only the
//     superuser of the host can raise again. killScript finds the tree by it.
//   - It says in the output when the command starts and how it ended; stream.go says
//     why. It says so in both streams, because their order among each other is lost
//     on the way. It knows the nonce in halves, so that a listing of processes holds no
//     marker. A command that left the pipe non-blocking makes it try again.
//   - It outlives signals to its group, to report the command's end. That is why the
//     subshell that becomes the command says that it started: from then on no signal
//     is lost. The wrapper's own stderr is closed, because shells comment on children
//     that died of a signal. The command runs through exec, so that no builtin,
//     function or assignment of the shell can be meant by its name.
const wrapScript = `aisbx_a=$1 aisbx_b=$2 aisbx_m=$3 aisbx_d=$4 aisbx_h=$5 aisbx_r=$6 aisbx_c=$7
shift 7
exec 3>&2 2>/dev/null
trap : HUP INT QUIT ABRT PIPE ALRM TERM USR1 USR2
aisbx_put() {
	aisbx_n=0
	until printf '\376%s%s%s' "$aisbx_a" "$aisbx_b" "$1"; do
		aisbx_n=$((aisbx_n + 1))
		[ $aisbx_n -gt 100 ] && return
		sleep 0.05 || sleep 1
	done
}
aisbx_say() { aisbx_put "$1"; [ "$aisbx_r" ] || aisbx_put "$1" >&3; }
cd "$aisbx_d" || { aisbx_say D001; exit 1; }
[ "$aisbx_h" ] && { [ -d "$HOME" ] && [ -w "$HOME" ] || export HOME="$aisbx_h"; }
[ "$aisbx_r" ] && stty rows "$aisbx_r" cols "$aisbx_c"
if ulimit -m "$aisbx_m"; then aisbx_s=S000; else aisbx_s=E000; fi
(aisbx_say $aisbx_s; unset OLDPWD; exec "$@" 2>&3 3>&-)
aisbx_e=$((1000 + $?))
aisbx_say X${aisbx_e#1}
exit 0
`

const (
	markBase   = 1 << 41 // KiB: far above any memory, so a program that asks sees no shortage
	maxArg     = 128 << 10
	startLimit = 30 * time.Second // from attaching to the wrapper's first word
	maxStarts  = 8                // at a time: each costs the engine processes inside the container's limit
)

// process is a command on the exec-only path.
type process struct {
	h        *handle
	id, user string
	nonce    string
	mark     int64 // KiB
	marked   bool  // the mark was set; valid once started is closed
	tty      bool

	conn    client.HijackedResponse
	started chan struct{} // closed at the wrapper's first word
	done    chan struct{} // closed when exit and err are set

	// Written by the reading goroutine before done is closed.
	exit provider.Exit
	err  error

	mu    sync.Mutex
	cause error // why it was killed, if by its context
	kill  func() error
	dead  bool // a kill was begun
}

// Start implements [provider.Handle].
func (h *handle) Start(ctx context.Context, cmd provider.Cmd) (provider.Process, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	p, err := h.start(ctx, cmd)
	if err != nil {
		name := ""
		if len(cmd.Argv) > 0 {
			name = cmd.Argv[0]
		}
		return nil, fmt.Errorf("docker: start %.100q: %w", name, err)
	}
	return p, nil
}

func (h *handle) start(ctx context.Context, cmd provider.Cmd) (*process, error) {
	p := &process{h: h, user: h.user, tty: cmd.Terminal != nil, started: make(chan struct{}), done: make(chan struct{})}
	if cmd.User != "" {
		p.user = cmd.User
	}
	p.kill = sync.OnceValue(p.killTree)
	nonce := make([]byte, 16)
	rand.Read(nonce) // never fails
	p.nonce = hex.EncodeToString(nonce)
	n, err := rand.Int(rand.Reader, big.NewInt(markBase))
	if err != nil {
		return nil, err
	}
	p.mark = markBase + n.Int64()
	opts, err := p.options(cmd)
	if err != nil {
		return nil, err
	}

	select {
	case h.starts <- struct{}{}:
		defer func() { <-h.starts }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	if p.id, err = h.execCreate(ctx, opts); err != nil {
		return nil, err
	}
	// From here on the command may run, so a context that ends must not stop us
	// from learning whether it does.
	attachCtx, cancel := cleanupContext(ctx)
	defer cancel()
	res, err := h.p.engine.ExecAttach(attachCtx, p.id, client.ExecAttachOptions{TTY: p.tty})
	if err != nil {
		return nil, h.attachErr(ctx, err)
	}
	p.conn = res.HijackedResponse
	early := &bytes.Buffer{}
	go p.read(cmd, early)

	limit := time.NewTimer(startLimit)
	defer limit.Stop()
	select {
	case <-p.started:
	case <-p.done:
		select {
		case <-p.started: // both: it was a short command
		default:
			return nil, p.startErr(early)
		}
	case <-limit.C:
		p.conn.Close()
		<-p.done
		return nil, fmt.Errorf("%w: the command did not start within %v", provider.ErrUnavailable, startLimit)
	}
	if cmd.Stdin != nil || p.tty {
		go p.feed(cmd.Stdin)
	}
	stop := context.AfterFunc(ctx, func() {
		p.mu.Lock()
		p.cause = context.Cause(ctx)
		p.mu.Unlock()
		if err := p.kill(); err != nil {
			h.p.opts.Logger.Warn("docker: a command outlived its context", "sandbox", h.ref.ID, "err", err)
		}
	})
	go func() {
		<-p.done
		stop()
	}()
	return p, nil
}

// options builds the exec.
func (p *process) options(cmd provider.Cmd) (client.ExecCreateOptions, error) {
	dir := cmd.Dir
	if dir == "" {
		dir = p.h.root
	}
	if !path.IsAbs(dir) {
		dir = path.Join(p.h.root, dir)
	}
	if err := checkCmd(cmd); err != nil {
		return client.ExecCreateOptions{}, err
	}
	rows, cols := "", ""
	var size client.ConsoleSize
	if t := cmd.Terminal; t != nil {
		rows, cols = strconv.Itoa(int(t.Rows)), strconv.Itoa(int(t.Cols))
		size = client.ConsoleSize{Height: uint(t.Rows), Width: uint(t.Cols)}
	}
	env := append(slices.Clone(cmd.Env), "AISBX_PROC="+p.nonce)
	home := ownHome
	if isRoot(p.user) || slices.ContainsFunc(env, func(e string) bool { return strings.HasPrefix(e, "HOME=") }) {
		home = ""
	}
	head := []string{p.nonce[:16], p.nonce[16:], strconv.FormatInt(p.mark, 10), dir, home, rows, cols}
	script, args, env := asText(wrapScript, append(head, cmd.Argv...), env)
	return client.ExecCreateOptions{
		User:         p.user,
		TTY:          p.tty,
		ConsoleSize:  size,
		AttachStdin:  cmd.Stdin != nil || p.tty,
		AttachStdout: true,
		AttachStderr: true,
		Env:          env,
		// The directory is the wrapper's business: the engine's own error for a bad
		// one arrives as output of a command that ended with 126.
		Cmd: append([]string{"/bin/sh", "-c", script, "aisbx"}, args...),
	}, nil
}

func checkCmd(cmd provider.Cmd) error {
	if len(cmd.Argv) == 0 || cmd.Argv[0] == "" {
		return fmt.Errorf("%w: argv is empty", provider.ErrInvalid)
	}
	for _, s := range slices.Concat(cmd.Argv, cmd.Env, []string{cmd.Dir, cmd.User}) {
		if strings.ContainsRune(s, 0) {
			return fmt.Errorf("%w: a NUL byte in %.40q", provider.ErrInvalid, s)
		}
		if len(s) >= maxArg {
			return fmt.Errorf("%w: an argument or variable of %d bytes; the kernel takes less than %d: pass it on stdin or in a file", provider.ErrInvalid, len(s), maxArg)
		}
	}
	for _, e := range cmd.Env {
		if i := strings.IndexByte(e, '='); i < 1 {
			return fmt.Errorf("%w: an environment entry without a name or value", provider.ErrInvalid)
		}
	}
	if t := cmd.Terminal; t != nil && (t.Rows == 0 || t.Cols == 0) {
		return fmt.Errorf("%w: a terminal of %d rows and %d columns", provider.ErrInvalid, t.Rows, t.Cols)
	}
	return nil
}

// asText moves arguments and variables that are no UTF-8 into the script as octal
// escapes: the engine's API is JSON, which would replace their bytes.
func asText(script string, args, env []string) (string, []string, []string) {
	invalid := func(s string) bool { return !utf8.ValidString(s) }
	if !slices.ContainsFunc(args, invalid) && !slices.ContainsFunc(env, invalid) {
		return script, args, env
	}
	var b strings.Builder
	// A command substitution drops newlines at its end; the x saves them.
	word := func(s string) {
		b.WriteString("aisbx_v=$(printf '")
		for i := range len(s) {
			fmt.Fprintf(&b, `\%03o`, s[i])
		}
		b.WriteString("x')\n")
	}
	var textEnv []string
	for _, e := range env {
		if !invalid(e) {
			textEnv = append(textEnv, e)
			continue
		}
		word(e)
		b.WriteString("export \"${aisbx_v%x}\"\n")
	}
	b.WriteString("set --\n")
	for _, a := range args {
		word(a)
		b.WriteString("set -- \"$@\" \"${aisbx_v%x}\"\n")
	}
	return b.String() + script, nil, textEnv
}

// read is the goroutine that owns the connection's output.
func (p *process) read(cmd provider.Cmd, early *bytes.Buffer) {
	defer close(p.done)
	defer p.conn.Close()
	code, badDir := -1, false
	starts, ends, streams := 0, 0, 2
	if p.tty {
		streams = 1
	}
	prefix := append([]byte{markerLead}, p.nonce...)
	first := &limited{w: early, n: 4 << 10} // what comes before the wrapper is the engine's complaint
	scan := func(w io.Writer) *scanner {
		s := &scanner{prefix: prefix, w: first}
		s.found = func(payload string) {
			n, err := strconv.Atoi(payload[1:])
			if err != nil {
				return
			}
			switch payload[0] {
			case 'S', 'E':
				s.w = w
				// The first is enough: the other may be behind output that nobody reads
				// until Start has returned.
				if starts++; starts == 1 {
					p.marked = payload[0] == 'S' && !p.h.noMark
					close(p.started)
				}
			case 'D':
				badDir = true
				ends++
			case 'X':
				code = n
				s.w = nil // what follows is a stranger's
				ends++
			}
		}
		return s
	}
	out, errOut := scan(cmd.Stdout), scan(cmd.Stderr)
	src := &patientReader{
		conn:    p.conn.Conn,
		src:     p.conn.Reader,
		waiting: func() bool { return len(out.held)+len(errOut.held) > 0 },
		idle:    func() { out.flush(); errOut.flush() },
	}
	err := demux(newReader(src), p.tty, out, errOut, func() bool { return ends >= streams })
	out.flush()
	errOut.flush()

	switch {
	case badDir:
		p.err = fmt.Errorf("%w: no directory %q that user %q may enter", provider.ErrInvalid, cmd.Dir, p.user)
		return
	case code >= 0:
		p.exit = exitOf(code)
		err = nil
	case starts == 0:
		p.err = err
		return
	default:
		p.exit, err = p.lateExit(err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.err = errors.Join(p.cause, err)
	if p.err == nil {
		p.err = errors.Join(out.err, errOut.err)
	}
	if p.cause != nil {
		p.err = p.cause
	}
}

// lateExit finds the exit of a command whose output ended without the wrapper's
// last word: the wrapper was killed, or the container, or the engine went away.
func (p *process) lateExit(readErr error) (provider.Exit, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	p.mu.Lock()
	killed := p.dead
	p.mu.Unlock()
	if killed {
		return exitOf(128 + int(syscall.SIGKILL)), nil
	}
	if isEOF(readErr) || readErr == nil {
		code, err := p.h.exitCode(ctx, p.id)
		switch {
		case errors.Is(err, provider.ErrNotFound): // destroyed under the command
			return exitOf(128 + int(syscall.SIGKILL)), nil
		case err == nil && code != 0:
			return exitOf(code), nil
		case err == nil:
			// The wrapper's own success is no word about the command.
			return exitOf(128 + int(syscall.SIGKILL)), nil
		}
		return provider.Exit{}, err
	}
	return provider.Exit{}, fmt.Errorf("docker: wait: %w", mapErr(readErr))
}

// startErr explains why the wrapper never spoke.
func (p *process) startErr(early *bytes.Buffer) error {
	said := strings.TrimSpace(strings.ToValidUTF8(early.String(), "?"))
	switch {
	case p.err != nil && !isEOF(p.err):
		return p.err
	case strings.Contains(said, "unable to find user"):
		return fmt.Errorf("%w: user %q: %s", provider.ErrInvalid, p.user, said)
	case strings.Contains(said, "/bin/sh") && (strings.Contains(said, "no such file") || strings.Contains(said, "not found")):
		return &provider.UnsupportedError{Provider: providerName, Capability: "exec", Hint: "without the guest program it takes an image with /bin/sh"}
	case isNoSpace(errors.New(said)):
		return fmt.Errorf("%w: %s", provider.ErrNoSpace, said)
	}
	return fmt.Errorf("the engine could not start it: %s", said)
}

// feed copies stdin. The reader is the caller's, so nothing waits for it.
func (p *process) feed(r io.Reader) {
	last := &lastByte{w: p.conn.Conn, b: '\n'}
	var err error
	if r != nil {
		_, err = io.Copy(last, r)
	}
	if p.tty {
		// A terminal has no half-close; its end of input is a character, which takes
		// two to do more than end a line that was begun.
		eot := []byte{4}
		if last.b != '\n' {
			eot = []byte{4, 4}
		}
		_, writeErr := p.conn.Conn.Write(eot)
		err = errors.Join(err, writeErr)
	} else {
		err = errors.Join(err, p.conn.CloseWrite())
	}
	if err != nil {
		select {
		case <-p.done: // the command ended without reading it all
		default:
			p.h.p.opts.Logger.Debug("docker: stdin ended early", "sandbox", p.h.ref.ID, "err", err)
		}
	}
}

// lastByte remembers the last byte that went through.
type lastByte struct {
	w io.Writer
	b byte
}

func (l *lastByte) Write(p []byte) (int, error) {
	n, err := l.w.Write(p)
	if n > 0 {
		l.b = p[n-1]
	}
	return n, err
}

// Wait implements [provider.Process].
func (p *process) Wait() (provider.Exit, error) {
	<-p.done
	return p.exit, p.err
}

// Signal implements [provider.Process].
func (p *process) Signal(sig os.Signal) error {
	select {
	case <-p.done:
		return nil
	default:
	}
	if sig == os.Kill {
		return p.kill()
	}
	s, ok := sig.(syscall.Signal)
	if !ok {
		return fmt.Errorf("docker: signal %v: %w", sig, provider.ErrInvalid)
	}
	name, err := signalName(s)
	if err != nil {
		return err
	}
	return p.h.runKill(p, name)
}

// killTree ends the whole tree. Callers join the one kill that is under way.
func (p *process) killTree() error {
	select {
	case <-p.done:
		return nil
	default:
	}
	p.mu.Lock()
	p.dead = true
	p.mu.Unlock()
	err := p.h.runKill(p, "KILL")
	if errors.Is(err, provider.ErrNotFound) {
		err = nil // the container is gone, and everything in it
	}
	select {
	case <-p.done:
	case <-time.After(2 * time.Second):
		// The last word did not come through: somebody does not read the output, or
		// something unkillable holds it.
		p.conn.Close()
	}
	return err
}

// Resize implements [provider.Resizer].
func (p *process) Resize(t provider.Terminal) error {
	if !p.tty {
		return fmt.Errorf("docker: resize: %w: the command has no terminal", provider.ErrInvalid)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	_, err := p.h.p.engine.ExecResize(ctx, p.id, client.ExecResizeOptions{Height: uint(t.Rows), Width: uint(t.Cols)})
	return mapErr(err)
}

// exitOf reads a shell's status. Beyond 128 it is a signal's by convention: the
// shell does not tell it from a command that returned such a code.
func exitOf(code int) provider.Exit {
	e := provider.Exit{Code: code}
	if sig := code - 128; sig > 0 && sig < 32 {
		e.Signal = sig
	}
	return e
}

// exitCode polls an exec until it has ended: the engine may close the output
// slightly earlier.
func (h *handle) exitCode(ctx context.Context, id string) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	for wait := 10 * time.Millisecond; ; wait = min(2*wait, 100*time.Millisecond) {
		res, err := h.p.engine.ExecInspect(ctx, id, client.ExecInspectOptions{})
		if err != nil {
			return 0, mapErr(err)
		}
		if !res.Running {
			return res.ExitCode, nil
		}
		select {
		case <-ctx.Done():
			return 0, fmt.Errorf("docker: the engine still calls exec %.12s running", id)
		case <-time.After(wait):
		}
	}
}

// execCreate prepares an exec. A paused container is thawed, once.
func (h *handle) execCreate(ctx context.Context, o client.ExecCreateOptions) (string, error) {
	res, err := h.p.engine.ExecCreate(ctx, h.ref.ID, o)
	if isPaused(err) {
		if err = h.Unpause(ctx); err == nil {
			res, err = h.p.engine.ExecCreate(ctx, h.ref.ID, o)
		}
	}
	switch {
	case err == nil:
		return res.ID, nil
	case isUnknownUser(err):
		return "", fmt.Errorf("%w: user %q is not known in the sandbox", provider.ErrInvalid, o.User)
	case isStopped(err):
		return "", h.stoppedErr(ctx)
	}
	return "", mapErr(err)
}

// attachErr explains a failed attach: the client tells only the HTTP status.
func (h *handle) attachErr(ctx context.Context, err error) error {
	if strings.Contains(err.Error(), "unable to upgrade") {
		ctx, cancel := cleanupContext(ctx)
		defer cancel()
		return errors.Join(err, h.stoppedErr(ctx))
	}
	return mapErr(err)
}

// stoppedErr says what became of a container that does not take commands.
func (h *handle) stoppedErr(ctx context.Context) error {
	res, err := h.p.engine.ContainerInspect(ctx, h.ref.ID, client.ContainerInspectOptions{})
	switch {
	case errdefs.IsNotFound(err):
		return fmt.Errorf("%w: container %.12s", provider.ErrNotFound, h.ref.ID)
	case err != nil:
		return mapErr(err)
	case res.Container.State != nil && !res.Container.State.Running:
		return fmt.Errorf("%w: container %.12s is %s: resume it first", provider.ErrUnavailable, h.ref.ID, res.Container.State.Status)
	}
	return fmt.Errorf("%w: container %.12s does not take commands", provider.ErrUnavailable, h.ref.ID)
}

func isEOF(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
}
