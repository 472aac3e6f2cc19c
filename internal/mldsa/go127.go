//go:build go1.27

package mldsa

import (
	"crypto"
	"crypto/mldsa"
	"strings"
)

// parameters has the parameter sets in the order of algorithms.
func parameters() []mldsa.Parameters { return []mldsa.Parameters{mldsa.MLDSA44(), mldsa.MLDSA65()} }

// NewKey generates a private key of the algorithm with this name, as in [pki.NewKey].
func NewKey(name string) (crypto.Signer, error) {
	for i, a := range algorithms {
		if a.name == name {
			if key, err := mldsa.GenerateKey(parameters()[i]); err == nil {
				return key, nil
			}
		}
	}
	return nil, ErrMissing
}

// of returns the algorithm of a public key, or the zero one.
func of(key crypto.PublicKey) (a algorithm) {
	if k, ok := key.(*mldsa.PublicKey); ok && k != nil && *k != (mldsa.PublicKey{}) {
		for i, p := range parameters() {
			if k.Parameters() == p {
				return algorithms[i]
			}
		}
	}
	return a
}

// Bytes returns the encoding (FIPS 204) of a key that has a Name.
func Bytes(key crypto.PublicKey) []byte { return key.(*mldsa.PublicKey).Bytes() }

// PublicKey returns the key with this "alg" and encoding, or nil.
func PublicKey(jose string, encoding []byte) crypto.PublicKey {
	for i, a := range algorithms {
		if strings.ToUpper(a.name) == jose {
			if key, err := mldsa.NewPublicKey(parameters()[i], encoding); err == nil {
				return key
			}
		}
	}
	return nil
}

// Verify reports whether key, which has a Name, has signed message, with an empty context.
func Verify(key crypto.PublicKey, message, signature []byte) bool {
	return mldsa.Verify(key.(*mldsa.PublicKey), message, signature, nil) == nil
}
