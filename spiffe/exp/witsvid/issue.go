package witsvid

import (
	"cmp"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/go-jose/go-jose/v4"

	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/internal/tokens/token"
	"github.com/svidkit/svidkit/spiffe"
)

// defaultLifetime is how long a token lasts by default. It is longer than for a JWT-SVID, because a stolen token is
// worth nothing without its key.
const defaultLifetime = time.Hour

// IssuerOptions are the choices of an [Issuer] that have a default.
type IssuerOptions struct {
	// Algorithm is the value of "alg", which must fit the key. Empty means ES256, ES384 or ES512 for a
	// key on P-256, P-384 or P-521, and RS256 for an RSA key, which can also have RS384, RS512, PS256,
	// PS384 and PS512.
	Algorithm string

	// Lifetime is how long a token lasts, cut to whole seconds; 0 means an hour.
	Lifetime time.Duration

	// Now gives the time of issue. Nil means time.Now. It must be safe for concurrent use.
	Now func() time.Time
}

// Issuer signs tokens for the workloads of one trust domain with one key. It is safe for concurrent
// use if the key is. It prints as its trust domain, algorithm and key ID.
type Issuer struct {
	redacted
	issuer *token.Issuer
}

// NewIssuer returns an Issuer of tokens for the trust domain td. The key may live in hardware; it is an
// ECDSA key on P-256, P-384 or P-521, or an RSA key of 2048 to 8192 bits. Validators accept the tokens
// once its public half is in the bundle of td under keyID, which no two keys may share; see [spiffe.BundleContents].
// Publish a new key, and wait until consumers have it, before the Issuer signs. The options may be nil.
func NewIssuer(td spiffe.TrustDomain, keyID string, key crypto.Signer, opts *IssuerOptions) (*Issuer, error) {
	o := *cmp.Or(opts, &IssuerOptions{})
	issuer, err := token.NewIssuer(tokens, key, token.IssuerConfig{
		Domain: td, KeyID: keyID, Type: tokenType, Algorithm: o.Algorithm,
		Lifetime: cmp.Or(o.Lifetime, defaultLifetime), Now: o.Now,
	})
	if err != nil {
		return nil, err
	}
	return &Issuer{redact.New(issuer.String()), issuer}, nil
}

// IssueWITSVID makes a new key for the workload id, on P-256, and a token that confirms it. Use it in an agent that
// has authenticated its caller as id, or in a program that is its own issuer; [NewSVID] combines the two results.
// The context and the hint are ignored. Each token gets a new key.
func (i *Issuer) IssueWITSVID(_ context.Context, id spiffe.ID, _ string) (token string, key crypto.Signer, err error) {
	made, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return "", nil, fmt.Errorf("witsvid: issue for %q: %w", id, err)
	}
	if token, err = i.Issue(id, made.Public()); err != nil {
		return "", nil, err
	}
	return token, made, nil
}

// Issue returns a new token that confirms a public key of the workload id, which must be in the Issuer's trust
// domain and have a path. The caller must have authenticated the workload, and verified that it has the private key.
// The key must be of a kind that an Issuer may use, and new for each token; its "alg" is the usual one for it.
//
// The header has "alg", "kid" and "typ", the payload "sub", "exp" and "iat" in whole seconds, a random "jti", and
// "cnf". "iat" is the present second and never later, because some validators refuse a token that was issued in
// their future.
//
// The token is verified with the Issuer's public key before it is returned, so a signer with another public key
// fails here.
func (i *Issuer) Issue(id spiffe.ID, workload crypto.PublicKey) (string, error) {
	if i == nil || i.issuer == nil {
		return "", errors.New("witsvid: issue: the Issuer was not made by NewIssuer")
	}
	return i.issuer.Issue(id, 0, func(iat, exp int64) ([]byte, error) {
		if reason := jws.Unfit(workload); reason != "" {
			return nil, fmt.Errorf("the workload's key: %s", reason)
		}
		if jws.SameKey(workload, i.issuer.Key().Public()) {
			return nil, errors.New("the workload's key is the key of the issuer")
		}
		alg, _ := jws.DefaultAlgorithm(workload)
		return json.Marshal(map[string]any{
			"sub": id.String(), "exp": exp, "iat": iat, "jti": rand.Text(),
			"cnf": map[string]any{"jwk": jose.JSONWebKey{Key: workload, Algorithm: alg.String()}},
		})
	}, func(text string) (*token.Signed, *token.Error) {
		_, s, e := parseToken(text)
		return s, e
	})
}
