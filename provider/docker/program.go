package docker

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/mount"

	"github.com/aisandbox-go/aisandbox/internal/statedir"
	"github.com/aisandbox-go/aisandbox/provider"
)

// programDir holds guest programs by digest, below the base directory. Its name
// begins with a dot, as bwrap's does: it is no sandbox's.
const programDir = ".bin"

// share returns a file with the program that containers can mount: named by its
// content, written by nobody, and in a place that nobody cleans, for a container
// that was stopped needs it to start again.
func (p *Provider) share(prog provider.Program) (string, error) {
	if raw, err := hex.DecodeString(prog.Digest); err != nil || len(raw) != sha256.Size {
		return "", fmt.Errorf("digest %q: want a SHA-256 in hex: %w", prog.Digest, provider.ErrInvalid)
	}
	base := p.opts.BaseDir
	if base == "" {
		var err error
		if base, err = statedir.Default(providerName); err != nil {
			return "", err
		}
	}
	d, err := statedir.Open(base, 0o700)
	if err != nil {
		return "", err
	}
	dir := filepath.Join(d.Path(), programDir)
	dest := filepath.Join(dir, prog.Digest)
	p.mu.Lock() // one copy is enough
	defer p.mu.Unlock()
	if p.shared[prog.Digest] == dest {
		if _, err := os.Stat(dest); err == nil {
			return dest, nil
		}
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	if digestOf(dest) != prog.Digest {
		if err := install(prog, dir, dest); err != nil {
			return "", err
		}
	}
	p.shared[prog.Digest] = dest
	return dest, nil
}

func digestOf(name string) string {
	f, err := os.Open(name)
	if err != nil {
		return ""
	}
	defer f.Close()
	sum := sha256.New()
	if _, err := io.Copy(sum, f); err != nil {
		return ""
	}
	return hex.EncodeToString(sum.Sum(nil))
}

func install(prog provider.Program, dir, dest string) error {
	src, err := os.Open(prog.Path)
	if err != nil {
		return err
	}
	defer src.Close()
	tmp, err := os.CreateTemp(dir, ".new-")
	if err != nil {
		return err
	}
	defer os.Remove(tmp.Name())
	sum := sha256.New()
	_, err = io.Copy(io.MultiWriter(tmp, sum), src)
	if err = errors.Join(err, tmp.Chmod(0o555), tmp.Close()); err != nil {
		return err
	}
	if got := hex.EncodeToString(sum.Sum(nil)); got != prog.Digest {
		return fmt.Errorf("%s has digest %s, not %s: %w", prog.Path, got, prog.Digest, provider.ErrInvalid)
	}
	return os.Rename(tmp.Name(), dest)
}

// mayMount says whether a program of this machine may be mounted. The engine must
// see the same files; where it turns out that it does not, Create copies. A
// container that may mount could make the file writable, for all the others.
func (p *Provider) mayMount() bool {
	admin := slices.ContainsFunc(p.opts.CapAdd, func(c string) bool {
		c = strings.TrimPrefix(strings.ToUpper(c), "CAP_")
		return c == "ALL" || c == "SYS_ADMIN"
	})

	return !admin && !p.copies.Load() && p.near()
}

// useMount makes the plan mount the program from source.
func (pl *plan) useMount(source string) {
	pl.source = source
	pl.mounts = append(pl.mounts, mount.Mount{Type: mount.TypeBind, Source: source, Target: pl.guest, ReadOnly: true})
}

// refused says that an error of creating or starting a container is due to the
// mounted program: the engine does not see the file, or may not run it from there.
func (pl *plan) refused(err error) bool {
	if pl.source == "" || errors.Is(err, provider.ErrNoSpace) || errors.Is(err, provider.ErrUnavailable) && isUnreachable(err) {
		return false
	}
	text := err.Error()
	return strings.Contains(text, pl.source) || strings.Contains(text, pl.guest) || strings.Contains(strings.ToLower(text), "mounts denied")
}

// lostProgram explains why a container can't be started whose program is gone.
func (p *Provider) lostProgram(c container.InspectResponse, err error) error {
	for _, m := range c.Mounts {
		if m.Destination != c.Config.Labels[labelGuest] || m.Destination == "" || !p.near() {
			continue
		}
		if _, serr := os.Stat(m.Source); errors.Is(serr, fs.ErrNotExist) {
			return fmt.Errorf("the guest program %s, which the sandbox was made with, is gone: make another sandbox with the version of this program that made it, which puts it back: %w", m.Source, err)
		}
	}
	return err
}
