package chat_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/aisandbox-go/aisandbox/chat"
	"github.com/aisandbox-go/aisandbox/store"
	"github.com/aisandbox-go/aisandbox/store/memstore"
)

// counting is a store that counts renewals, and that can be away.
type counting struct {
	store.Runs

	mu             sync.Mutex
	renewals, refs int
	touched        []string
	gone           bool
}

func (c *counting) away(yes bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.gone = yes
}

func (c *counting) touches() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.touched)
}

func (c *counting) counts() (renewals, refs int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.renewals, c.refs
}

func (c *counting) Renew(ctx context.Context, refs []store.ClaimRef, ttl time.Duration) (lost, canceled []string, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.gone {
		return nil, nil, store.ErrUnavailable
	}
	c.renewals++
	c.refs += len(refs)
	return c.Runs.Renew(ctx, refs, ttl)
}

func (c *counting) Touch(ctx context.Context, ids []string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.touched = append(c.touched, strings.Join(ids, ","))
	return c.Runs.Touch(ctx, ids)
}

func TestKeeperRenewsAllTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memstore.New(memstore.Options{})
		c := &counting{Runs: s.Runs}
		keeper := chat.NewKeeper(c, chat.KeeperOptions{})
		var runs []*chat.Run
		for i := range 10 {
			d := chat.Durable(chat.Durability{Runs: c, Log: s.Log, Owner: "a", Keeper: keeper})
			runs = append(runs, start(t, chat.Request{RunID: fmt.Sprint("r", i), Adapter: hangs(), Use: []chat.Middleware{d}}))
		}
		time.Sleep(time.Minute + time.Second)
		if n, refs := c.counts(); n != 12 || refs != 120 {
			t.Errorf("%d renewals of %d claims in a minute", n, refs)
		}
		// One that is lost ends; the others go on.
		if _, err := s.Runs.Claim(t.Context(), "r3", store.ClaimOptions{Owner: "a", Force: true}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(6 * time.Second)
		if o := outcome(t, runs[3]); o.Kind != chat.Fenced {
			t.Errorf("%+v", o)
		}
		// Before an effect that nothing can refuse an old renewal is not enough.
		if err := runs[4].Confirm(t.Context()); err != nil {
			t.Error(err)
		}
		if err := runs[3].Confirm(t.Context()); !errors.Is(err, store.ErrFenced) {
			t.Errorf("a lost one is confirmed: %v", err)
		}
		c.away(true)
		time.Sleep(14 * time.Second)
		if err := runs[4].Confirm(t.Context()); err == nil {
			t.Error("confirmed although the store is away")
		}
		c.away(false)
		if err := runs[4].Confirm(t.Context()); err != nil {
			t.Errorf("it revives: %v", err)
		}
		for i, r := range runs {
			_ = r.Cancel("")
			if o := outcome(t, r); i != 3 && o.Kind != chat.Canceled {
				t.Errorf("%d: %+v", i, o)
			}
		}
	})
}

func TestPresence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memstore.New(memstore.Options{})
		c := &counting{Runs: s.Runs}
		d := chat.Durable(chat.Durability{Runs: c, Log: s.Log, Presence: chat.NewPresence(c, nil)})
		r := start(t, chat.Request{RunID: "r", Adapter: hangs(), Use: []chat.Middleware{d}})
		ctx, leave := context.WithTimeout(t.Context(), 40*time.Second)
		defer leave()
		for range 2 {
			for _, err := range r.Events(ctx) {
				if err != nil && ctx.Err() == nil {
					t.Error(err)
				}
			}
		}
		if n := len(c.touches()); n < 3 || n > 4 {
			t.Errorf("touched %d times in 40 s: %q", n, c.touches())
		}
		n := len(c.touches())
		time.Sleep(time.Minute)
		if len(c.touches()) != n {
			t.Error("touched without a reader")
		}
		_ = r.Cancel("")
		outcome(t, r)
	})
}
