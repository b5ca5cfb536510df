package storetest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/store"
)

// runContention lets writers fight for one run while readers watch.
func runContention(t *testing.T, o Options) {
	writers := o.Writers
	if writers == 0 {
		writers = 8
	}
	t.Run("zombies", func(t *testing.T) {
		s := o.New(t)
		r := create(t, s, store.Thread{ID: fresh("t")})
		var mu sync.Mutex
		accepted := map[string]uint64{} // event → epoch
		var wg, rd sync.WaitGroup
		views := make([][]string, 8)
		ctx, cancel := context.WithCancel(t.Context())
		defer rd.Wait() // also where the test ends early
		defer cancel()
		for i := range views {
			rd.Go(func() {
				// Each joins somewhere: it reads a while, leaves, and comes back by offset.
				var at event.Offset
				for {
					n, again := 0, false
					for e, err := range s.Log.Read(ctx, r.ID, at) {
						if ctx.Err() != nil {
							return
						}
						if err != nil {
							t.Errorf("read after %q: %v", at, err)
							return
						}
						views[i] = append(views[i], nameOf(e.Event))
						at = e.Offset
						if n++; n == 7*(i+1) {
							again = true
							break
						}
					}
					if !again {
						return
					}
				}
			})
		}
		for w := range writers {
			wg.Go(func() {
				var old []store.Claim // deposed for certain: this writer itself claimed after them
				var prev *store.Claim
				for round := range 20 {
					c, err := s.Runs.Claim(t.Context(), r.ID, store.ClaimOptions{Owner: "shared", Force: true})
					if err != nil {
						t.Errorf("claim: %v", err)
						return
					}
					if prev != nil {
						old = append(old[:min(len(old), 1)], *prev)
					}
					no := uint64(0)
					for i := range 5 {
						name := fmt.Sprintf("w%d r%d e%d", w, round, i)
						no++
						b := store.Batch{No: no, Events: live(name)}
						_, err := s.Log.Append(t.Context(), c, b)
						if err == nil && i%2 == 0 {
							_, err = s.Log.Append(t.Context(), c, b) // its answer was lost
							if errors.Is(err, store.ErrFenced) {
								mu.Lock()
								accepted[name] = c.Epoch() // the first one did land
								mu.Unlock()
								break
							}
						}
						if errors.Is(err, store.ErrFenced) {
							break
						}
						if err != nil {
							t.Errorf("append: %v", err)
							return
						}
						mu.Lock()
						accepted[name] = c.Epoch()
						mu.Unlock()
					}
					// Claims from before wake up and try with every number that could fit.
					for _, z := range old {
						for n := uint64(1); n < 7; n++ {
							if _, err := s.Log.Append(t.Context(), z, store.Batch{No: n, Events: live("zombie")}); !errors.Is(err, store.ErrFenced) {
								t.Errorf("a zombie's append: %v", err)
							}
						}
						if _, err := s.Log.Finish(t.Context(), z, store.Final{Status: store.Aborted}); !errors.Is(err, store.ErrFenced) {
							t.Errorf("a zombie's finish: %v", err)
						}
					}
					prev = &c
				}
			})
		}
		wg.Wait()
		last := claim(t, s, r.ID, "shared", store.ClaimOptions{Force: true})
		_, err := s.Log.Finish(t.Context(), last, store.Final{Batch: store.Batch{No: 1, Events: live("end")}, Status: store.Completed})
		ok(t, "finish", err)
		rd.Wait()

		log, err := s.Log.Snapshot(t.Context(), r.ID)
		ok(t, "snapshot", err)
		var names []string
		count := map[string]int{}
		for i, e := range log {
			n := nameOf(e.Event)
			names = append(names, n)
			count[n]++
			if e.Seq != int64(i+1) || i > 0 && e.Epoch < log[i-1].Epoch {
				t.Errorf("event %d: number %d, epoch %d", i, e.Seq, e.Epoch)
			}
			if want, known := accepted[n]; n != "end" && (!known || want != e.Epoch) {
				t.Errorf("%q of epoch %d is in the log; it was accepted for %d, %v", n, e.Epoch, want, known)
			}
		}
		for n := range accepted {
			if count[n] != 1 {
				t.Errorf("%q was accepted and is there %d times", n, count[n])
			}
		}
		for i, v := range views {
			if !slices.Equal(v, names) {
				t.Errorf("reader %d saw %d events, the log has %d, or in another order", i, len(v), len(names))
			}
		}
	})

	t.Run("one end", func(t *testing.T) {
		s := o.New(t)
		for range 20 {
			r := create(t, s, store.Thread{ID: fresh("t")})
			var wg sync.WaitGroup
			ends := make(chan string, writers)
			for w := range writers {
				wg.Go(func() {
					c, err := s.Runs.Claim(t.Context(), r.ID, store.ClaimOptions{Owner: "shared", Force: true})
					if errors.Is(err, store.ErrSealed) {
						return
					}
					if err != nil {
						t.Error(err)
						return
					}
					name := fmt.Sprint("end", w)
					_, err = s.Log.Finish(t.Context(), c, store.Final{Batch: store.Batch{No: 1, Events: live(name)}, Status: store.Completed})
					if err == nil {
						ends <- name
					} else if !errors.Is(err, store.ErrFenced) {
						t.Error(err)
					}
				})
			}
			wg.Wait()
			close(ends)
			var won []string
			for n := range ends {
				won = append(won, n)
			}
			if len(won) != 1 {
				t.Fatalf("ended by %v", won)
			}
			equal(t, "log", logged(t, s, r.ID), won)
		}
	})
}
