package memstore

import (
	"testing"

	"github.com/aisandbox-go/aisandbox/event"
)

// An offset names one place of one run, or nothing.
func FuzzOffset(f *testing.F) {
	for _, s := range []string{"", "-1", "now", "memory:v1:r:1", "memory:v1:r:10", "memory:v1:r:0", "memory:v1:r:01", "memory:v1:r:+1",
		"memory:v1:other:1", "memory:v1:r", "memory:v1::1", "memory:v1:r:99999999999999999999", "g1:x:1"} {
		f.Add("r", s)
	}
	f.Add("a b:c", "memory:v1:a+b%3Ac:2")
	f.Fuzz(func(t *testing.T, run, s string) {
		const n = 5
		at, err := position(run, event.Offset(s), n)
		if err != nil {
			return
		}
		switch {
		case at < 0 || at > n:
			t.Fatalf("%q is at %d", s, at)
		case s == "" || s == "-1":
			if at != 0 {
				t.Fatalf("the start is at %d", at)
			}
		case s == "now":
			if at != n {
				t.Fatalf("the end is at %d", at)
			}
		case namer(run)(at-1) != event.Offset(s):
			t.Fatalf("%q is taken for %q", s, namer(run)(at-1))
		}
	})
}
