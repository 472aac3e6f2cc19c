package ca

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"time"

	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/pki/ca/internal/rotation"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
)

// ErrNoJWT says that the authority signs no JWT-SVIDs; see [Config.JWT]. It wraps [errors.ErrUnsupported].
var ErrNoJWT = fmt.Errorf("no JWT-SVIDs are signed here (%w)", errors.ErrUnsupported)

// JWTConfig configures the JWT-SVIDs of an [Authority]. A zero field means its default.
type JWTConfig struct {
	// Algorithm is the value of "alg" in the tokens: ES256, ES384, ES512, RS256, RS384, RS512, PS256, PS384, PS512,
	// ML-DSA-44 or ML-DSA-65; empty means ES256. RSA keys have 2048 bits. A change takes effect with the next key.
	Algorithm string

	// Issuer makes the authority an OpenID Connect issuer, for verifiers that do not know SPIFFE: it is the claim
	// "iss" of all tokens, as in [jwtsvid.IssuerOptions], and jwtsvid.NewOIDCHandler publishes the keys. The
	// Algorithm must then be ES256, ES384, ES512 or RS256, which such a key set can name. Empty means no "iss".
	Issuer string

	// KeyTTL is how long a key signs before Run replaces it; 0 means 30 days. It must be more than twice Propagation.
	KeyTTL time.Duration

	// Propagation is how long a key is in the bundle before it signs, if that is longer than [Rotation].Propagation.
	// With an Issuer, 0 means a day, or a third of KeyTTL if that is less, as many verifiers seldom fetch keys. The
	// first key added to an authority waits only for Rotation.Propagation, and the successor of a key in
	// [Authority.Revoke] does not wait.
	Propagation time.Duration

	// DefaultTTL is the lifetime of a token whose request has none; 0 means 5 minutes, or MaxTTL if that is less.
	DefaultTTL time.Duration
	MaxTTL     time.Duration // the longest lifetime that a request may have; 0 means an hour
}

func (c JWTConfig) withDefaults(propagation time.Duration) (JWTConfig, error) {
	c.Algorithm = cmp.Or(c.Algorithm, "ES256")
	c.KeyTTL = cmp.Or(c.KeyTTL, 30*24*time.Hour)
	c.MaxTTL = cmp.Or(c.MaxTTL, time.Hour)
	c.DefaultTTL = cmp.Or(c.DefaultTTL, min(5*time.Minute, c.MaxTTL))
	if c.Propagation == 0 && c.Issuer != "" {
		c.Propagation = min(24*time.Hour, c.KeyTTL/3)
	}
	switch {
	case c.KeyTTL < 0 || c.DefaultTTL < 0 || c.MaxTTL < 0 || c.Propagation < 0:
		return c, fmt.Errorf("JWT: KeyTTL %v, Propagation %v, DefaultTTL %v or MaxTTL %v is negative", c.KeyTTL,
			c.Propagation, c.DefaultTTL, c.MaxTTL)
	case c.DefaultTTL < minTTL || c.MaxTTL < minTTL:
		return c, fmt.Errorf("JWT: DefaultTTL is %v and MaxTTL %v, but tokens carry whole seconds", c.DefaultTTL, c.MaxTTL)
	case c.DefaultTTL > c.MaxTTL:
		return c, fmt.Errorf("JWT: DefaultTTL %v is more than MaxTTL %v", c.DefaultTTL, c.MaxTTL)
	case max(c.Propagation, propagation) >= c.KeyTTL/2:
		return c, fmt.Errorf("JWT: Propagation %v does not fit into half of KeyTTL %v",
			max(c.Propagation, propagation), c.KeyTTL)
	case !slices.Contains(jwtAlgorithms, c.Algorithm):
		return c, fmt.Errorf("JWT: the algorithm %.64q is none of %v", c.Algorithm, jwtAlgorithms)
	case c.Issuer != "" && !slices.Contains([]string{"ES256", "ES384", "ES512", "RS256"}, c.Algorithm):
		return c, fmt.Errorf("JWT: the algorithm is %s; with an Issuer it is ES256, ES384, ES512 or RS256, as its key "+
			"set names no other", c.Algorithm)
	case c.Issuer != "":
		if err := jws.CheckIssuer(c.Issuer); err != nil {
			return c, fmt.Errorf("JWT: Issuer: %w", err)
		}
	}
	c.Propagation = max(c.Propagation, propagation)
	return c, nil
}

var jwtAlgorithms = []string{"ES256", "ES384", "ES512", "RS256", "RS384", "RS512", "PS256", "PS384", "PS512",
	"ML-DSA-44", "ML-DSA-65"}

// JWTRequest asks for a JWT-SVID. The caller of [Authority.SignJWT] vouches for everything in it: it is signed
// unchanged.
type JWTRequest struct {
	ID       spiffe.ID // the workload: in the authority's trust domain, with a path
	Audience []string  // the receiver of the token: exactly one

	TTL time.Duration // the lifetime from now; 0 or less means the default of [JWTConfig]

	// Caller, Method and Pod are as in [Request].
	Caller, Method string
	Pod            spiffe.Pod
}

// SignJWT signs a JWT-SVID with the active JWT key; its public key is in [Authority.Bundle]. Beside the standard's
// claims the token has a "jti", which is its serial number in the audit record. The token is a credential.
//
// The error is a [*SignError], or wraps the cause of ctx's end. Its kind is [ErrNoJWT] without Config.JWT, and
// [spiffe.ErrNotReady] while an authority distributes its first key.
func (a *Authority) SignJWT(ctx context.Context, r JWTRequest) (string, error) {
	if ctx.Err() != nil {
		return "", signCanceled(ctx, r.ID)
	}
	if err := a.checkJWT(&r); err != nil {
		return "", refusal(err, r.ID)
	}
	var token string
	err := a.issue(ctx, rotation.Token, r.ID, r.Caller, r.TTL, func(g *grant) (i *Issuance, err error) {
		token, i, err = a.signToken(g, &r)
		return i, err
	})
	if err != nil {
		return "", err
	}
	return token, nil
}

func (a *Authority) signToken(g *grant, r *JWTRequest) (token string, i *Issuance, err error) {
	issuer, err := jwtsvid.NewIssuer(a.cfg.TrustDomain, g.key.ID, g.key.Secret(), &jwtsvid.IssuerOptions{
		Algorithm: g.key.Algorithm, Issuer: a.cfg.JWT.Issuer,
		Now: func() time.Time { return g.now },
	})
	if err != nil {
		return "", nil, err
	}
	jti, ttl := rotation.RandomID(), g.notAfter.Sub(g.now).Truncate(time.Second)
	token, err = issuer.Issue(jwtsvid.Request{ID: r.ID, Audience: r.Audience, Lifetime: ttl,
		Claims: map[string]any{"jti": jti}})
	sum := sha256.Sum256([]byte(token))
	issued := time.Unix(g.now.Unix(), 0).UTC()
	return token, &Issuance{
		Time: g.now.Round(0), Kind: "jwt-svid", Serial: jti, ID: r.ID, Audience: slices.Clone(r.Audience),
		NotBefore: issued, NotAfter: issued.Add(ttl), Issuer: g.key.ID, Fingerprint: hex.EncodeToString(sum[:]),
		Caller: r.Caller, Method: r.Method, Pod: r.Pod,
	}, err
}

// IssueJWTSVID is [Authority.SignJWT] with the default lifetime, for a caller that is the workload id itself. It
// makes an Authority the issuer of a Workload API server: no audience, or too many, gives an error that wraps
// [io/fs.ErrInvalid].
func (a *Authority) IssueJWTSVID(ctx context.Context, id spiffe.ID, audience []string) (token string, err error) {
	return a.SignJWT(ctx, JWTRequest{ID: id, Audience: audience})
}

// checkJWT checks the request and fills in the default lifetime. Its error is a SignError.
func (a *Authority) checkJWT(r *JWTRequest) error {
	if a.cfg.JWT == nil {
		return refused(ErrNoJWT, "the CA has no key for them")
	}
	if err := a.checkID(r.ID); err != nil {
		return err
	}
	switch {
	case len(r.Audience) == 0 || slices.Contains(r.Audience, ""):
		return refused(ErrIdentity, "%w: the audience is missing or empty: say whom the token is for", fs.ErrInvalid)
	case len(r.Audience) > 1:
		return refused(ErrIdentity, "%w: %d audiences; ask for one token for each, as this CA "+
			"signs none for several", fs.ErrInvalid, len(r.Audience))
	}
	r.Caller = cmp.Or(r.Caller, r.ID.String())
	if r.TTL <= 0 {
		r.TTL = a.cfg.JWT.DefaultTTL
	}
	return checkTTL(r.TTL, a.cfg.JWT.MaxTTL)
}
