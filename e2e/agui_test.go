package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"iter"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/harness"
	"github.com/aisandbox-go/aisandbox/harness/claudecode"
	"github.com/aisandbox-go/aisandbox/harness/harnesstest"
	"github.com/aisandbox-go/aisandbox/internal/testenv"
	"github.com/aisandbox-go/aisandbox/provider"
)

// aguiStream is a stream for the verifier, and what a client should make of it.
type aguiStream struct {
	Name  string `json:"name"`
	RunID string `json:"runId"`
	SSE   string `json:"sse"`

	events int
	text   string
	calls  int
	failed bool // ends with RUN_ERROR
}

type aguiVerdict struct {
	Name     string   `json:"name"`
	Events   int      `json:"events"`
	Text     string   `json:"text"`
	Calls    int      `json:"calls"`
	Error    string   `json:"error"`
	Warnings []string `json:"warnings"`
}

type entries []event.Event

// Entries is a log with time and offset on each event.
func (es entries) Entries(context.Context, event.Offset) iter.Seq2[event.Entry, error] {
	return func(yield func(event.Entry, error) bool) {
		for i, ev := range es {
			c := ev.Base()
			c.Timestamp = 1764460800000 + int64(i)
			if !yield(event.Entry{Offset: event.Offset(fmt.Sprintf("o:%d", i+1)), Event: ev.With(c)}, nil) {
				return
			}
		}
	}
}

// newAGUIStream sends events through the guard and the SSE writer.
func newAGUIStream(t *testing.T, name string, events []event.Event) aguiStream {
	t.Helper()
	g := event.NewGuard(event.GuardOptions{RunID: harnesstest.RunID, ThreadID: "thread-1"})
	var out entries
	for _, ev := range events {
		out = append(out, g.Push(ev)...)
	}
	out = append(out, g.Close(event.RunError{Message: "the stream ended"})...)
	s := aguiStream{Name: name, RunID: harnesstest.RunID, events: len(out)}
	for _, ev := range out {
		switch e := ev.(type) {
		case event.TextMessageContent:
			s.text += e.Delta
		case event.ToolCallStart:
			s.calls++
		case event.RunError:
			s.failed = true
		}
	}
	w := httptest.NewRecorder()
	if err := event.ServeSSE(w, httptest.NewRequest(http.MethodPost, "/", nil), out); err != nil {
		t.Fatal(err)
	}
	s.SSE = w.Body.String()
	return s
}

// verifyAGUI runs all streams through one process of the real client.
func verifyAGUI(t *testing.T, streams []aguiStream) []aguiVerdict {
	t.Helper()
	node := testenv.LookPath(t, "node", "install nodejs")
	testenv.NPM(t)
	var in bytes.Buffer
	enc := json.NewEncoder(&in)
	for _, s := range streams {
		if err := enc.Encode(s); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.CommandContext(t.Context(), node, "agui-verify.mjs")
	cmd.Dir = filepath.Join(testenv.Root(t), "e2e")
	cmd.Stdin = &in
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("agui-verify.mjs: %v\n%s", err, stderr.String())
	}
	var verdicts []aguiVerdict
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var v aguiVerdict
		if err := dec.Decode(&v); err == io.EOF {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		verdicts = append(verdicts, v)
	}
	if len(verdicts) != len(streams) {
		t.Fatalf("%d verdicts for %d streams\n%s", len(verdicts), len(streams), stderr.String())
	}
	return verdicts
}

// goldenEvents are the events of every recorded run, by name.
func goldenEvents(t *testing.T) map[string][]event.Event {
	t.Helper()
	dir := filepath.Join(testenv.Root(t), "harness", "claudecode", "testdata", "golden")
	files, err := filepath.Glob(filepath.Join(dir, "*.events.ndjson"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no golden events in %s (%v)", dir, err)
	}
	all := map[string][]event.Event{}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		name := strings.TrimSuffix(filepath.Base(f), ".events.ndjson")
		for line := range bytes.Lines(b) {
			ev, err := event.Decode(line)
			if err != nil {
				t.Fatalf("%s: %v", f, err)
			}
			all[name] = append(all[name], ev)
		}
	}
	return all
}

// TestAGUIClientAfterGuard shows the real client what the guard makes of streams
// that nobody should send: events of recorded runs lost, doubled and moved.
func TestAGUIClientAfterGuard(t *testing.T) {
	all := goldenEvents(t)
	rnd := rand.New(rand.NewPCG(1, 2))
	var streams []aguiStream
	for _, name := range slices.Sorted(maps.Keys(all)) {
		for i := range 10 {
			events := slices.Clone(all[name])
			// The end stays where it is, or most streams would be empty.
			body := events[:len(events)-1]
			for range 1 + rnd.IntN(len(body)) {
				a, b := rnd.IntN(len(body)), rnd.IntN(len(body))
				switch rnd.IntN(3) {
				case 0:
					body[a] = body[b]
				case 1:
					body[a], body[b] = body[b], body[a]
				case 2:
					body[a] = event.TextMessageContent{MessageID: "m", Delta: ""} // gone
				}
			}
			streams = append(streams, newAGUIStream(t, fmt.Sprintf("%s, mixed up %d", name, i), events))
		}
	}
	for i, v := range verifyAGUI(t, streams) {
		s := streams[i]
		if len(v.Warnings) > 0 || v.Events != s.events || (v.Error != "" && !s.failed) {
			t.Errorf("%s: %d events of %d, error %q, warnings %q\n%s", s.Name, v.Events, s.events, v.Error, v.Warnings, s.SSE)
		}
	}
}

// TestAGUIClient shows the real client the events of every recorded run, whole
// and broken off at many places.
func TestAGUIClient(t *testing.T) {
	var streams []aguiStream
	for name, events := range goldenEvents(t) {
		streams = append(streams, newAGUIStream(t, name, events))
		for n := 1; n < len(events)-1; n += 4 {
			streams = append(streams, newAGUIStream(t, fmt.Sprintf("%s, first %d events", name, n), events[:n]))
		}
	}
	// The decoder's own endings, when the program dies in the middle.
	for _, f := range []string{"05-parallel-tools", "02-thinking", "19-midstream-disconnect", "27-background-task"} {
		raw, err := os.ReadFile(filepath.Join(testenv.Root(t), "harness", "claudecode", "testdata", "transcripts", f+".ndjson"))
		if err != nil {
			t.Fatal(err)
		}
		lines := bytes.SplitAfter(raw, []byte("\n"))
		for n := range lines {
			d := claudecode.NewDecoder(claudecode.DecoderOptions{Model: "sonnet", RunID: harnesstest.RunID, ThreadID: "thread-1"})
			events, err := harnesstest.Decode(d, bytes.Join(lines[:n], nil), 0, harness.End{Exit: provider.Exit{Code: 137, Signal: 9}})
			if err != nil {
				t.Fatal(err)
			}
			streams = append(streams, newAGUIStream(t, fmt.Sprintf("%s, killed after line %d", f, n), events))
		}
	}
	for i, v := range verifyAGUI(t, streams) {
		s := streams[i]
		if len(v.Warnings) > 0 {
			t.Errorf("%s: the client warns: %q", s.Name, v.Warnings)
		}
		if v.Events != s.events || v.Text != s.text || v.Calls != s.calls || (v.Error != "" && !s.failed) {
			t.Errorf("%s: the client saw %d events, text %q, %d calls, error %q; want %d, %q, %d, an error: %v\n%s",
				s.Name, v.Events, v.Text, v.Calls, v.Error, s.events, s.text, s.calls, s.failed, s.SSE)
		}
	}
}

// TestAGUIClientRefuses shows that the check can fail: each stream breaks a rule.
func TestAGUIClientRefuses(t *testing.T) {
	good := newAGUIStream(t, "good", []event.Event{
		event.RunStarted{RunID: harnesstest.RunID, ThreadID: "thread-1"},
		event.TextMessageStart{MessageID: "m", Role: "assistant"}, event.TextMessageContent{MessageID: "m", Delta: "hi"}, event.TextMessageEnd{MessageID: "m"},
		event.RunFinished{RunID: harnesstest.RunID, ThreadID: "thread-1"},
	})
	broken := func(name, from, to string) aguiStream {
		s := good
		s.Name, s.SSE = name, strings.Replace(good.SSE, from, to, 1)
		if s.SSE == good.SSE {
			t.Fatalf("%s changes nothing", name)
		}
		return s
	}
	streams := []aguiStream{
		good,
		broken("a custom event first", `data: {"type":"RUN_STARTED"`, `data: {"type":"CUSTOM","name":"run.accepted","value":{}}`+"\n\n"+`data: {"type":"RUN_STARTED"`),
		broken("text without a start", `"type":"TEXT_MESSAGE_START"`, `"type":"TEXT_MESSAGE_END"`),
		broken("text open at the end", `"type":"TEXT_MESSAGE_END"`, `"type":"STEP_STARTED","stepName":"s"`),
		broken("an unknown field", `"role":"assistant"`, `"role":"assistant","model":"x"`),
		broken("usage as an object", `"runId":"run-1"}`, `"runId":"run-1","usage":{"inputTokens":1}}`),
		broken("a closing marker", `id: o:5`, "data: [DONE]\n\nid: o:5"),
	}
	for i, v := range verifyAGUI(t, streams) {
		if bad := v.Error != "" || len(v.Warnings) > 0; bad != (i > 0) {
			t.Errorf("%s: error %q, warnings %q", v.Name, v.Error, v.Warnings)
		}
	}
}
