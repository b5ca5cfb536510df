//go:build linux

package inside

import (
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// setTimes sets the modification time of an open file.
func setTimes(fd int, mtime time.Time) error {
	mt, err := unix.TimeToTimespec(mtime)
	if err != nil {
		return err
	}
	ts := [2]unix.Timespec{{Nsec: unix.UTIME_OMIT}, mt}
	_, _, errno := unix.Syscall6(unix.SYS_UTIMENSAT, uintptr(fd), 0, uintptr(unsafe.Pointer(&ts[0])), 0, 0, 0)
	if errno != 0 {
		return os.NewSyscallError("utimensat", errno)
	}
	return nil
}
