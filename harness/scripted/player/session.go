package player

import (
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"
)

const (
	maxRemembered = 64 << 10 // bytes of each text that a session remembers
	maxSessions   = 256      // files kept in the session directory
)

var (
	errNoSession = errors.New("no such session")
	errInUse     = errors.New("session is in use")
)

// session is what a conversation remembers from one turn to the next. It lives in
// $HOME/.aisandbox-scripted/ID.json; without a HOME nothing is remembered.
type session struct {
	ID          string `json:"id"`
	Turns       int    `json:"turns"` // started ones
	FirstPrompt string `json:"firstPrompt"`
	LastResult  string `json:"lastResult"`

	file string
}

// validID says whether an id can be a file name.
func validID(id string) bool {
	if id == "" || len(id) > 128 {
		return false
	}
	for _, c := range []byte(id) {
		if !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '_') {
			return false
		}
	}
	return true
}

// openSession finds the session of a turn or makes it. The warning says why the
// session will not be remembered.
func openSession(o options, script Script, prompt string) (s *session, warning, err error) {
	dir, derr := sessionDir()
	s = &session{ID: o.sessionID}
	if o.resume != "" {
		if derr != nil || !validID(o.resume) {
			return nil, derr, errNoSession
		}
		b, err := readSmall(filepath.Join(dir, o.resume+".json"), 1<<20)
		if errors.Is(err, fs.ErrNotExist) {
			return nil, nil, errNoSession
		}
		if err == nil {
			err = json.Unmarshal(b, s)
		}
		if err != nil {
			return nil, nil, fmt.Errorf("session %s: %w", o.resume, err)
		}
		s.ID = o.resume
		if o.fork {
			s.ID = o.sessionID
			if s.ID == "" {
				s.ID = uuid(hash(o.resume, "fork", prompt), uint64(s.Turns))
			}
		}
	}
	if s.ID == "" {
		b, _ := json.Marshal(script)
		s.ID = uuid(hash(string(b), prompt), 0)
	}
	s.Turns++
	if s.Turns == 1 {
		s.FirstPrompt = cut(prompt, maxRemembered)
	}
	if derr != nil {
		return s, derr, nil
	}
	s.file = filepath.Join(dir, s.ID+".json")
	if o.sessionID != "" {
		if _, err := os.Lstat(s.file); err == nil {
			return nil, nil, errInUse
		}
	}
	prune(dir)
	return s, s.save(), nil
}

func (s *session) save() error {
	if s.file == "" {
		return nil
	}
	b, err := json.Marshal(s)
	if err == nil {
		err = writeAtomic(s.file, b, 0o600)
	}
	if err != nil {
		s.file = ""
	}
	return err
}

func sessionDir() (string, error) {
	home, err := os.UserHomeDir()
	if err != nil {
		return "", err
	}
	dir := filepath.Join(home, ".aisandbox-scripted")
	return dir, os.MkdirAll(dir, 0o700)
}

// prune keeps a home that many runs share from filling up.
func prune(dir string) {
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) < maxSessions {
		return
	}
	type aged struct {
		name string
		at   time.Time
	}
	var old []aged
	for _, e := range entries {
		if info, err := e.Info(); err == nil && info.Mode().IsRegular() {
			old = append(old, aged{e.Name(), info.ModTime()})
		}
	}
	slices.SortFunc(old, func(a, b aged) int { return a.at.Compare(b.at) })
	for len(old) >= maxSessions {
		os.Remove(filepath.Join(dir, old[0].name))
		old = old[1:]
	}
}

// readSmall reads a file that must not be longer than max.
func readSmall(name string, max int64) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, max+1))
	if err == nil && int64(len(b)) > max {
		err = fmt.Errorf("%s: longer than %d bytes", name, max)
	}
	return b, err
}

// hash is a fingerprint for ids; nothing secret depends on it.
func hash(parts ...string) uint64 {
	h := fnv.New64a()
	for _, p := range parts {
		fmt.Fprintf(h, "%d:%s", len(p), p)
	}
	return h.Sum64()
}

// uuid is an id in the form of a version 4 UUID; n makes it unique below seed.
func uuid(seed, n uint64) string {
	return fmt.Sprintf("%08x-%04x-4%03x-%04x-%012x", seed>>32, seed>>16&0xffff, seed>>4&0xfff, 0x8000|(seed<<8|n>>48)&0x3fff, n&0xffffffffffff)
}
