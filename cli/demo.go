package cli

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/aisandbox-go/aisandbox/chat"
	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/sandbox"
)

// demoFiles are a small repository with a bug, the prompt, and the script of the
// agent that mends it.
//
//go:embed all:demo
var demoFiles embed.FS

func (a *app) demoCommand() *cobra.Command {
	f := runFlags{}
	c := &cobra.Command{
		Annotations: map[string]string{eventStream: "json"},

		Use:   "demo",
		Short: "Watch an agent find and mend a bug in a sandbox; needs no account and no network",
		Args:  exactArgs(0, "no arguments"),
		RunE:  func(c *cobra.Command, _ []string) error { return a.demo(c.Context(), f) },
	}
	c.Flags().StringVar(&f.harness, "harness", "scripted", "the agent")
	c.Flags().StringVar(&f.box.provider, "provider", "auto", "where: auto, or one that `aisandbox doctor` lists")
	c.Flags().StringVar(&f.box.image, "image", "", "image, for providers that take one")
	c.Flags().StringVar(&f.model, "model", "", "the agent's model")
	c.Flags().BoolVar(&f.json, "json", false, "print one AG-UI event per line, and nothing else on stdout")
	return c
}

func (a *app) demo(ctx context.Context, f runFlags) (err error) {
	dir, err := os.MkdirTemp("", "aisandbox-demo-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if err := demoRepo(ctx, dir); err != nil {
		return fmt.Errorf("demo repository: %w", err)
	}
	prompt, err := demoFiles.ReadFile("demo/prompt.txt")
	if err != nil {
		return err
	}
	h, err := a.harness(f.harness)
	if err != nil {
		return err
	}
	script := ""
	if h.Script != "" {
		b, err := demoFiles.ReadFile("demo/script.yaml")
		if err != nil {
			return err
		}
		script, f.script = string(b), "demo/script.yaml"
	}
	log := a.logger()
	prog := findProgram(ctx, h)
	f.box.repo = dir
	bx, err := a.define(ctx, "demo", f.box, prog.Mounts, log)
	if err != nil {
		return err
	}
	adapter, err := a.adapter(f, h, bx, prog, script)
	if err != nil {
		return err
	}
	if bx.warning != "" {
		fmt.Fprintln(a.err, "aisandbox: warning: "+bx.warning)
	}
	if !f.json {
		fmt.Fprintf(a.out, "A repository with a failing test, an agent (%s) and a sandbox (%s, isolation %s).\n\n> %s\n\n",
			f.harness, bx.name, bx.prov.Traits().Isolation, strings.TrimSpace(string(prompt)))
	}
	run, err := chat.Start(ctx, chat.Request{
		Messages: []event.Message{{ID: "user-1", Role: "user", Content: event.Text(strings.TrimSpace(string(prompt)))}},
		Adapter:  adapter,
		Use:      []chat.Middleware{sandbox.With(bx.def, sandbox.WithOptions{})},
		Logger:   log,
	})
	if err != nil {
		return err
	}
	return a.follow(ctx, run, f)
}

// demoRepo writes the demo's files to dir and makes a git repository of them.
func demoRepo(ctx context.Context, dir string) error {
	sub, err := fs.Sub(demoFiles, "demo/repo")
	if err != nil {
		return err
	}
	err = fs.WalkDir(sub, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := fs.ReadFile(sub, name)
		if err != nil {
			return err
		}
		to := filepath.Join(dir, filepath.FromSlash(name))
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			return err
		}
		mode := fs.FileMode(0o644) // an embedded file has no mode of its own
		if strings.HasPrefix(string(b), "#!") {
			mode = 0o755
		}
		return os.WriteFile(to, b, mode)
	})
	if err != nil {
		return err
	}
	id := []string{"-c", "user.name=aisandbox", "-c", "user.email=demo@aisandbox.invalid", "-c", "commit.gpgsign=false"}
	for _, args := range [][]string{{"init", "-q", "-b", "main"}, {"add", "-A"}, {"commit", "-q", "-m", "A small library with a bug"}} {
		c := exec.CommandContext(ctx, "git", append(append([]string{"-C", dir}, id...), args...)...)
		if out, err := c.CombinedOutput(); err != nil {
			return fmt.Errorf("git %s: %w: %s", args[0], err, strings.TrimSpace(string(out)))
		}
	}
	return nil
}
