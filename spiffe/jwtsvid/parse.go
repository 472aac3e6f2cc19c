package jwtsvid

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/internal/tokens/token"
	"github.com/svidkit/svidkit/spiffe"
)

// kind has the words for errors about tokens, and the ids of the rules that package token checks.
var kind = &token.Kind{
	Package: "jwtsvid", What: "token",
	Form: "JWT-26", Algorithm: "JWT-4", Subject: "JWT-11", Bundle: "JWT-29", Expires: "JWT-19", NotBefore: "JWT-22",
}

// Reasons for refusing a token that a program may test with [errors.Is]. The text of the error has the reason in
// detail and the ID that the token claims, cut to a bounded length, and never the token. The error for a trust
// domain without a bundle wraps [spiffe.ErrUnknownTrustDomain]. Its method RuleID() string returns the rule in
// CONFORMANCE.md of package spiffe that the token breaks, or nothing.
var (
	// ErrAudience says that "aud" is missing, malformed, or does not name this validator: the token was
	// issued for another receiver.
	ErrAudience error = token.Audience

	// ErrExpired says that "exp" is missing, not a number, or over.
	ErrExpired error = token.Expired

	// ErrUnavailable says that the bundle source failed, so that the token was not checked. The client may
	// try again later. Such an error says so, too: see [spiffe.ErrNotReady].
	ErrUnavailable = token.ErrUnavailable
)

// Unverified has the claims of a token whose signature was not checked: anyone can write such a token. A client can
// inspect its own token with it. It must never decide whether a caller is allowed; see [Validator]. It does not
// hold the token.
type Unverified struct {
	ID       spiffe.ID // "sub"
	Audience []string  // "aud", at least one
	Expires  time.Time // "exp"
	KeyID    string    // "kid" in the header; empty if there is none
}

// ParseUnverified reads a token without verifying its signature, audience or time. It checks the form of
// the header and of the claims "sub", "aud" and "exp" as a [Validator] does.
func ParseUnverified(token string) (*Unverified, error) {
	signed, claims, e := parse(token)
	if e == nil {
		e = audienceFault(&claims)
	}
	if e == nil {
		e = expiryFault(&claims)
	}
	if e != nil {
		e.ID = claims.ID
		return nil, e
	}
	return &Unverified{ID: claims.ID, Audience: claims.Audience, Expires: claims.Expires.At, KeyID: signed.KeyID}, nil
}

// parse makes the checks that need only the token: the parts, the header, the form of the payload, "sub".
func parse(text string) (*token.Signed, token.Claims, *token.Error) {
	s, e := kind.Parse(text)
	if e == nil {
		e = headerFault(s)
	} else if f, ok := errors.AsType[*jws.Error](e.Err); ok && f.Code == jws.Size {
		e.Rule = ""
	} else if ok && f.Code == jws.Shape {
		e.Rule = "JWT-1"
		if strings.Count(text, ".") == 4 { // an encrypted token
			e.Rule = "JWT-2"
		}
	}
	if e != nil {
		return nil, token.Claims{}, e
	}
	claims, e := kind.ReadClaims(s.Payload)
	return s, claims, e
}

// headerFault checks the header beyond the algorithm, which was checked first.
func headerFault(s *token.Signed) *token.Error {
	switch {
	case len(s.Extra) > 0:
		return kind.Refuse("header", "JWT-6", "%q does not belong in a header",
			token.Clip(s.Extra[0], token.MaxQuoted))
	case s.NotText == "kid":
		return kind.Refuse("header", "JWT-7", `"kid" is not a string`)
	case s.HasType && s.Type != "JWT" && s.Type != "JOSE":
		return kind.Refuse("header", "JWT-10", `"typ" is there and neither "JWT" nor "JOSE"`)
	}
	return nil
}

// audienceFault checks the form of "aud".
func audienceFault(c *token.Claims) *token.Error {
	switch {
	case c.Audience == nil && !c.AudienceOK:
		return kind.Refuse(token.Audience, "JWT-12", `"aud" is missing, or neither a string nor an array of strings`)
	case !c.AudienceOK:
		return kind.Refuse(token.Audience, "JWT-14", `"aud" has a value that is not a string`)
	case len(c.Audience) == 0:
		return kind.Refuse(token.Audience, "JWT-12", `"aud" has no value`)
	}
	return nil
}

// expiryFault checks the form of "exp".
func expiryFault(c *token.Claims) *token.Error {
	if !c.Expires.Number {
		return kind.Refuse(token.Expired, "JWT-18", `"exp" is missing or not a number`)
	}
	return nil
}

// checkAudience refuses a list of audiences that no token can have.
func checkAudience(audience []string) error {
	if len(audience) == 0 {
		return errors.New("no audience")
	}
	for i, a := range audience {
		switch {
		case a == "":
			return errors.New("an audience is empty")
		case !utf8.ValidString(a):
			return errors.New("an audience is not UTF-8")
		case slices.Contains(audience[:i], a):
			return fmt.Errorf("the audience %q is there twice", token.Clip(a, token.MaxQuoted))
		}
	}
	return nil
}

// quote lists values for an error.
func quote(values []string) string {
	return token.Clip(strings.Trim(fmt.Sprintf("%q", values), "[]"), 3*token.MaxQuoted)
}
