package compare

import (
	"crypto/tls"
	"net/http"
	"testing"

	peerfederation "github.com/spiffe/go-spiffe/v2/federation"
	"github.com/spiffe/go-spiffe/v2/spiffetls/tlsconfig"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/spiffe/federation"
)

// Each fetches a bundle from an endpoint of the other, with the profile https_spiffe.
func TestFederation(t *testing.T) {
	t.Parallel()
	ctx := timeout(t)
	a := newAuthority(t, "example.org")
	b, self := a.bundle(t), a.ca.SVID("/endpoint")
	start := func(h http.Handler, config *tls.Config) string {
		l, err := tls.Listen("tcp", "127.0.0.1:0", config)
		require.NoError(t, err)
		s := &http.Server{Handler: h}
		done := make(chan error, 1)
		go func() { done <- s.Serve(l) }()
		t.Cleanup(func() {
			assert.NoError(t, s.Close())
			assert.ErrorIs(t, <-done, http.ErrServerClosed)
		})
		return "https://" + l.Addr().String()
	}

	ours, err := federation.NewHandler(b, b.TrustDomain())
	require.NoError(t, err)
	config, err := federation.ServerConfig(self)
	require.NoError(t, err)
	got, err := peerfederation.FetchBundle(ctx, peerDomain(b.TrustDomain()), start(ours, config),
		peerfederation.WithSPIFFEAuth(peerBundle(t, b).X509Bundle(), peerID(self.ID())))
	require.NoError(t, err)
	assert.True(t, got.Equal(peerBundle(t, b)))

	peer, err := peerfederation.NewHandler(peerDomain(b.TrustDomain()), peerBundle(t, b))
	require.NoError(t, err)
	back, err := federation.Fetch(ctx, federation.Relationship{
		TrustDomain: b.TrustDomain(),
		URL:         start(peer, tlsconfig.TLSServerConfig(peerSVID(t, self))),
		Profile:     federation.SPIFFE{EndpointID: self.ID(), Initial: b},
	}, nil)
	require.NoError(t, err)
	assert.True(t, back.Equal(b))
}
