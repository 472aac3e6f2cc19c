package spiffe

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/svidkit/svidkit/internal/certs/certpem"
	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/internal/retry"
)

// ParseError says how input breaks the format of an ID, a trust domain name, a policy, a bundle
// document, a bundle map, or an X.509-SVID.
type ParseError struct {
	What   string // the kind of input, such as "ID", "policy", "X.509-SVID" or `bundle of "example.org"`
	Input  string // the wrong name or part of a policy; empty for documents and certificates
	Offset int    // the first wrong byte of the input; -1 for a certificate
	Rule   string // the id of the rule in CONFORMANCE.md and testdata, such as "ID-8"; empty if none applies
	Reason string // the rule in words
	Err    error  // the cause, or nil
}

// Error shows the first 128 bytes of Input and at most 256 bytes of Err, as both may be hostile.
func (e *ParseError) Error() string {
	var b strings.Builder
	b.WriteString("spiffe: invalid " + e.What)
	if e.Input != "" {
		b.WriteString(" " + short(e.Input))
	}
	if e.Offset >= 0 {
		fmt.Fprintf(&b, " at byte %d", e.Offset)
	}
	b.WriteString(": " + e.Reason)
	if e.Err != nil {
		b.WriteString(": " + redact.Clip(inner(e.Err), 256))
	}
	return b.String()
}

// Unwrap returns e.Err.
func (e *ParseError) Unwrap() error { return e.Err }

// Sentinels that callers can test with [errors.Is].
var (
	// ErrNotReady says that there is nothing to return yet: a source has no identity or bundle so far, or only
	// expired ones; files were not read or written yet; a CA cannot sign for the moment. The error around it holds
	// the cause of the last failure. A later attempt may succeed.
	//
	// Any error, including one from a caller's own CA or source, may say more by a method Retryable() (after
	// time.Duration, ok bool): whether another attempt may help, and how long to wait before it; 0 means unknown.
	// The method speaks for all errors that its error wraps. Where an error wraps several, a permanent failure wins
	// over a temporary one, and the longest wait over none. All packages plan their retries by it.
	ErrNotReady = retry.ErrNotReady

	// ErrZero says that a zero ID, TrustDomain or Policy was used where a valid one is needed.
	ErrZero = errors.New("zero value")

	// ErrUnknownTrustDomain says that there is no bundle for a trust domain.
	ErrUnknownTrustDomain = errors.New("no trust bundle for this trust domain")

	// ErrNoAuthority says that the trust domain's bundle has no X.509 authority, so that no peer of that
	// domain can be verified (X509-SVID section 5.1).
	ErrNoAuthority = errors.New("the trust bundle has no X.509 authority")

	// ErrDenied says that a verified peer is not allowed by the policy.
	ErrDenied = errors.New("not allowed by policy")

	// ErrTooLarge says that input is over a documented limit and was refused before it was parsed.
	ErrTooLarge = certpem.ErrTooLarge
)

func errZero(what string) error { return fmt.Errorf("spiffe: invalid %s: %w", what, ErrZero) }

// maxInError is how many bytes of a peer's input go into an error.
const maxInError = 512

// short quotes s for an error and cuts it to 128 bytes.
func short(s string) string { return strconv.Quote(redact.Clip(s, 128)) }

// inner returns the text of an error of this package without the package name, for use inside another error.
func inner(err error) string { return strings.TrimPrefix(err.Error(), "spiffe: ") }
