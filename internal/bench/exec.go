//go:build linux

package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os/exec"

	"github.com/moby/moby/api/pkg/stdcopy"
	"github.com/moby/moby/client"

	"github.com/aisandbox-go/aisandbox/provider"
)

// The command of the exec rows writes nothing, but whoever runs it collects both
// streams, as the users of an exec do.
const nothing = "true"

// guestExec runs the command through the guest.
func guestExec(h provider.Handle) op {
	return timed(func(ctx context.Context) error {
		var out, errOut bytes.Buffer
		p, err := h.Start(ctx, provider.Cmd{Argv: []string{nothing}, Stdout: &out, Stderr: &errOut})
		if err != nil {
			return err
		}
		exit, err := p.Wait()
		if err == nil && exit != (provider.Exit{}) {
			err = fmt.Errorf("%s ended with %s: %s", nothing, exit, errOut.String())
		}
		return err
	})
}

// rawExec starts the command on this host, as any program would.
func rawExec() op {
	return timed(func(ctx context.Context) error {
		var out, errOut bytes.Buffer
		cmd := exec.CommandContext(ctx, nothing)
		cmd.Stdout, cmd.Stderr = &out, &errOut
		return cmd.Run()
	})
}

// engineExec runs the command as a client of the engine does: create, attach
// (which starts it), read both streams to their end, ask for the exit code.
func engineExec(c *client.Client, id string) op {
	return timed(func(ctx context.Context) error {
		x, err := c.ExecCreate(ctx, id, client.ExecCreateOptions{Cmd: []string{nothing}, AttachStdout: true, AttachStderr: true})
		if err != nil {
			return err
		}
		conn, err := c.ExecAttach(ctx, x.ID, client.ExecAttachOptions{})
		if err != nil {
			return err
		}
		defer conn.Close()
		if _, err := stdcopy.StdCopy(io.Discard, io.Discard, conn.Reader); err != nil {
			return err
		}
		for {
			res, err := c.ExecInspect(ctx, x.ID, client.ExecInspectOptions{})
			switch {
			case err != nil:
				return err
			case res.Running: // the engine has not noticed yet
			case res.ExitCode != 0:
				return fmt.Errorf("%s ended with exit code %d", nothing, res.ExitCode)
			default:
				return nil
			}
		}
	})
}

func execOnHost(ctx context.Context, e *env, name string) ([]Row, error) {
	box, err := e.box(ctx, name)
	if err != nil {
		return nil, err
	}
	defer box.destroy()
	t, err := interleave(ctx, e.rounds(100), side{guestExec(box.Handle), 5}, side{rawExec(), 5})
	if err != nil {
		return nil, err
	}
	r := Row{Metric: "exec of true, " + name, Unit: "ms", Ours: millis(t[0]), Baseline: "raw process start", Base: millis(t[1])}
	r.atMostTimes(1.2)
	return []Row{r}, nil
}

func execDocker(ctx context.Context, e *env) ([]Row, error) {
	box, err := e.box(ctx, "docker")
	if err != nil {
		return nil, err
	}
	defer box.destroy()
	t, err := interleave(ctx, e.rounds(60), side{guestExec(box.Handle), 8}, side{engineExec(e.engine, box.Ref().ID), 1})
	if err != nil {
		return nil, err
	}
	r := Row{Metric: "exec of true, docker", Unit: "ms", Ours: millis(t[0]), Baseline: "Engine-API exec, same container", Base: millis(t[1])}
	r.timesBetter(20)
	r.atMost(2.5)
	return []Row{r}, nil
}

// memoryExecs is how much the guest has done when its memory is read.
const memoryExecs = 200

func guestMemory(ctx context.Context, e *env, name string) ([]Row, error) {
	box, err := e.box(ctx, name)
	if err != nil {
		return nil, err
	}
	defer box.destroy()
	do := guestExec(box.Handle)
	for range memoryExecs {
		if _, err := do(ctx); err != nil {
			return nil, err
		}
	}
	m, ok := provider.As[provider.Meter](box.Handle)
	if !ok {
		return nil, fmt.Errorf("the sandbox has no meter: no guest runs in it")
	}
	u, err := m.Usage(ctx)
	if err != nil {
		return nil, err
	}
	rss := float64(u.GuestMemory) / 1e6
	r := Row{Metric: fmt.Sprintf("guest memory after %d execs, %s", memoryExecs, name), Unit: "MB", Ours: single(rss)}
	r.atMost(10)
	return []Row{r}, nil
}
