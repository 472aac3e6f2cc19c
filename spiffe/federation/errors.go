package federation

import (
	"errors"
	"fmt"
	"strings"
	"unicode"

	"github.com/svidkit/svidkit/spiffe"
)

// Errors that a [FetchError] wraps, for errors.Is.
var (
	// ErrNotAuthenticated says that the endpoint did not authenticate as its profile asks. Nothing that
	// it sent was read.
	ErrNotAuthenticated = errors.New("endpoint not authenticated")

	// ErrRedirect says that the endpoint redirected to a URL that is not allowed, too often, or while
	// redirects are switched off.
	ErrRedirect = errors.New("redirect refused")

	// ErrSequence says that the bundle's sequence number does not follow that of the one in force: it is
	// lower, missing, or too high to be plausible. The bundle is [Status].Refused.
	ErrSequence = errors.New("does not follow the known bundle")
)

// FetchError is a failed fetch. The bundle in force stays.
//
// The cause wraps [ErrNotAuthenticated], with a [*spiffe.VerifyError], a
// tls.CertificateVerificationError or the error of a [spiffe.BundleSource]; [ErrRedirect];
// [ErrSequence]; [context.DeadlineExceeded] for a fetch that was not done in time or was silent for
// too long; [spiffe.ErrTooLarge]; a [*spiffe.ParseError] for what is not a bundle document; the cause
// of the caller's context; or an error of the network. A Status other than 200 is a cause of its own.
type FetchError struct {
	TrustDomain spiffe.TrustDomain
	URL         string // of the last request, without its query
	Status      int    // the HTTP status, if one was received
	Err         error
}

// Error names the trust domain, the URL and the cause. The cause may quote what the endpoint sent, such as
// the names in a certificate that failed to verify, so it is cut to 512 bytes, and characters that do not
// print are replaced.
func (e *FetchError) Error() string {
	why := fmt.Sprint(e.Err)
	if len(why) > 512 {
		why = strings.ToValidUTF8(why[:512], "") + "…"
	}
	why = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return unicode.ReplacementChar
		}
		return r
	}, why)
	return fmt.Sprintf("federation: bundle of %q from %s: %s", e.TrustDomain, e.URL, why)
}

// Unwrap returns e.Err.
func (e *FetchError) Unwrap() error { return e.Err }
