package files_test

import (
	"os"
	"runtime"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/files/disk"
	"github.com/svidkit/svidkit/internal/test/must"
)

// The kernel is asked: it refuses to make a directory durable that is on no disk.
func TestDiskSyncDirReachesTheKernel(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("needs /proc")
	}
	root := must.Get(os.OpenRoot("/proc"))(t)
	defer root.Close()
	require.ErrorIs(t, disk.OS{}.SyncDir(root, "."), syscall.EINVAL)
}
