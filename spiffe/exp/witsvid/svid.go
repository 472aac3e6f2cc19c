package witsvid

import (
	"crypto"
	"errors"
	"fmt"
	"time"

	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/internal/tokens/jws"
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
	if key != nil && !jws.SameKey(key.Public(), h.key) {
		err = errors.New("the private key is not the one that the token confirms")
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
