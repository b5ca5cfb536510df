//go:build linux

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/harness"
	"github.com/aisandbox-go/aisandbox/harness/claudecode"
)

// decodeCommand is the first argument of a child that decodes: a process of its
// own, so that the memory is that of decoding alone.
const decodeCommand = "decode-child"

// recording is the output of a real run with one tool turn, which is repeated.
const recording = "harness/claudecode/testdata/transcripts/03-bash.ndjson"

// hole is what stands for the turn's number in the lines of a turn; it has as many
// bytes as that number.
const hole = "%%%%%%%%"

// transcript is the output of a run of any length: what comes before the turns, a
// turn, and what comes after.
type transcript struct{ head, turn, tail []byte }

func loadTranscript(name string) (transcript, error) {
	var t transcript
	b, err := os.ReadFile(name)
	if err != nil {
		return t, err
	}
	raw := strings.ReplaceAll(string(b), "toolu_01", "toolu_"+hole)
	raw = strings.ReplaceAll(raw, "msg_fake_01", "msg_"+hole)
	part := &t.head
	for line := range strings.Lines(raw) {
		if part == &t.head && strings.Contains(line, `"message_start"`) {
			part = &t.turn
		}
		*part = append(*part, line...)
		if strings.Contains(line, `"tool_result"`) {
			part = &t.tail
		}
	}
	if bytes.Count(t.turn, []byte("\n")) < 10 || len(t.tail) == 0 || !bytes.Contains(t.turn, []byte(hole)) {
		return t, fmt.Errorf("%s has another shape than expected", name)
	}
	return t, nil
}

// play gives out the bytes of a run of n turns, a turn at a time.
func (t transcript) play(n int, write func([]byte) error) error {
	if err := write(t.head); err != nil {
		return err
	}
	var holes []int
	for at := 0; ; {
		i := bytes.Index(t.turn[at:], []byte(hole))
		if i < 0 {
			break
		}
		holes = append(holes, at+i)
		at += i + len(hole)
	}
	buf := bytes.Clone(t.turn)
	var id [len(hole)]byte
	for i := range n {
		copy(id[:], fmt.Sprintf("%0*d", len(hole), i))
		for _, at := range holes {
			copy(buf[at:], id[:])
		}
		if err := write(buf); err != nil {
			return err
		}
	}
	return write(t.tail)
}

// decoded is what a child tells. Peers tell the same.
type decoded struct {
	Events  int     `json:"events"`
	Lines   int     `json:"lines"`
	Seconds float64 `json:"seconds"`
	MaxRSS  float64 `json:"maxRSS"` // MB
}

// decodeMain is the child: RECORDING TURNS events|json. With "json" the lines are
// only parsed, into Go's general values.
func decodeMain(args []string) int {
	if err := decodeChild(args); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		return 1
	}
	return 0
}

func decodeChild(args []string) error {
	if len(args) != 3 {
		return errors.New("decode-child: RECORDING TURNS events|json")
	}
	t, err := loadTranscript(args[0])
	if err != nil {
		return err
	}
	n, err := strconv.Atoi(args[1])
	if err != nil {
		return err
	}
	var d decoded
	dec := claudecode.NewDecoder(claudecode.DecoderOptions{Model: "sonnet", RunID: "run-1", ThreadID: "thread-1"})
	lines := harness.NewLines(0, func(line []byte) error {
		d.Lines++
		if args[2] == "json" {
			var v any
			return json.Unmarshal(line, &v)
		}
		evs, err := dec.Line(line)
		d.Events += len(evs)
		return err
	})
	start := time.Now()
	if err := t.play(n, func(b []byte) error { _, err := lines.Write(b); return err }); err != nil {
		return err
	}
	if err := lines.Close(); err != nil {
		return err
	}
	evs, err := dec.Close(harness.End{})
	if err != nil {
		return err
	}
	if d.Events += len(evs); args[2] == "events" {
		if _, ok := evs[len(evs)-1].(event.RunFinished); !ok {
			return fmt.Errorf("the run ended with %T", evs[len(evs)-1])
		}
	}
	d.Seconds = time.Since(start).Seconds()
	// Not getrusage: its maximum is that of the parent, too, whose memory a new
	// process shares until it becomes another program.
	if d.MaxRSS, err = memoryOf("self", "VmHWM"); err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(d)
}

// memoryOf returns a field of a process's status that is an amount of memory, in MB.
func memoryOf(pid, field string) (float64, error) {
	v, ok := strings.CutSuffix(procField("/proc/"+pid+"/status", field), " kB")
	if !ok {
		return 0, fmt.Errorf("process %s tells no %s", pid, field)
	}
	kb, err := strconv.ParseFloat(v, 64)
	return kb * 1024 / 1e6, err
}

// child runs a program that prints a decoded.
func child(ctx context.Context, argv ...string) (decoded, error) {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	var errOut bytes.Buffer
	cmd.Stderr = &errOut
	out, err := cmd.Output()
	if err != nil {
		return decoded{}, fmt.Errorf("%s: %w: %s", filepath.Base(argv[0]), err, bytes.TrimSpace(errOut.Bytes()))
	}
	var d decoded
	if err := json.Unmarshal(out, &d); err != nil {
		return d, fmt.Errorf("%s: %w", filepath.Base(argv[0]), err)
	}
	return d, nil
}

// decodings are the runs of one kind.
type decodings struct{ rate, rss []float64 }

// decoder returns the op that runs a child, and where its findings go. perSecond
// picks what is counted.
func (e *env) decoder(ds *decodings, perSecond func(decoded) int, argv ...string) op {
	return func(ctx context.Context) (time.Duration, error) {
		d, err := child(ctx, argv...)
		if err != nil {
			return 0, err
		}
		ds.rate = append(ds.rate, float64(perSecond(d))/d.Seconds)
		ds.rss = append(ds.rss, d.MaxRSS)
		return time.Duration(d.Seconds * float64(time.Second)), nil
	}
}

func events(d decoded) int { return d.Events }
func lines(d decoded) int  { return d.Lines }

func decode(ctx context.Context, e *env) ([]Row, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	rec := filepath.Join(e.root, recording)
	const few, many = 20_000, 200_000
	var short, long, shortLines, shortJSON decodings
	_, err = interleave(ctx, e.rounds(3),
		side{do: e.decoder(&short, events, self, decodeCommand, rec, strconv.Itoa(few), "events")},
		side{do: e.decoder(&long, events, self, decodeCommand, rec, strconv.Itoa(many), "events")},
		side{do: e.decoder(&shortLines, lines, self, decodeCommand, rec, strconv.Itoa(few), "events")},
		side{do: e.decoder(&shortJSON, lines, self, decodeCommand, rec, strconv.Itoa(few), "json")})
	if err != nil {
		return nil, err
	}
	rows := []Row{
		{Metric: "decode claude stream-json, 20,000 tool turns", Unit: "events/s", HigherIsBetter: true, Ours: stat(short.rate)},
		{Metric: "decode claude stream-json, 200,000 tool turns", Unit: "events/s", HigherIsBetter: true, Ours: stat(long.rate), Baseline: "20,000 turns", Base: stat(short.rate)},
		{Metric: "decode, 20,000 tool turns, in lines", Unit: "lines/s", HigherIsBetter: true, Ours: stat(shortLines.rate), Baseline: "encoding/json into any", Base: stat(shortJSON.rate)},
		{Metric: "peak memory of decoding 200,000 tool turns", Unit: "MB", Ours: stat(long.rss), Baseline: "20,000 turns", Base: stat(short.rss)},
	}
	for i := range rows[:2] {
		r := &rows[i]
		r.goal("≥ 300,000 events/s", r.Ours.P50 >= 300_000)
	}
	rows[1].goal("linear within 1.2x", rows[1].better() >= 1/1.2)
	rows[3].goal("< 100 MB", rows[3].Ours.P50 < 100)
	rows[3].Note = "The largest resident set of a process that does nothing else."
	return rows, nil
}
