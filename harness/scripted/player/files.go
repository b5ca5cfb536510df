package player

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"unicode/utf8"
)

// maxEdit bounds the file that an edit reads.
const maxEdit = 16 << 20

// abs is a path as a tool's input names it.
func (p *player) abs(path string) string {
	if filepath.IsAbs(path) {
		return filepath.Clean(path)
	}
	return filepath.Join(p.cwd, path)
}

func (p *player) writeFile(in writeInput) toolResult {
	if in.FilePath == "" {
		return failed("the input has no file_path")
	}
	name := p.abs(in.FilePath)
	kind, original := "create", (*string)(nil)
	if old, err := readSmall(name, maxEdit); err == nil {
		s := strings.ToValidUTF8(string(old), "\uFFFD")
		kind, original = "update", &s
	}
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return failed(err.Error())
	}
	if err := writeAtomic(name, []byte(in.Content), 0o644); err != nil {
		return failed(err.Error())
	}
	return toolResult{
		content: fmt.Sprintf("%s: wrote %d bytes", name, len(in.Content)),
		structured: writeDone{Type: kind, FilePath: name, Content: in.Content, StructuredPatch: []struct{}{},
			OriginalFile: original},
	}
}

func (p *player) editFile(in editInput) toolResult {
	if in.FilePath == "" || in.OldString == "" {
		return failed("the input has no file_path or no old_string")
	}
	name := p.abs(in.FilePath)
	b, err := readSmall(name, maxEdit)
	if err != nil {
		return failed(err.Error())
	}
	old := string(b)
	switch n := strings.Count(old, in.OldString); {
	case n == 0:
		return failed(name + ": the text to replace does not occur")
	case n > 1 && !in.ReplaceAll:
		return failed(fmt.Sprintf("%s: the text to replace occurs %d times, not once", name, n))
	}
	if err := writeAtomic(name, []byte(strings.ReplaceAll(old, in.OldString, in.NewString)), 0o644); err != nil {
		return failed(err.Error())
	}
	return toolResult{
		content: name + ": edited",
		structured: editDone{FilePath: name, OldString: in.OldString, NewString: in.NewString,
			OriginalFile: strings.ToValidUTF8(old, "\uFFFD"), StructuredPatch: []struct{}{}, ReplaceAll: in.ReplaceAll},
	}
}

// writeAtomic replaces a file as a whole. A file that exists keeps its mode; a
// link is followed, so that it stays a link.
func writeAtomic(name string, b []byte, mode fs.FileMode) (err error) {
	if real, err := filepath.EvalSymlinks(name); err == nil {
		name = real
	}
	if info, err := os.Stat(name); err == nil {
		if !info.Mode().IsRegular() {
			return &fs.PathError{Op: "write", Path: name, Err: errors.New("not a regular file")}
		}
		mode = info.Mode().Perm()
	}
	f, err := os.CreateTemp(filepath.Dir(name), ".tmp-*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			os.Remove(f.Name())
		}
	}()
	_, err = f.Write(b)
	if err == nil {
		err = f.Chmod(mode)
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(f.Name(), name)
	}
	return err
}

// cut shortens s to at most n bytes, at the border of a character.
func cut(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}
