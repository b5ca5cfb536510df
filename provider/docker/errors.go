package docker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/moby/moby/client"

	"github.com/aisandbox-go/aisandbox/provider"
)

// mapErr gives an error of the engine its meaning in package provider. An engine
// that can't be asked, or that fails while it answers, says nothing about the
// sandbox, so only its 404 is ErrNotFound (spec 05 §17.4).
func mapErr(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return err
	case isNoSpace(err):
		return fmt.Errorf("%w: %w (free some in the engine's data directory, such as with docker system prune)", provider.ErrNoSpace, err)
	case isUnreachable(err):
		return fmt.Errorf("%w: %w (start Docker, or set DOCKER_HOST to where it listens)", provider.ErrUnavailable, err)
	case errdefs.IsNotFound(err):
		return fmt.Errorf("%w: %w", provider.ErrNotFound, err)
	case errdefs.IsInvalidArgument(err):
		return fmt.Errorf("%w: %w", provider.ErrInvalid, err)
	case errdefs.IsInternal(err), errdefs.IsUnavailable(err), errdefs.IsUnknown(err):
		return fmt.Errorf("%w: %w", provider.ErrUnavailable, err)
	}
	return err
}

func isUnreachable(err error) bool {
	var n net.Error
	return client.IsErrConnectionFailed(err) || errors.As(err, &n) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
}

// isNoSpace reads the engine's text: its answer is a plain 500.
func isNoSpace(err error) bool {
	s := strings.ToLower(err.Error())
	return strings.Contains(s, "no space left on device") || strings.Contains(s, "disk quota exceeded")
}

// isPaused says that a container refused because it is paused.
func isPaused(err error) bool {
	return errdefs.IsConflict(err) && strings.Contains(strings.ToLower(err.Error()), "paused")
}

// isStopped says that a container refused because it does not run.
func isStopped(err error) bool {
	return errdefs.IsConflict(err) && strings.Contains(strings.ToLower(err.Error()), "not running")
}

// isUnknownUser reads the engine's text: the kind differs between its versions.
func isUnknownUser(err error) bool {
	return strings.Contains(strings.ToLower(err.Error()), "unable to find user")
}
