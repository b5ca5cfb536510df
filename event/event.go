// Package event is the AG-UI vocabulary: what an agent's run says, as immutable
// values, with the codec, the SSE framing and the guard that keeps a stream legal.
//
// The set of events is closed; [Raw] carries what a newer peer sends. Values are
// never changed after they were made, so they may be shared between goroutines.
// Timestamps and ids are set by whoever drives a run, never by a constructor: a
// replay of the same bytes must yield the same bytes (spec 07 §5).
package event

import "encoding/json"

// Type is the wire name of an event.
type Type string

// The event types of the wire.
const (
	TypeRunStarted            Type = "RUN_STARTED"
	TypeRunFinished           Type = "RUN_FINISHED"
	TypeRunError              Type = "RUN_ERROR"
	TypeStepStarted           Type = "STEP_STARTED"
	TypeStepFinished          Type = "STEP_FINISHED"
	TypeTextMessageStart      Type = "TEXT_MESSAGE_START"
	TypeTextMessageContent    Type = "TEXT_MESSAGE_CONTENT"
	TypeTextMessageEnd        Type = "TEXT_MESSAGE_END"
	TypeReasoningStart        Type = "REASONING_START"
	TypeReasoningMessageStart Type = "REASONING_MESSAGE_START"
	TypeReasoningContent      Type = "REASONING_MESSAGE_CONTENT"
	TypeReasoningMessageEnd   Type = "REASONING_MESSAGE_END"
	TypeReasoningEnd          Type = "REASONING_END"
	TypeReasoningEncrypted    Type = "REASONING_ENCRYPTED_VALUE"
	TypeToolCallStart         Type = "TOOL_CALL_START"
	TypeToolCallArgs          Type = "TOOL_CALL_ARGS"
	TypeToolCallEnd           Type = "TOOL_CALL_END"
	TypeToolCallResult        Type = "TOOL_CALL_RESULT"
	TypeStateSnapshot         Type = "STATE_SNAPSHOT"
	TypeStateDelta            Type = "STATE_DELTA"
	TypeMessagesSnapshot      Type = "MESSAGES_SNAPSHOT"
	TypeCustom                Type = "CUSTOM"
)

// Event is one event of a run.
type Event interface {
	Type() Type

	// Base returns what every event may carry.
	Base() Common

	// With returns a copy of the event with other common fields.
	With(Common) Event
}

// Common is what every event may carry. Metadata is a JSON object; what is ours
// lives under its key "tanstack" (see [TanStack]), since clients strip unknown
// top-level keys.
type Common struct {
	Timestamp int64           `json:"timestamp,omitempty"` // epoch milliseconds
	RawEvent  json.RawMessage `json:"rawEvent,omitempty"`
	Metadata  json.RawMessage `json:"metadata,omitempty"`
}

// Base returns c; every event has it by embedding.
func (c Common) Base() Common { return c }

// The structs below are the wire shapes of spec 07 §5.2; fields without
// omitempty are required there.
type (
	// RunStarted opens a run; it is the first event of every stream.
	RunStarted struct {
		ThreadID        string          `json:"threadId"`
		RunID           string          `json:"runId"`
		ParentRunID     string          `json:"parentRunId,omitempty"`
		ProtocolVersion string          `json:"protocolVersion,omitempty"`
		Input           json.RawMessage `json:"input,omitempty"`
		Common
	}
	// RunFinished ends a run well, or pauses it for an interrupt.
	RunFinished struct {
		ThreadID string          `json:"threadId"`
		RunID    string          `json:"runId"`
		Outcome  *Outcome        `json:"outcome,omitempty"`
		Result   json.RawMessage `json:"result,omitempty"`
		Usage    []Usage         `json:"usage,omitempty"`
		Common
	}
	// RunError ends a run badly. Code is a string, never a number.
	RunError struct {
		Message string  `json:"message"`
		Code    string  `json:"code,omitempty"`
		Usage   []Usage `json:"usage,omitempty"`
		Common
	}
	// StepStarted opens a named step.
	StepStarted struct {
		StepName string `json:"stepName"`
		Common
	}
	// StepFinished closes a named step.
	StepFinished struct {
		StepName string `json:"stepName"`
		Common
	}
	// TextMessageStart opens a message of the assistant.
	TextMessageStart struct {
		MessageID string `json:"messageId"`
		Role      string `json:"role"`
		Name      string `json:"name,omitempty"`
		Common
	}
	// TextMessageContent adds text to an open message.
	TextMessageContent struct {
		MessageID string `json:"messageId"`
		Delta     string `json:"delta"`
		Common
	}
	// TextMessageEnd closes a message.
	TextMessageEnd struct {
		MessageID string `json:"messageId"`
		Common
	}
	// ReasoningStart opens a span of reasoning.
	ReasoningStart struct {
		MessageID string `json:"messageId"`
		Common
	}
	// ReasoningMessageStart opens a reasoning message; its role is "reasoning".
	ReasoningMessageStart struct {
		MessageID string `json:"messageId"`
		Role      string `json:"role"`
		Common
	}
	// ReasoningMessageContent adds text to an open reasoning message.
	ReasoningMessageContent struct {
		MessageID string `json:"messageId"`
		Delta     string `json:"delta"`
		Common
	}
	// ReasoningMessageEnd closes a reasoning message.
	ReasoningMessageEnd struct {
		MessageID string `json:"messageId"`
		Common
	}
	// ReasoningEnd closes a span of reasoning.
	ReasoningEnd struct {
		MessageID string `json:"messageId"`
		Common
	}
	// ReasoningEncryptedValue carries a provider's signature.
	ReasoningEncryptedValue struct {
		Subtype        string `json:"subtype"`
		EntityID       string `json:"entityId"`
		EncryptedValue string `json:"encryptedValue"`
		Common
	}
	// ToolCallStart opens a tool call.
	ToolCallStart struct {
		ToolCallID      string `json:"toolCallId"`
		ToolCallName    string `json:"toolCallName"`
		ParentMessageID string `json:"parentMessageId,omitempty"`
		Common
	}
	// ToolCallArgs adds a piece of the arguments' JSON text.
	ToolCallArgs struct {
		ToolCallID string `json:"toolCallId"`
		Delta      string `json:"delta"`
		Common
	}
	// ToolCallEnd closes the arguments.
	ToolCallEnd struct {
		ToolCallID string `json:"toolCallId"`
		Common
	}
	// ToolCallResult is what the tool answered, always a string.
	ToolCallResult struct {
		MessageID  string `json:"messageId"`
		ToolCallID string `json:"toolCallId"`
		Content    string `json:"content"`
		Role       string `json:"role,omitempty"`
		Common
	}
	// StateSnapshot replaces the shared state.
	StateSnapshot struct {
		Snapshot json.RawMessage `json:"snapshot"`
		Common
	}
	// StateDelta is an RFC 6902 patch of the shared state.
	StateDelta struct {
		Delta json.RawMessage `json:"delta"`
		Common
	}
	// MessagesSnapshot replaces the conversation.
	MessagesSnapshot struct {
		Messages []Message `json:"messages"`
		Common
	}
	// Custom is everything that AG-UI has no type for. Value is never absent.
	Custom struct {
		Name  string          `json:"name"`
		Value json.RawMessage `json:"value"`
		Common
	}
	// Raw is an event of a type that this package does not know, passed on as it
	// came. JSON is the whole object; Common is not read from it.
	Raw struct {
		Name Type
		JSON json.RawMessage
	}
)

// Outcome says how a run finished: "success", or "interrupt" with what it waits for.
type Outcome struct {
	Type       string            `json:"type"`
	Interrupts []json.RawMessage `json:"interrupts,omitempty"`
}

// Usage is the token count of one model, in the wire's shape. What has no place
// here goes to metadata.tanstack.usage (spec 07 §5.4).
type Usage struct {
	Provider          string `json:"provider,omitempty"`
	Model             string `json:"model,omitempty"`
	InputTokens       int64  `json:"inputTokens"`
	OutputTokens      int64  `json:"outputTokens"`
	TotalTokens       int64  `json:"totalTokens"`
	CachedInputTokens int64  `json:"cachedInputTokens,omitempty"`
	ReasoningTokens   int64  `json:"reasoningTokens,omitempty"`
}

// TanStack is the object under metadata.tanstack.
type TanStack struct {
	Model        string          `json:"model,omitempty"`
	FinishReason string          `json:"finishReason,omitempty"` // "stop" or "length"
	ThreadID     string          `json:"threadId,omitempty"`
	RunID        string          `json:"runId,omitempty"`
	State        string          `json:"state,omitempty"` // "output-error" on a tool result
	Input        json.RawMessage `json:"input,omitempty"` // of a tool call
	Usage        json.RawMessage `json:"usage,omitempty"`
}
