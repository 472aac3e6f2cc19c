//go:build unix

package main

import (
	"os"
	"os/exec"
	"syscall"
)

// unprivileged has a process run without the rights of root, and reports whether it would have had them.
func unprivileged(cmd *exec.Cmd) bool {
	if os.Getuid() != 0 {
		return false
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	return true
}
