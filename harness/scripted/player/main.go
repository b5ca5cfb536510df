package player

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
)

// maxPrompt bounds the prompt on standard input.
const maxPrompt = 16 << 20

// options are the flags after the script's name. They are named as Claude Code
// names them.
type options struct {
	script         string
	sessionID      string
	resume         string
	fork           bool
	model          string
	mcpConfig      string
	promptTool     string
	permissionMode string
	maxTurns       int // 0: no limit
	partials       bool
}

// Main is the program "play SCRIPT.json [flags]"; args are the words after play.
// The prompt is read from stdin, the stream goes to stdout, complaints to stderr.
// It is made to be the main function of a process: it takes over SIGINT, SIGTERM
// and SIGHUP, and on the latter two returns while a write may still be blocked.
//
// Flags: --session-id ID, --resume ID, --fork-session, --model NAME,
// --mcp-config FILE, --permission-prompt-tool mcp__SERVER__TOOL,
// --permission-mode MODE (default bypassPermissions), --max-turns N,
// --include-partial-messages.
//
// The result is the exit code: 0 after a result line, success or interrupted; 1
// when the run could not start, --resume found nothing or --max-turns was
// reached; 128+n after signal n; what a crash step says. An end of ctx is the
// same as SIGINT: what runs is killed and the result line says
// error_during_execution.
func Main(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	p, err := prepare(args, stdin)
	if err != nil {
		fmt.Fprintf(stderr, "play: %v\n", err)
		return 1
	}
	p.out = newStream(stdout)
	p.errw = stderr

	sigs := make(chan os.Signal, 4)
	signal.Notify(sigs, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer signal.Stop(sigs)
	ctx, interrupt := context.WithCancel(ctx)
	defer interrupt()

	done := make(chan int, 1)
	go func() { done <- p.play(ctx) }()
	for {
		select {
		case code := <-done:
			return code
		case sig := <-sigs:
			if sig == syscall.SIGINT {
				interrupt()
				continue
			}
			p.out.halt.Store(true)
			p.procs.stop()
			code := 128 + int(syscall.SIGTERM)
			if s, ok := sig.(syscall.Signal); ok {
				code = 128 + int(s)
			}
			return code
		}
	}
}

// prepare reads everything that the run depends on.
func prepare(args []string, stdin io.Reader) (*player, error) {
	o, err := parseArgs(args)
	if err != nil {
		return nil, err
	}
	f, err := os.Open(o.script)
	if err != nil {
		return nil, fmt.Errorf("the script: %w", err)
	}
	defer f.Close()
	script, err := readScript(f)
	if err != nil {
		return nil, fmt.Errorf("the script %s: %w", o.script, err)
	}
	prompt, err := readPrompt(stdin)
	if err != nil {
		return nil, err
	}
	cwd, err := os.Getwd()
	if err != nil {
		return nil, fmt.Errorf("the working directory: %w", err)
	}
	servers, err := readServers(o.mcpConfig)
	if err != nil {
		return nil, fmt.Errorf("--mcp-config %s: %w", o.mcpConfig, err)
	}
	return &player{opts: o, script: script, prompt: prompt, cwd: cwd, servers: servers}, nil
}

func readPrompt(stdin io.Reader) (string, error) {
	if stdin == nil {
		stdin = strings.NewReader("")
	}
	b, err := io.ReadAll(io.LimitReader(stdin, maxPrompt+1))
	if err != nil {
		return "", fmt.Errorf("the prompt: %w", err)
	}
	if len(b) > maxPrompt {
		return "", fmt.Errorf("the prompt is longer than %d bytes", maxPrompt)
	}
	prompt := strings.TrimRight(strings.ToValidUTF8(string(b), "\uFFFD"), "\r\n")
	if strings.TrimSpace(prompt) == "" {
		return "", errors.New("the prompt is empty: write it to standard input")
	}
	return prompt, nil
}

func parseArgs(args []string) (options, error) {
	o := options{model: "scripted", permissionMode: "bypassPermissions"}
	for i := 0; i < len(args); i++ {
		name, value, inline := strings.Cut(args[i], "=")
		if !strings.HasPrefix(name, "--") {
			if o.script != "" {
				return o, fmt.Errorf("unexpected argument %q", args[i])
			}
			o.script = args[i]
			continue
		}
		var flag *bool
		var text *string
		switch name {
		case "--fork-session":
			flag = &o.fork
		case "--include-partial-messages":
			flag = &o.partials
		case "--session-id":
			text = &o.sessionID
		case "--resume":
			text = &o.resume
		case "--model":
			text = &o.model
		case "--mcp-config":
			text = &o.mcpConfig
		case "--permission-prompt-tool":
			text = &o.promptTool
		case "--permission-mode":
			text = &o.permissionMode
		case "--max-turns":
			text = &value
		default:
			return o, fmt.Errorf("unknown flag %s", name)
		}
		if flag != nil {
			if inline {
				return o, fmt.Errorf("flag %s takes no value", name)
			}
			*flag = true
			continue
		}
		if !inline {
			i++
			if i == len(args) {
				return o, fmt.Errorf("flag %s needs a value", name)
			}
			value = args[i]
		}
		if value == "" {
			return o, fmt.Errorf("flag %s needs a value that is not empty", name)
		}
		*text = value
		if name == "--max-turns" {
			n, err := strconv.Atoi(value)
			if err != nil || n < 1 {
				return o, fmt.Errorf("flag --max-turns: %q is no number above zero", value)
			}
			o.maxTurns = n
		}
	}
	switch {
	case o.script == "":
		return o, errors.New("no script: play SCRIPT.json [flags]")
	case o.sessionID != "" && o.resume != "" && !o.fork:
		return o, errors.New("--session-id goes with --resume only when --fork-session is given")
	case o.fork && o.resume == "":
		return o, errors.New("--fork-session needs --resume")
	case o.sessionID != "" && !validID(o.sessionID):
		return o, fmt.Errorf("--session-id: %q is not made of at most 128 letters, digits, - and _", o.sessionID)
	case o.promptTool != "" && o.mcpConfig == "":
		return o, errors.New("--permission-prompt-tool needs --mcp-config")
	}
	return o, nil
}
