package token

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/rsa"
	_ "crypto/sha256" // the hashes of the algorithms
	_ "crypto/sha512"
	"errors"
	"fmt"
	"math/big"

	"github.com/svidkit/svidkit/internal/mldsa"
	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/spiffe"
)

// Signed is a token or proof of the right form: three parts in canonical base64url, and a header that is one JSON
// object with a known algorithm. It is unverified.
type Signed struct {
	jws.Header
	Payload, Signature []byte

	signed []byte // the first two parts as received
}

// Parse checks the form of a token or proof.
func (k *Kind) Parse(text string) (*Signed, *Error) {
	parts, err := jws.Parse(text)
	if err != nil {
		return nil, k.Refuse(Malformed, k.Form, "%w", err)
	}
	h, err := jws.ParseHeader(parts.Header)
	if e, ok := errors.AsType[*jws.Error](err); ok && e.Code == jws.Forbidden {
		return nil, k.Refuse("algorithm", k.Algorithm, "%w", err)
	}
	if err != nil {
		return nil, k.Refuse(Malformed, k.Form, "%w", err)
	}
	return &Signed{Header: h, Payload: parts.Payload, Signature: parts.Signature, signed: parts.Signed}, nil
}

// Verify verifies the signature with a key that is allowed and fits the algorithm of the header (RFC 7518 section 3,
// RFC 9964). The caller takes the key from a bundle, never from the token.
func (s *Signed) Verify(key crypto.PublicKey, allowed spiffe.Algorithms) error {
	if !s.Algorithm.Fits(key) {
		return fmt.Errorf("the key is not one for %v", s.Algorithm)
	}
	if err := allowed.Check(key); err != nil {
		return err
	}
	hash := s.Algorithm.Hash()
	h := hash.New()
	h.Write(s.signed)
	digest, sig, good := h.Sum(nil), s.Signature, false
	switch k := key.(type) {
	case *ecdsa.PublicKey: // R and S, each as wide as the curve
		size := jws.CurveSize(k.Curve)
		good = len(sig) == 2*size &&
			ecdsa.Verify(k, digest, new(big.Int).SetBytes(sig[:size]), new(big.Int).SetBytes(sig[size:]))
	case *rsa.PublicKey:
		if s.Algorithm >= jws.PS256 {
			opts := &rsa.PSSOptions{SaltLength: rsa.PSSSaltLengthEqualsHash}
			good = rsa.VerifyPSS(k, hash, digest, sig, opts) == nil
		} else {
			good = rsa.VerifyPKCS1v15(k, hash, digest, sig) == nil
		}
	default: // ML-DSA, which hashes by itself
		good = mldsa.Verify(key, s.signed, sig)
	}
	if !good {
		return errors.New("the signature does not match the key")
	}
	return nil
}
