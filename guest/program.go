package guest

import (
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/aisandbox-go/aisandbox/guest/inside"
	"github.com/aisandbox-go/aisandbox/internal/wire"
	"github.com/aisandbox-go/aisandbox/provider"
)

// The folder is never empty in git, so a plain go build works.
//
//go:embed programs
var programs embed.FS

// hooked is a fact about this program: its main called Hook.
var hooked atomic.Bool

// Command is a further subcommand of the guest program; see [Hook].
type Command = inside.Command

// Hook makes this program able to be the guest, for when none is embedded: if it
// was started as one, Hook runs the guest and exits. Call it first in main, and in
// TestMain. commands are subcommands beside the guest's own, such as the scripted
// agent's "play".
func Hook(commands ...Command) {
	if len(os.Args) > 1 && os.Args[1] == wire.Marker {
		os.Exit(inside.Main(os.Args[2:], true, commands...))
	}
	hooked.Store(true)
}

// Source says where a guest program comes from.
type Source string

// The sources, in order of preference.
const (
	SourceEmbedded Source = "embedded"
	SourceSelf     Source = "self" // this program, whose main called Hook
	SourceNone     Source = "none"
)

// SourceOf says where [Program] takes the guest program for a platform from, and
// its size in bytes.
func SourceOf(platform string) (Source, int64) {
	if st, err := fs.Stat(programs, "programs/"+fileName(platform)); err == nil {
		return SourceEmbedded, st.Size()
	}
	if hooked.Load() && platform == runtime.GOOS+"/"+runtime.GOARCH {
		if exe, err := os.Executable(); err == nil {
			if st, err := os.Stat(exe); err == nil {
				return SourceSelf, st.Size()
			}
		}
	}
	return SourceNone, 0
}

func fileName(platform string) string { return strings.ReplaceAll(platform, "/", "-") }

// Program returns the guest program for a platform such as "linux/amd64": the
// embedded one, unpacked into the user's cache, else this program itself where its
// main called [Hook]. The error is provider.ErrUnsupportedPlatform when there is
// none. Safe for concurrent use.
func Program(platform string) (provider.Program, error) {
	switch src, _ := SourceOf(platform); src {
	case SourceEmbedded:
		return unpacked.get(platform, unpack)
	case SourceSelf:
		return unpacked.get(platform, self)
	}
	return provider.Program{}, fmt.Errorf("guest: no program for %s in this build (make builds linux/amd64 and linux/arm64; or call guest.Hook in main): %w", platform, provider.ErrUnsupportedPlatform)
}

// unpacked remembers what was unpacked and verified by this process.
var unpacked memo

type memo struct {
	mu sync.Mutex
	m  map[string]provider.Program
}

func (m *memo) get(key string, f func(string) (provider.Program, error)) (provider.Program, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if p, ok := m.m[key]; ok {
		if _, err := os.Stat(p.Path); err == nil { // caches get cleaned
			return p, nil
		}
	}
	p, err := f(key)
	if err != nil {
		return provider.Program{}, err
	}
	if m.m == nil {
		m.m = map[string]provider.Program{}
	}
	m.m[key] = p
	return p, nil
}

func self(string) (provider.Program, error) {
	exe, err := os.Executable()
	if err != nil {
		return provider.Program{}, fmt.Errorf("guest: program: %w", err)
	}
	digest, err := digestOf(exe)
	if err != nil {
		return provider.Program{}, fmt.Errorf("guest: program: %w", err)
	}
	return provider.Program{Digest: digest, Path: exe}, nil
}

func digestOf(name string) (string, error) {
	f, err := os.Open(name)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// unpack writes the embedded program to a file named by its content.
func unpack(platform string) (provider.Program, error) {
	b, err := programs.ReadFile("programs/" + fileName(platform))
	if err != nil {
		return provider.Program{}, fmt.Errorf("guest: program: %w", err)
	}
	sum := sha256.Sum256(b)
	p := provider.Program{Digest: hex.EncodeToString(sum[:])}
	dir, err := cacheDir()
	if err != nil {
		return provider.Program{}, fmt.Errorf("guest: program: %w", err)
	}
	p.Path = filepath.Join(dir, "guest-"+p.Digest[:32])
	if got, err := digestOf(p.Path); err == nil && got == p.Digest {
		return p, nil
	}
	tmp, err := os.CreateTemp(dir, ".guest-")
	if err != nil {
		return provider.Program{}, fmt.Errorf("guest: program: %w", err)
	}
	defer os.Remove(tmp.Name())
	_, err = tmp.Write(b)
	err = errors.Join(err, tmp.Chmod(0o555), tmp.Close())
	if err == nil {
		err = os.Rename(tmp.Name(), p.Path)
	}
	if err != nil {
		return provider.Program{}, fmt.Errorf("guest: program: %w", err)
	}
	return p, nil
}

// cacheDir is a directory that only this user can write to.
func cacheDir() (string, error) {
	if base, err := os.UserCacheDir(); err == nil {
		dir := filepath.Join(base, "aisandbox")
		if err := os.MkdirAll(dir, 0o700); err == nil {
			return dir, nil
		}
	}
	dir := filepath.Join(os.TempDir(), "aisandbox-cache-"+strconv.Itoa(os.Getuid()))
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", err
	}
	st, err := os.Lstat(dir)
	if err != nil {
		return "", err
	}
	if !st.IsDir() || st.Mode().Perm()&0o077 != 0 || !ownedByUs(st) {
		return "", fmt.Errorf("%s is not a directory of this user alone", dir)
	}
	return dir, nil
}
