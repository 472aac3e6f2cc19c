//go:build !unix

package main

import "os/exec"

// killGroup does nothing: package exec kills only the command itself.
func killGroup(*exec.Cmd) {}
