package docker

import (
	"net"
	"strings"
	"syscall"
)

// nearby says whether the engine at this address shares our machine: it listens on
// a unix socket, and is a process that we can see. One whose socket was passed
// into a container with us has other files under the same names.
func nearby(host string) bool {
	name, ok := strings.CutPrefix(host, "unix://")
	if !ok {
		return false
	}
	c, err := net.Dial("unix", name)
	if err != nil {
		return false
	}
	defer c.Close()
	raw, err := c.(*net.UnixConn).SyscallConn()
	if err != nil {
		return false
	}
	pid := int32(0)
	err = raw.Control(func(fd uintptr) {
		if cred, err := syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED); err == nil {
			pid = cred.Pid // 0 where it has none in our pid namespace
		}
	})
	return err == nil && pid > 0
}
