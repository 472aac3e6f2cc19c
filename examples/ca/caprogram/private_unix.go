//go:build unix

package caprogram

import (
	"fmt"
	"io/fs"
	"os"
	"syscall"
)

// checkPrivate refuses a directory or file with a key that another user owns, can read or can change.
func checkPrivate(path string, info fs.FileInfo) error {
	if owner := info.Sys().(*syscall.Stat_t).Uid; owner != 0 && int(owner) != os.Geteuid() {
		return fmt.Errorf("%s belongs to user %d; run: chown %d %q", path, owner, os.Geteuid(), path)
	}
	if mode := info.Mode().Perm(); mode&0o077 != 0 {
		return fmt.Errorf("%s has mode %04o, so that others may get at the key; run: chmod %04o %q", path, mode,
			mode&0o700, path)
	}
	return nil
}
