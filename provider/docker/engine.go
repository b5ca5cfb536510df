package docker

import (
	"context"
	"time"

	"github.com/moby/moby/client"
)

// engine is what the provider needs of a Docker engine.
type engine interface {
	Ping(ctx context.Context, o client.PingOptions) (client.PingResult, error)
	ClientVersion() string
	DaemonHost() string

	ImageInspect(ctx context.Context, image string, o ...client.ImageInspectOption) (client.ImageInspectResult, error)
	ImagePull(ctx context.Context, ref string, o client.ImagePullOptions) (client.ImagePullResponse, error)
	ImageRemove(ctx context.Context, image string, o client.ImageRemoveOptions) (client.ImageRemoveResult, error)
	VolumeInspect(ctx context.Context, volume string, o client.VolumeInspectOptions) (client.VolumeInspectResult, error)

	ContainerCreate(ctx context.Context, o client.ContainerCreateOptions) (client.ContainerCreateResult, error)
	ContainerAttach(ctx context.Context, id string, o client.ContainerAttachOptions) (client.ContainerAttachResult, error)
	ContainerStart(ctx context.Context, id string, o client.ContainerStartOptions) (client.ContainerStartResult, error)
	ContainerStop(ctx context.Context, id string, o client.ContainerStopOptions) (client.ContainerStopResult, error)
	ContainerPause(ctx context.Context, id string, o client.ContainerPauseOptions) (client.ContainerPauseResult, error)
	ContainerUnpause(ctx context.Context, id string, o client.ContainerUnpauseOptions) (client.ContainerUnpauseResult, error)
	ContainerInspect(ctx context.Context, id string, o client.ContainerInspectOptions) (client.ContainerInspectResult, error)
	ContainerList(ctx context.Context, o client.ContainerListOptions) (client.ContainerListResult, error)
	ContainerLogs(ctx context.Context, id string, o client.ContainerLogsOptions) (client.ContainerLogsResult, error)
	ContainerRemove(ctx context.Context, id string, o client.ContainerRemoveOptions) (client.ContainerRemoveResult, error)
	ContainerCommit(ctx context.Context, id string, o client.ContainerCommitOptions) (client.ContainerCommitResult, error)
	CopyToContainer(ctx context.Context, id string, o client.CopyToContainerOptions) (client.CopyToContainerResult, error)
	CopyFromContainer(ctx context.Context, id string, o client.CopyFromContainerOptions) (client.CopyFromContainerResult, error)

	ExecCreate(ctx context.Context, id string, o client.ExecCreateOptions) (client.ExecCreateResult, error)
	ExecAttach(ctx context.Context, id string, o client.ExecAttachOptions) (client.ExecAttachResult, error)
	ExecInspect(ctx context.Context, id string, o client.ExecInspectOptions) (client.ExecInspectResult, error)
	ExecResize(ctx context.Context, id string, o client.ExecResizeOptions) (client.ExecResizeResult, error)

	Close() error
}

var _ engine = (*client.Client)(nil)

func newEngine(host string) (engine, error) {
	opts := []client.Opt{client.FromEnv}
	if host != "" {
		opts = append(opts, client.WithHost(host))
	}
	c, err := client.New(opts...)
	if err != nil {
		return nil, err
	}
	return c, nil
}

// cleanupTimeout bounds work that must be tried though the caller's context ended.
const cleanupTimeout = 60 * time.Second

// cleanupContext is for undoing what was begun: it lives on when ctx has ended.
func cleanupContext(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
}
