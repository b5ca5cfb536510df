// Package docker runs sandboxes as containers of a Docker engine.
//
// There are two ways into a container. Where [provider.Spec.Init] is given, the
// guest program is mounted or copied in and is the container's first process; the
// handle is then a [provider.InitConn], and everything goes through that one
// connection. The container's log stays empty then.
// Without it every command is an exec of the engine's, wrapped so that its end,
// its exit code and its whole tree are known for certain; that path takes an image
// with /bin/sh and grep.
//
// Nothing given at create time holds a secret, because the engine stores it and
// copies it into every image made from the container (spec 05 §4.7).
package docker

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	"github.com/moby/moby/client"

	"github.com/aisandbox-go/aisandbox/provider"
)

const (
	providerName = "docker"
	refVersion   = 1
	namePrefix   = "aisbx-"
)

// Provider makes containers. It implements [provider.Restorer], [provider.Lister],
// [provider.Pinger] and [provider.Fingerprinter] too.
type Provider struct {
	opts   Options
	engine engine
	bad    error // why the options can't be used

	near   func() bool // whether the engine is on this machine
	copies atomic.Bool // it has refused to mount what is here

	mu       sync.Mutex
	creating map[string]*sync.Mutex // by key: this process creates a sandbox once
	shared   map[string]string      // programs that were found whole, by digest
}

var (
	_ provider.Provider      = (*Provider)(nil)
	_ provider.Restorer      = (*Provider)(nil)
	_ provider.Lister        = (*Provider)(nil)
	_ provider.Pinger        = (*Provider)(nil)
	_ provider.Fingerprinter = (*Provider)(nil)
)

// New returns a Provider. It speaks to no engine: what is wrong with the options or
// the engine is an error of Ping, Create and Resume.
func New(o Options) *Provider {
	opts, bad := o.withDefaults()
	p := &Provider{opts: opts, bad: bad, creating: map[string]*sync.Mutex{}, shared: map[string]string{}}
	eng, err := newEngine(opts.Host)
	if err != nil {
		p.bad = errors.Join(p.bad, &provider.OptionError{Provider: providerName, Option: "host", Value: opts.Host,
			Cure: "use an address such as unix:///var/run/docker.sock (" + err.Error() + ")"})
	}
	p.engine = eng
	p.near = sync.OnceValue(func() bool { return eng != nil && nearby(eng.DaemonHost()) })
	return p
}

// Close releases the connections to the engine. Sandboxes live on.
func (p *Provider) Close() error {
	if p.engine == nil {
		return nil
	}
	return p.engine.Close()
}

// Name implements [provider.Provider].
func (*Provider) Name() string { return providerName }

// Traits implements [provider.Provider]. They are those of the exec-only path.
func (p *Provider) Traits() provider.Traits {
	networks := []provider.Network{provider.NetworkHost, provider.NetworkNone}
	if p.opts.Network == provider.NetworkNone {
		networks = []provider.Network{provider.NetworkNone, provider.NetworkHost}
	}
	return provider.Traits{
		Isolation: provider.IsolationContainer,
		DurableFS: true,
		LiveStdin: true,
		Kill:      true,
		Outlives:  true,
		Networks:  networks,
	}
}

// Ping implements [provider.Pinger].
func (p *Provider) Ping(ctx context.Context) error {
	if p.bad != nil {
		return fmt.Errorf("docker: %w", p.bad)
	}
	res, err := p.engine.Ping(ctx, client.PingOptions{NegotiateAPIVersion: true})
	if err != nil {
		return fmt.Errorf("docker: ping: %w", mapErr(err))
	}
	if res.OSType != "" && res.OSType != "linux" {
		return fmt.Errorf("docker: ping: %w: the engine runs %s containers; switch it to linux", provider.ErrUnavailable, res.OSType)
	}
	return nil
}

// Destroy implements [provider.Provider]. With Options.KeepOnDestroy it stops the
// container and keeps it.
func (p *Provider) Destroy(ctx context.Context, ref provider.Ref) error {
	if err := p.destroy(ctx, ref); err != nil {
		return fmt.Errorf("docker: destroy %.12s: %w", ref.ID, err)
	}
	return nil
}

func (p *Provider) destroy(ctx context.Context, ref provider.Ref) error {
	c, err := p.inspect(ctx, ref)
	switch {
	case errors.Is(err, provider.ErrNotFound):
		return nil
	case err != nil:
		return err
	}
	if p.opts.KeepOnDestroy {
		secs := int((p.opts.StopTimeout + time.Second - 1) / time.Second)
		_, err := p.engine.ContainerStop(ctx, c.ID, client.ContainerStopOptions{Timeout: &secs})
		if errdefs.IsNotFound(err) {
			return nil
		}
		return mapErr(err)
	}
	image := c.Config.Labels[labelImage]
	restored := strings.HasPrefix(c.Config.Labels[labelParent], snapshotRepo+":")
	if err := p.remove(ctx, c.ID, image); err != nil || !restored {
		return err
	}
	// A snapshot that was deleted while this container lived lost its tag only.
	res, err := p.engine.ImageInspect(ctx, c.Image)
	if err != nil || len(res.RepoTags) > 0 || res.Config == nil || res.Config.Labels[labelManaged] != "1" {
		return nil
	}
	return p.removeImage(ctx, c.Image)
}

// remove ends and removes a container, and then the image that was made for it
// alone. A removal that somebody else has begun is waited for.
func (p *Provider) remove(ctx context.Context, id, image string) error {
	for wait := 10 * time.Millisecond; ; wait = min(2*wait, 200*time.Millisecond) {
		_, err := p.engine.ContainerRemove(ctx, id, client.ContainerRemoveOptions{Force: true, RemoveVolumes: true})
		if err == nil || errdefs.IsNotFound(err) {
			break
		}
		if !errdefs.IsConflict(err) || !strings.Contains(err.Error(), "in progress") {
			return mapErr(err)
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(wait):
		}
	}
	if image == "" {
		return nil
	}
	return p.removeImage(ctx, image)
}

// removeImage removes an image that was made for one container. Where another one
// uses it, that one's end removes it.
func (p *Provider) removeImage(ctx context.Context, image string) error {
	_, err := p.engine.ImageRemove(ctx, image, client.ImageRemoveOptions{PruneChildren: true})
	if errdefs.IsNotFound(err) || errdefs.IsConflict(err) {
		return nil
	}
	return mapErr(err)
}

// List implements [provider.Lister].
func (p *Provider) List(ctx context.Context, labels map[string]string) ([]provider.Listed, error) {
	if p.bad != nil {
		return nil, fmt.Errorf("docker: list: %w", p.bad)
	}
	filters := client.Filters{}.Add("label", labelManaged+"=1")
	for k, v := range labels {
		filters = filters.Add("label", k+"="+v)
	}
	res, err := p.engine.ContainerList(ctx, client.ContainerListOptions{All: true, Filters: filters})
	if err != nil {
		return nil, fmt.Errorf("docker: list: %w", mapErr(err))
	}
	var list []provider.Listed
	for _, c := range res.Items {
		// A container that somebody made from one of our snapshots has our labels too.
		if len(c.Names) != 1 || !strings.HasPrefix(c.Names[0], "/"+namePrefix) {
			continue
		}
		list = append(list, provider.Listed{
			Ref:     refOf(c.ID),
			Labels:  c.Labels,
			Created: time.Unix(c.Created, 0),
			Running: c.State == "running" || c.State == "paused",
		})
	}
	return list, nil
}

func refOf(id string) provider.Ref {
	return provider.Ref{Provider: providerName, ID: id, Version: refVersion}
}
