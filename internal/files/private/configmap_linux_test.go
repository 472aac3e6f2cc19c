package private_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/files/private"
	"github.com/svidkit/svidkit/internal/test/must"
)

const mountedFile = "SVIDKIT_PRIVATE_MOUNTED" // a file in the process that TestConfigMap starts

// The volume of a ConfigMap has mode 0777, and the kubelet alone writes to it: in a pod it is as safe as its files. Such a
// directory that is no volume is not.
func TestConfigMap(t *testing.T) {
	if file := os.Getenv(mountedFile); file != "" {
		require.NoError(t, must.Get(private.OpenFile(file, os.O_RDONLY, private.Options{}))(t).Close())
		t.Setenv("KUBERNETES_SERVICE_HOST", "")
		_, err := private.OpenFile(file, os.O_RDONLY, private.Options{})
		require.ErrorIs(t, err, private.ErrUnsafe, "in no pod")
		t.Setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
		_, err = private.OpenFile(filepath.Join(filepath.Dir(file), "..data", "workloads.json"), os.O_RDONLY, private.Options{Keys: true})
		require.ErrorIs(t, err, private.ErrUnsafe, "a key is for the kubelet's Secrets")
		return
	}
	t.Parallel()
	if os.Getuid() != 0 {
		t.Skip("only root can mount")
	}
	dir := must.Get(os.MkdirTemp("/tmp", "pod"))(t)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	volume, at := filepath.Join(dir, "kubernetes.io~configmap", "workloads"), filepath.Join(dir, "etc")
	require.NoError(t, os.MkdirAll(filepath.Join(volume, "..2026"), 0o755))
	require.NoError(t, os.Mkdir(at, 0o755))
	require.NoError(t, os.Chmod(volume, 0o777))
	require.NoError(t, os.WriteFile(filepath.Join(volume, "..2026", "workloads.json"), []byte("{}"), 0o644))
	require.NoError(t, os.Symlink("..2026", filepath.Join(volume, "..data")))
	require.NoError(t, os.Symlink("..data/workloads.json", filepath.Join(volume, "workloads.json")))
	_, err := private.OpenFile(filepath.Join(volume, "workloads.json"), os.O_RDONLY, private.Options{})
	require.ErrorIs(t, err, private.ErrUnsafe, "a directory of that name")

	cmd := exec.CommandContext(t.Context(), "unshare", "--mount", "sh", "-c", `mount --bind "$1" "$2" || exit 77; exec "$0" -test.run='^TestConfigMap$'`, os.Args[0], volume, at)
	cmd.Env = append(os.Environ(), mountedFile+"="+filepath.Join(at, "workloads.json"), "KUBERNETES_SERVICE_HOST=10.96.0.1")
	out, err := cmd.CombinedOutput()
	if cmd.ProcessState == nil || cmd.ProcessState.ExitCode() == 77 || len(out) == 0 {
		t.Skipf("no mount namespace here: %v %s", err, out)
	}
	require.NoError(t, err, "%s", out)
}
