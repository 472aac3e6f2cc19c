package witsvid

import (
	"crypto"
	"slices"
	"time"

	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/internal/tokens/token"
	"github.com/svidkit/svidkit/spiffe"
)

// The words for errors about tokens and proofs, and the ids of the rules that package token checks.
var (
	tokens = &token.Kind{
		Package: "witsvid", What: "token",
		Form: "WIT-1", Algorithm: "WIT-6", Subject: "WIT-10", Bundle: "WIT-53", Expires: "WIT-16", NotBefore: "WIT-18",
	}
	proofs = &token.Kind{
		Package: "witsvid", What: "proof",
		Form: "WPT-2", Algorithm: "WPT-3", Expires: "WPT-6", NotBefore: "WPT-6",
	}
	requests = &token.Kind{Package: "witsvid", What: "request"}
)

// ErrUnavailable says that nothing was judged, because the bundle source failed or there are more used proofs than
// can be remembered. The client may try again later. Such an error says so, too: see [spiffe.ErrNotReady].
//
// Any other error of a [Validator] says why the token or proof is refused, and names the ID that the token
// claims, cut to a bounded length. It wraps [spiffe.ErrUnknownTrustDomain] for a trust domain without a bundle,
// and [spiffe.ErrDenied] for a good proof whose ID the policy does not allow.
var ErrUnavailable = token.ErrUnavailable

// The media types of RFC 7515's "typ".
const (
	tokenType = "wit+jwt"
	proofType = "wpt+jwt"
)

// Unverified has the claims of a token whose signature was not checked: anyone can write such a token. A client can
// inspect its own token with it. It must never decide whether a caller is allowed; see [Validator]. It does not hold
// the token.
type Unverified struct {
	ID      spiffe.ID // "sub"
	Expires time.Time // "exp"
	KeyID   string    // "kid" in the header
}

// ParseUnverified reads a token without verifying its signature, its time or any proof. It checks the
// form of the header and of the claims as a [Validator] does.
func ParseUnverified(token string) (*Unverified, error) {
	h, s, e := parseToken(token)
	if e != nil {
		return nil, e
	}
	return &Unverified{ID: h.id, Expires: h.expires, KeyID: s.KeyID}, nil
}

// holder is the holder of a token, according to the token.
type holder struct {
	id                 spiffe.ID
	expires, notBefore time.Time     // notBefore is zero if there is none
	alg                jws.Algorithm // "alg" in the "jwk" in "cnf"
	key                crypto.PublicKey
}

// parseToken makes the checks that need only the token: the parts, the header, the payload.
func parseToken(text string) (*holder, *token.Signed, *token.Error) {
	s, e := parseSigned(tokens, text)
	if e == nil && s.KeyID == "" {
		e = tokens.Refuse("header", "WIT-2", `"kid" is missing or empty`)
	}
	if e == nil {
		e = typeFault(tokens, s, tokenType, "WIT-5", "WIT-9")
	}
	if e != nil {
		return nil, nil, e
	}
	c, e := tokens.ReadClaims(s.Payload)
	if e != nil {
		return nil, nil, e
	}
	h, e := holderOf(&c)
	if e != nil {
		e.ID = c.ID
		return nil, nil, e
	}
	return h, s, nil
}

// parseSigned checks the form of a token or proof.
func parseSigned(k *token.Kind, text string) (*token.Signed, *token.Error) {
	s, e := k.Parse(text)
	if e == nil && s.NotText != "" {
		e = k.Refuse(token.Malformed, k.Form, "the header's %q is not a string", s.NotText)
	}
	return s, e
}

// typeFault checks "typ", and that the header has no extension. The package understands none, and "b64", which
// changes the signed bytes, must not come without "crit" (RFC 7797 section 6).
func typeFault(k *token.Kind, s *token.Signed, typ, typeRule, extensionRule string) *token.Error {
	switch {
	case s.Type != typ:
		return k.Refuse("header", typeRule, `"typ" is not %q`, typ)
	case slices.Contains(s.Extra, "crit"), slices.Contains(s.Extra, "b64"):
		return k.Refuse("header", extensionRule, `there is a "crit" or "b64", and no extension is understood`)
	}
	return nil
}

// holderOf judges the claims. "iat", "jti", "iss" and others are ignored.
func holderOf(c *token.Claims) (*holder, *token.Error) {
	switch {
	case c.HasAudience:
		return nil, tokens.Refuse("claim", "WIT-25", `there is an "aud", so it is no WIT-SVID`)
	case !c.Expires.Number:
		return nil, tokens.Refuse("claim", "WIT-16", `"exp" is missing or not a number`)
	case c.NotBefore.Present && !c.NotBefore.Number:
		return nil, tokens.Refuse("claim", "WIT-18", `"nbf" is not a number`)
	}
	confirm := func(rule, format string, args ...any) (*holder, *token.Error) {
		return nil, tokens.Refuse("confirmation", rule, format, args...)
	}
	cnf := &c.Confirmation
	alg, ok := jws.ParseAlgorithm(string(cnf.Alg))
	switch {
	case !cnf.There:
		return confirm("WIT-11", `"cnf" is missing or has no "jwk"`)
	case !ok:
		return confirm("WIT-12", `the "alg" in "cnf" is missing or none of ES, RS and PS with 256, 384 and 512`)
	case cnf.Secret:
		return confirm("WIT-13", `the key in "cnf" is not public: every reader of the token has the key`)
	}
	key, reason := cnf.JWK.PublicKey()
	switch {
	case reason != "":
		return confirm("WIT-11", `the key in "cnf": %s`, reason)
	case !alg.Fits(key):
		return confirm("WIT-14", `the key in "cnf" is not one for %v`, alg)
	}
	return &holder{c.ID, c.Expires.At, c.NotBefore.At, alg, key}, nil
}
