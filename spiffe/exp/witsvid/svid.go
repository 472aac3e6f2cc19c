package witsvid

import (
	"crypto"
	"crypto/ecdsa"
	"errors"
	"fmt"
	"time"

	"github.com/go-jose/go-jose/v4"

	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/internal/tokens/token"
	"github.com/svidkit/svidkit/spiffe"
)

type redacted = redact.Text

// SVID is a WIT-SVID of this workload: the token, and the private key that it confirms. It never changes, is safe
// for concurrent use if the key is, and prints as its ID. [ParseUnverified] reads its token.
type SVID struct {
	redacted
	id       spiffe.ID
	notAfter time.Time
	token    func() string        // funcs, because no printer shows their contents
	signer   func() *token.Signer // signs proofs
}

// NewSVID returns the SVID of a token and the private key that it confirms, which may live in hardware. It checks
// the form of the token, but not its signature and time, which need a bundle: see [Validator].
func NewSVID(text string, key crypto.Signer) (*SVID, error) {
	h, _, e := parseToken(text)
	if e != nil {
		return nil, e
	}
	signer, err := token.NewSigner(key, h.alg.String(), "", proofType)
	if key != nil {
		if pub, ok := key.Public().(interface{ Equal(crypto.PublicKey) bool }); !ok || !pub.Equal(h.key) {
			err = errors.New("the private key is not the one that the token confirms")
		}
	}
	if err != nil {
		return nil, fmt.Errorf("witsvid: SVID of %q: %w", token.Clip(h.id.String(), token.MaxInError), err)
	}
	return &SVID{
		redacted: redact.New(fmt.Sprintf("witsvid.SVID(%s)", h.id)),
		id:       h.id,
		notAfter: h.expires,
		token:    func() string { return text },
		signer:   func() *token.Signer { return signer },
	}, nil
}

// ParseSVID is [NewSVID] for a private key as the Workload API sends it: a JWK in JSON (RFC 7517), of at most 16 KiB.
func ParseSVID(text string, jwk []byte) (*SVID, error) {
	var k jose.JSONWebKey
	if len(jwk) > token.MaxSize || k.UnmarshalJSON(jwk) != nil { // an error of which could carry a part of the key
		return nil, errors.New("witsvid: parse the key of an SVID: it is not a valid JWK")
	}
	key, ok := k.Key.(crypto.Signer)
	if ec, isEC := key.(*ecdsa.PrivateKey); isEC { // the public half in the JWK may be that of another key
		d, _ := ec.Bytes()
		own, err := ecdsa.ParseRawPrivateKey(ec.Curve, d)
		key, ok = own, err == nil
	}
	if !ok {
		return nil, errors.New("witsvid: parse the key of an SVID: it is not a private key")
	}
	return NewSVID(text, key)
}
