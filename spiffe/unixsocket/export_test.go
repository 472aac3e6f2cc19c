package unixsocket

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
)

// MaxPath is the longest path of a socket in bytes.
const MaxPath = maxPath

// CloseListener makes serving fail.
func (s *Server) CloseListener() error { return s.l.Close() }

// ContainerOf returns the pod or container in the text of a control group.
func ContainerOf(groups string) string { return containerOf(groups) }

// PodOf and UnitOf return what the text of a control group says.
func PodOf(groups string) string  { return podOf(groups) }
func UnitOf(groups string) string { return unitOf(groups) }

// ListenUnix makes a socket without a look at what is at its path.
func ListenUnix(t testing.TB, dir, name string) error {
	root := must.Get(os.OpenRoot(dir))(t)
	defer root.Close()
	l, _, err := listenUnix(root, dir+"/", name, 0o600)
	if err == nil {
		require.NoError(t, l.Close())
	}
	return err
}
