package chat

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"

	"github.com/google/jsonschema-go/jsonschema"
)

// Tool is a function of the host that the agent may call.
type Tool struct {
	Name        string
	Description string
	Schema      json.RawMessage // JSON Schema of the input, an object

	// Call runs the tool. Input is JSON as the agent wrote it, not yet checked
	// against Schema. It may be called concurrently.
	Call func(ctx context.Context, input json.RawMessage) (output json.RawMessage, err error)
}

// InputError is an input that a tool's schema forbids; the agent can mend it.
type InputError struct {
	Tool string
	Err  error
}

func (e *InputError) Error() string { return fmt.Sprintf("chat: tool %q: input: %v", e.Tool, e.Err) }

// Unwrap returns what is wrong with the input.
func (e *InputError) Unwrap() error { return e.Err }

// Code is "invalid_input".
func (e *InputError) Code() string { return "invalid_input" }

// NewTool makes a tool of a function. The schema is inferred from In, a struct
// with json and jsonschema tags; an input that it forbids is an [*InputError]
// and doesn't reach the function.
func NewTool[In, Out any](name, description string, call func(ctx context.Context, in In) (Out, error)) (Tool, error) {
	fail := func(err error) (Tool, error) { return Tool{}, fmt.Errorf("chat: tool %q: schema: %w", name, err) }
	schema, err := jsonschema.For[In](nil)
	if err != nil {
		return fail(err)
	}
	if schema.Type != "object" {
		return fail(fmt.Errorf("the input is %s: use a struct", schema.Type))
	}
	checked, err := schema.Resolve(nil)
	if err != nil {
		return fail(err)
	}
	raw, err := json.Marshal(schema)
	if err != nil {
		return fail(err)
	}
	return Tool{Name: name, Description: description, Schema: raw, Call: func(ctx context.Context, input json.RawMessage) (json.RawMessage, error) {
		var in In
		var tree any
		if len(bytes.TrimSpace(input)) == 0 {
			input = []byte("{}")
		}
		if err := json.Unmarshal(input, &tree); err != nil {
			return nil, &InputError{name, err}
		}
		if err := checked.Validate(tree); err != nil {
			return nil, &InputError{name, err}
		}
		if err := json.Unmarshal(input, &in); err != nil {
			return nil, &InputError{name, err}
		}
		out, err := call(ctx, in)
		if err != nil {
			return nil, err
		}
		return json.Marshal(out)
	}}, nil
}
