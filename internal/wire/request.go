package wire

import (
	"encoding/binary"
	"errors"
)

// Op is what a request asks for.
type Op uint8

// The operations. What a stream carries after the request is said with each.
const (
	OpExec     Op = 1 + iota // FData, FEnd, FSignal, FResize, FCredit, FStop up; FStarted, FData, FStderr, FCredit, FKilled, FReply(exit, error) down
	OpOpen                   // FData… FReply down
	OpPut                    // FData… FEnd up; FReply
	OpLstat                  // FReply(info)
	OpReadDir                // FData(entries)… FReply
	OpMkdir                  // FReply
	OpRemove                 // FReply
	OpRename                 // FReply
	OpSymlink                // FReply
	OpReadlink               // FReply(target)
	OpTarIn                  // FData… FEnd up; FReply
	OpTarOut                 // FData… FReply down
	OpWatch                  // FEnd up to stop; FStarted, FData(change)… FReply down
	OpDial                   // FStarted, then raw bytes both ways; the stream isn't used again
	OpListen                 // FStarted(port); open until the stream is closed; connections are streams of the guest
	OpUsage                  // FReply(usage)
	OpLaunch                 // FData… FEnd up; FReply
	OpProbe                  // FReply(JSON of provider.Probe)
	OpTail                   // FStarted, FData… FReply down; the stream isn't used again
	OpKill                   // FReply
	OpForget                 // FReply
	OpJournals               // FReply(JSON of []provider.JournalInfo)
	opEnd
)

// Request flags.
const (
	WantStdin uint32 = 1 << iota
	WantStdout
	WantStderr
	OneOutput // stderr goes where stdout goes
	KillStrays
	HasTerminal
	Follow
)

// Request is the header of an operation. Strings are bytes: names and arguments
// need not be UTF-8.
type Request struct {
	Op    Op
	Flags uint32

	Argv []string
	Env  []string
	Dir  string
	User string
	Mark string
	Rows uint16
	Cols uint16

	Path   string
	Target string
	Mode   uint32
	Names  []string

	Port   int
	Token  string
	RunID  string
	Nonce  []byte
	Signal int
	Offset int64
}

// Has reports whether a flag is set.
func (r *Request) Has(flag uint32) bool { return r.Flags&flag != 0 }

// maxList bounds the lists of a request.
const maxList = 1 << 17

var errRequest = errors.New("guest protocol: malformed request")

// Encode appends the request to dst.
func (r *Request) Encode(dst []byte) []byte {
	e := Enc{dst}
	e.Byte(byte(r.Op))
	e.Uint(uint64(r.Flags))
	e.List(r.Argv)
	e.List(r.Env)
	e.Str(r.Dir)
	e.Str(r.User)
	e.Str(r.Mark)
	e.Uint(uint64(r.Rows))
	e.Uint(uint64(r.Cols))
	e.Str(r.Path)
	e.Str(r.Target)
	e.Uint(uint64(r.Mode))
	e.List(r.Names)
	e.Int(int64(r.Port))
	e.Str(r.Token)
	e.Str(r.RunID)
	e.Str(string(r.Nonce))
	e.Int(int64(r.Signal))
	e.Int(r.Offset)
	return e.B
}

// DecodeRequest is the inverse of Encode. Rubbish is an error, never a panic.
func DecodeRequest(b []byte) (*Request, error) {
	d := Dec{B: b}
	r := &Request{
		Op:    Op(d.Byte()),
		Flags: uint32(d.Uint()),
		Argv:  d.List(),
		Env:   d.List(),
		Dir:   d.Str(),
		User:  d.Str(),
		Mark:  d.Str(),
		Rows:  uint16(d.Uint()),
		Cols:  uint16(d.Uint()),
		Path:  d.Str(), Target: d.Str(),
		Mode:  uint32(d.Uint()),
		Names: d.List(),
		Port:  int(d.Int()),
		Token: d.Str(), RunID: d.Str(),
		Nonce:  []byte(d.Str()),
		Signal: int(d.Int()),
		Offset: d.Int(),
	}
	if d.Failed || len(d.B) > 0 || r.Op == 0 || r.Op >= opEnd {
		return nil, errRequest
	}
	return r, nil
}

// Enc appends values to B.
type Enc struct{ B []byte }

// Byte appends one byte.
func (e *Enc) Byte(b byte) { e.B = append(e.B, b) }

// Uint appends an unsigned number.
func (e *Enc) Uint(n uint64) { e.B = binary.AppendUvarint(e.B, n) }

// Int appends a signed number.
func (e *Enc) Int(n int64) { e.B = binary.AppendVarint(e.B, n) }

// Str appends a string with its length.
func (e *Enc) Str(s string) {
	e.Uint(uint64(len(s)))
	e.B = append(e.B, s...)
}

// List appends strings with their number.
func (e *Enc) List(l []string) {
	e.Uint(uint64(len(l)))
	for _, s := range l {
		e.Str(s)
	}
}

// Dec takes values from B. After a failure everything is zero.
type Dec struct {
	B      []byte
	Failed bool
}

func (d *Dec) fail() {
	d.Failed = true
	d.B = nil
}

// Byte takes one byte.
func (d *Dec) Byte() byte {
	if len(d.B) == 0 {
		d.fail()
		return 0
	}
	b := d.B[0]
	d.B = d.B[1:]
	return b
}

// Uint takes an unsigned number.
func (d *Dec) Uint() uint64 {
	n, size := binary.Uvarint(d.B)
	if size <= 0 {
		d.fail()
		return 0
	}
	d.B = d.B[size:]
	return n
}

// Int takes a signed number.
func (d *Dec) Int() int64 {
	n, size := binary.Varint(d.B)
	if size <= 0 {
		d.fail()
		return 0
	}
	d.B = d.B[size:]
	return n
}

// Str takes a string.
func (d *Dec) Str() string {
	n := d.Uint()
	if n > uint64(len(d.B)) {
		d.fail()
		return ""
	}
	s := string(d.B[:n])
	d.B = d.B[n:]
	return s
}

// List takes a list of strings.
func (d *Dec) List() []string {
	n := d.Uint()
	if n > maxList || n > uint64(len(d.B)) { // each takes a byte at least
		d.fail()
		return nil
	}
	if n == 0 {
		return nil
	}
	l := make([]string, n)
	for i := range l {
		l[i] = d.Str()
	}
	return l
}
