// Package wire is what the host side of the guest and the guest program say to
// each other: a greeting with a version, then a multiplexer whose streams carry
// requests and small typed frames. Architecture §3.5.
//
// Both sides must come from one build of one version: the greeting refuses
// everything else, so that nothing in here ever has to be compatible.
package wire

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"
)

// Version is the version of the protocol. Change it with every change of a
// frame, a request or their meaning.
const Version = 1

// HelloTimeout bounds the greeting.
const HelloTimeout = 10 * time.Second

// Marker is the first argument of a program that is to be the guest.
const Marker = "aisandbox-guest"

const magic = "\x00aisbx-hello\x00"

const maxHello = 64 << 10

// Facts are what a side tells about itself.
type Facts struct {
	Platform string `json:"platform,omitempty"` // "linux/amd64"
	Pid      int    `json:"pid,omitempty"`
	UID      int    `json:"uid"`
	Init     bool   `json:"init,omitempty"` // it stays when the connection ends
	Root     string `json:"root,omitempty"`
	Private  string `json:"private,omitempty"`
	BootID   string `json:"bootId,omitempty"`
	Instance string `json:"instance,omitempty"` // random, of this guest process
	Exe      string `json:"exe,omitempty"`      // its program file
	Hooked   bool   `json:"hooked,omitempty"`   // the program file needs the Marker argument
}

// ProtocolError says that host and guest come from different versions.
type ProtocolError struct {
	Host, Guest int // versions of the protocol
}

func (e *ProtocolError) Error() string {
	return fmt.Sprintf("guest protocol: the host speaks version %d, the guest version %d: use a guest program of the host's build", e.Host, e.Guest)
}

// Hello writes the own greeting and reads the other side's. It does not bound
// its time; the caller closes the connection after [HelloTimeout].
func Hello(rw io.ReadWriter, host bool, own Facts) (Facts, error) {
	return hello(rw, host, own, Version)
}

func hello(rw io.ReadWriter, host bool, own Facts, version int) (Facts, error) {
	body, err := json.Marshal(own)
	if err != nil {
		return Facts{}, fmt.Errorf("guest protocol: %w", err)
	}
	msg := []byte(magic)
	msg = binary.BigEndian.AppendUint16(msg, uint16(version))
	msg = binary.BigEndian.AppendUint32(msg, uint32(len(body)))
	msg = append(msg, body...)
	// Both sides write first: on an unbuffered pipe that must not lock them up.
	werr := make(chan error, 1)
	go func() {
		_, err := rw.Write(msg)
		werr <- err
	}()
	head := make([]byte, len(magic)+6)
	n, err := io.ReadFull(rw, head)
	if n < len(magic) && err != nil || string(head[:min(n, len(magic))]) != magic[:min(n, len(magic))] {
		return Facts{}, notHello(rw, head[:n], err)
	}
	if err != nil {
		return Facts{}, fmt.Errorf("guest protocol: read greeting: %w", err)
	}
	got := int(binary.BigEndian.Uint16(head[len(magic):]))
	size := binary.BigEndian.Uint32(head[len(magic)+2:])
	if got != version {
		// The other side is to learn of our version before we hang up. It may be busy
		// writing the rest of its own greeting, whose form we don't know.
		go func() { _, _ = io.Copy(io.Discard, rw) }()
		select {
		case <-werr:
		case <-time.After(time.Second):
		}
		if host {
			return Facts{}, &ProtocolError{Host: version, Guest: got}
		}
		return Facts{}, &ProtocolError{Host: got, Guest: version}
	}
	if size > maxHello {
		return Facts{}, fmt.Errorf("guest protocol: greeting of %d bytes", size)
	}
	body = make([]byte, size)
	if _, err := io.ReadFull(rw, body); err != nil {
		return Facts{}, fmt.Errorf("guest protocol: read greeting: %w", err)
	}
	var f Facts
	if err := json.Unmarshal(body, &f); err != nil {
		return Facts{}, fmt.Errorf("guest protocol: greeting: %w", err)
	}
	if err := <-werr; err != nil {
		return Facts{}, fmt.Errorf("guest protocol: write greeting: %w", err)
	}
	return f, nil
}

// notHello quotes what came instead of a greeting, which usually says why the
// program did not start.
func notHello(r io.Reader, head []byte, err error) error {
	if err == nil {
		more := make([]byte, 400)
		n, _ := r.Read(more)
		head = append(head, more[:n]...)
	}
	text := strings.TrimSpace(strings.ToValidUTF8(string(head), "?"))
	if text == "" {
		return fmt.Errorf("guest protocol: no greeting: %w", err)
	}
	return fmt.Errorf("guest protocol: no greeting but %.300q", text)
}
