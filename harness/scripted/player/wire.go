package player

import "encoding/json"

// The shapes below are the lines of Claude Code's stream-json output that this
// agent prints (spec 02 §6 and §12). Field order is that of the real lines.

type initLine struct {
	Type              string         `json:"type"`
	Subtype           string         `json:"subtype"`
	Cwd               string         `json:"cwd"`
	SessionID         string         `json:"session_id"`
	Tools             []string       `json:"tools"`
	MCPServers        []serverStatus `json:"mcp_servers"`
	Model             string         `json:"model"`
	PermissionMode    string         `json:"permissionMode"`
	SlashCommands     []string       `json:"slash_commands"`
	APIKeySource      string         `json:"apiKeySource"`
	Version           string         `json:"claude_code_version"`
	OutputStyle       string         `json:"output_style"`
	Agents            []string       `json:"agents"`
	Skills            []string       `json:"skills"`
	Plugins           []string       `json:"plugins"`
	AnalyticsDisabled bool           `json:"analytics_disabled"`
	FeedbackDisabled  bool           `json:"product_feedback_disabled"`
	UUID              string         `json:"uuid"`
	MemoryPaths       struct{}       `json:"memory_paths"`
	FastModeState     string         `json:"fast_mode_state"`
}

type serverStatus struct {
	Name   string `json:"name"`
	Status string `json:"status"`
}

type statusLine struct {
	Type      string `json:"type"`
	Subtype   string `json:"subtype"`
	Status    string `json:"status"`
	UUID      string `json:"uuid"`
	SessionID string `json:"session_id"`
}

type streamLine struct {
	Type            string  `json:"type"`
	Event           any     `json:"event"`
	SessionID       string  `json:"session_id"`
	ParentToolUseID *string `json:"parent_tool_use_id"`
	UUID            string  `json:"uuid"`
	TTFT            *int    `json:"ttft_ms,omitempty"`
}

type messageStart struct {
	Type    string  `json:"type"`
	Message message `json:"message"`
}

type blockStart struct {
	Type  string `json:"type"`
	Index int    `json:"index"`
	Block any    `json:"content_block"`
}

type blockDelta struct {
	Type  string `json:"type"`
	Index int    `json:"index"`
	Delta any    `json:"delta"`
}

type blockStop struct {
	Type  string `json:"type"`
	Index int    `json:"index"`
}

type messageDelta struct {
	Type  string    `json:"type"`
	Delta stopDelta `json:"delta"`
	Usage struct {
		OutputTokens int `json:"output_tokens"`
	} `json:"usage"`
}

type stopDelta struct {
	StopReason   string  `json:"stop_reason"`
	StopSequence *string `json:"stop_sequence"`
}

type messageStop struct {
	Type string `json:"type"`
}

type textDelta struct {
	Type string `json:"type"`
	Text string `json:"text"`
}

type thinkingDelta struct {
	Type     string `json:"type"`
	Thinking string `json:"thinking"`
}

type signatureDelta struct {
	Type      string `json:"type"`
	Signature string `json:"signature"`
}

type inputDelta struct {
	Type        string `json:"type"`
	PartialJSON string `json:"partial_json"`
}

type textBlock struct {
	Type string `json:"type"`
	Text string `json:"text"`
}

type thinkingBlock struct {
	Type      string `json:"type"`
	Thinking  string `json:"thinking"`
	Signature string `json:"signature"`
}

type toolBlock struct {
	Type  string          `json:"type"`
	ID    string          `json:"id"`
	Name  string          `json:"name"`
	Input json.RawMessage `json:"input"`
}

type message struct {
	ID           string  `json:"id"`
	Type         string  `json:"type"`
	Role         string  `json:"role"`
	Model        string  `json:"model"`
	Content      []any   `json:"content"`
	StopReason   *string `json:"stop_reason"`
	StopSequence *string `json:"stop_sequence"`
	Usage        usage   `json:"usage"`
}

type usage struct {
	Input         int `json:"input_tokens"`
	CacheCreation int `json:"cache_creation_input_tokens"`
	CacheRead     int `json:"cache_read_input_tokens"`
	Output        int `json:"output_tokens"`
}

type assistantLine struct {
	Type    string `json:"type"`
	Message struct {
		message
		ContextManagement *string `json:"context_management"`
	} `json:"message"`
	ParentToolUseID *string    `json:"parent_tool_use_id"`
	SessionID       string     `json:"session_id"`
	UUID            string     `json:"uuid"`
	RequestID       string     `json:"request_id"`
	ToolUseMeta     []toolMeta `json:"tool_use_meta,omitempty"`
}

type toolMeta struct {
	ID                string `json:"id"`
	DisplayName       string `json:"display_name"`
	ServerDisplayName string `json:"server_display_name"`
}

type userLine struct {
	Type    string `json:"type"`
	Message struct {
		Role    string `json:"role"`
		Content []any  `json:"content"`
	} `json:"message"`
	ParentToolUseID *string `json:"parent_tool_use_id"`
	SessionID       string  `json:"session_id"`
	UUID            string  `json:"uuid"`
	Timestamp       string  `json:"timestamp"`
	ToolUseResult   any     `json:"tool_use_result,omitempty"`
}

type resultBlock struct {
	ToolUseID string `json:"tool_use_id"`
	Type      string `json:"type"`
	Content   any    `json:"content"`
	IsError   *bool  `json:"is_error,omitempty"`
}

type bashDone struct {
	Stdout           string `json:"stdout"`
	Stderr           string `json:"stderr"`
	Interrupted      bool   `json:"interrupted"`
	IsImage          bool   `json:"isImage"`
	NoOutputExpected bool   `json:"noOutputExpected"`
}

type writeDone struct {
	Type            string     `json:"type"`
	FilePath        string     `json:"filePath"`
	Content         string     `json:"content"`
	StructuredPatch []struct{} `json:"structuredPatch"`
	OriginalFile    *string    `json:"originalFile"`
	UserModified    bool       `json:"userModified"`
}

type editDone struct {
	FilePath        string     `json:"filePath"`
	OldString       string     `json:"oldString"`
	NewString       string     `json:"newString"`
	OriginalFile    string     `json:"originalFile"`
	StructuredPatch []struct{} `json:"structuredPatch"`
	UserModified    bool       `json:"userModified"`
	ReplaceAll      bool       `json:"replaceAll"`
}

// Inputs of the tools, as a model sends them.
type (
	bashInput struct {
		Command string `json:"command"`
	}
	writeInput struct {
		FilePath string `json:"file_path"`
		Content  string `json:"content"`
	}
	editInput struct {
		ReplaceAll bool   `json:"replace_all"`
		FilePath   string `json:"file_path"`
		OldString  string `json:"old_string"`
		NewString  string `json:"new_string"`
	}
)

// okLine and errorLine are the two forms of the last line.
type okLine struct {
	Type           string  `json:"type"`
	Subtype        string  `json:"subtype"`
	IsError        bool    `json:"is_error"`
	APIErrorStatus *int    `json:"api_error_status"`
	Duration       int     `json:"duration_ms"`
	DurationAPI    int     `json:"duration_api_ms"`
	TTFT           int     `json:"ttft_ms"`
	TTFTStream     int     `json:"ttft_stream_ms"`
	TimeToRequest  int     `json:"time_to_request_ms"`
	NumTurns       int     `json:"num_turns"`
	Result         string  `json:"result"`
	StopReason     *string `json:"stop_reason"`
	totals
	TerminalReason string `json:"terminal_reason"`
	FastModeState  string `json:"fast_mode_state"`
	UUID           string `json:"uuid"`
}

type errorLine struct {
	Type        string  `json:"type"`
	Subtype     string  `json:"subtype"`
	Duration    int     `json:"duration_ms"`
	DurationAPI int     `json:"duration_api_ms"`
	IsError     bool    `json:"is_error"`
	NumTurns    int     `json:"num_turns"`
	StopReason  *string `json:"stop_reason"`
	totals
	TerminalReason string   `json:"terminal_reason,omitempty"`
	FastModeState  string   `json:"fast_mode_state,omitempty"`
	UUID           string   `json:"uuid"`
	Errors         []string `json:"errors"`
}

type totals struct {
	SessionID string  `json:"session_id"`
	Cost      float64 `json:"total_cost_usd"`
	Usage     struct {
		usage
		ServerToolUse struct {
			WebSearch int `json:"web_search_requests"`
			WebFetch  int `json:"web_fetch_requests"`
		} `json:"server_tool_use"`
		ServiceTier string `json:"service_tier"`
		CacheDetail struct {
			Hour    int `json:"ephemeral_1h_input_tokens"`
			Minutes int `json:"ephemeral_5m_input_tokens"`
		} `json:"cache_creation"`
		Geo        string     `json:"inference_geo"`
		Iterations []struct{} `json:"iterations"`
		Speed      string     `json:"speed"`
	} `json:"usage"`
	ModelUsage        map[string]modelUsage `json:"modelUsage"`
	PermissionDenials []denial              `json:"permission_denials"`
}

type modelUsage struct {
	Input         int     `json:"inputTokens"`
	Output        int     `json:"outputTokens"`
	CacheRead     int     `json:"cacheReadInputTokens"`
	CacheCreation int     `json:"cacheCreationInputTokens"`
	WebSearch     int     `json:"webSearchRequests"`
	Cost          float64 `json:"costUSD"`
	ContextWindow int     `json:"contextWindow"`
	MaxOutput     int     `json:"maxOutputTokens"`
}

type denial struct {
	ToolName  string          `json:"tool_name"`
	ToolUseID string          `json:"tool_use_id"`
	ToolInput json.RawMessage `json:"tool_input"`
}
