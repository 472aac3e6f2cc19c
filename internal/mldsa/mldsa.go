// Package mldsa has ML-DSA-44 and ML-DSA-65 (FIPS 204) for the packages that decide which keys are accepted. In a
// program built with a Go release before 1.27, which has no crypto/mldsa, it makes and accepts no key.
package mldsa

import (
	"crypto"
	"crypto/x509"
	"encoding/asn1"
	"errors"
	"slices"
	"strings"
	"sync"
)

// ErrMissing says that this program has no ML-DSA.
var ErrMissing = errors.New("ML-DSA needs a program built with Go 1.27 or later, and in FIPS 140-3 mode the module " +
	"v1.26.0 or later")

// Available reports whether this program has ML-DSA.
var Available = sync.OnceValue(func() bool {
	_, err := NewKey(algorithms[0].name)
	return err == nil
})

// algorithm is a parameter set.
type algorithm struct {
	name string // as in [pki.NewKey], and the value of "alg" (RFC 9964) in lower case
	oid  asn1.ObjectIdentifier
	size int // of a public key in bytes
}

var algorithms = []algorithm{
	{"ml-dsa-44", asn1.ObjectIdentifier{2, 16, 840, 1, 101, 3, 4, 3, 17}, 1312},
	{"ml-dsa-65", asn1.ObjectIdentifier{2, 16, 840, 1, 101, 3, 4, 3, 18}, 1952},
}

// InCertificate returns the "alg" and the encoding (FIPS 204) of the public key of c, or "" if it is of another kind.
// It needs no crypto/mldsa, so that a program without it passes such a certificate on.
func InCertificate(c *x509.Certificate) (jose string, key []byte) {
	var info struct {
		Algorithm struct{ OID asn1.ObjectIdentifier } // without parameters, RFC 9881
		Key       asn1.BitString
	}
	if rest, err := asn1.Unmarshal(c.RawSubjectPublicKeyInfo, &info); err != nil || len(rest) > 0 {
		return "", nil
	}
	for _, a := range algorithms {
		if info.Algorithm.OID.Equal(a.oid) && len(info.Key.Bytes) == a.size {
			return strings.ToUpper(a.name), info.Key.Bytes
		}
	}
	return "", nil
}

// Name returns the name of the algorithm of a public key, as in [pki.NewKey], or "" if the key is of another kind.
func Name(key crypto.PublicKey) string { return of(key).name }

// JOSE returns the "alg" of a public key (RFC 9964), or "" if the key is of another kind.
func JOSE(key crypto.PublicKey) string { return strings.ToUpper(Name(key)) }

// Signs reports whether a is ML-DSA-44 or ML-DSA-65, without crypto/x509's constants, which only Go 1.27 has.
func Signs(a x509.SignatureAlgorithm) bool {
	return slices.ContainsFunc(algorithms, func(known algorithm) bool { return strings.ToUpper(known.name) == a.String() })
}
