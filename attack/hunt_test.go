package attack

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/aisandbox-go/aisandbox/event"
	"github.com/aisandbox-go/aisandbox/internal/testenv"
)

// hunt looks for secrets. Each finding says what kind of place it was in.
type hunt struct {
	t       *testing.T
	needles []needle

	seen map[string]bool // command lines; of the one who watches

	mu    sync.Mutex
	found map[string]bool
}

// needle is a secret in one of the forms in which it may show up.
type needle struct {
	secret, form string
	text         []byte
}

// newHunt makes the forms of each secret, by name.
func newHunt(t *testing.T, secrets map[string]string) *hunt {
	h := &hunt{t: t, seen: map[string]bool{}, found: map[string]bool{}}
	for name, v := range secrets {
		add := func(form, text string) {
			h.needles = append(h.needles, needle{name, form, []byte(text)})
		}
		add("plain", v)
		add("hex", hex.EncodeToString([]byte(v)))
		add("HEX", strings.ToUpper(hex.EncodeToString([]byte(v))))
		add("query escaped", url.QueryEscape(v))
		add("path escaped", url.PathEscape(v))
		add("quoted", gnuQuoted(t, v))
		var percent strings.Builder
		for _, c := range []byte(v) {
			fmt.Fprintf(&percent, "%%%02x", c)
		}
		add("percent", percent.String())
		for _, html := range []bool{true, false} {
			var b bytes.Buffer
			e := json.NewEncoder(&b)
			e.SetEscapeHTML(html)
			if err := e.Encode(v); err != nil {
				t.Fatal(err)
			}
			add("JSON", strings.Trim(strings.TrimSpace(b.String()), `"`))
		}
		// Base64 of the secret with something before and after it: of the first and
		// the last group only a part is known.
		for _, enc := range []*base64.Encoding{base64.RawStdEncoding, base64.RawURLEncoding} {
			for before := range 3 {
				s := enc.EncodeToString(append(make([]byte, before), v...))
				add(fmt.Sprintf("base64+%d", before), s[(before*8+5)/6:len(s)-1])
			}
		}
	}
	return h
}

// gnuQuoted is s as the tools of the C locale quote a file's name in an error.
func gnuQuoted(t *testing.T, s string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "cat", "/no/"+s)
	cmd.Env = []string{"LC_ALL=C", "PATH=" + os.Getenv("PATH")}
	out, err := cmd.CombinedOutput()
	q, _, ok := strings.Cut(strings.TrimPrefix(string(out), "cat: "), ": No such file")
	if err == nil || !ok {
		t.Fatalf("cat says %q", out)
	}
	return strings.TrimPrefix(strings.Trim(q, "'"), "/no/")
}

// look searches one place.
func (h *hunt) look(kind string, text []byte) {
	for _, n := range h.needles {
		if bytes.Contains(text, n.text) {
			h.mu.Lock()
			h.found[fmt.Sprintf("%s: %s, %s", kind, n.secret, n.form)] = true
			h.mu.Unlock()
		}
	}
}

// report fails the test for all that was found.
func (h *hunt) report() {
	h.t.Helper()
	h.mu.Lock()
	defer h.mu.Unlock()
	for f := range h.found {
		h.t.Errorf("a secret shows up in %s", f)
	}
}

// processes searches the new command lines of this machine, where those of all
// sandboxes are to be seen. Environments are not searched: what a process gets
// it can read, and so can root.
func (h *hunt) processes() {
	names, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, n := range names {
		b, _ := os.ReadFile(n)
		if h.seen[string(b)] {
			continue
		}
		h.seen[string(b)] = true
		h.look("the command line of "+string(b[:max(0, bytes.IndexByte(b, 0))]), bytes.ReplaceAll(b, []byte{0}, []byte{' '}))
	}
}

// watch searches command lines until stop is called.
func (h *hunt) watch() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		for {
			h.processes()
			select {
			case <-tick.C:
			case <-ctx.Done():
				return
			}
		}
	})
	return func() {
		cancel()
		wg.Wait()
	}
}

// stream searches events, each by itself and the texts that they make together.
func (h *hunt) stream(evs []event.Event) {
	joined := map[string]*strings.Builder{}
	add := func(id, delta string) {
		if joined[id] == nil {
			joined[id] = &strings.Builder{}
		}
		joined[id].WriteString(delta)
	}
	for _, ev := range evs {
		b, err := event.Encode(ev)
		if err != nil {
			h.t.Error(err)
		}
		h.look("an event "+string(ev.Type()), b)
		switch e := ev.(type) {
		case event.TextMessageContent:
			add("text "+e.MessageID, e.Delta)
		case event.ReasoningMessageContent:
			add("reasoning "+e.MessageID, e.Delta)
		case event.ToolCallArgs:
			add("arguments "+e.ToolCallID, e.Delta)
		case event.ToolCallResult:
			h.look("a result", []byte(e.Content))
		case event.RunError:
			h.look("RUN_ERROR", []byte(e.Message))
		case event.Custom:
			var v any
			_ = json.Unmarshal(e.Value, &v)
			h.look("the value of "+e.Name, fmt.Append(nil, v))
		}
	}
	for id, b := range joined {
		kind, _, _ := strings.Cut(id, " ")
		h.look("deltas of "+kind, []byte(b.String()))
	}
}

// tree searches files below dir. What skip names is the agent's own.
func (h *hunt) tree(kind, dir string, skip ...string) {
	err := filepath.WalkDir(dir, func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(dir, name)
		if err != nil {
			return err
		}
		for _, s := range skip {
			if ok, _ := filepath.Match(s, rel); ok {
				if d.IsDir() {
					return fs.SkipDir
				}
				return nil
			}
		}
		h.look("a name in "+kind, []byte(rel))
		if !d.Type().IsRegular() {
			return nil
		}
		b, err := os.ReadFile(name)
		h.look(kind+" ("+filepath.Base(name)+")", b)
		return err
	})
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		h.t.Error(err)
	}
}

// image searches the layers and the configuration of a Docker image.
func (h *hunt) image(name string) {
	h.look("docker inspect of the image", run(h.t, "docker", "image", "inspect", name))
	h.look("docker history", run(h.t, "docker", "history", "--no-trunc", name))
	cmd := exec.CommandContext(h.t.Context(), "docker", "save", name)
	out, err := cmd.StdoutPipe()
	if err != nil {
		h.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		h.t.Fatal(err)
	}
	// The layers are stored uncompressed, a tar in a tar.
	layers, err := h.archive(out, 0)
	if err == nil && layers == 0 {
		err = errors.New("no layer was searched")
	}
	if err := errors.Join(err, cmd.Wait()); err != nil {
		h.t.Errorf("docker save: %v", err)
	}
}

func (h *hunt) archive(r io.Reader, depth int) (layers int, err error) {
	tr := tar.NewReader(r)
	for {
		hd, err := tr.Next()
		if err == io.EOF {
			_, err = io.Copy(io.Discard, r)
			return layers, err
		}
		if err != nil {
			return layers, err
		}
		h.look("a name in a layer", []byte(hd.Name))
		switch {
		case depth == 0 && hd.Size > 100<<20: // the image of all tests, older than any secret
		case depth == 0 && strings.HasSuffix(hd.Name, ".tar"):
			if _, err := h.archive(tr, 1); err != nil {
				return layers, fmt.Errorf("%s: %w", hd.Name, err)
			}
			layers++
		case hd.Size < 8<<20 || depth == 0:
			b, err := io.ReadAll(tr)
			if err != nil {
				return layers, err
			}
			h.look("an image layer", b)
		}
	}
}

// TestHuntFinds plants the secret in a place of each kind.
func TestHuntFinds(t *testing.T) {
	value := newSecret()
	b64 := base64.StdEncoding.EncodeToString([]byte("x" + value + "y"))
	plant := func(what string, do func(t *testing.T, h *hunt)) {
		t.Run(what, func(t *testing.T) {
			h := newHunt(t, map[string]string{"S": value})
			do(t, h)
			h.mu.Lock()
			defer h.mu.Unlock()
			if len(h.found) == 0 {
				t.Error("not found")
			}
		})
	}
	plant("command line", func(t *testing.T, h *hunt) {
		cmd := exec.CommandContext(t.Context(), "sh", "-c", "sleep 60; true", "sh", value)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		stop := h.watch()
		testenv.Eventually(t, 5*time.Second, "the process shows", func() bool {
			h.mu.Lock()
			defer h.mu.Unlock()
			return len(h.found) > 0
		})
		stop()
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	plant("log", func(t *testing.T, h *hunt) {
		var b bytes.Buffer
		slog.New(slog.NewJSONHandler(&b, nil)).Info("m", "k", value)
		h.look("log", b.Bytes())
	})
	plant("event", func(t *testing.T, h *hunt) {
		h.stream([]event.Event{event.RunError{Message: "failed with " + value}})
	})
	plant("base64 in an event", func(t *testing.T, h *hunt) {
		h.stream([]event.Event{event.ToolCallResult{MessageID: "m", ToolCallID: "c", Content: b64}})
	})
	plant("two deltas", func(t *testing.T, h *hunt) {
		h.stream([]event.Event{
			event.TextMessageContent{MessageID: "m", Delta: "x" + value[:9]}, event.TextMessageContent{MessageID: "m", Delta: value[9:] + "y"},
		})
	})
	plant("file", func(t *testing.T, h *hunt) {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "state.json"), []byte(hex.EncodeToString([]byte(value))), 0o600); err != nil {
			t.Fatal(err)
		}
		h.tree("files", dir)
	})
	plant("docker inspect", func(t *testing.T, h *hunt) {
		testenv.Docker(t)
		id := strings.TrimSpace(string(run(t, "docker", "create", "--env", "S="+value, testenv.Image, "true")))
		t.Cleanup(func() { _ = exec.Command("docker", "rm", "-f", id).Run() })
		h.look("inspect", run(t, "docker", "inspect", id))
	})
	plant("image layer", func(t *testing.T, h *hunt) {
		testenv.Docker(t)
		id := strings.TrimSpace(string(run(t, "docker", "create", testenv.Image, "true")))
		t.Cleanup(func() { _ = exec.Command("docker", "rm", "-f", id).Run() })
		name := filepath.Join(t.TempDir(), "planted")
		if err := os.WriteFile(name, []byte(b64), 0o644); err != nil {
			t.Fatal(err)
		}
		run(t, "docker", "cp", name, id+":/planted")
		image := strings.TrimSpace(string(run(t, "docker", "commit", id)))
		t.Cleanup(func() { _ = exec.Command("docker", "rmi", "-f", image).Run() })
		h.image(image)
	})
}
