//go:build go1.27

package workloadserver_test

import (
	"context"
	"crypto"
	"crypto/x509"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/quantum"
	wire "github.com/svidkit/svidkit/internal/test/wire/workloadapi"
	"github.com/svidkit/svidkit/internal/test/workloadtest"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

// twoRoots is a trust domain with a classical root and one of ML-DSA.
type twoRoots struct {
	td               spiffe.TrustDomain
	bundles          *spiffe.BundleSet
	classical, mldsa *pki.Issuer
}

func newQuantum(t *testing.T) *twoRoots {
	q := &twoRoots{td: quantum.TrustDomain, classical: quantum.Root(t, "ecdsa-p256"), mldsa: quantum.Root(t, "ml-dsa-65")}
	q.bundles = must.Get(spiffe.NewBundleSet(quantum.Bundle(t, q.classical.Certificate(), q.mldsa.Certificate())))(t)
	return q
}

// TestQuantumAlternative: clients that say they can read it get the alternative, and the others what they always got.
func TestQuantumAlternative(t *testing.T) {
	quantum.Need(t)
	t.Parallel()
	q := newQuantum(t)
	first, other := quantum.SVID(t, q.classical, "ecdsa-p256", "web"), quantum.SVID(t, q.mldsa, "ml-dsa-65", "web")
	both := must.Get(first.WithAlternative(other))(t)
	p := new(provider)
	p.set(spiffe.NewSnapshot(both, q.bundles), nil)
	h := handler(t, p, nil)

	old := func(headers ...string) *wire.X509SVIDResponse {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		r := postContext(ctx, t, http2(t, h), workloadtest.Service+"FetchX509SVID", frame(new(wire.X509SVIDRequest)),
			append([]string{header, "true"}, headers...)...)
		m := new(wire.X509SVIDResponse)
		require.NoError(t, proto.Unmarshal(r.Receive(), m))
		return m
	}
	for _, headers := range [][]string{nil, {"Svidkit-Ml-Dsa", "false"}, {"Svidkit-Alternatives", ""}} {
		require.Len(t, old(headers...).Svids, 1, "%q", headers)
		assert.Equal(t, first.Leaf().Raw, old(headers...).Svids[0].X509Svid)
	}
	told := old("Svidkit-Ml-Dsa", "true")
	require.Len(t, told.Svids, 2)
	assert.Equal(t, other.Leaf().Raw, told.Svids[1].X509Svid)
	assert.Equal(t, told.Svids[0].SpiffeId, told.Svids[1].SpiffeId)

	s := source(t, workloadapi.Config{Client: inMemory(t, h)})
	require.NoError(t, s.Ready(t.Context()))
	got := must.Get(s.SVID())(t)
	require.Len(t, s.SVIDs(), 1, "it is one identity")
	require.NotNil(t, got.Alternative())
	assert.Equal(t, other.Leaf().Raw, got.Alternative().Leaf().Raw)
	assert.Equal(t, first.Leaf().Raw, got.Leaf().Raw)

	next := func(svid *spiffe.SVID, bundles *spiffe.BundleSet) *spiffe.SVID {
		n := updatesOf(s, "x509")
		p.set(spiffe.NewSnapshot(svid, bundles), nil)
		require.Eventually(t, func() bool { return updatesOf(s, "x509") > n }, patient, time.Millisecond)
		return must.Get(s.SVID())(t)
	}
	// Only what has changed is another value.
	classical := quantum.Bundle(t, q.classical.Certificate())
	assert.Same(t, got, next(both, must.Get(spiffe.NewBundleSet(classical))(t)))
	renewed := quantum.SVID(t, q.mldsa, "ml-dsa-44", "web")
	second := next(must.Get(first.WithAlternative(renewed))(t), q.bundles)
	require.NotNil(t, second.Alternative())
	assert.Equal(t, renewed.Leaf().Raw, second.Alternative().Leaf().Raw)
	assert.Nil(t, next(first, q.bundles).Alternative())
	assert.Nil(t, next(other, q.bundles).Alternative(), "ML-DSA alone")
}

// TestQuantumIdentities: an alternative belongs to the identity before it, if it has no hint of its own.
func TestQuantumIdentities(t *testing.T) {
	quantum.Need(t)
	t.Parallel()
	q := newQuantum(t)
	web, webQ := quantum.SVID(t, q.classical, "ecdsa-p256", "web"), quantum.SVID(t, q.mldsa, "ml-dsa-65", "web")
	db, dbQ := quantum.SVID(t, q.classical, "ecdsa-p256", "db"), quantum.SVID(t, q.mldsa, "ml-dsa-65", "db")
	with := func(a, b *spiffe.SVID) *spiffe.SVID { return must.Get(a.WithAlternative(b))(t) }
	for name, c := range map[string]struct {
		served []workloadserver.Identity
		want   []bool // per identity that the client has, whether it has an alternative
	}{
		"both of two":             {[]workloadserver.Identity{{SVID: with(web, webQ), Hint: "a"}, {SVID: with(db, dbQ), Hint: "b"}}, []bool{true, true}},
		"one of two":              {[]workloadserver.Identity{{SVID: web}, {SVID: with(db, dbQ), Hint: "b"}}, []bool{false, true}},
		"another has a hint":      {[]workloadserver.Identity{{SVID: web, Hint: "a"}, {SVID: webQ, Hint: "q"}}, []bool{false, false}},
		"another ID":              {[]workloadserver.Identity{{SVID: web, Hint: "a"}, {SVID: dbQ}}, []bool{false, false}},
		"ML-DSA comes first":      {[]workloadserver.Identity{{SVID: webQ}, {SVID: web, Hint: "a"}}, []bool{false, false}},
		"two of ML-DSA":           {[]workloadserver.Identity{{SVID: with(web, webQ)}, {SVID: dbQ, Hint: "b"}}, []bool{true, false}},
		"from a server of others": {[]workloadserver.Identity{{SVID: web, Hint: "a"}, {SVID: webQ}}, []bool{true}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := handler(t, fixed(spiffe.NewSnapshot(web, q.bundles)), &workloadserver.Options{
				Identities: func(context.Context) ([]workloadserver.Identity, error) { return c.served, nil }})
			var got []bool
			for u, err := range inMemory(t, h).WatchX509SVIDs(t.Context()) {
				require.NoError(t, err)
				for _, id := range u.Identities {
					got = append(got, id.SVID.Alternative() != nil)
				}
				break
			}
			assert.Equal(t, c.want, got)
		})
	}
}

// TestQuantumJWTBundles: clients that do not say that they read keys of ML-DSA get the others.
func TestQuantumJWTBundles(t *testing.T) {
	t.Parallel()
	quantum.Need(t)
	q := newQuantum(t)
	key := func(alg string) crypto.PublicKey { return must.Get(pki.NewKey(alg))(t).Public() }
	b := must.Get(spiffe.NewBundle(q.td, spiffe.BundleContents{X509Authorities: []*x509.Certificate{q.classical.Certificate()},
		JWTAuthorities: map[string]crypto.PublicKey{"a": key("ecdsa-p256"), "b": key("ml-dsa-65")}}))(t)
	snap := spiffe.NewSnapshot(quantum.SVID(t, q.classical, "ecdsa-p256", "web"), must.Get(spiffe.NewBundleSet(b))(t))
	h := handler(t, fixed(snap), nil)
	for _, c := range []struct {
		headers []string
		keys    int
	}{{nil, 1}, {[]string{"Svidkit-Ml-Dsa", "true"}, 2}, {[]string{"Svidkit-Ml-Dsa", "no"}, 1}} {
		r := post(t, http2(t, h), workloadtest.Service+"FetchJWTBundles", frame(new(wire.JWTBundlesRequest)), append([]string{header, "true"}, c.headers...)...)
		m := new(wire.JWTBundlesResponse)
		require.NoError(t, proto.Unmarshal(r.Receive(), m))
		got := must.Get(spiffe.ParseJWKS(q.td, m.Bundles[q.td.ID().String()]))(t)
		assert.Len(t, got.Contents().JWTAuthorities, c.keys, "%q", c.headers)
	}
	s := readySource(t, workloadapi.Config{Client: inMemory(t, h), JWTBundles: true})
	assert.Len(t, must.Get(s.Bundle(q.td))(t).Contents().JWTAuthorities, 2)
}
