// Package frame is the format of a run's journal: frames with a checksum, an
// exit that only the supervisor can sign, and the file-safe token of a run. It
// is pure; host and guest share it. Spec 04 §3.2 and §21.8.
//
// A journal is a sequence of frames:
//
//	type u8 | length u32le | crc32c u32le | payload
//
// The checksum covers the type, the length and the payload. A frame that is cut
// off at the end of a journal is ignored, for its writer may have died in it;
// one that is damaged and followed by good frames is [ErrTorn].
package frame

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
)

// Type is the kind of a frame.
type Type uint8

// The frame types. Their numbers are part of the format.
const (
	TypeHeader    Type = 1 // JSON of [Header]; the first frame, written before the agent starts
	TypeLine      Type = 2 // a line of stdout, or the last part of one, without its newline
	TypePartial   Type = 3 // bytes of a line whose newline has not come yet
	TypeStderr    Type = 4 // bytes of stderr
	TypeHeartbeat Type = 5 // the time in Unix milliseconds, u64le
	TypeExit      Type = 6 // [Exit]; the last frame
)

const (
	headSize = 9

	// MaxPayload bounds a payload. A longer line is several [TypePartial] frames
	// and one [TypeLine].
	MaxPayload = 1 << 20
)

// ErrTorn says that a damaged frame is followed by more: the journal was
// altered, or its medium is bad.
var ErrTorn = errors.New("frame: torn frame inside the journal")

var (
	errShort   = errors.New("frame: incomplete")
	errCorrupt = errors.New("frame: damaged")
	castagnoli = crc32.MakeTable(crc32.Castagnoli)
)

// Frame is one decoded frame. Payload is valid until the next read.
type Frame struct {
	Type    Type
	Payload []byte
}

// Stdout reports whether the frame carries standard output.
func (f Frame) Stdout() bool { return f.Type == TypeLine || f.Type == TypePartial }

// Append appends an encoded frame to dst. The payload must not be longer than
// [MaxPayload].
func Append(dst []byte, t Type, payload []byte) []byte {
	if len(payload) > MaxPayload {
		panic("frame: payload is longer than MaxPayload") // a bug of the writer, never input
	}
	at := len(dst)
	dst = append(dst, byte(t))
	dst = binary.LittleEndian.AppendUint32(dst, uint32(len(payload)))
	crc := crc32.Update(crc32.Checksum(dst[at:], castagnoli), castagnoli, payload)
	dst = binary.LittleEndian.AppendUint32(dst, crc)
	return append(dst, payload...)
}

// decode reads the frame at the start of b and returns its encoded size. The
// payload shares b's memory.
func decode(b []byte) (Frame, int, error) {
	if len(b) < headSize {
		return Frame{}, 0, errShort
	}
	size := binary.LittleEndian.Uint32(b[1:5])
	if b[0] < byte(TypeHeader) || b[0] > byte(TypeExit) || size > MaxPayload {
		return Frame{}, 0, errCorrupt
	}
	end := headSize + int(size)
	if len(b) < end {
		return Frame{}, 0, errShort
	}
	payload := b[headSize:end]
	crc := crc32.Update(crc32.Checksum(b[:5], castagnoli), castagnoli, payload)
	if crc != binary.LittleEndian.Uint32(b[5:9]) {
		return Frame{}, 0, errCorrupt
	}
	return Frame{Type(b[0]), payload}, end, nil
}

// Reader reads frames from a journal. Not for concurrent use.
type Reader struct {
	r      *bufio.Reader
	offset int64
	err    error
}

// NewReader returns a Reader whose first byte is the journal's byte number
// offset, which must be the start of a frame.
func NewReader(r io.Reader, offset int64) *Reader {
	return &Reader{r: bufio.NewReaderSize(r, headSize+MaxPayload), offset: offset}
}

// Offset is the position in the journal just after the last frame that Next
// returned: where a later read goes on.
func (r *Reader) Offset() int64 { return r.offset }

// Next returns the next frame. io.EOF is the end of what could be read, a cut-off
// frame there included; ErrTorn is damage with more behind it. Errors of the
// underlying reader are returned as they are. After an error Next repeats it.
func (r *Reader) Next() (Frame, error) {
	if r.err != nil {
		return Frame{}, r.err
	}
	f, n, err := r.peek()
	if err != nil {
		r.err = err
		return Frame{}, err
	}
	f.Payload = bytes.Clone(f.Payload)
	_, _ = r.r.Discard(n) // it was peeked
	r.offset += int64(n)
	return f, nil
}

func (r *Reader) peek() (Frame, int, error) {
	head, err := r.r.Peek(headSize)
	if err != nil {
		return Frame{}, 0, err // fewer bytes than a frame's head, at the end: io.EOF
	}
	size := binary.LittleEndian.Uint32(head[1:5])
	if size > MaxPayload {
		return Frame{}, 0, r.damage()
	}
	b, err := r.r.Peek(headSize + int(size))
	if err == io.EOF {
		// Either the writer was cut off here, or the length is damaged and eats the
		// frames that follow.
		return Frame{}, 0, r.damage()
	}
	if err != nil {
		return Frame{}, 0, err
	}
	f, n, err := decode(b)
	if err != nil {
		return Frame{}, 0, r.damage()
	}
	return f, n, nil
}

// damage tells a torn tail from damage inside: is there a good frame behind?
func (r *Reader) damage() error {
	b, err := r.r.Peek(headSize + MaxPayload)
	if err != nil && err != io.EOF {
		return err
	}
	for i := 1; i+headSize <= len(b); i++ {
		if _, _, err := decode(b[i:]); err == nil {
			return ErrTorn
		}
	}
	if err == nil { // more than a frame's worth of rubbish
		return ErrTorn
	}
	return io.EOF
}

// Header is the payload of a [TypeHeader] frame.
type Header struct {
	Version   int    `json:"version"`
	RunID     string `json:"runId"`
	StartedMs int64  `json:"startedMs"`
	Level     int    `json:"level"` // strength of spec 04 §21.8
}

// HeaderVersion is the current [Header.Version].
const HeaderVersion = 1

// Heartbeat encodes the payload of a [TypeHeartbeat] frame.
func Heartbeat(unixMs int64) []byte {
	return binary.LittleEndian.AppendUint64(nil, uint64(unixMs))
}

// ParseHeartbeat decodes the payload of a [TypeHeartbeat] frame.
func ParseHeartbeat(b []byte) (unixMs int64, err error) {
	if len(b) != 8 {
		return 0, fmt.Errorf("frame: heartbeat of %d bytes", len(b))
	}
	return int64(binary.LittleEndian.Uint64(b)), nil
}
