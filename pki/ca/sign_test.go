package ca_test

import (
	"bytes"
	"crypto"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"errors"
	"maps"
	"math/big"
	"net"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/hostilecsr"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
)

func TestLeafProfile(t *testing.T) {
	conformance.Covers(t, "IST-2.6-2", "IST-2.6-4", "IST-2.6-8")
	bubble.Test(t, func(t *testing.T) {
		a := newAuthority(t)
		time.Sleep(time.Hour + 500*time.Millisecond)
		csr := newCSR(t)
		chain, err := a.Sign(t.Context(), ca.Request{
			CSR: csr, ID: web, DNSNames: []string{"web.shop.svc"}, IPs: []net.IP{net.IPv4(10, 0, 0, 1)}, CommonName: "web", TTL: 90 * time.Minute,
		})
		require.NoError(t, err)
		require.Len(t, chain, 1, "the self-signed root is not part of the chain")
		leaf, root := chain[0], a.Roots()[0].Certificate

		now := time.Now().UTC().Truncate(time.Second)
		assert.Equal(t, now.Add(-2*time.Minute), leaf.NotBefore)
		assert.Equal(t, now.Add(90*time.Minute), leaf.NotAfter)
		assert.True(t, pki.PublicKeysEqual(csr.PublicKey(), leaf.PublicKey))
		assert.Equal(t, "CN=web", leaf.Subject.String())
		assert.Equal(t, root.RawSubject, leaf.RawIssuer)
		assert.Equal(t, root.SubjectKeyId, leaf.AuthorityKeyId)
		assert.False(t, leaf.IsCA)
		assert.True(t, leaf.BasicConstraintsValid)
		assert.Equal(t, x509.KeyUsageDigitalSignature, leaf.KeyUsage)
		assert.Equal(t, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}, leaf.ExtKeyUsage)
		assert.Equal(t, 1, leaf.SerialNumber.Sign())
		assert.Equal(t, []string{"web.shop.svc"}, leaf.DNSNames)
		assert.NoError(t, verify(a.Bundle(), leaf, time.Now()))
	})
}

func TestSerialsDiffer(t *testing.T) {
	t.Parallel()
	a, csr := newAuthority(t), newCSR(t)
	seen := map[string]bool{a.Roots()[0].ID: true}
	for range 100 {
		seen[sign(t, a, csr, 0).SerialNumber.Text(16)] = true
	}
	assert.Len(t, seen, 101)
}

// The rules of lifetimes: nothing asked for means the default, more than the maximum is refused and
// never shortened, and no leaf outlives the root that signs it.
func TestTTL(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-2.6-3", "IST-2.8-3", "IST-3.2-3", "IST-3.2-4", "IST-3.4-4", "IST-3.4-5", "IST-3.4-6")
	const day = 24 * time.Hour
	small := func(c *ca.Config) { c.Rotation.RootTTL, c.MaxTTL, c.DefaultTTL = 100*day, 90*day, 30*day }
	for _, tt := range []struct {
		name string
		edit func(*ca.Config)
		age  time.Duration // of the root
		ask  time.Duration
		want time.Duration // 0: refused with ErrTTL
	}{
		{"zero means the default", nil, 0, 0, day},
		{"less than zero means the default", nil, 0, -1, day},
		{"much less than zero means the default", nil, 0, -1 << 63, day},
		{"a configured default", func(c *ca.Config) { c.DefaultTTL = time.Hour }, 0, 0, time.Hour},
		{"a second", nil, 0, time.Second, time.Second},
		{"less than a second", nil, 0, time.Second - 1, 0},
		{"a nanosecond", nil, 0, 1, 0},
		{"less than the default", nil, 0, time.Hour, time.Hour},
		{"more than the default", nil, 0, 48 * time.Hour, 48 * time.Hour},
		{"the maximum", nil, 0, 90 * day, 90 * day},
		{"just over the maximum", nil, 0, 90*day + 1, 0},
		{"far over the maximum", nil, 0, 1<<63 - 1, 0},
		{"a configured maximum", func(c *ca.Config) { c.MaxTTL = 2 * time.Hour }, 0, 2 * time.Hour, 2 * time.Hour},
		{"just over a configured maximum", func(c *ca.Config) { c.MaxTTL = 2 * time.Hour }, 0, 2*time.Hour + 1, 0},
		{"fits into what the root has left", small, 10 * day, 90 * day, 90 * day},
		{"cut to what the root has left", small, 10*day + time.Second, 90 * day, 90*day - time.Second},
		{"the default, too, is cut", small, 99 * day, 0, day},
		{"over the maximum is refused, not cut", small, 99 * day, 91 * day, 0},
		{"a second before the end of the root", small, 100*day - time.Second, day, time.Second},
	} {
		bubble.Run(t, tt.name, func(t *testing.T) {
			edit := tt.edit
			if edit == nil {
				edit = func(*ca.Config) {}
			}
			a := newAuthority(t, edit)
			time.Sleep(tt.age)
			chain, err := a.Sign(t.Context(), ca.Request{CSR: newCSR(t), ID: web, TTL: tt.ask})
			if tt.want == 0 {
				require.ErrorIs(t, err, ca.ErrTTL)
				require.Nil(t, chain)
				return
			}
			require.NoError(t, err)
			assert.Equal(t, time.Now().Add(tt.want).UTC(), chain[0].NotAfter)
			assert.Equal(t, time.Now().Add(-2*time.Minute).UTC(), chain[0].NotBefore)
			assert.NoError(t, verify(a.Bundle(), chain[0], time.Now()))
		})
	}
}

func TestSignRefuses(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-2.8-4", "IST-3.4-3")
	a := newAuthority(t)
	csr := newCSR(t)
	for _, tt := range []struct {
		name string
		r    ca.Request
		kind error
		says string
	}{
		{"no request", ca.Request{ID: web}, ca.ErrCSR, "there is none"},
		{"a request that was not parsed", ca.Request{CSR: new(pki.CSR), ID: web}, ca.ErrCSR, "there is none"},
		{"no identity", ca.Request{CSR: csr}, ca.ErrIdentity, spiffe.ErrZero.Error()},
		{"another trust domain", ca.Request{CSR: csr, ID: spiffe.MustParseID("spiffe://example.com/web")}, ca.ErrIdentity, `not in the trust domain "example.org"`},
		{"a longer trust domain", ca.Request{CSR: csr, ID: spiffe.MustParseID("spiffe://example.org.evil/web")}, ca.ErrIdentity, "not in the trust domain"},
		{"a trust domain below", ca.Request{CSR: csr, ID: spiffe.MustParseID("spiffe://sub.example.org/web")}, ca.ErrIdentity, "not in the trust domain"},
		{"the trust domain itself", ca.Request{CSR: csr, ID: td.ID()}, ca.ErrIdentity, "no path"},
		{"a DNS name that is none", ca.Request{CSR: csr, ID: web, DNSNames: []string{"a b"}}, ca.ErrIdentity, "DNS"},
		{"an empty DNS name", ca.Request{CSR: csr, ID: web, DNSNames: []string{""}}, ca.ErrIdentity, "DNS"},
		{"an address that is none", ca.Request{CSR: csr, ID: web, IPs: []net.IP{{1, 2, 3}}}, ca.ErrIdentity, "IP"},
		{"a long common name", ca.Request{CSR: csr, ID: web, CommonName: strings.Repeat("x", 65)}, ca.ErrIdentity, "common name"},
		{"a long lifetime", ca.Request{CSR: csr, ID: web, TTL: 2161 * time.Hour}, ca.ErrTTL, "2161h0m0s was asked for, the longest is 2160h0m0s"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			chain, err := a.Sign(t.Context(), tt.r)
			require.Error(t, err)
			assert.Nil(t, chain)
			assert.ErrorContains(t, err, tt.says)
			e, ok := errors.AsType[*ca.SignError](err)
			require.True(t, ok)
			assert.Equal(t, tt.r.ID, e.ID)
			if tt.kind == ca.ErrTTL {
				assert.Equal(t, []time.Duration{tt.r.TTL, 90 * 24 * time.Hour}, []time.Duration{e.Asked, e.Granted})
			} else {
				assert.Zero(t, e.Granted)
			}
			for _, kind := range []error{ca.ErrCSR, ca.ErrTTL, ca.ErrIdentity, spiffe.ErrNotReady, ca.ErrGeneration} {
				assert.Equal(t, kind == tt.kind, errors.Is(err, kind), "errors.Is(%v, %v)", err, kind)
			}
		})
	}
	assert.Regexp(t, `^ca: sign "spiffe://example.org/ns/shop/sa/web": bad lifetime: `, func() string {
		_, err := a.Sign(t.Context(), ca.Request{CSR: csr, ID: web, TTL: 1})
		return err.Error()
	}())
}

// Everything that a request can ask for, in every combination: the certificate has what the caller
// of Sign gave, byte for byte, and nothing else.
func TestNothingOfTheRequestIsSigned(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-2.6-13", "IST-2.8-1", "IST-3.4-8")
	const mark = "evil" // in everything that is asked for
	uri := func(s string) *url.URL { u, err := url.Parse(s); require.NoError(t, err); return u }
	names := map[string]func(*x509.CertificateRequest){
		"no names":             func(*x509.CertificateRequest) {},
		"another workload":     func(r *x509.CertificateRequest) { r.URIs = []*url.URL{uri("spiffe://example.org/evil")} },
		"another trust domain": func(r *x509.CertificateRequest) { r.URIs = []*url.URL{uri("spiffe://evil.example/x")} },
		"the trust domain":     func(r *x509.CertificateRequest) { r.URIs = []*url.URL{uri("spiffe://example.org")} },
		"two identities": func(r *x509.CertificateRequest) {
			r.URIs = []*url.URL{uri(web.String()), uri("spiffe://example.org/evil")}
		},
		"a web page":     func(r *x509.CertificateRequest) { r.URIs = []*url.URL{uri("https://evil.example/")} },
		"DNS names":      func(r *x509.CertificateRequest) { r.DNSNames = []string{"evil.example", "*.evil.example"} },
		"a mail address": func(r *x509.CertificateRequest) { r.EmailAddresses = []string{"root@evil.example"} },
		"an address":     func(r *x509.CertificateRequest) { r.IPAddresses = []net.IP{[]byte(mark)} },
		"a bit of everything": func(r *x509.CertificateRequest) {
			r.URIs, r.DNSNames = []*url.URL{uri("spiffe://evil/evil")}, []string{mark}
		},
		"the right one, and CN": func(r *x509.CertificateRequest) {
			r.URIs, r.Subject.CommonName = []*url.URL{uri(web.String())}, "evil.example"
		},
	}
	ext := func(id asn1.ObjectIdentifier, critical bool, value any) func(*x509.CertificateRequest) {
		der := must.Get(asn1.Marshal(value))(t)
		return func(r *x509.CertificateRequest) {
			r.ExtraExtensions = append(r.ExtraExtensions, pkix.Extension{Id: id, Critical: critical, Value: der})
		}
	}
	wishes := map[string]func(*x509.CertificateRequest){
		"":               func(*x509.CertificateRequest) {},
		"to be a CA":     ext(asn1.ObjectIdentifier{2, 5, 29, 19}, true, struct{ CA bool }{true}),
		"to sign":        ext(asn1.ObjectIdentifier{2, 5, 29, 15}, true, asn1.BitString{Bytes: []byte{0x06}, BitLength: 7}),
		"to sign code":   ext(asn1.ObjectIdentifier{2, 5, 29, 37}, false, []asn1.ObjectIdentifier{{1, 3, 6, 1, 5, 5, 7, 3, 3}}),
		"a key id":       ext(asn1.ObjectIdentifier{2, 5, 29, 14}, false, []byte(mark)),
		"something else": ext(asn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 99999, 1}, false, mark),
		"a subject": func(r *x509.CertificateRequest) {
			r.Subject = pkix.Name{CommonName: mark, Organization: []string{mark}, SerialNumber: mark}
		},
	}
	given := map[string]ca.Request{
		"ID":         {ID: web},
		"ID and DNS": {ID: web, DNSNames: []string{"web.shop.svc", "web"}, IPs: []net.IP{net.IPv4(10, 0, 0, 1), net.ParseIP("2001:db8::1")}},
		"ID and CN":  {ID: web, CommonName: "web"},
	}
	a := newAuthority(t)
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	signed, refused := 0, 0
	for name, ask := range names {
		for wish, ask2 := range wishes {
			csr, err := pki.ParseCSR(request(t, key, ask, ask2))
			if err != nil {
				refused++ // before it came here
				continue
			}
			for what, r := range given {
				r.CSR = csr
				chain, err := a.Sign(t.Context(), r)
				require.NoError(t, err, "%s, %s, %s", name, wish, what)
				checkOnlyGiven(t, chain[0], r, mark)
				signed++
			}
		}
	}
	t.Logf("%d signed, %d requests refused when they were parsed", signed, refused)
	assert.GreaterOrEqual(t, signed, 60)
}

func request(t *testing.T, key crypto.Signer, asks ...func(*x509.CertificateRequest)) []byte {
	t.Helper()
	r := &x509.CertificateRequest{}
	for _, ask := range asks {
		ask(r)
	}
	return must.Get(x509.CreateCertificateRequest(rand.Reader, r, key))(t)
}

func checkOnlyGiven(t *testing.T, leaf *x509.Certificate, r ca.Request, mark string) {
	t.Helper()
	sans := []pki.SAN{pki.IDSAN(r.ID)}
	for _, n := range r.DNSNames {
		sans = append(sans, pki.DNSSAN(n))
	}
	for _, ip := range r.IPs {
		sans = append(sans, pki.IPSAN(ip))
	}
	wantSAN := must.Get(marshalSANs(sans...))(t)
	wantSubject := pkix.Name{Organization: []string{"svidkit"}}.ToRDNSequence()
	if r.CommonName != "" {
		wantSubject = pkix.Name{CommonName: r.CommonName}.ToRDNSequence()
	}
	subject := must.Get(asn1.Marshal(wantSubject))(t)

	assert.Equal(t, subject, leaf.RawSubject)
	assert.False(t, bytes.Contains(leaf.Raw, []byte(mark)), "something that was asked for is in the certificate")
	oids := map[string]pkix.Extension{}
	for _, e := range leaf.Extensions {
		oids[e.Id.String()] = e
	}
	assert.Len(t, oids, len(leaf.Extensions))
	assert.ElementsMatch(t, []string{"2.5.29.15", "2.5.29.37", "2.5.29.19", "2.5.29.35", "2.5.29.17"}, slices.Collect(maps.Keys(oids)))
	assert.Equal(t, wantSAN, oids["2.5.29.17"].Value)
	assert.False(t, oids["2.5.29.17"].Critical, "critical when there is no subject, and only then (X5-7)")
	assert.Equal(t, []byte{0x03, 0x02, 0x07, 0x80}, oids["2.5.29.15"].Value, "digitalSignature alone")
	assert.True(t, oids["2.5.29.15"].Critical)
	assert.Equal(t, []byte{0x30, 0x00}, oids["2.5.29.19"].Value, "not a CA")
	assert.True(t, oids["2.5.29.19"].Critical)
	assert.Equal(t, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}, leaf.ExtKeyUsage)
	assert.Positive(t, leaf.SerialNumber.Cmp(big.NewInt(0)))
	assert.True(t, pki.PublicKeysEqual(r.CSR.PublicKey(), leaf.PublicKey))
}

// A leaf has a subject, as there are readers that fail on an empty one (that of linkerd2-proxy), and it names nobody. With
// EmptySubject a leaf without a common name has none, and its alternative names are critical (X5-7). A verifier takes all of
// them for the same.
func TestSubject(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-2.6-5")
	csr := newCSR(t)
	for _, c := range []struct {
		empty    bool
		request  ca.Request
		subject  []byte // DER
		critical bool
	}{
		{false, ca.Request{ID: web}, []byte("\x30\x12\x31\x10\x30\x0e\x06\x03\x55\x04\x0a\x13\x07svidkit"), false},
		{false, ca.Request{Profile: ca.DNSOnly, DNSNames: []string{"web.svc"}}, []byte("\x30\x12\x31\x10\x30\x0e\x06\x03\x55\x04\x0a\x13\x07svidkit"), false},
		{false, ca.Request{ID: web, CommonName: "web"}, []byte("\x30\x0e\x31\x0c\x30\x0a\x06\x03\x55\x04\x03\x13\x03web"), false},
		{true, ca.Request{ID: web}, []byte{0x30, 0}, true},
		{true, ca.Request{Profile: ca.DNSOnly, DNSNames: []string{"web.svc"}}, []byte{0x30, 0}, true},
		{true, ca.Request{ID: web, CommonName: "web"}, []byte("\x30\x0e\x31\x0c\x30\x0a\x06\x03\x55\x04\x03\x13\x03web"), false},
	} {
		a := newAuthority(t, func(cfg *ca.Config) { cfg.EmptySubject = c.empty })
		c.request.CSR = csr
		chain := must.Get(a.Sign(t.Context(), c.request))(t)
		assert.Equal(t, c.subject, chain[0].RawSubject, "%+v", c)
		for _, e := range chain[0].Extensions {
			if e.Id.String() == "2.5.29.17" {
				assert.Equal(t, c.critical, e.Critical, "%+v", c)
			}
		}
		if c.request.Profile == ca.SVID {
			v := must.Get(spiffe.NewVerifier(a.Bundle(), spiffe.AllowIDs(web), nil))(t)
			peer := must.Get(v.VerifyChain(chain, spiffe.ServerRole))(t)
			assert.Equal(t, web, peer.ID())
		}
	}
}

// Requests that mean harm: refused, or certified for what the caller said and nothing else.
func TestHostileRequests(t *testing.T) {
	t.Parallel()
	a := newAuthority(t)
	wantSVID := must.Get(marshalSANs(pki.IDSAN(web)))(t)
	wantDNS := must.Get(marshalSANs(pki.DNSSAN("web.shop.svc")))(t)
	subject := must.Get(asn1.Marshal(pkix.Name{Organization: []string{"svidkit"}}.ToRDNSequence()))(t)
	signed, cases := 0, hostilecsr.Cases(t)
	for _, c := range cases {
		csr, err := pki.ParseCSRPEM(c.PEM)
		if c.DER != nil {
			csr, err = pki.ParseCSR(c.DER)
		}
		if err != nil {
			_, err := a.Sign(t.Context(), ca.Request{CSR: csr, ID: web})
			require.ErrorIs(t, err, ca.ErrCSR, c.Name)
			continue
		}
		require.True(t, c.Signable, "%s must be refused", c.Name)
		signed++
		for want, r := range map[*[]byte]ca.Request{&wantSVID: {CSR: csr, ID: web}, &wantDNS: {CSR: csr, Profile: ca.DNSOnly, DNSNames: []string{"web.shop.svc"}}} {
			chain, err := a.Sign(t.Context(), r)
			require.NoError(t, err, c.Name)
			leaf := chain[0]
			require.True(t, pki.PublicKeysEqual(c.Key, leaf.PublicKey), c.Name)
			require.Equal(t, subject, leaf.RawSubject, c.Name)
			require.False(t, leaf.IsCA, c.Name)
			require.Zero(t, leaf.KeyUsage&(x509.KeyUsageCertSign|x509.KeyUsageCRLSign), c.Name)
			require.Len(t, leaf.Extensions, 5, c.Name)
			for _, e := range leaf.Extensions {
				if e.Id.String() == "2.5.29.17" {
					require.Equal(t, *want, e.Value, c.Name)
				}
			}
		}
	}
	t.Logf("%d requests, %d of them certified", len(cases), signed)
	assert.GreaterOrEqual(t, len(cases), 200)
	assert.Greater(t, signed, 20)
}

func TestExpiredRootDoesNotSign(t *testing.T) {
	conformance.Covers(t, "IST-2.8-2", "IST-2.12-2")
	bubble.Test(t, func(t *testing.T) {
		a := newAuthority(t, func(c *ca.Config) { c.Rotation.RootTTL, c.DefaultTTL = time.Hour, time.Minute })
		before := a.Bundle()
		time.Sleep(time.Hour) // without Run
		_, err := a.Sign(t.Context(), ca.Request{CSR: newCSR(t), ID: web})
		require.ErrorIs(t, err, spiffe.ErrNotReady)
		old := a.Status().Roots[0].ID
		assert.ErrorContains(t, err, "signed until 2000-01-01T01:00:00Z; revoke it now, so that its successor signs at once: -revoke "+old+" -now")
		assert.ErrorContains(t, a.Health().Signing, "-revoke "+old+" -now")
		assert.Same(t, before, a.Bundle())

		// An operator can still save it, by the same steps.
		must.Get(a.Rotate(t.Context()))(t)
		time.Sleep(25*time.Minute - 1)
		_, err = a.Sign(t.Context(), ca.Request{CSR: newCSR(t), ID: web})
		require.ErrorIs(t, err, spiffe.ErrNotReady)
		time.Sleep(time.Nanosecond)
		leaf := sign(t, a, newCSR(t), 0)
		assert.NoError(t, verify(a.Bundle(), leaf, time.Now()))
	})
}

// marshalSANs returns the value of an extension with these names, as a request has it.
func marshalSANs(sans ...pki.SAN) ([]byte, error) {
	key, err := pki.NewKey("ecdsa-p256")
	if err != nil {
		return nil, err
	}
	csr, err := pki.NewCSR(key, pki.CSROptions{SANs: sans})
	if err != nil {
		return nil, err
	}
	std, err := x509.ParseCertificateRequest(csr.DER())
	if err != nil {
		return nil, err
	}
	return std.Extensions[0].Value, nil
}

// What the error of a root that has ended names works at once.
func TestExpiredRootRevokedNow(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		a := newAuthority(t, func(c *ca.Config) { c.Rotation.RootTTL, c.DefaultTTL = time.Hour, time.Minute })
		time.Sleep(time.Hour)
		must.Get(a.Revoke(t.Context(), a.Status().Roots[0].ID, true))(t)
		require.NoError(t, a.Health().Signing)
		must.Get(a.Sign(t.Context(), ca.Request{CSR: newCSR(t), ID: web}))(t)
	})
}
