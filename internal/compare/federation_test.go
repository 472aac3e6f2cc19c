package compare

import (
	"crypto/tls"
	"net/http"
	"testing"

	peerfederation "github.com/spiffe/go-spiffe/v2/federation"
	"github.com/spiffe/go-spiffe/v2/spiffetls/tlsconfig"
	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe/federation"
)

// Each fetches a bundle from an endpoint of the other, with the profile https_spiffe.
func TestFederation(t *testing.T) {
	t.Parallel()
	ctx := timeout(t)
	a := newAuthority(t, "example.org")
	b, self := a.bundle(t), a.ca.SVID("/endpoint")
	start := func(h http.Handler, config *tls.Config) string {
		l := must.Get(tls.Listen("tcp", "127.0.0.1:0", config))(t)
		s := &http.Server{Handler: h}
		done := make(chan error, 1)
		go func() { done <- s.Serve(l) }()
		t.Cleanup(func() {
			assert.NoError(t, s.Close())
			assert.ErrorIs(t, <-done, http.ErrServerClosed)
		})
		return "https://" + l.Addr().String()
	}

	ours := must.Get(federation.NewHandler(b, b.TrustDomain()))(t)
	config := must.Get(federation.ServerConfig(self))(t)
	got := must.Get(peerfederation.FetchBundle(ctx, peerDomain(b.TrustDomain()), start(ours, config),
		peerfederation.WithSPIFFEAuth(peerBundle(t, b).X509Bundle(), peerID(self.ID()))))(t)
	assert.True(t, got.Equal(peerBundle(t, b)))

	peer := must.Get(peerfederation.NewHandler(peerDomain(b.TrustDomain()), peerBundle(t, b)))(t)
	back := must.Get(federation.Fetch(ctx, federation.Relationship{
		TrustDomain: b.TrustDomain(),
		URL:         start(peer, tlsconfig.TLSServerConfig(peerSVID(t, self))),
		Profile:     federation.SPIFFE{EndpointID: self.ID(), Initial: b},
	}, nil))(t)
	assert.True(t, back.Equal(b))
}
