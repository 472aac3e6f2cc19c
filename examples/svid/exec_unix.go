//go:build unix

package main

import (
	"os/exec"
	"syscall"
)

// killGroup makes the end of the context kill the command's process group, not only the shell.
func killGroup(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
}
