package jws

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/asn1"
	"errors"
	"fmt"
	"math/big"
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

var algorithmNames = [...]string{"none", "ES256", "ES384", "ES512", "RS256", "RS384", "RS512", "PS256", "PS384", "PS512"}

// ParseAlgorithm returns the algorithm of this name, which is case-sensitive.
func ParseAlgorithm(name string) (Algorithm, bool) {
	for a := ES256; a <= PS512; a++ {
		if algorithmNames[a] == name {
			return a, true
		}
	}
	return 0, false
}

// DefaultAlgorithm returns the algorithm that is usual for a key: the one for its curve, or RS256. It
// reports false if none of the nine fits.
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

// Fits reports whether key can be used with a: the curve of the algorithm, or RSA of 2048 to 8192
// bits. That the key itself is sound is for [Unfit] to say.
func (a Algorithm) Fits(key crypto.PublicKey) bool {
	switch k := key.(type) {
	case *ecdsa.PublicKey:
		return k != nil && k.Curve != nil && k.Curve == a.curve()
	case *rsa.PublicKey:
		return a >= RS256 && a <= PS512 && k != nil && k.N != nil && k.N.BitLen() >= minRSABits && k.N.BitLen() <= maxRSABits
	}
	return false
}

// Verify checks that sig is the signature of input by key. The error is an [*Error] with the code
// Key or Signature.
func (a Algorithm) Verify(key crypto.PublicKey, input, sig []byte) error {
	if !a.Fits(key) {
		return &Error{Key, fmt.Sprintf("the key is not one for %v", a)}
	}
	var buf [sha512.Size]byte
	digest := a.digest(buf[:0], input)
	ok := false
	switch k := key.(type) {
	case *ecdsa.PublicKey:
		if size := CurveSize(k.Curve); len(sig) == 2*size {
			ok = ecdsa.Verify(k, digest, new(big.Int).SetBytes(sig[:size]), new(big.Int).SetBytes(sig[size:]))
		}
	case *rsa.PublicKey:
		if len(sig) != k.Size() {
			break
		}
		if a >= PS256 {
			ok = rsa.VerifyPSS(k, a.hash(), digest, sig, &rsa.PSSOptions{SaltLength: rsa.PSSSaltLengthEqualsHash}) == nil
		} else {
			ok = rsa.VerifyPKCS1v15(k, a.hash(), digest, sig) == nil
		}
	}
	if !ok {
		return &Error{Signature, "the signature is not the key's"}
	}
	return nil
}

// Sign returns the signature of input by key: R and S of fixed width for ECDSA. Any crypto.Signer
// will do, also one in hardware.
func (a Algorithm) Sign(key crypto.Signer, input []byte) ([]byte, error) {
	if key == nil {
		return nil, errors.New("no key to sign with")
	}
	pub := key.Public()
	if !a.Fits(pub) {
		return nil, &Error{Key, fmt.Sprintf("a key of type %T is not one for %v, or has the wrong size", pub, a)}
	}
	var buf [sha512.Size]byte
	digest := a.digest(buf[:0], input)
	var opts crypto.SignerOpts = a.hash()
	if a >= PS256 {
		opts = &rsa.PSSOptions{SaltLength: rsa.PSSSaltLengthEqualsHash, Hash: a.hash()}
	}
	sig, err := key.Sign(rand.Reader, digest, opts)
	if err != nil {
		return nil, fmt.Errorf("sign with %v: %w", a, err)
	}
	if k, ok := pub.(*ecdsa.PublicKey); ok {
		return fixedWidth(sig, CurveSize(k.Curve))
	}
	return sig, nil
}

// fixedWidth turns an ASN.1 signature into R and S.
func fixedWidth(der []byte, size int) ([]byte, error) {
	var v struct{ R, S *big.Int }
	rest, err := asn1.Unmarshal(der, &v)
	if err != nil || len(rest) > 0 || v.R.Sign() <= 0 || v.S.Sign() <= 0 || v.R.BitLen() > 8*size || v.S.BitLen() > 8*size {
		return nil, errors.New("the signer did not return an ECDSA signature for its curve in ASN.1")
	}
	sig := make([]byte, 2*size)
	v.R.FillBytes(sig[:size])
	v.S.FillBytes(sig[size:])
	return sig, nil
}

// signatureSize guesses how long a signature by key will be.
func (a Algorithm) signatureSize(key crypto.Signer) int {
	if curve := a.curve(); curve != nil {
		return 2 * CurveSize(curve)
	}
	return 512
}

// curve returns the curve of an ECDSA algorithm, or nil.
func (a Algorithm) curve() elliptic.Curve {
	switch a {
	case ES256:
		return elliptic.P256()
	case ES384:
		return elliptic.P384()
	case ES512:
		return elliptic.P521()
	}
	return nil
}

func (a Algorithm) hash() crypto.Hash {
	switch a {
	case ES256, RS256, PS256:
		return crypto.SHA256
	case ES384, RS384, PS384:
		return crypto.SHA384
	}
	return crypto.SHA512
}

// digest appends the hash of input to b.
func (a Algorithm) digest(b, input []byte) []byte {
	switch a.hash() {
	case crypto.SHA256:
		sum := sha256.Sum256(input)
		return append(b, sum[:]...)
	case crypto.SHA384:
		sum := sha512.Sum384(input)
		return append(b, sum[:]...)
	}
	sum := sha512.Sum512(input)
	return append(b, sum[:]...)
}
