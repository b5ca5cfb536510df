package main

import (
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Row is one line of the table, and one element of bench.json.
type Row struct {
	Name   string `json:"name"` // of the benchmark that made it
	Metric string `json:"metric"`
	Unit   string `json:"unit"`

	// HigherIsBetter turns the comparison around, as for a throughput.
	HigherIsBetter bool `json:"higherIsBetter,omitempty"`

	Ours Stat `json:"ours"`

	// Baseline names what ours is compared with, measured in the same run. Empty:
	// nothing.
	Baseline string `json:"baseline,omitempty"`
	Base     Stat   `json:"base,omitzero"`

	Goals []Goal `json:"goals,omitempty"`
	Note  string `json:"note,omitempty"`

	// Missing says why there is nothing in Ours or Base.
	Missing string `json:"missing,omitempty"`
}

// Goal is one thing that a row is to reach.
type Goal struct {
	Text string `json:"goal"`
	Met  bool   `json:"met"`
}

// atMost is the goal that the median is at most most of the row's unit.
func (r *Row) atMost(most float64) {
	r.Goals = append(r.Goals, Goal{fmt.Sprintf("p50 ≤ %s %s", number(most), r.Unit), r.Ours.N > 0 && r.Ours.P50 <= most})
}

// atMostTimes is the goal that ours is at most most times the baseline.
func (r *Row) atMostTimes(most float64) {
	r.Goals = append(r.Goals, Goal{fmt.Sprintf("≤ %sx", number(most)), r.Ratio() > 0 && r.Ratio() <= most})
}

// timesBetter is the goal that ours beats the baseline by a factor.
func (r *Row) timesBetter(least float64) {
	r.Goals = append(r.Goals, Goal{fmt.Sprintf("≥ %sx %s", number(least), r.word(true)), r.better() >= least})
}

// goal is any other goal.
func (r *Row) goal(text string, met bool) { r.Goals = append(r.Goals, Goal{text, met}) }

// Ratio is the median of ours over that of the baseline; 0 when there is none.
func (r *Row) Ratio() float64 {
	if r.Base.P50 == 0 || r.Ours.P50 == 0 {
		return 0
	}
	return r.Ours.P50 / r.Base.P50
}

// better is by what factor ours is better than the baseline; below 1 it is worse.
func (r *Row) better() float64 {
	ratio := r.Ratio()
	if ratio == 0 || r.HigherIsBetter {
		return ratio
	}
	return 1 / ratio
}

// word says what being better or worse means for the unit.
func (r *Row) word(better bool) string {
	words := [2]string{"slower", "faster"}
	if strings.HasSuffix(r.Unit, "B") {
		words = [2]string{"larger", "smaller"}
	}
	if better {
		return words[1]
	}
	return words[0]
}

// ratio shows the comparison: "1.08x" while that is close, else in words.
func (r *Row) ratio() string {
	switch b := r.better(); {
	case b == 0:
		return ""
	case b >= 2:
		return number(b) + "x " + r.word(true)
	case b <= 0.5:
		return number(1/b) + "x " + r.word(false)
	default:
		return strconv.FormatFloat(r.Ratio(), 'f', 2, 64) + "x"
	}
}

// number shows about three significant digits, without an exponent, and groups
// the digits of large numbers.
func number(v float64) string {
	switch a := math.Abs(v); {
	case a >= 999.5:
		s := strconv.FormatFloat(math.Round(v), 'f', 0, 64)
		for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
			s = s[:i] + "," + s[i:]
		}
		return s
	case a >= 100:
		return strconv.FormatFloat(v, 'f', 0, 64)
	case a >= 10:
		return trimZeros(strconv.FormatFloat(v, 'f', 1, 64))
	default:
		return trimZeros(strconv.FormatFloat(v, 'f', 2, 64))
	}
}

func trimZeros(s string) string { return strings.TrimRight(strings.TrimRight(s, "0"), ".") }

// show is a Stat with its unit: "1.2 / 3.4 ms", without p99 where a high
// percentile would say nothing.
func (s Stat) show(unit string) string {
	switch {
	case s.N == 0:
		return ""
	case s.N < 10:
		return number(s.P50) + " " + unit
	default:
		return number(s.P50) + " / " + number(s.P99) + " " + unit
	}
}

var header = []string{"metric", "ours p50 / p99", "baseline", "baseline p50 / p99", "ratio", "goal", "met"}

// cells are the lines of a row: each goal has one, the first with everything else.
func (r *Row) cells() [][]string {
	first := []string{r.Metric, r.Ours.show(r.Unit), r.Baseline, r.Base.show(r.Unit), r.ratio(), "", ""}
	if r.Missing != "" && r.Ours.N == 0 {
		first[1] = "not measured"
	}
	if r.Missing != "" && r.Ours.N > 0 && r.Base.N == 0 {
		first[3] = "not measured"
	}
	lines := [][]string{first}
	for i, g := range r.Goals {
		if i > 0 {
			lines = append(lines, make([]string, len(header)))
		}
		lines[i][5], lines[i][6] = g.Text, "no"
		switch {
		case r.Missing != "":
			lines[i][6] = "?"
		case g.Met:
			lines[i][6] = "yes"
		}
	}
	return lines
}

// writeTable prints rows as a Markdown table whose columns line up, so that it
// reads well on a terminal too, and then what there is to say about them.
func writeTable(w io.Writer, rows []Row) error {
	lines := [][]string{header}
	for i := range rows {
		lines = append(lines, rows[i].cells()...)
	}
	width := make([]int, len(header))
	for _, l := range lines {
		for i, c := range l {
			width[i] = max(width[i], utf8.RuneCountInString(c))
		}
	}
	var b strings.Builder
	for n, l := range lines {
		for i, c := range l {
			b.WriteString("| " + c + strings.Repeat(" ", width[i]-utf8.RuneCountInString(c)+1))
		}
		b.WriteString("|\n")
		if n == 0 {
			for _, n := range width {
				b.WriteString("|" + strings.Repeat("-", n+2))
			}
			b.WriteString("|\n")
		}
	}
	first := true
	for _, r := range rows {
		for _, text := range []string{r.Missing, r.Note} {
			if text == "" {
				continue
			}
			if first {
				b.WriteString("\n")
				first = false
			}
			fmt.Fprintf(&b, "- %s: %s\n", r.Metric, text)
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}
