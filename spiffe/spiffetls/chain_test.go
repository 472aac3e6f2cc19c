package spiffetls_test

import (
	"crypto/tls"
	"crypto/x509"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// TestChainEnds: an SVID whose intermediate has expired is not presented, and the own side says why. A certificate that no path
// needs may expire, and without a bundle of the own trust domain the peer decides.
func TestChainEnds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		root := spiffetest.NewCA(t, "example.org")
		good, short := root.Intermediate(), root.Intermediate(func(c *x509.Certificate) { c.NotAfter = time.Now().Add(20 * time.Minute) })
		needed := must.Get(spiffe.NewSVID(short.Certificate("/web")))(t)
		chain, key := good.Certificate("/web")
		extra, _ := short.Certificate("/web")
		more := must.Get(spiffe.NewSVID(append(chain, extra[1:]...), key))(t)
		present := func(svid *spiffe.SVID, peers spiffe.BundleSource) error {
			config := must.Get(clientConfig(spiffetls.Config{Self: svid, Peers: peers, Allow: spiffe.AllowAnyPeer()}))(t)
			_, err := config.GetClientCertificate(new(tls.CertificateRequestInfo))
			return err
		}
		time.Sleep(20 * time.Minute)
		require.NoError(t, present(needed, root.Bundle()))
		time.Sleep(time.Second)
		require.True(t, time.Now().Before(needed.NotAfter()))
		require.ErrorContains(t, present(needed, root.Bundle()), `a certificate in the chain of the SVID of "spiffe://example.org/web" has expired and was not renewed`)
		require.NoError(t, present(more, root.Bundle()))
		require.NoError(t, present(needed, spiffetest.NewCA(t, "other.test").Bundle()))
	})
}
