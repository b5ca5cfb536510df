package player_test

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/aisandbox-go/aisandbox/harness/scripted/player"
)

// signaled starts a player, waits until cond holds and sends it a signal.
func (s *stage) signaled(steps []player.Step, sig syscall.Signal, cond func() bool) *played {
	s.t.Helper()
	cmd := s.command(steps)
	var out, errw bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errw
	if err := cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	until(s.t, "the script to get there", cond)
	if err := cmd.Process.Signal(sig); err != nil {
		s.t.Fatal(err)
	}
	err := cmd.Wait()
	return ended(s.t, cmd, err, out.Bytes(), errw.String())
}

// pid reads a process id that a command wrote; 0 until it has.
func (s *stage) pid(name string) int {
	b, err := os.ReadFile(filepath.Join(s.dir, name))
	if err != nil || !bytes.HasSuffix(b, []byte("\n")) {
		return 0
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		s.t.Fatal(err)
	}
	return pid
}

// gone says that no process has this id, zombies not counted.
func gone(pid int) bool {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return syscall.Kill(pid, 0) == syscall.ESRCH
	}
	return bytes.Contains(b, []byte(") Z "))
}

// busy leaves one process behind and then hangs in a tree of three.
var busy = []player.Step{
	{Say: "Sleeping."},
	{Run: "sleep 301 >/dev/null 2>&1 & echo $! > left"},
	{Run: "sleep 302 & echo $! > child; echo $$ > shell; wait"},
	{Say: "never"},
}

func TestInterrupt(t *testing.T) {
	s := newStage(t)
	p := s.signaled(busy, syscall.SIGINT, func() bool { return s.pid("shell") != 0 })
	r := p.result()
	if p.code != 0 || r["subtype"] != "error_during_execution" || r["is_error"] != true || r["terminal_reason"] != "aborted_tools" || r["stop_reason"] != "tool_use" {
		t.Errorf("exit %d, %v", p.code, r)
	}
	if p.text() != "Sleeping." {
		t.Errorf("text %q", p.text())
	}
	calls := p.calls()
	if len(calls) != 2 || !calls[1].Error || !strings.Contains(calls[1].Content, "interrupted") {
		t.Errorf("calls %v", calls)
	}
	for _, name := range []string{"left", "child", "shell"} {
		pid := s.pid(name)
		until(t, "the end of "+name, func() bool { return gone(pid) })
	}
}

func TestInterruptOutsideOfTool(t *testing.T) {
	for _, step := range []player.Step{
		{Sleep: time.Hour},
		{Flood: &player.Flood{Lines: 1 << 20, Bytes: 1 << 10}},
		{Flood: &player.Flood{Lines: 1, Bytes: 1 << 30}},
		{Repeat: &player.Repeat{Times: 1_000_000, Steps: []player.Step{{Say: "again "}}}},
	} {
		s := newStage(t)
		cmd := s.command([]player.Step{{Run: "echo 1 > here"}, step, {Say: "never"}})
		out := new(counter)
		cmd.Stdout = out
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		until(t, "the step", func() bool { return s.pid("here") != 0 && (step.Sleep > 0 || out.n.Load() > 1<<20) })
		if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
			t.Fatal(err)
		}
		err := cmd.Wait()
		p := ended(t, cmd, err, out.tail(), "")
		if r := p.result(); p.code != 0 || r["subtype"] != "error_during_execution" || r["terminal_reason"] != "aborted_tools" {
			t.Errorf("exit %d, %v", p.code, r)
		}
		if out.n.Load() > 900<<20 {
			t.Errorf("went on for %d bytes", out.n.Load())
		}
	}
}

func TestTerminate(t *testing.T) {
	for sig, code := range map[syscall.Signal]int{syscall.SIGTERM: 143, syscall.SIGHUP: 129} {
		s := newStage(t)
		p := s.signaled(busy, sig, func() bool { return s.pid("shell") != 0 })
		if p.code != code || len(p.of("result")) != 0 {
			t.Errorf("exit %d, results %v", p.code, p.of("result"))
		}
		for _, name := range []string{"left", "child", "shell"} {
			pid := s.pid(name)
			until(t, "the end of "+name, func() bool { return gone(pid) })
		}
	}
}

// SIGTERM ends a player whose output nobody reads.
func TestTerminateWhileBlocked(t *testing.T) {
	s := newStage(t)
	cmd := s.command([]player.Step{{Flood: &player.Flood{Lines: 1000, Bytes: 1 << 20}}})
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(out, make([]byte, 1<<16)); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != 143 {
		t.Errorf("exit %d, want 143", code)
	}
}

// A hundred megabytes pass through little memory, be it in many lines or in one.
func TestFlood(t *testing.T) {
	for _, f := range []player.Flood{{Lines: 100_000, Bytes: 1000}, {Lines: 1, Bytes: 100_000_000}, {Lines: 5, Bytes: 1}} {
		s := newStage(t)
		cmd := s.command([]player.Step{{Flood: &f}, {Say: "done"}})
		status := filepath.Join(s.home, "status")
		cmd.Env = append(cmd.Env, "PLAYER_TEST_STATUS="+status)
		out := new(counter)
		cmd.Stdout = out
		if err := cmd.Run(); err != nil {
			t.Fatal(err)
		}
		p := ended(t, cmd, nil, out.tail(), "")
		if p.result()["subtype"] != "success" || p.result()["result"] != "done" {
			t.Errorf("%+v: %v", f, p.result())
		}
		total := int64(f.Lines) * int64(f.Bytes)
		if n := out.n.Load(); n < total || n > total+int64(f.Lines)*400+16<<10 {
			t.Errorf("%+v: %d bytes of output", f, n)
		}
		if kib := peak(t, status); kib > 60<<10 {
			t.Errorf("%+v: took %d KiB of memory", f, kib)
		}
	}
}

// peak is the most memory that a process had, in KiB, from its status file.
func peak(t *testing.T, file string) int {
	b, err := os.ReadFile(file)
	if err != nil {
		if runtime.GOOS == "linux" {
			t.Fatal(err)
		}
		t.Skip("no /proc to read the memory from")
	}
	_, after, _ := strings.Cut(string(b), "VmHWM:")
	kib, _, _ := strings.Cut(strings.TrimSpace(after), " ")
	n, err := strconv.Atoi(kib)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("peak %d KiB", n)
	return n
}

// What is streamed is what was asked for, and the whole line agrees with it.
func TestFloodText(t *testing.T) {
	s := newStage(t)
	p := s.play([]player.Step{{Flood: &player.Flood{Lines: 3, Bytes: 200}}, {Flood: &player.Flood{Lines: 2, Bytes: 600 << 10}}})
	if want := 3*200 + 2*600<<10; len(p.text()) != want || strings.Count(p.text(), "\n") != 5 {
		t.Errorf("%d bytes in %d lines, want %d in 5", len(p.text()), strings.Count(p.text(), "\n"), want)
	}
	whole := p.of("assistant")
	if len(whole) != 1 || get(whole[0], "message", "content", 0, "text") != p.text()[:600] {
		t.Errorf("%d whole lines, the first does not hold what was streamed", len(whole))
	}
}

// counter counts what is written and keeps the last of it.
type counter struct {
	n    atomic.Int64
	last []byte
}

func (c *counter) Write(p []byte) (int, error) {
	c.n.Add(int64(len(p)))
	c.last = append(c.last, p...)
	if len(c.last) > 1<<20 {
		c.last = append(c.last[:0], c.last[len(c.last)-64<<10:]...)
	}
	return len(p), nil
}

// tail is what was kept, from the start of a line.
func (c *counter) tail() []byte {
	if int64(len(c.last)) == c.n.Load() {
		return c.last
	}
	_, after, _ := bytes.Cut(c.last, []byte("\n"))
	return after
}
