package main

import (
	"context"
	"math"
	"slices"
	"time"
)

// Stat is what is kept of a series of measurements, in the row's unit.
type Stat struct {
	P10 float64 `json:"p10"` // what is left of it on a machine that does nothing else
	P50 float64 `json:"p50"`
	P99 float64 `json:"p99"`
	N   int     `json:"n"`
}

// stat condenses values; none make the zero Stat.
func stat(values []float64) Stat {
	s := slices.Sorted(slices.Values(values))
	return Stat{P10: percentile(s, 10), P50: percentile(s, 50), P99: percentile(s, 99), N: len(s)}
}

// single is the Stat of one measurement.
func single(v float64) Stat { return stat([]float64{v}) }

// millis is stat of times, in milliseconds.
func millis(times []time.Duration) Stat {
	values := make([]float64, len(times))
	for i, t := range times {
		values[i] = float64(t) / float64(time.Millisecond)
	}
	return stat(values)
}

// percentile returns the nearest-rank percentile of sorted values: the smallest
// one that at least p of a hundred do not exceed. It is always a value that was
// measured; with few of them a high percentile is the worst one.
func percentile(sorted []float64, p float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	rank := int(math.Ceil(p / 100 * float64(len(sorted))))
	return sorted[min(max(rank, 1), len(sorted))-1]
}

// op does something once and says how long the part that counts took.
type op func(ctx context.Context) (time.Duration, error)

// timed makes an op of something of which everything counts.
func timed(do func(ctx context.Context) error) op {
	return func(ctx context.Context) (time.Duration, error) {
		start := time.Now()
		err := do(ctx)
		return time.Since(start), err
	}
}

// side is one of the things that are compared: do, per times in each round.
type side struct {
	do  op
	per int // 0 means 1
}

// interleave measures the sides in turn, so that whatever else the machine does
// meets all of them alike: rounds times in an order that is reversed from round to
// round. A first round that doesn't count warms up. The result has the times of
// each side.
func interleave(ctx context.Context, rounds int, sides ...side) ([][]time.Duration, error) {
	times := make([][]time.Duration, len(sides))
	for round := range rounds + 1 {
		for i := range sides {
			if round%2 == 0 {
				i = len(sides) - 1 - i
			}
			for range max(sides[i].per, 1) {
				if ctx.Err() != nil {
					return nil, context.Cause(ctx)
				}
				t, err := sides[i].do(ctx)
				if err != nil {
					return nil, err
				}
				if round > 0 {
					times[i] = append(times[i], t)
				}
			}
		}
	}
	return times, nil
}
