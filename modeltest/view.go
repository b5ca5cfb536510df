package modeltest

import (
	"net/http"
	"regexp"
	"strings"
)

// view is what routes and templates see of a request. Every dialect of model
// API fills one, so that scripts work for all of them.
type view struct {
	number         int
	header         http.Header
	body           string
	model          string
	stream         bool
	system         string
	firstUser      string
	lastUser       string
	lastToolResult string
	toolResults    map[string]string // by tool call id
	tools          map[string]bool
	messages       int
}

// part returns one of sources.
func (v *view) part(name string) string {
	switch name {
	case "model":
		return v.model
	case "system":
		return v.system
	case "first_user":
		return v.firstUser
	case "last_user":
		return v.lastUser
	case "last_tool_result":
		return v.lastToolResult
	case "body":
		return v.body
	}
	return ""
}

// condition is one compiled test of a When.
type condition func(*view) bool

type matcher []condition

func (m matcher) match(v *view) bool {
	for _, c := range m {
		if !c(v) {
			return false
		}
	}
	return true
}

func compileWhen(w When) matcher {
	var m matcher
	for i, p := range []Pattern{w.Model, w.System, w.FirstUser, w.LastUser, w.LastToolResult, w.Body} {
		if !p.IsZero() {
			match, part := compilePattern(p), sources[i]
			m = append(m, func(v *view) bool { return match(v.part(part)) })
		}
	}
	if w.Stream != nil {
		want := *w.Stream
		m = append(m, func(v *view) bool { return v.stream == want })
	}
	if w.Tool != "" {
		m = append(m, func(v *view) bool { return v.tools[w.Tool] })
	}
	for name, p := range w.Header {
		match := compilePattern(p)
		m = append(m, func(v *view) bool {
			for _, value := range v.header.Values(name) {
				if match(value) {
					return true
				}
			}
			return false
		})
	}
	return m
}

func compilePattern(p Pattern) func(string) bool {
	if p.Regexp != "" {
		return regexp.MustCompile(p.Regexp).MatchString // Validate compiled it
	}
	return func(s string) bool { return strings.Contains(s, p.Contains) }
}
