package event

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"sync"
	"time"
)

// Heartbeat is how often a stream with nothing to say sends a comment, since
// clients and proxies drop a silent connection (spec 07 §10.1).
const Heartbeat = 15 * time.Second

// writeTime is how long a client may take to accept a frame. One that stopped
// reading must not hold a source for ever; it can come back with its offset.
const writeTime = time.Minute

// RequestOffset reads where a request wants to read on: the Last-Event-ID header,
// else the query's offset. ok is false when it says neither; the error is an
// offset that can't be one, to be answered with 400.
func RequestOffset(r *http.Request) (after Offset, ok bool, err error) {
	var s string
	switch v := r.Header.Values("Last-Event-ID"); {
	case len(v) > 0:
		s = v[0]
	case r.URL.Query().Has("offset"):
		s = r.URL.Query().Get("offset")
	default:
		return FromStart, false, nil
	}
	if s == "-1" {
		return FromStart, true, nil
	}
	if o := Offset(s); o.Valid() {
		return o, true, nil
	}
	return FromStart, true, fmt.Errorf("event: offset %q: want an id of an earlier event, -1 or now", s)
}

// ServeSSE answers a request with src as server-sent events (spec 07 §10.1),
// beginning after the request's offset. It returns when src has ended or the
// reader has left; only src failing, or an offset that can't be one (answered
// with 400), is an error, for the caller to log: the client gets a RUN_ERROR
// without the reason. Headers that are set already stay as they are.
func ServeSSE(w http.ResponseWriter, r *http.Request, src Source) error {
	return ServeOptions{}.SSE(w, r, src)
}

// ServeNDJSON is [ServeSSE] with one JSON object per line (spec 07 §10.2): a
// bare event, or {"id":…,"chunk":…} where it has an offset.
func ServeNDJSON(w http.ResponseWriter, r *http.Request, src Source) error {
	return ServeOptions{}.NDJSON(w, r, src)
}

// ServeOptions are the limits of a stream. The zero value is what [ServeSSE] and
// [ServeNDJSON] use.
type ServeOptions struct {
	Heartbeat time.Duration // 0: [Heartbeat]
	WriteTime time.Duration // that a client may take to accept a frame; 0: 1 min
}

// SSE is [ServeSSE] with these options.
func (o ServeOptions) SSE(w http.ResponseWriter, r *http.Request, src Source) error {
	return serve(w, r, src, o, "text/event-stream", appendSSE, ": ping\n\n")
}

// NDJSON is [ServeNDJSON] with these options.
func (o ServeOptions) NDJSON(w http.ResponseWriter, r *http.Request, src Source) error {
	return serve(w, r, src, o, "application/x-ndjson", AppendNDJSON, "\n")
}

func appendSSE(dst []byte, e Entry) ([]byte, error) {
	from := len(dst)
	if e.Offset != "" {
		if !e.Offset.Valid() {
			return dst, fmt.Errorf("event: %q can't be an event id", string(e.Offset))
		}
		dst = append(append(append(dst, "id: "...), e.Offset...), '\n')
	}
	dst = append(dst, "data: "...)
	out, err := Append(dst, e.Event)
	if err != nil {
		return dst[:from], err
	}
	return append(out, '\n', '\n'), nil
}

// AppendNDJSON appends the line of an entry, line end included.
func AppendNDJSON(dst []byte, e Entry) ([]byte, error) {
	from := len(dst)
	if e.Offset != "" {
		id, err := marshal(string(e.Offset))
		if err != nil {
			return dst, err
		}
		dst = append(append(append(dst, `{"id":`...), id...), `,"chunk":`...)
	}
	out, err := Append(dst, e.Event)
	if err != nil {
		return dst[:from], err
	}
	if e.Offset != "" {
		out = append(out, '}')
	}
	return append(out, '\n'), nil
}

// errReaderLeft is why a source is cancelled when writing to the client failed.
var errReaderLeft = errors.New("event: the reader has left")

func serve(w http.ResponseWriter, r *http.Request, src Source, o ServeOptions, mime string, frame func([]byte, Entry) ([]byte, error), beat string) error {
	after, _, err := RequestOffset(r)
	if err != nil {
		http.Error(w, "Bad resume offset.", http.StatusBadRequest)
		return err
	}
	h := w.Header()
	for _, kv := range [][2]string{
		{"Content-Type", mime}, {"Cache-Control", "no-cache, no-transform"}, {"X-Accel-Buffering", "no"}, {"Connection", "keep-alive"},
	} {
		if _, set := h[kv[0]]; !set && (kv[0] != "Connection" || r.ProtoMajor < 2) {
			h.Set(kv[0], kv[1])
		}
	}
	w.WriteHeader(http.StatusOK)

	ctx, cancel := context.WithCancelCause(r.Context())
	out := &frames{w: w, rc: http.NewResponseController(w), left: func() { cancel(errReaderLeft) },
		every: cmp.Or(o.Heartbeat, Heartbeat), patience: cmp.Or(o.WriteTime, writeTime)}
	out.write([]byte(beat))
	var wg sync.WaitGroup
	wg.Go(func() { out.beats(ctx, beat) })
	defer wg.Wait()
	defer cancel(nil)

	var buf []byte
	for e, err := range src.Entries(ctx, after) {
		if err == nil {
			buf, err = frame(buf[:0], e)
		}
		if err != nil {
			if ctx.Err() != nil {
				return nil // the reader left, and the source says so
			}
			buf, _ = frame(buf[:0], Entry{Event: RunError{Message: "reading the events of the run failed", Code: "stream_failed"}})
			out.write(buf)
			return fmt.Errorf("event: serve: %w", err)
		}
		if !out.write(buf) {
			return nil
		}
		if cap(buf) > 1<<20 {
			buf = nil // one huge event must not stay for the life of the stream
		}
	}
	return nil
}

// frames writes whole frames from two goroutines.
type frames struct {
	mu   sync.Mutex
	w    io.Writer
	rc   *http.ResponseController
	left func()
	last time.Time
	bad  bool

	every, patience time.Duration
}

func (f *frames) write(b []byte) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.locked(b)
}

func (f *frames) locked(b []byte) bool {
	if f.bad {
		return false
	}
	// In place of the server's own deadline, which would end the stream. Not all
	// writers have one. Heartbeats renew it, since on HTTP/2 it ends idle streams too.
	_ = f.rc.SetWriteDeadline(time.Now().Add(f.patience))
	_, err := f.w.Write(b)
	if err == nil {
		if err = f.rc.Flush(); errors.Is(err, http.ErrNotSupported) {
			err = nil // a writer without buffers
		}
	}
	f.last = time.Now()
	if err != nil {
		f.bad = true
		f.left()
		return false
	}
	return true
}

// beats writes beat whenever nothing was written for a while.
func (f *frames) beats(ctx context.Context, beat string) {
	t := time.NewTimer(f.every)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		f.mu.Lock()
		wait := f.every - time.Since(f.last)
		if wait <= 0 {
			f.locked([]byte(beat))
			wait = f.every
		}
		f.mu.Unlock()
		t.Reset(wait)
	}
}

// Frame is one event of an SSE stream.
type Frame struct {
	ID    string // the last id seen, also in an earlier frame
	Event string // empty: "message"
	Data  []byte // its data lines, joined with line feeds; the reader's own copy
}

// MaxFrame bounds a line and a frame that [ReadSSE] takes.
const MaxFrame = 64 << 20

// ErrFrameTooLong is a line or frame of more than [MaxFrame] bytes.
var ErrFrameTooLong = fmt.Errorf("event: an SSE frame is longer than %d bytes", MaxFrame)

// ReadSSE parses an event stream as the HTML standard says: any of the three line
// ends, comments, a byte order mark; a frame without its blank line at the end is
// not yielded. It ends with r, with r's error, or with [ErrFrameTooLong].
func ReadSSE(r io.Reader) iter.Seq2[Frame, error] { return readSSE(r, MaxFrame) }

func readSSE(r io.Reader, limit int) iter.Seq2[Frame, error] {
	return func(yield func(Frame, error) bool) {
		in := &lineReader{r: bufio.NewReaderSize(r, 32<<10), limit: limit}
		var f Frame
		var data []byte
		some := false
		for first := true; ; first = false {
			line, err := in.next()
			if err == io.EOF {
				return
			}
			if err != nil {
				yield(Frame{}, err)
				return
			}
			if first {
				line = bytes.TrimPrefix(line, []byte("\ufeff"))
			}
			if len(line) == 0 {
				if some {
					f.Data = data
					if !yield(f, nil) {
						return
					}
				}
				f, data, some = Frame{ID: f.ID}, nil, false
				continue
			}
			name, value, _ := bytes.Cut(line, []byte(":"))
			value = bytes.TrimPrefix(value, []byte(" "))
			switch string(name) {
			case "data":
				if len(data)+len(value) >= limit {
					yield(Frame{}, ErrFrameTooLong)
					return
				}
				if some {
					data = append(data, '\n')
				}
				data, some = append(data, value...), true
			case "event":
				f.Event = string(value)
			case "id":
				if bytes.IndexByte(value, 0) < 0 {
					f.ID = string(value)
				}
			}
		}
	}
}

// lineReader splits at CR, LF and CRLF.
type lineReader struct {
	r      *bufio.Reader
	limit  int
	line   []byte
	skipLF bool
}

// next returns a line without its end, valid until the next call. What has no
// end is no line.
func (l *lineReader) next() ([]byte, error) {
	l.line = l.line[:0]
	if cap(l.line) > 1<<20 {
		l.line = nil
	}
	for {
		if _, err := l.r.Peek(1); err != nil {
			return nil, err
		}
		b, _ := l.r.Peek(l.r.Buffered())
		if l.skipLF {
			l.skipLF = false
			if b[0] == '\n' {
				_, _ = l.r.Discard(1)
				continue
			}
		}
		n := bytes.IndexAny(b, "\r\n")
		if n < 0 {
			n = len(b)
		}
		if len(l.line)+n > l.limit {
			return nil, ErrFrameTooLong
		}
		l.line = append(l.line, b[:n]...)
		if n < len(b) {
			l.skipLF = b[n] == '\r'
			_, _ = l.r.Discard(n + 1)
			return l.line, nil
		}
		_, _ = l.r.Discard(n)
	}
}
