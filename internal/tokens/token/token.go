// Package token holds what JWT-SVIDs and WIT-SVIDs have in common: the error, the form of a token, its
// claims, the bundle and the time that it is judged with, the memory of what was verified, issuing, and
// the care that a transport takes of it. Packages jwtsvid and witsvid add the rules of their standard.
//
// go-jose parses, verifies and signs. Package jws runs before it and refuses what go-jose lets pass.
package token

import (
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/spiffe"
)

// MaxSize is the longest token in bytes that is read or issued.
const MaxSize = jws.MaxSize

// Reason is why a token is refused, in a word or two. It is an error, so that [errors.Is] finds it in an
// [Error].
type Reason string

func (r Reason) Error() string { return string(r) }

// The reasons that code branches on. All others stand where they are given.
const (
	NoToken      Reason = "no token"
	Malformed    Reason = "malformed"
	BundleSource Reason = "bundle source"
	Audience     Reason = "audience"
	Expired      Reason = "expired"
	Busy         Reason = "busy"
	Denied       Reason = "denied"
)

// ErrUnavailable is in every Error with the reason BundleSource or Busy.
var ErrUnavailable = errors.New("not now")

// Error says why a token, a proof or a request is refused. It never carries a token: the most that it
// shows of one is a claim or a key ID, quoted and cut. Programs see its Reason, through the sentinels of
// their package, and Err.
type Error struct {
	*Kind
	Reason Reason
	ID     spiffe.ID // what the token claims, unproven; zero if that was not read
	Rule   string    // the id of the broken rule, for tests
	Err    error     // the reason in detail
}

// Error names what is refused, the ID that the token claims, and the reason.
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

// Is reports whether target is ErrUnavailable and e says so.
func (e *Error) Is(target error) bool {
	_, ok := e.Retryable()
	return ok && target == ErrUnavailable
}

// Retryable reports whether the error says nothing about the token, so that the same token may be
// accepted later. No time is known.
func (e *Error) Retryable() (after time.Duration, ok bool) {
	return 0, e.Reason == BundleSource || e.Reason == Busy
}

// RuleID returns the id of the broken rule, or nothing, for programs, which reach it by an interface.
func (e *Error) RuleID() string { return e.Rule }

// Kind is a kind of token or proof: its words for errors, and the ids of its rules for tests.
type Kind struct {
	Package string // "jwtsvid" or "witsvid"
	What    string // "token", "proof", …

	Form, Algorithm, Subject, Bundle, Expires, NotBefore string
}

// Refuse returns an Error with a text.
func (k *Kind) Refuse(r Reason, rule, format string, args ...any) *Error {
	return &Error{Kind: k, Reason: r, Rule: rule, Err: fmt.Errorf(format, args...)}
}

// How much of what a peer sent goes into an error, in bytes.
const (
	MaxInError = 512
	MaxQuoted  = 64 // of a single value
)

// Clip cuts s to at most n bytes, between two characters, and shows that it did.
func Clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n] + "…"
}
