package jws

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rsa"
	"fmt"
	"slices"
)

// Algorithm is one of the nine signature algorithms of RFC 7518 that SPIFFE allows. The zero value
// is none of them.
type Algorithm int

// The algorithms: ECDSA on the curve of that size, RSASSA-PKCS1-v1_5, and RSASSA-PSS with a salt as long as
// the hash.
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
)

var names = []string{"none", "ES256", "ES384", "ES512", "RS256", "RS384", "RS512", "PS256", "PS384", "PS512"}

var curves = []elliptic.Curve{elliptic.P256(), elliptic.P384(), elliptic.P521()}

// ParseAlgorithm returns the algorithm of this name, which is case-sensitive.
func ParseAlgorithm(name string) (Algorithm, bool) {
	a := Algorithm(slices.Index(names, name))
	return max(a, 0), a > 0
}

// DefaultAlgorithm returns the usual algorithm for a key: the one for its curve, or RS256. It reports false if none
// of the nine fits.
func DefaultAlgorithm(key crypto.PublicKey) (Algorithm, bool) {
	for a := ES256; a <= RS256; a++ {
		if a.Fits(key) {
			return a, true
		}
	}
	return 0, false
}

// String returns the name, such as "ES256".
func (a Algorithm) String() string {
	if a < ES256 || a > PS512 {
		return fmt.Sprintf("Algorithm(%d)", int(a))
	}
	return names[a]
}

// Fits reports whether key can be used with a: an ECDSA key on the curve of the algorithm, or an RSA key
// of 2048 to 8192 bits. It does not check that the key is sound; see [Unfit].
func (a Algorithm) Fits(key crypto.PublicKey) bool {
	switch k := key.(type) {
	case *ecdsa.PublicKey:
		return a >= ES256 && a <= ES512 && k != nil && k.Curve == curves[a-ES256]
	case *rsa.PublicKey:
		return a >= RS256 && a <= PS512 && k != nil && k.N != nil && k.N.BitLen() >= minRSABits &&
			k.N.BitLen() <= maxRSABits
	}
	return false
}

// Hash returns the hash function of a.
func (a Algorithm) Hash() crypto.Hash {
	return []crypto.Hash{crypto.SHA512, crypto.SHA256, crypto.SHA384}[a%3]
}
