package frame

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"hash"
)

// MACSize is the length of [Exit.MAC].
const MACSize = sha256.Size

const exitSize = 4 + 4 + 8 + 8 + MACSize

// Exit is the payload of a [TypeExit] frame: how the agent ended, and the proof
// that the supervisor says so and that no line before it was changed.
type Exit struct {
	Code   int32
	Signal int32 // 0 when it exited by itself
	Lines  int64 // lines of stdout; an unterminated last one counts
	Bytes  int64 // of stdout, newlines included
	MAC    [MACSize]byte
}

// Encode returns the payload.
func (e Exit) Encode() []byte {
	b := make([]byte, 0, exitSize)
	b = binary.LittleEndian.AppendUint32(b, uint32(e.Code))
	b = binary.LittleEndian.AppendUint32(b, uint32(e.Signal))
	b = binary.LittleEndian.AppendUint64(b, uint64(e.Lines))
	b = binary.LittleEndian.AppendUint64(b, uint64(e.Bytes))
	return append(b, e.MAC[:]...)
}

// ParseExit decodes the payload of a [TypeExit] frame. It does not verify it.
func ParseExit(b []byte) (Exit, error) {
	if len(b) != exitSize {
		return Exit{}, fmt.Errorf("frame: exit of %d bytes, want %d", len(b), exitSize)
	}
	e := Exit{
		Code:   int32(binary.LittleEndian.Uint32(b)),
		Signal: int32(binary.LittleEndian.Uint32(b[4:])),
		Lines:  int64(binary.LittleEndian.Uint64(b[8:])),
		Bytes:  int64(binary.LittleEndian.Uint64(b[16:])),
	}
	copy(e.MAC[:], b[24:])
	return e, nil
}

// Tally counts and hashes the standard output of a journal, on both sides: the
// supervisor signs with it, a reader verifies with it. The zero value is ready.
// Not for concurrent use.
type Tally struct {
	Lines int64
	Bytes int64

	hash hash.Hash
	open bool // the last frame was a TypePartial
}

// Add takes the next frame; frames that are no output change nothing.
func (t *Tally) Add(f Frame) {
	if !f.Stdout() {
		return
	}
	if t.hash == nil {
		t.hash = sha256.New()
	}
	// The length delimits the frames: no two sequences hash alike.
	var head [5]byte
	head[0] = byte(f.Type)
	binary.LittleEndian.PutUint32(head[1:], uint32(len(f.Payload)))
	t.hash.Write(head[:])
	t.hash.Write(f.Payload)
	t.Bytes += int64(len(f.Payload))
	if !t.open {
		t.Lines++
	}
	t.open = f.Type == TypePartial
	if f.Type == TypeLine {
		t.Bytes++
	}
}

// Sign completes e with the tally's numbers and the proof:
//
//	HMAC-SHA256(nonce, "exit/v2" ‖ runID ‖ code i32be ‖ signal i32be ‖ lines u64be ‖ SHA-256 of the output frames)
//
// Everything but runID has a fixed size, so the parts can't be shifted.
func (t *Tally) Sign(e Exit, nonce []byte, runID string) Exit {
	e.Lines, e.Bytes = t.Lines, t.Bytes
	e.MAC = t.mac(e, nonce, runID)
	return e
}

// Verify reports whether e is the supervisor's word about exactly the output
// that was added.
func (t *Tally) Verify(e Exit, nonce []byte, runID string) bool {
	want := t.mac(e, nonce, runID)
	return e.Lines == t.Lines && e.Bytes == t.Bytes && hmac.Equal(want[:], e.MAC[:])
}

func (t *Tally) mac(e Exit, nonce []byte, runID string) (out [MACSize]byte) {
	if t.hash == nil {
		t.hash = sha256.New()
	}
	m := hmac.New(sha256.New, nonce)
	m.Write([]byte("exit/v2"))
	m.Write([]byte(runID))
	var b [16]byte
	binary.BigEndian.PutUint32(b[0:], uint32(e.Code))
	binary.BigEndian.PutUint32(b[4:], uint32(e.Signal))
	binary.BigEndian.PutUint64(b[8:], uint64(e.Lines))
	m.Write(b[:])
	m.Write(t.hash.Sum(nil))
	m.Sum(out[:0])
	return out
}
