package pki_test

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"net"
	"net/url"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

func benchNames(b *testing.B) []pki.SAN {
	b.Helper()
	return []pki.SAN{pki.IDSAN(webID), pki.DNSSAN("web.prod.svc"), pki.IPSAN(net.IPv4(10, 0, 0, 1))}
}

func benchCSR(b *testing.B) *pki.CSR {
	b.Helper()
	return must.Get(pki.NewCSR(newKey(b, pki.ECDSAP256), pki.CSROptions{SANs: benchNames(b)}))(b)
}

// bare returns the cryptography that a CA cannot do without: one verification of a request, which is
// by a P-256 key, and one signature by the key of the CA.
func bare(b *testing.B, caKey crypto.Signer) func() {
	b.Helper()
	key := newKey(b, pki.ECDSAP256).(*ecdsa.PrivateKey)
	digest := sha256.Sum256([]byte("to be signed"))
	sig := must.Get(key.Sign(rand.Reader, digest[:], crypto.SHA256))(b)
	return func() {
		if !ecdsa.VerifyASN1(&key.PublicKey, digest[:], sig) {
			b.Fatal("not verified")
		}
		if _, err := caKey.Sign(rand.Reader, digest[:], crypto.SHA256); err != nil {
			b.Fatal(err)
		}
	}
}

// parseAndIssue returns what a CA does for one request.
func parseAndIssue(b *testing.B, caKey crypto.Signer, edit ...func(*pki.CertificateOptions)) func() {
	b.Helper()
	o := rootOptions()
	for _, f := range edit {
		f(&o)
	}
	issuer := must.Get(pki.NewRoot(caKey, o))(b)
	der := benchCSR(b).DER()
	return func() {
		csr, err := pki.ParseCSR(der)
		if err != nil {
			b.Fatal(err)
		}
		if _, err := issuer.Issue(pki.CertificateOptions{PublicKey: csr.PublicKey(), SANs: []pki.SAN{pki.IDSAN(webID)}, NotBefore: base, NotAfter: base.Add(time.Hour)}); err != nil {
			b.Fatal(err)
		}
	}
}

// standardLibrary returns the same with crypto/x509 alone and none of the checks.
func standardLibrary(b *testing.B, caKey crypto.Signer) func() {
	b.Helper()
	der := benchCSR(b).DER()
	root := must.Get(pki.NewRoot(caKey, rootOptions()))(b)
	return func() {
		csr, err := x509.ParseCertificateRequest(der)
		if err != nil {
			b.Fatal(err)
		}
		if err := csr.CheckSignature(); err != nil {
			b.Fatal(err)
		}
		tmpl := &x509.Certificate{
			NotBefore: base, NotAfter: base.Add(time.Hour), BasicConstraintsValid: true, URIs: []*url.URL{webID.URL()},
			KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		}
		out, err := x509.CreateCertificate(rand.Reader, tmpl, root.Certificate(), csr.PublicKey, caKey)
		if err != nil {
			b.Fatal(err)
		}
		if _, err := x509.ParseCertificate(out); err != nil {
			b.Fatal(err)
		}
	}
}

// benchKeys are the keys of the CAs that are compared.
func benchKeys(b *testing.B, run func(b *testing.B, caKey crypto.Signer)) {
	b.Run("ca=ecdsa-p256", func(b *testing.B) { run(b, newKey(b, pki.ECDSAP256)) })
	b.Run("ca=rsa-2048", func(b *testing.B) { run(b, rsaKey()) })
}

// BenchmarkRatio runs them in turn, so that a busy machine slows all of them, and reports the others as
// multiples of the first.
func BenchmarkRatio(b *testing.B) {
	benchKeys(b, func(b *testing.B, key crypto.Signer) {
		constrained := func(o *pki.CertificateOptions) { o.PermittedTrustDomains = []spiffe.TrustDomain{exampleOrg} }
		all := []func(){bare(b, key), parseAndIssue(b, key), standardLibrary(b, key), parseAndIssue(b, key, constrained)}
		spent := make([][]float64, len(all))
		for b.Loop() {
			for i, f := range all {
				start := time.Now()
				f()
				spent[i] = append(spent[i], float64(time.Since(start)))
			}
		}
		median := make([]float64, len(all))
		for i := range spent {
			slices.Sort(spent[i])
			median[i] = spent[i][len(spent[i])/2]
		}
		b.ReportMetric(median[1]/median[0], "ours/bare")
		b.ReportMetric(median[2]/median[0], "std/bare")
		b.ReportMetric(median[3]/median[0], "constrained/bare")
	})
}

func TestSANAllocations(t *testing.T) {
	sans := []pki.SAN{pki.IDSAN(webID), pki.DNSSAN("web.prod.svc"), ipSAN(t, "10.0.0.1")}
	der := must.Get(pki.MarshalSANValue(sans...))(t)
	require.LessOrEqual(t, testing.AllocsPerRun(100, func() { _, _ = pki.ParseSANValue(der) }), 2.0)
	require.LessOrEqual(t, testing.AllocsPerRun(100, func() { _, _ = pki.MarshalSANValue(sans...) }), 8.0)
}
