package guest

import (
	"context"
	"encoding/json"
	"fmt"
	"io"

	"github.com/aisandbox-go/aisandbox/internal/wire"
	"github.com/aisandbox-go/aisandbox/provider"
)

// Launch implements provider.Reattacher: the process gets a supervisor of its own
// that outlives host and guest, writes the journal (package journal/frame) and
// signs the exit with the nonce.
func (g *Handle) Launch(ctx context.Context, token string, cmd provider.Cmd, opts provider.LaunchOptions) error {
	switch {
	case cmd.Stdout != nil || cmd.Stderr != nil:
		return fmt.Errorf("guest: launch: output goes to the journal, Stdout and Stderr must be nil: %w", provider.ErrInvalid)
	case cmd.Terminal != nil:
		return fmt.Errorf("guest: launch: a detached process has no terminal: %w", provider.ErrInvalid)
	case len(cmd.Argv) == 0:
		return fmt.Errorf("guest: launch: argv is empty: %w", provider.ErrInvalid)
	}
	x, err := g.begin(ctx, &wire.Request{
		Op: wire.OpLaunch, Token: token, RunID: opts.RunID, Nonce: opts.Nonce,
		Argv: cmd.Argv, Dir: cmd.Dir, Env: cmd.Env, User: cmd.User,
	})
	if err != nil {
		return err
	}
	_, err = x.upload(cmd.Stdin)
	return err
}

// Probe implements provider.Reattacher. It tells what the journal says; whether
// the exit in it is true is for frame.Tally to verify.
func (g *Handle) Probe(ctx context.Context, token string) (provider.Probe, error) {
	b, err := g.call(ctx, &wire.Request{Op: wire.OpProbe, Token: token})
	if err != nil {
		return provider.Probe{}, err
	}
	var p provider.Probe
	if err := json.Unmarshal(b, &p); err != nil {
		return provider.Probe{}, fmt.Errorf("guest protocol: probe: %w", err)
	}
	return p, nil
}

// Tail implements provider.Reattacher. ctx bounds the whole reading.
func (g *Handle) Tail(ctx context.Context, token string, from int64, follow bool) (io.ReadCloser, error) {
	req := &wire.Request{Op: wire.OpTail, Token: token, Offset: from}
	if follow {
		req.Flags |= wire.Follow
	}
	x, err := g.begin(ctx, req)
	if err != nil {
		return nil, err
	}
	// The guest answers at once, so that an error is this call's.
	if _, err := x.started(); err != nil {
		return nil, err
	}
	return &download{x: x}, nil
}

// Kill implements provider.Reattacher.
func (g *Handle) Kill(ctx context.Context, token string, sig int) error {
	_, err := g.call(ctx, &wire.Request{Op: wire.OpKill, Token: token, Signal: sig})
	return err
}

// Forget implements provider.Reattacher. A process that still runs is not
// forgotten; kill it first.
func (g *Handle) Forget(ctx context.Context, token string) error {
	_, err := g.call(ctx, &wire.Request{Op: wire.OpForget, Token: token})
	return err
}

// Journals implements provider.JournalLister.
func (g *Handle) Journals(ctx context.Context) ([]provider.JournalInfo, error) {
	b, err := g.call(ctx, &wire.Request{Op: wire.OpJournals})
	if err != nil {
		return nil, err
	}
	var js []provider.JournalInfo
	if err := json.Unmarshal(b, &js); err != nil {
		return nil, fmt.Errorf("guest protocol: journals: %w", err)
	}
	return js, nil
}
