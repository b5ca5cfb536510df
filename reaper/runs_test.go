package reaper_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/aisandbox-go/aisandbox/chat"
	"github.com/aisandbox-go/aisandbox/journal"
	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/reaper"
	"github.com/aisandbox-go/aisandbox/store"
)

// Each row is one of the rules of spec 04 §21.10, and what a run that meets it
// looks like afterwards.
func TestDecisions(t *testing.T) {
	lost := func(w *world) { w.b.set(func(b *backend) { clear(b.boxes) }) }
	away := func(w *world) { w.b.set(func(b *backend) { b.away = true }) }
	gone := func(w *world) { w.gone = errors.New("no such definition") }
	down := func(w *world) { w.gone = store.ErrUnavailable }
	unwatched := func(*world) { time.Sleep(31 * time.Minute) }
	long := func(*world) { time.Sleep(61 * time.Minute) }
	all := func(fs ...func(*world)) func(*world) {
		return func(w *world) {
			for _, f := range fs {
				f(w)
			}
		}
	}
	launched := func(s provider.ProbeState) seed { return seed{launch: store.Launched, agent: s} }
	cancelled := func(s seed) seed { s.cancel = "enough"; return s }
	const running = store.Running

	for _, tt := range []struct {
		name    string
		seed    seed
		then    func(*world)
		daemon  bool // Run, for a while, instead of Once
		config  func(*reaper.Config)
		sweeps  int // how often Once is called; 0: once
		want    reaper.Outcome
		status  store.Status
		last    string
		killed  bool // an agent that worked was ended
		started int  // agents, all told
		destroy bool
	}{
		// Its end is wanted.
		{name: "cancel/running", seed: cancelled(launched(provider.ProbeRunning)), want: reaper.Cancelled, status: store.Aborted, last: "RUN_ERROR aborted", killed: true, started: 1},
		{name: "cancel/exited", seed: cancelled(launched(provider.ProbeExited)), want: reaper.Cancelled, status: store.Aborted, last: "RUN_ERROR aborted", started: 1},
		{name: "cancel/dead", seed: cancelled(launched(provider.ProbeDead)), want: reaper.Cancelled, status: store.Aborted, last: "RUN_ERROR aborted", started: 1},
		{name: "cancel/none", seed: cancelled(seed{}), want: reaper.Cancelled, status: store.Aborted, last: "RUN_ERROR aborted"},
		{name: "cancel/not even opened", seed: cancelled(seed{unopened: true, boxless: true}), want: reaper.Cancelled, status: store.Aborted, last: "RUN_ERROR aborted"},
		{name: "cancel/lost", seed: cancelled(launched(provider.ProbeRunning)), then: lost, want: reaper.Cancelled, status: store.Aborted, last: "RUN_ERROR aborted", started: 1},
		{name: "cancel/request gone", seed: cancelled(launched(provider.ProbeRunning)), then: gone, want: reaper.Cancelled, status: store.Aborted, last: "RUN_ERROR aborted", killed: true, started: 1},
		{name: "cancel/out of reach", seed: cancelled(launched(provider.ProbeRunning)), then: away, want: reaper.Unknown, status: running, last: "CUSTOM", started: 1},
		{name: "cancel/out of reach for long", seed: cancelled(launched(provider.ProbeRunning)), then: away, sweeps: 3, want: reaper.Cancelled, status: store.Aborted, last: "RUN_ERROR aborted", destroy: true, started: 1},
		{name: "cancel/chat", seed: cancelled(seed{kind: store.KindChat, boxless: true}), want: reaper.Cancelled, status: store.Aborted, last: "RUN_ERROR aborted"},

		// Nobody watches it.
		{name: "expired/running", seed: launched(provider.ProbeRunning), then: unwatched, want: reaper.Expired, status: store.Aborted, last: "RUN_ERROR aborted", killed: true, started: 1},
		{name: "expired/exited", seed: launched(provider.ProbeExited), then: unwatched, want: reaper.Finalized, status: store.Completed, last: "RUN_FINISHED", started: 1},
		{name: "expired/dead", seed: launched(provider.ProbeDead), then: unwatched, want: reaper.Died, status: store.Failed, last: "RUN_ERROR agent_died", started: 1},
		{name: "expired/lost", seed: launched(provider.ProbeRunning), then: all(unwatched, lost), want: reaper.Died, status: store.Failed, last: "RUN_ERROR sandbox_lost", started: 1},
		{name: "expired/none", seed: seed{}, then: unwatched, want: reaper.Expired, status: store.Aborted, last: "RUN_ERROR expired"},
		{name: "expired/request gone", seed: launched(provider.ProbeRunning), then: all(unwatched, gone), want: reaper.Expired, status: store.Aborted, last: "RUN_ERROR expired", killed: true, started: 1},
		{name: "expired/out of reach", seed: launched(provider.ProbeRunning), then: all(unwatched, away), want: reaper.Unknown, status: running, last: "CUSTOM", started: 1},
		{name: "expired/out of reach for long", seed: launched(provider.ProbeRunning), then: all(long, away), sweeps: 3, want: reaper.Expired, status: store.Aborted, last: "RUN_ERROR expired", destroy: true, started: 1},
		{name: "never expires", seed: launched(provider.ProbeRunning), then: long, config: func(c *reaper.Config) { c.TTL = -1 }, want: reaper.Producing, status: running, last: "CUSTOM", started: 1},

		// It has ended, one way or another.
		{name: "exited", seed: launched(provider.ProbeExited), want: reaper.Finalized, status: store.Completed, last: "RUN_FINISHED", started: 1},
		{name: "exited/request gone", seed: launched(provider.ProbeExited), then: gone, sweeps: 4, want: reaper.Unknown, status: running, last: "CUSTOM", started: 1},
		{name: "dead", seed: launched(provider.ProbeDead), want: reaper.Died, status: store.Failed, last: "RUN_ERROR agent_died", started: 1},
		{name: "dead/request gone", seed: launched(provider.ProbeDead), then: gone, sweeps: 3, want: reaper.Died, status: store.Failed, last: "RUN_ERROR agent_died", started: 1},
		{name: "lost", seed: launched(provider.ProbeRunning), then: lost, want: reaper.Died, status: store.Failed, last: "RUN_ERROR sandbox_lost", started: 1},
		{name: "lost/request gone", seed: launched(provider.ProbeRunning), then: all(lost, gone), sweeps: 3, want: reaper.Died, status: store.Failed, last: "RUN_ERROR sandbox_lost", started: 1},
		{name: "chat", seed: seed{kind: store.KindChat, boxless: true}, want: reaper.Died, status: store.Failed, last: "RUN_ERROR agent_died"},

		// Its agent was never started.
		{name: "none", seed: seed{boxless: true}, daemon: true, want: reaper.Relaunched, status: running, last: "TEXT_MESSAGE_END", started: 1},
		{name: "none/not even opened", seed: seed{unopened: true, boxless: true}, daemon: true, want: reaper.Relaunched, status: running, last: "TEXT_MESSAGE_END", started: 1},
		{name: "none/policy", seed: seed{boxless: true}, daemon: true, config: func(c *reaper.Config) { c.NoRelaunch = true }, want: reaper.NeverLaunched, status: store.Failed, last: "RUN_ERROR never_launched"},
		{name: "none/request gone", seed: seed{boxless: true}, then: gone, sweeps: 3, want: reaper.NeverLaunched, status: store.Failed, last: "RUN_ERROR never_launched"},
		{name: "none/request gone for now", seed: seed{boxless: true}, then: gone, want: reaper.Unknown, status: running, last: "CUSTOM"},
		{name: "none/store away", seed: seed{boxless: true}, then: down, daemon: true, want: reaper.Unknown, status: running, last: "CUSTOM"},
		{name: "none/once", seed: seed{boxless: true}, sweeps: 3, want: reaper.NeverLaunched, status: store.Failed, last: "RUN_ERROR never_launched"},
		{name: "none/no room", seed: seed{boxless: true}, daemon: true, config: func(c *reaper.Config) { c.Start = nil; c.MaxDrives = 1 }, want: reaper.Relaunched, status: running, last: "TEXT_MESSAGE_END", started: 1},
		{name: "launching/absent", seed: seed{launch: store.Launching}, daemon: true, want: reaper.Relaunched, status: running, last: "TEXT_MESSAGE_END", started: 1},
		{name: "launching/absent/policy", seed: seed{launch: store.Launching}, daemon: true, config: func(c *reaper.Config) { c.NoRelaunch = true }, want: reaper.NeverLaunched, status: store.Failed, last: "RUN_ERROR never_launched"},
		{name: "launching/running", seed: seed{launch: store.Launching, agent: provider.ProbeRunning}, daemon: true, want: reaper.Adopted, status: running, last: "TEXT_MESSAGE_END", started: 1},
		{name: "launching/exited", seed: seed{launch: store.Launching, agent: provider.ProbeExited}, want: reaper.Finalized, status: store.Completed, last: "RUN_FINISHED", started: 1},

		// It is at work.
		{name: "running", seed: launched(provider.ProbeRunning), daemon: true, want: reaper.Adopted, status: running, last: "TEXT_MESSAGE_END", started: 1},
		{name: "running/lazy", seed: launched(provider.ProbeRunning), daemon: true, config: func(c *reaper.Config) { c.Adopt = reaper.AdoptLazy }, want: reaper.Producing, status: running, last: "CUSTOM", started: 1},
		{name: "running/once", seed: launched(provider.ProbeRunning), want: reaper.Producing, status: running, last: "CUSTOM", started: 1},
		{name: "running/request gone", seed: launched(provider.ProbeRunning), then: gone, daemon: true, want: reaper.Producing, status: running, last: "CUSTOM", started: 1},

		// Nobody can tell.
		{name: "out of reach", seed: launched(provider.ProbeRunning), then: away, sweeps: 5, want: reaper.Unknown, status: running, last: "CUSTOM", started: 1},
		{name: "unknown definition", seed: launched(provider.ProbeRunning), config: func(c *reaper.Config) { c.Definitions = nil }, sweeps: 5, want: reaper.Unknown, status: running, last: "CUSTOM", started: 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				tt.seed.id = "r"
				before := w.seed(tt.seed)
				if tt.then != nil {
					tt.then(w)
				}
				r := w.reaper(tt.config)
				var got reaper.Outcome
				if tt.daemon {
					stop := w.run(r)
					time.Sleep(time.Second)
					synctest.Wait()
					for _, o := range reaper.Outcomes {
						if w.m.of(o) > 0 {
							got = o
						}
					}
					defer stop()
				} else {
					for range max(tt.sweeps, 1) {
						res := w.once(r)
						if len(res.Runs) != 1 {
							t.Fatalf("runs %+v", res.Runs)
						}
						got = res.Runs[0].Outcome
						time.Sleep(time.Minute)
					}
				}
				rec := w.get("r")
				if got != tt.want || rec.Status != tt.status {
					t.Errorf("outcome %q, status %q; want %q, %q", got, rec.Status, tt.want, tt.status)
				}
				if last := w.last("r"); last != tt.last {
					t.Errorf("the log ends with %s, want %s", last, tt.last)
				}
				if (got == reaper.Unknown || got == reaper.Producing) && (rec.Epoch != before.Epoch || rec.LastSeq != before.LastSeq || rec.CancelAt != before.CancelAt) {
					t.Errorf("%s touched the run: %+v", got, rec)
				}
				if a := w.agentOf("r"); tt.killed && (a == nil || a.state != provider.ProbeDead) {
					t.Errorf("the agent is %+v", a)
				} else if !tt.killed && a != nil && a.kills > 0 {
					t.Error("the agent was killed")
				}
				if tt.want == reaper.NeverLaunched && tt.seed.launch == store.Launching {
					token, _ := journal.Token(rec, 0)
					h := &handle{w.b, boxID(rec.SandboxKey, rec.SandboxGen)}
					if err := h.Launch(t.Context(), token, provider.Cmd{}, provider.LaunchOptions{}); !errors.Is(err, provider.ErrAlreadyLaunched) {
						t.Errorf("whoever was about to start the agent still can: %v", err)
					}
				}
				if n := w.launches["r"]; n != tt.started {
					t.Errorf("%d agents", n)
				}
				if rec.SandboxKey != "" {
					if d := w.instance(rec.SandboxKey).Desired; (d == store.DesiredDestroyed) != tt.destroy {
						t.Errorf("the sandbox shall be %q", d)
					}
				}
				// Aborted is truthful (I13), and so is the reason.
				if rec.Status == store.Aborted && rec.CancelAt.IsZero() {
					t.Error("aborted, and no cancel is recorded")
				}
				if rec.Status == store.Aborted && tt.want == reaper.Expired && rec.CancelReason != reaper.ReasonExpired {
					t.Errorf("cancelled because %q", rec.CancelReason)
				}
			})
		})
	}
}

// T16, D-17: however many agents are at work, what has had its time is ended in
// the first sweep.
func TestBusyRunsStarveNobody(t *testing.T) {
	for _, n := range []int{60, 300} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t)
			w.seed(seed{id: "old", launch: store.Launched, agent: provider.ProbeRunning})
			time.Sleep(31 * time.Minute)
			for i := range n {
				w.seed(seed{id: fmt.Sprintf("r%d", i), launch: store.Launched, agent: provider.ProbeRunning})
			}
			// It has been looked at before, and these have not.
			if _, err := w.store.Runs.Due(t.Context(), "x", 1); err != nil {
				t.Fatal(err)
			}
			time.Sleep(6 * time.Second)
			res := w.once(w.reaper(nil))
			if res.Outcomes[reaper.Producing] != n || res.Outcomes[reaper.Expired] != 1 || w.get("old").Status != store.Aborted {
				t.Errorf("%+v, %s", res.Outcomes, w.get("old").Status)
			}
		})
	}
}

// T15, D-15, D-16: somebody comes back to a run, leaves again, and then the host
// dies: the run ends on time, counted from when it was watched last.
func TestPresenceAndACrash(t *testing.T) {
	for _, adopt := range []reaper.Adopt{reaper.AdoptEager, reaper.AdoptLazy} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t)
			w.seed(seed{id: "r", launch: store.Launched, agent: provider.ProbeRunning, driven: true})
			defer w.run(w.reaper(func(c *reaper.Config) { c.Adopt = adopt }))()
			time.Sleep(20 * time.Minute) // nobody watches
			if err := w.store.Runs.Touch(t.Context(), []string{"r"}); err != nil {
				t.Fatal(err)
			}
			left := time.Now()
			time.Sleep(29 * time.Minute)
			if rec := w.get("r"); rec.Status != store.Running {
				t.Fatalf("ended after %v: %s", time.Since(left), rec.Status)
			}
			// The backoff of a run that is left alone is a minute at most.
			time.Sleep(time.Minute + 70*time.Second)
			synctest.Wait()
			rec := w.get("r")
			if rec.Status != store.Aborted || rec.CancelReason != reaper.ReasonExpired {
				t.Errorf("%s after %v, cancelled because %q", rec.Status, time.Since(left), rec.CancelReason)
			}
			if d := rec.FinishedAt.Sub(left); d < 30*time.Minute {
				t.Errorf("ended after %v", d)
			}
		})
	}
}

// A run that is driven expires, too, and not while somebody watches.
func TestDrivenRunsExpire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.seed(seed{id: "r", launch: store.Launched, agent: provider.ProbeRunning})
		defer w.run(w.reaper(nil))()
		for range 8 * 60 {
			time.Sleep(15 * time.Second)
			if err := w.store.Runs.Touch(t.Context(), []string{"r"}); err != nil {
				t.Fatal(err)
			}
		}
		if rec := w.get("r"); rec.Status != store.Running || rec.Owner != "driver" {
			t.Fatalf("watched for two hours: %s by %q", rec.Status, rec.Owner)
		}
		time.Sleep(30*time.Minute + 40*time.Second)
		synctest.Wait()
		if rec := w.get("r"); rec.Status != store.Aborted || w.agentOf("r").state != provider.ProbeDead {
			t.Errorf("%s, agent %+v", rec.Status, w.agentOf("r"))
		}
	})
}

// A viewer who comes back in the last moment keeps the run.
func TestReturningViewerKeepsTheRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.seed(seed{id: "r", launch: store.Launched, agent: provider.ProbeRunning})
		time.Sleep(31 * time.Minute)
		w.b.resuming = func() {
			if err := w.store.Runs.Touch(t.Context(), []string{"r"}); err != nil {
				t.Error(err)
			}
		}
		res := w.once(w.reaper(nil))
		if rec := w.get("r"); res.Outcomes[reaper.NotClaimed] != 1 || rec.Status != store.Running || !rec.CancelAt.IsZero() || rec.Epoch != 1 {
			t.Errorf("%+v %+v", res.Runs, rec)
		}
	})
}

// What was decided about a run that another host has had meanwhile is not done.
func TestStaleDecision(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.seed(seed{id: "r", launch: store.Launched, agent: provider.ProbeDead})
		w.gone = errors.New("no such definition")
		r := w.reaper(nil)
		for range 2 {
			w.once(r)
			time.Sleep(time.Minute)
		}
		w.b.resuming = func() {
			c, err := w.store.Runs.Claim(t.Context(), "r", store.ClaimOptions{Owner: "b"})
			if err == nil {
				err = w.store.Runs.Release(t.Context(), c)
			}
			if err != nil {
				t.Error(err)
			}
		}
		if res := w.once(r); res.Outcomes[reaper.NotClaimed] != 1 || w.get("r").Status != store.Running || w.get("r").Owner != "" {
			t.Errorf("%+v %+v", res.Runs, w.get("r"))
		}
	})
}

// How long after its host has gone a run is driven on.
func TestTakeoverTime(t *testing.T) {
	for _, tt := range []struct {
		name    string
		release bool
		within  time.Duration
	}{
		{"killed", false, store.DefaultLease + time.Second},
		{"shut down", true, time.Second},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				defer w.run(w.reaper(nil))()
				time.Sleep(3333 * time.Millisecond) // somewhere between two looks
				w.seed(seed{id: "r", launch: store.Launched, agent: provider.ProbeRunning, driven: !tt.release})
				began := time.Now()
				for w.get("r").Owner != "driver" {
					if time.Since(began) > tt.within {
						t.Fatalf("nobody has it after %v", time.Since(began))
					}
					time.Sleep(10 * time.Millisecond)
				}
				if d := time.Since(began); !tt.release && d < store.DefaultLease {
					t.Errorf("taken after %v", d)
				}
			})
		})
	}
}

// T14, C8: a cancel of a run without a driver needs no TTL, and one that nobody can
// end otherwise costs it its sandbox.
func TestOrphanedCancel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.seed(seed{id: "r", launch: store.Launched, agent: provider.ProbeRunning})
		defer w.run(w.reaper(func(c *reaper.Config) { c.Adopt = reaper.AdoptLazy }))()
		time.Sleep(5 * time.Minute)
		if err := w.store.Runs.RequestCancel(t.Context(), "r", "stop"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		if rec := w.get("r"); rec.Status != store.Aborted || rec.CancelReason != "stop" {
			t.Errorf("%s because %q", rec.Status, rec.CancelReason)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.seed(seed{id: "r", launch: store.Launched, agent: provider.ProbeRunning, cancel: "stop"})
		w.b.set(func(b *backend) { b.away = true })
		defer w.run(w.reaper(nil))()
		time.Sleep(2 * time.Minute)
		if i := w.instance("k-t-r"); w.get("r").Status != store.Aborted || i.Desired != store.DesiredDestroyed || i.State == store.InstanceDestroyed {
			t.Errorf("%s, %+v", w.get("r").Status, i)
		}
		w.b.set(func(b *backend) { b.away = false })
		time.Sleep(2 * time.Minute)
		if i := w.instance("k-t-r"); i.State != store.InstanceDestroyed || w.b.alive() != "[]" {
			t.Errorf("%+v, alive %s", i, w.b.alive())
		}
	})
}

// S12: a provider that is away for ten minutes changes nothing.
func TestProviderAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.seed(seed{id: "r", launch: store.Launched, agent: provider.ProbeRunning})
		w.b.set(func(b *backend) { b.away = true })
		defer w.run(w.reaper(nil))()
		time.Sleep(10 * time.Minute)
		if rec := w.get("r"); rec.Status != store.Running || rec.Epoch != 1 || w.m.of(reaper.Unknown) < 5 {
			t.Errorf("%s, epoch %d, %d times unknown", rec.Status, rec.Epoch, w.m.of(reaper.Unknown))
		}
		if i := w.instance("k-t-r"); i.State != store.InstanceReady || len(w.b.destroyed) > 0 {
			t.Errorf("%+v, destroyed %v", i, w.b.destroyed)
		}
		w.b.set(func(b *backend) { b.away = false })
		w.finishAgent("r")
		time.Sleep(time.Minute)
		synctest.Wait()
		if got := w.last("r"); got != "RUN_FINISHED" || w.get("r").Status != store.Completed {
			t.Errorf("%s, %s", got, w.get("r").Status)
		}
	})
}

// C4: the transcript of a run that ends without a viewer is saved.
func TestTranscriptWithoutViewer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.seed(seed{id: "r", launch: store.Launched, agent: provider.ProbeExited})
		w.once(w.reaper(nil))
		msgs, err := w.store.Messages.Load(t.Context(), store.Thread{ID: "t-r"})
		if err != nil || len(msgs) != 1 || msgs[0].Role != "assistant" {
			t.Errorf("%+v, %v", msgs, err)
		}
	})
}

// Whoever shuts down leaves its agents alone, and others take them.
func TestRunHandsOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.seed(seed{id: "r", launch: store.Launched, agent: provider.ProbeRunning})
		stop := w.run(w.reaper(func(c *reaper.Config) { c.Owner = "a" }))
		time.Sleep(time.Second)
		if rec := w.get("r"); rec.Owner != "driver" {
			t.Fatalf("owner %q", rec.Owner)
		}
		stop()
		if rec := w.get("r"); rec.Owner != "" || rec.Status != store.Running || w.agentOf("r").state != provider.ProbeRunning {
			t.Errorf("%+v", rec)
		}
		defer w.run(w.reaper(func(c *reaper.Config) { c.Owner = "b" }))()
		time.Sleep(time.Second)
		w.finishAgent("r")
		time.Sleep(time.Second)
		synctest.Wait()
		if w.last("r") != "RUN_FINISHED" || w.launches["r"] != 1 {
			t.Errorf("%s, %d agents", w.last("r"), w.launches["r"])
		}
	})
}

// Nobody drives more than it was told to.
func TestMaxDrives(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		for i := range 10 {
			w.seed(seed{id: fmt.Sprintf("r%d", i), launch: store.Launched, agent: provider.ProbeRunning})
		}
		defer w.run(w.reaper(func(c *reaper.Config) { c.MaxDrives = 3 }))()
		driven := func() (ids []string) {
			for i := range 10 {
				if rec := w.get(fmt.Sprintf("r%d", i)); rec.Owner != "" {
					ids = append(ids, rec.ID)
				}
			}
			return ids
		}
		time.Sleep(5 * time.Minute)
		first := driven()
		if len(first) != 3 {
			t.Fatalf("driven: %v", first)
		}
		// Who has ended makes room.
		for _, id := range first {
			w.finishAgent(id)
		}
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		if got := driven(); len(got) != 3 || w.get(first[0]).Status != store.Completed {
			t.Errorf("driven: %v", got)
		}
	})
}

// A drive that gets nowhere is left, and a run is not held by it for ever.
func TestBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.seed(seed{id: "r", launch: store.Launched, agent: provider.ProbeExited})
		w.failing = errors.New("no way in")
		r := w.reaper(nil)
		if res := w.once(r); res.Outcomes[reaper.Unknown] != 1 {
			t.Errorf("%+v", res.Runs)
		}
		// It can never be driven; its time runs out all the same.
		defer w.run(r)()
		time.Sleep(45 * time.Minute)
		synctest.Wait()
		if rec := w.get("r"); rec.Status != store.Aborted || rec.CancelReason != reaper.ReasonExpired {
			t.Errorf("%s because %q", rec.Status, rec.CancelReason)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.seed(seed{id: "r", launch: store.Launched, agent: provider.ProbeExited})
		r := w.reaper(func(c *reaper.Config) {
			c.Rebuild = func(ctx context.Context, rec store.Run) (chat.Request, error) {
				req, err := w.rebuild(ctx, rec)
				req.Use = append(req.Use, stalls)
				return req, err
			}
		})
		began := time.Now()
		if res := w.once(r); res.Outcomes[reaper.Exceeded] != 1 || time.Since(began) < 30*time.Second || time.Since(began) > time.Minute {
			t.Errorf("%+v after %v", res.Runs, time.Since(began))
		}
		if rec := w.get("r"); rec.Status != store.Running || rec.Owner != "" {
			t.Errorf("%+v", rec)
		}
	})
	// Slow is not stuck.
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.seed(seed{id: "r", launch: store.Launched, agent: provider.ProbeExited})
		w.slow = 20 * time.Second
		if res := w.once(w.reaper(nil)); res.Outcomes[reaper.Finalized] != 1 {
			t.Errorf("%+v", res.Runs)
		}
	})
}

// stalls is a middleware that never gets ready.
var stalls = chat.Middleware{Name: "stalls", Setup: func(ctx context.Context, _ *chat.Run) error {
	<-ctx.Done()
	return context.Cause(ctx)
}}
