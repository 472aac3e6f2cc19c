package pki_test

import (
	"bytes"
	"crypto"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
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

var exampleOrg = spiffe.MustParseTrustDomain("example.org")

// base is a moment with a fraction of a second.
var base = time.Date(2026, 3, 1, 12, 0, 0, 987654321, time.FixedZone("", 3600))

func rootOptions() pki.CertificateOptions {
	return pki.CertificateOptions{CA: true, SANs: []pki.SAN{pki.IDSAN(exampleOrg.ID())}, NotBefore: base, NotAfter: base.AddDate(10, 0, 0)}
}

func newRoot(t testing.TB) *pki.Issuer {
	t.Helper()
	return must.Get(pki.NewRoot(newKey(t, "ecdsa-p256"), rootOptions()))(t)
}

func leafOptions() pki.CertificateOptions {
	return pki.CertificateOptions{PublicKey: p256Key.Public(), SANs: []pki.SAN{pki.IDSAN(webID)}, NotBefore: base, NotAfter: base.Add(time.Hour)}
}

func dnsSANs(names ...string) (sans []pki.SAN) {
	for _, name := range names {
		sans = append(sans, pki.DNSSAN(name))
	}
	return sans
}

// rawCertificate is the part of a certificate that tests look at, as it is in the DER.
type rawCertificate struct {
	Version    int `asn1:"explicit,tag:0"`
	Serial     *big.Int
	Algorithm  pkix.AlgorithmIdentifier
	Issuer     asn1.RawValue
	Validity   asn1.RawValue
	Subject    asn1.RawValue
	Key        asn1.RawValue
	Extensions []pkix.Extension `asn1:"explicit,tag:3"`
}

func raw(t testing.TB, cert *x509.Certificate) rawCertificate {
	t.Helper()
	var r rawCertificate
	require.Empty(t, must.Get(asn1.Unmarshal(cert.RawTBSCertificate, &r))(t))
	require.Equal(t, 2, r.Version)
	require.Positive(t, r.Serial.Sign())
	require.LessOrEqual(t, r.Serial.BitLen(), 128)
	return r
}

// extensionLines is every extension as "OID critical value", in order.
func (r rawCertificate) extensionLines() (lines []string) {
	for _, e := range r.Extensions {
		lines = append(lines, fmt.Sprintf("%s %t %x", e.Id, e.Critical, e.Value))
	}
	return lines
}

const (
	extKeyUsageBoth = "2.5.29.37 false 301406082b0601050507030106082b06010505070302"
	notCA           = "2.5.29.19 true 3000"
)

func keyID(t testing.TB, pub crypto.PublicKey) string {
	t.Helper()
	ski := x509.Certificate{SerialNumber: big.NewInt(1), IsCA: true, BasicConstraintsValid: true}
	b := must.Get(x509.CreateCertificate(rand.Reader, &ski, &x509.Certificate{}, pub, p256Key))(t)
	return hex.EncodeToString(must.Get(x509.ParseCertificate(b))(t).SubjectKeyId)
}

func sanLine(t testing.TB, critical bool, sans ...pki.SAN) string {
	t.Helper()
	return fmt.Sprintf("2.5.29.17 %t %x", critical, sanValue(sans...))
}

func TestLeafDER(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-2.1-2", "IST-2.1-3", "IST-2.1-4", "IST-2.1-11", "IST-2.6-8", "IST-2.6-10", "IST-2.6-12")
	root := newRoot(t)
	aki := "2.5.29.35 false 30168014" + keyID(t, root.Certificate().PublicKey)
	ed := newKey(t, "ed25519")
	longID := must.Get(exampleOrg.WorkloadID(strings.Repeat("a", 2048-len("spiffe://example.org/"))))(t)
	for name, tc := range map[string]struct {
		edit    func(*pki.CertificateOptions)
		subject string
		exts    []string
	}{
		"plain": {
			func(*pki.CertificateOptions) {}, "3000",
			[]string{"2.5.29.15 true 03020780", extKeyUsageBoth, notCA, aki, "2.5.29.17 true 302586237370696666653a2f2f6578616d706c652e6f72672f6e732f70726f642f73612f776562"},
		},
		"RSA": {
			func(o *pki.CertificateOptions) { o.PublicKey = rsaKey().Public() }, "3000",
			[]string{"2.5.29.15 true 030205a0", extKeyUsageBoth, notCA, aki, sanLine(t, true, pki.IDSAN(webID))},
		},
		"Ed25519": {
			func(o *pki.CertificateOptions) { o.PublicKey = ed.Public() }, "3000",
			[]string{"2.5.29.15 true 03020780", extKeyUsageBoth, notCA, aki, sanLine(t, true, pki.IDSAN(webID))},
		},
		"dual use": {
			func(o *pki.CertificateOptions) { o.CommonName = "web" }, "300e310c300a06035504031303776562",
			[]string{"2.5.29.15 true 03020780", extKeyUsageBoth, notCA, aki, sanLine(t, false, pki.IDSAN(webID))},
		},
		"more names": {
			func(o *pki.CertificateOptions) {
				o.SANs = append(o.SANs, slices.Concat(dnsSANs("b.example.org", "*.a.example.org"), []pki.SAN{pki.IPSAN(net.IPv4(192, 0, 2, 1)), pki.IPSAN(net.IPv6loopback)})...)
			}, "3000",
			[]string{"2.5.29.15 true 03020780", extKeyUsageBoth, notCA, aki, sanLine(t, true, pki.IDSAN(webID), pki.DNSSAN("b.example.org"),
				pki.DNSSAN("*.a.example.org"), ipSAN(t, "192.0.2.1"), ipSAN(t, "::1"))},
		},
		"the longest ID": {
			func(o *pki.CertificateOptions) { o.SANs[0] = pki.IDSAN(longID) }, "3000",
			[]string{"2.5.29.15 true 03020780", extKeyUsageBoth, notCA, aki, sanLine(t, true, pki.IDSAN(longID))},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := leafOptions()
			tc.edit(&o)
			leaf := must.Get(root.Issue(o))(t)
			r := raw(t, leaf)
			assert.Equal(t, tc.subject, hex.EncodeToString(r.Subject.FullBytes))
			assert.Equal(t, root.Certificate().RawSubject, r.Issuer.FullBytes)
			assert.Equal(t, tc.exts, r.extensionLines())
			assert.True(t, pki.PublicKeysEqual(o.PublicKey, leaf.PublicKey))
			require.NoError(t, leaf.CheckSignatureFrom(root.Certificate()))

			// Whole seconds, in UTC, with the fraction cut off.
			assert.Equal(t, time.Date(2026, 3, 1, 11, 0, 0, 0, time.UTC), leaf.NotBefore)
			assert.Equal(t, time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC), leaf.NotAfter)

			assert.Equal(t, o.SANs[0], pki.IDSAN(must.Get(spiffe.IDFromCertificate(leaf))(t)))
		})
	}
}

func TestCADER(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-2.1-8", "IST-2.1-9", "IST-2.6-9", "IST-2.6-10", "IST-2.6-11", "IST-2.6-12")
	const ku, san = "2.5.29.15 true 03020106", "2.5.29.17 false 301686147370696666653a2f2f6578616d706c652e6f7267"
	rootKey, subKey := newKey(t, "ecdsa-p384"), newKey(t, "ecdsa-p256")
	rootID, subID := keyID(t, rootKey.Public()), keyID(t, subKey.Public())
	for name, tc := range map[string]struct {
		maxPathLen *int
		basic      string
	}{
		"any": {nil, "30030101ff"},
		"0":   {new(0), "30060101ff020100"},
		"1":   {new(1), "30060101ff020101"},
	} {
		t.Run("path length "+name, func(t *testing.T) {
			t.Parallel()
			o := rootOptions()
			o.MaxPathLen = tc.maxPathLen
			root := must.Get(pki.NewRoot(rootKey, o))(t)
			r := raw(t, root.Certificate())
			assert.Equal(t, []string{ku, "2.5.29.19 true " + tc.basic, "2.5.29.14 false 0414" + rootID, san}, r.extensionLines())
			assert.Equal(t, r.Issuer.FullBytes, r.Subject.FullBytes)
			assert.Equal(t, []string{"example.org"}, root.Certificate().Subject.Organization)
			assert.Equal(t, rootID, root.Certificate().Subject.SerialNumber)
			assert.Equal(t, []*x509.Certificate{root.Certificate()}, root.Chain())
			require.NoError(t, root.Certificate().CheckSignatureFrom(root.Certificate()))

			if name == "0" {
				return
			}
			o = rootOptions()
			o.PublicKey, o.Organization = subKey.Public(), "Example, Inc."
			sub := must.Get(root.Issue(o))(t)
			r = raw(t, sub)
			assert.Equal(t, []string{ku, "2.5.29.19 true 30030101ff", "2.5.29.14 false 0414" + subID, "2.5.29.35 false 30168014" + rootID, san}, r.extensionLines())
			assert.Equal(t, root.Certificate().RawSubject, r.Issuer.FullBytes)
			assert.Equal(t, []string{"Example, Inc."}, sub.Subject.Organization)
			require.NoError(t, sub.CheckSignatureFrom(root.Certificate()))
		})
	}
}

// TestChainVerifies: what we sign, the rest of the library and the standard library accept.
func TestChainVerifies(t *testing.T) {
	t.Parallel()
	now := time.Now()
	for name, key := range map[string]crypto.Signer{"P-256": newKey(t, "ecdsa-p256"), "RSA": rsaKey(), "Ed25519": newKey(t, "ed25519")} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := pki.CertificateOptions{CA: true, SANs: []pki.SAN{pki.IDSAN(exampleOrg.ID())}, NotBefore: now.Add(-time.Minute), NotAfter: now.Add(time.Hour)}
			root := must.Get(pki.NewRoot(key, o))(t)
			subKey := newKey(t, "ecdsa-p256")
			o.PublicKey, o.MaxPathLen = subKey.Public(), new(0)
			sub := must.Get(root.Issue(o))(t)
			issuer := must.Get(pki.NewIssuer(append([]*x509.Certificate{sub}, root.Chain()...), subKey))(t)
			leafKey := newKey(t, "ecdsa-p256")
			leaf, err := issuer.Issue(pki.CertificateOptions{PublicKey: leafKey.Public(), SANs: []pki.SAN{pki.IDSAN(webID)}, NotBefore: now.Add(-time.Minute), NotAfter: now.Add(time.Hour)})
			require.NoError(t, err)

			bundle := must.Get(spiffe.NewBundle(exampleOrg, spiffe.BundleContents{X509Authorities: []*x509.Certificate{root.Certificate()}}))(t)
			v := must.Get(spiffe.NewVerifier(bundle, spiffe.AllowIDs(webID), nil))(t)
			peer := must.Get(v.VerifyChain([]*x509.Certificate{leaf, sub}, spiffe.ServerRole))(t)
			require.Equal(t, webID, peer.ID())
			must.Get(spiffe.NewSVID([]*x509.Certificate{leaf, sub}, leafKey))(t)
		})
	}
}

// TestRenewRoot: a root that is renewed with its key takes over the leaves of the old one, and a root
// with another key shares no subject with it.
func TestRenewRoot(t *testing.T) {
	t.Parallel()
	key := newKey(t, "ecdsa-p256")
	before := must.Get(pki.NewRoot(key, rootOptions()))(t)
	o := rootOptions()
	o.NotBefore = o.NotBefore.AddDate(1, 0, 0)
	after := must.Get(pki.NewRoot(key, o))(t)
	require.NoError(t, must.Get(before.Issue(leafOptions()))(t).CheckSignatureFrom(after.Certificate()))
	require.Equal(t, before.Certificate().RawSubject, after.Certificate().RawSubject)
	require.NotEqual(t, before.Certificate().SerialNumber, after.Certificate().SerialNumber)
	require.NotEqual(t, before.Certificate().RawSubject, newRoot(t).Certificate().RawSubject)
}

func TestSerials(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-2.6-1")
	root := newRoot(t)
	seen := map[string]bool{}
	long := 0
	for range 300 {
		leaf := must.Get(root.Issue(leafOptions()))(t)
		n := leaf.SerialNumber
		require.Positive(t, n.Sign())
		require.LessOrEqual(t, n.BitLen(), 128)
		require.False(t, seen[n.String()], "twice")
		seen[n.String()] = true
		if n.BitLen() > 120 {
			long++
		}
	}
	require.Greater(t, long, 250, "not 128 random bits")
}

// A CA that keeps something in the serial number chooses it, within what RFC 5280 allows.
func TestGivenSerialNumber(t *testing.T) {
	t.Parallel()
	root := newRoot(t)
	longest := new(big.Int).Sub(new(big.Int).Lsh(big.NewInt(1), 159), big.NewInt(1))
	for n, ok := range map[*big.Int]bool{
		big.NewInt(1): true, longest: true, new(big.Int).Add(longest, big.NewInt(1)): false, big.NewInt(0): false, big.NewInt(-1): false,
	} {
		o := pki.CertificateOptions{
			PublicKey: newKey(t, "ecdsa-p256").Public(), SANs: []pki.SAN{pki.DNSSAN("a.test")}, NotBefore: base, NotAfter: base.Add(time.Minute), SerialNumber: n,
		}
		leaf, err := root.Issue(o)
		if !ok {
			require.ErrorContains(t, err, "serial number", "%v", n)
			continue
		}
		require.NoError(t, err, "%v", n)
		require.Zero(t, n.Cmp(leaf.SerialNumber))
		require.Zero(t, n.Cmp(must.Get(x509.ParseCertificate(leaf.Raw))(t).SerialNumber))
	}
}

func TestIssueLeafRefuses(t *testing.T) {
	t.Parallel()
	rootKey := newKey(t, "ecdsa-p256")
	root := must.Get(pki.NewRoot(rootKey, rootOptions()))(t)
	end := root.Certificate().NotAfter
	small := smallKey()
	for name, tc := range map[string]struct {
		rule string
		also error
		edit func(*pki.CertificateOptions)
	}{
		"no ID":        {"X5-1", errSAN, func(o *pki.CertificateOptions) { o.SANs[0] = pki.IDSAN(spiffe.ID{}) }},
		"no path":      {"X5-6", nil, func(o *pki.CertificateOptions) { o.SANs[0] = pki.IDSAN(exampleOrg.ID()) }},
		"other domain": {"X5-11", nil, func(o *pki.CertificateOptions) { o.SANs[0] = pki.IDSAN(spiffe.MustParseID("spiffe://other.test/web")) }},
		"longer domain": {"X5-11", nil, func(o *pki.CertificateOptions) {
			o.SANs[0] = pki.IDSAN(spiffe.MustParseID("spiffe://example.org.evil.test/web"))
		}},
		"unreadable":            {"GO-3", errUnreadable, func(o *pki.CertificateOptions) { o.SANs[0] = pki.IDSAN(spiffe.MustParseID("spiffe://a..b/web")) }},
		"no key":                {"", pki.ErrWeakKey, func(o *pki.CertificateOptions) { o.PublicKey = nil }},
		"weak key":              {"", pki.ErrWeakKey, func(o *pki.CertificateOptions) { o.PublicKey = small.Public() }},
		"private key":           {"", pki.ErrWeakKey, func(o *pki.CertificateOptions) { o.PublicKey = p256Key }},
		"the issuer's key":      {"X5-5", nil, func(o *pki.CertificateOptions) { o.PublicKey = rootKey.Public() }},
		"empty DNS name":        {"", errSAN, func(o *pki.CertificateOptions) { o.SANs = append(o.SANs, dnsSANs("")...) }},
		"DNS names in a string": {"", errSAN, func(o *pki.CertificateOptions) { o.SANs = append(o.SANs, dnsSANs("a.com,b.com")...) }},
		"an ID as DNS name": {"", errSAN, func(o *pki.CertificateOptions) {
			o.SANs = append(o.SANs, dnsSANs("ok.com", "spiffe://example.org/admin")...)
		}},
		"an address as name": {"", errSAN, func(o *pki.CertificateOptions) { o.SANs = append(o.SANs, dnsSANs("192.0.2.1")...) }},
		"nil address":        {"", errSAN, func(o *pki.CertificateOptions) { o.SANs = append(o.SANs, pki.IPSAN(nil)) }},
		"address of 5 bytes": {"", errSAN, func(o *pki.CertificateOptions) { o.SANs = append(o.SANs, pki.IPSAN(make(net.IP, 5))) }},
		"too many names": {"", spiffe.ErrTooLarge, func(o *pki.CertificateOptions) {
			o.SANs = append(o.SANs, dnsSANs(slices.Repeat([]string{"a"}, 1000)...)...)
		}},
		"names too large": {"", spiffe.ErrTooLarge, func(o *pki.CertificateOptions) {
			o.SANs = append(o.SANs, dnsSANs(slices.Repeat([]string{strings.Repeat("a.", 126) + "a"}, 258)...)...)
		}},
		"long CN":          {"", nil, func(o *pki.CertificateOptions) { o.CommonName = strings.Repeat("a", 65) }},
		"CN not UTF-8":     {"", nil, func(o *pki.CertificateOptions) { o.CommonName = "\xff" }},
		"CN with NUL":      {"", nil, func(o *pki.CertificateOptions) { o.CommonName = "a\x00" }},
		"no NotBefore":     {"", nil, func(o *pki.CertificateOptions) { o.NotBefore = time.Time{} }},
		"no NotAfter":      {"", nil, func(o *pki.CertificateOptions) { o.NotAfter = time.Time{} }},
		"backwards":        {"", nil, func(o *pki.CertificateOptions) { o.NotBefore, o.NotAfter = o.NotAfter, o.NotBefore }},
		"less than 1 s":    {"", nil, func(o *pki.CertificateOptions) { o.NotAfter = o.NotBefore.Add(12 * time.Millisecond) }},
		"before 1950":      {"", nil, func(o *pki.CertificateOptions) { o.NotBefore = time.Date(1949, 12, 31, 0, 0, 0, 0, time.UTC) }},
		"after 9999":       {"", nil, func(o *pki.CertificateOptions) { o.NotAfter = time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC) }},
		"outlives by 1 s":  {"", errOutlivesIssuer, func(o *pki.CertificateOptions) { o.NotAfter = end.Add(time.Second) }},
		"after the issuer": {"", errOutlivesIssuer, func(o *pki.CertificateOptions) { o.NotBefore, o.NotAfter = end.Add(time.Hour), end.Add(2*time.Hour) }},
	} {
		o := leafOptions()
		tc.edit(&o)
		leaf, err := root.Issue(o)
		require.Nil(t, leaf, name)
		pe := must.As[*pki.ProfileError](err)(t, "%s: %v", name, err)
		assert.Equal(t, "leaf", pe.What, name)
		assert.Equal(t, tc.rule, pe.Rule, "%s: %v", name, err)
		assert.True(t, strings.HasPrefix(err.Error(), "pki: leaf: "), "%v", err)
		assert.Equal(t, 1, strings.Count(err.Error(), "pki:"), "%v", err)
		assert.NotRegexp(t, `[A-Z0-9]+-[0-9]+\)$`, err.Error(), "rules of the conformance table are not for readers of errors")
		for _, sentinel := range []error{pki.ErrWeakKey, errSAN, errOutlivesIssuer, errUnreadable, spiffe.ErrTooLarge} {
			if sentinel != errSAN || tc.also != spiffe.ErrTooLarge {
				assert.Equal(t, tc.also == sentinel, is(err, sentinel), "%s: %v", name, err)
			}
		}
	}
	// The edge: as long as the issuer, and a fraction of a second more, which is cut off.
	for _, d := range []time.Duration{0, 999 * time.Millisecond} {
		o := leafOptions()
		o.NotAfter = end.Add(d)
		require.Equal(t, end, must.Get(root.Issue(o))(t).NotAfter)
	}
}

func TestCARefuses(t *testing.T) {
	t.Parallel()
	key, subKey := newKey(t, "ecdsa-p256"), newKey(t, "ecdsa-p256")
	withPathLen := func(n *int) *pki.Issuer {
		o := rootOptions()
		o.MaxPathLen = n
		return must.Get(pki.NewRoot(key, o))(t)
	}
	root, none, two := withPathLen(nil), withPathLen(new(0)), withPathLen(new(2))
	// below returns a CA without a limit of its own below one with a limit.
	below := func(above *pki.Issuer) *pki.Issuer {
		between := newKey(t, "ecdsa-p256")
		o := rootOptions()
		o.PublicKey = between.Public()
		cert := must.Get(above.Issue(o))(t)
		return must.Get(pki.NewIssuer([]*x509.Certificate{cert, above.Certificate()}, between))(t)
	}
	belowOne, belowTwo := below(withPathLen(new(1))), below(two)
	for name, tc := range map[string]struct {
		issuer *pki.Issuer
		rule   string
		also   error
		edit   func(*pki.CertificateOptions)
	}{
		"no trust domain":  {root, "X5-10", nil, func(o *pki.CertificateOptions) { o.SANs = []pki.SAN{pki.IDSAN(spiffe.TrustDomain{}.ID())} }},
		"unreadable":       {root, "GO-3", errUnreadable, func(o *pki.CertificateOptions) { o.SANs = []pki.SAN{pki.IDSAN(spiffe.MustParseTrustDomain("a.").ID())} }},
		"no key":           {root, "", pki.ErrWeakKey, func(o *pki.CertificateOptions) { o.PublicKey = nil }},
		"unknown key":      {root, "", pki.ErrWeakKey, func(o *pki.CertificateOptions) { o.PublicKey = unsupportedKey{} }},
		"the issuer's key": {root, "", nil, func(o *pki.CertificateOptions) { o.PublicKey = key.Public() }},
		"organization":     {root, "", nil, func(o *pki.CertificateOptions) { o.Organization = strings.Repeat("a", 65) }},
		"organization NUL": {root, "", nil, func(o *pki.CertificateOptions) { o.Organization = "a\x00" }},
		"negative length":  {root, "X5-14", nil, func(o *pki.CertificateOptions) { o.MaxPathLen = new(-1) }},
		"below 0":          {none, "X5-14", nil, func(*pki.CertificateOptions) {}},
		"as long":          {two, "X5-14", nil, func(o *pki.CertificateOptions) { o.MaxPathLen = new(2) }},
		"none above":       {belowOne, "X5-14", nil, func(*pki.CertificateOptions) {}},
		"as long as above": {belowTwo, "X5-14", nil, func(o *pki.CertificateOptions) { o.MaxPathLen = new(1) }},
		"backwards":        {root, "", nil, func(o *pki.CertificateOptions) { o.NotAfter = o.NotBefore }},
		"outlives":         {root, "", errOutlivesIssuer, func(o *pki.CertificateOptions) { o.NotAfter = o.NotAfter.AddDate(0, 0, 1) }},
	} {
		o := rootOptions()
		o.PublicKey = subKey.Public()
		tc.edit(&o)
		cert, err := tc.issuer.Issue(o)
		require.Nil(t, cert, name)
		assert.Equal(t, tc.rule, must.As[*pki.ProfileError](err)(t, "%s: %v", name, err).Rule, "%s: %v", name, err)
		assert.True(t, strings.HasPrefix(err.Error(), "pki: CA certificate: "), "%v", err)
		requireIs(t, err, tc.also, name)
	}
	o := rootOptions()
	o.PublicKey, o.MaxPathLen = subKey.Public(), new(1)
	require.NoError(t, must.Err(two.Issue(o)))
	for _, n := range []*int{nil, new(0)} {
		last := o
		last.MaxPathLen = n
		cert := must.Get(belowTwo.Issue(last))(t)
		_, err := pki.NewIssuer(append([]*x509.Certificate{cert}, belowTwo.Chain()...), subKey)
		require.NoError(t, err, "what was signed can sign")
	}
	o.SANs = []pki.SAN{pki.IDSAN(spiffe.MustParseTrustDomain("other.test").ID())} // X5-12
	must.Get(two.Issue(o))(t)
	// A name that does not fit into an organization is left out of the subject.
	o.SANs = []pki.SAN{pki.IDSAN(spiffe.MustParseTrustDomain(strings.Repeat("a", 65)).ID())}
	cert := must.Get(root.Issue(o))(t)
	require.Empty(t, cert.Subject.Organization)
	require.NotEmpty(t, cert.Subject.SerialNumber)

	require.EqualError(t, must.Err(pki.NewRoot(nil, rootOptions())), "pki: CA certificate: no private key")
	require.ErrorIs(t, must.Err(pki.NewRoot(key, o)), pki.ErrKeyMismatch)
	o = rootOptions()
	o.PublicKey = key.Public()
	must.Get(pki.NewRoot(key, o))(t)
}

// unsupportedKey is a kind of key that package pki does not know.
type unsupportedKey struct{}

func TestNewIssuerRefuses(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-2.1-4")
	key := newKey(t, "ecdsa-p256")
	other := newKey(t, "ecdsa-p256")
	small := smallKey()
	good := func() *x509.Certificate {
		return &x509.Certificate{
			SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "CA"}, NotBefore: base, NotAfter: base.AddDate(1, 0, 0),
			IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign, URIs: []*url.URL{exampleOrg.ID().URL()},
		}
	}
	selfSigned := func(key crypto.Signer, edit func(*x509.Certificate)) *x509.Certificate {
		tmpl := good()
		edit(tmpl)
		return createCertificate(t, tmpl, key)
	}
	same := func(*x509.Certificate) {}
	uris := func(all ...string) func(*x509.Certificate) {
		return func(c *x509.Certificate) {
			c.URIs = nil
			for _, s := range all {
				u := must.Get(url.Parse(s))(t)
				c.URIs = append(c.URIs, u)
			}
		}
	}
	for name, tc := range map[string]struct {
		chain []*x509.Certificate
		key   crypto.Signer
		rule  string
		also  error
	}{
		"no chain":         {nil, key, "", nil},
		"nil certificate":  {[]*x509.Certificate{nil}, key, "", nil},
		"nil in the chain": {[]*x509.Certificate{selfSigned(key, same), nil}, key, "", nil},
		"no key":           {[]*x509.Certificate{selfSigned(key, same)}, nil, "", nil},
		"another key":      {[]*x509.Certificate{selfSigned(key, same)}, other, "", pki.ErrKeyMismatch},
		"weak key":         {[]*x509.Certificate{selfSigned(small, same)}, small, "", pki.ErrWeakKey},
		"not a CA":         {[]*x509.Certificate{selfSigned(key, func(c *x509.Certificate) { c.IsCA = false })}, key, "X5-8", nil},
		"no constraints":   {[]*x509.Certificate{selfSigned(key, func(c *x509.Certificate) { c.IsCA, c.BasicConstraintsValid = false, false })}, key, "X5-8", nil},
		"cannot sign":      {[]*x509.Certificate{selfSigned(key, func(c *x509.Certificate) { c.KeyUsage = x509.KeyUsageCRLSign })}, key, "X5-17", nil},
		"no key usage":     {[]*x509.Certificate{selfSigned(key, func(c *x509.Certificate) { c.KeyUsage = 0 })}, key, "X5-17", nil},
		"no subject":       {[]*x509.Certificate{selfSigned(key, func(c *x509.Certificate) { c.Subject = pkix.Name{} })}, key, "", nil},
		"path":             {[]*x509.Certificate{selfSigned(key, uris("spiffe://example.org/ca"))}, key, "X5-9", nil},
		"two IDs":          {[]*x509.Certificate{selfSigned(key, uris("spiffe://example.org", "spiffe://other.test"))}, key, "X5-9", nil},
		"bad ID":           {[]*x509.Certificate{selfSigned(key, uris("spiffe://example.org/"))}, key, "X5-9", nil},
		"not linked":       {[]*x509.Certificate{selfSigned(key, same), selfSigned(other, same)}, key, "X5-30", nil},
	} {
		_, err := pki.NewIssuer(tc.chain, tc.key)
		assert.Equal(t, tc.rule, must.As[*pki.ProfileError](err)(t, "%s: %v", name, err).Rule, "%s: %v", name, err)
		assert.True(t, strings.HasPrefix(err.Error(), "pki: issuer: "), "%v", err)
		requireIs(t, err, tc.also, name)
	}
	for name, edit := range map[string]func(*x509.Certificate){
		"as it is":      same,
		"no ID":         uris(),
		"another URI":   uris("https://ca.example.org"),
		"more key uses": func(c *x509.Certificate) { c.KeyUsage |= x509.KeyUsageDigitalSignature },
		"with names": func(c *x509.Certificate) {
			c.DNSNames, c.EmailAddresses = []string{"ca.example.org"}, []string{"ca@example.org"}
		},
	} {
		i, err := pki.NewIssuer([]*x509.Certificate{selfSigned(key, edit)}, remote{key})
		require.NoError(t, err, name)
		o := leafOptions()
		require.NoError(t, must.Err(i.Issue(o)), name)
		o.SANs[0] = pki.IDSAN(spiffe.MustParseID("spiffe://other.test/web"))
		_, err = i.Issue(o)
		_, bound := errors.AsType[*pki.ProfileError](err)
		require.Equal(t, len(i.Certificate().URIs) == 1 && i.Certificate().URIs[0].Scheme == "spiffe", bound, "%s: %v", name, err)
	}
	// A CA whose subject is that of its leaves still names its key in them.
	ca := selfSigned(key, func(c *x509.Certificate) { c.Subject, c.SubjectKeyId = pkix.Name{CommonName: "web"}, []byte{1, 2, 3} })
	i := must.Get(pki.NewIssuer([]*x509.Certificate{ca}, key))(t)
	o := leafOptions()
	o.CommonName = "web"
	leaf := must.Get(i.Issue(o))(t)
	require.Equal(t, ca.RawSubject, leaf.RawSubject)
	require.Equal(t, []byte{1, 2, 3}, leaf.AuthorityKeyId)
}

func TestIssuerKeyFails(t *testing.T) {
	t.Parallel()
	root := newRoot(t)
	key := newKey(t, "ecdsa-p256")
	o := rootOptions()
	o.PublicKey = key.Public()
	sub := must.Get(root.Issue(o))(t)
	errHSM := errors.New("the token is not there")
	for name, sign := range map[string]func(io.Reader, []byte, crypto.SignerOpts) ([]byte, error){
		"fails":         func(io.Reader, []byte, crypto.SignerOpts) ([]byte, error) { return nil, errHSM },
		"another key's": newKey(t, "ecdsa-p256").Sign,
		"not ASN.1":     func(io.Reader, []byte, crypto.SignerOpts) ([]byte, error) { return make([]byte, 64), nil },
		"of what it had": func(r io.Reader, d []byte, o crypto.SignerOpts) ([]byte, error) {
			return key.Sign(r, make([]byte, len(d)), o)
		},
	} {
		i := must.Get(pki.NewIssuer([]*x509.Certificate{sub}, broken{key, sign}))(t)
		leaf, err := i.Issue(leafOptions())
		require.ErrorContains(t, err, "pki: leaf: sign: ", name)
		require.Nil(t, leaf)
		require.Equal(t, name == "fails", errors.Is(err, errHSM))
		_, ok := errors.AsType[*pki.ProfileError](err)
		require.False(t, ok, "a broken key is not the caller's fault")
	}
}

// TestReadableTrustDomains compares our check with what crypto/x509 does.
func TestReadableTrustDomains(t *testing.T) {
	t.Parallel()
	key := newKey(t, "ecdsa-p256")
	for name, want := range map[string]bool{
		"example.org": true, "a": true, "-": true, "_": true, "a_b": true, "a-": true, "1.2.3.4": true, "1": true, "0x7f": true,
		strings.Repeat("a", 64) + ".org": true, strings.Repeat("a", 255): true, strings.Repeat("a.", 127) + "a": true, "xn--": true,
		".": false, "..": false, ".a": false, "a.": false, "a..b": false, "1.2.3.4.": false, "...": false,
	} {
		td := spiffe.MustParseTrustDomain(name)
		_, err := pki.NewRoot(key, pki.CertificateOptions{SANs: []pki.SAN{pki.IDSAN(td.ID())}, NotBefore: base, NotAfter: base.AddDate(1, 0, 0)})
		assert.Equal(t, want, err == nil, "%q: %v", name, err)
		assert.Equal(t, !want, is(err, errUnreadable), "%q: %v", name, err)

		tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), ExtraExtensions: []pkix.Extension{{Id: asn1.ObjectIdentifier{2, 5, 29, 17}, Value: sanValue(pki.IDSAN(td.ID()))}}}
		b := must.Get(x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key))(t)
		_, err = x509.ParseCertificate(b)
		assert.Equal(t, want, err == nil, "crypto/x509 changed its mind about %q: %v", name, err)
	}
}

// assertNoKey prints values, and structs that hold them out of reach of their methods, in every way.
func assertNoKey(t *testing.T, secret []byte, buf *bytes.Buffer, values ...any) {
	t.Helper()
	for _, v := range values {
		type holder struct{ v any }
		for _, x := range []any{v, &v, holder{v}, &holder{v}, []any{v}, map[string]any{"k": v}} {
			for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "%d", "%T", "%p"} {
				fmt.Fprintf(buf, verb+"\n", x)
			}
			_ = json.NewEncoder(buf).Encode(x)
		}
	}
	text := buf.String()
	var decimal []string
	for _, b := range secret[:8] {
		decimal = append(decimal, fmt.Sprint(b))
	}
	for _, form := range []string{
		string(secret[:8]), hex.EncodeToString(secret[:8]), strings.ToUpper(hex.EncodeToString(secret[:8])), strings.Join(decimal, " "),
		strings.Join(decimal, ", "), fmt.Sprintf("%#v", secret[:8])[len("[]byte{"):][:30],
	} {
		assert.False(t, strings.Contains(text, form), "%q shows the key", form) // without printing it once more
	}
}

// TestCSRIsNotAuthority: of a request that wants everything, the certificate has the key and no more.
func TestCSRIsNotAuthority(t *testing.T) {
	t.Parallel()
	want := request{
		subject: der(tagSeq, rdn(oidO, tagUTF8, "Evil"), rdn(oidCN, tagUTF8, "admin")),
		attrs: attributes(extensions(sanExt("admin.example.org"), ext(oidBasic, yes, value(unhex("30030101ff"))),
			ext(oidKeyUsage, yes, value(unhex("03020106"))), ext(oidUnknown, value([]byte("junk"))))),
	}
	csr := must.Get(pki.ParseCSR(want.der(t)))(t)
	require.Equal(t, "admin", csr.CommonName())
	o := leafOptions()
	o.PublicKey = csr.PublicKey()
	leaf := must.Get(newRoot(t).Issue(o))(t)
	require.Equal(t, []byte{0x30, 0}, leaf.RawSubject)
	require.False(t, leaf.IsCA)
	require.Equal(t, x509.KeyUsageDigitalSignature, leaf.KeyUsage)
	require.Empty(t, leaf.DNSNames)
	require.Len(t, leaf.Extensions, 5)
	require.NotContains(t, string(leaf.Raw), "dmin")
}

// The signature is the usual one of the issuer's key, whatever the key of the leaf is.
func TestSignatures(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-2.2-1", "IST-2.2-2", "IST-2.2-3", "IST-2.6-14")
	for want, key := range map[x509.SignatureAlgorithm]crypto.Signer{
		x509.SHA256WithRSA: rsaKey(), x509.ECDSAWithSHA256: newKey(t, "ecdsa-p256"), x509.ECDSAWithSHA384: newKey(t, "ecdsa-p384"), x509.PureEd25519: newKey(t, "ed25519"),
	} {
		root := must.Get(pki.NewRoot(key, rootOptions()))(t)
		leaf := must.Get(root.Issue(leafOptions()))(t)
		csr := must.Get(pki.NewCSR(key, pki.CSROptions{SANs: []pki.SAN{pki.IDSAN(webID)}}))(t)
		request := must.Get(x509.ParseCertificateRequest(csr.DER()))(t)
		for _, got := range []x509.SignatureAlgorithm{root.Certificate().SignatureAlgorithm, leaf.SignatureAlgorithm, request.SignatureAlgorithm} {
			assert.Equal(t, want, got)
		}
	}
}
