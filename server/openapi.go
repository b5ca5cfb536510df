package server

import (
	_ "embed"
	"slices"
)

//go:embed openapi.yaml
var openAPI []byte

// OpenAPI returns the description of the routes, an OpenAPI 3.1 document in YAML.
func OpenAPI() []byte { return slices.Clone(openAPI) }
