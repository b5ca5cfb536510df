//go:build linux

package inside

import (
	"bytes"
	"os"
	"strconv"

	"github.com/aisandbox-go/aisandbox/internal/wire"
)

// usage counts what runs in the sandbox: everything the first process can see,
// or the guest's descendants.
func (s *session) usage() ([]byte, error) {
	type stat struct {
		ppid, cpu, rss int64
	}
	ents, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	self := int64(os.Getpid())
	all := map[int64]stat{}
	for _, ent := range ents {
		pid, err := strconv.ParseInt(ent.Name(), 10, 64)
		if err != nil {
			continue
		}
		b, err := os.ReadFile("/proc/" + ent.Name() + "/stat")
		if err != nil {
			continue
		}
		f := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:])
		if len(f) < 22 || f[0][0] == 'Z' {
			continue
		}
		num := func(i int) int64 { n, _ := strconv.ParseInt(string(f[i]), 10, 64); return n }
		all[pid] = stat{ppid: num(1), cpu: num(11) + num(12), rss: num(21)}
	}
	ours := func(pid int64) bool {
		for range 1000 { // a chain that changes while it is read could be a ring
			if pid == self || self == 1 {
				return true
			}
			st, ok := all[pid]
			if !ok || st.ppid == 0 {
				return false
			}
			pid = st.ppid
		}
		return false
	}
	var procs, rss, cpu int64
	for pid, st := range all {
		if pid == self || !ours(pid) {
			continue
		}
		procs++
		rss += st.rss
		cpu += st.cpu
	}
	page := int64(os.Getpagesize())
	var e wire.Enc
	e.Int(procs)
	e.Int(rss * page)
	e.Int(cpu * 1e9 / 100) // clock ticks, a constant of the ABI
	e.Int(all[self].rss * page)
	return e.B, nil
}
