package chat_test

import (
	"context"
	"encoding/json"
	"errors"
	"testing"

	"github.com/aisandbox-go/aisandbox/chat"
)

func TestNewTool(t *testing.T) {
	type in struct {
		City string `json:"city" jsonschema:"the city's name"`
		Days int    `json:"days,omitempty"`
	}
	calls := 0
	tool, err := chat.NewTool("weather", "tells the weather", func(_ context.Context, v in) (map[string]any, error) {
		calls++
		if v.City == "Atlantis" {
			return nil, errors.New("it sank")
		}
		return map[string]any{"city": v.City, "days": v.Days}, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	var schema struct {
		Type       string
		Required   []string
		Properties map[string]struct{ Type, Description string }
	}
	if err := json.Unmarshal(tool.Schema, &schema); err != nil {
		t.Fatal(err)
	}
	equal(t, schema.Type+" "+schema.Properties["city"].Description, "object the city's name")
	equal(t, schema.Required, []string{"city"})
	for _, tt := range []struct {
		input, want string
		bad         bool
	}{
		{`{"city":"Bern","days":2}`, `{"city":"Bern","days":2}`, false},
		{``, "", true}, {`{}`, "", true}, {`{"city":1}`, "", true}, {`{"city":"x","more":1}`, "", true}, {`[]`, "", true}, {`{`, "", true},
	} {
		out, err := tool.Call(t.Context(), json.RawMessage(tt.input))
		var ie *chat.InputError
		if errors.As(err, &ie) != tt.bad || !tt.bad && err != nil || string(out) != tt.want {
			t.Errorf("%s: %s, %v", tt.input, out, err)
		}
	}
	if _, err := tool.Call(t.Context(), json.RawMessage(`{"city":"Atlantis"}`)); err == nil || err.Error() != "it sank" {
		t.Errorf("got %v", err)
	}
	if calls != 2 {
		t.Errorf("%d calls", calls)
	}
	if _, err := chat.NewTool("n", "", func(context.Context, int) (int, error) { return 0, nil }); err == nil {
		t.Error("an input that is no object was accepted")
	}
}
