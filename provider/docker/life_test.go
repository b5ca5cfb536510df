package docker

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/client"

	"github.com/aisandbox-go/aisandbox/guest"
	"github.com/aisandbox-go/aisandbox/provider"
)

const secretValue = "S3CRET-xyzzy-0815"

// A1 of spec 05 §18.
func TestDestroyIsQuick(t *testing.T) {
	p := newProvider(t, Options{})
	var took []time.Duration
	for range 5 {
		h, err := p.Create(t.Context(), provider.Spec{})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := h.Start(t.Context(), provider.Cmd{Argv: []string{"sleep", "1000"}}); err != nil {
			t.Error(err)
		}
		start := time.Now()
		if err := p.Destroy(t.Context(), h.Ref()); err != nil {
			t.Error(err)
		}
		took = append(took, time.Since(start))
		if err := p.Destroy(t.Context(), h.Ref()); err != nil {
			t.Errorf("again: %v", err)
		}
	}
	slices.Sort(took)
	t.Logf("destroy: %v", took)
	if p50 := took[len(took)/2]; p50 > 2*time.Second { // 300 ms on an idle machine
		t.Errorf("p50 is %v", p50)
	}
}

// A2: what a command is given is in no record of the engine.
func TestSecretsStayOut(t *testing.T) {
	p := newProvider(t, Options{})
	cli := p.engine.(*client.Client)
	h := create(t, p, provider.Spec{Labels: map[string]string{"who": "me"}})
	r := exec(t, h, provider.Cmd{Argv: provider.Shell("printf %s ${#TOKEN}; echo data >file"), Env: []string{"TOKEN=" + secretValue}})
	if r.out != "17" {
		t.Fatal(r)
	}
	snap, _ := provider.As[provider.Snapshotter](h)
	id, err := snap.Snapshot(t.Context(), "weird label!/ü")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.DeleteSnapshot(context.Background(), id); err != nil {
			t.Error(err)
		}
	})
	forker, _ := provider.As[provider.Forker](h)
	fork, err := forker.Fork(t.Context(), provider.Spec{})
	fork = destroyed(t, p, fork, err)
	restored, err := p.Restore(t.Context(), id, provider.Spec{})
	restored = destroyed(t, p, restored, err)

	for _, h := range []provider.Handle{h, fork, restored} {
		res, err := cli.ContainerInspect(t.Context(), h.Ref().ID, client.ContainerInspectOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(res.Raw, []byte(secretValue)) {
			t.Errorf("the record of %s holds the secret", res.Container.Name)
		}
		if got := sh(t, h, "cat file; env | grep -c TOKEN || true"); got != "data\n0" {
			t.Errorf("%q", got)
		}
	}
	c, err := cli.ContainerInspect(t.Context(), fork.Ref().ID, client.ContainerInspectOptions{})
	if err != nil {
		t.Fatal(err)
	}
	forkImage := c.Container.Image
	// The snapshot's labels are no facts about what is made from it.
	list, err := p.List(t.Context(), map[string]string{"who": "me", testLabel: testRun})
	if err != nil || len(list) != 1 || list[0].Ref.ID != h.Ref().ID || !list[0].Running {
		t.Errorf("%v, %v", list, err)
	}
	for _, image := range []string{id, forkImage} {
		var raw bytes.Buffer
		if _, err := cli.ImageInspect(t.Context(), image, client.ImageInspectWithRawResponse(&raw)); err != nil {
			t.Fatal(err)
		}
		hist, err := cli.ImageHistory(t.Context(), image)
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range hist.Items {
			raw.WriteString(l.CreatedBy + l.Comment)
		}
		saved, err := cli.ImageSave(t.Context(), []string{image})
		if err != nil {
			t.Fatal(err)
		}
		found := &finder{want: []byte(secretValue)}
		n, err := io.Copy(found, saved)
		_ = saved.Close()
		if err != nil || n < 1<<20 {
			t.Error(n, err)
		}
		if found.found || bytes.Contains(raw.Bytes(), []byte(secretValue)) {
			t.Errorf("image %s holds the secret", image)
		}
	}
	if err := p.Destroy(t.Context(), fork.Ref()); err != nil {
		t.Error(err)
	}
	if _, err := cli.ImageInspect(t.Context(), forkImage); err == nil {
		t.Error("the fork's image outlives it")
	}
}

// finder looks for bytes in a stream.
type finder struct {
	want, tail []byte
	found      bool
}

func (f *finder) Write(p []byte) (int, error) {
	b := append(f.tail, p...)
	f.found = f.found || bytes.Contains(b, f.want)
	f.tail = bytes.Clone(b[max(0, len(b)-len(f.want)):])
	return len(p), nil
}

func TestSnapshotErrors(t *testing.T) {
	p := newProvider(t, Options{})
	if _, err := p.Restore(t.Context(), snapshotRepo+":none", provider.Spec{}); !errors.Is(err, provider.ErrNotFound) {
		t.Error(err)
	}
	if err := p.DeleteSnapshot(t.Context(), snapshotRepo+":none"); err != nil {
		t.Error(err)
	}
	if err := p.DeleteSnapshot(t.Context(), testImage); !errors.Is(err, provider.ErrInvalid) {
		t.Errorf("deleting an image that is no snapshot: %v", err)
	}
}

func TestTagOf(t *testing.T) {
	for in, want := range map[string]string{
		"": "snapshot", "ok-1.2_x": "ok-1.2_x", "weird label!/ü": "weird-label---", "...": "snapshot", strings.Repeat("x", 99): strings.Repeat("x", 64),
	} {
		if got := tagOf(in); got != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
}

// A6: what the image puts into PATH is found.
func TestImagePath(t *testing.T) {
	base := newProvider(t, Options{})
	cli := base.engine.(*client.Client)
	h := create(t, base, provider.Spec{})
	sh(t, h, `mkdir -p /opt/x && printf '#!/bin/sh\necho tool\n' >/opt/x/mytool && chmod +x /opt/x/mytool`)
	res, err := cli.ContainerCommit(t.Context(), h.Ref().ID, client.ContainerCommitOptions{
		Reference: "aisandbox-test-path:latest", Changes: []string{"ENV PATH=/opt/x:/usr/bin:/bin"},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := cli.ImageRemove(context.Background(), res.ID, client.ImageRemoveOptions{Force: true}); err != nil {
			t.Error(err)
		}
	})
	p := newProvider(t, Options{Image: "aisandbox-test-path"})
	if r := exec(t, create(t, p, provider.Spec{}), provider.Cmd{Argv: []string{"mytool"}}); r.out != "tool\n" {
		t.Error(r)
	}
}

// A7: an engine that can't be reached says nothing about the sandbox.
func TestEngineGone(t *testing.T) {
	p := New(Options{Image: testImage, Host: "unix://" + filepath.Join(t.TempDir(), "none.sock")})
	defer p.Close()
	ref := refOf(strings.Repeat("a", 64))
	_, resumeErr := p.Resume(t.Context(), ref)
	_, createErr := p.Create(t.Context(), provider.Spec{})
	_, listErr := p.List(t.Context(), nil)
	for _, err := range []error{p.Ping(t.Context()), resumeErr, createErr, listErr, p.Destroy(t.Context(), ref)} {
		if !errors.Is(err, provider.ErrUnavailable) || errors.Is(err, provider.ErrNotFound) || !strings.Contains(err.Error(), "start Docker") {
			t.Errorf("got %v", err)
		}
	}
}

// A8: one key, one container, also for two providers that know nothing of each other.
func TestOneKeyOneContainer(t *testing.T) {
	key := "t" + strings.ReplaceAll(testRun, "-", "x")
	ps := []*Provider{newProvider(t, Options{User: "1234"}), newProvider(t, Options{User: "1234"})}
	var mu sync.Mutex
	var wg sync.WaitGroup
	ids := map[string]bool{}
	for i := range 4 {
		wg.Go(func() {
			h, err := ps[i%2].Create(t.Context(), provider.Spec{Key: key})
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			ids[h.Ref().ID] = true
			if got := sh(t, h, "id -u; pwd"); got != "1234\n/workspace" {
				t.Error(got)
			}
		})
	}
	wg.Wait()
	if len(ids) != 1 {
		t.Errorf("%d containers", len(ids))
	}
	for id := range ids {
		if err := ps[0].Destroy(t.Context(), refOf(id)); err != nil {
			t.Error(err)
		}
	}
}

func TestResume(t *testing.T) {
	p := newProvider(t, Options{User: "1234"})
	cli := p.engine.(*client.Client)
	h := create(t, p, provider.Spec{})
	id := h.Ref().ID
	sh(t, h, "echo kept >file")
	zero := 0
	for name, hurt := range map[string]func() error{
		"running": func() error { return nil },
		"stopped": func() error {
			_, err := cli.ContainerStop(t.Context(), id, client.ContainerStopOptions{Timeout: &zero})
			return err
		},
		"paused": func() error {
			_, err := cli.ContainerPause(t.Context(), id, client.ContainerPauseOptions{})
			return err
		},
	} {
		if err := hurt(); err != nil {
			t.Fatal(err)
		}
		again, err := p.Resume(t.Context(), h.Ref())
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if got := sh(t, again, "cat file; id -u"); got != "kept\n1234" {
			t.Errorf("%s: %q", name, got)
		}
	}
	pauser, _ := provider.As[provider.Pauser](h)
	if err := pauser.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := sh(t, h, "cat file"); got != "kept" { // a start thaws
		t.Error(got)
	}
	for _, ref := range []provider.Ref{refOf(strings.Repeat("0", 64)), refOf("../../version"), refOf("")} {
		if _, err := p.Resume(t.Context(), ref); !errors.Is(err, provider.ErrNotFound) {
			t.Errorf("%q: %v", ref.ID, err)
		}
	}
	if _, err := p.Resume(t.Context(), provider.Ref{Provider: "bwrap", ID: id}); !errors.Is(err, provider.ErrInvalid) {
		t.Errorf("another provider's: %v", err)
	}
}

func TestForeignContainer(t *testing.T) {
	p := newProvider(t, Options{})
	cli := p.engine.(*client.Client)
	key := "f" + strings.ReplaceAll(testRun, "-", "x")
	res, err := cli.ContainerCreate(t.Context(), client.ContainerCreateOptions{Name: namePrefix + key, Config: &container.Config{Image: testImage, Cmd: []string{"true"}}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := cli.ContainerRemove(context.Background(), res.ID, client.ContainerRemoveOptions{Force: true}); err != nil {
			t.Error(err) // it must be there still
		}
	})
	if _, err := p.Create(t.Context(), provider.Spec{Key: key}); !errors.Is(err, provider.ErrConflict) {
		t.Error(err)
	}
	if _, err := p.Resume(t.Context(), refOf(res.ID)); !errors.Is(err, provider.ErrConflict) {
		t.Error(err)
	}
	if err := p.Destroy(t.Context(), refOf(res.ID)); !errors.Is(err, provider.ErrConflict) {
		t.Error(err)
	}
}

func TestLimitsAndHardening(t *testing.T) {
	p := newProvider(t, Options{User: "1234:1234", Memory: 128 << 20, CPUs: 0.5, PidsLimit: 50})
	h := create(t, p, provider.Spec{})
	c, err := p.inspect(t.Context(), h.Ref())
	if err != nil {
		t.Fatal(err)
	}
	hc := c.HostConfig
	if hc.Memory != 128<<20 || hc.MemorySwap != 128<<20 || hc.NanoCPUs != 5e8 || *hc.PidsLimit != 50 || hc.Privileged ||
		!slices.Equal(hc.CapDrop, []string{"ALL"}) || !slices.Equal(hc.SecurityOpt, []string{"no-new-privileges"}) {
		t.Errorf("%+v", hc)
	}
	got := sh(t, h, `grep -E '^(CapEff|CapPrm|NoNewPrivs)' /proc/self/status | tr -d '\t '; id -u; id -g`)
	if want := "CapPrm:0000000000000000\nCapEff:0000000000000000\nNoNewPrivs:1\n1234\n1234"; got != want {
		t.Error(cmp.Diff(want, got))
	}
	r := exec(t, h, provider.Cmd{Argv: provider.Shell(`i=0; while [ $i -lt 80 ]; do sleep 5 & i=$((i+1)); done; wait`)})
	if r.exit.Code == 0 && !strings.Contains(r.err, "fork") {
		t.Error("80 processes in a sandbox for 50")
	}
	r = exec(t, h, provider.Cmd{Argv: []string{"node", "-e", "Buffer.alloc(400<<20, 1); console.log('allocated')"}})
	if strings.Contains(r.out, "allocated") {
		t.Error("400 MiB in a sandbox of 128")
	}
}

func TestNetwork(t *testing.T) {
	l, err := net.Listen("tcp", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_ = c.Close()
		}
	}()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	connect := provider.Cmd{Argv: []string{"node", "-e", `require("net").connect(` + port + `, "host.docker.internal").on("connect",()=>process.exit(0)).on("error",()=>process.exit(9))`}}
	p := newProvider(t, Options{})
	if r := exec(t, create(t, p, provider.Spec{}), connect); r.exit.Code != 0 {
		t.Errorf("bridge: %v", r)
	}
	none := create(t, p, provider.Spec{Network: provider.NetworkNone})
	if r := exec(t, none, connect); r.exit.Code != 9 {
		t.Errorf("none: %v", r)
	}
	if got := sh(t, none, "ls /sys/class/net"); got != "lo" {
		t.Error(got)
	}
	if _, err := p.Create(t.Context(), provider.Spec{Network: "moon"}); !errors.Is(err, provider.ErrInvalid) {
		t.Error(err)
	}
}

func TestExpose(t *testing.T) {
	p := newProvider(t, Options{PublishPorts: []int{8080}})
	h := create(t, p, provider.Spec{})
	e, _ := provider.As[provider.Exposer](h)
	got, err := e.Expose(t.Context(), 8080)
	if err != nil || !strings.HasPrefix(got.URL, "http://127.0.0.1:") {
		t.Error(got, err)
	}
	var opt *provider.OptionError
	if _, err := e.Expose(t.Context(), 9090); !errors.As(err, &opt) || opt.Option != "publishPorts" {
		t.Error(err)
	}
}

func TestReadOnlyRootfs(t *testing.T) {
	p := newProvider(t, Options{ReadOnlyRootfs: true, User: "1234:1234"})
	h := create(t, p, provider.Spec{})
	if got := sh(t, h, "touch /workspace/x /tmp/x $HOME/x && ! touch /opt/x 2>/dev/null && id -u"); got != "1234" {
		t.Error(got)
	}
	if _, ok := provider.As[provider.Snapshotter](h); ok {
		t.Error("it claims snapshots, but the workdir is a volume")
	}
}

func TestGuestIsFirst(t *testing.T) {
	for _, ro := range []bool{false, true} {
		programOK(t)
		p := newProvider(t, Options{User: "1234:1234", ReadOnlyRootfs: ro})
		raw := create(t, p, provider.Spec{Init: guest.NewInit(guest.Options{})})
		h, err := guest.Attach(t.Context(), raw, guest.Options{Traits: p.Traits()})
		if err != nil {
			t.Fatal(err)
		}
		got := sh(t, h, `id -u; touch /workspace/x "$HOME/x" && echo ok; cat /proc/1/comm; ls /.aisandbox/run 2>&1 | grep -c denied; kill -9 1 2>/dev/null || echo alive`)
		if !strings.HasPrefix(got, "1234\nok\nguest-") || !strings.HasSuffix(got, "\n1\nalive") {
			t.Errorf("read-only %v: %q", ro, got)
		}
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestNoImage(t *testing.T) {
	engineOK(t)
	for _, pull := range []PullPolicy{PullNever, PullMissing, PullAlways} {
		p := New(Options{Image: "no.such.registry.invalid/image:1", PullPolicy: pull})
		_, err := p.Create(t.Context(), provider.Spec{})
		if !errors.Is(err, provider.ErrImageNotFound) || !strings.Contains(err.Error(), "build") {
			t.Errorf("%s: %v", pull, err)
		}
		_ = p.Close()
	}
}

func TestOptions(t *testing.T) {
	dir := t.TempDir()
	if err := os.Symlink("/var/run", filepath.Join(dir, "innocent")); err != nil {
		t.Fatal(err)
	}
	vol := func(src, dst string) Options {
		return Options{Image: "x", Volumes: []Volume{{Source: src, Target: dst}}}
	}
	for _, tc := range []struct {
		option string
		o      Options
	}{
		{"image", Options{}},
		{"image", Options{Image: "-x"}},
		{"workdir", Options{Image: "x", Workdir: "rel"}},
		{"workdir", Options{Image: "x", Workdir: "/.aisandbox/run"}},
		{"user", Options{Image: "x", User: "-u root"}},
		{"memory", Options{Image: "x", Memory: 1}},
		{"cpus", Options{Image: "x", CPUs: -1}},
		{"pidsLimit", Options{Image: "x", PidsLimit: -2}},
		{"network", Options{Image: "x", Network: "container:other"}},
		{"pullPolicy", Options{Image: "x", PullPolicy: "perhaps"}},
		{"platform", Options{Image: "x", Platform: "linux"}},
		{"publishPorts", Options{Image: "x", PublishPorts: []int{0}}},
		{"publishAddr", Options{Image: "x", PublishAddr: "localhost"}},
		{"labels", Options{Image: "x", Labels: map[string]string{labelKey: "y"}}},
		{"host", Options{Image: "x", Host: "::"}},
		{"volumes", vol("/var/run/docker.sock", "/s")},
		{"volumes", vol("/run", "/s")},
		{"volumes", vol("/", "/host")},
		{"volumes", vol(filepath.Join(dir, "innocent"), "/s")},
		{"volumes", vol(filepath.Join(dir, "innocent", "docker.sock"), "/s")},
		{"volumes", vol("/a/../run", "/s")},
		{"volumes", vol("cache", "/")},
		{"volumes", vol("cache", "/.aisandbox")},
		{"volumes", vol("a/b", "/x")},
	} {
		p := New(tc.o)
		_, err := p.Create(t.Context(), provider.Spec{})
		var opt *provider.OptionError
		if !errors.As(err, &opt) || opt.Option != tc.option || !errors.Is(err, provider.ErrInvalid) {
			t.Errorf("%+v: %v", tc.o, err)
		}
		_ = p.Close()
	}
	good := Options{Image: "x", Volumes: []Volume{{Source: dir, Target: "/cache"}, {Source: "named", Target: "/named"}}}
	if _, err := good.withDefaults(); err != nil {
		t.Error(err)
	}
}

func TestFingerprint(t *testing.T) {
	fp := func(o Options) string {
		p := New(o)
		defer p.Close()
		return p.Fingerprint()
	}
	a := fp(Options{Image: "a"})
	if a != fp(Options{Image: "a", RegistryAuth: "secret", Owner: "o", Workdir: "/workspace"}) {
		t.Error("what does not change a sandbox changes its fingerprint")
	}
	for _, o := range []Options{{Image: "b"}, {Image: "a", User: "1"}, {Image: "a", Network: provider.NetworkNone}, {Image: "a", Memory: 1 << 30}} {
		if fp(o) == a {
			t.Errorf("%+v has the fingerprint of the default", o)
		}
	}
}
