package claudecode

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/harness"
	"github.com/aisandbox-go/aisandbox/internal/rawjson"
)

// input is what the program reads from its standard input: plain text, or lines
// of JSON where something is attached.
type input struct {
	stdin []byte
	lines bool
}

// prompt turns the conversation into the program's input (spec 02 §3). Warnings
// name what can't be handed over.
func (c *cli) prompt(p harness.Plan, o callOptions) (input, []string, error) {
	if len(p.Messages) == 0 || p.Messages[len(p.Messages)-1].Role != "user" {
		return input{}, nil, errNoPrompt
	}
	last := p.Messages[len(p.Messages)-1]
	ask := last.Content.String()
	images, warnings, err := attachments(last)
	if err != nil {
		return input{}, nil, err
	}
	if strings.TrimSpace(ask) == "" && len(images) == 0 {
		return input{}, nil, errNoPrompt
	}
	var b strings.Builder
	if o.SessionID != "" {
		b.WriteString(strings.TrimSpace(ask)) // the session has the rest
	} else {
		var turns []string
		for _, m := range p.Messages[:len(p.Messages)-1] {
			s := m.Content.String()
			if strings.TrimSpace(s) == "" {
				continue
			}
			switch m.Role {
			case "user":
				turns = append(turns, "User: "+s)
			case "assistant":
				turns = append(turns, "Assistant: "+s)
			}
		}
		for _, m := range p.Messages[:len(p.Messages)-1] {
			if old, _, err := attachments(m); err != nil || len(old) > 0 {
				warnings = append(warnings, "attachments of earlier messages are left out of the conversation's text")
				break
			}
		}
		if len(turns) > 0 {
			b.WriteString("Previous conversation:\n" + strings.Join(turns, "\n") + "\n\n")
		}
		b.WriteString(ask)
	}
	schema, err := checkSchema(p.Schema)
	if err != nil {
		return input{}, nil, err
	}
	if schema != nil {
		b.WriteString("\n\nGive your final answer as one JSON object that matches this JSON Schema, without markdown unless the schema needs it:\n\n")
		b.Write(schema)
	}
	txt := b.String()
	if strings.HasPrefix(txt, "/") && !c.o.SlashCommands {
		txt = " " + txt // else the program takes it for a command of its own
	}
	if len(images) == 0 {
		return input{stdin: []byte(txt)}, warnings, nil
	}
	line, err := userLine(txt, images)
	return input{stdin: line, lines: true}, warnings, err
}

// image is an attachment in the model API's shape.
type image struct {
	Type   string      `json:"type"` // "image"
	Source imageSource `json:"source"`
}

type imageSource struct {
	Type      string `json:"type"` // "base64", "url"
	MediaType string `json:"media_type,omitempty"`
	Data      string `json:"data,omitempty"`
	URL       string `json:"url,omitempty"`
}

var mediaTypes = []string{"image/png", "image/jpeg", "image/gif", "image/webp"}

// attachments are the images of a message. Anything else that is not text is
// warned of; an image that no model takes is an error.
func attachments(m event.Message) (images []image, warnings []string, err error) {
	for i, p := range m.Content.Parts {
		if p.Type == "text" {
			continue
		}
		var v struct {
			MimeType string `json:"mimeType"`
			Data     string `json:"data"`
			URL      string `json:"url"`
			Source   struct {
				Type       string `json:"type"`
				Value      string `json:"value"`
				Data       string `json:"data"`
				URL        string `json:"url"`
				MimeType   string `json:"mimeType"`
				MimeTypeMS string `json:"media_type"`
			} `json:"source"`
		}
		if err := json.Unmarshal(p.Raw, &v); err != nil {
			return nil, nil, fmt.Errorf("claude-code: messages: part %d of the last message: %w", i, err)
		}
		media := or(v.MimeType, or(v.Source.MimeType, v.Source.MimeTypeMS))
		if p.Type != "image" && (p.Type != "binary" || !strings.HasPrefix(media, "image/")) {
			warnings = append(warnings, fmt.Sprintf("an attachment of type %q is left out: the program takes images only", or(media, p.Type)))
			continue
		}
		data := or(v.Data, v.Source.Data)
		url := or(v.URL, v.Source.URL)
		switch {
		case v.Source.Type == "url" && url == "":
			url = v.Source.Value
		case data == "":
			data = v.Source.Value
		}
		switch {
		case data == "" && url != "":
			images = append(images, image{"image", imageSource{Type: "url", URL: url}})
		case data == "":
			return nil, nil, fmt.Errorf("claude-code: messages: part %d of the last message is an image without data", i)
		case !slices.Contains(mediaTypes, media):
			return nil, nil, fmt.Errorf("claude-code: messages: part %d of the last message is %q: use one of %s", i, media, strings.Join(mediaTypes, ", "))
		default:
			images = append(images, image{"image", imageSource{Type: "base64", MediaType: media, Data: data}})
		}
	}
	return images, warnings, nil
}

// userLine is the prompt as a line of stream-json input.
func userLine(txt string, images []image) ([]byte, error) {
	b := []byte(`{"type":"user","message":{"role":"user","content":[`)
	if strings.TrimSpace(txt) != "" {
		b = append(rawjson.AppendQuoted(append(b, `{"type":"text","text":`...), txt), '}', ',')
	}
	for i, im := range images {
		if i > 0 {
			b = append(b, ',')
		}
		v, err := json.Marshal(im)
		if err != nil {
			return nil, fmt.Errorf("claude-code: attach image: %w", err)
		}
		b = append(b, v...)
	}
	return append(b, "]}}\n"...), nil
}
