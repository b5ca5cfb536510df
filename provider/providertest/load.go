package providertest

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"hash"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/aisandbox-go/aisandbox/provider"
)

// loadCases run alone, since they measure.
var loadCases = []testCase{
	{"E16", "many commands at once", func(t *testing.T, b *box) {
		var wg sync.WaitGroup
		begin := time.Now()
		for i := range b.s.o.Parallel {
			wg.Go(func() {
				// From 129 on a shell's code may also mean a signal.
				code, text := i%129, fmt.Sprintf("%d-%s", i, strings.Repeat("x", i*37%4000))
				r, err := b.exec(provider.Cmd{
					Argv: shell(`cat; printf %s "$1" >&2; exit "$2"`, text, strconv.Itoa(code)), Stdin: strings.NewReader(text),
				})
				if err != nil || r.exit != (provider.Exit{Code: code}) || r.out != text || r.err != text {
					t.Errorf("command %d: %v, %v, %d and %d bytes of %d", i, r.exit, err, len(r.out), len(r.err), len(text))
				}
			})
		}
		wg.Wait()
		t.Logf("%d commands in %v", b.s.o.Parallel, time.Since(begin).Round(time.Millisecond))
		b.eventually(2*time.Second, "no zombie is left", func() bool { return hostZombies() == 0 && b.zombies() == 0 })
	}},
	{"E23", "huge output, little memory", func(t *testing.T, b *box) {
		runtime.GC()
		base, peak := inUse(), uint64(0)
		w := pattern{}
		next := int64(0)
		w.check = func() {
			if w.n >= next {
				next += 16 << 20
				peak = max(peak, inUse())
			}
		}
		size := b.s.o.BigOutput
		r, err := b.exec(provider.Cmd{Argv: shell(patternScript, strconv.FormatInt(size, 10)), Stdout: &w})
		if err != nil || r.exit.Code != 0 || w.n != size || w.bad >= 0 {
			t.Errorf("%v, %v, %d of %d bytes, wrong at %d", r.exit, err, w.n, size, w.bad)
		}
		if used := int64(peak) - int64(base); used > 100<<20 {
			t.Errorf("the host used %d MiB more", used>>20)
		}
		t.Logf("%d MiB in %v", size>>20, r.took.Round(time.Millisecond))
	}},
}

func inUse() uint64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapInuse + m.StackInuse
}

// hostZombies counts zombies among this process's descendants.
func hostZombies() int {
	es, err := os.ReadDir("/proc")
	if err != nil {
		return 0
	}
	parent, zombie := map[int]int{}, []int{}
	for _, e := range es {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		stat, err := os.ReadFile("/proc/" + e.Name() + "/stat")
		if err != nil {
			continue
		}
		f := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
		if len(f) < 2 {
			continue
		}
		parent[pid], _ = strconv.Atoi(f[1])
		if f[0] == "Z" {
			zombie = append(zombie, pid)
		}
	}
	n := 0
	for _, pid := range zombie {
		for p := parent[pid]; p > 1; p = parent[p] {
			if p == os.Getpid() {
				n++
				break
			}
		}
	}
	return n
}

// zombies counts the zombies inside, unless inside is the host's own process table.
func (b *box) zombies() int {
	b.t.Helper()
	ns := strings.TrimSpace(b.sh("readlink /proc/self/ns/pid").out)
	if mine, err := os.Readlink("/proc/self/ns/pid"); ns == "" || err == nil && mine == ns {
		return 0
	}
	n, _ := strconv.Atoi(strings.TrimSpace(b.sh(`cat /proc/[0-9]*/stat 2>/dev/null | sed 's/^.*) //' | grep -c '^Z'`).out))
	return n
}

// secretStays looks for a secret of a command's environment where it must not be.
func secretStays(t *testing.T, b *box) {
	secret := "S3CRET-" + rand.Text()
	gate := b.path("gate")
	ready := &firstWrite{c: make(chan struct{})}
	p := b.start(b.ctx, provider.Cmd{
		Argv:   shell(`[ -n "$TOKEN" ] && echo ready; while [ ! -e "$1" ]; do sleep 0.1 || sleep 1; done`, gate),
		Env:    []string{"TOKEN=" + secret},
		Stdout: ready,
	})
	b.wait(ready.c, "output")
	if inside := b.must("cat /proc/[0-9]*/cmdline 2>/dev/null || :"); strings.Contains(inside, secret) {
		t.Error("in the arguments of a process inside")
	}
	es, _ := os.ReadDir("/proc")
	for _, e := range es {
		if line, err := os.ReadFile("/proc/" + e.Name() + "/cmdline"); err == nil && bytes.Contains(line, []byte(secret)) {
			t.Errorf("in the arguments of host process %s: %.80q", e.Name(), line)
		}
	}
	ref, _ := json.Marshal(b.h.Ref())
	if text := fmt.Sprintf("%s %+v", ref, b.h.Ref()); strings.Contains(text, secret) {
		t.Errorf("in the reference: %s", text)
	}
	b.must(`: >"$1"`, gate)
	if e, err := p.Wait(); err != nil || e.Code != 0 {
		t.Errorf("%v, %v", e, err)
	}
	if _, err := b.exec(provider.Cmd{Argv: []string{"no-such-program"}, Env: []string{"TOKEN=" + secret}}); err != nil && strings.Contains(err.Error(), secret) {
		t.Errorf("in an error: %v", err)
	}
}

// sum is a writer that remembers the hash alone.
type sum struct {
	n int64
	h hash.Hash
}

func (s *sum) Write(p []byte) (int, error) {
	if s.h == nil {
		s.h = sha256.New()
	}
	s.n += int64(len(p))
	return s.h.Write(p)
}

func (s *sum) equal(o *sum) bool {
	return s.n == o.n && s.h != nil && o.h != nil && bytes.Equal(s.h.Sum(nil), o.h.Sum(nil))
}
