package watch

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/aisandbox-go/aisandbox/internal/sh"
	"github.com/aisandbox-go/aisandbox/provider"
)

// The polling times of spec 05 §15.3.
const (
	pollInterval = 700 * time.Millisecond
	pollIdle     = 5 * time.Second
	pollTimeout  = 30 * time.Second
	pollShare    = 20 // a poll takes at most one part in so many of the time
)

// maxListing bounds the output of one poll: some 400,000 files.
const maxListing = 64 << 20

// poller lists the files again and again.
type poller struct {
	h      provider.Handle
	o      Options
	script string
	ctx    context.Context // the watch's; a poller lives as long as its watch
	last   map[string]string
	based  bool // last is complete

	mu      sync.Mutex
	stopCtx context.Context // of Stop, for the last sweep
	stopped chan struct{}
	fails   int
}

// newPoller lists the files for the first time.
func newPoller(ctx context.Context, h provider.Handle, o Options) *poller {
	if o.Interval <= 0 {
		o.Interval = pollInterval
	}
	p := &poller{h: h, o: o, script: pollScript(o), ctx: ctx, stopped: make(chan struct{})}
	p.poll(ctx, func(provider.Change) {})
	return p
}

// pollScript lists files and links below the current directory, without
// descending into what is ignored. A record is what identifies the content, a
// blank, and the name; it ends with NUL, or, where find can't print, with "//\n",
// which no path that find prints can hold.
func pollScript(o Options) string {
	var prune []string
	for _, seg := range o.Ignore {
		prune = append(prune, "-name "+sh.Quote(globEscape(seg)))
	}
	expr := `\( -type f -o -type l \)`
	if len(prune) > 0 {
		expr = `\( ` + strings.Join(prune, " -o ") + ` \) -prune -o ` + expr
	}
	return "if find . -maxdepth 0 -printf '' >/dev/null 2>&1; then exec find . " + expr + ` -printf '%C@,%T@,%s,%i,%y %p\0'; fi
exec find . ` + expr + ` -exec stat -c '%Z,%Y,%s,%i,%f %n//' {} +`
}

// globEscape makes find take a name literally.
func globEscape(s string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`).Replace(s)
}

// parseListing reads the output of pollScript. A record that was cut off is left out.
func parseListing(out []byte) map[string]string {
	sep := []byte{0}
	if i := bytes.IndexByte(out, 0); i < 0 {
		sep = []byte("//\n")
	}
	files := map[string]string{}
	for {
		rec, rest, ok := bytes.Cut(out, sep)
		if !ok {
			return files
		}
		out = rest
		if sig, name, ok := bytes.Cut(rec, []byte(" ")); ok {
			files[strings.TrimPrefix(string(name), "./")] = string(sig)
		}
	}
}

// list runs one poll. complete is false when the listing may lack files.
func (p *poller) list(ctx context.Context) (files map[string]string, complete bool, err error) {
	ctx, stop := context.WithTimeoutCause(ctx, pollTimeout, errors.New("the listing took too long"))
	defer stop()
	out, errb := &limited{max: maxListing}, &limited{max: 4 << 10}
	proc, err := p.h.Start(ctx, provider.Cmd{Argv: provider.Shell(p.script), Dir: p.o.Root, Stdout: out, Stderr: errb})
	if err != nil {
		return nil, false, err
	}
	exit, err := proc.Wait()
	if err != nil {
		return nil, false, err
	}
	files = parseListing(out.buf)
	if exit != (provider.Exit{}) && len(files) == 0 {
		return nil, false, fmt.Errorf("find: %v: %s", exit, bytes.TrimSpace(errb.buf))
	}
	return files, exit == (provider.Exit{}) && !out.over, nil
}

// poll lists the files and sends what changed; it reports whether anything did.
// A listing that failed changes nothing, and one that is incomplete proves no
// file gone (spec 05 §15.1).
func (p *poller) poll(ctx context.Context, send func(provider.Change)) bool {
	files, complete, err := p.list(ctx)
	if err != nil {
		if ctx.Err() == nil {
			if p.fails++; p.last == nil && p.fails == 1 || p.fails == 3 {
				p.o.Logger.Warn("files can't be listed", "failures", p.fails, "error", err)
			}
		}
		return false
	}
	p.fails = 0
	first := !p.based && (p.last == nil || complete)
	if !complete && p.last != nil {
		merged := maps.Clone(p.last)
		maps.Copy(merged, files)
		files = merged
	}
	old := p.last
	p.last, p.based = files, p.based || complete
	if first {
		return false // the state to compare with
	}
	changes := compare(p.o.Root, old, files)
	for _, c := range changes {
		send(c)
	}
	return len(changes) > 0
}

// compare returns the changes in path order.
func compare(root string, old, now map[string]string) []provider.Change {
	var out []provider.Change
	add := func(t provider.ChangeType, name string) {
		out = append(out, provider.Change{Type: t, Path: path.Join(root, name)})
	}
	for name, sig := range now {
		switch was, ok := old[name]; {
		case !ok:
			add(provider.ChangeCreate, name)
		case was != sig:
			add(provider.ChangeModify, name)
		}
	}
	for name := range old {
		if _, ok := now[name]; !ok {
			add(provider.ChangeDelete, name)
		}
	}
	slices.SortFunc(out, func(a, b provider.Change) int { return strings.Compare(a.Path, b.Path) })
	return out
}

// run polls until the watch ends; two polls never overlap.
func (p *poller) run(send func(provider.Change)) error {
	wait := p.o.Interval
	for {
		t := time.NewTimer(wait)
		select {
		case <-t.C:
		case <-p.ctx.Done():
			t.Stop()
			return context.Cause(p.ctx)
		case <-p.stopped:
			t.Stop()
			p.mu.Lock()
			ctx := p.stopCtx
			p.mu.Unlock()
			p.poll(ctx, send)
			return nil
		}
		start := time.Now()
		changed := p.poll(p.ctx, send)
		cost := time.Since(start)
		if changed {
			wait = p.o.Interval
		} else {
			wait = min(wait*3/2, max(pollIdle, p.o.Interval))
		}
		wait = max(wait, min(cost*pollShare, pollTimeout))
	}
}

func (p *poller) stop(ctx context.Context) error {
	p.mu.Lock()
	p.stopCtx = ctx
	p.mu.Unlock()
	close(p.stopped)
	return nil
}

// limited keeps the first max bytes.
type limited struct {
	buf  []byte
	max  int
	over bool
}

func (l *limited) Write(p []byte) (int, error) {
	n := min(len(p), l.max-len(l.buf))
	l.buf = append(l.buf, p[:n]...)
	l.over = l.over || n < len(p)
	return len(p), nil
}
