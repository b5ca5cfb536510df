//go:build linux

// Package bwrap runs sandboxes in namespaces of their own with bubblewrap: no
// daemon, no image, ready in milliseconds. The sandbox sees the host's programs
// read-only, a workspace, a home and a /tmp of its own, and nothing else of the
// host: not its other files, not its processes, not its users.
//
// It does not limit memory, processes or disk space; the host's limits apply.
// With network "host" the sandbox shares the host's network, abstract unix
// sockets included.
package bwrap

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/aisandbox-go/aisandbox/internal/proc"
	"github.com/aisandbox-go/aisandbox/internal/statedir"
	"github.com/aisandbox-go/aisandbox/provider"
)

const (
	name       = "bwrap"
	refVersion = 1

	// sandboxEnv marks every process of a sandbox, so that Destroy finds those
	// which another host process started.
	sandboxEnv = "AISBX_SANDBOX"

	// hostID is the user and group that sandboxes run as when this process is
	// root. It belongs to nobody: the top of the range for local users.
	hostID = 59999

	insideID = 1000 // what it looks like inside
)

// Options configure the backend; the zero value works.
type Options struct {
	// BaseDir holds the sandboxes. Default: aisandbox/bwrap below XDG_STATE_HOME,
	// for root below /var/lib. When this process is root, the sandbox's user must
	// be able to pass through the directories above it.
	BaseDir string

	// ReadOnly and Writable are paths of the host that the sandbox sees under the
	// same name, such as a tool in /opt or a cache. When this process is root they
	// are reached with the rights of UID.
	ReadOnly, Writable []string

	// NestedNamespaces lets programs in the sandbox make user namespaces, for tools
	// that sandbox themselves. It opens more of the kernel to the agent.
	NestedNamespaces bool

	// UID and GID are the host's numbers that sandboxes run as when this process is
	// root; 0 is 59999. Otherwise they run as this process's user. Inside it is
	// always "agent", 1000.
	UID, GID int

	// Bwrap is the program; default: bwrap in PATH.
	Bwrap string

	Logger *slog.Logger // nil discards
}

// New returns the backend. Mistakes in o are reported by Ping, Create and Resume.
func New(o Options) provider.Provider {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	b := &bwrap{o: o}
	b.tool = sync.OnceValues(b.findTool)
	return b
}

type bwrap struct {
	o    Options
	tool func() (tool, error)
}

var (
	_ provider.Lister        = (*bwrap)(nil)
	_ provider.Pinger        = (*bwrap)(nil)
	_ provider.Fingerprinter = (*bwrap)(nil)
)

// tool is the bubblewrap that was found.
type tool struct {
	path          string
	disableUserns bool // since 0.8
}

func (b *bwrap) findTool() (tool, error) {
	path, err := exec.LookPath(cmpOr(b.o.Bwrap, "bwrap"))
	if err != nil {
		return tool{}, fmt.Errorf("bwrap: bubblewrap is not installed (try: apt-get install bubblewrap): %w: %w", err, provider.ErrUnavailable)
	}
	if path, err = filepath.Abs(path); err != nil {
		return tool{}, err
	}
	help, err := exec.Command(path, "--help").CombinedOutput()
	if err != nil {
		return tool{}, fmt.Errorf("bwrap: %s --help: %w: %w", path, err, provider.ErrUnavailable)
	}
	for _, flag := range []string{"--perms", "--json-status-fd", "--as-pid-1"} {
		if !strings.Contains(string(help), flag) {
			return tool{}, fmt.Errorf("bwrap: %s has no %s; version 0.5 or later is needed: %w", path, flag, provider.ErrUnavailable)
		}
	}
	return tool{path, strings.Contains(string(help), "--disable-userns")}, nil
}

func cmpOr(a, b string) string {
	if a != "" {
		return a
	}
	return b
}

// record is the state file.
type record struct {
	Version int               `json:"version"`
	Key     string            `json:"key"`
	Mark    string            `json:"mark"` // value of sandboxEnv
	Network provider.Network  `json:"network"`
	Labels  map[string]string `json:"labels,omitempty"`
	Created time.Time         `json:"created"`
	Init    *initRecord       `json:"init,omitempty"`
	First   *first            `json:"first,omitempty"` // the first process as it was started last
}

// initRecord is what a restart of the first process needs.
type initRecord struct {
	Digest string   `json:"digest"`
	Args   []string `json:"args"`
}

type refState struct {
	Base string `json:"base"`
}

func (*bwrap) Name() string { return name }

// Traits: with and without a guest, a process can't leave its pid namespace, so
// that Kill holds for both.
func (*bwrap) Traits() provider.Traits {
	return provider.Traits{
		Isolation:    provider.IsolationNamespaces,
		DurableFS:    true,
		LiveStdin:    true,
		Kill:         true,
		Outlives:     true,
		SharedKernel: true,
		Networks:     []provider.Network{provider.NetworkHost, provider.NetworkNone},
	}
}

// Fingerprint is of the options that change what a sandbox sees.
func (b *bwrap) Fingerprint() string {
	return fmt.Sprintf("ro=%q rw=%q nested=%v", b.o.ReadOnly, b.o.Writable, b.o.NestedNamespaces)
}

// Ping makes a sandbox of one command, and explains what stands in the way.
func (b *bwrap) Ping(ctx context.Context) error {
	if _, err := b.tool(); err != nil {
		return err
	}
	d, err := b.open()
	if err != nil {
		return err
	}
	tmp, err := os.MkdirTemp(d.Path(), ".ping-")
	if err != nil {
		return fmt.Errorf("bwrap: ping: %w", err)
	}
	defer os.RemoveAll(tmp)
	if err := b.makeDirs(tmp); err != nil {
		return fmt.Errorf("bwrap: ping: %w", err)
	}
	h := &handle{b: b, d: d, dir: tmp, r: record{Mark: rand.Text(), Network: provider.NetworkNone}}
	out, err := provider.Output(ctx, h, provider.Cmd{Argv: []string{"sh", "-c", "echo ready"}})
	if err != nil {
		return fmt.Errorf("bwrap: a sandbox can't be started: %w%s: %w", err, usernsHint(), provider.ErrUnavailable)
	}
	if string(out) != "ready\n" {
		return fmt.Errorf("bwrap: a sandbox answers %q: %w", out, provider.ErrUnavailable)
	}
	return nil
}

// usernsHint names the kernel setting that forbids user namespaces.
func usernsHint() string {
	for _, k := range []struct{ file, bad, cure string }{
		{"/proc/sys/kernel/unprivileged_userns_clone", "0", "sysctl kernel.unprivileged_userns_clone=1"},
		{"/proc/sys/user/max_user_namespaces", "0", "sysctl user.max_user_namespaces=15000"},
		{"/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1", "sysctl kernel.apparmor_restrict_unprivileged_userns=0, or an AppArmor profile for bwrap"},
	} {
		if v, err := os.ReadFile(k.file); err == nil && strings.TrimSpace(string(v)) == k.bad {
			return " (user namespaces are forbidden here; the cure: " + k.cure + ")"
		}
	}
	if _, err := os.Stat("/.dockerenv"); err == nil {
		return " (inside a container the engine has to allow user namespaces, for example with --security-opt seccomp=unconfined)"
	}
	return ""
}

// credential is who sandboxes run as; nil is this process's user.
func (b *bwrap) credential() *syscall.Credential {
	if os.Geteuid() != 0 {
		return nil
	}
	c := &syscall.Credential{Uid: hostID, Gid: hostID}
	if b.o.UID > 0 {
		c.Uid = uint32(b.o.UID)
	}
	if b.o.GID > 0 {
		c.Gid = uint32(b.o.GID)
	}
	return c
}

// open checks the options and opens the base directory.
func (b *bwrap) open() (*statedir.Dir, error) {
	for option, list := range map[string][]string{"ReadOnly": b.o.ReadOnly, "Writable": b.o.Writable} {
		for _, p := range list {
			if err := b.checkMount(p); err != "" {
				return nil, &provider.OptionError{Provider: name, Option: option, Value: p, Cure: err}
			}
		}
	}
	base := b.o.BaseDir
	if base == "" {
		var err error
		if base, err = statedir.Default(name); err != nil {
			return nil, fmt.Errorf("bwrap: %w", err)
		}
	}
	perm := fs.FileMode(0o700)
	if b.credential() != nil {
		perm = 0o711 // the sandbox's user has to pass through
	}
	d, err := statedir.Open(base, perm)
	if err != nil {
		return nil, fmt.Errorf("bwrap: open base directory: %w", err)
	}
	if c := b.credential(); c != nil {
		if p := impassable(d.Path(), c); p != "" {
			return nil, &provider.OptionError{Provider: name, Option: "BaseDir", Value: d.Path(),
				Cure: fmt.Sprintf("uid %d, which sandboxes run as when the host process is root, can't pass through %s: chmod o+x it, or choose another directory", c.Uid, p)}
		}
	}
	return d, nil
}

// checkMount returns why a path can't be an extra mount, and "" if it can.
func (b *bwrap) checkMount(p string) string {
	if why := checkMount(p); why != "" {
		return why
	}
	c := b.credential()
	if c == nil {
		return ""
	}
	if dir := impassable(filepath.Dir(p), c); dir != "" {
		return fmt.Sprintf("uid %d, which sandboxes run as when the host process is root, can't pass through %s: chmod o+x it, or put a copy elsewhere", c.Uid, dir)
	}
	return ""
}

// impassable returns the first directory on the way that c may not enter.
func impassable(path string, c *syscall.Credential) string {
	for p := "/"; ; {
		var st syscall.Stat_t
		if err := syscall.Stat(p, &st); err == nil {
			x := st.Mode & 0o001
			switch {
			case st.Uid == c.Uid:
				x = st.Mode & 0o100
			case st.Gid == c.Gid:
				x = st.Mode & 0o010
			}
			if x == 0 {
				return p
			}
		}
		if p == path {
			return ""
		}
		rest := strings.TrimPrefix(path[len(p):], "/")
		next, _, _ := strings.Cut(rest, "/")
		p = filepath.Join(p, next)
	}
}

// dirs are what a sandbox may write, below its directory.
const (
	workDir = "work" // /workspace
	homeDir = "home" // /home/agent
	tmpDir  = "tmp"  // /tmp
	runsDir = "runs" // journals: reached by the guest through a descriptor, mounted nowhere
	ctlDir  = "ctl"  // the guest's socket: mounted nowhere
	etcDir  = "etc"  // generated files, read-only
)

// makeDirs fills the directory of a sandbox, or completes it.
func (b *bwrap) makeDirs(dir string) error {
	c := b.credential()
	if c != nil {
		// Only the sandbox's user passes through to what is its own.
		if err := errors.Join(os.Chown(dir, 0, int(c.Gid)), os.Chmod(dir, 0o710)); err != nil {
			return err
		}
	}
	for _, d := range []string{workDir, homeDir, tmpDir, runsDir, ctlDir, etcDir} {
		p := filepath.Join(dir, d)
		perm := fs.FileMode(0o700)
		switch d {
		case workDir, homeDir, etcDir:
			perm = 0o755
		case tmpDir:
			perm = 0o777 | fs.ModeSticky
		}
		err := os.Mkdir(p, perm)
		if errors.Is(err, fs.ErrExist) {
			continue
		}
		if err == nil {
			err = os.Chmod(p, perm)
		}
		if err == nil && c != nil && d != ctlDir && d != etcDir {
			err = os.Chown(p, int(c.Uid), int(c.Gid))
		}
		if err != nil {
			return err
		}
	}
	for file, text := range etcFiles {
		p := filepath.Join(dir, etcDir, file)
		if _, err := os.Stat(p); err == nil {
			continue
		}
		if err := os.WriteFile(p, []byte(text), 0o644); err != nil {
			return err
		}
		if err := os.Chmod(p, 0o644); err != nil {
			return err
		}
	}
	return nil
}

func (b *bwrap) Create(ctx context.Context, spec provider.Spec) (provider.Handle, error) {
	h, err := b.create(ctx, spec)
	if err != nil {
		return nil, fmt.Errorf("bwrap: create: %w", err)
	}
	return h, nil
}

func (b *bwrap) create(ctx context.Context, spec provider.Spec) (provider.Handle, error) {
	network := spec.Network
	if network == provider.NetworkDefault {
		network = provider.NetworkHost
	}
	if !slices.Contains(b.Traits().Networks, network) {
		return nil, &provider.UnsupportedError{Provider: name, Capability: "network " + string(network), Hint: "use host or none"}
	}
	key := spec.Key
	if key == "" {
		key = strings.ToLower(rand.Text())
	}
	if !statedir.ValidKey(key) {
		return nil, fmt.Errorf("key %q: want [a-z0-9]{1,40}: %w", key, provider.ErrInvalid)
	}
	if _, err := b.tool(); err != nil {
		return nil, err
	}
	d, err := b.open()
	if err != nil {
		return nil, err
	}
	unlock, err := d.Lock(ctx, key)
	if err != nil {
		return nil, err
	}
	defer unlock()

	r := record{Version: refVersion, Key: key, Mark: rand.Text(), Network: network, Labels: spec.Labels, Created: time.Now().UTC()}
	var old record
	switch err := d.Load(key, &old); {
	case err == nil && old.Network != network:
		return nil, fmt.Errorf("%s exists with network %s: %w", key, old.Network, provider.ErrConflict)
	case err == nil:
		r = old
	case !errors.Is(err, fs.ErrNotExist):
		return nil, err
	default:
		if err = d.Claim(key, 0o700); err != nil {
			return nil, err
		}
		if spec.Init != nil {
			r.Init, err = b.install(d, spec.Init)
		}
		if err == nil {
			err = b.makeDirs(d.Of(key))
		}
		if err == nil {
			err = d.Save(key, r)
		}
		if err != nil {
			return nil, errors.Join(err, os.RemoveAll(d.Of(key)))
		}
	}
	h, err := b.attach(ctx, d, r)
	if err != nil && old.Key == "" {
		err = errors.Join(err, b.remove(context.WithoutCancel(ctx), d, r))
	}
	return h, err
}

// find returns the record of a sandbox.
func (b *bwrap) find(ref provider.Ref) (*statedir.Dir, record, error) {
	var r record
	if ref.Provider != "" && ref.Provider != name {
		return nil, r, fmt.Errorf("%v is another provider's: %w", ref, provider.ErrInvalid)
	}
	d, err := b.open()
	if err != nil {
		return nil, r, fmt.Errorf("%w: %w", err, provider.ErrUnavailable)
	}
	if !statedir.ValidKey(ref.ID) {
		return d, r, provider.ErrNotFound
	}
	err = d.Load(ref.ID, &r)
	switch {
	case errors.Is(err, fs.ErrNotExist) || err == nil && r.Key != ref.ID:
		var st refState
		if json.Unmarshal(ref.State, &st) == nil && st.Base != "" && st.Base != d.Path() {
			return nil, r, &provider.OptionError{Provider: name, Option: "BaseDir", Value: d.Path(), Cure: "the sandbox was made with " + st.Base}
		}
		return d, r, provider.ErrNotFound
	case err != nil:
		return nil, r, fmt.Errorf("%w: %w", err, provider.ErrUnavailable)
	case r.Version > refVersion:
		return nil, r, fmt.Errorf("the record has version %d, this program knows %d: %w", r.Version, refVersion, provider.ErrUnavailable)
	}
	return d, r, nil
}

// Resume attaches to a sandbox. A first process that has died is started again
// on the same files.
func (b *bwrap) Resume(ctx context.Context, ref provider.Ref) (provider.Handle, error) {
	d, r, err := b.find(ref)
	if err != nil {
		return nil, fmt.Errorf("bwrap: resume %s: %w", ref.ID, err)
	}
	unlock, err := d.Lock(ctx, r.Key)
	if err != nil {
		return nil, fmt.Errorf("bwrap: resume %s: %w", ref.ID, err)
	}
	defer unlock()
	if err := d.Load(r.Key, &r); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			err = provider.ErrNotFound
		}
		return nil, fmt.Errorf("bwrap: resume %s: %w", ref.ID, err)
	}
	h, err := b.attach(ctx, d, r)
	if err != nil {
		return nil, fmt.Errorf("bwrap: resume %s: %w", ref.ID, err)
	}
	return h, nil
}

// attach returns a handle, with the first process running. The key is locked.
func (b *bwrap) attach(ctx context.Context, d *statedir.Dir, r record) (provider.Handle, error) {
	if err := b.makeDirs(d.Of(r.Key)); err != nil {
		return nil, err
	}
	h := &handle{b: b, d: d, dir: d.Of(r.Key), r: r}
	if r.Init != nil {
		if err := h.ensureFirst(ctx); err != nil {
			return nil, err
		}
	}
	var hostNet, withInit = r.Network == provider.NetworkHost, r.Init != nil
	switch {
	case hostNet && withInit:
		return &struct {
			*handle
			hostNetwork
			initConn
		}{h, hostNetwork{}, initConn{h}}, nil
	case hostNet:
		return &struct {
			*handle
			hostNetwork
		}{h, hostNetwork{}}, nil
	case withInit:
		return &struct {
			*handle
			initConn
		}{h, initConn{h}}, nil
	}
	return h, nil
}

// Destroy ends every process of the sandbox and removes its directory.
func (b *bwrap) Destroy(ctx context.Context, ref provider.Ref) error {
	d, r, err := b.find(ref)
	if errors.Is(err, provider.ErrNotFound) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("bwrap: destroy %s: %w", ref.ID, err)
	}
	unlock, err := d.Lock(ctx, r.Key)
	if err != nil {
		return fmt.Errorf("bwrap: destroy %s: %w", ref.ID, err)
	}
	defer unlock()
	if err := d.Load(r.Key, &r); err != nil && errors.Is(err, fs.ErrNotExist) {
		return nil // by somebody else, meanwhile
	}
	if err := b.remove(ctx, d, r); err != nil {
		return fmt.Errorf("bwrap: destroy %s: %w", ref.ID, err)
	}
	return nil
}

// remove ends and removes a sandbox; the record goes last.
func (b *bwrap) remove(ctx context.Context, d *statedir.Dir, r record) error {
	if r.First != nil {
		if err := r.First.kill(ctx); err != nil {
			return err
		}
	}
	// Commands run beside the first process have namespaces of their own, each of
	// which begins with a launcher that carries the mark.
	if err := proc.KillEnv(sandboxEnv + "=" + r.Mark); err != nil {
		b.o.Logger.WarnContext(ctx, "processes survive their sandbox", "sandbox", r.Key, "err", err)
	}
	for _, sub := range []string{workDir, homeDir, tmpDir, runsDir, ctlDir, etcDir} {
		if err := statedir.Remove(ctx, filepath.Join(d.Of(r.Key), sub)); err != nil {
			return err
		}
	}
	return statedir.Remove(ctx, d.Of(r.Key))
}

// List finds sandboxes by label. Running tells whether the first process lives;
// without one a sandbox is always ready.
func (b *bwrap) List(ctx context.Context, labels map[string]string) ([]provider.Listed, error) {
	d, err := b.open()
	if err != nil {
		return nil, err
	}
	keys, err := d.Keys()
	if err != nil {
		return nil, fmt.Errorf("bwrap: list: %w", err)
	}
	var out []provider.Listed
	for _, key := range keys {
		var r record
		if err := d.Load(key, &r); err != nil {
			if !errors.Is(err, fs.ErrNotExist) {
				b.o.Logger.WarnContext(ctx, "unreadable sandbox record", "key", key, "err", err)
			}
			continue
		}
		if statedir.Matches(r.Labels, labels) {
			out = append(out, provider.Listed{
				Ref: makeRef(d, r), Labels: r.Labels, Created: r.Created, Running: r.Init == nil || r.First != nil && r.First.alive(),
			})
		}
	}
	return out, nil
}

func makeRef(d *statedir.Dir, r record) provider.Ref {
	st, _ := json.Marshal(refState{Base: d.Path()}) // a string always marshals
	return provider.Ref{Provider: name, ID: r.Key, Version: refVersion, State: st}
}
