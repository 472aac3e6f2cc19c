//go:build unix

package caprogram

import (
	"context"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
)

// TestRotateAuditLog does to the audit log what logrotate does: it moves the file and sends SIGHUP. No record is lost, and
// both files are one chain.
func TestRotateAuditLog(t *testing.T) {
	hups := make(chan os.Signal, 10)
	signal.Notify(hups, syscall.SIGHUP) // so that one that comes too early does not end the test
	defer signal.Stop(hups)
	dir := t.TempDir()
	path := filepath.Join(dir, "audit.jsonl")
	var out, log lockedBuffer
	ended := make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		ended <- alone.run(ctx, arguments(dir, "-istio-addr", "127.0.0.1:0"), env{}.get, nil, &out, &log)
	}()
	require.Eventually(t, func() bool { return strings.Contains(out.String(), "audit log:") }, time.Minute, 5*time.Millisecond)
	before := must.Get(os.ReadFile(path))(t)
	require.NotEmpty(t, before)

	require.NoError(t, os.Rename(path, path+".1"))
	require.NoError(t, syscall.Kill(os.Getpid(), syscall.SIGHUP))
	require.Eventually(t, func() bool { return strings.Contains(log.String(), "the audit log was reopened") }, time.Minute, 5*time.Millisecond)
	require.FileExists(t, path)
	_, err := shell(t, "", arguments(dir, "-rotate")...) // by a command, which follows the last line of the server
	require.NoError(t, err)
	require.Contains(t, string(must.Get(os.ReadFile(path))(t)), `"event":"prepared"`)
	require.Equal(t, string(before), string(must.Get(os.ReadFile(path+".1"))(t)))
	cancel()
	require.NoError(t, <-ended)

	said, err := shell(t, "", arguments(dir, "-verify-audit", path)...)
	require.NoError(t, err, said)
	require.Contains(t, said, "begins with the first line of all")
	require.NoError(t, os.Remove(path+".1"))
	require.ErrorContains(t, must.Err(shell(t, "", arguments(dir, "-verify-audit", path)...)), "places: 1")
	must.Get(shell(t, "", arguments(dir, "-verify-audit", path, "-audit-after", "any")...))(t)
}
