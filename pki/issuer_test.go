package pki_test

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

func certOptions() pki.CertificateOptions {
	return pki.CertificateOptions{
		PublicKey: p256Key.Public(), SANs: []pki.SAN{pki.DNSSAN("web.example.org")}, NotBefore: base, NotAfter: base.Add(time.Hour),
	}
}

func caOptions() pki.CertificateOptions {
	return pki.CertificateOptions{CA: true, Organization: "cluster.local", NotBefore: base, NotAfter: base.AddDate(1, 0, 0)}
}

func subjectHex(parts ...[]byte) string { return hex.EncodeToString(der(tagSeq, parts...)) }

func TestCertificateDER(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-2.1-10", "IST-2.6-5")
	root := newRoot(t)
	p384 := newKey(t, "ecdsa-p384")
	aki := "2.5.29.35 false 30168014" + keyID(t, root.Certificate().PublicKey)
	dns := pki.DNSSAN("web.example.org")
	const digitalSignature, both, notCA = "2.5.29.15 true 03020780", extKeyUsageBoth, "2.5.29.19 true 3000"
	for name, tc := range map[string]struct {
		edit    func(*pki.CertificateOptions)
		subject string
		exts    []string
	}{
		"DNS only": {func(*pki.CertificateOptions) {}, "3000", []string{digitalSignature, both, notCA, aki, sanLine(t, true, dns)}},
		"P-384":    {func(o *pki.CertificateOptions) { o.PublicKey = p384.Public() }, "3000", []string{digitalSignature, both, notCA, aki, sanLine(t, true, dns)}},
		"organization": {func(o *pki.CertificateOptions) { o.Organization = "Example" },
			subjectHex(rdn(oidO, tagPrintable, "Example")), []string{digitalSignature, both, notCA, aki, sanLine(t, false, dns)}},
		"dual use": {func(o *pki.CertificateOptions) { o.Organization, o.CommonName = "Example", "web" },
			subjectHex(rdn(oidO, tagPrintable, "Example"), rdn(oidCN, tagPrintable, "web")), []string{digitalSignature, both, notCA, aki, sanLine(t, false, dns)}},
		"a common name of 64 bytes": {func(o *pki.CertificateOptions) { o.CommonName = strings.Repeat("n", 64) },
			subjectHex(rdn(oidCN, tagPrintable, strings.Repeat("n", 64))), []string{digitalSignature, both, notCA, aki, sanLine(t, false, dns)}},
		"a subject and no names": {func(o *pki.CertificateOptions) { o.SANs, o.CommonName = nil, "node" },
			subjectHex(rdn(oidCN, tagPrintable, "node")), []string{digitalSignature, both, notCA, aki}},
		"server only": {func(o *pki.CertificateOptions) { o.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth} }, "3000",
			[]string{digitalSignature, "2.5.29.37 false 300a06082b06010505070301", notCA, aki, sanLine(t, true, dns)}},
		"client, then server": {func(o *pki.CertificateOptions) {
			o.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth}
		}, "3000",
			[]string{digitalSignature, "2.5.29.37 false 301406082b0601050507030206082b06010505070301", notCA, aki, sanLine(t, true, dns)}},
		"no extended key usage": {func(o *pki.CertificateOptions) { o.ExtKeyUsage = []x509.ExtKeyUsage{} }, "3000",
			[]string{digitalSignature, notCA, aki, sanLine(t, true, dns)}},
		"an SVID without extended key usage": {func(o *pki.CertificateOptions) {
			o.SANs, o.ExtKeyUsage = []pki.SAN{pki.IDSAN(webID)}, []x509.ExtKeyUsage{}
		}, "3000",
			[]string{digitalSignature, notCA, aki, sanLine(t, true, pki.IDSAN(webID))}},
		"another URI": {func(o *pki.CertificateOptions) {
			o.SANs = []pki.SAN{uriSAN("athenz://instanceid/a/b"), uriSAN("urn:x"), ipSAN(t, "192.0.2.1")}
		}, "3000",
			[]string{digitalSignature, both, notCA, aki, sanLine(t, true, uriSAN("athenz://instanceid/a/b"), uriSAN("urn:x"), ipSAN(t, "192.0.2.1"))}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := certOptions()
			tc.edit(&o)
			cert := must.Get(root.Issue(o))(t)
			r := raw(t, cert)
			assert.Equal(t, tc.subject, hex.EncodeToString(r.Subject.FullBytes))
			assert.Equal(t, tc.exts, r.extensionLines())
			require.NoError(t, cert.CheckSignatureFrom(root.Certificate()))
			assert.Equal(t, o.SANs, must.Get(pki.ParseSANs(cert.Extensions))(t))
		})
	}
}

func TestCACertificateDER(t *testing.T) {
	t.Parallel()
	key := newKey(t, "ecdsa-p256")
	id := keyID(t, key.Public())
	serial := rdn(der(tagOID, unhex("550405")), tagPrintable, id)
	for name, tc := range map[string]struct {
		edit    func(*pki.CertificateOptions)
		subject string
		exts    []string
	}{
		"plain": {func(*pki.CertificateOptions) {}, subjectHex(rdn(oidO, tagPrintable, "cluster.local"), serial),
			[]string{"2.5.29.15 true 03020106", "2.5.29.19 true 30030101ff", "2.5.29.14 false 0414" + id}},
		"no organization": {func(o *pki.CertificateOptions) { o.Organization = "" }, subjectHex(serial),
			[]string{"2.5.29.15 true 03020106", "2.5.29.19 true 30030101ff", "2.5.29.14 false 0414" + id}},
		"names": {func(o *pki.CertificateOptions) {
			o.CommonName, o.SANs, o.MaxPathLen = "Root", []pki.SAN{pki.DNSSAN("ca.example.org"), pki.IDSAN(exampleOrg.ID())}, new(3)
		}, subjectHex(rdn(oidO, tagPrintable, "cluster.local"), rdn(oidCN, tagPrintable, "Root"), serial),
			[]string{"2.5.29.15 true 03020106", "2.5.29.19 true 30060101ff020103", "2.5.29.14 false 0414" + id,
				sanLine(t, false, pki.DNSSAN("ca.example.org"), pki.IDSAN(exampleOrg.ID()))}},
		"extended key usage": {func(o *pki.CertificateOptions) { o.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth} },
			subjectHex(rdn(oidO, tagPrintable, "cluster.local"), serial),
			[]string{"2.5.29.15 true 03020106", "2.5.29.37 false 300a06082b06010505070302", "2.5.29.19 true 30030101ff", "2.5.29.14 false 0414" + id}},
		"permitted": {func(o *pki.CertificateOptions) {
			o.PermittedTrustDomains = []spiffe.TrustDomain{spiffe.MustParseTrustDomain("a.org"), spiffe.MustParseTrustDomain("b.org")}
		}, subjectHex(rdn(oidO, tagPrintable, "cluster.local"), serial),
			[]string{"2.5.29.15 true 03020106", "2.5.29.19 true 30030101ff", "2.5.29.14 false 0414" + id, "2.5.29.30 true " + hex.EncodeToString(der(tagSeq,
				der(0xa0, der(tagSeq, der(0x86, []byte("a.org"))), der(tagSeq, der(0x86, []byte("b.org")))),
				der(0xa1, der(tagSeq, der(0x86, []byte(".a.org"))), der(tagSeq, der(0x86, []byte(".b.org"))))))}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := caOptions()
			tc.edit(&o)
			cert := newSelfSigned(t, key, o)
			r := raw(t, cert)
			assert.Equal(t, tc.subject, hex.EncodeToString(r.Subject.FullBytes))
			assert.Equal(t, tc.exts, r.extensionLines())
			assert.Equal(t, cert.RawSubject, cert.RawIssuer)
			require.NoError(t, cert.CheckSignatureFrom(cert))
			i := must.Get(pki.NewIssuer([]*x509.Certificate{cert}, key))(t)
			_, err := i.Issue(leafOptions())
			require.Equal(t, name == "permitted", err != nil, "%v", err)
		})
	}
}

func TestIssueCertificateRefuses(t *testing.T) {
	t.Parallel()
	root := newRoot(t)
	server := x509.ExtKeyUsageServerAuth
	ca := func(edit func(*pki.CertificateOptions)) func(*pki.CertificateOptions) {
		return func(o *pki.CertificateOptions) {
			o.CA, o.SANs = true, nil
			edit(o)
		}
	}
	svid := func(edit func(*pki.CertificateOptions)) func(*pki.CertificateOptions) {
		return func(o *pki.CertificateOptions) {
			o.SANs = []pki.SAN{pki.IDSAN(webID)}
			edit(o)
		}
	}
	sans := func(s ...pki.SAN) func(*pki.CertificateOptions) {
		return func(o *pki.CertificateOptions) { o.SANs = s }
	}
	for name, tc := range map[string]struct {
		rule string
		also error
		edit func(*pki.CertificateOptions)
	}{
		// Names.
		"no name at all":         {"", errSAN, sans()},
		"an email name":          {"", errSAN, sans(pki.SAN{Type: pki.Email, Value: "a@b.c"})},
		"a name of no type":      {"", errSAN, sans(pki.SAN{Value: "a"})},
		"a URI without a scheme": {"", errSAN, sans(uriSAN("example.org/web"))},
		"a URI in upper case":    {"", errSAN, sans(uriSAN("SPIFFE://example.org/web"))},
		"a host with a blank":    {"", errSAN, sans(uriSAN("https://a%20b/"))},
		"a host with a dot":      {"", errSAN, sans(uriSAN("https://example.org./"))},
		"a host with two dots":   {"", errSAN, sans(uriSAN("https://a..b/"))},
		"a bad SPIFFE ID":        {"X5-1", errSAN, sans(uriSAN("spiffe://example.org/a//b"))},
		"two IDs":                {"X5-1", errSAN, sans(pki.IDSAN(webID), uriSAN("spiffe://example.org/other"))},
		"an ID twice":            {"X5-1", errSAN, sans(pki.IDSAN(webID), pki.IDSAN(webID))},
		"a URI before the ID":    {"X5-1", errSAN, sans(uriSAN("https://example.org"), pki.IDSAN(webID))},
		"a URI behind the ID":    {"X5-1", errSAN, sans(pki.IDSAN(webID), uriSAN("https://example.org"))},
		"a CA with a path":       {"X5-9", nil, ca(func(o *pki.CertificateOptions) { o.SANs = []pki.SAN{pki.IDSAN(webID)} })},
		"a CA with two IDs": {"X5-1", errSAN, ca(func(o *pki.CertificateOptions) {
			o.SANs = []pki.SAN{pki.IDSAN(exampleOrg.ID()), uriSAN("spiffe://other.test")}
		})},

		// The subject.
		"a long organization": {"", nil, func(o *pki.CertificateOptions) { o.Organization = strings.Repeat("ü", 33) }},

		// Extended key usage.
		"an SVID for servers": {"X5-20", nil, svid(func(o *pki.CertificateOptions) { o.ExtKeyUsage = []x509.ExtKeyUsage{server} })},
		"an SVID for mail":    {"X5-20", nil, svid(func(o *pki.CertificateOptions) { o.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageEmailProtection} })},

		// The rest.
		"a leaf with a path length": {"", nil, func(o *pki.CertificateOptions) { o.MaxPathLen = new(0) }},
		"a leaf permits domains":    {"", nil, func(o *pki.CertificateOptions) { o.PermittedTrustDomains = []spiffe.TrustDomain{exampleOrg} }},
	} {
		o := certOptions()
		tc.edit(&o)
		cert, err := root.Issue(o)
		require.Nil(t, cert, name)
		pe := must.As[*pki.ProfileError](err)(t, "%s: %v", name, err)
		assert.Equal(t, map[bool]string{false: "leaf", true: "CA certificate"}[o.CA], pe.What, name)
		assert.Equal(t, tc.rule, pe.Rule, "%s: %v", name, err)
		assert.Equal(t, 1, strings.Count(err.Error(), "pki:"), "%v", err)
		requireIs(t, err, tc.also, name)
	}
}

// foreignRoot returns a root as other tools make them.
func foreignRoot(t testing.TB, key crypto.Signer, edit func(*x509.Certificate)) *pki.Issuer {
	t.Helper()
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(42), NotBefore: base, NotAfter: base.AddDate(1, 0, 0), IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature, SubjectKeyId: []byte("a key identifier"),
		Subject: pkix.Name{Country: []string{"NL"}, Organization: []string{"A", "B"}, CommonName: "Root"},
	}
	edit(tmpl)
	b := must.Get(x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key))(t)
	return must.Get(pki.NewIssuer([]*x509.Certificate{must.Get(x509.ParseCertificate(b))(t)}, key))(t)
}

// A root that is renewed with its key says the same of itself, and takes over what the old one signed,
// and the other way round.
func TestRenew(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-2.1-5", "IST-2.2-4", "IST-2.9-2", "IST-2.9-3", "IST-2.9-4")
	p256, p521, ed := newKey(t, "ecdsa-p256"), func() crypto.Signer {
		return must.Get(ecdsa.GenerateKey(elliptic.P521(), rand.Reader))(t)
	}(), newKey(t, "ed25519")
	constrained := rootOptions()
	constrained.PermittedTrustDomains, constrained.MaxPathLen = []spiffe.TrustDomain{exampleOrg}, new(1)
	ours := must.Get(pki.NewRoot(p256, constrained))(t)
	none := func(*x509.Certificate) {}
	akiValue := func(parts ...[]byte) pkix.Extension {
		return pkix.Extension{Id: asn1.ObjectIdentifier{2, 5, 29, 35}, Value: der(tagSeq, parts...)}
	}
	issuerAndSerial := [][]byte{der(0xa1, der(0xa4, der(tagSeq, rdn(oidCN, tagPrintable, "Root")))), der(0x82, []byte{42})}
	for name, tc := range map[string]struct {
		old  *pki.Issuer
		exts func(old []string) []string // nil: the same
	}{
		"ours":    {ours, nil},
		"ECDSA":   {foreignRoot(t, p256, none), nil},
		"P-521":   {foreignRoot(t, p521, none), nil},
		"Ed25519": {foreignRoot(t, ed, none), nil},
		"RSA":     {foreignRoot(t, rsaKey(), none), nil},
		"RSA-PSS": {foreignRoot(t, rsaKey(), func(c *x509.Certificate) { c.SignatureAlgorithm = x509.SHA256WithRSAPSS }), nil},
		"SHA-512": {foreignRoot(t, rsaKey(), func(c *x509.Certificate) { c.SignatureAlgorithm = x509.SHA512WithRSA }), nil},
		"SHA-384": {foreignRoot(t, p256, func(c *x509.Certificate) { c.SignatureAlgorithm = x509.ECDSAWithSHA384 }), nil},
		"extensions of its own": {foreignRoot(t, p256, func(c *x509.Certificate) {
			c.ExtraExtensions = []pkix.Extension{{Id: asn1.ObjectIdentifier{1, 2, 3}, Value: []byte("kept")}, {Id: asn1.ObjectIdentifier{2, 5, 29, 32}, Value: der(tagSeq, der(tagSeq, oidUnknown))}}
			c.CRLDistributionPoints, c.DNSNames, c.MaxPathLen, c.MaxPathLenZero = []string{"http://crl"}, []string{"ca.test"}, 0, true
		}), nil},
		"an odd encoding of the subject": {foreignRoot(t, p256, func(c *x509.Certificate) {
			c.RawSubject = der(tagSeq, rdn(oidCN, tagTeletex, "T\xe9l\xe9"), rdn(oidO, tagUTF8, "UTF-8"))
		}), nil},
		"an authority that is the key": {foreignRoot(t, p256, func(c *x509.Certificate) {
			c.ExtraExtensions = []pkix.Extension{akiValue(der(0x80, []byte("a key identifier")))}
		}), nil},
		// The serial number in it is that of the old certificate: verifiers that compare it would refuse the new one.
		"an authority with its serial number too": {foreignRoot(t, p256, func(c *x509.Certificate) {
			c.ExtraExtensions = []pkix.Extension{akiValue(append([][]byte{der(0x80, []byte("a key identifier"))}, issuerAndSerial...)...)}
		}), func(old []string) []string {
			i := slices.IndexFunc(old, func(s string) bool { return strings.HasPrefix(s, "2.5.29.35 ") })
			old[i] = "2.5.29.35 false " + hex.EncodeToString(der(tagSeq, der(0x80, []byte("a key identifier"))))
			return old
		}},
		"an authority with its serial number only": {foreignRoot(t, p256, func(c *x509.Certificate) {
			c.ExtraExtensions = []pkix.Extension{akiValue(issuerAndSerial...)}
		}), func(old []string) []string {
			return slices.DeleteFunc(old, func(s string) bool { return strings.HasPrefix(s, "2.5.29.35 ") })
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			was := tc.old.Certificate()
			from, to := base.AddDate(0, 6, 0), base.AddDate(5, 0, 0)
			renewed, err := tc.old.Renew(from, to)
			require.NoError(t, err)
			is := renewed.Certificate()
			assert.Equal(t, was.RawSubject, is.RawSubject)
			assert.Equal(t, is.RawSubject, is.RawIssuer)
			assert.Equal(t, was.RawSubjectPublicKeyInfo, is.RawSubjectPublicKeyInfo)
			assert.Equal(t, was.SignatureAlgorithm, is.SignatureAlgorithm)
			assert.NotEqual(t, was.SerialNumber, is.SerialNumber)
			assert.Equal(t, from.UTC().Truncate(time.Second), is.NotBefore)
			assert.Equal(t, to.UTC().Truncate(time.Second), is.NotAfter)
			want := raw(t, was).extensionLines()
			if tc.exts != nil {
				want = tc.exts(want)
			}
			assert.Equal(t, want, raw(t, is).extensionLines())
			assert.Equal(t, []*x509.Certificate{is}, renewed.Chain())

			o := leafOptions()
			o.NotBefore, o.NotAfter = from, from.Add(time.Hour)
			oldLeaf := must.Get(tc.old.Issue(o))(t)
			newLeaf := must.Get(renewed.Issue(o))(t)
			for _, leaf := range []*x509.Certificate{oldLeaf, newLeaf} {
				for _, root := range []*x509.Certificate{was, is} {
					require.NoError(t, verifyAt(root, from.Add(time.Minute), leaf))
				}
			}
			if renewed, err = renewed.Renew(from, to); assert.NoError(t, err, "again") {
				assert.Equal(t, raw(t, is).extensionLines(), raw(t, renewed.Certificate()).extensionLines())
			}
		})
	}
}

func TestRenewRefuses(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-2.9-1")
	root := newRoot(t)
	key := newKey(t, "ecdsa-p256")
	o := rootOptions()
	o.PublicKey = key.Public()
	sub := must.Get(root.Issue(o))(t)
	below := must.Get(pki.NewIssuer([]*x509.Certificate{sub, root.Certificate()}, key))(t)
	for name, tc := range map[string]struct {
		i        *pki.Issuer
		from, to time.Time
		want     string
	}{
		"not self-signed": {below, base, base.AddDate(1, 0, 0), "pki: issuer: the certificate is not self-signed: its CA has to renew it"},
		"no dates":        {root, time.Time{}, time.Time{}, "pki: issuer: NotBefore and NotAfter are required"},
		"backwards":       {root, base, base.Add(-time.Hour), "pki: issuer: NotAfter 2026-03-01T10:00:00Z is not after NotBefore 2026-03-01T11:00:00Z"},
	} {
		got, err := tc.i.Renew(tc.from, tc.to)
		require.EqualError(t, err, tc.want, name)
		require.Nil(t, got, name)
		must.As[*pki.ProfileError](err)(t, name)
	}
	// A cross certificate has the same name at both ends, and is not self-signed.
	cross := foreignRoot(t, key, func(c *x509.Certificate) {})
	other := newKey(t, "ecdsa-p256")
	tmpl := *cross.Certificate()
	b := must.Get(x509.CreateCertificate(rand.Reader, &tmpl, cross.Certificate(), other.Public(), key))(t)
	cert := must.Get(x509.ParseCertificate(b))(t)
	i := must.Get(pki.NewIssuer([]*x509.Certificate{cert}, other))(t)
	require.ErrorContains(t, must.Err(i.Renew(base, base.AddDate(1, 0, 0))), "not self-signed")
}

// A CA in the chain whose path length has no room for what the issuer signs.
func TestIssuerChainTooDeep(t *testing.T) {
	t.Parallel()
	rootKey, key := newKey(t, "ecdsa-p256"), newKey(t, "ecdsa-p256")
	root := foreignRoot(t, rootKey, func(c *x509.Certificate) { c.MaxPathLenZero = true }).Certificate()
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "sub"}, NotBefore: base, NotAfter: base.AddDate(1, 0, 0), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	b := must.Get(x509.CreateCertificate(rand.Reader, tmpl, root, key.Public(), rootKey))(t)
	sub := must.Get(x509.ParseCertificate(b))(t)
	_, err := pki.NewIssuer([]*x509.Certificate{sub, root}, key)
	require.EqualError(t, err, "pki: issuer: certificate 2 of the chain does not allow as many CAs below it")
	_, err = pki.NewIssuer([]*x509.Certificate{sub}, key)
	require.NoError(t, err, "what is not in the chain is not known")
}

// The key of a CA above is checked before a signature is verified with it.
func TestIssuerChainWithWeakKey(t *testing.T) {
	t.Parallel()
	key := newKey(t, "ecdsa-p256")
	sub := foreignRoot(t, key, func(*x509.Certificate) {}).Certificate()
	for name, pub := range map[string]crypto.PublicKey{
		"RSA of 400,000 bits": &rsa.PublicKey{N: oddModulus(400_000), E: 65537},
		"RSA of 1,024 bits":   &rsa.PublicKey{N: oddModulus(1024), E: 65537},
		"unknown":             unsupportedKey{},
		"none":                nil,
	} {
		above := *sub
		above.PublicKey = pub
		_, err := pki.NewIssuer([]*x509.Certificate{sub, &above}, key)
		require.ErrorIs(t, err, pki.ErrWeakKey, name)
		require.ErrorContains(t, err, "certificate 2 of the chain", name)
	}
}

// kms is a key that is somewhere else: it has the two methods of crypto.Signer, and nothing that
// this process could look into.
type kms struct {
	public func() crypto.PublicKey
	sign   func(digest []byte, opts crypto.SignerOpts) ([]byte, error)
}

func (k kms) Public() crypto.PublicKey { return k.public() }
func (k kms) Sign(_ io.Reader, digest []byte, opts crypto.SignerOpts) ([]byte, error) {
	return k.sign(digest, opts)
}

func remoteKey(key crypto.Signer) kms {
	return kms{key.Public, func(d []byte, o crypto.SignerOpts) ([]byte, error) { return key.Sign(rand.Reader, d, o) }}
}

// messageKey is a key that hashes by itself, as some tokens do, and signs nothing that is hashed.
type messageKey struct{ kms }

func (k messageKey) SignMessage(_ io.Reader, msg []byte, opts crypto.SignerOpts) ([]byte, error) {
	h := opts.HashFunc().New()
	h.Write(msg)
	return k.sign(h.Sum(nil), opts)
}

func (messageKey) Sign(io.Reader, []byte, crypto.SignerOpts) ([]byte, error) {
	return nil, errors.New("this key does not sign digests")
}

// everything signs with key in each way that this package signs.
func everything(key crypto.Signer) (signed []*x509.Certificate, errs map[string]error) {
	errs = map[string]error{}
	add := func(what string, cert *x509.Certificate, err error) {
		errs[what] = err
		if cert != nil {
			signed = append(signed, cert)
		}
	}
	_, err := pki.NewCSR(key, pki.CSROptions{})
	add("NewCSR", nil, err)
	i, err := pki.NewRoot(key, rootOptions())
	add("NewRoot", nil, err)
	if err != nil {
		return signed, errs
	}
	signed = append(signed, i.Certificate())
	leaf, err := i.Issue(leafOptions())
	add("IssueLeaf", leaf, err)
	o := rootOptions()
	o.PublicKey = p256Key.Public()
	ca, err := i.Issue(o)
	add("IssueCA", ca, err)
	other, err := i.Issue(certOptions())
	add("IssueCertificate", other, err)
	renewed, err := i.Renew(base, base.AddDate(10, 0, 0))
	add("Renew", nil, err)
	if err == nil {
		signed = append(signed, renewed.Certificate())
	}
	return signed, errs
}

// Any crypto.Signer does.
func TestAnySigner(t *testing.T) {
	t.Parallel()
	ecKey := newKey(t, "ecdsa-p256")
	for name, key := range map[string]crypto.Signer{
		"ECDSA": remoteKey(ecKey), "P-384": remoteKey(newKey(t, "ecdsa-p384")), "RSA": remoteKey(rsaKey()), "Ed25519": remoteKey(newKey(t, "ed25519")),
		"messages only": messageKey{remoteKey(ecKey)},
	} {
		signed, errs := everything(key)
		require.Len(t, errs, 6, name)
		for what, err := range errs {
			require.NoError(t, err, "%s: %s", name, what)
		}
		for _, c := range signed {
			ca := &x509.Certificate{PublicKey: key.Public(), PublicKeyAlgorithm: signed[0].PublicKeyAlgorithm}
			require.NoError(t, ca.CheckSignature(c.SignatureAlgorithm, c.RawTBSCertificate, c.Signature), name)
		}
	}
}

// A bad signature never leaves, wherever the key is and whatever is wrong with it.
func TestBadSignaturesNeverLeave(t *testing.T) {
	t.Parallel()
	good, other := newKey(t, "ecdsa-p256"), newKey(t, "ecdsa-p256")
	errGone := errors.New("the HSM is gone")
	real := remoteKey(good)
	for name, bad := range map[string]func(digest []byte, opts crypto.SignerOpts) ([]byte, error){
		"fails":       func([]byte, crypto.SignerOpts) ([]byte, error) { return nil, errGone },
		"nothing":     func([]byte, crypto.SignerOpts) ([]byte, error) { return nil, nil },
		"zeros":       func([]byte, crypto.SignerOpts) ([]byte, error) { return make([]byte, 64), nil },
		"1 MiB":       func([]byte, crypto.SignerOpts) ([]byte, error) { return make([]byte, 1<<20), nil },
		"another key": func(d []byte, o crypto.SignerOpts) ([]byte, error) { return other.Sign(rand.Reader, d, o) },
		"another digest": func(d []byte, o crypto.SignerOpts) ([]byte, error) {
			return real.sign(bytes.Repeat([]byte{1}, len(d)), o)
		},
		"a byte more": func(d []byte, o crypto.SignerOpts) ([]byte, error) {
			s, err := real.sign(d, o)
			return append(s, 0), err
		},
		"a byte less": func(d []byte, o crypto.SignerOpts) ([]byte, error) {
			s, err := real.sign(d, o)
			return s[:len(s)-1], err
		},
		"one bit": func(d []byte, o crypto.SignerOpts) ([]byte, error) {
			s, err := real.sign(d, o)
			s[len(s)-1] ^= 1
			return s, err
		},
		"raw, not in DER": func(d []byte, o crypto.SignerOpts) ([]byte, error) { return rawSignature(good, d) },
		"of another curve": func(d []byte, o crypto.SignerOpts) ([]byte, error) {
			return newKey(t, "ecdsa-p384").Sign(rand.Reader, d, o)
		},
	} {
		_, errs := everything(kms{good.Public, bad})
		for what, err := range errs {
			require.Error(t, err, "%s: %s", name, what)
			require.Equal(t, name == "fails", errors.Is(err, errGone), "%s: %s: %v", name, what, err)
		}
		// An Issuer whose key goes bad later.
		fine := true
		i := must.Get(pki.NewRoot(kms{good.Public, func(d []byte, o crypto.SignerOpts) ([]byte, error) {
			if fine {
				return real.sign(d, o)
			}
			return bad(d, o)
		}}, rootOptions()))(t)
		fine = false
		requireNothing(t, name, i)
	}

	// A key that was replaced underneath, and says so: the signature is a good one, by the wrong key.
	now := good
	i := must.Get(pki.NewRoot(kms{
		func() crypto.PublicKey { return now.Public() },
		func(d []byte, o crypto.SignerOpts) ([]byte, error) { return now.Sign(rand.Reader, d, o) },
	}, rootOptions()))(t)
	now = other
	requireNothing(t, "replaced", i)

	// One that answers another key every time.
	calls := 0
	fickle := kms{
		func() crypto.PublicKey { calls++; return []crypto.Signer{good, other}[calls%2].Public() },
		func(d []byte, o crypto.SignerOpts) ([]byte, error) { return other.Sign(rand.Reader, d, o) },
	}
	for range 2 {
		csr, err := pki.NewCSR(fickle, pki.CSROptions{})
		if err == nil {
			require.True(t, pki.PublicKeysEqual(csr.PublicKey(), other.Public()))
			_, err = pki.ParseCSR(csr.DER())
		} else {
			continue
		}
		require.NoError(t, err)
	}
}

func requireNothing(t *testing.T, name string, i *pki.Issuer) {
	t.Helper()
	leaf, err := i.Issue(leafOptions())
	require.Error(t, err, name)
	require.Nil(t, leaf, name)
	o := rootOptions()
	o.PublicKey = p256Key.Public()
	ca, err := i.Issue(o)
	require.Error(t, err, name)
	require.Nil(t, ca, name)
	renewed, err := i.Renew(base, base.AddDate(1, 0, 0))
	require.Error(t, err, name)
	require.Nil(t, renewed, name)
}

func rawSignature(key crypto.Signer, digest []byte) ([]byte, error) {
	r, s, err := ecdsa.Sign(rand.Reader, key.(*ecdsa.PrivateKey), digest)
	if err != nil {
		return nil, err
	}
	return append(r.FillBytes(make([]byte, 32)), s.FillBytes(make([]byte, 32))...), nil
}

// Whatever a request says, the names in the certificate are those of the options.
func FuzzCSRToCertificate(f *testing.F) {
	root := newRoot(f)
	csr, err := pki.NewCSR(newKey(f, "ecdsa-p256"), pki.CSROptions{Organization: "Evil", CommonName: "admin", SANs: []pki.SAN{pki.IDSAN(webID), pki.DNSSAN("admin.example.org")}})
	require.NoError(f, err)
	f.Add(csr.DER(), "/ns/prod/sa/web", "web.example.org")
	f.Add(csr.DER(), "", "*.example.org")
	f.Add(csr.DER(), "/a/../b", "a.com,b.com")
	f.Add(csr.DER(), "/web", "")
	for _, r := range hostile(f) {
		if r.key == nil { // RSA keys are slow
			f.Add(r.der(f), "/web", "web")
		}
	}
	f.Add(request{attrs: attributes(extensions(sanExt("admin.example.org"), ext(oidBasic, yes, value(unhex("30030101ff"))), ext(oidKeyUsage, yes, value(unhex("03020106")))))}.der(f), "/web", "web")
	f.Add(request{subject: der(tagSeq, rdn(oidO, tagUTF8, "Evil"), rdn(oidCN, tagUTF8, "admin"))}.der(f), "/web", "")
	f.Fuzz(func(t *testing.T, data []byte, path, name string) {
		csr, err := pki.ParseCSR(data)
		if err != nil {
			requireIs(t, err, errCSR)
			require.Nil(t, csr)
			return
		}
		wish := []pki.SAN{{Type: pki.URI, Value: "spiffe://example.org" + path}, pki.DNSSAN(name)}
		o := pki.CertificateOptions{PublicKey: csr.PublicKey(), SANs: wish, NotBefore: base, NotAfter: base.Add(time.Hour)}
		cert, err := root.Issue(o)
		if err != nil {
			must.As[*pki.ProfileError](err)(t)
			require.Nil(t, cert)
		} else {
			requireExactly(t, cert, csr, wish)
			require.Equal(t, wish[0].Value, must.Get(spiffe.IDFromCertificate(cert))(t).String())
		}
		leaf, err := root.Issue(pki.CertificateOptions{PublicKey: csr.PublicKey(), SANs: []pki.SAN{pki.IDSAN(webID)}, NotBefore: base, NotAfter: base.Add(time.Hour)})
		require.NoError(t, err)
		requireExactly(t, leaf, csr, []pki.SAN{pki.IDSAN(webID)})
	})
}

// requireExactly requires that cert has the key of csr, the given names, and nothing else of csr.
func requireExactly(t *testing.T, cert *x509.Certificate, csr *pki.CSR, sans []pki.SAN) {
	t.Helper()
	require.Equal(t, sans, must.Get(pki.ParseSANs(cert.Extensions))(t))
	require.True(t, pki.PublicKeysEqual(csr.PublicKey(), cert.PublicKey))
	require.Equal(t, []byte{0x30, 0}, cert.RawSubject)
	require.False(t, cert.IsCA)
	require.Zero(t, cert.KeyUsage&(x509.KeyUsageCertSign|x509.KeyUsageCRLSign))
	require.Len(t, cert.Extensions, 5)
	var uris, names []string
	for _, s := range sans {
		switch s.Type {
		case pki.URI:
			uris = append(uris, s.Value)
		case pki.DNS:
			names = append(names, s.Value)
		}
	}
	var have []string
	for _, u := range cert.URIs {
		have = append(have, (*url.URL)(u).String())
	}
	require.Equal(t, fmt.Sprint(uris, names), fmt.Sprint(have, cert.DNSNames), "as crypto/x509 reads them")
}
