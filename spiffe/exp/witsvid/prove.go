package witsvid

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/svidkit/svidkit/internal/tokens/token"
)

// The lifetimes of proofs.
const (
	proofLifetime    = time.Minute     // of the proofs of a Prover: enough for slow networks
	maxProofLifetime = 5 * time.Minute // that validators accept
)

// Call is the call that a proof is bound to: the receiver, and the other tokens in the call. The sender fills
// in what it sends, the receiver what it received; the two must be equal.
type Call struct {
	// Target is the receiver and the resource that is called. Over HTTP it is the URI of the request without query
	// and fragment; elsewhere both sides agree on it. A receiver takes it from its own configuration, not from the
	// message. Required.
	Target string

	// AccessToken is the OAuth access token in the call, without its scheme; TxnToken is the transaction
	// token. Empty means none.
	AccessToken, TxnToken string

	// Tokens are other tokens in the call that say on whose behalf it is made: for HTTP, values of header
	// fields by the field's name in lower case. White space around a value does not count.
	Tokens map[string]string
}

func (c *Call) check() error {
	switch {
	case c.Target == "":
		return errors.New("the call has no target")
	case !utf8.ValidString(c.Target):
		return errors.New("the target is not UTF-8")
	case strings.ContainsAny(c.Target, "?#"):
		return errors.New("the target has a query or a fragment; leave them out")
	}
	for name := range c.Tokens {
		if name == "" || name != strings.ToLower(name) || !utf8.ValidString(name) {
			return fmt.Errorf("the name %q of a token is empty or not in lower case",
				token.Clip(name, token.MaxQuoted))
		}
	}
	return nil
}

// Prover makes proofs with the key of the current WIT-SVID. It is safe for concurrent use, and its fields must
// not change once it is in use.
type Prover struct {
	// Source returns the current WIT-SVID. It is called for each proof, must not block and must be safe for
	// concurrent use. Required.
	Source func() (*SVID, error)

	// Now gives the time. Nil means time.Now. It must be safe for concurrent use.
	Now func() time.Time
}

func (p *Prover) check() error {
	if p == nil || p.Source == nil {
		return errors.New("the Prover has no Source of a WIT-SVID")
	}
	return nil
}

// Prove returns the token and a new Workload Proof Token for one call: over HTTP the values of the header
// fields Workload-Identity-Token and Workload-Proof-Token, which [NewTransport] sets. Send both over TLS or another
// secure channel, once.
//
// The proof lasts one minute, or until its token expires. It has "aud", "exp", a random "jti" of 128 bits, "wth"
// and, for the tokens of the call, "ath", "tth" and "oth".
func (p *Prover) Prove(c Call) (token, proof string, err error) {
	if err = p.check(); err == nil {
		token, proof, err = p.prove(c)
	}
	if err != nil {
		return "", "", fmt.Errorf("witsvid: prove: %w", err)
	}
	return token, proof, nil
}

// proofPayload is the payload of a Workload Proof Token.
type proofPayload struct {
	Aud string            `json:"aud"`
	Exp int64             `json:"exp"`
	JTI string            `json:"jti"`
	WTH string            `json:"wth"`
	ATH string            `json:"ath,omitempty"`
	TTH string            `json:"tth,omitempty"`
	Oth map[string]string `json:"oth,omitempty"`
}

func (p *Prover) prove(c Call) (text, proof string, err error) {
	if err := c.check(); err != nil {
		return "", "", err
	}
	at := time.Now()
	if p.Now != nil {
		at = p.Now()
	}
	s, err := p.Source()
	switch {
	case err != nil:
		return "", "", err
	case s == nil || s.signer == nil:
		return "", "", errors.New("the source gave no WIT-SVID")
	case !at.Before(s.notAfter):
		return "", "", fmt.Errorf("the WIT-SVID of %q expired at %v, and its key is not used any more",
			token.Clip(s.id.String(), token.MaxInError), s.notAfter.UTC().Format(time.RFC3339))
	}
	text = s.token()
	claims := proofPayload{
		Aud: c.Target,
		Exp: min(at.Unix()+int64(proofLifetime/time.Second), s.notAfter.Unix()),
		JTI: rand.Text(), WTH: hash(text), Oth: map[string]string{},
	}
	if c.AccessToken != "" {
		claims.ATH = hash(c.AccessToken)
	}
	if c.TxnToken != "" {
		claims.TTH = hash(c.TxnToken)
	}
	for name, value := range c.Tokens {
		claims.Oth[name] = hash(trim(value))
	}
	payload, err := json.Marshal(claims)
	if err != nil {
		return "", "", err
	}
	proof, err = s.signer().Token(payload)
	return text, proof, err
}

// trim removes the white space around the value of a header field.
func trim(value string) string { return strings.Trim(value, " \t") }
