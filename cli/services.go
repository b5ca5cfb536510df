package cli

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/aisandbox-go/aisandbox/reaper"
	"github.com/aisandbox-go/aisandbox/sandbox"
	"github.com/aisandbox-go/aisandbox/store"
)

// services are what works in the background of a server, each until its context
// ends. One that ends before, or with an error, ends the server.
func services(h *host) []func(context.Context) error {
	return []func(context.Context) error{h.reap}
}

// reap looks after runs and sandboxes for as long as the server works.
func (h *host) reap(ctx context.Context) error {
	m := newReapMetrics()
	if err := h.server.Register(m.all()...); err != nil {
		return err
	}
	r, err := h.reaper(m)
	if err != nil {
		return err
	}
	return r.Run(ctx)
}

// reaper is a reaper of what the host can run.
func (h *host) reaper(m reaper.Metrics) (*reaper.Reaper, error) {
	defs := map[string]*sandbox.Def{}
	for name, d := range h.built.Definitions {
		defs[name] = d.Def
	}
	// A store that forgets by itself, as one in memory does, isn't told to.
	retainer, _ := h.opened.(store.Retainer)
	return reaper.New(reaper.Config{
		Store: h.store, Rebuild: h.server.Rebuild, Start: h.server.TakeOver, Definitions: defs,
		Deployment: h.deployment, Owner: h.owner,
		Retention: h.built.Retention, Retainer: retainer,
		Metrics: m, Logger: h.log,
	})
}

// reapMetrics shows what a reaper does, by the names of spec 04 §21.10.
type reapMetrics struct {
	reaped    *prometheus.CounterVec
	alarms    *prometheus.CounterVec
	instances *prometheus.GaugeVec
	age       prometheus.Histogram
}

func newReapMetrics() *reapMetrics {
	return &reapMetrics{
		reaped: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "aisbx_reap_total", Help: "Runs without a driver that this host looked into, by what became of them.",
		}, []string{"outcome"}),
		alarms: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "aisbx_alarms_total", Help: "What a person should look at: sandboxes that can't be destroyed, journals that can't be believed.",
		}, []string{"kind"}),
		instances: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "aisbx_instances", Help: "Sandboxes that are recorded, by state, when this host counted them last.",
		}, []string{"state"}),
		age: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "aisbx_orphan_age_seconds", Help: "Time for which a run had had no driver when this host took it.",
			Buckets: prometheus.ExponentialBuckets(0.1, 3, 10),
		}),
	}
}

func (m *reapMetrics) all() []prometheus.Collector {
	return []prometheus.Collector{m.reaped, m.alarms, m.instances, m.age}
}

func (m *reapMetrics) Reaped(o reaper.Outcome)    { m.reaped.WithLabelValues(string(o)).Inc() }
func (m *reapMetrics) Alarm(kind string)          { m.alarms.WithLabelValues(kind).Inc() }
func (m *reapMetrics) Orphaned(age time.Duration) { m.age.Observe(age.Seconds()) }

func (m *reapMetrics) Instances(n map[store.InstanceState]int) {
	for _, s := range []store.InstanceState{
		store.InstanceCreating, store.InstanceReady, store.InstanceDestroying, store.InstanceDestroyed, store.InstanceLost,
	} {
		m.instances.WithLabelValues(string(s)).Set(float64(n[s]))
	}
}
