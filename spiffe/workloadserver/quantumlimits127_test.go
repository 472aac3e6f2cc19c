//go:build go1.27

package workloadserver_test

import (
	"context"
	"crypto"
	"crypto/x509"
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/quantum"
	wire "github.com/svidkit/svidkit/internal/test/wire/workloadapi"
	"github.com/svidkit/svidkit/internal/test/workloadtest"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

// TestQuantumLimits: a caller may have 256 identities, each with an alternative whose chain has three certificates of
// ML-DSA-65, while the bundle has two roots of each kind. A client refuses more.
func TestQuantumLimits(t *testing.T) {
	t.Parallel()
	quantum.Need(t)
	classical, ml := quantum.Root(t, "ecdsa-p256"), quantum.Root(t, "ml-dsa-65")
	bundle := quantum.Bundle(t, classical.Certificate(), ml.Certificate(),
		quantum.Root(t, "ecdsa-p256").Certificate(), quantum.Root(t, "ml-dsa-65").Certificate())
	below := quantum.Below(t, quantum.Below(t, ml, "ml-dsa-65"), "ml-dsa-65")
	var ids []workloadserver.Identity
	for i := range 257 {
		path := fmt.Sprint("web-", i)
		other := quantum.SVID(t, below, "ml-dsa-65", path)
		require.Len(t, other.Chain(), 3)
		both := must.Get(quantum.SVID(t, classical, "ecdsa-p256", path).WithAlternative(other))(t)
		ids = append(ids, workloadserver.Identity{SVID: both})
	}
	p := new(provider)
	p.set(spiffe.NewSnapshot(ids[0].SVID, must.Get(spiffe.NewBundleSet(bundle))(t)), nil)
	serve := func(n int) *workloadserver.Handler {
		return handler(t, p, &workloadserver.Options{Identities: func(context.Context) ([]workloadserver.Identity, error) {
			return slices.Clone(ids[:n]), nil
		}})
	}
	first := func(n int) (u *workloadapi.Update, err error) {
		for u, err = range inMemory(t, serve(n)).WatchX509SVIDs(t.Context()) {
			break
		}
		return u, err
	}
	u := must.Get(first(256))(t)
	require.Len(t, u.Identities, 256)
	for i, id := range u.Identities {
		require.NotNil(t, id.SVID.Alternative(), i)
		assert.Len(t, id.SVID.Alternative().Chain(), 3)
	}

	r := post(t, http2(t, serve(256)), workloadtest.Service+"FetchX509SVID", frame(new(wire.X509SVIDRequest)),
		header, "true", "Svidkit-Ml-Dsa", "true")
	m := new(wire.X509SVIDResponse)
	raw := r.Receive()
	require.NoError(t, proto.Unmarshal(raw, m))
	assert.Len(t, m.Svids, 512)
	t.Log(len(raw), "bytes")
	assert.Less(t, len(raw), 64<<20)

	_, err := first(257)
	assert.ErrorIs(t, err, spiffe.ErrTooLarge)
}

// TestQuantumTokens: a caller with 256 identities gets a token of ML-DSA-65 for each in one answer.
func TestQuantumTokens(t *testing.T) {
	quantum.Need(t)
	t.Parallel()
	key := must.Get(pki.NewKey("ml-dsa-65"))(t)
	issuer := must.Get(jwtsvid.NewIssuer(quantum.TrustDomain, "key", key, nil))(t)
	root := quantum.Root(t, "ecdsa-p256")
	bundle := must.Get(spiffe.NewBundle(quantum.TrustDomain, spiffe.BundleContents{
		X509Authorities: []*x509.Certificate{root.Certificate()}, JWTAuthorities: map[string]crypto.PublicKey{"key": key.Public()}}))(t)
	var ids []workloadserver.Identity
	for i := range 256 {
		ids = append(ids, workloadserver.Identity{SVID: quantum.SVID(t, root, "ecdsa-p256", fmt.Sprint("web-", i))})
	}
	p := new(provider)
	p.set(spiffe.NewSnapshot(ids[0].SVID, must.Get(spiffe.NewBundleSet(bundle))(t)), nil)
	c := inMemory(t, handler(t, p, &workloadserver.Options{IssueJWTSVID: issuer.IssueJWTSVID,
		Identities: func(context.Context) ([]workloadserver.Identity, error) { return ids, nil }}))
	tokens := must.Get(c.FetchJWTSVIDs(t.Context(), spiffe.ID{}, "db"))(t)
	require.Len(t, tokens, 256)
	v := must.Get(jwtsvid.NewValidator(bundle, []string{"db"}, &jwtsvid.ValidatorOptions{Algorithms: spiffe.AnyAlgorithm()}))(t)
	size := 0
	for _, token := range tokens {
		size += len(token.Token())
		must.Get(v.Validate(token.Token()))(t)
	}
	t.Log(size, "bytes")
	assert.Greater(t, size, 1<<20, "more than the limit was")
}
