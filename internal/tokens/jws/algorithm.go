package jws

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rsa"
	"fmt"
	"slices"

	"github.com/svidkit/svidkit/internal/mldsa"
)

// Algorithm is one of the nine signature algorithms of RFC 7518 that SPIFFE allows, or one of RFC 9964. The zero value is
// none of them.
type Algorithm int

// The algorithms: ECDSA on the curve of that size, RSASSA-PKCS1-v1_5, RSASSA-PSS with a salt as long as the hash, and
// ML-DSA.
const (
	ES256 Algorithm = iota + 1
	ES384
	ES512
	RS256
	RS384
	RS512
	PS256
	PS384
	PS512
	MLDSA44
	MLDSA65
)

var names = []string{"none", "ES256", "ES384", "ES512", "RS256", "RS384", "RS512", "PS256", "PS384", "PS512",
	"ML-DSA-44", "ML-DSA-65"}

var curves = []elliptic.Curve{elliptic.P256(), elliptic.P384(), elliptic.P521()}

// ParseAlgorithm returns the algorithm of this name, which is case-sensitive.
func ParseAlgorithm(name string) (Algorithm, bool) {
	a := Algorithm(slices.Index(names, name))
	return max(a, 0), a > 0
}

// DefaultAlgorithm returns the usual algorithm for a key: the one for its curve, RS256, or the one for its parameters. It
// reports false if none fits.
func DefaultAlgorithm(key crypto.PublicKey) (Algorithm, bool) {
	for a := ES256; a <= RS256; a++ {
		if a.Fits(key) {
			return a, true
		}
	}
	a, ok := ParseAlgorithm(mldsa.JOSE(key))
	return a, ok
}

// String returns the name, such as "ES256".
func (a Algorithm) String() string {
	if a < ES256 || a > MLDSA65 {
		return fmt.Sprintf("Algorithm(%d)", int(a))
	}
	return names[a]
}

// Fits reports whether key can be used with a: an ECDSA key on the curve of the algorithm, an RSA key of 2048 to 8192
// bits, or an ML-DSA key of its parameters. It does not check that the key is sound; see [Unfit].
func (a Algorithm) Fits(key crypto.PublicKey) bool {
	switch k := key.(type) {
	case *ecdsa.PublicKey:
		return a >= ES256 && a <= ES512 && k != nil && k.Curve == curves[a-ES256]
	case *rsa.PublicKey:
		return a >= RS256 && a <= PS512 && k != nil && k.N != nil && k.N.BitLen() >= minRSABits &&
			k.N.BitLen() <= maxRSABits
	}
	return a >= MLDSA44 && mldsa.JOSE(key) == a.String()
}

// Hash returns the hash function of a. It means nothing for ML-DSA.
func (a Algorithm) Hash() crypto.Hash {
	return []crypto.Hash{crypto.SHA512, crypto.SHA256, crypto.SHA384}[a%3]
}
