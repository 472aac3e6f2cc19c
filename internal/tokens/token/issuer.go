package token

import (
	"cmp"
	"crypto"
	"errors"
	"fmt"
	"time"
	"unicode/utf8"

	"github.com/svidkit/svidkit/spiffe"
)

// Issuer issues tokens for the workloads of one trust domain with one key.
type Issuer struct {
	*Signer
	kind   *Kind
	config IssuerConfig
}

// IssuerConfig configures an [Issuer].
type IssuerConfig struct {
	Domain    spiffe.TrustDomain
	KeyID     string // the value of "kid"
	Type      string // the value of "typ"
	Algorithm string // empty means the usual one for the key
	Lifetime  time.Duration
	Now       func() time.Time // nil means time.Now
}

// NewIssuer returns an Issuer.
func NewIssuer(k *Kind, key crypto.Signer, c IssuerConfig) (*Issuer, error) {
	s, err := NewSigner(key, c.Algorithm, c.KeyID, c.Type)
	switch {
	case err != nil:
	case c.Domain.IsZero():
		err = fmt.Errorf("no trust domain: %w", spiffe.ErrZero)
	case c.KeyID == "" || !utf8.ValidString(c.KeyID):
		err = errors.New("the key ID is empty or not UTF-8; use the one that the key has in the bundle")
	case c.Lifetime < time.Second:
		err = errShort(c.Lifetime)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: new issuer: %w", k.Package, err)
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	return &Issuer{Signer: s, kind: k, config: c}, nil
}

func errShort(lifetime time.Duration) error {
	return fmt.Errorf("a lifetime of %v is less than a second", lifetime)
}

// Issue signs a token for id, whose payload build returns for the times iat and exp, in seconds since 1970. A
// lifetime of 0 means the Issuer's. The new token must pass check, and its signature must be good: a key in hardware
// may not match the public key that it reports.
func (i *Issuer) Issue(
	id spiffe.ID, lifetime time.Duration,
	build func(iat, exp int64) ([]byte, error), check func(token string) (*Signed, *Error),
) (string, error) {
	token, err := i.issue(id, cmp.Or(lifetime, i.config.Lifetime), build, check)
	if err != nil {
		return "", fmt.Errorf("%s: issue for %q: %w", i.kind.Package, Clip(id.String(), MaxInError), err)
	}
	return token, nil
}

func (i *Issuer) issue(
	id spiffe.ID, lifetime time.Duration,
	build func(iat, exp int64) ([]byte, error), check func(token string) (*Signed, *Error),
) (string, error) {
	switch {
	case lifetime < time.Second:
		return "", errShort(lifetime)
	case id.IsZero():
		return "", fmt.Errorf("no ID: %w", spiffe.ErrZero)
	case !id.MemberOf(i.config.Domain):
		return "", fmt.Errorf("the ID is not in %q, the trust domain of the issuer", i.config.Domain)
	case id.Path() == "":
		return "", errors.New("the ID has no path, so it names a trust domain and not a workload")
	}
	iat := i.config.Now().Unix()
	payload, err := build(iat, iat+int64(lifetime/time.Second))
	if err != nil {
		return "", err
	}
	token, err := i.Token(payload)
	if err != nil {
		return "", err
	}
	signed, e := check(token)
	if e != nil {
		return "", fmt.Errorf("no validator would accept the token: %s: %w", e.Reason, e.Err)
	}
	if err := signed.Verify(i.Key().Public(), spiffe.AnyAlgorithm()); err != nil {
		return "", fmt.Errorf("no validator would accept the token: %w", err)
	}
	return token, nil
}

// String returns the package, the trust domain, the algorithm and the key ID.
func (i *Issuer) String() string {
	return fmt.Sprintf("%s.Issuer(%s, %v, %q)", i.kind.Package, i.config.Domain, i.Algorithm, i.config.KeyID)
}
