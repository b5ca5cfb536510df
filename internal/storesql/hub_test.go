package storesql

import (
	"errors"
	"fmt"
	"testing"

	"pgregory.net/rapid"

	"github.com/aisandbox-go/aisandbox/event"
)

func entries(first, n int64) []entry {
	var es []entry
	for i := range n {
		es = append(es, entry{event.Entry{Offset: event.Offset(fmt.Sprint(first + i))}, 100})
	}
	return es
}

// Whatever reaches the hub late, twice or in another order, a reader gets each event once
// and in order, ends when the log has ended and not before, and waits for nothing
// that was told, or poked for where it wasn't.
func TestHubNeverSkips(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h := newHub()
		var stored int64 // events in the database
		var closed bool
		type message struct {
			first, n int64
			end      bool
		}
		var late []message // committed here, not yet told to the hub
		pageSize := rapid.Int64Range(1, 4).Draw(t, "page")
		silent := false // something was committed that nobody tells
		type reader struct {
			have  int64
			fetch bool
			state state
			page  []entry
			done  bool
		}
		topic, err := h.join("r")
		if err != nil {
			t.Fatal(err)
		}
		var readers []*reader
		deliver := func(r *reader, es []entry) {
			for _, e := range es {
				if want := fmt.Sprint(r.have + 1); string(e.Offset) != want {
					t.Fatalf("a reader got %s, want %s", e.Offset, want)
				}
				r.have++
			}
		}
		read := func() state { return state{next: stored + 1, closed: closed} }
		// run lets a reader go on until it waits, ends, or is in the middle of a fetch.
		run := func(r *reader) {
			for steps := 0; !r.done; steps++ {
				if steps > 10000 {
					t.Fatal("a reader goes round in circles")
				}
				if r.fetch {
					r.fetch = false
					topic.fetched(r.state, r.page, nil)
				}
				es, what, _ := topic.step(r.have)
				switch what {
				case finished:
					if !closed || r.have != stored {
						t.Fatalf("it ended at %d of %d, closed %v", r.have, stored, closed)
					}
					r.done = true
				case wait:
					return
				case fetch:
					from, known := topic.from()
					r.state = read()
					r.state.from = from
					r.page, r.fetch = nil, true
					if known && r.state.next > from {
						r.page = entries(from, min(r.state.next-from, pageSize))
					}
					return // the rest happens later
				case catchUp:
					if stored <= r.have {
						t.Fatalf("it looks for events after %d of %d", r.have, stored)
					}
					deliver(r, entries(r.have+1, min(stored-r.have, 5)))
				default:
					deliver(r, es)
				}
			}
		}
		pick := func() *reader {
			if len(readers) == 0 {
				t.Skip("nobody reads")
			}
			return rapid.SampledFrom(readers).Draw(t, "reader")
		}
		actions := map[string]func(*rapid.T){
			"join": func(t *rapid.T) {
				readers = append(readers, &reader{have: rapid.Int64Range(0, stored).Draw(t, "have")})
			},
			"append": func(t *rapid.T) {
				if closed {
					t.Skip("closed")
				}
				n := rapid.OneOf(rapid.Int64Range(0, 3), rapid.Int64Range(0, 3), rapid.Int64Range(0, 600)).Draw(t, "n")
				if rapid.IntRange(0, 30).Draw(t, "elsewhere") == 30 {
					silent = true
				} else {
					late = append(late, message{stored + 1, n, false})
				}
				stored += n
			},
			"close": func(t *rapid.T) {
				if closed || rapid.IntRange(0, 5).Draw(t, "really") > 0 {
					t.Skip("not yet")
				}
				closed = true
				late = append(late, message{stored + 1, 0, true})
			},
			"tell": func(t *rapid.T) {
				if len(late) == 0 {
					t.Skip("nothing to tell")
				}
				i := rapid.IntRange(0, len(late)-1).Draw(t, "which")
				m := late[i]
				if rapid.Bool().Draw(t, "once") {
					late = append(late[:i:i], late[i+1:]...)
				}
				h.appended("r", m.first, entries(m.first, m.n), m.end)
			},
			"poke": func(t *rapid.T) {
				if !silent {
					t.Skip("everything is told")
				}
				silent = false
				h.Poke("r", false)
			},
			"run":  func(*rapid.T) { run(pick()) },
			"run2": func(*rapid.T) { run(pick()) },
			"run3": func(*rapid.T) { run(pick()) },
			"fail": func(*rapid.T) {
				if r := pick(); r.fetch {
					r.fetch = false
					topic.fetched(state{}, nil, errors.New("no connection"))
				}
			},
		}
		for range 5 { // one is short
			t.Repeat(actions)
		}
		// In the end everything was told, or poked for, and everybody gets it.
		for _, m := range late {
			h.appended("r", m.first, entries(m.first, m.n), m.end)
		}
		if silent {
			h.Poke("r", false)
		}
		for range 10 * (len(readers) + 1) * int(2+stored/pageSize) {
			for _, r := range readers {
				run(r)
			}
		}
		for i, r := range readers {
			if r.have != stored || r.done != closed {
				t.Fatalf("reader %d has %d of %d, ended %v, closed %v", i, r.have, stored, r.done, closed)
			}
		}
		if n := len(topic.entries); n > 2*ringEvents+600 {
			t.Fatalf("%d events in memory", n)
		}
		h.leave(topic)
		if h.Active() {
			t.Fatal("the topic outlives its readers")
		}
	})
}

// An offset names one place of one run, or nothing.
func FuzzOffset(f *testing.F) {
	c := New(nil, Dialect{Scheme: "db:v1:"}, Mutations{}, nil)
	for _, s := range []string{"", "-1", "now", "db:v1:r:1", "db:v1:r:10", "db:v1:r:0", "db:v1:r:01", "db:v1:r:+1", "db:v1:other:1", "db:v1:r", "db:v1::1",
		"db:v1:r:99999999999999999999", "g1:x:1", "memory:v1:r:1"} {
		f.Add("r", s)
	}
	f.Add("a b:c", "db:v1:a+b%3Ac:2")
	f.Fuzz(func(t *testing.T, run, s string) {
		const n = 5
		at, err := c.position(run, event.Offset(s), state{next: n + 1})
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
		case c.namer(run)(at) != event.Offset(s):
			t.Fatalf("%q is taken for %q", s, c.namer(run)(at))
		}
	})
}
