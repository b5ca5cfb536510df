// Package harnesstest is the conformance suite of a harness's decoder: recorded
// transcripts in, golden events out, and the same events again however the bytes
// arrive. A third party's decoder passes it with a folder of transcripts.
package harnesstest

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/harness"
	"github.com/aisandbox-go/aisandbox/provider"
)

// Options name what is tested. Decoder, Transcripts and Golden are required.
type Options struct {
	// Decoder returns a fresh decoder for the transcript of that file name. It
	// mints ids with newID alone.
	Decoder func(file string, newID func() string) harness.Decoder

	// Transcripts is a folder of recorded output, *.ndjson or *.jsonl. Golden is a
	// folder with one NAME.events.ndjson each; UPDATE_GOLDEN=1 rewrites it.
	Transcripts, Golden string

	// Ends tells by file name how the process ended; a missing one is exit 0.
	Ends map[string]harness.End

	// Quiet says that Decoder.Close never quotes what the process printed in an
	// error, so that garbage between the lines must change nothing at all.
	Quiet bool
}

// RunID is the run whose ids the golden files hold.
const RunID = "run-1"

// Run is the suite, one subtest for each transcript and check.
func Run(t *testing.T, o Options) {
	files := transcripts(t, o)
	anyID := false
	for _, file := range files {
		raw, err := os.ReadFile(filepath.Join(o.Transcripts, file))
		if err != nil {
			t.Fatal(err)
		}
		s := &suite{o: o, file: file, raw: raw, end: o.Ends[file], first: !anyID}
		t.Run(strings.TrimSuffix(file, filepath.Ext(file)), s.run)
		anyID = anyID || s.usesIDs
	}
	t.Run("ids", func(t *testing.T) {
		// Without a transcript that needs a minted id, the check for determinism
		// would pass a decoder that mints them at random.
		if !anyID {
			t.Error("no transcript makes the decoder mint an id")
		}
	})
}

func transcripts(t testing.TB, o Options) []string {
	t.Helper()
	entries, err := os.ReadDir(o.Transcripts)
	if err != nil {
		t.Fatal(err)
	}
	var files []string
	for _, e := range entries {
		if ext := filepath.Ext(e.Name()); ext == ".ndjson" || ext == ".jsonl" {
			files = append(files, e.Name())
		}
	}
	if len(files) == 0 {
		t.Fatalf("%s has no transcripts", o.Transcripts)
	}
	return files
}

// Decode feeds a whole output to a decoder, in pieces of at most chunk bytes, and
// closes it; chunk 0 is one piece.
func Decode(d harness.Decoder, raw []byte, chunk int, end harness.End) ([]event.Event, error) {
	var events []event.Event
	lines := harness.NewLines(0, func(line []byte) error {
		own := bytes.Clone(line)
		evs, err := d.Line(own)
		for i := range own {
			own[i] = 'X' // the slice is the caller's after the call
		}
		events = append(events, evs...)
		return err
	})
	if chunk <= 0 {
		chunk = max(len(raw), 1)
	}
	for piece := range slices.Chunk(raw, chunk) {
		if _, err := lines.Write(piece); err != nil {
			return events, err
		}
	}
	if err := lines.Close(); err != nil {
		return events, err
	}
	last, err := d.Close(end)
	return append(events, last...), err
}

// Encode is events as one JSON object a line.
func Encode(events []event.Event) ([]byte, error) {
	var b []byte
	for _, ev := range events {
		var err error
		if b, err = event.AppendNDJSON(b, event.Entry{Event: ev}); err != nil {
			return nil, err
		}
	}
	return b, nil
}

type suite struct {
	o       Options
	file    string
	raw     []byte
	end     harness.End
	first   bool // of those that mint ids; it gets the checks that are slow and the same for all
	usesIDs bool
}

func (s *suite) decode(t *testing.T, raw []byte, chunk int, end harness.End) []event.Event {
	t.Helper()
	events, err := Decode(s.o.Decoder(s.file, event.NewIDs(RunID)), raw, chunk, end)
	if err != nil {
		t.Fatalf("decode: %v", err)
	}
	return events
}

func lines(t *testing.T, events []event.Event) []string {
	t.Helper()
	b, err := Encode(events)
	if err != nil {
		t.Fatal(err)
	}
	return strings.SplitAfter(string(b), "\n")
}

func (s *suite) run(t *testing.T) {
	events := s.decode(t, s.raw, 0, s.end)
	want := lines(t, events)
	same := func(t *testing.T, how string, got []event.Event) {
		t.Helper()
		if d := cmp.Diff(want, lines(t, got)); d != "" {
			t.Errorf("%s gives other events (-whole +%s):\n%s", how, how, d)
		}
	}

	t.Run("golden", func(t *testing.T) { s.golden(t, strings.Join(want, "")) })
	t.Run("legal", func(t *testing.T) {
		if err := CheckRun(events); err != nil {
			t.Error(err)
		}
		// The guard has nothing to repair.
		g := event.NewGuard(event.GuardOptions{KeepParents: true})
		var through []event.Event
		for _, ev := range events {
			through = append(through, g.Push(ev)...)
		}
		same(t, "guarded", through)
	})
	t.Run("replay", func(t *testing.T) {
		same(t, "a replay", s.decode(t, s.raw, 0, s.end))
		random, err := Decode(s.o.Decoder(s.file, func() string { return rand.Text() }), s.raw, 0, s.end)
		if err != nil {
			t.Fatal(err)
		}
		s.usesIDs = !cmp.Equal(want, lines(t, random))
	})
	t.Run("split", func(t *testing.T) {
		same(t, "byte by byte", s.decode(t, s.raw, 1, s.end))
		same(t, "in sevens", s.decode(t, s.raw, 7, s.end))
		s.splits(t)
	})
	t.Run("line ends", func(t *testing.T) {
		crlf := bytes.ReplaceAll(s.raw, []byte("\n"), []byte("\r\n\r\n"))
		same(t, "with CRLF and blank lines", s.decode(t, crlf, 0, s.end))
		same(t, "without the last line end", s.decode(t, bytes.TrimRight(s.raw, "\n"), 0, s.end))
	})
	t.Run("garbage", func(t *testing.T) { s.garbage(t, events) })
	t.Run("truncated", s.truncated)
}

func (s *suite) golden(t *testing.T, got string) {
	name := filepath.Join(s.o.Golden, strings.TrimSuffix(s.file, filepath.Ext(s.file))+".events.ndjson")
	if os.Getenv("UPDATE_GOLDEN") == "1" {
		if err := os.MkdirAll(s.o.Golden, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(name)
	if err != nil {
		t.Fatalf("%v (UPDATE_GOLDEN=1 writes it)", err)
	}
	if d := cmp.Diff(strings.Split(string(want), "\n"), strings.Split(got, "\n")); d != "" {
		t.Errorf("events differ from %s (-golden +got):\n%s", name, d)
	}
	for i, line := range bytes.Split(bytes.TrimSpace(want), []byte("\n")) {
		ev, err := event.Decode(line)
		if err != nil {
			t.Fatalf("golden line %d does not decode: %v", i+1, err)
		}
		if again, err := event.Encode(ev); err != nil || !bytes.Equal(again, line) {
			t.Fatalf("golden line %d reads back as %s (%v)", i+1, again, err)
		}
	}
}

// splits cuts the bytes in two at every place, of a large transcript at as many
// as take no more than a moment: the lines must be the same. (Byte by byte has
// covered each place once.)
func (s *suite) splits(t *testing.T) {
	split := func(pieces ...[]byte) [][]byte {
		var got [][]byte
		l := harness.NewLines(0, func(line []byte) error { got = append(got, bytes.Clone(line)); return nil })
		for _, p := range pieces {
			if _, err := l.Write(p); err != nil {
				t.Fatal(err)
			}
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		return got
	}
	want := split(s.raw)
	step := 1 + len(s.raw)*len(s.raw)/(64<<20)
	for i := 0; i <= len(s.raw); i += step {
		if !slices.EqualFunc(want, split(s.raw[:i], s.raw[i:]), bytes.Equal) {
			t.Fatalf("split at byte %d gives other lines", i)
		}
	}
}

// garbage puts lines that mean nothing between all lines.
func (s *suite) garbage(t *testing.T, whole []event.Event) {
	noise := []string{
		"rubbish", "{", `{"type":"a_kind_from_the_future","x":{"y":[1,2]}}`, "null", "[]", `"text"`, "17", `{"type":5}`, "{}", "\xff\xfe\x00",
		`{"type":"` + strings.Repeat("x", 200<<10) + `"}`, strings.Repeat("y", 5<<20),
	}
	var b bytes.Buffer
	for i, line := range bytes.SplitAfter(s.raw, []byte("\n")) {
		b.WriteString(noise[i%10] + "\n")
		b.Write(line)
	}
	b.WriteString("\n" + noise[10] + "\n")
	if s.first {
		b.WriteString(noise[11] + "\n")
	}
	got := s.decode(t, b.Bytes(), 0, s.end)
	want := whole
	if !s.o.Quiet {
		want, got = quiet(want), quiet(got)
	}
	if d := cmp.Diff(lines(t, want), lines(t, got)); d != "" {
		t.Errorf("garbage between the lines changes the events:\n%s", d)
	}
}

// quiet takes out the message of an error, which may quote the output.
func quiet(events []event.Event) []event.Event {
	out := slices.Clone(events)
	for i, ev := range out {
		if e, ok := ev.(event.RunError); ok {
			e.Message = "message"
			out[i] = e
		}
	}
	return out
}

// truncated ends the output after every line and within every line, for each way
// in which a process can end.
func (s *suite) truncated(t *testing.T) {
	ends := map[string]harness.End{
		"exit 0":  {},
		"exit 1":  {Exit: provider.Exit{Code: 1}, StderrTail: "boom"},
		"killed":  {Exit: provider.Exit{Code: 137, Signal: 9}},
		"aborted": {Exit: provider.Exit{Code: 143, Signal: 15}, Aborted: true},
	}
	at := 0
	hows := slices.Sorted(maps.Keys(ends))
	for i, line := range bytes.SplitAfter(s.raw, []byte("\n")) {
		for j, n := range []int{at, at + len(line)/2} {
			for k, how := range hows {
				if !s.first && k != (i+j)%len(hows) {
					continue // the ends take turns; every cut is tried
				}
				end := ends[how]
				events := s.decode(t, s.raw[:n], 0, end)
				if err := CheckRun(events); err != nil {
					t.Fatalf("cut at line %d, byte %d, %s: %v", i, n, how, err)
				}
				if e, ok := events[len(events)-1].(event.RunError); end.Aborted && (!ok || e.Code != "aborted") {
					t.Fatalf("cut at line %d, byte %d: an aborted run ends with %v", i, n, events[len(events)-1])
				}
			}
		}
		at += len(line)
	}
}

// CheckRun says what is wrong with the events of one run: they must be legal, be
// one run, and carry neither timestamps nor empty texts.
func CheckRun(events []event.Event) error {
	if err := event.Validate(events); err != nil {
		return err
	}
	for i, ev := range events {
		terminal := ev.Type() == event.TypeRunFinished || ev.Type() == event.TypeRunError
		switch e := ev.(type) {
		case event.RunStarted:
			if i != 0 {
				return fmt.Errorf("event %d: a second RUN_STARTED", i)
			}
		case event.TextMessageContent:
			if e.Delta == "" {
				return fmt.Errorf("event %d: an empty delta", i)
			}
		}
		if terminal != (i == len(events)-1) {
			return fmt.Errorf("event %d: %s must be the last one and only there", i, ev.Type())
		}
		if ev.Base().Timestamp != 0 {
			return fmt.Errorf("event %d: a decoder sets no timestamps", i)
		}
	}
	if events[0].Type() != event.TypeRunStarted {
		return errors.New("the first event is not RUN_STARTED")
	}
	return nil
}

// Fuzz feeds arbitrary output to the decoder, the transcripts being the seeds:
// nothing panics, one terminal event comes last, the guard can make the rest
// legal, and the same bytes give the same events.
func Fuzz(f *testing.F, o Options) {
	for _, file := range transcripts(f, o) {
		raw, err := os.ReadFile(filepath.Join(o.Transcripts, file))
		if err != nil {
			f.Fatal(err)
		}
		if len(raw) < 64<<10 {
			f.Add(raw, 0)
			f.Add(raw[:len(raw)/2], 1)
		}
	}
	f.Fuzz(func(t *testing.T, raw []byte, code int) {
		end := harness.End{Exit: provider.Exit{Code: code & 0xff}, Aborted: code&0x100 != 0}
		decode := func(chunk int) []event.Event {
			events, err := Decode(o.Decoder("", event.NewIDs(RunID)), raw, chunk, end)
			if err != nil {
				t.Fatal(err)
			}
			return events
		}
		events := decode(0)
		a, err := Encode(events)
		if err != nil {
			t.Fatal(err)
		}
		if b, err := Encode(decode(3)); err != nil || !bytes.Equal(a, b) {
			t.Fatalf("the same bytes give other events:\n%s\n%s", a, b)
		}
		g := event.NewGuard(event.GuardOptions{RunID: RunID, ThreadID: "thread-1"})
		var through []event.Event
		for i, ev := range events {
			if g.Done() {
				t.Fatalf("event %d of %d comes after the terminal", i, len(events))
			}
			through = append(through, g.Push(ev)...)
		}
		if !g.Done() {
			t.Fatal("no terminal event")
		}
		if err := event.Validate(through); err != nil {
			t.Fatal(err)
		}
	})
}

var _ io.Writer = (*harness.Lines)(nil)
