package spiffe_test

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"maps"
	"math/big"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/spiffe"
)

// bundleCA returns a CA certificate whose key follows from label.
func bundleCA(label string) *x509.Certificate {
	key := bundleKey(elliptic.P256(), label)
	return bundleCert(key.Public(), key, 1, "")
}

func bundleJWTKey(label string) *ecdsa.PublicKey {
	return &bundleKey(elliptic.P256(), label).PublicKey
}

func mustBundle(t testing.TB, td spiffe.TrustDomain, c spiffe.BundleContents) *spiffe.Bundle {
	t.Helper()
	return must.Get(spiffe.NewBundle(td, c))(t)
}

func fullContents() spiffe.BundleContents {
	return spiffe.BundleContents{
		X509Authorities: []*x509.Certificate{bundleCA("b"), bundleCA("a")},
		JWTAuthorities: map[string]crypto.PublicKey{
			"2": bundleJWTKey("2"), "1": bundleJWTKey("1"), "rsa": bundleRSA(), `é "\`: bundleJWTKey("3"),
		},
		WITAuthorities: map[string]crypto.PublicKey{"w2": bundleJWTKey("w2"), "w1": bundleRSA()},
		Sequence:       new(uint64(7)),
		RefreshHint:    90 * time.Second,
	}
}

func TestNewBundle(t *testing.T) {
	t.Parallel()
	c := fullContents()
	b := mustBundle(t, bundleTD, c)
	assert.Equal(t, bundleTD, b.TrustDomain())
	assert.Equal(t, c.X509Authorities, slices.Collect(b.X509Authorities()), "in the order given")
	assert.Equal(t, c.JWTAuthorities, maps.Collect(b.JWTAuthorities()))
	var ids []string
	for id, key := range b.JWTAuthorities() {
		ids = append(ids, id)
		got, ok := b.JWTAuthority(id)
		assert.True(t, ok)
		assert.Same(t, key, got)
	}
	assert.Equal(t, []string{"1", "2", "rsa", `é "\`}, ids)
	for range b.JWTAuthorities() { // may be left early
		break
	}
	assert.Equal(t, c.WITAuthorities, b.Contents().WITAuthorities)
	_, ok := b.JWTAuthority("w1")
	assert.False(t, ok, "a WIT key (JWT-30)")
	for _, id := range []string{"", "0", "11", "z", "\xff"} {
		_, ok := b.JWTAuthority(id)
		assert.False(t, ok, id)
	}
	n, ok := b.Sequence()
	assert.True(t, ok)
	assert.EqualValues(t, 7, n)
	hint, ok := b.RefreshHint()
	assert.True(t, ok)
	assert.Equal(t, 90*time.Second, hint)
	assert.Empty(t, b.Skipped())
	checkRoundTrip(t, b)

	empty := mustBundle(t, bundleTD, spiffe.BundleContents{})
	_, ok = empty.Sequence()
	assert.False(t, ok)
	_, ok = empty.RefreshHint()
	assert.False(t, ok)
	assert.Empty(t, empty.MarshalPEM())
	require.NotNil(t, empty.CertPool(), "nil would mean the roots of the host")
	assert.True(t, empty.CertPool().Equal(x509.NewCertPool()))
	doc := must.Get(empty.Marshal())(t)
	assert.Equal(t, `{"keys":[]}`, string(doc))
}

func TestNewBundleRefuses(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WIT-61")
	rsaKey := func(edit func(*rsa.PublicKey)) *rsa.PublicKey {
		k := bundleRSA()
		edit(k)
		return k
	}
	bits := func(n uint) *rsa.PublicKey {
		return rsaKey(func(k *rsa.PublicKey) { k.N.Lsh(big.NewInt(1), n-1).SetBit(k.N, 0, 1) })
	}
	jwt := func(id string, key crypto.PublicKey) spiffe.BundleContents {
		return spiffe.BundleContents{JWTAuthorities: map[string]crypto.PublicKey{id: key}}
	}
	wit := func(id string, key crypto.PublicKey) spiffe.BundleContents {
		return spiffe.BundleContents{WITAuthorities: map[string]crypto.PublicKey{id: key}}
	}
	certs := func(c ...*x509.Certificate) spiffe.BundleContents { return spiffe.BundleContents{X509Authorities: c} }
	moved := bundleJWTKey("1") // a point of P-256 is not one of P-384
	moved.Curve = elliptic.P384()
	many := map[string]crypto.PublicKey{}
	for i := range jws.MaxSetKeys {
		many[fmt.Sprint(i)] = bundleJWTKey("1")
	}
	for want, c := range map[string]spiffe.BundleContents{
		"X.509 authority 2 is not a parsed certificate":    certs(bundleCA("a"), nil),
		"X.509 authority 1 is not a parsed certificate":    certs(&x509.Certificate{IsCA: true, BasicConstraintsValid: true}),
		`X.509 authority 2, "": not a CA certificate`:      certs(bundleCA("a"), bundleLeaf()),
		`the key ID "" of a JWT authority is empty or`:     jwt("", bundleJWTKey("1")),
		`the key ID "\xff" of a JWT authority is empty or`: jwt("\xff", bundleJWTKey("1")),
		`JWT authority "k": the curve is not`:              jwt("k", &bundleKey(elliptic.P224(), "1").PublicKey),
		`JWT authority "k": the point is not on the curve`: jwt("k", moved),
		`"nil": the curve is not`:                          jwt("nil", (*ecdsa.PublicKey)(nil)),
		`"nil": the RSA key is empty`:                      jwt("nil", (*rsa.PublicKey)(nil)),
		`JWT authority "k": the RSA key is empty`:          jwt("k", &rsa.PublicKey{E: 65537}),
		`the RSA key has 2047 bits, not 2048 to 8192`:      jwt("k", bits(2047)),
		`the RSA key has 8193 bits, not 2048 to 8192`:      jwt("k", bits(8193)),
		`the RSA modulus is even`:                          jwt("k", rsaKey(func(k *rsa.PublicKey) { k.N.SetBit(k.N, 0, 0) })),
		`the RSA exponent 1 is not`:                        jwt("k", rsaKey(func(k *rsa.PublicKey) { k.E = 1 })),
		`the RSA exponent 65536 is not`:                    jwt("k", rsaKey(func(k *rsa.PublicKey) { k.E = 65536 })),
		`the RSA exponent -3 is not`:                       jwt("k", rsaKey(func(k *rsa.PublicKey) { k.E = -3 })),
		"no algorithm uses a key of type ed25519.":         jwt("k", ed25519.PublicKey(make([]byte, 32))),
		"no algorithm uses a key of type <nil>":            jwt("k", nil),
		"no algorithm uses a key of type rsa.":             jwt("k", *bundleRSA()),
		"the refresh hint -1s is not a number":             {RefreshHint: -time.Second},
		`the key ID "" of a WIT authority is empty or`:     wit("", bundleJWTKey("1")),
		`WIT authority "k": the curve is not`:              wit("k", &bundleKey(elliptic.P224(), "1").PublicKey),
		`the key ID "k" is that of a JWT and of a WIT`: {
			JWTAuthorities: map[string]crypto.PublicKey{"a": bundleJWTKey("1"), "k": bundleJWTKey("1")},
			WITAuthorities: map[string]crypto.PublicKey{"b": bundleJWTKey("1"), "k": bundleJWTKey("1")},
		},
		"1002 authorities, the limit is 1000: input too large": {WITAuthorities: map[string]crypto.PublicKey{"a": nil, "b": nil}, JWTAuthorities: many},
		"the refresh hint 1.5s is not a number":                {RefreshHint: 1500 * time.Millisecond},
		"1001 authorities, the limit is 1000: input too large": {X509Authorities: []*x509.Certificate{bundleCA("a")}, JWTAuthorities: many},
	} {
		_, err := spiffe.NewBundle(bundleTD, c)
		require.ErrorContains(t, err, want)
		require.True(t, strings.HasPrefix(err.Error(), `spiffe: bundle of "example.org": `), "%v", err)
	}
	_, err := spiffe.NewBundle(bundleTD, spiffe.BundleContents{JWTAuthorities: many, X509Authorities: make([]*x509.Certificate, 1)})
	require.ErrorIs(t, err, spiffe.ErrTooLarge)
	_, err = spiffe.NewBundle(spiffe.TrustDomain{}, spiffe.BundleContents{})
	require.ErrorIs(t, err, spiffe.ErrZero)
}

func TestBundleDuplicates(t *testing.T) {
	t.Parallel()
	for _, n := range []int{2, 8, 9, 50} {
		var certs, want []*x509.Certificate
		for i := range n {
			c := bundleCA(fmt.Sprint("duplicate ", i/2))
			again := must.Get(x509.ParseCertificate(c.Raw))(t)
			certs = append(certs, c, again)
			if i%2 == 0 {
				want = append(want, c)
			}
		}
		given := slices.Clone(certs)
		b := mustBundle(t, bundleTD, spiffe.BundleContents{X509Authorities: certs})
		assert.Equal(t, want, slices.Collect(b.X509Authorities()))
		assert.Equal(t, given, certs, "the caller's slice is left alone")
	}
}

// Nothing that goes in or comes out is a way to change a bundle.
func TestBundleNeverChanges(t *testing.T) {
	t.Parallel()
	c := fullContents()
	b := mustBundle(t, bundleTD, c)
	same := mustBundle(t, bundleTD, fullContents())
	roots, pool := string(b.MarshalPEM()), b.CertPool()

	spoil := func(c spiffe.BundleContents) {
		c.X509Authorities[0] = bundleCA("other")
		delete(c.JWTAuthorities, "1")
		c.JWTAuthorities["2"] = bundleJWTKey("other")
		c.WITAuthorities["w1"] = bundleJWTKey("other")
		*c.Sequence = 99
	}
	spoil(c)
	spoil(b.Contents())
	clear(b.MarshalPEM())
	b.CertPool().AddCert(bundleCA("other"))
	parsed := must.Get(spiffe.ParseBundle(bundleTD, readBundleFile(t, "BV-12.json")))(t)
	clear(parsed.Skipped())
	doc := must.Get(b.Marshal())(t)
	clear(doc)

	assert.True(t, b.Equal(same))
	assert.Equal(t, roots, string(b.MarshalPEM()))
	assert.True(t, pool.Equal(b.CertPool()))
	assert.True(t, b.CertPool().Equal(same.CertPool()))
	assert.NotNil(t, parsed.Skipped()[0])
	checkRoundTrip(t, b)

	// Contents are to edit and give back.
	edit := b.Contents()
	edit.X509Authorities = append(edit.X509Authorities, bundleCA("new"))
	*edit.Sequence++
	next := mustBundle(t, bundleTD, edit)
	n, _ := next.Sequence()
	assert.EqualValues(t, 8, n)
	assert.Len(t, slices.Collect(next.X509Authorities()), 3)
	assert.True(t, next.Supersedes(b))
}

func TestBundleConcurrentUse(t *testing.T) {
	t.Parallel()
	b := mustBundle(t, bundleTD, fullContents())
	want := mustBundle(t, bundleTD, fullContents())
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			assert.True(t, b.CertPool().Equal(want.CertPool()))
			assert.Equal(t, want.MarshalPEM(), b.MarshalPEM())
			doc, err := b.Marshal()
			assert.NoError(t, err)
			assert.NotEmpty(t, doc)
			assert.True(t, b.Equal(want))
		})
	}
	wg.Wait()
}

func TestBundleEqual(t *testing.T) {
	t.Parallel()
	b := mustBundle(t, bundleTD, fullContents())
	assert.True(t, b.Equal(b))
	assert.True(t, b.Equal(mustBundle(t, bundleTD, fullContents())))
	assert.False(t, b.Equal(nil))
	assert.False(t, (*spiffe.Bundle)(nil).Equal(b))
	assert.True(t, (*spiffe.Bundle)(nil).Equal(nil))
	assert.False(t, b.Equal(mustBundle(t, spiffe.MustParseTrustDomain("other.test"), fullContents())))

	for name, c := range map[string]struct {
		edit func(*spiffe.BundleContents)
		same bool
	}{
		"order":             {func(c *spiffe.BundleContents) { slices.Reverse(c.X509Authorities) }, true},
		"other certificate": {func(c *spiffe.BundleContents) { c.X509Authorities[1] = bundleCA("c") }, false},
		"one more":          {func(c *spiffe.BundleContents) { c.X509Authorities = append(c.X509Authorities, bundleCA("c")) }, false},
		"one less":          {func(c *spiffe.BundleContents) { c.X509Authorities = c.X509Authorities[:1] }, false},
		"other JWT key":     {func(c *spiffe.BundleContents) { c.JWTAuthorities["1"] = bundleJWTKey("x") }, false},
		"other kind of key": {func(c *spiffe.BundleContents) { c.JWTAuthorities["1"] = bundleRSA() }, false},
		"same key, other ID": {func(c *spiffe.BundleContents) {
			c.JWTAuthorities["0"] = c.JWTAuthorities["1"]
			delete(c.JWTAuthorities, "1")
		}, false},
		"other WIT key": {func(c *spiffe.BundleContents) { c.WITAuthorities["w1"] = bundleJWTKey("x") }, false},
		"no WIT keys":   {func(c *spiffe.BundleContents) { c.WITAuthorities = nil }, false},
		"JWT for WIT": {func(c *spiffe.BundleContents) {
			c.JWTAuthorities, c.WITAuthorities = c.WITAuthorities, c.JWTAuthorities
		}, false},
		"one JWT key less": {func(c *spiffe.BundleContents) { delete(c.JWTAuthorities, "1") }, false},
		"sequence":         {func(c *spiffe.BundleContents) { *c.Sequence = 8 }, false},
		"no sequence":      {func(c *spiffe.BundleContents) { c.Sequence = nil }, false},
		"hint":             {func(c *spiffe.BundleContents) { c.RefreshHint = time.Second }, false},
		"no hint":          {func(c *spiffe.BundleContents) { c.RefreshHint = 0 }, false},
	} {
		contents := fullContents()
		c.edit(&contents)
		other := mustBundle(t, bundleTD, contents)
		assert.Equal(t, c.same, b.Equal(other), name)
		assert.Equal(t, c.same, other.Equal(b), name)
	}

	// Sequence zero is a sequence.
	zero := mustBundle(t, bundleTD, spiffe.BundleContents{Sequence: new(uint64)})
	assert.False(t, zero.Equal(mustBundle(t, bundleTD, spiffe.BundleContents{})))
}

func TestBundleSupersedes(t *testing.T) {
	t.Parallel()
	none := mustBundle(t, bundleTD, spiffe.BundleContents{})
	seq := func(n uint64) *spiffe.Bundle {
		return mustBundle(t, bundleTD, spiffe.BundleContents{Sequence: &n})
	}
	for _, c := range []struct {
		b, old *spiffe.Bundle
		want   bool
	}{
		{seq(1), nil, true},
		{none, nil, true},
		{seq(8), seq(7), true},
		{seq(7), seq(7), true},
		{seq(6), seq(7), false},
		{seq(0), seq(1<<64 - 1), false},
		{none, seq(7), true},
		{seq(0), none, true},
		{none, none, true},
		{mustBundle(t, spiffe.MustParseTrustDomain("other.test"), spiffe.BundleContents{}), none, false},
	} {
		assert.Equal(t, c.want, c.b.Supersedes(c.old), "%+v over %+v", c.b, c.old)
	}
}

func TestBundleSource(t *testing.T) {
	t.Parallel()
	b := mustBundle(t, bundleTD, fullContents())
	got := must.Get(b.Bundle(bundleTD))(t)
	assert.Same(t, b, got)
	got, err := b.Bundle(spiffe.MustParseTrustDomain("other.test"))
	require.ErrorIs(t, err, spiffe.ErrUnknownTrustDomain)
	require.ErrorContains(t, err, `"other.test"`)
	assert.Nil(t, got)
	_, err = b.Bundle(spiffe.TrustDomain{})
	require.ErrorIs(t, err, spiffe.ErrUnknownTrustDomain)
}

func TestBundlePEM(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-1.5-3")
	b := mustBundle(t, bundleTD, spiffe.BundleContents{X509Authorities: fullContents().X509Authorities})
	roots := b.MarshalPEM()
	again := must.Get(spiffe.ParseBundlePEM(bundleTD, roots))(t)
	assert.True(t, b.Equal(again))
	assert.Equal(t, string(roots), string(again.MarshalPEM()))
	assert.Equal(t, 2, bytes.Count(roots, []byte("BEGIN CERTIFICATE")))

	twice := must.Get(spiffe.ParseBundlePEM(bundleTD, append(roots, roots...)))(t)
	assert.True(t, b.Equal(twice))

	mixed := append(b.MarshalPEM(), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: bundleLeaf().Raw})...)
	mixed = append(mixed, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte{0x30, 0}})...)
	most, err := spiffe.ParseBundlePEM(bundleTD, mixed)
	require.NoError(t, err)
	assert.True(t, b.Equal(most))
	require.Empty(t, b.Skipped())
	skipped := most.Skipped()
	require.Len(t, skipped, 2)
	require.ErrorContains(t, skipped[0], `spiffe: invalid bundle of "example.org": a certificate cannot be used: certificate 3: `)
	require.ErrorContains(t, skipped[0], "not a CA certificate")
	require.ErrorContains(t, skipped[1], "certificate 4: ")
	for _, none := range [][]byte{mixed[len(roots):], mixed[:len(mixed)-30]} { // none remains, and half of a file
		_, err = spiffe.ParseBundlePEM(bundleTD, none)
		require.ErrorContains(t, err, `spiffe: bundle of "example.org": `)
	}
	_, err = spiffe.ParseBundlePEM(bundleTD, nil)
	require.ErrorContains(t, err, "no certificate found")
	_, err = spiffe.ParseBundlePEM(bundleTD, make([]byte, 2<<20))
	require.ErrorIs(t, err, spiffe.ErrTooLarge)
}

// A root that a JWK cannot hold may still verify chains; it cannot be published.
func TestBundleMarshalRefuses(t *testing.T) {
	t.Parallel()
	key := bundleKey(elliptic.P224(), "p224")
	b := mustBundle(t, bundleTD, spiffe.BundleContents{X509Authorities: []*x509.Certificate{bundleCA("a"), bundleCert(key.Public(), key, 1, "")}})
	_, err := b.Marshal()
	require.EqualError(t, err, `spiffe: bundle of "example.org": X.509 authority 2, "O=example.org": a bundle document cannot hold its kind of key`)
	assert.NotEmpty(t, b.MarshalPEM())

	x25519 := bundleCertWithKey(bundleCA("a"), bundleX25519())
	b = mustBundle(t, bundleTD, spiffe.BundleContents{X509Authorities: []*x509.Certificate{x25519}})
	_, err = b.Marshal()
	require.ErrorContains(t, err, "cannot hold its kind of key")

	// Keys are shared; one that its owner has spoiled meanwhile is not published.
	spoiled := bundleJWTKey("1")
	b = mustBundle(t, bundleTD, spiffe.BundleContents{JWTAuthorities: map[string]crypto.PublicKey{"k": spoiled}})
	spoiled.Curve = elliptic.P384()
	_, err = b.Marshal()
	require.ErrorContains(t, err, `JWT authority "k": the key was changed`)
}

func TestBundleAllocations(t *testing.T) {
	b := mustBundle(t, bundleTD, fullContents())
	set := must.Get(spiffe.NewBundleSet(b))(t)
	assert.Zero(t, testing.AllocsPerRun(100, func() { _, _ = b.JWTAuthority("rsa") }))
	assert.Zero(t, testing.AllocsPerRun(100, func() { _, _ = b.Bundle(bundleTD) }))
	assert.Zero(t, testing.AllocsPerRun(100, func() { _, _ = set.Bundle(bundleTD) }))
	assert.Zero(t, testing.AllocsPerRun(100, func() {
		for c := range b.X509Authorities() {
			_ = c
		}
	}))
}

// An authority with a huge key would make every handshake with its domain slow: one of our own
// making is an error, one in a document is skipped.
func TestBundleHugeAuthority(t *testing.T) {
	t.Parallel()
	parent := caSpec("ca1", "spiffe://example.org").issue(nil).parse(t)
	td := spiffe.MustParseTrustDomain("example.org")
	key := must.Get(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
	for bits, ok := range map[uint]bool{8192: true, 8193: false} {
		pub := &rsa.PublicKey{N: new(big.Int).SetBit(new(big.Int).Lsh(big.NewInt(1), bits-1), 0, 1), E: 65537}
		tmpl := &x509.Certificate{
			SerialNumber: big.NewInt(1), BasicConstraintsValid: true, IsCA: true, KeyUsage: x509.KeyUsageCertSign,
			NotBefore: parent.NotBefore, NotAfter: parent.NotAfter,
		}
		der, err := x509.CreateCertificate(rand.Reader, tmpl, &x509.Certificate{Subject: parent.Subject, PublicKey: key.Public()}, pub, key)
		require.NoError(t, err)
		cert := must.Get(x509.ParseCertificate(der))(t)

		_, err = spiffe.NewBundle(td, spiffe.BundleContents{X509Authorities: []*x509.Certificate{parent, cert}})
		doc := fmt.Sprintf(`{"keys":[{"use":"x509-svid","kty":"RSA","e":"AQAB","n":%q,"x5c":[%q]}]}`,
			base64.RawURLEncoding.EncodeToString(pub.N.Bytes()), base64.StdEncoding.EncodeToString(der))
		parsed := must.Get(spiffe.ParseBundle(td, []byte(doc)))(t)
		if ok {
			require.NoError(t, err)
			assert.Empty(t, parsed.Skipped())
			continue
		}
		assert.ErrorContains(t, err, "authority 2, \"\": an RSA key of 8193 bits")
		require.Len(t, parsed.Skipped(), 1)
		assert.ErrorContains(t, parsed.Skipped()[0], "RSA key of 8193 bits")
	}
}
