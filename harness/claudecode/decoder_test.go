package claudecode_test

import (
	"testing"

	"github.com/aisandbox-go/aisandbox/harness"
	"github.com/aisandbox-go/aisandbox/harness/claudecode"
	"github.com/aisandbox-go/aisandbox/harness/harnesstest"
	"github.com/aisandbox-go/aisandbox/provider"
)

const transcripts = "testdata/transcripts"

// suite is what the conformance suite and the fuzz target test.
func suite() harnesstest.Options {
	exit := func(code, signal int) harness.End {
		return harness.End{Exit: provider.Exit{Code: code, Signal: signal}}
	}
	return harnesstest.Options{
		Decoder:     newDecoder,
		Transcripts: transcripts,
		Golden:      "testdata/golden",
		Ends: map[string]harness.End{
			"14-resume-not-found.ndjson": {
				Exit:       provider.Exit{Code: 1},
				StderrTail: "No conversation found with session ID: 00000000-0000-4000-8000-000000000000\n",
			},
			"15-max-turns.ndjson":                 exit(1, 0),
			"16-api-401.ndjson":                   exit(1, 0),
			"17-api-500.ndjson":                   exit(1, 0),
			"25-structured-output-invalid.ndjson": exit(1, 0),
			"31-killed.ndjson":                    exit(137, 9),
			"31b-sigterm.ndjson":                  exit(143, 0),
			"32-sigint.ndjson":                    {Aborted: true},
			"34-refusal.ndjson":                   exit(1, 0),
			"39-not-logged-in.ndjson":             exit(1, 0),
		},
	}
}

func options(file string, newID func() string) claudecode.DecoderOptions {
	return claudecode.DecoderOptions{
		Model: "sonnet", RunID: harnesstest.RunID, ThreadID: "thread-1", NewID: newID,
		Structured: len(file) >= 2 && (file[:2] == "24" || file[:2] == "25" || file[:2] == "26"),
	}
}

func newDecoder(file string, newID func() string) harness.Decoder {
	return claudecode.NewDecoder(options(file, newID))
}

func TestTranscripts(t *testing.T) { harnesstest.Run(t, suite()) }

func FuzzDecoder(f *testing.F) { harnesstest.Fuzz(f, suite()) }
