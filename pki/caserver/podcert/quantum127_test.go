//go:build go1.27

package podcert_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/quantum"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
)

// TestQuantum: a ClusterTrustBundle has the roots of both kinds, and a request with a key of ML-DSA is answered by what the
// CA allows.
func TestQuantum(t *testing.T) {
	t.Parallel()
	quantum.Need(t)
	stub := must.Get(pki.NewCSR(must.Get(pki.NewKey("ml-dsa-65"))(t), pki.CSROptions{}))(t).DER()
	for _, allowed := range []spiffe.Algorithms{{}, spiffe.AnyAlgorithm()} {
		c := start(t)
		a := must.Get(ca.New(ca.Config{TrustDomain: td, Algorithms: allowed, Rotation: ca.Rotation{KeyAlgorithm: "ecdsa-p256,ml-dsa-65"}}))(t)
		c.run(c.options(a), quick)
		o := c.has("example.org:spiffe:example.org", string(a.Bundle().MarshalPEM()))
		require.Len(t, must.Get(pki.ParseCertificatesPEM([]byte(o.Spec.TrustBundle)))(t), 2)
		asked := c.ask(func(s *spec) { s.StubPKCS10Request = stub })
		if allowed == spiffe.AnyAlgorithm() {
			_, leaf := c.issued(asked)
			require.Equal(t, "ML-DSA-65", leaf.SignatureAlgorithm.String())
			continue
		}
		got := c.answer(asked)
		require.Equal(t, "Failed", got.Conditions[0].Type)
		require.Equal(t, "NotCertified", got.Conditions[0].Reason)
		require.Contains(t, got.Conditions[0].Message, "ml-dsa-65 is none of ecdsa,rsa,ed25519")
	}
}
