package ca

import (
	"cmp"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
)

// ErrNoJWT says that the authority signs no JWT-SVIDs; see [Config.JWT].
var ErrNoJWT = errors.New("no JWT-SVIDs are signed here")

// JWTConfig configures the JWT-SVIDs of an [Authority]. Zero means the default that is named here.
type JWTConfig struct {
	// Algorithm is the value of "alg" in the tokens: ES256, ES384, ES512, RS256, RS384, RS512,
	// PS256, PS384 or PS512; empty means ES256. RSA keys have 2048 bits. Another algorithm counts
	// for the next key.
	Algorithm string

	// KeyTTL is how long a key signs before Run replaces it; 0 means 30 days. It is more than twice
	// Propagation.
	KeyTTL time.Duration

	DefaultTTL time.Duration // the life of a token whose request names none; 0 means 5 minutes, or MaxTTL if that is less
	MaxTTL     time.Duration // the longest life that may be asked for; 0 means an hour

	// WideAudience permits tokens that are good for more than one receiver; see
	// [jwtsvid.IssuerOptions].
	WideAudience bool
}

func (c JWTConfig) withDefaults(propagation time.Duration) (JWTConfig, error) {
	c.Algorithm = cmp.Or(c.Algorithm, "ES256")
	c.KeyTTL = cmp.Or(c.KeyTTL, 30*24*time.Hour)
	c.MaxTTL = cmp.Or(c.MaxTTL, time.Hour)
	c.DefaultTTL = cmp.Or(c.DefaultTTL, min(jwtsvid.DefaultLifetime, c.MaxTTL))
	switch {
	case c.KeyTTL < 0 || c.DefaultTTL < 0 || c.MaxTTL < 0:
		return c, fmt.Errorf("ca: invalid Config: JWT: KeyTTL %v, DefaultTTL %v or MaxTTL %v is negative", c.KeyTTL, c.DefaultTTL, c.MaxTTL)
	case c.DefaultTTL < minTTL || c.MaxTTL < minTTL:
		return c, fmt.Errorf("ca: invalid Config: JWT: DefaultTTL is %v and MaxTTL %v, but tokens carry whole seconds", c.DefaultTTL, c.MaxTTL)
	case c.DefaultTTL > c.MaxTTL:
		return c, fmt.Errorf("ca: invalid Config: JWT: DefaultTTL %v is more than MaxTTL %v", c.DefaultTTL, c.MaxTTL)
	case propagation >= c.KeyTTL/2:
		return c, fmt.Errorf("ca: invalid Config: JWT: Propagation %v does not fit into half of KeyTTL %v", propagation, c.KeyTTL)
	case !slices.Contains(jwtAlgorithms, c.Algorithm):
		return c, fmt.Errorf("ca: invalid Config: JWT: the algorithm %.64q is none of %v", c.Algorithm, jwtAlgorithms)
	}
	return c, nil
}

var jwtAlgorithms = []string{"ES256", "ES384", "ES512", "RS256", "RS384", "RS512", "PS256", "PS384", "PS512"}

func (a *Authority) wideAudience() bool { return a.cfg.JWT != nil && a.cfg.JWT.WideAudience }

// newJWTKey makes a key for tokens.
func (a *Authority) newJWTKey() (key, error) {
	alg := a.cfg.JWT.Algorithm
	var signer crypto.Signer
	var err error
	switch alg {
	case "ES256":
		signer, err = pki.NewKey(pki.ECDSAP256)
	case "ES384":
		signer, err = pki.NewKey(pki.ECDSAP384)
	case "ES512":
		signer, err = ecdsa.GenerateKey(elliptic.P521(), rand.Reader)
	default:
		signer, err = pki.NewKey(pki.RSA2048)
	}
	if err != nil {
		return key{}, fmt.Errorf("ca: new JWT key of %s: %w", a.cfg.TrustDomain, err)
	}
	return key{id: randomID(), algorithm: alg, public: signer.Public(), secret: seal(signer), terms: a.cfg.jwtTerms()}, nil
}

// tokenIssuer returns what signs tokens with k, which say that they are issued at now.
func (a *Authority) tokenIssuer(k key, now time.Time) (*jwtsvid.Issuer, error) {
	return jwtsvid.NewIssuer(a.cfg.TrustDomain, k.id, k.secret(), &jwtsvid.IssuerOptions{
		Algorithm: k.algorithm, WideAudience: a.wideAudience(), Now: func() time.Time { return now },
	})
}

// JWTRequest asks for a JWT-SVID. Everything in it is the word of the caller of [Authority.SignJWT],
// and is signed as it stands.
type JWTRequest struct {
	ID       spiffe.ID // the workload: in the authority's trust domain, with a path
	Audience []string  // whom the token is for; more than one needs [JWTConfig.WideAudience]

	TTL time.Duration // the lifetime from now; 0 or less means the default of [JWTConfig]

	// Caller and Method are as in [Request].
	Caller, Method string
}

// SignJWT signs a JWT-SVID with the active JWT key; the public half is in [Authority.Bundle]. Beside
// what the standard asks for, the token has a claim "jti", which is its serial number in the audit
// record. The token is a credential.
//
// The error is a [*SignError], or wraps the cause of ctx's end. Its kind is [ErrNoJWT] without
// Config.JWT, and [ErrNotReady] while the first key of an authority that had none before is being
// distributed.
func (a *Authority) SignJWT(ctx context.Context, r JWTRequest) (string, error) {
	if ctx.Err() != nil {
		return "", signCanceled(ctx, r.ID)
	}
	if kind, err := a.checkJWT(&r); err != nil {
		return "", &SignError{Kind: kind, ID: r.ID, Err: err}
	}
	release, err := a.acquire(ctx, r.ID, cmp.Or(r.Caller, r.ID.String()))
	if err != nil {
		return "", err
	}
	defer release()
	g, err := a.reserve(ctx, reservation{id: r.ID, ttl: r.TTL, jwt: true})
	if err != nil {
		return "", err
	}
	ttl := g.notAfter.Sub(g.now).Truncate(time.Second)
	issuer, err := a.tokenIssuer(g.key, g.now)
	if err != nil {
		return "", &SignError{Kind: ErrGeneration, ID: r.ID, Err: err}
	}
	jti := randomID()
	token, err := issuer.Issue(jwtsvid.Request{ID: r.ID, Audience: r.Audience, Lifetime: ttl, Claims: map[string]any{"jti": jti}})
	if err != nil {
		return "", &SignError{Kind: ErrGeneration, ID: r.ID, Err: err}
	}
	if a.cfg.Auditor != nil {
		sum := sha256.Sum256([]byte(token))
		issued := time.Unix(g.now.Unix(), 0).UTC()
		err := a.audit(ctx, &Issuance{
			Time: g.now.Round(0), Kind: KindJWT, Serial: jti, ID: r.ID, Audience: slices.Clone(r.Audience),
			NotBefore: issued, NotAfter: issued.Add(ttl), Issuer: g.key.id, Fingerprint: hex.EncodeToString(sum[:]),
			Caller: cmp.Or(r.Caller, r.ID.String()), Method: r.Method,
		})
		if err != nil {
			return "", err
		}
	}
	return token, nil
}

// checkJWT tests what was asked for and fills in the default lifetime.
func (a *Authority) checkJWT(r *JWTRequest) (kind, err error) {
	if a.cfg.JWT == nil {
		return ErrNoJWT, errors.New("set Config.JWT")
	}
	if err := a.checkID(r.ID); err != nil {
		return ErrIdentity, err
	}
	switch {
	case len(r.Audience) == 0 || slices.Contains(r.Audience, ""):
		return ErrAudience, errors.New("say whom the token is for (JWT-12)")
	case len(r.Audience) > 1 && !a.cfg.JWT.WideAudience:
		return ErrAudience, fmt.Errorf("%d receivers; ask for one token for each, or set WideAudience (JWT-16)", len(r.Audience))
	}
	if r.TTL <= 0 {
		r.TTL = a.cfg.JWT.DefaultTTL
	}
	return checkTTL(r.TTL, a.cfg.JWT.MaxTTL)
}
