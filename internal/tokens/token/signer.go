package token

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/rsa"
	"encoding/asn1"
	"errors"
	"fmt"
	"io"
	"math/big"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/cryptosigner"

	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/spiffe"
)

// Signer signs with one key and one algorithm. Its fields are functions, because printers do not look into functions.
type Signer struct {
	Algorithm jws.Algorithm

	key   func() crypto.Signer
	token func(payload []byte) (string, error)
}

// Member is an additional header member.
type Member struct{ Name, Value string }

// NewSigner returns a Signer of tokens whose header has this "typ", this "kid" unless it is empty, and the additional
// members. The key may be in hardware. An empty algorithm means the usual one for the key.
func NewSigner(key crypto.Signer, algorithm, keyID, typ string, more ...Member) (*Signer, error) {
	if key == nil {
		return nil, errors.New("no key")
	}
	pub := key.Public()
	alg, ok := jws.DefaultAlgorithm(pub)
	if !ok {
		return nil, fmt.Errorf("no algorithm of SPIFFE tokens uses this key, a %T; "+
			"use ECDSA on P-256, P-384 or P-521, RSA of 2048 to 8192 bits, or ML-DSA with Go 1.27", pub)
	}
	if algorithm != "" {
		if alg, ok = jws.ParseAlgorithm(algorithm); !ok {
			return nil, fmt.Errorf("the algorithm %q is not one of the nine that begin with RS, ES or PS, or of ML-DSA",
				Clip(algorithm, MaxQuoted))
		}
		if !alg.Fits(pub) {
			return nil, fmt.Errorf("the algorithm %v does not fit the key", alg)
		}
	}
	opts := (&jose.SignerOptions{}).WithType(jose.ContentType(typ))
	if keyID != "" {
		opts.WithHeader("kid", keyID)
	}
	for _, m := range more {
		opts.WithHeader(jose.HeaderKey(m.Name), m.Value)
	}
	signingKey := jose.SigningKey{
		Algorithm: jose.SignatureAlgorithm(alg.String()),
		Key:       cryptosigner.Opaque(strictSigner{key}),
	}
	signer, err := jose.NewSigner(signingKey, opts)
	if err != nil {
		return nil, err
	}
	return &Signer{
		Algorithm: alg,
		key:       func() crypto.Signer { return key },
		token:     func(payload []byte) (string, error) { return compact(signer, payload) },
	}, nil
}

// Key returns the key.
func (s *Signer) Key() crypto.Signer { return s.key() }

// Token signs a payload, which is JSON, and returns the token.
func (s *Signer) Token(payload []byte) (string, error) { return s.token(payload) }

func compact(signer jose.Signer, payload []byte) (string, error) {
	signed, err := signer.Sign(payload)
	if err != nil {
		return "", err
	}
	token, err := signed.CompactSerialize()
	if err == nil && len(token) > MaxSize {
		err = fmt.Errorf("the token would have %d bytes, the limit is %d: %w", len(token), MaxSize, spiffe.ErrTooLarge)
	}
	if err != nil {
		return "", err
	}
	return token, nil
}

// strictSigner adapts a key for package cryptosigner. It salts PSS as RFC 7518 section 3.5 requires, and returns an
// error where the ASN.1 of an ECDSA signature would make cryptosigner panic.
type strictSigner struct{ crypto.Signer }

func (s strictSigner) Sign(random io.Reader, digest []byte, opts crypto.SignerOpts) ([]byte, error) {
	if pss, ok := opts.(*rsa.PSSOptions); ok {
		opts = &rsa.PSSOptions{SaltLength: rsa.PSSSaltLengthEqualsHash, Hash: pss.Hash}
	}
	sig, err := s.Signer.Sign(random, digest, opts)
	if key, ok := s.Public().(*ecdsa.PublicKey); ok && err == nil {
		var v struct{ R, S *big.Int }
		rest, fault := asn1.Unmarshal(sig, &v)
		size := 8 * jws.CurveSize(key.Curve)
		if fault != nil || len(rest) > 0 || v.R.Sign() <= 0 || v.S.Sign() <= 0 || v.R.BitLen() > size ||
			v.S.BitLen() > size {
			return nil, errors.New("the signer did not return an ECDSA signature for its curve in ASN.1")
		}
	}
	return sig, err
}
