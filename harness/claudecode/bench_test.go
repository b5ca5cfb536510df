package claudecode_test

import (
	"bytes"
	"fmt"
	"runtime"
	"strings"
	"testing"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/harness"
	"github.com/aisandbox-go/aisandbox/harness/claudecode"
)

// turns is the output of a run of n tool turns, made line by line from the lines
// that the program printed for one: ids are patched in place, so that making the
// input costs little beside decoding it.
type turns struct {
	head, turn, tail [][]byte
}

func newTurns(tb testing.TB) turns {
	var t turns
	raw := string(read(tb, "03-bash.ndjson"))
	raw = strings.ReplaceAll(raw, "toolu_01", "toolu_%%%%%%%%")
	raw = strings.ReplaceAll(raw, "msg_fake_01", "msg_%%%%%%%%")
	part := 0
	for line := range strings.Lines(raw) {
		b := []byte(strings.TrimSpace(line))
		if part == 0 && strings.Contains(line, `"message_start"`) {
			part = 1
		}
		switch part {
		case 0:
			t.head = append(t.head, b)
		case 1:
			t.turn = append(t.turn, b)
		case 2:
			t.tail = append(t.tail, b)
		}
		if strings.Contains(line, `"tool_result"`) {
			part = 2
		}
	}
	if len(t.turn) < 10 || len(t.tail) == 0 {
		tb.Fatal("the recording has another shape")
	}
	return t
}

// decode feeds n turns and returns the number of events and of bytes.
func (t turns) decode(tb testing.TB, d harness.Decoder, n int) (events, size int) {
	feed := func(line []byte) {
		evs, err := d.Line(line)
		if err != nil {
			tb.Fatal(err)
		}
		events += len(evs)
		size += len(line)
	}
	for _, l := range t.head {
		feed(l)
	}
	var id [8]byte
	buf := make([]byte, 0, 4096)
	for i := range n {
		copy(id[:], fmt.Sprintf("%08d", i))
		for _, l := range t.turn {
			buf = append(buf[:0], l...)
			for at := 0; ; {
				j := bytes.Index(buf[at:], []byte("%%%%%%%%"))
				if j < 0 {
					break
				}
				at += j
				copy(buf[at:], id[:])
			}
			feed(buf)
		}
	}
	for _, l := range t.tail {
		feed(l)
	}
	evs, err := d.Close(harness.End{})
	if err != nil {
		tb.Fatal(err)
	}
	return events + len(evs), size
}

func bench() harness.Decoder {
	return claudecode.NewDecoder(claudecode.DecoderOptions{Model: "sonnet", RunID: "run-1", ThreadID: "thread-1", NewID: event.NewIDs("run-1")})
}

// BenchmarkDecode is the decoder alone: lines in, events out.
func BenchmarkDecode(b *testing.B) {
	for _, n := range []int{20_000, 200_000} {
		b.Run(fmt.Sprintf("turns=%d", n), func(b *testing.B) {
			t := newTurns(b)
			b.ReportAllocs()
			events := 0
			for b.Loop() {
				e, size := t.decode(b, bench(), n)
				b.SetBytes(int64(size))
				events += e
			}
			b.ReportMetric(float64(events)/b.Elapsed().Seconds(), "events/s")
		})
	}
}

// TestDecoderMemory checks that what a decoder holds does not grow with the run.
func TestDecoderMemory(t *testing.T) {
	in := newTurns(t)
	held := func(n int) uint64 {
		runtime.GC()
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		d := bench()
		for _, l := range in.head {
			if _, err := d.Line(l); err != nil {
				t.Fatal(err)
			}
		}
		for i := range n {
			id := fmt.Appendf(nil, "%08d", i)
			for _, l := range in.turn {
				if _, err := d.Line(bytes.ReplaceAll(l, []byte("%%%%%%%%"), id)); err != nil {
					t.Fatal(err)
				}
			}
		}
		runtime.GC()
		runtime.ReadMemStats(&after)
		runtime.KeepAlive(d)
		return max(after.HeapAlloc, before.HeapAlloc) - before.HeapAlloc
	}
	if few, many := held(10), held(2000); many > few+64<<10 {
		t.Errorf("a decoder holds %d bytes after 10 turns and %d after 2000", few, many)
	}
}
