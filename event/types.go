package event

// What makes each struct an [Event]: its wire name, and a copy with other common
// fields.

func (RunStarted) Type() Type              { return TypeRunStarted }
func (RunFinished) Type() Type             { return TypeRunFinished }
func (RunError) Type() Type                { return TypeRunError }
func (StepStarted) Type() Type             { return TypeStepStarted }
func (StepFinished) Type() Type            { return TypeStepFinished }
func (TextMessageStart) Type() Type        { return TypeTextMessageStart }
func (TextMessageContent) Type() Type      { return TypeTextMessageContent }
func (TextMessageEnd) Type() Type          { return TypeTextMessageEnd }
func (ReasoningStart) Type() Type          { return TypeReasoningStart }
func (ReasoningMessageStart) Type() Type   { return TypeReasoningMessageStart }
func (ReasoningMessageContent) Type() Type { return TypeReasoningContent }
func (ReasoningMessageEnd) Type() Type     { return TypeReasoningMessageEnd }
func (ReasoningEnd) Type() Type            { return TypeReasoningEnd }
func (ReasoningEncryptedValue) Type() Type { return TypeReasoningEncrypted }
func (ToolCallStart) Type() Type           { return TypeToolCallStart }
func (ToolCallArgs) Type() Type            { return TypeToolCallArgs }
func (ToolCallEnd) Type() Type             { return TypeToolCallEnd }
func (ToolCallResult) Type() Type          { return TypeToolCallResult }
func (StateSnapshot) Type() Type           { return TypeStateSnapshot }
func (StateDelta) Type() Type              { return TypeStateDelta }
func (MessagesSnapshot) Type() Type        { return TypeMessagesSnapshot }
func (Custom) Type() Type                  { return TypeCustom }
func (e Raw) Type() Type                   { return e.Name }

func (e RunStarted) With(c Common) Event              { e.Common = c; return e }
func (e RunFinished) With(c Common) Event             { e.Common = c; return e }
func (e RunError) With(c Common) Event                { e.Common = c; return e }
func (e StepStarted) With(c Common) Event             { e.Common = c; return e }
func (e StepFinished) With(c Common) Event            { e.Common = c; return e }
func (e TextMessageStart) With(c Common) Event        { e.Common = c; return e }
func (e TextMessageContent) With(c Common) Event      { e.Common = c; return e }
func (e TextMessageEnd) With(c Common) Event          { e.Common = c; return e }
func (e ReasoningStart) With(c Common) Event          { e.Common = c; return e }
func (e ReasoningMessageStart) With(c Common) Event   { e.Common = c; return e }
func (e ReasoningMessageContent) With(c Common) Event { e.Common = c; return e }
func (e ReasoningMessageEnd) With(c Common) Event     { e.Common = c; return e }
func (e ReasoningEnd) With(c Common) Event            { e.Common = c; return e }
func (e ReasoningEncryptedValue) With(c Common) Event { e.Common = c; return e }
func (e ToolCallStart) With(c Common) Event           { e.Common = c; return e }
func (e ToolCallArgs) With(c Common) Event            { e.Common = c; return e }
func (e ToolCallEnd) With(c Common) Event             { e.Common = c; return e }
func (e ToolCallResult) With(c Common) Event          { e.Common = c; return e }
func (e StateSnapshot) With(c Common) Event           { e.Common = c; return e }
func (e StateDelta) With(c Common) Event              { e.Common = c; return e }
func (e MessagesSnapshot) With(c Common) Event        { e.Common = c; return e }
func (e Custom) With(c Common) Event                  { e.Common = c; return e }

// Base returns nothing: a Raw is passed on as it came.
func (Raw) Base() Common { return Common{} }

// With returns the Raw unchanged.
func (e Raw) With(Common) Event { return e }
