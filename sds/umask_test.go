//go:build unix

package sds_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/sds"
)

// The mode of the socket is the one asked for, neither more nor less, whatever the umask. The umask
// belongs to the process, so this test runs alone.
func TestServerUmask(t *testing.T) {
	for _, umask := range []int{0, 0o777} {
		dir := socketDir(t)
		path := filepath.Join(dir, "s")
		old := syscall.Umask(umask)
		s := &sds.Server{Path: path, Handler: says("hello"), SocketMode: 0o660}
		err := s.Listen()
		syscall.Umask(old)
		require.NoError(t, err)
		fi, err := os.Lstat(path)
		require.NoError(t, err)
		assert.Equal(t, fs.ModeSocket|0o660, fi.Mode(), "umask %o", umask)
		run(t, s)
	}
}
