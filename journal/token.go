package journal

import (
	"context"
	"fmt"
	"strconv"

	"github.com/aisandbox-go/aisandbox/journal/frame"
	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/store"
)

// Token names the journal of a run's n-th process, counted from 0; there is a
// second one where the first had to be given up before it did anything. Run ids
// are unique to a database, and a machine may be the sandbox of several: so the
// time of the run's start, which its record tells every host alike, is part of
// the name. No run id holds a NUL, so that names stay apart.
func Token(rec store.Run, n int) (string, error) {
	id := rec.ID + "\x00" + strconv.FormatInt(rec.StartedAt.UnixMilli(), 36)
	if n > 0 {
		id += "\x00" + strconv.Itoa(n)
	}
	t, err := frame.Token(id)
	if err != nil {
		return "", fmt.Errorf("journal: run %q: %w", rec.ID, err)
	}
	return t, nil
}

// State asks what became of a run's agent, without any claim: for whoever has to
// decide whether to take the run over.
func State(ctx context.Context, re provider.Reattacher, rec store.Run) (p provider.Probe, err error) {
	for n := range 2 {
		token, err := Token(rec, n)
		if err != nil {
			return provider.Probe{}, err
		}
		next, err := re.Probe(ctx, token)
		if err != nil {
			return provider.Probe{}, fmt.Errorf("journal: %w", err)
		}
		if n > 0 && next.State == provider.ProbeAbsent {
			break
		}
		if p = next; p.State != provider.ProbeExited {
			break
		}
	}
	return p, nil
}

// Of returns how to reach detached processes of a sandbox: by its guest, or else
// by commands (see [Shell]).
func Of(h provider.Handle) provider.Reattacher {
	if re, ok := provider.As[provider.Reattacher](h); ok {
		return re
	}
	return Shell(h)
}
