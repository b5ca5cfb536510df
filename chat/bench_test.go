package chat_test

import (
	"context"
	"testing"

	"github.com/aisandbox-go/aisandbox/chat"
	"github.com/aisandbox-go/aisandbox/event"
)

// BenchmarkRun is the whole way from an adapter to one reader, per event.
func BenchmarkRun(b *testing.B) {
	ev := event.TextMessageContent{MessageID: "m", Delta: "some words of an answer"}
	ad := fake{stream: func(_ context.Context, _ *chat.Run, yield func(chat.Item, error) bool) {
		yield(chat.Item{Event: event.TextMessageStart{MessageID: "m", Role: "assistant"}}, nil)
		for range b.N {
			yield(chat.Item{Event: ev}, nil)
		}
		yield(chat.Item{Event: event.TextMessageEnd{MessageID: "m"}}, nil)
		yield(chat.Item{Event: finished}, nil)
	}}
	b.ReportAllocs()
	r, err := chat.Start(b.Context(), chat.Request{Adapter: ad})
	if err != nil {
		b.Fatal(err)
	}
	n := 0
	for _, err := range r.Events(b.Context()) {
		if err != nil {
			b.Fatal(err)
		}
		n++
	}
	if n != b.N+5 {
		b.Fatalf("%d events", n)
	}
}
