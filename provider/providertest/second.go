package providertest

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/aisandbox-go/aisandbox/provider"
)

// job is what a second process is asked to do with a sandbox.
type job struct {
	Do    string       `json:"do"`
	Ref   provider.Ref `json:"ref"`
	Arg   string       `json:"arg"`
	Reply string       `json:"reply"` // file for the reply
}

type reply struct {
	Text string `json:"text"`
	Err  string `json:"err"`
}

// inSecond runs a job in a new process, which ends without any cleaning up.
func (b *box) inSecond(do, arg string) string {
	b.t.Helper()
	j := job{Do: do, Ref: b.storedRef(), Arg: arg, Reply: filepath.Join(b.t.TempDir(), "reply")}
	text, err := json.Marshal(j)
	if err != nil {
		b.t.Fatal(err)
	}
	var pattern []string
	for e := range strings.SplitSeq(b.s.name, "/") {
		pattern = append(pattern, "^"+regexp.QuoteMeta(e)+"$")
	}
	exe, err := os.Executable()
	if err != nil {
		b.t.Fatal(err)
	}
	cmd := exec.CommandContext(b.ctx, exe, "-test.run="+strings.Join(pattern, "/"), "-test.count=1")
	cmd.Env = append(os.Environ(), secondEnv+"="+string(text), parentEnv+"="+strconv.Itoa(os.Getpid()))
	cmd.WaitDelay = 5 * time.Second
	// A file, not a pipe: what outlives the process would keep a pipe open.
	log, err := os.Create(filepath.Join(b.t.TempDir(), "log"))
	if err != nil {
		b.t.Fatal(err)
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	err = cmd.Run()
	out, _ := os.ReadFile(log.Name())
	if err != nil {
		b.t.Fatalf("second process: %v\n%s", err, out)
	}
	raw, err := os.ReadFile(j.Reply)
	if err != nil {
		b.t.Fatalf("second process left no reply: %v\n%s", err, out)
	}
	var r reply
	if err := json.Unmarshal(raw, &r); err != nil {
		b.t.Fatal(err)
	}
	if r.Err != "" {
		b.t.Fatalf("in the second process: %s", r.Err)
	}
	return r.Text
}

// second is the other side: it never returns.
func (s *suite) second(t *testing.T) {
	var j job
	if err := json.Unmarshal([]byte(os.Getenv(secondEnv)), &j); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), s.o.Timeout)
	defer cancel()
	var r reply
	text, err := s.work(ctx, j)
	r.Text = text
	if err != nil {
		r.Err = err.Error()
	}
	raw, err := json.Marshal(r)
	if err == nil {
		err = os.WriteFile(j.Reply, raw, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	os.Exit(0) // the way a host dies: nothing is closed
}

func (s *suite) work(ctx context.Context, j job) (string, error) {
	h, err := s.p.Resume(ctx, j.Ref)
	if err != nil {
		return "", err
	}
	if s.o.Wrap != nil {
		if h, err = s.o.Wrap(ctx, h); err != nil {
			return "", err
		}
	}
	f, ok := provider.As[provider.FS](h)
	if !ok {
		f = provider.ExecFS(h)
	}
	switch j.Do {
	case "files":
		r, err := f.Open(ctx, j.Arg)
		if err != nil {
			return "", err
		}
		content, err := io.ReadAll(r)
		if err != nil {
			return "", err
		}
		if err := f.Put(ctx, j.Arg+".second", strings.NewReader("from the second"), 0o644); err != nil {
			return "", err
		}
		out, err := provider.Output(ctx, h, provider.Cmd{Argv: []string{"echo", "runs"}})
		return string(content) + string(out), err
	case "outlive":
		if _, err := h.Start(ctx, provider.Cmd{Argv: shell(beat, j.Arg)}); err != nil {
			return "", err
		}
		return "", runs(ctx, f, j.Arg)
	case "launch":
		r, ok := provider.As[provider.Reattacher](h)
		if !ok {
			return "", fmt.Errorf("no Reattacher")
		}
		tok, file, _ := strings.Cut(j.Arg, " ")
		cmd := provider.Cmd{Argv: shell("echo from the journal; "+beat, file)}
		if err := r.Launch(ctx, tok, cmd, provider.LaunchOptions{RunID: "run", Nonce: []byte("nonce")}); err != nil {
			return "", err
		}
		return "", runs(ctx, f, file)
	}
	return "", fmt.Errorf("unknown job %q", j.Do)
}

// runs waits for the beats of a process.
func runs(ctx context.Context, f provider.FS, file string) error {
	var err error
	if poll(ctx, 20*time.Second, func() bool {
		fi, e := f.Lstat(ctx, file)
		err = e
		return e == nil && fi.Size() >= 2
	}) {
		return nil
	}
	return fmt.Errorf("the process does not run: %v", err)
}
