package server

import (
	"context"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/aisandbox-go/aisandbox/chat"
)

// TakeOver starts a request that [Server.Rebuild] made, with Attach set, and keeps
// its run among those that this host drives: Shutdown hands it over, and whoever
// waits behind it on this host hears of its end. A server that is full, or shut
// down, refuses.
func (s *Server) TakeOver(ctx context.Context, req chat.Request) (*chat.Run, error) {
	if err := s.admit(); err != nil {
		return nil, err
	}
	defer s.admitted()
	r, err := chat.Start(ctx, req)
	if err != nil {
		return nil, err
	}
	if !r.Joined() {
		s.drive(r)
	}
	return r, nil
}

// Register adds metrics to those that the server shows.
func (s *Server) Register(cs ...prometheus.Collector) error {
	for _, c := range cs {
		if err := s.metrics.registry.Register(c); err != nil {
			return err
		}
	}
	return nil
}
