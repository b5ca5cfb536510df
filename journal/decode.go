package journal

import (
	"bufio"
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/aisandbox-go/aisandbox/journal/frame"
	"github.com/aisandbox-go/aisandbox/provider"
)

// firstByte looks at a stream's first byte, and notices when there is none.
type firstByte struct {
	r io.Reader

	mu      sync.Mutex
	seen    bool
	stalled bool
	held    []byte
}

// stall is false when a byte came in time.
func (f *firstByte) stall() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.stalled = !f.seen
	return f.stalled
}

func (f *firstByte) peek() (byte, error) {
	var b [1]byte
	if _, err := io.ReadFull(f, b[:]); err != nil {
		return 0, err
	}
	f.held = b[:]
	return b[0], nil
}

func (f *firstByte) Read(b []byte) (int, error) {
	if len(f.held) > 0 {
		n := copy(b, f.held)
		f.held = f.held[n:]
		return n, nil
	}
	n, err := f.r.Read(b)
	if n > 0 {
		f.mu.Lock()
		f.seen = true
		f.mu.Unlock()
	}
	return n, err
}

func newDecoder(first byte, r *Reader) decoder {
	if first == byte(frame.TypeHeader) {
		return &frames{r: r}
	}
	return &plain{r: r, word: []byte(exitWord(r.o.Nonce, r.o.RunID))}
}

// frames decodes the guest's form.
type frames struct {
	r     *Reader
	tally frame.Tally
	line  []byte // of a line that has not ended
	at    int64  // end of its last part
}

func (d *frames) pending() ([]byte, int64) { return d.line, d.at }

func (d *frames) decode(src io.Reader, from int64, emit func(Record) error) (int64, error) {
	fr := frame.NewReader(src, from)
	for {
		f, err := fr.Next()
		off := fr.Offset()
		switch {
		case err == io.EOF:
			return off, nil
		case errors.Is(err, frame.ErrTorn):
			return off, &TornError{RunID: d.r.o.RunID, Off: off}
		case err != nil:
			return off, fmt.Errorf("journal: %w", err)
		}
		d.tally.Add(f)
		if err := d.frame(f, off, emit); err != nil {
			return off, err
		}
	}
}

func (d *frames) frame(f frame.Frame, off int64, emit func(Record) error) error {
	switch f.Type {
	case frame.TypeHeader:
		var h frame.Header
		if err := json.Unmarshal(f.Payload, &h); err != nil || h.RunID != d.r.o.RunID {
			return &TamperedError{RunID: d.r.o.RunID, Why: "its header is another run's"}
		}
		d.r.level = h.Level
	case frame.TypePartial:
		if len(d.line)+len(f.Payload) > d.r.o.MaxLine {
			return &LineError{d.r.o.RunID, d.r.o.MaxLine}
		}
		d.line, d.at = append(d.line, f.Payload...), off
	case frame.TypeLine:
		line := f.Payload
		if len(d.line)+len(line) > d.r.o.MaxLine {
			return &LineError{d.r.o.RunID, d.r.o.MaxLine}
		}
		if len(d.line) > 0 {
			line = append(d.line, line...)
			d.line = nil
		}
		return emit(Record{Off: off, Kind: KindLine, Data: line})
	case frame.TypeStderr:
		return emit(Record{Off: off, Kind: KindStderr, Data: f.Payload})
	case frame.TypeHeartbeat:
		ms, err := frame.ParseHeartbeat(f.Payload)
		if err != nil {
			return &TamperedError{RunID: d.r.o.RunID, Why: err.Error()}
		}
		return emit(Record{Off: off, Kind: KindHeartbeat, Beat: time.UnixMilli(ms)})
	case frame.TypeExit:
		e, err := frame.ParseExit(f.Payload)
		if err != nil {
			return &TamperedError{RunID: d.r.o.RunID, Why: err.Error()}
		}
		if !d.tally.Verify(e, d.r.o.Nonce, d.r.o.RunID) {
			return &TamperedError{RunID: d.r.o.RunID, Why: "the exit's signature does not hold"}
		}
		if len(d.line) > 0 {
			if err := emit(Record{Off: d.at, Kind: KindPartial, Data: d.line}); err != nil {
				return err
			}
			d.line = nil
		}
		return emit(Record{Off: off, Kind: KindExit, Exit: provider.Exit{Code: int(e.Code), Signal: int(e.Signal)}})
	}
	return nil
}

// plain decodes the shell's form: lines, and a last one with the secret word.
type plain struct {
	r    *Reader
	word []byte
	rest []byte // a line that had not ended when the stream did
	at   int64
}

func (d *plain) pending() ([]byte, int64) { return d.rest, d.at }

func (d *plain) decode(src io.Reader, from int64, emit func(Record) error) (int64, error) {
	d.r.level = 1
	br := bufio.NewReaderSize(src, 64<<10)
	off := from
	var line []byte
	for {
		part, err := br.ReadSlice('\n')
		line = append(line, part...)
		switch {
		case err == bufio.ErrBufferFull || err == nil && len(line)-1 > d.r.o.MaxLine:
			if len(line) > d.r.o.MaxLine {
				return off, &LineError{d.r.o.RunID, d.r.o.MaxLine}
			}
			continue
		case err == io.EOF:
			// Read again as a whole when the rest is there.
			d.rest, d.at = line, off+int64(len(line))
			return off, nil
		case err != nil:
			return off, fmt.Errorf("journal: %w", err)
		}
		start := off
		off += int64(len(line))
		if err := d.line(bytes.TrimSuffix(line, []byte("\n")), start, off, emit); err != nil {
			return off, err
		}
		if line = line[:0]; cap(line) > 1<<20 {
			line = nil
		}
	}
}

// shellLine is a line of the wrapper's own.
type shellLine struct {
	Start  *int64  `json:"__start"`
	Exit   *int    `json:"__exit"`
	Nonce  *string `json:"__nonce"`
	Stderr string  `json:"__stderr"`
}

func (d *plain) line(line []byte, start, off int64, emit func(Record) error) error {
	trimmed := bytes.TrimSpace(line)
	if start == 0 && bytes.HasPrefix(trimmed, []byte(`{"__start":`)) {
		return nil
	}
	if e, ok := d.exit(trimmed); ok {
		if e.Stderr != "" {
			if text, err := base64.StdEncoding.DecodeString(e.Stderr); err == nil {
				if err := emit(Record{Off: start, Kind: KindStderr, Data: text}); err != nil {
					return err
				}
			}
		}
		x := provider.Exit{Code: *e.Exit}
		if x.Code > 128 && x.Code <= 128+64 {
			x.Signal = x.Code - 128 // as far as a shell can tell
		}
		return emit(Record{Off: off, Kind: KindExit, Exit: x})
	}
	return emit(Record{Off: off, Kind: KindLine, Data: line})
}

// exit recognises the wrapper's last line. In doubt it is the agent's output.
func (d *plain) exit(line []byte) (shellLine, bool) {
	if !bytes.HasPrefix(line, []byte(`{"__exit":`)) || !bytes.Contains(line, d.word) {
		return shellLine{}, false
	}
	var e shellLine
	if json.Unmarshal(line, &e) != nil || e.Exit == nil || e.Nonce == nil {
		return shellLine{}, false
	}
	return e, len(d.word) > 0 && equal(*e.Nonce, string(d.word))
}
