//go:build darwin || dragonfly || freebsd || linux || netbsd || openbsd

package ca_test

import (
	"os"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
)

func holdLock(t *testing.T, path string) (unlock func()) {
	t.Helper()
	f := must.Get(os.OpenFile(path, os.O_RDWR, 0))(t)
	require.NoError(t, syscall.Flock(int(f.Fd()), syscall.LOCK_EX))
	return func() { f.Close() }
}
