//go:build go1.27

package spiffetls_test

import (
	"crypto/tls"
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/quantum"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// TestQuantumTickets: the session of a client with at most four certificates of ML-DSA-65 is resumed. One with more has a
// full handshake each time.
func TestQuantumTickets(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1, 2, 3, 4, 5, 16} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			t.Parallel()
			svid, bundle := quantum.Chain(t, n)
			p := newParty(svid, must.Get(spiffe.NewBundleSet(bundle))(t))
			opts := &spiffetls.Config{Algorithms: must.Get(spiffe.ParseAlgorithms("ml-dsa-65"))(t), RequireMLKEM: true}
			server, client := p.server(t, spiffe.AllowAnyPeer(), opts), p.resuming(t, spiffe.AllowAnyPeer(), opts)
			for i := range 3 {
				s, c := good(t, server, client, i > 0 && n <= 4, fmt.Sprint(i))
				require.Len(t, s.state.PeerCertificates, n)
				require.Len(t, c.state.PeerCertificates, n)
				assert.Equal(t, tls.X25519MLKEM768, c.state.CurveID)
				assert.EqualValues(t, tls.VersionTLS13, c.state.Version)
			}
		})
	}
}
