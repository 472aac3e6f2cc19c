//go:build unix

package unixsocket_test

import (
	"io/fs"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

// The modes are the ones asked for, neither more nor less, whatever the umask. The umask belongs to
// the process, so this test runs alone.
func TestUmask(t *testing.T) {
	for _, umask := range []int{0, 0o777} {
		path := filepath.Join(socketDir(t), "s")
		old := syscall.Umask(umask)
		s := &unixsocket.Server{Path: path, Handler: says(""), SocketMode: 0o660}
		err := s.Listen()
		syscall.Umask(old)
		require.NoError(t, err)
		assert.Equal(t, fs.ModeSocket|0o660, mode(t, path), "umask %o", umask)
		require.NoError(t, s.CloseListener())
	}
}
