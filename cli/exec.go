package cli

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/sandbox"
)

func (a *app) execCommand() *cobra.Command {
	var b boxFlags
	var tty bool
	c := &cobra.Command{
		Use:   "exec [flags] -- CMD [ARG…]",
		Short: "Run one command in a sandbox",
		Long: `exec makes a sandbox, runs one command in it as container tools do and removes
it: arguments, stdin, stdout and stderr are passed byte by byte, and the exit
code is the command's. It returns when the command ends, and nothing survives it.

Its own exit codes: 124 timeout, 125 no sandbox, 126 not executable, 127 no such
command.`,
		Args: func(c *cobra.Command, args []string) error {
			if len(args) == 0 {
				return &exitError{exitExec, errors.New("exec needs a command behind --")}
			}
			return nil
		},
		RunE: func(c *cobra.Command, args []string) error {
			err := a.exec(c.Context(), b, tty, args)
			var ex *exitError
			switch {
			case err == nil, errors.Is(err, errTimeout), errors.Is(err, errInterrupted):
				return err
			case errors.As(err, &ex) && ex.Err == nil:
				return err // the command's own code
			case errors.As(err, &ex) && (ex.Code == exitCannotRun || ex.Code == exitNotFound):
				return err
			}
			return &exitError{exitExec, err}
		},
	}
	c.Flags().SetInterspersed(false)
	b.register(c.Flags(), "")
	c.Flags().BoolVarP(&tty, "tty", "t", false, "give the command a terminal")
	return c
}

func (a *app) exec(ctx context.Context, b boxFlags, tty bool, argv []string) (err error) {
	ctx, cancel, err := b.withTimeout(ctx)
	if err != nil {
		return err
	}
	defer cancel()
	log := a.logger()
	bx, err := a.define(ctx, "exec", b, nil, log)
	if err != nil {
		return err
	}
	if bx.warning != "" {
		fmt.Fprintln(a.err, "aisandbox: warning: "+bx.warning)
	}
	deps := sandbox.Deps{Logger: log, Progress: a.progress()}
	key := sandbox.Key{ThreadID: "exec-" + rand.Text(), RunID: "exec"}
	sb, _, err := sandbox.Ensure(ctx, deps, bx.def, key)
	if err != nil {
		return cause(ctx, err)
	}
	defer func() {
		cerr := sb.Close()
		if derr := sandbox.DestroyInstance(ctx, deps, bx.def, key); derr != nil {
			cerr = errors.Join(cerr, fmt.Errorf("remove the sandbox: %w", derr))
		}
		if cerr != nil {
			fmt.Fprintln(a.err, "aisandbox: warning: "+cerr.Error())
		}
	}()

	cmd := provider.Cmd{Argv: argv, Stdin: a.in, Stdout: a.out, Stderr: a.err}
	if tty {
		restore, err := a.terminal(&cmd)
		if err != nil {
			return err
		}
		defer restore()
	}
	p, err := sb.Start(ctx, cmd)
	if err != nil {
		return startCode(cause(ctx, err))
	}
	if tty {
		stop := a.resizes(p)
		defer stop()
	}
	exit, err := p.Wait()
	if err != nil {
		return cause(ctx, err)
	}
	if exit.Code != 0 {
		return &exitError{Code: exit.Code}
	}
	return nil
}

// progress tells of failures and warnings; what goes well is silent, since
// exec's output is the command's.
func (a *app) progress() func(sandbox.ProgressEvent) {
	return func(ev sandbox.ProgressEvent) {
		if ev.State == sandbox.ProgressWarning {
			fmt.Fprintln(a.err, "aisandbox: warning: "+printable(ev.Detail))
		}
	}
}

// cause is why ctx ended, where it did, else err.
func cause(ctx context.Context, err error) error {
	if c := context.Cause(ctx); c != nil {
		return c
	}
	return err
}

// startCode gives an error of Start the code that a shell gives it.
func startCode(err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return &exitError{exitNotFound, err}
	case errors.Is(err, fs.ErrPermission), errors.Is(err, syscall.ENOEXEC):
		return &exitError{exitCannotRun, err}
	}
	return err
}

// terminal gives cmd a terminal of the size of ours, and makes ours raw where it
// is one, so that every key reaches the command.
func (a *app) terminal(cmd *provider.Cmd) (restore func(), err error) {
	cmd.Terminal = &provider.Terminal{Rows: 24, Cols: 80}
	cmd.Stderr = nil
	f, ok := a.in.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return func() {}, nil
	}
	if t, ok := sizeOf(f); ok {
		*cmd.Terminal = t
	}
	state, err := term.MakeRaw(int(f.Fd()))
	if err != nil {
		return nil, fmt.Errorf("terminal: %w", err)
	}
	cmd.Env = append(cmd.Env, "TERM="+a.getenv("TERM"))
	return func() { _ = term.Restore(int(f.Fd()), state) }, nil
}

// resizes passes changes of our terminal's size on.
func (a *app) resizes(p provider.Process) (stop func()) {
	f, ok := a.in.(*os.File)
	r, can := p.(provider.Resizer)
	if !ok || !can || !term.IsTerminal(int(f.Fd())) {
		return func() {}
	}
	winch := make(chan os.Signal, 1)
	signal.Notify(winch, syscall.SIGWINCH)
	done := make(chan struct{})
	go func() {
		for {
			select {
			case <-winch:
				if t, ok := sizeOf(f); ok {
					_ = r.Resize(t) // the command may have ended
				}
			case <-done:
				return
			}
		}
	}()
	return func() {
		signal.Stop(winch)
		close(done)
	}
}

func sizeOf(f *os.File) (provider.Terminal, bool) {
	w, h, err := term.GetSize(int(f.Fd()))
	if err != nil || w <= 0 || h <= 0 || w > 1<<15 || h > 1<<15 {
		return provider.Terminal{}, false
	}
	return provider.Terminal{Rows: uint16(h), Cols: uint16(w)}, true
}
