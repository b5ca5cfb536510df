// Package journal reads what a detached agent wrote: its output, line by line
// with the place of each line, and how it ended, verified with the run's secret
// (spec 04 §3 and §21.8).
//
// A journal comes in two forms, told apart by its first byte. Where a guest runs
// it consists of frames (package journal/frame), and its exit is signed over
// every line. Where none can run [Shell] writes plain lines and a last one that
// holds a secret word. Both are reached through provider.Reattacher.
package journal

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"time"

	"github.com/aisandbox-go/aisandbox/provider"
)

// The constants of spec 04 §3.8.
const (
	// AttachWait bounds the wait for a journal's first byte, and for a journal that
	// is not there yet.
	AttachWait = 10 * time.Second

	// MaxLine is the longest line, 64 MiB.
	MaxLine = 64 << 20

	pollEvery  = 250 * time.Millisecond
	probeEvery = 100 * time.Millisecond

	// maxOutage is how long a backend that can't be asked is asked again.
	maxOutage = 10 * time.Minute

	// sameDamage is how often damage must be found at one place: what a supervisor
	// took back, its disk being full, is damage to a reader that saw half of it.
	sameDamage = 3
)

// Kind says what a [Record] is.
type Kind uint8

// The kinds.
const (
	KindLine      Kind = iota + 1 // a line of stdout
	KindPartial                   // a last line without its newline
	KindStderr                    // a piece of stderr; the shell form has none before its exit
	KindHeartbeat                 // the supervisor lives
	KindExit                      // the end, verified; the last record
)

// Record is a piece of a journal.
type Record struct {
	// Off is the position in the journal just after the record: the coordinate of
	// what is made of it. The same bytes have the same positions for every reader.
	Off  int64
	Kind Kind

	// Data is the line without its newline, or the piece of stderr. It is valid
	// until the next record.
	Data []byte

	Exit provider.Exit // of KindExit
	Beat time.Time     // of KindHeartbeat, the sandbox's clock
}

// Options of a [Reader]. RunID and Nonce are those of the launch.
type Options struct {
	RunID string
	Nonce []byte

	// Poll reads in bounded steps instead of following, for backends where an open
	// read can't be ended (Traits.Kill is false).
	Poll bool

	MaxLine    int           // 0: MaxLine
	AttachWait time.Duration // 0: AttachWait; negative: no limit
}

// Reader reads one journal from its start to its end. Not for concurrent use.
type Reader struct {
	re    provider.Reattacher
	token string
	o     Options
	level int
}

// NewReader returns a reader of the journal of a token.
func NewReader(re provider.Reattacher, token string, o Options) *Reader {
	if o.MaxLine <= 0 {
		o.MaxLine = MaxLine
	}
	if o.AttachWait == 0 {
		o.AttachWait = AttachWait
	}
	return &Reader{re: re, token: token, o: o}
}

// Level is the strength of the exit's proof, spec 04 §21.8: 2 another user than
// the agent's signs it, 1 the agent's own, 0 not known before the first record.
func (r *Reader) Level() int { return r.level }

// Records yields what the journal holds and then what comes, up to the verified
// exit. The sequence is single use; a non-nil error is the last pair:
//   - [*AttachError]: nothing was ever read
//   - [*LineError], [*TornError], [*TamperedError]: it can't be believed
//   - [*EndedError]: the supervisor is gone and has not signed an exit
//   - one that wraps provider.ErrNotFound: the sandbox is gone
//   - the cause of ctx
//   - any other: the backend did not answer for ten minutes, which says nothing
//     about the agent
//
// [Definite] tells the last one from the others.
func (r *Reader) Records(ctx context.Context) iter.Seq2[Record, error] {
	return func(yield func(Record, error) bool) {
		s := &state{Reader: r, yield: yield}
		err := s.read(ctx)
		if err != nil && !errors.Is(err, errStop) {
			if ctx.Err() != nil {
				err = context.Cause(ctx)
			}
			yield(Record{}, err)
		}
	}
}

// Definite says that an error of [Reader.Records] is a fact about the run, which
// asking again will not change. Any other says nothing about the agent.
func Definite(err error) bool { return definite(err) }

func definite(err error) bool {
	for _, target := range []error{
		ErrAttachUnavailable, ErrLineTooLong, ErrTornFrame, ErrTampered, ErrEndedWithoutExit,
		provider.ErrNotFound, provider.ErrInvalid, errStop,
	} {
		if errors.Is(err, target) {
			return true
		}
	}
	return false
}

// errStop: the consumer is gone. errDone: the exit was yielded.
var (
	errStop = errors.New("stopped")
	errDone = errors.New("done")
)

// state is one reading.
type state struct {
	*Reader
	yield func(Record, error) bool

	dec     decoder
	off     int64 // where the next read starts
	bad     int64 // where damage was found
	badSeen int
	outage  time.Time // when the backend stopped to answer
}

// decoder makes records of bytes. It reads until the stream ends and returns
// where to go on.
type decoder interface {
	decode(src io.Reader, from int64, emit func(Record) error) (next int64, err error)
	// pending is the unfinished line at the end of what was read, for a journal
	// that ends without an exit.
	pending() (data []byte, off int64)
}

func (s *state) emit(rec Record) error {
	s.outage = time.Time{}
	if !s.yield(rec, nil) {
		return errStop
	}
	if rec.Kind == KindExit {
		return errDone
	}
	return nil
}

func (s *state) read(ctx context.Context) error {
	started := time.Now()
	for {
		before := s.off
		err := s.once(ctx, started)
		switch {
		case errors.Is(err, errDone):
			return nil
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case err == nil:
			s.outage = time.Time{}
		case s.damaged(err):
			continue
		case errors.Is(err, fs.ErrNotExist) && !definite(err):
			// No journal: the look at the process decides.
		case definite(err):
			return err
		default:
			if err := s.wait(ctx, err); err != nil {
				return err
			}
			continue
		}
		if s.off > before && s.o.Poll {
			continue // there may be more at once
		}
		if err := s.look(ctx, started); err != nil {
			return err
		}
	}
}

// damaged says that the damage shall be looked at once more.
func (s *state) damaged(err error) bool {
	var t *TornError
	if !errors.As(err, &t) {
		return false
	}
	if s.bad != t.Off || s.badSeen == 0 {
		s.bad, s.badSeen = t.Off, 0
	}
	s.badSeen++
	return s.badSeen < sameDamage
}

// wait is for a backend that does not answer.
func (s *state) wait(ctx context.Context, err error) error {
	if s.outage.IsZero() {
		s.outage = time.Now()
	}
	if time.Since(s.outage) > maxOutage {
		return err
	}
	return pause(ctx, min(max(time.Since(s.outage)/4, pollEvery), 5*time.Second))
}

// once reads what there is, or follows.
func (s *state) once(ctx context.Context, started time.Time) error {
	tctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	rc, err := s.re.Tail(tctx, s.token, s.off, !s.o.Poll)
	if err != nil {
		return fmt.Errorf("journal: %w", err)
	}
	defer rc.Close()
	first := &firstByte{r: rc}
	if s.off == 0 && s.dec == nil && s.o.AttachWait > 0 {
		t := time.AfterFunc(max(s.o.AttachWait-time.Since(started), 0), func() {
			if first.stall() {
				stop(&AttachError{RunID: s.o.RunID, Reason: AttachStalled})
			}
		})
		defer t.Stop()
	}
	if s.dec == nil {
		form, err := first.peek()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return fmt.Errorf("journal: %w", cause(tctx, err))
		}
		s.dec = newDecoder(form, s.Reader)
	}
	s.off, err = s.dec.decode(first, s.off, s.emit)
	if err != nil && !errors.Is(err, errDone) && !errors.Is(err, errStop) {
		err = cause(tctx, err)
	}
	return err
}

// cause is the reason of a done context, instead of what a closed stream says.
func cause(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// look asks what became of the process when its journal has nothing more to say.
func (s *state) look(ctx context.Context, started time.Time) error {
	p, err := s.re.Probe(ctx, s.token)
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case err != nil && definite(err):
		return fmt.Errorf("journal: %w", err)
	case err != nil:
		return s.wait(ctx, err)
	}
	if p.Level > 0 {
		s.level = p.Level
	}
	if p.Size < s.off {
		return &TamperedError{RunID: s.o.RunID, Why: fmt.Sprintf("%d bytes were read, and now it has %d", s.off, p.Size)}
	}
	switch p.State {
	case provider.ProbeAbsent:
		if s.dec != nil {
			return &EndedError{RunID: s.o.RunID, Why: "the journal is gone"}
		}
		return &AttachError{RunID: s.o.RunID, Reason: AttachUnknown}
	case provider.ProbeExited, provider.ProbeDead:
		// The look came after the read: what was written in between is read first.
		if p.Size > s.off && s.again(p.Size) {
			return nil
		}
		if s.dec != nil {
			if data, off := s.dec.pending(); len(data) > 0 && !s.yield(Record{Off: off, Kind: KindPartial, Data: data}, nil) {
				return errStop
			}
		}
		why := "its supervisor is gone"
		if p.State == provider.ProbeExited {
			why = "an exit that can't be read"
		}
		return &EndedError{RunID: s.o.RunID, Why: why}
	}
	if s.dec == nil && s.o.AttachWait > 0 && time.Since(started) > s.o.AttachWait {
		return &AttachError{RunID: s.o.RunID, Reason: AttachStalled}
	}
	return pause(ctx, pollEvery)
}

// again says that a rest of this size was not seen before: a torn tail stays.
func (s *state) again(size int64) bool {
	if s.bad == -size {
		return false
	}
	s.bad, s.badSeen = -size, 0
	return true
}

func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
