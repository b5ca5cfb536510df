//go:build linux

package main

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestNumber(t *testing.T) {
	for v, want := range map[float64]string{
		0: "0", 0.004: "0", 0.25: "0.25", 1: "1", 1.204: "1.2", 9.996: "10", 12.34: "12.3", 123.4: "123",
		1000: "1,000", 999.6: "1,000", 2_600_000: "2,600,000", -1234: "-1,234", -123456: "-123,456",
	} {
		if got := number(v); got != want {
			t.Errorf("number(%v) = %q, want %q", v, got, want)
		}
	}
}

func TestRatio(t *testing.T) {
	for _, c := range []struct {
		row  Row
		want string
	}{
		{Row{Unit: "ms", Ours: Stat{P50: 2, N: 1}}, ""},
		{Row{Unit: "ms", Ours: Stat{P50: 2, N: 1}, Base: Stat{P50: 50, N: 1}}, "25x faster"},
		{Row{Unit: "ms", Ours: Stat{P50: 11, N: 1}, Base: Stat{P50: 10, N: 1}}, "1.10x"},
		{Row{Unit: "ms", Ours: Stat{P50: 30, N: 1}, Base: Stat{P50: 10, N: 1}}, "3x slower"},
		{Row{Unit: "MB", Ours: Stat{P50: 30, N: 1}, Base: Stat{P50: 10, N: 1}}, "3x larger"},
		{Row{Unit: "MB", Ours: Stat{P50: 10, N: 1}, Base: Stat{P50: 35, N: 1}}, "3.5x smaller"},
		{Row{Unit: "events/s", HigherIsBetter: true, Ours: Stat{P50: 400_000, N: 1}, Base: Stat{P50: 4_000, N: 1}}, "100x faster"},
		{Row{Unit: "events/s", HigherIsBetter: true, Ours: Stat{P50: 90, N: 1}, Base: Stat{P50: 100, N: 1}}, "0.90x"},
		{Row{Unit: "events/s", HigherIsBetter: true, Ours: Stat{P50: 10, N: 1}, Base: Stat{P50: 100, N: 1}}, "10x slower"},
	} {
		if got := c.row.ratio(); got != c.want {
			t.Errorf("%v against %v %s: %q, want %q", c.row.Ours.P50, c.row.Base.P50, c.row.Unit, got, c.want)
		}
	}
}

func TestGoals(t *testing.T) {
	row := func(ours, base float64) Row {
		return Row{Unit: "ms", Ours: Stat{P50: ours, N: 1}, Base: Stat{P50: base, N: 1}}
	}
	for _, c := range []struct {
		name string
		row  Row
		add  func(*Row)
		want Goal
	}{
		{"at most", row(2.5, 0), func(r *Row) { r.atMost(2.5) }, Goal{"p50 ≤ 2.5 ms", true}},
		{"too much", row(2.6, 0), func(r *Row) { r.atMost(2.5) }, Goal{"p50 ≤ 2.5 ms", false}},
		{"nothing measured is not met", Row{Unit: "ms"}, func(r *Row) { r.atMost(2.5) }, Goal{"p50 ≤ 2.5 ms", false}},
		{"close enough", row(12, 10), func(r *Row) { r.atMostTimes(1.2) }, Goal{"≤ 1.2x", true}},
		{"not close enough", row(12.1, 10), func(r *Row) { r.atMostTimes(1.2) }, Goal{"≤ 1.2x", false}},
		{"no baseline", row(12, 0), func(r *Row) { r.atMostTimes(1.2) }, Goal{"≤ 1.2x", false}},
		{"faster", row(1, 20), func(r *Row) { r.timesBetter(20) }, Goal{"≥ 20x faster", true}},
		{"not fast enough", row(1, 19), func(r *Row) { r.timesBetter(20) }, Goal{"≥ 20x faster", false}},
	} {
		c.add(&c.row)
		if d := cmp.Diff([]Goal{c.want}, c.row.Goals); d != "" {
			t.Errorf("%s (-want +got):\n%s", c.name, d)
		}
	}
}

func TestTable(t *testing.T) {
	fast := Row{Metric: "exec", Unit: "ms", Ours: Stat{P50: 1.25, P99: 3, N: 100}, Baseline: "engine", Base: Stat{P50: 50, P99: 90, N: 100}}
	fast.timesBetter(20)
	fast.atMost(1)
	size := Row{Metric: "size", Unit: "MiB", Ours: single(3), Note: "of one file."}
	gone := Row{Metric: "gone", Unit: "ms", Missing: "no engine"}
	gone.atMost(1)
	half := Row{Metric: "half", Unit: "ms", Ours: single(4), Baseline: "peer", Missing: "no npm"}
	var b strings.Builder
	if err := writeTable(&b, []Row{fast, size, gone, half}); err != nil {
		t.Fatal(err)
	}
	want := `
| metric | ours p50 / p99 | baseline | baseline p50 / p99 | ratio      | goal         | met |
|--------|----------------|----------|--------------------|------------|--------------|-----|
| exec   | 1.25 / 3 ms    | engine   | 50 / 90 ms         | 40x faster | ≥ 20x faster | yes |
|        |                |          |                    |            | p50 ≤ 1 ms   | no  |
| size   | 3 MiB          |          |                    |            |              |     |
| gone   | not measured   |          |                    |            | p50 ≤ 1 ms   | ?   |
| half   | 4 ms           | peer     | not measured       |            |              |     |

- size: of one file.
- gone: no engine
- half: no npm
`
	if d := cmp.Diff(want[1:], b.String()); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}
