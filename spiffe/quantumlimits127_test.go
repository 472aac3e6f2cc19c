//go:build go1.27

package spiffe_test

import (
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/quantum"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// TestQuantumChainLimits: a chain has 16 certificates, and one from a CA 64 KiB, which is 11 of ML-DSA-65.
func TestQuantumChainLimits(t *testing.T) {
	t.Parallel()
	quantum.Need(t)
	svid, bundle := quantum.Chain(t, certchain.MaxChain)
	v := must.Get(spiffe.NewVerifier(bundle, spiffe.AllowAnyPeer(), nil))(t).WithAlgorithms(spiffe.AnyAlgorithm())
	must.Get(v.VerifyChain(svid.Chain(), spiffe.BothRoles))(t)
	longer := append(svid.Chain(), slices.Collect(bundle.X509Authorities())...)
	_, err := v.VerifyChain(longer, spiffe.BothRoles)
	require.ErrorIs(t, err, spiffe.ErrTooLarge)

	require.NoError(t, certchain.CheckSize(svid.Chain()[:11]))
	require.ErrorIs(t, certchain.CheckSize(svid.Chain()[:12]), spiffe.ErrTooLarge)
}

// presented returns the chain of a client as a server of crypto/tls has it: its certificates keep the message alive.
func presented(t *testing.T, svid *spiffe.SVID) []*x509.Certificate {
	a, b := memconn.Pipe()
	server := tls.Server(a, &tls.Config{Certificates: []tls.Certificate{*svid.TLSCertificate()}, ClientAuth: tls.RequireAnyClientCert})
	client := tls.Client(b, &tls.Config{Certificates: []tls.Certificate{*svid.TLSCertificate()}, InsecureSkipVerify: true})
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		_ = client.HandshakeContext(t.Context())
		_, _ = io.Copy(io.Discard, client)
		_ = client.Close()
	})
	defer server.Close()
	require.NoError(t, server.HandshakeContext(t.Context()))
	return server.ConnectionState().PeerCertificates
}

// TestQuantumMemory: a verifier remembers a chain of three certificates of ML-DSA-65, and no longer one.
func TestQuantumMemory(t *testing.T) {
	t.Parallel()
	quantum.Need(t)
	for n := 1; n <= 4; n++ {
		svid, bundle := quantum.Chain(t, n)
		v := must.Get(spiffe.NewVerifier(bundle, spiffe.AllowAnyPeer(), nil))(t).WithAlgorithms(spiffe.AnyAlgorithm())
		first := must.Get(v.VerifyChain(presented(t, svid), spiffe.ClientRole))(t)
		second := must.Get(v.VerifyChain(presented(t, svid), spiffe.ClientRole))(t)
		assert.Equal(t, n <= 3, first == second, n)
	}
}

// largestSet returns how many of n values make a document that fits: the most for which fits succeeds.
func largestSet(t *testing.T, n int, fits func(n int) error) int {
	most := 0
	for step := 1 << 9; step > 0; step /= 2 {
		if most+step > n {
			continue
		}
		if err := fits(most + step); err == nil {
			most += step
		} else {
			require.ErrorIs(t, err, spiffe.ErrTooLarge)
		}
	}
	return most
}

// TestQuantumBundleLimits: a bundle document of 1 MiB has about 103 roots of ML-DSA-65, or 391 keys for tokens.
func TestQuantumBundleLimits(t *testing.T) {
	t.Parallel()
	quantum.Need(t)
	issuer := quantum.Root(t, quantum.Algorithm)
	roots := []*x509.Certificate{issuer.Certificate()}
	for i := range 104 { // of one key, as only the size counts
		c := must.Get(issuer.Renew(time.Now().Add(-time.Hour), time.Now().Add(time.Duration(i+1)*time.Hour)))(t)
		roots = append(roots, c.Certificate())
	}
	bundle := func(n int) *spiffe.Bundle { return quantum.Bundle(t, roots[:n]...) }
	most := largestSet(t, len(roots), func(n int) error {
		_, err := bundle(n).Marshal()
		return err
	})
	assert.InDelta(t, 103, most, 1)
	full := must.Get(bundle(most).Marshal())(t)
	again := must.Get(spiffe.ParseBundle(quantum.TrustDomain, full))(t)
	assert.Empty(t, again.Skipped())
	assert.True(t, again.Equal(bundle(most)))

	key := must.Get(pki.NewKey(quantum.Algorithm))(t).Public()
	tokens := func(n int) *spiffe.Bundle {
		keys := make(map[string]crypto.PublicKey)
		for i := range n {
			keys[fmt.Sprintf("key-%04d", i)] = key
		}
		return must.Get(spiffe.NewBundle(quantum.TrustDomain, spiffe.BundleContents{JWTAuthorities: keys}))(t)
	}
	most = largestSet(t, 1000, func(n int) error {
		_, err := tokens(n).Marshal()
		return err
	})
	assert.InDelta(t, 391, most, 1)
	full = must.Get(tokens(most).Marshal())(t)
	assert.True(t, must.Get(spiffe.ParseBundle(quantum.TrustDomain, full))(t).Equal(tokens(most)))
	set := must.Get(tokens(most).MarshalJWKS())(t)
	assert.True(t, must.Get(spiffe.ParseJWKS(quantum.TrustDomain, set))(t).Equal(tokens(most)))

	pem := bundle(100).MarshalPEM()
	assert.Len(t, slices.Collect(must.Get(spiffe.ParseBundlePEM(quantum.TrustDomain, pem))(t).X509Authorities()), 100)
}

// TestQuantumBundleMap: a bundle map of 16 MiB has more than 500 trust domains, each with two roots of each kind and their
// keys for tokens.
func TestQuantumBundleMap(t *testing.T) {
	t.Parallel()
	quantum.Need(t)
	issuers := []*pki.Issuer{quantum.Root(t, quantum.Algorithm), quantum.Root(t, "ecdsa-p256")}
	contents := spiffe.BundleContents{JWTAuthorities: make(map[string]crypto.PublicKey)}
	for i, issuer := range issuers {
		next := must.Get(issuer.Renew(time.Now(), time.Now().Add(time.Hour)))(t)
		contents.X509Authorities = append(contents.X509Authorities, issuer.Certificate(), next.Certificate())
		contents.JWTAuthorities[fmt.Sprint(i)] = issuer.Certificate().PublicKey
	}
	var bundles []*spiffe.Bundle
	for i := range 800 {
		td := spiffe.MustParseTrustDomain(fmt.Sprintf("domain-%d.example.org", i))
		bundles = append(bundles, must.Get(spiffe.NewBundle(td, contents))(t))
	}
	set := func(n int) *spiffe.BundleSet { return must.Get(spiffe.NewBundleSet(bundles[:n]...))(t) }
	most := largestSet(t, len(bundles), func(n int) error {
		_, err := set(n).Marshal()
		return err
	})
	assert.Greater(t, most, 500)
	t.Log(most, "trust domains")
	doc := must.Get(set(most).Marshal())(t)
	assert.Equal(t, most, must.Get(spiffe.ParseBundleMap(doc))(t).Len())
}
