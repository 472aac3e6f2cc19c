package pki_test

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/fips140"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/files/private"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// testCA is a CA in parts, from which tests make bundles.
type testCA struct {
	*pki.Issuer
	key crypto.Signer
}

func (c testCA) cert() *x509.Certificate { return c.Certificate() }

func newTestRoot(t testing.TB, edit ...func(*pki.CertificateOptions)) testCA {
	t.Helper()
	key := newKey(t, "ecdsa-p256")
	o := caOptions()
	for _, f := range edit {
		f(&o)
	}
	return testCA{must.Get(pki.NewIssuer([]*x509.Certificate{newSelfSigned(t, key, o)}, key))(t), key}
}

// below returns a CA that c signs.
func (c testCA) below(t testing.TB, edit ...func(*pki.CertificateOptions)) testCA {
	t.Helper()
	key := newKey(t, "ecdsa-p256")
	o := caOptions()
	o.PublicKey, o.NotBefore, o.NotAfter = key.Public(), c.cert().NotBefore, c.cert().NotAfter
	for _, f := range edit {
		f(&o)
	}
	return testCA{must.Get(pki.NewIssuer([]*x509.Certificate{must.Get(c.Issue(o))(t)}, key))(t), key}
}

func (c testCA) keyPEM(t testing.TB) []byte {
	t.Helper()
	return pemOf(t, c.key)
}

func (c testCA) crl(t testing.TB, revoked ...*x509.Certificate) []byte {
	t.Helper()
	list := &x509.RevocationList{Number: big.NewInt(1), ThisUpdate: base, NextUpdate: base.Add(time.Hour)}
	for _, r := range revoked {
		list.RevokedCertificateEntries = append(list.RevokedCertificateEntries, x509.RevocationListEntry{SerialNumber: r.SerialNumber, RevocationTime: base, ReasonCode: 1})
	}
	return []byte(block("X509 CRL", must.Get(x509.CreateRevocationList(rand.Reader, list, c.cert(), c.key))(t)))
}

func certsPEM(certs ...*x509.Certificate) []byte { return pki.MarshalCertificatesPEM(certs...) }

var during = base.Add(time.Minute)

func TestKeyCertBundle(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-2.10-2")
	root := newTestRoot(t)
	mid := root.below(t)
	ca := mid.below(t)
	old := newTestRoot(t)
	// The new root, signed by the old one: a path for verifiers that do not have the new one yet.
	cross := crossSigned(t, old, root)
	clients := root.below(t, func(o *pki.CertificateOptions) { o.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth} })
	for name, tc := range map[string]struct {
		p     keyCertPEM
		chain []*x509.Certificate
		roots []*x509.Certificate
		crls  int
	}{
		"self-signed":              {keyCertPEM{Cert: certsPEM(root.cert()), Key: root.keyPEM(t), Roots: certsPEM(root.cert())}, []*x509.Certificate{root.cert()}, []*x509.Certificate{root.cert()}, 0},
		"self-signed, blank chain": {keyCertPEM{Cert: certsPEM(root.cert()), Chain: []byte("\n"), Key: root.keyPEM(t), Roots: certsPEM(root.cert()), CRL: []byte(" \n")}, []*x509.Certificate{root.cert()}, []*x509.Certificate{root.cert()}, 0},
		"directly below the root":  {keyCertPEM{Cert: certsPEM(mid.cert()), Key: mid.keyPEM(t), Roots: certsPEM(root.cert())}, []*x509.Certificate{mid.cert()}, []*x509.Certificate{root.cert()}, 0},
		"a CA for clients only":    {keyCertPEM{Cert: certsPEM(clients.cert()), Key: clients.keyPEM(t), Roots: certsPEM(root.cert())}, []*x509.Certificate{clients.cert()}, []*x509.Certificate{root.cert()}, 0},
		"intermediates":            {keyCertPEM{Cert: certsPEM(ca.cert()), Chain: certsPEM(mid.cert()), Key: ca.keyPEM(t), Roots: certsPEM(root.cert())}, []*x509.Certificate{ca.cert(), mid.cert()}, []*x509.Certificate{root.cert()}, 0},
		"a chain in any order, with itself, the root and unrelated CAs": {keyCertPEM{
			Cert: certsPEM(ca.cert()), Chain: certsPEM(root.cert(), old.cert(), mid.cert(), ca.cert(), mid.cert()), Key: ca.keyPEM(t), Roots: certsPEM(root.cert(), root.cert())},
			[]*x509.Certificate{ca.cert(), mid.cert()}, []*x509.Certificate{root.cert()}, 0},
		"all in one file": {keyCertPEM{Cert: certsPEM(ca.cert(), mid.cert(), root.cert()), Key: ca.keyPEM(t), Roots: certsPEM(root.cert())}, []*x509.Certificate{ca.cert(), mid.cert()}, []*x509.Certificate{root.cert()}, 0},
		"two roots":       {keyCertPEM{Cert: certsPEM(mid.cert()), Key: mid.keyPEM(t), Roots: certsPEM(old.cert(), root.cert())}, []*x509.Certificate{mid.cert()}, []*x509.Certificate{old.cert(), root.cert()}, 0},
		"a cross certificate": {keyCertPEM{Cert: certsPEM(mid.cert()), Chain: certsPEM(cross), Key: mid.keyPEM(t), Roots: certsPEM(old.cert(), root.cert())},
			[]*x509.Certificate{mid.cert(), cross}, []*x509.Certificate{old.cert(), root.cert()}, 0},
		"CRLs": {keyCertPEM{Cert: certsPEM(ca.cert()), Chain: certsPEM(mid.cert()), Key: ca.keyPEM(t), Roots: certsPEM(root.cert()),
			CRL: slices.Concat([]byte("# lists\n"), old.crl(t), root.crl(t), mid.crl(t, root.cert()), ca.crl(t))}, []*x509.Certificate{ca.cert(), mid.cert()}, []*x509.Certificate{root.cert()}, 4},
	} {
		b, err := tc.p.read(during)
		require.NoError(t, err, name)
		assert.Equal(t, certsPEM(tc.chain...), certsPEM(b.Issuer().Chain()...), name)
		assert.Equal(t, certsPEM(tc.roots...), certsPEM(b.Roots()...), name)
		assert.Contains(t, b.String(), fmt.Sprintf(" %d CRLs)", tc.crls), name)
		leaf, err := b.Issuer().Issue(leafOptions())
		require.NoError(t, err, name)
		for n, r := range b.Roots() {
			err := verifyAt(r, during, append([]*x509.Certificate{leaf}, b.Issuer().Chain()...)...)
			require.Equal(t, name == "two roots" && n == 0, err != nil, "%s: what it signs, with the chain that it sends: %v", name, err)
		}
	}
}

// withUsage returns a CA that over signs, with this key usage.
func withUsage(t testing.TB, over testCA, usage x509.KeyUsage) testCA {
	t.Helper()
	ca := over.below(t)
	tmpl := *ca.cert()
	tmpl.KeyUsage = usage
	b := must.Get(x509.CreateCertificate(rand.Reader, &tmpl, over.cert(), ca.key.Public(), over.key))(t)
	c := must.Get(x509.ParseCertificate(b))(t)
	require.Equal(t, usage, c.KeyUsage)
	return testCA{must.Get(pki.NewIssuer([]*x509.Certificate{c}, ca.key))(t), ca.key}
}

// crossSigned returns a certificate for the name and key of ca, signed by over.
func crossSigned(t testing.TB, over, ca testCA) *x509.Certificate {
	t.Helper()
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(99), RawSubject: ca.cert().RawSubject, SubjectKeyId: ca.cert().SubjectKeyId, NotBefore: base, NotAfter: base.AddDate(1, 0, 0),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}
	b := must.Get(x509.CreateCertificate(rand.Reader, tmpl, over.cert(), ca.key.Public(), over.key))(t)
	return must.Get(x509.ParseCertificate(b))(t)
}

func TestKeyCertBundleRefuses(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-2.10-6", "IST-2.10-7", "IST-2.10-8", "IST-2.10-9", "IST-2.10-10", "IST-3.7-5")
	root := newTestRoot(t)
	mid := root.below(t)
	ca := mid.below(t)
	unrelated := newTestRoot(t)
	leafKey := newKey(t, "ecdsa-p256")
	lo := leafOptions()
	lo.PublicKey = leafKey.Public()
	leaf := must.Get(root.Issue(lo))(t)
	small := smallKey()
	weak := selfSignedBy(t, small)
	huge := withKey(t, root.cert(), rsaSPKI(append([]byte{0x7f}, bytes.Repeat([]byte{0xff}, 2000)...), []byte{1, 0, 1}))
	flat := foreignCA(t, func(c *x509.Certificate) { c.MaxPathLenZero = true })
	flatSub := subordinate(t, flat)
	noCRL := withUsage(t, root, x509.KeyUsageCertSign)
	short := root.below(t, func(o *pki.CertificateOptions) { o.NotAfter = base.Add(time.Second * 30) })
	late := root.below(t, func(o *pki.CertificateOptions) { o.NotBefore = base.Add(time.Hour) })
	wrongDomain := foreignCA(t, func(c *x509.Certificate) { c.PermittedDNSDomains = []string{"example.org"} })
	outside := unchecked(t, wrongDomain, "ca.other.test")
	renewedRoot := must.Get(root.Renew(base, base.AddDate(1, 0, 0)))(t)

	tmpl := &x509.Certificate{SerialNumber: big.NewInt(8), Subject: pkix.Name{CommonName: "lists"}, NotBefore: base, NotAfter: base.AddDate(1, 0, 0), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCRLSign}
	crlOnlyDER := must.Get(x509.CreateCertificate(rand.Reader, tmpl, root.cert(), leafKey.Public(), root.key))(t)
	crlOnly := must.Get(x509.ParseCertificate(crlOnlyDER))(t)

	good := func() keyCertPEM {
		return keyCertPEM{Cert: certsPEM(ca.cert()), Chain: certsPEM(mid.cert()), Key: ca.keyPEM(t), Roots: certsPEM(root.cert())}
	}
	with := func(c testCA) func(*keyCertPEM) {
		return func(p *keyCertPEM) { p.Cert, p.Key = certsPEM(c.cert()), c.keyPEM(t) }
	}
	crls := func(all ...[]byte) func(*keyCertPEM) {
		return func(p *keyCertPEM) { p.CRL = slices.Concat(all...) }
	}
	for name, tc := range map[string]struct {
		edit func(*keyCertPEM)
		want string // in the error
		also error
	}{
		// The certificate.
		"no certificate":         {func(p *keyCertPEM) { p.Cert = nil }, "CA certificate: no certificate found", nil},
		"text as certificate":    {func(p *keyCertPEM) { p.Cert = []byte("hello") }, "CA certificate: ", nil},
		"half a certificate":     {func(p *keyCertPEM) { p.Cert = p.Cert[:len(p.Cert)/2] }, "CA certificate: ", nil},
		"a key as certificate":   {func(p *keyCertPEM) { p.Cert = p.Key }, `CA certificate: block 1 is "PRIVATE KEY"`, nil},
		"a token as label":       {func(p *keyCertPEM) { p.Cert = []byte("-----BEGIN eyJhbG.ey-----\nAA==\n-----END eyJhbG.ey-----\n") }, `CA certificate: block 1 is something else, not CERTIFICATE`, nil},
		"a damaged second block": {func(p *keyCertPEM) { p.Chain = append(damaged(p.Cert), p.Chain...) }, "chain: 1 damaged PEM blocks", nil},
		"a leaf":                 {func(p *keyCertPEM) { p.Cert, p.Key = certsPEM(leaf), pemOf(t, leafKey) }, "the certificate is not a CA", nil},
		"signs CRLs only":        {func(p *keyCertPEM) { p.Cert, p.Key = certsPEM(crlOnly), pemOf(t, leafKey) }, "the key usage does not include certificate signing", nil},
		"too large":              {func(p *keyCertPEM) { p.Cert = append(bytes.Repeat([]byte("#"), 1<<20), p.Cert...) }, "ca-cert.pem has more than 1048576 bytes", spiffe.ErrTooLarge},
		"a weak key":             {func(p *keyCertPEM) { p.Cert, p.Roots = certsPEM(weak), certsPEM(weak) }, "CA certificate: certificate 1", pki.ErrWeakKey},

		// The way to a root.
		"no chain":               {func(p *keyCertPEM) { p.Chain = nil }, "does not lead to a root", nil},
		"text as chain":          {func(p *keyCertPEM) { p.Chain = []byte("hello") }, "chain: ", nil},
		"another chain":          {func(p *keyCertPEM) { p.Chain = certsPEM(unrelated.cert()) }, "does not lead to a root", nil},
		"no roots":               {func(p *keyCertPEM) { p.Roots = nil }, "roots: no certificate found", nil},
		"other roots":            {func(p *keyCertPEM) { p.Roots = certsPEM(unrelated.cert()) }, "does not lead to a root", nil},
		"a torn root":            {func(p *keyCertPEM) { p.Roots = append(p.Roots, certsPEM(root.cert())[:100]...) }, "roots: 1 damaged PEM blocks", nil},
		"a leaf among the roots": {func(p *keyCertPEM) { p.Roots = append(p.Roots, certsPEM(leaf)...) }, "is not a CA certificate", nil},
		"a weak root":            {func(p *keyCertPEM) { p.Roots = append(p.Roots, certsPEM(weak)...) }, "roots: certificate 2", pki.ErrWeakKey},
		"a root of 16,000 bits":  {func(p *keyCertPEM) { p.Roots = append(p.Roots, certsPEM(huge)...) }, "roots: certificate 2", pki.ErrWeakKey},
		"a link of 16,000 bits":  {func(p *keyCertPEM) { p.Chain = append(p.Chain, certsPEM(huge)...) }, "chain: certificate 2", pki.ErrWeakKey},
		"expired":                {with(short), "expired at 2026-", nil},
		"not yet valid":          {with(late), "does not lead to a root", nil},
		"no room below the root": {func(p *keyCertPEM) {
			p.Cert, p.Key, p.Roots = certsPEM(flatSub.cert()), flatSub.keyPEM(t), certsPEM(flat.cert())
		}, "path length", nil},
		"a name that is forbidden": {func(p *keyCertPEM) {
			p.Cert, p.Key, p.Roots = certsPEM(outside.cert()), outside.keyPEM(t), certsPEM(wrongDomain.cert())
		}, "does not lead to a root", nil},

		// The key.
		"no key":             {func(p *keyCertPEM) { p.Key = nil }, "key: no private key found", nil},
		"another key":        {func(p *keyCertPEM) { p.Key = unrelated.keyPEM(t) }, "the private key does not belong to the certificate", pki.ErrKeyMismatch},
		"the key of the mid": {func(p *keyCertPEM) { p.Key = mid.keyPEM(t) }, "the private key does not belong to the certificate", pki.ErrKeyMismatch},
		"two keys":           {func(p *keyCertPEM) { p.Key = append(p.Key, p.Key...) }, "key: ", nil},
		"an encrypted key":   {func(p *keyCertPEM) { p.Key = []byte(block("ENCRYPTED PRIVATE KEY", []byte{1})) }, "key: the private key is encrypted", nil},

		// The lists.
		"text as CRL":                {crls([]byte("hello")), "no list found", errCRL},
		"a certificate as CRL":       {crls(certsPEM(root.cert())), "not X509 CRL", errCRL},
		"a list of another CA":       {crls(unrelated.crl(t)), fmt.Sprintf("no list for %q:", ca.cert().Subject), errCRL},
		"no list for the CA":         {crls(root.crl(t), mid.crl(t)), fmt.Sprintf("no list for %q:", ca.cert().Subject), errCRL},
		"no list in the middle":      {crls(ca.crl(t), root.crl(t)), fmt.Sprintf("no list for %q:", mid.cert().Subject), errCRL},
		"no list for the root":       {crls(ca.crl(t), mid.crl(t)), fmt.Sprintf("no list for %q:", root.cert().Subject), errCRL},
		"a list by another key":      {crls(ca.crl(t), mid.crl(t), forgedCRL(t, root)), fmt.Sprintf("no list for %q: the signature", root.cert().Subject), errCRL},
		"a damaged list":             {crls(ca.crl(t), mid.crl(t), damaged(root.crl(t)), root.crl(t)), "1 damaged PEM blocks", errCRL},
		"the CA is revoked":          {crls(ca.crl(t), mid.crl(t, ca.cert()), root.crl(t)), fmt.Sprintf("%q is revoked since 2026-03-01T11:00:00Z, reason 1", ca.cert().Subject), errCRL},
		"the one above is revoked":   {crls(ca.crl(t), mid.crl(t), root.crl(t, mid.cert())), fmt.Sprintf("%q is revoked", mid.cert().Subject), errCRL},
		"the root revokes itself":    {crls(ca.crl(t), mid.crl(t), root.crl(t, root.cert())), fmt.Sprintf("%q is revoked", root.cert().Subject), errCRL},
		"a CA that signs no lists":   {func(p *keyCertPEM) { p.Cert, p.Key, p.CRL = certsPEM(noCRL.cert()), noCRL.keyPEM(t), root.crl(t) }, fmt.Sprintf("no list for %q:", noCRL.cert().Subject), errCRL},
		"a list of the renewed root": {crls(ca.crl(t), mid.crl(t), testCA{renewedRoot, root.key}.crl(t, root.cert())), fmt.Sprintf("%q is revoked", root.cert().Subject), errCRL},
	} {
		p := good()
		tc.edit(&p)
		b, err := p.read(during)
		require.ErrorContains(t, err, tc.want, name)
		require.Nil(t, b, name)
		assert.Equal(t, 1, strings.Count(err.Error(), "pki:"), "%s: %v", name, err)
		requireIs(t, err, tc.also, name)
		assert.NotErrorIs(t, err, fs.ErrNotExist)
		for line := range strings.SplitSeq(string(p.Key), "\n") {
			if len(line) > 30 && !strings.HasPrefix(line, "-") {
				assert.NotContains(t, err.Error(), line[:20], name)
			}
		}
	}
	_, err := good().read(time.Time{})
	require.EqualError(t, err, "pki: key-cert bundle: no time to verify at")
	require.NoError(t, must.Err(good().read(during)), "where all of them start")
}

func damaged(pem []byte) []byte {
	d := bytes.Clone(pem)
	d[bytes.IndexByte(d, '\n')+10] = '!'
	return d
}

func pemOf(t testing.TB, key crypto.Signer) []byte {
	t.Helper()
	return must.Get(pki.MarshalPrivateKeyPEM(key))(t)
}

func selfSignedBy(t testing.TB, key crypto.Signer) *x509.Certificate {
	t.Helper()
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(5), Subject: pkix.Name{CommonName: "weak"}, NotBefore: base, NotAfter: base.AddDate(1, 0, 0), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	return createCertificate(t, tmpl, key)
}

// createCertificate makes a self-signed certificate, also with a key that is too weak.
func createCertificate(t testing.TB, tmpl *x509.Certificate, key crypto.Signer) *x509.Certificate {
	t.Helper()
	var b []byte
	fips140.WithoutEnforcement(func() {
		b = must.Get(x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key))(t)
	})
	return must.Get(x509.ParseCertificate(b))(t)
}

// withKey returns cert with another public key, which crypto/x509 reads; the signature is not right.
func withKey(t testing.TB, cert *x509.Certificate, spki []byte) *x509.Certificate {
	t.Helper()
	tbs := bytes.Replace(cert.RawTBSCertificate, cert.RawSubjectPublicKeyInfo, spki, 1)
	content := tbs[4:] // behind tag and a length of three bytes
	b := der(tagSeq, der(tagSeq, content), algECDSA256, der(tagBits, []byte{0}, cert.Signature))
	return must.Get(x509.ParseCertificate(b))(t)
}

func foreignCA(t testing.TB, edit func(*x509.Certificate)) testCA {
	t.Helper()
	key := newKey(t, "ecdsa-p256")
	return testCA{foreignRoot(t, key, edit), key}
}

// subordinate signs a CA below over without looking whether there is room.
func subordinate(t testing.TB, over testCA) testCA { return unchecked(t, over, "") }

func unchecked(t testing.TB, over testCA, dns string) testCA {
	t.Helper()
	key := newKey(t, "ecdsa-p256")
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(6), Subject: pkix.Name{CommonName: "below"}, NotBefore: base, NotAfter: base.AddDate(1, 0, 0), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	if dns != "" {
		tmpl.DNSNames = []string{dns}
	}
	b := must.Get(x509.CreateCertificate(rand.Reader, tmpl, over.cert(), key.Public(), over.key))(t)
	return testCA{must.Get(pki.NewIssuer([]*x509.Certificate{must.Get(x509.ParseCertificate(b))(t)}, key))(t), key}
}

// forgedCRL is a list in the name of ca, by another key.
func forgedCRL(t testing.TB, ca testCA) []byte {
	t.Helper()
	other := newKey(t, "ecdsa-p256")
	fake := *ca.cert()
	fake.PublicKey = other.Public()
	b, err := x509.CreateRevocationList(rand.Reader, &x509.RevocationList{Number: big.NewInt(1), ThisUpdate: base, NextUpdate: base.Add(time.Hour)}, &fake, other)
	require.NoError(t, err)
	return []byte(block("X509 CRL", b))
}

func TestKeyCertBundleCopies(t *testing.T) {
	t.Parallel()
	root := newTestRoot(t)
	p := keyCertPEM{Cert: certsPEM(root.cert()), Chain: certsPEM(root.cert()), Key: root.keyPEM(t), Roots: certsPEM(root.cert()), CRL: root.crl(t)}
	b := must.Get(p.read(during))(t)
	for range 2 {
		b.Roots()[0] = nil
		b.Issuer().Chain()[0] = nil
		require.NotNil(t, b.Roots()[0])
		require.NotNil(t, b.Issuer().Certificate())
	}
}

func TestKeyCertBundleEqual(t *testing.T) {
	t.Parallel()
	a, c := newTestRoot(t), newTestRoot(t)
	mid, other := a.below(t), a.below(t)
	parse := func(cert testCA, chain, roots, crl []byte) *pki.KeyCertBundle {
		b, err := keyCertPEM{Cert: certsPEM(cert.cert()), Chain: chain, Key: cert.keyPEM(t), Roots: roots, CRL: crl}.read(during)
		require.NoError(t, err)
		return b
	}
	both := certsPEM(a.cert(), c.cert())
	bundle := parse(mid, nil, both, nil)
	sec1 := must.Get(x509.MarshalECPrivateKey(mid.key.(*ecdsa.PrivateKey)))(t)
	rewritten := must.Get(keyCertPEM{
		Cert:  []byte("# comment\n" + strings.ReplaceAll(string(certsPEM(mid.cert())), "\n", "\r\n")),
		Chain: certsPEM(mid.cert()), Key: []byte(block("EC PRIVATE KEY", sec1)), Roots: certsPEM(c.cert(), a.cert(), c.cert()),
	}.read(during))(t)
	first, second := mid.crl(t), a.crl(t)
	crl := slices.Concat(first, second)
	withCRL := parse(mid, nil, both, crl)
	onlyA, onlyC := parse(mid, nil, certsPEM(a.cert()), nil), parse(c, nil, certsPEM(c.cert()), nil)
	withD := parse(mid, nil, certsPEM(a.cert(), newTestRoot(t).cert()), nil)
	for name, tc := range map[string]struct {
		x, y  *pki.KeyCertBundle
		equal bool
	}{
		"itself":                         {bundle, bundle, true},
		"the same, written another way":  {bundle, rewritten, true},
		"another CA":                     {bundle, parse(other, nil, both, nil), false},
		"the root itself":                {bundle, parse(a, nil, both, nil), false},
		"a longer chain":                 {bundle, parse(mid, certsPEM(other.cert()), both, nil), false},
		"with CRLs":                      {bundle, withCRL, false},
		"without CRLs":                   {withCRL, bundle, false},
		"the same CRLs in another order": {withCRL, parse(mid, nil, both, slices.Concat(second, crl)), true},
		"a root more":                    {onlyA, bundle, false},
		"a root less":                    {bundle, onlyA, false},
		"all roots swapped":              {onlyA, onlyC, false},
		"one of two swapped":             {bundle, withD, false},
	} {
		if strings.HasPrefix(name, "the same CRLs") { // ECDSA is random: cut the lists out of the one text
			lists := must.Get(readCRLs(crl))(t)
			tc.y = parse(mid, nil, both, crlsPEM(lists[1], lists[0], lists[1]))
		}
		assert.Equal(t, tc.equal, tc.x.Equal(tc.y), name)
		assert.Equal(t, tc.equal, tc.y.Equal(tc.x), name)
	}
	var none *pki.KeyCertBundle
	assert.True(t, none.Equal(nil))
	assert.False(t, bundle.Equal(nil))
	assert.False(t, none.Equal(bundle))
}

func TestReadKeyCertBundle(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-2.10-3", "IST-3.1-7", "IST-3.1-8", "IST-3.7-1", "IST-3.7-2", "IST-3.7-3")
	root := newTestRoot(t)
	mid := root.below(t)
	cert, chain, key, roots, crl := certsPEM(mid.cert()), certsPEM(mid.cert(), root.cert()), mid.keyPEM(t), certsPEM(root.cert()), slices.Concat(root.crl(t), mid.crl(t))
	file := func(b []byte) *fstest.MapFile { return &fstest.MapFile{Data: b} }
	self := fstest.MapFS{"ca-cert.pem": file(roots), "ca-key.pem": file(root.keyPEM(t)), "cert-chain.pem": file(nil), "root-cert.pem": file(roots), "key.pem": file(nil)}
	istio := fstest.MapFS{"ca-cert.pem": file(cert), "ca-key.pem": file(key), "cert-chain.pem": file(chain), "root-cert.pem": file(roots), "unrelated": file([]byte("x"))}
	tls := fstest.MapFS{"tls.crt": file(chain), "tls.key": file(key), "ca.crt": file(roots)}
	linkerd := fstest.MapFS{"crt.pem": file(cert), "key.pem": file(key), "ca-bundle.crt": file(roots)}
	plus := func(base fstest.MapFS, name string, data []byte) fstest.MapFS {
		out := fstest.MapFS{name: file(data)}
		for n, f := range base {
			if n != name {
				out[n] = f
			}
		}
		return out
	}
	minus := func(base fstest.MapFS, names ...string) fstest.MapFS {
		out := fstest.MapFS{}
		for n, f := range base {
			if !slices.Contains(names, n) {
				out[n] = f
			}
		}
		return out
	}
	bad := []byte("not PEM")
	for name, tc := range map[string]struct {
		fsys fs.FS
		cert *x509.Certificate
		crls int
	}{
		"Istio":                             {istio, mid.cert(), 0},
		"Istio with CRLs":                   {plus(istio, "ca-crl.pem", crl), mid.cert(), 2},
		"Istio with an empty CRL":           {plus(istio, "ca-crl.pem", nil), mid.cert(), 0},
		"Istio, a secret of its own CA":     {self, root.cert(), 0},
		"Istio, self-signed, no root":       {minus(self, "root-cert.pem"), root.cert(), 0},
		"Istio, self-signed, an empty root": {plus(self, "root-cert.pem", nil), root.cert(), 0},
		"TLS":                               {tls, mid.cert(), 0},
		"TLS with a bundle":                 {plus(minus(tls, "ca.crt"), "ca-bundle.crt", roots), mid.cert(), 0},
		"TLS before Istio":                  {plus(plus(plus(istio, "tls.crt", cert), "tls.key", key), "ca.crt", roots), mid.cert(), 0},
		"TLS does not look at ca-crl.pem":   {plus(tls, "ca-crl.pem", bad), mid.cert(), 0},
		"TLS prefers ca.crt":                {plus(tls, "ca-bundle.crt", bad), mid.cert(), 0},
		"Istio before a lone tls.key":       {plus(istio, "tls.key", bad), mid.cert(), 0},
		"Istio before Linkerd":              {plus(plus(istio, "crt.pem", bad), "key.pem", bad), mid.cert(), 0},
		"Linkerd":                           {linkerd, mid.cert(), 0},
		"Linkerd with ca.crt":               {plus(minus(linkerd, "ca-bundle.crt"), "ca.crt", roots), mid.cert(), 0},
		"Linkerd prefers ca-bundle.crt":     {plus(linkerd, "ca.crt", bad), mid.cert(), 0},
		"Linkerd, intermediates in one PEM": {plus(linkerd, "crt.pem", chain), mid.cert(), 0},
	} {
		b, err := pki.ReadKeyCertBundle(tc.fsys, nil, during)
		require.NoError(t, err, name)
		assert.True(t, b.Issuer().Certificate().Equal(tc.cert), name)
		assert.Contains(t, b.String(), fmt.Sprintf(" %d CRLs)", tc.crls), name)
	}
	for name, fsys := range map[string]fstest.MapFS{
		"without the file of the key": minus(istio, "ca-key.pem"), "with it": plus(istio, "ca-key.pem", bad),
		"TLS": minus(tls, "tls.key"), "Linkerd": minus(linkerd, "key.pem"),
	} {
		b, err := pki.ReadKeyCertBundle(fsys, mid.key, during)
		require.NoError(t, err, name)
		assert.True(t, b.Issuer().Certificate().Equal(mid.cert()), name)
		_, err = pki.ReadKeyCertBundle(fsys, newKey(t, "ecdsa-p256"), during)
		assert.ErrorIs(t, err, pki.ErrKeyMismatch, name)
	}
	for name, tc := range map[string]struct {
		fsys fs.FS
		want string
		also error
	}{
		"an empty directory":         {fstest.MapFS{}, "no file of a CA", fs.ErrNotExist},
		"other files":                {fstest.MapFS{"cert.pem": file(cert), "ca.crt": file(roots), "ca-crl.pem": file(crl), "istio-generated": file(nil)}, "no file of a CA", fs.ErrNotExist},
		"no ca-cert.pem":             {minus(istio, "ca-cert.pem"), "but not ca-cert.pem", nil},
		"no ca-key.pem":              {minus(istio, "ca-key.pem"), "but not ca-key.pem", nil},
		"no cert-chain.pem":          {minus(istio, "cert-chain.pem"), "but not cert-chain.pem", nil},
		"no root-cert.pem":           {minus(istio, "root-cert.pem"), "but not root-cert.pem", nil},
		"roots are empty":            {plus(istio, "root-cert.pem", nil), "roots: ", nil},
		"a lone root-cert.pem":       {fstest.MapFS{"root-cert.pem": file(roots)}, "but not ca-cert.pem, ca-key.pem, cert-chain.pem", nil},
		"a lone cert-chain.pem":      {fstest.MapFS{"cert-chain.pem": file(nil)}, "but not ca-cert.pem, ca-key.pem, root-cert.pem", nil},
		"a lone ca-key.pem":          {fstest.MapFS{"ca-key.pem": file(key)}, "but not ca-cert.pem, cert-chain.pem, root-cert.pem", nil},
		"no tls.key":                 {minus(tls, "tls.key"), "but not tls.key", nil},
		"no tls.crt":                 {minus(tls, "tls.crt"), "but not tls.crt", nil},
		"no ca.crt":                  {minus(tls, "ca.crt"), "but not ca.crt or ca-bundle.crt", nil},
		"tls.crt and Istio's files":  {plus(istio, "tls.crt", cert), "but not tls.key, ca.crt or ca-bundle.crt", nil},
		"no crt.pem":                 {minus(linkerd, "crt.pem"), "but not crt.pem", nil},
		"no key.pem":                 {minus(linkerd, "key.pem"), "but not key.pem", nil},
		"no anchors":                 {minus(linkerd, "ca-bundle.crt"), "but not ca-bundle.crt or ca.crt", nil},
		"a bad file":                 {plus(istio, "root-cert.pem", bad), "roots: ", nil},
		"a bad CRL":                  {plus(istio, "ca-crl.pem", bad), "certificate revocation list", errCRL},
		"another key":                {plus(istio, "ca-key.pem", root.keyPEM(t)), "does not belong", pki.ErrKeyMismatch},
		"a file of 1 MiB and a byte": {plus(istio, "root-cert.pem", make([]byte, 1<<20+1)), "root-cert.pem has more than 1048576 bytes", spiffe.ErrTooLarge},
		"a CRL of 1 MiB and a byte":  {plus(istio, "ca-crl.pem", make([]byte, 1<<20+1)), "ca-crl.pem has more than 1048576 bytes", spiffe.ErrTooLarge},
		"a directory":                {plus(minus(istio, "ca-key.pem"), "ca-key.pem/x", nil), "ca-key.pem is not a regular file", nil},
		"a pipe":                     {withMode(istio, "ca-key.pem", fs.ModeNamedPipe), "ca-key.pem is not a regular file", nil},
		"a device":                   {withMode(istio, "ca-crl.pem", fs.ModeDevice), "ca-crl.pem is not a regular file", nil},
		"no permission":              {failing{istio, "ca-key.pem", fs.ErrPermission}, "permission denied", fs.ErrPermission},
		"no permission for the list": {failing{istio, "ca-crl.pem", fs.ErrPermission}, "permission denied", fs.ErrPermission},
		"gone between two looks":     {vanishing{istio, "ca-key.pem"}, "ca-key.pem", nil},
	} {
		b, err := pki.ReadKeyCertBundle(tc.fsys, nil, during)
		require.ErrorContains(t, err, tc.want, name)
		require.Nil(t, b, name)
		assert.Equal(t, 1, strings.Count(err.Error(), "pki:"), "%s: %v", name, err)
		assert.Equal(t, tc.also == fs.ErrNotExist, errors.Is(err, fs.ErrNotExist), "%s: only an empty directory may look like one: %v", name, err)
		requireIs(t, err, tc.also, name)
	}
}

func withMode(base fstest.MapFS, name string, mode fs.FileMode) fs.FS {
	out := fstest.MapFS{name: {Mode: mode}}
	for n, f := range base {
		if n != name {
			out[n] = f
		}
	}
	return out
}

// failing is a file system in which one file cannot be looked at.
type failing struct {
	fs.FS
	name string
	err  error
}

func (f failing) Open(name string) (fs.File, error) {
	if name == f.name {
		return nil, &fs.PathError{Op: "open", Path: name, Err: f.err}
	}
	return f.FS.Open(name)
}

// vanishing is a file system in which one file is there when asked about, and gone when opened.
type vanishing struct {
	fstest.MapFS
	name string
}

func (f vanishing) Open(name string) (fs.File, error) {
	if name == f.name {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
	}
	return f.MapFS.Open(name)
}

// swapping is a volume that is swapped after some reads: each file is a link by way of ..data.
type swapping struct {
	generations []fstest.MapFS
	reads       *int
	every       int
}

func (s swapping) now() int { return min(*s.reads/s.every, len(s.generations)-1) }
func (s swapping) Open(name string) (fs.File, error) {
	*s.reads++
	return s.generations[s.now()].Open(name)
}
func (s swapping) Stat(name string) (fs.FileInfo, error)  { return s.generations[s.now()].Stat(name) }
func (s swapping) Lstat(name string) (fs.FileInfo, error) { return s.Stat(name) }
func (s swapping) ReadLink(name string) (string, error) {
	if name != "..data" {
		return "", &fs.PathError{Op: "readlink", Path: name, Err: fs.ErrInvalid}
	}
	return fmt.Sprintf("..%d", s.now()), nil
}

// Files of two generations are never taken for one CA.
func TestReadKeyCertBundleWhileItIsSwapped(t *testing.T) {
	t.Parallel()
	root := newTestRoot(t)
	folder := func(ca testCA, roots ...*x509.Certificate) fstest.MapFS {
		return fstest.MapFS{
			"ca-cert.pem": {Data: certsPEM(ca.cert())}, "ca-key.pem": {Data: ca.keyPEM(t)}, "cert-chain.pem": {}, "root-cert.pem": {Data: certsPEM(roots...)},
		}
	}
	mid := root.below(t)
	// Any mix of these two verifies: only the link tells that they do not belong together.
	first, second := folder(mid, root.cert()), folder(mid, root.cert(), newTestRoot(t).cert())
	second["cert-chain.pem"] = &fstest.MapFile{Data: certsPEM(mid.cert(), root.cert())}
	whole := must.Get(pki.ReadKeyCertBundle(second, nil, during))(t)
	for after := 1; after <= 4; after++ {
		reads := 0
		b := must.Get(pki.ReadKeyCertBundle(swapping{[]fstest.MapFS{first, second}, &reads, after}, nil, during))(t)
		require.True(t, b.Equal(whole), "swapped after %d reads", after)
	}
	// A volume that never comes to rest is read in the end, and what was read is verified as ever.
	reads := 0
	endless := swapping{slices.Repeat([]fstest.MapFS{first, second}, 1000), &reads, 1}
	must.Get(pki.ReadKeyCertBundle(endless, nil, during))(t)
	require.Less(t, reads, 100)

	// And on a disk, as Kubernetes does it.
	dir := t.TempDir()
	write := func(generation string, fsys fstest.MapFS) {
		require.NoError(t, os.Mkdir(filepath.Join(dir, generation), 0o700))
		for name, f := range fsys {
			require.NoError(t, os.WriteFile(filepath.Join(dir, generation, name), f.Data, 0o600))
		}
		require.NoError(t, os.Symlink(generation, filepath.Join(dir, "..tmp")))
		require.NoError(t, os.Rename(filepath.Join(dir, "..tmp"), filepath.Join(dir, "..data")))
	}
	write("..1", first)
	for name := range first {
		require.NoError(t, os.Symlink(filepath.Join("..data", name), filepath.Join(dir, name)))
	}
	require.Len(t, must.Get(pki.ReadKeyCertBundle(os.DirFS(dir), nil, during))(t).Roots(), 1)
	write("..2", second)
	require.True(t, must.Get(pki.ReadKeyCertBundle(os.DirFS(dir), nil, during))(t).Equal(whole))

	// A file that other users can write to, or that another user owns, is none of the CA's.
	if runtime.GOOS == "windows" {
		return
	}
	key := filepath.Join(dir, "..data", "ca-key.pem")
	require.NoError(t, os.Chmod(key, 0o606))
	_, err := pki.ReadKeyCertBundle(os.DirFS(dir), nil, during)
	require.ErrorIs(t, err, private.ErrUnsafe)
	require.NotErrorIs(t, err, fs.ErrNotExist)
	require.NoError(t, os.Chmod(key, 0o644))
	must.Get(pki.ReadKeyCertBundle(os.DirFS(dir), nil, during))(t)
	if os.Geteuid() == 0 {
		require.NoError(t, os.Chown(key, 54321, -1))
		require.ErrorIs(t, must.Err(pki.ReadKeyCertBundle(os.DirFS(dir), nil, during)), private.ErrUnsafe)
	}
}

func FuzzKeyCertBundle(f *testing.F) {
	root := newTestRoot(f)
	mid := root.below(f)
	cert, key, roots, crl := certsPEM(mid.cert()), mid.keyPEM(f), certsPEM(root.cert()), slices.Concat(root.crl(f), mid.crl(f))
	f.Add(cert, []byte{}, key, roots, []byte{})
	f.Add(cert, certsPEM(root.cert(), mid.cert()), key, certsPEM(root.cert(), mid.cert()), crl)
	f.Add(certsPEM(mid.cert(), root.cert()), []byte("\n"), key, roots, root.crl(f))
	f.Add(roots, []byte("# comment\n"), root.keyPEM(f), roots, crl)
	f.Add(cert[:100], cert[100:], key, roots, crl)
	f.Add(damaged(cert), cert, damaged(key), damaged(roots), damaged(crl))
	f.Fuzz(func(t *testing.T, cert, chain, key, roots, crl []byte) {
		p := keyCertPEM{Cert: cert, Chain: chain, Key: key, Roots: roots, CRL: crl}
		b, err := p.read(during)
		if err != nil {
			require.Nil(t, b)
			require.True(t, strings.HasPrefix(err.Error(), "pki: "), "%v", err)
			return
		}
		i := b.Issuer()
		require.True(t, i.Certificate().IsCA)
		again := must.Get(keyCertPEM{
			Cert: certsPEM(i.Certificate()), Chain: slices.Concat(cert, []byte("\n"), chain), Key: key, Roots: certsPEM(b.Roots()...), CRL: crl,
		}.read(during))(t)
		require.True(t, b.Equal(again))
		o := leafOptions()
		o.NotBefore, o.NotAfter = during, during.Add(time.Second)
		if leaf, err := i.Issue(o); err == nil {
			found := slices.ContainsFunc(b.Roots(), func(r *x509.Certificate) bool {
				return verifyAt(r, during, append([]*x509.Certificate{leaf}, i.Chain()...)...) == nil
			})
			require.True(t, found || i.Certificate().ExtKeyUsage != nil, "what it signs leads to a root")
		}
	})
}

// The key of a CA may be DER, in the forms that a block of PEM may have.
func TestReadKeyCertBundleDER(t *testing.T) {
	t.Parallel()
	now := time.Now()
	ec := must.Get(pki.NewKey("ecdsa-p256"))(t)
	other := rsaKey()
	sec1 := must.Get(x509.MarshalECPrivateKey(ec.(*ecdsa.PrivateKey)))(t)
	pkcs8 := must.Get(x509.MarshalPKCS8PrivateKey(ec))(t)
	pkcs1 := x509.MarshalPKCS1PrivateKey(other.(*rsa.PrivateKey))
	o := pki.CertificateOptions{CA: true, SANs: []pki.SAN{pki.IDSAN(spiffe.MustParseTrustDomain("example.org").ID())}, NotBefore: now.Add(-time.Hour), NotAfter: now.Add(time.Hour)}
	read := func(cert *x509.Certificate, key []byte) error {
		text := pki.MarshalCertificatesPEM(cert)
		_, err := pki.ReadKeyCertBundle(fstest.MapFS{"crt.pem": {Data: text}, "key.pem": {Data: key}, "ca.crt": {Data: text}}, nil, now)
		return err
	}
	root := must.Get(pki.NewRoot(ec, o))(t)
	rsaRoot := must.Get(pki.NewRoot(other, o))(t)
	require.NoError(t, read(root.Certificate(), sec1))
	require.NoError(t, read(root.Certificate(), pkcs8))
	require.NoError(t, read(rsaRoot.Certificate(), pkcs1))
	for name, key := range map[string][]byte{
		"the key of another":    pkcs1,
		"a byte less":           pkcs8[:len(pkcs8)-1],
		"a byte more":           append(append([]byte(nil), pkcs8...), 0),
		"a certificate":         root.Certificate().Raw,
		"a SEQUENCE":            {0x30, 0},
		"base64 of DER":         []byte("MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQg"),
		"the first byte":        {0x30},
		"nothing":               {},
		"a line before the DER": append([]byte("\n"), pkcs8...),
	} {
		require.Error(t, read(root.Certificate(), key), name)
	}
}

func TestParseSANs(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-2.4-8")
	root := newRoot(t)
	o := leafOptions()
	o.SANs = append(o.SANs, dnsSANs("b", "*.a.b")...)
	leaf := must.Get(root.Issue(o))(t)
	sans := must.Get(pki.ParseSANs(leaf.Extensions))(t)
	require.Equal(t, []pki.SAN{pki.IDSAN(webID), pki.DNSSAN("b"), pki.DNSSAN("*.a.b")}, sans)
	o2 := certOptions()
	o2.CommonName, o2.SANs = "x", nil
	require.Empty(t, must.Get(pki.ParseSANs(must.Get(root.Issue(o2))(t).Extensions))(t))

	// Names of every kind, and names that crypto/x509 reads and we do not.
	withSAN := func(value []byte) *x509.Certificate {
		return &x509.Certificate{Extensions: append(slices.Clone(leaf.Extensions[:1]), extension(value))}
	}
	sans, err := pki.ParseSANs(withSAN(der(tagSeq, der(0xa0, der(tagOID, []byte{0x2a}), der(0xa0, der(tagNull))), der(0x81, []byte("a@b")), der(0x87, []byte{10, 0, 0, 1}))).Extensions)
	require.NoError(t, err)
	require.Equal(t, []pki.SAN{{Type: 0, Value: string(der(tagOID, []byte{0x2a})) + string(der(0xa0, der(tagNull)))}, {Type: pki.Email, Value: "a@b"}, {Type: pki.IP, Value: "\x0a\x00\x00\x01"}}, sans)
	for _, bad := range [][]byte{nil, der(tagSeq), der(tagSeq, der(0x82, []byte("a\nb"))), append(der(tagSeq, der(0x82, []byte("a"))), 0)} {
		sans, err = pki.ParseSANs(withSAN(bad).Extensions)
		requireIs(t, err, errSAN)
		require.Nil(t, sans)
	}
	_, err = pki.ParseSANs(slices.Concat(leaf.Extensions, leaf.Extensions))
	require.EqualError(t, err, "pki: invalid subject alternative name: the extension is there twice")
}

// A strict reader does not lose a certificate without a word.
func TestDamagedBlocksAreSeen(t *testing.T) {
	t.Parallel()
	a, b := certsPEM(newRoot(t).Certificate()), certsPEM(newRoot(t).Certificate())
	for name, in := range map[string][]byte{
		"the first":    slices.Concat(damaged(a), b),
		"in between":   slices.Concat(a, damaged(a), b),
		"the last":     slices.Concat(a, damaged(b)),
		"no end":       slices.Concat(a[:len(a)-26], b),
		"another end":  slices.Concat(bytes.Replace(a, []byte("END CERTIFICATE"), []byte("END CERTIFICATES"), 1), b),
		"no base64":    slices.Concat([]byte("-----BEGIN CERTIFICATE-----\nhello!\n-----END CERTIFICATE-----\n"), b),
		"a half begin": slices.Concat([]byte("-----BEGIN CERTIFICATE\n"), b),
	} {
		certs, err := pki.ParseCertificatesPEM(in)
		require.ErrorContains(t, err, "pki: parse certificates: ", name)
		require.Nil(t, certs, name)
	}
}

// hostilePEM is text of about n bytes on which readers of PEM have been slow.
func hostilePEM(n int) map[string][]byte {
	fill := func(unit string) []byte { return bytes.Repeat([]byte(unit), n/len(unit)) }
	good := block("CERTIFICATE", []byte{0x30, 0})
	return map[string][]byte{
		"begins":                fill("-----BEGIN CERTIFICATE-----\n"),
		"begins, one line":      fill("-----BEGIN "),
		"ends":                  fill("\n-----END CERTIFICATE-----\n"),
		"half ends":             fill("\n-----END "),
		"begins and half ends":  fill("-----BEGIN X\n-----END "),
		"blocks without end":    fill("-----BEGIN X-----\nAAAA\n"),
		"blocks of no base64":   fill("-----BEGIN X-----\n!\n-----END X-----\n"),
		"another end":           fill("-----BEGIN X-----\nAAAA\n-----END Y-----\n"),
		"headers":               append([]byte("-----BEGIN X-----\n"), fill("a: b\n")...),
		"many headers":          append([]byte("-----BEGIN X-----\n"), manyHeaders(n)...),
		"many headers, whole":   slices.Concat([]byte("-----BEGIN CERTIFICATE-----\n"), manyHeaders(n), []byte("\nMAA=\n-----END CERTIFICATE-----\n")),
		"blocks of headers":     fill("-----BEGIN X-----\na: b\n\n-----END X-----\n"),
		"headers, no blank":     fill("-----BEGIN X-----\na: b\n-----END X-----\n"),
		"colons":                append([]byte("-----BEGIN X-----\n"), fill(":")...),
		"colons in lines":       append([]byte("-----BEGIN X-----\n"), fill(":\n")...),
		"one long line":         append([]byte("-----BEGIN X-----\n"), fill("A")...),
		"blanks":                append([]byte("-----BEGIN X-----\n"), fill(" ")...),
		"blanks in base64":      slices.Concat([]byte("-----BEGIN CERTIFICATE-----\n"), fill("A \t"), []byte("\n-----END CERTIFICATE-----\n")),
		"empty lines":           fill("\n"),
		"dashes":                fill("-"),
		"empty blocks":          fill("-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n"),
		"good and half a block": append([]byte(strings.Repeat(good, 900)), fill("-----BEGIN CERTIFICATE-----\nAAAA\n")...),
		"zeros":                 make([]byte, n),
	}
}

func manyHeaders(n int) []byte {
	var b bytes.Buffer
	for i := 0; b.Len() < n; i++ {
		fmt.Fprintf(&b, "h%d: v\n", i)
	}
	return b.Bytes()
}

// No reader of PEM takes more than a constant time per byte: what costs more than 50 ms has to cost less
// than twenty-four times as much as an eighth of it, where it would be sixty-four times if each byte looked
// at all others. What counts is the time of this thread, the best of several runs.
func TestHostilePEMIsLinear(t *testing.T) {
	rounds.NotShort(t)
	readers := map[string]func([]byte){
		"certificates": func(b []byte) { _, _ = pki.ParseCertificatesPEM(b) },
		"private key":  func(b []byte) { _, _ = pki.ParsePrivateKeyPEM(b) },
		"CRLs":         func(b []byte) { _, _ = readCRLs(b) },
		"request":      func(b []byte) { _, _ = pki.ParseCSRPEM(b) },
	}
	const cheap = 50 * time.Millisecond
	runtime.LockOSThread() // for threadTime
	defer runtime.UnlockOSThread()
	best := func(f func([]byte), in []byte) time.Duration {
		b := time.Hour
		for range 5 {
			start := threadTime()
			f(in)
			if b = min(b, threadTime()-start); b < cheap {
				break
			}
		}
		return b
	}
	for what, read := range readers {
		large := rounds.Of(240 << 10)
		if what == "request" {
			large /= 8
		}
		small, big := hostilePEM(large/8), hostilePEM(large)
		for name := range small {
			eight := best(read, big[name])
			if eight < cheap {
				continue
			}
			one := best(read, small[name])
			assert.Less(t, float64(eight)/float64(max(one, time.Millisecond)), 24.0, "%s: %s: %v, an eighth of it %v", what, name, eight, one)
		}
		var before, after runtime.MemStats
		for name, in := range big {
			runtime.ReadMemStats(&before)
			read(in)
			runtime.ReadMemStats(&after)
			assert.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(rounds.Of(1<<20)), "%s: %s", what, name)
		}
	}
}

func extension(value []byte) pkix.Extension {
	return pkix.Extension{Id: asn1.ObjectIdentifier{2, 5, 29, 17}, Value: value}
}
