package modeltest

import (
	"bytes"
	"encoding/json"
)

type rawJSON = json.RawMessage

// marshal returns v as compact JSON, without the escaping for HTML that
// encoding/json does by default and no model API does.
func marshal(v any) ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
}

// quote returns s as a JSON string.
func quote(s string) string {
	b, err := marshal(s)
	if err != nil {
		return `""` // a string always marshals
	}
	return string(b)
}

// inside returns what is between the quotes of the JSON string s.
func inside(s string) string {
	q := quote(s)
	return q[1 : len(q)-1]
}

func validJSON(s string) bool { return json.Valid([]byte(s)) }

// isNumber reports whether s is a JSON number.
func isNumber(s string) bool {
	return s != "" && (s[0] == '-' || s[0] >= '0' && s[0] <= '9') && validJSON(s)
}
