package reaper

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"time"

	"github.com/aisandbox-go/aisandbox/store"
)

// forever is the lease by which a store keeps its name: the longest that times in
// nanoseconds allow, by far.
const forever = 100 * 365 * 24 * time.Hour

// Deployment returns the name of a store, for Config.Deployment and for the sandboxes
// that are recorded in it. It is made up by whoever asks first, and stays: it is the
// owner of a lease that nobody gives back. A copy of a database has the name of the
// original: the two must not share a provider's backend.
func Deployment(ctx context.Context, leases store.Leaser) (string, error) {
	ctx, stop := context.WithTimeout(ctx, opTime)
	defer stop()
	l, err := leases.Acquire(ctx, "reaper/deployment", rand.Text(), forever)
	var held *store.HeldError
	switch {
	case errors.As(err, &held):
		return held.Owner, nil
	case err != nil:
		return "", fmt.Errorf("reaper: the store's name: %w", err)
	}
	return l.Owner, nil
}
