package witsvid

import (
	"crypto"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/go-jose/go-jose/v4"

	"github.com/svidkit/svidkit/internal/tokens/token"
	"github.com/svidkit/svidkit/spiffe"
)

// SVID is a WIT-SVID as its workload holds it: the token, and the private key that it confirms. It never
// changes and is safe for concurrent use if the key is. However it is printed, neither token nor key
// shows. It is a [Source] of itself.
type SVID struct {
	id       spiffe.ID
	notAfter time.Time
	token    func() string        // funcs, because no printer shows what they hold
	signer   func() *token.Signer // of proofs
}

// Source returns the current WIT-SVID: a fixed one, or one that is renewed. WITSVID must not block and
// must be safe for concurrent use.
type Source interface {
	WITSVID() (*SVID, error)
}

// NewSVID returns the SVID of a token and the private key that it confirms, which may live in hardware.
// It checks the form of the token, and not its signature and time, which need a bundle: see [Validator].
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
		id: h.id, notAfter: h.expires, token: func() string { return text }, signer: func() *token.Signer { return signer },
	}, nil
}

// ParseSVID is [NewSVID] for a private key as a JSON Web Key, as the Workload API hands it out. Errors do
// not carry the input.
func ParseSVID(token string, keyJWK []byte) (*SVID, error) {
	var k jose.JSONWebKey
	if err := k.UnmarshalJSON(keyJWK); err != nil {
		return nil, errors.New("witsvid: SVID: the private key is not a JSON Web Key")
	}
	key, ok := k.Key.(crypto.Signer)
	if !ok {
		return nil, fmt.Errorf("witsvid: SVID: the JSON Web Key is a %T and not a private key", k.Key)
	}
	return NewSVID(token, key)
}

// ID returns the ID that the token claims.
func (s *SVID) ID() spiffe.ID { return s.id }

// Token returns the token, to be stored or passed to another part of the same workload. To show it to
// another party takes a proof: see [Prover]. It is never sent alone, and never in the field
// Authorization.
func (s *SVID) Token() string { return s.token() }

// Signer returns the private key that the token confirms.
func (s *SVID) Signer() crypto.Signer { return s.signer().Key() }

// NotAfter returns when the token expires; its key is not used later (WIT-51).
func (s *SVID) NotAfter() time.Time { return s.notAfter }

// WITSVID returns s, which makes a fixed identity a [Source]. A zero SVID is an error.
func (s *SVID) WITSVID() (*SVID, error) {
	if s == nil || s.signer == nil {
		return nil, errors.New("witsvid: the SVID was not made by NewSVID")
	}
	return s, nil
}

// String returns the ID.
func (s *SVID) String() string { return s.id.String() }

// GoString returns the ID in a form that is not taken for Go source.
func (s *SVID) GoString() string { return fmt.Sprintf("witsvid.SVID(%s)", s.id) }

// LogValue implements [slog.LogValuer]: the ID and when the token expires.
func (s *SVID) LogValue() slog.Value {
	return slog.GroupValue(slog.String("id", s.id.String()), slog.Time("not_after", s.notAfter))
}
