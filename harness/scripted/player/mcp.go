package player

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

const (
	protocol     = "2025-11-25"
	maxTools     = 1000
	maxReply     = 16 << 20
	connectLimit = 10 * time.Second
	callLimit    = 10 * time.Minute // a person may have to decide meanwhile
)

// server is one MCP server of the configuration.
type server struct {
	name    string
	target  target
	headers [][2]string

	err     error // why it can't be used
	tools   []string
	session string
	version string
	next    int
}

// readServers reads {"mcpServers":{NAME:{"type":"http","url":URL,"headers":{…}}}},
// in the order of the names. No file means no servers.
func readServers(file string) ([]*server, error) {
	if file == "" {
		return nil, nil
	}
	b, err := readSmall(file, 1<<20)
	if err != nil {
		return nil, err
	}
	var conf struct {
		Servers map[string]struct {
			Type    string            `json:"type"`
			URL     string            `json:"url"`
			Headers map[string]string `json:"headers"`
		} `json:"mcpServers"`
	}
	if err := json.Unmarshal(b, &conf); err != nil {
		return nil, err
	}
	var list []*server
	for name, c := range conf.Servers {
		if c.Type != "http" {
			return nil, fmt.Errorf("server %q: type %q is not http", name, c.Type)
		}
		t, err := parseTarget(c.URL)
		if err != nil {
			return nil, fmt.Errorf("server %q: %w", name, err)
		}
		s := &server{name: name, target: t, version: protocol}
		for k, v := range c.Headers {
			if strings.ContainsAny(k, "\r\n: ") || strings.ContainsAny(v, "\r\n") {
				return nil, fmt.Errorf("server %q: the header %q can't be sent", name, k)
			}
			s.headers = append(s.headers, [2]string{k, v})
		}
		slices.SortFunc(s.headers, func(a, b [2]string) int { return strings.Compare(a[0], b[0]) })
		list = append(list, s)
	}
	slices.SortFunc(list, func(a, b *server) int { return strings.Compare(a.name, b.name) })
	return list, nil
}

// connect shakes hands and lists the tools; s.err says how it went.
func (s *server) connect(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, connectLimit)
	defer cancel()
	s.err = s.handshake(ctx)
}

func (s *server) handshake(ctx context.Context) error {
	var hello struct {
		Version string `json:"protocolVersion"`
	}
	err := s.request(ctx, "initialize", json.RawMessage(`{"protocolVersion":"`+protocol+
		`","capabilities":{},"clientInfo":{"name":"aisandbox-scripted","version":"1"}}`), &hello)
	if err != nil {
		return err
	}
	if hello.Version != "" && !strings.ContainsAny(hello.Version, "\r\n") {
		s.version = hello.Version
	}
	if err := s.notify(ctx, "notifications/initialized"); err != nil {
		return err
	}
	cursor := ""
	for range 100 {
		params := json.RawMessage(`{}`)
		if cursor != "" {
			if params, err = marshal(map[string]string{"cursor": cursor}); err != nil {
				return err
			}
		}
		var list struct {
			Tools []struct {
				Name string `json:"name"`
			} `json:"tools"`
			Next string `json:"nextCursor"`
		}
		if err := s.request(ctx, "tools/list", params, &list); err != nil {
			return err
		}
		for _, t := range list.Tools {
			if len(s.tools) == maxTools {
				return fmt.Errorf("more than %d tools", maxTools)
			}
			s.tools = append(s.tools, t.Name)
		}
		if cursor = list.Next; cursor == "" {
			return nil
		}
	}
	return errors.New("the list of tools does not end")
}

// call calls a tool. With useID, that id goes along, as it does for a permission.
func (s *server) call(ctx context.Context, tool string, args json.RawMessage, useID string) toolResult {
	if s.err != nil {
		return failed(fmt.Sprintf("the MCP server %s can't be used: %v", s.name, s.err))
	}
	params := struct {
		Name      string            `json:"name"`
		Arguments json.RawMessage   `json:"arguments"`
		Meta      map[string]string `json:"_meta,omitempty"`
	}{Name: tool, Arguments: args}
	if useID != "" {
		params.Meta = map[string]string{"claudecode/toolUseId": useID}
	}
	raw, err := marshal(params)
	if err != nil {
		return failed(err.Error())
	}
	limited, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	var res struct {
		Content json.RawMessage `json:"content"`
		IsError bool            `json:"isError"`
	}
	if err := s.request(limited, "tools/call", raw, &res); err != nil {
		if ctx.Err() != nil {
			return toolResult{aborted: true}
		}
		return failed(fmt.Sprintf("the MCP server %s: %v", s.name, err))
	}
	if res.IsError {
		return failed(contentText(res.Content))
	}
	if len(res.Content) == 0 || res.Content[0] != '[' {
		res.Content = json.RawMessage("[]")
	}
	return toolResult{content: res.Content, structured: res.Content}
}

// contentText joins the texts of a content list, one a line.
func contentText(raw json.RawMessage) string {
	var blocks []struct {
		Type string `json:"type"`
		Text string `json:"text"`
	}
	if json.Unmarshal(raw, &blocks) != nil {
		return ""
	}
	var texts []string
	for _, b := range blocks {
		if b.Type == "text" {
			texts = append(texts, b.Text)
		}
	}
	return strings.Join(texts, "\n")
}

// rpcMessage is one JSON-RPC message, in either direction.
type rpcMessage struct {
	JSONRPC string          `json:"jsonrpc"`
	ID      json.RawMessage `json:"id,omitempty"`
	Method  string          `json:"method,omitempty"`
	Params  json.RawMessage `json:"params,omitempty"`
	Result  json.RawMessage `json:"result,omitempty"`
	Error   *rpcError       `json:"error,omitempty"`
}

type rpcError struct {
	Code    int    `json:"code"`
	Message string `json:"message"`
}

func (s *server) request(ctx context.Context, method string, params json.RawMessage, into any) error {
	s.next++
	id := fmt.Appendf(nil, "%d", s.next)
	r, err := s.post(ctx, rpcMessage{JSONRPC: "2.0", ID: id, Method: method, Params: params})
	if err != nil {
		return err
	}
	defer r.Close()
	if r.status != 200 {
		return fmt.Errorf("%s: HTTP status %d", method, r.status)
	}
	if v := r.header["mcp-session-id"]; v != "" {
		s.session = v
	}
	m, err := r.answer(id)
	if err != nil {
		return fmt.Errorf("%s: %w", method, err)
	}
	if m.Error != nil {
		return fmt.Errorf("%s: error %d: %s", method, m.Error.Code, cut(m.Error.Message, 1000))
	}
	if err := json.Unmarshal(m.Result, into); err != nil {
		return fmt.Errorf("%s: the result: %w", method, err)
	}
	return nil
}

func (s *server) notify(ctx context.Context, method string) error {
	r, err := s.post(ctx, rpcMessage{JSONRPC: "2.0", Method: method})
	if err != nil {
		return err
	}
	defer r.Close()
	if r.status/100 != 2 {
		return fmt.Errorf("%s: HTTP status %d", method, r.status)
	}
	return nil
}

func (s *server) post(ctx context.Context, m rpcMessage) (*response, error) {
	body, err := marshal(m)
	if err != nil {
		return nil, err
	}
	headers := [][2]string{{"Content-Type", "application/json"}, {"Accept", "application/json, text/event-stream"}}
	if m.Method != "initialize" {
		headers = append(headers, [2]string{"MCP-Protocol-Version", s.version})
		if s.session != "" {
			headers = append(headers, [2]string{"Mcp-Session-Id", s.session})
		}
	}
	return post(ctx, s.target, append(headers, s.headers...), body)
}

// answer reads the message that answers id, from a JSON body or an event stream.
func (r *response) answer(id []byte) (*rpcMessage, error) {
	kind, _, _ := strings.Cut(r.header["content-type"], ";")
	if strings.TrimSpace(kind) != "text/event-stream" {
		b, err := r.all()
		if err != nil {
			return nil, err
		}
		var m rpcMessage
		if err := json.Unmarshal(b, &m); err != nil {
			return nil, err
		}
		if !bytes.Equal(bytes.TrimSpace(m.ID), id) {
			return nil, fmt.Errorf("the answer is for request %s, not %s", cut(string(m.ID), 40), id)
		}
		return &m, nil
	}
	for data, err := range r.events() {
		if err != nil {
			return nil, err
		}
		var m rpcMessage
		if json.Unmarshal(data, &m) == nil && bytes.Equal(bytes.TrimSpace(m.ID), id) && m.Method == "" {
			return &m, nil
		}
	}
	return nil, errors.New("the event stream ended without the answer")
}
