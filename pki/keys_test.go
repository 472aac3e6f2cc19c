package pki_test

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"encoding/json"
	"math/big"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
)

var algorithms = map[pki.KeyAlgorithm]string{
	pki.ECDSAP256: "ecdsa-p256",
	pki.ECDSAP384: "ecdsa-p384",
	pki.RSA2048:   "rsa-2048",
	pki.RSA3072:   "rsa-3072",
	pki.RSA4096:   "rsa-4096",
	pki.Ed25519:   "ed25519",
}

func newKey(t testing.TB, a pki.KeyAlgorithm) crypto.Signer {
	t.Helper()
	return must.Get(pki.NewKey(a))(t)
}

// rsaKey is made once: RSA keys are slow to make, and tests only need one or two.
var rsaKey = sync.OnceValue(func() crypto.Signer {
	key, err := pki.NewKey(pki.RSA2048)
	if err != nil {
		panic(err)
	}
	return key
})

func TestNewKey(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	conformance.Covers(t, "IST-2.2-1", "IST-2.2-2", "IST-2.2-3")
	p256 := newKey(t, pki.ECDSAP256)
	assert.Equal(t, elliptic.P256(), p256.Public().(*ecdsa.PublicKey).Curve)
	p384 := newKey(t, pki.ECDSAP384)
	assert.Equal(t, elliptic.P384(), p384.Public().(*ecdsa.PublicKey).Curve)
	assert.Equal(t, 2048, rsaKey().Public().(*rsa.PublicKey).N.BitLen())
	assert.Equal(t, 3072, newKey(t, pki.RSA3072).Public().(*rsa.PublicKey).N.BitLen())
	assert.IsType(t, ed25519.PublicKey{}, newKey(t, pki.Ed25519).Public())
	for _, key := range []crypto.Signer{p256, p384, rsaKey(), newKey(t, pki.Ed25519)} {
		assert.NoError(t, pki.CheckPublicKey(key.Public()))
	}
	key := must.Get(pki.NewKey(""))(t)
	assert.Equal(t, elliptic.P256(), key.Public().(*ecdsa.PublicKey).Curve)
	for _, a := range []pki.KeyAlgorithm{"rsa", "RSA-2048", "ecdsa-p256 ", "0", pki.KeyAlgorithm(strings.Repeat("x", 1000))} {
		key, err := pki.NewKey(a)
		assert.ErrorContains(t, err, "pki: generate key: unknown key algorithm")
		assert.Less(t, len(err.Error()), 100)
		assert.True(t, key == nil, "a nil pointer in the interface")
	}
}

// The text is part of configuration files.
func TestKeyAlgorithmText(t *testing.T) {
	t.Parallel()
	for a, name := range algorithms {
		b := must.Get(json.Marshal(map[string]pki.KeyAlgorithm{"key": a}))(t)
		assert.JSONEq(t, `{"key":"`+name+`"}`, string(b))
	}
}

func oddModulus(bits int) *big.Int {
	n := new(big.Int).Lsh(big.NewInt(1), uint(bits-1))
	return n.Add(n, big.NewInt(1))
}

func TestCheckPublicKey(t *testing.T) {
	t.Parallel()
	p224 := must.Get(ecdsa.GenerateKey(elliptic.P224(), rand.Reader))(t)
	p521 := must.Get(ecdsa.GenerateKey(elliptic.P521(), rand.Reader))(t)
	rsaOf := func(bits, e int) *rsa.PublicKey { return &rsa.PublicKey{N: oddModulus(bits), E: e} }
	for _, tc := range []struct {
		name string
		key  crypto.PublicKey
		ok   bool
	}{
		{"RSA 2048", rsaOf(2048, 65537), true},
		{"RSA 8192", rsaOf(8192, 65537), true},
		{"RSA with a large exponent", rsaOf(3072, 1<<31-1), true},
		{"P-521", &p521.PublicKey, true},
		{"RSA 1024", rsaOf(1024, 65537), false},
		{"RSA 2047", rsaOf(2047, 65537), false},
		{"RSA 8193", rsaOf(8193, 65537), false},
		{"RSA 16384", rsaOf(16384, 65537), false},
		{"RSA exponent 1", rsaOf(2048, 1), false},
		{"RSA exponent 3", rsaOf(2048, 3), false},
		{"RSA exponent 65535", rsaOf(2048, 65535), false},
		{"RSA exponent 65536", rsaOf(2048, 65536), false},
		{"RSA exponent 65538", rsaOf(2048, 65538), false},
		{"RSA exponent -65537", rsaOf(2048, -65537), false},
		{"RSA even modulus", &rsa.PublicKey{N: new(big.Int).Lsh(big.NewInt(1), 2047), E: 65537}, false},
		{"RSA negative modulus", &rsa.PublicKey{N: new(big.Int).Neg(oddModulus(2048)), E: 65537}, false},
		{"RSA no modulus", &rsa.PublicKey{E: 65537}, false},
		{"RSA nil", (*rsa.PublicKey)(nil), false},
		{"RSA by value", *rsaOf(2048, 65537), false},
		{"P-224", &p224.PublicKey, false},
		{"not on the curve", offCurve(), false},
		{"ECDSA without a curve", &ecdsa.PublicKey{}, false},
		{"ECDSA without a point", &ecdsa.PublicKey{Curve: elliptic.P256()}, false},
		{"ECDSA nil", (*ecdsa.PublicKey)(nil), false},
		{"Ed25519 neutral element", ed25519.PublicKey(append([]byte{1}, make([]byte, 31)...)), false},
		{"Ed25519 neutral element with the other sign", ed25519.PublicKey(append(append([]byte{1}, make([]byte, 30)...), 0x80)), false},
		{"Ed25519 of order 4", ed25519.PublicKey(make([]byte, 32)), false},
		{"Ed25519 of order 8", ed25519.PublicKey(unhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc85")), false},
		{"Ed25519 short", ed25519.PublicKey(make([]byte, 31)), false},
		{"Ed25519 nil", ed25519.PublicKey(nil), false},
		{"another kind", struct{}{}, false},
		{"a private key", p521, false},
		{"nil", nil, false},
	} {
		err := pki.CheckPublicKey(tc.key)
		if tc.ok {
			assert.NoError(t, err, tc.name)
			continue
		}
		assert.ErrorIs(t, err, pki.ErrWeakKey, tc.name)
		assert.ErrorContains(t, err, "pki: ", tc.name)
	}
}

// A forged signature, made without a private key, verifies with a key of small order, which is why such a key is
// refused.
func TestSmallOrderIsForgeable(t *testing.T) {
	t.Parallel()
	neutral := append([]byte{1}, make([]byte, 31)...)
	forged := append(append([]byte{}, neutral...), make([]byte, 32)...) // R is the neutral element, S is 0
	require.True(t, ed25519.Verify(neutral, []byte("anything"), forged))
	require.ErrorIs(t, pki.CheckPublicKey(ed25519.PublicKey(neutral)), pki.ErrWeakKey)
}

func offCurve() *ecdsa.PublicKey {
	//lint:ignore SA1019 nothing else makes a bad key
	return &ecdsa.PublicKey{Curve: elliptic.P256(), X: big.NewInt(1), Y: big.NewInt(1)}
}

func TestPublicKeysEqual(t *testing.T) {
	t.Parallel()
	all := []crypto.PublicKey{
		newKey(t, pki.ECDSAP256).Public(), newKey(t, pki.ECDSAP256).Public(), newKey(t, pki.ECDSAP384).Public(),
		rsaKey().Public(), &rsa.PublicKey{N: oddModulus(2048), E: 65537},
		newKey(t, pki.Ed25519).Public(), newKey(t, pki.Ed25519).Public(),
	}
	for i, a := range all {
		for j, b := range all {
			assert.Equal(t, i == j, pki.PublicKeysEqual(a, b), "%d, %d", i, j)
		}
	}
	var noRSA *rsa.PublicKey
	var noEC *ecdsa.PublicKey
	nothing := []crypto.PublicKey{nil, noRSA, noEC, ed25519.PublicKey{}, "text", newKey(t, pki.ECDSAP256)}
	for i, a := range nothing {
		for j, b := range append(nothing, all...) {
			assert.False(t, pki.PublicKeysEqual(a, b), "%d, %d", i, j)
			assert.False(t, pki.PublicKeysEqual(b, a), "%d, %d", j, i)
		}
	}
}
