// Command aisandbox puts a coding agent to work in a sandbox. This is where
// providers and harnesses are chosen; everything else is package cli.
package main

import (
	"context"
	"encoding/json"
	"log/slog"
	"os"

	"github.com/aisandbox-go/aisandbox/cli"
	"github.com/aisandbox-go/aisandbox/config"
	"github.com/aisandbox-go/aisandbox/guest"
	"github.com/aisandbox-go/aisandbox/harness/claudecode"
	"github.com/aisandbox-go/aisandbox/harness/scripted/player"
	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/provider/bwrap"
	"github.com/aisandbox-go/aisandbox/provider/docker"
	"github.com/aisandbox-go/aisandbox/provider/local"
)

func main() {
	guest.Hook(play) // a build without embedded guests is its own
	os.Exit(cli.Main(registry()))
}

// defaultImage has git and Node.js, which most agents and repositories need.
const defaultImage = "node:22"

// play is the scripted agent, which the guest carries.
var play = guest.Command{Name: "play", Run: player.Main}

func registry() config.Registry {
	return config.Registry{
		Providers: map[string]config.Provider{
			"local": {New: func(section json.RawMessage, log *slog.Logger) (provider.Provider, error) {
				o := local.Options{Logger: log}
				err := config.Decode("provider local", section, &o)
				return local.New(o), err
			}},
			"bwrap": {ReadOnly: "ReadOnly", New: func(section json.RawMessage, log *slog.Logger) (provider.Provider, error) {
				o := bwrap.Options{Logger: log}
				err := config.Decode("provider bwrap", section, &o)
				return bwrap.New(o), err
			}},
			"docker": {Image: "Image", User: "User", New: func(section json.RawMessage, log *slog.Logger) (provider.Provider, error) {
				o := docker.Options{Image: defaultImage, Logger: log}
				err := config.Decode("provider docker", section, &o)
				return docker.New(o), err
			}},
		},
		Auto: []string{"bwrap", "docker", "local"},
		Harnesses: map[string]config.Harness{
			"claude-code": {
				Model: "model", Executable: "executable", New: newClaudeCode,
				Find: func(ctx context.Context) (config.Program, error) {
					f, err := claudecode.Find(ctx)
					return config.Program{Path: f.Path, Version: f.Version, Mounts: []string{f.Dir}}, err
				},
			},
			"scripted": {Script: "script", New: newScripted},
		},
		Stores: map[string]config.OpenStore{"sqlite": openSQLite, "postgres": openPostgres},
	}
}
