//go:build unix

package unixsocket_test

import (
	"io/fs"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/unixsocket"
)

// The modes are the ones asked for, neither more nor less, whatever the umask. The umask belongs to
// the process, so this test runs alone.
func TestUmask(t *testing.T) {
	for _, umask := range []int{0, 0o777} {
		path := filepath.Join(socketDir(t), "s")
		old := syscall.Umask(umask)
		l, err := unixsocket.Listen(unixsocket.Options{Path: path, SocketMode: 0o660})
		syscall.Umask(old)
		require.NoError(t, err)
		assert.Equal(t, fs.ModeSocket|0o660, mode(t, path), "umask %o", umask)
		l.Remove()
		require.NoError(t, l.Close())
	}
}
