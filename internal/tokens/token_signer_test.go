package tokens_test

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	_ "crypto/sha512"
	"encoding/base64"
	"errors"
	"io"
	"math/big"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/internal/tokens/token"
	"github.com/svidkit/svidkit/spiffe"
)

var kind = &token.Kind{Package: "test", What: "token", Form: "F", Algorithm: "A", Subject: "S", Bundle: "B", Expires: "E", NotBefore: "N"}

// keys has a key for each algorithm.
func keys(t testing.TB) map[jws.Algorithm]crypto.Signer {
	t.Helper()
	r := rsa2048()
	return map[jws.Algorithm]crypto.Signer{
		jws.ES256: ecKey(t, elliptic.P256()), jws.ES384: ecKey(t, elliptic.P384()), jws.ES512: ecKey(t, elliptic.P521()),
		jws.RS256: r, jws.RS384: r, jws.RS512: r, jws.PS256: r, jws.PS384: r, jws.PS512: r,
	}
}

// good verifies a signature with package crypto alone.
func good(a jws.Algorithm, key crypto.PublicKey, input, sig []byte) bool {
	h := a.Hash().New()
	h.Write(input)
	switch k := key.(type) {
	case *ecdsa.PublicKey:
		half := len(sig) / 2
		return half == (k.Params().BitSize+7)/8 && ecdsa.Verify(k, h.Sum(nil), new(big.Int).SetBytes(sig[:half]), new(big.Int).SetBytes(sig[half:]))
	case *rsa.PublicKey:
		if strings.HasPrefix(a.String(), "PS") {
			return rsa.VerifyPSS(k, a.Hash(), h.Sum(nil), sig, &rsa.PSSOptions{SaltLength: a.Hash().Size()}) == nil
		}
		return rsa.VerifyPKCS1v15(k, a.Hash(), h.Sum(nil), sig) == nil
	}
	return false
}

// remote is a key that is somewhere else: only its methods are known.
type remote struct{ crypto.Signer }

// split returns what a token signs, and its signature.
func split(t testing.TB, text string) (input, sig []byte) {
	t.Helper()
	dot := strings.LastIndexByte(text, '.')
	sig = must.Get(base64.RawURLEncoding.DecodeString(text[dot+1:]))(t)
	return []byte(text[:dot]), sig
}

func parse(t testing.TB, text string) *token.Signed {
	t.Helper()
	s, e := kind.Parse(text)
	require.Nil(t, e)
	return s
}

// Tokens of all algorithms are as their RFC says, by a judge that shares no code with go-jose, and those
// that are not are refused.
func TestTokenAlgorithms(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	for a, key := range keys(t) {
		t.Run(a.String(), func(t *testing.T) {
			t.Parallel()
			signer := must.Get(token.NewSigner(remote{key}, a.String(), "k", "JWT"))(t)
			for range 8 { // R and S have leading zeros now and then
				text := must.Get(signer.Token([]byte(`{"a":1}`)))(t)
				input, sig := split(t, text)
				require.True(t, good(a, key.Public(), input, sig))
				s := parse(t, text)
				assert.Equal(t, jws.Header{Algorithm: a, KeyID: "k", HasKeyID: true, Type: "JWT", HasType: true}, s.Header)
				assert.Equal(t, `{"a":1}`, string(s.Payload))
				require.NoError(t, s.Verify(key.Public(), spiffe.Algorithms{}))
			}

			text := must.Get(signer.Token([]byte(`{"a":1}`)))(t)
			input, sig := split(t, text)
			first, last := bytes.Clone(sig), bytes.Clone(sig)
			first[0] ^= 1
			last[len(last)-1] ^= 1
			for name, bad := range map[string][]byte{
				"first bit": first, "last bit": last, "longer": append(bytes.Clone(sig), 0), "zero in front": append([]byte{0}, sig...),
				"none": nil, "zeros": make([]byte, len(sig)), "cut": sig[:len(sig)-1],
			} {
				s := parse(t, string(input)+"."+base64.RawURLEncoding.EncodeToString(bad))
				assert.EqualError(t, s.Verify(key.Public(), spiffe.Algorithms{}), "the signature does not match the key", name)
			}
			moved := strings.Replace(text, ".", "."+base64.RawURLEncoding.EncodeToString([]byte(" \n\t")), 1) // another payload
			assert.EqualError(t, parse(t, moved).Verify(key.Public(), spiffe.Algorithms{}), "the signature does not match the key")

			for b, other := range keys(t) {
				if _, rs := key.(*rsa.PrivateKey); b == a || rs && b.Fits(key.Public()) {
					continue
				}
				assert.Error(t, parse(t, text).Verify(other.Public(), spiffe.Algorithms{}), "a key for %v", b)
				_, err := token.NewSigner(key, b.String(), "", "JWT")
				assert.ErrorContains(t, err, "does not fit the key")
			}
		})
	}
}

// The header decides the algorithm only as long as the key fits: an RSA signature of one algorithm is
// none of another.
func TestTokenAlgorithmsOfOneKey(t *testing.T) {
	t.Parallel()
	key := rsa2048()
	for b := jws.RS256; b <= jws.PS512; b++ {
		for a := range jws.PS512 + 1 {
			if a < jws.RS256 {
				continue
			}
			input := base64.RawURLEncoding.EncodeToString([]byte(`{"alg":"`+b.String()+`"}`)) + ".e30"
			h := a.Hash().New()
			h.Write([]byte(input))
			var opts crypto.SignerOpts = a.Hash()
			if a >= jws.PS256 {
				opts = &rsa.PSSOptions{SaltLength: rsa.PSSSaltLengthEqualsHash, Hash: a.Hash()}
			}
			sig := must.Get(key.Sign(rand.Reader, h.Sum(nil), opts))(t)
			s := parse(t, input+"."+base64.RawURLEncoding.EncodeToString(sig))
			assert.Equal(t, a == b, s.Verify(key.Public(), spiffe.Algorithms{}) == nil, "%v as %v", a, b)
		}
	}
}

// A signature with PSS has a salt as long as its hash, and no other (RFC 7518 section 3.5).
func TestTokenSalt(t *testing.T) {
	t.Parallel()
	key := rsa2048()
	input := base64.RawURLEncoding.EncodeToString([]byte(`{"alg":"PS256"}`)) + ".e30"
	h := crypto.SHA256.New()
	h.Write([]byte(input))
	for _, size := range []int{32, rsa.PSSSaltLengthAuto, 20, 31, 33, 48} {
		sig := must.Get(rsa.SignPSS(rand.Reader, key, crypto.SHA256, h.Sum(nil), &rsa.PSSOptions{SaltLength: size}))(t)
		s := parse(t, input+"."+base64.RawURLEncoding.EncodeToString(sig))
		assert.Equal(t, size == 32, s.Verify(key.Public(), spiffe.Algorithms{}) == nil, size)
	}
}

// badSigner returns a fixed signature or error.
type badSigner struct {
	crypto.Signer
	sig []byte
	err error
}

func (b badSigner) Sign(io.Reader, []byte, crypto.SignerOpts) ([]byte, error) { return b.sig, b.err }

func TestTokenBadSigners(t *testing.T) {
	t.Parallel()
	key := ecKey(t, elliptic.P256())
	_, err := token.NewSigner(nil, "", "", "JWT")
	require.EqualError(t, err, "no key")
	failed := errors.New("the device is gone")
	s := must.Get(token.NewSigner(badSigner{key, nil, failed}, "", "", "JWT"))(t)
	_, err = s.Token([]byte("{}"))
	require.ErrorIs(t, err, failed)
	for name, sig := range map[string][]byte{
		"raw": make([]byte, 64), "empty": nil, "zero": {0x30, 6, 2, 1, 0, 2, 1, 1}, "negative": {0x30, 6, 2, 1, 1, 2, 1, 0x80},
		"trailing": {0x30, 6, 2, 1, 1, 2, 1, 1, 0},
		"too wide": append([]byte{0x30, 38, 2, 33, 1}, append(make([]byte, 32), 2, 1, 1)...),
	} {
		s := must.Get(token.NewSigner(badSigner{Signer: key, sig: sig}, "", "", "JWT"))(t)
		_, err := s.Token([]byte("{}"))
		require.EqualError(t, err, "the signer did not return an ECDSA signature for its curve in ASN.1", name)
	}
	s = must.Get(token.NewSigner(key, "", "", "JWT"))(t)
	_, err = s.Token(make([]byte, token.MaxSize))
	require.ErrorContains(t, err, "the limit is 16384")
}
