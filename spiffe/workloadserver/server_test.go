package workloadserver_test

import (
	"context"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	wire "github.com/svidkit/svidkit/internal/test/wire/workloadapi"
	"github.com/svidkit/svidkit/internal/test/workloadtest"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

// A workload takes its identity from a handler on a Unix socket, keeps it while the server is away, and
// finds the server again.
func TestServer(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WEP-2", "WEP-3", "WAPI-6", "WAPI-17")
	home := workloadtest.NewDomain(t, "example.org")
	h := handler(t, fixed(snapshot(t, home.SVID("/web"), home)), nil)
	path := filepath.Join(workloadtest.SocketDir(t), "new", "s")
	stop := start(t, &unixsocket.Server{Path: path, Handler: h})
	assert.Equal(t, fs.ModeSocket|0o600, must.Get(os.Lstat(path))(t).Mode())

	s := source(t, workloadapi.Config{Address: "unix://" + path})
	ctx, cancel := context.WithTimeout(t.Context(), patient)
	defer cancel()
	require.NoError(t, s.Ready(ctx))

	// The server goes: the identity stays. It comes back: the stream is there again, soon.
	require.NoError(t, stop())
	require.ErrorIs(t, must.Err(os.Lstat(path)), fs.ErrNotExist)
	require.Eventually(t, func() bool { return !isOpen(s) }, patient, 20*time.Millisecond)
	must.Get(s.SVID())(t)
	start(t, &unixsocket.Server{Path: path, Handler: h})
	require.Eventually(t, func() bool { return updatesOf(s, "x509") == 2 }, patient, 20*time.Millisecond)
}

// Over TCP only callers with a loopback or link-local address are served, unless AnyNetwork is set.
func TestNetwork(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WEP-4")
	home := workloadtest.NewDomain(t, "example.org")
	src := fixed(snapshot(t, home.SVID("/web"), home))
	for _, anyNetwork := range []bool{false, true} {
		h := handler(t, src, &workloadserver.Options{AnyNetwork: anyNetwork})
		for from, local := range map[string]bool{
			"":                        true, // a Unix socket
			"@":                       true,
			"127.0.0.1:1234":          true,
			"[::1]:1234":              true,
			"[::ffff:127.0.0.1]:1234": true,
			"169.254.1.2:1234":        true,
			"[fe80::1%eth0]:1234":     true,
			"192.0.2.1:1234":          false,
			"10.0.0.1:1234":           false,
			"[2001:db8::1]:1234":      false,
			"[::ffff:192.0.2.1]:1234": false,
			"0.0.0.0:1234":            false,
			"[fd00::1]:1234":          false,
		} {
			c := http2(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				r.RemoteAddr = from
				h.ServeHTTP(w, r)
			}))
			ctx, cancel := context.WithCancel(t.Context())
			r := postContext(ctx, t, c, service+"FetchX509SVID", frame(&wire.X509SVIDRequest{}), header, "true")
			if local || anyNetwork {
				assert.NotEmpty(t, r.Receive(), from)
			} else {
				code, _ := r.Status()
				assert.Equal(t, workloadtest.PermissionDenied, code, from)
			}
			cancel()
		}
	}
}
