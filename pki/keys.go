package pki

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"errors"
	"fmt"

	"github.com/svidkit/svidkit/internal/certs/certpem"
	"github.com/svidkit/svidkit/internal/mldsa"
)

var (
	// ErrWeakKey says that this library neither signs for a public key nor verifies with it. It accepts RSA of 2048
	// to 8192 bits with an odd exponent of at least 65537; ECDSA on P-256, P-384 or P-521; Ed25519, except the points of
	// small order, for which anyone can forge signatures; and in programs built with Go 1.27 or later ML-DSA-44 and
	// ML-DSA-65, which a CA and a verifier must allow besides: see [spiffe.Algorithms].
	ErrWeakKey = certpem.ErrWeakKey

	// ErrKeyMismatch says that a private key does not belong to its certificate.
	ErrKeyMismatch = errors.New("the private key does not belong to the certificate")
)

// NewKey generates a private key of the given kind and size: "ecdsa-p256", which is also what an empty text means,
// "ecdsa-p384", "rsa-2048", "rsa-3072", "rsa-4096", "ed25519", which is not for certificates that Envoy presents, or, in
// a program built with Go 1.27 or later, "ml-dsa-44" or "ml-dsa-65". It fails only for an algorithm that it does not have.
func NewKey(algorithm string) (crypto.Signer, error) {
	switch algorithm {
	case "", "ecdsa-p256":
		return newKey(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	case "ecdsa-p384":
		return newKey(ecdsa.GenerateKey(elliptic.P384(), rand.Reader))
	case "rsa-2048":
		return newKey(rsa.GenerateKey(rand.Reader, 2048))
	case "rsa-3072":
		return newKey(rsa.GenerateKey(rand.Reader, 3072))
	case "rsa-4096":
		return newKey(rsa.GenerateKey(rand.Reader, 4096))
	case "ed25519":
		_, key, err := ed25519.GenerateKey(rand.Reader)
		return newKey(key, err)
	case "ml-dsa-44", "ml-dsa-65":
		return newKey(mldsa.NewKey(algorithm))
	default:
		return nil, fmt.Errorf("pki: generate key: unknown key algorithm %.40q", algorithm)
	}
}

// newKey avoids a non-nil interface that holds a nil pointer.
func newKey[K crypto.Signer](key K, err error) (crypto.Signer, error) {
	if err != nil {
		return nil, fmt.Errorf("pki: generate key: %w", err)
	}
	return key, nil
}

// PublicKeysEqual reports whether a and b are the same RSA, ECDSA, Ed25519 or ML-DSA key. To check that a private key
// belongs to a certificate, compare key.Public() with the certificate's PublicKey. Nil and keys of other kinds equal
// nothing.
func PublicKeysEqual(a, b crypto.PublicKey) bool {
	switch a := a.(type) {
	case *rsa.PublicKey:
		b, ok := b.(*rsa.PublicKey)
		return ok && a != nil && b != nil && a.Equal(b)
	case *ecdsa.PublicKey:
		b, ok := b.(*ecdsa.PublicKey)
		return ok && a != nil && b != nil && a.Equal(b)
	case ed25519.PublicKey:
		return len(a) == ed25519.PublicKeySize && a.Equal(b)
	case interface{ Equal(crypto.PublicKey) bool }:
		return mldsa.Name(a) != "" && mldsa.Name(b) != "" && a.Equal(b)
	}
	return false
}
