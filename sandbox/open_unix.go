//go:build unix

package sandbox

import (
	"os"
	"syscall"
)

// openRegular opens a file that was a regular one a moment ago. If it has become
// a pipe since, opening doesn't wait for its other end.
func openRegular(r *os.Root, name string) (*os.File, error) {
	return r.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_NOFOLLOW, 0)
}
