package compare

import (
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestServiceExample runs examples/service beside our server, and beside one of the peer's generated
// code over grpc-go: it makes its requests and ends well.
func TestServiceExample(t *testing.T) {
	t.Parallel()
	bin := filepath.Join(t.TempDir(), "service")
	build := exec.Command("go", "build", "-o", bin, "./examples/service")
	build.Dir = filepath.Join("..", "..")
	out, err := build.CombinedOutput()
	require.NoError(t, err, "%s", out)

	a := newAuthority(t, "example.org")
	snap := a.snapshot(t, "/web")
	for name, address := range map[string]string{
		"ours": serveOurs(t, newLive(snap), nil),
		"peer": servePeer(t, &peerServer{t: t, src: newLive(snap), a: a}),
	} {
		t.Run(name, func(t *testing.T) {
			out, err := exec.CommandContext(timeout(t), bin, "-socket", address, "-requests", "3", "-interval", "10ms").CombinedOutput()
			require.NoError(t, err, "%s", out)
			assert.Contains(t, string(out), "hello spiffe://example.org/web")
			assert.Contains(t, string(out), "3 requests, 1 certificates, no failure")
		})
	}
}
