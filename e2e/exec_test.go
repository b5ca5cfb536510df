package e2e

import (
	"bytes"
	"crypto/rand"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/creack/pty"

	"github.com/aisandbox-go/aisandbox/internal/testenv"
)

// TestExec: exec is transparent, as the tools that run containers are.
func TestExec(t *testing.T) {
	for _, prov := range []string{"local", "bwrap", "docker"} {
		t.Run(prov, func(t *testing.T) {
			c := newCommand(t)
			flags := append([]string{"exec"}, c.in(prov)...)
			do := func(stdin io.Reader, words ...string) output {
				t.Helper()
				return c.run(stdin, append(flags, words...)...)
			}

			t.Run("bytes", func(t *testing.T) {
				data := make([]byte, 10<<20)
				if _, err := rand.Read(data); err != nil {
					t.Fatal(err)
				}
				o := do(bytes.NewReader(data), "--", "sh", "-c", "tee /dev/stderr")
				if o.code != 0 || !bytes.Equal([]byte(o.out), data) || !bytes.Equal([]byte(o.err), data) {
					t.Errorf("exit %d; of %d bytes came %d on stdout (same: %t) and %d on stderr (same: %t)", o.code, len(data),
						len(o.out), o.out == string(data), len(o.err), o.err == string(data))
				}
			})
			t.Run("arguments", func(t *testing.T) {
				words := []string{"", " ", "a\nb", "\xff\xfe", "$HOME", "'", `"\`, "-x", "--", "*"}
				o := do(nil, append([]string{"--", "printf", "%s|"}, words...)...)
				if want := strings.Join(words, "|") + "|"; o.code != 0 || o.out != want || o.err != "" {
					t.Errorf("exit %d, stdout %q, stderr %q; want %q", o.code, o.out, o.err, want)
				}
			})
			t.Run("exit codes", func(t *testing.T) {
				for _, tt := range []struct {
					code int
					argv []string
				}{
					{0, []string{"true"}},
					{1, []string{"false"}},
					{7, []string{"sh", "-c", "exit 7"}},
					{255, []string{"sh", "-c", "exit 255"}},
					{137, []string{"sh", "-c", "kill -9 $$"}},
					{143, []string{"sh", "-c", "kill -15 $$"}},
					{126, []string{"/etc/passwd"}},
					{127, []string{"no-such-program"}},
					{127, []string{"/no/such/program"}},
				} {
					o := do(nil, append([]string{"--"}, tt.argv...)...)
					if o.code != tt.code || o.out != "" {
						t.Errorf("%q: exit %d, want %d; stdout %q, stderr %q", tt.argv, o.code, tt.code, o.out, o.err)
					}
					if tt.code >= 126 && tt.code <= 127 && !strings.Contains(o.err, tt.argv[0]) {
						t.Errorf("%q: stderr %q does not name it", tt.argv, o.err)
					}
				}
			})
			t.Run("no stdin", func(t *testing.T) {
				if o := do(nil, "--", "cat"); o.code != 0 || o.out != "" {
					t.Errorf("cat: exit %d, %q", o.code, o.out)
				}
			})
			t.Run("children left behind", func(t *testing.T) {
				mark := uniqueSeconds()
				begin := time.Now()
				o := do(nil, "--", "sh", "-c", "(setsid sleep "+mark+" &); sleep "+mark+" & echo done")
				if o.code != 0 || o.out != "done\n" || time.Since(begin) > 20*time.Second {
					t.Errorf("exit %d after %v, %q, %q", o.code, time.Since(begin), o.out, o.err)
				}
				if left := testenv.Processes(mark); len(left) > 0 {
					t.Errorf("left: %q", left)
				}
			})
			t.Run("timeout", func(t *testing.T) {
				mark := uniqueSeconds()
				o := do(nil, "--timeout", "3s", "--", "sh", "-c", "echo begun; setsid sleep "+mark)
				if o.code != 124 || !strings.Contains(o.err, "timeout") {
					t.Errorf("exit %d, %q, %q", o.code, o.out, o.err)
				}
				if left := testenv.Processes(mark); len(left) > 0 {
					t.Errorf("left: %q", left)
				}
			})
			t.Run("terminal", func(t *testing.T) { execTerminal(t, c, flags) })
			c.clean()
		})
	}
}

// execTerminal drives exec -t by a terminal of its own.
func execTerminal(t *testing.T, c *command, flags []string) {
	cmd := c.cmd(append(flags, "-t", "--", "sh", "-c",
		`test -t 0 && test -t 1 && test -t 2 && stty size; read -r line; echo "got $line"; trap 'echo caught; exit 9' INT; echo ready; while :; do sleep 0.05; done`)...)
	cmd.Env = append(cmd.Env, "TERM=xterm")
	tty, err := pty.StartWithSize(cmd, &pty.Winsize{Rows: 41, Cols: 97})
	if err != nil {
		t.Fatal(err)
	}
	screen := newScreen(tty)
	defer func() {
		_ = tty.Close()
		<-screen.done
	}()
	wait := func(text string) {
		t.Helper()
		testenv.Eventually(t, 30*time.Second, "the terminal shows "+text, func() bool { return strings.Contains(screen.String(), text) })
	}
	wait("41 97")
	if _, err := tty.WriteString("h\u00e9llo\r"); err != nil {
		t.Fatal(err)
	}
	wait("got h\u00e9llo")
	wait("ready")
	// Ctrl-C is the command's: the terminal inside turns it into a signal.
	if _, err := tty.WriteString("\x03"); err != nil {
		t.Fatal(err)
	}
	wait("caught")
	_ = cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != 9 {
		t.Errorf("exit code %d, screen %q", code, screen.String())
	}
}

// screen collects what a terminal shows.
type screen struct {
	lock chan struct{}
	buf  []byte
	done chan struct{}
}

func newScreen(tty *os.File) *screen {
	s := &screen{lock: make(chan struct{}, 1), done: make(chan struct{})}
	go func() {
		defer close(s.done)
		_, _ = io.Copy(s, tty) // ends with EIO when the other side is closed
	}()
	return s
}

func (s *screen) Write(p []byte) (int, error) {
	s.lock <- struct{}{}
	s.buf = append(s.buf, p...)
	<-s.lock
	return len(p), nil
}

func (s *screen) String() string {
	s.lock <- struct{}{}
	defer func() { <-s.lock }()
	return string(s.buf)
}

// TestExecInterrupted: SIGINT to the command alone, as an IDE sends it.
func TestExecInterrupted(t *testing.T) {
	for _, prov := range []string{"local", "bwrap", "docker"} {
		t.Run(prov, func(t *testing.T) {
			c := newCommand(t)
			mark := uniqueSeconds()
			cmd := c.cmd(append(append([]string{"exec"}, c.in(prov)...), "--", "sh", "-c", "setsid sleep "+mark+" & sleep "+mark)...)
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			testenv.Eventually(t, 30*time.Second, "the command runs", func() bool { return len(sleeps(mark)) == 2 })
			if err := cmd.Process.Signal(os.Interrupt); err != nil {
				t.Fatal(err)
			}
			var exit *exec.ExitError
			if err := cmd.Wait(); err == nil || cmd.ProcessState.ExitCode() != 130 {
				t.Errorf("%v (%T)", err, exit)
			}
			if left := testenv.Processes(mark); len(left) > 0 {
				t.Errorf("left: %q", left)
			}
			c.clean()
		})
	}
}
