package private_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/files/private"
	"github.com/svidkit/svidkit/internal/test/must"
)

const sandbox = "SVIDKIT_PRIVATE_SANDBOX" // a directory in the process that TestSandbox starts

// In a user namespace that maps this user alone, as sandboxes have it, the directories of root belong to no user that has a
// number. What is below them works, and what belongs to another user is refused as ever.
func TestSandbox(t *testing.T) {
	t.Parallel()
	dir := os.Getenv(sandbox)
	if dir == "" {
		uid, gid := os.Geteuid(), os.Getegid()
		if uid == 0 {
			uid, gid = 1000, 1000
		}
		dir, err := os.MkdirTemp("/tmp", "sandbox") // directories of the test belong to root
		require.NoError(t, err)
		t.Cleanup(func() { _ = os.RemoveAll(dir) })
		file := write(t, 0o644, dir, "of-another")
		if os.Geteuid() == 0 {
			require.NoError(t, os.Chown(dir, uid, gid))
			require.NoError(t, os.Chown(file, 54321, -1))
			exe := filepath.Join(dir, "test")
			require.NoError(t, os.WriteFile(exe, must.Get(os.ReadFile(os.Args[0]))(t), 0o755))
		}
		exe := os.Args[0]
		if os.Geteuid() == 0 {
			exe = filepath.Join(dir, "test")
		}
		cmd := exec.Command(exe, "-test.run=^TestSandbox$")
		cmd.Dir, cmd.Env = dir, append(os.Environ(), sandbox+"="+dir)
		inner := uid
		if uid == 65534 { // which stands in there for all that is not mapped
			inner = 1000
		}
		cmd.SysProcAttr = &syscall.SysProcAttr{
			Cloneflags:  syscall.CLONE_NEWUSER,
			UidMappings: []syscall.SysProcIDMap{{ContainerID: inner, HostID: uid, Size: 1}},
			GidMappings: []syscall.SysProcIDMap{{ContainerID: gid, HostID: gid, Size: 1}},
			Credential:  &syscall.Credential{Uid: uint32(inner), Gid: uint32(gid), NoSetGroups: true},
		}
		out, err := cmd.CombinedOutput()
		if _, ran := err.(*exec.ExitError); err != nil && !ran {
			t.Skip("may not make a user namespace:", err)
		}
		require.NoError(t, err, "%s", out)
		return
	}
	require.NotZero(t, must.Get(os.Lstat("/"))(t).Sys().(*syscall.Stat_t).Uid, "root is not mapped")
	require.NoError(t, must.Get(private.MakeDir(filepath.Join(dir, "a", "b"), private.Options{Keys: true}))(t).Close())
	if info, err := os.Lstat(filepath.Join(dir, "of-another")); err == nil && info.Sys().(*syscall.Stat_t).Uid != uint32(os.Geteuid()) {
		require.ErrorIs(t, openFile(filepath.Join(dir, "of-another"), private.Options{}), private.ErrUnsafe)
	}
	require.ErrorIs(t, openFile("/etc/passwd", private.Options{}), private.ErrUnsafe, "a file of root is not known as one")
}
