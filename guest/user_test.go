package guest

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/aisandbox-go/aisandbox/internal/testenv"
	"github.com/aisandbox-go/aisandbox/provider"
)

// attachAsContainer attaches to a guest that is root without CAP_SYS_PTRACE, as in
// a container: it may not look into other users' processes.
func attachAsContainer(t *testing.T) (*Handle, string) {
	t.Helper()
	testenv.Require(t, os.Getuid() == 0, "root, to have agents of another user", "run the tests as root")
	setpriv := testenv.LookPath(t, "setpriv", "apt-get install util-linux")
	h := &raw{root: shortDir(t)}
	for _, dir := range []string{h.root} {
		if err := os.Chown(dir, 4242, 4243); err != nil {
			t.Fatal(err)
		}
	}
	o := options(t)
	o.User = "4242:4243"
	if err := os.Chmod(filepath.Dir(o.Private), 0o755); err != nil {
		t.Fatal(err)
	}
	b := broken{h, []string{setpriv, "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace"}}
	g, err := Attach(t.Context(), b, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		removeProgram(g)
		_ = g.Close()
	})
	return g, h.root
}

func owner(t *testing.T, name string) (uid, gid uint32) {
	t.Helper()
	st, err := os.Lstat(name)
	if err != nil {
		t.Fatal(err)
	}
	sys := st.Sys().(*syscall.Stat_t)
	return sys.Uid, sys.Gid
}

func TestAgentUser(t *testing.T) {
	g, root := attachAsContainer(t)
	if got := stdoutOf(t, g, "sh", "-c", "id -u; id -g; id -G"); got != "4242\n4243\n4243\n" {
		t.Errorf("the agent is %q", got)
	}
	var out bytes.Buffer
	if _, err := start(t, g, provider.Cmd{Argv: []string{"id", "-u"}, User: "root", Stdout: &out}).Wait(); err != nil || out.String() != "0\n" {
		t.Errorf("as root: %q, %v", out.String(), err)
	}
	put(t, g, "a/b/f", "x")
	if err := g.Symlink(t.Context(), "f", "a/b/l"); err != nil {
		t.Fatal(err)
	}
	put(t, g, g.Private()+"/p", "x")
	for _, name := range []string{root + "/a", root + "/a/b", root + "/a/b/f", root + "/a/b/l", g.Private(), g.Private() + "/p"} {
		if uid, gid := owner(t, name); uid != 4242 || gid != 4243 {
			t.Errorf("%s belongs to %d:%d", name, uid, gid)
		}
	}
	stdoutOf(t, g, "cat", g.Private()+"/p")
}

func TestAgentUserKill(t *testing.T) {
	g, _ := attachAsContainer(t)
	// One that runs all the time: its tree must not be taken for another's.
	bystander := start(t, g, provider.Cmd{Argv: shell("(setsid sleep 1000 &); exec sleep 1000")})
	for name, script := range escapes {
		if strings.HasPrefix(name, "empty environment") {
			continue // nothing tells whose it is while others run
		}
		t.Run(name, func(t *testing.T) {
			dir := shortDir(t)
			if err := os.Chmod(dir, 0o777); err != nil {
				t.Fatal(err)
			}
			out := filepath.Join(dir, "pid")
			p := start(t, g, provider.Cmd{Argv: shell(script), Env: []string{"OUT=" + out}, Stdout: io.Discard})
			hidden := readPid(t, out)
			if err := p.Signal(os.Kill); err != nil {
				t.Fatal(err)
			}
			if alive(hidden) {
				t.Error("a process survived")
			}
		})
	}
	select {
	case <-bystander.(*process).done:
		t.Error("the bystander was killed")
	default:
	}
	if err := bystander.Signal(os.Kill); err != nil {
		t.Error(err)
	}
}

func TestAgentUserJournal(t *testing.T) {
	g, _ := attachAsContainer(t)
	dir := g.opts.JournalDir
	launch(t, g, "l2", provider.Cmd{Argv: shell("id -u; ls " + dir + " 2>&1; kill -9 $PPID 2>&1; cat /proc/$PPID/environ 2>&1 | wc -c; exit 0")})
	j := readJournal(t, g, "l2")
	if !j.verified || !strings.HasPrefix(j.stdout, "4242\n") {
		t.Errorf("journal %+v", j)
	}
	if strings.Contains(j.stdout, "l2.journal") {
		t.Error("the agent can list the journals")
	}
	if p, err := g.Probe(t.Context(), "l2"); err != nil || p.Level != 2 {
		t.Errorf("Probe: %+v, %v", p, err)
	}
}

func TestSweep(t *testing.T) {
	g, _ := serving(t)
	out := filepath.Join(t.TempDir(), "pid")
	gate := filepath.Join(t.TempDir(), "gate")
	p := start(t, g, provider.Cmd{
		Argv: shell(`setsid sh -c 'echo $$ >"$OUT"; exec sleep 1000' & while [ ! -e "$GATE" ]; do sleep 0.01; done`),
		Env:  []string{"OUT=" + out, "GATE=" + gate},
	})
	hidden := readPid(t, out)
	if err := p.(provider.Sweeper).Sweep(); err != nil {
		t.Fatal(err)
	}
	stdoutOf(t, g, "touch", gate) // after the sweep's frame
	if exit, err := p.Wait(); exit.Code != 0 || err != nil {
		t.Errorf("Wait = %v, %v", exit, err)
	}
	if alive(hidden) {
		t.Error("a process was left")
	}
}

// TestMuchOutput moves a lot of bytes and looks at what that costs here.
func TestMuchOutput(t *testing.T) {
	size := 256 << 20
	if testing.Short() {
		size = 32 << 20
	}
	attach, _, _ := daemon(t)
	g := attach()
	const script = `head -c "$N" /dev/zero | tr '\0' 'x'`
	want := sha256.New()
	block := bytes.Repeat([]byte{'x'}, 1<<20)
	for range size >> 20 {
		want.Write(block)
	}
	got := sha256.New()
	var peak, n uint64
	var ms runtime.MemStats
	p := start(t, g, provider.Cmd{Argv: shell(script), Env: []string{"N=" + strconv.Itoa(size)}, Stdout: writerFunc(func(b []byte) (int, error) {
		if n++; n%500 == 0 {
			runtime.ReadMemStats(&ms)
			peak = max(peak, ms.HeapInuse)
		}
		return got.Write(b)
	})})
	if exit, err := p.Wait(); exit.Code != 0 || err != nil {
		t.Fatal(exit, err)
	}
	if !bytes.Equal(want.Sum(nil), got.Sum(nil)) {
		t.Error("the bytes differ")
	}
	if peak > 100<<20 {
		t.Errorf("the host's heap grew to %d MiB", peak>>20)
	}
	if u, err := g.Usage(t.Context()); err != nil || u.GuestMemory > 60<<20 { // the race detector multiplies it
		t.Errorf("the guest uses %d MiB, %v", u.GuestMemory>>20, err)
	}
}

var errNever = errors.New("never")

func TestReaderErrorOfStdin(t *testing.T) {
	g, _ := serving(t)
	p := start(t, g, provider.Cmd{Argv: []string{"cat"}, Stdin: readerFunc(func([]byte) (int, error) { return 0, errNever })})
	if exit, err := p.Wait(); exit.Code != 0 || !errors.Is(err, errNever) {
		t.Errorf("Wait = %v, %v", exit, err)
	}
}
