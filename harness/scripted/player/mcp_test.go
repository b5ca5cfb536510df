package player_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/aisandbox-go/aisandbox/harness/scripted/player"
)

// mcpServer is a small MCP server over HTTP. It answers in the form that style
// names: json, chunked, sse.
type mcpServer struct {
	t     *testing.T
	style string
	tools map[string]func(args json.RawMessage) (content string, isError bool)
	hold  chan struct{} // not nil: the tool "hold" waits for it

	mu    sync.Mutex
	calls []string
}

func (m *mcpServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var req struct {
		ID     json.RawMessage
		Method string
		Params struct {
			Name      string
			Cursor    string
			Arguments json.RawMessage
			Meta      map[string]any `json:"_meta"`
		}
	}
	if err := json.NewDecoder(r.Body).Decode(&req); err != nil {
		m.t.Errorf("request: %v", err)
	}
	if r.Header.Get("Authorization") != "Bearer tok" || r.URL.String() != "/mcp?x=1" {
		http.Error(w, "no", http.StatusUnauthorized)
		return
	}
	if req.Method != "initialize" && (r.Header.Get("Mcp-Session-Id") != "s1" || r.Header.Get("MCP-Protocol-Version") != "2025-06-18") {
		http.Error(w, "no session", http.StatusBadRequest)
		return
	}
	var result any
	switch req.Method {
	case "initialize":
		w.Header().Set("Mcp-Session-Id", "s1")
		result = map[string]any{"protocolVersion": "2025-06-18", "capabilities": map[string]any{}}
	case "notifications/initialized":
		w.WriteHeader(http.StatusAccepted)
		return
	case "tools/list":
		// One tool a page.
		var names []string
		for n := range m.tools {
			names = append(names, n)
		}
		slices.Sort(names)
		i := 0
		fmt.Sscan(req.Params.Cursor, &i)
		page := map[string]any{"tools": []any{map[string]string{"name": names[i]}}}
		if i+1 < len(names) {
			page["nextCursor"] = fmt.Sprint(i + 1)
		}
		result = page
	case "tools/call":
		m.mu.Lock()
		m.calls = append(m.calls, fmt.Sprintf("%s %s %v", req.Params.Name, req.Params.Arguments, req.Params.Meta["claudecode/toolUseId"] != nil))
		m.mu.Unlock()
		if req.Params.Name == "hold" {
			select {
			case <-m.hold:
			case <-r.Context().Done():
			}
			return
		}
		tool := m.tools[req.Params.Name]
		if tool == nil {
			m.answer(w, req.ID, map[string]any{"error": map[string]any{"code": -32602, "message": "no such tool"}})
			return
		}
		text, isError := tool(req.Params.Arguments)
		result = map[string]any{"content": []any{map[string]string{"type": "text", "text": text}}, "isError": isError}
	}
	m.answer(w, req.ID, map[string]any{"result": result})
}

func (m *mcpServer) answer(w http.ResponseWriter, id json.RawMessage, body map[string]any) {
	body["jsonrpc"], body["id"] = "2.0", id
	raw, err := json.Marshal(body)
	if err != nil {
		m.t.Error(err)
	}
	switch m.style {
	case "json":
		w.Header().Set("Content-Type", "application/json; charset=utf-8")
		w.Write(raw)
	case "chunked":
		w.Header().Set("Content-Type", "application/json")
		for _, b := range [][]byte{raw[:5], raw[5:]} {
			w.Write(b)
			w.(http.Flusher).Flush()
		}
	case "sse":
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprintf(w, ": hello\n\nevent: message\ndata: {\"jsonrpc\":\"2.0\",\"method\":\"notifications/progress\"}\n\nevent: message\r\ndata: %s\r\n\r\n", raw)
		w.(http.Flusher).Flush()
	}
}

// config starts the server and writes the file that names it.
func (m *mcpServer) config(extra string) (file string) {
	srv := httptest.NewServer(m)
	m.t.Cleanup(srv.Close)
	return mcpConfig(m.t, fmt.Sprintf(`"bridge":{"type":"http","url":"%s/mcp?x=1","headers":{"Authorization":"Bearer tok"}}%s`, srv.URL, extra))
}

func mcpConfig(t *testing.T, servers string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "mcp.json")
	if err := os.WriteFile(file, []byte(`{"mcpServers":{`+servers+`}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

func TestCall(t *testing.T) {
	for _, style := range []string{"json", "chunked", "sse"} {
		t.Run(style, func(t *testing.T) {
			big := strings.Repeat("b", 200_000)
			m := &mcpServer{t: t, style: style, tools: map[string]func(json.RawMessage) (string, bool){
				"look_up": func(args json.RawMessage) (string, bool) { return "got " + string(args), false },
				"fail":    func(json.RawMessage) (string, bool) { return "ticket not found", true },
				"big":     func(json.RawMessage) (string, bool) { return big, false },
			}}
			s := newStage(t)
			p := s.play([]player.Step{
				{Call: &player.Call{Tool: "look_up", Args: json.RawMessage(`{"b":1,"a":"x"}`)}},
				{Call: &player.Call{Tool: "mcp__bridge__fail"}},
				{Call: &player.Call{Tool: "big"}},
				{Call: &player.Call{Tool: "mcp__bridge__nope"}},
				{Call: &player.Call{Tool: "mcp__dead__x"}},
				{Say: "{{last_result}}"},
			}, "--mcp-config", m.config(`,"dead":{"type":"http","url":"http://127.0.0.1:1/"}`))
			if p.code != 0 {
				t.Fatalf("exit %d, stderr %q", p.code, p.stderr)
			}
			got := p.calls()
			if !strings.Contains(got[4].Content, "the MCP server dead can't be used: dial tcp 127.0.0.1:1") {
				t.Errorf("dead server: %q", got[4].Content)
			}
			got[4].Content = ""
			want := []call{
				{"mcp__bridge__look_up", `{"a":"x","b":1}`, `[{"text":"got {\"b\":1,\"a\":\"x\"}","type":"text"}]`, false},
				{"mcp__bridge__fail", "{}", "ticket not found", true},
				{"mcp__bridge__big", "{}", `[{"text":"` + big + `","type":"text"}]`, false},
				{"mcp__bridge__nope", "{}", "no such tool: mcp__bridge__nope", true},
				{"mcp__dead__x", "{}", "", true},
			}
			if d := cmp.Diff(want, got); d != "" {
				t.Errorf("-want +got\n%s", d)
			}
			if d := cmp.Diff([]any{map[string]any{"name": "bridge", "status": "connected"}, map[string]any{"name": "dead", "status": "failed"}},
				p.lines[0]["mcp_servers"]); d != "" {
				t.Errorf("servers: -want +got\n%s", d)
			}
			if d := cmp.Diff([]any{"Bash", "Edit", "Write", "mcp__bridge__big", "mcp__bridge__fail", "mcp__bridge__look_up"}, p.lines[0]["tools"]); d != "" {
				t.Errorf("tools: -want +got\n%s", d)
			}
			if name := get(p.of("assistant")[0], "tool_use_meta", 0, "display_name"); name != "Look Up" {
				t.Errorf("display name %v", name)
			}
		})
	}
}

func TestAsk(t *testing.T) {
	m := &mcpServer{t: t, style: "json", tools: map[string]func(json.RawMessage) (string, bool){
		"approve": func(args json.RawMessage) (string, bool) {
			var a struct {
				ToolName  string          `json:"tool_name"`
				Input     json.RawMessage `json:"input"`
				ToolUseID string          `json:"tool_use_id"`
			}
			if err := json.Unmarshal(args, &a); err != nil || !strings.HasPrefix(a.ToolUseID, "toolu_") {
				t.Errorf("arguments %s: %v", args, err)
			}
			switch {
			case strings.Contains(string(a.Input), "allow"):
				return `{"behavior":"allow","updatedInput":` + strings.ReplaceAll(string(a.Input), "allow", "changed") + `}`, false
			case strings.Contains(string(a.Input), "bare"):
				return `{"behavior":"allow"}`, false
			case strings.Contains(string(a.Input), "broken"):
				return "the bridge is broken", true
			}
			return `{"behavior":"deny","message":"not ` + a.ToolName + `"}`, false
		},
		"echo": func(args json.RawMessage) (string, bool) { return string(args), false },
	}}
	s := newStage(t)
	ask := func(tool, input string) player.Step {
		return player.Step{Ask: &player.Ask{Tool: tool, Input: json.RawMessage(input)}}
	}
	p := s.play([]player.Step{
		ask("Bash", `{"command":"echo allow"}`),
		ask("Bash", `{"command":"touch denied"}`),
		ask("Bash", `{"command":"touch bare"}`),
		ask("Bash", `{"command":"touch broken"}`),
		ask("echo", `{"x":"allow"}`),
		{Run: "ls | wc -l | tr -d ' '"},
	}, "--mcp-config", m.config(""), "--permission-prompt-tool", "mcp__bridge__approve", "--permission-mode", "default")
	var got []string
	for _, c := range p.calls() {
		got = append(got, fmt.Sprintf("%s %v: %.60s", c.Name, c.Error, c.Content))
	}
	want := []string{
		"Bash false: changed",
		"Bash true: not Bash",
		"Bash true: the permission prompt tool answered neither allow with updat",
		"Bash true: the bridge is broken",
		`mcp__bridge__echo false: [{"text":"{\"x\":\"changed\"}","type":"text"}]`,
		"Bash false: 0",
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("-want +got\n%s", d)
	}
	denials, _ := p.result()["permission_denials"].([]any)
	if len(denials) != 1 || get(denials[0], "tool_input", "command") != "touch denied" {
		t.Errorf("denials %v", denials)
	}
	if tools := fmt.Sprint(p.lines[0]["tools"]); strings.Contains(tools, "approve") {
		t.Errorf("the prompt tool is offered: %s", tools)
	}
	if len(m.calls) != 6 || !strings.HasSuffix(m.calls[0], " true") || !strings.HasSuffix(m.calls[5], " false") {
		t.Errorf("calls %q", m.calls)
	}

	// Nobody to ask.
	p = s.play([]player.Step{ask("Bash", `{"command":"echo x"}`)}, "--permission-mode", "default")
	if c := p.calls()[0]; !c.Error || !strings.Contains(c.Content, "nobody to ask") {
		t.Errorf("%v", c)
	}
	// A prompt tool that isn't there ends the run without a result.
	p = s.play([]player.Step{{Say: "a"}}, "--mcp-config", m.config(""), "--permission-prompt-tool", "mcp__bridge__other")
	if p.code != 1 || len(p.lines) != 1 || !strings.Contains(p.stderr, "mcp__bridge__other was not found") {
		t.Errorf("exit %d, %d lines, stderr %q", p.code, len(p.lines), p.stderr)
	}
}

func TestInterruptedCall(t *testing.T) {
	m := &mcpServer{t: t, style: "json", hold: make(chan struct{}), tools: map[string]func(json.RawMessage) (string, bool){"hold": nil}}
	s := newStage(t)
	cmd := s.command([]player.Step{{Call: &player.Call{Tool: "hold"}}}, "--mcp-config", m.config(""))
	var out strings.Builder
	cmd.Stdout = &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	until(t, "the call", func() bool { m.mu.Lock(); defer m.mu.Unlock(); return len(m.calls) == 1 })
	if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	err := cmd.Wait()
	p := ended(t, cmd, err, []byte(out.String()), "")
	if r := p.result(); p.code != 0 || r["terminal_reason"] != "aborted_tools" || !p.calls()[0].Error {
		t.Errorf("exit %d, %v", p.code, r)
	}
}

// A server that answers rubbish gives a tool error, in bounded time and memory.
func TestBadServers(t *testing.T) {
	for name, reply := range map[string]string{
		"closed":       "",
		"no http":      "SSH-2.0-x\r\n\r\n",
		"status":       "HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n",
		"redirect":     "HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1/\r\nContent-Length: 0\r\n\r\n",
		"endless head": "HTTP/1.1 200 OK\r\n" + strings.Repeat("X: y\r\n", 50_000) + "\r\n{}",
		"long line":    "HTTP/1.1 200 OK\r\nX: " + strings.Repeat("y", 1<<20) + "\r\n\r\n{}",
		"short body":   "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}",
		"bad length":   "HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n{}",
		"bad chunk":    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}",
		"huge chunk":   "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n{}",
		"cut chunk":    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n10\r\n{}",
		"no json":      "HTTP/1.1 200 OK\r\n\r\nhello",
		"other id":     "HTTP/1.1 200 OK\r\n\r\n{\"jsonrpc\":\"2.0\",\"id\":77,\"result\":{}}",
		"empty stream": "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: {}\n\n",
		"huge body":    "HTTP/1.1 200 OK\r\n\r\n" + strings.Repeat(" ", 17<<20),
		"huge event":   "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + strings.Repeat("data: x\n", 3<<20),
	} {
		t.Run(name, func(t *testing.T) {
			srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				io.Copy(io.Discard, r.Body)
				conn, _, err := w.(http.Hijacker).Hijack()
				if err != nil {
					t.Error(err)
					return
				}
				io.WriteString(conn, reply)
				conn.Close()
			}))
			defer srv.Close()
			s := newStage(t)
			p := s.play([]player.Step{{Call: &player.Call{Tool: "mcp__bad__x"}}},
				"--mcp-config", mcpConfig(t, `"bad":{"type":"http","url":"`+srv.URL+`"}`))
			if p.code != 0 || !p.calls()[0].Error || !strings.Contains(p.calls()[0].Content, "the MCP server bad can't be used: ") {
				t.Errorf("exit %d, %v", p.code, p.calls())
			}
			if want := map[string]string{"huge body": "longer than 16777216", "huge event": "longer than 16777216", "endless head": "head of the answer is too long",
				"redirect": "HTTP status 302", "cut chunk": "unexpected EOF", "short body": "unexpected EOF"}[name]; !strings.Contains(p.calls()[0].Content, want) {
				t.Errorf("%q lacks %q", p.calls()[0].Content, want)
			}
		})
	}
}

func TestBadConfig(t *testing.T) {
	for servers, want := range map[string]string{
		`"a":{"type":"stdio"}`:                                              `type "stdio" is not http`,
		`"a":{"type":"http","url":"https://x/"}`:                            "is no http URL",
		`"a":{"type":"http","url":"http:///x"}`:                             "has no plain host",
		`"a":{"type":"http","url":"http://u:p@x/"}`:                         "has no plain host",
		`"a":{"type":"http","url":"http://x/ y"}`:                           "a character that no URL has",
		`"a":{"type":"http","url":"http://x/","headers":{"A":"b\r\nC: d"}}`: "can't be sent",
		`"a":{"type":"http","url":"http://x/","headers":{"A: b\r\nC":"d"}}`: "can't be sent",
		`"a":`: "invalid character",
	} {
		s := newStage(t)
		p := s.play([]player.Step{{Say: "a"}}, "--mcp-config", mcpConfig(t, servers))
		if p.code != 1 || len(p.stdout) != 0 || !strings.Contains(p.stderr, want) {
			t.Errorf("%s: exit %d, stderr %q lacks %q", servers, p.code, p.stderr, want)
		}
	}
}
