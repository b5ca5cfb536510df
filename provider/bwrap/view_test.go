//go:build linux

package bwrap_test

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/aisandbox-go/aisandbox/guest"
	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/provider/bwrap"
	"github.com/aisandbox-go/aisandbox/provider/providertest"
)

func create(t testing.TB, p provider.Provider, spec provider.Spec) provider.Handle {
	t.Helper()
	h, err := p.Create(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		h.Close()
		if err := p.Destroy(t.Context(), h.Ref()); err != nil && t.Context().Err() == nil {
			t.Error(err)
		}
	})
	return h
}

func sh(t testing.TB, h provider.Handle, script string, args ...string) string {
	t.Helper()
	out, err := provider.Output(t.Context(), h, provider.Cmd{Argv: append(append(provider.Shell(script), "sh"), args...)})
	if err != nil {
		t.Fatalf("%s: %v", script, err)
	}
	return strings.TrimSuffix(string(out), "\n")
}

func destroy(t testing.TB, p provider.Provider, h provider.Handle) {
	t.Helper()
	if err := errors.Join(h.Close(), p.Destroy(t.Context(), h.Ref())); err != nil {
		t.Fatal(err)
	}
}

func TestView(t *testing.T) {
	t.Setenv("SOME_TOKEN", "host-only")
	dir := providertest.Dir(t)
	for _, d := range []string{"base", "ro", "rw"} {
		if err := errors.Join(os.Mkdir(dir+"/"+d, 0o777), os.Chmod(dir+"/"+d, 0o777)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(dir+"/ro/file", []byte("tool"), 0o644); err != nil {
		t.Fatal(err)
	}
	p := bwrap.New(bwrap.Options{BaseDir: dir + "/base", ReadOnly: []string{dir + "/ro"}, Writable: []string{dir + "/rw"}})
	h := create(t, p, provider.Spec{Network: provider.NetworkNone})
	defer destroy(t, p, h)
	if got := sh(t, h, `ls -A /home; ls -A /home/agent /workspace /root 2>/dev/null; :`); got != "agent\n/home/agent:\n\n/workspace:" {
		t.Errorf("what is there from the start: %q", got)
	}
	for script, want := range map[string]string{
		`id -un; id -u; pwd; echo "$HOME"; hostname`:                                                "agent\n1000\n/workspace\n/home/agent\nsandbox",
		`test -e /etc/shadow || echo no`:                                                            "no",
		`grep -c . /etc/passwd`:                                                                     "3",
		`echo x >/file 2>/dev/null || echo x >/etc/hosts 2>/dev/null || echo ro`:                    "ro",
		`echo x >/home/agent/f && echo x >/tmp/f && echo x >/workspace/f && cat /workspace/f`:       "x",
		`grep -E '^(CapEff|CapBnd|NoNewPrivs)' /proc/self/status | tr -d '\t'`:                      "CapEff:0000000000000000\nCapBnd:0000000000000000\nNoNewPrivs:1",
		`unshare -U true 2>/dev/null || echo denied`:                                                "denied",
		`tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '`:                                        "lo",
		`env | grep -c TOKEN; :`:                                                                    "0",
		`env | cut -d= -f1 | grep -vE '^(PATH|HOME|USER|LOGNAME|SHELL|LANG|TERM|PWD|AISBX_.*)$'; :`: "",
	} {
		if got := sh(t, h, script); got != want {
			t.Errorf("%s\n got %q\nwant %q", script, got, want)
		}
	}
	if got := sh(t, h, `cat "$1/ro/file"; echo x 2>/dev/null >"$1/ro/new" || echo " ro"; echo made >"$1/rw/new"; ls -A "$1"`, dir); got != "tool ro\nro\nrw" {
		t.Errorf("named paths: %q", got)
	}
	if b, err := os.ReadFile(dir + "/rw/new"); string(b) != "made\n" {
		t.Errorf("the writable path holds %q, %v", b, err)
	}
	if n := sh(t, h, `ls -d /proc/[0-9]* | wc -l`); len(n) > 1 {
		t.Errorf("%s processes are visible", n)
	}
	if os.Geteuid() == 0 {
		var st syscall.Stat_t
		if err := syscall.Stat(dir+"/rw/new", &st); err != nil || st.Uid == 0 {
			t.Errorf("the agent's files belong to uid %d on the host: %v", st.Uid, err)
		}
	}
}

func TestFirstProcessIsRestarted(t *testing.T) {
	dir := providertest.Dir(t)
	p := bwrap.New(bwrap.Options{BaseDir: dir})
	raw := create(t, p, provider.Spec{Key: "restarted", Init: guest.NewInit(guest.Options{})})
	h, err := guest.Attach(t.Context(), raw, guest.Options{Traits: p.Traits()})
	if err != nil {
		t.Fatal(err)
	}
	defer destroy(t, p, h)
	sh(t, h, "echo kept >file; echo kept >/tmp/file")
	var rec struct{ First struct{ Pid int } }
	state, err := os.ReadFile(filepath.Join(dir, "restarted", "state.json"))
	if err == nil {
		err = json.Unmarshal(state, &rec)
	}
	if err != nil || rec.First.Pid < 2 {
		t.Fatalf("%s, %v", state, err)
	}
	if err := syscall.Kill(rec.First.Pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	var out []byte
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); {
		// What is under way when the guest dies fails; the next call starts it again.
		if out, err = provider.Output(t.Context(), h, provider.Cmd{Argv: provider.Shell("cat file /tmp/file")}); err == nil {
			break
		}
	}
	if err != nil || string(out) != "kept\nkept\n" {
		t.Errorf("after the restart: %q, %v", out, err)
	}
}

func TestAgentDoesNotReachTheGuest(t *testing.T) {
	p := bwrap.New(bwrap.Options{BaseDir: providertest.Dir(t)})
	h, err := guest.Attach(t.Context(), create(t, p, provider.Spec{Init: guest.NewInit(guest.Options{})}), guest.Options{Traits: p.Traits()})
	if err != nil {
		t.Fatal(err)
	}
	defer destroy(t, p, h)
	got := sh(t, h, `kill -9 1 2>/dev/null; kill -TERM 1 2>/dev/null; ls /proc/1/fd 2>/dev/null || echo "no fd"; cat /proc/1/environ 2>/dev/null || echo "no environ"; ls -A /.aisandbox; echo x 2>/dev/null >/.aisandbox/x || echo "read only"`)
	if want := "no fd\nno environ\naisandbox-guest\nread only"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestOptions(t *testing.T) {
	dir := providertest.Dir(t)
	hidden := filepath.Join(dir, "hidden")
	if err := os.Mkdir(hidden, 0o700); err != nil {
		t.Fatal(err)
	}
	for what, o := range map[string]bwrap.Options{
		"relative": {BaseDir: dir, ReadOnly: []string{"x"}}, "missing": {BaseDir: dir, Writable: []string{"/none"}},
		"root": {BaseDir: dir, Writable: []string{"/"}}, "proc": {BaseDir: dir, ReadOnly: []string{"/proc/1"}},
		"device": {BaseDir: dir, Writable: []string{"/dev/null"}},
	} {
		_, err := bwrap.New(o).Create(t.Context(), provider.Spec{})
		if oe := (*provider.OptionError)(nil); !errors.As(err, &oe) || oe.Cure == "" {
			t.Errorf("%s: %v", what, err)
		}
	}
	if os.Geteuid() == 0 {
		_, err := bwrap.New(bwrap.Options{BaseDir: hidden + "/base"}).Create(t.Context(), provider.Spec{})
		if oe := (*provider.OptionError)(nil); !errors.As(err, &oe) || oe.Option != "BaseDir" {
			t.Errorf("a base directory that can't be passed: %v", err)
		}
	}
	err := bwrap.New(bwrap.Options{BaseDir: dir, Bwrap: "no-bwrap-here"}).(provider.Pinger).Ping(t.Context())
	if !errors.Is(err, provider.ErrUnavailable) || !strings.Contains(err.Error(), "apt-get install bubblewrap") {
		t.Errorf("without bubblewrap: %v", err)
	}
	if err := bwrap.New(bwrap.Options{BaseDir: dir}).(provider.Pinger).Ping(t.Context()); err != nil {
		t.Error(err)
	}
	if es, _ := filepath.Glob(dir + "/.ping*"); len(es) > 0 {
		t.Errorf("ping left %q", es)
	}
	h := create(t, bwrap.New(bwrap.Options{BaseDir: dir}), provider.Spec{})
	if _, err := bwrap.New(bwrap.Options{BaseDir: dir + "/other"}).Resume(t.Context(), h.Ref()); err == nil || errors.Is(err, provider.ErrNotFound) {
		t.Errorf("with another base directory: %v", err)
	}
	destroy(t, bwrap.New(bwrap.Options{BaseDir: dir}), h)
}

// BenchmarkReady measures from nothing to an answer of the guest.
func BenchmarkReady(b *testing.B) {
	p := bwrap.New(bwrap.Options{BaseDir: benchDir(b)})
	var took []time.Duration
	for b.Loop() {
		begin := time.Now()
		raw, err := p.Create(b.Context(), provider.Spec{Init: guest.NewInit(guest.Options{})})
		if err != nil {
			b.Fatal(err)
		}
		h, err := guest.Attach(b.Context(), raw, guest.Options{Traits: p.Traits()})
		if err != nil {
			b.Fatal(err)
		}
		took = append(took, time.Since(begin))
		b.StopTimer()
		destroy(b, p, h)
		b.StartTimer()
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Microseconds())/1000, "p50-ms")
	b.ReportMetric(float64(took[0].Microseconds())/1000, "min-ms")
}

// benchDir is a directory that the sandbox's user can pass through.
func benchDir(b *testing.B) string {
	dir := b.TempDir()
	if err := errors.Join(os.Chmod(dir, 0o711), os.Chmod(filepath.Dir(dir), 0o711)); err != nil {
		b.Fatal(err)
	}
	return dir
}

func BenchmarkExec(b *testing.B) {
	p := bwrap.New(bwrap.Options{BaseDir: benchDir(b)})
	raw, err := p.Create(b.Context(), provider.Spec{Init: guest.NewInit(guest.Options{})})
	if err != nil {
		b.Fatal(err)
	}
	h, err := guest.Attach(b.Context(), raw, guest.Options{Traits: p.Traits()})
	if err != nil {
		b.Fatal(err)
	}
	defer destroy(b, p, h)
	for what, h := range map[string]provider.Handle{"guest": h, "launcher": raw} {
		b.Run(what, func(b *testing.B) {
			for b.Loop() {
				if _, err := provider.Output(b.Context(), h, provider.Cmd{Argv: []string{"true"}}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
