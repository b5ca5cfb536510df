package harness_test

import (
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/aisandbox-go/aisandbox/harness"
)

func TestLines(t *testing.T) {
	for _, c := range []struct {
		in   string
		want []string
	}{
		{"", nil},
		{"\n\r\n \t\n", nil},
		{"a\nb\n", []string{"a", "b"}},
		{"a\nb", []string{"a", "b"}},
		{" a \r\n\r\nb\r\nc\r", []string{"a", "b", "c"}},
		{"a\rb\n", []string{"a\rb"}},
	} {
		for _, step := range []int{1, 2, 3, 100} {
			var got []string
			l := harness.NewLines(0, func(line []byte) error { got = append(got, string(line)); return nil })
			for s := c.in; len(s) > 0; {
				n := min(step, len(s))
				if m, err := io.WriteString(l, s[:n]); m != n || err != nil {
					t.Fatalf("Write = %d, %v", m, err)
				}
				s = s[n:]
			}
			if err := l.Close(); err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(c.want, got); d != "" {
				t.Errorf("%q in steps of %d (-want +got):\n%s", c.in, step, d)
			}
		}
	}
}

func TestLinesBound(t *testing.T) {
	for name, pieces := range map[string][]string{
		"at once":        {"ok\n", strings.Repeat("x", 9) + "\n"},
		"in pieces":      {"ok\nxxxxx", "xxxxx", "\n"},
		"with its end":   {"ok\nxxxxx", "xxxxx\n"},
		"without an end": {"ok\n", "xxxxxxxxx"},
	} {
		n := 0
		l := harness.NewLines(8, func([]byte) error { n++; return nil })
		var err error
		for _, p := range pieces {
			if _, err = io.WriteString(l, p); err != nil {
				break
			}
		}
		var le *harness.LineError
		if !errors.As(err, &le) || le.Limit != 8 || n != 1 {
			t.Errorf("%s: %v after %d lines, want a LineError after 1", name, err, n)
		}
		if cerr := l.Close(); cerr != err {
			t.Errorf("%s: Close = %v, want the same error", name, cerr)
		}
		if m, werr := io.WriteString(l, "ok\n"); m != 0 || werr != err {
			t.Errorf("%s: a later Write = %d, %v", name, m, werr)
		}
	}
	l := harness.NewLines(8, func([]byte) error { return nil })
	if _, err := io.WriteString(l, strings.Repeat("x", 8)+"\n"); err != nil {
		t.Errorf("a line of the limit: %v", err)
	}
}

func TestLinesError(t *testing.T) {
	stop := errors.New("stop")
	n := 0
	l := harness.NewLines(0, func([]byte) error { n++; return stop })
	if _, err := io.WriteString(l, "a\nb\nc\n"); err != stop || n != 1 {
		t.Errorf("%v after %d lines, want the function's error after 1", err, n)
	}
	if err := l.Close(); err != stop {
		t.Errorf("Close = %v", err)
	}
}
