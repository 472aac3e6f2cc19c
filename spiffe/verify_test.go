package spiffe_test

import (
	"bytes"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"errors"
	"math/big"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// noBundles is a source that knows no trust domain.
type noBundles struct{}

func (noBundles) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	return nil, spiffe.ErrUnknownTrustDomain
}

// bundleFunc is a source that answers as it likes.
type bundleFunc func(spiffe.TrustDomain) (*spiffe.Bundle, error)

func (f bundleFunc) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) { return f(td) }

func (c *issued) parse(t testing.TB) *x509.Certificate {
	t.Helper()
	return must.Get(x509.ParseCertificate(c.der))(t)
}

func bundleOf(t testing.TB, td string, roots ...*x509.Certificate) *spiffe.Bundle {
	t.Helper()
	return must.Get(spiffe.NewBundle(spiffe.MustParseTrustDomain(td), spiffe.BundleContents{X509Authorities: roots}))(t)
}

func verifierAt(t testing.TB, at time.Time, src spiffe.BundleSource, allow spiffe.Policy) *spiffe.Verifier {
	t.Helper()
	return must.Get(spiffe.NewVerifier(src, allow, func() time.Time { return at }))(t)
}

func TestVerifyChain(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-1.5-7", "IST-1.5-9")
	root := caSpec("ca1", "spiffe://example.org").issue(nil)
	mid := caSpec("int1", "spiffe://example.org").with(func(s *certSpec) { s.notAfter = now.Add(30 * time.Minute) }).issue(root)
	leaf := leafSpec(webID.String()).issue(mid)
	chain := []*x509.Certificate{leaf.parse(t), mid.parse(t)}
	v := verifierAt(t, now, bundleOf(t, "example.org", root.parse(t)), spiffe.AllowIDs(webID))

	peer := must.Get(v.VerifyChain(chain, spiffe.ServerRole))(t)
	assert.Equal(t, webID, peer.ID())
	assert.Equal(t, webID.String(), peer.String())
	assert.Same(t, chain[0], peer.Chain()[0])
	assert.True(t, now.Add(30*time.Minute).Equal(peer.NotAfter()), "the earliest end: %v", peer.NotAfter())
	got := peer.Chain()
	require.Len(t, got, 3)
	for i, want := range []*issued{leaf, mid, root} {
		assert.Equal(t, want.der, got[i].Raw)
	}
	got[0] = nil
	assert.NotNil(t, peer.Chain()[0], "the slice is the caller's")

	assert.True(t, (&spiffe.Peer{}).ID().IsZero())
	assert.Equal(t, "invalid SPIFFE ID", (&spiffe.Peer{}).String())
}

// While an old and a new root overlap, the proof is the path that lasts longest.
func TestVerifyChainLongestPath(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "X5-30")
	spec := caSpec("ca1", "spiffe://example.org")
	long := spec.issue(nil)
	short := spec.with(func(s *certSpec) { s.notAfter = now.Add(time.Minute) }).issue(nil)
	leaf := leafSpec(webID.String()).issue(long).parse(t)
	for _, roots := range [][]*issued{{long, short}, {short, long}} {
		b := bundleOf(t, "example.org", roots[0].parse(t), roots[1].parse(t))
		peer, err := verifierAt(t, now, b, spiffe.AllowIDs(webID)).VerifyChain([]*x509.Certificate{leaf}, spiffe.AnyRole)
		require.NoError(t, err)
		assert.True(t, leaf.NotAfter.Equal(peer.NotAfter()), "%v", peer.NotAfter())
		assert.Equal(t, long.der, peer.Chain()[1].Raw)
	}
}

// What a workload needs of its own certificate: no extended key usage on the path rules out a role. A certificate
// without the extension serves in every role, wherever it is on the path.
func TestVerifyRoles(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "X5-39", "IST-1.5-11")
	private := asn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 99999, 1}
	anyUsage := asn1.ObjectIdentifier{2, 5, 29, 37, 0}
	root := caSpec("ca1", "spiffe://example.org").issue(nil)
	v := verifierAt(t, now, bundleOf(t, "example.org", root.parse(t)), spiffe.AllowIDs(webID))
	type usages = []asn1.ObjectIdentifier
	for _, c := range []struct {
		name                 string
		leaf, above          usages
		server, client, both bool
	}{
		{"none", nil, nil, true, true, true},
		{"both", usages{serverAuth, clientAuth}, nil, true, true, true},
		{"both and more", usages{codeSigning, private, clientAuth, serverAuth}, nil, true, true, true},
		{"any", usages{anyUsage}, nil, true, true, true},
		{"server", usages{serverAuth}, nil, true, false, false},
		{"client", usages{clientAuth}, nil, false, true, false},
		{"code signing", usages{codeSigning}, nil, false, false, false},
		{"an unknown one", usages{private}, nil, false, false, false},
		{"none below both", nil, usages{serverAuth, clientAuth}, true, true, true},
		{"none below server", nil, usages{serverAuth}, true, false, false},
		{"both below client", usages{serverAuth, clientAuth}, usages{clientAuth}, false, true, false},
		{"server below client", usages{serverAuth}, usages{clientAuth}, false, false, false},
		{"any below code signing", usages{anyUsage}, usages{codeSigning}, false, false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			mid := caSpec("int1", "spiffe://example.org").with(func(s *certSpec) { s.ext = c.above }).issue(root)
			leaf := leafSpec(webID.String()).with(func(s *certSpec) { s.ext = c.leaf }).issue(mid)
			chain := []*x509.Certificate{leaf.parse(t), mid.parse(t)}
			for role, good := range map[spiffe.Role]bool{
				spiffe.AnyRole: true, spiffe.ServerRole: c.server, spiffe.ClientRole: c.client, spiffe.BothRoles: c.both,
			} {
				for range 2 { // from memory, too
					_, err := v.VerifyChain(chain, role)
					if good {
						assert.NoError(t, err, "role %d", role)
						continue
					}
					e := must.As[*spiffe.VerifyError](err)(t, role)
					assert.Equal(t, "chain", e.Stage)
					assert.Equal(t, "X5-39", e.Rule)
				}
			}
		})
	}
}

func TestVerifyErrors(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "X5-5", "X5-30", "X5-31", "X5-32", "X5-37", "X5-38", "IST-1.5-10")
	root := caSpec("ca1", "spiffe://example.org").issue(nil)
	home := bundleOf(t, "example.org", root.parse(t))
	spec := leafSpec(webID.String())
	good := spec.issue(root).parse(t)
	chain := func(c ...*x509.Certificate) []*x509.Certificate { return c }
	errDown := errors.New("the agent is down")
	source := func(b *spiffe.Bundle, err error) spiffe.BundleSource {
		return bundleFunc(func(spiffe.TrustDomain) (*spiffe.Bundle, error) { return b, err })
	}
	webOnly := spiffe.AllowIDs(webID)

	for _, c := range []struct {
		name  string
		src   spiffe.BundleSource
		allow spiffe.Policy
		chain []*x509.Certificate
		role  spiffe.Role
		want  spiffe.VerifyError
		text  string
	}{
		{
			name: "no certificate", chain: chain(), src: home, allow: webOnly,
			want: spiffe.VerifyError{Stage: "leaf"},
			text: "spiffe: verify peer: leaf: the peer presented no certificate",
		},
		{
			name: "unknown role", chain: chain(good), src: home, allow: webOnly, role: 4,
			want: spiffe.VerifyError{Stage: "leaf"},
			text: "spiffe: verify peer: leaf: unknown Role(4)",
		},
		{
			name: "nil leaf", chain: chain(nil), src: home, allow: webOnly,
			want: spiffe.VerifyError{Stage: "chain"},
			text: "spiffe: verify peer: chain: the chain has a nil certificate",
		},
		{
			name: "nil certificate", chain: chain(good, nil), src: home, allow: webOnly,
			want: spiffe.VerifyError{Stage: "chain"},
			text: "spiffe: verify peer: chain: the chain has a nil certificate",
		},
		{
			name: "17 certificates", chain: chain(make([]*x509.Certificate, 17)...), src: home, allow: webOnly,
			want: spiffe.VerifyError{Stage: "chain", Err: spiffe.ErrTooLarge},
			text: "spiffe: verify peer: chain: 17 certificates, the limit is 16: input too large",
		},
		{
			name: "no ID", src: home, allow: webOnly, chain: chain(spec.with(func(s *certSpec) { s.uris, s.dns = nil, []string{"a"} }).issue(root).parse(t)),
			want: spiffe.VerifyError{Stage: "leaf", Rule: "X5-3"},
			text: "spiffe: verify peer: leaf: invalid X.509-SVID: there is no URI name, so no SPIFFE ID",
		},
		{
			name: "broken ID", src: home, allow: webOnly, chain: chain(spec.with(func(s *certSpec) { s.uris = []string{"spiffe://Example.org/web"} }).issue(root).parse(t)),
			want: spiffe.VerifyError{Stage: "leaf", Rule: "X5-37"},
			text: `spiffe: verify peer: leaf: invalid X.509-SVID: the URI name is not a SPIFFE ID: invalid ID "spiffe://Example.org/web" at byte 9: upper case is not allowed in a trust domain name`,
		},
		{
			name: "CA", src: home, allow: webOnly, chain: chain(root.parse(t)),
			want: spiffe.VerifyError{Stage: "leaf", ID: home.TrustDomain().ID(), Rule: "X5-32"},
			text: `spiffe: verify peer "spiffe://example.org": leaf: invalid X.509-SVID: it is a CA certificate`,
		},
		{
			name: "unknown trust domain", src: noBundles{}, allow: webOnly, chain: chain(good),
			want: spiffe.VerifyError{Stage: "bundle", ID: webID, Rule: "X5-38", Err: spiffe.ErrUnknownTrustDomain},
			text: `spiffe: verify peer "spiffe://example.org/ns/prod/sa/web": bundle: no trust bundle for this trust domain`,
		},
		{
			name: "source fails", src: source(nil, errDown), allow: webOnly, chain: chain(good),
			want: spiffe.VerifyError{Stage: "bundle", ID: webID, Rule: "X5-38", Err: errDown},
			text: `spiffe: verify peer "spiffe://example.org/ns/prod/sa/web": bundle: the agent is down`,
		},
		{
			name: "source gives nothing", src: source(nil, nil), allow: webOnly, chain: chain(good),
			want: spiffe.VerifyError{Stage: "bundle", ID: webID, Rule: "X5-38", Err: spiffe.ErrUnknownTrustDomain},
			text: `spiffe: verify peer "spiffe://example.org/ns/prod/sa/web": bundle: trust domain "example.org": no trust bundle for this trust domain`,
		},
		{
			name: "source gives another domain's bundle", src: source(bundleOf(t, "other.test", root.parse(t)), nil), allow: webOnly, chain: chain(good),
			want: spiffe.VerifyError{Stage: "bundle", ID: webID, Rule: "X5-38", Err: spiffe.ErrUnknownTrustDomain},
			text: `spiffe: verify peer "spiffe://example.org/ns/prod/sa/web": bundle: the bundle source was asked for "example.org" and returned the bundle of "other.test": no trust bundle for this trust domain`,
		},
		{
			name: "empty bundle", src: bundleOf(t, "example.org"), allow: webOnly, chain: chain(good),
			want: spiffe.VerifyError{Stage: "bundle", ID: webID, Rule: "X5-38", Err: spiffe.ErrNoAuthority},
			text: `spiffe: verify peer "spiffe://example.org/ns/prod/sa/web": bundle: trust domain "example.org": the trust bundle has no X.509 authority`,
		},
		{
			name: "other authority", src: bundleOf(t, "example.org", caSpec("ca2", "").issue(nil).parse(t)), allow: webOnly, chain: chain(good),
			want: spiffe.VerifyError{Stage: "chain", ID: webID, Rule: "X5-31"},
			text: `spiffe: verify peer "spiffe://example.org/ns/prod/sa/web": chain: x509: certificate signed by unknown authority`,
		},
		{
			name: "not parsed", src: home, allow: webOnly, chain: chain(func() *x509.Certificate { c := *good; c.Raw = nil; return &c }()),
			want: spiffe.VerifyError{Stage: "chain", ID: webID, Rule: "X5-30"},
			text: `spiffe: verify peer "spiffe://example.org/ns/prod/sa/web": chain: x509: missing ASN.1 contents; use ParseCertificate`,
		},
		{
			name: "denied", src: home, allow: spiffe.AllowIDs(spiffe.MustParseID("spiffe://example.org/db")), chain: chain(good),
			want: spiffe.VerifyError{Stage: "policy", ID: webID, Err: spiffe.ErrDenied},
			text: `spiffe: verify peer "spiffe://example.org/ns/prod/sa/web": policy: not allowed by policy, which allows spiffe://example.org/db`,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			peer, err := verifierAt(t, now, c.src, c.allow).VerifyChain(c.chain, c.role)
			assert.Nil(t, peer)
			e := must.As[*spiffe.VerifyError](err)(t)
			assert.Equal(t, c.text, err.Error())
			assert.Equal(t, c.want.Stage, e.Stage)
			assert.Equal(t, c.want.ID, e.ID)
			assert.Equal(t, c.want.Rule, e.Rule)
			if c.want.Err != nil {
				assert.ErrorIs(t, err, c.want.Err)
			}
		})
	}

	for _, v := range []*spiffe.Verifier{nil, {}} {
		_, err := v.VerifyChain(chain(good), spiffe.AnyRole)
		assert.EqualError(t, err, "spiffe: verify peer: leaf: the Verifier was not made by NewVerifier")
	}
	_, err := spiffe.NewVerifier(nil, webOnly, nil)
	assert.EqualError(t, err, "spiffe: new verifier: no bundle source to verify peers with, such as a Workload API source or a *spiffe.Bundle")
}

// The errors of crypto/x509 stay reachable.
func TestVerifyErrorTypes(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "X5-30")
	root := caSpec("ca1", "spiffe://example.org").issue(nil)
	v := verifierAt(t, now, bundleOf(t, "example.org", root.parse(t)), spiffe.AllowAnyPeer())
	spec := leafSpec(webID.String())

	_, err := v.VerifyChain([]*x509.Certificate{spec.with(func(s *certSpec) { s.notAfter = now.Add(-time.Second) }).issue(root).parse(t)}, spiffe.AnyRole)
	invalid := must.As[x509.CertificateInvalidError](err)(t)
	assert.Equal(t, x509.Expired, invalid.Reason)

	_, err = v.VerifyChain([]*x509.Certificate{spec.issue(nil).parse(t)}, spiffe.AnyRole)
	must.As[x509.UnknownAuthorityError](err)(t)
}

// Without Now the clock is the real one: the fixtures of 2026 are over.
func TestVerifierRealClock(t *testing.T) {
	t.Parallel()
	root := caSpec("ca1", "").with(func(s *certSpec) { s.notAfter = time.Now().AddDate(1, 0, 0) }).issue(nil)
	spec := leafSpec(webID.String()).with(func(s *certSpec) { s.notBefore, s.notAfter = time.Now().Add(-time.Minute), time.Now().Add(time.Hour) })
	b := bundleOf(t, "example.org", root.parse(t))
	v := must.Get(spiffe.NewVerifier(b, spiffe.AllowAnyPeer(), nil))(t)
	must.Get(v.VerifyChain([]*x509.Certificate{spec.issue(root).parse(t)}, spiffe.AnyRole))(t)
}

// A peer cannot make us compute with a huge key, wherever in the chain it is.
func TestVerifyHugeKeys(t *testing.T) {
	t.Parallel()
	root := caSpec("ca1", "spiffe://example.org").issue(nil)
	good := leafSpec(webID.String()).issue(root).parse(t)
	v := verifierAt(t, now, bundleOf(t, "example.org", root.parse(t)), spiffe.AllowAnyPeer())
	withKey := func(bits uint) *x509.Certificate {
		c := *good
		c.PublicKey = &rsa.PublicKey{N: new(big.Int).Lsh(big.NewInt(1), bits-1), E: 65537}
		return &c
	}
	for _, chain := range [][]*x509.Certificate{{withKey(8193)}, {good, withKey(1 << 20)}} {
		_, err := v.VerifyChain(chain, spiffe.AnyRole)
		assert.ErrorIs(t, err, spiffe.ErrTooLarge)
	}
	_, err := v.VerifyChain([]*x509.Certificate{good, withKey(8192)}, spiffe.AnyRole)
	assert.NoError(t, err)

}

// What a peer sends does not fill the log.
func TestVerifyErrorIsBounded(t *testing.T) {
	t.Parallel()
	root := caSpec("ca1", "spiffe://example.org").issue(nil)
	v := verifierAt(t, now, bundleOf(t, "example.org", root.parse(t)), spiffe.AllowAnyPeer())
	for _, pad := range []string{"", "x"} { // so that the limit falls on a border of characters, and into one
		mid := caSpec("mid", "spiffe://example.org").with(func(s *certSpec) {
			s.subject, s.usage = pkix.Name{CommonName: pad + strings.Repeat("\u00fc", 30_000)}, x509.KeyUsageCRLSign
		}).issue(nil)
		leaf := leafSpec(longID).issue(mid)
		_, err := v.VerifyChain([]*x509.Certificate{leaf.parse(t), mid.parse(t)}, spiffe.AnyRole)
		assert.ErrorContains(t, err, "possibly because of")
		assert.Less(t, len(err.Error()), 2048)
		assert.True(t, strings.HasSuffix(err.Error(), "\u00fc…"), "cut between characters: %q", err)
	}
}

// The rules about names, on bytes that crypto/x509 would refuse or forget.
func TestIDFromCertificate(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "X5-2", "X5-3", "X5-4", "X5-34", "X5-36", "X5-37", "ID-27", "GO-2", "IST-1.4-3", "IST-1.5-8")
	san := asn1.ObjectIdentifier{2, 5, 29, 17}
	seq := func(parts ...string) []byte {
		body := strings.Join(parts, "")
		return append([]byte{0x30, byte(len(body))}, body...)
	}
	uri := func(s string) string { return "\x86" + string(rune(len(s))) + s }
	web := uri("spiffe://example.org/web")
	for _, c := range []struct {
		name string
		exts []pkix.Extension
		id   string
		rule string
	}{
		{name: "workload", exts: []pkix.Extension{{Id: san, Value: seq(web)}}, id: "spiffe://example.org/web"},
		{name: "trust domain", exts: []pkix.Extension{{Id: san, Value: seq(uri("spiffe://example.org"))}}, id: "spiffe://example.org"},
		{name: "among others", exts: []pkix.Extension{
			{Id: asn1.ObjectIdentifier{2, 5, 29, 15}, Value: []byte{3, 2, 7, 128}},
			{Id: san, Value: seq("\x82\x01a", web, "\x87\x04\x7f\x00\x00\x01", "\xa4\x02\x30\x00")},
		}, id: "spiffe://example.org/web"},
		{name: "a name that Go cannot parse", exts: []pkix.Extension{{Id: san, Value: seq(uri("spiffe://a..b/web"))}}, id: "spiffe://a..b/web"},
		{name: "no extension", rule: "X5-3"},
		{name: "no names", exts: []pkix.Extension{{Id: san, Value: seq()}}, rule: "X5-3"},
		{name: "DNS only", exts: []pkix.Extension{{Id: san, Value: seq("\x82\x01a")}}, rule: "X5-3"},
		{name: "twice", exts: []pkix.Extension{{Id: san, Value: seq(web)}, {Id: san, Value: seq(web)}}, rule: "X5-30"},
		{name: "twice, one empty", exts: []pkix.Extension{{Id: san}, {Id: san, Value: seq(web)}}, rule: "X5-30"},
		{name: "two URIs", exts: []pkix.Extension{{Id: san, Value: seq(web, uri("urn:x"))}}, rule: "X5-36"},
		{name: "two URIs, one empty", exts: []pkix.Extension{{Id: san, Value: seq(uri(""), web)}}, rule: "X5-36"},
		{name: "empty URI", exts: []pkix.Extension{{Id: san, Value: seq(uri(""))}}, rule: "X5-34"},
		{name: "scheme", exts: []pkix.Extension{{Id: san, Value: seq(uri("SPIFFE://example.org/web"))}}, rule: "X5-34"},
		{name: "not ASCII", exts: []pkix.Extension{{Id: san, Value: seq(uri("spiffe://example.org/\xff"))}}, rule: "X5-37"},
		{name: "NUL", exts: []pkix.Extension{{Id: san, Value: seq(uri("spiffe://example.org/web\x00.evil"))}}, rule: "X5-37"},
		{name: "empty value", exts: []pkix.Extension{{Id: san}}, rule: "X5-30"},
		{name: "not a sequence", exts: []pkix.Extension{{Id: san, Value: []byte(web)}}, rule: "X5-30"},
		{name: "a set", exts: []pkix.Extension{{Id: san, Value: bytes.Replace(seq(web), []byte{0x30}, []byte{0x31}, 1)}}, rule: "X5-30"},
		{name: "junk after", exts: []pkix.Extension{{Id: san, Value: append(seq(web), 0)}}, rule: "X5-30"},
		{name: "junk inside", exts: []pkix.Extension{{Id: san, Value: seq(web, "\x86")}}, rule: "X5-30"},
		{name: "cut", exts: []pkix.Extension{{Id: san, Value: seq(web[:9])}}, rule: "X5-30"},
		{name: "universal tag", exts: []pkix.Extension{{Id: san, Value: seq(web, "\x0c\x01a")}}, rule: "X5-30"},
		{name: "constructed URI", exts: []pkix.Extension{{Id: san, Value: seq("\xa6\x02\x16\x00")}}, rule: "X5-30"},
	} {
		id, err := spiffe.IDFromCertificate(&x509.Certificate{Extensions: c.exts})
		if c.rule == "" {
			require.NoError(t, err, c.name)
			assert.Equal(t, c.id, id.String())
			continue
		}
		e := must.As[*spiffe.ParseError](err)(t, c.name, id)
		assert.Equal(t, c.rule, e.Rule, "%s: %v", c.name, err)
		assert.True(t, id.IsZero())
	}
	_, err := spiffe.IDFromCertificate(nil)
	assert.EqualError(t, err, "spiffe: invalid X.509-SVID: there is no certificate")
}

func FuzzIDFromCertificate(f *testing.F) {
	files := must.Get(filepath.Glob("testdata/x509/*.txt"))(f)
	for _, file := range files {
		certs, err := parseBlocks(readX509Vector(f, file).sections["chain"])
		if err != nil || len(certs) == 0 {
			continue
		}
		f.Add(certs[0].Raw)
		for _, e := range certs[0].Extensions {
			if e.Id.Equal(asn1.ObjectIdentifier{2, 5, 29, 17}) {
				f.Add(e.Value)
			}
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		// The bytes as the value of the extension.
		raw := &x509.Certificate{Extensions: []pkix.Extension{{Id: asn1.ObjectIdentifier{2, 5, 29, 17}, Value: data}}}
		if id, err := spiffe.IDFromCertificate(raw); err == nil {
			if !slowValidID(id.String()) || !bytes.Contains(data, []byte(id.String())) {
				t.Fatalf("%x gave %q", data, id)
			}
		}
		// The bytes as a certificate.
		cert, err := x509.ParseCertificate(data)
		if err != nil {
			return
		}
		id, err := spiffe.IDFromCertificate(cert)
		if err != nil {
			if _, ok := errors.AsType[*spiffe.ParseError](err); !ok {
				t.Fatalf("%T: %v", err, err)
			}
			return
		}
		if len(cert.URIs) != 1 || cert.URIs[0].String() != id.String() {
			t.Fatalf("crypto/x509 reads %v, we read %q", cert.URIs, id)
		}
	})
}

// Times in errors are in UTC, whatever the zone of the clock.
func TestErrorsInOneZone(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	zone := time.FixedZone("IST", 5*3600+1800)
	v, err := spiffe.NewVerifier(ca.Bundle(), spiffe.AllowMembersOf(ca.TrustDomain()), func() time.Time { return time.Now().Add(48 * time.Hour).In(zone) })
	require.NoError(t, err)
	_, err = v.VerifyChain(ca.SVID("/web").Chain(), spiffe.AnyRole)
	require.Error(t, err)
	assert.NotContains(t, err.Error(), "+05:30")
}

func TestUnvouched(t *testing.T) {
	t.Parallel()
	for err, want := range map[*spiffe.VerifyError]bool{
		{Stage: "chain"}:                true,
		{Stage: "bundle"}:               true,
		{Stage: "chain", Rule: "X5-39"}: false,
		{Stage: "policy"}:               false,
	} {
		assert.Equal(t, want, err.Unvouched(), "%v", err)
	}
}
