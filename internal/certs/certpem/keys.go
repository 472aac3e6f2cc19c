package certpem

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rsa"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"

	"github.com/svidkit/svidkit/internal/mldsa"
)

// ErrWeakKey says that the size or kind of a key is not accepted; package pki exports it.
var ErrWeakKey = errors.New("weak or unsupported key")

// Limits on accepted keys. An RSA verification costs the square of the modulus, so an upper bound keeps a request
// cheap to refuse; FIPS 186-5 sets the lower bound of the exponent.
const (
	minRSABits     = 2048
	maxRSABits     = 8192
	minRSAExponent = 1<<16 + 1
)

// CheckKey refuses the keys that [ErrWeakKey] names.
func CheckKey(pub crypto.PublicKey) error {
	switch pub := pub.(type) {
	case *rsa.PublicKey:
		return checkRSA(pub)
	case *ecdsa.PublicKey:
		return checkECDSA(pub)
	case ed25519.PublicKey:
		if len(pub) != ed25519.PublicKeySize {
			return fmt.Errorf("Ed25519 key of %d bytes: %w", len(pub), ErrWeakKey)
		}
		if smallOrder(pub) {
			return fmt.Errorf("Ed25519 key of small order: %w", ErrWeakKey)
		}
		return nil
	case nil:
		return fmt.Errorf("no public key: %w", ErrWeakKey)
	default:
		if mldsa.Name(pub) != "" {
			return nil
		}
		return fmt.Errorf("public key of type %T, want RSA, ECDSA, Ed25519, ML-DSA-44 or ML-DSA-65: %w", pub, ErrWeakKey)
	}
}

// Kind returns the kind of a public key, as spiffe.Algorithms names it, or "" for one that has no name.
func Kind(pub crypto.PublicKey) string {
	switch pub.(type) {
	case *ecdsa.PublicKey:
		return "ecdsa"
	case *rsa.PublicKey:
		return "rsa"
	case ed25519.PublicKey:
		return "ed25519"
	}
	return mldsa.Name(pub)
}

// smallOrder reports whether pub is one of the eight points whose order divides eight: the known values
// of y, in any encoding, whatever the sign of x.
func smallOrder(pub ed25519.PublicKey) bool {
	y := hex.EncodeToString(append(slices.Clone(pub[:31]), pub[31]&0x7f))
	switch y {
	case "0100000000000000000000000000000000000000000000000000000000000000", // 1, the neutral element
		"eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f", // p+1, the same
		"ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f", // p-1, of order 2
		"0000000000000000000000000000000000000000000000000000000000000000", // 0, of order 4
		"edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f", // p, the same
		"26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05", // of order 8
		"c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a":
		return true
	}
	return false
}

func checkRSA(pub *rsa.PublicKey) error {
	if pub == nil || pub.N == nil || pub.N.Sign() <= 0 {
		return fmt.Errorf("RSA key without a modulus: %w", ErrWeakKey)
	}
	if n := pub.N.BitLen(); n < minRSABits || n > maxRSABits {
		return fmt.Errorf("RSA key of %d bits, want %d to %d: %w", n, minRSABits, maxRSABits, ErrWeakKey)
	}
	if pub.N.Bit(0) == 0 {
		return fmt.Errorf("RSA key with an even modulus: %w", ErrWeakKey)
	}
	if pub.E < minRSAExponent || pub.E&1 == 0 {
		return fmt.Errorf("RSA key with exponent %d, want an odd one of at least %d: %w", pub.E, minRSAExponent,
			ErrWeakKey)
	}
	return nil
}

func checkECDSA(pub *ecdsa.PublicKey) error {
	if pub == nil || pub.Curve == nil {
		return fmt.Errorf("ECDSA key without a curve: %w", ErrWeakKey)
	}
	switch pub.Curve {
	case elliptic.P256(), elliptic.P384(), elliptic.P521():
	default:
		return fmt.Errorf("ECDSA key on curve %s, want P-256, P-384 or P-521: %w", pub.Curve.Params().Name, ErrWeakKey)
	}
	//lint:ignore SA1019 Bytes panics without them
	if pub.X == nil || pub.Y == nil {
		return fmt.Errorf("ECDSA key without a point: %w", ErrWeakKey)
	}
	if _, err := pub.Bytes(); err != nil {
		return fmt.Errorf("ECDSA key that is not a point of its curve: %w", ErrWeakKey)
	}
	return nil
}
