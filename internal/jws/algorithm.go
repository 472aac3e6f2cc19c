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

// The algorithms.
const (
	ES256 Algorithm = iota + 1 // ECDSA on P-256 with SHA-256
	ES384                      // ECDSA on P-384 with SHA-384
	ES512                      // ECDSA on P-521 with SHA-512
	RS256                      // RSASSA-PKCS1-v1_5
	RS384
	RS512
	PS256 // RSASSA-PSS with a salt as long as the hash
	PS384
	PS512
)

var algorithmNames = []string{"none", "ES256", "ES384", "ES512", "RS256", "RS384", "RS512", "PS256", "PS384", "PS512"}

// ParseAlgorithm returns the algorithm of this name, which is case-sensitive.
func ParseAlgorithm(name string) (Algorithm, bool) {
	a := Algorithm(slices.Index(algorithmNames, name))
	return max(a, 0), a > 0
}

// DefaultAlgorithm returns the usual algorithm for a key: the one for its curve, or RS256. It reports
// false if none of the nine fits.
func DefaultAlgorithm(key crypto.PublicKey) (Algorithm, bool) {
	for _, a := range [...]Algorithm{ES256, ES384, ES512, RS256} {
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
	return algorithmNames[a]
}

// Fits reports whether key can be used with a: an ECDSA key on the curve of the algorithm, or an RSA key
// of 2048 to 8192 bits. It does not check that the key is sound; see [Unfit].
func (a Algorithm) Fits(key crypto.PublicKey) bool {
	switch k := key.(type) {
	case *ecdsa.PublicKey:
		if k == nil {
			return false
		}
		switch a {
		case ES256:
			return k.Curve == elliptic.P256()
		case ES384:
			return k.Curve == elliptic.P384()
		case ES512:
			return k.Curve == elliptic.P521()
		}
	case *rsa.PublicKey:
		return a >= RS256 && a <= PS512 && k != nil && k.N != nil && k.N.BitLen() >= minRSABits && k.N.BitLen() <= maxRSABits
	}
	return false
}

// Hash returns the hash function of a.
func (a Algorithm) Hash() crypto.Hash {
	switch a {
	case ES256, RS256, PS256:
		return crypto.SHA256
	case ES384, RS384, PS384:
		return crypto.SHA384
	}
	return crypto.SHA512
}
