//go:build !linux

package unixsocket_test

import (
	"errors"
	"os/exec"
)

func limitFiles(uint64) error { return errors.New("only on Linux") }

func asUser(*exec.Cmd, uint32) {}
