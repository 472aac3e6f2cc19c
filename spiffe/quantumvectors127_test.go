//go:build go1.27

package spiffe_test

import (
	"bytes"
	"crypto"
	"crypto/mldsa"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/quantum"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// TestQuantumAlgorithms: a chain is accepted if each key on its path is allowed, whatever kind signs which.
func TestQuantumAlgorithms(t *testing.T) {
	t.Parallel()
	quantum.Need(t)
	kinds := []string{"ecdsa-p256", "ml-dsa-44", "ml-dsa-65"}
	for _, root := range kinds {
		issuer := quantum.Root(t, root)
		bundle := quantum.Bundle(t, issuer.Certificate())
		for _, middle := range append(slices.Clone(kinds), "") {
			below := issuer
			if middle != "" {
				below = quantum.Below(t, issuer, middle)
			}
			for _, leaf := range kinds {
				svid := quantum.SVID(t, below, leaf, "web")
				for _, text := range []string{"", "ecdsa", "ml-dsa-44", "ml-dsa-65", "ml-dsa-44,ml-dsa-65", "ecdsa,ml-dsa-65",
					"rsa,ed25519", spiffe.AnyAlgorithm().String()} {
					var allowed spiffe.Algorithms
					if text != "" {
						allowed = algorithms(t, text)
					}
					want := true
					for _, kind := range []string{root, middle, leaf} {
						want = want && strings.Contains(allowed.String(), strings.TrimSuffix(kind, "-p256"))
					}
					first := must.Get(spiffe.NewVerifier(bundle, spiffe.AllowAnyPeer(), nil))(t)
					must.Get(first.WithAlgorithms(spiffe.AnyAlgorithm()).VerifyChain(svid.Chain(), spiffe.BothRoles))(t) // it has a memory
					v := first.WithAlgorithms(allowed)
					_, err := v.VerifyChain(svid.Chain(), spiffe.BothRoles)
					name := fmt.Sprintf("%s below %s below %s, allowed: %s", leaf, middle, root, allowed)
					if want {
						assert.NoError(t, err, name)
						continue
					}
					e := must.As[*spiffe.VerifyError](err)(t, name)
					assert.Equal(t, "chain", e.Stage)
					assert.ErrorIs(t, err, spiffe.ErrAlgorithm, name)
				}
			}
		}
	}
}

// TestQuantumPaths: of a path over each of two roots, the one that is allowed counts, and not the one that lasts longer.
func TestQuantumPaths(t *testing.T) {
	t.Parallel()
	quantum.Need(t)
	classical, both := quantum.Root(t, "ecdsa-p256"), quantum.Root(t, "ml-dsa-65")
	key := must.Get(pki.NewKey("ml-dsa-44"))(t)
	start := both.Certificate().NotBefore
	cross := func(root *pki.Issuer, life time.Duration) *x509.Certificate {
		return must.Get(root.Issue(pki.CertificateOptions{PublicKey: key.Public(), CA: true,
			SANs: []pki.SAN{pki.IDSAN(quantum.TrustDomain.ID())}, NotBefore: start, NotAfter: start.Add(life)}))(t)
	}
	long, short := cross(classical, 110*time.Minute), cross(both, 100*time.Minute)
	issuer := must.Get(pki.NewIssuer([]*x509.Certificate{long}, key))(t)
	leaf := quantum.SVID(t, issuer, "ml-dsa-65", "web").Leaf()
	bundle := quantum.Bundle(t, classical.Certificate(), both.Certificate())
	for text, root := range map[string]*pki.Issuer{
		"":                                      nil,
		"ecdsa":                                 nil,
		"ml-dsa-65":                             nil,
		"ml-dsa-44":                             nil,
		"ml-dsa-44,ml-dsa-65":                   both,
		"ecdsa,ml-dsa-65":                       nil,
		"ecdsa,rsa,ed25519,ml-dsa-44,ml-dsa-65": classical,
	} {
		for _, chain := range [][]*x509.Certificate{{leaf, long, short}, {leaf, short, long}} {
			v := must.Get(spiffe.NewVerifier(bundle, spiffe.AllowAnyPeer(), nil))(t)
			if text != "" {
				v = v.WithAlgorithms(algorithms(t, text))
			}
			peer, err := v.VerifyChain(chain, spiffe.BothRoles)
			if root == nil {
				assert.ErrorIs(t, err, spiffe.ErrAlgorithm, text)
				continue
			}
			require.NoError(t, err, text)
			path := peer.Chain()
			assert.True(t, path[len(path)-1].Equal(root.Certificate()), text)
		}
	}
}

func TestWithAlternative(t *testing.T) {
	t.Parallel()
	quantum.Need(t)
	classical, ml := quantum.Root(t, "ecdsa-p256"), quantum.Root(t, "ml-dsa-65")
	own, other := quantum.SVID(t, classical, "ecdsa-p256", "web"), quantum.SVID(t, ml, "ml-dsa-44", "web")
	for name, c := range map[string]struct {
		own, alternative *spiffe.SVID
		bad              string
	}{
		"44":                       {own, other, ""},
		"65":                       {own, quantum.SVID(t, ml, "ml-dsa-65", "web"), ""},
		"65 below a classical one": {own, quantum.SVID(t, classical, "ml-dsa-65", "web"), ""},
		"RSA":                      {quantum.SVID(t, classical, "rsa-2048", "web"), other, ""},
		"none":                     {own, nil, "another ID"},
		"another ID":               {own, quantum.SVID(t, ml, "ml-dsa-44", "db"), "another ID"},
		"both classical":           {own, quantum.SVID(t, classical, "ecdsa-p384", "web"), "key of ML-DSA"},
		"both ML-DSA":              {other, quantum.SVID(t, ml, "ml-dsa-65", "web"), "key of ML-DSA"},
		"the other way round":      {other, own, "key of ML-DSA"},
		"itself":                   {own, own, "key of ML-DSA"},
	} {
		both, err := c.own.WithAlternative(c.alternative)
		if c.bad != "" {
			assert.ErrorContains(t, err, c.bad, name)
			assert.Nil(t, both, name)
			continue
		}
		require.NoError(t, err, name)
		assert.Same(t, c.alternative, both.Alternative())
		assert.Nil(t, c.own.Alternative(), "the first stays as it was")
		assert.Equal(t, c.own.ID(), both.ID())
		assert.Equal(t, c.own.Chain(), both.Chain())
		assert.Same(t, c.own.TLSCertificate(), both.TLSCertificate())
		assert.NotContains(t, fmt.Sprintf("%+v %#v %s", both, both, both), "mldsa", "no printer looks into a key")
		replaced := must.Get(both.WithAlternative(other))(t, name)
		assert.Same(t, other, replaced.Alternative())
	}
}

// TestQuantumJWKVectors: an entry of a document has one fault, and hides no other.
func TestQuantumJWKVectors(t *testing.T) {
	t.Parallel()
	quantum.Need(t)
	root, stranger := quantum.Root(t, "ml-dsa-65"), quantum.Root(t, "ml-dsa-65")
	pub := root.Certificate().PublicKey.(*mldsa.PublicKey).Bytes()
	p256 := must.Get(pki.NewKey("ecdsa-p256"))(t).Public()
	url, std := base64.RawURLEncoding.EncodeToString, base64.StdEncoding.EncodeToString
	jwt := map[string]any{"use": "jwt-svid", "kid": "65", "kty": "AKP", "alg": "ML-DSA-65", "pub": url(pub)}
	x5c := map[string]any{"use": "x509-svid", "kty": "AKP", "alg": "ML-DSA-65", "pub": url(pub), "x5c": []string{std(root.Certificate().Raw)}}
	with := func(base map[string]any, members ...any) map[string]any {
		m := maps.Clone(base)
		for i := 0; i < len(members); i += 2 {
			if m[members[i].(string)] = members[i+1]; members[i+1] == nil {
				delete(m, members[i].(string))
			}
		}
		return m
	}
	const digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
	stray := []byte(url(pub)) // bits behind the last byte
	last := &stray[len(stray)-1]
	*last = digits[strings.IndexByte(digits, *last)+1]
	loose := must.Get(base64.RawURLEncoding.DecodeString(string(stray)))(t)
	require.Equal(t, pub, loose, "a reader that is not strict")
	for name, c := range map[string]struct {
		entry map[string]any
		rule  string
	}{
		"jwt":                       {jwt, ""},
		"jwt, alg missing":          {with(jwt, "alg", nil), "BND-14"},
		"jwt, alg of the other":     {with(jwt, "alg", "ML-DSA-44"), "BND-14"},
		"jwt, alg of no size":       {with(jwt, "alg", "ML-DSA-87"), "BND-14"},
		"jwt, alg of another kind":  {with(jwt, "alg", "ES256"), "BND-14"},
		"jwt, alg in lower case":    {with(jwt, "alg", "ml-dsa-65"), "BND-14"},
		"jwt, alg is a number":      {with(jwt, "alg", 65), "BND-14"},
		"jwt, pub missing":          {with(jwt, "pub", nil), "BND-14"},
		"jwt, pub in x":             {with(jwt, "pub", nil, "x", url(pub)), "BND-14"},
		"jwt, pub is a list":        {with(jwt, "pub", []string{url(pub)}), "BND-14"},
		"jwt, pub empty":            {with(jwt, "pub", ""), "BND-14"},
		"jwt, pub a byte short":     {with(jwt, "pub", url(pub[1:])), "BND-14"},
		"jwt, pub a byte long":      {with(jwt, "pub", url(append(slices.Clone(pub), 0))), "BND-14"},
		"jwt, pub twice":            {with(jwt, "pub", url(append(slices.Clone(pub), pub...))), "BND-14"},
		"jwt, pub of 44":            {with(jwt, "pub", url(make([]byte, 1312))), "BND-14"},
		"jwt, pub padded":           {with(jwt, "pub", url(pub)+"="), "BND-14"},
		"jwt, pub in base64":        {with(jwt, "pub", std(pub)), "BND-14"},
		"jwt, pub with stray bits":  {with(jwt, "pub", string(stray)), "BND-14"},
		"jwt, pub with a line":      {with(jwt, "pub", url(pub)[:4]+"\n"+url(pub)[4:]), "BND-14"},
		"jwt, kty of another":       {with(jwt, "kty", "OKP"), "BND-32"},
		"jwt, kty in lower case":    {with(jwt, "kty", "akp"), "BND-14"},
		"jwt, kid missing":          {with(jwt, "kid", nil), "BND-30"},
		"x5c":                       {x5c, ""},
		"x5c, alg missing":          {with(x5c, "alg", nil), "X5-59"},
		"x5c, alg of the other":     {with(x5c, "alg", "ML-DSA-44"), "X5-59"},
		"x5c, pub missing":          {with(x5c, "pub", nil), "X5-59"},
		"x5c, pub of another":       {with(x5c, "pub", url(stranger.Certificate().PublicKey.(*mldsa.PublicKey).Bytes())), "X5-59"},
		"x5c, pub a byte short":     {with(x5c, "pub", url(pub[1:])), "X5-59"},
		"x5c, pub padded":           {with(x5c, "pub", url(pub)+"="), "X5-59"},
		"x5c, pub with stray bits":  {with(x5c, "pub", string(stray)), "X5-59"},
		"x5c, kty of another":       {with(x5c, "kty", "RSA"), "X5-59"},
		"x5c of another":            {with(x5c, "x5c", []string{std(stranger.Certificate().Raw)}), "X5-59"},
		"x5c of P-256":              {with(x5c, "x5c", []string{std(quantum.Root(t, "ecdsa-p256").Certificate().Raw)}), "X5-59"},
		"x5c of a leaf":             {leafEntry(t, root), "X5-41"},
		"x5c, a private key":        {with(x5c, "priv", url(make([]byte, 32))), ""}, // as with "d" of other keys
		"x5c, the kid of the token": {with(x5c, "kid", "65"), ""},
	} {
		good := must.Get(spiffe.NewBundle(quantum.TrustDomain, spiffe.BundleContents{
			X509Authorities: []*x509.Certificate{stranger.Certificate()}}))(t)
		doc := must.Get(good.Marshal())(t)
		entry := must.Get(json.Marshal(c.entry))(t)
		doc = bytes.Replace(doc, []byte(`"keys":[`), append(append([]byte(`"keys":[`), entry...), ','), 1)
		b := must.Get(spiffe.ParseBundle(quantum.TrustDomain, doc))(t, name)
		if c.rule == "" {
			assert.Empty(t, b.Skipped(), name)
			assert.Equal(t, 2, len(slices.Collect(b.X509Authorities()))+len(maps.Collect(b.JWTAuthorities())), name)
			again := must.Get(b.Marshal())(t)
			assert.True(t, must.Get(spiffe.ParseBundle(quantum.TrustDomain, again))(t).Equal(b), name)
			continue
		}
		if assert.Len(t, b.Skipped(), 1, name) {
			assert.Equal(t, c.rule, must.As[*spiffe.ParseError](b.Skipped()[0])(t).Rule, name)
		}
		assert.Len(t, slices.Collect(b.X509Authorities()), 1, name)
		assert.Empty(t, maps.Collect(b.JWTAuthorities()), name)
	}

	// A JWK Set of another issuer.
	for name, c := range map[string]struct {
		entry map[string]any
		ok    bool
	}{
		"good":          {with(jwt, "use", "sig"), true},
		"without use":   {with(jwt, "use", nil), true},
		"a private key": {with(jwt, "use", "sig", "priv", url(make([]byte, 32))), false},
		"to sign":       {with(jwt, "use", "sig", "key_ops", []string{"sign"}), false},
		"alg missing":   {with(jwt, "use", "sig", "alg", nil), false},
		"alg of ECDSA":  {with(jwt, "use", "sig", "alg", "ES256"), false},
	} {
		doc := must.Get(json.Marshal(map[string]any{"keys": []any{c.entry}}))(t)
		b := must.Get(spiffe.ParseJWKS(quantum.TrustDomain, doc))(t)
		assert.Equal(t, c.ok, len(maps.Collect(b.JWTAuthorities())) == 1, name)
		assert.Equal(t, c.ok, len(b.Skipped()) == 0, name)
	}

	// One ID is of one key.
	conflict := must.Get(json.Marshal(map[string]any{"keys": []any{jwt,
		with(jwt, "pub", url(stranger.Certificate().PublicKey.(*mldsa.PublicKey).Bytes()))}}))(t)
	_, err := spiffe.ParseBundle(quantum.TrustDomain, conflict)
	assert.Equal(t, "BND-30", must.As[*spiffe.ParseError](err)(t).Rule)
	classical := must.Get(json.Marshal(map[string]any{"keys": []any{jwt, jwkOf(t, p256, "65")}}))(t)
	_, err = spiffe.ParseBundle(quantum.TrustDomain, classical)
	assert.Equal(t, "BND-30", must.As[*spiffe.ParseError](err)(t).Rule, "of two kinds")
	same := must.Get(json.Marshal(map[string]any{"keys": []any{jwt, jwt}}))(t)
	assert.Len(t, maps.Collect(must.Get(spiffe.ParseBundle(quantum.TrustDomain, same))(t).JWTAuthorities()), 1)
}

// jwkOf returns the entry of a key for tokens.
func jwkOf(t *testing.T, key any, id string) (entry map[string]any) {
	b := must.Get(spiffe.NewBundle(quantum.TrustDomain, spiffe.BundleContents{JWTAuthorities: map[string]crypto.PublicKey{id: key}}))(t)
	var doc struct{ Keys []map[string]any }
	require.NoError(t, json.Unmarshal(must.Get(b.Marshal())(t), &doc))
	return doc.Keys[0]
}

// leafEntry is an entry whose certificate is no CA's.
func leafEntry(t *testing.T, issuer *pki.Issuer) map[string]any {
	leaf := quantum.SVID(t, issuer, "ml-dsa-65", "web").Leaf()
	pub := leaf.PublicKey.(*mldsa.PublicKey).Bytes()
	return map[string]any{"use": "x509-svid", "kty": "AKP", "alg": "ML-DSA-65", "pub": base64.RawURLEncoding.EncodeToString(pub),
		"x5c": []string{base64.StdEncoding.EncodeToString(leaf.Raw)}}
}
