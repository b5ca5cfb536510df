package testenv

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
)

const claudePackage = "@anthropic-ai/claude-code"

// claudeIn finds the CLI installed below e2e, the directory of package.json.
//
// The published package is a thin wrapper: the executable is a native program
// in an optional package per platform, which npm installs only where os, cpu
// and libc match. The path in that package is used, and not the wrapper's bin
// entry, because the latter is a placeholder until an install script has run,
// and `npm ci --ignore-scripts` does not run it.
func claudeIn(e2e, goos, goarch string) (string, error) {
	pinned, err := pin(filepath.Join(e2e, "package.json"))
	if err != nil {
		return "", err
	}
	arch := goarch
	if goarch == "amd64" {
		arch = "x64"
	}
	platforms := []string{goos + "-" + arch}
	if goos == "linux" {
		platforms = append(platforms, goos+"-"+arch+"-musl")
	}
	for _, p := range platforms {
		dir := filepath.Join(e2e, "node_modules", claudePackage+"-"+p)
		var pkg struct{ Version string }
		if err := readJSON(filepath.Join(dir, "package.json"), &pkg); err != nil {
			if os.IsNotExist(err) {
				continue
			}
			return "", err
		}
		if pkg.Version != pinned {
			return "", fmt.Errorf("version %s is installed, %s is pinned", pkg.Version, pinned)
		}
		bin := filepath.Join(dir, "claude")
		if err := checkExecutable(bin); err != nil {
			return "", err
		}
		return bin, nil
	}
	return "", fmt.Errorf("no package %s-%s in e2e/node_modules", claudePackage, platforms[0])
}

func pin(packageJSON string) (string, error) {
	var p struct{ Dependencies map[string]string }
	if err := readJSON(packageJSON, &p); err != nil {
		return "", err
	}
	v := p.Dependencies[claudePackage]
	if v == "" {
		return "", fmt.Errorf("%s does not pin %s", packageJSON, claudePackage)
	}
	return v, nil
}

func readJSON(file string, v any) error {
	b, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(b, v); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	return nil
}

func checkExecutable(p string) error {
	fi, err := os.Stat(p)
	if err != nil {
		return err
	}
	if !fi.Mode().IsRegular() || fi.Mode().Perm()&0o111 == 0 {
		return fmt.Errorf("%s is not an executable file", p)
	}
	return nil
}
