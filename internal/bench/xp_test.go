//go:build linux

package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/aisandbox-go/aisandbox/guest"
	"github.com/aisandbox-go/aisandbox/internal/proc"
	"github.com/aisandbox-go/aisandbox/provider"
)

func TestMain(m *testing.M) { guest.Hook(); os.Exit(m.Run()) }

func TestXP(t *testing.T) {
	e, err := newEnv(1)
	if err != nil {
		t.Fatal(err)
	}
	defer e.close()
	name := os.Getenv("XP")
	if name == "" { name = "local" }
	b, err := e.box(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	defer b.destroy()
	fsys, _ := provider.As[provider.FS](b.Handle)
	lstat := timed(func(ctx context.Context) error { _, err := fsys.Lstat(ctx, b.Root()); return err })
	pr := timed(func(ctx context.Context) error {
		var out, errOut bytes.Buffer
		p, err := proc.Start(ctx, proc.Spec{Argv: []string{"true"}, Dir: "/", Env: os.Environ(), Stdout: &out, Stderr: &errOut})
		if err != nil {
			return err
		}
		_, err = p.Wait()
		return err
	})
	nilout := timed(func(ctx context.Context) error {
		p, err := b.Start(ctx, provider.Cmd{Argv: []string{"true"}})
		if err != nil {
			return err
		}
		_, err = p.Wait()
		return err
	})
	abs := timed(func(ctx context.Context) error {
		var out, errOut bytes.Buffer
		p, err := b.Start(ctx, provider.Cmd{Argv: []string{"/usr/bin/true"}, Stdout: &out, Stderr: &errOut})
		if err != nil {
			return err
		}
		_, err = p.Wait()
		return err
	})
	ts, err := interleave(t.Context(), 100, side{guestExec(b.Handle), 5}, side{rawExec(), 5}, side{pr, 5}, side{lstat, 5}, side{nilout, 5}, side{abs, 5})
	if err != nil {
		t.Fatal(err)
	}
	for i, n := range []string{"guest", "raw", "proc.Start in process", "lstat roundtrip", "guest nil out", "guest abs"} {
		s := millis(ts[i])
		v := []float64{}
		for _, d := range ts[i] { v = append(v, float64(d)/1e6) }
		min := v[0]
		for _, x := range v { if x < min { min = x } }
		fmt.Printf("%-24s p50 %.3f p99 %.3f min %.3f\n", n, s.P50, s.P99, min)
	}
	_ = time.Now
}
