//go:build go1.27

package istioca_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/quantum"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver/istioca"
	"github.com/svidkit/svidkit/spiffe"
)

// TestQuantum: a CA that has both kinds of roots certifies a key of ML-DSA if it allows them. Others say why they do not.
func TestQuantum(t *testing.T) {
	quantum.Need(t)
	t.Parallel()
	open := func(allowed spiffe.Algorithms) *server {
		return serve(t, istioca.Options{Signer: must.Get(ca.New(ca.Config{TrustDomain: spiffe.MustParseTrustDomain("example.org"),
			Algorithms: allowed, Rotation: ca.Rotation{KeyAlgorithm: "ecdsa-p256,ml-dsa-65"}}))(t)})
	}
	for _, kind := range []string{"ml-dsa-44", "ml-dsa-65"} {
		key := must.Get(pki.NewKey(kind))(t)
		chain := open(spiffe.AnyAlgorithm()).issue(t, "web", requestFor(t, key))
		leaf := chain[0][0]
		assert.True(t, pki.PublicKeysEqual(key.Public(), leaf.PublicKey))
		assert.Equal(t, "ML-DSA-65", leaf.SignatureAlgorithm.String())

		s := open(spiffe.Algorithms{})
		_, err := s.call(t, "web", requestFor(t, key))
		e := must.As[*grpchttp.Error](err)(t)
		require.Equal(t, grpchttp.InvalidArgument, e.Code, "%v", err)
		assert.Contains(t, e.Message, "the key of the request must not be certified")
		assert.Contains(t, s.logs.String(), kind+" is none of ecdsa,rsa,ed25519")
	}
	classical := open(spiffe.AnyAlgorithm()).issue(t, "web", goodRequest(t))
	assert.Equal(t, "ECDSA-SHA256", classical[0][0].SignatureAlgorithm.String())
}
