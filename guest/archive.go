package guest

import (
	"context"
	"io"
	"time"

	"github.com/aisandbox-go/aisandbox/internal/wire"
	"github.com/aisandbox-go/aisandbox/provider"
)

// TarIn implements provider.Archiver. Existing files are replaced, never written
// through; links are made as the archive has them, and never followed out of dir.
func (g *Handle) TarIn(ctx context.Context, dir string, r io.Reader) error {
	x, err := g.begin(ctx, &wire.Request{Op: wire.OpTarIn, Path: g.abs(dir)})
	if err != nil {
		return err
	}
	_, err = x.upload(r)
	return err
}

// TarOut implements provider.Archiver. Sockets, pipes and devices are left out;
// files with several names are packed once.
func (g *Handle) TarOut(ctx context.Context, dir string, w io.Writer, opts provider.TarOptions) error {
	x, err := g.begin(ctx, &wire.Request{Op: wire.OpTarOut, Path: g.abs(dir), Names: opts.Exclude})
	if err != nil {
		return err
	}
	d := &download{x: x}
	defer d.Close()
	_, err = d.WriteTo(w)
	return err
}

// Usage implements provider.Meter.
func (g *Handle) Usage(ctx context.Context) (provider.Usage, error) {
	b, err := g.call(ctx, &wire.Request{Op: wire.OpUsage})
	if err != nil {
		return provider.Usage{}, err
	}
	d := wire.Dec{B: b}
	return provider.Usage{
		Processes:   int(d.Int()),
		MemoryBytes: d.Int(),
		CPU:         time.Duration(d.Int()),
		GuestMemory: d.Int(),
	}, nil
}
