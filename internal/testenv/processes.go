package testenv

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"
)

// Processes returns the living processes, of this machine and of every sandbox on
// its kernel, that have mark in their command line or in the environment that they
// were started with. The calling process is left out.
func Processes(mark string) []string {
	var found []string
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, d := range dirs {
		pid, err := strconv.Atoi(filepath.Base(d))
		if err != nil || pid == os.Getpid() {
			continue
		}
		// A process that is gone by now, or is no business of ours, reads as empty.
		// A zombie, too: it has no memory to hold them.
		cmdline, _ := os.ReadFile(d + "/cmdline")
		environ, _ := os.ReadFile(d + "/environ")
		if bytes.Contains(cmdline, []byte(mark)) || bytes.Contains(environ, []byte(mark)) {
			found = append(found, fmt.Sprintf("%d: %.200q", pid, bytes.ReplaceAll(cmdline, []byte{0}, []byte{' '})))
		}
	}
	return found
}

// Eventually polls ok until it is true, and fails the test when it isn't within d.
func Eventually(t testing.TB, d time.Duration, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	end := time.NewTimer(d)
	defer end.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-t.Context().Done():
			t.Fatalf("the test ended while waiting: %s", what)
		case <-end.C:
			if ok() {
				return
			}
			t.Fatalf("not within %v: %s", d, what)
		}
	}
}
