package docker

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"time"
)

// The engine says that an exec has ended only when its output has, and a stranger
// that inherited the pipe can hold that open for ever. So the wrapper (see
// exec.go) says in the output itself when the command started and how it ended: a
// marker of 33 unguessable bytes, then four of payload. A pipe keeps its order, so
// what comes before the end marker is all that the command wrote.
const (
	markerLead  = 0xfe // in no UTF-8 text, so output that looks like a marker's beginning is rare
	payloadSize = 4
)

// markerHold is how long bytes that may be the beginning of a marker are kept back
// while nothing follows them. A real marker is written at once, so its rest is
// already under way.
const markerHold = 100 * time.Millisecond

// scanner passes a stream on and takes the markers out of it.
type scanner struct {
	prefix []byte
	w      io.Writer
	found  func(payload string)
	held   []byte
	err    error // of w; from then on the stream is read and dropped
}

// Write never fails: a process must not be blocked by a reader that went away.
func (s *scanner) Write(p []byte) (int, error) {
	buf := p
	if len(s.held) > 0 {
		buf = append(s.held, p...)
		s.held = nil
	}
	for {
		i := bytes.Index(buf, s.prefix)
		if i < 0 {
			keep := overlap(buf, s.prefix)
			s.deliver(buf[:len(buf)-keep])
			s.held = bytes.Clone(buf[len(buf)-keep:])
			return len(p), nil
		}
		end := i + len(s.prefix) + payloadSize
		s.deliver(buf[:i])
		if end > len(buf) {
			s.held = bytes.Clone(buf[i:])
			return len(p), nil
		}
		s.found(string(buf[end-payloadSize : end]))
		buf = buf[end:]
	}
}

// flush delivers what was kept back.
func (s *scanner) flush() {
	s.deliver(s.held)
	s.held = nil
}

func (s *scanner) deliver(p []byte) {
	if len(p) == 0 || s.w == nil || s.err != nil {
		return
	}
	n, err := s.w.Write(p)
	if err == nil && n < len(p) {
		err = io.ErrShortWrite
	}
	s.err = err
}

// overlap is the length of the longest end of buf that begins prefix.
func overlap(buf, prefix []byte) int {
	for k := min(len(buf), len(prefix)-1); k > 0; k-- {
		if bytes.Equal(buf[len(buf)-k:], prefix[:k]) {
			return k
		}
	}
	return 0
}

// The streams of the engine's framing.
const (
	streamStdin  = 0 // also used for output, by engines of old
	streamStdout = 1
	streamStderr = 2
	streamError  = 3 // the engine's own words
)

// newReader is what demux reads from.
func newReader(r io.Reader) *bufio.Reader { return bufio.NewReaderSize(r, 32<<10) }

// frameHeader is stream, three zero bytes, length in big endian.
const frameHeader = 8

// demux copies a framed stream to its writers until it ends, fails, or stop says so
// after a piece. With raw set the stream has no frames and is all stdout.
func demux(r *bufio.Reader, raw bool, stdout, stderr io.Writer, stop func() bool) error {
	buf := make([]byte, 32<<10)
	for !stop() {
		if raw {
			n, err := r.Read(buf)
			if _, werr := stdout.Write(buf[:n]); werr != nil {
				return werr
			}
			if err != nil {
				return err
			}
			continue
		}
		var h [frameHeader]byte
		if _, err := io.ReadFull(r, h[:]); err != nil {
			return err
		}
		var w io.Writer
		var said bytes.Buffer
		switch h[0] {
		case streamStdin, streamStdout:
			w = stdout
		case streamStderr:
			w = stderr
		case streamError:
			w = &limited{w: &said, n: 4 << 10}
		default:
			return fmt.Errorf("stream %d in the engine's output", h[0])
		}
		n := int64(binary.BigEndian.Uint32(h[4:]))
		if _, err := io.CopyBuffer(onlyWriter{w}, io.LimitReader(r, n), buf); err != nil {
			return err
		}
		if h[0] == streamError {
			return errors.New(said.String())
		}
	}
	return nil
}

// onlyWriter hides ReadFrom, so that the copy uses our buffer.
type onlyWriter struct{ io.Writer }

// limited writes the first n bytes and drops the rest.
type limited struct {
	w io.Writer
	n int
}

func (l *limited) Write(p []byte) (int, error) {
	keep := p[:min(len(p), l.n)]
	l.n -= len(keep)
	if _, err := l.w.Write(keep); err != nil {
		return 0, err
	}
	return len(p), nil
}

// deadliner is the part of a connection that patientReader needs.
type deadliner interface {
	io.Reader
	SetReadDeadline(t time.Time) error
}

// patientReader calls idle when waiting reports that something is kept back and no
// byte has come for markerHold.
type patientReader struct {
	conn    deadliner
	src     io.Reader // the connection, with what was read from it already
	waiting func() bool
	idle    func()
}

func (r *patientReader) Read(p []byte) (int, error) {
	if !r.waiting() {
		return r.src.Read(p)
	}
	if err := r.conn.SetReadDeadline(time.Now().Add(markerHold)); err != nil {
		r.idle()
		return r.src.Read(p)
	}
	n, err := r.src.Read(p)
	if resetErr := r.conn.SetReadDeadline(time.Time{}); err == nil {
		err = resetErr
	}
	if n == 0 && errors.Is(err, os.ErrDeadlineExceeded) {
		r.idle()
		return r.src.Read(p)
	}
	return n, err
}
