package claudecode

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/aisandbox-go/aisandbox/internal/proc"
)

// EnvExecutable is the environment variable that names the program on this host
// where it isn't the "claude" on PATH.
const EnvExecutable = "CLAUDE_CODE_BIN"

// Found is the program on this host.
type Found struct {
	Path    string // absolute, links resolved
	Version string // "2.1.197"
	Dir     string // what a sandbox on the host's files must see for Path to run
}

// Find looks for the program on this host, in [EnvExecutable] and on PATH, and
// asks it for its version. The error says how to get it.
func Find(ctx context.Context) (Found, error) {
	name := os.Getenv(EnvExecutable)
	if name == "" {
		name = "claude"
	}
	p, err := exec.LookPath(name)
	if err != nil {
		return Found{}, fmt.Errorf("claude-code: %w: install it with `npm install -g @anthropic-ai/claude-code`, or set %s", err, EnvExecutable)
	}
	if p, err = filepath.Abs(p); err != nil {
		return Found{}, fmt.Errorf("claude-code: %w", err)
	}
	if p, err = filepath.EvalSymlinks(p); err != nil {
		return Found{}, fmt.Errorf("claude-code: %w", err)
	}
	f := Found{Path: p, Dir: filepath.Dir(p)}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	var out bytes.Buffer
	ps, err := proc.Start(ctx, proc.Spec{Argv: []string{p, "--version"}, Env: os.Environ(), Stdout: &limited{w: &out, n: 4 << 10}})
	if err != nil {
		return f, fmt.Errorf("claude-code: %s --version: %w", p, err)
	}
	exit, err := ps.Wait()
	if err == nil && exit.Code != 0 {
		err = errors.New(exit.String())
	}
	if err != nil {
		return f, fmt.Errorf("claude-code: %s --version: %w: install it again", p, err)
	}
	f.Version, _, _ = strings.Cut(strings.TrimSpace(out.String()), " ")
	return f, nil
}

// limited keeps the first n bytes.
type limited struct {
	w *bytes.Buffer
	n int
}

func (l *limited) Write(p []byte) (int, error) {
	k := min(len(p), l.n)
	l.w.Write(p[:k])
	l.n -= k
	return len(p), nil
}
