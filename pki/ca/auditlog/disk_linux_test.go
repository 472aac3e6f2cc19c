package auditlog_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki/ca/auditlog"
)

const smallDisk = "SVIDKIT_AUDITLOG_DISK" // a directory in the process that TestSmallDisk starts

// A disk of the kernel that another program fills: records are refused, Err says so although nothing is recorded, and
// when there is room again both go on by themselves.
func TestSmallDisk(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	dir := os.Getenv(smallDisk)
	if dir == "" {
		if os.Geteuid() != 0 {
			t.Skip("mounts a disk, which takes root")
		}
		cmd := exec.Command(os.Args[0], "-test.run=^TestSmallDisk$", "-test.v")
		cmd.Env = append(os.Environ(), smallDisk+"="+t.TempDir())
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS, Unshareflags: syscall.CLONE_NEWNS}
		out, err := cmd.CombinedOutput()
		if _, ran := err.(*exec.ExitError); err != nil && !ran {
			t.Skip("may not make a namespace of mounts:", err)
		}
		require.NoError(t, err, "%s", out)
		return
	}
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=64k,mode=700"); err != nil {
		t.Skip("may not mount:", err)
	}
	path := filepath.Join(dir, "audit.jsonl")
	l := must.Get(auditlog.Open(path, nil))(t)
	require.NoError(t, l.Record(t.Context(), record("1")))
	require.NoError(t, l.Err())
	for round := range 2 {
		filler := filepath.Join(dir, "filler")
		require.ErrorIs(t, os.WriteFile(filler, make([]byte, 1<<20), 0o600), syscall.ENOSPC)
		require.Eventually(t, func() bool { return l.Err() != nil }, time.Minute, 50*time.Millisecond)
		require.ErrorIs(t, l.Err(), syscall.ENOSPC)
		if round == 1 { // what is left of the last page of the file is full, too
			require.Eventually(t, func() bool { return l.Record(t.Context(), record("no")) != nil }, time.Minute, time.Millisecond)
			require.ErrorIs(t, l.Err(), syscall.ENOSPC)
		}
		require.NoError(t, os.Remove(filler))
		require.Eventually(t, func() bool { return l.Err() == nil }, time.Minute, 50*time.Millisecond)
		require.NoError(t, l.Record(t.Context(), record("2")))
	}
	require.NoError(t, l.Close())
	require.NoFileExists(t, path+".probe")
}

// In a directory that others can write to, what they put there under the name of a file that was moved away is not taken
// for one.
func TestPlantedFiles(t *testing.T) {
	t.Parallel()
	path := logPath(t)
	require.NoError(t, os.Chmod(filepath.Dir(path), 0o777))
	require.NoError(t, syscall.Mkfifo(path+".1", 0o666))
	require.NoError(t, os.Symlink("/dev/zero", path+".2"))
	if os.Geteuid() == 0 {
		line := must.Get(auditlog.Line(record("x"), [32]byte{}))(t)
		require.NoError(t, os.WriteFile(path+".3", []byte(line), 0o666))
		require.NoError(t, os.Chown(path+".3", 54321, -1))
	}
	l := open(t, path, nil, nil)
	require.NoError(t, l.Record(t.Context(), record("1")))
	require.Equal(t, []string{"1"}, contents(t, path))
	all := must.Get(auditlog.Files(path))(t)
	require.Equal(t, []string{path}, all)
}

// The file stays open between writes; the one that was moved away is closed by Reopen, and all by Close.
func TestDescriptors(t *testing.T) {
	t.Parallel()
	path := logPath(t)
	dir := must.Get(filepath.EvalSymlinks(filepath.Dir(path)))(t)
	open := func() (files []string) {
		for _, e := range must.Get(os.ReadDir("/proc/self/fd"))(t) {
			if to, _ := os.Readlink("/proc/self/fd/" + e.Name()); filepath.Dir(to) == dir {
				files = append(files, filepath.Base(to))
			}
		}
		return files
	}
	l := must.Get(auditlog.Open(path, nil))(t)
	for range 3 {
		require.NoError(t, l.Record(t.Context(), record("1")))
		require.Equal(t, []string{"audit.jsonl"}, open())
	}
	require.NoError(t, os.Rename(path, path+".1"))
	require.NoError(t, l.Reopen())
	require.Equal(t, []string{"audit.jsonl"}, open())
	require.NoError(t, l.Record(t.Context(), record("2")))
	require.NoError(t, l.Close())
	require.NoError(t, l.Close())
	require.Empty(t, open())
}
