package claudecode

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/aisandbox-go/aisandbox/internal/rawjson"
)

// OptionError says which option can't be used, and what to do.
type OptionError struct {
	Field string
	Why   string
}

func (e *OptionError) Error() string {
	return fmt.Sprintf("claude-code: option %s: %s", e.Field, e.Why)
}

// Code is "invalid_input".
func (e *OptionError) Code() string { return "invalid_input" }

// callOptions are the options of one call.
type callOptions struct {
	SessionID       string   `json:"sessionId,omitempty"`
	ForkSession     bool     `json:"forkSession,omitempty"`
	PermissionMode  string   `json:"permissionMode,omitempty"`
	MaxTurns        int      `json:"maxTurns,omitempty"`
	AllowedTools    []string `json:"allowedTools,omitempty"`
	DisallowedTools []string `json:"disallowedTools,omitempty"`
	Cwd             string   `json:"cwd,omitempty"`
	AuthMode        AuthMode `json:"authMode,omitempty"`
}

var permissionModes = []string{"default", "acceptEdits", "bypassPermissions", "plan", "dontAsk", "auto"}

// parseCall reads the options of a call; none is no error, an unknown name is.
func parseCall(b json.RawMessage) (callOptions, error) {
	var o callOptions
	if rawjson.IsNull(b) {
		return o, nil
	}
	fields := map[string]any{
		"sessionId": &o.SessionID, "forkSession": &o.ForkSession, "permissionMode": &o.PermissionMode, "maxTurns": &o.MaxTurns,
		"allowedTools": &o.AllowedTools, "disallowedTools": &o.DisallowedTools, "cwd": &o.Cwd, "authMode": &o.AuthMode,
	}
	var bad error
	err := rawjson.Object(b, func(k, v []byte) bool {
		p, ok := fields[string(k)]
		switch {
		case !ok:
			bad = &OptionError{string(k), "there is no such option"}
		case json.Unmarshal(v, p) != nil:
			bad = &OptionError{string(k), fmt.Sprintf("%.60s is not a value for it", v)}
		}
		return bad == nil
	})
	switch {
	case err != nil:
		return o, &OptionError{"modelOptions", "must be a JSON object: " + err.Error()}
	case bad != nil:
		return o, bad
	}
	return o, o.check("")
}

// check is what options of a call and of the constructor have in common.
func (o callOptions) check(prefix string) error {
	switch {
	case o.PermissionMode != "" && !slices.Contains(permissionModes, o.PermissionMode):
		return &OptionError{prefix + "permissionMode", fmt.Sprintf("%q: use one of %s", o.PermissionMode, strings.Join(permissionModes, ", "))}
	case o.MaxTurns < 0:
		return &OptionError{prefix + "maxTurns", "must be positive"}
	case o.AuthMode != "" && o.AuthMode != AuthAPIKey && o.AuthMode != AuthHost:
		return &OptionError{prefix + "authMode", fmt.Sprintf("%q: use api-key or host", string(o.AuthMode))}
	case !word(o.SessionID):
		return &OptionError{prefix + "sessionId", "must be an id of an earlier run: not begin with a dash, and have no control characters"}
	}
	return nil
}

// word says whether s can follow a flag: empty, or not taken for a flag itself.
func word(s string) bool {
	return !strings.HasPrefix(s, "-") && !strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f })
}

// merged is the constructor's options with those of the call over them.
func (c *cli) merged(raw json.RawMessage) (callOptions, error) {
	m := callOptions{PermissionMode: c.o.PermissionMode, MaxTurns: c.o.MaxTurns, AllowedTools: c.o.AllowedTools,
		DisallowedTools: c.o.DisallowedTools, Cwd: c.o.Dir, AuthMode: c.o.AuthMode}
	if err := m.check("Options."); err != nil {
		return m, err
	}
	if !word(c.model) {
		return m, &OptionError{"model", fmt.Sprintf("%q: must not begin with a dash or have control characters", c.model)}
	}
	call, err := parseCall(raw)
	if err != nil {
		return m, err
	}
	m.SessionID, m.ForkSession = call.SessionID, call.ForkSession
	if call.PermissionMode != "" {
		m.PermissionMode = call.PermissionMode
	}
	if call.MaxTurns != 0 {
		m.MaxTurns = call.MaxTurns
	}
	if call.AllowedTools != nil {
		m.AllowedTools = call.AllowedTools
	}
	if call.DisallowedTools != nil {
		m.DisallowedTools = call.DisallowedTools
	}
	if call.Cwd != "" {
		m.Cwd = call.Cwd
	}
	if call.AuthMode != "" {
		m.AuthMode = call.AuthMode
	}
	if m.AuthMode == "" {
		m.AuthMode = AuthAPIKey
	}
	return m, nil
}
