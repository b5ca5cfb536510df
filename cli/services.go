package cli

import "context"

// services are what works in the background of a server, each until its context
// ends. One that ends before, or with an error, ends the server.
func services(*host) []func(context.Context) error { return nil }
