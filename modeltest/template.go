package modeltest

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// maxExpanded bounds the text that the templates of one turn add to it: a short
// script may quote a large request many times.
const maxExpanded = 16 << 20

const templateStart = "{{request."

// templateRE has no character that JSON escapes, so that it finds the same
// templates in a text and in the JSON encoding of it.
var templateRE = regexp.MustCompile(`\{\{request\.([A-Za-z0-9_.-]+)\}\}`)

var templateNames = []string{"model", "system", "first_user", "last_user", "last_tool_result", "messages", "number",
	"tool_result.ID", "header.NAME", "capture.NAME"}

func checkTemplate(text string, captures map[string]Capture) error {
	found := templateRE.FindAllStringSubmatch(text, -1)
	if strings.Count(text, templateStart) != len(found) {
		return fmt.Errorf("%s without a name and }}", templateStart)
	}
	for _, m := range found {
		kind, arg, dotted := strings.Cut(m[1], ".")
		switch kind {
		case "model", "system", "first_user", "last_user", "last_tool_result", "messages", "number":
			if !dotted {
				continue
			}
		case "tool_result", "header":
			if arg != "" {
				continue
			}
		case "capture":
			if _, ok := captures[arg]; ok {
				continue
			}
			return fmt.Errorf("%s names no entry of capture", m[0])
		}
		return fmt.Errorf("%s is no part of a request", m[0])
	}
	return nil
}

// expander replaces the templates of one turn.
type expander struct {
	view     *view
	captures map[string]capture
	size     int
	err      error
}

// expand returns text with its templates replaced by the values after encode,
// or by themselves if encode is nil.
func (e *expander) expand(text string, encode func(string) string) string {
	if !strings.Contains(text, templateStart) {
		return text
	}
	return templateRE.ReplaceAllStringFunc(text, func(m string) string {
		if e.err != nil {
			return ""
		}
		v, err := e.value(m[len(templateStart) : len(m)-2])
		if err != nil {
			e.err = fmt.Errorf("%s: %w", m, err)
			return ""
		}
		if encode != nil {
			v = encode(v)
		}
		if e.size += len(v); e.size > maxExpanded {
			e.err = fmt.Errorf("%s: the turn grows beyond %d bytes", m, maxExpanded)
			return ""
		}
		return v
	})
}

func (e *expander) value(name string) (string, error) {
	kind, arg, _ := strings.Cut(name, ".")
	switch kind {
	case "messages":
		return strconv.Itoa(e.view.messages), nil
	case "number":
		return strconv.Itoa(e.view.number), nil
	case "tool_result":
		if v, ok := e.view.toolResults[arg]; ok {
			return v, nil
		}
		return "", fmt.Errorf("the request has no result for the tool call %q", arg)
	case "header":
		return e.view.header.Get(arg), nil
	case "capture":
		c := e.captures[arg]
		m := c.re.FindStringSubmatch(e.view.part(c.from))
		switch {
		case m == nil:
			return "", fmt.Errorf("%s matches nothing in the %s of the request", c.re, c.from)
		case len(m) > 1:
			return m[1], nil
		}
		return m[0], nil
	}
	return e.view.part(kind), nil
}

type capture struct {
	from string
	re   *regexp.Regexp
}

func compileCapture(c Capture) capture {
	return capture{from: c.From, re: regexp.MustCompile(c.Regexp)} // Validate compiled it
}
