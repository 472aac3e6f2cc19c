package jwtsvid

import (
	"cmp"
	"context"
	"crypto"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"time"

	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/internal/tokens/token"
	"github.com/svidkit/svidkit/spiffe"
)

type redacted = redact.Text // an alias, so that the embedded field is not exported

// defaultLifetime is short because a stolen token cannot be revoked (JWT-SVID section 3.3).
const defaultLifetime = 5 * time.Minute

// IssuerOptions are the choices of an [Issuer] that have a default.
type IssuerOptions struct {
	// Algorithm is the value of "alg", which must fit the key. Empty means ES256, ES384 or ES512 for a
	// key on P-256, P-384 or P-521, and RS256 for an RSA key, which can also have RS384, RS512, PS256,
	// PS384 and PS512.
	Algorithm string

	// Lifetime is how long a token lasts if its [Request] has no Lifetime; 0 means 5 minutes. Keep it short: a
	// stolen token cannot be revoked (JWT-SVID section 3.3).
	Lifetime time.Duration

	// WideAudience permits tokens for more than one receiver: several values in "aud" (JWT-SVID section 3.2),
	// and the ID of a whole trust domain as a value. Each receiver of such a token can present it to the
	// others.
	WideAudience bool

	// Issuer is the claim "iss" of the tokens, for verifiers that do not know SPIFFE. It is a URL below which they
	// find the keys by OpenID Connect Discovery, as [NewOIDCHandler] serves them: https, or http with a host on
	// loopback, without a slash at the end. Empty means tokens without "iss".
	Issuer string

	// Now gives the time of issue. Nil means time.Now. It must be safe for concurrent use.
	Now func() time.Time
}

// Issuer signs tokens for the workloads of one trust domain with one key. It is safe for concurrent
// use if the key is. It prints as its trust domain, algorithm and key ID, never with the key.
type Issuer struct {
	redacted
	issuer *token.Issuer
	iss    string // empty for none
	wide   bool
}

// NewIssuer returns an Issuer of tokens for the trust domain td. The key may live in hardware; it is an
// ECDSA key on P-256, P-384 or P-521, or an RSA key of 2048 to 8192 bits. Validators accept the tokens
// once its public half is in the bundle of td under keyID; see [spiffe.BundleContents]. The options may
// be nil.
func NewIssuer(td spiffe.TrustDomain, keyID string, key crypto.Signer, opts *IssuerOptions) (*Issuer, error) {
	o := *cmp.Or(opts, &IssuerOptions{})
	if o.Issuer != "" {
		if err := jws.CheckIssuer(o.Issuer); err != nil {
			return nil, fmt.Errorf("jwtsvid: new issuer: IssuerOptions.Issuer: %w", err)
		}
	}
	issuer, err := token.NewIssuer(kind, key, token.IssuerConfig{
		Domain: td, KeyID: keyID, Type: "JWT", Algorithm: o.Algorithm,
		Lifetime: cmp.Or(o.Lifetime, defaultLifetime), Now: o.Now,
	})
	if err != nil {
		return nil, err
	}
	return &Issuer{redact.New(issuer.String()), issuer, o.Issuer, o.WideAudience}, nil
}

// Request is the contents of a token. The caller of [Issuer.Issue] fills it in, after it has authenticated the
// workload.
type Request struct {
	// ID is the workload: in the Issuer's trust domain, with a path. Required.
	ID spiffe.ID

	// Audience names the receivers of the token. Required; more than one value needs
	// [IssuerOptions.WideAudience].
	Audience []string

	// Lifetime is how long the token lasts; 0 means the Issuer's default. It is cut to whole seconds.
	Lifetime time.Duration

	// Claims are further claims, by name, encoded by [json.Marshal]. "sub", "aud", "exp", "nbf" and "iat" are
	// refused in upper and lower case, and so is "iss" with [IssuerOptions.Issuer]. Validators believe a claim until
	// the token expires, so facts that change sooner do not belong here.
	Claims map[string]any
}

// Issue returns a new token. Its header has "alg", "kid" and "typ", its payload "sub", "aud" as an array, "exp"
// and "iat" in whole seconds, "iss" if the Issuer has one, and the claims of the request. "iat" is the present
// second and never later, because some validators refuse a token that was issued in their future.
//
// The token is verified with the public key before it is returned, so that a signer with another key fails here.
// The token is a credential; the error does not carry it. It wraps [io/fs.ErrInvalid] if the audience is missing
// or empty, or wider than the Issuer permits.
func (i *Issuer) Issue(r Request) (string, error) {
	if i == nil || i.issuer == nil {
		return "", errors.New("jwtsvid: issue: the Issuer was not made by NewIssuer")
	}
	return i.issuer.Issue(r.ID, r.Lifetime, func(iat, exp int64) ([]byte, error) {
		if err := i.checkAudience(r.Audience); err != nil {
			return nil, err
		}
		claims := map[string]any{"sub": r.ID.String(), "aud": r.Audience, "exp": exp, "iat": iat}
		own := []string{"sub", "aud", "exp", "nbf", "iat"}
		if i.iss != "" {
			claims["iss"], own = i.iss, append(own, "iss")
		}
		for name, value := range r.Claims {
			for _, own := range own {
				if strings.EqualFold(name, own) { // some readers ignore case
					return nil, fmt.Errorf("the claim %q is set by the Issuer", token.Clip(name, token.MaxQuoted))
				}
			}
			claims[name] = value
		}
		payload, err := json.Marshal(claims)
		if err != nil {
			return nil, fmt.Errorf("the claims cannot be written as JSON: %w", err)
		}
		return payload, nil
	}, func(text string) (*token.Signed, *token.Error) {
		signed, _, e := parse(text)
		return signed, e
	})
}

// IssueJWTSVID returns a new token for id with the default lifetime. It lets an Issuer serve the Workload API of an
// agent, which has authenticated the caller as id.
func (i *Issuer) IssueJWTSVID(_ context.Context, id spiffe.ID, audience []string) (string, error) {
	return i.Issue(Request{ID: id, Audience: audience})
}

func (i *Issuer) checkAudience(audience []string) error {
	if err := checkAudience(audience); err != nil {
		return fmt.Errorf("%w: %w; name the receiver of the token", fs.ErrInvalid, err)
	}
	if i.wide {
		return nil
	}
	if n := len(audience); n > 1 {
		return fmt.Errorf("%w: %d audiences, so that each can present the token to the others; "+
			"issue one token for each, or set WideAudience", fs.ErrInvalid, n)
	}
	if id, err := spiffe.ParseID(audience[0]); err == nil && id.Path() == "" {
		return fmt.Errorf("%w: the audience %q is a whole trust domain; "+
			"name the receiving service, or set WideAudience", fs.ErrInvalid, token.Clip(audience[0], token.MaxQuoted))
	}
	return nil
}
