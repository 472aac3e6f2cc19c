package jwtsvid

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/svidkit/svidkit/spiffe"
)

// Reason is why a token is refused, for code to branch on. The reasons are in the order of the
// checks: a token with several faults is refused for the first of them.
type Reason int

// The reasons.
const (
	// ReasonNoToken says that there is nothing to validate: no "authorization" value with the scheme
	// Bearer, or more than one value. Only [Validator.ValidateHeader] gives it.
	ReasonNoToken Reason = iota + 1

	// ReasonMalformed says that the token is longer than [MaxSize], is not three parts of strict
	// base64url, or that its header or payload is not one JSON object without duplicate members.
	ReasonMalformed

	// ReasonAlgorithm says that "alg" is missing or not one of the nine that JWT-SVID allows.
	ReasonAlgorithm

	// ReasonHeader says that the header has a member that does not belong there, or a bad "kid" or "typ".
	ReasonHeader

	// ReasonSubject says that "sub" is missing or not a SPIFFE ID. Err wraps the [*spiffe.ParseError].
	ReasonSubject

	// ReasonTrustDomain says that there is no bundle for the trust domain of "sub". Err wraps
	// [spiffe.ErrUnknownTrustDomain].
	ReasonTrustDomain

	// ReasonBundleSource says that the bundle source failed, and nothing about the token: this is the
	// validator's own trouble, and the client may come back. Err wraps the source's error.
	ReasonBundleSource

	// ReasonKey says that the bundle has no key that the token could be signed with: none of that ID,
	// none that fits "alg", or none for JWT-SVIDs at all.
	ReasonKey

	// ReasonSignature says that the signature is not that of the key.
	ReasonSignature

	// ReasonAudience says that "aud" is missing, malformed, or does not name this validator.
	ReasonAudience

	// ReasonExpired says that "exp" is missing, not a number, or over.
	ReasonExpired

	// ReasonNotYetValid says that "nbf" is not a number or lies in the future.
	ReasonNotYetValid
)

var reasonText = [...]string{
	ReasonNoToken:      "no token",
	ReasonMalformed:    "malformed",
	ReasonAlgorithm:    "algorithm",
	ReasonHeader:       "header",
	ReasonSubject:      "subject",
	ReasonTrustDomain:  "unknown trust domain",
	ReasonBundleSource: "bundle source",
	ReasonKey:          "unknown key",
	ReasonSignature:    "signature",
	ReasonAudience:     "audience",
	ReasonExpired:      "expired",
	ReasonNotYetValid:  "not yet valid",
}

// String returns the reason in words, such as "unknown trust domain".
func (r Reason) String() string {
	if r < ReasonNoToken || r > ReasonNotYetValid {
		return fmt.Sprintf("Reason(%d)", int(r))
	}
	return reasonText[r]
}

// Error says why a token is refused. It never carries the token: the most that it shows of one is a
// claim or a key ID, quoted and cut.
type Error struct {
	Reason Reason
	ID     spiffe.ID // what the token claims, unproven; zero if it did not come to that
	Rule   string    // the broken rule's id, such as "JWT-13"; empty if none says it
	Err    error     // the reason in detail; it wraps what Reason says
}

// Error names who the token claims to be of, the reason and the rule.
func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString("jwtsvid: token")
	if !e.ID.IsZero() {
		fmt.Fprintf(&b, " of %q", clip(e.ID.String(), maxInError))
	}
	b.WriteString(": " + e.Reason.String())
	if e.Err != nil {
		b.WriteString(": " + clip(strings.TrimPrefix(e.Err.Error(), "spiffe: "), maxInError))
	}
	if e.Rule != "" {
		b.WriteString(" (" + e.Rule + ")")
	}
	return b.String()
}

// Unwrap returns e.Err.
func (e *Error) Unwrap() error { return e.Err }

func refuse(r Reason, rule, format string, args ...any) *Error {
	return &Error{Reason: r, Rule: rule, Err: fmt.Errorf(format, args...)}
}

// How much of what a stranger sent goes into an error, in bytes.
const (
	maxInError = 512
	maxQuoted  = 64 // of a single value
)

// clip cuts s to at most n bytes, at the border of a character, and shows that it did.
func clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n] + "…"
}

// quote lists a few values for an error.
func quote(values []string) string {
	const most = 3
	var b strings.Builder
	for i, v := range values {
		if i == most {
			fmt.Fprintf(&b, " and %d more", len(values)-most)
			break
		}
		if i > 0 {
			b.WriteString(", ")
		}
		fmt.Fprintf(&b, "%q", clip(v, maxQuoted))
	}
	return b.String()
}
