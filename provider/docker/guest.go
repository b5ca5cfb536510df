package docker

import (
	"archive/tar"
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/mount"
	"github.com/moby/moby/client"

	"github.com/aisandbox-go/aisandbox/provider"
)

// What the provider puts into a container lies here. All of it is root's, and only
// root may enter run, so an agent that is another user reaches neither the guest
// program nor its socket.
const (
	ownDir     = "/.aisandbox"
	ownRun     = ownDir + "/run"
	ownHome    = ownDir + "/home" // HOME of a user whom the image gives none
	ownSocket  = ownRun + "/guest.sock"
	ownJournal = ownDir + "/journal" // of detached processes
	guestStart = ownDir + "/guest-"
)

// keepAlive is the first process on the exec-only path, below the engine's init.
var keepAlive = []string{"sleep", "infinity"}

// plan is what one container is made of, beyond the options.
type plan struct {
	p          *Provider
	user       string // the agent's
	entrypoint []string
	mounts     []mount.Mount

	guest, socket string   // in the container; empty without a guest
	program       *os.File // to be copied
	source        string   // or to be mounted

	chown bool // the workdir is a volume, which only a command inside can hand over
}

// plan decides what the container of spec runs and holds.
func (p *Provider) plan(spec provider.Spec, img client.ImageInspectResult) (*plan, error) {
	pl := &plan{p: p, user: p.opts.User, entrypoint: keepAlive}
	if pl.user == "" {
		pl.user = img.Config.User
	}
	if p.opts.ReadOnlyRootfs {
		pl.chown = !isRoot(pl.user)
		tmpfs := func(target string, mode os.FileMode) mount.Mount {
			return mount.Mount{Type: mount.TypeTmpfs, Target: target, TmpfsOptions: &mount.TmpfsOptions{Mode: mode}}
		}
		pl.mounts = append(pl.mounts, mount.Mount{Type: mount.TypeVolume, Target: p.opts.Workdir},
			tmpfs("/tmp", 0o1777), tmpfs("/run", 0o755), tmpfs(ownRun, 0o700), tmpfs(ownJournal, 0o700), tmpfs(ownHome, 0o1777))
	}
	if spec.Init == nil || spec.Init.Program == nil {
		return pl, nil
	}
	prog, err := spec.Init.Program(img.Os + "/" + img.Architecture)
	if errors.Is(err, errors.ErrUnsupported) {
		// The contract lets a backend that can't run it go on without.
		p.opts.Logger.Warn("docker: no guest program for this image", "platform", img.Os+"/"+img.Architecture, "err", err)
		return pl, nil
	}
	if err != nil {
		return nil, fmt.Errorf("guest program: %w", err)
	}
	pl.guest = guestStart + prog.Digest[:min(len(prog.Digest), 16)]
	pl.socket = ownSocket
	// A later flag wins, and these are what the provider knows better.
	args := slices.Concat([]string{pl.guest}, spec.Init.Args, []string{"--stdio", "--socket", pl.socket, "--root", p.opts.Workdir, "--journal-dir", ownJournal})
	if !isRoot(pl.user) {
		args = append(args, "--user", pl.user)
		if pl.user[0] >= '0' && pl.user[0] <= '9' { // perhaps a number that the image does not know
			args = append(args, "--home", ownHome)
		}
	}
	pl.entrypoint = args
	// To copy the program in, the engine mounts all of the container's files, which
	// takes about as long as to start it.
	if p.mayMount() {
		source, err := p.share(prog)
		if err == nil {
			pl.useMount(source)
			return pl, nil
		}
		p.opts.Logger.Warn("docker: the guest program can't be kept for containers to mount; it is copied", "err", err)
	}
	if p.opts.ReadOnlyRootfs {
		pl.useMount(prog.Path) // nothing can be copied into such a container
		return pl, nil
	}
	if pl.program, err = os.Open(prog.Path); err != nil {
		return nil, fmt.Errorf("guest program: %w", err)
	}
	return pl, nil
}

func (pl *plan) close() {
	if pl.program != nil {
		_ = pl.program.Close()
	}
}

// prepare fills a container that was created and not started. The archive API
// follows links inside the container; what the image holds is trusted that far, and
// nothing of it leads outside. Modes and owners of directories that exist already,
// as in a snapshot, are set again.
func (pl *plan) prepare(ctx context.Context, id string) error {
	if pl.p.opts.ReadOnlyRootfs || pl.program == nil && isRoot(pl.user) {
		return nil
	}
	owner := account{}
	if !isRoot(pl.user) {
		var err error
		if owner, err = pl.p.account(ctx, id, pl.user); err != nil {
			return err
		}
	}
	var size int64
	if pl.program != nil {
		fi, err := pl.program.Stat()
		if err != nil {
			return fmt.Errorf("guest program: %w", err)
		}
		size = fi.Size()
	}
	r, w := io.Pipe()
	go func() {
		tw := tar.NewWriter(w)
		err := errors.Join(
			tarDir(tw, ownDir, 0o755, account{}),
			tarDir(tw, ownRun, 0o700, account{}),
			tarDir(tw, ownJournal, 0o700, account{}),
		)
		if err == nil && !isRoot(pl.user) {
			err = errors.Join(tarDir(tw, ownHome, 0o700, owner), tarDir(tw, pl.p.opts.Workdir, 0o755, owner))
		}
		if err == nil && pl.program != nil {
			err = tw.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: pl.guest[1:], Mode: 0o755, Size: size})
			if err == nil {
				_, err = io.Copy(tw, io.NewSectionReader(pl.program, 0, size))
			}
		}
		if err == nil {
			err = tw.Close()
		}
		w.CloseWithError(err)
	}()
	_, err := pl.p.engine.CopyToContainer(ctx, id, client.CopyToContainerOptions{DestinationPath: "/", Content: r})
	_ = r.Close() // ends the goroutine when the engine did not read it all
	if err != nil {
		return fmt.Errorf("copy into the container: %w", mapErr(err))
	}
	return nil
}

func tarDir(tw *tar.Writer, dir string, mode int64, a account) error {
	return tw.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: dir[1:] + "/", Mode: mode, Uid: a.uid, Gid: a.gid})
}

// account is a user by number.
type account struct{ uid, gid int }

func isRoot(user string) bool {
	name, _, _ := strings.Cut(user, ":")
	return name == "" || name == "root" || name == "0"
}

// account finds the numbers of user, "name[:group]" with numbers allowed for both,
// in the container's own files, as the engine does.
func (p *Provider) account(ctx context.Context, id, user string) (account, error) {
	name, group, hasGroup := strings.Cut(user, ":")
	a, known := account{}, false
	if n, err := strconv.Atoi(name); err == nil && n >= 0 {
		a.uid, known = n, true
	}
	if gid, err := strconv.Atoi(group); err == nil && known {
		a.gid = gid
		return a, nil
	}
	err := p.eachRecord(ctx, id, "/etc/passwd", func(f []string) bool {
		uid, uidErr := strconv.Atoi(field(f, 2))
		gid, gidErr := strconv.Atoi(field(f, 3))
		if uidErr != nil || gidErr != nil || f[0] != name && (!known || uid != a.uid) {
			return false
		}
		a, known = account{uid, gid}, true
		return true
	})
	if err != nil {
		return a, err
	}
	unknown := &provider.OptionError{Provider: providerName, Option: "user", Value: user, Cure: "the image does not know it: use uid:gid, or a user of the image"}
	if !known {
		return a, unknown
	}
	if !hasGroup {
		return a, nil
	}
	if gid, err := strconv.Atoi(group); err == nil {
		a.gid = gid
		return a, nil
	}
	found := false
	err = p.eachRecord(ctx, id, "/etc/group", func(f []string) bool {
		gid, gidErr := strconv.Atoi(field(f, 2))
		if f[0] != group || gidErr != nil {
			return false
		}
		a.gid, found = gid, true
		return true
	})
	if err == nil && !found {
		err = unknown
	}
	return a, err
}

func field(f []string, i int) string {
	if i < len(f) {
		return f[i]
	}
	return ""
}

// eachRecord calls f with the records of a file such as /etc/passwd until it says
// that it is content. A file that does not exist has no records.
func (p *Provider) eachRecord(ctx context.Context, id, name string, f func(fields []string) bool) error {
	res, err := p.engine.CopyFromContainer(ctx, id, client.CopyFromContainerOptions{SourcePath: name})
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read %s: %w", name, mapErr(err))
	}
	defer res.Content.Close()
	tr := tar.NewReader(res.Content)
	h, err := tr.Next()
	if err != nil {
		return fmt.Errorf("read %s: %w", name, err)
	}
	if h.Typeflag != tar.TypeReg {
		return fmt.Errorf("read %s: %w: it is no regular file in this image", name, provider.ErrInvalid)
	}
	lines := bufio.NewScanner(io.LimitReader(tr, 4<<20))
	for lines.Scan() {
		if f(strings.Split(lines.Text(), ":")) {
			return nil
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("read %s: %w", name, err)
	}
	return nil
}

// initHandle is a container whose first process is the guest program.
type initHandle struct {
	provider.Handle
	h             *handle
	guest, socket string
	first         atomic.Pointer[initConn] // not used yet; nil: there is none
}

var (
	_ provider.InitConn  = (*initHandle)(nil)
	_ provider.Unwrapper = (*initHandle)(nil)
)

// Unwrap implements [provider.Unwrapper].
func (i *initHandle) Unwrap() any { return i.Handle }

// Close implements [provider.Handle].
func (i *initHandle) Close() error {
	if c := i.first.Swap(nil); c != nil {
		_ = c.Close()
	}
	return i.Handle.Close()
}

// attachInit connects to the standard streams of a guest that is about to be
// started. Only who made the container may: what two say there is mixed up.
func (p *Provider) attachInit(ctx context.Context, id string) (*initConn, error) {
	res, err := p.engine.ContainerAttach(ctx, id, client.ContainerAttachOptions{Stream: true, Stdin: true, Stdout: true, Stderr: true})
	if err != nil {
		return nil, fmt.Errorf("attach: %w", mapErr(err))
	}
	return &initConn{res: res.HijackedResponse}, nil
}

// firstWord bounds the wait for a guest that was just started.
const firstWord = 10 * time.Second

// speaks waits for the first word of the guest. Without one the connection is of
// no use: the engine has lost it, or the guest has ended.
func (c *initConn) speaks(ctx context.Context) bool {
	if c.res.Conn.SetReadDeadline(time.Now().Add(firstWord)) != nil {
		return false
	}
	stop := context.AfterFunc(ctx, func() { _ = c.res.Conn.SetReadDeadline(time.Unix(1, 0)) })
	_, err := c.res.Reader.Peek(frameHeader)
	return stop() && err == nil && c.res.Conn.SetReadDeadline(time.Time{}) == nil
}

// lastWords returns what a guest that has ended had said.
func (c *initConn) lastWords() string {
	if c.res.Conn.SetReadDeadline(time.Now().Add(time.Second)) == nil {
		_, _ = io.Copy(io.Discard, struct{ io.Reader }{c})
	}
	return strings.TrimSpace(c.said.String())
}

// DialInit implements [provider.InitConn]. The first connection of who made the
// container is that to the guest's standard streams; others are an exec of the
// guest program, as root, that connects its own to the socket. That takes the
// engine a third as long as starting a container.
func (i *initHandle) DialInit(ctx context.Context) (io.ReadWriteCloser, error) {
	if c := i.first.Swap(nil); c != nil {
		if c.speaks(ctx) {
			return c, nil
		}
		_ = c.Close()
	}
	fail := func(err error) (io.ReadWriteCloser, error) {
		return nil, fmt.Errorf("docker: dial guest of %.12s: %w", i.h.ref.ID, err)
	}
	id, err := i.h.execCreate(ctx, client.ExecCreateOptions{
		User: "0", Cmd: []string{i.guest, "connect", i.socket}, WorkingDir: path.Dir(ownDir),
		AttachStdin: true, AttachStdout: true, AttachStderr: true,
	})
	if err != nil {
		return fail(err)
	}
	res, err := i.h.p.engine.ExecAttach(ctx, id, client.ExecAttachOptions{})
	if err != nil {
		return fail(i.h.attachErr(ctx, err))
	}
	return &initConn{res: res.HijackedResponse}, nil
}

// initConn takes the engine's framing off a connection. One goroutine may read
// while another writes; Close ends both.
type initConn struct {
	res  client.HijackedResponse
	left uint32 // of the current frame of stdout
	said bytes.Buffer
}

func (c *initConn) Read(p []byte) (int, error) {
	for c.left == 0 {
		var h [frameHeader]byte
		if _, err := io.ReadFull(c.res.Reader, h[:]); err != nil {
			return 0, c.explain(err)
		}
		n := binary.BigEndian.Uint32(h[4:])
		if h[0] == streamStdout || h[0] == streamStdin {
			c.left = n
			continue
		}
		w := &limited{w: &c.said, n: max(0, 4<<10-c.said.Len())}
		if _, err := io.CopyN(w, c.res.Reader, int64(n)); err != nil {
			return 0, c.explain(err)
		}
	}
	if len(p) == 0 {
		return 0, nil
	}
	n, err := c.res.Reader.Read(p[:min(len(p), int(c.left))])
	c.left -= uint32(n)
	return n, err
}

// explain adds what the guest program said to the end of its output.
func (c *initConn) explain(err error) error {
	if text := strings.TrimSpace(c.said.String()); text != "" && isEOF(err) {
		return fmt.Errorf("docker: guest: %s: %w", text, io.ErrUnexpectedEOF)
	}
	return err
}

func (c *initConn) Write(p []byte) (int, error) { return c.res.Conn.Write(p) }

func (c *initConn) Close() error { return c.res.Conn.Close() }
