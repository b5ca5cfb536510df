package journal

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/aisandbox-go/aisandbox/journal/frame"
	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/store"
)

// The defaults of [PruneOptions].
const (
	OrphanTTL  = time.Hour
	MaxDeletes = 200
)

// PruneOptions of [Prune]. The zero value works.
type PruneOptions struct {
	// OrphanTTL is how long nothing was written to a journal of a run that the store
	// doesn't know before it is removed: a run that is about to be recorded is not
	// known either. 0: OrphanTTL.
	OrphanTTL time.Duration

	MaxDeletes int // 0: MaxDeletes
}

// Kept says why a journal was not removed.
type Kept string

// The reasons of spec 04 §14. In doubt a journal stays.
const (
	KeptNonTerminal  Kept = "non-terminal"           // the run goes on, or waits for a person
	KeptHeld         Kept = "held"                   // it is evidence
	KeptRecent       Kept = "orphan-too-recent"      // nobody knows the run, yet
	KeptAgeUnknown   Kept = "age-gate-missing-entry" // nobody knows the run, and when it was written can't be told
	KeptName         Kept = "undecodable-name"
	KeptStoreError   Kept = "store-error"
	KeptDeleteFailed Kept = "delete-failed"
	KeptMaxDeletes   Kept = "max-deletes"
)

// Pruned is what [Prune] did: tokens, in order.
type Pruned struct {
	Deleted []string
	Kept    map[string]Kept
}

// Prune removes the journals of a sandbox that nobody needs any more: of runs that
// have ended, and of runs that the store has not known for an hour. It is for what
// a crash left, since a run's driver removes its own. An error is only that the
// journals could not be listed; nothing was removed then. A backend that can't
// list is errors.ErrUnsupported.
func Prune(ctx context.Context, re provider.Reattacher, runs store.Runs, o PruneOptions) (Pruned, error) {
	if o.OrphanTTL <= 0 {
		o.OrphanTTL = OrphanTTL
	}
	if o.MaxDeletes <= 0 {
		o.MaxDeletes = MaxDeletes
	}
	out := Pruned{Kept: map[string]Kept{}}
	l, ok := provider.As[provider.JournalLister](re)
	if !ok {
		return out, fmt.Errorf("journal: prune: the journals can't be listed: %w", errors.ErrUnsupported)
	}
	infos, err := l.Journals(ctx)
	if err != nil {
		return out, fmt.Errorf("journal: prune: %w", err)
	}
	for _, i := range infos {
		why := keep(ctx, runs, i, o.OrphanTTL)
		if why == "" && len(out.Deleted) == o.MaxDeletes {
			why = KeptMaxDeletes
		}
		if why == "" && re.Forget(ctx, i.Token) != nil {
			why = KeptDeleteFailed
		}
		if why != "" {
			out.Kept[i.Token] = why
			continue
		}
		out.Deleted = append(out.Deleted, i.Token)
	}
	return out, nil
}

// keep says why a journal must stay; empty if it need not.
func keep(ctx context.Context, runs store.Runs, i provider.JournalInfo, ttl time.Duration) Kept {
	id, err := frame.RunID(i.Token)
	if err != nil {
		return KeptName
	}
	id, started, _ := strings.Cut(id, "\x00")
	started, _, _ = strings.Cut(started, "\x00")
	rec, err := runs.Get(ctx, id)
	// One of the same id that started at another time is another database's.
	unknown := errors.Is(err, store.ErrNotFound) || err == nil && started != strconv.FormatInt(rec.StartedAt.UnixMilli(), 36)
	switch {
	case unknown && i.Age < 0:
		return KeptAgeUnknown
	case unknown && i.Age < ttl:
		return KeptRecent
	case unknown:
		return ""
	case err != nil:
		return KeptStoreError
	case !rec.Status.Terminal() || rec.ClosedAt.IsZero():
		return KeptNonTerminal
	case rec.JournalHold:
		return KeptHeld
	}
	return ""
}

// listScript prints the time, and of each file its time and name. Of a directory
// that is not there nothing; the last line proves that all was listed.
const listScript = `d=$1
cd "$d" 2>/dev/null || { echo none; exit 0; }
now=$(date +%s) && echo "now $now" || exit 1
for f in *; do
	case $f in *.ndjson|*.err|*.lock) ;; *) continue ;; esac
	s=$(stat -c %Y "$f" 2>/dev/null) || s=-
	echo "$s $f"
done
echo end`

// maxList bounds what is read of a list.
const maxList = 8 << 20

// Journals implements provider.JournalLister.
func (s shell) Journals(ctx context.Context) ([]provider.JournalInfo, error) {
	var out bytes.Buffer
	if err := s.run(ctx, listScript, "list", nil, &capped{w: &out, left: maxList}, provider.Cmd{Dir: "/"}); err != nil {
		return nil, err
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	if len(lines) == 1 && lines[0] == "none" {
		return nil, nil
	}
	now, err := strconv.ParseInt(strings.TrimPrefix(lines[0], "now "), 10, 64)
	if err != nil || lines[len(lines)-1] != "end" {
		return nil, fmt.Errorf("journal: list says %.80q", lines[0])
	}
	ages := map[string]time.Duration{}
	for _, line := range lines[1 : len(lines)-1] {
		when, name, _ := strings.Cut(line, " ")
		dot := strings.LastIndexByte(name, '.')
		if dot < 0 {
			continue
		}
		age := time.Duration(-1)
		if sec, err := strconv.ParseInt(when, 10, 64); err == nil {
			age = max(time.Duration(now-sec)*time.Second, 0)
		}
		token := name[:dot]
		// One file whose time can't be told makes the whole unknown.
		if old, ok := ages[token]; !ok || age < old {
			ages[token] = age
		}
	}
	var infos []provider.JournalInfo
	for token, age := range ages {
		infos = append(infos, provider.JournalInfo{Token: token, Age: age})
	}
	slices.SortFunc(infos, func(a, b provider.JournalInfo) int { return strings.Compare(a.Token, b.Token) })
	return infos, nil
}
