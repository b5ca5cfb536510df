package modeltest_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/aisandbox-go/aisandbox/modeltest"
)

// event is one server-sent event as it was on the wire.
type event struct{ Name, Data string }

// reply is what a client saw. Err is the error of reading the body.
type reply struct {
	Status int
	Header http.Header
	Body   string
	Events []event
	Err    error
}

func client(t *testing.T) *http.Client {
	tr := &http.Transport{DisableCompression: true}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

func post(t *testing.T, url, body string, header ...string) reply {
	t.Helper()
	r, err := postContext(t.Context(), client(t), url, body, header...)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func postContext(ctx context.Context, c *http.Client, url, body string, header ...string) (reply, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/messages?beta=true", strings.NewReader(body))
	if err != nil {
		return reply{}, err
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := c.Do(req)
	if err != nil {
		return reply{}, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return reply{Status: resp.StatusCode, Header: resp.Header, Body: string(b), Events: events(b), Err: err}, nil
}

func events(b []byte) []event {
	var out []event
	sc := bufio.NewScanner(bytes.NewReader(b))
	sc.Buffer(nil, 64<<20)
	var e event
	for sc.Scan() {
		switch line := sc.Text(); {
		case line == "":
			out = append(out, e)
			e = event{}
		case strings.HasPrefix(line, "event: "):
			e.Name = line[len("event: "):]
		case strings.HasPrefix(line, "data: "):
			e.Data = line[len("data: "):]
		}
	}
	return out
}

func names(events []event) string {
	s := make([]string, len(events))
	for i, e := range events {
		s[i] = e.Name
	}
	return strings.Join(s, " ")
}

// datas returns the data of the events called name.
func datas(events []event, name string) []string {
	var out []string
	for _, e := range events {
		if e.Name == name {
			out = append(out, e.Data)
		}
	}
	return out
}

// text returns the joined text, thinking and tool input deltas of a stream.
func text(t *testing.T, r reply) string {
	t.Helper()
	var b strings.Builder
	for _, data := range datas(r.Events, "content_block_delta") {
		var e struct {
			Delta struct {
				Text        string
				Thinking    string
				PartialJSON string `json:"partial_json"`
			}
		}
		if err := json.Unmarshal([]byte(data), &e); err != nil {
			t.Errorf("%v in %s", err, data)
		}
		b.WriteString(e.Delta.Text + e.Delta.Thinking + e.Delta.PartialJSON)
	}
	return b.String()
}

// serve serves a script with fixed ids.
func serve(t *testing.T, s modeltest.Script) (*modeltest.Model, string) {
	t.Helper()
	if s.Name == "" {
		s.Name = "test"
	}
	m, err := modeltest.New(s, modeltest.Options{IDPrefix: "x"})
	if err != nil {
		t.Fatal(err)
	}
	srv, err := modeltest.Start(context.Background(), "127.0.0.1:0", m)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := srv.Close(); err != nil {
			t.Error(err)
		}
	})
	return m, srv.URL
}

func parse(t *testing.T, yaml string) modeltest.Script {
	t.Helper()
	s, err := modeltest.ParseScript("test.yaml", []byte(yaml))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

const (
	streaming = `{"model":"m1","stream":true,"messages":[{"role":"user","content":"hi"}]}`
	plain     = `{"model":"m1","messages":[{"role":"user","content":"hi"}]}`
)
