package event

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"math"
	"slices"
	"strconv"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/aisandbox-go/aisandbox/internal/rawjson"
)

// Fingerprint is what an event says without when it was said: the SHA-256 of its
// canonical JSON (RFC 8785) without the top-level timestamp and without
// metadata.tanstack. Two decodings of the same bytes have the same fingerprints
// (spec 04 §10, §21.9). An event that [Encode] refuses has the zero fingerprint.
func Fingerprint(ev Event) [32]byte {
	b, err := Append(make([]byte, 0, 256), ev)
	if err != nil {
		return [32]byte{}
	}
	return sha256.Sum256(canonicalObject(make([]byte, 0, len(b)), b, true))
}

// canonicalObject appends a checked object in canonical form; identity leaves
// out what is not part of an event's identity.
func canonicalObject(dst, v []byte, identity bool) []byte {
	members := make([]canonicalMember, 0, 8)
	_ = rawjson.Members(v, func(k, val []byte) bool {
		name := string(k)
		if bytes.IndexByte(k, '\\') >= 0 {
			name, _ = rawjson.String(slices.Concat([]byte{'"'}, k, []byte{'"'}))
		}
		switch {
		case identity && name == "timestamp":
			return true
		case identity && name == "metadata" && rawjson.IsObject(val):
			if val = withoutTanStack(val); val == nil {
				return true
			}
		}
		members = append(members, canonicalMember{name, val})
		return true
	})
	slices.SortStableFunc(members, compareMembers)
	dst = append(dst, '{')
	first := true
	for i, m := range members {
		if i+1 < len(members) && members[i+1].name == m.name {
			continue // the last of two with one name counts
		}
		if !first {
			dst = append(dst, ',')
		}
		first = false
		dst = rawjson.AppendCanonical(dst, m.name)
		dst = append(dst, ':')
		dst = canonical(dst, m.value)
	}
	return append(dst, '}')
}

type canonicalMember struct {
	name  string
	value []byte
}

// compareMembers orders names by UTF-16 code units, as RFC 8785 asks.
func compareMembers(a, b canonicalMember) int {
	x, y := a.name, b.name
	for len(x) > 0 && len(y) > 0 {
		r, n := utf8.DecodeRuneInString(x)
		s, m := utf8.DecodeRuneInString(y)
		if r != s {
			if (r > 0xffff) != (s > 0xffff) {
				r1, _ := utf16.EncodeRune(r)
				s1, _ := utf16.EncodeRune(s)
				if r > 0xffff {
					r = r1
				}
				if s > 0xffff {
					s = s1
				}
			}
			return int(r) - int(s)
		}
		x, y = x[n:], y[m:]
	}
	return len(x) - len(y)
}

func withoutTanStack(meta []byte) []byte {
	var rest map[string]json.RawMessage
	if json.Unmarshal(meta, &rest) != nil {
		return meta
	}
	delete(rest, "tanstack")
	if len(rest) == 0 {
		return nil
	}
	b, err := marshal(rest)
	if err != nil {
		return meta
	}
	return b
}

func canonical(dst, v []byte) []byte {
	switch {
	case len(v) == 0:
		return dst
	case v[0] == '{':
		return canonicalObject(dst, v, false)
	case v[0] == '[':
		dst = append(dst, '[')
		first := true
		_ = rawjson.Array(v, func(e []byte) bool {
			if !first {
				dst = append(dst, ',')
			}
			first = false
			dst = canonical(dst, e)
			return true
		})
		return append(dst, ']')
	case v[0] == '"':
		s, _ := rawjson.String(v)
		return rawjson.AppendCanonical(dst, s)
	case v[0] == 't', v[0] == 'f', v[0] == 'n':
		return append(dst, v...)
	}
	return canonicalNumber(dst, v)
}

// canonicalNumber writes a number as JavaScript would.
func canonicalNumber(dst, v []byte) []byte {
	f, err := strconv.ParseFloat(string(v), 64)
	if err != nil || math.IsInf(f, 0) {
		return append(dst, v...) // beyond a double: identity of the digits
	}
	if f == 0 {
		return append(dst, '0')
	}
	format := byte('f')
	if abs := math.Abs(f); abs < 1e-6 || abs >= 1e21 {
		format = 'e'
	}
	from := len(dst)
	dst = strconv.AppendFloat(dst, f, format, -1, 64)
	if format == 'e' { // 1e-07 is 1e-7
		if n := len(dst); n-from >= 4 && dst[n-4] == 'e' && dst[n-2] == '0' {
			dst[n-2] = dst[n-1]
			dst = dst[:n-1]
		}
	}
	return dst
}
