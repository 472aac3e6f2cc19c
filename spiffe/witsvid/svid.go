package witsvid

import (
	"crypto"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/svidkit/svidkit/internal/certpem"
	"github.com/svidkit/svidkit/internal/jws"
	"github.com/svidkit/svidkit/spiffe"
)

// SVID is a WIT-SVID as its workload holds it: the token, and the private key that it confirms. It never
// changes and is safe for concurrent use if the key is. However it is printed, neither token nor key
// shows. It is a [Source] of itself.
type SVID struct {
	id       spiffe.ID
	notAfter time.Time
	alg      jws.Algorithm
	token    func() string        // funcs, because no printer sees what they hold
	key      func() crypto.Signer // of the public key in the token
}

// Source gives the current WIT-SVID, so that a fixed value and one that is renewed both fit. WITSVID must
// not block and must be safe for concurrent use.
type Source interface {
	WITSVID() (*SVID, error)
}

// NewSVID returns the SVID of a token and the private key that it confirms, which may live in hardware.
// The form of the token is checked; its signature and time are not, as that needs a bundle: see
// [Validator]. A token that breaks the form gives an [*Error].
func NewSVID(token string, key crypto.Signer) (*SVID, error) {
	p, e := parseToken(token)
	if e != nil {
		return nil, e
	}
	s := &SVID{id: p.id, notAfter: p.exp, alg: p.proofAlg, token: func() string { return token }, key: func() crypto.Signer { return key }}
	if key == nil {
		return nil, fmt.Errorf("witsvid: SVID of %q: no private key", clip(s.id.String(), maxInError))
	}
	if pub, ok := key.Public().(interface{ Equal(crypto.PublicKey) bool }); !ok || !pub.Equal(p.proofKey) {
		return nil, fmt.Errorf("witsvid: SVID of %q: the private key is not the one that the token confirms", clip(s.id.String(), maxInError))
	}
	return s, nil
}

// ParseSVID is [NewSVID] for a key in PKCS#8, DER, not encrypted. Errors do not carry the input.
func ParseSVID(token string, keyDER []byte) (*SVID, error) {
	key, err := certpem.PKCS8(keyDER)
	if err != nil {
		return nil, fmt.Errorf("witsvid: SVID: private key: %w", err)
	}
	return NewSVID(token, key)
}

// ID returns the ID that the token claims.
func (s *SVID) ID() spiffe.ID { return s.id }

// Token returns the token, to be kept or handed to another part of the same workload. To show it to
// somebody else takes a proof: see [Prover]. It is never sent alone, and never in the field Authorization.
func (s *SVID) Token() string { return s.token() }

// Signer returns the private key that the token confirms.
func (s *SVID) Signer() crypto.Signer { return s.key() }

// NotAfter returns when the token expires; its key is not used later (WIT-51).
func (s *SVID) NotAfter() time.Time { return s.notAfter }

// WITSVID returns s, which makes a fixed identity a [Source]. A zero SVID is an error.
func (s *SVID) WITSVID() (*SVID, error) {
	if s == nil || s.key == nil {
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
