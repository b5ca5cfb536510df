package secret

import (
	"context"
	"fmt"
	"log/slog"
)

// Handler returns a log handler that redacts the message and the attributes of
// every record before next sees them.
func (r *Redactor) Handler(next slog.Handler) slog.Handler {
	if r.Idle() {
		return next
	}
	return &handler{r, next}
}

type handler struct {
	r    *Redactor
	next slog.Handler
}

func (h *handler) Enabled(ctx context.Context, l slog.Level) bool { return h.next.Enabled(ctx, l) }

func (h *handler) Handle(ctx context.Context, rec slog.Record) error {
	out := slog.NewRecord(rec.Time, rec.Level, h.r.String(rec.Message), rec.PC)
	rec.Attrs(func(a slog.Attr) bool {
		out.AddAttrs(h.attr(a))
		return true
	})
	return h.next.Handle(ctx, out)
}

func (h *handler) WithAttrs(as []slog.Attr) slog.Handler {
	red := make([]slog.Attr, len(as))
	for i, a := range as {
		red[i] = h.attr(a)
	}
	return &handler{h.r, h.next.WithAttrs(red)}
}

func (h *handler) WithGroup(name string) slog.Handler {
	return &handler{h.r, h.next.WithGroup(name)}
}

func (h *handler) attr(a slog.Attr) slog.Attr {
	v := a.Value.Resolve()
	switch v.Kind() {
	case slog.KindString:
		v = slog.StringValue(h.r.String(v.String()))
	case slog.KindGroup:
		var red []slog.Attr
		for _, g := range v.Group() {
			red = append(red, h.attr(g))
		}
		v = slog.GroupValue(red...)
	case slog.KindAny:
		// A value that prints with a secret in it is logged as its redacted text; any
		// other keeps its structure.
		if text := fmt.Sprintf("%+v", v.Any()); h.r.String(text) != text {
			v = slog.StringValue(h.r.String(text))
		}
	}
	return slog.Attr{Key: a.Key, Value: v}
}
