package pki_test

import (
	"bytes"
	"crypto"
	"crypto/ed25519"
	"crypto/x509"
	"encoding/json"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

func svidOf(t testing.TB, root *pki.Issuer, key crypto.Signer) *spiffe.SVID {
	t.Helper()
	o := leafOptions()
	o.PublicKey = key.Public()
	leaf, err := root.IssueLeaf(o)
	require.NoError(t, err)
	svid, err := spiffe.NewSVID([]*x509.Certificate{leaf}, key)
	require.NoError(t, err)
	return svid
}

func TestKeyPairSecret(t *testing.T) {
	t.Parallel()
	key := newKey(t, pki.ECDSAP256)
	svid := svidOf(t, newRoot(t), key)
	s, err := pki.NewKeyPairSecret("default", svid)
	require.NoError(t, err)
	assert.Equal(t, "default", s.Name())
	assert.Equal(t, svid.NotAfter(), s.NotAfter())
	chain, keyPEM, ok := s.KeyPair()
	require.True(t, ok)
	assert.Equal(t, pki.MarshalCertificatesPEM(svid.Leaf()), chain)
	back, err := pki.ParsePrivateKeyPEM(keyPEM)
	require.NoError(t, err)
	assert.Equal(t, key, back)
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
	bundle, err := spiffe.NewBundle(exampleOrg, spiffe.BundleContents{X509Authorities: []*x509.Certificate{root}})
	require.NoError(t, err)
	s, err := pki.NewTrustSecret("ROOTCA", bundle)
	require.NoError(t, err)
	assert.Equal(t, "ROOTCA", s.Name())
	assert.True(t, s.NotAfter().IsZero())
	roots, ok := s.Roots()
	require.True(t, ok)
	assert.Equal(t, pki.MarshalCertificatesPEM(root), roots)
	_, _, ok = s.KeyPair()
	assert.False(t, ok)

	empty, err := spiffe.NewBundle(exampleOrg, spiffe.BundleContents{})
	require.NoError(t, err)
	_, err = pki.NewTrustSecret("ROOTCA", empty)
	require.ErrorIs(t, err, spiffe.ErrNoAuthority)
	_, err = pki.NewTrustSecret("", bundle)
	require.Error(t, err)
	_, err = pki.NewTrustSecret("ROOTCA", nil)
	require.Error(t, err)
}

func TestSecretPEM(t *testing.T) {
	t.Parallel()
	root := newRoot(t)
	o := leafOptions()
	o.PublicKey = rsaKey().Public()
	leaf, err := root.IssueLeaf(o)
	require.NoError(t, err)
	chain := pki.MarshalCertificatesPEM(leaf, root.Certificate())
	key, err := pki.MarshalPrivateKeyPEM(rsaKey())
	require.NoError(t, err)
	roots := pki.MarshalCertificatesPEM(root.Certificate())

	pkcs1 := keyFiles(t)["PKCS#1"].pem
	s, err := pki.NewSecretPEM("file-cert:c~k", append([]byte("# comment\n"), chain...), []byte(pkcs1), nil, time.Time{})
	require.NoError(t, err)
	gotChain, gotKey, ok := s.KeyPair()
	require.True(t, ok)
	assert.Equal(t, chain, gotChain)
	assert.Equal(t, key, gotKey, "PKCS#8")
	assert.Equal(t, leaf.NotAfter, s.NotAfter())
	assert.Equal(t, "file-cert:c~k", s.Name())

	early := leaf.NotAfter.Add(-time.Minute)
	s, err = pki.NewSecretPEM("x", chain, key, nil, early)
	require.NoError(t, err)
	assert.Equal(t, early, s.NotAfter())
	s, err = pki.NewSecretPEM("x", chain, key, nil, leaf.NotAfter.Add(time.Hour))
	require.NoError(t, err)
	assert.Equal(t, leaf.NotAfter, s.NotAfter())

	s, err = pki.NewSecretPEM("file-root:r", nil, nil, append([]byte("# comment\n"), roots...), time.Time{})
	require.NoError(t, err)
	gotRoots, ok := s.Roots()
	require.True(t, ok)
	assert.Equal(t, roots, gotRoots)
	assert.True(t, s.NotAfter().IsZero())

	otherKey, err := pki.MarshalPrivateKeyPEM(newKey(t, pki.ECDSAP256))
	require.NoError(t, err)
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
		if tc.also != nil {
			require.ErrorIs(t, err, tc.also, name)
		}
	}
}

func TestSecretDoesNotPrintItsKey(t *testing.T) {
	t.Parallel()
	key := newKey(t, pki.Ed25519)
	s, err := pki.NewKeyPairSecret("default", svidOf(t, newRoot(t), key))
	require.NoError(t, err)
	_, keyPEM, _ := s.KeyPair()
	bundle, err := spiffe.NewBundle(exampleOrg, spiffe.BundleContents{X509Authorities: []*x509.Certificate{newRoot(t).Certificate()}})
	require.NoError(t, err)
	roots, err := pki.NewTrustSecret("ROOTCA", bundle)
	require.NoError(t, err)

	assert.Equal(t, `pki.Secret("default", key pair until 2026-03-01T12:00:00Z)`, s.String())
	assert.Equal(t, s.String(), s.GoString())
	assert.Equal(t, `pki.Secret("ROOTCA", roots)`, roots.String())
	assert.Equal(t, `pki.Secret("", empty)`, pki.Secret{}.String())

	var buf bytes.Buffer
	for _, log := range []*slog.Logger{slog.New(slog.NewTextHandler(&buf, nil)), slog.New(slog.NewJSONHandler(&buf, nil))} {
		log.Info("x", "secret", s, "value", *s, "any", struct{ S *pki.Secret }{s}, "roots", roots)
	}
	assert.Contains(t, buf.String(), "secret.kind=\"key pair\" secret.not_after=2026-03-01T12:00:00.000Z")
	assert.Contains(t, buf.String(), `"roots":{"name":"ROOTCA","kind":"roots"}`)
	secret := key.(ed25519.PrivateKey).Seed()
	assertNoKey(t, secret, &buf, s, *s, roots, pki.Secret{})
	// The PEM of the key: its base64, from behind the header that all keys share.
	line := strings.Split(string(keyPEM), "\n")[1]
	assertNoKey(t, []byte(line[len(line)-24:]), &buf, s, *s)
	b, err := json.Marshal([]any{s})
	require.NoError(t, err)
	assert.Equal(t, "[{}]", string(b))
}
