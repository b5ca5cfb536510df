package event

import (
	"bytes"
	"encoding/json"
)

// marshal is json.Marshal without HTML escaping: what an agent wrote goes out as
// it was written.
func marshal(v any) ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
}
