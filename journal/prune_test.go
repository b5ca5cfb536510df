package journal_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/aisandbox-go/aisandbox/journal"
	"github.com/aisandbox-go/aisandbox/journal/frame"
	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/store"
	"github.com/aisandbox-go/aisandbox/store/memstore"
)

// shelf is a sandbox with journals of any age.
type shelf struct {
	provider.Reattacher
	infos []provider.JournalInfo
	err   error
	stuck string // can't be forgotten
	gone  []string
}

func (s *shelf) Journals(context.Context) ([]provider.JournalInfo, error) { return s.infos, s.err }

func (s *shelf) Forget(_ context.Context, token string) error {
	if token == s.stuck {
		return errors.New("busy")
	}
	s.gone = append(s.gone, token)
	return nil
}

// sick is a store that fails for one run.
type sick struct {
	store.Runs
	id string
}

func (s sick) Get(ctx context.Context, id string) (store.Run, error) {
	if id == s.id {
		return store.Run{}, store.ErrUnavailable
	}
	return s.Runs.Get(ctx, id)
}

// One row of the table of spec 04 §14 each (T11).
func TestPrune(t *testing.T) {
	s := memstore.New(memstore.Options{})
	token := func(id string, f *store.Final, hold bool) string {
		rec, _, err := s.Runs.Create(t.Context(), store.NewRun{ID: id, Thread: store.Thread{ID: "t"}})
		if err != nil {
			t.Fatal(err)
		}
		if f != nil {
			c, err := s.Runs.Claim(t.Context(), id, store.ClaimOptions{Owner: "o"})
			if err != nil {
				t.Fatal(err)
			}
			f.JournalHold = hold
			if _, err := s.Log.Finish(t.Context(), c, *f); err != nil {
				t.Fatal(err)
			}
		}
		tok, err := journal.Token(rec, 0)
		if err != nil {
			t.Fatal(err)
		}
		return tok
	}
	unknown := func(id string) string {
		tok, err := journal.Token(store.Run{ID: id, StartedAt: time.Now()}, 1)
		if err != nil {
			t.Fatal(err)
		}
		return tok
	}
	ended := token("ended", &store.Final{Status: store.Aborted}, false)
	second, err := journal.Token(store.Run{ID: "ended", StartedAt: must(s.Runs.Get(t.Context(), "ended")).StartedAt}, 1)
	if err != nil {
		t.Fatal(err)
	}
	stuck := token("stuck", &store.Final{Status: store.Aborted}, false)
	other, err := journal.Token(store.Run{ID: "ended", StartedAt: time.Unix(1, 0)}, 0)
	if err != nil {
		t.Fatal(err)
	}
	long, err := frame.Token(fmt.Sprintf("%0300d", 1))
	if err != nil {
		t.Fatal(err)
	}
	rows := []struct {
		token string
		age   time.Duration
		want  journal.Kept
	}{
		{ended, 0, ""},
		{second, 0, ""},
		{token("running", nil, false), 5 * time.Hour, journal.KeptNonTerminal},
		{token("waits", &store.Final{Status: store.Interrupted}, false), 5 * time.Hour, journal.KeptNonTerminal},
		{token("held", &store.Final{Status: store.Aborted}, true), 5 * time.Hour, journal.KeptHeld},
		{unknown("fresh"), time.Hour - 1, journal.KeptRecent},
		{unknown("old"), time.Hour, ""},
		{unknown("ageless"), -1, journal.KeptAgeUnknown},
		{other, time.Minute, journal.KeptRecent},
		{"_zz", 5 * time.Hour, journal.KeptName},
		{long, 5 * time.Hour, journal.KeptName},
		{unknown("sick"), 5 * time.Hour, journal.KeptStoreError},
		{stuck, 0, journal.KeptDeleteFailed},
	}
	sh := &shelf{stuck: stuck}
	want := journal.Pruned{Kept: map[string]journal.Kept{}}
	for _, r := range rows {
		sh.infos = append(sh.infos, provider.JournalInfo{Token: r.token, Age: r.age})
		if r.want == "" {
			want.Deleted = append(want.Deleted, r.token)
		} else {
			want.Kept[r.token] = r.want
		}
	}
	got, err := journal.Prune(t.Context(), sh, sick{s.Runs, "sick"}, journal.PruneOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	if !slices.Equal(sh.gone, want.Deleted) {
		t.Errorf("forgotten: %q", sh.gone)
	}

	sh = &shelf{infos: sh.infos}
	got, err = journal.Prune(t.Context(), sh, s.Runs, journal.PruneOptions{MaxDeletes: 1})
	if err != nil || len(got.Deleted) != 1 || got.Kept[second] != journal.KeptMaxDeletes {
		t.Errorf("%+v, %v", got, err)
	}
	sh = &shelf{infos: sh.infos, err: errors.New("no list")}
	if got, err := journal.Prune(t.Context(), sh, s.Runs, journal.PruneOptions{}); err == nil || len(got.Deleted)+len(sh.gone) > 0 {
		t.Errorf("without a list: %+v, %v", got, err)
	}
	if _, err := journal.Prune(t.Context(), &fake{}, s.Runs, journal.PruneOptions{}); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("%v", err)
	}
}

func must(r store.Run, err error) store.Run {
	if err != nil {
		panic(err)
	}
	return r
}
