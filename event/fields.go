package event

import "encoding/json"

// The fields of each event, in the order in which they are written. must is
// required by the wire, may is left out when empty (spec 07 §5.2).

func (e *RunStarted) fields(c *codec) {
	c.head(TypeRunStarted, &e.Common)
	c.must("threadId", &e.ThreadID)
	c.must("runId", &e.RunID)
	c.may("parentRunId", &e.ParentRunID)
	c.may("protocolVersion", &e.ProtocolVersion)
	c.rest("input", &e.Input, "")
	c.tail(&e.Common)
}

func (e *RunFinished) fields(c *codec) {
	c.head(TypeRunFinished, &e.Common)
	c.must("threadId", &e.ThreadID)
	c.must("runId", &e.RunID)
	c.value("outcome", &e.Outcome, false, e.Outcome == nil)
	c.rest("result", &e.Result, "")
	c.usage(&e.Usage)
	c.tail(&e.Common)
}

func (e *RunError) fields(c *codec) {
	c.head(TypeRunError, &e.Common)
	c.must("message", &e.Message)
	c.may("code", &e.Code)
	c.usage(&e.Usage)
	c.tail(&e.Common)
}

func (e *StepStarted) fields(c *codec) {
	c.head(TypeStepStarted, &e.Common)
	c.must("stepName", &e.StepName)
	c.tail(&e.Common)
}

func (e *StepFinished) fields(c *codec) {
	c.head(TypeStepFinished, &e.Common)
	c.must("stepName", &e.StepName)
	c.tail(&e.Common)
}

func (e *TextMessageStart) fields(c *codec) {
	c.head(TypeTextMessageStart, &e.Common)
	c.must("messageId", &e.MessageID)
	c.must("role", &e.Role)
	c.may("name", &e.Name)
	c.tail(&e.Common)
}

func (e *TextMessageContent) fields(c *codec) {
	c.head(TypeTextMessageContent, &e.Common)
	c.must("messageId", &e.MessageID)
	c.must("delta", &e.Delta)
	c.tail(&e.Common)
}

func (e *TextMessageEnd) fields(c *codec) {
	c.head(TypeTextMessageEnd, &e.Common)
	c.must("messageId", &e.MessageID)
	c.tail(&e.Common)
}

func (e *ReasoningStart) fields(c *codec) {
	c.head(TypeReasoningStart, &e.Common)
	c.must("messageId", &e.MessageID)
	c.tail(&e.Common)
}

func (e *ReasoningMessageStart) fields(c *codec) {
	c.head(TypeReasoningMessageStart, &e.Common)
	c.must("messageId", &e.MessageID)
	c.must("role", &e.Role)
	c.tail(&e.Common)
}

func (e *ReasoningMessageContent) fields(c *codec) {
	c.head(TypeReasoningContent, &e.Common)
	c.must("messageId", &e.MessageID)
	c.must("delta", &e.Delta)
	c.tail(&e.Common)
}

func (e *ReasoningMessageEnd) fields(c *codec) {
	c.head(TypeReasoningMessageEnd, &e.Common)
	c.must("messageId", &e.MessageID)
	c.tail(&e.Common)
}

func (e *ReasoningEnd) fields(c *codec) {
	c.head(TypeReasoningEnd, &e.Common)
	c.must("messageId", &e.MessageID)
	c.tail(&e.Common)
}

func (e *ReasoningEncryptedValue) fields(c *codec) {
	c.head(TypeReasoningEncrypted, &e.Common)
	c.must("subtype", &e.Subtype)
	c.must("entityId", &e.EntityID)
	c.must("encryptedValue", &e.EncryptedValue)
	c.tail(&e.Common)
}

func (e *ToolCallStart) fields(c *codec) {
	c.head(TypeToolCallStart, &e.Common)
	c.must("toolCallId", &e.ToolCallID)
	c.must("toolCallName", &e.ToolCallName)
	c.may("parentMessageId", &e.ParentMessageID)
	c.tail(&e.Common)
}

func (e *ToolCallArgs) fields(c *codec) {
	c.head(TypeToolCallArgs, &e.Common)
	c.must("toolCallId", &e.ToolCallID)
	c.must("delta", &e.Delta)
	c.tail(&e.Common)
}

func (e *ToolCallEnd) fields(c *codec) {
	c.head(TypeToolCallEnd, &e.Common)
	c.must("toolCallId", &e.ToolCallID)
	c.tail(&e.Common)
}

func (e *ToolCallResult) fields(c *codec) {
	c.head(TypeToolCallResult, &e.Common)
	c.must("messageId", &e.MessageID)
	c.must("toolCallId", &e.ToolCallID)
	c.must("content", &e.Content)
	c.may("role", &e.Role)
	c.tail(&e.Common)
}

func (e *StateSnapshot) fields(c *codec) {
	c.head(TypeStateSnapshot, &e.Common)
	c.any("snapshot", &e.Snapshot, "")
	c.tail(&e.Common)
}

func (e *StateDelta) fields(c *codec) {
	c.head(TypeStateDelta, &e.Common)
	c.any("delta", &e.Delta, "array")
	c.tail(&e.Common)
}

func (e *MessagesSnapshot) fields(c *codec) {
	c.head(TypeMessagesSnapshot, &e.Common)
	if !c.decode && e.Messages == nil {
		e.Messages = []Message{} // an empty list, never null
	}
	c.value("messages", &e.Messages, true, false)
	c.tail(&e.Common)
}

func (e *Custom) fields(c *codec) {
	c.head(TypeCustom, &e.Common)
	c.must("name", &e.Name)
	if !c.decode && len(e.Value) == 0 {
		e.Value = json.RawMessage("{}") // clients refuse an absent value
	}
	c.any("value", &e.Value, "")
	c.tail(&e.Common)
}

// usage is always the array form: AG-UI fails a run over an object (spec 07 §5.4).
func (c *codec) usage(u *[]Usage) {
	c.value("usage", u, false, len(*u) == 0)
	for i := range *u {
		if v := &(*u)[i]; v.InputTokens < 0 || v.OutputTokens < 0 || v.TotalTokens < 0 || v.CachedInputTokens < 0 || v.ReasoningTokens < 0 {
			c.fail("usage", "a count is negative")
		}
	}
}
