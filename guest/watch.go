package guest

import (
	"context"
	"fmt"
	"iter"
	"sync"

	"github.com/aisandbox-go/aisandbox/internal/wire"
	"github.com/aisandbox-go/aisandbox/provider"
)

// watch is a running watch; its stream serves nothing else.
type watch struct {
	x *exchange

	once sync.Once
}

// Watch implements provider.Watcher. Links are reported, never followed. The end
// of ctx ends the watch without a last scan.
func (g *Handle) Watch(ctx context.Context, dir string, opts provider.WatchOptions) (provider.Watch, error) {
	x, err := g.begin(ctx, &wire.Request{Op: wire.OpWatch, Path: g.abs(dir), Names: opts.Ignore})
	if err != nil {
		return nil, err
	}
	if _, err := x.started(); err != nil {
		return nil, err
	}
	return &watch{x: x}, nil
}

var changeTypes = map[byte]provider.ChangeType{
	'c': provider.ChangeCreate, 'm': provider.ChangeModify, 'd': provider.ChangeDelete,
}

// Changes implements provider.Watch. Leaving the loop ends the watch.
func (w *watch) Changes() iter.Seq2[provider.Change, error] {
	return func(yield func(provider.Change, error) bool) {
		defer w.x.end()
		for {
			t, b, err := w.x.recv()
			if err != nil {
				yield(provider.Change{}, err)
				return
			}
			if t == wire.FReply {
				return
			}
			if t != wire.FData || len(b) < 2 || changeTypes[b[0]] == "" {
				yield(provider.Change{}, fmt.Errorf("guest protocol: malformed change"))
				return
			}
			if !yield(provider.Change{Type: changeTypes[b[0]], Path: string(b[1:])}, nil) {
				return
			}
		}
	}
}

// Stop implements provider.Watch.
func (w *watch) Stop(context.Context) error {
	w.once.Do(func() { _ = w.x.l.Send(wire.FEnd, nil) }) // a broken stream shows in Changes
	return nil
}
