//go:build linux

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/moby/moby/client"

	"github.com/aisandbox-go/aisandbox/guest"
	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/provider/bwrap"
	"github.com/aisandbox-go/aisandbox/provider/docker"
	"github.com/aisandbox-go/aisandbox/provider/local"
)

// defaultImage is what the tests build; BENCH_IMAGE names another one. It takes
// true and sleep.
const defaultImage = "aisandbox-test"

// cleanupTime bounds the removal of what a benchmark made.
const cleanupTime = time.Minute

// env is what the benchmarks share.
type env struct {
	factor float64 // of the number of rounds
	root   string  // of the module
	tmp    string
	image  string
	engine *client.Client
	closes []func() error
}

func newEnv(factor float64) (*env, error) {
	root, err := moduleRoot()
	if err != nil {
		return nil, err
	}
	e := &env{factor: factor, root: root, image: os.Getenv("BENCH_IMAGE")}
	if e.image == "" {
		e.image = defaultImage
	}
	if e.tmp, err = os.MkdirTemp("", "aisandbox-bench-"); err != nil {
		return nil, err
	}
	e.closes = append(e.closes, func() error { return os.RemoveAll(e.tmp) })
	// Sandboxes of root run as another user, who must get to their files.
	if err = os.Chmod(e.tmp, 0o711); err != nil {
		return nil, errors.Join(err, e.close())
	}
	if e.engine, err = client.New(client.FromEnv); err != nil {
		return nil, errors.Join(err, e.close())
	}
	e.closes = append(e.closes, e.engine.Close)
	return e, nil
}

// close removes what all benchmarks together left on the host.
func (e *env) close() error {
	var errs []error
	for i := len(e.closes) - 1; i >= 0; i-- {
		errs = append(errs, e.closes[i]())
	}
	return errors.Join(errs...)
}

// rounds scales a number of rounds.
func (e *env) rounds(n int) int { return max(1, int(float64(n)*e.factor)) }

// provider returns a backend whose records, where it has any, go away with e.
func (e *env) provider(name string) (provider.Provider, error) {
	base := filepath.Join(e.tmp, name)
	switch name {
	case "local":
		return local.New(local.Options{BaseDir: base}), nil
	case "bwrap":
		return bwrap.New(bwrap.Options{BaseDir: base}), nil
	case "docker":
		p := docker.New(docker.Options{Image: e.image, PullPolicy: docker.PullNever, BaseDir: base})
		e.closes = append(e.closes, p.Close)
		return p, nil
	}
	return nil, fmt.Errorf("no backend %q", name)
}

// box is a sandbox with its guest.
type box struct {
	provider.Handle
	p provider.Provider
}

// box makes a sandbox that answers. The caller destroys it.
func (e *env) box(ctx context.Context, name string) (*box, error) {
	p, err := e.provider(name)
	if err != nil {
		return nil, err
	}
	if pg, ok := provider.As[provider.Pinger](p); ok {
		if err := pg.Ping(ctx); err != nil {
			return nil, err
		}
	}
	return newBox(ctx, p)
}

func newBox(ctx context.Context, p provider.Provider) (*box, error) {
	h, err := p.Create(ctx, provider.Spec{Init: guest.NewInit(guest.Options{})})
	if err != nil {
		return nil, err
	}
	b := &box{h, p}
	g, err := guest.Attach(ctx, h, guest.Options{Traits: provider.TraitsOf(p, h)})
	if err != nil {
		b.destroy()
		return nil, err
	}
	b.Handle = g
	return b, nil
}

// destroy removes the sandbox, whatever became of the benchmark.
func (b *box) destroy() {
	ctx, cancel := context.WithTimeout(context.Background(), cleanupTime)
	defer cancel()
	err := errors.Join(b.Close(), b.p.Destroy(ctx, b.Ref()))
	if err != nil {
		fmt.Fprintf(os.Stderr, "bench: sandbox %s may be left behind: %v\n", b.Ref(), err)
	}
}

// moduleRoot is the nearest directory above that holds a go.mod.
func moduleRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for d := dir; ; d = filepath.Dir(d) {
		if _, err := os.Stat(filepath.Join(d, "go.mod")); err == nil {
			return d, nil
		}
		if d == filepath.Dir(d) {
			return "", fmt.Errorf("no go.mod in %s or above: run this inside of the repository", dir)
		}
	}
}

// Machine is what the numbers belong to.
type Machine struct {
	CPU      string `json:"cpu"`
	Cores    int    `json:"cores"`
	MemoryGB int    `json:"memoryGB"`
	Platform string `json:"platform"`
	Kernel   string `json:"kernel"`
	Go       string `json:"go"`
	Engine   string `json:"engine,omitempty"` // version of the Docker engine
}

func (m Machine) String() string {
	s := fmt.Sprintf("%d x %s, %d GB, %s, kernel %s, %s", m.Cores, m.CPU, m.MemoryGB, m.Platform, m.Kernel, m.Go)
	if m.Engine != "" {
		s += ", Docker " + m.Engine
	}
	return s
}

// machine describes this one as far as it can.
func machine(ctx context.Context, e *env) Machine {
	m := Machine{CPU: "CPU", Cores: runtime.NumCPU(), Platform: runtime.GOOS + "/" + runtime.GOARCH, Go: runtime.Version()}
	if v := procField("/proc/cpuinfo", "model name"); v != "" {
		m.CPU = v
	}
	kb, _ := strconv.Atoi(strings.TrimSuffix(procField("/proc/meminfo", "MemTotal"), " kB"))
	m.MemoryGB = (kb + 500_000) / 1_000_000
	if b, err := os.ReadFile("/proc/sys/kernel/osrelease"); err == nil {
		m.Kernel, _, _ = strings.Cut(strings.TrimSpace(string(b)), "-")
	}
	if v, err := e.engine.ServerVersion(ctx, client.ServerVersionOptions{}); err == nil {
		m.Engine = v.Version
	}
	return m
}

// procField returns the value of the first "name: value" line of a file of /proc;
// empty when there is none.
func procField(file, name string) string {
	f, err := os.Open(file)
	if err != nil {
		return ""
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		if k, v, ok := strings.Cut(s.Text(), ":"); ok && strings.TrimSpace(k) == name {
			return strings.TrimSpace(v)
		}
	}
	return ""
}
