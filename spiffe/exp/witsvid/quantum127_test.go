//go:build go1.27

package witsvid_test

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/quantum"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/exp/witsvid"
)

// TestQuantum: neither a WIT-SVID that a key of ML-DSA signs nor a proof of a holder with one is accepted.
func TestQuantum(t *testing.T) {
	t.Parallel()
	quantum.Need(t)
	id := spiffe.MustParseID("spiffe://example.org/web")
	for name, c := range map[string]struct{ issuer, holder string }{
		"neither":    {"ecdsa-p256", "ecdsa-p256"},
		"the issuer": {"ml-dsa-65", "ecdsa-p256"},
		"the holder": {"ecdsa-p256", "ml-dsa-44"},
	} {
		signer, holder := must.Get(pki.NewKey(c.issuer))(t), must.Get(pki.NewKey(c.holder))(t)
		i := must.Get(witsvid.NewIssuer(exampleOrg, "wit-1", signer, nil))(t)
		svid := must.Get(witsvid.NewSVID(must.Get(i.Issue(id, holder.Public()))(t), holder))(t)
		token, proof := prove(t, svid, nil, witsvid.Call{Target: vectorTarget})
		v := must.Get(witsvid.NewValidator(bundleOf(t, signer), spiffe.AllowAnyPeer(), nil))(t)
		_, err := v.Validate(token, proof, witsvid.Call{Target: vectorTarget})
		if name == "neither" {
			assert.NoError(t, err)
		} else {
			assert.ErrorIs(t, err, spiffe.ErrAlgorithm, name)
		}
	}
}
