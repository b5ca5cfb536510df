package harness_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/aisandbox-go/aisandbox/chat"
	"github.com/aisandbox-go/aisandbox/internal/failpoint"
	"github.com/aisandbox-go/aisandbox/store"
)

// drowsy puts whole hosts to sleep at random places, for longer or shorter than a
// lease.
type drowsy struct {
	mu    sync.Mutex
	rnd   *rand.Rand
	until map[string]time.Time
}

func (d *drowsy) hit(_, host string) {
	d.mu.Lock()
	if time.Now().After(d.until[host]) && d.rnd.IntN(25) == 0 {
		d.until[host] = time.Now().Add(time.Duration(d.rnd.IntN(1200)) * time.Millisecond)
	}
	sleep := time.Until(d.until[host])
	d.mu.Unlock()
	if sleep > 0 {
		time.Sleep(sleep)
	}
}

// Three hosts fight over a run; each falls asleep time and again and wakes up
// when another one has it. Whatever happens, the run is the one of a quiet night.
func TestHostsThatFallAsleep(t *testing.T) {
	const lines = 60
	want := []string{"the prompt"}
	for i := range lines {
		want = append(want, fmt.Sprint("line ", i+1))
	}
	want = append(want, "no end")
	for seed := range uint64(4) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			w := newWorld(t)
			if seed%2 == 1 {
				w.onDisk()
			}
			d := &drowsy{rnd: rand.New(rand.NewPCG(seed, 1)), until: map[string]time.Time{}}
			defer failpoint.Arm(d.hit)()
			ctx, stop := context.WithTimeout(context.WithoutCancel(t.Context()), time.Minute)
			defer stop()
			if _, _, err := w.set.Runs.Create(ctx, store.NewRun{ID: w.id, Thread: store.Thread{ID: "t1"}, Adapter: "sh", Kind: store.KindSandbox}); err != nil {
				t.Fatal(err)
			}
			var hosts sync.WaitGroup
			var mu sync.Mutex
			finished, fenced, drives := 0, 0, 0
			for _, owner := range []string{"A", "B", "C"} {
				hosts.Go(func() {
					for {
						run, err := w.attach(ctx, w.request(owner, w.counting(lines)))
						if errors.Is(err, store.ErrSealed) {
							return
						}
						if errors.Is(err, store.ErrFenced) {
							continue
						}
						if err != nil {
							t.Errorf("%s: %v", owner, err)
							return
						}
						o, err := run.Wait(ctx)
						if err != nil {
							t.Errorf("%s: %v", owner, err)
							return
						}
						mu.Lock()
						drives++
						switch o.Kind {
						case chat.Finished:
							finished++
						case chat.Fenced:
							fenced++
						case chat.Detached:
						default:
							// It woke up in a run that has ended.
							if !errors.Is(o.Err, store.ErrSealed) && !errors.Is(o.Err, store.ErrFenced) {
								t.Errorf("%s: %+v", owner, o)
							}
						}
						mu.Unlock()
					}
				})
			}
			hosts.Wait()
			t.Logf("%d drives, %d lost to another host", drives, fenced)
			if rec := w.record(); rec.Status != store.Completed || finished != 1 {
				t.Errorf("%d finished it; %+v", finished, rec)
			}
			w.legal()
			w.clean()
			if d := cmp.Diff(want, said(w.log())); d != "" {
				t.Error(d)
			}
			if got := len(thread(t, w)); got != lines+3 {
				t.Errorf("%d messages in the thread", got)
			}
			if rest := w.leftovers(); len(rest) > 0 {
				t.Errorf("left in the sandbox: %q", rest)
			}
		})
	}
}
