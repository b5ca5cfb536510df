package storetest

import (
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/store"
)

// BenchAppend measures appended events per second: many runs that each have one
// writer, as a server has them.
func BenchAppend(b *testing.B, s store.Set, writers, batch int) {
	claims := make([]store.Claim, writers)
	for i := range claims {
		id := fresh("bench")
		if _, _, err := s.Runs.Create(b.Context(), store.NewRun{ID: id, Thread: store.Thread{ID: id}}); err != nil {
			b.Fatal(err)
		}
		c, err := s.Runs.Claim(b.Context(), id, store.ClaimOptions{Owner: "bench", TTL: time.Hour})
		if err != nil {
			b.Fatal(err)
		}
		claims[i] = c
	}
	var left atomic.Int64
	left.Store(int64(b.N))
	var wg sync.WaitGroup
	b.ResetTimer()
	for i, c := range claims {
		wg.Go(func() {
			for no := uint64(1); left.Add(-int64(batch)) > -int64(batch); no++ {
				evs := make([]store.Event, batch)
				for j := range evs {
					evs[j].Event = event.TextMessageContent{MessageID: fmt.Sprint("m", i), Delta: strings.Repeat("a word ", 6)}
				}
				if _, err := s.Log.Append(b.Context(), c, store.Batch{No: no, Events: evs}); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	b.StopTimer()
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "events/s")
}

// BenchTail measures how long after the append an event reaches many readers of
// one run, at 100 events per second.
func BenchTail(b *testing.B, s store.Set, readers int) {
	id := fresh("tail")
	if _, _, err := s.Runs.Create(b.Context(), store.NewRun{ID: id, Thread: store.Thread{ID: id}}); err != nil {
		b.Fatal(err)
	}
	c, err := s.Runs.Claim(b.Context(), id, store.ClaimOptions{Owner: "bench", TTL: time.Hour})
	if err != nil {
		b.Fatal(err)
	}
	var mu sync.Mutex
	var lags []time.Duration
	var wg, up sync.WaitGroup
	sent := make([]atomic.Int64, b.N+2) // when the append was called
	began := time.Now()
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	for range readers {
		up.Add(1)
		wg.Go(func() {
			mine := make([]time.Duration, 0, b.N)
			n := 0
			for e, err := range s.Log.Read(b.Context(), id, event.FromStart) {
				if err != nil {
					b.Error(err)
					return
				}
				_ = e
				if n++; n == 1 {
					up.Done()
				} else {
					mine = append(mine, time.Since(began)-time.Duration(sent[n-1].Load()))
				}
			}
			mu.Lock()
			lags = append(lags, mine...)
			mu.Unlock()
		})
	}
	if _, err := s.Log.Append(b.Context(), c, store.Batch{No: 1, Events: live("start")}); err != nil {
		b.Fatal(err)
	}
	up.Wait()
	runtime.GC()
	runtime.ReadMemStats(&after)
	b.ResetTimer()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for i := range b.N {
		<-tick.C
		sent[i+1].Store(int64(time.Since(began)))
		if _, err := s.Log.Append(b.Context(), c, store.Batch{No: uint64(i + 2), Events: live("x")}); err != nil {
			b.Fatal(err)
		}
	}
	if _, err := s.Log.Finish(b.Context(), c, store.Final{Status: store.Completed}); err != nil {
		b.Fatal(err)
	}
	wg.Wait()
	b.StopTimer()
	b.ReportMetric(float64(after.HeapInuse+after.StackInuse-before.HeapInuse-before.StackInuse)/1024/float64(readers), "KiB/reader")
	slices.Sort(lags)
	if len(lags) > 0 {
		b.ReportMetric(float64(lags[len(lags)*99/100].Microseconds())/1000, "p99-ms")
		b.ReportMetric(float64(lags[len(lags)/2].Microseconds())/1000, "p50-ms")
	}
}
