package pki_test

import (
	"bytes"
	"crypto"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/big"
	"net"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

func svidOf(t testing.TB, root *pki.Issuer, key crypto.Signer) *spiffe.SVID {
	t.Helper()
	o := leafOptions()
	o.PublicKey = key.Public()
	return must.Get(spiffe.NewSVID([]*x509.Certificate{must.Get(root.Issue(o))(t)}, key))(t)
}

func TestKeyPairSecret(t *testing.T) {
	t.Parallel()
	key := newKey(t, "ecdsa-p256")
	svid := svidOf(t, newRoot(t), key)
	s := must.Get(pki.NewKeyPairSecret("default", svid))(t)
	assert.Equal(t, "default", s.Name())
	assert.Equal(t, svid.NotAfter(), s.NotAfter())
	chain, keyPEM, ok := s.KeyPair()
	require.True(t, ok)
	assert.Equal(t, pki.MarshalCertificatesPEM(svid.Leaf()), chain)
	assert.Equal(t, key, must.Get(pki.ParsePrivateKeyPEM(keyPEM))(t))
	roots, ok := s.Roots()
	assert.False(t, ok)
	assert.Nil(t, roots)
	again, keyAgain, _ := s.KeyPair()
	assert.Same(t, &chain[0], &again[0], "encoded again")
	assert.Same(t, &keyPEM[0], &keyAgain[0], "encoded again")

	for _, f := range []func() (*pki.Secret, error){
		func() (*pki.Secret, error) { return pki.NewKeyPairSecret("", svid) },
		func() (*pki.Secret, error) { return pki.NewKeyPairSecret("default", nil) },
		func() (*pki.Secret, error) { return pki.NewKeyPairSecret("default", (*spiffe.SVID)(nil)) },
		func() (*pki.Secret, error) { return pki.NewKeyPairSecret("default", (*pki.Credential)(nil)) },
		func() (*pki.Secret, error) {
			return pki.NewKeyPairSecret("default", svidOf(t, newRoot(t), remote{key}))
		},
	} {
		s, err := f()
		require.ErrorContains(t, err, "pki: secret")
		require.Nil(t, s)
	}
}

func TestTrustSecret(t *testing.T) {
	t.Parallel()
	root := newRoot(t).Certificate()
	bundle := must.Get(spiffe.NewBundle(exampleOrg, spiffe.BundleContents{X509Authorities: []*x509.Certificate{root}}))(t)
	s := must.Get(pki.NewTrustSecret("ROOTCA", bundle))(t)
	assert.Equal(t, "ROOTCA", s.Name())
	assert.True(t, s.NotAfter().IsZero())
	roots, ok := s.Roots()
	require.True(t, ok)
	assert.Equal(t, pki.MarshalCertificatesPEM(root), roots)
	_, _, ok = s.KeyPair()
	assert.False(t, ok)

	empty := must.Get(spiffe.NewBundle(exampleOrg, spiffe.BundleContents{}))(t)
	require.ErrorIs(t, must.Err(pki.NewTrustSecret("ROOTCA", empty)), spiffe.ErrNoAuthority)
	require.Error(t, must.Err(pki.NewTrustSecret("", bundle)))
	require.Error(t, must.Err(pki.NewTrustSecret("ROOTCA", nil)))
}

func TestSecretPEM(t *testing.T) {
	t.Parallel()
	root := newRoot(t)
	o := leafOptions()
	o.PublicKey = rsaKey().Public()
	leaf := must.Get(root.Issue(o))(t)
	chain := pki.MarshalCertificatesPEM(leaf, root.Certificate())
	key := must.Get(pki.MarshalPrivateKeyPEM(rsaKey()))(t)
	roots := pki.MarshalCertificatesPEM(root.Certificate())

	pkcs1 := keyFiles(t)["PKCS#1"].pem
	s := must.Get(pki.NewSecretPEM("file-cert:c~k", append([]byte("# comment\n"), chain...), []byte(pkcs1), nil, time.Time{}))(t)
	gotChain, gotKey, ok := s.KeyPair()
	require.True(t, ok)
	assert.Equal(t, chain, gotChain)
	assert.Equal(t, key, gotKey, "PKCS#8")
	assert.Equal(t, leaf.NotAfter, s.NotAfter())
	assert.Equal(t, "file-cert:c~k", s.Name())

	early := leaf.NotAfter.Add(-time.Minute)
	assert.Equal(t, early, must.Get(pki.NewSecretPEM("x", chain, key, nil, early))(t).NotAfter())
	s = must.Get(pki.NewSecretPEM("x", chain, key, nil, leaf.NotAfter.Add(time.Hour)))(t)
	assert.Equal(t, leaf.NotAfter, s.NotAfter())

	s = must.Get(pki.NewSecretPEM("file-root:r", nil, nil, append([]byte("# comment\n"), roots...), time.Time{}))(t)
	gotRoots, ok := s.Roots()
	require.True(t, ok)
	assert.Equal(t, roots, gotRoots)
	assert.True(t, s.NotAfter().IsZero())

	otherKey := must.Get(pki.MarshalPrivateKeyPEM(newKey(t, "ecdsa-p256")))(t)
	for name, tc := range map[string]struct {
		name              string
		chain, key, roots []byte
		notAfter          time.Time
		also              error
	}{
		"no name":         {"", chain, key, nil, time.Time{}, nil},
		"nothing":         {"x", nil, nil, nil, time.Time{}, nil},
		"both":            {"x", chain, key, roots, time.Time{}, nil},
		"no key":          {"x", chain, nil, nil, time.Time{}, nil},
		"no chain":        {"x", nil, key, nil, time.Time{}, nil},
		"another key":     {"x", chain, otherKey, nil, time.Time{}, pki.ErrKeyMismatch},
		"chain reversed":  {"x", pki.MarshalCertificatesPEM(root.Certificate(), leaf), key, nil, time.Time{}, pki.ErrKeyMismatch},
		"swapped":         {"x", key, chain, nil, time.Time{}, nil},
		"half a chain":    {"x", chain[:len(chain)/2], key, nil, time.Time{}, nil},
		"half a key":      {"x", chain, key[:len(key)/2], nil, time.Time{}, nil},
		"too large":       {"x", bytes.Repeat(chain, 2000), key, nil, time.Time{}, spiffe.ErrTooLarge},
		"root not a CA":   {"x", nil, nil, pki.MarshalCertificatesPEM(root.Certificate(), leaf), time.Time{}, nil},
		"roots with time": {"x", nil, nil, roots, leaf.NotAfter, nil},
		"roots are a key": {"x", nil, nil, key, time.Time{}, nil},
	} {
		s, err := pki.NewSecretPEM(tc.name, tc.chain, tc.key, tc.roots, tc.notAfter)
		require.ErrorContains(t, err, "pki: secret", name)
		require.Nil(t, s, name)
		requireIs(t, err, tc.also, name)
	}
}

// That nothing prints a key is tested in internal/checks/sealtest.
func TestPrinted(t *testing.T) {
	t.Parallel()
	root := newTestRoot(t)
	pair := must.Get(pki.NewKeyPairSecret("default", svidOf(t, root.Issuer, newKey(t, "ecdsa-p256"))))(t)
	bundle := must.Get(keyCertPEM{Cert: certsPEM(root.cert()), Key: root.keyPEM(t), Roots: certsPEM(root.cert())}.read(during))(t)
	subject := root.cert().Subject.String()
	for want, v := range map[string]fmt.Stringer{
		`pki.Secret("default", key pair until 2026-03-01T12:00:00Z)`: pair,
		`pki.Secret("ROOTCA", roots)`:                                must.Get(pki.NewTrustSecret("ROOTCA", bundleOf(t, "example.org", root.cert())))(t),
		"pki.Issuer(" + subject + ")":                                root.Issuer,
		"pki.KeyCertBundle(" + subject + ", 1 roots, 0 CRLs)":        bundle,
	} {
		assert.Equal(t, want, v.String())
		assert.Equal(t, want, fmt.Sprintf("%#v", v))
		assert.Equal(t, "[{}]", string(must.Get(json.Marshal([]any{v}))(t)))
	}
	for _, zero := range []fmt.Stringer{pki.Secret{}, pki.Issuer{}, pki.KeyCertBundle{}} {
		assert.Equal(t, "[redacted]", zero.String())
	}
}

func bundleOf(t testing.TB, td string, roots ...*x509.Certificate) *spiffe.Bundle {
	t.Helper()
	return must.Get(spiffe.NewBundle(spiffe.MustParseTrustDomain(td), spiffe.BundleContents{X509Authorities: roots}))(t)
}

func setOf(t testing.TB, bundles ...*spiffe.Bundle) *spiffe.BundleSet {
	t.Helper()
	return must.Get(spiffe.NewBundleSet(bundles...))(t)
}

// kinds returns a secret of each kind, by what it prints as its kind.
func kinds(t testing.TB) map[string]*pki.Secret {
	t.Helper()
	root, key := newTestRoot(t), newKey(t, "ecdsa-p256")
	svid := svidOf(t, root.Issuer, key)
	made := func(s *pki.Secret, err error) *pki.Secret {
		require.NoError(t, err)
		return s
	}
	trust := made(pki.NewTrustSecret("s", bundleOf(t, "example.org", root.cert())))
	return map[string]*pki.Secret{
		"key pair":                         made(pki.NewKeyPairSecret("s", svid)),
		"certificates with a key provider": made(pki.NewKeyProviderSecret("s", pki.MarshalCertificatesPEM(svid.Leaf()), []byte("9f8e7d6c5b4a-pv"))),
		"roots":                            made(trust.WithCRLs(root.crl(t), true)),
		"trust domains":                    made(pki.NewTrustDomainsSecret("s", setOf(t, bundleOf(t, "example.org", root.cert())))),
		"ticket keys":                      made(pki.NewTicketKeysSecret("s", []byte(strings.Repeat("tk9f8e7d6c", 8)))),
		"generic":                          made(pki.NewGenericSecret("s", map[string][]byte{"": []byte("hunter2-0123456789")})),
	}
}

// A secret is of one kind, and says so by each of its methods.
func TestSecretKinds(t *testing.T) {
	t.Parallel()
	for kind, s := range kinds(t) {
		_, _, pair := s.KeyPair()
		_, _, provider := s.KeyProvider()
		_, roots := s.Roots()
		_, domains := s.TrustDomains()
		_, tickets := s.TicketKeys()
		_, generic := s.Generic()
		crls, leafOnly := s.CRLs()
		assert.Equal(t, map[string]bool{
			"key pair": kind == "key pair", "certificates with a key provider": kind == "certificates with a key provider", "roots": kind == "roots",
			"trust domains": kind == "trust domains", "ticket keys": kind == "ticket keys", "generic": kind == "generic",
		}, map[string]bool{
			"key pair": pair, "certificates with a key provider": provider, "roots": roots, "trust domains": domains, "ticket keys": tickets, "generic": generic,
		})
		assert.Equal(t, kind == "roots", crls != nil && leafOnly, kind)
		assert.Contains(t, s.String(), `pki.Secret("s", `+kind)

		var buf bytes.Buffer
		slog.New(slog.NewJSONHandler(&buf, nil)).Info("x", "secret", s)
		for _, secret := range []string{"9f8e7d6c5b4a-pv", "tk9f8e7d6c", "hunter2-0123456789"} {
			assertNoKey(t, []byte(secret), &buf, s, *s)
		}
	}
}

func TestTrustDomainsSecret(t *testing.T) {
	t.Parallel()
	one, two, mid := newTestRoot(t), newTestRoot(t), newTestRoot(t)
	tdOne, tdTwo := spiffe.MustParseTrustDomain("one.example"), spiffe.MustParseTrustDomain("two.example")
	tokensOnly := bundleOf(t, "tokens.example")
	set := setOf(t, bundleOf(t, "one.example", one.cert()), bundleOf(t, "two.example", two.cert()), tokensOnly)

	s := must.Get(pki.NewTrustDomainsSecret("ALL", set))(t)
	got, _ := s.TrustDomains()
	assert.Equal(t, map[spiffe.TrustDomain][]byte{tdOne: pki.MarshalCertificatesPEM(one.cert()), tdTwo: pki.MarshalCertificatesPEM(two.cert())}, got)
	assert.True(t, s.NotAfter().IsZero())

	lists := append(append([]byte("# a comment\n"), two.crl(t)...), mid.crl(t)...)
	plain := s
	s = must.Get(plain.WithTrustDomainCRLs(map[spiffe.TrustDomain][]byte{tdTwo: lists}))(t)
	got, _ = s.TrustDomains()
	assert.Equal(t, pki.MarshalCertificatesPEM(one.cert()), got[tdOne])
	assert.Equal(t, string(pki.MarshalCertificatesPEM(two.cert()))+strings.TrimPrefix(string(lists), "# a comment\n"), string(got[tdTwo]))
	assert.Equal(t, base.Add(time.Hour).UTC().Truncate(time.Second), s.NotAfter())

	before, _ := plain.TrustDomains()
	assert.Equal(t, pki.MarshalCertificatesPEM(two.cert()), before[tdTwo], "the secret it was made of is as before")
	_, err := s.WithTrustDomainCRLs(map[spiffe.TrustDomain][]byte{tdTwo: lists})
	require.ErrorContains(t, err, "has revocation lists")
	for kind, s := range kinds(t) {
		require.Equal(t, kind == "trust domains", must.Err(s.WithTrustDomainCRLs(nil)) == nil, kind)
	}

	for name, tc := range map[string]struct {
		name string
		set  *spiffe.BundleSet
		crls map[spiffe.TrustDomain][]byte
		also error
	}{
		"no name":         {"", set, nil, nil},
		"no set":          {"ALL", nil, nil, nil},
		"an empty set":    {"ALL", setOf(t), nil, spiffe.ErrNoAuthority},
		"tokens only":     {"ALL", setOf(t, tokensOnly), nil, spiffe.ErrNoAuthority},
		"list of another": {"ALL", set, map[spiffe.TrustDomain][]byte{tdOne: two.crl(t)}, errCRL},
		"an empty list":   {"ALL", set, map[spiffe.TrustDomain][]byte{tdOne: nil}, errCRL},
		"a damaged list":  {"ALL", set, map[spiffe.TrustDomain][]byte{tdOne: one.crl(t)[:200]}, errCRL},
		"one root lacks":  {"ALL", setOf(t, bundleOf(t, "one.example", one.cert(), two.cert())), map[spiffe.TrustDomain][]byte{tdOne: one.crl(t)}, errCRL},
		"no such domain":  {"ALL", set, map[spiffe.TrustDomain][]byte{spiffe.MustParseTrustDomain("x.example"): one.crl(t)}, spiffe.ErrNoAuthority},
		"without roots":   {"ALL", set, map[spiffe.TrustDomain][]byte{tokensOnly.TrustDomain(): one.crl(t)}, spiffe.ErrNoAuthority},
	} {
		s, err := pki.NewTrustDomainsSecret(tc.name, tc.set)
		if tc.crls != nil {
			require.NoError(t, err, name)
			s, err = s.WithTrustDomainCRLs(tc.crls)
		}
		require.ErrorContains(t, err, "pki: secret", name)
		require.Nil(t, s, name)
		requireIs(t, err, tc.also, name)
	}
}

func TestSecretWithCRLs(t *testing.T) {
	t.Parallel()
	one, two := newTestRoot(t), newTestRoot(t)
	trust := must.Get(pki.NewTrustSecret("ROOTCA", bundleOf(t, "example.org", one.cert())))(t)
	both := must.Get(pki.NewSecretPEM("ROOTCA", nil, nil, pki.MarshalCertificatesPEM(one.cert(), two.cert()), time.Time{}))(t)

	s := must.Get(trust.WithCRLs(one.crl(t), false))(t)
	crls, leafOnly := s.CRLs()
	assert.Equal(t, one.crl(t)[:27], crls[:27])
	assert.False(t, leafOnly)
	assert.Equal(t, base.Add(time.Hour).UTC().Truncate(time.Second), s.NotAfter())
	roots, _ := s.Roots()
	before, _ := trust.Roots()
	assert.Equal(t, before, roots)
	assert.Equal(t, "ROOTCA", s.Name())
	none, _ := trust.CRLs()
	assert.Nil(t, none, "the secret it was made of is as before")

	der := must.Get(x509.CreateRevocationList(rand.Reader, &x509.RevocationList{
		Number: big.NewInt(1), ThisUpdate: base, NextUpdate: base.Add(time.Minute),
	}, two.cert(), two.key))(t)
	soon := []byte(block("X509 CRL", der))
	later := must.Get(both.WithCRLs(slices.Concat(one.crl(t), soon, two.crl(t)), false))(t)
	assert.Equal(t, base.Add(time.Minute).UTC().Truncate(time.Second), later.NotAfter(), "the earliest")
	s, err := later.WithCRLs(two.crl(t), true)
	require.NoError(t, err, "of leaves, and in place of those before")
	crls, leafOnly = s.CRLs()
	assert.True(t, leafOnly)
	assert.Equal(t, 1, bytes.Count(crls, []byte("BEGIN X509 CRL")))

	for name, f := range map[string]func() (*pki.Secret, error){
		"one root lacks": func() (*pki.Secret, error) { return both.WithCRLs(one.crl(t), false) },
		"of another":     func() (*pki.Secret, error) { return trust.WithCRLs(two.crl(t), false) },
		"empty":          func() (*pki.Secret, error) { return trust.WithCRLs(nil, true) },
		"roots":          func() (*pki.Secret, error) { return trust.WithCRLs(before, true) },
	} {
		s, err := f()
		requireIs(t, err, errCRL, name)
		require.Nil(t, s, name)
	}
	for kind, s := range kinds(t) {
		require.Equal(t, kind == "roots", must.Err(s.WithCRLs(one.crl(t), true)) == nil, kind)
	}
	require.ErrorContains(t, must.Err(new(pki.Secret).WithCRLs(one.crl(t), true)), "empty")
}

func TestOtherSecrets(t *testing.T) {
	t.Parallel()
	key := func(c string) []byte { return []byte(strings.Repeat(c, 80)) }
	a := key("a")
	s := must.Get(pki.NewTicketKeysSecret("tickets", a, key("b")))(t)
	clear(a)
	keys, _ := s.TicketKeys()
	assert.Equal(t, [][]byte{key("a"), key("b")}, keys, "copied")

	value := []byte("hunter2")
	s = must.Get(pki.NewGenericSecret("token", map[string][]byte{"": value}))(t)
	clear(value)
	values, _ := s.Generic()
	assert.Equal(t, map[string][]byte{"": []byte("hunter2")}, values, "copied")
	must.Get(pki.NewGenericSecret("token", map[string][]byte{"user": value, "password": value}))(t)

	root := newRoot(t)
	leaf := must.Get(root.Issue(leafOptions()))(t)
	chain := pki.MarshalCertificatesPEM(leaf, root.Certificate())
	provider := []byte("provider")
	s = must.Get(pki.NewKeyProviderSecret("default", append([]byte("# comment\n"), chain...), provider))(t)
	clear(provider)
	gotChain, gotProvider, _ := s.KeyProvider()
	assert.Equal(t, chain, gotChain)
	assert.Equal(t, "provider", string(gotProvider))
	assert.Equal(t, leaf.NotAfter, s.NotAfter())

	many, sixteen := map[string][]byte{}, [][]byte{}
	for i := range 101 {
		many[strings.Repeat("x", i+1)] = []byte("x")
	}
	for i := range 17 {
		sixteen = append(sixteen, key(string(rune('a'+i))))
	}
	generic := func(values map[string][]byte) func() (*pki.Secret, error) {
		return func() (*pki.Secret, error) { return pki.NewGenericSecret("x", values) }
	}
	for name, tc := range map[string]struct {
		f    func() (*pki.Secret, error)
		also error
	}{
		"no ticket keys":     {func() (*pki.Secret, error) { return pki.NewTicketKeysSecret("x") }, nil},
		"no name of tickets": {func() (*pki.Secret, error) { return pki.NewTicketKeysSecret("", key("a")) }, nil},
		"79 bytes":           {func() (*pki.Secret, error) { return pki.NewTicketKeysSecret("x", key("a"), key("b")[:79]) }, nil},
		"81 bytes":           {func() (*pki.Secret, error) { return pki.NewTicketKeysSecret("x", append(key("a"), 'a')) }, nil},
		"17 keys":            {func() (*pki.Secret, error) { return pki.NewTicketKeysSecret("x", sixteen...) }, spiffe.ErrTooLarge},
		"no values":          {generic(nil), nil},
		"no name of values":  {func() (*pki.Secret, error) { return pki.NewGenericSecret("", many) }, nil},
		"an empty value":     {generic(map[string][]byte{"a": value, "b": {}}), nil},
		"one and many":       {generic(map[string][]byte{"": value, "b": value}), nil},
		"not UTF-8":          {generic(map[string][]byte{"\xff": value}), nil},
		"101 values":         {generic(many), spiffe.ErrTooLarge},
		"a long key":         {generic(map[string][]byte{strings.Repeat("x", 257): value}), spiffe.ErrTooLarge},
		"a large value":      {generic(map[string][]byte{"": make([]byte, 1<<20+1)}), spiffe.ErrTooLarge},
		"no provider":        {func() (*pki.Secret, error) { return pki.NewKeyProviderSecret("x", chain, nil) }, nil},
		"no name":            {func() (*pki.Secret, error) { return pki.NewKeyProviderSecret("", chain, []byte("x")) }, nil},
		"no chain":           {func() (*pki.Secret, error) { return pki.NewKeyProviderSecret("x", nil, []byte("x")) }, nil},
		"a large provider":   {func() (*pki.Secret, error) { return pki.NewKeyProviderSecret("x", chain, make([]byte, 64<<10+1)) }, spiffe.ErrTooLarge},
	} {
		s, err := tc.f()
		require.ErrorContains(t, err, "pki: secret", name)
		require.NotContains(t, err.Error(), "hunter2", name)
		require.Nil(t, s, name)
		requireIs(t, err, tc.also, name)
	}
	must.Get(pki.NewTicketKeysSecret("x", sixteen[:16]...))(t)
	delete(many, "x")
	must.Get(pki.NewGenericSecret("x", many))(t)
}

const linkerdName = "web.shop.serviceaccount.identity.linkerd.example.org"

// dnsOnly makes a leaf of a workload of Linkerd.
func dnsOnly(c *x509.Certificate) {
	c.URIs, c.DNSNames, c.ExtraExtensions = nil, []string{linkerdName}, nil
}

func TestCredential(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	chain, key := ca.Intermediate().Certificate("/web", dnsOnly)
	c := must.Get(pki.NewCredential(chain, key))(t)
	assert.Equal(t, chain[0], c.Leaf())
	assert.Equal(t, chain, c.Chain())
	assert.Equal(t, chain[0].NotAfter, c.NotAfter())
	assert.Len(t, c.TLSCertificate().Certificate, 2)

	certs, keyPEM := must.Get2(c.MarshalPEM())(t)
	assert.True(t, must.Get(pki.ParseCredentialPEM(certs, keyPEM))(t).Leaf().Equal(c.Leaf()))

	var log strings.Builder
	slog.New(slog.NewTextHandler(&log, nil)).Info("it", "credential", c)
	for _, text := range []string{c.String(), fmt.Sprintf("%v %+v %#v %s", c, c, c, c), log.String()} {
		assert.Contains(t, text, linkerdName)
		assert.NotContains(t, text, "ecdsa")
		assert.NotContains(t, text, "PrivateKey")
	}

	_, otherKey := ca.Certificate("/web")
	for name, tt := range map[string]struct {
		chain []*x509.Certificate
		err   string
		is    error
	}{
		"no chain":             {nil, "empty", nil},
		"a CA":                 {chain[1:], "is a CA certificate", nil},
		"too many":             {slices.Repeat(chain[:1], 17), "limit is 16", spiffe.ErrTooLarge},
		"the key of another":   {chain, "", pki.ErrKeyMismatch},
		"a certificate is nil": {[]*x509.Certificate{chain[0], nil}, "nil certificate", nil},
	} {
		_, err := pki.NewCredential(tt.chain, otherKey)
		require.ErrorContains(t, err, tt.err, name)
		requireIs(t, err, tt.is, name)
	}
	require.ErrorContains(t, must.Err(pki.NewCredential(chain, nil)), "no private key")
	for _, bad := range [][2][]byte{{nil, keyPEM}, {certs, nil}, {certs, certs}, {keyPEM, keyPEM}} {
		_, err := pki.ParseCredentialPEM(bad[0], bad[1])
		require.Error(t, err)
		assert.NotContains(t, err.Error(), "BEGIN")
	}
}

// Each leaf differs in one thing from what is expected.
func TestExpectDNSName(t *testing.T) {
	t.Parallel()
	ca, other := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "example.org")
	td := ca.TrustDomain()
	want := pki.ExpectDNSName(td, linkerdName)
	assert.Equal(t, linkerdName, want.String())
	assert.Equal(t, []pki.SAN{pki.DNSSAN(linkerdName)}, want.Names())
	assert.Equal(t, td, want.TrustDomain())
	assert.True(t, want.ID().IsZero())

	deep := ca.Intermediate()
	good, _ := deep.Certificate("/web", dnsOnly)
	path := must.Get(want.Verify(good, ca.Bundle(), spiffe.BothRoles, time.Now()))(t)
	require.Len(t, path, 3)
	assert.True(t, path[2].Equal(ca.Root()))

	uri, _ := url.Parse("spiffe://example.org/web")
	for name, tt := range map[string]struct {
		change func(c *x509.Certificate)
		stage  string
	}{
		"an X.509-SVID":            {func(*x509.Certificate) {}, "leaf"},
		"a SPIFFE ID beside it":    {func(c *x509.Certificate) { dnsOnly(c); c.URIs = []*url.URL{uri} }, "leaf"},
		"another name":             {func(c *x509.Certificate) { dnsOnly(c); c.DNSNames = []string{"x" + linkerdName} }, "leaf"},
		"another case":             {func(c *x509.Certificate) { dnsOnly(c); c.DNSNames = []string{strings.ToUpper(linkerdName)} }, "leaf"},
		"a wildcard":               {func(c *x509.Certificate) { dnsOnly(c); c.DNSNames = []string{"*" + linkerdName[3:]} }, "leaf"},
		"two names":                {func(c *x509.Certificate) { dnsOnly(c); c.DNSNames = []string{linkerdName, "api.example.org"} }, "leaf"},
		"the name twice":           {func(c *x509.Certificate) { dnsOnly(c); c.DNSNames = []string{linkerdName, linkerdName} }, "leaf"},
		"an address beside it":     {func(c *x509.Certificate) { dnsOnly(c); c.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1)} }, "leaf"},
		"a mail address beside it": {func(c *x509.Certificate) { dnsOnly(c); c.EmailAddresses = []string{"web@example.org"} }, "leaf"},
		"the common name only":     {func(c *x509.Certificate) { dnsOnly(c); c.DNSNames = nil; c.Subject.CommonName = linkerdName }, "leaf"},
		"a CA":                     {func(c *x509.Certificate) { dnsOnly(c); c.IsCA, c.BasicConstraintsValid = true, true }, "leaf"},
		"a key usage that signs":   {func(c *x509.Certificate) { dnsOnly(c); c.KeyUsage |= x509.KeyUsageCertSign }, "leaf"},
		"no digital signature":     {func(c *x509.Certificate) { dnsOnly(c); c.KeyUsage = x509.KeyUsageKeyEncipherment }, "leaf"},
		"no key usage":             {func(c *x509.Certificate) { dnsOnly(c); c.KeyUsage = 0 }, "leaf"},
		"a client only":            {func(c *x509.Certificate) { dnsOnly(c); c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth} }, "chain"},
		"expired":                  {func(c *x509.Certificate) { dnsOnly(c); c.NotAfter = time.Now().Add(-time.Minute) }, "chain"},
		"not valid yet":            {func(c *x509.Certificate) { dnsOnly(c); c.NotBefore = time.Now().Add(time.Minute) }, "chain"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			chain, _ := deep.Certificate("/web", tt.change)
			_, err := want.Verify(chain, ca.Bundle(), spiffe.BothRoles, time.Now())
			assert.Equal(t, tt.stage, must.As[*spiffe.VerifyError](err)(t).Stage, "%v", err)
		})
	}
	stage := func(chain []*x509.Certificate, e pki.Expectation, b spiffe.BundleSource, role spiffe.Role) string {
		t.Helper()
		_, err := e.Verify(chain, b, role, time.Now())
		return must.As[*spiffe.VerifyError](err)(t).Stage
	}
	empty := must.Get(spiffe.NewBundle(td, spiffe.BundleContents{}))(t)
	assert.Equal(t, "leaf", stage(nil, want, ca.Bundle(), spiffe.BothRoles))
	assert.Equal(t, "leaf", stage(good, pki.Expectation{}, ca.Bundle(), spiffe.BothRoles))
	assert.Equal(t, "leaf", stage(good, pki.ExpectDNSName(td, ""), ca.Bundle(), spiffe.BothRoles))
	assert.Equal(t, "leaf", stage(good, pki.ExpectLeaf(td, "any", nil, nil), ca.Bundle(), spiffe.BothRoles))
	assert.Equal(t, "leaf", stage(good, want, nil, spiffe.BothRoles))
	assert.Equal(t, "leaf", stage(good, want, ca.Bundle(), 4))
	assert.Equal(t, "bundle", stage(good, want, spiffetest.NewCA(t, "example.com").Bundle(), spiffe.BothRoles))
	assert.Equal(t, "bundle", stage(good, want, empty, spiffe.BothRoles))
	assert.Equal(t, "chain", stage(good, want, other.Bundle(), spiffe.BothRoles))
	assert.Equal(t, "chain", stage(good[:1], want, ca.Bundle(), spiffe.BothRoles))
	assert.Equal(t, "leaf", stage(good, pki.ExpectID(spiffe.MustParseID("spiffe://example.org/web")), ca.Bundle(), spiffe.BothRoles), "a credential passes for no SVID")
}

func TestExpectIDAndForm(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	web := spiffe.MustParseID("spiffe://example.org/web")
	chain, _ := ca.Certificate("/web")
	want := pki.ExpectID(web)
	assert.Equal(t, web, want.ID())
	assert.False(t, want.IsZero())
	path := must.Get(want.Verify(chain, ca.Bundle(), spiffe.BothRoles, time.Now()))(t)
	assert.Len(t, path, 2)
	_, err := pki.ExpectID(spiffe.MustParseID("spiffe://example.org/db")).Verify(chain, ca.Bundle(), spiffe.BothRoles, time.Now())
	require.ErrorIs(t, err, spiffe.ErrDenied)
	assert.True(t, pki.ExpectID(spiffe.ID{}).IsZero())

	// A form may be anything that a program can say about a leaf, such as Athenz's principal.
	service, _ := ca.Certificate("/web", func(c *x509.Certificate) {
		c.Subject.CommonName = "sports.api"
		a, _ := url.Parse("spiffe://example.org/ns/sports/sa/api")
		b, _ := url.Parse("athenz://instanceid/provider/1")
		c.URIs = []*url.URL{a, b}
	})
	athenz := pki.ExpectLeaf(ca.TrustDomain(), "sports.api", nil, func(leaf *x509.Certificate) error {
		if leaf.Subject.CommonName != "sports.api" {
			return errors.New("another principal")
		}
		return nil
	})
	must.Get(athenz.Verify(service, ca.Bundle(), spiffe.BothRoles, time.Now()))(t)
	_, err = athenz.Verify(chain, ca.Bundle(), spiffe.BothRoles, time.Now())
	require.ErrorContains(t, err, "another principal")
}
