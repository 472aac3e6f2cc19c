package witsvid

import (
	"cmp"
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
	// defaultProofLifetime is how long a proof lasts by default: enough for slow networks (WIT-46).
	defaultProofLifetime = time.Minute

	// maxProofLifetime is the longest that a proof can last, and that validators accept by
	// default (WPT-7).
	maxProofLifetime = 5 * time.Minute
)

// Call is what a proof is bound to: the receiver, and the other tokens that travel with it. The sender
// states what it sends, the receiver what it received, and the two must be equal.
type Call struct {
	// Target is the receiver and the resource that is called. Over HTTP it is the URI of the request without query and
	// fragment; elsewhere it is what both sides have agreed on. A receiver takes it from its own
	// configuration, not from the message. Required.
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
			return fmt.Errorf("the name %q of a token is empty or not in lower case", token.Clip(name, token.MaxQuoted))
		}
	}
	return nil
}

// ProverOptions are the choices of a [Prover] that have a default.
type ProverOptions struct {
	// Lifetime is that of the proofs, in whole seconds up to five minutes; 0 means one
	// minute. A proof never outlives its token.
	Lifetime time.Duration

	// Now gives the time. Nil means time.Now. It must be safe for concurrent use.
	Now func() time.Time
}

// Prover makes proofs with the key of the current WIT-SVID. It is safe for concurrent use.
type Prover struct {
	source Source
	opts   ProverOptions // with the defaults
}

// NewProver returns a Prover with the identity of source, which is asked for each proof. The options may
// be nil.
func NewProver(source Source, opts *ProverOptions) (*Prover, error) {
	o := *cmp.Or(opts, &ProverOptions{})
	o.Lifetime = cmp.Or(o.Lifetime, defaultProofLifetime)
	if o.Now == nil {
		o.Now = time.Now
	}
	switch {
	case source == nil:
		return nil, errors.New("witsvid: new prover: no source of a WIT-SVID")
	case o.Lifetime < time.Second || o.Lifetime > maxProofLifetime:
		return nil, fmt.Errorf("witsvid: new prover: the lifetime is %v, not from 1s to %v", o.Lifetime, maxProofLifetime)
	}
	return &Prover{source, o}, nil
}

// Prove returns the token and a new Workload Proof Token for one call: over HTTP the values of the header
// fields Workload-Identity-Token and Workload-Proof-Token, for which [NewTransport] does all the work. Send both over TLS
// or another secure channel, once.
//
// The proof has "aud", "exp", a random "jti" of 128 bits, "wth" and, for the tokens of the call, "ath",
// "tth" and "oth".
func (p *Prover) Prove(c Call) (token, proof string, err error) {
	if p == nil || p.source == nil {
		return "", "", errors.New("witsvid: prove: the Prover was not made by NewProver")
	}
	s, now, err := p.current()
	if err == nil {
		token = s.Token()
		proof, err = p.prove(s, now, c)
	}
	if err != nil {
		return "", "", fmt.Errorf("witsvid: prove: %w", err)
	}
	return token, proof, nil
}

// current returns the SVID, if it can still be used, and the present second.
func (p *Prover) current() (*SVID, time.Time, error) {
	now := p.opts.Now()
	s, err := p.source.WITSVID()
	switch {
	case err != nil:
		return nil, now, err
	case s == nil || s.signer == nil:
		return nil, now, errors.New("the source gave no WIT-SVID")
	case !now.Before(s.notAfter):
		return nil, now, fmt.Errorf("the WIT-SVID of %q expired at %v, and its key is not used any more",
			token.Clip(s.id.String(), token.MaxInError), s.notAfter.UTC().Format(time.RFC3339))
	}
	return s, now, nil
}

// expiry returns when a proof that is made now expires, in seconds since 1970.
func (p *Prover) expiry(s *SVID, now time.Time) int64 {
	return min(now.Unix()+int64(p.opts.Lifetime/time.Second), s.notAfter.Unix())
}

func (p *Prover) prove(s *SVID, now time.Time, c Call) (string, error) {
	if err := c.check(); err != nil {
		return "", err
	}
	claims := struct {
		Aud string            `json:"aud"`
		Exp int64             `json:"exp"`
		JTI string            `json:"jti"`
		WTH string            `json:"wth"`
		ATH string            `json:"ath,omitempty"`
		TTH string            `json:"tth,omitempty"`
		Oth map[string]string `json:"oth,omitempty"`
	}{Aud: c.Target, Exp: p.expiry(s, now), JTI: random(), WTH: hash(s.Token()), Oth: map[string]string{}}
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
		return "", err
	}
	return s.signer().Token(payload)
}

// trim removes the white space that may stand around the value of a header field.
func trim(value string) string { return strings.Trim(value, " \t") }
