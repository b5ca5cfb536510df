//go:build linux

package proc

import (
	"fmt"
	"os"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/aisandbox-go/aisandbox/provider"
)

// openPTY returns the master, in non-blocking mode so that a read can be
// interrupted, and the slave's descriptor.
func openPTY(t provider.Terminal, cred *syscall.Credential) (*os.File, int, error) {
	m, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, 0, &os.PathError{Op: "open", Path: "/dev/ptmx", Err: err}
	}
	fail := func(what string, err error) (*os.File, int, error) {
		_ = unix.Close(m)
		return nil, 0, fmt.Errorf("terminal: %s: %w", what, err)
	}
	if err := unix.IoctlSetPointerInt(m, unix.TIOCSPTLCK, 0); err != nil {
		return fail("unlock", err)
	}
	slave, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(m), unix.TIOCGPTPEER, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC)
	fd := int(slave)
	if errno != 0 { // before Linux 4.13
		n, err := unix.IoctlGetInt(m, unix.TIOCGPTN)
		if err != nil {
			return fail("number", err)
		}
		if fd, err = unix.Open("/dev/pts/"+strconv.Itoa(n), unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0); err != nil {
			return fail("open", err)
		}
	}
	if cred != nil {
		_ = unix.Fchown(fd, int(cred.Uid), -1) // so that the user can open it by name
	}
	if t.Rows > 0 || t.Cols > 0 {
		ws := &unix.Winsize{Row: t.Rows, Col: t.Cols}
		if err := unix.IoctlSetWinsize(m, unix.TIOCSWINSZ, ws); err != nil {
			_ = unix.Close(fd)
			return fail("size", err)
		}
	}
	return os.NewFile(uintptr(m), "ptmx"), fd, nil
}

func setSize(master *os.File, t provider.Terminal) error {
	c, err := master.SyscallConn()
	if err != nil {
		return fmt.Errorf("proc: resize: %w", err)
	}
	var serr error
	err = c.Control(func(fd uintptr) {
		serr = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Row: t.Rows, Col: t.Cols})
	})
	if err == nil {
		err = serr
	}
	if err != nil {
		return fmt.Errorf("proc: resize: %w", err)
	}
	return nil
}
