package docker

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/client"

	"github.com/aisandbox-go/aisandbox/provider"
)

const snapshotRepo = "aisandbox-snapshot"

// snapshotHandle is a container whose workdir is part of what a commit saves.
type snapshotHandle struct {
	*handle
	image string // the one that the container was made from
}

var (
	_ provider.Snapshotter = (*snapshotHandle)(nil)
	_ provider.Forker      = (*snapshotHandle)(nil)
)

// Snapshot implements [provider.Snapshotter]. The sandbox is frozen while it is
// saved. The id is the tag of an image.
func (h *snapshotHandle) Snapshot(ctx context.Context, label string) (string, error) {
	tag := snapshotRepo + ":" + tagOf(label) + "-" + strings.ToLower(rand.Text()[:12])
	if _, err := h.commit(ctx, tag); err != nil {
		return "", fmt.Errorf("docker: snapshot %.12s: %w", h.ref.ID, err)
	}
	return tag, nil
}

// tagOf makes any text a part of a tag: what engines refuse becomes a dash.
func tagOf(label string) string {
	s := strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9', r == '_', r == '.', r == '-':
			return r
		}
		return '-'
	}, label)
	s = strings.TrimLeft(s, ".-") // a tag begins with neither
	s = s[:min(len(s), 64)]
	if s == "" {
		return "snapshot"
	}
	return s
}

// commit saves the container as an image and returns its id. The configuration is
// given in full, so that nothing of the container's own gets into the image: the
// environment is that of the image it was made from, which is public already.
func (h *snapshotHandle) commit(ctx context.Context, tag string) (string, error) {
	base, err := h.p.engine.ImageInspect(ctx, h.image)
	if err != nil && !errdefs.IsNotFound(err) {
		return "", mapErr(err)
	}
	cfg := &container.Config{
		Labels: h.p.labels(h.key, nil, map[string]string{labelParent: h.ref.ID}),
	}
	if base.Config != nil {
		cfg.Env = base.Config.Env
		cfg.User = base.Config.User
		cfg.Cmd = base.Config.Cmd
		cfg.Entrypoint = base.Config.Entrypoint
	}
	res, err := h.p.engine.ContainerCommit(ctx, h.ref.ID, client.ContainerCommitOptions{Reference: tag, Config: cfg})
	if err != nil {
		return "", mapErr(err)
	}
	return res.ID, nil
}

// Fork implements [provider.Forker]. The copy's image goes away with the copy.
func (h *snapshotHandle) Fork(ctx context.Context, spec provider.Spec) (provider.Handle, error) {
	f, err := h.fork(ctx, spec)
	if err != nil {
		return nil, fmt.Errorf("docker: fork %.12s: %w", h.ref.ID, err)
	}
	return f, nil
}

func (h *snapshotHandle) fork(ctx context.Context, spec provider.Spec) (provider.Handle, error) {
	if spec.Key == h.key {
		return nil, fmt.Errorf("%w: a fork takes a key of its own", provider.ErrInvalid)
	}
	image, err := h.commit(ctx, "")
	if err != nil {
		return nil, err
	}
	f, err := h.p.create(ctx, spec, image, map[string]string{labelParent: h.ref.ID, labelImage: image})
	if err != nil {
		cleanCtx, cancel := cleanupContext(ctx)
		defer cancel()
		_, rmErr := h.p.engine.ImageRemove(cleanCtx, image, client.ImageRemoveOptions{PruneChildren: true})
		if errdefs.IsNotFound(rmErr) {
			rmErr = nil
		}
		return nil, errors.Join(err, rmErr)
	}
	return f, nil
}

// Restore implements [provider.Restorer]. A snapshot that does not exist is
// [provider.ErrNotFound].
func (p *Provider) Restore(ctx context.Context, snapshot string, spec provider.Spec) (provider.Handle, error) {
	fail := func(err error) (provider.Handle, error) {
		return nil, fmt.Errorf("docker: restore %.100q: %w", snapshot, err)
	}
	if p.bad != nil {
		return fail(p.bad)
	}
	if _, err := p.snapshot(ctx, snapshot); err != nil {
		return fail(err)
	}
	h, err := p.create(ctx, spec, snapshot, map[string]string{labelParent: snapshot})
	if err != nil {
		return fail(err)
	}
	return h, nil
}

// DeleteSnapshot implements [provider.Restorer]. It deletes nothing that is not a
// snapshot. One that a sandbox was made from keeps its layers until that is gone.
func (p *Provider) DeleteSnapshot(ctx context.Context, snapshot string) error {
	fail := func(err error) error { return fmt.Errorf("docker: delete snapshot %.100q: %w", snapshot, err) }
	if p.bad != nil {
		return fail(p.bad)
	}
	id, err := p.snapshot(ctx, snapshot)
	if errors.Is(err, provider.ErrNotFound) {
		return nil
	}
	if err != nil {
		return fail(err)
	}
	_, err = p.engine.ImageRemove(ctx, id, client.ImageRemoveOptions{Force: true, PruneChildren: true})
	if err == nil || errdefs.IsNotFound(err) {
		return nil
	}
	return fail(mapErr(err))
}

// snapshot checks that an id is one of ours, and returns what to call it by.
func (p *Provider) snapshot(ctx context.Context, id string) (string, error) {
	if !strings.HasPrefix(id, snapshotRepo+":") {
		return "", fmt.Errorf("%w: that is no snapshot of this provider", provider.ErrInvalid)
	}
	res, err := p.engine.ImageInspect(ctx, id)
	switch {
	case errdefs.IsNotFound(err):
		return "", fmt.Errorf("%w: no such snapshot", provider.ErrNotFound)
	case err != nil:
		return "", mapErr(err)
	case res.Config == nil || res.Config.Labels[labelManaged] != "1":
		return "", fmt.Errorf("%w: the image is not ours", provider.ErrConflict)
	}
	return id, nil
}
