package providertest

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/aisandbox-go/aisandbox/provider"
)

// traitCases measure what Traits claim. Kill and LiveStdin are measured by the
// S cases.
var traitCases = []testCase{
	{"T1", "traits are static", func(t *testing.T, b *box) {
		again := b.s.p.Traits()
		if !slices.Equal(again.Networks, b.s.p.Traits().Networks) || again.Isolation != b.s.p.Traits().Isolation {
			t.Errorf("%+v, then %+v", again, b.s.p.Traits())
		}
		if len(again.Networks) == 0 {
			t.Error("Networks is empty: the first entry is the default")
		}
		levels := []provider.Isolation{provider.IsolationNone, provider.IsolationNamespaces, provider.IsolationContainer, provider.IsolationVM}
		if !slices.Contains(levels, again.Isolation) {
			t.Errorf("Isolation is %q", again.Isolation)
		}
		if b.s.p.Name() == "" || strings.ContainsAny(b.s.p.Name(), " :/") {
			t.Errorf("name %q", b.s.p.Name())
		}
		b.own()
		// A wrapper may add to the facts, never lose one: cases would be skipped.
		for fact, lost := range map[string]bool{
			"DurableFS":    again.DurableFS && !b.tr.DurableFS,
			"LiveStdin":    again.LiveStdin && !b.tr.LiveStdin,
			"Kill":         again.Kill && !b.tr.Kill,
			"Outlives":     again.Outlives && !b.tr.Outlives,
			"SharedKernel": again.SharedKernel && !b.tr.SharedKernel,
			"Isolation":    again.Isolation != b.tr.Isolation,
		} {
			if lost {
				t.Errorf("the wrapped handle's Traits lost %s", fact)
			}
		}
		if r := b.h.Ref(); r.Provider != b.s.p.Name() || r.ID == "" || r.Version < 1 {
			t.Errorf("reference %+v", r)
		}
	}},
	{"T2", "files are durable", func(t *testing.T, b *box) {
		b.own()
		if !b.tr.DurableFS {
			b.lacks("durable files (Traits.DurableFS)")
		}
		f := b.path("file")
		b.put(f, "from the first;")
		b.h.Close()
		if got := b.inSecond("files", f); got != "from the first;runs\n" {
			t.Errorf("the second process read %q", got)
		}
		b.attach(b.s.resume(t, b.storedRef()))
		if got := b.read(f + ".second"); got != "from the second" {
			t.Errorf("the first process reads %q", got)
		}
	}},
	{"T3", "processes outlive their host", func(t *testing.T, b *box) {
		b.own()
		if !b.tr.Outlives {
			b.lacks("processes that outlive this host (Traits.Outlives)")
		}
		if _, ok := provider.As[provider.Reattacher](b.h); ok {
			b.skip("a process that shall outlive its host is launched detached: see D5")
		}
		f := b.path("beats")
		b.inSecond("outlive", f)
		was := b.size(f)
		b.eventually(10*time.Second, "the process goes on", func() bool { return b.size(f) > was })
	}},
	{"T4", "isolation", isolation},
	{"T5", "shared kernel", func(t *testing.T, b *box) {
		b.own()
		if !b.tr.SharedKernel {
			b.lacks("the host's kernel (Traits.SharedKernel)")
		}
		mine, err := os.ReadFile("/proc/sys/kernel/osrelease")
		if err != nil {
			b.skip("no kernel release to compare with: %v", err)
		}
		if got := b.must("uname -r"); got != string(mine) {
			t.Errorf("the sandbox runs on %q, this host on %q", got, mine)
		}
	}},
}

// isolation tries to reach the host. What no isolation promises to hide has to be
// in reach, or the probe proves nothing.
func isolation(t *testing.T, b *box) {
	b.own()
	isolated := b.tr.Isolation != provider.IsolationNone
	probe := func(what string, reached bool) {
		t.Helper()
		if reached == isolated {
			t.Errorf("%s: reached is %v, isolation is %s", what, reached, b.tr.Isolation)
		}
	}
	secret := filepath.Join(Dir(t), "host-file")
	if err := os.WriteFile(secret, []byte("host secret"), 0o644); err != nil {
		t.Fatal(err)
	}
	probe("a file of the host", b.sh(`cat "$1"`, secret).out == "host secret")
	probe("a path below the host's home", strings.Contains(b.sh(`ls -d "$1" 2>/dev/null`, secret).out, "host-file"))

	if b.must(`mkdir -p /tmp; echo x >"/tmp/$1" && ls "/tmp/$1"`, filepath.Base(secret)+token()) == "" {
		t.Error("/tmp can't be written")
	}
	if _, err := os.Stat("/proc/self"); err == nil {
		pid := strconv.Itoa(os.Getpid())
		mine, _ := os.ReadFile("/proc/self/cmdline")
		theirs := b.sh(`cat "/proc/$1/cmdline"`, pid).out
		probe("the host's process table", theirs == string(mine))
		root := b.sh(`cat "/proc/1/root/$1"`, secret).out
		if isolated && root == "host secret" {
			t.Error("the host's files through /proc/1/root")
		}
	}
	if !isolated {
		return
	}
	if shadow, err := os.ReadFile("/etc/shadow"); err == nil && len(shadow) > 0 {
		if got := b.sh("cat /etc/shadow").out; got == string(shadow) {
			t.Error("the host's /etc/shadow")
		}
	}
	for _, sock := range []string{"/var/run/docker.sock", "/run/docker.sock", "/run/containerd/containerd.sock", "/run/dbus/system_bus_socket"} {
		if b.sh(`test -e "$1"`, sock).exit.Code == 0 {
			t.Errorf("%s is there", sock)
		}
	}
	if home, err := os.UserHomeDir(); err == nil {
		name := ".aisbx-" + token()
		if err := os.WriteFile(filepath.Join(home, name), nil, 0o644); err == nil {
			defer os.Remove(filepath.Join(home, name))
			if b.sh(`test -e "$1/$2"`, home, name).exit.Code == 0 {
				t.Error("the host's home directory")
			}
		}
	}
	if r := b.sh(`echo x >"/usr/$1" || echo x >"/etc/$1"`, token()); b.tr.SharedKernel && b.tr.Isolation == provider.IsolationNamespaces && r.exit.Code == 0 {
		t.Error("the host's programs can be changed")
	}
	if r := b.sh(`mount -t tmpfs none /mnt 2>&1 || mount --bind /tmp /usr 2>&1`); r.exit.Code == 0 {
		t.Error("mount succeeded")
	}
}

// networkCases look at what a sandbox reaches.
var networkCases = []testCase{
	{"N1", "network none", func(t *testing.T, b *box) {
		if !slices.Contains(b.s.p.Traits().Networks, provider.NetworkNone) {
			b.lacks("network none")
		}
		reach := func(mode provider.Network) int {
			spec := b.s.spec(t)
			spec.Network = mode
			b.attach(b.s.create(t, spec))
			return b.reachesHost()
		}
		if reach(provider.NetworkDefault) == 0 && (!slices.Contains(b.s.p.Traits().Networks, provider.NetworkHost) || reach(provider.NetworkHost) == 0) {
			b.skip("no tool in the sandbox can connect to the host, or it reaches nothing in any mode")
		}
		if n := reach(provider.NetworkNone); n != 0 {
			t.Errorf("%d connections got out", n)
		}
		b.must("true")
	}},
	{"N4", "network modes that are not offered", func(t *testing.T, b *box) {
		for _, mode := range []provider.Network{provider.NetworkNone, provider.NetworkHost, "bogus"} {
			if slices.Contains(b.s.p.Traits().Networks, mode) {
				continue
			}
			spec := b.s.spec(t)
			spec.Network = mode
			if h, err := b.s.p.Create(b.ctx, spec); err == nil {
				b.s.destroyLater(t, h.Ref())
				h.Close()
				t.Errorf("network %q was accepted", mode)
			}
		}
	}},
}

// reachesHost counts connections from inside to listeners of this host.
func (b *box) reachesHost() int {
	b.t.Helper()
	var addrs []string
	ifs, _ := net.InterfaceAddrs()
	for _, a := range ifs {
		if n, ok := a.(*net.IPNet); ok && n.IP.To4() != nil {
			addrs = append(addrs, n.IP.String())
		}
	}
	l, err := net.Listen("tcp4", "0.0.0.0:0")
	if err != nil {
		b.skip("no listener on this host: %v", err)
	}
	defer l.Close()
	arrived := make(chan struct{}, 1000)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				close(arrived)
				return
			}
			c.Close()
			arrived <- struct{}{}
		}
	}()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	script := `p=$1; shift
for a do
	if command -v bash >/dev/null; then timeout 2 bash -c 'exec 3<>"/dev/tcp/$0/$1"' "$a" "$p"
	elif command -v nc >/dev/null; then nc -w 2 "$a" "$p" </dev/null
	elif command -v busybox >/dev/null; then busybox nc -w 2 "$a" "$p" </dev/null
	elif command -v wget >/dev/null; then wget -T 2 -O /dev/null "http://$a:$p/"
	fi
done >/dev/null 2>&1; :`
	ctx, cancel := context.WithTimeout(b.ctx, 30*time.Second)
	defer cancel()
	p, err := b.h.Start(ctx, provider.Cmd{Argv: shell(script, append([]string{port}, addrs...)...)})
	if err == nil {
		_, err = p.Wait()
	}
	if err != nil {
		b.t.Fatal(fmt.Errorf("connect from inside: %w", err))
	}
	l.Close()
	n := 0
	for range arrived {
		n++
	}
	return n
}
