package docker

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/moby/moby/client"
	"go.uber.org/goleak"

	"github.com/aisandbox-go/aisandbox/internal/testenv"
	"github.com/aisandbox-go/aisandbox/provider"
)

const (
	testImage = "aisandbox-test"
	testLabel = "test.aisandbox.provider-docker"
)

// baseDir keeps the tests' guest programs.
var baseDir string

func TestMain(m *testing.M) {
	var err error
	if baseDir, err = os.MkdirTemp("", "aisandbox-docker-"); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	code := m.Run()
	_ = os.RemoveAll(baseDir)
	if code == 0 {
		code = leftovers()
	}
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Println(err)
			code = 1
		}
	}
	os.Exit(code)
}

// leftovers fails when the tests left a container or an image behind.
func leftovers() int {
	p := New(Options{Image: testImage})
	defer p.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if p.Ping(ctx) != nil {
		return 0 // then they made none
	}
	cli := p.engine.(*client.Client)
	filters := client.Filters{}.Add("label", testLabel+"="+testRun)
	cs, err := cli.ContainerList(ctx, client.ContainerListOptions{All: true, Filters: filters})
	if err != nil {
		fmt.Println(err)
		return 1
	}
	is, err := cli.ImageList(ctx, client.ImageListOptions{All: true, Filters: filters})
	if err != nil {
		fmt.Println(err)
		return 1
	}
	for _, c := range cs.Items {
		fmt.Println("left behind: container", c.Names)
	}
	for _, i := range is.Items {
		fmt.Println("left behind: image", i.ID, i.RepoTags)
	}
	return min(1, len(cs.Items)+len(is.Items))
}

// testRun tells this process's objects from those of one that runs beside it.
var testRun = fmt.Sprintf("%d-%d", os.Getpid(), time.Now().UnixNano())

// engineOK ends the test where there is no engine with the test image.
func engineOK(t testing.TB) {
	t.Helper()
	p := New(Options{Image: testImage, PullPolicy: PullNever})
	defer p.Close()
	err := p.Ping(t.Context())
	testenv.Require(t, err == nil, fmt.Sprintf("a Docker engine: %v", err), "run scripts/setup-test.sh")
	_, err = p.image(t.Context(), testImage, true)
	testenv.Require(t, err == nil, "the image "+testImage, "run scripts/setup-test.sh")
}

func newProvider(t testing.TB, o Options) *Provider {
	t.Helper()
	engineOK(t)
	if o.Image == "" {
		o.Image = testImage
	}
	if o.BaseDir == "" {
		o.BaseDir = baseDir
	}
	o.PullPolicy = PullNever
	if o.Labels == nil {
		o.Labels = map[string]string{}
	}
	o.Labels[testLabel] = testRun
	p := New(o)
	t.Cleanup(func() { _ = p.Close() })
	return p
}

// destroyed removes the sandbox at the end of the test.
func destroyed(t testing.TB, p *Provider, h provider.Handle, err error) provider.Handle {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := cleanupContext(context.Background())
		defer cancel()
		_ = h.Close()
		if err := p.Destroy(ctx, h.Ref()); err != nil {
			t.Error(err)
		}
	})
	return h
}

func create(t testing.TB, p *Provider, spec provider.Spec) provider.Handle {
	t.Helper()
	h, err := p.Create(t.Context(), spec)
	return destroyed(t, p, h, err)
}

type result struct {
	out, err string
	exit     provider.Exit
}

func exec(t testing.TB, h provider.Handle, cmd provider.Cmd) result {
	t.Helper()
	var out, errOut bytes.Buffer
	if cmd.Stdout == nil {
		cmd.Stdout = &out
	}
	if cmd.Stderr == nil {
		cmd.Stderr = &errOut
	}
	p, err := h.Start(t.Context(), cmd)
	if err != nil {
		t.Fatal(err)
	}
	exit, err := p.Wait()
	if err != nil {
		t.Fatal(err)
	}
	return result{out.String(), errOut.String(), exit}
}

func sh(t testing.TB, h provider.Handle, script string) string {
	t.Helper()
	r := exec(t, h, provider.Cmd{Argv: provider.Shell(script)})
	if r.exit.Code != 0 {
		t.Fatalf("%s: %v: %s%s", script, r.exit, r.out, r.err)
	}
	return strings.TrimSpace(r.out)
}

// eventually polls cond for up to d.
func eventually(t testing.TB, d time.Duration, what string, cond func() bool) {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(d)
	for !cond() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("not within %v: %s", d, what)
		}
	}
}

// syncBuffer may be written and read at the same time.
type syncBuffer struct {
	ch  chan struct{}
	buf bytes.Buffer
}

func newSyncBuffer() *syncBuffer {
	return &syncBuffer{ch: make(chan struct{}, 1)}
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.ch <- struct{}{}
	defer func() { <-b.ch }()
	return b.buf.Write(p)
}

func (b *syncBuffer) String() string {
	b.ch <- struct{}{}
	defer func() { <-b.ch }()
	return b.buf.String()
}

var _ io.Writer = (*syncBuffer)(nil)
