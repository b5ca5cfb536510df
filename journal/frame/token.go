package frame

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"strings"
	"unicode/utf8"
)

const (
	tokenMax  = 200
	tokenHash = 16
	hexDigits = "0123456789abcdef"
)

// Errors of [Token] and [RunID].
var (
	ErrEmptyRun       = errors.New("frame: run id is empty")
	ErrTokenMalformed = errors.New("frame: malformed run token")
	ErrTokenTruncated = errors.New("frame: run token is truncated") // its run id can't be told
)

// Token returns the file-safe name of a run: injective, at most 200 bytes, only
// letters, digits, dot, minus and underscore. Spec 04 §3.2.
func Token(runID string) (string, error) {
	if runID == "" {
		return "", ErrEmptyRun
	}
	all := isDevice(runID)
	var b strings.Builder
	for i := range len(runID) {
		c := runID[i]
		if safe(c) && !all {
			b.WriteByte(c)
			continue
		}
		b.WriteByte('_')
		b.WriteByte(hexDigits[c>>4])
		b.WriteByte(hexDigits[c&15])
	}
	t := b.String()
	if len(t) > tokenMax {
		sum := sha256.Sum256([]byte(runID))
		t = t[:tokenMax-tokenHash-1] + "-" + hex.EncodeToString(sum[:])[:tokenHash]
	}
	return t, nil
}

// RunID returns the run id of a token. In doubt it is an error, for what calls
// it deletes. The result is a key, never part of a path: it can be "..".
func RunID(token string) (string, error) {
	if token == "" {
		return "", ErrTokenMalformed
	}
	if len(token) > tokenMax || len(token) == tokenMax && hashed(token) {
		return "", ErrTokenTruncated
	}
	var b strings.Builder
	for i := 0; i < len(token); i++ {
		c := token[i]
		switch {
		case safe(c):
			b.WriteByte(c)
		case c == '_' && i+2 < len(token):
			v, err := hex.DecodeString(token[i+1 : i+3])
			if err != nil {
				return "", ErrTokenMalformed
			}
			b.WriteByte(v[0])
			i += 2
		default:
			return "", ErrTokenMalformed
		}
	}
	id := b.String()
	if !utf8.ValidString(id) {
		return "", ErrTokenMalformed
	}
	return id, nil
}

// ValidToken reports whether t can be a token. With a suffix it is a file name:
// alone it may be "..".
func ValidToken(t string) bool {
	if t == "" || len(t) > tokenMax {
		return false
	}
	for i := range len(t) {
		if !safe(t[i]) && t[i] != '_' {
			return false
		}
	}
	return true
}

func safe(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '.' || c == '-'
}

func hashed(token string) bool {
	tail := token[len(token)-tokenHash-1:]
	if tail[0] != '-' {
		return false
	}
	for i := 1; i < len(tail); i++ {
		if strings.IndexByte(hexDigits, tail[i]) < 0 {
			return false
		}
	}
	return true
}

// isDevice reports whether a name means a device on Windows, where a sandbox's
// files may end up.
func isDevice(name string) bool {
	n := strings.ToUpper(name)
	switch n {
	case "CON", "PRN", "AUX", "NUL":
		return true
	}
	return len(n) == 4 && (n[:3] == "COM" || n[:3] == "LPT") && n[3] >= '1' && n[3] <= '9'
}
