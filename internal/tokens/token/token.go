// Package token has the parts that all kinds of signed tokens share: JWT-SVIDs and WIT-SVIDs, the tokens of other
// issuers in package authn/jwt, and the identity documents of package authn/athenz. These are the error, the strict
// form of a token and its claims, the checks of signature, bundle and time, the cache of verified tokens, signing,
// and helpers for HTTP clients that present tokens. Each kind's package has its own rules.
//
// Package jws parses tokens, crypto verifies them, and go-jose signs them.
package token

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/internal/retry"
	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/spiffe"
)

// MaxSize is the longest token in bytes that is read or issued.
const MaxSize = jws.MaxSize

// Reason is the reason for refusing a token, in a word or two. It is an error, so that [errors.Is] finds it in an
// [Error].
type Reason string

func (r Reason) Error() string { return string(r) }

// Reasons that code branches on. All others are declared where they are used.
const (
	NoToken      Reason = "no token"
	Malformed    Reason = "malformed"
	BundleSource Reason = "bundle source"
	Audience     Reason = "audience"
	Expired      Reason = "expired"
	Busy         Reason = "busy"
	Denied       Reason = "denied"
)

// ErrUnavailable matches every Error with the reason BundleSource or Busy.
var ErrUnavailable = errors.New("not now")

// Error is a refusal of a token, a proof or a request. It never contains a token, only quoted and cut claims and key
// IDs. Programs see its Reason, through the sentinels of their package, and Err.
type Error struct {
	*Kind
	Reason Reason
	ID     spiffe.ID // the claim of the token, unproven; zero if it was not read
	Rule   string    // the id of the broken rule, for tests
	Err    error     // the reason in detail
}

// Error names the kind of token, the ID that it claims, and the reason.
func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString(e.Package + ": " + e.What)
	if !e.ID.IsZero() {
		fmt.Fprintf(&b, " of %q", Clip(e.ID.String(), MaxInError))
	}
	b.WriteString(": " + string(e.Reason))
	if e.Err != nil {
		b.WriteString(": " + Clip(strings.TrimPrefix(e.Err.Error(), "spiffe: "), MaxInError))
	}
	return b.String()
}

// Unwrap returns the reason and the error in detail.
func (e *Error) Unwrap() []error { return []error{e.Reason, e.Err} }

// Is reports whether target is ErrUnavailable and the same token may be accepted later.
func (e *Error) Is(target error) bool {
	_, ok := e.Retryable()
	return ok && target == ErrUnavailable
}

var _ retry.Error = (*Error)(nil)

// Retryable reports whether the error says nothing about the token, so that the same token may be accepted later. It
// returns no wait.
func (e *Error) Retryable() (after time.Duration, ok bool) {
	return 0, e.Reason == BundleSource || e.Reason == Busy
}

// RuleID returns the ID of the broken rule, or "". Programs reach it through an interface.
func (e *Error) RuleID() string { return e.Rule }

// Kind is a kind of token or proof: its words for errors, and the IDs of its rules for tests.
type Kind struct {
	Package string // "jwtsvid", "witsvid", …
	What    string // "token", "proof", …

	Form, Algorithm, Subject, Bundle, Expires, NotBefore string
}

// Refuse returns an Error with a text.
func (k *Kind) Refuse(r Reason, rule, format string, args ...any) *Error {
	return &Error{Kind: k, Reason: r, Rule: rule, Err: fmt.Errorf(format, args...)}
}

// Limits on the bytes of a peer's input in an error.
const (
	MaxInError = 512
	MaxQuoted  = 64 // of a single value
)

// Clip is [redact.Clip].
func Clip(s string, n int) string { return redact.Clip(s, n) }
