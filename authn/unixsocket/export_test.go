package unixsocket

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

// MaxPath is the longest path of a socket in bytes.
const MaxPath = maxPath

// CloseListener makes serving fail.
func (s *Server) CloseListener() error { return s.l.Close() }

// ExemptNone makes MaxConnsPerUser count for root and the user of this process, too.
func (s *Server) ExemptNone() { s.exempt = func(uint32) bool { return false } }

// ListenUnix makes a socket without a look at what is at its path.
func ListenUnix(t testing.TB, dir, name string) error {
	root, err := os.OpenRoot(dir)
	require.NoError(t, err)
	defer root.Close()
	l, _, err := listenUnix(root, dir+"/", name, 0o600)
	if err == nil {
		require.NoError(t, l.Close())
	}
	return err
}
