package server

import (
	"errors"
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/aisandbox-go/aisandbox/store"
)

// metrics has a registry of its own, so that two servers in one process, and the
// program around them, don't meet.
type metrics struct {
	handler  http.Handler
	registry *prometheus.Registry
	requests *prometheus.CounterVec
	ended    *prometheus.CounterVec
	fenced   prometheus.Counter
	queued   prometheus.Gauge
	append   prometheus.Histogram
	batch    prometheus.Histogram
	lag      prometheus.Histogram
}

func newMetrics(s *Server) *metrics {
	reg := prometheus.NewRegistry()
	m := &metrics{
		registry: reg,
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "aisbx_http_requests_total", Help: "Requests that were answered, by route and status.",
		}, []string{"route", "status"}),
		ended: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "aisbx_runs_ended_total", Help: "Runs that this host stopped driving, by how they ended here.",
		}, []string{"outcome"}),
		fenced: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "aisbx_fence_refusals_total", Help: "Writes that were refused because another host has the run.",
		}),
		queued: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "aisbx_runs_queued", Help: "Runs that wait here for their thread's turn.",
		}),
		append: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "aisbx_append_seconds", Help: "Time that the store took to write a batch of events.",
			Buckets: prometheus.ExponentialBuckets(0.0001, 2.5, 14),
		}),
		batch: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "aisbx_append_batch_size", Help: "Events in one batch.",
			Buckets: prometheus.ExponentialBuckets(1, 2, 8),
		}),
		lag: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "aisbx_tail_lag_seconds", Help: "Time from an event to its delivery to a reader that follows the run.",
			Buckets: prometheus.ExponentialBuckets(0.001, 2.5, 12),
		}),
	}
	gauge := func(name, help string, read func() int) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, func() float64 {
			s.mu.Lock()
			defer s.mu.Unlock()
			return float64(read())
		})
	}
	reg.MustRegister(m.requests, m.ended, m.fenced, m.queued, m.append, m.batch, m.lag,
		gauge("aisbx_runs_driven", "Runs that this host drives now, waiting ones included.", func() int { return len(s.live) }),
		gauge("aisbx_readers", "Streams that are open now.", func() int { return s.reading }),
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	m.handler = promhttp.HandlerFor(reg, promhttp.HandlerOpts{})
	return m
}

func (m *metrics) request(route string, status int) {
	m.requests.WithLabelValues(route, strconv.Itoa(status)).Inc()
}

func (m *metrics) wrote(began time.Time, events int, err error) {
	if errors.Is(err, store.ErrFenced) {
		m.fenced.Inc()
	}
	if err == nil {
		m.append.Observe(time.Since(began).Seconds())
		m.batch.Observe(float64(events))
	}
}
