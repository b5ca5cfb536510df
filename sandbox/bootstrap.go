package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strings"

	"github.com/aisandbox-go/aisandbox/workspace"
)

// bootstrap fills a new sandbox (spec 01 §9): source, AGENTS.md with its links,
// file skills, detection of the package manager, set-up plan. The environment is
// set already.
func (e *ensurer) bootstrap(ctx context.Context, out *Outcome) error {
	w := e.def.d.Workspace
	if err := e.box.Mkdir(ctx, ""); err != nil {
		return fmt.Errorf("sandbox: make %s: %w", e.box.root, err)
	}
	if err := e.source(ctx); err != nil {
		return err
	}
	if err := e.files(ctx, w); err != nil {
		return err
	}
	var err error
	out.PackageManager, err = w.DetectPackageManager(func(name string) (bool, error) { return e.box.Exists(ctx, name) })
	if err != nil {
		return fmt.Errorf("sandbox: detect the package manager: %w", err)
	}
	out.Setup, err = e.setup(ctx, w.Setup)
	return err
}

// files writes what the workspace adds to its source, and hides it from git.
func (e *ensurer) files(ctx context.Context, w workspace.Workspace) (err error) {
	text, files := w.AgentsText(), w.Files()
	if text == "" && len(files) == 0 {
		return nil
	}
	end := e.phase(PhaseFiles, "")
	defer func() { end(err) }()
	var made []string
	if text != "" {
		if made, err = e.agents(ctx, text); err != nil {
			return err
		}
	}
	for _, f := range files {
		if err := e.box.WriteFile(ctx, f.Path, []byte(f.Content), 0o644); err != nil {
			return fmt.Errorf("sandbox: write the skill %s: %w", f.Path, err)
		}
		made = append(made, path.Clean(f.Path))
	}
	return e.exclude(ctx, made)
}

// agents writes AGENTS.md and its links. What the repository brings is never
// touched (spec 01 §25, 2).
func (e *ensurer) agents(ctx context.Context, text string) (made []string, err error) {
	ours, err := e.absent(ctx, workspace.AgentsFile)
	if err != nil {
		return nil, err
	}
	if !ours {
		e.warn(PhaseFiles, "the repository has an "+workspace.AgentsFile+" of its own, which is kept; the instructions reach the agent by its prompt")
		return nil, nil
	}
	if err := e.box.WriteFile(ctx, workspace.AgentsFile, []byte(text), 0o644); err != nil {
		return nil, fmt.Errorf("sandbox: write %s: %w", workspace.AgentsFile, err)
	}
	made = []string{workspace.AgentsFile}
	for _, name := range workspace.LinkFiles() {
		free, err := e.absent(ctx, name)
		if err != nil {
			return nil, err
		}
		if !free {
			e.warn(PhaseFiles, "the repository has a "+name+" of its own, which is kept")
			continue
		}
		if e.box.Symlink(ctx, workspace.AgentsFile, name) != nil {
			if err := e.box.WriteFile(ctx, name, []byte(text), 0o644); err != nil {
				return nil, fmt.Errorf("sandbox: write %s: %w", name, err)
			}
		}
		made = append(made, name)
	}
	return made, nil
}

func (e *ensurer) absent(ctx context.Context, name string) (bool, error) {
	ok, err := e.box.Exists(ctx, name)
	return !ok, err
}

// exclude adds files to the repository's own list of ignored files, so that they
// are neither shown as changes nor committed.
func (e *ensurer) exclude(ctx context.Context, names []string) error {
	fi, err := e.box.Lstat(ctx, ".git")
	if errors.Is(err, fs.ErrNotExist) || err == nil && !fi.IsDir() || len(names) == 0 {
		return nil
	}
	if err != nil {
		return err
	}
	const list = ".git/info/exclude"
	old, err := e.box.ReadFile(ctx, list)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("sandbox: read %s: %w", list, err)
	}
	have := map[string]bool{}
	for line := range strings.SplitSeq(string(old), "\n") {
		have[line] = true
	}
	var b strings.Builder
	b.Write(old)
	if len(old) > 0 && old[len(old)-1] != '\n' {
		b.WriteByte('\n')
	}
	added := false
	for _, n := range names {
		if p := ignorePattern(n); !have[p] {
			b.WriteString(p + "\n")
			added = true
		}
	}
	if !added {
		return nil
	}
	if err := e.box.WriteFile(ctx, list, []byte(b.String()), 0o644); err != nil {
		return fmt.Errorf("sandbox: write %s: %w", list, err)
	}
	return nil
}

// ignorePattern returns the line of an ignore file that matches exactly one path
// below the root.
func ignorePattern(name string) string {
	var b strings.Builder
	b.WriteByte('/')
	for i := 0; i < len(name); i++ {
		if strings.IndexByte(`\*?[ `, name[i]) >= 0 {
			b.WriteByte('\\')
		}
		b.WriteByte(name[i])
	}
	return b.String()
}

// PromptInstructions returns the workspace's instructions where the files of box
// don't carry them, because the repository has an AGENTS.md, CLAUDE.md or GEMINI.md
// of its own: then they belong into the agent's prompt. Else it is empty.
func (d *Def) PromptInstructions(ctx context.Context, box *Sandbox) (string, error) {
	text := d.d.Workspace.AgentsText()
	if text == "" {
		return "", nil
	}
	for _, name := range append([]string{workspace.AgentsFile}, workspace.LinkFiles()...) {
		b, err := box.ReadFile(ctx, name)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return "", err
		}
		if string(b) != text {
			return text, nil
		}
	}
	return "", nil
}
