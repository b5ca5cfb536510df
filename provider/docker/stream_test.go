package docker

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func markerPrefix() []byte {
	return append([]byte{markerLead}, strings.Repeat("ab", 16)...)
}

// FuzzScanner cuts one stream at two places. However it is cut, what is not a
// marker comes out unchanged, and each marker is seen once, in its place.
func FuzzScanner(f *testing.F) {
	f.Add([]byte("before"), []byte("after"), uint(3), uint(40))
	f.Add([]byte{markerLead, 'a'}, []byte{markerLead}, uint(7), uint(8))
	f.Add(markerPrefix()[:20], markerPrefix()[:32], uint(21), uint(22))
	f.Fuzz(func(t *testing.T, before, after []byte, cut1, cut2 uint) {
		prefix := markerPrefix()
		stream := append(append(append(bytes.Clone(before), prefix...), "X007"...), after...)
		if bytes.Count(stream, prefix) != 1 {
			t.Skip("nobody can guess a marker")
		}
		a, b := int(cut1%uint(len(stream)+1)), int(cut2%uint(len(stream)+1))
		if a > b {
			a, b = b, a
		}
		var out bytes.Buffer
		var seen []string
		at := -1
		s := &scanner{prefix: prefix, w: &out}
		s.found = func(p string) { seen, at = append(seen, p), out.Len() }
		for _, part := range [][]byte{stream[:a], stream[a:b], stream[b:]} {
			if n, err := s.Write(part); n != len(part) || err != nil {
				t.Fatal(n, err)
			}
		}
		s.flush()
		if len(seen) != 1 || seen[0] != "X007" || at != len(before) || out.String() != string(before)+string(after) {
			t.Errorf("%q at %d in %q", seen, at, out.String())
		}
	})
}

// FuzzDemux feeds rubbish: an error or an end, never more output than input.
func FuzzDemux(f *testing.F) {
	f.Add([]byte{1, 0, 0, 0, 0, 0, 0, 2, 'h', 'i', 2, 0, 0, 0, 0, 0, 0, 1, 'e'})
	f.Add([]byte{3, 0, 0, 0, 0, 0, 0, 3, 'b', 'a', 'd'})
	f.Add([]byte{1, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 'x'})
	f.Fuzz(func(t *testing.T, in []byte) {
		var out bytes.Buffer
		err := demux(bufio.NewReader(bytes.NewReader(in)), false, &out, &out, func() bool { return false })
		if err == nil || out.Len() > len(in) {
			t.Errorf("%v, %d bytes of %d", err, out.Len(), len(in))
		}
	})
}

func TestDemux(t *testing.T) {
	frame := func(stream byte, text string) string {
		var h [frameHeader]byte
		h[0] = stream
		binary.BigEndian.PutUint32(h[4:], uint32(len(text)))
		return string(h[:]) + text
	}
	for _, tc := range []struct {
		name, in, out, errOut string
		want                  error
	}{
		{"both", frame(1, "a") + frame(2, "b") + frame(1, "") + frame(1, "c"), "ac", "b", io.EOF},
		{"cut header", frame(1, "a")[:3], "", "", io.ErrUnexpectedEOF},
		{"cut body", frame(1, "abc")[:10], "ab", "", io.EOF},
		{"the engine's own words", frame(1, "a") + frame(3, "it broke"), "a", "", errors.New("it broke")},
		{"unknown stream", frame(9, "a"), "", "", errors.New("stream 9 in the engine's output")},
	} {
		var out, errOut bytes.Buffer
		err := demux(bufio.NewReader(strings.NewReader(tc.in)), false, &out, &errOut, func() bool { return false })
		if out.String() != tc.out || errOut.String() != tc.errOut || err.Error() != tc.want.Error() {
			t.Errorf("%s: %q %q %v", tc.name, out.String(), errOut.String(), err)
		}
	}
}

// What may be the beginning of a marker is not kept back for long.
func TestHeldBytesArrive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		us, them := net.Pipe()
		defer them.Close()
		got := make(chan string, 4)
		s := &scanner{prefix: markerPrefix(), found: func(string) { t.Error("no marker was sent") },
			w: writerFunc(func(p []byte) (int, error) { got <- string(p); return len(p), nil })}
		r := &patientReader{conn: us, src: us, waiting: func() bool { return len(s.held) > 0 }, idle: s.flush}
		go func() { _ = demux(newReader(r), true, s, s, func() bool { return false }) }()
		start := time.Now()
		if _, err := them.Write([]byte{'x', markerLead, 'a'}); err != nil {
			t.Fatal(err)
		}
		if first := <-got; first != "x" || time.Since(start) != 0 {
			t.Errorf("%q after %v", first, time.Since(start))
		}
		if held := <-got; held != string([]byte{markerLead, 'a'}) || time.Since(start) != markerHold {
			t.Errorf("%q after %v", held, time.Since(start))
		}
		if _, err := them.Write([]byte("more")); err != nil { // the connection survived its deadline
			t.Fatal(err)
		}
		if more := <-got; more != "more" {
			t.Errorf("%q", more)
		}
		_ = us.Close()
	})
}

type writerFunc func(p []byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }
