//go:build linux

package main

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestPercentile(t *testing.T) {
	hundred := make([]float64, 100)
	for i := range hundred {
		hundred[i] = float64(i + 1)
	}
	for _, c := range []struct {
		name   string
		values []float64
		p      float64
		want   float64
	}{
		{"none", nil, 50, 0},
		{"one", []float64{7}, 99, 7},
		{"median of an odd number", []float64{1, 2, 9}, 50, 2},
		{"lower median of an even number", []float64{1, 2, 3, 9}, 50, 2},
		{"p99 of a hundred is not the worst", hundred, 99, 99},
		{"p99 of ten is the worst", hundred[:10], 99, 10},
		{"p0", hundred, 0, 1},
		{"p100", hundred, 100, 100},
	} {
		if got := percentile(c.values, c.p); got != c.want {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

func TestStat(t *testing.T) {
	in := []time.Duration{3 * time.Millisecond, 1500 * time.Microsecond, 40 * time.Millisecond}
	if d := cmp.Diff(Stat{P10: 1.5, P50: 3, P99: 40, N: 3}, millis(in)); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	if d := cmp.Diff(Stat{}, millis(nil)); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

func TestInterleave(t *testing.T) {
	var order []string
	do := func(name string, took time.Duration) op {
		return func(context.Context) (time.Duration, error) {
			order = append(order, name)
			return took, nil
		}
	}
	times, err := interleave(t.Context(), 2, side{do("a", 1), 2}, side{do: do("b", 5)})
	if err != nil {
		t.Fatal(err)
	}
	// The warm-up, then two rounds, each in the other order.
	if d := cmp.Diff([]string{"b", "a", "a", "a", "a", "b", "b", "a", "a"}, order); d != "" {
		t.Errorf("order (-want +got):\n%s", d)
	}
	if d := cmp.Diff([][]time.Duration{{1, 1, 1, 1}, {5, 5}}, times); d != "" {
		t.Errorf("times (-want +got):\n%s", d)
	}
}

func TestInterleaveEnds(t *testing.T) {
	broken := errors.New("broken")
	_, err := interleave(t.Context(), 3, side{do: func(context.Context) (time.Duration, error) { return 0, broken }})
	if !errors.Is(err, broken) {
		t.Errorf("error %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	n := 0
	_, err = interleave(ctx, 100, side{do: func(context.Context) (time.Duration, error) {
		if n++; n == 3 {
			cancel()
		}
		return 0, nil
	}})
	if !errors.Is(err, context.Canceled) || n != 3 {
		t.Errorf("%d times, error %v", n, err)
	}
}

func TestTimed(t *testing.T) {
	broken := errors.New("broken")
	_, err := timed(func(context.Context) error { return broken })(t.Context())
	if !errors.Is(err, broken) {
		t.Errorf("error %v", err)
	}
}

// A run of n turns has n times the lines of one, each with an id of its own.
func TestTranscript(t *testing.T) {
	tr := transcript{head: []byte("head\n"), turn: []byte("a " + hole + "\nb " + hole + "\n"), tail: []byte("tail\n")}
	var got []byte
	if err := tr.play(2, func(b []byte) error { got = append(got, b...); return nil }); err != nil {
		t.Fatal(err)
	}
	want := "head\na 00000000\nb 00000000\na 00000001\nb 00000001\ntail\n"
	if d := cmp.Diff(want, string(got)); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	root, err := moduleRoot()
	if err != nil {
		t.Fatal(err)
	}
	real, err := loadTranscript(root + "/" + recording)
	if err != nil {
		t.Fatal(err)
	}
	if slices.Contains([]int{len(real.head), len(real.turn), len(real.tail)}, 0) {
		t.Error("a part of the recording is empty")
	}
}
