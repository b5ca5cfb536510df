package docker

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/aisandbox-go/aisandbox/provider"
)

// Options configure a [Provider]. Image is required; the zero value of everything
// else is the default named with it. A value that can't be used is an
// [*provider.OptionError] of Create, Resume and Ping.
type Options struct {
	// Image is what containers are made from.
	Image string

	// Host is the engine's address, such as unix:///var/run/docker.sock. Empty
	// means DOCKER_HOST and its companions, else the local socket.
	Host string

	// Workdir is the real path behind /workspace; default /workspace. It is created
	// and given to the agent's user.
	Workdir string

	// User runs the agent's commands: a name of the image, or uid[:gid]. Empty
	// means the image's own user. A user without a home that it may write to gets
	// HOME set to one.
	User string

	Memory    int64   // bytes, 0 = no limit; swap is not added to it
	CPUs      float64 // cores, 0 = no limit
	PidsLimit int64   // processes and threads; default 1024, -1 = no limit

	// CapDrop and CapAdd replace the defaults when not nil. By default everything
	// is dropped but what installing packages and changing users takes: CHOWN,
	// DAC_OVERRIDE, FOWNER, SETUID, SETGID, KILL, NET_BIND_SERVICE.
	CapDrop, CapAdd []string

	// AllowNewPrivileges lets set-uid programs such as sudo work.
	AllowNewPrivileges bool

	Runtime string // an OCI runtime known to the engine, such as runsc

	// Network is the mode of sandboxes whose Spec names none. NetworkHost, the
	// default, is the engine's bridge: a sandbox reaches what that reaches, and
	// the host's own loopback is not part of it.
	Network provider.Network

	// Volumes are mounted into every sandbox; meant for caches. Nothing that holds
	// an engine's control socket is accepted.
	Volumes []Volume

	// ReadOnlyRootfs makes all but the workdir, /tmp and /run read-only. The
	// workdir is then a volume, which snapshots do not contain, so there are none.
	ReadOnlyRootfs bool

	Platform     string     // such as linux/arm64; default the engine's own
	PullPolicy   PullPolicy // default PullMissing
	RegistryAuth string     // base64 credentials for pulling, in the engine's form

	// StopTimeout is how long a stop waits before it kills; default 2 s. It counts
	// with KeepOnDestroy only: a sandbox that is to be removed is killed.
	StopTimeout time.Duration

	Labels map[string]string // put on every container and image
	Owner  string            // label dev.ai-sandbox.owner, for telling whose sandboxes they are

	// PublishPorts are reachable through [provider.Exposer], at a port of
	// PublishAddr (default 127.0.0.1) that the engine picks.
	PublishPorts []int
	PublishAddr  string

	// BaseDir keeps the guest program for containers of an engine on this machine,
	// which mount it read-only. Default: aisandbox/docker below XDG_STATE_HOME, for
	// root below /var/lib. What is in it has to stay as long as the containers.
	BaseDir string

	NoHostGateway bool // leaves out the name host.docker.internal
	KeepOnDestroy bool // Destroy stops the container and keeps it

	// Logger gets warnings about what could not be done in the background. Nil
	// discards.
	Logger *slog.Logger
}

// Volume is a directory of the host, or a named volume of the engine.
type Volume struct {
	Source   string // an absolute path, else the name of a volume
	Target   string // absolute, in the sandbox
	ReadOnly bool
}

// PullPolicy says when an image is pulled.
type PullPolicy string

// The policies.
const (
	PullMissing PullPolicy = "missing"
	PullAlways  PullPolicy = "always"
	PullNever   PullPolicy = "never"
)

const (
	defaultWorkdir     = "/workspace"
	defaultPids        = 1024
	defaultStopTimeout = 2 * time.Second
)

var (
	defaultCapDrop = []string{"ALL"}
	defaultCapAdd  = []string{"CHOWN", "DAC_OVERRIDE", "FOWNER", "SETUID", "SETGID", "KILL", "NET_BIND_SERVICE"}
)

// withDefaults fills in what is empty and checks the rest.
func (o Options) withDefaults() (Options, error) {
	o.Workdir = cmp.Or(o.Workdir, defaultWorkdir)
	o.PidsLimit = cmp.Or(o.PidsLimit, defaultPids)
	o.PullPolicy = cmp.Or(o.PullPolicy, PullMissing)
	o.StopTimeout = cmp.Or(o.StopTimeout, defaultStopTimeout)
	o.Network = cmp.Or(o.Network, provider.NetworkHost)
	o.PublishAddr = cmp.Or(o.PublishAddr, "127.0.0.1")
	if o.CapDrop == nil && o.CapAdd == nil {
		o.CapDrop, o.CapAdd = defaultCapDrop, defaultCapAdd
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return o, o.check()
}

func (o Options) check() error {
	bad := func(option, value, cure string) error {
		return &provider.OptionError{Provider: providerName, Option: option, Value: value, Cure: cure}
	}
	switch {
	case o.Image == "":
		return bad("image", o.Image, "name an image")
	case strings.ContainsAny(o.Image, " \t\n\x00") || strings.HasPrefix(o.Image, "-"):
		return bad("image", o.Image, "that is no image reference")
	case !cleanAbs(o.Workdir) || o.Workdir == "/":
		return bad("workdir", o.Workdir, "use an absolute path below /")
	case within(o.Workdir, ownDir):
		return bad("workdir", o.Workdir, "that is where the guest program lives")
	case strings.ContainsAny(o.User, " \t\n\x00") || strings.HasPrefix(o.User, "-"):
		return bad("user", o.User, "use a name of the image, or uid or uid:gid")
	case o.Memory < 0 || o.Memory > 0 && o.Memory < 6<<20:
		return bad("memory", strconv.FormatInt(o.Memory, 10), "engines take 6 MiB at least; 0 means no limit")
	case !(o.CPUs >= 0 && o.CPUs <= 1<<20): // no NaN either
		return bad("cpus", fmt.Sprint(o.CPUs), "0 means no limit")
	case o.PidsLimit < -1:
		return bad("pidsLimit", strconv.FormatInt(o.PidsLimit, 10), "-1 means no limit")
	case o.Network != provider.NetworkHost && o.Network != provider.NetworkNone:
		return bad("network", string(o.Network), "use host or none")
	case o.PullPolicy != PullMissing && o.PullPolicy != PullAlways && o.PullPolicy != PullNever:
		return bad("pullPolicy", string(o.PullPolicy), "use missing, always or never")
	case o.StopTimeout < 0:
		return bad("stopTimeout", o.StopTimeout.String(), "use a positive duration")
	}
	if _, err := parsePlatform(o.Platform); err != nil {
		return bad("platform", o.Platform, "use OS/ARCH or OS/ARCH/VARIANT, such as linux/arm64")
	}
	if _, err := netip.ParseAddr(o.PublishAddr); err != nil {
		return bad("publishAddr", o.PublishAddr, "use an IP address")
	}
	for _, p := range o.PublishPorts {
		if p < 1 || p > 65535 {
			return bad("publishPorts", strconv.Itoa(p), "a port is a number from 1 to 65535")
		}
	}
	for k := range o.Labels {
		if strings.HasPrefix(k, labelBase) {
			return bad("labels", k, "that prefix belongs to the provider; use your own")
		}
	}
	seen := map[string]bool{}
	for _, v := range o.Volumes {
		if cure := v.refuse(o.Host); cure != "" {
			return bad("volumes", v.Source+":"+v.Target, cure)
		}
		if seen[v.Target] {
			return bad("volumes", v.Source+":"+v.Target, "two volumes have this target")
		}
		seen[v.Target] = true
	}
	return nil
}

// refuse returns why a volume can't be mounted; empty means that it can.
func (v Volume) refuse(host string) string {
	switch {
	case v.Source == "" || strings.ContainsAny(v.Source+v.Target, "\x00\n"):
		return "name a source"
	case !cleanAbs(v.Target) || v.Target == "/":
		return "the target must be an absolute path below /"
	case within(v.Target, ownDir):
		return "that is where the guest program lives"
	case !strings.HasPrefix(v.Source, "/"):
		if strings.ContainsAny(v.Source, "/:,") {
			return "use an absolute path, or the name of a volume"
		}
		return ""
	case !cleanAbs(v.Source):
		return "use a clean absolute path as the source"
	}
	// An engine's socket inside a sandbox is root on the host, so neither it nor a
	// directory that leads to it is mounted, whatever links are on the way.
	for _, sock := range controlSockets(host) {
		if within(resolve(sock), resolve(v.Source)) || within(sock, v.Source) {
			return "it would give the sandbox the engine's control socket " + sock
		}
	}
	if slices.Contains(socketNames, filepath.Base(resolve(v.Source))) {
		return "it would give the sandbox an engine's control socket"
	}
	return ""
}

var socketNames = []string{"docker.sock", "containerd.sock", "podman.sock", "crio.sock"}

func controlSockets(host string) []string {
	socks := []string{"/var/run/docker.sock", "/run/docker.sock", "/run/containerd/containerd.sock",
		"/run/docker/containerd/containerd.sock", "/run/podman/podman.sock", "/run/crio/crio.sock"}
	for _, h := range []string{host, os.Getenv("DOCKER_HOST")} {
		if p, ok := strings.CutPrefix(h, "unix://"); ok {
			socks = append(socks, path.Clean(p))
		}
	}
	if dir := os.Getenv("XDG_RUNTIME_DIR"); dir != "" {
		socks = append(socks, filepath.Join(dir, "docker.sock"), filepath.Join(dir, "podman/podman.sock"))
	}
	return socks
}

// resolve follows links as far as the path exists.
func resolve(p string) string {
	if r, err := filepath.EvalSymlinks(p); err == nil {
		return r
	}
	if p == "/" || p == "." {
		return p
	}
	return filepath.Join(resolve(filepath.Dir(p)), filepath.Base(p))
}

func cleanAbs(p string) bool {
	return path.IsAbs(p) && path.Clean(p) == p && !strings.Contains(p, "\x00")
}

// within says whether p is dir or below it.
func within(p, dir string) bool {
	return p == dir || dir == "/" || strings.HasPrefix(p, dir+"/")
}

func parsePlatform(s string) (*ocispec.Platform, error) {
	if s == "" {
		return nil, nil
	}
	parts := strings.Split(s, "/")
	if len(parts) < 2 || len(parts) > 3 || slices.Contains(parts, "") {
		return nil, fmt.Errorf("platform %q", s)
	}
	p := &ocispec.Platform{OS: parts[0], Architecture: parts[1]}
	if len(parts) == 3 {
		p.Variant = parts[2]
	}
	return p, nil
}

// Fingerprint implements [provider.Fingerprinter]: the options that change what a
// sandbox is. Credentials, labels and how things are stopped are not among them.
func (p *Provider) Fingerprint() string {
	o := p.opts
	b, _ := json.Marshal([]any{ // plain data, and no float that is no number
		1, o.Image, o.Workdir, o.User, o.Memory, o.CPUs, o.PidsLimit, o.CapDrop, o.CapAdd, o.AllowNewPrivileges, o.Runtime,
		o.Network, o.Volumes, o.ReadOnlyRootfs, o.Platform, o.PublishPorts, o.PublishAddr, o.NoHostGateway,
	})
	sum := sha256.Sum256(b)
	return "docker:" + o.Image + ":" + hex.EncodeToString(sum[:8])
}

// labels are those of an object that belongs to key. Every label of ours is set,
// because a container inherits those of its image, and a snapshot those of the
// container that it was made from.
func (p *Provider) labels(key string, extra, own map[string]string) map[string]string {
	l := map[string]string{}
	maps.Copy(l, p.opts.Labels)
	maps.Copy(l, extra)
	for _, k := range ownLabels {
		l[k] = ""
	}
	maps.Copy(l, own)
	l[labelManaged] = "1"
	l[labelKey] = key
	l[labelOwner] = p.opts.Owner
	l[labelVersion] = strconv.Itoa(refVersion)
	l[labelCreated] = time.Now().UTC().Format(time.RFC3339Nano)
	return l
}

// The labels on what a Provider makes.
const (
	labelBase    = "dev.ai-sandbox."
	labelManaged = labelBase + "managed"
	labelKey     = labelBase + "key"
	labelOwner   = labelBase + "owner"
	labelVersion = labelBase + "provider-version"
	labelCreated = labelBase + "created-at"
	labelParent  = labelBase + "parent" // the container that a fork or snapshot was made from
	labelImage   = labelBase + "image"  // what goes away with the container: the image of a fork
	labelUser    = labelBase + "user"   // the agent's user
	labelGuest   = labelBase + "guest"  // path of the guest program that is the first process
	labelSocket  = labelBase + "socket" // its control socket
	labelRoot    = labelBase + "root"   // the workdir
)

var ownLabels = []string{labelManaged, labelKey, labelOwner, labelVersion, labelCreated, labelParent, labelImage, labelUser,
	labelGuest, labelSocket, labelRoot}
