package jwtsvid

import (
	"cmp"
	"context"
	"crypto"
	"crypto/ecdsa"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/internal/tokens/token"
	"github.com/svidkit/svidkit/spiffe"
)

// maxTrials is how many keys are tried for a token that names none: enough for any rotation, and a bound on the
// cost of a hostile token.
const maxTrials = 16

// ValidatorOptions are the choices of a [Validator] that have a default.
type ValidatorOptions struct {
	// Leeway is how long a token is accepted after its "exp" and before its "nbf", for clocks that
	// disagree: from 0 to two minutes. Nil means one minute.
	Leeway *time.Duration

	// Now gives the time to validate at. Nil means time.Now. It must be safe for concurrent use.
	Now func() time.Time

	// Algorithms are the kinds of keys whose tokens are accepted. The zero value is the default, without ML-DSA.
	Algorithms spiffe.Algorithms
}

// Validator decides whether a token proves an identity. It is safe for concurrent use.
type Validator struct {
	check    *token.Checker[*Verified]
	audience []string // nil for an agent
	allowed  spiffe.Algorithms
}

// NewValidator returns a Validator that takes the key for each token from bundles, and only from the bundle of the
// trust domain that the token's own ID names. It accepts tokens for one of the values in audience: the names of this
// service, compared byte for byte; most have one. There is no way to accept every audience: a token for another
// receiver, presented here, was stolen or passed on. The options may be nil.
//
// The Validator remembers up to 1,000 verified tokens of at most 8 KiB, so that a repeated token costs no signature
// check. It asks the source for each token, remembered or not, so that a removed key is distrusted at once. A
// remembered token counts only while the source returns the same *spiffe.Bundle, so a source should not make a new
// one for each call.
func NewValidator(bundles spiffe.BundleSource, audience []string, opts *ValidatorOptions) (*Validator, error) {
	if err := checkAudience(audience); err != nil {
		return nil, fmt.Errorf("jwtsvid: new validator: %w; name this service as its clients do", err)
	}
	return newValidator(bundles, slices.Clone(audience), opts)
}

// NewAgentValidator returns a Validator for an agent, which validates tokens on behalf of its workloads, each for
// the audience that the workload names: see [Validator.ValidateJWTSVID]. It has no audience of its own, so Validate
// refuses every token, and [Middleware] refuses the Validator. Otherwise it is as from [NewValidator].
func NewAgentValidator(bundles spiffe.BundleSource, opts *ValidatorOptions) (*Validator, error) {
	return newValidator(bundles, nil, opts)
}

func newValidator(bundles spiffe.BundleSource, audience []string, opts *ValidatorOptions) (*Validator, error) {
	o := *cmp.Or(opts, &ValidatorOptions{})
	check, err := token.NewChecker[*Verified](kind, bundles, o.Leeway, o.Now)
	if err != nil {
		return nil, fmt.Errorf("jwtsvid: new validator: %w", err)
	}
	return &Validator{check, audience, o.Algorithms}, nil
}

// Validate verifies a token and returns the proof. The checks come in this order, and the error is the first
// failure:
//
//  1. The form: three parts of canonical base64url, at most 16 KiB.
//  2. The header: a known algorithm before all else; then nothing but "alg", "kid" and "typ".
//  3. The payload: one JSON object; "sub" is a SPIFFE ID.
//  4. The bundle of that ID's trust domain.
//  5. The key in it that "kid" names or, without "kid", the keys that fit the algorithm.
//  6. The signature.
//  7. No "cnf", then "aud", then "exp", then "nbf". A token with "cnf" is bound to a key of its holder and is not a
//     JWT-SVID: nothing here could prove the holder.
//
// "iat" and all other claims are ignored; "jti" is not tracked, and a token may be presented any number of times
// until it expires. An ID without a path is valid: it names no workload, and a [spiffe.Policy] refuses it unless it
// lists that ID.
//
// The error never carries the token; see [ErrExpired] and the other reasons.
func (v *Validator) Validate(token string) (*Verified, error) {
	var audience []string
	if v != nil {
		audience = v.audience
	}
	p, e := v.validate(token, audience)
	if e != nil {
		return nil, e
	}
	return p, nil
}

// ValidateJWTSVID validates a token for the given audience, instead of the Validator's own, and returns its ID and
// all its claims, with numbers as float64. It lets a Validator serve the Workload API of an agent, on behalf of the
// workload that gives the audience.
func (v *Validator) ValidateJWTSVID(
	_ context.Context, audience, token string,
) (id spiffe.ID, claims map[string]any, err error) {
	p, e := v.validate(token, []string{audience})
	if e != nil {
		return spiffe.ID{}, nil, e
	}
	payload, err := p.payload()
	if err == nil {
		err = json.Unmarshal(payload, &claims)
	}
	return p.ID(), claims, err
}

var errNotMade = errors.New("the Validator was not made by NewValidator")

func (v *Validator) validate(text string, audience []string) (*Verified, *token.Error) {
	if v == nil || v.check == nil {
		return nil, &token.Error{Kind: kind, Reason: token.BundleSource, Err: errNotMade}
	}
	p, known, e := v.check.Recall(text)
	var b *spiffe.Bundle
	if e == nil && !known {
		p, b, e = v.verify(text)
	}
	if e == nil {
		e = v.judge(&p.claims, audience)
	}
	if e != nil {
		if p != nil {
			e.ID = p.claims.ID
		}
		return nil, e
	}
	if !known {
		v.check.Keep(p.token(), p, b, p.claims.Expires.At)
	}
	return p, nil
}

// verify checks all but the claims that depend on the audience and the time, and returns the bundle that holds the
// key.
func (v *Validator) verify(text string) (*Verified, *spiffe.Bundle, *token.Error) {
	s, claims, e := parse(text)
	if e != nil {
		return nil, nil, e
	}
	text = strings.Clone(text)               // text may be a small part of something large
	claims.Confirmation = jws.Confirmation{} // shares memory with the payload
	id := claims.ID.String()
	p := &Verified{
		redacted: redact.New(id, slog.String("id", id), slog.Time("expires", claims.Expires.At)),
		claims:   claims, token: func() string { return text },
	}
	b, e := v.check.Bundle(claims.ID.TrustDomain())
	if e == nil {
		e = verifySignature(s, b, v.allowed)
	}
	return p, b, e
}

// verifySignature finds the key in b and checks the signature.
func verifySignature(s *token.Signed, b *spiffe.Bundle, allowed spiffe.Algorithms) *token.Error {
	if s.HasKeyID {
		key, ok := b.JWTAuthority(s.KeyID)
		switch {
		case !ok:
			return noKey(b, "JWT-8", "the bundle has no JWT key with the ID %q", token.Clip(s.KeyID, token.MaxQuoted))
		case !s.Algorithm.Fits(key):
			return kind.Refuse("unknown key", "JWT-27", "the key with the ID %q is not one for %v",
				token.Clip(s.KeyID, token.MaxQuoted), s.Algorithm)
		}
		return verifyWith(s, key, allowed)
	}
	var fit []crypto.PublicKey
	for _, key := range b.JWTAuthorities() {
		if s.Algorithm.Fits(key) {
			fit = append(fit, key)
		}
	}
	switch {
	case len(fit) == 0:
		return noKey(b, "JWT-27", "the bundle has no JWT key for %v", s.Algorithm)
	case len(fit) > maxTrials:
		return kind.Refuse("unknown key", "JWT-7", "the token names no key, and %d keys in the bundle fit, "+
			"more than the %d that are tried; issue tokens with \"kid\"",
			len(fit), maxTrials)
	}
	var e *token.Error
	for _, key := range fit {
		if e = verifyWith(s, key, allowed); e == nil {
			return nil
		}
	}
	return e
}

// noKey returns an error with this text, or says that b has no key for JWT-SVIDs at all.
func noKey(b *spiffe.Bundle, rule, format string, arg any) *token.Error {
	for range b.JWTAuthorities() {
		return kind.Refuse("unknown key", rule, format, arg)
	}
	return kind.Refuse("unknown key", "JWT-31", "the trust domain's bundle has no JWT keys, so it issues no JWT-SVIDs")
}

func verifyWith(s *token.Signed, key crypto.PublicKey, allowed spiffe.Algorithms) *token.Error {
	if k, ok := key.(*ecdsa.PublicKey); ok {
		if size := 2 * jws.CurveSize(k.Curve); len(s.Signature) != size {
			return kind.Refuse("signature", "JWT-28", "the signature has %d bytes; %v has R and S in %d",
				len(s.Signature), s.Algorithm, size)
		}
	}
	if err := s.Verify(key, allowed); err != nil {
		return &token.Error{Kind: kind, Reason: "signature", Rule: "JWT-26", Err: err}
	}
	return nil
}

// judge checks the claims of a token whose signature is good.
func (v *Validator) judge(c *token.Claims, audience []string) *token.Error {
	if c.Bound {
		return kind.Refuse("binding", "",
			`"cnf" binds it to a key, so that it is no bearer token, which a JWT-SVID is`)
	}
	if e := audienceFault(c); e != nil {
		return e
	}
	if !slices.ContainsFunc(c.Audience, func(a string) bool { return slices.Contains(audience, a) }) {
		return kind.Refuse(token.Audience, "JWT-13", "it is for %s, and this is %s", quote(c.Audience),
			quote(audience))
	}
	if e := expiryFault(c); e != nil {
		return e
	}
	if e := v.check.InTime(kind, c.Expires.At, c.NotBefore.At, v.check.Now()); e != nil {
		return e
	}
	if c.NotBefore.Present && !c.NotBefore.Number {
		return kind.Refuse("not yet valid", "JWT-22", `"nbf" is not a number`)
	}
	return nil
}

// Verified is proof that a token was validated: its signature, its audience and its time. Only a
// [Validator] makes one, so a function that takes a *Verified cannot be called with an unproven name. It
// never changes. The zero Verified proves nothing: its ID is the zero ID.
//
// A token is a bearer credential, so Verified neither returns nor prints it: it prints as its ID, and in
// package log/slog as a group of "id" and "expires".
type Verified struct {
	redacted
	claims token.Claims
	token  func() string // a func, because no printer looks into one
}

// ID returns the ID that was proved.
func (p *Verified) ID() spiffe.ID { return p.claims.ID }

// Audience returns all values of "aud", in a new slice. It has at least one of the Validator's.
func (p *Verified) Audience() []string { return slices.Clone(p.claims.Audience) }

// Expires returns "exp", without leeway: the proof counts for nothing later. It may end sooner, when the
// key leaves the bundle.
func (p *Verified) Expires() time.Time { return p.claims.Expires.At }

// Claim decodes the claim with this name into the value that into points to, as package encoding/json does, and
// reports whether there is such a claim. Names are case-sensitive (RFC 7519 section 10.1.1). Only the trust domain of
// the ID vouches for claims: "admin" there is not "admin" here.
func (p *Verified) Claim(name string, into any) (ok bool, err error) {
	payload, err := p.payload()
	if err == nil {
		ok, err = token.DecodeClaim(payload, name, into)
	}
	if err != nil {
		return false, fmt.Errorf("jwtsvid: claim %q of %q: %w", name,
			token.Clip(p.ID().String(), token.MaxInError), err)
	}
	return ok, nil
}

// payload decodes the payload again.
func (p *Verified) payload() ([]byte, error) {
	if p.token == nil {
		return nil, errors.New("nothing was verified")
	}
	return base64.RawURLEncoding.DecodeString(strings.Split(p.token(), ".")[1])
}
