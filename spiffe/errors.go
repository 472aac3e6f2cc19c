package spiffe

import (
	"errors"
	"fmt"

	"github.com/svidkit/svidkit/internal/certpem"
)

// ParseError says where a name breaks the rules of SPIFFE-ID.
type ParseError struct {
	What   string // "ID", "trust domain" or "path segment"
	Input  string // what was given
	Offset int    // the first byte of Input that breaks the rule
	Rule   string // the rule's id, as in testdata and the conformance table, such as "ID-8"
	Reason string // the rule in words
}

func (e *ParseError) Error() string {
	in, cut := e.Input, ""
	if len(in) > 128 {
		in, cut = in[:128], "…" // an error must not carry 2 KiB of hostile input into every log line
	}
	return fmt.Sprintf("spiffe: invalid %s %q%s at byte %d: %s (%s)", e.What, in, cut, e.Offset, e.Reason, e.Rule)
}

// Sentinels that callers can test with [errors.Is].
var (
	// ErrZero says that a zero ID or TrustDomain was used where a valid one is needed.
	ErrZero = errors.New("zero value")

	// ErrUnknownTrustDomain says that there is no bundle for a trust domain.
	ErrUnknownTrustDomain = errors.New("no trust bundle for this trust domain")

	// ErrNoAuthority says that the trust domain's bundle has no X.509 authority, so that nothing of
	// that domain can be trusted (X5-38, BND-10).
	ErrNoAuthority = errors.New("the trust bundle has no X.509 authority")

	// ErrDenied says that a verified peer is not allowed by the policy.
	ErrDenied = errors.New("not allowed by policy")

	// ErrTooLarge says that input is over a documented limit and was refused before it was parsed.
	ErrTooLarge = certpem.ErrTooLarge
)

func errZero(what string) error { return fmt.Errorf("spiffe: invalid %s: %w", what, ErrZero) }
