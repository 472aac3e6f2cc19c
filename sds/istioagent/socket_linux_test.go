package istioagent

import (
	"net"
	"net/http"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
)

// TestSocketBusy has a server with more clients than it accepts, which is no reason not to be ready.
func TestSocketBusy(t *testing.T) {
	t.Parallel()
	root := folder(t)
	socket := filepath.Join(root, workloadSocket)
	serve(t, socket)
	cfg := config(t, root, pod)
	a := start(t, cfg)
	require.Equal(t, fromSocket, a.cfg.Origin)

	require.NoError(t, os.Remove(socket))
	fd := must.Get(syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0))(t)
	defer syscall.Close(fd)
	require.NoError(t, syscall.Bind(fd, &syscall.SockaddrUnix{Name: socket}))
	require.NoError(t, syscall.Listen(fd, 0))
	for {
		conn, err := net.Dial("unix", socket)
		if err != nil {
			require.ErrorIs(t, err, syscall.EAGAIN)
			break
		}
		defer conn.Close()
	}
	code, text := get(t, a, "/healthz/ready")
	assert.Equal(t, http.StatusOK, code, text)
}
