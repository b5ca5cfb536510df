//go:build linux

package main

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"time"

	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/client"

	"github.com/aisandbox-go/aisandbox/guest"
	"github.com/aisandbox-go/aisandbox/provider"
)

// ready is the time from nothing to the answer of a first command, through a
// guest. The sandbox is destroyed outside of it.
func ready(p provider.Provider) op {
	return func(ctx context.Context) (time.Duration, error) {
		start := time.Now()
		b, err := newBox(ctx, p)
		if err != nil {
			return 0, err
		}
		defer b.destroy()
		_, err = guestExec(b.Handle)(ctx)
		return time.Since(start), err
	}
}

func readyLocal(ctx context.Context, e *env) ([]Row, error) {
	p, err := e.provider("local")
	if err != nil {
		return nil, err
	}
	t, err := interleave(ctx, e.rounds(40), side{do: ready(p)}, side{do: rawExec()})
	if err != nil {
		return nil, err
	}
	r := Row{Metric: "create to first exec answered, local", Unit: "ms", Ours: millis(t[0]), Baseline: "raw process start", Base: millis(t[1])}
	return []Row{r}, nil
}

func readyBwrap(ctx context.Context, e *env) ([]Row, error) {
	p, err := e.provider("bwrap")
	if err != nil {
		return nil, err
	}
	bare := timed(func(ctx context.Context) error {
		cmd := exec.CommandContext(ctx, "bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", nothing)
		cmd.Stderr = os.Stderr
		return cmd.Run()
	})
	t, err := interleave(ctx, e.rounds(40), side{do: ready(p)}, side{do: bare})
	if err != nil {
		return nil, err
	}
	r := Row{Metric: "create to first exec answered, bwrap", Unit: "ms", Ours: millis(t[0]), Baseline: "bare bwrap … true", Base: millis(t[1])}
	r.atMost(40)
	return []Row{r}, nil
}

func readyDocker(ctx context.Context, e *env) ([]Row, error) {
	p, err := e.provider("docker")
	if err != nil {
		return nil, err
	}
	t, err := interleave(ctx, e.rounds(15), side{do: ready(p)}, side{do: e.engineStart})
	if err != nil {
		return nil, err
	}
	r := Row{Metric: "create to first exec answered, docker", Unit: "ms", Ours: millis(t[0]), Baseline: "raw engine create + start", Base: millis(t[1])}
	r.atMostTimes(1.2)
	return []Row{r}, nil
}

// engineStart makes and starts a container, and nothing else: no command has run
// in it when the time ends.
func (e *env) engineStart(ctx context.Context) (_ time.Duration, err error) {
	start := time.Now()
	c, err := e.engine.ContainerCreate(ctx, client.ContainerCreateOptions{
		Config: &container.Config{Image: e.image, Cmd: []string{"sleep", "infinity"}},
	})
	if err != nil {
		return 0, err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTime)
		defer cancel()
		if _, rerr := e.engine.ContainerRemove(ctx, c.ID, client.ContainerRemoveOptions{Force: true, RemoveVolumes: true}); err == nil {
			err = rerr
		}
	}()
	_, err = e.engine.ContainerStart(ctx, c.ID, client.ContainerStartOptions{})
	return time.Since(start), err
}

// guestSize is what `make build` embeds.
func guestSize(_ context.Context, e *env) ([]Row, error) {
	var rows []Row
	for _, arch := range []string{"amd64", "arm64"} {
		st, err := os.Stat(filepath.Join(e.root, "guest", "programs", "linux-"+arch))
		if err != nil {
			return rows, err
		}
		size := float64(st.Size()) / (1 << 20)
		r := Row{Metric: "embedded guest, linux/" + arch, Unit: "MiB", Ours: single(size)}
		r.atMost(6)
		rows = append(rows, r)
	}
	return rows, nil
}

// guestProgram is the guest's executable for this machine.
func guestProgram() (string, error) {
	p, err := guest.Program(runtime.GOOS + "/" + runtime.GOARCH)
	return p.Path, err
}
