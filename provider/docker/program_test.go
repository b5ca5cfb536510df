package docker

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/client"

	"github.com/aisandbox-go/aisandbox/guest"
	"github.com/aisandbox-go/aisandbox/provider"
)

func withGuest() provider.Spec { return provider.Spec{Init: guest.NewInit(guest.Options{})} }

func attachGuest(t *testing.T, p *Provider, raw provider.Handle) *guest.Handle {
	t.Helper()
	h, err := guest.Attach(t.Context(), raw, guest.Options{Traits: p.Traits()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = h.Close() })
	return h
}

func inspected(t *testing.T, p *Provider, h provider.Handle) container.InspectResponse {
	t.Helper()
	c, err := p.inspect(t.Context(), h.Ref())
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// mounted says whether the container's program is the host's file.
func mounted(c container.InspectResponse) bool {
	for _, m := range c.Mounts {
		if m.Destination == c.Config.Labels[labelGuest] {
			return true
		}
	}
	return false
}

// tapped keeps the connections that a guest handle dials.
type tapped struct {
	provider.Handle
	conns chan io.Closer
}

func (d *tapped) Unwrap() any { return d.Handle }

func (d *tapped) DialInit(ctx context.Context) (io.ReadWriteCloser, error) {
	ic, _ := provider.As[provider.InitConn](d.Handle)
	c, err := ic.DialInit(ctx)
	if err == nil {
		d.conns <- c
	}
	return c, err
}

// The first connection is to the guest's standard streams, and nothing depends on
// it: not the guest's life, not the next connection, not another host.
func TestFirstConnection(t *testing.T) {
	programOK(t)
	p := newProvider(t, Options{})
	cli := p.engine.(*client.Client)
	raw := create(t, p, withGuest())
	tap := &tapped{raw, make(chan io.Closer, 8)}
	h := attachGuest(t, p, tap)
	r := exec(t, h, provider.Cmd{Argv: provider.Shell(`printf %s "$TOKEN"; printf %s "$TOKEN" >&2`), Env: []string{"TOKEN=" + secretValue}})
	if r.out != secretValue || r.err != secretValue {
		t.Errorf("%+v", r)
	}
	before := inspected(t, p, h)
	if n := len(before.ExecIDs); n != 0 {
		t.Errorf("%d execs of the engine", n)
	}
	if logs, err := cli.ContainerLogs(t.Context(), h.Ref().ID, client.ContainerLogsOptions{ShowStdout: true, ShowStderr: true}); err == nil {
		b, _ := io.ReadAll(logs)
		_ = logs.Close()
		if len(b) > 0 {
			t.Errorf("the engine logged %q", b)
		}
	}
	if before.LogPath != "" {
		if b, err := os.ReadFile(before.LogPath); err == nil && len(b) > 0 {
			t.Errorf("the engine logged %.200q", b)
		}
	}

	// It drops: what was started over it ends, and the next call connects again.
	sleeper, err := h.Start(t.Context(), provider.Cmd{Argv: provider.Shell("setsid sleep 98765 & wait")})
	if err != nil {
		t.Fatal(err)
	}
	_ = (<-tap.conns).Close()
	if _, err := sleeper.Wait(); !errors.Is(err, provider.ErrUnavailable) {
		t.Errorf("Wait: %v", err)
	}
	eventually(t, 5*time.Second, "what was started over the connection ends with it", func() bool {
		return sh(t, h, `grep -la 'sleep.9876[5]' /proc/[0-9]*/cmdline 2>/dev/null | wc -l`) == "0"
	})
	if len(tap.conns) != 1 {
		t.Errorf("%d further connections, want 1", len(tap.conns))
	}

	// Another host.
	other := newProvider(t, Options{})
	again, err := other.Resume(t.Context(), h.Ref())
	if err != nil {
		t.Fatal(err)
	}
	g := attachGuest(t, other, again)
	if got := sh(t, g, "echo here"); got != "here" {
		t.Error(got)
	}
	if err := h.Close(); err != nil {
		t.Error(err)
	}
	if got := sh(t, g, "echo still here"); got != "still here" {
		t.Error(got)
	}
	after := inspected(t, p, h)
	if after.State.Pid != before.State.Pid || !after.State.Running {
		t.Errorf("the first process is %+v, was %+v", after.State, before.State)
	}

	// A restart, after which nobody speaks to the standard streams.
	zero := 0
	if _, err := cli.ContainerRestart(t.Context(), h.Ref().ID, client.ContainerRestartOptions{Timeout: &zero}); err != nil {
		t.Fatal(err)
	}
	again, err = other.Resume(t.Context(), h.Ref())
	if err != nil {
		t.Fatal(err)
	}
	if got := sh(t, attachGuest(t, other, again), "echo once more"); got != "once more" {
		t.Error(got)
	}
}

// A connection that nobody took is given back, and one that is dead is not used.
func TestFirstConnectionUnused(t *testing.T) {
	programOK(t)
	p := newProvider(t, Options{})
	raw := create(t, p, withGuest())
	i, _ := provider.As[*initHandle](raw)
	_ = i.first.Load().Close()
	if got := sh(t, attachGuest(t, p, raw), "echo here"); got != "here" {
		t.Error(got)
	}
	unused := create(t, p, withGuest())
	if err := unused.Close(); err != nil { // the test's end looks for what is left
		t.Error(err)
	}
}

// The words of a guest that ends at once are told, though there is no log.
func TestGuestEndsAtOnce(t *testing.T) {
	programOK(t)
	p := newProvider(t, Options{})
	spec := withGuest()
	spec.Init.Args = append(spec.Init.Args, "--no-such-flag")
	raw, err := p.Create(t.Context(), spec)
	if err == nil { // it ended a moment later
		raw = destroyed(t, p, raw, err)
		_, err = guest.Attach(t.Context(), raw, guest.Options{Traits: p.Traits()})
	}
	if err == nil || !strings.Contains(err.Error(), "no-such-flag") {
		t.Error(err)
	}
}

// Where the engine is near, the program is mounted, and the agent can't change it.
// Snapshots depend on it in neither direction.
func TestMountedProgram(t *testing.T) {
	programOK(t)
	base := t.TempDir()
	near := newProvider(t, Options{BaseDir: base})
	if !near.near() {
		t.Skip("the engine is on another machine")
	}
	far := newProvider(t, Options{})
	far.near = func() bool { return false }
	files, err := filepath.Glob(filepath.Join(base, programDir, "*"))
	if err != nil || len(files) != 0 {
		t.Error(files, err)
	}
	for name, ps := range map[string][2]*Provider{"mounted to copied": {near, far}, "copied to mounted": {far, near}, "mounted to mounted": {near, near}} {
		t.Run(name, func(t *testing.T) {
			from, to := ps[0], ps[1]
			h := attachGuest(t, from, create(t, from, withGuest()))
			if c := inspected(t, from, h); mounted(c) != (from == near) {
				t.Errorf("mounted: %v", mounted(c))
			}
			sh(t, h, "echo data >file")
			if from == near {
				r := exec(t, h, provider.Cmd{Argv: provider.Shell("f=$(readlink /proc/1/exe || echo /.aisandbox/guest-*); chmod u+w $f; echo x >>$f; rm -f $f; mount -o remount,rw $f")})
				if r.exit.Code == 0 {
					t.Errorf("%+v", r)
				}
			}
			snap, _ := provider.As[provider.Snapshotter](h)
			id, err := snap.Snapshot(t.Context(), "x")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = from.DeleteSnapshot(context.Background(), id) })
			back, err := to.Restore(t.Context(), id, withGuest())
			back = destroyed(t, to, back, err)
			if got := sh(t, attachGuest(t, to, back), "cat file"); got != "data" {
				t.Error(got)
			}
			if c := inspected(t, to, back); mounted(c) != (to == near) {
				t.Errorf("restored, mounted: %v", mounted(c))
			}
			forker, _ := provider.As[provider.Forker](h)
			fork, err := forker.Fork(t.Context(), withGuest())
			fork = destroyed(t, from, fork, err)
			if got := sh(t, attachGuest(t, from, fork), "cat file"); got != "data" {
				t.Error(got)
			}
		})
	}
	files, err = filepath.Glob(filepath.Join(base, programDir, "*"))
	if err != nil || len(files) != 1 || digestOf(files[0]) != filepath.Base(files[0]) {
		t.Errorf("%v, %v", files, err)
	}
}

// An engine that can't use the file gets a copy; a sandbox whose file is gone says
// so, and how to get it back.
func TestProgramOutOfReach(t *testing.T) {
	programOK(t)
	base := t.TempDir()
	p := newProvider(t, Options{BaseDir: base})
	if !p.near() {
		t.Skip("the engine is on another machine")
	}
	prog, err := guest.Program("linux/amd64")
	if err != nil {
		t.Fatal(err)
	}
	file, err := p.share(prog)
	if err != nil {
		t.Fatal(err)
	}
	kept := create(t, p, withGuest())
	zero := 0
	if _, err := p.engine.ContainerStop(t.Context(), kept.Ref().ID, client.ContainerStopOptions{Timeout: &zero}); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(file, 0o444); err != nil {
		t.Fatal(err)
	}
	h := create(t, p, withGuest())
	if mounted(inspected(t, p, h)) || !p.copies.Load() {
		t.Error("a program that can't be run was mounted")
	}
	if got := sh(t, attachGuest(t, p, h), "echo here"); got != "here" {
		t.Error(got)
	}

	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Resume(t.Context(), kept.Ref()); err == nil || !strings.Contains(err.Error(), "puts it back") || errors.Is(err, provider.ErrNotFound) {
		t.Error(err)
	}
	if _, err := newProvider(t, Options{BaseDir: base}).share(prog); err != nil {
		t.Fatal(err)
	}
	again, err := p.Resume(t.Context(), kept.Ref())
	if err != nil {
		t.Fatal(err)
	}
	if got := sh(t, attachGuest(t, p, again), "echo here"); got != "here" {
		t.Error(got)
	}
}

func TestShare(t *testing.T) {
	p := New(Options{Image: "x", BaseDir: t.TempDir()})
	defer p.Close()
	file := filepath.Join(t.TempDir(), "prog")
	if err := os.WriteFile(file, []byte("program"), 0o755); err != nil {
		t.Fatal(err)
	}
	good := provider.Program{Digest: digestOf(file), Path: file}
	dest, err := p.share(good)
	if err != nil {
		t.Fatal(err)
	}
	if st, err := os.Stat(dest); err != nil || st.Mode().Perm() != 0o555 {
		t.Error(st, err)
	}
	if err := os.WriteFile(file, []byte("another"), 0o755); err != nil {
		t.Fatal(err)
	}
	if again, err := p.share(good); err != nil || again != dest {
		t.Error(again, err)
	}
	for name, bad := range map[string]provider.Program{
		"content": {Digest: strings.Repeat("0", 64), Path: file}, "digest": {Digest: "../../x", Path: file}, "file": {Digest: strings.Repeat("1", 64), Path: file + "x"},
	} {
		if got, err := p.share(bad); err == nil {
			t.Errorf("%s: %q", name, got)
		}
	}
	// What somebody has spoilt is not used by another process.
	if err := errors.Join(os.Chmod(dest, 0o755), os.WriteFile(dest, []byte("spoilt"), 0o755)); err != nil {
		t.Fatal(err)
	}
	q := New(Options{Image: "x", BaseDir: p.opts.BaseDir})
	defer q.Close()
	if got, err := q.share(good); err == nil {
		t.Errorf("%q, made of a file that has changed", got)
	}
}

func TestNearby(t *testing.T) {
	sock := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", sock)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for host, want := range map[string]bool{"unix://" + sock: true, "unix://" + sock + "x": false, "tcp://127.0.0.1:1": false, "ssh://x": false} {
		if got := nearby(host); got != want {
			t.Errorf("%s: %v", host, got)
		}
	}
}

func TestMayMount(t *testing.T) {
	for name, tt := range map[string]struct {
		add  []string
		near bool
		want bool
	}{
		"default": {nil, true, true}, "far": {nil, false, false}, "admin": {[]string{"CAP_SYS_ADMIN"}, true, false}, "all": {[]string{"all"}, true, false},
	} {
		p := New(Options{Image: "x", CapAdd: tt.add})
		p.near = func() bool { return tt.near }
		if got := p.mayMount(); got != tt.want {
			t.Errorf("%s: %v", name, got)
		}
		_ = p.Close()
	}
}
