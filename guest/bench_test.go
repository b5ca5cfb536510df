package guest

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/aisandbox-go/aisandbox/provider"
)

func BenchmarkExecTrue(b *testing.B) {
	bench := func(b *testing.B, g *Handle) {
		for b.Loop() {
			var out bytes.Buffer
			p, err := g.Start(b.Context(), provider.Cmd{Argv: []string{"true"}, Stdout: &out, Stderr: io.Discard})
			if err != nil {
				b.Fatal(err)
			}
			if exit, err := p.Wait(); err != nil || exit.Code != 0 {
				b.Fatal(exit, err)
			}
		}
	}
	b.Run("serve", func(b *testing.B) { g, _ := serving(b); bench(b, g) })
	b.Run("init", func(b *testing.B) { attach, _, _ := daemon(b); bench(b, attach()) })
	b.Run("raw", func(b *testing.B) {
		for b.Loop() {
			cmd := exec.CommandContext(b.Context(), "true")
			cmd.Stdout, cmd.Stderr = &bytes.Buffer{}, &bytes.Buffer{}
			if err := cmd.Run(); err != nil {
				b.Fatal(err)
			}
		}
	})
}

func BenchmarkLstat(b *testing.B) {
	attach, _, _ := daemon(b)
	g := attach()
	for b.Loop() {
		if _, err := g.Lstat(b.Context(), "."); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkOpen(b *testing.B) {
	attach, _, _ := daemon(b)
	g := attach()
	if err := g.Put(b.Context(), "f", strings.NewReader("x"), 0o644); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		r, err := g.Open(b.Context(), "f")
		if err != nil {
			b.Fatal(err)
		}
		if _, err := io.ReadAll(r); err != nil {
			b.Fatal(err)
		}
		_ = r.Close()
	}
}

func BenchmarkOutput(b *testing.B) {
	attach, _, _ := daemon(b)
	g := attach()
	const size = 16 << 20
	b.SetBytes(size)
	for b.Loop() {
		p, err := g.Start(context.Background(), provider.Cmd{Argv: []string{"head", "-c", "16777216", "/dev/zero"}, Stdout: io.Discard})
		if err != nil {
			b.Fatal(err)
		}
		if _, err := p.Wait(); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkExecRatio interleaves guest and raw starts, so that a busy machine
// slows down both alike.
func BenchmarkExecRatio(b *testing.B) {
	attach, _, _ := daemon(b)
	g := attach()
	var inGuest, raw []time.Duration
	for b.Loop() {
		begin := time.Now()
		var out bytes.Buffer
		p, err := g.Start(b.Context(), provider.Cmd{Argv: []string{"true"}, Stdout: &out, Stderr: io.Discard})
		if err != nil {
			b.Fatal(err)
		}
		if _, err := p.Wait(); err != nil {
			b.Fatal(err)
		}
		middle := time.Now()
		cmd := exec.CommandContext(b.Context(), "true")
		cmd.Stdout, cmd.Stderr = &bytes.Buffer{}, &bytes.Buffer{}
		if err := cmd.Run(); err != nil {
			b.Fatal(err)
		}
		inGuest = append(inGuest, middle.Sub(begin))
		raw = append(raw, time.Since(middle))
	}
	slices.Sort(inGuest)
	slices.Sort(raw)
	for _, q := range []int{10, 50} {
		x, y := inGuest[len(inGuest)*q/100], raw[len(raw)*q/100]
		b.ReportMetric(float64(x)/float64(y), fmt.Sprintf("ratio-p%d", q))
		b.ReportMetric(float64(x.Microseconds()), fmt.Sprintf("guest-p%d-µs", q))
	}
}
