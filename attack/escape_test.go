package attack

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/aisandbox-go/aisandbox/internal/testenv"
	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/workspace"
)

// probe is a script that prints ESCAPED where it got what it must not get. Where
// that can be told from the host, escaped does so.
type probe struct {
	name    string
	script  string
	escaped func() bool
}

// TestEscape runs each probe in each sandbox. On local it has to succeed.
func TestEscape(t *testing.T) {
	testenv.Require(t, os.Geteuid() == 0, "root, for whom the controls work", "run as root")
	testenv.Docker(t) // its socket is one of the targets
	for _, pl := range places {
		t.Run(pl.name, func(t *testing.T) {
			pl.require(t)
			network := provider.NetworkNone
			if !pl.isolates {
				network = provider.NetworkHost
			}
			h := newHost(t)
			sb := box(t, pl.open(t, options{base: shortDir(t)}), network, workspace.Workspace{})
			for _, p := range h.probes(pl.isolates) {
				t.Run(p.name, func(t *testing.T) {
					out := sh(t, sb, p.script)
					escaped := strings.Contains(out, "ESCAPED")
					if p.escaped != nil {
						escaped = p.escaped()
					}
					switch {
					case escaped && pl.isolates:
						t.Errorf("escaped: %s", out)
					case !escaped && !pl.isolates:
						t.Errorf("the positive control found nothing: %s", out)
					}
				})
			}
			if out := sh(t, sb, "echo x > here && cat here"); out != "x" {
				t.Errorf("the sandbox does not work any more: %s", out)
			}
		})
	}
}

// host is what there is to be had outside of the sandbox.
type host struct {
	id       string // unique, in the names of everything
	dir      string // of the host, not shown inside
	secret   string // a file in dir
	home     string // a file in the home of the host's user
	victim   *exec.Cmd
	died     chan struct{}
	mark     string // in the victim's command line
	abstract string // a listening socket's name
	port     int    // and another's port on the loopback
}

func newHost(t *testing.T) *host {
	t.Helper()
	h := &host{id: "aisandbox-attack-" + strings.ToLower(rand.Text()[:10]), dir: shortDir(t), died: make(chan struct{})}
	plant := func(name string) string {
		if err := os.WriteFile(name, []byte("planted "+h.id), 0o644); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = os.Remove(name) })
		return name
	}
	h.secret = plant(filepath.Join(h.dir, "planted"))
	home, err := os.UserHomeDir()
	if err != nil {
		t.Fatal(err)
	}
	h.home = plant(filepath.Join(home, "."+h.id))

	h.mark = "61" + strconv.FormatInt(time.Now().UnixNano()%1e9+1e9, 10)
	h.victim = exec.Command("sleep", h.mark)
	if err := h.victim.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = h.victim.Wait()
		close(h.died)
	}()
	t.Cleanup(func() {
		_ = h.victim.Process.Kill()
		<-h.died
	})

	h.abstract = h.id
	for _, l := range []struct{ network, addr string }{{"unix", "@" + h.abstract}, {"tcp", "127.0.0.1:0"}} {
		ln, err := net.Listen(l.network, l.addr)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = ln.Close() })
		if a, ok := ln.Addr().(*net.TCPAddr); ok {
			h.port = a.Port
		}
	}

	// A key of this user's keyring, where the kernel has such.
	if id, err := unix.AddKey("user", h.id, []byte("planted"), unix.KEY_SPEC_USER_KEYRING); err == nil {
		t.Cleanup(func() { _, _ = unix.KeyctlInt(unix.KEYCTL_UNLINK, id, unix.KEY_SPEC_USER_KEYRING, 0, 0) })
	}
	return h
}

func (h *host) isDead() bool {
	select {
	case <-h.died:
		return true
	case <-time.After(200 * time.Millisecond):
		return false
	}
}

// probes are the attacks. The process to spy on is the first of the sandbox; on
// the host, where that is none of ours, it is the one that started the command.
func (h *host) probes(isolates bool) []probe {
	first := "$PPID"
	if isolates {
		first = "1"
	}
	out := func(name string) string { return filepath.Join(h.dir, name) }
	exists := func(name string) func() bool {
		return func() bool {
			_, err := os.Lstat(name)
			return err == nil
		}
	}
	shadow, err := os.ReadFile("/etc/shadow")
	sum := sha256.Sum256(shadow)
	ps := []probe{
		{name: "a file of the host", script: "grep -q planted " + h.secret + " && echo ESCAPED"},
		{name: "the home of the host's user", script: "grep -q planted " + h.home + " && echo ESCAPED"},
		{name: "a file of the host through the first process's root", script: "grep -q planted /proc/" + first + "/root" + h.secret + " && echo ESCAPED"},
		{name: "write to the host", script: "mkdir -p " + h.dir + "; echo x > " + out("written"), escaped: exists(out("written"))},
		{name: "write to a system directory", script: "mkdir -p /usr/local/etc; echo x > /usr/local/etc/" + h.id + "; echo done", escaped: func() bool {
			return exists("/usr/local/etc/"+h.id)() && os.Remove("/usr/local/etc/"+h.id) == nil
		}},
		{name: "the engine's socket", script: "for s in /var/run/docker.sock /run/docker.sock /run/containerd/containerd.sock; do test -S $s && echo ESCAPED $s; done"},
		// The pattern does not match itself.
		{name: "processes of the host", script: fmt.Sprintf("grep -ls '[%s]%s' /proc/[0-9]*/cmdline | grep . && echo ESCAPED", h.mark[:1], h.mark[1:])},
		{name: "the first process's memory", script: "dd if=/proc/" + first + "/mem bs=1 count=1 skip=$(($(head -n 1 /proc/" + first + "/maps | sed 's/-.*//; s/^/0x/'))) 2>/dev/null | wc -c | grep -qx 1 && echo ESCAPED"},
		{name: "the first process's environment", script: "tr '\\0' '\\n' < /proc/" + first + "/environ | grep -q = && echo ESCAPED"},
		{name: "the first process's files", script: "readlink /proc/" + first + "/fd/0 && echo ESCAPED"},
		{name: "mount", script: "d=$(mktemp -d); mount -t tmpfs none $d && { echo ESCAPED; umount $d; }; rmdir $d"},
		{name: "a disk of the host", script: "for d in . /tmp /dev; do n=$d/" + h.id + "; mknod $n b $(awk 'NR > 2 {print $1, $2; exit}' /proc/partitions) && echo ESCAPED; rm -f $n; done"},
		{name: "settings of the kernel", script: "v=$(cat /proc/sys/vm/swappiness) && echo $v > /proc/sys/vm/swappiness && echo ESCAPED"},
		{name: "a host process's namespaces", script: fmt.Sprintf("nsenter -t %d -m -p -- test -e %s && echo ESCAPED", h.victim.Process.Pid, h.secret)},
		{name: "the host's loopback", script: fmt.Sprintf("bash -c 'exec 3<>/dev/tcp/127.0.0.1/%d' && echo ESCAPED", h.port)},
		{name: "an abstract socket of the host", script: fmt.Sprintf(`perl -MSocket -e 'socket(S, PF_UNIX, SOCK_STREAM, 0) && connect(S, pack("S a*", PF_UNIX, "\0%s")) && print "ESCAPED\n"'`, h.abstract)},
		{name: "a key of the host's user", script: "grep -q " + h.id + " /proc/keys && echo ESCAPED"},
		{name: "a link out of the workspace", script: "ln -s " + h.secret + " link; grep -q planted link && echo ESCAPED"},
		{name: "dot-dot out of the workspace", script: "grep -q planted ../../../../../../../../../.." + h.secret + " && echo ESCAPED"},
		{name: "the control groups", script: "for d in /sys/fs/cgroup/* /sys/fs/cgroup; do n=$d/" + h.id + "; mkdir $n 2>/dev/null && { test -e $n/cgroup.procs && echo ESCAPED $d; rmdir $n; }; done"},
		{name: "kill a process of the host", script: fmt.Sprintf("kill -9 %d", h.victim.Process.Pid), escaped: h.isDead},
	}
	if err == nil && len(shadow) > 0 {
		ps = append(ps, probe{name: "the host's passwords", script: "sha256sum /etc/shadow | grep -q " + hex.EncodeToString(sum[:]) + " && echo ESCAPED"})
	}
	return ps
}

// TestFirstProcessSurvives: the guest takes no signal of the agent's. There is no
// control on local: there the agent may well kill it, and everything else.
func TestFirstProcessSurvives(t *testing.T) {
	for _, pl := range places {
		if !pl.isolates {
			continue
		}
		t.Run(pl.name, func(t *testing.T) {
			pl.require(t)
			sb := box(t, pl.open(t, options{base: shortDir(t)}), "", workspace.Workspace{})
			before := sh(t, sb, "cut -d' ' -f22 /proc/1/stat")
			signals := []string{"9", "2", "1", "3", "4", "5", "6", "7", "8", "10", "11", "12", "13", "14", "19", "20", "31"}
			if pl.name != "docker as root" { // there the engine's SIGTERM can't be told from root's
				signals = append(signals, "15")
			}
			for _, sig := range signals {
				sh(t, sb, "kill -"+sig+" 1; kill -"+sig+" -- -1; sleep 600 & kill -"+sig+" -- -$!; true")
				if out := sh(t, sb, "echo alive"); out != "alive" {
					t.Fatalf("after signal %s: %q", sig, out)
				}
			}
			if after := sh(t, sb, "cut -d' ' -f22 /proc/1/stat"); after != before || after == "" {
				t.Errorf("the first process was started at %q, now at %q", before, after)
			}
		})
	}
}
