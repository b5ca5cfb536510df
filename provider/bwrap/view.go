//go:build linux

package bwrap

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/aisandbox-go/aisandbox/provider"
)

const (
	rootInside  = "/workspace"
	homeInside  = "/home/agent"
	guestInside = "/.aisandbox/aisandbox-guest" // its base name is the process's name, 15 bytes at most
)

// etcFiles replace the host's: a sandbox knows its own user only.
var etcFiles = map[string]string{
	"passwd": "root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000:agent:" + homeInside + ":/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/bin/false\n",
	"group":  "root:x:0:\nagent:x:1000:\nnogroup:x:65534:\n",
	"hosts":  "127.0.0.1 localhost sandbox\n::1 localhost\n",
}

// etcHost is what programs need of the host's /etc, and holds no secret.
var etcHost = []string{
	"ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "ssl", "ca-certificates", "ca-certificates.conf", "pki", "crypto-policies",
	"nsswitch.conf", "localtime", "timezone", "services", "protocols", "mime.types", "os-release", "debian_version", "terminfo",
}

// systemDirs are the host's programs. On a merged system all but /usr are links.
var systemDirs = []string{"/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"}

// checkMount is the part of it that doesn't depend on who sandboxes run as.
func checkMount(p string) string {
	if !filepath.IsAbs(p) || filepath.Clean(p) != p {
		return "use an absolute, clean path"
	}
	for _, taken := range []string{"/", "/proc", "/dev", "/sys", "/tmp", "/run", "/etc", "/usr", rootInside, "/home", homeInside} {
		if p == taken {
			return "the sandbox has its own; name something below it"
		}
	}
	for _, below := range []string{"/proc/", "/sys/", "/dev/"} {
		if strings.HasPrefix(p, below) {
			return "the host's kernel interfaces stay outside"
		}
	}
	fi, err := os.Stat(p)
	switch {
	case err != nil:
		return "it has to exist: " + err.Error()
	case !fi.IsDir() && !fi.Mode().IsRegular():
		return "only directories and files can be seen; a socket is a way out"
	}
	return ""
}

// view returns the flags of bubblewrap that make what a sandbox sees.
func (h *handle) view(t tool) []string {
	args := []string{
		"--unshare-user", "--uid", strconv.Itoa(insideID), "--gid", strconv.Itoa(insideID),
		"--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try",
		"--hostname", "sandbox", "--cap-drop", "ALL",
	}
	if t.disableUserns && !h.b.o.NestedNamespaces {
		args = append(args, "--disable-userns")
	}
	if h.r.Network == provider.NetworkNone {
		args = append(args, "--unshare-net")
	}
	for _, d := range systemDirs {
		if target, err := os.Readlink(d); err == nil {
			args = append(args, "--symlink", target, d)
		} else if fi, err := os.Stat(d); err == nil && fi.IsDir() {
			args = append(args, "--ro-bind", d, d)
		}
	}
	for _, d := range []string{"/etc", "/home", "/var"} {
		args = append(args, "--perms", "0755", "--dir", d)
	}
	for _, f := range etcHost {
		p := "/etc/" + f
		// Bound by its real path: links of the host lead to where nothing is.
		if real, err := filepath.EvalSymlinks(p); err == nil {
			args = append(args, "--ro-bind-try", real, p)
		}
	}
	if h.r.Network == provider.NetworkHost {
		if real, err := filepath.EvalSymlinks("/etc/resolv.conf"); err == nil {
			args = append(args, "--ro-bind-try", real, "/etc/resolv.conf")
		}
	}
	for f := range etcFiles {
		args = append(args, "--ro-bind", filepath.Join(h.dir, etcDir, f), "/etc/"+f)
	}
	args = append(args,
		"--proc", "/proc", "--dev", "/dev", "--perms", "0755", "--tmpfs", "/run", "--symlink", "/run", "/var/run", "--symlink", "/tmp", "/var/tmp",
		"--bind", filepath.Join(h.dir, tmpDir), "/tmp",
		"--bind", filepath.Join(h.dir, homeDir), homeInside,
		"--bind", filepath.Join(h.dir, workDir), rootInside,
	)
	for _, p := range h.b.o.ReadOnly {
		args = append(args, "--ro-bind", p, p)
	}
	for _, p := range h.b.o.Writable {
		args = append(args, "--bind", p, p)
	}
	if h.r.Init != nil {
		args = append(args, "--ro-bind", h.program(), guestInside)
	}
	return append(args, "--remount-ro", "/")
}

// env is the environment of a sandbox: nothing of the host's but the places of
// programs that are visible inside too.
func (h *handle) env() []string {
	dirs := []string{"/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"}
	visible := append(slices.Concat(h.b.o.ReadOnly, h.b.o.Writable), "/usr")
	for _, d := range filepath.SplitList(os.Getenv("PATH")) {
		if !slices.Contains(dirs, d) && slices.ContainsFunc(visible, func(v string) bool { return d == v || strings.HasPrefix(d, v+"/") }) {
			dirs = append(dirs, d)
		}
	}
	return []string{
		"PATH=" + strings.Join(dirs, ":"), "HOME=" + homeInside, "USER=agent", "LOGNAME=agent", "SHELL=/bin/sh",
		"LANG=C.UTF-8", "TERM=" + cmpOr(os.Getenv("TERM"), "dumb"), sandboxEnv + "=" + h.r.Mark,
	}
}
