//go:build unix

package main

import (
	"io/fs"
	"os"
	"os/exec"
	"syscall"
)

// group returns the group of a file.
func group(info fs.FileInfo) int { return int(info.Sys().(*syscall.Stat_t).Gid) }

// unprivileged has a process run without the rights of root, and reports whether it would have had them.
func unprivileged(cmd *exec.Cmd) bool {
	if os.Getuid() != 0 {
		return false
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	return true
}
