// Package quantum has certificates of ML-DSA for tests, which need Go 1.27.
package quantum

import (
	"crypto/x509"
	"testing"
	"time"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// Algorithm is the kind of the larger keys and signatures: what fits with it fits with ML-DSA-44 too.
const Algorithm = "ml-dsa-65"

// TrustDomain is that of all certificates of this package.
var TrustDomain = spiffe.MustParseTrustDomain("example.org")

// within returns o with the validity of issuer, or of an hour around now without one.
func within(issuer *pki.Issuer, o pki.CertificateOptions) pki.CertificateOptions {
	o.NotBefore, o.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	if issuer != nil {
		o.NotBefore, o.NotAfter = issuer.Certificate().NotBefore, issuer.Certificate().NotAfter
	}
	return o
}

// Root returns a root with a key of this algorithm.
func Root(t testing.TB, algorithm string) *pki.Issuer {
	key := must.Get(pki.NewKey(algorithm))(t)
	return must.Get(pki.NewRoot(key, within(nil, pki.CertificateOptions{SANs: []pki.SAN{pki.IDSAN(TrustDomain.ID())}})))(t)
}

// Below returns a CA below another.
func Below(t testing.TB, issuer *pki.Issuer, algorithm string) *pki.Issuer {
	key := must.Get(pki.NewKey(algorithm))(t)
	c := must.Get(issuer.Issue(within(issuer, pki.CertificateOptions{PublicKey: key.Public(), CA: true,
		SANs: []pki.SAN{pki.IDSAN(TrustDomain.ID())}})))(t)
	return must.Get(pki.NewIssuer(append([]*x509.Certificate{c}, issuer.Chain()...), key))(t)
}

// SVID returns an SVID of the workload with this path, with all certificates up to the root.
func SVID(t testing.TB, issuer *pki.Issuer, algorithm, path string) *spiffe.SVID {
	key := must.Get(pki.NewKey(algorithm))(t)
	id := must.Get(TrustDomain.WorkloadID(path))(t)
	leaf := must.Get(issuer.Issue(within(issuer, pki.CertificateOptions{PublicKey: key.Public(), SANs: []pki.SAN{pki.IDSAN(id)}})))(t)
	chain := append([]*x509.Certificate{leaf}, issuer.Chain()...)
	for len(chain) > 1 && chain[len(chain)-1].CheckSignatureFrom(chain[len(chain)-1]) == nil {
		chain = chain[:len(chain)-1] // the root
	}
	return must.Get(spiffe.NewSVID(chain, key))(t)
}

// Chain returns an SVID of n certificates, all of Algorithm, and the bundle with its root.
func Chain(t testing.TB, n int) (*spiffe.SVID, *spiffe.Bundle) {
	root := Root(t, Algorithm)
	issuer := root
	for range n - 1 {
		issuer = Below(t, issuer, Algorithm)
	}
	return SVID(t, issuer, Algorithm, "web"), Bundle(t, root.Certificate())
}

// Bundle returns a bundle with these roots.
func Bundle(t testing.TB, roots ...*x509.Certificate) *spiffe.Bundle {
	return must.Get(spiffe.NewBundle(TrustDomain, spiffe.BundleContents{X509Authorities: roots}))(t)
}
