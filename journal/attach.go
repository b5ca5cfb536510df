package journal

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/store"
)

// Preflight waits until the journal of a run that was launched can be attached
// to, spec 04 §3.7. It asks the sandbox once before it asks the store; a run that
// the store does not know, or that has ended, is refused at once, one that runs
// is waited for. wait 0 is [AttachWait]. Runs may be nil. The answer is that of
// the last probe.
//
// A probe that fails never counts as "there is none" or "there is one".
func Preflight(ctx context.Context, re provider.Reattacher, token, runID string, runs store.Runs, wait time.Duration) (provider.Probe, error) {
	if wait <= 0 {
		wait = AttachWait
	}
	began := time.Now()
	for asked := false; ; asked = true {
		p, err := re.Probe(ctx, token)
		switch {
		case ctx.Err() != nil:
			return provider.Probe{}, context.Cause(ctx)
		case err == nil && p.State != provider.ProbeAbsent:
			return p, nil
		case errors.Is(err, provider.ErrNotFound):
			return provider.Probe{}, fmt.Errorf("journal: %w", err)
		}
		if !asked && runs != nil {
			rec, rerr := runs.Get(ctx, runID)
			switch {
			case errors.Is(rerr, store.ErrNotFound):
				return provider.Probe{}, &AttachError{runID, AttachUnknown, err}
			case rerr == nil && rec.Status.Terminal():
				return provider.Probe{}, &AttachError{runID, AttachTerminal, err}
			}
		}
		if time.Since(began) >= wait {
			return provider.Probe{}, &AttachError{runID, AttachTimeout, err}
		}
		if err := pause(ctx, probeEvery); err != nil {
			return provider.Probe{}, err
		}
	}
}
