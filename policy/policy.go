// Package policy holds what an agent may do, as data: rules for commands and
// capabilities with a decision each (spec 01 §13).
//
// A policy on command strings is a guard-rail; the sandbox is the wall.
package policy

import "fmt"

// Decision is what a rule says.
type Decision string

// The decisions. Where several rules match, deny beats ask beats allow.
const (
	Allow Decision = "allow"
	Ask   Decision = "ask"
	Deny  Decision = "deny"
)

// Policy is a set of rules. The zero value has no rules and asks for everything.
type Policy struct {
	Commands     Commands     `json:"commands,omitzero"`
	Capabilities Capabilities `json:"capabilities,omitzero"`
	Default      Decision     `json:"default,omitempty"` // empty: Ask
}

// Commands are patterns of whole command lines; * stands for any text.
type Commands struct {
	Allow []string `json:"allow,omitempty"`
	Ask   []string `json:"ask,omitempty"`
	Deny  []string `json:"deny,omitempty"`
}

// Capabilities decide on whole groups of tools. Empty means the default.
type Capabilities struct {
	FileWrite Decision `json:"fileWrite,omitempty"`
	Network   Decision `json:"network,omitempty"`
}

// DefaultDecision is the default with its own default applied.
func (p Policy) DefaultDecision() Decision {
	if p.Default == "" {
		return Ask
	}
	return p.Default
}

// Validate returns an error that names the field and the cure.
func (p Policy) Validate() error {
	for _, f := range []struct {
		name string
		d    Decision
	}{{"default", p.Default}, {"capabilities.fileWrite", p.Capabilities.FileWrite}, {"capabilities.network", p.Capabilities.Network}} {
		switch f.d {
		case "", Allow, Ask, Deny:
		default:
			return fmt.Errorf("policy: %s is %q: use allow, ask or deny", f.name, f.d)
		}
	}
	return nil
}
