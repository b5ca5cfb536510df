//go:build linux

package inside

import (
	"bufio"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/aisandbox-go/aisandbox/provider"
)

// account is a user of the sandbox.
type account struct {
	uid, gid int
	groups   []uint32
	name     string
	home     string
}

// lookupUser takes a name, a number, or UID:GID. The files are read by hand: a
// sandbox's users are in files, and os/user would add to the program's size.
func lookupUser(spec string) (*account, error) {
	name, group, hasGroup := strings.Cut(spec, ":")
	a := &account{uid: -1, gid: -1}
	n, err := strconv.Atoi(name)
	numeric := err == nil && n >= 0
	if numeric {
		a.uid = n
	}
	eachLine("/etc/passwd", func(f []string) bool {
		if len(f) < 6 || f[0] != name && !(numeric && f[2] == strconv.Itoa(n)) {
			return true
		}
		uid, err1 := strconv.Atoi(f[2])
		gid, err2 := strconv.Atoi(f[3])
		if err1 != nil || err2 != nil {
			return true
		}
		a.name, a.uid, a.gid, a.home = f[0], uid, gid, f[5]
		return false
	})
	if a.uid < 0 {
		return nil, fmt.Errorf("user %q does not exist in the sandbox: %w", spec, provider.ErrInvalid)
	}
	if a.gid < 0 {
		a.gid = a.uid
	}
	if hasGroup {
		gid, err := strconv.Atoi(group)
		if err != nil {
			gid = -1
			eachLine("/etc/group", func(f []string) bool {
				if len(f) >= 3 && f[0] == group {
					gid, _ = strconv.Atoi(f[2])
					return false
				}
				return true
			})
		}
		if gid < 0 {
			return nil, fmt.Errorf("group of %q does not exist in the sandbox: %w", spec, provider.ErrInvalid)
		}
		a.gid = gid
	} else if a.name != "" {
		eachLine("/etc/group", func(f []string) bool {
			if len(f) >= 4 && slices.Contains(strings.Split(f[3], ","), a.name) {
				if gid, err := strconv.Atoi(f[2]); err == nil {
					a.groups = append(a.groups, uint32(gid))
				}
			}
			return true
		})
	}
	return a, nil
}

func eachLine(file string, f func(fields []string) bool) {
	in, err := os.Open(file)
	if err != nil {
		return
	}
	defer in.Close()
	for sc := bufio.NewScanner(in); sc.Scan(); {
		if !f(strings.Split(sc.Text(), ":")) {
			return
		}
	}
}

// credential returns how to start a process as a; nil keeps the guest's own user.
func (a *account) credential() (*syscall.Credential, error) {
	if a == nil || a.uid == os.Getuid() && a.gid == os.Getgid() {
		return nil, nil
	}
	if os.Getuid() != 0 {
		return nil, fmt.Errorf("the guest runs as user %d and can't start a process as user %d: %w", os.Getuid(), a.uid, provider.ErrInvalid)
	}
	return &syscall.Credential{Uid: uint32(a.uid), Gid: uint32(a.gid), Groups: a.groups}, nil
}
