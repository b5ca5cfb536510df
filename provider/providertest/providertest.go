// Package providertest is the conformance suite of sandbox backends (spec 05 §12).
// A backend passes when [Run] does; a capability that it has not is skipped and
// printed, a trait that it claims is measured.
//
//	func TestProvider(t *testing.T) {
//		providertest.Run(t, providertest.Options{New: func(t *testing.T) provider.Provider {
//			return mine.New(mine.Options{Dir: providertest.Dir(t)})
//		}})
//	}
//
// Some cases need a second process: the suite starts the test binary again with
// only the calling test selected, so Run must be reached there as here, and New
// must return a backend that sees the same sandboxes.
//
// A sandbox needs a POSIX sh with the usual small tools. Cases that need more
// (setsid, bash) say so when they skip.
package providertest

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/aisandbox-go/aisandbox/provider"
)

// Options say what to test. New alone is needed.
type Options struct {
	// New returns the backend. It is called once per Run, and once more in each
	// second process; see [Second].
	New func(t *testing.T) provider.Provider

	// Spec is what sandboxes are created from; nil is the zero Spec. The suite sets
	// Key, Labels and Network where a case is about them.
	Spec func(t *testing.T) provider.Spec

	// Wrap is applied to every handle, as guest.Attach is. nil changes nothing.
	Wrap func(ctx context.Context, h provider.Handle) (provider.Handle, error)

	// Skip maps the id of a case, such as "E16", to the reason why this backend
	// need not pass it. It is printed.
	Skip map[string]string

	// Timeout bounds a case; 0 is 180 s. Slow makes every deadline that a case sets
	// itself longer, by that factor; 0 is 1.
	Timeout time.Duration
	Slow    int

	// Parallel is the number of commands of the load case; 0 is 200.
	Parallel int

	// BigOutput is how many bytes of output the memory case moves; 0 is 1 GiB, and
	// 64 MiB under -short.
	BigOutput int64
}

// Run tests one backend. It uses t.Run, with parallel cases inside.
func Run(t *testing.T, o Options) {
	o.Timeout = cmp.Or(o.Timeout, 180*time.Second)
	o.Slow = max(o.Slow, 1)
	o.Parallel = cmp.Or(o.Parallel, 200)
	if o.BigOutput == 0 {
		o.BigOutput = 1 << 30
		if testing.Short() {
			o.BigOutput = 64 << 20
		}
	}
	s := &suite{name: t.Name(), o: o, p: o.New(t)}
	if Second() {
		s.second(t)
		return
	}
	if p, ok := provider.As[provider.Pinger](s.p); ok {
		if err := p.Ping(t.Context()); err != nil {
			t.Fatalf("the backend can't be used here: %v", err)
		}
	}
	h := s.create(t, s.spec(t))
	s.tr = provider.TraitsOf(s.p, h)

	// Cases on one sandbox, all at once; then those that measure, alone.
	t.Run("shared", func(t *testing.T) {
		for _, c := range slices.Concat(execCases, fileCases, spawnCases, terminalCases, archiveCases, watchCases, detachCases, portCases, faultCases) {
			s.run(t, c, h, true)
		}
	})
	for _, c := range loadCases {
		s.run(t, c, h, false)
	}
	t.Run("own", func(t *testing.T) {
		for _, c := range slices.Concat(lifeCases, traitCases, networkCases) {
			s.run(t, c, nil, true)
		}
	})
	slices.Sort(s.skipped)
	for _, line := range s.skipped {
		t.Log("skipped " + line)
	}
}

// testCase is one row of the suite.
type testCase struct {
	id, name string
	run      func(t *testing.T, b *box)
}

type suite struct {
	name string // of the test that called Run
	o    Options
	p    provider.Provider
	tr   provider.Traits

	mu      sync.Mutex
	skipped []string
}

func (s *suite) run(t *testing.T, c testCase, h provider.Handle, parallel bool) {
	t.Run(c.id+" "+c.name, func(t *testing.T) {
		b := &box{s: s, t: t, id: c.id, h: h}
		if reason, ok := s.o.Skip[c.id]; ok {
			b.skip("by the backend's own test: %s", cmp.Or(reason, "NO REASON GIVEN"))
		}
		if parallel {
			t.Parallel()
		}
		ctx, cancel := context.WithTimeoutCause(t.Context(), s.o.Timeout, errors.New("the case took longer than Options.Timeout"))
		defer cancel()
		b.ctx = ctx
		if h != nil {
			b.attach(h)
		}
		c.run(t, b)
	})
}

func (s *suite) spec(t *testing.T) provider.Spec {
	if s.o.Spec == nil {
		return provider.Spec{}
	}
	return s.o.Spec(t)
}

// create makes a sandbox that lives until the end of t.
func (s *suite) create(t *testing.T, spec provider.Spec) provider.Handle {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), s.o.Timeout)
	defer cancel()
	raw, err := s.p.Create(ctx, spec)
	if err != nil {
		t.Fatalf("create: %v", err)
	}
	s.destroyLater(t, raw.Ref())
	return s.wrap(t, raw)
}

func (s *suite) destroyLater(t *testing.T, ref provider.Ref) {
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := s.p.Destroy(ctx, ref); err != nil {
			t.Errorf("destroy %v: %v", ref, err)
		}
	})
}

func (s *suite) wrap(t *testing.T, raw provider.Handle) provider.Handle {
	t.Helper()
	h := raw
	if s.o.Wrap != nil {
		ctx, cancel := context.WithTimeout(t.Context(), s.o.Timeout)
		defer cancel()
		var err error
		if h, err = s.o.Wrap(ctx, raw); err != nil {
			raw.Close()
			t.Fatalf("wrap: %v", err)
		}
	}
	t.Cleanup(func() { h.Close() })
	return h
}

func (s *suite) resume(t *testing.T, ref provider.Ref) provider.Handle {
	t.Helper()
	raw, err := s.p.Resume(t.Context(), ref)
	if err != nil {
		t.Fatalf("resume: %v", err)
	}
	return s.wrap(t, raw)
}

// box is the sandbox of a case, and what cases do with it.
type box struct {
	s   *suite
	t   *testing.T
	ctx context.Context
	id  string
	h   provider.Handle
	fs  provider.FS
	tr  provider.Traits

	made string
}

func (b *box) attach(h provider.Handle) {
	b.h, b.made = h, ""
	b.tr = provider.TraitsOf(b.s.p, h)
	if f, ok := provider.As[provider.FS](h); ok {
		b.fs = f
	} else {
		b.fs = provider.ExecFS(h)
	}
}

// own gives the case a sandbox of its own.
func (b *box) own() { b.attach(b.s.create(b.t, b.s.spec(b.t))) }

func (b *box) skip(format string, args ...any) {
	b.t.Helper()
	reason := fmt.Sprintf(format, args...)
	b.s.mu.Lock()
	b.s.skipped = append(b.s.skipped, b.id+": "+reason)
	b.s.mu.Unlock()
	b.t.Skip(reason)
}

// lacks skips because the backend does not offer a capability.
func (b *box) lacks(capability string) {
	b.t.Helper()
	b.skip("%s does not offer %s", b.s.p.Name(), capability)
}

// dir is a directory for this case alone.
func (b *box) dir() string {
	b.t.Helper()
	if b.made == "" {
		d := strings.TrimSuffix(b.h.Root(), "/") + "/case-" + b.id
		if err := b.fs.Mkdir(b.ctx, d); err != nil {
			b.t.Fatalf("make the case's directory: %v", err)
		}
		b.made = d
	}
	return b.made
}

func (b *box) path(name string) string { return b.dir() + "/" + name }

// within is a deadline of the case's own.
func (b *box) within(d time.Duration) time.Duration { return d * time.Duration(b.s.o.Slow) }

type result struct {
	out, err string
	exit     provider.Exit
	took     time.Duration
}

// start starts a command; a failure ends the case.
func (b *box) start(ctx context.Context, cmd provider.Cmd) provider.Process {
	b.t.Helper()
	p, err := b.h.Start(ctx, cmd)
	if err != nil {
		b.t.Fatalf("start %q: %v", cmd.Argv, err)
	}
	return &guarded{p, b.ctx}
}

// guarded is a process whose Wait returns even if the backend's doesn't, so that
// one broken case does not hold the suite.
type guarded struct {
	provider.Process
	ctx context.Context
}

const waitGrace = 5 * time.Second

func (g *guarded) Unwrap() any { return g.Process }

func (g *guarded) Wait() (provider.Exit, error) {
	type answer struct {
		e   provider.Exit
		err error
	}
	c := make(chan answer, 1)
	go func() {
		e, err := g.Process.Wait()
		c <- answer{e, err}
	}()
	select {
	case a := <-c:
		return a.e, a.err
	case <-g.ctx.Done():
	}
	select {
	case a := <-c:
		return a.e, a.err
	case <-time.After(waitGrace):
		return provider.Exit{}, errors.New("Wait does not return after the end of the context")
	}
}

// exec runs a command to its end, without judging it.
func (b *box) exec(cmd provider.Cmd) (result, error) {
	var out, errw bytes.Buffer
	if cmd.Stdout == nil {
		cmd.Stdout = &out
	}
	if cmd.Stderr == nil {
		cmd.Stderr = &errw
	}
	begin := time.Now()
	p, err := b.h.Start(b.ctx, cmd)
	if err != nil {
		return result{}, err
	}
	e, err := (&guarded{p, b.ctx}).Wait()
	return result{out: out.String(), err: errw.String(), exit: e, took: time.Since(begin)}, err
}

// sh runs a script, with arguments from $1 on; the error of waiting ends the case.
func (b *box) sh(script string, args ...string) result {
	b.t.Helper()
	r, err := b.exec(provider.Cmd{Argv: shell(script, args...)})
	if err != nil {
		b.t.Fatalf("run %q: %v", script, err)
	}
	return r
}

// must is sh for scripts that have to succeed.
func (b *box) must(script string, args ...string) string {
	b.t.Helper()
	r := b.sh(script, args...)
	if r.exit.Code != 0 {
		b.t.Fatalf("%q: %v: %s", script, r.exit, r.err)
	}
	return r.out
}

func shell(script string, args ...string) []string {
	return append(append(provider.Shell(script), "sh"), args...)
}

// has reports whether a program is in the sandbox's PATH.
func (b *box) has(tool string) bool {
	b.t.Helper()
	return b.sh(`command -v "$1" >/dev/null`, tool).exit.Code == 0
}

// eventually polls until ok returns true.
func (b *box) eventually(d time.Duration, what string, ok func() bool) {
	b.t.Helper()
	if !poll(b.ctx, b.within(d), ok) {
		b.t.Errorf("not within %v: %s", b.within(d), what)
	}
}

func poll(ctx context.Context, d time.Duration, ok func() bool) bool {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	end := time.NewTimer(d)
	defer end.Stop()
	for {
		if ok() {
			return true
		}
		select {
		case <-tick.C:
		case <-end.C:
			return ok()
		case <-ctx.Done():
			return false
		}
	}
}

// size of a file in the sandbox; missing is -1.
func (b *box) size(name string) int64 {
	b.t.Helper()
	fi, err := b.fs.Lstat(b.ctx, name)
	if errors.Is(err, fs.ErrNotExist) {
		return -1
	}
	if err != nil {
		b.t.Fatalf("lstat: %v", err)
	}
	return fi.Size()
}

// Environment of the second process.
const (
	secondEnv = "AISBX_PROVIDERTEST_JOB"
	parentEnv = "AISBX_PROVIDERTEST_PARENT"
)

// Second reports whether this is a second process of the suite. A New that
// cleans up after the test must not do so there.
func Second() bool { return os.Getenv(secondEnv) != "" }

// Dir returns a directory for a backend's state that is the same in the second
// process, short enough for the path of a socket, and open for other users to
// pass through. It is removed at the end of the test. Each test has one.
func Dir(t *testing.T) string {
	t.Helper()
	pid := strconv.Itoa(os.Getpid())
	if Second() {
		pid = os.Getenv(parentEnv)
	}
	h := sha256.Sum256([]byte(t.Name()))
	dir := filepath.Join(os.TempDir(), "pt-"+pid+"-"+hex.EncodeToString(h[:4]))
	if Second() {
		return dir
	}
	if err := os.Mkdir(dir, 0o711); err != nil && !errors.Is(err, fs.ErrExist) {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}
