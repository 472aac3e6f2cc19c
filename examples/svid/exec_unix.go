//go:build unix

package main

import (
	"os/exec"
	"syscall"
)

// killGroup has the end of the context kill the process group of the command, and not the shell alone.
func killGroup(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
}
