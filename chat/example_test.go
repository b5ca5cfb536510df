package chat_test

import (
	"context"
	"fmt"
	"iter"

	"github.com/aisandbox-go/aisandbox/chat"
	"github.com/aisandbox-go/aisandbox/event"
)

// greeting is what one middleware gives to the adapter.
var greeting = chat.NewToken[string]("greeting", "add polite to Request.Use")

// parrot is an adapter that repeats what the user said.
type parrot struct{}

func (parrot) Name() string           { return "parrot" }
func (parrot) Needs() []chat.AnyToken { return []chat.AnyToken{greeting} }

func (parrot) Stream(_ context.Context, r *chat.Run) iter.Seq2[chat.Item, error] {
	return func(yield func(chat.Item, error) bool) {
		hello, err := greeting.Need(r)
		if err != nil {
			yield(chat.Item{}, err)
			return
		}
		msgs := r.Request().Messages
		said := msgs[len(msgs)-1].Content.String()
		for _, ev := range []event.Event{
			event.TextMessageStart{MessageID: r.ID() + "-0", Role: "assistant"},
			event.TextMessageContent{MessageID: r.ID() + "-0", Delta: hello + ", you said: " + said},
			event.TextMessageEnd{MessageID: r.ID() + "-0"},
			event.RunFinished{},
		} {
			if !yield(chat.Item{Event: ev}, nil) {
				return
			}
		}
	}
}

func Example() {
	polite := chat.Middleware{
		Name:     "polite",
		Provides: []chat.AnyToken{greeting},
		Setup: func(_ context.Context, r *chat.Run) error {
			greeting.Provide(r, "Good morning")
			return nil
		},
	}
	ctx := context.Background()
	run, err := chat.Start(ctx, chat.Request{
		Messages: []event.Message{{ID: "1", Role: "user", Content: event.Text("hi")}},
		Adapter:  parrot{},
		Use:      []chat.Middleware{polite},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	for ev, err := range run.Events(ctx) {
		if err != nil {
			fmt.Println(err)
			return
		}
		switch e := ev.(type) {
		case event.TextMessageContent:
			fmt.Println(e.Delta)
		default:
			fmt.Println(ev.Type())
		}
	}
	// Output:
	// RUN_STARTED
	// CUSTOM
	// TEXT_MESSAGE_START
	// Good morning, you said: hi
	// TEXT_MESSAGE_END
	// RUN_FINISHED
}
