package scripted

import (
	"github.com/aisandbox-go/aisandbox/chat"
	"github.com/aisandbox-go/aisandbox/harness"
)

// Text returns the scripted agent as a chat adapter.
func Text(o Options) chat.Adapter { return harness.Text(CLI(o), harness.Options{}) }
