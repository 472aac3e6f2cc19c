package witsvid

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/svidkit/svidkit/spiffe"
)

// Reason is why a token, a proof or a message is refused, for code to branch on.
type Reason int

// The reasons.
const (
	// ReasonMissing says that there is no token, a token without a proof, or one of them twice.
	ReasonMissing Reason = iota + 1

	// ReasonMisplaced says that a token was sent where it must not be: without TLS, or in the field
	// Authorization.
	ReasonMisplaced

	// ReasonMalformed says that a token or proof is longer than [MaxSize], is not three parts of strict
	// base64url, or is not made of JSON objects without duplicate members; or that a header field of a
	// message signature cannot be read.
	ReasonMalformed

	// ReasonAlgorithm says that "alg" is missing, not one of the nine, or not that of the confirmed key.
	ReasonAlgorithm

	// ReasonHeader says that "kid" or "typ" is missing or wrong, or that there is a "crit".
	ReasonHeader

	// ReasonClaim says that a claim, or a parameter of a message signature, is missing, malformed, or must
	// not be there.
	ReasonClaim

	// ReasonSubject says that "sub" is missing or not a SPIFFE ID. Err wraps the [*spiffe.ParseError].
	ReasonSubject

	// ReasonConfirmation says that "cnf" holds no public key that a proof can be made with.
	ReasonConfirmation

	// ReasonTrustDomain says that there is no bundle for the trust domain of "sub". Err wraps
	// [spiffe.ErrUnknownTrustDomain].
	ReasonTrustDomain

	// ReasonBundleSource says that the bundle source failed, and nothing about the token: this is the
	// validator's own trouble, and the client may come back. Err wraps the source's error.
	ReasonBundleSource

	// ReasonKey says that the bundle has no WIT key of that ID, none that fits "alg", or none at all. A
	// bundle has WIT keys only if [spiffe.ParseBundleWIT] was asked for them.
	ReasonKey

	// ReasonSignature says that a signature is not that of the key.
	ReasonSignature

	// ReasonExpired says that a token or proof is over.
	ReasonExpired

	// ReasonNotYetValid says that "nbf" or "created" lies in the future.
	ReasonNotYetValid

	// ReasonLifetime says that a token or proof lasts longer than is accepted here.
	ReasonLifetime

	// ReasonAudience says that a proof was made for another receiver or another target.
	ReasonAudience

	// ReasonBinding says that a proof belongs to another token or message, or does not cover what it has
	// to: another token in the request, a header field, the body.
	ReasonBinding

	// ReasonTooLarge says that a body is too large to be checked here. Err wraps [spiffe.ErrTooLarge].
	ReasonTooLarge

	// ReasonReplay says that a proof was used before.
	ReasonReplay

	// ReasonBusy says that more proofs were used than can be remembered, so that nobody can tell whether
	// this one was used before. The client may come back.
	ReasonBusy

	// ReasonDenied says that the proof is good and the policy does not allow the ID. Err wraps
	// [spiffe.ErrDenied].
	ReasonDenied
)

var reasonText = [...]string{
	ReasonMissing:      "missing",
	ReasonMisplaced:    "misplaced",
	ReasonMalformed:    "malformed",
	ReasonAlgorithm:    "algorithm",
	ReasonHeader:       "header",
	ReasonClaim:        "claim",
	ReasonSubject:      "subject",
	ReasonConfirmation: "confirmation",
	ReasonTrustDomain:  "unknown trust domain",
	ReasonBundleSource: "bundle source",
	ReasonKey:          "unknown key",
	ReasonSignature:    "signature",
	ReasonExpired:      "expired",
	ReasonNotYetValid:  "not yet valid",
	ReasonLifetime:     "lifetime",
	ReasonAudience:     "audience",
	ReasonBinding:      "binding",
	ReasonTooLarge:     "too large",
	ReasonReplay:       "replay",
	ReasonBusy:         "busy",
	ReasonDenied:       "denied",
}

// String returns the reason in words, such as "unknown trust domain".
func (r Reason) String() string {
	if r < ReasonMissing || r > ReasonDenied {
		return fmt.Sprintf("Reason(%d)", int(r))
	}
	return reasonText[r]
}

// Error says why a token, a proof or a message is refused. It never carries a token or a proof: the
// most that it shows of one is a claim or a key ID, quoted and cut.
type Error struct {
	What   string // "token", "proof", "message signature", "request" or "response"
	Reason Reason
	ID     spiffe.ID // what the token claims, unproven; zero if it did not come to that
	Rule   string    // the broken rule's id, such as "WIT-12"; empty if none says it
	Err    error     // the reason in detail; it wraps what Reason says
}

// Error names what is refused, who the token claims to be of, the reason and the rule.
func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString("witsvid: " + e.What)
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

// The values of [Error.What].
const (
	whatToken     = "token"
	whatProof     = "proof"
	whatSignature = "message signature"
	whatRequest   = "request"
	whatResponse  = "response"
)

func refuse(what string, r Reason, rule, format string, args ...any) *Error {
	return &Error{What: what, Reason: r, Rule: rule, Err: fmt.Errorf(format, args...)}
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
