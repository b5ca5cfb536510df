package server

import (
	"context"
	"time"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/store"
)

// timedLog measures what is written.
type timedLog struct {
	store.Log
	m *metrics
}

func (l *timedLog) Append(ctx context.Context, c store.Claim, b store.Batch) ([]event.Offset, error) {
	began := time.Now()
	offs, err := l.Log.Append(ctx, c, b)
	l.m.wrote(began, len(b.Events), err)
	return offs, err
}

func (l *timedLog) Finish(ctx context.Context, c store.Claim, f store.Final) (store.Run, error) {
	began := time.Now()
	rec, err := l.Log.Finish(ctx, c, f)
	l.m.wrote(began, len(f.Batch.Events), err)
	return rec, err
}
