package harnesstest_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/harness"
	"github.com/aisandbox-go/aisandbox/harness/harnesstest"
)

// toy decodes lines of JSON, {"say":"…"} and {"end":true}; flaw breaks it.
type toy struct {
	flaw  string
	newID func() string
	begun bool
	ended bool
}

var chance int

func (d *toy) start(evs []event.Event) []event.Event {
	if d.begun {
		return evs
	}
	d.begun = true
	e := event.RunStarted{RunID: harnesstest.RunID, ThreadID: "thread-1"}
	if d.flaw == "a timestamp" {
		e.Timestamp = 5
	}
	return append(evs, e)
}

func (d *toy) Line(line []byte) ([]event.Event, error) {
	var l struct {
		Say *string
		End bool
		Raw json.RawMessage
	}
	if err := json.Unmarshal(line, &l); err != nil {
		if d.flaw == "garbage is an error" {
			return nil, errors.New("garbage")
		}
		return nil, nil
	}
	if l.End {
		d.ended = true
	}
	if l.Say == nil {
		return nil, nil
	}
	id := d.newID()
	switch d.flaw {
	case "ids by chance":
		chance++
		id = fmt.Sprint("id-", chance)
	case "no ids":
		id = "fixed"
	}
	evs := d.start(nil)
	evs = append(evs, event.TextMessageStart{MessageID: id, Role: "assistant"}, event.TextMessageContent{MessageID: id, Delta: *l.Say})
	if d.flaw != "text stays open" {
		evs = append(evs, event.TextMessageEnd{MessageID: id})
	}
	c := event.Custom{Name: "line", Value: bytes.Clone(line)}
	if d.flaw == "it keeps the line" {
		c.Value = line
	}
	return append(evs, c), nil
}

func (d *toy) Close(end harness.End) ([]event.Event, error) {
	evs := d.start(nil)
	switch {
	case end.Aborted && d.flaw != "an abort is an error like others":
		return append(evs, event.RunError{Message: "aborted", Code: "aborted"}), nil
	case !d.ended && d.flaw == "no terminal":
		return nil, nil
	case !d.ended:
		return append(evs, event.RunError{Message: "it ended early"}), nil
	}
	evs = append(evs, event.RunFinished{RunID: harnesstest.RunID, ThreadID: "thread-1"})
	if d.flaw == "two terminals" {
		evs = append(evs, event.RunError{Message: "again"})
	}
	return evs, nil
}

const flawVar = "HARNESSTEST_FLAW"

// TestToy is the suite on a decoder that may have a flaw.
func TestToy(t *testing.T) {
	dir := t.TempDir()
	transcript := `{"say":"one"}` + "\n" + `{"say":"two"}` + "\n" + `{"end":true}` + "\n"
	if err := os.WriteFile(filepath.Join(dir, "a.ndjson"), []byte(transcript), 0o600); err != nil {
		t.Fatal(err)
	}
	flaw := os.Getenv(flawVar)
	o := harnesstest.Options{
		Decoder:     func(_ string, newID func() string) harness.Decoder { return &toy{flaw: flaw, newID: newID} },
		Transcripts: dir, Golden: filepath.Join(dir, "golden"), Quiet: true,
	}
	if flaw != "no golden file" {
		t.Setenv("UPDATE_GOLDEN", "1")
		harnesstest.Run(t, o)
	}
	t.Setenv("UPDATE_GOLDEN", "")
	harnesstest.Run(t, o)
}

// TestSuiteCatches runs the suite on each flaw, in a process of its own, and wants
// the check that is there for it to fail.
func TestSuiteCatches(t *testing.T) {
	if os.Getenv(flawVar) != "" {
		t.Skip("this is that process")
	}
	for flaw, check := range map[string]string{
		"ids by chance": "replay", "no ids": "ids", "it keeps the line": "golden", "two terminals": "legal", "a timestamp": "legal",
		"text stays open": "legal", "garbage is an error": "garbage", "no terminal": "truncated", "an abort is an error like others": "truncated",
		"no golden file": "golden",
	} {
		t.Run(flaw, func(t *testing.T) {
			t.Parallel()
			cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestToy$")
			cmd.Env = append(os.Environ(), flawVar+"="+flaw)
			out, err := cmd.CombinedOutput()
			if err == nil {
				t.Fatal("the suite passes")
			}
			if flaw == "it keeps the line" {
				return // no event can be written: every check fails
			}
			if !strings.Contains(string(out), "FAIL: TestToy/a/"+check) && !strings.Contains(string(out), "FAIL: TestToy/"+check) {
				t.Errorf("the check %q does not fail:\n%s", check, out)
			}
		})
	}
}
