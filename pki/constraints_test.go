package pki_test

import (
	"crypto"
	"crypto/rand"
	"crypto/x509"
	"encoding/hex"
	"fmt"
	"math/big"
	"net"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// verifyAt is crypto/x509 alone: whether chain, leaf first, leads to root.
func verifyAt(root *x509.Certificate, now time.Time, chain ...*x509.Certificate) error {
	roots, between := x509.NewCertPool(), x509.NewCertPool()
	roots.AddCert(root)
	for _, c := range chain[1:] {
		between.AddCert(c)
	}
	_, err := chain[0].Verify(x509.VerifyOptions{
		Roots: roots, Intermediates: between, CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny},
	})
	return err
}

// forge signs a leaf with these names for parent, and none of the checks of package pki.
func forge(t testing.TB, parent *x509.Certificate, key crypto.Signer, sans ...pki.SAN) *x509.Certificate {
	t.Helper()
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(7), NotBefore: base, NotAfter: base.Add(time.Hour), BasicConstraintsValid: true}
	for _, s := range sans {
		switch s.Type {
		case pki.URI:
			u := must.Get(url.Parse(s.Value))(t)
			tmpl.URIs = append(tmpl.URIs, u)
		case pki.DNS:
			tmpl.DNSNames = append(tmpl.DNSNames, s.Value)
		case pki.IP:
			tmpl.IPAddresses = append(tmpl.IPAddresses, net.IP(s.Value))
		}
	}
	b := must.Get(x509.CreateCertificate(rand.Reader, tmpl, parent, p256Key.Public(), key))(t)
	return must.Get(x509.ParseCertificate(b))(t)
}

func uriSAN(s string) pki.SAN { return pki.SAN{Type: pki.URI, Value: s} }

// A constrained CA cannot sign for another trust domain: not with our code, and not with any other.
func TestConstrain(t *testing.T) {
	t.Parallel()
	o := rootOptions()
	o.PermittedTrustDomains = []spiffe.TrustDomain{exampleOrg}
	key := newKey(t, "ecdsa-p256")
	root := must.Get(pki.NewRoot(key, o))(t)
	cert := root.Certificate()
	lines := raw(t, cert).extensionLines()
	require.Contains(t, lines, "2.5.29.30 true "+hex.EncodeToString(der(tagSeq,
		der(0xa0, der(tagSeq, der(0x86, []byte("example.org")))), der(0xa1, der(tagSeq, der(0x86, []byte(".example.org")))))))

	leaf, err := root.Issue(pki.CertificateOptions{PublicKey: p256Key.Public(), SANs: []pki.SAN{
		pki.IDSAN(webID), pki.DNSSAN("web.other.test"), pki.DNSSAN("*.web.test"), pki.IPSAN(net.IPv4(192, 0, 2, 1)),
	}, NotBefore: base, NotAfter: base.Add(time.Hour)})
	require.NoError(t, err, "DNS names and addresses are not constrained")
	require.NoError(t, verifyAt(cert, base.Add(time.Minute), leaf))

	bundle := must.Get(spiffe.NewBundle(exampleOrg, spiffe.BundleContents{X509Authorities: []*x509.Certificate{cert}}))(t)
	require.NotNil(t, bundle)

	for _, id := range []string{
		"spiffe://other.test/web", "spiffe://sub.example.org/web", "spiffe://a.b.example.org/web", "spiffe://org/web",
		"spiffe://xexample.org/web", "spiffe://example.org.other.test/web", "spiffe://example.orgx/web", "spiffe://192.0.2.1/web",
		"spiffe://example/web", "spiffe://-.example.org/web", "spiffe://_.example.org/web",
	} {
		id := spiffe.MustParseID(id)
		forged := forge(t, cert, key, pki.IDSAN(id))
		require.Error(t, verifyAt(cert, base.Add(time.Minute), forged), "%s: signed around our checks", id)

		// A CA from elsewhere, with no ID of its own but the same constraints.
		bare := constrainedCA(t, key, []string{"example.org"}, []string{".example.org"})
		_, err := bare.Issue(pki.CertificateOptions{PublicKey: p256Key.Public(), SANs: []pki.SAN{pki.IDSAN(id)}, NotBefore: base, NotAfter: base.Add(time.Hour)})
		require.Equal(t, "X5-15", must.As[*pki.ProfileError](err)(t, "%s: %v", id, err).Rule, id)
		requireIs(t, err, errSAN)
	}
	require.NoError(t, verifyAt(cert, base.Add(time.Minute), forge(t, cert, key, pki.IDSAN(webID))), "the forger works")

	// Nor by way of a CA below it, whatever that one says of itself.
	other := rootOptions()
	subKey := newKey(t, "ecdsa-p256")
	other.PublicKey, other.SANs = subKey.Public(), []pki.SAN{pki.IDSAN(spiffe.MustParseID("spiffe://other.test"))}
	_, err = root.Issue(other)
	require.Equal(t, "X5-15", must.As[*pki.ProfileError](err)(t).Rule)
	other.SANs = []pki.SAN{pki.IDSAN(exampleOrg.ID())}
	sub := must.Get(root.Issue(other))(t)
	require.Error(t, verifyAt(cert, base.Add(time.Minute), forge(t, sub, subKey, uriSAN("spiffe://other.test/web")), sub))
	require.NoError(t, verifyAt(cert, base.Add(time.Minute), forge(t, sub, subKey, uriSAN("spiffe://example.org/web")), sub))
	below := must.Get(pki.NewIssuer([]*x509.Certificate{sub, cert}, subKey))(t)
	_, err = below.Issue(pki.CertificateOptions{PublicKey: p256Key.Public(), SANs: []pki.SAN{uriSAN("https://other.test")}, NotBefore: base, NotAfter: base.Add(time.Hour)})
	requireIs(t, err, errSAN, "the constraints of the CA above")
}

func constrainedCA(t testing.TB, key crypto.Signer, permitted, excluded []string) *pki.Issuer {
	t.Helper()
	return caWith(t, key, func(c *x509.Certificate) { c.PermittedURIDomains, c.ExcludedURIDomains = permitted, excluded })
}

// caWith returns a CA without an ID, as other tools make them.
func caWith(t testing.TB, key crypto.Signer, edit func(*x509.Certificate)) *pki.Issuer {
	t.Helper()
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: base, NotAfter: base.AddDate(1, 0, 0), IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign, PermittedDNSDomainsCritical: true,
	}
	tmpl.Subject.CommonName = "CA from elsewhere"
	edit(tmpl)
	b := must.Get(x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key))(t)
	return must.Get(pki.NewIssuer([]*x509.Certificate{must.Get(x509.ParseCertificate(b))(t)}, key))(t)
}

func TestConstrainRefuses(t *testing.T) {
	t.Parallel()
	key := newKey(t, "ecdsa-p256")
	domains := func(names ...string) (tds []spiffe.TrustDomain) {
		for _, n := range names {
			tds = append(tds, spiffe.MustParseTrustDomain(n))
		}
		return tds
	}
	ca := func(edit func(*pki.CertificateOptions)) error {
		o := pki.CertificateOptions{CA: true, Organization: "x", NotBefore: base, NotAfter: base.AddDate(1, 0, 0)}
		edit(&o)
		return must.Err(pki.NewRoot(key, o))
	}
	var many []spiffe.TrustDomain
	for n := range 101 {
		many = append(many, spiffe.MustParseTrustDomain(fmt.Sprintf("d%d", n)))
	}
	for name, tc := range map[string]struct {
		tds  []spiffe.TrustDomain
		also error
	}{
		"zero":                  {[]spiffe.TrustDomain{{}}, nil},
		"empty label":           {domains("a..b"), errUnreadable},
		"dot at the end":        {domains("example.org."), errUnreadable},
		"dot in front":          {domains(".example.org"), errUnreadable},
		"an address":            {domains("192.0.2.1"), nil},
		"the second an address": {domains("example.org", "127.0.0.1"), nil},
		"twice":                 {domains("example.org", "example.org"), nil},
		"one below another":     {domains("example.org", "a.example.org"), nil},
		"one far above another": {domains("a.b.example.org", "x", "org"), nil},
		"too many":              {many, spiffe.ErrTooLarge},
	} {
		err := ca(func(o *pki.CertificateOptions) { o.PermittedTrustDomains = tc.tds })
		assert.Equal(t, "X5-15", must.As[*pki.ProfileError](err)(t, "%s: %v", name, err).Rule, "%s: %v", name, err)
		requireIs(t, err, tc.also, name)
	}
	// What is left of the odd names: the extension is readable, and says what it should.
	for _, td := range domains("a", "a_b.test", "-", "_", "1.2.3", "1.2.3.4.5", "256.1.1.1", "01.2.3.4", "0x7f.0.0.1", "xn--bcher-kva.example", strings.Repeat("a", 255)) {
		o := rootOptions()
		o.SANs, o.PermittedTrustDomains = []pki.SAN{pki.IDSAN(td.ID())}, []spiffe.TrustDomain{td}
		root, err := pki.NewRoot(key, o)
		require.NoError(t, err, td)
		id := must.Get(spiffe.ParseID("spiffe://" + td.String() + "/web"))(t)
		cert := root.Certificate()
		require.NoError(t, verifyAt(cert, base.Add(time.Minute), forge(t, cert, key, pki.IDSAN(id))), td)
		require.Error(t, verifyAt(cert, base.Add(time.Minute), forge(t, cert, key, uriSAN("spiffe://x"+td.String()+"/web"))), td)
		require.Error(t, verifyAt(cert, base.Add(time.Minute), forge(t, cert, key, uriSAN("spiffe://x."+td.String()+"/web"))), td)
	}
	// Two in one list.
	require.NoError(t, ca(func(o *pki.CertificateOptions) {
		o.PermittedTrustDomains = domains("a.example.org", "b.example.org")
	}))
}
