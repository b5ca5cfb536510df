package claudecode

import (
	"github.com/aisandbox-go/aisandbox/chat"
	"github.com/aisandbox-go/aisandbox/harness"
)

// Text returns Claude Code as a chat adapter; see [CLI] for model and options.
func Text(model string, o Options) chat.Adapter {
	return harness.Text(CLI(model, o), harness.Options{})
}
