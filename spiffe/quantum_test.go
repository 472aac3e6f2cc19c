package spiffe_test

import (
	"maps"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/mldsa"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
)

// TestQuantumElsewhere: a program without ML-DSA passes roots of ML-DSA on, and verifies with the others. It skips keys of
// ML-DSA for tokens, and refuses leaves.
func TestQuantumElsewhere(t *testing.T) {
	t.Parallel()
	doc := must.Get(os.ReadFile("testdata/quantum/bundle.json"))(t)
	b := must.Get(spiffe.ParseBundle(bundleTD, doc))(t)
	require.Len(t, slices.Collect(b.X509Authorities()), 3)
	passed := must.Get(b.Marshal())(t)
	if mldsa.Available() {
		assert.Empty(t, b.Skipped())
		assert.Equal(t, string(doc), string(passed))
	} else {
		require.Len(t, b.Skipped(), 2)
		for _, err := range b.Skipped() {
			assert.Equal(t, "BND-14", must.As[*spiffe.ParseError](err)(t).Rule)
			assert.ErrorContains(t, err, "Go 1.27")
		}
		assert.Equal(t, []string{"ecdsa-p256"}, slices.Collect(maps.Keys(maps.Collect(b.JWTAuthorities()))))
	}
	again := must.Get(spiffe.ParseBundle(bundleTD, passed))(t)
	assert.True(t, again.Equal(b))
	assert.True(t, must.Get(spiffe.ParseBundlePEM(bundleTD, b.MarshalPEM()))(t).CertPool().Equal(b.CertPool()))

	at := func() time.Time { return time.Date(2027, 1, 1, 0, 0, 0, 0, time.UTC) }
	v := must.Get(spiffe.NewVerifier(b, spiffe.AllowAnyPeer(), at))(t)
	for kind, good := range map[string]bool{"ecdsa-p256": true, "ml-dsa-44": mldsa.Available(), "ml-dsa-65": mldsa.Available()} {
		leaf := must.Get(parseBlocks(string(must.Get(os.ReadFile("testdata/quantum/" + kind + ".pem"))(t))))(t)[:1]
		peer, err := v.WithAlgorithms(spiffe.AnyAlgorithm()).VerifyChain(leaf, spiffe.BothRoles)
		if good {
			require.NoError(t, err, kind)
			assert.Equal(t, webID, peer.ID())
		} else {
			require.Error(t, err, kind)
			t.Log(err)
		}
		_, err = v.VerifyChain(leaf, spiffe.BothRoles)
		assert.Equal(t, kind == "ecdsa-p256", err == nil, "by default, %s: %v", kind, err)
	}
}
