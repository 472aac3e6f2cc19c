// Package quantum has certificates of ML-DSA for tests.
package quantum

import (
	"crypto"
	"crypto/rand"
	"crypto/x509"
	"encoding/asn1"
	"slices"
	"testing"
	"time"

	"github.com/svidkit/svidkit/internal/mldsa"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// Need skips a test in a program without ML-DSA: one built with Go 1.26, or in FIPS 140-3 mode with an older module.
func Need(t testing.TB) {
	t.Helper()
	if !mldsa.Available() {
		t.Skip(mldsa.ErrMissing)
	}
}

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

// Root returns a root with a key of this algorithm. It skips a test as [Need] does.
func Root(t testing.TB, algorithm string) *pki.Issuer {
	Need(t)
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

// Edit returns a certificate or CSR in DER whose parts are changed by edit and signed again with key. The parts of a
// CSR are the version, the subject, the key and the attributes; those of a certificate are eight: see RFC 5280.
func Edit(t testing.TB, der []byte, key crypto.Signer, edit func(parts [][]byte) (algorithm []byte)) []byte {
	outer := parts(t, der)
	inner := parts(t, outer[0])
	if algorithm := edit(inner); algorithm != nil {
		outer[1] = algorithm
	}
	outer[0] = Sequence(t, inner...)
	signature := must.Get(key.Sign(rand.Reader, outer[0], crypto.Hash(0)))(t)
	outer[2] = must.Get(asn1.Marshal(asn1.BitString{Bytes: signature, BitLength: 8 * len(signature)}))(t)
	return Sequence(t, outer...)
}

func parts(t testing.TB, der []byte) (parts [][]byte) {
	var values []asn1.RawValue
	rest := must.Get(asn1.Unmarshal(der, &values))(t)
	if len(rest) > 0 {
		t.Fatal("more than a SEQUENCE")
	}
	for _, v := range values {
		parts = append(parts, v.FullBytes)
	}
	return parts
}

// Sequence returns a SEQUENCE of parts in DER.
func Sequence(t testing.TB, parts ...[]byte) []byte {
	return must.Get(asn1.Marshal(asn1.RawValue{Tag: asn1.TagSequence, IsCompound: true, Bytes: slices.Concat(parts...)}))(t)
}
