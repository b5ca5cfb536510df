package main

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"os"

	"github.com/aisandbox-go/aisandbox/chat"
	"github.com/aisandbox-go/aisandbox/config"
	"github.com/aisandbox-go/aisandbox/harness/claudecode"
	"github.com/aisandbox-go/aisandbox/harness/scripted"
	"github.com/aisandbox-go/aisandbox/store"
	"github.com/aisandbox-go/aisandbox/store/pgstore"
	"github.com/aisandbox-go/aisandbox/store/sqlitestore"
)

func newClaudeCode(section json.RawMessage) (chat.Adapter, error) {
	var s struct{ Model, Executable, BaseURL string }
	if err := config.Decode("harness claude-code", section, &s); err != nil {
		return nil, err
	}
	if s.BaseURL == "" {
		s.BaseURL = os.Getenv("ANTHROPIC_BASE_URL")
	}
	o := claudecode.Options{BaseURL: s.BaseURL, HostEnv: os.Getenv}
	if s.Executable != "" {
		o.Executable = []string{s.Executable}
	}
	return claudecode.Text(s.Model, o), nil
}

func newScripted(section json.RawMessage) (chat.Adapter, error) {
	var s struct{ Script, ScriptName string }
	if err := config.Decode("harness scripted", section, &s); err != nil {
		return nil, err
	}
	var o scripted.Options
	if s.Script != "" {
		var err error
		if o.Script, err = scripted.Parse(s.ScriptName, []byte(s.Script)); err != nil {
			return nil, err
		}
	}
	return scripted.Text(o), nil
}

func openSQLite(ctx context.Context, path string, _ *slog.Logger) (store.Set, io.Closer, error) {
	s, err := sqlitestore.Open(ctx, path, sqlitestore.Options{})
	if err != nil {
		return store.Set{}, nil, err
	}
	return s.Set, s, nil
}

func openPostgres(ctx context.Context, url string, log *slog.Logger) (store.Set, io.Closer, error) {
	s, err := pgstore.Open(ctx, url, pgstore.Options{Logger: log})
	if err != nil {
		return store.Set{}, nil, err
	}
	return s.Set, s, nil
}
