package claudecode

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/aisandbox-go/aisandbox/policy"
)

// Tools that a capability of a policy stands for.
var (
	writeTools   = []string{"Write", "Edit", "NotebookEdit"}
	networkTools = []string{"WebFetch", "WebSearch"}
)

// knownTools are names that a command rule of a policy may give instead of a
// command, besides Agent and Task, which are one tool.
var knownTools = []string{
	"Bash", "Read", "Write", "Edit", "NotebookEdit", "WebFetch", "WebSearch", "Skill", "Workflow",
	"TaskCreate", "TaskGet", "TaskList", "TaskOutput", "TaskStop", "TaskUpdate", "SendMessage", "EnterWorktree", "ExitWorktree",
	"ReportFindings", "ScheduleWakeup", "CronCreate", "CronDelete", "CronList",
}

// headless are tools that would keep a run alive with nobody there to talk to.
var headless = []string{"ScheduleWakeup", "CronCreate", "CronDelete", "CronList"}

// rules is a policy in the program's terms (spec 02 §7.3). The program's order is
// deny, ask, allow, like ours, but it looks at each command of a compound line
// where our policy looks at the whole line.
type rules struct {
	mode                     string
	allowed, disallowed, ask []string
	warnings                 []string
}

func permissions(p *policy.Policy, o callOptions) rules {
	r := rules{mode: o.PermissionMode, allowed: slices.Clone(o.AllowedTools), disallowed: slices.Clone(o.DisallowedTools)}
	if r.mode == "" {
		r.mode = modeFor(p)
	}
	if p != nil {
		r.commands(p.Commands.Deny, "commands.deny", &r.disallowed)
		r.commands(p.Commands.Ask, "commands.ask", &r.ask)
		r.commands(p.Commands.Allow, "commands.allow", &r.allowed)
		r.capability(p.Capabilities.FileWrite, writeTools, p)
		r.capability(p.Capabilities.Network, networkTools, p)
	}
	if p != nil && o.PermissionMode == "" && (r.mode == "default" || len(r.ask) > 0) {
		r.warnings = append(r.warnings, "policy: nobody can be asked in this run: the program refuses what the policy would ask for")
	}
	for _, t := range headless {
		if !slices.Contains(r.allowed, t) {
			r.disallowed = append(r.disallowed, t)
		}
	}
	r.allowed, r.disallowed, r.ask = unique(r.allowed), unique(r.disallowed), unique(r.ask)
	return r
}

// modeFor is the permission mode that a policy asks for. acceptEdits never is: it
// runs rm inside the workspace unasked.
func modeFor(p *policy.Policy) string {
	if p == nil {
		return "bypassPermissions"
	}
	switch p.DefaultDecision() {
	case policy.Allow:
		return "bypassPermissions" // deny and ask rules hold there too
	case policy.Deny:
		if len(p.Commands.Ask) == 0 && p.Capabilities.FileWrite != policy.Ask && p.Capabilities.Network != policy.Ask {
			return "dontAsk"
		}
	}
	return "default"
}

func (r *rules) commands(patterns []string, field string, to *[]string) {
	for _, p := range patterns {
		switch {
		case p == "Agent" || p == "Task":
			*to = append(*to, "Agent", "Task") // the model calls it by one name, the list has the other
		case slices.Contains(knownTools, p):
			*to = append(*to, p)
		case strings.TrimSpace(p) == "" || strings.ContainsAny(p, "\r\n\x00") || !balanced(p):
			r.warnings = append(r.warnings, fmt.Sprintf("policy: %s %q can't be a rule of the program: line breaks and unbalanced parentheses have no form there", field, p))
		default:
			*to = append(*to, "Bash("+p+")")
		}
	}
}

func (r *rules) capability(d policy.Decision, tools []string, p *policy.Policy) {
	switch d {
	case policy.Deny:
		r.disallowed = append(r.disallowed, tools...)
	case policy.Ask:
		r.ask = append(r.ask, tools...)
	case policy.Allow:
		if p.DefaultDecision() != policy.Allow {
			r.allowed = append(r.allowed, tools...)
		}
	}
}

func balanced(s string) bool {
	n := 0
	for _, c := range s {
		switch c {
		case '(':
			n++
		case ')':
			if n--; n < 0 {
				return false
			}
		}
	}
	return n == 0
}

// settings is the file for rules that no flag has; nil when there are none.
func (r *rules) settings() []byte {
	if len(r.ask) == 0 {
		return nil
	}
	var s struct {
		Permissions struct {
			Ask []string `json:"ask"`
		} `json:"permissions"`
	}
	s.Permissions.Ask = r.ask
	b, err := json.Marshal(s)
	if err != nil {
		return nil // strings always encode
	}
	return b
}

// unique keeps the first of equal entries and leaves out blank ones.
func unique(all []string) []string {
	var out []string
	for _, s := range all {
		if s = strings.TrimSpace(s); s != "" && !slices.Contains(out, s) {
			out = append(out, s)
		}
	}
	return out
}
