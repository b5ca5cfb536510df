package docker

import (
	"bytes"
	"context"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/moby/moby/client"
	"golang.org/x/sys/unix"

	"github.com/aisandbox-go/aisandbox/provider"
)

// killScript signals what one Start started. $1 is the mark (see wrapScript) in
// bytes, or empty where it could not be set; $2 is the environment's mark, used
// then; $3 is the signal.
//
// The mark is a resource limit, so neither setsid, a double fork, an emptied
// environment nor closed descriptors shake it off, and it can be read for a process
// of any user, which environments can't. Two traps are avoided here: a process may
// call itself ") Z 0", so /proc/PID/status is read, where names are escaped; and
// what is found is stopped first, so that it can't fork away between the look and
// the kill. The wrapper is the one process with no parent in the container. It is
// left to report how its command ended, and ended itself only if it can't.
const killScript = `m=$1 e=$2 sig=$3
marked() {
	if [ "$m" ]; then
		grep -ls "^Max resident set  *$m " /proc/[0-9]*/limits
	else
		for f in /proc/[0-9]*/environ; do
			tr '\0' '\n' <"$f" | grep -qx "AISBX_PROC=$e" && echo "$f"
		done
	fi
}
find() {
	pids= lead=
	for f in $(marked); do
		p=${f#/proc/} p=${p%/*} st=Z pp=
		while read -r k v rest; do
			case $k in State:) st=$v ;; PPid:) pp=$v; break ;; esac
		done <"/proc/$p/status"
		case $st in Z* | X*) continue ;; esac
		if [ "$pp" = 0 ]; then lead=$p; else pids="$pids $p"; fi
	done
}
exec 2>/dev/null
if [ "$sig" != KILL ]; then
	find
	[ "$lead" ] || exit 0
	kill -s "$sig" -- "-$lead" || kill -s "$sig" "-$lead"
	exit 0
fi
i=0
while find; [ "$pids$lead" ]; do
	if [ "$pids" ]; then
		kill -s STOP $pids
		find
		[ "$pids" ] && kill -s KILL $pids
	fi
	if [ "$lead" ]; then
		if [ $i -lt 40 ]; then kill -s CONT "$lead"; else kill -s KILL "$lead"; fi
	fi
	i=$((i + 1))
	if [ $i -gt 120 ]; then
		echo "$lead $pids"
		exit 1
	fi
	[ $i -gt 1 ] && sleep 0.02
done
exit 0
`

// killTimeout bounds one run of killScript; the script gives up by itself earlier.
const killTimeout = 20 * time.Second

// runKill runs killScript for one process.
func (h *handle) runKill(p *process, sig string) error {
	ctx, cancel := context.WithTimeout(context.Background(), killTimeout)
	defer cancel()
	mark, user := "", p.user
	if p.marked {
		// Root may signal anybody; but an environment can only be read by its user.
		mark, user = strconv.FormatInt(p.mark*1024, 10), "0"
	}
	out, code, err := h.run(ctx, user, killScript, mark, p.nonce, sig)
	if err != nil {
		return fmt.Errorf("docker: signal %s: %w", sig, err)
	}
	if code != 0 {
		return fmt.Errorf("docker: signal %s: exit %d, left: %s", sig, code, strings.TrimSpace(out))
	}
	return nil
}

// signalName is the name that kill -s takes.
func signalName(sig syscall.Signal) (string, error) {
	name, ok := strings.CutPrefix(unix.SignalName(sig), "SIG")
	if !ok {
		return "", fmt.Errorf("docker: signal %d: %w", int(sig), provider.ErrInvalid)
	}
	return name, nil
}

// run runs a script of ours and returns the first 64 KiB of its output. It is no way
// to run the agent's commands: its script is trusted to say how it ended. The engine
// is not asked, because while the output of any command of the container is held
// back it may not take note of other commands' ends.
func (h *handle) run(ctx context.Context, user, script string, args ...string) (string, int, error) {
	script = "(\n" + script + "\n)\nprintf '\\nexit %03d' $?"
	id, err := h.execCreate(ctx, client.ExecCreateOptions{
		User: user, Cmd: append([]string{"/bin/sh", "-c", script, "aisbx"}, args...), WorkingDir: "/",
		AttachStdout: true, AttachStderr: true,
	})
	if err != nil {
		return "", 0, err
	}
	conn, err := h.p.engine.ExecAttach(ctx, id, client.ExecAttachOptions{})
	if err != nil {
		return "", 0, h.attachErr(ctx, err)
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, conn.Close)
	defer stop()
	var out bytes.Buffer
	w := &limited{w: &out, n: 64 << 10}
	end := func() bool { return lastLine.Match(out.Bytes()) }
	err = demux(conn.Reader, false, w, w, end)
	switch {
	case ctx.Err() != nil:
		return "", 0, context.Cause(ctx)
	case end():
		text, last := out.String()[:out.Len()-len("\nexit 000")], out.String()[out.Len()-3:]
		code, err := strconv.Atoi(last)
		return text, code, err
	case err != nil && !isEOF(err):
		return "", 0, mapErr(err)
	}
	return "", 0, fmt.Errorf("%w: the engine could not run a script in the container: %.300s", provider.ErrUnavailable, out.String())
}

var lastLine = regexp.MustCompile(`\nexit [0-9]{3}$`)
