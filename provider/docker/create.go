package docker

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	dockerspec "github.com/moby/docker-image-spec/specs-go/v1"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/mount"
	"github.com/moby/moby/api/types/network"
	"github.com/moby/moby/client"

	"github.com/aisandbox-go/aisandbox/provider"
)

var keyPattern = regexp.MustCompile(`^[a-z0-9]{1,40}$`)

// Create implements [provider.Provider]. A container that has the key's name and
// labels already is the answer, started if need be; one that has the name but is
// not ours is [provider.ErrConflict].
func (p *Provider) Create(ctx context.Context, spec provider.Spec) (provider.Handle, error) {
	h, err := p.create(ctx, spec, p.opts.Image, nil)
	if err != nil {
		return nil, fmt.Errorf("docker: create sandbox %q: %w", spec.Key, err)
	}
	return h, nil
}

// create makes a container from image. own is nil for one from Options.Image, and
// holds the labels of one made from a snapshot or fork, which is always new.
func (p *Provider) create(ctx context.Context, spec provider.Spec, image string, own map[string]string) (provider.Handle, error) {
	if p.bad != nil {
		return nil, p.bad
	}
	if spec.Key == "" {
		spec.Key = strings.ToLower(rand.Text())
	}
	if !keyPattern.MatchString(spec.Key) {
		return nil, fmt.Errorf("%w: key %q: use 1 to 40 of a-z and 0-9", provider.ErrInvalid, spec.Key)
	}
	mode, err := p.networkMode(spec.Network)
	if err != nil {
		return nil, err
	}
	unlock := p.lockKey(spec.Key)
	defer unlock()

	img, err := p.image(ctx, image, own == nil)
	if err != nil {
		return nil, err
	}
	plan, err := p.plan(spec, img)
	if err != nil {
		return nil, err
	}
	defer func() { plan.close() }()
	h, err := p.createPlanned(ctx, spec, image, img, mode, plan, own)
	if err == nil || ctx.Err() != nil || p.opts.ReadOnlyRootfs || !plan.refused(err) {
		return h, err
	}
	p.opts.Logger.Warn("docker: the engine can't use the guest program of this machine; it is copied from now on", "err", err)
	p.copies.Store(true)
	if plan, err = p.plan(spec, img); err != nil {
		return nil, err
	}
	return p.createPlanned(ctx, spec, image, img, mode, plan, own)
}

func (p *Provider) createPlanned(ctx context.Context, spec provider.Spec, image string, img client.ImageInspectResult, mode container.NetworkMode, plan *plan, own map[string]string) (provider.Handle, error) {
	opts := p.containerOptions(spec, image, mode, plan, own)
	if own != nil {
		// The image was made from another sandbox: what that was labelled with is no
		// fact about this one. A label of an image can be overridden, not removed.
		for k := range img.Config.Labels {
			if _, ok := opts.Config.Labels[k]; !ok {
				opts.Config.Labels[k] = ""
			}
		}
	}
	// Again, because a container in the way may be on its way out, or known by its
	// name alone while somebody else creates it.
	wait := 10 * time.Millisecond
	for deadline := time.Now().Add(conflictTimeout); ; wait = min(2*wait, 250*time.Millisecond) {
		res, err := p.engine.ContainerCreate(ctx, opts)
		switch {
		case err == nil:
			h, err := p.begin(ctx, res.ID, plan, true)
			if err != nil {
				cleanCtx, cancel := cleanupContext(ctx)
				defer cancel()
				return nil, errors.Join(err, p.remove(cleanCtx, res.ID, ""))
			}
			return h, nil
		case !errdefs.IsConflict(err):
			return nil, p.createErr(image, err)
		case own != nil:
			return nil, fmt.Errorf("%w: container %s exists already", provider.ErrConflict, opts.Name)
		}
		h, err := p.adopt(ctx, spec.Key, opts.Name, plan)
		if !errors.Is(err, provider.ErrNotFound) {
			return h, err
		}
		if time.Now().After(deadline) {
			return nil, fmt.Errorf("%w: the container %s keeps coming and going", provider.ErrConflict, opts.Name)
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-time.After(wait):
		}
	}
}

// conflictTimeout bounds the wait for a name that somebody else is busy with.
const conflictTimeout = 15 * time.Second

// lockKey makes creations of one key in this process wait for each other, so that
// the second finds the first one's container running.
func (p *Provider) lockKey(key string) (unlock func()) {
	p.mu.Lock()
	m, ok := p.creating[key]
	if !ok {
		m = &sync.Mutex{}
		p.creating[key] = m
	}
	p.mu.Unlock()
	m.Lock()
	return m.Unlock
}

func (p *Provider) networkMode(n provider.Network) (container.NetworkMode, error) {
	if n == provider.NetworkDefault {
		n = p.opts.Network
	}
	switch n {
	case provider.NetworkNone:
		return network.NetworkNone, nil
	case provider.NetworkHost:
		return network.NetworkBridge, nil
	}
	return "", &provider.OptionError{Provider: providerName, Option: "network", Value: string(n), Cure: "use host or none"}
}

// image returns what is known of an image, after pulling it where that is asked for.
func (p *Provider) image(ctx context.Context, image string, mayPull bool) (client.ImageInspectResult, error) {
	if mayPull && p.opts.PullPolicy == PullAlways {
		if err := p.pull(ctx, image); err != nil {
			return client.ImageInspectResult{}, err
		}
	}
	res, err := p.engine.ImageInspect(ctx, image)
	if errdefs.IsNotFound(err) {
		if !mayPull || p.opts.PullPolicy == PullNever {
			return res, fmt.Errorf("%w: %s is not on this engine: build it, or docker pull %s", provider.ErrImageNotFound, image, image)
		}
		if err := p.pull(ctx, image); err != nil {
			return res, err
		}
		res, err = p.engine.ImageInspect(ctx, image)
	}
	if err != nil {
		return res, mapErr(err)
	}
	if res.Config == nil {
		res.Config = &dockerspec.DockerOCIImageConfig{}
	}
	return res, nil
}

func (p *Provider) pull(ctx context.Context, image string) error {
	o := client.ImagePullOptions{RegistryAuth: p.opts.RegistryAuth}
	if platform, _ := parsePlatform(p.opts.Platform); platform != nil { // checked by New
		o.Platforms = append(o.Platforms, *platform)
	}
	res, err := p.engine.ImagePull(ctx, image, o)
	if err == nil {
		err = res.Wait(ctx)
		_ = res.Close()
	}
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case isNoSpace(err), client.IsErrConnectionFailed(err):
		return mapErr(err)
	}
	return fmt.Errorf("%w: %s is not on this engine and can't be pulled (%w): correct the name, log in with docker login, or build it", provider.ErrImageNotFound, image, err)
}

func (p *Provider) containerOptions(spec provider.Spec, image string, mode container.NetworkMode, plan *plan, own map[string]string) client.ContainerCreateOptions {
	o := p.opts
	labels := map[string]string{labelUser: plan.user, labelRoot: o.Workdir, labelGuest: plan.guest, labelSocket: plan.socket}
	for k, v := range own {
		labels[k] = v
	}
	cfg := &container.Config{
		Image:       image,
		User:        "0:0", // also decides what root may do in an exec: nothing, where this is another user
		WorkingDir:  o.Workdir,
		Entrypoint:  plan.entrypoint,
		Cmd:         []string{}, // not the image's
		Healthcheck: &container.HealthConfig{Test: []string{"NONE"}},
		Labels:      p.labels(spec.Key, spec.Labels, labels),
	}
	engineInit := plan.guest == ""
	host := &container.HostConfig{
		NetworkMode:    mode,
		Init:           &engineInit,
		CapDrop:        o.CapDrop,
		CapAdd:         o.CapAdd,
		ReadonlyRootfs: o.ReadOnlyRootfs,
		Runtime:        o.Runtime,
		// The first process says nothing worth keeping but how it failed, and a guest
		// must not find what it says to its host in a log.
		LogConfig: container.LogConfig{Type: "json-file", Config: map[string]string{"max-size": "1m", "max-file": "1"}},
		Resources: container.Resources{
			Memory:     o.Memory,
			MemorySwap: o.Memory, // memory and swap together
			NanoCPUs:   int64(o.CPUs * 1e9),
			PidsLimit:  &o.PidsLimit,
		},
		Mounts: plan.mounts,
	}
	if plan.guest != "" {
		cfg.OpenStdin, cfg.AttachStdin, cfg.AttachStdout, cfg.AttachStderr = true, true, true, true
		cfg.StdinOnce = true // the guest learns of a host that hung up
		host.LogConfig = container.LogConfig{Type: "none"}
	}
	if !o.AllowNewPrivileges {
		host.SecurityOpt = append(host.SecurityOpt, "no-new-privileges")
	}
	if !o.NoHostGateway && mode != network.NetworkNone {
		host.ExtraHosts = append(host.ExtraHosts, "host.docker.internal:host-gateway")
	}
	for _, v := range o.Volumes {
		m := mount.Mount{Type: mount.TypeVolume, Source: v.Source, Target: v.Target, ReadOnly: v.ReadOnly}
		if strings.HasPrefix(v.Source, "/") {
			m.Type = mount.TypeBind
		}
		host.Mounts = append(host.Mounts, m)
	}
	if len(o.PublishPorts) > 0 && mode != network.NetworkNone {
		cfg.ExposedPorts, host.PortBindings = network.PortSet{}, network.PortMap{}
		addr, _ := netip.ParseAddr(o.PublishAddr) // checked by New
		for _, n := range o.PublishPorts {
			port, _ := network.PortFrom(uint16(n), network.TCP)
			cfg.ExposedPorts[port] = struct{}{}
			host.PortBindings[port] = []network.PortBinding{{HostIP: addr}}
		}
	}
	platform, _ := parsePlatform(o.Platform) // checked by New
	return client.ContainerCreateOptions{Name: namePrefix + spec.Key, Config: cfg, HostConfig: host, Platform: platform}
}

// createErr names what the engine did not like.
func (p *Provider) createErr(image string, err error) error {
	switch text := err.Error(); {
	case errdefs.IsNotFound(err) && strings.Contains(strings.ToLower(text), "image"):
		return fmt.Errorf("%w: %s: %w", provider.ErrImageNotFound, image, err)
	case strings.Contains(text, "unknown or invalid runtime name") || strings.Contains(text, "Unknown runtime"):
		return &provider.OptionError{Provider: providerName, Option: "runtime", Value: p.opts.Runtime, Cure: "the engine does not know it: add it to the engine's configuration"}
	case errdefs.IsNotFound(err):
		return fmt.Errorf("%w: %w", provider.ErrInvalid, err)
	}
	return mapErr(err)
}

// adopt takes over the container that has the name already.
func (p *Provider) adopt(ctx context.Context, key, name string, plan *plan) (provider.Handle, error) {
	res, err := p.engine.ContainerInspect(ctx, name, client.ContainerInspectOptions{})
	if err != nil {
		return nil, mapErr(err)
	}
	c := res.Container
	if c.Config == nil || c.Config.Labels[labelManaged] != "1" || c.Config.Labels[labelKey] != key {
		return nil, fmt.Errorf("%w: container %s exists and is not ours: rename or remove it", provider.ErrConflict, name)
	}
	if c.State != nil && c.State.Status == container.StateCreated {
		// Its creator is at work on it, or died before it was done. Doing the rest
		// again is harmless either way.
		return p.begin(ctx, c.ID, plan, false)
	}
	return p.attach(ctx, c)
}

// begin takes a created container to running, ready for commands. mine says that
// this call made it.
func (p *Provider) begin(ctx context.Context, id string, plan *plan, mine bool) (_ provider.Handle, err error) {
	if err := plan.prepare(ctx, id); err != nil {
		return nil, err
	}
	var first *initConn
	if mine && plan.guest != "" {
		if first, err = p.attachInit(ctx, id); err != nil {
			return nil, err
		}
		defer func() {
			if err != nil {
				_ = first.Close()
			}
		}()
	}
	if err := p.startContainer(ctx, id); err != nil {
		return nil, err
	}
	c, err := p.inspect(ctx, refOf(id))
	if err != nil {
		return nil, err
	}
	h := p.handle(c)
	if plan.chown {
		out, code, err := h.run(ctx, "0", `mkdir -p "$2" && chown "$1" "$2"`, plan.user, p.opts.Workdir)
		if err != nil {
			return nil, err
		}
		if code != 0 {
			return nil, fmt.Errorf("%w: give %s to %s: %s", provider.ErrInvalid, p.opts.Workdir, plan.user, strings.TrimSpace(out))
		}
	}
	if err := p.checkRunning(ctx, c, first); err != nil {
		return nil, err
	}
	dressed := p.dress(c, h)
	if i, ok := dressed.(*initHandle); ok {
		i.first.Store(first)
	}
	return dressed, nil
}

func (p *Provider) startContainer(ctx context.Context, id string) error {
	_, err := p.engine.ContainerStart(ctx, id, client.ContainerStartOptions{})
	switch {
	case err == nil:
		return nil
	case isUnknownUser(err):
		return &provider.OptionError{Provider: providerName, Option: "user", Value: p.opts.User, Cure: "the image does not know it: use uid:gid, or a user of the image"}
	case errdefs.IsNotFound(err), !isNoSpace(err) && strings.Contains(err.Error(), "executable file not found"):
		if strings.Contains(err.Error(), "No such container") {
			return mapErr(err)
		}
		return fmt.Errorf("%w: start: %w: the image lacks what the first process takes (sleep, without the guest program)", provider.ErrInvalid, err)
	}
	return mapErr(err)
}

// checkRunning turns a first process that ended at once into an error that says
// why. first is a connection to it, if there is one.
func (p *Provider) checkRunning(ctx context.Context, c container.InspectResponse, first *initConn) error {
	if c.State == nil || c.State.Running {
		return nil
	}
	words := "what it said was not kept"
	switch {
	case first != nil:
		words = first.lastWords()
	case c.Config.Labels[labelGuest] == "":
		words = p.lastWords(ctx, c.ID)
	}
	return fmt.Errorf("%w: the container's first process ended with %d: %s", provider.ErrInvalid, c.State.ExitCode, words)
}

func (p *Provider) lastWords(ctx context.Context, id string) string {
	logs, err := p.engine.ContainerLogs(ctx, id, client.ContainerLogsOptions{ShowStdout: true, ShowStderr: true, Tail: "5"})
	if err != nil {
		return err.Error()
	}
	defer logs.Close()
	var b strings.Builder
	w := &limited{w: &b, n: 2 << 10}
	if err := demux(newReader(logs), false, w, w, func() bool { return false }); err != nil && !isEOF(err) {
		return err.Error()
	}
	return strings.TrimSpace(b.String())
}

// Resume implements [provider.Provider]. A stopped container is started and a paused
// one thawed. Only the engine's own "no such container" is ErrNotFound, and one that
// is being removed.
func (p *Provider) Resume(ctx context.Context, ref provider.Ref) (provider.Handle, error) {
	h, err := p.resume(ctx, ref)
	if err != nil {
		return nil, fmt.Errorf("docker: resume %.12s: %w", ref.ID, err)
	}
	return h, nil
}

func (p *Provider) resume(ctx context.Context, ref provider.Ref) (provider.Handle, error) {
	c, err := p.inspect(ctx, ref)
	if err != nil {
		return nil, err
	}
	return p.attach(ctx, c)
}

// inspect finds a container of ours.
func (p *Provider) inspect(ctx context.Context, ref provider.Ref) (container.InspectResponse, error) {
	var none container.InspectResponse
	switch {
	case p.bad != nil:
		return none, p.bad
	case ref.Provider != "" && ref.Provider != providerName:
		return none, fmt.Errorf("%w: a sandbox of provider %q", provider.ErrInvalid, ref.Provider)
	case ref.Version > refVersion:
		return none, fmt.Errorf("%w: the record is of version %d, this program knows %d", provider.ErrInvalid, ref.Version, refVersion)
	case !idPattern.MatchString(ref.ID):
		return none, fmt.Errorf("%w: no container has the id %.80q", provider.ErrNotFound, ref.ID)
	}
	res, err := p.engine.ContainerInspect(ctx, ref.ID, client.ContainerInspectOptions{})
	if err != nil {
		return none, mapErr(err)
	}
	c := res.Container
	if c.Config == nil || c.State == nil || c.Config.Labels[labelManaged] != "1" || !strings.HasPrefix(c.Name, "/"+namePrefix) {
		return none, fmt.Errorf("%w: container %.12s was not made by this provider", provider.ErrConflict, ref.ID)
	}
	if c.State.Dead || c.State.Status == container.StateRemoving {
		return none, fmt.Errorf("%w: container %.12s is %s", provider.ErrNotFound, ref.ID, c.State.Status)
	}
	return c, nil
}

var idPattern = regexp.MustCompile(`^[0-9a-f]{12,64}$`)

// attach brings an existing container to where it takes commands.
func (p *Provider) attach(ctx context.Context, c container.InspectResponse) (provider.Handle, error) {
	if c.State.Paused {
		if err := p.handle(c).Unpause(ctx); err != nil {
			return nil, err
		}
	} else if !c.State.Running {
		if err := p.startContainer(ctx, c.ID); err != nil {
			return nil, p.lostProgram(c, err)
		}
	}
	fresh, err := p.inspect(ctx, refOf(c.ID))
	if err != nil {
		return nil, err
	}
	if err := p.checkRunning(ctx, fresh, nil); err != nil {
		return nil, err
	}
	return p.dress(fresh, p.handle(fresh)), nil
}

// handle is the exec-only view of a container; all it needs is in the labels.
func (p *Provider) handle(c container.InspectResponse) *handle {
	l := c.Config.Labels
	return &handle{
		p: p, ref: refOf(c.ID), key: l[labelKey], root: l[labelRoot], user: l[labelUser],
		starts: make(chan struct{}, maxStarts),
	}
}

// dress adds to a handle what this container can do beyond that.
func (p *Provider) dress(c container.InspectResponse, h *handle) provider.Handle {
	l := c.Config.Labels
	var dressed provider.Handle = h
	if !volumeAt(c.Mounts, h.root) {
		dressed = &snapshotHandle{handle: h, image: c.Image}
	}
	if l[labelGuest] != "" {
		dressed = &initHandle{Handle: dressed, h: h, guest: l[labelGuest], socket: l[labelSocket]}
	}
	return dressed
}

// volumeAt says whether the workdir, or a part of it, lies outside what a commit saves.
func volumeAt(mounts []container.MountPoint, root string) bool {
	return slices.ContainsFunc(mounts, func(m container.MountPoint) bool { return within(root, m.Destination) })
}

// handle is a container, on the exec-only path.
type handle struct {
	p      *Provider
	ref    provider.Ref
	key    string
	root   string
	user   string        // the agent's
	starts chan struct{} // bounds the starts in progress
	noMark bool          // tests: as if the mark could not be set
}

var (
	_ provider.Handle  = (*handle)(nil)
	_ provider.Pauser  = (*handle)(nil)
	_ provider.Exposer = (*handle)(nil)
)

// Ref implements [provider.Handle].
func (h *handle) Ref() provider.Ref { return h.ref }

// Root implements [provider.Handle].
func (h *handle) Root() string { return h.root }

// Close implements [provider.Handle]. A handle holds nothing between calls.
func (h *handle) Close() error { return nil }

// Pause implements [provider.Pauser]. A paused sandbox is success.
func (h *handle) Pause(ctx context.Context) error {
	_, err := h.p.engine.ContainerPause(ctx, h.ref.ID, client.ContainerPauseOptions{})
	if err != nil && strings.Contains(err.Error(), "already paused") {
		return nil
	}
	return h.lifeErr("pause", err)
}

// Unpause implements [provider.Pauser]. A running sandbox is success.
func (h *handle) Unpause(ctx context.Context) error {
	_, err := h.p.engine.ContainerUnpause(ctx, h.ref.ID, client.ContainerUnpauseOptions{})
	if err != nil && strings.Contains(err.Error(), "is not paused") {
		return nil
	}
	return h.lifeErr("unpause", err)
}

func (h *handle) lifeErr(what string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("docker: %s %.12s: %w", what, h.ref.ID, mapErr(err))
}

// Expose implements [provider.Exposer] for the ports of Options.PublishPorts.
func (h *handle) Expose(ctx context.Context, port int) (provider.Exposed, error) {
	if port < 1 || port > 65535 {
		return provider.Exposed{}, fmt.Errorf("docker: expose port %d: %w: a port is a number from 1 to 65535", port, provider.ErrInvalid)
	}
	c, err := h.p.inspect(ctx, h.ref)
	if err != nil {
		return provider.Exposed{}, fmt.Errorf("docker: expose port %d: %w", port, err)
	}
	want, _ := network.PortFrom(uint16(port), network.TCP)
	if c.NetworkSettings != nil {
		for _, b := range c.NetworkSettings.Ports[want] {
			if b.HostPort != "" && b.HostPort != "0" {
				return provider.Exposed{URL: "http://" + h.p.publishHost() + ":" + b.HostPort}, nil
			}
		}
	}
	return provider.Exposed{}, &provider.OptionError{Provider: providerName, Option: "publishPorts", Value: fmt.Sprint(port),
		Cure: fmt.Sprintf("the port is not published: create the sandbox with PublishPorts: []int{%d}, or dial it through the guest", port)}
}

// publishHost is where published ports are reached from here.
func (p *Provider) publishHost() string {
	addr, _ := netip.ParseAddr(p.opts.PublishAddr) // checked by New
	if !addr.IsLoopback() {
		if _, rest, ok := strings.Cut(p.engine.DaemonHost(), "tcp://"); ok {
			host, _, _ := strings.Cut(rest, ":")
			return host
		}
	}
	if addr.IsUnspecified() {
		return "127.0.0.1"
	}
	if addr.Is6() {
		return "[" + addr.String() + "]"
	}
	return addr.String()
}
