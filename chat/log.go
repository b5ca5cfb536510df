package chat

// Keys of the attributes in this package's log records.
const (
	keyError      = "error"
	keyMiddleware = "middleware"
	keyOutcome    = "outcome"
	keyPath       = "path"
	keyRun        = "run"
	keyThread     = "thread"
	keyToken      = "token"
	keyType       = "type"
	keyWhy        = "why"
)
