//go:build linux

package providertest_test

import (
	"context"
	"encoding/json"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/provider/local"
	"github.com/aisandbox-go/aisandbox/provider/providertest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// broken is a good backend with one thing wrong.
type broken struct {
	provider.Provider
	create  func(ctx context.Context, s provider.Spec) (provider.Handle, error)
	resume  func(ctx context.Context, r provider.Ref) (provider.Handle, error)
	destroy func(ctx context.Context, r provider.Ref) error
	traits  func(*provider.Traits)
	start   func(ctx context.Context, h provider.Handle, c provider.Cmd) (provider.Process, error)
	put     func(name string, r io.Reader, mode fs.FileMode) error
	ref     func(*provider.Ref)
}

func (b *broken) Unwrap() any { return b.Provider }

func (b *broken) Traits() provider.Traits {
	t := b.Provider.Traits()
	if b.traits != nil {
		b.traits(&t)
	}
	return t
}

func (b *broken) wrap(h provider.Handle, err error) (provider.Handle, error) {
	if err != nil {
		return nil, err
	}
	return &brokenHandle{h, h.(files), b}, nil
}

func (b *broken) Create(ctx context.Context, s provider.Spec) (provider.Handle, error) {
	if b.create != nil {
		return b.wrap(b.create(ctx, s))
	}
	return b.wrap(b.Provider.Create(ctx, s))
}

func (b *broken) Resume(ctx context.Context, r provider.Ref) (provider.Handle, error) {
	if b.resume != nil {
		return b.wrap(b.resume(ctx, r))
	}
	return b.wrap(b.Provider.Resume(ctx, r))
}

func (b *broken) Destroy(ctx context.Context, r provider.Ref) error {
	if b.destroy != nil {
		return b.destroy(ctx, r)
	}
	return b.Provider.Destroy(ctx, r)
}

type files interface {
	provider.FS
	provider.Linker
	provider.Archiver
}

type brokenHandle struct {
	provider.Handle
	files
	b *broken
}

func (h *brokenHandle) Unwrap() any { return h.Handle }

func (h *brokenHandle) Ref() provider.Ref {
	r := h.Handle.Ref()
	if h.b.ref != nil {
		h.b.ref(&r)
	}
	return r
}

func (h *brokenHandle) Start(ctx context.Context, c provider.Cmd) (provider.Process, error) {
	if h.b.start != nil {
		return h.b.start(ctx, h.Handle, c)
	}
	return h.Handle.Start(ctx, c)
}

func (h *brokenHandle) Put(ctx context.Context, name string, r io.Reader, mode fs.FileMode) error {
	if h.b.put != nil && filepath.IsAbs(name) {
		return h.b.put(name, r, mode)
	}
	return h.files.Put(ctx, name, r, mode)
}

type brokenProcess struct {
	provider.Process
	wait   func(provider.Exit, error) (provider.Exit, error)
	signal func(os.Signal) error
}

func (p *brokenProcess) Wait() (provider.Exit, error) {
	e, err := p.Process.Wait()
	if p.wait != nil {
		return p.wait(e, err)
	}
	return e, err
}

func (p *brokenProcess) Signal(s os.Signal) error {
	if p.signal != nil {
		return p.signal(s)
	}
	return p.Process.Signal(s)
}

// sabotage is what is broken, and the cases that have to find it.
var sabotage = map[string]struct {
	cases []string
	apply func(b *broken)
}{
	"exit code": {[]string{"E2", "S2"}, func(b *broken) {
		b.start = waits(func(e provider.Exit, err error) (provider.Exit, error) { e.Code /= 2; return e, err })
	}},
	"a byte of output is lost": {[]string{"E5", "E14", "E18"}, func(b *broken) {
		b.start = commands(func(c *provider.Cmd) {
			if c.Stdout != nil {
				c.Stdout = &dropper{w: c.Stdout}
			}
		})
	}},
	"stderr is merged": {[]string{"E3"}, func(b *broken) {
		b.start = commands(func(c *provider.Cmd) { c.Stderr = c.Stdout })
	}},
	"stdin stays open": {[]string{"E4"}, func(b *broken) {
		b.start = commands(func(c *provider.Cmd) {
			if c.Stdin == nil {
				c.Stdin, _ = io.Pipe()
			}
		})
	}},
	"environment is ignored": {[]string{"E8", "V1"}, func(b *broken) { b.start = commands(func(c *provider.Cmd) { c.Env = nil }) }},
	"directory is ignored":   {[]string{"E6", "E7"}, func(b *broken) { b.start = commands(func(c *provider.Cmd) { c.Dir = "" }) }},
	"context is ignored": {[]string{"E9", "E10", "S10"}, func(b *broken) {
		b.start = func(ctx context.Context, h provider.Handle, c provider.Cmd) (provider.Process, error) {
			return h.Start(context.WithoutCancel(ctx), c)
		}
	}},
	"kill is of one process": {[]string{"S5", "S15", "S17"}, func(b *broken) {
		b.traits = func(t *provider.Traits) { t.Kill = true }
		b.start = func(ctx context.Context, h provider.Handle, c provider.Cmd) (provider.Process, error) {
			p, err := h.Start(ctx, c)
			if err != nil {
				return nil, err
			}
			return &brokenProcess{Process: p, signal: func(s os.Signal) error {
				return syscall.Kill(p.(interface{ Pid() int }).Pid(), s.(syscall.Signal))
			}}, nil
		}
	}},
	"strangers hold the exec": {[]string{"E20"}, func(b *broken) {
		b.start = func(ctx context.Context, h provider.Handle, c provider.Cmd) (provider.Process, error) {
			p, err := h.Start(ctx, c)
			if err != nil {
				return nil, err
			}
			pid := p.(interface{ Pid() int }).Pid()
			return &brokenProcess{Process: p, wait: func(e provider.Exit, err error) (provider.Exit, error) {
				for end := time.Now().Add(8 * time.Second); syscall.Kill(-pid, 0) == nil && time.Now().Before(end); {
					<-time.After(10 * time.Millisecond)
				}
				return e, err
			}}, nil
		}
	}},
	"output is buffered without end": {[]string{"E21"}, func(b *broken) {
		b.start = func(ctx context.Context, h provider.Handle, c provider.Cmd) (provider.Process, error) {
			if c.Stdout == nil {
				return h.Start(ctx, c)
			}
			var buf strings.Builder
			w := c.Stdout
			c.Stdout = &buf
			p, err := h.Start(ctx, c)
			if err != nil {
				return nil, err
			}
			return &brokenProcess{Process: p, wait: func(e provider.Exit, err error) (provider.Exit, error) {
				io.WriteString(w, buf.String())
				return e, err
			}}, nil
		}
	}},
	"files are written through links": {[]string{"F15", "F18"}, func(b *broken) {
		b.put = func(name string, r io.Reader, mode fs.FileMode) error {
			content, _ := io.ReadAll(r)
			os.MkdirAll(filepath.Dir(name), 0o755)
			return os.WriteFile(name, content, mode)
		}
	}},
	"files are not written atomically": {[]string{"F23"}, func(b *broken) {
		b.put = func(name string, r io.Reader, mode fs.FileMode) error {
			os.MkdirAll(filepath.Dir(name), 0o755)
			f, err := os.OpenFile(name, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, mode)
			if err != nil {
				return err
			}
			defer f.Close()
			_, err = io.Copy(f, r)
			return err
		}
	}},
	"modes are masked": {[]string{"F6"}, func(b *broken) {
		b.put = func(name string, r io.Reader, mode fs.FileMode) error {
			content, _ := io.ReadAll(r)
			os.MkdirAll(filepath.Dir(name), 0o755)
			return os.WriteFile(name, content, mode)
		}
	}},
	"resume finds nothing": {[]string{"L2", "L12", "T2"}, func(b *broken) {
		b.resume = func(context.Context, provider.Ref) (provider.Handle, error) { return nil, provider.ErrNotFound }
	}},
	"gone is called unavailable": {[]string{"L3"}, func(b *broken) {
		p := b.Provider
		b.resume = func(ctx context.Context, r provider.Ref) (provider.Handle, error) {
			h, err := p.Resume(ctx, r)
			if err != nil {
				err = provider.ErrUnavailable
			}
			return h, err
		}
	}},
	"destroy leaves processes": {[]string{"L4"}, func(b *broken) {
		b.destroy = func(_ context.Context, r provider.Ref) error { return os.RemoveAll(r.ID) }
	}},
	"destroy removes any path": {[]string{"L17"}, func(b *broken) {
		p := b.Provider
		b.destroy = func(ctx context.Context, r provider.Ref) error {
			if strings.HasPrefix(r.ID, os.TempDir()+"/") && !strings.Contains(r.ID, "..") {
				return os.RemoveAll(r.ID)
			}
			return p.Destroy(ctx, r)
		}
	}},
	"one key, many sandboxes": {[]string{"L1", "L16"}, func(b *broken) {
		p := b.Provider
		b.create = func(ctx context.Context, s provider.Spec) (provider.Handle, error) {
			s.Key = ""
			return p.Create(ctx, s)
		}
	}},
	"a failed create leaves a sandbox": {[]string{"L5"}, func(b *broken) {
		p := b.Provider
		b.create = func(ctx context.Context, s provider.Spec) (provider.Handle, error) {
			h, err := p.Create(context.WithoutCancel(ctx), s)
			if ctx.Err() != nil {
				return nil, ctx.Err()
			}
			return h, err
		}
	}},
	"a secret gets into the reference": {[]string{"V4"}, func(b *broken) {
		secret := "null"
		b.start = commands(func(c *provider.Cmd) {
			if v, ok := strings.CutPrefix(strings.Join(c.Env, ""), "TOKEN="); ok {
				secret = `"` + v + `"`
			}
		})
		b.ref = func(r *provider.Ref) { r.State = json.RawMessage(secret) }
	}},
	"isolation is claimed": {[]string{"T4"}, func(b *broken) {
		b.traits = func(t *provider.Traits) { t.Isolation = provider.IsolationContainer }
	}},
	"network none is claimed": {[]string{"N1"}, func(b *broken) {
		b.traits = func(t *provider.Traits) { t.Networks = append(t.Networks, provider.NetworkNone) }
		p := b.Provider
		b.create = func(ctx context.Context, s provider.Spec) (provider.Handle, error) {
			s.Network = ""
			return p.Create(ctx, s)
		}
	}},
}

func waits(f func(provider.Exit, error) (provider.Exit, error)) func(context.Context, provider.Handle, provider.Cmd) (provider.Process, error) {
	return func(ctx context.Context, h provider.Handle, c provider.Cmd) (provider.Process, error) {
		p, err := h.Start(ctx, c)
		if err != nil {
			return nil, err
		}
		return &brokenProcess{Process: p, wait: f}, nil
	}
}

func commands(f func(*provider.Cmd)) func(context.Context, provider.Handle, provider.Cmd) (provider.Process, error) {
	return func(ctx context.Context, h provider.Handle, c provider.Cmd) (provider.Process, error) {
		f(&c)
		return h.Start(ctx, c)
	}
}

// dropper loses the 1000th byte.
type dropper struct {
	w io.Writer
	n int
}

func (d *dropper) Write(p []byte) (int, error) {
	q := p
	if i := 999 - d.n; i >= 0 && i < len(p) {
		q = append(append([]byte{}, p[:i]...), p[i+1:]...)
	}
	d.n += len(p)
	if _, err := d.w.Write(q); err != nil {
		return 0, err
	}
	return len(p), nil
}

const sabotageEnv = "AISBX_SABOTAGE"

// TestBroken is the body of the processes that TestSuiteFinds starts.
func TestBroken(t *testing.T) {
	s, ok := sabotage[os.Getenv(sabotageEnv)]
	if !ok {
		return
	}
	providertest.Run(t, providertest.Options{
		New: func(t *testing.T) provider.Provider {
			b := &broken{Provider: local.New(local.Options{BaseDir: providertest.Dir(t)})}
			s.apply(b)
			return b
		},
		Timeout: 10 * time.Second,
	})
}

// TestSuiteFinds runs the suite on backends that are broken, in processes of
// their own, and wants the right cases to fail.
func TestSuiteFinds(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for name, s := range sabotage {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			// Cases are named "ID words"; go test writes a space as an underscore.
			run := "^TestBroken$/^(shared|own)$/^(" + strings.Join(s.cases, "|") + ")_"
			cmd := exec.CommandContext(t.Context(), exe, "-test.run="+run, "-test.v", "-test.short", "-test.count=1", "-test.timeout=60s")
			cmd.Env = append(os.Environ(), sabotageEnv+"="+name)
			cmd.WaitDelay = 10 * time.Second
			out, _ := cmd.CombinedOutput() // it fails, as it should
			for _, c := range s.cases {
				if !strings.Contains(string(out), "--- FAIL: TestBroken/shared/"+c+"_") && !strings.Contains(string(out), "--- FAIL: TestBroken/own/"+c+"_") {
					t.Errorf("%s did not find it:\n%s", c, out)
				}
			}
		})
	}
}

// TestHealthy makes sure that the frame of TestBroken itself breaks nothing.
func TestHealthy(t *testing.T) {
	providertest.Run(t, providertest.Options{
		New: func(t *testing.T) provider.Provider {
			return &broken{Provider: local.New(local.Options{BaseDir: providertest.Dir(t)})}
		},
		Parallel: 20, BigOutput: 1 << 20,
		Skip: map[string]string{"E16": "to show that a skip is printed"},
	})
}
