package modeltest_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"

	"github.com/aisandbox-go/aisandbox/modeltest"
)

func TestStartListensOnLoopbackOnly(t *testing.T) {
	for _, addr := range []string{"0.0.0.0:0", ":0", "[::]:0", "example.com:0", "10.0.0.1:0", "127.0.0.1", "", "192.168.1.1:80"} {
		s, err := modeltest.Start(t.Context(), addr, http.NotFoundHandler())
		var ae *modeltest.AddrError
		if !errors.As(err, &ae) || ae.Addr != addr || ae.Problem == "" || ae.Cure == "" {
			t.Errorf("%q: %v, %v", addr, s, err)
		}
	}
	for _, addr := range []string{"127.0.0.1:0", "localhost:0", "127.9.9.9:0"} {
		s, err := modeltest.Start(t.Context(), addr, http.NotFoundHandler())
		if err != nil {
			t.Errorf("%q: %v", addr, err)
			continue
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestStartOnATakenPort(t *testing.T) {
	s, err := modeltest.Start(t.Context(), "127.0.0.1:0", http.NotFoundHandler())
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	addr := strings.TrimPrefix(s.URL, "http://")
	if _, err := modeltest.Start(t.Context(), addr, http.NotFoundHandler()); err == nil || !strings.Contains(err.Error(), addr) {
		t.Errorf("error %v", err)
	}
}

func TestServerEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	m, err := modeltest.New(parse(t, "turns: [{no_answer: true}]"), modeltest.Options{})
	if err != nil {
		t.Fatal(err)
	}
	s, err := modeltest.Start(ctx, "127.0.0.1:0", m)
	if err != nil {
		t.Fatal(err)
	}
	c, done := client(t), make(chan error, 1)
	go func() {
		_, err := postContext(t.Context(), c, s.URL, streaming)
		done <- err
	}()
	for len(m.Requests()) == 0 {
		runtime.Gosched()
	}
	cancel() // ends the server as Close does
	if err := <-done; err == nil {
		t.Error("the hanging request was answered")
	}
	for range 2 {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
	if _, err := postContext(t.Context(), c, s.URL, streaming); err == nil {
		t.Error("still serving")
	}
}

// fakeTB records how NewServer fails.
type fakeTB struct{ fatal string }

func (f *fakeTB) Helper()        {}
func (f *fakeTB) Cleanup(func()) {}
func (f *fakeTB) Fatalf(format string, a ...any) {
	f.fatal = fmt.Sprintf(format, a...)
	runtime.Goexit()
}

func TestNewServerRefusesABadScript(t *testing.T) {
	tb, done := &fakeTB{}, make(chan struct{})
	go func() {
		defer close(done)
		modeltest.NewServer(tb, modeltest.Script{Name: "bad"})
	}()
	<-done
	if tb.fatal != "modeltest: bad: turns: no turns (write at least one)" {
		t.Errorf("%q", tb.fatal)
	}
}

// TestNoTestingInTheProduct guards the reason for the TB interface.
func TestNoTestingInTheProduct(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", ".").Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range strings.Fields(string(out)) {
		if p == "testing" || p == "net/http/httptest" || p == "text/template" {
			t.Errorf("imports %s", p)
		}
	}
}

// TestDocumentedScripts keeps the scripts of the documentation right.
func TestDocumentedScripts(t *testing.T) {
	doc, err := os.ReadFile("../docs/mock-model.md")
	if err != nil {
		t.Fatal(err)
	}
	example, err := os.ReadFile("testdata/fix-bug.yaml")
	if err != nil {
		t.Fatal(err)
	}
	parts := strings.Split(string(doc), "```yaml\n")[1:]
	if len(parts) != 2 {
		t.Fatalf("%d scripts", len(parts))
	}
	for i, p := range parts {
		script, _, _ := strings.Cut(p, "```")
		parse(t, script)
		if i == 0 && script != string(example) {
			t.Error("the example differs from testdata/fix-bug.yaml")
		}
	}
}

func FuzzRequest(f *testing.F) {
	f.Add([]byte(streaming))
	f.Add([]byte(plain))
	f.Add([]byte(`{"system":[{"type":"text","text":"a"}],"tools":[{"name":"B"}],"messages":[{"role":"user","content":[{"type":"tool_result","tool_use_id":"t","content":[{"type":"text","text":"x"}]}]}]}`))
	f.Add([]byte(`{"messages":[null,{"content":null}],"system":null,"tools":[null]}`))
	s, err := modeltest.ParseScript("f", []byte(`
capture: {c: {from: body, regexp: '.?'}}
turns: [{blocks: [{type: text, text: '{{request.first_user}}{{request.last_user}}{{request.system}}{{request.last_tool_result}}{{request.capture.c}}{{request.model}}'}, {type: tool_use, name: B, input: {a: '{{request.last_user}}'}, pieces: 3}]}]
after: repeat-last
`))
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		m, err := modeltest.New(s, modeltest.Options{})
		if err != nil {
			t.Fatal(err)
		}
		w := httptest.NewRecorder()
		m.ServeHTTP(w, httptest.NewRequest("POST", "/v1/messages", strings.NewReader(string(body))))
		if w.Code != 200 && w.Code != 400 {
			t.Errorf("status %d", w.Code)
		}
		if strings.HasPrefix(w.Header().Get("Content-Type"), "application/json") {
			if !validJSON(w.Body.String()) {
				t.Errorf("not JSON: %s", w.Body)
			}
			return
		}
		for _, e := range events(w.Body.Bytes()) {
			if !validJSON(e.Data) {
				t.Errorf("not JSON: %s", e.Data)
			}
		}
		if got := names(events(w.Body.Bytes())); !strings.HasPrefix(got, "message_start ") || !strings.HasSuffix(got, " message_stop") {
			t.Errorf("events %s", got)
		}
	})
}
