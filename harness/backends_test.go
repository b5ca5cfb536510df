package harness_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/aisandbox-go/aisandbox/chat"
	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/harness"
	"github.com/aisandbox-go/aisandbox/internal/testenv"
	"github.com/aisandbox-go/aisandbox/provider"
	"github.com/aisandbox-go/aisandbox/provider/bwrap"
	"github.com/aisandbox-go/aisandbox/provider/docker"
	"github.com/aisandbox-go/aisandbox/sandbox"
	"github.com/aisandbox-go/aisandbox/store"
)

// caller is an agent that calls a service of the host for each of its lines.
type caller struct {
	shAgent
	url string
}

func (c *caller) HostURLs(harness.Plan) []string { return []string{c.url} }

func (c *caller) Command(t harness.Turn) (provider.Cmd, error) {
	host := strings.TrimPrefix(t.Inside[c.url], "http://")
	const script = `n=0; until [ $n = 8 ]; do
	r=$({ exec 3<>"/dev/tcp/${1%:*}/${1#*:}" && printf 'GET / HTTP/1.0\r\n\r\n' >&3 && tail -n 1 <&3; } 2>/dev/null)
	case $r in call*) n=$((n+1)); echo "$r"; sleep 0.2 ;; *) sleep 0.05 ;; esac
done`
	return provider.Cmd{Argv: []string{"bash", "-c", script, "bash", host}, Stdin: strings.NewReader("")}, nil
}

// On the backends that isolate: the agent, its journal and its way to the host
// survive the change of hosts, and the sandbox goes with the run's end.
func TestTakeoverOnBackends(t *testing.T) {
	for name, b := range map[string]struct {
		need func(testing.TB)
		open func(t *testing.T) func() provider.Provider
	}{
		"bwrap": {testenv.Bwrap, func(t *testing.T) func() provider.Provider {
			dir, err := os.MkdirTemp("/var/tmp", "aisandbox-test-") // passable for the sandbox's user
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = os.RemoveAll(dir) })
			if err := os.Chmod(dir, 0o755); err != nil {
				t.Fatal(err)
			}
			return func() provider.Provider { return bwrap.New(bwrap.Options{BaseDir: dir}) }
		}},
		"docker": {testenv.Docker, func(t *testing.T) func() provider.Provider {
			return func() provider.Provider {
				p := docker.New(docker.Options{Image: testenv.Image})
				t.Cleanup(func() { _ = p.Close() })
				return p
			}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			b.need(t)
			var calls atomic.Int32
			srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				_, _ = io.WriteString(w, fmt.Sprintf("call %d\n", calls.Add(1)))
			}))
			defer srv.Close()
			w := newWorld(t)
			w.id = "backend-" + name
			w.backend = b.open(t)
			w.life = sandbox.Lifecycle{OnComplete: sandbox.Destroy}
			a := &caller{url: srv.URL}
			run, err := chat.Start(t.Context(), w.request("A", a))
			if err != nil {
				t.Fatal(err)
			}
			w.says(run, "call 1")
			for _, owner := range []string{"B", "C"} {
				run.Detach(chat.ErrShutdown)
				if o := finish(t, run); o.Kind != chat.Detached {
					t.Fatalf("%+v", o)
				}
				if run, err = w.attach(t.Context(), w.request(owner, a)); err != nil {
					t.Fatal(err)
				}
				before := len(said(w.log()))
				eventually(t, "it goes on", func() bool { return len(said(w.log())) > before || w.record().Status != store.Running })
			}
			if o := finish(t, run); o.Kind != chat.Finished {
				t.Fatalf("%+v", o)
			}
			// A call that a host took with it was made again.
			text, last := said(w.log()), 0
			for _, line := range text {
				n, err := strconv.Atoi(strings.TrimPrefix(line, "call "))
				if err != nil || n <= last {
					t.Errorf("%q", text)
				}
				last = n
			}
			if len(text) != 8 {
				t.Errorf("%q", text)
			}
			w.legal()
			rec := w.record()
			if inst, err := w.set.Instances.Get(t.Context(), rec.SandboxKey); err == nil && !inst.State.Gone() {
				t.Errorf("the sandbox is still there: %+v", inst)
			}
			if n := count(w.log(), event.NameSandboxCreated); n != 1 {
				t.Errorf("%d sandboxes were made", n)
			}
		})
	}
}

func count(log []store.Stored, name string) (n int) {
	for _, e := range log {
		if c, ok := e.Event.(event.Custom); ok && c.Name == name {
			n++
		}
	}
	return n
}

// A sandbox that is destroyed under its agent ends the run with what was said
// (S5).
func TestSandboxVanishes(t *testing.T) {
	testenv.Docker(t)
	w := newWorld(t)
	w.id = "vanishes"
	p := docker.New(docker.Options{Image: testenv.Image})
	t.Cleanup(func() { _ = p.Close() })
	w.backend = func() provider.Provider { return p }
	run := w.begin("A", &shAgent{script: `echo up; sleep 600`}, "up")
	rec := w.record()
	inst, err := w.set.Instances.Get(t.Context(), rec.SandboxKey)
	if err != nil {
		t.Fatal(err)
	}
	var ref provider.Ref
	if err := json.Unmarshal(inst.Ref, &ref); err != nil {
		t.Fatal(err)
	}
	if err := p.Destroy(t.Context(), ref); err != nil {
		t.Fatal(err)
	}
	o := finish(t, run)
	if o.Kind != chat.Failed || w.record().Error.Code != "sandbox_lost" {
		t.Fatalf("%+v", o)
	}
	if text := said(w.log()); len(text) != 1 || text[0] != "up" {
		t.Errorf("%q", text)
	}
	w.legal()
}
