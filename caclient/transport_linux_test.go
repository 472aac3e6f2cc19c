package caclient_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/programtest"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// Without RootsFile and Roots the roots of the host vouch for the server, and no others.
func TestHTTPClientSystemRoots(t *testing.T) {
	rounds.Slow(t)
	t.Parallel()
	conformance.Covers(t, "IST-6.2-3", "IST-6.3-1")
	if !programtest.Sealed(t) { // Go reads the roots of the host once
		return
	}
	host, other := spiffetest.NewCA(t, "server.test"), spiffetest.NewCA(t, "other.test")
	file := filepath.Join(t.TempDir(), "roots.pem")
	writeFile(t, file, pki.MarshalCertificatesPEM(host.Root()))
	require.NoError(t, os.Setenv("SSL_CERT_FILE", file))
	require.NoError(t, os.Setenv("SSL_CERT_DIR", t.TempDir()))
	c := newHTTPClient(t, caclient.TLSOptions{ServerName: "ca.test"})
	requirePage(t, "HTTP/2.0 none", c, startTLS(t, host, nil).url)
	require.ErrorContains(t, must.Err(page(t, c, startTLS(t, other, nil).url)), "certificate signed by unknown authority")
}
