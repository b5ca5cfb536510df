//go:build linux

package inside

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/aisandbox-go/aisandbox/internal/testenv"
	"github.com/aisandbox-go/aisandbox/internal/wire"
	"github.com/aisandbox-go/aisandbox/provider"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// inMemory returns a guest in this process and a host's end of its connection.
func inMemory(t *testing.T, adjust func(*server)) (*wire.Mux, string) {
	t.Helper()
	dir := t.TempDir()
	s, err := newServer(config{root: dir, journal: filepath.Join(t.TempDir(), "runs")})
	if err != nil {
		t.Fatal(err)
	}
	if adjust != nil {
		adjust(s)
	}
	a, b := net.Pipe()
	ended := make(chan error)
	go func() { ended <- s.serve(t.Context(), b) }()
	if _, err := wire.Hello(a, true, wire.Facts{}); err != nil {
		t.Fatal(err)
	}
	m := wire.NewMux(a, true, func(l *wire.Link) { l.Abort() })
	t.Cleanup(func() {
		m.Close()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return m, dir
}

func request(t *testing.T, m *wire.Mux, r *wire.Request) *wire.Link {
	t.Helper()
	l, err := m.Open()
	if err != nil {
		t.Fatal(err)
	}
	if err := l.SendRequest(r); err != nil {
		t.Fatal(err)
	}
	return l
}

// TestPolling: a watch works where there are no inotify watches.
func TestPolling(t *testing.T) {
	m, dir := inMemory(t, func(s *server) { s.noInotify = true })
	if err := os.WriteFile(filepath.Join(dir, "old"), []byte("1"), 0o644); err != nil {
		t.Fatal(err)
	}
	l := request(t, m, &wire.Request{Op: wire.OpWatch, Path: ".", Names: []string{".git"}})
	if typ, _, err := l.Recv(); typ != wire.FStarted || err != nil {
		t.Fatal(typ, err)
	}
	if err := os.MkdirAll(filepath.Join(dir, "a/.git"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, n := range []string{"a/new", "a/.git/x", "old"} {
		if err := os.WriteFile(filepath.Join(dir, n), []byte("22"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	var got []string
	for range 2 { // without a stop: a poll finds them
		typ, b, err := l.Recv()
		if typ != wire.FData || err != nil {
			t.Fatal(typ, err)
		}
		got = append(got, string(b))
	}
	if err := os.Remove(filepath.Join(dir, "old")); err != nil {
		t.Fatal(err)
	}
	if err := l.Send(wire.FEnd, nil); err != nil {
		t.Fatal(err)
	}
	for {
		typ, b, err := l.Recv()
		if err != nil {
			t.Fatal(err)
		}
		if typ == wire.FReply {
			break
		}
		got = append(got, string(b))
	}
	slices.Sort(got)
	want := []string{"c" + dir + "/a/new", "d" + dir + "/old", "m" + dir + "/old"}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

func TestMalformedRequest(t *testing.T) {
	m, _ := inMemory(t, nil)
	l, err := m.Open()
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Send(wire.FRequest, []byte{99}); err != nil {
		t.Fatal(err)
	}
	if typ, _, err := l.Recv(); typ != wire.FError || err != nil {
		t.Errorf("answer %d, %v", typ, err)
	}
	l = request(t, m, &wire.Request{Op: wire.OpLstat, Path: "."}) // and goes on
	if typ, _, err := l.Recv(); typ != wire.FReply || err != nil {
		t.Errorf("answer %d, %v", typ, err)
	}
}

func TestChangeQueue(t *testing.T) {
	q := newChangeQueue()
	for _, c := range []struct {
		t    provider.ChangeType
		path string
	}{
		{provider.ChangeCreate, "new"}, {provider.ChangeModify, "new"},
		{provider.ChangeCreate, "temporary"}, {provider.ChangeDelete, "temporary"},
		{provider.ChangeDelete, "replaced"}, {provider.ChangeCreate, "replaced"},
		{provider.ChangeModify, "gone"}, {provider.ChangeDelete, "gone"},
	} {
		q.add(c.t, c.path)
	}
	want := map[string]provider.ChangeType{
		"new": provider.ChangeCreate, "replaced": provider.ChangeModify, "gone": provider.ChangeDelete,
	}
	if d := cmp.Diff(want, q.pending); d != "" {
		t.Error(d)
	}
}

func TestRoots(t *testing.T) {
	r := newRoots(nil, "/w", "/p/private")
	for _, name := range []string{"/", "/etc", "/wx", "/w/../etc", "..", "a/../../w2", "/p/privateer/x", "/p"} {
		if _, _, err := r.find("open", name); !errors.Is(err, fs.ErrPermission) {
			t.Errorf("find %q: %v", name, err)
		}
	}
	for _, name := range []string{"", "a\x00b"} {
		if _, _, err := r.find("open", name); err == nil || errors.Is(err, fs.ErrPermission) {
			t.Errorf("find %q: %v", name, err)
		}
	}
	dir := t.TempDir()
	r = newRoots(nil, dir)
	for name, want := range map[string]string{".": ".", dir: ".", "a/b": "a/b", dir + "/./a/../b": "b", "a/..": "."} {
		if _, rel, err := r.find("open", name); err != nil || rel != want {
			t.Errorf("find %q = %q, %v; want %q", name, rel, err, want)
		}
	}
	// A root that was removed and made again is the new one.
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	top, _, err := r.find("open", "x")
	if err != nil {
		t.Fatal(err)
	}
	if err := top.WriteFile("x", nil, 0o644); err != nil {
		t.Errorf("the root is the old one: %v", err)
	}
}

func TestMakePrivate(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a/private")
	for range 2 {
		if err := makePrivate(dir, nil); err != nil {
			t.Fatal(err)
		}
	}
	if st, err := os.Stat(dir); err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("mode %v, %v", st.Mode(), err)
	}
	if err := os.Chmod(dir, 0o722); err != nil {
		t.Fatal(err)
	}
	if err := makePrivate(dir, nil); !errors.Is(err, fs.ErrPermission) {
		t.Errorf("a directory that others may write to: %v", err)
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(t.TempDir(), link); err != nil {
		t.Fatal(err)
	}
	if err := makePrivate(link, nil); !errors.Is(err, fs.ErrPermission) {
		t.Errorf("a link: %v", err)
	}
}

func TestLookupUser(t *testing.T) {
	for spec, want := range map[string]account{
		"root":      {uid: 0, gid: 0, name: "root", home: "/root"},
		"0":         {uid: 0, gid: 0, name: "root", home: "/root"},
		"4242":      {uid: 4242, gid: 4242},
		"4242:7":    {uid: 4242, gid: 7},
		"0:root":    {uid: 0, gid: 0, name: "root", home: "/root"},
		"4242:root": {uid: 4242, gid: 0},
	} {
		a, err := lookupUser(spec)
		if err != nil {
			t.Errorf("%q: %v", spec, err)
			continue
		}
		a.groups = nil
		if d := cmp.Diff(&want, a, cmp.AllowUnexported(account{})); d != "" {
			t.Errorf("%q: %s", spec, d)
		}
	}
	for _, spec := range []string{"no-such-user", "root:no-such-group", "", "-1"} {
		if _, err := lookupUser(spec); !errors.Is(err, provider.ErrInvalid) {
			t.Errorf("%q: %v", spec, err)
		}
	}
}

func TestEnviron(t *testing.T) {
	s := &server{env: baseEnv([]string{"A=1", "AISBX_PROC=x"})}
	for _, tt := range []struct {
		home string
		a    *account
		want []string
	}{
		{"", nil, []string{"A=1", defaultPath, "HOME=/", "B=2"}},
		{"/h", nil, []string{"A=1", defaultPath, "HOME=/h", "B=2"}},
		{"", &account{uid: 99999, name: "agent", home: "/home/agent"}, []string{"A=1", defaultPath, "HOME=/home/agent", "USER=agent", "LOGNAME=agent", "B=2"}},
	} {
		s.home = tt.home
		if d := cmp.Diff(tt.want, s.environ(tt.a, []string{"B=2"})); d != "" {
			t.Error(d)
		}
	}
}

func TestFullDisk(t *testing.T) {
	_, err := os.Stat("/dev/full")
	testenv.Require(t, err == nil, "/dev/full", "run the tests on Linux")
	f, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	full := make(chan struct{})
	j := &journalWriter{f: f, reserve: filepath.Join(t.TempDir(), "reserve"), full: func() { close(full) }}
	j.mu.Lock()
	j.limit = 10 * time.Millisecond
	j.mu.Unlock()
	if _, err := (*lineWriter)(j).Write([]byte("line\n")); err == nil {
		t.Error("a line went to a full disk")
	}
	<-full
	if j.tally.Lines != 0 {
		t.Error("a line that is not on the disk was counted")
	}
	j.end(provider.Exit{}, nil, "run")
}
