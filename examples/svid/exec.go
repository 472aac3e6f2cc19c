package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"time"
)

// execDelay is how long the command's children may hold its output open.
const execDelay = time.Second

// exec runs a command line with the shell, in the directory, and waits for it. After the time limit it kills the
// command with its process group.
func (a *app) exec(ctx context.Context, line, dir string, limit time.Duration) error {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("it was killed after %s; see -exec-timeout", limit))
	defer cancel()
	cmd := exec.CommandContext(ctx, "/bin/sh", "-c", line)
	cmd.Env = append(os.Environ(), "SVID_DIR="+dir)
	cmd.Stdout, cmd.Stderr = a.errOut, a.errOut
	cmd.WaitDelay = execDelay
	killGroup(cmd)
	err := cmd.Run()
	if cause := context.Cause(ctx); err != nil && cause != nil {
		err = cause
	}
	if err != nil {
		return fmt.Errorf("-exec: %w", err)
	}
	return nil
}
