package unixsocket_test

import (
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

// The socket of a server whose queue is full is in use.
func TestBusyServer(t *testing.T) {
	t.Parallel()
	path := filepath.Join(socketDir(t), "s")
	open := func() int {
		fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_NONBLOCK|syscall.SOCK_CLOEXEC, 0)
		require.NoError(t, err)
		t.Cleanup(func() { _ = syscall.Close(fd) })
		return fd
	}
	server := open()
	require.NoError(t, syscall.Bind(server, &syscall.SockaddrUnix{Name: path}))
	require.NoError(t, syscall.Listen(server, 1))
	for i := 0; ; i++ {
		err := syscall.Connect(open(), &syscall.SockaddrUnix{Name: path})
		if err == syscall.EAGAIN {
			break
		}
		require.NoError(t, err)
		require.Less(t, i, 100, "the queue has no end")
	}
	require.ErrorIs(t, (&unixsocket.Server{Path: path, Handler: says("")}).Listen(), unixsocket.ErrInUse)
	require.NotZero(t, mode(t, path), "it is still there")
}
