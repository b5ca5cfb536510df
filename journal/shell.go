package journal

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strconv"
	"strings"

	"github.com/aisandbox-go/aisandbox/journal/frame"
	"github.com/aisandbox-go/aisandbox/provider"
)

// Dir is where the journals of the shell form are, inside of the sandbox.
const Dir = "/tmp/aisandbox-runs"

// maxStdin bounds what [Shell] hands to a process. It is held in memory, because
// its length is told first: half a prompt must not start an agent.
const maxStdin = 64 << 20

// maxTail is what one command returns of a journal.
const maxTail = 1 << 20

// Shell makes a provider.Reattacher of a handle that can only start commands,
// for sandboxes where no guest runs. It needs sh, mkdir, cat, tail, wc and, to
// see the end of a tree, /proc; BusyBox has them all.
//
// Its strength is level 1 at most (spec 04 §21.8): a shell can't sign, so that
// the exit is told by a word made of the nonce. The word travels on standard
// input, lives in an unexported variable of the supervising shell and is in no
// argument, environment or file while the agent runs. An agent of the same user
// that may read the memory of other processes can find it, and one can change
// lines of its journal that no host has read yet. What it can't is end the run as
// a success by printing, truncating, or killing its supervisor.
func Shell(h provider.Handle) provider.Reattacher { return shell{h} }

type shell struct{ h provider.Handle }

// exitWord is the word of a run's last line.
func exitWord(nonce []byte, runID string) string {
	m := hmac.New(sha256.New, nonce)
	m.Write([]byte("shell-exit/v1"))
	m.Write([]byte(runID))
	return hex.EncodeToString(m.Sum(nil))[:32]
}

func equal(a, b string) bool { return subtle.ConstantTimeCompare([]byte(a), []byte(b)) == 1 }

// common are the variables of all scripts: the directory, and the files of the
// token in it.
const common = `d=$1 t=$2; J=$d/$t.ndjson E=$d/$t.err L=$d/$t.lock I=$d/$t.in; `

// launchScript takes the word and the input's length in a first line, then the
// input. The lock is a directory: mkdir succeeds once. What a run was forgotten
// by stays, so that a host that slept can't start it again.
const launchScript = common + `n=$3; shift 3
umask 077
mkdir -p "$d" 2>/dev/null
[ -d "$d" ] && [ ! -L "$d" ] && [ -O "$d" ] || { echo foreign; exit 0; }
chmod 700 "$d"
IFS=' ' read -r N Z || { echo input; exit 0; }
command -v -- "$1" >/dev/null 2>&1 || { cat >/dev/null; echo missing; exit 0; }
[ ! -e "$d/$t.gone" ] && mkdir "$L" 2>/dev/null || { cat >/dev/null; echo already; exit 0; }
if [ -e "$d/$t.gone" ]; then rmdir "$L"; echo already; exit 0; fi
cat >"$I.$$"
if [ "$(wc -c <"$I.$$")" -ne "$Z" ]; then rm -rf "$I.$$" "$L"; echo input; exit 0; fi
mv "$I.$$" "$I"
S=; command -v setsid >/dev/null 2>&1 && S=setsid
printf '%s\n' "$N" | $S sh -c "$n" sh "$d" "$t" "$@" >/dev/null 2>&1 &
i=0
while [ ! -s "$L/ready" ]; do
	i=$((i+1)); [ $i -gt 200 ] && { echo stuck; exit 0; }
	sleep 0.05 2>/dev/null || sleep 1
done
echo ok`

// superviseScript is the shell that outlives everybody. It survives the signals
// that are meant for its group, whose default the agent gets back. The agent and
// what it starts carry a mark by which a kill finds them. The newline before the
// last line ends a line that the agent left open.
const superviseScript = common + `shift 2
IFS= read -r N
exec </dev/null
umask 077
trap : HUP INT TERM QUIT
s=; [ -r /proc/$$/stat ] && IFS= read -r s </proc/$$/stat; s=${s##*) }
b=; [ -r /proc/sys/kernel/random/boot_id ] && IFS= read -r b </proc/sys/kernel/random/boot_id
printf '{"__start":1}\n' >>"$J" || exit 1
printf '%s\n%s\n%s\n' $$ "$b" "$s" >"$L/pid"
echo 1 >"$L/ready"
( exec 3<"$I"; rm -f "$I"; AISBX_RUN=/$t/; export AISBX_RUN; exec "$@" <&3 3<&- ) >>"$J" 2>>"$E"
c=$?
x=$(tail -c 4096 "$E" 2>/dev/null | base64 2>/dev/null | tr -d '\n')
printf '\n{"__exit":%d,"__nonce":"%s","__stderr":"%s"}\n' "$c" "$N" "$x" >>"$J"
echo "$c" >"$L/exit"`

// aliveFunc sets A to 1 while the supervising shell lives: its process id, the
// boot it started in and its start time agree.
const aliveFunc = `A=0 P=
if [ -s "$L/pid" ]; then
	{ IFS= read -r P; IFS= read -r B; IFS= read -r Q; } <"$L/pid"
	b=; [ -r /proc/sys/kernel/random/boot_id ] && IFS= read -r b </proc/sys/kernel/random/boot_id
	if [ "$b" = "$B" ] && kill -0 "$P" 2>/dev/null; then
		s=; [ -r "/proc/$P/stat" ] && IFS= read -r s <"/proc/$P/stat"; s=${s##*) }
		set -- $s; s1=${1-} s20=${20-}; set -- $Q
		[ "$s20" = "${20-}" ] && [ "$s1" != Z ] && A=1
	fi
fi
`

const probeScript = common + `
[ -d "$L" ] || { echo absent; exit 0; }
` + aliveFunc + `
z=0; [ -f "$J" ] && z=$(wc -c <"$J")
c=; [ -s "$L/exit" ] && IFS= read -r c <"$L/exit"
l=0; [ -f "$J" ] && l=$(wc -l <"$J")
if [ -n "$c" ]; then echo "exited $z $l $c"; elif [ $A = 1 ]; then echo "running $z $l"; elif [ ! -e "$L/ready" ] && [ ! -s "$L/pid" ]; then echo "starting $z $l"; else echo "dead $z $l"; fi`

const tailScript = common + `[ -f "$J" ] || { echo none; exit 0; }
echo ok; tail -c "+$3" "$J" | head -c "$4"`

// killScript signals the group, or with 9 everything that carries the run's mark
// or belongs to the supervising shell's session, except that shell: it lives to
// tell how the agent ended.
const killScript = common + `k=$3
[ -d "$L" ] || exit 0
` + aliveFunc + `
if [ "$k" != 9 ]; then
	[ $A = 1 ] && kill -"$k" -"$P" 2>/dev/null
	exit 0
fi
i=0
while [ $i -lt 100 ]; do
	f=
	for n in $(grep -lsF "AISBX_RUN=/$t/" /proc/[0-9]*/environ 2>/dev/null) $([ $A = 1 ] && for e in /proc/[0-9]*; do
		s=; { IFS= read -r s <"$e/stat"; } 2>/dev/null || continue
		s=${s##*) }; set -- $s
		[ "${4-}" = "$P" ] && echo "$e/"
	done); do
		n=${n#/proc/}; n=${n%%/*}
		[ "$n" = "$P" ] && continue
		s=; { IFS= read -r s <"/proc/$n/stat"; } 2>/dev/null || continue
		s=${s##*) }
		[ "${s%% *}" = Z ] && continue
		kill -9 "$n" 2>/dev/null && f=1
	done
	[ -n "$f" ] || exit 0
	i=$((i+1)); sleep 0.05 2>/dev/null || sleep 1
done
exit 1`

const forgetScript = common + `
` + aliveFunc + `
[ $A = 1 ] && { echo runs; exit 0; }
umask 077; mkdir -p "$d" 2>/dev/null; [ -d "$d" ] && [ ! -L "$d" ] && [ -O "$d" ] || exit 1
: >"$d/$t.gone" || exit 1
rm -rf "$J" "$E" "$I" "$L"`

// run runs a script with the token's files and returns the beginning of what it
// prints.
func (s shell) run(ctx context.Context, script, token string, stdin io.Reader, out io.Writer, cmd provider.Cmd, args ...string) error {
	if !frame.ValidToken(token) {
		return fmt.Errorf("journal: run token %.40q: %w", token, provider.ErrInvalid)
	}
	var errb bytes.Buffer
	cmd.Argv = append([]string{"sh", "-c", script, "sh", Dir, token}, args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, out, &capped{w: &errb, left: 4 << 10}
	p, err := s.h.Start(ctx, cmd)
	if err != nil {
		return fmt.Errorf("journal: %w", err)
	}
	exit, err := p.Wait()
	switch {
	case err != nil:
		return fmt.Errorf("journal: %w", err)
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case exit != (provider.Exit{}):
		return fmt.Errorf("journal: %w", &provider.ExitError{Argv: []string{"sh"}, Exit: exit, StderrTail: errb.String()})
	}
	return nil
}

func (s shell) ask(ctx context.Context, script, token string, args ...string) (string, error) {
	var out bytes.Buffer
	err := s.run(ctx, script, token, nil, &capped{w: &out, left: 4 << 10}, provider.Cmd{Dir: "/"}, args...)
	return strings.TrimSpace(out.String()), err
}

// capped keeps the first bytes of a stream.
type capped struct {
	w    io.Writer
	left int
}

func (c *capped) Write(b []byte) (int, error) {
	n := min(len(b), c.left)
	c.left -= n
	if _, err := c.w.Write(b[:n]); err != nil {
		return 0, err
	}
	return len(b), nil
}

func (s shell) Launch(ctx context.Context, token string, cmd provider.Cmd, opts provider.LaunchOptions) error {
	if cmd.Stdout != nil || cmd.Stderr != nil || cmd.Terminal != nil || len(cmd.Argv) == 0 {
		return fmt.Errorf("journal: launch: a detached process has an argv, no terminal and its output in the journal: %w", provider.ErrInvalid)
	}
	var input []byte
	if cmd.Stdin != nil {
		var err error
		if input, err = io.ReadAll(io.LimitReader(cmd.Stdin, maxStdin+1)); err != nil {
			return fmt.Errorf("journal: launch: stdin: %w", err)
		}
		if len(input) > maxStdin {
			return fmt.Errorf("journal: launch: stdin of more than %d bytes: %w", maxStdin, provider.ErrInvalid)
		}
	}
	head := exitWord(opts.Nonce, opts.RunID) + " " + strconv.Itoa(len(input)) + "\n"
	var out bytes.Buffer
	argv := append([]string{superviseScript}, cmd.Argv...)
	// What was sent is not taken back half way: the launch ends by itself.
	err := s.run(ctx, launchScript, token, io.MultiReader(strings.NewReader(head), bytes.NewReader(input)), &capped{w: &out, left: 4 << 10},
		provider.Cmd{Dir: cmd.Dir, Env: cmd.Env, User: cmd.User}, argv...)
	if err != nil {
		return err
	}
	switch answer := strings.TrimSpace(out.String()); answer {
	case "ok":
		return nil
	case "already":
		return fmt.Errorf("journal: launch %q: %w", token, provider.ErrAlreadyLaunched)
	case "missing":
		return fmt.Errorf("journal: launch: %w", &fs.PathError{Op: "exec", Path: cmd.Argv[0], Err: fs.ErrNotExist})
	case "foreign":
		return fmt.Errorf("journal: launch: %s is another user's, or a link: %w", Dir, fs.ErrPermission)
	default:
		return fmt.Errorf("journal: launch: the supervising shell did not start (%.40q)", answer)
	}
}

func (s shell) Probe(ctx context.Context, token string) (provider.Probe, error) {
	answer, err := s.ask(ctx, probeScript, token)
	if err != nil {
		return provider.Probe{}, err
	}
	f := strings.Fields(answer)
	if len(f) == 1 && f[0] == "absent" {
		return provider.Probe{State: provider.ProbeAbsent}, nil
	}
	p := provider.Probe{Level: 1}
	var errs [3]error
	if len(f) >= 3 {
		p.Size, errs[0] = strconv.ParseInt(f[1], 10, 64)
		p.Lines, errs[1] = strconv.ParseInt(f[2], 10, 64)
		p.State = provider.ProbeState(f[0])
	}
	switch {
	case len(f) == 4 && p.State == provider.ProbeExited:
		var code int
		code, errs[2] = strconv.Atoi(f[3])
		p.Exit = &provider.Exit{Code: code}
		if code > 128 && code <= 128+64 {
			p.Exit.Signal = code - 128
		}
	case len(f) == 3 && (p.State == provider.ProbeRunning || p.State == provider.ProbeDead || p.State == provider.ProbeStarting):
	default:
		return provider.Probe{}, fmt.Errorf("journal: probe says %.80q", answer)
	}
	if err := errors.Join(errs[:]...); err != nil {
		return provider.Probe{}, fmt.Errorf("journal: probe says %.80q: %w", answer, err)
	}
	return p, nil
}

func (s shell) Kill(ctx context.Context, token string, sig int) error {
	if sig < 1 || sig > 64 {
		return fmt.Errorf("journal: signal %d: %w", sig, provider.ErrInvalid)
	}
	_, err := s.ask(ctx, killScript, token, strconv.Itoa(sig))
	return err
}

func (s shell) Forget(ctx context.Context, token string) error {
	answer, err := s.ask(ctx, forgetScript, token)
	if err == nil && answer == "runs" {
		err = fmt.Errorf("journal: forget: the process still runs; kill it first: %w", provider.ErrInvalid)
	}
	return err
}

func (s shell) Tail(ctx context.Context, token string, from int64, follow bool) (io.ReadCloser, error) {
	if from < 0 {
		return nil, fmt.Errorf("journal: tail from %d: %w", from, provider.ErrInvalid)
	}
	ctx, stop := context.WithCancel(ctx)
	t := &shellTail{shell: s, ctx: ctx, stop: stop, token: token, off: from, follow: follow}
	// The first piece now, so that an error is this call's.
	if err := t.fill(); err != nil {
		stop()
		return nil, err
	}
	return t, nil
}

// shellTail reads a journal in pieces.
type shellTail struct {
	shell
	ctx    context.Context
	stop   context.CancelFunc
	token  string
	off    int64
	follow bool
	buf    []byte
	ended  bool // the process had ended before the last piece was read
}

func (t *shellTail) Close() error {
	t.stop()
	return nil
}

// fill gets the next piece; an empty one is the end for now.
func (t *shellTail) fill() error {
	var out bytes.Buffer
	err := t.run(t.ctx, tailScript, t.token, nil, &capped{w: &out, left: maxTail + 16}, provider.Cmd{Dir: "/"},
		strconv.FormatInt(t.off+1, 10), strconv.Itoa(maxTail))
	if err != nil {
		return err
	}
	head, body, ok := bytes.Cut(out.Bytes(), []byte("\n"))
	switch {
	case ok && string(head) == "none":
		return fmt.Errorf("journal: tail: %w", &fs.PathError{Op: "open", Path: t.token, Err: fs.ErrNotExist})
	case !ok || string(head) != "ok":
		return fmt.Errorf("journal: tail says %.40q", head)
	}
	t.off += int64(len(body))
	t.buf = body
	return nil
}

func (t *shellTail) Read(b []byte) (int, error) {
	for len(t.buf) == 0 {
		if t.ctx.Err() != nil {
			return 0, context.Cause(t.ctx)
		}
		if err := t.fill(); err != nil {
			return 0, err
		}
		if len(t.buf) > 0 {
			break
		}
		if !t.follow || t.ended {
			return 0, io.EOF
		}
		p, err := t.Probe(t.ctx, t.token)
		if err != nil {
			return 0, err
		}
		// One more piece after its end: it wrote before it ended.
		if t.ended = p.State != provider.ProbeRunning && p.State != provider.ProbeStarting; t.ended {
			continue
		}
		if err := pause(t.ctx, pollEvery); err != nil {
			return 0, err
		}
	}
	n := copy(b, t.buf)
	t.buf = t.buf[n:]
	return n, nil
}
