package spiffetls_test

import (
	"crypto/x509"
	"io"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// RequirePeer judges the age of a proof by the clock of the server's Options, to the last second and on an open connection, and
// goes on when a proof is good again.
func TestRequirePeerByItsClock(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	handler := must.Get(spiffetls.RequirePeer(spiffe.AllowAnyPeer(), who))(t)
	for _, protocol := range []*spiffetls.Config{nil, http1} {
		for name, ahead := range map[string]time.Duration{"ahead": 24 * time.Hour, "behind": -24 * time.Hour} {
			var now atomic.Int64
			start := time.Now().Add(ahead)
			clock := func() time.Time { return time.Unix(0, now.Load()) }
			now.Store(start.UnixNano())
			ends := start.Add(time.Hour).Truncate(time.Second)
			valid := func(c *x509.Certificate) { c.NotBefore, c.NotAfter = start.Add(-time.Hour), ends }
			wide := func(c *x509.Certificate) { c.NotBefore, c.NotAfter = start.Add(-48*time.Hour), start.Add(96*time.Hour) }
			roots := ca.Intermediate(wide)
			chain, _ := roots.Certificate("/web")
			bundle := must.Get(spiffe.NewBundle(ca.TrustDomain(), spiffe.BundleContents{X509Authorities: chain[1:]}))(t)

			var failures spiffetls.Metrics
			s := &http.Server{Handler: handler}
			require.NoError(t, configureServer(s, spiffetls.Config{Self: roots.SVID("/db", wide), Peers: bundle, Allow: spiffe.AllowAnyPeer(), Now: clock, Metrics: &failures}))
			url := serve(t, s, nil)
			opts := &spiffetls.Config{Now: func() time.Time { return start }}
			if protocol != nil {
				opts.NextProtos = protocol.NextProtos
			}
			transport := must.Get(newTransport(with(opts, roots.SVID("/web", valid), bundle, spiffe.AllowAnyPeer())))(t)
			t.Cleanup(transport.CloseIdleConnections)
			client := &http.Client{Transport: transport}
			ask := func() (code int, closes bool) {
				resp := must.Get(client.Get(url))(t, name)
				must.Get(io.Copy(io.Discard, resp.Body))(t)
				require.NoError(t, resp.Body.Close())
				return resp.StatusCode, resp.Close
			}
			for _, at := range []time.Time{start, ends} {
				now.Store(at.UnixNano())
				code, _ := ask()
				require.Equal(t, http.StatusOK, code, "%s, %v before its end", name, ends.Sub(at))
			}
			now.Store(ends.Add(time.Second).UnixNano())
			code, closes := ask()
			require.Equal(t, http.StatusForbidden, code, "%s, after its end", name)
			assert.Equal(t, tally{"request proof_expired": 1}, failuresOf(t, &failures))
			assert.Equal(t, protocol != nil, closes, "by HTTP/2 the connection ends, and no header says so")
			now.Store(start.UnixNano())
			code, _ = ask()
			require.Equal(t, http.StatusOK, code, "%s: on a new connection, when it is good again", name)
		}
	}
}
